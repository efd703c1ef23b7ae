/*
 * Whether experts are passed on right: on a device taken as two, each of which copies a half of
 * every layer from the host and gets the other half from the other's memory.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_internal.h"

enum { LAYERS = 2, EXPERTS = 24, SLICES = 6, HIDDEN = 256, DEVICES = 2, CALLS = 6 };

struct passing {
    struct numoe_gpu *gpus[DEVICES];
    struct numoe_gpu_model *model;
    struct numoe_slice_shape shape;
    uint8_t *experts; /* [LAYERS][EXPERTS][SLICES] slices of random bytes */
    void *streams[DEVICES];
    uint8_t *back; /* pinned: a table, and slices of an expert */
    uint32_t seen[DEVICES][EXPERTS];
    uint64_t wrong;
};

static uint64_t expert_bytes(const struct passing *p)
{
    return SLICES * p->shape.bytes;
}

static uint64_t all_bytes(const struct passing *p)
{
    return LAYERS * EXPERTS * expert_bytes(p);
}

static void arena(void *user, uint32_t index, void **address, uint64_t *bytes)
{
    struct passing *p = user;

    (void)index;
    *address = p->experts;
    *bytes = all_bytes(p);
}

static uint64_t place(void *user, uint64_t layer, uint64_t expert, uint32_t index,
                      const uint8_t **address)
{
    struct passing *p = user;

    (void)index;
    *address = p->experts + (layer * EXPERTS + expert) * expert_bytes(p);
    return SLICES;
}

static bool present(void *user, uint64_t layer, uint64_t expert)
{
    (void)user;
    (void)layer;
    (void)expert;
    return true;
}

static uint32_t generation(void *user, uint64_t layer)
{
    (void)user;
    (void)layer;
    return 1;
}

static int open_all(struct passing *p, struct numoe_gpu *gpu, struct numoe_error *error)
{
    static const uint32_t shares[DEVICES] = {1, 1};
    const uint64_t table = EXPERTS * SLICES * sizeof(uint32_t);
    const struct gpu_ops *ops = gpu->ops;
    int rc = numoe_slice_shape_init(&p->shape, HIDDEN, false);

    p->gpus[0] = gpu;
    if (!rc)
        rc = gpu_wrap(ops, gpu->device, &gpu->properties, &gpu->log, &p->gpus[1]);
    if (!rc)
        p->experts = aligned_alloc(4096, (all_bytes(p) + 4095) / 4096 * 4096);
    if (!p->experts)
        return numoe_error_set(error, rc ? rc : -ENOMEM, "check", "out of memory");
    for (uint64_t i = 0, random = 7; i < all_bytes(p); i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        p->experts[i] = (uint8_t)(random >> 56);
    }
    for (int i = 0; !rc && i < DEVICES; i++)
        rc = gpu_judge(gpu, ops->stream_create(gpu->device, &p->streams[i]), error,
                       "making a stream");
    if (!rc)
        rc = gpu_judge(gpu,
                       ops->host_allocate(gpu->device, table + expert_bytes(p), (void **)&p->back),
                       error, "allocating a check's memory");
    if (rc)
        return rc;
    const struct numoe_gpu_source source = {.user = p,
                                            .shape = p->shape,
                                            .layers = LAYERS,
                                            .experts = EXPERTS,
                                            .slices = SLICES,
                                            .region_count = 1,
                                            .arena = arena,
                                            .place = place,
                                            .present = present,
                                            .generation = generation};
    const struct numoe_gpu_model_options options = {.cache_bytes = 7 * expert_bytes(p),
                                                    .window_bytes = 9 * expert_bytes(p),
                                                    .piece_bytes = 1,
                                                    .shares = shares,
                                                    .whole = NUMOE_GPU_WHOLE_PEERS};
    return numoe_gpu_model_create_over(p->gpus, DEVICES, &source, &options, &p->model, error);
}

static int fetch(struct passing *p, uint32_t device, uint8_t *to, const void *from, uint64_t bytes,
                 struct numoe_error *error)
{
    struct numoe_gpu *gpu = p->gpus[device];

    return gpu_judge(gpu, gpu->ops->copy_out(gpu->device, p->streams[device], to, from, bytes),
                     error, "reading a piece");
}

