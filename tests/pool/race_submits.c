/*
 * Random submits: several threads at once give a pool jobs of every kind, in every way, and check
 * every item of each, while other threads are lent to it and recalled. A pool for each 2000 jobs or
 * so.
 *
 * race_submits [SEED [SUBMITS]]: another seed, another number (default 200000; 20000 under
 * ThreadSanitizer).
 */
#include "pool_internal.h"
#include "race_work.h"

enum { MOST_SUBMITTERS = 4, MOST_LENT = 2, A_POOL = 2000 };

struct submitter {
    struct numoe_pool *pool;
    pthread_t thread;
    uint64_t state;
    uint32_t workers, jobs;
    uint64_t ran, cancelled; /* jobs */
};

/* A job that is submitted and not waited for yet. */
struct pending {
    struct work work;
    uint64_t ticket; /* 0: none */
    bool cancelled;
};

static void finish(struct submitter *submitter, struct pending *pending)
{
    int rc = numoe_pool_wait(submitter->pool, pending->ticket);

    EXPECT(rc == 0 || pending->cancelled);
    check_cancelled(&pending->work, rc);
    submitter->cancelled += rc != 0;
    pending->ticket = 0;
}

static void *submit(void *argument)
{
    struct submitter *submitter = argument;
    uint64_t *state = &submitter->state;
    struct pending *pending = calloc(3, sizeof *pending);
    uint32_t first[65];

    if (!pending)
        abort();
    for (uint32_t j = 0; j < submitter->jobs; j++) {
        struct pending *mine = &pending[next(state) % 3];
        struct numoe_pool_job job;

        if (mine->ticket)
            finish(submitter, mine);
        prepare(&mine->work, &job, state, submitter->workers, first);
        submitter->ran++;
        if (next(state) % 3 == 0) {
            EXPECT(numoe_pool_run(submitter->pool, &job) == 0);
            check(&mine->work);
        } else {
            EXPECT(numoe_pool_submit(submitter->pool, &job, &mine->ticket) == 0);
            memset(first, 0xff, sizeof first); /* read during submit only */
            mine->cancelled = next(state) % 8 == 0;
            if (mine->cancelled) {
                int rc = numoe_pool_cancel(submitter->pool, mine->ticket);
                EXPECT(rc == 0 || rc == -EALREADY);
            }
            if (next(state) % 2)
                finish(submitter, mine);
        }
        if (next(state) % 64 == 0)
            delay(state);
        beat();
    }
    for (int p = 0; p < 3; p++)
        if (pending[p].ticket)
            finish(submitter, &pending[p]);
    free(pending);
    return NULL;
}

/* One pool and about A_POOL jobs, at most `most`. @return how many */
static uint64_t one_pool(uint64_t *state, uint64_t most, uint64_t *cancelled)
{
    uint32_t workers = (uint32_t)(next(state) % 8 ? 1 + next(state) % 4 : 1 + next(state) % 64);
    uint32_t lent = workers > 1 ? (uint32_t)(next(state) % 3) : 0;
    uint32_t count = 1 + (uint32_t)(next(state) % MOST_SUBMITTERS);
    uint64_t jobs = (most < A_POOL ? most : A_POOL) / count, ran = 0;
    const bool on_loan = next(state) % 2; /* when the pool is destroyed */
    struct submitter submitters[MOST_SUBMITTERS];
    struct lender lenders[MOST_LENT];
    struct numoe_pool *pool;

    lent = lent >= workers ? workers - 1 : lent;
    jobs += jobs == 0;
    pool = create(state, workers, lent);
    start_lenders(pool, workers, lent, lenders, state);
    for (uint32_t s = 0; s < count; s++) {
        submitters[s] = (struct submitter){
            .pool = pool, .state = next(state), .workers = workers, .jobs = (uint32_t)jobs};
        if (pthread_create(&submitters[s].thread, NULL, submit, &submitters[s]))
            abort();
    }
    for (uint32_t s = 0; s < count; s++) {
        pthread_join(submitters[s].thread, NULL);
        ran += submitters[s].ran;
        *cancelled += submitters[s].cancelled;
        if (lent && !on_loan) /* comes again by itself */
            numoe_pool_recall(pool, workers - 1);
    }
    for (uint32_t l = 0; on_loan && l < lent; l++)
        while (numoe_pool_state(pool, lenders[l].worker) == NUMOE_POOL_ABSENT)
            sched_yield();
    if (!on_loan)
        end_lenders(lenders, lent);
    numoe_pool_destroy(pool);
    for (uint32_t l = 0; on_loan && l < lent; l++)
        pthread_join(lenders[l].thread, NULL);
    return ran;
}

int main(int argc, char **argv)
{
    uint64_t wanted = UNDER_TSAN ? 20000 : 200000, ran = 0, cancelled = 0, pools = 0, state;
    pthread_t watcher;

    if (argc > 1)
        seed = strtoull(argv[1], NULL, 0);
    if (argc > 2)
        wanted = strtoull(argv[2], NULL, 0);
    snprintf(repeat_line, sizeof repeat_line, "race_submits %llu %llu", (unsigned long long)seed,
             (unsigned long long)wanted);
    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    atomic_store(&doing, "random submits");
    state = seed;
    if (pthread_create(&watcher, NULL, watch, NULL))
        return 1;
    while (ran < wanted) {
        ran += one_pool(&state, wanted - ran, &cancelled);
        pools++;
    }
    atomic_store(&over, true);
    pthread_join(watcher, NULL);
    printf("%llu jobs on %llu pools, %llu cancelled\n", (unsigned long long)ran,
           (unsigned long long)pools, (unsigned long long)cancelled);
    printf("%d passed, %d failed\n", atomic_load(&failures) == 0, atomic_load(&failures) != 0);
    return atomic_load(&failures) != 0;
}
