/* Read JSON that may come from anyone. SPDX-License-Identifier: Apache-2.0 */
#include "topo_read.h"
#include "topo_print.h"
#include "topo_saved_form.h"
#include "topo_text.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

void topo_read_wrong(struct topo_reader *reader, const char *key, const char *format, ...)
{
    char words[256];
    va_list args;

    if (reader->rc)
        return;
    va_start(args, format);
    vsnprintf(words, sizeof words, format, args);
    va_end(args);
    reader->rc =
        numoe_error_set(reader->error, reader->code, reader->file, "damaged %s: %s%s%s %s",
                        reader->what, reader->at, *reader->at && *key ? "." : "", key, words);
}

void topo_read_no_memory(struct topo_reader *reader)
{
    if (!reader->rc)
        reader->rc = numoe_error_set(reader->error, -ENOMEM, reader->file, "out of memory");
}

json_t *topo_read_root(struct topo_reader *reader, const char *text, size_t bytes, const char *key,
                       int version, const char *neither)
{
    const json_t *found;
    json_error_t where;
    json_t *root;

    root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
    if (!root) {
        reader->rc =
            numoe_error_set(reader->error, reader->code, reader->file, "%s: line %d, column %d: %s",
                            neither, where.line, where.column, where.text);
        return NULL;
    }
    found = json_object_get(root, key);
    if (!json_is_integer(found))
        reader->rc = numoe_error_set(reader->error, reader->code, reader->file,
                                     "JSON, but not a %s: no number \"%s\"", reader->what, key);
    else if (json_integer_value(found) != version)
        reader->rc = numoe_error_set(reader->error, reader->code, reader->file,
                                     "a %s of version %" JSON_INTEGER_FORMAT
                                     "; this program reads version %d",
                                     reader->what, json_integer_value(found), version);
    if (reader->rc) {
        json_decref(root);
        return NULL;
    }
    return root;
}

/* Whether value is an integer within a range; says what is wrong if not. */
static bool integer(struct topo_reader *reader, const json_t *value, const char *key,
                    uint64_t least, uint64_t most)
{
    json_int_t got = json_integer_value(value);

    if (!json_is_integer(value))
        topo_read_wrong(reader, key, value ? "is not a whole number" : "is missing");
    else if (got < 0 || (uint64_t)got < least || (uint64_t)got > most)
        topo_read_wrong(reader, key,
                        "is %" JSON_INTEGER_FORMAT ", out of range: %" PRIu64 " to %" PRIu64, got,
                        least, most);
    else
        return true;
    return false;
}

uint64_t topo_read_between(struct topo_reader *reader, const json_t *object, const char *key,
                           uint64_t least, uint64_t most)
{
    const json_t *value = json_object_get(object, key);

    return integer(reader, value, key, least, most) ? (uint64_t)json_integer_value(value) : 0;
}

uint64_t topo_read_number(struct topo_reader *reader, const json_t *object, const char *key,
                          uint64_t most)
{
    return topo_read_between(reader, object, key, 0, most);
}

uint32_t topo_read_u32(struct topo_reader *reader, const json_t *object, const char *key,
                       uint32_t most)
{
    return (uint32_t)topo_read_number(reader, object, key, most);
}

uint32_t topo_read_index(struct topo_reader *reader, const json_t *object, const char *key,
                         uint32_t count)
{
    if (json_is_null(json_object_get(object, key)))
        return NUMOE_NONE;
    if (!count) {
        topo_read_wrong(reader, key, "is an index of something that is not there");
        return NUMOE_NONE;
    }
    return topo_read_u32(reader, object, key, count - 1);
}

bool topo_read_boolean(struct topo_reader *reader, const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);

    if (!json_is_boolean(value))
        topo_read_wrong(reader, key, value ? "is neither true nor false" : "is missing");
    return json_is_true(value);
}

double topo_read_real(struct topo_reader *reader, const json_t *object, const char *key,
                      double most)
{
    const json_t *value = json_object_get(object, key);
    double got = json_number_value(value);

    if (!json_is_number(value))
        topo_read_wrong(reader, key, value ? "is not a number" : "is missing");
    else if (!isfinite(got) || got < 0 || got > most)
        topo_read_wrong(reader, key, "is %g, out of range: 0 to %g", got, most);
    else
        return got;
    return 0;
}

const char *topo_read_string(struct topo_reader *reader, const json_t *value, const char *key,
                             size_t most)
{
    const char *got = json_string_value(value);

    if (!got)
        topo_read_wrong(reader, key, value ? "is not a string" : "is missing");
    else if (json_string_length(value) >= most)
        topo_read_wrong(reader, key, "is too long: %zu bytes, %zu are allowed",
                        json_string_length(value), most - 1);
    else
        return got;
    return "";
}

