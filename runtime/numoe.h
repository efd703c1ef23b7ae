/**
 * numoe.h - execute the routed experts of a Mixture-of-Experts model on this machine.
 *
 * Order of calls: numoe_open -> numoe_model_load (files) or numoe_model_create and
 * numoe_expert_load (the caller's memory) -> numoe_reserve, if no call may wait for memory ->
 * numoe_forward, or numoe_submit and numoe_wait, once for each MoE layer of each pass ->
 * numoe_model_destroy -> numoe_close.
 *
 * Every function returns 0 (or a count) or a negative errno; calls with many reasons to fail also
 * fill an optional struct numoe_error. The library prints nothing, never exits, keeps no global
 * state, and reports every fallback through the log callback and the stats.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_H
#define NUMOE_H

#include "base/numoe_base.h"
#include "base/numoe_types.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NUMOE_VERSION_MAJOR 0
#define NUMOE_VERSION_MINOR 1
#define NUMOE_VERSION_PATCH 0

/** "0.1.0". @thread any */
const char *numoe_version(void);

/* ---- context -------------------------------------------------------------------------------- */

struct numoe;

struct numoe_options {
    size_t size;          /**< sizeof(struct numoe_options) */
    const char *topology; /**< NULL or "live": this machine. Else a saved machine, an hwloc XML
                               file, a directory with sys/ and proc/ or a synthetic string
                               (docs/machine.md): the plan is made for that machine and executed
                               on this one, with workers unpinned and memory unbound */
    uint32_t workers;     /**< planned workers; 0: one for each allowed core of the planned machine,
                               within the cgroup's CPU quota where that is this machine */
    uint32_t threads;     /**< 0: one for each planned worker. Else the plan stays as it is and so
                               many threads execute it: results are the same bit for bit */
    const uint32_t *nodes; /**< OS indices of memory nodes to use; NULL: all */
    uint32_t node_count;
    const uint32_t *cpus; /**< OS indices of CPUs to use; NULL: all allowed */
    uint32_t cpu_count;
    uint64_t keep_free_bytes; /**< memory to leave free on each node */
    const char *isa;          /**< NULL: environment NUMOE_ISA, else the best; "ref", "avx2",
                                   "avxvnni", "avx512", "avx512vnni", "avx512vnni256". With
                                   AVX-512 VNNI the best is found by timing vectors of 512 and of
                                   256 bits with all workers, 6 ms; results are the same bits */
    uint64_t spin_ns;         /**< an idle worker spins so long, then sleeps */
    bool pin_caller;          /**< for the time of each call pin the calling thread, which works as
                                   worker 0, to that worker's CPU, and give it its old mask back (two or
                                   three system calls); else it runs where it runs */
    bool strict_memory;  /**< fail when memory cannot be bound to its node; else go on and report */
    uint64_t chaos_seed; /**< for tests: workers steal at random with this seed; 0: off */
    struct numoe_log log;    /**< messages; a NULL function drops them */
    enum numoe_gpu_mode gpu; /**< the environment's NUMOE_GPU=off|on|force goes before it; a GPU
                                  that is not used is reported through log and numoe_model_info,
                                  and the CPU computes */
    uint32_t gpu_device;     /**< which: CUDA's number */
    bool gpu_stream;         /**< copy layers to the GPU in each pass even when all fit there */
    enum numoe_memory_policy memory_policy; /**< of each node's weights */
    bool memory_spill; /**< weights that their node has no room for go elsewhere, and are reported;
                            else loading fails with -ENOMEM */
    /** A plan that numoe plan --json wrote: the path of its file, or its bytes in memory. Nodes,
     *  workers, lanes and shares are the plan's; workers, nodes, cpus, reserved_cpus,
     *  keep_free_bytes, form, groups and objective must be left alone. Models must have its shape.
     *  NULL: plans are made here. See as_if for a plan of another machine. */
    const char *plan_file;
    const void *plan;
    uint64_t plan_bytes;  /**< of plan */
    enum numoe_form form; /**< how models are divided among nodes; 0: as costs least */
    uint32_t groups;      /**< with NUMOE_FORM_GROUPS: how many; 0: memory domains or packages */
    enum numoe_objective objective; /**< what costs are of; 0: decode and prefill alike */
    const uint32_t *reserved_cpus;  /**< OS indices: the cores of these CPUs get no worker, on any
                                         of their threads; they are the engine's own. NULL: none */
    uint32_t reserved_count;
    uint32_t lent_threads;       /**< the last so many of the workers get no thread of numoe's: the
                                      engine's own threads may be lent for them (numoe_lend). Others do
                                      what falls to those that are absent */
    uint32_t steal_trip_percent; /**< a worker fetches work from far only if that is worth the trip;
                                      this much of what it costs by the machine's measured
                                      latencies or its distances. 0: always */
    bool stats;            /**< also measure times: how long workers are busy and parked, and how
                                long it takes to wake them. Counts are kept in any case */
    uint32_t trace_events; /**< keep so many of each worker's latest events, 40 bytes each, for
                                numoe_trace_write; implies stats. 0: none; at most 2^24 */
    /** The plan is another machine's, to be replayed here: its nodes, lanes and workers cut a call
     *  and order the sums, so that outputs are the bits that CPUs of the same instructions (isa)
     *  give there; memory and threads are those of this machine, whatever it is. workers, nodes,
     *  cpus, reserved_cpus and keep_free_bytes then speak of this machine and may be given; form,
     *  groups and objective are the plan's. Nodes of the plan are dealt out among the nodes here,
     *  in order. A model that has no room here is refused as always (-ENOSPC). */
    bool as_if;
    /** A token gives the same bits whatever else is in its batch: alone, among others, and however
     *  a batch is cut. Experts that are deferred or held elsewhere, and whether out is added to,
     *  count as part of what is asked of it. Costs time in modes of bf16 activations with few
     *  tokens, and with many on machines of many memory domains (docs/architecture.md, "Batches").
     *  The CPU computes, a GPU is not used. */
    bool batch_invariant;
    /** With a GPU: calls of at least so many tokens are computed by it alone, others by the CPUs
     *  alone; 1: all by the GPU. 0: each call is divided, expert by expert, so that both end
     *  together by the speeds that calls before have shown; what is computed where, and so the
     *  last bits (in modes other than exact, all that the arithmetic differs by), then changes
     *  from call to call. A GPU alone adds what it holds and then what is copied, piece by piece:
     *  fp32 sums in an order that depends on what stays there. */
    uint64_t gpu_from_tokens;
    uint64_t gpu_cache_bytes; /**< device memory for experts that stay there; 0: what there is */
    const char *gpu_profile;  /**< file that numoe run --gpu-profile writes: the experts asked for
                                   most are copied first. NULL: none */
    /** Several GPUs instead of gpu_device, CUDA's numbers, at most 16: each computes a part of
     * every layer from its own copies, and the parts are summed in this order. One that cannot be
     * used is reported and left out. A number may be there twice, to divide a device. */
    const uint32_t *gpu_devices;
    uint32_t gpu_device_count; /**< 0: gpu_device alone */
    const char *gpu_tuning;    /**< file that numoe bench --gpu --tune made on this GPU: kernels are
                                    chosen by its times. One that is damaged or made on a device of
                                    other numbers is refused (-EBADMSG, -EINVAL). NULL: environment
                                    NUMOE_GPU_TUNING, else the library's own table */
    /** Of several GPUs: where their parts of outputs are summed. What cannot be had, or fails,
     * gives way with a word in the log: nccl to peer, that to host. */
    enum numoe_gpu_sum gpu_sum;
};

