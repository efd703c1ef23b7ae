/*
 * A checkpoint's experts: which family its tensors' names are of, how many layers and experts there
 * are, that all have the tensors and shapes that they must have, and where parts lie.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "checkpoint_open.h"

#include "base/checked.h"
#include "files.h"
#include "model.h"
#include "numoe_kernels.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A cap of the activation. null and 0 mean none and give 0. An absent key leaves *out as it is. */
static int config_cap(struct opening *o, const json_t *section, const char *key, float *out)
{
    const json_t *value = key ? json_object_get(section, key) : NULL;
    double number;
    size_t i;

    if (!key)
        return 0;
    if (!value && *out == 0)
        return 0;
    if (!value) {
        numoe_log_write(&o->ckpt->log, NUMOE_LOG_WARNING,
                        "%s: %s has no %s; taking %g, as %s has it", o->ckpt->directory,
                        o->config_name, key, (double)*out, o->ckpt->family->title);
        return 0;
    }
    if (json_is_null(value)) {
        *out = 0;
        return 0;
    }
    if (json_is_array(value)) {
        /* one for each layer */
        for (i = 1; i < json_array_size(value); i++)
            if (json_number_value(json_array_get(value, i)) !=
                json_number_value(json_array_get(value, 0)))
                return numoe_error_set(o->error, -ENOTSUP, o->ckpt->directory,
                                       "%s: %s differs between layers, which is not supported yet",
                                       o->config_name, key);
        value = json_array_get(value, 0);
    }
    number = json_number_value(value);
    if (!json_is_number(value) || !(number >= 0) || !isfinite((float)number))
        return numoe_error_set(o->error, -EBADMSG, o->ckpt->directory,
                               "%s: %s is not a finite number from 0 on", o->config_name, key);
    *out = (float)number;
    return 0;
}

struct match {
    const struct numoe_tensor *tensor;
    uint32_t layer, expert;
    uint32_t which; /* of the family's tensors */
};

static int by_place(const void *a, const void *b)
{
    const struct match *x = a, *y = b;

    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    if (x->expert != y->expert)
        return x->expert < y->expert ? -1 : 1;
    return x->which < y->which ? -1 : x->which > y->which;
}

/* Why experts of this type could not be computed either; empty where they could. */
static const char *missing_kernel(enum numoe_dtype dtype)
{
    switch (dtype) {
    case NUMOE_DTYPE_BF16:
        return ": no kernel for BF16 yet";
    case NUMOE_DTYPE_F8_E4M3:
        return ": no kernel for FP8 yet";
    case NUMOE_DTYPE_I32:
        return ": no kernel for INT4 yet";
    default:
        return "";
    }
}

/* The family whose names most tensors bear, of those that are asked for, and its first tensor. */
static const struct numoe_family *most_named(const struct opening *o, uint64_t *named,
                                             const struct numoe_tensor **example)
{
    const struct numoe_family *family, *best = NULL;
    uint64_t count, i;

    *named = 0;
    for (size_t f = 0; (family = numoe_family_at(f)); f++) {
        const struct numoe_tensor *first = NULL;
        if (family->draft != o->options->draft)
            continue;
        for (count = i = 0; i < o->entry_count; i++)
            if (numoe_family_marks(family, o->entries[i]->name)) {
                first = first ? first : o->entries[i];
                count++;
            }
        if (count > *named) {
            *named = count;
            best = family;
            *example = first;
        }
    }
    return best;
}

static int no_family(struct opening *o)
{
    return numoe_error_set(o->error, -ENOTSUP, o->ckpt->directory,
                           "no %s of a known model (architecture %s, model_type %s)",
                           o->options->draft ? "draft layers" : "experts",
                           numoe_quote(numoe_config_architecture(o->config)).text,
                           numoe_quote(numoe_config_model_type(o->config)).text);
}

