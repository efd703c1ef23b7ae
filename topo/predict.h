/**
 * predict.h - how fast a plan can be, and what sets that.
 *
 * A model of the machine in a few numbers: bandwidth of each memory domain, arithmetic of the
 * cores, links and memory of GPUs. Every number says where it comes from (measured, given, or
 * assumed from the CPU's name), and every prediction says which bound sets it. Nothing is measured
 * or allocated on any node; the same input gives the same output.
 *
 * Times are of the routed experts only: attention, routing and the rest of a model come on top.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_PREDICT_H
#define NUMOE_PREDICT_H

#include "numoe_topo.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What can set the time of a layer. */
enum numoe_bound {
    NUMOE_BOUND_MEMORY,        /**< reading weights from the memory domains */
    NUMOE_BOUND_CORE_READ,     /**< reading weights: too few cores to use what the memory has */
    NUMOE_BOUND_ARITHMETIC,    /**< multipliers of the cores */
    NUMOE_BOUND_REDUCTION,     /**< writing and summing partial outputs of the lanes */
    NUMOE_BOUND_SYNC,          /**< fork, inner barrier, join */
    NUMOE_BOUND_LINK,          /**< copying weights to GPUs */
    NUMOE_BOUND_HOST_MEMORY,   /**< host memory, read by links and CPUs at once */
    NUMOE_BOUND_DEVICE,        /**< arithmetic of GPUs */
    NUMOE_BOUND_DEVICE_MEMORY, /**< reading weights from the memory of GPUs */
    NUMOE_BOUND_LAUNCH,        /**< starting work on a GPU */
    NUMOE_BOUNDS
};

/** Who computes the experts. */
enum numoe_way {
    NUMOE_WAY_CPU,
    NUMOE_WAY_STREAM_ONE, /**< the first GPU; weights copied each pass, nothing kept */
    NUMOE_WAY_STREAM,     /**< all GPUs, each copying its part of every expert */
    NUMOE_WAY_CACHE,      /**< the same, device memory keeping what fits across passes */
    NUMOE_WAY_SHARED,     /**< CPU and all GPUs, with that cache, each a part of the experts */
    NUMOE_WAYS
};

/** A GPU as the user describes it. Zero where nothing is known: then it is looked up by name. */
struct numoe_predict_gpu {
    char name[32];
    uint32_t node;         /**< OS index of the memory node that its link hangs on */
    double link_gbs;       /**< host to device, 10^9 bytes a second; > 0 */
    uint64_t memory_bytes; /**< of device memory, for experts */
    double tflops;         /**< dense bf16 tensor peak, 10^12 operations a second */
    double memory_gbs;     /**< of device memory */
};

struct numoe_predict_options {
    size_t size;
    const double *node_gbs; /**< read bandwidth by machine node (dense index), 10^9 bytes a
                                 second while all are read at once; 0: not given. May be NULL */
    const struct numoe_predict_gpu *gpus; /**< NULL: those of the machine with a known link */
    uint32_t gpu_count;
    const uint32_t *tokens; /**< tokens a pass; NULL: 1, 4, 16 and 256 to 65536 */
    uint32_t token_count;
    const char *isa; /**< as numoe_kernels_select; NULL: from the CPU's name */
    double ghz;      /**< of all cores at work; 0: from the CPU's name */
    /** The number format of the weights, in words, when no kernel computes it yet: predictions,
     *  which are then of bytes alone, say so. NULL: kernels do */
    const char *without_kernel;
    /** What the kernels take besides weights, for the memory of nodes: an activation record of a
     *  token, and scratch of a worker. 0: not counted */
    uint64_t record_bytes, scratch_bytes;
};

#define NUMOE_PREDICT_OPTIONS_INIT                                                                 \
    {                                                                                              \
        .size = sizeof(struct numoe_predict_options)                                               \
    }

/** One size on one way. */
struct numoe_prediction_cell {
    enum numoe_way way;
    uint32_t tokens;    /**< a pass */
    bool possible;      /**< false: why says what is missing, numbers are 0 */
    double experts_hit; /**< expected distinct experts a layer, of uniform routing */
    double layer_ms;    /**< a layer */
    double pass_ms;     /**< all MoE layers */
    double tokens_per_s;
    double parts_ms[NUMOE_BOUNDS]; /**< what each bound alone would take, a layer */
    uint64_t weight_bytes;         /**< of experts, read by CPUs or copied over links, a layer */
    uint64_t reduction_bytes;      /**< partial outputs written and read by CPUs, a layer */
    double gpu_part, cached_part;  /**< of the work: on GPUs; from device memory */
    uint32_t gpus;                 /**< GPUs that take part: as many as pay */
    uint64_t passes;               /**< over the weights that CPUs make; 0: they compute nothing */
    enum numoe_bound bound;
    char why[192]; /**< the bound in words, with its numbers */
};

/** A change to the machine or its use, and what it would give. Sorted by gain. */
struct numoe_prediction_what_if {
    char what[128];
    enum numoe_way way; /**< compared: the fastest way before; after it may be another */
    uint32_t tokens, tokens_after;
    double before, after; /**< tokens/s */
    double gain;          /**< after / before */
};

/** Memory of a plan's node while the largest pass of the sizes asked for is computed. */
struct numoe_prediction_node {
    uint32_t os_index;
    uint64_t capacity_bytes;
    uint64_t
        before_bytes; /**< used by others when the machine was read; 0 when that is not known */
    uint64_t expert_bytes;
    uint64_t
        activation_bytes;  /**< partial outputs, records and scratch, where workers write them */
    uint64_t pinned_bytes; /**< staging of a GPU on this node; experts are pinned in place */
    int64_t left_bytes;    /**< of the capacity; below 0: so much is short */
    double slices;         /**< of an expert, on average */
};

