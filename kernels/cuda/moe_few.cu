/*
 * Expert FFN for few tokens of an expert, MXFP4 weights, bf16 activations, mma.sync m16n8k16.
 *
 *   gate_up   h[pair] = act(W1 x + b1, W3 x + b3)     item: a slice of one expert, 32 rows of each
 *   down      part[pair] = routing * (W2 h + b2)       item: 64 rows of one expert
 *
 * The four warps of a block take the k tiles of an item two by two in turn: the block reads one
 * stream. Their sums meet in shared memory. A block goes from item to item; the weights and B of
 * the next PLACES - 1 steps are always on their way (pair_queue.cuh), those of the next item
 * included, so that reading does not pause where an item ends. Items are handed out as blocks get
 * to them: two each to begin with, then by a counter.
 *
 * Bound by the pipe of shifts and logic, which decodes, and nearly as much by reading weights.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "moe_kernels.h"
#include "pair_queue.cuh"

namespace
{

enum { WARPS = 4, THREADS = 32 * WARPS };

/* ---- items ------------------------------------------------------------------------------------
 */

/* down: lanes 2j and 2j + 1 get the places of the two tiles of the warp's step i + j. */
DI uint32_t look_up(const call &c, int expert, uint32_t i, uint32_t steps)
{
    const uint32_t lane = threadIdx.x & 31, step = i + lane / 2;
    const uint32_t slice = 2 * ((threadIdx.x >> 5) + WARPS * step) + (lane & 1);

    if (step >= steps)
        return 0;
    return c.slice_at[static_cast<uint64_t>(expert) * c.slices +
                      (slice < c.slices ? slice : c.slices - 1)];
}

/* What a warp needs to walk an item. N: n tiles of 8 tokens. */
template <bool DOWN, int N>
struct item {
    chunk ch;
    uint32_t unit;
    uint32_t at;                 /* slice_at: of the slice (gate_up); of the lane's step (down) */
    const __nv_bfloat16 *row[N]; /* the lane's token of each n tile at its octet */
    bool token[N];               /* ... if there is one */

    DI void open(const call &c, const chunk &of, uint32_t unit_of, uint32_t steps)
    {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

        ch = of;
        unit = unit_of;
        at = !DOWN ? c.slice_at[static_cast<uint64_t>(ch.expert) * c.slices + unit]
                   : look_up(c, ch.expert, 0, steps);
#pragma unroll
        for (int n = 0; n < N; n++) {
            token[n] = 8 * n + g < ch.count;
            const int pair = c.sorted[ch.first + (token[n] ? 8 * n + g : 0)];
            row[n] = (DOWN ? c.h + static_cast<uint64_t>(pair) * (32 * c.slices)
                           : c.x + pair / c.top_k * c.x_stride) +
                     64 * warp + 8 * t;
        }
    }
};

/* Goes through the pair tiles and the B of a warp's share of an item, in order. */
template <bool DOWN, int N>
struct cursor {
    const uint8_t *pair; /* gate_up: the next; down: less its place */
    const __nv_bfloat16 *row[N];
    bool token[N];
    uint32_t at[2], places;      /* down: of the next step; the lane's of 16 steps */
    uint32_t step, left, k_left; /* steps; tiles from the next step's first */
    int expert;

    DI void open(const call &c, const item<DOWN, N> &of, uint32_t steps, uint32_t k_tiles)
    {
        const uint32_t warp = threadIdx.x >> 5;

        step = 0;
        left = steps;
        expert = of.ch.expert;
        k_left = k_tiles - 2 * warp;
#pragma unroll
        for (int n = 0; n < N; n++) {
            row[n] = of.row[n];
            token[n] = of.token[n];
        }
        if (DOWN) {
            pair = c.weights + c.down_offset + of.unit * NUMOE_PAIR_BYTES;
            places = of.at;
            at[0] = __shfl_sync(~0u, places, 0);
            at[1] = __shfl_sync(~0u, places, 1);
        } else {
            pair = c.weights + static_cast<uint64_t>(of.at) * 64 + 2 * warp * NUMOE_PAIR_BYTES;
        }
    }

