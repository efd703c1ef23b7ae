/*
 * Write a machine to a file; docs/machine.md has the format.
 *
 * Indices in it are places in its own arrays, as in struct numoe_machine; null is "none", "not
 * known" or "no limit".
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "topo_load.h"
#include "topo_print.h"
#include "topo_saved_form.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static json_t *save_nodes(const struct numoe_machine *machine)
{
    json_t *array = json_array();

    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct numoe_node *node = &machine->nodes[i];
        json_t *object = json_object();

        topo_json_set(&object, "os_index", json_integer(node->os_index));
        topo_json_set(&object, "kind", json_string(topo_kind_name(node->kind)));
        topo_json_set(&object, "allowed", json_boolean(node->allowed));
        topo_json_set(&object, "domain", json_integer(node->domain));
        topo_json_set(&object, "package", topo_json_index(node->package));
        topo_json_set(&object, "beside", topo_json_index(node->beside));
        topo_json_set(&object, "pu_count", json_integer(node->pu_count));
        topo_json_set(&object, "core_count", json_integer(node->core_count));
        topo_json_set(&object, "capacity_bytes", topo_json_number(node->capacity_bytes));
        topo_json_set(&object, "free_bytes", topo_json_number(node->free_bytes));
        topo_json_set(&object, "huge_2m_free", topo_json_number(node->huge_2m_free));
        topo_json_set(&object, "huge_1g_free", topo_json_number(node->huge_1g_free));
        topo_json_set(&object, "bandwidth_mbs", topo_json_number(node->bandwidth_mbs));
        topo_json_append(&array, object);
    }
    return array;
}

static json_t *save_pus(const struct numoe_machine *machine)
{
    json_t *array = json_array();

    for (uint32_t i = 0; i < machine->pu_count; i++) {
        const struct numoe_pu *pu = &machine->pus[i];
        json_t *object = json_object();

        topo_json_set(&object, "os_index", json_integer(pu->os_index));
        topo_json_set(&object, "allowed", json_boolean(pu->allowed));
        topo_json_set(&object, "core", json_integer(pu->core));
        topo_json_set(&object, "smt", json_integer(pu->smt));
        topo_json_set(&object, "node", topo_json_index(pu->node));
        topo_json_set(&object, "node_is_near", json_boolean(pu->node_is_near));
        topo_json_set(&object, "l3", topo_json_index(pu->l3));
        topo_json_set(&object, "domain", topo_json_index(pu->domain));
        topo_json_set(&object, "package", topo_json_index(pu->package));
        topo_json_set(&object, "efficiency", json_integer(pu->efficiency));
        topo_json_append(&array, object);
    }
    return array;
}

static json_t *save_devices(const struct numoe_machine *machine)
{
    json_t *array = json_array();

    for (uint32_t i = 0; i < machine->device_count; i++) {
        const struct numoe_device *device = &machine->devices[i];
        json_t *object = json_object();

        topo_json_set(&object, "name", topo_json_string(device->name));
        topo_json_set(&object, "gpu", json_boolean(device->gpu));
        topo_json_set(&object, "locality_known", json_boolean(device->locality_known));
        topo_json_set(&object, "package", topo_json_index(device->package));
        topo_json_set(&object, "nodes", topo_json_list(device->nodes, device->node_count));
        topo_json_set(&object, "link_gbs", json_real(device->link_gbs));
        topo_json_set(&object, "memory_bytes", topo_json_number(device->memory_bytes));
        topo_json_append(&array, object);
    }
    return array;
}

static json_t *save_distances(const struct numoe_machine *machine)
{
    return machine->distances ? topo_json_list(machine->distances,
                                               (size_t)machine->node_count * machine->node_count)
                              : json_null();
}

static json_t *save_calibration(const struct numoe_machine *machine)
{
    json_t *object, *pairs;

    if (!machine->pair_count && !machine->together_mbs)
        return json_null();
    object = json_object();
    pairs = json_array();
    for (uint32_t i = 0; i < machine->pair_count; i++) {
        const struct numoe_pair_speed *speed = &machine->pairs[i];
        json_t *pair = json_object();

        topo_json_set(&pair, "domain", json_integer(speed->domain));
        topo_json_set(&pair, "node", json_integer(speed->node));
        topo_json_set(&pair, "bandwidth_mbs", topo_json_number(speed->bandwidth_mbs));
        topo_json_set(&pair, "latency_ns", json_real(speed->latency_ns));
        topo_json_append(&pairs, pair);
    }
    topo_json_set(&object, "pairs", pairs);
    topo_json_set(&object, "together_mbs",
                  machine->together_mbs
                      ? topo_json_numbers(machine->together_mbs, machine->node_count)
                      : json_null());
    return object;
}

static json_t *save_machine(const struct numoe_machine *machine)
{
    bool again = machine->saved_source != NULL;
    json_t *root = json_object();

    topo_json_set(&root, TOPO_SAVED_KEY, json_integer(TOPO_SAVED_VERSION));
    topo_json_set(&root, "source",
                  topo_json_string(again ? machine->saved_source : machine->source));
    topo_json_set(&root, "live", json_boolean(again ? machine->saved_live : machine->live));
    topo_json_set(&root, "cpu_model", topo_json_string(machine->cpu_model));
    topo_json_set(&root, "core_count", json_integer(machine->core_count));
    topo_json_set(&root, "l3_count", json_integer(machine->l3_count));
    topo_json_set(&root, "domain_count", json_integer(machine->domain_count));
    topo_json_set(&root, "package_count", json_integer(machine->package_count));
    topo_json_set(&root, "nodes", save_nodes(machine));
    topo_json_set(&root, "pus", save_pus(machine));
    topo_json_set(&root, "devices", save_devices(machine));
    topo_json_set(&root, "distances", save_distances(machine));
    topo_json_set(&root, "cgroup_bytes", topo_json_number(machine->cgroup_bytes));
    topo_json_set(&root, "cpu_quota",
                  machine->cpu_quota > 0 ? json_real(machine->cpu_quota) : json_null());
    topo_json_set(&root, "calibration", save_calibration(machine));
    topo_json_set(&root, "notes", topo_json_notes(machine->notes, machine->note_count));
    return root;
}

char *topo_saved_text(const struct numoe_machine *machine)
{
    json_t *root = save_machine(machine);
    char *text = root ? json_dumps(root, JSON_COMPACT) : NULL;

    json_decref(root);
    return text;
}

/* One item of the outer arrays a line: people read it, and a large machine stays small. */
static int write_lines(json_t *root, FILE *out)
{
    const char *key;
    json_t *value;
    const char *before = "{\n";

    json_object_foreach(root, key, value)
    {
        fprintf(out, "%s  \"%s\": ", before, key);
        if (json_is_array(value) && json_array_size(value) &&
            json_is_object(json_array_get(value, 0))) {
            for (size_t i = 0; i < json_array_size(value); i++) {
                fputs(i ? ",\n    " : "[\n    ", out);
                if (json_dumpf(json_array_get(value, i), out, JSON_COMPACT))
                    return -EIO;
            }
            fputs("\n  ]", out);
        } else if (json_dumpf(value, out, JSON_COMPACT | JSON_ENCODE_ANY)) {
            return -EIO;
        }
        before = ",\n";
    }
    fputs("\n}\n", out);
    return fflush(out) || ferror(out) ? -EIO : 0;
}

