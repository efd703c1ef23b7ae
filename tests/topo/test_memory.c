/* Memory on a node, limits of the system, pinning. */
#include "memory_node.h"
#include "topo/topo_fixture.h"
#include "topo_system.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <numaif.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MIB = 1 << 20 };

static void count_message(void *user, enum numoe_log_level level, const char *message)
{
    cr_assert_eq(level, NUMOE_LOG_WARNING);
    cr_assert(strstr(message, "denied"), "%s", message);
    ++*(int *)user;
}

static uint32_t first_node(void)
{
    struct numoe_machine *machine = machine_of("live");
    uint32_t os = NUMOE_NONE;

    for (uint32_t i = 0; i < machine->node_count && os == NUMOE_NONE; i++)
        if (machine->nodes[i].allowed && machine->nodes[i].free_bytes > 512ull * MIB)
            os = machine->nodes[i].os_index;
    numoe_machine_free(machine);
    return os;
}

static int create(uint32_t os_node, uint64_t bytes, bool strict, const struct numoe_log *log,
                  struct numoe_memory **memory, struct numoe_error *error)
{
    struct numoe_memory_request request = NUMOE_MEMORY_REQUEST_INIT;

    request.os_node = os_node;
    request.bytes = bytes;
    request.strict = strict;
    request.log = log;
    return numoe_memory_create(&request, memory, error);
}

Test(memory_node, bound_resident_and_verified)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_memory_report report;
    struct numoe_memory *memory = NULL;
    uint64_t bytes = 100ull * MIB + 12345;
    uint32_t node = first_node();
    unsigned char *data;

    cr_assert_eq(create(node, bytes, false, NULL, &memory, &error), 0, "%s", error.message);
    data = numoe_memory_address(memory);
    cr_assert_eq((uintptr_t)data % (2 * MIB), 0);
    cr_assert_eq(numoe_memory_bytes(memory), bytes);
    cr_assert_eq(numoe_memory_populate(memory, 0, bytes, &error), 0, "%s", error.message);
    numoe_memory_inspect(memory, &report);
    cr_assert_eq(report.bytes, bytes);
    cr_assert_eq(report.bound, report.bind_errno == 0);
    if (report.bound)
        cr_assert_eq(report.placed_bytes, report.checked_bytes);
    cr_assert(report.huge_bytes <= 102ull * MIB);
    data[0] = 1;
    data[bytes - 1] = 2;
    /* again, over what is there: nothing is lost */
    cr_assert_eq(numoe_memory_populate(memory, 0, bytes, &error), 0);
    cr_assert_eq(data[0] + data[bytes - 1], 3);
    for (uint64_t i = 1; i < 4096; i++)
        cr_assert_eq(data[i], 0);
    numoe_memory_destroy(memory);
}

Test(memory_node, nothing_is_resident_before_populate)
{
    struct numoe_memory_report report;
    struct numoe_memory *memory;

    cr_assert_eq(create(NUMOE_NONE, 64 * MIB, true, NULL, &memory, NULL), 0);
    if (memory->pooled_bytes)
        cr_skip_test("the pool of huge pages is not empty here");
    numoe_memory_inspect(memory, &report);
    cr_assert_eq(report.checked_bytes, 0);
    cr_assert_eq(report.huge_bytes, 0);
    cr_assert(!report.bound);
    cr_assert_eq(numoe_memory_populate(memory, 8 * MIB, 4 * MIB, NULL), 0);
    numoe_memory_inspect(memory, &report);
    if (report.checked_bytes)
        cr_assert(report.checked_bytes >= 1 * MIB / 4 && report.placed_bytes > 0);
    numoe_memory_destroy(memory);
}

