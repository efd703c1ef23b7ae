/* Headers of safetensors files. SPDX-License-Identifier: Apache-2.0 */
#include "safetensors.h"

#include "base/checked.h"
#include "files.h"
#include "json_scan.h"

#include <errno.h>
#include <fcntl.h>
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

/* What a tensor's entry says. */
struct entry {
    const char *dtype;
    uint64_t shape[NUMOE_SAFETENSORS_MAX_RANK], offsets[2];
    uint64_t rank, offset_count; /* as many as there are, however many are kept */
    bool has_dtype, has_shape, has_offsets;
    const char *wrong; /* the first thing that is */
};

static void entry_wrong(struct entry *entry, const char *what)
{
    if (!entry->wrong)
        entry->wrong = what;
}

/* An array of whole numbers. @return how many */
static uint64_t numbers(struct numoe_scan *scan, struct entry *entry, uint64_t *out, uint64_t room,
                        const char *no_array, const char *no_number)
{
    uint64_t count = 0, number = 0;

    if (!numoe_scan_is(scan, '[')) {
        entry_wrong(entry, no_array);
        numoe_scan_skip(scan);
        return 0;
    }
    for (bool first = true; numoe_scan_element(scan, &first); count++) {
        if (!numoe_scan_natural(scan, &number))
            entry_wrong(entry, no_number);
        if (count < room)
            out[count] = number;
    }
    return count;
}

/* One member of an entry; false when it is there a second time. */
static bool read_member(struct numoe_scan *scan, struct entry *entry, const char *key)
{
    bool *has;

    if (!strcmp(key, "dtype")) {
        has = &entry->has_dtype;
        if (numoe_scan_peek(scan) == '"')
            entry->dtype = numoe_scan_string(scan);
        else
            numoe_scan_skip(scan);
    } else if (!strcmp(key, "shape")) {
        has = &entry->has_shape;
        entry->rank = numbers(scan, entry, entry->shape, NUMOE_SAFETENSORS_MAX_RANK,
                              "shape is missing or not an array",
                              "a dimension is not a whole number from 0 on");
    } else if (!strcmp(key, "data_offsets")) {
        has = &entry->has_offsets;
        entry->offset_count =
            numbers(scan, entry, entry->offsets, 2, "data_offsets is missing or not an array",
                    "a data offset is not a whole number from 0 on");
    } else {
        numoe_scan_skip(scan);
        return true;
    }
    if (*has)
        return false;
    return *has = true;
}

static int read_entry(const struct header *h, struct numoe_scan *scan, const char *name,
                      struct entry *entry)
{
    const char *key;

    *entry = (struct entry){0};
    if (!numoe_scan_is(scan, '{')) {
        entry_wrong(entry, "its entry is not an object");
        numoe_scan_skip(scan);
        return 0;
    }
    for (bool first = true; numoe_scan_member(scan, &first, &key);)
        if (!read_member(scan, entry, key))
            return numoe_error_set(h->error, -EBADMSG, h->path,
                                   "tensor \"%s\": duplicate key \"%s\"", numoe_quote(name).text,
                                   numoe_quote(key).text);
    return 0;
}

static int find_dtype(const char *name)
{
    int i;

    for (i = 0; i < NUMOE_DTYPE_MXFP4; i++)
        if (!strcmp(numoe_dtype_name((enum numoe_dtype)i), name))
            return i;
    return -1;
}

/* That all of an entry is there; its dtype. */
static int check_entry(const struct header *h, const char *name, const struct entry *entry,
                       enum numoe_dtype *dtype)
{
    int type;

