/*
 * pool_internal.h - the pool's shared state and how its files meet.
 *
 * The sequence word is the pool's one clock:
 *
 *     seq = number << 1 | open
 *
 *   open    phase `number` may be worked on. The phases of a job have numbers base + 0 .. base + 7,
 *           base being a multiple of 8; phases without items are left out.
 *   closed  no job is active; every phase below `number` is done; `number` is the next job's base.
 *   STOP    all ones: the threads end.
 *
 * seq only grows. It is written by one thread at a time: by the submitter while closed (it holds
 * the seat), else by the finisher, the worker whose count of finished items completes the phase
 * (pool_tree.c).
 *
 * Who may touch what
 *   job data (context, slots, first)   written by the submitter while closed; read by anyone as a
 *                                      seqlock: load seq, load the data, load seq again. Data
 *                                      loads are acquire and data stores release, so a reader
 *                                      that met newer data also meets the newer seq, and drops it.
 *   worker.opened                      number of the last phase in which this worker's own share
 *                                      was claimed, by anyone, as a whole: compare-and-swap from
 *                                      less to `number`. 64 bits, never falls: no ABA.
 *   worker.range                       pool_range.h
 *   worker.state, sleepers, wanted     pool_park.c
 *   worker.lender, absent              pool_lend.c
 *   cancelled, tickets                 pool_cancel.c
 *   joins                              pool_tree.c
 *   seat (pool_turn.c)                 who is worker 0; guards base and worker 0's own fields
 *
 * Why nothing is run twice, missed, or run with another job's data
 *   - A phase's shares are claimed once each (opened), and what is claimed is run by its claimer or
 *     put into its range word, from where each item is claimed once.
 *   - A claimed item that is not yet counted keeps its phase open: no later phase is published, so
 *     the job's data stand still. Claims through `opened` use data already validated for that very
 *     number. Claims through a range word are validated after the swap (pool_range.h).
 *   - A worker that claims nothing (late, descheduled) owes nothing: nobody waits for it.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_POOL_INTERNAL_H
#define NUMOE_POOL_INTERNAL_H

#include "numoe_pool.h"
#include "pool_range.h"

#include <pthread.h>
#include <sched.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    NUMOE_POOL_LINE = 64,
    NUMOE_POOL_OPEN = 1,
    NUMOE_POOL_TICKETS = 256, /* most jobs that are to be waited for */
    NUMOE_POOL_PHASE_BITS = 3,
    NUMOE_POOL_RINGS = 16 /* most kinds of distance that one worker tells apart */
};
#define NUMOE_POOL_NO_PARENT UINT32_MAX
#define NUMOE_POOL_NOT_READ (UINT64_MAX - 1)
#define NUMOE_POOL_STOP UINT64_MAX

_Static_assert(NUMOE_POOL_MAX_PHASES == 1 << NUMOE_POOL_PHASE_BITS, "phases use three bits");
_Static_assert(NUMOE_POOL_MAX_ITEMS <= NUMOE_POOL_RANGE_MASK, "an end fits in a range word");

/* SPARE: sleeps, and is one that is not worth waking. ABSENT: no thread is lent for the worker. */
enum numoe_pool_state {
    NUMOE_POOL_AWAKE,
    NUMOE_POOL_SLEEPING,
    NUMOE_POOL_SPARE,
    NUMOE_POOL_ABSENT
};
/* Whether a worker has a CPU to be woken for; the RESERVE takes worker 0's while that is away. */
enum numoe_pool_rank { NUMOE_POOL_REGULAR, NUMOE_POOL_RESERVE, NUMOE_POOL_SURPLUS };
enum numoe_pool_lender { NUMOE_POOL_FREE, NUMOE_POOL_LENT, NUMOE_POOL_RECALLED };
/* Of an entry of pool->tickets, beside the number of a job's end (a multiple of 8). */
enum {
    NUMOE_POOL_TICKET_OPEN = 1,
    NUMOE_POOL_TICKET_CANCELLED = 2,
    NUMOE_POOL_TICKET_CLAIMED = 4,
    NUMOE_POOL_TICKET_BITS = 7
};

