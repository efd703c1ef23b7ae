/* numoe against torch: the golden checkpoints of tests/oracle, through files and through memory. */
#include "runtime/oracle_help.h"

#include <stdio.h>

#define ORACLE NUMOE_TEST_DATA "/oracle/"

/* ---- the manifest ---------------------------------------------------------------------------- */

/* The value of key in the line of a set. */
static uint64_t set_number(const char *set, const char *key)
{
    FILE *file = fopen(ORACLE "manifest.txt", "r");
    char line[512], name[128], pattern[64];
    unsigned long long value = UINT64_MAX;

    cr_assert_not_null(file, "no " ORACLE "manifest.txt");
    snprintf(pattern, sizeof pattern, " %s ", key);
    while (fgets(line, sizeof line, file)) {
        const char *found;

        if (sscanf(line, "set %127s", name) != 1 || strcmp(name, set))
            continue;
        found = strstr(line, pattern);
        if (found)
            sscanf(found + strlen(pattern), "%llu", &value);
    }
    fclose(file);
    cr_assert_neq(value, UINT64_MAX, "manifest has no %s of %s", key, set);
    return value;
}

/* The bytes of "set.name"; free them. want_bytes: what the caller will index, checked. */
static void *set_data(const char *set, const char *name, uint64_t want_bytes)
{
    FILE *file = fopen(ORACLE "manifest.txt", "r");
    char line[512], want[256], have[256], path[256], full[1024];
    unsigned long long offset, bytes;
    bool found = false;
    void *data;

    cr_assert_not_null(file, "no " ORACLE "manifest.txt");
    snprintf(want, sizeof want, "%s.%s", set, name);
    while (!found && fgets(line, sizeof line, file))
        found = sscanf(line, "data %255s %255s %llu %llu", have, path, &offset, &bytes) == 4 &&
                !strcmp(have, want);
    fclose(file);
    cr_assert(found, "manifest has no %s", want);
    cr_assert_eq(bytes, want_bytes, "%s has %llu bytes, not %llu", want, bytes,
                 (unsigned long long)want_bytes);
    snprintf(full, sizeof full, ORACLE "%s", path);
    file = fopen(full, "rb");
    cr_assert_not_null(file, "cannot open %s", full);
    data = must_calloc(bytes, 1);
    cr_assert_eq(fseek(file, (long)offset, SEEK_SET), 0);
    cr_assert_eq(fread(data, 1, bytes, file), bytes, "%s is short", full);
    fclose(file);
    return data;
}

/* Sizes and inputs of a set. */
struct golden {
    const char *set;
    uint64_t hidden, intermediate, layers, experts, top_k, tokens;
    uint32_t id_bytes;
    uint16_t *x;
    uint8_t *ids;
    float *weights;
};

static struct golden golden_open(const char *set)
{
    struct golden golden = {.set = set};

    golden.hidden = set_number(set, "hidden");
    golden.intermediate = set_number(set, "intermediate");
    golden.layers = set_number(set, "layers");
    golden.experts = set_number(set, "experts");
    golden.top_k = set_number(set, "top_k");
    golden.tokens = set_number(set, "tokens");
    golden.id_bytes = (uint32_t)set_number(set, "id_bytes");
    golden.x = set_data(set, "x", golden.tokens * golden.hidden * 2);
    golden.ids = set_data(set, "ids", golden.tokens * golden.top_k * golden.id_bytes);
    golden.weights = set_data(set, "weights", golden.tokens * golden.top_k * 4);
    return golden;
}

static void golden_close(struct golden *golden)
{
    free(golden->x);
    free(golden->ids);
    free(golden->weights);
}

static float *golden_output(const struct golden *golden, uint64_t layer, const char *activation)
{
    char name[64];

    snprintf(name, sizeof name, "y.%llu.%s", (unsigned long long)layer, activation);
    return set_data(golden->set, name, golden->tokens * golden->hidden * 4);
}

static int64_t golden_id(const struct golden *golden, uint64_t entry)
{
    int32_t narrow;
    int64_t wide;

    if (golden->id_bytes == 4) {
        memcpy(&narrow, golden->ids + 4 * entry, 4);
        return narrow;
    }
    memcpy(&wide, golden->ids + 8 * entry, 8);
    return wide;
}

