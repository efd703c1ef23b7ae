/*
 * Loading a checkpoint: in which order, by which way, and what is told of it.
 *
 * Experts are read in the order in which they lie in the files, of several files in turn. Files
 * that are in memory already are read by the workers that place their bytes (load_plain.c); others
 * are read ahead, by io_uring, while workers place what has arrived (load_ring.c).
 *
 * Memory beyond the model's own: the ring or nothing, a buffer of some 200 KiB a worker, and 16
 * bytes for each expert tensor in the files.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "load.h"

#include "base/checked.h"
#include "base/clock.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PROGRESS_NS 100000000

enum {
    FILES_AT_ONCE = 4,
    JOIN_GAP = NUMOE_READ_ALIGN, /* ranges so near to each other are read as one: still less than
                                    the two blocks that a window of its own may cost */
};

/* ---- order ---------------------------------------------------------------------------------- */

static int by_file_order(const void *a, const void *b)
{
    const struct turn *x = a, *y = b;

    if (x->file != y->file)
        return x->file < y->file ? -1 : 1;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    return x->expert < y->expert ? -1 : x->expert > y->expert;
}

void load_find_parts(const struct load *l, uint64_t layer, uint64_t expert,
                     struct numoe_extent parts[NUMOE_PART_COUNT])
{
    const struct numoe_range *range = &numoe_model_plan(l->model)->range;
    const uint64_t rows = l->desc->intermediate, first = range->first_slice * NUMOE_TILE;
    const uint64_t end =
        range->end_slice * NUMOE_TILE < rows ? range->end_slice * NUMOE_TILE : rows;
    unsigned p;

    numoe_checkpoint_expert(l->ckpt, layer, expert, parts);
    for (p = NUMOE_PART_GATE_CODES; p <= NUMOE_PART_UP_SCALES; p++) {
        parts[p].offset += first * parts[p].stride;
        parts[p].rows = end - first;
        parts[p].bytes = (parts[p].rows - 1) * parts[p].stride + parts[p].row_bytes;
    }
}

/* Bytes of one expert that are read. */
static uint64_t read_bytes(const struct load *l)
{
    const struct numoe_range *range = &numoe_model_plan(l->model)->range;
    struct numoe_extent whole[NUMOE_PART_COUNT], parts[NUMOE_PART_COUNT];
    uint64_t bytes = numoe_checkpoint_expert_bytes(l->ckpt);
    unsigned p;

    numoe_checkpoint_expert(l->ckpt, 0, range->first_expert, whole);
    load_find_parts(l, 0, range->first_expert, parts);
    for (p = NUMOE_PART_GATE_CODES; p <= NUMOE_PART_UP_SCALES; p++)
        bytes -= (whole[p].rows - parts[p].rows) *
                 (p % 2 ? l->desc->hidden / NUMOE_TILE : l->desc->hidden / 2);
    return bytes;
}

/* Each file's turns stay in order, and FILES_AT_ONCE files take turns: disks of an array, and
 * servers of a network, that one file would leave idle. */
static int deal_turns(struct load *l)
{
    struct turn *dealt = malloc(l->turn_count * sizeof *dealt);
    uint64_t at[FILES_AT_ONCE] = {0}, next = 0, count = 0;
    unsigned lane;

    if (!dealt)
        return numoe_error_set(l->error, -ENOMEM, numoe_checkpoint_directory(l->ckpt),
                               "no memory for the order of %llu experts",
                               (unsigned long long)l->turn_count);
    for (lane = 0; lane < FILES_AT_ONCE; lane++)
        at[lane] = l->turn_count;
    for (lane = 0; count < l->turn_count; lane = (lane + 1) % FILES_AT_ONCE) {
        uint64_t *here = &at[lane];

        if (*here == l->turn_count && next < l->turn_count) {
            *here = next;
            while (next < l->turn_count && l->turns[next].file == l->turns[*here].file)
                next++;
        }
        if (*here == l->turn_count)
            continue;
        dealt[count++] = l->turns[*here];
        if (++*here == l->turn_count || l->turns[*here].file != dealt[count - 1].file)
            *here = l->turn_count;
    }
    free(l->turns);
    l->turns = dealt;
    return 0;
}

