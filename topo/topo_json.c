/* A machine as JSON, and what all JSON writing here shares. SPDX-License-Identifier: Apache-2.0 */
#include "topo_print.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

json_t *topo_json_string(const char *text)
{
    json_t *value = json_string(text);
    char *plain;

    if (value)
        return value;
    /* a file name need not be UTF-8; JSON must be */
    plain = strdup(text);
    if (!plain)
        return NULL;
    for (char *at = plain; *at; at++)
        if (*at & 0x80)
            *at = '?';
    value = json_string(plain);
    free(plain);
    return value;
}

json_t *topo_json_number(uint64_t value)
{
    return value <= INT64_MAX ? json_integer((json_int_t)value) : json_null();
}

json_t *topo_json_index(uint32_t index)
{
    return index == NUMOE_NONE ? json_null() : json_integer(index);
}

void topo_json_set(json_t **object, const char *key, json_t *value)
{
    if (!*object) {
        json_decref(value);
    } else if (json_object_set_new(*object, key, value)) {
        json_decref(*object);
        *object = NULL;
    }
}

void topo_json_append(json_t **array, json_t *value)
{
    if (!*array) {
        json_decref(value);
    } else if (json_array_append_new(*array, value)) {
        json_decref(*array);
        *array = NULL;
    }
}

json_t *topo_json_numbers(const uint64_t *numbers, size_t count)
{
    json_t *array = json_array();

    for (size_t i = 0; i < count; i++)
        topo_json_append(&array, topo_json_number(numbers[i]));
    return array;
}

json_t *topo_json_list(const uint32_t *numbers, size_t count)
{
    json_t *array = json_array();

    for (size_t i = 0; i < count; i++)
        topo_json_append(&array, json_integer(numbers[i]));
    return array;
}

json_t *topo_json_notes(char *const *notes, uint32_t count)
{
    json_t *array = json_array();

    for (uint32_t i = 0; i < count; i++)
        topo_json_append(&array, topo_json_string(notes[i]));
    return array;
}

int topo_json_write(json_t *root, FILE *out)
{
    int rc = 0;

    if (!root)
        return -ENOMEM;
    if (json_dumpf(root, out, JSON_INDENT(2)) || fputc('\n', out) == EOF)
        rc = -EIO;
    json_decref(root);
    return rc;
}

static json_t *json_node(const struct numoe_machine *machine, uint32_t i)
{
    const struct numoe_node *node = &machine->nodes[i];
    json_t *object = json_object();

    topo_json_set(&object, "os_index", json_integer(node->os_index));
    topo_json_set(&object, "kind", json_string(topo_kind_name(node->kind)));
    topo_json_set(&object, "allowed", json_boolean(node->allowed));
    topo_json_set(&object, "domain", json_integer(node->domain));
    topo_json_set(&object, "package", topo_json_index(node->package));
    topo_json_set(&object, "cores", json_integer(node->core_count));
    topo_json_set(&object, "cpus", json_integer(node->pu_count));
    topo_json_set(&object, "capacity_bytes", topo_json_number(node->capacity_bytes));
    topo_json_set(&object, "free_bytes", topo_json_number(node->free_bytes));
    topo_json_set(&object, "huge_2m_free", topo_json_number(node->huge_2m_free));
    topo_json_set(&object, "huge_1g_free", topo_json_number(node->huge_1g_free));
    topo_json_set(&object, "bandwidth_mbs", topo_json_number(node->bandwidth_mbs));
    return object;
}

static json_t *json_pu(const struct numoe_machine *machine, uint32_t i)
{
    const struct numoe_pu *pu = &machine->pus[i];
    json_t *object = json_object();

    topo_json_set(&object, "os_index", json_integer(pu->os_index));
    topo_json_set(&object, "allowed", json_boolean(pu->allowed));
    topo_json_set(&object, "core", json_integer(pu->core));
    topo_json_set(&object, "smt", json_integer(pu->smt));
    topo_json_set(&object, "node",
                  pu->node == NUMOE_NONE ? json_null()
                                         : json_integer(machine->nodes[pu->node].os_index));
    topo_json_set(&object, "node_is_near", json_boolean(pu->node_is_near));
    topo_json_set(&object, "l3", topo_json_index(pu->l3));
    topo_json_set(&object, "domain", topo_json_index(pu->domain));
    topo_json_set(&object, "package", topo_json_index(pu->package));
    topo_json_set(&object, "efficiency", json_integer(pu->efficiency));
    return object;
}

