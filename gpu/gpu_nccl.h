/*
 * gpu_nccl.h - NCCL, if this machine has it: opened when it is asked for, never linked.
 *
 * The library is "libnccl.so.2", or what NUMOE_NCCL in the environment names. Of its interface only
 * what has been the same since 2.4 is used. Its kernels wait for each other on the devices, so
 * nobody may wait for one device alone while they run: gpu_nccl_abort ends them.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_NCCL_H
#define NUMOE_GPU_NCCL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu_internal.h"

struct gpu_nccl {
    void *library; /* never closed: its threads may outlive communicators */
    void *comms[NUMOE_GPU_MOST];
    uint32_t count; /* 0: not usable */
    int version;    /* 22809 is 2.28.9 */
    struct gpu_nccl_calls {
        int (*get_version)(int *version);
        const char *(*get_error_string)(int result);
        int (*comm_init_all)(void **comms, int count, const int *devices);
        int (*comm_destroy)(void *comm);
        int (*comm_abort)(void *comm);
        int (*comm_get_async_error)(void *comm, int *result);
        int (*group_start)(void);
        int (*group_end)(void);
        int (*reduce)(const void *from, void *to, size_t count, int type, int op, int root,
                      void *comm, void *stream);
        int (*reduce_scatter)(const void *from, void *to, size_t count, int type, int op,
                              void *comm, void *stream);
    } calls;
};

/* A communicator of devices, CUDA's numbers. 0; -ENOENT: there is no library, or not all of it;
 * -EINVAL: a device is there twice; -EIO: NCCL failed. */
int gpu_nccl_make(struct gpu_nccl *nccl, const uint32_t *devices, uint32_t count,
                  struct numoe_error *error);

/*
 * Queue on every device's stream: to[i] = the sum over devices d of from[d][begin_i ..), of
 * counts[i] elements, begin_i being the sum of counts before. counts[i] may be 0. NCCL's own order
 * of adding. 0; -EIO
 */
int gpu_nccl_sum(struct gpu_nccl *nccl, const float *const *from, float *const *to,
                 const uint64_t *counts, void *const *streams, struct numoe_error *error);

/* What went wrong since, in NCCL's own threads. 0; -EIO */
int gpu_nccl_health(const struct gpu_nccl *nccl, struct numoe_error *error);

/* Ends what is queued, whoever it waits for; NCCL is not used any more. */
void gpu_nccl_abort(struct gpu_nccl *nccl);
/* Nothing is queued. */
void gpu_nccl_fini(struct gpu_nccl *nccl);

#endif
