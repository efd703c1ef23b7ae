/*
 * fake_order.h - what happens before what on fake devices, and whether that is all that it has to
 * be. A fake device does things in one order of many; a read that passes a write by luck shows
 * nothing. Here it shows, in whichever order the two happened.
 *
 * Every stream counts what is queued on it. A clock says of each stream up to where all of it is
 * past: that of an operation, when it is queued, is what was before it on its stream, what the
 * stream waited for by then, and what the host had seen to be past. An event's is that of its last
 * record. A host that waits for an event or a stream, or asks and is told that it is past, has seen
 * what it stands for.
 *
 * Memory is divided into blocks, of which the last write and the reads behind it are kept. Who
 * writes has to be behind all of them, who reads behind the write; who frees memory, in the host's
 * clock, too.
 *
 * There is one host, whichever of its threads calls; several may, for devices that have nothing to
 * do with each other.
 */
#ifndef NUMOE_TESTS_FAKE_ORDER_H
#define NUMOE_TESTS_FAKE_ORDER_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ORDER_STREAMS = 128, ORDER_READS = 4, ORDER_BLOCK = 16, ORDER_BLOCKS = 1 << 20 };

struct order_clock {
    uint32_t at[ORDER_STREAMS];
};

/* Number `at` of a stream; 0: none. */
struct order_use {
    uint32_t stream, at;
};

struct order_block {
    struct order_use write, reads[ORDER_READS];
    uint64_t content; /* of host memory, when it was last queued to be copied */
};

struct order_memory {
    uint64_t bytes, block; /* block: bytes of each */
    struct order_block *blocks;
};

/* Numbers are given to streams in turns and used again, going on where they were: of two streams
 * that had the same number the later one passes for being behind the earlier. */
static struct {
    pthread_mutex_t lock; /* of what follows */
    uint32_t streams, queued[ORDER_STREAMS];
    const int *lost[ORDER_STREAMS]; /* not 0: the stream's device is; NULL: it is not there */
    struct order_clock host;
} fake_order = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local struct {
    const struct order_clock *clock; /* of what a device is just doing; NULL: nothing */
    struct order_use use;            /* that */
} fake_running;

static inline uint32_t order_stream(const int *lost)
{
    uint32_t stream;

    pthread_mutex_lock(&fake_order.lock);
    stream = fake_order.streams++ % ORDER_STREAMS;
    fake_order.lost[stream] = lost;
    pthread_mutex_unlock(&fake_order.lock);
    return stream;
}

/* The device is freed. */
static inline void order_forget(const int *lost)
{
    pthread_mutex_lock(&fake_order.lock);
    for (uint32_t i = 0; i < ORDER_STREAMS; i++)
        if (fake_order.lost[i] == lost)
            fake_order.lost[i] = NULL;
    pthread_mutex_unlock(&fake_order.lock);
}

static inline void order_join(struct order_clock *clock, const struct order_clock *other)
{
    for (uint32_t i = 0; i < ORDER_STREAMS; i++)
        clock->at[i] = clock->at[i] > other->at[i] ? clock->at[i] : other->at[i];
}

/* The host has seen all that the clock stands for. */
static inline void order_see(const struct order_clock *clock)
{
    pthread_mutex_lock(&fake_order.lock);
    order_join(&fake_order.host, clock);
    pthread_mutex_unlock(&fake_order.lock);
}

/* Something is queued on a stream, whose clock becomes its. */
static inline struct order_use order_queue(struct order_clock *clock, uint32_t stream)
{
    pthread_mutex_lock(&fake_order.lock);
    order_join(clock, &fake_order.host);
    clock->at[stream] = ++fake_order.queued[stream];
    pthread_mutex_unlock(&fake_order.lock);
    return (struct order_use){stream, clock->at[stream]};
}

static inline bool order_is_past(const struct order_clock *clock, struct order_use use)
{
    return use.at <= clock->at[use.stream];
}

