/*
 * Read a machine that was saved. The file may come from anyone: every number has its range, every
 * index its array, and what follows from other fields is compared with them, so that whoever uses
 * the machine may rely on the same things as with one that hwloc described.
 *
 * Keys that are not known are passed over: a later version may add some without a new number.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "topo_build.h"
#include "topo_load.h"
#include "topo_print.h"
#include "topo_saved_form.h"
#include "topo_text.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const uint64_t most_bytes = (uint64_t)1 << 60, most_mbs = (uint64_t)1 << 40;

/* What is read; the first thing that is wrong is kept, and everything after it is skipped. */
struct reader {
    const char *file;
    struct numoe_machine *machine;
    struct numoe_error *error;
    char at[48]; /* "nodes[3]" */
    int rc;
};

static void wrong(struct reader *reader, const char *key, const char *what)
{
    if (reader->rc)
        return;
    reader->rc =
        numoe_error_set(reader->error, -EINVAL, reader->file, "damaged saved machine: %s%s%s %s",
                        reader->at, *reader->at && *key ? "." : "", key, what);
}

static void no_memory(struct reader *reader)
{
    if (!reader->rc)
        reader->rc = numoe_error_set(reader->error, -ENOMEM, reader->file, "out of memory");
}

/* An integer from 0 up to and with most; 0 when it is not. */
static uint64_t number(struct reader *reader, const json_t *object, const char *key, uint64_t most)
{
    const json_t *value = json_object_get(object, key);

    if (!json_is_integer(value))
        wrong(reader, key, value ? "is not a whole number" : "is missing");
    else if (json_integer_value(value) < 0 || (uint64_t)json_integer_value(value) > most)
        wrong(reader, key, "is out of range");
    else
        return (uint64_t)json_integer_value(value);
    return 0;
}

/* An index below count, or null. */
static uint32_t index_of(struct reader *reader, const json_t *object, const char *key,
                         uint32_t count)
{
    if (json_is_null(json_object_get(object, key)))
        return NUMOE_NONE;
    if (!count) {
        wrong(reader, key, "is an index of something that is not there");
        return NUMOE_NONE;
    }
    return (uint32_t)number(reader, object, key, count - 1);
}

static bool boolean(struct reader *reader, const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);

    if (!json_is_boolean(value))
        wrong(reader, key, value ? "is neither true nor false" : "is missing");
    return json_is_true(value);
}

static double real(struct reader *reader, const json_t *object, const char *key, double most)
{
    const json_t *value = json_object_get(object, key);
    double got = json_number_value(value);

    if (!json_is_number(value))
        wrong(reader, key, value ? "is not a number" : "is missing");
    else if (!isfinite(got) || got < 0 || got > most)
        wrong(reader, key, "is out of range");
    else
        return got;
    return 0;
}

static const char *text(struct reader *reader, const json_t *value, const char *key, size_t most)
{
    const char *got = json_string_value(value);

    if (!got)
        wrong(reader, key, value ? "is not a string" : "is missing");
    else if (json_string_length(value) >= most)
        wrong(reader, key, "is too long");
    else
        return got;
    return "";
}

/* A printable copy. */
static char *text_copy(struct reader *reader, const json_t *value, const char *key)
{
    const char *got = text(reader, value, key, TOPO_SAVED_TEXT);
    size_t size = strlen(got) + 1;
    char *copy = malloc(size);

    if (copy)
        topo_copy_printable(copy, size, got);
    else
        no_memory(reader);
    return copy;
}

/* An array of least to most items; NULL with an error when it is not. */
static const json_t *array(struct reader *reader, const json_t *object, const char *key,
                           size_t least, size_t most)
{
    const json_t *value = json_object_get(object, key);

    if (!json_is_array(value))
        wrong(reader, key, value ? "is not an array" : "is missing");
    else if (json_array_size(value) < least || json_array_size(value) > most)
        wrong(reader, key, "has too few or too many items");
    else
        return value;
    return NULL;
}

/* Make room for an array's items. */
static void *room(struct reader *reader, size_t count, size_t size)
{
    void *made = reader->rc ? NULL : calloc(count ? count : 1, size);

    if (!made)
        no_memory(reader);
    return made;
}

