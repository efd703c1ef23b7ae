/*
 * Made-up checkpoints.
 *
 * All random numbers come from one counter-based generator, mix(key + n * odd constant), keyed by
 * seed, layer, expert and matrix: any row of any tensor can be made without the ones before it.
 * Codes and scales of a matrix share its key, so both know which groups are all zeros.
 *
 * config.json is written first and carries a numoe_synth object: a directory is replaced only when
 * that mark is in it. The index comes last, so an interrupted output is not taken for a whole one.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "synth.h"

#include "base/checked.h"
#include "families.h"
#include "files.h"
#include "numoe_kernels.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum {
    BUFFER_BYTES = 4 << 20,
    BEHIND_BYTES = 32 << 20, /* written back and dropped from the page cache at this distance */
    OTHERS = 3,              /* tensors of a layer that are no experts */
    HEADER_ALIGN = 8,
    NAME_BYTES = 160,
    SHARD_LIMIT = 99999, /* five digits in a name */
};

/* Widths up to here: far above real models, and a row fits the buffer. */
#define WIDTH_LIMIT ((uint64_t)1 << 20)

#define INDEX_NAME "model.safetensors.index.json"
#define CONFIG_NAME "config.json"
#define MARK "numoe_synth"

struct tensor {
    char name[NAME_BYTES];
    enum numoe_dtype dtype;
    uint64_t shape[4];
    unsigned rank;
    uint64_t bytes;
    uint64_t layer, expert;                 /* expert: of those that are not stacked */
    const struct numoe_family_tensor *role; /* NULL: no expert's */
    unsigned other;                         /* then which */
    uint64_t rows, columns;                 /* of one expert, or of all that is no expert */
};

struct writer {
    int fd;
    char *path;
    uint8_t *buffer;
    size_t used;
    uint64_t written, started; /* bytes of the file; of them, write-back begun */
};

struct synth {
    const struct numoe_synth_options *options;
    const struct numoe_known_model *model;
    const struct numoe_family *own;    /* the model's, whose config.json it is */
    const struct numoe_family *family; /* how tensors are named: own, or one of GGUF's */
    const struct numoe_family *draft;  /* of one layer behind the others; NULL: there is none */
    const char *directory;
    uint64_t layers, experts, top_k, hidden, intermediate;
    bool stacked;                         /* a tensor has all experts of its layer */
    uint64_t experts_a_tensor;            /* all of them, or 1 */
    unsigned roles[NUMOE_FAMILY_TENSORS]; /* the family's tensors in order of their names */
    unsigned role_count;
    uint64_t tensors_a_layer, tensor_count, total_bytes, done_bytes;
    uint64_t shard_count;
    uint64_t *shard_first; /* shard_count + 1 tensor numbers */
    bool made_directory;
    uint8_t pairs[65536]; /* 16 random bits to two codes */
    uint8_t *buffer;
    uint8_t *row; /* room for codes and scales of one */
    struct numoe_error *error;
};

/* ---- numbers -------------------------------------------------------------------------------- */

#define GOLDEN 0x9E3779B97F4A7C15u

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static uint64_t draw(uint64_t key, uint64_t n)
{
    return mix(key + (n + 1) * GOLDEN);
}

static uint64_t matrix_key(const struct synth *s, uint64_t layer, uint64_t expert, uint64_t matrix)
{
    uint64_t key = draw(s->options->seed, 0);

    key = draw(key, layer);
    key = draw(key, expert);
    return draw(key, matrix);
}

/* A normal distribution of standard deviation 2.4, rounded to E2M1: of 128 draws of a sign, how
 * many give 0, 0.5, 1, 1.5, 2, 3, 4, 6. What a group scaled to its largest value looks like. */
static void make_pairs(struct synth *s)
{
    static const uint8_t counts[8] = {11, 20, 19, 17, 22, 20, 14, 5};
    uint8_t codes[256];
    unsigned code, n = 0, i;

    for (code = 0; code < 16; code++)
        for (i = 0; i < counts[code & 7]; i++)
            codes[n++] = (uint8_t)code;
    for (i = 0; i < 65536; i++)
        s->pairs[i] = (uint8_t)(codes[i & 255] | codes[i >> 8] << 4);
}

/* One group of 512 is all zeros. */
static bool zero_group(uint64_t key, uint64_t group)
{
    return (draw(key ^ 0x5EED5EED5EED5EEDu, group) & 511) == 0;
}

static void fill_codes(const struct synth *s, uint64_t key, uint64_t row, uint64_t groups,
                       uint8_t *out)
{
    uint64_t group, n = row * groups * 4;
    unsigned i;

    for (group = row * groups; group < (row + 1) * groups; group++, out += 16, n += 4) {
        if (zero_group(key, group)) {
            memset(out, 0, 16);
            continue;
        }
        for (i = 0; i < 4; i++) {
            uint64_t bits = draw(key, n + i);
            out[4 * i] = s->pairs[bits & 0xFFFF];
            out[4 * i + 1] = s->pairs[bits >> 16 & 0xFFFF];
            out[4 * i + 2] = s->pairs[bits >> 32 & 0xFFFF];
            out[4 * i + 3] = s->pairs[bits >> 48];
        }
    }
}

