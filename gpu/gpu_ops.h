/*
 * gpu_ops.h - what a device can do, as a table of functions: the CUDA one in gpu_cuda.c, and fake
 * ones with delays and failures in tests. Everything else in gpu/ is written against this table and
 * knows no CUDA.
 *
 * Each function that returns int returns 0 or a CUDA error number; gpu_error.h says which of them
 * the device survives. Streams and events are handles of the table's own.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_OPS_H
#define NUMOE_GPU_OPS_H

#include <stdbool.h>
#include <stdint.h>

#include "numoe_cuda_call.h"

struct gpu_ops {
    /* Make the device current for the calling thread. Before any other call of a thread. */
    int (*enter)(void *device);

    int (*memory)(void *device, uint64_t *free_bytes, uint64_t *total_bytes);
    int (*allocate)(void *device, uint64_t bytes, void **address);
    int (*release)(void *device, void *address);
    /* Page-locked host memory: of its own, or [address, address + bytes) that exists already. */
    int (*host_allocate)(void *device, uint64_t bytes, void **address);
    int (*host_release)(void *device, void *address);
    int (*pin)(void *device, void *address, uint64_t bytes);
    int (*unpin)(void *device, void *address);

    int (*stream_create)(void *device, void **stream);
    int (*stream_destroy)(void *device, void *stream);
    int (*stream_sync)(void *device, void *stream);
    /* *yes: what is queued on the stream goes into a graph. */
    int (*stream_captures)(void *device, void *stream, bool *yes);
    /* What follows on the stream runs after the event. */
    int (*stream_wait)(void *device, void *stream, void *event);

    int (*event_create)(void *device, void **event);
    int (*event_destroy)(void *device, void *event);
    int (*event_record)(void *device, void *event, void *stream);
    /* *done: everything before the last record has happened; also when never recorded. */
    int (*event_query)(void *device, void *event, bool *done);
    int (*event_sync)(void *device, void *event);

    /* An event that keeps when it happened; milliseconds between two that have. */
    int (*timer_create)(void *device, void **event);
    int (*elapsed)(void *device, void *begin, void *end, double *ms);

    int (*copy_in)(void *device, void *stream, void *to, const void *from, uint64_t bytes);
    /* The same for several that are small: in any order, as fast as one. */
    int (*copy_in_many)(void *device, void *stream, void *const *to, const void *const *from,
                        const uint64_t *bytes, uint32_t count);
    /* The same by the device's processors, so that copies that are queued for the link do not hold
     * it up: for little, in units of 4 bytes, from page-locked memory of host_allocate. */
    int (*read_in)(void *device, void *stream, void *to, const void *from, uint64_t bytes);
    int (*copy_out)(void *device, void *stream, void *to, const void *from, uint64_t bytes);

    /* Let the device copy straight from the memory of a peer of the same table, which may be the
     * same device. */
    int (*peer_open)(void *device, void *peer);
    /* From the peer's memory to the device's, on a stream of the device. */
    int (*copy_peer)(void *device, void *stream, void *to, void *peer, const void *from,
                     uint64_t bytes);

    uint64_t (*workspace_bytes)(void *device, const struct numoe_cuda_ffn *ffn);
    int (*launch)(void *device, void *stream, const struct numoe_cuda_ffn *ffn);
    /* Capture a launch in a graph, and run that so often on the stream. Waits for it. */
    int (*replay)(void *device, void *stream, const struct numoe_cuda_ffn *ffn, uint32_t count);
    /* bf16 rows of `columns`: to = add ? to + from : from, rounded once. */
    int (*round)(void *device, void *stream, const float *from, uint16_t *to, uint64_t to_stride,
                 uint64_t rows, uint64_t columns, bool add);

    /* to[i] = from[0][i] + from[1][i] + ...; `to` may be one of them. */
    int (*sum)(void *device, void *stream, float *to, const float *const *from, uint32_t count,
               uint64_t elements);

    int (*marlin)(void *device, void *stream, const struct numoe_cuda_marlin *marlin);

    /* Drop a recoverable error that a call has left behind for the next to report. */
    void (*clear_error)(void *device);
    /* CUDA's own words. */
    const char *(*error_text)(int code);
};

#endif
