/* Whole loads: every weight of a checkpoint is where the plan wants it, and failures keep nothing.
 */
#include "checkpoint.h"
#include "model.h"
#include "safetensors.h"
#include "synth.h"

#include "base/sanitized.h"
#include "loader_files.h"

#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static char *small(const char *model, uint64_t layers, uint64_t experts, uint64_t shard_bytes)
{
    struct numoe_synth_options options = NUMOE_SYNTH_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    char *directory = files_dir();

    options.model = model;
    options.layers = layers;
    options.experts = experts;
    options.hidden = 96; /* an odd number of tiles */
    options.intermediate = 288;
    options.shard_bytes = shard_bytes;
    options.seed = 11;
    cr_assert_eq(numoe_synth_write(directory, &options, &error), 0, "%s", error.message);
    return directory;
}

/* How contexts divide experts. */
static enum numoe_form form = NUMOE_FORM_EVERY_NODE;

static struct numoe *open_context(const char *topology, uint32_t workers, struct files_log *log)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe *context;

    options.topology = topology;
    options.workers = workers;
    options.form = form;
    if (log)
        options.log = (struct numoe_log){files_log_fn, log};
    cr_assert_eq(numoe_open(&options, &context, &error), 0, "%s: %s", error.where, error.message);
    return context;
}

/* The six tensors of an expert without biases, read plainly. */
static void read_expert(const struct numoe_checkpoint *checkpoint, uint64_t layer, uint64_t expert,
                        uint8_t *parts[NUMOE_PART_COUNT])
{
    struct numoe_extent extents[NUMOE_PART_COUNT];
    unsigned i;

    numoe_checkpoint_expert(checkpoint, layer, expert, extents);
    for (i = 0; i < NUMOE_PART_GATE_BIAS; i++) {
        int fd =
            open(numoe_checkpoint_file(checkpoint, extents[i].file, NULL), O_RDONLY | O_CLOEXEC);
        parts[i] = malloc(extents[i].bytes);
        cr_assert_eq(pread(fd, parts[i], extents[i].bytes, (off_t)extents[i].offset),
                     (ssize_t)extents[i].bytes);
        close(fd);
    }
}

static void check_weight(const struct numoe_slice_shape *shape, const void *slice,
                         enum numoe_matrix matrix, uint64_t slice_row, uint64_t slice_k,
                         uint8_t *const parts[NUMOE_PART_COUNT], uint64_t row, uint64_t k,
                         uint64_t columns)
{
    unsigned code, scale, want;

    numoe_slice_weight(shape, slice, matrix, slice_row, slice_k, &code, &scale);
    want = parts[2 * matrix][row * columns / 2 + k / 2] >> 4 * (k % 2) & 15;
    cr_assert_eq(code, want, "matrix %d row %llu column %llu: code %u, not %u", (int)matrix,
                 (unsigned long long)row, (unsigned long long)k, code, want);
    want = parts[2 * matrix + 1][row * columns / 32 + k / 32];
    cr_assert_eq(scale, want, "matrix %d row %llu column %llu: scale %u, not %u", (int)matrix,
                 (unsigned long long)row, (unsigned long long)k, scale, want);
}

static void check_expert(const struct numoe_model *model, const struct numoe_checkpoint *checkpoint,
                         uint64_t layer, uint64_t expert)
{
    const struct numoe_slice_shape *shape = numoe_model_shape(model);
    const struct numoe_model_desc *desc = numoe_checkpoint_desc(checkpoint);
    const struct numoe_plan *plan = numoe_model_plan(model);
    uint8_t *parts[NUMOE_PART_COUNT];
    uint64_t seen = 0, first, count, s, r, k;
    uint32_t node;

    read_expert(checkpoint, layer, expert, parts);
    for (node = 0; node < plan->node_count; node++) {
        const uint8_t *run = numoe_model_run(model, layer, expert, node, &first, &count);
        for (s = 0; s < count; s++, seen++) {
            const void *slice = run + s * shape->bytes;
            uint64_t at = 32 * (first + s);
            cr_assert_eq(first + s, seen);
            for (r = 0; r < 32; r++)
                for (k = 0; k < desc->hidden; k++) {
                    check_weight(shape, slice, NUMOE_GATE, r, k, parts, at + r, k, desc->hidden);
                    check_weight(shape, slice, NUMOE_UP, r, k, parts, at + r, k, desc->hidden);
                }
            for (r = 0; r < desc->hidden; r++)
                for (k = 0; k < 32; k++)
                    check_weight(shape, slice, NUMOE_DOWN, r, k, parts, r, at + k,
                                 desc->intermediate);
        }
    }
    cr_assert_eq(seen, desc->intermediate / 32);
    for (s = 0; s < NUMOE_PART_GATE_BIAS; s++)
        free(parts[s]);
}

