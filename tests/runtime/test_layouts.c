/* One model's weights as different files hold them: they load to the same bytes, and what is wrong
 * in any of them is named. */
#include "checkpoint.h"
#include "model.h"
#include "safetensors.h"
#include "synth.h"

#include "loader_files.h"

static struct numoe_synth_options options_of(const char *model, enum numoe_synth_layout layout)
{
    struct numoe_synth_options options = NUMOE_SYNTH_OPTIONS_INIT;

    options.model = model;
    options.layers = 2;
    options.experts = 3;
    options.hidden = 96; /* an odd number of tiles */
    options.intermediate = 160;
    options.seed = 5;
    options.layout = layout;
    return options;
}

static char *write_model(const struct numoe_synth_options *options)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    char *directory = files_dir();

    cr_assert_eq(numoe_synth_write(directory, options, &error), 0, "%s: %s", error.where,
                 error.message);
    return directory;
}

/* A loaded model with its context. */
struct loaded {
    struct numoe *context;
    struct numoe_model *model;
    struct numoe_model_info info;
};

/* What both ways of reading placed. */
static void expect_equal_sums(const struct numoe_model *a, const struct numoe_model *b)
{
    struct numoe_model_info info = {.size = sizeof info};

    cr_assert_eq(numoe_model_info(a, &info), 0);
    for (uint64_t q = 0; q < info.desc.layers * info.desc.experts; q++) {
        const uint64_t layer = q / info.desc.experts, expert = q % info.desc.experts;
        uint64_t sums[2] = {0, 0};

        /* -ENOENT of one that is held elsewhere */
        cr_assert_eq(numoe_expert_checksum(a, layer, expert, &sums[0]),
                     numoe_expert_checksum(b, layer, expert, &sums[1]));
        cr_assert_eq(sums[0], sums[1], "layer %llu expert %llu", (unsigned long long)layer,
                     (unsigned long long)expert);
    }
}

static int try_load(const char *path, const struct numoe_load_options *load, struct loaded *out,
                    struct numoe_error *error)
{
    struct numoe_load_options way = NUMOE_LOAD_OPTIONS_INIT;
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_model *plain = NULL;
    int code;

    options.workers = 2;
    if (load)
        way = *load;
    *out = (struct loaded){.info = {.size = sizeof out->info}};
    cr_assert_eq(numoe_open(&options, &out->context, error), 0, "%s", error->message);
    way.read = NUMOE_READ_CACHED;
    code = numoe_model_load(out->context, path, &way, &plain, error);
    way.read = NUMOE_READ_DISK;
    cr_assert_eq(numoe_model_load(out->context, path, &way, &out->model, error), code);
    if (code == 0) {
        numoe_model_info(out->model, &out->info);
        expect_equal_sums(plain, out->model);
        numoe_model_destroy(plain);
    }
    return code;
}

static struct loaded load_model(const char *path, const struct numoe_load_options *load)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct loaded out;

    cr_assert_eq(try_load(path, load, &out, &error), 0, "%s: %s", error.where, error.message);
    return out;
}

static void drop_model(struct loaded *loaded)
{
    numoe_model_destroy(loaded->model);
    numoe_close(loaded->context);
}

/* Loading is refused, with these words. */
static void expect_refused(const char *path, const struct numoe_load_options *load, int code,
                           const char *words)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct loaded out;
    int before = files_open_now(), got = try_load(path, load, &out, &error);

    cr_expect_eq(got, code, "%d, not %d: %s", got, code, error.message);
    expect_text(error.message, words);
    drop_model(&out);
    cr_expect_eq(files_open_now(), before);
}

static void expect_same(const struct loaded *a, const struct loaded *b, uint64_t experts)
{
    const struct numoe_slice_shape *shape = numoe_model_shape(a->model);
    uint64_t first, count, more, layer, e;

    cr_assert_eq(a->info.desc.layers, b->info.desc.layers);
    cr_assert_eq(a->info.desc.bias, b->info.desc.bias);
    cr_assert_eq(a->info.checkpoint_bytes, b->info.checkpoint_bytes);
    cr_assert(!memcmp(&a->info.desc.activation, &b->info.desc.activation,
                      sizeof a->info.desc.activation));
    for (layer = 0; layer < a->info.desc.layers; layer++)
        for (e = 0; e < experts; e++) {
            const void *x = numoe_model_run(a->model, layer, e, 0, &first, &count);
            const void *y = numoe_model_run(b->model, layer, e, 0, &first, &more);
            const float *u = numoe_model_down_bias(a->model, layer, e);
            const float *v = numoe_model_down_bias(b->model, layer, e);
            cr_assert_eq(count, more);
            cr_assert(count > 0);
            cr_assert(!memcmp(x, y, count * shape->bytes), "layer %d expert %d", (int)layer,
                      (int)e);
            cr_assert_eq(!u, !v);
            if (u)
                cr_assert(!memcmp(u, v, shape->hidden_tiles * 32 * sizeof *u));
        }
}

