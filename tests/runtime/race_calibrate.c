/* Measuring starts and ends teams of threads: also under ThreadSanitizer. */
#include "calibrate.h"

#include <stdio.h>

int main(void)
{
    const struct numoe_calibrate_options options = {.pair_ns = 6000000, .buffer_bytes = 4 << 20};
    struct numoe_error error = NUMOE_ERROR_INIT;
    int passed = 0, failed = 0;

    for (int round = 0; round < 5; round++) {
        struct numoe_machine *machine;

        if (numoe_machine_load(NULL, &machine, &error)) {
            fprintf(stderr, "%s\n", error.message);
            failed++;
            continue;
        }
        if (numoe_calibrate(machine, &options, &error)) {
            fprintf(stderr, "%s\n", error.message);
            failed++;
        } else {
            passed++;
        }
        numoe_machine_free(machine);
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
