/*
 * Headers of GGUF files.
 *
 * Read front to back through a window, as metadata holds a tokeniser's hundred thousands of strings
 * that nobody wants here. Every length is held against what is left of the file before it is used.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "gguf.h"

#include "base/checked.h"
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    WINDOW_BYTES = 1 << 20,
    MAX_NAME = 64,    /* with its NUL */
    MAX_KEY = 65536,  /* likewise */
    MAX_STRING = 256, /* of metadata that is kept */
    MAX_ARRAY = 1024, /* likewise */
    MAX_DEPTH = 8,    /* of arrays in arrays */
    MAX_DIMS = 4,
    LEAST_TENSOR = 8 + 4 + 8 + 4 + 8, /* bytes that describe one, less its name */
    LEAST_PAIR = 8 + 4 + 1
};

/* ---- types ---------------------------------------------------------------------------------- */

struct tensor_type {
    const char *name;
    uint16_t values, bytes; /* of a block */
    enum numoe_dtype dtype;
};

static const struct tensor_type tensor_types[] = {
    [0] = {"F32", 1, 4, NUMOE_DTYPE_F32},
    [1] = {"F16", 1, 2, NUMOE_DTYPE_F16},
    [2] = {"Q4_0", 32, 18, NUMOE_DTYPE_OTHER},
    [3] = {"Q4_1", 32, 20, NUMOE_DTYPE_OTHER},
    [6] = {"Q5_0", 32, 22, NUMOE_DTYPE_OTHER},
    [7] = {"Q5_1", 32, 24, NUMOE_DTYPE_OTHER},
    [8] = {"Q8_0", 32, 34, NUMOE_DTYPE_OTHER},
    [9] = {"Q8_1", 32, 36, NUMOE_DTYPE_OTHER},
    [10] = {"Q2_K", 256, 84, NUMOE_DTYPE_OTHER},
    [11] = {"Q3_K", 256, 110, NUMOE_DTYPE_OTHER},
    [12] = {"Q4_K", 256, 144, NUMOE_DTYPE_OTHER},
    [13] = {"Q5_K", 256, 176, NUMOE_DTYPE_OTHER},
    [14] = {"Q6_K", 256, 210, NUMOE_DTYPE_OTHER},
    [15] = {"Q8_K", 256, 292, NUMOE_DTYPE_OTHER},
    [16] = {"IQ2_XXS", 256, 66, NUMOE_DTYPE_OTHER},
    [17] = {"IQ2_XS", 256, 74, NUMOE_DTYPE_OTHER},
    [18] = {"IQ3_XXS", 256, 98, NUMOE_DTYPE_OTHER},
    [19] = {"IQ1_S", 256, 50, NUMOE_DTYPE_OTHER},
    [20] = {"IQ4_NL", 32, 18, NUMOE_DTYPE_OTHER},
    [21] = {"IQ3_S", 256, 110, NUMOE_DTYPE_OTHER},
    [22] = {"IQ2_S", 256, 82, NUMOE_DTYPE_OTHER},
    [23] = {"IQ4_XS", 256, 136, NUMOE_DTYPE_OTHER},
    [24] = {"I8", 1, 1, NUMOE_DTYPE_I8},
    [25] = {"I16", 1, 2, NUMOE_DTYPE_I16},
    [26] = {"I32", 1, 4, NUMOE_DTYPE_I32},
    [27] = {"I64", 1, 8, NUMOE_DTYPE_I64},
    [28] = {"F64", 1, 8, NUMOE_DTYPE_F64},
    [29] = {"IQ1_M", 256, 56, NUMOE_DTYPE_OTHER},
    [30] = {"BF16", 1, 2, NUMOE_DTYPE_BF16},
    [34] = {"TQ1_0", 256, 54, NUMOE_DTYPE_OTHER},
    [35] = {"TQ2_0", 256, 66, NUMOE_DTYPE_OTHER},
    [39] = {"MXFP4", 32, 17, NUMOE_DTYPE_MXFP4},
    [40] = {"NVFP4", 64, 36, NUMOE_DTYPE_OTHER},
};

enum { TENSOR_TYPES = sizeof tensor_types / sizeof tensor_types[0] };

enum value_type {
    VALUE_U8,
    VALUE_I8,
    VALUE_U16,
    VALUE_I16,
    VALUE_U32,
    VALUE_I32,
    VALUE_F32,
    VALUE_BOOL,
    VALUE_STRING,
    VALUE_ARRAY,
    VALUE_U64,
    VALUE_I64,
    VALUE_F64,
    VALUE_TYPES
};

