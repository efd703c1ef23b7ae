/*
 * gpu_divide.h - which part of a layer each of several devices has: arithmetic, no device.
 *
 * Devices and regions (nodes' memory) fall into groups, and a group has its regions' slices of all
 * experts; the devices of a group divide the experts, each a range of them. One group of all is the
 * division by experts; groups of one device each are the division by slices.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_DIVIDE_H
#define NUMOE_GPU_DIVIDE_H

#include <stdbool.h>
#include <stdint.h>

#include "numoe_gpu.h"

struct gpu_division {
    uint32_t devices, groups;
    uint32_t group[NUMOE_GPU_MOST];                      /* of a device */
    uint32_t begin[NUMOE_GPU_MOST], end[NUMOE_GPU_MOST]; /* its experts: of its group's weight */
    uint32_t weight[NUMOE_GPU_MOST];                     /* of a group */
};

/*
 * Divide. weight: of each device, 1 or more; bytes: of each region; distance: [devices][regions],
 * 0: not known. region_group: [regions], filled.
 *
 * A region goes to the devices that are nearest to it; devices that are nearest to the same region
 * are one group. Where a distance is not known, a device is nearest to nothing, or a group's bytes
 * differ by more than an eighth from its weight's due, all are one group.
 */
void gpu_divide(uint32_t devices, const uint32_t *weight, uint32_t regions, const uint64_t *bytes,
                const uint32_t *distance, struct gpu_division *division, uint32_t *region_group);

/* The expert is the device's, among those of its group. The remainder moves with the layer. */
bool gpu_divide_has(const struct gpu_division *division, uint32_t device, uint64_t layer,
                    uint64_t expert, uint64_t experts);

#endif
