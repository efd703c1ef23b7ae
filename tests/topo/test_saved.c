/* Saved machines and captured ones: what comes back, and what is refused. */
#include "support/damage.h"
#include "support/tree.h"
#include "topo/topo_fixture.h"

#include <dirent.h>
#include <errno.h>
#include <unistd.h>

static char directory[] = "/tmp/numoe-saved-XXXXXX";

static void enter(void)
{
    cr_assert_not_null(mkdtemp(directory));
}

static void leave(void)
{
    char command[64];

    snprintf(command, sizeof command, "rm -rf %s", directory);
    cr_assert_eq(system(command), 0);
}

TestSuite(topo_saved, .init = enter, .fini = leave, .timeout = 60);
TestSuite(topo_capture, .init = enter, .fini = leave, .timeout = 60);

/* A name in the test's own directory, to free. */
static char *path_of(const char *name)
{
    char *path;

    cr_assert_geq(asprintf(&path, "%s/%s", directory, name), 0);
    return path;
}

static char *read_file(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "r");
    char *text;
    long size;

    cr_assert_not_null(file, "%s", path);
    fseek(file, 0, SEEK_END);
    size = ftell(file);
    rewind(file);
    text = calloc(1, (size_t)size + 1);
    cr_assert_eq(fread(text, 1, (size_t)size, file), (size_t)size);
    fclose(file);
    if (bytes)
        *bytes = (size_t)size;
    return text;
}

static void write_file(const char *path, const char *text, size_t bytes)
{
    FILE *file = fopen(path, "w");

    cr_assert_not_null(file);
    cr_assert_eq(fwrite(text, 1, bytes, file), bytes);
    fclose(file);
}

static void save(const struct numoe_machine *machine, const char *path)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_assert_eq(numoe_machine_save(machine, path, &error), 0, "%s", error.message);
}

static bool same_text(const char *a, const char *b)
{
    return a == b || (a && b && !strcmp(a, b));
}

/* Save, load, save: equal machines, equal bytes. */
static void check_round_trip(const struct numoe_machine *machine)
{
    char *once = path_of("once"), *twice = path_of("twice"), *a, *b;
    struct numoe_machine *loaded, *again;

    save(machine, once);
    loaded = machine_of(once);
    check_machine(loaded);
    check_same_machine(machine, loaded);
    cr_assert_not(loaded->live);
    cr_assert_str_eq(loaded->source, once);
    cr_assert_str_eq(loaded->saved_source, machine->source);
    cr_assert_eq(loaded->saved_live, machine->live);
    save(loaded, twice);
    again = machine_of(twice);
    check_same_machine(loaded, again);
    cr_assert(same_text(loaded->saved_source, again->saved_source));
    a = read_file(once, NULL);
    b = read_file(twice, NULL);
    cr_assert_str_eq(a, b);
    free(a);
    free(b);
    numoe_machine_free(loaded);
    numoe_machine_free(again);
    free(once);
    free(twice);
}

/* As numoe topo --measure leaves it. */
static void calibrate(struct numoe_machine *machine)
{
    machine->pairs =
        calloc((size_t)machine->domain_count * machine->node_count, sizeof *machine->pairs);
    machine->together_mbs = calloc(machine->node_count, sizeof *machine->together_mbs);
    for (uint32_t d = 0; d < machine->domain_count; d++)
        for (uint32_t n = 0; n < machine->node_count; n++)
            machine->pairs[machine->pair_count++] =
                (struct numoe_pair_speed){d, n, 10000 + 100 * d + n, 81.5 + d / 3.0};
    for (uint32_t n = 0; n < machine->node_count; n++)
        machine->together_mbs[n] = 9000 + n;
}

Test(topo_saved, live_machine_comes_back)
{
    struct numoe_machine *machine = machine_of(NULL);

    check_round_trip(machine);
    numoe_machine_free(machine);
}

Test(topo_saved, synthetic_machines_come_back)
{
    static const char *const sources[] = {
        "core:1 pu:1", "pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2",
        "pack:4 [numa(memory=64GB)] l3:2 core:8 pu:2", "numa:64(memory=8GB) core:2 pu:1"};

    for (size_t i = 0; i < sizeof sources / sizeof sources[0]; i++) {
        struct numoe_machine *machine = machine_of(sources[i]);

        check_round_trip(machine);
        calibrate(machine);
        check_round_trip(machine);
        numoe_machine_free(machine);
    }
}

