/**
 * numoe_pool.h - workers that run jobs of phases of items. Knows no kernel and no machine.
 *
 * A job is a short list of phases; a phase is a number of items, each run exactly once by some
 * worker; all items of a phase are done before the next phase begins. The serial loop that a job
 * replaces:
 *
 *     for (p = 0; p < phase_count; p++)
 *         for (i = 0; i < phases[p].items; i++)
 *             phases[p].run(context, i, worker);
 *
 * Workers take items of their own range from the front; a worker without work takes half of
 * another's range from the back, nearest victim first, far ones only if that is worth the trip.
 * Phases end by counting finished items,
 * never by waiting for every worker to arrive, so a worker that the system does not run holds
 * up nothing but what it has taken.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_POOL_H
#define NUMOE_POOL_H

#include "base/numoe_base.h"
#include "base/numoe_types.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { NUMOE_POOL_MAX_PHASES = 8, NUMOE_POOL_MAX_WORKERS = 4096 };
/** Most items a phase may have. */
#define NUMOE_POOL_MAX_ITEMS (((uint32_t)1 << 24) - 1)

/** How far two workers are from each other: the smallest group that both are in. */
enum numoe_pool_distance {
    NUMOE_POOL_SAME_L3,
    NUMOE_POOL_SAME_NODE,
    NUMOE_POOL_SAME_DOMAIN,
    NUMOE_POOL_SAME_PACKAGE,
    NUMOE_POOL_ELSEWHERE,
    NUMOE_POOL_DISTANCES
};

/** Where a worker runs. Group ids are the caller's; equal id = same group; nearer groups first. */
struct numoe_pool_worker {
    uint32_t os_cpu; /**< CPU to pin to, or UINT32_MAX: not pinned */
    uint32_t l3, node, domain, package;
};

/**
 * Runs one item. May not call numoe_pool_run, _submit or _wait on its own pool (-EDEADLK), nor wait
 * for another item of its phase: one worker may run them all, and with more workers than CPUs not
 * all are woken.
 */
typedef void numoe_pool_fn(void *context, uint32_t item, uint32_t worker);

/** Something that a pool did, as its observer is told of it. */
enum numoe_pool_event_kind {
    NUMOE_POOL_STEAL, /**< took work of another worker: victim, distance, items */
    NUMOE_POOL_PARK,  /**< slept from begin to end: latency_ns */
    NUMOE_POOL_PHASE, /**< finished a phase that was open from begin to end: run, items */
    NUMOE_POOL_JOIN   /**< from the end of a job until its caller, who took part, had noticed */
};

struct numoe_pool_event {
    enum numoe_pool_event_kind kind;
    uint32_t worker;           /**< on whose thread this happened, which is the calling one */
    uint64_t begin_ns, end_ns; /**< of the monotonic clock */
    uint32_t victim;           /**< a worker */
    enum numoe_pool_distance distance;
    uint32_t items;
    uint64_t latency_ns; /**< from another's decision to wake this worker until it ran */
    numoe_pool_fn *run;  /**< the phase's */
};

struct numoe_pool_config {
    size_t size;
    uint32_t worker_count; /**< >= 1, the caller of numoe_pool_run being worker 0 */
    const struct numoe_pool_worker *workers; /**< worker_count, or NULL: not pinned, one group */
    /** Called on each of the pool's own threads once, before create returns; may be NULL. Not
     *  called for worker 0: that thread is the caller's own. */
    void (*thread_init)(void *user, uint32_t worker);
    void *thread_init_user;
    uint64_t spin_ns; /**< how long an idle worker spins before it sleeps; at most 2 us when
                           there are more workers than CPUs */
    bool pin_caller;  /**< pin the thread inside numoe_pool_run/wait to worker 0's CPU for
                           the call, and restore its mask after */
    /** For tests: steal at random with this seed instead of from the nearest; 0: off. */
    uint64_t chaos_seed;
    const struct numoe_log *log; /**< copied; may be NULL */
    /**
     * What taking items from a worker so far away costs, in ns. A thief goes there only if what
     * that worker has left (its items times numoe_pool_phase.item_ns) exceeds the trip, less the
     * time for which the thief has found nothing better: whoever has waited as long as the trip
     * costs goes in any case, and so does whoever would sleep otherwise. From a worker that sleeps
     * anything is taken at once.
     */
    uint64_t trip_ns[NUMOE_POOL_DISTANCES];
    /** Trips between workers of different nodes, [a * node_count + b] by the workers' node ids,
     * which must be less than node_count; nearer ones are tried first. NULL: trip_ns says. */
    const uint32_t *node_trip_ns;
    uint32_t node_count;
    /** A phase of known length that one worker is through with in so many ns wakes nobody. */
    uint64_t wake_ns;
    /** The last so many workers, fewer than worker_count, have no thread of the pool's own: the
     *  caller's threads may be lent for them (numoe_pool_lend). What falls to one that is absent,
     * the others do. */
    uint32_t lent_workers;
    bool timed; /**< also count times (numoe_pool_worker_stats): reads the clock twice for each
                     batch of items and each sleep */
    /** Told of events, by the thread they happened on and so by several at once; implies timed.
     *  May be NULL. May not call the pool. */
    void (*observe)(void *user, const struct numoe_pool_event *event);
    void *observe_user;
};

#define NUMOE_POOL_CONFIG_INIT                                                                     \
    {                                                                                              \
        .size = sizeof(struct numoe_pool_config), .worker_count = 1, .spin_ns = 200000,            \
        .trip_ns = {0, 500, 600, 700, 1500}, .wake_ns = 10000                                      \
    }

struct numoe_pool;

