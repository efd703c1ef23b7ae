/* Machines from strings, own XML files, damaged files, and this system. */
#include "predict.h"
#include "topo/topo_fixture.h"

#include <errno.h>
#include <jansson.h>
#include <sched.h>
#include <unistd.h>

static int load_error(const char *source, struct numoe_error *error)
{
    struct numoe_machine *machine = NULL;
    int rc = numoe_machine_load(source, &machine, error);

    cr_assert(rc < 0, "%s loads", source);
    cr_assert_null(machine);
    cr_assert_eq(error->code, rc);
    cr_assert(error->message[0]);
    return rc;
}

Test(topo_synthetic, thirty_two_nodes_of_four_cores)
{
    struct numoe_machine *machine = machine_of("pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2");

    check_machine(machine);
    cr_assert_eq(machine->node_count, 32);
    cr_assert_eq(machine->pu_count, 256);
    cr_assert_eq(machine->core_count, 128);
    cr_assert_eq(machine->package_count, 2);
    cr_assert_eq(machine->l3_count, 32);
    cr_assert_eq(machine->domain_count, 32);
    for (uint32_t i = 0; i < 32; i++) {
        cr_assert_eq(machine->nodes[i].capacity_bytes, 16000000000ull);
        cr_assert_eq(machine->nodes[i].core_count, 4);
        cr_assert_eq(machine->nodes[i].pu_count, 8);
        cr_assert_eq(machine->nodes[i].package, i / 16);
    }
    cr_assert_eq(machine->pus[0].smt, 0);
    cr_assert_eq(machine->pus[1].smt, 1);
    cr_assert_eq(numoe_machine_distance(machine, 0, 0), 10);
    cr_assert_eq(numoe_machine_distance(machine, 0, 31), 20);
    numoe_machine_free(machine);
}

Test(topo_synthetic, groups_below_a_package_are_domains)
{
    struct numoe_machine *machine =
        machine_of("pack:2 group:4 l3:4 [numa(memory=16GB)] core:4 pu:2");

    cr_assert_eq(machine->node_count, 32);
    cr_assert_eq(machine->domain_count, 8);
    for (uint32_t i = 0; i < 32; i++)
        cr_assert_eq(machine->nodes[i].domain, i / 4);
    numoe_machine_free(machine);
}

Test(topo_synthetic, second_node_of_the_same_cpus_is_hbm_and_serves_none)
{
    struct numoe_machine *machine =
        machine_of("pack:2 group:4 [numa(memory=64GB)] [numa(memory=16GB)] core:12 pu:2");
    uint32_t serving = 0;

    check_machine(machine);
    cr_assert_eq(machine->node_count, 16);
    cr_assert_eq(machine->pu_count, 192);
    cr_assert_eq(machine->domain_count, 16, "DRAM and HBM have channels of their own");
    for (uint32_t i = 0; i < 16; i++) {
        const struct numoe_node *node = &machine->nodes[i];

        cr_assert_eq(node->kind, node->os_index % 2 ? NUMOE_NODE_HBM : NUMOE_NODE_DRAM);
        if (node->kind == NUMOE_NODE_HBM)
            cr_assert_eq(machine->nodes[node->beside].os_index, node->os_index - 1);
        serving += node->pu_count != 0;
    }
    cr_assert_eq(serving, 8);
    numoe_machine_free(machine);
}

Test(topo_synthetic, holes_in_node_numbers)
{
    static const uint32_t expected[] = {0, 1, 16, 17};
    struct numoe_machine *machine =
        machine_of("pack:4 [numa(memory=64GB indexes=0,1,16,17)] core:4 pu:1");

    check_machine(machine);
    cr_assert_eq(machine->node_count, 4);
    for (uint32_t i = 0; i < 4; i++)
        cr_assert_eq(machine->nodes[i].os_index, expected[i]);
    numoe_machine_free(machine);
}

