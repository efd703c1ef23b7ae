/*
 * A description of a model family. If it is accepted, each of its tensors' names is read back as
 * what it is of, and every part of an expert has a tensor.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "family_file.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    const struct numoe_family *family;
    struct numoe_family_file *file;
    const char *path = fuzz_path("family.json");
    int rc;

    fuzz_write(path, data, size, 0);
    rc = numoe_family_file_read(path, &file, &error);
    if (rc) {
        fuzz_check_error(rc, &error);
        return 0;
    }
    family = numoe_family_file_family(file);
    for (unsigned t = 0; t < numoe_family_tensors(family, true); t++) {
        char name[4096];
        uint32_t layer, expert;

        if (numoe_family_tensor_name(family, 3, 5, t, name, sizeof name) >= (int)sizeof name)
            continue;
        check_that(numoe_family_match(family, name, &layer, &expert) >= 0, "%s", name);
        numoe_family_stem(family, name);
    }
    for (int p = 0; p < NUMOE_PART_GATE_BIAS; p++)
        check_that(numoe_family_holder(family, (enum numoe_part)p) >= 0);
    numoe_family_file_free(file);
    return 0;
}
