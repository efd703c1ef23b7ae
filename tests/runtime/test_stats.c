/* Stats of a context: what is counted, and the same as JSON and as Prometheus text. */
#include <criterion/criterion.h>
#include <errno.h>
#include <jansson.h>
#include <stdarg.h>
#include <sys/wait.h>
#include <unistd.h>

#include "context.h"
#include "stats_context.h"
#include "support/exposition.h"

static struct numoe_stats all_of(struct numoe *context)
{
    struct numoe_stats stats = NUMOE_STATS_INIT;

    cr_assert_eq(numoe_stats_get(context, &stats), 0);
    return stats;
}

static struct numoe_worker_stats worker_of(struct numoe *context, uint32_t worker)
{
    struct numoe_worker_stats stats = NUMOE_WORKER_STATS_INIT;

    cr_assert_eq(numoe_stats_worker(context, worker, &stats), 0);
    return stats;
}

static struct numoe_node_stats node_of(struct numoe *context, uint32_t node)
{
    struct numoe_node_stats stats = NUMOE_NODE_STATS_INIT;

    cr_assert_eq(numoe_stats_node(context, node, &stats), 0);
    return stats;
}

static struct subject two_nodes(uint32_t threads, bool bias, bool timed)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;

    options.topology = TWO_NODES;
    options.threads = threads;
    options.stats = timed;
    return open_subject(&options, bias);
}

/* ---- counters -------------------------------------------------------------------------------- */

/* Bytes of experts [first, first + count) of a layer on a node, by the plan alone. */
static uint64_t bytes_on(const struct subject *s, uint64_t layer, uint32_t node, uint64_t first,
                         uint64_t count)
{
    const struct numoe_plan *plan = numoe_model_plan(s->model);
    uint64_t bytes = 0;

    for (uint64_t e = first; e < first + count; e++) {
        const uint64_t begin = numoe_plan_boundary(plan, layer, e, node);
        const uint64_t end = numoe_plan_boundary(plan, layer, e, node + 1);

        bytes += (end - begin) * plan->shape.slice_bytes;
        if (begin == 0 && end > 0)
            bytes += plan->shape.expert_bytes;
    }
    return bytes;
}

Test(stats, bytes_are_what_the_shapes_say, .timeout = 60)
{
    for (int bias = 0; bias < 2; bias++) {
        struct subject s = two_nodes(0, bias, false);
        uint64_t expected[2] = {0}, read = 0, remote = 0;
        struct numoe_stats all;

        cr_assert_eq(all_of(s.context).nodes, 2);
        cr_assert_eq(s.info.expert_bytes,
                     SLICES * numoe_model_shape(s.model)->bytes + (bias ? HIDDEN * 4 : 0));
        call(&s, 0, 1, 2, 3);
        call(&s, 1, 1, 0, 1);
        call(&s, 1, 4, 1, 6); /* experts shared by tokens count once */
        for (uint32_t n = 0; n < 2; n++)
            expected[n] =
                bytes_on(&s, 0, n, 2, 3) + bytes_on(&s, 1, n, 0, 1) + bytes_on(&s, 1, n, 1, 6);
        all = all_of(s.context);
        cr_expect_eq(all.calls, 3);
        cr_expect_eq(all.tokens, 6);
        cr_expect_eq(all.pairs, 3 + 1 + 24);
        cr_expect_eq(all.expert_bytes, 10 * s.info.expert_bytes);
        cr_expect_eq(expected[0] + expected[1], all.expert_bytes);
        for (uint32_t n = 0; n < 2; n++)
            cr_expect_eq(node_of(s.context, n).expert_bytes, expected[n], "node %u", n);
        for (uint32_t w = 0; w < all.workers; w++) {
            read += worker_of(s.context, w).work.read_bytes;
            remote += worker_of(s.context, w).work.remote_bytes;
        }
        cr_expect_eq(read, all.expert_bytes);
        cr_expect_eq(read, all.work.read_bytes);
        cr_expect_eq(remote, all.work.remote_bytes);
        close_subject(&s);
    }
}

