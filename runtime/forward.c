/*
 * Calls on a layer: forward, submit, wait. context.h says how turns and a pending submission work.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <string.h>

#include "base/clock.h"
#include "base/probes.h"
#include "context.h"
#include "gpu_run.h"

static int copy_batch(const struct numoe_batch *batch, struct numoe_batch *copy,
                      struct numoe_error *error)
{
    *copy = (struct numoe_batch)NUMOE_BATCH_INIT;
    if (!batch)
        return numoe_error_set(error, -EINVAL, "batch", "is NULL");
    if (batch->size < offsetof(struct numoe_batch, scale))
        return numoe_error_set(error, -EINVAL, "batch",
                               "size %zu is not that of struct numoe_batch", batch->size);
    memcpy(copy, batch, batch->size < sizeof *copy ? batch->size : sizeof *copy);
    copy->size = sizeof *copy;
    return 0;
}

static void give_result(const struct numoe_result *from, struct numoe_result *to)
{
    const size_t size = to ? to->size : 0;

    if (size < sizeof to->size)
        return;
    memcpy(to, from, size < sizeof *from ? size : sizeof *from);
    to->size = size;
}

/* Turn held. */
static void trace_call(const struct numoe *context, enum trace_kind kind, uint64_t since,
                       uint64_t tokens, uint32_t lanes)
{
    const uint32_t count = tokens > UINT32_MAX ? UINT32_MAX : (uint32_t)tokens;

    if (context->trace)
        numoe_trace_span(context->trace, numoe_trace_calls(context->trace), kind, since,
                         (uint32_t[TRACE_ARGS]){(uint32_t)context->schedule.layer, count, lanes});
}

/* Turn held, and the call that deferred experts is done, all but them: start these. */
static void start_later(struct numoe *context)
{
    struct numoe_pool_job records, lanes;

    if (!context->later_built)
        return;
    context->later_built = false;
    numoe_schedule_deferred_jobs(&context->later[context->later_at], &records, &lanes);
    /* neither fails: the jobs are sound, and this is no item of the pool nor a forked process */
    numoe_pool_run(context->pool, &records);
    context->later_running = numoe_pool_submit(context->pool, &lanes, &context->later_ticket) == 0;
}

/* Turn held. The pool is free when this returns. */
static void finish_later(struct numoe *context)
{
    if (context->later_running)
        numoe_pool_wait(context->pool, context->later_ticket);
    context->later_running = false;
}

/* Turn held, and the call that lays them out will not be done: forget its deferred experts. */
static void drop_later(struct numoe *context)
{
    if (context->later_built)
        context->later_model = NULL;
    context->later_built = false;
}

/* Turn held. What numoe_cancel may call off; ticket 0: nothing any more. */
static void set_live(struct numoe *context, uint64_t ticket)
{
    pthread_mutex_lock(&context->cancel_lock);
    context->live_ticket = ticket;
    context->live_job = context->pool_ticket;
    context->live_model = context->pending_model;
    pthread_mutex_unlock(&context->cancel_lock);
}

/* Turn held. Finish what numoe_submit left running; its result waits in the schedule. */
static void finish_pending(struct numoe *context)
{
    const uint64_t since = numoe_trace_now(context->trace);

    if (!context->pending || context->finished)
        return;
    context->pending_rc = numoe_pool_wait(context->pool, context->pool_ticket);
    set_live(context, 0);
    trace_call(context, TRACE_WAIT, since, context->schedule.batch.tokens, 0);
    if (context->pending_rc)
        drop_later(context);
    else
        start_later(context);
    context->finished = true;
    context->pending_result = context->schedule.result;
    numoe_counter_add(&context->nanoseconds, numoe_now_ns() - context->pending_since);
    numoe_probe_call_done(context->schedule.layer, context->schedule.batch.tokens,
                          context->pending_rc);
}

static void count_workspace(struct numoe *context)
{
    atomic_store_explicit(&context->workspace_bytes,
                          context->schedule.memory_bytes + context->later[0].memory_bytes +
                              context->later[1].memory_bytes,
                          memory_order_relaxed);
}