static int choose_family(struct opening *o)
{
    struct numoe_checkpoint *c = o->ckpt;
    const struct numoe_tensor *example = NULL;
    const struct numoe_family *best;
    uint64_t count;

    if (o->options->family) {
        int code = numoe_family_file_read(o->options->family, &c->own, o->error);
        if (code == 0)
            c->family = numoe_family_file_family(c->own);
        return code;
    }
    best = most_named(o, &count, &example);
    if (!best)
        return no_family(o);
    if (!best->supported)
        return numoe_error_set(o->error, -ENOTSUP, c->directory,
                               "%s checkpoints are not supported yet by the loader%s "
                               "(architecture %s, model_type %s)",
                               best->title, missing_kernel((enum numoe_dtype)example->dtype),
                               numoe_quote(numoe_config_architecture(o->config)).text,
                               numoe_quote(numoe_config_model_type(o->config)).text);
    if (best->architecture && strcmp(numoe_config_architecture(o->config), best->architecture) &&
        strcmp(numoe_config_model_type(o->config), best->model_type))
        numoe_log_write(&c->log, NUMOE_LOG_WARNING,
                        "%s: taken for %s by its tensors' names; %s says architecture "
                        "%s, model_type %s",
                        c->directory, best->title, o->config_name,
                        numoe_quote(numoe_config_architecture(o->config)).text,
                        numoe_quote(numoe_config_model_type(o->config)).text);
    c->family = best;
    return 0;
}

/* The family's tensors in order of layer, expert, and which they are. */
static int find_matches(struct opening *o, struct match **out, uint64_t *out_count)
{
    struct numoe_checkpoint *c = o->ckpt;
    struct match *matches = malloc((o->entry_count ? o->entry_count : 1) * sizeof *matches), m;
    uint64_t count = 0, i;

    *out = matches;
    if (!matches)
        return numoe_error_set(o->error, -ENOMEM, c->directory, "no memory for %llu tensors",
                               (unsigned long long)o->entry_count);
    for (i = 0; i < o->entry_count; i++) {
        int which;
        m.tensor = o->entries[i];
        which = numoe_family_match(c->family, m.tensor->name, &m.layer, &m.expert);
        m.which = (uint32_t)which;
        if (which >= 0)
            matches[count++] = m;
        else if (numoe_family_stem(c->family, m.tensor->name))
            return numoe_error_set(o->error, -EBADMSG, c->shards[m.tensor->file].path,
                                   "tensor \"%s\" is none that experts of %s have",
                                   numoe_quote(m.tensor->name).text, c->family->title);
    }
    if (!count)
        return no_family(o);
    qsort(matches, count, sizeof *matches, by_place);
    for (i = 1; i < count; i++)
        if (!by_place(&matches[i - 1], &matches[i]))
            return numoe_error_set(o->error, -EBADMSG, c->shards[matches[i].tensor->file].path,
                                   "tensor \"%s\" is there a second time",
                                   numoe_quote(matches[i].tensor->name).text);
    *out_count = count;
    return 0;
}

static int disagree(struct opening *o, const char *key, uint64_t says, const char *what,
                    uint64_t found)
{
    return numoe_error_set(o->error, -EBADMSG, o->ckpt->directory,
                           "%s says %s %llu but the tensors' %s is %llu", o->config_name, key,
                           (unsigned long long)says, what, (unsigned long long)found);
}

/* The config's number, where it has one, against what the tensors say. */
static int agree(struct opening *o, const json_t *section, const char *key, const char *what,
                 uint64_t found)
{
    uint64_t says = 0;
    int code = numoe_config_number(o, section, key, &says);

    if (code <= 0)
        return code;
    return says == found ? 0 : disagree(o, key, says, what, found);
}

/* How many experts a layer has: by the numbers in names, or by the first dimension. */
static int count_experts(struct opening *o, const json_t *section, const struct match *matches,
                         uint64_t count)
{
    struct numoe_checkpoint *c = o->ckpt;
    const char *key = c->family->experts_key;
    const struct match *widest = matches;
    uint64_t says = 0, experts, i;
    int code;

    if (numoe_family_stacked(c->family)) {
        experts = matches->tensor->rank ? matches->tensor->shape[0] : 0;
        if (!experts || experts > NAME_NUMBER_LIMIT)
            return numoe_error_set(
                o->error, -EBADMSG, c->shards[matches->tensor->file].path,
                "tensor \"%s\": shape %s holds no experts", numoe_quote(matches->tensor->name).text,
                numoe_shape_text(matches->tensor->shape, matches->tensor->rank).text);
        c->desc.experts = experts;
        return agree(o, section, key, "number of experts", experts);
    }
    for (i = 0; i < count; i++)
        if (matches[i].expert > widest->expert)
            widest = &matches[i];
    experts = (uint64_t)widest->expert + 1;
    code = numoe_config_number(o, section, key, &says);
    if (code < 0)
        return code;
    if (code) {
        if (experts > says)
            return numoe_error_set(o->error, -EBADMSG, c->directory,
                                   "%s says %s %llu but there is tensor \"%s\"", o->config_name,
                                   key, (unsigned long long)says,
                                   numoe_quote(widest->tensor->name).text);
        if (says > NAME_NUMBER_LIMIT)
            return disagree(o, key, says, "number of experts", experts);
        experts = says;
    }
    c->desc.experts = experts;
    return 0;
}

