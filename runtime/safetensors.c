/* Headers of safetensors files. SPDX-License-Identifier: Apache-2.0 */
#include "safetensors.h"

#include "base/checked.h"
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- one header ----------------------------------------------------------------------------- */

struct header {
    const char *path;
    uint64_t data_begin; /* of the file */
    uint64_t data_bytes;
    struct numoe_error *error;
};

static int no_memory(const struct header *h)
{
    return numoe_error_set(h->error, -ENOMEM, h->path, "no memory for the table of its tensors");
}

static int bad_tensor(const struct header *h, const char *name, const char *what)
{
    return numoe_error_set(h->error, -EBADMSG, h->path, "tensor \"%s\": %s", numoe_quote(name).text,
                           what);
}

/* A JSON number that is a whole one from 0 on. */
static bool natural(const json_t *value, uint64_t *out)
{
    json_int_t number;

    if (!json_is_integer(value))
        return false;
    number = json_integer_value(value);
    if (number < 0)
        return false;
    *out = (uint64_t)number;
    return true;
}

static int find_dtype(const json_t *value)
{
    int i;

    if (!json_is_string(value))
        return -1;
    for (i = 0; i < NUMOE_DTYPE_MXFP4; i++)
        if (!strcmp(numoe_dtype_name((enum numoe_dtype)i), json_string_value(value)))
            return i;
    return -1;
}

static int read_tensor(const struct header *h, struct numoe_tensors *tensors, const char *name,
                       const json_t *value, uint32_t file, struct numoe_tensor *out)
{
    const json_t *dtype, *shape, *offsets;
    uint64_t offset[2], elements = 1, bits, *dims;
    size_t rank, i, length;
    char *copy;
    int type;

    if (!json_is_object(value))
        return bad_tensor(h, name, "its entry is not an object");
    dtype = json_object_get(value, "dtype");
    shape = json_object_get(value, "shape");
    offsets = json_object_get(value, "data_offsets");

    type = find_dtype(dtype);
    if (type < 0) {
        if (!json_is_string(dtype))
            return bad_tensor(h, name, "dtype is missing or not a string");
        return numoe_error_set(h->error, -EBADMSG, h->path, "tensor \"%s\": unknown dtype \"%s\"",
                               numoe_quote(name).text, numoe_quote(json_string_value(dtype)).text);
    }
    if (!json_is_array(shape))
        return bad_tensor(h, name, "shape is missing or not an array");
    rank = json_array_size(shape);
    if (rank > NUMOE_SAFETENSORS_MAX_RANK)
        return numoe_error_set(h->error, -EBADMSG, h->path,
                               "tensor \"%s\": %zu dimensions, above the limit of %d",
                               numoe_quote(name).text, rank, NUMOE_SAFETENSORS_MAX_RANK);
    if (!json_is_array(offsets))
        return bad_tensor(h, name, "data_offsets is missing or not an array");
    if (json_array_size(offsets) != 2)
        return numoe_error_set(h->error, -EBADMSG, h->path,
                               "tensor \"%s\": data_offsets has %zu numbers, not 2",
                               numoe_quote(name).text, json_array_size(offsets));
    for (i = 0; i < 2; i++)
        if (!natural(json_array_get(offsets, i), &offset[i]))
            return bad_tensor(h, name, "a data offset is not a whole number from 0 on");

    length = strlen(name) + 1;
    copy = numoe_tensors_keep(tensors, length);
    dims = numoe_tensors_keep(tensors, rank * sizeof *dims);
    if (!copy || !dims)
        return no_memory(h);
    memcpy(copy, name, length);
    for (i = 0; i < rank; i++)
        if (!natural(json_array_get(shape, i), &dims[i]))
            return bad_tensor(h, name, "a dimension is not a whole number from 0 on");
    for (i = 0; i < rank; i++)
        if (!numoe_mul_u64(elements, dims[i], &elements))
            break;
    if (i < rank || !numoe_mul_u64(elements, numoe_dtype_bits((enum numoe_dtype)type), &bits))
        return numoe_error_set(h->error, -EBADMSG, h->path, "tensor \"%s\": shape %s overflows",
                               numoe_quote(name).text, numoe_shape_text(dims, (unsigned)rank).text);
    if (bits % 8)
        return numoe_error_set(h->error, -EBADMSG, h->path,
                               "tensor \"%s\": shape %s of %s is not a whole number of bytes",
                               numoe_quote(name).text, numoe_shape_text(dims, (unsigned)rank).text,
                               numoe_dtype_name((enum numoe_dtype)type));
    if (offset[0] > offset[1])
        return numoe_error_set(h->error, -EBADMSG, h->path,
                               "tensor \"%s\": data_offsets [%llu, %llu] end before they begin",
                               numoe_quote(name).text, (unsigned long long)offset[0],
                               (unsigned long long)offset[1]);
    if (offset[1] - offset[0] != bits / 8)
        return numoe_error_set(h->error, -EBADMSG, h->path,
                               "tensor \"%s\": shape %s of %s needs %llu bytes but data_offsets "
                               "[%llu, %llu] hold %llu",
                               numoe_quote(name).text, numoe_shape_text(dims, (unsigned)rank).text,
                               numoe_dtype_name((enum numoe_dtype)type),
                               (unsigned long long)(bits / 8), (unsigned long long)offset[0],
                               (unsigned long long)offset[1],
                               (unsigned long long)(offset[1] - offset[0]));
    if (offset[1] > h->data_bytes)
        return numoe_error_set(
            h->error, -EBADMSG, h->path,
            "tensor \"%s\": data_offsets [%llu, %llu] pass the %llu bytes of data in the file",
            numoe_quote(name).text, (unsigned long long)offset[0], (unsigned long long)offset[1],
            (unsigned long long)h->data_bytes);

    *out = (struct numoe_tensor){.name = copy,
                                 .shape = dims,
                                 .begin = h->data_begin + offset[0],
                                 .end = h->data_begin + offset[1],
                                 .file = file,
                                 .rank = (uint8_t)rank,
                                 .dtype = (uint8_t)type,
                                 .type = numoe_dtype_name((enum numoe_dtype)type)};
    return 0;
}

