/*
 * Loading by reading ahead: a ring of slots, each of one expert, that the reader fills at the
 * disk's rate while workers place what has arrived.
 *
 * A slot is submitted to the reader, then its expert is placed by one job of the pool, then the
 * slot takes the next expert. While one expert is placed the others' reads are in flight: this
 * thread waits for the disk, and helps with placing when the disk is ahead.
 *
 * How many blocks are in flight, and how large they are, is measured on the way in a load of some
 * size: each of a few settings is used for a while, and the best of them for the rest.
 *
 * Memory: SLOT_BYTES, or SLOTS_MIN experts if that is more; no more than there is.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "load.h"

#include "base/checked.h"
#include "base/clock.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#define SLOT_BYTES ((uint64_t)64 << 20)

enum { SLOTS_MIN = 4 };

/* The first is the one to begin with, and to stay with unless another is better: measured on
 * virtual disks and NVMe by numoe-read-rate. */
static const struct setting {
    uint32_t depth, block_bytes;
} settings[] = {{16, 2 << 20},   {8, 2 << 20}, {32, 1 << 20},
                {32, 512 << 10}, {8, 4 << 20}, {4, 4 << 20}};

enum { SETTINGS = sizeof settings / sizeof settings[0] };

/* Of each setting: what is in flight from the one before, then what is measured. All of it must be
 * little of the whole. */
#define SETTLE_BYTES ((uint64_t)64 << 20)
#define TRIAL_BYTES ((uint64_t)128 << 20)
#define TRIALS_SHARE 4

struct tuning {
    unsigned setting; /* SETTINGS: it is over */
    bool measuring;
    uint64_t bytes; /* arrived, when this trial or its settling began */
    int64_t began;
    double rates[SETTINGS]; /* bytes a ns */
};

struct ring {
    struct numoe_reader *reader;
    uint8_t *memory;
    uint64_t memory_bytes;
    unsigned slot_count;
    uint64_t slot_bytes;
    struct slot *free_slots;
    uint32_t reading; /* slots that wait for the reader */
    struct slot *arrived, **arrived_tail;
    uint64_t arrived_bytes;
    struct tuning tuning;
};

static int open_reader(struct load *l)
{
    struct numoe_reader_options options = NUMOE_READER_OPTIONS_INIT;
    struct numoe_reader_file *files = load_files(l);
    uint32_t count = numoe_checkpoint_file_count(l->ckpt);
    int code;

    if (!files)
        return numoe_error_set(l->error, -ENOMEM, numoe_checkpoint_directory(l->ckpt),
                               "no memory for %u files", count);
    for (unsigned i = 0; i < SETTINGS; i++)
        if (settings[i].depth > options.queue_depth)
            options.queue_depth = settings[i].depth;
    options.memory = l->ring->memory;
    options.memory_bytes = l->ring->memory_bytes;
    options.log = numoe_context_log(numoe_model_context(l->model));
    code = numoe_reader_create(&options, files, count, &l->ring->reader, l->error);
    free(files);
    return code;
}