    if (entry->wrong)
        return bad_tensor(h, name, entry->wrong);
    if (!entry->dtype)
        return bad_tensor(h, name, "dtype is missing or not a string");
    type = find_dtype(entry->dtype);
    if (type < 0)
        return numoe_error_set(h->error, -EBADMSG, h->path, "tensor \"%s\": unknown dtype \"%s\"",
                               numoe_quote(name).text, numoe_quote(entry->dtype).text);
    if (!entry->has_shape)
        return bad_tensor(h, name, "shape is missing or not an array");
    if (entry->rank > NUMOE_SAFETENSORS_MAX_RANK)
        return numoe_error_set(
            h->error, -EBADMSG, h->path, "tensor \"%s\": %llu dimensions, above the limit of %d",
            numoe_quote(name).text, (unsigned long long)entry->rank, NUMOE_SAFETENSORS_MAX_RANK);
    if (!entry->has_offsets)
        return bad_tensor(h, name, "data_offsets is missing or not an array");
    if (entry->offset_count != 2)
        return numoe_error_set(h->error, -EBADMSG, h->path,
                               "tensor \"%s\": data_offsets has %llu numbers, not 2",
                               numoe_quote(name).text, (unsigned long long)entry->offset_count);
    *dtype = (enum numoe_dtype)type;
    return 0;
}

/* That shape, type and offsets agree, and lie in the file. */
static int check_size(const struct header *h, const char *name, const struct entry *entry,
                      enum numoe_dtype dtype)
{
    const uint64_t *offset = entry->offsets;
    const struct numoe_shape_text shape = numoe_shape_text(entry->shape, (unsigned)entry->rank);
    uint64_t elements = 1, bits;
    unsigned i;

    for (i = 0; i < entry->rank; i++)
        if (!numoe_mul_u64(elements, entry->shape[i], &elements))
            break;
    if (i < entry->rank || !numoe_mul_u64(elements, numoe_dtype_bits(dtype), &bits))
        return numoe_error_set(h->error, -EBADMSG, h->path, "tensor \"%s\": shape %s overflows",
                               numoe_quote(name).text, shape.text);
    if (bits % 8)
        return numoe_error_set(h->error, -EBADMSG, h->path,
                               "tensor \"%s\": shape %s of %s is not a whole number of bytes",
                               numoe_quote(name).text, shape.text, numoe_dtype_name(dtype));
    if (offset[0] > offset[1])
        return numoe_error_set(h->error, -EBADMSG, h->path,
                               "tensor \"%s\": data_offsets [%llu, %llu] end before they begin",
                               numoe_quote(name).text, (unsigned long long)offset[0],
                               (unsigned long long)offset[1]);
    if (offset[1] - offset[0] != bits / 8)
        return numoe_error_set(h->error, -EBADMSG, h->path,
                               "tensor \"%s\": shape %s of %s needs %llu bytes but data_offsets "
                               "[%llu, %llu] hold %llu",
                               numoe_quote(name).text, shape.text, numoe_dtype_name(dtype),
                               (unsigned long long)(bits / 8), (unsigned long long)offset[0],
                               (unsigned long long)offset[1],
                               (unsigned long long)(offset[1] - offset[0]));
    if (offset[1] > h->data_bytes)
        return numoe_error_set(
            h->error, -EBADMSG, h->path,
            "tensor \"%s\": data_offsets [%llu, %llu] pass the %llu bytes of data in the file",
            numoe_quote(name).text, (unsigned long long)offset[0], (unsigned long long)offset[1],
            (unsigned long long)h->data_bytes);
    return 0;
}

static int read_tensor(const struct header *h, struct numoe_tensors *tensors,
                       struct numoe_scan *scan, const char *name, uint32_t file,
                       struct numoe_tensor *out)
{
    const size_t length = strlen(name) + 1;
    enum numoe_dtype dtype = NUMOE_DTYPE_U8;
    struct entry entry;
    uint64_t *shape;
    char *copy;
    int code = read_entry(h, scan, name, &entry);