/* Fixtures always, recorded machines where they are. */
static uint32_t round_trips(const char *from)
{
    DIR *list = opendir(from);
    uint32_t count = 0;
    struct dirent *entry;

    while (list && (entry = readdir(list))) {
        size_t length = strlen(entry->d_name);
        struct numoe_machine *machine;
        char path[1024];

        if (length < 4 || strcmp(entry->d_name + length - 4, ".xml"))
            continue;
        snprintf(path, sizeof path, "%s/%s", from, entry->d_name);
        machine = machine_of(path);
        check_round_trip(machine);
        numoe_machine_free(machine);
        count++;
    }
    if (list)
        closedir(list);
    return count;
}

Test(topo_saved, machines_of_xml_come_back, .timeout = 240)
{
    cr_assert_geq(round_trips(DATA), 8);
    round_trips(NUMOE_RECORDED_TOPOLOGIES);
}

Test(topo_saved, limits_and_odd_texts_come_back)
{
    struct numoe_machine *machine = machine_of("numa:2(memory=8GB) core:2 pu:1");

    machine->cgroup_bytes = 123456789;
    machine->cpu_quota = 1.1;
    machine->nodes[1].free_bytes = 17;
    machine->nodes[1].huge_2m_free = 3;
    strcpy(machine->cpu_model, "quotes \" and \\ in a name");
    machine->notes = realloc(machine->notes, (machine->note_count + 1) * sizeof(char *));
    machine->notes[machine->note_count++] = strdup("a \"note\" with 100 % of \\");
    check_round_trip(machine);
    numoe_machine_free(machine);
}

Test(topo_saved, plan_is_that_of_the_original)
{
    struct numoe_machine *machine = machine_of("pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    char *path = path_of("box.json"), *a, *b;
    struct numoe_machine *loaded;
    struct numoe_plan *first, *second;

    save(machine, path);
    loaded = machine_of(path);
    request.shape = v4_flash;
    first = plan_of(machine, &request);
    second = plan_of(loaded, &request);
    check_plan(loaded, second);
    free(second->source);
    second->source = strdup(first->source);
    a = text_of(numoe_plan_print_json(first, out));
    b = text_of(numoe_plan_print_json(second, out));
    cr_assert_str_eq(a, b);
    free(a);
    free(b);
    numoe_plan_free(first);
    numoe_plan_free(second);
    numoe_machine_free(machine);
    numoe_machine_free(loaded);
    free(path);
}

Test(topo_saved, memory_limit_of_the_saved_box_holds)
{
    struct numoe_machine *machine = machine_of("numa:2(memory=200GB) core:8 pu:1"), *loaded;
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan = NULL;
    char *path = path_of("container.json");

    machine->live = true;
    machine->cgroup_bytes = (uint64_t)64 << 30;
    machine->cpu_quota = 6;
    save(machine, path);
    loaded = machine_of(path);
    request.shape = v4_flash;
    cr_assert_eq(numoe_plan_create(loaded, &request, &plan, &error), -ENOSPC);
    cr_assert_not_null(strstr(error.message, "cgroup"), "%s", error.message);
    loaded->cgroup_bytes = UINT64_MAX;
    plan = plan_of(loaded, &request);
    cr_assert_eq(plan->worker_count, 6);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
    numoe_machine_free(loaded);
    free(path);
}

Test(topo_saved, unwritable_places_are_errors)
{
    struct numoe_machine *machine = machine_of("core:2 pu:1");
    struct numoe_error error = NUMOE_ERROR_INIT;
    char *path = path_of("absent/box.json");
    DIR *list;
    int entries = 0;

    cr_assert_eq(numoe_machine_save(machine, path, &error), -ENOENT);
    cr_assert_str_eq(error.where, path);
    cr_assert_eq(numoe_machine_save(machine, directory, &error), -EISDIR);
    cr_assert_eq(numoe_machine_save(machine, "", &error), -EINVAL);
    cr_assert_eq(numoe_machine_save(machine, "/dev/full", &error), -ENOSPC);
    list = opendir(directory);
    while (readdir(list))
        entries++;
    closedir(list);
    cr_assert_eq(entries, 2, "something was left behind");
    numoe_machine_free(machine);
    free(path);
}

/* ---- refusals ---- */

static char *replaced(const char *text, const char *from, const char *to)
{
    const char *at = strstr(text, from);
    char *made;

    cr_assert_not_null(at, "no %s in the file", from);
    cr_assert_geq(asprintf(&made, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from)), 0);
    return made;
}

