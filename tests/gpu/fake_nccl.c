/* The library that fake_nccl.h speaks of: those functions of NCCL that are used. */
#include "fake_nccl.h"

#include <stdlib.h>
#include <string.h>

enum { RANKS = 16, GROUP = 256, INTERNAL_ERROR = 3, INVALID_USAGE = 5, SCATTER = -1 };

struct clique;

struct comm {
    struct clique *clique;
    uint32_t rank;
};

struct clique {
    struct comm comms[RANKS];
    uint32_t count;
    bool aborted;
    struct clique *next;
};

/* One operation of all ranks. */
struct collective {
    struct clique *clique;
    const float *from[RANKS];
    float *to[RANKS];
    void *streams[RANKS];
    bool there[RANKS], arrived[RANKS], done;
    size_t count;
    int root; /* or SCATTER */
    struct collective *next;
    struct rank_of {
        struct collective *of;
        uint32_t rank;
    } ranks[RANKS];
};

struct fake_nccl fake_nccl = {.fail_at = UINT64_MAX};

static struct clique *cliques;
static struct collective *all; /* ever made: what is queued on a lost device is never taken */
static struct collective *group[GROUP];
static uint32_t group_count;
static bool in_group;

static bool fails(void)
{
    const bool now = fake_nccl.calls++ == fake_nccl.fail_at;

    if (now && fake_nccl.failed)
        fake_nccl.failed();
    return now;
}

int ncclGetVersion(int *version)
{
    *version = 22809;
    return fails() ? INTERNAL_ERROR : 0;
}

const char *ncclGetErrorString(int result)
{
    return result == INVALID_USAGE ? "invalid usage" : "internal error";
}

int ncclCommInitAll(void **comms, int count, const int *devices)
{
    struct clique *c;

    if (fails())
        return INTERNAL_ERROR;
    for (int i = 0; i < count; i++)
        for (int k = 0; k < i; k++)
            if (devices[i] == devices[k])
                return INVALID_USAGE;
    c = calloc(1, sizeof *c);
    c->count = (uint32_t)count;
    c->next = cliques;
    cliques = c;
    for (int i = 0; i < count; i++) {
        c->comms[i] = (struct comm){c, (uint32_t)i};
        comms[i] = &c->comms[i];
    }
    fake_nccl.made += (uint32_t)count;
    return 0;
}

int ncclCommDestroy(void *comm)
{
    (void)comm;
    fake_nccl.destroyed++;
    return 0;
}

int ncclCommAbort(void *comm)
{
    ((struct comm *)comm)->clique->aborted = true;
    fake_nccl.aborted++;
    return 0;
}

int ncclCommGetAsyncError(void *comm, int *result)
{
    (void)comm;
    *result = fake_nccl.async_error;
    return fails() ? INTERNAL_ERROR : 0;
}

int ncclGroupStart(void)
{
    if (fails())
        return INTERNAL_ERROR;
    in_group = true;
    fake_nccl.groups++;
    group_count = 0;
    return 0;
}

static void compute(struct collective *c)
{
    const uint32_t n = c->clique->count;

    for (uint32_t r = 0; r < n; r++) {
        const size_t begin = c->root == SCATTER ? r * c->count : 0;
        if (c->root != SCATTER && c->root != (int)r)
            continue;
        for (size_t i = 0; i < c->count; i++) {
            float sum = c->from[n - 1][begin + i];
            for (uint32_t k = n - 1; k-- > 0;)
                sum += c->from[k][begin + i];
            c->to[r][i] = sum;
        }
    }
    c->done = true;
    fake_nccl.sums++;
}

/* A rank's kernel: through when all ranks' have begun. */
static bool run(void *argument)
{
    const struct rank_of *rank = argument;
    struct collective *c = rank->of;
    bool all_there = true;

    c->arrived[rank->rank] = true;
    if (c->clique->aborted)
        return true;
    for (uint32_t i = 0; i < c->clique->count; i++)
        all_there = all_there && c->arrived[i];
    if (all_there && !c->done)
        compute(c);
    return c->done;
}

int ncclGroupEnd(void)
{
    const bool fail = fails();

    in_group = false;
    fake_nccl.groups--;
    for (uint32_t g = 0; g < group_count; g++)
        for (uint32_t r = 0; r < group[g]->clique->count; r++)
            if (group[g]->there[r] && (!fail || (fake_nccl.torn && r == 0)))
                fake_nccl.queue(group[g]->streams[r], run, &group[g]->ranks[r]);
    return fail ? INTERNAL_ERROR : 0;
}

/* The group's first operation that the rank has no part in yet. */
static int add(const void *from, void *to, size_t count, int type, int op, int root, void *comm,
               void *stream)
{
    const struct comm *of = comm;
    struct collective *c = NULL;
    uint32_t g = 0;

    if (fails())
        return INTERNAL_ERROR;
    if (!in_group || type != 7 || op != 0 || of->clique->aborted)
        return INVALID_USAGE;
    while (g < group_count && group[g]->there[of->rank])
        g++;
    if (g == group_count) {
        if (group_count == GROUP)
            abort();
        c = calloc(1, sizeof *c);
        c->clique = of->clique;
        c->count = count;
        c->root = root;
        c->next = all;
        all = group[group_count++] = c;
    }
    c = group[g];
    if (c->count != count || c->root != root || c->clique != of->clique)
        return INVALID_USAGE;
    c->there[of->rank] = true;
    c->from[of->rank] = from;
    c->to[of->rank] = to;
    c->streams[of->rank] = stream;
    c->ranks[of->rank] = (struct rank_of){c, of->rank};
    return 0;
}

int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, void *comm,
               void *stream)
{
    return add(from, to, count, type, op, root, comm, stream);
}

int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, void *comm,
                      void *stream)
{
    return add(from, to, count, type, op, SCATTER, comm, stream);
}
