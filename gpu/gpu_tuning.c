/*
 * Which form of the kernels computes a call: what a table of times says, made by
 * `numoe bench --gpu --tune`.
 *
 * The shape of the table that is nearest to the call's, and at its tokens of an expert the form of
 * the least time among those that the device has: so a device without wgmma, or a form that has
 * failed, needs no table of its own.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <math.h>

#include "gpu_internal.h"

#include "gpu_tuning_table.h"

const char *const numoe_gpu_form_names[NUMOE_GPU_FORMS + 2] = {
    "chosen", "8", "32", "64", "wgmma32", "wgmma64", "wgmma128", NULL,
};

/* The forms that fit into 99 KiB of shared memory and need nothing of one architecture. */
static const uint32_t everywhere[] = {NUMOE_CUDA_8, NUMOE_CUDA_32, NUMOE_CUDA_64};

enum { EVERYWHERE = sizeof everywhere / sizeof everywhere[0] };

_Static_assert((int)NUMOE_GPU_FORMS == (int)NUMOE_CUDA_FORMS, "a name for each form");

const struct numoe_gpu_tuning *numoe_gpu_tuning_builtin(void)
{
    return &builtin;
}

static int check_point(const struct numoe_gpu_tuned_shape *s, uint32_t i, const char *where,
                       struct numoe_error *error)
{
    const struct numoe_gpu_tuned_point *p = &s->points[i];

    if (!(p->tokens > 0) || !isfinite(p->tokens))
        return numoe_error_set(
            error, -EINVAL, where, "point %u of shape %llu x %llu: %g tokens of an expert", i + 1,
            (unsigned long long)s->hidden, (unsigned long long)s->intermediate, p->tokens);
    if (i && p->tokens <= p[-1].tokens)
        return numoe_error_set(error, -EINVAL, where,
                               "points of shape %llu x %llu do not ascend: %g tokens of an expert "
                               "follow %g",
                               (unsigned long long)s->hidden, (unsigned long long)s->intermediate,
                               p->tokens, p[-1].tokens);
    for (uint32_t f = 1; f <= NUMOE_GPU_FORMS; f++)
        if (!(p->ms[f] >= 0) || !isfinite(p->ms[f]))
            return numoe_error_set(error, -EINVAL, where,
                                   "form %s takes %g ms at %g tokens of an expert of shape %llu x "
                                   "%llu",
                                   numoe_gpu_form_names[f], p->ms[f], p->tokens,
                                   (unsigned long long)s->hidden,
                                   (unsigned long long)s->intermediate);
    for (int i_form = 0; i_form < EVERYWHERE; i_form++)
        if (!(p->ms[everywhere[i_form]] > 0))
            return numoe_error_set(error, -EINVAL, where,
                                   "no time of form %s at %g tokens of an expert of shape %llu x "
                                   "%llu: devices of 99 KiB of shared memory need all that they "
                                   "have",
                                   numoe_gpu_form_names[everywhere[i_form]], p->tokens,
                                   (unsigned long long)s->hidden,
                                   (unsigned long long)s->intermediate);
    return 0;
}

int numoe_gpu_tuning_check(const struct numoe_gpu_tuning *t, const char *where,
                           struct numoe_error *error)
{
    int rc = 0;

    if (t->shape_count < 1 || t->shape_count > NUMOE_GPU_TUNED_SHAPES)
        return numoe_error_set(error, -EINVAL, where, "%u shapes are not 1 to %d", t->shape_count,
                               NUMOE_GPU_TUNED_SHAPES);
    for (uint32_t i = 0; !rc && i < t->shape_count; i++) {
        const struct numoe_gpu_tuned_shape *s = &t->shapes[i];
        if (!s->hidden || !s->intermediate)
            return numoe_error_set(error, -EINVAL, where, "shape %u is %llu x %llu", i + 1,
                                   (unsigned long long)s->hidden,
                                   (unsigned long long)s->intermediate);
        for (uint32_t j = 0; j < i; j++)
            if (s->hidden == t->shapes[j].hidden && s->intermediate == t->shapes[j].intermediate)
                return numoe_error_set(error, -EINVAL, where, "shape %llu x %llu is there twice",
                                       (unsigned long long)s->hidden,
                                       (unsigned long long)s->intermediate);
        if (s->point_count < 1 || s->point_count > NUMOE_GPU_TUNED_POINTS)
            return numoe_error_set(error, -EINVAL, where,
                                   "%u points of shape %llu x %llu are not 1 to %d", s->point_count,
                                   (unsigned long long)s->hidden,
                                   (unsigned long long)s->intermediate, NUMOE_GPU_TUNED_POINTS);
        for (uint32_t p = 0; !rc && p < s->point_count; p++)
            rc = check_point(s, p, where, error);
    }
    return rc;
}

struct numoe_gpu_numbers numoe_gpu_numbers(const struct numoe_gpu_properties *p)
{
    return (struct numoe_gpu_numbers){
        .major = p->major,
        .minor = p->minor,
        .multiprocessors = p->multiprocessors,
        .shared_bytes = p->shared_bytes,
        .l2_bytes = p->l2_bytes,
    };
}

