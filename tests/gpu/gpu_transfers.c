/*
 * A hundred thousand experts with patterns of their own through cells, window and staging of a
 * device, whose streams are held up at random: what a computation would find is copied back behind
 * it, table and slices, and compared when it has come. An argument says how many experts; "small":
 * some thousand, for a sanitizer.
 */
#include "gpu_harness.h"

#define SLICE_BYTES 2048
#include "transfer_patterns.h"

#include "held_up.h"

/* ---- what comes back ------------------------------------------------------------------------- */

enum { ROOM = 8000, TABLES = 500, ROWS = EXPERTS * SLICES }; /* slices and tables on their way */

struct fetched {
    uint32_t generation;
    uint8_t layer, expert, slice;
};

static struct {
    uint8_t *slices;                 /* pinned [ROOM][SLICE_BYTES] */
    uint32_t *tables;                /* pinned [TABLES][ROWS] */
    uint32_t expected[TABLES][ROWS]; /* of the experts that are there */
    struct fetched of[ROOM];
    uint32_t count, table_count;
    uint64_t wrong;
} back;

static void back_compare(struct gpu_stream *s)
{
    must(cudaStreamSynchronize(s->compute), "the computations");
    for (uint32_t i = 0; i < back.count; i++) {
        const struct fetched *f = &back.of[i];

        back.wrong += !has_pattern(back.slices + (uint64_t)i * SLICE_BYTES, f->layer, f->expert,
                                   f->slice, f->generation);
    }
    for (uint32_t t = 0; t < back.table_count; t++)
        for (int e = 0; e < EXPERTS; e++) {
            const uint32_t *want = &back.expected[t][e * SLICES];
            const uint32_t *got = &back.tables[(uint64_t)t * ROWS + (uint64_t)e * SLICES];

            back.wrong += want[0] == NUMOE_GPU_ABSENT ? got[0] != want[0]
                                                      : memcmp(got, want, SLICES * 4) != 0;
        }
    memset(back.slices, 0xEE, (uint64_t)back.count * SLICE_BYTES);
    memset(back.tables, 0xEE, back.table_count * (uint64_t)ROWS * 4);
    back.count = back.table_count = 0;
}

/* Queue the part's table and every slice that it names on their way back. Returns how many experts.
 */
static uint32_t back_fetch(struct gpu_stream *s, const struct gpu_part *part, uint64_t layer)
{
    const uint32_t *table =
        part->piece ? part->piece->host_table : gpu_stream_table(s, s->host_tables, layer);
    uint32_t experts = 0;

    if (back.count + ROWS > ROOM || back.table_count == TABLES)
        back_compare(s);
    memcpy(back.expected[back.table_count], table, ROWS * sizeof *table);
    must(cudaMemcpyAsync(back.tables + (uint64_t)back.table_count * ROWS, part->slice_at,
                         ROWS * sizeof *table, cudaMemcpyDeviceToHost, s->compute),
         "a table");
    back.table_count++;
    for (uint8_t e = 0; e < EXPERTS; e++) {
        if (table[e * SLICES] == NUMOE_GPU_ABSENT)
            continue;
        for (uint8_t i = 0; i < SLICES; i++) {
            must(cudaMemcpyAsync(back.slices + (uint64_t)back.count * SLICE_BYTES,
                                 part->weights + table[e * SLICES + i] * 64ull, SLICE_BYTES,
                                 cudaMemcpyDeviceToHost, s->compute),
                 "a slice");
            back.of[back.count++] = (struct fetched){generations[layer], (uint8_t)layer, e, i};
        }
        experts++;
    }
    return experts;
}

/* ---- transfers ------------------------------------------------------------------------------- */