static inline struct order_block *order_first(struct order_memory *m, uint64_t at, uint64_t bytes,
                                              uint64_t *count)
{
    if (!m->blocks) {
        for (m->block = ORDER_BLOCK; m->bytes / m->block >= ORDER_BLOCKS;)
            m->block *= 2;
        m->blocks = aligned_alloc(64, (m->bytes / m->block + 4) / 4 * 4 * sizeof *m->blocks);
        memset(m->blocks, 0, (m->bytes / m->block + 1) * sizeof *m->blocks);
    }
    *count = bytes ? (at + bytes - 1) / m->block - at / m->block + 1 : 0;
    return m->blocks + at / m->block;
}

/* Whether it was to be read at [at, at + bytes) by a use with a clock. */
static inline bool order_read(struct order_memory *m, uint64_t at, uint64_t bytes,
                              const struct order_clock *clock, struct order_use use)
{
    uint64_t count;
    struct order_block *b = order_first(m, at, bytes, &count);
    bool right = true;

    for (; count; count--, b++) {
        struct order_use *free_read = NULL;

        right = right && order_is_past(clock, b->write);
        for (uint32_t i = 0; i < ORDER_READS; i++) {
            if (!order_is_past(clock, b->reads[i]))
                continue;
            b->reads[i].at = 0; /* who is behind this one is behind that */
            free_read = &b->reads[i];
        }
        *(free_read ? free_read : &b->reads[0]) = use;
    }
    return right;
}

/* The same of who writes. */
static inline bool order_write(struct order_memory *m, uint64_t at, uint64_t bytes,
                               const struct order_clock *clock, struct order_use use)
{
    uint64_t count;
    struct order_block *b = order_first(m, at, bytes, &count);
    bool right = true;

    for (; count; count--, b++) {
        right = right && order_is_past(clock, b->write);
        for (uint32_t i = 0; i < ORDER_READS; i++) {
            right = right && order_is_past(clock, b->reads[i]);
            b->reads[i].at = 0;
        }
        b->write = use;
    }
    return right;
}

/* With the lock. */
static inline bool order_seen(struct order_use use)
{
    const int *lost = fake_order.lost[use.stream];

    return order_is_past(&fake_order.host, use) || !lost || *lost;
}

static inline bool order_block_seen(const struct order_block *b)
{
    bool right = order_seen(b->write);

    for (uint32_t i = 0; i < ORDER_READS; i++)
        right = right && order_seen(b->reads[i]);
    return right;
}

/* Whether the host knows that nobody uses [at, at + bytes) any more. */
static inline bool order_is_free(struct order_memory *m, uint64_t at, uint64_t bytes)
{
    uint64_t count;
    const struct order_block *b = order_first(m, at, bytes, &count);
    bool right = true;

    pthread_mutex_lock(&fake_order.lock);
    for (; count; count--, b++)
        right = right && order_block_seen(b);
    pthread_mutex_unlock(&fake_order.lock);
    return right;
}

/* Whether the host may have written [at, at + bytes) of its memory, as it has if that is not what
 * it was when it was last queued to be copied. data: the same now. */
static inline bool order_host_wrote(struct order_memory *m, uint64_t at, uint64_t bytes,
                                    const uint8_t *data)
{
    uint64_t count, done = 0;
    struct order_block *b = order_first(m, at, bytes, &count);
    bool right = true;

    pthread_mutex_lock(&fake_order.lock);
    for (; count; count--, b++) {
        const uint64_t left = m->block - (at + done) % m->block;
        const uint64_t here = left < bytes - done ? left : bytes - done;
        uint64_t content = 0xCBF29CE484222325u;

        for (uint64_t i = 0; i < here; i++)
            content = (content ^ data[done + i]) * 0x100000001B3u;
        done += here;
        if (here < m->block) /* it is copied in parts */
            continue;
        right = right && (!b->content || b->content == content || order_block_seen(b));
        b->content = content;
    }
    pthread_mutex_unlock(&fake_order.lock);
    return right;
}

/* Whether the host knows that nobody uses the memory any more. */
static inline bool order_drop(struct order_memory *m)
{
    bool right = true;

    pthread_mutex_lock(&fake_order.lock);
    for (uint64_t i = 0; m->blocks && i <= m->bytes / m->block; i++)
        right = right && order_block_seen(&m->blocks[i]);
    pthread_mutex_unlock(&fake_order.lock);
    free(m->blocks);
    m->blocks = NULL;
    return right;
}

#endif
