/* A layer of random weights, laid out for both ways. SPDX-License-Identifier: Apache-2.0 */
#include "row_share_layer.h"

#include "base/checked.h"
#include "bench.h"
#include "numoe_topo.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE ((uint64_t)2 << 20)

const struct row_share_kernels *row_share_kernels_select(const char *isa)
{
#if defined(__x86_64__)
    static const struct row_share_kernels *const sets[] = {&row_share_avx512vnni, &row_share_avx2};

    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++)
        if ((!isa || !strcmp(isa, sets[i]->set.isa)) &&
            numoe_kernels_select(NUMOE_FAST, sets[i]->set.isa, NULL))
            return sets[i];
#endif
    (void)isa;
    return NULL;
}

/* Untouched memory that likes huge pages. */
static int reserve(struct row_share_memory *memory, uint64_t bytes)
{
    void *data;

    if (!numoe_round_up_u64(bytes, HUGE_PAGE, &memory->bytes) || memory->bytes > SIZE_MAX / 2)
        return -ENOMEM;
    data = mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED)
        return -ENOMEM;
    memory->data = data;
    madvise(data, memory->bytes, MADV_HUGEPAGE);
    return 0;
}

static void release(struct row_share_memory *memory)
{
    if (memory->data)
        munmap(memory->data, memory->bytes);
}

/* ---- random weights -------------------------------------------------------------------------- */

/*
 * The root mean square of uniform codes is 2.93, so a row over `width` columns gives 1.2 to 1.7
 * times the input's own when its scales are 2^(base - 127) times 1/4, 1/2, 1, 2.
 */
static uint8_t scale_base(uint64_t width)
{
    return (uint8_t)(126 - lrint(log2(2.93 * sqrt((double)width))));
}

static void random_pairs(struct numoe_bench_random *random, uint8_t *pair, uint64_t pairs,
                         uint8_t base)
{
    for (; pairs > 0; pairs--, pair += NUMOE_PAIR_BYTES) {
        for (unsigned i = 0; i < NUMOE_PAIR_BYTES; i += 8) {
            const uint64_t word = numoe_bench_random(random);
            memcpy(pair + i, &word, 8);
        }
        for (unsigned i = 1024; i < NUMOE_PAIR_BYTES; i++)
            pair[i] = (uint8_t)(base + (pair[i] & 3));
    }
}

static void fill_slice(const struct row_share *l, uint64_t expert, uint64_t slice)
{
    struct numoe_bench_random random = {l->desc.seed ^
                                        (expert * l->slices + slice + 1) * 0xD1342543DE82EF95u};
    const uint64_t place = row_share_place(l, expert, slice);
    uint8_t *whole = l->k_split.data + place * l->shape.bytes;

    random_pairs(&random, whole, l->shape.hidden_tiles, scale_base(l->desc.hidden));
    random_pairs(&random, whole + l->shape.down_offset, l->pairs, scale_base(l->desc.intermediate));
    memcpy(l->gate_up.data + place * l->shape.down_offset, whole, l->shape.down_offset);
}

/* Each lane of a domain has some of the experts to fill. */
static void fill_lane(void *context, uint32_t lane, uint32_t worker)
{
    const struct row_share *l = context;
    uint32_t domain = 0;

    (void)worker;
    while (row_share_lane(l, domain + 1) <= lane)
        domain++;
    const uint32_t first = row_share_lane(l, domain), lanes = row_share_lane(l, domain + 1) - first;

    for (uint64_t e = lane - first; e < l->desc.experts; e += lanes)
        for (uint64_t s = row_share_slice(l, domain); s < row_share_slice(l, domain + 1); s++)
            fill_slice(l, e, s);
}

/* The lane's rows of down, out of all slices. */
static void gather_lane(void *context, uint32_t lane, uint32_t worker)
{
    const struct row_share *l = context;
    const uint64_t first = row_share_pair(l, lane);
    const uint64_t bytes = (row_share_pair(l, lane + 1) - first) * NUMOE_PAIR_BYTES;

    (void)worker;
    for (uint64_t e = 0; e < l->desc.experts; e++) {
        uint8_t *to = l->down.data + row_share_down_place(l, lane, e);

        for (uint64_t s = 0; s < l->slices; s++)
            memcpy(to + s * bytes,
                   l->k_split.data + row_share_place(l, e, s) * l->shape.bytes +
                       l->shape.down_offset + first * NUMOE_PAIR_BYTES,
                   bytes);
    }
}