static int load_text(const char *path, const char *text, size_t bytes, struct numoe_error *error)
{
    struct numoe_machine *machine = NULL;
    int rc;

    write_file(path, text, bytes);
    *error = (struct numoe_error)NUMOE_ERROR_INIT;
    rc = numoe_machine_load(path, &machine, error);
    if (rc)
        cr_assert(*error->message && error->code == rc, "no words for %d", rc);
    else
        check_machine(machine);
    numoe_machine_free(machine);
    return rc;
}

Test(topo_saved, contradictions_are_refused)
{
    static const struct {
        const char *from, *to, *word;
    } edits[] = {
        {"\"numoe_machine\": 1", "\"numoe_machine\": 2", "version 2"},
        {"\"numoe_machine\": 1", "\"numoe_machine\": \"1\"", "not a saved machine"},
        {"\"numoe_machine\": 1,", "", "not a saved machine"},
        {"\"os_index\":1,", "\"os_index\":0,", "twice"},
        {"\"os_index\":1,", "\"os_index\":1024,", "range"},
        {"\"os_index\":1,", "\"os_index\":-1,", "range"},
        {"\"os_index\":1,", "\"os_index\":1.5,", "whole"},
        {"\"kind\":\"DRAM\"", "\"kind\":\"DROM\"", "kind"},
        {"\"allowed\":true", "\"allowed\":false", "may not be used"},
        {"\"allowed\":true", "\"allowed\":1", "neither true"},
        {"\"domain\":1", "\"domain\":2", "range"},
        {"\"domain\":0", "\"domain\":1", "order"},
        {"\"package\":0", "\"package\":7", "range"},
        {"\"beside\":null", "\"beside\":9", "range"},
        {"\"pu_count\":4", "\"pu_count\":3", "number of its allowed CPUs"},
        {"\"core_count\":2,", "\"core_count\":1,", "number of its cores"},
        {"\"capacity_bytes\":", "\"capacity_bytes\":299999999", "nodes[0]"},
        {"\"free_bytes\":", "\"free_bytes\":9", "nodes[0].free_bytes"},
        {"\"core\":1", "\"core\":3", "order"},
        {"\"core\":1", "\"core\":4294967297", "range"},
        {"\"smt\":1", "\"smt\":0", "place in its core"},
        {"\"node\":1", "\"node\":2", "range"},
        {"\"node\":1", "\"node\":0", "not its node's"},
        {"\"node\":1", "\"node\":null", "without a node"},
        {"\"l3\":0", "\"l3\":1", "order"},
        {"\"efficiency\":0", "\"efficiency\":4294967296", "range"},
        {"\"domain_count\": 2", "\"domain_count\": 3", "domain"},
        {"\"domain_count\": 2", "\"domain_count\": 0", "is 0"},
        {"\"core_count\": 4", "\"core_count\": 5", "core"},
        {"\"distances\": null", "\"distances\": [10,20,20]", "items"},
        {"\"distances\": null", "\"distances\": [10,20,20,11]", "distance"},
        {"\"distances\": null", "\"distances\": [10,-1,20,10]", "distance"},
        {"\"cgroup_bytes\": null", "\"cgroup_bytes\": -1", "range"},
        {"\"cpu_quota\": null", "\"cpu_quota\": -0.5", "range"},
        {"\"notes\": []", "\"notes\": [1]", "notes"},
        {"\"pairs\":[{\"domain\":0,\"node\":0", "\"pairs\":[{\"domain\":0,\"node\":1", "twice"},
        {"\"pairs\":[{\"domain\":0", "\"pairs\":[{\"domain\":2", "range"},
        {"\"latency_ns\":81.5", "\"latency_ns\":1e10", "range"},
        {"\"together_mbs\":[9000,", "\"together_mbs\":[", "items"},
        {"\"together_mbs\":[9000,", "\"together_mbs\":[-9,", "range"},
        {"\"devices\": []",
         "\"devices\": [{\"name\":\"a name that is longer than thirty-one characters\"}]", "long"},
        {"\"devices\": []",
         "\"devices\": [{\"name\":\"gpu\",\"gpu\":true,\"locality_known\":true,\"package\":null,"
         "\"link_gbs\":25.0,\"memory_bytes\":0,\"nodes\":[1,1]}]",
         "ascending"},
        {"\"devices\": []",
         "\"devices\": [{\"name\":\"gpu\",\"gpu\":true,\"locality_known\":true,\"package\":null,"
         "\"link_gbs\":25.0,\"memory_bytes\":0,\"nodes\":[2]}]",
         "ascending"},
    };
    struct numoe_machine *machine = machine_of("pack:2 [numa(memory=8GB)] l3:1 core:2 pu:2");
    char *path = path_of("box.json"), *bad = path_of("bad.json"), *text;
    struct numoe_error error;
    size_t bytes;

    calibrate(machine);
    free(machine->distances);
    machine->distances = NULL;
    save(machine, path);
    text = read_file(path, &bytes);
    cr_assert_eq(load_text(bad, text, bytes, &error), 0, "%s", error.message);
    for (size_t i = 0; i < sizeof edits / sizeof edits[0]; i++) {
        char *edited = replaced(text, edits[i].from, edits[i].to);
        int rc = load_text(bad, edited, strlen(edited), &error);

        cr_expect_eq(rc, -EINVAL, "%s -> %s: %d", edits[i].from, edits[i].to, rc);
        cr_expect_not_null(strstr(error.message, edits[i].word), "%s -> %s: %s", edits[i].from,
                           edits[i].to, error.message);
        cr_expect_str_eq(error.where, bad);
        free(edited);
    }
    free(text);
    numoe_machine_free(machine);
    free(path);
    free(bad);
}

