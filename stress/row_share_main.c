/*
 * numoe-row-share: K-split of down against sharing it by rows, on this machine's workers, beside
 * what the plan's cost function says of the two.
 *
 *     numoe-row-share [--json] [--workers N] [--lanes N] [--domains N] [--tokens LIST]
 *                     [--hidden N] [--intermediate N] [--experts N] [--top-k N]
 *                     [--isa avx2|avx512vnni] [--seconds N] [--repeat N] [--check N] [--seed N]
 *
 * A layer of V4-Flash (or of the sizes given) with random weights, once for each way
 * (row_share.h): two copies in memory. Routing is uniform and fresh in each repetition, which
 * computes the same batch in both ways, one way first and the other first in turns; who does what
 * is laid out before and not timed. Read ceilings of the same workers are measured between turns
 * of repetitions. Workers default to all cores, lanes to 32 in 8 domains, sizes to 1, 16 and 256
 * tokens, time to 4 seconds a size.
 *
 * Outputs are compared with float64 (the last repetition's) and with each other (every
 * repetition's): exit code 5 when they differ.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "row_share.h"

#include "bench.h"
#include "cli_options.h"
#include "cli_output.h"
#include "families.h"
#include "predict_box.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_TURNS = 7, FEWEST_REPETITIONS = 7, MOST_REPETITIONS = 2000, MOST_TOKENS = 4096 };

/* Of outputs: to float64, as numoe bench has it; to each other, the same sums in another order. */
static const double reference_limit = 1.25e-2, mutual_limit = 1e-5;

static const char *const way_names[ROW_SHARE_WAYS] = {"K-split", "row-sharing"};
static const char *const way_keys[ROW_SHARE_WAYS] = {"k_split", "row_sharing"};
static const uint32_t usual_tokens[] = {1, 16, 256};

struct request {
    struct row_share_desc desc;
    struct cli_values values; /* workers, tokens, json */
    const char *isa;
    uint64_t seconds, repeat, check;
};

/* One way with so many tokens. */
struct result {
    double ms, p10, p90;
    double gbs, of_read; /* of weights; part of the read ceiling, median over the turns */
    double exchanged_bytes;
    uint32_t barriers;
    double rel_l2;
    double predicted_ms, predicted_bytes;
};

struct cell {
    uint32_t tokens, repetitions;
    double experts_hit, weight_bytes, rows; /* mean over the repetitions */
    struct result of[ROW_SHARE_WAYS];
    double ratio, ratio_p10, ratio_p90; /* row-sharing over K-split, repetition by repetition */
    double apart;                       /* most relative L2 between the two */
    double read_gbs, read_least, read_most, peak_gops;
    bool wrong;
};

/* ---- what the plan says ---------------------------------------------------------------------- */

/* The machine as it was measured, in the numbers that forms are weighed by: its workers and
 * channels shared evenly by the domains. */
static void predict(const struct request *request, uint32_t workers, double expert_bytes,
                    struct cell *cell)
{
    const struct row_share_desc *desc = &request->desc;
    struct box box = {
        .layers = 1,
        .experts = (double)desc->experts,
        .top_k = (double)desc->top_k,
        .call_top_k = (double)desc->top_k,
        .hidden = (double)desc->hidden,
        .intermediate = (double)desc->intermediate,
        .expert_bytes = expert_bytes,
        .read = cell->read_gbs * 1e9,
        .all_read = cell->read_gbs * 1e9,
        .core_read = cell->read_gbs * 1e9,
        .ops = cell->peak_gops * 1e9,
        .workers = workers,
        .packages = 1,
        .nodes = desc->domains,
        .lanes = desc->lanes,
        .domains = desc->domains,
        .tight_part = 1.0 / desc->domains,
    };

    for (enum numoe_reach r = NUMOE_REACH_DOMAIN; r < NUMOE_REACHES; r++)
        box.reach[r] = (struct box_reach){.groups = desc->domains, .rows = desc->domains};
    for (int way = 0; way < ROW_SHARE_WAYS; way++) {
        struct box_form form;

        box.rows = way == ROW_SHARE_ROWS;
        predict_form(&box, cell->tokens, &form);
        cell->of[way].predicted_ms = form.layer_ms;
        cell->of[way].predicted_bytes = (double)form.reduction_bytes;
    }
}