#define NUMOE_OPTIONS_INIT                                                                         \
    {                                                                                              \
        .size = sizeof(struct numoe_options), .spin_ns = 200000, .steal_trip_percent = 100         \
    }

/**
 * Read the machine, choose kernels and start workers.
 * @param options  NULL for defaults; read during the call only (log.user must outlive the context)
 * @return 0; -EINVAL (an option, a topology that does not parse), -ENOENT, -E2BIG (a topology),
 *         -ENOTSUP (ISA not here), -EAGAIN (threads refused), -ENOMEM. With a plan or gpu_tuning:
 *         -EBADMSG, -E2BIG, -ENOENT (no such file, or damaged). With a plan: -ESTALE (without
 *         as_if: the machine has changed; the message says in what, and the log what else).
 *         *context is written on success only.
 * @thread any
 */
int numoe_open(const struct numoe_options *options, struct numoe **context,
               struct numoe_error *error);

/**
 * Stop the workers and free everything. All models must have been destroyed. NULL is allowed.
 * @thread any, when no other call on the context is running but numoe_lend
 */
void numoe_close(struct numoe *context);

/**
 * Lend the calling thread to the context's workers. It computes with them and sleeps while there is
 * nothing to do, until it is recalled or the context is closed.
 * @param index  which of options.lent_threads, from 0
 * @return 0 after numoe_recall; -ESHUTDOWN after numoe_close; at once -EINVAL (no such index),
 *         -EBUSY (another thread is lent for it), -ECHILD as numoe_forward
 * @thread any; may do nothing else meanwhile
 */
int numoe_lend(struct numoe *context, uint32_t index);

