/* A saved machine: JSON, read without hwloc. SPDX-License-Identifier: Apache-2.0 */
#include "fuzz.h"

#include <ctype.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine = NULL;
    char *text = fuzz_text(data, size), *at = text;
    const char *path;
    int rc;

    if (!text)
        return -1;
    while (isspace((unsigned char)*at))
        at++;
    if (*at != '{') { /* that would be XML, for hwloc to read */
        free(text);
        return -1;
    }
    path = fuzz_path("machine.json");
    fuzz_write(path, data, size, 0);
    rc = numoe_machine_load(path, &machine, &error);
    if (rc)
        fuzz_check_error(rc, &error);
    else
        fuzz_use_machine(machine, text);
    free(text);
    return 0;
}