static int check_metadata(const struct header *h, json_t *metadata)
{
    const char *key;
    json_t *value;

    if (!json_is_object(metadata))
        return numoe_error_set(h->error, -EBADMSG, h->path, "__metadata__ is not an object");
    json_object_foreach(metadata, key, value)
    {
        if (!json_is_string(value))
            return numoe_error_set(h->error, -EBADMSG, h->path,
                                   "__metadata__ entry \"%s\" is not a string",
                                   numoe_quote(key).text);
    }
    return 0;
}

static int by_offset(const void *a, const void *b)
{
    const struct numoe_tensor *x = a, *y = b;

    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end)
        return x->end < y->end ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* No gap, no overlap, from the data's start to the file's end. */
static int check_contiguous(const struct header *h, const struct numoe_tensor *items,
                            uint64_t count)
{
    uint64_t at = h->data_begin, i;

    for (i = 0; i < count; i++) {
        if (items[i].begin != at)
            return numoe_error_set(
                h->error, -EBADMSG, h->path,
                "tensor \"%s\" begins at data offset %llu where %llu is due: tensors %s",
                numoe_quote(items[i].name).text,
                (unsigned long long)(items[i].begin - h->data_begin),
                (unsigned long long)(at - h->data_begin),
                items[i].begin < at ? "overlap" : "leave a gap");
        at = items[i].end;
    }
    if (at != h->data_begin + h->data_bytes)
        return numoe_error_set(h->error, -EBADMSG, h->path,
                               "tensors end at data offset %llu but the file holds %llu bytes of "
                               "data",
                               (unsigned long long)(at - h->data_begin),
                               (unsigned long long)h->data_bytes);
    return 0;
}

