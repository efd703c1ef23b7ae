/*
 * soak.h - a seeded random walk over everything that numoe does, with every result checked.
 *
 * A walk is made of cycles. A cycle opens contexts, makes and loads models, calls their layers in
 * every way, runs pools of its own, provokes refusals, and ends by tearing everything down; then
 * resident memory, mappings, threads and descriptors must be back where they were after the
 * warm-up that precedes the first cycle. Every cycle is a walk of its own seed, and every step
 * draws from numbers of its own: what happens depends on the seed and the options, never on time.
 * So a failure is replayed by the seed of its cycle and the number of steps in it.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_SOAK_H
#define NUMOE_SOAK_H

#include "numoe.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What a step may do. */
enum numoe_soak_kind {
    NUMOE_SOAK_OPEN,    /* a context: machine, workers, threads, stealing, instructions */
    NUMOE_SOAK_CLOSE,   /* a context and its models */
    NUMOE_SOAK_CREATE,  /* a model of a random shape, its experts from memory */
    NUMOE_SOAK_LOAD,    /* a checkpoint, written for it */
    NUMOE_SOAK_DESTROY, /* a model */
    NUMOE_SOAK_REPLACE, /* an expert by another, or by one with a NaN, which is then missing */
    NUMOE_SOAK_FORWARD, /* a batch, and the same again: the same bits */
    NUMOE_SOAK_SUBMIT,  /* a batch without waiting, sometimes called off, and what is done meanwhile
                         */
    NUMOE_SOAK_CALLERS, /* several threads at once */
    NUMOE_SOAK_TWIN,    /* a model again in another context of the same plan: the same bits */
    NUMOE_SOAK_POOL,    /* a pool alone */
    NUMOE_SOAK_REFUSED, /* calls that must fail, and leave nothing behind */
    NUMOE_SOAK_TEARDOWN, /* everything closed, resources compared */
    NUMOE_SOAK_KINDS
};

/* "open", "close", ... */
const char *numoe_soak_kind_name(enum numoe_soak_kind kind);

/* What the process has taken; UINT64_MAX where the system does not tell, or where it means nothing
 * (memory and mappings under a sanitizer, which keeps what was freed). */
struct numoe_soak_usage {
    uint64_t anonymous_bytes, maps, threads, descriptors;
};

/* How far each may stand above the baseline after a teardown. */
#define NUMOE_SOAK_USAGE_SLACK                                                                     \
    {                                                                                              \
        .anonymous_bytes = (uint64_t)4 << 20, .maps = 16, .threads = 0, .descriptors = 0           \
    }

/* A batch that was computed, as tests/ sees it. */
struct numoe_soak_call {
    uint64_t tokens, hidden, out_stride;
    enum numoe_type out_type;
    const uint64_t *checked; /* tokens that will be compared with the reference */
    uint32_t checked_count;
};

/* For the tests of the soak itself: to damage what it must then notice. */
struct numoe_soak_hooks {
    void *user;
    /* Called by the thread that called, before the outputs are looked at. May be NULL. */
    void (*computed)(void *user, const struct numoe_soak_call *call, void *out);
    /* Called at the end of each step. May be NULL. */
    void (*stepped)(void *user, enum numoe_soak_kind kind);
};

struct numoe_soak_report {
    uint64_t seed;
    double seconds;
    uint64_t steps, cycles;
    uint64_t operations[NUMOE_SOAK_KINDS];
    uint64_t calls, tokens, pairs; /* layers computed */
    uint64_t gpu_tokens;           /* of the tokens, computed by a GPU */
    uint64_t checks;               /* calls compared with the reference */
    uint64_t checked_tokens;       /* of them, so many tokens */
    uint64_t repeats;              /* calls repeated otherwise and found the same bit for bit */
    double worst_rel_l2;           /* of a check of a model at least 64 wide, to float64 */
    double worst_deviation;        /* of one output, in expected errors of its own */
    uint64_t steals;
    uint64_t peak_bytes;                   /* most that was resident at once */
    struct numoe_soak_usage baseline, now; /* after the warm-up; after the last teardown */
    bool failed;                           /* the walk found something wrong: */
    uint64_t failed_step;                  /* in this step, from 1; 0: before the first */
    char failure[832];                     /* what */
    char reproduce[1024];                  /* a command that does it again */
};

struct numoe_soak_options {
    double duration_s; /* end after the step that passes it; 0: no limit */
    uint64_t steps;    /* end after so many; 0: no limit. One of the two must be given */
    uint64_t seed;
    const char *topology; /* of all contexts; NULL: several, live and described */
    uint32_t workers;     /* planned, in all contexts; 0: the machine's, sometimes few */
    uint32_t threads;     /* that execute, in all contexts; 0: from one to all that are planned */
    bool gpu;             /* three contexts of four are opened with a GPU; else none */
    bool batch_invariant; /* of all contexts; those with a GPU then compute without */
    double watchdog_s;    /* without progress for so long: say what was running, exit 1; 0: 60 */
    const char *scratch;  /* where checkpoints are written; NULL: $TMPDIR or /tmp */
    struct numoe_log log; /* what the library says in the warm-up, and the watchdog */
    /* Called about twice a second between steps; may be NULL. */
    void (*progress)(void *user, const struct numoe_soak_report *report);
    void *progress_user;
    const atomic_bool *stop; /* NULL, or becomes true to end after the step */
    const struct numoe_soak_hooks *hooks;
};

/*
 * Walk. Single-threaded use, one walk a process at a time: it watches the process as a whole.
 * @param report  filled in every case
 * @return 0 when nothing was wrong; with report->failed a finding, and error filled; else what
 *         numoe_open says of the options, or -ENOTSUP for one that this build cannot serve
 */
int numoe_soak_run(const struct numoe_soak_options *options, struct numoe_soak_report *report,
                   struct numoe_error *error);

#endif