/* The scale byte for which a sum over k products of unit inputs is about 1. */
static unsigned middle_scale(uint64_t k)
{
    unsigned e = 0;

    /* 2.4 sqrt(k), rounded to a power of two */
    while (e < 40 && 100 * (4ull << 2 * e) <= 1152 * k)
        e++;
    return 127 - e;
}

static void fill_scales(uint64_t key, uint64_t row, uint64_t groups, unsigned middle, uint8_t *out)
{
    /* Rows differ more than the groups within one. */
    static const int8_t by_row[8] = {-1, -1, 0, 0, 0, 0, 1, 1};
    static const int8_t by_group[16] = {-2, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1};
    uint64_t first = row * groups, group, bits = 0;
    uint64_t row_bits = draw(key ^ 0x0000505CA1E00000u, row);
    int lowest = (int)middle - 4, highest = (int)middle + 3;
    unsigned special = (unsigned)(row_bits >> 8) & 127;

    for (group = 0; group < groups; group++, bits >>= 4) {
        int scale = (int)middle + by_row[row_bits & 7];
        if (group % 16 == 0)
            bits = draw(key ^ 0x00C0FFEE00000000u, first + group);
        scale += by_group[bits & 15];
        if (special < 2)
            scale = special ? lowest : highest;
        scale = scale < lowest ? lowest : scale > highest ? highest : scale;
        out[group] = zero_group(key, first + group) ? 0 : (uint8_t)scale;
    }
}

/* Values in (-1, 1) times 2^-6, plus `about`. */
static void fill_other(uint64_t key, uint64_t first, uint64_t count, bool bf16, float about,
                       uint8_t *out)
{
    uint64_t i;

    for (i = 0; i < count; i++) {
        int32_t whole = (int32_t)(draw(key, first + i) >> 40) - (1 << 23);
        float value = about + (float)whole * 0x1p-29f;
        uint32_t bits;
        memcpy(&bits, &value, 4);
        if (bf16) {
            uint16_t half = (uint16_t)(bits >> 16);
            memcpy(out + 2 * i, &half, 2);
        } else {
            memcpy(out + 4 * i, &bits, 4);
        }
    }
}

/* ---- which tensors there are ---------------------------------------------------------------- */

/* A norm, the router's weight and its bias, by family: names behind what expert tensors begin with.
 */
static const struct {
    const char *family;
    const char *names[OTHERS];
} other_names[] = {
    {"deepseek-v4", {"ffn_norm.weight", "ffn.gate.bias", "ffn.gate.weight"}},
    {"kimi-k3",
     {"post_attention_layernorm.weight", "block_sparse_moe.gate.e_score_correction_bias",
      "block_sparse_moe.gate.weight"}},
    {"gpt-oss", {"post_attention_layernorm.weight", "mlp.router.bias", "mlp.router.weight"}},
    {"gguf", {"ffn_norm.weight", "exp_probs_b.bias", "ffn_gate_inp.weight"}},
    {"gguf-merged", {"ffn_norm.weight", "exp_probs_b.bias", "ffn_gate_inp.weight"}},
};

static const char *const *names_of(const struct synth *s)
{
    unsigned i;

    for (i = 0; strcmp(other_names[i].family, s->family->name); i++)
        ;
    return other_names[i].names;
}

/* The family's tensors in order of their names, as files have them. */
static void order_roles(struct synth *s)
{
    const struct numoe_family_tensor *tensors = s->family->tensors;
    unsigned i, j;

    s->role_count = numoe_family_tensors(s->family, s->model->desc.bias);
    for (i = 0; i < s->role_count; i++) {
        for (j = i; j > 0 && strcmp(tensors[s->roles[j - 1]].name, tensors[i].name) > 0; j--)
            s->roles[j] = s->roles[j - 1];
        s->roles[j] = i;
    }
}

static void describe_other(const struct synth *s, uint64_t file_layer, bool draft, struct tensor *t)
{
    const char *const *names = names_of(s);
    const char *pattern = (draft ? s->draft : s->family)->tensors[0].name;

    snprintf(t->name, sizeof t->name, "%.*s%llu.%s", (int)(strstr(pattern, "{layer}") - pattern),
             pattern, (unsigned long long)file_layer, names[t->other]);
    t->dtype = t->other == 1 || numoe_family_gguf(s->family) ? NUMOE_DTYPE_F32 : NUMOE_DTYPE_BF16;
    t->rank = t->other == 2 ? 2 : 1;
    t->shape[0] = t->other == 0 ? s->hidden : s->experts;
    t->shape[1] = t->other == 2 ? s->hidden : 1;
    t->rows = t->shape[0];
    t->columns = t->shape[1];
    t->bytes = t->rows * t->columns * numoe_dtype_bits(t->dtype) / 8;
}

/* Bytes of one row of an expert's matrix. */
static uint64_t row_bytes(const struct tensor *t)
{
    switch (t->role->kind) {
    case NUMOE_TENSOR_CODES:
        return t->columns / 2;
    case NUMOE_TENSOR_SCALES:
        return t->columns / NUMOE_TILE;
    case NUMOE_TENSOR_BLOCKS:
        return t->columns / NUMOE_TILE * (NUMOE_TILE / 2 + 1);
    default:
        return numoe_dtype_bits(t->dtype) / 8;
    }
}

