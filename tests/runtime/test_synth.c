/* Made-up checkpoints: what is written, that it is repeatable, and what is never overwritten. */
#include "checkpoint.h"
#include "loader_files.h"
#include "safetensors.h"
#include "synth.h"

static struct numoe_synth_options small(uint64_t seed)
{
    struct numoe_synth_options options = NUMOE_SYNTH_OPTIONS_INIT;

    options.model = "v4-flash";
    options.layers = 2;
    options.experts = 6;
    options.hidden = 256;
    options.intermediate = 160;
    options.seed = seed;
    options.shard_bytes = 200000;
    return options;
}

static void write_one(const char *directory, const struct numoe_synth_options *options)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_assert_eq(numoe_synth_write(directory, options, &error), 0, "%s: %s", error.where,
                 error.message);
}

static int count_files(const char *directory)
{
    DIR *opened = opendir(directory);
    struct dirent *entry;
    int count = 0;

    while (opened && (entry = readdir(opened)))
        count += entry->d_name[0] != '.';
    if (opened)
        closedir(opened);
    return count;
}

/* The bytes of one tensor of a checkpoint written here, whichever shard it is in. */
static uint8_t *tensor_bytes(const char *directory, const char *name, uint64_t *bytes)
{
    struct numoe_tensors *tensors;
    const struct numoe_tensor *tensor = NULL;
    DIR *opened = opendir(directory);
    struct dirent *entry;
    uint8_t *out = NULL;

    while (!out && (entry = readdir(opened))) {
        const char *path = files_at(directory, entry->d_name);
        if (!strstr(entry->d_name, ".safetensors") || strstr(entry->d_name, ".json"))
            continue;
        cr_assert_eq(numoe_tensors_create(&tensors, NULL), 0);
        cr_assert_eq(numoe_tensors_read(tensors, path, 0, NULL, NULL), 0);
        tensor = numoe_tensors_find(tensors, name, 0);
        if (tensor) {
            int fd = open(path, O_RDONLY | O_CLOEXEC);
            *bytes = tensor->end - tensor->begin;
            out = malloc(*bytes);
            cr_assert_eq(pread(fd, out, *bytes, (off_t)tensor->begin), (ssize_t)*bytes);
            close(fd);
        }
        numoe_tensors_destroy(tensors);
    }
    closedir(opened);
    cr_assert_not_null(out, "%s", name);
    return out;
}

static bool same_tensor(const char *a, const char *b, const char *name)
{
    uint64_t m, n;
    uint8_t *x = tensor_bytes(a, name, &m), *y = tensor_bytes(b, name, &n);
    bool same = m == n && !memcmp(x, y, m);

    free(x);
    free(y);
    return same;
}

Test(synth, what_is_written_opens_with_the_right_shapes, .timeout = 30)
{
    static const char *const models[] = {"v4-flash", "v4-pro", "kimi-k3"};
    unsigned i;

    for (i = 0; i < 3; i++) {
        struct numoe_synth_options options = small(7);
        struct numoe_checkpoint *checkpoint;
        struct numoe_error error = NUMOE_ERROR_INIT;
        const struct numoe_model_desc *desc;
        struct files_log log = {0};
        struct numoe_log sink = {files_log_fn, &log};
        char *directory = files_dir();
        int before = files_open_now();

        options.model = models[i];
        write_one(directory, &options);
        cr_expect_eq(files_open_now(), before);
        options.model = models[i];
        cr_assert_eq(numoe_checkpoint_open(directory,
                                           &(struct numoe_checkpoint_options){.log = &sink},
                                           &checkpoint, &error),
                     0, "%s", error.message);
        desc = numoe_checkpoint_desc(checkpoint);
        cr_expect(desc->layers == 2 && desc->experts == 6 && desc->hidden == 256 &&
                  desc->intermediate == 160 && desc->experts_per_token == 6);
        cr_expect_eq(log.count, 0, "%s", log.text);
        cr_expect(numoe_checkpoint_file_count(checkpoint) > 1);
        numoe_checkpoint_close(checkpoint);
        files_drop(directory);
    }
}

