/*
 * CUDA behind the table of gpu_ops.h, and what else gpu_backend.h wants from it.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <cuda_runtime_api.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "gpu_backend.h"
#include "numoe_cuda.h"

struct cuda_device {
    int index;
    struct numoe_cuda_device numbers;
};

static int enter(void *device)
{
    return (int)cudaSetDevice(((struct cuda_device *)device)->index);
}

static int memory(void *device, uint64_t *free_bytes, uint64_t *total_bytes)
{
    size_t available = 0, total = 0;
    const cudaError_t e = cudaMemGetInfo(&available, &total);

    (void)device;
    *free_bytes = available;
    *total_bytes = total;
    return (int)e;
}

static int allocate(void *device, uint64_t bytes, void **address)
{
    (void)device;
    return (int)cudaMalloc(address, bytes);
}

static int release(void *device, void *address)
{
    (void)device;
    return (int)cudaFree(address);
}

static int host_allocate(void *device, uint64_t bytes, void **address)
{
    (void)device;
    return (int)cudaHostAlloc(address, bytes, cudaHostAllocPortable);
}

static int host_release(void *device, void *address)
{
    (void)device;
    return (int)cudaFreeHost(address);
}

static int pin(void *device, void *address, uint64_t bytes)
{
    (void)device;
    /* for every device */
    return (int)cudaHostRegister(address, bytes, cudaHostRegisterPortable);
}

static int unpin(void *device, void *address)
{
    (void)device;
    return (int)cudaHostUnregister(address);
}

static int stream_create(void *device, void **stream)
{
    (void)device;
    return (int)cudaStreamCreateWithFlags((cudaStream_t *)stream, cudaStreamNonBlocking);
}

static int stream_destroy(void *device, void *stream)
{
    (void)device;
    return (int)cudaStreamDestroy(stream);
}

/* Long enough for what is nearly there, a decode step's wait; then the thread sleeps: CUDA's own
 * waits would keep a core busy for as long as copies take. */
enum { SPIN_NS = 60000 };

/* The event is a blocking one. */
static cudaError_t wait_for(cudaEvent_t event)
{
    const uint64_t since = numoe_now_ns();
    cudaError_t e;

    do
        e = cudaEventQuery(event);
    while (e == cudaErrorNotReady && numoe_now_ns() - since < SPIN_NS);
    if (e != cudaErrorNotReady)
        return e;
    cudaGetLastError(); /* not ready is no error */
    return cudaEventSynchronize(event);
}

static int stream_sync(void *device, void *stream)
{
    cudaEvent_t event;
    cudaError_t e =
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync);

    (void)device;
    if (e)
        return (int)e;
    e = cudaEventRecord(event, stream);
    if (!e)
        e = wait_for(event);
    cudaEventDestroy(event);
    return (int)e;
}

static int stream_captures(void *device, void *stream, bool *yes)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t e = cudaStreamIsCapturing(stream, &status);

    (void)device;
    *yes = status != cudaStreamCaptureStatusNone;
    return (int)e;
}

static int stream_wait(void *device, void *stream, void *event)
{
    (void)device;
    return (int)cudaStreamWaitEvent(stream, event, 0);
}

static int event_create(void *device, void **event)
{
    (void)device;
    return (int)cudaEventCreateWithFlags((cudaEvent_t *)event,
                                         cudaEventDisableTiming | cudaEventBlockingSync);
}

static int event_destroy(void *device, void *event)
{
    (void)device;
    return (int)cudaEventDestroy(event);
}

static int event_record(void *device, void *event, void *stream)
{
    (void)device;
    return (int)cudaEventRecord(event, stream);
}

static int event_query(void *device, void *event, bool *done)
{
    const cudaError_t e = cudaEventQuery(event);

    (void)device;
    *done = e == cudaSuccess;
    if (e != cudaErrorNotReady)
        return (int)e;
    cudaGetLastError(); /* not ready is no error */
    return 0;
}

static int event_sync(void *device, void *event)
{
    (void)device;
    return (int)wait_for(event);
}

static int new_timer(void *device, void **event)
{
    (void)device;
    return (int)cudaEventCreate((cudaEvent_t *)event);
}

static int elapsed(void *device, void *begin, void *end, double *ms)
{
    float value = 0;
    const cudaError_t e = cudaEventElapsedTime(&value, begin, end);

    (void)device;
    *ms = (double)value;
    return (int)e;
}

static int copy_in(void *device, void *stream, void *to, const void *from, uint64_t bytes)
{
    (void)device;
    return (int)cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream);
}

/* One by one where the driver or the toolkit knows no batches, or compute-sanitizer's initcheck is
 * to see what they write. */
