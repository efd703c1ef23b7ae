/* NCCL through dlopen. SPDX-License-Identifier: Apache-2.0 */
#include "gpu_nccl.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Values of NCCL's binary interface. */
enum { RESULT_SUCCESS = 0, RESULT_IN_PROGRESS = 7, TYPE_FLOAT32 = 7, OP_SUM = 0 };

static const char *library_name(void)
{
    const char *name = getenv("NUMOE_NCCL");

    return name && *name ? name : "libnccl.so.2";
}

static int failed(const struct gpu_nccl *n, int result, struct numoe_error *error, const char *what)
{
    return numoe_error_set(error, -EIO, "NCCL", "%s failed: %s", what,
                           n->calls.get_error_string(result));
}

static int load(struct gpu_nccl *n, struct numoe_error *error)
{
    struct gpu_nccl_calls *c = &n->calls;
    const struct {
        void *to;
        const char *name;
    } wanted[] = {
        {&c->get_version, "ncclGetVersion"},
        {&c->get_error_string, "ncclGetErrorString"},
        {&c->comm_init_all, "ncclCommInitAll"},
        {&c->comm_destroy, "ncclCommDestroy"},
        {&c->comm_abort, "ncclCommAbort"},
        {&c->comm_get_async_error, "ncclCommGetAsyncError"},
        {&c->group_start, "ncclGroupStart"},
        {&c->group_end, "ncclGroupEnd"},
        {&c->reduce, "ncclReduce"},
        {&c->reduce_scatter, "ncclReduceScatter"},
    };

    n->library = dlopen(library_name(), RTLD_NOW | RTLD_LOCAL);
    if (!n->library)
        return numoe_error_set(error, -ENOENT, "NCCL", "it does not open: %s", dlerror());
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        void *found = dlsym(n->library, wanted[i].name);

        if (!found)
            return numoe_error_set(error, -ENOENT, "NCCL", "%s has no %s", library_name(),
                                   wanted[i].name);
        memcpy(wanted[i].to, &found, sizeof found); /* ISO C casts no object to a function */
    }
    return 0;
}

int gpu_nccl_make(struct gpu_nccl *n, const uint32_t *devices, uint32_t count,
                  struct numoe_error *error)
{
    int list[NUMOE_GPU_MOST], result, rc;

    *n = (struct gpu_nccl){0};
    for (uint32_t i = 0; i < count; i++) {
        list[i] = (int)devices[i];
        for (uint32_t k = 0; k < i; k++)
            if (list[k] == list[i])
                return numoe_error_set(error, -EINVAL, "NCCL",
                                       "it takes no GPU twice, and GPU %d is there twice", list[i]);
    }
    rc = load(n, error);
    if (rc)
        return rc;
    result = n->calls.get_version(&n->version);
    if (result)
        return failed(n, result, error, "asking for its version");
    result = n->calls.comm_init_all(n->comms, (int)count, list);
    if (result)
        return failed(n, result, error, "making a communicator");
    n->count = count;
    return 0;
}

int gpu_nccl_sum(struct gpu_nccl *n, const float *const *from, float *const *to,
                 const uint64_t *counts, void *const *streams, struct numoe_error *error)
{
    const struct gpu_nccl_calls *c = &n->calls;
    uint64_t begin = 0;
    bool even = true;
    int ended, result = c->group_start();

    if (result)
        return failed(n, result, error, "beginning a group");
    for (uint32_t i = 1; i < n->count; i++)
        even = even && counts[i] == counts[0];
    for (uint32_t i = 0; even && !result && i < n->count; i++)
        result = c->reduce_scatter(from[i], to[i], counts[0], TYPE_FLOAT32, OP_SUM, n->comms[i],
                                   streams[i]);
    for (uint32_t root = 0; !even && !result && root < n->count; begin += counts[root++])
        for (uint32_t i = 0; counts[root] && !result && i < n->count; i++)
            result = c->reduce(from[i] + begin, to[root], counts[root], TYPE_FLOAT32, OP_SUM,
                               (int)root, n->comms[i], streams[i]);
    ended = c->group_end();
    result = result ? result : ended;
    return result ? failed(n, result, error, "summing") : 0;
}

int gpu_nccl_health(const struct gpu_nccl *n, struct numoe_error *error)
{
    for (uint32_t i = 0; i < n->count; i++) {
        int state = RESULT_SUCCESS;
        const int result = n->calls.comm_get_async_error(n->comms[i], &state);

        if (result)
            return failed(n, result, error, "asking for errors");
        if (state != RESULT_SUCCESS && state != RESULT_IN_PROGRESS)
            return failed(n, state, error, "summing");
    }
    return 0;
}

void gpu_nccl_abort(struct gpu_nccl *n)
{
    for (uint32_t i = 0; i < n->count; i++)
        n->calls.comm_abort(n->comms[i]);
    n->count = 0;
}

void gpu_nccl_fini(struct gpu_nccl *n)
{
    for (uint32_t i = 0; i < n->count; i++)
        n->calls.comm_destroy(n->comms[i]);
    n->count = 0;
}
