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

enum { LAYERS = 5, EXPERTS = 24, SLICES = 5, REGIONS = 3 };

static uint8_t *arena_of[REGIONS];
static uint64_t start[REGIONS][LAYERS * EXPERTS + 1]; /* slices */
static uint32_t generations[LAYERS];

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
            for (uint64_t i = start[r][q]; i < start[r][q + 1]; i++, slice++) {
                uint64_t *words = (uint64_t *)(void *)(arena_of[r] + i * SLICE_BYTES);
                for (int w = 0; w < SLICE_BYTES / 8; w++)
                    words[w] = pattern(layer, e, slice, generations[layer]) + (uint64_t)w;
            }
    }
}

static inline void arena(void *user, uint32_t index, void **address, uint64_t *bytes)
{
    (void)user;
    *address = arena_of[index];
    *bytes = start[index][LAYERS * EXPERTS] * SLICE_BYTES;
}

static inline uint64_t place(void *user, uint64_t layer, uint64_t e, uint32_t index,
                             const uint8_t **address)
{
    const uint64_t q = layer * EXPERTS + e;
    (void)user;
    *address = arena_of[index] + start[index][q] * SLICE_BYTES;
    return start[index][q + 1] - start[index][q];
}

static inline bool present(void *user, uint64_t layer, uint64_t e)
{
    (void)user;
    return layer != 1 || e != 7;
}

static inline uint32_t generation(void *user, uint64_t layer)
{
    (void)user;
    return generations[layer];
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
            start[r][q + 1] = start[r][q] + slices_in(q, r);
    /* at pages: a driver pins no part of one twice */
    for (uint32_t r = 0; r < REGIONS; r++)
        arena_of[r] =
            aligned_alloc(4096, (start[r][LAYERS * EXPERTS] * SLICE_BYTES + 4096) / 4096 * 4096);
    for (uint64_t layer = 0; layer < LAYERS; layer++)
        paint(layer);
}

static inline void patterns_free(void)
{
    for (uint32_t r = 0; r < REGIONS; r++)
        free(arena_of[r]);
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
