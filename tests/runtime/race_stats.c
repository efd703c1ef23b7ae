/*
 * Stats and traces read while workers work, under ThreadSanitizer: no counter falls, and in the end
 * they add up.
 */
#include "stats_context.h"

#include <pthread.h>
#include <stdatomic.h>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ROUNDS 400
#endif
#endif
#ifndef ROUNDS
#define ROUNDS 2000
#endif

enum { CALLERS = 2, READERS = 2, THREADS = 3 };

static atomic_uint failures;
static atomic_bool over;

#define EXPECT(good)                                                                               \
    do {                                                                                           \
        if (!(good) && atomic_fetch_add(&failures, 1) < 20)                                        \
            fprintf(stderr, "line %d: %s\n", __LINE__, #good);                                     \
    } while (0)

static void *call_on(void *user)
{
    const struct subject *s = user;

    for (unsigned i = 0; i < ROUNDS; i++) {
        if (i % 3 == 2) {
            struct request r = new_request(1 + i % 7, 0, 3);
            uint64_t ticket;

            if (numoe_submit(s->model, i % LAYERS, &r.batch, &ticket, NULL) == 0)
                EXPECT(numoe_wait(s->model, ticket, NULL) == 0);
            free_request(&r);
        } else {
            call(s, i % LAYERS, 1 + i % 9, (int32_t)(i % 4), 3);
        }
    }
    return NULL;
}

/* Every counter of a, which was read before b, is at most that of b. */
static int grows(const struct numoe_work_stats *a, const struct numoe_work_stats *b)
{
    int good = a->items <= b->items && a->stolen_items <= b->stolen_items &&
               a->refusals <= b->refusals && a->sleeps <= b->sleeps &&
               a->read_bytes <= b->read_bytes && a->remote_bytes <= b->remote_bytes &&
               a->busy_ns <= b->busy_ns && a->parked_ns <= b->parked_ns && a->wakes <= b->wakes &&
               a->wake_ns <= b->wake_ns;

    for (int d = 0; d < NUMOE_DISTANCES; d++)
        good = good && a->steals_from[d] <= b->steals_from[d];
    for (int k = 0; k < NUMOE_WAKE_BUCKETS; k++)
        good = good && a->wake_buckets[k] <= b->wake_buckets[k];
    return good;
}

static void *read_them(void *user)
{
    const struct subject *s = user;
    struct numoe_worker_stats workers[THREADS] = {{0}};
    struct numoe_node_stats nodes[2] = {{0}};
    struct numoe_stats all = {0};
    FILE *null = fopen("/dev/null", "w");

    while (!atomic_load(&over)) {
        struct numoe_stats now = NUMOE_STATS_INIT;

        EXPECT(numoe_stats_get(s->context, &now) == 0);
        EXPECT(grows(&all.work, &now.work) && all.calls <= now.calls && all.tokens <= now.tokens &&
               all.expert_bytes <= now.expert_bytes && all.uptime_ns <= now.uptime_ns);
        all = now;
        for (uint32_t w = 0; w < THREADS; w++) {
            struct numoe_worker_stats one = NUMOE_WORKER_STATS_INIT;

            EXPECT(numoe_stats_worker(s->context, w, &one) == 0);
            EXPECT(grows(&workers[w].work, &one.work));
            workers[w] = one;
        }
        for (uint32_t n = 0; n < 2; n++) {
            struct numoe_node_stats one = NUMOE_NODE_STATS_INIT;

            EXPECT(numoe_stats_node(s->context, n, &one) == 0);
            EXPECT(grows(&nodes[n].work, &one.work) && nodes[n].expert_bytes <= one.expert_bytes);
            nodes[n] = one;
        }
        EXPECT(numoe_stats_print_json(s->context, null) == 0);
        EXPECT(numoe_stats_print_prometheus(s->context, null) == 0);
        EXPECT(numoe_trace_write(s->context, null) == 0);
    }
    fclose(null);
    return NULL;
}

/* Models come and go meanwhile. */
static void *load_others(void *user)
{
    const struct subject *s = user;

    while (!atomic_load(&over))
        numoe_model_destroy(new_model(s->context, true));
    return NULL;
}

int main(void)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_stats all = NUMOE_STATS_INIT;
    pthread_t callers[CALLERS], readers[READERS], loader;
    struct subject s;
    uint64_t bytes = 0, items = 0;

    options.topology = TWO_NODES;
    options.threads = THREADS;
    options.stats = true;
    options.trace_events = 50; /* so that the rings go round while they are read */
    options.spin_ns = 1000;
    s = open_subject(&options, false);
    for (int r = 0; r < READERS; r++)
        if (pthread_create(&readers[r], NULL, read_them, &s))
            abort();
    if (pthread_create(&loader, NULL, load_others, &s))
        abort();
    for (int c = 0; c < CALLERS; c++)
        if (pthread_create(&callers[c], NULL, call_on, &s))
            abort();
    for (int c = 0; c < CALLERS; c++)
        pthread_join(callers[c], NULL);
    atomic_store(&over, true);
    for (int r = 0; r < READERS; r++)
        pthread_join(readers[r], NULL);
    pthread_join(loader, NULL);

    EXPECT(numoe_stats_get(s.context, &all) == 0);
    EXPECT(all.models == 1);
    for (uint32_t n = 0; n < 2; n++) {
        struct numoe_node_stats node = NUMOE_NODE_STATS_INIT;

        EXPECT(numoe_stats_node(s.context, n, &node) == 0);
        bytes += node.expert_bytes;
        items += node.work.items;
    }
    EXPECT(bytes == all.expert_bytes);
    EXPECT(items == all.work.items);
    close_subject(&s);
    printf("%d passed, %d failed\n", !atomic_load(&failures), !!atomic_load(&failures));
    return atomic_load(&failures) ? 1 : 0;
}