/* Load in one way and compare all of it. */
static void load_by(enum numoe_read_way way, const char *directory, const char *topology,
                    uint32_t workers, const char *family)
{
    struct numoe_load_options options = NUMOE_LOAD_OPTIONS_INIT;
    struct files_log log = {0};
    struct numoe *context = open_context(topology, workers, &log);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model_info info = {.size = sizeof info};
    struct numoe_checkpoint *checkpoint;
    const struct numoe_model_desc *desc;
    struct numoe_model *model;
    uint64_t layer, expert;
    int before = files_open_now();

    options.read = way;
    cr_assert_eq(numoe_model_load(context, directory, &options, &model, &error), 0, "%s: %s",
                 error.where, error.message);
    cr_expect_eq(files_open_now(), before);
    cr_assert_eq(numoe_checkpoint_open(directory, NULL, &checkpoint, NULL), 0);
    desc = numoe_checkpoint_desc(checkpoint);
    for (layer = 0; layer < desc->layers; layer++)
        for (expert = 0; expert < desc->experts; expert++)
            check_expert(model, checkpoint, layer, expert);
    cr_assert_eq(numoe_model_info(model, &info), 0);
    cr_expect_str_eq(info.family, family);
    cr_expect_eq(info.checkpoint_bytes, numoe_checkpoint_bytes(checkpoint));
    cr_expect_eq(info.desc.layers, desc->layers);
    cr_expect(info.load_seconds > 0);
    if (way == NUMOE_READ_CACHED) {
        cr_expect_str_eq(info.io_path, "plain reads");
        cr_expect_eq(info.read_depth, 0);
        cr_expect_eq(info.meanwhile_seconds, 0);
    } else {
        cr_expect(info.meanwhile_seconds > 0 && info.meanwhile_seconds < info.placing_seconds);
        cr_expect(!strncmp(info.io_path, "io_uring", 8) || !strcmp(info.io_path, "pread"), "%s",
                  info.io_path);
        cr_expect_eq(info.read_depth, 16);
        cr_expect_eq(info.read_block_bytes, 2 << 20);
    }
    cr_expect(info.resident_seconds > 0 && info.placing_seconds > 0);
    cr_expect(info.resident_seconds + info.placing_seconds < info.load_seconds);
    numoe_checkpoint_close(checkpoint);
    numoe_model_destroy(model);
    numoe_close(context);
}

static void load_and_check(const char *directory, const char *topology, uint32_t workers,
                           const char *family)
{
    load_by(NUMOE_READ_CACHED, directory, topology, workers, family);
    load_by(NUMOE_READ_DISK, directory, topology, workers, family);
}

/* Pages of a node's memory, and how many of them are resident. */
static uint64_t count_pages(const struct numoe_model *model, uint32_t node, uint64_t *resident)
{
    const struct numoe_memory *memory = numoe_model_memory(model, node);
    const uint64_t pages = (numoe_memory_bytes(memory) + 4095) / 4096;
    unsigned char *seen = malloc(pages);

    cr_assert_eq(mincore(numoe_memory_address(memory), pages * 4096, seen), 0);
    *resident = 0;
    for (uint64_t i = 0; i < pages; i++)
        *resident += seen[i] & 1;
    free(seen);
    return pages;
}

/* Memory of many chunks, of two nodes: what is made resident on the way and what is made so before
 * come to the same. */
