/* Machines recorded elsewhere: each loads with its known counts, and can be planned. */
#include "topo/topo_fixture.h"

#include <errno.h>
#include <sys/stat.h>

struct recorded {
    const char *file;
    uint32_t with_memory, without_memory, packages, cores, pus, gpus, domains;
};

/*
 * Cores: where a file has no Core objects each CPU counts as one. GPUs: display chips without an
 * accelerator's OS device do not count, whatever their subsystem ids are.
 */
static const struct recorded table[] = {
    {"0n-ps3-no-numa-no-memory-size.xml", 0, 1, 0, 1, 2, 0, 1},
    {"11n-fake-memattrs-hmat-node-per-package.xml", 6, 5, 2, 8, 8, 0, 11},
    {"16n-fake-4pkg-2die-2node-2groups-smt2.xml", 16, 0, 4, 32, 64, 0, 16},
    {"17n-superdome-ia64-cpuless-node16.xml", 17, 0, 64, 128, 128, 0, 17},
    {"1n-raptorlake-hybrid-p-and-e-cores.xml", 1, 0, 1, 14, 20, 0, 1},
    {"1n-s390-books-as-groups.xml", 1, 0, 8, 20, 20, 0, 1},
    {"1n-xeon-2pkg-buggy-numa-sysfs.xml", 1, 0, 2, 8, 8, 0, 1},
    {"1n-xeon-node0-and-cpu0-offline.xml", 1, 0, 2, 17, 17, 0, 1},
    {"1n-xeon-smt2-offline-cpus-uneven-cores.xml", 1, 0, 4, 7, 12, 0, 1},
    {"24n-altix-uv-12groups-smt2.xml", 24, 0, 24, 192, 384, 0, 24},
    {"2n-dgx2-16gpu-nvlink-distances.xml", 2, 0, 2, 4, 4, 16, 2},
    {"2n-power8-4gpu-nvlink-distances.xml", 2, 0, 2, 8, 16, 4, 2},
    {"2n-power9-gpu-memory-nodes-dropped.xml", 2, 0, 2, 8, 32, 6, 2},
    {"2n-xeon-westmere-3gpu-smt2.xml", 2, 0, 2, 12, 24, 3, 2},
    {"4n-fake-cpukinds-differ-by-node.xml", 4, 0, 2, 12, 24, 0, 4},
    {"4n-kunpeng920-arm-cluster-groups.xml", 4, 0, 2, 128, 128, 0, 4},
    {"4n-xeon6230-snc2-memory-side-cache.xml", 4, 0, 2, 40, 80, 0, 4},
    {"4n-xeon7460-bull-16pkg-4-in-each-node.xml", 4, 0, 16, 96, 96, 0, 4},
    {"64n-altix-ia64-128pkg-256c.xml", 64, 0, 128, 256, 256, 0, 64},
    {"7n-fake-hbm-nvm-cxl-gpu-memory-tiers.xml", 7, 0, 1, 6, 6, 0, 7},
    {"8n-fake-hetero-distances.xml", 8, 0, 4, 8, 8, 0, 8},
    {"8n-knl-snc4-flat-mcdram-smt4.xml", 8, 0, 1, 16, 64, 0, 8},
    {"8n-opteron-4pkg-sparse-node-and-cpu-index.xml", 8, 0, 4, 48, 48, 0, 8},
    {"8n-opteron-cpuset-restricted-offline-cpu.xml", 8, 0, 8, 15, 15, 0, 8},
    {"8n-opteron6134-cgroup2-restricted.xml", 8, 0, 4, 32, 32, 0, 8},
    {"8n-opteron6272-bulldozer-shared-l2.xml", 8, 0, 4, 64, 64, 0, 8},
    {"8n-power7-smt4-node-index-gaps-4x.xml", 8, 0, 64, 64, 256, 0, 8},
    {"8n-power9-6gpu-memory-nodes-255-down.xml", 8, 0, 2, 8, 32, 6, 8},
    {"8n-xeon-irregular-groups-pci.xml", 8, 0, 8, 64, 64, 0, 8},
    {"epyc-7h12-2s-32n.xml", 32, 0, 2, 128, 256, 2, 8},
    {"xeon-8336c-2s-2n.xml", 2, 0, 2, 64, 128, 2, 2},
};

enum { FILES = sizeof table / sizeof table[0] };

/* NULL when the file is not there. */
static struct numoe_machine *load(const char *file)
{
    char path[1024];
    struct stat info;

    snprintf(path, sizeof path, "%s/%s", NUMOE_RECORDED_TOPOLOGIES, file);
    return stat(path, &info) ? NULL : machine_of(path);
}

static void need_folder(void)
{
    struct stat info;

    if (stat(NUMOE_RECORDED_TOPOLOGIES, &info))
        cr_skip_test("no recorded topologies beside this checkout");
}

Test(topo_recorded, all_load_with_their_counts, .timeout = 120)
{
    need_folder();
    for (size_t i = 0; i < FILES; i++) {
        struct numoe_machine *machine = load(table[i].file);
        uint32_t memory = 0, gpus = 0;

        if (!machine)
            continue;
        check_machine(machine);
        for (uint32_t n = 0; n < machine->node_count; n++)
            memory += machine->nodes[n].capacity_bytes != 0;
        for (uint32_t d = 0; d < machine->device_count; d++)
            gpus += machine->devices[d].gpu;
        cr_expect_eq(memory, table[i].with_memory, "%s", table[i].file);
        cr_expect_eq(machine->node_count - memory, table[i].without_memory, "%s", table[i].file);
        cr_expect_eq(machine->package_count, table[i].packages, "%s", table[i].file);
        cr_expect_eq(machine->core_count, table[i].cores, "%s", table[i].file);
        cr_expect_eq(machine->pu_count, table[i].pus, "%s", table[i].file);
        cr_expect_eq(gpus, table[i].gpus, "%s", table[i].file);
        cr_expect_eq(machine->domain_count, table[i].domains, "%s", table[i].file);
        numoe_machine_free(machine);
    }
}

