/*
 * gpu_cache.h - which experts stay in device memory. Bookkeeping only: no device, no copy.
 *
 * Memory is cells of one expert each. Every layer may hold so many cells; while it holds fewer, any
 * expert that is copied stays, and later one that is hotter than the coldest of its layer takes
 * that one's cell. Heat is how often an expert was asked for, older calls counting less.
 *
 * A cell that is given is not held until it is settled: between the two its weights are on their
 * way, and giving up (gpu_cache_drop) leaves nothing behind.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_CACHE_H
#define NUMOE_GPU_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/numoe_base.h"

#define GPU_NO_CELL UINT32_MAX

struct gpu_cache {
    uint64_t layers;
    uint32_t experts;
    uint32_t cells;
    uint32_t *cell_of; /* [layers][experts]; GPU_NO_CELL */
    bool *settled;     /* [layers][experts]: with a cell, its weights are there */
    double *heat;      /* [layers][experts] */
    double *weight;    /* [layers]: of a token now, 1 at first, growing */
    uint32_t *free;    /* [cells] a stack */
    uint32_t free_count;
    uint32_t *held, *limit;       /* [layers] cells taken, and how many at most */
    bool *frozen;                 /* [layers] cells are neither given nor taken away */
    uint64_t admitted, displaced; /* so far */
};

/* wanted: [layers] experts that there are to hold in each; NULL: all. 0; -ENOMEM */
int gpu_cache_init(struct gpu_cache *cache, uint64_t layers, uint32_t experts, uint32_t cells,
                   const uint32_t *wanted);
void gpu_cache_fini(struct gpu_cache *cache);

/* Other memory, of so many cells: nothing is held, heat stays. 0; -ENOMEM, and all is as before */
int gpu_cache_resize(struct gpu_cache *cache, uint32_t cells, const uint32_t *wanted);

/* A call of so many tokens, of which tokens_of[e] go to expert e. */
void gpu_cache_heat(struct gpu_cache *cache, uint64_t layer, const uint32_t *tokens_of,
                    uint64_t tokens);

/* A cell for an expert without one, or GPU_NO_CELL. An expert e with busy[e] keeps its cell.
 * *displaced: whose weights the cell had until now; GPU_NO_CELL: none's. */
uint32_t gpu_cache_admit(struct gpu_cache *cache, uint64_t layer, uint32_t expert,
                         const uint32_t *busy, uint32_t *displaced);
void gpu_cache_settle(struct gpu_cache *cache, uint64_t layer, uint32_t expert);
/* Give up the cell of an expert, if it has one. */
void gpu_cache_drop(struct gpu_cache *cache, uint64_t layer, uint32_t expert);
void gpu_cache_drop_layer(struct gpu_cache *cache, uint64_t layer);

static inline uint64_t gpu_cache_at(const struct gpu_cache *cache, uint64_t layer, uint32_t expert)
{
    return layer * cache->experts + expert;
}

/* The weights of the expert are in its cell. */
static inline bool gpu_cache_holds(const struct gpu_cache *cache, uint64_t layer, uint32_t expert)
{
    return cache->settled[gpu_cache_at(cache, layer, expert)];
}

/* Whether there is such an expert to copy: heat is of all, and a device may have a part of them. */
typedef bool gpu_cache_has(void *user, uint64_t layer, uint64_t expert);

/* The hottest expert of a layer that there is, without a cell, that is worth bringing unasked:
 * there is room, or it is much hotter than the coldest; GPU_NO_CELL: none is. */
uint32_t gpu_cache_worth(const struct gpu_cache *cache, uint64_t layer, gpu_cache_has *has,
                         void *user);

/* Experts of a layer that there are, hottest first, at most `most`: what to warm up with. Returns
 * how many. */
uint32_t gpu_cache_hottest(const struct gpu_cache *cache, uint64_t layer, uint32_t most,
                           gpu_cache_has *has, void *user, uint32_t *experts);

/*
 * Heat as a file of text: a line "numoe-heat 1 LAYERS EXPERTS", then a line a layer. Loading
 * refuses a file of other numbers, or that is damaged, and changes nothing then.
 * 0; -errno of the file, -EINVAL, -ENOMEM
 */
int gpu_cache_save(const struct gpu_cache *cache, const char *path, struct numoe_error *error);
int gpu_cache_load(struct gpu_cache *cache, const char *path, struct numoe_error *error);

#endif
