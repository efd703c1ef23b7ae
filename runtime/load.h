/*
 * load.h - what the parts of loading share: load.c (options, order, the whole), load_ring.c
 * (experts read ahead into a ring), load_plain.c (experts read where they are placed), load_place.c
 * (from what was read to tile order in its place) and load_resident.c (the memory of that place).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_LOAD_H
#define NUMOE_LOAD_H

#include "checkpoint.h"
#include "model.h"
#include "plain.h"
#include "reader.h"

#include <stdatomic.h>

enum { LOAD_SLOTS_MAX = 32 };

/* An expert and where its first byte lies. */
struct turn {
    uint64_t offset;
    uint32_t file;
    uint32_t layer, expert;
};

/* An expert on its way. */
struct slot {
    struct turn turn;
    struct numoe_extent extents[NUMOE_PART_COUNT];
    float *biases; /* gate, up, down; NULL without */
    /* of load_ring.c: the memory that it arrives in */
    uint8_t *memory;
    struct numoe_read reads[NUMOE_PART_COUNT];
    unsigned read_count, reads_left;
    uint8_t *parts[NUMOE_PART_COUNT];
    struct slot *link;
};

struct item;
struct outcome;

struct chunk {
    uint32_t node, index;
};

/* Memory that is made resident on the way. */
struct resident {
    uint64_t *begin;      /* [nodes + 1] of each node's chunks in taken; NULL: all is resident */
    bool *taken;          /* resident, or of the job at hand */
    struct chunk *chunks; /* of the job at hand */
    uint32_t count;
    uint32_t *first;            /* per worker; NULL: equal shares */
    uint64_t began;             /* the job's first phase, ... */
    atomic_uint_fast64_t ended; /* ... and when its last chunk was done */
    double seconds;             /* sum of that */
    atomic_int failed;          /* the first failure's code */
    struct numoe_error error;
};

/* The placing of some experts by one job of the pool. */
struct placing {
    struct slot *slots[LOAD_SLOTS_MAX];
    unsigned count; /* 0: nothing is being placed */
    struct item *items;
    struct outcome *outcomes; /* one an item, so that which error is told does not depend on who */
    uint32_t item_count;
    uint32_t *first; /* per worker; NULL: equal shares */
    uint8_t **stage; /* per worker */
    uint64_t stage_bytes;
    uint64_t slices_an_item, slices_at_once; /* of gate and up */
    uint64_t pairs_an_item, pairs_at_once;   /* pair tiles of down */
    struct numoe_pool_job job;
    uint64_t ticket;
    atomic_bool stop; /* the caller wants no more */
};

struct load {
    const struct numoe_load_options *options;
    struct numoe_checkpoint *ckpt;
    const struct numoe_model_desc *desc;
    struct numoe_model *model;
    struct numoe_pool *pool;
    struct turn *turns;
    uint64_t turn_count, next_turn, packed;
    uint64_t expert_bytes; /* that are read of each */
    float *biases;         /* of all slots */
    struct slot slots[LOAD_SLOTS_MAX];
    struct placing placing;
    struct resident resident;
    int64_t began, told;
    enum numoe_load_stage stage;
    uint64_t stage_total; /* bytes */
    int64_t stage_began;
    const char *way; /* how files are read */
    uint32_t read_depth, read_block_bytes;
    double resident_seconds, placing_seconds;
    struct numoe_error *error;
    /* one of the two */
    struct numoe_plain *plain;
    struct ring *ring;
};

/* Where the parts of an expert lie, as far as they are read: of gate and up the rows of the model's
 * range, of down all, as a slice of it is some bytes of each row. */
void load_find_parts(const struct load *l, uint64_t layer, uint64_t expert,
                     struct numoe_extent parts[NUMOE_PART_COUNT]);

/* Few ranges that hold all parts: those that overlap, or nearly touch, are read as one.
 * @return how many; of_read[p] is the one that part p is in */
unsigned load_join_parts(const struct numoe_extent parts[NUMOE_PART_COUNT],
                         struct numoe_read reads[NUMOE_PART_COUNT],
                         unsigned of_read[NUMOE_PART_COUNT]);

/* Names of the checkpoint's files, to be freed; NULL when out of memory. */
struct numoe_reader_file *load_files(const struct load *l);

/* Room for the biases of so many slots, if there are any. */
int load_make_biases(struct load *l, unsigned slots);

/* Tell the caller how far this stage is, about ten times a second, and at its end. In the loading
 * thread. @return 0; -ECANCELED: he wants no more */
int load_tell(struct load *l, uint64_t done, bool end);

/* ---- placing ------------------------------------------------------------------------------- */

/* @param slots  most experts of a job */
int load_make_placing(struct load *l, unsigned slots);
void load_free_placing(struct load *l);

/* Begin to place experts whose biases are read: what was read of them into slot->parts, or, with
 * l->plain, by reading it. One job at a time. */
int load_start_placing(struct load *l, struct slot *const *slots, unsigned count);

/* The same, with this thread's help, until it is done. */
int load_run_placing(struct load *l, struct slot *const *slots, unsigned count);

/* Wait for the job, if any, and mark what it placed. */
int load_finish_placing(struct load *l);

/* The same of a load that has failed: nothing is marked. */
void load_drop_placing(struct load *l);

/* Biases of an expert, from what was read of them, and b2 to its place. */
void load_store_biases(struct load *l, struct slot *slot,
                       const uint8_t *const parts[NUMOE_PART_COUNT]);

/* Items [begin, end) begin with the workers of a node, whose first is *worker: shares of them into
 * first, unless it is NULL. Nodes in order; then the end. */
void load_share(const struct load *l, uint32_t *first, uint32_t *worker, uint32_t node,
                uint32_t begin, uint32_t end);
void load_share_end(const struct load *l, uint32_t *first, uint32_t worker, uint32_t end);

/* ---- memory -------------------------------------------------------------------------------- */

/* Of a model whose memory is made resident later: jobs of placing do it, from now on. */
int load_make_resident(struct load *l);
void load_free_resident(struct load *l);

/* List what a job is to make resident before it places experts. @return how many items */
uint32_t load_list_chunks(struct load *l, struct slot *const *slots, unsigned count);

/* An item of that. */
void load_populate_chunk(void *context, uint32_t index, uint32_t worker);

/* What came of them, when the job is over. */
int load_take_chunks(struct load *l);

/* ---- the two ways -------------------------------------------------------------------------- */

/* Read all experts into a ring, by io_uring where it works, and place them. */
int load_by_ring(struct load *l);
void load_end_ring(struct load *l);

/* Read all experts by their places' workers, through the page cache, and place them. */
int load_by_plain(struct load *l);

/* Whether the files are in memory already, where plain reads are the fastest way. */
bool load_is_cached(const struct load *l);

#endif
