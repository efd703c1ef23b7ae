/*
 * gpu_error.h - CUDA error numbers in the project's terms. The one place where they are mapped.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_ERROR_H
#define NUMOE_GPU_ERROR_H

enum gpu_fault {
    GPU_FAULT_NONE,
    GPU_FAULT_MEMORY, /* not enough of it: ask for less and go on */
    GPU_FAULT_CALL,   /* this call was refused; the device and its work are as before */
    GPU_FAULT_DEAD    /* sticky: every later call in this process fails too */
};

enum gpu_fault gpu_fault_of(int code);

/* 0, -ENOMEM, -EINVAL, -ENODEV, -ENOTSUP or, for what kills the device, -EIO. */
int gpu_errno_of(int code);

#endif
