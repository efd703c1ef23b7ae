/*
 * gpu_harness.h - what the programs that need a device share: counting, device buffers between
 * guard bytes, and a way out when there is no device.
 */
#ifndef NUMOE_TESTS_GPU_HARNESS_H
#define NUMOE_TESTS_GPU_HARNESS_H

#include <cuda_runtime_api.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int harness_passed, harness_failed, harness_skipped;
static char harness_name[160];
static bool harness_ok;

__attribute__((format(printf, 1, 2))) static inline void begin(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(harness_name, sizeof harness_name, format, args);
    va_end(args);
    harness_ok = true;
}

/* Counts one fact wrong; the test goes on. */
__attribute__((format(printf, 2, 3))) static inline bool expect(bool fact, const char *format, ...)
{
    va_list args;

    if (fact)
        return true;
    harness_ok = false;
    printf("FAILED %s: ", harness_name);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    fflush(stdout);
    return false;
}

static inline void end(void)
{
    harness_passed += harness_ok;
    harness_failed += !harness_ok;
    printf("%s %s\n", harness_ok ? "ok  " : "FAIL", harness_name);
}

static inline int finish(void)
{
    printf("%d passed, %d failed, %d skipped\n", harness_passed, harness_failed, harness_skipped);
    return harness_failed != 0;
}

/* A device is there; else all `tests` are skipped, with the reason. */
static inline bool have_device(int tests)
{
    struct cudaDeviceProp p;
    int count = 0;
    cudaError_t e = cudaGetDeviceCount(&count);

    setvbuf(stdout, NULL, _IOLBF, 0); /* a program that is killed has said how far it came */
    if (e || count == 0) {
        printf("skipped: no CUDA device: %s\n", e ? cudaGetErrorString(e) : "none found");
        harness_skipped += tests;
        return false;
    }
    e = cudaGetDeviceProperties(&p, 0);
    if (e) {
        printf("skipped: the device does not describe itself: %s\n", cudaGetErrorString(e));
        harness_skipped += tests;
        return false;
    }
    printf("%s, compute capability %d.%d\n", p.name, p.major, p.minor);
    return true;
}

/* Only for calls that must not fail if the rest is to make sense. */
static inline void must(cudaError_t e, const char *what)
{
    if (!e)
        return;
    printf("FAILED %s: %s: %s (%d)\n", harness_name, what, cudaGetErrorString(e), (int)e);
    harness_failed++;
    finish();
    exit(1);
}

enum { GUARD = 1024 };

/* Device memory with GUARD bytes of a pattern on either side. Filled when this returns: streams of
 * the tests do not wait for the default one, in which it is filled. */
struct guarded {
    uint8_t *all, *data;
    uint64_t bytes;
    uint8_t pattern;
};

static inline void guarded_make(struct guarded *g, uint64_t bytes, uint8_t fill)
{
    const uint64_t inner = (bytes + 255) / 256 * 256;

    g->bytes = bytes;
    g->pattern = 0xC5;
    must(cudaMalloc((void **)&g->all, inner + 2 * GUARD), "cudaMalloc");
    must(cudaMemset(g->all, g->pattern, inner + 2 * GUARD), "cudaMemset");
    g->data = g->all + GUARD;
    must(cudaMemset(g->data, fill, bytes), "cudaMemset");
    must(cudaDeviceSynchronize(), "cudaMemset");
}

static inline void guarded_put(struct guarded *g, const void *from, uint64_t bytes)
{
    guarded_make(g, bytes, 0);
    must(cudaMemcpy(g->data, from, bytes, cudaMemcpyHostToDevice), "copy to the device");
    must(cudaDeviceSynchronize(), "copy to the device");
}

static inline void guarded_check(const struct guarded *g, const char *what)
{
    const uint64_t inner = (g->bytes + 255) / 256 * 256, tail = inner - g->bytes + GUARD;
    uint8_t *host = malloc(GUARD + tail);
    uint64_t wrong = 0;

    must(cudaMemcpy(host, g->all, GUARD, cudaMemcpyDeviceToHost), "read guard");
    must(cudaMemcpy(host + GUARD, g->data + g->bytes, tail, cudaMemcpyDeviceToHost), "read guard");
    for (uint64_t i = 0; i < GUARD + tail; i++)
        wrong += host[i] != g->pattern;
    expect(wrong == 0, "%llu guard bytes round %s were changed", (unsigned long long)wrong, what);
    free(host);
}

static inline void guarded_free(struct guarded *g)
{
    must(cudaFree(g->all), "cudaFree");
}

#endif
