/*
 * What stats say of GPUs, one and several: how each gets at host memory, how much of it is pinned
 * and why not more, and what it did; as a struct, as JSON, as Prometheus text, and in a run's
 * report.
 */
#include <errno.h>
#include <jansson.h>

#include "../support/exposition.h"
#include "cli_gpu.h"
#include "small_context.h"
#include "stats_print.h"

/* Names come from drivers: whatever they hold is told whole. */
static const char odd_name[] = "Fake \"A\\10\"\nand more";

static uint32_t pins, refuse_from, refuse_until; /* of the pins of a context, counted from 0 */

static int picky_pin(void *device, void *address, uint64_t bytes)
{
    const uint32_t at = pins++;

    return at >= refuse_from && at < refuse_until ? fake_refuse(device, 2)
                                                  : fake_pin(device, address, bytes);
}

struct set {
    struct gpu_ops ops;
    struct fake *fakes[2];
    struct numoe *context;
    struct numoe_model *model;
};

static void set_make(struct set *s, uint32_t count, uint32_t from, uint32_t until)
{
    pins = 0;
    refuse_from = from;
    refuse_until = until;
    *s = (struct set){.ops = fake_ops};
    s->ops.pin = picky_pin;
    s->context = context_make(NULL);
    for (uint32_t i = 0; i < count; i++) {
        /* of a locality that is not known the node means nothing */
        struct numoe_gpu_properties p = {
            .index = 3 - i, .locality_known = i == 0, .os_node = i == 0 ? 0 : 1};

        snprintf(p.name, sizeof p.name, "%s", i ? "Other" : odd_name);
        snprintf(p.bus, sizeof p.bus, "0000:%02x:00.0", 16 + i);
        s->fakes[i] = fake_make(7 + i);
        s->fakes[i]->pins = i ? s->fakes[0] : NULL;
        s->fakes[i]->memory = 256 << 20;
        cr_assert_eq(gpu_wrap(&s->ops, s->fakes[i], &p, &s->context->log,
                              i ? &s->context->more_gpus[i - 1] : &s->context->gpu),
                     0);
        s->context->more_gpu_count = i;
    }
    s->model = model_make(s->context);
    cr_assert_not_null(numoe_model_gpu(s->model));
}

static void set_call(struct set *s, uint64_t calls)
{
    for (uint64_t i = 0; i < calls; i++) {
        struct call c;

        call_make(&c, i);
        cr_assert_eq(numoe_forward(s->model, i % LAYERS, &c.batch, &c.result, NULL), 0);
    }
}

/* Through staging, too, the results are those of the CPU. */
static void expect_the_cpus(struct set *s)
{
    struct numoe *there = context_make(NULL);
    struct numoe_model *cpu = model_make(there);

    for (uint64_t i = 0; i < 2 * LAYERS; i++) {
        struct call a, b;

        call_make(&a, 50 + i);
        call_make(&b, 50 + i);
        cr_assert_eq(numoe_forward(s->model, i % LAYERS, &a.batch, &a.result, NULL), 0);
        cr_assert_eq(numoe_forward(cpu, i % LAYERS, &b.batch, &b.result, NULL), 0);
        cr_expect_eq(a.result.gpu_tokens, TOKENS);
        cr_expect_lt(distance(&a, &b), 5e-3, "call %d: %.2e", (int)i, distance(&a, &b));
    }
    numoe_model_destroy(cpu);
    numoe_close(there);
}

static void set_free(struct set *s)
{
    numoe_model_destroy(s->model);
    numoe_close(s->context);
    for (int i = 0; i < 2 && s->fakes[i]; i++) {
        cr_expect_eq(s->fakes[i]->wrong, 0, "%s", s->fakes[i]->text);
        fake_free(s->fakes[i]);
    }
}

static struct numoe_gpu_stats stats_of(const struct set *s, uint32_t gpu)
{
    struct numoe_gpu_stats stats = NUMOE_GPU_STATS_INIT;

    cr_assert_eq(numoe_stats_gpu(s->context, gpu, &stats), 0);
    return stats;
}

/* A metric of a GPU; NaN: it is not there. */
static double metric(const struct exposition *e, const char *name, uint32_t gpu, uint32_t device)
{
    char series[256];
    double value = NAN;

    snprintf(series, sizeof series, "%s{gpu=\"%u\",device=\"%u\"}", name, gpu, device);
    exposition_value(e, series, &value);
    return value;
}

