/*
 * Experts that are whole on a device taken as two, three and four: each copies its own, and they
 * pass them on. Tens of thousands with patterns of their own are copied back and compared, on
 * streams that are held up at random. "small": some thousand, for a sanitizer; "time": layers of
 * DeepSeek-V4-Flash's widths, passed on, over each one's link, and on the device alone.
 */
#include "gpu_harness.h"

#define SLICE_BYTES 2048
#include "transfer_patterns.h"

#include <errno.h>
#include <time.h>

#include "base/clock.h"
#include "gpu_several.h"
#include "held_up.h"

enum { MOST = 4, EXPERT = SLICES * SLICE_BYTES, TESTS = 3 };

static const uint32_t evenly[MOST] = {1, 1, 1, 1};

/* ---- a device that is held up ---------------------------------------------------------------- */

static int slow_peer(void *device, void *stream, void *to, void *peer, const void *from,
                     uint64_t bytes)
{
    const int e = hold_up(stream, 3);

    return e ? e : plain->copy_peer(device, stream, to, peer, from, bytes);
}

/* ---- devices --------------------------------------------------------------------------------- */

struct set {
    uint32_t count;
    struct numoe_gpu *gpus[MOST];
    void *streams[MOST];
};

static bool set_open(struct set *set, uint32_t count)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_verdict verdict;
    bool ok = true;

    *set = (struct set){.count = count};
    for (uint32_t i = 0; ok && i < count; i++) {
        cudaStream_t stream = NULL;

        ok = expect(!numoe_gpu_open(0, NUMOE_GPU_ON, NULL, NULL, &set->gpus[i], &verdict, &error),
                    "%s", error.message);
        must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
        set->streams[i] = stream;
    }
    return ok;
}

static void set_close(struct set *set)
{
    for (uint32_t i = 0; i < set->count; i++) {
        if (set->streams[i])
            must(cudaStreamDestroy(set->streams[i]), "stream");
        numoe_gpu_close(set->gpus[i]);
    }
}

static void sync_all(const struct set *set)
{
    for (uint32_t i = 0; i < set->count; i++)
        must(cudaStreamSynchronize(set->streams[i]), "the computations");
}

static void end_all(const struct set *set, struct numoe_gpu_model *model)
{
    for (uint32_t i = 0; i < set->count; i++)
        numoe_gpu_pieces_end(numoe_gpu_model_part(model, i), set->streams[i]);
}

/* ---- what comes back ------------------------------------------------------------------------- */

enum { ROWS = EXPERTS * SLICES, CALL_PIECES = MOST * (EXPERTS + 2) };

/* Of a call: each device's pieces as they were when their stream got to them. */
static struct {
    uint8_t *slices;  /* pinned [MOST][EXPERTS][EXPERT] */
    uint32_t *tables; /* pinned [CALL_PIECES][ROWS] */
    const uint32_t *host[CALL_PIECES];
    uint32_t of[CALL_PIECES], count;
    uint32_t seen[MOST][EXPERTS];
    uint32_t expected[CALL_PIECES][ROWS];
} back;

/* The host's side of a piece's table. */
static const uint32_t *host_table(struct numoe_gpu_model *part, const struct numoe_gpu_piece *piece,
                                  uint64_t layer)
{
    const struct gpu_stream *s = &part->stream;
    const struct gpu_piece *p = piece->handle;

    return p ? p->host_table : gpu_stream_table(s, s->host_tables, layer);
}

