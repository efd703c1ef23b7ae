/*
 * Batches of the soak: odd in every way that the interface allows, and made so that anything
 * written outside the outputs shows.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "soak_walk.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD_BYTES = 64, MOST_TOKENS = 300, MOST_CHECKED = 4 };

/* Multiply-adds of a call, so that a step takes no longer than others: plain C, other sets. */
#define COST_REF ((uint64_t)16 << 20)
#define COST_VECTOR ((uint64_t)128 << 20)
/* Weights that the reference decodes for one check. */
#define COST_CHECK ((uint64_t)3 << 20)

/* An output may be this many expected errors off (soak_expert.c says what is expected). With few
 * columns, errors have no more than a few causes and cannot pass it; with many they are normal. */
#define DEVIATION_MOST 7.0
/* Where numbers are so small that int8 groups count as zero and bf16 has few bits left. */
#define NOTHING 1e-31

static uint64_t choose_tokens(struct soak_random *random)
{
    switch (soak_below(random, 8)) {
    case 0:
        return soak_once(random, 2) ? 0 : 1;
    case 1:
    case 2:
    case 3:
        return soak_between(random, 1, 5);
    case 4:
    case 5:
        return soak_between(random, 1, 64);
    default:
        return soak_between(random, 1, MOST_TOKENS);
    }
}

static size_t type_bytes(enum numoe_type type)
{
    return type == NUMOE_BF16 ? 2 : 4;
}

static void put_value(void *array, uint64_t at, enum numoe_type type, float value)
{
    if (type == NUMOE_BF16)
        ((uint16_t *)array)[at] = soak_to_bf16(value);
    else
        ((float *)array)[at] = value;
}

static float get_value(const void *array, uint64_t at, enum numoe_type type)
{
    return type == NUMOE_BF16 ? soak_from_bf16(((const uint16_t *)array)[at])
                              : ((const float *)array)[at];
}

static int64_t get_id(const struct soak_batch *b, uint64_t at)
{
    return b->call.id_bytes == 8 ? ((const int64_t *)b->ids)[at] : ((const int32_t *)b->ids)[at];
}

static void put_id(struct soak_batch *b, uint64_t at, int64_t id)
{
    if (b->call.id_bytes == 8)
        ((int64_t *)b->ids)[at] = id;
    else
        ((int32_t *)b->ids)[at] = (int32_t)id;
}

static const struct soak_expert *expert_of(const struct soak_batch *b, uint64_t index)
{
    return &b->model->experts[b->layer * b->model->desc.experts + index];
}

/* Whether the id at a place is computed: an expert of the model, here, and loaded. */
static bool computed(const struct soak_batch *b, uint64_t at)
{
    const int64_t id = get_id(b, at);

    return id >= 0 && (uint64_t)id < b->model->desc.experts &&
           !(b->elsewhere && b->elsewhere[id]) && expert_of(b, (uint64_t)id)->present;
}

static void make_ids(struct soak_random *random, struct soak_batch *b)
{
    const uint64_t experts = b->model->desc.experts, k = b->call.top_k;
    /* all tokens to few experts, so that these get many */
    const uint64_t favourites = soak_once(random, 3) ? soak_between(random, 1, 2) : experts;
    const uint64_t first = soak_below(random, experts);
    const bool odd = soak_once(random, 2), wide = b->call.id_bytes == 8;

    for (uint64_t i = 0; i < b->call.tokens * k; i++) {
        int64_t id = (int64_t)((first + soak_below(random, favourites)) % experts);

        if (odd)
            switch (soak_below(random, 16)) {
            case 0:
                id = -1;
                break;
            case 1:
                id = wide ? INT64_MIN : INT32_MIN;
                break;
            case 2:
                if (!b->call.strict)
                    id = (int64_t)(experts + soak_below(random, 3));
                break;
            case 3:
                if (!b->call.strict)
                    id = wide ? INT64_MAX - (int64_t)soak_below(random, 2) : INT32_MAX;
                break;
            case 4:
                if (i % k)
                    id = get_id(b, i - 1);
                break;
            default:
                break;
            }
        put_id(b, i, id);
    }
    for (uint64_t i = 0; i < b->call.tokens * k; i++) {
        b->weights[i] = (float)(0.05 + soak_unit(random));
        if (soak_once(random, 8))
            b->weights[i] = -b->weights[i];
    }
}

