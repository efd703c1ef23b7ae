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
#include "topo_read.h"
#include "topo_saved_form.h"
#include "topo_text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const uint64_t most_bytes = (uint64_t)1 << 60, most_mbs = (uint64_t)1 << 40;

/* ---- nodes and PUs ---- */

static void read_nodes(struct topo_reader *in, const json_t *root, struct numoe_machine *machine)
{
    const json_t *items = topo_read_array(in, root, "nodes", 1, TOPO_MAX_NODES);
    bool seen[TOPO_MAX_NODES] = {false};
    uint32_t domains = 0;
    uint64_t total = 0;

    machine->nodes = topo_read_room(in, json_array_size(items), sizeof *machine->nodes);
    if (in->rc)
        return;
    machine->node_count = (uint32_t)json_array_size(items);
    for (uint32_t i = 0; i < machine->node_count && !in->rc; i++) {
        const json_t *object = topo_read_item(in, items, "nodes", i);
        struct numoe_node *node = &machine->nodes[i];

        node->os_index = topo_read_u32(in, object, "os_index", TOPO_MAX_NODES - 1);
        node->kind = topo_read_kind(in, object, "kind");
        node->allowed = topo_read_boolean(in, object, "allowed");
        node->domain = topo_read_u32(in, object, "domain", machine->domain_count - 1);
        node->package = topo_read_index(in, object, "package", machine->package_count);
        node->beside = topo_read_index(in, object, "beside", machine->node_count);
        node->pu_count = topo_read_u32(in, object, "pu_count", TOPO_MAX_PUS);
        node->core_count = topo_read_u32(in, object, "core_count", TOPO_MAX_PUS);
        node->capacity_bytes = topo_read_number(in, object, "capacity_bytes", most_bytes - 1);
        node->free_bytes = topo_read_number(in, object, "free_bytes", node->capacity_bytes);
        node->huge_2m_free = topo_read_number(in, object, "huge_2m_free", most_bytes >> 21);
        if (json_object_get(object, "huge_1g_free")) /* absent from the first files */
            node->huge_1g_free = topo_read_number(in, object, "huge_1g_free", most_bytes >> 30);
        node->bandwidth_mbs = topo_read_number(in, object, "bandwidth_mbs", most_mbs - 1);
        if (in->rc)
            return;
        if (seen[node->os_index])
            topo_read_wrong(in, "os_index", "appears twice");
        seen[node->os_index] = true;
        /* domains are numbered as nodes bring them up */
        if (node->domain > domains)
            topo_read_wrong(in, "domain", "is out of order");
        domains += node->domain == domains;
        total += node->capacity_bytes;
        if (total >= most_bytes)
            topo_read_wrong(in, "capacity_bytes", "makes a sum that no machine has");
    }
    if (domains != machine->domain_count)
        topo_read_wrong(in, "", "is the last node, and some domain has none");
}

/* A PU's node and what must follow from it. */
static void check_service(struct topo_reader *in, const struct numoe_machine *machine,
                          const struct numoe_pu *pu)
{

    if (pu->node == NUMOE_NONE) {
        if (pu->domain != NUMOE_NONE)
            topo_read_wrong(in, "domain", "is given without a node");
    } else if (!machine->nodes[pu->node].allowed ||
               machine->nodes[pu->node].kind == NUMOE_NODE_GPU) {
        topo_read_wrong(in, "node", "is one that may not be used");
    } else if (pu->domain != machine->nodes[pu->node].domain) {
        topo_read_wrong(in, "domain", "is not its node's");
    }
}

static void read_pus(struct topo_reader *in, const json_t *root, struct numoe_machine *machine)
{
    const json_t *items = topo_read_array(in, root, "pus", 1, TOPO_MAX_PUS);
    uint32_t cores = 0, caches = 0;
    bool *seen = topo_read_room(in, TOPO_MAX_CPU_INDEX + 1, sizeof *seen);

    machine->pus = topo_read_room(in, json_array_size(items), sizeof *machine->pus);
    if (!in->rc)
        machine->pu_count = (uint32_t)json_array_size(items);
    for (uint32_t i = 0; i < machine->pu_count && !in->rc; i++) {
        const json_t *object = topo_read_item(in, items, "pus", i);
        struct numoe_pu *pu = &machine->pus[i];

        pu->os_index = topo_read_u32(in, object, "os_index", TOPO_MAX_CPU_INDEX);
        pu->allowed = topo_read_boolean(in, object, "allowed");
        pu->core = topo_read_u32(in, object, "core", machine->core_count - 1);
        pu->smt = topo_read_u32(in, object, "smt", TOPO_MAX_PUS);
        pu->node = topo_read_index(in, object, "node", machine->node_count);
        pu->node_is_near = topo_read_boolean(in, object, "node_is_near");
        pu->l3 = topo_read_index(in, object, "l3", machine->l3_count);
        pu->domain = topo_read_index(in, object, "domain", machine->domain_count);
        pu->package = topo_read_index(in, object, "package", machine->package_count);
        pu->efficiency = topo_read_u32(in, object, "efficiency", INT32_MAX);
        if (in->rc)
            break;
        if (seen[pu->os_index])
            topo_read_wrong(in, "os_index", "appears twice");
        seen[pu->os_index] = true;
        /* PUs of a core, and of a cache, are neighbours, and both are numbered as they come */
        if (pu->core != cores && pu->core + 1 != cores)
            topo_read_wrong(in, "core", "is out of order");
        cores += pu->core == cores;
        if (pu->l3 != NUMOE_NONE && pu->l3 != caches && pu->l3 + 1 != caches)
            topo_read_wrong(in, "l3", "is out of order");
        caches += pu->l3 == caches;
        check_service(in, machine, pu);
    }
    if (!in->rc && (cores != machine->core_count || caches != machine->l3_count))
        topo_read_wrong(in, "", "is the last CPU, and some core or cache has none");
    free(seen);
}