static void count_call(struct numoe *context, const struct numoe_schedule *s)
{
    numoe_counter_add(&context->calls, 1);
    numoe_counter_add(&context->tokens, s->batch.tokens);
    numoe_counter_add(&context->pairs, s->result.pairs);
    numoe_counter_add(&context->skipped, s->result.skipped);
    numoe_counter_add(&context->missing, s->result.missing);
    numoe_counter_add(&context->expert_bytes, s->result.expert_bytes);
    numoe_counter_add(&context->gpu_tokens, s->result.gpu_tokens);
    numoe_counter_add(&context->gpu_calls, s->result.gpu_tokens != 0);
    for (uint32_t n = 0; n < context->plan->node_count; n++)
        if (s->node_bytes[n])
            numoe_counter_add(&context->node_bytes[n], s->node_bytes[n]);
    count_workspace(context);
}

/* Turn held. Lay out the pass that begins at token `begin`; job is ready to run on success. */
static int prepare(struct numoe *context, uint64_t begin, uint64_t most, struct numoe_pool_job *job,
                   struct numoe_error *error)
{
    struct numoe_schedule *s = &context->schedule;
    const uint64_t left = s->batch.tokens - begin;
    const uint64_t since = numoe_trace_now(context->trace);
    int rc;

    s->token_begin = begin;
    s->token_count = left < most ? left : most;
    rc = numoe_schedule_build(s, numoe_pool_worker_count(context->pool));
    if (rc)
        return numoe_error_set(error, rc, "workspace",
                               rc == -ENOMEM ? "no memory for %llu tokens"
                                             : "%llu tokens are too many for one pass",
                               (unsigned long long)s->token_count);
    numoe_schedule_job(s, job);
    trace_call(context, TRACE_LAY_OUT, since, s->token_count, s->lane_count);
    return 0;
}

/* Turn held. What deferred experts ask of a call. */
static int check_later(const struct numoe *context, const struct numoe_model *model,
                       const struct numoe_batch *batch, struct numoe_error *error)
{
    const uint64_t waiting =
        context->later_model ? context->later[context->later_at].token_count : 0;

    if (batch->tokens == 0)
        return 0;
    if (context->later_model == model && waiting != batch->tokens)
        return numoe_error_set(error, -EINVAL, "deferred",
                               "deferred experts of %llu tokens wait, and this call has %llu",
                               (unsigned long long)waiting, (unsigned long long)batch->tokens);
    if (!batch->deferred)
        return 0;
    if (batch->tokens > SCHEDULE_DEFERRED_TOKENS)
        return numoe_error_set(error, -EINVAL, "deferred", "%llu tokens are more than %d",
                               (unsigned long long)batch->tokens, SCHEDULE_DEFERRED_TOKENS);
    if (context->later_model && context->later_model != model)
        return numoe_error_set(error, -EINVAL, "deferred",
                               "deferred experts of another model of this context wait");
    return 0;
}

/* Turn held. Lay out the deferred experts of a call, beside those that it collects. */
static int prepare_later(struct numoe *context, struct numoe_model *model, uint64_t layer,
                         const struct numoe_batch *batch, struct numoe_error *error)
{
    struct numoe_schedule *later = &context->later[!context->later_at];
    int rc;

    later->part = SCHEDULE_DEFERRED;
    rc = numoe_schedule_begin(later, model, layer, batch);
    later->token_begin = 0;
    later->token_count = batch->tokens;
    if (!rc)
        rc = numoe_schedule_build(later, numoe_pool_worker_count(context->pool));
    if (rc)
        numoe_error_set(error, rc, "workspace", "no memory for the deferred experts");
    return rc;
}

/* Turn held, the collecting call laid out for good. Its own deferred experts are the ones that
 * wait from now on. */
static void turn_later(struct numoe *context, struct numoe_model *model,
                       const struct numoe_batch *batch, struct numoe_result *result)
{
    const struct numoe_schedule *deferred = &context->later[!context->later_at];
    const struct numoe_result *later = &deferred->result;

    if (batch->tokens && context->later_model == model)
        context->later_model = NULL;
    if (!batch->tokens || !batch->deferred)
        return;
    context->later_at = !context->later_at;
    context->later_model = model;
    context->later_built = true;
    result->pairs += later->pairs;
    result->deferred = later->pairs;
    result->missing += later->missing;
    result->experts_hit += later->experts_hit;
    result->expert_bytes += later->expert_bytes;
    for (uint32_t n = 0; n < context->plan->node_count; n++)
        context->schedule.node_bytes[n] += deferred->node_bytes[n];
}