Test(stats, what_a_worker_reads_elsewhere_is_remote, .timeout = 60)
{
    /* the only thread stands for the first worker, which belongs to node 0 */
    struct subject s = two_nodes(1, false, false);
    struct numoe_worker_stats worker;

    call(&s, 0, 1, 0, 5);
    worker = worker_of(s.context, 0);
    cr_expect_eq(all_of(s.context).workers, 1);
    cr_expect_eq(worker.node, 0);
    cr_expect_eq(worker.work.read_bytes, 5 * s.info.expert_bytes);
    cr_expect_eq(worker.work.remote_bytes, bytes_on(&s, 0, 1, 0, 5));
    cr_expect_gt(worker.work.remote_bytes, 0);
    cr_expect_eq(node_of(s.context, 0).workers, 1);
    cr_expect_eq(node_of(s.context, 1).workers, 0);
    cr_expect_eq(node_of(s.context, 1).work.read_bytes, 0);
    close_subject(&s);
}

Test(stats, kernels_may_go_over_weights_more_than_once, .timeout = 60)
{
    struct subject s = two_nodes(2, false, false);
    struct numoe_stats all;

    call(&s, 0, 300, 0, 2);
    all = all_of(s.context);
    cr_expect_eq(all.expert_bytes, 2 * s.info.expert_bytes);
    cr_expect_eq(all.work.read_bytes % (2 * s.info.expert_bytes), 0);
    cr_expect_gt(all.work.read_bytes, all.expert_bytes);
    close_subject(&s);
}

/* Items of the schedule that the context still holds. */
static uint64_t schedule_items(const struct subject *s)
{
    const struct numoe_schedule *schedule = &s->context->schedule;

    return (schedule->own_records ? 0 : (schedule->token_count + 15) / 16) + schedule->lane_count +
           schedule->token_count * schedule->combine_chunks;
}

Test(stats, items_of_all_workers_are_those_of_the_schedule, .timeout = 60)
{
    static const uint64_t tokens[] = {1, 4, 5, 40, 200};

    for (uint32_t threads = 1; threads < 6; threads += 2) {
        struct subject s = two_nodes(threads, false, false);

        for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
            uint64_t before = all_of(s.context).work.items, of_nodes = 0, of_workers = 0;

            call(&s, 0, tokens[i], 0, 4);
            cr_expect_eq(all_of(s.context).work.items - before, schedule_items(&s));
            for (uint32_t n = 0; n < 2; n++)
                of_nodes += node_of(s.context, n).work.items;
            for (uint32_t w = 0; w < threads; w++)
                of_workers += worker_of(s.context, w).work.items;
            cr_expect_eq(of_nodes, all_of(s.context).work.items);
            cr_expect_eq(of_workers, all_of(s.context).work.items);
        }
        close_subject(&s);
    }
}