/* On one node every policy puts pages where they are wanted; the kernel must take each. */
Test(memory_node, every_policy_is_taken_and_shown)
{
    const uint32_t node = first_node();

    for (int policy = NUMOE_MEMORY_BIND; policy <= NUMOE_MEMORY_INTERLEAVE; policy++)
        for (int listed = 0; listed < 2; listed++) {
            struct numoe_memory_request request = NUMOE_MEMORY_REQUEST_INIT;
            struct numoe_error error = NUMOE_ERROR_INIT;
            struct numoe_memory_report report;
            struct numoe_memory *memory;

            request.os_node = node;
            request.bytes = 10 * MIB + 5;
            request.policy = (enum numoe_memory_policy)policy;
            request.nodes = listed ? &node : NULL;
            request.node_count = (uint32_t)listed;
            cr_assert_eq(numoe_memory_create(&request, &memory, &error), 0, "%s", error.message);
            cr_assert_eq(numoe_memory_populate(memory, 0, request.bytes, &error), 0, "%s",
                         error.message);
            memset(numoe_memory_address(memory), 1, request.bytes);
            numoe_memory_inspect(memory, &report);
            if (report.bind_errno)
                cr_skip_test("memory policies are denied here");
            cr_expect(report.bound, "policy %d", policy);
            cr_expect_gt(report.checked_bytes, 0);
            if (policy != NUMOE_MEMORY_LOCAL || memory->single_node)
                cr_expect_eq(report.placed_bytes, report.checked_bytes, "policy %d", policy);
            cr_expect_eq(report.spilled_bytes, 0);
            numoe_memory_destroy(memory);
        }
}

/* What is neither on the node nor elsewhere cannot be spilled. */
Test(memory_node, spilling_ends_with_the_machine)
{
    struct numoe_memory_request request = NUMOE_MEMORY_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_memory_report report;
    struct numoe_memory *memory;

    request.os_node = first_node();
    request.bytes = 4 * MIB;
    request.spill = true;
    cr_assert_eq(numoe_memory_create(&request, &memory, &error), 0, "%s", error.message);
    if (memory->pooled_bytes)
        cr_skip_test("the pool of huge pages is not empty here");
    atomic_store(&memory->pending, (uint64_t)1 << 50);
    atomic_store(memory->together, (uint64_t)1 << 50);
    cr_expect_eq(numoe_memory_populate(memory, 0, 4 * MIB, &error), -ENOMEM);
    numoe_memory_inspect(memory, &report);
    cr_expect_eq(report.spilled_bytes, 0);
    atomic_store(&memory->pending, 0);
    atomic_store(memory->together, 0);
    cr_expect_eq(numoe_memory_populate(memory, 0, 4 * MIB, &error), 0, "%s", error.message);
    numoe_memory_destroy(memory);
    request.bytes = (uint64_t)1 << 42;
    cr_expect_eq(numoe_memory_create(&request, &memory, &error), -ENOMEM);
    cr_expect(strstr(error.message, "the machine has"), "%s", error.message);
}

Test(memory_node, bad_ranges_and_nodes_are_refused)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_memory *memory = NULL;

    cr_assert_eq(create(NUMOE_NONE, 0, false, NULL, &memory, &error), -EINVAL);
    cr_assert_eq(create(1024, MIB, false, NULL, &memory, &error), -EINVAL);
    cr_assert_str_eq(error.where, "node 1024");
    cr_assert_eq(create(NUMOE_NONE, UINT64_MAX, false, NULL, &memory, &error), -ENOMEM);
    cr_assert_eq(create(NUMOE_NONE, 1ull << 46, false, NULL, &memory, &error), -ENOMEM);
    cr_assert(error.message[0]);
    cr_assert_null(memory);
    cr_assert_eq(create(NUMOE_NONE, 100, false, NULL, &memory, NULL), 0);
    cr_assert_eq(numoe_memory_populate(memory, 50, 51, &error), -EINVAL);
    cr_assert_eq(numoe_memory_populate(memory, UINT64_MAX, 2, &error), -EINVAL);
    cr_assert_eq(numoe_memory_populate(memory, 100, 0, &error), 0);
    numoe_memory_destroy(memory);
    numoe_memory_destroy(NULL);
}

Test(memory_node, more_than_the_node_has_is_an_error_with_numbers)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine = machine_of("live");
    struct numoe_memory *memory = NULL;
    uint32_t node = machine->nodes[0].os_index;
    uint64_t bytes = machine->nodes[0].capacity_bytes * 2;

    cr_assert_eq(create(node, bytes, false, NULL, &memory, &error), -ENOMEM);
    cr_assert(strstr(error.message, "needed on node"), "%s", error.message);
    numoe_machine_free(machine);
}

