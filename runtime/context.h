/*
 * context.h - what struct numoe and struct numoe_model hold. For the executor's own files.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CONTEXT_H
#define NUMOE_CONTEXT_H

#include <pthread.h>
#include <stdalign.h>
#include <stdatomic.h>

#include "model.h"
#include "numoe_gpu.h"
#include "schedule.h"
#include "trace.h"

/*
 * One call at a time runs in a context. `turn` is held while a call prepares, runs or finishes; a
 * submission releases it between numoe_submit and numoe_wait and leaves `pending` set. Whoever
 * takes the turn next finishes a pending submission first, so nobody waits for a thread that may
 * itself be waiting; its result stays in pending_result for numoe_wait.
 *
 * Deferred experts: later[later_at] is laid out with the call that defers (later_model set,
 * later_built), its records are made when that call is done, and its lanes run as a submitted job
 * of their own (later_running) while nobody holds the turn. Whoever takes the turn next waits for
 * that job before giving the pool another. The rows stay until the model's next call, which reads
 * them as schedule.late and lays out its own deferred experts in the other of the two.
 */
/* Add to a counter that has one writer at a time. */
static inline void numoe_counter_add(atomic_uint_fast64_t *counter, uint64_t n)
{
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n,
                          memory_order_relaxed);
}

/* What a worker has read, written by it alone. */
struct worker_reads {
    alignas(64) atomic_uint_fast64_t bytes;
    atomic_uint_fast64_t remote_bytes;
};

struct numoe {
    struct numoe_machine *machine;
    struct numoe_plan *plan;  /* workers and nodes, without a model; or the one that was given */
    bool plan_given;          /* the models' plan too */
    struct numoe_plan *as_if; /* or NULL: another machine's, which is the models', and not plan */
    struct numoe_pool *pool;
    struct numoe_gpu *gpu; /* NULL: the CPU computes, and gpu_note says why */
    struct numoe_gpu *more_gpus[NUMOE_GPU_MOST - 1];
    uint32_t more_gpu_count;
    struct numoe_log log;
    char gpu_note[512];
    char isa[16];
    bool timed;     /* workers measure times */
    bool described; /* the plan is of another machine: no binding, no pinning */
    bool strict_memory, memory_spill;
    enum numoe_memory_policy memory_policy;
    bool gpu_stream;
    enum numoe_gpu_sum gpu_sum;
    uint64_t gpu_from_tokens, gpu_cache_bytes;
    char *gpu_profile;         /* or NULL */
    bool batch_invariant;      /* calls are cut by schedule_fixed.c */
    atomic_bool gpu_loss_said; /* that the CPU computes instead of a device that was lost */
    uint64_t keep_free_bytes;
    uint32_t *nodes, *cpus, *reserved_cpus; /* requested OS indices */
    uint32_t node_count, cpu_count, reserved_count, worker_request, lent_threads;
    uint64_t spin_ns;
    enum numoe_form form;
    uint32_t groups;
    enum numoe_objective objective;

    pthread_mutex_t turn;
    struct numoe_schedule schedule; /* the call that runs or is pending */
    bool pending, finished;         /* finished: pending and done */
    uint64_t pending_ticket, pool_ticket;
    struct numoe_model *pending_model;
    uint64_t pending_since;
    struct numoe_result pending_result;
    int pending_rc;                   /* what numoe_wait will say; set with finished */
    atomic_uint_fast64_t next_ticket; /* changed with the turn */

    /* numoe_cancel may not wait for the turn, which a call that waits for the job holds */
    pthread_mutex_t cancel_lock; /* guards these; taken last */
    uint64_t live_ticket;        /* of the submission that the pool has; 0: none */
    uint64_t live_job;           /* its ticket in the pool */
    const struct numoe_model *live_model;

    struct numoe_schedule later[2];
    unsigned later_at;
    struct numoe_model *later_model; /* whose next call gets the rows; NULL: none wait */
    bool later_built, later_running;
    uint64_t later_ticket;

    /* written with the turn */
    atomic_uint_fast64_t calls, tokens, pairs, skipped, missing, expert_bytes, nanoseconds;
    atomic_uint_fast64_t workspace_bytes, gpu_calls, gpu_tokens;

    uint64_t opened_ns;
    struct worker_reads *reads;       /* [threads] */
    atomic_uint_fast64_t *node_bytes; /* [plan->node_count] numoe_node_stats.expert_bytes; written
                                           with the turn */
    struct numoe_trace *trace;        /* or NULL */
    pthread_mutex_t models_lock;
    struct numoe_model *models;       /* all that are complete; guarded by models_lock, ... */
    atomic_uint_fast64_t model_count; /* ... as are changes of this ... */
    struct numoe_gpu_stats gpu_past[NUMOE_GPU_MOST]; /* ... and, of each GPU, what models that have
                                                        left it have counted; nothing else of it */
};

struct model_node {
    struct numoe_memory *memory;
    uint8_t *base;
    uint32_t *start;      /* [layers * experts + 1] first slice of each expert, in slices */
    uint64_t bias_offset; /* bytes to the b2 rows kept on this node */
    struct numoe_memory_report report; /* of the model's inspected_ns */
};

