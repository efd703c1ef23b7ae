/*
 * pool_create.c - a pool's beginning and end: memory, threads, names, statistics.
 *
 * The creator waits until every thread is set up (pinned, named, thread_init called), so that
 * numoe_pool_stats and the log tell of refusals as soon as create returns, and all messages come
 * from the creator's own thread. `started` counts the threads: each adds with release, the creator
 * loads with acquire, and so sees what they noted about themselves.
 *
 * The end: seq becomes STOP, the one word that threads look at before each turn; they leave, and
 * are joined. No thread looks at anything else to learn that.
 *
 * In a forked child the threads do not exist: destroy only frees. The child is told by a page that
 * the kernel wipes on fork, so asking costs a load; without that (Linux before 4.14), by the pid.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "pool_internal.h"
#include "pool_os.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Kernels use some 64 KiB of stack. One MiB and no more: a stack that holds an aligned 2 MiB may
 * be given a huge page for its first touch, which would cost each worker 2 MiB. */
#define STACK_BYTES ((size_t)1 << 20)
static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

void numoe_pool_hand_init(struct numoe_pool_hand *hand, struct numoe_pool *pool, uint32_t worker,
                          uint32_t turn)
{
    hand->pool = pool;
    hand->slot = &pool->workers[worker];
    hand->worker = worker;
    hand->cursor = 0;
    hand->leaf = 0;
    hand->lent = false;
    hand->greedy = false;
    hand->idle_since_ns = 0;
    hand->random = 0;
    if (pool->chaos_seed)
        hand->random = mix(pool->chaos_seed ^ mix((uint64_t)turn << 32 | worker)) | 1;
    hand->view.seq = 0;
}

static void *worker_main(void *argument)
{
    struct numoe_pool_worker_slot *slot = argument;
    struct numoe_pool *pool = slot->pool;
    uint32_t worker = (uint32_t)(slot - pool->workers);
    struct numoe_pool_hand hand;
    struct numoe_pool_frame frame;
    char name[16];

    numoe_pool_pin_worker(slot);
    snprintf(name, sizeof name, "numoe-%u", worker);
    slot->name_errno = numoe_pool_os_name(name);
    numoe_pool_enter(&frame, pool);
    if (pool->thread_init)
        pool->thread_init(pool->thread_init_user, worker);
    /* Release: pairs with the load in wait_started. */
    if (atomic_fetch_add_explicit(&pool->started, 1, memory_order_release) + 2 +
            pool->lent_workers ==
        pool->worker_count)
        numoe_pool_os_wake(&pool->started, NUMOE_POOL_OS_ANY);

    numoe_pool_hand_init(&hand, pool, worker, 0);
    numoe_pool_participate(&hand, NUMOE_POOL_STOP >> 1);
    numoe_pool_leave(&frame);
    return NULL;
}

static void wait_started(struct numoe_pool *pool)
{
    uint32_t started;

    /* Acquire: pairs with the add in worker_main. */
    while ((started = atomic_load_explicit(&pool->started, memory_order_acquire)) < pool->threads)
        numoe_pool_os_wait(&pool->started, started, NUMOE_POOL_OS_ANY);
}

static void stop_threads(struct numoe_pool *pool)
{
    /* Sequentially consistent against workers about to sleep (pool_park.c). */
    atomic_store_explicit(&pool->seq, NUMOE_POOL_STOP, memory_order_seq_cst);
    numoe_pool_wake_all(pool);
    for (uint32_t w = 1; w <= pool->threads; w++)
        pthread_join(pool->workers[w].thread, NULL);
    pool->threads = 0;
    numoe_pool_wait_lenders(pool);
}

