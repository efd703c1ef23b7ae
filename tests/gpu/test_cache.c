/* Which experts stay on a device, the window that the others pass through, and profiles. */
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../support/experts.h"
#include "gpu_cache.h"
#include "gpu_window.h"

/* ---- window ---------------------------------------------------------------------------------- */

/* Any order of opening, taking and spending: no byte and no descriptor is given twice. */
Test(gpu_window, live_pieces_never_overlap)
{
    enum { BYTES = 997 };

    for (uint64_t seed = 1; seed <= 50; seed++) {
        struct gpu_window w = {.bytes = BYTES};
        uint32_t opened = 0, refused = 0;

        random_state = seed;
        for (int step = 0; step < 5000; step++) {
            const uint64_t bytes = random_u64() % (seed % 2 ? 60 : BYTES + 1);
            uint8_t owner[BYTES] = {0};
            uint32_t reclaim;

            if (random_u64() % 2) {
                const int rc = gpu_window_room(&w, bytes, &reclaim);
                if (rc) {
                    cr_assert_eq(rc, -EAGAIN);
                    cr_assert_gt(w.count, 0);
                    refused++;
                } else {
                    for (uint32_t i = 0; i < reclaim; i++)
                        cr_assert_eq(gpu_window_piece(&w, i)->state, GPU_PIECE_SPENT);
                    cr_assert_eq(gpu_window_open(&w, bytes, reclaim)->state, GPU_PIECE_FILLING);
                    opened++;
                }
            } else if (w.count) {
                gpu_window_piece(&w, (uint32_t)random_u64() % w.count)->state = GPU_PIECE_SPENT;
            }
            cr_assert_leq(w.count, GPU_PIECES);
            for (uint32_t i = 0; i < w.count; i++) {
                const struct gpu_piece *p = gpu_window_piece(&w, i);
                const uint64_t begin = gpu_window_begin(&w, p);
                cr_assert_leq(begin + p->bytes, BYTES);
                for (uint64_t b = begin; b < begin + p->bytes; b++)
                    cr_assert_eq(owner[b]++, 0, "seed %d, step %d", (int)seed, step);
            }
        }
        cr_expect_gt(opened, 500);
        cr_expect_gt(refused, 50);
    }
}

Test(gpu_window, a_piece_larger_than_the_window_is_refused)
{
    struct gpu_window w = {.bytes = 100};
    uint32_t reclaim;

    cr_expect_eq(gpu_window_room(&w, 101, &reclaim), -EOVERFLOW);
    cr_assert_eq(gpu_window_room(&w, 100, &reclaim), 0);
    gpu_window_open(&w, 100, reclaim);
    cr_expect_eq(gpu_window_room(&w, 1, &reclaim), -EAGAIN);
    gpu_window_piece(&w, 0)->state = GPU_PIECE_SPENT;
    cr_assert_eq(gpu_window_room(&w, 1, &reclaim), 0);
    cr_expect_eq(reclaim, 1);
    /* two halves are all of it */
    gpu_window_forget(&w);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(gpu_window_room(&w, 50, &reclaim), 0);
        cr_expect_eq(reclaim, 0);
        gpu_window_open(&w, 50, reclaim);
    }
    cr_expect_eq(gpu_window_room(&w, 1, &reclaim), -EAGAIN);
}

/* ---- cache ----------------------------------------------------------------------------------- */

static void expect_sound(const struct gpu_cache *c)
{
    uint8_t *taken = calloc(c->cells + 1, 1);
    uint32_t held = 0;

    for (uint64_t l = 0; l < c->layers; l++) {
        uint32_t of_layer = 0;
        for (uint32_t e = 0; e < c->experts; e++) {
            const uint32_t cell = c->cell_of[gpu_cache_at(c, l, e)];
            if (cell == GPU_NO_CELL) {
                cr_assert_not(gpu_cache_holds(c, l, e));
                continue;
            }
            cr_assert_lt(cell, c->cells);
            cr_assert_eq(taken[cell]++, 0);
            of_layer++;
        }
        cr_assert_eq(of_layer, c->held[l]);
        cr_assert_leq(of_layer, c->limit[l]);
        held += of_layer;
    }
    cr_assert_eq(held + c->free_count, c->cells);
    free(taken);
}

