/*
 * Prefill by length of the prompt: how fast it is when nothing is done about the link, and what
 * each lever adds to those before it.
 *
 * The start is what engines do that copy a layer's experts to a GPU, wait, and compute, with passes
 * of 4096 tokens. On the box of the public report (two A10s at 25 GB/s, two EPYC 7H12)
 * that is 600 tokens/s, where 650 were reported.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "predict_box.h"
#include "topo_print.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

static const uint32_t usual_prompts[] = {4096, 8192, 16384, 32768, 65536};
enum { USUAL_PROMPTS = sizeof usual_prompts / sizeof usual_prompts[0] };

/* Shorter ones are decode. */
enum { SHORTEST_PROMPT = 512 };
/* Tokens of a pass: of engines by default, and of this one at most and at least where a device has
 * little room (gpu/gpu_forward.c). */
static const uint32_t short_pass = 4096, long_pass = 65536, least_pass = 256;
/*
 * What copies and computing at once take, over the longer of the two, and what sharing takes over
 * the time in which both sides would end together: a little more than was measured on an H200
 * (docs/measurements.md), up to 1.02 and, from 4 to 4096 tokens, 1.03 to 1.07.
 */
static const double overlap_cost = 1.02, sharing_cost = 1.08;

static const struct {
    const char *name, *column;
} levers[NUMOE_LEVERS] = {
    [NUMOE_LEVER_NONE] = {"none", "serial"},
    [NUMOE_LEVER_OVERLAP] = {"overlap", "overlap"},
    [NUMOE_LEVER_HIT] = {"hit-experts", "hit only"},
    [NUMOE_LEVER_PASS] = {"tokens-a-pass", "one pass"},
    [NUMOE_LEVER_LINKS] = {"links", "all links"},
    [NUMOE_LEVER_CACHE] = {"cache", "cache"},
    [NUMOE_LEVER_CPU] = {"cpu-share", "CPUs too"},
};

const char *numoe_lever_name(enum numoe_lever lever)
{
    return (unsigned)lever < NUMOE_LEVERS ? levers[lever].name : "?";
}

/* One pass of so many tokens with a lever and those before it. false: not possible. */
static bool pass(const struct box *box, enum numoe_lever lever, uint32_t tokens,
                 struct numoe_prediction_cell *cell)
{
    static const enum numoe_way ways[NUMOE_LEVERS] = {
        [NUMOE_LEVER_NONE] = NUMOE_WAY_STREAM_ONE, [NUMOE_LEVER_OVERLAP] = NUMOE_WAY_STREAM_ONE,
        [NUMOE_LEVER_HIT] = NUMOE_WAY_STREAM_ONE,  [NUMOE_LEVER_PASS] = NUMOE_WAY_STREAM_ONE,
        [NUMOE_LEVER_LINKS] = NUMOE_WAY_STREAM,    [NUMOE_LEVER_CACHE] = NUMOE_WAY_CACHE,
        [NUMOE_LEVER_CPU] = NUMOE_WAY_SHARED};
    struct box as = *box;

    as.copies_all = lever < NUMOE_LEVER_HIT;
    predict_cell(&as, ways[lever], tokens, cell);
    if (!cell->possible)
        return false;
    if (lever == NUMOE_LEVER_NONE)
        cell->layer_ms =
            fmax(cell->parts_ms[NUMOE_BOUND_LINK], cell->parts_ms[NUMOE_BOUND_HOST_MEMORY]) +
            fmax(cell->parts_ms[NUMOE_BOUND_DEVICE], cell->parts_ms[NUMOE_BOUND_DEVICE_MEMORY]) +
            cell->parts_ms[NUMOE_BOUND_LAUNCH];
    else if (lever < NUMOE_LEVER_CPU)
        cell->layer_ms *= overlap_cost;
    else if (cell->gpu_part > 0 && cell->gpu_part < 1)
        cell->layer_ms *= sharing_cost;
    cell->pass_ms = cell->layer_ms * box->layers;
    return true;
}

/* Tokens a second of a prompt; 0: not possible. Where devices have no room for as long a pass as
 * may be, passes are shorter. */
static double prompt_with(const struct box *box, enum numoe_lever lever, uint32_t tokens,
                          struct numoe_prediction_cell *cell)
{
    const bool engines = lever < NUMOE_LEVER_PASS;
    uint32_t passes = (tokens - 1) / (engines ? short_pass : long_pass) + 1;
    double best = 0;

