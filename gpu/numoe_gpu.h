/**
 * numoe_gpu.h - layers on a GPU: which device, whether it is used and why not, weights copied from
 * node memory while the layer before computes, and the calls themselves.
 *
 * Knows no model file, no pool and no CUDA type: the weights are described by callbacks. Built
 * without the CUDA toolkit it is the same interface, and every device is refused with that reason.
 * What numoe.h has loaded is described already: numoe_model_gpu.
 *
 * Installed beside numoe.h, for engines that call on their own streams. Its structures may change
 * with every release, and so does the symbols' version: a program that was built with another is
 * refused when it is loaded.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_H
#define NUMOE_GPU_H

#include "base/numoe_base.h"
#include "base/numoe_types.h"
#include "numoe_kernels.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Of numoe_topo.h, which is not installed: NULL for who has none. */
struct numoe_machine;

/* ---- devices -------------------------------------------------------------------------------- */

struct numoe_gpu_properties {
    uint32_t index;
    char name[96];
    char bus[24]; /**< PCI address, "0000:1b:00.0" */
    uint64_t memory_bytes, free_bytes;
    uint32_t multiprocessors;
    int major, minor;      /**< compute capability */
    uint64_t shared_bytes; /**< most shared memory that a block can opt in to */
    uint64_t l2_bytes;
    int driver_version, runtime_version; /**< of CUDA: 13000 is 13.0 */
    int ptx_version; /**< once open: of the kernels in use; 80 when the driver compiled them */
    bool locality_known;
    uint32_t os_node; /**< nearest memory node, OS index; NUMOE_NONE */
};

/** @return how many devices there are; -ENOTSUP built without CUDA, -ENODEV no driver or none, with
 *          the reason in error */
int numoe_gpu_count(struct numoe_error *error);

/** @param machine  NULL, or where to look for the device's locality before sysfs is asked
 *  @return 0; -ENODEV, -EINVAL */
int numoe_gpu_describe(uint32_t index, const struct numoe_machine *machine,
                       struct numoe_gpu_properties *properties, struct numoe_error *error);

/** What is asked for, with the environment's NUMOE_GPU=off|on|force before the caller's wish.
 *  @return 0; -EINVAL: the variable says something else */
int numoe_gpu_mode(enum numoe_gpu_mode wish, enum numoe_gpu_mode *mode, struct numoe_error *error);

/** Whether a device is used, and why (not). */
struct numoe_gpu_verdict {
    bool usable, forced; /**< forced: in spite of the reason */
    char reason[512];    /**< one sentence */
    double rel_l2;       /**< what the self-test measured; negative: not run */
};

struct numoe_gpu;

/* Host memory is pinned in chunks, as a driver's registration ends at a size (r580: 512 GiB less a
 * little), and a large one that fails takes minutes to. */
#define NUMOE_GPU_CHUNK_BYTES ((uint64_t)1 << 30)
#define NUMOE_GPU_REGISTRATION_BYTES ((uint64_t)1 << 39)
/* Staging for what is not pinned, of a device. */
#define NUMOE_GPU_RING_BYTES ((uint64_t)64 << 20)

/** What pinning host memory for a device comes to. */
struct numoe_gpu_pinning {
    bool in_place;        /**< memory is pinned where it lies; else all goes through staging */
    uint64_t tried_bytes; /**< of the memory that was tried with ... */
    uint32_t os_node;     /**< ... on this node, the device's own; NUMOE_NONE: it is not known */
    double ms;            /**< that pinning it took, or being refused */
    char reason[160];     /**< of the refusal; "" */
};

/**
 * Pin some memory of the device's own node, and unpin it.
 * @return 0, also when it is refused; -ENOMEM: there is no such memory; -EIO
 */
int numoe_gpu_try_pinning(struct numoe_gpu *gpu, uint64_t bytes, struct numoe_gpu_pinning *pinning,
                          struct numoe_error *error);

/**
 * Open a device if the evidence is for it: wanted, there, code for it loads, shared memory
 * suffices, and a small set of experts computed on it agrees with the reference.
 * @param log  NULL, or where faults and fallbacks are reported; copied
 * @return 0; else -ENODEV, -ENOTSUP, -EIO, -ENOMEM with the reason in verdict and error
 */
int numoe_gpu_open(uint32_t index, enum numoe_gpu_mode mode, const struct numoe_machine *machine,
                   const struct numoe_log *log, struct numoe_gpu **gpu,
                   struct numoe_gpu_verdict *verdict, struct numoe_error *error);
/** All models on it must have been destroyed. NULL is allowed. */
void numoe_gpu_close(struct numoe_gpu *gpu);
const struct numoe_gpu_properties *numoe_gpu_get(const struct numoe_gpu *gpu);

/** 0; -EIO once a fault has made the device unusable for this process, with what it was. */
int numoe_gpu_health(const struct numoe_gpu *gpu, struct numoe_error *error);

/* ---- models --------------------------------------------------------------------------------- */

/** Place of the first slice of an expert that is not there. */
#define NUMOE_GPU_ABSENT UINT32_MAX