Test(gpu_cache, cells_are_dealt_to_layers_by_what_they_need)
{
    const uint32_t wanted[4] = {10, 2, 10, 0};
    struct gpu_cache c;

    cr_assert_eq(gpu_cache_init(&c, 4, 10, 13, wanted), 0);
    cr_expect_eq(c.limit[1], 2);
    cr_expect_eq(c.limit[3], 0);
    cr_expect_eq(c.limit[0] + c.limit[2], 11);
    cr_expect_leq(abs((int)c.limit[0] - (int)c.limit[2]), 1);
    cr_assert_eq(gpu_cache_resize(&c, 100, wanted), 0);
    for (int l = 0; l < 4; l++)
        cr_expect_eq(c.limit[l], wanted[l]);
    gpu_cache_fini(&c);
}

Test(gpu_cache, random_use_keeps_it_sound)
{
    enum { LAYERS = 3, EXPERTS = 20 };

    for (uint64_t seed = 0; seed < 20; seed++) {
        uint32_t need[EXPERTS], displaced;
        struct gpu_cache c;

        random_state = seed + 1;
        cr_assert_eq(gpu_cache_init(&c, LAYERS, EXPERTS, (uint32_t)(seed * 3), NULL), 0);
        for (int i = 0; i < 2000; i++) {
            const uint64_t l = random_u64() % LAYERS;
            for (uint32_t e = 0; e < EXPERTS; e++)
                need[e] = random_u64() % (1 + e) == 0;
            gpu_cache_heat(&c, l, need, 4);
            for (uint32_t e = 0; e < EXPERTS; e++) {
                if (!need[e] || c.cell_of[gpu_cache_at(&c, l, e)] != GPU_NO_CELL)
                    continue;
                const uint32_t cell = gpu_cache_admit(&c, l, e, need, &displaced);
                cr_assert(displaced == GPU_NO_CELL || !need[displaced]);
                if (cell != GPU_NO_CELL && random_u64() % 4)
                    gpu_cache_settle(&c, l, e);
            }
            if (random_u64() % 50 == 0)
                gpu_cache_drop_layer(&c, random_u64() % LAYERS);
            expect_sound(&c);
        }
        gpu_cache_fini(&c);
    }
}

/* Zipf(1.0) over 64 experts, a quarter of them cached, 6 a call: close to what the 16 most frequent
 * ones would give, which is the best there is; and after the order has turned round, again. */
Test(gpu_cache, frequent_experts_stay)
{
    enum { EXPERTS = 64, CELLS = 16, TOP_K = 6, CALLS = 6000 };
    double share[EXPERTS], sum = 0, best = 0, rate[2];
    struct gpu_cache c;

    random_state = 9;
    cr_assert_eq(gpu_cache_init(&c, 1, EXPERTS, CELLS, NULL), 0);
    for (int e = 0; e < EXPERTS; e++)
        sum += share[e] = 1.0 / (1 + e);
    for (int turn = 0; turn < 2; turn++) {
        uint64_t hits = 0, asked = 0, possible = 0;
        for (int i = 0; i < CALLS; i++) {
            uint32_t need[EXPERTS] = {0}, displaced;
            for (int k = 0; k < TOP_K;) {
                double at = random_unit() * sum;
                int e = 0;
                while (e + 1 < EXPERTS && (at -= share[e]) > 0)
                    e++;
                e = turn ? EXPERTS - 1 - e : e;
                k += need[e]++ == 0;
            }
            gpu_cache_heat(&c, 0, need, 1);
            for (uint32_t e = 0; e < EXPERTS; e++) {
                if (!need[e])
                    continue;
                if (i > CALLS / 2) {
                    asked++;
                    hits += gpu_cache_holds(&c, 0, e);
                    possible += (turn ? EXPERTS - 1 - e : e) < CELLS;
                }
                if (!gpu_cache_holds(&c, 0, e) &&
                    gpu_cache_admit(&c, 0, e, need, &displaced) != GPU_NO_CELL)
                    gpu_cache_settle(&c, 0, e);
            }
        }
        rate[turn] = (double)hits / (double)asked;
        best = (double)possible / (double)asked;
        cr_expect_gt(rate[turn], 0.93 * best, "turn %d: %.3f of %.3f", turn, rate[turn], best);
    }
    gpu_cache_fini(&c);
}

static bool has_all(void *user, uint64_t layer, uint64_t expert)
{
    (void)user;
    (void)layer;
    (void)expert;
    return true;
}