static int list_turns(struct load *l)
{
    const struct numoe_range *range = &numoe_model_plan(l->model)->range;
    uint64_t layer, expert, i = 0;
    uint64_t count = l->desc->layers * (range->end_expert - range->first_expert);

    l->turns = malloc(count * sizeof *l->turns);
    if (!l->turns)
        return numoe_error_set(l->error, -ENOMEM, numoe_checkpoint_directory(l->ckpt),
                               "no memory for the order of %llu experts",
                               (unsigned long long)count);
    for (layer = 0; layer < l->desc->layers; layer++)
        for (expert = range->first_expert; expert < range->end_expert; expert++, i++) {
            struct numoe_extent parts[NUMOE_PART_COUNT];
            struct turn *turn = &l->turns[i];
            unsigned p;

            load_find_parts(l, layer, expert, parts);
            *turn =
                (struct turn){parts[0].offset, parts[0].file, (uint32_t)layer, (uint32_t)expert};
            for (p = 1; p < NUMOE_PART_GATE_BIAS; p++)
                if (parts[p].file < turn->file ||
                    (parts[p].file == turn->file && parts[p].offset < turn->offset)) {
                    turn->file = parts[p].file;
                    turn->offset = parts[p].offset;
                }
        }
    qsort(l->turns, count, sizeof *l->turns, by_file_order);
    l->turn_count = count;
    l->expert_bytes = read_bytes(l);
    return deal_turns(l);
}

/* ---- what both ways need -------------------------------------------------------------------- */

/* Parts that there are, in the order in which they lie in the files. */
static unsigned order_parts(const struct numoe_extent parts[NUMOE_PART_COUNT],
                            unsigned order[NUMOE_PART_COUNT])
{
    unsigned count = 0, i, j;

    for (i = 0; i < NUMOE_PART_COUNT; i++) {
        if (!parts[i].bytes)
            continue;
        for (j = count++; j > 0 && (parts[order[j - 1]].file > parts[i].file ||
                                    (parts[order[j - 1]].file == parts[i].file &&
                                     parts[order[j - 1]].offset > parts[i].offset));
             j--)
            order[j] = order[j - 1];
        order[j] = i;
    }
    return count;
}

unsigned load_join_parts(const struct numoe_extent parts[NUMOE_PART_COUNT],
                         struct numoe_read reads[NUMOE_PART_COUNT],
                         unsigned of_read[NUMOE_PART_COUNT])
{
    unsigned order[NUMOE_PART_COUNT], count = order_parts(parts, order), made = 0;

    for (unsigned i = 0; i < count; i++) {
        const struct numoe_extent *part = &parts[order[i]];
        struct numoe_read *last = made ? &reads[made - 1] : NULL;

        if (last && last->file == part->file &&
            part->offset <= last->offset + last->bytes + JOIN_GAP) {
            const uint64_t bytes = part->offset + part->bytes - last->offset;
            last->bytes = bytes > last->bytes ? bytes : last->bytes;
        } else {
            reads[made++] = (struct numoe_read){
                .file = part->file, .offset = part->offset, .bytes = part->bytes};
        }
        of_read[order[i]] = made - 1;
    }
    return made;
}

struct numoe_reader_file *load_files(const struct load *l)
{
    const uint32_t count = numoe_checkpoint_file_count(l->ckpt);
    struct numoe_reader_file *files = calloc(count, sizeof *files);

    for (uint32_t i = 0; files && i < count; i++)
        files[i].path = numoe_checkpoint_file(l->ckpt, i, &files[i].id);
    return files;
}

int load_make_biases(struct load *l, unsigned slots)
{
    const uint64_t each = l->desc->bias ? 2 * l->desc->intermediate + l->desc->hidden : 0;

    if (!each)
        return 0;
    l->biases = calloc(slots, each * sizeof *l->biases);
    if (!l->biases)
        return numoe_error_set(l->error, -ENOMEM, numoe_checkpoint_directory(l->ckpt),
                               "no memory for biases");
    for (unsigned i = 0; i < slots; i++)
        l->slots[i].biases = l->biases + i * each;
    return 0;
}

/* ---- progress ------------------------------------------------------------------------------- */

static const char *const stage_names[] = {"making memory resident", "loading", "taking checksums"};

static void begin_stage(struct load *l, enum numoe_load_stage stage, uint64_t total)
{
    l->stage = stage;
    l->stage_total = total;
    l->stage_began = (int64_t)numoe_now_ns();
}

int load_tell(struct load *l, uint64_t done, bool end)
{
    struct numoe_load_progress progress;
    int64_t time = (int64_t)numoe_now_ns();

    if (!l->options->progress || (!end && time - l->told < PROGRESS_NS))
        return 0;
    l->told = time;
    progress.stage = l->stage;
    progress.bytes_done = done;
    progress.bytes_total = l->stage_total;
    progress.seconds = (double)(time - l->stage_began) * 1e-9;
    if (l->options->progress(l->options->user, &progress))
        return numoe_error_set(l->error, -ECANCELED, numoe_checkpoint_directory(l->ckpt),
                               "%s was cancelled after %llu of %llu bytes", stage_names[l->stage],
                               (unsigned long long)done, (unsigned long long)l->stage_total);
    return 0;
}

static int look(void *user, uint64_t done, uint64_t total)
{
    struct load *l = user;

    l->stage_total = total;
    return load_tell(l, done, done == total);
}

/* ---- the whole ------------------------------------------------------------------------------ */

