/* What of a system's settings and limits costs speed. SPDX-License-Identifier: Apache-2.0 */
#include "health.h"

#include "memory_node.h"
#include "topo_build.h"
#include "topo_print.h"
#include "topo_system.h"
#include "topo_text.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- reading ---- */

static bool read_under(const char *root, const char *name, char *text, size_t size)
{
    char path[PATH_MAX];

    if (snprintf(path, sizeof path, "%s/%s", root, name) >= (int)sizeof path ||
        topo_read_text(path, text, size) <= 0)
        return false;
    text[strcspn(text, "\n")] = 0;
    return true;
}

static int64_t number(const char *root, const char *name)
{
    char text[64], *end;
    long long value;

    if (!read_under(root, name, text, sizeof text))
        return HEALTH_NOT_KNOWN;
    errno = 0;
    value = strtoll(text, &end, 10);
    return end == text || errno || value < 0 ? HEALTH_NOT_KNOWN : value;
}

/* The word in brackets: "always [madvise] never". */
static void chosen(const char *root, const char *name, char *word, size_t size)
{
    char text[128];
    const char *begin;

    word[0] = 0;
    if (!read_under(root, name, text, sizeof text))
        return;
    begin = strchr(text, '[');
    if (begin && strchr(begin, ']'))
        snprintf(word, size, "%.*s", (int)strcspn(begin + 1, "]"), begin + 1);
}

static void read_governors(const struct numoe_machine *machine, const char *root,
                           struct health_values *values)
{
    for (uint32_t i = 0; i < machine->pu_count; i++) {
        char name[96], text[32];

        if (!machine->pus[i].allowed)
            continue;
        snprintf(name, sizeof name, "sys/devices/system/cpu/cpu%u/cpufreq/scaling_governor",
                 machine->pus[i].os_index);
        if (!read_under(root, name, text, sizeof text) || !strcmp(text, "performance"))
            continue;
        if (!values->slow_cpus++)
            topo_copy_printable(values->governor, sizeof values->governor, text);
    }
}

/* "SwapTotal:  123 kB" of all of meminfo. */
static uint64_t kilobytes(const char *text, const char *name)
{
    const char *at = strstr(text, name);
    uint64_t value = at ? strtoull(at + strlen(name), NULL, 10) : 0;

    return value < UINT64_MAX / 1024 ? value * 1024 : 0;
}

static void read_swap(const char *root, struct health_values *values)
{
    char path[PATH_MAX], text[8192];
    uint64_t unused;

    if (snprintf(path, sizeof path, "%s/proc/meminfo", root) >= (int)sizeof path ||
        topo_read_text(path, text, sizeof text) <= 0)
        return;
    values->swap_bytes = kilobytes(text, "SwapTotal:");
    unused = kilobytes(text, "SwapFree:");
    values->swap_used_bytes = values->swap_bytes > unused ? values->swap_bytes - unused : 0;
}

/* Whether the limit of locked memory is none for this process: CAP_IPC_LOCK, and not within a user
 * namespace only. */
static bool may_lock(const char *root)
{
    enum { IPC_LOCK = 14 };
    char path[PATH_MAX], text[4096], *line;
    unsigned long long from = 1, to = 1, count = 0;

    if (!read_under(root, "proc/self/uid_map", text, sizeof text) ||
        sscanf(text, "%llu %llu %llu", &from, &to, &count) != 3 || from || to || count < UINT32_MAX)
        return false;
    if (snprintf(path, sizeof path, "%s/proc/self/status", root) >= (int)sizeof path ||
        topo_read_text(path, text, sizeof text) <= 0)
        return false;
    line = strstr(text, "CapEff:");
    return line && strtoull(line + strlen("CapEff:"), NULL, 16) >> IPC_LOCK & 1;
}

static void read_locked(const char *root, struct health_values *values)
{
    char path[PATH_MAX], text[4096], *line, *end;
    uint64_t limit;

    if (snprintf(path, sizeof path, "%s/proc/self/limits", root) >= (int)sizeof path ||
        topo_read_text(path, text, sizeof text) <= 0)
        return;
    line = strstr(text, "Max locked memory");
    if (!line)
        return;
    line += strlen("Max locked memory");
    limit = strtoull(line, &end, 10);
    if (end != line && !may_lock(root))
        values->locked_bytes = limit;
}