/* Tokens first .. first + count - 1 of a set as a batch into out. */
static struct numoe_batch golden_batch(const struct golden *golden, uint64_t first, uint64_t count,
                                       float *out)
{
    struct numoe_batch batch = NUMOE_BATCH_INIT;

    batch.tokens = count;
    batch.top_k = golden->top_k;
    batch.x = golden->x + first * golden->hidden;
    batch.x_type = NUMOE_BF16;
    batch.ids = golden->ids + first * golden->top_k * golden->id_bytes;
    batch.id_bytes = golden->id_bytes;
    batch.weights = golden->weights + first * golden->top_k;
    batch.out = out + first * golden->hidden;
    batch.out_type = NUMOE_F32;
    return batch;
}

static void expect_counts(const struct golden *golden, const struct numoe_result *result,
                          uint64_t expert_bytes)
{
    uint64_t pairs = 0, hit = 0;
    uint8_t *seen = must_calloc(golden->experts, 1);

    for (uint64_t i = 0; i < golden->tokens * golden->top_k; i++) {
        int64_t id = golden_id(golden, i);

        if (id < 0)
            continue;
        pairs++;
        hit += !seen[id];
        seen[id] = 1;
    }
    free(seen);
    cr_expect_eq(result->pairs, pairs);
    cr_expect_eq(result->experts_hit, hit);
    cr_expect_eq(result->skipped, 0);
    cr_expect_eq(result->missing, 0);
    cr_expect_eq(result->expert_bytes, hit * expert_bytes);
}

/* Run a set whole, and in pieces of 5 and of 1 (the few-token forms), and compare each with torch:
 * all tokens together within the limit, no single token far out, empty rows zero. */
static void compare_with_torch(struct numoe_model *model, const struct golden *golden,
                               uint64_t layer, const char *activation,
                               enum numoe_arithmetic arithmetic)
{
    const uint64_t pieces[] = {golden->tokens, 5, 1};
    float *want = golden_output(golden, layer, activation);
    float *out = must_calloc(golden->tokens * golden->hidden, sizeof *out);
    struct numoe_model_info info = {.size = sizeof info};

    cr_assert_eq(numoe_model_info(model, &info), 0);
    for (size_t p = 0; p < 3; p++) {
        double distance;

        memset(out, 0x7F, golden->tokens * golden->hidden * sizeof *out);
        for (uint64_t first = 0; first < golden->tokens; first += pieces[p]) {
            uint64_t left = golden->tokens - first;
            uint64_t count = left < pieces[p] ? left : pieces[p];
            struct numoe_batch batch = golden_batch(golden, first, count, out);
            struct numoe_result result = NUMOE_RESULT_INIT;

            run_ok(model, layer, &batch, &result);
            if (count == golden->tokens)
                expect_counts(golden, &result, info.expert_bytes);
        }
        distance = relative_l2(out, want, golden->tokens * golden->hidden);
        cr_expect(distance <= limit_of(arithmetic),
                  "%s layer %d %s, %s, pieces of %d: relative L2 to torch %.3e, limit %.2e",
                  golden->set, (int)layer, activation, info.kernels, (int)pieces[p], distance,
                  limit_of(arithmetic));
        for (uint64_t t = 0; t < golden->tokens; t++) {
            /* One token is a small sample: ideal int8 reaches 1.9e-2 on the worst here. */
            distance =
                relative_l2(out + t * golden->hidden, want + t * golden->hidden, golden->hidden);
            cr_expect(distance <= 2.5 * limit_of(arithmetic),
                      "%s layer %d %s, %s, pieces of %d, token %d: relative L2 to torch %.3e",
                      golden->set, (int)layer, activation, info.kernels, (int)pieces[p], (int)t,
                      distance);
        }
    }
    free(want);
    free(out);
}

/* ---- V4 from files --------------------------------------------------------------------------- */

static struct numoe_model *load_checkpoint(struct numoe *context, const char *set,
                                           enum numoe_arithmetic arithmetic)
{
    struct numoe_load_options options = NUMOE_LOAD_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *model = NULL;
    char directory[512];
    int rc;