Test(synth, names_and_types_are_the_models_own, .timeout = 30)
{
    struct numoe_synth_options options = small(7);
    struct numoe_tensors *tensors;
    const struct numoe_tensor *t;
    char *directory = files_dir();

    options.shard_bytes = 1ull << 40;
    write_one(directory, &options);
    cr_assert_eq(numoe_tensors_create(&tensors, NULL), 0);
    cr_assert_eq(numoe_tensors_read(tensors,
                                    files_at(directory, "model-00001-of-00001.safetensors"), 0,
                                    NULL, NULL),
                 0);
    cr_expect_eq(numoe_tensors_count(tensors), 2 * (3 + 36));
    t = numoe_tensors_find(tensors, "layers.1.ffn.experts.5.w2.weight", 0);
    cr_assert_not_null(t);
    cr_expect(t->dtype == NUMOE_DTYPE_I8 && t->shape[0] == 256 && t->shape[1] == 80);
    t = numoe_tensors_find(tensors, "layers.1.ffn.experts.5.w3.scale", 0);
    cr_assert_not_null(t);
    cr_expect(t->dtype == NUMOE_DTYPE_F8_E8M0 && t->shape[0] == 160 && t->shape[1] == 8);
    t = numoe_tensors_find(tensors, "layers.0.ffn.gate.weight", 0);
    cr_assert_not_null(t);
    cr_expect(t->dtype == NUMOE_DTYPE_BF16 && t->shape[0] == 6 && t->shape[1] == 256);
    numoe_tensors_destroy(tensors);
    files_drop(directory);

    options.model = "kimi-k3";
    directory = files_dir();
    write_one(directory, &options);
    cr_assert_eq(numoe_tensors_create(&tensors, NULL), 0);
    cr_assert_eq(numoe_tensors_read(tensors,
                                    files_at(directory, "model-00001-of-00001.safetensors"), 0,
                                    NULL, NULL),
                 0);
    /* Layer 0 of the model is dense. */
    t = numoe_tensors_find(
        tensors, "language_model.model.layers.2.block_sparse_moe.experts.0.w1.weight_packed", 0);
    cr_assert_not_null(t);
    cr_expect(t->dtype == NUMOE_DTYPE_U8);
    cr_expect_null(numoe_tensors_find(
        tensors, "language_model.model.layers.0.block_sparse_moe.experts.0.w1.weight_packed", 0));
    numoe_tensors_destroy(tensors);
    files_drop(directory);
}

Test(synth, bytes_depend_on_seed_and_place_only, .timeout = 30)
{
    static const char *const names[] = {
        "layers.0.ffn.experts.0.w1.weight", "layers.0.ffn.experts.3.w2.scale",
        "layers.1.ffn.experts.2.w3.weight", "layers.1.ffn.gate.weight"};
    struct numoe_synth_options options = small(1);
    char *a = files_dir(), *b = files_dir(), *c = files_dir(), *d = files_dir();
    unsigned i;

    write_one(a, &options);
    write_one(b, &options);
    options.seed = 2;
    write_one(c, &options);
    /* Other shards, fewer experts: the tensors that are there stay as they are. */
    options = small(1);
    options.experts = 4;
    options.shard_bytes = 50000;
    write_one(d, &options);
    for (i = 0; i < 4; i++) {
        cr_expect(same_tensor(a, b, names[i]), "%s", names[i]);
        cr_expect(!same_tensor(a, c, names[i]), "%s", names[i]);
        if (i < 3)
            cr_expect(same_tensor(a, d, names[i]), "%s", names[i]);
    }
    cr_expect(count_files(d) > count_files(a));
    files_drop(a);
    files_drop(b);
    files_drop(c);
    files_drop(d);
}

