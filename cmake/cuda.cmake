# GPU support. NUMOE_CUDA=AUTO takes the toolkit when there is one; without it the same programs are
# built and say why no GPU is used. The runtime library is linked statically and opens the driver
# when it is first called, so nothing of CUDA is needed to start a program.
set(NUMOE_CUDA AUTO CACHE STRING "GPU support: AUTO (when the CUDA toolkit is found), ON or OFF")
set_property(CACHE NUMOE_CUDA PROPERTY STRINGS AUTO ON OFF)
option(NUMOE_CUDA_SANITIZE "GPU code whose order compute-sanitizer sees: for ./dev sanitize-gpu" OFF)
option(NUMOE_CUDA_FULL "GPU code for every supported architecture, not only for everyday ones" OFF)

set(NUMOE_HAVE_CUDA OFF)
set(NUMOE_CUDA_IMAGES "")
if(NUMOE_CUDA STREQUAL "AUTO" OR NUMOE_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  find_package(CUDAToolkit 12.0 QUIET)
  if(CMAKE_CUDA_COMPILER AND CUDAToolkit_FOUND)
    # 90: machine code; 80: PTX, which the driver compiles for what has no machine code here.
    set(architectures 90-real 80-virtual)
    if(NUMOE_CUDA_FULL)
      set(architectures 80 86-real 89-real 90-real)
      if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.8)
        list(APPEND architectures 100-real 120-real)
      endif()
    endif()
    set(CMAKE_CUDA_ARCHITECTURES ${architectures})
    set(CMAKE_CUDA_STANDARD 17)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    enable_language(CUDA)
    # Programs stay linked by the C compiler, which knows its own sanitizers.
    set(CMAKE_CUDA_LINKER_PREFERENCE 5)
    set(CMAKE_CUDA_LINKER_PREFERENCE_PROPAGATES 0)
    set(CMAKE_CUDA_IMPLICIT_LINK_LIBRARIES "")
    set(CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES "")
    set(NUMOE_HAVE_CUDA ON)
    # What the gate is told that this build holds: "90-real,80-virtual" and the like.
    list(JOIN architectures "," NUMOE_CUDA_IMAGES)
  elseif(NOT NUMOE_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "NUMOE_CUDA=${NUMOE_CUDA}, but no CUDA compiler and toolkit were found")
  endif()
endif()
message(STATUS "GPU support: ${NUMOE_HAVE_CUDA} ${NUMOE_CUDA_IMAGES}")

# The kernels' object files and what they need. Linked by the C compiler: they use no C++ library.
function(numoe_add_cuda)
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/kernels/cuda/*.cu)
  # What is written for one architecture is compiled for that alone.
  set(sources_sm90 ${sources})
  list(FILTER sources EXCLUDE REGEX "_sm90\\.cu$")
  list(FILTER sources_sm90 INCLUDE REGEX "_sm90\\.cu$")
  numoe_add_kernels(numoe_cuda ${sources})
  numoe_add_kernels(numoe_cuda_sm90 ${sources_sm90})
  set_target_properties(numoe_cuda_sm90 PROPERTIES CUDA_ARCHITECTURES 90a-real)
endfunction()

function(numoe_add_kernels target)
  add_library(${target} OBJECT ${ARGN})
  target_include_directories(${target} PRIVATE ${NUMOE_BASE_INCLUDE} kernels kernels/cuda)
  target_compile_definitions(${target} PRIVATE
    $<$<BOOL:${NUMOE_CUDA_SANITIZE}>:NUMOE_EVERY_LANE_ARRIVES>)
  # nvcc's launch stubs keep a function's address in a static: racing threads write the same.
  # Line numbers are for profilers, which the full build with all its images does not carry along.
  target_compile_options(${target} PRIVATE $<$<NOT:$<BOOL:${NUMOE_CUDA_FULL}>>:-lineinfo>
    $<$<VERSION_GREATER_EQUAL:${CUDAToolkit_VERSION},12.8>:--compress-mode=size>
    -Xcompiler=-fno-exceptions,-fno-rtti,-fno-threadsafe-statics,-Wall,-Wextra,-Wno-unused-parameter)
endfunction()