/* Times of a worker of a timed pool (pool_stats.c). */
struct numoe_pool_clock {
    /* Written by whoever wakes the worker. */
    alignas(NUMOE_POOL_LINE) _Atomic uint64_t woken_ns;
    /* Written by readers: the most time parked that any was told. */
    _Atomic uint64_t parked_told;

    /* Written by the worker alone, read by numoe_pool_stats. */
    alignas(NUMOE_POOL_LINE) _Atomic uint64_t busy_ns;
    _Atomic uint64_t parked; /* ns parked << 1; asleep: (ns parked - when it began) << 1 | 1 */
    _Atomic uint64_t wake_ns;
    _Atomic uint64_t wake_buckets[NUMOE_WAKE_BUCKETS];
};

struct numoe_pool_worker_slot {
    /* Claims: owner and thieves. */
    alignas(NUMOE_POOL_LINE) numoe_pool_range range;
    _Atomic uint64_t opened;

    /* Written by the worker alone, read by numoe_pool_stats. */
    alignas(NUMOE_POOL_LINE) _Atomic uint64_t items;
    _Atomic uint64_t steals[NUMOE_POOL_DISTANCES], stolen_items, refusals;

    /* Rarely written: publishers look at it each time and should hit their own cache. */
    alignas(NUMOE_POOL_LINE) _Atomic uint32_t state;
    _Atomic uint32_t lender, rank;
    uint32_t os_cpu;                 /* UINT32_MAX: not pinned */
    uint32_t kin;                    /* which list of victims */
    uint32_t leaf;                   /* of the join tree, where this worker's share is counted */
    uint16_t wake_begin, wake_count; /* whom it wakes: places in pool->wake_order */
    int name_errno;                  /* before `started` is counted */
    _Atomic int pin_errno;
    _Atomic bool pinned;
    _Atomic uint64_t sleeps; /* as state, which it is written with */
    struct numoe_pool *pool;
    pthread_t thread;
};
_Static_assert(sizeof(struct numoe_pool_worker_slot) == 3 * NUMOE_POOL_LINE, "a line a writer");

/* Workers with equal groups share one list of victims: everybody, nearest first. */
struct numoe_pool_kin {
    uint32_t rings;                      /* none is empty */
    uint32_t ring[NUMOE_POOL_RINGS + 1]; /* ring d is order[ring[d]] .. order[ring[d + 1] - 1] */
    uint64_t trip_ns[NUMOE_POOL_RINGS];  /* what going there costs */
    uint16_t *order;
};

/* A counter of the join tree, and where it is in the tree, which is constant and read more often.
 */
struct numoe_pool_join {
    alignas(NUMOE_POOL_LINE) _Atomic uint32_t finished;
};
struct numoe_pool_branch {
    _Atomic uint32_t *finished;
    uint32_t begin, end; /* the workers whose shares are counted here or below */
    uint32_t parent;     /* or NUMOE_POOL_NO_PARENT: all workers */
};

/* A phase as the workers read it. info: 24 bits items, 3 bits next phase of the job (0: none),
 * flags, and in the upper half item_ns. */
struct numoe_pool_phase_slot {
    _Atomic(numoe_pool_fn *) run;
    _Atomic uint64_t info;
};
enum { NUMOE_POOL_INFO_NEXT = 24, NUMOE_POOL_INFO_TIME = 32 };
#define NUMOE_POOL_INFO_FIRST ((uint64_t)1 << 27)     /* shares are in pool->first */
#define NUMOE_POOL_INFO_CROWD ((uint64_t)1 << 28)     /* wake workers without a share as well */
#define NUMOE_POOL_INFO_SUBMITTED ((uint64_t)1 << 29) /* worker 0 may be absent */

struct numoe_pool {
    /* Written by submitter and finisher; all workers spin on it. A job of up to two phases is
     * handed over in this one line; with very few workers it also comes back in it. */
    alignas(NUMOE_POOL_LINE) _Atomic uint64_t seq;
    _Atomic(void *) context;
    _Atomic uint32_t finished; /* the counter of the only leaf of very few workers */
    struct numoe_pool_phase_slot slots[NUMOE_POOL_MAX_PHASES];