/** A model's weights in host memory, as the device copies them. Callbacks run in the thread that
 *  calls, and not at once. */
struct numoe_gpu_source {
    void *user;
    struct numoe_slice_shape shape;
    struct numoe_activation activation;
    /** NUMOE_MXFP8_UP, NUMOE_MXFP8_OCP: x and h are rounded so; any other: bf16, as exact. */
    enum numoe_arithmetic arithmetic;
    uint64_t layers, experts;
    uint32_t slices; /**< of an expert */
    bool down_bias;
    uint32_t region_count; /**< one a memory node */
    /** The memory that a region lies in, to be pinned: [index] of region_count. */
    void (*arena)(void *user, uint32_t index, void **address, uint64_t *bytes);
    /** The slices of an expert that lie in region `index`, one after another: how many, and the
     *  first; 0: none. Slices are in the order of the regions, and in a region those of the next
     *  expert of the layer follow at once. */
    uint64_t (*place)(void *user, uint64_t layer, uint64_t expert, uint32_t index,
                      const uint8_t **address);
    /** The expert is there to be computed. */
    bool (*present)(void *user, uint64_t layer, uint64_t expert);
    /** With down_bias: its b2, [32 hidden_tiles] in lane order; NULL: not there. */
    const float *(*bias)(void *user, uint64_t layer, uint64_t expert);
    /** Changes whenever weights of the layer change: a copy made before is made again. */
    uint32_t (*generation)(void *user, uint64_t layer);
    /** Copy rows between host memories, with as many threads as there are; NULL: memcpy. */
    void (*copy)(void *user, void *to, uint64_t to_stride, const void *from, uint64_t from_stride,
                 uint64_t row_bytes, uint64_t rows);
    /** Copy weights to staging that a device reads and no CPU does: best by the workers of the node
     *  (OS index; NUMOE_NONE: not known) that staging lies on, past their caches; NULL: memcpy. */
    void (*fill)(void *user, void *to, const void *from, uint64_t bytes, uint32_t os_node);
    /** numoe_gpu_sum_rows, likewise; NULL: in the calling thread. */
    void (*sum)(void *user, void *to, enum numoe_type type, uint64_t to_stride,
                const float *const *from, uint32_t count, bool keep, uint64_t columns,
                uint64_t rows);
    /** How far a region's node is from another, 10 being the node itself; 0, or NULL: not known. */
    uint32_t (*distance)(void *user, uint32_t index, uint32_t os_node);
};

/** Whether each device has all experts, and how they come to it. */
enum numoe_gpu_whole {
    NUMOE_GPU_WHOLE_NOT,   /**< devices have a part of each layer */
    NUMOE_GPU_WHOLE_AUTO,  /**< all; passed on from device to device where that is faster than their
                                links to the host, as over NVLink, and not all experts fit */
    NUMOE_GPU_WHOLE_LINKS, /**< all, each device copying everything over its own link */
    NUMOE_GPU_WHOLE_PEERS  /**< all, passed on wherever devices reach each other */
};

struct numoe_gpu_model_options {
    bool stream;              /**< experts do not stay, even if there is room */
    uint64_t cache_bytes;     /**< device memory for experts that stay; 0: as much as there is */
    uint64_t window_bytes;    /**< and that the others pass through; 0: two layers, or half of what
                                   there is if that is less */
    uint64_t piece_bytes;     /**< that each node gives to a piece at least; 0: 4 MiB */
    const char *profile;      /**< file of numoe_gpu_profile_save: its hottest experts are copied
                                   when the first call comes; NULL */
    uint64_t chunk_bytes;     /**< pinned at a time, below NUMOE_GPU_REGISTRATION_BYTES; 0:
                                   NUMOE_GPU_CHUNK_BYTES */
    uint64_t ring_bytes;      /**< staging for what is not pinned; 0: NUMOE_GPU_RING_BYTES */
    uint64_t keep_free_bytes; /**< device memory left for workspace; 0: an eighth, at most 4 GiB */
    bool no_pinning;          /**< staging only: for tests and measurement */
    const uint32_t *shares;   /**< of several devices: what each gets, [count], relative, 1 to 64;
                                   NULL: by the links' speeds, in eighths of the fastest */
    /** Of several devices: where their parts are summed. What cannot be had gives way, NCCL to peer
     *  and that to host, as soon as it fails; numoe_gpu_report says to what, and why. With peer
     *  and nccl inputs, too, cross each device's link in part only and go on to the others. */
    enum numoe_gpu_sum sum;
    /** Of several devices: every expert is whole on each of them, for engines that divide their
     *  tokens over devices and bring their own kernels (numoe_gpu_pieces_begin). Nothing is summed
     *  then, and shares say how many experts each device copies from the host. */
    enum numoe_gpu_whole whole;
    /** With whole: a thread for each device asks for its pieces. numoe_gpu_piece_next then waits
     * for what the other threads have to do, too; by one thread it could wait for that thread. */
    bool part_threads;
};

struct numoe_gpu_model;

