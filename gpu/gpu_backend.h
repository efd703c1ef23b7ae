/*
 * gpu_backend.h - what CUDA itself gives: gpu_cuda.c with the toolkit, gpu_none.c without.
 *
 * Functions return 0 or a CUDA error number; GPU_NOT_BUILT without the toolkit.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_BACKEND_H
#define NUMOE_GPU_BACKEND_H

#include "gpu_ops.h"
#include "numoe_gpu.h"

enum { GPU_NOT_BUILT = -1 };

const struct gpu_ops *gpu_backend_ops(void);
const char *gpu_backend_images(void);
const char *gpu_backend_text(int code);
int gpu_backend_count(uint32_t *count);
/* Everything but locality. */
int gpu_backend_describe(uint32_t index, struct numoe_gpu_properties *properties);
int gpu_backend_open(uint32_t index, void **device);
void gpu_backend_close(void *device);
/* Load each kernel; need: shared memory that the largest takes; ptx_version: 80 when the driver has
 * compiled compute_80 PTX. failed: its name, on error. */
int gpu_backend_load(void *device, uint64_t *need, int *ptx_version, const char **failed);

/* Measure reading device memory, copying pinned memory to it, and mma.sync. */
int gpu_backend_ceilings(void *device, double *read_gbs, double *link_gbs, double *mma_gops);
/* Capture the calls one after another in a graph and time `repeat` replays of it. */
int gpu_backend_time(void *device, void *stream, const struct numoe_cuda_ffn *calls, uint32_t count,
                     uint32_t repeat, double *ms);

#endif
