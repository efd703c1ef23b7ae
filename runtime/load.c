/*
 * Loading a checkpoint: files are read at the disk's rate while workers turn what has arrived to
 * tile order in its place.
 *
 * Experts are read in the order in which they lie in the files, of several files in turn, each into
 * a slot of its own; a
 * slot is submitted to the reader, then its expert is packed by one job of the pool, then the
 * slot takes the next expert. While one expert is packed the others' reads are in flight: this
 * thread waits for the disk, and helps with packing when the disk is ahead.
 *
 * Memory beyond the model's own: the slots, at most SLOT_BYTES or SLOTS_MIN experts, whichever is
 * more, but no more than there is, and 16 bytes for each expert tensor in the files.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/checked.h"
#include "base/clock.h"
#include "checkpoint.h"
#include "files.h"
#include "model.h"
#include "reader.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define SLOT_BYTES ((uint64_t)64 << 20)
#define PROGRESS_NS 100000000

enum {
    SLOTS_MIN = 4,
    SLOTS_MAX = 32,
    FILES_AT_ONCE = 4,
    ITEM_SLICES = 8,             /* packed by one item: 128 contiguous bytes of each row of down */
    JOIN_GAP = NUMOE_READ_ALIGN, /* ranges so near to each other are read as one: still less than
                                    the two blocks that a window of its own may cost */
};

/* An expert and where its first byte lies. */
struct turn {
    uint64_t offset;
    uint32_t file;
    uint32_t layer, expert;
};

/* The memory that one expert arrives in. */
struct slot {
    uint8_t *memory;
    struct turn turn;
    struct numoe_read reads[NUMOE_PART_COUNT];
    unsigned read_count, reads_left;
    uint8_t *parts[NUMOE_PART_COUNT];
    struct numoe_extent extents[NUMOE_PART_COUNT];
    float *biases; /* gate, up, down; NULL without */
    struct slot *link;
};

struct item {
    uint64_t first, count; /* slices */
};

struct outcome {
    int code;
    struct numoe_pack_report report;
};

/* The packing of one expert. */
struct packing {
    struct numoe_model *model;
    struct slot *slot; /* NULL: nothing is being packed */
    struct numoe_expert_source source;
    struct item *items;
    struct outcome *outcomes; /* one an item, so that which error is told does not depend on who */
    uint32_t *first;          /* per worker */
    struct numoe_pool_job job;
    uint64_t ticket;
};