    /* The second tile of the next step is there. */
    DI bool second() const
    {
        return k_left > 1;
    }

    /* down: places of the step after are on their way while these are used. */
    DI two_pairs take(const call &c, uint32_t steps)
    {
        two_pairs here = {{pair, pair}};

        step++;
        left--;
        if (DOWN) {
            here.of[0] += static_cast<uint64_t>(at[0]) * 64;
            here.of[1] += static_cast<uint64_t>(at[1]) * 64;
            if (step % 16 == 0)
                places = look_up(c, expert, step, steps);
            at[0] = __shfl_sync(~0u, places, step % 16 * 2);
            at[1] = __shfl_sync(~0u, places, step % 16 * 2 + 1);
        } else {
            here.of[1] += second() ? NUMOE_PAIR_BYTES : 0;
            pair += 2 * WARPS * NUMOE_PAIR_BYTES;
        }
        k_left -= 2 * WARPS;
        return here;
    }
};

template <bool DOWN, int N, int PLACES>
DI void feed_step(const call &c, cursor<DOWN, N> &feed, uint32_t steps,
                  pair_queue<PLACES, N> &queue)
{
    if (feed.left) {
        const uint32_t k = feed.step * (64 * WARPS);
        const bool second = feed.second();
        queue.push(feed.take(c, steps), feed.row, k, feed.token, second);
    }
    queue.pushed();
}

/* acc = the warp's share of the item. The queue holds its first steps and ends holding those of
 * next (if there is a next), which feed has been going through. M of the N n tiles have tokens.
 * Returns the OR of all scales. */
template <bool DOWN, int N, int M, int PLACES>
DI uint32_t walk(const call &c, const item<DOWN, N> &now, const item<DOWN, N> &next, bool more,
                 uint32_t steps, cursor<DOWN, N> &feed, pair_queue<PLACES, N> &queue,
                 float (*acc)[2][M][4])
{
    uint32_t scales = 0, k = 0;

    /* first while the queue is fed from this item, then while it is from the next */
#pragma unroll 1
    for (int part = 0; part < 2; part++) {
        const uint32_t end = part ? steps : feed.left;
        if (part && more)
            feed.open(c, next, steps, DOWN ? c.slices : c.hidden_tiles);
#pragma unroll 1
        for (; k < end; k++) {
            __syncwarp();
            feed_step(c, feed, steps, queue);
            queue.wait();
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint4 b[N];
                const pair_tile tile = queue.tile(i, b);
#pragma unroll
                for (int n = 0; n < M; n++)
                    b[n] = raise_b(b[n]);
                scales |= tile.scale_a | tile.scale_b;
                tile_sums<M>(tile.a, tile.scale_a, c.power, b, acc[0]);
                tile_sums<M>(tile.b, tile.scale_b, c.power, b, acc[1]);
            }
            queue.pop();
        }
    }
    return scales;
}

/* The same for any scales, nothing ahead. */
template <bool DOWN, int N, int M>
DI void walk_any(const call &c, const item<DOWN, N> &now, uint32_t steps, float (*acc)[2][M][4])
{
    cursor<DOWN, N> from;

    from.open(c, now, steps, DOWN ? c.slices : c.hidden_tiles);
#pragma unroll 1
    for (uint32_t k = 0; k < steps; k++) {
        const bool second = from.second();
        const two_pairs pairs = from.take(c, steps);
#pragma unroll 1
        for (int i = 0; i <= second; i++) {
            uint4 b[M];
#pragma unroll
            for (int n = 0; n < M; n++)
                b[n] = load_vector(now.row[n] + 64 * WARPS * k + 32 * i);
            multiply_pair_any<M>(load_pair(i ? pairs.of[1] : pairs.of[0], threadIdx.x & 31),
                                 c.power, b, acc);
        }
    }
}

/* ---- results ----------------------------------------------------------------------------------
 */

/* Of each token of a chunk, in shared memory: its entry, its routing weight, and whether its parts
 * are all there. */
template <int N>
struct chunk_tokens {
    int pair[8 * N];
    float routing[8 * N];
    int complete[8 * N];
    uint32_t upcoming; /* the item after the next */
};

