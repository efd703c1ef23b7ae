/*
 * Choosing kernels by a table of times: by shape and tokens, among the forms that a device has;
 * tables that say too little; a device's numbers.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <string.h>

#include "numoe_cuda_call.h"
#include "numoe_gpu.h"

enum { ALL = (2u << NUMOE_GPU_FORMS) - 2 };
enum { WITHIN_99_KIB = 1u << NUMOE_CUDA_8 | 1u << NUMOE_CUDA_32 | 1u << NUMOE_CUDA_64 };

static uint32_t choose(const struct numoe_gpu_tuning *t, uint32_t forms, double tokens)
{
    return numoe_gpu_tuning_choose(t, forms, 4096, 2048, tokens);
}

/* Two shapes, two points: 8 is fast with 1 token, wgmma128 with 100 and 64 without that. */
static struct numoe_gpu_tuning example(void)
{
    struct numoe_gpu_tuning t = {
        .device = {.major = 9,
                   .multiprocessors = 132,
                   .shared_bytes = 232448,
                   .l2_bytes = 50 << 20},
        .shape_count = 2,
        .shapes = {{.hidden = 4096,
                    .intermediate = 2048,
                    .point_count = 2,
                    .points = {{.tokens = 1, .ms = {0, 1, 2, 3, 0, 0, 4}},
                               {.tokens = 101, .ms = {0, 21, 12, 8, 0, 0, 4}}}}},
    };
    t.shapes[1] = t.shapes[0];
    t.shapes[1].hidden = 1024;
    for (int p = 0; p < 2; p++) /* there 32 is best always */
        t.shapes[1].points[p].ms[NUMOE_CUDA_32] = 0.5;
    return t;
}

Test(gpu_tuning, the_built_in_table_is_right)
{
    const struct numoe_gpu_tuning *t = numoe_gpu_tuning_builtin();
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_assert_eq(numoe_gpu_tuning_check(t, "built in", &error), 0, "%s", error.message);
    /* what every device has, from one token to all of a prompt, for any shape */
    for (uint64_t hidden = 32; hidden <= 1 << 20; hidden *= 2)
        for (double tokens = 0.01; tokens < 1e5; tokens *= 1.3) {
            cr_assert(numoe_gpu_tuning_choose(t, WITHIN_99_KIB, hidden, 2880, tokens) &&
                      WITHIN_99_KIB >>
                              numoe_gpu_tuning_choose(t, WITHIN_99_KIB, hidden, 2880, tokens) &
                          1);
            cr_assert(numoe_gpu_tuning_choose(t, ALL, hidden, 2880, tokens));
        }
    cr_expect_eq(choose(t, ALL, 0.02), NUMOE_CUDA_8);
    cr_expect_eq(choose(t, ALL, 192), NUMOE_CUDA_WGMMA_128);
    cr_expect_eq(choose(t, WITHIN_99_KIB, 192), NUMOE_CUDA_64);
}

Test(gpu_tuning, the_fastest_on_the_line_between_points_is_chosen)
{
    const struct numoe_gpu_tuning t = example();

    cr_expect_eq(choose(&t, ALL, 0.1), NUMOE_CUDA_8);
    cr_expect_eq(choose(&t, ALL, 1), NUMOE_CUDA_8);
    cr_expect_eq(choose(&t, ALL, 11), NUMOE_CUDA_8);  /* 3, 3.0, 3.5; 4 */
    cr_expect_eq(choose(&t, ALL, 12), NUMOE_CUDA_32); /* 3.2, 3.1, 3.55; 4 */
    cr_expect_eq(choose(&t, ALL, 22), NUMOE_CUDA_WGMMA_128);
    cr_expect_eq(choose(&t, ALL, 101), NUMOE_CUDA_WGMMA_128);
    cr_expect_eq(choose(&t, ALL, 1e6), NUMOE_CUDA_WGMMA_128);
    /* without what a device has not, or what has failed on it */
    cr_expect_eq(choose(&t, WITHIN_99_KIB, 21), NUMOE_CUDA_32);
    cr_expect_eq(choose(&t, WITHIN_99_KIB, 101), NUMOE_CUDA_64);
    cr_expect_eq(choose(&t, 1u << NUMOE_CUDA_32, 1), NUMOE_CUDA_32);
    cr_expect_eq(choose(&t, 1u << NUMOE_CUDA_WGMMA_64, 50),
                 NUMOE_CUDA_WGMMA_64); /* no time of it */
    cr_expect_eq(choose(&t, 1u << NUMOE_CUDA_WGMMA_64 | 1u << NUMOE_CUDA_8, 50), NUMOE_CUDA_8);
    cr_expect_eq(choose(&t, 0, 1), 0);
}