enum { EXPERT_PRESENT = 1, EXPERT_EXTREME = 2 };

/* The groups of plan nodes that work together: group g is nodes[first[g] .. first[g + 1]), and
 * workers[worker_first[g] .. worker_first[g + 1]) take its lanes. */
struct model_groups {
    uint32_t count, *first, *nodes, *worker_first, *workers;
};

struct numoe_model {
    struct numoe *context;
    struct numoe_model_desc desc;
    struct numoe_slice_shape shape;
    const struct numoe_kernels *kernels;
    struct numoe_plan *plan;
    uint32_t *home; /* [plan->node_count] the context's plan node in whose memory a plan node lies;
                       NUMOE_NONE: on all of them, page by page */
    struct model_node *nodes;
    struct numoe_plan_reach reach[NUMOE_REACHES];
    struct model_groups groups[NUMOE_REACHES];
    uint8_t *state;       /* [layers * experts] EXPERT_ bits */
    _Atomic bool *away;   /* [layers] unloaded, and its memory given back; set with the turn held */
    uint64_t *sums;       /* [layers * experts] checksums of what is present; NULL: none are kept */
    uint32_t *bias_place; /* [layers * experts] index of its b2 row on the node of slice 0 */
    uint32_t *bias_node;  /* [layers * experts] that node */
    char family[64];
    char io_path[64];
    struct numoe_model_origin origin; /* but for these two */

    struct numoe_model *next; /* of the context's models; guarded by its models_lock, as is ... */
    uint64_t inspected_ns;    /* ... when pages were looked at for its stats; 0: never */

    struct numoe_gpu_model *gpu; /* NULL: the CPU computes */
    char gpu_note[512];
    atomic_uint *generation; /* [layers], with a GPU: changes with the layer's weights */
    int32_t *gpu_ids;        /* ids of a call as the GPU takes them; guarded by context.turn */
    uint64_t gpu_ids_room;
    struct gpu_run *gpu_run; /* of gpu_call.c, with a GPU; guarded by context.turn */
};

/* The context's own plan: the one that options give, checked against the machine, or one that is
 * made, of nodes and workers alone. */
int numoe_context_make_plan(struct numoe *context, const struct numoe_options *options,
                            struct numoe_error *error);
/* The plan of a model on the context's nodes and workers. */
int numoe_context_plan(struct numoe *context, const struct numoe_expert_shape *shape,
                       const struct numoe_range *range, struct numoe_plan **plan,
                       struct numoe_error *error);
/* What this machine's own plan of a model is, whatever plan was given. Takes the turn. */
int numoe_context_plan_here(struct numoe *context, const struct numoe_expert_shape *shape,
                            const struct numoe_range *range, struct numoe_plan **plan,
                            struct numoe_error *error);
/* Free a model's plan, unless it is the context's. NULL is allowed. */
void numoe_context_drop_plan(const struct numoe *context, struct numoe_plan *plan);

/* Fill model->home. Returns 0, -ENOMEM, or -ENOSPC where another machine's plan does not fit. */
int numoe_model_settle(struct numoe_model *model, const struct numoe_expert_shape *shape,
                       struct numoe_error *error);
/* Of `bytes` on plan node n of the model, those that lie on a node of the context's plan. */
uint64_t numoe_model_bytes_on(const struct numoe_model *model, uint32_t n, uint32_t node,
                              uint64_t bytes);

/* Bytes of a layer's slices in node n's memory, from *offset on. */
uint64_t numoe_model_layer_bytes(const struct numoe_model *model, uint64_t layer, uint32_t n,
                                 uint64_t *offset);
/* In place of a layer. */
#define NUMOE_ALL_LAYERS UINT64_MAX
#define NUMOE_NO_LAYER (UINT64_MAX - 1) /* what lies behind the slices: b2 rows */
/* Make a layer's memory, or all of the model's, or what no layer's slices lie in, resident by the
 * workers of its nodes. watch may be NULL. Returns 0, -ENOMEM, -EOVERFLOW or what the watch said.
 */
int numoe_model_populate(struct numoe_model *model, uint64_t layer, const struct numoe_watch *watch,
                         struct numoe_error *error);

/* Group the model's plan nodes for every reach. Returns 0 or -ENOMEM. */
int numoe_model_group(struct numoe_model *model);
void numoe_model_ungroup(struct numoe_model *model);

int numoe_context_start_pool(struct numoe *context, const struct numoe_options *options,
                             struct numoe_error *error);

/* A complete model joins, and a model leaves, those that numoe_stats_node looks at. */
void numoe_stats_join(struct numoe_model *model);
void numoe_stats_leave(struct numoe_model *model);

/* 0, or -ECHILD in a process forked from the one that opened the context. Before the turn is
 * touched: the fork may have copied it locked. */
int numoe_context_check_fork(const struct numoe *context, struct numoe_error *error);

/* Finish and drop a submission of this model. */
void numoe_context_forget(struct numoe_model *model);

/* Turn held. Finish what runs of a submission and of deferred experts: nothing reads weights then.
 */
void numoe_context_settle(struct numoe *context);

#endif
