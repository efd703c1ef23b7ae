/* Stats and traces in the numoe command. SPDX-License-Identifier: Apache-2.0 */
#include "cli_stats.h"

#include "cli_options.h"
#include "cli_output.h"
#include "stats_print.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <string.h>

static int refuse(int rc)
{
    cli_error("stats", "could not be taken: %s", strerror(-rc));
    return rc == -ENOMEM ? CLI_NO_ROOM : CLI_FAILURE;
}

int cli_stats_take(struct numoe *context, struct stats_snapshot *snapshot)
{
    const int rc = numoe_stats_snapshot(context, snapshot);

    return rc ? refuse(rc) : CLI_OK;
}

/* Upper bound, in microseconds, of the bucket that the quantile falls in. */
static double wake_us(const struct numoe_work_stats *work, double quantile)
{
    uint64_t sum = 0, want = (uint64_t)ceil(quantile * (double)work->wakes);

    for (int b = 0; b < NUMOE_WAKE_BUCKETS - 1; b++) {
        sum += work->wake_buckets[b];
        if (sum >= want)
            return (double)((uint64_t)1024 << b) * 1e-3;
    }
    return INFINITY;
}

static void print_wakes(const struct numoe_work_stats *work)
{
    if (work->wakes)
        printf(" %8.0f %8.0f", wake_us(work, 0.5), wake_us(work, 0.99));
    else
        printf(" %8s %8s", "-", "-");
}

static void print_workers(const struct stats_snapshot *s)
{
    double sum = 0, most = 0;

    printf(
        "\n                                    steals: same              other            seconds"
        "     wake within, us\nworker    CPU  node     items       L3     node   domain  package"
        "  package   sleeps     busy   parked      50%%      99%%    GB read  remote\n");
    for (uint32_t w = 0; w < s->all.workers; w++) {
        const struct numoe_worker_stats *worker = &s->workers[w];
        const struct numoe_work_stats *work = &worker->work;
        const double busy = (double)work->busy_ns * 1e-9;

        printf("%6" PRIu32, w);
        if (worker->pinned)
            printf(" %6" PRIu32, worker->os_cpu);
        else
            printf(" %6s", "any");
        printf(" %5" PRIu32 " %9" PRIu64, s->nodes[worker->node].os_index, work->items);
        for (int d = 0; d < NUMOE_DISTANCES; d++)
            printf(" %8" PRIu64, work->steals_from[d]);
        printf(" %8" PRIu64 " %8.3f %8.3f", work->sleeps, busy, (double)work->parked_ns * 1e-9);
        print_wakes(work);
        printf(" %10.3f %5.1f %%\n", (double)work->read_bytes * 1e-9,
               work->read_bytes ? 100 * (double)work->remote_bytes / (double)work->read_bytes : 0);
        sum += busy;
        most = fmax(most, busy);
    }
    if (sum > 0)
        printf("the busiest worker was busy %.3f times as long as the mean\n",
               most * s->all.workers / sum);
}

static void print_nodes(const struct stats_snapshot *s)
{
    printf(
        "\n node  workers     items    busy s  GB read by them  remote   GB of it read by all\n");
    for (uint32_t n = 0; n < s->all.nodes; n++) {
        const struct numoe_node_stats *node = &s->nodes[n];
        const struct numoe_work_stats *work = &node->work;

        printf("%5" PRIu32 " %8" PRIu32 " %9" PRIu64 " %9.3f %16.3f %5.1f %% %22.3f\n",
               node->os_index, node->workers, work->items, (double)work->busy_ns * 1e-9,
               (double)work->read_bytes * 1e-9,
               work->read_bytes ? 100 * (double)work->remote_bytes / (double)work->read_bytes : 0,
               (double)node->expert_bytes * 1e-9);
    }
}

static int print_text(struct numoe *context)
{
    struct stats_snapshot snapshot;
    const int code = cli_stats_take(context, &snapshot);

    if (code)
        return code;
    print_workers(&snapshot);
    print_nodes(&snapshot);
    numoe_stats_snapshot_free(&snapshot);
    return cli_flush(CLI_OK);
}

int cli_print_stats(const struct cli_values *values, struct numoe *context)
{
    int rc;

    switch (values->stats) {
    case CLI_STATS_OFF:
        return cli_flush(CLI_OK);
    case CLI_STATS_TEXT:
        return print_text(context);
    case CLI_STATS_JSON:
        rc = numoe_stats_print_json(context, stdout);
        break;
    default:
        rc = numoe_stats_print_prometheus(context, stdout);
    }
    if (rc && rc != -EIO) /* which cli_flush finds */
        return refuse(rc);
    return cli_flush(CLI_OK);
}

int cli_trace_open(const char *path, FILE **file)
{
    if (!path)
        return CLI_OK;
    *file = fopen(path, "we");
    if (*file)
        return CLI_OK;
    cli_error(path, "could not be opened for writing: %s", strerror(errno));
    return CLI_FAILURE;
}

int cli_trace_write(const char *path, struct numoe *context, FILE **file)
{
    int rc;

    errno = 0;
    rc = numoe_trace_write(context, *file);
    if (rc == -EIO && errno) /* which of them */
        rc = -errno;
    if (fclose(*file) && !rc)
        rc = -errno;
    *file = NULL;
    return cli_written(path, rc);
}
