/*
 * Opening a checkpoint.
 *
 * Order: config.json, then the index, then every header, then the experts. With GGUF the metadata
 * of the first file stands for config.json, and all files are the model. All that is missing is
 * collected before the call fails, so that one failed attempt is enough to know what to fetch.
 * The table of all tensors is dropped at the end; what stays is one place for each expert tensor.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "checkpoint_open.h"

#include "files.h"
#include "gguf.h"
#include "json_scan.h"
#include "safetensors.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Limits on the two JSON files, far above real ones (0.1 MB and 60 MB). */
#define CONFIG_LIMIT ((uint64_t)16 << 20)
#define INDEX_LIMIT ((uint64_t)512 << 20)

#define CONFIG_NAME "config.json"
#define INDEX_NAME "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"
#define GGUF_SUFFIX ".gguf"

/* ---- lists of what is missing --------------------------------------------------------------- */

void numoe_list_add(struct list *list, const char *name, const char *file)
{
    char text[sizeof(struct numoe_quoted) * 2 + 16];
    size_t length = 2;

    if (file)
        length += (size_t)snprintf(text, sizeof text, "%s (in %s)", numoe_quote(name).text,
                                   numoe_quote(file).text);
    else
        length += (size_t)snprintf(text, sizeof text, "%s", numoe_quote(name).text);
    list->count++;
    if (list->count <= LIST_LOGGED)
        numoe_log_write(list->log, NUMOE_LOG_ERROR, "missing %s: %s", list->what, text);
    if (list->shown < LIST_SHOWN && list->shown + 1 == list->count &&
        list->used + length < sizeof list->text) {
        list->used += (size_t)snprintf(list->text + list->used, sizeof list->text - list->used,
                                       "%s%s", list->shown ? ", " : "", text);
        list->shown++;
    }
}

struct list_text numoe_list_text(const struct list *list)
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
    char *path = numoe_path_join(directory, name);
    int code;

    if (!path)
        return numoe_error_set(error, -ENOMEM, directory, "no memory for a path");
    code = numoe_file_json(path, limit, root, error);
    free(path);
    return code;
}

int numoe_config_number(struct opening *o, const json_t *section, const char *key, uint64_t *out)
{
    const json_t *value = key ? json_object_get(section, key) : NULL;

    if (!value || json_is_null(value))
        return 0;
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return numoe_error_set(o->error, -EBADMSG, o->ckpt->directory,
                               "%s: %s is not a whole number from 0 on", o->config_name, key);
    *out = (uint64_t)json_integer_value(value);
    return 1;
}

const char *numoe_config_architecture(const json_t *config)
{
    const char *name =
        json_string_value(json_array_get(json_object_get(config, "architectures"), 0));
    return name ? name : "none";
}

const char *numoe_config_model_type(const json_t *config)
{
    const char *name = json_string_value(json_object_get(config, "model_type"));
    return name ? name : "none";
}

/* A file name that stays within the directory. */
static bool plain_name(const char *name)
{
    return *name && strcmp(name, ".") && !strstr(name, "..") && !strpbrk(name, "/\\");
}

