/*
 * A machine as hwloc writes it: XML. numoe's own checks before and after run here, hwloc's reading
 * of what passes the first in a child.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "fuzz.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine = NULL;
    const char *path = fuzz_path("machine.xml");
    char *text;
    int rc;

    fuzz_write(path, data, size, 0);
    rc = fuzz_load(path, &machine, &error);
    if (rc) {
        fuzz_check_error(rc, &error);
        return 0;
    }
    text = fuzz_text(data, size);
    fuzz_use_machine(machine, text);
    free(text);
    return 0;
}