/* A node that does not exist stands for one that is not allowed: both are EINVAL. */
Test(memory_node, a_denied_binding_goes_on_unbound_and_says_so_once)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_memory_report report;
    struct numoe_memory *memory;
    int messages = 0;
    struct numoe_log log = {count_message, &messages};

    if (access("/sys/devices/system/node/node1000", F_OK) == 0)
        cr_skip_test("there is a node 1000");
    cr_assert_eq(create(1000, 4 * MIB, false, &log, &memory, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_memory_populate(memory, 0, 4 * MIB, &error), 0, "%s", error.message);
    cr_assert_eq(messages, 1);
    numoe_memory_inspect(memory, &report);
    cr_assert(!report.bound);
    cr_assert(report.bind_errno != 0);
    cr_assert_eq(report.placed_bytes, 0);
    numoe_memory_destroy(memory);
    memory = NULL;
    cr_assert(create(1000, 4 * MIB, true, &log, &memory, &error) < 0);
    cr_assert(strstr(error.message, "strict"));
    cr_assert_null(memory);
    cr_assert_eq(messages, 1);
}

/* Let a system call fail from now on in this process, as containers do; advice: only for madvise
 * with that advice, or -1. */
static void deny(int call, int error, int advice)
{
    struct sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | (advice < 0 ? BPF_JGE : BPF_JEQ) | BPF_K,
                 advice < 0 ? 0u : (unsigned)advice, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof program / sizeof program[0], program};

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter))
        cr_skip_test("no seccomp filters here");
}

/* A container or a kernel without NUMA: everything still works, unbound and said so. */
static void run_denied(int error_number)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine;
    struct numoe_memory_report report;
    struct numoe_memory *memory;
    uint32_t node = first_node();
    int messages = 0;
    struct numoe_log log = {count_message, &messages};

    deny(SYS_mbind, error_number, -1);
    deny(SYS_get_mempolicy, error_number, -1);
    deny(SYS_set_mempolicy, error_number, -1);
    deny(SYS_move_pages, error_number, -1);
    machine = machine_of("live");
    check_machine(machine);
    cr_assert(machine->nodes[0].pu_count > 0);
    numoe_machine_free(machine);
    cr_assert_eq(create(node, 10 * MIB, false, &log, &memory, &error), 0, "%s", error.message);
    cr_assert_eq(messages, 1);
    cr_assert_eq(numoe_memory_populate(memory, 0, 10 * MIB, &error), 0, "%s", error.message);
    numoe_memory_inspect(memory, &report);
    cr_assert(!report.bound);
    cr_assert_eq(report.bind_errno, error_number);
    cr_assert_eq(report.checked_bytes, 0);
    numoe_memory_destroy(memory);
    cr_assert_eq(create(node, 10 * MIB, true, &log, &memory, &error), -error_number);
    cr_assert_eq(messages, 1);
}

Test(memory_node, binding_forbidden_by_a_container)
{
    run_denied(EPERM);
}

Test(memory_node, a_kernel_without_numa)
{
    run_denied(ENOSYS);
}

Test(memory_node, an_old_kernel_touches_page_by_page)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_memory *memory;
    static unsigned char resident[20 * MIB / 4096];
    unsigned char *data;

    deny(SYS_madvise, EINVAL, 23);
    cr_assert_eq(create(NUMOE_NONE, 20 * MIB, false, NULL, &memory, NULL), 0);
    data = numoe_memory_address(memory);
    data[4096] = 77;
    cr_assert_eq(numoe_memory_populate(memory, 0, 20 * MIB, &error), 0, "%s", error.message);
    cr_assert_eq(data[4096], 77);
    cr_assert_eq(mincore(data, 20 * MIB, resident), 0);
    for (size_t i = 0; i < sizeof resident; i++)
        cr_assert(resident[i] & 1);
    numoe_memory_destroy(memory);
}

