# What is installed: the library and its headers under include/numoe (so that <numoe.h> and its
# "base/..." are found with one -I), numoe.pc, the CMake package, and the command.
include(CMakePackageConfigHelpers)

install(TARGETS numoe EXPORT numoeTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS numoe_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES runtime/numoe.h gpu/numoe_gpu.h kernels/numoe_kernels.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/numoe)
install(FILES runtime/base/numoe_base.h runtime/base/numoe_types.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/numoe/base)

# numoe.pc finds its prefix from where it lies, so that an installed tree can be moved.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" OR IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
  set(NUMOE_PC_PREFIX "${CMAKE_INSTALL_PREFIX}")
  set(NUMOE_PC_LIBDIR "${CMAKE_INSTALL_FULL_LIBDIR}")
  set(NUMOE_PC_INCLUDEDIR "${CMAKE_INSTALL_FULL_INCLUDEDIR}")
else()
  file(RELATIVE_PATH up "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/prefix")
  string(REGEX REPLACE "/$" "" up "${up}")
  set(NUMOE_PC_PREFIX "\${pcfiledir}/${up}")
  set(NUMOE_PC_LIBDIR "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
  set(NUMOE_PC_INCLUDEDIR "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
configure_file(numoe.pc.in numoe.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/numoe.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

set(NUMOE_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/numoe)
configure_package_config_file(cmake/numoeConfig.cmake.in numoeConfig.cmake
  INSTALL_DESTINATION ${NUMOE_CMAKE_DIR})
write_basic_package_version_file(numoeConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/numoeConfig.cmake ${CMAKE_BINARY_DIR}/numoeConfigVersion.cmake
  DESTINATION ${NUMOE_CMAKE_DIR})
install(EXPORT numoeTargets NAMESPACE numoe:: DESTINATION ${NUMOE_CMAKE_DIR})
