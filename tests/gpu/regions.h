/*
 * regions.h - experts whose slices lie in several regions of host memory, some in each, as a source
 * for models on devices. Whoever includes it has said LAYERS, EXPERTS, REGIONS and which expert of
 * layer 1 is ABSENT, and fills them.
 */
#ifndef NUMOE_TESTS_REGIONS_H
#define NUMOE_TESTS_REGIONS_H

#include "numoe_gpu.h"

static uint64_t slice_bytes;
static uint8_t *arenas[REGIONS];
static uint64_t starts[REGIONS][LAYERS * EXPERTS + 1]; /* slices */
static uint32_t generations[LAYERS];

/* Memory for what starts says. Pages of its own: a driver pins no part of one twice. */
static inline void region_make(uint32_t r)
{
    arenas[r] =
        aligned_alloc(4096, (starts[r][LAYERS * EXPERTS] * slice_bytes + 4096) / 4096 * 4096);
}

static inline void regions_free(void)
{
    for (uint32_t r = 0; r < REGIONS; r++)
        free(arenas[r]);
}

static inline void arena(void *user, uint32_t index, void **address, uint64_t *bytes)
{
    (void)user;
    *address = arenas[index];
    *bytes = starts[index][LAYERS * EXPERTS] * slice_bytes;
}

static inline uint64_t place(void *user, uint64_t layer, uint64_t expert, uint32_t index,
                             const uint8_t **address)
{
    const uint64_t q = layer * EXPERTS + expert;

    (void)user;
    *address = arenas[index] + starts[index][q] * slice_bytes;
    return starts[index][q + 1] - starts[index][q];
}

static inline bool present(void *user, uint64_t layer, uint64_t expert)
{
    (void)user;
    return layer != 1 || expert != ABSENT;
}

static inline uint32_t generation(void *user, uint64_t layer)
{
    (void)user;
    return generations[layer];
}

#endif
