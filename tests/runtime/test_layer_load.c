/* Layers from the caller's memory, taken out and put back, and checksums of what is placed. */
#include "checkpoint.h"
#include "model.h"
#include "synth.h"

#include "loader_files.h"

#include <sys/mman.h>

enum { EXPERTS = 5, HIDDEN = 256, INTER = 160 };

static char *write_model(const char *model)
{
    struct numoe_synth_options options = NUMOE_SYNTH_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    char *directory = files_dir();

    options.model = model;
    options.layers = 2;
    options.experts = EXPERTS;
    options.hidden = HIDDEN;
    options.intermediate = INTER;
    options.seed = 9;
    cr_assert_eq(numoe_synth_write(directory, &options, &error), 0, "%s", error.message);
    return directory;
}

static struct numoe *open_context(const char *topology, uint32_t workers)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe *context;

    options.topology = topology;
    options.workers = workers;
    options.form = NUMOE_FORM_EVERY_NODE;
    cr_assert_eq(numoe_open(&options, &context, &error), 0, "%s", error.message);
    return context;
}

static struct numoe_model *load_model(struct numoe *context, const char *directory, bool checksum)
{
    struct numoe_load_options options = NUMOE_LOAD_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *model;

    options.checksum = checksum;
    cr_assert_eq(numoe_model_load(context, directory, &options, &model, &error), 0, "%s",
                 error.message);
    return model;
}

static uint64_t sum_of(const struct numoe_model *model, uint64_t layer, uint64_t expert)
{
    uint64_t sum;

    cr_assert_eq(numoe_expert_checksum(model, layer, expert, &sum), 0);
    return sum;
}

/* A layer's GPT-OSS tensors in memory: a copy of what the file has. */
struct source {
    uint8_t *file;
    struct numoe_layer_weights weights;
};

static struct source read_layer(const char *directory, uint64_t layer)
{
    struct source out = {.weights = NUMOE_LAYER_WEIGHTS_INIT};
    struct numoe_layer_weights *w = &out.weights;
    struct numoe_extent parts[NUMOE_PART_COUNT];
    struct numoe_checkpoint *checkpoint;
    const uint8_t *at;

    cr_assert_eq(numoe_checkpoint_open(directory, NULL, &checkpoint, NULL), 0);
    numoe_checkpoint_expert(checkpoint, layer, 0, parts);
    out.file = (uint8_t *)files_get(numoe_checkpoint_file(checkpoint, 0, NULL), NULL);
    at = out.file;
    w->gate_up = NUMOE_GATE_UP_INTERLEAVED;
    w->gate = (struct numoe_mxfp4){.codes = at + parts[NUMOE_PART_GATE_CODES].offset,
                                   .scales = at + parts[NUMOE_PART_GATE_SCALES].offset,
                                   .code_stride = HIDDEN / 2,
                                   .scale_stride = HIDDEN / 32,
                                   .code_step = 16,
                                   .scale_step = 1,
                                   .nibbles = NUMOE_NIBBLES_ADJACENT};
    w->gate_stride = (struct numoe_expert_stride){INTER * HIDDEN, 2 * INTER * HIDDEN / 32};
    w->down = w->gate;
    w->down.codes = at + parts[NUMOE_PART_DOWN_CODES].offset;
    w->down.scales = at + parts[NUMOE_PART_DOWN_SCALES].offset;
    w->down.code_stride = INTER / 2;
    w->down.scale_stride = INTER / 32;
    w->down_stride = (struct numoe_expert_stride){INTER * HIDDEN / 2, INTER * HIDDEN / 32};
    w->gate_bias = at + parts[NUMOE_PART_GATE_BIAS].offset;
    w->gate_bias_stride = 4 * INTER;
    w->down_bias = at + parts[NUMOE_PART_DOWN_BIAS].offset;
    w->down_bias_stride = 2 * HIDDEN;
    w->bias_type = NUMOE_BF16;
    numoe_checkpoint_close(checkpoint);
    return out;
}

/* Rows of an interleaved array, of `bytes` each, in another order. */
static uint8_t *reorder(const uint8_t *from, uint64_t bytes, enum numoe_gate_up_order order)
{
    uint8_t *out = malloc(EXPERTS * 2 * INTER * bytes);
    uint64_t e, r;

    for (e = 0; e < EXPERTS; e++)
        for (r = 0; r < 2 * INTER; r++) {
            const bool up = r % 2;
            const uint64_t to = up == (order == NUMOE_GATE_FIRST || order == NUMOE_GATE_UP_APART)
                                    ? INTER + r / 2
                                    : r / 2;
            memcpy(out + (e * 2 * INTER + to) * bytes, from + (e * 2 * INTER + r) * bytes, bytes);
        }
    return out;
}

