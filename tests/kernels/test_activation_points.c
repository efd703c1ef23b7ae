/* numoe_activation_reference at points worked out by hand, and what numoe_activation_check refuses.
 */
#include "numoe_kernels.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <string.h>

static const struct numoe_activation silu = {.kind = NUMOE_SILU};
static const struct numoe_activation clamped = {.kind = NUMOE_SILU_CLAMPED, .limit = 10};
static const struct numoe_activation oai = {.kind = NUMOE_SWIGLU_OAI, .limit = 7, .alpha = 1.702f};
static const struct numoe_activation situ = {.kind = NUMOE_SITU, .gate_cap = 4, .up_cap = 25};

static void expect(const struct numoe_activation *activation, double gate, double up, double want,
                   double tolerance)
{
    double got = numoe_activation_reference(activation, gate, up);

    cr_expect(fabs(got - want) <= tolerance, "kind %d of (%g, %g) is %.12f, not %.12f",
              (int)activation->kind, gate, up, got, want);
}

Test(activation_points, silu_clamped_at_10)
{
    expect(&clamped, 1, 1, 0.731058578630, 1e-9);
    expect(&clamped, -1, 1, -0.268941421370, 1e-9);
    expect(&clamped, 0.5, -3, -0.933688996802, 1e-9);
    expect(&clamped, 20, -20, -99.995460213130, 1e-9);
}

/* alpha is a float, and 1.702f is 2.2e-8 above 1.702: that moves these points, which are worked out
 * for 1.702 itself, by up to 5.8e-9. The next test has the float's own values to 1e-9. */
Test(activation_points, swiglu_oai_1702_7)
{
    expect(&oai, 1, 1, 1.691591531866, 6e-9);
    expect(&oai, -1, 1, -0.308408468134, 6e-9);
    expect(&oai, 0.5, -3, -0.700776873213, 6e-9);
    expect(&oai, 20, -20, -41.999718769820, 6e-9);
}

Test(activation_points, swiglu_oai_with_the_float_alpha)
{
    const double points[][2] = {{1, 1}, {-1, 1}, {0.5, -3}, {20, -20}, {9, -9}, {-30, 2}};

    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++) {
        double g = fmin(points[i][0], 7), u = fmax(-7, fmin(points[i][1], 7));

        expect(&oai, points[i][0], points[i][1], g / (1 + exp(-(double)1.702f * g)) * (u + 1),
               1e-9);
    }
}

Test(activation_points, situ_4_25)
{
    expect(&situ, 1, 1, 0.715817828075, 1e-9);
    expect(&situ, -1, 1, -0.263334662573, 1e-9);
    expect(&situ, 0.5, -3, -0.924423258058, 1e-9);
    expect(&situ, 10, 100, 98.590781553864, 1e-9);
    expect(&situ, 4, 25, 56.959319511084, 1e-9);
    expect(&situ, 8, 50, 92.9038, 5e-5);
}

Test(activation_points, situ_without_an_up_cap_leaves_up_alone)
{
    const struct numoe_activation gate_only = {.kind = NUMOE_SITU, .gate_cap = 4};

    expect(&gate_only, 1, 1000, 4 * tanh(0.25) / (1 + exp(-1)) * 1000, 1e-9);
}

Test(activation_points, clamp_of_the_gate_is_from_above_only)
{
    expect(&clamped, 20, -30, -99.9955, 5e-5);
    expect(&silu, 20, -30, -600, 1e-4);
    expect(&oai, 9, -9, -41.9997, 5e-5);
    expect(&clamped, -30, 1, -30 / (1 + exp(30)), 1e-20);
    expect(&oai, -30, 1, -30 / (1 + exp(30 * (double)1.702f)) * 2, 1e-20);
    /* -30 clamped to the limit would be thirty thousand times larger. */
    cr_expect(fabs(numoe_activation_reference(&clamped, -30, 1)) < 1e-11);
}

Test(activation_points, swiglu_is_not_situ_and_a_tiny_clamp_stays_a_clamp)
{
    const struct numoe_activation tiny = {.kind = NUMOE_SILU_CLAMPED, .limit = 0.03125f};

    expect(&silu, 8, 50, 399.87, 5e-3);
    expect(&tiny, 8, 50, 0.03125 / (1 + exp(-0.03125)) * 0.03125, 1e-15);
    expect(&tiny, -8, -50, -8 / (1 + exp(8)) * -0.03125, 1e-15);
}

