/*
 * The engine's interface on a device: calls on its streams, calls in its graphs, pieces for kernels
 * of its own, the same repacked to Marlin's layout, and what a trace says. "small": for a
 * sanitizer, which keeps up to 200 MB of host memory for each launch until the program ends.
 */
#include <errno.h>
#include <math.h>

#include "base/clock.h"
#include "gpu_harness.h"
#include "numoe_gpu.h"
#include "support/experts.h"

enum { LAYERS = 3, EXPERTS = 24, HIDDEN = 256, INTERMEDIATE = 224, SLICES = INTERMEDIATE / 32 };
enum { TOP_K = 4, REGIONS = 2, ABSENT = 5, TOKENS_MOST = 200, TESTS = 10 };

#include "regions.h"
#include "rows_call.h"

/* Experts over two regions, cut at another place for each. */
static struct numoe_slice_shape shape;
static uint8_t *whole; /* all slices in order, for the reference */
static const struct numoe_activation activation = {.kind = NUMOE_SILU_CLAMPED, .limit = 4.0f};

static const uint8_t *slices_of(uint64_t layer, uint64_t expert)
{
    return whole + (layer * EXPERTS + expert) * SLICES * shape.bytes;
}

static void make_experts(void)
{
    must(numoe_slice_shape_init(&shape, HIDDEN, false) ? cudaErrorInvalidValue : cudaSuccess,
         "shape");
    for (uint64_t q = 0; q < LAYERS * EXPERTS; q++) {
        starts[0][q + 1] = starts[0][q] + q % (SLICES + 1);
        starts[1][q + 1] = starts[1][q] + SLICES - q % (SLICES + 1);
    }
    slice_bytes = shape.bytes;
    whole = aligned_bytes(LAYERS * EXPERTS * SLICES * shape.bytes);
    for (uint32_t r = 0; r < REGIONS; r++)
        region_make(r);
    for (uint64_t q = 0; q < LAYERS * EXPERTS; q++) {
        const uint64_t cut = q % (SLICES + 1), bytes = shape.bytes;
        uint8_t *to = whole + q * SLICES * bytes;
        struct numoe_pack_report report = {0};
        struct test_expert expert;

        test_expert_make(&expert, HIDDEN, INTERMEDIATE, false);
        numoe_pack_slices(&shape, &expert.source, 0, SLICES, to, &report);
        test_expert_free(&expert);
        memcpy(arenas[0] + starts[0][q] * bytes, to, cut * bytes);
        memcpy(arenas[1] + starts[1][q] * bytes, to + cut * bytes, (SLICES - cut) * bytes);
    }
}

static const struct numoe_gpu_source source = {
    .activation = {.kind = NUMOE_SILU_CLAMPED, .limit = 4.0f},
    .arithmetic = NUMOE_EXACT,
    .layers = LAYERS,
    .experts = EXPERTS,
    .slices = SLICES,
    .region_count = REGIONS,
    .arena = arena,
    .place = place,
    .present = present,
    .generation = generation};

/* On a device; or whole on two, which pass experts on to each other. */
static struct numoe_gpu_model *make_over(struct numoe_gpu *gpu, struct numoe_gpu *other,
                                         uint64_t cells, uint64_t window)
{
    static const uint32_t shares[2] = {1, 1};
    struct numoe_gpu *const gpus[2] = {gpu, other};
    const uint64_t expert = SLICES * shape.bytes;
    const struct numoe_gpu_model_options options = {.stream = cells == 0,
                                                    .cache_bytes = cells * expert,
                                                    .window_bytes = window * expert,
                                                    .piece_bytes = 1,
                                                    .keep_free_bytes = (uint64_t)1 << 30,
                                                    .shares = shares,
                                                    .whole = NUMOE_GPU_WHOLE_PEERS};
    struct numoe_gpu_source of = source;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_model *model = NULL;

    of.shape = shape;
    expect(!numoe_gpu_model_create_over(gpus, other ? 2 : 1, &of, &options, &model, &error),
           "model: %s", error.message);
    return model;
}

static struct numoe_gpu_model *make_model(struct numoe_gpu *gpu, uint64_t cells, uint64_t window)
{
    return make_over(gpu, NULL, cells, window);
}

/* ---- batches on the device ------------------------------------------------------------------- */

struct device_batch {
    uint64_t tokens;
    float *x, *routing, *out; /* pinned */
    int32_t *ids;
    struct guarded dx, drouting, dids, dout, work;
    struct numoe_gpu_device_call call;
};