static int make_slots(struct load *l)
{
    struct ring *r = l->ring;
    const uint64_t asked = l->options->buffer_bytes, least = asked ? 1 : SLOTS_MIN;
    const char *where = numoe_checkpoint_directory(l->ckpt);
    uint64_t each, count, room, i;

    /* A window for each part at worst, each with less than a block lost on either side. */
    if (!numoe_round_up_u64(numoe_checkpoint_expert_bytes(l->ckpt) +
                                NUMOE_PART_COUNT * 2 * NUMOE_READ_ALIGN,
                            NUMOE_READ_ALIGN, &each))
        return numoe_error_set(l->error, -EOVERFLOW, where, "experts of %llu bytes are too large",
                               (unsigned long long)numoe_checkpoint_expert_bytes(l->ckpt));
    count = (asked ? asked : SLOT_BYTES) / each;
    if (count > LOAD_SLOTS_MAX)
        count = LOAD_SLOTS_MAX;
    if (count < least)
        count = least;
    /* fewer where the experts leave little: one is enough, but reads then wait for packing */
    room = numoe_memory_room();
    if (each > room)
        return numoe_error_set(l->error, -ENOMEM, where,
                               "reading an expert takes %llu MiB, and %llu MiB of memory are left",
                               (unsigned long long)(each >> 20) + 1,
                               (unsigned long long)(room >> 20));
    if (count > 1 && room / count < each)
        count = room / each;
    if (!numoe_mul_u64(each, count, &r->memory_bytes))
        return numoe_error_set(l->error, -EOVERFLOW, where, "experts of %llu bytes are too large",
                               (unsigned long long)each);
    r->memory =
        mmap(NULL, r->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (r->memory == MAP_FAILED) {
        r->memory = NULL;
        return numoe_error_set(l->error, -ENOMEM, where, "no memory for %llu bytes of read buffers",
                               (unsigned long long)r->memory_bytes);
    }
    madvise(r->memory, r->memory_bytes, MADV_HUGEPAGE); /* fewer pages to pin for each read */
    for (i = count; i-- > 0;) {
        l->slots[i].memory = r->memory + i * each;
        l->slots[i].link = r->free_slots;
        r->free_slots = &l->slots[i];
    }
    r->slot_count = (unsigned)count;
    r->slot_bytes = each;
    return 0;
}

/* ---- how to read ---------------------------------------------------------------------------- */

static void use_setting(struct load *l, unsigned i)
{
    l->read_depth = settings[i].depth;
    l->read_block_bytes = settings[i].block_bytes;
    numoe_reader_tune(l->ring->reader, settings[i].depth, settings[i].block_bytes);
}

static void begin_tuning(struct load *l)
{
    struct tuning *t = &l->ring->tuning;

    t->setting = 0;
    t->began = (int64_t)numoe_now_ns();
    if (SETTINGS * (SETTLE_BYTES + TRIAL_BYTES) > l->turn_count * l->expert_bytes / TRIALS_SHARE)
        t->setting = SETTINGS;
    use_setting(l, 0);
}

static void end_tuning(struct load *l)
{
    const double *rates = l->ring->tuning.rates;
    unsigned best = 0;

    for (unsigned i = 1; i < SETTINGS; i++)
        if (rates[i] > rates[best] && rates[i] > 1.03 * rates[0])
            best = i;
    use_setting(l, best);
    numoe_log_write(numoe_context_log(numoe_model_context(l->model)), NUMOE_LOG_INFO,
                    "reading %u blocks of %u KiB at once: %.2f GB/s; %u of %u: %.2f GB/s",
                    settings[best].depth, settings[best].block_bytes >> 10, rates[best],
                    settings[0].depth, settings[0].block_bytes >> 10, rates[0]);
}

/* Look, when something arrived, whether it is time for the next setting. */
static void tune(struct load *l)
{
    struct tuning *t = &l->ring->tuning;
    const uint64_t bytes = l->ring->arrived_bytes - t->bytes;
    const int64_t now = (int64_t)numoe_now_ns();

    if (t->setting == SETTINGS || bytes < (t->measuring ? TRIAL_BYTES : SETTLE_BYTES))
        return;
    if (t->measuring) {
        t->rates[t->setting++] = (double)bytes / (double)(now - t->began);
        if (t->setting == SETTINGS)
            end_tuning(l);
        else
            use_setting(l, t->setting);
    }
    t->measuring = !t->measuring;
    t->bytes = l->ring->arrived_bytes;
    t->began = now;
}

/* ---- slots ---------------------------------------------------------------------------------- */

/* Start reading the next expert into a slot. */
static int start_slot(struct load *l, struct slot *slot)
{
    unsigned of_read[NUMOE_PART_COUNT], i;
    uint64_t used = 0;
    int code;

    slot->turn = l->turns[l->next_turn++];
    load_find_parts(l, slot->turn.layer, slot->turn.expert, slot->extents);
    slot->read_count = load_join_parts(slot->extents, slot->reads, of_read);
    slot->reads_left = slot->read_count;
    l->ring->reading++;
    for (i = 0; i < slot->read_count; i++) {
        struct numoe_read *read = &slot->reads[i];
        const uint64_t window = numoe_read_window(read->offset, read->bytes);

        /* what is sized for the first expert holds any: they are of one shape */
        if (used + window > l->ring->slot_bytes)
            return numoe_error_set(l->error, -EOVERFLOW, numoe_checkpoint_directory(l->ckpt),
                                   "layer %u expert %u takes more than %llu bytes to read",
                                   slot->turn.layer, slot->turn.expert,
                                   (unsigned long long)l->ring->slot_bytes);
        read->user = slot;
        read->window = slot->memory + used;
        used += window;
        code = numoe_reader_submit(l->ring->reader, read, l->error);
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
    while (l->ring->free_slots && l->next_turn < l->turn_count) {
        struct slot *slot = l->ring->free_slots;
        int code;
        l->ring->free_slots = slot->link;
        code = start_slot(l, slot);
        if (code < 0)
            return code;
    }
    return 0;
}

/* ---- the loop ------------------------------------------------------------------------------- */

/* Take in what the reader has; wait for an expert only when there is nothing else to do. */
static int take_arrivals(struct load *l, unsigned timeout_ms)
{
    struct ring *r = l->ring;
    struct numoe_read *read;
    int code;

    while ((code = numoe_reader_wait(r->reader, r->arrived ? 0 : timeout_ms, &read, l->error)) >
           0) {
        struct slot *slot = read->user;

        r->arrived_bytes += read->bytes;
        tune(l);
        if (--slot->reads_left == 0) {
            r->reading--;
            slot->link = NULL;
            *r->arrived_tail = slot;
            r->arrived_tail = &slot->link;
        }
    }
    return code;
}

static struct slot *take_arrived(struct ring *r)
{
    struct slot *slot = r->arrived;

    r->arrived = slot->link;
    if (!r->arrived)
        r->arrived_tail = &r->arrived;
    return slot;
}

/* Wait for the expert that is being placed, and give its slot to the next. */
static int finish(struct load *l)
{
    struct slot *slot = l->placing.count ? l->placing.slots[0] : NULL;
    int code = load_finish_placing(l);

    if (code < 0 || !slot)
        return code;
    slot->link = l->ring->free_slots;
    l->ring->free_slots = slot;
    return 0;
}

static int run(struct load *l)
{
    struct ring *r = l->ring;
    int code;

    while (l->packed < l->turn_count) {
        code = start_slots(l);
        if (code == 0)
            code = take_arrivals(l, 100);
        if (code == 0)
            code = load_tell(l, l->packed * l->expert_bytes, false);
        if (code < 0)
            return code;
        /* With nothing being read, for want of slots or of experts, only placing is left. */
        if (r->arrived || !r->reading) {
            code = finish(l);
            if (code < 0)
                return code;
        }
        if (r->arrived && !l->placing.count) {
            struct slot *slot = take_arrived(r);

            if (slot->biases)
                load_store_biases(l, slot, (const uint8_t *const *)slot->parts);
            code = load_start_placing(l, &slot, 1);
            if (code < 0)
                return code;
        }
    }
    return load_tell(l, l->packed * l->expert_bytes, true);
}

int load_by_ring(struct load *l)
{
    int code;

    l->ring = calloc(1, sizeof *l->ring);
    if (!l->ring)
        return numoe_error_set(l->error, -ENOMEM, numoe_checkpoint_directory(l->ckpt),
                               "no memory to load");
    l->ring->arrived_tail = &l->ring->arrived;
    code = make_slots(l);
    if (code == 0)
        code = load_make_biases(l, l->ring->slot_count);
    if (code == 0)
        code = load_make_placing(l, 1);
    if (code == 0)
        code = open_reader(l);
    if (code < 0)
        return code;
    begin_tuning(l);
    code = run(l);
    l->way = numoe_reader_path(l->ring->reader);
    return code;
}

void load_end_ring(struct load *l)
{
    if (!l->ring)
        return;
    numoe_reader_destroy(l->ring->reader);
    if (l->ring->memory)
        munmap(l->ring->memory, l->ring->memory_bytes);
    free(l->ring);
}
