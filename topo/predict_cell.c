/*
 * The time of one layer.
 *
 * CPU. Reading weights and computing overlap, but not fully: with both at work for as long the
 * measured time lies between their maximum and their sum, near the root of the sum of squares.
 * Partial outputs and barriers come on top:
 *
 *     layer = sqrt(reading^2 + arithmetic^2) + reduction + synchronisation
 *
 * Where nodes hold whole experts the memory that is hit most is read last (predict_busiest.c);
 * arithmetic is even, as workers help each other.
 *
 * GPU. Copies and computing overlap fully (a copy stream with nothing else on it): the greatest of
 * link, arithmetic, device memory and host memory, and the launch on top.
 *
 * Both. GPUs compute what their memory keeps and as much of the rest as they can fetch in the time
 * that the CPU takes for what is left; host memory feeds both.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "predict_box.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Device memory: 3.5 of 4.65 TB/s with few tokens. Other fractions of ceilings: predict_guess.c. */
static const double device_read_fraction = 0.75;
/* Partial outputs are written once and read once by others, across nodes: half of what streams of
 * reads reach. */
static const double reduction_fraction = 0.5;
/* A barrier goes through a tree: 0.75 us a level, warm; another 1 us from package to package. */
static const double sync_level_s = 0.75e-6, sync_package_s = 1e-6;
static const double syncs = 3; /* fork, inner barrier, join */
/* A layer of one token from device memory takes 52 us as a graph, all of it latency. */
static const double launch_s = 50e-6;

/* As the executor lays out a call (runtime/schedule_lanes.c): the least and the usual slices of a
 * lane, the tokens of a pass, the most tokens of an expert that are few, the least of many in a
 * block and the most that are computed at once. */
static const double lane_slices = 32, lane_slices_least = 2, lanes_most = 8, few_lanes = 2;
static const double range_slices_least = 4;
static const double pass_least = 64, pass_most = 65536;
static const double few_tokens = 4, block_tokens_least = 16, many_tokens = 96;

/* Bytes of a value of h where nodes exchange it: int8, and a float for each 32. */
static const double h_bytes = 1.125;

/* Tokens that a GPU computes at once; more take turns over the same weights. */
static const double device_chunk = 8192;

double numoe_predict_experts_hit(double experts, double top_k, double tokens)
{
    if (!(experts > 0) || !(top_k > 0) || !(tokens > 0))
        return 0;
    if (top_k >= experts)
        return experts;
    return -experts * expm1(tokens * log1p(-top_k / experts));
}

static const char *const bound_names[NUMOE_BOUNDS] = {
    [NUMOE_BOUND_MEMORY] = "memory",
    [NUMOE_BOUND_CORE_READ] = "core-read",
    [NUMOE_BOUND_ARITHMETIC] = "arithmetic",
    [NUMOE_BOUND_REDUCTION] = "reduction",
    [NUMOE_BOUND_SYNC] = "synchronisation",
    [NUMOE_BOUND_LINK] = "link",
    [NUMOE_BOUND_HOST_MEMORY] = "host-memory",
    [NUMOE_BOUND_DEVICE] = "gpu-arithmetic",
    [NUMOE_BOUND_DEVICE_MEMORY] = "gpu-memory",
    [NUMOE_BOUND_LAUNCH] = "gpu-launch",
};

const char *numoe_bound_name(enum numoe_bound bound)
{
    return (unsigned)bound < NUMOE_BOUNDS ? bound_names[bound] : "?";
}

const char *numoe_way_name(enum numoe_way way)
{
    static const char *const names[NUMOE_WAYS] = {"cpu", "stream-one", "stream", "cache", "shared"};

    return (unsigned)way < NUMOE_WAYS ? names[way] : "?";
}

/* ---- CPU ------------------------------------------------------------------------------------- */

struct cpu_time {
    double passes, hit; /* hit: experts in each pass */
    double busiest;     /* of them, as if so many were read evenly */
    double rows;        /* partial outputs of a token of an expert */
    bool many;          /* tokens of an expert */
    double weight_bytes, reduction_bytes, operations;
    double memory, core_read, arithmetic, reduction, sync, total;
};

/* For people: what 64 bits do not hold is as much as they do. */
static uint64_t whole(double value)
{
    return value < 0x1p63 ? (uint64_t)value : (uint64_t)1 << 63;
}