Test(load, memory_is_made_resident_on_the_way, .timeout = 120)
{
    struct numoe_synth_options synth = NUMOE_SYNTH_OPTIONS_INIT;
    struct numoe_load_options options = NUMOE_LOAD_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe *context = open_context("numa:2(memory=1GiB) core:2 pu:1", 3, NULL);
    struct numoe_model *models[2]; /* by plain reads, and past the page cache */
    char *directory = files_dir();

    synth.model = "gpt-oss-20b";
    synth.layers = 2;
    synth.experts = 20;
    synth.hidden = 512;
    synth.intermediate = 2048;
    cr_assert_eq(numoe_synth_write(directory, &synth, &error), 0, "%s", error.message);
    for (unsigned m = 0; m < 2; m++) {
        options.read = m ? NUMOE_READ_DISK : NUMOE_READ_CACHED;
        cr_assert_eq(numoe_model_load(context, directory, &options, &models[m], &error), 0, "%s",
                     error.message);
        for (uint32_t node = 0; node < 2; node++) {
            uint64_t resident, pages = count_pages(models[m], node, &resident);

            cr_expect_gt(pages, 3 * (8 << 20) / 4096);
            cr_expect_eq(resident, pages, "model %u node %u: %llu of %llu pages", m, node,
                         (unsigned long long)resident, (unsigned long long)pages);
        }
    }
    for (uint32_t node = 0; node < 2; node++)
        cr_expect(!memcmp(numoe_memory_address(numoe_model_memory(models[0], node)),
                          numoe_memory_address(numoe_model_memory(models[1], node)),
                          numoe_memory_bytes(numoe_model_memory(models[0], node))));
    for (unsigned m = 0; m < 2; m++)
        numoe_model_destroy(models[m]);
    numoe_close(context);
    files_drop(directory);
}

/* Without the privilege to lock memory beyond the limit. */
static void drop_ipc_lock(void)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];

    cr_assert_eq(syscall(SYS_capget, &header, data), 0);
    data[0].effective &= ~(1u << CAP_IPC_LOCK);
    data[0].permitted &= ~(1u << CAP_IPC_LOCK);
    cr_assert_eq(syscall(SYS_capset, &header, data), 0);
}

/* Case E5: what may not be locked is not registered, and the load goes on. */
Test(load, a_limit_of_locked_memory_changes_no_byte, .timeout = 60)
{
    static const uint64_t limits[] = {8 << 20, 64 << 10, 0};
    char *directory = small("v4-flash", 2, 24, 100000);
    struct numoe_load_options options = NUMOE_LOAD_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model_info info = NUMOE_MODEL_INFO_INIT;
    struct files_log log = {0};
    struct numoe *context = open_context(NULL, 0, &log);
    struct numoe_model *whole, *model;

    options.read = NUMOE_READ_DISK;
    cr_assert_eq(numoe_model_load(context, directory, &options, &whole, &error), 0, "%s",
                 error.message);
    drop_ipc_lock();
    for (unsigned i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        const struct rlimit limit = {limits[i], limits[i]};

        cr_assert_eq(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
        log = (struct files_log){0};
        cr_assert_eq(numoe_model_load(context, directory, &options, &model, &error), 0, "%s",
                     error.message);
        cr_assert_eq(numoe_model_info(model, &info), 0);
        if (limits[i] < 1 << 20 && !strncmp(info.io_path, "io_uring", 8)) {
            char words[64];

            expect_text(log.text, "of buffers are not registered with io_uring: Cannot allocate");
            snprintf(words, sizeof words, ": no more than %llu KiB may be locked (ulimit -l)",
                     (unsigned long long)(limits[i] >> 10));
            expect_text(log.text, words);
        }
        for (uint32_t node = 0; node < numoe_model_plan(whole)->node_count; node++)
            cr_expect(!memcmp(numoe_memory_address(numoe_model_memory(whole, node)),
                              numoe_memory_address(numoe_model_memory(model, node)),
                              numoe_memory_bytes(numoe_model_memory(whole, node))));
        numoe_model_destroy(model);
    }
    numoe_model_destroy(whole);
    numoe_close(context);
    files_drop(directory);
}

/* From now on, in this process, what is left of memory is not to be had. */
static void refuse_populating(int error)
{
    struct sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MADV_POPULATE_WRITE, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof program / sizeof program[0], program};

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
        syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter))
        cr_skip_test("no seccomp filters here");
}

