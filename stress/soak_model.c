/*
 * Models of the soak: of random shapes from memory, and checkpoints written for the purpose. The
 * source of every expert is kept beside the model, so that results and stored weights can be told
 * from bytes that the library never saw.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "checkpoint.h"
#include "files.h"
#include "soak_walk.h"
#include "synth.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const uint64_t widths[] = {1,  2,  31,  32,  33,  63,  64,  65, 70,
                                  96, 97, 127, 128, 130, 191, 256, 289};

enum { WIDTHS = sizeof widths / sizeof widths[0], WIDEST = 320, MOST_EXPERTS = 9 };
/* Codes of all experts of a model. */
#define MOST_CODES ((uint64_t)3 << 20)
/* As many slices as thirty-two nodes can all have some of, and more. */
#define WIDE_INTERMEDIATE 1100

static uint64_t choose_width(struct soak_random *random)
{
    return soak_once(random, 2) ? widths[soak_below(random, WIDTHS)]
                                : soak_between(random, 1, WIDEST);
}

static void choose_activation(struct soak_random *random, struct numoe_activation *a)
{
    *a = (struct numoe_activation){
        .kind = (enum numoe_activation_kind)soak_between(random, NUMOE_SILU, NUMOE_SITU)};
    switch (a->kind) {
    case NUMOE_SILU:
        break;
    case NUMOE_SWIGLU_OAI:
        a->alpha = soak_once(random, 2) ? 1.702f : (float)(0.25 + 2 * soak_unit(random));
        a->limit = soak_once(random, 2) ? 7.0f : (float)(0.5 + 9 * soak_unit(random));
        break;
    case NUMOE_SILU_CLAMPED:
        a->limit = soak_once(random, 2) ? 10.0f : (float)(0.5 + 9 * soak_unit(random));
        break;
    case NUMOE_SITU:
        a->gate_cap = soak_once(random, 2) ? 4.0f : (float)(0.5 + 9 * soak_unit(random));
        a->up_cap = soak_once(random, 3) ? 0.0f : (float)(0.5 + 30 * soak_unit(random));
        break;
    }
}

void soak_desc_make(struct soak_random *random, struct numoe_model_desc *desc)
{
    *desc = (struct numoe_model_desc)NUMOE_MODEL_DESC_INIT;
    desc->layers = soak_between(random, 1, 3);
    desc->experts = soak_once(random, 8) ? soak_between(random, 10, 200)
                                         : soak_between(random, 1, MOST_EXPERTS);
    desc->hidden = choose_width(random);
    desc->intermediate = soak_once(random, 6) ? soak_between(random, WIDEST, WIDE_INTERMEDIATE)
                                              : choose_width(random);
    while (desc->layers * desc->experts * 3 * desc->hidden * desc->intermediate > MOST_CODES) {
        if (desc->layers > 1)
            desc->layers--;
        else if (desc->experts > 4)
            desc->experts /= 2;
        else
            desc->hidden = (desc->hidden + 1) / 2;
    }
    desc->experts_per_token = soak_between(random, 1, desc->experts < 8 ? desc->experts : 8);
    desc->bias = soak_once(random, 2);
    desc->arithmetic = soak_once(random, 2) ? NUMOE_EXACT : NUMOE_FAST;
    choose_activation(random, &desc->activation);
}

static uint64_t expert_count(const struct numoe_model_desc *desc)
{
    return desc->layers * desc->experts;
}

static struct soak_model *model_new(struct soak_context *context,
                                    const struct numoe_model_desc *desc)
{
    struct soak_model *model = calloc(1, sizeof *model);

    if (!model)
        return NULL;
    model->context = context;
    model->desc = *desc;
    model->experts = calloc(expert_count(desc), sizeof *model->experts);
    if (!model->experts) {
        free(model);
        return NULL;
    }
    return model;
}

void soak_model_free(struct soak_model *model)
{
    if (!model)
        return;
    numoe_model_destroy(model->model);
    for (uint64_t q = 0; q < expert_count(&model->desc); q++)
        soak_expert_free(&model->experts[q]);
    soak_folder_drop(model->folder);
    free(model->experts);
    free(model);
}