/* Bytes of a value; 0: it says itself. */
static const uint8_t value_bytes[VALUE_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

/* ---- reading -------------------------------------------------------------------------------- */

struct source {
    const char *path;
    int fd;
    uint64_t bytes, at; /* of the file; what is read next */
    uint8_t *window;
    uint64_t window_at, window_bytes;
    struct numoe_error *error;
};

static int no_memory(const struct source *s)
{
    return numoe_error_set(s->error, -ENOMEM, s->path, "no memory for its header");
}

static int ends_early(const struct source *s, const char *what, uint64_t bytes)
{
    return numoe_error_set(s->error, -EBADMSG, s->path,
                           "%s of %llu bytes at byte %llu passes the end of the file of %llu bytes",
                           what, (unsigned long long)bytes, (unsigned long long)s->at,
                           (unsigned long long)s->bytes);
}

/* The next bytes, at most a window's. */
static int take(struct source *s, const char *what, uint64_t bytes, const uint8_t **out)
{
    int code;

    if (bytes > s->bytes - s->at)
        return ends_early(s, what, bytes);
    if (s->at < s->window_at || bytes > s->window_at + s->window_bytes - s->at) {
        const uint64_t left = s->bytes - s->at;
        s->window_at = s->at;
        s->window_bytes = left < WINDOW_BYTES ? left : WINDOW_BYTES;
        code = numoe_file_read(s->fd, s->path, s->window, s->window_bytes, s->at, s->error);
        if (code < 0) {
            s->window_bytes = 0;
            return code;
        }
    }
    *out = s->window + (s->at - s->window_at);
    s->at += bytes;
    return 0;
}

static int skip(struct source *s, const char *what, uint64_t bytes)
{
    if (bytes > s->bytes - s->at)
        return ends_early(s, what, bytes);
    s->at += bytes;
    /* so that the window's end is never before it */
    if (s->at > s->window_at + s->window_bytes) {
        s->window_at = s->at;
        s->window_bytes = 0;
    }
    return 0;
}

/* A little-endian number of 1 to 8 bytes. */
static int number(struct source *s, const char *what, unsigned bytes, uint64_t *out)
{
    const uint8_t *raw = NULL;
    int code = take(s, what, bytes, &raw);

    *out = 0;
    for (unsigned i = bytes; code == 0 && i-- > 0;)
        *out = *out << 8 | raw[i];
    return code;
}

/* A string shorter than `room`, to which it is copied with a NUL. */
static int string(struct source *s, const char *what, char *out, uint64_t room)
{
    const uint8_t *raw;
    uint64_t length = 0;
    int code = number(s, what, 8, &length);

    if (code == 0 && length > s->bytes - s->at)
        return ends_early(s, what, length);
    if (code == 0 && length >= room)
        return numoe_error_set(
            s->error, -EBADMSG, s->path, "%s at byte %llu has %llu bytes, not under %llu", what,
            (unsigned long long)s->at, (unsigned long long)length, (unsigned long long)room);
    if (code == 0)
        code = take(s, what, length, &raw);
    if (code < 0)
        return code;
    memcpy(out, raw, length);
    out[length] = 0;
    if (strlen(out) != length)
        return numoe_error_set(s->error, -EBADMSG, s->path, "%s at byte %llu holds a NUL", what,
                               (unsigned long long)(s->at - length));
    return 0;
}

/* ---- metadata ------------------------------------------------------------------------------- */

/* A value of fixed size as JSON; NULL for a number that JSON has not. */
static json_t *to_json(enum value_type type, uint64_t raw)
{
    const unsigned bits = 8u * value_bytes[type];
    const uint64_t sign = (uint64_t)1 << (bits - 1);
    uint32_t low = (uint32_t)raw;
    double real;
    float single;

    switch (type) {
    case VALUE_F32:
        memcpy(&single, &low, sizeof single);
        return isfinite(single) ? json_real((double)single) : NULL;
    case VALUE_F64:
        memcpy(&real, &raw, sizeof real);
        return isfinite(real) ? json_real(real) : NULL;
    case VALUE_BOOL:
        return json_boolean(raw != 0);
    case VALUE_I8:
    case VALUE_I16:
    case VALUE_I32:
    case VALUE_I64:
        return json_integer((json_int_t)((raw ^ sign) - sign));
    default:
        /* what passes JSON's integers is no number of anything here */
        return raw <= INT64_MAX ? json_integer((json_int_t)raw) : NULL;
    }
}

static int bad_type(const struct source *s, const char *key, uint64_t type)
{
    return numoe_error_set(s->error, -EBADMSG, s->path, "key \"%s\": value type %llu is not known",
                           numoe_quote(key).text, (unsigned long long)type);
}

static int fixed_array(struct source *s, const char *key, enum value_type type, uint64_t count,
                       json_t **out)
{
    uint64_t bytes = 0, raw = 0;
    int code = 0;

    if (!numoe_mul_u64(count, value_bytes[type], &bytes))
        return ends_early(s, "an array", UINT64_MAX);
    if (count > MAX_ARRAY || !out)
        return skip(s, "an array", bytes);
    *out = json_array();
    for (; count && code == 0; count--) {
        code = number(s, key, value_bytes[type], &raw);
        if (code == 0)
            json_array_append_new(*out, to_json(type, raw));
    }
    return code;
}

static int read_array(struct source *s, const char *key, unsigned depth, json_t **out)
{
    uint64_t type = 0, count = 0, length = 0;
    int code = number(s, "an array's type", 4, &type);

    if (code == 0)
        code = number(s, "an array's length", 8, &count);
    if (code < 0)
        return code;
    if (type >= VALUE_TYPES)
        return bad_type(s, key, type);
    if (value_bytes[type])
        return fixed_array(s, key, (enum value_type)type, count, out);
    if (type == VALUE_ARRAY && depth == MAX_DEPTH)
        return numoe_error_set(s->error, -EBADMSG, s->path,
                               "key \"%s\": arrays are nested more than %d deep",
                               numoe_quote(key).text, MAX_DEPTH);
    /* each element takes some bytes of the file, so the loop ends with it */
    for (; count && code == 0; count--) {
        if (type == VALUE_ARRAY) {
            code = read_array(s, key, depth + 1, NULL);
        } else {
            code = number(s, "a string's length", 8, &length);
            if (code == 0)
                code = skip(s, "a string", length);
        }
    }
    return code;
}

/* A string of metadata: kept when it is short. */
static int read_string(struct source *s, json_t **out)
{
    char text[MAX_STRING];
    const uint8_t *raw;
    uint64_t length = 0;
    int code = number(s, "a string's length", 8, &length);

    if (code < 0 || length >= sizeof text)
        return code < 0 ? code : skip(s, "a string", length);
    code = take(s, "a string", length, &raw);
    if (code == 0 && !memchr(raw, 0, length))
        *out = json_stringn((const char *)raw, length); /* NULL when it is not UTF-8 */
    return code;
}

static int read_value(struct source *s, const char *key, json_t **out)
{
    uint64_t type = 0, raw = 0;
    int code = number(s, "a value's type", 4, &type);

    *out = NULL;
    if (code < 0)
        return code;
    if (type >= VALUE_TYPES)
        return bad_type(s, key, type);
    if (type == VALUE_STRING)
        return read_string(s, out);
    if (type == VALUE_ARRAY)
        return read_array(s, key, 1, out);
    code = number(s, "a value", value_bytes[type], &raw);
    if (code == 0)
        *out = to_json((enum value_type)type, raw);
    return code;
}

/* All pairs into `all`; what is not kept is null there. */
static int read_metadata(struct source *s, uint64_t count, json_t *all)
{
    char *key = malloc(MAX_KEY);
    int code = key ? 0 : no_memory(s);

    for (; count && code == 0; count--) {
        json_t *value = NULL;
        code = string(s, "a key", key, MAX_KEY);
        if (code == 0)
            code = read_value(s, key, &value);
        if (code == 0 && json_object_get(all, key))
            code = numoe_error_set(s->error, -EBADMSG, s->path, "key \"%s\" is there twice",
                                   numoe_quote(key).text);
        if (code < 0) {
            json_decref(value);
            break;
        }
        if (json_object_set_new(all, key, value ? value : json_null()) < 0)
            code = numoe_error_set(s->error, -EBADMSG, s->path, "key \"%s\" is not UTF-8",
                                   numoe_quote(key).text);
    }
    free(key);
    return code;
}

/* What the caller gets: keys without the architecture before them. */
static int hand_on(const struct source *s, const json_t *all, json_t *metadata)
{
    json_t *name = json_object_get(all, "general.architecture"), *value;
    const size_t length = json_string_length(name);
    const char *key;

    if (!json_is_string(name) || !length)
        return numoe_error_set(s->error, -EBADMSG, s->path, "names no general.architecture");
    json_object_foreach((json_t *)(uintptr_t)all, key, value)
    {
        const bool own = !strncmp(key, json_string_value(name), length) && key[length] == '.';
        if (json_object_set(metadata, own ? key + length + 1 : key, value) < 0)
            return no_memory(s);
    }
    return json_object_set(metadata, "model_type", name) < 0 ? no_memory(s) : 0;
}

static int find_alignment(const struct source *s, const json_t *all, uint64_t *out)
{
    const json_t *value = json_object_get(all, "general.alignment");

    *out = 32;
    if (!value)
        return 0;
    *out = (uint64_t)json_integer_value(value);
    if (!json_is_integer(value) || json_integer_value(value) < 1 || *out > UINT32_MAX ||
        (*out & (*out - 1)))
        return numoe_error_set(s->error, -EBADMSG, s->path,
                               "general.alignment is not a power of two");
    return 0;
}

/* ---- tensors -------------------------------------------------------------------------------- */

static int bad_tensor(const struct source *s, const char *name, const char *what, uint64_t value)
{
    return numoe_error_set(s->error, -EBADMSG, s->path, "tensor \"%s\": %s %llu",
                           numoe_quote(name).text, what, (unsigned long long)value);
}

/* Bytes of a tensor by its type and shape, slowest dimension first. */
static int tensor_bytes(const struct source *s, const struct numoe_tensor *t,
                        const struct tensor_type *type, uint64_t *bytes)
{
    const uint64_t row = t->shape[t->rank - 1];
    bool fits = true;

    if (row % type->values)
        return numoe_error_set(s->error, -EBADMSG, s->path,
                               "tensor \"%s\": rows of %llu are no whole blocks of %u of %s",
                               numoe_quote(t->name).text, (unsigned long long)row, type->values,
                               type->name);
    *bytes = row / type->values;
    fits = numoe_mul_u64(*bytes, type->bytes, bytes);
    for (unsigned i = 0; fits && i + 1 < t->rank; i++)
        fits = numoe_mul_u64(*bytes, t->shape[i], bytes);
    if (!fits)
        return numoe_error_set(s->error, -EBADMSG, s->path, "tensor \"%s\": shape %s overflows",
                               numoe_quote(t->name).text, numoe_shape_text(t->shape, t->rank).text);
    return 0;
}

/* One tensor's description. begin is its offset in the data, end that plus its size. */
static int read_tensor(struct source *s, struct numoe_tensors *tensors, uint32_t file,
                       struct numoe_tensor *out)
{
    char name[MAX_NAME], *copy;
    uint64_t rank = 0, type = 0, offset = 0, bytes = 0, *shape;
    int code = string(s, "a tensor's name", name, sizeof name);

    if (code == 0)
        code = number(s, "a tensor's rank", 4, &rank);
    if (code < 0)
        return code;
    if (rank < 1 || rank > MAX_DIMS)
        return bad_tensor(s, name, "its number of dimensions is not 1 to 4:", rank);
    copy = numoe_tensors_keep(tensors, strlen(name) + 1);
    shape = numoe_tensors_keep(tensors, rank * sizeof *shape);
    if (!copy || !shape)
        return no_memory(s);
    strcpy(copy, name);
    for (uint64_t i = rank; i-- > 0 && code == 0;)
        code = number(s, "a dimension", 8, &shape[i]);
    if (code == 0)
        code = number(s, "a tensor's type", 4, &type);
    if (code == 0)
        code = number(s, "a tensor's offset", 8, &offset);
    if (code < 0)
        return code;
    if (type >= TENSOR_TYPES || !tensor_types[type].name)
        return bad_tensor(s, name, "type is not known:", type);
    *out = (struct numoe_tensor){.name = copy,
                                 .shape = shape,
                                 .begin = offset,
                                 .file = file,
                                 .rank = (uint8_t)rank,
                                 .dtype = (uint8_t)tensor_types[type].dtype,
                                 .type = tensor_types[type].name};
    code = tensor_bytes(s, out, &tensor_types[type], &bytes);
    if (code == 0 && !numoe_add_u64(offset, bytes, &out->end))
        return bad_tensor(s, name, "its end overflows; it begins at data offset", offset);
    return code;
}

/* Each where the padded ones before it end; offsets become those of the file. */
static int place_tensors(const struct source *s, struct numoe_tensor *items, uint64_t count,
                         uint64_t alignment)
{
    uint64_t due = 0, data;

    if (!numoe_round_up_u64(s->at, alignment, &data))
        data = UINT64_MAX;
    for (uint64_t i = 0; i < count; i++) {
        struct numoe_tensor *t = &items[i];
        if (t->begin != due)
            return numoe_error_set(s->error, -EBADMSG, s->path,
                                   "tensor \"%s\" begins at data offset %llu where %llu is due",
                                   numoe_quote(t->name).text, (unsigned long long)t->begin,
                                   (unsigned long long)due);
        if (data > s->bytes || t->end > s->bytes - data)
            return numoe_error_set(s->error, -EBADMSG, s->path,
                                   "tensor \"%s\" of %llu bytes at data offset %llu passes the end "
                                   "of the file of %llu bytes",
                                   numoe_quote(t->name).text,
                                   (unsigned long long)(t->end - t->begin),
                                   (unsigned long long)t->begin, (unsigned long long)s->bytes);
        if (!numoe_round_up_u64(t->end, alignment, &due))
            due = UINT64_MAX; /* no tensor begins there */
        t->begin += data;
        t->end += data;
    }
    return 0;
}

/* ---- the header ----------------------------------------------------------------------------- */

/* Magic, version and the two counts, judged before anything is allocated by them. */
static int read_start(struct source *s, uint64_t *tensor_count, uint64_t *pair_count)
{
    const uint8_t *magic;
    uint64_t version = 0;
    int code = take(s, "its beginning", 4, &magic);

    if (code < 0)
        return code;
    if (memcmp(magic, "GGUF", 4))
        return numoe_error_set(s->error, -EBADMSG, s->path, "does not begin with GGUF");
    code = number(s, "its version", 4, &version);
    if (code < 0)
        return code;
    if (version == (uint64_t)3 << 24 || version == (uint64_t)2 << 24)
        return numoe_error_set(s->error, -ENOTSUP, s->path, "is big-endian GGUF");
    if (version != 2 && version != 3)
        return numoe_error_set(s->error, -ENOTSUP, s->path,
                               "is GGUF of version %llu; 2 and 3 are read",
                               (unsigned long long)version);
    code = number(s, "its number of tensors", 8, tensor_count);
    if (code == 0)
        code = number(s, "its number of keys", 8, pair_count);
    if (code < 0)
        return code;
    if (*tensor_count > (s->bytes - s->at) / LEAST_TENSOR ||
        *pair_count > (s->bytes - s->at) / LEAST_PAIR)
        return numoe_error_set(s->error, -EBADMSG, s->path,
                               "%llu tensors and %llu keys are more than its %llu bytes hold",
                               (unsigned long long)*tensor_count, (unsigned long long)*pair_count,
                               (unsigned long long)s->bytes);
    return 0;
}

static int read_header(struct source *s, struct numoe_tensors *tensors, uint32_t file, json_t *all,
                       json_t *metadata)
{
    struct numoe_tensor *items;
    const char *twice;
    uint64_t count = 0, pairs = 0, alignment = 0;
    int code = read_start(s, &count, &pairs);

    if (code == 0)
        code = read_metadata(s, pairs, all);
    if (code == 0)
        code = find_alignment(s, all, &alignment);
    if (code == 0 && metadata)
        code = hand_on(s, all, metadata);
    if (code < 0)
        return code;
    items = numoe_tensors_room(tensors, count);
    if (!items)
        return no_memory(s);
    for (uint64_t i = 0; i < count && code == 0; i++)
        code = read_tensor(s, tensors, file, &items[i]);
    if (code == 0)
        code = place_tensors(s, items, count, alignment);
    twice = code == 0 ? numoe_tensors_join(tensors, count) : NULL;
    if (twice)
        return numoe_error_set(s->error, -EBADMSG, s->path, "tensor \"%s\" is there twice",
                               numoe_quote(twice).text);
    return code;
}

int numoe_gguf_read(struct numoe_tensors *tensors, const char *path, uint32_t file,
                    struct numoe_file_id *id, json_t *metadata, struct numoe_error *error)
{
    struct source s = {.path = path, .error = error};
    struct numoe_file_id opened;
    json_t *all;
    bool cached;
    int code;

    s.fd = numoe_file_open(path, &opened, error);
    if (s.fd < 0)
        return s.fd;
    s.bytes = opened.bytes;
    cached = numoe_file_begin_header(s.fd);
    s.window = malloc(WINDOW_BYTES);
    all = json_object();
    code = s.window && all ? read_header(&s, tensors, file, all, metadata) : no_memory(&s);
    if (code == 0 && id)
        *id = opened;
    json_decref(all);
    free(s.window);
    numoe_file_end_header(s.fd, s.window_at + s.window_bytes, cached);
    close(s.fd);
    return code;
}
