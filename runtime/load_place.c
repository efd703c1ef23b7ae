/*
 * Placing: what was read of an expert, to tile order in its place.
 *
 * One job of the pool for some experts. An item is some slices of gate and up, or some rows of
 * down, of one expert and one node, and begins with that node's workers. What it needs is brought
 * into a buffer of its worker's that stays in L2, a part at a time: rows lie powers of two apart,
 * and packing, which takes a little of each of many rows, is several times as slow on lines that
 * are far away than one copy of them in order and packing from L2 together. By plain reads that
 * copy is the read itself.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "load.h"

#include "base/checked.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    LINE = 64,               /* of a cache */
    STAGE_BYTES = 192 << 10, /* aimed at, of what an item has in its buffer at once */
    ITEM_BYTES = 1 << 20,    /* likewise, of what an item reads in all */
};

struct item {
    struct slot *slot;
    bool down;
    uint32_t node;
    uint64_t first, count; /* slices */
    uint64_t pair, pairs;  /* pair tiles, of down */
};

struct outcome {
    int code;
    struct numoe_pack_report report;
    struct numoe_error error; /* of reading; else message is empty */
};

/* ---- one item ------------------------------------------------------------------------------- */

/* Rows [first, first + count) of a part, of which `before` rows are not there. */
static struct numoe_extent rows_of(const struct numoe_extent *part, uint64_t before, uint64_t first,
                                   uint64_t count)
{
    struct numoe_extent rows = *part;

    rows.offset += (first - before) * part->stride;
    if (count > part->rows - (first - before))
        count = part->rows - (first - before);
    rows.rows = count;
    rows.bytes = count ? (count - 1) * part->stride + part->row_bytes : 0;
    return rows;
}

/* Where in a buffer what lies at such an offset of a file is best copied to. `rep movsb`, by which
 * kernels copy, may be four times as slow where the destination lies up to 63 bytes further within
 * its page than the source within its own (Zen 3, which takes them for overlapping). */
static uint8_t *copy_place(uint8_t *stage, uint64_t offset)
{
    const uint64_t further = ((uintptr_t)stage - offset) % NUMOE_READ_ALIGN;

    return further > 0 && further < LINE ? stage + LINE : stage;
}

/* Bring parts into a worker's buffer. */
static int bring(const struct load *l, const struct slot *slot,
                 const struct numoe_extent want[NUMOE_PART_COUNT], uint8_t *stage,
                 const uint8_t *parts[NUMOE_PART_COUNT], struct numoe_error *error)
{
    struct numoe_read reads[NUMOE_PART_COUNT];
    unsigned of_read[NUMOE_PART_COUNT], count = load_join_parts(want, reads, of_read), p;
    int code = 0;

    for (unsigned i = 0; i < count && !code; i++) {
        reads[i].data = copy_place(stage, reads[i].offset);
        stage = reads[i].data + (reads[i].bytes + LINE - 1) / LINE * LINE;
        if (l->plain)
            code = numoe_plain_read(l->plain, reads[i].file, reads[i].offset, reads[i].bytes,
                                    reads[i].data, error);
    }
    for (p = 0; p < NUMOE_PART_COUNT; p++) {
        struct numoe_read *read;

        parts[p] = NULL;
        if (!want[p].bytes)
            continue;
        read = &reads[of_read[p]];
        parts[p] = read->data + (want[p].offset - read->offset);
        /* the first part of a range finds it: parts that are joined are joined in the slot too */
        if (!l->plain && want[p].offset == read->offset && read->bytes) {
            memcpy(read->data, slot->parts[p] + (want[p].offset - slot->extents[p].offset),
                   read->bytes);
            read->bytes = 0;
        }
    }
    return code;
}

static struct numoe_mxfp4 matrix(const struct load *l, const struct slot *slot,
                                 const uint8_t *const parts[NUMOE_PART_COUNT],
                                 enum numoe_part codes)
{
    const struct numoe_extent *extents = slot->extents + codes;

    return (struct numoe_mxfp4){.codes = parts[codes],
                                .scales = parts[codes + 1],
                                .code_stride = extents[0].stride,
                                .scale_stride = extents[1].stride,
                                .code_step = extents[0].step,
                                .scale_step = extents[1].step,
                                .nibbles = numoe_checkpoint_nibbles(l->ckpt)};
}

static struct numoe_expert_source source_of(const struct load *l, const struct slot *slot)
{
    return (struct numoe_expert_source){
        .hidden = l->desc->hidden,
        .intermediate = l->desc->intermediate,
        .gate_bias = slot->biases,
        .up_bias = slot->biases ? slot->biases + l->desc->intermediate : NULL,
        .bias_step = 1};
}