/* What is made resident before anything is read is: so what is refused is needed on the way. */
static int refuse_after_memory(void *user, const struct numoe_load_progress *progress)
{
    (void)user;
    if (progress->stage == NUMOE_LOAD_MEMORY && progress->bytes_done == progress->bytes_total)
        refuse_populating(ENOMEM);
    return 0;
}

/* Memory that goes while files are read is an error, and neither a signal nor a model. */
Test(load, memory_that_is_gone_on_the_way_is_an_error, .timeout = 60)
{
    char *directory = small("v4-flash", 2, 5, 60000);
    struct numoe *context = open_context("numa:2(memory=1GiB) core:2 pu:1", 3, NULL);
    struct numoe_load_options options = NUMOE_LOAD_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *model = NULL;
    int before = files_open_now();

    options.read = NUMOE_READ_DISK;
    options.progress = refuse_after_memory;
    cr_expect_eq(numoe_model_load(context, directory, &options, &model, &error), -ENOMEM, "%s",
                 error.message);
    expect_text(error.message, "could not be made resident");
    cr_expect_null(model);
    cr_expect_eq(files_open_now(), before);
    numoe_close(context);
    files_drop(directory);
}

/* All experts count as loaded: a call that uses each misses none. */
Test(load, every_expert_is_present, .timeout = 60)
{
    char *directory = small("v4-flash", 2, 24, 100000);
    struct numoe *context = open_context(NULL, 0, NULL);
    struct numoe_model *model;
    struct numoe_batch batch = NUMOE_BATCH_INIT;
    struct numoe_result result = NUMOE_RESULT_INIT;
    int32_t ids[24];
    float x[96], weights[24], out[96];
    uint64_t layer;
    unsigned i;

    cr_assert_eq(numoe_model_load(context, directory, NULL, &model, NULL), 0);
    for (i = 0; i < 96; i++)
        x[i] = (float)(i % 7) - 3;
    for (i = 0; i < 24; i++) {
        ids[i] = (int32_t)i;
        weights[i] = 1;
    }
    batch.tokens = 1;
    batch.top_k = 24;
    batch.x = x;
    batch.x_type = batch.out_type = NUMOE_F32;
    batch.ids = ids;
    batch.weights = weights;
    batch.out = out;
    for (layer = 0; layer < 2; layer++) {
        cr_assert_eq(numoe_forward(model, layer, &batch, &result, NULL), 0);
        cr_expect_eq(result.missing, 0);
        cr_expect_eq(result.experts_hit, 24);
    }
    numoe_model_destroy(model);
    numoe_close(context);
    files_drop(directory);
}

/* With room for one expert at a time, reading and packing take turns. */
Test(load, any_number_of_buffers_will_do, .timeout = 60)
{
    char *directory = small("v4-flash", 2, 5, 60000);
    struct numoe *context = open_context(NULL, 0, NULL);
    struct numoe_load_options options = NUMOE_LOAD_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model_info info = {.size = sizeof info};
    struct numoe_model *model;

    options.read = NUMOE_READ_DISK;
    for (options.buffer_bytes = 1; options.buffer_bytes; options.buffer_bytes *= 32) {
        cr_assert_eq(numoe_model_load(context, directory, &options, &model, &error), 0, "%s",
                     error.message);
        cr_assert_eq(numoe_model_info(model, &info), 0);
        cr_expect_eq(info.checkpoint_bytes, 10 * 3 * 96 * 288 * 17 / 32);
        numoe_model_destroy(model);
    }
    numoe_close(context);
    files_drop(directory);
}

struct held {
    uint64_t resident_kib, pinned_kib, maps;
};

static struct held held_now(void)
{
    struct held held = {0};
    char line[512];
    FILE *file = fopen("/proc/self/status", "r");

    while (fgets(line, sizeof line, file))
        if (!strncmp(line, "VmRSS:", 6))
            held.resident_kib = strtoull(line + 6, NULL, 10);
        else if (!strncmp(line, "VmPin:", 6))
            held.pinned_kib = strtoull(line + 6, NULL, 10);
    fclose(file);
    file = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, file))
        held.maps++;
    fclose(file);
    return held;
}

