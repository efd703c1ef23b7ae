/*
 * pool_cpus.c - which CPUs the workers are on, how many there are, and what becomes of that while
 * the pool lives.
 *
 * CPUs may go: one is taken offline, the cpuset shrinks, somebody sets another mask. The kernel
 * then moves the threads, also pinned ones, and nothing is told. So a worker that is about to sleep
 * looks whether it is still on its CPU. If not, and its mask is without that CPU, it is counted as
 * unpinned, with ENODEV; when its mask has the CPU again it goes back there. It pins itself for
 * that: the kernel has forgotten the mask of a thread whose CPU was offline (and before Linux 6.2
 * of any that a cpuset moved), and would let it run anywhere. A worker without a CPU of its own
 * looks, no more than once a second for the whole pool, how many CPUs it may use. While there are
 * too few, callers wake those who sleep, one a second, to look; and when all have a CPU of their
 * own the caller counts, whose mask says what there is besides.
 *
 * With more workers than CPUs the pool spins shortly, and a worker has a rank: REGULAR, woken
 * whenever there is work for it: of those pinned to one CPU the first, of those that are not pinned
 * as many as there are CPUs left; RESERVE, the next one, woken for jobs that the caller does not
 * work on itself; SURPLUS, not woken. Worker 0, the caller, is always regular.
 *
 * What a worker notes is its own slot's; the counting is done by one at a time (`watching`). The
 * caller that has the seat next tells of it through the log (`cpus_changed`).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "pool_internal.h"
#include "pool_os.h"

#include <errno.h>
#include <string.h>

/* Spinning takes time from workers that have items when there are more workers than CPUs. */
#define CROWDED_SPIN_NS 2000
#define WATCH_NS 1000000000u

static void note_pin(struct numoe_pool_worker_slot *slot, int rc)
{
    /* A snapshot for numoe_pool_stats; orders nothing. */
    atomic_store_explicit(&slot->pin_errno, rc, memory_order_relaxed);
    atomic_store_explicit(&slot->pinned, rc == 0, memory_order_relaxed);
}

static bool is_pinned(const struct numoe_pool_worker_slot *slot)
{
    return atomic_load_explicit((_Atomic bool *)&slot->pinned, memory_order_relaxed);
}

/* ---- masks ----------------------------------------------------------------------------------- */

/* Masks as large as the kernel's own. @return 0 or a positive errno */
int numoe_pool_masks_create(struct numoe_pool *pool)
{
    size_t size = sizeof(cpu_set_t);
    cpu_set_t *mask;
    int rc = EINVAL;

    while (rc == EINVAL && size <= (size_t)1 << 20) {
        mask = numoe_pool_os_memory(1, size);
        if (!mask)
            return ENOMEM;
        rc = numoe_pool_os_get_affinity(size, mask);
        free(mask);
        if (rc == EINVAL)
            size *= 2;
    }
    atomic_store_explicit(&pool->watching, true, memory_order_relaxed);
    /* Refused altogether (a filter): pinning will be refused as well, and reported then. */
    pool->mask_size = size;
    pool->mask_saved = numoe_pool_os_memory(1, size);
    pool->mask_pinned = numoe_pool_os_memory(1, size);
    pool->mask_counted = numoe_pool_os_memory(1, size);
    pool->mask_taken = numoe_pool_os_memory(1, size);
    return pool->mask_saved && pool->mask_pinned && pool->mask_counted && pool->mask_taken ? 0
                                                                                           : ENOMEM;
}

void numoe_pool_masks_destroy(struct numoe_pool *pool)
{
    free(pool->mask_taken);
    free(pool->mask_counted);
    free(pool->mask_pinned);
    free(pool->mask_saved);
}

/* ---- pinning --------------------------------------------------------------------------------- */

static int pin_self(const struct numoe_pool *pool, uint32_t os_cpu)
{
    cpu_set_t *mask;
    int rc;

    if (os_cpu >= pool->mask_size * 8)
        return EINVAL; /* past every CPU the system can have */
    mask = numoe_pool_os_memory(1, pool->mask_size);
    if (!mask)
        return ENOMEM;
    CPU_SET_S(os_cpu, pool->mask_size, mask);
    rc = numoe_pool_os_set_affinity(pool->mask_size, mask);
    free(mask);
    return rc;
}

void numoe_pool_pin_worker(struct numoe_pool_worker_slot *slot)
{
    if (slot->os_cpu != UINT32_MAX)
        note_pin(slot, pin_self(slot->pool, slot->os_cpu));
}

bool numoe_pool_pin_caller(struct numoe_pool *pool)
{
    struct numoe_pool_worker_slot *slot = &pool->workers[0];
    bool moved = false;
    int rc;

    rc = numoe_pool_os_get_affinity(pool->mask_size, pool->mask_saved);
    if (rc == 0 && !CPU_EQUAL_S(pool->mask_size, pool->mask_saved, pool->mask_pinned)) {
        rc = numoe_pool_os_set_affinity(pool->mask_size, pool->mask_pinned);
        moved = rc == 0;
    }
    note_pin(slot, rc);
    if (rc && !pool->pin_told)
        numoe_log_write(&pool->log, NUMOE_LOG_WARNING,
                        "worker 0: the caller cannot be pinned to CPU %u (error %d), runs unpinned",
                        slot->os_cpu, rc);
    pool->pin_told = rc != 0;
    return moved;
}

