/* A family that the user describes. SPDX-License-Identifier: Apache-2.0 */
#include "family_file.h"

#include "files.h"
#include "numoe_kernels.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FAMILY_LIMIT ((uint64_t)1 << 20)

struct numoe_family_file {
    json_t *root; /* whose strings the family points to */
    struct numoe_family family;
};

struct reading {
    const char *path;
    struct numoe_family *family;
    struct numoe_error *error;
};

struct word {
    const char *name;
    int value;
};

static int wrong(const struct reading *r, const char *key, const char *what)
{
    return numoe_error_set(r->error, -EBADMSG, r->path, "%s %s", key, what);
}

/* That an object has no keys but these. */
static int known_keys(const struct reading *r, const char *where, const json_t *object,
                      const char *const *keys)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)object, key, value)
    {
        unsigned i;
        for (i = 0; keys[i] && strcmp(keys[i], key); i++)
            ;
        if (!keys[i])
            return numoe_error_set(r->error, -EBADMSG, r->path, "key \"%s\" of %s is not known",
                                   numoe_quote(key).text, where);
    }
    return 0;
}

/* A string; absent is NULL and no error. */
static int text(const struct reading *r, const json_t *object, const char *key, const char **out)
{
    const json_t *value = json_object_get(object, key);

    *out = json_string_value(value);
    if (value && (!*out || !**out || strlen(*out) != json_string_length(value)))
        return wrong(r, key, "is not a string of at least one character");
    return 0;
}

static int choose(const struct reading *r, const json_t *object, const char *key,
                  const struct word *words, int *out)
{
    const char *name;
    int code = text(r, object, key, &name);

    if (code < 0)
        return code;
    if (!name)
        return wrong(r, key, "is missing");
    for (; words->name; words++)
        if (!strcmp(words->name, name)) {
            *out = words->value;
            return 0;
        }
    return numoe_error_set(r->error, -EBADMSG, r->path, "%s \"%s\" is not known", key,
                           numoe_quote(name).text);
}

/* How often a pattern holds a placeholder; -1 when it holds other braces, or something behind one
 * that could be the number's. */
static int placeholders(const char *pattern, const char *wanted)
{
    static const char *const all[] = {"{layer}", "{expert}"};
    int count = 0;

    for (const char *at = pattern; (at = strpbrk(at, "{}"));) {
        unsigned i;
        for (i = 0; i < 2 && strncmp(at, all[i], strlen(all[i])); i++)
            ;
        if (i == 2)
            return -1;
        count += !strcmp(all[i], wanted);
        at += strlen(all[i]);
        if (*at == '{' || (*at >= '0' && *at <= '9'))
            return -1;
    }
    return count;
}

static int check_pattern(const struct reading *r, const char *pattern)
{
    if (placeholders(pattern, "{layer}") == 1 && placeholders(pattern, "{expert}") <= 1)
        return 0;
    return numoe_error_set(r->error, -EBADMSG, r->path,
                           "pattern \"%s\" must hold {layer} once, {expert} at most once, no "
                           "other braces, and no digit behind them",
                           numoe_quote(pattern).text);
}

static int read_tensor(const struct reading *r, const json_t *entry,
                       struct numoe_family_tensor *out)
{
    static const char *const keys[] = {"matrix", "kind", "name", NULL};
    static const struct word matrices[] = {{"gate", NUMOE_TENSOR_GATE},
                                           {"up", NUMOE_TENSOR_UP},
                                           {"down", NUMOE_TENSOR_DOWN},
                                           {"gate_up", NUMOE_TENSOR_GATE_UP},
                                           {NULL, 0}};
    static const struct word kinds[] = {{"codes", NUMOE_TENSOR_CODES},
                                        {"scales", NUMOE_TENSOR_SCALES},
                                        {"blocks", NUMOE_TENSOR_BLOCKS},
                                        {"bias", NUMOE_TENSOR_BIAS},
                                        {NULL, 0}};
    int code, matrix, kind;

    if (!json_is_object(entry))
        return wrong(r, "tensors", "holds something else than objects");
    code = known_keys(r, "a tensor", entry, keys);
    if (code == 0)
        code = choose(r, entry, "matrix", matrices, &matrix);
    if (code == 0)
        code = choose(r, entry, "kind", kinds, &kind);
    if (code == 0)
        code = text(r, entry, "name", &out->name);
    if (code < 0)
        return code;
    if (!out->name)
        return wrong(r, "name", "of a tensor is missing");
    out->matrix = (enum numoe_tensor_matrix)matrix;
    out->kind = (enum numoe_tensor_kind)kind;
    return check_pattern(r, out->name);
}

