/* The pool: how it begins, and what is left of it in a forked child. */
#include "pool_help.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/* --------------------------------------------------------------------- create, errors */

static void keep_message(void *user, enum numoe_log_level level, const char *message)
{
    char *kept = user;

    if (level == NUMOE_LOG_WARNING)
        snprintf(kept, 256, "%s", message);
}

Test(pool_create, bad_configs_are_refused, .timeout = 20)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool *pool = (void *)1;

    config.worker_count = 0;
    cr_assert_eq(numoe_pool_create(&config, &pool, &error), -EINVAL);
    cr_assert_eq(error.code, -EINVAL);
    cr_assert_null(pool);
    config.worker_count = NUMOE_POOL_MAX_WORKERS + 1;
    cr_assert_eq(numoe_pool_create(&config, &pool, &error), -EINVAL);
    cr_assert(strstr(error.message, "4097"), "%s", error.message);
    config.worker_count = 1;
    config.size = 3;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), -EINVAL);
    config.size = sizeof config + 8;
    cr_assert_eq(numoe_pool_create(&config, &pool, &error), -EINVAL);
    cr_assert(strstr(error.where, "size"), "%s", error.where);
    cr_assert_eq(numoe_pool_create(NULL, &pool, &error), -EINVAL);
    cr_assert_eq(numoe_pool_create(&config, NULL, &error), -EINVAL);
    /* An older caller, whose config ends earlier. */
    config.size = offsetof(struct numoe_pool_config, spin_ns);
    config.chaos_seed = 5;
    cr_assert_eq(numoe_pool_create(&config, &pool, &error), 0);
    cr_assert_eq(pool->chaos_seed, 0);
    cr_assert_eq(pool->spin_ns, 200000);
    numoe_pool_destroy(pool);
}

Test(pool_create, bad_calls_are_refused, .timeout = 20)
{
    struct numoe_pool *pool = make(2, 0);
    struct numoe_pool_worker_stats stats;
    struct numoe_pool_job job = {.phase_count = NUMOE_POOL_MAX_PHASES + 1};
    struct numoe_pool_job no_function = {.phase_count = 1, .phases = {{NULL, 1, NULL}}};

    cr_assert_eq(numoe_pool_run(pool, &job), -EINVAL);
    cr_assert_eq(numoe_pool_run(pool, &no_function), -EINVAL);
    cr_assert_eq(numoe_pool_run(pool, NULL), -EINVAL);
    cr_assert_eq(numoe_pool_run(NULL, &job), -EINVAL);
    cr_assert_eq(numoe_pool_stats(pool, 2, &stats), -EINVAL);
    cr_assert_eq(numoe_pool_stats(pool, 0, NULL), -EINVAL);
    cr_assert_eq(numoe_pool_worker_count(pool), 2);
    numoe_pool_destroy(pool);
    numoe_pool_destroy(NULL);
}

Test(pool_create, an_absent_cpu_is_reported_not_fatal, .timeout = 20)
{
    static const uint32_t absent[] = {CPU_SETSIZE - 1, 1u << 20};
    for (int i = 0; i < 2; i++) {
        uint32_t cpu[1] = {0};
        char message[256] = "";
        struct numoe_log log = {keep_message, message};
        struct numoe_pool_worker workers[3];
        struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_pool_worker_stats stats;
        struct numoe_pool *pool;
        static const uint32_t items[] = {100};

        allowed_cpus(cpu, 1);
        memset(workers, 0, sizeof workers);
        workers[0].os_cpu = workers[1].os_cpu = cpu[0];
        workers[2].os_cpu = absent[i];
        config.worker_count = 3;
        config.workers = workers;
        config.log = &log;
        cr_assert_eq(numoe_pool_create(&config, &pool, &error), 0, "%s", error.message);
        cr_assert(strstr(message, "worker 2") && strstr(message, "CPU"), "%s", message);
        cr_assert_eq(numoe_pool_stats(pool, 1, &stats), 0);
        cr_assert(stats.pinned && stats.pin_errno == 0);
        cr_assert_eq(numoe_pool_stats(pool, 2, &stats), 0);
        cr_assert(!stats.pinned && stats.pin_errno == EINVAL);
        run_and_check(pool, 1, items, NULL);
        numoe_pool_destroy(pool);
    }
}

