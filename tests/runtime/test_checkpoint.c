/* Checkpoint directories: what is recognised, what is missing, what disagrees. */
#include "checkpoint.h"
#include "loader_files.h"
#include "synth.h"

#define INDEX "model.safetensors.index.json"

/* A small checkpoint of that model in several shards. */
static char *small(const char *model, uint64_t layers, uint64_t experts)
{
    struct numoe_synth_options options = NUMOE_SYNTH_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    char *directory = files_dir();

    options.model = model;
    options.layers = layers;
    options.experts = experts;
    options.hidden = 64;
    options.intermediate = 96;
    options.shard_bytes = 20000;
    cr_assert_eq(numoe_synth_write(directory, &options, &error), 0, "%s", error.message);
    return directory;
}

struct outcome {
    int code;
    struct numoe_error error;
    struct files_log log;
    struct numoe_model_desc desc;
    uint32_t strays;
};

/* Open and close; what was open is closed again whatever comes of it. */
static struct outcome attempt(const char *directory)
{
    static struct outcome out;
    struct numoe_checkpoint *checkpoint;
    struct numoe_log log = {files_log_fn, &out.log};
    int before = files_open_now();

    memset(&out, 0, sizeof out);
    out.error = (struct numoe_error)NUMOE_ERROR_INIT;
    out.code = numoe_checkpoint_open(directory, &(struct numoe_checkpoint_options){.log = &log},
                                     &checkpoint, &out.error);
    if (out.code == 0) {
        out.desc = *numoe_checkpoint_desc(checkpoint);
        out.strays = numoe_checkpoint_strays(checkpoint);
        numoe_checkpoint_close(checkpoint);
    } else {
        cr_expect_eq(out.error.code, out.code);
    }
    cr_expect_eq(files_open_now(), before);
    return out;
}

#define expect_refusal(directory, want, words)                                                     \
    do {                                                                                           \
        struct outcome o_ = attempt(directory);                                                    \
        cr_expect_eq(o_.code, (want), "%d: %s", o_.code, o_.error.message);                        \
        expect_text(o_.error.message, words);                                                      \
    } while (0)

Test(checkpoint, describes_v4_from_its_files, .timeout = 20)
{
    char *directory = small("v4-flash", 2, 7);
    struct numoe_checkpoint *checkpoint;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_extent parts[NUMOE_PART_COUNT];
    const struct numoe_model_desc *desc;
    struct numoe_file_id id;
    uint64_t total = 0, layer, expert;
    unsigned i;

    cr_assert_eq(numoe_checkpoint_open(directory, NULL, &checkpoint, &error), 0, "%s",
                 error.message);
    desc = numoe_checkpoint_desc(checkpoint);
    cr_expect_eq(desc->layers, 2);
    cr_expect_eq(desc->experts, 7);
    cr_expect_eq(desc->experts_per_token, 6);
    cr_expect_eq(desc->hidden, 64);
    cr_expect_eq(desc->intermediate, 96);
    cr_expect_eq(desc->activation.kind, NUMOE_SILU_CLAMPED);
    cr_expect_eq(desc->activation.limit, 10);
    cr_expect_eq(desc->bias, false);
    cr_expect_str_eq(numoe_checkpoint_family(checkpoint)->name, "deepseek-v4");
    cr_expect_eq(numoe_checkpoint_file_layer(checkpoint, 1), 1);
    cr_expect(numoe_checkpoint_file_count(checkpoint) > 3);
    cr_expect_eq(numoe_checkpoint_expert_bytes(checkpoint), 3 * 64 * 96 * 17 / 32);
    cr_expect_eq(numoe_checkpoint_bytes(checkpoint), 14 * 3 * 64 * 96 * 17 / 32);
    for (layer = 0; layer < 2; layer++)
        for (expert = 0; expert < 7; expert++) {
            numoe_checkpoint_expert(checkpoint, layer, expert, parts);
            for (i = 0; i < NUMOE_PART_GATE_BIAS; i++) {
                cr_assert_not_null(numoe_checkpoint_file(checkpoint, parts[i].file, &id));
                cr_expect_eq(parts[i].bytes, i % 2 ? 64 * 96 / 32 : 64 * 96 / 2);
                cr_expect(parts[i].offset + parts[i].bytes <= id.bytes);
                total += parts[i].bytes;
            }
        }
    cr_expect_eq(total, numoe_checkpoint_bytes(checkpoint));
    numoe_checkpoint_close(checkpoint);
    files_drop(directory);
}

