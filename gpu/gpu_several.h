/*
 * gpu_several.h - a model on several devices: a model on each, of its part of every layer; or, for
 * engines, of all of it.
 *
 * No device ever waits for another's event: the host waits for all of them and sums what they
 * computed, or lets them (gpu_sum.h). So a device that is lost is an error of the call, and never a
 * stream that waits for ever.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_SEVERAL_H
#define NUMOE_GPU_SEVERAL_H

#include "gpu_divide.h"
#include "gpu_links.h"
#include "gpu_model.h"
#include "gpu_relay.h"
#include "gpu_sum.h"

/* HAS: slices of the expert are the part's; FIRST: the first one, with which its bias goes. */
enum gpu_several_has { GPU_SEVERAL_HAS = 1, GPU_SEVERAL_FIRST = 2 };

struct gpu_several_part {
    struct gpu_several *of;
    struct numoe_gpu_model *model;
    uint32_t index, regions;
    uint32_t *region; /* [regions]: the whole model's number */
    uint8_t *has;     /* [layers][experts] enum gpu_several_has */
    float *no_bias;   /* a row of zeros */
};

struct gpu_several {
    struct numoe_gpu_source source; /* of the whole */
    struct gpu_pinned pinned;       /* for all of them */
    struct gpu_division division;
    uint32_t *region_group;
    struct gpu_links links;
    struct gpu_sum sum;
    struct gpu_relay *relay; /* experts are whole on each device; NULL: parts are divided */
    enum numoe_gpu_sum way;  /* of the pass that runs */
    uint32_t count;
    struct gpu_several_part parts[NUMOE_GPU_MOST];
};

int gpu_several_begin(struct gpu_several *several, uint64_t layer,
                      const struct numoe_gpu_call *call, uint64_t first, uint64_t *tokens,
                      struct numoe_error *error);
int gpu_several_queue(struct gpu_several *several, const struct numoe_gpu_call *call,
                      struct numoe_error *error);
int gpu_several_finish(struct gpu_several *several, const struct numoe_gpu_call *call,
                       uint64_t *done, struct numoe_error *error);
void gpu_several_cancel(struct gpu_several *several);
/* An expert is held if every device that has slices of it holds them. */
void gpu_several_held(const struct gpu_several *several, uint64_t layer, uint8_t *held);
void gpu_several_report(const struct gpu_several *several, struct numoe_gpu_report *report);
void gpu_several_free(struct gpu_several *several);

#endif
