/*
 * Loading by reading ahead: a ring of slots, each of one expert, that the reader fills at the
 * disk's rate while workers place what has arrived.
 *
 * A slot is submitted to the reader, then its expert is placed by one job of the pool, then the
 * slot takes the next expert. While one expert is placed the others' reads are in flight: this
 * thread waits for the disk, and helps with placing when the disk is ahead.
 *
 * How many blocks are in flight, and how large they are, is measured on the way in a load of some
 * size (read_tuning.h).
 *
 * Memory: SLOT_BYTES, or SLOTS_MIN experts if that is more; no more than there is.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "load.h"

#include "base/checked.h"
#include "base/clock.h"
#include "read_tuning.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#define SLOT_BYTES ((uint64_t)64 << 20)

enum { SLOTS_MIN = 4 };

struct ring {
    struct numoe_reader *reader;
    uint8_t *memory;
    uint64_t memory_bytes;
    unsigned slot_count;
    uint64_t slot_bytes;
    struct slot *free_slots;
    uint32_t reading; /* slots that wait for the reader */
    struct slot *arrived, **arrived_tail;
    struct numoe_read_tuning tuning;
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
    for (unsigned i = 0; i < NUMOE_READ_SETTINGS; i++)
        if (numoe_read_settings[i].depth > options.queue_depth)
            options.queue_depth = numoe_read_settings[i].depth;
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

static void use_setting(struct load *l)
{
    const struct numoe_read_setting *setting = &numoe_read_settings[l->ring->tuning.setting];

    l->read_depth = setting->depth;
    l->read_block_bytes = setting->block_bytes;
    numoe_reader_tune(l->ring->reader, setting->depth, setting->block_bytes);
}

static void log_tuned(const struct load *l)
{
    const struct numoe_log *log = numoe_context_log(numoe_model_context(l->model));
    const struct numoe_read_tuning *t = &l->ring->tuning;
    const struct numoe_read_setting *first = &numoe_read_settings[0];

    if (t->rates[0][0] > 0)
        numoe_log_write(log, NUMOE_LOG_INFO,
                        "reading %u blocks of %u KiB at once: %.2f GB/s; %u of %u: %.2f GB/s",
                        l->read_depth, l->read_block_bytes >> 10, t->rates[t->setting][0],
                        first->depth, first->block_bytes >> 10, t->rates[0][0]);
    else
        numoe_log_write(log, NUMOE_LOG_INFO,
                        "reading %u blocks of %u KiB at once: files are read faster than placed",
                        l->read_depth, l->read_block_bytes >> 10);
}

/* Look, when something arrived, whether it is time for the next setting. */
static void tune(struct load *l)
{
    struct numoe_read_tuning *t = &l->ring->tuning;

    if (numoe_read_tuning_over(t))
        return;
    if (numoe_read_tuning_look(t, numoe_reader_bytes(l->ring->reader),
                               numoe_reader_dry(l->ring->reader), numoe_now_ns()))
        use_setting(l);
    if (numoe_read_tuning_over(t))
        log_tuned(l);
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
    numoe_read_tuning_begin(&l->ring->tuning, l->turn_count * l->expert_bytes, numoe_now_ns());
    use_setting(l);
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
