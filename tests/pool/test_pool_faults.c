/* The pool when the system refuses, takes CPUs away, or lets time pass as a test wants. Built with
 * a pool of its own, whose seam to the system (pool_os.h) calls into this file. */
#include "numoe_pool.h"
#include "pool_internal.h"
#include "pool_os.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- the system ------------------------------------------------------------------------------ */

static _Atomic int failing = -1; /* which kind of call fails */
static _Atomic long fails_at;    /* the how manieth of them; -1: each */
static _Atomic int fails_with;
static _Atomic long calls[NUMOE_POOL_OS_CALLS];
static _Atomic uint64_t added_ns; /* to the clock */
static _Atomic uint64_t fixed_ns; /* the clock stands still */
static _Atomic int on_cpu = -1;   /* where every thread is told that it is */

int numoe_pool_os_fault(enum numoe_pool_os_call call)
{
    long number = atomic_fetch_add(&calls[call], 1);

    if ((int)call != atomic_load(&failing))
        return 0;
    return atomic_load(&fails_at) < 0 || number == atomic_load(&fails_at) ? atomic_load(&fails_with)
                                                                          : 0;
}

uint64_t numoe_pool_os_test_now_ns(void)
{
    uint64_t fixed = atomic_load(&fixed_ns);

    return fixed ? fixed : numoe_now_ns() + atomic_load(&added_ns);
}

int numoe_pool_os_test_cpu(int cpu)
{
    int told = atomic_load(&on_cpu);

    return told < 0 ? cpu : told;
}

static void fail(enum numoe_pool_os_call call, long at, int with)
{
    for (int c = 0; c < NUMOE_POOL_OS_CALLS; c++)
        atomic_store(&calls[c], 0);
    atomic_store(&fails_at, at);
    atomic_store(&fails_with, with);
    atomic_store(&failing, (int)call);
}

static void fail_nothing(void)
{
    atomic_store(&failing, -1);
}

/* ---- helpers --------------------------------------------------------------------------------- */

#define AWAIT(condition)                                                                           \
    while (!(condition))                                                                           \
    sched_yield()

struct messages {
    char warning[400], info[400], debug[400];
    uint32_t warnings;
};

static void keep(void *user, enum numoe_log_level level, const char *message)
{
    struct messages *messages = user;

    messages->warnings += level == NUMOE_LOG_WARNING;
    if (level == NUMOE_LOG_WARNING)
        snprintf(messages->warning, sizeof messages->warning, "%s", message);
    if (level == NUMOE_LOG_INFO)
        snprintf(messages->info, sizeof messages->info, "%s", message);
    if (level == NUMOE_LOG_DEBUG)
        snprintf(messages->debug, sizeof messages->debug, "%s", message);
}

static uint32_t threads(void)
{
    DIR *tasks = opendir("/proc/self/task");
    uint32_t count = 0;
    struct dirent *entry;

    cr_assert_not_null(tasks);
    while ((entry = readdir(tasks)))
        count += entry->d_name[0] != '.';
    closedir(tasks);
    return count;
}

/* A thread that was joined may be in /proc for a moment still. */
static bool threads_are(uint32_t count)
{
    for (int i = 0; i < 10000 && threads() != count; i++)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    return threads() == count;
}

static pid_t thread_named(const char *wanted)
{
    DIR *tasks = opendir("/proc/self/task");
    pid_t found = 0;
    struct dirent *entry;

    cr_assert_not_null(tasks);
    while ((entry = readdir(tasks))) {
        char path[300], name[64] = "";
        FILE *file;

        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        file = fopen(path, "r");
        if (file && fgets(name, sizeof name, file)) {
            name[strcspn(name, "\n")] = 0;
            if (!strcmp(name, wanted))
                found = atoi(entry->d_name);
        }
        if (file)
            fclose(file);
    }
    closedir(tasks);
    return found;
}

static uint32_t allowed(uint32_t *cpu, uint32_t most)
{
    cpu_set_t mask;
    uint32_t count = 0;

    CPU_ZERO(&mask);
    cr_assert_eq(sched_getaffinity(0, sizeof mask, &mask), 0);
    for (uint32_t c = 0; c < CPU_SETSIZE && count < most; c++)
        if (CPU_ISSET(c, &mask))
            cpu[count++] = c;
    return count;
}