/* Everything is given back: 3 MiB of weights, buffers of 1.6 MiB and a context, 200 times. */
Test(load, two_hundred_times_leave_nothing, .timeout = 120)
{
    char *directory = small("v4-flash", 2, 64, 1ull << 40);
    struct held before = {0}, after;
    int files = 0;

    for (int i = 0; i < 220; i++) {
        struct numoe *context = open_context("numa:2(memory=1GiB) core:2 pu:1", 2, NULL);
        struct numoe_load_options options = NUMOE_LOAD_OPTIONS_INIT;
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_model *model;

        options.read = i % 2 ? NUMOE_READ_DISK : NUMOE_READ_CACHED;
        cr_assert_eq(numoe_model_load(context, directory, &options, &model, &error), 0, "%s",
                     error.message);
        /* what io_uring holds of buffers it holds no longer than the load lasts */
        cr_assert_eq(held_now().pinned_kib, 0, "load %d", i);
        numoe_model_destroy(model);
        numoe_close(context);
        if (i == 19) { /* after what libraries keep from their first use */
            before = held_now();
            files = files_open_now();
        }
    }
    after = held_now();
    cr_expect_eq(files_open_now(), files);
    if (!SANITIZED) {
        cr_expect_leq(after.resident_kib, before.resident_kib + 1024, "%llu KiB, before %llu",
                      (unsigned long long)after.resident_kib,
                      (unsigned long long)before.resident_kib);
        cr_expect_leq(after.maps, before.maps + 2, "%llu mappings, before %llu",
                      (unsigned long long)after.maps, (unsigned long long)before.maps);
    }
    files_drop(directory);
}

Test(load, v4_lands_where_the_plan_says, .timeout = 120)
{
    char *directory = small("v4-flash", 2, 5, 60000);

    load_and_check(directory, NULL, 0, "deepseek-v4");
    for (form = NUMOE_FORM_AUTO; form <= NUMOE_FORM_EXPERTS; form++) {
        load_and_check(directory, "numa:4(memory=1GiB) core:2 pu:1", 3, "deepseek-v4");
        load_and_check(directory, "pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2", 5, "deepseek-v4");
    }
    files_drop(directory);
}

Test(load, k3_counts_its_layers_from_one, .timeout = 120)
{
    char *directory = small("kimi-k3", 2, 17, 1ull << 40);

    load_and_check(directory, "numa:3(memory=1GiB) core:1 pu:1", 0, "kimi-k3");
    files_drop(directory);
}