/**
 * Reserve device memory for a model and pin its host memory. Nothing is copied yet.
 * @param options  NULL for defaults
 * @return 0; -ENOMEM: not even two experts fit; -EIO; -EOVERFLOW; what a profile's file says
 */
int numoe_gpu_model_create(struct numoe_gpu *gpu, const struct numoe_gpu_source *source,
                           const struct numoe_gpu_model_options *options,
                           struct numoe_gpu_model **model, struct numoe_error *error);
/**
 * The same over several devices, each of which copies its own part of a layer over its own link and
 * computes it for all tokens; the parts of the outputs are summed in fp32, in the order of gpus
 * (but for NUMOE_GPU_SUM_NCCL), and rounded once.
 *
 * Where every device's node is known and regions lie nearest to some of them, a device has those
 * regions' slices of all experts; devices with the same nearest regions, or all where that is not
 * known or would be uneven, have some experts each. What a device gets is as much as its link is
 * measured to carry while the others copy too. The same gpus and the same division give the same
 * bits.
 *
 * With whole, each device's part (numoe_gpu_model_part) is a model of all experts by itself, that
 * can be prefetched, held and queued for its tokens alone, over its own link; and pieces of a layer
 * are begun for all devices at once: then each expert crosses one link, and is passed on to the
 * other devices. Where devices cannot copy from each other, or not faster than from the host, or
 * have no memory for it, each copies all over its own link; numoe_gpu_report says so, and why.
 * numoe_gpu_forward and start are refused (-ENOTSUP).
 *
 * A device may be there more than once (opened so often): its memory is divided.
 * @param gpus  [count], 1 to NUMOE_GPU_MOST, each of them opened by itself and no two the same
 *              pointer; must outlive the model
 * @return as numoe_gpu_model_create; -EINVAL: more devices than there is work for, an option that
 * is none
 */
int numoe_gpu_model_create_over(struct numoe_gpu *const *gpus, uint32_t count,
                                const struct numoe_gpu_source *source,
                                const struct numoe_gpu_model_options *options,
                                struct numoe_gpu_model **model, struct numoe_error *error);
enum { NUMOE_GPU_MOST = 16 };

/** Waits for what runs, but on streams of the caller's only for pieces that are done with: what
 * reads others must be past. Whoever waits in numoe_gpu_piece_next or piece_any gets -ECANCELED
 * first. No other call may be under way, and none follow. NULL is allowed. */
void numoe_gpu_model_destroy(struct numoe_gpu_model *model);

/** How many devices a model is on. */
uint32_t numoe_gpu_model_parts(const struct numoe_gpu_model *model);
/** What of a model is on one of its devices, [i] of gpus: for reports; and for engines, whose
 *  numoe_gpu_enqueue on each gives its part of the outputs as fp32 on that device, to be summed by
 *  the engine. Made with NUMOE_GPU_SUM_HOST it then takes no memory for sums. */
struct numoe_gpu_model *numoe_gpu_model_part(struct numoe_gpu_model *model, uint32_t i);

/** numoe_gpu_health of the first of its devices that is lost, or 0. */
int numoe_gpu_model_health(const struct numoe_gpu_model *model, struct numoe_error *error);

/** One call on host memory; see struct numoe_batch of numoe.h. */
struct numoe_gpu_call {
    uint64_t tokens, top_k;
    const void *x;
    enum numoe_type x_type;
    uint64_t x_stride;    /**< elements, >= hidden */
    const int32_t *ids;   /**< [tokens][top_k]; negative: skipped */
    const float *routing; /**< [tokens][top_k] */
    void *out;
    enum numoe_type out_type;
    uint64_t out_stride; /**< elements, >= hidden */
    bool add;
    float scale;
    /** Another computes the other experts of the same call meanwhile and writes out: what the GPU
     *  computes is added to that by numoe_gpu_finish. With numoe_gpu_start or begin; add is then
     *  not for the GPU, and false. */
    bool join;
    /** Tokens that go to each expert, whoever computes them [experts]: what the experts that stay
     *  are chosen by; NULL: as ids say. */
    const uint32_t *asked;
    /** Experts of the next layer that are begun to be copied, the hottest; 0: all, if seven eighths
     *  of this one's are hit; NUMOE_GPU_NO_AHEAD: none. */
    uint64_t ahead;
};

#define NUMOE_GPU_NO_AHEAD UINT64_MAX

/**
 * Compute one layer and, if most of its experts were hit, start copying the next. Only experts that
 * are hit and do not stay on the device are copied. Blocks until out is written.
 * @param done  tokens whose output is final, also when the call fails: the rest is untouched
 * @return 0; -ENOMEM, -EIO (the device is lost, see numoe_gpu_health), -EINVAL
 */
int numoe_gpu_forward(struct numoe_gpu_model *model, uint64_t layer,
                      const struct numoe_gpu_call *call, uint64_t *done, struct numoe_error *error);