/* What counts PUs must be what there are. */
static void check_counts(struct topo_reader *in, const struct numoe_machine *machine)
{
    uint32_t core = NUMOE_NONE, node = NUMOE_NONE, thread = 0;
    uint32_t *pus = topo_read_room(in, machine->node_count, sizeof *pus);
    uint32_t *cores = topo_read_room(in, machine->node_count, sizeof *cores);

    for (uint32_t i = 0; i < machine->pu_count && !in->rc; i++) {
        const struct numoe_pu *pu = &machine->pus[i];

        snprintf(in->at, sizeof in->at, "pus[%u]", i);
        if (pu->allowed)
            thread = pu->core == core ? thread + 1 : 0;
        if (pu->smt != (pu->allowed ? thread : 0))
            topo_read_wrong(in, "smt", "is not its place in its core");
        if (!pu->allowed)
            continue;
        if (pu->node != NUMOE_NONE) {
            pus[pu->node]++;
            cores[pu->node] += pu->core != core || pu->node != node;
        }
        core = pu->core;
        node = pu->node;
    }
    for (uint32_t i = 0; i < machine->node_count && !in->rc; i++) {
        snprintf(in->at, sizeof in->at, "nodes[%u]", i);
        if (machine->nodes[i].pu_count != pus[i])
            topo_read_wrong(in, "pu_count", "is not the number of its allowed CPUs");
        if (machine->nodes[i].core_count != cores[i])
            topo_read_wrong(in, "core_count", "is not the number of its cores");
    }
    free(pus);
    free(cores);
}

/* ---- the rest ---- */

/* An array of indices below the number of nodes, ascending. */
static void read_device_nodes(struct topo_reader *in, const json_t *object, uint32_t nodes,
                              struct numoe_device *device)
{
    const json_t *items = topo_read_array(in, object, "nodes", 0, nodes);
    json_int_t before = -1;

    device->nodes = topo_read_room(in, json_array_size(items), sizeof *device->nodes);
    for (size_t i = 0; i < json_array_size(items) && !in->rc; i++) {
        const json_t *value = json_array_get(items, i);
        json_int_t node = json_integer_value(value);

        if (!json_is_integer(value) || node <= before || node >= nodes) {
            topo_read_wrong(in, "nodes", "does not list nodes in ascending order");
            return;
        }
        device->nodes[device->node_count++] = (uint32_t)node;
        before = node;
    }
}

static void read_devices(struct topo_reader *in, const json_t *root, struct numoe_machine *machine)
{
    const json_t *items = topo_read_array(in, root, "devices", 0, TOPO_SAVED_DEVICES);
    size_t count = json_array_size(items);

    if (!count)
        return;
    machine->devices = topo_read_room(in, count, sizeof *machine->devices);
    for (size_t i = 0; i < count && !in->rc; i++) {
        const json_t *object = topo_read_item(in, items, "devices", i);
        struct numoe_device *device = &machine->devices[machine->device_count++];

        topo_copy_printable(
            device->name, sizeof device->name,
            topo_read_string(in, json_object_get(object, "name"), "name", sizeof device->name));
        device->gpu = topo_read_boolean(in, object, "gpu");
        device->locality_known = topo_read_boolean(in, object, "locality_known");
        device->package = topo_read_index(in, object, "package", machine->package_count);
        device->link_gbs = topo_read_real(in, object, "link_gbs", 1e6);
        device->memory_bytes = topo_read_number(in, object, "memory_bytes", most_bytes - 1);
        read_device_nodes(in, object, machine->node_count, device);
        if (!in->rc && device->locality_known && !device->node_count)
            topo_read_wrong(in, "nodes", "is empty, though locality is said to be known");
    }
}