Test(checkpoint, describes_k3_whose_first_layer_is_dense, .timeout = 20)
{
    char *directory = small("kimi-k3", 3, 20);
    struct numoe_checkpoint *checkpoint;
    struct numoe_error error = NUMOE_ERROR_INIT;
    const struct numoe_model_desc *desc;

    cr_assert_eq(numoe_checkpoint_open(directory, NULL, &checkpoint, &error), 0, "%s",
                 error.message);
    desc = numoe_checkpoint_desc(checkpoint);
    cr_expect_eq(desc->layers, 3);
    cr_expect_eq(desc->experts, 20);
    cr_expect_eq(desc->experts_per_token, 16);
    cr_expect_eq(desc->activation.kind, NUMOE_SITU);
    cr_expect_eq(desc->activation.gate_cap, 4);
    cr_expect_eq(desc->activation.up_cap, 25);
    cr_expect_eq(numoe_checkpoint_file_layer(checkpoint, 0), 1);
    cr_expect_str_eq(numoe_checkpoint_family(checkpoint)->name, "kimi-k3");
    numoe_checkpoint_close(checkpoint);
    files_drop(directory);
}

Test(checkpoint, all_missing_shards_are_named_at_once, .timeout = 20)
{
    char *directory = small("v4-flash", 2, 7);
    struct outcome out;

    /* Case E6. Damage in another shard comes second to what is missing. */
    unlink(files_at(directory, "model-00002-of-00008.safetensors"));
    expect_refusal(directory, -ENOENT, "1 missing file: model-00002-of-00008.safetensors");
    unlink(files_at(directory, "model-00005-of-00008.safetensors"));
    cr_assert_eq(truncate(files_at(directory, "model-00006-of-00008.safetensors"), 4000), 0);
    out = attempt(directory);
    cr_expect_eq(out.code, -ENOENT);
    expect_text(out.error.message, "2 missing files: model-00002-of-00008.safetensors, "
                                   "model-00005-of-00008.safetensors");
    expect_text(out.log.text, "model-00006-of-00008.safetensors");
    expect_text(out.error.where, directory);
    files_drop(directory);
}

Test(checkpoint, many_missing_shards_are_counted_past_eight, .timeout = 20)
{
    char *directory = small("v4-flash", 2, 40), name[64];
    struct outcome out;
    unsigned i;

    for (i = 1; i <= 20; i++) {
        snprintf(name, sizeof name, "model-%05u-of-00041.safetensors", i);
        cr_assert_eq(unlink(files_at(directory, name)), 0, "%s", name);
    }
    out = attempt(directory);
    cr_expect_eq(out.code, -ENOENT);
    expect_text(out.error.message, "20 missing files: model-00001-of-00041.safetensors, ");
    expect_text(out.error.message, " more");
    expect_text(out.log.text, "missing file: model-00020-of-00041.safetensors");
    files_drop(directory);
}

Test(checkpoint, an_entry_that_points_at_the_wrong_shard, .timeout = 20)
{
    char *directory = small("v4-flash", 2, 7);

    files_replace(files_at(directory, INDEX),
                  "\"layers.0.ffn.experts.1.w2.weight\": \"model-00001-of-00008.safetensors\"",
                  "\"layers.0.ffn.experts.1.w2.weight\": \"model-00003-of-00008.safetensors\"");
    expect_refusal(directory, -EBADMSG,
                   "1 missing tensor: layers.0.ffn.experts.1.w2.weight (in model-00003-of-00008");
    files_drop(directory);
}

