/* What changes would give. SPDX-License-Identifier: Apache-2.0 */
#include "predict_box.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* A gain below this is not worth a line. */
static const double least_gain = 1.02;
/* Prefill is compared at the largest size of the list up to this. */
enum { PREFILL_TOKENS = 8192, MORE_TOKENS = 4 };

/* The fastest way. */
static struct numoe_prediction_cell best(const struct box *box, uint32_t tokens)
{
    struct numoe_prediction_cell top, cell;

    predict_cell(box, NUMOE_WAY_CPU, tokens, &top);
    for (enum numoe_way way = NUMOE_WAY_STREAM_ONE; way < NUMOE_WAYS && box->gpu_count; way++) {
        predict_cell(box, way, tokens, &cell);
        if (cell.possible && cell.tokens_per_s > top.tokens_per_s)
            top = cell;
    }
    return top;
}

struct question {
    const struct box *before;
    struct numoe_prediction *out;
};

static void ask(const struct question *q, const struct box *after, uint32_t tokens,
                uint32_t tokens_after, const char *format, ...) NUMOE_PRINTF(5, 6);

static void ask(const struct question *q, const struct box *after, uint32_t tokens,
                uint32_t tokens_after, const char *format, ...)
{
    struct numoe_prediction_what_if what = {.tokens = tokens, .tokens_after = tokens_after};
    struct numoe_prediction *out = q->out;
    struct numoe_prediction_cell was = best(q->before, tokens);
    va_list args;
    uint32_t at;

    what.way = was.way;
    what.before = was.tokens_per_s;
    what.after = best(after, tokens_after).tokens_per_s;
    what.gain = what.after / what.before;
    if (!(what.gain >= least_gain))
        return;
    va_start(args, format);
    vsnprintf(what.what, sizeof what.what, format, args);
    va_end(args);
    for (at = 0; at < out->what_if_count && out->what_ifs[at].gain >= what.gain; at++)
        ;
    if (at == NUMOE_PREDICT_WHAT_IFS)
        return;
    if (out->what_if_count < NUMOE_PREDICT_WHAT_IFS)
        out->what_if_count++;
    for (uint32_t i = out->what_if_count - 1; i > at; i--)
        out->what_ifs[i] = out->what_ifs[i - 1];
    out->what_ifs[at] = what;
}

static void with_more_memory(const struct question *q, uint32_t decode, uint32_t prefill)
{
    struct box box = *q->before;

    for (uint32_t i = 0; i < box.gpu_count; i++)
        box.gpus[i].memory_bytes *= 2;
    ask(q, &box, decode, decode, "twice the memory on GPUs, for experts that stay there");
    if (prefill != decode)
        ask(q, &box, prefill, prefill, "twice the memory on GPUs, for experts that stay there");
}

static void with_a_gpu(const struct question *q, uint32_t decode, uint32_t prefill)
{
    struct box box = *q->before;
    const char *words = box.gpu_count ? "one more GPU like the first, on a link of its own"
                                      : "a GPU like an A10 (24 GB) on a 25 GB/s link";

    if (box.gpu_count == BOX_MOST_GPUS)
        return;
    box.gpus[box.gpu_count] =
        box.gpu_count
            ? box.gpus[0]
            : (struct box_gpu){25e9, 24e9, 125e12, predict_guess_multiplies("a10"), 600e9};
    box.gpu_count++;
    ask(q, &box, prefill, prefill, "%s", words);
    if (prefill != decode)
        ask(q, &box, decode, decode, "%s", words);
}

void predict_what_ifs(const struct box *before, struct numoe_prediction *prediction)
{
    struct question q = {before, prediction};
    uint32_t decode = UINT32_MAX, prefill = 0;
    struct box box;

    for (uint32_t i = 0; i < prediction->cell_count; i++) {
        uint32_t tokens = prediction->cells[i].tokens;

        decode = tokens < decode ? tokens : decode;
        if (tokens <= PREFILL_TOKENS && tokens > prefill)
            prefill = tokens;
    }
    if (!prediction->cell_count)
        return;
    prefill = prefill ? prefill : decode;

    box = *before;
    box.read *= 1.5;
    box.all_read *= 1.5;
    ask(&q, &box, decode, decode, "1.5 times the memory bandwidth (%.0f GB/s in all)",
        box.all_read / 1e9);
    box = *before;
    box.read = box.all_read;
    ask(&q, &box, decode, decode,
        "room on every node for its share by bandwidth: more RAM on nodes that are full");
    box = *before;
    box.core_read *= 2;
    box.ops *= 2;
    ask(&q, &box, prefill, prefill, "twice the cores");
    if (prefill != decode)
        ask(&q, &box, decode, decode, "twice the cores");
    box = *before;
    for (uint32_t i = 0; i < box.gpu_count; i++)
        box.gpus[i].link *= 2;
    if (box.gpu_count)
        ask(&q, &box, prefill, prefill, "links twice as fast");
    with_a_gpu(&q, decode, prefill);
    if (before->gpu_count)
        with_more_memory(&q, decode, prefill);
    if (prefill <= UINT32_MAX / MORE_TOKENS && prefill > 16)
        ask(&q, before, prefill, prefill * MORE_TOKENS,
            "%u tokens a pass, each layer over all of them before the next", prefill * MORE_TOKENS);
}