static bool fetch(struct numoe_gpu_model *part, uint32_t i, void *stream,
                  const struct numoe_gpu_piece *piece, uint64_t layer)
{
    const uint32_t *table = host_table(part, piece, layer);

    if (!expect(back.count < CALL_PIECES, "more pieces than experts"))
        return false;
    memcpy(back.expected[back.count], table, ROWS * sizeof *table);
    back.of[back.count] = i;
    must(cudaMemcpyAsync(back.tables + (uint64_t)back.count++ * ROWS, piece->slice_at,
                         ROWS * sizeof *table, cudaMemcpyDeviceToHost, stream),
         "a table");
    for (uint64_t e = 0; e < EXPERTS; e++) {
        if (table[e * SLICES] == NUMOE_GPU_ABSENT)
            continue;
        back.seen[i][e]++;
        for (uint64_t k = 0; k < SLICES; k++)
            must(cudaMemcpyAsync(back.slices + (i * EXPERTS + e) * EXPERT + k * SLICE_BYTES,
                                 piece->weights + table[e * SLICES + k] * 64ull, SLICE_BYTES,
                                 cudaMemcpyDeviceToHost, stream),
                 "a slice");
    }
    return true;
}

/* Everything of the call, once it has come. Returns how many experts were right. */
static uint64_t compare(const struct set *set, uint64_t layer, const uint32_t *need)
{
    uint64_t right = 0, wrong = 0;

    sync_all(set);
    for (uint32_t t = 0; t < back.count; t++)
        for (int e = 0; e < EXPERTS; e++) {
            const uint32_t *want = &back.expected[t][e * SLICES];
            const uint32_t *got = &back.tables[(uint64_t)t * ROWS + (uint64_t)e * SLICES];

            wrong += want[0] == NUMOE_GPU_ABSENT ? got[0] != want[0]
                                                 : memcmp(got, want, SLICES * 4) != 0;
        }
    for (uint64_t i = 0; i < set->count; i++)
        for (uint64_t e = 0; e < EXPERTS; e++) {
            wrong += back.seen[i][e] > 1 || back.seen[i][e] < need[e];
            for (uint64_t k = 0; back.seen[i][e] && k < SLICES; k++)
                wrong += !has_pattern(back.slices + (i * EXPERTS + e) * EXPERT + k * SLICE_BYTES,
                                      layer, e, k, generations[layer]);
            right += back.seen[i][e] != 0;
        }
    expect(wrong == 0, "%llu experts, slices or rows of tables are not what was called for",
           (unsigned long long)wrong);
    memset(back.slices, 0xEE, (uint64_t)MOST * EXPERTS * EXPERT);
    memset(back.tables, 0xEE, (uint64_t)CALL_PIECES * ROWS * 4);
    memset(back.seen, 0, sizeof back.seen);
    back.count = 0;
    return right - wrong;
}

static uint64_t run_call(const struct set *set, struct numoe_gpu_model *model, uint64_t layer,
                         uint32_t percent)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    uint32_t need[EXPERTS] = {0};
    int32_t ids[EXPERTS + 1] = {-1};
    uint64_t count = 1;

    for (int32_t e = 0; e < EXPERTS; e++)
        if (random_u64() % 100 < percent) {
            ids[count++] = e;
            need[e] = present(NULL, layer, (uint64_t)e);
        }
    if (!expect(!numoe_gpu_pieces_begin(model, layer, ids, count, 1, &error), "begin: %s",
                error.message))
        return 0;
    while (harness_ok) {
        struct numoe_gpu_piece piece;
        struct numoe_gpu_model *part;
        uint32_t i;

        if (!expect(!numoe_gpu_piece_any(model, set->streams, &i, &piece, &error), "piece: %s",
                    error.message) ||
            !piece.slice_at)
            break;
        part = numoe_gpu_model_part(model, i);
        must((cudaError_t)hold_up(set->streams[i], 3), "holding up");
        if (!fetch(part, i, set->streams[i], &piece, layer))
            break;
        expect(!numoe_gpu_piece_done(part, set->streams[i], &piece, &error), "done: %s",
               error.message);
    }
    end_all(set, model);
    return compare(set, layer, need);
}

