/* Options of the numoe command. SPDX-License-Identifier: Apache-2.0 */
#include "cli_options.h"

#include "base/checked.h"
#include "cli_output.h"
#include "numoe_gpu.h"
#include "numoe_kernels.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char cli_exit_help[] = "Exit status:\n"
                             "  0  done\n"
                             "  1  failed for a reason not listed here\n"
                             "  2  the command line is wrong\n"
                             "  3  does not fit: memory of a node, or room on the disk, is short\n"
                             "  4  a file, checkpoint or topology is missing, damaged or unknown\n"
                             "  5  results differ from the reference by more than the limit\n"
                             "  6  a plan is for another machine, one that has changed, or another "
                             "model\n";

struct option_text {
    const char *name;
    const char *argument; /* NULL: a switch; "[=...]": may be left out */
    const char *help;     /* lines separated by \n */
};

static const struct option_text option_texts[] = {
    [CLI_ARITHMETIC] = {"arithmetic", "NAME",
                        "activations in int8 (fast), 16-bit fixed point (fine), bf16 (exact) or\n"
                        "MXFP8 (mxfp8, mxfp8-ocp: scale rounded up, OCP's rule) (default: fast)"},
    [CLI_ARITHMETICS] = {"arithmetic", "LIST",
                         "one or several of fast, fine, exact, mxfp8, mxfp8-ocp: activations in\n"
                         "int8, 16-bit fixed point, bf16, MXFP8 by two rules (default: fast)"},
    [CLI_AS_IF] = {"as-if", "FILE",
                   "replay the plan that numoe plan --json wrote for another machine: outputs are\n"
                   "those of that machine bit for bit, on the memory and workers of this one"},
    [CLI_BATCH_INVARIANT] = {"batch-invariant", NULL,
                             "a token gives the same bits alone and in any batch"},
    [CLI_CPUS] = {"cpus", "LIST", "pin workers to these CPUs only, as in 0,2,8-15"},
    [CLI_DEVICE] = {"device", "N", "which GPU: CUDA's number (default: 0)"},
    [CLI_DOMAINS] = {"domains", "N",
                     "nodes share memory channels in so many groups, as many in each package\n"
                     "(default: as far as the machine says)"},
    [CLI_DRAFT] = {"draft", NULL, "the model's draft layers (mtp.0. and on), and not its own"},
    [CLI_DRAFT_TOO] = {"draft", NULL, "with a draft layer, mtp.0., behind the others"},
    [CLI_DURATION] = {"duration", "SECONDS", "how long to go on (default: 60)"},
    [CLI_EP] = {"ep", "N", "expert parallel: N parts of the experts, each for ranks of its own"},
    [CLI_EXPERTS] = {"experts", "N", "routed experts in a layer (default: the model's)"},
    [CLI_EXPERTS_PER_TOKEN] = {"experts-per-token", "N",
                               "routed experts that a token chooses in a layer"},
    [CLI_FAMILY] = {"family", "FILE",
                    "what the tensors are called and mean is described in FILE, as JSON\n"
                    "(runtime/family_file.h says how)"},
    [CLI_EXPLAIN] = {"explain", "node:N|worker:N|expert:LAYER.EXPERT",
                     "say why it is where it is, and nothing else"},
    [CLI_FORM] = {"form", "auto|every|groups[:N]|experts",
                  "how experts are divided: slices of each on every node, whole experts on\n"
                  "groups of nodes (N; or memory domains or packages) or on nodes\n"
                  "(default: auto, as costs least)"},
    [CLI_FORMAT] = {"format", "NAME",
                    "number format of the weights: mxfp4, mxfp8, nvfp4, int4, fp8, fp8-channel or\n"
                    "bf16 (default: the model's; mxfp4 for one that is described)"},
    [CLI_GPU] = {"gpu", NULL, "compute on a GPU, if NUMOE_GPU in the environment does not say off"},
    [CLI_GPU_AT] = {"gpu", "NAME@NODE,GB/s,GB",
                    "predict with a GPU: its link hangs on that memory node, and so much of\n"
                    "its memory is for experts, as in a10@4,25GB/s,24GB; once for each\n"
                    "(default: those of the machine whose link and memory are known)"},
    [CLI_GPU_CACHE] =
        {"gpu-cache", "SIZE",
         "with --gpu: device memory for experts that stay there (default: what there\n"
         "is)"},
    [CLI_GPU_FROM] = {"gpu-from", "TOKENS",
                      "with --gpu: calls of so many tokens and more are its alone, others the\n"
                      "CPUs'; 1: all (default: each call is divided by measured speeds)"},
    [CLI_GPU_PROFILE] =
        {"gpu-profile", "FILE",
         "with --gpu: copy the experts first that FILE says are asked for most, if\n"
         "there is such a file, and write to it what they are now"},
    [CLI_GPUS] = {"gpus", "LIST",
                  "compute on these GPUs together, each copying and computing its part of every\n"
                  "layer, as in 0,1; a number that is there twice divides a GPU"},
    [CLI_GPU_SUM] =
        {"gpu-sum", "auto|host|peer|nccl",
         "with --gpus: where parts of outputs are summed: by workers in host memory, by\n"
         "the GPUs after copies between them, or by NCCL (default: auto, between GPUs if\n"
         "that is faster than over their links)"},
    [CLI_GPU_TUNING] =
        {"gpu-tuning", "FILE",
         "with --gpu: choose kernels by the times in FILE, which numoe bench --gpu --tune\n"
         "made on this GPU (default: NUMOE_GPU_TUNING of the environment, else the\n"
         "library's own)"},
    [CLI_HIDDEN] = {"hidden", "N", "width of an expert's input and output"},
    [CLI_INTERMEDIATE] = {"intermediate", "N", "width of an expert inside"},
    [CLI_IDLE] =
        {"idle", "SECONDS",
         "then sleep so long and report the CPU time used meanwhile, and how long a first\n"
         "call after sleep takes"},
    [CLI_ISA] = {"isa", "NAME",
                 "instructions to use: ref, avx2, avxvnni, avx512, avx512vnni, avx512vnni256\n"
                 "(default: NUMOE_ISA of the environment, else the best here)"},
    [CLI_ISAS] = {"isa", "LIST",
                  "instructions to use, one or several of ref, avx2, avxvnni, avx512, avx512vnni,\n"
                  "avx512vnni256\n"
                  "(default: NUMOE_ISA of the environment, else the best here)"},
    [CLI_JSON] = {"json", NULL, "print JSON instead of text"},
    [CLI_KEEP_FREE] = {"keep-free", "SIZE",
                       "leave this much memory of each node free, as in 2GiB or 500MB"},
    [CLI_LAYERS] = {"layers", "N", "MoE layers (default: the model's)"},
    [CLI_LAYOUT] = {"layout", "own|gguf|gguf-merged",
                    "the maker's own files, or GGUF with gate and up apart or in one tensor\n"
                    "(default: own)"},
    [CLI_MEASURE] = {"measure", NULL,
                     "measure how fast each memory node is read from where: a third of a second\n"
                     "for each pair, 1024 pairs at most"},
    [CLI_MEMORY] = {"memory", "POLICY",
                    "where weights of a node may lie: bind (there only), preferred (there, then\n"
                    "elsewhere), local (where a worker touches them first) or interleave (page\n"
                    "by page over all nodes) (default: bind)"},
    [CLI_MEASURE_TIME] = {"duration", "SECONDS",
                          "with --measure: begin no more pairs after so long, the nearest being\n"
                          "first, and measure all nodes at once at last (default: no limit)"},
    [CLI_MODEL] = {"model", "NAME", "a model by name; numoe plan --model list shows them"},
    [CLI_NODES] = {"nodes", "LIST", "use these memory nodes only, as in 0,2,8-15"},
    [CLI_NODE_BANDWIDTH] = {"node-bandwidth", "[LIST=]GB/s",
                            "read bandwidth of a node while all are read, as in 9.6GB/s or\n"
                            "0-15=9.6GB/s (default: as measured, else by the CPU's name)"},
    [CLI_ONCE] = {"once", NULL, "compute each layer once and check it; measure no ceilings"},
    [CLI_OPTIMIZE] = {"optimize", "decode|prefill|both",
                      "what --form auto goes by: passes of one token, of 4096, or the\n"
                      "geometric mean of both ratios to the best (default: both)"},
    [CLI_PASS_TOKENS] = {"tokens", "LIST", "predict passes of so many tokens, as in 1,4096"},
    [CLI_PLAN] = {"plan", "FILE",
                  "use the plan that numoe plan --json wrote to FILE, after checking that the\n"
                  "machine and the model are those it was made for"},
    [CLI_PNG] = {"png", "FILE", "write a picture of the plan, as PNG"},
    [CLI_RANK] = {"rank", "R",
                  "the plan of one rank of --tp and --ep: rank R has the R % TP th part of\n"
                  "the slices, the R / TP th of the experts"},
    [CLI_RANK_NODES] = {"rank-nodes", "R:LIST",
                        "memory nodes of rank R, as in 1:8-15; once for each rank (default: nodes\n"
                        "are dealt out by packages and memory domains)"},
    [CLI_READ] = {"read", "auto|disk|cached",
                  "read files past the page cache, many blocks at once, or by plain reads of all\n"
                  "workers, for files that are in the page cache (default: auto, which looks)"},
    [CLI_REPEAT] = {"repeat", "N", "repetitions of each measurement (default: by time)"},
    [CLI_REPORT] = {"report", "FILE", "write a report in Markdown, to be pasted into an issue"},
    [CLI_RESERVE_CPUS] = {"reserve-cpus", "LIST",
                          "no workers on the cores of these CPUs: they are the engine's own"},
    [CLI_RESERVE_NODES] = {"reserve-nodes", "LIST",
                           "no experts on these memory nodes, no workers on their CPUs"},
    [CLI_RESIDENT] = {"resident", NULL, "with --gpu: weights stay in device memory (default)"},
    [CLI_RESUME] = {"resume", "FILE", "go on where FILE says it was left off, and keep it in FILE"},
    [CLI_ROUTING] = {"routing", "KIND",
                     "how tokens choose experts: uniform, zipf (the n-th is chosen 1/n as often),\n"
                     "shifting (zipf, of others in each repetition), same (all the same\n"
                     "experts) or one (all of them one and no other)\n"
                     "(default: uniform)"},
    [CLI_SAVE] = {"save", "FILE",
                  "also write all that is known of the machine to a file, for\n"
                  "--topology here or elsewhere"},
    [CLI_SEED] = {"seed", "N", "seed of everything random (default: 1)"},
    [CLI_SHARE] = {"share", NULL,
                   "with --gpu: calls from host memory, by the CPUs alone, by the GPU alone, and\n"
                   "shared by both"},
    [CLI_SMT] = {"smt", NULL, "also use the second hardware threads of cores"},
    [CLI_SPILL] = {"spill", NULL,
                   "weights that their node has no room for go elsewhere, and are reported"},
    [CLI_STATS] = {"stats", "[=json|prometheus]",
                   "measure workers' times, and print what workers and nodes did in the end"},
    [CLI_STATS_CELLS] = {"stats", NULL,
                         "measure workers' times, and show how busy they are and how evenly"},
    [CLI_STEPS] = {"steps", "N", "end after so many steps, however long they take"},
    [CLI_STREAM] = {"stream", NULL,
                    "with --gpu: copy each layer from host memory while the one before computes"},
    [CLI_SVG] = {"svg", "FILE", "write a picture of the plan, as SVG"},
    [CLI_THREADS] = {"threads", "N", "threads that execute the plan, whatever its workers"},
    [CLI_TOKENS] = {"tokens", "LIST", "batch sizes to measure, as in 1,16,256"},
    [CLI_TOPOLOGY] = {"topology", "WHAT",
                      "another machine: a file of numoe topo --save or an hwloc XML file, a\n"
                      "directory with its sys/ and proc/, or a synthetic string such as\n"
                      "'pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2' (default: this one)"},
    [CLI_TRACE] = {"trace", "FILE", "write a timeline of calls and workers, for ui.perfetto.dev"},
    [CLI_TP] = {"tp", "N",
                "tensor parallel: N parts of the slices of every expert, each for ranks of its\n"
                "own"},
    [CLI_TUNE] =
        {"tune", "FILE",
         "with --gpu: time every form of the kernels with few and many tokens and write the\n"
         "times to FILE, for --gpu-tuning; other shapes that FILE has of this GPU stay"},
    [CLI_VERIFY] = {"verify", NULL,
                    "take checksums of the weights when they are loaded, and look at the end\n"
                    "whether they still are what they were"},
    [CLI_WORKERS] = {"workers", "N", "worker threads (default: one for each core allowed)"},
};

