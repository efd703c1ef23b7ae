/*
 * How unevenly reading falls on memory domains when each expert lies on some of them.
 *
 * Routing is uniform, so of the sets of `hit` experts each is as likely: the numbers that fall into
 * the bins are distributed multivariate hypergeometrically, which is independent binomials given
 * their sum. The chance that no bin is busier than t is then a coefficient of a product of
 * polynomials, binomials cut off where t is passed, and the expected greatest load is summed over
 * the t that can occur. This is exact for whole `hit`. Three things are not: that many tokens hit
 * their expected number of distinct experts and no other; loads that are more than THRESHOLDS_MOST
 * different ones in the range that matters are taken several at a time; and for sizes past
 * WORK_MOST the same shares of fewer experts are computed, deviations from the mean being smaller
 * by the root of the ratio.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "predict_box.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { THRESHOLDS_MOST = 96 };
static const double work_most = 2048. * 2048.;

void box_bins_free(struct box_bins *bins)
{
    free(bins->experts);
    free(bins->cost);
    free(bins->known);
    *bins = (struct box_bins){0};
}

/* ---- bins of a plan -------------------------------------------------------------------------- */

/* Domains that one shard reads from are one bin: root[] leads to the least of them. */
static uint32_t find(const uint32_t *root, uint32_t domain)
{
    while (root[domain] != domain)
        domain = root[domain];
    return domain;
}

static void join_domains(const struct numoe_machine *machine, const struct numoe_plan *plan,
                         uint32_t *root, uint32_t *shard_domain)
{
    for (uint32_t d = 0; d < machine->domain_count; d++)
        root[d] = d;
    for (uint32_t g = 0; g < plan->shard_count; g++)
        shard_domain[g] = NUMOE_NONE;
    for (uint32_t n = 0; n < plan->node_count; n++) {
        uint32_t *first = &shard_domain[plan->nodes[n].shard];
        uint32_t domain = machine->nodes[plan->nodes[n].node].domain, a, b;

        if (!(plan->nodes[n].weight > 0))
            continue;
        if (*first == NUMOE_NONE)
            *first = domain;
        a = find(root, *first);
        b = find(root, domain);
        root[a > b ? a : b] = a > b ? b : a;
    }
}

int predict_bins(const struct numoe_machine *machine, const struct numoe_plan *plan,
                 const double *domain_read, double read, struct box_bins *bins)
{
    const uint32_t domains = machine->domain_count;
    const double pairs = (double)plan->shape.layers * (double)numoe_plan_held(plan).experts;
    uint32_t *root = calloc((size_t)domains + 1, sizeof *root), at = 0;
    uint32_t *shard_domain = calloc((size_t)plan->shard_count + 1, sizeof *shard_domain);
    double *part = calloc((size_t)domains + 1, sizeof *part);
    double *places = calloc((size_t)domains + 1, sizeof *places);

    *bins = (struct box_bins){0};
    bins->experts = calloc((size_t)domains + 1, sizeof *bins->experts);
    bins->cost = calloc((size_t)domains + 1, sizeof *bins->cost);
    bins->known = calloc(1, sizeof *bins->known);
    if (!root || !shard_domain || !part || !places || !bins->experts || !bins->cost || !bins->known)
        goto out;
    join_domains(machine, plan, root, shard_domain);
    for (uint32_t n = 0; n < plan->node_count; n++)
        part[machine->nodes[plan->nodes[n].node].domain] += plan->nodes[n].weight;
    for (uint32_t g = 0; g < plan->shard_count; g++) {
        const struct numoe_plan_shard *shard = &plan->shards[g];
        uint32_t bin;

        if (!shard->places)
            continue;
        bin = find(root, shard_domain[g]);
        places[bin] += (double)shard->places;
        bins->experts[bin] += (double)((shard->first_place + shard->places) / plan->shape.layers -
                                       shard->first_place / plan->shape.layers);
    }
    for (uint32_t d = 0; d < domains; d++) {
        double *cost = &bins->cost[find(root, d)];

        if (part[d] > 0)
            *cost = fmax(*cost, read * part[d] / domain_read[d]);
    }
    for (uint32_t d = 0; d < domains; d++) {
        if (!(places[d] > 0))
            continue;
        bins->experts[at] = bins->experts[d];
        bins->cost[at++] = bins->cost[d] * pairs / places[d];
    }
    bins->count = at;
out:
    free(root);
    free(shard_domain);
    free(part);
    free(places);
    return bins->count ? 0 : -ENOMEM;
}

