/*
 * Calls on the GPU, alone or shared with the workers. Ids are rewritten on the host, so that the
 * same entries are computed, skipped and counted as on the CPU.
 *
 * A shared call: inputs and the first experts are on their way to the GPU when the workers begin to
 * compute the rest into out; the GPU's part is queued beside them, by a thread that is one worker
 * less meanwhile; and the GPU's rows are added to out. Which expert is whose follows from
 * gpu_share.h. Few tokens leave the link idle where the workers read what is not on the GPU; it
 * then brings experts that are asked for often.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/clock.h"
#include "gpu_run.h"
#include "gpu_share.h"

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

/* Up to so many tokens experts are brought that nobody waits for, so many a call. */
enum { BRING_TOKENS = 64, BRING_EXPERTS = 2 };

struct gpu_run {
    struct gpu_share share;
    struct gpu_share_choice choice;
    struct numoe_gpu_call call; /* while sharing */
    uint32_t *tokens_of, *order;
    uint8_t *held, *on_gpu, *mask; /* [experts] */
    bool pinned; /* weights need no staging: the GPU can work beside the workers */
    bool sharing;
    int queue_rc; /* while sharing */
    struct gpu_shared last;
};

/* Guesses that flatter, and are corrected by what calls take. */
static void guess(const struct numoe_model *model, struct gpu_share *share)
{
    const double workers = numoe_pool_worker_count(model->context->pool);
    const double hidden = (double)model->desc.hidden;

    share->expert_bytes = (double)(numoe_plan_held(model->plan).slices * model->shape.bytes);
    share->token_bytes = hidden * 8;
    share->token_operations = 6 * hidden * 32 * (double)numoe_plan_held(model->plan).slices;
    share->link_rate = 64e9 * numoe_gpu_model_parts(model->gpu);
    share->gpu_rate = 400e12 * numoe_gpu_model_parts(model->gpu);
    share->gpu_fixed = 60e-6;
    share->cpu_read = 25e9 * workers < 800e9 ? 25e9 * workers : 800e9;
    share->cpu_rate = 500e9 * workers;
    share->cpu_fixed = 10e-6;
}

int numoe_gpu_run_make(struct numoe_model *model)
{
    struct gpu_run *run = calloc(1, sizeof *run);
    const uint64_t experts = model->desc.experts;
    struct numoe_gpu_report report;

    model->gpu_run = run;
    if (!run)
        return -ENOMEM;
    run->tokens_of = calloc(experts, sizeof *run->tokens_of);
    run->order = calloc(experts, sizeof *run->order);
    run->held = calloc(experts, 1);
    run->on_gpu = calloc(experts, 1);
    run->mask = calloc(experts, 1);
    if (!run->tokens_of || !run->order || !run->held || !run->on_gpu || !run->mask) {
        numoe_gpu_run_free(model);
        return -ENOMEM;
    }
    numoe_gpu_model_report(model->gpu, &report);
    run->pinned = report.pinned_bytes == report.arena_bytes;
    guess(model, &run->share);
    return 0;
}

void numoe_gpu_run_guess(struct numoe_model *model, double link_rate, double cpu_read)
{
    struct gpu_share *share = &model->gpu_run->share;

    *share = (struct gpu_share){0};
    guess(model, share);
    share->link_rate = link_rate;
    share->cpu_read = cpu_read;
    share->gpu_fixed = share->cpu_fixed = 1e-9;
}

void numoe_gpu_run_free(struct numoe_model *model)
{
    struct gpu_run *run = model->gpu_run;

    if (!run)
        return;
    free(run->tokens_of);
    free(run->order);
    free(run->held);
    free(run->on_gpu);
    free(run->mask);
    free(run);
    model->gpu_run = NULL;
}

bool numoe_gpu_sharing(const struct numoe_model *model)
{
    return model->gpu_run && model->gpu_run->sharing;
}