struct numoe_pool_phase {
    numoe_pool_fn *run;
    uint32_t items;
    /** worker_count + 1 ascending numbers from 0 to items: worker w begins with
     *  [first[w], first[w+1]). NULL: equal shares. Read during submit only. */
    const uint32_t *first;
    /** About how long an item takes, ns; 0: not known. Decides what is worth a far steal, or a
     *  wake-up; results do not depend on it. */
    uint32_t item_ns;
};

struct numoe_pool_job {
    void *context; /**< handed to every item; must live until the job is done */
    uint32_t phase_count;
    struct numoe_pool_phase phases[NUMOE_POOL_MAX_PHASES];
};

/**
 * Start worker_count - 1 threads. A worker that cannot be pinned or named runs unpinned and is
 * reported through log and numoe_pool_stats; a thread that cannot be started ends the others and
 * fails the call.
 * @return 0; -EINVAL; -EAGAIN (thread limit), -ENOMEM with error filled
 */
int numoe_pool_create(const struct numoe_pool_config *config, struct numoe_pool **pool,
                      struct numoe_error *error);

/**
 * Stop and join all workers. A submitted job is finished first (by the caller's help if need be);
 * numoe_pool_cancel makes that short. Lent threads are given back: numoe_pool_lend returns.
 * In a process forked from the pool's, only frees memory.
 * @param pool    NULL does nothing
 * @thread not inside an item of the pool; no other call on it may be running or follow, but for
 *         numoe_pool_lend by threads that have been lent (not: are about to be)
 */
void numoe_pool_destroy(struct numoe_pool *pool);

/**
 * Run a job; returns when every item of every phase is done and nothing of it is referenced any
 * more. The calling thread works as worker 0.
 * @return 0; -EINVAL bad job, nothing run; -EDEADLK from inside an item of this pool; -ECHILD in
 *         a process forked from the pool's
 * @thread any thread; several callers take turns. Never allocates.
 */
int numoe_pool_run(struct numoe_pool *pool, const struct numoe_pool_job *job);

/**
 * Queue a job and return; the other workers begin at once. One job may be pending at a time: a
 * second submit, or a run, waits its turn. Worker 0's share is taken by the others, or by the
 * thread in numoe_pool_wait.
 * @param ticket  for numoe_pool_wait
 * @return as numoe_pool_run
 */
int numoe_pool_submit(struct numoe_pool *pool, const struct numoe_pool_job *job, uint64_t *ticket);

/**
 * Help with and wait for a submitted job. Each ticket once: a second wait gets -EINVAL. At most 256
 * jobs can be waited for later: submitting one more makes the pool forget the oldest, whose ticket
 * is then no longer valid here (the job is run all the same).
 * @return 0; -ECANCELED: some items were not run; -EINVAL no such ticket; -EDEADLK, -ECHILD as
 *         numoe_pool_run
 * @thread any. Never allocates.
 */
int numoe_pool_wait(struct numoe_pool *pool, uint64_t ticket);

/**
 * Have a submitted job run no further item. Those that have begun, or are just beginning, run to
 * their end; numoe_pool_wait is still to be called, and returns when none is running any more.
 * @return 0; -EALREADY the job is done; -EINVAL no such ticket; -ECHILD as numoe_pool_run
 * @thread any, also inside an item. Never blocks.
 */
int numoe_pool_cancel(struct numoe_pool *pool, uint64_t ticket);

/**
 * Lend the calling thread: it works as a worker until it is recalled, or until the pool is
 * destroyed, and sleeps while there is nothing to do. Neither pinned, named nor given to
 * thread_init.
 * @param worker  one of the last lent_workers
 * @return 0 after numoe_pool_recall; -ESHUTDOWN after numoe_pool_destroy; at once -EINVAL no such
 *         worker, -EBUSY another thread is lent for it, -EDEADLK, -ECHILD as numoe_pool_run
 * @thread any; may run nothing else meanwhile
 */
int numoe_pool_lend(struct numoe_pool *pool, uint32_t worker);

/**
 * Ask for the thread back that is lent for a worker. It returns from numoe_pool_lend once it finds
 * nothing more to do in the phase at hand.
 * @return 0; -ESRCH none is lent; -EINVAL no such worker; -ECHILD as numoe_pool_run
 * @thread any, also inside an item. Never blocks.
 */
int numoe_pool_recall(struct numoe_pool *pool, uint32_t worker);

/** Whether this process was forked from the one that created the pool: nothing can run here. */
bool numoe_pool_forked(const struct numoe_pool *pool);

uint32_t numoe_pool_worker_count(const struct numoe_pool *pool);

struct numoe_pool_worker_stats {
    uint64_t items;                             /**< run */
    uint64_t steals;                            /**< successful */
    uint64_t steals_from[NUMOE_POOL_DISTANCES]; /**< the same by distance of the victim */
    uint64_t stolen_items;
    uint64_t refusals; /**< looks that found nothing but items not worth the trip */
    uint64_t sleeps;   /**< times parked */
    bool pinned;
    int pin_errno; /**< why not pinned, else 0 */
    /* of a timed pool; else 0 */
    bool timed;
    uint64_t busy_ns;   /**< running items, counted when a batch of them is done */
    uint64_t parked_ns; /**< asleep, up to this moment */
    uint64_t wakes;     /**< sleeps that ended */
    uint64_t wake_ns;   /**< sum of what they took, from the decision until the worker ran */
    uint64_t wake_buckets[NUMOE_WAKE_BUCKETS]; /**< how often how long; they sum to wakes */
};

/** Snapshot of a worker's counters, none of which ever falls. @return 0 or -EINVAL. @thread any, at
 *  any time */
int numoe_pool_stats(const struct numoe_pool *pool, uint32_t worker,
                     struct numoe_pool_worker_stats *stats);

#ifdef __cplusplus
}
#endif

#endif