Test(stats, a_submission_counts_like_a_call, .timeout = 60)
{
    struct subject s = two_nodes(3, false, false);
    struct request r = new_request(2, 1, 3);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_stats all;
    uint64_t ticket;

    cr_assert_eq(numoe_submit(s.model, 1, &r.batch, &ticket, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_wait(s.model, ticket, NULL), 0);
    all = all_of(s.context);
    cr_expect_eq(all.calls, 1);
    cr_expect_eq(all.tokens, 2);
    cr_expect_eq(all.expert_bytes, 3 * s.info.expert_bytes);
    cr_expect_eq(all.work.read_bytes, all.expert_bytes);
    cr_expect_eq(node_of(s.context, 0).expert_bytes + node_of(s.context, 1).expert_bytes,
                 all.expert_bytes);
    cr_expect_gt(all.nanoseconds, 0);
    free_request(&r);
    close_subject(&s);
}

Test(stats, deferred_experts_count_with_the_call_that_defers_them, .timeout = 60)
{
    struct subject s = two_nodes(3, false, false);
    const uint8_t deferred[EXPERTS] = {[1] = 1, [2] = 1};
    struct request r = new_request(2, 0, 4);
    struct numoe_stats all;

    r.batch.deferred = deferred;
    cr_assert_eq(numoe_forward(s.model, 0, &r.batch, NULL, NULL), 0);
    cr_expect_eq(all_of(s.context).expert_bytes, 4 * s.info.expert_bytes);
    for (uint32_t n = 0; n < 2; n++)
        cr_expect_eq(node_of(s.context, n).expert_bytes, bytes_on(&s, 0, n, 0, 4));
    /* the call that finishes them: what it is given counts, and they do not count again */
    r.batch.deferred = NULL;
    cr_assert_eq(numoe_forward(s.model, 1, &r.batch, NULL, NULL), 0);
    all = all_of(s.context);
    cr_expect_eq(all.calls, 2);
    cr_expect_eq(all.expert_bytes, 8 * s.info.expert_bytes);
    cr_expect_eq(all.work.read_bytes, 8 * s.info.expert_bytes);
    for (uint32_t n = 0; n < 2; n++)
        cr_expect_eq(node_of(s.context, n).expert_bytes,
                     bytes_on(&s, 0, n, 0, 4) + bytes_on(&s, 1, n, 0, 4));
    free_request(&r);
    close_subject(&s);
}

Test(stats, a_call_that_fails_counts_nothing, .timeout = 60)
{
    struct subject s = two_nodes(2, false, false);
    struct request r = new_request(1, 0, 2);
    struct numoe_stats before = all_of(s.context), after;

    r.ids[1] = EXPERTS;
    r.batch.strict = true;
    cr_assert_eq(numoe_forward(s.model, 0, &r.batch, NULL, NULL), -EINVAL);
    after = all_of(s.context);
    cr_expect_eq(after.calls, 0);
    cr_expect_eq(after.expert_bytes, 0);
    cr_expect_eq(after.work.items, before.work.items);
    cr_expect_eq(node_of(s.context, 0).expert_bytes, 0);
    free_request(&r);
    close_subject(&s);
}

Test(stats, times_are_measured_only_when_asked_for, .timeout = 60)
{
    for (int timed = 0; timed < 2; timed++) {
        struct subject s = two_nodes(2, false, timed);
        struct numoe_stats all;

        for (int i = 0; i < 20; i++)
            call(&s, 0, 8, 0, 4);
        all = all_of(s.context);
        cr_expect_eq(all.timed, timed);
        cr_expect_eq(all.work.busy_ns > 0, timed);
        /* nobody is busy longer than the context is open */
        cr_expect_leq(all.work.busy_ns, 2 * all.uptime_ns);
        if (!timed)
            cr_expect_eq(all.work.parked_ns + all.work.wakes + all.work.wake_ns, 0);
        close_subject(&s);
    }
}

Test(stats, placement_is_of_all_models_of_the_context, .timeout = 60)
{
    struct subject s = two_nodes(0, false, false);
    struct numoe_node_stats one[2] = {node_of(s.context, 0), node_of(s.context, 1)};
    struct numoe_model *second = new_model(s.context, true);
    uint64_t planned = 0;

    cr_expect_eq(all_of(s.context).models, 2);
    for (uint32_t n = 0; n < 2; n++) {
        struct numoe_node_info a = NUMOE_NODE_INFO_INIT, b = NUMOE_NODE_INFO_INIT;
        struct numoe_node_stats both = node_of(s.context, n);

        cr_assert_eq(numoe_model_node(s.model, n, &a), 0);
        cr_assert_eq(numoe_model_node(second, n, &b), 0);
        cr_expect_eq(one[n].planned_bytes, a.planned_bytes);
        cr_expect_eq(one[n].checked_bytes, a.checked_bytes);
        cr_expect_eq(both.os_index, a.os_index);
        cr_expect_eq(both.planned_bytes, a.planned_bytes + b.planned_bytes);
        cr_expect_eq(both.checked_bytes, a.checked_bytes + b.checked_bytes);
        cr_expect_eq(both.placed_bytes, a.placed_bytes + b.placed_bytes);
        cr_expect_eq(both.giant_bytes, a.giant_bytes + b.giant_bytes);
        cr_expect_eq(both.spilled_bytes, a.spilled_bytes + b.spilled_bytes);
        cr_expect_eq(both.bound, a.bound && b.bound);
        planned += both.planned_bytes;
    }
    cr_expect_gt(planned, s.info.resident_bytes);
    numoe_model_destroy(second);
    cr_expect_eq(all_of(s.context).models, 1);
    cr_expect_eq(node_of(s.context, 1).planned_bytes, one[1].planned_bytes);
    close_subject(&s);
}

Test(stats, nodes_without_a_model_have_no_placement, .timeout = 60)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe *context = NULL;

    options.topology = TWO_NODES;
    cr_assert_eq(numoe_open(&options, &context, NULL), 0);
    cr_expect_eq(all_of(context).models, 0);
    cr_expect_eq(node_of(context, 0).planned_bytes, 0);
    cr_expect(!node_of(context, 0).bound);
    numoe_close(context);
}