Test(activation_points, far_ends_are_finite_and_signed_right)
{
    const double far = 3e38;
    const struct numoe_activation *all[] = {&silu, &clamped, &oai, &situ};

    for (size_t i = 0; i < 4; i++) {
        double down = numoe_activation_reference(all[i], -far, 1);

        cr_expect(down <= 0 && down > -1e-30, "kind %d of (-3e38, 1) is %g", (int)all[i]->kind,
                  down);
        cr_expect_eq(numoe_activation_reference(all[i], 0, 1), 0.0);
    }
    expect(&situ, far, far, 100, 1e-9);
    expect(&situ, far, -far, -100, 1e-9);
    expect(&clamped, far, far, 10 / (1 + exp(-10)) * 10, 1e-9);
}

Test(activation_points, nan_is_not_clamped_away)
{
    const struct numoe_activation *all[] = {&silu, &clamped, &oai, &situ};

    for (size_t i = 0; i < 4; i++) {
        cr_expect(isnan(numoe_activation_reference(all[i], NAN, 1)), "kind %d, gate NaN",
                  (int)all[i]->kind);
        cr_expect(isnan(numoe_activation_reference(all[i], 1, NAN)), "kind %d, up NaN",
                  (int)all[i]->kind);
    }
}

/* The relative error near zero, where 2 sigmoid(2x) - 1 would cancel. */
Test(activation_points, situ_keeps_its_digits_near_zero)
{
    for (double v = 1e-3; v > 1e-30; v /= 10) {
        double want = v * v / 2 * (1 + v / 2);
        double got = numoe_activation_reference(&situ, v, v);

        cr_expect(fabs(got / want - 1) < 1e-6, "situ(%g, %g) is %g, not %g", v, v, got, want);
    }
}

static void refused(struct numoe_activation activation, const char *name)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_expect_eq(numoe_activation_check(&activation, &error), -EINVAL, "%s accepted", name);
    cr_expect_eq(error.code, -EINVAL);
    cr_expect(strstr(error.message, name) || strstr(error.where, name),
              "the message does not name %s: \"%s\" \"%s\"", name, error.where, error.message);
    cr_expect_eq(numoe_activation_check(&activation, NULL), -EINVAL);
}

Test(activation_check, refuses_what_cannot_be_computed_and_names_the_parameter)
{
    refused((struct numoe_activation){.kind = NUMOE_SILU_CLAMPED, .limit = 0}, "limit");
    refused((struct numoe_activation){.kind = NUMOE_SILU_CLAMPED, .limit = -1}, "limit");
    refused((struct numoe_activation){.kind = NUMOE_SILU_CLAMPED, .limit = NAN}, "limit");
    refused((struct numoe_activation){.kind = NUMOE_SWIGLU_OAI, .limit = 0, .alpha = 1}, "limit");
    refused((struct numoe_activation){.kind = NUMOE_SWIGLU_OAI, .limit = 7, .alpha = NAN}, "alpha");
    refused((struct numoe_activation){.kind = NUMOE_SWIGLU_OAI, .limit = 7, .alpha = INFINITY},
            "alpha");
    refused((struct numoe_activation){.kind = NUMOE_SITU, .gate_cap = 0, .up_cap = 25}, "gate_cap");
    refused((struct numoe_activation){.kind = NUMOE_SITU, .gate_cap = -4, .up_cap = 25},
            "gate_cap");
    refused((struct numoe_activation){.kind = NUMOE_SITU, .gate_cap = NAN, .up_cap = 25},
            "gate_cap");
    refused((struct numoe_activation){.kind = NUMOE_SITU, .gate_cap = 4, .up_cap = -25}, "up_cap");
    refused((struct numoe_activation){.kind = NUMOE_SITU, .gate_cap = 4, .up_cap = NAN}, "up_cap");
    refused((struct numoe_activation){.kind = (enum numoe_activation_kind)0}, "kind");
    refused((struct numoe_activation){.kind = (enum numoe_activation_kind)10}, "kind");
}

Test(activation_check, accepts_the_known_ones)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    const struct numoe_activation tiny = {.kind = NUMOE_SILU_CLAMPED, .limit = 0.03125f};
    const struct numoe_activation gate_only = {.kind = NUMOE_SITU, .gate_cap = 4};
    const struct numoe_activation *all[] = {&silu, &clamped, &oai, &situ, &tiny, &gate_only};

    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        cr_expect_eq(numoe_activation_check(all[i], &error), 0, "%zu: %s", i, error.message);
    cr_expect_eq(error.code, 0);
}
