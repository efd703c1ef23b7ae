/*
 * Interpret a described topology in a child process first.
 *
 * hwloc's readers can abort, crash, loop or allocate without bound on damaged input. The child
 * takes that instead of the caller's process: it has a limit of memory and of time, no output, and
 * answers through a pipe. The answer, not the exit status, counts: the caller may have told the
 * kernel to reap children by itself.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "topo_load.h"

#include "base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Of processor time; and until the caller gives up, on however busy a machine. */
enum { CPU_SECONDS = 20, LIMIT_SECONDS = 40 };
static const rlim_t extra_bytes = (rlim_t)2 << 30;

struct answer {
    int rc;
    struct numoe_error error;
};

/* Bound the address space to what is mapped now and some more. */
static void limit_memory(void)
{
    unsigned long pages;
    struct rlimit limit;
    FILE *file = fopen("/proc/self/statm", "re");
    int read = file ? fscanf(file, "%lu", &pages) : 0;

    if (file)
        fclose(file);
    if (read != 1 || getrlimit(RLIMIT_AS, &limit))
        return;
    limit.rlim_cur = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + extra_bytes;
    if (limit.rlim_max != RLIM_INFINITY && limit.rlim_cur > limit.rlim_max)
        limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_AS, &limit);
}

static void confine(void)
{
    static const int fatal[] = {SIGSEGV, SIGABRT, SIGBUS,  SIGFPE,
                                SIGILL,  SIGTERM, SIGALRM, SIGXCPU};
    struct rlimit none = {0, 0}, seconds = {CPU_SECONDS, CPU_SECONDS};
    sigset_t all;
    int quiet;

    /* the caller's handlers must not see the child's end, and it leaves no core file */
    for (size_t i = 0; i < sizeof fatal / sizeof fatal[0]; i++)
        signal(fatal[i], SIG_DFL);
    sigfillset(&all);
    sigprocmask(SIG_UNBLOCK, &all, NULL);
    setrlimit(RLIMIT_CORE, &none);
    setrlimit(RLIMIT_CPU, &seconds);
    limit_memory();
    alarm(LIMIT_SECONDS);
    quiet = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (quiet >= 0) {
        dup2(quiet, STDOUT_FILENO);
        dup2(quiet, STDERR_FILENO);
    }
}

void topo_child_write(int out, const void *from, size_t bytes)
{
    for (size_t sent = 0; sent < bytes;) {
        ssize_t wrote = write(out, (const char *)from + sent, bytes - sent);

        if (wrote <= 0)
            break;
        sent += (size_t)wrote;
    }
}

static void try_source(const struct topo_source *source, int out)
{
    struct answer answer = {.error = NUMOE_ERROR_INIT};
    struct numoe_machine *machine;
    struct stat printed;
    int told = memfd_create("hwloc", MFD_CLOEXEC);

    if (told >= 0)
        dup2(told, STDERR_FILENO);
    answer.rc = topo_machine_build(source, &machine, &answer.error);
    /* hwloc prints what it finds odd and goes on; it would print again in the caller's process */
    fflush(stderr);
    if (!answer.rc && told >= 0 && fstat(told, &printed) == 0 && printed.st_size > 0)
        answer.rc = numoe_error_set(&answer.error, -EINVAL, source->name,
                                    "damaged topology: hwloc finds that objects contradict each "
                                    "other");
    topo_child_write(out, &answer, sizeof answer);
}

static int64_t now_ms(void)
{
    return (int64_t)(numoe_now_ns() / 1000000);
}

int topo_child_start(topo_child_work *work, const struct topo_source *source,
                     struct topo_child *child, struct numoe_error *error)
{
    int ends[2];

    if (pipe2(ends, O_CLOEXEC))
        return numoe_error_set(error, -errno, source->name, "cannot make a pipe: %s",
                               strerror(errno));
    child->pid = fork();
    if (child->pid < 0) {
        int rc = -errno;

        close(ends[0]);
        close(ends[1]);
        return numoe_error_set(error, rc, source->name,
                               "cannot start the process that tries the topology: %s",
                               strerror(-rc));
    }
    if (child->pid == 0) {
        confine();
        work(source, ends[1]);
        _exit(0);
    }
    close(ends[1]);
    child->in = ends[0];
    child->end = now_ms() + LIMIT_SECONDS * 1000;
    return 0;
}

bool topo_child_read(struct topo_child *child, void *to, size_t bytes)
{
    size_t got = 0;

    while (got < bytes) {
        struct pollfd ready = {.fd = child->in, .events = POLLIN};
        int64_t left = child->end - now_ms();
        ssize_t more;

        if (left <= 0)
            return false;
        if (poll(&ready, 1, (int)left) < 0 && errno != EINTR)
            return false;
        if (!ready.revents)
            continue;
        more = read(child->in, (char *)to + got, bytes - got);
        if (more < 0 && errno == EINTR)
            continue;
        if (more <= 0)
            return false;
        got += (size_t)more;
    }
    return true;
}

void topo_child_end(struct topo_child *child, bool answered)
{
    close(child->in);
    if (!answered)
        kill(child->pid, SIGKILL);
    while (waitpid(child->pid, NULL, 0) < 0 && errno == EINTR)
        ;
}

int topo_source_try(const struct topo_source *source, struct numoe_error *error)
{
    struct topo_child child;
    struct answer answer;
    bool answered;
    int rc = topo_child_start(try_source, source, &child, error);

    if (rc)
        return rc;
    answered = topo_child_read(&child, &answer, sizeof answer);
    topo_child_end(&child, answered);
    if (!answered)
        return numoe_error_set(error, -EINVAL, source->name,
                               "damaged topology: hwloc crashes or does not come to an end on it");
    if (answer.rc)
        numoe_error_set(error, answer.rc, answer.error.where, "%s", answer.error.message);
    return answer.rc;
}