static double clamp(double value, double least, double most)
{
    return value < least ? least : value > most ? most : value;
}

/* Lane cuts that fall between two experts of so many slices each, as a part of all: lanes of a
 * whole number of slices meet them in turn, others anywhere. */
static double aligned(double lane, double slices)
{
    double a = lane, b = slices;

    if (slices <= 1)
        return 1;
    if (floor(lane) != lane || floor(slices) != slices)
        return 1 / slices;
    while (b > 0) {
        double rest = fmod(a, b);

        a = b;
        b = rest;
    }
    return a / slices;
}

/* Rows that one group of nodes writes for the few tokens of each of its `hit` experts. A lane has
 * one row for each token of its pieces of experts. */
static double few_rows(const struct box *box, double tokens, double hit, double slices,
                       double tokens_each)
{
    double groups = box->reach[NUMOE_REACH_DOMAIN].groups;
    double plan_lanes = box->lanes / groups, workers = box->workers / groups;
    double all = hit * slices, least = all / lane_slices_least, lanes, pieces, each;
    double coarse = few_lanes * plan_lanes;

    if (all < 2 * lane_slices_least * coarse)
        coarse += plan_lanes;
    least = least > workers ? least : workers;
    least = least < coarse ? least : coarse;
    lanes = clamp(all / lane_slices, least, lanes_most * plan_lanes);
    lanes = fmax(floor(lanes), 1);
    if (lanes > workers && workers >= 1)
        lanes = ceil(lanes / workers) * workers;
    pieces = lanes + hit - 1 - (lanes - 1) * aligned(all / lanes, slices);
    pieces = pieces > lanes ? pieces : lanes;
    each = pieces * tokens_each / lanes; /* (token, piece) of a lane */
    return lanes * (tokens > 1 ? tokens * -expm1(each * log1p(-1 / tokens)) : tokens);
}

/* The same of all groups: of the `hit` experts each has all, or by chance some. */
static double few_rows_of_all(const struct box *box, double tokens, double hit, double slices,
                              double tokens_each)
{
    const struct box_reach *reach = &box->reach[NUMOE_REACH_DOMAIN];
    double here = reach->rows / reach->groups, own = slices / reach->rows;
    double whole_hit = fmax(floor(hit + 0.5), 1), mean = whole_hit * here;
    double spread = 6 * sqrt(mean * (1 - here)) + 1, rows = 0;

    if (here >= 1) {
        double less = floor(hit), more = hit - less;

        if (less >= 1)
            rows = (1 - more) * few_rows(box, tokens, less, own, tokens_each);
        return reach->groups * (rows + more * few_rows(box, tokens, less + 1, own, tokens_each));
    }
    for (double n = fmax(floor(mean - spread), 1); n <= fmin(whole_hit, mean + spread); n++) {
        double chance = lgamma(whole_hit + 1) - lgamma(n + 1) - lgamma(whole_hit - n + 1);

        chance = exp(chance + n * log(here) + (whole_hit - n) * log1p(-here));
        rows += chance * few_rows(box, tokens, n, own, tokens_each);
    }
    return reach->groups * rows;
}

/* Ranges of slices, on average over tokens, when a group's experts are fewer than its workers: each
 * has about `mean` tokens, by chance more or less. */
static double even_ranges(const struct box *box, double workers, double experts, double slices,
                          double mean)
{
    double all = mean * box->experts / box->top_k; /* tokens of the pass, about */
    double spread = sqrt(mean * fmax(1 - mean / fmax(all, 1), 0));
    double ranges = 0, sum = 0;

    for (int i = -4; i <= 4; i++) {
        double tokens = fmin(fmax(floor(mean + i * spread / 2 + 0.5), 1), pass_most);
        double weight = exp(-i * i / 8.0) * tokens;
        double like = experts * (double)numoe_plan_slice_cost((uint64_t)mean) /
                      (double)numoe_plan_slice_cost((uint64_t)tokens);
        uint64_t n = (uint64_t)fmax(floor(like + 0.5), 1);
        double parts = 1, blocks = 1;

        if (numoe_plan_cuts_evenly((uint64_t)workers, n)) {
            struct numoe_plan_cut cut =
                numoe_plan_even_cut((uint32_t)fmax(workers, 1), n, (uint64_t)slices, 1,
                                    (uint32_t)tokens, (uint32_t)many_tokens);

            blocks = (double)n * cut.blocks;
            parts = (double)cut.whole + (double)numoe_plan_cut_parts(&cut, n);
        }
        ranges += weight * parts / blocks;
        sum += weight;
    }
    return ranges / sum;
}

