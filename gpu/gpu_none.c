/* Built without CUDA: no device, and that reason. SPDX-License-Identifier: Apache-2.0 */
#include "gpu_backend.h"

const struct gpu_ops *gpu_backend_ops(void)
{
    return NULL;
}

const char *gpu_backend_images(void)
{
    return "";
}

const char *gpu_backend_text(int code)
{
    (void)code;
#ifdef NUMOE_CUDA_LEFT_OUT
    return "it was made with CUDA left out";
#else
    return "the CUDA toolkit was not there when it was made";
#endif
}

int gpu_backend_count(uint32_t *count)
{
    *count = 0;
    return GPU_NOT_BUILT;
}

int gpu_backend_describe(uint32_t index, struct numoe_gpu_properties *properties)
{
    (void)index;
    (void)properties;
    return GPU_NOT_BUILT;
}

int gpu_backend_open(uint32_t index, void **device)
{
    (void)index;
    (void)device;
    return GPU_NOT_BUILT;
}

void gpu_backend_close(void *device)
{
    (void)device;
}

int gpu_backend_load(void *device, uint64_t *need, int *ptx_version, const char **failed)
{
    (void)ptx_version;
    (void)device;
    (void)need;
    (void)failed;
    return GPU_NOT_BUILT;
}

int gpu_backend_ceilings(void *device, double *read_gbs, double *link_gbs, double *mma_gops)
{
    (void)device;
    (void)read_gbs;
    (void)link_gbs;
    (void)mma_gops;
    return GPU_NOT_BUILT;
}

int gpu_backend_time(void *device, void *stream, const struct numoe_cuda_ffn *calls, uint32_t count,
                     uint32_t repeat, double *ms)
{
    (void)device;
    (void)stream;
    (void)calls;
    (void)count;
    (void)repeat;
    (void)ms;
    return GPU_NOT_BUILT;
}
