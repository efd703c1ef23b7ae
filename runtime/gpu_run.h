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

/* Turn held, call begun. Compute as many tokens from the first on as the GPU gets done, and count
 * them in the schedule's result: all; or, without a GPU or when it fails, fewer, whose number is
 * returned. */
uint64_t numoe_gpu_run(struct numoe_schedule *schedule);

#endif
