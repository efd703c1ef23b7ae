/*
 * In which form experts are divided among nodes.
 *
 * Each form is placed for real, so that one that does not fit is known, and weighed by predicting
 * a layer with it: a token (decode) and many (prefill). With slices of every expert on every node
 * all memory is read whichever experts are hit, but each node writes a partial output for each
 * (token, expert). Whole experts on groups of nodes write fewer, and read as slowly as the group
 * that is hit most. What a form costs is its time over the best form's, for the objective.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "plan_build.h"
#include "plan_shares.h"
#include "predict_box.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PREFILL_TOKENS = 4096 };

/* Costs closer than this are equal: the form listed first is taken, on every machine. */
static const double near = 1e-3;

struct weighing {
    struct plan_build *build;
    struct plan_totals totals;
    struct numoe_plan_form forms[PLAN_FORMS_MOST];
    uint32_t *group[PLAN_FORMS_MOST]; /* of each plan node */
    uint64_t room[PLAN_FORMS_MOST];   /* for whole experts */
    struct box_form decode[PLAN_FORMS_MOST], prefill[PLAN_FORMS_MOST];
    bool asked[PLAN_FORMS_MOST]; /* may be chosen, by the request */
    uint32_t count;
    bool known; /* times are */
};

const char *plan_form_word(enum numoe_form form)
{
    static const char *const words[PLAN_FORMS] = {
        [NUMOE_FORM_AUTO] = "auto",     [NUMOE_FORM_EVERY_NODE] = "every",
        [NUMOE_FORM_GROUPS] = "groups", [NUMOE_FORM_EXPERTS] = "experts",
        [NUMOE_FORM_ROWS] = "rows",
    };

    return words[form];
}

const char *plan_objective_word(enum numoe_objective objective)
{
    static const char *const words[PLAN_OBJECTIVES] = {
        [NUMOE_OPTIMIZE_BOTH] = "both",
        [NUMOE_OPTIMIZE_DECODE] = "decode",
        [NUMOE_OPTIMIZE_PREFILL] = "prefill",
    };

    return words[objective];
}

/* ---- which forms there are ------------------------------------------------------------------- */

/* The next form's groups, to be filled, then added. */
static uint32_t *next_groups(struct weighing *w)
{
    if (!w->group[w->count])
        w->group[w->count] = calloc(w->build->plan->node_count, sizeof **w->group);
    return w->group[w->count];
}

static void add(struct weighing *w, enum numoe_form form, uint32_t groups, bool asked,
                const char *of)
{
    const struct numoe_plan_request *request = w->build->request;
    struct numoe_plan_form *f = &w->forms[w->count];

    *f = (struct numoe_plan_form){
        .form = form, .groups = groups, .executable = form != NUMOE_FORM_ROWS};
    switch (form) {
    case NUMOE_FORM_EVERY_NODE:
        snprintf(f->name, sizeof f->name, "every node");
        break;
    case NUMOE_FORM_EXPERTS:
        snprintf(f->name, sizeof f->name, "whole experts");
        break;
    case NUMOE_FORM_ROWS:
        snprintf(f->name, sizeof f->name, "row-sharing of down");
        break;
    case NUMOE_FORM_AUTO:
    case NUMOE_FORM_GROUPS:
        snprintf(f->name, sizeof f->name, "%u group%s of nodes%s", groups, groups > 1 ? "s" : "",
                 of);
        break;
    }
    w->asked[w->count++] = f->executable && (request->form == NUMOE_FORM_AUTO || asked);
}

/* Groups of domains and of packages, where they are not the same as other forms; so many when a
 * number was asked for. */
static int list_groups(struct weighing *w)
{
    const struct numoe_plan_request *request = w->build->request;
    const struct numoe_plan *plan = w->build->plan;
    const bool asked = request->form == NUMOE_FORM_GROUPS;
    const uint32_t wanted = asked ? request->groups : 0, nodes = plan->node_count;
    uint32_t domains = 0, packages = 0, *group;
    bool there = false; /* the number that was asked for */
    int rc = plan_count_domains(plan, &domains);

    if (rc)
        return rc;
    if (domains > 1 && (domains < nodes || (asked && !wanted))) {
        group = next_groups(w);
        rc = group ? numoe_plan_deal(plan, domains, group) : -ENOMEM;
        if (rc)
            return rc;
        add(w, NUMOE_FORM_GROUPS, domains, asked && (!wanted || wanted == domains),
            " (memory domains)");
        there = wanted == domains;
    }
    group = next_groups(w);
    rc = group ? plan_deal_packages(plan, group, &packages) : -ENOMEM;
    if (rc)
        return rc;
    if (packages > 1 && packages < domains) {
        add(w, NUMOE_FORM_GROUPS, packages, asked && (!wanted || wanted == packages),
            " (packages)");
        there |= wanted == packages;
    }
    if (!wanted || there)
        return 0;
    group = next_groups(w);
    rc = group ? numoe_plan_deal(plan, wanted, group) : -ENOMEM;
    if (!rc)
        add(w, NUMOE_FORM_GROUPS, wanted, true, "");
    return rc;
}

