/*
 * Loading by plain reads: workers read what they place, each into a buffer that stays in its cache.
 *
 * For files that are in memory already: reads are copies then, and the disk has nothing to do. A
 * job takes some experts; what it has read is dropped from the page cache before the next.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "load.h"

#include <errno.h>
#include <stdlib.h>

enum { EXPERTS_AT_ONCE = 8 }; /* workers wait for each other once in so many */

_Static_assert((int)EXPERTS_AT_ONCE <= (int)LOAD_SLOTS_MAX, "each has a slot");

bool load_is_cached(const struct load *l)
{
    const uint32_t count = numoe_checkpoint_file_count(l->ckpt);
    bool cached = count > 0;

    for (uint32_t i = 0; cached && i < count; i++)
        cached = numoe_plain_cached(numoe_checkpoint_file(l->ckpt, i, NULL));
    return cached;
}

/* Read the biases of an expert, a few KiB. room: bytes of all of them. */
static int read_biases(struct load *l, struct slot *slot, uint8_t *room)
{
    const uint8_t *parts[NUMOE_PART_COUNT] = {NULL};

    for (unsigned p = NUMOE_PART_GATE_BIAS; p < NUMOE_PART_COUNT; p++) {
        const struct numoe_extent *part = &slot->extents[p];
        int code =
            numoe_plain_read(l->plain, part->file, part->offset, part->bytes, room, l->error);

        if (code < 0)
            return code;
        parts[p] = room;
        room += part->bytes;
    }
    load_store_biases(l, slot, parts);
    return 0;
}

static uint64_t bias_bytes(const struct load *l)
{
    struct numoe_extent parts[NUMOE_PART_COUNT];
    uint64_t bytes = 0;

    load_find_parts(l, 0, numoe_model_plan(l->model)->range.first_expert, parts);
    for (unsigned p = NUMOE_PART_GATE_BIAS; p < NUMOE_PART_COUNT; p++)
        bytes += parts[p].bytes;
    return bytes;
}

/* The next expert's, with its files open. */
static int take_turn(struct load *l, struct slot *slot, uint8_t *bias_room)
{
    int code = 0;

    slot->turn = l->turns[l->next_turn++];
    load_find_parts(l, slot->turn.layer, slot->turn.expert, slot->extents);
    for (unsigned p = 0; p < NUMOE_PART_COUNT && !code; p++)
        if (slot->extents[p].bytes)
            code = numoe_plain_open(l->plain, slot->extents[p].file, l->error);
    if (!code && slot->biases)
        code = read_biases(l, slot, bias_room);
    return code;
}

static void drop(struct load *l, const struct slot *slot)
{
    struct numoe_read reads[NUMOE_PART_COUNT];
    unsigned of_read[NUMOE_PART_COUNT], count = load_join_parts(slot->extents, reads, of_read);

    for (unsigned i = 0; i < count; i++)
        numoe_plain_drop(l->plain, reads[i].file, reads[i].offset, reads[i].bytes);
}

static int run(struct load *l, uint8_t *bias_room)
{
    struct slot *slots[EXPERTS_AT_ONCE];
    int code = 0;

    while (!code && l->packed < l->turn_count) {
        unsigned count = 0;

        numoe_plain_begin(l->plain);
        while (!code && count < EXPERTS_AT_ONCE && l->next_turn < l->turn_count) {
            slots[count] = &l->slots[count];
            code = take_turn(l, slots[count++], bias_room);
        }
        if (!code)
            code = load_run_placing(l, slots, count);
        for (unsigned i = 0; !code && i < count; i++)
            drop(l, slots[i]);
        if (!code)
            code = load_tell(l, l->packed * l->expert_bytes, l->packed == l->turn_count);
    }
    return code;
}

int load_by_plain(struct load *l)
{
    struct numoe_reader_file *files = load_files(l);
    const char *where = numoe_checkpoint_directory(l->ckpt);
    const uint64_t room_bytes = bias_bytes(l);
    uint8_t *room = malloc(room_bytes + 1);
    int code = files && room ? 0 : numoe_error_set(l->error, -ENOMEM, where, "no memory to load");

    if (!code)
        code = numoe_plain_create(files, numoe_checkpoint_file_count(l->ckpt), &l->plain, l->error);
    free(files);
    if (!code)
        code = load_make_biases(l, EXPERTS_AT_ONCE);
    if (!code)
        code = load_make_placing(l, EXPERTS_AT_ONCE);
    if (!code)
        code = run(l, room);
    free(room);
    l->way = "plain reads";
    return code;
}
