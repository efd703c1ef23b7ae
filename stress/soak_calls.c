/*
 * Steps that call layers: alone, without waiting, from several threads, and on a second context
 * of the same plan.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "soak_walk.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static void doing_batch(struct soak *soak, const char *what, const struct soak_batch *b)
{
    const struct numoe_model_desc *d = &b->model->desc;

    soak_doing(soak,
               "%s: %s, layer %" PRIu64 " of %" PRIu64 ", %" PRIu64 " experts %" PRIu64
               " x %" PRIu64 ", %" PRIu64 " tokens, top %" PRIu64 ", %" PRIu32 " threads",
               what, numoe_model_kernels(b->model->model)->name, b->layer, d->layers, d->experts,
               d->hidden, d->intermediate, b->call.tokens, b->call.top_k,
               b->model->context->threads);
}

/* The same call again must give the same bits; from a GPU the same values, as it sums what it holds
 * and then what is copied, piece by piece. */
static int repeat(struct soak *soak, struct soak_batch *b, struct soak_context *context,
                  struct numoe_model *model, const char *otherwise)
{
    uint8_t *kept = soak_batch_keep(soak, b);
    int rc = kept ? 0 : -ENOMEM;

    if (!rc)
        rc = soak_batch_forward(soak, context, model, b);
    if (!rc)
        rc = b->have.gpu_tokens ? soak_batch_check(soak, b)
                                : soak_batch_compare(soak, b, kept, otherwise);
    free(kept);
    return rc;
}

int soak_step_forward(struct soak *soak, struct soak_random *random, struct soak_model *model)
{
    const bool again = soak_once(random, 2), inspect = soak_once(random, 4);
    const uint64_t expert = soak_below(random, model->desc.experts);
    struct soak_batch b;
    int rc = soak_batch_make(soak, random, model, &b);

    if (rc)
        return rc;
    doing_batch(soak, "forward", &b);
    rc = soak_batch_forward(soak, model->context, model->model, &b);
    if (!rc)
        rc = soak_batch_check(soak, &b);
    if (!rc && again)
        rc = repeat(soak, &b, model->context, model->model, "once more");
    if (!rc && inspect && model->experts[b.layer * model->desc.experts + expert].present)
        rc = soak_model_inspect(soak, random, model, b.layer, expert);
    soak_batch_free(&b);
    return rc;
}

/* ---- submit and wait ------------------------------------------------------------------------- */

static int submit(struct soak *soak, struct soak_batch *b, uint64_t *ticket)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    int rc;

    soak_batch_reset(b);
    rc = numoe_submit(b->model->model, b->layer, &b->call, ticket, &error);
    return rc ? soak_fail_call(soak, "numoe_submit", rc, &error) : 0;
}

/* *cancelled: that it may have been, and then whether it was. */
static int wait_for(struct soak *soak, struct soak_batch *b, uint64_t ticket, bool *cancelled)
{
    int rc = numoe_wait(b->model->model, ticket, &b->have);

    *cancelled = *cancelled && rc == -ECANCELED;
    if (rc && !*cancelled)
        return soak_fail_call(soak, "numoe_wait", rc, NULL);
    soak_batch_computed(soak, b->model->context, b);
    rc = numoe_wait(b->model->model, ticket, NULL);
    return rc == -EINVAL
               ? 0
               : soak_fail(soak, SOAK_WRONG, "a second wait for a ticket returned %d", rc);
}

/* What a caller may do before it waits: another call, which takes its turn; a submission, which is
 * refused. */
static int meanwhile(struct soak *soak, struct soak_batch *other, uint64_t what)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    uint64_t ticket;
    int rc = 0;

    if (what == 1 || what == 3) {
        rc = soak_batch_forward(soak, other->model->context, other->model->model, other);
        if (!rc)
            rc = soak_batch_check(soak, other);
    }
    if (!rc && what >= 2) {
        rc = numoe_submit(other->model->model, other->layer, &other->call, &ticket, &error);
        rc = rc == -EAGAIN ? 0
                           : soak_fail(soak, SOAK_WRONG, "a second submission returned %d: %s", rc,
                                       error.message);
    }
    return rc;
}

