/* Measuring, with buffers and times as small as they go. */
#include "calibrate.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

TestSuite(runtime_calibrate, .timeout = 60);

static struct numoe_machine *live(void)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine;

    cr_assert_eq(numoe_machine_load(NULL, &machine, &error), 0, "%s", error.message);
    return machine;
}

static void step(void *user, uint32_t done, uint32_t total, const char *what)
{
    uint32_t *steps = user;

    cr_assert_lt(done, total);
    cr_assert(*what);
    (*steps)++;
}

static const struct numoe_calibrate_options quick = {.pair_ns = 6000000, .buffer_bytes = 4 << 20};

static bool noted(const struct numoe_machine *machine, const char *words)
{
    for (uint32_t i = 0; i < machine->note_count; i++)
        if (strstr(machine->notes[i], words))
            return true;
    return false;
}

Test(runtime_calibrate, every_pair_gets_figures)
{
    struct numoe_calibrate_options options = quick;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine = live();
    uint32_t steps = 0;

    options.progress = step;
    options.progress_user = &steps;
    cr_assert_eq(numoe_calibrate(machine, &options, &error), 0, "%s", error.message);
    cr_assert_gt(steps, machine->pair_count);
    cr_assert_not_null(machine->together_mbs);
    if (!machine->pair_count)
        cr_assert(noted(machine, "is not measured"), "nothing was measured, and not said why");
    for (uint32_t i = 0; i < machine->pair_count; i++) {
        const struct numoe_pair_speed *pair = &machine->pairs[i];

        cr_assert_lt(pair->domain, machine->domain_count);
        cr_assert_lt(pair->node, machine->node_count);
        /* slower than any memory, or faster than any cache, is a mistake of units */
        cr_assert(pair->bandwidth_mbs > 50 && pair->bandwidth_mbs < 100000000, "%lu MB/s",
                  (unsigned long)pair->bandwidth_mbs);
        cr_assert(pair->latency_ns > 0.2 && pair->latency_ns < 100000, "%f ns", pair->latency_ns);
        cr_assert_eq(numoe_machine_speed(machine, pair->domain, pair->node), pair);
        cr_assert_gt(numoe_machine_bandwidth(machine, pair->node), 0);
    }
    numoe_machine_free(machine);
}

Test(runtime_calibrate, again_takes_the_place_of_before)
{
    struct numoe_calibrate_options options = quick;
    struct numoe_machine *machine = live();
    uint32_t pairs;

    cr_assert_eq(numoe_calibrate(machine, &options, NULL), 0);
    pairs = machine->pair_count;
    cr_assert_eq(numoe_calibrate(machine, &options, NULL), 0);
    cr_assert_eq(machine->pair_count, pairs);
    numoe_machine_free(machine);
}

Test(runtime_calibrate, described_machines_are_refused)
{
    struct numoe_calibrate_options options = quick;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine;

    cr_assert_eq(numoe_machine_load("numa:2(memory=1GB) core:2 pu:1", &machine, &error), 0);
    cr_assert_eq(numoe_calibrate(machine, &options, &error), -EINVAL);
    cr_assert_eq(machine->pair_count, 0);
    numoe_machine_free(machine);
}

Test(runtime_calibrate, unknown_instructions_are_refused)
{
    struct numoe_calibrate_options options = quick;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine = live();

    options.isa = "mmx";
    cr_assert_lt(numoe_calibrate(machine, &options, &error), 0);
    cr_assert(*error.message);
    numoe_machine_free(machine);
}

/* A machine that claims more nodes and CPUs than there are: a node that memory cannot be bound to
 * and CPUs that cannot be pinned to are notes, and the rest is measured. */
Test(runtime_calibrate, what_is_not_there_is_a_note)
{
    struct numoe_calibrate_options options = quick;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine;

    cr_assert_eq(numoe_machine_load("numa:2(memory=8GB) core:2 pu:1", &machine, &error), 0, "%s",
                 error.message);
    machine->nodes[1].os_index = 900;
    machine->live = true;
    for (uint32_t i = 0; i < machine->pu_count; i++)
        machine->pus[i].os_index += 60000;
    cr_assert_eq(numoe_calibrate(machine, &options, &error), 0, "%s", error.message);
    cr_assert(noted(machine, "node 900 is not measured"));
    for (uint32_t i = 0; i < machine->pair_count; i++)
        cr_assert_eq(machine->pairs[i].node, 0);
    if (machine->pair_count)
        cr_assert(noted(machine, "could not be pinned"));
    numoe_machine_free(machine);
}

Test(runtime_calibrate, pairs_are_limited_nearest_first)
{
    struct numoe_calibrate_options options = quick;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine;

    cr_assert_eq(numoe_machine_load("numa:4(memory=8GB) core:2 pu:1", &machine, &error), 0);
    /* one real node under four names would not load; four domains reading it are enough */
    machine->live = true;
    for (uint32_t i = 1; i < 4; i++)
        machine->nodes[i].allowed = false;
    options.pair_limit = 2;
    cr_assert_eq(numoe_calibrate(machine, &options, &error), 0, "%s", error.message);
    if (machine->pair_count) {
        cr_assert_eq(machine->pair_count, 2);
        cr_assert_eq(machine->pairs[0].domain, machine->nodes[0].domain);
        cr_assert(noted(machine, "2 of 4 pairs"));
        cr_assert_not_null(numoe_machine_speed(machine, 0, 0));
        cr_assert_null(numoe_machine_speed(machine, 3, 0));
    }
    numoe_machine_free(machine);
}

Test(runtime_calibrate, when_time_is_up_one_pair_is_measured)
{
    struct numoe_calibrate_options options = quick;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine;

    cr_assert_eq(numoe_machine_load("numa:4(memory=8GB) core:2 pu:1", &machine, &error), 0);
    /* as above: four domains reading one real node */
    machine->live = true;
    for (uint32_t i = 1; i < 4; i++)
        machine->nodes[i].allowed = false;
    options.budget_ns = 1;
    cr_assert_eq(numoe_calibrate(machine, &options, &error), 0, "%s", error.message);
    if (machine->pair_count) {
        cr_assert_eq(machine->pair_count, 1);
        cr_assert(noted(machine, "1 of 4 pairs"));
        cr_assert_gt(machine->together_mbs[0], 0);
    }
    numoe_machine_free(machine);
}

Test(runtime_calibrate, no_memory_is_a_note)
{
    struct numoe_calibrate_options options = quick;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine = live();

    machine->cgroup_bytes = 1 << 20;
    cr_assert_eq(numoe_calibrate(machine, &options, &error), 0, "%s", error.message);
    cr_assert_eq(machine->pair_count, 0);
    cr_assert(noted(machine, "no room"));
    numoe_machine_free(machine);
}