/* OPTION_FIRST: what getopt returns for an option is above the characters that it returns itself.
 */
enum {
    OPTION_COUNT = sizeof option_texts / sizeof option_texts[0],
    OPTION_FIRST = 256,
    HELP_COLUMN = 26
};

static int parse_layout(const char *text, enum numoe_synth_layout *layout,
                        struct numoe_error *error)
{
    static const char *const names[] = {[NUMOE_SYNTH_OWN] = "own",
                                        [NUMOE_SYNTH_GGUF] = "gguf",
                                        [NUMOE_SYNTH_GGUF_MERGED] = "gguf-merged"};

    for (unsigned i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!strcmp(names[i], text)) {
            *layout = (enum numoe_synth_layout)i;
            return 0;
        }
    return numoe_error_set(error, -EINVAL, NULL, "\"%s\" is none of own, gguf and gguf-merged",
                           text);
}

static int parse_policy(const char *text, enum numoe_memory_policy *policy,
                        struct numoe_error *error)
{
    static const char *const names[] = {"bind", "preferred", "local", "interleave"};

    for (unsigned i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!strcmp(text, names[i])) {
            *policy = (enum numoe_memory_policy)i;
            return 0;
        }
    return numoe_error_set(error, -EINVAL, NULL,
                           "\"%s\" is none of bind, preferred, local, interleave", text);
}

