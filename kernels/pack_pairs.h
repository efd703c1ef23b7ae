/*
 * pack_pairs.h - the fast form of packing: up to four pair tiles that lie whole in their matrices.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_PACK_PAIRS_H
#define NUMOE_PACK_PAIRS_H

#include "numoe_kernels.h"

enum { PACK_PAIRS = 4 }; /* groups packed at once: 64 bytes of codes of each row, a cache line */

enum { SCALE_ONE = 127, SCALE_NAN = 255, SCALE_FOLD_MIN = 2, SCALE_FOLD_MAX = 251 };

/* The first row and group of 32 rows x count groups of a matrix. */
struct numoe_pack_side {
    const uint8_t *codes, *scales;
    uint64_t code_stride, code_step, scale_stride, scale_step;
    uint64_t ahead; /* bytes from codes of a row to those that are packed soon after, which are
                       fetched; 0: nothing is */
};

/* Side 0 is tile A of each pair, side 1 tile B. */
struct numoe_pack_pairs {
    struct numoe_pack_side side[2];
    enum numoe_nibbles nibbles;
    unsigned count; /* groups, 1 .. PACK_PAIRS */
    uint8_t *out;   /* the first pair tile, 64-byte aligned */
    uint64_t stride;
};

enum numoe_packed {
    NUMOE_PACKED,
    NUMOE_PACKED_EXTREME, /* a code other than zero has a scale outside SCALE_FOLD_MIN..MAX */
    NUMOE_NOT_PACKED,     /* a scale is SCALE_NAN; nothing was written */
};

/* Written past the caches; numoe_pack_done before another thread may read. */
enum numoe_packed numoe_pack_pairs_avx2(const struct numoe_pack_pairs *pairs);
void numoe_pack_done_avx2(void);

#endif
