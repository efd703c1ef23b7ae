/* Headers of GGUF files: what is read from sound ones, and what is said of others. */
#include "checkpoint.h"
#include "gguf.h"
#include "synth.h"

#include "loader_files.h"

/* A file that is put together piece by piece. */
struct pieces {
    uint8_t bytes[65536];
    size_t count;
};

static void put_n(struct pieces *p, uint64_t value, unsigned bytes)
{
    for (; bytes; bytes--, value >>= 8)
        p->bytes[p->count++] = (uint8_t)value;
}

static void put_s(struct pieces *p, const char *text)
{
    put_n(p, strlen(text), 8);
    memcpy(p->bytes + p->count, text, strlen(text));
    p->count += strlen(text);
}

static void put_start(struct pieces *p, uint32_t version, uint64_t tensors, uint64_t pairs)
{
    memcpy(p->bytes, "GGUF", 4);
    p->count = 4;
    put_n(p, version, 4);
    put_n(p, tensors, 8);
    put_n(p, pairs, 8);
}

enum { U32 = 4, STRING = 8, ARRAY = 9, U64 = 10 };

static void put_u32(struct pieces *p, const char *key, uint32_t value)
{
    put_s(p, key);
    put_n(p, U32, 4);
    put_n(p, value, 4);
}

static void put_text(struct pieces *p, const char *key, const char *value)
{
    put_s(p, key);
    put_n(p, STRING, 4);
    put_s(p, value);
}

static void put_info(struct pieces *p, const char *name, unsigned rank, uint64_t d0, uint64_t d1,
                     uint64_t d2, uint32_t type, uint64_t offset)
{
    const uint64_t dims[3] = {d0, d1, d2};

    put_s(p, name);
    put_n(p, rank, 4);
    for (unsigned d = 0; d < rank; d++)
        put_n(p, d < 3 ? dims[d] : 1, 8);
    put_n(p, type, 4);
    put_n(p, offset, 8);
}

/* Zeros up to a multiple of 32, and so many more. */
static void put_data(struct pieces *p, size_t bytes)
{
    while (p->count % 32)
        p->bytes[p->count++] = 0;
    memset(p->bytes + p->count, 0, bytes);
    p->count += bytes;
}

struct outcome {
    int code;
    struct numoe_error error;
    struct numoe_tensors *tensors;
    json_t *metadata;
};

static struct outcome read_pieces(const struct pieces *p)
{
    struct outcome out = {.error = NUMOE_ERROR_INIT, .metadata = json_object()};
    char *directory = files_dir();
    int before = files_open_now();

    files_put(files_at(directory, "m.gguf"), p->bytes, p->count);
    cr_assert_eq(numoe_tensors_create(&out.tensors, NULL), 0);
    out.code = numoe_gguf_read(out.tensors, files_at(directory, "m.gguf"), 3, NULL, out.metadata,
                               &out.error);
    cr_expect_eq(files_open_now(), before);
    if (out.code < 0)
        cr_expect_eq(numoe_tensors_count(out.tensors), 0);
    files_drop(directory);
    return out;
}

static void drop(struct outcome *out)
{
    numoe_tensors_destroy(out->tensors);
    json_decref(out->metadata);
}

static void expect_said(const struct pieces *p, int code, const char *words)
{
    struct outcome out = read_pieces(p);

    cr_expect_eq(out.code, code, "%d: %s", out.code, out.error.message);
    expect_text(out.error.message, words);
    drop(&out);
}

/* Version, an architecture, `more` pairs that follow, and tensors after them. */
static void begin(struct pieces *p, uint64_t tensors, uint64_t more)
{
    put_start(p, 3, tensors, 1 + more);
    put_text(p, "general.architecture", "arch");
}