    /* Written when workers park and wake. */
    alignas(NUMOE_POOL_LINE) _Atomic uint32_t sleepers;
    _Atomic uint32_t wanted;  /* sleepers that are not spare */
    _Atomic uint32_t absent;  /* workers for which no thread is lent */
    _Atomic uint32_t started; /* threads that are set up */
    _Atomic uint32_t lenders; /* threads inside numoe_pool_lend */

    /* The seat. */
    alignas(NUMOE_POOL_LINE) _Atomic uint32_t turn_next;
    _Atomic uint32_t turn_now;
    uint64_t base;         /* of the next job; the pending one, if any, has base - 8 */
    uint32_t ticket_entry; /* of the last job that was submitted */
    uint32_t chaos_turn;
    uint32_t nudged;   /* the worker that was last woken to look at its CPUs */
    uint64_t nudge_ns; /* when to wake another */
    bool pin_told;     /* a refused pin of the caller was logged */

    /* Constant, or nearly so: what is atomic here changes when CPUs come and go (pool_cpus.c). */
    alignas(NUMOE_POOL_LINE) uint32_t worker_count;
    _Atomic uint32_t regulars; /* workers of that rank */
    _Atomic uint64_t spin_ns;
    uint64_t spin_wanted_ns; /* when there are CPUs enough */
    uint64_t wake_ns;
    uint64_t chaos_seed;
    struct numoe_pool_worker_slot *workers;
    struct numoe_pool_kin *kins;
    uint32_t kin_count;
    uint32_t leaf_count; /* the leaves of the join tree come first */
    struct numoe_pool_join *joins;
    struct numoe_pool_branch *branches; /* as many */
    uint16_t *wake_order;
    uint32_t threads; /* running, for destroy */
    uint32_t lent_workers;
    _Atomic uint64_t cancelled;    /* the end of the last job that was; only grows */
    _Atomic uint32_t *first;       /* [phase][worker_count + 1] */
    const _Atomic uint32_t *alive; /* a page that is zero in a forked child, or NULL: compare pid */
    size_t alive_size;
    pid_t pid;
    bool pin_caller;
    size_t mask_size; /* of each mask, in bytes */
    cpu_set_t *mask_saved, *mask_pinned, *mask_counted, *mask_taken;
    _Atomic uint64_t watch_ns; /* when to count CPUs again */
    _Atomic uint32_t cpus;     /* as counted last; 0: not known */
    _Atomic bool watching;     /* somebody counts */
    _Atomic bool cpus_changed; /* to be told of */
    struct numoe_log log;
    void (*thread_init)(void *user, uint32_t worker);
    void *thread_init_user;
    struct numoe_pool_worker *places; /* of the workers, or NULL: all in one */
    struct numoe_pool_clock *clocks;  /* of the workers, or NULL: not timed */
    void (*observe)(void *user, const struct numoe_pool_event *event);
    void *observe_user;

    /* With an observer: when seq last changed. Written before seq by whoever writes that. */
    alignas(NUMOE_POOL_LINE) _Atomic uint64_t changed_ns;

    /* pool_cancel.c */
    alignas(NUMOE_POOL_LINE) _Atomic uint64_t tickets[NUMOE_POOL_TICKETS];
};

/* A phase as one worker sees it: a consistent copy for sequence seq. */
struct numoe_pool_view {
    uint64_t seq;
    numoe_pool_fn *run;
    void *context;
    const _Atomic uint32_t *first; /* NULL: equal shares */
    uint32_t items;
    uint32_t next;    /* phase of this job that follows, 0: none */
    uint32_t item_ns; /* 0: not known */
    bool crowd, submitted;
};

/* A thread working as some worker. */
struct numoe_pool_hand {
    struct numoe_pool *pool;
    struct numoe_pool_worker_slot *slot;
    uint32_t worker;
    uint32_t cursor;        /* place in the list of victims to look at first */
    uint32_t leaf;          /* where what was claimed last is counted */
    bool lent;              /* may be recalled */
    bool greedy;            /* about to sleep: any item is worth any trip */
    uint64_t idle_since_ns; /* when it first found nothing near in this phase; 0: not yet */
    uint64_t waited_ns; /* since then, as of this look; NUMOE_POOL_NOT_READ: clock not read yet */
    uint64_t random;    /* 0: no chaos */
    struct numoe_pool_view view;
};