Test(topo_synthetic, cpu_numbers_neither_dense_nor_in_node_order)
{
    struct numoe_machine *machine =
        machine_of("pack:2 [numa(memory=128GB)] core:32 pu:2(indexes=2*64:64*1)");

    check_machine(machine);
    for (uint32_t cpu = 0; cpu < 128; cpu++) {
        cr_assert_eq(cpu_at(machine, cpu)->node, cpu % 64 / 32);
        cr_assert_eq(cpu_at(machine, cpu)->smt, cpu / 64);
    }
    numoe_machine_free(machine);
    machine = machine_of("pack:1 [numa(memory=16GB)] core:4 pu:1(indexes=0,8,16,24)");
    check_machine(machine);
    cr_assert_eq(machine->pu_count, 4);
    for (uint32_t cpu = 0; cpu < 32; cpu += 8)
        cr_assert_eq(cpu_at(machine, cpu)->core, cpu / 8);
    numoe_machine_free(machine);
}

Test(topo_synthetic, one_cpu_and_one_node)
{
    struct numoe_machine *machine = machine_of("pack:1 [numa(memory=64GB)] core:1 pu:1");

    check_machine(machine);
    cr_assert_eq(machine->node_count, 1);
    cr_assert_eq(machine->pu_count, 1);
    cr_assert_eq(machine->pus[0].node, 0);
    numoe_machine_free(machine);
}

Test(topo_synthetic, bad_strings_are_refused_with_words, .timeout = 60)
{
    static const char *const bad[] = {
        "pack:",     "nonsense",      "pack:2 core",      "pu:0",
        "pack:-1",   "core:2 pack:2", "[numa] [",         "numa(memory=) core:2 pu:2",
        "(((((((((", ":::",           "pack:2 l9:2 pu:1", "pu:1(indexes=5*5*5:5)"};
    struct numoe_error error = NUMOE_ERROR_INIT;

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct numoe_machine *machine = NULL;

        /* hwloc takes a few of them to mean something; none may crash */
        if (numoe_machine_load(bad[i], &machine, &error) == 0)
            check_machine(machine);
        numoe_machine_free(machine);
    }
    cr_assert_eq(load_error("nonsense", &error), -EINVAL);
    cr_assert_eq(load_error("pack:1000 core:1000 pu:1000", &error), -E2BIG);
    cr_assert_eq(load_error("pack:4294967296 core:4294967296 pu:2", &error), -E2BIG);
    cr_assert_eq(load_error("pack:2\x01 pu:2", &error), -EINVAL);
}

Test(topo_files, what_is_no_topology_file_is_refused)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_assert_eq(load_error("/nowhere/machine.xml", &error), -ENOENT);
    cr_assert_str_eq(error.where, "/nowhere/machine.xml");
    cr_assert_eq(load_error("machine-that-is-not.xml", &error), -ENOENT);
    cr_assert_eq(load_error("/tmp", &error), -EINVAL);
    cr_assert_eq(load_error("/dev/zero", &error), -EINVAL);
    cr_assert_eq(load_error(DATA "../test_machine.c", &error), -EINVAL);
}

Test(topo_files, cores_without_memory_get_a_near_node)
{
    struct numoe_machine *machine = machine_of(DATA "two-of-four-nodes.xml");

    check_machine(machine);
    cr_assert_eq(machine->node_count, 2);
    cr_assert_eq(machine->pu_count, 48);
    for (uint32_t i = 0; i < 48; i++) {
        const struct numoe_pu *pu = cpu_at(machine, i);

        cr_assert_eq(machine->nodes[pu->node].os_index, i < 24 ? 1 : 2);
        cr_assert_eq(pu->node_is_near, i >= 12 && i < 36);
    }
    cr_assert_eq(machine->nodes[0].core_count, 12);
    cr_assert(has_note(machine->notes, machine->note_count, "24 CPUs have no memory"));
    numoe_machine_free(machine);
}

Test(topo_files, hbm_numbered_after_dram)
{
    struct numoe_machine *machine = machine_of(DATA "hbm-numbered-last.xml");

    check_machine(machine);
    cr_assert_eq(machine->node_count, 8);
    for (uint32_t os = 0; os < 8; os++) {
        const struct numoe_node *node = &machine->nodes[node_at(machine, os)];

        cr_assert_eq(node->kind, os < 4 ? NUMOE_NODE_DRAM : NUMOE_NODE_HBM);
        cr_assert_eq(node->core_count, os < 4 ? 2 : 0);
    }
    numoe_machine_free(machine);
}

