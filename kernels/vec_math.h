/*
 * vec_math.h - exp, sigmoid, tanh and the activations on vectors. Include after a vec_*.h.
 *
 * exp(x) = 2^n e^f, n = round(x / ln 2), |f| <= ln(2) / 2: a polynomial of degree 6, relative
 * error under 2^-22. tanh(x) = 1 - 2 / (1 + exp(2|x|)) with the sign of x, which cancels below
 * |x| = 0.55: there an odd polynomial. A NaN passes through everything.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_VEC_MATH_H
#define NUMOE_VEC_MATH_H

#include "numoe_kernels.h"

INL vf vf_exp(vf x)
{
    const vf clamped = vf_min(vf_set(88.5f), vf_max(vf_set(-87.0f), x));
    const vf n = vf_round(clamped * vf_set(1.44269504088896341f));
    vf f = vf_fma(n, vf_set(-0.693359375f), clamped);
    f = vf_fma(n, vf_set(2.12194440e-4f), f);
    vf p = vf_set(1.9875691500e-4f);
    p = vf_fma(p, f, vf_set(1.3981999507e-3f));
    p = vf_fma(p, f, vf_set(8.3334519073e-3f));
    p = vf_fma(p, f, vf_set(4.1665795894e-2f));
    p = vf_fma(p, f, vf_set(1.6666665459e-1f));
    p = vf_fma(p, f, vf_set(5.0000001201e-1f));
    p = vf_fma(p * f, f, f) + vf_set(1.0f);
    return vf_times_power(p, n);
}

INL vf vf_sigmoid(vf x)
{
    return vf_set(1.0f) / (vf_set(1.0f) + vf_exp(vf_set(0.0f) - x));
}

INL vf vf_tanh(vf x)
{
    const vf square = x * x;
    vf p = vf_set(-5.70498872745e-3f);
    p = vf_fma(p, square, vf_set(2.06390887954e-2f));
    p = vf_fma(p, square, vf_set(-5.37397155531e-2f));
    p = vf_fma(p, square, vf_set(1.33314422036e-1f));
    p = vf_fma(p, square, vf_set(-3.33332819422e-1f));
    const vf small = vf_fma(p * square, x, x);
    const vf e = vf_exp(vf_abs(x) + vf_abs(x));
    const vf large = vf_set(1.0f) - vf_set(2.0f) / (e + vf_set(1.0f));
    return vf_where_small(x, 0.625f, small, vf_copy_sign(vf_abs(large), x));
}

INL vf vf_activation(const struct numoe_activation *a, vf gate, vf up)
{
    switch (a->kind) {
    case NUMOE_SILU:
        break;
    case NUMOE_SILU_CLAMPED:
        gate = vf_min(vf_set(a->limit), gate);
        up = vf_max(vf_set(-a->limit), vf_min(vf_set(a->limit), up));
        break;
    case NUMOE_SWIGLU_OAI:
        gate = vf_min(vf_set(a->limit), gate);
        up = vf_max(vf_set(-a->limit), vf_min(vf_set(a->limit), up));
        return gate * vf_sigmoid(vf_set(a->alpha) * gate) * (up + vf_set(1.0f));
    case NUMOE_SITU:
        if (a->up_cap > 0)
            up = vf_set(a->up_cap) * vf_tanh(up / vf_set(a->up_cap));
        return vf_set(a->gate_cap) * vf_tanh(gate / vf_set(a->gate_cap)) * vf_sigmoid(gate) * up;
    }
    return gate * vf_sigmoid(gate) * up;
}

#endif