static int count_layers(struct opening *o, const json_t *section, const struct match *matches,
                        uint64_t count)
{
    struct numoe_checkpoint *c = o->ckpt;
    const struct numoe_family *family = c->family;
    int code;

    c->first_layer = matches[0].layer;
    c->desc.layers = (uint64_t)matches[count - 1].layer - c->first_layer + 1;
    code = agree(o, section, family->layers_key, "highest layer number plus 1",
                 c->first_layer + c->desc.layers);
    if (code < 0)
        return code;
    if (family->dense_layers_key)
        return agree(o, section, family->dense_layers_key, "first layer with experts",
                     c->first_layer);
    if (c->first_layer)
        return numoe_error_set(o->error, -EBADMSG, c->directory,
                               "the first layer with experts is %u, not 0", c->first_layer);
    return 0;
}

/* Whether experts have biases: all of their tensors are required then. */
static void find_biases(struct numoe_checkpoint *c, const struct match *matches, uint64_t count)
{
    const unsigned without = numoe_family_tensors(c->family, false);
    uint64_t i;

    c->tensor_count = numoe_family_tensors(c->family, true);
    for (i = 0; i < count && matches[i].which < without; i++)
        ;
    if (i == count && c->family->optional_bias)
        c->tensor_count = without;
    c->desc.bias = c->tensor_count > without;
}

/* That no tensor of any expert is missing. */
static int check_complete(struct opening *o, const struct match *matches, uint64_t count)
{
    struct numoe_checkpoint *c = o->ckpt;
    struct list absent = {.log = &c->log, .what = "tensor"};
    const uint64_t each = numoe_family_stacked(c->family) ? 1 : c->desc.experts;
    /* All three numbers are small enough for the product: 10^9, 10^9 and 9. */
    const uint64_t total = c->desc.layers * each * c->tensor_count;
    uint64_t expected = 0, i;

    for (i = 0; i <= count; i++) {
        uint64_t at = total;
        if (i < count)
            at = ((uint64_t)(matches[i].layer - c->first_layer) * each + matches[i].expert) *
                     c->tensor_count +
                 matches[i].which;
        /* Never more steps than are shown or logged, however far apart two numbers are. */
        for (; expected < at && absent.count < LIST_LOGGED; expected++) {
            char name[160];
            uint64_t whole = expected / c->tensor_count;
            numoe_family_tensor_name(c->family, c->first_layer + whole / each, whole % each,
                                     (unsigned)(expected % c->tensor_count), name, sizeof name);
            numoe_list_add(&absent, name, NULL);
        }
        absent.count += at - expected;
        expected = at + 1;
    }
    if (absent.count)
        return numoe_error_set(o->error, -EBADMSG, c->directory,
                               "%llu layers of %llu experts are incomplete: %s",
                               (unsigned long long)c->desc.layers,
                               (unsigned long long)c->desc.experts, numoe_list_text(&absent).text);
    return 0;
}

/* ---- shapes --------------------------------------------------------------------------------- */

struct dims {
    unsigned rank;
    uint64_t at[4];
};

/* The shape that a tensor of so many rows and columns has. */
static struct dims due_dims(const struct numoe_checkpoint *c, const struct numoe_tensor *t,
                            const struct numoe_family_tensor *role, uint64_t rows, uint64_t columns)
{
    struct dims due = {0};

    if (numoe_family_stacked(c->family))
        due.at[due.rank++] = c->desc.experts;
    due.at[due.rank++] = rows;
    switch (role->kind) {
    case NUMOE_TENSOR_CODES:
        if (t->rank == due.rank + 2) {
            due.at[due.rank++] = columns / NUMOE_TILE;
            due.at[due.rank++] = t->dtype == NUMOE_DTYPE_F4 ? NUMOE_TILE : NUMOE_TILE / 2;
        } else {
            due.at[due.rank++] = t->dtype == NUMOE_DTYPE_F4 ? columns : columns / 2;
        }
        break;
    case NUMOE_TENSOR_SCALES:
        due.at[due.rank++] = columns / NUMOE_TILE;
        break;
    case NUMOE_TENSOR_BLOCKS:
        due.at[due.rank++] = columns;
        break;
    case NUMOE_TENSOR_BIAS:
        break;
    }
    return due;
}