Test(topo_files, faster_cores_are_known)
{
    struct numoe_machine *machine = machine_of(DATA "fast-cores-last.xml");

    for (uint32_t cpu = 0; cpu < 8; cpu++)
        cr_assert_eq(cpu_at(machine, cpu)->efficiency, cpu / 4);
    numoe_machine_free(machine);
}

Test(topo_files, latencies_are_told_from_other_matrices)
{
    struct numoe_machine *machine = machine_of(DATA "matrices-and-devices.xml");
    uint32_t zero = node_at(machine, 0), one = node_at(machine, 1);

    cr_assert_not_null(machine->distances);
    cr_assert_eq(numoe_machine_distance(machine, zero, one), 32);
    cr_assert_eq(numoe_machine_distance(machine, one, zero), 23);
    numoe_machine_free(machine);
}

Test(topo_files, gpus_and_drives_with_their_place)
{
    struct numoe_machine *machine = machine_of(DATA "matrices-and-devices.xml");
    uint32_t gpus = 0;

    cr_assert_eq(machine->device_count, 4, "display chip and network card are left out");
    for (uint32_t i = 0; i < machine->device_count; i++) {
        const struct numoe_device *device = &machine->devices[i];

        gpus += device->gpu;
        cr_assert(device->locality_known);
        cr_assert_eq(device->node_count, 1);
        cr_assert_eq(machine->nodes[device->nodes[0]].os_index, 1);
        cr_assert_eq(device->package, 1);
        cr_assert_float_eq(device->link_gbs, 15.75, 0.01);
    }
    cr_assert_eq(gpus, 3);
    cr_assert_str_eq(machine->devices[0].name, "0000:02:00.0");
    cr_assert_str_eq(machine->devices[1].name, "cuda1");
    cr_assert_eq(machine->devices[1].memory_bytes, 1024 * 1024);
    cr_assert_str_eq(machine->devices[2].name, "nvme0n1");
    cr_assert(!machine->devices[2].gpu);
    numoe_machine_free(machine);
}

Test(topo_files, allowed_cpus_and_nodes_that_do_not_match)
{
    struct numoe_machine *machine = machine_of(DATA "allowed-sets-disagree.xml");

    check_machine(machine); /* CPUs 0,2,3,4 and nodes 0,1,3 are allowed; CPU 4 is of node 2 */
    cr_assert(!machine->nodes[node_at(machine, 2)].allowed);
    cr_assert(!cpu_at(machine, 1)->allowed);
    cr_assert(cpu_at(machine, 4)->allowed);
    cr_assert_neq(cpu_at(machine, 4)->node, node_at(machine, 2));
    cr_assert(!cpu_at(machine, 4)->node_is_near);
    cr_assert_eq(machine->nodes[node_at(machine, 0)].pu_count, 1);
    numoe_machine_free(machine);
}

Test(topo_files, gpu_memory_and_cpuless_nodes_serve_nobody)
{
    struct numoe_machine *machine = machine_of(DATA "cpuless-gpu-and-far-nodes.xml");

    check_machine(machine);
    cr_assert_eq(machine->node_count, 5);
    cr_assert_eq(machine->nodes[node_at(machine, 250)].kind, NUMOE_NODE_GPU);
    cr_assert_eq(machine->nodes[node_at(machine, 41)].kind, NUMOE_NODE_SLOW);
    cr_assert_eq(machine->nodes[node_at(machine, 40)].pu_count, 0);
    cr_assert_eq(machine->nodes[node_at(machine, 0)].pu_count, 2);
    cr_assert_eq(machine->nodes[node_at(machine, 1)].pu_count, 2);
    numoe_machine_free(machine);
}