/* ---- the same weights in all layouts -------------------------------------------------------- */

Test(layouts, gguf_apart_and_merged_load_to_the_bytes_of_the_makers_own, .timeout = 60)
{
    static const char *const models[] = {"gpt-oss-20b", "v4-flash"};
    unsigned m;

    for (m = 0; m < 2; m++) {
        /* In one file, and in many. */
        const uint64_t shard_bytes = m ? 30000 : (uint64_t)1 << 30;
        struct numoe_synth_options options = options_of(models[m], NUMOE_SYNTH_OWN);
        char *own = write_model(&options), *apart, *merged;
        struct loaded a, b, c;

        options.shard_bytes = shard_bytes;
        options.layout = NUMOE_SYNTH_GGUF;
        apart = write_model(&options);
        options.layout = NUMOE_SYNTH_GGUF_MERGED;
        merged = write_model(&options);
        a = load_model(own, NULL);
        b = load_model(apart, NULL);
        c = load_model(merged, NULL);
        cr_expect_str_eq(b.info.family, "gguf");
        cr_expect_str_eq(c.info.family, "gguf-merged");
        cr_expect_eq(a.info.desc.bias, m == 0);
        /* biases are bf16 in one and f32 in the other */
        if (m == 0) {
            b.info.checkpoint_bytes = c.info.checkpoint_bytes = a.info.checkpoint_bytes;
            expect_same(&b, &c, 3);
        } else {
            expect_same(&a, &b, 3);
            expect_same(&a, &c, 3);
        }
        drop_model(&a);
        drop_model(&b);
        drop_model(&c);
        files_drop(own);
        files_drop(apart);
        files_drop(merged);
    }
}

/* Bytes of a tensor of a directory with one shard. */
static uint8_t *tensor_of(const char *directory, const char *name, const uint64_t **shape)
{
    static struct numoe_tensors *tensors;
    const struct numoe_tensor *t;
    const char *path = files_at(directory, "model-00001-of-00001.safetensors");
    uint8_t *bytes;
    int fd;

    numoe_tensors_destroy(tensors);
    cr_assert_eq(numoe_tensors_create(&tensors, NULL), 0);
    cr_assert_eq(numoe_tensors_read(tensors, path, 0, NULL, NULL), 0);
    t = numoe_tensors_find(tensors, name, 0);
    cr_assert_not_null(t, "%s", name);
    bytes = malloc(t->end - t->begin);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    cr_assert_eq(pread(fd, bytes, t->end - t->begin, (off_t)t->begin),
                 (ssize_t)(t->end - t->begin));
    close(fd);
    *shape = t->shape;
    return bytes;
}

static void expect_weight(const struct loaded *m, uint64_t layer, uint64_t expert,
                          enum numoe_matrix matrix, uint64_t row, uint64_t column, unsigned code,
                          unsigned scale)
{
    const struct numoe_slice_shape *shape = numoe_model_shape(m->model);
    const bool down = matrix == NUMOE_DOWN;
    const uint64_t slice = (down ? column : row) / 32;
    uint64_t first, count;
    const uint8_t *run = numoe_model_run(m->model, layer, expert, 0, &first, &count);
    unsigned got, got_scale;

    numoe_slice_weight(shape, run + slice * shape->bytes, matrix, down ? row : row % 32,
                       down ? column % 32 : column, &got, &got_scale);
    cr_assert(got == code && got_scale == scale,
              "matrix %d row %d column %d: code %u scale %u, not %u %u", (int)matrix, (int)row,
              (int)column, got, got_scale, code, scale);
}

