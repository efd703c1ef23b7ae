/* From a machine and a plan to predictions. SPDX-License-Identifier: Apache-2.0 */
#include "predict.h"
#include "plan_build.h"
#include "predict_box.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t usual_tokens[] = {1, 4, 16, 256, 1024, 4096, 8192, 16384, 65536};
enum { USUAL_TOKENS = sizeof usual_tokens / sizeof usual_tokens[0] };

/* Of the rate a PCIe link has on paper, what copies from pinned memory reach: 55.4 of 63 GB/s. */
static const double link_fraction = 0.88;
/* Memory that is not DRAM, a package (HBM) or a node (CXL), on paper. */
static const double hbm_package_gbs = 1000, slow_node_gbs = 32;

struct work {
    const struct numoe_machine *machine;
    const struct numoe_plan *plan;
    const struct numoe_predict_options *options;
    struct numoe_prediction *out;
    struct cpu_guess guess;
    struct box box;
    struct box_bins bins;
    bool *first;         /* of each node: whether it stands for its domain's nodes of its kind */
    double *domain_read; /* bytes a second of each domain that is used, else 0 */
    bool assumed;        /* some bandwidth is */
};

static void figure(struct work *work, const char *name, const char *unit, double value,
                   bool assumed, const char *format, ...) NUMOE_PRINTF(6, 7);

static void figure(struct work *work, const char *name, const char *unit, double value,
                   bool assumed, const char *format, ...)
{
    struct numoe_prediction_figure *f;
    va_list args;

    if (work->out->figure_count == NUMOE_PREDICT_FIGURES)
        return;
    f = &work->out->figures[work->out->figure_count++];
    *f = (struct numoe_prediction_figure){
        .name = name, .unit = unit, .value = value, .assumed = assumed};
    va_start(args, format);
    vsnprintf(f->source, sizeof f->source, format, args);
    va_end(args);
}

enum source { GIVEN, KNOWN, ASSUMED };

/* Of a node while nothing else is read: what the channels of its domain give. */
static uint64_t alone_mbs(const struct numoe_machine *machine, uint32_t node)
{
    const uint64_t measured = numoe_machine_measured(machine, node);

    return measured ? measured : machine->nodes[node].bandwidth_mbs;
}

static bool same_channels(const struct numoe_node *a, const struct numoe_node *b)
{
    return a->kind == b->kind && a->package == b->package && a->domain == b->domain;
}

/* Note the first node with memory of each domain, kind and package. */
static int find_first(struct work *work)
{
    const struct numoe_machine *machine = work->machine;

    work->first = calloc(machine->node_count ? machine->node_count : 1, sizeof *work->first);
    if (!work->first)
        return -ENOMEM;
    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct numoe_node *node = &machine->nodes[i];

        work->first[i] = node->capacity_bytes != 0;
        for (uint32_t j = 0; j < i && work->first[i]; j++)
            if (work->first[j] && same_channels(&machine->nodes[j], node))
                work->first[i] = false;
    }
    return 0;
}

