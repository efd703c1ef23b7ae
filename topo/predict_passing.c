/*
 * Whole experts on each of several GPUs, for engines that divide their tokens: what a layer takes
 * over each link alone, what it takes when the GPUs pass on what each has pulled, and what copies
 * between them have to carry for that (docs/architecture.md, Whole experts on several GPUs).
 *
 * With links of h_i bytes a second, H in all, a layer of W bytes takes the slowest link W / h.
 * Passed on, each link carries its part of W in W / H, and GPU i gets the other W (H - h_i) / H
 * from the others meanwhile: at p bytes a second that is no longer if p >= H - h_i, and still pays
 * if p > h (H - h_i) / H.
 *
 * Parts and tokens. GPUs that divide the experts' parts exchange x in bf16 and sums in fp32, 6
 * bytes of each token and column; those that divide tokens exchange weights, W. Each exchanges the
 * same fraction of these, so W / 6 columns tokens a pass are even.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "predict_box.h"
#include "topo_print.h"

#include <math.h>

/* x in bf16 and sums in fp32. */
static const double exchanged_bytes = 2 + 4;

void predict_passing(const struct box *box, struct numoe_prediction_passing *out)
{
    const double layer = box->experts * box->expert_bytes;
    double all = 0, slowest = INFINITY;
    bool fits = true; /* all comes once, however */

    *out = (struct numoe_prediction_passing){0};
    for (uint32_t i = 0; i < box->gpu_count; i++) {
        all += box->gpus[i].link;
        slowest = fmin(slowest, box->gpus[i].link);
        fits &= box->gpus[i].memory_bytes >= layer * box->layers;
    }
    if (box->gpu_count < 2 || fits)
        return;
    out->alone_ms = layer / slowest * 1e3;
    out->passed_ms = layer / all * 1e3;
    out->least_gbs = slowest * (all - slowest) / all / 1e9;
    out->most_gbs = (all - slowest) / 1e9;
    out->tokens = layer / (exchanged_bytes * box->hidden);
}

void predict_passing_print(const struct numoe_prediction *prediction, FILE *out)
{
    const struct numoe_prediction_passing *p = &prediction->passing;

    if (!(p->alone_ms > 0))
        return;
    fprintf(
        out,
        "\nwhole experts on each GPU, for engines that divide tokens: a layer takes %.4g ms over "
        "each link,\n  passed on between the GPUs down to %.4g ms: where copies between them "
        "carry %.4g GB/s, and less gain\n  down to %.4g GB/s. Parts, as above, move fewer bytes "
        "between GPUs up to %.0f tokens a pass\n",
        p->alone_ms, p->passed_ms, p->most_gbs, p->least_gbs, p->tokens);
}

json_t *predict_passing_json(const struct numoe_prediction *prediction)
{
    const struct numoe_prediction_passing *p = &prediction->passing;
    json_t *object;

    if (!(p->alone_ms > 0))
        return json_null();
    object = json_object();
    topo_json_set(&object, "alone_ms", json_real(p->alone_ms));
    topo_json_set(&object, "passed_ms", json_real(p->passed_ms));
    topo_json_set(&object, "least_gbs", json_real(p->least_gbs));
    topo_json_set(&object, "most_gbs", json_real(p->most_gbs));
    topo_json_set(&object, "tokens", json_real(p->tokens));
    return object;
}