Test(stats, structs_are_filled_as_far_as_they_reach, .timeout = 60)
{
    struct subject s = two_nodes(2, false, true);
    struct numoe_worker_stats worker, full;
    struct numoe_node_stats node;
    struct numoe_stats all;

    call(&s, 0, 1, 0, 3);
    memset(&worker, 0x5a, sizeof worker);
    worker.size = offsetof(struct numoe_worker_stats, work) + sizeof(uint64_t);
    cr_assert_eq(numoe_stats_worker(s.context, 1, &worker), 0);
    full = worker_of(s.context, 1);
    cr_expect_eq(worker.size, offsetof(struct numoe_worker_stats, work) + sizeof(uint64_t));
    cr_expect_eq(worker.node, full.node);
    cr_expect_eq(worker.work.items, full.work.items);
    cr_expect_eq(worker.work.steals_from[0], 0x5a5a5a5a5a5a5a5au);

    memset(&all, 0x5a, sizeof all);
    all.size = offsetof(struct numoe_stats, uptime_ns);
    cr_assert_eq(numoe_stats_get(s.context, &all), 0);
    cr_expect_eq(all.calls, 1);
    cr_expect_eq(all.uptime_ns, 0x5a5a5a5a5a5a5a5au);

    /* of a later version, with more than there is */
    char later[sizeof node + 64];
    memset(later, 0x5a, sizeof later);
    ((struct numoe_node_stats *)(void *)later)->size = sizeof later;
    cr_assert_eq(numoe_stats_node(s.context, 0, (struct numoe_node_stats *)(void *)later), 0);
    memcpy(&node, later, sizeof node);
    cr_expect_eq(node.size, sizeof later);
    cr_expect_eq(node.os_index, 0);
    cr_expect_eq(later[sizeof node], 0x5a);
    close_subject(&s);
}

