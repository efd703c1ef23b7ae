/* Which experts stay in device memory. SPDX-License-Identifier: Apache-2.0 */
#include "gpu_cache.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A token's weight grows by this from token to token: one of 2000 tokens ago counts half. */
#define GROWTH 1.00034663
/* Tokens of a batch count as at most so many: a long prompt must not drown all before it. */
#define TOKENS_COUNTED 256.0
/* An expert that nobody waits for is brought when it is so much hotter than the one that goes. */
#define WORTH 1.5
/* Beyond this, heat and weights of a layer are scaled down. */
#define WEIGHT_MOST 1e100

static void deal(struct gpu_cache *c, const uint32_t *wanted)
{
    uint32_t left = c->cells;

    /* in rounds, so that a layer that needs few leaves its part to the others */
    memset(c->limit, 0, c->layers * sizeof *c->limit);
    for (bool more = true; left && more;) {
        uint32_t open = 0, share;
        for (uint64_t l = 0; l < c->layers; l++)
            open += c->limit[l] < (wanted ? wanted[l] : c->experts);
        more = open != 0;
        share = open && left / open ? left / open : 1;
        for (uint64_t l = 0; left && l < c->layers; l++) {
            const uint32_t most = wanted ? wanted[l] : c->experts;
            uint32_t take = most - c->limit[l] < share ? most - c->limit[l] : share;
            take = take < left ? take : left;
            c->limit[l] += take;
            left -= take;
        }
    }
}

static void empty(struct gpu_cache *c)
{
    for (uint64_t i = 0; i < c->layers * c->experts; i++)
        c->cell_of[i] = GPU_NO_CELL;
    memset(c->settled, 0, c->layers * c->experts * sizeof *c->settled);
    memset(c->held, 0, c->layers * sizeof *c->held);
    c->free_count = c->cells;
    for (uint32_t i = 0; i < c->cells; i++)
        c->free[i] = c->cells - 1 - i; /* the first cell is given first */
}

int gpu_cache_init(struct gpu_cache *c, uint64_t layers, uint32_t experts, uint32_t cells,
                   const uint32_t *wanted)
{
    *c = (struct gpu_cache){.layers = layers, .experts = experts, .cells = cells};
    c->cell_of = calloc(layers * experts, sizeof *c->cell_of);
    c->settled = calloc(layers * experts, sizeof *c->settled);
    c->heat = calloc(layers * experts, sizeof *c->heat);
    c->weight = calloc(layers, sizeof *c->weight);
    c->free = calloc((size_t)cells + 1, sizeof *c->free);
    c->held = calloc(layers, sizeof *c->held);
    c->limit = calloc(layers, sizeof *c->limit);
    c->frozen = calloc(layers, sizeof *c->frozen);
    if (!c->cell_of || !c->settled || !c->heat || !c->weight || !c->free || !c->held || !c->limit ||
        !c->frozen) {
        gpu_cache_fini(c);
        return -ENOMEM;
    }
    for (uint64_t l = 0; l < layers; l++)
        c->weight[l] = 1;
    deal(c, wanted);
    empty(c);
    return 0;
}

void gpu_cache_fini(struct gpu_cache *c)
{
    free(c->cell_of);
    free(c->settled);
    free(c->heat);
    free(c->weight);
    free(c->free);
    free(c->held);
    free(c->limit);
    free(c->frozen);
    *c = (struct gpu_cache){0};
}

int gpu_cache_resize(struct gpu_cache *c, uint32_t cells, const uint32_t *wanted)
{
    uint32_t *free_cells = calloc((size_t)cells + 1, sizeof *free_cells);

    if (!free_cells)
        return -ENOMEM;
    free(c->free);
    c->free = free_cells;
    c->cells = cells;
    deal(c, wanted);
    empty(c);
    return 0;
}

