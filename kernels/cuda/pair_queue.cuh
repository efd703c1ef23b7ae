/*
 * pair_queue.cuh - pair tiles and B on their way to one warp, through shared memory.
 *
 * Registers would do for holding them, but not for waiting: the compiler counts all loads of a loop
 * in one scoreboard, so that the oldest is waited for with the newest. Here each step has a place
 * with a barrier of its own (sm_90: one thread copies the pair tile) or a group of copies (sm_80
 * up, and B: every lane copies).
 *
 *   push   fills the place that was popped before the last pop; a __syncwarp lies between
 *   pop    waits for the oldest
 *
 * A lane's 16 bytes of codes lie 128 t + 16 g from the start of a tile, so four lanes of eight meet
 * in a bank: 16 cycles for 512 bytes, which is a third of what shared memory has to spare.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_PAIR_QUEUE_CUH
#define NUMOE_PAIR_QUEUE_CUH

#include "moe_tile.cuh"

/* Where two pair tiles that are used together begin. */
struct two_pairs {
    const uint8_t *of[2];
};

/* A warp's part of shared memory. */
template <int PLACES, int N>
struct pair_places {
    uint8_t pair[PLACES][2][NUMOE_PAIR_BYTES];
    uint4 b[PLACES][2][N][32]; /* n tiles; a lane's own */
    uint64_t barrier[PLACES];
};

template <int PLACES, int N>
struct pair_queue {
    uint32_t codes, scales, b; /* the lane's in the first place */
    uint32_t shared, barriers; /* of the first place */
    uint32_t back, front, parity;
    bool full; /* PLACES - 1 are on their way whenever pop is called */

    enum { PAIR_BYTES = 2 * NUMOE_PAIR_BYTES, B_BYTES = 2 * 512 * N };

    /* The first `ahead` places are filled by copy_pairs and copy_b, not by push. */
    DI void open(pair_places<PLACES, N> *places, uint32_t ahead)
    {
        const int lane = threadIdx.x & 31;

        shared = shared_address(places);
        codes = shared + lane_codes(lane);
        scales = shared + lane_scales(lane);
        b = shared + PLACES * PAIR_BYTES + 16 * lane;
        barriers = shared + PLACES * (PAIR_BYTES + B_BYTES);
        back = ahead % PLACES;
        front = parity = 0;
        full = ahead == PLACES - 1;
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
            for (int i = 0; i < PLACES; i++)
                barrier_init(barriers + 8 * i);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
#endif
    }

    DI void copy_pairs(uint32_t place, const two_pairs &pairs)
    {
        const uint32_t to = shared + place * PAIR_BYTES;
#if __CUDA_ARCH__ >= 900
        if (elect_one()) {
            barrier_expect(barriers + 8 * place, PAIR_BYTES);
            copy_bulk(to, pairs.of[0], NUMOE_PAIR_BYTES, barriers + 8 * place);
            copy_bulk(to + NUMOE_PAIR_BYTES, pairs.of[1], NUMOE_PAIR_BYTES, barriers + 8 * place);
        }
#else
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t at = to + i * NUMOE_PAIR_BYTES + 16 * lane;
            copy_async(at, pairs.of[i] + 16 * lane, 16);
            copy_async(at + 512, pairs.of[i] + 512 + 16 * lane, 16);
            if (lane < 4)
                copy_async(at + 1024, pairs.of[i] + 1024 + 16 * lane, 16);
        }
#endif
    }

    /* row[n]: the lane's 16 bytes of each n tile at the first tile of the two; zeros for a token or
     * a second tile that is not there. */
    DI void copy_b(uint32_t place, const __nv_bfloat16 *const *row, uint32_t k, const bool *token,
                   bool second)
    {
#pragma unroll
        for (int n = 0; n < N; n++) {
            const uint32_t to = b + place * B_BYTES + 512 * n;
            copy_async(to, row[n] + k, token[n] ? 16 : 0);
            copy_async(to + 512 * N, row[n] + k + (second ? 32 : 0), token[n] && second ? 16 : 0);
        }
    }

    DI void push(const two_pairs &pairs, const __nv_bfloat16 *const *row, uint32_t k,
                 const bool *token, bool second)
    {
        copy_pairs(back, pairs);
        copy_b(back, row, k, token, second);
        back = back + 1 == PLACES ? 0 : back + 1;
    }

    /* After each push or what would have been one. */
    DI void pushed()
    {
        copy_commit();
    }

    /* The oldest is there. */
    DI void wait() const
    {
        if (full)
            copy_wait<PLACES - 2>();
        else
            copy_wait<0>();
#if __CUDA_ARCH__ >= 900
        barrier_wait(barriers + 8 * front, parity);
#else
        __syncwarp();
#endif
    }

    /* Tile i of the oldest. */
    DI pair_tile tile(int i, uint4 *of_b) const
    {
        const uint32_t from = front * PAIR_BYTES + i * NUMOE_PAIR_BYTES;
        pair_tile p;
        p.a = load_shared_vector(codes + from);
        p.b = load_shared_vector(codes + from + 512);
        p.scale_a = load_shared_word(scales + from);
        p.scale_b = load_shared_word(scales + from + 32);
#pragma unroll
        for (int n = 0; n < N; n++)
            of_b[n] = load_shared_vector(b + front * B_BYTES + 512 * (i * N + n));
        return p;
    }

    DI void pop()
    {
        front = front + 1 == PLACES ? 0 : front + 1;
        parity ^= front == 0;
    }
};

#endif