    options.arithmetic = arithmetic;
    snprintf(directory, sizeof directory, ORACLE "%s", set);
    rc = numoe_model_load(context, directory, &options, &model, &error);
    cr_assert_eq(rc, 0, "numoe_model_load(%s): %d %s: %s", directory, rc, error.where,
                 error.message);
    return model;
}

TEST_EACH_ISA(golden_v4, loaded_checkpoint_agrees_with_torch)
{
    const char *sets[] = {"v4_96x64", "v4_128x96"};
    struct numoe *context = open_on(isa, NULL, 0);

    for (size_t s = 0; s < 2; s++) {
        struct golden golden = golden_open(sets[s]);

        for (size_t a = 0; a < 2; a++) {
            struct numoe_model *model = load_checkpoint(context, sets[s], both_arithmetics[a]);

            for (uint64_t layer = 0; layer < golden.layers; layer++)
                compare_with_torch(model, &golden, layer, "silu_clamped", both_arithmetics[a]);
            numoe_model_destroy(model);
        }
        golden_close(&golden);
    }
    numoe_close(context);
}

/* Fewer slices an expert than nodes, and workers stealing at random. */
Test(golden_v4, checkpoint_spread_over_8_and_32_nodes_agrees_with_torch, .timeout = 120)
{
    const char *topologies[] = {"numa:8(memory=1GB) core:2 pu:1",
                                "pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2"};

    for (size_t i = 0; i < 2; i++) {
        struct numoe_options options = NUMOE_OPTIONS_INIT;
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe *context = NULL;
        struct golden golden = golden_open("v4_96x64");

        options.topology = topologies[i];
        options.workers = 5;
        options.chaos_seed = 4242;
        cr_assert_eq(numoe_open(&options, &context, &error), 0, "%s: %s", error.where,
                     error.message);
        for (size_t a = 0; a < 2; a++) {
            struct numoe_model *model = load_checkpoint(context, golden.set, both_arithmetics[a]);

            for (uint64_t layer = 0; layer < golden.layers; layer++)
                compare_with_torch(model, &golden, layer, "silu_clamped", both_arithmetics[a]);
            numoe_model_destroy(model);
        }
        golden_close(&golden);
        numoe_close(context);
    }
}

Test(golden_v4, description_comes_from_the_files, .timeout = 60)
{
    const char *sets[] = {"v4_96x64", "v4_128x96"};
    struct numoe *context = open_on(NULL, NULL, 0);

    for (size_t s = 0; s < 2; s++) {
        struct golden golden = golden_open(sets[s]);
        struct numoe_model *model = load_checkpoint(context, sets[s], NUMOE_FAST);
        struct numoe_model_info info = {.size = sizeof info};

        cr_assert_eq(numoe_model_info(model, &info), 0);
        /* The draft layer of v4_128x96 is not one of the model's. */
        cr_expect_eq(info.desc.layers, golden.layers);
        cr_expect_eq(info.desc.experts, golden.experts);
        cr_expect_eq(info.desc.experts_per_token, golden.top_k);
        cr_expect_eq(info.desc.hidden, golden.hidden);
        cr_expect_eq(info.desc.intermediate, golden.intermediate);
        cr_expect_eq(info.desc.format, NUMOE_MXFP4);
        cr_expect_eq(info.desc.arithmetic, NUMOE_FAST);
        cr_expect_eq(info.desc.activation.kind, NUMOE_SILU_CLAMPED);
        cr_expect_eq(info.desc.activation.limit, 10.0f);
        cr_expect(!info.desc.bias);
        cr_expect_str_eq(info.family, "deepseek-v4");
        cr_expect_eq(info.checkpoint_bytes, golden.layers * golden.experts * 3 * golden.hidden *
                                                golden.intermediate * 17 / 32);
        numoe_model_destroy(model);
        golden_close(&golden);
    }
    numoe_close(context);
}

/* ---- experts from memory --------------------------------------------------------------------- */

static const struct {
    const char *name;
    struct numoe_activation activation;
} all_activations[] = {
    {"silu", {.kind = NUMOE_SILU}},
    {"silu_clamped", {.kind = NUMOE_SILU_CLAMPED, .limit = 10}},
    {"swiglu_oai", {.kind = NUMOE_SWIGLU_OAI, .limit = 7, .alpha = 1.702f}},
    {"situ", {.kind = NUMOE_SITU, .gate_cap = 4, .up_cap = 25}},
};