Test(topo_files, l3_as_numa_has_eight_domains)
{
    struct numoe_machine *machine = machine_of(EPYC);

    check_machine(machine);
    cr_assert_eq(machine->node_count, 32);
    cr_assert_eq(machine->domain_count, 8);
    for (uint32_t i = 0; i < 32; i++)
        cr_assert_eq(machine->nodes[i].domain, i / 4);
    cr_assert_eq(numoe_machine_distance(machine, 0, 1), 11);
    cr_assert_eq(numoe_machine_distance(machine, 0, 4), 12);
    cr_assert_eq(numoe_machine_distance(machine, 0, 16), 32);
    cr_assert_eq(cpu_at(machine, 129)->smt, 1);
    cr_assert_eq(cpu_at(machine, 129)->core, cpu_at(machine, 1)->core);
    cr_assert_eq(machine->device_count, 3);
    cr_assert_str_eq(machine->devices[0].name, "cuda0");
    cr_assert_eq(machine->devices[0].node_count, 4);
    cr_assert_eq(machine->nodes[machine->devices[0].nodes[0]].os_index, 4);
    cr_assert_str_eq(machine->devices[1].name, "nvme0n1");
    cr_assert_str_eq(machine->cpu_model, "AMD EPYC 7H12 64-Core Processor");
    numoe_machine_free(machine);
}

/* Levels of packages are not added up: the outer ones count. */
Test(topo_files, packages_in_packages_are_one)
{
    struct numoe_machine *machine = machine_of(DATA "packages-in-packages.xml");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_plan *plan;

    check_machine(machine);
    cr_assert_eq(machine->package_count, 2);
    for (uint32_t i = 0; i < 4; i++)
        cr_assert_eq(cpu_at(machine, i)->package, i / 2);
    request.workers = 3; /* the odd one goes by package */
    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(topo_files, gpus_of_a_display_class_are_found_by_their_os_device)
{
    struct numoe_machine *machine = machine_of(DATA "xeon-8336c-2s-2n.xml");

    check_machine(machine);
    cr_assert_eq(machine->device_count, 2);
    cr_assert(machine->devices[0].gpu && machine->devices[1].gpu);
    cr_assert_eq(machine->devices[1].package, 1);
    cr_assert_eq(machine->domain_count, 2);
    numoe_machine_free(machine);
}

/* ---- domains, in other numbers -------------------------------------------------------------- */

Test(topo_domains, are_regrouped_in_order_within_packages, .timeout = 60)
{
    static const uint32_t counts[] = {2, 4, 8, 16, 32, 6};

    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        struct numoe_machine *machine = machine_of(EPYC);
        uint32_t nodes[64] = {0};

        cr_assert_eq(numoe_machine_regroup(machine, counts[c], NULL), 0);
        cr_assert_eq(machine->domain_count, counts[c]);
        check_machine(machine);
        for (uint32_t i = 0; i < machine->node_count; i++) {
            nodes[machine->nodes[i].domain]++;
            cr_assert_eq(machine->nodes[i].domain / (counts[c] / 2), machine->nodes[i].package);
            cr_assert(!i || machine->nodes[i].domain >= machine->nodes[i - 1].domain);
        }
        for (uint32_t d = 0; d < counts[c]; d++)
            cr_assert(nodes[d] == 32 / counts[c] || nodes[d] == 32 / counts[c] + 1);
        numoe_machine_free(machine);
    }
}

Test(topo_domains, impossible_numbers_are_refused, .timeout = 60)
{
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_error error = NUMOE_ERROR_INIT;
    static const uint32_t counts[] = {0, 1, 3, 34, 64, UINT32_MAX};

    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        cr_assert_eq(numoe_machine_regroup(machine, counts[c], &error), -EINVAL, "%u", counts[c]);
        cr_assert_str_not_empty(error.message);
    }
    cr_assert_eq(machine->domain_count, 8);
    numoe_machine_free(machine);
}

/* ---- damaged files -------------------------------------------------------------------------- */