void gpu_cache_heat(struct gpu_cache *c, uint64_t layer, const uint32_t *tokens_of, uint64_t tokens)
{
    const double counted = (double)tokens < TOKENS_COUNTED ? (double)tokens : TOKENS_COUNTED;
    double *heat = c->heat + layer * c->experts;

    if (tokens == 0)
        return;
    c->weight[layer] *= pow(GROWTH, counted);
    for (uint32_t e = 0; e < c->experts; e++)
        heat[e] += c->weight[layer] * tokens_of[e] * counted / (double)tokens;
    if (c->weight[layer] > WEIGHT_MOST) {
        for (uint32_t e = 0; e < c->experts; e++)
            heat[e] /= c->weight[layer];
        c->weight[layer] = 1;
    }
}

/* The coldest expert of the layer with a settled cell that may go; GPU_NO_CELL: none. */
static uint32_t coldest(const struct gpu_cache *c, uint64_t layer, const uint32_t *busy)
{
    const uint64_t first = layer * c->experts;
    uint32_t best = GPU_NO_CELL;

    for (uint32_t e = 0; e < c->experts; e++)
        if (c->settled[first + e] && !busy[e] &&
            (best == GPU_NO_CELL || c->heat[first + e] < c->heat[first + best]))
            best = e;
    return best;
}

uint32_t gpu_cache_admit(struct gpu_cache *c, uint64_t layer, uint32_t expert, const uint32_t *busy,
                         uint32_t *displaced)
{
    const uint64_t at = gpu_cache_at(c, layer, expert);

    *displaced = GPU_NO_CELL;
    if (c->limit[layer] == 0 || c->frozen[layer])
        return GPU_NO_CELL;
    if (c->held[layer] >= c->limit[layer] || c->free_count == 0) {
        const uint32_t victim = coldest(c, layer, busy);
        if (victim == GPU_NO_CELL || c->heat[gpu_cache_at(c, layer, victim)] >= c->heat[at])
            return GPU_NO_CELL;
        gpu_cache_drop(c, layer, victim);
        *displaced = victim;
        c->displaced++;
    }
    c->cell_of[at] = c->free[--c->free_count];
    c->held[layer]++;
    c->admitted++;
    return c->cell_of[at];
}

void gpu_cache_settle(struct gpu_cache *c, uint64_t layer, uint32_t expert)
{
    const uint64_t at = gpu_cache_at(c, layer, expert);

    if (c->cell_of[at] != GPU_NO_CELL)
        c->settled[at] = true;
}

void gpu_cache_drop(struct gpu_cache *c, uint64_t layer, uint32_t expert)
{
    const uint64_t at = gpu_cache_at(c, layer, expert);

    if (c->cell_of[at] == GPU_NO_CELL)
        return;
    c->free[c->free_count++] = c->cell_of[at];
    c->cell_of[at] = GPU_NO_CELL;
    c->settled[at] = false;
    c->held[layer]--;
}

void gpu_cache_drop_layer(struct gpu_cache *c, uint64_t layer)
{
    for (uint32_t e = 0; e < c->experts; e++)
        gpu_cache_drop(c, layer, e);
}

uint32_t gpu_cache_worth(const struct gpu_cache *c, uint64_t layer, gpu_cache_has *has, void *user)
{
    const uint64_t first = layer * c->experts;
    uint32_t best = GPU_NO_CELL, cold = GPU_NO_CELL;

    for (uint32_t e = 0; e < c->experts && !c->frozen[layer]; e++)
        if (c->cell_of[first + e] == GPU_NO_CELL && c->heat[first + e] > 0 &&
            (best == GPU_NO_CELL || c->heat[first + e] > c->heat[first + best]) &&
            has(user, layer, e))
            best = e;
    if (best == GPU_NO_CELL || c->limit[layer] == 0 ||
        (c->held[layer] < c->limit[layer] && c->free_count))
        return c->limit[layer] ? best : GPU_NO_CELL;
    for (uint32_t e = 0; e < c->experts; e++)
        if (c->settled[first + e] &&
            (cold == GPU_NO_CELL || c->heat[first + e] < c->heat[first + cold]))
            cold = e;
    return cold != GPU_NO_CELL && c->heat[first + best] > WORTH * c->heat[first + cold]
               ? best
               : GPU_NO_CELL;
}