static struct numoe_model *create_golden(struct numoe *context, const struct golden *golden,
                                         bool bias, struct numoe_activation activation,
                                         enum numoe_arithmetic arithmetic)
{
    struct numoe_model_desc desc = NUMOE_MODEL_DESC_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *model = NULL;
    int rc;

    desc.layers = golden->layers;
    desc.experts = golden->experts;
    desc.experts_per_token = golden->top_k;
    desc.hidden = golden->hidden;
    desc.intermediate = golden->intermediate;
    desc.bias = bias;
    desc.activation = activation;
    desc.arithmetic = arithmetic;
    rc = numoe_model_create(context, &desc, &model, &error);
    cr_assert_eq(rc, 0, "numoe_model_create: %d %s: %s", rc, error.where, error.message);
    return model;
}

/* Matrix "<stem>.<w>" of rows x columns as separate tensors; the two blocks are the caller's. */
static struct numoe_mxfp4 separate_matrix(const char *set, const char *stem, const char *w,
                                          uint64_t rows, uint64_t columns, void **codes,
                                          void **scales)
{
    char name[128];

    snprintf(name, sizeof name, "%s.%s.weight", stem, w);
    *codes = set_data(set, name, rows * columns / 2);
    snprintf(name, sizeof name, "%s.%s.scale", stem, w);
    *scales = set_data(set, name, rows * columns / 32);
    return (struct numoe_mxfp4){
        .codes = *codes,
        .scales = *scales,
        .code_stride = columns / 2,
        .scale_stride = columns / 32,
        .code_step = 16,
        .scale_step = 1,
        .nibbles = NUMOE_NIBBLES_ADJACENT,
    };
}

static void load_separate(struct numoe_model *model, const struct golden *golden,
                          const char *prefix, uint64_t layer, uint64_t expert)
{
    struct numoe_expert_weights weights = {.size = sizeof weights};
    struct numoe_error error = NUMOE_ERROR_INIT;
    char stem[96];
    void *blocks[6];
    int rc;

    snprintf(stem, sizeof stem, "%sexperts.%llu", prefix, (unsigned long long)expert);
    weights.gate = separate_matrix(golden->set, stem, "w1", golden->intermediate, golden->hidden,
                                   &blocks[0], &blocks[1]);
    weights.up = separate_matrix(golden->set, stem, "w3", golden->intermediate, golden->hidden,
                                 &blocks[2], &blocks[3]);
    weights.down = separate_matrix(golden->set, stem, "w2", golden->hidden, golden->intermediate,
                                   &blocks[4], &blocks[5]);
    rc = numoe_expert_load(model, layer, expert, &weights, &error);
    cr_assert_eq(rc, 0, "numoe_expert_load: %d %s: %s", rc, error.where, error.message);
    for (int i = 0; i < 6; i++)
        free(blocks[i]);
}

static void load_v4_from_memory(struct numoe_model *model, const struct golden *golden)
{
    char prefix[64];

    for (uint64_t layer = 0; layer < golden->layers; layer++) {
        snprintf(prefix, sizeof prefix, "layers.%llu.ffn.", (unsigned long long)layer);
        for (uint64_t expert = 0; expert < golden->experts; expert++)
            load_separate(model, golden, prefix, layer, expert);
    }
}

TEST_EACH_ISA(golden_v4, every_activation_agrees_with_torch)
{
    struct numoe *context = open_on(isa, NULL, 0);
    struct golden golden = golden_open("v4_96x64");

    for (size_t k = 0; k < 4; k++) {
        for (size_t a = 0; a < 2; a++) {
            struct numoe_model *model = create_golden(
                context, &golden, false, all_activations[k].activation, both_arithmetics[a]);

            load_v4_from_memory(model, &golden);
            compare_with_torch(model, &golden, 0, all_activations[k].name, both_arithmetics[a]);
            numoe_model_destroy(model);
        }
    }
    golden_close(&golden);
    numoe_close(context);
}

