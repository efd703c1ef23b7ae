/*
 * choose_kernels.h - which of two kernel sets of the same arithmetic is faster here.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CHOOSE_KERNELS_H
#define NUMOE_CHOOSE_KERNELS_H

#include "numoe_kernels.h"
#include "numoe_pool.h"

struct numoe_choice {
    const struct numoe_kernels *chosen;
    double rates[2]; /* calls a second of all workers together; 0: not measured */
};

/*
 * Time two sets in the many-token form on all workers at once, for about `ns` each after half as
 * long to settle: clocks that fall under wide vectors, units that are shared or split, count as
 * they do in a layer. Between equals (2 %), or without memory for it, the first is chosen.
 */
void numoe_choose_kernels(struct numoe_pool *pool, const struct numoe_kernels *first,
                          const struct numoe_kernels *second, uint64_t ns,
                          struct numoe_choice *choice);

#endif