void numoe_pool_unpin_caller(struct numoe_pool *pool)
{
    numoe_pool_os_set_affinity(pool->mask_size, pool->mask_saved);
}

/* ---- counting -------------------------------------------------------------------------------- */

/* The CPU that a worker has for itself; the caller's is the one it was given, pinned or not.
 * UINT32_MAX: none. */
static uint32_t place(const struct numoe_pool *pool, uint32_t worker)
{
    const struct numoe_pool_worker_slot *slot = &pool->workers[worker];

    if (worker == 0)
        return slot->os_cpu < pool->mask_size * 8 ? slot->os_cpu : UINT32_MAX;
    return is_pinned(slot) ? slot->os_cpu : UINT32_MAX;
}

/* Whether the worker has a place and is the first who takes it. */
static bool take(struct numoe_pool *pool, uint32_t worker)
{
    uint32_t cpu = place(pool, worker);

    if (cpu == UINT32_MAX || CPU_ISSET_S(cpu, pool->mask_size, pool->mask_taken))
        return false;
    CPU_SET_S(cpu, pool->mask_size, pool->mask_taken);
    return true;
}

/* @return whether a rank has changed */
static bool rank_workers(struct numoe_pool *pool, bool crowded, uint32_t cpus)
{
    uint32_t taken = 0, floating = 0, regulars = 0, next = NUMOE_POOL_RESERVE;
    bool changed = false;

    memset(pool->mask_taken, 0, pool->mask_size);
    for (uint32_t w = 0; w < pool->worker_count; w++)
        taken += take(pool, w);
    memset(pool->mask_taken, 0, pool->mask_size);
    for (uint32_t w = 0; w < pool->worker_count; w++) {
        bool regular = take(pool, w);
        uint32_t rank = NUMOE_POOL_REGULAR;

        if (place(pool, w) == UINT32_MAX)
            regular = taken + floating++ < cpus;
        if (crowded && w > 0 && !regular) {
            rank = next;
            next = NUMOE_POOL_SURPLUS;
        }
        regulars += rank == NUMOE_POOL_REGULAR;
        /* Pairs with the loads in park (pool_park.c). */
        changed |=
            atomic_exchange_explicit(&pool->workers[w].rank, rank, memory_order_seq_cst) != rank;
    }
    atomic_store_explicit(&pool->regulars, regulars, memory_order_relaxed);
    return changed;
}

static bool count_cpus(struct numoe_pool *pool)
{
    uint64_t spin_ns = pool->spin_wanted_ns;
    cpu_set_t *mask = pool->mask_counted;
    uint32_t cpus, before;
    bool crowded;

    if (numoe_pool_os_get_affinity(pool->mask_size, mask))
        memset(mask, 0, pool->mask_size);
    for (uint32_t w = 0; w < pool->worker_count; w++)
        if (is_pinned(&pool->workers[w]))
            CPU_SET_S(pool->workers[w].os_cpu, pool->mask_size, mask);
    cpus = (uint32_t)CPU_COUNT_S(pool->mask_size, mask);
    crowded = cpus != 0 && pool->worker_count > cpus;
    if (crowded && spin_ns > CROWDED_SPIN_NS)
        spin_ns = CROWDED_SPIN_NS;
    /* Advice to workers; which of two values one of them sees makes no difference. */
    atomic_store_explicit(&pool->spin_ns, spin_ns, memory_order_relaxed);
    if (rank_workers(pool, crowded, cpus))
        numoe_pool_wake_all(pool); /* to sleep again by their rank */
    before = atomic_exchange_explicit(&pool->cpus, cpus, memory_order_relaxed);
    return before != cpus;
}

void numoe_pool_count_cpus(struct numoe_pool *pool)
{
    count_cpus(pool); /* `watching` since before the threads were started */
    atomic_store_explicit(&pool->watch_ns, numoe_pool_os_now_ns() + WATCH_NS, memory_order_relaxed);
    atomic_store_explicit(&pool->watching, false, memory_order_release);
}

/* Whether the calling thread's mask has the CPU; if that cannot be told, `otherwise`. */
static bool is_allowed(const struct numoe_pool *pool, uint32_t os_cpu, bool otherwise)
{
    cpu_set_t *mask = numoe_pool_os_memory(1, pool->mask_size);

    if (mask && !numoe_pool_os_get_affinity(pool->mask_size, mask))
        otherwise = CPU_ISSET_S(os_cpu, pool->mask_size, mask);
    free(mask);
    return otherwise;
}

