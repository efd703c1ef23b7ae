/* Sums of several devices' outputs. SPDX-License-Identifier: Apache-2.0 */
#include "gpu_sum.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "gpu_peers.h"
#include "numoe_cuda.h"

/* Of a device's rows in a round: its copy to the host takes long beside what queues it. */
#define BLOCK_BYTES ((uint64_t)16 << 20)
/* A device gives so much of its memory to scratch at most: 1 / so much. */
enum { SCRATCH_PART = 64 };
/* Outputs, or inputs, that are worth another meeting of all devices. */
#define LEAST_BYTES ((uint64_t)2 << 20)

_Static_assert((int)NUMOE_GPU_MOST <= (int)NUMOE_CUDA_PARTS, "parts of a sum");

const char *const numoe_gpu_sum_names[4] = {"auto", "host", "peer", "nccl"};

/* Why something is not so. */
static void note(struct gpu_sum *s, const struct numoe_error *why)
{
    const unsigned at = atomic_load_explicit(&s->noted, memory_order_relaxed);

    if (at == GPU_SUM_NOTES)
        return;
    snprintf(s->notes[at], sizeof s->notes[at], "%.48s: %.160s", why->where, why->message);
    /* a path may be in it that is no text, or was cut within a letter, and JSON has to take it */
    for (char *c = s->notes[at]; *c; c++)
        if ((unsigned char)*c < 0x20 || (unsigned char)*c > 0x7E)
            *c = '?';
    atomic_store_explicit(&s->noted, at + 1, memory_order_release); /* gpu_sum_report */
}

static void take_way(struct gpu_sum *s, enum numoe_gpu_sum way)
{
    s->way = way;
    gpu_tally_set(&s->tally, GPU_SUM_WAY, (uint64_t)way);
}

enum numoe_gpu_sum gpu_sum_of(const struct gpu_sum *s, uint32_t device, uint64_t *peer_bytes,
                              uint64_t *summed_tokens)
{
    *peer_bytes = gpu_tally_get(&s->of[device], GPU_PEER_BYTES);
    *summed_tokens = gpu_tally_get(&s->of[device], GPU_SUMMED_TOKENS);
    return (enum numoe_gpu_sum)gpu_tally_get(&s->tally, GPU_SUM_WAY);
}

void gpu_sum_report(const struct gpu_sum *s, struct numoe_gpu_report *report)
{
    /* pairs with the store in note; C11 has no load of a const atomic */
    const unsigned noted = atomic_load_explicit((atomic_uint *)&s->noted, memory_order_acquire);
    size_t at = 0;

    report->peer_gbs = s->peer_gbs;
    report->peer_bytes = report->summed_tokens = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        uint64_t bytes, tokens;

        report->sum = gpu_sum_of(s, i, &bytes, &tokens);
        report->peer_bytes += bytes;
        report->summed_tokens += tokens;
    }
    *report->sum_note = 0;
    for (unsigned i = 0; i < noted && at < sizeof report->sum_note; i++)
        at += (size_t)snprintf(report->sum_note + at, sizeof report->sum_note - at, "%s%s",
                               i ? "; " : "", s->notes[i]);
}

static int health(const struct gpu_sum *s, struct numoe_error *error)
{
    int rc = 0;

    for (uint32_t i = 0; !rc && i < s->count; i++)
        rc = numoe_gpu_health(s->gpus[i], error);
    return rc;
}

/* Where NCCL fails it may leave CUDA's last error behind, for the thread's next launch to report.
 */
static void clear_error(struct gpu_sum *s)
{
    for (uint32_t i = 0; i < s->count; i++)
        s->gpus[i]->ops->clear_error(s->gpus[i]->device);
}

/* ---- opening ---------------------------------------------------------------------------------
 */

static int make_scratch(struct gpu_sum *s, uint64_t row, struct numoe_error *error)
{
    uint64_t bytes = 2 * BLOCK_BYTES * (s->count - 1);
    int rc = 0;

    for (uint32_t i = 0; !rc && i < s->count; i++) {
        struct numoe_gpu *gpu = s->gpus[i];
        uint64_t available, total;

        rc = gpu_enter(gpu, error);
        if (!rc)
            rc = gpu_judge(gpu, gpu->ops->memory(gpu->device, &available, &total), error,
                           "asking for device memory");
        if (!rc && bytes > total / SCRATCH_PART)
            bytes = total / SCRATCH_PART;
    }
    s->slot_bytes = bytes / 2 / 256 * 256;
    if (!rc && s->slot_bytes / (s->count - 1) < row)
        rc = numoe_error_set(error, -ENOMEM, s->gpus[0]->properties.name,
                             "1/%d of a GPU's memory has no room for rows of outputs to sum",
                             (int)SCRATCH_PART);
    for (uint32_t i = 0; !rc && i < s->count; i++) {
        struct numoe_gpu *gpu = s->gpus[i];

        rc = gpu_enter(gpu, error);
        if (!rc)
            rc = gpu_judge(
                gpu, gpu->ops->allocate(gpu->device, 2 * s->slot_bytes, (void **)&s->scratch[i]),
                error, "allocating %llu MiB to sum outputs in",
                (unsigned long long)(2 * s->slot_bytes >> 20));
        for (int k = 0; !rc && k < 2; k++)
            rc = gpu_judge(gpu, gpu->ops->event_create(gpu->device, &s->pulled[i][k]), error,
                           "making an event");
    }
    return rc;
}

