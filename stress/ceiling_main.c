/*
 * numoe-ceiling: what this machine's workers can do at best, by the loops that `numoe run` and
 * `numoe bench` measure themselves against.
 *
 *     numoe-ceiling [ISA [ROUNDS]]
 *
 * Prints for each ceiling the median, least and most of ROUNDS measurements (default 15) with all
 * workers together.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "bench.h"
#include "cli_options.h"
#include "cli_output.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST_ROUNDS = 1000 };

static void print_ceiling(struct numoe_bench *bench, enum numoe_ceiling ceiling, const char *what,
                          const char *unit, uint32_t rounds)
{
    double values[MOST_ROUNDS], median;

    for (uint32_t i = 0; i < rounds; i++)
        values[i] = numoe_bench_ceiling(bench, ceiling);
    median = numoe_bench_quantile(values, rounds, 0.5);
    if (median > 0)
        printf("%-22s %9.1f %s (%.1f to %.1f)\n", what, median, unit, values[0],
               values[rounds - 1]);
    else
        printf("%-22s no such loop for these instructions\n", what);
}

int main(int argc, char **argv)
{
    const char *isa = argc > 1 ? argv[1] : getenv("NUMOE_ISA");
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct cli_values values = {0};
    struct cli_list rounds = {NULL, 0};
    struct numoe_bench *bench;
    struct numoe *context;
    uint32_t count = 15;
    int code;

    if (argc > 3 || (argc > 1 && argv[1][0] == '-')) {
        fprintf(stderr, "Usage: numoe-ceiling [ISA [ROUNDS]]\n");
        return CLI_USAGE;
    }
    if (argc > 2) {
        if (cli_parse_list(argv[2], &rounds, &error) || rounds.count != 1 || !rounds.values[0] ||
            rounds.values[0] > MOST_ROUNDS) {
            free(rounds.values);
            cli_error("ceiling", "\"%s\" is not a number of rounds from 1 to %d", argv[2],
                      MOST_ROUNDS);
            return CLI_USAGE;
        }
        count = rounds.values[0];
        free(rounds.values);
    }
    code = cli_open("ceiling", &values, isa, &context);
    if (code)
        return code;
    if (numoe_bench_create(context, isa, &bench, &error)) {
        code = cli_report("ceiling", CLI_STAGE_OPTIONS, &error);
        goto close;
    }
    printf("%" PRIu32 " workers; a buffer of %" PRIu64 " MiB\n",
           numoe_pool_worker_count(numoe_context_pool(context)),
           numoe_bench_buffer_bytes(bench) >> 20);
    print_ceiling(bench, NUMOE_CEILING_READ, "reading memory", "GB/s", count);
    print_ceiling(bench, NUMOE_CEILING_INT8, "int8 multiply-add", "Gop/s", count);
    print_ceiling(bench, NUMOE_CEILING_EXACT, "exact multiply-add", "Gop/s", count);
    code = cli_flush(CLI_OK);
    numoe_bench_destroy(bench);
close:
    numoe_close(context);
    return code;
}