static int check_dtype(struct opening *o, const struct numoe_tensor *t,
                       const struct numoe_family_tensor *role)
{
    static const struct {
        const char *what;
        int dtypes[3];
    } kinds[] = {
        [NUMOE_TENSOR_CODES] = {"experts are read as MXFP4 (I8, U8 or F4) only",
                                {NUMOE_DTYPE_I8, NUMOE_DTYPE_U8, NUMOE_DTYPE_F4}},
        [NUMOE_TENSOR_SCALES] = {"scales of MXFP4 are F8_E8M0 or U8",
                                 {NUMOE_DTYPE_F8_E8M0, NUMOE_DTYPE_U8, NUMOE_DTYPE_U8}},
        [NUMOE_TENSOR_BLOCKS] = {"experts are read as MXFP4 only",
                                 {NUMOE_DTYPE_MXFP4, NUMOE_DTYPE_MXFP4, NUMOE_DTYPE_MXFP4}},
        [NUMOE_TENSOR_BIAS] = {"biases are read as F32 or BF16",
                               {NUMOE_DTYPE_F32, NUMOE_DTYPE_BF16, NUMOE_DTYPE_BF16}},
    };

    for (unsigned i = 0; i < 3; i++)
        if (t->dtype == kinds[role->kind].dtypes[i])
            return 0;
    return numoe_error_set(o->error, -ENOTSUP, o->ckpt->shards[t->file].path,
                           "tensor \"%s\" is %s; %s", numoe_quote(t->name).text, t->type,
                           kinds[role->kind].what);
}

/* Rows and columns of the first tensor of gate. */
static int first_shape(struct opening *o, const struct numoe_tensor *t,
                       const struct numoe_family_tensor *role, uint64_t *rows, uint64_t *columns)
{
    const unsigned lead = numoe_family_stacked(o->ckpt->family) ? 1 : 0;
    const bool halves = role->kind == NUMOE_TENSOR_CODES && t->dtype != NUMOE_DTYPE_F4;
    const bool groups = role->kind == NUMOE_TENSOR_CODES && t->rank == lead + 3;
    int code = check_dtype(o, t, role);

    if (code < 0)
        return code;
    *columns = 0;
    if (t->rank == lead + 2 || groups) {
        *rows = t->shape[lead];
        if (!numoe_mul_u64(t->shape[lead + 1], groups ? NUMOE_TILE : halves ? 2 : 1, columns))
            *columns = 0;
    }
    if (!*columns || *columns % NUMOE_TILE || !*rows ||
        (role->matrix == NUMOE_TENSOR_GATE_UP && *rows % 2))
        return numoe_error_set(
            o->error, -EBADMSG, o->ckpt->shards[t->file].path,
            "tensor \"%s\": shape %s of %s is no MXFP4 matrix with rows of whole "
            "groups of 32",
            numoe_quote(t->name).text, numoe_shape_text(t->shape, t->rank).text, t->type);
    if (role->matrix == NUMOE_TENSOR_GATE_UP)
        *rows /= 2;
    return 0;
}

/* Rows and columns of a tensor of the family. */
static void role_shape(const struct numoe_model_desc *desc, const struct numoe_family_tensor *role,
                       uint64_t *rows, uint64_t *columns)
{
    const bool down = role->matrix == NUMOE_TENSOR_DOWN;

    *rows = down ? desc->hidden : desc->intermediate;
    if (role->matrix == NUMOE_TENSOR_GATE_UP)
        *rows *= 2;
    *columns = down ? desc->intermediate : desc->hidden;
}

