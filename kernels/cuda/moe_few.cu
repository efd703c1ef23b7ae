/*
 * Expert FFN for few tokens of an expert, MXFP4 weights, bf16 activations, mma.sync m16n8k16.
 *
 *   gate_up   h[pair] = act(W1 x + b1, W3 x + b3)     item: a slice of one expert, 32 rows of each
 *   down      part[pair] = routing * (W2 h + b2)       item: 64 rows of one expert
 *
 * One kernel for both: a block goes from item to item, and while it computes one its copier brings
 * the weights and B of the next (few_copier.cuh), so reading pauses neither where an item ends nor
 * between the halves. The warps that compute take the pair tiles of a stage two by two; their sums
 * meet in shared memory. Whoever has stored the h of a slice counts it; down waits for all of them.
 *
 * Bound by instructions, half of which are decoding, until it is bound by reading weights.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "few_copier.cuh"
#include "moe_kernels.h"

namespace
{

/* ---- products ---------------------------------------------------------------------------------
 */

/* acc = the warp's share of the item whose first stage is at `at`. M n tiles have tokens. Returns
 * the OR of all scales. */
template <int N, int M>
DI uint32_t walk(const call &c, few_shared<N> &shared, uint32_t steps, ring_place &at,
                 float (*acc)[2][M][4])
{
    const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const uint32_t stages = shared_address(shared.stages), full = shared_address(shared.full);
    const uint32_t empty = shared_address(shared.empty);
    uint32_t codes = stages + 2 * 1024 * warp + numoe_code_place(g, t);
    uint32_t scales = stages + 1024 * STEP_TILES + 2 * 64 * warp + 4 * g;
    uint32_t rows = stages + 1088 * STEP_TILES + b_place(g, 8 * warp + t);
    uint32_t met = 0;

    /* or the loop would compute them again and again */
    asm volatile("" : "+r"(codes), "+r"(scales), "+r"(rows));
#pragma unroll 1
    for (; steps; steps--) {
        const uint32_t off = at.stage * sizeof(stage<N>);

        barrier_wait(full + 8 * at.stage, at.parity);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint4 code[2], b[M];
            float f[2][4];
#pragma unroll
            for (int p = 0; p < 2; p++) {
                code[p] = load_shared_vector(codes + off + 1024 * i + 512 * p);
                met |= load_shared_word(scales + off + 64 * i + 32 * p);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    f[p][j] = sum_factor(load_shared_byte(scales + off + 64 * i + 32 * p + j),
                                         c.two_23);
            }
#pragma unroll
            for (int n = 0; n < M; n++)
                b[n] = load_shared_vector((rows ^ 64 * i) + off + 8 * B_BYTES * n);
            if (i == 1) {
                __syncwarp();
                if (lane == 0)
                    barrier_arrive(empty + 8 * at.stage);
            }
            tile_sums<M>(code[0], f[0], b, acc[0]);
            tile_sums<M>(code[1], f[1], b, acc[1]);
        }
        at.next();
    }
    return met;
}

/* The same for any scales, from where everything lies. */
template <int N, int M>
DI void walk_any(const call &c, const item<N> &now, float (*acc)[2][M][4])
{
    const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const uint32_t k_tiles = now.down ? c.slices : c.hidden_tiles;
    const __nv_bfloat16 *row[M];

#pragma unroll
    for (int n = 0; n < M; n++) {
        const int pair = now.pair[8 * n + g < static_cast<uint32_t>(now.count) ? 8 * n + g : 0];
        row[n] = (now.down ? c.h + static_cast<uint64_t>(pair) * (32 * c.slices)
                           : c.x + pair / c.top_k * c.x_stride) +
                 8 * t;
    }
#pragma unroll 1
    for (uint32_t k = warp; k < k_tiles; k += CONSUMERS) {
        const uint32_t slice =
            now.down ? c.slice_at[static_cast<uint64_t>(now.expert) * c.slices + k] : now.slice_at;
        const uint8_t *const pair =
            c.weights + uint64_t{slice} * 64 +
            (now.down ? c.down_offset + uint64_t{now.unit} * NUMOE_PAIR_BYTES
                      : uint64_t{k} * NUMOE_PAIR_BYTES);
        uint4 b[M];
#pragma unroll
        for (int n = 0; n < M; n++)
            b[n] = lower_b(load_vector(row[n] + 32 * k));
        multiply_pair_any<M>(load_pair(pair, lane), b, acc);
    }
}