/* ---- the busiest ----------------------------------------------------------------------------- */

struct draw {
    const struct box_bins *bins;
    uint32_t hit;
    double *binomial; /* of each bin, 0 .. experts */
    double *sum, *next;
    double chance; /* of the sum being hit */
};

static uint32_t most_below(const struct draw *draw, uint32_t bin, double load)
{
    double most = floor(load / draw->bins->cost[bin] + 1e-6);

    most = fmin(most, draw->bins->experts[bin]);
    return most < draw->hit ? (uint32_t)most : draw->hit;
}

static double room_below(const struct draw *draw, double load)
{
    double room = 0;

    for (uint32_t b = 0; b < draw->bins->count; b++)
        room += most_below(draw, b, load);
    return room;
}

/* Chance that no bin's load is above this. */
static double chance_below(struct draw *draw, double load)
{
    double later = room_below(draw, load);
    const double *binomial = draw->binomial;
    uint32_t reached = 0;

    if (later < draw->hit)
        return 0;
    memset(draw->sum, 0, (draw->hit + 1u) * sizeof *draw->sum);
    draw->sum[0] = 1;
    for (uint32_t b = 0; b < draw->bins->count; b++) {
        uint32_t most = most_below(draw, b, load), to, from;
        double *swap = draw->sum;

        later -= most;
        to = reached + most < draw->hit ? reached + most : draw->hit;
        /* what the bins after this one cannot make up for is of no use */
        from = later < draw->hit ? draw->hit - (uint32_t)later : 0;
        memset(draw->next, 0, (draw->hit + 1u) * sizeof *draw->next);
        for (uint32_t s = from; s <= to; s++) {
            uint32_t least = s > reached ? s - reached : 0, last = most < s ? most : s;
            double sum = 0;

            for (uint32_t x = least; x <= last; x++)
                sum += binomial[x] * draw->sum[s - x];
            draw->next[s] = sum;
        }
        draw->sum = draw->next;
        draw->next = swap;
        reached = to;
        binomial += (size_t)draw->bins->experts[b] + 1;
    }
    return fmin(draw->sum[draw->hit] / draw->chance, 1);
}

static int ascending(const void *a, const void *b)
{
    const double *x = a, *y = b;

    return (*x > *y) - (*x < *y);
}

/* The loads that a bin can have, ascending, those within rounding of each other once. */
static uint32_t list_loads(const struct draw *draw, double *loads)
{
    uint32_t count = 0, kept = 0;

    for (uint32_t b = 0; b < draw->bins->count; b++)
        for (uint32_t x = 1; x <= draw->bins->experts[b] && x <= draw->hit; x++)
            loads[count++] = x * draw->bins->cost[b];
    qsort(loads, count, sizeof *loads, ascending);
    for (uint32_t i = 0; i < count; i++)
        if (!kept || loads[i] > loads[kept - 1] * (1 + 1e-6))
            loads[kept++] = loads[i];
    return kept;
}

/* Loads above this are too rare to matter. */
static double hardly_ever(const struct draw *draw, double experts)
{
    double most = 0;

    for (uint32_t b = 0; b < draw->bins->count; b++) {
        double p = draw->hit / experts, mean = p * draw->bins->experts[b];
        double load = fmin(mean + 6 * sqrt(mean * (1 - p)) + 4, draw->bins->experts[b]);

        most = fmax(most, load * draw->bins->cost[b]);
    }
    return most;
}

static double expect(struct draw *draw, double experts, const double *loads, uint32_t count)
{
    uint32_t low = 0, high = count - 1, end, step;
    double expected = 0, before = 0;

    /* the first load at which everything finds room */
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;

        if (room_below(draw, loads[middle]) < draw->hit)
            low = middle + 1;
        else
            high = middle;
    }
    for (end = low + 1; end < count && loads[end - 1] < hardly_ever(draw, experts); end++)
        ;
    step = (end - low + THRESHOLDS_MOST - 1) / THRESHOLDS_MOST;
    for (uint32_t i = low; i < end && before < 1 - 1e-9; i += step) {
        uint32_t last = i + step - 1 < end ? i + step - 1 : end - 1;
        double below = last + 1 < end ? chance_below(draw, loads[last]) : 1;

        below = fmax(below, before);
        expected += (below - before) * (loads[i] + loads[last]) / 2;
        before = below;
    }
    return expected + (1 - before) * loads[end - 1];
}