/* Some hundred calls one way through; returns how many experts were looked at. */
static uint64_t run_seed(const struct set *set, uint64_t seed, uint64_t most)
{
    const struct numoe_gpu_source source = patterns_source();
    struct numoe_gpu_model_options options = patterns_options(seed);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_report report;
    uint64_t layer = 0, checked = 0;
    struct numoe_gpu_model *model;

    options.no_pinning = false;
    options.chunk_bytes = 0;
    options.shares = evenly;
    options.whole = NUMOE_GPU_WHOLE_PEERS;
    if (!expect(
            !numoe_gpu_model_create_over(set->gpus, set->count, &source, &options, &model, &error),
            "model: %s", error.message))
        return 0;
    for (int call = 0; call < 200 && checked < most && harness_ok; call++) {
        checked += run_call(set, model, layer, seed % 2 ? 90 : 30);
        layer = random_u64() % 6 ? (layer + 1) % LAYERS : random_u64() % LAYERS;
        if (random_u64() % 3)
            expect(!numoe_gpu_prefetch(model, random_u64() % 5 ? layer : random_u64() % LAYERS,
                                       NULL, 0, &error),
                   "prefetch: %s", error.message);
        if (random_u64() % 30 == 0) { /* nothing computes */
            generations[layer]++;
            paint(layer);
        }
    }
    numoe_gpu_model_report(model, &report);
    expect(report.passes && report.passed_experts > 0, "%llu experts passed on: %s",
           (unsigned long long)report.passed_experts, report.pass_note);
    numoe_gpu_model_destroy(model);
    return checked;
}

static void transfers(uint32_t count, uint64_t most)
{
    uint64_t checked = 0;
    struct set set;

    begin("experts passed on among %u", count);
    if (set_open(&set, count)) {
        plain = set.gpus[0]->ops;
        slow = *plain;
        slow.copy_in = slow_copy;
        slow.copy_in_many = slow_copies;
        slow.copy_peer = slow_peer;
        for (uint32_t i = 0; i < count; i++)
            set.gpus[i]->ops = &slow;
        for (uint64_t seed = 1; checked < most && harness_ok; seed++)
            checked += run_seed(&set, seed, most / 4 + 1);
        for (uint32_t i = 0; i < count; i++)
            set.gpus[i]->ops = plain;
    }
    printf("%u devices: %llu experts compared\n", count, (unsigned long long)checked);
    set_close(&set);
    end();
}

/* ---- times ----------------------------------------------------------------------------------- */

enum { WIDE_LAYERS = 3, WIDE_EXPERTS = 64, WIDE_SLICES = 64, WIDE_HIDDEN = 4096, PASSES = 32 };

static uint8_t *wide;
static struct numoe_slice_shape wide_shape;

static void wide_arena(void *user, uint32_t index, void **address, uint64_t *bytes)
{
    (void)user;
    (void)index;
    *address = wide;
    *bytes = (uint64_t)WIDE_LAYERS * WIDE_EXPERTS * WIDE_SLICES * wide_shape.bytes;
}

static uint64_t wide_place(void *user, uint64_t layer, uint64_t expert, uint32_t index,
                           const uint8_t **address)
{
    (void)user;
    (void)index;
    *address = wide + (layer * WIDE_EXPERTS + expert) * WIDE_SLICES * wide_shape.bytes;
    return WIDE_SLICES;
}

static bool wide_present(void *user, uint64_t layer, uint64_t expert)
{
    (void)user;
    (void)layer;
    (void)expert;
    return true;
}

static uint32_t wide_generation(void *user, uint64_t layer)
{
    (void)user;
    (void)layer;
    return 0;
}

/* Layer after layer, the next one prefetched, nothing computed; 10^9 bytes a second that each
 * device gets. *cpu: cores that the calls took, without this program's wait for the last. */