/* Turn held. The passes from token `first` on, as run_passes says. */
static int run_on_workers(struct numoe *context, uint64_t first, uint64_t most,
                          struct numoe_pool_job *last, struct numoe_error *error)
{
    struct numoe_schedule *s = &context->schedule;
    const uint64_t tokens = s->batch.tokens;
    struct numoe_result total = NUMOE_RESULT_INIT;
    struct numoe_pool_job job;
    bool laid_out = false;

    if (tokens - first > most) {
        for (uint64_t begin = first; begin < tokens; begin += s->token_count) {
            int rc = prepare(context, begin, most, &job, error);
            if (rc)
                return rc;
        }
        total = s->result;
        laid_out = true;
    }
    for (uint64_t begin = first; begin < tokens; begin += s->token_count) {
        uint64_t since;
        int rc = prepare(context, begin, most, &job, error);
        if (rc)
            return rc;
        if (last && begin + s->token_count == tokens) {
            *last = job;
            break;
        }
        since = numoe_trace_now(context->trace);
        rc = numoe_pool_run(context->pool, &job);
        if (rc)
            return numoe_error_set(error, rc, "workers", "could not run the job");
        trace_call(context, TRACE_RUN, since, s->token_count, s->lane_count);
    }
    if (laid_out)
        s->result = total;
    return 0;
}

/* Turn held. The workers' part of a shared call, while the GPU's is queued. */
static int run_beside(struct numoe *context, uint64_t most, struct numoe_error *error)
{
    struct numoe_schedule *s = &context->schedule;
    const bool at_once = s->batch.tokens > most; /* several passes: not only behind the first */
    struct numoe_pool_job job;
    uint64_t ticket, since;
    int rc;

    if (at_once)
        numoe_gpu_share_queue(s);
    rc = run_on_workers(context, 0, most, &job, error);
    if (rc)
        return rc;
    since = numoe_trace_now(context->trace);
    rc = numoe_pool_submit(context->pool, &job, &ticket);
    if (!rc && !at_once)
        numoe_gpu_share_queue(s);
    if (!rc)
        rc = numoe_pool_wait(context->pool, ticket);
    if (rc)
        return numoe_error_set(error, rc, "workers", "could not run the job");
    trace_call(context, TRACE_RUN, since, s->token_count, s->lane_count);
    return 0;
}

/* Turn held. A call that was begun to be shared: when the workers have done their part, the GPU's
 * is joined, and what it did not get done is the workers' after all. */
static int run_shared(struct numoe *context, uint64_t most, struct numoe_error *error)
{
    struct numoe_schedule *s = &context->schedule;
    const uint64_t since = numoe_now_ns();
    uint64_t traced, done, skipped, missing;
    int rc = run_beside(context, most, error);

    if (rc) {
        numoe_gpu_share_cancel(s);
        return rc;
    }
    traced = numoe_trace_now(context->trace);
    done = numoe_gpu_share_end(s, numoe_now_ns() - since);
    trace_call(context, TRACE_GPU, traced, done, 0);
    if (done == s->batch.tokens)
        return 0;
    skipped = s->result.skipped;
    missing = s->result.missing;
    rc = run_on_workers(context, done, most, NULL, error);
    s->result.skipped = skipped; /* they have been counted */
    s->result.missing = missing;
    return rc;
}

/*
 * Turn held. Run every pass but, when last is given, the last one, whose job is left there; a job
 * without phases says that there is nothing left to run. With several passes all are laid out (and
 * counted) once before the first runs, so that memory that cannot grow is found before the CPU
 * writes anything. With a GPU, what it does not get done is left to the workers. A call that the
 * GPU and the workers share is complete when this returns.
 */
static int run_passes(struct numoe *context, struct numoe_model *model, uint64_t layer,
                      const struct numoe_batch *batch, struct numoe_pool_job *last,
                      struct numoe_error *error)
{
    struct numoe_schedule *s = &context->schedule;
    uint64_t first, most, since;
    int rc;

    s->late =
        batch->tokens && context->later_model == model ? &context->later[context->later_at] : NULL;
    if (numoe_schedule_begin(s, model, layer, batch))
        return numoe_error_set(error, -ENOMEM, "workspace", "no memory for a mark an expert");
    most = numoe_schedule_pass(s);
    if (last)
        last->phase_count = 0;
    if (batch->deferred && batch->tokens) {
        rc = prepare_later(context, model, layer, batch, error);
        if (rc)
            return rc;
    }
    since = numoe_trace_now(context->trace);
    first = batch->deferred || s->late ? 0 : numoe_gpu_run(s);
    if (first)
        trace_call(context, TRACE_GPU, since, first, 0);
    rc = numoe_gpu_sharing(model) ? run_shared(context, most, error)
                                  : run_on_workers(context, first, most, last, error);
    if (rc)
        return rc;
    turn_later(context, model, batch, &s->result);
    return 0;
}