Test(checkpoint, strays_are_ignored_with_a_notice, .timeout = 20)
{
    char *directory = small("v4-flash", 2, 7);
    struct outcome out;

    files_put(files_at(directory, "model-00009-of-00008.safetensors"), "no header", 9);
    files_put(files_at(directory, "readme.txt"), "x", 1);
    out = attempt(directory);
    cr_expect_eq(out.code, 0);
    cr_expect_eq(out.strays, 1);
    cr_expect_eq(out.log.warnings, 1);
    expect_text(out.log.text, "ignoring model-00009-of-00008.safetensors");
    files_drop(directory);
}

Test(checkpoint, tensors_that_the_index_does_not_name_are_ignored, .timeout = 20)
{
    char *directory = small("v4-flash", 2, 7);
    struct outcome out;

    files_replace(files_at(directory, INDEX),
                  "\"layers.0.ffn_norm.weight\": \"model-00001-of-00008.safetensors\",", "");
    out = attempt(directory);
    cr_expect_eq(out.code, 0);
    expect_text(out.log.text, "ignoring 1 tensors that the index does not name");
    files_drop(directory);
}

Test(checkpoint, file_names_do_not_leave_the_directory, .timeout = 20)
{
    static const char *const names[] = {
        "../x.safetensors", "/etc/passwd", "a/b.safetensors", "a\\\\b.safetensors", "..", ".", ""};
    size_t i;

    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
        char *directory = files_dir(), text[256];
        snprintf(text, sizeof text, "{\"weight_map\":{\"t\":\"%s\"}}", names[i]);
        files_put(files_at(directory, "config.json"), "{}", 2);
        files_put(files_at(directory, INDEX), text, strlen(text));
        expect_refusal(directory, -EBADMSG, "leaves the directory");
        files_drop(directory);
    }
}

Test(checkpoint, index_that_is_no_index, .timeout = 20)
{
    static const struct {
        const char *text, *words;
    } cases[] = {
        {"{\"weight_map\":{}}", "names no tensor"},
        {"{}", "no weight_map object"},
        {"{\"weight_map\":[]}", "no weight_map object"},
        {"[]", "is not a JSON object"},
        {"{\"weight_map\":{\"t\":7}}", "the file of tensor \"t\" is not a string"},
        {"{\"weight_map\":{\"t\":\"a\",\"t\":\"b\"}}", "duplicate"},
        {"{\"weight_map\":", "not sound JSON"},
        {"", "not sound JSON"},
    };
    size_t i;

    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *directory = files_dir();
        files_put(files_at(directory, "config.json"), "{}", 2);
        files_put(files_at(directory, INDEX), cases[i].text, strlen(cases[i].text));
        expect_refusal(directory, -EBADMSG, cases[i].words);
        files_drop(directory);
    }
}

/* Files of a size that none has, with a hole for what is in them: refused before it is read. */
Test(checkpoint, files_above_their_limits_are_named, .timeout = 20)
{
    static const struct {
        const char *name;
        off_t bytes;
        const char *words;
    } cases[] = {
        {"config.json", (16 << 20) + 1, "has 16777217 bytes, above the limit of 16777216"},
        {INDEX, (512 << 20) + 1, "has 536870913 bytes, above the limit of 536870912"},
        {"family.json", (1 << 20) + 1, "has 1048577 bytes, above the limit of 1048576"},
    };
    size_t i;

    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *directory = small("v4-flash", 1, 2);
        const char *path = files_at(directory, cases[i].name);
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_checkpoint_options options = {0};
        struct numoe_checkpoint *checkpoint;
        int before = files_open_now();

        if (access(path, F_OK))
            files_put(path, "{}", 2);
        if (!strcmp(cases[i].name, "family.json"))
            options.family = path;
        cr_assert_eq(truncate(path, cases[i].bytes), 0);
        cr_expect_eq(numoe_checkpoint_open(directory, &options, &checkpoint, &error), -EFBIG);
        expect_text(error.message, cases[i].words);
        expect_text(error.where, cases[i].name);
        cr_expect_eq(files_open_now(), before);
        files_drop(directory);
    }
}

