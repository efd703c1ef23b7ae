/*
 * Checksums of experts in memory: of an expert's slices in order, wherever they lie, then its b2.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "context.h"

#include <errno.h>
#include <stdlib.h>
#include <xxhash.h>

static bool present(const struct numoe_model *model, uint64_t q)
{
    return model->state[q] & EXPERT_PRESENT;
}

/* The seed of a slice's hash is that of the slice before: runs may be cut anywhere. */
static uint64_t sum_of(const struct numoe_model *model, uint64_t layer, uint64_t expert)
{
    const float *bias = numoe_model_down_bias(model, layer, expert);
    uint64_t sum = 0;

    for (uint32_t n = 0; n < model->plan->node_count; n++) {
        uint64_t first, count;
        const uint8_t *slice = numoe_model_run(model, layer, expert, n, &first, &count);

        for (; count; count--, slice += model->shape.bytes)
            sum = XXH3_64bits_withSeed(slice, model->shape.bytes, sum);
    }
    if (bias)
        sum =
            XXH3_64bits_withSeed(bias, model->shape.hidden_tiles * NUMOE_TILE * sizeof *bias, sum);
    return sum;
}

int numoe_expert_checksum(const struct numoe_model *model, uint64_t layer, uint64_t expert,
                          uint64_t *sum)
{
    if (!model || !sum || layer >= model->desc.layers || expert >= model->desc.experts)
        return -EINVAL;
    if (!present(model, layer * model->desc.experts + expert))
        return -ENOENT;
    *sum = sum_of(model, layer, expert);
    return 0;
}

/* An item an expert. */
struct summing {
    const struct numoe_model *model;
    uint64_t *sums; /* of those that are present */
    const struct numoe_watch *watch;
    uint64_t expert_bytes, total;
    atomic_uint_fast64_t done; /* bytes */
    atomic_int stopped;        /* the watch's code */
};

static void sum_item(void *context, uint32_t item, uint32_t worker)
{
    struct summing *s = context;
    const uint64_t experts = s->model->desc.experts;
    uint64_t done;

    if (atomic_load_explicit(&s->stopped, memory_order_relaxed))
        return;
    done = atomic_fetch_add_explicit(&s->done, s->expert_bytes, memory_order_relaxed);
    if (worker == 0) /* the thread that called; alone in writing it */
        atomic_store_explicit(&s->stopped, numoe_look(s->watch, done, s->total),
                              memory_order_relaxed);
    if (present(s->model, item))
        s->sums[item] = sum_of(s->model, item / experts, item % experts);
}

/* @return sums of all experts, to be freed */
static int sum_all(struct numoe_model *model, const struct numoe_watch *watch, uint64_t **sums,
                   struct numoe_error *error)
{
    const uint64_t count = model->desc.layers * model->desc.experts;
    const struct numoe_expert_shape held = numoe_plan_held(model->plan);
    struct summing s = {.model = model,
                        .sums = calloc(count, sizeof *s.sums),
                        .watch = watch,
                        .expert_bytes = held.slices * held.slice_bytes};
    struct numoe_pool_job job = {.context = &s, .phase_count = 1};
    int rc;

    if (!s.sums)
        return numoe_error_set(error, -ENOMEM, "model", "no memory for checksums");
    if (count > NUMOE_POOL_MAX_ITEMS) {
        free(s.sums);
        return numoe_error_set(error, -EINVAL, "model", "%llu experts are too many for checksums",
                               (unsigned long long)count);
    }
    s.total = count * s.expert_bytes;
    job.phases[0] = (struct numoe_pool_phase){.run = sum_item, .items = (uint32_t)count};
    rc = numoe_pool_run(model->context->pool, &job);
    if (rc) {
        free(s.sums);
        return numoe_error_set(error, rc, "model", "the workers refused a job");
    }
    rc = atomic_load_explicit(&s.stopped, memory_order_relaxed);
    if (!rc)
        rc = numoe_look(watch, s.total, s.total);
    if (rc) {
        free(s.sums);
        return rc; /* the watch has said why */
    }
    *sums = s.sums;
    return 0;
}

int numoe_model_keep_sums(struct numoe_model *model, const struct numoe_watch *watch,
                          struct numoe_error *error)
{
    return sum_all(model, watch, &model->sums, error);
}

int numoe_model_verify(struct numoe_model *model, struct numoe_error *error)
{
    uint64_t *now;
    int rc;

    if (!model)
        return numoe_error_set(error, -EINVAL, "model", "is NULL");
    if (!model->sums)
        return numoe_error_set(error, -ENODATA, "model", "was loaded without checksums");
    rc = sum_all(model, NULL, &now, error);
    if (rc)
        return rc;
    for (uint64_t q = 0; !rc && q < model->desc.layers * model->desc.experts; q++)
        if (present(model, q) && now[q] != model->sums[q])
            rc = numoe_error_set(error, -EIO, "expert",
                                 "layer %llu, expert %llu is not what was loaded: checksum "
                                 "%016llx now, %016llx then",
                                 (unsigned long long)(q / model->desc.experts),
                                 (unsigned long long)(q % model->desc.experts),
                                 (unsigned long long)now[q], (unsigned long long)model->sums[q]);
    free(now);
    return rc;
}