/**
 * Ask for a lent thread back. It returns from numoe_lend once it finds nothing more to do in the
 * step at hand, a part of a layer.
 * @return 0; -ESRCH (none is lent), -EINVAL, -ECHILD
 * @thread any. Never blocks.
 */
int numoe_recall(struct numoe *context, uint32_t index);

/* ---- models --------------------------------------------------------------------------------- */

struct numoe_model;

/** The routed experts of a model. */
struct numoe_model_desc {
    size_t size;
    uint64_t layers;            /**< MoE layers, numbered from 0 here */
    uint64_t experts;           /**< routed experts a layer */
    uint64_t experts_per_token; /**< what the model's router gives; calls may differ */
    uint64_t hidden;            /**< H */
    uint64_t intermediate;      /**< I */
    enum numoe_format format;
    bool bias; /**< gate, up and down have biases */
    struct numoe_activation activation;
    enum numoe_arithmetic arithmetic;
    struct numoe_range range; /**< all 0: the whole model. Else only these slices of these experts
                                   are planned, loaded and computed: what a call gives is this
                                   part's share of the sum, so that the outputs of ranks whose
                                   ranges make up the model add up to the model's. Down biases are
                                   the share of whoever has slice 0. Ids of other experts are held
                                   elsewhere: skipped, not counted. Of ranks that add to out
                                   (numoe_batch.add), one may */
};

#define NUMOE_MODEL_DESC_INIT                                                                      \
    {                                                                                              \
        .size = sizeof(struct numoe_model_desc), .format = NUMOE_MXFP4, .arithmetic = NUMOE_FAST   \
    }

/**
 * Plan a model on the context's machine and reserve its memory. Experts are then given one by one
 * with numoe_expert_load; one that was never given computes as missing (see numoe_batch.skipped).
 * @return 0; -ENOSPC (does not fit: node, shortfall and what would help in the message), -EINVAL,
 *         -ENOTSUP (no kernel for the format), -EOVERFLOW, -ENOMEM, -ESTALE (the context's plan is
 *         for a model of another shape), -ECHILD (in a process forked from
 *         the one that opened the context)
 */
int numoe_model_create(struct numoe *context, const struct numoe_model_desc *desc,
                       struct numoe_model **model, struct numoe_error *error);

/**
 * Free a model and return its memory; a submission of it is finished first. NULL is allowed.
 * @thread any, when no other call on the model is running
 */
void numoe_model_destroy(struct numoe_model *model);

/** One expert in the caller's memory. */
struct numoe_expert_weights {
    size_t size;
    struct numoe_mxfp4 gate, up;      /**< [I, H] */
    struct numoe_mxfp4 down;          /**< [H, I] */
    const float *gate_bias, *up_bias; /**< I values bias_step elements apart; with desc.bias only */
    uint64_t bias_step;               /**< 1, or 2 for interleaved */
    const float *down_bias;           /**< H values */
};

#define NUMOE_EXPERT_WEIGHTS_INIT                                                                  \
    {                                                                                              \
        .size = sizeof(struct numoe_expert_weights), .bias_step = 1                                \
    }

/**
 * Copy one expert into its place, or replace it. The source may be freed after the call. With a
 * range weights are still the whole expert's, of which the range's slices are read.
 * @return 0; -EINVAL (index, an expert outside of the range, missing pointer); -EDOM a scale byte
 * is 255 (the message names matrix, row and group; the expert is then missing); -ENOMEM; -ECHILD in
 * a process forked since
 * @thread any, but not while a call on this layer runs
 */
int numoe_expert_load(struct numoe_model *model, uint64_t layer, uint64_t expert,
                      const struct numoe_expert_weights *weights, struct numoe_error *error);

/** Bytes from an expert's codes and scales to those of the next. */
struct numoe_expert_stride {
    uint64_t codes, scales;
};

/** All experts of a layer in the caller's memory, laid out alike. Pointers are to expert 0's. */
struct numoe_layer_weights {
    size_t size;
    enum numoe_gate_up_order gate_up; /**< must be given. Unless APART, gate is the matrix of both,
                                           of 2 I rows, and up, up_bias are not looked at */
    struct numoe_mxfp4 gate, up;      /**< [I, H], or [2 I, H] in gate */
    struct numoe_mxfp4 down;          /**< [H, I] */
    struct numoe_expert_stride gate_stride, up_stride, down_stride;
    const void *gate_bias, *up_bias, *down_bias; /**< rows of these matrices, one after another;
                                                      with desc.bias only */
    uint64_t gate_bias_stride, up_bias_stride, down_bias_stride; /**< bytes to the next expert's */
    enum numoe_type bias_type;
};

#define NUMOE_LAYER_WEIGHTS_INIT                                                                   \
    {                                                                                              \
        .size = sizeof(struct numoe_layer_weights), .bias_type = NUMOE_F32                         \
    }