static int parse_way(const char *text, enum numoe_read_way *way, struct numoe_error *error)
{
    static const char *const names[] = {"auto", "disk", "cached"};

    for (unsigned i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!strcmp(text, names[i])) {
            *way = (enum numoe_read_way)i;
            return 0;
        }
    return numoe_error_set(error, -EINVAL, NULL, "\"%s\" is none of auto, disk, cached", text);
}

bool cli_parse_number(const char *text, uint64_t *value, const char **end)
{
    uint64_t sum = 0;
    const char *p = text;

    for (; *p >= '0' && *p <= '9'; p++) {
        if (!numoe_mul_u64(sum, 10, &sum) || !numoe_add_u64(sum, (uint64_t)(*p - '0'), &sum))
            return false;
    }
    if (p == text || (!end && *p))
        return false;
    if (end)
        *end = p;
    *value = sum;
    return true;
}

static bool list_append(struct cli_list *list, uint32_t *room, uint32_t value)
{
    if (list->count == *room) {
        uint32_t more = *room ? *room * 2 : 16;
        uint32_t *values = realloc(list->values, more * sizeof *values);

        if (!values)
            return false;
        list->values = values;
        *room = more;
    }
    list->values[list->count++] = value;
    return true;
}

int cli_parse_list(const char *text, struct cli_list *list, struct numoe_error *error)
{
    struct cli_list made = {NULL, 0};
    uint32_t room = 0;
    const char *p = text;

    for (;;) {
        uint64_t first, last;

        if (!cli_parse_number(p, &first, &p))
            goto malformed;
        last = first;
        if (*p == '-' && !cli_parse_number(p + 1, &last, &p))
            goto malformed;
        if (first > last || last >= UINT32_MAX)
            goto malformed;
        if (last - first >= CLI_MAX_LIST - made.count) {
            free(made.values);
            return numoe_error_set(error, -EINVAL, NULL, "\"%s\" lists more than %d numbers", text,
                                   CLI_MAX_LIST);
        }
        for (uint64_t value = first; value <= last; value++) {
            if (!list_append(&made, &room, (uint32_t)value)) {
                free(made.values);
                return numoe_error_set(error, -ENOMEM, NULL, "out of memory");
            }
        }
        if (!*p)
            break;
        if (*p++ != ',')
            goto malformed;
    }
    free(list->values);
    *list = made;
    return 0;
malformed:
    free(made.values);
    return numoe_error_set(error, -EINVAL, NULL,
                           "\"%s\" is not a list of numbers and ranges such as 0,2,5-9", text);
}