/* ---- results ----------------------------------------------------------------------------------
 */

/* The warps that compute have all come here. */
DI void meet()
{
    asm volatile("bar.sync 1,%0;" ::"n"(int{CONSUMING}) : "memory");
}

/* ... and what any of them brings is true. */
DI bool meet_or(bool mine)
{
    uint32_t any;
    asm volatile("{\n.reg .pred p,q;\n"
                 "setp.ne.u32 p,%1,0;\n"
                 "bar.red.or.pred q,1,%2,p;\n"
                 "selp.u32 %0,1,0,q;\n}"
                 : "=r"(any)
                 : "r"(static_cast<uint32_t>(mine)), "n"(int{CONSUMING})
                 : "memory");
    return any != 0;
}

/* The warps' sums to shared memory, of two warps in one place. */
template <int M>
DI void put_sums(const float (*acc)[2][M][4], float4 *sums)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float4 *const to = sums + warp / 2 * (4 * M * 32) + lane;

    if (warp & 1)
#pragma unroll
        for (int i = 0; i < 4 * M; i++) {
            const float *v = acc[i / (2 * M)][i / M % 2][i % M];
            to[32 * i] = make_float4(v[0], v[1], v[2], v[3]);
        }
    meet();
    if (!(warp & 1))
#pragma unroll
        for (int i = 0; i < 4 * M; i++) {
            const float *v = acc[i / (2 * M)][i / M % 2][i % M];
            const float4 w = to[32 * i];
            to[32 * i] = make_float4(v[0] + w.x, v[1] + w.y, v[2] + w.z, v[3] + w.w);
        }
}

/* Warp j: rows g + 8 j. Thread: of them one, of tokens 2 t and 2 t + 1 of each n tile. */
template <int N, int M>
DI void put_h(const call &c, const item<N> &now, few_shared<N> &shared)
{
    const int lane = threadIdx.x & 31, j = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const float *bias = nullptr;

    if (c.bias_offset)
        bias = reinterpret_cast<const float *>(c.weights + uint64_t{now.slice_at} * 64 +
                                               c.bias_offset);
#pragma unroll
    for (int n = 0; n < M; n++) {
        const float2 *const cell =
            reinterpret_cast<const float2 *>(shared.sums + (j / 2 * M + n) * 32 + lane) + j % 2;
        float v[2];
        float2 gate = make_float2(0, 0), up = make_float2(0, 0);
#pragma unroll
        for (int w = 0; w < CONSUMERS / 2; w++) {
            const float2 a = cell[w * 4 * M * 64], b = cell[w * 4 * M * 64 + 2 * M * 64];
            gate = make_float2(gate.x + a.x, gate.y + a.y);
            up = make_float2(up.x + b.x, up.y + b.y);
        }
        const float b_gate = bias ? bias[4 * g + j] : 0.0f, b_up = bias ? bias[32 + 4 * g + j] : 0.0f;
        const int token = 8 * n + 2 * t;
        v[0] = token < now.count ? activate(c.activation, gate.x + b_gate, up.x + b_up) : 0.0f;
        v[1] = token + 1 < now.count ? activate(c.activation, gate.y + b_gate, up.y + b_up) : 0.0f;
        if (rounds_mxfp8(c.arithmetic)) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t most = __float_as_uint(v[i]) & 0x7FFFFFFFu;
                for (int step = 4; step < 32; step *= 2)
                    most = umax(most, __shfl_xor_sync(~0u, most, step));
                if (g == 0)
                    shared.most[j][token + i] = most;
            }
            meet();
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t most = 0;
                for (int w = 0; w < CONSUMERS; w++)
                    most = umax(most, shared.most[w][token + i]);
                v[i] = round_mxfp8(v[i], most, c.arithmetic);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (token + i < now.count)
                c.h[static_cast<uint64_t>(now.pair[token + i]) * (32 * c.slices) + 32 * now.unit +
                    g + 8 * j] = __float2bfloat16(v[i] * RAISED);
    }
}