Test(golden_v4, files_and_memory_give_the_same_bits, .timeout = 60)
{
    struct numoe *context = open_on(NULL, NULL, 0);
    struct golden golden = golden_open("v4_96x64");
    size_t count = golden.tokens * golden.hidden;
    float *from_files = must_calloc(count, sizeof(float));
    float *from_memory = must_calloc(count, sizeof(float));

    for (size_t a = 0; a < 2; a++) {
        struct numoe_model *loaded = load_checkpoint(context, golden.set, both_arithmetics[a]);
        struct numoe_model *given = create_golden(
            context, &golden, false, all_activations[1].activation, both_arithmetics[a]);

        load_v4_from_memory(given, &golden);
        for (uint64_t layer = 0; layer < golden.layers; layer++) {
            struct numoe_batch batch = golden_batch(&golden, 0, golden.tokens, from_files);

            run_ok(loaded, layer, &batch, NULL);
            batch.out = from_memory;
            run_ok(given, layer, &batch, NULL);
            cr_expect_arr_eq(from_files, from_memory, count * sizeof(float), "%s, layer %d",
                             name_of(both_arithmetics[a]), (int)layer);
        }
        numoe_model_destroy(loaded);
        numoe_model_destroy(given);
    }
    free(from_files);
    free(from_memory);
    golden_close(&golden);
    numoe_close(context);
}

/* ---- GPT-OSS from memory --------------------------------------------------------------------- */

struct gptoss {
    uint8_t *gate_up_codes, *gate_up_scales, *down_codes, *down_scales;
    float *gate_up_bias, *down_bias;
};

static float *bf16_data(const char *set, const char *name, uint64_t count)
{
    uint16_t *raw = set_data(set, name, count * 2);
    float *values = must_calloc(count, sizeof *values);

    for (uint64_t i = 0; i < count; i++)
        values[i] = bf16_float(raw[i]);
    free(raw);
    return values;
}

static struct gptoss gptoss_open(const struct golden *g)
{
#define STEM "model.layers.0.mlp.experts."
    uint64_t gate_up = g->experts * 2 * g->intermediate, down = g->experts * g->hidden;

    return (struct gptoss){
        .gate_up_codes = set_data(g->set, STEM "gate_up_proj_blocks", gate_up * g->hidden / 2),
        .gate_up_scales = set_data(g->set, STEM "gate_up_proj_scales", gate_up * g->hidden / 32),
        .down_codes = set_data(g->set, STEM "down_proj_blocks", down * g->intermediate / 2),
        .down_scales = set_data(g->set, STEM "down_proj_scales", down * g->intermediate / 32),
        .gate_up_bias = bf16_data(g->set, STEM "gate_up_proj_bias", gate_up),
        .down_bias = bf16_data(g->set, STEM "down_proj_bias", down),
    };
#undef STEM
}

static void gptoss_close(struct gptoss *gptoss)
{
    free(gptoss->gate_up_codes);
    free(gptoss->gate_up_scales);
    free(gptoss->down_codes);
    free(gptoss->down_scales);
    free(gptoss->gate_up_bias);
    free(gptoss->down_bias);
}

/* Gate rows are the even ones, up rows the odd ones: strides of two rows, up one row further. */
static void load_gptoss(struct numoe_model *model, const struct golden *g,
                        const struct gptoss *files, uint64_t expert)
{
    uint64_t row = g->hidden / 2, scale_row = g->hidden / 32;
    uint64_t down_row = g->intermediate / 2, down_scale_row = g->intermediate / 32;
    const uint8_t *codes = files->gate_up_codes + expert * 2 * g->intermediate * row;
    const uint8_t *scales = files->gate_up_scales + expert * 2 * g->intermediate * scale_row;
    const float *bias = files->gate_up_bias + expert * 2 * g->intermediate;
    struct numoe_expert_weights weights = {.size = sizeof weights};
    struct numoe_error error = NUMOE_ERROR_INIT;
    int rc;

    weights.gate = (struct numoe_mxfp4){.codes = codes,
                                        .scales = scales,
                                        .code_stride = 2 * row,
                                        .scale_stride = 2 * scale_row,
                                        .code_step = 16,
                                        .scale_step = 1,
                                        .nibbles = NUMOE_NIBBLES_ADJACENT};
    weights.up = weights.gate;
    weights.up.codes += row;
    weights.up.scales += scale_row;
    weights.down = weights.gate;
    weights.down.codes = files->down_codes + expert * g->hidden * down_row;
    weights.down.scales = files->down_scales + expert * g->hidden * down_scale_row;
    weights.down.code_stride = down_row;
    weights.down.scale_stride = down_scale_row;
    weights.gate_bias = bias;
    weights.up_bias = bias + 1;
    weights.bias_step = 2;
    weights.down_bias = files->down_bias + expert * g->hidden;
    rc = numoe_expert_load(model, 0, expert, &weights, &error);
    cr_assert_eq(rc, 0, "numoe_expert_load: %d %s: %s", rc, error.where, error.message);
}