Test(topo_recorded, any_model_on_any_machine_plans_or_is_refused, .timeout = 240)
{
    static const struct numoe_expert_shape shapes[] = {{43, 256, 64, 208896, 4096, 6, 0},
                                                       {1, 32, 90, 149760, 2880, 4, 11520},
                                                       {2, 60, 24, 104448, 2048, 8, 0},
                                                       {3, 3, 5, 4352, 64, 2, 256},
                                                       {1, 1, 1, 1088, 32, 1, 128},
                                                       {93, 896, 64, 365568, 7168, 8, 0},
                                                       {0, 0, 0, 0, 0, 0, 0}};

    need_folder();
    for (size_t i = 0; i < FILES; i++) {
        struct numoe_machine *machine = load(table[i].file);
        uint32_t workers = 0;

        if (!machine)
            continue;
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
            struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
            struct numoe_error error = NUMOE_ERROR_INIT;
            struct numoe_plan *plan = NULL;
            int rc;

            request.shape = shapes[s];
            rc = numoe_plan_create(machine, &request, &plan, &error);
            if (rc) {
                cr_expect_eq(rc, -ENOSPC, "%s: %s", table[i].file, error.message);
                cr_expect(strstr(error.message, "do not fit") && strstr(error.message, "short by"));
                continue;
            }
            check_plan(machine, plan);
            if (plan->shape.layers * plan->shape.experts * plan->node_count < 100000)
                check_boundaries(plan);
            if (workers)
                cr_expect_eq(plan->worker_count, workers, "%s", table[i].file);
            workers = plan->worker_count;
            numoe_plan_free(plan);
        }
        cr_expect(workers > 0, "%s: not even workers", table[i].file);
        numoe_machine_free(machine);
    }
}

/* Names of files and facts that a plan without a model must show. */
static struct numoe_plan *plan_file(const char *file, struct numoe_machine **machine)
{
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;

    *machine = load(file);
    return *machine ? plan_of(*machine, &request) : NULL;
}

static void expect_nodes(const char *file, const uint32_t *os, uint32_t count)
{
    struct numoe_machine *machine;
    struct numoe_plan *plan;

    need_folder();
    plan = plan_file(file, &machine);
    if (!plan)
        cr_skip_test("the file is not there");
    cr_assert_eq(plan->node_count, count, "%s: %u nodes", file, plan->node_count);
    for (uint32_t i = 0; i < count; i++) {
        bool found = false;

        for (uint32_t n = 0; n < count; n++)
            found |= plan->nodes[n].os_index == os[i];
        cr_assert(found, "%s: node %u is not used", file, os[i]);
    }
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(topo_recorded, gpu_memory_is_never_used)
{
    expect_nodes("8n-power9-6gpu-memory-nodes-255-down.xml", (uint32_t[]){0, 8}, 2);
}

Test(topo_recorded, memory_behind_cpus_without_any)
{
    expect_nodes("11n-fake-memattrs-hmat-node-per-package.xml", (uint32_t[]){5, 6, 8, 9}, 4);
}

Test(topo_recorded, mcdram_is_left_alone)
{
    expect_nodes("8n-knl-snc4-flat-mcdram-smt4.xml", (uint32_t[]){0, 1, 2, 3}, 4);
}

Test(topo_recorded, tiers)
{
    /* node 2 is HBM, but all that CPUs 4 and 5 have */
    expect_nodes("7n-fake-hbm-nvm-cxl-gpu-memory-tiers.xml", (uint32_t[]){0, 1, 2}, 3);
}

Test(topo_recorded, sparse_numbers)
{
    expect_nodes("8n-opteron-4pkg-sparse-node-and-cpu-index.xml",
                 (uint32_t[]){0, 1, 2, 33, 34, 45, 72, 73}, 8);
}

Test(topo_recorded, cpuless_node)
{
    expect_nodes("17n-superdome-ia64-cpuless-node16.xml",
                 (uint32_t[]){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, 16);
}

Test(topo_recorded, cpuset_of_cgroup)
{
    expect_nodes("8n-opteron6134-cgroup2-restricted.xml", (uint32_t[]){0, 1}, 2);
    expect_nodes("8n-opteron-cpuset-restricted-offline-cpu.xml", (uint32_t[]){1, 2, 3, 4}, 4);
    expect_nodes("8n-xeon-irregular-groups-pci.xml", (uint32_t[]){0, 1}, 2);
}

Test(topo_recorded, node_zero_is_absent)
{
    expect_nodes("1n-xeon-node0-and-cpu0-offline.xml", (uint32_t[]){1}, 1);
}

Test(topo_recorded, matrices_of_other_objects_are_ignored)
{
    struct numoe_machine *machine;

    need_folder();
    machine = load("2n-power8-4gpu-nvlink-distances.xml");
    if (!machine)
        cr_skip_test("the file is not there");
    cr_assert_eq(numoe_machine_distance(machine, 0, 1), 40);
    numoe_machine_free(machine);
}

Test(topo_recorded, node_order_of_a_matrix_is_its_own)
{
    struct numoe_machine *machine;

    need_folder();
    machine = load("4n-xeon6230-snc2-memory-side-cache.xml");
    if (!machine)
        cr_skip_test("the file is not there");
    cr_assert_eq(numoe_machine_distance(machine, node_at(machine, 0), node_at(machine, 2)), 11);
    cr_assert_eq(numoe_machine_distance(machine, node_at(machine, 0), node_at(machine, 1)), 21);
    numoe_machine_free(machine);
}