/* Rows of partial outputs that all lanes write in a pass of `tokens`. */
static double rows_of(const struct box *box, double tokens, double hit, enum numoe_reach many)
{
    double slices = box->intermediate / 32, pairs = tokens * box->top_k;

    if (pairs > few_tokens * hit) {
        double rows = box->reach[many].rows, groups = box->reach[many].groups;
        double workers = box->workers / groups, experts = floor(hit * rows / groups + 0.5);
        double own = fmax(ceil(slices / rows), 1);
        double parts = box->lanes / (hit * rows), most = slices / rows / range_slices_least;
        double blocks = fmax(floor(pairs / hit / block_tokens_least), 1);

        if (experts >= 1 && numoe_plan_cuts_evenly((uint64_t)workers, (uint64_t)experts))
            return pairs * rows * even_ranges(box, workers, experts, own, pairs / hit);
        /* an expert is cut by tokens first, then by slices */
        return pairs * rows * clamp(parts / blocks, 1, most > 1 ? most : 1);
    }
    return few_rows_of_all(box, tokens, hit, slices, pairs / hit);
}

/*
 * Partial outputs of a pass, written once and read once. Sharing down by rows has one row for each
 * (token, expert), or with few tokens for each token; but h is written once and read by every node.
 */
static double reduction_of(const struct box *box, double tokens, double hit, enum numoe_reach reach)
{
    double row = box->hidden * 4 * 2, pairs = tokens * box->top_k;

    if (!box->rows)
        return rows_of(box, tokens, hit, reach) * row;
    return (pairs > few_tokens * hit ? pairs : tokens) * row +
           pairs * box->intermediate * h_bytes * (1 + box->nodes);
}

/* How widely nodes work together with many tokens: as numoe_plan_best_reach has it. */
static enum numoe_reach reach_of(const struct box *box, double tokens)
{
    double pairs = tokens * box->top_k, hit = fmin(pairs, box->experts), least = INFINITY;
    double reads = fmax(ceil(floor(pairs / hit) / many_tokens), 1);
    enum numoe_reach best = NUMOE_REACH_DOMAIN;

    for (enum numoe_reach r = NUMOE_REACH_DOMAIN; r < NUMOE_REACHES && !box->rows; r++) {
        double cost = 4 * pairs * box->hidden * 4 * box->reach[r].rows +
                      hit * reads * box->expert_bytes * box->reach[r].far;

        if (cost < least * (1 - 1e-12)) {
            least = cost;
            best = r;
        }
    }
    return best;
}

/* Tokens whose partial outputs have room. */
static double pass_of(const struct box *box, enum numoe_reach reach)
{
    double room = (double)numoe_plan_row_bytes((uint32_t)box->nodes);
    double rows = box->rows ? 1 : box->reach[reach].rows;

    return clamp(floor(room / (box->hidden * 4 * box->call_top_k * rows)), pass_least, pass_most);
}

static void cpu_time(const struct box *box, double tokens, struct cpu_time *t)
{
    double levels = ceil(log2(box->workers)), meetings = syncs + box->rows, each, far;
    enum numoe_reach reach = reach_of(box, tokens);

    t->passes = ceil(tokens / pass_of(box, reach));
    each = tokens / t->passes;
    t->hit = numoe_predict_experts_hit(box->experts, box->top_k, each);
    t->many = each * box->top_k > few_tokens * t->hit;
    t->rows = box->rows ? 1 : box->reach[t->many ? reach : NUMOE_REACH_DOMAIN].rows;
    t->busiest = box->bins ? predict_busiest(box->bins, t->hit) : t->hit;
    t->weight_bytes = t->passes * t->hit * box->expert_bytes;
    t->reduction_bytes = t->passes * reduction_of(box, each, t->hit, reach);
    t->operations = tokens * box->top_k * 6 * box->hidden * box->intermediate;
    far = t->many ? box->reach[reach].far : 0;
    t->memory = t->passes * t->busiest * box->expert_bytes * (1 + far) / (box->read * box->reads);
    t->core_read = t->weight_bytes * (1 + far) / (box->core_read * box->reads);
    t->arithmetic = t->operations / (box->ops * box->multiplies);
    t->reduction = t->reduction_bytes / (box->all_read * reduction_fraction);
    t->sync = t->passes * meetings *
              ((levels > 1 ? levels : 1) * sync_level_s + (box->packages > 1 ? sync_package_s : 0));
    t->total = hypot(t->memory > t->core_read ? t->memory : t->core_read, t->arithmetic) +
               t->reduction + t->sync;
}