/* Whether the worker's pinning has changed. */
static bool look_at_own_cpu(struct numoe_pool_worker_slot *slot)
{
    const int cpu = numoe_pool_os_cpu();
    const bool there = cpu < 0 || (uint32_t)cpu == slot->os_cpu;
    const int before = atomic_load_explicit(&slot->pin_errno, memory_order_relaxed);
    int rc = ENODEV;

    if (there && before == 0)
        return false;
    if (before != 0 && before != ENODEV)
        return false; /* was never pinned, is there by chance */
    if (is_allowed(slot->pool, slot->os_cpu, there) && !pin_self(slot->pool, slot->os_cpu))
        rc = 0;
    if (rc == before)
        return false;
    note_pin(slot, rc);
    return true;
}

/* By a thread without a CPU of its own. @return whether the number of CPUs has changed */
static bool count_again(struct numoe_pool *pool, bool at_once)
{
    uint64_t now = numoe_pool_os_now_ns();
    bool changed;

    if (!at_once && now < atomic_load_explicit(&pool->watch_ns, memory_order_relaxed))
        return false;
    /* Acquire and release: the mask is the one's who watches. Who finds another at it leaves it to
     * that one, or to a later look. */
    if (atomic_exchange_explicit(&pool->watching, true, memory_order_acquire))
        return false;
    atomic_store_explicit(&pool->watch_ns, now + WATCH_NS, memory_order_relaxed);
    changed = count_cpus(pool);
    atomic_store_explicit(&pool->watching, false, memory_order_release);
    return changed;
}

void numoe_pool_watch(struct numoe_pool_hand *hand)
{
    struct numoe_pool *pool = hand->pool;
    struct numoe_pool_worker_slot *slot = hand->slot;
    bool changed;

    if (hand->worker == 0 || hand->lent)
        return; /* the application's threads are its own affair */
    changed = slot->os_cpu != UINT32_MAX && look_at_own_cpu(slot);
    if (!is_pinned(slot)) /* else its mask says nothing about other workers */
        changed |= count_again(pool, changed);
    if (changed)
        atomic_store_explicit(&pool->cpus_changed, true, memory_order_relaxed);
}

/* ---- telling --------------------------------------------------------------------------------- */

void numoe_pool_tell_refusals(const struct numoe_pool *pool)
{
    char text[128];

    for (uint32_t w = 1; w < pool->worker_count; w++) {
        const struct numoe_pool_worker_slot *slot = &pool->workers[w];
        int rc = atomic_load_explicit((_Atomic int *)&slot->pin_errno, memory_order_relaxed);
        if (rc)
            numoe_log_write(&pool->log, NUMOE_LOG_WARNING,
                            "worker %u: cannot be pinned to CPU %u, runs unpinned: %s", w,
                            slot->os_cpu, strerror_r(rc, text, sizeof text));
        if (slot->name_errno)
            numoe_log_write(&pool->log, NUMOE_LOG_DEBUG, "worker %u: thread not named: %s", w,
                            strerror_r(slot->name_errno, text, sizeof text));
    }
}

static bool all_pinned(const struct numoe_pool *pool)
{
    for (uint32_t w = 1; w <= pool->threads; w++)
        if (!is_pinned(&pool->workers[w]))
            return false;
    return true;
}

/* Those who sleep do not see that CPUs have come back, and those who are pinned not how many. */
static void nudge(struct numoe_pool *pool)
{
    uint64_t now;

    if (pool->threads == 0 ||
        atomic_load_explicit(&pool->regulars, memory_order_relaxed) == pool->worker_count)
        return;
    now = numoe_pool_os_now_ns();
    if (now < pool->nudge_ns)
        return;
    pool->nudge_ns = now + WATCH_NS;
    if (all_pinned(pool) && count_again(pool, true))
        atomic_store_explicit(&pool->cpus_changed, true, memory_order_relaxed);
    pool->nudged = pool->nudged % pool->threads + 1;
    numoe_pool_wake_one(pool, pool->nudged);
}

void numoe_pool_tell_changes(struct numoe_pool *pool)
{
    uint32_t gone = 0, first = 0;

    nudge(pool);
    if (!atomic_load_explicit(&pool->cpus_changed, memory_order_relaxed))
        return;
    atomic_store_explicit(&pool->cpus_changed, false, memory_order_relaxed);
    for (uint32_t w = 1; w < pool->worker_count; w++) {
        if (atomic_load_explicit(&pool->workers[w].pin_errno, memory_order_relaxed) != ENODEV)
            continue;
        if (gone++ == 0)
            first = w;
    }
    if (gone)
        numoe_log_write(&pool->log, NUMOE_LOG_WARNING,
                        "%u workers are no longer on their CPUs, which are gone or no longer "
                        "allowed: worker %u was on CPU %u; they run where the system puts them",
                        gone, first, pool->workers[first].os_cpu);
    numoe_log_write(&pool->log, NUMOE_LOG_INFO, "%u workers have %u CPUs now", pool->worker_count,
                    atomic_load_explicit(&pool->cpus, memory_order_relaxed));
}