TEST_EACH_ISA(golden_gptoss, interleaved_rows_and_biases_agree_with_torch)
{
    struct numoe *context = open_on(isa, NULL, 0);
    struct golden golden = golden_open("gptoss_64x96");
    struct gptoss files = gptoss_open(&golden);

    for (size_t k = 0; k < 4; k++) {
        for (size_t a = 0; a < 2; a++) {
            struct numoe_model *model = create_golden(
                context, &golden, true, all_activations[k].activation, both_arithmetics[a]);

            for (uint64_t expert = 0; expert < golden.experts; expert++)
                load_gptoss(model, &golden, &files, expert);
            compare_with_torch(model, &golden, 0, all_activations[k].name, both_arithmetics[a]);
            numoe_model_destroy(model);
        }
    }
    gptoss_close(&files);
    golden_close(&golden);
    numoe_close(context);
}

Test(golden_gptoss, files_agree_with_torch, .timeout = 60)
{
    struct numoe *context = open_on(NULL, NULL, 0);
    struct golden golden = golden_open("gptoss_64x96");

    for (size_t a = 0; a < 2; a++) {
        struct numoe_model *model = load_checkpoint(context, golden.set, both_arithmetics[a]);

        compare_with_torch(model, &golden, 0, "swiglu_oai", both_arithmetics[a]);
        numoe_model_destroy(model);
    }
    golden_close(&golden);
    numoe_close(context);
}

/* ---- the ends of E8M0 ------------------------------------------------------------------------ */

TEST_EACH_ISA(golden_extreme, scale_bytes_at_both_ends_agree_with_torch)
{
    struct numoe *context = open_on(isa, NULL, 0);
    struct golden golden = golden_open("extreme_64x64");
    float *want = golden_output(&golden, 0, "silu");
    float *out = must_calloc(golden.tokens * golden.hidden, sizeof *out);
    float *mine = must_calloc(golden.tokens * golden.hidden, sizeof *mine);
    float *theirs = must_calloc(golden.tokens * golden.hidden, sizeof *theirs);

    for (size_t a = 0; a < 2; a++) {
        enum numoe_arithmetic arithmetic = both_arithmetics[a];
        struct numoe_model *model =
            create_golden(context, &golden, false, all_activations[0].activation, arithmetic);
        /* Eight tokens an expert are a small sample: ideal int8 is at 1.45e-2 on the worst. */
        double limit = arithmetic == NUMOE_FAST ? 1.7e-2 : EXACT_LIMIT;

        for (uint64_t expert = 0; expert < golden.experts; expert++)
            load_separate(model, &golden, "", 0, expert);
        for (int whole = 0; whole < 2; whole++) {
            uint64_t step = whole ? golden.tokens : 1;

            for (uint64_t t = 0; t < golden.tokens; t += step) {
                struct numoe_batch batch = golden_batch(&golden, t, step, out);

                run_ok(model, 0, &batch, NULL);
            }
            /* Sizes differ by 2^130 from expert to expert: each is judged by itself. */
            for (uint64_t expert = 0; expert < golden.experts; expert++) {
                size_t count = 0;
                float scale = 0;
                double distance;

                for (uint64_t t = expert; t < golden.tokens; t += golden.experts)
                    for (uint64_t i = 0; i < golden.hidden; i++, count++) {
                        mine[count] = out[t * golden.hidden + i];
                        theirs[count] = want[t * golden.hidden + i];
                        scale = fmaxf(scale, fabsf(theirs[count]));
                    }
                distance = relative_l2(mine, theirs, count);
                cr_expect(scale > 0 && distance <= limit,
                          "%s %s expert %d, %s: relative L2 to torch %.3e, limit %.2e", isa,
                          name_of(arithmetic), (int)expert,
                          whole ? "all tokens at once" : "one token at a time", distance, limit);
            }
        }
        numoe_model_destroy(model);
    }
    free(want);
    free(out);
    free(mine);
    free(theirs);
    golden_close(&golden);
    numoe_close(context);
}