Test(checkpoint, directories_that_hold_no_model, .timeout = 20)
{
    char *directory = files_dir();

    cr_expect_eq(attempt(files_at(directory, "absent")).code, -ENOENT);
    cr_expect_eq(attempt("").code, -EINVAL);
    expect_refusal(directory, -ENOENT, "cannot open");
    files_put(files_at(directory, "config.json"), "{}", 2);
    expect_refusal(directory, -ENOENT, "neither model.safetensors.index.json nor");
    expect_refusal(files_at(directory, "config.json"), -ENOTDIR, "not a checkpoint directory");
    files_put(files_at(directory, "config.json"), "[1]", 3);
    expect_refusal(directory, -EBADMSG, "is not a JSON object");
    files_drop(directory);
}

Test(checkpoint, config_that_disagrees_names_both_numbers, .timeout = 20)
{
    static const struct {
        const char *from, *to, *words;
        int code;
    } cases[] = {
        {"\"n_routed_experts\": 7", "\"n_routed_experts\": 6",
         "says n_routed_experts 6 but there is tensor \"layers.", -EBADMSG},
        {"\"n_routed_experts\": 7", "\"n_routed_experts\": 8",
         "2 layers of 8 experts are incomplete: 12 missing tensors: layers.0.ffn.experts.7.w1",
         -EBADMSG},
        {"\"n_routed_experts\": 7", "\"n_routed_experts\": 9000000000000000000",
         "n_routed_experts 9000000000000000000", -EBADMSG},
        {"\"n_routed_experts\": 7", "\"n_routed_experts\": 900000000", "10799999916 missing",
         -EBADMSG},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3",
         "says num_hidden_layers 3 but the tensors' highest layer number plus 1 is 2", -EBADMSG},
        {"\"hidden_size\": 64", "\"hidden_size\": 4096",
         "says hidden_size 4096 but the tensors' expert width is 64", -EBADMSG},
        {"\"moe_intermediate_size\": 96", "\"moe_intermediate_size\": 2048",
         "says moe_intermediate_size 2048 but the tensors' intermediate width is 96", -EBADMSG},
        {"\"num_experts_per_tok\": 6", "\"num_experts_per_tok\": 8",
         "says num_experts_per_tok 8 of 7 experts", -EBADMSG},
        {"\"num_experts_per_tok\": 6", "\"num_experts_per_tok\": 0", "num_experts_per_tok 0",
         -EBADMSG},
        {"\"num_experts_per_tok\": 6", "\"num_experts_per_tok\": \"6\"", "not a whole number",
         -EBADMSG},
        {"\"swiglu_limit\": 10.0", "\"swiglu_limit\": -10.0", "swiglu_limit is not a finite",
         -EBADMSG},
        {"\"swiglu_limit\": 10.0", "\"swiglu_limit\": 1e300", "swiglu_limit is not a finite",
         -EBADMSG},
    };
    size_t i;

    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *directory = small("v4-flash", 2, 7);
        files_replace(files_at(directory, "config.json"), cases[i].from, cases[i].to);
        expect_refusal(directory, cases[i].code, cases[i].words);
        files_drop(directory);
    }
}

Test(checkpoint, activation_comes_from_config, .timeout = 20)
{
    char *directory = small("v4-flash", 2, 7);
    const char *config = files_at(directory, "config.json");
    struct outcome out;

    files_replace(config, "\"swiglu_limit\": 10.0", "\"swiglu_limit\": 7");
    out = attempt(directory);
    cr_expect_eq(out.code, 0);
    cr_expect_eq(out.desc.activation.limit, 7);
    files_replace(config, "\"swiglu_limit\": 7", "\"swiglu_limit\": null");
    cr_expect_eq(attempt(directory).desc.activation.kind, NUMOE_SILU);
    files_replace(config, "\"swiglu_limit\"", "\"another\"");
    out = attempt(directory);
    cr_expect_eq(out.desc.activation.limit, 10);
    expect_text(out.log.text, "config.json has no swiglu_limit; taking 10");
    files_drop(directory);

    directory = small("kimi-k3", 2, 20);
    config = files_at(directory, "config.json");
    files_replace(config, "\"activation_situ_linear_beta\": 25.0",
                  "\"activation_situ_linear_beta\": 30.0");
    cr_expect_eq(attempt(directory).desc.activation.up_cap, 30);
    files_replace(config, "\"activation_situ_beta\": 4.0", "\"activation_situ_beta\": 0");
    expect_refusal(directory, -EBADMSG, "activation_situ_beta must be above 0");
    files_replace(config, "\"text_config\"", "\"another\"");
    expect_refusal(directory, -EBADMSG, "no object text_config");
    files_drop(directory);
}