/* ---- the layer ------------------------------------------------------------------------------- */

static int check(const struct row_share_desc *desc, struct numoe_error *error)
{
    if (desc->hidden < 64 || desc->hidden % 64 || desc->hidden > 1 << 20)
        return numoe_error_set(error, -EINVAL, "hidden", "%" PRIu64 " is no multiple of 64",
                               desc->hidden);
    if (desc->intermediate < 32 || desc->intermediate % 32 || desc->intermediate > 1 << 20)
        return numoe_error_set(error, -EINVAL, "intermediate", "%" PRIu64 " is no multiple of 32",
                               desc->intermediate);
    if (!desc->experts || desc->experts > 1 << 16 || !desc->top_k || desc->top_k > desc->experts)
        return numoe_error_set(error, -EINVAL, "experts",
                               "%" PRIu64 " of %" PRIu64 " experts cannot be hit", desc->top_k,
                               desc->experts);
    if (!desc->domains || desc->domains > desc->lanes || desc->domains > desc->intermediate / 32)
        return numoe_error_set(error, -EINVAL, "domains",
                               "%" PRIu32 " domains need as many lanes and slices", desc->domains);
    return 0;
}

int row_share_create(const struct row_share_desc *desc, struct numoe_pool *pool,
                     const struct row_share_kernels *kernels, struct row_share **layer,
                     struct numoe_error *error)
{
    struct numoe_pool_job job = {.phase_count = 2,
                                 .phases = {{.run = fill_lane, .items = desc->lanes},
                                            {.run = gather_lane, .items = desc->lanes}}};
    struct row_share *l;
    uint64_t slices;
    int rc = check(desc, error);

    if (rc)
        return rc;
    l = calloc(1, sizeof *l);
    if (!l)
        return numoe_error_set(error, -ENOMEM, "layer", "out of memory");
    l->desc = *desc;
    l->pool = pool;
    l->kernels = kernels;
    l->slices = desc->intermediate / NUMOE_TILE;
    l->pairs = desc->hidden / NUMOE_TILE / 2;
    slices = l->slices * desc->experts;
    l->lane_pieces = calloc((size_t)desc->lanes + 1, sizeof *l->lane_pieces);
    l->own_epoch = calloc(numoe_pool_worker_count(pool), sizeof *l->own_epoch);
    rc = numoe_slice_shape_init(&l->shape, desc->hidden, false);
    if (!rc &&
        (!l->lane_pieces || !l->own_epoch || 2 * slices * l->shape.bytes > numoe_memory_room()))
        rc = -ENOMEM;
    if (!rc)
        rc = reserve(&l->k_split, slices * l->shape.bytes);
    if (!rc)
        rc = reserve(&l->gate_up, slices * l->shape.down_offset);
    if (!rc)
        rc = reserve(&l->down, slices * l->pairs * NUMOE_PAIR_BYTES);
    job.context = l;
    if (!rc)
        rc = numoe_pool_run(pool, &job);
    if (rc) {
        numoe_error_set(error, rc, "layer", "two copies of %.2f GB of weights: %s",
                        (double)slices * (double)l->shape.bytes / 1e9, strerror(-rc));
        row_share_destroy(l);
        return rc;
    }
    *layer = l;
    return 0;
}

void row_share_destroy(struct row_share *l)
{
    if (!l)
        return;
    for (int i = 0; i < ROW_SHARE_USES; i++)
        free(l->memory[i].data);
    release(&l->k_split);
    release(&l->gate_up);
    release(&l->down);
    free(l->lane_pieces);
    free(l->own_epoch);
    free(l);
}

uint64_t row_share_weight_bytes(const struct row_share *l)
{
    return l->slices * l->desc.experts * l->shape.bytes;
}
