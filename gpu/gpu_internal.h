/*
 * gpu_internal.h - an open device, as the files of this folder see it.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_INTERNAL_H
#define NUMOE_GPU_INTERNAL_H

#include <stdatomic.h>

#include "gpu_error.h"
#include "gpu_ops.h"
#include "numoe_gpu.h"
#include "numoe_topo.h"

struct numoe_gpu {
    const struct gpu_ops *ops;
    void *device; /* of ops */
    bool backend; /* device is the backend's, to be closed with this */
    struct numoe_gpu_properties properties;
    struct numoe_log log;
    /* The CUDA error that made the device unusable; 0: none. Set once; where is written before,
     * by the one thread at a time that uses the device. */
    atomic_int dead;
    uint32_t forms;     /* bit f: the device has the form */
    uint32_t forms_off; /* bit f: it has failed, and is not used */
    struct numoe_gpu_tuning tuning;
    char where[128];
    bool marlin_checked; /* its repacking was compared with the reference on this device */
};

/* A device over any table of functions; no gate. ops and device stay the caller's. */
int gpu_wrap(const struct gpu_ops *ops, void *device, const struct numoe_gpu_properties *properties,
             const struct numoe_log *log, struct numoe_gpu **gpu);

/* The one place where a failed call is judged: 0, or the errno of code with error filled; a sticky
 * fault marks the device dead, a recoverable error is cleared. what: "copying layer 3". */
int gpu_judge(struct numoe_gpu *gpu, int code, struct numoe_error *error, const char *what, ...)
    NUMOE_PRINTF(4, 5);

/* After a failed call: what was queued on the stream is past, or the device is lost; for what is
 * not known to be past still uses memory. A wait that is refused is tried again. */
void gpu_still(struct numoe_gpu *gpu, void *stream, const char *what);

/* Make the device current in this thread, unless it is dead. */
int gpu_enter(struct numoe_gpu *gpu, struct numoe_error *error);

/* The form of a call, by the device's table. */
enum numoe_cuda_form gpu_choose_form(const struct numoe_gpu *gpu, const struct numoe_cuda_ffn *ffn);

/* The forms that a device has. */
uint32_t gpu_forms_there(const struct gpu_ops *ops, void *device);

/* Look for forms that compute wrong, and turn them off. Returns how many that leaves. */
uint32_t gpu_turn_off_forms(struct numoe_gpu *gpu);

/* Repacking to Marlin's layout gives the reference's bits on this device: looked at once. -ENOTSUP:
 * it does not */
int gpu_marlin_usable(struct numoe_gpu *gpu, struct numoe_error *error);

/* Compute random experts on the device and compare; rel_l2: the worst. */
int gpu_self_test(struct numoe_gpu *gpu, double *rel_l2, struct numoe_error *error);

#endif