static void say_failure(const struct numoe_model *model, const struct numoe_error *error)
{
    struct numoe *context = model->context;

    if (!(numoe_gpu_model_health(model->gpu, NULL) &&
          atomic_exchange_explicit(&context->gpu_loss_said, true, memory_order_relaxed)))
        numoe_log_write(&context->log, NUMOE_LOG_WARNING, "the CPU goes on instead of the GPU: %s",
                        error->message);
}

/* Which experts are whose. */
static void choose(struct numoe_schedule *s)
{
    struct numoe_model *model = s->model;
    struct gpu_run *run = model->gpu_run;
    const uint64_t experts = model->desc.experts;

    memset(run->tokens_of, 0, experts * sizeof *run->tokens_of);
    for (uint64_t i = 0; i < s->batch.tokens * s->batch.top_k; i++)
        if (model->gpu_ids[i] >= 0)
            run->tokens_of[model->gpu_ids[i]]++;
    numoe_gpu_held(model->gpu, s->layer, run->held);
    gpu_share_choose(&run->share, s->batch.tokens, run->tokens_of, run->held, experts, run->order,
                     run->on_gpu, &run->choice);
}

/* Experts that come while the link is idle. What goes wrong shows in the next call. */
static void bring(const struct numoe_schedule *s)
{
    if (s->batch.tokens <= BRING_TOKENS)
        numoe_gpu_bring(s->model->gpu, s->layer, BRING_EXPERTS, NULL);
}

static uint64_t run_alone(struct numoe_schedule *s, const struct numoe_gpu_call *call)
{
    struct numoe_model *model = s->model;
    struct numoe_error error = NUMOE_ERROR_INIT;
    uint64_t done = 0;
    const int rc = numoe_gpu_forward(model->gpu, s->layer, call, &done, &error);

    count(s, model->gpu_ids, done * s->batch.top_k);
    s->result.gpu_pairs = s->result.pairs;
    s->result.gpu_tokens = done;
    if (rc)
        say_failure(model, &error);
    return done;
}

/* Ids of experts that are the workers' are skipped by the GPU, and the other way round. */
static void divide(struct numoe_schedule *s)
{
    struct numoe_model *model = s->model;
    struct gpu_run *run = model->gpu_run;

    for (uint64_t i = 0; i < s->batch.tokens * s->batch.top_k; i++)
        if (model->gpu_ids[i] < 0 || !run->on_gpu[model->gpu_ids[i]])
            model->gpu_ids[i] = ENTRY_SKIPPED;
    for (uint64_t e = 0; e < model->desc.experts; e++)
        run->mask[e] = run->on_gpu[e] || (s->batch.elsewhere && s->batch.elsewhere[e]);
    s->batch.elsewhere = run->mask;
}

static void share(struct numoe_schedule *s, const struct numoe_gpu_call *call)
{
    struct numoe_model *model = s->model;
    struct gpu_run *run = model->gpu_run;
    const uint8_t *elsewhere = s->batch.elsewhere;
    struct numoe_error error = NUMOE_ERROR_INIT;
    uint64_t tokens;

    run->call = *call;
    run->call.join = true;
    run->call.add = false;
    run->call.asked = run->tokens_of;
    run->call.ahead = NUMOE_GPU_NO_AHEAD;
    divide(s);
    run->queue_rc = 0;
    run->sharing = !numoe_gpu_begin(model->gpu, s->layer, &run->call, 0, &tokens, &error);
    if (run->sharing)
        return;
    say_failure(model, &error);
    s->batch.elsewhere = elsewhere;
}