/* Rewrite a checkpoint with its tensors in random order over three shards, at odd offsets. */
static void scatter(const char *directory)
{
    struct numoe_tensors *tensors;
    uint64_t count, *order, i, state = 5;
    char name[64], *index = NULL;
    size_t index_bytes;
    FILE *stream = open_memstream(&index, &index_bytes);
    unsigned shard;

    cr_assert_eq(numoe_tensors_create(&tensors, NULL), 0);
    cr_assert_eq(numoe_tensors_read(tensors,
                                    files_at(directory, "model-00001-of-00001.safetensors"), 0,
                                    NULL, NULL),
                 0);
    count = numoe_tensors_count(tensors);
    order = malloc(count * sizeof *order);
    for (i = 0; i < count; i++) {
        uint64_t j;
        state = state * 6364136223846793005u + 1442695040888963407u;
        j = (state >> 33) % (i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    fprintf(stream, "{\"weight_map\":{");
    for (shard = 0; shard < 3; shard++) {
        char *header = NULL;
        size_t header_bytes, used = 1 + shard;
        FILE *text = open_memstream(&header, &header_bytes);
        size_t whole;
        char *from = files_get(files_at(directory, "model-00001-of-00001.safetensors"), &whole);
        char *data = malloc(whole + 8);

        /* A few bytes in front make every offset odd. */
        fprintf(text, "{\"pad%u\":{\"dtype\":\"U8\",\"shape\":[%u],\"data_offsets\":[0,%u]}", shard,
                shard + 1, shard + 1);
        memset(data, 0, 4);
        fprintf(stream, "%s\"pad%u\":\"s%u.safetensors\"", shard ? "," : "", shard, shard);
        for (i = shard; i < count; i += 3) {
            const struct numoe_tensor *t = numoe_tensors_at(tensors, order[i]);
            uint64_t bytes = t->end - t->begin, d;
            fprintf(text, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name,
                    numoe_dtype_name(t->dtype));
            for (d = 0; d < t->rank; d++)
                fprintf(text, "%s%llu", d ? "," : "", (unsigned long long)t->shape[d]);
            fprintf(text, "],\"data_offsets\":[%zu,%zu]}", used, used + bytes);
            memcpy(data + used, from + t->begin, bytes);
            used += bytes;
            fprintf(stream, ",\"%s\":\"s%u.safetensors\"", t->name, shard);
        }
        fputc('}', text);
        fclose(text);
        snprintf(name, sizeof name, "s%u.safetensors", shard);
        files_put_tensors(files_at(directory, name), header, header_bytes, data, used);
        free(header);
        free(data);
        free(from);
    }
    fprintf(stream, "}}");
    fclose(stream);
    files_put(files_at(directory, "model.safetensors.index.json"), index, index_bytes);
    unlink(files_at(directory, "model-00001-of-00001.safetensors"));
    free(index);
    free(order);
    numoe_tensors_destroy(tensors);
}

Test(load, tensors_in_any_order_over_any_files, .timeout = 120)
{
    char *directory = small("v4-flash", 2, 5, 1ull << 40);

    scatter(directory);
    load_and_check(directory, "numa:2(memory=1GiB) core:2 pu:1", 2, "deepseek-v4");
    files_drop(directory);
}

Test(load, a_scale_that_is_no_number_is_refused_by_its_place, .timeout = 60)
{
    static const struct {
        enum numoe_part part;
        uint64_t row, group, groups;
        const char *words;
    } cases[] = {
        {NUMOE_PART_GATE_SCALES, 287, 2, 3,
         "tensor \"layers.1.ffn.experts.3.w1.scale\": the scale byte of row 287, group 2 is 255"},
        {NUMOE_PART_UP_SCALES, 0, 0, 3,
         "tensor \"layers.1.ffn.experts.3.w3.scale\": the scale byte of row 0, group 0 is 255"},
        {NUMOE_PART_DOWN_SCALES, 95, 8, 9,
         "tensor \"layers.1.ffn.experts.3.w2.scale\": the scale byte of row 95, group 8 is 255"},
    };
    unsigned i;

    for (i = 0; i < 3; i++) {
        char *directory = small("v4-flash", 2, 5, 60000);
        struct numoe *context = open_context("numa:3(memory=1GiB) core:1 pu:1", 3, NULL);
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_extent parts[NUMOE_PART_COUNT];
        struct numoe_checkpoint *checkpoint;
        struct numoe_model *model = NULL;
        const uint8_t bad = 255;
        int fd, before = files_open_now();

        cr_assert_eq(numoe_checkpoint_open(directory, NULL, &checkpoint, NULL), 0);
        numoe_checkpoint_expert(checkpoint, 1, 3, parts);
        fd = open(numoe_checkpoint_file(checkpoint, parts[cases[i].part].file, NULL),
                  O_WRONLY | O_CLOEXEC);
        cr_assert_eq(pwrite(fd, &bad, 1,
                            (off_t)(parts[cases[i].part].offset + cases[i].row * cases[i].groups +
                                    cases[i].group)),
                     1);
        close(fd);
        for (unsigned way = NUMOE_READ_AUTO; way <= NUMOE_READ_CACHED; way++) {
            struct numoe_load_options options = NUMOE_LOAD_OPTIONS_INIT;

            options.read = (enum numoe_read_way)way;
            error = (struct numoe_error)NUMOE_ERROR_INIT;
            cr_expect_eq(numoe_model_load(context, directory, &options, &model, &error), -EBADMSG);
            expect_text(error.message, cases[i].words);
            expect_text(error.where,
                        numoe_checkpoint_file(checkpoint, parts[cases[i].part].file, NULL));
            cr_expect_null(model);
        }
        numoe_checkpoint_close(checkpoint);
        cr_expect_eq(files_open_now(), before);
        numoe_close(context);
        files_drop(directory);
    }
}

struct told {
    unsigned calls;
    struct numoe_load_progress last;
    enum numoe_load_stage cancel_at;
    bool cancel;
};

static int tell(void *user, const struct numoe_load_progress *progress)
{
    struct told *told = user;

    cr_assert(progress->stage >= told->last.stage);
    cr_assert(progress->stage > told->last.stage || progress->bytes_done >= told->last.bytes_done);
    cr_assert(progress->bytes_done <= progress->bytes_total);
    told->calls++;
    told->last = *progress;
    return told->cancel && progress->stage == told->cancel_at;
}

Test(load, progress_ends_at_the_whole_and_can_cancel, .timeout = 60)
{
    char *directory = small("v4-flash", 2, 5, 60000);
    struct numoe *context = open_context(NULL, 0, NULL);
    struct numoe_load_options options = NUMOE_LOAD_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model_info info = {.size = sizeof info};
    struct numoe_model *model = NULL;
    struct told told = {0};
    int before = files_open_now();

    options.progress = tell;
    options.user = &told;
    options.arithmetic = NUMOE_EXACT;
    cr_assert_eq(numoe_model_load(context, directory, &options, &model, &error), 0, "%s",
                 error.message);
    cr_expect(told.calls >= 1);
    cr_expect_eq(told.last.bytes_done, 10 * 3 * 96 * 288 * 17 / 32);
    cr_expect_eq(told.last.bytes_total, told.last.bytes_done);
    cr_assert_eq(numoe_model_info(model, &info), 0);
    cr_expect_eq(info.desc.arithmetic, NUMOE_EXACT);
    numoe_model_destroy(model);
    model = NULL;
    options.checksum = true;
    for (unsigned way = NUMOE_READ_AUTO; way <= NUMOE_READ_CACHED; way++)
        for (unsigned stage = NUMOE_LOAD_MEMORY; stage <= NUMOE_LOAD_CHECKSUMS; stage++) {
            static const char *const words[] = {"making memory resident was cancelled after",
                                                "loading was cancelled after",
                                                "taking checksums was cancelled after"};

            options.read = (enum numoe_read_way)way;
            told = (struct told){.cancel = true, .cancel_at = (enum numoe_load_stage)stage};
            cr_expect_eq(numoe_model_load(context, directory, &options, &model, &error),
                         -ECANCELED);
            expect_text(error.message, words[stage]);
            expect_text(error.where, directory);
            cr_expect_null(model);
            cr_expect_eq(files_open_now(), before);
        }
    numoe_close(context);
    files_drop(directory);
}

Test(load, what_cannot_be_loaded_keeps_nothing, .timeout = 60)
{
    char *directory = small("v4-flash", 2, 5, 60000);
    struct numoe *context = open_context(NULL, 0, NULL), *tiny;
    struct numoe_load_options options = NUMOE_LOAD_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *model = NULL;
    int before = files_open_now();

    cr_expect_eq(numoe_model_load(NULL, directory, NULL, &model, &error), -EINVAL);
    cr_expect_eq(numoe_model_load(context, NULL, NULL, &model, &error), -EINVAL);
    cr_expect_eq(numoe_model_load(context, "", NULL, &model, &error), -EINVAL);
    cr_expect_eq(numoe_model_load(context, directory, NULL, NULL, &error), -EINVAL);
    cr_expect_eq(numoe_model_load(context, files_at(directory, "none"), NULL, &model, &error),
                 -ENOENT);
    options.arithmetic = 77;
    cr_expect_eq(numoe_model_load(context, directory, &options, &model, &error), -EINVAL);
    options = (struct numoe_load_options){0};
    cr_expect_eq(numoe_model_load(context, directory, &options, &model, &error), -EINVAL);

    tiny = open_context("numa:2(memory=128KB) core:1 pu:1", 0, NULL);
    cr_expect_eq(numoe_model_load(tiny, directory, NULL, &model, &error), -ENOSPC, "%s",
                 error.message);
    numoe_close(tiny);

    cr_assert_eq(unlink(files_at(directory, "model-00002-of-00008.safetensors")), 0);
    cr_expect_eq(numoe_model_load(context, directory, NULL, &model, &error), -ENOENT);
    expect_text(error.message, "model-00002-of-00008.safetensors");
    cr_expect_null(model);
    cr_expect_eq(files_open_now(), before);
    numoe_close(context);
    files_drop(directory);
}