static const json_t *item(struct reader *reader, const json_t *items, const char *key, size_t i)
{
    const json_t *value = json_array_get(items, i);

    snprintf(reader->at, sizeof reader->at, "%s[%zu]", key, i);
    if (!json_is_object(value))
        wrong(reader, "", "is not an object");
    return value;
}

/* ---- nodes and PUs ---- */

static enum numoe_node_kind kind_of(struct reader *reader, const json_t *object)
{
    const char *name = text(reader, json_object_get(object, "kind"), "kind", 16);

    for (int kind = NUMOE_NODE_DRAM; kind <= NUMOE_NODE_GPU; kind++)
        if (!strcmp(name, topo_kind_name((enum numoe_node_kind)kind)))
            return (enum numoe_node_kind)kind;
    wrong(reader, "kind", "is no kind of memory");
    return NUMOE_NODE_DRAM;
}

static void read_nodes(struct reader *reader, const json_t *root)
{
    struct numoe_machine *machine = reader->machine;
    const json_t *items = array(reader, root, "nodes", 1, TOPO_MAX_NODES);
    bool seen[TOPO_MAX_NODES] = {false};
    uint32_t domains = 0;
    uint64_t total = 0;

    machine->nodes = room(reader, json_array_size(items), sizeof *machine->nodes);
    if (reader->rc)
        return;
    machine->node_count = (uint32_t)json_array_size(items);
    for (uint32_t i = 0; i < machine->node_count && !reader->rc; i++) {
        const json_t *object = item(reader, items, "nodes", i);
        struct numoe_node *node = &machine->nodes[i];

        node->os_index = (uint32_t)number(reader, object, "os_index", TOPO_MAX_NODES - 1);
        node->kind = kind_of(reader, object);
        node->allowed = boolean(reader, object, "allowed");
        node->domain = (uint32_t)number(reader, object, "domain", machine->domain_count - 1);
        node->package = index_of(reader, object, "package", machine->package_count);
        node->beside = index_of(reader, object, "beside", machine->node_count);
        node->pu_count = (uint32_t)number(reader, object, "pu_count", TOPO_MAX_PUS);
        node->core_count = (uint32_t)number(reader, object, "core_count", TOPO_MAX_PUS);
        node->capacity_bytes = number(reader, object, "capacity_bytes", most_bytes - 1);
        node->free_bytes = number(reader, object, "free_bytes", node->capacity_bytes);
        node->huge_2m_free = number(reader, object, "huge_2m_free", most_bytes >> 21);
        if (json_object_get(object, "huge_1g_free")) /* absent from the first files */
            node->huge_1g_free = number(reader, object, "huge_1g_free", most_bytes >> 30);
        node->bandwidth_mbs = number(reader, object, "bandwidth_mbs", most_mbs - 1);
        if (reader->rc)
            return;
        if (seen[node->os_index])
            wrong(reader, "os_index", "appears twice");
        seen[node->os_index] = true;
        /* domains are numbered as nodes bring them up */
        if (node->domain > domains)
            wrong(reader, "domain", "is out of order");
        domains += node->domain == domains;
        total += node->capacity_bytes;
        if (total >= most_bytes)
            wrong(reader, "capacity_bytes", "makes a sum that no machine has");
    }
    if (domains != machine->domain_count)
        wrong(reader, "", "is the last node, and some domain has none");
}

/* A PU's node and what must follow from it. */
static void check_service(struct reader *reader, const struct numoe_pu *pu)
{
    const struct numoe_machine *machine = reader->machine;

    if (pu->node == NUMOE_NONE) {
        if (pu->domain != NUMOE_NONE)
            wrong(reader, "domain", "is given without a node");
    } else if (!machine->nodes[pu->node].allowed ||
               machine->nodes[pu->node].kind == NUMOE_NODE_GPU) {
        wrong(reader, "node", "is one that may not be used");
    } else if (pu->domain != machine->nodes[pu->node].domain) {
        wrong(reader, "domain", "is not its node's");
    }
}

