/*
 * gpu_window.h - device memory that weights pass through: pieces of any size, first in, first out.
 * Bookkeeping only; gpu_stream.c does what the states ask for.
 *
 *   (none) --open--> filling --queue--> queued --take--> taken --spend--> spent
 *     ^                 |                  |                                ^ |
 *     |                 +------- drop -----+--------------------------------+ |
 *     +------------------------------ reclaimed ------------------------------+
 *
 *   filling  copies into it are being queued
 *   queued   all of them are, and `copied` is recorded behind them
 *   taken    computation with it is being queued behind `copied`
 *   spent    `used` is recorded behind its last computation; or it was dropped before it had one
 *
 * Bytes and descriptor of a spent piece are given again only by reclaiming it, oldest first, and
 * not while other devices have to copy from it (`readers`). Copies into what is reclaimed must wait
 * for `used`, if it was recorded; that is the stream's wait and not the host's. The host waits for
 * `copied` before it writes the host table of a descriptor again.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_WINDOW_H
#define NUMOE_GPU_WINDOW_H

#include <stdbool.h>
#include <stdint.h>

enum { GPU_PIECES = 32 };

enum gpu_piece_state {
    GPU_PIECE_NONE,
    GPU_PIECE_FILLING,
    GPU_PIECE_QUEUED,
    GPU_PIECE_TAKEN,
    GPU_PIECE_SPENT
};

struct gpu_piece {
    enum gpu_piece_state state;
    uint64_t position, bytes; /* virtual: position % window.bytes is where it begins */
    bool was_used;            /* `used` is recorded */
    uint32_t readers;         /* bit i: device i has not yet copied what it needs of it */
    uint32_t job, first, end; /* experts of a job's list */
    void *copied, *used;      /* events, of the descriptor */
    uint32_t *host_table, *table;
};

struct gpu_window {
    uint64_t bytes;
    struct gpu_piece pieces[GPU_PIECES];
    uint32_t oldest, count; /* live: pieces[(oldest + i) % GPU_PIECES] */
    uint64_t head;          /* virtual end of the newest */
};

static inline struct gpu_piece *gpu_window_piece(struct gpu_window *window, uint32_t i)
{
    return &window->pieces[(window->oldest + i) % GPU_PIECES];
}

static inline uint64_t gpu_window_begin(const struct gpu_window *window,
                                        const struct gpu_piece *piece)
{
    return window->bytes ? piece->position % window->bytes : 0;
}

/* How many of the oldest pieces have to be reclaimed for a new one of so many bytes. 0; -EAGAIN:
 * one of them is not spent, or not read; -EOVERFLOW: larger than the window. */
int gpu_window_room(const struct gpu_window *window, uint64_t bytes, uint32_t *reclaim);

/* The next piece, filling, once `reclaim` of the oldest, all spent, are dealt with. */
struct gpu_piece *gpu_window_open(struct gpu_window *window, uint64_t bytes, uint32_t reclaim);

/* No piece is live any more. Events and tables stay with their descriptors. */
void gpu_window_forget(struct gpu_window *window);

#endif
