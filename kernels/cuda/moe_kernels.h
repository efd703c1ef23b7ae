/*
 * moe_kernels.h - the kernels of the expert FFN, each behind a function that launches it.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_MOE_KERNELS_H
#define NUMOE_MOE_KERNELS_H

#include "moe_call.cuh"

/* How kernels of a call are launched. */
struct launching {
    cudaStream_t stream;
    int multiprocessors;
    numoe_cuda_few few;
    bool overlap; /* a kernel may start before the one before has ended */
};

/* x laid out and entries sorted. */
cudaError_t launch_route(const call &c, const launching &how);
cudaError_t launch_combine(const call &c, const launching &how);
cudaError_t launch_few(const call &c, const launching &how);
cudaError_t launch_many(const call &c, bool down, const launching &how);
cudaError_t launch_wgmma(const call &c, bool down, const launching &how);

enum { FEW_KERNELS = 2, MANY_KERNELS = 4, WGMMA_KERNELS = 6 };

/* Which ring, from what describe_few says. */
numoe_cuda_few choose_few(const numoe_cuda_kernel_info *info);
/* For the current device; kernels of one form are side by side. */
size_t describe_few(numoe_cuda_kernel_info *info);
size_t describe_many(numoe_cuda_kernel_info *info);
size_t describe_wgmma(numoe_cuda_kernel_info *info);

/* Entries of a call that each block of the few-token form can sort by itself. */
uint32_t few_local_pairs();
/* Tokens of a call up to which that form sums parts itself. */
uint32_t few_fused_tokens();
/* What that form wants x times. */
float few_raise();

/* Dynamic shared memory that needs no opting in: 48 KiB less what a kernel has statically. */
enum { PLAIN_SHARED = 40 * 1024 };

template <class KERNEL, class ARGUMENT>
cudaError_t launch(KERNEL kernel, uint64_t blocks, int threads, int shared, bool overlap,
                   const ARGUMENT &c, cudaStream_t stream)
{
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};

    if (blocks > 0x7FFFFFFFu)
        return cudaErrorInvalidValue;
    if (shared > PLAIN_SHARED) {
        const cudaError_t e =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
        if (e)
            return e;
    }
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = static_cast<unsigned>(blocks);
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = overlap;
    return cudaLaunchKernelEx(&config, kernel, c);
}

template <class KERNEL>
void describe(KERNEL kernel, const char *name, int threads, int shared,
              numoe_cuda_kernel_info *info)
{
    cudaFuncAttributes a = {};

    *info = {};
    info->name = name;
    if (cudaFuncGetAttributes(&a, kernel) != cudaSuccess)
        return;
    if (shared > PLAIN_SHARED)
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    info->registers = a.numRegs;
    info->local_bytes = static_cast<int>(a.localSizeBytes);
    info->static_shared_bytes = static_cast<int>(a.sharedSizeBytes);
    info->dynamic_shared_bytes = shared;
    info->binary_version = a.binaryVersion;
    info->ptx_version = a.ptxVersion;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&info->blocks_an_sm, kernel, threads, shared);
}

#endif