Test(pool_create, pinned_caller_gets_its_mask_back, .timeout = 20)
{
    uint32_t cpu[2];
    uint32_t cpus = allowed_cpus(cpu, 2);
    char message[256] = "";
    struct numoe_log log = {keep_message, message};
    struct numoe_pool_worker workers[1] = {{.os_cpu = cpu[cpus - 1]}};
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool_worker_stats stats;
    struct numoe_pool *pool;
    cpu_set_t before, after;
    static const uint32_t items[] = {100};

    cr_assert_eq(sched_getaffinity(0, sizeof before, &before), 0);
    config.worker_count = 1; /* so that the caller always has something to do */
    config.workers = workers;
    config.pin_caller = true;
    config.log = &log;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    run_and_check(pool, 1, items, NULL);
    cr_assert_eq(numoe_pool_stats(pool, 0, &stats), 0);
    cr_assert(stats.pinned && stats.pin_errno == 0);
    cr_assert_eq(sched_getaffinity(0, sizeof after, &after), 0);
    cr_assert(CPU_EQUAL(&before, &after));
    numoe_pool_destroy(pool);

    workers[0].os_cpu = CPU_SETSIZE - 1;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    run_and_check(pool, 1, items, NULL);
    cr_assert_eq(numoe_pool_stats(pool, 0, &stats), 0);
    cr_assert(!stats.pinned && stats.pin_errno == EINVAL);
    cr_assert(strstr(message, "worker 0"), "%s", message);
    cr_assert_eq(sched_getaffinity(0, sizeof after, &after), 0);
    cr_assert(CPU_EQUAL(&before, &after));
    numoe_pool_destroy(pool);
}

/* C1: names fit and are distinct, with four digits too. */
Test(pool_create, thread_names_are_distinct_and_fit, .timeout = 60)
{
    enum { COUNT = 1030 };
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool *pool;
    static bool seen[COUNT];
    uint32_t found = 0;
    struct dirent *entry;
    DIR *tasks;
    int rc;

    config.worker_count = COUNT;
    rc = numoe_pool_create(&config, &pool, &error);
    if (rc == -EAGAIN)
        cr_skip_test("too few threads allowed: %s", error.message);
    cr_assert_eq(rc, 0, "%s", error.message);
    tasks = opendir("/proc/self/task");
    if (!tasks) {
        numoe_pool_destroy(pool);
        cr_skip_test("/proc/self/task cannot be read");
    }
    while ((entry = readdir(tasks))) {
        char path[300], name[64] = "";
        unsigned worker;
        FILE *file;

        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        file = fopen(path, "r");
        if (!file)
            continue;
        if (fgets(name, sizeof name, file) && sscanf(name, "numoe-%u", &worker) == 1) {
            cr_assert_lt(worker, COUNT);
            cr_assert_leq(strlen(name), 16); /* 15 and a newline */
            cr_assert(!seen[worker], "two threads are named %s", name);
            seen[worker] = true;
            found++;
        }
        fclose(file);
    }
    closedir(tasks);
    cr_assert_eq(found, COUNT - 1);
    numoe_pool_destroy(pool);
}

static void note_init(void *user, uint32_t worker)
{
    _Atomic uint32_t *calls = user;
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
    bool right;
    sigset_t mask;

    atomic_fetch_add(&calls[worker], 1);
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    right =
        sigismember(&mask, SIGINT) && sigismember(&mask, SIGUSR1) && sigismember(&mask, SIGALRM);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        right &= !sigismember(&mask, faults[i]); /* the application's handlers are to see them */
    if (right)
        atomic_fetch_add(&calls[worker], 100);
}

Test(pool_create, thread_init_once_a_thread_signals_blocked, .timeout = 20)
{
    _Atomic uint32_t calls[8] = {0};
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool *pool;
    sigset_t before, after;

    config.worker_count = 8;
    config.thread_init = note_init;
    config.thread_init_user = (void *)calls;
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    for (int number = 1; number < NSIG; number++)
        cr_assert_eq(sigismember(&before, number), sigismember(&after, number));
    cr_assert_eq(calls[0], 0);
    for (int w = 1; w < 8; w++)
        cr_assert_eq(calls[w], 101);
    numoe_pool_destroy(pool);
}

