/* Predictions as text and as JSON. SPDX-License-Identifier: Apache-2.0 */
#include "predict_box.h"
#include "topo_print.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Sizes up to this are decode: few tokens from many requests. Streaming all that they hit would
 * be listed only to say that it is slow. */
enum { DECODE_TOKENS = 16 };

static void print_gpus(const struct numoe_prediction *prediction, uint32_t count, FILE *out)
{
    for (uint32_t i = 0; i < count; i++) {
        const struct numoe_predict_gpu *gpu = &prediction->gpus[i];

        fprintf(out, "%s%s", i ? ", " : "", gpu->name);
        if (gpu->node != NUMOE_NONE)
            fprintf(out, " at node %u", gpu->node);
        fprintf(out, " (%.4g GB/s, %.4g GB)", gpu->link_gbs, (double)gpu->memory_bytes / 1e9);
    }
}

static void print_heading(const struct numoe_prediction *prediction, enum numoe_way way, FILE *out)
{
    switch (way) {
    case NUMOE_WAY_CPU:
        fputs("\npredicted, on the CPUs:\n", out);
        break;
    case NUMOE_WAY_STREAM_ONE:
        fputs("\npredicted, all weights copied each pass to one GPU, ", out);
        print_gpus(prediction, 1, out);
        fputs(":\n", out);
        break;
    case NUMOE_WAY_STREAM:
        fprintf(out, "\npredicted, each of %u GPUs copying its part, ", prediction->gpu_count);
        print_gpus(prediction, prediction->gpu_count, out);
        fputs(":\n", out);
        break;
    case NUMOE_WAY_CACHE:
        fputs("\npredicted, the same with device memory keeping the experts that fit:\n", out);
        break;
    case NUMOE_WAY_SHARED:
        fprintf(out, "\npredicted, CPUs and GPU%s sharing each layer:\n",
                prediction->gpu_count > 1 ? "s" : "");
        break;
    case NUMOE_WAYS:
        break;
    }
    fprintf(out, "%8s %7s %11s %10s %10s  %s\n", "tokens", "experts", "ms a layer", "s a pass",
            "tokens/s", "set by");
}

void numoe_prediction_print(const struct numoe_prediction *prediction, FILE *out)
{
    enum numoe_way way = NUMOE_WAYS;
    bool only_decode = true;

    for (uint32_t i = 0; i < prediction->cell_count; i++)
        only_decode &= prediction->cells[i].tokens <= DECODE_TOKENS;
    if (*prediction->without_kernel)
        fprintf(out,
                "\nno kernel computes %s yet: what follows is predicted from its bytes, with the "
                "arithmetic of MXFP4\n",
                prediction->without_kernel);
    for (uint32_t i = 0; i < prediction->cell_count; i++) {
        const struct numoe_prediction_cell *cell = &prediction->cells[i];

        if (cell->tokens <= DECODE_TOKENS && !only_decode && cell->way != NUMOE_WAY_CPU &&
            cell->way != NUMOE_WAY_SHARED)
            continue;
        if (cell->way != way)
            print_heading(prediction, cell->way, out);
        way = cell->way;
        if (cell->possible)
            fprintf(out, "%8u %7.1f %11.3f %10.3f %10.1f  %s\n", cell->tokens, cell->experts_hit,
                    cell->layer_ms, cell->pass_ms / 1e3, cell->tokens_per_s, cell->why);
        else
            fprintf(out, "%8u %7.1f %11s %10s %10s  %s\n", cell->tokens, cell->experts_hit, "-",
                    "-", "-", cell->why);
    }
    predict_prefill_print(prediction, out);
    predict_passing_print(prediction, out);
    predict_memory_print(prediction, out);
    fputs("\nfrom:\n", out);
    for (uint32_t i = 0; i < prediction->figure_count; i++) {
        const struct numoe_prediction_figure *f = &prediction->figures[i];

        fprintf(out, "  %s %.4g %s: %s\n", f->name, f->value, f->unit, f->source);
    }
    if (prediction->what_if_count)
        fputs("\nwhat would help, the fastest way before and after:\n", out);
    for (uint32_t i = 0; i < prediction->what_if_count; i++) {
        const struct numoe_prediction_what_if *w = &prediction->what_ifs[i];

        fprintf(out, "  %.2f x  %u token%s: %.*f to %.*f tokens/s: %s\n", w->gain, w->tokens,
                w->tokens > 1 ? "s" : "", w->before < 100, w->before, w->after < 100, w->after,
                w->what);
    }
    for (uint32_t i = 0; i < prediction->note_count; i++)
        fprintf(out, "note: %s\n", prediction->notes[i]);
}