/* Bind a page of address space, which never gets memory, to a node that may be used. */
static int try_policy(const struct numoe_machine *machine)
{
    enum { BYTES = 4096 };
    struct numoe_memory memory = {.policy = NUMOE_MEMORY_BIND};
    uint32_t node = 0;
    void *page;
    int rc;

    while (node < machine->node_count &&
           (!machine->nodes[node].allowed || !machine->nodes[node].capacity_bytes))
        node++;
    if (node == machine->node_count || machine->nodes[node].os_index >= TOPO_MAX_NODES)
        return 0;
    memory.os_node = machine->nodes[node].os_index;
    page = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return 0;
    rc = memory_bind(&memory, page, BYTES);
    munmap(page, BYTES);
    return -rc;
}

static void read_huge(const struct numoe_machine *machine, const char *root,
                      struct health_values *values)
{
    static const char *const sizes[] = {"2048kB", "1048576kB"};

    for (uint32_t i = 0; i < machine->node_count; i++) {
        int64_t *const counts[] = {&values->nodes[i].huge_2m, &values->nodes[i].huge_1g};

        for (size_t s = 0; s < 2; s++) {
            char name[128];

            snprintf(name, sizeof name,
                     "sys/devices/system/node/node%u/hugepages/hugepages-%s/nr_hugepages",
                     machine->nodes[i].os_index, sizes[s]);
            *counts[s] = number(root, name);
            if (*counts[s] != HEALTH_NOT_KNOWN || machine->node_count > 1)
                continue;
            /* a kernel without nodes, or a container that hides them */
            snprintf(name, sizeof name, "sys/kernel/mm/hugepages/hugepages-%s/nr_hugepages",
                     sizes[s]);
            *counts[s] = number(root, name);
        }
    }
}

int health_read(const struct numoe_machine *machine, const char *root, struct health_values *values)
{
    struct topo_cgroup cgroup;

    *values = (struct health_values){.locked_bytes = UINT64_MAX, .cgroup_bytes = UINT64_MAX};
    values->nodes = calloc(machine->node_count ? machine->node_count : 1, sizeof *values->nodes);
    if (!values->nodes)
        return -ENOMEM;
    values->numa_balancing = number(root, "proc/sys/kernel/numa_balancing");
    values->zone_reclaim_mode = number(root, "proc/sys/vm/zone_reclaim_mode");
    values->max_map_count = number(root, "proc/sys/vm/max_map_count");
    values->io_uring_disabled = number(root, "proc/sys/kernel/io_uring_disabled");
    values->swappiness = number(root, "proc/sys/vm/swappiness");
    chosen(root, "sys/kernel/mm/transparent_hugepage/enabled", values->huge_pages,
           sizeof values->huge_pages);
    read_governors(machine, root, values);
    read_swap(root, values);
    read_locked(root, values);
    read_huge(machine, root, values);
    values->policy_error = *root ? 0 : try_policy(machine);
    topo_cgroup_find(root, &cgroup);
    values->cpu_quota = topo_cgroup_cpus(&cgroup);
    values->cgroup_bytes = topo_cgroup_memory_left(&cgroup);
    topo_cgroup_free(&cgroup);
    return 0;
}

void health_free(struct health_values *values)
{
    free(values->nodes);
    values->nodes = NULL;
}

/* ---- judging ---- */

static const uint64_t little_locked = (uint64_t)1 << 30, little_swap = (uint64_t)64 << 20;
enum { MAPS_BY_DEFAULT = 65530, HIGH_SWAPPINESS = 10, UNEVEN_PERCENT = 12 };

struct judge {
    const struct numoe_machine *machine;
    const struct health_values *values;
    struct numoe_warnings *warnings;
    uint32_t *scratch;         /* as many as there are nodes */
    struct numoe_warning lost; /* written to when memory has run out */
    int rc;
};

/* One warning; its fix follows the message. */
static struct numoe_warning *warn(struct judge *judge, const char *what)
{
    struct numoe_warnings *warnings = judge->warnings;
    struct numoe_warning *grown =
        realloc(warnings->list, (warnings->count + 1u) * sizeof *warnings->list);