static void write_number(const char *directory, const char *name, uint64_t number)
{
    char path[96];
    FILE *file;

    snprintf(path, sizeof path, "%s/%s", directory, name);
    file = fopen(path, "w");
    cr_assert_not_null(file);
    fprintf(file, "%llu\n", (unsigned long long)number);
    fclose(file);
}

/* Ranges of several nodes are populated at once, and share what the cgroup leaves. */
Test(memory_node, ranges_beside_each_other_share_a_limit)
{
    char directory[] = "/tmp/numoe-cgroup-XXXXXX", path[64];
    struct numoe_memory *memory[3];
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_assert(mkdtemp(directory));
    write_number(directory, "memory.max", 100 * MIB);
    write_number(directory, "memory.current", 0);
    for (int m = 0; m < 3; m++) {
        struct numoe_memory_request request = NUMOE_MEMORY_REQUEST_INIT;

        request.bytes = 8 * MIB;
        request.beside = m ? memory[m - 1] : NULL;
        cr_assert_eq(numoe_memory_create(&request, &memory[m], &error), 0, "%s", error.message);
        topo_cgroup_free(&memory[m]->cgroup);
        memory[m]->cgroup.memory[0] = strdup(directory);
        memory[m]->cgroup.memory_v2[0] = true;
        memory[m]->cgroup.memory_count = 1;
        cr_assert_eq(memory[m]->together, &memory[0]->of_all);
    }
    /* as if threads were about to take 61 MiB of the first */
    atomic_fetch_add(memory[0]->together, 61 * MIB);
    cr_assert_eq(numoe_memory_populate(memory[2], 0, 8 * MIB, &error), -ENOMEM);
    cr_assert(strstr(error.message, "cgroup"), "%s", error.message);
    cr_assert_eq(atomic_load(memory[0]->together), 61 * MIB);
    atomic_fetch_sub(memory[0]->together, 1 * MIB);
    cr_assert_eq(numoe_memory_populate(memory[2], 0, 8 * MIB, &error), 0, "%s", error.message);
    atomic_fetch_sub(memory[0]->together, 60 * MIB);
    cr_assert_eq(atomic_load(memory[0]->together), 0);
    for (int m = 3; m-- > 0;)
        numoe_memory_destroy(memory[m]);
    snprintf(path, sizeof path, "%s/memory.max", directory);
    unlink(path);
    snprintf(path, sizeof path, "%s/memory.current", directory);
    unlink(path);
    rmdir(directory);
}

/* The check before a chunk, seen through a cgroup directory of our own. */
Test(memory_node, a_full_cgroup_is_an_error_and_not_a_kill)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    char directory[] = "/tmp/numoe-cgroup-XXXXXX", path[64];
    struct numoe_memory *memory;
    FILE *file;

    cr_assert(mkdtemp(directory));
    cr_assert_eq(create(NUMOE_NONE, 256ull * MIB, false, NULL, &memory, NULL), 0);
    topo_cgroup_free(&memory->cgroup);
    memory->cgroup.memory[0] = strdup(directory);
    memory->cgroup.memory_v2[0] = true;
    memory->cgroup.memory_count = 1;
    snprintf(path, sizeof path, "%s/memory.max", directory);
    file = fopen(path, "w");
    fprintf(file, "%d\n", 100 * MIB);
    fclose(file);
    /* one chunk of 64 MiB and the margin fit; one of 128 MiB in two threads would not */
    cr_assert_eq(numoe_memory_populate(memory, 0, 64 * MIB, &error), 0, "%s", error.message);
    snprintf(path, sizeof path, "%s/memory.current", directory);
    file = fopen(path, "w");
    fprintf(file, "%d\n", 64 * MIB);
    fclose(file);
    cr_assert_eq(numoe_memory_populate(memory, 0, 64 * MIB, &error), 0, "already resident");
    cr_assert_eq(numoe_memory_populate(memory, 64 * MIB, 64 * MIB, &error), -ENOMEM);
    cr_assert(strstr(error.message, "cgroup"), "%s", error.message);
    cr_assert_eq(atomic_load(&memory->pending), 0);
    unlink(path);
    snprintf(path, sizeof path, "%s/memory.max", directory);
    unlink(path);
    rmdir(directory);
    numoe_memory_destroy(memory);
}