/* How far an idle worker has come in its spin. */
struct numoe_pool_rest {
    uint32_t turns, look, look_step;
    uint64_t until_ns; /* 0: the clock was not read yet */
};

/* Which pools the thread is inside of, innermost first; on the thread's own stack. */
struct numoe_pool_frame {
    const struct numoe_pool *pool;
    struct numoe_pool_frame *outer;
};

/** Add to a statistic that this thread alone writes; readers want numbers, not order. */
static inline void numoe_pool_count(_Atomic uint64_t *counter, uint64_t n)
{
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n,
                          memory_order_relaxed);
}

static inline uint64_t numoe_pool_seq(const struct numoe_pool *pool)
{
    /* Pairs with every store of seq. */
    return atomic_load_explicit((_Atomic uint64_t *)&pool->seq, memory_order_acquire);
}

/** Copy the data of phase seq (open). @return false: seq is over, nothing copied is of use. */
static inline bool numoe_pool_view_load(struct numoe_pool *pool, uint64_t seq,
                                        struct numoe_pool_view *view)
{
    uint32_t phase = seq >> 1 & (NUMOE_POOL_MAX_PHASES - 1);
    struct numoe_pool_phase_slot *slot = &pool->slots[phase];
    uint64_t info;

    /* Acquire loads pair with the release stores in numoe_pool_publish: see the seqlock above. */
    view->run = atomic_load_explicit(&slot->run, memory_order_acquire);
    info = atomic_load_explicit(&slot->info, memory_order_acquire);
    view->context = atomic_load_explicit(&pool->context, memory_order_acquire);
    if (atomic_load_explicit(&pool->seq, memory_order_relaxed) != seq) {
        view->seq = 0;
        return false;
    }
    view->seq = seq;
    view->items = (uint32_t)(info & NUMOE_POOL_RANGE_MASK);
    view->next = info >> NUMOE_POOL_INFO_NEXT & (NUMOE_POOL_MAX_PHASES - 1);
    view->item_ns = (uint32_t)(info >> NUMOE_POOL_INFO_TIME);
    view->first = info & NUMOE_POOL_INFO_FIRST
                      ? pool->first + (size_t)phase * (pool->worker_count + 1)
                      : NULL;
    view->crowd = info & NUMOE_POOL_INFO_CROWD;
    view->submitted = info & NUMOE_POOL_INFO_SUBMITTED;
    return true;
}

/**
 * The first item of worker's share; for worker_count: all items. Right if seq is the view's
 * afterwards too, or if the caller holds an item of the phase that is not counted yet.
 */
static inline uint32_t numoe_pool_share_begin(const struct numoe_pool *pool,
                                              const struct numoe_pool_view *view, uint32_t worker)
{
    uint64_t count = pool->worker_count;

    if (view->first)
        return atomic_load_explicit(&view->first[worker], memory_order_acquire);
    /* Rounded up: the only item of a job is worker 0's, who is there already. */
    return (uint32_t)(((uint64_t)view->items * worker + count - 1) / count);
}

/** What worker begins the phase with. @return false: nothing, or the phase is over. */
static inline bool numoe_pool_share(struct numoe_pool *pool, const struct numoe_pool_view *view,
                                    uint32_t worker, uint32_t *begin, uint32_t *end)
{
    *begin = numoe_pool_share_begin(pool, view, worker);
    *end = numoe_pool_share_begin(pool, view, worker + 1);
    return *begin < *end &&
           (!view->first || atomic_load_explicit(&pool->seq, memory_order_relaxed) == view->seq);
}

/** Whether the job of an open sequence is to run no more items. */
static inline bool numoe_pool_is_cancelled(const struct numoe_pool *pool, uint64_t seq)
{
    uint64_t end = (seq >> 1 & ~(uint64_t)(NUMOE_POOL_MAX_PHASES - 1)) + NUMOE_POOL_MAX_PHASES;

    /* Advice: items that begin meanwhile are run. */
    return atomic_load_explicit((_Atomic uint64_t *)&pool->cancelled, memory_order_relaxed) == end;
}

