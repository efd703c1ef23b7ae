/*
 * cli_options.h - what the verbs of the numoe command share: options and their help, exit codes.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CLI_OPTIONS_H
#define NUMOE_CLI_OPTIONS_H

#include "base/numoe_base.h"
#include "base/numoe_types.h"
#include "bench.h"
#include "predict.h"
#include "synth.h"

#include <stdbool.h>
#include <stdint.h>

enum cli_exit {
    CLI_OK = 0,
    CLI_FAILURE = 1,      /* anything that has no code of its own */
    CLI_USAGE = 2,        /* the command line is wrong */
    CLI_NO_ROOM = 3,      /* memory, or the disk for synth, is too small */
    CLI_BAD_INPUT = 4,    /* a file, checkpoint or topology is missing, damaged or not known */
    CLI_CHECK_FAILED = 5, /* results differ from the reference by more than the limit */
    CLI_STALE_PLAN = 6 /* a plan is for another machine, one that has changed, or another model */
};

/* Options by the names they have on the command line; what each means is in cli_options.c. */
enum cli_option {
    CLI_END,
    CLI_ARITHMETIC,
    CLI_ARITHMETICS,
    CLI_AS_IF,
    CLI_BATCH_INVARIANT,
    CLI_CPUS,
    CLI_DEVICE,
    CLI_DOMAINS,
    CLI_DRAFT,
    CLI_DRAFT_TOO,
    CLI_DURATION,
    CLI_EP,
    CLI_EXPERTS,
    CLI_EXPERTS_PER_TOKEN,
    CLI_EXPLAIN,
    CLI_FAMILY,
    CLI_FORM,
    CLI_FORMAT,
    CLI_GPU,
    CLI_GPU_AT,
    CLI_GPU_CACHE,
    CLI_GPU_FROM,
    CLI_GPU_PROFILE,
    CLI_GPUS,
    CLI_GPU_SUM,
    CLI_GPU_TUNING,
    CLI_HIDDEN,
    CLI_INTERMEDIATE,
    CLI_IDLE,
    CLI_ISA,
    CLI_ISAS,
    CLI_JSON,
    CLI_KEEP_FREE,
    CLI_LAYERS,
    CLI_LAYOUT,
    CLI_MEASURE,
    CLI_MEASURE_TIME,
    CLI_MEMORY,
    CLI_MODEL,
    CLI_NODES,
    CLI_NODE_BANDWIDTH,
    CLI_ONCE,
    CLI_OPTIMIZE,
    CLI_PASS_TOKENS,
    CLI_PLAN,
    CLI_PNG,
    CLI_RANK,
    CLI_RANK_NODES,
    CLI_READ,
    CLI_REPEAT,
    CLI_REPORT,
    CLI_RESERVE_CPUS,
    CLI_RESERVE_NODES,
    CLI_RESIDENT,
    CLI_RESUME,
    CLI_ROUTING,
    CLI_SAVE,
    CLI_SEED,
    CLI_SHARE,
    CLI_SMT,
    CLI_SPILL,
    CLI_STATS,
    CLI_STATS_CELLS,
    CLI_STEPS,
    CLI_STREAM,
    CLI_SVG,
    CLI_THREADS,
    CLI_TOKENS,
    CLI_TOPOLOGY,
    CLI_TRACE,
    CLI_TP,
    CLI_TUNE,
    CLI_VERIFY,
    CLI_WORKERS
};

enum { CLI_MAX_ISAS = 8, CLI_MAX_LIST = 65536 };

/* How --stats is to be shown. */
enum cli_stats { CLI_STATS_OFF, CLI_STATS_TEXT, CLI_STATS_JSON, CLI_STATS_PROMETHEUS };

struct cli_list {
    uint32_t *values;
    uint32_t count;
};

/* Read bandwidth of a node by OS index; NUMOE_NONE: of every node. */
struct cli_rate {
    uint32_t node;
    double gbs;
};

/* Memory nodes of a rank, by OS index. */
struct cli_rank_nodes {
    uint32_t rank;
    struct cli_list nodes;
};

enum { CLI_MAX_RANKS = 1024 };

