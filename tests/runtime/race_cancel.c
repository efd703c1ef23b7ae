/*
 * Submissions of a context called off by several threads, while others call, reserve and wait,
 * under ThreadSanitizer: each is done and right, or cancelled, and nothing else is disturbed.
 */
#include "stats_context.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ROUNDS 150
#endif
#endif
#ifndef ROUNDS
#define ROUNDS 1500
#endif

enum { CANCELLERS = 2, THREADS = 3, TOKENS = 40 };

static atomic_uint failures;
static atomic_bool over;
static _Atomic uint64_t ticket;
static unsigned long called_off[CANCELLERS];

#define EXPECT(good)                                                                               \
    do {                                                                                           \
        if (!(good) && atomic_fetch_add(&failures, 1) < 20)                                        \
            fprintf(stderr, "line %d: %s\n", __LINE__, #good);                                     \
    } while (0)

struct canceller {
    struct numoe_model *model;
    unsigned long *called_off;
};

static void *cancel(void *user)
{
    const struct canceller *canceller = user;

    while (!atomic_load(&over)) {
        const uint64_t now = atomic_load(&ticket);
        const int rc = now ? numoe_cancel(canceller->model, now) : -EALREADY;

        EXPECT(rc == 0 || rc == -EALREADY);
        *canceller->called_off += rc == 0;
    }
    return NULL;
}

static void *call_between(void *user)
{
    const struct subject *s = user;
    struct numoe_stats stats = NUMOE_STATS_INIT;

    for (unsigned i = 0; !atomic_load(&over); i++) {
        call(s, i % LAYERS, 1 + i % 9, (int32_t)(i % 4), 3);
        if (i % 16 == 0)
            EXPECT(numoe_reserve(s->model, TOKENS, 4, 0, NULL) == 0);
        EXPECT(numoe_stats_get(s->context, &stats) == 0);
    }
    return NULL;
}

int main(void)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct subject s;
    struct request r = new_request(TOKENS, 0, 3), again = new_request(TOKENS, 0, 3);
    struct canceller cancellers[CANCELLERS];
    pthread_t threads[CANCELLERS + 1];
    unsigned done = 0, cancelled = 0;

    options.topology = TWO_NODES;
    options.threads = THREADS;
    options.stats = true;
    options.trace_events = 50;
    options.spin_ns = 1000;
    s = open_subject(&options, false);
    EXPECT(numoe_forward(s.model, 0, &again.batch, NULL, NULL) == 0);
    for (int i = 0; i < CANCELLERS; i++) {
        cancellers[i] = (struct canceller){s.model, &called_off[i]};
        EXPECT(pthread_create(&threads[i], NULL, cancel, &cancellers[i]) == 0);
    }
    EXPECT(pthread_create(&threads[CANCELLERS], NULL, call_between, &s) == 0);
    for (unsigned i = 0; i < ROUNDS; i++) {
        uint64_t mine;
        int rc = numoe_submit(s.model, 0, &r.batch, &mine, NULL);

        EXPECT(rc == 0);
        if (i % 2)
            atomic_store(&ticket, mine);
        rc = numoe_wait(s.model, mine, NULL);
        EXPECT(rc == 0 || (rc == -ECANCELED && i % 2));
        if (rc == 0)
            EXPECT(memcmp(r.out, again.out, TOKENS * HIDDEN * sizeof *r.out) == 0);
        done += rc == 0;
        cancelled += rc != 0;
    }
    atomic_store(&over, true);
    for (int i = 0; i <= CANCELLERS; i++)
        pthread_join(threads[i], NULL);
    EXPECT(done >= ROUNDS / 2);
    EXPECT(cancelled <= called_off[0] + called_off[1]);
    printf("%u done, %u cancelled\n", done, cancelled);
    free_request(&r);
    free_request(&again);
    close_subject(&s);
    printf("%d passed, %d failed\n", atomic_load(&failures) == 0, atomic_load(&failures) != 0);
    return atomic_load(&failures) != 0;
}
