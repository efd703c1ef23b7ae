/*
 * gpu_run.h - a model's layers on the context's GPU. For the executor's own files.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_RUN_H
#define NUMOE_GPU_RUN_H

#include "context.h"

/* Pin the model's arenas and reserve device memory, if the context has a GPU. One that is too small
 * is no failure: the CPU computes, and the reason is kept. Returns 0 or -ENOMEM. */
int numoe_gpu_attach(struct numoe_model *model, struct numoe_error *error);
/* Before the arenas are freed. */
void numoe_gpu_detach(struct numoe_model *model);

/* The gpu_ fields of info. */
void numoe_gpu_inform(const struct numoe_model *model, struct numoe_model_info *info);

/* What calls need of memory and of what calls before took; with the model's GPU. 0 or -ENOMEM */
int numoe_gpu_run_make(struct numoe_model *model);
void numoe_gpu_run_free(struct numoe_model *model);
/* For tests: the link and the CPUs are so fast, bytes a second, and nothing is known yet. */
void numoe_gpu_run_guess(struct numoe_model *model, double link_rate, double cpu_read);

/* Turn held, call begun. Compute as many tokens from the first on as the GPU gets done, and count
 * them in the schedule's result: all; or, without a GPU or when it fails, fewer, whose number is
 * returned.
 * Or begin to share the call: 0 is returned, numoe_gpu_sharing is true, and the schedule's batch
 * has the experts that are not the CPUs' as held elsewhere. The workers begin to compute all tokens
 * of it, numoe_gpu_share_queue is called, and when they have done, numoe_gpu_share_end. */
uint64_t numoe_gpu_run(struct numoe_schedule *schedule);
bool numoe_gpu_sharing(const struct numoe_model *model);

/* Queue the GPU's part. Where that fails it shows in numoe_gpu_share_end. */
void numoe_gpu_share_queue(struct numoe_schedule *schedule);

/* The workers' part is done, and took so long. Add what the GPU computed to out. Returns how many
 * tokens are complete: where the GPU failed, the others are given back: the schedule's batch is
 * then that of the GPU's experts alone, to be added to out. */
uint64_t numoe_gpu_share_end(struct numoe_schedule *schedule, uint64_t cpu_ns);
/* The last call, if it was shared: hit experts of each side, and what each took while the other was
 * working; else zeros. */
struct gpu_shared {
    uint64_t gpu_experts, cpu_experts;
    double gpu_ms, cpu_ms;
};
void numoe_gpu_shared(const struct numoe_model *model, struct gpu_shared *shared);

/* Instead: the workers could not do their part. */
void numoe_gpu_share_cancel(struct numoe_schedule *schedule);

#endif
