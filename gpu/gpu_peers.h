/*
 * gpu_peers.h - whether several devices copy from each other's memory.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_PEERS_H
#define NUMOE_GPU_PEERS_H

#include "gpu_internal.h"

/* Open every device's memory to every other, and compare what comes from there with what is there.
 * scratch: device memory of each, two halves of so many bytes. 0; -ENOTSUP: one of them cannot, or
 * what it copies is wrong; -ENOMEM, -EIO. Nothing is queued when this returns, if all devices live.
 */
int gpu_peers_open(struct numoe_gpu *const *gpus, uint32_t count, uint8_t *const *scratch,
                   uint64_t half, struct numoe_error *error);

#endif