int cli_parse_size(const char *text, uint64_t *bytes, struct numoe_error *error)
{
    static const char prefixes[] = "KMGT";
    const char *p, *prefix;
    uint64_t value, unit = 1, base = 1024;

    if (!cli_parse_number(text, &value, &p))
        goto malformed;
    if (*p && *p != 'B') {
        prefix = strchr(prefixes, *p++);
        if (!prefix)
            goto malformed;
        if (!strcmp(p, "B"))
            base = 1000;
        else if (*p && strcmp(p, "iB") != 0)
            goto malformed;
        for (int i = 0; i <= prefix - prefixes; i++)
            unit *= base;
    } else if (*p && p[1]) {
        goto malformed;
    }
    if (!numoe_mul_u64(value, unit, bytes))
        return numoe_error_set(error, -EINVAL, NULL, "\"%s\" is more than 64 bits hold", text);
    return 0;
malformed:
    return numoe_error_set(error, -EINVAL, NULL,
                           "\"%s\" is not a size such as 4096, 512M, 16GiB or 16GB", text);
}

static int parse_file(const char *text, const char **file, struct numoe_error *error)
{
    if (!*text)
        return numoe_error_set(error, -EINVAL, NULL, "is empty; a file is needed");
    *file = text;
    return 0;
}

/* A count of at least 1 and at most `most`. */
static int parse_count(const char *text, uint64_t most, uint64_t *value, struct numoe_error *error)
{
    uint64_t number;

    if (!cli_parse_number(text, &number, NULL) || number < 1 || number > most)
        return numoe_error_set(error, -EINVAL, NULL, "\"%s\" is not a number from 1 to %" PRIu64,
                               text, most);
    *value = number;
    return 0;
}