static void read_pairs(struct topo_reader *in, const json_t *calibration,
                       struct numoe_machine *machine)
{
    const json_t *items = topo_read_array(in, calibration, "pairs", 0, TOPO_SAVED_PAIRS);
    size_t count = json_array_size(items);
    bool *seen =
        topo_read_room(in, (size_t)machine->node_count * machine->domain_count, sizeof *seen);

    if (count)
        machine->pairs = topo_read_room(in, count, sizeof *machine->pairs);
    for (size_t i = 0; i < count && !in->rc; i++) {
        const json_t *object = topo_read_item(in, items, "calibration.pairs", i);
        struct numoe_pair_speed *pair = &machine->pairs[machine->pair_count++];
        size_t place;

        pair->domain = topo_read_u32(in, object, "domain", machine->domain_count - 1);
        pair->node = topo_read_u32(in, object, "node", machine->node_count - 1);
        pair->bandwidth_mbs = topo_read_number(in, object, "bandwidth_mbs", most_mbs - 1);
        pair->latency_ns = topo_read_real(in, object, "latency_ns", 1e9);
        place = (size_t)pair->domain * machine->node_count + pair->node;
        if (!in->rc && seen[place])
            topo_read_wrong(in, "", "is there twice");
        else if (!in->rc)
            seen[place] = true;
    }
    topo_read_outside(in);
    free(seen);
}

static void read_calibration(struct topo_reader *in, const json_t *root,
                             struct numoe_machine *machine)
{
    const json_t *calibration, *items;

    if (json_is_null(json_object_get(root, "calibration")))
        return;
    calibration = topo_read_object(in, root, "calibration");
    if (in->rc)
        return;
    read_pairs(in, calibration, machine);
    if (in->rc || json_is_null(json_object_get(calibration, "together_mbs")))
        return;
    items =
        topo_read_array(in, calibration, "together_mbs", machine->node_count, machine->node_count);
    machine->together_mbs = topo_read_room(in, machine->node_count, sizeof *machine->together_mbs);
    for (uint32_t i = 0; i < machine->node_count && !in->rc; i++)
        machine->together_mbs[i] = topo_read_element(in, items, "together_mbs", i, most_mbs - 1);
}

static void read_machine(struct topo_reader *in, const json_t *root, struct numoe_machine *machine)
{

    machine->saved_source = topo_read_copy(in, json_object_get(root, "source"), "source");
    machine->saved_live = topo_read_boolean(in, root, "live");
    topo_copy_printable(machine->cpu_model, sizeof machine->cpu_model,
                        topo_read_string(in, json_object_get(root, "cpu_model"), "cpu_model",
                                         sizeof machine->cpu_model));
    machine->core_count = topo_read_u32(in, root, "core_count", TOPO_MAX_PUS);
    machine->l3_count = topo_read_u32(in, root, "l3_count", TOPO_MAX_PUS);
    machine->domain_count = topo_read_u32(in, root, "domain_count", TOPO_MAX_NODES);
    machine->package_count = topo_read_u32(in, root, "package_count", TOPO_MAX_PUS);
    if (!machine->core_count || !machine->domain_count)
        topo_read_wrong(in, machine->core_count ? "domain_count" : "core_count", "is 0");
    read_nodes(in, root, machine);
    topo_read_outside(in);
    read_pus(in, root, machine);
    check_counts(in, machine);
    topo_read_outside(in);
    read_devices(in, root, machine);
    topo_read_outside(in);
    if (!json_is_null(json_object_get(root, "distances")))
        machine->distances = topo_read_distances(in, root, "distances", machine->node_count);
    topo_read_limits(in, root, &machine->cgroup_bytes, &machine->cpu_quota);
    read_calibration(in, root, machine);
    topo_read_notes(in, root, &machine->notes, &machine->note_count);
}

int topo_saved_read(const struct topo_source *source, struct numoe_machine **out,
                    struct numoe_error *error)
{
    struct topo_reader in = {
        .file = source->name, .what = "saved machine", .code = -EINVAL, .error = error};
    json_t *root = topo_read_root(&in, source->text, source->bytes - 1, TOPO_SAVED_KEY,
                                  TOPO_SAVED_VERSION, "neither XML nor a saved machine");
    struct numoe_machine *machine;

    if (!root)
        return in.rc;
    machine = topo_read_room(&in, 1, sizeof *machine);
    if (machine)
        machine->source = malloc(strlen(source->name) + 1);
    if (machine && machine->source) {
        topo_copy_printable(machine->source, strlen(source->name) + 1, source->name);
        read_machine(&in, root, machine);
    } else {
        topo_read_no_memory(&in);
    }
    json_decref(root);
    if (in.rc)
        numoe_machine_free(machine);
    else
        *out = machine;
    return in.rc;
}