int numoe_gpu_tuning_fits(const struct numoe_gpu_tuning *t, const struct numoe_gpu_numbers *n,
                          const char *where, struct numoe_error *error)
{
    const struct numoe_gpu_numbers *d = &t->device;
    const struct {
        const char *what;
        unsigned long long there, here;
    } numbers[] = {
        {"multiprocessors", d->multiprocessors, n->multiprocessors},
        {"bytes of shared memory that a block may have", d->shared_bytes, n->shared_bytes},
        {"bytes of L2", d->l2_bytes, n->l2_bytes},
    };

    if (d->major != n->major || d->minor != n->minor)
        return numoe_error_set(error, -EINVAL, where,
                               "made on a device of compute capability %d.%d, and this one has "
                               "%d.%d; numoe bench --gpu --tune FILE makes one for it",
                               d->major, d->minor, n->major, n->minor);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (numbers[i].there != numbers[i].here)
            return numoe_error_set(error, -EINVAL, where,
                                   "made on a device of %llu %s, and this one has %llu; numoe "
                                   "bench --gpu --tune FILE makes one for it",
                                   numbers[i].there, numbers[i].what, numbers[i].here);
    return 0;
}

static double distance(const struct numoe_gpu_tuned_shape *s, uint64_t hidden,
                       uint64_t intermediate)
{
    return fabs(log((double)hidden / (double)s->hidden)) +
           fabs(log((double)intermediate / (double)s->intermediate));
}

/* Of a form at so many tokens of an expert, on the line between the points beside; 0: not known. */
static double time_at(const struct numoe_gpu_tuned_shape *s, uint32_t form, double tokens)
{
    const struct numoe_gpu_tuned_point *const p = s->points;
    uint32_t i = 0;

    while (i + 2 < s->point_count && tokens > p[i + 1].tokens)
        i++;
    if (s->point_count == 1 || tokens <= p[0].tokens)
        return p[0].ms[form];
    const double from = p[i].ms[form], to = p[i + 1].ms[form];
    if (!(from > 0) || !(to > 0))
        return 0;
    if (tokens >= p[i + 1].tokens) /* past the last */
        return to;
    return from + (to - from) * (tokens - p[i].tokens) / (p[i + 1].tokens - p[i].tokens);
}

uint32_t numoe_gpu_tuning_choose(const struct numoe_gpu_tuning *t, uint32_t forms, uint64_t hidden,
                                 uint64_t intermediate, double tokens)
{
    const struct numoe_gpu_tuned_shape *s = &t->shapes[0];
    uint32_t best = 0, any = 0;
    double least = 0;

    for (uint32_t i = 1; i < t->shape_count; i++)
        if (distance(&t->shapes[i], hidden, intermediate) < distance(s, hidden, intermediate))
            s = &t->shapes[i];
    for (uint32_t f = 1; f <= NUMOE_GPU_FORMS; f++) {
        if (!(forms >> f & 1))
            continue;
        const double ms = time_at(s, f, tokens);
        any = f;
        if (ms > 0 && (!best || ms < least)) {
            best = f;
            least = ms;
        }
    }
    return best ? best : any;
}

int numoe_gpu_use_tuning(struct numoe_gpu *gpu, const struct numoe_gpu_tuning *t, const char *where,
                         struct numoe_error *error)
{
    const struct numoe_gpu_numbers numbers = numoe_gpu_numbers(&gpu->properties);
    int rc = numoe_gpu_tuning_check(t, where, error);

    if (!rc)
        rc = numoe_gpu_tuning_fits(t, &numbers, where, error);
    if (!rc)
        gpu->tuning = *t;
    return rc;
}

const struct numoe_gpu_tuning *numoe_gpu_tuned(const struct numoe_gpu *gpu)
{
    return &gpu->tuning;
}

/* ---- forms of a device ----------------------------------------------------------------------- */

uint32_t gpu_forms_there(const struct gpu_ops *ops, void *device)
{
    struct numoe_cuda_ffn ffn = {
        .slices = 1, .experts = 1, .tokens = 1, .top_k = 1, .x_type = NUMOE_F32, .x_stride = 32};
    uint32_t forms = 0;

    if (numoe_slice_shape_init(&ffn.shape, 32, false))
        return 0;
    for (uint32_t f = 1; f <= NUMOE_GPU_FORMS; f++) {
        ffn.form = (enum numoe_cuda_form)f;
        if (ops->workspace_bytes(device, &ffn))
            forms |= 1u << f;
    }
    return forms;
}

uint32_t numoe_gpu_forms(const struct numoe_gpu *gpu)
{
    return gpu->forms & ~gpu->forms_off;
}

enum numoe_cuda_form gpu_choose_form(const struct numoe_gpu *gpu, const struct numoe_cuda_ffn *ffn)
{
    const double pairs = (double)ffn->tokens * ffn->top_k;

    return (enum numoe_cuda_form)numoe_gpu_tuning_choose(
        &gpu->tuning, numoe_gpu_forms(gpu), ffn->shape.hidden, 32ull * ffn->slices,
        ffn->experts ? pairs / ffn->experts : pairs);
}
