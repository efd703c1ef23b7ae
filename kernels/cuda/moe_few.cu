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

/* acc = the warp's share of the item whose first stage is at `at`, [tile A, B][m][1]. Returns the
 * OR of all scales. */
template <int STAGES>
DI uint32_t walk(const call &c, few_shared<STAGES> &shared, uint32_t steps, ring_place<STAGES> &at,
                 float (*acc)[2][1][4])
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
        const uint32_t off = at.stage * sizeof(stage);

        barrier_wait(full + 8 * at.stage, at.parity);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint4 code[2], b;
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
            b = load_shared_vector((rows ^ 64 * i) + off);
            if (i == 1)
                say_empty(empty + 8 * at.stage);
            tile_sums<1>(code[0], f[0], &b, acc[0]);
            tile_sums<1>(code[1], f[1], &b, acc[1]);
        }
        at.next();
    }
    return met;
}

/* The same for any scales, from where everything lies. */
DI void walk_any(const call &c, const item &now, float (*acc)[2][1][4])
{
    const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const uint32_t k_tiles = now.down ? c.slices : c.hidden_tiles;
    const int pair = now.pair[g < static_cast<uint32_t>(now.count) ? g : 0];
    const __nv_bfloat16 *const row =
        (now.down ? c.h + static_cast<uint64_t>(pair) * (32 * c.slices)
                  : c.x + pair / c.top_k * c.x_stride) +
        8 * t;

#pragma unroll 1
    for (uint32_t k = warp; k < k_tiles; k += CONSUMERS) {
        const uint32_t slice =
            now.down ? c.slice_at[static_cast<uint64_t>(now.expert) * c.slices + k] : now.slice_at;
        const uint8_t *const pair_at =
            c.weights + uint64_t{slice} * 64 +
            (now.down ? c.down_offset + uint64_t{now.unit} * NUMOE_PAIR_BYTES
                      : uint64_t{k} * NUMOE_PAIR_BYTES);
        const uint4 b = lower_b(load_vector(row + 32 * k));
        multiply_pair_any<1>(load_pair(pair_at, lane), &b, acc);
    }
}

/* ---- results ----------------------------------------------------------------------------------
 */

/* The warps that compute have all come here. */
DI void meet()
{
    __syncwarp();
    asm volatile("bar.sync 1,%0;" ::"n"(int{CONSUMING}) : "memory");
}

/* ... and what any of them brings is true. */
DI bool meet_or(bool mine)
{
    uint32_t any;
    __syncwarp();
    asm volatile("{\n.reg .pred p,q;\n"
                 "setp.ne.u32 p,%1,0;\n"
                 "bar.red.or.pred q,1,%2,p;\n"
                 "selp.u32 %0,1,0,q;\n}"
                 : "=r"(any)
                 : "r"(static_cast<uint32_t>(mine)), "n"(int{CONSUMING})
                 : "memory");
    return any != 0;
}

/* The warps' sums to shared memory. */
template <int STAGES>
DI void put_sums(const float (*acc)[2][1][4], few_shared<STAGES> &shared)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

    if (warp & 1)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *v = acc[i / 2][i % 2][0];
            shared.sums[warp / 2][i][lane] = make_float4(v[0], v[1], v[2], v[3]);
        }
    meet();
    if (!(warp & 1))
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *v = acc[i / 2][i % 2][0];
            float4 *const to = &shared.sums[warp / 2][i][lane];
            *to = make_float4(v[0] + to->x, v[1] + to->y, v[2] + to->z, v[3] + to->w);
        }
}

/* Warp j: rows g + 8 j. Thread: of them one, of tokens 2 t and 2 t + 1. */
template <int STAGES>
DI void put_h(const call &c, const item &now, few_shared<STAGES> &shared)
{
    const int lane = threadIdx.x & 31, j = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const float *const bias = reinterpret_cast<const float *>(
        c.weights + uint64_t{now.slice_at} * 64 + c.bias_offset);
    float gate[2] = {}, up[2] = {}, v[2];

    if (c.bias_offset) {
        gate[0] = gate[1] = bias[4 * g + j];
        up[0] = up[1] = bias[32 + 4 * g + j];
    }
#pragma unroll
    for (int w = 0; w < CONSUMERS / 2; w++) {
        const float2 a = reinterpret_cast<const float2 *>(&shared.sums[w][j / 2][lane])[j % 2];
        const float2 b = reinterpret_cast<const float2 *>(&shared.sums[w][2 + j / 2][lane])[j % 2];
        gate[0] += a.x;
        gate[1] += a.y;
        up[0] += b.x;
        up[1] += b.y;
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        v[i] = 2 * t + i < now.count ? activate(c.activation, gate[i], up[i]) : 0.0f;
    if (rounds_mxfp8(c.arithmetic)) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t most = __float_as_uint(v[i]) & 0x7FFFFFFFu;
            for (int step = 4; step < 32; step *= 2)
                most = umax(most, __shfl_xor_sync(~0u, most, step));
            if (g == 0)
                shared.most[j][2 * t + i] = most;
        }
        meet();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t most = 0;
            for (int w = 0; w < CONSUMERS; w++)
                most = umax(most, shared.most[w][2 * t + i]);
            v[i] = round_mxfp8(v[i], most, c.arithmetic);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (2 * t + i < now.count)
            c.h[static_cast<uint64_t>(now.pair[2 * t + i]) * (32 * c.slices) + 32 * now.unit + g +
                8 * j] = __float2bfloat16(v[i] * RAISED);
}

