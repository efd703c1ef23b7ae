/* What costs speed: read from made-up roots, judged from made-up values. */
#include "support/tree.h"
#include "topo/topo_fixture.h"

#include "health.h"

#include <errno.h>
#include <unistd.h>

static char root[] = "/tmp/numoe-health-XXXXXX";

static void enter(void)
{
    cr_assert_not_null(mkdtemp(root));
}

static void leave(void)
{
    char command[64];

    snprintf(command, sizeof command, "rm -rf %s", root);
    cr_assert_eq(system(command), 0);
}

TestSuite(topo_health, .init = enter, .fini = leave, .timeout = 20);

static void put(const char *name, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    tree_vput(root, name, format, args);
    va_end(args);
}

static const struct numoe_warning *find(const struct numoe_warnings *warnings, const char *what)
{
    for (uint32_t i = 0; i < warnings->count; i++)
        if (!strcmp(warnings->list[i].what, what))
            return &warnings->list[i];
    return NULL;
}

/* A healthy box of two nodes. */
static void make_root(void)
{
    put("proc/sys/kernel/numa_balancing", "0\n");
    put("proc/sys/kernel/io_uring_disabled", "0\n");
    put("proc/sys/vm/zone_reclaim_mode", "0\n");
    put("proc/sys/vm/max_map_count", "65530\n");
    put("proc/sys/vm/swappiness", "60\n");
    put("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
    put("proc/meminfo", "MemTotal: 16777216 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n");
    put("proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max locked memory         unlimited            unlimited            bytes\n");
    for (int cpu = 0; cpu < 8; cpu++) {
        char name[96];

        snprintf(name, sizeof name, "sys/devices/system/cpu/cpu%d/cpufreq/scaling_governor", cpu);
        put(name, "performance\n");
    }
    for (int node = 0; node < 2; node++) {
        char name[128];

        for (int giant = 0; giant < 2; giant++) {
            const char *size = giant ? "1048576kB" : "2048kB";

            snprintf(name, sizeof name,
                     "sys/devices/system/node/node%d/hugepages/hugepages-%s/nr_hugepages", node,
                     size);
            put(name, "0\n");
            snprintf(name, sizeof name,
                     "sys/devices/system/node/node%d/hugepages/hugepages-%s/free_hugepages", node,
                     size);
            put(name, "0\n");
        }
    }
}

static struct numoe_machine *two_nodes(void)
{
    return machine_of("numa:2(memory=8GB) core:2 pu:2");
}

/* The only warnings there are, in any order; and each has a fix. */
static void expect(const struct numoe_machine *machine, uint32_t count, const char *const *what)
{
    struct numoe_warnings warnings;

    cr_assert_eq(numoe_machine_health(machine, root, &warnings), 0);
    for (uint32_t i = 0; i < count; i++)
        cr_expect_not_null(find(&warnings, what[i]), "no warning of %s", what[i]);
    for (uint32_t i = 0; i < warnings.count; i++) {
        const struct numoe_warning *w = &warnings.list[i];
        bool expected = false;

        for (uint32_t j = 0; j < count; j++)
            expected |= !strcmp(w->what, what[j]);
        cr_expect(expected, "%s: %s", w->what, w->message);
        cr_expect(*w->message && *w->fix, "%s has no words", w->what);
    }
    cr_expect_eq(warnings.count, count);
    numoe_warnings_free(&warnings);
}

#define EXPECT(machine, ...)                                                                       \
    do {                                                                                           \
        static const char *const what_[] = {__VA_ARGS__};                                          \
        expect(machine, sizeof what_ / sizeof what_[0], what_);                                    \
    } while (0)

Test(topo_health, healthy_box_has_no_warning)
{
    struct numoe_machine *machine = two_nodes();

    make_root();
    expect(machine, 0, NULL);
    numoe_machine_free(machine);
}

Test(topo_health, what_cannot_be_read_is_not_warned_of)
{
    struct numoe_machine *machine = two_nodes();

    expect(machine, 0, NULL);
    put("proc/sys/kernel/numa_balancing", "%s", "");
    put("proc/sys/vm/max_map_count", "none\n");
    put("proc/sys/vm/zone_reclaim_mode", "99999999999999999999999\n");
    put("sys/kernel/mm/transparent_hugepage/enabled", "never\n");
    put("proc/self/limits", "Max locked memory\n");
    put("proc/meminfo", "SwapTotal");
    expect(machine, 0, NULL);
    numoe_machine_free(machine);
}

/* A captured system is someone else's directory. */
Test(topo_health, pipes_and_devices_do_not_hold_it_up)
{
    static const char *const names[] = {"proc/self/cgroup", "proc/self/mountinfo", "proc/meminfo",
                                        "proc/self/limits", "proc/sys/vm/zone_reclaim_mode"};
    struct numoe_machine *machine = two_nodes();
    char path[256];

    for (int round = 0; round < 3; round++) {
        make_root();
        put("proc/self/cgroup", "0::/box\n");
        put("proc/self/mountinfo", "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
            snprintf(path, sizeof path, "%s/%s", root, names[i]);
            unlink(path);
            if (round == 0) {
                cr_assert_eq(mkfifo(path, 0600), 0);
            } else if (round == 1) {
                cr_assert_eq(symlink("/dev/zero", path), 0);
            } else { /* zeros without end, as good as */
                put(names[i], "%s", "");
                cr_assert_eq(truncate(path, (off_t)1 << 40), 0);
            }
        }
        expect(machine, 0, NULL);
        for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
            snprintf(path, sizeof path, "%s/%s", root, names[i]);
            unlink(path);
        }
    }
    numoe_machine_free(machine);
}