static char *read_file(const char *path, size_t *size)
{
    FILE *file = fopen(path, "r");
    char *text;

    cr_assert(file, "%s", path);
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    text = malloc(*size + 1);
    cr_assert_eq(fread(text, 1, *size, file), *size);
    fclose(file);
    text[*size] = 0;
    return text;
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Load some bytes as a file: a machine or an error, nothing else. */
static bool try_bytes(const char *path, const char *bytes, size_t size)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine = NULL;
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_plan *plan = NULL;
    FILE *file = fopen(path, "w");
    int rc;

    cr_assert(file);
    cr_assert_eq(fwrite(bytes, 1, size, file), size);
    fclose(file);
    rc = numoe_machine_load(path, &machine, &error);
    if (rc) {
        cr_assert(rc < 0 && error.code == rc && error.message[0]);
        cr_assert_null(machine);
        return false;
    }
    check_machine(machine);
    request.shape = v4_flash;
    request.shape.layers = 1;
    if (numoe_plan_create(machine, &request, &plan, &error) == 0)
        check_plan(machine, plan);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
    return true;
}

static void damage(const char *name, unsigned rounds, uint64_t seed)
{
    char path[] = "/tmp/numoe-damaged-XXXXXX";
    size_t size;
    char *good = read_file(name, &size), *bad = malloc(size + 16);
    unsigned loaded = 0;
    int fd = mkstemp(path);

    cr_assert(fd >= 0);
    close(fd);
    cr_assert(try_bytes(path, good, size));
    for (unsigned i = 0; i < rounds; i++)
        loaded += try_bytes(path, good, size * i / rounds);
    cr_assert_eq(loaded, 0, "%u cut files load", loaded);
    for (unsigned i = 0; i < rounds; i++) {
        unsigned flips = 1 + i % 4;

        memcpy(bad, good, size);
        while (flips--)
            bad[next_random(&seed) % size] ^= (char)(1u << next_random(&seed) % 8);
        loaded += try_bytes(path, bad, size);
    }
    /* digits are where sizes, indices and masks stand */
    for (unsigned i = 0; i < rounds; i++) {
        unsigned changes = 1 + i % 3;

        memcpy(bad, good, size);
        while (changes) {
            size_t at = next_random(&seed) % size;

            if (bad[at] < '0' || bad[at] > '9')
                continue;
            bad[at] = (char)('0' + next_random(&seed) % 10);
            changes--;
        }
        loaded += try_bytes(path, bad, size);
    }
    cr_log_info("%s: %u of %u mutations load", name, loaded, 2 * rounds);
    unlink(path);
    free(good);
    free(bad);
}

Test(topo_damaged, devices_and_matrices, .timeout = 240)
{
    damage(DATA "matrices-and-devices.xml", 120, 0x9e3779b97f4a7c15u);
}

Test(topo_damaged, odd_nodes, .timeout = 240)
{
    damage(DATA "cpuless-gpu-and-far-nodes.xml", 120, 0xd1b54a32d192ed03u);
}

Test(topo_damaged, core_kinds, .timeout = 240)
{
    damage(DATA "fast-cores-last.xml", 60, 0x8cb92ba72f3d8dd7u);
}

Test(topo_damaged, odd_bytes)
{
    static const char entities[] =
        "<?xml version=\"1.0\"?><!DOCTYPE topology [<!ENTITY a \"aaaa\">]><topology>&a;</topology>";
    static const char zero[] = "<topology version=\"2.0\">\0</topology>";
    static const char future[] = "<topology version=\"3.0\"><object type=\"Machine\"/></topology>";
    char path[] = "/tmp/numoe-odd-XXXXXX", *deep = malloc(2000000);
    int fd = mkstemp(path);

    close(fd);
    cr_assert(!try_bytes(path, "", 0));
    cr_assert(!try_bytes(path, "\xff\xfe\x00", 3));
    cr_assert(!try_bytes(path, entities, sizeof entities - 1));
    cr_assert(!try_bytes(path, zero, sizeof zero - 1));
    cr_assert(!try_bytes(path, future, sizeof future - 1));
    /* a hundred thousand objects inside each other */
    strcpy(deep, "<topology version=\"2.0\">");
    for (size_t i = 0, at = strlen(deep); i < 100000; i++, at += 9)
        memcpy(deep + at, "<object >", 10);
    cr_assert(!try_bytes(path, deep, strlen(deep)));
    unlink(path);
    free(deep);
}

/* ---- this system ---------------------------------------------------------------------------- */

