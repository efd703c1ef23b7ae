/*
 * Calls on the GPU. Ids are rewritten on the host, so that the same entries are computed, skipped
 * and counted as on the CPU.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "gpu_run.h"

static bool room_for_ids(struct numoe_model *model, uint64_t pairs)
{
    uint64_t bytes;
    int32_t *ids;

    if (pairs <= model->gpu_ids_room)
        return true;
    if (!numoe_mul_u64(pairs, sizeof *ids, &bytes))
        return false;
    ids = malloc(bytes);
    if (!ids)
        return false;
    free(model->gpu_ids);
    model->gpu_ids = ids;
    model->gpu_ids_room = pairs;
    return true;
}

enum { ENTRY_SKIPPED = -1, ENTRY_ELSEWHERE = -2, ENTRY_MISSING = -3 };

static void rewrite(const struct numoe_model *model, uint64_t layer,
                    const struct numoe_batch *batch, int32_t *ids)
{
    const uint64_t experts = model->desc.experts;
    const uint8_t *state = model->state + layer * experts;

    for (uint64_t i = 0; i < batch->tokens * batch->top_k; i++) {
        const int64_t id = numoe_batch_id(batch, i);
        if (id < 0 || ((uint64_t)id < experts && (!numoe_model_holds(model, (uint64_t)id) ||
                                                  (batch->elsewhere && batch->elsewhere[id]))))
            ids[i] = ENTRY_ELSEWHERE;
        else if ((uint64_t)id >= experts)
            ids[i] = ENTRY_SKIPPED;
        else if (!(state[id] & EXPERT_PRESENT))
            ids[i] = ENTRY_MISSING;
        else
            ids[i] = (int32_t)id;
    }
}

static void count(struct numoe_schedule *s, const int32_t *ids, uint64_t entries)
{
    for (uint64_t i = 0; i < entries; i++) {
        s->result.skipped += ids[i] == ENTRY_SKIPPED;
        s->result.missing += ids[i] == ENTRY_MISSING;
        if (ids[i] < 0)
            continue;
        s->result.pairs++;
        numoe_schedule_see(s, (uint64_t)ids[i], false);
    }
}

uint64_t numoe_gpu_run(struct numoe_schedule *s)
{
    struct numoe_model *model = s->model;
    const struct numoe_batch *batch = &s->batch;
    struct numoe *context = model->context;
    const uint64_t hidden = model->desc.hidden;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_call call;
    uint64_t done = 0;
    int rc;

    if (!model->gpu || batch->tokens == 0 || numoe_gpu_health(context->gpu, NULL))
        return 0;
    if (!room_for_ids(model, batch->tokens * batch->top_k)) {
        numoe_log_write(&context->log, NUMOE_LOG_WARNING,
                        "the CPU computes %llu tokens: no memory for the GPU's ids",
                        (unsigned long long)batch->tokens);
        return 0;
    }
    rewrite(model, s->layer, batch, model->gpu_ids);
    call = (struct numoe_gpu_call){
        .tokens = batch->tokens,
        .top_k = batch->top_k,
        .x = batch->x,
        .x_type = batch->x_type,
        .x_stride = batch->x_stride ? batch->x_stride : hidden,
        .ids = model->gpu_ids,
        .routing = batch->weights,
        .out = batch->out,
        .out_type = batch->out_type,
        .out_stride = batch->out_stride ? batch->out_stride : hidden,
        .add = batch->add,
        .scale = batch->scale,
    };
    rc = numoe_gpu_forward(model->gpu, s->layer, &call, &done, &error);
    count(s, model->gpu_ids, done * batch->top_k);
    s->result.gpu_tokens = done;
    if (rc && !(numoe_gpu_health(context->gpu, NULL) &&
                atomic_exchange_explicit(&context->gpu_loss_said, true, memory_order_relaxed)))
        numoe_log_write(&context->log, NUMOE_LOG_WARNING, "the CPU goes on instead of the GPU: %s",
                        error.message);
    return done;
}