    if (!grown) {
        judge->rc = -ENOMEM;
        return &judge->lost;
    }
    warnings->list = grown;
    grown += warnings->count++;
    memset(grown, 0, sizeof *grown);
    snprintf(grown->what, sizeof grown->what, "%s", what);
    return grown;
}

#define say(text, ...) ((void)snprintf(text, sizeof text, __VA_ARGS__))

static uint32_t nodes_with_memory(const struct numoe_machine *machine)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < machine->node_count; i++)
        count += machine->nodes[i].capacity_bytes != 0;
    return count;
}

static void judge_kernel(struct judge *judge)
{
    const struct health_values *values = judge->values;
    struct numoe_warning *w;

    if (values->numa_balancing > 0 && nodes_with_memory(judge->machine) > 1) {
        w = warn(judge, "numa_balancing");
        say(w->message, "automatic NUMA balancing is on: the kernel keeps unmapping memory to see "
                        "who uses it, and moves what is not bound to a node");
        say(w->fix, "sysctl -w kernel.numa_balancing=0");
    }
    if (values->zone_reclaim_mode > 0) {
        w = warn(judge, "zone_reclaim_mode");
        say(w->message,
            "zone_reclaim_mode is %lld: on a full node the kernel drops file cache and stalls "
            "before it uses another",
            (long long)values->zone_reclaim_mode);
        say(w->fix, "sysctl -w vm.zone_reclaim_mode=0");
    }
    if (!strcmp(values->huge_pages, "never")) {
        w = warn(judge, "transparent_hugepage");
        say(w->message, "transparent huge pages are off: weights lie on 4 KiB pages, whose "
                        "translations cost much of the bandwidth");
        say(w->fix, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
    }
    if (values->io_uring_disabled > 0) {
        w = warn(judge, "io_uring");
        say(w->message, "io_uring is disabled%s (%lld): weights are loaded with plain reads",
            values->io_uring_disabled == 1 ? " for processes without privilege" : "",
            (long long)values->io_uring_disabled);
        say(w->fix, "sysctl -w kernel.io_uring_disabled=0");
    }
    if (values->max_map_count != HEALTH_NOT_KNOWN && values->max_map_count < MAPS_BY_DEFAULT) {
        w = warn(judge, "max_map_count");
        say(w->message, "a process may have %lld mappings only, fewer than the usual %d",
            (long long)values->max_map_count, MAPS_BY_DEFAULT);
        say(w->fix, "sysctl -w vm.max_map_count=262144");
    }
    if (values->slow_cpus) {
        w = warn(judge, "governor");
        say(w->message, "the frequency governor of %u CPU%s is \"%s\" and not \"performance\"",
            values->slow_cpus, values->slow_cpus > 1 ? "s" : "", values->governor);
        say(w->fix, "cpupower frequency-set -g performance");
    }
}

static void judge_memory(struct judge *judge)
{
    const struct health_values *values = judge->values;
    struct numoe_warning *w;
    char size[32], all[32];

    if (values->swap_used_bytes > little_swap) {
        w = warn(judge, "swap");
        say(w->message,
            "%s of %s swap space are in use: memory was short, and weights that were "
            "swapped out come back page by page",
            topo_bytes(size, values->swap_used_bytes), topo_bytes(all, values->swap_bytes));
        say(w->fix, "swapoff -a (needs as much free memory)");
    }
    if (values->swap_bytes && values->swappiness > HIGH_SWAPPINESS) {
        w = warn(judge, "swappiness");
        say(w->message,
            "there is swap space and swappiness is %lld: weights that rest for a while "
            "may be swapped out for file cache",
            (long long)values->swappiness);
        say(w->fix, "sysctl -w vm.swappiness=1");
    }
    if (values->locked_bytes < little_locked) {
        w = warn(judge, "memlock");
        say(w->message,
            "a process may lock %s of memory only: pinning weights for a GPU or read "
            "buffers for the disk may be refused",
            topo_bytes(size, values->locked_bytes));
        say(w->fix, "ulimit -l unlimited (lasting: memlock in /etc/security/limits.conf, or "
                    "LimitMEMLOCK=infinity of the unit)");
    }
}

/* "node 3" or "nodes 1,3" of those in scratch. */
static const char *node_names(struct judge *judge, char *text, size_t size, size_t count)
{
    char ranges[96];

    snprintf(text, size, "node%s %s", count > 1 ? "s" : "",
             topo_sorted_ranges(ranges, sizeof ranges, judge->scratch, count));
    return text;
}

static void judge_huge(struct judge *judge, bool giant)
{
    const struct numoe_machine *machine = judge->machine;
    int64_t most = 0;
    size_t count = 0;
    char names[112];
    struct numoe_warning *w;

    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct health_node *node = &judge->values->nodes[i];
        const int64_t pages = giant ? node->huge_1g : node->huge_2m;

        if (pages > most)
            most = pages;
    }
    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct health_node *node = &judge->values->nodes[i];
        const int64_t pages = giant ? node->huge_1g : node->huge_2m;

        if (most && machine->nodes[i].pu_count && pages >= 0 && pages < most - most / 8)
            judge->scratch[count++] = machine->nodes[i].os_index;
    }
    if (!count)
        return;
    w = warn(judge, giant ? "huge_pages_1g" : "huge_pages_2m");
    node_names(judge, names, sizeof names, count);
    say(w->message,
        "huge pages of %s are reserved unevenly: %s %s fewer than the %lld of another node, and "
        "weights there may not find room in them",
        giant ? "1 GiB" : "2 MiB", names, count > 1 ? "have" : "has", (long long)most);
    say(w->fix,
        "echo %lld > /sys/devices/system/node/node%u/hugepages/hugepages-%skB/nr_hugepages%s",
        (long long)most, judge->scratch[0], giant ? "1048576" : "2048",
        count > 1 ? " (and so for the others)" : "");
}