static int check_shape(struct opening *o, const struct numoe_tensor *t,
                       const struct numoe_family_tensor *role)
{
    uint64_t rows, columns;
    struct dims due;
    int code = check_dtype(o, t, role);

    if (code < 0)
        return code;
    role_shape(&o->ckpt->desc, role, &rows, &columns);
    due = due_dims(o->ckpt, t, role, rows, columns);
    if (t->rank != due.rank || memcmp(t->shape, due.at, due.rank * sizeof due.at[0]))
        return numoe_error_set(o->error, -EBADMSG, o->ckpt->shards[t->file].path,
                               "tensor \"%s\": shape %s of %s where %s is due",
                               numoe_quote(t->name).text, numoe_shape_text(t->shape, t->rank).text,
                               t->type, numoe_shape_text(due.at, due.rank).text);
    return 0;
}

/* Bytes of a row of a tensor, and from block to block of it. */
static uint64_t step_bytes(const struct numoe_family_tensor *role)
{
    switch (role->kind) {
    case NUMOE_TENSOR_CODES:
        return NUMOE_TILE / 2;
    case NUMOE_TENSOR_BLOCKS:
        return NUMOE_TILE / 2 + 1;
    default:
        return 1;
    }
}

static uint64_t row_bytes(const struct numoe_family_tensor *role, uint64_t columns,
                          uint16_t bias_dtype)
{
    if (role->kind == NUMOE_TENSOR_BIAS)
        return numoe_dtype_bits((enum numoe_dtype)bias_dtype) / 8;
    return columns / NUMOE_TILE * step_bytes(role);
}

/* That a tensor has the bytes that are read of it: its shape says so, in all types that are read.
 */
static int check_bytes(struct opening *o, const struct numoe_tensor *t,
                       const struct numoe_family_tensor *role, unsigned which)
{
    const bool stacked = numoe_family_stacked(o->ckpt->family);
    uint64_t rows, columns, row, bytes;

    role_shape(&o->ckpt->desc, role, &rows, &columns);
    row = row_bytes(role, columns, o->ckpt->bias_dtype[which]);
    if (numoe_mul_u64(rows, row, &bytes) &&
        numoe_mul_u64(bytes, stacked ? o->ckpt->desc.experts : 1, &bytes) &&
        bytes == t->end - t->begin)
        return 0;
    return numoe_error_set(o->error, -EBADMSG, o->ckpt->shards[t->file].path,
                           "tensor \"%s\": %llu bytes where %llu rows of %llu are due",
                           numoe_quote(t->name).text, (unsigned long long)(t->end - t->begin),
                           (unsigned long long)rows, (unsigned long long)row);
}

static int place_experts(struct opening *o, const json_t *section, const struct match *matches,
                         uint64_t count)
{
    struct numoe_checkpoint *c = o->ckpt;
    const struct numoe_family_tensor *roles = c->family->tensors;
    uint64_t i, h = 0, w = 0;
    int code;

    code = first_shape(o, matches[0].tensor, &roles[0], &w, &h);
    if (code < 0)
        return code;
    code = agree(o, section, c->family->hidden_key, "expert width", h);
    if (code < 0)
        return code;
    code = agree(o, section, c->family->intermediate_key, "intermediate width", w);
    if (code < 0)
        return code;
    if (w > UINT64_MAX / 2 || w % NUMOE_TILE)
        return numoe_error_set(o->error, -EBADMSG, c->directory,
                               "an intermediate width of %llu is no whole number of groups of 32",
                               (unsigned long long)w);
    c->desc.hidden = h;
    c->desc.intermediate = w;
    c->places = malloc(count * sizeof *c->places);
    if (!c->places)
        return numoe_error_set(o->error, -ENOMEM, c->directory, "no memory for %llu tensors",
                               (unsigned long long)count);
    for (i = 0; i < count; i++) {
        const struct match *m = matches + i;
        const bool bias = roles[m->which].kind == NUMOE_TENSOR_BIAS;
        code = check_shape(o, m->tensor, &roles[m->which]);
        if (code < 0)
            return code;
        if (i < c->tensor_count && bias)
            c->bias_dtype[m->which] = m->tensor->dtype;
        if (bias && m->tensor->dtype != c->bias_dtype[m->which])
            return numoe_error_set(o->error, -ENOTSUP, c->shards[m->tensor->file].path,
                                   "tensor \"%s\" is %s, and the first of its kind is %s",
                                   numoe_quote(m->tensor->name).text, m->tensor->type,
                                   numoe_dtype_name((enum numoe_dtype)c->bias_dtype[m->which]));
        code = check_bytes(o, m->tensor, &roles[m->which], m->which);
        if (code < 0)
            return code;
        c->places[i] = (struct place){m->tensor->begin, m->tensor->file};
        if (i < c->tensor_count)
            c->expert_bytes += m->tensor->end - m->tensor->begin;
    }
    if (numoe_family_stacked(c->family))
        c->expert_bytes /= c->desc.experts;
    return 0;
}