Test(gguf, reads_metadata_types_shapes_and_places, .timeout = 20)
{
    static struct pieces p;
    struct outcome out;
    const struct numoe_tensor *t;
    unsigned version, i;

    for (version = 2; version <= 3; version++) {
        put_start(&p, version, 3, 6);
        put_text(&p, "general.architecture", "arch");
        put_u32(&p, "arch.block_count", 7);
        put_u32(&p, "general.alignment", 64);
        /* A tokeniser: strings, an array of arrays, and one of numbers that is kept. */
        put_s(&p, "tokenizer.tokens");
        put_n(&p, ARRAY, 4);
        put_n(&p, STRING, 4);
        put_n(&p, 3, 8);
        put_s(&p, "a");
        put_s(&p, "");
        put_s(&p, "\xff\xfe");
        put_s(&p, "nested");
        put_n(&p, ARRAY, 4);
        put_n(&p, ARRAY, 4);
        put_n(&p, 2, 8);
        for (i = 0; i < 2; i++) {
            put_n(&p, 0, 4);
            put_n(&p, 5, 8);
            put_n(&p, 0x0504030201, 5);
        }
        put_s(&p, "arch.limits");
        put_n(&p, ARRAY, 4);
        put_n(&p, 6, 4);
        put_n(&p, 2, 8);
        put_n(&p, 0x41200000, 4);
        put_n(&p, 0x41200000, 4);
        put_info(&p, "a", 1, 3, 0, 0, 0, 0);
        put_info(&p, "b", 3, 64, 5, 2, 39, 64);
        put_info(&p, "c", 2, 256, 1, 0, 12, 448);
        while (p.count % 64)
            p.bytes[p.count++] = 0;
        put_data(&p, 448 + 144);
        out = read_pieces(&p);
        cr_assert_eq(out.code, 0, "%s", out.error.message);
        cr_expect_eq(numoe_tensors_count(out.tensors), 3);
        t = numoe_tensors_find(out.tensors, "b", 3);
        cr_assert_not_null(t);
        cr_expect(t->dtype == NUMOE_DTYPE_MXFP4 && t->rank == 3);
        cr_expect(t->shape[0] == 2 && t->shape[1] == 5 && t->shape[2] == 64);
        cr_expect_eq(t->end - t->begin, 2 * 5 * 34);
        cr_expect_eq(t->begin % 64, 0);
        cr_expect_eq(t->end, p.count - 592 + 64 + 340);
        t = numoe_tensors_find(out.tensors, "c", 3);
        cr_assert_not_null(t);
        cr_expect_eq(t->dtype, NUMOE_DTYPE_OTHER);
        cr_expect_str_eq(t->type, "Q4_K");
        cr_expect_str_eq(json_string_value(json_object_get(out.metadata, "model_type")), "arch");
        cr_expect_eq(json_integer_value(json_object_get(out.metadata, "block_count")), 7);
        cr_expect_eq(json_array_size(json_object_get(out.metadata, "limits")), 2);
        cr_expect_eq(json_number_value(json_array_get(json_object_get(out.metadata, "limits"), 1)),
                     10);
        drop(&out);
    }
}

Test(gguf, beginnings_that_are_none, .timeout = 20)
{
    static struct pieces p;

    memcpy(p.bytes, "GGUF", 4);
    for (p.count = 0; p.count < 4; p.count++)
        expect_said(&p, -EBADMSG, "passes the end of the file");
    put_start(&p, 3, 0, 0);
    memcpy(p.bytes, "GGML", 4);
    expect_said(&p, -EBADMSG, "does not begin with GGUF");
    put_start(&p, 1, 0, 0);
    expect_said(&p, -ENOTSUP, "is GGUF of version 1; 2 and 3 are read");
    put_start(&p, 4, 0, 0);
    expect_said(&p, -ENOTSUP, "is GGUF of version 4");
    put_start(&p, 3u << 24, 0, 0);
    expect_said(&p, -ENOTSUP, "is big-endian GGUF");
    put_start(&p, 3, UINT64_MAX, 0);
    expect_said(&p, -EBADMSG, "are more than its 24 bytes hold");
    put_start(&p, 3, 0, UINT64_MAX / 8);
    expect_said(&p, -EBADMSG, "are more than its 24 bytes hold");
    put_start(&p, 3, 0, 0);
    expect_said(&p, -EBADMSG, "names no general.architecture");
}