/* ---- measuring ------------------------------------------------------------------------------- */

struct work {
    const struct request *request;
    struct row_share *layer;
    struct numoe_bench *bench;
    struct numoe_bench_random random;
    uint16_t *x;
    int32_t *ids;
    float *weights, *out[ROW_SHARE_WAYS];
    struct row_share_cost cost; /* of the batch at hand */
    double seconds[ROW_SHARE_WAYS];
};

static double apart(const struct work *work, uint64_t tokens)
{
    double difference = 0, size = 0, relative;

    for (uint64_t i = 0; i < tokens * work->request->desc.hidden; i++) {
        const double a = (double)work->out[0][i], b = (double)work->out[1][i];

        difference += (a - b) * (a - b);
        size += a * a;
    }
    relative = sqrt(difference / size);
    return isfinite(relative) ? relative : INFINITY;
}

/* Both ways with fresh routing; `first` goes first. */
static int repeat_once(struct work *work, struct cell *cell, enum row_share_way first)
{
    const struct row_share_desc *desc = &work->request->desc;
    const struct row_share_batch batch = {cell->tokens, work->x, work->ids, work->weights};
    double off;
    int rc;

    numoe_bench_route(&work->random, cell->tokens, desc->top_k, desc->experts, work->ids,
                      work->weights);
    rc = row_share_lay_out(work->layer, &batch, &work->cost);
    for (int i = 0; !rc && i < ROW_SHARE_WAYS; i++) {
        const enum row_share_way way = i ? ROW_SHARE_WAYS - 1 - first : first;
        const double begin = numoe_bench_seconds();

        rc = row_share_run(work->layer, way, work->out[way]);
        work->seconds[way] = numoe_bench_seconds() - begin;
    }
    if (rc)
        return rc;
    off = apart(work, cell->tokens);
    cell->apart = off > cell->apart ? off : cell->apart;
    return 0;
}

/* Timings of the repetitions. */
struct series {
    double *ms[ROW_SHARE_WAYS], *gbs[ROW_SHARE_WAYS], *ratio;
};

static void note(const struct work *work, struct cell *cell, struct series *series, uint32_t at)
{
    for (int way = 0; way < ROW_SHARE_WAYS; way++) {
        struct result *result = &cell->of[way];

        series->ms[way][at] = work->seconds[way] * 1e3;
        series->gbs[way][at] = (double)work->cost.weight_bytes / work->seconds[way] * 1e-9;
        result->exchanged_bytes +=
            (double)work->cost.exchanged_bytes[way] / (double)cell->repetitions;
        result->barriers = work->cost.barriers[way];
    }
    series->ratio[at] = work->seconds[ROW_SHARE_ROWS] / work->seconds[ROW_SHARE_K_SPLIT];
    cell->experts_hit += (double)work->cost.experts_hit / cell->repetitions;
    cell->weight_bytes += (double)work->cost.weight_bytes / cell->repetitions;
    cell->rows += (double)work->cost.rows / cell->repetitions;
}

/* Medians, once the turns' fractions are known. */
static void conclude(struct cell *cell, struct series *series)
{
    const size_t n = cell->repetitions;

    for (int way = 0; way < ROW_SHARE_WAYS; way++) {
        cell->of[way].ms = numoe_bench_quantile(series->ms[way], n, 0.5);
        cell->of[way].p10 = numoe_bench_quantile(series->ms[way], n, 0.1);
        cell->of[way].p90 = numoe_bench_quantile(series->ms[way], n, 0.9);
        cell->of[way].gbs = numoe_bench_quantile(series->gbs[way], n, 0.5);
    }
    cell->ratio = numoe_bench_quantile(series->ratio, n, 0.5);
    cell->ratio_p10 = numoe_bench_quantile(series->ratio, n, 0.1);
    cell->ratio_p90 = numoe_bench_quantile(series->ratio, n, 0.9);
}