/* Where slice `first` of an expert lies on a node that has it. */
static uint8_t *place_of(const struct load *l, const struct slot *slot, uint32_t node,
                         uint64_t first)
{
    uint64_t begin, count;
    const void *run =
        numoe_model_run(l->model, slot->turn.layer, slot->turn.expert, node, &begin, &count);

    return (uint8_t *)(uintptr_t)run + (first - begin) * numoe_model_shape(l->model)->bytes;
}

static int place_gate_up(const struct load *l, const struct item *item, uint8_t *stage,
                         struct outcome *outcome)
{
    const uint64_t before = numoe_model_plan(l->model)->range.first_slice * NUMOE_TILE;
    const struct slot *slot = item->slot;
    uint64_t at = item->first, left = item->count, count;
    int code = 0;

    for (; left && !code; at += count, left -= count) {
        struct numoe_extent want[NUMOE_PART_COUNT] = {{0}};
        struct numoe_expert_source source = source_of(l, slot);
        const uint8_t *parts[NUMOE_PART_COUNT];

        count = left < l->placing.slices_at_once ? left : l->placing.slices_at_once;
        for (unsigned p = NUMOE_PART_GATE_CODES; p <= NUMOE_PART_UP_SCALES; p++)
            want[p] = rows_of(&slot->extents[p], before, at * NUMOE_TILE, count * NUMOE_TILE);
        code = bring(l, slot, want, stage, parts, &outcome->error);
        if (code)
            return code;
        source.first_row = at * NUMOE_TILE;
        source.near = true;
        source.gate = matrix(l, slot, parts, NUMOE_PART_GATE_CODES);
        source.up = matrix(l, slot, parts, NUMOE_PART_UP_CODES);
        code = numoe_pack_gate_up(numoe_model_shape(l->model), &source, at, count,
                                  place_of(l, slot, item->node, at), &outcome->report);
    }
    return code;
}

/* Rows of down: to the slices of the item's node, or by plain reads, which take whole rows, to
 * those of all nodes. */
static int place_down(const struct load *l, const struct item *item, uint8_t *stage,
                      struct outcome *outcome)
{
    const uint32_t nodes = numoe_model_plan(l->model)->node_count;
    const uint32_t begin = l->plain ? 0 : item->node, end = l->plain ? nodes : item->node + 1;
    const struct slot *slot = item->slot;
    const bool whole = l->plain || item->count * NUMOE_TILE >= l->desc->intermediate;
    uint64_t at = item->pair, left = item->pairs, count;
    int code = 0;

    for (; left && !code; at += count, left -= count) {
        struct numoe_extent want[NUMOE_PART_COUNT] = {{0}};
        struct numoe_expert_source source = source_of(l, slot);
        const uint8_t *parts[NUMOE_PART_COUNT];

        count = left < l->placing.pairs_at_once ? left : l->placing.pairs_at_once;
        for (unsigned p = NUMOE_PART_DOWN_CODES; p <= NUMOE_PART_DOWN_SCALES; p++) {
            want[p] = rows_of(&slot->extents[p], 0, at * 2 * NUMOE_TILE, count * 2 * NUMOE_TILE);
            /* a node that has but some of each row takes it from where it is */
            if (!whole)
                parts[p] = slot->parts[p] + (want[p].offset - slot->extents[p].offset);
        }
        if (whole)
            code = bring(l, slot, want, stage, parts, &outcome->error);
        source.down_row = at * 2 * NUMOE_TILE;
        source.near = whole;
        if (!code)
            source.down = matrix(l, slot, parts, NUMOE_PART_DOWN_CODES);
        for (uint32_t n = begin; n < end && !code; n++) {
            uint64_t first = item->first, slices = item->count;
            const void *run = NULL;

            if (l->plain)
                run = numoe_model_run(l->model, slot->turn.layer, slot->turn.expert, n, &first,
                                      &slices);
            if (!slices)
                continue;
            code = numoe_pack_down(numoe_model_shape(l->model), &source, first, slices, at, count,
                                   run ? (uint8_t *)(uintptr_t)run : place_of(l, slot, n, first),
                                   &outcome->report);
        }
    }
    return code;
}