Test(layouts, gpt_oss_rows_alternate_between_gate_and_up, .timeout = 60)
{
    struct numoe_synth_options options = options_of("gpt-oss-20b", NUMOE_SYNTH_OWN);
    char *directory = write_model(&options);
    struct loaded m = load_model(directory, NULL);
    const uint64_t *shape;
    uint8_t *codes, *scales, *bias;
    uint64_t e, r, k;

    codes = tensor_of(directory, "model.layers.1.mlp.experts.gate_up_proj_blocks", &shape);
    cr_assert(shape[0] == 3 && shape[1] == 320 && shape[2] == 3 && shape[3] == 16);
    scales = tensor_of(directory, "model.layers.1.mlp.experts.gate_up_proj_scales", &shape);
    bias = tensor_of(directory, "model.layers.1.mlp.experts.down_proj_bias", &shape);
    for (e = 0; e < 3; e++)
        for (r = 0; r < 320; r++)
            for (k = 0; k < 96; k++) {
                const uint64_t at = e * 320 + r;
                expect_weight(&m, 1, e, r % 2 ? NUMOE_UP : NUMOE_GATE, r / 2, k,
                              codes[at * 48 + k / 2] >> 4 * (k % 2) & 15, scales[at * 3 + k / 32]);
            }
    for (e = 0; e < 3; e++)
        for (r = 0; r < 96; r++) {
            const float *row = numoe_model_down_bias(m.model, 1, e);
            const uint32_t bits =
                (uint32_t)bias[2 * (e * 96 + r)] << 16 | (uint32_t)bias[2 * (e * 96 + r) + 1] << 24;
            cr_assert(!memcmp(&row[r / 32 * 32 + numoe_row_lane(r % 32)], &bits, 4));
        }
    free(codes);
    free(scales);
    free(bias);
    drop_model(&m);
    files_drop(directory);
}

/* A rank's slices are those of the whole, of layouts whose rows are not neighbours too. */
Test(layouts, a_range_is_a_part_of_the_whole, .timeout = 60)
{
    enum numoe_synth_layout layout;

    for (layout = NUMOE_SYNTH_OWN; layout <= NUMOE_SYNTH_GGUF_MERGED; layout++) {
        struct numoe_synth_options options = options_of("gpt-oss-20b", layout);
        struct numoe_load_options load = NUMOE_LOAD_OPTIONS_INIT;
        char *directory = write_model(&options);
        struct loaded whole = load_model(directory, NULL), part;
        uint64_t bytes, e, first, count;

        load.range = (struct numoe_range){.first_slice = 1, .end_slice = 3, .first_expert = 1};
        part = load_model(directory, &load);
        bytes = numoe_model_shape(whole.model)->bytes;
        for (e = 1; e < 3; e++) {
            const uint8_t *all = numoe_model_run(whole.model, 1, e, 0, &first, &count);
            const uint8_t *some = numoe_model_run(part.model, 1, e, 0, &first, &count);
            cr_assert(first == 1 && count == 2);
            cr_assert(!memcmp(all + bytes, some, 2 * bytes), "layout %d expert %d", (int)layout,
                      (int)e);
        }
        /* Of two experts in three: gate and up two slices in five, down and biases all. */
        cr_expect(part.info.checkpoint_bytes < whole.info.checkpoint_bytes * 2 / 3);
        drop_model(&whole);
        drop_model(&part);
        files_drop(directory);
    }
}

Test(layouts, drafts_are_loaded_on_request_only, .timeout = 60)
{
    struct numoe_synth_options options = options_of("v4-flash", NUMOE_SYNTH_OWN);
    struct numoe_load_options load = NUMOE_LOAD_OPTIONS_INIT;
    const uint64_t *shape;
    uint8_t *codes, *scales;
    char *directory;
    struct loaded own, draft;
    uint64_t r, k;

    options.draft = true;
    directory = write_model(&options);
    own = load_model(directory, NULL);
    cr_expect_eq(own.info.desc.layers, 2);
    load.draft = true;
    draft = load_model(directory, &load);
    cr_expect_eq(draft.info.desc.layers, 1);
    cr_expect_str_eq(draft.info.family, "deepseek-v4-draft");
    codes = tensor_of(directory, "mtp.0.ffn.experts.2.w2.weight", &shape);
    scales = tensor_of(directory, "mtp.0.ffn.experts.2.w2.scale", &shape);
    for (r = 0; r < 96; r++)
        for (k = 0; k < 160; k++)
            expect_weight(&draft, 0, 2, NUMOE_DOWN, r, k, codes[r * 80 + k / 2] >> 4 * (k % 2) & 15,
                          scales[r * 5 + k / 32]);
    free(codes);
    free(scales);
    drop_model(&own);
    drop_model(&draft);
    files_drop(directory);

    options.draft = false;
    directory = write_model(&options);
    expect_refused(directory, &load, -ENOTSUP, "no draft layers of a known model");
    files_drop(directory);
}

/* ---- a family in a file --------------------------------------------------------------------- */

#define TENSOR(MATRIX, KIND, NAME)                                                                 \
    "{\"matrix\":\"" MATRIX "\",\"kind\":\"" KIND "\",\"name\":\"" NAME "\"}"