/* ln C(n, x) p^x (1 - p)^(n - x) */
static double log_binomial(const double *log_factorial, uint32_t n, uint32_t x, double p)
{
    return log_factorial[n] - log_factorial[x] - log_factorial[n - x] + x * log(p) +
           (n - x) * log1p(-p);
}

static double busiest_of(const struct box_bins *bins, double experts, uint32_t hit)
{
    size_t all = (size_t)experts, room = all + bins->count + 1;
    struct draw draw = {.bins = bins, .hit = hit};
    double *log_factorial = calloc(all + 1, sizeof *log_factorial);
    double *loads = calloc(room, sizeof *loads), *binomial, p = hit / experts;
    double expected = hit; /* without memory: as if even */

    draw.binomial = binomial = calloc(room, sizeof *binomial);
    draw.sum = calloc(hit + 1u, sizeof *draw.sum);
    draw.next = calloc(hit + 1u, sizeof *draw.next);
    if (log_factorial && loads && binomial && draw.sum && draw.next) {
        for (size_t i = 1; i <= all; i++)
            log_factorial[i] = log_factorial[i - 1] + log((double)i);
        for (uint32_t b = 0; b < bins->count; b++)
            for (uint32_t x = 0; x <= bins->experts[b]; x++)
                *binomial++ = exp(log_binomial(log_factorial, (uint32_t)bins->experts[b], x, p));
        draw.chance = exp(log_binomial(log_factorial, (uint32_t)all, hit, p));
        expected = expect(&draw, experts, loads, list_loads(&draw, loads));
    }
    free(log_factorial);
    free(loads);
    free(draw.binomial);
    free(draw.sum);
    free(draw.next);
    return expected;
}

static double busiest_of_all(const struct box_bins *bins)
{
    double most = 0;

    for (uint32_t b = 0; b < bins->count; b++)
        most = fmax(most, bins->experts[b] * bins->cost[b]);
    return most;
}

/* The same shares of fewer experts, and how many those are; NULL: out of memory. */
static double *shrink(const struct box_bins *bins, double by, double *experts)
{
    double *fewer = calloc(bins->count, sizeof *fewer);

    *experts = 0;
    for (uint32_t b = 0; fewer && b < bins->count; b++) {
        fewer[b] = fmax(round(bins->experts[b] / by), 1);
        *experts += fewer[b];
    }
    return fewer;
}

static double compute_busiest(const struct box_bins *bins, double hit)
{
    double experts = 0, low = floor(hit), by, few, value;
    struct box_bins small;

    for (uint32_t b = 0; b < bins->count; b++)
        experts += bins->experts[b];
    if (bins->count < 2 || !(hit > 0))
        return bins->count ? hit * bins->cost[0] : hit;
    if (hit >= experts)
        return busiest_of_all(bins);
    if (hit > low) {
        double next = low + 1 >= experts ? busiest_of_all(bins) : predict_busiest(bins, low + 1);

        return (1 - (hit - low)) * predict_busiest(bins, low) + (hit - low) * next;
    }
    by = sqrt(hit * experts / work_most);
    if (by <= 1)
        return busiest_of(bins, experts, (uint32_t)hit);
    small = *bins;
    small.experts = shrink(bins, by, &few);
    if (!small.experts)
        return hit;
    value = fmin(fmax(round(hit / by), 1), few - 1);
    /* relative to even; what is above it shrinks with the root of the number */
    value = busiest_of(&small, few, (uint32_t)value) / value;
    free(small.experts);
    return hit * (value > 1 ? 1 + (value - 1) / sqrt(by) : value);
}

double predict_busiest(const struct box_bins *bins, double hit)
{
    struct box_known *known = bins->known;
    double busiest;

    for (uint32_t i = 0; known && i < known->count; i++)
        if (known->hit[i] == hit)
            return known->busiest[i];
    busiest = compute_busiest(bins, hit);
    if (known && known->count < BOX_MOST_KNOWN) {
        known->hit[known->count] = hit;
        known->busiest[known->count++] = busiest;
    }
    return busiest;
}
