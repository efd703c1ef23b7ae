/*
 * Whole layers: experts from the caller's memory, and memory that is given back.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "context.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- from memory ---------------------------------------------------------------------------- */

static int check_layer(const struct numoe_model *model, uint64_t layer, struct numoe_error *error)
{
    if (!model)
        return numoe_error_set(error, -EINVAL, "model", "is NULL");
    if (layer >= model->desc.layers)
        return numoe_error_set(error, -EINVAL, "layer", "%llu of a model of %llu layers",
                               (unsigned long long)layer, (unsigned long long)model->desc.layers);
    return 0;
}

static struct numoe_mxfp4 matrix_at(const struct numoe_mxfp4 *matrix,
                                    const struct numoe_expert_stride *stride, uint64_t expert)
{
    struct numoe_mxfp4 out = *matrix;

    out.codes = matrix->codes ? matrix->codes + expert * stride->codes : NULL;
    out.scales = matrix->scales ? matrix->scales + expert * stride->scales : NULL;
    return out;
}

/* Every second row of a matrix, or its rows from `first` on. */
static struct numoe_mxfp4 rows_of(struct numoe_mxfp4 matrix, uint64_t first, uint64_t step)
{
    if (matrix.codes)
        matrix.codes += first * matrix.code_stride;
    if (matrix.scales)
        matrix.scales += first * matrix.scale_stride;
    matrix.code_stride *= step;
    matrix.scale_stride *= step;
    return matrix;
}

/* First row of gate or of up, and the step to its next, in the matrix of both. */
static uint64_t part_row(enum numoe_gate_up_order order, bool up, uint64_t rows, uint64_t *step)
{
    *step = order == NUMOE_GATE_UP_INTERLEAVED ? 2 : 1;
    if (order == NUMOE_GATE_UP_INTERLEAVED)
        return up;
    return up == (order == NUMOE_GATE_FIRST) ? rows : 0;
}

const float *numoe_floats(const void *from, uint64_t stride, enum numoe_type type, uint64_t count,
                          float *out)
{
    const uint8_t *bytes = from;

    for (uint64_t i = 0; i < count; i++, bytes += stride) {
        uint16_t half;
        uint32_t bits;

        if (type == NUMOE_F32) {
            memcpy(&out[i], bytes, sizeof out[i]);
        } else {
            memcpy(&half, bytes, sizeof half);
            bits = (uint32_t)half << 16;
            memcpy(&out[i], &bits, sizeof out[i]);
        }
    }
    return out;
}

/* Biases of an expert's rows; NULL where there are none. */
static const float *biases(const void *from, uint64_t stride, uint64_t expert, enum numoe_type type,
                           uint64_t count, float *out)
{
    if (!from)
        return NULL;
    return numoe_floats((const uint8_t *)from + expert * stride, type == NUMOE_F32 ? 4 : 2, type,
                        count, out);
}

/* One expert of a layer. room: floats for its biases. */
static struct numoe_expert_weights expert_of(const struct numoe_model_desc *desc,
                                             const struct numoe_layer_weights *w, uint64_t expert,
                                             float *room)
{
    const bool merged = w->gate_up != NUMOE_GATE_UP_APART;
    const uint64_t rows = desc->intermediate;
    struct numoe_expert_weights out = NUMOE_EXPERT_WEIGHTS_INIT;

    out.gate = matrix_at(&w->gate, &w->gate_stride, expert);
    out.down = matrix_at(&w->down, &w->down_stride, expert);
    out.gate_bias = biases(w->gate_bias, w->gate_bias_stride, expert, w->bias_type,
                           merged ? 2 * rows : rows, room);
    out.down_bias = biases(w->down_bias, w->down_bias_stride, expert, w->bias_type, desc->hidden,
                           room + 2 * rows);
    if (merged) {
        const struct numoe_mxfp4 both = out.gate;
        const float *bias = out.gate_bias;
        uint64_t step, first = part_row(w->gate_up, true, rows, &step);

        out.up = rows_of(both, first, step);
        out.up_bias = bias ? bias + first : NULL;
        out.bias_step = step;
        first = part_row(w->gate_up, false, rows, &step);
        out.gate = rows_of(both, first, step);
        out.gate_bias = bias ? bias + first : NULL;
    } else {
        out.up = matrix_at(&w->up, &w->up_stride, expert);
        out.up_bias =
            biases(w->up_bias, w->up_bias_stride, expert, w->bias_type, rows, room + rows);
    }
    return out;
}