/* ---- crafted single files ------------------------------------------------------------------- */

struct spec {
    const char *dtype, *scale_dtype;
    uint64_t rows, columns; /* shape of gate's codes as written */
    int drop;               /* number of a tensor to leave out, or -1 */
    const char *prefix;
    unsigned group; /* codes' rows are written as groups of so many; 0: as rows */
};

/* One layer, two experts, H 64, I 32, in model.safetensors. */
static void put_single(const char *directory, const struct spec *spec, uint64_t layer)
{
    static const char *const matrices[3] = {"w1", "w2", "w3"};
    char *header = NULL;
    size_t length;
    uint64_t offset = 0;
    FILE *stream = open_memstream(&header, &length);
    unsigned e, m, n = 0;

    fputc('{', stream);
    for (e = 0; e < 2; e++)
        for (m = 0; m < 3; m++) {
            uint64_t rows = m == 1 ? 64 : 32, k = m == 1 ? 32 : 64;
            bool f4 = !strcmp(spec->dtype, "F4");
            uint64_t columns = f4 ? k : k / 2, size = !strcmp(spec->dtype, "BF16") ? 2 : 1;
            if (e == 1 && m == 0 && spec->rows) {
                rows = spec->rows;
                columns = spec->columns;
            }
            if ((int)n++ != spec->drop) {
                uint64_t bytes = f4 ? rows * columns / 2 : rows * columns * size;
                char more[32] = "";
                if (spec->group) {
                    columns = k / 32;
                    snprintf(more, sizeof more, ",%u", spec->group);
                    bytes = rows * columns * spec->group * size / (f4 ? 2 : 1);
                }
                fprintf(
                    stream,
                    "\"%slayers.%llu.ffn.experts.%u.%s.weight\":{\"dtype\":\"%s\",\"shape\":[%llu,"
                    "%llu%s],\"data_offsets\":[%llu,%llu]},",
                    spec->prefix, (unsigned long long)layer, e, matrices[m], spec->dtype,
                    (unsigned long long)rows, (unsigned long long)columns, more,
                    (unsigned long long)offset, (unsigned long long)(offset + bytes));
                offset += bytes;
            }
            if ((int)n++ != spec->drop) {
                rows = m == 1 ? 64 : 32;
                fprintf(
                    stream,
                    "\"%slayers.%llu.ffn.experts.%u.%s.scale\":{\"dtype\":\"%s\",\"shape\":[%llu,"
                    "%llu],\"data_offsets\":[%llu,%llu]},",
                    spec->prefix, (unsigned long long)layer, e, matrices[m], spec->scale_dtype,
                    (unsigned long long)rows, (unsigned long long)(k / 32),
                    (unsigned long long)offset, (unsigned long long)(offset + rows * (k / 32)));
                offset += rows * (k / 32);
            }
        }
    fprintf(stream, "\"__metadata__\":{}}");
    fclose(stream);
    files_put_tensors(files_at(directory, "model.safetensors"), header, length, NULL, offset);
    free(header);
}

static const char single_config[] =
    "{\"architectures\":[\"DeepseekV4ForCausalLM\"],\"n_routed_experts\":2,"
    "\"num_experts_per_tok\":1,\"swiglu_limit\":10.0}";

static struct outcome attempt_single(const struct spec *spec, uint64_t layer, const char *config)
{
    char *directory = files_dir();
    struct outcome out;

    files_put(files_at(directory, "config.json"), config, strlen(config));
    put_single(directory, spec, layer);
    out = attempt(directory);
    files_drop(directory);
    return out;
}