/* ---- forms of a call: the same numbers another way ------------------------------------------- */

/* A loaded golden model and its outputs, which the other forms must reproduce bit for bit. */
struct forms {
    struct numoe *context;
    struct numoe_model *model;
    struct golden golden;
    size_t count;
    float *plain; /* what the plain call gave */
    float *out;
};

static struct forms forms_open(const char *isa, enum numoe_arithmetic arithmetic)
{
    struct forms forms = {.context = open_on(isa, NULL, 0), .golden = golden_open("v4_96x64")};
    struct numoe_batch batch;

    forms.model = load_checkpoint(forms.context, "v4_96x64", arithmetic);
    forms.count = forms.golden.tokens * forms.golden.hidden;
    forms.plain = must_calloc(forms.count, sizeof(float));
    forms.out = must_calloc(forms.count, sizeof(float));
    batch = golden_batch(&forms.golden, 0, forms.golden.tokens, forms.plain);
    run_ok(forms.model, 0, &batch, NULL);
    return forms;
}

static void forms_close(struct forms *forms)
{
    numoe_model_destroy(forms->model);
    numoe_close(forms->context);
    golden_close(&forms->golden);
    free(forms->plain);
    free(forms->out);
}

TEST_EACH_ISA(golden_forms, id_width_x_type_strides_and_submit_change_no_bit)
{
    for (size_t a = 0; a < 2; a++) {
        struct forms f = forms_open(isa, both_arithmetics[a]);
        struct golden *g = &f.golden;
        struct numoe_batch batch = golden_batch(g, 0, g->tokens, f.out);
        int32_t *narrow = must_calloc(g->tokens * g->top_k, sizeof *narrow);
        uint64_t stride = g->hidden + 17;
        float *wide_x = must_calloc(g->tokens * stride, sizeof *wide_x);
        float *wide_out = must_calloc(g->tokens * stride, sizeof *wide_out);
        uint64_t ticket = 0;
        struct numoe_result result = NUMOE_RESULT_INIT;
        struct numoe_error error = NUMOE_ERROR_INIT;

        cr_assert_eq(g->id_bytes, 8);
        for (uint64_t i = 0; i < g->tokens * g->top_k; i++)
            narrow[i] = (int32_t)golden_id(g, i);
        batch.ids = narrow;
        batch.id_bytes = 4;
        run_ok(f.model, 0, &batch, NULL);
        cr_expect_arr_eq(f.out, f.plain, f.count * 4, "%s: int32 ids", isa);

        /* Gaps between the rows hold NaN on the way in and a mark on the way out. */
        for (uint64_t t = 0; t < g->tokens; t++)
            for (uint64_t i = 0; i < stride; i++) {
                wide_x[t * stride + i] = i < g->hidden ? bf16_float(g->x[t * g->hidden + i]) : NAN;
                wide_out[t * stride + i] = 12345;
            }
        batch.x = wide_x;
        batch.x_type = NUMOE_F32;
        batch.x_stride = stride;
        batch.out = wide_out;
        batch.out_stride = stride;
        run_ok(f.model, 0, &batch, NULL);
        for (uint64_t t = 0; t < g->tokens; t++) {
            cr_expect_arr_eq(wide_out + t * stride, f.plain + t * g->hidden, g->hidden * 4,
                             "%s: strided f32, token %d", isa, (int)t);
            for (uint64_t i = g->hidden; i < stride; i++)
                cr_expect_eq(wide_out[t * stride + i], 12345, "written past row %d", (int)t);
        }

        batch = golden_batch(g, 0, g->tokens, f.out);
        memset(f.out, 0x7F, f.count * 4);
        cr_assert_eq(numoe_submit(f.model, 0, &batch, &ticket, &error), 0, "%s", error.message);
        cr_assert_eq(numoe_wait(f.model, ticket, &result), 0);
        cr_expect_arr_eq(f.out, f.plain, f.count * 4, "%s: submit and wait", isa);
        cr_expect_gt(result.pairs, 0);
        cr_expect_eq(numoe_wait(f.model, ticket, NULL), -EINVAL, "a ticket is good once");
        free(narrow);
        free(wide_x);
        free(wide_out);
        forms_close(&f);
    }
}