static void draw(struct device_batch *b)
{
    for (uint64_t i = 0; i < b->tokens * HIDDEN; i++)
        b->x[i] = round_to_bf16(random_normal());
    for (uint64_t i = 0; i < b->tokens * TOP_K; i++) {
        b->ids[i] = (int32_t)(random_u64() >> 20) % (EXPERTS + 2) - 1;
        b->routing[i] = (float)random_unit();
    }
}

static void batch_make(struct device_batch *b, const struct numoe_gpu_model *model, uint64_t tokens)
{
    b->tokens = tokens;
    must(cudaMallocHost((void **)&b->x, tokens * HIDDEN * 4), "pinned");
    must(cudaMallocHost((void **)&b->out, tokens * HIDDEN * 4), "pinned");
    must(cudaMallocHost((void **)&b->routing, tokens * TOP_K * 4), "pinned");
    must(cudaMallocHost((void **)&b->ids, tokens * TOP_K * 4), "pinned");
    guarded_make(&b->dx, tokens * HIDDEN * 4, 0);
    guarded_make(&b->dout, tokens * HIDDEN * 4, 0xFF);
    guarded_make(&b->drouting, tokens * TOP_K * 4, 0);
    guarded_make(&b->dids, tokens * TOP_K * 4, 0);
    b->call = (struct numoe_gpu_device_call){
        .tokens = tokens,
        .top_k = TOP_K,
        .x = b->dx.data,
        .x_type = NUMOE_F32,
        .x_stride = HIDDEN,
        .ids = (const int32_t *)(const void *)b->dids.data,
        .routing = (const float *)(const void *)b->drouting.data,
        .out = (float *)(void *)b->dout.data,
        .out_stride = HIDDEN,
        .scale = 1.0f,
    };
    b->call.workspace_bytes = numoe_gpu_workspace(model, &b->call);
    guarded_make(&b->work, b->call.workspace_bytes, 0xA7);
    b->call.workspace = b->work.data;
    draw(b);
}

static void batch_free(struct device_batch *b)
{
    struct guarded *const all[] = {&b->dx, &b->dout, &b->drouting, &b->dids, &b->work};

    for (int i = 0; i < 5; i++) {
        guarded_check(all[i], "a batch");
        guarded_free(all[i]);
    }
    must(cudaFreeHost(b->x), "free");
    must(cudaFreeHost(b->out), "free");
    must(cudaFreeHost(b->routing), "free");
    must(cudaFreeHost(b->ids), "free");
}

static void send(struct device_batch *b, cudaStream_t stream)
{
    must(cudaMemcpyAsync(b->dx.data, b->x, b->dx.bytes, cudaMemcpyHostToDevice, stream), "x");
    must(cudaMemcpyAsync(b->dids.data, b->ids, b->dids.bytes, cudaMemcpyHostToDevice, stream),
         "ids");
    must(cudaMemcpyAsync(b->drouting.data, b->routing, b->drouting.bytes, cudaMemcpyHostToDevice,
                         stream),
         "routing");
}

static void fetch(struct device_batch *b, cudaStream_t stream)
{
    must(cudaMemcpyAsync(b->out, b->dout.data, b->dout.bytes, cudaMemcpyDeviceToHost, stream),
         "out");
}

