/*
 * gpu_stream.h - experts on their way to the device, and those that stay there.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_STREAM_H
#define NUMOE_GPU_STREAM_H

#include "gpu_cache.h"
#include "gpu_pinned.h"
#include "gpu_tally.h"
#include "gpu_trace.h"
#include "gpu_window.h"

#define GPU_NO_LAYER UINT64_MAX

/* The experts of a layer that are to be copied, in order. */
struct gpu_job {
    uint64_t layer; /* GPU_NO_LAYER: none */
    uint32_t generation;
    uint32_t *list;         /* [experts] */
    bool *listed;           /* [experts] */
    uint32_t count, opened; /* list[0 .. opened) are in pieces */
};

struct gpu_copy {
    const uint8_t *from;
    uint64_t to, bytes; /* to: of the pool */
};

/* What can be computed at once: see gpu_stream_next. */
struct gpu_part {
    const uint8_t *weights;
    const uint32_t *slice_at; /* device; NULL: there is no more */
    const float *down_bias;   /* device, or NULL */
    struct gpu_piece *piece;  /* NULL: experts that stay */
};

struct gpu_stream {
    struct numoe_gpu *gpu;
    const struct numoe_gpu_source *source;
    const struct gpu_pinned *pinned;
    struct gpu_ring *ring;  /* NULL: everything is pinned */
    void *copies, *compute; /* streams */
    void *fills;            /* stream that waits for experts which nobody waits for */

    /* [cells][cell_bytes], then the window; slices are counted from its begin in units of 64 */
    uint8_t *pool;
    uint64_t pool_bytes, cell_bytes, table_bytes;
    uint64_t fixed_bytes; /* of device memory: tables and biases */
    struct gpu_cache cache;
    struct gpu_window window;
    uint64_t window_wanted, cache_wanted, piece_least; /* piece_least: bytes of each region */
    uint64_t pool_most;                                /* bytes that the pool may have */
    uint64_t *cell_user; /* [cells] layer that computed with the cell last; GPU_NO_LAYER */
    uint32_t *wanted;    /* [layers] experts that there are */

    /* of layers: the places of experts that stay. [layers + GPU_PIECES] tables, the last those of
     * pieces' descriptors; host: pinned */
    uint8_t *tables, *host_tables;
    bool uneven; /* some experts have fewer slices here than a table's row: the rest of it is */
    uint64_t zero_at;     /* a slice of zeros, from pool on */
    bool *stale;          /* [layers] the device's table is not of the cells held now */
    bool *seen;           /* [layers] generation and biases are those of the device */
    uint32_t *generation; /* [layers] of the cells' weights and of biases */
    void **used;          /* [layers] events: the last computation with the layer's cells is past */
    float *bias, *host_bias; /* [layers][experts][width] or NULL */
    void *bias_sent;         /* event */

    struct gpu_job jobs[2];
    uint32_t current;         /* index of the job that is taken from; the other is prefetched */
    const uint32_t *need;     /* [experts] of the current job: tokens; between begin and end */
    uint64_t tokens;          /* of the last call that said so: what the next pieces are sized by */
    bool in_call, kept_given; /* kept_given: the part of experts that stay */
    bool kept_open;           /* and it is not done with */
    uint32_t readers; /* of the call's pieces: devices that copy from them (gpu_relay.h); 0: none */
    uint32_t *everything; /* [experts] ones */
    uint32_t *slices_had; /* [experts] scratch */

    /* the piece that is being filled; NULL */
    struct gpu_piece *filling;
    struct gpu_copy *copy; /* its copies */
    uint32_t copy_count, copy_room, copy_at;
    uint64_t copy_offset;
    void **batch_to;
    const void **batch_from;
    uint64_t *batch_bytes;
    uint32_t batch_count;
    bool table_sent;

    /* Of several devices, in a call: instead of sleeping until the event in the midst of filling,
     * the host fills others. This device is current again behind it. NULL: it sleeps */
    int (*await)(void *user, void *event, struct numoe_error *error);
    void *await_user;

    struct gpu_trace *trace; /* NULL: nobody is told */
    struct gpu_mark *copying, *computing;
    uint64_t copied_before; /* bytes, when the piece began to be filled */

    uint64_t jobs_begun;
    struct gpu_tally tally;
};

/* From one table to the next: they begin aligned. */
static inline uint64_t gpu_stream_table_step(const struct gpu_stream *stream)
{
    return (stream->table_bytes + 255) / 256 * 256;
}

static inline uint32_t *gpu_stream_table(const struct gpu_stream *stream, uint8_t *tables,
                                         uint64_t index)
{
    return (uint32_t *)(void *)(tables + index * gpu_stream_table_step(stream));
}

enum { GPU_BATCH = 256 };
/* What each region gives to a piece at least, unless that is asked for: shorter copies are slow. */
#define GPU_PIECE_LEAST ((uint64_t)4 << 20)

/* What is wanted of budget_bytes of device memory. */
struct gpu_stream_sizes {
    uint64_t window, cache, budget;
    uint64_t piece; /* of each region in a piece, at least */
};

/* The window comes first. 0; -ENOMEM: not even two experts fit */
int gpu_stream_init(struct gpu_stream *stream, struct numoe_gpu *gpu,
                    const struct numoe_gpu_source *source, const struct gpu_pinned *pinned,
                    struct gpu_ring *ring, const struct gpu_stream_sizes *sizes,
                    struct numoe_error *error);
/* Waits for both streams first. */
void gpu_stream_fini(struct gpu_stream *stream);

/* Give back at least `bytes` of device memory, or as much as can be; -ENOMEM when there is nothing
 * to give. Not in a call. What was held is copied again. */