/* Parts that a tensor holds, as bits. */
static unsigned parts_of(const struct numoe_family_tensor *tensor)
{
    const bool both = tensor->matrix == NUMOE_TENSOR_GATE_UP;
    const unsigned first = both ? 0 : (unsigned)tensor->matrix;
    unsigned bits = 0;

    for (unsigned m = first; m < first + (both ? 2 : 1); m++) {
        if (tensor->kind == NUMOE_TENSOR_BIAS)
            bits |= 1u << (NUMOE_PART_GATE_BIAS + m);
        if (tensor->kind == NUMOE_TENSOR_CODES || tensor->kind == NUMOE_TENSOR_BLOCKS)
            bits |= 1u << 2 * m;
        if (tensor->kind == NUMOE_TENSOR_SCALES || tensor->kind == NUMOE_TENSOR_BLOCKS)
            bits |= 2u << 2 * m;
    }
    return bits;
}

/* That the tensors are an expert: every part once. */
static int check_tensors(const struct reading *r, unsigned count)
{
    const unsigned weights = (1u << NUMOE_PART_GATE_BIAS) - 1;
    const unsigned biases = (1u << NUMOE_PART_COUNT) - 1 - weights;
    const struct numoe_family_tensor *tensors = r->family->tensors;
    unsigned seen = 0;

    for (unsigned t = 0; t < count; t++) {
        if (seen & parts_of(&tensors[t]))
            return numoe_error_set(r->error, -EBADMSG, r->path,
                                   "tensor \"%s\" is of a matrix that has its tensor already",
                                   numoe_quote(tensors[t].name).text);
        seen |= parts_of(&tensors[t]);
        for (unsigned u = 0; u < t; u++)
            if (!strcmp(tensors[t].name, tensors[u].name))
                return numoe_error_set(r->error, -EBADMSG, r->path,
                                       "\"%s\" is the name of two tensors",
                                       numoe_quote(tensors[t].name).text);
        if (placeholders(tensors[t].name, "{expert}") != placeholders(tensors[0].name, "{expert}"))
            return wrong(r, "tensors", "have {expert} in some of their names and not in others");
        if ((tensors[t].kind == NUMOE_TENSOR_BLOCKS) != (tensors[0].kind == NUMOE_TENSOR_BLOCKS) &&
            tensors[t].kind != NUMOE_TENSOR_BIAS)
            return wrong(r, "tensors", "have blocks in some matrices and codes in others");
    }
    if ((seen & weights) != weights)
        return wrong(r, "tensors", "lack codes or scales of gate, up or down");
    if ((seen & biases) && (seen & biases) != biases)
        return wrong(r, "tensors", "have biases of some matrices and not of others");
    return 0;
}

/* Weights first, biases last, gate before others, as elsewhere in the table. */
static int read_tensors(const struct reading *r, const json_t *root)
{
    const json_t *list = json_object_get(root, "tensors");
    const size_t count = json_array_size(list);
    struct numoe_family_tensor tensors[NUMOE_FAMILY_TENSORS];
    unsigned placed = 0;

    if (!count || count > NUMOE_FAMILY_TENSORS)
        return wrong(r, "tensors", "is missing, or not an array of 1 to 9 tensors");
    for (size_t i = 0; i < count; i++) {
        int code;
        tensors[i] = (struct numoe_family_tensor){0};
        code = read_tensor(r, json_array_get(list, i), &tensors[i]);
        if (code < 0)
            return code;
    }
    for (unsigned pass = 0; pass < 3; pass++)
        for (size_t i = 0; i < count; i++) {
            const bool bias = tensors[i].kind == NUMOE_TENSOR_BIAS;
            const bool first = (parts_of(&tensors[i]) & 1u << NUMOE_PART_GATE_CODES) != 0;
            if (pass == (bias ? 2u : first ? 0u : 1u))
                r->family->tensors[placed++] = tensors[i];
        }
    return check_tensors(r, placed);
}

static int read_order(const struct reading *r, const json_t *root)
{
    static const struct word orders[] = {{"interleaved", NUMOE_GATE_UP_INTERLEAVED},
                                         {"gate_first", NUMOE_GATE_FIRST},
                                         {"up_first", NUMOE_UP_FIRST},
                                         {NULL, 0}};
    bool merged = false;
    int order, code;

    for (unsigned t = 0; t < NUMOE_FAMILY_TENSORS; t++)
        merged |=
            r->family->tensors[t].name && r->family->tensors[t].matrix == NUMOE_TENSOR_GATE_UP;
    if (!merged)
        return json_object_get(root, "gate_up") ? wrong(r, "gate_up", "is of no tensor") : 0;
    code = choose(r, root, "gate_up", orders, &order);
    if (code == 0)
        r->family->gate_up = (enum numoe_gate_up_order)order;
    return code;
}

static int read_refuse(const struct reading *r, const json_t *root)
{
    const json_t *list = json_object_get(root, "refuse");
    const size_t count = json_array_size(list);

    if (list && (!json_is_array(list) || count > NUMOE_FAMILY_STEMS))
        return wrong(r, "refuse", "is not an array of at most 4 patterns");
    for (size_t i = 0; i < count; i++) {
        const char *pattern = json_string_value(json_array_get(list, i));
        int code = pattern ? check_pattern(r, pattern) : wrong(r, "refuse", "holds no string");
        if (code < 0)
            return code;
        r->family->stems[i] = pattern;
    }
    return 0;
}