static int parse_format(const char *text, enum numoe_format *format, struct numoe_error *error)
{
    const struct numoe_format_info *known = numoe_format_by_name(text);
    char names[128] = "";
    size_t used = 0;

    if (known) {
        *format = known->format;
        return 0;
    }
    for (size_t i = 0; (known = numoe_format_at(i)) && used < sizeof names; i++)
        used +=
            (size_t)snprintf(names + used, sizeof names - used, "%s%s", i ? ", " : "", known->name);
    return numoe_error_set(error, -EINVAL, NULL, "\"%s\" is no number format; known are %s", text,
                           names);
}

static int parse_arithmetics(const char *text, bool several, struct cli_values *values,
                             struct numoe_error *error)
{
    const char *p = text;

    values->arithmetic_count = 0;
    do {
        size_t length = strcspn(p, ",");
        int one = cli_arithmetic_by_name(p, length);

        if (!one || (values->arithmetic_count && !several))
            goto malformed;
        for (uint32_t i = 0; i < values->arithmetic_count; i++)
            if (values->arithmetics[i] == (enum numoe_arithmetic)one)
                goto malformed;
        values->arithmetics[values->arithmetic_count++] = (enum numoe_arithmetic)one;
        p += length;
    } while (*p++);
    return 0;
malformed:
    return numoe_error_set(error, -EINVAL, NULL,
                           "\"%s\" is not %s fast, exact, fine, mxfp8, mxfp8-ocp", text,
                           several ? "one or several of" : "one of");
}

/* Names are cut apart here; whether one is known, and runs here, is for the library to say. */
static int parse_isas(const char *text, bool several, struct cli_values *values,
                      struct numoe_error *error)
{
    char *save = NULL;

    free(values->isa_text);
    values->isa_count = 0;
    values->isa_text = strdup(text);
    if (!values->isa_text)
        return numoe_error_set(error, -ENOMEM, NULL, "out of memory");
    if (!*text || *text == ',' || text[strlen(text) - 1] == ',' || strstr(text, ",,"))
        return numoe_error_set(error, -EINVAL, NULL, "\"%s\": a name is missing", text);
    for (char *name = strtok_r(values->isa_text, ",", &save); name;
         name = strtok_r(NULL, ",", &save)) {
        for (uint32_t i = 0; i < values->isa_count; i++)
            if (!strcmp(values->isas[i], name))
                return numoe_error_set(error, -EINVAL, NULL, "\"%s\" names %s twice", text, name);
        if (values->isa_count == (several ? CLI_MAX_ISAS : 1))
            return numoe_error_set(error, -EINVAL, NULL, "\"%s\" names more than %d", text,
                                   several ? CLI_MAX_ISAS : 1);
        values->isas[values->isa_count++] = name;
    }
    return 0;
}

static int parse_gpu_sum(const char *text, enum numoe_gpu_sum *sum, struct numoe_error *error)
{
    for (int i = NUMOE_GPU_SUM_AUTO; i <= NUMOE_GPU_SUM_NCCL; i++)
        if (!strcmp(text, numoe_gpu_sum_names[i])) {
            *sum = (enum numoe_gpu_sum)i;
            return 0;
        }
    return numoe_error_set(error, -EINVAL, NULL, "\"%s\" is not auto, host, peer or nccl", text);
}

static int parse_form(const char *text, struct cli_values *values, struct numoe_error *error)
{
    uint64_t groups = 0;

    if (!strcmp(text, "auto"))
        values->form = NUMOE_FORM_AUTO;
    else if (!strcmp(text, "every"))
        values->form = NUMOE_FORM_EVERY_NODE;
    else if (!strcmp(text, "experts"))
        values->form = NUMOE_FORM_EXPERTS;
    else if (!strcmp(text, "groups") ||
             (!strncmp(text, "groups:", 7) && cli_parse_number(text + 7, &groups, NULL) && groups &&
              groups < UINT32_MAX))
        values->form = NUMOE_FORM_GROUPS;
    else
        return numoe_error_set(error, -EINVAL, NULL,
                               "\"%s\" is none of auto, every, groups, groups:N and experts", text);
    values->groups = (uint32_t)groups;
    return 0;
}

static int parse_objective(const char *text, struct cli_values *values, struct numoe_error *error)
{
    static const char *const names[] = {
        [NUMOE_OPTIMIZE_BOTH] = "both",
        [NUMOE_OPTIMIZE_DECODE] = "decode",
        [NUMOE_OPTIMIZE_PREFILL] = "prefill",
    };

    for (unsigned i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!strcmp(text, names[i])) {
            values->objective = (enum numoe_objective)i;
            return 0;
        }
    return numoe_error_set(error, -EINVAL, NULL, "\"%s\" is none of decode, prefill and both",
                           text);
}