/* ---- description ---------------------------------------------------------------------------- */

static int find_activation(struct opening *o, struct numoe_activation *activation)
{
    const struct numoe_family *family = o->ckpt->family;
    const struct numoe_architecture *at = family->architectures;
    const char *name = numoe_config_model_type(o->config);
    char known[200] = "";
    size_t used = 0;

    *activation = family->activation;
    if (!at)
        return 0;
    for (; at->name && strcmp(at->name, name); at++)
        if (used < sizeof known)
            used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", used ? ", " : "",
                                     at->name);
    if (!at->name)
        return numoe_error_set(o->error, -ENOTSUP, o->ckpt->directory,
                               "architecture %s is not known: it does not say how its experts "
                               "compute; known are %s",
                               numoe_quote(name).text, known);
    if (at->bias != o->ckpt->desc.bias)
        return numoe_error_set(o->error, -EBADMSG, o->ckpt->directory,
                               "architecture %s has %s biases but the files have %s", at->name,
                               at->bias ? "experts with" : "no", at->bias ? "none" : "some");
    *activation = at->activation;
    return 0;
}

static int describe(struct opening *o, const json_t *section)
{
    struct numoe_checkpoint *c = o->ckpt;
    const struct numoe_family *family = c->family;
    struct numoe_activation *activation = &c->desc.activation;
    const char *act = json_string_value(json_object_get(section, "hidden_act"));
    struct numoe_error why = NUMOE_ERROR_INIT;
    int code;

    if (act && family->act && strcmp(act, family->act))
        return numoe_error_set(o->error, -ENOTSUP, c->directory,
                               "%s: hidden_act is %s; %s is computed with %s", o->config_name,
                               numoe_quote(act).text, family->title, family->act);
    code = find_activation(o, activation);
    if (code == 0)
        code = config_cap(o, section, family->limit_key, &activation->limit);
    if (code == 0)
        code = config_cap(o, section, family->gate_cap_key, &activation->gate_cap);
    if (code == 0)
        code = config_cap(o, section, family->up_cap_key, &activation->up_cap);
    if (code < 0)
        return code;
    if (activation->kind == NUMOE_SILU_CLAMPED && activation->limit == 0)
        activation->kind = NUMOE_SILU;
    else if (activation->kind == NUMOE_SILU && activation->limit > 0)
        activation->kind = NUMOE_SILU_CLAMPED;
    if (activation->kind == NUMOE_SITU && activation->gate_cap == 0)
        return numoe_error_set(o->error, -EBADMSG, c->directory, "%s: %s must be above 0",
                               o->config_name, family->gate_cap_key);
    if (numoe_activation_check(activation, &why) < 0)
        return numoe_error_set(o->error, -EBADMSG, c->directory, "%s: %s %s", o->config_name,
                               why.where, why.message);
    c->desc.experts_per_token = family->experts_per_token;
    code = numoe_config_number(o, section, family->top_k_key, &c->desc.experts_per_token);
    if (code < 0)
        return code;
    if (!code && family->top_k_key)
        numoe_log_write(&c->log, NUMOE_LOG_WARNING, "%s: %s has no %s; taking %llu", c->directory,
                        o->config_name, family->top_k_key,
                        (unsigned long long)c->desc.experts_per_token);
    if (!c->desc.experts_per_token || c->desc.experts_per_token > c->desc.experts)
        return numoe_error_set(
            o->error, -EBADMSG, c->directory, "%s says %s %llu of %llu experts", o->config_name,
            family->top_k_key ? family->top_k_key : "experts_per_token",
            (unsigned long long)c->desc.experts_per_token, (unsigned long long)c->desc.experts);
    return 0;
}