static int no_list(struct opening *o)
{
    return numoe_error_set(o->error, -ENOMEM, o->ckpt->directory,
                           "no memory for the list of files");
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
    return no_list(o);
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

static int bad_index(struct opening *o, const char *what)
{
    return numoe_error_set(o->error, -EBADMSG, o->ckpt->directory, INDEX_NAME " %s", what);
}

/* Which file a tensor is in, by the files seen so far; a new one is added. Neighbours mostly share
 * theirs. */
static int find_listed(struct opening *o, json_t *seen, const char *tensor, const char *name,
                       uint32_t *listed)
{
    struct numoe_checkpoint *c = o->ckpt;
    const json_t *known;
    int code;

    if (c->shard_count && !strcmp(c->shards[*listed].name, name))
        return 0;
    known = json_object_get(seen, name);
    if (known) {
        *listed = (uint32_t)json_integer_value(known);
        return 0;
    }
    if (!plain_name(name))
        return numoe_error_set(o->error, -EBADMSG, c->directory,
                               INDEX_NAME
                               ": file name \"%s\" of tensor \"%s\" leaves the directory",
                               numoe_quote(name).text, numoe_quote(tensor).text);
    *listed = c->shard_count;
    code = add_shard(o, name);
    if (code == 0 && json_object_set_new(seen, name, json_integer(*listed)) < 0)
        code = no_list(o);
    return code;
}

/* The tensors of the index, after the bracket that opens weight_map. */
static int list_tensors(struct opening *o, struct numoe_scan *scan, json_t *seen, uint64_t *count)
{
    struct numoe_tensor *items = NULL;
    uint64_t room = 0;
    uint32_t listed = 0;
    const char *tensor, *name;
    int code = 0;

    for (bool first = true; code == 0 && numoe_scan_member(scan, &first, &tensor);) {
        if (numoe_scan_peek(scan) != '"')
            return numoe_error_set(o->error, -EBADMSG, o->ckpt->directory,
                                   INDEX_NAME ": the file of tensor \"%s\" is not a string",
                                   numoe_quote(tensor).text);
        name = numoe_scan_string(scan);
        if (!name)
            break;
        code = find_listed(o, seen, tensor, name, &listed);
        if (*count == room) {
            room = room ? 2 * room : 1024;
            items = numoe_tensors_room(o->listed, room);
        }
        if (!items)
            return no_list(o);
        /* one table, and not one a file: a name is in the index once */
        items[*count] = (struct numoe_tensor){.name = tensor, .begin = listed};
        ++*count;
    }
    return code;
}

static int read_index(struct opening *o, struct numoe_scan *scan, json_t *seen)
{
    const char *key, *twice;
    uint64_t count = 0;
    bool found = false;
    int code = 0;

    if (!numoe_scan_is(scan, '{') && !scan->wrong)
        return numoe_scan_peek(scan) ? bad_index(o, "is not a JSON object")
                                     : bad_index(o, "is not sound JSON: it is empty");
    for (bool first = true; code == 0 && numoe_scan_member(scan, &first, &key);) {
        if (strcmp(key, "weight_map")) {
            numoe_scan_skip(scan);
            continue;
        }
        if (found)
            return bad_index(o, "has a duplicate weight_map");
        found = numoe_scan_is(scan, '{');
        if (!found && numoe_scan_peek(scan))
            return bad_index(o, "has no weight_map object");
        if (found)
            code = list_tensors(o, scan, seen, &count);
        else
            numoe_scan_expect(scan, '{');
    }
    if (code < 0)
        return code;
    if (!numoe_scan_end(scan))
        return numoe_error_set(o->error, -EBADMSG, o->ckpt->directory,
                               INDEX_NAME " is not sound JSON at byte %llu: %s",
                               (unsigned long long)scan->at, scan->wrong);
    if (!count)
        return bad_index(o, found ? "names no tensor" : "has no weight_map object");
    twice = numoe_tensors_join(o->listed, count);
    return twice ? numoe_error_set(o->error, -EBADMSG, o->ckpt->directory,
                                   INDEX_NAME ": duplicate tensor \"%s\"", numoe_quote(twice).text)
                 : 0;
}

/* The tensors of the index and their distinct files, these in order of name. */
static int list_shards(struct opening *o)
{
    struct numoe_checkpoint *c = o->ckpt;
    char *path = numoe_path_join(c->directory, INDEX_NAME);
    struct numoe_scan scan = {0};
    json_t *seen = json_object();
    int code = path && seen ? 0 : no_list(o);

    if (code == 0)
        code = numoe_file_slurp(path, INDEX_LIMIT, &o->index_text, &scan.bytes, o->error);
    if (code == 0)
        code = numoe_tensors_create(&o->listed, o->error);
    scan.text = o->index_text;
    if (code == 0)
        code = read_index(o, &scan, seen);
    json_decref(seen);
    free(path);
    if (code < 0)
        return code;
    o->order = malloc(c->shard_count * sizeof *o->order);
    if (!o->order)
        return no_list(o);
    for (uint32_t i = 0; i < c->shard_count; i++)
        c->shards[i].listed = i;
    qsort(c->shards, c->shard_count, sizeof *c->shards, by_name);
    for (uint32_t i = 0; i < c->shard_count; i++)
        o->order[c->shards[i].listed] = i;
    return 0;
}

static bool exists(const char *directory, const char *name)
{
    struct stat status;
    char *path = numoe_path_join(directory, name);
    bool found = path && stat(path, &status) == 0;

    free(path);
    return found;
}

static bool has_safetensors(const char *directory)
{
    return exists(directory, INDEX_NAME) || exists(directory, SINGLE_NAME);
}

static int find_files(struct opening *o)
{
    struct numoe_checkpoint *c = o->ckpt;

    if (exists(c->directory, INDEX_NAME))
        return list_shards(o);
    if (exists(c->directory, SINGLE_NAME))
        return add_shard(o, SINGLE_NAME);
    return numoe_error_set(o->error, -ENOENT, c->directory,
                           "has neither " INDEX_NAME " nor " SINGLE_NAME " nor a GGUF file");
}

/* ---- GGUF files ----------------------------------------------------------------------------- */

static bool has_suffix(const char *name, const char *suffix)
{
    const size_t length = strlen(name), end = strlen(suffix);

    return length >= end && !strcmp(name + length - end, suffix);
}

/* NAME-00001-of-00003.gguf: which of how many, and how long NAME is. */
static bool split_name(const char *name, unsigned *part, unsigned *parts, int *stem)
{
    static const char digits[] = "0123456789";
    const size_t length = strlen(name);
    const char *tail = name + length - 20;

    if (length <= 20 || tail[0] != '-' || strspn(tail + 1, digits) != 5 ||
        strncmp(tail + 6, "-of-", 4) || strspn(tail + 10, digits) != 5)
        return false;
    *part = (unsigned)strtoul(tail + 1, NULL, 10);
    *parts = (unsigned)strtoul(tail + 10, NULL, 10);
    *stem = (int)(length - 20);
    return *part >= 1 && *part <= *parts;
}

/* The model's only or first file, where the directory holds one model; none is no error. */
static int find_gguf(struct opening *o, char **file)
{
    struct numoe_checkpoint *c = o->ckpt;
    DIR *directory = opendir(c->directory);
    struct dirent *entry;
    unsigned part, parts, found = 0;
    int stem, code = 0;

    if (!directory) {
        code = -errno;
        return numoe_error_set(o->error, code, c->directory, "cannot be read: %s", strerror(-code));
    }
    while (code == 0 && (entry = readdir(directory))) {
        if (!has_suffix(entry->d_name, GGUF_SUFFIX) ||
            (split_name(entry->d_name, &part, &parts, &stem) && part > 1))
            continue;
        if (found++) {
            code = numoe_error_set(o->error, -EINVAL, c->directory,
                                   "holds several GGUF models, %s and %s among them: name a file",
                                   numoe_quote(*file).text, numoe_quote(entry->d_name).text);
        } else {
            *file = strdup(entry->d_name);
            if (!*file)
                code = no_list(o);
        }
    }
    closedir(directory);
    return code;
}

/* All files of the model that begins with this one. */
static int list_gguf(struct opening *o, const char *first)
{
    unsigned part, parts, i;
    int stem, code = 0;

    if (!split_name(first, &part, &parts, &stem))
        return add_shard(o, first);
    if (part != 1)
        return numoe_error_set(o->error, -EINVAL, first, "is file %u of %u: name the first", part,
                               parts);
    for (i = 1; i <= parts && code == 0; i++) {
        char *name;
        if (asprintf(&name, "%.*s-%05u-of-%05u%s", stem, first, i, parts, GGUF_SUFFIX) < 0)
            return no_list(o);
        code = add_shard(o, name);
        free(name);
    }
    return code;
}

/* That the metadata speaks of as many files. */
static int check_split(struct opening *o)
{
    uint64_t says = 1;
    int code = numoe_config_number(o, o->config, "split.count", &says);

    if (code < 0)
        return code;
    if (code && says > 1 && says != o->ckpt->shard_count)
        return numoe_error_set(o->error, -EBADMSG, o->ckpt->shards[0].path,
                               "is the first of %llu files by its metadata, but of %u by its name",
                               (unsigned long long)says, o->ckpt->shard_count);
    return 0;
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
            numoe_list_add(files, c->shards[i].name, NULL);
    }
    for (i = 0; i < c->shard_count; i++) {
        if (!c->shards[i].present)
            continue;
        code = o->gguf ? numoe_gguf_read(o->tensors, c->shards[i].path, i, &c->shards[i].id,
                                         i ? NULL : o->config, &damage)
                       : numoe_tensors_read(o->tensors, c->shards[i].path, i, &c->shards[i].id,
                                            &damage);
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

/* A tensor of the index in the file that it is said to be in; nothing when that is missing. */
static void find_entry(struct opening *o, const struct numoe_tensor *listed, struct list *absent)
{
    const uint32_t file = o->order[listed->begin];
    const struct shard *shard = &o->ckpt->shards[file];
    const struct numoe_tensor *tensor;

    if (!shard->present)
        return;
    tensor = numoe_tensors_find(o->tensors, listed->name, file);
    if (tensor) {
        o->entries[o->entry_count++] = tensor;
        return;
    }
    numoe_list_add(absent, listed->name, shard->name);
}

static int resolve(struct opening *o)
{
    struct numoe_checkpoint *c = o->ckpt;
    struct list files = {.log = &c->log, .what = "file"};
    struct list absent = {.log = &c->log, .what = "tensor"};
    uint64_t i, count, unlisted;
    int code;

    code = read_headers(o, &files);
    if (code == 0 && o->gguf && !files.count)
        code = check_split(o);
    if (code < 0)
        return code;
    count = numoe_tensors_count(o->listed ? o->listed : o->tensors);
    o->entries = malloc((count ? count : 1) * sizeof *o->entries);
    if (!o->entries)
        return numoe_error_set(o->error, -ENOMEM, c->directory, "no memory for %llu tensors",
                               (unsigned long long)count);
    for (i = 0; i < count; i++) {
        if (o->listed)
            find_entry(o, numoe_tensors_at(o->listed, i), &absent);
        else
            o->entries[o->entry_count++] = numoe_tensors_at(o->tensors, i);
    }
    if (files.count || absent.count)
        return numoe_error_set(o->error, files.count ? -ENOENT : -EBADMSG, c->directory,
                               "incomplete: %s%s%s", numoe_list_text(&files).text,
                               files.count && absent.count ? "; " : "",
                               numoe_list_text(&absent).text);
    unlisted = numoe_tensors_count(o->tensors) - o->entry_count;
    if (unlisted)
        numoe_log_write(&c->log, NUMOE_LOG_WARNING,
                        "%s: ignoring %llu tensors that the index does not name", c->directory,
                        (unsigned long long)unlisted);
    return 0;
}

/* ---- open and close ------------------------------------------------------------------------- */

/* The directory that the path names, or that the GGUF file it names is in. */
static int enter(struct opening *o, const char *path, char **file)
{
    struct numoe_checkpoint *c = o->ckpt;
    struct stat status;
    int code;

    if (stat(path, &status) < 0) {
        code = -errno;
        return numoe_error_set(o->error, code, path, "cannot open the checkpoint: %s",
                               strerror(-code));
    }
    if (S_ISDIR(status.st_mode)) {
        c->directory = strdup(path);
    } else if (S_ISREG(status.st_mode) && has_suffix(path, GGUF_SUFFIX)) {
        const char *slash = strrchr(path, '/');
        *file = strdup(slash ? slash + 1 : path);
        c->directory =
            slash ? strndup(path, slash == path ? 1 : (size_t)(slash - path)) : strdup(".");
        if (!*file)
            return no_list(o);
    } else {
        return numoe_error_set(o->error, -ENOTDIR, path,
                               "is not a checkpoint directory, nor a GGUF file");
    }
    return c->directory ? 0 : no_list(o);
}

/* All that there is to know without looking at a weight. */
static int read_all(struct opening *o, const char *path)
{
    char *file = NULL;
    int code = enter(o, path, &file);

    if (code == 0 && !file && !has_safetensors(o->ckpt->directory))
        code = find_gguf(o, &file);
    o->gguf = file != NULL;
    o->config_name = o->gguf ? "metadata" : CONFIG_NAME;
    if (code == 0 && o->gguf) {
        o->config = json_object();
        code = o->config ? list_gguf(o, file) : no_list(o);
    } else if (code == 0) {
        code = load_json(o->ckpt->directory, CONFIG_NAME, CONFIG_LIMIT, &o->config, o->error);
        if (code == 0)
            code = find_files(o);
    }
    free(file);
    if (code == 0)
        code = numoe_tensors_create(&o->tensors, o->error);
    if (code == 0)
        code = resolve(o);
    return code < 0 ? code : numoe_checkpoint_find_experts(o);
}

int numoe_checkpoint_open(const char *directory, const struct numoe_checkpoint_options *options,
                          struct numoe_checkpoint **checkpoint, struct numoe_error *error)
{
    static const struct numoe_checkpoint_options defaults;
    struct opening o = {.error = error, .options = options ? options : &defaults};
    struct numoe_checkpoint *c;
    int code;

    if (!directory || !*directory)
        return numoe_error_set(error, -EINVAL, NULL, "no checkpoint directory is given");
    c = calloc(1, sizeof *c);
    if (!c)
        return numoe_error_set(error, -ENOMEM, directory, "no memory for the checkpoint");
    o.ckpt = c;
    if (o.options->log)
        c->log = *o.options->log;
    c->desc = (struct numoe_model_desc)NUMOE_MODEL_DESC_INIT;
    code = read_all(&o, directory);
    if (code == 0 && !o.gguf)
        report_strays(c);
    free(o.entries);
    numoe_tensors_destroy(o.tensors);
    numoe_tensors_destroy(o.listed);
    free(o.index_text);
    free(o.order);
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
    numoe_family_file_free(checkpoint->own);
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

enum numoe_nibbles numoe_checkpoint_nibbles(const struct numoe_checkpoint *checkpoint)
{
    return numoe_family_gguf(checkpoint->family) ? NUMOE_NIBBLES_SPLIT : NUMOE_NIBBLES_ADJACENT;
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

const char *numoe_checkpoint_directory(const struct numoe_checkpoint *checkpoint)
{
    return checkpoint->directory;
}

const char *numoe_checkpoint_file(const struct numoe_checkpoint *checkpoint, uint32_t file,
                                  struct numoe_file_id *id)
{
    if (id)
        *id = checkpoint->shards[file].id;
    return checkpoint->shards[file].path;
}

uint32_t numoe_checkpoint_strays(const struct numoe_checkpoint *checkpoint)
{
    return checkpoint->strays;
}