struct load {
    const struct numoe_load_options *options;
    struct numoe_checkpoint *ckpt;
    const struct numoe_model_desc *desc;
    struct numoe_model *model;
    struct numoe_pool *pool;
    struct numoe_reader *reader;
    struct turn *turns;
    uint64_t turn_count, next_turn, packed;
    uint64_t expert_bytes; /* that are read of each */
    uint8_t *memory;
    uint64_t memory_bytes;
    float *biases; /* of all slots */
    struct slot slots[SLOTS_MAX], *free_slots;
    uint32_t reading; /* slots that wait for the reader */
    struct slot *arrived, **arrived_tail;
    struct packing packing;
    int64_t began, told;
    struct numoe_error *error;
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

/* Where the parts of an expert lie, as far as they are read: of gate and up the rows of the model's
 * range, of down all, as a slice of it is some bytes of each row. */
static void find_parts(const struct load *l, uint64_t layer, uint64_t expert,
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
    find_parts(l, 0, range->first_expert, parts);
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
        return numoe_error_set(l->error, -ENOMEM, NULL, "no memory for the order of %llu experts",
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
        return numoe_error_set(l->error, -ENOMEM, NULL, "no memory for the order of %llu experts",
                               (unsigned long long)count);
    for (layer = 0; layer < l->desc->layers; layer++)
        for (expert = range->first_expert; expert < range->end_expert; expert++, i++) {
            struct numoe_extent parts[NUMOE_PART_COUNT];
            struct turn *turn = &l->turns[i];
            unsigned p;

            find_parts(l, layer, expert, parts);
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

/* ---- reading -------------------------------------------------------------------------------- */

static int open_reader(struct load *l)
{
    struct numoe_reader_options options = NUMOE_READER_OPTIONS_INIT;
    uint32_t count = numoe_checkpoint_file_count(l->ckpt), i;
    struct numoe_reader_file *files = calloc(count, sizeof *files);
    int code;

    if (!files)
        return numoe_error_set(l->error, -ENOMEM, NULL, "no memory for %u files", count);
    for (i = 0; i < count; i++)
        files[i].path = numoe_checkpoint_file(l->ckpt, i, &files[i].id);
    options.memory = l->memory;
    options.memory_bytes = l->memory_bytes;
    options.log = numoe_context_log(numoe_model_context(l->model));
    code = numoe_reader_create(&options, files, count, &l->reader, l->error);
    free(files);
    return code;
}

/* Floats of the biases of an expert. */
static uint64_t bias_count(const struct load *l)
{
    return l->desc->bias ? 2 * l->desc->intermediate + l->desc->hidden : 0;
}

static int make_slots(struct load *l)
{
    const uint64_t asked = l->options->buffer_bytes, least = asked ? 1 : SLOTS_MIN;
    uint64_t each, count, room, i;

    /* A window for each part at worst, each with less than a block lost on either side. */
    if (!numoe_round_up_u64(numoe_checkpoint_expert_bytes(l->ckpt) +
                                NUMOE_PART_COUNT * 2 * NUMOE_READ_ALIGN,
                            NUMOE_READ_ALIGN, &each))
        return numoe_error_set(l->error, -EOVERFLOW, NULL, "experts of %llu bytes are too large",
                               (unsigned long long)numoe_checkpoint_expert_bytes(l->ckpt));
    count = (asked ? asked : SLOT_BYTES) / each;
    if (count > SLOTS_MAX)
        count = SLOTS_MAX;
    if (count < least)
        count = least;
    /* fewer where the experts leave little: one is enough, but reads then wait for packing */
    room = numoe_memory_room();
    if (each > room)
        return numoe_error_set(l->error, -ENOMEM, NULL,
                               "reading an expert takes %llu MiB, and %llu MiB of memory are left",
                               (unsigned long long)(each >> 20) + 1,
                               (unsigned long long)(room >> 20));
    if (count > 1 && room / count < each)
        count = room / each;
    if (!numoe_mul_u64(each, count, &l->memory_bytes))
        return numoe_error_set(l->error, -EOVERFLOW, NULL, "experts of %llu bytes are too large",
                               (unsigned long long)each);
    l->memory =
        mmap(NULL, l->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (l->memory == MAP_FAILED) {
        l->memory = NULL;
        return numoe_error_set(l->error, -ENOMEM, NULL, "no memory for %llu bytes of read buffers",
                               (unsigned long long)l->memory_bytes);
    }
    if (bias_count(l)) {
        l->biases = calloc(count, bias_count(l) * sizeof *l->biases);
        if (!l->biases)
            return numoe_error_set(l->error, -ENOMEM, NULL, "no memory for biases");
    }
    madvise(l->memory, l->memory_bytes, MADV_HUGEPAGE); /* fewer pages to pin for each read */
    for (i = count; i-- > 0;) {
        l->slots[i].memory = l->memory + i * each;
        l->slots[i].biases = l->biases ? l->biases + i * bias_count(l) : NULL;
        l->slots[i].link = l->free_slots;
        l->free_slots = &l->slots[i];
    }
    return 0;
}

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

/* Few ranges that hold all parts: those that overlap, or nearly touch, are read as one. */
static void join_parts(struct slot *slot, const struct numoe_extent parts[NUMOE_PART_COUNT],
                       unsigned of_read[NUMOE_PART_COUNT])
{
    unsigned order[NUMOE_PART_COUNT], count = order_parts(parts, order), i;

    slot->read_count = 0;
    for (i = 0; i < count; i++) {
        const struct numoe_extent *part = &parts[order[i]];
        struct numoe_read *last = slot->reads + slot->read_count - 1;

        if (slot->read_count && last->file == part->file &&
            part->offset <= last->offset + last->bytes + JOIN_GAP) {
            const uint64_t bytes = part->offset + part->bytes - last->offset;
            last->bytes = bytes > last->bytes ? bytes : last->bytes;
        } else {
            last = &slot->reads[slot->read_count++];
            *last = (struct numoe_read){
                .file = part->file, .offset = part->offset, .bytes = part->bytes, .user = slot};
        }
        of_read[order[i]] = slot->read_count - 1;
    }
}

/* Start reading the next expert into a slot. */
static int start_slot(struct load *l, struct slot *slot)
{
    unsigned of_read[NUMOE_PART_COUNT], i;
    uint64_t used = 0;
    int code;

    slot->turn = l->turns[l->next_turn++];
    find_parts(l, slot->turn.layer, slot->turn.expert, slot->extents);
    join_parts(slot, slot->extents, of_read);
    slot->reads_left = slot->read_count;
    l->reading++;
    for (i = 0; i < slot->read_count; i++) {
        struct numoe_read *read = &slot->reads[i];
        read->window = slot->memory + used;
        used += numoe_read_window(read->offset, read->bytes);
        code = numoe_reader_submit(l->reader, read, l->error);
        if (code < 0)
            return code;
    }
    for (i = 0; i < NUMOE_PART_COUNT; i++) {
        const struct numoe_extent *part = &slot->extents[i];
        const struct numoe_read *read = &slot->reads[part->bytes ? of_read[i] : 0];
        slot->parts[i] = part->bytes ? read->data + (part->offset - read->offset) : NULL;
    }
    return 0;
}

static int start_slots(struct load *l)
{
    while (l->free_slots && l->next_turn < l->turn_count) {
        struct slot *slot = l->free_slots;
        int code;
        l->free_slots = slot->link;
        code = start_slot(l, slot);
        if (code < 0)
            return code;
    }
    return 0;
}

/* ---- packing -------------------------------------------------------------------------------- */

static void pack_item(void *context, uint32_t index, uint32_t worker)
{
    struct packing *p = context;
    struct outcome *outcome = &p->outcomes[index];

    (void)worker;
    outcome->report = (struct numoe_pack_report){0};
    outcome->code = numoe_model_store_range(p->model, p->slot->turn.layer, p->slot->turn.expert,
                                            p->items[index].first, p->items[index].count,
                                            &p->source, &outcome->report);
}

static int make_packing(struct load *l)
{
    const struct numoe_plan *plan = numoe_model_plan(l->model);
    struct packing *p = &l->packing;
    uint64_t most;

    p->model = l->model;
    /* Each node's run may end in one short item. */
    if (!numoe_add_u64(plan->shape.slices / ITEM_SLICES + 1, plan->node_count, &most) ||
        most > NUMOE_POOL_MAX_ITEMS)
        return numoe_error_set(l->error, -EOVERFLOW, NULL, "experts of %llu slices are too large",
                               (unsigned long long)plan->shape.slices);
    p->items = calloc(most, sizeof *p->items);
    p->outcomes = calloc(most, sizeof *p->outcomes);
    if (!p->items || !p->outcomes)
        goto no_memory;
    if (plan->worker_count == numoe_pool_worker_count(l->pool)) {
        p->first = calloc(plan->worker_count + 1, sizeof *p->first);
        if (!p->first)
            goto no_memory;
    }
    p->job = (struct numoe_pool_job){
        .context = p, .phase_count = 1, .phases = {{.run = pack_item, .first = p->first}}};
    return 0;
no_memory:
    return numoe_error_set(l->error, -ENOMEM, NULL, "no memory for the packing of %llu items",
                           (unsigned long long)most);
}

static void free_packing(struct packing *p)
{
    free(p->items);
    free(p->outcomes);
    free(p->first);
}

/* Items in order of the workers that begin with them: those of the node that they go to. */
static void list_items(struct load *l, struct packing *p)
{
    const struct numoe_plan *plan = numoe_model_plan(l->model);
    const struct turn *turn = &p->slot->turn;
    uint32_t count = 0, node, worker = 0;

    for (node = 0; node < plan->node_count; node++) {
        uint64_t at = numoe_plan_boundary(plan, turn->layer, turn->expert, node);
        uint64_t end = numoe_plan_boundary(plan, turn->layer, turn->expert, node + 1);
        uint32_t begin = count, workers = plan->nodes[node].worker_count, w;

        for (; at < end; at += p->items[count++].count)
            p->items[count] = (struct item){at, end - at < ITEM_SLICES ? end - at : ITEM_SLICES};
        /* A node without workers leaves its items to whoever comes next. */
        for (w = 0; p->first && w < workers && worker < plan->worker_count; w++)
            p->first[worker++] = begin + (uint32_t)((uint64_t)(count - begin) * w / workers);
    }
    if (p->first) {
        p->first[0] = 0;
        while (worker <= plan->worker_count)
            p->first[worker++] = count;
    }
    p->job.phases[0].items = count;
}

static struct numoe_mxfp4 matrix(const struct load *l, const struct slot *slot,
                                 enum numoe_part codes)
{
    const struct numoe_extent *extents = slot->extents + codes;

    return (struct numoe_mxfp4){.codes = slot->parts[codes],
                                .scales = slot->parts[codes + 1],
                                .code_stride = extents[0].stride,
                                .scale_stride = extents[1].stride,
                                .code_step = extents[0].step,
                                .scale_step = extents[1].step,
                                .nibbles = numoe_checkpoint_nibbles(l->ckpt)};
}

/* A bias as the files have it, to floats one after another. */
static const float *read_bias(const struct slot *slot, enum numoe_part part, float *out)
{
    const struct numoe_extent *extent = &slot->extents[part];

    return numoe_floats(slot->parts[part], extent->stride,
                        extent->dtype == NUMOE_DTYPE_F32 ? NUMOE_F32 : NUMOE_BF16, extent->rows,
                        out);
}

static int start_packing(struct load *l, struct slot *slot)
{
    const uint64_t rows = l->desc->intermediate;
    struct packing *p = &l->packing;
    int code;

    p->slot = slot;
    p->source = (struct numoe_expert_source){
        .hidden = l->desc->hidden,
        .intermediate = rows,
        .gate = matrix(l, slot, NUMOE_PART_GATE_CODES),
        .up = matrix(l, slot, NUMOE_PART_UP_CODES),
        .down = matrix(l, slot, NUMOE_PART_DOWN_CODES),
        .bias_step = 1,
        .first_row = numoe_model_plan(l->model)->range.first_slice * NUMOE_TILE};
    if (slot->biases) {
        p->source.gate_bias = read_bias(slot, NUMOE_PART_GATE_BIAS, slot->biases);
        p->source.up_bias = read_bias(slot, NUMOE_PART_UP_BIAS, slot->biases + rows);
        numoe_model_store_down_bias(l->model, slot->turn.layer, slot->turn.expert,
                                    read_bias(slot, NUMOE_PART_DOWN_BIAS, slot->biases + 2 * rows));
    }
    list_items(l, p);
    code = numoe_pool_submit(l->pool, &p->job, &p->ticket);
    if (code < 0) {
        p->slot = NULL;
        return numoe_error_set(l->error, code, NULL, "the worker pool refused a job: %s",
                               strerror(-code));
    }
    return 0;
}

static int packing_failed(struct load *l, const struct outcome *outcome)
{
    const struct slot *slot = l->packing.slot;
    const struct numoe_pack_report *report = &outcome->report;
    unsigned matrix_index = report->bad_matrix < 3 ? report->bad_matrix : 0;
    enum numoe_part part = (enum numoe_part)(2 * matrix_index + 1);
    const struct numoe_family *family = numoe_checkpoint_family(l->ckpt);
    char name[160], of_expert[32] = "";

    if (outcome->code != -EDOM)
        return numoe_error_set(l->error, outcome->code, NULL, "packing layer %u expert %u: %s",
                               slot->turn.layer, slot->turn.expert, strerror(-outcome->code));
    numoe_family_tensor_name(family, numoe_checkpoint_file_layer(l->ckpt, slot->turn.layer),
                             slot->turn.expert, (unsigned)numoe_family_holder(family, part), name,
                             sizeof name);
    if (numoe_family_stacked(family))
        snprintf(of_expert, sizeof of_expert, "expert %u, ", slot->turn.expert);
    return numoe_error_set(
        l->error, -EBADMSG, numoe_checkpoint_file(l->ckpt, slot->extents[part].file, NULL),
        "tensor \"%s\": the scale byte of %srow %llu%s, group %llu is 255, which is no number",
        name, of_expert, (unsigned long long)report->bad_row,
        numoe_family_merged(family, part) ? matrix_index ? " of up" : " of gate" : "",
        (unsigned long long)report->bad_group);
}

/* Wait for the expert that is being packed, and give its slot to the next. */
static int finish_packing(struct load *l)
{
    struct packing *p = &l->packing;
    struct slot *slot = p->slot;
    bool extreme = false;
    uint32_t i;
    int code;

    if (!slot)
        return 0;
    code = numoe_pool_wait(l->pool, p->ticket);
    if (code < 0) {
        p->slot = NULL;
        return numoe_error_set(l->error, code, NULL, "the worker pool lost a job: %s",
                               strerror(-code));
    }
    for (i = 0; i < p->job.phases[0].items && code == 0; i++) {
        if (p->outcomes[i].code < 0)
            code = packing_failed(l, &p->outcomes[i]);
        extreme |= p->outcomes[i].report.extreme_scales;
    }
    p->slot = NULL;
    if (code < 0)
        return code;
    numoe_model_mark(l->model, slot->turn.layer, slot->turn.expert, true, extreme);
    l->packed++;
    slot->link = l->free_slots;
    l->free_slots = slot;
    return 0;
}

/* ---- the loop ------------------------------------------------------------------------------- */

/* About ten times a second, and once at the end. */
static int tell_progress(struct load *l, bool end)
{
    struct numoe_load_progress progress;
    int64_t time = (int64_t)numoe_now_ns();

    if (!l->options->progress || (!end && time - l->told < PROGRESS_NS))
        return 0;
    l->told = time;
    progress.bytes_done = l->packed * l->expert_bytes;
    progress.bytes_total = l->turn_count * l->expert_bytes;
    progress.seconds = (double)(time - l->began) * 1e-9;
    if (l->options->progress(l->options->user, &progress))
        return numoe_error_set(
            l->error, -ECANCELED, NULL, "loading was cancelled after %llu of %llu bytes",
            (unsigned long long)progress.bytes_done, (unsigned long long)progress.bytes_total);
    return 0;
}

/* Take in what the reader has; wait for an expert only when there is nothing else to do. */
static int take_arrivals(struct load *l, unsigned timeout_ms)
{
    struct numoe_read *read;
    int code;

    while ((code = numoe_reader_wait(l->reader, l->arrived ? 0 : timeout_ms, &read, l->error)) >
           0) {
        struct slot *slot = read->user;
        if (--slot->reads_left == 0) {
            l->reading--;
            slot->link = NULL;
            *l->arrived_tail = slot;
            l->arrived_tail = &slot->link;
        }
    }
    return code;
}

static int load_experts(struct load *l)
{
    int code;

    while (l->packed < l->turn_count) {
        code = start_slots(l);
        if (code == 0)
            code = take_arrivals(l, 100);
        if (code == 0)
            code = tell_progress(l, false);
        if (code < 0)
            return code;
        /* With nothing being read, for want of slots or of experts, only packing is left. */
        if (l->arrived || !l->reading) {
            code = finish_packing(l);
            if (code < 0)
                return code;
        }
        if (l->arrived && !l->packing.slot) {
            struct slot *slot = l->arrived;
            l->arrived = slot->link;
            if (!l->arrived)
                l->arrived_tail = &l->arrived;
            code = start_packing(l, slot);
            if (code < 0)
                return code;
        }
    }
    return tell_progress(l, true);
}

static void unload(struct load *l)
{
    /* Items read the slots, and reads write them: both must be over first. */
    if (l->packing.slot)
        numoe_pool_wait(l->pool, l->packing.ticket);
    numoe_reader_destroy(l->reader);
    free_packing(&l->packing);
    free(l->biases);
    if (l->memory)
        munmap(l->memory, l->memory_bytes);
    free(l->turns);
    numoe_checkpoint_close(l->ckpt);
}

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
    return 0;
}

int numoe_model_load(struct numoe *context, const char *directory,
                     const struct numoe_load_options *options, struct numoe_model **model,
                     struct numoe_error *error)
{
    struct numoe_checkpoint_options opening = {0};
    struct numoe_load_options settings;
    struct numoe_model_desc desc;
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
    l->arrived_tail = &l->arrived;
    l->began = l->told = (int64_t)numoe_now_ns();
    l->pool = numoe_context_pool(context);

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
    code = numoe_model_create(context, &desc, &l->model, error);
    if (code == 0)
        code = list_turns(l);
    if (code == 0)
        code = make_slots(l);
    if (code == 0)
        code = make_packing(l);
    if (code == 0)
        code = open_reader(l);
    if (code == 0)
        code = load_experts(l);
    if (code == 0 && settings.checksum)
        code = numoe_model_keep_sums(l->model, error);
    if (code == 0)
        numoe_model_set_origin(
            l->model, numoe_checkpoint_family(l->ckpt)->name, l->turn_count * l->expert_bytes,
            (double)((int64_t)numoe_now_ns() - l->began) * 1e-9, numoe_reader_path(l->reader));
out:
    unload(l);
    if (code < 0)
        numoe_model_destroy(l->model);
    else
        *model = l->model;
    free(l);
    return code;
}
