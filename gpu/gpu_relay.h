/*
 * gpu_relay.h - experts that are whole on several devices: each copies its own ones of a layer over
 * its own link, and passes them on to the others. For kernels of an engine that divides its tokens.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_RELAY_H
#define NUMOE_GPU_RELAY_H

#include <pthread.h>

#include "gpu_divide.h"
#include "gpu_links.h"
#include "gpu_model.h"

struct gpu_relay_copy {
    uint64_t from, to, bytes; /* from: of the source's pool; to: of `memory` */
};

/* What is in a piece of a device's second window. */
struct gpu_passed {
    uint32_t from;                  /* device */
    const struct gpu_piece *source; /* NULL: experts that stay there */
    bool here;                      /* queued, and the host has seen it copied */
    uint32_t experts;
    struct gpu_relay_copy *copies;
    uint32_t count, room;
};

/* Slices of an expert that lie one after another at the source. */
struct gpu_stretch {
    uint32_t place, slices; /* place: as a table has it */
    uint32_t expert, first;
};

struct gpu_relay_side {
    struct numoe_gpu *gpu;
    struct numoe_gpu_model *model;
    uint8_t *memory; /* what is passed on to the device comes through here */
    struct gpu_window window;
    struct gpu_passed passed[GPU_PIECES]; /* of window.pieces */
    uint8_t *tables, *host_tables;        /* [GPU_PIECES]; host: pinned */
    void *passes;                         /* stream of copies from other devices */
    /* of a call */
    uint32_t *wants; /* [experts] not 0: for its tokens */
    uint32_t *need;  /* [experts] what comes over the device's own link, or stays */
    bool *kept;      /* [experts] its own ones that stayed when the call began ... */
    bool kept_past;  /* ... and whose copies are past, as the host has seen */
    uint32_t list_at[NUMOE_GPU_MOST]; /* of each other device's job: up to where it was passed */
    uint32_t kept_at[NUMOE_GPU_MOST]; /* likewise of its experts that stay */
    enum gpu_stream_ahead ahead;      /* of its own link */
    bool finished, ended;             /* nothing comes any more; the caller knows */
};

/* What `lock` protects is said in gpu_relay.c. */
struct gpu_relay {
    pthread_mutex_t lock;
    atomic_uint users; /* threads from gpu_relay_lock to unlock, those that wait included */
    bool closing;      /* the models are about to be destroyed */
    uint32_t count;
    const struct numoe_gpu_source *source; /* of the whole, as of each device */
    const struct gpu_division *division;   /* who copies which expert from the host */
    bool passes;                           /* else every device copies all */
    bool part_threads;                     /* numoe_gpu_model_options */
    bool running;                          /* between begin and the last end */
    uint64_t serial;                       /* of the call that runs, or ran last */
    bool failed;                           /* the call is to be ended */
    uint64_t layer;
    uint32_t *need;             /* [experts] tokens of all devices, of the call */
    uint32_t *owner;            /* [experts] */
    uint32_t *list;             /* [experts] scratch */
    struct gpu_stretch *chunks; /* scratch: [experts * slices] */
    uint32_t turn;              /* device that is looked at first */
    double peer_gbs;
    /* for who reports, at any time: the note is written once, and counted then */
    char note[216];
    atomic_uint noted;
    struct gpu_tally tally;
    struct gpu_relay_side sides[NUMOE_GPU_MOST];
};

/* Memory on each device, and copies between them tried. What cannot be had is noted and no error,
 * and relay->passes is then false. */
int gpu_relay_open(struct gpu_relay *relay, struct numoe_gpu *const *gpus, uint32_t count,
                   const struct numoe_gpu_source *source,
                   const struct numoe_gpu_model_options *options, struct numoe_error *error);
/* By the links' speeds, if they were measured. */
int gpu_relay_choose(struct gpu_relay *relay, const struct numoe_gpu_model_options *options,
                     const struct gpu_links *links, const struct numoe_error *peer_error,
                     struct numoe_error *error);
/* With all models made: what calls need. division: kept. */
int gpu_relay_make(struct gpu_relay *relay, const struct gpu_division *division,
                   const struct numoe_gpu_model_options *options, struct numoe_error *error);
/* Device memory that it takes on a device. */
uint64_t gpu_relay_bytes(const struct gpu_relay *relay, uint32_t i);
/* It passes nothing from the next call on, and why. */
void gpu_relay_leave(struct gpu_relay *relay, const struct numoe_error *why);
void gpu_relay_report(const struct gpu_relay *relay, struct numoe_gpu_report *report);
/* Whoever waits in gpu_relay_next is sent away, and nothing is copied from a model's memory any
 * more; before models are destroyed. */
void gpu_relay_stop(struct gpu_relay *relay);
void gpu_relay_close(struct gpu_relay *relay);

/*
 * Around everything below, and whatever else a thread of the caller's does with the model or its
 * parts while a call runs. NULL is allowed. gpu_relay_next gives the lock up while it waits;
 * whoever is behind it has it again.
 */
void gpu_relay_lock(struct gpu_relay *relay);
void gpu_relay_unlock(struct gpu_relay *relay);

/* need: tokens of each expert [experts], by all devices; kept. What each wants of these experts is
 * in its side's `wants`. */
int gpu_relay_begin(struct gpu_relay *relay, uint64_t layer, const uint32_t *need, uint64_t tokens,
                    struct numoe_error *error);
/*
 * The next piece of a device, or of any (device NUMOE_GPU_MOST): then *device says of which. Waits
 * until one is there. piece->slice_at is NULL after the last. -EAGAIN: no copy is under way on any
 * device, nor can be queued, before pieces are taken, or done with; -ECANCELED: the call failed for
 * another device, or was ended meanwhile
 */
int gpu_relay_next(struct gpu_relay *relay, uint32_t *device, void *const *streams,
                   struct numoe_gpu_piece *piece, struct numoe_error *error);
/* The piece has been passed on, and is not of the device's own window. */
bool gpu_relay_has(const struct gpu_relay *relay, uint32_t device, const void *handle);
int gpu_relay_done(struct gpu_relay *relay, uint32_t device, void *on, struct gpu_piece *piece,
                   struct numoe_error *error);
void gpu_relay_end(struct gpu_relay *relay, uint32_t device, void *on);
/* need: NULL: all of the layer. */
int gpu_relay_prefetch(struct gpu_relay *relay, uint64_t layer, const uint32_t *need,
                       struct numoe_error *error);

#endif