static void make_inputs(struct soak_random *random, struct soak_batch *b)
{
    const uint64_t hidden = b->model->desc.hidden, stride = b->call.x_stride;
    /* sizes of models differ, and so do tokens */
    const float size = (float)exp2(soak_unit(random) * 8 - 5);

    for (uint64_t t = 0; t < b->call.tokens; t++)
        for (uint64_t i = 0; i < stride; i++)
            /* what is between the rows must not be looked at */
            put_value(b->x, t * stride + i, b->call.x_type,
                      i < hidden ? size * soak_normal(random) : NAN);
    if (b->nan_token != UINT64_MAX)
        put_value(b->x, b->nan_token * stride + soak_below(random, hidden), b->call.x_type, NAN);
}

static void make_outputs(struct soak_random *random, struct soak_batch *b)
{
    uint8_t *out = b->call.out;

    for (size_t i = 0; i < b->memory_bytes; i++)
        b->memory[i] = (uint8_t)(0xa0 + i % 31);
    for (uint64_t t = 0; t < b->call.tokens && b->call.add; t++)
        for (uint64_t i = 0; i < b->model->desc.hidden; i++)
            put_value(out, t * b->call.out_stride + i, b->call.out_type, soak_normal(random));
    memcpy(b->base, b->memory, b->memory_bytes);
}

/* What the call will have to report. */
static void expect(struct soak_batch *b)
{
    const uint64_t experts = b->model->desc.experts;

    b->want = (struct numoe_result)NUMOE_RESULT_INIT;
    for (uint64_t i = 0; i < b->call.tokens * b->call.top_k; i++) {
        const int64_t id = get_id(b, i);

        if (computed(b, i))
            b->want.pairs++;
        else if (id >= 0 && (uint64_t)id >= experts)
            b->want.skipped++;
        else if (id >= 0 && !(b->elsewhere && b->elsewhere[id]))
            b->want.missing++;
    }
    for (uint64_t e = 0; e < experts; e++)
        for (uint64_t i = 0; i < b->call.tokens * b->call.top_k; i++)
            if (get_id(b, i) == (int64_t)e && computed(b, i)) {
                b->want.experts_hit++;
                break;
            }
}

static void choose_checked(struct soak_random *random, struct soak_batch *b)
{
    const struct numoe_model_desc *d = &b->model->desc;
    const uint64_t k = b->call.top_k < d->experts ? b->call.top_k : d->experts;
    uint64_t count = COST_CHECK / (3 * k * d->hidden * d->intermediate);

    if (count < 1)
        count = 1;
    if (count > MOST_CHECKED)
        count = MOST_CHECKED;
    if (count > b->call.tokens)
        count = b->call.tokens;
    b->checked_count = (uint32_t)count;
    for (uint64_t i = 0; i < count; i++)
        b->checked[i] = soak_below(random, b->call.tokens);
}

/* A stride of the rows: dense by 0 or by its name, or with something between. */
static uint64_t choose_stride(struct soak_random *random, uint64_t hidden)
{
    return soak_once(random, 2) ? hidden : hidden + soak_below(random, 40);
}

int soak_batch_make(struct soak *soak, struct soak_random *random, struct soak_model *model,
                    struct soak_batch *b)
{
    const struct numoe_model_desc *d = &model->desc;
    const uint64_t cost = 3 * d->hidden * d->intermediate;
    const uint64_t most = strcmp(model->context->isa, "ref") != 0 ? COST_VECTOR : COST_REF;
    size_t out_bytes, shift;
    uint64_t k, tokens;

    *b = (struct soak_batch){.model = model, .call = NUMOE_BATCH_INIT, .nan_token = UINT64_MAX};
    b->layer = soak_below(random, d->layers);
    k = soak_once(random, 12) ? soak_between(random, 1, 64) : soak_between(random, 1, 8);
    tokens = choose_tokens(random);
    if (tokens * k * cost > most)
        tokens = most / (k * cost) + 1;
    b->call.tokens = tokens;
    b->call.top_k = k;
    b->call.x_type = soak_once(random, 2) ? NUMOE_BF16 : NUMOE_F32;
    b->call.out_type = soak_once(random, 2) ? NUMOE_BF16 : NUMOE_F32;
    b->call.id_bytes = soak_once(random, 2) ? 8 : 4;
    b->call.x_stride = choose_stride(random, d->hidden);
    b->call.out_stride = choose_stride(random, d->hidden);
    b->call.add = soak_once(random, 3);
    b->call.strict = soak_once(random, 6);
    b->call.scale = soak_once(random, 3) ? (float)(0.25 + 2 * soak_unit(random)) : 1.0f;
    if (tokens && soak_once(random, 12))
        b->nan_token = soak_below(random, tokens);
    shift = soak_below(random, 16) * type_bytes(b->call.out_type);
    out_bytes = tokens * b->call.out_stride * type_bytes(b->call.out_type);
    b->memory_bytes = GUARD_BYTES + shift + out_bytes + GUARD_BYTES;