static double timed(const struct set *set, enum numoe_gpu_whole whole, double *cpu)
{
    const struct numoe_gpu_source source = {.shape = wide_shape,
                                            .layers = WIDE_LAYERS,
                                            .experts = WIDE_EXPERTS,
                                            .slices = WIDE_SLICES,
                                            .region_count = 1,
                                            .arena = wide_arena,
                                            .place = wide_place,
                                            .present = wide_present,
                                            .generation = wide_generation};
    const struct numoe_gpu_model_options options = {
        .stream = true, .shares = evenly, .whole = whole};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_model *model;
    struct timespec before, after;
    uint64_t began = 0;
    double seconds;

    if (!expect(
            !numoe_gpu_model_create_over(set->gpus, set->count, &source, &options, &model, &error),
            "model: %s", error.message))
        return 0;
    for (uint64_t pass = 0; pass <= PASSES; pass++) { /* the first is not timed */
        if (pass == 1) {
            sync_all(set);
            clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
            began = numoe_now_ns();
        }
        expect(!numoe_gpu_pieces_begin(model, pass % WIDE_LAYERS, NULL, 0, 0, &error), "begin: %s",
               error.message);
        while (harness_ok) {
            struct numoe_gpu_piece piece;
            uint32_t i;

            if (!expect(!numoe_gpu_piece_any(model, set->streams, &i, &piece, &error), "piece: %s",
                        error.message) ||
                !piece.slice_at)
                break;
            expect(!numoe_gpu_piece_done(numoe_gpu_model_part(model, i), set->streams[i], &piece,
                                         &error),
                   "done: %s", error.message);
        }
        end_all(set, model);
        if (pass < PASSES)
            expect(!numoe_gpu_prefetch(model, (pass + 1) % WIDE_LAYERS, NULL, 0, &error),
                   "prefetch: %s", error.message);
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    sync_all(set);
    seconds = (double)(numoe_now_ns() - began) * 1e-9;
    *cpu =
        ((double)(after.tv_sec - before.tv_sec) + 1e-9 * (double)(after.tv_nsec - before.tv_nsec)) /
        seconds;
    numoe_gpu_model_destroy(model);
    return (double)PASSES * WIDE_EXPERTS * WIDE_SLICES * (double)wide_shape.bytes / seconds / 1e9;
}

static void times(void)
{
    must(numoe_slice_shape_init(&wide_shape, WIDE_HIDDEN, false) ? cudaErrorInvalidValue
                                                                 : cudaSuccess,
         "shape");
    const uint64_t bytes = (uint64_t)WIDE_LAYERS * WIDE_EXPERTS * WIDE_SLICES * wide_shape.bytes;

    wide = aligned_alloc(4096, bytes);
    if (!wide)
        exit(1);
    memset(wide, 1, bytes);
    for (uint32_t count = 1; count <= 3; count++)
        for (int round = 0; round < 2; round++) {
            struct set set;
            double cpu[2], gbs[2] = {0};

            begin("times of %u", count);
            if (set_open(&set, count)) {
                gbs[0] = timed(&set, NUMOE_GPU_WHOLE_LINKS, &cpu[0]);
                gbs[1] = timed(&set, NUMOE_GPU_WHOLE_PEERS, &cpu[1]);
                printf("%u on one link, each gets: %.2f GB/s over its own (%.3f cores), %.2f GB/s "
                       "passed on (%.3f cores)\n",
                       count, gbs[0], cpu[0], gbs[1], cpu[1]);
            }
            set_close(&set);
            end();
        }
    free(wide);
}

int main(int argc, char **argv)
{
    const bool small = argc > 1 && !strcmp(argv[1], "small");
    const uint64_t most = small ? 1500 : 20000;

    if (!have_device(TESTS))
        return finish();
    if (argc > 1 && !strcmp(argv[1], "time")) {
        times();
        return finish();
    }
    random_state = 4;
    patterns_make();
    must(cudaMallocHost((void **)&back.slices, (uint64_t)MOST * EXPERTS * EXPERT), "pinned");
    must(cudaMallocHost((void **)&back.tables, (uint64_t)CALL_PIECES * ROWS * 4), "pinned");
    for (uint32_t count = 2; count <= MOST; count++)
        transfers(count, most);
    printf("streams held up %llu times\n", (unsigned long long)delays);
    must(cudaFreeHost(back.slices), "free");
    must(cudaFreeHost(back.tables), "free");
    regions_free();
    return finish();
}
