/* Measuring layers on a device. SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "gpu_backend.h"
#include "gpu_model.h"

int numoe_gpu_ceilings(struct numoe_gpu *gpu, double *read_gbs, double *link_gbs, double *mma_gops,
                       struct numoe_error *error)
{
    int rc = gpu_enter(gpu, error);
    if (!rc && !gpu->backend)
        rc = numoe_error_set(error, -ENOTSUP, "ceilings", "not a device of this machine");
    return rc ? rc
              : gpu_judge(gpu, gpu_backend_ceilings(gpu->device, read_gbs, link_gbs, mma_gops),
                          error, "measuring the ceilings");
}

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* CPU time of the process. */
static double cpu_ms(void)
{
    struct rusage usage;

    if (getrusage(RUSAGE_SELF, &usage))
        return 0;
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e3 +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-3;
}

static uint64_t up(uint64_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* A batch's inputs and room for its results on the device. */
struct inputs {
    uint8_t *memory;
    uint64_t ids, routing, out, work; /* offsets; ids and routing of a routing are up() apart */
    struct numoe_cuda_ffn ffn;
    uint8_t *rows; /* pinned: sampled outputs of a pass over all layers; NULL */
    /* the table of the layer that was copied last, all of whose pieces are still there */
    uint32_t *host_table, *table;
    /* of the link's measurement: pinned memory of the driver's */
    uint8_t *probe;
    uint64_t probe_bytes;
    void *probe_begin, *probe_end;
};

static uint64_t rows_bytes(const struct numoe_gpu_model *m, const struct numoe_gpu_bench *b)
{
    return m->source.layers * b->samples * m->source.shape.hidden * sizeof(float);
}

static int inputs_make(struct numoe_gpu_model *m, struct numoe_gpu_bench *b, struct inputs *in,
                       struct numoe_error *error)
{
    struct numoe_gpu *gpu = m->gpu;
    const struct gpu_ops *ops = gpu->ops;
    const uint64_t hidden = m->source.shape.hidden, pairs = b->tokens * b->top_k;
    const uint64_t x_bytes = b->tokens * hidden * 2;
    uint64_t bytes;
    int rc;

    in->ffn = (struct numoe_cuda_ffn){
        .tokens = (uint32_t)b->tokens,
        .top_k = (uint32_t)b->top_k,
        .x_type = NUMOE_BF16,
        .x_stride = hidden,
        .out_type = NUMOE_F32,
        .out_stride = hidden,
        .scale = 1.0f,
    };
    gpu_model_ffn(m, NULL, &in->ffn);
    in->ffn.form = b->form ? (enum numoe_cuda_form)b->form : gpu_choose_form(gpu, &in->ffn);
    in->ids = up(x_bytes);
    in->routing = in->ids + b->routings * up(pairs * 4);
    in->out = in->routing + b->routings * up(pairs * 4);
    in->work = in->out + up(b->tokens * hidden * 4);
    bytes = ops->workspace_bytes(gpu->device, &in->ffn);
    if (!bytes || b->tokens > UINT32_MAX)
        return numoe_error_set(error, -EINVAL, "tokens", "%llu tokens are too many",
                               (unsigned long long)b->tokens);
    b->form = in->ffn.form;
    bytes += in->work;
    rc = gpu_judge(gpu, ops->allocate(gpu->device, bytes, (void **)&in->memory), error,
                   "allocating %llu MiB", (unsigned long long)(bytes >> 20));
    if (!rc)
        rc = gpu_judge(gpu, ops->copy_in(gpu->device, m->stream.compute, in->memory, b->x, x_bytes),
                       error, "copying inputs");
    for (uint32_t r = 0; !rc && r < b->routings; r++) {
        rc = gpu_judge(gpu,
                       ops->copy_in(gpu->device, m->stream.compute,
                                    in->memory + in->ids + r * up(pairs * 4), b->ids + r * pairs,
                                    pairs * 4),
                       error, "copying inputs");
        if (!rc)
            rc = gpu_judge(gpu,
                           ops->copy_in(gpu->device, m->stream.compute,
                                        in->memory + in->routing + r * up(pairs * 4),
                                        b->routing + r * pairs, pairs * 4),
                           error, "copying inputs");
    }
    in->ffn.x = in->memory;
    in->ffn.out = in->memory + in->out;
    in->ffn.workspace = in->memory + in->work;
    return rc;
}

static void inputs_free(struct numoe_gpu_model *m, struct inputs *in)
{
    struct numoe_gpu *gpu = m->gpu;

    gpu_judge(gpu, gpu->ops->stream_sync(gpu->device, m->stream.compute), NULL, "the measurement");
    if (in->memory)
        gpu_judge(gpu, gpu->ops->release(gpu->device, in->memory), NULL, "freeing inputs");
    if (in->rows)
        gpu_judge(gpu, gpu->ops->host_release(gpu->device, in->rows), NULL, "freeing outputs");
    if (in->table)
        gpu_judge(gpu, gpu->ops->release(gpu->device, in->table), NULL, "freeing a table");
    if (in->probe)
        gpu_judge(gpu, gpu->ops->host_release(gpu->device, in->probe), NULL, "freeing memory");
    if (in->probe_begin)
        gpu_judge(gpu, gpu->ops->event_destroy(gpu->device, in->probe_begin), NULL,
                  "freeing a timer");
    if (in->probe_end)
        gpu_judge(gpu, gpu->ops->event_destroy(gpu->device, in->probe_end), NULL,
                  "freeing a timer");
    if (in->host_table)
        gpu_judge(gpu, gpu->ops->host_release(gpu->device, in->host_table), NULL,
                  "freeing a table");
}

static void use_routing(const struct numoe_gpu_bench *b, const struct inputs *in, uint32_t routing,
                        struct numoe_cuda_ffn *ffn)
{
    const uint64_t step = up(b->tokens * b->top_k * 4);

    ffn->ids = in->memory + in->ids + routing * step;
    ffn->routing = (const float *)(const void *)(in->memory + in->routing + routing * step);
}

static int take_out(struct numoe_gpu_model *m, const struct numoe_gpu_bench *b,
                    const struct inputs *in, struct numoe_error *error)
{
    struct numoe_gpu *gpu = m->gpu;
    int rc;

    if (!b->out)
        return 0;
    rc = gpu_judge(gpu,
                   gpu->ops->copy_out(gpu->device, m->stream.compute, b->out, in->memory + in->out,
                                      b->tokens * m->source.shape.hidden * 4),
                   error, "copying outputs");
    return rc ? rc
              : gpu_judge(gpu, gpu->ops->stream_sync(gpu->device, m->stream.compute), error,
                          "the measurement");
}

/* All experts of a layer on the device, as one part that the compute stream is in the use of. */
static int hold_layer(struct numoe_gpu_model *m, uint64_t layer, struct gpu_part *kept,
                      struct numoe_error *error)
{
    struct gpu_stream *s = &m->stream;
    int rc = gpu_stream_visit(s, layer, s->everything, error);

    if (!rc)
        rc = gpu_stream_begin(s, layer, s->everything, NULL, 0, error);
    if (!rc)
        rc = gpu_stream_next(s, s->compute, kept, error);
    if (!rc && (kept->piece || s->jobs[s->current].count))
        rc = numoe_error_set(error, -ENOMEM, m->gpu->properties.name,
                             "there is no room for all experts of a layer to stay");
    return rc;
}

/* On one device. */
static int on_one(const struct numoe_gpu_model *m, struct numoe_error *error)
{
    return m->several ? numoe_error_set(error, -ENOTSUP, "bench",
                                        "the model is on several devices: its calls can be timed "
                                        "(--share)")
                      : gpu_enter(m->gpu, error);
}

int numoe_gpu_bench_layer(struct numoe_gpu_model *m, uint64_t layer, struct numoe_gpu_bench *b,
                          struct numoe_error *error)
{
    struct numoe_gpu *gpu = m->gpu;
    struct numoe_cuda_ffn *calls = NULL;
    struct inputs in = {0};
    struct gpu_part part;
    int rc = on_one(m, error);

    if (rc)
        return rc;
    if (!gpu->backend)
        return numoe_error_set(error, -ENOTSUP, "bench", "not a device of this machine");
    calls = calloc(b->routings, sizeof *calls);
    if (!calls)
        return numoe_error_set(error, -ENOMEM, "bench", "out of memory");
    rc = inputs_make(m, b, &in, error);
    if (!rc)
        rc = hold_layer(m, layer, &part, error);
    if (rc)
        goto out;
    gpu_model_ffn(m, &part, &in.ffn);
    for (uint32_t r = 0; r < b->routings; r++) {
        calls[r] = in.ffn;
        use_routing(b, &in, r, &calls[r]);
    }
    rc = gpu_judge(
        gpu, gpu_backend_time(gpu->device, m->stream.compute, calls, b->routings, b->repeat, b->ms),
        error, "timing layer %llu", (unsigned long long)layer);
    if (!rc)
        rc = gpu_stream_done(&m->stream, m->stream.compute, &part, error);
    if (!rc)
        rc = take_out(m, b, &in, error);
out:
    gpu_stream_end(&m->stream, m->stream.compute);
    inputs_free(m, &in);
    free(calls);
    return rc;
}

/* Queue the sampled tokens of a layer's output on their way to the host: some rows, in the
 * direction of the link that weights do not take. */
static int send_rows(struct numoe_gpu_model *m, const struct numoe_gpu_bench *b,
                     const struct inputs *in, uint64_t layer, struct numoe_error *error)
{
    struct numoe_gpu *gpu = m->gpu;
    const uint64_t row = m->source.shape.hidden * sizeof(float);
    int rc = 0;

    for (uint32_t i = 0; !rc && i < b->samples; i++)
        rc = gpu_judge(gpu,
                       gpu->ops->copy_out(gpu->device, m->stream.compute,
                                          in->rows + (layer * b->samples + i) * row,
                                          in->memory + in->out + b->sample[i] * row, row),
                       error, "copying outputs");
    return rc;
}

/* Keep where a piece has its experts. */
static void note_piece(const struct numoe_gpu_model *m, const struct gpu_piece *p,
                       struct inputs *in)
{
    const struct gpu_job *job = &m->stream.jobs[m->stream.current];
    const uint64_t slices = m->source.slices;

    for (uint32_t i = p->first; i < p->end; i++)
        memcpy(in->host_table + job->list[i] * slices, p->host_table + job->list[i] * slices,
               slices * sizeof *in->host_table);
}

/* A layer as it is copied. */
static int stream_layer(struct numoe_gpu_model *m, struct inputs *in, uint64_t layer, bool compute,
                        struct numoe_error *error)
{
    struct gpu_stream *s = &m->stream;
    struct numoe_gpu *gpu = m->gpu;
    struct numoe_cuda_ffn ffn = in->ffn;
    struct gpu_part part;
    int rc = gpu_stream_begin(s, layer, s->everything, NULL, in->ffn.tokens, error);

    for (uint64_t e = 0; e < m->source.experts; e++)
        in->host_table[e * m->source.slices] = NUMOE_GPU_ABSENT;
    for (bool first = true; !rc; first = false) {
        rc = gpu_stream_next(s, s->compute, &part, error);
        if (rc || !part.slice_at)
            break;
        if (part.piece)
            note_piece(m, part.piece, in);
        gpu_model_ffn(m, &part, &ffn);
        ffn.add = !first;
        if (compute)
            rc = gpu_judge(gpu, gpu->ops->launch(gpu->device, s->compute, &ffn), error,
                           "launching layer %llu", (unsigned long long)layer);
        if (!rc)
            rc = gpu_stream_done(s, s->compute, &part, error);
    }
    gpu_stream_end(s, s->compute);
    return rc;
}

/* All layers once. copy, compute: whether to. */
static int pass(struct numoe_gpu_model *m, const struct numoe_gpu_bench *b, struct inputs *in,
                bool copy, bool compute, double *ms, struct numoe_error *error)
{
    const uint64_t bytes = m->source.experts * m->source.slices * sizeof *in->table;
    struct gpu_stream *s = &m->stream;
    struct numoe_gpu *gpu = m->gpu;
    const struct gpu_ops *ops = gpu->ops;
    struct numoe_cuda_ffn ffn = in->ffn;
    double since;
    int rc = 0;

    if (!copy) {
        rc = gpu_judge(gpu, ops->copy_in(gpu->device, s->compute, in->table, in->host_table, bytes),
                       error, "copying a table");
        gpu_model_ffn(m, &(struct gpu_part){.weights = s->pool, .slice_at = in->table}, &ffn);
        if (s->bias)
            ffn.down_bias = s->bias;
    }
    if (!rc)
        rc = gpu_judge(gpu, ops->stream_sync(gpu->device, s->copies), error, "copies");
    if (!rc)
        rc = gpu_judge(gpu, ops->stream_sync(gpu->device, s->compute), error, "computation");
    since = now_ms();
    for (uint64_t layer = 0; !rc && layer < m->source.layers; layer++) {
        if (copy)
            rc = stream_layer(m, in, layer, compute, error);
        else
            rc = gpu_judge(gpu, ops->launch(gpu->device, s->compute, &ffn), error,
                           "launching layer %llu", (unsigned long long)layer);
        if (!rc && copy && compute && in->rows)
            rc = send_rows(m, b, in, layer, error);
        if (!rc && copy && layer + 1 < m->source.layers)
            rc = gpu_stream_prefetch(s, layer + 1, NULL, error);
    }
    if (!rc)
        rc = gpu_judge(gpu, ops->stream_sync(gpu->device, s->compute), error, "the last layer");
    *ms = now_ms() - since;
    return rc;
}

/* Where the layer copied last has its weights. */
static int tables_make(struct numoe_gpu_model *m, struct inputs *in, struct numoe_error *error)
{
    const uint64_t bytes = m->source.experts * m->source.slices * sizeof *in->table;
    struct numoe_gpu *gpu = m->gpu;
    int rc;

    if (m->stream.window.bytes < m->source.experts * m->stream.cell_bytes)
        return numoe_error_set(error, -ENOMEM, gpu->properties.name,
                               "a layer of %llu MiB does not fit in the %llu MiB that weights pass "
                               "through",
                               (unsigned long long)(m->source.experts * m->stream.cell_bytes >> 20),
                               (unsigned long long)(m->stream.window.bytes >> 20));
    rc = gpu_judge(gpu, gpu->ops->allocate(gpu->device, bytes, (void **)&in->table), error,
                   "allocating a table");
    return rc ? rc
              : gpu_judge(gpu,
                          gpu->ops->host_allocate(gpu->device, bytes, (void **)&in->host_table),
                          error, "allocating a table");
}

enum { PROBE_COPIES = 3 };
#define PROBE_BYTES ((uint64_t)256 << 20)

static int probe_make(struct numoe_gpu_model *m, struct inputs *in, struct numoe_error *error)
{
    struct numoe_gpu *gpu = m->gpu;
    const struct gpu_ops *ops = gpu->ops;
    int rc;

    in->probe_bytes = m->stream.pool_bytes < PROBE_BYTES ? m->stream.pool_bytes : PROBE_BYTES;
    rc = gpu_judge(gpu, ops->host_allocate(gpu->device, in->probe_bytes, (void **)&in->probe),
                   error, "allocating pinned memory to measure the link");
    if (!rc)
        rc = gpu_judge(gpu, ops->timer_create(gpu->device, &in->probe_begin), error,
                       "making a timer");
    if (!rc)
        rc =
            gpu_judge(gpu, ops->timer_create(gpu->device, &in->probe_end), error, "making a timer");
    if (!rc)
        memset(in->probe, 1, in->probe_bytes);
    return rc;
}

/* The best of a few copies to where the experts are, which are forgotten. */
static int probe(struct numoe_gpu_model *m, const struct inputs *in, double *gbs,
                 struct numoe_error *error)
{
    struct gpu_stream *s = &m->stream;
    struct numoe_gpu *gpu = m->gpu;
    const struct gpu_ops *ops = gpu->ops;
    double ms = 0;
    int rc = 0;

    gpu_stream_forget(s);
    *gbs = 0;
    for (int i = 0; !rc && i < PROBE_COPIES; i++) {
        rc = gpu_judge(gpu, ops->event_record(gpu->device, in->probe_begin, s->copies), error,
                       "measuring the link");
        if (!rc)
            rc = gpu_judge(
                gpu, ops->copy_in(gpu->device, s->copies, s->pool, in->probe, in->probe_bytes),
                error, "measuring the link");
        if (!rc)
            rc = gpu_judge(gpu, ops->event_record(gpu->device, in->probe_end, s->copies), error,
                           "measuring the link");
        if (!rc)
            rc = gpu_judge(gpu, ops->stream_sync(gpu->device, s->copies), error,
                           "measuring the link");
        if (!rc)
            rc = gpu_judge(gpu, ops->elapsed(gpu->device, in->probe_begin, in->probe_end, &ms),
                           error, "measuring the link");
        if (ms > 0 && (double)in->probe_bytes / ms / 1e6 > *gbs)
            *gbs = (double)in->probe_bytes / ms / 1e6;
    }
    return rc;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int numoe_gpu_bench_layers(struct numoe_gpu_model *m, struct numoe_gpu_bench *b,
                           struct numoe_gpu_bench_stream *result, struct numoe_error *error)
{
    const uint32_t repeat = b->repeat ? b->repeat : 1;
    enum { TOTAL, COPY, COMPUTE, LINK, LINK_PART, COPY_PART, CPU, KINDS };
    double *ms = calloc((uint64_t)KINDS * repeat, sizeof *ms);
    struct inputs in = {0};
    uint64_t before = 0;
    int rc = on_one(m, error);

    if (!ms)
        return rc ? rc : numoe_error_set(error, -ENOMEM, "bench", "out of memory");
    if (rc)
        goto out;
    for (uint32_t i = 0; b->sampled && i < b->samples; i++)
        if (b->sample[i] >= b->tokens) {
            rc = numoe_error_set(error, -EINVAL, "sample", "token %llu of %llu",
                                 (unsigned long long)b->sample[i], (unsigned long long)b->tokens);
            goto out;
        }
    rc = inputs_make(m, b, &in, error);
    if (!rc)
        rc = tables_make(m, &in, error);
    if (!rc)
        rc = probe_make(m, &in, error);
    if (rc)
        goto out;
    use_routing(b, &in, 0, &in.ffn);
    if (b->sampled && b->samples)
        rc = gpu_judge(
            m->gpu, m->gpu->ops->host_allocate(m->gpu->device, rows_bytes(m, b), (void **)&in.rows),
            error, "allocating pinned memory for outputs");
    if (!rc)
        rc = pass(m, b, &in, true, true, &ms[0], error); /* warms up */
    for (uint32_t i = 0; !rc && i < repeat; i++) {
        double links[2], cpu;

        if (in.rows)
            memset(in.rows, 0xFF, rows_bytes(m, b)); /* NaN: no output of another pass */
        rc = probe(m, &in, &links[0], error);
        before = gpu_tally_get(&m->stream.tally, GPU_COPIED_BYTES);
        cpu = cpu_ms();
        if (!rc)
            rc = pass(m, b, &in, true, true, &ms[TOTAL * repeat + i], error);
        cpu = cpu_ms() - cpu;
        result->bytes = gpu_tally_get(&m->stream.tally, GPU_COPIED_BYTES) - before;
        if (!rc)
            rc = probe(m, &in, &links[1], error);
        if (!rc)
            rc = pass(m, b, &in, true, false, &ms[COPY * repeat + i], error);
        if (!rc)
            rc = pass(m, b, &in, false, true, &ms[COMPUTE * repeat + i], error);
        if (rc)
            break;
        const double link = links[0] > links[1] ? links[0] : links[1];
        ms[LINK * repeat + i] = link;
        ms[LINK_PART * repeat + i] = (double)result->bytes / ms[TOTAL * repeat + i] / 1e6 / link;
        ms[COPY_PART * repeat + i] = (double)result->bytes / ms[COPY * repeat + i] / 1e6 / link;
        ms[CPU * repeat + i] = cpu / ms[TOTAL * repeat + i];
    }
    if (rc)
        goto out;
    for (int kind = 0; kind < KINDS; kind++)
        qsort(ms + kind * repeat, repeat, sizeof *ms, ascending);
    result->total_ms = ms[TOTAL * repeat + repeat / 2];
    result->copy_ms = ms[COPY * repeat + repeat / 2];
    result->compute_ms = ms[COMPUTE * repeat + repeat / 2];
    result->link_gbs = ms[LINK * repeat + repeat / 2];
    result->link_fraction = ms[LINK_PART * repeat + repeat / 2];
    result->copy_link_fraction = ms[COPY_PART * repeat + repeat / 2];
    result->host_cpu = ms[CPU * repeat + repeat / 2];
    if (in.rows)
        memcpy(b->sampled, in.rows, rows_bytes(m, b));
out:
    inputs_free(m, &in);
    free(ms);
    return rc;
}