/**
 * Load a layer's experts from memory: what a loop of numoe_expert_load over the experts of the
 * model's range does. The source may be freed after the call, and may be memory that an engine has
 * mapped or filled in any of the layouts that numoe_gate_up_order and numoe_mxfp4 describe.
 * @return as numoe_expert_load, with the expert named; experts before it are loaded, it and those
 *         after it are as they were, or missing. -EINVAL also: gate_up or bias_type is not given
 * @thread as numoe_expert_load
 */
int numoe_layer_load_from(struct numoe_model *model, uint64_t layer,
                          const struct numoe_layer_weights *weights, struct numoe_error *error);

/**
 * Take a layer's experts out: they compute as missing (see numoe_batch.skipped) until they are
 * loaded again, and their memory goes back to the system, but for pages of a pool of huge ones and
 * what a GPU has pinned. Loading an expert of the layer gets the memory of the whole layer again
 * first. Waits for a submission and for deferred experts that are being computed.
 * @return 0; -EINVAL; -ECHILD in a process forked since
 * @thread as numoe_expert_load
 */
int numoe_layer_unload(struct numoe_model *model, uint64_t layer, struct numoe_error *error);

/**
 * A checksum (XXH3, 64 bits) of an expert as it lies in memory: the same for the same weights and
 * range, on any machine and under any plan.
 * @return 0; -EINVAL; -ENOENT: the expert is missing
 * @thread as numoe_expert_load
 */
int numoe_expert_checksum(const struct numoe_model *model, uint64_t layer, uint64_t expert,
                          uint64_t *sum);

/**
 * Look whether all experts still are what was loaded, by the checksums that were taken then
 * (numoe_load_options.checksum; of an expert that was replaced since, by that of the new one).
 * Reads all weights, with all workers.
 * @return 0; -EIO: one is not, layer and expert named; -ENODATA: none were taken; -EINVAL, -ENOMEM
 * @thread as numoe_expert_load, of all layers
 */
int numoe_model_verify(struct numoe_model *model, struct numoe_error *error);

/** What a load is doing. */
enum numoe_load_stage {
    NUMOE_LOAD_MEMORY,    /**< making the memory of the experts resident, as far as that is done
                               before they are read */
    NUMOE_LOAD_READING,   /**< reading and placing */
    NUMOE_LOAD_CHECKSUMS, /**< taking checksums, if they are asked for */
};

/** How far a stage of a load is. */
struct numoe_load_progress {
    uint64_t bytes_done, bytes_total;
    double seconds; /**< since the stage began */
    enum numoe_load_stage stage;
};

/** How files are read. */
enum numoe_read_way {
    NUMOE_READ_AUTO,   /**< from the page cache if they are there, else from the disk */
    NUMOE_READ_DISK,   /**< past the page cache, as far as it lets us, many blocks at once */
    NUMOE_READ_CACHED, /**< by plain reads of all workers */
};

struct numoe_load_options {
    size_t size;
    enum numoe_arithmetic arithmetic; /**< 0: NUMOE_FAST */
    /** Called about ten times a second by the loading thread; return nonzero to cancel. The load
     *  ends when what workers have begun is done, some MiB each, and keeps nothing. May not call
     *  numoe. */
    int (*progress)(void *user, const struct numoe_load_progress *progress);
    void *user;
    struct numoe_range range; /**< as in struct numoe_model_desc. Of files, other experts are not
                                   read, nor other rows of gate and up */
    uint64_t buffer_bytes;    /**< of memory that experts are read into, beside the weights
                                   themselves: rounded down to whole experts, one at least and 32 at
                                   most. 0: 64 MiB, four experts at least; fewer where a limit of
                                   memory leaves no room for more */
    bool draft; /**< load the model's draft layers (mtp.0. and on) instead of its own */
    const char *family_file; /**< path of a description of a model family that is not known here, or
                                  that is to be taken whatever is known; runtime/family_file.h says
                                  what it holds. NULL: none */
    bool checksum; /**< take checksums of what is placed, for numoe_model_verify: another reading of
                        all weights */
    enum numoe_read_way read;
};

#define NUMOE_LOAD_OPTIONS_INIT                                                                    \
    {                                                                                              \
        .size = sizeof(struct numoe_load_options)                                                  \
    }

/**
 * Recognise a checkpoint by its files, plan it and load its routed experts. All files are checked
 * before the first weight is read.
 * @param directory  with config.json and safetensors files, or with one model's GGUF files; or the
 *                   path of a GGUF file, of a split one the first
 * @param options    NULL for defaults
 * @return 0; -ENOENT, -EINVAL, -EBADMSG (damaged file: file and tensor named), -ENOTSUP (a model or
 *         format that is not known: named), -ENOSPC, -ENOMEM, -EIO, -ECANCELED, -ESTALE as
 *         numoe_model_create. Nothing is kept on failure.
 */