static int list_forms(struct weighing *w, struct numoe_error *error)
{
    const struct numoe_plan_request *request = w->build->request;
    const uint32_t nodes = w->build->plan->node_count;
    uint32_t *group;
    int rc;

    if (request->form == NUMOE_FORM_ROWS)
        return numoe_error_set(error, -ENOTSUP, "form",
                               "row-sharing of down is predicted for comparison, this version does "
                               "not execute it");
    if ((unsigned)request->form > NUMOE_FORM_ROWS ||
        (unsigned)request->objective > NUMOE_OPTIMIZE_PREFILL)
        return numoe_error_set(error, -EINVAL, "form", "%d is no form or %d no objective",
                               (int)request->form, (int)request->objective);
    if (request->groups && request->form != NUMOE_FORM_GROUPS)
        return numoe_error_set(error, -EINVAL, "groups",
                               "a number of groups goes with groups of nodes");
    if (request->groups > nodes)
        return numoe_error_set(error, -EINVAL, "groups",
                               "%u groups need as many nodes, and %u are used", request->groups,
                               nodes);
    group = next_groups(w);
    if (!group)
        goto memory;
    add(w, NUMOE_FORM_EVERY_NODE, 1, request->form == NUMOE_FORM_EVERY_NODE, "");
    rc = list_groups(w);
    if (rc)
        goto memory;
    if (nodes > 1 || request->form == NUMOE_FORM_EXPERTS) {
        group = next_groups(w);
        if (!group)
            goto memory;
        for (uint32_t n = 0; n < nodes; n++)
            group[n] = n;
        add(w, NUMOE_FORM_EXPERTS, nodes, request->form == NUMOE_FORM_EXPERTS, "");
    }
    if (nodes > 1) {
        group = next_groups(w);
        if (!group)
            goto memory;
        memset(group, 0, nodes * sizeof *group);
        add(w, NUMOE_FORM_ROWS, 1, false, "");
    }
    for (uint32_t i = 0; i < w->count; i++)
        if (w->asked[i])
            return 0;
    return numoe_error_set(error, -EINVAL, "groups",
                           "the %u node%s in use %s of one memory domain: say how many groups",
                           nodes, nodes > 1 ? "s" : "", nodes > 1 ? "are" : "is");
memory:
    return numoe_error_set(error, -ENOMEM, w->build->plan->source, "out of memory");
}

/* ---- what they cost -------------------------------------------------------------------------- */

static int predict_both(struct weighing *w, uint32_t i, struct numoe_error *error)
{
    struct numoe_plan_form *f = &w->forms[i];
    struct box_bins bins;
    struct box box;
    int rc = predict_box(w->build->machine, w->build->plan, w->build->request->predict, &box, &bins,
                         error);

    if (!rc) {
        box.rows = f->form == NUMOE_FORM_ROWS;
        predict_form(&box, 1, &w->decode[i]);
        predict_form(&box, PREFILL_TOKENS, &w->prefill[i]);
        f->decode_ms = w->decode[i].layer_ms;
        f->prefill_ms = w->prefill[i].layer_ms;
        f->decode_bytes = w->decode[i].reduction_bytes;
        f->prefill_bytes = w->prefill[i].reduction_bytes;
    }
    box_bins_free(&bins);
    return rc;
}

static int place(struct weighing *w, uint32_t i, struct numoe_error *error)
{
    int rc = plan_place_shards(w->build, &w->totals, w->group[i], w->forms[i].groups, &w->room[i]);

    w->forms[i].fits = !rc;
    w->build->plan->form = w->forms[i].form;
    return rc == -ENOMEM ? numoe_error_set(error, rc, w->build->plan->source, "out of memory") : 0;
}

static double cost_of(double decode, double prefill, enum numoe_objective objective)
{
    switch (objective) {
    case NUMOE_OPTIMIZE_DECODE:
        return decode;
    case NUMOE_OPTIMIZE_PREFILL:
        return prefill;
    case NUMOE_OPTIMIZE_BOTH:
        break;
    }
    return sqrt(decode * prefill);
}