static void place_item(void *context, uint32_t index, uint32_t worker)
{
    struct load *l = context;
    const struct item *item = &l->placing.items[index];
    struct outcome *outcome = &l->placing.outcomes[index];
    uint8_t *stage = l->placing.stage[worker];

    outcome->report = (struct numoe_pack_report){0};
    outcome->error.message[0] = 0;
    /* by plain reads a job takes as long as the disk does: the caller hears of it, and is heard.
     * Worker 0 is the loading thread. */
    if (l->plain && worker == 0 && load_tell(l, l->packed * l->expert_bytes, false) < 0)
        atomic_store_explicit(&l->placing.stop, true, memory_order_relaxed);
    /* relaxed: the job's end publishes what they were set for; its place may not be resident */
    if (atomic_load_explicit(&l->placing.stop, memory_order_relaxed) ||
        atomic_load_explicit(&l->resident.failed, memory_order_relaxed)) {
        outcome->code = -ECANCELED;
        return;
    }
    outcome->code =
        item->down ? place_down(l, item, stage, outcome) : place_gate_up(l, item, stage, outcome);
}

/* ---- the job -------------------------------------------------------------------------------- */

static uint64_t at_least_one(uint64_t value)
{
    return value ? value : 1;
}

/* How much of an expert an item has, and how much of that at once. */
static void size_items(struct load *l, struct numoe_extent parts[NUMOE_PART_COUNT])
{
    const struct numoe_plan *plan = numoe_model_plan(l->model);
    const uint64_t slices = numoe_plan_held(plan).slices;
    const uint64_t pairs = (numoe_model_shape(l->model)->hidden_tiles + 1) / 2;
    const uint64_t workers = numoe_pool_worker_count(l->pool);
    struct placing *p = &l->placing;
    uint64_t slice = 0, pair = 0;

    for (unsigned i = NUMOE_PART_GATE_CODES; i <= NUMOE_PART_UP_SCALES; i++)
        slice += NUMOE_TILE * parts[i].stride;
    for (unsigned i = NUMOE_PART_DOWN_CODES; i <= NUMOE_PART_DOWN_SCALES; i++)
        pair += 2 * NUMOE_TILE * parts[i].stride;
    p->slices_at_once = at_least_one(STAGE_BYTES / slice);
    p->pairs_at_once = at_least_one(STAGE_BYTES / pair);
    /* all workers have some, of one expert too */
    p->slices_an_item = at_least_one(ITEM_BYTES / slice);
    if (p->slices_an_item > at_least_one(slices / (2 * workers)))
        p->slices_an_item = at_least_one(slices / (2 * workers));
    p->pairs_an_item = at_least_one(ITEM_BYTES / pair);
    if (p->pairs_an_item > at_least_one(pairs / (2 * workers)))
        p->pairs_an_item = at_least_one(pairs / (2 * workers));
    slice = slice * p->slices_at_once;
    pair = pair * p->pairs_at_once;
    /* what joined reads read between parts, and the starts of lines */
    p->stage_bytes =
        (slice > pair ? slice : pair) + NUMOE_PART_COUNT * (NUMOE_READ_ALIGN + 2 * LINE);
}

static uint64_t round_up(uint64_t value, uint64_t by)
{
    return value / by + (value % by != 0);
}

int load_make_placing(struct load *l, unsigned slots)
{
    const struct numoe_plan *plan = numoe_model_plan(l->model);
    const uint32_t workers = numoe_pool_worker_count(l->pool);
    struct numoe_extent parts[NUMOE_PART_COUNT];
    struct placing *p = &l->placing;
    uint64_t most, down;

    load_find_parts(l, 0, plan->range.first_expert, parts);
    size_items(l, parts);
    down = round_up((numoe_model_shape(l->model)->hidden_tiles + 1) / 2, p->pairs_an_item);
    /* Each node's run may end in one short item, and each node may have rows of its own of down. */
    if (!numoe_mul_u64(down, l->plain ? 1 : plan->node_count, &most) ||
        !numoe_add_u64(most, plan->node_count, &most) ||
        !numoe_add_u64(most, plan->shape.slices / p->slices_an_item + 1, &most) ||
        !numoe_mul_u64(most, slots, &most) || most > NUMOE_POOL_MAX_ITEMS)
        return numoe_error_set(l->error, -EOVERFLOW, numoe_checkpoint_directory(l->ckpt),
                               "experts of %llu slices are too large",
                               (unsigned long long)plan->shape.slices);
    p->items = calloc(most, sizeof *p->items);
    p->outcomes = calloc(most, sizeof *p->outcomes);
    p->stage = calloc(workers, sizeof *p->stage);
    if (!p->items || !p->outcomes || !p->stage)
        goto no_memory;
    for (uint64_t i = 0; i < most; i++)
        p->outcomes[i].error = (struct numoe_error)NUMOE_ERROR_INIT;
    /* touched first, and so placed, by its worker */
    for (uint32_t w = 0; w < workers; w++)
        if (posix_memalign((void **)&p->stage[w], NUMOE_READ_ALIGN, p->stage_bytes)) {
            p->stage[w] = NULL;
            goto no_memory;
        }
    if (plan->worker_count == workers) {
        p->first = calloc(workers + 1, sizeof *p->first);
        if (!p->first)
            goto no_memory;
    }
    p->job = (struct numoe_pool_job){.context = l};
    if (l->resident.begin)
        p->job.phases[p->job.phase_count++] =
            (struct numoe_pool_phase){.run = load_populate_chunk, .first = l->resident.first};
    p->job.phases[p->job.phase_count++] =
        (struct numoe_pool_phase){.run = place_item, .first = p->first};
    return 0;
no_memory:
    return numoe_error_set(l->error, -ENOMEM, numoe_checkpoint_directory(l->ckpt),
                           "no memory for the placing of %llu items", (unsigned long long)most);
}