Test(topo_live, this_machine_has_what_the_kernel_says)
{
    struct numoe_machine *machine = machine_of(NULL), *again = machine_of("live");
    cpu_set_t set;
    uint32_t allowed = 0;

    check_machine(machine);
    cr_assert(machine->live);
    cr_assert_str_eq(machine->source, "live");
    cr_assert_eq(machine->pu_count, again->pu_count);
    cr_assert_eq(sched_getaffinity(0, sizeof set, &set), 0);
    for (uint32_t i = 0; i < machine->pu_count; i++) {
        cr_assert_eq(machine->pus[i].allowed, CPU_ISSET(machine->pus[i].os_index, &set) != 0);
        allowed += machine->pus[i].allowed;
    }
    cr_assert_eq((int)allowed, CPU_COUNT(&set));
    for (uint32_t i = 0; i < machine->node_count; i++)
        cr_assert(machine->nodes[i].free_bytes > 0);
    numoe_machine_free(machine);
    numoe_machine_free(again);
}

Test(topo_live, free_memory_is_read_anew)
{
    struct numoe_machine *machine = machine_of("live");
    struct numoe_machine *other = machine_of("numa:2(memory=1GB) core:2 pu:1");
    uint64_t free_bytes = machine->nodes[0].free_bytes, limit = machine->cgroup_bytes;

    machine->nodes[0].free_bytes = machine->cgroup_bytes = 1;
    numoe_machine_refresh(machine);
    cr_assert_gt(machine->nodes[0].free_bytes, free_bytes / 4);
    cr_assert_gt(machine->cgroup_bytes, limit / 4);
    check_machine(machine);
    other->nodes[0].free_bytes = 1;
    numoe_machine_refresh(other);
    cr_assert_eq(other->nodes[0].free_bytes, 1);
    numoe_machine_free(other);
    numoe_machine_free(machine);
}

Test(topo_live, a_narrow_affinity_mask_is_kept)
{
    struct numoe_machine *machine;
    cpu_set_t set, one;
    int last = -1;

    cr_assert_eq(sched_getaffinity(0, sizeof set, &set), 0);
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &set))
            last = i;
    CPU_ZERO(&one);
    CPU_SET(last, &one);
    cr_assert_eq(sched_setaffinity(0, sizeof one, &one), 0);
    machine = machine_of("");
    for (uint32_t i = 0; i < machine->pu_count; i++)
        cr_assert_eq(machine->pus[i].allowed, machine->pus[i].os_index == (uint32_t)last);
    numoe_machine_free(machine);
}

/* ---- printing ------------------------------------------------------------------------------- */

Test(topo_print, text_names_nodes_by_os_index)
{
    struct numoe_machine *machine =
        machine_of("pack:4 [numa(memory=64GB indexes=0,1,16,17)] core:4 pu:1");
    char *text = text_of(numoe_machine_print(machine, out));

    cr_assert(strstr(text, "\n    17 DRAM"));
    cr_assert(strstr(text, "\n    16 DRAM"));
    cr_assert(!strstr(text, "\n     2 DRAM"));
    cr_assert(strstr(text, "59.60 GiB"));
    free(text);
    numoe_machine_free(machine);
}

Test(topo_print, json_parses_and_says_the_same)
{
    struct numoe_machine *machine = machine_of(EPYC);
    char *text = text_of(cr_assert_eq(numoe_machine_print_json(machine, out), 0));
    json_error_t where;
    json_t *root = json_loads(text, 0, &where);

    cr_assert(root, "%s", where.text);
    cr_assert_eq(json_array_size(json_object_get(root, "nodes")), 32);
    cr_assert_eq(json_array_size(json_object_get(root, "cpus")), 256);
    cr_assert_eq(json_array_size(json_object_get(root, "distances")), 32);
    cr_assert(json_is_null(json_object_get(root, "cgroup_bytes")));
    cr_assert_eq(json_integer_value(json_object_get(
                     json_array_get(json_object_get(root, "nodes"), 31), "capacity_bytes")),
                 17179869184);
    json_decref(root);
    free(text);
    numoe_machine_free(machine);
}