void predict_form(const struct box *box, double tokens, struct box_form *form)
{
    struct cpu_time t;

    cpu_time(box, tokens, &t);
    form->layer_ms = t.total * 1e3;
    form->reduction_bytes = whole(t.reduction_bytes);
    form->hit = t.hit;
    form->busiest = t.busiest;
}

static void cpu_parts(const struct cpu_time *t, double part, struct numoe_prediction_cell *cell)
{
    cell->parts_ms[NUMOE_BOUND_MEMORY] = t->memory * part * 1e3;
    cell->parts_ms[NUMOE_BOUND_CORE_READ] = t->core_read * part * 1e3;
    cell->parts_ms[NUMOE_BOUND_ARITHMETIC] = t->arithmetic * part * 1e3;
    cell->parts_ms[NUMOE_BOUND_REDUCTION] = t->reduction * part * 1e3;
    cell->parts_ms[NUMOE_BOUND_SYNC] = part > 0 ? t->sync * 1e3 : 0;
    cell->reduction_bytes = whole(t->reduction_bytes * part);
}

/* ---- GPU ------------------------------------------------------------------------------------- */

struct gpus {
    uint32_t count;
    double link, flops, reached, memory; /* sums; reached: of flops */
    double kept;                         /* part of all experts that device memory keeps */
    bool fits;                           /* two layers to copy into, and a call's own memory */
};

static double device_workspace(const struct box *box, double tokens)
{
    double chunk = tokens < device_chunk ? tokens : device_chunk;

    /* x in bf16, outputs in fp32 */
    return tokens * box->hidden * (2 + 4) +
           chunk * box->top_k * (box->intermediate * 2 + box->hidden * 4);
}

static struct gpus first_gpus(const struct box *box, uint32_t count, double tokens)
{
    double layer = box->experts * box->expert_bytes, room = 0;
    struct gpus g = {.count = count, .fits = true};

    for (uint32_t i = 0; i < count; i++) {
        g.link += box->gpus[i].link;
        g.flops += box->gpus[i].flops;
        g.reached += box->gpus[i].flops * box->gpus[i].multiplies;
        g.memory += box->gpus[i].memory;
    }
    for (uint32_t i = 0; i < count; i++) {
        double part = box->gpus[i].link / g.link;
        double left = box->gpus[i].memory_bytes - device_workspace(box, tokens);

        if (left < part * layer * box->layers) {
            left -= 2 * part * layer; /* one computes while the next arrives */
            g.fits &= left >= 0;
        }
        room += left > 0 ? left : 0;
    }
    g.kept = room / (layer * box->layers);
    g.kept = g.kept > 1 ? 1 : g.kept;
    return g;
}

struct gpu_time {
    double copied; /* bytes over all links */
    double link, arithmetic, memory, launch, total;
};

/* GPUs fetch `fetched` of the hit experts and compute these and `kept` of them. with_cpu: inputs
 * and outputs travel too; else several GPUs exchange outputs. */
static void gpu_time(const struct box *box, const struct gpus *g, double tokens, double fetched,
                     double kept, bool with_cpu, struct gpu_time *t)
{
    double hit = numoe_predict_experts_hit(box->experts, box->top_k, tokens);
    double bytes = hit * box->expert_bytes;
    double rows = tokens * box->hidden * 2; /* bf16 */
    double operations = tokens * box->top_k * 6 * box->hidden * box->intermediate;

    *t = (struct gpu_time){0};
    if (!(fetched + kept > 0))
        return;
    t->copied = fetched * (box->copies_all ? box->experts : hit) * box->expert_bytes;
    t->link = t->copied / g->link;
    if (with_cpu)
        t->link += rows * g->count / g->link;
    else if (g->count > 1)
        t->link += 2 * (g->count - 1) * rows / g->link;
    t->arithmetic = (fetched + kept) * operations / g->reached;
    t->memory = (fetched + kept) * bytes / (g->memory * device_read_fraction);
    t->launch = launch_s;
    t->total = fmax(t->link, fmax(t->arithmetic, t->memory)) + t->launch;
}