static bool right(const struct device_batch *b, uint64_t layer, const char *what)
{
    double want[HIDDEN], worst = 0;

    for (uint64_t t = 0; t < b->tokens; t += 1 + b->tokens / 12) {
        double off = 0, size = 0;

        memset(want, 0, sizeof want);
        for (int j = 0; j < TOP_K; j++) {
            const int32_t e = b->ids[t * TOP_K + j];
            if (e < 0 || e >= EXPERTS || !present(NULL, layer, (uint64_t)e))
                continue;
            numoe_reference_slices(&shape, &activation, slices_of(layer, (uint64_t)e), SLICES,
                                   b->x + t * HIDDEN, (double)b->routing[t * TOP_K + j], NULL, true,
                                   want);
        }
        for (int k = 0; k < HIDDEN; k++) {
            const double d = want[k] - (double)b->out[t * HIDDEN + k];
            off += d * d;
            size += want[k] * want[k];
        }
        off = size > 0 ? sqrt(off / size) : off;
        worst = off <= worst ? worst : off;
    }
    return expect(worst <= 5e-3, "%s, layer %d, %d tokens: off by %.2e", what, (int)layer,
                  (int)b->tokens, worst);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static const uint64_t counts[] = {1, 2, 8, 32, TOKENS_MOST};
enum { COUNTS = sizeof counts / sizeof counts[0] };

/* Calls one behind the other on two streams; nothing is waited for until all are queued. small:
 * until all of a number of tokens are, as a sanitizer keeps what it knows of each launch till then.
 */
static void on_streams(struct numoe_gpu *gpu, uint64_t cells, uint64_t window, bool small)
{
    struct numoe_gpu_model *model = make_model(gpu, cells, window);
    struct numoe_error error = NUMOE_ERROR_INIT;
    static struct device_batch b[COUNTS][LAYERS];
    cudaStream_t streams[2];

    if (!model)
        return;
    for (int i = 0; i < 2; i++)
        must(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking), "stream");
    for (int c = 0; c < COUNTS; c++)
        for (int l = 0; l < LAYERS; l++)
            batch_make(&b[c][l], model, counts[c]);
    for (int round = 0; round < (small ? 1 : 8); round++) {
        for (int c = 0; c < COUNTS; c++) {
            for (uint64_t l = 0; l < LAYERS; l++) {
                struct device_batch *of = &b[c][l];
                cudaStream_t stream = streams[(round + c + (int)l) % 2];

                draw(of);
                send(of, stream);
                expect(!numoe_gpu_enqueue(model, l, &of->call, round % 2 ? of->ids : NULL, stream,
                                          &error),
                       "enqueue: %s", error.message);
                fetch(of, stream);
                if (c % 2)
                    numoe_gpu_prefetch(model, (l + 1) % LAYERS, NULL, 0, NULL);
            }
            for (int i = 0; small && i < 2; i++)
                must(cudaStreamSynchronize(streams[i]), "the calls");
        }
        for (int i = 0; i < 2; i++)
            must(cudaStreamSynchronize(streams[i]), "the calls");
        for (int c = 0; c < COUNTS; c++)
            for (uint64_t l = 0; l < LAYERS; l++)
                right(&b[c][l], l, "queued");
    }
    numoe_gpu_model_destroy(model);
    for (int c = 0; c < COUNTS; c++)
        for (int l = 0; l < LAYERS; l++)
            batch_free(&b[c][l]);
    for (int i = 0; i < 2; i++)
        must(cudaStreamDestroy(streams[i]), "stream");
}

/* Graphs of 1, 2, 8 and 32 tokens, replayed with other x and ids among calls of other kinds. */
static void in_graphs(struct numoe_gpu *gpu, int rounds)
{
    enum { GRAPHS = 4 };
    struct numoe_gpu_model *model = make_model(gpu, 2 * EXPERTS + 8, 10);
    struct numoe_error error = NUMOE_ERROR_INIT;
    static struct device_batch b[GRAPHS], eager;
    cudaGraphExec_t exec[GRAPHS];
    cudaGraph_t graph;
    cudaStream_t stream;

    if (!model)
        return;
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    batch_make(&eager, model, 8);
    /* cells for two layers and some, dealt evenly: too few for a whole layer, so some are held */
    for (int g = 0; g < GRAPHS; g++) {
        const uint64_t layer = (uint64_t)g % 2;
        int32_t some[EXPERTS / 2];
        size_t nodes = 0;

        batch_make(&b[g], model, counts[g]);
        for (int i = 0; i < EXPERTS / 2; i++)
            some[i] = 2 * i;
        must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
        if (g < 2) {
            expect(numoe_gpu_enqueue(model, layer, &b[g].call, NULL, stream, &error) == -ENOTSUP,
                   "captured what is in host memory");
            must(cudaStreamEndCapture(stream, &graph), "a capture that was refused a call");
            must(cudaGraphGetNodes(graph, NULL, &nodes), "nodes");
            expect(nodes == 0, "%d nodes of a refused call", (int)nodes);
            must(cudaGraphDestroy(graph), "graph");
            expect(!numoe_gpu_hold(model, layer, some, EXPERTS / 2, &error), "hold: %s",
                   error.message);
            must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
        }
        for (uint64_t i = 0; i < counts[g] * TOP_K; i++)
            b[g].ids[i] = some[i % (EXPERTS / 2)];
        expect(!numoe_gpu_enqueue(model, layer, &b[g].call, b[g].ids, stream, &error),
               "capturing %d tokens: %s", (int)counts[g], error.message);
        must(cudaStreamEndCapture(stream, &graph), "end of capture");
        must(cudaGraphInstantiate(&exec[g], graph, 0), "instantiate");
        must(cudaGraphDestroy(graph), "graph");
    }
    for (int round = 0; round < rounds; round++) {
        const int g = (int)(random_u64() % GRAPHS);
        const uint64_t other = random_u64() % LAYERS;

        draw(&b[g]);
        for (uint64_t i = 0; i < b[g].tokens * TOP_K; i++)
            if (b[g].ids[i] >= 0 && b[g].ids[i] < EXPERTS)
                b[g].ids[i] &= ~1; /* those that are held */
        send(&b[g], stream);
        must(cudaGraphLaunch(exec[g], stream), "replay");
        fetch(&b[g], stream);
        draw(&eager);
        send(&eager, stream);
        expect(!numoe_gpu_enqueue(model, other, &eager.call, eager.ids, stream, &error),
               "between: %s", error.message);
        fetch(&eager, stream);
        must(cudaStreamSynchronize(stream), "a replay");
        right(&b[g], (uint64_t)g % 2, "replayed");
        right(&eager, other, "between replays");
    }
    for (int g = 0; g < GRAPHS; g++)
        must(cudaGraphExecDestroy(exec[g]), "graph");
    numoe_gpu_release(model, 0);
    numoe_gpu_release(model, 1);
    numoe_gpu_model_destroy(model);
    for (int g = 0; g < GRAPHS; g++)
        batch_free(&b[g]);
    batch_free(&eager);
    must(cudaStreamDestroy(stream), "stream");
}