int numoe_model_load(struct numoe *context, const char *directory,
                     const struct numoe_load_options *options, struct numoe_model **model,
                     struct numoe_error *error);

/** A memory node of this machine, and what of a model lies there. */
struct numoe_node_info {
    size_t size;
    uint32_t os_index, workers;
    uint64_t capacity_bytes, planned_bytes;
    uint64_t huge_bytes;                  /**< on pages of 2 MiB or 1 GiB */
    uint64_t checked_bytes, placed_bytes; /**< pages looked at; of them, on this node */
    bool bound;                           /**< the kernel accepted the policy */
    uint64_t giant_bytes;                 /**< of huge_bytes, on 1 GiB pages */
    uint64_t spilled_bytes;               /**< of weights that the node had no room for */
};

struct numoe_model_info {
    size_t size;
    struct numoe_model_desc desc;
    char family[64];  /**< "deepseek-v4", ...; "" for numoe_model_create */
    char kernels[64]; /**< e.g. "fast avx512vnni" */
    uint32_t node_count, worker_count;
    uint64_t expert_bytes;     /**< of one expert in memory, as far as it is held here */
    uint64_t resident_bytes;   /**< expert arenas */
    uint64_t checkpoint_bytes; /**< of experts on disk, as far as they were read; 0 for
                                    numoe_model_create */
    double load_seconds;
    char io_path[64];          /**< how files were read: "io_uring O_DIRECT", ... */
    char gpu[96];              /**< the GPU that computes this model; "" for none */
    char gpu_note[512];        /**< why it is used or not */
    bool gpu_resident;         /**< its memory has room for all experts */
    uint64_t gpu_experts;      /**< that it has room for; others are copied when they are hit */
    uint64_t gpu_bytes;        /**< of device memory taken */
    uint64_t gpu_pinned_bytes; /**< of resident_bytes, pinned where they lie */
    /* of load_seconds: */
    double resident_seconds; /**< planning, and making memory resident before anything is read */
    double placing_seconds;  /**< reading and placing, ... */
    uint32_t read_depth;     /**< blocks that were read at once, and how large they were: what was
                                  best on the way in a load of 5.5 GB and more. 0 with plain reads */
    uint32_t read_block_bytes;
    double meanwhile_seconds; /**< ... and of that, while memory was made resident on the way: all
                                   of it when files are read past the page cache, without a GPU */
};

#define NUMOE_MODEL_INFO_INIT                                                                      \
    {                                                                                              \
        .size = sizeof(struct numoe_model_info)                                                    \
    }
#define NUMOE_NODE_INFO_INIT                                                                       \
    {                                                                                              \
        .size = sizeof(struct numoe_node_info)                                                     \
    }

/** @return 0 or -EINVAL */
int numoe_model_info(const struct numoe_model *model, struct numoe_model_info *info);
/** @return 0 or -EINVAL when there is no node of that index (0 .. node_count - 1) */
int numoe_model_node(const struct numoe_model *model, uint32_t index, struct numoe_node_info *info);

/**
 * What of the model is on the context's GPUs, for an engine's own calls on it: on streams and in
 * graphs, or experts piece by piece (numoe_gpu.h, installed beside this).
 * @return NULL where the CPU computes, and of NULL. It is the model's, and goes with it
 * @thread any; but calls on it and calls of the context (numoe_forward, _submit, numoe_reserve,
 * what loads or unloads) are one at a time: between begin and end of pieces the CPU computes what
 * numoe_forward is called for
 */
struct numoe_gpu_model *numoe_model_gpu(const struct numoe_model *model);

/* ---- execution ------------------------------------------------------------------------------ */

/**
 * One call on one layer:  out[t] (+)= scale * sum_j weights[t, j] * expert(ids[t, j], x[t]).
 * Summed in fp32, rounded once to out_type; with add, out's old value joins in fp32 before that.
 * Exact arithmetic rounds an f32 x to bf16 first. A NaN or an infinity in a token's x makes that
 * token's outputs not finite (fast: NaN) and changes no bit of another token. Arrays need no
 * alignment beyond their element's. out may not overlap anything else.
 */