static void free_scratch(struct gpu_sum *s)
{
    for (uint32_t i = 0; i < s->count; i++) {
        struct numoe_gpu *gpu = s->gpus[i];

        gpu_enter(gpu, NULL);
        for (int k = 0; k < 2; k++)
            if (s->pulled[i][k])
                gpu_judge(gpu, gpu->ops->event_destroy(gpu->device, s->pulled[i][k]), NULL,
                          "freeing an event");
        if (s->scratch[i])
            gpu_judge(gpu, gpu->ops->release(gpu->device, s->scratch[i]), NULL,
                      "freeing scratch for sums");
        s->pulled[i][0] = s->pulled[i][1] = s->scratch[i] = NULL;
    }
}

int gpu_sum_open(struct gpu_sum *s, struct numoe_gpu *const *gpus, uint32_t count,
                 enum numoe_gpu_sum wish, uint64_t row, struct numoe_error *error)
{
    struct numoe_error why = NUMOE_ERROR_INIT;
    int rc;

    s->count = count;
    s->wish = wish;
    take_way(s, NUMOE_GPU_SUM_HOST);
    memcpy(s->gpus, gpus, count * sizeof *gpus);
    if (wish == NUMOE_GPU_SUM_HOST)
        return 0;
    rc = make_scratch(s, row, &why);
    if (rc) {
        note(s, &why);
        free_scratch(s);
        return health(s, error);
    }
    rc = gpu_peers_open(gpus, count, s->scratch, s->slot_bytes, &why);
    s->peers = !rc;
    if (rc)
        note(s, &why);
    return health(s, error);
}

static void choose_peer(struct gpu_sum *s, const struct gpu_links *links,
                        const struct numoe_error *peer_error)
{
    struct numoe_error slow = NUMOE_ERROR_INIT;

    if (!s->peers)
        return;
    take_way(s, NUMOE_GPU_SUM_PEER);
    s->peer_gbs = gpu_links_slowest_peer(links, s->count);
    if (s->wish == NUMOE_GPU_SUM_AUTO && gpu_links_compare(links, s->count, &slow)) {
        take_way(s, NUMOE_GPU_SUM_HOST);
        note(s, peer_error->code ? peer_error : &slow);
    }
}

int gpu_sum_choose(struct gpu_sum *s, const struct gpu_links *links,
                   const struct numoe_error *peer_error, struct numoe_error *error)
{
    struct numoe_error why = NUMOE_ERROR_INIT;

    s->least_bytes = s->wish == NUMOE_GPU_SUM_AUTO ? LEAST_BYTES : 0;
    choose_peer(s, links, peer_error);
    if (s->wish == NUMOE_GPU_SUM_NCCL && s->scratch[0]) {
        uint32_t devices[NUMOE_GPU_MOST];

        for (uint32_t i = 0; i < s->count; i++)
            devices[i] = s->gpus[i]->properties.index;
        if (gpu_nccl_make(&s->nccl, devices, s->count, &why)) {
            clear_error(s);
            note(s, &why);
        } else {
            take_way(s, NUMOE_GPU_SUM_NCCL);
        }
    }
    for (unsigned i = 0; i < atomic_load_explicit(&s->noted, memory_order_relaxed); i++)
        numoe_log_write(&s->gpus[0]->log,
                        s->wish == NUMOE_GPU_SUM_AUTO ? NUMOE_LOG_INFO : NUMOE_LOG_WARNING,
                        "outputs of several GPUs are summed by way of %s: %s",
                        numoe_gpu_sum_names[s->way], s->notes[i]);
    if (s->way == NUMOE_GPU_SUM_HOST)
        free_scratch(s);
    return health(s, error);
}

void gpu_sum_close(struct gpu_sum *s)
{
    if (health(s, NULL))
        gpu_nccl_abort(&s->nccl);
    else
        gpu_nccl_fini(&s->nccl);
    free_scratch(s);
}

/* ---- passes -----------------------------------------------------------------------------------
 */

enum numoe_gpu_sum gpu_sum_way(const struct gpu_sum *s, uint64_t bytes)
{
    return bytes >= s->least_bytes ? s->way : NUMOE_GPU_SUM_HOST;
}