/* Costs, from the times of what fits and can be executed. */
static void rate(struct weighing *w, double *decode, double *prefill)
{
    double best = INFINITY;

    *decode = *prefill = INFINITY;
    if (!w->known)
        return;
    for (uint32_t i = 0; i < w->count; i++) {
        const struct numoe_plan_form *f = &w->forms[i];

        if (!f->fits || !f->executable)
            continue;
        *decode = fmin(*decode, f->decode_ms);
        *prefill = fmin(*prefill, f->prefill_ms);
    }
    for (int again = 0; again < 2; again++)
        for (uint32_t i = 0; i < w->count; i++) {
            struct numoe_plan_form *f = &w->forms[i];
            double cost = cost_of(f->decode_ms / *decode, f->prefill_ms / *prefill,
                                  w->build->request->objective);

            if (!f->fits)
                continue;
            if (again)
                f->cost = cost / best;
            else if (f->executable)
                best = fmin(best, cost);
        }
}

static const char *megabytes(char text[32], uint64_t bytes)
{
    snprintf(text, 32, bytes < 10000000 ? "%.2f MB" : "%.0f MB", (double)bytes / 1e6);
    return text;
}

static void say(struct weighing *w, uint32_t i, uint32_t chosen, double decode, double prefill)
{
    static const char *const objectives[] = {"decode and prefill", "decode", "prefill"};
    struct numoe_plan_form *f = &w->forms[i];
    const struct numoe_plan_form *best = &w->forms[chosen];
    double d = f->decode_ms / decode, p = f->prefill_ms / prefill;
    char bytes[32], others[32];

    if (!f->fits)
        snprintf(f->reason, sizeof f->reason,
                 "does not fit: there is room for %" PRIu64 " of %" PRIu64 " whole experts",
                 w->room[i], w->totals.pairs);
    else if (i == chosen && w->build->request->form != NUMOE_FORM_AUTO &&
             (w->build->request->form != NUMOE_FORM_GROUPS || w->build->request->groups))
        snprintf(f->reason, sizeof f->reason, "as asked");
    else if (!w->known)
        snprintf(f->reason, sizeof f->reason,
                 "not weighed: experts a token or the hidden size are not known");
    else if (i == chosen)
        snprintf(f->reason, sizeof f->reason,
                 "costs least for %s: decode %.2f, prefill %.2f times the best",
                 objectives[w->build->request->objective], d, p);
    else if (f->form == NUMOE_FORM_ROWS)
        snprintf(f->reason, sizeof f->reason,
                 "not executed by this version; decode %.2f, prefill %.2f times the best", d, p);
    else if (w->decode[i].busiest > 1.01 * w->decode[chosen].busiest &&
             f->decode_ms > best->decode_ms)
        snprintf(
            f->reason, sizeof f->reason,
            "decode takes %.2f times as long: of %.3g experts the busiest nodes read as if all "
            "read %.3g",
            f->decode_ms / best->decode_ms, w->decode[i].hit, w->decode[i].busiest);
    else if (f->prefill_ms > best->prefill_ms)
        snprintf(f->reason, sizeof f->reason,
                 "prefill takes %.2f times as long: %s of partial outputs, not %s",
                 f->prefill_ms / best->prefill_ms, megabytes(bytes, f->prefill_bytes),
                 megabytes(others, best->prefill_bytes));
    else
        snprintf(f->reason, sizeof f->reason, "%.2f times in decode, %.2f times in prefill",
                 f->decode_ms / best->decode_ms, f->prefill_ms / best->prefill_ms);
}

/* Of those that were asked for the cheapest; NUMOE_NONE: none fits. */
static uint32_t choose(const struct weighing *w)
{
    uint32_t best = NUMOE_NONE;

    for (uint32_t i = 0; i < w->count; i++)
        if (w->asked[i] && w->forms[i].fits &&
            (best == NUMOE_NONE ||
             (w->known && w->forms[i].cost < w->forms[best].cost * (1 - near))))
            best = i;
    return best;
}

/* The chosen first, then by cost; what does not fit last. */
static bool goes_before(const struct numoe_plan_form *a, const struct numoe_plan_form *b)
{
    if (a->chosen != b->chosen)
        return a->chosen;
    if (a->fits != b->fits)
        return a->fits;
    return a->fits && a->cost < b->cost;
}