DI void add_to(float *sum, const float4 &v)
{
    sum[0] += v.x;
    sum[1] += v.y;
    sum[2] += v.z;
    sum[3] += v.w;
}

/* Thread: cell (m, n) of lane l, of gate and of up. */
template <int N, int M>
DI void put_h(const call &c, const item<false, N> &now, const chunk_tokens<N> &of,
              const float4 *shared)
{
    const float *bias = nullptr;

    if (c.bias_offset)
        bias = reinterpret_cast<const float *>(c.weights + static_cast<uint64_t>(now.at) * 64 +
                                               c.bias_offset);
    for (int id = threadIdx.x; id < 2 * M * 32; id += THREADS) {
        const int l = id & 31, m = id / 32 / M, n = id / 32 % M, g = l >> 2, t = l & 3;
        float gate[4] = {}, up[4] = {};
#pragma unroll
        for (int v = 0; v < WARPS; v++) {
            add_to(gate, shared[v * 4 * M * 32 + id]);
            add_to(up, shared[v * 4 * M * 32 + 2 * M * 32 + id]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = 8 * n + 2 * t + (i & 1), j = acc_j(m, i);
            if (token >= now.ch.count)
                continue;
            if (bias) {
                gate[i] += bias[4 * g + j];
                up[i] += bias[32 + 4 * g + j];
            }
            c.h[static_cast<uint64_t>(of.pair[token]) * (32 * c.slices) + 32 * now.unit + g +
                8 * j] = __float2bfloat16(activate(c.activation, gate[i], up[i]));
        }
    }
}

/* Thread: cell (m, n) of lane l of one tile. */
template <int N, int M>
DI void put_parts(const call &c, const item<true, N> &now, const chunk_tokens<N> &of,
                  const float4 *shared)
{
    for (int id = threadIdx.x; id < 4 * M * 32; id += THREADS) {
        const int l = id & 31, p = id / 32 / (2 * M), m = id / 32 / M % 2, n = id / 32 % M;
        const int g = l >> 2, t = l & 3;
        const uint32_t tile = 2 * now.unit + p;
        float sum[4] = {};
#pragma unroll
        for (int v = 0; v < WARPS; v++)
            add_to(sum, shared[v * 4 * M * 32 + id]);
        if (tile >= c.hidden_tiles)
            continue;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = 8 * n + 2 * t + (i & 1), j = acc_j(m, i);
            if (token >= now.ch.count)
                continue;
            if (c.down_bias)
                sum[i] +=
                    c.down_bias[(static_cast<uint64_t>(now.ch.expert) * c.hidden_tiles + tile) *
                                    32 +
                                4 * g + j];
            __stcg(&c.part[static_cast<uint64_t>(of.pair[token]) * (32 * c.hidden_tiles) +
                           32 * tile + g + 8 * j],
                   sum[i] * of.routing[token]);
        }
    }
}

/* Whoever writes the last part of a token's 64 rows sums them, in slot order. A skipped slot has no
 * part. The counter of arrivals was zeroed by gate_up; pairs with the fences of the other blocks.
 */
template <int N>
DI void sum_complete(const call &c, const item<true, N> &now, chunk_tokens<N> &of)
{
    const uint32_t units = (c.hidden_tiles + 1) / 2, thread = threadIdx.x;

    __threadfence();
    __syncthreads();
    if (thread < static_cast<uint32_t>(now.ch.count)) {
        const int token = of.pair[thread] / c.top_k;
        const int before =
            atomicAdd(&c.arrived[static_cast<uint64_t>(token) * units + now.unit], 1);
        of.complete[thread] = before + 1 == c.valid[token];
    }
    __syncthreads();
    const uint32_t quads = 8 * c.hidden_tiles;
    for (uint32_t id = thread; id < static_cast<uint32_t>(now.ch.count) * 16; id += THREADS) {
        const uint32_t quad = 16 * now.unit + id % 16, token = of.pair[id / 16] / c.top_k;
        const float4 *part =
            reinterpret_cast<const float4 *>(c.part) + uint64_t{token} * c.top_k * quads + quad;
        float4 sum = make_float4(0, 0, 0, 0);
        if (!of.complete[id / 16] || quad >= quads)
            continue;
        __threadfence();
#pragma unroll 4
        for (uint32_t j = 0; j < c.top_k; j++)
            if (pair_expert(c, token * c.top_k + j) >= 0) {
                const float4 v = __ldcg(&part[uint64_t{j} * quads]);
                sum.x += v.x;
                sum.y += v.y;
                sum.z += v.z;
                sum.w += v.w;
            }
        put_four(c, token, 4 * quad, sum);
    }
}

