/* Activations in double precision: the oracle. SPDX-License-Identifier: Apache-2.0 */
#include "numoe_kernels.h"

#include <errno.h>
#include <math.h>

int numoe_activation_check(const struct numoe_activation *a, struct numoe_error *error)
{
    switch (a->kind) {
    case NUMOE_SILU:
        return 0;
    case NUMOE_SWIGLU_OAI:
        if (!isfinite(a->alpha))
            return numoe_error_set(error, -EINVAL, "activation", "alpha is not finite");
        /* fall through */
    case NUMOE_SILU_CLAMPED:
        if (!(a->limit > 0) || !isfinite(a->limit))
            return numoe_error_set(error, -EINVAL, "activation",
                                   "limit must be positive and finite, it is %g", (double)a->limit);
        return 0;
    case NUMOE_SITU:
        if (!(a->gate_cap > 0) || !isfinite(a->gate_cap))
            return numoe_error_set(error, -EINVAL, "activation",
                                   "gate_cap must be positive and finite, it is %g",
                                   (double)a->gate_cap);
        if (!(a->up_cap >= 0) || !isfinite(a->up_cap))
            return numoe_error_set(error, -EINVAL, "activation",
                                   "up_cap must be 0 (none) or positive and finite, it is %g",
                                   (double)a->up_cap);
        return 0;
    }
    return numoe_error_set(error, -EINVAL, "activation", "kind %d is not known", (int)a->kind);
}

static double sigmoid(double v)
{
    return 1.0 / (1.0 + exp(-v));
}

/* Clamps that let a NaN through. */
static double at_most(double v, double limit)
{
    return v > limit ? limit : v;
}

static double within(double v, double limit)
{
    return v > limit ? limit : v < -limit ? -limit : v;
}

double numoe_activation_reference(const struct numoe_activation *a, double gate, double up)
{
    const double limit = (double)a->limit, alpha = (double)a->alpha;
    const double gate_cap = (double)a->gate_cap, up_cap = (double)a->up_cap;

    switch (a->kind) {
    case NUMOE_SILU:
        return gate * sigmoid(gate) * up;
    case NUMOE_SILU_CLAMPED:
        gate = at_most(gate, limit);
        return gate * sigmoid(gate) * within(up, limit);
    case NUMOE_SWIGLU_OAI:
        gate = at_most(gate, limit);
        return gate * sigmoid(alpha * gate) * (within(up, limit) + 1.0);
    case NUMOE_SITU:
        return gate_cap * tanh(gate / gate_cap) * sigmoid(gate) *
               (up_cap > 0 ? up_cap * tanh(up / up_cap) : up);
    }
    return (double)NAN;
}