static void count_item(void *context, uint32_t item, uint32_t worker)
{
    (void)item, (void)worker;
    atomic_fetch_add((_Atomic uint32_t *)context, 1);
}

/* Everything runs, whatever was refused. */
static void check_works(struct numoe_pool *pool)
{
    _Atomic uint32_t count = 0;
    struct numoe_pool_job job = {.context = (void *)&count,
                                 .phase_count = 2,
                                 .phases = {{count_item, 100, NULL}, {count_item, 7, NULL}}};
    uint64_t ticket;

    cr_assert_eq(numoe_pool_run(pool, &job), 0);
    cr_assert_eq(numoe_pool_submit(pool, &job, &ticket), 0);
    cr_assert_eq(numoe_pool_wait(pool, ticket), 0);
    cr_assert_eq(count, 214);
}

/* ---- creating -------------------------------------------------------------------------------- */

Test(pool_faults, any_allocation_may_fail, .timeout = 60)
{
    struct numoe_pool_worker workers[5];
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    const uint32_t before = threads();
    uint32_t refused = 0;

    for (uint32_t w = 0; w < 5; w++)
        workers[w] = (struct numoe_pool_worker){UINT32_MAX, w, w / 2, w / 2, w / 4};
    config.worker_count = 5;
    config.workers = workers;
    for (long at = 0;; at++) {
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_pool *pool = (void *)1;
        int rc;

        fail(NUMOE_POOL_OS_MEMORY, at, ENOMEM);
        rc = numoe_pool_create(&config, &pool, &error);
        fail_nothing();
        if (rc == 0) {
            check_works(pool);
            numoe_pool_destroy(pool);
            break;
        }
        refused++;
        cr_assert_eq(rc, -ENOMEM);
        cr_assert_null(pool);
        cr_assert_eq(error.code, -ENOMEM);
        cr_assert(strstr(error.message, "5 workers"), "%s", error.message);
        cr_assert(threads_are(before));
    }
    cr_assert_geq(refused, 10);
}

Test(pool_faults, any_thread_may_not_start, .timeout = 60)
{
    static const int why[] = {EAGAIN, ENOMEM, EPERM};
    const uint32_t before = threads();

    for (int lent = 0; lent < 2; lent++)
        for (uint32_t at = 0; at < 4; at++)
            for (int i = 0; i < 3; i++) {
                struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
                struct numoe_error error = NUMOE_ERROR_INIT;
                struct numoe_pool *pool = (void *)1;
                char wanted[128];

                config.worker_count = 5 + (uint32_t)lent;
                config.lent_workers = (uint32_t)lent;
                config.spin_ns = at % 2 ? 0 : 100000;
                fail(NUMOE_POOL_OS_THREAD, (long)at, why[i]);
                cr_assert_eq(numoe_pool_create(&config, &pool, &error),
                             why[i] == ENOMEM ? -ENOMEM : -EAGAIN);
                fail_nothing();
                cr_assert_null(pool);
                snprintf(wanted, sizeof wanted,
                         "thread %u of 4 could not be started, %u were and are stopped: ", at + 1,
                         at);
                cr_assert_eq(strncmp(error.message, wanted, strlen(wanted)), 0, "%s",
                             error.message);
                cr_assert(threads_are(before));
            }
}

Test(pool_faults, thread_attributes_may_be_refused, .timeout = 60)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool *pool;

    config.worker_count = 3;
    fail(NUMOE_POOL_OS_ATTRIBUTES, 1, ENOMEM);
    cr_assert_eq(numoe_pool_create(&config, &pool, &error), -ENOMEM);
    fail_nothing();
    cr_assert(strstr(error.message, "thread 2 of 2"), "%s", error.message);
}

