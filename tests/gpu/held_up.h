/*
 * held_up.h - a device whose copies from the host are held up at random: what programs that verify
 * transfers put between the runtime and the device. After gpu_harness.h and
 * transfer_patterns.h.
 */
#ifndef NUMOE_TESTS_GPU_HELD_UP_H
#define NUMOE_TESTS_GPU_HELD_UP_H

#include <time.h>

static const struct gpu_ops *plain;
static struct gpu_ops slow;
static uint64_t delays;

static void rest(void *user)
{
    const struct timespec t = {.tv_nsec = (long)(uintptr_t)user};

    nanosleep(&t, NULL);
}

/* One time in so many, for up to 100 us. */
static int hold_up(void *stream, uint64_t of)
{
    const uint64_t draw = random_u64() >> 20;

    if (draw % of)
        return 0;
    delays++;
    return (int)cudaLaunchHostFunc(stream, rest, (void *)(uintptr_t)(draw / of % 100000));
}

static int slow_copy(void *device, void *stream, void *to, const void *from, uint64_t bytes)
{
    const int e = hold_up(stream, 8);

    return e ? e : plain->copy_in(device, stream, to, from, bytes);
}

static int slow_copies(void *device, void *stream, void *const *to, const void *const *from,
                       const uint64_t *bytes, uint32_t count)
{
    const int e = hold_up(stream, 3);

    return e ? e : plain->copy_in_many(device, stream, to, from, bytes, count);
}

#endif
