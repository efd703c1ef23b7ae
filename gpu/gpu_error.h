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

/* The codes of a driver that is missing or too old, and of a driver that shows no device. */
enum { GPU_CODE_DRIVER = 35, GPU_CODE_NO_DEVICE = 100 };

/*
 * 0
 * -ENOMEM   not enough memory of the device, or of the host to be pinned
 * -EIO      what kills the device
 * -ENODEV   no driver, no such device, or a system that is not ready
 * -ENOTSUP  no code for the device, or a feature that it lacks
 * -EPERM    the system does not allow it
 * -EAGAIN   not finished yet
 * -EINVAL   anything else
 */
int gpu_errno_of(int code);

#endif
