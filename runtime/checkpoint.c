/*
 * Opening a checkpoint directory.
 *
 * Order: config.json, then the index, then every header, then the experts. All that is missing
 * is collected before the call fails, so that one failed attempt is enough to know what to fetch.
 * The table of all tensors is dropped at the end; what stays is one place for each expert tensor.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "checkpoint.h"

#include "base/checked.h"
#include "files.h"
#include "numoe_kernels.h"
#include "safetensors.h"

#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Limits on the two JSON files, far above real ones (0.1 MB and 60 MB). */
#define CONFIG_LIMIT ((uint64_t)16 << 20)
#define INDEX_LIMIT ((uint64_t)512 << 20)

/* Numbers within tensor names have at most nine digits. */
#define NAME_NUMBER_LIMIT ((uint64_t)1000000000)

struct shard {
    char *name, *path;
    uint64_t bytes;
    bool present;
};

struct place {
    uint64_t offset;
    uint32_t file;
};

struct numoe_checkpoint {
    struct numoe_log log;
    char *directory;
    struct shard *shards;
    uint32_t shard_count, strays;
    const struct numoe_family *family;
    struct numoe_model_desc desc;
    uint32_t first_layer;
    struct place *places; /* [layer][expert][part] */
    uint64_t part_bytes[NUMOE_PART_COUNT];
    uint64_t expert_bytes;
};

/* What only opening needs. */
struct opening {
    struct numoe_checkpoint *ckpt;
    struct numoe_error *error;
    json_t *config, *index;
    const json_t *weight_map; /* of index; NULL with a single file */
    struct numoe_tensors *tensors;
    const struct numoe_tensor **entries; /* the model's tensors, as the index has them */
    uint64_t entry_count;
};

/* ---- lists of what is missing --------------------------------------------------------------- */

enum { LIST_SHOWN = 8, LIST_LOGGED = 1000 };

struct list {
    const struct numoe_log *log;
    const char *what;
    uint64_t count;
    unsigned shown;
    size_t used;
    char text[200];
};

static void list_add(struct list *list, const char *name)
{
    struct numoe_quoted quoted = numoe_quote(name);
    size_t length = strlen(quoted.text) + 2;

    list->count++;
    if (list->count <= LIST_LOGGED)
        numoe_log_write(list->log, NUMOE_LOG_ERROR, "missing %s: %s", list->what, quoted.text);
    if (list->shown < LIST_SHOWN && list->shown + 1 == list->count &&
        list->used + length < sizeof list->text) {
        list->used += (size_t)snprintf(list->text + list->used, sizeof list->text - list->used,
                                       "%s%s", list->shown ? ", " : "", quoted.text);
        list->shown++;
    }
}

struct list_text {
    char text[280];
};

static struct list_text list_text(const struct list *list)
{
    struct list_text out = {{0}};

    if (!list->count)
        return out;
    if (list->count > list->shown)
        snprintf(out.text, sizeof out.text, "%llu missing %s%s: %s and %llu more",
                 (unsigned long long)list->count, list->what, list->count == 1 ? "" : "s",
                 list->text, (unsigned long long)(list->count - list->shown));
    else
        snprintf(out.text, sizeof out.text, "%llu missing %s%s: %s",
                 (unsigned long long)list->count, list->what, list->count == 1 ? "" : "s",
                 list->text);
    return out;
}

/* ---- config.json and the index -------------------------------------------------------------- */

static int load_json(const char *directory, const char *name, uint64_t limit, json_t **root,
                     struct numoe_error *error)
{
    json_error_t parse_error;
    char *path = numoe_path_join(directory, name), *text = NULL;
    uint64_t bytes;
    int code;

    if (!path)
        return numoe_error_set(error, -ENOMEM, directory, "no memory for a path");
    code = numoe_file_slurp(path, limit, &text, &bytes, error);
    if (code < 0)
        goto out;
    *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &parse_error);
    if (!*root) {
        bool memory = json_error_code(&parse_error) == json_error_out_of_memory;
        code = numoe_error_set(error, memory ? -ENOMEM : -EBADMSG, path,
                               "is not sound JSON at byte %d: %s", parse_error.position,
                               numoe_quote(parse_error.text).text);
    } else if (!json_is_object(*root)) {
        code = numoe_error_set(error, -EBADMSG, path, "is not a JSON object");
    }