Test(gguf, metadata_that_lies_about_its_length, .timeout = 20)
{
    static struct pieces p;
    static const struct {
        uint64_t type, inner, count;
        const char *words;
    } cases[] = {
        {STRING, 0, UINT64_MAX, "a string of 18446744073709551615 bytes"},
        {STRING, 0, 200, "a string of 200 bytes"},
        {ARRAY, U64, UINT64_MAX / 4, "an array of 18446744073709551615 bytes"},
        {ARRAY, U64, 1ull << 61, "an array of"},
        {ARRAY, 0, 1ull << 40, "an array of 1099511627776 bytes"},
        {ARRAY, STRING, UINT64_MAX, "a string's length"},
        {ARRAY, 99, 0, "value type 99 is not known"},
        {77, 0, 0, "value type 77 is not known"},
    };
    unsigned i;

    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        begin(&p, 0, 1);
        put_s(&p, "k");
        put_n(&p, cases[i].type, 4);
        if (cases[i].type == ARRAY)
            put_n(&p, cases[i].inner, 4);
        put_n(&p, cases[i].count, 8);
        expect_said(&p, -EBADMSG, cases[i].words);
    }
    begin(&p, 0, 1);
    put_s(&p, "k");
    put_n(&p, ARRAY, 4);
    for (i = 0; i < 100; i++) {
        put_n(&p, ARRAY, 4);
        put_n(&p, 1, 8);
    }
    expect_said(&p, -EBADMSG, "nested more than 8 deep");
    begin(&p, 0, 2);
    put_u32(&p, "twice", 1);
    put_u32(&p, "twice", 1);
    expect_said(&p, -EBADMSG, "key \"twice\" is there twice");
    begin(&p, 0, 1);
    put_u32(&p, "\xc3\x28", 1);
    expect_said(&p, -EBADMSG, "is not UTF-8");
    for (i = 0; i < 4; i++) {
        static const uint32_t alignments[] = {0, 3, 48, UINT32_MAX};
        begin(&p, 0, 1);
        put_u32(&p, "general.alignment", alignments[i]);
        expect_said(&p, -EBADMSG, "general.alignment is not a power of two");
    }
}

Test(gguf, tensors_that_cannot_be, .timeout = 20)
{
    static struct pieces p;
    static char long_name[65];
    static const struct {
        unsigned rank;
        uint64_t d0, d1, d2;
        uint32_t type;
        uint64_t offset;
        const char *words;
    } cases[] = {
        {0, 1, 1, 1, 0, 0, "its number of dimensions is not 1 to 4: 0"},
        {5, 1, 1, 1, 0, 0, "its number of dimensions is not 1 to 4: 5"},
        {1, 33, 1, 1, 39, 0, "rows of 33 are no whole blocks of 32 of MXFP4"},
        {2, 32, UINT64_MAX, 1, 39, 0, "overflows"},
        {3, 1ull << 32, 1ull << 32, 1ull << 32, 0, 0, "overflows"},
        {1, UINT64_MAX, 1, 1, 0, 0, "overflows"},
        {1, 8, 1, 1, 5, 0, "type is not known: 5"},
        {1, 8, 1, 1, 41, 0, "type is not known: 41"},
        {1, 8, 1, 1, UINT32_MAX, 0, "type is not known: 4294967295"},
        {1, 8, 1, 1, 0, 32, "begins at data offset 32 where 0 is due"},
        {1, 8, 1, 1, 0, UINT64_MAX, "its end overflows"},
        {1, 9, 1, 1, 0, 0, "of 36 bytes at data offset 0 passes the end of the file"},
        {1, 1ull << 60, 1, 1, 0, 0, "passes the end of the file"},
    };
    unsigned i;

    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        begin(&p, 1, 0);
        put_info(&p, "t", cases[i].rank, cases[i].d0, cases[i].d1, cases[i].d2, cases[i].type,
                 cases[i].offset);
        put_data(&p, 32);
        expect_said(&p, -EBADMSG, cases[i].words);
    }
    begin(&p, 2, 0);
    put_info(&p, "t", 1, 3, 0, 0, 0, 0);
    put_info(&p, "t", 1, 3, 0, 0, 0, 32);
    put_data(&p, 64);
    expect_said(&p, -EBADMSG, "tensor \"t\" is there twice");
    memset(long_name, 'n', 64);
    begin(&p, 1, 0);
    put_info(&p, long_name, 1, 1, 0, 0, 0, 0);
    put_data(&p, 32);
    expect_said(&p, -EBADMSG, "a tensor's name at byte");
    /* a header that is cut anywhere */
    begin(&p, 1, 1);
    put_u32(&p, "arch.block_count", 1);
    put_info(&p, "t", 1, 8, 0, 0, 0, 0);
    for (; p.count > 24; p.count--)
        expect_said(&p, -EBADMSG, "byte");
}

/* ---- models --------------------------------------------------------------------------------- */

static char *write_gguf(uint64_t shard_bytes)
{
    struct numoe_synth_options options = NUMOE_SYNTH_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    char *directory = files_dir();

    options.model = "gpt-oss-20b";
    options.layers = 1;
    options.experts = 2;
    options.hidden = 64;
    options.intermediate = 96;
    options.layout = NUMOE_SYNTH_GGUF;
    options.shard_bytes = shard_bytes;
    cr_assert_eq(numoe_synth_write(directory, &options, &error), 0, "%s", error.message);
    return directory;
}

