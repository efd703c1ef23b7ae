/* gpu_model.h - a model on a device. SPDX-License-Identifier: Apache-2.0 */
#ifndef NUMOE_GPU_MODEL_H
#define NUMOE_GPU_MODEL_H

#include "gpu_stream.h"

struct gpu_nccl;

/* Where the parts of a pass lie in one block of device memory. */
struct gpu_parts {
    uint64_t x, ids, routing, out, sum, work, bytes;
};

/* Tokens that are computed together, weights crossing the link once for all of them. */
struct gpu_pass {
    uint64_t layer, first, tokens;
    uint64_t chunk;  /* tokens of a launch */
    uint64_t staged; /* tokens that pass through a stage */
    uint64_t sent;   /* tokens whose outputs are queued on their way to the host */
    bool queued;     /* all that is computed is */
    struct gpu_parts parts;
};

enum { GPU_STAGES = 4 };

struct numoe_gpu_model {
    struct gpu_several *several; /* on several devices: nothing else here is used then but gpu */
    struct numoe_gpu *gpu;
    struct numoe_gpu_source source;
    struct gpu_pinned pinned;
    const struct gpu_pinned *pins; /* what is pinned: this model's, or of several parts together */
    struct gpu_ring ring;          /* gpu NULL: not needed */
    struct gpu_stream stream;
    bool warm; /* the profile's experts have been copied, or there is none */
    uint64_t keep_free_bytes, ring_bytes;
    uint8_t *device; /* parts of a pass */
    uint64_t device_bytes;
    uint8_t *host; /* pinned: stages for inputs and outputs on their way */
    uint64_t stage_bytes;
    uint64_t stage_least, stage_most; /* of outputs, that are worth a stage; of a stage at most */
    void *stage_free[GPU_STAGES];     /* events: the stage's last copy is past */
    void *results;                    /* stream of outputs to the host */
    void *computed;                   /* event: the pass is */
    void *began, *ended;              /* timers of the pass */
    double took_ms;
    uint64_t began_ns; /* when `began` was queued */
    uint32_t *need;    /* [experts] of the pass */
    uint64_t experts;  /* of all layers, that there are */
    bool running;      /* between start and finish */
    struct gpu_pass pass;
    uint64_t ring_checked, ring_placed;
    uint64_t beside_bytes;   /* of a part: device memory that several devices take beside it */
    struct gpu_relay *relay; /* of a part of a model whose experts are whole on each device */
    uint32_t index;          /* of the part */
};

/* Pin a source's arenas. A refusal is kept and logged, and no error. */
int gpu_model_pin(struct gpu_pinned *pinned, const struct numoe_gpu_source *source,
                  const struct numoe_gpu_model_options *options, struct numoe_error *error);

/* What models may take of a device's memory, and what is left free of it, of one of so many
 * sharers.
 */
int gpu_model_budget(struct numoe_gpu *gpu, const struct numoe_gpu_model_options *options,
                     uint32_t sharers, uint64_t *budget, uint64_t *keep_free,
                     struct numoe_error *error);

/* A model on one device. pins: what is pinned already, and stays longer; NULL: the model pins.
 * sharers: so many models are still to be made on the device, this one included. */
int gpu_model_make(struct numoe_gpu *gpu, const struct numoe_gpu_source *source,
                   const struct numoe_gpu_model_options *options, const struct gpu_pinned *pins,
                   uint32_t sharers, struct numoe_gpu_model **model, struct numoe_error *error);

/*
 * The steps of a call, for one device or for several: choose the pass's tokens, at most so many;
 * begin, with copies of experts; queue its inputs, x of tokens [begin, end) alone; queue the
 * computation, and with outputs the first of them; wait for the event of the outputs of its tokens
 * [at, at + *count), which are then at *rows until more are queued; queue more outputs; and end, as
 * failed with rc. A step that fails before gpu_pass_compute is through leaves nothing running.
 */
int gpu_pass_plan(struct numoe_gpu_model *model, uint64_t layer, const struct numoe_gpu_call *call,
                  uint64_t first, uint64_t most, struct numoe_error *error);
int gpu_pass_begin(struct numoe_gpu_model *model, const struct numoe_gpu_call *call,
                   struct numoe_error *error);
int gpu_pass_inputs(struct numoe_gpu_model *model, const struct numoe_gpu_call *call,
                    uint64_t begin, uint64_t end, struct numoe_error *error);
int gpu_pass_compute(struct numoe_gpu_model *model, const struct numoe_gpu_call *call, bool outputs,
                     struct numoe_error *error);
void *gpu_pass_rows(const struct numoe_gpu_model *model, uint64_t at, uint64_t *count,
                    const uint8_t **rows);
int gpu_pass_more(struct numoe_gpu_model *model, const struct numoe_gpu_call *call,
                  struct numoe_error *error);
/* Of the steps: outputs from token `at` on, none being on its way; and where x of a token is on the
 * device. */
int gpu_pass_outputs(struct numoe_gpu_model *model, const struct numoe_gpu_call *call, uint64_t at,
                     struct numoe_error *error);
uint8_t *gpu_pass_x(const struct numoe_gpu_model *model, const struct numoe_gpu_call *call,
                    uint64_t token, uint64_t *row_bytes);
/*
 * Until an event of each device has happened; NULL: none of that one. On all of them copies that
 * wait for staging go on meanwhile: of the next layer, or of this one where the call begins. nccl:
 * NULL, or what may be behind the events: its kernels wait for each other, so that to wait for one
 * device is to wait for ever if another is lost; then all are asked in turn, and so is NCCL.
 */
int gpu_pass_wait(struct numoe_gpu_model *const *models, void *const *events, uint32_t count,
                  const struct gpu_nccl *nccl, const char *what, struct numoe_error *error);
void gpu_pass_end(struct numoe_gpu_model *model, uint64_t tokens, int rc);
/* -EINVAL: no call was begun, or, with queued, none whose computation is queued; without, it is. */
int gpu_pass_check(struct numoe_gpu_model *model, bool queued, struct numoe_error *error);

/* Write the outputs of the pass's tokens [at, at + count), as they came from `parts` devices. sums:
 * they are fp32, to be added and rounded to the call's type; else there is one part, of that type.
 */
void gpu_take_outputs(const struct numoe_gpu_model *model, const struct numoe_gpu_call *call,
                      uint64_t at, uint64_t count, const uint8_t *const *rows, uint32_t parts,
                      bool sums);

/* The device's view of a call on one part of a layer. */
void gpu_model_ffn(const struct numoe_gpu_model *model, const struct gpu_part *part,
                   struct numoe_cuda_ffn *ffn);

/* Of the profile, what is not yet on the device. Failing costs time later and is no error. */
void gpu_model_warm(struct numoe_gpu_model *model);

/* need: 1 for the hottest experts of a layer, those that stay among them, then any; else 0. */
void gpu_model_hottest(struct numoe_gpu_model *model, uint64_t layer, uint64_t most,
                       uint32_t *need);

/* Most experts of a layer were hit: so will those of the next be. */
bool gpu_model_most(const struct numoe_gpu_model *model, uint64_t layer, const uint32_t *need);

#endif