out:
    free(text);
    free(path);
    return code;
}

/* @return 1 with *out set, 0 when the key is absent or null, or an error */
static int config_number(struct opening *o, const json_t *section, const char *key, uint64_t *out)
{
    const json_t *value = key ? json_object_get(section, key) : NULL;

    if (!value || json_is_null(value))
        return 0;
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return numoe_error_set(o->error, -EBADMSG, o->ckpt->directory,
                               "config.json: %s is not a whole number from 0 on", key);
    *out = (uint64_t)json_integer_value(value);
    return 1;
}

/* A cap of the activation. null and 0 mean none and give 0. An absent key leaves *out as it is. */
static int config_cap(struct opening *o, const json_t *section, const char *key, float *out)
{
    const json_t *value = key ? json_object_get(section, key) : NULL;
    double number;

    if (!key)
        return 0;
    if (!value) {
        numoe_log_write(&o->ckpt->log, NUMOE_LOG_WARNING,
                        "%s: config.json has no %s; taking %g, as %s has it", o->ckpt->directory,
                        key, (double)*out, o->ckpt->family->title);
        return 0;
    }
    if (json_is_null(value)) {
        *out = 0;
        return 0;
    }
    number = json_number_value(value);
    if (!json_is_number(value) || !(number >= 0) || !isfinite((float)number))
        return numoe_error_set(o->error, -EBADMSG, o->ckpt->directory,
                               "config.json: %s is not a finite number from 0 on", key);
    *out = (float)number;
    return 0;
}

static const char *config_architecture(const json_t *config)
{
    const char *name =
        json_string_value(json_array_get(json_object_get(config, "architectures"), 0));
    return name ? name : "none";
}

static const char *config_model_type(const json_t *config)
{
    const char *name = json_string_value(json_object_get(config, "model_type"));
    return name ? name : "none";
}

/* A file name that stays within the directory. */
static bool plain_name(const char *name)
{
    return *name && strcmp(name, ".") && !strstr(name, "..") && !strpbrk(name, "/\\");
}

static int add_shard(struct opening *o, const char *name)
{
    struct numoe_checkpoint *c = o->ckpt;
    struct shard *shard;

    /* Doubling: the array grows when its count is a power of two. */
    if (!(c->shard_count & (c->shard_count - 1))) {
        size_t room = c->shard_count ? 2 * (size_t)c->shard_count : 1;
        void *grown = reallocarray(c->shards, room, sizeof *c->shards);
        if (!grown)
            goto no_memory;
        c->shards = grown;
    }
    shard = &c->shards[c->shard_count];
    *shard = (struct shard){.name = strdup(name), .path = numoe_path_join(c->directory, name)};
    if (!shard->name || !shard->path) {
        free(shard->name);
        free(shard->path);
        goto no_memory;
    }
    c->shard_count++;
    return 0;
no_memory:
    return numoe_error_set(o->error, -ENOMEM, c->directory, "no memory for the list of files");
}