Test(synth, different_tensors_have_different_bytes, .timeout = 30)
{
    static const char *const names[] = {
        "layers.0.ffn.experts.0.w1.weight", "layers.0.ffn.experts.0.w3.weight",
        "layers.0.ffn.experts.0.w2.weight", "layers.0.ffn.experts.1.w1.weight",
        "layers.1.ffn.experts.0.w1.weight"};
    struct numoe_synth_options options = small(1);
    char *directory = files_dir();
    uint8_t *bytes[5];
    uint64_t count;
    unsigned i, j;

    write_one(directory, &options);
    for (i = 0; i < 5; i++)
        bytes[i] = tensor_bytes(directory, names[i], &count);
    for (i = 0; i < 5; i++)
        for (j = 0; j < i; j++)
            cr_expect(memcmp(bytes[i], bytes[j], 4096), "%s %s", names[i], names[j]);
    for (i = 0; i < 5; i++)
        free(bytes[i]);
    files_drop(directory);
}

Test(synth, weights_are_spread_as_real_ones, .timeout = 30)
{
    struct numoe_synth_options options = small(3);
    char *directory = files_dir();
    uint64_t count, scale_count, i, histogram[16] = {0}, scales_seen[256] = {0}, low = 0, high = 0;
    uint8_t *codes, *scales;
    double share_of_zero, mean = 0;
    unsigned row;

    options.layers = 1;
    options.experts = 1;
    options.hidden = 4096;
    options.intermediate = 2048;
    write_one(directory, &options);
    codes = tensor_bytes(directory, "layers.0.ffn.experts.0.w1.weight", &count);
    scales = tensor_bytes(directory, "layers.0.ffn.experts.0.w1.scale", &scale_count);
    cr_assert_eq(scale_count * 16, count);
    for (i = 0; i < scale_count; i++) {
        static const uint8_t zeros[16];
        bool zero = !memcmp(codes + 16 * i, zeros, 16);
        scales_seen[scales[i]]++;
        /* Groups of zeros carry scale byte 0, and no others do. */
        cr_assert_eq(scales[i] == 0, zero, "group %llu", (unsigned long long)i);
    }
    for (i = 0; i < count; i++) {
        static const double values[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
        unsigned code = codes[i] & 15;
        histogram[code]++;
        histogram[codes[i] >> 4]++;
        mean += (code & 8 ? -1 : 1) * values[code & 7];
    }
    for (i = 0; i < 256; i++)
        if (scales_seen[i])
            cr_expect(i == 0 || (i >= 116 && i <= 123), "scale byte %llu", (unsigned long long)i);
    cr_expect(scales_seen[0] > scale_count / 1000 && scales_seen[0] < scale_count / 250);
    for (row = 0; row < 2048; row++) {
        const uint8_t *r = scales + 128 * row;
        unsigned a = 0, b = 0;
        for (i = 0; i < 128; i++) {
            a += r[i] == 116 || r[i] == 0;
            b += r[i] == 123 || r[i] == 0;
        }
        low += a == 128;
        high += b == 128;
    }
    cr_expect(low >= 4 && low < 60, "%llu", (unsigned long long)low);
    cr_expect(high >= 4 && high < 60, "%llu", (unsigned long long)high);
    share_of_zero = (double)(histogram[0] + histogram[8]) / (2.0 * (double)count);
    cr_expect(share_of_zero > 0.07 && share_of_zero < 0.11, "%g", share_of_zero);
    for (i = 0; i < 16; i++)
        cr_expect(histogram[i] > count / 50, "code %llu", (unsigned long long)i);
    cr_expect(mean / (double)count < 0.01 && mean / (double)count > -0.01);
    free(codes);
    free(scales);
    files_drop(directory);
}

Test(synth, replaces_its_own_output_and_nothing_else, .timeout = 30)
{
    struct numoe_synth_options options = small(1);
    struct numoe_error error = NUMOE_ERROR_INIT;
    char *directory = files_dir();
    int files;

    write_one(directory, &options);
    files = count_files(directory);
    options.shard_bytes = 1ull << 40;
    write_one(directory, &options);
    cr_expect(count_files(directory) < files);
    cr_expect_eq(count_files(directory), 3);
    /* A file of someone else's. */
    files_put(files_at(directory, "notes.txt"), "keep", 4);
    cr_assert_eq(numoe_synth_write(directory, &options, &error), -EEXIST);
    expect_text(error.message, "1 files that are not of an earlier synth: notes.txt");
    cr_expect_eq(count_files(directory), 4);
    unlink(files_at(directory, "notes.txt"));
    /* A checkpoint of the same names without the mark. */
    files_replace(files_at(directory, "config.json"), "numoe_synth", "something");
    cr_assert_eq(numoe_synth_write(directory, &options, &error), -EEXIST);
    expect_text(error.message, "a checkpoint that synth has not written");
    cr_expect_eq(count_files(directory), 3);
    files_drop(directory);
}

static int cancel_midway(void *user, uint64_t done, uint64_t total)
{
    ++*(unsigned *)user;
    return done > total / 2;
}

Test(synth, a_cancelled_output_is_removed, .timeout = 30)
{
    struct numoe_synth_options options = small(1);
    struct numoe_error error = NUMOE_ERROR_INIT;
    char *parent = files_dir(), *directory = strdup(files_at(parent, "made"));
    unsigned calls = 0;
    struct stat status;
    int before = files_open_now();

    options.progress = cancel_midway;
    options.user = &calls;
    cr_assert_eq(numoe_synth_write(directory, &options, &error), -ECANCELED);
    cr_expect(calls > 2);
    cr_expect_neq(stat(directory, &status), 0, "the directory that it made is gone");
    cr_expect_eq(files_open_now(), before);
    free(directory);
    files_drop(parent);
}

Test(synth, what_cannot_be_written_is_refused_by_name, .timeout = 30)
{
    struct numoe_synth_options options = small(1);
    struct numoe_error error = NUMOE_ERROR_INIT;
    char *directory = files_dir();

    options.model = "qwen3-30b";
    cr_expect_eq(numoe_synth_write(directory, &options, &error), -ENOTSUP);
    options.model = "kimi-k3";
    options.layout = NUMOE_SYNTH_GGUF;
    cr_expect_eq(numoe_synth_write(directory, &options, &error), -ENOTSUP);
    expect_text(error.message, "what GGUF files of it are like is not known");
    options.layout = NUMOE_SYNTH_OWN;
    options.draft = true;
    cr_expect_eq(numoe_synth_write(directory, &options, &error), -ENOTSUP);
    expect_text(error.message, "has no draft layers");
    options.draft = false;
    options.model = "v5";
    cr_expect_eq(numoe_synth_write(directory, &options, &error), -EINVAL);
    expect_text(error.message, "known are v4-flash");
    options = small(1);
    options.hidden = 100;
    cr_expect_eq(numoe_synth_write(directory, &options, &error), -EINVAL);
    expect_text(error.message, "multiples of 32");
    options = small(1);
    options.layers = 44;
    cr_expect_eq(numoe_synth_write(directory, &options, &error), -EINVAL);
    expect_text(error.message, "more than the model's 43 of 256");
    options = small(1);
    options.shard_bytes = 0;
    cr_expect_eq(numoe_synth_write(directory, &options, &error), -EINVAL);
    options = small(1);
    cr_expect_eq(numoe_synth_write(files_at(directory, "no/such"), &options, &error), -ENOENT);
    cr_expect_eq(numoe_synth_write(NULL, &options, &error), -EINVAL);
    /* The whole of the largest model does not fit a small disk: said before a byte is written. */
    options = (struct numoe_synth_options)NUMOE_SYNTH_OPTIONS_INIT;
    options.model = "kimi-k3";
    options.intermediate = options.hidden = 1 << 20;
    options.shard_bytes = 1ull << 62;
    cr_expect_eq(numoe_synth_write(directory, &options, &error), -ENOSPC);
    cr_expect_eq(count_files(directory), 0);
    files_drop(directory);
}