static int measure_turns(struct work *work, struct cell *cell, struct series *series)
{
    const uint32_t turns = cell->repetitions < MOST_TURNS ? cell->repetitions : MOST_TURNS;
    double reads[MOST_TURNS + 1], peaks[MOST_TURNS], of_read[ROW_SHARE_WAYS][MOST_TURNS];
    double *scratch = calloc(cell->repetitions, sizeof *scratch);
    uint32_t done = 0;
    int rc = scratch ? 0 : -ENOMEM;

    reads[0] = rc ? 0 : numoe_bench_ceiling(work->bench, NUMOE_CEILING_READ);
    for (uint32_t turn = 0; !rc && turn < turns; turn++) {
        const uint32_t begin = done;
        const uint32_t end = (uint32_t)((uint64_t)cell->repetitions * (turn + 1) / turns);

        for (; !rc && done < end; done++) {
            rc = repeat_once(work, cell, done % 2 ? ROW_SHARE_ROWS : ROW_SHARE_K_SPLIT);
            if (!rc)
                note(work, cell, series, done);
        }
        peaks[turn] = numoe_bench_ceiling(work->bench, NUMOE_CEILING_INT8);
        reads[turn + 1] = numoe_bench_ceiling(work->bench, NUMOE_CEILING_READ);
        for (int way = 0; !rc && way < ROW_SHARE_WAYS; way++) {
            memcpy(scratch, series->gbs[way] + begin, (end - begin) * sizeof *scratch);
            of_read[way][turn] = numoe_bench_quantile(scratch, end - begin, 0.5) /
                                 ((reads[turn] + reads[turn + 1]) / 2);
        }
    }
    free(scratch);
    if (rc)
        return rc;
    for (int way = 0; way < ROW_SHARE_WAYS; way++)
        cell->of[way].of_read = numoe_bench_quantile(of_read[way], turns, 0.5);
    cell->peak_gops = numoe_bench_quantile(peaks, turns, 0.5);
    cell->read_gbs = numoe_bench_quantile(reads, turns + 1, 0.5);
    cell->read_least = reads[0];
    cell->read_most = reads[turns];
    conclude(cell, series);
    return 0;
}

static int measure_cell(struct work *work, struct cell *cell)
{
    const struct request *request = work->request;
    struct series series;
    double *all, seconds;
    /* the first grows what is needed, the second tells how long it takes */
    int rc = repeat_once(work, cell, ROW_SHARE_K_SPLIT);

    if (!rc)
        rc = repeat_once(work, cell, ROW_SHARE_ROWS);
    if (rc)
        return rc;
    seconds = work->seconds[0] + work->seconds[1];
    cell->repetitions =
        request->repeat
            ? (uint32_t)request->repeat
            : (uint32_t)fmax(FEWEST_REPETITIONS,
                             fmin(MOST_REPETITIONS, (double)request->seconds / seconds));
    all = calloc(cell->repetitions, (2 * ROW_SHARE_WAYS + 1) * sizeof *all);
    if (!all)
        return -ENOMEM;
    for (int way = 0; way < ROW_SHARE_WAYS; way++) {
        series.ms[way] = all + (size_t)(2 * way) * cell->repetitions;
        series.gbs[way] = all + (size_t)(2 * way + 1) * cell->repetitions;
    }
    series.ratio = all + (size_t)(2 * ROW_SHARE_WAYS) * cell->repetitions;
    rc = measure_turns(work, cell, &series);
    free(all);
    return rc;
}

static int check_cell(struct work *work, struct cell *cell)
{
    const float *const out[ROW_SHARE_WAYS] = {work->out[0], work->out[1]};
    double rel_l2[ROW_SHARE_WAYS] = {INFINITY, INFINITY};
    int rc =
        work->request->check ? row_share_check(work->layer, work->request->check, out, rel_l2) : 0;

    for (int way = 0; way < ROW_SHARE_WAYS; way++) {
        cell->of[way].rel_l2 = work->request->check ? rel_l2[way] : NAN;
        cell->wrong |= work->request->check && !(rel_l2[way] <= reference_limit);
    }
    cell->wrong |= !(cell->apart <= mutual_limit);
    return rc;
}

/* ---- the answer ------------------------------------------------------------------------------ */

