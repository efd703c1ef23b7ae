/*
 * The ways to fork and join that are compared.
 *
 *   numoe        the pool of a context, as an engine has it
 *   numoe, told  the same, told that an item takes 1 ns, as the executor tells it of its items: a
 *                phase that is over sooner than anyone is awake wakes nobody
 *   libgomp      what `#pragma omp parallel` becomes, by its entry point
 *   pthreadpool  pthreadpool_parallelize_1d
 *   bare         two threads and one word, nothing else: the other one spins on it, or sleeps on it
 *                by futex. The least that a wake-up costs on this machine.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "fork_join.h"

#include "base/clock.h"
#include "model.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <pthreadpool.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

struct fork_join_cell *fork_join_cells;

static void item(uint32_t i)
{
    fork_join_cells[i].runs++;
}

/* ---- numoe ----------------------------------------------------------------------------------- */

static struct numoe *context;

static int numoe_way_create(uint32_t workers)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;

    options.workers = workers;
    return numoe_open(&options, &context, NULL);
}

static void numoe_way_item(void *unused, uint32_t i, uint32_t worker)
{
    (void)unused, (void)worker;
    item(i);
}

static void run_items(uint32_t workers, uint32_t item_ns)
{
    const struct numoe_pool_job job = {
        .phase_count = 1,
        .phases = {{.run = numoe_way_item, .items = workers, .item_ns = item_ns}}};

    numoe_pool_run(numoe_context_pool(context), &job);
}

static void numoe_way_fork_join(uint32_t workers)
{
    run_items(workers, 0);
}

static void told_fork_join(uint32_t workers)
{
    run_items(workers, 1);
}

static void numoe_way_destroy(void)
{
    numoe_close(context);
}

/* ---- libgomp --------------------------------------------------------------------------------- */

/* Its ABI, as GCC calls it; <omp.h> belongs to GCC and is not every compiler's. */
extern void GOMP_parallel(void (*run)(void *), void *data, unsigned threads, unsigned flags);
extern int omp_get_thread_num(void);
extern int omp_pause_resource_all(int kind);
enum { OMP_PAUSE_HARD = 2 };

static void gomp_item(void *unused)
{
    (void)unused;
    item((uint32_t)omp_get_thread_num());
}

static void gomp_fork_join(uint32_t workers)
{
    GOMP_parallel(gomp_item, NULL, workers, 0);
}

static int gomp_create(uint32_t workers)
{
    (void)workers;
    return 0; /* the first region starts them */
}

static void gomp_destroy(void)
{
    omp_pause_resource_all(OMP_PAUSE_HARD);
}

/* ---- pthreadpool ----------------------------------------------------------------------------- */

static pthreadpool_t peer;

static int peer_create(uint32_t workers)
{
    peer = pthreadpool_create(workers);
    return peer ? 0 : -ENOMEM;
}

static void peer_item(void *unused, size_t i)
{
    (void)unused;
    item((uint32_t)i);
}

static void peer_fork_join(uint32_t workers)
{
    pthreadpool_parallelize_1d(peer, peer_item, NULL, workers, 0);
}

static void peer_destroy(void)
{
    pthreadpool_destroy(peer);
}

/* ---- bare ------------------------------------------------------------------------------------ */

#define BARE_SPIN_NS 200000
enum { BARE_CLOCK_TURNS = 64 };

/* asked: the round, and in the lowest bit that the other thread sleeps or is about to. */
static struct {
    _Alignas(64) _Atomic uint32_t asked;
    _Alignas(64) _Atomic uint32_t answered;
    _Atomic bool over;
    pthread_t thread;
} bare;

static void pause_once(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void *bare_main(void *unused)
{
    uint32_t round = 0;

    (void)unused;
    for (;;) {
        uint64_t until = numoe_now_ns() + BARE_SPIN_NS;
        uint32_t asked;

        for (uint32_t turns = 1;; turns++) {
            asked = atomic_load_explicit(&bare.asked, memory_order_acquire);
            if (asked >> 1 != round)
                break;
            pause_once();
            if (turns % BARE_CLOCK_TURNS == 0 && numoe_now_ns() >= until &&
                atomic_compare_exchange_strong(&bare.asked, &asked, asked | 1)) {
                while (atomic_load(&bare.asked) == (asked | 1))
                    syscall(SYS_futex, &bare.asked, FUTEX_WAIT_PRIVATE, asked | 1, NULL, NULL, 0);
            }
        }
        round = asked >> 1;
        if (atomic_load_explicit(&bare.over, memory_order_relaxed))
            return NULL;
        item(1);
        atomic_store_explicit(&bare.answered, round, memory_order_release);
    }
}

static uint32_t bare_ask(void)
{
    uint32_t asked = atomic_load_explicit(&bare.asked, memory_order_relaxed), next;

    do {
        next = ((asked >> 1) + 1) << 1;
    } while (!atomic_compare_exchange_weak(&bare.asked, &asked, next));
    if (asked & 1)
        syscall(SYS_futex, &bare.asked, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    return next >> 1;
}

static void bare_fork_join(uint32_t workers)
{
    uint32_t round = bare_ask();

    (void)workers;
    item(0);
    while (atomic_load_explicit(&bare.answered, memory_order_acquire) != round)
        pause_once();
}

static int bare_create(uint32_t workers)
{
    (void)workers;
    atomic_store(&bare.over, false);
    atomic_store(&bare.asked, 0);
    atomic_store(&bare.answered, 0);
    return -pthread_create(&bare.thread, NULL, bare_main, NULL);
}

static void bare_destroy(void)
{
    atomic_store(&bare.over, true);
    bare_ask();
    pthread_join(bare.thread, NULL);
}

const struct fork_join_way fork_join_ways[] = {
    {"numoe", 0, numoe_way_create, numoe_way_fork_join, numoe_way_destroy},
    {"numoe, told", 0, numoe_way_create, told_fork_join, numoe_way_destroy},
    {"libgomp", 0, gomp_create, gomp_fork_join, gomp_destroy},
    {"pthreadpool", 0, peer_create, peer_fork_join, peer_destroy},
    {"bare", 2, bare_create, bare_fork_join, bare_destroy},
    {NULL, 0, NULL, NULL, NULL},
};
