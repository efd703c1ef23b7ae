/* Device memory that weights pass through. SPDX-License-Identifier: Apache-2.0 */
#include "gpu_window.h"

#include <errno.h>

/* Where the next piece would begin: not across the end. */
static uint64_t place(const struct gpu_window *w, uint64_t bytes)
{
    if (w->bytes == 0 || w->head % w->bytes + bytes <= w->bytes)
        return w->head;
    return (w->head / w->bytes + 1) * w->bytes;
}

static const struct gpu_piece *piece_at(const struct gpu_window *w, uint32_t i)
{
    return &w->pieces[(w->oldest + i) % GPU_PIECES];
}

int gpu_window_room(const struct gpu_window *w, uint64_t bytes, uint32_t *reclaim)
{
    const uint64_t end = place(w, bytes) + bytes;

    if (bytes > w->bytes)
        return -EOVERFLOW;
    for (*reclaim = 0; *reclaim < w->count; ++*reclaim) {
        const struct gpu_piece *oldest = piece_at(w, *reclaim);
        if (w->count - *reclaim < GPU_PIECES && end - oldest->position <= w->bytes)
            return 0;
        if (oldest->state != GPU_PIECE_SPENT || oldest->readers)
            return -EAGAIN;
    }
    return 0;
}

struct gpu_piece *gpu_window_open(struct gpu_window *w, uint64_t bytes, uint32_t reclaim)
{
    const uint64_t position = place(w, bytes);
    struct gpu_piece *piece;

    for (; reclaim; reclaim--) {
        w->pieces[w->oldest].state = GPU_PIECE_NONE;
        w->oldest = (w->oldest + 1) % GPU_PIECES;
        w->count--;
    }
    piece = gpu_window_piece(w, w->count++);
    piece->state = GPU_PIECE_FILLING;
    piece->position = position;
    piece->bytes = bytes;
    piece->was_used = false;
    piece->readers = 0;
    w->head = position + bytes;
    return piece;
}

void gpu_window_forget(struct gpu_window *w)
{
    for (uint32_t i = 0; i < GPU_PIECES; i++) {
        w->pieces[i].state = GPU_PIECE_NONE;
        w->pieces[i].was_used = false;
        w->pieces[i].readers = 0;
    }
    w->oldest = w->count = 0;
    w->head = 0;
}
