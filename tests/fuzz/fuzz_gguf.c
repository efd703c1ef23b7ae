/*
 * A GGUF file up to its data, which is zeros. If it reads as a model, every expert lies within the
 * file.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "checkpoint.h"
#include "fuzz.h"
#include "gguf.h"

#include <stdlib.h>

static void check_tensors(const char *path)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_tensors *tensors = NULL;
    json_t *metadata = json_object();
    struct numoe_file_id id = {0};
    int rc = numoe_tensors_create(&tensors, &error);

    check_that(rc == 0 && metadata);
    rc = numoe_gguf_read(tensors, path, 0, &id, metadata, &error);
    if (rc)
        fuzz_check_error(rc, &error);
    check_that(!rc || !numoe_tensors_count(tensors));
    for (uint64_t i = 0; i < numoe_tensors_count(tensors); i++) {
        const struct numoe_tensor *t = numoe_tensors_at(tensors, i);

        check_that(t->begin <= t->end && t->end <= id.bytes && t->type && t->rank >= 1);
        check_that(numoe_tensors_find(tensors, t->name, 0) == t);
    }
    json_decref(metadata);
    numoe_tensors_destroy(tensors);
}

static void check_model(const char *path)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_checkpoint *checkpoint;
    const struct numoe_model_desc *desc;
    int rc = numoe_checkpoint_open(path, NULL, &checkpoint, &error);

    if (rc) {
        fuzz_check_error(rc, &error);
        return;
    }
    desc = numoe_checkpoint_desc(checkpoint);
    for (uint64_t q = 0; q < desc->layers * desc->experts; q++) {
        struct numoe_extent parts[NUMOE_PART_COUNT];
        struct numoe_file_id id;

        numoe_checkpoint_expert(checkpoint, q / desc->experts, q % desc->experts, parts);
        for (int p = 0; p < NUMOE_PART_COUNT; p++) {
            numoe_checkpoint_file(checkpoint, parts[p].file, &id);
            check_that(parts[p].offset <= id.bytes && parts[p].bytes <= id.bytes - parts[p].offset);
        }
    }
    numoe_checkpoint_close(checkpoint);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *path = fuzz_path("model.gguf");

    fuzz_write(path, data, size, 1 << 16);
    check_tensors(path);
    check_model(path);
    return 0;
}