Test(topo_health, settings_of_the_kernel)
{
    struct numoe_machine *machine = two_nodes(), *one;
    struct numoe_warnings warnings;

    make_root();
    put("proc/sys/kernel/numa_balancing", "1\n");
    EXPECT(machine, "numa_balancing");
    cr_assert_eq(numoe_machine_health(machine, root, &warnings), 0);
    cr_assert_str_eq(warnings.list[0].fix, "sysctl -w kernel.numa_balancing=0");
    numoe_warnings_free(&warnings);
    one = machine_of("numa:1(memory=16GB) core:4 pu:2");
    expect(one, 0, NULL); /* with one node there is nothing to balance */
    numoe_machine_free(one);
    put("proc/sys/vm/zone_reclaim_mode", "7\n");
    EXPECT(machine, "numa_balancing", "zone_reclaim_mode");
    put("proc/sys/kernel/io_uring_disabled", "2\n");
    put("proc/sys/vm/max_map_count", "1024\n");
    put("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
    EXPECT(machine, "numa_balancing", "zone_reclaim_mode", "io_uring", "max_map_count",
           "transparent_hugepage");
    numoe_machine_free(machine);
}

Test(topo_health, governors_are_counted)
{
    struct numoe_machine *machine = two_nodes();
    struct numoe_warnings warnings;

    make_root();
    put("sys/devices/system/cpu/cpu3/cpufreq/scaling_governor", "powersave\n");
    put("sys/devices/system/cpu/cpu5/cpufreq/scaling_governor", "powersave\n");
    EXPECT(machine, "governor");
    cr_assert_eq(numoe_machine_health(machine, root, &warnings), 0);
    cr_assert_not_null(strstr(warnings.list[0].message, "2 CPUs is \"powersave\""), "%s",
                       warnings.list[0].message);
    numoe_warnings_free(&warnings);
    numoe_machine_free(machine);
}

Test(topo_health, swap_and_locked_memory)
{
    struct numoe_machine *machine = two_nodes();

    make_root();
    put("proc/meminfo", "SwapTotal: 8388608 kB\nSwapFree: 8388608 kB\n");
    EXPECT(machine, "swappiness");
    put("proc/sys/vm/swappiness", "1\n");
    expect(machine, 0, NULL);
    put("proc/meminfo", "SwapTotal: 8388608 kB\nSwapFree: 1048576 kB\n");
    EXPECT(machine, "swap");
    put("proc/self/limits", "Max locked memory         8388608              8388608  bytes\n");
    EXPECT(machine, "swap", "memlock");

    /* whoever may lock as much as it likes has no limit, but not within a user namespace */
    put("proc/self/status", "Name:\tnumoe\nCapEff:\t000001fffeffffff\n");
    EXPECT(machine, "swap", "memlock");
    put("proc/self/uid_map", "         0       1000          1\n");
    EXPECT(machine, "swap", "memlock");
    put("proc/self/uid_map", "         0          0 4294967295\n");
    EXPECT(machine, "swap");
    put("proc/self/status", "Name:\tnumoe\nCapEff:\t0000000000000000\n");
    EXPECT(machine, "swap", "memlock");
    numoe_machine_free(machine);
}

Test(topo_health, huge_pages_by_node)
{
    struct numoe_machine *machine = two_nodes();
    struct numoe_warnings warnings;

    make_root();
    put("sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "1024\n");
    EXPECT(machine, "huge_pages_2m");
    cr_assert_eq(numoe_machine_health(machine, root, &warnings), 0);
    cr_assert_str_eq(warnings.list[0].fix, "echo 1024 > /sys/devices/system/node/node1/hugepages/"
                                           "hugepages-2048kB/nr_hugepages");
    numoe_warnings_free(&warnings);
    put("sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages", "1000\n");
    expect(machine, 0, NULL);
    put("sys/devices/system/node/node1/hugepages/hugepages-1048576kB/nr_hugepages", "4\n");
    EXPECT(machine, "huge_pages_1g");
    cr_assert_eq(numoe_machine_health(machine, root, &warnings), 0);
    cr_assert_str_eq(warnings.list[0].fix, "echo 4 > /sys/devices/system/node/node0/hugepages/"
                                           "hugepages-1048576kB/nr_hugepages");
    numoe_warnings_free(&warnings);
    put("sys/devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages", "4\n");
    expect(machine, 0, NULL);
    numoe_machine_free(machine);
}

Test(topo_health, uneven_memory_is_named)
{
    struct numoe_machine *machine = machine_of("numa:4(memory=64GB) core:2 pu:1");
    struct numoe_warnings warnings;

    machine->nodes[0].capacity_bytes -= (uint64_t)2 << 30; /* what the kernel keeps */
    expect(machine, 0, NULL);
    machine->nodes[2].capacity_bytes /= 2;
    EXPECT(machine, "uneven_memory");
    cr_assert_eq(numoe_machine_health(machine, root, &warnings), 0);
    cr_assert_not_null(strstr(warnings.list[0].message, "node 2 has "), "%s",
                       warnings.list[0].message);
    numoe_warnings_free(&warnings);
    numoe_machine_free(machine);
    machine = machine_of(DATA "cpuless-gpu-and-far-nodes.xml");
    cr_assert_eq(numoe_machine_health(machine, root, &warnings), 0);
    cr_assert_null(find(&warnings, "uneven_memory"), "far nodes need not be alike");
    numoe_warnings_free(&warnings);
    numoe_machine_free(machine);
}

Test(topo_health, limits_of_a_container)
{
    struct numoe_machine *machine = two_nodes();

    make_root();
    put("proc/self/cgroup", "0::/box\n");
    put("proc/self/mountinfo", "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    put("sys/fs/cgroup/box/cpu.max", "max 100000\n");
    put("sys/fs/cgroup/box/memory.max", "max\n");
    expect(machine, 0, NULL);
    put("sys/fs/cgroup/box/cpu.max", "400000 100000\n");
    EXPECT(machine, "cpu_quota");
    put("sys/fs/cgroup/box/cpu.max", "150000 100000\n");
    EXPECT(machine, "cpu_quota", "cpu_quota_fraction");
    put("sys/fs/cgroup/box/cpu.max", "1600000 100000\n");
    expect(machine, 0, NULL); /* more than there are */
    put("sys/fs/cgroup/box/memory.max", "4294967296\n");
    put("sys/fs/cgroup/box/memory.current", "0\n");
    EXPECT(machine, "memory_limit");
    machine->pus[7].allowed = false;
    machine->nodes[1].allowed = false;
    EXPECT(machine, "memory_limit", "cpuset", "cpuset_mems");
    numoe_machine_free(machine);
}

Test(topo_health, words_fit_their_places)
{
    struct numoe_machine *machine = machine_of("numa:64(memory=8GB) core:2 pu:1");
    struct health_values values = {.numa_balancing = 1,
                                   .zone_reclaim_mode = INT64_MAX,
                                   .max_map_count = 0,
                                   .io_uring_disabled = 1,
                                   .swappiness = INT64_MAX,
                                   .huge_pages = "never",
                                   .governor = "a_governor_with_a_very_long_nam",
                                   .slow_cpus = UINT32_MAX,
                                   .swap_bytes = UINT64_MAX,
                                   .swap_used_bytes = UINT64_MAX,
                                   .locked_bytes = 0,
                                   .cpu_quota = 1.234567,
                                   .cgroup_bytes = 0,
                                   .policy_error = EPERM};
    struct numoe_warnings warnings = {0};
    char *text;

    values.nodes = calloc(machine->node_count, sizeof *values.nodes);
    for (uint32_t i = 0; i < machine->node_count; i++)
        values.nodes[i] = (struct health_node){.huge_2m = i % 2 ? INT64_MAX : 0,
                                               .huge_1g = i % 2 ? INT64_MAX : 0};
    for (uint32_t i = 0; i < machine->node_count; i += 2)
        machine->nodes[i].capacity_bytes /= 2;
    machine->pus[0].allowed = machine->nodes[3].allowed = false;
    cr_assert_eq(health_judge(machine, &values, &warnings), 0);
    cr_assert_geq(warnings.count, 15);
    for (uint32_t i = 0; i < warnings.count; i++) {
        cr_expect_lt(strlen(warnings.list[i].message), sizeof warnings.list[i].message - 1,
                     "%s is cut", warnings.list[i].message);
        cr_expect_lt(strlen(warnings.list[i].fix), sizeof warnings.list[i].fix - 1, "%s is cut",
                     warnings.list[i].fix);
        for (uint32_t j = 0; j < i; j++)
            cr_expect_str_neq(warnings.list[i].what, warnings.list[j].what);
    }
    text = text_of(numoe_warnings_print(&warnings, out));
    cr_assert_not_null(strstr(text, "fix: sysctl -w kernel.numa_balancing=0\n"));
    free(text);
    numoe_warnings_free(&warnings);
    health_free(&values);
    numoe_machine_free(machine);
}

/* Where there is one node memory cannot lie elsewhere. */
Test(topo_health, a_denied_policy_is_said_where_there_are_nodes_to_choose_from)
{
    for (uint32_t several = 0; several < 2; several++) {
        struct numoe_machine *machine =
            machine_of(several ? "numa:2(memory=8GB) core:1 pu:1" : "core:1 pu:1");
        struct health_values values = {.max_map_count = HEALTH_NOT_KNOWN,
                                       .locked_bytes = UINT64_MAX,
                                       .cgroup_bytes = UINT64_MAX,
                                       .policy_error = EPERM};
        struct numoe_warnings warnings = {0};

        values.nodes = calloc(machine->node_count, sizeof *values.nodes);
        cr_assert_eq(health_judge(machine, &values, &warnings), 0);
        cr_expect_eq(warnings.count, several);
        if (several) {
            cr_expect_str_eq(warnings.list[0].what, "memory_policy");
            cr_expect_not_null(strstr(warnings.list[0].message, "Operation not permitted"));
        }
        numoe_warnings_free(&warnings);
        health_free(&values);
        numoe_machine_free(machine);
    }
}

Test(topo_health, this_machine_can_be_judged)
{
    struct numoe_machine *machine = machine_of(NULL);
    struct numoe_warnings warnings;

    cr_assert_eq(numoe_machine_health(machine, "", &warnings), 0);
    numoe_warnings_free(&warnings);
    numoe_machine_free(machine);
}