Test(memory_node, a_thread_may_prefer_a_node)
{
    unsigned long mask[16] = {0};
    uint32_t node = first_node();
    int mode = -1, rc = numoe_memory_prefer(node);

    cr_assert_eq(numoe_memory_prefer(1024), -EINVAL);
    cr_assert_eq(numoe_memory_prefer(1000), rc == -ENOSYS ? rc : -EINVAL);
    if (rc)
        cr_skip_test("no policy can be set here: %s", strerror(-rc));
    cr_assert_eq(get_mempolicy(&mode, mask, 1024, NULL, 0), 0);
    cr_assert_eq(mode, MPOL_PREFERRED);
    cr_assert(mask[node / 64] >> node % 64 & 1);
}

Test(memory_node, room_is_less_than_there_is)
{
    struct topo_node_memory system;
    uint64_t room = numoe_memory_room();

    if (topo_system_memory("", &system))
        cr_assert_lt(room, system.total_bytes);
    cr_assert_gt(room, 64ull * MIB);
}

struct populate_job {
    struct numoe_memory *memory;
    uint64_t offset, bytes;
    int rc;
};

static void *populate_thread(void *user)
{
    struct populate_job *job = user;

    job->rc = numoe_memory_populate(job->memory, job->offset, job->bytes, NULL);
    return NULL;
}

