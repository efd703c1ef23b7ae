/* The gate's decision on described devices (cases F1 and F2), modes, and what errors mean. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_error.h"
#include "gpu_gate.h"

static struct gpu_evidence good(int major, int minor)
{
    return (struct gpu_evidence){.known = GPU_STEP_TESTED,
                                 .mode = NUMOE_GPU_ON,
                                 .built = true,
                                 .devices = 1,
                                 .name = "Described Device",
                                 .major = major,
                                 .minor = minor,
                                 .images = "90-real,80-virtual",
                                 .loaded = gpu_gate_image("90-real,80-virtual", major, minor),
                                 .shared_bytes = 101376,
                                 .shared_need = 49408,
                                 .rel_l2 = 2e-3};
}

Test(gpu_gate, capability_is_a_floor_and_not_a_list)
{
    static const struct {
        int major, minor;
        bool usable;
    } table[] = {{7, 5, false}, {8, 0, true},  {8, 6, true},  {8, 9, true}, {9, 0, true},
                 {10, 0, true}, {12, 0, true}, {12, 1, true}, {99, 0, true}};

    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const struct gpu_evidence e = good(table[i].major, table[i].minor);
        struct numoe_gpu_verdict v;
        gpu_gate_decide(&e, &v);
        cr_expect_eq(v.usable, table[i].usable, "%d.%d: %s", table[i].major, table[i].minor,
                     v.reason);
        cr_expect(strlen(v.reason) > 0);
        if (!table[i].usable)
            cr_expect(strstr(v.reason, "7.5") && strstr(v.reason, "80-virtual"), "%s", v.reason);
    }
}

Test(gpu_gate, images_match_as_cuda_matches_them)
{
    static const struct {
        const char *images;
        int major, minor;
        bool runs;
    } table[] = {
        {"90-real", 9, 0, true},
        {"90-real", 8, 9, false},
        {"90-real", 10, 0, false},
        {"80-real", 8, 6, true},
        {"86-real", 8, 0, false},
        {"86-real", 8, 9, true},
        {"80-virtual", 7, 5, false},
        {"80-virtual", 9, 9, true},
        {"80", 8, 9, true},
        {"80", 12, 0, true},
        {"90-virtual", 8, 9, false},
        {"", 9, 0, false},
        {"120-real,90-real", 12, 1, true},
        {"100-real", 10, 3, true},
        {"100-real", 12, 0, false},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        cr_expect_eq(gpu_gate_image(table[i].images, table[i].major, table[i].minor), table[i].runs,
                     "%s on %d.%d", table[i].images, table[i].major, table[i].minor);
}

Test(gpu_gate, shared_memory_fits_or_both_numbers_are_named)
{
    static const uint64_t limits[] = {49152, 49407, 49408, 65536, 101376, 166912, 232448};

    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        struct gpu_evidence e = good(8, 6);
        struct numoe_gpu_verdict v;
        char number[24];
        e.shared_bytes = limits[i];
        gpu_gate_decide(&e, &v);
        cr_expect_eq(v.usable, limits[i] >= e.shared_need);
        if (v.usable)
            continue;
        snprintf(number, sizeof number, "%llu", (unsigned long long)limits[i]);
        cr_expect(strstr(v.reason, number) && strstr(v.reason, "49408"), "%s", v.reason);
    }
}

/* Each step that fails has a reason of its own, and force passes all but absence. */
Test(gpu_gate, every_refusal_has_its_reason)
{
    struct gpu_evidence cases[8];
    static const char *const words[8] = {"not asked", "no GPU support", "no driver here",
                                         "no device", "no device 1",    "does not load",
                                         "self-test", "relative L2"};
    char seen[8][512];

    for (int i = 0; i < 8; i++)
        cases[i] = good(9, 0);
    cases[0].mode = NUMOE_GPU_OFF;
    cases[1].built = false;
    cases[2].absent = "no driver here";
    cases[3].devices = 0;
    cases[4].index = 1; /* of one: the first is 0 */
    cases[5].loaded = false;
    cases[5].load_text = "no kernel image";
    cases[6].test_failure = "copying layer 0 failed";
    cases[7].rel_l2 = 6e-3;
    for (int i = 0; i < 8; i++) {
        struct numoe_gpu_verdict v;
        gpu_gate_decide(&cases[i], &v);
        cr_expect_not(v.usable, "case %d", i);
        cr_expect(strstr(v.reason, words[i]), "case %d: %s", i, v.reason);
        snprintf(seen[i], sizeof seen[i], "%s", v.reason);
        for (int j = 0; j < i; j++)
            cr_expect_str_neq(seen[j], v.reason);
        if (i == 0)
            continue;
        cases[i].mode = NUMOE_GPU_FORCE;
        gpu_gate_decide(&cases[i], &v);
        cr_expect_eq(v.usable, i >= 5, "forced case %d: %s", i, v.reason);
        cr_expect_eq(v.forced, i >= 5);
        cr_expect_str_eq(v.reason, seen[i]);
    }
}