Test(layer_load, any_declared_order_gives_what_the_file_gives, .timeout = 60)
{
    char *directory = write_model("gpt-oss-20b");
    struct numoe *context = open_context(NULL, 2);
    struct numoe_model *model = load_model(context, directory, false), *given;
    struct source source = read_layer(directory, 1);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model_info info = NUMOE_MODEL_INFO_INIT;
    enum numoe_gate_up_order order;
    uint64_t e;

    cr_assert_eq(numoe_model_info(model, &info), 0);
    cr_assert_eq(numoe_model_create(context, &info.desc, &given, &error), 0, "%s", error.message);
    for (order = NUMOE_GATE_UP_APART; order <= NUMOE_UP_FIRST; order++) {
        struct numoe_layer_weights w = source.weights;
        uint8_t *codes = NULL, *scales = NULL, *bias = NULL;

        if (order != NUMOE_GATE_UP_INTERLEAVED) {
            w.gate.codes = codes = reorder(w.gate.codes, HIDDEN / 2, order);
            w.gate.scales = scales = reorder(w.gate.scales, HIDDEN / 32, order);
            w.gate_bias = bias = reorder(w.gate_bias, 2, order);
        }
        if (order == NUMOE_GATE_UP_APART) {
            w.up = w.gate;
            w.up.codes += INTER * HIDDEN / 2;
            w.up.scales += INTER * HIDDEN / 32;
            w.up_stride = w.gate_stride;
            w.up_bias = bias + 2 * INTER;
            w.up_bias_stride = w.gate_bias_stride;
        }
        w.gate_up = order;
        cr_assert_eq(numoe_layer_load_from(given, 1, &w, &error), 0, "%s", error.message);
        for (e = 0; e < EXPERTS; e++)
            cr_assert_eq(sum_of(given, 1, e), sum_of(model, 1, e), "order %d expert %d", (int)order,
                         (int)e);
        cr_assert_eq(numoe_layer_unload(given, 1, &error), 0);
        free(codes);
        free(scales);
        free(bias);
    }
    free(source.file);
    numoe_model_destroy(given);
    numoe_model_destroy(model);
    numoe_close(context);
    files_drop(directory);
}

Test(layer_load, what_is_not_declared_is_refused, .timeout = 60)
{
    char *directory = write_model("gpt-oss-20b");
    struct numoe *context = open_context(NULL, 2);
    struct numoe_model *model = load_model(context, directory, false);
    struct source source = read_layer(directory, 0);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_layer_weights w = source.weights;
    uint8_t *scales;
    uint64_t sum = sum_of(model, 0, 1), last = sum_of(model, 0, 4);

    w.gate_up = 0;
    cr_expect_eq(numoe_layer_load_from(model, 0, &w, &error), -EINVAL);
    expect_text(error.message, "order 0 is not known");
    w = source.weights;
    w.bias_type = 7;
    cr_expect_eq(numoe_layer_load_from(model, 0, &w, &error), -EINVAL);
    w = source.weights;
    w.down_bias = NULL;
    cr_expect_eq(numoe_layer_load_from(model, 0, &w, &error), -EINVAL);
    expect_text(error.message, "expert 0: the model has biases");
    w = source.weights;
    w.down.codes = NULL;
    cr_expect_eq(numoe_layer_load_from(model, 0, &w, &error), -EINVAL);
    expect_text(error.message, "expert 0: codes or scales are NULL");
    cr_expect_eq(numoe_layer_load_from(model, 2, &source.weights, &error), -EINVAL);
    cr_expect_eq(numoe_layer_load_from(NULL, 0, &source.weights, &error), -EINVAL);
    cr_expect_eq(numoe_layer_load_from(model, 0, NULL, &error), -EINVAL);
    cr_expect_eq(numoe_layer_unload(model, 2, &error), -EINVAL);
    cr_expect_eq(sum_of(model, 0, 1), sum, "nothing was lost");
    /* NaN in expert 2: those before it are loaded, it is missing, those after it are as they were
     */
    w = source.weights;
    scales = malloc(EXPERTS * 2 * INTER * HIDDEN / 32);
    memcpy(scales, w.gate.scales, EXPERTS * 2 * INTER * HIDDEN / 32);
    scales[(2 * 2 * INTER + 7) * HIDDEN / 32 + 3] = 255;
    w.gate.scales = scales;
    cr_expect_eq(numoe_layer_load_from(model, 0, &w, &error), -EDOM);
    expect_text(error.where, "up");
    expect_text(error.message,
                "expert 2: layer 0, expert 2: scale byte 255 (NaN) in row 3, group 3");
    cr_expect_eq(numoe_expert_checksum(model, 0, 2, &sum), -ENOENT);
    cr_expect_eq(sum_of(model, 0, 4), last);
    free(scales);
    free(source.file);
    numoe_model_destroy(model);
    numoe_close(context);
    files_drop(directory);
}