static int await(struct passing *p, uint32_t device, struct numoe_error *error)
{
    struct numoe_gpu *gpu = p->gpus[device];

    return gpu_judge(gpu, gpu->ops->stream_sync(gpu->device, p->streams[device]), error,
                     "reading a piece");
}

/* What a computation with the piece would find. */
static int look(struct passing *p, uint32_t device, uint64_t layer,
                const struct numoe_gpu_piece *piece, struct numoe_error *error)
{
    const uint64_t table_bytes = EXPERTS * SLICES * sizeof(uint32_t);
    const uint32_t *table = (const uint32_t *)(const void *)p->back;
    uint8_t *slices = p->back + table_bytes;
    int rc;

    memset(p->back, 0xEE, table_bytes);
    rc = fetch(p, device, p->back, piece->slice_at, table_bytes, error);
    if (!rc)
        rc = await(p, device, error);
    for (uint64_t e = 0; !rc && e < EXPERTS; e++) {
        const uint8_t *want;

        if (table[e * SLICES] == NUMOE_GPU_ABSENT)
            continue;
        p->seen[device][e]++;
        memset(slices, 0xEE, expert_bytes(p));
        for (uint64_t k = 0; !rc && k < SLICES; k++)
            rc =
                fetch(p, device, slices + k * p->shape.bytes,
                      piece->weights + table[e * SLICES + k] * (uint64_t)64, p->shape.bytes, error);
        if (!rc)
            rc = await(p, device, error);
        place(p, layer, e, 0, &want);
        p->wrong += !rc && memcmp(slices, want, expert_bytes(p)) != 0;
    }
    return rc;
}

static int call(struct passing *p, uint64_t layer, struct numoe_error *error)
{
    struct numoe_gpu_piece piece;
    int rc = numoe_gpu_pieces_begin(p->model, layer, NULL, 0, 0, error);

    if (rc)
        return rc;
    memset(p->seen, 0, sizeof p->seen);
    do {
        uint32_t device;

        rc = numoe_gpu_piece_any(p->model, p->streams, &device, &piece, error);
        if (!rc && piece.slice_at)
            rc = look(p, device, layer, &piece, error);
        if (!rc && piece.slice_at)
            rc = numoe_gpu_piece_done(numoe_gpu_model_part(p->model, device), p->streams[device],
                                      &piece, error);
    } while (!rc && piece.slice_at);
    for (uint32_t i = 0; i < DEVICES; i++) {
        numoe_gpu_pieces_end(numoe_gpu_model_part(p->model, i), p->streams[i]);
        for (int e = 0; !rc && e < EXPERTS; e++)
            p->wrong += p->seen[i][e] != 1;
    }
    return rc ? rc : numoe_gpu_prefetch(p->model, (layer + 1) % LAYERS, NULL, 0, error);
}

static void close_all(struct passing *p)
{
    struct numoe_gpu *gpu = p->gpus[0];

    numoe_gpu_model_destroy(p->model);
    for (int i = 0; i < DEVICES; i++)
        if (p->streams[i])
            gpu_judge(gpu, gpu->ops->stream_destroy(gpu->device, p->streams[i]), NULL,
                      "freeing a stream");
    if (p->back)
        gpu_judge(gpu, gpu->ops->host_release(gpu->device, p->back), NULL,
                  "freeing a check's memory");
    numoe_gpu_close(p->gpus[1]);
    free(p->experts);
}

int numoe_gpu_certify_passing(struct numoe_gpu *gpu, struct numoe_gpu_finding *f,
                              struct numoe_error *error)
{
    struct numoe_gpu_report report = {0};
    struct passing p = {.wrong = 0};
    int rc = gpu_enter(gpu, error);

    *f = (struct numoe_gpu_finding){0};
    if (rc)
        return rc;
    rc = open_all(&p, gpu, error);
    for (uint64_t i = 0; !rc && i < CALLS; i++)
        rc = call(&p, i % LAYERS, error);
    if (!rc) {
        numoe_gpu_model_report(p.model, &report);
        f->there = true;
        f->ok = report.passes && report.passed_experts > 0 && !p.wrong;
        if (!f->ok)
            snprintf(f->text, sizeof f->text, "%llu experts are wrong or not there once%s%.90s",
                     (unsigned long long)p.wrong, *report.pass_note ? "; " : "", report.pass_note);
    }
    close_all(&p);
    return rc;
}