Test(checkpoint, every_spelling_of_mxfp4_means_the_same, .timeout = 20)
{
    static const char *const codes[] = {"I8", "U8", "F4"}, *const scales[] = {"F8_E8M0", "U8"};
    unsigned i, j;

    for (i = 0; i < 3; i++)
        for (j = 0; j < 2; j++) {
            struct spec spec = {codes[i], scales[j], 0, 0, -1, ""};
            struct outcome out = attempt_single(&spec, 0, single_config);
            cr_expect_eq(out.code, 0, "%s %s: %s", codes[i], scales[j], out.error.message);
            cr_expect_eq(out.desc.hidden, 64);
            cr_expect_eq(out.desc.intermediate, 32);
            cr_expect_eq(out.log.count, 0, "%s", out.log.text);
        }
}

/* [N, K/32, 16] bytes, or [N, K/32, 32] codes; half or twice as much of each is no such matrix,
 * whatever else agrees. */
Test(checkpoint, codes_in_groups, .timeout = 20)
{
    static const struct {
        const char *dtype;
        unsigned group;
        bool good;
    } cases[] = {{"U8", 16, true},  {"I8", 16, true},  {"F4", 32, true}, {"U8", 32, false},
                 {"F4", 16, false}, {"F4", 64, false}, {"U8", 8, false}, {"U8", 1, false}};

    for (unsigned i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct spec spec = {cases[i].dtype, "U8", 0, 0, -1, "", cases[i].group};
        struct outcome out = attempt_single(&spec, 0, single_config);

        cr_expect_eq(out.code, cases[i].good ? 0 : -EBADMSG, "%s %u: %d %s", cases[i].dtype,
                     cases[i].group, out.code, out.error.message);
        if (cases[i].good)
            cr_expect_eq(out.desc.hidden, 64);
        else
            expect_text(out.error.message,
                        "tensor \"layers.0.ffn.experts.0.w1.weight\": shape [32, 2");
    }
}

/* Of a tensor that is not in its file, the file is told however long the name is. */
Test(checkpoint, a_name_that_is_cut_keeps_its_file, .timeout = 20)
{
    char *directory = small("v4-flash", 1, 2), *shard = NULL;
    char name[200], index[600], due[100];
    struct outcome out;

    for (unsigned of = 1; !shard && of < 100; of++) {
        snprintf(due, sizeof due, "model-00001-of-%05u.safetensors", of);
        if (access(files_at(directory, due), F_OK) == 0)
            shard = due;
    }
    cr_assert_not_null(shard);
    memset(name, 'n', sizeof name);
    name[sizeof name - 1] = 0;
    snprintf(index, sizeof index, "{\"weight_map\":{\"%s\":\"%s\"}}", name, shard);
    files_put(files_at(directory, "model.safetensors.index.json"), index, strlen(index));
    out = attempt(directory);
    cr_expect_eq(out.code, -EBADMSG);
    snprintf(index, sizeof index, "nnn... (in %s)", shard);
    expect_text(out.error.message, index);
    files_drop(directory);
}

Test(checkpoint, other_formats_are_named, .timeout = 20)
{
    struct spec spec = {"F8_E4M3", "F8_E8M0", 0, 0, -1, ""};
    struct outcome out = attempt_single(&spec, 0, single_config);

    cr_expect_eq(out.code, -ENOTSUP);
    expect_text(out.error.message, "is F8_E4M3; experts are read as MXFP4");
    spec = (struct spec){"I8", "BF16", 0, 0, -1, ""};
    spec.scale_dtype = "F8_E4M3";
    out = attempt_single(&spec, 0, single_config);
    cr_expect_eq(out.code, -ENOTSUP);
    expect_text(out.error.message, "scales of MXFP4 are F8_E8M0 or U8");
}

Test(checkpoint, wrong_shapes_name_tensor_and_numbers, .timeout = 20)
{
    struct spec spec = {"I8", "U8", 32, 16, -1, ""};
    struct outcome out = attempt_single(&spec, 0, single_config);

    cr_expect_eq(out.code, -EBADMSG);
    expect_text(out.error.message, "tensor \"layers.0.ffn.experts.1.w1.weight\": shape [32, "
                                   "16] of I8 where [32, 32] is due");
    expect_text(out.error.where, "model.safetensors");
    spec.columns = 33;
    out = attempt_single(&spec, 0, single_config);
    cr_expect_eq(out.code, -EBADMSG);
    expect_text(out.error.message, "shape [32, 33] of I8 where [32, 32] is due");
    spec.rows = 31;
    spec.columns = 32;
    out = attempt_single(&spec, 0, single_config);
    cr_expect_eq(out.code, -EBADMSG);
    expect_text(out.error.message, "shape [31, 32] of I8 where [32, 32] is due");
}

