/* Devices that copy from each other's memory. SPDX-License-Identifier: Apache-2.0 */
#include "gpu_peers.h"

#include <errno.h>
#include <string.h>

#define CHECK_BYTES ((uint64_t)64 << 10)

struct check {
    struct numoe_gpu *const *gpus;
    uint8_t *const *scratch;
    void *streams[NUMOE_GPU_MOST];
    uint32_t *host;         /* pinned: what was sent, what came back */
    uint64_t bytes, second; /* compared; where the second half of scratch begins */
};

static uint32_t word(uint32_t device, uint64_t i)
{
    return (uint32_t)i * 2654435761u ^ (device + 1) * 40503u;
}

static int sync(const struct check *c, uint32_t i, struct numoe_error *error)
{
    return gpu_judge(c->gpus[i], c->gpus[i]->ops->stream_sync(c->gpus[i]->device, c->streams[i]),
                     error, "trying copies between devices");
}

/* Device `from` has words of its own, and so has, by a copy, device `to`. */
static int check_pair(const struct check *c, uint32_t to, uint32_t from, struct numoe_error *error)
{
    struct numoe_gpu *gpu = c->gpus[to];
    uint32_t *back = c->host + c->bytes / 4;
    int rc = gpu_enter(gpu, error);

    memset(back, 0xEE, c->bytes);
    if (!rc)
        rc = gpu_judge(gpu, gpu->ops->peer_open(gpu->device, c->gpus[from]->device), error,
                       "opening GPU %u's memory to GPU %u", c->gpus[from]->properties.index,
                       gpu->properties.index);
    if (!rc)
        rc = gpu_judge(gpu,
                       gpu->ops->copy_peer(gpu->device, c->streams[to], c->scratch[to] + c->second,
                                           c->gpus[from]->device, c->scratch[from], c->bytes),
                       error, "copying from GPU %u", c->gpus[from]->properties.index);
    if (!rc)
        rc = gpu_judge(gpu,
                       gpu->ops->copy_out(gpu->device, c->streams[to], back,
                                          c->scratch[to] + c->second, c->bytes),
                       error, "trying copies between devices");
    if (!rc)
        rc = sync(c, to, error);
    for (uint64_t i = 0; !rc && i < c->bytes / 4; i++)
        if (back[i] != word(from, i))
            rc = numoe_error_set(error, -ENOTSUP, gpu->properties.name,
                                 "what GPU %u copies from GPU %u is not what is there",
                                 gpu->properties.index, c->gpus[from]->properties.index);
    return rc;
}

/* Everybody opens everybody's memory, and looks at what comes from there: bridges that translate
 * addresses have been seen to lose what passes between devices. */
int gpu_peers_open(struct numoe_gpu *const *gpus, uint32_t count, uint8_t *const *scratch,
                   uint64_t half, struct numoe_error *error)
{
    struct numoe_gpu *first = gpus[0];
    struct check c = {.gpus = gpus,
                      .scratch = scratch,
                      .bytes = half < CHECK_BYTES ? half / 4 * 4 : CHECK_BYTES,
                      .second = half};
    int rc = gpu_enter(first, error);

    if (!rc)
        rc = gpu_judge(first,
                       first->ops->host_allocate(first->device, 2 * c.bytes, (void **)&c.host),
                       error, "allocating pinned memory to try copies between devices");
    for (uint32_t i = 0; !rc && i < count; i++) {
        struct numoe_gpu *gpu = gpus[i];

        for (uint64_t k = 0; k < c.bytes / 4; k++)
            c.host[k] = word(i, k);
        rc = gpu_enter(gpu, error);
        if (!rc)
            rc = gpu_judge(gpu, gpu->ops->stream_create(gpu->device, &c.streams[i]), error,
                           "making a stream");
        if (!rc)
            rc = gpu_judge(
                gpu, gpu->ops->copy_in(gpu->device, c.streams[i], scratch[i], c.host, c.bytes),
                error, "trying copies between devices");
        if (!rc)
            rc = sync(&c, i, error);
    }
    for (uint32_t to = 0; !rc && to < count; to++)
        for (uint32_t from = 0; !rc && from < count; from++)
            if (to != from)
                rc = check_pair(&c, to, from, error);
    for (uint32_t i = 0; i < count; i++) {
        gpu_enter(gpus[i], NULL);
        if (c.streams[i])
            sync(&c, i, NULL);
    }
    for (uint32_t i = 0; i < count; i++) {
        gpu_enter(gpus[i], NULL);
        if (c.streams[i])
            gpu_judge(gpus[i], gpus[i]->ops->stream_destroy(gpus[i]->device, c.streams[i]), NULL,
                      "freeing a stream");
    }
    gpu_enter(first, NULL);
    if (c.host)
        gpu_judge(first, first->ops->host_release(first->device, c.host), NULL, "freeing memory");
    return rc;
}