static int read_options(const struct numoe_load_options *given, struct numoe_load_options *out,
                        struct numoe_error *error)
{
    *out = (struct numoe_load_options)NUMOE_LOAD_OPTIONS_INIT;
    if (!given)
        return 0;
    if (given->size < sizeof given->size)
        return numoe_error_set(error, -EINVAL, "numoe_load_options", "size %zu is not set",
                               given->size);
    memcpy(out, given, given->size < sizeof *out ? given->size : sizeof *out);
    out->size = sizeof *out;
    if ((unsigned)out->arithmetic > NUMOE_ARITHMETICS)
        return numoe_error_set(error, -EINVAL, "numoe_load_options", "arithmetic %d is not known",
                               (int)out->arithmetic);
    if ((unsigned)out->read > NUMOE_READ_CACHED)
        return numoe_error_set(error, -EINVAL, "numoe_load_options",
                               "way of reading %d is not known", (int)out->read);
    return 0;
}

static bool by_plain_reads(const struct load *l)
{
    if (l->options->read == NUMOE_READ_AUTO)
        return load_is_cached(l);
    return l->options->read == NUMOE_READ_CACHED;
}

static double since(int64_t began)
{
    return (double)((int64_t)numoe_now_ns() - began) * 1e-9;
}

static int load_experts(struct load *l, bool plain)
{
    int64_t began;
    int code = list_turns(l);

    if (code < 0)
        return code;
    began = (int64_t)numoe_now_ns();
    begin_stage(l, NUMOE_LOAD_READING, l->turn_count * l->expert_bytes);
    code = plain ? load_by_plain(l) : load_by_ring(l);
    l->placing_seconds = since(began);
    return code;
}

/* Items read the slots, and reads write them: both must be over first. */
static void unload(struct load *l)
{
    load_drop_placing(l);
    load_end_ring(l);
    numoe_plain_destroy(l->plain);
    load_free_placing(l);
    load_free_resident(l);
    free(l->biases);
    free(l->turns);
    numoe_checkpoint_close(l->ckpt);
}

static void report(const struct load *l)
{
    struct numoe_model_origin origin = {.family = numoe_checkpoint_family(l->ckpt)->name,
                                        .io_path = l->way,
                                        .checkpoint_bytes = l->turn_count * l->expert_bytes,
                                        .seconds = since(l->began),
                                        .resident_seconds = l->resident_seconds,
                                        .placing_seconds = l->placing_seconds,
                                        .meanwhile_seconds = l->resident.seconds,
                                        .read_depth = l->read_depth,
                                        .read_block_bytes = l->read_block_bytes};

    numoe_model_set_origin(l->model, &origin);
}

int numoe_model_load(struct numoe *context, const char *directory,
                     const struct numoe_load_options *options, struct numoe_model **model,
                     struct numoe_error *error)
{
    struct numoe_checkpoint_options opening = {0};
    struct numoe_load_options settings;
    struct numoe_model_desc desc;
    struct numoe_watch watch = {.look = look};
    bool plain, later;
    int64_t began;
    struct load *l;
    int code;

    if (!context || !directory || !model)
        return numoe_error_set(error, -EINVAL, "numoe_model_load", "a pointer is NULL");
    code = read_options(options, &settings, error);
    if (code < 0)
        return code;
    l = calloc(1, sizeof *l);
    if (!l)
        return numoe_error_set(error, -ENOMEM, directory, "no memory to load");
    l->options = &settings;
    l->error = error;
    l->began = l->told = (int64_t)numoe_now_ns();
    l->pool = numoe_context_pool(context);
    watch.user = l;

    opening.log = numoe_context_log(context);
    opening.draft = settings.draft;
    opening.family = settings.family_file;
    code = numoe_checkpoint_open(directory, &opening, &l->ckpt, error);
    if (code < 0)
        goto out;
    desc = *numoe_checkpoint_desc(l->ckpt);
    desc.range = settings.range;
    if (settings.arithmetic)
        desc.arithmetic = settings.arithmetic;
    l->desc = &desc;
    begin_stage(l, NUMOE_LOAD_MEMORY, 0);
    began = (int64_t)numoe_now_ns();
    plain = by_plain_reads(l);
    /* by plain reads there is nothing to do at once: all of it is work of the same processors */
    later = !plain && !numoe_context_gpu(context);
    code = numoe_model_create_watched(context, &desc, later ? NUMOE_RESIDENT_LATER : NUMOE_RESIDENT,
                                      &watch, &l->model, error);
    l->resident_seconds = since(began);
    if (code == 0 && later)
        code = load_make_resident(l);
    if (code == 0)
        code = load_experts(l, plain);
    if (code == 0 && settings.checksum) {
        begin_stage(l, NUMOE_LOAD_CHECKSUMS, 0);
        code = numoe_model_keep_sums(l->model, &watch, error);
    }
    if (code == 0)
        report(l);
out:
    unload(l);
    if (code < 0)
        numoe_model_destroy(l->model);
    else
        *model = l->model;
    free(l);
    return code;
}