static uint64_t number(const json_t *row, const char *key)
{
    const json_t *value = json_object_get(row, key);

    cr_assert(json_is_integer(value), "%s is no number", key);
    return (uint64_t)json_integer_value(value);
}

static void expect_word(const json_t *row, const char *key, const char *word)
{
    const char *is = json_string_value(json_object_get(row, key));

    cr_assert_not_null(is, "%s is no word", key);
    cr_expect_str_eq(is, word);
}

/* Every number of a GPU in a row of JSON and, unless e is NULL, among the metrics. */
static void expect_told(const struct numoe_gpu_stats *g, uint32_t index, const json_t *row,
                        const struct exposition *e)
{
    const struct {
        const char *key, *metric;
        uint64_t is;
    } numbers[] = {
        {"arena_bytes", "numoe_gpu_arena_bytes", g->arena_bytes},
        {"pinned_bytes", "numoe_gpu_pinned_bytes", g->pinned_bytes},
        {"pinned_chunks", "numoe_gpu_pinned_chunks", g->pinned_chunks},
        {"ring_bytes", "numoe_gpu_ring_bytes", g->ring_bytes},
        {"ring_checked_bytes", "numoe_gpu_ring_checked_bytes", g->ring_checked_bytes},
        {"ring_placed_bytes", "numoe_gpu_ring_placed_bytes", g->ring_placed_bytes},
        {"device_bytes", "numoe_gpu_device_bytes", g->device_bytes},
        {"window_bytes", "numoe_gpu_window_bytes", g->window_bytes},
        {"cells", "numoe_gpu_cells", g->cells},
        {"experts", "numoe_gpu_experts", g->experts},
        {"calls", "numoe_gpu_device_calls_total", g->calls},
        {"tokens", "numoe_gpu_device_tokens_total", g->tokens},
        {"copied_bytes", "numoe_gpu_copied_bytes_total", g->copied_bytes},
        {"copied_experts", "numoe_gpu_copied_experts_total", g->copied_experts},
        {"found_experts", "numoe_gpu_found_experts_total", g->found_experts},
        {"pieces", "numoe_gpu_pieces_total", g->pieces},
        {"batches", "numoe_gpu_batches_total", g->batches},
        {"peer_bytes", "numoe_gpu_peer_bytes_total", g->peer_bytes},
        {"summed_tokens", "numoe_gpu_summed_tokens_total", g->summed_tokens},
    };

    cr_expect_eq(number(row, "gpu"), index);
    cr_expect_eq(number(row, "device"), g->device);
    cr_expect_eq(number(row, "models"), g->models);
    expect_word(row, "name", g->name);
    expect_word(row, "bus", g->bus);
    expect_word(row, "path", numoe_pinning_names[g->pinning]);
    expect_word(row, "pin_refusal", g->pin_refusal);
    cr_expect_eq(json_is_true(json_object_get(row, "lost")), g->lost);
    cr_expect_eq(json_is_null(json_object_get(row, "node")), g->os_node == UINT32_MAX);
    cr_expect_eq(json_is_null(json_object_get(row, "ring_node")),
                 !g->ring_bytes || g->ring_node == UINT32_MAX);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        cr_expect_eq(number(row, numbers[i].key), numbers[i].is, "%s", numbers[i].key);
        if (e)
            cr_expect_eq(metric(e, numbers[i].metric, index, g->device), (double)numbers[i].is,
                         "%s", numbers[i].metric);
    }
    if (e)
        cr_expect_eq(metric(e, "numoe_gpu_lost", index, g->device), g->lost);
    cr_expect_eq(g->sums[NUMOE_GPU_SUM_AUTO], 0);
    for (int i = NUMOE_GPU_SUM_HOST; i <= NUMOE_GPU_SUM_NCCL; i++) {
        char series[256];
        double value = NAN;

        cr_expect_eq(number(json_object_get(row, "sums"), numoe_gpu_sum_names[i]), g->sums[i]);
        snprintf(series, sizeof series, "numoe_gpu_sum_models{gpu=\"%u\",device=\"%u\",sum=\"%s\"}",
                 index, g->device, numoe_gpu_sum_names[i]);
        cr_expect(!e || exposition_value(e, series, &value));
        cr_expect(!e || value == (double)g->sums[i], "%s", series);
    }
}