/** Whether the thread is to leave. */
static inline bool numoe_pool_is_recalled(const struct numoe_pool_hand *hand)
{
    /* Pairs with the swap in numoe_pool_recall. */
    return hand->lent &&
           atomic_load_explicit(&hand->slot->lender, memory_order_seq_cst) == NUMOE_POOL_RECALLED;
}

/** Next number of a test's random sequence (xorshift); only with chaos. */
static inline uint32_t numoe_pool_random(struct numoe_pool_hand *hand)
{
    uint64_t x = hand->random;

    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    hand->random = x;
    return (uint32_t)(x >> 32);
}

/* pool_create.c */
void numoe_pool_hand_init(struct numoe_pool_hand *hand, struct numoe_pool *pool, uint32_t worker,
                          uint32_t turn);

/* pool_cpus.c */
int numoe_pool_masks_create(struct numoe_pool *pool);
void numoe_pool_masks_destroy(struct numoe_pool *pool);
/** Pin the calling thread to its CPU, if it has one. */
void numoe_pool_pin_worker(struct numoe_pool_worker_slot *slot);
/** In the seat: move the calling thread to worker 0's CPU. @return whether to unpin it after */
bool numoe_pool_pin_caller(struct numoe_pool *pool);
void numoe_pool_unpin_caller(struct numoe_pool *pool);
/** Once all threads are set up. */
void numoe_pool_count_cpus(struct numoe_pool *pool);
/** A worker about to sleep looks for changes. */
void numoe_pool_watch(struct numoe_pool_hand *hand);
/** By the log: what create could not do; in the seat: what has changed since. */
void numoe_pool_tell_refusals(const struct numoe_pool *pool);
void numoe_pool_tell_changes(struct numoe_pool *pool);

/* pool_run.c */
/** @return 0; -ECHILD in a forked process; -EDEADLK inside an item of the pool */
int numoe_pool_refuse(const struct numoe_pool *pool);
void numoe_pool_enter(struct numoe_pool_frame *frame, const struct numoe_pool *pool);
void numoe_pool_leave(struct numoe_pool_frame *frame);
/** Work and wait until seq's number is at least `until`. */
void numoe_pool_participate(struct numoe_pool_hand *hand, uint64_t until);
/** In the seat: help until no job is pending. */
void numoe_pool_help(struct numoe_pool *pool, uint64_t until);

/* pool_cancel.c */
/** In the seat, before the job is published. number: what seq has once it is done.
 *  @return its ticket; 0: none to be had while threads that wait in line have not had the seat */
uint64_t numoe_pool_ticket_open(struct numoe_pool *pool, uint64_t number);
/** By whoever passes over items of the job, while it holds one of them or is the finisher. */
void numoe_pool_ticket_mark(struct numoe_pool *pool);

/* pool_lend.c */
/** Be absent, if seq is still the sequence in which nothing more was found. */
bool numoe_pool_go_absent(struct numoe_pool_hand *hand, uint64_t seq);
/** After STOP: wait until no thread is lent. */
void numoe_pool_wait_lenders(struct numoe_pool *pool);

/* pool_tree.c */
int numoe_pool_trees_create(struct numoe_pool *pool, const struct numoe_pool_worker *workers);
void numoe_pool_trees_destroy(struct numoe_pool *pool);
/** The leaf that counts an item of the phase, one that the caller holds. */
uint32_t numoe_pool_leaf_of(const struct numoe_pool *pool, const struct numoe_pool_view *view,
                            uint32_t item);
/**
 * Count items of one leaf as finished, which the caller held until now. @return whether that
 * completes the phase: the caller is its finisher, and has seen all that was done in it.
 */
bool numoe_pool_join(struct numoe_pool *pool, const struct numoe_pool_view *view, uint32_t leaf,
                     uint32_t items);