/**
 * The same in two steps, for who has something else to do meanwhile: queue the work of as many
 * tokens from `first` on as are computed together, and return. Blocks only while inputs are copied
 * to staging and, where host memory is not pinned, weights; on several devices that pass inputs on,
 * until these have arrived.
 * @param call    x, ids and routing are read until this returns; out is written by finish
 * @param tokens  how many it took; numoe_gpu_finish must follow
 * @return as numoe_gpu_forward; -EINVAL, too, if call has no token `first`
 */
int numoe_gpu_start(struct numoe_gpu_model *model, uint64_t layer,
                    const struct numoe_gpu_call *call, uint64_t first, uint64_t *tokens,
                    struct numoe_error *error);
/**
 * numoe_gpu_start in two steps, for who starts something else between them: copies of inputs and of
 * the first experts are queued; then, by numoe_gpu_queue, which must follow, all else.
 * @return as numoe_gpu_start; after a failure of either nothing is to be finished
 */
int numoe_gpu_begin(struct numoe_gpu_model *model, uint64_t layer,
                    const struct numoe_gpu_call *call, uint64_t first, uint64_t *tokens,
                    struct numoe_error *error);
int numoe_gpu_queue(struct numoe_gpu_model *model, const struct numoe_gpu_call *call,
                    struct numoe_error *error);
/** Wait for what was started and write its tokens of call->out.
 *  @param done  of them, from the first on, those whose output is final, also when it fails */
int numoe_gpu_finish(struct numoe_gpu_model *model, const struct numoe_gpu_call *call,
                     uint64_t *done, struct numoe_error *error);

/** Instead of finish, or of queue: nothing of what was started is written. Waits for the device. */
void numoe_gpu_cancel(struct numoe_gpu_model *model);

/** Tokens that went to each expert of a layer [experts] in a call that the GPU had no part in. */
void numoe_gpu_asked(struct numoe_gpu_model *model, uint64_t layer, const uint32_t *tokens_of,
                     uint64_t tokens);

/**
 * Begin to copy experts of a layer that will be called next, as during an engine's attention.
 * @param ids  experts (negative, missing or past the end: skipped); NULL: all of the layer
 * @return 0; -EIO, -EINVAL. Waits for the device only where 32 pieces are on their way already:
 *         then for some of those
 */
int numoe_gpu_prefetch(struct numoe_gpu_model *model, uint64_t layer, const int32_t *ids,
                       uint64_t count, struct numoe_error *error);

/** Milliseconds that the device took for what was started and finished last, from its inputs to the
 *  last launch's end; negative: not known. */
double numoe_gpu_took_ms(const struct numoe_gpu_model *model);
/** When that began, of the first device: numoe_now_ns. */
uint64_t numoe_gpu_began_ns(const struct numoe_gpu_model *model);

/**
 * Copy up to `most` experts of a layer to where they stay, the hottest that do not yet, if they are
 * much hotter than those that make room; calls go on meanwhile. Not between start and finish.
 * @return 0; -EBUSY: pieces of a layer were begun and are not ended; -ENOMEM, -EIO
 */
int numoe_gpu_bring(struct numoe_gpu_model *model, uint64_t layer, uint32_t most,
                    struct numoe_error *error);

/** Sum fp32 rows [rows][columns] of `count` places, in their order, with keep after what is in
 *  rows of a type, and round once: to = rounded(keep ? to + (from[0] + from[1] + ...) : ...). */
void numoe_gpu_sum_rows(void *to, enum numoe_type type, uint64_t to_stride,
                        const float *const *from, uint32_t count, bool keep, uint64_t columns,
                        uint64_t rows);

/** held[e] of an expert: it is on the device, or on its way by a prefetch. */
void numoe_gpu_held(const struct numoe_gpu_model *model, uint64_t layer, uint8_t *held);

/** Write how often each expert was asked for, for numoe_gpu_model_options.profile.
 *  @return 0; -errno of the file */
int numoe_gpu_profile_save(const struct numoe_gpu_model *model, const char *path,
                           struct numoe_error *error);

/* ---- tracing -------------------------------------------------------------------------------- */

enum numoe_gpu_span_kind {
    NUMOE_GPU_SPAN_COPY,    /**< a piece of a layer's experts over the link */
    NUMOE_GPU_SPAN_COMPUTE, /**< a piece, or the experts that stay, computed for all tokens */
    NUMOE_GPU_SPAN_PASS     /**< a piece of whole experts from another device, over no link */
};

struct numoe_gpu_span {
    enum numoe_gpu_span_kind kind;
    uint32_t part;                  /**< of several devices: which; of a PASS: to which */
    uint64_t layer, experts, bytes; /**< bytes: copied */
    uint64_t begin_ns, end_ns;      /**< of CLOCK_MONOTONIC */
};

/**
 * From now on tell of copies and of computations for numoe_gpu_forward, start and finish, in the
 * order in which they are found to be over: by a call of numoe_gpu_finish or forward, in its
 * thread. And of copies for pieces that are begun for several devices at once (numoe_gpu_model_
 * options.whole): of each device over its link and, beside them, from other devices; by calls for
 * these pieces. The device's clock is set beside the host's now; to some 10 us.
 * @param tell  must not call into the model; where several threads call for pieces, it comes from
 *              each of them, once at a time, and must not wait for one that is in such a call
 * @return 0; -ENOMEM, -EIO; -EBUSY: a call is not over, or it is on already
 */