    b->x = malloc(tokens * b->call.x_stride * type_bytes(b->call.x_type) + 1);
    b->ids = malloc(tokens * k * b->call.id_bytes + 1);
    b->weights = malloc(tokens * k * sizeof *b->weights + 1);
    b->memory = malloc(b->memory_bytes);
    b->base = malloc(b->memory_bytes);
    b->checked = calloc(MOST_CHECKED, sizeof *b->checked);
    if (soak_once(random, 4)) {
        b->elsewhere = malloc(d->experts);
        for (uint64_t e = 0; b->elsewhere && e < d->experts; e++)
            b->elsewhere[e] = (uint8_t)(soak_once(random, 3) ? soak_between(random, 1, 255) : 0);
        b->call.elsewhere = b->elsewhere;
    }
    if (!b->x || !b->ids || !b->weights || !b->memory || !b->base || !b->checked) {
        soak_batch_free(b);
        return soak_fail(soak, -ENOMEM, "no memory for a batch");
    }
    b->call.x = b->x;
    b->call.ids = b->ids;
    b->call.weights = b->weights;
    b->call.out = b->memory + GUARD_BYTES + shift;
    make_ids(random, b);
    make_inputs(random, b);
    make_outputs(random, b);
    expect(b);
    choose_checked(random, b);
    if (!tokens && soak_once(random, 2)) {
        b->call.x = b->call.ids = b->call.weights = NULL;
        b->call.out = NULL;
    }
    /* 0 says dense as well */
    if (b->call.x_stride == d->hidden && soak_once(random, 2))
        b->call.x_stride = 0;
    if (b->call.out_stride == d->hidden && soak_once(random, 2))
        b->call.out_stride = 0;
    return 0;
}

void soak_batch_free(struct soak_batch *b)
{
    free(b->x);
    free(b->ids);
    free(b->weights);
    free(b->elsewhere);
    free(b->memory);
    free(b->base);
    free(b->checked);
    *b = (struct soak_batch){0};
}

void soak_batch_reset(struct soak_batch *b)
{
    memcpy(b->memory, b->base, b->memory_bytes);
    b->have = (struct numoe_result)NUMOE_RESULT_INIT;
}

static uint64_t x_stride(const struct soak_batch *b)
{
    return b->call.x_stride ? b->call.x_stride : b->model->desc.hidden;
}

static uint64_t out_stride(const struct soak_batch *b)
{
    return b->call.out_stride ? b->call.out_stride : b->model->desc.hidden;
}

void soak_batch_computed(struct soak *soak, struct soak_context *context, struct soak_batch *b)
{
    const struct numoe_soak_hooks *hooks = soak->options.hooks;
    const struct numoe_soak_call call = {
        .tokens = b->call.tokens,
        .hidden = b->model->desc.hidden,
        .out_stride = out_stride(b),
        .out_type = b->call.out_type,
        .checked = b->checked,
        .checked_count = b->checked_count,
    };

    atomic_fetch_add(&context->calls, 1);
    atomic_fetch_add(&context->tokens, b->call.tokens);
    atomic_fetch_add(&context->pairs, b->want.pairs);
    atomic_fetch_add(&context->skipped, b->want.skipped);
    atomic_fetch_add(&context->missing, b->want.missing);
    pthread_mutex_lock(&soak->lock);
    soak->report.calls++;
    soak->report.tokens += b->call.tokens;
    soak->report.pairs += b->want.pairs;
    soak->report.gpu_tokens += b->have.gpu_tokens;
    pthread_mutex_unlock(&soak->lock);
    soak_beat(soak);
    if (hooks && hooks->computed)
        hooks->computed(hooks->user, &call, b->call.out);
}

int soak_batch_forward(struct soak *soak, struct soak_context *context, struct numoe_model *model,
                       struct soak_batch *b)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    int rc;

    soak_batch_reset(b);
    rc = numoe_forward(model, b->layer, &b->call, &b->have, &error);
    if (rc)
        return soak_fail_call(soak, "numoe_forward", rc, &error);
    soak_batch_computed(soak, context, b);
    return 0;
}

/* ---- checks ---------------------------------------------------------------------------------- */