static void describe_expert(const struct synth *s, uint64_t file_layer, bool draft, unsigned role,
                            struct tensor *t)
{
    const struct numoe_family *family = draft ? s->draft : s->family;
    const bool down = family->tensors[role].matrix == NUMOE_TENSOR_DOWN;

    t->role = &family->tensors[role];
    numoe_family_tensor_name(family, file_layer, t->expert, role, t->name, sizeof t->name);
    t->dtype = t->role->dtype;
    t->rows = down ? s->hidden : s->intermediate;
    t->rows *= t->role->matrix == NUMOE_TENSOR_GATE_UP ? 2 : 1;
    t->columns = down ? s->intermediate : s->hidden;
    t->rank = 0;
    if (s->stacked)
        t->shape[t->rank++] = s->experts;
    t->shape[t->rank++] = t->rows;
    if (t->role->kind == NUMOE_TENSOR_CODES && s->stacked) {
        t->shape[t->rank++] = t->columns / NUMOE_TILE;
        t->shape[t->rank++] = NUMOE_TILE / 2;
    } else if (t->role->kind == NUMOE_TENSOR_BLOCKS) {
        t->shape[t->rank++] = t->columns;
    } else if (t->role->kind != NUMOE_TENSOR_BIAS) {
        t->shape[t->rank++] = row_bytes(t);
    }
    t->bytes = s->experts_a_tensor * t->rows * row_bytes(t);
}

static void describe_tensor(const struct synth *s, uint64_t index, struct tensor *t)
{
    uint64_t in_layer = index % s->tensors_a_layer;
    const uint64_t layer = index / s->tensors_a_layer;
    const bool draft = s->draft && layer == s->layers;
    const uint64_t file_layer = draft ? 0 : s->model->first_layer + layer;

    *t = (struct tensor){.layer = layer};
    if (in_layer < OTHERS) {
        t->other = (unsigned)in_layer;
        describe_other(s, file_layer, draft, t);
        return;
    }
    in_layer -= OTHERS;
    t->expert = in_layer / s->role_count;
    describe_expert(s, file_layer, draft, s->roles[in_layer % s->role_count], t);
}

static int add_shard(struct synth *s, uint64_t first)
{
    /* Room for the closing number, too; doubling at powers of two. */
    if (!(s->shard_count & (s->shard_count - 1))) {
        void *grown = reallocarray(s->shard_first, 2 * s->shard_count + 2, sizeof(uint64_t));
        if (!grown)
            return numoe_error_set(s->error, -ENOMEM, s->directory, "no memory for its layout");
        s->shard_first = grown;
    }
    s->shard_first[s->shard_count++] = first;
    return 0;
}

static int lay_out(struct synth *s)
{
    uint64_t i, in_shard = 0, most;
    struct tensor t;
    int code;

    for (i = 0; i < s->tensor_count; i++) {
        describe_tensor(s, i, &t);
        if (i == 0 || in_shard + t.bytes > s->options->shard_bytes) {
            code = add_shard(s, i);
            if (code < 0)
                return code;
            in_shard = 0;
        }
        in_shard += t.bytes;
        s->total_bytes += t.bytes;
    }
    s->shard_first[s->shard_count] = s->tensor_count;
    most = numoe_family_gguf(s->family) ? UINT16_MAX : SHARD_LIMIT;
    if (s->shard_count > most)
        return numoe_error_set(s->error, -EINVAL, s->directory,
                               "shards of %llu bytes make %llu files, above the limit of %llu",
                               (unsigned long long)s->options->shard_bytes,
                               (unsigned long long)s->shard_count, (unsigned long long)most);
    return 0;
}

static void shard_name(const struct synth *s, uint64_t shard, char *name, size_t size)
{
    snprintf(name, size, "model-%05llu-of-%05llu.%s", (unsigned long long)shard + 1,
             (unsigned long long)s->shard_count,
             numoe_family_gguf(s->family) ? "gguf" : "safetensors");
}

/* ---- writing -------------------------------------------------------------------------------- */

static int file_failed(const struct synth *s, const char *path, const char *what, int code)
{
    return numoe_error_set(s->error, code, path, "%s failed: %s", what, strerror(-code));
}