Test(pool_faults, names_and_masks_are_not_needed, .timeout = 60)
{
    static const enum numoe_pool_os_call kinds[] = {NUMOE_POOL_OS_NAME, NUMOE_POOL_OS_GET_AFFINITY,
                                                    NUMOE_POOL_OS_SET_AFFINITY};
    uint32_t cpu[1];

    allowed(cpu, 1);
    for (int k = 0; k < 3; k++) {
        struct messages messages = {0};
        struct numoe_log log = {keep, &messages};
        struct numoe_pool_worker workers[3] = {
            {.os_cpu = cpu[0]}, {.os_cpu = cpu[0]}, {.os_cpu = cpu[0]}};
        struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
        struct numoe_pool_worker_stats stats;
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_pool *pool;

        config.worker_count = 3;
        config.workers = workers;
        config.pin_caller = true;
        config.log = &log;
        fail(kinds[k], -1, EPERM);
        cr_assert_eq(numoe_pool_create(&config, &pool, &error), 0, "%s", error.message);
        check_works(pool);
        cr_assert_eq(numoe_pool_stats(pool, 2, &stats), 0);
        if (kinds[k] == NUMOE_POOL_OS_NAME) {
            cr_assert(strstr(messages.debug, "worker 2: thread not named"), "%s", messages.debug);
            cr_assert_eq(messages.warnings, 0);
        } else if (kinds[k] == NUMOE_POOL_OS_SET_AFFINITY) {
            cr_assert(!stats.pinned && stats.pin_errno == EPERM);
            /* two workers, and the caller once */
            cr_assert_leq(messages.warnings, 3);
            cr_assert_geq(messages.warnings, 2);
        } else {
            cr_assert(stats.pinned);
        }
        numoe_pool_destroy(pool);
        fail_nothing();
    }
}

/* ---- CPUs that go ---------------------------------------------------------------------------- */

/* Jobs until the worker has slept once more: it looks where it is before it sleeps. */
static void sleep_again(struct numoe_pool *pool, uint32_t worker)
{
    struct numoe_pool_worker_stats before, now;

    cr_assert_eq(numoe_pool_stats(pool, worker, &before), 0);
    do {
        check_works(pool);
        cr_assert_eq(numoe_pool_stats(pool, worker, &now), 0);
    } while (now.sleeps < before.sleeps + 2);
}

static void allow(pid_t thread, const uint32_t *cpu, uint32_t count)
{
    cpu_set_t mask;

    CPU_ZERO(&mask);
    for (uint32_t c = 0; c < count; c++)
        CPU_SET(cpu[c], &mask);
    cr_assert_eq(sched_setaffinity(thread, sizeof mask, &mask), 0);
}

static bool may_use_only(pid_t thread, uint32_t cpu)
{
    cpu_set_t mask;

    cr_assert_eq(sched_getaffinity(thread, sizeof mask, &mask), 0);
    return CPU_COUNT(&mask) == 1 && CPU_ISSET(cpu, &mask);
}

