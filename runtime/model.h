/*
 * model.h - what the runtime's own parts know of a context and a model.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_MODEL_H
#define NUMOE_MODEL_H

#include "numoe.h"
#include "numoe_kernels.h"
#include "numoe_pool.h"
#include "numoe_topo.h"

/*
 * What placement needs to know of a model, in any format, with kernels or without; sizes checked.
 * Returns 0, -EINVAL or -EOVERFLOW with error filled.
 */
int numoe_model_expert_shape(const struct numoe_model_desc *desc, struct numoe_expert_shape *expert,
                             struct numoe_error *error);

struct numoe_pool *numoe_context_pool(struct numoe *context);
uint64_t numoe_context_spin_ns(const struct numoe *context);
const struct numoe_machine *numoe_context_machine(const struct numoe *context);
const struct numoe_log *numoe_context_log(const struct numoe *context);
/* The plan that workers are pinned by; NULL when they are not: its machine is another one. */
const struct numoe_plan *numoe_context_workers(const struct numoe *context);

/* The placement of this model; node_count of it is how many runs an expert is stored in. */
const struct numoe_plan *numoe_model_plan(const struct numoe_model *model);
struct numoe *numoe_model_context(struct numoe_model *model);

/*
 * Pack the run of slices that plan node `plan_node` holds of an expert into its place. The place
 * is resident already (enum numoe_residence). Any thread; different runs at once.
 * Returns as numoe_pack_slices.
 */
int numoe_model_store(struct numoe_model *model, uint64_t layer, uint64_t expert,
                      uint32_t plan_node, const struct numoe_expert_source *source,
                      struct numoe_pack_report *report);

/*
 * Pack slices [first, first + count) of an expert, of the model's range, wherever they lie: finer
 * than a run, so that the workers of one node share an expert.
 */
int numoe_model_store_range(struct numoe_model *model, uint64_t layer, uint64_t expert,
                            uint64_t first, uint64_t count,
                            const struct numoe_expert_source *source,
                            struct numoe_pack_report *report);

/* Whether an expert is of the model's range; others are held elsewhere. */
bool numoe_model_holds(const struct numoe_model *model, uint64_t expert);

/* Store b2 (desc.hidden floats, natural order), where the expert's slice 0 is held. Any thread. */
void numoe_model_store_down_bias(struct numoe_model *model, uint64_t layer, uint64_t expert,
                                 const float *down_bias);

/* Declare an expert present (all runs and its b2 stored) or missing. extreme_scales: from the
 * pack reports. Not while a call on the layer runs. */
void numoe_model_mark(struct numoe_model *model, uint64_t layer, uint64_t expert, bool present,
                      bool extreme_scales);

/* Get the memory of a layer that was unloaded. Before anything is stored there. */
int numoe_layer_return(struct numoe_model *model, uint64_t layer, struct numoe_error *error);

/* `count` values of a type, stride bytes apart and anyhow aligned, as floats. @return out */
const float *numoe_floats(const void *from, uint64_t stride, enum numoe_type type, uint64_t count,
                          float *out);

/* Told by the calling thread how far a long job is, between two of its items: bytes done of all.
 * Nonzero ends the job, with that code. */
struct numoe_watch {
    int (*look)(void *user, uint64_t done, uint64_t total);
    void *user;
};

int numoe_look(const struct numoe_watch *watch, uint64_t done, uint64_t total);

/* When the memory of experts is made resident. */
enum numoe_residence {
    NUMOE_RESIDENT,      /* when the model is created, which a GPU needs: it pins it then */
    NUMOE_RESIDENT_LATER /* before it is first written to, by who does that */
};

/* numoe_model_create, watched while memory is made resident. watch may be NULL. */
int numoe_model_create_watched(struct numoe *context, const struct numoe_model_desc *desc,
                               enum numoe_residence residence, const struct numoe_watch *watch,
                               struct numoe_model **model, struct numoe_error *error);

/* The memory of a plan node, from whose beginning on slices lie; NULL if it has none. */
struct numoe_memory *numoe_model_memory(const struct numoe_model *model, uint32_t plan_node);

/* Keep checksums from now on, of all that is present. watch may be NULL. */
int numoe_model_keep_sums(struct numoe_model *model, const struct numoe_watch *watch,
                          struct numoe_error *error);

/* What a loader knows and numoe_model_info reports. */
struct numoe_model_origin {
    const char *family, *io_path;
    uint64_t checkpoint_bytes;
    double seconds, resident_seconds, placing_seconds, meanwhile_seconds;
    uint32_t read_depth, read_block_bytes;
};

void numoe_model_set_origin(struct numoe_model *model, const struct numoe_model_origin *origin);

/* The slices [first, first + count) of one expert that a plan node has, in a row at `slices`; NULL
 * if there are none. */
struct model_part {
    const uint8_t *slices;
    uint64_t first, count;
};

/* What each plan node has of a packed expert. */
void numoe_model_parts(const struct numoe_model *model, uint64_t layer, uint64_t expert,
                       struct model_part *parts);

/* The same of plan node n alone. *count may be 0. */
const void *numoe_model_run(const struct numoe_model *model, uint64_t layer, uint64_t expert,
                            uint32_t plan_node, uint64_t *first, uint64_t *count);

/* b2 in lane order; or NULL, also where another rank has slice 0. */
const float *numoe_model_down_bias(const struct numoe_model *model, uint64_t layer,
                                   uint64_t expert);

/* The GPU of a context, or NULL. */
struct numoe_gpu;
struct numoe_gpu *numoe_context_gpu(const struct numoe *context);
/* Why a context has none. */
const char *numoe_context_gpu_note(const struct numoe *context);

const struct numoe_slice_shape *numoe_model_shape(const struct numoe_model *model);
const struct numoe_kernels *numoe_model_kernels(const struct numoe_model *model);

#endif