static int check_counts(struct soak *soak, const struct soak_batch *b)
{
    const struct {
        const char *name;
        uint64_t want, have;
    } rows[] = {
        {"pairs", b->want.pairs, b->have.pairs},
        {"skipped", b->want.skipped, b->have.skipped},
        {"missing", b->want.missing, b->have.missing},
        {"experts_hit", b->want.experts_hit, b->have.experts_hit},
    };

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].want != rows[i].have)
            return soak_fail(soak, SOAK_WRONG,
                             "a call of %" PRIu64 " tokens, top %" PRIu64 " reports %s %" PRIu64
                             ", not %" PRIu64,
                             b->call.tokens, b->call.top_k, rows[i].name, rows[i].have,
                             rows[i].want);
    /* a GPU that was asked for and does nothing must not pass because the CPU is right */
    if (b->model->context->gpu && b->have.gpu_tokens != b->call.tokens) {
        struct numoe_model_info info = NUMOE_MODEL_INFO_INIT;
        numoe_model_info(b->model->model, &info);
        return soak_fail(soak, SOAK_WRONG, "the GPU computed %" PRIu64 " of %" PRIu64 " tokens: %s",
                         (uint64_t)b->have.gpu_tokens, b->call.tokens, info.gpu_note);
    }
    return 0;
}

/* Bytes [from, to) of the outputs' memory are what they were. */
static int check_untouched(struct soak *soak, const struct soak_batch *b, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++)
        if (b->memory[i] != b->base[i])
            return soak_fail(soak, SOAK_WRONG,
                             "a call of %" PRIu64 " tokens wrote outside of its outputs: byte %zu "
                             "of %zu, the first being %zu",
                             b->call.tokens, i, b->memory_bytes,
                             b->call.out ? (size_t)((uint8_t *)b->call.out - b->memory) : 0);
    return 0;
}

static int check_guards(struct soak *soak, const struct soak_batch *b)
{
    const size_t unit = type_bytes(b->call.out_type);
    size_t at = 0;
    int rc = 0;

    for (uint64_t t = 0; t < b->call.tokens && !rc; t++) {
        const size_t row = (size_t)((uint8_t *)b->call.out - b->memory) + t * out_stride(b) * unit;

        rc = check_untouched(soak, b, at, row);
        at = row + b->model->desc.hidden * unit;
    }
    return rc ? rc : check_untouched(soak, b, at, b->memory_bytes);
}

/* A token of which an input is no number: neither is any output, if anything was computed. */
static int check_nan(struct soak *soak, const struct soak_batch *b)
{
    const uint64_t t = b->nan_token;
    bool any = false;

    for (uint64_t j = 0; j < b->call.top_k; j++)
        any = any || computed(b, t * b->call.top_k + j);
    for (uint64_t i = 0; i < b->model->desc.hidden && any; i++) {
        const float have = get_value(b->call.out, t * out_stride(b) + i, b->call.out_type);

        if (isfinite(have))
            return soak_fail(soak, SOAK_WRONG,
                             "output %" PRIu64 " of token %" PRIu64
                             ", whose input holds a NaN, is %g",
                             i, t, (double)have);
    }
    return 0;
}

/* want and variance of a token from the sources of its experts. */
static int reference(const struct soak_batch *b, uint64_t t, float *x, double *want,
                     double *variance)
{
    const struct numoe_model_desc *d = &b->model->desc;
    const uint64_t k = b->call.top_k;

    memset(want, 0, d->hidden * sizeof *want);
    memset(variance, 0, d->hidden * sizeof *variance);
    for (uint64_t i = 0; i < d->hidden; i++)
        x[i] = get_value(b->x, t * x_stride(b) + i, b->call.x_type);
    for (uint64_t j = 0; j < k; j++) {
        const int64_t id = get_id(b, t * k + j);
        double factor = 0;
        bool before = false;
        int rc;

        if (!computed(b, t * k + j))
            continue;
        for (uint64_t i = 0; i < k; i++)
            if (get_id(b, t * k + i) == id) {
                before = before || i < j;
                factor += (double)b->weights[t * k + i];
            }
        if (before)
            continue;
        rc = soak_expert_apply(expert_of(b, (uint64_t)id), &d->activation, d->arithmetic, x,
                               factor * (double)b->call.scale, want, variance);
        if (rc)
            return rc;
    }
    return 0;
}

/* Sums over the checked tokens of a batch. */
struct judged {
    double off, size; /* squares */
    double deviation; /* the largest */
};