Test(topo_saved, what_is_not_known_is_passed_over)
{
    struct numoe_machine *machine = machine_of("core:2 pu:1");
    char *path = path_of("box.json"), *text, *edited;
    struct numoe_error error;

    save(machine, path);
    text = read_file(path, NULL);
    edited = replaced(text, "\"os_index\":0", "\"colour\":[1,{}],\"os_index\":0");
    cr_assert_eq(load_text(path, edited, strlen(edited), &error), 0, "%s", error.message);
    free(text);
    free(edited);
    numoe_machine_free(machine);
    free(path);
}

Test(topo_saved, other_json_and_too_much_are_refused)
{
    char *path = path_of("bad"), *deep = malloc(1 << 20), *huge;
    const size_t most = ((size_t)16 << 20) + 1;
    struct numoe_error error;

    cr_assert_eq(load_text(path, "{}", 2, &error), -EINVAL);
    cr_assert_eq(load_text(path, " {\"a\": 1}", 9, &error), -EINVAL);
    cr_assert_eq(load_text(path, "{\"numoe_machine\": 1}", 20, &error), -EINVAL);
    cr_assert_eq(load_text(path, "{\0}", 3, &error), -EINVAL);
    memset(deep, '[', 1 << 20);
    memcpy(deep, "{\"a\":", 5);
    cr_assert_eq(load_text(path, deep, 1 << 20, &error), -EINVAL);
    huge = malloc(most);
    memset(huge, ' ', most);
    huge[0] = '{';
    cr_assert_eq(load_text(path, huge, most, &error), -E2BIG);
    free(deep);
    free(huge);
    free(path);
}

/* Thousands of damaged files: an error with words, or a machine on which everything holds. */
Test(topo_saved, damaged_bytes_never_crash, .timeout = 240)
{
    struct numoe_machine *machine =
        machine_of("pack:2 [numa(memory=8GB)] l3:2 [numa(memory=4GB)] core:2 pu:2");
    char *path = path_of("box.json"), *bad = path_of("bad.json"), *text, *copy;
    uint64_t state = 0x9E3779B97F4A7C15u;
    uint32_t accepted = 0;
    struct numoe_error error;
    size_t bytes;

    calibrate(machine);
    save(machine, path);
    text = read_file(path, &bytes);
    copy = malloc(bytes);
    for (uint32_t round = 0; round < 4000; round++)
        accepted += load_text(bad, copy, damage(copy, text, bytes, round, &state), &error) == 0;
    /* a digit of a size or the letter of a note may change and leave a machine */
    cr_assert_gt(accepted, 0);
    cr_assert_lt(accepted, 3000);
    free(text);
    free(copy);
    numoe_machine_free(machine);
    free(path);
    free(bad);
}

/* ---- captures ---- */

static void put(const char *name, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    tree_vput(directory, name, format, args);
    va_end(args);
}