static int by_name(const void *a, const void *b)
{
    const struct shard *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static struct shard *find_shard(const struct numoe_checkpoint *c, const char *name)
{
    struct shard key = {.name = (char *)(uintptr_t)name};

    return bsearch(&key, c->shards, c->shard_count, sizeof key, by_name);
}

/* The distinct files of the index, in order of name. */
static int list_shards(struct opening *o)
{
    struct numoe_checkpoint *c = o->ckpt;
    const char *tensor, *last = NULL, *name;
    json_t *seen, *value;
    int code = 0;

    o->weight_map = json_object_get(o->index, "weight_map");
    if (!json_is_object(o->weight_map))
        return numoe_error_set(o->error, -EBADMSG, c->directory,
                               "model.safetensors.index.json has no weight_map object");
    if (!json_object_size(o->weight_map))
        return numoe_error_set(o->error, -EBADMSG, c->directory,
                               "model.safetensors.index.json names no tensor");
    seen = json_object();
    if (!seen)
        return numoe_error_set(o->error, -ENOMEM, c->directory, "no memory for the list of files");
    json_object_foreach((json_t *)(uintptr_t)o->weight_map, tensor, value)
    {
        name = json_string_value(value);
        if (!name) {
            code = numoe_error_set(o->error, -EBADMSG, c->directory,
                                   "model.safetensors.index.json: the file of tensor \"%s\" is "
                                   "not a string",
                                   numoe_quote(tensor).text);
            break;
        }
        /* Neighbours mostly share their file. */
        if ((last && !strcmp(last, name)) || json_object_get(seen, name))
            continue;
        if (!plain_name(name)) {
            code = numoe_error_set(o->error, -EBADMSG, c->directory,
                                   "model.safetensors.index.json: file name \"%s\" of tensor "
                                   "\"%s\" leaves the directory",
                                   numoe_quote(name).text, numoe_quote(tensor).text);
            break;
        }
        last = name;
        code = add_shard(o, name);
        if (code < 0)
            break;
        if (json_object_set_new(seen, name, json_true()) < 0) {
            code =
                numoe_error_set(o->error, -ENOMEM, c->directory, "no memory for the list of files");
            break;
        }
    }
    json_decref(seen);
    if (code == 0)
        qsort(c->shards, c->shard_count, sizeof *c->shards, by_name);
    return code;
}

static bool exists(const char *directory, const char *name)
{
    struct stat status;
    char *path = numoe_path_join(directory, name);
    bool found = path && stat(path, &status) == 0;

    free(path);
    return found;
}

static int find_files(struct opening *o)
{
    struct numoe_checkpoint *c = o->ckpt;
    int code;

    if (exists(c->directory, "model.safetensors.index.json")) {
        code = load_json(c->directory, "model.safetensors.index.json", INDEX_LIMIT, &o->index,
                         o->error);
        return code < 0 ? code : list_shards(o);
    }
    if (exists(c->directory, "model.safetensors"))
        return add_shard(o, "model.safetensors");
    return numoe_error_set(o->error, -ENOENT, c->directory,
                           "has neither model.safetensors.index.json nor model.safetensors");
}

/* Files of the kind that no index names: reported, never merged in. */
static void report_strays(struct numoe_checkpoint *c)
{
    DIR *directory = opendir(c->directory);
    struct dirent *entry;

    if (!directory)
        return;
    while ((entry = readdir(directory))) {
        size_t length = strlen(entry->d_name);
        if (length < 12 || strcmp(entry->d_name + length - 12, ".safetensors") ||
            find_shard(c, entry->d_name))
            continue;
        c->strays++;
        numoe_log_write(&c->log, NUMOE_LOG_WARNING,
                        "%s: ignoring %s, which the model does not name", c->directory,
                        numoe_quote(entry->d_name).text);
    }
    closedir(directory);
}

/* ---- headers against the index -------------------------------------------------------------- */

static int read_headers(struct opening *o, struct list *files)
{
    struct numoe_checkpoint *c = o->ckpt;
    struct numoe_error damage = NUMOE_ERROR_INIT;
    uint32_t i;
    int code;

    for (i = 0; i < c->shard_count; i++) {
        struct stat status;
        c->shards[i].present = stat(c->shards[i].path, &status) == 0 || errno != ENOENT;
        if (!c->shards[i].present)
            list_add(files, c->shards[i].name);
    }
    for (i = 0; i < c->shard_count; i++) {
        if (!c->shards[i].present)
            continue;
        code = numoe_tensors_read(o->tensors, c->shards[i].path, i, &c->shards[i].bytes, &damage);
        if (code == 0)
            continue;
        if (!files->count)
            return numoe_error_set(o->error, code, damage.where, "%s", damage.message);
        /* Of an interrupted download the missing files are the better answer. */
        numoe_log_write(&c->log, NUMOE_LOG_ERROR, "%s: %s", damage.where, damage.message);
        c->shards[i].present = false;
    }
    return 0;
}

static int resolve(struct opening *o)
{
    struct numoe_checkpoint *c = o->ckpt;
    struct list files = {.log = &c->log, .what = "file"};
    struct list absent = {.log = &c->log, .what = "tensor"};
    uint64_t i, count, unlisted;
    const char *name;
    json_t *value;
    int code;

    code = read_headers(o, &files);
    if (code < 0)
        return code;
    count = o->weight_map ? json_object_size(o->weight_map) : numoe_tensors_count(o->tensors);
    o->entries = malloc((count ? count : 1) * sizeof *o->entries);
    if (!o->entries)
        return numoe_error_set(o->error, -ENOMEM, c->directory, "no memory for %llu tensors",
                               (unsigned long long)count);
    if (!o->weight_map) {
        for (i = 0; i < count; i++)
            o->entries[i] = numoe_tensors_at(o->tensors, i);
        o->entry_count = count;
        if (!files.count)
            return 0;
    } else {
        json_object_foreach((json_t *)(uintptr_t)o->weight_map, name, value)
        {
            const struct shard *shard = find_shard(c, json_string_value(value));
            const struct numoe_tensor *tensor;
            if (!shard->present)
                continue;
            tensor = numoe_tensors_find(o->tensors, name, (uint32_t)(shard - c->shards));
            if (tensor) {
                o->entries[o->entry_count++] = tensor;
            } else {
                char both[300];
                snprintf(both, sizeof both, "%s (in %s)", numoe_quote(name).text, shard->name);
                list_add(&absent, both);
            }
        }
    }
    if (files.count || absent.count)
        return numoe_error_set(o->error, files.count ? -ENOENT : -EBADMSG, c->directory,
                               "incomplete: %s%s%s", list_text(&files).text,
                               files.count && absent.count ? "; " : "", list_text(&absent).text);
    unlisted = numoe_tensors_count(o->tensors) - o->entry_count;
    if (unlisted)
        numoe_log_write(&c->log, NUMOE_LOG_WARNING,
                        "%s: ignoring %llu tensors that the index does not name", c->directory,
                        (unsigned long long)unlisted);
    return 0;
}

/* ---- experts -------------------------------------------------------------------------------- */

struct match {
    const struct numoe_tensor *tensor;
    uint32_t layer, expert;
    enum numoe_part part;
};

static int by_place(const void *a, const void *b)
{
    const struct match *x = a, *y = b;

    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    if (x->expert != y->expert)
        return x->expert < y->expert ? -1 : 1;
    return (int)x->part - (int)y->part;
}

/* Why experts of this type could not be computed either; empty where they could. */
static const char *missing_kernel(enum numoe_dtype dtype)
{
    switch (dtype) {
    case NUMOE_DTYPE_BF16:
        return ": no kernel for BF16 yet";
    case NUMOE_DTYPE_F8_E4M3:
        return ": no kernel for FP8 yet";
    case NUMOE_DTYPE_I32:
        return ": no kernel for INT4 yet";
    default:
        return "";
    }
}

/* The family whose names most tensors bear; matches in order of layer, expert, part. */
static int find_family(struct opening *o, struct match **out, uint64_t *out_count)
{
    struct numoe_checkpoint *c = o->ckpt;
    const struct numoe_family *family, *best = NULL;
    const struct numoe_tensor *example = NULL;
    uint64_t best_count = 0, count, i;
    struct match *matches, m;
    size_t f;

    for (f = 0; (family = numoe_family_at(f)); f++) {
        const struct numoe_tensor *first = NULL;
        for (count = i = 0; i < o->entry_count; i++)
            if (numoe_family_marks(family, o->entries[i]->name)) {
                first = first ? first : o->entries[i];
                count++;
            }
        if (count > best_count) {
            best_count = count;
            best = family;
            example = first;
        }
    }
    if (!best)
        return numoe_error_set(o->error, -ENOTSUP, c->directory,
                               "no experts of a known model (architecture %s, model_type %s)",
                               numoe_quote(config_architecture(o->config)).text,
                               numoe_quote(config_model_type(o->config)).text);
    if (!best->supported)
        return numoe_error_set(o->error, -ENOTSUP, c->directory,
                               "%s checkpoints are not supported yet by the loader%s "
                               "(architecture %s, model_type %s)",
                               best->title, missing_kernel((enum numoe_dtype)example->dtype),
                               numoe_quote(config_architecture(o->config)).text,
                               numoe_quote(config_model_type(o->config)).text);
    if (strcmp(config_architecture(o->config), best->architecture) &&
        strcmp(config_model_type(o->config), best->model_type))
        numoe_log_write(&c->log, NUMOE_LOG_WARNING,
                        "%s: taken for %s by its tensors' names; config.json says architecture "
                        "%s, model_type %s",
                        c->directory, best->title, numoe_quote(config_architecture(o->config)).text,
                        numoe_quote(config_model_type(o->config)).text);
    matches = malloc(best_count * sizeof *matches);
    if (!matches)
        return numoe_error_set(o->error, -ENOMEM, c->directory, "no memory for %llu tensors",
                               (unsigned long long)best_count);
    for (count = i = 0; i < o->entry_count; i++) {
        m.tensor = o->entries[i];
        if (numoe_family_match(best, m.tensor->name, &m.layer, &m.expert, &m.part))
            matches[count++] = m;
    }
    qsort(matches, count, sizeof *matches, by_place);
    c->family = best;
    *out = matches;
    *out_count = count;
    return 0;
}

static int disagree(struct opening *o, const char *key, uint64_t says, const char *what,
                    uint64_t found)
{
    return numoe_error_set(o->error, -EBADMSG, o->ckpt->directory,
                           "config.json says %s %llu but the tensors' %s is %llu", key,
                           (unsigned long long)says, what, (unsigned long long)found);
}

/* config.json's number, where it has one, against what the tensors say. */
static int agree(struct opening *o, const json_t *section, const char *key, const char *what,
                 uint64_t found)
{
    uint64_t says = 0;
    int code = config_number(o, section, key, &says);

    if (code <= 0)
        return code;
    return says == found ? 0 : disagree(o, key, says, what, found);
}

/* Layers and experts: which there are, and that none of their tensors is missing. */
static int count_experts(struct opening *o, const json_t *section, const struct match *matches,
                         uint64_t count)
{
    struct numoe_checkpoint *c = o->ckpt;
    const struct numoe_family *family = c->family;
    struct list absent = {.log = &c->log, .what = "tensor"};
    uint64_t experts = 0, says = 0, expected = 0, total, i;
    const struct match *widest = matches;
    int code;

    for (i = 0; i < count; i++)
        if (matches[i].expert > widest->expert)
            widest = &matches[i];
    experts = (uint64_t)widest->expert + 1;
    code = config_number(o, section, family->experts_key, &says);
    if (code < 0)
        return code;
    if (code) {
        if (experts > says)
            return numoe_error_set(o->error, -EBADMSG, c->directory,
                                   "config.json says %s %llu but there is tensor \"%s\"",
                                   family->experts_key, (unsigned long long)says,
                                   numoe_quote(widest->tensor->name).text);
        if (says > NAME_NUMBER_LIMIT)
            return disagree(o, family->experts_key, says, "number of experts", experts);
        experts = says;
    }
    c->first_layer = matches[0].layer;
    c->desc.experts = experts;
    c->desc.layers = (uint64_t)matches[count - 1].layer - c->first_layer + 1;
    code = agree(o, section, family->layers_key, "highest layer number plus 1",
                 c->first_layer + c->desc.layers);
    if (code < 0)
        return code;
    if (family->dense_layers_key)
        code =
            agree(o, section, family->dense_layers_key, "first layer with experts", c->first_layer);
    else if (c->first_layer)
        code = numoe_error_set(o->error, -EBADMSG, c->directory,
                               "the first layer with experts is %u, not 0", c->first_layer);
    if (code < 0)
        return code;

    /* Both numbers are at most 10^9: their product times 6 fits. */
    total = c->desc.layers * experts * NUMOE_PART_COUNT;
    for (i = 0; i <= count; i++) {
        uint64_t at =
            i < count
                ? ((uint64_t)(matches[i].layer - c->first_layer) * experts + matches[i].expert) *
                          NUMOE_PART_COUNT +
                      matches[i].part
                : total;
        /* Never more steps than are shown or logged, however far apart two numbers are. */
        for (; expected < at && absent.count < LIST_LOGGED; expected++) {
            char name[160];
            uint64_t whole = expected / NUMOE_PART_COUNT;
            numoe_family_tensor(family, c->first_layer + whole / experts, whole % experts,
                                (enum numoe_part)(expected % NUMOE_PART_COUNT), name, sizeof name);
            list_add(&absent, name);
        }
        absent.count += at - expected;
        expected = at + 1;
    }
    if (absent.count)
        return numoe_error_set(o->error, -EBADMSG, c->directory,
                               "%llu layers of %llu experts are incomplete: %s",
                               (unsigned long long)c->desc.layers, (unsigned long long)experts,
                               list_text(&absent).text);
    return 0;
}

/* Rows and columns of a matrix by its codes. */
static int matrix_shape(struct opening *o, const struct numoe_tensor *t, uint64_t *rows,
                        uint64_t *columns)
{
    const char *path = o->ckpt->shards[t->file].path;
    bool counts_elements = t->dtype == NUMOE_DTYPE_F4;

    if (t->dtype != NUMOE_DTYPE_I8 && t->dtype != NUMOE_DTYPE_U8 && !counts_elements)
        return numoe_error_set(o->error, -ENOTSUP, path,
                               "tensor \"%s\" is %s; experts are read as MXFP4 (I8, U8 or F4) only",
                               numoe_quote(t->name).text,
                               numoe_dtype_name((enum numoe_dtype)t->dtype));
    if (t->rank != 2 || !t->shape[0] || !t->shape[1] ||
        !numoe_mul_u64(t->shape[1], counts_elements ? 1 : 2, columns) || *columns % NUMOE_TILE)
        return numoe_error_set(
            o->error, -EBADMSG, path,
            "tensor \"%s\": shape %s of %s is no MXFP4 matrix with rows of whole "
            "groups of 32",
            numoe_quote(t->name).text, numoe_shape_text(t->shape, t->rank).text,
            numoe_dtype_name((enum numoe_dtype)t->dtype));
    *rows = t->shape[0];
    return 0;
}

static int check_matrix(struct opening *o, const struct numoe_tensor *codes,
                        const struct numoe_tensor *scales, uint64_t rows, uint64_t columns)
{
    uint64_t n, k;
    int code = matrix_shape(o, codes, &n, &k);

    if (code < 0)
        return code;
    if (n != rows || k != columns)
        return numoe_error_set(o->error, -EBADMSG, o->ckpt->shards[codes->file].path,
                               "tensor \"%s\" is a matrix of %llu x %llu where %llu x %llu is due",
                               numoe_quote(codes->name).text, (unsigned long long)n,
                               (unsigned long long)k, (unsigned long long)rows,
                               (unsigned long long)columns);
    if (scales->dtype != NUMOE_DTYPE_F8_E8M0 && scales->dtype != NUMOE_DTYPE_U8)
        return numoe_error_set(o->error, -ENOTSUP, o->ckpt->shards[scales->file].path,
                               "tensor \"%s\" is %s; scales of MXFP4 are F8_E8M0 or U8",
                               numoe_quote(scales->name).text,
                               numoe_dtype_name((enum numoe_dtype)scales->dtype));
    if (scales->rank != 2 || scales->shape[0] != rows || scales->shape[1] != columns / NUMOE_TILE)
        return numoe_error_set(
            o->error, -EBADMSG, o->ckpt->shards[scales->file].path,
            "tensor \"%s\": shape %s where [%llu, %llu] is due", numoe_quote(scales->name).text,
            numoe_shape_text(scales->shape, scales->rank).text, (unsigned long long)rows,
            (unsigned long long)(columns / NUMOE_TILE));
    return 0;
}

static int place_experts(struct opening *o, const json_t *section, const struct match *matches,
                         uint64_t count)
{
    struct numoe_checkpoint *c = o->ckpt;
    uint64_t i, h, w, part;
    int code;

    code = matrix_shape(o, matches[NUMOE_PART_GATE_CODES].tensor, &w, &h);
    if (code < 0)
        return code;
    code = agree(o, section, c->family->hidden_key, "expert width", h);
    if (code < 0)
        return code;
    code = agree(o, section, c->family->intermediate_key, "intermediate width", w);
    if (code < 0)
        return code;
    c->desc.hidden = h;
    c->desc.intermediate = w;
    c->places = malloc(count * sizeof *c->places);
    if (!c->places)
        return numoe_error_set(o->error, -ENOMEM, c->directory, "no memory for %llu tensors",
                               (unsigned long long)count);
    for (i = 0; i < count; i += NUMOE_PART_COUNT) {
        const struct match *m = matches + i;
        for (part = 0; part < NUMOE_PART_COUNT; part += 2) {
            bool down = part == NUMOE_PART_DOWN_CODES;
            code = check_matrix(o, m[part].tensor, m[part + 1].tensor, down ? h : w, down ? w : h);
            if (code < 0)
                return code;
        }
        for (part = 0; part < NUMOE_PART_COUNT; part++)
            c->places[i + part] = (struct place){m[part].tensor->begin, m[part].tensor->file};
    }
    for (part = 0; part < NUMOE_PART_COUNT; part++) {
        c->part_bytes[part] = matches[part].tensor->end - matches[part].tensor->begin;
        c->expert_bytes += c->part_bytes[part];
    }
    return 0;
}

static int describe(struct opening *o, const json_t *section)
{
    struct numoe_checkpoint *c = o->ckpt;
    const struct numoe_family *family = c->family;
    struct numoe_activation *activation = &c->desc.activation;
    const char *act = json_string_value(json_object_get(section, "hidden_act"));
    int code;

    if (act && family->act && strcmp(act, family->act))
        return numoe_error_set(o->error, -ENOTSUP, c->directory,
                               "config.json: hidden_act is %s; %s is computed with %s",
                               numoe_quote(act).text, family->title, family->act);
    *activation = family->activation;
    code = config_cap(o, section, family->limit_key, &activation->limit);
    if (code == 0)
        code = config_cap(o, section, family->gate_cap_key, &activation->gate_cap);
    if (code == 0)
        code = config_cap(o, section, family->up_cap_key, &activation->up_cap);
    if (code < 0)
        return code;
    if (activation->kind == NUMOE_SILU_CLAMPED && activation->limit == 0)
        activation->kind = NUMOE_SILU;
    if (activation->kind == NUMOE_SITU && activation->gate_cap == 0)
        return numoe_error_set(o->error, -EBADMSG, c->directory, "config.json: %s must be above 0",
                               family->gate_cap_key);
    c->desc.experts_per_token = family->experts_per_token;
    code = config_number(o, section, family->top_k_key, &c->desc.experts_per_token);
    if (code < 0)
        return code;
    if (!code)
        numoe_log_write(&c->log, NUMOE_LOG_WARNING, "%s: config.json has no %s; taking %llu",
                        c->directory, family->top_k_key,
                        (unsigned long long)c->desc.experts_per_token);
    if (!c->desc.experts_per_token || c->desc.experts_per_token > c->desc.experts)
        return numoe_error_set(o->error, -EBADMSG, c->directory,
                               "config.json says %s %llu of %llu experts", family->top_k_key,
                               (unsigned long long)c->desc.experts_per_token,
                               (unsigned long long)c->desc.experts);
    return 0;
}

static int find_experts(struct opening *o)
{
    struct numoe_checkpoint *c = o->ckpt;
    struct match *matches = NULL;
    const json_t *section = o->config;
    uint64_t count = 0;
    int code;

    code = find_family(o, &matches, &count);
    if (code < 0)
        return code;
    if (c->family->section) {
        section = json_object_get(o->config, c->family->section);
        if (!json_is_object(section)) {
            code = numoe_error_set(o->error, -EBADMSG, c->directory, "config.json has no object %s",
                                   c->family->section);
            goto out;
        }
    }
    code = count_experts(o, section, matches, count);
    if (code == 0)
        code = place_experts(o, section, matches, count);
    if (code == 0)
        code = describe(o, section);
out:
    free(matches);
    return code;
}

/* ---- open and close ------------------------------------------------------------------------- */

int numoe_checkpoint_open(const char *directory, const struct numoe_log *log,
                          struct numoe_checkpoint **checkpoint, struct numoe_error *error)
{
    struct opening o = {.error = error};
    struct numoe_checkpoint *c;
    struct stat status;
    int code;

    if (!directory || !*directory)
        return numoe_error_set(error, -EINVAL, NULL, "no checkpoint directory is given");
    if (stat(directory, &status) < 0) {
        code = -errno;
        return numoe_error_set(error, code, directory, "cannot open the checkpoint: %s",
                               strerror(-code));
    }
    if (!S_ISDIR(status.st_mode))
        return numoe_error_set(error, -ENOTDIR, directory, "is not a checkpoint directory");
    c = calloc(1, sizeof *c);
    if (!c)
        return numoe_error_set(error, -ENOMEM, directory, "no memory for the checkpoint");
    o.ckpt = c;
    if (log)
        c->log = *log;
    c->desc = (struct numoe_model_desc)NUMOE_MODEL_DESC_INIT;
    c->directory = strdup(directory);
    if (!c->directory) {
        code = numoe_error_set(error, -ENOMEM, directory, "no memory for the checkpoint");
        goto out;
    }
    code = load_json(directory, "config.json", CONFIG_LIMIT, &o.config, error);
    if (code == 0)
        code = find_files(&o);
    if (code == 0)
        code = numoe_tensors_create(&o.tensors, error);
    if (code == 0)
        code = resolve(&o);
    if (code == 0)
        code = find_experts(&o);
    if (code == 0)
        report_strays(c);
out:
    free(o.entries);
    numoe_tensors_destroy(o.tensors);
    json_decref(o.index);
    json_decref(o.config);
    if (code < 0)
        numoe_checkpoint_close(c);
    else
        *checkpoint = c;
    return code;
}

void numoe_checkpoint_close(struct numoe_checkpoint *checkpoint)
{
    uint32_t i;

    if (!checkpoint)
        return;
    for (i = 0; i < checkpoint->shard_count; i++) {
        free(checkpoint->shards[i].name);
        free(checkpoint->shards[i].path);
    }
    free(checkpoint->shards);
    free(checkpoint->places);
    free(checkpoint->directory);
    free(checkpoint);
}

const struct numoe_model_desc *numoe_checkpoint_desc(const struct numoe_checkpoint *checkpoint)
{
    return &checkpoint->desc;
}

const struct numoe_family *numoe_checkpoint_family(const struct numoe_checkpoint *checkpoint)
{
    return checkpoint->family;
}

uint64_t numoe_checkpoint_file_layer(const struct numoe_checkpoint *checkpoint, uint64_t layer)
{
    return checkpoint->first_layer + layer;
}

void numoe_checkpoint_expert(const struct numoe_checkpoint *checkpoint, uint64_t layer,
                             uint64_t expert, struct numoe_extent parts[NUMOE_PART_COUNT])
{
    const struct place *places =
        checkpoint->places + (layer * checkpoint->desc.experts + expert) * NUMOE_PART_COUNT;
    unsigned i;

    for (i = 0; i < NUMOE_PART_COUNT; i++)
        parts[i] =
            (struct numoe_extent){places[i].file, places[i].offset, checkpoint->part_bytes[i]};
}

uint64_t numoe_checkpoint_expert_bytes(const struct numoe_checkpoint *checkpoint)
{
    return checkpoint->expert_bytes;
}

uint64_t numoe_checkpoint_bytes(const struct numoe_checkpoint *checkpoint)
{
    /* Cannot overflow: every one of these bytes lies in a file. */
    return checkpoint->desc.layers * checkpoint->desc.experts * checkpoint->expert_bytes;
}

uint32_t numoe_checkpoint_file_count(const struct numoe_checkpoint *checkpoint)
{
    return checkpoint->shard_count;
}

const char *numoe_checkpoint_file(const struct numoe_checkpoint *checkpoint, uint32_t file,
                                  uint64_t *bytes)
{
    if (bytes)
        *bytes = checkpoint->shards[file].bytes;
    return checkpoint->shards[file].path;
}

uint32_t numoe_checkpoint_strays(const struct numoe_checkpoint *checkpoint)
{
    return checkpoint->strays;
}