static int check_call(struct numoe_model *model, uint64_t layer, const struct numoe_batch *batch,
                      struct numoe_batch *copy, struct numoe_error *error)
{
    int rc;

    if (!model)
        return numoe_error_set(error, -EINVAL, "model", "is NULL");
    rc = numoe_context_check_fork(model->context, error);
    if (rc)
        return rc;
    rc = copy_batch(batch, copy, error);
    return rc ? rc : numoe_schedule_check(model, layer, copy, error);
}

int numoe_forward(struct numoe_model *model, uint64_t layer, const struct numoe_batch *batch,
                  struct numoe_result *result, struct numoe_error *error)
{
    const uint64_t since = numoe_now_ns();
    struct numoe_batch copy;
    struct numoe *context;
    uint64_t turn;
    int rc = check_call(model, layer, batch, &copy, error);

    if (rc)
        return rc;
    context = model->context;
    pthread_mutex_lock(&context->turn);
    finish_pending(context);
    numoe_probe_call_start(layer, copy.tokens, copy.top_k);
    turn = numoe_trace_now(context->trace);
    rc = check_later(context, model, &copy, error);
    if (!rc) {
        finish_later(context);
        rc = run_passes(context, model, layer, &copy, NULL, error);
    }
    if (!rc) {
        start_later(context);
        count_call(context, &context->schedule);
        numoe_counter_add(&context->nanoseconds, numoe_now_ns() - since);
        give_result(&context->schedule.result, result);
        trace_call(context, TRACE_CALL, turn, copy.tokens, 0);
    }
    numoe_probe_call_done(layer, copy.tokens, rc);
    pthread_mutex_unlock(&context->turn);
    return rc;
}

int numoe_submit(struct numoe_model *model, uint64_t layer, const struct numoe_batch *batch,
                 uint64_t *ticket, struct numoe_error *error)
{
    const uint64_t since = numoe_now_ns();
    struct numoe_pool_job job = {0};
    struct numoe_batch copy;
    struct numoe *context;
    uint64_t turn;
    int rc = check_call(model, layer, batch, &copy, error);

    if (!rc && !ticket)
        rc = numoe_error_set(error, -EINVAL, "ticket", "is NULL");
    if (rc)
        return rc;
    context = model->context;
    pthread_mutex_lock(&context->turn);
    if (context->pending) {
        rc = numoe_error_set(error, -EAGAIN, "submit", "a submission is outstanding");
        goto out;
    }
    rc = check_later(context, model, &copy, error);
    if (rc)
        goto out;
    numoe_probe_call_start(layer, copy.tokens, copy.top_k);
    turn = numoe_trace_now(context->trace);
    finish_later(context);
    rc = run_passes(context, model, layer, &copy, &job, error);
    if (rc)
        goto done;
    context->finished = job.phase_count == 0;
    if (context->finished) {
        start_later(context);
        context->pending_result = context->schedule.result;
        context->pending_rc = 0;
    } else {
        rc = numoe_pool_submit(context->pool, &job, &context->pool_ticket);
        if (rc) {
            numoe_error_set(error, rc, "workers", "could not take the job");
            drop_later(context);
            goto done;
        }
    }
    count_call(context, &context->schedule);
    context->pending = true;
    context->pending_model = model;
    context->pending_since = since;
    context->pending_ticket = context->next_ticket++;
    *ticket = context->pending_ticket;
    if (!context->finished)
        set_live(context, *ticket);
    trace_call(context, TRACE_SUBMIT, turn, copy.tokens, 0);
done:
    if (rc || context->finished)
        numoe_probe_call_done(layer, copy.tokens, rc);
out:
    pthread_mutex_unlock(&context->turn);
    return rc;
}