Test(memory_node, several_threads_populate_at_once)
{
    enum { THREADS = 4 };
    struct populate_job jobs[THREADS];
    pthread_t threads[THREADS];
    struct numoe_memory *memory;
    unsigned char resident[200 * MIB / 4096];

    cr_assert_eq(create(first_node(), 200ull * MIB, false, NULL, &memory, NULL), 0);
    for (int i = 0; i < THREADS; i++) {
        jobs[i] = (struct populate_job){memory, (uint64_t)i * 50 * MIB, 50 * MIB, -1};
        cr_assert_eq(pthread_create(&threads[i], NULL, populate_thread, &jobs[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        cr_assert_eq(jobs[i].rc, 0);
    }
    cr_assert_eq(mincore(numoe_memory_address(memory), 200ull * MIB, resident), 0);
    for (size_t i = 0; i < sizeof resident; i++)
        cr_assert(resident[i] & 1);
    numoe_memory_destroy(memory);
}

/* ---- what the system says ------------------------------------------------------------------- */

static char root[64];

static void put(const char *name, const char *text)
{
    char path[512];
    FILE *file;

    snprintf(path, sizeof path, "%s%s", root, name);
    for (char *at = strchr(path + strlen(root) + 1, '/'); at; at = strchr(at + 1, '/')) {
        *at = 0;
        mkdir(path, 0700);
        *at = '/';
    }
    file = fopen(path, "w");
    cr_assert(file, "%s", path);
    fputs(text, file);
    fclose(file);
}

static void make_root(void)
{
    strcpy(root, "/tmp/numoe-root-XXXXXX");
    cr_assert(mkdtemp(root));
}

static void remove_root(void)
{
    char command[128];

    snprintf(command, sizeof command, "rm -rf '%s'", root);
    cr_assert_eq(system(command), 0);
}

TestSuite(topo_system, .init = make_root, .fini = remove_root);

Test(topo_system, node_memory_counts_cache_as_free)
{
    struct topo_node_memory memory;

    put("/sys/devices/system/node/node7/meminfo",
        "Node 7 MemTotal:        1000 kB\nNode 7 MemFree:          100 kB\n"
        "Node 7 Active(file):      20 kB\nNode 7 Inactive(file):    30 kB\n"
        "Node 7 SReclaimable:       5 kB\n");
    put("/sys/devices/system/node/node7/hugepages/hugepages-2048kB/free_hugepages", "42\n");
    put("/sys/devices/system/node/has_memory", "7\n");
    cr_assert(topo_system_node(root, 7, &memory));
    cr_assert_eq(memory.total_bytes, 1000 * 1024);
    cr_assert_eq(memory.free_bytes, 155 * 1024);
    cr_assert_eq(memory.huge_2m_free, 42);
    cr_assert(!topo_system_node(root, 8, &memory));
    cr_assert(topo_system_single_node(root));
    put("/sys/devices/system/node/has_memory", "0-3\n");
    cr_assert(!topo_system_single_node(root));
    put("/sys/devices/system/node/has_memory", "0,8\n");
    cr_assert(!topo_system_single_node(root));
}

Test(topo_system, nothing_to_be_seen_is_no_limit)
{
    struct topo_cgroup cgroup;
    struct topo_node_memory memory;

    topo_cgroup_find(root, &cgroup);
    cr_assert_eq(topo_cgroup_memory_left(&cgroup), UINT64_MAX);
    cr_assert_eq(topo_cgroup_cpus(&cgroup), 0);
    cr_assert(!topo_system_memory(root, &memory));
    topo_cgroup_free(&cgroup);
}

Test(topo_system, version_2_takes_the_least_of_all_parents)
{
    struct topo_cgroup cgroup;

    put("/proc/self/cgroup", "0::/outer/inner\n");
    put("/proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    put("/sys/fs/cgroup/outer/memory.max", "1000000\n");
    put("/sys/fs/cgroup/outer/memory.current", "600000\n");
    put("/sys/fs/cgroup/outer/memory.stat",
        "anon 1\nfile 5\ninactive_file 100000\nactive_file 50000\nslab_reclaimable 1000\n");
    put("/sys/fs/cgroup/outer/inner/memory.max", "max\n");
    put("/sys/fs/cgroup/outer/inner/memory.current", "500000\n");
    put("/sys/fs/cgroup/outer/cpu.max", "150000 100000\n");
    put("/sys/fs/cgroup/outer/inner/cpu.max", "max 100000\n");
    topo_cgroup_find(root, &cgroup);
    cr_assert_eq(cgroup.memory_count, 3);
    cr_assert_eq(topo_cgroup_memory_left(&cgroup), 1000000 - 600000 + 151000);
    cr_assert_float_eq(topo_cgroup_cpus(&cgroup), 1.5, 1e-9);
    put("/sys/fs/cgroup/outer/inner/memory.high", "700000\n");
    cr_assert_eq(topo_cgroup_memory_left(&cgroup), 200000);
    topo_cgroup_free(&cgroup);
}

Test(topo_system, version_1_with_a_path_above_the_mount)
{
    struct topo_cgroup cgroup;

    put("/proc/self/cgroup", "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n");
    put("/proc/self/mountinfo",
        "40 30 0:30 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        "41 30 0:31 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000\n");
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "500000\n");
    put("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file 7\ntotal_active_file 3\n");
    put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "250000\n");
    put("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    topo_cgroup_find(root, &cgroup);
    cr_assert_eq(topo_cgroup_memory_left(&cgroup), 1500010);
    cr_assert_float_eq(topo_cgroup_cpus(&cgroup), 2.5, 1e-9);
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
    cr_assert_eq(topo_cgroup_memory_left(&cgroup), UINT64_MAX);
    cr_assert_eq(topo_cgroup_cpus(&cgroup), 0);
    topo_cgroup_free(&cgroup);
}

Test(topo_system, damaged_files_are_not_known)
{
    struct topo_cgroup cgroup;
    struct topo_node_memory memory;

    put("/proc/self/cgroup", "::::\n\n0\nx:memory\n4:memory:/../../etc\n");
    put("/proc/self/mountinfo",
        " - \n - cgroup2\n1 2 3 4 5 - cgroup2\n1 2 3 / /m - cgroup c memory\n");
    put("/m/memory.limit_in_bytes", "many\n");
    topo_cgroup_find(root, &cgroup);
    cr_assert_eq(topo_cgroup_memory_left(&cgroup), UINT64_MAX);
    topo_cgroup_free(&cgroup);
    put("/sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: lots\nNode 0 MemFree:");
    cr_assert(!topo_system_node(root, 0, &memory));
}