/* That a model of these numbers can be: limits that are no file's. */
static int check_limits(struct opening *o)
{
    struct numoe_error why = NUMOE_ERROR_INIT;
    struct numoe_expert_shape shape;

    if (numoe_model_expert_shape(&o->ckpt->desc, &shape, &why) < 0)
        return numoe_error_set(o->error, -EBADMSG, o->ckpt->directory,
                               "its experts are more than can be: %s %s", why.where, why.message);
    return 0;
}

int numoe_checkpoint_find_experts(struct opening *o)
{
    struct numoe_checkpoint *c = o->ckpt;
    struct match *matches = NULL;
    const json_t *section = o->config;
    uint64_t count = 0;
    int code;

    code = choose_family(o);
    if (code == 0)
        code = find_matches(o, &matches, &count);
    if (code < 0)
        goto out;
    if (c->family->section) {
        section = json_object_get(o->config, c->family->section);
        if (!json_is_object(section)) {
            code = numoe_error_set(o->error, -EBADMSG, c->directory, "%s has no object %s",
                                   o->config_name, c->family->section);
            goto out;
        }
    }
    find_biases(c, matches, count);
    code = count_experts(o, section, matches, count);
    if (code == 0)
        code = count_layers(o, section, matches, count);
    if (code == 0)
        code = check_complete(o, matches, count);
    if (code == 0)
        code = place_experts(o, section, matches, count);
    if (code == 0)
        code = describe(o, section);
    if (code == 0)
        code = check_limits(o);
out:
    free(matches);
    return code;
}

/* ---- where parts lie ------------------------------------------------------------------------ */

/* A part within a tensor of `rows` rows of row_bytes from `offset` on. */
static void fill_part(const struct numoe_checkpoint *c, unsigned tensor, enum numoe_part part,
                      struct numoe_extent whole, struct numoe_extent *out)
{
    const struct numoe_family *family = c->family;
    const struct numoe_family_tensor *role = &family->tensors[tensor];
    const bool up =
        part == NUMOE_PART_UP_CODES || part == NUMOE_PART_UP_SCALES || part == NUMOE_PART_UP_BIAS;

    if (role->matrix == NUMOE_TENSOR_GATE_UP) {
        whole.rows /= 2;
        if (family->gate_up == NUMOE_GATE_UP_INTERLEAVED) {
            whole.offset += up ? whole.stride : 0;
            whole.stride *= 2;
        } else if (up == (family->gate_up == NUMOE_GATE_FIRST)) {
            whole.offset += whole.rows * whole.stride;
        }
    }
    /* behind the scale byte of the first block */
    if (role->kind == NUMOE_TENSOR_BLOCKS && part % 2 == 0) {
        whole.offset++;
        whole.row_bytes--;
    }
    whole.bytes = (whole.rows - 1) * whole.stride + whole.row_bytes;
    *out = whole;
}

static struct numoe_extent tensor_extent(const struct numoe_checkpoint *c, unsigned tensor,
                                         uint64_t layer, uint64_t expert)
{
    const struct numoe_family_tensor *role = &c->family->tensors[tensor];
    const bool stacked = numoe_family_stacked(c->family);
    const uint64_t index = stacked ? layer : layer * c->desc.experts + expert;
    const struct place *place = &c->places[index * c->tensor_count + tensor];
    struct numoe_extent out = {.offset = place->offset, .file = place->file};
    uint64_t columns;

    role_shape(&c->desc, role, &out.rows, &columns);
    out.row_bytes = row_bytes(role, columns, c->bias_dtype[tensor]);
    if (role->kind == NUMOE_TENSOR_BIAS)
        out.dtype = c->bias_dtype[tensor];
    else
        out.step = (uint16_t)step_bytes(role);
    out.stride = out.row_bytes;
    if (stacked)
        out.offset += expert * out.rows * out.stride;
    return out;
}

void numoe_checkpoint_expert(const struct numoe_checkpoint *c, uint64_t layer, uint64_t expert,
                             struct numoe_extent parts[NUMOE_PART_COUNT])
{
    for (unsigned p = 0; p < NUMOE_PART_COUNT; p++) {
        const int tensor = numoe_family_holder(c->family, (enum numoe_part)p);

        parts[p] = (struct numoe_extent){0};
        if (tensor >= 0 && (unsigned)tensor < c->tensor_count)
            fill_part(c, (unsigned)tensor, (enum numoe_part)p,
                      tensor_extent(c, (unsigned)tensor, layer, expert), &parts[p]);
    }
}