/* The warp's sums to shared memory, [warp][tile A, B][m][n][lane]. */
template <int M>
DI void put_sums(const float (*acc)[2][M][4], float4 *shared)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < M; n++)
                shared[(warp * 4 * M + (p * 2 + m) * M + n) * 32 + lane] =
                    make_float4(acc[p][m][n][0], acc[p][m][n][1], acc[p][m][n][2], acc[p][m][n][3]);
}

/* One item: walk, sum over the warps, results. */
template <bool DOWN, int N, int M, int PLACES>
DI void compute(const call &c, item<DOWN, N> &now, item<DOWN, N> &next, bool more, uint32_t steps,
                uint32_t upcoming, cursor<DOWN, N> &feed, pair_queue<PLACES, N> &queue,
                float4 *shared, chunk_tokens<N> &of)
{
    float acc[2][2][M][4] = {};
    int pair = 0;
    float routing = 0;

    if (static_cast<int>(threadIdx.x) < now.ch.count) {
        pair = c.sorted[now.ch.first + threadIdx.x];
        routing = DOWN ? c.routing[pair] : 0.0f;
    }
    const uint32_t scales = walk<DOWN, N, M>(c, now, next, more, steps, feed, queue, acc);
    if (static_cast<int>(threadIdx.x) < now.ch.count) {
        of.pair[threadIdx.x] = pair;
        of.routing[threadIdx.x] = routing;
    }
    if (threadIdx.x == 0)
        of.upcoming = upcoming;
    __syncthreads(); /* the sums of the item before have been read */
    put_sums<M>(acc, shared);
    if (__syncthreads_or(met_large(scales))) {
        memset(acc, 0, sizeof acc);
        walk_any<DOWN, N, M>(c, now, steps, acc);
        __syncthreads();
        put_sums<M>(acc, shared);
        __syncthreads();
    }
    if constexpr (DOWN) {
        put_parts<N, M>(c, now, of, shared);
        if (c.fused)
            sum_complete<N>(c, now, of);
    } else {
        put_h<N, M>(c, now, of, shared);
    }
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

/* Tokens of which every entry is skipped: no part will ever complete them. */
DI void put_empty(const call &c)
{
    for (uint32_t token = blockIdx.x; token < c.tokens; token += gridDim.x)
        if (c.valid[token] == 0)
            for (uint32_t k = threadIdx.x; k < c.hidden; k += THREADS)
                put_out(c, token, k, 0.0f);
}

DI void zero_arrivals(const call &c)
{
    const uint64_t count = static_cast<uint64_t>(c.tokens) * ((c.hidden_tiles + 1) / 2);

    for (uint64_t i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS)
        c.arrived[i] = 0;
}

template <bool DOWN, int N, int PLACES, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) few_tokens(call c)
{
    extern __shared__ float4 few_shared[]; /* [WARPS][4 N][32], pair_places[WARPS] */
    __shared__ chunk_tokens<N> of[2];
    const uint32_t warp = threadIdx.x >> 5;
    const uint32_t units = DOWN ? (c.hidden_tiles + 1) / 2 : c.slices;
    const uint32_t k_tiles = DOWN ? c.slices : c.hidden_tiles;
    const uint32_t steps = ((k_tiles + 1) / 2 + WARPS - 1 - warp) / WARPS, step = gridDim.x;
    const uint32_t ahead = steps < PLACES - 1 ? steps : PLACES - 1;
    item<DOWN, N> now, next;
    pair_queue<PLACES, N> queue;
    cursor<DOWN, N> feed = {};
    chunk after = {};

    if (!DOWN) {
        wait_for_previous();
        let_next_start();
    }
    const uint32_t count = *c.chunk_count * units;
    uint32_t i = blockIdx.x;
    if (i < count) {
        now.open(c, c.chunks[i / units], i % units, steps);
        if (i + step < count)
            after = c.chunks[(i + step) / units];
        feed.open(c, now, steps, k_tiles);
        queue.open(reinterpret_cast<pair_places<PLACES, N> *>(few_shared + WARPS * 4 * N * 32) +
                       warp,
                   ahead);
        for (uint32_t k = 0; k < ahead; k++)
            queue.copy_pairs(k, feed.take(c, steps));
    }
    if (DOWN) { /* of which weights are there before it may read h */
        wait_for_previous();
        let_next_start();
        if (c.fused)
            put_empty(c);
    } else if (c.fused) {
        zero_arrivals(c);
    }
    if (i < count)
        for (uint32_t k = 0; k < ahead; k++) {
            queue.copy_b(k, now.row, k * (64 * WARPS), now.token,
                         2 * (warp + WARPS * k) + 1 < k_tiles);
            queue.pushed();
        }
    uint32_t j = i + step;
    for (uint32_t turn = 0; i < count; turn ^= 1) {
        const bool more = j < count;
        uint32_t upcoming = 0;

        if (threadIdx.x == 0)
            upcoming = 2 * step + atomicAdd(&c.next_item[DOWN], 1);
        if (more)
            next.open(c, after, j % units, steps);
        if (N > 1 && now.ch.count > 8)
            compute<DOWN, N, N>(c, now, next, more, steps, upcoming, feed, queue, few_shared,
                                of[turn]);
        else
            compute<DOWN, N, 1>(c, now, next, more, steps, upcoming, feed, queue, few_shared,
                                of[turn]);
        now = next;
        i = j;
        j = of[turn].upcoming;
        if (j < count)
            after = c.chunks[j / units];
    }
}