Test(stats, what_is_not_there_is_refused, .timeout = 60)
{
    struct subject s = two_nodes(2, false, false);
    struct numoe_worker_stats worker = NUMOE_WORKER_STATS_INIT;
    struct numoe_node_stats node = NUMOE_NODE_STATS_INIT;
    struct numoe_stats all = NUMOE_STATS_INIT;
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe *context = NULL;

    cr_expect_eq(numoe_stats_get(NULL, &all), -EINVAL);
    cr_expect_eq(numoe_stats_get(s.context, NULL), -EINVAL);
    cr_expect_eq(numoe_stats_worker(s.context, 2, &worker), -EINVAL);
    cr_expect_eq(numoe_stats_worker(NULL, 0, &worker), -EINVAL);
    cr_expect_eq(numoe_stats_node(s.context, 2, &node), -EINVAL);
    cr_expect_eq(numoe_stats_node(NULL, 0, &node), -EINVAL);
    worker.size = node.size = all.size = 3;
    cr_expect_eq(numoe_stats_get(s.context, &all), -EINVAL);
    cr_expect_eq(numoe_stats_worker(s.context, 0, &worker), -EINVAL);
    cr_expect_eq(numoe_stats_node(s.context, 0, &node), -EINVAL);
    cr_expect_eq(numoe_stats_print_json(NULL, stdout), -EINVAL);
    cr_expect_eq(numoe_stats_print_json(s.context, NULL), -EINVAL);
    cr_expect_eq(numoe_stats_print_prometheus(NULL, stdout), -EINVAL);
    cr_expect_eq(numoe_stats_print_prometheus(s.context, NULL), -EINVAL);
    close_subject(&s);

    options.trace_events = (1u << 24) + 1;
    cr_expect_eq(numoe_open(&options, &context, &error), -EINVAL);
    cr_expect_str_eq(error.where, "trace_events");
}

Test(stats, a_forked_child_is_refused_where_it_could_hang, .timeout = 60)
{
    struct subject s = two_nodes(2, false, false);
    int status;
    pid_t child;

    pthread_mutex_lock(&s.context->models_lock); /* as another thread may at that moment */
    child = fork();
    if (child == 0) {
        struct numoe_node_stats node = NUMOE_NODE_STATS_INIT;

        alarm(20);
        if (numoe_stats_node(s.context, 0, &node) != -ECHILD ||
            numoe_stats_print_json(s.context, stdout) != -ECHILD)
            _exit(1);
        close_subject(&s);
        _exit(0);
    }
    pthread_mutex_unlock(&s.context->models_lock);
    cr_assert_gt(child, 0);
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", status);
    close_subject(&s);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static char *printed(struct numoe *context, int (*print)(struct numoe *, FILE *))
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);

    cr_assert_not_null(out);
    cr_assert_eq(print(context, out), 0);
    fclose(out);
    cr_assert_eq(strlen(text), size);
    return text;
}

static uint64_t number(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);

    cr_assert(json_is_integer(value), "%s is no integer", key);
    return (uint64_t)json_integer_value(value);
}

/* A number printed between two snapshots lies between theirs. */
#define BETWEEN(name, before, value, after)                                                        \
    cr_expect((before) <= (value) && (value) <= (after), "%s: %llu is not in %llu .. %llu", name,  \
              (unsigned long long)(value), (unsigned long long)(before),                           \
              (unsigned long long)(after))

static void compare_work(const json_t *object, const struct numoe_work_stats *before,
                         const struct numoe_work_stats *after, bool timed)
{
    static const char *const distances[] = {"l3", "node", "domain", "package", "machine"};
    const json_t *steals = json_object_get(object, "steals");
    const json_t *buckets = json_object_get(object, "wake_buckets");

#define ROW(field) BETWEEN(#field, before->field, number(object, #field), after->field)
    ROW(items);
    ROW(stolen_items);
    ROW(refusals);
    ROW(sleeps);
    ROW(read_bytes);
    ROW(remote_bytes);
    cr_assert_eq(json_object_size(steals), NUMOE_DISTANCES);
    for (int d = 0; d < NUMOE_DISTANCES; d++)
        BETWEEN(distances[d], before->steals_from[d], number(steals, distances[d]),
                after->steals_from[d]);
    if (!timed) {
        cr_expect(json_is_null(json_object_get(object, "busy_ns")));
        cr_expect(json_is_null(json_object_get(object, "parked_ns")));
        cr_expect(json_is_null(json_object_get(object, "wakes")));
        cr_expect(json_is_null(json_object_get(object, "wake_ns")));
        cr_expect(json_is_null(buckets));
        return;
    }
    ROW(busy_ns);
    ROW(parked_ns);
    ROW(wakes);
    ROW(wake_ns);
#undef ROW
    cr_assert_eq(json_array_size(buckets), NUMOE_WAKE_BUCKETS);
    for (size_t b = 0; b < NUMOE_WAKE_BUCKETS; b++)
        BETWEEN("bucket", before->wake_buckets[b],
                (uint64_t)json_integer_value(json_array_get(buckets, b)), after->wake_buckets[b]);
}