static int read_header(const struct header *h, struct numoe_tensors *tensors, json_t *root,
                       uint32_t file)
{
    struct numoe_tensor *items = numoe_tensors_room(tensors, json_object_size(root));
    uint64_t found = 0;
    const char *key;
    json_t *value;
    int code;

    if (!items)
        return no_memory(h);
    json_object_foreach(root, key, value)
    {
        if (!strcmp(key, "__metadata__")) {
            code = check_metadata(h, value);
        } else {
            code = read_tensor(h, tensors, key, value, file, &items[found]);
            found++;
        }
        if (code < 0)
            return code;
    }
    qsort(items, found, sizeof *items, by_offset);
    code = check_contiguous(h, items, found);
    if (code < 0)
        return code;
    numoe_tensors_join(tensors, found);
    return 0;
}

/* The header's length from the file's first 8 bytes, judged before anything is allocated. */
static int header_length(int fd, const char *path, uint64_t file_bytes, uint64_t *length,
                         struct numoe_error *error)
{
    unsigned char raw[8];
    uint64_t n = 0;
    int i, code;

    if (file_bytes < sizeof raw)
        return numoe_error_set(error, -EBADMSG, path,
                               "has %llu bytes; a safetensors file has at least 8",
                               (unsigned long long)file_bytes);
    code = numoe_file_read(fd, path, raw, sizeof raw, 0, error);
    if (code < 0)
        return code;
    for (i = 7; i >= 0; i--)
        n = n << 8 | raw[i];
    if (n > file_bytes - sizeof raw)
        return numoe_error_set(error, -EBADMSG, path,
                               "header length %llu passes the end of the file of %llu bytes",
                               (unsigned long long)n, (unsigned long long)file_bytes);
    if (n > NUMOE_SAFETENSORS_HEADER_LIMIT)
        return numoe_error_set(
            error, -EBADMSG, path, "header length %llu is above the limit of %llu bytes",
            (unsigned long long)n, (unsigned long long)NUMOE_SAFETENSORS_HEADER_LIMIT);
    if (n < 2)
        return numoe_error_set(error, -EBADMSG, path,
                               "header length %llu is too short for a JSON object",
                               (unsigned long long)n);
    *length = n;
    return 0;
}

int numoe_tensors_read(struct numoe_tensors *tensors, const char *path, uint32_t file,
                       uint64_t *bytes, struct numoe_error *error)
{
    json_error_t parse_error;
    json_t *root = NULL;
    char *text = NULL;
    uint64_t file_bytes, length = 0;
    struct header h;
    int fd, code;

    fd = numoe_file_open(path, &file_bytes, error);
    if (fd < 0)
        return fd;
    code = header_length(fd, path, file_bytes, &length, error);
    if (code < 0)
        goto out;
    text = malloc(length);
    if (!text) {
        code = numoe_error_set(error, -ENOMEM, path, "no memory for its header of %llu bytes",
                               (unsigned long long)length);
        goto out;
    }
    code = numoe_file_read(fd, path, text, length, 8, error);
    if (code < 0)
        goto out;
    if (text[0] != '{') {
        code = numoe_error_set(error, -EBADMSG, path, "header does not begin with '{'");
        goto out;
    }
    root = json_loadb(text, length, JSON_REJECT_DUPLICATES, &parse_error);
    if (!root) {
        bool memory = json_error_code(&parse_error) == json_error_out_of_memory;
        code = numoe_error_set(error, memory ? -ENOMEM : -EBADMSG, path,
                               "header is not sound JSON at its byte %d: %s", parse_error.position,
                               numoe_quote(parse_error.text).text);
        goto out;
    }
    free(text);
    text = NULL;
    h = (struct header){path, 8 + length, file_bytes - 8 - length, error};
    code = read_header(&h, tensors, root, file);
    if (code == 0 && bytes)
        *bytes = file_bytes;
out:
    json_decref(root);
    free(text);
    /* Read-ahead went past the header. */
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
    return code;
}