static void print_head(const struct request *request, const struct row_share *layer,
                       const char *isa, uint32_t workers)
{
    const struct row_share_desc *desc = &request->desc;

    printf("a layer of %" PRIu64 " experts, %" PRIu64 " a token; hidden %" PRIu64
           ", intermediate %" PRIu64 ", MXFP4: %.2f GB, once for each way\n"
           "%" PRIu32 " lanes in %" PRIu32 " domains, %" PRIu32 " worker%s; fast %s, the few-token "
           "form at any size\n\n",
           desc->experts, desc->top_k, desc->hidden, desc->intermediate,
           (double)row_share_weight_bytes(layer) / 1e9, desc->lanes, desc->domains, workers,
           workers == 1 ? "" : "s", isa);
    printf("tokens                   ms   (p10 - p90)                GB/s  of read  exchanged MB  "
           "barriers   rel. L2   plan: ms        MB\n");
}

static void print_cell(const struct cell *cell)
{
    const double plan =
        cell->of[ROW_SHARE_ROWS].predicted_ms / cell->of[ROW_SHARE_K_SPLIT].predicted_ms;

    for (int way = 0; way < ROW_SHARE_WAYS; way++) {
        const struct result *r = &cell->of[way];

        if (way)
            printf("       ");
        else
            printf("%6" PRIu32 " ", cell->tokens);
        printf("%-11s %9.3f   (%.3f - %.3f)%*s %6.1f %8.3f %13.3f %9" PRIu32 "  %8.2e %10.3f "
               "%9.3f\n",
               way_names[way], r->ms, r->p10, r->p90,
               24 - snprintf(NULL, 0, "(%.3f - %.3f)", r->p10, r->p90), "", r->gbs, r->of_read,
               r->exchanged_bytes / 1e6, r->barriers, r->rel_l2, r->predicted_ms,
               r->predicted_bytes / 1e6);
    }
    printf("       rows / K    %9.3f   (%.3f - %.3f)   plan %.3f; read %.1f GB/s (%.1f - %.1f); "
           "%" PRIu32 " repetitions; %.1f experts hit, %.0f partial outputs; apart %.1e%s\n",
           cell->ratio, cell->ratio_p10, cell->ratio_p90, plan, cell->read_gbs, cell->read_least,
           cell->read_most, cell->repetitions, cell->experts_hit, cell->rows, cell->apart,
           cell->wrong ? "  WRONG" : "");
    fflush(stdout);
}

static json_t *cell_json(const struct cell *cell)
{
    json_t *object = json_pack(
        "{s:i, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:o, s:b}", "tokens",
        (int)cell->tokens, "repetitions", (int)cell->repetitions, "experts_hit", cell->experts_hit,
        "weight_bytes", cell->weight_bytes, "partial_outputs", cell->rows, "ratio", cell->ratio,
        "ratio_p10", cell->ratio_p10, "ratio_p90", cell->ratio_p90, "read_gbs", cell->read_gbs,
        "read_gbs_min", cell->read_least, "read_gbs_max", cell->read_most, "peak_gops",
        cell->peak_gops, "apart", cli_json_number(cell->apart), "wrong", cell->wrong);

    json_object_set_new(object, "predicted_ratio",
                        cli_json_number(cell->of[ROW_SHARE_ROWS].predicted_ms /
                                        cell->of[ROW_SHARE_K_SPLIT].predicted_ms));
    for (int way = 0; way < ROW_SHARE_WAYS; way++) {
        const struct result *r = &cell->of[way];

        json_object_set_new(
            object, way_keys[way],
            json_pack("{s:f, s:f, s:f, s:f, s:o, s:f, s:i, s:o, s:f, s:f}", "ms", r->ms, "ms_p10",
                      r->p10, "ms_p90", r->p90, "gbs", r->gbs, "bandwidth_fraction",
                      cli_json_number(r->of_read), "exchanged_bytes", r->exchanged_bytes,
                      "barriers", (int)r->barriers, "rel_l2", cli_json_number(r->rel_l2),
                      "predicted_ms", r->predicted_ms, "predicted_bytes", r->predicted_bytes));
    }
    return object;
}