/** A number that predictions rest on. */
struct numoe_prediction_figure {
    const char *name, *unit;
    double value;
    bool assumed;
    char source[192];
};

enum { NUMOE_PREDICT_FIGURES = 12, NUMOE_PREDICT_WHAT_IFS = 10 };

/** What makes prefill with GPUs faster, in the order in which it is added. */
enum numoe_lever {
    NUMOE_LEVER_NONE,    /**< one GPU; a layer is copied whole, then computed, 4096 tokens a pass */
    NUMOE_LEVER_OVERLAP, /**< copied while what came before computes */
    NUMOE_LEVER_HIT,     /**< only experts that are hit are copied */
    NUMOE_LEVER_PASS,  /**< as many tokens a pass as the prompt has, up to 65536, layer by layer */
    NUMOE_LEVER_LINKS, /**< all GPUs, each over its own link */
    NUMOE_LEVER_CACHE, /**< device memory keeps experts */
    NUMOE_LEVER_CPU,   /**< CPUs compute a part of the experts */
    NUMOE_LEVERS
};

/** Prefill of a prompt. Everything before a lever, and the lever, at work. */
struct numoe_prediction_prefill {
    uint32_t tokens;                   /**< of the prompt */
    double tokens_per_s[NUMOE_LEVERS]; /**< 0: not possible */
    enum numoe_lever lever;            /**< what gives most on top of those before it */
    enum numoe_bound bound;            /**< what sets the last of tokens_per_s */
};

/** Experts whole on each of several GPUs, for engines that divide their tokens among these: what
 *  passing on between GPUs gains. All 0: less than two GPUs, or all experts stay on each. */
struct numoe_prediction_passing {
    double alone_ms;  /**< a layer over the slowest link */
    double passed_ms; /**< a part of it over each link, the rest from other GPUs */
    double least_gbs; /**< between GPUs, to each of them, from which on passing on gains */
    double most_gbs;  /**< from which on it takes passed_ms */
    double tokens;    /**< a pass, from which on dividing them moves fewer bytes between GPUs than
                           dividing the experts' parts */
};

struct numoe_prediction {
    struct numoe_prediction_cell *cells; /**< way by way, sizes ascending as given */
    uint32_t cell_count;
    struct numoe_prediction_figure figures[NUMOE_PREDICT_FIGURES];
    uint32_t figure_count;
    struct numoe_prediction_what_if what_ifs[NUMOE_PREDICT_WHAT_IFS];
    uint32_t what_if_count;
    struct numoe_predict_gpu *gpus; /**< as used */
    uint32_t gpu_count;
    struct numoe_prediction_prefill *prefill; /**< with GPUs, by length of the prompt */
    uint32_t prefill_count;
    char without_kernel[32];             /**< as given; empty: there are kernels */
    struct numoe_prediction_node *nodes; /**< of the plan, in its order */
    uint32_t node_count;
    uint32_t memory_tokens; /**< the pass that they are for */
    bool before_known;
    char **notes;
    uint32_t note_count;
    struct numoe_prediction_passing passing;
};

/**
 * Predict a plan that was made for a model (shape.layers > 0).
 * @return 0 (free with numoe_prediction_free); -EINVAL for a GPU at a node that is not there, a
 *         bandwidth that is no positive number, a size of 0 tokens, an unknown isa; -ENOMEM
 */
int numoe_predict(const struct numoe_machine *machine, const struct numoe_plan *plan,
                  const struct numoe_predict_options *options, struct numoe_prediction **prediction,
                  struct numoe_error *error);
void numoe_prediction_free(struct numoe_prediction *prediction);

/** Expected number of distinct experts that tokens hit, each choosing top_k of `experts`
 *  uniformly: experts (1 - (1 - top_k / experts)^tokens). */
double numoe_predict_experts_hit(double experts, double top_k, double tokens);

/** "memory", "link", ...; "cpu", "stream", ... */
const char *numoe_bound_name(enum numoe_bound bound);
const char *numoe_way_name(enum numoe_way way);
/** "none", "overlap", "hit-experts", "tokens-a-pass", "links", "cache", "cpu-share" */
const char *numoe_lever_name(enum numoe_lever lever);

/** Text for people, after numoe_plan_print. */
void numoe_prediction_print(const struct numoe_prediction *prediction, FILE *out);
/** numoe_plan_print_json's object with "predicted" added (docs/plan.md). @return 0, -ENOMEM, -EIO
 */
int numoe_prediction_print_json(const struct numoe_plan *plan,
                                const struct numoe_prediction *prediction, FILE *out);

/**
 * Say why something is where it is: "node:17" (OS index), "worker:5", "expert:3.200" (layer and
 * expert). @return 0; -EINVAL for other words or what is not in the plan; -ENOMEM
 */
int numoe_plan_explain(const struct numoe_machine *machine, const struct numoe_plan *plan,
                       const char *what, FILE *out, struct numoe_error *error);

/**
 * Overrule which nodes share memory channels: all DRAM nodes with memory become `domains` domains,
 * as many in each package, of consecutive nodes as even in number as can be. Other nodes stay
 * domains of their own. Before numoe_plan_create.
 * @return 0; -EINVAL when that many cannot be made; -ENOMEM
 */
int numoe_machine_regroup(struct numoe_machine *machine, uint32_t domains,
                          struct numoe_error *error);

#ifdef __cplusplus
}
#endif

#endif