int numoe_wait(struct numoe_model *model, uint64_t ticket, struct numoe_result *result)
{
    struct numoe *context;
    int rc = -EINVAL;

    if (!model)
        return -EINVAL;
    context = model->context;
    if (numoe_pool_forked(context->pool))
        return -ECHILD;
    pthread_mutex_lock(&context->turn);
    if (context->pending && context->pending_model == model && context->pending_ticket == ticket) {
        finish_pending(context);
        give_result(&context->pending_result, result);
        context->pending = false;
        rc = context->pending_rc;
    }
    pthread_mutex_unlock(&context->turn);
    return rc;
}

int numoe_cancel(struct numoe_model *model, uint64_t ticket)
{
    struct numoe *context;
    int rc = -EALREADY;

    if (!model)
        return -EINVAL;
    context = model->context;
    if (numoe_pool_forked(context->pool))
        return -ECHILD;
    pthread_mutex_lock(&context->cancel_lock);
    if (ticket == 0 || ticket >= atomic_load(&context->next_ticket))
        rc = -EINVAL;
    else if (context->live_ticket == ticket)
        rc = context->live_model == model ? numoe_pool_cancel(context->pool, context->live_job)
                                          : -EINVAL;
    pthread_mutex_unlock(&context->cancel_lock);
    return rc;
}

/* Turn held. Rows of deferred experts lie in memory that is to be exchanged. */
static int check_no_later(const struct numoe *context, struct numoe_error *error)
{
    return context->later_model
               ? numoe_error_set(error, -EBUSY, "deferred",
                                 "deferred experts wait: a call has to collect them first")
               : 0;
}

int numoe_reserve(struct numoe_model *model, uint64_t tokens, uint64_t top_k, uint64_t deferred,
                  struct numoe_error *error)
{
    struct schedule_stock stock[3] = {0}; /* of calls, and of both deferred schedules */
    struct numoe *context;
    int rc = 0;

    if (!model)
        return numoe_error_set(error, -EINVAL, "model", "is NULL");
    if (top_k < 1 || top_k > 64)
        return numoe_error_set(error, -EINVAL, "top_k", "%llu is not in 1..64",
                               (unsigned long long)top_k);
    if (deferred > SCHEDULE_DEFERRED_TOKENS)
        return numoe_error_set(error, -EINVAL, "deferred", "%llu tokens are more than %d",
                               (unsigned long long)deferred, SCHEDULE_DEFERRED_TOKENS);
    context = model->context;
    rc = numoe_context_check_fork(context, error);
    if (rc)
        return rc;
    pthread_mutex_lock(&context->turn);
    rc = check_no_later(context, error);
    if (!rc && tokens)
        numoe_schedule_want(&context->schedule, model, tokens, top_k, deferred, &stock[0]);
    for (unsigned i = 0; !rc && deferred && i < 2; i++) {
        context->later[i].part = SCHEDULE_DEFERRED;
        numoe_schedule_want(&context->later[i], model, deferred, top_k, 0, &stock[1 + i]);
    }
    pthread_mutex_unlock(&context->turn);
    for (unsigned i = 0; !rc && i < 3; i++) {
        rc = numoe_schedule_stock(&stock[i], context->pool);
        if (rc)
            numoe_error_set(error, rc, "workspace", "no memory for calls of %llu tokens",
                            (unsigned long long)tokens);
    }
    if (rc)
        goto out;
    pthread_mutex_lock(&context->turn);
    finish_pending(context);
    rc = check_no_later(context, error);
    for (unsigned i = 0; !rc && i < 3; i++)
        numoe_schedule_take(i ? &context->later[i - 1] : &context->schedule, &stock[i]);
    count_workspace(context);
    pthread_mutex_unlock(&context->turn);
out:
    for (unsigned i = 0; i < 3; i++)
        numoe_schedule_stock_free(&stock[i]);
    return rc;
}

void numoe_context_settle(struct numoe *context)
{
    finish_pending(context);
    finish_later(context);
}

void numoe_context_forget(struct numoe_model *model)
{
    struct numoe *context = model->context;

    if (numoe_pool_forked(context->pool))
        return;
    pthread_mutex_lock(&context->turn);
    if (context->pending && context->pending_model == model) {
        finish_pending(context);
        context->pending = false;
    }
    if (context->later_model == model) {
        finish_later(context);
        context->later_model = NULL;
    }
    /* another model may come to lie where this one is */
    numoe_schedule_forget(&context->schedule);
    for (int i = 0; i < 2; i++)
        numoe_schedule_forget(&context->later[i]);
    pthread_mutex_unlock(&context->turn);
}