static int copy_in_many(void *device, void *stream, void *const *to, const void *const *from,
                        const uint64_t *bytes, uint32_t count)
{
    cudaError_t e = cudaSuccess;
#if CUDART_VERSION >= 13000 && !defined NUMOE_COPIES_ONE_BY_ONE
    struct cudaMemcpyAttributes attributes = {.srcAccessOrder = cudaMemcpySrcAccessOrderStream};
    size_t first = 0;

    _Static_assert(sizeof(size_t) == sizeof(uint64_t), "sizes of a batch");
    e = cudaMemcpyBatchAsync((void *const *)to, from, (const size_t *)bytes, count, &attributes,
                             &first, 1, stream);
    if (e != cudaErrorCallRequiresNewerDriver && e != cudaErrorNotSupported)
        return (int)e;
    cudaGetLastError();
    e = cudaSuccess;
#endif
    for (uint32_t i = 0; !e && i < count; i++)
        e = (cudaError_t)copy_in(device, stream, to[i], from[i], bytes[i]);
    return (int)e;
}

static int copy_out(void *device, void *stream, void *to, const void *from, uint64_t bytes)
{
    (void)device;
    return (int)cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream);
}

static int peer_open(void *device, void *peer)
{
    const struct cuda_device *to = device, *from = peer;
    int can = 0;
    cudaError_t e;

    if (to->index == from->index)
        return 0;
    e = cudaDeviceCanAccessPeer(&can, to->index, from->index);
    if (e || !can)
        return (int)(e ? e : cudaErrorPeerAccessUnsupported);
    e = cudaDeviceEnablePeerAccess(from->index, 0);
    if (e != cudaErrorPeerAccessAlreadyEnabled)
        return (int)e;
    cudaGetLastError(); /* others of the process have opened it: it stays open for them too */
    return 0;
}

static int copy_peer(void *device, void *stream, void *to, void *peer, const void *from,
                     uint64_t bytes)
{
    const int here = ((struct cuda_device *)device)->index;
    const int there = ((struct cuda_device *)peer)->index;

    return (int)(here == there ? cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream)
                               : cudaMemcpyPeerAsync(to, here, from, there, bytes, stream));
}

static uint64_t workspace_bytes(void *device, const struct numoe_cuda_ffn *ffn)
{
    return numoe_cuda_workspace_bytes(&((struct cuda_device *)device)->numbers, ffn);
}

static int launch(void *device, void *stream, const struct numoe_cuda_ffn *ffn)
{
    return (int)numoe_cuda_ffn_launch(&((struct cuda_device *)device)->numbers, ffn, stream);
}

static int replay(void *device, void *stream, const struct numoe_cuda_ffn *ffn, uint32_t count)
{
    cudaGraphExec_t exec = NULL;
    cudaGraph_t graph = NULL;
    cudaError_t ended, e = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);

    if (e)
        return (int)e;
    e = (cudaError_t)launch(device, stream, ffn);
    ended = cudaStreamEndCapture(stream, &graph);
    if (!e)
        e = ended;
    if (!e)
        e = cudaGraphInstantiate(&exec, graph, 0);
    for (uint32_t i = 0; !e && i < count; i++)
        e = cudaGraphLaunch(exec, stream);
    if (!e)
        e = cudaStreamSynchronize(stream);
    if (exec)
        cudaGraphExecDestroy(exec);
    if (graph)
        cudaGraphDestroy(graph);
    return (int)e;
}

static int round_rows(void *device, void *stream, const float *from, uint16_t *to,
                      uint64_t to_stride, uint64_t rows, uint64_t columns, bool add)
{
    (void)device;
    return (int)numoe_cuda_round(from, to, to_stride, rows, columns, add, stream);
}

static int sum(void *device, void *stream, float *to, const float *const *from, uint32_t count,
               uint64_t elements)
{
    (void)device;
    return (int)numoe_cuda_sum(to, from, count, elements, stream);
}

/* A sum of one: its bits. */
static int read_in(void *device, void *stream, void *to, const void *from, uint64_t bytes)
{
    const float *const parts[1] = {from};

    (void)device;
    return (int)numoe_cuda_sum(to, parts, 1, bytes / 4, stream);
}

static int marlin(void *device, void *stream, const struct numoe_cuda_marlin *of)
{
    (void)device;
    return (int)numoe_cuda_marlin(of, stream);
}

static void clear_error(void *device)
{
    (void)device;
    cudaGetLastError();
}