uint32_t gpu_cache_hottest(const struct gpu_cache *c, uint64_t layer, uint32_t most,
                           gpu_cache_has *has, void *user, uint32_t *experts)
{
    const double *heat = c->heat + layer * c->experts;
    uint32_t count = 0;

    for (uint32_t e = 0; e < c->experts; e++) {
        uint32_t at = count;
        if (!(heat[e] > 0) || !has(user, layer, e))
            continue;
        while (at > 0 && heat[experts[at - 1]] < heat[e])
            at--;
        if (at >= most)
            continue;
        if (count < most)
            count++;
        memmove(experts + at + 1, experts + at, (count - at - 1) * sizeof *experts);
        experts[at] = e;
    }
    return count;
}

/* ---- the file -------------------------------------------------------------------------------- */

int gpu_cache_save(const struct gpu_cache *c, const char *path, struct numoe_error *error)
{
    FILE *file = fopen(path, "we");
    int rc;

    if (!file) {
        rc = -errno;
        return numoe_error_set(error, rc, path, "%s", strerror(-rc));
    }
    fprintf(file, "numoe-heat 1 %llu %u\n", (unsigned long long)c->layers, c->experts);
    for (uint64_t l = 0; l < c->layers; l++)
        for (uint32_t e = 0; e < c->experts; e++)
            fprintf(file, "%.6g%c", c->heat[l * c->experts + e] / c->weight[l],
                    e + 1 < c->experts ? ' ' : '\n');
    rc = ferror(file) ? -EIO : 0;
    if (fclose(file) && !rc)
        rc = -errno;
    return rc ? numoe_error_set(error, rc, path, "could not be written: %s", strerror(-rc)) : 0;
}

int gpu_cache_load(struct gpu_cache *c, const char *path, struct numoe_error *error)
{
    const uint64_t count = c->layers * c->experts;
    FILE *file = fopen(path, "re");
    unsigned long long layers = 0;
    unsigned experts = 0, version = 0;
    double *heat = NULL;
    char rest;
    int rc = 0;

    if (!file) {
        rc = -errno;
        return numoe_error_set(error, rc, path, "%s", strerror(-rc));
    }
    if (fscanf(file, "numoe-heat %u %llu %u", &version, &layers, &experts) != 3 || version != 1) {
        rc = numoe_error_set(error, -EINVAL, path, "is no profile of experts");
        goto out;
    }
    if (layers != c->layers || experts != c->experts) {
        rc = numoe_error_set(error, -EINVAL, path,
                             "is of %llu layers of %u experts, and the model has %llu of %u",
                             layers, experts, (unsigned long long)c->layers, c->experts);
        goto out;
    }
    heat = calloc(count, sizeof *heat);
    if (!heat) {
        rc = numoe_error_set(error, -ENOMEM, path, "out of memory");
        goto out;
    }
    for (uint64_t i = 0; i < count; i++)
        if (fscanf(file, "%lf", &heat[i]) != 1 || !(heat[i] >= 0) || !isfinite(heat[i])) {
            rc = numoe_error_set(error, -EINVAL, path, "expert %llu of layer %llu has no heat",
                                 (unsigned long long)(i % c->experts),
                                 (unsigned long long)(i / c->experts));
            goto out;
        }
    if (fscanf(file, " %c", &rest) == 1) {
        rc = numoe_error_set(error, -EINVAL, path, "goes on after its last layer");
        goto out;
    }
    memcpy(c->heat, heat, count * sizeof *heat);
    for (uint64_t l = 0; l < c->layers; l++)
        c->weight[l] = 1;
out:
    free(heat);
    fclose(file);
    return rc;
}