/* Places of a queue, each two k tiles, and blocks an SM, which bound the registers: by n tiles. */
template <int N>
struct tuned {
    enum { PLACES = 3, BLOCKS = N == 1 ? 4 : 3 };
};

template <int N>
constexpr int shared_bytes()
{
    return WARPS * 4 * N * 32 * static_cast<int>(sizeof(float4)) +
           WARPS * static_cast<int>(sizeof(pair_places<tuned<N>::PLACES, N>));
}

template <bool DOWN, int N>
cudaError_t launch_form(const call &c, const launching &how)
{
    const uint64_t units = DOWN ? (c.hidden_tiles + 1) / 2 : c.slices;
    const uint64_t items = units * c.chunk_bound;
    const uint64_t room = static_cast<uint64_t>(how.multiprocessors) * tuned<N>::BLOCKS;

    if (items > 0x7FFFFFFFu)
        return cudaErrorInvalidValue;
    return launch(few_tokens<DOWN, N, tuned<N>::PLACES, tuned<N>::BLOCKS>,
                  items < room ? items : room, THREADS, shared_bytes<N>(), how.overlap, c,
                  how.stream);
}

template <bool DOWN>
cudaError_t launch_half(const call &c, const launching &how)
{
    return c.chunk_tokens == 8 ? launch_form<DOWN, 1>(c, how) : launch_form<DOWN, 2>(c, how);
}

template <bool DOWN, int N>
void describe_form(const char *name, numoe_cuda_kernel_info *info)
{
    describe(few_tokens<DOWN, N, tuned<N>::PLACES, tuned<N>::BLOCKS>, name, THREADS,
             shared_bytes<N>(), info);
}

} /* namespace */

cudaError_t launch_few(const call &c, bool down, const launching &how)
{
    return down ? launch_half<true>(c, how) : launch_half<false>(c, how);
}

size_t describe_few(numoe_cuda_kernel_info *info)
{
    describe_form<false, 1>("gate_up 8", info++);
    describe_form<false, 2>("gate_up 16", info++);
    describe_form<true, 1>("down 8", info++);
    describe_form<true, 2>("down 16", info++);
    return FEW_KERNELS;
}
