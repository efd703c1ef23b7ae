/*
 * Loading while workers pack, under ThreadSanitizer: the packed bytes do not depend on who packed
 * them, and a cancelled load leaves nothing running.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model.h"
#include "synth.h"

static unsigned passed, failed;

static void check(int good, const char *what)
{
    if (good) {
        passed++;
    } else {
        failed++;
        printf("failed: %s\n", what);
    }
}

/* FNV-1a over all runs. */
static uint64_t checksum(const struct numoe_model *model, uint64_t layers, uint64_t experts)
{
    uint64_t hash = 14695981039346656037u, layer, expert, first, count, i;
    uint32_t node;

    for (layer = 0; layer < layers; layer++)
        for (expert = 0; expert < experts; expert++)
            for (node = 0; node < numoe_model_plan(model)->node_count; node++) {
                const uint8_t *run = numoe_model_run(model, layer, expert, node, &first, &count);
                for (i = 0; i < count * numoe_model_shape(model)->bytes; i++)
                    hash = (hash ^ run[i]) * 1099511628211u;
            }
    return hash;
}

static int cancel_after(void *user, const struct numoe_load_progress *progress)
{
    (void)user;
    return progress->stage == NUMOE_LOAD_READING && progress->bytes_done > 0;
}

int main(void)
{
    struct numoe_synth_options synth = NUMOE_SYNTH_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    char directory[1000], command[1100];
    uint64_t sums[6];
    unsigned i;

    /* beside the build, on a disk; elsewhere (a bundle on another machine) among temporary files */
    snprintf(directory, sizeof directory, "%s/race-load-XXXXXX",
             access(NUMOE_BINARY_DIR, W_OK) == 0 ? NUMOE_BINARY_DIR : "/tmp");
    if (!mkdtemp(directory)) {
        printf("cannot make a directory\n");
        return 1;
    }
    synth.model = "v4-flash";
    synth.layers = 2;
    synth.experts = 48; /* of memory some chunks a node, which are made resident by several jobs */
    synth.hidden = 256;
    synth.intermediate = 1024;
    synth.shard_bytes = 4 << 20;
    check(numoe_synth_write(directory, &synth, &error) == 0, error.message);
    for (i = 0; i < 6; i++) {
        struct numoe_options options = NUMOE_OPTIONS_INIT;
        struct numoe_load_options load = NUMOE_LOAD_OPTIONS_INIT;
        struct numoe *context = NULL;
        struct numoe_model *model = NULL;

        load.read = i % 2 ? NUMOE_READ_DISK : NUMOE_READ_CACHED;
        options.topology = "numa:4(memory=1GiB) core:2 pu:1";
        options.workers = i < 2 ? 1 : 2 + i;
        options.chaos_seed = i;
        options.spin_ns = i % 2 ? 0 : 100000;
        if (numoe_open(&options, &context, &error) < 0) {
            check(0, error.message);
            continue;
        }
        check(numoe_model_load(context, directory, &load, &model, &error) == 0, error.message);
        sums[i] = model ? checksum(model, 2, 48) : 0;
        numoe_model_destroy(model);
        check(i == 0 || sums[i] == sums[0], "packed bytes differ");
        load.progress = cancel_after;
        model = NULL;
        check(numoe_model_load(context, directory, &load, &model, &error) == -ECANCELED,
              "a cancelled load");
        check(model == NULL, "a cancelled load gave a model");
        numoe_close(context);
    }
    snprintf(command, sizeof command, "rm -rf '%s'", directory);
    if (system(command) != 0)
        printf("cannot remove %s\n", directory);
    printf("%u passed, %u failed\n", passed, failed);
    return failed != 0;
}
