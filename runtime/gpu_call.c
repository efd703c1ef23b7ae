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

static int64_t batch_id(const struct numoe_batch *batch, uint64_t at)
{
    return batch->id_bytes == 8 ? ((const int64_t *)batch->ids)[at]
                                : ((const int32_t *)batch->ids)[at];
}

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
        const int64_t id = batch_id(batch, i);
        if (id < 0 || (batch->elsewhere && (uint64_t)id < experts && batch->elsewhere[id]))
            ids[i] = ENTRY_ELSEWHERE;
        else if ((uint64_t)id >= experts)
            ids[i] = ENTRY_SKIPPED;
        else if (!(state[id] & EXPERT_PRESENT))
            ids[i] = ENTRY_MISSING;
        else
            ids[i] = (int32_t)id;
    }
}

static void count(const struct numoe_model *model, const int32_t *ids, uint64_t entries,
                  struct numoe_result *result)
{
    uint64_t hit[65536 / 64] = {0}, experts = 0; /* the GPU takes no more experts than that */

    for (uint64_t i = 0; i < entries; i++) {
        result->skipped += ids[i] == ENTRY_SKIPPED;
        result->missing += ids[i] == ENTRY_MISSING;
        if (ids[i] < 0)
            continue;
        result->pairs++;
        hit[ids[i] / 64] |= (uint64_t)1 << (ids[i] % 64);
    }
    for (size_t i = 0; i < sizeof hit / sizeof hit[0]; i++)
        experts += (uint64_t)__builtin_popcountll(hit[i]);
    result->experts_hit += experts;
    result->expert_bytes += experts * (model->plan->shape.slices * model->shape.bytes +
                                       model->plan->shape.expert_bytes);
}

uint64_t numoe_gpu_run(struct numoe_model *model, uint64_t layer, const struct numoe_batch *batch,
                       struct numoe_result *result)
{
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
    rewrite(model, layer, batch, model->gpu_ids);
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
    rc = numoe_gpu_forward(model->gpu, layer, &call, &done, &error);
    count(model, model->gpu_ids, done * batch->top_k, result);
    result->gpu_tokens = done;
    if (rc && !(numoe_gpu_health(context->gpu, NULL) &&
                atomic_exchange_explicit(&context->gpu_loss_said, true, memory_order_relaxed)))
        numoe_log_write(&context->log, NUMOE_LOG_WARNING, "the CPU goes on instead of the GPU: %s",
                        error.message);
    return done;
}