/* Read bandwidth of a domain, bytes a second. */
static double domain_bandwidth(const struct work *work, uint32_t domain, enum source *source)
{
    const struct numoe_machine *machine = work->machine;
    const double *node_gbs = work->options->node_gbs;
    enum numoe_node_kind kind = NUMOE_NODE_DRAM;
    uint32_t package = NUMOE_NONE, peers = 0, nodes = 0, without = 0;
    double given = 0, known = 0, assumed;
    enum source given_by = GIVEN;

    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct numoe_node *node = &machine->nodes[i];
        double own = node_gbs ? node_gbs[i] : 0; /* of this node while all are read */

        if (node->domain != domain)
            continue;
        if (!(own > 0) && machine->together_mbs && machine->together_mbs[i]) {
            own = (double)machine->together_mbs[i] / 1e3;
            given_by = KNOWN;
        }
        nodes++;
        kind = node->kind;
        package = node->package;
        given += own;
        without += !(own > 0);
        known = fmax(known, (double)alone_mbs(machine, i) * 1e6);
    }
    if (given > 0 && !without) {
        *source = given_by;
        return given * 1e9;
    }
    *source = known > 0 ? KNOWN : ASSUMED;
    if (!(known > 0)) {
        /* the package's channels, shared evenly by its domains of this kind */
        for (uint32_t i = 0; i < machine->node_count; i++)
            peers += work->first[i] && machine->nodes[i].kind == kind &&
                     machine->nodes[i].package == package;
        peers = peers ? peers : 1;
        assumed = kind == NUMOE_NODE_HBM    ? hbm_package_gbs / peers
                  : kind == NUMOE_NODE_SLOW ? slow_node_gbs
                                            : work->guess.package_gbs / peers;
        /* nodes above or beside packages (one node over several, or unknown): all packages' */
        if (kind != NUMOE_NODE_SLOW && package == NUMOE_NONE && machine->package_count > 1)
            assumed *= machine->package_count;
        known = assumed * 1e9 * PREDICT_CHANNEL_FRACTION;
    }
    /* where only some nodes were given a figure, the others have their part of the domain's */
    if (given > 0) {
        *source = given_by;
        return given * 1e9 + known * without / nodes;
    }
    return known;
}

static int bandwidth(struct work *work, struct numoe_error *error)
{
    static const char *const words[] = {"given", "known of the machine", "assumed"};
    const struct numoe_machine *machine = work->machine;
    double *part = calloc(machine->domain_count ? machine->domain_count : 1, sizeof *part);
    uint32_t used = 0, by_source[3] = {0};
    struct box *box = &work->box;

    work->domain_read =
        calloc(machine->domain_count ? machine->domain_count : 1, sizeof *work->domain_read);
    if (!part || !work->domain_read || find_first(work)) {
        free(part);
        return numoe_error_set(error, -ENOMEM, work->plan->source, "out of memory");
    }
    for (uint32_t i = 0; i < work->plan->node_count; i++) {
        const struct numoe_plan_node *node = &work->plan->nodes[i];

        part[machine->nodes[node->node].domain] += node->weight;
        box->nodes += node->weight > 0;
        box->lanes += node->weight > 0 ? node->lanes : 0;
    }
    box->read = INFINITY;
    for (uint32_t d = 0; d < machine->domain_count; d++) {
        enum source source;
        double has, reached;

        if (!(part[d] > 0))
            continue;
        has = domain_bandwidth(work, d, &source);
        by_source[source]++;
        used++;
        box->all_read += has;
        work->domain_read[d] = has;
        reached = has / part[d];
        if (reached < box->read) {
            box->read = reached;
            box->tightest = d;
            box->tight_part = part[d];
        }
    }
    free(part);
    box->domains = used;
    work->assumed = by_source[ASSUMED] != 0;
    if (by_source[ASSUMED] == used)
        figure(work, "memory bandwidth", "GB/s", box->all_read / 1e9, true,
               "%u domain%s; assumed: %s%s%s, %.1f GB/s a package, of which reading reaches %.2f",
               used, used > 1 ? "s" : "", work->guess.name ? work->guess.name : "an unknown CPU",
               " has ", work->guess.channels, work->guess.package_gbs, PREDICT_CHANNEL_FRACTION);
    else if (by_source[ASSUMED] || (by_source[GIVEN] && by_source[KNOWN]))
        figure(work, "memory bandwidth", "GB/s", box->all_read / 1e9, by_source[ASSUMED] != 0,
               "%u domains: %u given, %u known of the machine, %u assumed by the CPU's name", used,
               by_source[GIVEN], by_source[KNOWN], by_source[ASSUMED]);
    else
        figure(work, "memory bandwidth", "GB/s", box->all_read / 1e9, false, "%u domain%s; %s",
               used, used > 1 ? "s" : "", words[by_source[GIVEN] ? GIVEN : KNOWN]);
    if (box->read < box->all_read * 0.98)
        figure(work, "as the plan uses it", "GB/s", box->read / 1e9, by_source[ASSUMED] != 0,
               "one domain holds %.1f %% of the weights and is read last", box->tight_part * 100);
    return 0;
}