static int parse_stats(const char *text, enum cli_stats *stats, struct numoe_error *error)
{
    *stats = !text                             ? CLI_STATS_TEXT
             : strcmp(text, "json") == 0       ? CLI_STATS_JSON
             : strcmp(text, "prometheus") == 0 ? CLI_STATS_PROMETHEUS
                                               : CLI_STATS_OFF;
    return *stats ? 0
                  : numoe_error_set(error, -EINVAL, NULL, "\"%s\" is neither json nor prometheus",
                                    text);
}

/* A number of ranks of a kind; with the other kind they are CLI_MAX_RANKS at most. */
static int parse_ranks(const char *text, uint32_t others, uint32_t *ranks,
                       struct numoe_error *error)
{
    uint64_t number = 0;
    int rc = parse_count(text, CLI_MAX_RANKS, &number, error);

    if (!rc && number * (others ? others : 1) > CLI_MAX_RANKS)
        return numoe_error_set(error, -EINVAL, NULL, "more than %d ranks", CLI_MAX_RANKS);
    *ranks = (uint32_t)number;
    return rc;
}

static int set_option(enum cli_option option, const char *text, struct cli_values *values,
                      struct numoe_error *error)
{
    uint64_t number = 0;
    int rc = 0;

    switch (option) {
    case CLI_ARITHMETIC:
    case CLI_ARITHMETICS:
        return parse_arithmetics(text, option == CLI_ARITHMETICS, values, error);
    case CLI_AS_IF:
        return parse_file(text, &values->as_if, error);
    case CLI_BATCH_INVARIANT:
        values->batch_invariant = true;
        return 0;
    case CLI_CPUS:
        return cli_parse_list(text, &values->cpus, error);
    case CLI_DEVICE:
        if (!cli_parse_number(text, &number, NULL) || number > INT32_MAX)
            return numoe_error_set(error, -EINVAL, NULL, "\"%s\" is no number of a GPU", text);
        values->device = (uint32_t)number;
        return 0;
    case CLI_DOMAINS:
        rc = parse_count(text, UINT32_MAX - 1, &number, error);
        values->domains = (uint32_t)number;
        return rc;
    case CLI_EP:
        return parse_ranks(text, values->tp, &values->ep, error);
    case CLI_TP:
        return parse_ranks(text, values->ep, &values->tp, error);
    case CLI_RANK:
        if (!cli_parse_number(text, &number, NULL) || number >= CLI_MAX_RANKS)
            return numoe_error_set(error, -EINVAL, NULL, "\"%s\" is no rank", text);
        values->rank = (uint32_t)number;
        values->rank_given = true;
        return 0;
    case CLI_RANK_NODES:
        return cli_parse_rank_nodes(text, values, error);
    case CLI_DURATION:
    case CLI_MEASURE_TIME:
        return parse_count(text, UINT32_MAX, &values->duration_s, error);
    case CLI_EXPERTS:
        return parse_count(text, UINT32_MAX, &values->experts, error);
    case CLI_EXPERTS_PER_TOKEN:
        return parse_count(text, UINT32_MAX, &values->experts_per_token, error);
    case CLI_VERIFY:
        values->verify = true;
        return 0;
    case CLI_DRAFT:
    case CLI_DRAFT_TOO:
        values->draft = true;
        return 0;
    case CLI_FAMILY:
        return parse_file(text, &values->family, error);
    case CLI_LAYOUT:
        return parse_layout(text, &values->layout, error);
    case CLI_EXPLAIN:
        values->explain = text;
        return 0;
    case CLI_FORM:
        return parse_form(text, values, error);
    case CLI_OPTIMIZE:
        return parse_objective(text, values, error);
    case CLI_FORMAT:
        return parse_format(text, &values->format, error);
    case CLI_GPU_AT:
        return cli_parse_gpu(text, values, error);
    case CLI_GPU:
        values->gpu = true;
        return 0;
    case CLI_GPUS:
        values->gpu = true;
        return cli_parse_list(text, &values->gpu_devices, error);
    case CLI_GPU_SUM:
        return parse_gpu_sum(text, &values->gpu_sum, error);
    case CLI_GPU_CACHE:
        return cli_parse_size(text, &values->gpu_cache_bytes, error);
    case CLI_GPU_FROM:
        return parse_count(text, UINT32_MAX, &values->gpu_from_tokens, error);
    case CLI_GPU_PROFILE:
        return parse_file(text, &values->gpu_profile, error);
    case CLI_GPU_TUNING:
        return parse_file(text, &values->gpu_tuning, error);
    case CLI_HIDDEN:
        return parse_count(text, UINT32_MAX, &values->hidden, error);
    case CLI_INTERMEDIATE:
        return parse_count(text, UINT32_MAX, &values->intermediate, error);
    case CLI_IDLE:
        return parse_count(text, UINT32_MAX, &values->idle_s, error);
    case CLI_ISA:
    case CLI_ISAS:
        return parse_isas(text, option == CLI_ISAS, values, error);
    case CLI_JSON:
        values->json = true;
        return 0;
    case CLI_KEEP_FREE:
        rc = cli_parse_size(text, &values->keep_free_bytes, error);
        /* 0 is the default of the plan's request; a byte is as good as nothing */
        if (!rc && !values->keep_free_bytes)
            values->keep_free_bytes = 1;
        return rc;
    case CLI_LAYERS:
        return parse_count(text, UINT32_MAX, &values->layers, error);
    case CLI_MEASURE:
        values->measure = true;
        return 0;
    case CLI_MEMORY:
        return parse_policy(text, &values->memory_policy, error);
    case CLI_MODEL:
        if (!*text)
            return numoe_error_set(error, -EINVAL, NULL, "is empty; --model list shows names");
        values->model = text;
        return 0;
    case CLI_NODES:
        return cli_parse_list(text, &values->nodes, error);
    case CLI_NODE_BANDWIDTH:
        return cli_parse_rates(text, values, error);
    case CLI_PLAN:
        return parse_file(text, &values->plan, error);
    case CLI_PNG:
        return parse_file(text, &values->png, error);
    case CLI_READ:
        return parse_way(text, &values->read, error);
    case CLI_REPEAT:
        rc = parse_count(text, 1000000, &number, error);
        values->repeat = (uint32_t)number;
        return rc;
    case CLI_REPORT:
        return parse_file(text, &values->report, error);
    case CLI_RESUME:
        return parse_file(text, &values->resume, error);
    case CLI_RESERVE_CPUS:
        return cli_parse_list(text, &values->reserved, error);
    case CLI_RESERVE_NODES:
        return cli_parse_list(text, &values->reserved_nodes, error);
    case CLI_RESIDENT:
        values->resident = true;
        return 0;
    case CLI_ROUTING: {
        const int routing = numoe_bench_routing_by_name(text);

        if (routing < 0)
            return numoe_error_set(error, -EINVAL, NULL,
                                   "\"%s\" is none of uniform, zipf, shifting, same and one", text);
        values->routing = (enum numoe_bench_routing)routing;
        return 0;
    }
    case CLI_SAVE:
        return parse_file(text, &values->save, error);
    case CLI_SEED:
        if (!cli_parse_number(text, &values->seed, NULL))
            return numoe_error_set(error, -EINVAL, NULL, "\"%s\" is not a number of 64 bits", text);
        values->seed_given = true;
        return 0;
    case CLI_SHARE:
        values->share = true;
        return 0;
    case CLI_SMT:
        values->smt = true;
        return 0;
    case CLI_SPILL:
        values->spill = true;
        return 0;
    case CLI_STATS:
    case CLI_STATS_CELLS:
        return parse_stats(text, &values->stats, error);
    case CLI_STEPS:
        return parse_count(text, UINT64_MAX, &values->steps, error);
    case CLI_STREAM:
        values->stream = true;
        return 0;
    case CLI_SVG:
        return parse_file(text, &values->svg, error);
    case CLI_THREADS:
        rc = parse_count(text, UINT32_MAX - 1, &number, error);
        values->threads = (uint32_t)number;
        return rc;
    case CLI_ONCE:
        values->once = true;
        return 0;
    case CLI_PASS_TOKENS:
    case CLI_TOKENS:
        rc = cli_parse_list(text, &values->tokens, error);
        for (uint32_t i = 0; !rc && i < values->tokens.count; i++) {
            if (values->tokens.values[i] < 1 || values->tokens.values[i] > 1 << 20)
                rc = numoe_error_set(error, -EINVAL, NULL,
                                     "%" PRIu32 " is not a batch of 1 to %d tokens",
                                     values->tokens.values[i], 1 << 20);
        }
        return rc;
    case CLI_TOPOLOGY:
        /* an empty variable of a script must not quietly mean this machine */
        if (!*text)
            return numoe_error_set(error, -EINVAL, NULL, "is empty; \"live\" is this machine");
        values->topology = text;
        return 0;
    case CLI_TRACE:
        return parse_file(text, &values->trace, error);
    case CLI_TUNE:
        return parse_file(text, &values->tune, error);
    case CLI_WORKERS:
        rc = parse_count(text, UINT32_MAX - 1, &number, error);
        values->workers = (uint32_t)number;
        return rc;
    case CLI_END:
        break;
    }
    return numoe_error_set(error, -EINVAL, NULL, "not an option");
}

