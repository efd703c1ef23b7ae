/*
 * Calls of the copy pipeline that compute nothing: they bring experts to where they stay.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_stream.h"

int gpu_stream_visit(struct gpu_stream *s, uint64_t layer, const uint32_t *need,
                     struct numoe_error *error)
{
    struct gpu_part part;
    int rc = gpu_stream_begin(s, layer, need, NULL, 0, error);

    if (rc) /* it may be another call that is not over: that is not ended here */
        return rc;
    do {
        rc = gpu_stream_next(s, s->compute, &part, error);
        if (!rc && part.slice_at)
            rc = gpu_stream_done(s, s->compute, &part, error);
    } while (!rc && part.slice_at);
    gpu_stream_end(s, s->compute);
    return rc;
}

int gpu_stream_warm(struct gpu_stream *s, struct numoe_error *error)
{
    const uint64_t experts = s->source->experts;
    uint32_t *need = calloc(2 * experts, sizeof *need), *hottest = need + experts;
    int rc = 0;

    if (!need)
        return numoe_error_set(error, -ENOMEM, "experts", "out of memory");
    for (uint64_t layer = 0; !rc && layer < s->source->layers; layer++) {
        const uint32_t count = gpu_cache_hottest(&s->cache, layer, s->cache.limit[layer],
                                                 s->source->present, s->source->user, hottest);

        memset(need, 0, experts * sizeof *need);
        for (uint32_t i = 0; i < count; i++)
            need[hottest[i]] = 1;
        rc = gpu_stream_visit(s, layer, need, error);
    }
    free(need);
    return rc;
}

int gpu_stream_bring(struct gpu_stream *s, uint64_t layer, uint32_t expert,
                     struct numoe_error *error)
{
    uint32_t *need = calloc(s->source->experts, sizeof *need);
    struct gpu_part part;
    int rc;

    if (!need)
        return numoe_error_set(error, -ENOMEM, "experts", "out of memory");
    need[expert] = 1;
    rc = gpu_stream_begin(s, layer, need, NULL, 0, error);
    if (rc) {
        free(need);
        return rc;
    }
    /* its place is used by nobody before `used` of the layer, which stands behind the copy */
    if (gpu_stream_cell(s, &s->jobs[s->current], 0) != GPU_NO_CELL) {
        rc = gpu_stream_next(s, s->fills, &part, error);
        if (!rc && part.slice_at)
            rc = gpu_stream_done(s, s->fills, &part, error);
    }
    gpu_stream_end(s, s->fills);
    free(need);
    return rc;
}
