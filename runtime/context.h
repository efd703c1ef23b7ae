/*
 * context.h - what struct numoe and struct numoe_model hold. For the executor's own files.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CONTEXT_H
#define NUMOE_CONTEXT_H

#include <pthread.h>
#include <stdatomic.h>

#include "model.h"
#include "numoe_gpu.h"
#include "schedule.h"

/*
 * One call at a time runs in a context. `turn` is held while a call prepares, runs or finishes; a
 * submission releases it between numoe_submit and numoe_wait and leaves `pending` set. Whoever
 * takes the turn next finishes a pending submission first, so nobody waits for a thread that may
 * itself be waiting; its result stays in pending_result for numoe_wait.
 */
struct numoe {
    struct numoe_machine *machine;
    struct numoe_plan *plan; /* workers and nodes, without a model */
    struct numoe_pool *pool;
    struct numoe_gpu *gpu; /* NULL: the CPU computes, and gpu_note says why */
    struct numoe_log log;
    char gpu_note[512];
    char isa[16];
    bool described; /* the plan is of another machine: no binding, no pinning */
    bool strict_memory;
    bool gpu_stream;
    atomic_bool gpu_loss_said; /* that the CPU computes instead of a device that was lost */
    uint64_t keep_free_bytes;
    uint32_t *nodes, *cpus; /* requested OS indices */
    uint32_t node_count, cpu_count, worker_request;

    pthread_mutex_t turn;
    struct numoe_schedule schedule; /* the call that runs or is pending */
    bool pending, finished;         /* finished: pending and done */
    uint64_t pending_ticket, pool_ticket;
    struct numoe_model *pending_model;
    uint64_t pending_since;
    struct numoe_result pending_result;
    uint64_t next_ticket;

    atomic_uint_fast64_t calls, tokens, pairs, skipped, missing, expert_bytes, nanoseconds;
    atomic_uint_fast64_t workspace_bytes, gpu_calls, gpu_tokens;
};

struct model_node {
    struct numoe_memory *memory;
    uint8_t *base;
    uint32_t *start;      /* [layers * experts + 1] first slice of each expert, in slices */
    uint64_t bias_offset; /* bytes to the b2 rows kept on this node */
};

enum { EXPERT_PRESENT = 1, EXPERT_EXTREME = 2 };

struct numoe_model {
    struct numoe *context;
    struct numoe_model_desc desc;
    struct numoe_slice_shape shape;
    const struct numoe_kernels *kernels;
    struct numoe_plan *plan;
    struct model_node *nodes;
    uint8_t *state;       /* [layers * experts] EXPERT_ bits */
    uint32_t *bias_place; /* [layers * experts] index of its b2 row on the node of slice 0 */
    uint32_t *bias_node;  /* [layers * experts] that node */
    char family[64];
    char io_path[64];
    uint64_t checkpoint_bytes;
    double load_seconds;

    struct numoe_gpu_model *gpu; /* NULL: the CPU computes */
    char gpu_note[512];
    atomic_uint *generation; /* [layers], with a GPU: changes with the layer's weights */
    int32_t *gpu_ids;        /* ids of a call as the GPU takes them; guarded by context.turn */
    uint64_t gpu_ids_room;
};

/* A plan for the context's machine and options; shape.layers 0: workers and nodes alone. */
int numoe_context_plan(struct numoe *context, const struct numoe_expert_shape *shape,
                       struct numoe_plan **plan, struct numoe_error *error);

/* Finish and drop a submission of this model. */
void numoe_context_forget(struct numoe_model *model);

#endif