/* Warp 2 p + m: tile 2 unit + p, rows g + 16 m and g + 16 m + 8, of tokens 2 t and 2 t + 1. */
template <int STAGES>
DI void put_parts(const call &c, const item &now, const few_shared<STAGES> &shared)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const uint32_t tile = 2 * now.unit + warp / 2;
    float sum[4] = {};

    if (tile >= c.hidden_tiles || 2 * t >= now.count)
        return;
#pragma unroll
    for (int w = 0; w < CONSUMERS / 2; w++) {
        const float4 a = shared.sums[w][warp][lane];
        sum[0] += a.x;
        sum[1] += a.y;
        sum[2] += a.z;
        sum[3] += a.w;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int token = 2 * t + (i & 1), j = acc_j(warp % 2, i);
        if (token >= now.count)
            continue;
        if (c.down_bias)
            sum[i] += c.down_bias[(static_cast<uint64_t>(now.expert) * c.hidden_tiles + tile) * 32 +
                                  4 * g + j];
        __stcg(&c.part[static_cast<uint64_t>(now.pair[token]) * (32 * c.hidden_tiles) + 32 * tile +
                       g + 8 * j],
               sum[i] * now.routing[token]);
    }
}

/* Whoever writes the last part of a token's 64 rows sums them, in slot order. A skipped slot has no
 * part. Pairs with the fences of the other blocks. */
DI void sum_complete(const call &c, const item &now, const uint32_t *valid_slots, bool *complete)
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

/* Of each token. */
template <int STAGES>
DI const uint32_t *valid_slots(const call &c, const few_shared<STAGES> &shared)
{
    return c.local ? shared.valid : c.valid;
}

/* One item: walk, sum over the warps, results. */
template <int STAGES>
DI void compute(const call &c, const item &now, few_shared<STAGES> &shared, ring_place<STAGES> &at)
{
    float acc[2][2][1][4] = {};
    const uint32_t scales = walk(c, shared, few_steps(c, now.down), at, acc);

    put_sums(acc, shared);
    if (meet_or(met_large(scales))) {
        memset(acc, 0, sizeof acc);
        walk_any(c, now, acc);
        meet();
        put_sums(acc, shared);
        meet();
    }
    if (now.down) {
        put_parts(c, now, shared);
        if (c.fused)
            sum_complete(c, now, valid_slots(c, shared), shared.complete);
        meet(); /* the sums have been read */
    } else {
        put_h(c, now, shared);
        meet();
        if (threadIdx.x == 0)
            add_release(&c.h_slices[now.chunk], 1);
    }
}

/* Items, until there are no more. */
template <int STAGES>
DI void consume(const call &c, few_shared<STAGES> &shared)
{
    ring_place<STAGES> at = {0, 0};

    wait_for_previous();
    for (uint32_t turn = 0;; turn = turn + 1 == few_shared<STAGES>::ITEMS ? 0 : turn + 1) {
        const item &now = shared.items[turn];

        barrier_wait(shared_address(&shared.full[at.stage]), at.parity);
        if (now.count == 0)
            break;
        compute(c, now, shared, at);
    }
    say_empty(shared_address(&shared.empty[at.stage]));
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

template <int STAGES, int BLOCKS>
__global__ void __launch_bounds__(FEW_THREADS, BLOCKS) few_tokens(call c)
{
    extern __shared__ __align__(128) uint8_t few_bytes[];
    few_shared<STAGES> &shared = *reinterpret_cast<few_shared<STAGES> *>(few_bytes);

    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&shared.full[i]), 32 + 1);
            barrier_init(shared_address(&shared.empty[i]), EMPTY_ARRIVALS);
        }
    __syncthreads();
    if (threadIdx.x >= CONSUMING) {
        few_copier<STAGES>(c, shared).run();
        return;
    }
    consume(c, shared);
    if (c.fused)
        put_empty(c, valid_slots(c, shared));
}

enum { BLOCKS = 4 }; /* an SM, which bound the registers */

template <int STAGES>
cudaError_t launch_form(const call &c, const launching &how, uint64_t blocks)
{
    return launch(few_tokens<STAGES, BLOCKS>, blocks, FEW_THREADS, sizeof(few_shared<STAGES>),
                  how.overlap, c, how.stream);
}

template <int STAGES>
void describe_form(const char *name, numoe_cuda_kernel_info *info)
{
    describe(few_tokens<STAGES, BLOCKS>, name, FEW_THREADS, sizeof(few_shared<STAGES>), info);
}

} /* namespace */

cudaError_t launch_few(const call &c, const launching &how)
{
    const uint64_t slices = static_cast<uint64_t>(c.slices) * c.chunk_bound;
    const uint64_t units = static_cast<uint64_t>((c.hidden_tiles + 1) / 2) * c.chunk_bound;
    const uint64_t sms = static_cast<uint64_t>(how.multiprocessors);
    /* few items: no more blocks than bring every SM the same number */
    const uint64_t fill = (slices + sms - 1) / sms, room = how.few.blocks_an_sm;
    const uint64_t blocks = sms * (fill < room ? fill : room);

    if (slices + units > 0x7FFFFFFFu)
        return cudaErrorInvalidValue;
    return how.few.stages == 4 ? launch_form<4>(c, how, blocks) : launch_form<3>(c, how, blocks);
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

numoe_cuda_few choose_few(const numoe_cuda_kernel_info *info)
{
    /* the one with more on its way in an SM */
    const bool deep = 4 * info[0].blocks_an_sm >= 3 * info[1].blocks_an_sm;
    const int blocks = info[deep ? 0 : 1].blocks_an_sm;
    return {deep ? 4 : 3, blocks > 0 ? blocks : 1};
}

size_t describe_few(numoe_cuda_kernel_info *info)
{
    describe_form<4>("8, 4 stages", info++);
    describe_form<3>("8, 3 stages", info++);
    return FEW_KERNELS;
}