Test(gpu_gate, a_result_that_is_no_number_is_refused)
{
    struct gpu_evidence e = good(9, 0);
    struct numoe_gpu_verdict v;

    e.rel_l2 = 0.0 / 0.0;
    gpu_gate_decide(&e, &v);
    cr_expect_not(v.usable);
}

Test(gpu_gate, what_is_not_known_yet_is_not_judged)
{
    struct gpu_evidence e = {.known = GPU_STEP_WANTED, .mode = NUMOE_GPU_ON};
    struct numoe_gpu_verdict v;

    gpu_gate_decide(&e, &v);
    cr_expect(v.usable);
    e.known = GPU_STEP_THERE;
    gpu_gate_decide(&e, &v);
    cr_expect_not(v.usable);
}

Test(gpu_mode, the_environment_goes_first)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    enum numoe_gpu_mode mode;

    unsetenv("NUMOE_GPU");
    cr_assert_eq(numoe_gpu_mode(NUMOE_GPU_ON, &mode, &error), 0);
    cr_expect_eq(mode, NUMOE_GPU_ON);
    setenv("NUMOE_GPU", "off", 1);
    cr_assert_eq(numoe_gpu_mode(NUMOE_GPU_FORCE, &mode, &error), 0);
    cr_expect_eq(mode, NUMOE_GPU_OFF);
    setenv("NUMOE_GPU", "on", 1);
    cr_assert_eq(numoe_gpu_mode(NUMOE_GPU_OFF, &mode, &error), 0);
    cr_expect_eq(mode, NUMOE_GPU_ON);
    setenv("NUMOE_GPU", "force", 1);
    cr_assert_eq(numoe_gpu_mode(NUMOE_GPU_OFF, &mode, &error), 0);
    cr_expect_eq(mode, NUMOE_GPU_FORCE);
    setenv("NUMOE_GPU", "yes", 1);
    cr_assert_eq(numoe_gpu_mode(NUMOE_GPU_OFF, &mode, &error), -EINVAL);
    cr_expect(strstr(error.message, "yes"));
}

Test(gpu_error, fatal_and_recoverable_are_told_apart)
{
    static const int dead[] = {214, 700, 702, 709, 710, 714, 715, 716, 717,
                               718, 719, 220, 226, 721, 810, 911, 999};
    static const int call[] = {1, 3, 35, 98, 100, 209, 304, 400, 701, 712, 800, 801};

    cr_expect_eq(gpu_fault_of(0), GPU_FAULT_NONE);
    cr_expect_eq(gpu_errno_of(0), 0);
    cr_expect_eq(gpu_fault_of(2), GPU_FAULT_MEMORY);
    cr_expect_eq(gpu_errno_of(2), -ENOMEM);
    for (size_t i = 0; i < sizeof dead / sizeof dead[0]; i++) {
        cr_expect_eq(gpu_fault_of(dead[i]), GPU_FAULT_DEAD, "%d", dead[i]);
        cr_expect_eq(gpu_errno_of(dead[i]), -EIO, "%d", dead[i]);
    }
    for (size_t i = 0; i < sizeof call / sizeof call[0]; i++) {
        cr_expect_eq(gpu_fault_of(call[i]), GPU_FAULT_CALL, "%d", call[i]);
        cr_expect_lt(gpu_errno_of(call[i]), 0);
        cr_expect_neq(gpu_errno_of(call[i]), -EIO);
    }
}
