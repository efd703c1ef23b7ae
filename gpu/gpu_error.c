/* CUDA error numbers. SPDX-License-Identifier: Apache-2.0 */
#include "gpu_error.h"

#include <errno.h>

/* Numbers of cudaError_t, which are part of CUDA's ABI. */
enum {
    INVALID_VALUE = 1,
    MEMORY_ALLOCATION = 2,
    INITIALIZATION = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    NO_BINARY = 209,
    ECC_UNCORRECTABLE = 214,
    PEER_UNSUPPORTED = 217,
    NVLINK_UNCORRECTABLE = 220,
    UNSUPPORTED_PTX = 222,
    CONTAINED = 226,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    OUT_OF_RESOURCES = 701,
    TIMEOUT = 702,
    CONTEXT_DESTROYED = 709,
    ASSERT = 710,
    HOST_ALREADY_REGISTERED = 712,
    HOST_NOT_REGISTERED = 713,
    STACK_ERROR = 714,
    ILLEGAL_INSTRUCTION = 715,
    MISALIGNED = 716,
    ADDRESS_SPACE = 717,
    INVALID_PC = 718,
    LAUNCH_FAILURE = 719,
    TENSOR_LEAK = 721,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    SYSTEM_NOT_READY = 802,
    MPS_TERMINATED = 810,
    EXTERNAL_DEVICE = 911,
    UNKNOWN = 999
};

enum gpu_fault gpu_fault_of(int code)
{
    switch (code) {
    case 0:
        return GPU_FAULT_NONE;
    case MEMORY_ALLOCATION:
        return GPU_FAULT_MEMORY;
    case ECC_UNCORRECTABLE:
    case NVLINK_UNCORRECTABLE:
    case CONTAINED:
    case ILLEGAL_ADDRESS:
    case TIMEOUT:
    case CONTEXT_DESTROYED:
    case ASSERT:
    case STACK_ERROR:
    case ILLEGAL_INSTRUCTION:
    case MISALIGNED:
    case ADDRESS_SPACE:
    case INVALID_PC:
    case LAUNCH_FAILURE:
    case TENSOR_LEAK:
    case MPS_TERMINATED:
    case EXTERNAL_DEVICE:
    case UNKNOWN:
        return GPU_FAULT_DEAD;
    default:
        return GPU_FAULT_CALL;
    }
}

int gpu_errno_of(int code)
{
    switch (gpu_fault_of(code)) {
    case GPU_FAULT_NONE:
        return 0;
    case GPU_FAULT_MEMORY:
        return -ENOMEM;
    case GPU_FAULT_DEAD:
        return -EIO;
    case GPU_FAULT_CALL:
        break;
    }
    switch (code) {
    case GPU_CODE_DRIVER:
    case GPU_CODE_NO_DEVICE:
    case INVALID_DEVICE:
    case INITIALIZATION:
    case SYSTEM_NOT_READY:
        return -ENODEV;
    case INVALID_IMAGE:
    case NO_BINARY:
    case UNSUPPORTED_PTX:
    case PEER_UNSUPPORTED:
    case NOT_SUPPORTED:
        return -ENOTSUP;
    case NOT_PERMITTED:
        return -EPERM;
    case NOT_READY:
        return -EAGAIN;
    default:
        return -EINVAL;
    }
}