static void gpu_parts(const struct gpu_time *t, double host, struct numoe_prediction_cell *cell)
{
    cell->parts_ms[NUMOE_BOUND_LINK] = t->link * 1e3;
    cell->parts_ms[NUMOE_BOUND_DEVICE] = t->arithmetic * 1e3;
    cell->parts_ms[NUMOE_BOUND_DEVICE_MEMORY] = t->memory * 1e3;
    cell->parts_ms[NUMOE_BOUND_LAUNCH] = t->launch * 1e3;
    cell->parts_ms[NUMOE_BOUND_HOST_MEMORY] = host * 1e3;
}

/* ---- words ----------------------------------------------------------------------------------- */

static const char *quantity(char text[24], double value, const char *unit)
{
    static const char *const prefixes[] = {"", "k", "M", "G", "T", "P"};
    unsigned prefix = 0;

    if (value < 1) { /* of a byte or an operation there is no part */
        if (*unit == 's')
            snprintf(text, 24, "%.2f ms", value * 1000);
        else
            snprintf(text, 24, "0 %s", unit);
        return text;
    }
    while (value >= 1000 && prefix < 5) {
        value /= 1000;
        prefix++;
    }
    snprintf(text, 24, "%.*f %s%s",
             value < 10    ? 2
             : value < 100 ? 1
                           : 0,
             value, prefixes[prefix], unit);
    return text;
}

/* What crosses the links besides weights, when it matters. */
static const char *other_bytes(char text[64], double bytes, double weights)
{
    char number[24];

    text[0] = 0;
    if (bytes > 0.005 * weights)
        snprintf(text, 64, " and %s of activations", quantity(number, bytes, "B"));
    return text;
}

static void say(const struct box *box, const struct gpus *g, const struct cpu_time *cpu,
                const struct gpu_time *gpu, struct numoe_prediction_cell *cell)
{
    double tokens = cell->tokens, part = 1 - cell->gpu_part;
    double operations = tokens * box->top_k * 6 * box->hidden * box->intermediate;
    char a[24], b[24], c[24], others[64], more[112] = "", uneven[64] = "";
    char *why = cell->why;
    size_t size = sizeof cell->why;

    if (cell->way == NUMOE_WAY_SHARED && cell->gpu_part > 0)
        snprintf(more, sizeof more, "; %.0f %% on %u GPU%s", cell->gpu_part * 100, cell->gpus,
                 cell->gpus > 1 ? "s" : "");
    else if (cell->way <= NUMOE_WAY_CPU && cpu->passes > 1)
        snprintf(more, sizeof more,
                 "; %.0f passes of %.0f tokens, as partial outputs fill %.0f MiB", cpu->passes,
                 ceil(tokens / cpu->passes),
                 (double)(numoe_plan_row_bytes((uint32_t)box->nodes) >> 20));
    else if (cell->way == NUMOE_WAY_CACHE && cell->cached_part > 0)
        snprintf(more, sizeof more, "; %.0f %% kept on GPU%s", cell->cached_part * 100,
                 cell->gpus > 1 ? "s" : "");
    switch (cell->bound) {
    case NUMOE_BOUND_MEMORY:
        if (cpu->busiest > 1.005 * cpu->hit)
            snprintf(uneven, sizeof uneven, "; %.2f times, as the busiest nodes end last",
                     cpu->busiest / cpu->hit);
        snprintf(why, size, "memory: %s a layer at %s (%.2f of %s)%s%s",
                 quantity(a, cpu->weight_bytes * part, "B"),
                 quantity(b, box->read * box->reads, "B/s"), box->reads,
                 quantity(c, box->read, "B/s"), uneven, more);
        break;
    case NUMOE_BOUND_CORE_READ:
        snprintf(why, size, "few cores: %s a layer, %.0f workers read at most %s%s",
                 quantity(a, cpu->weight_bytes * part, "B"), box->workers,
                 quantity(b, box->core_read * box->reads, "B/s"), more);
        break;
    case NUMOE_BOUND_ARITHMETIC:
        snprintf(why, size, "arithmetic: %s a layer at %s (%.2f of %s)%s",
                 quantity(a, operations * part, "op"),
                 quantity(b, box->ops * box->multiplies, "op/s"), box->multiplies,
                 quantity(c, box->ops, "op/s"), more);
        break;
    case NUMOE_BOUND_REDUCTION:
        snprintf(why, size, "partial outputs, %.0f for a token of an expert: %s a layer at %s%s",
                 cpu->rows, quantity(a, (double)cell->reduction_bytes, "B"),
                 quantity(b, box->all_read * reduction_fraction, "B/s"), more);
        break;
    case NUMOE_BOUND_SYNC:
        snprintf(why, size, "synchronisation: %.0f barriers of %.0f workers%s", syncs, box->workers,
                 more);
        break;
    case NUMOE_BOUND_LINK:
        snprintf(why, size, "link: %s%s a pass over %s = %s%s",
                 quantity(a, gpu->copied * box->layers, "B"),
                 other_bytes(others, (gpu->link * g->link - gpu->copied) * box->layers,
                             gpu->copied * box->layers),
                 quantity(b, g->link, "B/s"), quantity(c, gpu->link * box->layers, "s"), more);
        break;
    case NUMOE_BOUND_HOST_MEMORY:
        snprintf(why, size, "host memory: read at %s by links and CPUs together%s",
                 quantity(a, box->read, "B/s"), more);
        break;
    case NUMOE_BOUND_DEVICE:
        snprintf(why, size, "GPU arithmetic: %s a layer at %s (%.2f of %s)%s",
                 quantity(a, operations * cell->gpu_part, "FLOP"),
                 quantity(b, g->reached, "FLOP/s"), g->reached / g->flops,
                 quantity(c, g->flops, "FLOP/s"), more);
        break;
    case NUMOE_BOUND_DEVICE_MEMORY:
        snprintf(why, size, "GPU memory: %s (%.2f of %s)%s",
                 quantity(b, g->memory * device_read_fraction, "B/s"), device_read_fraction,
                 quantity(c, g->memory, "B/s"), more);
        break;
    case NUMOE_BOUND_LAUNCH:
    case NUMOE_BOUNDS:
        snprintf(why, size, "starting GPU work: %.0f us a layer%s", launch_s * 1e6, more);
        break;
    }
}