char *topo_read_copy(struct topo_reader *reader, const json_t *value, const char *key)
{
    const char *got = topo_read_string(reader, value, key, TOPO_SAVED_TEXT);
    size_t size = strlen(got) + 1;
    char *copy = malloc(size);

    if (copy)
        topo_copy_printable(copy, size, got);
    else
        topo_read_no_memory(reader);
    return copy;
}

enum numoe_node_kind topo_read_kind(struct topo_reader *reader, const json_t *object,
                                    const char *key)
{
    const char *name = topo_read_string(reader, json_object_get(object, key), key, 16);

    for (int kind = NUMOE_NODE_DRAM; kind <= NUMOE_NODE_GPU; kind++)
        if (!strcmp(name, topo_kind_name((enum numoe_node_kind)kind)))
            return (enum numoe_node_kind)kind;
    topo_read_wrong(reader, key, "is \"%s\", which is no kind of memory", name);
    return NUMOE_NODE_DRAM;
}

void topo_read_limits(struct topo_reader *reader, const json_t *object, uint64_t *cgroup_bytes,
                      double *cpu_quota)
{
    *cgroup_bytes = UINT64_MAX;
    if (!json_is_null(json_object_get(object, "cgroup_bytes")))
        *cgroup_bytes = topo_read_number(reader, object, "cgroup_bytes", INT64_MAX);
    if (!json_is_null(json_object_get(object, "cpu_quota")))
        *cpu_quota = topo_read_real(reader, object, "cpu_quota", 1e9);
}

void topo_read_notes(struct topo_reader *reader, const json_t *object, char ***notes,
                     uint32_t *count)
{
    const json_t *items = topo_read_array(reader, object, "notes", 0, TOPO_SAVED_NOTES);

    for (size_t i = 0; i < json_array_size(items) && !reader->rc; i++) {
        char *note = topo_read_copy(reader, json_array_get(items, i), "notes");

        if (note && topo_note(notes, count, "%s", note))
            topo_read_no_memory(reader);
        free(note);
    }
}

const json_t *topo_read_object(struct topo_reader *reader, const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);

    if (json_is_object(value)) {
        snprintf(reader->at, sizeof reader->at, "%s", key);
        return value;
    }
    topo_read_wrong(reader, key, value ? "is not an object" : "is missing");
    return NULL;
}

const json_t *topo_read_array(struct topo_reader *reader, const json_t *object, const char *key,
                              size_t least, size_t most)
{
    const json_t *value = json_object_get(object, key);

    if (!json_is_array(value))
        topo_read_wrong(reader, key, value ? "is not an array" : "is missing");
    else if (json_array_size(value) < least || json_array_size(value) > most)
        topo_read_wrong(reader, key, "has %zu items: too few or too many, %zu to %zu are allowed",
                        json_array_size(value), least, most);
    else
        return value;
    return NULL;
}

const json_t *topo_read_item(struct topo_reader *reader, const json_t *items, const char *key,
                             size_t i)
{
    const json_t *value = json_array_get(items, i);

    snprintf(reader->at, sizeof reader->at, "%s[%zu]", key, i);
    if (!json_is_object(value))
        topo_read_wrong(reader, "", "is not an object");
    return value;
}

uint64_t topo_read_element(struct topo_reader *reader, const json_t *items, const char *key,
                           size_t i, uint64_t most)
{
    const json_t *value = json_array_get(items, i);
    char name[64];

    snprintf(name, sizeof name, "%s[%zu]", key, i);
    return integer(reader, value, name, 0, most) ? (uint64_t)json_integer_value(value) : 0;
}

uint32_t *topo_read_distances(struct topo_reader *reader, const json_t *object, const char *key,
                              uint32_t nodes)
{
    size_t count = (size_t)nodes * nodes;
    const json_t *items = topo_read_array(reader, object, key, count, count);
    uint32_t *distances = topo_read_room(reader, count, sizeof *distances);

    for (size_t i = 0; i < count && !reader->rc; i++) {
        distances[i] = (uint32_t)topo_read_element(reader, items, key, i, UINT32_MAX);
        if (i % ((size_t)nodes + 1) == 0 && distances[i] != 10)
            topo_read_wrong(reader, key, "has %u where a node's own, 10, must be", distances[i]);
    }
    return distances;
}

void topo_read_outside(struct topo_reader *reader)
{
    reader->at[0] = 0;
}

void *topo_read_room(struct topo_reader *reader, size_t count, size_t size)
{
    void *made = reader->rc ? NULL : calloc(count ? count : 1, size);

    if (!made)
        topo_read_no_memory(reader);
    return made;
}
