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
 * Byte offset, within a stage of `tiles` k tiles, of the 16 bytes that hold octet t of k tile
 * `tile` for token `row`. Piece (row / 8, tile) is 512 bytes; in it lane (g = row % 8, t) has place
 * 4g + t, with bit 2 flipped in odd tiles, so that neither the eight lanes of an asynchronous store
 * (two tiles of one row) nor those of a load (two rows of one tile) meet in a bank.
 */
NUMOE_BOTH_SIDES unsigned numoe_stage_place(unsigned row, unsigned tile, unsigned t, unsigned tiles)
{
    return ((row >> 3) * tiles + tile) * 512 + 16 * ((4 * (row & 7) + t) ^ (4 * (tile & 1)));
}

/**
 * Byte offset of the 16 bytes of octet t of rows g, g + 8, g + 16 and g + 24 in a tile of codes in
 * shared memory: neither eight lanes that load (two g, four t) nor eight that store (eight g of one
 * t) meet in a bank, and the 32 bytes of a sector of global memory stay together, without which an
 * asynchronous copy would fetch it twice.
 */
NUMOE_BOTH_SIDES unsigned numoe_code_place(unsigned g, unsigned t)
{
    return 128 * t + 32 * (g >> 1 ^ t) + 16 * (g & 1);
}

/**
 * Where k (0..31) of a k tile stands in rows of x and h for wgmma: a lane's word of octet t has its
 * k 4 step .. 4 step + 3 in product `step`, where wgmma takes them from places 2t, 2t + 1, 2t + 8
 * and 2t + 9 of 16.
 */
NUMOE_BOTH_SIDES unsigned numoe_wgmma_place(unsigned k)
{
    const unsigned t = k >> 3, step = k >> 2 & 1, half = k >> 1 & 1;
    return 16 * step + 8 * half + 2 * t + (k & 1);
}

/** The k that stands at a place: the inverse of numoe_wgmma_place. */
NUMOE_BOTH_SIDES unsigned numoe_wgmma_row(unsigned place)
{
    return 8 * (place >> 1 & 3) + 4 * (place >> 4) + 2 * (place >> 3 & 1) + (place & 1);
}

#endif