Test(stats_json, agrees_with_the_structs, .timeout = 60)
{
    for (int timed = 0; timed < 2; timed++) {
        struct subject s = two_nodes(3, true, timed);
        struct numoe_worker_stats before[3];
        struct numoe_node_stats nodes[2];
        struct numoe_stats all;
        json_error_t error;
        json_t *root, *list;
        char *text;

        for (int i = 0; i < 10; i++)
            call(&s, i % 2, 1 + 5 * i, 0, 5);
        for (uint32_t w = 0; w < 3; w++)
            before[w] = worker_of(s.context, w);
        for (uint32_t n = 0; n < 2; n++)
            nodes[n] = node_of(s.context, n);
        text = printed(s.context, numoe_stats_print_json);
        root = json_loads(text, JSON_REJECT_DUPLICATES, &error);
        cr_assert_not_null(root, "line %d: %s", error.line, error.text);
        all = all_of(s.context);
        cr_expect_eq(json_is_true(json_object_get(root, "timed")), timed);
        cr_expect_eq(number(root, "calls"), all.calls);
        cr_expect_eq(number(root, "tokens"), all.tokens);
        cr_expect_eq(number(root, "pairs"), all.pairs);
        cr_expect_eq(number(root, "expert_bytes"), all.expert_bytes);
        cr_expect_eq(number(root, "call_ns"), all.nanoseconds);
        cr_expect_eq(number(root, "workspace_bytes"), all.workspace_bytes);
        cr_expect_eq(number(root, "models"), 1);
        cr_expect_leq(number(root, "uptime_ns"), all.uptime_ns);

        list = json_object_get(root, "workers");
        cr_assert_eq(json_array_size(list), 3);
        for (uint32_t w = 0; w < 3; w++) {
            const json_t *object = json_array_get(list, w);
            struct numoe_worker_stats after = worker_of(s.context, w);

            cr_expect_eq(number(object, "worker"), w);
            cr_expect_eq(number(object, "node"), nodes[after.node].os_index);
            cr_expect(json_is_null(json_object_get(object, "os_cpu")), "a described machine");
            compare_work(object, &before[w].work, &after.work, timed);
        }
        list = json_object_get(root, "nodes");
        cr_assert_eq(json_array_size(list), 2);
        for (uint32_t n = 0; n < 2; n++) {
            const json_t *object = json_array_get(list, n);
            struct numoe_node_stats after = node_of(s.context, n);

            cr_expect_eq(number(object, "os_index"), after.os_index);
            cr_expect_eq(number(object, "workers"), after.workers);
            cr_expect_eq(number(object, "expert_bytes"), after.expert_bytes);
            cr_expect_eq(number(object, "planned_bytes"), after.planned_bytes);
            cr_expect_eq(number(object, "placed_bytes"), after.placed_bytes);
            cr_expect_eq(number(object, "checked_bytes"), after.checked_bytes);
            cr_expect_eq(number(object, "huge_bytes"), after.huge_bytes);
            cr_expect_eq(number(object, "giant_bytes"), after.giant_bytes);
            cr_expect_eq(number(object, "spilled_bytes"), after.spilled_bytes);
            cr_expect_eq(json_is_true(json_object_get(object, "bound")), after.bound);
            compare_work(object, &nodes[n].work, &after.work, timed);
        }
        list = json_object_get(root, "wake_bounds_ns");
        cr_assert_eq(json_array_size(list), NUMOE_WAKE_BUCKETS);
        cr_expect_eq(json_integer_value(json_array_get(list, 0)), 1024);
        cr_expect_eq(json_integer_value(json_array_get(list, 10)), 1024 << 10);
        cr_expect(json_is_null(json_array_get(list, NUMOE_WAKE_BUCKETS - 1)));
        json_decref(root);
        free(text);
        close_subject(&s);
    }
}