static int load_expert(struct soak *soak, struct numoe_model *model,
                       const struct numoe_model_desc *desc, uint64_t q,
                       const struct soak_expert *expert)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_expert_weights weights;
    int rc;

    soak_expert_weights(expert, &weights);
    rc = numoe_expert_load(model, q / desc->experts, q % desc->experts, &weights, &error);
    soak_beat(soak);
    return rc ? soak_fail_call(soak, "numoe_expert_load", rc, &error) : 0;
}

/* What numoe_model_info says is what was asked for. */
static int check_info(struct soak *soak, const struct soak_model *model)
{
    struct numoe_model_info info = {.size = sizeof info};
    const struct numoe_model_desc *d = &model->desc;
    int rc = numoe_model_info(model->model, &info);

    if (rc)
        return soak_fail_call(soak, "numoe_model_info", rc, NULL);
    if (info.desc.layers != d->layers || info.desc.experts != d->experts ||
        info.desc.hidden != d->hidden || info.desc.intermediate != d->intermediate ||
        info.desc.bias != d->bias || info.desc.arithmetic != d->arithmetic ||
        info.desc.activation.kind != d->activation.kind)
        return soak_fail(soak, SOAK_WRONG, "a model describes itself as another one");
    if (info.resident_bytes < info.expert_bytes * expert_count(d))
        return soak_fail(soak, SOAK_WRONG,
                         "%" PRIu64 " experts of %" PRIu64 " bytes are held in %" PRIu64,
                         expert_count(d), info.expert_bytes, info.resident_bytes);
    return 0;
}

int soak_model_create(struct soak *soak, struct soak_random *random, struct soak_context *context,
                      const struct numoe_model_desc *desc, struct soak_model **out)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct soak_model *model = model_new(context, desc);
    /* in some models an expert in eight is left out */
    const bool gaps = soak_once(random, 3);
    int rc;

    if (!model)
        return soak_fail(soak, -ENOMEM, "no memory for a model");
    rc = numoe_model_create(context->numoe, desc, &model->model, &error);
    if (rc) {
        soak_fail_call(soak, "numoe_model_create", rc, &error);
        goto fail;
    }
    for (uint64_t q = 0; q < expert_count(desc); q++) {
        if (gaps && soak_once(random, 8))
            continue;
        rc = soak_expert_make(&model->experts[q], desc, random);
        if (rc) {
            soak_fail(soak, rc, "no memory for an expert");
            goto fail;
        }
        rc = load_expert(soak, model->model, desc, q, &model->experts[q]);
        if (rc)
            goto fail;
        model->experts[q].present = true;
    }
    rc = check_info(soak, model);
    if (rc)
        goto fail;
    *out = model;
    return 0;
fail:
    soak_model_free(model);
    return rc;
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

void soak_folder_drop(char *folder)
{
    DIR *directory = folder ? opendir(folder) : NULL;
    struct dirent *entry;

    while (directory && (entry = readdir(directory)))
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            unlinkat(dirfd(directory), entry->d_name, 0);
    if (directory)
        closedir(directory);
    if (folder)
        rmdir(folder);
    free(folder);
}

int soak_folder_make(struct soak *soak, struct soak_random *random, char **out)
{
    static const char *const names[] = {"v4-flash", "v4-pro", "kimi-k3"};
    struct numoe_synth_options options = NUMOE_SYNTH_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    char *folder;
    int rc;

    options.model = names[soak_below(random, sizeof names / sizeof names[0])];
    options.layers = soak_between(random, 1, 2);
    options.experts = soak_between(random, 1, 8);
    options.hidden = 32 * soak_between(random, 1, 8);
    options.intermediate = 32 * soak_between(random, 1, 10);
    options.seed = soak_next(random);
    options.shard_bytes = soak_between(random, 20000, 1000000);
    if (asprintf(&folder, "%s/%" PRIu64, soak->scratch, ++soak->folders) < 0) {
        soak_fail(soak, -ENOMEM, "no memory for a name");
        return -ENOMEM;
    }
    soak_doing(soak, "writing a checkpoint like %s", options.model);
    rc = numoe_synth_write(folder, &options, &error);
    if (rc) {
        soak_folder_drop(folder);
        soak_fail_call(soak, "numoe_synth_write", rc, &error);
        return rc;
    }
    *out = folder;
    return 0;
}