static json_t *json_device(const struct numoe_machine *machine, uint32_t i)
{
    const struct numoe_device *device = &machine->devices[i];
    json_t *object = json_object(), *nodes = json_array();

    topo_json_set(&object, "name", topo_json_string(device->name));
    topo_json_set(&object, "type", json_string(device->gpu ? "gpu" : "drive"));
    topo_json_set(&object, "locality_known", json_boolean(device->locality_known));
    topo_json_set(&object, "package", topo_json_index(device->package));
    for (uint32_t n = 0; n < device->node_count; n++)
        topo_json_append(&nodes, json_integer(machine->nodes[device->nodes[n]].os_index));
    topo_json_set(&object, "nodes", nodes);
    topo_json_set(&object, "link_gbs", json_real(device->link_gbs));
    topo_json_set(&object, "memory_bytes", topo_json_number(device->memory_bytes));
    return object;
}

static json_t *json_distances(const struct numoe_machine *machine)
{
    json_t *rows;

    if (!machine->distances)
        return json_null();
    rows = json_array();
    for (uint32_t i = 0; i < machine->node_count; i++) {
        json_t *row = json_array();

        for (uint32_t j = 0; j < machine->node_count; j++)
            topo_json_append(&row, json_integer(numoe_machine_distance(machine, i, j)));
        topo_json_append(&rows, row);
    }
    return rows;
}

/* As in a saved machine, but nodes by OS index like everywhere in this output. */
static json_t *json_measured(const struct numoe_machine *machine)
{
    json_t *object, *pairs, *together;

    if (!machine->pair_count && !machine->together_mbs)
        return json_null();
    object = json_object();
    pairs = json_array();
    together = json_array();
    for (uint32_t i = 0; i < machine->pair_count; i++) {
        const struct numoe_pair_speed *speed = &machine->pairs[i];
        json_t *pair = json_object();

        topo_json_set(&pair, "domain", json_integer(speed->domain));
        topo_json_set(&pair, "node", json_integer(machine->nodes[speed->node].os_index));
        topo_json_set(&pair, "bandwidth_mbs", topo_json_number(speed->bandwidth_mbs));
        topo_json_set(&pair, "latency_ns", json_real(speed->latency_ns));
        topo_json_append(&pairs, pair);
    }
    for (uint32_t i = 0; machine->together_mbs && i < machine->node_count; i++) {
        json_t *node = json_object();

        topo_json_set(&node, "node", json_integer(machine->nodes[i].os_index));
        topo_json_set(&node, "bandwidth_mbs", topo_json_number(machine->together_mbs[i]));
        topo_json_append(&together, node);
    }
    topo_json_set(&object, "pairs", pairs);
    topo_json_set(&object, "together", together);
    return object;
}

int numoe_machine_print_json(const struct numoe_machine *machine, FILE *out)
{
    json_t *root = json_object(), *nodes = json_array(), *pus = json_array(),
           *devices = json_array();

    for (uint32_t i = 0; i < machine->node_count; i++)
        topo_json_append(&nodes, json_node(machine, i));
    for (uint32_t i = 0; i < machine->pu_count; i++)
        topo_json_append(&pus, json_pu(machine, i));
    for (uint32_t i = 0; i < machine->device_count; i++)
        topo_json_append(&devices, json_device(machine, i));
    topo_json_set(&root, "source", topo_json_string(machine->source));
    topo_json_set(&root, "live", json_boolean(machine->live));
    topo_json_set(&root, "cpu_model", topo_json_string(machine->cpu_model));
    topo_json_set(&root, "packages", json_integer(machine->package_count));
    topo_json_set(&root, "domains", json_integer(machine->domain_count));
    topo_json_set(&root, "cores", json_integer(machine->core_count));
    topo_json_set(&root, "nodes", nodes);
    topo_json_set(&root, "cpus", pus);
    topo_json_set(&root, "devices", devices);
    topo_json_set(&root, "distances", json_distances(machine));
    topo_json_set(&root, "cgroup_bytes", topo_json_number(machine->cgroup_bytes));
    topo_json_set(&root, "cpu_quota",
                  machine->cpu_quota > 0 ? json_real(machine->cpu_quota) : json_null());
    topo_json_set(&root, "measured", json_measured(machine));
    topo_json_set(&root, "notes", topo_json_notes(machine->notes, machine->note_count));
    return topo_json_write(root, out);
}