/* JSON, Prometheus text and the report of a run say what the structs say. */
static void expect_all_told(struct set *s)
{
    struct stats_snapshot snapshot;
    struct numoe_model_info info = NUMOE_MODEL_INFO_INIT;
    struct numoe_gpu_report report;
    struct exposition e;
    json_t *stats, *run;
    char *text = NULL;
    const char *wrong;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);

    cr_assert_eq(numoe_stats_snapshot(s->context, &snapshot), 0);
    cr_assert_eq(numoe_stats_print_json(s->context, out), 0);
    fclose(out);
    stats = json_loads(text, 0, NULL);
    cr_assert_not_null(stats);
    free(text);
    out = open_memstream(&text, &size);
    cr_assert_eq(numoe_stats_print_prometheus(s->context, out), 0);
    fclose(out);
    wrong = exposition_read(text, &e);
    cr_assert_null(wrong, "%s", wrong);
    free(text);
    numoe_model_info(s->model, &info);
    numoe_gpu_model_report(numoe_model_gpu(s->model), &report);
    run = cli_gpu_json(&info, &snapshot, &report);
    cr_assert_not_null(run);
    cr_expect_eq(json_array_size(json_object_get(stats, "gpus")), snapshot.all.gpus);
    cr_expect_eq(json_array_size(json_object_get(run, "gpus")), snapshot.all.gpus);
    for (uint32_t g = 0; g < snapshot.all.gpus; g++) {
        const struct numoe_gpu_stats now = stats_of(s, g);

        cr_expect_arr_eq(&now, &snapshot.gpus[g], sizeof now);
        expect_told(&now, g, json_array_get(json_object_get(stats, "gpus"), g), &e);
        expect_told(&now, g, json_array_get(json_object_get(run, "gpus"), g), NULL);
    }
    exposition_free(&e);
    json_decref(stats);
    json_decref(run);
    numoe_stats_snapshot_free(&snapshot);
}

Test(gpu_stats, pinned_in_place_a_chunk_a_node, .timeout = 60)
{
    struct numoe_gpu_stats g;
    struct set s;

    set_make(&s, 1, UINT32_MAX, UINT32_MAX);
    set_call(&s, 6);
    g = stats_of(&s, 0);
    cr_expect_eq(g.device, 3);
    cr_expect_eq(g.models, 1);
    cr_expect_str_eq(g.name, odd_name);
    cr_expect_eq(g.os_node, 0);
    cr_expect_eq(g.pinning, NUMOE_PINNING_IN_PLACE);
    cr_expect_eq(g.pinned_chunks, 3);
    cr_expect_gt(g.arena_bytes, 0);
    cr_expect_eq(g.pinned_bytes, g.arena_bytes);
    cr_expect_str_eq(g.pin_refusal, "");
    cr_expect_eq(g.ring_bytes, 0);
    cr_expect_eq(g.calls, 6);
    cr_expect_eq(g.tokens, 6 * TOKENS);
    cr_expect_gt(g.copied_bytes, 0);
    cr_expect_gt(g.found_experts, 0);
    cr_expect_not(g.lost);
    expect_all_told(&s);
    set_free(&s);
}

Test(gpu_stats, part_in_place_and_a_ring_on_the_gpus_node, .timeout = 60)
{
    struct numoe_gpu_stats g;
    struct set s;

    set_make(&s, 1, 1, 2); /* the second arena's; the ring's, which comes later, is taken */
    set_call(&s, 3);
    g = stats_of(&s, 0);
    cr_expect_eq(g.pinning, NUMOE_PINNING_MIXED);
    cr_expect_eq(g.pinned_chunks, 1);
    cr_expect(g.pinned_bytes && g.pinned_bytes < g.arena_bytes);
    cr_expect(strstr(g.pin_refusal, "pinning") && strstr(g.pin_refusal, "out of memory"), "%s",
              g.pin_refusal);
    cr_expect_eq(g.ring_bytes, NUMOE_GPU_RING_BYTES);
    cr_expect_eq(g.ring_node, 0);
    cr_expect_leq(g.ring_placed_bytes, g.ring_checked_bytes);
    expect_all_told(&s);
    expect_the_cpus(&s);
    set_free(&s);
}

