/*
 * soak_walk.h - what the parts of the soak share.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_SOAK_WALK_H
#define NUMOE_SOAK_WALK_H

#include "model.h"
#include "soak.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>

/* ---- random numbers ------------------------------------------------------------------------- */

struct soak_random {
    uint64_t state;
};

/* Another, independent number: of a cycle, a step, a thread. */
uint64_t soak_mix(uint64_t seed, uint64_t salt);
uint64_t soak_next(struct soak_random *random);
/* 0 .. count - 1 */
uint64_t soak_below(struct soak_random *random, uint64_t count);
/* first .. last */
uint64_t soak_between(struct soak_random *random, uint64_t first, uint64_t last);
/* True once in `in` times. */
bool soak_once(struct soak_random *random, uint64_t in);
/* [0, 1) */
double soak_unit(struct soak_random *random);
float soak_normal(struct soak_random *random);

float soak_from_bf16(uint16_t bits);
uint16_t soak_to_bf16(float value);

/* ---- the walk ------------------------------------------------------------------------------- */

enum {
    SOAK_CONTEXTS = 3,
    SOAK_MODELS = 3,
    SOAK_ISAS = 8,
    SOAK_CALLERS = 4,
    SOAK_CPU_SETS = 8,
    SOAK_NODES = 128
};

/* What a failed check returns: not a number that the library uses. */
#define SOAK_WRONG (-EBADE)

struct soak {
    struct numoe_soak_options options;
    struct soak_context *contexts[SOAK_CONTEXTS];
    uint32_t context_count;
    const char *isas[SOAK_ISAS]; /* the best first */
    uint32_t isa_count;
    uint32_t
        nodes[SOAK_NODES]; /* OS indices of this machine's memory nodes, or the first of them */
    uint32_t node_count;
    char *scratch;                 /* the walk's own folder */
    uint64_t folders;              /* made in it so far */
    bool warming;                  /* before the first step */
    cpu_set_t cpus[SOAK_CPU_SETS]; /* where this thread may run, but for the time of a call */
    bool by_history;               /* the failure is of the walk as a whole, not of this cycle */

    /* Shared with callers and the watchdog: written with lock held. */
    pthread_mutex_t lock;
    uint64_t cycle_seed; /* of the cycle that runs */
    uint64_t cycle_step; /* in it, from 1; 0: none yet */
    struct numoe_soak_report report;
    struct numoe_error error; /* the first failure */
    char doing[256];

    atomic_uint_fast64_t beats; /* progress of any kind */
    pthread_t watchdog;
    pthread_cond_t watchdog_over;
    bool watchdog_running, watchdog_stop;
};

/* Record a failure (the first counts) and return code. Any thread. */
int soak_fail(struct soak *soak, int code, const char *format, ...) NUMOE_PRINTF(3, 4);
/* The same for a library call that should have worked: what was called, and why it failed. */
int soak_fail_call(struct soak *soak, const char *call, int code, const struct numoe_error *error);
/* Say what begins now, for the watchdog. The walk's own thread. */
void soak_doing(struct soak *soak, const char *format, ...) NUMOE_PRINTF(2, 3);
/* Progress. Any thread. */
void soak_beat(struct soak *soak);

int soak_watchdog_start(struct soak *soak);
void soak_watchdog_stop(struct soak *soak);
/* The line that does it again. */
void soak_reproduce(const struct soak *soak, char *line, size_t size);

void soak_usage_read(struct numoe_soak_usage *usage);
/* Read it as it should be now: waits some seconds for what ends a little later. Returns 0 or
 * SOAK_WRONG with the failure recorded. */
int soak_usage_check(struct soak *soak);

/* ---- experts -------------------------------------------------------------------------------- */

/* The source of an expert: bytes in checkpoint order that never pass through the library. */
struct soak_expert {
    uint64_t hidden, intermediate;
    bool present; /* loaded; else the library calls it missing */
    uint8_t *bytes;
    float *floats;
    struct numoe_mxfp4 matrices[3]; /* gate, up, down */
    const float *bias[3];           /* or NULL */
    uint64_t bias_step;             /* of gate and up */
};

/* Random weights in one of the ways that they lie in files. Returns 0 or -ENOMEM. */
int soak_expert_make(struct soak_expert *expert, const struct numoe_model_desc *desc,
                     struct soak_random *random);
void soak_expert_free(struct soak_expert *expert);
void soak_expert_weights(const struct soak_expert *expert, struct numoe_expert_weights *weights);
/* Code and scale byte of one weight. */
void soak_expert_code(const struct soak_expert *expert, unsigned matrix, uint64_t row,
                      uint64_t column, unsigned *code, unsigned *scale);

/*
 * want[i] += factor * expert(x)[i] in double precision; variance[i] += the square of the error that
 * the arithmetic may be expected to make there (soak_expert.c says how). Returns 0 or -ENOMEM.
 */
int soak_expert_apply(const struct soak_expert *expert, const struct numoe_activation *activation,
                      enum numoe_arithmetic arithmetic, const float *x, double factor, double *want,
                      double *variance);

/* ---- contexts and models -------------------------------------------------------------------- */