static void read_pus(struct reader *reader, const json_t *root)
{
    struct numoe_machine *machine = reader->machine;
    const json_t *items = array(reader, root, "pus", 1, TOPO_MAX_PUS);
    uint32_t cores = 0, caches = 0;
    bool *seen = room(reader, TOPO_MAX_CPU_INDEX + 1, sizeof *seen);

    machine->pus = room(reader, json_array_size(items), sizeof *machine->pus);
    if (!reader->rc)
        machine->pu_count = (uint32_t)json_array_size(items);
    for (uint32_t i = 0; i < machine->pu_count && !reader->rc; i++) {
        const json_t *object = item(reader, items, "pus", i);
        struct numoe_pu *pu = &machine->pus[i];

        pu->os_index = (uint32_t)number(reader, object, "os_index", TOPO_MAX_CPU_INDEX);
        pu->allowed = boolean(reader, object, "allowed");
        pu->core = (uint32_t)number(reader, object, "core", machine->core_count - 1);
        pu->smt = (uint32_t)number(reader, object, "smt", TOPO_MAX_PUS);
        pu->node = index_of(reader, object, "node", machine->node_count);
        pu->node_is_near = boolean(reader, object, "node_is_near");
        pu->l3 = index_of(reader, object, "l3", machine->l3_count);
        pu->domain = index_of(reader, object, "domain", machine->domain_count);
        pu->package = index_of(reader, object, "package", machine->package_count);
        pu->efficiency = (uint32_t)number(reader, object, "efficiency", INT32_MAX);
        if (reader->rc)
            break;
        if (seen[pu->os_index])
            wrong(reader, "os_index", "appears twice");
        seen[pu->os_index] = true;
        /* PUs of a core, and of a cache, are neighbours, and both are numbered as they come */
        if (pu->core != cores && pu->core + 1 != cores)
            wrong(reader, "core", "is out of order");
        cores += pu->core == cores;
        if (pu->l3 != NUMOE_NONE && pu->l3 != caches && pu->l3 + 1 != caches)
            wrong(reader, "l3", "is out of order");
        caches += pu->l3 == caches;
        check_service(reader, pu);
    }
    if (!reader->rc && (cores != machine->core_count || caches != machine->l3_count))
        wrong(reader, "", "is the last CPU, and some core or cache has none");
    free(seen);
}

/* What counts PUs must be what there are. */
static void check_counts(struct reader *reader)
{
    const struct numoe_machine *machine = reader->machine;
    uint32_t core = NUMOE_NONE, node = NUMOE_NONE, thread = 0;
    uint32_t *pus = room(reader, machine->node_count, sizeof *pus);
    uint32_t *cores = room(reader, machine->node_count, sizeof *cores);

    for (uint32_t i = 0; i < machine->pu_count && !reader->rc; i++) {
        const struct numoe_pu *pu = &machine->pus[i];

        snprintf(reader->at, sizeof reader->at, "pus[%u]", i);
        if (pu->allowed)
            thread = pu->core == core ? thread + 1 : 0;
        if (pu->smt != (pu->allowed ? thread : 0))
            wrong(reader, "smt", "is not its place in its core");
        if (!pu->allowed)
            continue;
        if (pu->node != NUMOE_NONE) {
            pus[pu->node]++;
            cores[pu->node] += pu->core != core || pu->node != node;
        }
        core = pu->core;
        node = pu->node;
    }
    for (uint32_t i = 0; i < machine->node_count && !reader->rc; i++) {
        snprintf(reader->at, sizeof reader->at, "nodes[%u]", i);
        if (machine->nodes[i].pu_count != pus[i])
            wrong(reader, "pu_count", "is not the number of its allowed CPUs");
        if (machine->nodes[i].core_count != cores[i])
            wrong(reader, "core_count", "is not the number of its cores");
    }
    free(pus);
    free(cores);
}

/* ---- the rest ---- */

/* An array of indices below the number of nodes, ascending. */
static void read_device_nodes(struct reader *reader, const json_t *object,
                              struct numoe_device *device)
{
    const json_t *items = array(reader, object, "nodes", 0, reader->machine->node_count);
    json_int_t before = -1;

    device->nodes = room(reader, json_array_size(items), sizeof *device->nodes);
    for (size_t i = 0; i < json_array_size(items) && !reader->rc; i++) {
        const json_t *value = json_array_get(items, i);
        json_int_t node = json_integer_value(value);

        if (!json_is_integer(value) || node <= before || node >= reader->machine->node_count) {
            wrong(reader, "nodes", "does not list nodes in ascending order");
            return;
        }
        device->nodes[device->node_count++] = (uint32_t)node;
        before = node;
    }
}