/* clang-format off */
#define LIKE_V4                                                                                    \
    "{\"name\":\"mine\",\"experts_per_token\":2,\"activation\":{\"kind\":\"silu_clamped\","           \
    "\"limit\":10},\"config\":{\"experts\":\"n_routed_experts\",\"layers\":\"num_hidden_layers\","    \
    "\"experts_per_token\":\"num_experts_per_tok\"},\"refuse\":[\"layers.{layer}.ffn.experts.\"],"    \
    "\"tensors\":["                                                                                \
    TENSOR("down", "codes", "layers.{layer}.ffn.experts.{expert}.w2.weight") ","                   \
    TENSOR("down", "scales", "layers.{layer}.ffn.experts.{expert}.w2.scale") ","                   \
    TENSOR("gate", "codes", "layers.{layer}.ffn.experts.{expert}.w1.weight") ","                   \
    TENSOR("gate", "scales", "layers.{layer}.ffn.experts.{expert}.w1.scale") ","                   \
    TENSOR("up", "codes", "layers.{layer}.ffn.experts.{expert}.w3.weight") ","                     \
    TENSOR("up", "scales", "layers.{layer}.ffn.experts.{expert}.w3.scale") "]}"
/* clang-format on */

Test(layouts, a_described_family_loads_as_the_one_that_is_known, .timeout = 60)
{
    struct numoe_synth_options options = options_of("v4-flash", NUMOE_SYNTH_OWN);
    struct numoe_load_options load = NUMOE_LOAD_OPTIONS_INIT;
    char *directory = write_model(&options), *other = files_dir();
    const char *path = files_at(other, "family.json");
    struct loaded known, own;

    files_put(path, LIKE_V4, sizeof LIKE_V4 - 1);
    load.family_file = path;
    known = load_model(directory, NULL);
    own = load_model(directory, &load);
    cr_expect_str_eq(own.info.family, "mine");
    expect_same(&known, &own, 3);
    drop_model(&known);
    drop_model(&own);
    /* a limit that only the config has */
    for (int kind = 0; kind < 2; kind++) {
        files_put(path, LIKE_V4, sizeof LIKE_V4 - 1);
        files_replace(path, "\"kind\":\"silu_clamped\",\"limit\":10",
                      kind ? "\"kind\":\"silu_clamped\"" : "\"kind\":\"silu\"");
        files_replace(path, "\"experts\":\"n", "\"limit\":\"swiglu_limit\",\"experts\":\"n");
        own = load_model(directory, &load);
        cr_expect_eq(own.info.desc.activation.kind, NUMOE_SILU_CLAMPED);
        cr_expect_float_eq(own.info.desc.activation.limit, 10, 0);
        drop_model(&own);
    }
    files_put(path, LIKE_V4, sizeof LIKE_V4 - 1);
    /* gate and up change places */
    files_replace(path, "\"gate\"", "\"other\"");
    files_replace(path, "\"up\"", "\"gate\"");
    files_replace(path, "\"gate\",\"kind\":\"scales\"", "\"up\",\"kind\":\"scales\"");
    expect_refused(directory, &load, -EBADMSG, "matrix \"other\" is not known");
    files_drop(directory);
    files_drop(other);
}

Test(layouts, a_wrong_description_says_what_is_wrong, .timeout = 60)
{
    static const struct {
        const char *from, *to, *words;
    } cases[] = {
        {"\"name\":\"mine\",", "", "name is missing"},
        {"\"name\":\"mine\"", "\"name\":7", "name is not a string"},
        {"\"name\":\"mine\"", "\"nmae\":\"mine\"", "key \"nmae\" of the description is not known"},
        {"\"experts_per_token\":2,", "", "experts_per_token is missing"},
        {"\"kind\":\"silu_clamped\"", "\"kind\":\"relu\"", "kind \"relu\" is not known"},
        {"\"limit\":10", "\"limit\":-1", "activation: "},
        {"\"limit\":10", "\"limit\":\"x\"", "limit is not a finite number"},
        {"\"experts\":\"n", "\"exprets\":\"n", "key \"exprets\" of config is not known"},
        {"w2.weight", "w1.weight", "w1.weight\" is the name of two tensors"},
        {"\"matrix\":\"down\",\"kind\":\"scales\"", "\"matrix\":\"up\",\"kind\":\"scales\"",
         "is of a matrix that has its tensor already"},
        {"\"kind\":\"scales\"", "\"kind\":\"bias\"", "tensors lack codes or scales"},
        {"layers.{layer}.ffn.experts.{expert}.w2.weight", "layers.{layer}.{x}.w2",
         "must hold {layer} once"},
        {"layers.{layer}.ffn.experts.{expert}.w2.weight", "layers.{layer}.w2",
         "have {expert} in some of their names"},
        {"\"refuse\":", "\"gate_up\":\"up_first\",\"refuse\":", "gate_up is of no tensor"},
        {"\"refuse\":[", "\"refuse\":[4,", "refuse holds no string"},
        {"{\"name\"", "[{\"name\"", "is not sound JSON"},
    };
    struct numoe_synth_options options = options_of("v4-flash", NUMOE_SYNTH_OWN);
    struct numoe_load_options load = NUMOE_LOAD_OPTIONS_INIT;
    char *directory = write_model(&options), *other = files_dir();
    const char *path = files_at(other, "family.json");
    unsigned i;

    load.family_file = path;
    expect_refused(directory, &load, -ENOENT, "");
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        files_put(path, LIKE_V4, sizeof LIKE_V4 - 1);
        files_replace(path, cases[i].from, cases[i].to);
        expect_refused(directory, &load, -EBADMSG, cases[i].words);
    }
    files_drop(directory);
    files_drop(other);
}