/* What the command line says; zero or NULL where it says nothing. */
struct cli_values {
    const char *directory, *model, *save, *topology, *svg, *png, *plan, *as_if, *trace, *family,
        *gpu_profile, *gpu_tuning, *report, *resume, *tune;
    struct cli_list cpus, nodes, tokens, gpu_devices;
    uint64_t duration_s, experts, idle_s, layers, keep_free_bytes, seed, steps;
    uint64_t experts_per_token, hidden, intermediate, gpu_cache_bytes, gpu_from_tokens;
    enum numoe_format format;
    uint32_t device, repeat, threads, workers;
    enum numoe_gpu_sum gpu_sum;
    bool json, measure, once, smt, gpu, resident, share, stream, spill, batch_invariant;
    bool draft, verify;
    enum numoe_synth_layout layout;
    enum numoe_memory_policy memory_policy;
    enum numoe_read_way read;
    enum numoe_bench_routing routing;
    enum cli_stats stats;
    bool seed_given;
    char *isa_text; /* holds what isas point to */
    const char *isas[CLI_MAX_ISAS];
    uint32_t isa_count;
    enum numoe_arithmetic arithmetics[NUMOE_ARITHMETICS];
    uint32_t arithmetic_count;
    const char *explain;
    enum numoe_form form;
    uint32_t groups;
    enum numoe_objective objective;
    struct cli_list reserved, reserved_nodes;
    uint32_t domains;
    struct numoe_predict_gpu *gpus;
    uint32_t gpu_count;
    struct cli_rate *rates;
    uint32_t rate_count;
    uint32_t tp, ep, rank;
    bool rank_given;
    struct cli_rank_nodes *rank_nodes; /* each rank at most once */
    uint32_t rank_node_count;
};

enum cli_directory { CLI_DIRECTORY_NONE, CLI_DIRECTORY_OPTIONAL, CLI_DIRECTORY_REQUIRED };

struct cli_verb {
    const char *name;
    const char *arguments;   /* for the usage line, after the options */
    const char *summary;     /* one line of numoe --help */
    const char *description; /* paragraphs of numoe VERB --help, ending in a newline */
    enum cli_directory directory;
    const enum cli_option *options;              /* in the order of the help, up to CLI_END */
    int (*run)(const struct cli_values *values); /* returns an exit code */
};

extern const struct cli_verb cli_topo, cli_plan, cli_synth, cli_run, cli_bench, cli_soak,
    cli_certify, cli_version;

/*
 * Read the arguments of a verb. Returns -1 to go on, or the exit code when help was printed or the
 * arguments were refused. values are to be freed in every case.
 */
int cli_parse(const struct cli_verb *verb, int argc, char **argv, struct cli_values *values);
void cli_values_free(struct cli_values *values);

/* The name of an option that says something of GPUs only and was given, or NULL. */
const char *cli_gpu_option(const struct cli_values *values);

/* Digits and nothing else, within 64 bits. end: where the digits stop, or NULL: at the end. */
bool cli_parse_number(const char *text, uint64_t *value, const char **end);
/* "0,2,5-9": distinct or not, in the order given. Returns 0, -EINVAL or -ENOMEM with error. */
int cli_parse_list(const char *text, struct cli_list *list, struct numoe_error *error);
/* "4096", "512M", "16GiB" (binary), "16GB" (decimal). Returns 0 or -EINVAL with error. */
int cli_parse_size(const char *text, uint64_t *bytes, struct numoe_error *error);

/* "a10@4,25GB/s,24GB", appended to values->gpus. Returns 0, -EINVAL or -ENOMEM with error. */
int cli_parse_gpu(const char *text, struct cli_values *values, struct numoe_error *error);
/* "38GB/s" or "0-3=38GB/s", appended to values->rates. Returns likewise. */
int cli_parse_rates(const char *text, struct cli_values *values, struct numoe_error *error);

/* "1:8-15", to values->rank_nodes. Returns likewise. */
int cli_parse_rank_nodes(const char *text, struct cli_values *values, struct numoe_error *error);

/* The table of exit codes, as --help shows it. */
extern const char cli_exit_help[];

#endif