Test(checkpoint, each_missing_tensor_is_named, .timeout = 20)
{
    static const char *const names[12] = {"0.w1.weight", "0.w1.scale", "0.w2.weight", "0.w2.scale",
                                          "0.w3.weight", "0.w3.scale", "1.w1.weight", "1.w1.scale",
                                          "1.w2.weight", "1.w2.scale", "1.w3.weight", "1.w3.scale"};
    struct spec spec = {"I8", "U8", 0, 0, 0, ""};
    struct outcome out;

    for (spec.drop = 0; spec.drop < 12; spec.drop++) {
        char words[100];
        out = attempt_single(&spec, 0, single_config);
        cr_expect_eq(out.code, -EBADMSG);
        snprintf(words, sizeof words, "1 missing tensor: layers.0.ffn.experts.%s",
                 names[spec.drop]);
        expect_text(out.error.message, words);
    }
}

Test(checkpoint, numbers_of_layers_are_bounded_by_the_tensors, .timeout = 20)
{
    struct spec spec = {"I8", "U8", 0, 0, -1, ""};
    struct outcome out = attempt_single(&spec, 999999999, single_config);

    cr_expect_eq(out.code, -EBADMSG);
    expect_text(out.error.message, "first layer with experts is 999999999, not 0");
    /* Ten digits are no number of a layer: no experts then. */
    out = attempt_single(&spec, 9999999999, single_config);
    cr_expect_eq(out.code, -ENOTSUP);
}

Test(checkpoint, unknown_models_are_named, .timeout = 20)
{
    struct spec spec = {"I8", "U8", 0, 0, -1, "model."};
    struct outcome out = attempt_single(
        &spec, 0, "{\"architectures\":[\"MixtralForCausalLM\"],\"model_type\":\"mixtral\"}");

    cr_expect_eq(out.code, -ENOTSUP);
    expect_text(out.error.message, "architecture MixtralForCausalLM, model_type mixtral");
    /* The draft layer's experts are not the model's. */
    spec.prefix = "mtp.0.";
    out = attempt_single(&spec, 0, "{}");
    cr_expect_eq(out.code, -ENOTSUP);
    expect_text(out.error.message, "architecture none, model_type none");
    spec.prefix = "";
    out = attempt_single(&spec, 0,
                         "{\"model_type\":\"deepseek_v9\",\"num_experts_per_tok\":1,"
                         "\"swiglu_limit\":10}");
    cr_expect_eq(out.code, 0);
    expect_text(out.log.text, "taken for DeepSeek-V4 by its tensors' names; config.json says "
                              "architecture none, model_type deepseek_v9");
}

Test(checkpoint, gpt_oss_without_its_other_tensors_is_refused, .timeout = 20)
{
    static const char header[] = "{\"model.layers.0.mlp.experts.gate_up_proj_blocks\":{\"dtype\":"
                                 "\"U8\",\"shape\":[1,2,1,16],"
                                 "\"data_offsets\":[0,32]}}";
    char *directory = files_dir();

    files_put(files_at(directory, "config.json"), "{\"model_type\":\"gpt_oss\"}", 24);
    files_put_tensors(files_at(directory, "model.safetensors"), header, sizeof header - 1, NULL,
                      32);
    expect_refusal(directory, -EBADMSG,
                   "1 layers of 1 experts are incomplete: 5 missing tensors: "
                   "model.layers.0.mlp.experts.gate_up_proj_scales, ");
    files_drop(directory);
}

