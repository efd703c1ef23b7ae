/*
 * few_copier.cuh - the few-token form: the warp that takes items and copies what they need.
 *
 * Items are numbered: slices of all chunks (gate_up), then 64 rows each of all chunks (down). They
 * are taken by a counter, so whatever a taken item waits for is being computed by a block that
 * runs: down waits for the h of its chunk. Meanwhile its weights are copied as far ahead as there
 * is room. The next item is looked up while the last steps of this one are copied.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_FEW_COPIER_CUH
#define NUMOE_FEW_COPIER_CUH

#include "few_shared.cuh"

/* An item as the copier has it; what is said to be a lane's differs between lanes. */
struct few_work {
    chunk ch;
    uint32_t chunk_index, unit;
    bool down;
    int pair;          /* the lane's token */
    float routing;     /* ... */
    uint32_t row;      /* ... of x or h, in units of 16 bytes */
    uint32_t slice_at; /* gate_up: of the slice */
    uint32_t place;    /* the lane's pair tile of 32, in units of 64 bytes from the weights */
    uint32_t h_slices; /* down: of the chunk's h, when last seen */
};

/* Sort the entries as moe_route.cu does, a lane an entry; returns the number of chunks. Reads what
 * was there before the kernel before. */
template <int STAGES>
DI uint32_t sort_locally(const call &c, few_shared<STAGES> &shared)
{
    const uint32_t lane = threadIdx.x & 31, pairs = c.tokens * c.top_k;
    const int expert = lane < pairs ? pair_expert(c, lane) : -1;
    const uint32_t same = __match_any_sync(~0u, expert);
    const int rank = __popc(same & ((1u << lane) - 1)), count = __popc(same);
    const bool first = expert >= 0 && rank == 0;
    const int own_pairs = first ? count : 0, own_chunks = (own_pairs + FEW_TOKENS - 1) / FEW_TOKENS;
    int to_pairs = own_pairs, to_chunks = own_chunks;

#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int a = __shfl_up_sync(~0u, to_pairs, step), b = __shfl_up_sync(~0u, to_chunks, step);
        to_pairs += lane >= static_cast<uint32_t>(step) ? a : 0;
        to_chunks += lane >= static_cast<uint32_t>(step) ? b : 0;
    }
    const int begin = __shfl_sync(~0u, to_pairs - own_pairs, __ffs(static_cast<int>(same)) - 1);
    if (expert >= 0)
        shared.sorted[begin + rank] = static_cast<int>(lane);
    for (int i = 0; i < own_chunks; i++) {
        const int from = count * i / own_chunks, to = count * (i + 1) / own_chunks;
        shared.chunks[to_chunks - own_chunks + i] = {expert, begin + from, to - from, 0};
    }
    const uint32_t valid = __ballot_sync(~0u, expert >= 0);
    if (lane < c.tokens)
        shared.valid[lane] = valid >> lane * c.top_k & ((1ull << c.top_k) - 1);
    __syncwarp();
    return __shfl_sync(~0u, to_chunks, 31);
}

template <int STAGES>
struct few_copier {
    const call &c;
    few_shared<STAGES> &shared;
    const uint32_t lane;
    uint32_t chunks, gates, items; /* items: gates and what follows */
    few_work now, next;
    uint32_t ticket; /* of the next */
    uint32_t found;  /* of the next: its number, its chunk, all */

    enum { LOOKUPS = 3 };

    DI few_copier(const call &of, few_shared<STAGES> &in) : c(of), shared(in), lane(threadIdx.x & 31)
    {
    }

    /* ---- items -----------------------------------------------------------------------------
     */

    DI void take()
    {
        if (lane == 0)
            ticket = atomicAdd(c.next_item, 1);
    }

    DI void find_chunk()
    {
        ticket = __shfl_sync(~0u, ticket, 0);
        if (ticket >= items)
            return;
        next.down = ticket >= gates;
        const uint32_t in = next.down ? ticket - gates : ticket;
        const uint32_t units = next.down ? few_units(c) : c.slices;
        next.chunk_index = in / units;
        next.unit = in % units;
        next.ch = c.local ? shared.chunks[next.chunk_index] : c.chunks[next.chunk_index];
    }

    /* The lane's tile of those from `first`; behind the last tile the last again. */
    DI uint32_t place_of(const few_work &w, uint32_t first) const
    {
        const uint32_t k_tiles = w.down ? c.slices : c.hidden_tiles;
        const uint32_t k = first + lane < k_tiles ? first + lane : k_tiles - 1;

        if (!w.down)
            return w.slice_at + NUMOE_PAIR_BYTES / 64 * k;
        return c.slice_at[static_cast<uint64_t>(w.ch.expert) * c.slices + k] +
               c.down_offset / 64 + NUMOE_PAIR_BYTES / 64 * w.unit;
    }

    DI void find_rest()
    {
        if (ticket >= items)
            return;
        const uint32_t token = lane < static_cast<uint32_t>(next.ch.count) ? lane : 0;
        const int at = next.ch.first + static_cast<int>(token);

        next.pair = c.local ? shared.sorted[at] : c.sorted[at];
        next.slice_at =
            next.down ? 0
                      : c.slice_at[static_cast<uint64_t>(next.ch.expert) * c.slices + next.unit];
        next.h_slices = next.down ? load_acquire(&c.h_slices[next.chunk_index]) : 0;
        next.place = place_of(next, 0);
        next.row = next.down ? static_cast<uint32_t>(next.pair) * (4 * c.slices)
                             : next.pair / c.top_k * static_cast<uint32_t>(c.x_stride / 8);
        next.routing = next.down ? c.routing[next.pair] : 0.0f;
    }

