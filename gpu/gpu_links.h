/*
 * gpu_links.h - how fast several devices' links are while all of them copy.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_LINKS_H
#define NUMOE_GPU_LINKS_H

#include "gpu_internal.h"

struct gpu_links {
    double host_gbs[NUMOE_GPU_MOST]; /* from pinned memory; 0: not measured */
    double peer_gbs[NUMOE_GPU_MOST]; /* from the next device's memory; 0: not measured */
};

/* Measure links from host memory and, if peers are open to each other, those between devices. What
 * goes wrong with these is no error: they stay 0, and peer_error says why. */
int gpu_links_measure(struct numoe_gpu *const *gpus, uint32_t count, bool peers,
                      struct gpu_links *links, struct numoe_error *peer_error,
                      struct numoe_error *error);

/* The slowest of the copies from device to device. */
double gpu_links_slowest_peer(const struct gpu_links *links, uint32_t count);

/* 0: copies from device to device are so much faster than those from the host that what can come
 * either way comes from devices; -ENOTSUP: they are not, with both speeds. */
int gpu_links_compare(const struct gpu_links *links, uint32_t count, struct numoe_error *error);

#endif