/* Thread: cell (m, n) of lane l of one tile. */
template <int N, int M>
DI void put_parts(const call &c, const item<N> &now, const float4 *sums)
{
#pragma unroll 1
    for (int id = threadIdx.x; id < 4 * M * 32; id += CONSUMING) {
        const int l = id & 31, p = id / 32 / (2 * M), m = id / 32 / M % 2, n = id / 32 % M;
        const int g = l >> 2, t = l & 3;
        const uint32_t tile = 2 * now.unit + p;
        float sum[4] = {};

        if (tile >= c.hidden_tiles || 8 * n + 2 * t >= now.count)
            continue;
#pragma unroll
        for (int v = 0; v < CONSUMERS / 2; v++) {
            const float4 a = sums[v * 4 * M * 32 + id];
            sum[0] += a.x;
            sum[1] += a.y;
            sum[2] += a.z;
            sum[3] += a.w;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = 8 * n + 2 * t + (i & 1), j = acc_j(m, i);
            if (token >= now.count)
                continue;
            if (c.down_bias)
                sum[i] +=
                    c.down_bias[(static_cast<uint64_t>(now.expert) * c.hidden_tiles + tile) * 32 +
                                4 * g + j];
            __stcg(&c.part[static_cast<uint64_t>(now.pair[token]) * (32 * c.hidden_tiles) +
                           32 * tile + g + 8 * j],
                   sum[i] * now.routing[token]);
        }
    }
}

/* Whoever writes the last part of a token's 64 rows sums them, in slot order. A skipped slot has no
 * part. Pairs with the fences of the other blocks. */
template <int N>
DI void sum_complete(const call &c, const item<N> &now, const uint32_t *valid_slots, bool *complete)
{
    const uint32_t count = static_cast<uint32_t>(now.count), quads = 8 * c.hidden_tiles;
    const uint32_t slots = threadIdx.x < count ? valid_slots[now.pair[threadIdx.x] / c.top_k] : 0;

    __threadfence();
    meet();
    if (threadIdx.x < count) {
        const int token = now.pair[threadIdx.x] / c.top_k;
        const int before = atomicAdd(
            &c.arrived[static_cast<uint64_t>(token) * few_units(c) + now.unit], 1);
        complete[threadIdx.x] = before + 1 == __popc(slots);
    }
    meet();
    for (uint32_t id = threadIdx.x; id < count * 16; id += CONSUMING) {
        const uint32_t quad = 16 * now.unit + id % 16, token = now.pair[id / 16] / c.top_k;
        const float4 *part =
            reinterpret_cast<const float4 *>(c.part) + uint64_t{token} * c.top_k * quads + quad;
        const uint32_t valid = valid_slots[token];
        float4 sum = make_float4(0, 0, 0, 0);
        if (!complete[id / 16] || quad >= quads)
            continue;
        __threadfence();
#pragma unroll 4
        for (uint32_t j = 0; j < c.top_k; j++)
            if (valid >> j & 1) {
                const float4 v = __ldcg(&part[uint64_t{j} * quads]);
                sum.x += v.x;
                sum.y += v.y;
                sum.z += v.z;
                sum.w += v.w;
            }
        put_four(c, token, 4 * quad, sum);
    }
}

/* Of each token, for forms that sum. */
template <int N>
DI const uint32_t *valid_slots(const call &c, const few_shared<N> &shared)
{
    return N == 1 && c.local ? shared.valid : c.valid;
}