/* Cores that serve the plan's nodes, whether workers are on them or not. */
static double count_cores(const struct work *work)
{
    double count = 0;

    for (uint32_t i = 0; i < work->plan->node_count; i++)
        count += work->machine->nodes[work->plan->nodes[i].node].core_count;
    return count > 1 ? count : 1;
}

static int cores(struct work *work, struct numoe_error *error)
{
    const struct numoe_machine *machine = work->machine;
    const struct numoe_plan *plan = work->plan;
    const struct cpu_guess *guess = &work->guess;
    bool *core = calloc((size_t)machine->core_count + 1, sizeof *core);
    bool *package = calloc((size_t)machine->package_count + 1, sizeof *package);
    double each, count = 0, slow = 0;
    double ghz = work->options->ghz > 0 ? work->options->ghz : guess->ghz;
    struct box *box = &work->box;
    uint32_t fastest = 0;
    char some[64] = "";
    bool from_memory;

    if (!core || !package) {
        free(core);
        free(package);
        return numoe_error_set(error, -ENOMEM, plan->source, "out of memory");
    }
    for (uint32_t i = 0; i < plan->worker_count; i++)
        if (machine->pus[plan->workers[i].pu].efficiency > fastest)
            fastest = machine->pus[plan->workers[i].pu].efficiency;
    for (uint32_t i = 0; i < plan->worker_count; i++) {
        const struct numoe_pu *pu = &machine->pus[plan->workers[i].pu];
        uint32_t at = pu->package < machine->package_count ? pu->package : machine->package_count;

        count += !core[pu->core];
        slow += !core[pu->core] && pu->efficiency < fastest;
        core[pu->core] = true;
        box->packages += !package[at];
        package[at] = true;
    }
    free(core);
    free(package);
    box->workers = plan->worker_count;
    /* what was measured or given was read by cores: each has its part of it at the least */
    each = guess->core_read_gbs * 1e9;
    from_memory = !work->assumed && box->all_read > each * count_cores(work);
    if (from_memory)
        each = box->all_read / count_cores(work);
    box->core_read = count * each;
    /* as shares have it */
    box->ops = (count - slow / 2) * guess->ops_a_cycle * ghz * 1e9;
    box->reads = guess->reads;
    box->multiplies = guess->multiplies;
    if (slow > 0)
        snprintf(some, sizeof some, ", %.0f of them of a slower kind and counted half,", slow);
    figure(work, "cores reading", "GB/s", box->core_read / 1e9, !from_memory,
           "%.0f cores of %.1f GB/s each; %s", count, each / 1e9,
           from_memory ? "their part of the memory bandwidth" : "assumed");
    figure(work, "int8 arithmetic", "Top/s", box->ops / 1e12,
           !(work->options->ghz > 0) && !guess->ghz_from_name,
           "%.0f cores%s of %.0f int8 operations a cycle (%s, %s) at %.2f GHz (%s)", count, some,
           guess->ops_a_cycle, guess->isa, guess->ops_words, ghz,
           work->options->ghz > 0 ? "given"
           : guess->ghz_from_name ? "in the CPU's name"
                                  : "assumed");
    figure(work, "CPU kernels", "of arithmetic", box->multiplies, !guess->measured,
           "and %.2f of reading; %s", box->reads,
           guess->measured ? "measured by numoe bench with these instructions"
                           : "as measured with similar instructions");
    return 0;
}