static bool optional(const char *argument)
{
    return argument && strncmp(argument, "[=", 2) == 0;
}

static void print_option(const char *name, const char *argument, const char *help)
{
    int column = printf("  --%s%s%s", name, argument && !optional(argument) ? " " : "",
                        argument ? argument : "");

    if (column > HELP_COLUMN - 2) {
        putchar('\n');
        column = 0;
    }
    printf("%*s", HELP_COLUMN - column, "");
    for (const char *p = help; *p; p++) {
        putchar(*p);
        if (*p == '\n')
            printf("%*s", HELP_COLUMN, "");
    }
    putchar('\n');
}

static void print_help(const struct cli_verb *verb)
{
    printf("Usage: numoe %s%s%s%s\n\n%s\nOptions:\n", verb->name,
           verb->options[0] ? " [OPTION]..." : "", *verb->arguments ? " " : "", verb->arguments,
           verb->description);
    for (const enum cli_option *option = verb->options; *option; option++)
        print_option(option_texts[*option].name, option_texts[*option].argument,
                     option_texts[*option].help);
    print_option("help", NULL, "print this and do nothing else");
    printf("\n%s", cli_exit_help);
}

int cli_parse(const struct cli_verb *verb, int argc, char **argv, struct cli_values *values)
{
    struct option options[OPTION_COUNT + 2] = {{0}};
    struct numoe_error error = NUMOE_ERROR_INIT;
    int count = 0, found, help = OPTION_FIRST + OPTION_COUNT;

    memset(values, 0, sizeof *values);
    values->seed = 1;
    for (const enum cli_option *option = verb->options; *option; option++)
        options[count++] =
            (struct option){option_texts[*option].name,
                            optional(option_texts[*option].argument) ? optional_argument
                            : option_texts[*option].argument         ? required_argument
                                                                     : no_argument,
                            NULL, OPTION_FIRST + (int)*option};
    options[count] = (struct option){"help", no_argument, NULL, help};

    opterr = 0;
    optind = 1;
    while ((found = getopt_long(argc, argv, ":h", options, NULL)) != -1) {
        /* With a value missing or refused by getopt, the word just before optind is to blame. */
        const char *word = argv[optind - 1];

        if (found == help || found == 'h') {
            print_help(verb);
            return cli_flush(CLI_OK);
        }
        if (found == '?' || found == ':') {
            cli_error(verb->name,
                      found == ':' ? "option %s needs a value; see numoe %s --help"
                                   : "option %s is not known; see numoe %s --help",
                      word, verb->name);
            return CLI_USAGE;
        }
        found -= OPTION_FIRST;
        if (set_option((enum cli_option)found, optarg, values, &error)) {
            cli_error(verb->name, "--%s: %s", option_texts[found].name, error.message);
            return error.code == -ENOMEM ? CLI_FAILURE : CLI_USAGE;
        }
    }
    if (verb->directory != CLI_DIRECTORY_NONE && optind < argc)
        values->directory = argv[optind++];
    if (values->directory && !*values->directory) {
        cli_error(verb->name, "the directory's name is empty");
        return CLI_USAGE;
    }
    if (verb->directory == CLI_DIRECTORY_REQUIRED && !values->directory) {
        cli_error(verb->name, "a directory is missing; see numoe %s --help", verb->name);
        return CLI_USAGE;
    }
    if (optind < argc) {
        cli_error(verb->name, "\"%s\" is one argument too many; see numoe %s --help", argv[optind],
                  verb->name);
        return CLI_USAGE;
    }
    return -1;
}

