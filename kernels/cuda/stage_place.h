/*
 * stage_place.h - where a B fragment lies in shared memory. For the kernels, and for the test that
 * enumerates its banks.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_STAGE_PLACE_H
#define NUMOE_STAGE_PLACE_H

#ifdef __CUDACC__
#define NUMOE_BOTH_SIDES __host__ __device__ __forceinline__
#else
#define NUMOE_BOTH_SIDES static inline
#endif

/**
 * Byte offset, within a stage of four k tiles, of the 16 bytes that hold octet t of k tile `tile`
 * for token `row`. Piece (row / 8, tile) is 512 bytes; in it lane (g = row % 8, t) has place 4g +
 * t, with bit 2 flipped in odd tiles, so that neither the eight lanes of an asynchronous store (two
 * tiles of one row) nor those of a load (two rows of one tile) meet in a bank.
 */
NUMOE_BOTH_SIDES unsigned numoe_stage_place(unsigned row, unsigned tile, unsigned t)
{
    return ((row >> 3) * 4 + tile) * 512 + 16 * ((4 * (row & 7) + t) ^ (4 * (tile & 1)));
}

#endif