/* Of several models one that was refused is told, whether it came before the others or after. */
Test(gpu_stats, a_refusal_of_any_model_is_told, .timeout = 60)
{
    for (int late = 0; late < 2; late++) {
        struct numoe_model *other;
        struct set s;

        set_make(&s, 1, late ? UINT32_MAX : 0, UINT32_MAX);
        refuse_from = late ? pins : UINT32_MAX;
        other = model_make(s.context);
        cr_expect_eq(stats_of(&s, 0).models, 2);
        cr_expect_eq(stats_of(&s, 0).pinning, NUMOE_PINNING_MIXED);
        cr_expect(strstr(stats_of(&s, 0).pin_refusal, "out of memory"), "%s",
                  stats_of(&s, 0).pin_refusal);
        expect_all_told(&s);
        numoe_model_destroy(other);
        set_free(&s);
    }
}

Test(gpu_stats, nothing_in_place_and_a_ring_of_the_drivers, .timeout = 60)
{
    struct numoe_gpu_stats g;
    struct set s;

    set_make(&s, 1, 0, UINT32_MAX);
    set_call(&s, 3);
    g = stats_of(&s, 0);
    cr_expect_eq(g.pinning, NUMOE_PINNING_STAGING);
    cr_expect_eq(g.pinned_bytes, 0);
    cr_expect_eq(g.pinned_chunks, 0);
    cr_expect_neq(*g.pin_refusal, 0);
    cr_expect_eq(g.ring_bytes, NUMOE_GPU_RING_BYTES);
    cr_expect_eq(g.ring_node, UINT32_MAX);
    expect_all_told(&s);
    expect_the_cpus(&s);
    set_free(&s);
}

Test(gpu_stats, several_gpus_have_a_row_each_and_one_is_lost, .timeout = 60)
{
    struct numoe_gpu_stats g[2];
    struct set s;

    set_make(&s, 2, UINT32_MAX, UINT32_MAX);
    set_call(&s, 4);
    for (uint32_t i = 0; i < 2; i++) {
        g[i] = stats_of(&s, i);
        cr_expect_eq(g[i].device, 3 - i);
        cr_expect_eq(g[i].os_node, i ? UINT32_MAX : 0);
        cr_expect_str_eq(g[i].bus, i ? "0000:11:00.0" : "0000:10:00.0");
        cr_expect_eq(g[i].pinning, NUMOE_PINNING_IN_PLACE);
        cr_expect_eq(g[i].calls, 4);
        cr_expect_gt(g[i].copied_experts, 0);
        cr_expect_not(g[i].lost);
    }
    cr_expect_eq(g[0].experts + g[1].experts, LAYERS * EXPERTS,
                 "experts are divided, there or not");
    expect_all_told(&s);
    s.fakes[1]->fail_at = s.fakes[1]->calls + 20;
    s.fakes[1]->fail_code = 700;
    set_call(&s, 4);
    cr_expect_not(stats_of(&s, 0).lost);
    cr_expect(stats_of(&s, 1).lost);
    expect_all_told(&s);
    set_free(&s);
}

/* Each GPU has summed its rows, and copied them from the other; a second model's are added. */
Test(gpu_stats, where_outputs_are_summed, .timeout = 60)
{
    const uint64_t row = HIDDEN * sizeof(float);
    struct numoe_gpu_stats g[2];
    struct numoe_model *other;
    struct set s;

    set_make(&s, 2, UINT32_MAX, UINT32_MAX);
    numoe_model_destroy(s.model);
    s.context->gpu_sum = NUMOE_GPU_SUM_PEER;
    s.context->gpu_from_tokens = 1; /* all of a call is the GPUs' */
    s.model = model_make(s.context);
    set_call(&s, 5);
    for (uint32_t i = 0; i < 2; i++) {
        g[i] = stats_of(&s, i);
        cr_expect_eq(g[i].sums[NUMOE_GPU_SUM_PEER], 1);
        cr_expect_eq(g[i].sums[NUMOE_GPU_SUM_HOST] + g[i].sums[NUMOE_GPU_SUM_NCCL], 0);
        cr_expect_geq(g[i].peer_bytes, g[i].summed_tokens * row);
    }
    cr_expect_eq(g[0].summed_tokens + g[1].summed_tokens, 5 * TOKENS);
    cr_expect(g[0].summed_tokens && g[1].summed_tokens);
    expect_all_told(&s);
    s.context->gpu_sum = NUMOE_GPU_SUM_HOST;
    other = model_make(s.context);
    cr_expect_eq(stats_of(&s, 1).sums[NUMOE_GPU_SUM_HOST], 1);
    expect_all_told(&s);
    numoe_model_destroy(other);
    numoe_model_destroy(s.model);
    for (uint32_t i = 0; i < 2; i++) {
        const struct numoe_gpu_stats now = stats_of(&s, i);

        cr_expect_eq(now.sums[NUMOE_GPU_SUM_PEER], 0);
        cr_expect_eq(now.peer_bytes, g[i].peer_bytes);
        cr_expect_eq(now.summed_tokens, g[i].summed_tokens);
    }
    s.model = model_make(s.context);
    set_free(&s);
}