/* An expert's six tensors as the files hold them; models written for the soak have no biases. */
static int read_expert(struct soak *soak, const struct numoe_checkpoint *checkpoint, uint64_t layer,
                       uint64_t index, struct soak_expert *expert)
{
    const struct numoe_model_desc *desc = numoe_checkpoint_desc(checkpoint);
    struct numoe_extent parts[NUMOE_PART_COUNT];
    uint64_t bytes = 0, at = 0;

    numoe_checkpoint_expert(checkpoint, layer, index, parts);
    for (int p = 0; p < NUMOE_PART_GATE_BIAS; p++)
        bytes += parts[p].bytes;
    *expert = (struct soak_expert){.hidden = desc->hidden, .intermediate = desc->intermediate};
    expert->bytes = malloc(bytes);
    if (!expert->bytes)
        return soak_fail(soak, -ENOMEM, "no memory for an expert");
    for (int p = 0; p < NUMOE_PART_GATE_BIAS; p++) {
        struct numoe_error error = NUMOE_ERROR_INIT;
        const uint64_t columns = p / 2 == NUMOE_DOWN ? desc->intermediate : desc->hidden;
        struct numoe_mxfp4 *matrix = &expert->matrices[p / 2];
        const char *path = numoe_checkpoint_file(checkpoint, parts[p].file, NULL);
        struct numoe_file_id id;
        int fd = numoe_file_open(path, &id, &error), rc;

        if (fd < 0)
            return soak_fail_call(soak, "numoe_file_open", fd, &error);
        rc = numoe_file_read(fd, path, expert->bytes + at, parts[p].bytes, parts[p].offset, &error);
        close(fd);
        if (rc)
            return soak_fail_call(soak, "numoe_file_read", rc, &error);
        if (p % 2 == 0) {
            matrix->codes = expert->bytes + at;
            matrix->code_stride = columns / 2;
            matrix->code_step = 16;
            matrix->nibbles = NUMOE_NIBBLES_ADJACENT;
        } else {
            matrix->scales = expert->bytes + at;
            matrix->scale_stride = columns / 32;
            matrix->scale_step = 1;
        }
        at += parts[p].bytes;
    }
    expert->present = true;
    return 0;
}

static int read_experts(struct soak *soak, const char *folder, struct soak_context *context,
                        struct soak_model **out)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_checkpoint *checkpoint;
    const struct numoe_model_desc *desc;
    struct soak_model *model;
    int rc = numoe_checkpoint_open(folder, NULL, &checkpoint, &error);

    if (rc) {
        soak_fail_call(soak, "numoe_checkpoint_open", rc, &error);
        return rc;
    }
    desc = numoe_checkpoint_desc(checkpoint);
    model = model_new(context, desc);
    if (!model) {
        rc = -ENOMEM;
        soak_fail(soak, rc, "no memory for a model");
    }
    for (uint64_t q = 0; !rc && q < expert_count(desc); q++)
        rc =
            read_expert(soak, checkpoint, q / desc->experts, q % desc->experts, &model->experts[q]);
    numoe_checkpoint_close(checkpoint);
    if (rc)
        soak_model_free(model);
    else
        *out = model;
    return rc;
}

static int load_folder(struct soak *soak, const char *folder, struct soak_context *context,
                       enum numoe_arithmetic arithmetic, struct numoe_model **model)
{
    struct numoe_load_options options = NUMOE_LOAD_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    int rc;

    options.arithmetic = arithmetic;
    rc = numoe_model_load(context->numoe, folder, &options, model, &error);
    return rc ? soak_fail_call(soak, "numoe_model_load", rc, &error) : 0;
}

int soak_model_load(struct soak *soak, struct soak_random *random, struct soak_context *context,
                    struct soak_model **out)
{
    const enum numoe_arithmetic arithmetic = soak_once(random, 2) ? NUMOE_EXACT : NUMOE_FAST;
    struct soak_model *model;
    char *folder;
    int rc = soak_folder_make(soak, random, &folder);

