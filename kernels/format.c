/*
 * Number formats of weights as plans know them: what a slice of each takes in memory.
 *
 * Every format is tiles of 32 x 32 codes, two of them side by side, with the scales of groups of
 * 32 or 16 behind the codes (numoe_kernels.h draws MXFP4). Coarser scales are kept where they cost
 * least:
 *
 *     a block of 128 x 128   one float a tile, in a run behind the slice's tiles
 *     a row of gate or up    32 floats of each in the slice, as biases are
 *     a row of down          with the expert, as b2 is: the same for all of its slices
 *     a tensor               one cache line with the expert
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/checked.h"
#include "numoe_kernels.h"

#include <errno.h>
#include <string.h>

static const struct numoe_format_info formats[] = {
    {NUMOE_MXFP4, "mxfp4", "MXFP4", .code_bytes = 512, .scale_bytes = 32, .has_kernels = true},
    {NUMOE_MXFP8, "mxfp8", "MXFP8", .code_bytes = 1024, .scale_bytes = 32},
    {NUMOE_NVFP4, "nvfp4", "NVFP4", .code_bytes = 512, .scale_bytes = 64, .tensor_scales = true},
    {NUMOE_INT4_GROUP32, "int4", "INT4 group 32", .code_bytes = 512, .scale_bytes = 64},
    {NUMOE_FP8_BLOCK128, "fp8", "FP8 block 128", .code_bytes = 1024, .block_scales = true},
    {NUMOE_FP8_CHANNEL, "fp8-channel", "FP8 per channel", .code_bytes = 1024, .row_scales = true},
    {NUMOE_BF16_WEIGHTS, "bf16", "BF16", .code_bytes = 2048},
};

enum { FORMAT_COUNT = sizeof formats / sizeof formats[0] };

const struct numoe_format_info *numoe_format_at(size_t i)
{
    return i < FORMAT_COUNT ? &formats[i] : NULL;
}

const struct numoe_format_info *numoe_format_info(enum numoe_format format)
{
    for (size_t i = 0; i < FORMAT_COUNT; i++)
        if (formats[i].format == format)
            return &formats[i];
    return NULL;
}

const struct numoe_format_info *numoe_format_by_name(const char *name)
{
    for (size_t i = 0; i < FORMAT_COUNT; i++)
        if (!strcmp(formats[i].name, name))
            return &formats[i];
    return NULL;
}

int numoe_format_sizes(enum numoe_format format, uint64_t hidden, bool bias,
                       struct numoe_format_sizes *sizes)
{
    const struct numoe_format_info *f = numoe_format_info(format);
    const uint64_t row_bytes = NUMOE_TILE * sizeof(float);
    uint64_t tiles;

    /* no product below overflows: a tile takes less than 2^13 bytes */
    if (!f || hidden == 0 || hidden > INT64_MAX >> 14 ||
        !numoe_round_up_u64(hidden, NUMOE_TILE, &tiles))
        return -EINVAL;
    tiles /= NUMOE_TILE;
    *sizes = (struct numoe_format_sizes){
        .hidden_tiles = tiles,
        .pair_bytes = 2 * ((uint64_t)f->code_bytes + f->scale_bytes),
    };
    sizes->gate_up_bytes = tiles * sizes->pair_bytes;
    sizes->down_bytes = (tiles + 1) / 2 * sizes->pair_bytes;
    sizes->slice_bytes = sizes->gate_up_bytes + sizes->down_bytes;
    if (f->block_scales)
        sizes->slice_bytes +=
            (3 * tiles * sizeof(float) + NUMOE_ALIGNMENT - 1) / NUMOE_ALIGNMENT * NUMOE_ALIGNMENT;
    sizes->slice_bytes += 2 * row_bytes * (f->row_scales + (uint64_t)bias);
    sizes->expert_bytes = tiles * row_bytes * (f->row_scales + (uint64_t)bias) +
                          (f->tensor_scales ? NUMOE_ALIGNMENT : 0);
    return 0;
}