struct numoe_batch {
    size_t size;
    uint64_t tokens; /**< 0 is allowed: nothing is read or written, no pointer needed */
    uint64_t top_k;  /**< entries a token, 1 .. 64 */
    const void *x;   /**< [tokens, hidden] */
    enum numoe_type x_type;
    uint64_t x_stride;    /**< elements from row to row; 0: hidden */
    const void *ids;      /**< [tokens, top_k] int32_t or int64_t, dense */
    uint32_t id_bytes;    /**< 4 or 8 */
    const float *weights; /**< [tokens, top_k]; of a skipped entry never read */
    void *out;            /**< [tokens, hidden] */
    enum numoe_type out_type;
    uint64_t out_stride; /**< elements; 0: hidden */
    bool add;            /**< add to out; else overwrite it */
    bool strict;         /**< an id >= experts is -EINVAL, naming token and slot, before anything is
                              written; else it is skipped and counted */
    float scale;         /**< times the sum; 1 from the initializer */
    const uint8_t *elsewhere; /**< NULL, or one byte an expert: nonzero = held elsewhere, skipped */
    /** NULL, or one byte an expert, read during the call: nonzero = deferred. What such experts
     *  give is left out of out; it is computed after the call returned, while the caller does
     *  something else (attention, say), and joins the sums of the model's next call, before that
     *  call's scale. That call may be on any layer and must have as many tokens (-EINVAL); one
     *  with ids of -1 alone and add collects what waits. x is not needed after the call. Such
     *  calls, and those that collect, are computed by the CPU; at most 64 tokens defer. */
    const uint8_t *deferred;
};

#define NUMOE_BATCH_INIT                                                                           \
    {                                                                                              \
        .size = sizeof(struct numoe_batch), .id_bytes = 4, .scale = 1.0f                           \
    }

/** What a call did. Filled as far as size says; 0 leaves it alone. */
struct numoe_result {
    size_t size;
    uint64_t skipped;      /**< entries with an id >= experts */
    uint64_t missing;      /**< entries whose expert was never loaded */
    uint64_t experts_hit;  /**< distinct experts computed */
    uint64_t expert_bytes; /**< bytes of experts read from memory at least once */
    uint64_t pairs;        /**< (token, slot) entries computed */
    uint64_t gpu_tokens;   /**< tokens that a GPU had a part in: all, or none, or those before it
                                failed */
    uint64_t deferred;     /**< of pairs, computed after the call */
    uint64_t gpu_pairs;    /**< of pairs, computed by a GPU */
};

#define NUMOE_RESULT_INIT                                                                          \
    {                                                                                              \
        .size = sizeof(struct numoe_result)                                                        \
    }

/**
 * Compute one MoE layer. A negative id is skipped (padding, or held elsewhere); repeated ids of a
 * row add up. Blocks; the calling thread works too.
 * @param result  NULL or what to fill
 * @return 0; -EINVAL (null pointer, top_k, layer, strict id: in error), -ENOMEM (workspace could
 *         not grow; nothing was written, but for tokens that a GPU computed before it failed in
 *         this very call), -ECHILD (in a process forked from the one that opened
 *         the context; only destroy and close may be called there)
 * @thread any; calls on one context take turns, and one that finds a submission outstanding
 *         finishes it first (numoe_wait then returns at once)
 */
int numoe_forward(struct numoe_model *model, uint64_t layer, const struct numoe_batch *batch,
                  struct numoe_result *result, struct numoe_error *error);

/**
 * Start a layer and return; the workers begin at once. Everything batch points to must stay until
 * numoe_wait. A batch whose partial rows (tokens x top_k x hidden floats for each group of nodes
 * that work together) pass 512 MiB and 256 MiB a node is computed in several passes, all but the
 * last of them inside this call; with a GPU all of it is. One submission may be outstanding in a
 * context.
 * @param ticket  for numoe_wait
 * @return as numoe_forward; -EAGAIN when one is outstanding
 */
int numoe_submit(struct numoe_model *model, uint64_t layer, const struct numoe_batch *batch,
                 uint64_t *ticket, struct numoe_error *error);

/**
 * Help with and wait for a submission. Each ticket once.
 * @return 0; -ECANCELED: numoe_cancel came before its end; -EINVAL: no such ticket; -ECHILD as
 *         numoe_forward
 * @thread any
 */
int numoe_wait(struct numoe_model *model, uint64_t ticket, struct numoe_result *result);

/**
 * Call a submission off: workers finish the lane at hand, a part of an expert or some of them, and
 * begin no further one. numoe_wait is still to be called, and returns soon. Then out holds what
 * nobody should read, and deferred experts are lost, those of this call and those that it was to
 * collect. Stats and the result count it as they would the whole call.
 * @return 0; -EALREADY it is done (a GPU's always are), numoe_wait says with what; -EINVAL no such
 *         ticket of this model; -ECHILD as numoe_forward
 * @thread any. Never waits for a call.
 */
int numoe_cancel(struct numoe_model *model, uint64_t ticket);