/* @return 0 or a positive errno, with pool->threads telling how far it came */
static int start_threads(struct numoe_pool *pool)
{
    sigset_t blocked, before;
    int rc = 0;

    /* The application's signals are not for these threads. Faults stay: blocked, they would kill
     * the process past its handlers. */
    sigfillset(&blocked);
    sigdelset(&blocked, SIGSEGV);
    sigdelset(&blocked, SIGBUS);
    sigdelset(&blocked, SIGFPE);
    sigdelset(&blocked, SIGILL);
    sigdelset(&blocked, SIGTRAP);
    sigdelset(&blocked, SIGABRT);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    for (uint32_t w = 1; w + pool->lent_workers < pool->worker_count; w++) {
        rc = numoe_pool_os_thread(&pool->workers[w].thread, STACK_BYTES, worker_main,
                                  &pool->workers[w]);
        if (rc)
            break;
        pool->threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

static void create_alive_page(struct numoe_pool *pool)
{
    long size = sysconf(_SC_PAGESIZE);
    void *page;

    pool->pid = getpid();
    if (size <= 0)
        return;
    page = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return;
    if (madvise(page, (size_t)size, MADV_WIPEONFORK)) {
        munmap(page, (size_t)size);
        return;
    }
    atomic_store_explicit((_Atomic uint32_t *)page, 1, memory_order_relaxed);
    pool->alive = page;
    pool->alive_size = (size_t)size;
}

static void free_memory(struct numoe_pool *pool)
{
    if (pool->alive)
        munmap((void *)pool->alive, pool->alive_size);
    numoe_pool_trees_destroy(pool);
    numoe_pool_kins_destroy(pool);
    numoe_pool_counters_destroy(pool);
    numoe_pool_masks_destroy(pool);
    free(pool->first);
    free(pool->workers);
    free(pool);
}

/* Take the caller's config field by field up to its own size, so that an older caller works. */
static int take_config(const struct numoe_pool_config *config, struct numoe_pool_config *taken,
                       struct numoe_error *error)
{
    const struct numoe_pool_config defaults = NUMOE_POOL_CONFIG_INIT;
    size_t least = offsetof(struct numoe_pool_config, thread_init);

    if (!config || config->size < least || config->size > sizeof *config)
        return numoe_error_set(error, -EINVAL, "numoe_pool_config.size",
                               "the size of the config is %zu bytes, expected %zu to %zu",
                               config ? config->size : 0, least, sizeof *config);
    *taken = defaults;
    memcpy(taken, config, config->size);
    if (taken->worker_count < 1 || taken->worker_count > NUMOE_POOL_MAX_WORKERS)
        return numoe_error_set(error, -EINVAL, "numoe_pool_config.worker_count",
                               "%u workers asked for, possible are 1 to %d", taken->worker_count,
                               NUMOE_POOL_MAX_WORKERS);
    if (taken->lent_workers >= taken->worker_count)
        return numoe_error_set(error, -EINVAL, "numoe_pool_config.lent_workers",
                               "%u of %u workers are to be lent; the first is the caller",
                               taken->lent_workers, taken->worker_count);
    for (uint32_t w = 0; taken->node_trip_ns && taken->workers && w < taken->worker_count; w++)
        if (taken->workers[w].node >= taken->node_count)
            return numoe_error_set(error, -EINVAL, "numoe_pool_config.node_trip_ns",
                                   "worker %u is of node %u, trips are given for %u nodes", w,
                                   taken->workers[w].node, taken->node_count);
    return 0;
}

int numoe_pool_create(const struct numoe_pool_config *config, struct numoe_pool **pool_out,
                      struct numoe_error *error)
{
    struct numoe_pool_config taken;
    struct numoe_pool *pool;
    char text[128];
    int rc;

    if (!pool_out)
        return numoe_error_set(error, -EINVAL, "numoe_pool_create", "no place for the pool given");
    *pool_out = NULL;
    rc = take_config(config, &taken, error);
    if (rc)
        return rc;

    rc = -ENOMEM;
    pool = numoe_pool_os_lines(sizeof *pool, NUMOE_POOL_LINE);
    if (!pool)
        goto no_memory;
    pool->worker_count = taken.worker_count;
    pool->chaos_seed = taken.chaos_seed;
    pool->wake_ns = taken.wake_ns;
    pool->lent_workers = taken.lent_workers;
    atomic_store_explicit(&pool->absent, taken.lent_workers, memory_order_relaxed);
    pool->thread_init = taken.thread_init;
    pool->thread_init_user = taken.thread_init_user;
    if (taken.log)
        pool->log = *taken.log;
    pool->base = NUMOE_POOL_MAX_PHASES;
    atomic_store_explicit(&pool->seq, pool->base << 1, memory_order_relaxed);
    pool->spin_wanted_ns = taken.spin_ns;
    atomic_store_explicit(&pool->spin_ns, taken.spin_ns, memory_order_relaxed);
    atomic_store_explicit(&pool->regulars, taken.worker_count, memory_order_relaxed);

    pool->workers =
        numoe_pool_os_lines(taken.worker_count * sizeof *pool->workers, NUMOE_POOL_LINE);
    pool->first = numoe_pool_os_memory((size_t)NUMOE_POOL_MAX_PHASES * (taken.worker_count + 1),
                                       sizeof *pool->first);
    if (!pool->workers || !pool->first || numoe_pool_masks_create(pool))
        goto free_pool;
    for (uint32_t w = 0; w < taken.worker_count; w++) {
        pool->workers[w].pool = pool;
        if (w >= taken.worker_count - taken.lent_workers)
            atomic_store_explicit(&pool->workers[w].state, NUMOE_POOL_ABSENT, memory_order_relaxed);
        pool->workers[w].os_cpu = taken.workers ? taken.workers[w].os_cpu : UINT32_MAX;
    }
    if (numoe_pool_kins_create(pool, &taken) || numoe_pool_trees_create(pool, taken.workers) ||
        numoe_pool_counters_create(pool, &taken))
        goto free_pool;
    if (taken.pin_caller && pool->workers[0].os_cpu != UINT32_MAX) {
        /* Past the mask, the mask stays empty and pinning is refused with EINVAL, as it should. */
        if (pool->workers[0].os_cpu < pool->mask_size * 8)
            CPU_SET_S(pool->workers[0].os_cpu, pool->mask_size, pool->mask_pinned);
        pool->pin_caller = true;
    }
    create_alive_page(pool);

    rc = start_threads(pool);
    if (rc) {
        uint32_t threads = pool->threads;
        stop_threads(pool);
        rc = numoe_error_set(error, rc == ENOMEM ? -ENOMEM : -EAGAIN, "pthread_create",
                             "thread %u of %u could not be started, %u were and are stopped: %s",
                             threads + 1, taken.worker_count - 1 - taken.lent_workers, threads,
                             strerror_r(rc, text, sizeof text));
        free_memory(pool);
        return rc;
    }
    wait_started(pool);
    numoe_pool_tell_refusals(pool);
    numoe_pool_count_cpus(pool);
    *pool_out = pool;
    return 0;

free_pool:
    free_memory(pool);
no_memory:
    return numoe_error_set(error, rc, "numoe_pool_create", "no memory for a pool of %u workers",
                           taken.worker_count);
}

void numoe_pool_destroy(struct numoe_pool *pool)
{
    if (!pool)
        return;
    if (!numoe_pool_forked(pool)) {
        numoe_pool_help(pool, pool->base);
        stop_threads(pool);
    }
    free_memory(pool);
}

uint32_t numoe_pool_worker_count(const struct numoe_pool *pool)
{
    return pool ? pool->worker_count : 0;
}