Test(checkpoint, experts_without_a_kernel_are_refused_by_name, .timeout = 20)
{
    static const struct {
        const char *tensor, *dtype, *message;
    } cases[] = {
        {"model.layers.3.mlp.experts.0.gate_proj.weight", "F8_E4M3",
         "DeepSeek-V3, GLM or Qwen3 checkpoints are not supported yet by the loader: no kernel for "
         "FP8 yet"},
        {"model.layers.0.mlp.experts.127.gate_proj.weight", "BF16", "no kernel for BF16 yet"},
        {"model.layers.1.mlp.experts.0.gate_proj.weight_packed", "I32",
         "Kimi-K2 checkpoints are not supported yet by the loader: no kernel for INT4 yet"},
        {"model.layers.0.block_sparse_moe.experts.7.w1.weight", "F8_E4M3",
         "MiniMax or Mixtral checkpoints are not supported yet by the loader: no kernel for FP8"},
        /* dense layers and shared experts are nobody's experts */
        {"model.layers.0.mlp.gate_proj.weight", "BF16", "no experts of a known model"},
        {"model.layers.3.mlp.shared_experts.gate_proj.weight", "BF16",
         "no experts of a known model"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *directory = files_dir(), header[256];
        int length = snprintf(header, sizeof header,
                              "{\"%s\":{\"dtype\":\"%s\",\"shape\":[%d],\"data_offsets\":[0,32]}}",
                              cases[i].tensor, cases[i].dtype,
                              !strcmp(cases[i].dtype, "I32")    ? 8
                              : !strcmp(cases[i].dtype, "BF16") ? 16
                                                                : 32);

        files_put(files_at(directory, "config.json"), "{}", 2);
        files_put_tensors(files_at(directory, "model.safetensors"), header, (size_t)length, NULL,
                          32);
        expect_refusal(directory, -ENOTSUP, cases[i].message);
        files_drop(directory);
    }
}

/* ---- families ------------------------------------------------------------------------------- */

Test(families, names_match_in_one_spelling_only, .timeout = 20)
{
    static const char *const others[] = {
        "layers.012.ffn.experts.1.w2.scale",        "layers.+1.ffn.experts.1.w2.scale",
        "layers..ffn.experts.1.w2.scale",           "layers.1.ffn.experts.1.w2.scales",
        "layers.1.ffn.experts.1.w4.scale",          "layers.1.ffn.experts.1.w2",
        "layers.1.ffn.shared_experts.w2.scale",     "mtp.0.ffn.experts.1.w2.scale",
        "layers.1234567890.ffn.experts.1.w2.scale", ""};
    const struct numoe_family *v4 = numoe_family_by_name("deepseek-v4"), *family;
    uint32_t layer, expert;
    char name[160];
    size_t f;
    int which;

    which = numoe_family_match(v4, "layers.12.ffn.experts.255.w2.scale", &layer, &expert);
    cr_assert(which >= 0 && layer == 12 && expert == 255);
    cr_expect_eq(which, numoe_family_holder(v4, NUMOE_PART_DOWN_SCALES));
    for (f = 0; f < sizeof others / sizeof others[0]; f++)
        cr_expect_eq(numoe_family_match(v4, others[f], &layer, &expert), -1, "%s", others[f]);
    numoe_family_tensor_name(v4, 3, 17, (unsigned)numoe_family_holder(v4, NUMOE_PART_UP_SCALES),
                             name, sizeof name);
    cr_expect_str_eq(name, "layers.3.ffn.experts.17.w3.scale");
    cr_expect(numoe_family_stem(v4, "layers.3.ffn.experts.17.w4.weight"));
    cr_expect_not(numoe_family_stem(v4, "layers.3.ffn.gate.weight"));
    for (f = 0; (family = numoe_family_at(f)); f++) {
        unsigned t, count = family->supported ? numoe_family_tensors(family, true) : 0;
        for (t = 0; t < count; t++) {
            numoe_family_tensor_name(family, 4, 800, t, name, sizeof name);
            cr_assert_eq(numoe_family_match(family, name, &layer, &expert), (int)t, "%s", name);
            cr_expect(layer == 4 && expert == (numoe_family_stacked(family) ? 0 : 800));
            cr_expect(numoe_family_stem(family, name), "%s", name);
        }
    }
}