int numoe_gpu_trace(struct numoe_gpu_model *model,
                    void (*tell)(void *user, const struct numoe_gpu_span *span), void *user,
                    struct numoe_error *error);

/* ---- for engines: a stream of the caller's ------------------------------------------------------
 *
 * A stream is CUDA's cudaStream_t, of the same device. These wait for the device only where a
 * layer's table of experts that stay has changed since its last call, for that call; and where 32
 * pieces are on their way, until 24 are; but for pieces of several devices at once, which the host
 * sees arriving. All host memory has to be pinned (-ENOTSUP), a model on several devices is queued
 * part by part (numoe_gpu_model_part), and one call at a time is in the making, whoever makes it
 * (-EBUSY). Outputs of an earlier call on
 * another stream are ordered by the caller.
 */

/** A call on device memory. */
struct numoe_gpu_device_call {
    uint64_t tokens, top_k;
    const void *x;
    enum numoe_type x_type;
    uint64_t x_stride;    /**< elements, >= hidden */
    const int32_t *ids;   /**< [tokens][top_k]; negative, missing or past the end: skipped */
    const float *routing; /**< [tokens][top_k] */
    float *out;           /**< [tokens][out_stride] */
    uint64_t out_stride;  /**< elements, >= hidden */
    bool add;
    float scale;
    void *workspace; /**< numoe_gpu_workspace() bytes, 256-byte aligned; free once the stream is
                        past */
    uint64_t workspace_bytes;
};

/** @return device bytes that the call needs; 0: it is too large */
uint64_t numoe_gpu_workspace(const struct numoe_gpu_model *model,
                             const struct numoe_gpu_device_call *call);

/**
 * Queue a layer on the stream and return.
 * @param host_ids  the same ids in host memory, read until this returns: only their experts are
 *                  copied; NULL: all of the layer that are not on the device. On a stream that is
 *                  captured: experts that replays will ask for; what they ask for besides and is
 *                  not held is skipped
 * @return 0; -EINVAL, -ENOTSUP, -EBUSY, -EIO, -ENOMEM: out is then undefined. On a stream that is
 *         captured -ENOTSUP: an expert is not held
 */
int numoe_gpu_enqueue(struct numoe_gpu_model *model, uint64_t layer,
                      const struct numoe_gpu_device_call *call, const int32_t *host_ids,
                      void *stream, struct numoe_error *error);

/*
 * Graphs. A stream that is being captured (cudaStreamBeginCapture) takes numoe_gpu_enqueue of
 * layers that are held, and nothing else of this interface: what would copy, wait or allocate is
 * refused before it touches the stream (-ENOTSUP), so the capture stays whole. A graph reads x, ids
 * and routing when it is replayed, from where they were when it was captured; it stays good, beside
 * calls of any kind, until the layer is released. Sizes need no preparation but the workspace.
 */

/**
 * Copy experts of a layer to the device and wait for them; they stay until numoe_gpu_release, and
 * so does everything that a graph reads of them. Others of the layer are copied whenever they are
 * needed.
 * @param ids  experts (negative, missing or past the end: skipped); NULL: all of the layer
 * @return 0; -ENOMEM: there is no room for so many; -EBUSY: it is held already, or a call is not
 *         over; -EINVAL, -EIO. While it is held, calls after a change of its weights fail (-EBUSY)
 */
int numoe_gpu_hold(struct numoe_gpu_model *model, uint64_t layer, const int32_t *ids,
                   uint64_t count, struct numoe_error *error);
/** No graph with calls of this layer runs or is replayed any more. */
void numoe_gpu_release(struct numoe_gpu_model *model, uint64_t layer);

/** Experts on the device, for kernels of the engine's own: slices as numoe_kernels.h draws them. */
struct numoe_gpu_piece {
    const uint8_t *weights;   /**< device; not the same of each piece */
    const uint32_t *slice_at; /**< device [experts][slices]: where each begins, in 64-byte units
                                 from weights; NUMOE_GPU_ABSENT in [e][0]: not in this piece. NULL:
                                   there are no more pieces */
    const float *down_bias;   /**< device [experts][32 hidden_tiles] in lane order, or NULL */
    void *handle;             /**< numoe's */
};

/**
 * Begin a layer: copies of the ids' experts (NULL: all) start. numoe_gpu_pieces_end must follow.
 *
 * On several devices with whole experts it is begun once, on the whole model, with the ids of all
 * devices' tokens. Each part then gets all of these experts: pieces come by numoe_gpu_piece_next of
 * the parts, or by numoe_gpu_piece_any; numoe_gpu_piece_done, piece_marlin and pieces_end are each
 * part's, and the call is over when the last part was ended. One thread may drive all devices, or
 * any number of them may: between pieces_begin and the call's end these five may be called at the
 * same time, for the same or for other parts, and a thread that waits for its piece keeps nobody
 * from anything; only a stream and a piece are one thread's at a time. All other functions of the
 * model and its parts are one call at a time, and none of them beside those. A part can have a call
 * of its own only while no such call is under way (-EBUSY), and the other way round. Any of the
 * devices may be the thread's current one behind it.
 *
 * @param host_ids  [tokens][top_k]  @return 0; -EINVAL, -ENOTSUP, -EBUSY, -EIO, -ENOMEM: nothing
 *                  was begun
 */