bool gpu_sum_passes(const struct gpu_sum *s, uint64_t bytes)
{
    return s->peers && s->way != NUMOE_GPU_SUM_HOST && bytes >= s->least_bytes;
}

static int copy_peer(struct gpu_sum *s, uint32_t to, void *stream, uint8_t *address, uint32_t from,
                     const uint8_t *source, uint64_t bytes, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpus[to];
    const int rc = gpu_judge(
        gpu,
        gpu->ops->copy_peer(gpu->device, stream, address, s->gpus[from]->device, source, bytes),
        error, "copying from GPU %u", s->gpus[from]->properties.index);

    gpu_tally_add(&s->of[to], GPU_PEER_BYTES, rc ? 0 : bytes);
    return rc;
}

int gpu_sum_pass_inputs(struct gpu_sum *s, struct numoe_gpu_model *const *models,
                        const struct numoe_gpu_call *call, uint64_t each, struct numoe_error *error)
{
    const uint64_t tokens = models[0]->pass.tokens;
    int rc = 0;

    for (uint32_t to = 0; !rc && to < s->count; to++) {
        rc = gpu_enter(s->gpus[to], error);
        for (uint32_t k = 1; !rc && k < s->count; k++) {
            const uint32_t from = (to + k) % s->count; /* not all from the same one at once */
            const uint64_t begin = from * each < tokens ? from * each : tokens;
            const uint64_t end = begin + each < tokens ? begin + each : tokens;
            uint64_t row;
            uint8_t *here = gpu_pass_x(models[to], call, begin, &row);

            if (begin < end)
                rc = copy_peer(s, to, models[to]->stream.compute, here, from,
                               gpu_pass_x(models[from], call, begin, &row), (end - begin) * row,
                               error);
        }
    }
    return rc;
}

/* Bytes of a row of fp32 outputs, and where one is. */
static uint64_t row_bytes(const struct numoe_gpu_model *m)
{
    return m->source.shape.hidden * sizeof(float);
}

static uint8_t *row_of(const struct numoe_gpu_model *m, uint64_t token)
{
    return m->device + m->pass.parts.out + token * row_bytes(m);
}

struct gpu_round gpu_sum_round(const struct gpu_sum *s, const struct numoe_gpu_model *lead,
                               uint64_t at, unsigned slot)
{
    const uint64_t left = lead->pass.tokens - at, share = (left + s->count - 1) / s->count;
    const uint64_t room = s->slot_bytes / (s->count - 1) / row_bytes(lead);
    uint64_t each = room < lead->pass.staged ? room : lead->pass.staged;

    each = each < share ? each : share;
    return (struct gpu_round){.at = at,
                              .tokens = each * s->count < left ? each * s->count : left,
                              .each = each,
                              .slot = slot};
}

/* The sums of a device's rows, at the begin of a slot, on their way to the host. */
static int send(struct gpu_sum *s, struct numoe_gpu_model *m, uint32_t i, uint64_t bytes,
                unsigned slot, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpus[i];
    int rc = 0;

    if (bytes)
        rc = gpu_judge(gpu,
                       gpu->ops->copy_out(gpu->device, m->results, m->host + slot * m->stage_bytes,
                                          s->scratch[i] + slot * s->slot_bytes, bytes),
                       error, "copying sums of outputs");
    return rc ? rc
              : gpu_judge(gpu, gpu->ops->event_record(gpu->device, m->stage_free[slot], m->results),
                          error, "marking sums");
}

static int queue_peer(struct gpu_sum *s, struct numoe_gpu_model *const *models, uint32_t i,
                      const struct gpu_round *r, struct numoe_error *error)
{
    const uint64_t begin = gpu_round_begin(r, i), rows = gpu_round_begin(r, i + 1) - begin;
    const uint64_t bytes = rows * row_bytes(models[i]);
    uint8_t *scratch = s->scratch[i] + r->slot * s->slot_bytes;
    struct numoe_gpu_model *m = models[i];
    struct numoe_gpu *gpu = s->gpus[i];
    const float *from[NUMOE_GPU_MOST];
    int rc = 0;

    for (uint32_t k = 1; !rc && k < s->count; k++) {
        const uint32_t j = (i + k) % s->count;
        uint8_t *to = scratch + (k - 1) * bytes;

        from[j] = (const float *)(const void *)to;
        rc = copy_peer(s, i, m->stream.compute, to, j, row_of(models[j], r->at + begin), bytes,
                       error);
    }
    from[i] = (const float *)(const void *)row_of(m, r->at + begin);
    if (!rc)
        rc = gpu_judge(
            gpu, gpu->ops->event_record(gpu->device, s->pulled[i][r->slot], m->stream.compute),
            error, "marking parts of outputs");
    if (!rc)
        rc = gpu_judge(gpu, gpu->ops->stream_wait(gpu->device, m->results, s->pulled[i][r->slot]),
                       error, "waiting for parts of outputs");
    return rc ? rc
              : gpu_judge(gpu,
                          gpu->ops->sum(gpu->device, m->results, (float *)(void *)scratch, from,
                                        s->count, rows * m->source.shape.hidden),
                          error, "summing outputs");
}