const char *cli_gpu_option(const struct cli_values *values)
{
    const struct {
        enum cli_option option;
        bool given;
    } of_gpus[] = {
        {CLI_STREAM, values->stream},
        {CLI_RESIDENT, values->resident},
        {CLI_SHARE, values->share},
        {CLI_TUNE, values->tune},
        {CLI_GPU_CACHE, values->gpu_cache_bytes},
        {CLI_GPU_FROM, values->gpu_from_tokens},
        {CLI_GPU_PROFILE, values->gpu_profile},
        {CLI_GPU_SUM, values->gpu_sum != NUMOE_GPU_SUM_AUTO},
        {CLI_GPU_TUNING, values->gpu_tuning},
    };

    for (size_t i = 0; i < sizeof of_gpus / sizeof of_gpus[0]; i++)
        if (of_gpus[i].given)
            return option_texts[of_gpus[i].option].name;
    return NULL;
}

void cli_values_free(struct cli_values *values)
{
    free(values->cpus.values);
    free(values->nodes.values);
    free(values->tokens.values);
    free(values->gpu_devices.values);
    free(values->reserved.values);
    free(values->reserved_nodes.values);
    for (uint32_t i = 0; i < values->rank_node_count; i++)
        free(values->rank_nodes[i].nodes.values);
    free(values->rank_nodes);
    free(values->gpus);
    free(values->rates);
    free(values->isa_text);
    memset(values, 0, sizeof *values);
}