TEST_EACH_ISA(golden_forms, bf16_out_is_the_f32_sum_rounded_once)
{
    for (size_t a = 0; a < 2; a++) {
        struct forms f = forms_open(isa, both_arithmetics[a]);
        struct numoe_batch batch = golden_batch(&f.golden, 0, f.golden.tokens, f.out);
        uint16_t *half = must_calloc(f.count, sizeof *half);

        batch.out = half;
        batch.out_type = NUMOE_BF16;
        run_ok(f.model, 0, &batch, NULL);
        for (size_t i = 0; i < f.count; i++)
            cr_assert_eq(half[i], float_bf16(f.plain[i]), "%s %s: element %zu of %a is %04x", isa,
                         name_of(both_arithmetics[a]), i, (double)f.plain[i], half[i]);
        /* Adding to bf16: the old value joins the f32 sum, then one rounding. */
        for (size_t i = 0; i < f.count; i++)
            half[i] = float_bf16((float)(i % 7) - 3.0f);
        batch.add = true;
        run_ok(f.model, 0, &batch, NULL);
        for (size_t i = 0; i < f.count; i++)
            cr_assert_eq(half[i], float_bf16(f.plain[i] + ((float)(i % 7) - 3.0f)),
                         "%s %s: added element %zu", isa, name_of(both_arithmetics[a]), i);
        free(half);
        forms_close(&f);
    }
}

TEST_EACH_ISA(golden_forms, add_and_scale)
{
    for (size_t a = 0; a < 2; a++) {
        struct forms f = forms_open(isa, both_arithmetics[a]);
        struct numoe_batch batch = golden_batch(&f.golden, 0, f.golden.tokens, f.out);

        for (size_t i = 0; i < f.count; i++)
            f.out[i] = (float)(i % 11) * 0.37f;
        batch.add = true;
        run_ok(f.model, 0, &batch, NULL);
        for (size_t i = 0; i < f.count; i++) {
            float want = f.plain[i] + (float)(i % 11) * 0.37f;

            cr_assert_eq(f.out[i], want, "%s: element %zu", isa, i);
        }
        batch.add = false;
        batch.scale = -2;
        run_ok(f.model, 0, &batch, NULL);
        for (size_t i = 0; i < f.count; i++)
            cr_assert_eq(f.out[i], -2 * f.plain[i], "%s: scaled element %zu", isa, i);
        forms_close(&f);
    }
}

/* A layer shared by two holders: the experts elsewhere are skipped, and the two parts add up. */
TEST_EACH_ISA(golden_forms, experts_held_elsewhere_and_the_rest_add_up)
{
    for (size_t a = 0; a < 2; a++) {
        struct forms f = forms_open(isa, both_arithmetics[a]);
        struct numoe_batch batch = golden_batch(&f.golden, 0, f.golden.tokens, f.out);
        uint8_t elsewhere[6] = {1, 0, 0, 1, 0, 1};
        struct numoe_result first = NUMOE_RESULT_INIT, second = NUMOE_RESULT_INIT,
                            all = NUMOE_RESULT_INIT;

        cr_assert_eq(f.golden.experts, 6);
        run_ok(f.model, 0, &batch, &all);
        batch.elsewhere = elsewhere;
        run_ok(f.model, 0, &batch, &first);
        cr_expect_gt(relative_l2(f.out, f.plain, f.count), 0.1, "the mask is not used");
        for (int e = 0; e < 6; e++)
            elsewhere[e] = !elsewhere[e];
        batch.add = true;
        run_ok(f.model, 0, &batch, &second);
        cr_expect_lt(relative_l2(f.out, f.plain, f.count), 1e-6);
        cr_expect_eq(first.pairs + second.pairs, all.pairs);
        cr_expect_eq(first.experts_hit + second.experts_hit, all.experts_hit);
        cr_expect_eq(first.skipped + second.skipped + first.missing + second.missing, 0);
        forms_close(&f);
    }
}
