/*
 * transfer_patterns.h - experts over three regions, each slice of which is filled with a pattern of
 * its own, which changes with its layer's generation. Whoever includes it says how long a slice is.
 */
#ifndef NUMOE_TESTS_TRANSFER_PATTERNS_H
#define NUMOE_TESTS_TRANSFER_PATTERNS_H

#include "../support/experts.h"
#include "gpu_model.h"

#ifndef SLICE_BYTES
#define SLICE_BYTES 128
#endif

enum { LAYERS = 5, EXPERTS = 24, SLICES = 5, REGIONS = 3, ABSENT = 7 };

#include "regions.h"

/* Slices of expert q in a region, some experts having none in some. */
static inline uint64_t slices_in(uint64_t q, uint32_t region)
{
    const uint64_t first = q % (SLICES + 1), second = first + q * 7 % (SLICES + 1 - first);
    return region == 0 ? first : region == 1 ? second - first : SLICES - second;
}

static inline uint64_t pattern(uint64_t layer, uint64_t e, uint64_t slice, uint64_t generation)
{
    return (((generation * LAYERS + layer) * EXPERTS + e) * SLICES + slice + 1) *
           0x9E3779B97F4A7C15u;
}

static inline void paint(uint64_t layer)
{
    for (uint64_t e = 0; e < EXPERTS; e++) {
        const uint64_t q = layer * EXPERTS + e;
        uint64_t slice = 0;
        for (uint32_t r = 0; r < REGIONS; r++)
            for (uint64_t i = starts[r][q]; i < starts[r][q + 1]; i++, slice++) {
                uint64_t *words = (uint64_t *)(void *)(arenas[r] + i * SLICE_BYTES);
                for (int w = 0; w < SLICE_BYTES / 8; w++)
                    words[w] = pattern(layer, e, slice, generations[layer]) + (uint64_t)w;
            }
    }
}

/* The words of a slice are those of its pattern. */
static inline bool has_pattern(const void *slice, uint64_t layer, uint64_t e, uint64_t number,
                               uint64_t of_generation)
{
    const uint64_t *words = slice, first = pattern(layer, e, number, of_generation);

    for (int w = 0; w < SLICE_BYTES / 8; w++)
        if (words[w] != first + (uint64_t)w)
            return false;
    return true;
}

static inline void patterns_make(void)
{
    for (uint64_t q = 0; q < LAYERS * EXPERTS; q++)
        for (uint32_t r = 0; r < REGIONS; r++)
            starts[r][q + 1] = starts[r][q] + slices_in(q, r);
    slice_bytes = SLICE_BYTES;
    for (uint32_t r = 0; r < REGIONS; r++)
        region_make(r);
    for (uint64_t layer = 0; layer < LAYERS; layer++)
        paint(layer);
}

static inline struct numoe_gpu_source patterns_source(void)
{
    return (struct numoe_gpu_source){
        .shape = {.hidden = 32, .hidden_tiles = 1, .bytes = SLICE_BYTES},
        .layers = LAYERS,
        .experts = EXPERTS,
        .slices = SLICES,
        .region_count = REGIONS,
        .arena = arena,
        .place = place,
        .present = present,
        .generation = generation,
    };
}

/* Ways through cells, window, chunks and staging, by a number. */
static inline struct numoe_gpu_model_options patterns_options(uint64_t seed)
{
    const uint64_t expert = SLICES * SLICE_BYTES;

    return (struct numoe_gpu_model_options){
        .stream = seed % 5 == 0,
        .cache_bytes = expert * (1 + seed * 13 % (LAYERS * EXPERTS)),
        .window_bytes = expert * (2 + seed % 50),
        .piece_bytes = 1 + seed % 3 * 500,
        .chunk_bytes = seed % 2 ? 4096 : 0,
        .ring_bytes = SLICE_BYTES << (7 + seed % 3),
        .no_pinning = seed % 4 == 3,
    };
}

#endif
