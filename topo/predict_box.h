/*
 * predict_box.h - a machine, a plan and a model in the few numbers that predictions need.
 *
 * Plain data: a what-if is a copy with some numbers changed.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef PREDICT_BOX_H
#define PREDICT_BOX_H

#include "predict.h"

enum { BOX_MOST_GPUS = 64 };

/*
 * What is read at one place when an expert is: a memory domain, or a shard of several
 * of them. The busiest ends last.
 */
struct box_bins {
    uint32_t count;
    double *experts; /* of a layer, in each: whole numbers that add up to all */
    double *cost;    /* of reading one, in units of what an expert takes when all are read */
    struct box_known *known; /* what was computed already; NULL: not kept */
};

/* Predictions ask for the same few numbers of experts again and again, for each way and what-if. */
enum { BOX_MOST_KNOWN = 64 };
struct box_known {
    uint32_t count;
    double hit[BOX_MOST_KNOWN], busiest[BOX_MOST_KNOWN];
};

/*
 * The bins of a plan. domain_read: bytes a second of each memory domain; read: of all together, as
 * struct box has it. Returns 0 or -ENOMEM; free in either case.
 */
int predict_bins(const struct numoe_machine *machine, const struct numoe_plan *plan,
                 const double *domain_read, double read, struct box_bins *bins);
void box_bins_free(struct box_bins *bins);

/*
 * Expected load of the busiest bin when `hit` distinct experts are read, each set of so many as
 * likely as any other: in units of what an expert takes when all are read, so `hit` when the load
 * is even. hit need not be whole: between two numbers it is interpolated.
 */
double predict_busiest(const struct box_bins *bins, double hit);

struct box_gpu {
    double link;         /* bytes a second */
    double memory_bytes; /* for experts */
    double flops;        /* peak */
    double multiplies;   /* of which prefill reaches so much */
    double memory;       /* bytes a second of device memory */
};

/* Nodes that work together (numoe_plan_reach). */
struct box_reach {
    double groups; /* of nodes */
    double rows;   /* partial outputs of a token of an expert */
    double far;    /* how much longer reading takes than at home */
};

struct box {
    /* model */
    double layers, experts, top_k, hidden, intermediate;
    double call_top_k; /* with experts that are held elsewhere */
    double expert_bytes;
    /* CPU */
    double read;              /* bytes a second that a layer's weights are read at, by memory alone:
                                 the slowest domain's bandwidth over its part of the weights */
    double all_read;          /* the same of all domains together */
    double core_read;         /* bytes a second of all workers, by cores alone */
    double ops;               /* int8 operations a second of all workers */
    double reads, multiplies; /* of these rates, that kernels reach */
    double workers, packages;
    double nodes; /* that hold slices */
    double lanes; /* of the plan, all nodes */
    struct box_reach reach[NUMOE_REACHES];
    double domains;
    uint32_t tightest;           /* domain that sets read */
    double tight_part;           /* its part of the weights */
    bool rows;                   /* down is shared by rows of the output */
    const struct box_bins *bins; /* NULL: all is read evenly */
    /* GPUs */
    struct box_gpu gpus[BOX_MOST_GPUS];
    uint32_t gpu_count;
    bool copies_all; /* experts that are not hit, too */
};

/* What is assumed of a CPU by its name. */
struct cpu_guess {
    const char *name;     /* generation, for words; NULL: not known */
    double package_gbs;   /* theoretical bandwidth of a package's channels */
    const char *channels; /* in words */
    double core_read_gbs; /* one core alone */
    double ghz;           /* all cores at work */
    bool ghz_from_name;
    const char *isa;
    double ops_a_cycle; /* int8 operations of a core */
    const char *ops_words;
    double reads, multiplies; /* of the ceilings, that kernels of the isa reach ... */
    bool measured;            /* ... by its own figures, not its neighbour's */
};

/* isa: overrules the CPU's, or NULL. @return false when isa is not known */
bool predict_guess_cpu(const char *model, const char *isa, struct cpu_guess *guess);
/* Fill what is 0 by the GPU's name; *old: there is no code for it. @return false when the name is
 * not known: assumed then */
bool predict_guess_gpu(struct numoe_predict_gpu *gpu, bool *old);
/* Of its tensor peak, that prefill reaches. */
double predict_guess_multiplies(const char *gpu);

/* Of the bandwidth that channels have on paper, what reading reaches: 0.7 to 0.8 on servers. */
#define PREDICT_CHANNEL_FRACTION 0.75

/*
 * Time of one layer on one way. cell: way, tokens and everything after them is filled; a way that
 * is not possible says why.
 */
void predict_cell(const struct box *box, enum numoe_way way, uint32_t tokens,
                  struct numoe_prediction_cell *cell);

/* Time of one layer on the CPUs, for comparing forms. */
struct box_form {
    double layer_ms;
    double hit, busiest; /* experts in each pass; as many read evenly would take as long */
    uint64_t reduction_bytes;
};
void predict_form(const struct box *box, double tokens, struct box_form *form);

/*
 * The CPUs' part of a box for a plan, and its bins, to be freed. Returns as numoe_predict.
 */
int predict_box(const struct numoe_machine *machine, const struct numoe_plan *plan,
                const struct numoe_predict_options *options, struct box *box, struct box_bins *bins,
                struct numoe_error *error);

/* What each node's memory holds meanwhile, once cells and GPUs are there. */
int predict_memory(const struct numoe_machine *machine, const struct numoe_plan *plan,
                   const struct numoe_predict_options *options,
                   struct numoe_prediction *prediction);
void predict_memory_print(const struct numoe_prediction *prediction, FILE *out);
/* An array; NULL: out of memory. */
struct json_t;
struct json_t *predict_memory_json(const struct numoe_prediction *prediction);

/* Prefill by length of the prompt, each lever on top of those before. Returns 0 or -ENOMEM. */
int predict_prefill(const struct box *box, const uint32_t *tokens, uint32_t count,
                    struct numoe_prediction *prediction);
void predict_prefill_print(const struct numoe_prediction *prediction, FILE *out);
struct json_t *predict_prefill_json(const struct numoe_prediction *prediction);

/* Whole experts on each GPU; all 0 with less than two, or where all experts stay. */
void predict_passing(const struct box *box, struct numoe_prediction_passing *passing);
void predict_passing_print(const struct numoe_prediction *prediction, FILE *out);
struct json_t *predict_passing_json(const struct numoe_prediction *prediction);

/* What changes would give. */
void predict_what_ifs(const struct box *box, struct numoe_prediction *prediction);

#endif
