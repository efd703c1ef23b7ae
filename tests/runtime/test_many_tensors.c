/* Half a million tensors in 96 files are parsed and resolved in no time. */
#include "checkpoint.h"
#include "synth.h"

#include "base/sanitized.h"
#include "loader_files.h"

#include <time.h>

/* Time of one processor, so that others at work do not count. */
static double cpu_seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* A build with sanitizers or without optimisation has no limit. */
#if SANITIZED || !defined __OPTIMIZE__
static const double limit = 1e9;
#else
static const double limit = 6; /* 1.6 when nobody else is at work */
#endif

Test(many_tensors, open_at_once, .timeout = 300)
{
    struct numoe_synth_options options = NUMOE_SYNTH_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_checkpoint *checkpoint;
    char *directory = files_dir();
    double began;

    options.model = "kimi-k3";
    options.hidden = options.intermediate = 32;
    options.shard_bytes = 1520000;
    cr_assert_eq(numoe_synth_write(directory, &options, &error), 0, "%s", error.message);
    began = cpu_seconds();
    cr_assert_eq(numoe_checkpoint_open(directory, NULL, &checkpoint, &error), 0, "%s",
                 error.message);
    cr_expect_lt(cpu_seconds() - began, limit);
    cr_expect_geq(numoe_checkpoint_file_count(checkpoint), 90);
    cr_expect_eq(numoe_checkpoint_desc(checkpoint)->layers *
                     numoe_checkpoint_desc(checkpoint)->experts,
                 92 * 896);
    numoe_checkpoint_close(checkpoint);
    files_drop(directory);
}