/* ---- ways ------------------------------------------------------------------------------------ */

static enum numoe_bound greatest(const double *parts, enum numoe_bound from, enum numoe_bound to)
{
    enum numoe_bound best = from;

    for (enum numoe_bound b = from; b <= to; b++)
        if (parts[b] > parts[best])
            best = b;
    return best;
}

static void finish(const struct box *box, double layer, struct numoe_prediction_cell *cell)
{
    cell->possible = true;
    cell->layer_ms = layer * 1e3;
    cell->pass_ms = cell->layer_ms * box->layers;
    cell->tokens_per_s = cell->tokens / (cell->pass_ms / 1e3);
}

static void on_cpu(const struct box *box, struct numoe_prediction_cell *cell)
{
    struct cpu_time t;

    cpu_time(box, cell->tokens, &t);
    cpu_parts(&t, 1, cell);
    cell->weight_bytes = whole(t.weight_bytes);
    cell->passes = whole(t.passes);
    cell->gpu_part = cell->cached_part = 0;
    cell->gpus = 0;
    cell->bound = greatest(cell->parts_ms, NUMOE_BOUND_MEMORY, NUMOE_BOUND_SYNC);
    finish(box, t.total, cell);
    say(box, NULL, &t, NULL, cell);
}

static void stream(const struct box *box, uint32_t count, bool keep,
                   struct numoe_prediction_cell *cell)
{
    struct gpus g = first_gpus(box, count, cell->tokens);
    struct cpu_time none = {0};
    struct gpu_time t;
    double kept = keep ? g.kept : 0, host;