static int judge(struct soak *soak, const struct soak_batch *b, uint64_t t, const double *want,
                 const double *variance, struct judged *judged)
{
    const uint64_t out = (uint64_t)((const uint8_t *)b->call.out - b->memory);
    const struct numoe_model_desc *d = &b->model->desc;

    for (uint64_t i = 0; i < d->hidden; i++) {
        const uint64_t at = t * out_stride(b) + i;
        const double have = (double)get_value(b->call.out, at, b->call.out_type);
        const double sum =
            want[i] + (b->call.add ? (double)get_value(b->base + out, at, b->call.out_type) : 0);
        /* rounding to bf16, and fp32 everywhere */
        const double round = fabs(sum) * (b->call.out_type == NUMOE_BF16 ? 0x1p-8 : 0x1p-22);
        const double expected = sqrt(variance[i]) + round + NOTHING, off = fabs(have - sum);

        if (!(off <= DEVIATION_MOST * expected))
            return soak_fail(soak, SOAK_WRONG,
                             "%s: layer %" PRIu64 " of %" PRIu64 " experts %" PRIu64 " x %" PRIu64
                             ", token %" PRIu64 " of %" PRIu64 ", top %" PRIu64 ", output %" PRIu64
                             " is %.9g where %.9g was expected within %.2g",
                             numoe_model_kernels(b->model->model)->name, b->layer, d->experts,
                             d->hidden, d->intermediate, t, b->call.tokens, b->call.top_k, i, have,
                             sum, DEVIATION_MOST * expected);
        judged->deviation = fmax(judged->deviation, off / expected);
        judged->off += off * off;
        judged->size += sum * sum;
    }
    return 0;
}

static int check_tokens(struct soak *soak, const struct soak_batch *b)
{
    const uint64_t hidden = b->model->desc.hidden;
    double *want = malloc(2 * hidden * sizeof *want);
    float *x = malloc(hidden * sizeof *x);
    struct judged judged = {0, 0, 0};
    int rc = want && x ? 0 : -ENOMEM;

    for (uint32_t i = 0; i < b->checked_count && !rc; i++) {
        if (b->checked[i] == b->nan_token)
            continue;
        rc = reference(b, b->checked[i], x, want, want + hidden);
        if (!rc)
            rc = judge(soak, b, b->checked[i], want, want + hidden, &judged);
        soak_beat(soak);
    }
    if (rc == -ENOMEM)
        soak_fail(soak, rc, "no memory for a check");
    free(want);
    free(x);
    if (rc)
        return rc;
    pthread_mutex_lock(&soak->lock);
    soak->report.checks++;
    soak->report.checked_tokens += b->checked_count;
    soak->report.worst_deviation = fmax(soak->report.worst_deviation, judged.deviation);
    if (judged.size > 0 && hidden >= 64 && b->model->desc.intermediate >= 64)
        soak->report.worst_rel_l2 = fmax(soak->report.worst_rel_l2, sqrt(judged.off / judged.size));
    pthread_mutex_unlock(&soak->lock);
    return 0;
}

int soak_batch_check(struct soak *soak, struct soak_batch *b)
{
    int rc = check_counts(soak, b);

    if (!rc)
        rc = check_guards(soak, b);
    if (!rc && b->nan_token != UINT64_MAX)
        rc = check_nan(soak, b);
    return rc ? rc : check_tokens(soak, b);
}

uint8_t *soak_batch_keep(struct soak *soak, struct soak_batch *b)
{
    uint8_t *kept = malloc(b->memory_bytes);

    if (!kept)
        soak_fail(soak, -ENOMEM, "no memory for outputs");
    else
        memcpy(kept, b->memory, b->memory_bytes);
    b->kept_gpu_tokens = b->have.gpu_tokens;
    return kept;
}

int soak_batch_compare(struct soak *soak, const struct soak_batch *b, const uint8_t *kept,
                       const char *otherwise)
{
    const struct numoe_model_desc *d = &b->model->desc;
    size_t at = 0;

    /* CPU and GPU agree within rounding, which the reference has judged */
    if (b->have.gpu_tokens != b->kept_gpu_tokens)
        return 0;
    if (!memcmp(b->memory, kept, b->memory_bytes)) {
        pthread_mutex_lock(&soak->lock);
        soak->report.repeats++;
        pthread_mutex_unlock(&soak->lock);
        return 0;
    }
    while (b->memory[at] == kept[at])
        at++;
    return soak_fail(
        soak, SOAK_WRONG,
        "%s: layer %" PRIu64 " of %" PRIu64 " experts %" PRIu64 " x %" PRIu64 ", %" PRIu64
        " tokens, top %" PRIu64 " %s gives other bits, first in byte %zu of %zu",
        numoe_model_kernels(b->model->model)->name, b->layer, d->experts, d->hidden,
        d->intermediate, b->call.tokens, b->call.top_k, otherwise, at, b->memory_bytes);
}
