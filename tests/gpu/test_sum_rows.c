/*
 * Rows of several places summed on the host: against one value after the other, bit by bit.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fake_device.h"
#include "numoe_gpu.h"

enum { PLACES = 5, GAP = 3 };

static uint64_t state = 1;

static uint32_t draw(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

/* Of many sizes, so that the order of additions shows; now and then none that is finite. */
static float draw_value(void)
{
    if (draw() % 500 == 0)
        return draw() % 2 ? INFINITY : NAN;
    return ldexpf((float)(int32_t)draw(), -31 - (int)(draw() % 24));
}

/* One value of `to`. */
static void sum_value(void *to, enum numoe_type type, const float *const *from, uint32_t count,
                      bool keep, uint64_t at)
{
    float sum = from[0][at];

    for (uint32_t i = 1; i < count; i++)
        sum += from[i][at];
    if (type == NUMOE_F32) {
        const float kept = *(float *)to;
        *(float *)to = keep ? kept + sum : sum;
    } else {
        const float kept = fake_from_bf16(*(uint16_t *)to);
        *(uint16_t *)to = fake_to_bf16(keep ? kept + sum : sum);
    }
}

/* The same bits; NaNs may differ in theirs. */
static bool same(const void *a, const void *b, enum numoe_type type)
{
    const float x = type == NUMOE_F32 ? *(const float *)a : fake_from_bf16(*(const uint16_t *)a);
    const float y = type == NUMOE_F32 ? *(const float *)b : fake_from_bf16(*(const uint16_t *)b);

    return (isnan(x) && isnan(y)) || memcmp(a, b, type == NUMOE_F32 ? 4 : 2) == 0;
}

static void check_shape(enum numoe_type type, uint32_t count, bool keep, uint64_t columns)
{
    const uint64_t rows = 3, stride = columns + GAP, size = type == NUMOE_F32 ? 4 : 2;
    uint8_t *got = malloc(rows * stride * size), *expected = malloc(rows * stride * size);
    float *places[PLACES];

    for (uint32_t i = 0; i < count; i++) {
        places[i] = malloc(rows * columns * sizeof(float));
        for (uint64_t k = 0; k < rows * columns; k++)
            places[i][k] = draw_value();
    }
    for (uint64_t k = 0; k < rows * stride; k++) {
        const float value = draw_value();
        const uint16_t narrow = fake_to_bf16(isfinite(value) ? value : 1.0f);
        memcpy(got + k * size, type == NUMOE_F32 ? (const void *)&value : &narrow, size);
    }
    memcpy(expected, got, rows * stride * size);
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t c = 0; c < columns; c++)
            sum_value(expected + (r * stride + c) * size, type, (const float *const *)places, count,
                      keep, r * columns + c);
    numoe_gpu_sum_rows(got, type, stride, (const float *const *)places, count, keep, columns, rows);
    for (uint64_t k = 0; k < rows * stride; k++)
        if (k % stride < columns)
            cr_assert(same(got + k * size, expected + k * size, type),
                      "%u places, keep %d, %llu columns, value %llu", count, keep,
                      (unsigned long long)columns, (unsigned long long)k);
        else
            cr_assert_eq(memcmp(got + k * size, expected + k * size, size), 0, "written beside");
    for (uint32_t i = 0; i < count; i++)
        free(places[i]);
    free(got);
    free(expected);
}

Test(gpu_sum_rows, bits_are_those_of_one_value_after_the_other)
{
    static const uint64_t columns[] = {1, 7, 32, 1023, 1024, 1025, 3000};

    for (int narrow = 0; narrow < 2; narrow++)
        for (uint32_t count = 1; count <= PLACES; count++)
            for (int keep = 0; keep < 2; keep++)
                for (size_t c = 0; c < sizeof columns / sizeof columns[0]; c++)
                    check_shape(narrow ? NUMOE_BF16 : NUMOE_F32, count, keep, columns[c]);
}

Test(gpu_sum_rows, bf16_is_rounded_once)
{
    static const float parts[3][4] = {
        {1.0f, 1.0f, 0x1p-9f, -2.5f}, {0x1p-9f, 0x1p-9f, 1.0f, 1.5f}, {0x1p-9f, 0, 0x1p-9f, 1.0f}};
    const float *const from[] = {parts[0], parts[1], parts[2]};
    uint16_t to[4] = {0, 0x3F80, 0, 0x8000};

    /* one after another 1 + 2^-9 + 2^-9 would stay 1 */
    numoe_gpu_sum_rows(to, NUMOE_BF16, 4, from, 3, false, 4, 1);
    cr_expect_eq(to[0], fake_to_bf16(1 + 0x1p-8f));
    cr_expect_eq(to[1], 0x3F80);
    cr_expect_eq(to[2], fake_to_bf16(1 + 0x1p-8f));
    cr_expect_eq(to[3] & 0x7FFF, 0);
    to[1] = 0x3F80;
    numoe_gpu_sum_rows(to, NUMOE_BF16, 4, from, 2, true, 4, 1);
    cr_expect_eq(to[1], fake_to_bf16(2 + 0x1p-9f));
}