/* From machine and plan to the CPUs' part of the box. */
static int fill_box(struct work *work, struct numoe_error *error)
{
    const struct numoe_expert_shape *shape = &work->plan->shape;
    const struct numoe_expert_shape held = numoe_plan_held(work->plan);
    struct numoe_plan_reach reach[NUMOE_REACHES];
    struct box *box = &work->box;
    int rc;

    box->layers = (double)held.layers;
    box->experts = (double)held.experts;
    /* of a token's experts those that are held here, on average */
    box->top_k = (double)held.experts_per_token * box->experts / (double)shape->experts;
    box->call_top_k = (double)held.experts_per_token;
    box->hidden = (double)held.hidden;
    box->intermediate = (double)held.slices * 32;
    box->expert_bytes = (double)held.slices * (double)held.slice_bytes + (double)held.expert_bytes;
    numoe_plan_reaches(work->plan, reach);
    for (enum numoe_reach r = NUMOE_REACH_DOMAIN; r < NUMOE_REACHES; r++)
        box->reach[r] = (struct box_reach){
            .groups = reach[r].groups,
            .rows = reach[r].rows,
            .far = reach[r].pairs ? (double)reach[r].far_tenths / 10 / (double)reach[r].pairs : 0,
        };
    rc = bandwidth(work, error);
    if (!rc)
        rc = cores(work, error);
    if (!rc && predict_bins(work->machine, work->plan, work->domain_read, box->read, &work->bins))
        rc = numoe_error_set(error, -ENOMEM, work->plan->source, "out of memory");
    box->bins = &work->bins;
    return rc;
}

static int add_gpu(struct work *work, const struct numoe_predict_gpu *gpu)
{
    struct numoe_prediction *out = work->out;
    struct numoe_predict_gpu *mine = &out->gpus[out->gpu_count];
    bool known, old;

    *mine = *gpu;
    mine->name[sizeof mine->name - 1] = 0;
    known = predict_guess_gpu(mine, &old) || (gpu->tflops > 0 && gpu->memory_gbs > 0);
    work->box.gpus[out->gpu_count++] = (struct box_gpu){
        .link = mine->link_gbs * 1e9,
        .memory_bytes = (double)mine->memory_bytes,
        .flops = mine->tflops * 1e12,
        .multiplies = predict_guess_multiplies(mine->name),
        .memory = mine->memory_gbs * 1e9,
    };
    work->box.gpu_count = out->gpu_count;
    if (old && topo_note(&out->notes, &out->note_count,
                         "GPU %s is of a compute capability below 8.0: this version has no code "
                         "for it, what is predicted is what its link and memory allow",
                         mine->name))
        return -ENOMEM;
    if (!known && topo_note(&out->notes, &out->note_count,
                            "GPU %s is not known by its name: %.0f TFLOP/s and %.0f GB/s of "
                            "device memory are assumed",
                            mine->name, mine->tflops, mine->memory_gbs))
        return -ENOMEM;
    return 0;
}