static void read_devices(struct reader *reader, const json_t *root)
{
    struct numoe_machine *machine = reader->machine;
    const json_t *items = array(reader, root, "devices", 0, TOPO_SAVED_DEVICES);
    size_t count = json_array_size(items);

    if (!count)
        return;
    machine->devices = room(reader, count, sizeof *machine->devices);
    for (size_t i = 0; i < count && !reader->rc; i++) {
        const json_t *object = item(reader, items, "devices", i);
        struct numoe_device *device = &machine->devices[machine->device_count++];

        topo_copy_printable(
            device->name, sizeof device->name,
            text(reader, json_object_get(object, "name"), "name", sizeof device->name));
        device->gpu = boolean(reader, object, "gpu");
        device->locality_known = boolean(reader, object, "locality_known");
        device->package = index_of(reader, object, "package", machine->package_count);
        device->link_gbs = real(reader, object, "link_gbs", 1e6);
        device->memory_bytes = number(reader, object, "memory_bytes", most_bytes - 1);
        read_device_nodes(reader, object, device);
        if (!reader->rc && device->locality_known && !device->node_count)
            wrong(reader, "nodes", "is empty, though locality is said to be known");
    }
}

static void read_distances(struct reader *reader, const json_t *root)
{
    struct numoe_machine *machine = reader->machine;
    size_t count = (size_t)machine->node_count * machine->node_count;
    const json_t *items;

    if (reader->rc || json_is_null(json_object_get(root, "distances")))
        return;
    items = array(reader, root, "distances", count, count);
    machine->distances = room(reader, count, sizeof *machine->distances);
    for (size_t i = 0; i < count && !reader->rc; i++) {
        const json_t *value = json_array_get(items, i);
        json_int_t distance = json_integer_value(value);

        if (!json_is_integer(value) || distance < 0 || distance > UINT32_MAX ||
            (i % ((size_t)machine->node_count + 1) == 0 && distance != 10))
            wrong(reader, "distances", "holds a number that is no distance");
        else
            machine->distances[i] = (uint32_t)distance;
    }
}

static void read_pairs(struct reader *reader, const json_t *calibration)
{
    struct numoe_machine *machine = reader->machine;
    const json_t *items = array(reader, calibration, "pairs", 0, TOPO_SAVED_PAIRS);
    size_t count = json_array_size(items);
    bool *seen = room(reader, (size_t)machine->node_count * machine->domain_count, sizeof *seen);

    if (count)
        machine->pairs = room(reader, count, sizeof *machine->pairs);
    for (size_t i = 0; i < count && !reader->rc; i++) {
        const json_t *object = item(reader, items, "calibration.pairs", i);
        struct numoe_pair_speed *pair = &machine->pairs[machine->pair_count++];
        size_t place;

        pair->domain = (uint32_t)number(reader, object, "domain", machine->domain_count - 1);
        pair->node = (uint32_t)number(reader, object, "node", machine->node_count - 1);
        pair->bandwidth_mbs = number(reader, object, "bandwidth_mbs", most_mbs - 1);
        pair->latency_ns = real(reader, object, "latency_ns", 1e9);
        place = (size_t)pair->domain * machine->node_count + pair->node;
        if (!reader->rc && seen[place])
            wrong(reader, "", "is there twice");
        else if (!reader->rc)
            seen[place] = true;
    }
    reader->at[0] = 0;
    free(seen);
}

static void read_calibration(struct reader *reader, const json_t *root)
{
    struct numoe_machine *machine = reader->machine;
    const json_t *calibration = json_object_get(root, "calibration"), *items;

    if (reader->rc || json_is_null(calibration))
        return;
    if (!json_is_object(calibration)) {
        wrong(reader, "calibration", calibration ? "is not an object" : "is missing");
        return;
    }
    read_pairs(reader, calibration);
    if (reader->rc || json_is_null(json_object_get(calibration, "together_mbs")))
        return;
    items = array(reader, calibration, "together_mbs", machine->node_count, machine->node_count);
    machine->together_mbs = room(reader, machine->node_count, sizeof *machine->together_mbs);
    for (uint32_t i = 0; i < machine->node_count && !reader->rc; i++) {
        const json_t *value = json_array_get(items, i);

        if (!json_is_integer(value) || json_integer_value(value) < 0 ||
            (uint64_t)json_integer_value(value) >= most_mbs)
            wrong(reader, "together_mbs", "holds a number that is no bandwidth");
        else
            machine->together_mbs[i] = (uint64_t)json_integer_value(value);
    }
}

