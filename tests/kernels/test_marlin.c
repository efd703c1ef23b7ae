/* Marlin's layout: the reference beside a golden file that was made from another description. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>

#include "support/experts.h"

enum { H = 64, I = 96, SLICES = I / 32 };

static uint8_t *golden(size_t *bytes)
{
    FILE *file = fopen(NUMOE_TEST_DATA "/oracle/marlin_64x96.bin", "rb");
    uint8_t *all = malloc(1 << 20);

    cr_assert_not_null(file);
    *bytes = fread(all, 1, 1 << 20, file);
    fclose(file);
    return all;
}

static void read_matrix(const uint8_t **at, uint64_t rows, uint64_t columns, struct numoe_mxfp4 *m)
{
    *m = (struct numoe_mxfp4){.codes = *at,
                              .scales = *at + rows * columns / 2,
                              .code_stride = columns / 2,
                              .scale_stride = columns / 32,
                              .code_step = 16,
                              .scale_step = 1,
                              .nibbles = NUMOE_NIBBLES_ADJACENT};
    *at += rows * columns / 2 + rows * columns / 32;
}

Test(marlin, reference_is_as_the_golden_file)
{
    size_t bytes;
    uint8_t *all = golden(&bytes);
    const uint8_t *at = all;
    struct numoe_expert_source source = {.hidden = H, .intermediate = I};
    struct numoe_pack_report report = {0};
    struct numoe_slice_shape shape;
    struct numoe_marlin_sizes sizes;
    uint8_t *slices;

    cr_assert_eq(numoe_slice_shape_init(&shape, H, false), 0);
    slices = aligned_bytes(SLICES * shape.bytes);
    read_matrix(&at, I, H, &source.gate);
    read_matrix(&at, I, H, &source.up);
    read_matrix(&at, H, I, &source.down);
    cr_assert_eq(numoe_pack_slices(&shape, &source, 0, SLICES, slices, &report), 0);
    cr_assert_eq(numoe_marlin_sizes(&shape, SLICES, &sizes), 0);
    cr_assert_eq(4 * (sizes.gate_up_words + sizes.down_words), 3 * H * I / 2);
    cr_assert_eq(sizes.gate_up_scales + sizes.down_scales, 3 * H * I / 32);
    cr_assert_eq(bytes, 3 * (3 * H * I / 2 + 3 * H * I / 32));
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        const struct numoe_marlin out = {malloc(4 * sizes.gate_up_words),
                                         malloc(sizes.gate_up_scales), malloc(4 * sizes.down_words),
                                         malloc(sizes.down_scales)};

        cr_assert_eq(numoe_marlin_reference(&shape, slices, SLICES, interleaved, &out), 0);
        cr_expect_arr_eq(out.gate_up, at, 4 * sizes.gate_up_words);
        at += 4 * sizes.gate_up_words;
        cr_expect_arr_eq(out.gate_up_scales, at, sizes.gate_up_scales);
        at += sizes.gate_up_scales;
        cr_expect_arr_eq(out.down, at, 4 * sizes.down_words);
        at += 4 * sizes.down_words;
        cr_expect_arr_eq(out.down_scales, at, sizes.down_scales);
        at += sizes.down_scales;
        free(out.gate_up);
        free(out.gate_up_scales);
        free(out.down);
        free(out.down_scales);
    }
    cr_expect_eq(at, all + bytes);
    free(slices);
    free(all);
}

Test(marlin, what_it_cannot_have_is_refused)
{
    struct numoe_slice_shape shape;
    struct numoe_marlin_sizes sizes;
    const struct numoe_marlin nowhere = {NULL, NULL, NULL, NULL};

    cr_assert_eq(numoe_slice_shape_init(&shape, 96, false), 0);
    cr_expect_eq(numoe_marlin_sizes(&shape, 4, &sizes), -EINVAL);
    cr_expect_eq(numoe_marlin_reference(&shape, NULL, 4, false, &nowhere), -EINVAL);
    cr_assert_eq(numoe_slice_shape_init(&shape, 64, true), 0);
    cr_expect_eq(numoe_marlin_sizes(&shape, 1, &sizes), -EINVAL);
    cr_expect_eq(numoe_marlin_sizes(&shape, 2, &sizes), 0);
}