static int gpus(struct work *work, struct numoe_error *error)
{
    const struct numoe_predict_options *options = work->options;
    const struct numoe_machine *machine = work->machine;
    uint32_t room = options->gpus ? options->gpu_count : machine->device_count;
    struct numoe_prediction *out = work->out;
    uint32_t left_out = 0;
    double link = 0;

    if (options->gpus && options->gpu_count > BOX_MOST_GPUS)
        return numoe_error_set(error, -EINVAL, "gpu", "%u GPUs are more than %d",
                               options->gpu_count, BOX_MOST_GPUS);
    out->gpus = calloc((size_t)room + 1, sizeof *out->gpus);
    if (!out->gpus)
        goto memory;
    for (uint32_t i = 0; options->gpus && i < options->gpu_count; i++) {
        const struct numoe_predict_gpu *gpu = &options->gpus[i];
        bool there = false;

        for (uint32_t n = 0; n < machine->node_count; n++)
            there |= machine->nodes[n].os_index == gpu->node;
        if (!there)
            return numoe_error_set(error, -EINVAL, "gpu", "GPU %.31s: there is no memory node %u",
                                   gpu->name, gpu->node);
        if (!(gpu->link_gbs > 0) || !isfinite(gpu->link_gbs) || gpu->tflops < 0 ||
            gpu->memory_gbs < 0)
            return numoe_error_set(error, -EINVAL, "gpu", "GPU %.31s: a link of %g GB/s is no link",
                                   gpu->name, gpu->link_gbs);
        if (add_gpu(work, gpu))
            goto memory;
    }
    for (uint32_t i = 0; !options->gpus && i < room; i++) {
        const struct numoe_device *device = &machine->devices[i];
        struct numoe_predict_gpu gpu = {.node = NUMOE_NONE};

        if (!device->gpu)
            continue;
        if (!(device->link_gbs > 0) || !device->memory_bytes || out->gpu_count == BOX_MOST_GPUS) {
            left_out++;
            continue;
        }
        memcpy(gpu.name, device->name, sizeof gpu.name);
        gpu.link_gbs = device->link_gbs * link_fraction;
        gpu.memory_bytes = device->memory_bytes;
        if (device->locality_known && device->node_count)
            gpu.node = machine->nodes[device->nodes[0]].os_index;
        if (add_gpu(work, &gpu))
            goto memory;
    }
    if (left_out && topo_note(&out->notes, &out->note_count,
                              "%u GPU%s of the machine %s not predicted with: link or memory not "
                              "known, or too many; GPUs that are described are",
                              left_out, left_out > 1 ? "s" : "", left_out > 1 ? "are" : "is"))
        goto memory;
    for (uint32_t i = 0; i < out->gpu_count; i++)
        link += out->gpus[i].link_gbs;
    if (out->gpu_count)
        figure(work, "links", "GB/s", link, !options->gpus, "%u GPU%s; %s", out->gpu_count,
               out->gpu_count > 1 ? "s" : "",
               options->gpus ? "given" : "as PCIe says, of which copies reach 0.88");
    if (out->gpu_count) {
        double peak = 0, reached = 0;
        bool measured = true;

        for (uint32_t i = 0; i < out->gpu_count; i++) {
            peak += work->box.gpus[i].flops;
            reached += work->box.gpus[i].flops * work->box.gpus[i].multiplies;
            measured = measured && strcasestr(out->gpus[i].name, "h200") != NULL;
        }
        figure(work, "tensor peaks", "TFLOP/s", peak / 1e12, false,
               "dense bf16 of %u GPU%s, by data sheet where it was not given", out->gpu_count,
               out->gpu_count > 1 ? "s" : "");
        figure(work, "GPU kernels", "of that", reached / peak, !measured,
               "measured by numoe bench --gpu on an H200, by mma.sync or, for Hopper, by wgmma");
    }
    return 0;
memory:
    return numoe_error_set(error, -ENOMEM, work->plan->source, "out of memory");
}

static int cells(struct work *work, struct numoe_error *error)
{
    const struct numoe_predict_options *options = work->options;
    const uint32_t *tokens = options->tokens ? options->tokens : usual_tokens;
    uint32_t count = options->tokens ? options->token_count : USUAL_TOKENS;
    struct numoe_prediction *out = work->out;

    if (!count || count > UINT32_MAX / NUMOE_WAYS)
        return numoe_error_set(error, -EINVAL, "tokens", "%u sizes are none or too many", count);
    out->cells = calloc((size_t)count * NUMOE_WAYS, sizeof *out->cells);
    if (!out->cells)
        return numoe_error_set(error, -ENOMEM, work->plan->source, "out of memory");
    for (enum numoe_way way = 0; way < NUMOE_WAYS; way++) {
        if (way != NUMOE_WAY_CPU && !work->box.gpu_count)
            continue;
        if (way == NUMOE_WAY_STREAM && work->box.gpu_count < 2)
            continue;
        for (uint32_t i = 0; i < count; i++) {
            if (!tokens[i])
                return numoe_error_set(error, -EINVAL, "tokens", "a pass of 0 tokens is none");
            predict_cell(&work->box, way, tokens[i], &out->cells[out->cell_count++]);
        }
    }
    return 0;
}