    if (rc)
        return rc;
    rc = read_experts(soak, folder, context, &model);
    if (rc) {
        soak_folder_drop(folder);
        return rc;
    }
    model->folder = folder;
    model->desc.arithmetic = arithmetic;
    soak_doing(soak, "loading a checkpoint of %" PRIu64 " experts, %" PRIu64 " x %" PRIu64,
               expert_count(&model->desc), model->desc.hidden, model->desc.intermediate);
    rc = load_folder(soak, folder, context, arithmetic, &model->model);
    if (!rc)
        rc = check_info(soak, model);
    if (rc)
        soak_model_free(model);
    else
        *out = model;
    return rc;
}

/* ---- more of a model ------------------------------------------------------------------------- */

int soak_model_copy(struct soak *soak, struct soak_random *random, const struct soak_model *from,
                    struct soak_context *context, struct numoe_model **out)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *model = NULL;
    int rc;

    /* experts of a file may as well come from memory */
    if (from->folder && !from->changed && soak_once(random, 2))
        return load_folder(soak, from->folder, context, from->desc.arithmetic, out);
    rc = numoe_model_create(context->numoe, &from->desc, &model, &error);
    if (rc)
        return soak_fail_call(soak, "numoe_model_create", rc, &error);
    for (uint64_t q = 0; !rc && q < expert_count(&from->desc); q++)
        if (from->experts[q].present)
            rc = load_expert(soak, model, &from->desc, q, &from->experts[q]);
    if (rc)
        numoe_model_destroy(model);
    else
        *out = model;
    return rc;
}

/* Put the one scale byte that is no number somewhere. */
static void spoil(struct soak_random *random, struct soak_expert *expert)
{
    const unsigned matrix = (unsigned)soak_below(random, 3);
    const uint64_t rows = matrix == NUMOE_DOWN ? expert->hidden : expert->intermediate;
    const uint64_t columns = matrix == NUMOE_DOWN ? expert->intermediate : expert->hidden;
    const struct numoe_mxfp4 *m = &expert->matrices[matrix];
    const uint64_t at = soak_below(random, rows) * m->scale_stride +
                        soak_below(random, (columns + 31) / 32) * m->scale_step;

    *(uint8_t *)(uintptr_t)(m->scales + at) = 255;
}

int soak_model_replace(struct soak *soak, struct soak_random *random, struct soak_model *model)
{
    const uint64_t q = soak_below(random, expert_count(&model->desc));
    const bool spoilt = soak_once(random, 5);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_expert_weights weights;
    struct soak_expert expert;
    int rc = soak_expert_make(&expert, &model->desc, random);

    if (rc)
        return soak_fail(soak, rc, "no memory for an expert");
    if (spoilt)
        spoil(random, &expert);
    soak_doing(soak, "replacing expert %" PRIu64 " of layer %" PRIu64 "%s", q % model->desc.experts,
               q / model->desc.experts, spoilt ? " by one with a NaN" : "");
    soak_expert_weights(&expert, &weights);
    model->changed = true;
    rc = numoe_expert_load(model->model, q / model->desc.experts, q % model->desc.experts, &weights,
                           &error);
    if (rc != (spoilt ? -EDOM : 0)) {
        soak_expert_free(&expert);
        return soak_fail(soak, SOAK_WRONG, "numoe_expert_load of an expert %s returned %d: %s",
                         spoilt ? "with a NaN" : "of numbers", rc, error.message);
    }
    soak_expert_free(&model->experts[q]);
    if (spoilt)
        soak_expert_free(&expert);
    expert.present = !spoilt;
    model->experts[q] = expert;
    return 0;
}