    if (code == 0 && scan->wrong)
        return 0; /* told at the end */
    if (code == 0)
        code = check_entry(h, name, &entry, &dtype);
    if (code == 0)
        code = check_size(h, name, &entry, dtype);
    if (code < 0)
        return code;
    copy = numoe_tensors_keep(tensors, length);
    shape = numoe_tensors_keep(tensors, entry.rank * sizeof *shape);
    if (!copy || !shape)
        return no_memory(h);
    memcpy(copy, name, length);
    memcpy(shape, entry.shape, entry.rank * sizeof *shape);
    *out = (struct numoe_tensor){.name = copy,
                                 .shape = shape,
                                 .begin = h->data_begin + entry.offsets[0],
                                 .end = h->data_begin + entry.offsets[1],
                                 .file = file,
                                 .rank = (uint8_t)entry.rank,
                                 .dtype = (uint8_t)dtype,
                                 .type = numoe_dtype_name(dtype)};
    return 0;
}

static int check_metadata(const struct header *h, struct numoe_scan *scan)
{
    const char *key;

    if (!numoe_scan_is(scan, '{'))
        return numoe_error_set(h->error, -EBADMSG, h->path, "__metadata__ is not an object");
    for (bool first = true; numoe_scan_member(scan, &first, &key);) {
        if (numoe_scan_peek(scan) != '"')
            return numoe_error_set(h->error, -EBADMSG, h->path,
                                   "__metadata__ entry \"%s\" is not a string",
                                   numoe_quote(key).text);
        numoe_scan_string(scan);
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

static int read_tensors(const struct header *h, struct numoe_tensors *tensors,
                        struct numoe_scan *scan, uint32_t file, uint64_t *found)
{
    struct numoe_tensor *items = NULL;
    uint64_t room = 0;
    bool metadata = false;
    const char *key;
    int code = 0;

    for (bool first = true; code == 0 && numoe_scan_member(scan, &first, &key);) {
        if (!strcmp(key, "__metadata__")) {
            if (metadata)
                return numoe_error_set(h->error, -EBADMSG, h->path, "duplicate key \"%s\"", key);
            metadata = true;
            code = check_metadata(h, scan);
            continue;
        }
        if (*found == room) {
            room = room ? 2 * room : 128;
            items = numoe_tensors_room(tensors, room); /* what is filled in already stays */
        }
        if (!items)
            return no_memory(h);
        code = read_tensor(h, tensors, scan, key, file, &items[*found]);
        ++*found;
    }
    if (code == 0 && !numoe_scan_end(scan))
        return numoe_error_set(h->error, -EBADMSG, h->path,
                               "header is not sound JSON at its byte %llu: %s",
                               (unsigned long long)scan->at, scan->wrong);
    return code;
}

static int read_header(const struct header *h, struct numoe_tensors *tensors,
                       struct numoe_scan *scan, uint32_t file)
{
    struct numoe_tensor *items;
    uint64_t found = 0;
    const char *twice;
    int code = read_tensors(h, tensors, scan, file, &found);

    if (code < 0)
        return code;
    items = numoe_tensors_room(tensors, found);
    if (!items)
        return no_memory(h);
    qsort(items, found, sizeof *items, by_offset);
    code = check_contiguous(h, items, found);
    if (code < 0)
        return code;
    twice = numoe_tensors_join(tensors, found);
    return twice ? numoe_error_set(h->error, -EBADMSG, h->path, "duplicate tensor \"%s\"",
                                   numoe_quote(twice).text)
                 : 0;
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
                       struct numoe_file_id *id, struct numoe_error *error)
{
    struct numoe_file_id opened;
    struct numoe_scan scan;
    char *text = NULL;
    uint64_t file_bytes, length = 0;
    struct header h;
    int fd, code;
    bool cached;

    fd = numoe_file_open(path, &opened, error);
    if (fd < 0)
        return fd;
    file_bytes = opened.bytes;
    cached = numoe_file_begin_header(fd);
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
    h = (struct header){path, 8 + length, file_bytes - 8 - length, error};
    scan = (struct numoe_scan){.text = text, .bytes = length, .at = 1};
    code = read_header(&h, tensors, &scan, file);
    if (code == 0 && id)
        *id = opened;
out:
    free(text);
    numoe_file_end_header(fd, 8 + length, cached);
    close(fd);
    return code;
}