int numoe_gpu_pieces_begin(struct numoe_gpu_model *model, uint64_t layer, const int32_t *host_ids,
                           uint64_t tokens, uint64_t top_k, struct numoe_error *error);
/**
 * The same on several devices with whole experts, with the ids of each device's own tokens: an
 * expert then goes to the devices that need it, and to the one whose link it crosses, instead of to
 * all of them; every device may get experts that it has no tokens for.
 * @param host_ids  [numoe_gpu_model_parts] each as above, or NULL: all experts
 * @param tokens    [numoe_gpu_model_parts]
 */
int numoe_gpu_pieces_begin_each(struct numoe_gpu_model *model, uint64_t layer,
                                const int32_t *const *host_ids, const uint64_t *tokens,
                                uint64_t top_k, struct numoe_error *error);
/**
 * The next piece: those that are on the device first, then in the order of arrival. What is queued
 * on the stream from now on finds it complete. Every expert is in one piece only.
 *
 * In a call that was begun for several devices this waits until a piece is there, its own or one
 * that is passed on, and every expert is in one piece of each device. Copies of all devices go on
 * meanwhile, and only while a call waits so: a device is asked again as soon as its last piece is
 * queued.
 * @return 0; -EAGAIN: pieces that are not done with fill the device memory for them. In a call for
 *         several devices exactly when of this one no piece is there, and on none of them a copy is
 *         under way or can be queued, before a piece that is there is taken or one that was taken
 *         is done with, of this device or of any other (what is held may be what another copies
 *         from, or what it has no room for). With numoe_gpu_model_options.part_threads that alone
 *         is waited for, and -EAGAIN comes only when this device, besides, has pieces that it is
 *         not done with.
 *         -ECANCELED: the call failed for another device, or was ended before its last piece, by
 *         whichever thread and also while this one waited, and is to be ended if it is not;
 *         -EIO, -EINVAL
 */
int numoe_gpu_piece_next(struct numoe_gpu_model *model, void *stream, struct numoe_gpu_piece *piece,
                         struct numoe_error *error);
/**
 * The same for whichever device has a piece first, so that one thread drives all: it never gets
 * -EAGAIN if it is done with each piece before it asks for more.
 * @param streams  [numoe_gpu_model_parts] a stream of each device
 * @param part     of which device the piece is, which is then the thread's current one.
 *                 piece->slice_at is NULL when all devices have had all
 */
int numoe_gpu_piece_any(struct numoe_gpu_model *model, void *const *streams, uint32_t *part,
                        struct numoe_gpu_piece *piece, struct numoe_error *error);
/**
 * Queue on the stream the repacking of a piece's experts to the layout that Marlin kernels read
 * (numoe_kernels.h), into memory of the engine's. May be followed by numoe_gpu_piece_done at once.
 * The first on a device waits for a check that repacking gives the reference's bits there.
 * @param slot_of      device [experts]: the slot of `to` that each goes to; negative: left out.
 *                     NULL: its own number
 * @param interleaved  columns of gate and up in turns, not one after the other
 * @param to           device: slot 0 of each array, the next at once behind it
 *                     (numoe_marlin_sizes)
 * @return 0; -EINVAL: the layout cannot have experts of this shape; -ENOTSUP: the check failed;
 * -EIO
 */
int numoe_gpu_piece_marlin(struct numoe_gpu_model *model, void *stream,
                           const struct numoe_gpu_piece *piece, const int32_t *slot_of,
                           bool interleaved, const struct numoe_marlin *to,
                           struct numoe_error *error);
/** What is queued on the stream by now was its last use: its memory is given on behind that. What
 *  is queued next may wait for uses of the layer that other streams were done with before.
 *  @return 0; -EINVAL: it is not taken, or was given up by numoe_gpu_pieces_end; -EIO */
int numoe_gpu_piece_done(struct numoe_gpu_model *model, void *stream,
                         const struct numoe_gpu_piece *piece, struct numoe_error *error);
/** After the last piece, or before: pieces not taken are dropped, and for those not done with the
 *  stream is waited for, on which they are to have been taken. */
void numoe_gpu_pieces_end(struct numoe_gpu_model *model, void *stream);