/* Random weights of a run of slices against the source. */
static int inspect_run(struct soak *soak, struct soak_random *random,
                       const struct soak_model *model, uint64_t q, const uint8_t *run,
                       uint64_t first, uint64_t count)
{
    enum { SAMPLES = 32 };
    const struct numoe_slice_shape *shape = numoe_model_shape(model->model);
    const struct soak_expert *source = &model->experts[q];
    const uint64_t H = source->hidden, I = source->intermediate, wide = 32 * shape->hidden_tiles;

    for (int i = 0; i < SAMPLES; i++) {
        const uint64_t s = soak_below(random, count);
        const unsigned m = (unsigned)soak_below(random, 3);
        const uint64_t r = soak_below(random, m == NUMOE_DOWN ? wide : 32);
        const uint64_t k = soak_below(random, m == NUMOE_DOWN ? 32 : wide);
        const uint64_t row = m == NUMOE_DOWN ? r : 32 * (first + s) + r;
        const uint64_t column = m == NUMOE_DOWN ? 32 * (first + s) + k : k;
        unsigned code, scale, want_code = 0, want_scale;

        numoe_slice_weight(shape, run + s * shape->bytes, (enum numoe_matrix)m, r, k, &code,
                           &scale);
        want_scale = scale; /* padding is zeros, whatever its scale */
        if (row < (m == NUMOE_DOWN ? H : I) && column < (m == NUMOE_DOWN ? I : H))
            soak_expert_code(source, m, row, column, &want_code, &want_scale);
        if (code != want_code || scale != want_scale)
            return soak_fail(soak, SOAK_WRONG,
                             "layer %" PRIu64 ", expert %" PRIu64 ", matrix %u, row %" PRIu64
                             ", column %" PRIu64
                             " is stored as code %u scale %u, not code %u scale %u",
                             q / model->desc.experts, q % model->desc.experts, m, row, column, code,
                             scale, want_code, want_scale);
    }
    return 0;
}

static int compare_references(struct soak *soak, const struct soak_model *model, uint64_t q,
                              const double *stored, const double *want, const double *variance)
{
    for (uint64_t i = 0; i < model->desc.hidden; i++)
        /* both are double: a millionth of what the arithmetic modes may be off */
        if (!(fabs(stored[i] - want[i]) <= 1e-6 * sqrt(variance[i]) + 1e-12 * fabs(want[i])))
            return soak_fail(soak, SOAK_WRONG,
                             "layer %" PRIu64 ", expert %" PRIu64 " %" PRIu64 " x %" PRIu64
                             ", output %" PRIu64
                             ": what is stored computes %.15g, its source %.15g",
                             q / model->desc.experts, q % model->desc.experts, model->desc.hidden,
                             model->desc.intermediate, i, stored[i], want[i]);
    return 0;
}

int soak_model_inspect(struct soak *soak, struct soak_random *random,
                       const struct soak_model *model, uint64_t layer, uint64_t expert)
{
    const uint64_t q = layer * model->desc.experts + expert, H = model->desc.hidden;
    const uint64_t slices = (model->desc.intermediate + 31) / 32;
    const uint32_t nodes = numoe_model_plan(model->model)->node_count;
    double *stored = calloc(3 * H, sizeof *stored);
    float *x = malloc(H * sizeof *x);
    uint64_t next = 0;
    int rc = 0;

    if (!stored || !x) {
        rc = -ENOMEM;
        soak_fail(soak, rc, "no memory for an inspection");
    }
    for (uint64_t i = 0; i < H && !rc; i++)
        x[i] = soak_normal(random);
    for (uint32_t n = 0; n < nodes && !rc; n++) {
        uint64_t first, count;
        const uint8_t *run = numoe_model_run(model->model, layer, expert, n, &first, &count);

        if (!count)
            continue;
        if (first != next) {
            rc = soak_fail(soak, SOAK_WRONG,
                           "node %" PRIu32 " holds slices from %" PRIu64 " and not %" PRIu64, n,
                           first, next);
            break;
        }
        next += count;
        rc = inspect_run(soak, random, model, q, run, first, count);
        if (!rc)
            numoe_reference_slices(
                numoe_model_shape(model->model), &model->desc.activation, run, count, x, 0.75,
                first == 0 ? numoe_model_down_bias(model->model, layer, expert) : NULL, false,
                stored);
        soak_beat(soak);
    }
    if (!rc && next != slices)
        rc = soak_fail(soak, SOAK_WRONG, "%" PRIu64 " of %" PRIu64 " slices are on some node", next,
                       slices);
    if (!rc && soak_expert_apply(&model->experts[q], &model->desc.activation, NUMOE_EXACT, x, 0.75,
                                 stored + H, stored + 2 * H))
        rc = soak_fail(soak, -ENOMEM, "no memory for an inspection");
    if (!rc)
        rc = compare_references(soak, model, q, stored, stored + H, stored + 2 * H);
    free(stored);
    free(x);
    return rc;
}