const struct gpu_ops *gpu_backend_ops(void)
{
    static const struct gpu_ops ops = {
        .enter = enter,
        .memory = memory,
        .allocate = allocate,
        .release = release,
        .host_allocate = host_allocate,
        .host_release = host_release,
        .pin = pin,
        .unpin = unpin,
        .stream_create = stream_create,
        .stream_destroy = stream_destroy,
        .stream_sync = stream_sync,
        .stream_captures = stream_captures,
        .stream_wait = stream_wait,
        .event_create = event_create,
        .event_destroy = event_destroy,
        .event_record = event_record,
        .event_query = event_query,
        .event_sync = event_sync,
        .timer_create = new_timer,
        .elapsed = elapsed,
        .copy_in = copy_in,
        .copy_in_many = copy_in_many,
        .read_in = read_in,
        .copy_out = copy_out,
        .peer_open = peer_open,
        .copy_peer = copy_peer,
        .workspace_bytes = workspace_bytes,
        .launch = launch,
        .replay = replay,
        .round = round_rows,
        .sum = sum,
        .marlin = marlin,
        .clear_error = clear_error,
        .error_text = gpu_backend_text,
    };
    return &ops;
}

const char *gpu_backend_images(void)
{
    return NUMOE_CUDA_IMAGES;
}

const char *gpu_backend_text(int code)
{
    return cudaGetErrorString((cudaError_t)code);
}

int gpu_backend_count(uint32_t *count)
{
    int found = 0;
    const cudaError_t e = cudaGetDeviceCount(&found);

    cudaGetLastError();
    *count = e || found < 0 ? 0 : (uint32_t)found;
    return (int)e;
}

int gpu_backend_describe(uint32_t index, struct numoe_gpu_properties *p)
{
    struct cudaDeviceProp prop;
    size_t available = 0, total = 0;
    cudaError_t e = cudaGetDeviceProperties(&prop, (int)index);

    if (e)
        goto fail;
    snprintf(p->name, sizeof p->name, "%.*s", (int)sizeof p->name - 1, prop.name);
    e = cudaDeviceGetPCIBusId(p->bus, (int)sizeof p->bus, (int)index);
    if (e)
        goto fail;
    p->memory_bytes = p->free_bytes = prop.totalGlobalMem;
    p->multiprocessors = (uint32_t)prop.multiProcessorCount;
    p->major = prop.major;
    p->minor = prop.minor;
    p->shared_bytes = prop.sharedMemPerBlockOptin;
    p->l2_bytes = (uint64_t)prop.l2CacheSize;
    cudaDriverGetVersion(&p->driver_version);
    cudaRuntimeGetVersion(&p->runtime_version);
    /* free memory is known only once the device is in use by this process */
    e = cudaSetDevice((int)index);
    if (!e)
        e = cudaMemGetInfo(&available, &total);
    if (!e)
        p->free_bytes = available;
fail:
    cudaGetLastError();
    return (int)e;
}

int gpu_backend_open(uint32_t index, void **out)
{
    struct cuda_device *device = calloc(1, sizeof *device);
    cudaError_t e;

    if (!device)
        return (int)cudaErrorMemoryAllocation;
    device->index = (int)index;
    e = cudaSetDevice((int)index);
    if (!e)
        e = numoe_cuda_device_init(&device->numbers);
    if (e) {
        cudaGetLastError();
        free(device);
        return (int)e;
    }
    *out = device;
    return 0;
}

void gpu_backend_close(void *device)
{
    free(device); /* the primary context is the process's, not ours to reset */
}

int gpu_backend_load(void *device, uint64_t *need, int *ptx_version, const char **failed)
{
    struct numoe_cuda_kernel_info info[32];
    size_t count;

    (void)device;
    memset(info, 0, sizeof info);
    *need = 0;
    cudaGetLastError();
    count = numoe_cuda_kernels(info, sizeof info / sizeof info[0]);
    for (size_t i = 0; i < count && i < sizeof info / sizeof info[0]; i++) {
        const uint64_t shared =
            (uint64_t)info[i].static_shared_bytes + (uint64_t)info[i].dynamic_shared_bytes;
        /* a kernel that did not load has not been described */
        if (info[i].binary_version == 0) {
            const cudaError_t e = cudaGetLastError();
            *failed = info[i].name;
            return (int)(e ? e : cudaErrorNoKernelImageForDevice);
        }
        if (shared > *need)
            *need = shared;
        *ptx_version = info[i].ptx_version;
    }
    cudaGetLastError(); /* opting in to shared memory is judged by the numbers */
    return 0;
}

/* ---- measuring ------------------------------------------------------------------------------- */

struct timer {
    cudaEvent_t begin, end;
};

static cudaError_t timer_make(struct timer *t)
{
    cudaError_t e = cudaEventCreate(&t->begin);
    return e ? e : cudaEventCreate(&t->end);
}

static void timer_free(struct timer *t)
{
    if (t->begin)
        cudaEventDestroy(t->begin);
    if (t->end)
        cudaEventDestroy(t->end);
}

static cudaError_t timer_read(struct timer *t, double *ms)
{
    float elapsed = 0;
    cudaError_t e = cudaEventSynchronize(t->end);

    if (!e)
        e = cudaEventElapsedTime(&elapsed, t->begin, t->end);
    *ms = (double)elapsed;
    return e;
}