/* Its mask no longer has the CPU; then it has, among others, as after a CPU was offline. */
Test(pool_faults, a_worker_whose_cpu_goes_is_reported_and_goes_back, .timeout = 60)
{
    struct messages messages = {0};
    struct numoe_log log = {keep, &messages};
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool_worker_stats stats;
    struct numoe_pool_worker workers[2];
    struct numoe_pool *pool;
    uint32_t cpu[2];
    pid_t thread;

    if (allowed(cpu, 2) < 2)
        cr_skip_test("one CPU");
    workers[0] = (struct numoe_pool_worker){.os_cpu = cpu[1]};
    workers[1] = (struct numoe_pool_worker){.os_cpu = cpu[0]};
    config.worker_count = 2;
    config.workers = workers;
    config.spin_ns = 0;
    config.log = &log;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    thread = thread_named("numoe-1");
    for (int round = 0; round < 3; round++) {
        sleep_again(pool, 1);
        cr_assert_eq(numoe_pool_stats(pool, 1, &stats), 0);
        cr_assert(stats.pinned && stats.pin_errno == 0);
        cr_assert_eq(messages.warnings, (uint32_t)round);

        allow(thread, &cpu[1], 1);
        sleep_again(pool, 1);
        cr_assert_eq(numoe_pool_stats(pool, 1, &stats), 0);
        cr_assert(!stats.pinned && stats.pin_errno == ENODEV);
        check_works(pool);
        cr_assert_eq(messages.warnings, 1 + (uint32_t)round);
        cr_assert(strstr(messages.warning, "1 workers are no longer on their CPUs") &&
                      strstr(messages.warning, "worker 1"),
                  "%s", messages.warning);
        cr_assert(may_use_only(thread, cpu[1])); /* what others forbid is not done */

        fail(NUMOE_POOL_OS_SET_AFFINITY, -1, EINVAL);
        allow(thread, cpu, 2);
        sleep_again(pool, 1);
        fail_nothing();
        cr_assert_eq(numoe_pool_stats(pool, 1, &stats), 0);
        cr_assert(!stats.pinned && stats.pin_errno == ENODEV);
        sleep_again(pool, 1);
        cr_assert_eq(numoe_pool_stats(pool, 1, &stats), 0);
        cr_assert(stats.pinned && stats.pin_errno == 0);
        cr_assert(may_use_only(thread, cpu[0]));

        /* moved, though its mask has the CPU: nothing to report */
        allow(thread, cpu, 2);
        atomic_store(&on_cpu, (int)cpu[0] + 1);
        sleep_again(pool, 1);
        atomic_store(&on_cpu, -1);
        check_works(pool);
        cr_assert(may_use_only(thread, cpu[0]));
        cr_assert_eq(numoe_pool_stats(pool, 1, &stats), 0);
        cr_assert(stats.pinned && stats.pin_errno == 0);
    }
    numoe_pool_destroy(pool);
}

/* Where masks cannot be read, where a worker runs says it. */
Test(pool_faults, a_cpu_that_goes_is_noticed_without_masks, .timeout = 60)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool_worker_stats stats;
    struct numoe_pool_worker workers[2];
    struct numoe_pool *pool;
    uint32_t cpu[1];

    allowed(cpu, 1);
    workers[0] = (struct numoe_pool_worker){.os_cpu = UINT32_MAX};
    workers[1] = (struct numoe_pool_worker){.os_cpu = cpu[0]};
    config.worker_count = 2;
    config.workers = workers;
    config.spin_ns = 0;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    for (int kind = 0; kind < 2; kind++)
        for (int gone = 1; gone >= 0; gone--) {
            fail(kind ? NUMOE_POOL_OS_MEMORY : NUMOE_POOL_OS_GET_AFFINITY, -1, EPERM);
            atomic_store(&on_cpu, gone ? (int)cpu[0] + 1 : -1);
            sleep_again(pool, 1);
            cr_assert_eq(numoe_pool_stats(pool, 1, &stats), 0);
            cr_assert_eq(stats.pinned, !gone && kind == 0);
            cr_assert_eq(stats.pin_errno, gone || kind ? ENODEV : 0);
        }
    fail_nothing();
    numoe_pool_destroy(pool);
}

/* All workers have their CPUs again: they are woken as before, and spin as long. */
Test(pool_faults, cpus_that_come_back_are_counted, .timeout = 60)
{
    struct messages messages = {0};
    struct numoe_log log = {keep, &messages};
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool_worker workers[2];
    struct numoe_pool *pool;
    uint32_t cpu[2];
    pid_t thread;

    if (allowed(cpu, 2) < 2)
        cr_skip_test("one CPU");
    workers[0] = (struct numoe_pool_worker){.os_cpu = cpu[0]};
    workers[1] = (struct numoe_pool_worker){.os_cpu = cpu[1]};
    config.worker_count = 2;
    config.workers = workers;
    config.spin_ns = 5000;
    config.log = &log;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    thread = thread_named("numoe-1");
    for (int whole = 0; whole < 2; whole++) {
        allow(0, cpu, 1); /* the caller, as a cpuset that shrinks would */
        allow(thread, cpu, 1);
        sleep_again(pool, 1);
        cr_assert_eq(pool->cpus, 1);
        cr_assert_eq(pool->spin_ns, 2000);
        cr_assert_eq(pool->workers[1].rank, NUMOE_POOL_RESERVE);

        /* its own CPU alone, as newer kernels remember it, or all that the caller has */
        allow(0, cpu, 2);
        allow(thread, whole ? cpu : &cpu[1], whole ? 2 : 1);
        while (pool->workers[1].rank != NUMOE_POOL_REGULAR) {
            atomic_fetch_add(&added_ns, 1000000000u);
            check_works(pool);
        }
        cr_assert_eq(pool->cpus, 2);
        cr_assert_eq(pool->spin_ns, 5000);
        check_works(pool);
        cr_assert(strstr(messages.info, "2 workers have 2 CPUs now"), "%s", messages.info);
        cr_assert(may_use_only(thread, cpu[1]));
    }
    numoe_pool_destroy(pool);
}