void load_free_placing(struct load *l)
{
    struct placing *p = &l->placing;

    for (uint32_t w = 0; p->stage && w < numoe_pool_worker_count(l->pool); w++)
        free(p->stage[w]);
    free(p->stage);
    free(p->items);
    free(p->outcomes);
    free(p->first);
}

/* Items of an expert that begin with the workers of a node. */
static uint32_t list_node(const struct load *l, struct slot *slot, uint32_t node, uint32_t count)
{
    const struct numoe_plan *plan = numoe_model_plan(l->model);
    const struct placing *p = &l->placing;
    const uint64_t pairs = (numoe_model_shape(l->model)->hidden_tiles + 1) / 2;
    const uint64_t begin = numoe_plan_boundary(plan, slot->turn.layer, slot->turn.expert, node);
    const uint64_t end = numoe_plan_boundary(plan, slot->turn.layer, slot->turn.expert, node + 1);
    /* by plain reads an expert's rows of down go to all nodes at once, a share with each */
    const uint64_t from = l->plain ? pairs * node / plan->node_count : 0;
    const uint64_t to = l->plain ? pairs * (node + 1) / plan->node_count : end > begin ? pairs : 0;
    uint64_t at, some;

    for (at = begin; at < end; at += some) {
        some = end - at < p->slices_an_item ? end - at : p->slices_an_item;
        p->items[count++] = (struct item){.slot = slot, .node = node, .first = at, .count = some};
    }
    for (at = from; at < to; at += some) {
        some = to - at < p->pairs_an_item ? to - at : p->pairs_an_item;
        p->items[count++] = (struct item){.slot = slot,
                                          .down = true,
                                          .node = node,
                                          .first = begin,
                                          .count = end - begin,
                                          .pair = at,
                                          .pairs = some};
    }
    return count;
}

void load_share(const struct load *l, uint32_t *first, uint32_t *worker, uint32_t node,
                uint32_t begin, uint32_t end)
{
    const struct numoe_plan *plan = numoe_model_plan(l->model);
    const uint32_t workers = plan->nodes[node].worker_count;

    /* A node without workers leaves its items to whoever comes next. */
    for (uint32_t w = 0; first && w < workers && *worker < plan->worker_count; w++)
        first[(*worker)++] = begin + (uint32_t)((uint64_t)(end - begin) * w / workers);
}

void load_share_end(const struct load *l, uint32_t *first, uint32_t worker, uint32_t end)
{
    if (!first)
        return;
    first[0] = 0;
    while (worker <= numoe_model_plan(l->model)->worker_count)
        first[worker++] = end;
}

/* Items in order of the workers that begin with them: those of the node that they go to. */
static void list_items(struct load *l)
{
    struct placing *p = &l->placing;
    uint32_t count = 0, worker = 0;

    for (uint32_t node = 0; node < numoe_model_plan(l->model)->node_count; node++) {
        const uint32_t begin = count;

        for (unsigned s = 0; s < p->count; s++)
            count = list_node(l, p->slots[s], node, count);
        load_share(l, p->first, &worker, node, begin, count);
    }
    load_share_end(l, p->first, worker, count);
    p->item_count = count;
}

static void take_slots(struct load *l, struct slot *const *slots, unsigned count)
{
    memcpy(l->placing.slots, slots, count * sizeof *slots);
    l->placing.count = count;
    list_items(l);
    if (l->resident.begin)
        l->placing.job.phases[0].items = load_list_chunks(l, slots, count);
    l->placing.job.phases[l->placing.job.phase_count - 1].items = l->placing.item_count;
}