static json_t *head_json(const struct request *request, const char *isa, uint32_t workers)
{
    const struct row_share_desc *desc = &request->desc;

    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:s, s:[]}", "hidden", (int)desc->hidden,
                     "intermediate", (int)desc->intermediate, "experts", (int)desc->experts,
                     "experts_per_token", (int)desc->top_k, "lanes", (int)desc->lanes, "domains",
                     (int)desc->domains, "workers", (int)workers, "isa", isa, "results");
}

/* ---- the program ----------------------------------------------------------------------------- */

static int run_cells(struct work *work, const char *isa, uint32_t workers)
{
    const struct request *request = work->request;
    const uint32_t *tokens =
        request->values.tokens.values ? request->values.tokens.values : usual_tokens;
    const uint32_t count = request->values.tokens.values ? request->values.tokens.count
                                                         : sizeof usual_tokens / sizeof *tokens;
    const double expert =
        (double)row_share_weight_bytes(work->layer) / (double)request->desc.experts;
    json_t *head = request->values.json ? head_json(request, isa, workers) : NULL;
    bool wrong = false;
    int code = CLI_OK;

    if (!head)
        print_head(request, work->layer, isa, workers);
    for (uint32_t i = 0; i < count && !code; i++) {
        struct cell cell = {.tokens = tokens[i]};
        int rc = measure_cell(work, &cell);

        if (!rc)
            rc = check_cell(work, &cell);
        if (rc) {
            cli_error("row-share", "%" PRIu32 " tokens: %s", tokens[i], strerror(-rc));
            code = CLI_FAILURE;
            break;
        }
        predict(request, workers, expert, &cell);
        wrong |= cell.wrong;
        if (head)
            json_array_append_new(json_object_get(head, "results"), cell_json(&cell));
        else
            print_cell(&cell);
    }
    if (head)
        code = code ? (json_decref(head), code) : cli_print_json(head);
    else
        code = cli_flush(code);
    return code == CLI_OK && wrong ? CLI_CHECK_FAILED : code;
}

static int run_batches(struct work *work, const char *isa, uint32_t workers)
{
    const struct row_share_desc *desc = &work->request->desc;
    const struct cli_list *tokens = &work->request->values.tokens;
    uint64_t most = tokens->count ? 0 : 256;
    int code = CLI_FAILURE;

    for (uint32_t i = 0; i < tokens->count; i++)
        most = tokens->values[i] > most ? tokens->values[i] : most;
    work->random.state = desc->seed;
    work->x = calloc(most * desc->hidden, sizeof *work->x);
    work->ids = calloc(most * desc->top_k, sizeof *work->ids);
    work->weights = calloc(most * desc->top_k, sizeof *work->weights);
    for (int way = 0; way < ROW_SHARE_WAYS; way++)
        work->out[way] = calloc(most * desc->hidden, sizeof *work->out[way]);
    if (work->x && work->ids && work->weights && work->out[0] && work->out[1]) {
        numoe_bench_activations(&work->random, work->x, most * desc->hidden);
        code = run_cells(work, isa, workers);
    } else {
        cli_error("row-share", "no room for %" PRIu64 " tokens", most);
    }
    free(work->x);
    free(work->ids);
    free(work->weights);
    for (int way = 0; way < ROW_SHARE_WAYS; way++)
        free(work->out[way]);
    return code;
}

static int run(const struct request *request)
{
    const struct row_share_kernels *kernels = row_share_kernels_select(request->isa);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct work work = {.request = request};
    struct numoe *context;
    int code;

    if (!kernels) {
        cli_error("row-share", "there are kernels for avx2 and avx512vnni, and this CPU has not %s",
                  request->isa ? request->isa : "either");
        return CLI_USAGE;
    }
    code = cli_open("row-share", &request->values, kernels->set.isa, &context);
    if (code)
        return code;
    if (row_share_create(&request->desc, numoe_context_pool(context), kernels, &work.layer,
                         &error)) {
        code = cli_report("row-share", CLI_STAGE_OPTIONS, &error);
        goto close;
    }
    if (numoe_bench_create(context, kernels->set.isa, &work.bench, &error)) {
        code = cli_report("row-share", CLI_STAGE_OPTIONS, &error);
        goto destroy;
    }
    code =
        run_batches(&work, kernels->set.isa, numoe_pool_worker_count(numoe_context_pool(context)));
    numoe_bench_destroy(work.bench);
destroy:
    row_share_destroy(work.layer);
close:
    numoe_close(context);
    return code;
}