static int queue_nccl(struct gpu_sum *s, struct numoe_gpu_model *const *models,
                      const struct gpu_round *r, struct numoe_error *error)
{
    const float *from[NUMOE_GPU_MOST];
    uint64_t counts[NUMOE_GPU_MOST];
    void *streams[NUMOE_GPU_MOST];
    float *to[NUMOE_GPU_MOST];

    for (uint32_t i = 0; i < s->count; i++) {
        from[i] = (const float *)(const void *)row_of(models[i], r->at);
        to[i] = (float *)(void *)(s->scratch[i] + r->slot * s->slot_bytes);
        counts[i] =
            (gpu_round_begin(r, i + 1) - gpu_round_begin(r, i)) * models[i]->source.shape.hidden;
        streams[i] = models[i]->results;
    }
    return gpu_nccl_sum(&s->nccl, from, to, counts, streams, error);
}

int gpu_sum_queue(struct gpu_sum *s, enum numoe_gpu_sum way, struct numoe_gpu_model *const *models,
                  const struct gpu_round *r, struct numoe_error *error)
{
    int rc = 0;

    if (way == NUMOE_GPU_SUM_NCCL)
        rc = queue_nccl(s, models, r, error);
    for (uint32_t i = 0; !rc && i < s->count; i++) {
        const uint64_t rows = gpu_round_begin(r, i + 1) - gpu_round_begin(r, i);

        if (!rows && way == NUMOE_GPU_SUM_PEER)
            continue;
        rc = gpu_enter(s->gpus[i], error);
        if (!rc && way == NUMOE_GPU_SUM_PEER)
            rc = queue_peer(s, models, i, r, error);
        if (!rc)
            rc = send(s, models[i], i, rows * row_bytes(models[i]), r->slot, error);
    }
    return rc;
}

int gpu_sum_await(struct gpu_sum *s, enum numoe_gpu_sum way, struct numoe_gpu_model *const *models,
                  const struct gpu_round *r, struct numoe_error *error)
{
    const bool nccl = way == NUMOE_GPU_SUM_NCCL;
    void *events[NUMOE_GPU_MOST];
    int rc;

    for (uint32_t i = 0; i < s->count; i++)
        events[i] =
            nccl || gpu_round_begin(r, i) < r->tokens ? models[i]->stage_free[r->slot] : NULL;
    rc = gpu_pass_wait(models, events, s->count, nccl ? &s->nccl : NULL,
                       nccl ? "summing outputs by NCCL" : "summing outputs", error);
    for (uint32_t i = 0; !rc && i < s->count; i++)
        gpu_tally_add(&s->of[i], GPU_SUMMED_TOKENS,
                      gpu_round_begin(r, i + 1) - gpu_round_begin(r, i));
    return rc;
}

int gpu_sum_fall(struct gpu_sum *s, enum numoe_gpu_sum *way, struct numoe_gpu_model *const *models,
                 const struct numoe_error *why, struct numoe_error *error)
{
    const enum numoe_gpu_sum failed = *way;
    int rc = 0;

    if (failed == NUMOE_GPU_SUM_NCCL) {
        gpu_nccl_abort(&s->nccl); /* before anybody is waited for */
        clear_error(s);
    }
    /* first of all: whatever fails below, no later call goes the failed way */
    if (failed == NUMOE_GPU_SUM_PEER)
        s->peers = false;
    take_way(s, s->nccl.count ? NUMOE_GPU_SUM_NCCL
                : s->peers    ? NUMOE_GPU_SUM_PEER
                              : NUMOE_GPU_SUM_HOST);
    *way = s->way;
    note(s, why);
    for (uint32_t i = 0; !rc && i < s->count; i++) {
        struct numoe_gpu *gpu = s->gpus[i];

        rc = gpu_enter(gpu, error);
        if (!rc)
            rc = gpu_judge(gpu, gpu->ops->stream_sync(gpu->device, models[i]->stream.compute),
                           error, "leaving off sums on devices");
        if (!rc)
            rc = gpu_judge(gpu, gpu->ops->stream_sync(gpu->device, models[i]->results), error,
                           "leaving off sums on devices");
    }
    if (rc)
        return rc;
    numoe_log_write(&s->gpus[0]->log, NUMOE_LOG_WARNING,
                    "outputs of several GPUs are summed by way of %s from now on, no longer %s: %s",
                    numoe_gpu_sum_names[*way], numoe_gpu_sum_names[failed], why->message);
    return 0;
}