int soak_step_submit(struct soak *soak, struct soak_random *random, struct soak_model *model)
{
    const struct soak_context *context = model->context;
    struct soak_model *second = context->models[soak_below(random, context->model_count)];
    const uint64_t what = soak_below(random, 4);
    const bool cancels = soak_once(random, 4);
    bool cancelled = cancels;
    struct soak_batch b, other;
    uint64_t ticket;
    int rc = soak_batch_make(soak, random, model, &b);

    if (rc)
        return rc;
    rc = soak_batch_make(soak, random, second, &other);
    if (rc)
        goto out;
    doing_batch(soak, "submit", &b);
    rc = submit(soak, &b, &ticket);
    if (rc)
        goto out_other;
    if (cancels) {
        rc = numoe_cancel(model->model, ticket);
        cancelled = rc == 0;
        if (rc && rc != -EALREADY)
            soak_fail_call(soak, "numoe_cancel", rc, NULL);
        else
            rc = 0;
    }
    if (!rc)
        rc = meanwhile(soak, &other, what);
    if (rc)
        numoe_wait(model->model, ticket, NULL); /* before its memory is freed */
    else
        rc = wait_for(soak, &b, ticket, &cancelled);
    /* also when it was too late: a seed makes the same calls each time */
    if (!rc && cancels)
        rc = soak_batch_forward(soak, model->context, model->model, &b);
    if (!rc)
        rc = soak_batch_check(soak, &b);
    if (!rc)
        rc = repeat(soak, &b, model->context, model->model, "without waiting and by forward");
out_other:
    soak_batch_free(&other);
out:
    soak_batch_free(&b);
    return rc;
}

/* ---- several callers ------------------------------------------------------------------------- */

enum { CALLER_BATCHES = 3 };

/* Where callers wait until all are there, so that they begin together. */
struct gate {
    pthread_mutex_t lock;
    pthread_cond_t opened;
    enum { GATE_SHUT, GATE_OPEN, GATE_ABANDONED } state;
};

struct caller {
    struct soak *soak;
    struct gate *gate;
    pthread_t thread;
    struct soak_batch batches[CALLER_BATCHES];
    bool submits[CALLER_BATCHES];
    uint32_t batch_count;
    /* A caller without batches makes a model of its own meanwhile, calls it and drops it. */
    struct soak_context *context;
    struct soak_random random;
    int rc;
};

static int call_or_submit(struct soak *soak, struct soak_batch *b, bool submits)
{
    uint64_t ticket;
    int rc = -EAGAIN;
    bool cancelled = false;

    if (submits) {
        soak_batch_reset(b);
        /* another caller's may be outstanding: then by forward */
        rc = numoe_submit(b->model->model, b->layer, &b->call, &ticket, NULL);
        if (rc && rc != -EAGAIN)
            return soak_fail_call(soak, "numoe_submit", rc, NULL);
    }
    if (rc)
        return soak_batch_forward(soak, b->model->context, b->model->model, b);
    return wait_for(soak, b, ticket, &cancelled);
}

static int make_and_drop(struct caller *caller)
{
    struct numoe_model_desc desc;
    struct soak_model *model;
    struct soak_batch b;
    int rc;

    soak_desc_make(&caller->random, &desc);
    rc = soak_model_create(caller->soak, &caller->random, caller->context, &desc, &model);
    if (rc)
        return rc;
    rc = soak_batch_make(caller->soak, &caller->random, model, &b);
    if (!rc) {
        rc = soak_batch_forward(caller->soak, caller->context, model->model, &b);
        if (!rc)
            rc = soak_batch_check(caller->soak, &b);
        soak_batch_free(&b);
    }
    soak_model_free(model);
    return rc;
}

static bool pass_gate(struct gate *gate)
{
    bool open;

    pthread_mutex_lock(&gate->lock);
    while (gate->state == GATE_SHUT)
        pthread_cond_wait(&gate->opened, &gate->lock);
    open = gate->state == GATE_OPEN;
    pthread_mutex_unlock(&gate->lock);
    return open;
}

static void set_gate(struct gate *gate, bool open)
{
    pthread_mutex_lock(&gate->lock);
    gate->state = open ? GATE_OPEN : GATE_ABANDONED;
    pthread_cond_broadcast(&gate->opened);
    pthread_mutex_unlock(&gate->lock);
}

static void *call(void *user)
{
    struct caller *caller = user;

    if (!pass_gate(caller->gate))
        return NULL;
    if (!caller->batch_count)
        caller->rc = make_and_drop(caller);
    for (uint32_t i = 0; i < caller->batch_count && !caller->rc; i++)
        caller->rc = call_or_submit(caller->soak, &caller->batches[i], caller->submits[i]);
    return NULL;
}

/* Any model of any context. */
static struct soak_model *any_model(const struct soak *soak, struct soak_random *random)
{
    uint64_t count = 0, chosen;

    for (uint32_t c = 0; c < soak->context_count; c++)
        count += soak->contexts[c]->model_count;
    chosen = soak_below(random, count);
    for (uint32_t c = 0; c < soak->context_count; c++) {
        if (chosen < soak->contexts[c]->model_count)
            return soak->contexts[c]->models[chosen];
        chosen -= soak->contexts[c]->model_count;
    }
    return NULL;
}