/**
 * Get the memory of calls ahead of time: activations, partial outputs and tables. After it no call
 * on the model of as many tokens and as large a top_k, or less, that the CPU computes allocates
 * anything or touches a page for the first time, whatever its routing; without it that happens in
 * each call that is larger than all before. A call that is larger than reserved still grows it.
 * The memory is the context's: models share it, and it stays until the context is closed.
 * With batch_invariant to be called when experts are loaded: what some need depends on their
 * scales.
 * @param tokens    of the largest batch; a batch that takes several passes (numoe_submit) counts
 *                  as one of them. 0: none
 * @param top_k     of such a batch, 1 .. 64
 * @param deferred  tokens of the largest batch with numoe_batch.deferred, 0 .. 64; 0: there is none
 * Calls of other threads go on meanwhile, with the memory they have; each waits for 2 MiB of a
 * worker's at most. Until the exchange at the end both exist.
 * @return 0; -EINVAL; -ENOMEM; -EBUSY: deferred experts wait to be collected; -ECHILD as
 *         numoe_forward. Unless 0, everything is as before.
 * @thread any; finishes a submission that is outstanding
 */
int numoe_reserve(struct numoe_model *model, uint64_t tokens, uint64_t top_k, uint64_t deferred,
                  struct numoe_error *error);

/* ---- stats ---------------------------------------------------------------------------------- */

/** What workers did since open: one, those of a node, or all. Times are 0 unless stats are timed.
 */
struct numoe_work_stats {
    uint64_t items; /**< pieces of work that were run, of calls and of everything else */
    uint64_t steals_from[NUMOE_DISTANCES]; /**< times work was taken from a worker so far away */
    uint64_t stolen_items;
    uint64_t refusals;     /**< looks that found nothing but work not worth the trip */
    uint64_t sleeps;       /**< times parked */
    uint64_t read_bytes;   /**< weights that kernels went over, as often as they did */
    uint64_t remote_bytes; /**< of these, in the memory of another node than the worker's */
    uint64_t busy_ns;      /**< running items */
    uint64_t parked_ns; /**< asleep; what is neither busy nor parked was spent waiting for work */
    uint64_t wakes;     /**< sleeps that ended */
    uint64_t wake_ns;   /**< sum of what waking took, from the decision until the worker ran */
    uint64_t wake_buckets[NUMOE_WAKE_BUCKETS]; /**< how often how long: at most 1024 << b ns; they
                                                    sum to wakes */
};

/** One worker, that is a thread; worker 0 is whoever calls. */
struct numoe_worker_stats {
    size_t size;
    uint32_t os_cpu; /**< planned CPU; UINT32_MAX: none */
    uint32_t node;   /**< index for numoe_stats_node: whose memory it reads first */
    bool pinned;     /**< to that CPU; worker 0 during calls */
    int pin_errno;   /**< why not, else 0 */
    struct numoe_work_stats work;
};

/** One memory node of the plan, its workers, and what the context's models have there. */
struct numoe_node_stats {
    size_t size;
    uint32_t os_index, workers;
    struct numoe_work_stats work; /**< of its workers, wherever they read */
    uint64_t expert_bytes; /**< of experts in its memory, read at least once by a call's workers,
                                 whichever they were, summed over calls */
    /* As numoe_model_node reports it, summed over the models; looked at once a minute at most. */
    uint64_t planned_bytes, huge_bytes, giant_bytes, checked_bytes, placed_bytes, spilled_bytes;
    bool bound; /**< every range of them */
};

struct numoe_stats {
    size_t size;
    uint64_t calls; /**< layers computed */
    uint64_t tokens, pairs, skipped, missing;
    uint64_t expert_bytes;   /**< read */
    uint64_t nanoseconds;    /**< inside forward, or from submit to the end of wait */
    uint64_t steals, sleeps; /**< of all workers */
    uint32_t workers, workers_pinned;
    uint64_t workspace_bytes;
    uint64_t gpu_calls;  /**< of calls, computed by a GPU */
    uint64_t gpu_tokens; /**< of tokens */
    uint64_t uptime_ns;  /**< since open */
    uint32_t nodes;      /**< for numoe_stats_node */
    uint32_t models;
    bool timed;                   /**< numoe_options.stats: times are measured */
    struct numoe_work_stats work; /**< of all workers */
    uint32_t gpus;                /**< for numoe_stats_gpu; 0: the CPU computes */
};

/** How a GPU gets at the host memory that experts are copied from. */
enum numoe_pinning {
    NUMOE_PINNING_NONE,     /**< not at all: no model has any for it */
    NUMOE_PINNING_IN_PLACE, /**< pinned where it lies, in chunks */
    NUMOE_PINNING_MIXED,    /**< some of it is; the rest goes through staging */
    NUMOE_PINNING_STAGING   /**< all of it goes through a ring of pinned buffers */
};