int load_start_placing(struct load *l, struct slot *const *slots, unsigned count)
{
    int code;

    take_slots(l, slots, count);
    code = numoe_pool_submit(l->pool, &l->placing.job, &l->placing.ticket);
    if (code < 0) {
        l->placing.count = 0;
        return numoe_error_set(l->error, code, numoe_checkpoint_directory(l->ckpt),
                               "the worker pool refused a job: %s", strerror(-code));
    }
    return 0;
}

static int placing_failed(struct load *l, const struct item *item, const struct outcome *outcome)
{
    const struct slot *slot = item->slot;
    const struct numoe_pack_report *report = &outcome->report;
    unsigned matrix_index = report->bad_matrix < 3 ? report->bad_matrix : 0;
    enum numoe_part part = (enum numoe_part)(2 * matrix_index + 1);
    const struct numoe_family *family = numoe_checkpoint_family(l->ckpt);
    char name[160], of_expert[32] = "";

    if (outcome->error.message[0])
        return numoe_error_set(l->error, outcome->code, outcome->error.where, "%s",
                               outcome->error.message);
    if (outcome->code != -EDOM)
        return numoe_error_set(l->error, outcome->code, numoe_checkpoint_directory(l->ckpt),
                               "packing layer %u expert %u: %s", slot->turn.layer,
                               slot->turn.expert, strerror(-outcome->code));
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

/* What a job that is over came to. */
static int take_outcomes(struct load *l)
{
    struct placing *p = &l->placing;
    bool extreme[LOAD_SLOTS_MAX] = {false};
    const unsigned count = p->count;

    p->count = 0;
    if (atomic_load_explicit(&p->stop, memory_order_relaxed))
        return -ECANCELED; /* load_tell said so */
    if (l->resident.begin) {
        const int code = load_take_chunks(l);

        if (code < 0)
            return code;
    }
    for (uint32_t i = 0; i < p->item_count; i++) {
        if (p->outcomes[i].code < 0)
            return placing_failed(l, &p->items[i], &p->outcomes[i]);
        for (unsigned s = 0; s < count; s++)
            extreme[s] |= p->items[i].slot == p->slots[s] && p->outcomes[i].report.extreme_scales;
    }
    for (unsigned s = 0; s < count; s++)
        numoe_model_mark(l->model, p->slots[s]->turn.layer, p->slots[s]->turn.expert, true,
                         extreme[s]);
    l->packed += count;
    return 0;
}

int load_run_placing(struct load *l, struct slot *const *slots, unsigned count)
{
    int code;

    take_slots(l, slots, count);
    code = numoe_pool_run(l->pool, &l->placing.job);
    if (code < 0) {
        l->placing.count = 0;
        return numoe_error_set(l->error, code, numoe_checkpoint_directory(l->ckpt),
                               "the worker pool refused a job: %s", strerror(-code));
    }
    return take_outcomes(l);
}

int load_finish_placing(struct load *l)
{
    int code;

    if (!l->placing.count)
        return 0;
    code = numoe_pool_wait(l->pool, l->placing.ticket);
    if (code < 0) {
        l->placing.count = 0;
        return numoe_error_set(l->error, code, numoe_checkpoint_directory(l->ckpt),
                               "the worker pool lost a job: %s", strerror(-code));
    }
    return take_outcomes(l);
}

void load_drop_placing(struct load *l)
{
    if (l->placing.count)
        numoe_pool_wait(l->pool, l->placing.ticket);
    l->placing.count = 0;
}

/* ---- biases --------------------------------------------------------------------------------- */

/* A bias as the files have it, to floats one after another. */
static const float *read_bias(const struct slot *slot, enum numoe_part part, const uint8_t *from,
                              float *out)
{
    const struct numoe_extent *extent = &slot->extents[part];

    return numoe_floats(from, extent->stride,
                        extent->dtype == NUMOE_DTYPE_F32 ? NUMOE_F32 : NUMOE_BF16, extent->rows,
                        out);
}

void load_store_biases(struct load *l, struct slot *slot,
                       const uint8_t *const parts[NUMOE_PART_COUNT])
{
    const uint64_t rows = l->desc->intermediate;
    float *down = slot->biases + 2 * rows;

    read_bias(slot, NUMOE_PART_GATE_BIAS, parts[NUMOE_PART_GATE_BIAS], slot->biases);
    read_bias(slot, NUMOE_PART_UP_BIAS, parts[NUMOE_PART_UP_BIAS], slot->biases + rows);
    read_bias(slot, NUMOE_PART_DOWN_BIAS, parts[NUMOE_PART_DOWN_BIAS], down);
    numoe_model_store_down_bias(l->model, slot->turn.layer, slot->turn.expert, down);
}