/* Whether a node is one of those that should be alike: DRAM with CPUs around it. */
static bool is_plain(const struct numoe_machine *machine, uint32_t i)
{
    return machine->nodes[i].kind == NUMOE_NODE_DRAM && machine->nodes[i].pu_count;
}

/* Memory is spread as DIMMs are: with fewer in some channels, their nodes are slow and full. */
static void judge_dimms(struct judge *judge)
{
    const struct numoe_machine *machine = judge->machine;
    uint64_t most = 0, least = UINT64_MAX;
    size_t count = 0, orphans = 0;
    char names[112], small[32], large[32];
    struct numoe_warning *w;

    for (uint32_t i = 0; i < machine->node_count; i++)
        if (is_plain(machine, i) && machine->nodes[i].capacity_bytes > most)
            most = machine->nodes[i].capacity_bytes;
    for (uint32_t i = 0; i < machine->node_count; i++) {
        uint64_t bytes = machine->nodes[i].capacity_bytes;

        if (!is_plain(machine, i) || bytes >= most - most / 100 * UNEVEN_PERCENT)
            continue;
        least = bytes < least ? bytes : least;
        judge->scratch[count++] = machine->nodes[i].os_index;
    }
    if (count) {
        w = warn(judge, "uneven_memory");
        node_names(judge, names, sizeof names, count);
        say(w->message, "memory is spread unevenly: %s %s %s%s, others up to %s", names,
            count > 1 ? "have" : "has", count > 1 ? "as little as " : "", topo_bytes(small, least),
            topo_bytes(large, most));
        say(w->fix, "give each channel the same DIMMs; dmidecode -t memory shows where they are");
    }
    for (uint32_t i = 0; i < machine->pu_count; i++)
        orphans += machine->pus[i].allowed && !machine->pus[i].node_is_near;
    if (orphans && most) {
        w = warn(judge, "no_local_memory");
        say(w->message, "%zu CPUs have no memory of their own and read that of another node",
            orphans);
        say(w->fix, "put DIMMs into the channels of their node; dmidecode -t memory shows where "
                    "they are");
    }
}