/* Copy and check what both entries take. The box and its bins are the caller's to free. */
static int begin(struct work *work, struct numoe_predict_options *options,
                 const struct numoe_predict_options *given, struct numoe_error *error)
{
    const struct numoe_machine *machine = work->machine;
    const struct numoe_plan *plan = work->plan;

    if (given)
        memcpy(options, given, given->size < sizeof *options ? given->size : sizeof *options);
    work->options = options;
    if (!plan->shape.layers || !plan->shape.experts || !plan->shape.experts_per_token ||
        !plan->shape.hidden)
        return numoe_error_set(error, -EINVAL, "numoe_predict", "the plan is without a model");
    for (uint32_t i = 0; options->node_gbs && i < machine->node_count; i++)
        if (!(options->node_gbs[i] >= 0) || !isfinite(options->node_gbs[i]))
            return numoe_error_set(error, -EINVAL, "node-bandwidth",
                                   "node %u: %g GB/s is no bandwidth", machine->nodes[i].os_index,
                                   options->node_gbs[i]);
    if (!predict_guess_cpu(machine->cpu_model, options->isa, &work->guess))
        return numoe_error_set(error, -EINVAL, "isa", "\"%s\" are no known instructions",
                               options->isa);
    work->out = calloc(1, sizeof *work->out);
    if (!work->out)
        return numoe_error_set(error, -ENOMEM, plan->source, "out of memory");
    if (options->without_kernel)
        snprintf(work->out->without_kernel, sizeof work->out->without_kernel, "%s",
                 options->without_kernel);
    return fill_box(work, error);
}

int predict_box(const struct numoe_machine *machine, const struct numoe_plan *plan,
                const struct numoe_predict_options *given, struct box *box, struct box_bins *bins,
                struct numoe_error *error)
{
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct work work = {.machine = machine, .plan = plan};
    int rc = begin(&work, &options, given, error);

    *box = work.box;
    *bins = work.bins;
    box->bins = bins;
    free(work.domain_read);
    free(work.first);
    numoe_prediction_free(work.out); /* where figures come from is for numoe_predict to say */
    return rc;
}

int numoe_predict(const struct numoe_machine *machine, const struct numoe_plan *plan,
                  const struct numoe_predict_options *given, struct numoe_prediction **prediction,
                  struct numoe_error *error)
{
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct work work = {.machine = machine, .plan = plan};
    int rc;

    if (!machine || !plan || !prediction || (given && given->size < sizeof given->size))
        return numoe_error_set(error, -EINVAL, "numoe_predict", "machine or plan missing");
    rc = begin(&work, &options, given, error);
    if (!rc)
        rc = gpus(&work, error);
    if (!rc)
        rc = cells(&work, error);
    if (!rc && predict_memory(machine, plan, &options, work.out))
        rc = numoe_error_set(error, -ENOMEM, plan->source, "out of memory");
    if (!rc && predict_prefill(&work.box, options.tokens, options.token_count, work.out))
        rc = numoe_error_set(error, -ENOMEM, plan->source, "out of memory");
    if (!rc) {
        predict_passing(&work.box, &work.out->passing);
        predict_what_ifs(&work.box, work.out);
    }
    box_bins_free(&work.bins);
    free(work.domain_read);
    free(work.first);
    if (rc)
        numoe_prediction_free(work.out);
    else
        *prediction = work.out;
    return rc;
}

void numoe_prediction_free(struct numoe_prediction *prediction)
{
    if (!prediction)
        return;
    free(prediction->cells);
    free(prediction->gpus);
    free(prediction->prefill);
    free(prediction->nodes);
    topo_notes_free(prediction->notes, prediction->note_count);
    free(prediction);
}
