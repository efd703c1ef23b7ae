/*
 * Interpret a described machine in a child process.
 *
 * hwloc's readers can abort, crash, loop or allocate without bound on damaged input. The child
 * takes that instead of the caller's process: it has a limit of memory and of time, no output, and
 * answers through a pipe. The answer, not the exit status, counts: the caller may have told the
 * kernel to reap children by itself. It is the machine as text, and read like any that was saved,
 * so that nothing that hwloc made of the input gets into the caller's process unchecked.
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
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Of processor time; and until the caller gives up, on however busy a machine. */
enum { CPU_SECONDS = 20, LIMIT_SECONDS = 40 };
/* Ten times what the largest machine takes; and of an answer, which the parent makes room for. */
enum { EXTRA_MIB = 512, MOST_TEXT = 64 << 20 };

struct answer {
    int rc;
    size_t bytes; /* of the text that follows when rc is 0 */
    struct numoe_error error;
};

struct child {
    pid_t pid;
    int in;      /* reads what the child writes */
    int64_t end; /* when the caller gives up, in ms */
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
    limit.rlim_cur = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + ((rlim_t)EXTRA_MIB << 20);
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

static void send(int out, const void *from, size_t bytes)
{
    for (size_t sent = 0; sent < bytes;) {
        ssize_t wrote = write(out, (const char *)from + sent, bytes - sent);

        if (wrote <= 0)
            break;
        sent += (size_t)wrote;
    }
}

/* hwloc prints what it finds odd and goes on. Of a description that is damage; a real system that
 * was captured may well have odd firmware. */
static int interpret(const struct topo_source *source, struct numoe_machine **machine,
                     struct numoe_error *error)
{
    struct stat printed;
    int told = memfd_create("hwloc", MFD_CLOEXEC), rc;

    if (told >= 0)
        dup2(told, STDERR_FILENO);
    if (source->kind == TOPO_CAPTURE && !topo_capture_enter(source->name))
        return numoe_error_set(error, -ENOMEM, source->name, "out of memory");
    rc = topo_machine_build(source, machine, error);
    fflush(stderr);
    if (!rc && source->kind != TOPO_CAPTURE && told >= 0 && fstat(told, &printed) == 0 &&
        printed.st_size > 0)
        rc = numoe_error_set(error, -EINVAL, source->name,
                             "damaged topology: hwloc finds that objects contradict each other");
    return rc;
}

static void work(const struct topo_source *source, int out)
{
    struct answer answer = {.error = NUMOE_ERROR_INIT};
    struct numoe_machine *machine = NULL;
    char *text = NULL;

    answer.rc = interpret(source, &machine, &answer.error);
    if (!answer.rc) {
        text = topo_saved_text(machine);
        if (!text)
            answer.rc = -ENOMEM;
        else
            answer.bytes = strlen(text);
    }
    send(out, &answer, sizeof answer);
    if (!answer.rc)
        send(out, text, answer.bytes);
}

static int64_t now_ms(void)
{
    return (int64_t)(numoe_now_ns() / 1000000);
}

static int start(const struct topo_source *source, struct child *child, struct numoe_error *error)
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

/* @return false: it ended, or time ran out, before so many bytes */
static bool receive(struct child *child, void *to, size_t bytes)
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

/* Reap it, by force if it has not answered. */
static void end(struct child *child, bool answered)
{
    close(child->in);
    if (!answered)
        kill(child->pid, SIGKILL);
    while (waitpid(child->pid, NULL, 0) < 0 && errno == EINTR)
        ;
}

/* The machine of an answer. */
static int read_answer(const struct topo_source *source, char *text, size_t bytes,
                       struct numoe_machine **machine, struct numoe_error *error)
{
    const struct topo_source answer = {
        .kind = TOPO_SAVED, .name = source->name, .text = text, .bytes = bytes + 1};
    struct numoe_error inner = NUMOE_ERROR_INIT;
    int rc;

    text[bytes] = 0;
    rc = topo_saved_read(&answer, machine, &inner);
    if (rc)
        return numoe_error_set(error, rc, source->name, "what hwloc made of it is no machine: %s",
                               inner.message);
    /* to the caller it was never saved */
    free((*machine)->saved_source);
    (*machine)->saved_source = NULL;
    return 0;
}

int topo_machine_try(const struct topo_source *source, struct numoe_machine **machine,
                     struct numoe_error *error)
{
    struct answer answer = {.rc = 0};
    struct child child = {.in = -1};
    char *text = NULL;
    bool answered;
    int rc = start(source, &child, error);

    if (rc)
        return rc;
    answered = receive(&child, &answer, sizeof answer);
    if (answered && !answer.rc && answer.bytes <= MOST_TEXT) {
        text = malloc(answer.bytes + 1);
        answered = !text || receive(&child, text, answer.bytes);
    }
    end(&child, answered);
    if (!answered)
        rc = numoe_error_set(error, -EINVAL, source->name,
                             "damaged topology: hwloc crashes or does not come to an end on it");
    else if (answer.rc == -ENOMEM)
        rc = numoe_error_set(error, -E2BIG, source->name,
                             "takes more than %d MiB of memory to interpret", EXTRA_MIB);
    else if (answer.rc)
        rc = numoe_error_set(error, answer.rc, answer.error.where, "%s", answer.error.message);
    else if (answer.bytes > MOST_TEXT)
        rc = numoe_error_set(error, -E2BIG, source->name, "%zu bytes are too many for a machine",
                             answer.bytes);
    else if (!text)
        rc = numoe_error_set(error, -ENOMEM, source->name, "out of memory");
    else
        rc = read_answer(source, text, answer.bytes, machine, error);
    free(text);
    return rc;
}