/* What was done stays counted when a model goes; what it had of the GPU does not. */
Test(gpu_stats, no_counter_falls_when_a_model_goes, .timeout = 60)
{
    struct numoe_gpu_stats had[2], now;
    struct set s;

    set_make(&s, 2, UINT32_MAX, UINT32_MAX);
    set_call(&s, 6);
    for (uint32_t i = 0; i < 2; i++)
        had[i] = stats_of(&s, i);
    numoe_model_destroy(s.model);
    for (uint32_t i = 0; i < 2; i++) {
        now = stats_of(&s, i);
        cr_expect_eq(now.calls, 6);
        cr_expect_eq(now.tokens, 6 * TOKENS);
        cr_expect_gt(now.copied_bytes, 0);
        cr_expect_eq(now.copied_bytes, had[i].copied_bytes);
        cr_expect_eq(now.copied_experts, had[i].copied_experts);
        cr_expect_eq(now.found_experts, had[i].found_experts);
        cr_expect_eq(now.pieces, had[i].pieces);
        cr_expect_eq(now.batches, had[i].batches);
        cr_expect_eq(now.pinning, NUMOE_PINNING_NONE);
        cr_expect_eq(now.models + now.arena_bytes + now.pinned_bytes + now.pinned_chunks +
                         now.device_bytes + now.window_bytes + now.cells + now.experts,
                     0);
        cr_expect_eq(now.ring_node, UINT32_MAX);
    }
    s.model = model_make(s.context);
    set_call(&s, 3);
    for (uint32_t i = 0; i < 2; i++) {
        now = stats_of(&s, i);
        cr_expect_eq(now.calls, 9);
        cr_expect_gt(now.copied_bytes, had[i].copied_bytes);
        cr_expect_eq(now.arena_bytes, had[i].arena_bytes);
    }
    expect_all_told(&s);
    set_free(&s);
}

Test(gpu_stats, without_a_gpu_there_is_no_row, .timeout = 60)
{
    struct numoe_gpu_stats stats = NUMOE_GPU_STATS_INIT;
    struct numoe_stats all = NUMOE_STATS_INIT;
    struct numoe *context = context_make(NULL);
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);

    cr_expect_eq(numoe_stats_get(context, &all), 0);
    cr_expect_eq(all.gpus, 0);
    cr_expect_eq(numoe_stats_gpu(context, 0, &stats), -EINVAL);
    cr_expect_eq(numoe_stats_gpu(context, 0, NULL), -EINVAL);
    cr_expect_eq(numoe_stats_gpu(NULL, 0, &stats), -EINVAL);
    cr_expect_eq(numoe_stats_print_prometheus(context, out), 0);
    fclose(out);
    cr_expect_null(strstr(text, "numoe_gpu_info"));
    free(text);
    numoe_close(context);
}

/* A caller of an older library's size gets that much, and nothing behind it is touched. */
Test(gpu_stats, as_much_as_the_caller_has_room_for, .timeout = 60)
{
    struct numoe_gpu_stats stats;
    struct set s;

    set_make(&s, 1, UINT32_MAX, UINT32_MAX);
    memset(&stats, 0xA5, sizeof stats);
    stats.size = offsetof(struct numoe_gpu_stats, arena_bytes);
    cr_assert_eq(numoe_stats_gpu(s.context, 0, &stats), 0);
    cr_expect_eq(stats.device, 3);
    cr_expect_eq(stats.pinning, NUMOE_PINNING_IN_PLACE);
    for (size_t i = stats.size; i < sizeof stats; i++)
        cr_assert_eq(((uint8_t *)&stats)[i], 0xA5);
    stats.size = sizeof stats.size - 1;
    cr_expect_eq(numoe_stats_gpu(s.context, 0, &stats), -EINVAL);
    set_free(&s);
}