    DI void find_more()
    {
        if (found == 0)
            take();
        else if (found == 1)
            find_chunk();
        else
            find_rest();
        found++;
    }

    DI void tell(uint32_t turn) const
    {
        item &to = shared.items[turn];

        if (lane == 0) {
            to.expert = now.ch.expert;
            to.count = now.ch.count;
            to.unit = now.unit;
            to.chunk = now.chunk_index;
            to.slice_at = now.slice_at;
            to.down = now.down;
        }
        if (lane < static_cast<uint32_t>(now.ch.count)) {
            to.pair[lane] = now.pair;
            to.routing[lane] = now.routing;
        }
        __syncwarp();
    }

    /* ---- copies ----------------------------------------------------------------------------
     */

    DI void copy_weights(uint32_t step, uint32_t to) const
    {
        const uint32_t first = step % 4 * STEP_TILES;
        const uint8_t *const base = c.weights + 16 * lane;
        const uint32_t codes = to + numoe_code_place(lane & 7, lane >> 3);

#pragma unroll
        for (uint32_t i = 0; i < STEP_TILES; i++) {
            const uint8_t *pair = base + uint64_t{__shfl_sync(~0u, now.place, first + i)} * 64;
            copy_async(codes + 1024 * i, pair, 16);
            copy_async(codes + 1024 * i + 512, pair + 512, 16);
        }
        copy_async(to + 1024 * STEP_TILES + 16 * lane,
                   c.weights + uint64_t{__shfl_sync(~0u, now.place, first + lane / 4)} * 64 + 1024 +
                       16 * (lane & 3),
                   16);
    }

    /* Zeros behind the last tile; rows of no token stay as they are, columns that nobody reads. */
    DI void copy_b(uint32_t step, uint32_t to) const
    {
        const uint8_t *const base =
            reinterpret_cast<const uint8_t *>(now.down ? c.h : c.x) +
            (uint64_t{step} * STEP_TILES * 64 + 16 * lane);
        const uint32_t k_tiles = now.down ? c.slices : c.hidden_tiles;
        const int bytes = step * STEP_TILES + lane / 4 < k_tiles ? 16 : 0;

#pragma unroll 4
        for (int i = 0; i < now.ch.count; i++)
            copy_async(to + 1088 * STEP_TILES + b_place(i, lane),
                       base + uint64_t{__shfl_sync(~0u, now.row, i)} * 16, bytes);
    }

    DI void say_full(uint32_t stage) const
    {
        const uint32_t barrier = shared_address(&shared.full[stage]);

        barrier_arrive_copied(barrier);
        __syncwarp();
        if (lane == 0)
            barrier_arrive(barrier);
    }

    /* All of the h of this item's chunk has been stored. */
    DI bool h_there()
    {
        if (__any_sync(~0u, now.h_slices != c.slices))
            now.h_slices = load_acquire(&c.h_slices[now.chunk_index]);
        return __all_sync(~0u, now.h_slices == c.slices);
    }

    /* One item; at: where it begins in the ring. */
    DI void copy_item(ring_place<STAGES> &at)
    {
        const uint32_t steps = few_steps(c, now.down), stages = shared_address(shared.stages);
        uint32_t behind = 0, stage = at.stage; /* steps that have their B, and the next's stage */
        uint32_t later = 0;
        bool wait = now.down;

        found = 0;
        for (uint32_t step = 0; step < steps; step++) {
            if (step % 4 == 0) {
                if (step)
                    now.place = later;
                if (step + 4 < steps)
                    later = place_of(now, STEP_TILES * (step + 4));
            }
            barrier_wait(shared_address(&shared.empty[at.stage]), at.parity);
            copy_weights(step, stages + at.stage * sizeof(::stage));
            at.next();
            if (wait && !h_there()) {
                if (step + 1 < steps && step + 1 < STAGES)
                    continue;
                while (!h_there())
                    __nanosleep(20);
            }
            wait = false;
            for (; behind <= step; behind++) {
                copy_b(behind, stages + stage * sizeof(::stage));
                say_full(stage);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
            }
            /* late, so that blocks end together, but not waiting for one another */
            if (found < LOOKUPS && steps - step <= LOOKUPS + 1 - found)
                find_more();
        }
        while (found < LOOKUPS)
            find_more();
    }

    /* All items that the block gets. */
    DI void run()
    {
        ring_place<STAGES> at = {0, 1};
        uint32_t turn = 0;

        if (c.local)
            chunks = sort_locally(c, shared);
        wait_for_previous();
        let_next_start();
        if (!c.local)
            chunks = *c.chunk_count;
        gates = chunks * c.slices;
        items = gates + chunks * few_units(c);
        for (found = 0; found < LOOKUPS;)
            find_more();
        for (; ticket < items; turn = turn + 1 == few_shared<STAGES>::ITEMS ? 0 : turn + 1) {
            now = next;
            tell(turn);
            copy_item(at);
        }
        barrier_wait(shared_address(&shared.empty[at.stage]), at.parity);
        if (lane == 0)
            shared.items[turn].count = 0;
        __syncwarp();
        say_full(at.stage);
        /* not gone before the others are: tools take the barriers of a block's part for broken */
        barrier_wait(shared_address(&shared.empty[at.stage]), at.parity ^ 1);
    }
};

#endif