static int keep_forms(struct weighing *w, uint32_t chosen)
{
    struct numoe_plan *plan = w->build->plan;
    double decode, prefill;

    plan->forms = calloc(w->count, sizeof *plan->forms);
    if (!plan->forms)
        return -ENOMEM;
    rate(w, &decode, &prefill);
    w->forms[chosen].chosen = true;
    for (uint32_t i = 0; i < w->count; i++) {
        uint32_t at = plan->form_count++;

        say(w, i, chosen, decode, prefill);
        for (; at > 0 && goes_before(&w->forms[i], &plan->forms[at - 1]); at--)
            plan->forms[at] = plan->forms[at - 1];
        plan->forms[at] = w->forms[i];
    }
    return 0;
}

/* None of the forms that were asked for fits. */
static int refuse(const struct weighing *w, struct numoe_error *error)
{
    const struct numoe_plan_form *f = NULL;
    struct plan_grouping asked[PLAN_FORMS_MOST];
    uint32_t count = 0;
    uint64_t room = 0;

    for (uint32_t i = 0; i < w->count; i++) {
        if (!w->asked[i])
            continue;
        asked[count++] = (struct plan_grouping){w->group[i], w->forms[i].groups};
        if (!f || w->room[i] > room) {
            f = &w->forms[i];
            room = w->room[i];
        }
    }
    if (!w->forms[0].fits)
        return plan_refuse(w->build, &w->totals, asked, count, error);
    return numoe_error_set(error, -ENOSPC, "form",
                           "the experts do not fit as %s: there is room for %" PRIu64 " of %" PRIu64
                           " whole experts, short by %" PRIu64 "; slices of every expert on every "
                           "node fit",
                           f->name, room, w->totals.pairs, w->totals.pairs - room);
}

static int weigh_forms(struct weighing *w, struct numoe_error *error)
{
    const struct numoe_expert_shape *shape = &w->build->plan->shape;
    double decode, prefill;
    int rc = 0;

    w->known = shape->experts_per_token && shape->hidden;
    for (uint32_t i = 0; i < w->count && !rc; i++) {
        rc = place(w, i, error);
        if (!rc && w->forms[i].fits && w->known)
            rc = predict_both(w, i, error);
    }
    if (!rc && w->known)
        rate(w, &decode, &prefill);
    return rc;
}

static int place_model(struct plan_build *build, const struct plan_totals *totals,
                       uint32_t *scratch, struct numoe_error *error)
{
    struct weighing w = {.build = build, .totals = *totals};
    uint32_t chosen;
    int rc = list_forms(&w, error);

    if (!rc && totals->bytes > plan_granted(build->machine))
        rc = refuse(&w, error);
    if (!rc)
        rc = weigh_forms(&w, error);
    if (rc)
        goto out;
    chosen = choose(&w);
    if (chosen == NUMOE_NONE) {
        rc = refuse(&w, error);
        goto out;
    }
    rc = place(&w, chosen, error);
    if (!rc && keep_forms(&w, chosen))
        rc = numoe_error_set(error, -ENOMEM, build->plan->source, "out of memory");
    if (!rc) {
        plan_note_full(build, scratch);
        if (build->plan->node_count > 1)
            plan_note(build, "form: %s: %s", w.forms[chosen].name, w.forms[chosen].reason);
    }
out:
    for (uint32_t i = 0; i < PLAN_FORMS_MOST; i++)
        free(w.group[i]);
    return rc;
}

int plan_place(struct plan_build *build, struct numoe_error *error)
{
    struct numoe_plan *plan = build->plan;
    const struct numoe_expert_shape held = numoe_plan_held(plan);
    uint32_t *scratch = calloc(plan->node_count, sizeof *scratch);
    struct plan_totals totals;
    int rc;

    plan->form = NUMOE_FORM_EVERY_NODE;
    plan->cumulative = calloc((size_t)plan->node_count + 1, sizeof *plan->cumulative);
    build->full = calloc(plan->node_count, sizeof *build->full);
    if (!scratch || !plan->cumulative || !build->full) {
        rc = numoe_error_set(error, -ENOMEM, plan->source, "out of memory");
        goto out;
    }
    plan->expert_step = plan_expert_step(held.experts);
    rc = plan_count_totals(&plan->shape, &totals, error);
    if (!rc)
        rc = plan_count_totals(&held, &totals, error);
    if (!rc)
        rc = plan_weigh(build, error);
    if (rc)
        goto out;
    if (totals.slices)
        rc = place_model(build, &totals, scratch, error);
    else if (plan_place_nothing(build))
        rc = numoe_error_set(error, -ENOMEM, plan->source, "out of memory");
out:
    free(scratch);
    return rc;
}