/* Some hundred calls one way through; returns how many experts were looked at. */
static uint64_t run_seed(struct numoe_gpu *gpu, uint64_t seed, uint64_t most)
{
    const struct numoe_gpu_source source = patterns_source();
    const struct numoe_gpu_model_options options = patterns_options(seed);
    struct numoe_error error = NUMOE_ERROR_INIT;
    uint64_t layer = 0, checked = 0;
    struct numoe_gpu_model *model;
    struct gpu_stream *s;

    if (!expect(!numoe_gpu_model_create(gpu, &source, &options, &model, &error), "model: %s",
                error.message))
        return 0;
    s = &model->stream;
    for (int call = 0; call < 400 && checked < most && harness_ok; call++) {
        uint32_t need[EXPERTS], asked[EXPERTS], wanted = 0, given = 0;
        struct gpu_part part;

        for (uint32_t e = 0; e < EXPERTS; e++) {
            asked[e] = need[e] = random_u64() % 100 < (seed % 2 ? 90 : 20);
            wanted += need[e] && present(NULL, layer, e);
        }
        expect(!gpu_stream_begin(s, layer, need, asked, 3, &error), "begin: %s", error.message);
        while (harness_ok) {
            if (!expect(!gpu_stream_next(s, s->compute, &part, &error), "part: %s",
                        error.message) ||
                !part.slice_at)
                break;
            must((cudaError_t)hold_up(s->compute, 3), "holding up");
            given += back_fetch(s, &part, layer);
            expect(!gpu_stream_done(s, s->compute, &part, &error), "done: %s", error.message);
        }
        gpu_stream_end(s, s->compute);
        expect(given >= wanted, "%u experts of %u came", given, wanted);
        checked += given;
        layer = random_u64() % 6 ? (layer + 1) % LAYERS : random_u64() % LAYERS;
        if (random_u64() % 3)
            expect(!gpu_stream_prefetch(s, random_u64() % 5 ? layer : random_u64() % LAYERS,
                                        random_u64() % 2 ? NULL : need, &error),
                   "prefetch: %s", error.message);
        if (random_u64() % 30 == 0) {
            /* weights change when nothing computes; what is on its way is of the old ones */
            const uint64_t changed = random_u64() % LAYERS;

            back_compare(s);
            generations[changed]++;
            paint(changed);
        }
        if (random_u64() % 100 == 0)
            gpu_stream_shrink(s, SLICES * SLICE_BYTES, NULL);
    }
    back_compare(s);
    numoe_gpu_model_destroy(model);
    return checked;
}

int main(int argc, char **argv)
{
    const bool small = argc > 1 && !strcmp(argv[1], "small");
    const uint64_t most = small ? 4000 : argc > 1 ? strtoull(argv[1], NULL, 10) : 100000;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_verdict verdict;
    struct numoe_gpu *gpu = NULL;
    uint64_t checked = 0;

    if (!have_device(1))
        return finish();
    begin("transfers");
    if (!expect(!numoe_gpu_open(0, NUMOE_GPU_ON, NULL, NULL, &gpu, &verdict, &error), "%s",
                error.message)) {
        end();
        return finish();
    }
    plain = gpu->ops;
    slow = *plain;
    slow.copy_in = slow_copy;
    slow.copy_in_many = slow_copies;
    gpu->ops = &slow;
    random_state = 4;
    patterns_make();
    must(cudaMallocHost((void **)&back.slices, (uint64_t)ROOM * SLICE_BYTES), "pinned");
    must(cudaMallocHost((void **)&back.tables, (uint64_t)TABLES * ROWS * 4), "pinned");
    for (uint64_t seed = 1; checked < most && harness_ok; seed++)
        checked += run_seed(gpu, seed, small ? most / 8 : most - checked);
    expect(back.wrong == 0, "%llu slices and rows of tables are not what was called for",
           (unsigned long long)back.wrong);
    printf("%llu experts compared, streams held up %llu times\n", (unsigned long long)checked,
           (unsigned long long)delays);
    must(cudaFreeHost(back.slices), "free");
    must(cudaFreeHost(back.tables), "free");
    regions_free();
    gpu->ops = plain;
    end();
    numoe_gpu_close(gpu);
    return finish();
}