/* One token for each expert. */
static void forward_all(struct numoe_model *model, uint64_t layer, float *out, uint64_t *missing)
{
    static float x[EXPERTS * HIDDEN], weights[EXPERTS];
    static int32_t ids[EXPERTS];
    struct numoe_batch batch = NUMOE_BATCH_INIT;
    struct numoe_result result = NUMOE_RESULT_INIT;
    unsigned i;

    for (i = 0; i < EXPERTS * HIDDEN; i++)
        x[i] = (float)((i * 7 + i / HIDDEN) % 13) - 6;
    for (i = 0; i < EXPERTS; i++) {
        ids[i] = (int32_t)i;
        weights[i] = 1;
    }
    batch.tokens = EXPERTS;
    batch.top_k = 1;
    batch.x = x;
    batch.x_type = batch.out_type = NUMOE_F32;
    batch.ids = ids;
    batch.weights = weights;
    batch.out = out;
    cr_assert_eq(numoe_forward(model, layer, &batch, &result, NULL), 0);
    *missing = result.missing;
}

Test(layer_load, a_layer_is_taken_out_and_put_back, .timeout = 60)
{
    static float before[EXPERTS * HIDDEN], after[EXPERTS * HIDDEN], other[EXPERTS * HIDDEN];
    char *directory = write_model("gpt-oss-20b");
    struct numoe *context = open_context(NULL, 2);
    struct numoe_model *model = load_model(context, directory, true);
    struct source source = read_layer(directory, 0);
    struct numoe_error error = NUMOE_ERROR_INIT;
    uint64_t missing, first, count, neighbour = sum_of(model, 1, 0);
    unsigned char resident;
    uintptr_t page;

    forward_all(model, 0, before, &missing);
    cr_assert_eq(missing, 0);
    page = ((uintptr_t)numoe_model_run(model, 0, 2, 0, &first, &count) + 4095) / 4096 * 4096;
    cr_assert_eq(mincore((void *)page, 4096, &resident), 0);
    cr_assert_eq(resident & 1, 1);
    cr_assert_eq(numoe_layer_unload(model, 0, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_layer_unload(model, 0, &error), 0, "again");
    cr_assert_eq(mincore((void *)page, 4096, &resident), 0);
    cr_expect_eq(resident & 1, 0, "its memory is the system's again");
    forward_all(model, 0, after, &missing);
    cr_expect_eq(missing, EXPERTS);
    cr_expect_eq(numoe_model_verify(model, &error), 0, "what is out is not looked at");
    cr_expect_eq(sum_of(model, 1, 0), neighbour);
    forward_all(model, 1, other, &missing);
    cr_expect_eq(missing, 0);
    cr_assert_eq(numoe_layer_load_from(model, 0, &source.weights, &error), 0, "%s", error.message);
    forward_all(model, 0, after, &missing);
    cr_expect_eq(missing, 0);
    cr_expect_arr_eq(before, after, sizeof before);
    cr_expect_eq(numoe_model_verify(model, &error), 0, "%s", error.message);
    free(source.file);
    numoe_model_destroy(model);
    numoe_close(context);
    files_drop(directory);
}

Test(layer_load, an_expert_is_replaced_between_submits, .timeout = 60)
{
    static float x[HIDDEN], out[HIDDEN], want[HIDDEN];
    char *directory = write_model("gpt-oss-20b");
    struct numoe *context = open_context(NULL, 2);
    struct numoe_model *model = load_model(context, directory, true);
    struct source source = read_layer(directory, 1);
    struct numoe_batch batch = NUMOE_BATCH_INIT;
    struct numoe_result result = NUMOE_RESULT_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_layer_weights swapped = source.weights;
    int32_t id = 0;
    float weight = 1;
    uint64_t ticket;
    unsigned i;

    for (i = 0; i < HIDDEN; i++)
        x[i] = (float)(i % 11) - 5;
    batch.tokens = batch.top_k = 1;
    batch.x = x;
    batch.x_type = batch.out_type = NUMOE_F32;
    batch.ids = &id;
    batch.weights = &weight;
    batch.out = out;
    /* Layer 0 computes while layer 1's expert 0 becomes what its expert 3 is. */
    swapped.gate.codes += 3 * swapped.gate_stride.codes;
    swapped.gate.scales += 3 * swapped.gate_stride.scales;
    swapped.down.codes += 3 * swapped.down_stride.codes;
    swapped.down.scales += 3 * swapped.down_stride.scales;
    swapped.gate_bias = (const uint8_t *)swapped.gate_bias + 3 * swapped.gate_bias_stride;
    swapped.down_bias = (const uint8_t *)swapped.down_bias + 3 * swapped.down_bias_stride;
    memset(&swapped.gate_stride, 0, sizeof swapped.gate_stride);
    memset(&swapped.down_stride, 0, sizeof swapped.down_stride);
    swapped.gate_bias_stride = swapped.down_bias_stride = 0;
    cr_assert_eq(numoe_submit(model, 0, &batch, &ticket, &error), 0);
    cr_assert_eq(numoe_layer_load_from(model, 1, &swapped, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_wait(model, ticket, &result), 0);
    cr_expect_eq(sum_of(model, 1, 0), sum_of(model, 1, 3));
    cr_expect_eq(numoe_model_verify(model, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_forward(model, 1, &batch, &result, &error), 0);
    id = 3;
    batch.out = want;
    cr_assert_eq(numoe_forward(model, 1, &batch, &result, &error), 0);
    cr_expect_arr_eq(out, want, sizeof want);
    free(source.file);
    numoe_model_destroy(model);
    numoe_close(context);
    files_drop(directory);
}

Test(layer_load, checksums_are_of_weights_and_not_of_plans, .timeout = 60)
{
    char *directory = write_model("gpt-oss-20b");
    struct numoe *one = open_context(NULL, 1),
                 *many = open_context("numa:4(memory=1GiB) core:1 pu:1", 4);
    struct numoe_model *a = load_model(one, directory, true),
                       *b = load_model(many, directory, true);
    struct numoe_model *plain = load_model(one, directory, false);
    struct numoe_error error = NUMOE_ERROR_INIT;
    uint64_t layer, e, first, count, sum;
    uint8_t *byte;

    for (layer = 0; layer < 2; layer++)
        for (e = 0; e < EXPERTS; e++) {
            cr_expect_eq(sum_of(a, layer, e), sum_of(b, layer, e));
            if (e)
                cr_expect_neq(sum_of(a, layer, e), sum_of(a, layer, e - 1));
        }
    cr_expect_eq(numoe_model_verify(a, &error), 0);
    cr_expect_eq(numoe_model_verify(b, &error), 0);
    cr_expect_eq(numoe_model_verify(plain, &error), -ENODATA);
    cr_expect_eq(numoe_model_verify(NULL, &error), -EINVAL);
    cr_expect_eq(numoe_expert_checksum(a, 2, 0, &sum), -EINVAL);
    cr_expect_eq(numoe_expert_checksum(a, 0, EXPERTS, &sum), -EINVAL);
    /* One bit of a slice on the last node, and of a bias. */
    byte = (uint8_t *)(uintptr_t)numoe_model_run(b, 1, 3, 3, &first, &count) + 77;
    *byte ^= 4;
    cr_expect_eq(numoe_model_verify(b, &error), -EIO);
    expect_text(error.message, "layer 1, expert 3 is not what was loaded");
    *byte ^= 4;
    cr_expect_eq(numoe_model_verify(b, &error), 0);
    byte = (uint8_t *)(uintptr_t)numoe_model_down_bias(a, 0, 2);
    *byte ^= 1;
    cr_expect_eq(numoe_model_verify(a, &error), -EIO);
    expect_text(error.message, "layer 0, expert 2");
    numoe_model_destroy(a);
    numoe_model_destroy(plain);
    numoe_model_destroy(b);
    numoe_close(one);
    numoe_close(many);
    files_drop(directory);
}