/* A layer that is held for graphs gives no cell and takes none, however hot others are. */
Test(gpu_cache, a_frozen_layer_stays_as_it_is)
{
    const uint32_t busy[5] = {0};
    uint32_t displaced;
    struct gpu_cache c;

    cr_assert_eq(gpu_cache_init(&c, 1, 5, 2, NULL), 0);
    gpu_cache_heat(&c, 0, (const uint32_t[]){1, 9, 0, 0, 0}, 10);
    cr_assert_neq(gpu_cache_admit(&c, 0, 0, busy, &displaced), GPU_NO_CELL);
    gpu_cache_settle(&c, 0, 0);
    cr_expect_eq(gpu_cache_worth(&c, 0, has_all, NULL), 1);
    c.frozen[0] = true; /* with a cell left */
    cr_expect_eq(gpu_cache_worth(&c, 0, has_all, NULL), GPU_NO_CELL);
    cr_expect_eq(gpu_cache_admit(&c, 0, 1, busy, &displaced), GPU_NO_CELL);
    cr_expect_eq(displaced, GPU_NO_CELL);
    c.limit[0] = 1;
    cr_expect_eq(gpu_cache_admit(&c, 0, 1, busy, &displaced), GPU_NO_CELL);
    cr_expect(gpu_cache_holds(&c, 0, 0));
    c.frozen[0] = false;
    cr_expect_neq(gpu_cache_admit(&c, 0, 1, busy, &displaced), GPU_NO_CELL);
    cr_expect_eq(displaced, 0);
    gpu_cache_fini(&c);
}

/* To bring an expert unasked it has to be much hotter than the one that goes. */
Test(gpu_cache, what_is_hardly_hotter_is_not_worth_bringing)
{
    const uint32_t busy[2] = {0};
    uint32_t displaced;
    struct gpu_cache c;

    cr_assert_eq(gpu_cache_init(&c, 1, 2, 1, NULL), 0);
    gpu_cache_heat(&c, 0, (const uint32_t[]){100, 140}, 200);
    cr_assert_neq(gpu_cache_admit(&c, 0, 0, busy, &displaced), GPU_NO_CELL);
    gpu_cache_settle(&c, 0, 0);
    cr_expect_eq(gpu_cache_worth(&c, 0, has_all, NULL), GPU_NO_CELL);
    gpu_cache_heat(&c, 0, (const uint32_t[]){0, 20}, 200);
    cr_expect_eq(gpu_cache_worth(&c, 0, has_all, NULL), 1);
    gpu_cache_fini(&c);
}

/* What a long prompt asked for does not outlast what came after it; and heat stays a number however
 * many tokens come, in the same order. */
Test(gpu_cache, heat_is_of_tokens_for_any_number_of_them)
{
    struct gpu_cache c;
    uint32_t hot[3];

    cr_assert_eq(gpu_cache_init(&c, 1, 3, 1, NULL), 0);
    gpu_cache_heat(&c, 0, (const uint32_t[]){65536, 0, 0}, 65536);
    for (int i = 0; i < 600; i++)
        gpu_cache_heat(&c, 0, (const uint32_t[]){0, 1, 0}, 1);
    cr_expect_gt(c.heat[1], c.heat[0]);
    for (int i = 0; i < 20000; i++)
        gpu_cache_heat(&c, 0, (const uint32_t[]){64, 32, 160}, 256);
    cr_expect(isfinite(c.weight[0]) && isfinite(c.heat[2]) && c.heat[1] > 0);
    cr_expect_float_eq(c.heat[2] / c.heat[1], 5, 1e-3);
    cr_expect_eq(gpu_cache_hottest(&c, 0, 3, has_all, NULL, hot), 3);
    cr_expect(hot[0] == 2 && hot[1] == 0 && hot[2] == 1);
    gpu_cache_fini(&c);
}

/* ---- profiles -------------------------------------------------------------------------------- */

static char path[] = "/tmp/numoe-heat-XXXXXX";

static void write_file(const char *text)
{
    FILE *file = fopen(path, "w");
    cr_assert_not_null(file);
    fputs(text, file);
    fclose(file);
}

static bool has_odd(void *user, uint64_t layer, uint64_t expert)
{
    (void)user;
    (void)layer;
    return expert % 2 == 1;
}

