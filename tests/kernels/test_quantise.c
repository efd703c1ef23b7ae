/* What activations become in each arithmetic, value by value, against rules written down again. */
#include "support/experts.h"

#include <criterion/criterion.h>
#include <stdio.h>

enum { H = 32 * 40 };

/* Every kernel set's record of x, read back. */
static void values_of(const struct numoe_kernels *k, const float *x, float *got)
{
    struct numoe_slice_shape shape;

    cr_assert_eq(numoe_slice_shape_init(&shape, H, false), 0);
    void *record = aligned_bytes(k->record_bytes(&shape));
    k->quantise(&shape, x, NUMOE_F32, record);
    k->values(&shape, record, got);
    free(record);
}

/* Groups of normals times powers of two, and then groups with something awkward in them. */
static void make_groups(float *x)
{
    static const float tops[] = {448, 449, 300, 256, 511, 512, 0x1p-20f, 0x1.bfp8f, 0x1.c2p8f, 1};

    for (int i = 0; i < H; i++)
        x[i] = round_to_bf16(random_normal()) * ldexpf(1, i / 32 % 21 * 3 - 30);
    for (int g = 0; g < 10; g++) {
        float *group = x + 32 * (20 + g);
        for (int k = 0; k < 32; k++) /* ties of 4 significant bits and of steps of 2^-9 */
            group[k] =
                ldexpf((float)(2 * (k % 16) + 33), -k - 3) * (k % 3 ? tops[g] : -tops[g]) / 64;
        group[g] = g % 2 ? tops[g] : -tops[g];
    }
    memset(x + 32 * 30, 0, 32 * sizeof *x);
    for (int k = 0; k < 32; k++) {
        x[32 * 31 + k] = k % 2 ? -0.0f : 0.0f;
        x[32 * 32 + k] = k == 7 ? 0x1p100f : 1.0f;   /* the others vanish */
        x[32 * 33 + k] = ldexpf(k % 2 ? 1 : -1, -k); /* down to the smallest steps and past them */
    }
}

/* The nearest E4M3 value by looking at all of them; ties to the even code; saturated. */
static double nearest_e4m3(double v)
{
    double best = 0, distance = fabs(v);

    for (int code = 1; code < 127; code++) {
        const int exponent = code >> 3, mantissa = code & 7;
        const double value = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
        const double off = fabs(fabs(v) - value);
        if (off < distance || (off == distance && code % 2 == 0)) {
            best = value;
            distance = off;
        }
    }
    return copysign(best, v);
}

static int scale_exponent(double most, bool ocp)
{
    int n = -127;

    if (ocp)
        n = most > 0 ? ilogb(most) - 8 : -127;
    else
        while (ldexp(448, n) < most)
            n++;
    return n < -127 ? -127 : n;
}

Test(kernels_quantise, mxfp8_is_the_rule_bit_for_bit)
{
    static float x[H], got[H];

    cr_assert_eq(scale_exponent(449, false), 1);
    cr_assert_eq(scale_exponent(449, true), 0);
    cr_assert_eq(scale_exponent(300, false), 0);
    cr_assert_eq(scale_exponent(300, true), 0);
    random_state = 8080;
    for (int round = 0; round < 20; round++) {
        make_groups(x);
        for (int mode = NUMOE_MXFP8_UP; mode <= NUMOE_MXFP8_OCP; mode++) {
            const struct numoe_kernels *k;
            for (size_t i = 0; (k = numoe_kernels_at(mode, i)); i++) {
                values_of(k, x, got);
                for (int j = 0; j < H; j++) {
                    double most = 0;
                    for (int m = j / 32 * 32; m < j / 32 * 32 + 32; m++)
                        most = fmax(most, fabs((double)x[m]));
                    const int scale = scale_exponent(most, mode == NUMOE_MXFP8_OCP);
                    const float want =
                        (float)ldexp(nearest_e4m3(ldexp((double)x[j], -scale)), scale);
                    cr_assert(got[j] == want && signbit(got[j]) == signbit(want),
                              "%s: group %d, %a becomes %a, not %a", k->name, j / 32, (double)x[j],
                              (double)got[j], (double)want);
                }
            }
        }
    }
}

/* fast: at most 1/254 of the group's largest; fine: 1/65024; a little more for fp32 in between. */
Test(kernels_quantise, integers_are_within_half_a_step_of_the_largest)
{
    static float x[H], got[H];
    static const struct {
        enum numoe_arithmetic mode;
        double step;
    } modes[] = {{NUMOE_FAST, 1 / 254.0}, {NUMOE_FINE, 1 / 65024.0}};

    random_state = 99;
    make_groups(x);
    for (int m = 0; m < 2; m++) {
        const struct numoe_kernels *k;
        for (size_t i = 0; (k = numoe_kernels_at(modes[m].mode, i)); i++) {
            values_of(k, x, got);
            for (int j = 0; j < H; j++) {
                double most = 0;
                for (int n = j / 32 * 32; n < j / 32 * 32 + 32; n++)
                    most = fmax(most, fabs((double)x[n]));
                cr_assert_leq(fabs((double)got[j] - (double)x[j]), most * modes[m].step * 1.02,
                              "%s: %a of %a becomes %a", k->name, (double)x[j], most,
                              (double)got[j]);
            }
        }
    }
}

/*
 * One value of each group 2^e times the others, with a weight of 0 for it: the worst case, in which
 * the output consists of the values that were rounded too coarsely. docs/kernels.md has the
 * figures.
 */
Test(kernels_quantise, outliers_cost_fine_what_its_bound_says)
{
    const struct numoe_kernels *k = numoe_kernels_at(NUMOE_FINE, 0);
    static float x[H], got[H];

    for (int e = 0; e <= 14; e++) {
        double error = 0, size = 0, bound = 0;
        random_state = 5 + (uint64_t)e;
        for (int round = 0; round < 50; round++) {
            double dot = 0, off = 0, most = 0;
            for (int j = 0; j < H; j++)
                x[j] = j % 32 == 5 ? ldexpf(1, e) : random_normal();
            values_of(k, x, got);
            for (int j = 0; j < H; j++) {
                const double w = j % 32 == 5 ? 0 : random_unit() * 12 - 6;
                dot += w * (double)x[j];
                off += w * ((double)got[j] - (double)x[j]);
            }
            for (int j = 0; j < H; j++)
                most = fmax(most, fabs((double)x[j]));
            error += off * off;
            size += dot * dot;
            bound += most * most;
        }
        /* uniform errors of a step of most / 32512 against values of size 1 */
        const double expected = sqrt(bound / 50) / 32512 / sqrt(12.0);
        const double measured = sqrt(error / size);
        fprintf(stderr, "2^%d: %.2e of the output, %.2e expected\n", e, measured, expected);
        cr_expect_leq(measured, 1.6 * expected);
        cr_expect_geq(measured, 0.3 * expected);
    }
}