static void read_notes(struct reader *reader, const json_t *root)
{
    struct numoe_machine *machine = reader->machine;
    const json_t *items = array(reader, root, "notes", 0, TOPO_SAVED_NOTES);

    for (size_t i = 0; i < json_array_size(items) && !reader->rc; i++) {
        char *note = text_copy(reader, json_array_get(items, i), "notes");

        if (note && topo_note(&machine->notes, &machine->note_count, "%s", note))
            no_memory(reader);
        free(note);
    }
}

static void read_limits(struct reader *reader, const json_t *root)
{
    struct numoe_machine *machine = reader->machine;

    machine->cgroup_bytes = UINT64_MAX;
    if (!json_is_null(json_object_get(root, "cgroup_bytes")))
        machine->cgroup_bytes = number(reader, root, "cgroup_bytes", INT64_MAX);
    if (!json_is_null(json_object_get(root, "cpu_quota")))
        machine->cpu_quota = real(reader, root, "cpu_quota", 1e9);
}

static void read_machine(struct reader *reader, const json_t *root)
{
    struct numoe_machine *machine = reader->machine;

    machine->saved_source = text_copy(reader, json_object_get(root, "source"), "source");
    machine->saved_live = boolean(reader, root, "live");
    topo_copy_printable(
        machine->cpu_model, sizeof machine->cpu_model,
        text(reader, json_object_get(root, "cpu_model"), "cpu_model", sizeof machine->cpu_model));
    machine->core_count = (uint32_t)number(reader, root, "core_count", TOPO_MAX_PUS);
    machine->l3_count = (uint32_t)number(reader, root, "l3_count", TOPO_MAX_PUS);
    machine->domain_count = (uint32_t)number(reader, root, "domain_count", TOPO_MAX_NODES);
    machine->package_count = (uint32_t)number(reader, root, "package_count", TOPO_MAX_PUS);
    if (!machine->core_count || !machine->domain_count)
        wrong(reader, machine->core_count ? "domain_count" : "core_count", "is 0");
    read_nodes(reader, root);
    if (!reader->rc)
        reader->at[0] = 0;
    read_pus(reader, root);
    check_counts(reader);
    if (!reader->rc)
        reader->at[0] = 0;
    read_devices(reader, root);
    if (!reader->rc)
        reader->at[0] = 0;
    read_distances(reader, root);
    read_limits(reader, root);
    read_calibration(reader, root);
    read_notes(reader, root);
}

int topo_saved_read(const struct topo_source *source, struct numoe_machine **out,
                    struct numoe_error *error)
{
    struct reader reader = {.file = source->name, .error = error};
    const json_t *version;
    json_error_t where;
    json_t *root;

    root = json_loadb(source->text, source->bytes - 1, JSON_REJECT_DUPLICATES, &where);
    if (!root)
        return numoe_error_set(error, -EINVAL, source->name,
                               "neither XML nor a saved machine: line %d, column %d: %s",
                               where.line, where.column, where.text);
    version = json_object_get(root, TOPO_SAVED_KEY);
    if (!json_is_integer(version)) {
        reader.rc =
            numoe_error_set(error, -EINVAL, source->name,
                            "JSON, but not a saved machine: no number \"%s\"", TOPO_SAVED_KEY);
        goto out;
    }
    if (json_integer_value(version) != TOPO_SAVED_VERSION) {
        reader.rc = numoe_error_set(error, -EINVAL, source->name,
                                    "a saved machine of version %" JSON_INTEGER_FORMAT
                                    "; this program reads version %d",
                                    json_integer_value(version), TOPO_SAVED_VERSION);
        goto out;
    }
    reader.machine = calloc(1, sizeof *reader.machine);
    if (reader.machine)
        reader.machine->source = malloc(strlen(source->name) + 1);
    if (!reader.machine || !reader.machine->source) {
        no_memory(&reader);
        goto out;
    }
    topo_copy_printable(reader.machine->source, strlen(source->name) + 1, source->name);
    read_machine(&reader, root);
out:
    json_decref(root);
    if (reader.rc)
        numoe_machine_free(reader.machine);
    else
        *out = reader.machine;
    return reader.rc;
}