int gpu_backend_ceilings(void *device, double *read_gbs, double *link_gbs, double *mma_gops)
{
    enum { REPEAT = 12, MMA_ROUNDS = 1 << 14 };
    const size_t link = (size_t)256 << 20;
    struct cuda_device *d = device;
    size_t big = (size_t)8 << 30, available = 0, total = 0;
    struct timer timer = {0};
    cudaStream_t stream = NULL;
    void *on_device = NULL, *on_host = NULL;
    uint32_t *word = NULL;
    double ms, operations = 0, best_read = 0, best_link = 0, best_mma = 0;
    cudaError_t e = cudaMemGetInfo(&available, &total);

    while (!e && big > link && big > available / 2)
        big /= 2;
    if (!e)
        e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (!e)
        e = timer_make(&timer);
    if (!e)
        e = cudaMalloc(&on_device, big);
    if (!e)
        e = cudaMalloc((void **)&word, sizeof *word);
    if (!e)
        e = cudaHostAlloc(&on_host, link, cudaHostAllocDefault);
    if (!e) {
        memset(on_host, 1, link);
        e = cudaMemset(on_device, 1, big);
    }
    if (!e)
        e = cudaDeviceSynchronize();
    for (int i = 0; !e && i < REPEAT; i++) {
        e = cudaEventRecord(timer.begin, stream);
        if (!e)
            e = numoe_cuda_read(on_device, big, word, d->numbers.multiprocessors, stream);
        if (!e)
            e = cudaEventRecord(timer.end, stream);
        if (!e)
            e = timer_read(&timer, &ms);
        if (!e && ms > 0 && (double)big / ms / 1e6 > best_read)
            best_read = (double)big / ms / 1e6;
    }
    for (int i = 0; !e && i < REPEAT; i++) {
        e = cudaEventRecord(timer.begin, stream);
        if (!e)
            e = cudaMemcpyAsync(on_device, on_host, link, cudaMemcpyHostToDevice, stream);
        if (!e)
            e = cudaEventRecord(timer.end, stream);
        if (!e)
            e = timer_read(&timer, &ms);
        if (!e && ms > 0 && (double)link / ms / 1e6 > best_link)
            best_link = (double)link / ms / 1e6;
    }
    for (int i = 0; !e && i < REPEAT; i++) {
        e = cudaEventRecord(timer.begin, stream);
        if (!e)
            e = numoe_cuda_multiply(MMA_ROUNDS, (float *)(void *)word, d->numbers.multiprocessors,
                                    &operations, stream);
        if (!e)
            e = cudaEventRecord(timer.end, stream);
        if (!e)
            e = timer_read(&timer, &ms);
        if (!e && ms > 0 && operations / ms / 1e6 > best_mma)
            best_mma = operations / ms / 1e6;
    }
    *mma_gops = best_mma;
    *read_gbs = best_read;
    *link_gbs = best_link;
    if (on_host)
        cudaFreeHost(on_host);
    if (word)
        cudaFree(word);
    if (on_device)
        cudaFree(on_device);
    timer_free(&timer);
    if (stream)
        cudaStreamDestroy(stream);
    return (int)e;
}

int gpu_backend_time(void *device, void *stream, const struct numoe_cuda_ffn *calls, uint32_t count,
                     uint32_t repeat, double *ms)
{
    cudaGraphExec_t exec = NULL;
    cudaGraph_t graph = NULL;
    struct timer timer = {0};
    cudaError_t e, ended;

    /* once outside of the graph: loads the kernels */
    e = (cudaError_t)launch(device, stream, &calls[0]);
    if (!e)
        e = cudaStreamSynchronize(stream);
    if (!e)
        e = timer_make(&timer);
    if (!e)
        e = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    if (e)
        goto out;
    for (uint32_t i = 0; !e && i < count; i++)
        e = (cudaError_t)launch(device, stream, &calls[i]);
    ended = cudaStreamEndCapture(stream, &graph);
    if (!e)
        e = ended;
    if (!e)
        e = cudaGraphInstantiate(&exec, graph, 0);
    for (uint32_t i = 0; !e && i < 2; i++)
        e = cudaGraphLaunch(exec, stream);
    for (uint32_t i = 0; !e && i < repeat; i++) {
        e = cudaEventRecord(timer.begin, stream);
        if (!e)
            e = cudaGraphLaunch(exec, stream);
        if (!e)
            e = cudaEventRecord(timer.end, stream);
        if (!e)
            e = timer_read(&timer, &ms[i]);
        ms[i] /= count;
    }
out:
    if (exec)
        cudaGraphExecDestroy(exec);
    if (graph)
        cudaGraphDestroy(graph);
    timer_free(&timer);
    return (int)e;
}