/* ---- what is wrong with experts ------------------------------------------------------------- */

/* Overwrite one byte of a part of an expert of layer 1. */
static void damage_part(const char *directory, uint64_t expert, enum numoe_part part, uint64_t row,
                        uint64_t group)
{
    struct numoe_extent parts[NUMOE_PART_COUNT];
    struct numoe_checkpoint *checkpoint;
    int fd;

    cr_assert_eq(numoe_checkpoint_open(directory, NULL, &checkpoint, NULL), 0);
    numoe_checkpoint_expert(checkpoint, 1, expert, parts);
    fd = open(numoe_checkpoint_file(checkpoint, parts[part].file, NULL), O_WRONLY | O_CLOEXEC);
    cr_assert_eq(
        pwrite(fd, "\xff", 1,
               (off_t)(parts[part].offset + row * parts[part].stride + group * parts[part].step)),
        1);
    close(fd);
    numoe_checkpoint_close(checkpoint);
}

Test(layouts, scale_byte_255_is_named_by_tensor_expert_row_and_group, .timeout = 60)
{
    static const struct {
        enum numoe_synth_layout layout;
        enum numoe_part part;
        const char *words;
    } cases[] = {
        {NUMOE_SYNTH_OWN, NUMOE_PART_UP_SCALES,
         "tensor \"model.layers.1.mlp.experts.gate_up_proj_scales\": the scale byte of expert 2, "
         "row 70 of up, group 1 is 255"},
        {NUMOE_SYNTH_GGUF, NUMOE_PART_DOWN_SCALES,
         "tensor \"blk.1.ffn_down_exps.weight\": the scale byte of expert 2, row 70, group 1"},
        {NUMOE_SYNTH_GGUF_MERGED, NUMOE_PART_GATE_SCALES,
         "tensor \"blk.1.ffn_gate_up_exps.weight\": the scale byte of expert 2, row 70 of gate, "
         "group 1"},
    };
    unsigned i;

    for (i = 0; i < 3; i++) {
        struct numoe_synth_options options = options_of("gpt-oss-20b", cases[i].layout);
        char *directory = write_model(&options);

        damage_part(directory, 2, cases[i].part, 70, 1);
        expect_refused(directory, NULL, -EBADMSG, cases[i].words);
        files_drop(directory);
    }
}

Test(layouts, a_tensor_that_experts_do_not_have_is_named, .timeout = 60)
{
    struct numoe_synth_options options = options_of("v4-flash", NUMOE_SYNTH_OWN);
    char *directory = write_model(&options);

    /* The name of a norm becomes that of something of an expert, as long. */
    files_replace(files_at(directory, "model.safetensors.index.json"), "layers.0.ffn_norm.weight",
                  "layers.0.ffn.experts.w1b");
    {
        const char *path = files_at(directory, "model-00001-of-00001.safetensors");
        size_t count;
        char *bytes = files_get(path, &count);
        char *at = memmem(bytes, count, "layers.0.ffn_norm.weight", 24);
        cr_assert_not_null(at);
        memcpy(at, "layers.0.ffn.experts.w1b", 24);
        files_put(path, bytes, count);
        free(bytes);
    }
    expect_refused(directory, NULL, -EBADMSG,
                   "tensor \"layers.0.ffn.experts.w1b\" is none that experts of DeepSeek-V4 have");
    files_drop(directory);
}