Test(gpu_tuning, the_nearest_shape_is_taken)
{
    const struct numoe_gpu_tuning t = example();

    cr_expect_eq(numoe_gpu_tuning_choose(&t, ALL, 7168, 2048, 1), NUMOE_CUDA_8);
    cr_expect_eq(numoe_gpu_tuning_choose(&t, ALL, 2049, 64, 1), NUMOE_CUDA_8);
    cr_expect_eq(numoe_gpu_tuning_choose(&t, ALL, 2047, 64, 1), NUMOE_CUDA_32);
    cr_expect_eq(numoe_gpu_tuning_choose(&t, ALL, 32, 32, 100), NUMOE_CUDA_32);
}

static void refused(const struct numoe_gpu_tuning *t, const char *what)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_expect_eq(numoe_gpu_tuning_check(t, "a.json", &error), -EINVAL, "%s", what);
    cr_expect_str_eq(error.where, "a.json");
    cr_expect(strstr(error.message, what) != NULL, "\"%s\" has no \"%s\"", error.message, what);
}

Test(gpu_tuning, tables_that_say_too_little_are_refused)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_tuning t = example();

    cr_expect_eq(numoe_gpu_tuning_check(&t, "a.json", &error), 0, "%s", error.message);
    t.shape_count = 0;
    refused(&t, "0 shapes");
    t.shape_count = NUMOE_GPU_TUNED_SHAPES + 1;
    refused(&t, "shapes are not");
    t = example();
    t.shapes[1].hidden = 4096;
    refused(&t, "4096 x 2048 is there twice");
    t = example();
    t.shapes[1].intermediate = 0;
    refused(&t, "shape 2 is 1024 x 0");
    t = example();
    t.shapes[0].point_count = 0;
    refused(&t, "0 points");
    t.shapes[0].point_count = NUMOE_GPU_TUNED_POINTS + 1;
    refused(&t, "points of shape 4096 x 2048 are not");
    t = example();
    t.shapes[0].points[1].tokens = 1;
    refused(&t, "do not ascend");
    t = example();
    t.shapes[1].points[0].tokens = NAN;
    refused(&t, "tokens of an expert");
    for (int i = 0; i < 3; i++) { /* what fits into 99 KiB */
        t = example();
        t.shapes[1].points[1].ms[NUMOE_CUDA_8 + i] = 0;
        refused(&t, "99 KiB");
    }
    t = example();
    t.shapes[0].points[0].ms[NUMOE_CUDA_WGMMA_128] = -1;
    refused(&t, "form wgmma128 takes -1 ms");
    t.shapes[0].points[0].ms[NUMOE_CUDA_WGMMA_128] = INFINITY;
    refused(&t, "form wgmma128 takes inf ms");
}

Test(gpu_tuning, a_table_is_for_the_numbers_of_its_device)
{
    const struct numoe_gpu_tuning t = example();
    const struct {
        struct numoe_gpu_numbers numbers;
        const char *what;
    } others[] = {
        {{8, 6, 132, 232448, 50 << 20}, "compute capability 9.0, and this one has 8.6"},
        {{9, 0, 114, 232448, 50 << 20}, "132 multiprocessors, and this one has 114"},
        {{9, 0, 132, 101376, 50 << 20}, "232448 bytes of shared memory"},
        {{9, 0, 132, 232448, 60 << 20}, "52428800 bytes of L2, and this one has 62914560"},
    };
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_expect_eq(numoe_gpu_tuning_fits(&t, &t.device, "a.json", &error), 0);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        cr_expect_eq(numoe_gpu_tuning_fits(&t, &others[i].numbers, "a.json", &error), -EINVAL);
        cr_expect_str_eq(error.where, "a.json");
        cr_expect(strstr(error.message, others[i].what) != NULL, "%s", error.message);
    }
}