/* Pieces as an engine's own kernels would read them: every slice that their table names, byte by
 * byte, while the pieces behind are on their way into the same window. */
static void in_pieces(struct numoe_gpu *gpu, int rounds)
{
    struct numoe_gpu_model *model = make_model(gpu, 0, 6);
    struct numoe_error error = NUMOE_ERROR_INIT;
    static uint32_t table[EXPERTS][SLICES];
    uint8_t *slice = malloc(shape.bytes);
    cudaStream_t stream;

    if (!model)
        return;
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    for (int round = 0; round < rounds * LAYERS; round++) {
        const uint64_t layer = (uint64_t)round % LAYERS;
        int seen[EXPERTS] = {0};
        struct numoe_gpu_piece piece;
        uint64_t wrong = 0;

        expect(!numoe_gpu_pieces_begin(model, layer, NULL, 0, 0, &error), "begin: %s",
               error.message);
        for (;;) {
            if (!expect(!numoe_gpu_piece_next(model, stream, &piece, &error), "piece: %s",
                        error.message) ||
                !piece.slice_at)
                break;
            must(cudaMemcpyAsync(table, piece.slice_at, sizeof table, cudaMemcpyDeviceToHost,
                                 stream),
                 "table");
            must(cudaStreamSynchronize(stream), "table");
            for (int e = 0; e < EXPERTS; e++) {
                if (table[e][0] == NUMOE_GPU_ABSENT)
                    continue;
                seen[e]++;
                for (int s = 0; s < SLICES; s++) {
                    must(cudaMemcpyAsync(slice, piece.weights + table[e][s] * 64ull, shape.bytes,
                                         cudaMemcpyDeviceToHost, stream),
                         "slice");
                    must(cudaStreamSynchronize(stream), "slice");
                    wrong += memcmp(slice, slices_of(layer, (uint64_t)e) + s * shape.bytes,
                                    shape.bytes) != 0;
                }
            }
            expect(!numoe_gpu_piece_done(model, stream, &piece, &error), "done: %s", error.message);
        }
        numoe_gpu_pieces_end(model, stream);
        expect(wrong == 0, "%d slices with other bytes", (int)wrong);
        for (int e = 0; e < EXPERTS; e++)
            expect(seen[e] == present(NULL, layer, (uint64_t)e), "expert %d came %d times", e,
                   seen[e]);
    }
    numoe_gpu_model_destroy(model);
    must(cudaStreamDestroy(stream), "stream");
    free(slice);
}

/* Pieces repacked as they come, into slots; nothing is waited for before the layer's end. With
 * another device half of them, those of its own, are passed on from there. */