/* One item: walk, sum over the warps, results. */
template <int N, int M>
DI void compute(const call &c, const item<N> &now, few_shared<N> &shared, ring_place &at)
{
    float acc[2][2][M][4] = {};
    const uint32_t scales = walk<N, M>(c, shared, few_steps(c, now.down), at, acc);

    put_sums<M>(acc, shared.sums);
    if (meet_or(met_large(scales))) {
        memset(acc, 0, sizeof acc);
        walk_any<N, M>(c, now, acc);
        meet();
        put_sums<M>(acc, shared.sums);
        meet();
    }
    if (now.down) {
        put_parts<N, M>(c, now, shared.sums);
        if (c.fused)
            sum_complete<N>(c, now, valid_slots(c, shared), shared.complete);
        meet(); /* the sums have been read */
    } else {
        put_h<N, M>(c, now, shared);
        meet();
        if (threadIdx.x == 0)
            add_release(&c.h_slices[now.chunk], 1);
    }
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

/* Tokens of which every entry is skipped: no part will ever complete them. */
DI void put_empty(const call &c, const uint32_t *valid)
{
    for (uint32_t token = blockIdx.x; token < c.tokens; token += gridDim.x)
        if (valid[token] == 0)
            for (uint32_t k = threadIdx.x; k < c.hidden; k += CONSUMING)
                put_out(c, token, k, 0.0f);
}

template <int N, int BLOCKS>
__global__ void __launch_bounds__(FEW_THREADS, BLOCKS) few_tokens(call c)
{
    extern __shared__ __align__(128) uint8_t few_bytes[];
    few_shared<N> &shared = *reinterpret_cast<few_shared<N> *>(few_bytes);

    if (threadIdx.x == 0)
        for (int i = 0; i < FEW_STAGES; i++) {
            barrier_init(shared_address(&shared.full[i]), 32 + 1);
            barrier_init(shared_address(&shared.empty[i]), CONSUMERS);
        }
    __syncthreads();
    if (threadIdx.x >= CONSUMING) {
        few_copier<N>(c, shared).run();
        return;
    }
    wait_for_previous();
    ring_place at = {0, 0};
    for (uint32_t turn = 0;; turn = turn + 1 == FEW_ITEMS ? 0 : turn + 1) {
        const item<N> &now = shared.items[turn];

        barrier_wait(shared_address(&shared.full[at.stage]), at.parity);
        if (now.count == 0)
            break;
        if (N > 1 && now.count > 8)
            compute<N, N>(c, now, shared, at);
        else
            compute<N, 1>(c, now, shared, at);
    }
    if (c.fused)
        put_empty(c, valid_slots(c, shared));
}

/* Blocks an SM, which bound the registers, by n tiles. */
template <int N>
constexpr unsigned few_blocks()
{
    return N == 1 ? 4 : 3;
}

template <int N>
cudaError_t launch_form(const call &c, const launching &how)
{
    const uint64_t slices = static_cast<uint64_t>(c.slices) * c.chunk_bound;
    const uint64_t units = static_cast<uint64_t>((c.hidden_tiles + 1) / 2) * c.chunk_bound;
    const uint64_t sms = static_cast<uint64_t>(how.multiprocessors);
    /* few items: no more blocks than bring every SM the same number */
    const uint64_t fill = (slices + sms - 1) / sms;

    if (slices + units > 0x7FFFFFFFu)
        return cudaErrorInvalidValue;
    return launch(few_tokens<N, few_blocks<N>()>,
                  sms * (fill < few_blocks<N>() ? fill : few_blocks<N>()), FEW_THREADS,
                  sizeof(few_shared<N>), how.overlap, c, how.stream);
}

template <int N>
void describe_form(const char *name, numoe_cuda_kernel_info *info)
{
    describe(few_tokens<N, few_blocks<N>()>, name, FEW_THREADS, sizeof(few_shared<N>), info);
}

} /* namespace */

cudaError_t launch_few(const call &c, const launching &how)
{
    return c.chunk_tokens == 8 ? launch_form<1>(c, how) : launch_form<2>(c, how);
}

uint32_t few_local_pairs()
{
    return LOCAL_PAIRS;
}

uint32_t few_fused_tokens()
{
    return FUSED_TOKENS;
}

float few_raise()
{
    return RAISED;
}

size_t describe_few(numoe_cuda_kernel_info *info)
{
    describe_form<1>("gate_up and down 8", info++);
    describe_form<2>("gate_up and down 16", info++);
    return FEW_KERNELS;
}