Test(pool_faults, a_worker_may_spin_for_ever, .timeout = 60)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool_worker_stats stats;
    struct numoe_pool *pool;
    uint32_t cpu[2];

    if (allowed(cpu, 2) < 2)
        cr_skip_test("one CPU");
    config.worker_count = 2;
    config.spin_ns = UINT64_MAX;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    check_works(pool);
    for (int i = 0; i < 20; i++) {
        atomic_fetch_add(&added_ns, 1000000000000u);
        nanosleep(&(struct timespec){0, 5000000}, NULL);
    }
    cr_assert_eq(numoe_pool_stats(pool, 1, &stats), 0);
    cr_assert_eq(stats.sleeps, 0);
    numoe_pool_destroy(pool);
}

Test(pool_faults, the_callers_cpu_may_go_and_come_back, .timeout = 60)
{
    struct messages messages = {0};
    struct numoe_log log = {keep, &messages};
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool_worker_stats stats;
    struct numoe_pool_worker workers[1];
    struct numoe_pool *pool;
    cpu_set_t before, after;
    uint32_t cpu[2];
    uint32_t cpus = allowed(cpu, 2);

    if (cpus < 2)
        cr_skip_test("one CPU");
    workers[0] = (struct numoe_pool_worker){.os_cpu = cpu[1]};
    config.workers = workers;
    config.pin_caller = true;
    config.log = &log;
    cr_assert_eq(sched_getaffinity(0, sizeof before, &before), 0);
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    for (int gone = 0; gone < 2; gone++)
        for (int call = 0; call < 3; call++) {
            if (gone)
                fail(NUMOE_POOL_OS_SET_AFFINITY, -1, EINVAL);
            check_works(pool);
            fail_nothing();
            cr_assert_eq(numoe_pool_stats(pool, 0, &stats), 0);
            cr_assert_eq(stats.pinned, !gone);
            cr_assert_eq(stats.pin_errno, gone ? EINVAL : 0);
            cr_assert_eq(messages.warnings, (uint32_t)gone); /* told once */
        }
    check_works(pool);
    cr_assert_eq(numoe_pool_stats(pool, 0, &stats), 0);
    cr_assert(stats.pinned);
    cr_assert_eq(sched_getaffinity(0, sizeof after, &after), 0);
    cr_assert(CPU_EQUAL(&before, &after));
    numoe_pool_destroy(pool);
}

/* What a shrinking cpuset does to threads: their masks change under them. */
Test(pool_faults, fewer_cpus_are_noticed_within_a_second, .timeout = 60)
{
    struct messages messages = {0};
    struct numoe_log log = {keep, &messages};
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool *pool;
    uint32_t cpu[2];
    pid_t worker;

    if (allowed(cpu, 2) < 2)
        cr_skip_test("one CPU");
    config.worker_count = 2;
    config.spin_ns = 5000;
    config.log = &log;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    worker = thread_named("numoe-1");
    cr_assert_neq(worker, 0);
    cr_assert_geq(pool->cpus, 2);
    cr_assert_eq(pool->spin_ns, 5000);
    cr_assert_eq(pool->workers[1].rank, NUMOE_POOL_REGULAR);

    allow(worker, cpu, 1);
    atomic_fetch_add(&added_ns, 2000000000u);
    sleep_again(pool, 1);
    cr_assert_eq(pool->cpus, 1);
    cr_assert_eq(pool->spin_ns, 2000);
    cr_assert_eq(pool->workers[1].rank, NUMOE_POOL_RESERVE);
    check_works(pool);
    cr_assert(strstr(messages.info, "2 workers have 1 CPUs now"), "%s", messages.info);

    allow(worker, cpu, 2);
    atomic_fetch_add(&added_ns, 2000000000u);
    /* With one CPU for all, a run leaves the worker asleep; but now and then it is woken to look.
     */
    while (pool->cpus != 2) {
        _Atomic uint32_t count = 0;
        struct numoe_pool_job job = {
            .context = (void *)&count, .phase_count = 1, .phases = {{count_item, 9, NULL}}};
        cr_assert_eq(numoe_pool_run(pool, &job), 0);
    }
    AWAIT(pool->workers[1].rank == NUMOE_POOL_REGULAR);
    cr_assert_eq(pool->spin_ns, 5000);
    numoe_pool_destroy(pool);
}

