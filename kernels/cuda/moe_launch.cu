/*
 * A call of the expert FFN: what it needs in memory, which form it takes, its kernels in order.
 *
 *   route   x laid out where it is not as the form wants it, entries sorted by expert and cut in
 *           chunks: in one kernel, or in five
 *   gate_up, down   of moe_many.cu or moe_many_sm90.cu, or both in one of moe_few.cu
 *   combine  sums each token's parts; the few-token form does that itself for a few tokens
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "moe_kernels.h"

namespace
{

struct layout {
    uint64_t x, h, part, chunks, sorted, counters, h_slices, valid, arrived, bytes;
    uint32_t chunk_tokens, chunk_bound;
    bool pad, few, fused, local, wgmma;
};

uint64_t take(uint64_t *at, uint64_t bytes)
{
    const uint64_t here = *at;
    *at += (bytes + 255) / 256 * 256;
    return here;
}

/* 32 bits hold an entry, and a row of x or h in units of 16 bytes. */
bool too_large(const numoe_cuda_ffn *f)
{
    const uint64_t pairs = static_cast<uint64_t>(f->tokens) * f->top_k;

    return f->experts == 0 || f->experts > 65536 || f->slices == 0 || f->top_k == 0 ||
           pairs >= 0x7FFFFFFFu || f->shape.hidden > (1u << 24) || f->slices > (1u << 19) ||
           pairs * 4 * f->slices >> 32 || f->tokens * (f->shape.hidden_tiles * 4) >> 32 ||
           f->tokens * (f->x_stride / 8) >> 32;
}

bool absent(const numoe_cuda_device *device, numoe_cuda_form form)
{
    return form < 1 || form > NUMOE_CUDA_FORMS || !(device->forms >> form & 1);
}

/* Tokens of a chunk at most. */
uint32_t chunk_of(numoe_cuda_form form)
{
    switch (form) {
    case NUMOE_CUDA_8:
        return 8;
    case NUMOE_CUDA_32:
    case NUMOE_CUDA_WGMMA_32:
        return 32;
    case NUMOE_CUDA_WGMMA_128:
        return 128;
    default:
        return 64;
    }
}

layout lay_out(const numoe_cuda_ffn *f)
{
    const uint64_t pairs = static_cast<uint64_t>(f->tokens) * f->top_k;
    const uint64_t hit = pairs < f->experts ? pairs : f->experts;
    const uint64_t width = 32 * f->shape.hidden_tiles;
    const bool aligned = f->x_stride % 8 == 0 && reinterpret_cast<uintptr_t>(f->x) % 16 == 0;
    layout l = {};
    uint64_t at = 0;

    l.chunk_tokens = chunk_of(f->form);
    const uint64_t bound = hit + pairs / l.chunk_tokens;
    l.chunk_bound = static_cast<uint32_t>(bound < pairs ? bound : pairs);
    l.few = f->form == NUMOE_CUDA_8;
    l.fused = l.few && f->tokens <= few_fused_tokens() && f->top_k <= 32;
    l.local = l.fused && pairs <= few_local_pairs();
    l.wgmma = f->form >= NUMOE_CUDA_WGMMA_32;
    l.pad = l.few || l.wgmma || f->arithmetic == NUMOE_MXFP8_UP ||
            f->arithmetic == NUMOE_MXFP8_OCP || f->x_type == NUMOE_F32 || f->shape.hidden % 32 != 0 || !aligned;
    l.x = take(&at, l.pad ? f->tokens * width * 2 : 0);
    l.h = take(&at, pairs * 32 * f->slices * 2);
    l.part = take(&at, pairs * width * 4);
    l.chunks = take(&at, (l.chunk_bound + 1) * sizeof(chunk));
    l.sorted = take(&at, pairs * 4);
    l.counters = take(&at, (static_cast<uint64_t>(f->experts) + 3) * 4);
    l.h_slices = take(&at, l.few ? l.chunk_bound * sizeof(uint32_t) : 0);
    l.valid = take(&at, l.fused ? f->tokens * sizeof(uint32_t) : 0);
    l.arrived =
        take(&at, l.fused ? f->tokens * ((f->shape.hidden_tiles + 1) / 2) * sizeof(int) : 0);
    l.bytes = at;
    return l;
}