static void in_marlin(struct numoe_gpu *gpu, struct numoe_gpu *other, bool interleaved)
{
    struct numoe_gpu_model *model = make_over(gpu, other, EXPERTS / 2, 6);
    struct numoe_gpu_report report;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_marlin_sizes sizes;
    struct guarded words[2], scales[2], slots;
    int32_t slot_of[EXPERTS];
    cudaStream_t streams[2] = {NULL};
    void *any[2];

    numoe_marlin_sizes(&shape, SLICES, &sizes);
    const uint64_t bytes[2] = {4 * sizes.gate_up_words, 4 * sizes.down_words};
    const uint64_t scale_bytes[2] = {sizes.gate_up_scales, sizes.down_scales};
    const struct numoe_marlin want = {malloc(bytes[0]), malloc(scale_bytes[0]), malloc(bytes[1]),
                                      malloc(scale_bytes[1])};
    uint8_t *const got = malloc(bytes[0]);

    if (!model)
        return;
    for (int i = 0; i < 2; i++) {
        must(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking), "stream");
        any[i] = streams[i];
    }
    for (int e = 0; e < EXPERTS; e++)
        slot_of[e] = e == 7 ? -1 : EXPERTS - 1 - e;
    guarded_put(&slots, slot_of, sizeof slot_of);
    for (int i = 0; i < 2; i++) {
        guarded_make(&words[i], EXPERTS * bytes[i], 0x11);
        guarded_make(&scales[i], EXPERTS * scale_bytes[i], 0x11);
    }
    const struct numoe_marlin to = {(uint32_t *)(void *)words[0].data, scales[0].data,
                                    (uint32_t *)(void *)words[1].data, scales[1].data};
    for (uint64_t layer = 0; layer < LAYERS; layer++) {
        struct numoe_gpu_piece piece;
        uint32_t part;
        int wrong = 0;

        expect(!numoe_gpu_pieces_begin(model, layer, NULL, 0, 0, &error), "begin: %s",
               error.message);
        while (expect(!numoe_gpu_piece_any(model, any, &part, &piece, &error), "piece: %s",
                      error.message) &&
               piece.slice_at) {
            struct numoe_gpu_model *of = numoe_gpu_model_part(model, part);

            if (part == 0)
                expect(!numoe_gpu_piece_marlin(of, streams[0], &piece,
                                               (const int32_t *)(const void *)slots.data,
                                               interleaved, &to, &error),
                       "repacking: %s", error.message);
            expect(!numoe_gpu_piece_done(of, streams[part], &piece, &error), "done: %s",
                   error.message);
        }
        for (uint32_t i = 0; i < numoe_gpu_model_parts(model); i++)
            numoe_gpu_pieces_end(numoe_gpu_model_part(model, i), streams[i]);
        must(cudaStreamSynchronize(streams[0]), "repacking");
        for (int e = 0; e < EXPERTS; e++) {
            const uint64_t slot = (uint64_t)slot_of[e];
            if (slot_of[e] < 0 || !present(NULL, layer, (uint64_t)e))
                continue;
            numoe_marlin_reference(&shape, slices_of(layer, (uint64_t)e), SLICES, interleaved,
                                   &want);
            for (int i = 0; i < 4; i++) {
                const struct guarded *from = i < 2 ? &words[i] : &scales[i - 2];
                const uint64_t each = i < 2 ? bytes[i] : scale_bytes[i - 2];
                const void *const as[4] = {want.gate_up, want.down, want.gate_up_scales,
                                           want.down_scales};
                must(cudaMemcpy(got, from->data + slot * each, each, cudaMemcpyDeviceToHost),
                     "read");
                wrong += memcmp(got, as[i], each) != 0;
            }
        }
        expect(wrong == 0, "layer %d: %d arrays with other bits", (int)layer, wrong);
    }
    for (int i = 0; i < 2; i++) {
        guarded_check(&words[i], "codes");
        guarded_check(&scales[i], "scales");
        guarded_free(&words[i]);
        guarded_free(&scales[i]);
    }
    guarded_free(&slots);
    numoe_gpu_model_report(model, &report);
    expect(other ? report.passed_experts > 0 : !report.passed_experts, "%d experts passed on: %s",
           (int)report.passed_experts, report.pass_note);
    numoe_gpu_model_destroy(model);
    for (int i = 0; i < 2; i++)
        must(cudaStreamDestroy(streams[i]), "stream");
    free(want.gate_up);
    free(want.gate_up_scales);
    free(want.down);
    free(want.down_scales);
    free(got);
}

struct told {
    uint64_t copies, computed, bytes, first, last;
};

