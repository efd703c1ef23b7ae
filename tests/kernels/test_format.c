/* Number formats: names, and the bytes of slices. SPDX-License-Identifier: Apache-2.0 */
#include "numoe_kernels.h"

#include <criterion/criterion.h>
#include <errno.h>

Test(kernels_format, names_and_numbers_lead_to_the_same_entry)
{
    size_t count = 0;

    for (; numoe_format_at(count); count++) {
        const struct numoe_format_info *f = numoe_format_at(count);

        cr_expect_eq(numoe_format_info(f->format), f);
        cr_expect_eq(numoe_format_by_name(f->name), f);
        cr_expect_eq(f->has_kernels, f->format == NUMOE_MXFP4);
    }
    cr_expect_eq(count, 7);
    cr_expect_null(numoe_format_by_name("fp16"));
    cr_expect_null(numoe_format_by_name(""));
    cr_expect_null(numoe_format_info((enum numoe_format)0));
    cr_expect_null(numoe_format_info((enum numoe_format)8));
}

/* By hand: 4 tiles each of gate and up, 4 of down, in pairs. */
Test(kernels_format, slices_of_128)
{
    static const struct {
        enum numoe_format format;
        uint64_t slice, expert;
    } cases[] = {
        {NUMOE_MXFP4, 12 * (512 + 32), 0},
        {NUMOE_MXFP8, 12 * (1024 + 32), 0},
        {NUMOE_NVFP4, 12 * (512 + 64), 64},
        {NUMOE_INT4_GROUP32, 12 * (512 + 64), 0},
        {NUMOE_FP8_BLOCK128, 12 * 1024 + 64, 0},          /* 12 floats in a cache line */
        {NUMOE_FP8_CHANNEL, 12 * 1024 + 2 * 32 * 4, 512}, /* rows of gate and up; of down */
        {NUMOE_BF16_WEIGHTS, 12 * 2048, 0},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct numoe_format_sizes plain, bias;

        cr_assert_eq(numoe_format_sizes(cases[i].format, 128, false, &plain), 0);
        cr_expect_eq(plain.hidden_tiles, 4);
        cr_expect_eq(plain.slice_bytes, cases[i].slice, "%lu", (unsigned long)plain.slice_bytes);
        cr_expect_eq(plain.expert_bytes, cases[i].expert);
        cr_assert_eq(numoe_format_sizes(cases[i].format, 128, true, &bias), 0);
        cr_expect_eq(bias.slice_bytes, plain.slice_bytes + 2 * 32 * 4);
        cr_expect_eq(bias.expert_bytes, plain.expert_bytes + 128 * 4);
    }
}

Test(kernels_format, widths_are_rounded_up_to_pairs_of_tiles)
{
    for (size_t i = 0; numoe_format_at(i); i++) {
        const struct numoe_format_info *f = numoe_format_at(i);
        struct numoe_format_sizes sizes;

        for (uint64_t hidden = 1; hidden <= 32768; hidden += hidden < 300 ? 1 : 31) {
            cr_assert_eq(numoe_format_sizes(f->format, hidden, hidden % 2, &sizes), 0);
            cr_assert_eq(sizes.hidden_tiles, (hidden + 31) / 32);
            cr_assert_eq(sizes.gate_up_bytes, sizes.hidden_tiles * sizes.pair_bytes);
            cr_assert_eq(sizes.down_bytes, (sizes.hidden_tiles + 1) / 2 * sizes.pair_bytes);
            cr_assert(sizes.slice_bytes >= sizes.gate_up_bytes + sizes.down_bytes);
            cr_assert_eq(sizes.slice_bytes % 64, 0);
            cr_assert_eq(sizes.pair_bytes % 64, 0);
        }
        cr_expect_eq(numoe_format_sizes(f->format, 0, false, &sizes), -EINVAL);
        cr_expect_eq(numoe_format_sizes(f->format, UINT64_MAX, false, &sizes), -EINVAL);
        cr_expect_eq(numoe_format_sizes(f->format, UINT64_MAX / 64, true, &sizes), -EINVAL);
        cr_expect_eq(numoe_format_sizes(f->format, (uint64_t)1 << 40, true, &sizes), 0);
    }
    cr_expect_eq(numoe_format_sizes((enum numoe_format)0, 32, false, NULL), -EINVAL);
}