int numoe_layer_load_from(struct numoe_model *model, uint64_t layer,
                          const struct numoe_layer_weights *weights, struct numoe_error *error)
{
    struct numoe_layer_weights w = NUMOE_LAYER_WEIGHTS_INIT;
    struct numoe_error why = NUMOE_ERROR_INIT;
    const struct numoe_range *range;
    float *room;
    int rc = check_layer(model, layer, error);

    if (rc)
        return rc;
    if (!weights || weights->size < sizeof weights->size)
        return numoe_error_set(error, -EINVAL, "weights", "is NULL, or its size is not set");
    memcpy(&w, weights, weights->size < sizeof w ? weights->size : sizeof w);
    if (w.gate_up < NUMOE_GATE_UP_APART || w.gate_up > NUMOE_UP_FIRST)
        return numoe_error_set(error, -EINVAL, "gate_up", "order %d is not known", (int)w.gate_up);
    if (w.bias_type != NUMOE_F32 && w.bias_type != NUMOE_BF16)
        return numoe_error_set(error, -EINVAL, "bias_type", "%d is not known", (int)w.bias_type);
    range = &model->plan->range;
    room = malloc((2 * model->desc.intermediate + model->desc.hidden) * sizeof *room);
    if (!room)
        return numoe_error_set(error, -ENOMEM, "layer", "out of memory");
    for (uint64_t e = range->first_expert; !rc && e < range->end_expert; e++) {
        const struct numoe_expert_weights expert = expert_of(&model->desc, &w, e, room);

        rc = numoe_expert_load(model, layer, e, &expert, &why);
        if (rc)
            numoe_error_set(error, rc, why.where, "expert %llu: %s", (unsigned long long)e,
                            why.message);
    }
    free(room);
    return rc;
}

/* ---- unloading ------------------------------------------------------------------------------ */

uint64_t numoe_model_layer_bytes(const struct numoe_model *model, uint64_t layer, uint32_t n,
                                 uint64_t *offset)
{
    const struct model_node *node = &model->nodes[n];
    const uint32_t *start = node->start + layer * model->desc.experts;

    *offset = start[0] * model->shape.bytes;
    return (uint64_t)(start[model->desc.experts] - start[0]) * model->shape.bytes;
}

int numoe_layer_unload(struct numoe_model *model, uint64_t layer, struct numoe_error *error)
{
    int rc = check_layer(model, layer, error);

    if (!rc)
        rc = numoe_context_check_fork(model->context, error);
    if (rc)
        return rc;
    pthread_mutex_lock(&model->context->turn);
    numoe_context_settle(model->context);
    for (uint64_t e = 0; e < model->desc.experts; e++)
        numoe_model_mark(model, layer, e, false, false);
    if (!model->gpu) {
        model->away[layer] = true;
        for (uint32_t n = 0; n < model->plan->node_count; n++) {
            uint64_t offset, bytes = numoe_model_layer_bytes(model, layer, n, &offset);

            numoe_memory_release(model->nodes[n].memory, offset, bytes);
        }
    }
    pthread_mutex_unlock(&model->context->turn);
    return 0;
}

int numoe_layer_return(struct numoe_model *model, uint64_t layer, struct numoe_error *error)
{
    int rc = 0;

    if (!model->away[layer])
        return 0;
    /* several experts of the layer may be loaded at once */
    pthread_mutex_lock(&model->context->turn);
    if (model->away[layer])
        rc = numoe_model_populate(model, layer, NULL, error);
    model->away[layer] = rc != 0;
    pthread_mutex_unlock(&model->context->turn);
    return rc;
}