struct numoe_gpu_report {
    bool resident;                       /**< there is room for every expert */
    uint64_t expert_bytes, device_bytes; /**< of an expert; of all that was taken */
    uint64_t cells, experts;             /**< experts that there is room for, of how many */
    uint64_t window_bytes;               /**< that the others pass through */
    uint64_t pinned_bytes, arena_bytes;  /**< of host memory: pinned, in all */
    uint64_t pinned_chunks;              /**< registrations that it is pinned by */
    uint64_t ring_bytes;                 /**< staging for the rest */
    uint32_t ring_node;                  /**< OS index it was asked for on; NUMOE_NONE */
    uint64_t ring_checked, ring_placed;  /**< its pages looked at; of them, on that node */
    char pin_refusal[160];               /**< why not all is pinned; "" */
    uint64_t copied_bytes;               /**< over the link */
    uint64_t copied_experts, found;      /**< experts copied; asked for that were there */
    uint64_t pieces, batches; /**< parts that were computed as they came; batched copies */
    uint64_t calls, tokens;
    /* of several devices */
    enum numoe_gpu_sum sum; /**< where large outputs are summed; HOST on one device */
    char sum_note[512];     /**< why not where it was asked for, or nearer; "" */
    double peer_gbs;     /**< copies between devices, the slowest while all copy; 0: not measured */
    uint64_t peer_bytes; /**< copied from device to device, without what NCCL copies */
    uint64_t summed_tokens; /**< whose parts were summed on devices, of tokens */
    bool passes; /**< experts that are whole on each device cross one link, and are passed on */
    char pass_note[216];                   /**< why not, where experts are whole; "" */
    uint64_t passed_bytes, passed_experts; /**< that came from other devices */
};

/** "auto", "host", "peer", "nccl" */
extern const char *const numoe_gpu_sum_names[4];

/** @thread any, also while calls run: each number is whole, two of them may be a moment apart */
void numoe_gpu_model_report(const struct numoe_gpu_model *model, struct numoe_gpu_report *report);

/**
 * What one of a model's devices, [i] of gpus, has to do with sums of outputs.
 * @param peer_bytes     copied to it from the others for that, and of inputs
 * @param summed_tokens  whose outputs it has summed, of tokens
 * @return where they are summed; NUMOE_GPU_SUM_AUTO: on one device there are no sums
 * @thread as numoe_gpu_model_report
 */
enum numoe_gpu_sum numoe_gpu_model_sums(const struct numoe_gpu_model *model, uint32_t i,
                                        uint64_t *peer_bytes, uint64_t *summed_tokens);

/* ---- forms of the kernels, and which is chosen -------------------------------------------------
 */

/** Forms are numbered from 1: so many tokens of an expert together, by mma.sync or wgmma. */
enum { NUMOE_GPU_FORMS = 6 };
/** [form]; [0]: "chosen"; NULL behind the last */
extern const char *const numoe_gpu_form_names[NUMOE_GPU_FORMS + 2];

/** What times were measured on and are valid for: never a chip's name. */
struct numoe_gpu_numbers {
    int major, minor; /**< compute capability */
    uint32_t multiprocessors;
    uint64_t shared_bytes, l2_bytes;
};

enum { NUMOE_GPU_TUNED_SHAPES = 16, NUMOE_GPU_TUNED_POINTS = 24 };

struct numoe_gpu_tuned_point {
    double tokens;                  /**< of an expert, on average */
    double ms[NUMOE_GPU_FORMS + 1]; /**< [form]: of a layer; 0: not measured */
};

struct numoe_gpu_tuned_shape {
    uint64_t hidden, intermediate; /**< of an expert */
    uint32_t point_count;
    struct numoe_gpu_tuned_point points[NUMOE_GPU_TUNED_POINTS]; /**< ascending */
};

/** Times of all forms by shape and tokens. */
struct numoe_gpu_tuning {
    struct numoe_gpu_numbers device;
    uint32_t shape_count;
    struct numoe_gpu_tuned_shape shapes[NUMOE_GPU_TUNED_SHAPES];
};

/** The table that a device begins with: gpu/gpu_tuning.json, made by numoe bench --gpu --tune. On a
 *  device of other numbers it is the best that is known. */
const struct numoe_gpu_tuning *numoe_gpu_tuning_builtin(void);

struct numoe_gpu_numbers numoe_gpu_numbers(const struct numoe_gpu_properties *properties);

/** Whether a table says enough: shapes told once, points that ascend, and at each a time of every
 *  form that needs no more than 99 KiB of shared memory.
 *  @param where  named in the error  @return 0; -EINVAL */
int numoe_gpu_tuning_check(const struct numoe_gpu_tuning *tuning, const char *where,
                           struct numoe_error *error);

/** Whether it was made on a device of these numbers. @return 0; -EINVAL, with the one that differs
 */
int numoe_gpu_tuning_fits(const struct numoe_gpu_tuning *tuning,
                          const struct numoe_gpu_numbers *numbers, const char *where,
                          struct numoe_error *error);

/** The fastest of some forms (bit f: form f) by a table that is right; 0: there are none.
 *  @param tokens  of an expert, on average */
uint32_t numoe_gpu_tuning_choose(const struct numoe_gpu_tuning *tuning, uint32_t forms,
                                 uint64_t hidden, uint64_t intermediate, double tokens);

/** Choose by another table from now on, which is copied. No call may be under way.
 *  @return 0; -EINVAL as check and fits say */