uint64_t numoe_gpu_run(struct numoe_schedule *s)
{
    struct numoe_model *model = s->model;
    const struct numoe_batch *batch = &s->batch;
    struct numoe *context = model->context;
    struct gpu_run *run = model->gpu_run;
    const uint64_t hidden = model->desc.hidden, from = context->gpu_from_tokens;
    struct numoe_error lost = NUMOE_ERROR_INIT;
    struct numoe_gpu_call call;

    if (!model->gpu || batch->tokens < (from ? from : 1))
        return 0;
    run->last = (struct gpu_shared){0};
    if (numoe_gpu_model_health(model->gpu, &lost)) { /* perhaps in a prefetch, unheard */
        say_failure(model, &lost);
        return 0;
    }
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
    if (from || !run->pinned)
        return run_alone(s, &call);
    choose(s);
    if (run->choice.gpu_experts && run->choice.cpu_experts) {
        share(s, &call);
        return 0;
    }
    if (run->choice.gpu_experts) {
        const uint64_t since = numoe_now_ns(), done = run_alone(s, &call);
        if (done == batch->tokens)
            gpu_share_learn(&run->share, batch->tokens, &run->choice,
                            (double)(numoe_now_ns() - since) * 1e-9, 0, 0);
        return done;
    }
    numoe_gpu_asked(model->gpu, s->layer, run->tokens_of, batch->tokens);
    bring(s);
    return 0;
}

static void count_shared(struct numoe_schedule *s, uint64_t tokens)
{
    const int32_t *ids = s->model->gpu_ids;

    for (uint64_t i = 0; i < tokens * s->batch.top_k; i++)
        if (ids[i] >= 0) {
            s->result.pairs++;
            s->result.gpu_pairs++;
            numoe_schedule_see(s, (uint64_t)ids[i], false);
        }
    s->result.gpu_tokens = tokens;
}

void numoe_gpu_share_queue(struct numoe_schedule *s)
{
    struct numoe_model *model = s->model;
    struct gpu_run *run = model->gpu_run;
    struct numoe_error error = NUMOE_ERROR_INIT;

    run->queue_rc = numoe_gpu_queue(model->gpu, &run->call, &error);
    if (run->queue_rc)
        say_failure(model, &error);
}

uint64_t numoe_gpu_share_end(struct numoe_schedule *s, uint64_t cpu_ns)
{
    const uint64_t began = numoe_now_ns() - cpu_ns;
    struct numoe_model *model = s->model;
    struct gpu_run *run = model->gpu_run;
    struct numoe_error error = NUMOE_ERROR_INIT;
    uint64_t done = 0, tokens;
    int rc;

    run->sharing = false;
    rc = run->queue_rc;
    if (!rc)
        rc = numoe_gpu_finish(model->gpu, &run->call, &done, &error);
    if (!rc && done == s->batch.tokens) /* one pass, so its time is that of the call */
        gpu_share_learn(&run->share, done, &run->choice, numoe_gpu_took_ms(model->gpu) * 1e-3,
                        (double)cpu_ns * 1e-9,
                        ((double)began - (double)numoe_gpu_began_ns(model->gpu)) * 1e-9);
    run->last = (struct gpu_shared){.gpu_experts = run->choice.gpu_experts,
                                    .cpu_experts = run->choice.cpu_experts,
                                    .gpu_ms = numoe_gpu_took_ms(model->gpu),
                                    .cpu_ms = (double)cpu_ns * 1e-6};
    while (!rc && done < s->batch.tokens) {
        rc = numoe_gpu_start(model->gpu, s->layer, &run->call, done, &tokens, &error);
        if (!rc) {
            rc = numoe_gpu_finish(model->gpu, &run->call, &tokens, &error);
            done += tokens;
        }
    }
    count_shared(s, done);
    if (!rc) {
        bring(s);
        return done;
    }
    if (!run->queue_rc)
        say_failure(model, &error);
    for (uint64_t e = 0; e < model->desc.experts; e++)
        run->mask[e] = !run->on_gpu[e];
    s->batch.add = true;
    return done;
}

void numoe_gpu_shared(const struct numoe_model *model, struct gpu_shared *shared)
{
    *shared = model->gpu_run ? model->gpu_run->last : (struct gpu_shared){0};
}

void numoe_gpu_share_cancel(struct numoe_schedule *s)
{
    s->model->gpu_run->sharing = false;
    numoe_gpu_cancel(s->model->gpu);
}