Test(stats_json, a_stream_that_cannot_be_written_is_reported, .timeout = 60)
{
    struct subject s = two_nodes(2, false, true);
    FILE *full = fopen("/dev/full", "w");

    cr_assert_not_null(full);
    cr_expect_eq(numoe_stats_print_json(s.context, full), -EIO);
    cr_expect_eq(numoe_stats_print_prometheus(s.context, full), -EIO);
    fclose(full);
    close_subject(&s);
}

/* ---- Prometheus ------------------------------------------------------------------------------ */

static void expect_refused(const char *text, const char *because)
{
    struct exposition e;
    const char *wrong = exposition_read(text, &e);

    cr_expect(wrong && strstr(wrong, because), "%s, not %s, of:\n%s", wrong ? wrong : "accepted",
              because, text);
    exposition_free(&e);
}

/* The checker itself: what is wrong is found. */
Test(stats_prometheus, checker_knows_wrong_from_right)
{
#define HEAD "# HELP a_total Some.\n# TYPE a_total counter\n"
#define HISTOGRAM "# HELP h How.\n# TYPE h histogram\n"
    struct exposition e;

    cr_assert_null(exposition_read(HEAD "a_total 1\n", &e), "a counter");
    exposition_free(&e);
    cr_assert_null(exposition_read(HISTOGRAM
                                   "h_bucket{le=\"1\"} 1\nh_bucket{le=\"+Inf\"} 2\nh_sum 3\n"
                                   "h_count 2\n",
                                   &e),
                   "a histogram");
    exposition_free(&e);
    expect_refused(HEAD "a_total 1", "newline");
    expect_refused("a_total 1\n", "TYPE");
    expect_refused("# HELP a_total Some.\na_total 1\n", "TYPE");
    expect_refused("# TYPE a_total counter\na_total 1\n", "HELP");
    expect_refused("# HELP a_total Some.\n# TYPE a_total count\na_total 1\n", "type");
    expect_refused("# HELP a Some.\n# TYPE a counter\na 1\n", "_total");
    expect_refused(HEAD "a_total one\n", "value");
    expect_refused(HEAD "a_total\n", "value");
    expect_refused(HEAD "a_total -1\n", "negative");
    expect_refused(HEAD "a_total{b=1} 1\n", "label");
    expect_refused(HEAD "a_total{b=\"1\" c=\"2\"} 1\n", "label");
    expect_refused(HEAD "a_total{0b=\"1\"} 1\n", "label");
    expect_refused(HEAD "a_total{b=\"1} 1\n", "label");
    expect_refused(HEAD "a_total{b=\"1\"} 1\na_total{b=\"1\"} 2\n", "twice");
    expect_refused(HEAD HEAD "a_total 1\n", "twice");
    expect_refused(HEAD "# HELP b_total B.\n# TYPE b_total counter\na_total 1\nb_total 1\n",
                   "TYPE");
    expect_refused(HISTOGRAM "h_bucket{le=\"1\"} 2\nh_bucket{le=\"+Inf\"} 1\nh_sum 3\nh_count 1\n",
                   "falls");
    expect_refused(HISTOGRAM "h_bucket{le=\"2\"} 1\nh_bucket{le=\"1\"} 1\nh_bucket{le=\"+Inf\"} 1\n"
                             "h_sum 3\nh_count 1\n",
                   "order");
    expect_refused(HISTOGRAM "h_bucket{le=\"1\"} 1\nh_sum 3\nh_count 1\n", "+Inf");
    expect_refused(HISTOGRAM "h_bucket{le=\"+Inf\"} 1\nh_sum 3\nh_count 2\n", "count");
    expect_refused(HISTOGRAM "h_bucket{le=\"+Inf\"} 1\nh_count 1\n", "sum");
#undef HEAD
#undef HISTOGRAM
}