    for (;; passes *= 2) {
        const uint32_t each = (tokens - 1) / passes + 1;
        struct numoe_prediction_cell now;

        if (pass(box, lever, each, &now) && tokens / (passes * now.pass_ms / 1e3) > best) {
            best = tokens / (passes * now.pass_ms / 1e3);
            *cell = now;
        }
        /* CPUs can alone what has no room */
        if (engines || now.gpu_part > 0 || each < 2 * least_pass)
            return best;
    }
}

static void prompt(const struct box *box, uint32_t tokens, struct numoe_prediction_prefill *out)
{
    double best = 0;

    *out = (struct numoe_prediction_prefill){.tokens = tokens};
    for (enum numoe_lever l = NUMOE_LEVER_NONE; l < NUMOE_LEVERS; l++) {
        struct numoe_prediction_cell cell = {.tokens = 0};
        const double before = l ? out->tokens_per_s[l - 1] : 0;
        const double now = prompt_with(box, l, tokens, &cell);

        /* a lever that costs more than it brings is left alone */
        out->tokens_per_s[l] = now > before ? now : before;
        if (now > before || !l)
            out->bound = cell.bound;
        if (before > 0 && now / before > best) {
            best = now / before;
            out->lever = l;
        }
    }
    if (best <= 1)
        out->lever = NUMOE_LEVER_NONE;
}

int predict_prefill(const struct box *box, const uint32_t *tokens, uint32_t count,
                    struct numoe_prediction *out)
{
    if (!box->gpu_count)
        return 0;
    if (!tokens) {
        tokens = usual_prompts;
        count = USUAL_PROMPTS;
    }
    out->prefill = calloc((size_t)count + 1, sizeof *out->prefill);
    if (!out->prefill)
        return -ENOMEM;
    for (uint32_t i = 0; i < count; i++)
        if (tokens[i] >= SHORTEST_PROMPT)
            prompt(box, tokens[i], &out->prefill[out->prefill_count++]);
    return 0;
}

/* ---- as text and as JSON --------------------------------------------------------------------- */

static double gain(const struct numoe_prediction_prefill *p, enum numoe_lever lever)
{
    return lever && p->tokens_per_s[lever - 1] > 0
               ? p->tokens_per_s[lever] / p->tokens_per_s[lever - 1]
               : 1;
}

void predict_prefill_print(const struct numoe_prediction *prediction, FILE *out)
{
    if (!prediction->prefill_count)
        return;
    fputs("\nprefill, tokens/s by length of the prompt, each column with all before it:\n", out);
    fprintf(out, "%8s", "prompt");
    for (enum numoe_lever l = 0; l < NUMOE_LEVERS; l++)
        fprintf(out, " %9s", levers[l].column);
    fputs("  most by\n", out);
    for (uint32_t i = 0; i < prediction->prefill_count; i++) {
        const struct numoe_prediction_prefill *p = &prediction->prefill[i];

        fprintf(out, "%8u", p->tokens);
        for (enum numoe_lever l = 0; l < NUMOE_LEVERS; l++)
            if (p->tokens_per_s[l] > 0)
                fprintf(out, " %9.1f", p->tokens_per_s[l]);
            else
                fprintf(out, " %9s", "-");
        if (p->lever)
            fprintf(out, "  %s, %.2f x; then", levers[p->lever].column, gain(p, p->lever));
        else
            fputs("  nothing;", out);
        fprintf(out, " set by %s\n", numoe_bound_name(p->bound));
    }
    fprintf(
        out,
        "  serial: one GPU, each layer copied whole, then computed, %u tokens a pass; one pass: "
        "up to %u\n  tokens, layer by layer. Overlap at %.2f x the longer side, sharing at %.2f "
        "x the ideal, as measured\n",
        short_pass, long_pass, overlap_cost, sharing_cost);
}

json_t *predict_prefill_json(const struct numoe_prediction *prediction)
{
    json_t *array = json_array();

    for (uint32_t i = 0; i < prediction->prefill_count; i++) {
        const struct numoe_prediction_prefill *p = &prediction->prefill[i];
        json_t *object = json_object(), *rates = json_object();

        for (enum numoe_lever l = 0; l < NUMOE_LEVERS; l++)
            topo_json_set(&rates, numoe_lever_name(l), json_real(p->tokens_per_s[l]));
        topo_json_set(&object, "tokens", json_integer(p->tokens));
        topo_json_set(&object, "tokens_per_s", rates);
        topo_json_set(&object, "lever", json_string(numoe_lever_name(p->lever)));
        topo_json_set(&object, "gain", json_real(gain(p, p->lever)));
        topo_json_set(&object, "bound", json_string(numoe_bound_name(p->bound)));
        topo_json_append(&array, object);
    }
    return array;
}