static int real(const struct reading *r, const json_t *object, const char *key, float *out)
{
    const json_t *value = json_object_get(object, key);

    if (!value)
        return 0;
    *out = (float)json_number_value(value);
    if (!json_is_number(value) || !isfinite(*out))
        return wrong(r, key, "is not a finite number");
    return 0;
}

static int read_activation(const struct reading *r, const json_t *root)
{
    static const char *const keys[] = {"kind", "limit", "alpha", "gate_cap", "up_cap", NULL};
    static const struct word kinds[] = {{"silu", NUMOE_SILU},
                                        {"silu_clamped", NUMOE_SILU_CLAMPED},
                                        {"swiglu_oai", NUMOE_SWIGLU_OAI},
                                        {"situ", NUMOE_SITU},
                                        {NULL, 0}};
    const json_t *object = json_object_get(root, "activation");
    struct numoe_activation *out = &r->family->activation, full;
    struct numoe_error why = NUMOE_ERROR_INIT;
    int kind = 0, code;

    if (!json_is_object(object))
        return wrong(r, "activation", "is missing or not an object");
    code = known_keys(r, "activation", object, keys);
    if (code == 0)
        code = choose(r, object, "kind", kinds, &kind);
    if (code == 0)
        code = real(r, object, "limit", &out->limit);
    if (code == 0)
        code = real(r, object, "alpha", &out->alpha);
    if (code == 0)
        code = real(r, object, "gate_cap", &out->gate_cap);
    if (code == 0)
        code = real(r, object, "up_cap", &out->up_cap);
    if (code < 0)
        return code;
    out->kind = (enum numoe_activation_kind)kind;
    /* what the config says is checked when it is read */
    full = *out;
    if (full.limit == 0 && json_object_get(json_object_get(root, "config"), "limit"))
        full.limit = 1;
    if (full.gate_cap == 0 && json_object_get(json_object_get(root, "config"), "gate_cap"))
        full.gate_cap = 1;
    if (numoe_activation_check(&full, &why) < 0)
        return numoe_error_set(r->error, -EBADMSG, r->path, "activation: %s %s", why.where,
                               why.message);
    return 0;
}

static int read_config(const struct reading *r, const json_t *root)
{
    static const char *const keys[] = {
        "section",           "layers", "dense_layers", "experts", "hidden", "intermediate",
        "experts_per_token", "limit",  "gate_cap",     "up_cap",  NULL};
    struct numoe_family *family = r->family;
    const char **const fields[] = {&family->section,          &family->layers_key,
                                   &family->dense_layers_key, &family->experts_key,
                                   &family->hidden_key,       &family->intermediate_key,
                                   &family->top_k_key,        &family->limit_key,
                                   &family->gate_cap_key,     &family->up_cap_key};
    const json_t *object = json_object_get(root, "config");
    int code = 0;

    if (!object)
        return 0;
    if (!json_is_object(object))
        return wrong(r, "config", "is not an object");
    code = known_keys(r, "config", object, keys);
    for (unsigned i = 0; keys[i] && code == 0; i++)
        code = text(r, object, keys[i], fields[i]);
    return code;
}

static int read_family(const struct reading *r, const json_t *root)
{
    static const char *const keys[] = {"name",   "title",      "tensors", "gate_up",
                                       "refuse", "activation", "config",  "experts_per_token",
                                       NULL};
    struct numoe_family *family = r->family;
    const json_t *top_k = json_object_get(root, "experts_per_token");
    int code = known_keys(r, "the description", root, keys);

    if (code == 0)
        code = text(r, root, "name", &family->name);
    if (code == 0)
        code = text(r, root, "title", &family->title);
    if (code < 0)
        return code;
    if (!family->name)
        return wrong(r, "name", "is missing");
    if (!family->title)
        family->title = family->name;
    if (!json_is_integer(top_k) || json_integer_value(top_k) < 1)
        return wrong(r, "experts_per_token", "is missing, or not a whole number from 1 on");
    family->experts_per_token = (uint64_t)json_integer_value(top_k);
    family->supported = true;
    code = read_tensors(r, root);
    if (code == 0)
        code = read_order(r, root);
    if (code == 0)
        code = read_refuse(r, root);
    if (code == 0)
        code = read_activation(r, root);
    if (code == 0)
        code = read_config(r, root);
    return code;
}

int numoe_family_file_read(const char *path, struct numoe_family_file **file,
                           struct numoe_error *error)
{
    struct numoe_family_file *f = calloc(1, sizeof *f);
    struct reading r = {path, NULL, error};
    int code;

    if (!f)
        return numoe_error_set(error, -ENOMEM, path, "no memory for a family");
    r.family = &f->family;
    code = numoe_file_json(path, FAMILY_LIMIT, &f->root, error);
    if (code == 0)
        code = read_family(&r, f->root);
    if (code < 0)
        numoe_family_file_free(f);
    else
        *file = f;
    return code;
}

const struct numoe_family *numoe_family_file_family(const struct numoe_family_file *file)
{
    return &file->family;
}

void numoe_family_file_free(struct numoe_family_file *file)
{
    if (!file)
        return;
    json_decref(file->root);
    free(file);
}
