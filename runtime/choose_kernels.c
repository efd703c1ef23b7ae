/*
 * Which of two kernel sets is faster here: a trial of one small expert in cache.
 *
 * Every worker computes the expert again and again until a common end, and counts what it has done
 * since a common beginning. A worker writes its own seat only.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "choose_kernels.h"

#include "base/clock.h"

#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 256, SLICES = 4, TOKENS = 12 };

struct seat {
    uint8_t *room; /* records, rows, scratch */
    uint64_t calls;
} __attribute__((aligned(64)));

struct trial {
    const struct numoe_kernels *kernels;
    struct numoe_slice_shape shape;
    const uint8_t *slices;
    struct seat *seats;
    uint64_t begin_ns, end_ns;
};

static const struct numoe_activation activation = {.kind = NUMOE_SILU};

static size_t row_bytes(const struct numoe_slice_shape *shape)
{
    return shape->hidden_tiles * NUMOE_TILE * sizeof(float);
}

static void take_seat(void *context, uint32_t item, uint32_t worker)
{
    struct trial *trial = context;
    struct seat *seat = &trial->seats[worker];
    const struct numoe_kernels *k = trial->kernels;
    const size_t record = k->record_bytes(&trial->shape);
    const unsigned saved = numoe_kernels_enter();
    const void *x[TOKENS];
    float *y[TOKENS], weight[TOKENS], values[HIDDEN];
    uint64_t now = numoe_now_ns();

    (void)item;
    for (int i = 0; i < HIDDEN; i++)
        values[i] = (float)(i % 17 - 8);
    for (int t = 0; t < TOKENS; t++) {
        x[t] = seat->room + (size_t)t * record;
        y[t] =
            (float *)(void *)(seat->room + TOKENS * record + (size_t)t * row_bytes(&trial->shape));
        weight[t] = 1;
        k->quantise(&trial->shape, values, NUMOE_F32, seat->room + (size_t)t * record);
    }
    const struct numoe_ffn ffn = {
        .shape = &trial->shape,
        .activation = &activation,
        .arithmetic = k->arithmetic,
        .slices = trial->slices,
        .slice_count = SLICES,
        .tokens = TOKENS,
        .x = x,
        .weight = weight,
        .y = y,
        .scratch = seat->room + TOKENS * (record + row_bytes(&trial->shape)),
    };
    while (now < trial->end_ns) {
        k->many(&ffn);
        seat->calls += now >= trial->begin_ns;
        now = numoe_now_ns();
    }
    numoe_kernels_leave(saved);
}

static double measure(struct numoe_pool *pool, struct trial *trial,
                      const struct numoe_kernels *kernels, uint64_t ns)
{
    const uint32_t workers = numoe_pool_worker_count(pool);
    struct numoe_pool_job job = {
        .context = trial, .phase_count = 1, .phases = {{.run = take_seat, .items = workers}}};
    uint64_t calls = 0;

    trial->kernels = kernels;
    for (uint32_t w = 0; w < workers; w++)
        trial->seats[w].calls = 0;
    trial->begin_ns = numoe_now_ns() + ns / 2;
    trial->end_ns = trial->begin_ns + ns;
    if (numoe_pool_run(pool, &job))
        return 0;
    for (uint32_t w = 0; w < workers; w++)
        calls += trial->seats[w].calls;
    return (double)calls * 1e9 / (double)ns;
}

static size_t room_bytes(const struct numoe_kernels *k, const struct numoe_slice_shape *shape)
{
    return TOKENS * (k->record_bytes(shape) + row_bytes(shape)) + k->scratch_bytes(shape);
}

void numoe_choose_kernels(struct numoe_pool *pool, const struct numoe_kernels *first,
                          const struct numoe_kernels *second, uint64_t ns,
                          struct numoe_choice *choice)
{
    const uint32_t workers = numoe_pool_worker_count(pool);
    struct trial trial = {0};
    uint8_t *slices, *rooms;
    size_t room;

    *choice = (struct numoe_choice){.chosen = first};
    if (numoe_slice_shape_init(&trial.shape, HIDDEN, false))
        return;
    room = room_bytes(first, &trial.shape);
    if (room < room_bytes(second, &trial.shape))
        room = room_bytes(second, &trial.shape);
    room = (room + NUMOE_ALIGNMENT - 1) / NUMOE_ALIGNMENT * NUMOE_ALIGNMENT;
    slices = aligned_alloc(NUMOE_ALIGNMENT, SLICES * trial.shape.bytes);
    rooms = aligned_alloc(NUMOE_ALIGNMENT, workers * room);
    trial.seats = aligned_alloc(NUMOE_ALIGNMENT, workers * sizeof *trial.seats);
    if (slices && rooms && trial.seats) {
        /* codes of all kinds, and scales near 1 */
        for (uint64_t i = 0; i < SLICES * trial.shape.bytes; i++)
            slices[i] = i % NUMOE_PAIR_BYTES < 1024 ? (uint8_t)(i * 37) : 125;
        for (uint32_t w = 0; w < workers; w++)
            trial.seats[w].room = rooms + w * room;
        trial.slices = slices;
        choice->rates[0] = measure(pool, &trial, first, ns);
        choice->rates[1] = measure(pool, &trial, second, ns);
        if (choice->rates[1] > choice->rates[0] * 1.02)
            choice->chosen = second;
    }
    free(slices);
    free(rooms);
    free(trial.seats);
}
