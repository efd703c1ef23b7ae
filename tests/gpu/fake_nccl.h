/*
 * fake_nccl.h - NCCL for fake devices: a library of its own, opened as the real one is. What it
 * queues runs on the devices' streams, and, as there, on none before it runs on all; communicators
 * that are aborted let go of it. Sums are made from the last device to the first, another order
 * than that of the devices.
 */
#ifndef NUMOE_TESTS_FAKE_NCCL_H
#define NUMOE_TESTS_FAKE_NCCL_H

#include <stdbool.h>
#include <stdint.h>

/* The library's variable "fake_nccl". */
struct fake_nccl {
    void (*queue)(void *stream, bool (*run)(void *argument), void *argument); /* the test's */
    void (*failed)(void);    /* the test's, or NULL: a call fails now */
    uint64_t calls, fail_at; /* the call that fails; of those that can */
    bool torn;               /* a group that fails is queued on its first device alone */
    int async_error;         /* NCCL's own threads' */
    uint32_t made, destroyed, aborted, sums, groups; /* groups: that are open */
};

#endif