    if (!g.fits && g.kept < 1) {
        double need =
            2 * box->experts * box->expert_bytes / count + device_workspace(box, cell->tokens);

        if (!cell->possible)
            snprintf(cell->why, sizeof cell->why,
                     "not possible: two layers and a call's own memory are about %.1f GB a GPU",
                     need / 1e9);
        return;
    }
    gpu_time(box, &g, cell->tokens, 1 - kept, kept, false, &t);
    host = t.copied / box->read;
    t.total = fmax(t.total, host + t.launch);
    if (cell->possible && t.total >= cell->layer_ms / 1e3)
        return; /* another GPU costs more than it brings */
    gpu_parts(&t, host, cell);
    cell->gpu_part = 1;
    cell->cached_part = kept;
    cell->gpus = count;
    cell->weight_bytes = whole(t.copied);
    cell->bound = greatest(cell->parts_ms, NUMOE_BOUND_LINK, NUMOE_BOUND_LAUNCH);
    finish(box, t.total, cell);
    say(box, &g, &none, &t, cell);
}

/* What CPU and GPUs take when GPUs fetch a part of the experts. */
static double both(const struct box *box, const struct gpus *g, const struct cpu_time *cpu,
                   double tokens, double fetched, double kept, double *cpu_s, double *host_s,
                   struct gpu_time *gpu)
{
    double part = 1 - fetched - kept;

    gpu_time(box, g, tokens, fetched, kept, true, gpu);
    *cpu_s = part > 1e-9 ? (cpu->total - cpu->sync) * part + cpu->sync : 0;
    *host_s = (cpu->weight_bytes * (part > 0 ? part : 0) + gpu->copied) / box->read;
    return fmax(fmax(*cpu_s, gpu->total), *host_s);
}

static void share(const struct box *box, uint32_t count, bool keep,
                  struct numoe_prediction_cell *cell)
{
    struct gpus g = first_gpus(box, count, cell->tokens);
    double kept = keep ? g.kept : 0, low = 0, high = 1 - kept, cpu_s, host_s, layer, fetched;
    struct cpu_time cpu;
    struct gpu_time gpu;

    if (!g.fits && g.kept < 1)
        return;
    cpu_time(box, cell->tokens, &cpu);
    for (int i = 0; i < 50; i++) {
        fetched = (low + high) / 2;
        (void)both(box, &g, &cpu, cell->tokens, fetched, kept, &cpu_s, &host_s, &gpu);
        if (gpu.total < cpu_s)
            low = fetched;
        else
            high = fetched;
    }
    fetched = high < 1e-6 ? 0 : high;
    layer = both(box, &g, &cpu, cell->tokens, fetched, kept, &cpu_s, &host_s, &gpu);
    if (fetched + kept <= 0 || layer >= cell->layer_ms / 1e3)
        return;
    cell->gpu_part = fetched + kept;
    cell->cached_part = kept;
    cell->gpus = count;
    cell->weight_bytes = whole(cpu.weight_bytes * (1 - cell->gpu_part) + gpu.copied);
    cpu_parts(&cpu, 1 - cell->gpu_part, cell);
    gpu_parts(&gpu, 0, cell);
    if (host_s >= layer)
        cell->bound = NUMOE_BOUND_HOST_MEMORY;
    else if (cpu_s > gpu.total * 1.01)
        cell->bound = greatest(cell->parts_ms, NUMOE_BOUND_MEMORY, NUMOE_BOUND_SYNC);
    else
        cell->bound = greatest(cell->parts_ms, NUMOE_BOUND_LINK, NUMOE_BOUND_LAUNCH);
    cell->parts_ms[NUMOE_BOUND_HOST_MEMORY] = host_s * 1e3;
    finish(box, layer, cell);
    say(box, &g, &cpu, &gpu, cell);
}

void predict_cell(const struct box *box, enum numoe_way way, uint32_t tokens,
                  struct numoe_prediction_cell *cell)
{
    *cell = (struct numoe_prediction_cell){.way = way, .tokens = tokens};
    cell->experts_hit = numoe_predict_experts_hit(box->experts, box->top_k, tokens);
    switch (way) {
    case NUMOE_WAY_CPU:
        on_cpu(box, cell);
        return;
    case NUMOE_WAY_STREAM_ONE:
        stream(box, 1, false, cell);
        return;
    case NUMOE_WAY_STREAM:
    case NUMOE_WAY_CACHE:
        for (uint32_t n = 1; n <= box->gpu_count; n++)
            stream(box, n, way == NUMOE_WAY_CACHE, cell);
        return;
    case NUMOE_WAY_SHARED:
        on_cpu(box, cell);
        for (uint32_t n = 1; n <= box->gpu_count; n++) {
            share(box, n, true, cell);
            share(box, n, false, cell);
        }
        return;
    case NUMOE_WAYS:
        break;
    }
}