int numoe_gpu_use_tuning(struct numoe_gpu *gpu, const struct numoe_gpu_tuning *tuning,
                         const char *where, struct numoe_error *error);
const struct numoe_gpu_tuning *numoe_gpu_tuned(const struct numoe_gpu *gpu);

/** Bit f: the device has form f, and it computes right. */
uint32_t numoe_gpu_forms(const struct numoe_gpu *gpu);

/* ---- certifying ----------------------------------------------------------------------------- */

struct numoe_gpu_finding {
    bool there;     /**< the device has the form */
    bool ok;        /**< and it computes right */
    double rel_l2;  /**< to float64, the worst of the tokens compared */
    char text[160]; /**< what is wrong; "" */
};

/**
 * Compute random experts by one form and compare some tokens with float64: step by step, each
 * waited for, and twice to the same bits; with graph, captured and replayed three times, to the
 * bits of the step by step.
 * @param form  1 to NUMOE_GPU_FORMS; 0: as is chosen for that many tokens
 * @return 0, with what was found; -ENOMEM, -EIO: it could not be tried
 */
int numoe_gpu_certify_form(struct numoe_gpu *gpu, enum numoe_activation_kind activation,
                           uint32_t form, uint32_t tokens, bool graph,
                           struct numoe_gpu_finding *finding, struct numoe_error *error);

/**
 * Every code with every scale byte 0..254 in one of the matrices. Bytes 253 and 254 may become
 * infinite, where codes reach 2^128.
 */
int numoe_gpu_certify_codes(struct numoe_gpu *gpu, uint32_t form, enum numoe_matrix matrix,
                            struct numoe_gpu_finding *finding, struct numoe_error *error);

/**
 * Random experts copied from host memory piece by piece while others compute, beside float64 and
 * beside the same calls step by step, each waited for.
 */
int numoe_gpu_certify_pipeline(struct numoe_gpu *gpu, uint32_t tokens,
                               struct numoe_gpu_finding *finding, struct numoe_error *error);

/** Experts passed on between the device and itself, taken as two: every one comes to both, as it
 *  was, once. */
int numoe_gpu_certify_passing(struct numoe_gpu *gpu, struct numoe_gpu_finding *finding,
                              struct numoe_error *error);

/** Experts repacked to Marlin's layout, both orders of columns, bit for bit beside the reference.
 */
int numoe_gpu_certify_marlin(struct numoe_gpu *gpu, struct numoe_gpu_finding *finding,
                             struct numoe_error *error);

/* ---- measuring ------------------------------------------------------------------------------ */

/** Ceilings of the device: reading its memory, and the link to it from pinned memory, 10^9 bytes a
 *  second; bf16 products by mma.sync from registers, 10^9 operations a second. */
int numoe_gpu_ceilings(struct numoe_gpu *gpu, double *read_gbs, double *link_gbs, double *mma_gops,
                       struct numoe_error *error);

struct numoe_gpu_bench {
    uint64_t tokens, top_k;
    uint32_t routings;    /**< different ones that are measured in turn */
    uint32_t repeat;      /**< measurements of all of them */
    uint32_t form;        /**< bench_layer: of the kernels; 0: as is chosen, which is then told */
    const uint16_t *x;    /**< bf16 [tokens][hidden] */
    const int32_t *ids;   /**< [routings][tokens][top_k] */
    const float *routing; /**< likewise */
    float *out;           /**< bench_layer: [tokens][hidden] of the last routing */
    double *ms;           /**< [repeat]: a layer, mean over the routings */
    /** bench_layers: the tokens [samples] whose outputs are kept of each layer ... */
    const uint64_t *sample;
    uint32_t samples;
    float *sampled; /**< ... [layers][samples][hidden], or NULL */
};

/** Time a layer with its weights in device memory, by replay of a captured graph. */
int numoe_gpu_bench_layer(struct numoe_gpu_model *model, uint64_t layer,
                          struct numoe_gpu_bench *bench, struct numoe_error *error);

struct numoe_gpu_bench_stream {
    double total_ms, copy_ms, compute_ms; /**< of all layers once: together, each alone */
    uint64_t bytes;                       /**< copied in one pass */
    /** The link: one copy of up to 256 MiB from pinned memory of the driver's, just before and just
     *  after each pass that copies and computes; 10^9 bytes a second. */
    double link_gbs;
    /** What such passes, and what passes of copies alone, carry of the better of the two. */
    double link_fraction, copy_link_fraction;
    double host_cpu; /**< CPU time that all threads of the process took in such passes, by the
                          passes' time: cores */
};

/** Time all layers in order, each copied while the one before computes; routing 0 of bench.
 *  sampled, if given, is of the last pass that copied and computed: what was timed is what is
 *  shown. Medians over bench.repeat passes. */
int numoe_gpu_bench_layers(struct numoe_gpu_model *model, struct numoe_gpu_bench *bench,
                           struct numoe_gpu_bench_stream *result, struct numoe_error *error);

#ifdef __cplusplus
}
#endif

#endif