struct soak_model {
    struct soak_context *context;
    struct numoe_model *model;
    struct numoe_model_desc desc;
    struct soak_expert *experts; /* [layers * experts] */
    char *folder;                /* of its checkpoint, or NULL */
    bool changed;                /* some expert is no longer as it is there */
};

struct soak_context {
    struct numoe *numoe;
    const char *topology, *isa;
    uint32_t workers, threads;
    const uint32_t *nodes; /* half of this machine's; NULL: all */
    uint32_t node_count;
    uint64_t chaos_seed, spin_ns;
    bool pin_caller, gpu, gpu_stream, stats;
    enum numoe_form form;
    uint32_t groups;
    uint32_t trace_events;
    struct soak_model *models[SOAK_MODELS];
    uint32_t model_count;
    /* What numoe_stats_get must say in the end. */
    atomic_uint_fast64_t calls, tokens, pairs, skipped, missing;
};

/* Open a context with random options, or like another one but for threads and stealing. */
int soak_context_open(struct soak *soak, struct soak_random *random,
                      const struct soak_context *like, struct soak_context **context);
/* Destroys its models, compares its counters. context NULL: nothing. */
int soak_context_close(struct soak *soak, struct soak_context *context);

/* A description of a random shape. */
void soak_desc_make(struct soak_random *random, struct numoe_model_desc *desc);
/* Make a model of desc with random experts, some of them missing, and load them. */
int soak_model_create(struct soak *soak, struct soak_random *random, struct soak_context *context,
                      const struct numoe_model_desc *desc, struct soak_model **model);
/* Write a checkpoint and load it. */
int soak_model_load(struct soak *soak, struct soak_random *random, struct soak_context *context,
                    struct soak_model **model);
/* The same experts again in another context; the source stays the original's. */
int soak_model_copy(struct soak *soak, struct soak_random *random, const struct soak_model *from,
                    struct soak_context *context, struct numoe_model **model);
/* Destroys the model with its sources. NULL is allowed. */
void soak_model_free(struct soak_model *model);
/* Give a missing or present expert other weights, or take it away by a NaN. */
int soak_model_replace(struct soak *soak, struct soak_random *random, struct soak_model *model);
/* Compare random weights of an expert, as they are stored, with its source; and the library's
 * float64 reference on what is stored with what the source computes. */
int soak_model_inspect(struct soak *soak, struct soak_random *random,
                       const struct soak_model *model, uint64_t layer, uint64_t expert);

/* Write a small checkpoint into a new folder. *folder is to be removed with soak_folder_drop. */
int soak_folder_make(struct soak *soak, struct soak_random *random, char **folder);
/* Remove the folder and its files; frees the name. NULL is allowed. */
void soak_folder_drop(char *folder);

/* ---- batches -------------------------------------------------------------------------------- */

struct soak_batch {
    struct soak_model *model;
    uint64_t layer;
    struct numoe_batch call;
    void *x, *ids;
    float *weights;
    uint8_t *elsewhere;
    uint8_t *memory, *base; /* outputs with guards around, and what stood there before */
    size_t memory_bytes;
    uint64_t nan_token; /* whose input holds a NaN; UINT64_MAX: none */
    uint64_t *checked;
    uint32_t checked_count;
    struct numoe_result want, have; /* what a call must report, and what the last one did */
    uint64_t kept_gpu_tokens;       /* of the outputs that were kept */
};

/* A random batch for a layer of the model. */
int soak_batch_make(struct soak *soak, struct soak_random *random, struct soak_model *model,
                    struct soak_batch *batch);
void soak_batch_free(struct soak_batch *batch);
/* Put the outputs back to what they were before the call. */
void soak_batch_reset(struct soak_batch *batch);
/* numoe_forward on the batch's model, or on a copy of it in another context. Any thread. */
int soak_batch_forward(struct soak *soak, struct soak_context *context, struct numoe_model *model,
                       struct soak_batch *batch);
/* Count a call that was computed, and tell the hook of a test. Any thread. */
void soak_batch_computed(struct soak *soak, struct soak_context *context, struct soak_batch *batch);
/* Counts, guards, and some tokens against the reference. Any thread. */
int soak_batch_check(struct soak *soak, struct soak_batch *batch);
/* A copy of the outputs with their guards, or NULL with the failure recorded. */
uint8_t *soak_batch_keep(struct soak *soak, struct soak_batch *batch);
/* Whether the outputs are the same bits as those kept, if the same device computed them. */
int soak_batch_compare(struct soak *soak, const struct soak_batch *batch, const uint8_t *kept,
                       const char *otherwise);

/* ---- steps ---------------------------------------------------------------------------------- */

int soak_step_forward(struct soak *soak, struct soak_random *random, struct soak_model *model);
int soak_step_submit(struct soak *soak, struct soak_random *random, struct soak_model *model);
int soak_step_callers(struct soak *soak, struct soak_random *random);
int soak_step_twin(struct soak *soak, struct soak_random *random, struct soak_model *model);
int soak_step_pool(struct soak *soak, struct soak_random *random);
int soak_step_refused(struct soak *soak, struct soak_random *random, struct soak_model *model);

#endif