static int writer_open(const struct synth *s, const char *name, struct writer *w)
{
    int code;

    *w = (struct writer){.fd = -1, .buffer = s->buffer};
    w->path = numoe_path_join(s->directory, name);
    if (!w->path)
        return numoe_error_set(s->error, -ENOMEM, s->directory, "no memory for a path");
    w->fd = open(w->path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (w->fd < 0) {
        code = -errno;
        file_failed(s, w->path, "creating", code);
        free(w->path);
        w->path = NULL;
        return code;
    }
    return 0;
}

/* Write back what lies behind, wait for what lies further behind, and drop that from the cache. */
static void write_behind(struct writer *w)
{
    if (w->written - w->started < BEHIND_BYTES)
        return;
    sync_file_range(w->fd, (off_t)w->started, (off_t)(w->written - w->started),
                    SYNC_FILE_RANGE_WRITE);
    if (w->started) {
        sync_file_range(w->fd, 0, (off_t)w->started,
                        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                            SYNC_FILE_RANGE_WAIT_AFTER);
        posix_fadvise(w->fd, 0, (off_t)w->started, POSIX_FADV_DONTNEED);
    }
    w->started = w->written;
}

static int writer_flush(const struct synth *s, struct writer *w)
{
    size_t done = 0;

    while (done < w->used) {
        ssize_t put = write(w->fd, w->buffer + done, w->used - done);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return file_failed(s, w->path, "writing", put < 0 ? -errno : -EIO);
        done += (size_t)put;
    }
    w->written += w->used;
    w->used = 0;
    write_behind(w);
    return 0;
}

/* bytes of room in the buffer, to be filled at once. */
static int writer_room(const struct synth *s, struct writer *w, size_t bytes, uint8_t **out)
{
    if (BUFFER_BYTES - w->used < bytes) {
        int code = writer_flush(s, w);
        if (code < 0)
            return code;
    }
    *out = w->buffer + w->used;
    w->used += bytes;
    return 0;
}

static int writer_put(const struct synth *s, struct writer *w, const void *bytes, size_t count)
{
    const uint8_t *from = bytes;

    while (count) {
        size_t part = count < BUFFER_BYTES ? count : BUFFER_BYTES;
        uint8_t *room;
        int code = writer_room(s, w, part, &room);
        if (code < 0)
            return code;
        memcpy(room, from, part);
        from += part;
        count -= part;
    }
    return 0;
}

/* code: of what went before; a failed close or sync is a failure, too. */
static int writer_close(const struct synth *s, struct writer *w, int code)
{
    if (w->fd < 0)
        return code;
    if (code == 0)
        code = writer_flush(s, w);
    if (code == 0 && fdatasync(w->fd) < 0)
        code = file_failed(s, w->path, "syncing", -errno);
    posix_fadvise(w->fd, 0, 0, POSIX_FADV_DONTNEED);
    if (close(w->fd) < 0 && code == 0)
        code = file_failed(s, w->path, "closing", -errno);
    free(w->path);
    w->fd = -1;
    return code;
}

static int put_header(const struct synth *s, struct writer *w, uint64_t first, uint64_t end)
{
    char *text = NULL;
    size_t length = 0;
    uint64_t offset = 0, i;
    uint8_t raw[8];
    struct tensor t;
    unsigned d;
    FILE *stream = open_memstream(&text, &length);
    int code;

    if (!stream)
        goto no_memory;
    fprintf(stream, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (i = first; i < end; i++) {
        describe_tensor(s, i, &t);
        fprintf(stream, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%llu", t.name,
                numoe_dtype_name(t.dtype), (unsigned long long)t.shape[0]);
        for (d = 1; d < t.rank; d++)
            fprintf(stream, ",%llu", (unsigned long long)t.shape[d]);
        fprintf(stream, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)offset,
                (unsigned long long)(offset + t.bytes));
        offset += t.bytes;
    }
    fputc('}', stream);
    while (ftello(stream) % HEADER_ALIGN)
        fputc(' ', stream);
    if (fclose(stream) != 0)
        goto no_memory;
    for (i = 0; i < 8; i++)
        raw[i] = (uint8_t)((uint64_t)length >> 8 * i);
    code = writer_put(s, w, raw, sizeof raw);
    if (code == 0)
        code = writer_put(s, w, text, length);
    free(text);
    return code;
no_memory:
    free(text);
    return numoe_error_set(s->error, -ENOMEM, w->path, "no memory for its header");
}

/* ---- GGUF ----------------------------------------------------------------------------------- */

enum {
    GGUF_ALIGNMENT = 32,
    GGUF_U16 = 2,
    GGUF_U32 = 4,
    GGUF_I32 = 5,
    GGUF_F32 = 6,
    GGUF_STRING = 8
};

static void put_number(FILE *stream, uint64_t value, unsigned bytes)
{
    for (; bytes; bytes--, value >>= 8)
        fputc((int)(value & 255), stream);
}

static void put_string(FILE *stream, const char *text)
{
    put_number(stream, strlen(text), 8);
    fputs(text, stream);
}

static void put_key(FILE *stream, const char *architecture, const char *key, uint32_t type)
{
    char name[64];

    snprintf(name, sizeof name, "%s%s%s", architecture ? architecture : "", architecture ? "." : "",
             key);
    put_string(stream, name);
    put_number(stream, type, 4);
}

static unsigned gguf_type(enum numoe_dtype dtype)
{
    return dtype == NUMOE_DTYPE_MXFP4 ? 39 : 0; /* else F32 */
}

/* Metadata of the model and of the file's place among the others. */
static void put_metadata(const struct synth *s, FILE *stream, uint64_t shard)
{
    const struct {
        const char *architecture, *key;
        uint64_t value;
        uint32_t type;
    } numbers[] = {
        {NULL, "general.alignment", GGUF_ALIGNMENT, GGUF_U32},
        {NULL, "split.no", shard, GGUF_U16},
        {NULL, "split.count", s->shard_count, GGUF_U16},
        {NULL, "split.tensors.count", s->shard_first[s->shard_count], GGUF_I32},
        {s->own->gguf, "block_count", s->model->first_layer + s->layers, GGUF_U32},
        {s->own->gguf, "expert_count", s->experts, GGUF_U32},
        {s->own->gguf, "expert_used_count", s->top_k, GGUF_U32},
        {s->own->gguf, "embedding_length", s->hidden, GGUF_U32},
        {s->own->gguf, "expert_feed_forward_length", s->intermediate, GGUF_U32},
    };
    const uint64_t count = sizeof numbers / sizeof numbers[0];
    float limit = s->model->desc.activation.limit;
    uint32_t bits;

    put_number(stream, count + 2, 8);
    put_key(stream, NULL, "general.architecture", GGUF_STRING);
    put_string(stream, s->own->gguf);
    for (uint64_t i = 0; i < count; i++) {
        put_key(stream, numbers[i].architecture, numbers[i].key, numbers[i].type);
        put_number(stream, numbers[i].value, numbers[i].type == GGUF_U16 ? 2 : 4);
    }
    put_key(stream, s->own->gguf, s->family->limit_key, GGUF_F32);
    memcpy(&bits, &limit, sizeof bits);
    put_number(stream, bits, 4);
}

static int put_gguf_header(struct synth *s, struct writer *w, uint64_t shard)
{
    const uint64_t first = s->shard_first[shard], end = s->shard_first[shard + 1];
    char *text = NULL;
    size_t length = 0;
    uint64_t offset = 0, i;
    FILE *stream = open_memstream(&text, &length);
    struct tensor t;
    int code = -ENOMEM;

    if (!stream)
        return numoe_error_set(s->error, -ENOMEM, w->path, "no memory for its header");
    fputs("GGUF", stream);
    put_number(stream, 3, 4);
    put_number(stream, end - first, 8);
    put_metadata(s, stream, shard);
    for (i = first; i < end; i++) {
        describe_tensor(s, i, &t);
        put_string(stream, t.name);
        put_number(stream, t.rank, 4);
        for (unsigned d = t.rank; d-- > 0;)
            put_number(stream, t.shape[d], 8);
        put_number(stream, gguf_type(t.dtype), 4);
        put_number(stream, offset, 8);
        offset += (t.bytes + GGUF_ALIGNMENT - 1) / GGUF_ALIGNMENT * GGUF_ALIGNMENT;
    }
    while (ftello(stream) % GGUF_ALIGNMENT)
        fputc(0, stream);
    if (fclose(stream) == 0)
        code = writer_put(s, w, text, length);
    else
        numoe_error_set(s->error, code, w->path, "no memory for its header");
    free(text);
    return code;
}

static int put_padding(struct synth *s, struct writer *w, uint64_t bytes)
{
    static const uint8_t zeros[GGUF_ALIGNMENT];

    return writer_put(s, w, zeros, (GGUF_ALIGNMENT - bytes % GGUF_ALIGNMENT) % GGUF_ALIGNMENT);
}

/* ---- tensors -------------------------------------------------------------------------------- */

/* Codes of GGUF's order and a scale byte before each 16, from plain ones. */
static void interleave(const uint8_t *codes, const uint8_t *scales, uint64_t groups, uint8_t *out)
{
    for (uint64_t g = 0; g < groups; g++, codes += 16, out += 17) {
        out[0] = scales[g];
        for (unsigned j = 0; j < 16; j++) {
            const unsigned low = codes[j / 2] >> 4 * (j % 2) & 15;
            const unsigned high = codes[8 + j / 2] >> 4 * (j % 2) & 15;
            out[1 + j] = (uint8_t)(low | high << 4);
        }
    }
}

/* Which matrix row r of a tensor is of; r becomes that matrix's row. */
static unsigned row_matrix(const struct synth *s, const struct tensor *t, uint64_t *row)
{
    const uint64_t half = t->rows / 2;
    unsigned up;

    if (t->role->matrix != NUMOE_TENSOR_GATE_UP)
        return (unsigned)t->role->matrix;
    if (s->family->gate_up == NUMOE_GATE_UP_INTERLEAVED) {
        up = (unsigned)(*row % 2);
        *row /= 2;
    } else {
        up = *row >= half;
        *row %= half;
    }
    return up ? NUMOE_TENSOR_UP : NUMOE_TENSOR_GATE;
}

static void fill_row(const struct synth *s, const struct tensor *t, uint64_t expert, uint64_t row,
                     uint8_t *out)
{
    const unsigned matrix = row_matrix(s, t, &row);
    const uint64_t key = matrix_key(s, t->layer, expert, matrix);
    const uint64_t groups = t->columns / NUMOE_TILE;
    uint8_t *codes = s->row, *scales = s->row + t->columns / 2;

    switch (t->role->kind) {
    case NUMOE_TENSOR_CODES:
        fill_codes(s, key, row, groups, out);
        break;
    case NUMOE_TENSOR_SCALES:
        fill_scales(key, row, groups, middle_scale(t->columns), out);
        break;
    case NUMOE_TENSOR_BLOCKS:
        fill_codes(s, key, row, groups, codes);
        fill_scales(key, row, groups, middle_scale(t->columns), scales);
        interleave(codes, scales, groups, out);
        break;
    case NUMOE_TENSOR_BIAS:
        fill_other(key ^ 0x0B1A50B1A50B1A50u, row, 1, t->dtype == NUMOE_DTYPE_BF16, 0.0f, out);
        break;
    }
}

static int put_rows(struct synth *s, struct writer *w, const struct tensor *t)
{
    const uint64_t experts = t->role ? s->experts_a_tensor : 1;
    const uint64_t bytes = t->bytes / (experts * t->rows);
    uint8_t *room;

    for (uint64_t i = 0; i < experts * t->rows; i++) {
        int code = writer_room(s, w, bytes, &room);
        if (code < 0)
            return code;
        if (t->role)
            fill_row(s, t, s->stacked ? i / t->rows : t->expert, i % t->rows, room);
        else
            fill_other(matrix_key(s, t->layer, 0, 65 + t->other), i * t->columns, t->columns,
                       t->dtype == NUMOE_DTYPE_BF16, t->other == 0 ? 1.0f : 0.0f, room);
    }
    return 0;
}

static int put_tensor(struct synth *s, struct writer *w, const struct tensor *t)
{
    int code = put_rows(s, w, t);

    if (code == 0 && numoe_family_gguf(s->family))
        code = put_padding(s, w, t->bytes);
    if (code < 0)
        return code;
    s->done_bytes += t->bytes;
    if (s->options->progress &&
        s->options->progress(s->options->user, s->done_bytes, s->total_bytes))
        return numoe_error_set(
            s->error, -ECANCELED, s->directory, "cancelled after %llu of %llu bytes",
            (unsigned long long)s->done_bytes, (unsigned long long)s->total_bytes);
    return 0;
}

static int write_shard(struct synth *s, uint64_t shard)
{
    char name[64];
    struct writer w;
    struct tensor t;
    uint64_t i;
    int code;

    shard_name(s, shard, name, sizeof name);
    code = writer_open(s, name, &w);
    if (code < 0)
        return code;
    code = numoe_family_gguf(s->family)
               ? put_gguf_header(s, &w, shard)
               : put_header(s, &w, s->shard_first[shard], s->shard_first[shard + 1]);
    for (i = s->shard_first[shard]; i < s->shard_first[shard + 1] && code == 0; i++) {
        describe_tensor(s, i, &t);
        code = put_tensor(s, &w, &t);
    }
    return writer_close(s, &w, code);
}

static int write_index(struct synth *s)
{
    struct writer w;
    struct tensor t;
    char line[2 * NAME_BYTES], file[64];
    uint64_t shard, i;
    int code, length;

    code = writer_open(s, INDEX_NAME, &w);
    if (code < 0)
        return code;
    length = snprintf(line, sizeof line,
                      "{\n  \"metadata\": {\"total_size\": %llu},\n"
                      "  \"weight_map\": {\n",
                      (unsigned long long)s->total_bytes);
    code = writer_put(s, &w, line, (size_t)length);
    for (shard = 0; shard < s->shard_count; shard++) {
        shard_name(s, shard, file, sizeof file);
        for (i = s->shard_first[shard]; i < s->shard_first[shard + 1] && code == 0; i++) {
            describe_tensor(s, i, &t);
            length = snprintf(line, sizeof line, "    \"%s\": \"%s\"%s\n", t.name, file,
                              i + 1 < s->tensor_count ? "," : "");
            code = writer_put(s, &w, line, (size_t)length);
        }
    }
    if (code == 0)
        code = writer_put(s, &w, "  }\n}\n", 6);
    return writer_close(s, &w, code);
}

/* Nothing for a key that the family has not. */
static void set_number(json_t *section, const char *key, uint64_t value)
{
    if (key)
        json_object_set_new(section, key, json_integer((json_int_t)value));
}

static void set_real(json_t *section, const char *key, float value)
{
    if (key)
        json_object_set_new(section, key, json_real((double)value));
}

/* What else V4's own says, so that nobody relies on its quantization_config. */
static void add_v4(json_t *config, uint64_t hidden)
{
    json_t *more = json_pack(
        "{s:s, s:s, s:f, s:i, s:{s:s, s:[i,i]}}", "expert_dtype", "fp4", "scoring_func",
        "sqrtsoftplus", "routed_scaling_factor", hidden == 4096 ? 1.5 : 2.5, "n_shared_experts", 1,
        "quantization_config", "quant_method", "fp8", "weight_block_size", 128, 128);

    json_object_update(config, more);
    json_decref(more);
}

static json_t *make_config(const struct synth *s)
{
    const struct numoe_activation *activation = &s->model->desc.activation;
    char seed[24]; /* a string: JSON readers disagree on integers past 2^53 */
    json_t *mark, *config, *section = NULL;

    snprintf(seed, sizeof seed, "%llu", (unsigned long long)s->options->seed);
    mark = json_pack("{s:s, s:s, s:s}", "version", NUMOE_VERSION, "model", s->model->name, "seed",
                     seed);

    if (numoe_family_gguf(s->family))
        return json_pack("{s:o}", MARK, mark);
    config = json_pack("{s:[s], s:s, s:o}", "architectures", s->own->architecture, "model_type",
                       s->own->model_type, MARK, mark);
    if (!config)
        return NULL;
    if (s->own->section) {
        section = json_object();
        json_object_set_new(config, s->own->section, section);
    }
    set_number(section ? section : config, s->own->layers_key, s->model->first_layer + s->layers);
    set_number(section ? section : config, s->own->dense_layers_key, s->model->first_layer);
    set_number(section ? section : config, s->own->experts_key, s->experts);
    set_number(section ? section : config, s->own->top_k_key, s->top_k);
    /* K3's model is twice as wide as what its experts see, and that is not said. */
    set_number(section ? section : config, s->own->hidden_key ? s->own->hidden_key : "hidden_size",
               s->own->hidden_key ? s->hidden : 2 * s->hidden);
    set_number(section ? section : config, s->own->intermediate_key, s->intermediate);
    set_real(section ? section : config, s->own->limit_key, activation->limit);
    set_real(section ? section : config, s->own->gate_cap_key, activation->gate_cap);
    set_real(section ? section : config, s->own->up_cap_key, activation->up_cap);
    if (s->draft)
        set_number(config, s->draft->layers_key, 1);
    if (!strcmp(s->own->name, "deepseek-v4"))
        add_v4(config, s->model->desc.hidden);
    return config;
}

static int write_config(struct synth *s)
{
    json_t *config = make_config(s);
    char *text = config ? json_dumps(config, JSON_INDENT(2)) : NULL;
    struct writer w;
    int code;

    if (!text) {
        code = numoe_error_set(s->error, -ENOMEM, s->directory, "no memory for config.json");
        goto out;
    }
    code = writer_open(s, CONFIG_NAME, &w);
    if (code < 0)
        goto out;
    code = writer_put(s, &w, text, strlen(text));
    if (code == 0)
        code = writer_put(s, &w, "\n", 1);
    code = writer_close(s, &w, code);
out:
    free(text);
    json_decref(config);
    return code;
}

/* ---- the directory -------------------------------------------------------------------------- */

/* A name that an earlier output may have. */
static bool own_name(const char *name)
{
    unsigned number, of;
    int end = 0;

    if (!strcmp(name, CONFIG_NAME) || !strcmp(name, INDEX_NAME))
        return true;
    if (sscanf(name, "model-%5u-of-%5u.safetensors%n", &number, &of, &end) == 2 && end)
        return !name[end];
    return sscanf(name, "model-%5u-of-%5u.gguf%n", &number, &of, &end) == 2 && end && !name[end];
}

static bool marked(const char *directory)
{
    char *path = numoe_path_join(directory, CONFIG_NAME), *text = NULL;
    uint64_t bytes;
    json_t *config = NULL;
    bool found = false;

    if (path && numoe_file_slurp(path, 1 << 20, &text, &bytes, NULL) == 0) {
        config = json_loadb(text, bytes, 0, NULL);
        found = json_is_object(json_object_get(config, MARK));
    }
    json_decref(config);
    free(text);
    free(path);
    return found;
}

/*
 * Visit the directory: with remove false, count entries and gather the foreign ones' names; with
 * remove true, delete the files of an earlier output, config.json with its mark last.
 */
static int scan(struct synth *s, bool remove, uint64_t *entries, uint64_t *foreign, char *names,
                size_t size)
{
    DIR *directory = opendir(s->directory);
    struct dirent *entry;
    size_t used = 0;
    int code = 0;

    if (!directory)
        return file_failed(s, s->directory, "opening", -errno);
    while (code == 0 && (entry = readdir(directory))) {
        const char *name = entry->d_name;
        struct stat status;
        bool own;
        if (!strcmp(name, ".") || !strcmp(name, ".."))
            continue;
        own = own_name(name) &&
              fstatat(dirfd(directory), name, &status, AT_SYMLINK_NOFOLLOW) == 0 &&
              S_ISREG(status.st_mode);
        if (remove) {
            if (own && strcmp(name, CONFIG_NAME) && unlinkat(dirfd(directory), name, 0) < 0)
                code = file_failed(s, name, "removing", -errno);
            continue;
        }
        ++*entries;
        if (own)
            continue;
        if (++*foreign <= 8 && used < size)
            used += (size_t)snprintf(names + used, size - used, "%s%s", used ? ", " : "",
                                     numoe_quote(name).text);
    }
    closedir(directory);
    return code;
}

static int prepare_directory(struct synth *s)
{
    uint64_t entries = 0, foreign = 0, need;
    struct statvfs room;
    char names[300] = "";
    int code;

    if (mkdir(s->directory, 0777) == 0)
        s->made_directory = true;
    else if (errno != EEXIST)
        return file_failed(s, s->directory, "creating the directory", -errno);
    code = scan(s, false, &entries, &foreign, names, sizeof names);
    if (code < 0)
        return code;
    if (foreign)
        return numoe_error_set(s->error, -EEXIST, s->directory,
                               "holds %llu files that are not of an earlier synth: %s%s",
                               (unsigned long long)foreign, names, foreign > 8 ? ", ..." : "");
    if (entries && !marked(s->directory))
        return numoe_error_set(s->error, -EEXIST, s->directory,
                               "holds a checkpoint that synth has not written (config.json has no "
                               "%s)",
                               MARK);
    if (entries) {
        code = scan(s, true, NULL, NULL, NULL, 0);
        if (code < 0)
            return code;
    }
    /* Headers and index: not above 512 bytes a tensor. */
    if (!numoe_mul_u64(s->tensor_count, 512, &need) || !numoe_add_u64(need, s->total_bytes, &need))
        return numoe_error_set(s->error, -EOVERFLOW, s->directory, "the model is too large");
    if (statvfs(s->directory, &room) == 0) {
        uint64_t have = (uint64_t)room.f_bavail * room.f_frsize;
        if (have < need)
            return numoe_error_set(s->error, -ENOSPC, s->directory,
                                   "needs %llu bytes but the file system has %llu free",
                                   (unsigned long long)need, (unsigned long long)have);
    }
    return 0;
}

static void remove_output(const struct synth *s, uint64_t shards)
{
    char name[64], *path;
    uint64_t i;

    for (i = 0; i < shards + 2; i++) {
        if (i < shards)
            shard_name(s, i, name, sizeof name);
        else
            snprintf(name, sizeof name, "%s", i == shards ? INDEX_NAME : CONFIG_NAME);
        path = numoe_path_join(s->directory, name);
        if (path)
            unlink(path);
        free(path);
    }
}

/* How tensors are named, and of which there are draft layers. */
static int choose_layout(struct synth *s)
{
    const enum numoe_synth_layout layout = s->options->layout;

    s->family = s->own;
    if (layout != NUMOE_SYNTH_OWN) {
        s->family = numoe_family_by_name(layout == NUMOE_SYNTH_GGUF ? "gguf" : "gguf-merged");
        if (!s->own->gguf)
            return numoe_error_set(s->error, -ENOTSUP, s->options->model,
                                   "what GGUF files of it are like is not known");
    }
    if (s->options->draft) {
        if (!strcmp(s->family->name, "deepseek-v4"))
            s->draft = numoe_family_by_name("deepseek-v4-draft");
        if (!s->draft)
            return numoe_error_set(s->error, -ENOTSUP, s->options->model,
                                   "has no draft layers in this layout");
    }
    order_roles(s);
    return 0;
}

static int size_up(struct synth *s)
{
    const struct numoe_synth_options *o = s->options;
    const struct numoe_model_desc *desc;
    struct numoe_model_desc known;
    int code = numoe_model_by_name(o->model, &known, s->error);

    if (code < 0)
        return code;
    s->model = numoe_known_model(o->model);
    desc = &s->model->desc;
    s->own = numoe_family_by_name(s->model->family);
    if (!s->own || !s->own->supported)
        return numoe_error_set(s->error, -ENOTSUP, o->model,
                               "writing this model's checkpoints is not supported yet");
    code = choose_layout(s);
    if (code < 0)
        return code;
    s->layers = o->layers ? o->layers : desc->layers;
    s->experts = o->experts ? o->experts : desc->experts;
    s->hidden = o->hidden ? o->hidden : desc->hidden;
    s->intermediate = o->intermediate ? o->intermediate : desc->intermediate;
    s->top_k = desc->experts_per_token < s->experts ? desc->experts_per_token : s->experts;
    if (s->hidden % NUMOE_TILE || s->intermediate % NUMOE_TILE || s->hidden > WIDTH_LIMIT ||
        s->intermediate > WIDTH_LIMIT)
        return numoe_error_set(s->error, -EINVAL, o->model,
                               "widths %llu and %llu must be multiples of %d up to %llu",
                               (unsigned long long)s->hidden, (unsigned long long)s->intermediate,
                               NUMOE_TILE, (unsigned long long)WIDTH_LIMIT);
    if (!o->shard_bytes)
        return numoe_error_set(s->error, -EINVAL, o->model, "shard_bytes is 0");
    if (s->layers > desc->layers || s->experts > desc->experts)
        return numoe_error_set(s->error, -EINVAL, o->model,
                               "%llu layers of %llu experts are more than the model's %llu of %llu",
                               (unsigned long long)s->layers, (unsigned long long)s->experts,
                               (unsigned long long)desc->layers, (unsigned long long)desc->experts);
    /* No product overflows: widths are bounded above, layers and experts by the model's. */
    s->stacked = numoe_family_stacked(s->family);
    s->experts_a_tensor = s->stacked ? s->experts : 1;
    s->tensors_a_layer = OTHERS + s->role_count * (s->experts / s->experts_a_tensor);
    s->tensor_count = s->tensors_a_layer * (s->layers + (s->draft ? 1 : 0));
    return 0;
}

int numoe_synth_write(const char *directory, const struct numoe_synth_options *options,
                      struct numoe_error *error)
{
    struct synth *s;
    uint64_t shard;
    int code;

    if (!directory || !*directory || !options || !options->model)
        return numoe_error_set(error, -EINVAL, "synth", "directory or model is missing");
    s = calloc(1, sizeof *s);
    if (!s)
        return numoe_error_set(error, -ENOMEM, directory, "no memory to write");
    s->options = options;
    s->directory = directory;
    s->error = error;
    code = size_up(s);
    if (code == 0)
        code = lay_out(s);
    if (code < 0)
        goto out;
    make_pairs(s);
    s->buffer = aligned_alloc(4096, BUFFER_BYTES);
    s->row = malloc(WIDTH_LIMIT);
    if (!s->buffer || !s->row) {
        code = numoe_error_set(error, -ENOMEM, directory, "no memory for a write buffer");
        goto out;
    }
    code = prepare_directory(s);
    if (code < 0)
        goto out_directory;
    code = write_config(s);
    for (shard = 0; shard < s->shard_count && code == 0; shard++)
        code = write_shard(s, shard);
    if (code == 0 && !numoe_family_gguf(s->family))
        code = write_index(s);
    if (code < 0)
        remove_output(s, shard);
out_directory:
    if (code < 0 && s->made_directory)
        rmdir(directory);
out:
    free(s->row);
    free(s->buffer);
    free(s->shard_first);
    free(s);
    return code;
}