call make_call(const numoe_cuda_ffn *f, const layout &l)
{
    uint8_t *work = static_cast<uint8_t *>(f->workspace);
    call c = {};

    c.weights = f->weights;
    c.slice_at = f->slice_at;
    c.down_bias = f->down_bias;
    c.x = l.pad ? reinterpret_cast<__nv_bfloat16 *>(work + l.x)
                : static_cast<const __nv_bfloat16 *>(f->x);
    c.x_stride = l.pad ? 32 * f->shape.hidden_tiles : f->x_stride;
    c.ids = f->ids;
    c.routing = f->routing;
    c.out = f->out;
    c.h = reinterpret_cast<__nv_bfloat16 *>(work + l.h);
    c.part = reinterpret_cast<float *>(work + l.part);
    c.chunks = reinterpret_cast<chunk *>(work + l.chunks);
    c.sorted = reinterpret_cast<int *>(work + l.sorted);
    c.counters = reinterpret_cast<int *>(work + l.counters);
    c.valid = reinterpret_cast<uint32_t *>(work + l.valid);
    c.arrived = reinterpret_cast<int *>(work + l.arrived);
    c.chunk_count = c.counters + f->experts + 1;
    c.next_item = reinterpret_cast<uint32_t *>(c.chunk_count + 1);
    c.h_slices = reinterpret_cast<uint32_t *>(work + l.h_slices);
    c.out_stride = f->out_stride;
    c.hidden = static_cast<uint32_t>(f->shape.hidden);
    c.hidden_tiles = static_cast<uint32_t>(f->shape.hidden_tiles);
    c.slices = f->slices;
    c.down_offset = static_cast<uint32_t>(f->shape.down_offset);
    c.bias_offset = static_cast<uint32_t>(f->shape.bias_offset);
    c.experts = f->experts;
    c.tokens = f->tokens;
    c.top_k = f->top_k;
    c.id_bytes = f->id_bytes;
    c.chunk_tokens = l.chunk_tokens;
    c.chunk_bound = l.chunk_bound;
    c.two_23 = 1u << 23;
    c.activation = f->activation;
    c.arithmetic = f->arithmetic;
    c.scale = f->scale;
    c.add = f->add;
    c.out_bf16 = f->out_type == NUMOE_BF16;
    c.out_aligned = f->out_stride % 4 == 0 && reinterpret_cast<uintptr_t>(f->out) % 16 == 0;
    c.fused = l.fused;
    c.local = l.local;
    c.for_wgmma = l.wgmma;
    if (l.pad)
        c.pad = {f->x,
                 reinterpret_cast<__nv_bfloat16 *>(work + l.x),
                 f->x_stride,
                 static_cast<uint64_t>(f->tokens) * 32 * f->shape.hidden_tiles,
                 c.hidden,
                 32 * c.hidden_tiles,
                 l.few ? few_raise() : 1.0f,
                 f->arithmetic,
                 f->x_type == NUMOE_F32,
                 l.wgmma};
    return c;
}

/* So many kernels load, and a block of each fits. */
bool there(const numoe_cuda_kernel_info *info, int count)
{
    for (int i = 0; i < count; i++)
        if (!info[i].binary_version || info[i].blocks_an_sm < 1)
            return false;
    return true;
}

cudaError_t launch_products(const call &c, const layout &l, const launching &how)
{
    if (l.few)
        return launch_few(c, how);
    const auto half = l.wgmma ? launch_wgmma : launch_many;
    const cudaError_t e = half(c, false, how);
    return e ? e : half(c, true, how);
}

} /* namespace */

extern "C" cudaError_t numoe_cuda_device_init(struct numoe_cuda_device *d)
{
    numoe_cuda_kernel_info few[FEW_KERNELS], many[MANY_KERNELS], wgmma[WGMMA_KERNELS];
    int device = 0;
    cudaError_t e = cudaGetDevice(&device);

    *d = {};
    if (!e)
        e = cudaDeviceGetAttribute(&d->multiprocessors, cudaDevAttrMultiProcessorCount, device);
    describe_few(few);
    describe_many(many);
    describe_wgmma(wgmma);
    cudaGetLastError(); /* not loading is no error */
    d->few = choose_few(few);
    d->forms = (there(few, 1) || there(few + 1, 1)) << NUMOE_CUDA_8 |
               there(many, 2) << NUMOE_CUDA_32 | there(many + 2, 2) << NUMOE_CUDA_64 |
               there(wgmma, 2) << NUMOE_CUDA_WGMMA_32 |
               there(wgmma + 2, 2) << NUMOE_CUDA_WGMMA_64 |
               there(wgmma + 4, 2) << NUMOE_CUDA_WGMMA_128;
    /* older code does not say when the next kernel may start, nor wait for the one before */
    d->overlap = few[0].ptx_version >= 90;
    return e;
}

extern "C" uint64_t numoe_cuda_workspace_bytes(const struct numoe_cuda_device *device,
                                               const struct numoe_cuda_ffn *f)
{
    return too_large(f) || absent(device, f->form) ? 0 : lay_out(f).bytes;
}

extern "C" cudaError_t numoe_cuda_ffn_launch(const struct numoe_cuda_device *device,
                                             const struct numoe_cuda_ffn *f, cudaStream_t stream)
{
    if (f->tokens == 0)
        return cudaSuccess;
    if (too_large(f) || absent(device, f->form))
        return cudaErrorInvalidValue;
    const layout l = lay_out(f);
    const call c = make_call(f, l);
    const launching how = {stream, device->multiprocessors, device->few, device->overlap};
    cudaError_t e = launch_route(c, how);

    if (!e)
        e = launch_products(c, l, how);
    if (!e && !c.fused)
        e = launch_combine(c, how);
    return e;
}

extern "C" size_t numoe_cuda_kernels(struct numoe_cuda_kernel_info *info, size_t count)
{
    size_t filled = 0;

    if (count < FEW_KERNELS + MANY_KERNELS + WGMMA_KERNELS)
        return FEW_KERNELS + MANY_KERNELS + WGMMA_KERNELS;
    filled += describe_few(info);
    filled += describe_many(info + filled);
    filled += describe_wgmma(info + filled);
    if (info[filled - 1].binary_version)
        return filled;
    cudaGetLastError(); /* another architecture's: none of this device's kernels */
    return filled - WGMMA_KERNELS;
}
