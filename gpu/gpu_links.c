/* Speeds of several devices' links. SPDX-License-Identifier: Apache-2.0 */
#include "gpu_links.h"

#include <errno.h>
#include <string.h>

#define LINK_BYTES ((uint64_t)32 << 20)
#define LINK_COPIES 4
/* What peers copy must be so much faster than what links do. */
#define FASTER 1.25

struct link {
    struct numoe_gpu *gpu;
    uint8_t *device;
    void *host, *stream, *begin, *end;
};

static int link_make(struct link *l, struct numoe_error *error)
{
    struct numoe_gpu *gpu = l->gpu;
    const struct gpu_ops *ops = gpu->ops;
    int rc = gpu_enter(gpu, error);

    if (!rc)
        rc = gpu_judge(gpu, ops->stream_create(gpu->device, &l->stream), error, "making a stream");
    if (!rc)
        rc = gpu_judge(gpu, ops->timer_create(gpu->device, &l->begin), error, "making a timer");
    if (!rc)
        rc = gpu_judge(gpu, ops->timer_create(gpu->device, &l->end), error, "making a timer");
    if (!rc)
        rc = gpu_judge(gpu, ops->allocate(gpu->device, LINK_BYTES, (void **)&l->device), error,
                       "allocating memory to measure the link");
    if (!rc)
        rc = gpu_judge(gpu, ops->host_allocate(gpu->device, LINK_BYTES, &l->host), error,
                       "allocating pinned memory to measure the link");
    if (!rc)
        memset(l->host, 1, LINK_BYTES);
    return rc;
}

/* One copy from host memory; or from a peer's first half to the second. */
static int copy(struct link *l, const struct link *peer)
{
    const struct gpu_ops *ops = l->gpu->ops;

    return peer ? ops->copy_peer(l->gpu->device, l->stream, l->device + LINK_BYTES / 2,
                                 peer->gpu->device, peer->device, LINK_BYTES / 2)
                : ops->copy_in(l->gpu->device, l->stream, l->device, l->host, LINK_BYTES);
}

/* The first copy is not timed. */
static int link_queue(struct link *l, const struct link *peer, struct numoe_error *error)
{
    const int copies = peer ? 2 * LINK_COPIES : LINK_COPIES;
    struct numoe_gpu *gpu = l->gpu;
    const struct gpu_ops *ops = gpu->ops;
    int rc = gpu_enter(gpu, error);

    for (int i = 0; !rc && i <= copies; i++) {
        rc = gpu_judge(gpu, copy(l, peer), error, "measuring the link");
        if (!rc && i == 0)
            rc = gpu_judge(gpu, ops->event_record(gpu->device, l->begin, l->stream), error,
                           "measuring the link");
    }
    return rc ? rc
              : gpu_judge(gpu, ops->event_record(gpu->device, l->end, l->stream), error,
                          "measuring the link");
}

static int link_read(struct link *l, double *gbs, struct numoe_error *error)
{
    struct numoe_gpu *gpu = l->gpu;
    double ms = 0;
    int rc = gpu_enter(gpu, error);

    if (!rc)
        rc = gpu_judge(gpu, gpu->ops->stream_sync(gpu->device, l->stream), error,
                       "measuring the link");
    if (!rc)
        rc = gpu_judge(gpu, gpu->ops->elapsed(gpu->device, l->begin, l->end, &ms), error,
                       "measuring the link");
    if (!rc)
        *gbs = ms > 0 ? (double)LINK_BYTES * LINK_COPIES / ms / 1e6 : 0;
    return rc;
}

/* Nothing is copied from the device's memory or to it any more. */
static void link_settle(struct link *l)
{
    gpu_enter(l->gpu, NULL);
    if (l->stream)
        gpu_judge(l->gpu, l->gpu->ops->stream_sync(l->gpu->device, l->stream), NULL,
                  "measuring the link");
}

static void link_free(struct link *l)
{
    struct numoe_gpu *gpu = l->gpu;
    const struct gpu_ops *ops = gpu->ops;

    gpu_enter(gpu, NULL);
    if (l->stream)
        gpu_judge(gpu, ops->stream_destroy(gpu->device, l->stream), NULL, "freeing a stream");
    if (l->begin)
        gpu_judge(gpu, ops->event_destroy(gpu->device, l->begin), NULL, "freeing a timer");
    if (l->end)
        gpu_judge(gpu, ops->event_destroy(gpu->device, l->end), NULL, "freeing a timer");
    if (l->device)
        gpu_judge(gpu, ops->release(gpu->device, l->device), NULL, "freeing memory");
    if (l->host)
        gpu_judge(gpu, ops->host_release(gpu->device, l->host), NULL, "freeing memory");
}

/* All at once, as they will be used. */
static int measure(struct link *links, uint32_t count, bool peers, double *gbs,
                   struct numoe_error *error)
{
    int rc = 0;

    for (uint32_t i = 0; !rc && i < count; i++)
        rc = link_queue(&links[i], peers ? &links[(i + 1) % count] : NULL, error);
    for (uint32_t i = 0; !rc && i < count; i++)
        rc = link_read(&links[i], &gbs[i], error);
    if (rc)
        memset(gbs, 0, count * sizeof *gbs);
    return rc;
}

int gpu_links_measure(struct numoe_gpu *const *gpus, uint32_t count, bool peers,
                      struct gpu_links *result, struct numoe_error *peer_error,
                      struct numoe_error *error)
{
    struct link links[NUMOE_GPU_MOST] = {{0}};
    int rc = 0;

    for (uint32_t i = 0; i < count; i++)
        links[i].gpu = gpus[i];
    for (uint32_t i = 0; !rc && i < count; i++)
        rc = link_make(&links[i], error);
    if (!rc)
        rc = measure(links, count, false, result->host_gbs, error);
    if (!rc && peers && measure(links, count, true, result->peer_gbs, peer_error))
        for (uint32_t i = 0; !rc && i < count; i++)
            rc = numoe_gpu_health(gpus[i], error);
    for (uint32_t i = 0; i < count; i++)
        link_settle(&links[i]);
    for (uint32_t i = 0; i < count; i++)
        link_free(&links[i]);
    return rc;
}

double gpu_links_slowest_peer(const struct gpu_links *links, uint32_t count)
{
    double slowest = links->peer_gbs[0];

    for (uint32_t i = 1; i < count; i++)
        slowest = links->peer_gbs[i] < slowest ? links->peer_gbs[i] : slowest;
    return slowest;
}

int gpu_links_compare(const struct gpu_links *links, uint32_t count, struct numoe_error *error)
{
    const double slowest = gpu_links_slowest_peer(links, count);
    double fastest = 0;

    for (uint32_t i = 0; i < count; i++)
        fastest = links->host_gbs[i] > fastest ? links->host_gbs[i] : fastest;
    return slowest > FASTER * fastest
               ? 0
               : numoe_error_set(
                     error, -ENOTSUP, "links",
                     "copies between GPUs carry %.1f GB/s, those from the host up to %.1f GB/s",
                     slowest, fastest);
}
