/* A synthetic machine in one line, read by hwloc in a child. SPDX-License-Identifier: Apache-2.0 */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine = NULL;
    char *words = fuzz_text(data, size);
    int rc;

    /* this machine, or a file that happens to be here, would be no such string */
    if (!words || !*words || !strcmp(words, "live") || !access(words, F_OK)) {
        free(words);
        return -1;
    }
    rc = fuzz_load(words, &machine, &error);
    if (rc)
        fuzz_check_error(rc, &error);
    else
        fuzz_use_machine(machine, words);
    free(words);
    return 0;
}