static void expect_open(const char *path, int code, const char *words)
{
    struct numoe_checkpoint *checkpoint = NULL;
    struct numoe_error error = NUMOE_ERROR_INIT;
    int got = numoe_checkpoint_open(path, NULL, &checkpoint, &error);

    cr_expect_eq(got, code, "%d: %s", got, error.message);
    expect_text(error.message, words);
    if (!got)
        numoe_checkpoint_close(checkpoint);
}

/* Change the first place of some bytes, in place. */
static void patch(const char *path, const char *from, size_t length, const char *to)
{
    size_t count;
    char *bytes = files_get(path, &count), *at = memmem(bytes, count, from, length);

    cr_assert_not_null(at);
    memcpy(at, to, length);
    files_put(path, bytes, count);
    free(bytes);
}

Test(gguf, a_directory_or_the_first_file_is_named, .timeout = 20)
{
    char *directory = write_gguf(10000);
    char first[1024], second[1024];
    DIR *opened = opendir(directory);
    struct dirent *entry;

    while ((entry = readdir(opened))) {
        if (strstr(entry->d_name, "00001-of"))
            snprintf(first, sizeof first, "%s/%s", directory, entry->d_name);
        if (strstr(entry->d_name, "00002-of"))
            snprintf(second, sizeof second, "%s/%s", directory, entry->d_name);
    }
    closedir(opened);
    expect_open(directory, 0, "");
    expect_open(first, 0, "");
    expect_open(second, -EINVAL, "name the first");
    unlink(second);
    expect_open(directory, -ENOENT, "1 missing file: model-00002-of");
    files_put(files_at(directory, "other.gguf"), "GGUF", 4);
    expect_open(directory, -EINVAL, "holds several GGUF models");
    expect_open(files_at(directory, "other.gguf"), -EBADMSG, "passes the end of the file");
    expect_open(files_at(directory, "config.json"), -ENOTDIR, "nor a GGUF file");
    files_drop(directory);
    directory = write_gguf(1 << 30);
    cr_assert_eq(rename(files_at(directory, "model-00001-of-00001.gguf"),
                        files_at(directory, "model-00001-of-00002.gguf")),
                 0);
    expect_open(directory, -ENOENT, "1 missing file");
    files_drop(directory);
}

Test(gguf, what_no_kernel_computes_is_refused_by_name, .timeout = 20)
{
    char *directory = write_gguf(1 << 30);
    const char *path = files_at(directory, "model-00001-of-00001.gguf");
    /* rank 3, dims 64 96 2, type 39: that of gate or up */
    static const char info[] =
        "\x03\0\0\0\x40\0\0\0\0\0\0\0\x60\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x27";
    char other[sizeof info];
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_checkpoint *checkpoint;

    /* IQ4_NL: blocks of as many values and of 18 bytes, so the next is elsewhere */
    memcpy(other, info, sizeof info);
    other[28] = 20;
    patch(path, info, 29, other);
    cr_expect_eq(numoe_checkpoint_open(path, NULL, &checkpoint, &error), -EBADMSG);
    expect_text(error.message, "is due");
    patch(path, other, 29, info);
    /* a shape of I8 that takes as many bytes: {17 x 2, 96, 2} */
    other[4] = 34;
    other[28] = 24;
    patch(path, info, 29, other);
    cr_expect_eq(numoe_checkpoint_open(path, NULL, &checkpoint, &error), -ENOTSUP);
    expect_text(error.message, "is I8; experts are read as MXFP4 only");
    patch(path, other, 29, info);
    patch(path, "\7\0\0\0\0\0\0\0gpt-oss", 15, "\7\0\0\0\0\0\0\0foo-oss");
    cr_expect_eq(numoe_checkpoint_open(path, NULL, &checkpoint, &error), -ENOTSUP);
    expect_text(error.message, "architecture foo-oss is not known");
    patch(path, "foo-oss", 7, "gpt-oss");
    patch(path, "ffn_up_exps.bias", 16, "ffn_up_expz.bias");
    cr_expect_eq(numoe_checkpoint_open(path, NULL, &checkpoint, &error), -EBADMSG);
    expect_text(error.message, "1 missing tensor: blk.0.ffn_up_exps.bias");
    files_drop(directory);
}
