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

static void child(const struct topo_source *source, int out)
{
    static const int fatal[] = {SIGSEGV, SIGABRT, SIGBUS,  SIGFPE,
                                SIGILL,  SIGTERM, SIGALRM, SIGXCPU};
    struct answer answer = {.error = NUMOE_ERROR_INIT};
    struct numoe_machine *machine;
    struct rlimit none = {0, 0}, seconds = {CPU_SECONDS, CPU_SECONDS};
    sigset_t all;
    struct stat printed;
    int quiet, told;

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
    told = memfd_create("hwloc", MFD_CLOEXEC);
    if (told >= 0)
        dup2(told, STDERR_FILENO);
    answer.rc = topo_machine_build(source, &machine, &answer.error);
    /* hwloc prints what it finds odd and goes on; it would print again in the caller's process */
    fflush(stderr);
    if (!answer.rc && told >= 0 && fstat(told, &printed) == 0 && printed.st_size > 0)
        answer.rc = numoe_error_set(&answer.error, -EINVAL, source->name,
                                    "damaged topology: hwloc finds that objects contradict each "
                                    "other");
    for (size_t sent = 0; sent < sizeof answer;) {
        ssize_t wrote = write(out, (const char *)&answer + sent, sizeof answer - sent);

        if (wrote <= 0)
            break;
        sent += (size_t)wrote;
    }
    _exit(0);
}

static int64_t now_ms(void)
{
    return (int64_t)(numoe_now_ns() / 1000000);
}

/* Read the child's answer. @return false: it ended, or time ran out, without one */
static bool listen_to(int in, struct answer *answer)
{
    int64_t end = now_ms() + LIMIT_SECONDS * 1000;
    size_t got = 0;

    while (got < sizeof *answer) {
        struct pollfd ready = {.fd = in, .events = POLLIN};
        int64_t left = end - now_ms();
        ssize_t more;

        if (left <= 0)
            return false;
        if (poll(&ready, 1, (int)left) < 0 && errno != EINTR)
            return false;
        if (!ready.revents)
            continue;
        more = read(in, (char *)answer + got, sizeof *answer - got);
        if (more < 0 && errno == EINTR)
            continue;
        if (more <= 0)
            return false;
        got += (size_t)more;
    }
    return true;
}

int topo_source_try(const struct topo_source *source, struct numoe_error *error)
{
    struct answer answer;
    bool answered;
    int ends[2];
    pid_t pid;

    if (pipe2(ends, O_CLOEXEC))
        return numoe_error_set(error, -errno, source->name, "cannot make a pipe: %s",
                               strerror(errno));
    pid = fork();
    if (pid < 0) {
        int rc = -errno;

        close(ends[0]);
        close(ends[1]);
        return numoe_error_set(error, rc, source->name,
                               "cannot start the process that tries the topology: %s",
                               strerror(-rc));
    }
    if (pid == 0)
        child(source, ends[1]);
    close(ends[1]);
    answered = listen_to(ends[0], &answer);
    close(ends[0]);
    if (!answered)
        kill(pid, SIGKILL);
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        ;
    if (!answered)
        return numoe_error_set(error, -EINVAL, source->name,
                               "damaged topology: hwloc crashes or does not come to an end on it");
    if (answer.rc)
        numoe_error_set(error, answer.rc, answer.error.where, "%s", answer.error.message);
    return answer.rc;
}