static void tell(void *user, const struct numoe_gpu_span *span)
{
    struct told *t = user;

    t->copies += span->kind == NUMOE_GPU_SPAN_COPY;
    t->computed += span->kind == NUMOE_GPU_SPAN_COMPUTE;
    t->bytes += span->bytes;
    t->first = span->begin_ns < t->first ? span->begin_ns : t->first;
    t->last = span->end_ns > t->last ? span->end_ns : t->last;
}

/* What is told lies within the calls, by the host's clock. */
static void traced(struct numoe_gpu *gpu, bool small)
{
    struct numoe_gpu_model *model = make_model(gpu, 0, 6);
    struct told told = {.first = UINT64_MAX};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_report report;
    static float x[8 * HIDDEN], out[8 * HIDDEN], routing[8 * TOP_K];
    static int32_t ids[8 * TOP_K];
    struct numoe_gpu_call call = rows_call(8, HIDDEN, TOP_K, x, ids, routing, out);
    uint64_t done, began;

    if (!model)
        return;
    call.ahead = NUMOE_GPU_NO_AHEAD;
    for (int i = 0; i < 8 * TOP_K; i++) {
        ids[i] = i % EXPERTS;
        routing[i] = 0.25f;
    }
    expect(!numoe_gpu_trace(model, tell, &told, &error), "trace: %s", error.message);
    began = numoe_now_ns();
    for (int i = 0; i < (small ? LAYERS : 30); i++) {
        expect(!numoe_gpu_forward(model, (uint64_t)i % LAYERS, &call, &done, &error), "call: %s",
               error.message);
    }
    const uint64_t ended = numoe_now_ns();
    numoe_gpu_model_report(model, &report);
    expect(told.copies > 0 && told.copies == told.computed, "%d copies, %d computations",
           (int)told.copies, (int)told.computed);
    expect(told.bytes == report.copied_bytes, "%llu bytes of %llu", (unsigned long long)told.bytes,
           (unsigned long long)report.copied_bytes);
    /* 50 us for the clocks */
    expect(told.first + 50000 >= began && told.last <= ended + 50000,
           "spans begin %lld us after the first call, end %lld us before the last was over",
           (long long)(told.first - began) / 1000, (long long)(ended - told.last) / 1000);
    printf(
        "trace: %d copies; first %lld us after the calls began, last ended %lld us before them\n",
        (int)told.copies, (long long)(told.first - began) / 1000,
        (long long)(ended - told.last) / 1000);
    numoe_gpu_model_destroy(model);
}

int main(int argc, char **argv)
{
    const bool small = argc > 1 && !strcmp(argv[1], "small");
    struct numoe_gpu_verdict verdict;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_finding found;
    struct numoe_gpu *gpu = NULL, *again = NULL;

    if (!have_device(TESTS))
        return finish();
    begin("opening");
    if (!expect(!numoe_gpu_open(0, NUMOE_GPU_ON, NULL, NULL, &gpu, &verdict, &error), "%s",
                error.message)) {
        end();
        return finish();
    }
    make_experts();
    begin("calls on streams, all experts stay");
    on_streams(gpu, LAYERS * EXPERTS, 10, small);
    end();
    begin("calls on streams, some experts stay");
    on_streams(gpu, EXPERTS, 10, small);
    end();
    begin("calls on streams, none stays");
    on_streams(gpu, 0, 6, small);
    end();
    begin("calls in graphs");
    in_graphs(gpu, small ? 6 : 400);
    end();
    begin("pieces");
    in_pieces(gpu, small ? 1 : 5);
    end();
    begin("pieces in Marlin's layout");
    in_marlin(gpu, NULL, false);
    in_marlin(gpu, NULL, true);
    end();
    begin("passed on, in Marlin's layout");
    if (expect(!numoe_gpu_open(0, NUMOE_GPU_ON, NULL, NULL, &again, &verdict, &error), "%s",
               error.message)) {
        in_marlin(gpu, again, false);
        in_marlin(gpu, again, true);
    }
    end();
    numoe_gpu_close(again);
    begin("Marlin's layout, as certified");
    expect(!numoe_gpu_certify_marlin(gpu, &found, &error) && found.ok, "%s%s", error.message,
           found.text);
    end();
    begin("passing on, as certified");
    expect(!numoe_gpu_certify_passing(gpu, &found, &error) && found.ok, "%s%s", error.message,
           found.text);
    end();
    begin("a trace");
    traced(gpu, small);
    end();
    numoe_gpu_close(gpu);
    free(whole);
    regions_free();
    return finish();
}