int gpu_stream_shrink(struct gpu_stream *stream, uint64_t bytes, struct numoe_error *error);

/* Device memory for experts where there is none, as much as was wanted last if there is so much;
 * two experts' worth at least. */
int gpu_stream_remake(struct gpu_stream *stream, struct numoe_error *error);

/* The expert is on the device, or on its way by a prefetch. */
static inline bool gpu_stream_has(const struct gpu_stream *stream, uint64_t layer, uint32_t expert)
{
    const struct gpu_job *ahead = &stream->jobs[!stream->current];

    return gpu_cache_holds(&stream->cache, layer, expert) ||
           (ahead->layer == layer && ahead->listed[expert]);
}

/* The cell that an expert of a job has, or is given; GPU_NO_CELL. */
static inline uint32_t gpu_stream_cell(const struct gpu_stream *stream, const struct gpu_job *job,
                                       uint32_t i)
{
    return stream->cache.cell_of[gpu_cache_at(&stream->cache, job->layer, job->list[i])];
}

/* All experts of the layer that there are have cells. */
bool gpu_stream_resident(const struct gpu_stream *stream);

/* Begin to copy a layer's experts: those with need[e], or all; not in a call. Queues what needs no
 * waiting for staging or for space. */
int gpu_stream_prefetch(struct gpu_stream *stream, uint64_t layer, const uint32_t *need,
                        struct numoe_error *error);
/* Queue more of a call, or else of a prefetch, without waiting. *more: some is left. A failure in a
 * call is the call's. */
int gpu_stream_pump(struct gpu_stream *stream, bool *more, struct numoe_error *error);

/*
 * A call: need[e] of its tokens go to expert e (kept until gpu_stream_end); asked: the same of all
 * experts, for their heat, or NULL. What was prefetched of the layer is taken over, the rest is
 * copied; another layer's prefetch is dropped.
 */
int gpu_stream_begin(struct gpu_stream *stream, uint64_t layer, const uint32_t *need,
                     const uint32_t *asked, uint64_t tokens, struct numoe_error *error);
/* Right behind it: other devices, bit i: device i, copy from the call's pieces too. Each piece's
 * memory is kept until its `readers` are cleared. */
void gpu_stream_lend(struct gpu_stream *stream, uint32_t readers);
/* Queue copies of the first piece of the call, if none is, as far as that needs no waiting. */
int gpu_stream_lead(struct gpu_stream *stream, struct numoe_error *error);
/*
 * The next part: experts that stay, then piece after piece in the order of arrival. What is queued
 * on `on` from now on finds the part's weights complete. Other experts are absent in its table.
 * There is at least one part. part->slice_at is NULL after the last. -EAGAIN: pieces that were
 * taken and not done with fill the window.
 */
int gpu_stream_next(struct gpu_stream *stream, void *on, struct gpu_part *part,
                    struct numoe_error *error);
/* What was queued on `on` until now was the last use of the part. -EINVAL: it is not taken, or was
 * given up since. */
int gpu_stream_done(struct gpu_stream *stream, void *on, const struct gpu_part *part,
                    struct numoe_error *error);
int gpu_stream_refuse(struct numoe_error *error); /* that -EINVAL */
/* `used` of the layer stands behind what was queued on `on` until now, and behind all that it stood
 * behind before. */
int gpu_stream_mark_used(struct gpu_stream *stream, uint64_t layer, void *on,
                         struct numoe_error *error);
/* What gpu_stream_next comes to. */
enum gpu_stream_ahead {
    GPU_PART_NONE,  /* no part with experts that are needed is left */
    GPU_PART_FULL,  /* there is no space for it: see -EAGAIN above */
    GPU_PART_COMES, /* its copies are queued; or the host may not write its table yet */
    GPU_PART_HERE   /* gpu_stream_next gives it without waiting */
};
/* Queue what there is space for, and say what the next part is. */
int gpu_stream_look(struct gpu_stream *stream, enum gpu_stream_ahead *ahead,
                    struct numoe_error *error);
/* Parts that were taken and are not done with: `on` is waited for, and they are given up. */
void gpu_stream_settle(struct gpu_stream *stream, void *on);
/* The call is over: after its last part, or before: then what was not taken is dropped, and `on`
 * is waited for if a part is not done with. */
void gpu_stream_end(struct gpu_stream *stream, void *on);

/* A call that computes nothing: experts with a need come, and those that are to stay do. */
int gpu_stream_visit(struct gpu_stream *stream, uint64_t layer, const uint32_t *need,
                     struct numoe_error *error);

/* Copy the hottest experts of all layers to where they stay. */
int gpu_stream_warm(struct gpu_stream *stream, struct numoe_error *error);

/* Copy an expert to where it stays, if it gets a cell. Not in a call. */
int gpu_stream_bring(struct gpu_stream *stream, uint64_t layer, uint32_t expert,
                     struct numoe_error *error);

/*
 * Copy the experts of a layer with need[e] to where they stay, and wait for them. Until
 * gpu_stream_loose the device's table of the layer has these and no others, and nothing that it
 * speaks of moves: graphs may read it. Other experts pass through the window. Not in a call.
 * -ENOMEM: the layer has no room for so many; -EBUSY: it is held already
 */
int gpu_stream_hold(struct gpu_stream *stream, uint64_t layer, const uint32_t *need,
                    struct numoe_error *error);
void gpu_stream_loose(struct gpu_stream *stream, uint64_t layer);
/* What a graph computes with, of a layer that is held. */
struct gpu_part gpu_stream_held(const struct gpu_stream *stream, uint64_t layer);

/* Nothing is held any more, nor on its way, but for layers that gpu_stream_hold holds. Not in a
 * call. */
void gpu_stream_forget(struct gpu_stream *stream);

#endif