static void judge_container(struct judge *judge)
{
    const struct numoe_machine *machine = judge->machine;
    double quota = judge->values->cpu_quota, whole = ceil(quota);
    uint32_t allowed = 0, excluded = 0;
    uint64_t total = 0;
    char size[32], all[32];
    struct numoe_warning *w;

    for (uint32_t i = 0; i < machine->pu_count; i++)
        allowed += machine->pus[i].allowed;
    for (uint32_t i = 0; i < machine->node_count; i++) {
        if (machine->nodes[i].allowed)
            total += machine->nodes[i].capacity_bytes;
        else if (machine->nodes[i].capacity_bytes && machine->nodes[i].kind != NUMOE_NODE_GPU)
            judge->scratch[excluded++] = machine->nodes[i].os_index;
    }
    if (quota > 0 && whole - quota > 1e-6 && quota < allowed) {
        w = warn(judge, "cpu_quota_fraction");
        say(w->message,
            "the container's quota of %.2f CPUs is no whole number: one worker is "
            "stopped for part of each period, and all others wait for it",
            quota);
        say(w->fix,
            "docker update --cpus %.0f CONTAINER, or systemctl set-property UNIT "
            "CPUQuota=%.0f%%",
            whole, whole * 100);
    }
    if (quota > 0 && quota < allowed) {
        w = warn(judge, "cpu_quota");
        say(w->message, "the container may use %.2f CPUs at a time of the %u it sees", quota,
            allowed);
        say(w->fix,
            "docker update --cpus %u CONTAINER, or systemctl set-property UNIT CPUQuota=", allowed);
    }
    if (allowed < machine->pu_count) {
        w = warn(judge, "cpuset");
        say(w->message, "%u of the machine's %u CPUs may be used (cpuset or affinity)", allowed,
            machine->pu_count);
        say(w->fix, "docker update --cpuset-cpus LIST CONTAINER, systemctl set-property UNIT "
                    "AllowedCPUs=, or start without taskset and numactl");
    }
    if (excluded) {
        char names[112];

        w = warn(judge, "cpuset_mems");
        node_names(judge, names, sizeof names, excluded);
        say(w->message, "the memory of %s may not be used (cpuset)", names);
        say(w->fix, "docker update --cpuset-mems LIST CONTAINER, or systemctl set-property UNIT "
                    "AllowedMemoryNodes=");
    }
    if (judge->values->policy_error && nodes_with_memory(machine) > 1) {
        w = warn(judge, "memory_policy");
        say(w->message,
            "memory cannot be bound to nodes (mbind: %s): it lies where it is touched first, and "
            "nothing keeps it there",
            strerror(judge->values->policy_error));
        say(w->fix, "docker run --cap-add SYS_NICE, or a seccomp profile that allows mbind");
    }
    if (judge->values->cgroup_bytes < total / 10 * 9) {
        w = warn(judge, "memory_limit");
        say(w->message, "the container's memory limit leaves %s of the machine's %s",
            topo_bytes(size, judge->values->cgroup_bytes), topo_bytes(all, total));
        say(w->fix, "docker update --memory SIZE --memory-swap SIZE CONTAINER, or systemctl "
                    "set-property UNIT MemoryMax=infinity");
    }
}

int health_judge(const struct numoe_machine *machine, const struct health_values *values,
                 struct numoe_warnings *warnings)
{
    struct judge judge = {.machine = machine, .values = values, .warnings = warnings};

    judge.scratch = calloc(machine->node_count ? machine->node_count : 1, sizeof *judge.scratch);
    if (!judge.scratch)
        return -ENOMEM;
    judge_kernel(&judge);
    judge_memory(&judge);
    judge_huge(&judge, false);
    judge_huge(&judge, true);
    judge_dimms(&judge);
    judge_container(&judge);
    free(judge.scratch);
    return judge.rc;
}

int numoe_machine_health(const struct numoe_machine *machine, const char *root,
                         struct numoe_warnings *warnings)
{
    struct health_values values;
    int rc = health_read(machine, root, &values);

    *warnings = (struct numoe_warnings){0};
    if (rc)
        return rc;
    rc = health_judge(machine, &values, warnings);
    if (rc)
        numoe_warnings_free(warnings);
    health_free(&values);
    return rc;
}

void numoe_warnings_free(struct numoe_warnings *warnings)
{
    free(warnings->list);
    *warnings = (struct numoe_warnings){0};
}

void numoe_warnings_print(const struct numoe_warnings *warnings, FILE *out)
{
    for (uint32_t i = 0; i < warnings->count; i++)
        fprintf(out, "warning: %s\n    fix: %s\n", warnings->list[i].message,
                warnings->list[i].fix);
}