/* Something that exists and is no file, a pipe say, is written to as it stands. */
static bool in_place(const char *path)
{
    struct stat info;

    return stat(path, &info) == 0 && !S_ISREG(info.st_mode);
}

int numoe_machine_save(const struct numoe_machine *machine, const char *path,
                       struct numoe_error *error)
{
    bool direct;
    char *beside = NULL;
    json_t *root;
    FILE *out;
    int fd, rc;

    if (!machine || !path || !*path)
        return numoe_error_set(error, -EINVAL, "numoe_machine_save", "machine or path missing");
    direct = in_place(path);
    root = save_machine(machine);
    if (!root || asprintf(&beside, "%s.%ld.new", path, (long)getpid()) < 0) {
        json_decref(root);
        return numoe_error_set(error, -ENOMEM, path, "out of memory");
    }
    fd = direct ? open(path, O_WRONLY | O_CLOEXEC)
                : open(beside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) {
        rc = -errno;
        goto free_root;
    }
    out = fdopen(fd, "w");
    if (!out) {
        rc = -ENOMEM;
        close(fd);
        goto remove;
    }
    errno = 0;
    rc = write_lines(root, out);
    if (rc && errno)
        rc = -errno;
    if (!rc && !direct && fsync(fd))
        rc = -errno;
    if (fclose(out) && !rc)
        rc = -errno;
    if (!rc && !direct && rename(beside, path))
        rc = -errno;
remove:
    if (rc && !direct)
        unlink(beside);
free_root:
    if (rc)
        numoe_error_set(error, rc, path, "cannot be written: %s", strerror(-rc));
    json_decref(root);
    free(beside);
    return rc;
}