static double sample(const struct exposition *e, const char *format, ...)
{
    char series[256];
    va_list args;
    double value = 0;

    va_start(args, format);
    vsnprintf(series, sizeof series, format, args);
    va_end(args);
    cr_assert(exposition_value(e, series, &value), "%s is missing", series);
    return value;
}

Test(stats_prometheus, is_valid_and_agrees_with_the_structs, .timeout = 60)
{
    static const char *const distances[] = {"l3", "node", "domain", "package", "machine"};

    for (int timed = 0; timed < 2; timed++) {
        struct subject s = two_nodes(3, false, timed);
        struct numoe_worker_stats before[3];
        struct exposition e;
        struct numoe_stats all;
        const char *wrong;
        double value;
        char *text;

        for (int i = 0; i < 10; i++)
            call(&s, i % 2, 1 + 5 * i, 0, 5);
        for (uint32_t w = 0; w < 3; w++)
            before[w] = worker_of(s.context, w);
        text = printed(s.context, numoe_stats_print_prometheus);
        wrong = exposition_read(text, &e);
        cr_assert_null(wrong, "%s in:\n%s", wrong, text);
        all = all_of(s.context);
        cr_expect_eq(sample(&e, "numoe_calls_total"), (double)all.calls);
        cr_expect_eq(sample(&e, "numoe_tokens_total"), (double)all.tokens);
        cr_expect_eq(sample(&e, "numoe_expert_bytes_total"), (double)all.expert_bytes);
        cr_expect_float_eq(sample(&e, "numoe_call_seconds_total"), (double)all.nanoseconds * 1e-9,
                           1e-9);
        for (uint32_t w = 0; w < 3; w++) {
            struct numoe_worker_stats after = worker_of(s.context, w);
            char labels[64];

            snprintf(labels, sizeof labels, "worker=\"%u\",node=\"%u\"", w,
                     node_of(s.context, after.node).os_index);
            cr_expect_eq(sample(&e, "numoe_worker_items_total{%s}", labels),
                         (double)after.work.items);
            cr_expect_eq(sample(&e, "numoe_worker_read_bytes_total{%s}", labels),
                         (double)after.work.read_bytes);
            for (int d = 0; d < NUMOE_DISTANCES; d++)
                cr_expect_eq(sample(&e, "numoe_worker_steals_total{%s,distance=\"%s\"}", labels,
                                    distances[d]),
                             (double)after.work.steals_from[d]);
            snprintf(labels, sizeof labels,
                     "numoe_worker_busy_seconds_total{worker=\"%u\",node=\"%u\"}", w,
                     node_of(s.context, after.node).os_index);
            cr_assert_eq(exposition_value(&e, labels, &value), timed);
            if (!timed)
                continue;
            cr_expect_float_eq(value, (double)after.work.busy_ns * 1e-9, 1e-9);
            value = sample(&e, "numoe_worker_wake_latency_seconds_count{worker=\"%u\",node=\"%u\"}",
                           w, node_of(s.context, after.node).os_index);
            cr_expect(value >= (double)before[w].work.wakes && value <= (double)after.work.wakes);
            sample(&e,
                   "numoe_worker_wake_latency_seconds_bucket{worker=\"%u\",node=\"%u\",le=\"0."
                   "000001024\"}",
                   w, node_of(s.context, after.node).os_index);
        }
        for (uint32_t n = 0; n < 2; n++) {
            cr_expect_eq(sample(&e, "numoe_node_expert_bytes_total{node=\"%u\"}", n),
                         (double)node_of(s.context, n).expert_bytes);
            cr_expect_eq(sample(&e, "numoe_node_planned_bytes{node=\"%u\"}", n),
                         (double)node_of(s.context, n).planned_bytes);
        }
        exposition_free(&e);
        free(text);
        close_subject(&s);
    }
}