/* ---- far steals as time passes --------------------------------------------------------------- */

/* Worker 0's hand in an open phase of ten items, five of them worker 1's, in another package. No
 * thread but this one. */
static void take_own_share(struct numoe_pool *pool, struct numoe_pool_hand *hand, uint32_t item_ns)
{
    const uint64_t seq = (uint64_t)NUMOE_POOL_MAX_PHASES << 1 | NUMOE_POOL_OPEN;
    uint32_t begin, end;

    pool->slots[0].run = count_item;
    pool->slots[0].info = 10 | (uint64_t)item_ns << NUMOE_POOL_INFO_TIME;
    pool->workers[0].opened = pool->workers[1].opened = 0;
    pool->seq = seq;
    numoe_pool_hand_init(hand, pool, 0, 0);
    cr_assert(numoe_pool_view_load(pool, seq, &hand->view));
    cr_assert(numoe_pool_claim(hand, &begin, &end));
    cr_assert(begin == 0 && end == 5);
}

Test(pool_faults, a_far_steal_is_worth_it_after_a_while, .timeout = 60)
{
    static const struct {
        uint32_t item_ns;
        uint64_t before_ns, after_ns; /* the last moment of waiting, the first of stealing */
    } cases[] = {{100, 500, 501}, {1, 995, 996}, {199, 5, 6}, {0, 999, 1000}, {200, 0, 1}};
    struct numoe_pool_worker workers[2] = {{.os_cpu = UINT32_MAX}, {UINT32_MAX, 1, 1, 1, 1}};
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool *pool;

    config.worker_count = 2;
    config.lent_workers = 1;
    config.workers = workers;
    config.trip_ns[NUMOE_POOL_ELSEWHERE] = 1000;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const uint64_t start = 1000000;
        struct numoe_pool_hand hand;
        uint32_t begin, end;

        /* As if a thread were lent and awake. */
        pool->workers[1].state = NUMOE_POOL_AWAKE;
        pool->absent = 0;
        take_own_share(pool, &hand, cases[c].item_ns);
        atomic_store(&fixed_ns, start);
        cr_assert(!numoe_pool_claim(&hand, &begin, &end));
        atomic_store(&fixed_ns, start + cases[c].before_ns);
        cr_assert(!numoe_pool_claim(&hand, &begin, &end), "case %zu", c);
        atomic_store(&fixed_ns, start + cases[c].after_ns);
        cr_assert(numoe_pool_claim(&hand, &begin, &end), "case %zu", c);
        cr_assert(begin == 5 && end == 10);

        /* From one that is absent or sleeps at once. */
        pool->workers[1].state = NUMOE_POOL_ABSENT;
        pool->absent = 1;
        take_own_share(pool, &hand, cases[c].item_ns);
        cr_assert(numoe_pool_claim(&hand, &begin, &end));
        pool->workers[1].state = NUMOE_POOL_SLEEPING;
        pool->absent = 0;
        pool->sleepers = 1;
        take_own_share(pool, &hand, cases[c].item_ns);
        cr_assert(numoe_pool_claim(&hand, &begin, &end));
        pool->sleepers = 0;
    }
    atomic_store(&fixed_ns, 0);
    pool->workers[1].state = NUMOE_POOL_ABSENT;
    pool->absent = 1;
    pool->seq = pool->base << 1;
    numoe_pool_destroy(pool);
}