static int prepare_caller(struct soak *soak, struct soak_random *random, struct caller *caller)
{
    const uint32_t batches = (uint32_t)soak_between(random, 0, CALLER_BATCHES);
    int rc;

    caller->soak = soak;
    caller->random.state = soak_next(random);
    caller->context = any_model(soak, random)->context;
    for (uint32_t i = 0; i < batches; i++) {
        caller->submits[i] = soak_once(random, 3);
        rc = soak_batch_make(soak, random, any_model(soak, random), &caller->batches[i]);
        if (rc)
            return rc;
        caller->batch_count++;
    }
    return 0;
}

/* The last caller is this thread. */
static int run_callers(struct soak *soak, struct caller *callers, uint32_t count)
{
    struct gate gate = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, GATE_SHUT};
    uint32_t started;
    int rc = 0;

    for (started = 0; started < count - 1; started++) {
        callers[started].gate = &gate;
        rc = pthread_create(&callers[started].thread, NULL, call, &callers[started]);
        if (rc) {
            rc = soak_fail(soak, -rc, "caller %" PRIu32 " could not be started: %s", started,
                           strerror(rc));
            break;
        }
    }
    set_gate(&gate, !rc);
    if (!rc) {
        callers[count - 1].gate = &gate;
        call(&callers[count - 1]);
        rc = callers[count - 1].rc;
    }
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(callers[i].thread, NULL);
        if (!rc)
            rc = callers[i].rc;
    }
    pthread_cond_destroy(&gate.opened);
    pthread_mutex_destroy(&gate.lock);
    return rc;
}

int soak_step_callers(struct soak *soak, struct soak_random *random)
{
    const uint32_t count = (uint32_t)soak_between(random, 2, SOAK_CALLERS);
    struct caller *callers = calloc(count, sizeof *callers);
    int rc = 0;

    if (!callers)
        return soak_fail(soak, -ENOMEM, "no memory for callers");
    for (uint32_t c = 0; c < count && !rc; c++)
        rc = prepare_caller(soak, random, &callers[c]);
    soak_doing(soak, "%" PRIu32 " callers at once", count);
    if (!rc)
        rc = run_callers(soak, callers, count);
    for (uint32_t c = 0; c < count && !rc; c++)
        for (uint32_t i = 0; i < callers[c].batch_count && !rc; i++) {
            struct soak_batch *b = &callers[c].batches[i];

            doing_batch(soak, "after callers", b);
            rc = soak_batch_check(soak, b);
            if (!rc)
                rc = repeat(soak, b, b->model->context, b->model->model,
                            "among other callers and alone");
        }
    for (uint32_t c = 0; c < count; c++)
        for (uint32_t i = 0; i < callers[c].batch_count; i++)
            soak_batch_free(&callers[c].batches[i]);
    free(callers);
    return rc;
}

/* ---- a second context ------------------------------------------------------------------------ */

/* Plans of one machine may differ when its free memory has changed: then bits may too. */
static bool same_plan(const struct numoe_model *a, const struct numoe_model *b)
{
    const struct numoe_plan *p = numoe_model_plan(a), *q = numoe_model_plan(b);

    if (p->node_count != q->node_count || p->shard_count != q->shard_count ||
        memcmp(p->shards, q->shards, p->shard_count * sizeof *p->shards) != 0 ||
        memcmp(p->cumulative, q->cumulative, (p->node_count + 1) * sizeof *p->cumulative) != 0)
        return false;
    for (uint32_t n = 0; n < p->node_count; n++)
        if (p->nodes[n].lanes != q->nodes[n].lanes || p->nodes[n].shard != q->nodes[n].shard ||
            p->nodes[n].worker_count != q->nodes[n].worker_count)
            return false;
    return true;
}

int soak_step_twin(struct soak *soak, struct soak_random *random, struct soak_model *model)
{
    const uint64_t batches = soak_between(random, 1, 3);
    struct numoe_model *copy = NULL;
    struct soak_context *twin;
    int rc = soak_context_open(soak, random, model->context, &twin), closed;

    if (rc)
        return rc;
    rc = soak_model_copy(soak, random, model, twin, &copy);
    for (uint64_t i = 0; i < batches && !rc && same_plan(model->model, copy); i++) {
        struct soak_batch b;

        rc = soak_batch_make(soak, random, model, &b);
        if (rc)
            break;
        doing_batch(soak, "twin", &b);
        rc = soak_batch_forward(soak, model->context, model->model, &b);
        if (!rc)
            rc = soak_batch_check(soak, &b);
        if (!rc)
            rc = repeat(soak, &b, twin, copy, "under other threads");
        soak_batch_free(&b);
    }
    numoe_model_destroy(copy);
    closed = soak_context_close(soak, twin);
    return rc ? rc : closed;
}