/* Heat is of all experts, and a device that has some of them looks at those. */
Test(gpu_cache, experts_of_other_devices_are_passed_over)
{
    const uint32_t busy[5] = {0};
    uint32_t displaced, hot[4];
    struct gpu_cache c;

    cr_assert_eq(gpu_cache_init(&c, 1, 5, 1, NULL), 0);
    gpu_cache_heat(&c, 0, (const uint32_t[]){9, 2, 8, 4, 7}, 30);
    cr_expect_eq(gpu_cache_worth(&c, 0, has_all, NULL), 0);
    cr_expect_eq(gpu_cache_worth(&c, 0, has_odd, NULL), 3);
    cr_expect_eq(gpu_cache_hottest(&c, 0, 4, has_odd, NULL, hot), 2);
    cr_expect(hot[0] == 3 && hot[1] == 1);
    /* the coldest of its own is in the only cell: 3 is worth it, whatever 0, 2 and 4 are */
    cr_assert_neq(gpu_cache_admit(&c, 0, 1, busy, &displaced), GPU_NO_CELL);
    gpu_cache_settle(&c, 0, 1);
    cr_expect_eq(gpu_cache_worth(&c, 0, has_odd, NULL), 3);
    gpu_cache_fini(&c);
}

Test(gpu_cache, profiles_survive_a_file_and_damage_is_refused)
{
    struct gpu_cache a, b;
    uint32_t hot[4];
    const int descriptor = mkstemp(path);

    cr_assert_geq(descriptor, 0);
    close(descriptor);
    cr_assert_eq(gpu_cache_init(&a, 2, 5, 4, NULL), 0);
    cr_assert_eq(gpu_cache_init(&b, 2, 5, 4, NULL), 0);
    gpu_cache_heat(&a, 0, (const uint32_t[]){1, 4, 0, 2, 3}, 10);
    gpu_cache_heat(&a, 1, (const uint32_t[]){0, 0, 9, 0, 1}, 10);
    cr_assert_eq(gpu_cache_save(&a, path, NULL), 0);
    cr_assert_eq(gpu_cache_load(&b, path, NULL), 0);
    cr_expect_eq(gpu_cache_hottest(&b, 0, 3, has_all, NULL, hot), 3);
    cr_expect(hot[0] == 1 && hot[1] == 4 && hot[2] == 3);
    cr_expect_eq(gpu_cache_hottest(&b, 1, 4, has_all, NULL, hot), 2);
    cr_expect(hot[0] == 2 && hot[1] == 4);
    /* a token now counts as much, whatever came before: in the file, and after it was read */
    for (int i = 0; i < 4000; i++)
        gpu_cache_heat(&a, 0, (const uint32_t[]){0, 4, 0, 2, 0}, 256);
    cr_expect_gt(a.weight[0], 1e50);
    cr_assert_eq(gpu_cache_save(&a, path, NULL), 0);
    cr_expect_lt(a.heat[1] / a.weight[0], 1e4);
    cr_assert_eq(gpu_cache_load(&a, path, NULL), 0);
    cr_expect(a.heat[1] > 10 && a.heat[1] < 1e4, "%g", a.heat[1]);
    gpu_cache_heat(&a, 0, (const uint32_t[]){1, 0, 0, 0, 0}, 1);
    cr_expect(a.heat[0] > 0.9 && a.heat[0] < 1.5, "%g", a.heat[0]);
    static const char *const damaged[] = {
        "",
        "numoe-heat 2 2 5\n1 1 1 1 1\n1 1 1 1 1\n",
        "numoe-heat 1 2 6\n1 1 1 1 1 1\n1 1 1 1 1 1\n",
        "numoe-heat 1 2 5\n1 1 1 1 1\n1 1 1 1\n",
        "numoe-heat 1 2 5\n1 1 1 1 1\n1 1 1 -1 1\n",
        "numoe-heat 1 2 5\n1 1 1 1 1\n1 1 1 nan 1\n",
        "numoe-heat 1 2 5\n1 1 1 1 1\n1 1 1 inf 1\n",
        "numoe-heat 1 2 5\n1 1 1 1 1\n1 1 1 1 1 1\n",
    };
    for (size_t i = 0; i < sizeof damaged / sizeof damaged[0]; i++) {
        struct numoe_error error = NUMOE_ERROR_INIT;
        write_file(damaged[i]);
        cr_expect_eq(gpu_cache_load(&b, path, &error), -EINVAL, "file %d", (int)i);
        cr_expect(error.message[0]);
        cr_expect_eq(gpu_cache_hottest(&b, 1, 4, has_all, NULL, hot), 2, "file %d changed it",
                     (int)i);
    }
    unlink(path);
    cr_expect_eq(gpu_cache_load(&b, path, NULL), -ENOENT);
    gpu_cache_fini(&a);
    gpu_cache_fini(&b);
}