/* pool_steal.c */
enum numoe_pool_distance numoe_pool_distance(const struct numoe_pool_worker *a,
                                             const struct numoe_pool_worker *b);
int numoe_pool_kins_create(struct numoe_pool *pool, const struct numoe_pool_config *config);
void numoe_pool_kins_destroy(struct numoe_pool *pool);
/** How many items a worker must have left for a trip to it to be worth while; UINT32_MAX: no number
 *  is enough. */
uint32_t numoe_pool_worth(uint64_t trip_ns, uint64_t waited_ns, uint32_t item_ns);
/**
 * Take items of the phase in hand->view, from the worker's own share or another's. The worker's
 * range must be empty. On success the view is the phase that the items belong to, and hand->leaf
 * where all of them are counted.
 */
bool numoe_pool_claim(struct numoe_pool_hand *hand, uint32_t *begin, uint32_t *end);
/** Chaos: take one item of a random other worker although the own range is not empty. It may belong
 *  to another leaf than hand->leaf. */
bool numoe_pool_claim_random(struct numoe_pool_hand *hand, uint32_t *item);

/* pool_park.c */
/** What a worker sees of those that a publisher left asleep, or counted as absent, is right once it
 *  has seen the sequence that was published. */
static inline uint32_t numoe_pool_state(const struct numoe_pool *pool, uint32_t worker)
{
    /* Pairs with the stores in park (pool_park.c) and numoe_pool_go_absent. */
    return atomic_load_explicit(&pool->workers[worker].state, memory_order_seq_cst);
}
static inline bool numoe_pool_asleep(const struct numoe_pool *pool, uint32_t worker)
{
    uint32_t state = numoe_pool_state(pool, worker);

    return state == NUMOE_POOL_SLEEPING || state == NUMOE_POOL_SPARE;
}
static inline bool numoe_pool_awake(const struct numoe_pool *pool, uint32_t worker)
{
    return numoe_pool_state(pool, worker) == NUMOE_POOL_AWAKE;
}
void numoe_pool_rest_begin(struct numoe_pool_rest *rest);
/**
 * Spin while seq is `seq`, and park when the spin time is over. Returns when seq may have changed,
 * or when it is time to look for something to steal again.
 */
void numoe_pool_rest(struct numoe_pool_hand *hand, struct numoe_pool_rest *rest, uint64_t seq);
/** After publishing seq (open): wake the sleepers that it needs. */
void numoe_pool_wake(struct numoe_pool *pool, uint64_t seq);
/** After closing seq: wake worker 0 if it sleeps. */
void numoe_pool_wake_caller(struct numoe_pool *pool);
/** If it sleeps. */
void numoe_pool_wake_one(struct numoe_pool *pool, uint32_t worker);
/** After STOP, or when ranks have changed. */
void numoe_pool_wake_all(struct numoe_pool *pool);

/* pool_stats.c */
int numoe_pool_counters_create(struct numoe_pool *pool, const struct numoe_pool_config *config);
void numoe_pool_counters_destroy(struct numoe_pool *pool);
/** The worker has taken items of another. */
void numoe_pool_count_steal(struct numoe_pool_hand *hand, uint32_t victim, uint32_t items);
/** The worker sleeps from now on. @return when that began; 0: not timed */
uint64_t numoe_pool_clock_sleep(struct numoe_pool_hand *hand);
/** It runs again. began: as numoe_pool_clock_sleep said. */
void numoe_pool_clock_awake(struct numoe_pool_hand *hand, uint64_t began);
/** In a timed pool: the worker is about to be woken. */
void numoe_pool_clock_wake(struct numoe_pool *pool, uint32_t worker);
/** With an observer: seq is about to change, for the first time in this job. */
void numoe_pool_note_open(struct numoe_pool *pool);
/** With an observer: the phase of hand->view is done and seq about to change. */
void numoe_pool_note_phase(struct numoe_pool_hand *hand);
/** With an observer: worker 0 has noticed that its job is done. */
void numoe_pool_note_join(struct numoe_pool *pool);

/* pool_turn.c */
void numoe_pool_turn_take(struct numoe_pool *pool);
void numoe_pool_turn_give(struct numoe_pool *pool);

#endif