/* Two packages of two cores with a node each, as Linux would show them. */
static void make_capture(void)
{
    put("proc/cpuinfo", "processor\t: 0\nmodel name\t: Captured CPU\n\nprocessor\t: 1\n"
                        "model name\t: Captured CPU\n\nprocessor\t: 2\nmodel name\t: Captured "
                        "CPU\n\nprocessor\t: 3\nmodel name\t: Captured CPU\n\n");
    put("proc/meminfo", "MemTotal: 12582912 kB\nMemFree: 1048576 kB\n");
    put("sys/devices/system/cpu/online", "0-3\n");
    put("sys/devices/system/cpu/possible", "0-3\n");
    put("sys/devices/system/cpu/present", "0-3\n");
    put("sys/devices/system/node/online", "0-1\n");
    put("sys/devices/system/node/possible", "0-1\n");
    for (int cpu = 0; cpu < 4; cpu++) {
        char name[128];

        snprintf(name, sizeof name, "sys/devices/system/cpu/cpu%d/topology/core_id", cpu);
        put(name, "%d\n", cpu % 2);
        snprintf(name, sizeof name, "sys/devices/system/cpu/cpu%d/topology/physical_package_id",
                 cpu);
        put(name, "%d\n", cpu / 2);
        snprintf(name, sizeof name, "sys/devices/system/cpu/cpu%d/topology/thread_siblings", cpu);
        put(name, "%x\n", 1 << cpu);
        snprintf(name, sizeof name, "sys/devices/system/cpu/cpu%d/topology/core_siblings", cpu);
        put(name, "%x\n", cpu < 2 ? 3 : 12);
    }
    for (int node = 0; node < 2; node++) {
        char name[128];

        snprintf(name, sizeof name, "sys/devices/system/node/node%d/cpumap", node);
        put(name, "%x\n", node ? 12 : 3);
        snprintf(name, sizeof name, "sys/devices/system/node/node%d/meminfo", node);
        put(name, "Node %d MemTotal: %d kB\nNode %d MemFree: 1024 kB\n", node,
            node ? 8388608 : 4194304, node);
        snprintf(name, sizeof name, "sys/devices/system/node/node%d/distance", node);
        put(name, node ? "21 10\n" : "10 21\n");
    }
}

Test(topo_capture, directory_with_sys_and_proc_is_a_machine)
{
    struct numoe_machine *machine;

    make_capture();
    machine = machine_of(directory);
    check_machine(machine);
    cr_assert_not(machine->live);
    cr_assert_str_eq(machine->source, directory);
    cr_assert_eq(machine->node_count, 2);
    cr_assert_eq(machine->package_count, 2);
    cr_assert_eq(machine->core_count, 4);
    cr_assert_eq(machine->pu_count, 4);
    cr_assert_eq(machine->nodes[0].capacity_bytes, (uint64_t)4 << 30);
    cr_assert_eq(machine->nodes[1].capacity_bytes, (uint64_t)8 << 30);
    cr_assert_eq(numoe_machine_distance(machine, 0, 1), 21);
    cr_assert_str_eq(machine->cpu_model, "Captured CPU");
    check_round_trip(machine);
    numoe_machine_free(machine);
    cr_assert_null(getenv("HWLOC_FSROOT"));
}

Test(topo_capture, this_system_can_be_read_as_one)
{
    struct numoe_machine *machine = machine_of("/"), *live = machine_of(NULL);

    check_machine(machine);
    cr_assert_not(machine->live);
    cr_assert_eq(machine->node_count, live->node_count);
    cr_assert_eq(machine->pu_count, live->pu_count);
    numoe_machine_free(machine);
    numoe_machine_free(live);
}

Test(topo_capture, other_directories_are_refused)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine;

    cr_assert_eq(numoe_machine_load(directory, &machine, &error), -EINVAL);
    cr_assert_not_null(strstr(error.message, "sys/"), "%s", error.message);
}

Test(topo_capture, odd_contents_are_an_error_or_a_machine)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine = NULL;

    put("proc/cpuinfo", "%s", "processor : 99999999999\n");
    put("sys/devices/system/cpu/online", "%s", "0-4294967295\n");
    put("sys/devices/system/cpu/cpu0/topology/core_siblings", "%s", "zzz,\n");
    put("sys/devices/system/node/node7/cpumap", "%s", "ffffffff,ffffffff\n");
    if (numoe_machine_load(directory, &machine, &error))
        cr_assert_eq(error.code, -EINVAL, "%s", error.message);
    else
        check_machine(machine);
    numoe_machine_free(machine);
}
