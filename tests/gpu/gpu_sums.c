/*
 * Sums of several devices' outputs on a device: the kernel to the bits of the host, the device
 * copied from as its own peer, and NCCL, if it is here, with one rank.
 */
#include <errno.h>

#include "gpu_harness.h"

#include "../support/experts.h"
#include "gpu_backend.h"
#include "gpu_nccl.h"
#include "numoe_cuda.h"

enum { TESTS = NUMOE_CUDA_PARTS + 3 };

/* Parts of odd lengths, and of few elements; into a place of its own, or over a part. */
static void sum_is_of_the_host(uint32_t count)
{
    static const uint64_t lengths[] = {1, 31, 257, 40001, 300000};

    begin("sum of %u", count);
    random_state = count;
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
        const uint64_t n = lengths[l], over = (count + l) % (count + 1); /* count: over none */
        struct guarded parts[NUMOE_CUDA_PARTS], to;
        const float *from[NUMOE_CUDA_PARTS];
        float *host = malloc(n * 4), *want = malloc(n * 4), *got = malloc(n * 4);
        float *target;

        for (uint32_t i = 0; i < count; i++) {
            for (uint64_t k = 0; k < n; k++) {
                host[k] = random_normal() * (k % 7 ? 1.0f : 1e6f);
                want[k] = i ? want[k] + host[k] : host[k];
            }
            guarded_put(&parts[i], host, n * 4);
            from[i] = (const float *)(const void *)parts[i].data;
        }
        guarded_make(&to, n * 4, 0xEE);
        target = (float *)(void *)(over < count ? parts[over].data : to.data);
        must(numoe_cuda_sum(target, from, count, n, NULL), "summing");
        must(cudaDeviceSynchronize(), "summing");
        must(cudaMemcpy(got, target, n * 4, cudaMemcpyDeviceToHost), "reading sums");
        expect(!memcmp(got, want, n * 4), "%d elements differ from the host's", (int)n);
        guarded_check(&to, "sums");
        for (uint32_t i = 0; i < count; i++) {
            guarded_check(&parts[i], "a part");
            guarded_free(&parts[i]);
        }
        guarded_free(&to);
        free(host);
        free(want);
        free(got);
    }
    end();
}

static void sums_that_cannot_be(void)
{
    const float *from[NUMOE_CUDA_PARTS + 1] = {NULL};

    begin("sums that cannot be");
    expect(numoe_cuda_sum(NULL, from, 0, 1, NULL) == cudaErrorInvalidValue, "of none");
    expect(numoe_cuda_sum(NULL, from, NUMOE_CUDA_PARTS + 1, 1, NULL) == cudaErrorInvalidValue,
           "of too many");
    expect(numoe_cuda_sum(NULL, from, 2, 0, NULL) == cudaSuccess, "of no elements");
    end();
}

static void a_device_is_its_own_peer(void)
{
    enum { BYTES = 1 << 20 };
    const struct gpu_ops *ops = gpu_backend_ops();
    uint8_t *host = malloc(BYTES), *got = malloc(BYTES);
    struct guarded from, to;
    void *one, *other;
    cudaStream_t stream;

    begin("a device as its own peer");
    for (int i = 0; i < BYTES; i++)
        host[i] = (uint8_t)(i * 7 + i / 256);
    must((cudaError_t)gpu_backend_open(0, &one), "opening a device");
    must((cudaError_t)gpu_backend_open(0, &other), "opening a device again");
    guarded_put(&from, host, BYTES);
    guarded_make(&to, BYTES, 0xEE);
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
    expect(ops->peer_open(one, other) == 0, "it does not open");
    expect(ops->copy_peer(one, stream, to.data, other, from.data, BYTES) == 0, "it does not copy");
    must(cudaStreamSynchronize(stream), "copying");
    must(cudaMemcpy(got, to.data, BYTES, cudaMemcpyDeviceToHost), "reading");
    expect(!memcmp(got, host, BYTES), "other bytes have arrived");
    guarded_check(&to, "the copy");
    must(cudaStreamDestroy(stream), "freeing a stream");
    guarded_free(&from);
    guarded_free(&to);
    gpu_backend_close(one);
    gpu_backend_close(other);
    free(host);
    free(got);
    end();
}

/* One rank is all that one device can be. */
static void nccl_with_one_rank(void)
{
    enum { COUNT = 100003 };
    const uint32_t devices[] = {0};
    const uint64_t counts[] = {COUNT};
    float *host = malloc(COUNT * 4), *got = malloc(COUNT * 4);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct gpu_nccl nccl;
    int rc = gpu_nccl_make(&nccl, devices, 1, &error);

    if (rc == -ENOENT) {
        printf("skipped: %s\n", error.message);
        harness_skipped++;
        free(host);
        free(got);
        return;
    }
    begin("NCCL with one rank");
    if (expect(!rc, "%s", error.message)) {
        struct guarded from, to;
        cudaStream_t stream;

        printf("NCCL %d\n", nccl.version);
        for (int i = 0; i < COUNT; i++)
            host[i] = random_normal();
        guarded_put(&from, host, COUNT * 4);
        guarded_make(&to, COUNT * 4, 0xEE);
        must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
        for (int scatter = 0; scatter < 2; scatter++) {
            const float *const parts[] = {(const float *)(const void *)from.data};
            float *const sums[] = {(float *)(void *)to.data};
            void *const streams[] = {stream};

            must(cudaMemset(to.data, 0xEE, COUNT * 4), "spoiling");
            must(cudaDeviceSynchronize(), "spoiling");
            if (scatter)
                rc = gpu_nccl_sum(&nccl, parts, sums, counts, streams, &error);
            else /* what uneven counts take */
                rc = nccl.calls.group_start() ||
                     nccl.calls.reduce(parts[0], sums[0], COUNT, 7, 0, 0, nccl.comms[0], stream) ||
                     nccl.calls.group_end();
            expect(!rc, "summing: %s", error.message);
            must(cudaStreamSynchronize(stream), "summing by NCCL");
            expect(!gpu_nccl_health(&nccl, &error), "%s", error.message);
            must(cudaMemcpy(got, to.data, COUNT * 4, cudaMemcpyDeviceToHost), "reading");
            expect(!memcmp(got, host, COUNT * 4), "one part is its sum");
            guarded_check(&to, "sums");
        }
        must(cudaStreamDestroy(stream), "freeing a stream");
        guarded_free(&from);
        guarded_free(&to);
        gpu_nccl_fini(&nccl);
    }
    free(host);
    free(got);
    end();
}

/* "small", for a sanitizer: without NCCL, whose kernels are not ours to check. */
int main(int argc, char **argv)
{
    const bool small = argc > 1 && !strcmp(argv[1], "small");

    if (!have_device(TESTS))
        return finish();
    for (uint32_t count = 1; count <= NUMOE_CUDA_PARTS; count++)
        sum_is_of_the_host(count);
    sums_that_cannot_be();
    a_device_is_its_own_peer();
    if (small) {
        printf("skipped: NCCL in small runs\n");
        harness_skipped++;
    } else {
        nccl_with_one_rank();
    }
    return finish();
}