static json_t *json_cell(const struct numoe_prediction_cell *cell)
{
    json_t *object = json_object(), *parts = json_object();

    topo_json_set(&object, "way", json_string(numoe_way_name(cell->way)));
    topo_json_set(&object, "tokens", json_integer(cell->tokens));
    topo_json_set(&object, "possible", json_boolean(cell->possible));
    topo_json_set(&object, "experts_hit", json_real(cell->experts_hit));
    topo_json_set(&object, "layer_ms", json_real(cell->layer_ms));
    topo_json_set(&object, "pass_ms", json_real(cell->pass_ms));
    topo_json_set(&object, "tokens_per_s", json_real(cell->tokens_per_s));
    topo_json_set(&object, "bound",
                  cell->possible ? json_string(numoe_bound_name(cell->bound)) : json_null());
    topo_json_set(&object, "why", topo_json_string(cell->why));
    for (enum numoe_bound b = 0; b < NUMOE_BOUNDS; b++)
        topo_json_set(&parts, numoe_bound_name(b), json_real(cell->parts_ms[b]));
    topo_json_set(&object, "parts_ms", parts);
    topo_json_set(&object, "weight_bytes", topo_json_number(cell->weight_bytes));
    topo_json_set(&object, "reduction_bytes", topo_json_number(cell->reduction_bytes));
    topo_json_set(&object, "passes", topo_json_number(cell->passes));
    topo_json_set(&object, "gpus", json_integer(cell->gpus));
    topo_json_set(&object, "gpu_part", json_real(cell->gpu_part));
    topo_json_set(&object, "cached_part", json_real(cell->cached_part));
    return object;
}

static json_t *json_figure(const struct numoe_prediction_figure *figure)
{
    json_t *object = json_object();

    topo_json_set(&object, "name", json_string(figure->name));
    topo_json_set(&object, "value", json_real(figure->value));
    topo_json_set(&object, "unit", json_string(figure->unit));
    topo_json_set(&object, "assumed", json_boolean(figure->assumed));
    topo_json_set(&object, "source", topo_json_string(figure->source));
    return object;
}

static json_t *json_gpu(const struct numoe_predict_gpu *gpu)
{
    json_t *object = json_object();

    topo_json_set(&object, "name", topo_json_string(gpu->name));
    topo_json_set(&object, "node", topo_json_index(gpu->node));
    topo_json_set(&object, "link_gbs", json_real(gpu->link_gbs));
    topo_json_set(&object, "memory_bytes", topo_json_number(gpu->memory_bytes));
    topo_json_set(&object, "tflops", json_real(gpu->tflops));
    topo_json_set(&object, "memory_gbs", json_real(gpu->memory_gbs));
    return object;
}

static json_t *json_what_if(const struct numoe_prediction_what_if *what)
{
    json_t *object = json_object();

    topo_json_set(&object, "what", topo_json_string(what->what));
    topo_json_set(&object, "way", json_string(numoe_way_name(what->way)));
    topo_json_set(&object, "tokens", json_integer(what->tokens));
    topo_json_set(&object, "tokens_after", json_integer(what->tokens_after));
    topo_json_set(&object, "before", json_real(what->before));
    topo_json_set(&object, "after", json_real(what->after));
    topo_json_set(&object, "gain", json_real(what->gain));
    return object;
}

int numoe_prediction_print_json(const struct numoe_plan *plan,
                                const struct numoe_prediction *prediction, FILE *out)
{
    json_t *root = plan_json(plan), *object = json_object();
    json_t *cells = json_array(), *figures = json_array();
    json_t *gpus = json_array(), *what_ifs = json_array();

    for (uint32_t i = 0; i < prediction->cell_count; i++)
        topo_json_append(&cells, json_cell(&prediction->cells[i]));
    for (uint32_t i = 0; i < prediction->figure_count; i++)
        topo_json_append(&figures, json_figure(&prediction->figures[i]));
    for (uint32_t i = 0; i < prediction->gpu_count; i++)
        topo_json_append(&gpus, json_gpu(&prediction->gpus[i]));
    for (uint32_t i = 0; i < prediction->what_if_count; i++)
        topo_json_append(&what_ifs, json_what_if(&prediction->what_ifs[i]));
    topo_json_set(&object, "without_kernel",
                  *prediction->without_kernel ? topo_json_string(prediction->without_kernel)
                                              : json_null());
    topo_json_set(&object, "cells", cells);
    topo_json_set(&object, "prefill", predict_prefill_json(prediction));
    topo_json_set(&object, "passing", predict_passing_json(prediction));
    topo_json_set(&object, "nodes", predict_memory_json(prediction));
    topo_json_set(&object, "nodes_tokens", json_integer(prediction->memory_tokens));
    topo_json_set(&object, "figures", figures);
    topo_json_set(&object, "gpus", gpus);
    topo_json_set(&object, "what_ifs", what_ifs);
    topo_json_set(&object, "notes", topo_json_notes(prediction->notes, prediction->note_count));
    topo_json_set(&root, "predicted", object);
    return topo_json_write(root, out);
}