static int usage(void)
{
    fprintf(stderr,
            "Usage: numoe-row-share [--json] [--workers N] [--lanes N] [--domains N]\n"
            "                       [--tokens LIST] [--hidden N] [--intermediate N] [--experts N]\n"
            "                       [--top-k N] [--isa avx2|avx512vnni] [--seconds N]\n"
            "                       [--repeat N] [--check N] [--seed N]\n");
    return CLI_USAGE;
}

/* What an option sets, and how much it may be. */
struct number {
    const char *name;
    uint64_t *wide;
    uint32_t *narrow;
    uint64_t least, most;
};

static bool set_number(const struct number *number, const char *text)
{
    uint64_t value;

    if (!cli_parse_number(text, &value, NULL) || value < number->least || value > number->most)
        return false;
    if (number->wide)
        *number->wide = value;
    else
        *number->narrow = (uint32_t)value;
    return true;
}

static bool set_tokens(struct request *request, const char *text)
{
    struct cli_list *list = &request->values.tokens;
    struct numoe_error error = NUMOE_ERROR_INIT;

    free(list->values);
    *list = (struct cli_list){NULL, 0};
    if (cli_parse_list(text, list, &error))
        return false;
    for (uint32_t i = 0; i < list->count; i++)
        if (!list->values[i] || list->values[i] > MOST_TOKENS)
            return false;
    return list->count > 0;
}

static bool parse(int argc, char **argv, struct request *request)
{
    struct row_share_desc *desc = &request->desc;
    const struct number numbers[] = {
        {"--workers", NULL, &request->values.workers, 1, 4096},
        {"--lanes", NULL, &desc->lanes, 1, 4096},
        {"--domains", NULL, &desc->domains, 1, 4096},
        {"--hidden", &desc->hidden, NULL, 1, 1 << 20},
        {"--intermediate", &desc->intermediate, NULL, 1, 1 << 20},
        {"--experts", &desc->experts, NULL, 1, 1 << 16},
        {"--top-k", &desc->top_k, NULL, 1, 64},
        {"--seconds", &request->seconds, NULL, 1, 3600},
        {"--repeat", &request->repeat, NULL, 1, MOST_REPETITIONS},
        {"--check", &request->check, NULL, 0, MOST_TOKENS},
        {"--seed", &desc->seed, NULL, 0, UINT64_MAX},
    };

    for (int i = 1; i < argc; i++) {
        const char *option = argv[i], *value;
        size_t n = 0;

        if (!strcmp(option, "--json")) {
            request->values.json = true;
            continue;
        }
        value = argv[++i]; /* NULL after the last */
        if (!value)
            return false;
        if (!strcmp(option, "--isa")) {
            request->isa = value;
            continue;
        }
        if (!strcmp(option, "--tokens")) {
            if (!set_tokens(request, value))
                return false;
            continue;
        }
        while (n < sizeof numbers / sizeof *numbers && strcmp(option, numbers[n].name) != 0)
            n++;
        if (n == sizeof numbers / sizeof *numbers || !set_number(&numbers[n], value))
            return false;
    }
    return true;
}

int main(int argc, char **argv)
{
    struct request request = {.seconds = 4, .check = 2};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model_desc model;
    int code;

    if (numoe_model_by_name("v4-flash", &model, &error))
        return cli_report("row-share", CLI_STAGE_WORK, &error);
    request.desc = (struct row_share_desc){.hidden = model.hidden,
                                           .intermediate = model.intermediate,
                                           .experts = model.experts,
                                           .top_k = model.experts_per_token,
                                           .activation = model.activation,
                                           .lanes = 32,
                                           .domains = 8,
                                           .seed = 1};
    code = parse(argc, argv, &request) ? run(&request) : usage();
    free(request.values.tokens.values);
    return code;
}
