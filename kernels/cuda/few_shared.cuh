/*
 * few_shared.cuh - the few-token form: what a block has in shared memory.
 *
 * A block is one warp that copies (few_copier.cuh) and CONSUMERS that compute (moe_few.cu). Between
 * them is a ring of stages, each STEP_TILES pair tiles and the B of their k, and one of items.
 *
 *   full[s]   the copier's 32 lanes have each had their copies arrive, and lane 0 has said so
 *   empty[s]  every consumer warp has taken its part of stage s into registers
 *
 * Both are waited for by parity: the copier begins with 1 (the stages are empty), consumers with 0.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_FEW_SHARED_CUH
#define NUMOE_FEW_SHARED_CUH

#include "moe_tile.cuh"
#include "stage_place.h"

enum {
    CONSUMERS = 4,
    CONSUMING = 32 * CONSUMERS,
    FEW_THREADS = CONSUMING + 32,
    STEP_TILES = 2 * CONSUMERS,
    FEW_TOKENS = 8, /* of a chunk, at most */
    B_BYTES = 64 * STEP_TILES, /* of a token in a stage */
    /* Entries that a block sorts by itself. */
    LOCAL_PAIRS = 32,
    /* Tokens whose parts the form sums itself; with more the fences cost more than a kernel. */
    FUSED_TOKENS = 4
};

/* What x and h are kept times, as moe_tile.cuh wants them. */
#define RAISED 0x1p64f

struct stage {
    uint8_t codes[STEP_TILES][1024]; /* a tile at numoe_code_place() */
    uint8_t scales[STEP_TILES][64];
    uint8_t b[FEW_TOKENS][B_BYTES]; /* a token's 16 bytes at b_place() */
};

/* Byte offset of piece p of a token's row of B: neither eight lanes that store (one row) nor eight
 * that load (two rows) meet in a bank. */
DI uint32_t b_place(uint32_t token, uint32_t p)
{
    return B_BYTES * token + 16 * (p ^ 4 * (token & 1));
}

/* What consumers are told of an item; count == 0: there is none. */
struct item {
    int expert, count;
    uint32_t unit, chunk;
    uint32_t slice_at; /* gate_up: of the slice */
    bool down;
    int pair[FEW_TOKENS];
    float routing[FEW_TOKENS];
};

template <int STAGES>
struct few_shared {
    /* An item may have one step. When the copier tells of item i, every consumer has taken the
     * stage of item i - STAGES - 1, so it is done with the one before: that place may be used. */
    enum { ITEMS = STAGES + 2 };
    stage stages[STAGES];
    float4 sums[CONSUMERS / 2][4][32]; /* of two warps, [tile A, B][m][lane] */
    item items[ITEMS];
    chunk chunks[LOCAL_PAIRS];
    int sorted[LOCAL_PAIRS];
    uint32_t valid[FUSED_TOKENS];          /* bit j: slot j of the token is not skipped */
    uint32_t most[CONSUMERS][FEW_TOKENS]; /* bits of the largest of a warp's rows of h */
    bool complete[FEW_TOKENS];
    uint64_t full[STAGES], empty[STAGES];
};

/* Where in a ring of stages: the next, and the parity of its barrier. */
template <int STAGES>
struct ring_place {
    uint32_t stage, parity;

    DI void next()
    {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/* A consumer warp has taken its part of a stage. One lane says so for all: compute-sanitizer's
 * racecheck does not see that __syncwarp() orders the others' loads before it, and reports them
 * unless it is told so by every lane, which costs one per cent. */
#ifdef NUMOE_EVERY_LANE_ARRIVES
enum { EMPTY_ARRIVALS = CONSUMING };
#else
enum { EMPTY_ARRIVALS = CONSUMERS };
#endif

DI void say_empty(uint32_t barrier)
{
    __syncwarp();
#ifndef NUMOE_EVERY_LANE_ARRIVES
    if ((threadIdx.x & 31) == 0)
#endif
        barrier_arrive(barrier);
}

DI uint32_t few_units(const call &c)
{
    return (c.hidden_tiles + 1) / 2;
}

DI uint32_t few_steps(const call &c, bool down)
{
    return ((down ? c.slices : c.hidden_tiles) + STEP_TILES - 1) / STEP_TILES;
}

#endif