/** One GPU of the context, and what the context's models have on it. */
struct numoe_gpu_stats {
    size_t size;
    uint32_t device; /**< CUDA's number; of several GPUs some may be the same */
    uint32_t models; /**< that it computes */
    char name[96];
    char bus[24];     /**< PCI address */
    uint32_t os_node; /**< nearest memory node; UINT32_MAX: not known */
    bool lost;        /**< a fault has made it unusable; the CPU computes instead */
    enum numoe_pinning pinning;
    uint64_t arena_bytes, pinned_bytes; /**< of host memory for all of a model's GPUs: in all, and
                                             pinned where it lies ... */
    uint64_t pinned_chunks;             /**< ... in so many registrations */
    char pin_refusal[160];              /**< why not all is pinned; "" */
    uint64_t ring_bytes;                /**< staging of this GPU for the rest */
    uint32_t ring_node; /**< OS index that it was asked for on; UINT32_MAX: none in particular */
    uint64_t ring_checked_bytes, ring_placed_bytes; /**< of its pages looked at, on that node */
    uint64_t device_bytes;                          /**< of its memory taken */
    uint64_t window_bytes;                          /**< of them, that experts pass through */
    uint64_t cells, experts;                        /**< experts that have room to stay, of so many
                                                         that are its */
    uint64_t calls, tokens;                         /**< that it had a part in */
    uint64_t copied_bytes, copied_experts;          /**< over its link */
    uint64_t found_experts;                         /**< asked for that were there */
    uint64_t pieces, batches; /**< parts computed as they came; copies queued as one */
    uint64_t peer_bytes;      /**< copied to it from the other GPUs, without what NCCL copies */
    uint64_t summed_tokens;   /**< whose outputs it has summed, or NCCL on it */
    uint64_t sums[4];         /**< by enum numoe_gpu_sum: how many models on several GPUs have their
                                   outputs summed there; [NUMOE_GPU_SUM_AUTO]: always 0 */
};

#define NUMOE_STATS_INIT                                                                           \
    {                                                                                              \
        .size = sizeof(struct numoe_stats)                                                         \
    }

#define NUMOE_WORKER_STATS_INIT                                                                    \
    {                                                                                              \
        .size = sizeof(struct numoe_worker_stats)                                                  \
    }
#define NUMOE_NODE_STATS_INIT                                                                      \
    {                                                                                              \
        .size = sizeof(struct numoe_node_stats)                                                    \
    }
#define NUMOE_GPU_STATS_INIT                                                                       \
    {                                                                                              \
        .size = sizeof(struct numoe_gpu_stats)                                                     \
    }

/**
 * Counters since open; none ever falls. Structs are the caller's, filled as far as size says.
 * numoe_stats_worker: of worker 0 .. numoe_stats.workers - 1. numoe_stats_node: of node 0 ..
 * numoe_stats.nodes - 1; it may look at where pages are, which takes milliseconds. numoe_stats_gpu:
 * of GPU 0 .. numoe_stats.gpus - 1, in the order of numoe_options.gpu_devices.
 * @return 0; -EINVAL; numoe_stats_node and _gpu: -ECHILD as numoe_forward
 * @thread any, also while calls run; each number is exact, two of them may be a moment apart
 */
int numoe_stats_get(const struct numoe *context, struct numoe_stats *stats);
int numoe_stats_worker(const struct numoe *context, uint32_t worker,
                       struct numoe_worker_stats *stats);
int numoe_stats_node(struct numoe *context, uint32_t node, struct numoe_node_stats *stats);
int numoe_stats_gpu(struct numoe *context, uint32_t gpu, struct numoe_gpu_stats *stats);

/**
 * All of these as one JSON object, or in Prometheus' text exposition format. docs/stats.md lists
 * names.
 * @param out  the caller's; flushed, not closed
 * @return 0; -EINVAL; -EIO when writing failed, -ENOMEM, -ECHILD as numoe_forward
 * @thread any, also while calls run
 */
int numoe_stats_print_json(struct numoe *context, FILE *out);
int numoe_stats_print_prometheus(struct numoe *context, FILE *out);

/**
 * Write the events of a context opened with trace_events as a timeline that ui.perfetto.dev and
 * chrome://tracing open (Chrome's JSON trace event format). Of a worker that had more, the oldest
 * are gone, and the file says how many.
 * @param out  the caller's; flushed, not closed
 * @return 0; -EINVAL (NULL, or opened without); -EIO when writing failed, -ENOMEM
 * @thread any, also while calls run: what ends after the call began may be missing
 */
int numoe_trace_write(struct numoe *context, FILE *out);

#ifdef __cplusplus
}
#endif

#endif