/* A thread limit: those started end, the message counts them, and the process goes on. */
static int create_under_limit(void)
{
    struct rlimit limit;
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool *pool = (void *)1;
    unsigned number = 0, of = 0, were = 0;
    rlim_t before;
    int rc;

    /* The limit counts a user's threads and does not hold for root. */
    if (geteuid() == 0 && setresuid(61234, 61234, 61234))
        return 2;
    if (getrlimit(RLIMIT_NPROC, &limit))
        return 2;
    before = limit.rlim_cur;
    limit.rlim_cur = 40;
    if (setrlimit(RLIMIT_NPROC, &limit))
        return 2;
    config.worker_count = 200;
    rc = numoe_pool_create(&config, &pool, &error);
    if (rc == 0)
        return 2; /* not enforced here */
    if (rc != -EAGAIN || pool || error.code != rc)
        return 3;
    if (sscanf(error.message, "thread %u of %u could not be started, %u were", &number, &of,
               &were) != 3)
        return 4;
    if (of != 199 || were + 1 != number || were > 40)
        return 5;
    limit.rlim_cur = before;
    if (setrlimit(RLIMIT_NPROC, &limit))
        return 2;
    config.worker_count = 4;
    if (numoe_pool_create(&config, &pool, &error))
        return 6;
    numoe_pool_destroy(pool);
    return 0;
}

Test(pool_create, a_thread_that_cannot_start_fails_the_call, .timeout = 30)
{
    pid_t child = fork();
    int status;

    cr_assert_geq(child, 0);
    if (child == 0)
        _exit(create_under_limit());
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status));
    if (WEXITSTATUS(status) == 2)
        cr_skip_test("threads cannot be limited here");
    cr_assert_eq(WEXITSTATUS(status), 0, "exit code %d", WEXITSTATUS(status));
}

Test(pool_create, and_destroy_without_a_job, .timeout = 60)
{
    for (int i = 0; i < 500; i++) {
        struct numoe_pool *pool = make(2 + i % 7, 0);
        numoe_pool_destroy(pool);
    }
    for (int i = 0; i < 20; i++) {
        struct numoe_pool *pool = make(64, 0);
        if (i & 1)
            sleep_us(500); /* now and then parked */
        numoe_pool_destroy(pool);
    }
}

/* ------------------------------------------------------------------------------- fork */

Test(pool_fork, the_child_is_refused_and_may_destroy, .timeout = 30)
{
    static const uint32_t items[] = {50};
    struct numoe_pool *pool = make(3, 0);
    int status;
    pid_t child;

    run_and_check(pool, 1, items, NULL);
    child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        _Atomic uint64_t sum = 0;
        struct numoe_pool_job job = {
            .context = &sum, .phase_count = 1, .phases = {{count_item, 9, NULL}}};
        uint64_t ticket;
        struct numoe_pool *fresh;
        struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;

        alarm(10);
        if (numoe_pool_run(pool, &job) != -ECHILD ||
            numoe_pool_submit(pool, &job, &ticket) != -ECHILD ||
            numoe_pool_wait(pool, 8) != -ECHILD || sum)
            _exit(2);
        numoe_pool_destroy(pool);
        config.worker_count = 3;
        if (numoe_pool_create(&config, &fresh, NULL) || numoe_pool_run(fresh, &job) || sum != 36)
            _exit(3);
        numoe_pool_destroy(fresh);
        _exit(0);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d", status);
    run_and_check(pool, 1, items, NULL);
    numoe_pool_destroy(pool);
}

/* The same where the kernel cannot wipe a page on fork. */
Test(pool_fork, the_pid_tells_as_well, .timeout = 30)
{
    struct numoe_pool *pool = make(2, 0);
    _Atomic uint64_t sum = 0;
    struct numoe_pool_job job = {
        .context = &sum, .phase_count = 1, .phases = {{count_item, 9, NULL}}};
    const _Atomic uint32_t *alive = pool->alive;
    int status;
    pid_t child;

    pool->alive = NULL;
    cr_assert_eq(numoe_pool_run(pool, &job), 0);
    child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        alarm(10);
        if (numoe_pool_run(pool, &job) != -ECHILD)
            _exit(2);
        numoe_pool_destroy(pool);
        _exit(0);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d", status);
    pool->alive = alive;
    numoe_pool_destroy(pool);
}
