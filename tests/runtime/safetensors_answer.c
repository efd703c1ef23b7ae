/*
 * safetensors_answer: paths on stdin, one a line; for each a line on stdout: "ok" and the tensors
 * with their shapes and bytes, or "no" and what is wrong.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static void answer(const char *path)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_tensors *tensors = NULL;
    int rc = numoe_tensors_create(&tensors, &error);

    if (!rc)
        rc = numoe_tensors_read(tensors, path, 0, NULL, &error);
    if (rc) {
        printf("no\t%s\n", error.message);
    } else {
        printf("ok");
        for (uint64_t i = 0; i < numoe_tensors_count(tensors); i++) {
            const struct numoe_tensor *t = numoe_tensors_at(tensors, i);

            printf("\t%s %s %s %" PRIu64, t->name, t->type,
                   numoe_shape_text(t->shape, t->rank).text, t->end - t->begin);
        }
        printf("\n");
    }
    fflush(stdout);
    numoe_tensors_destroy(tensors);
}

int main(void)
{
    char path[4096];

    while (fgets(path, sizeof path, stdin)) {
        path[strcspn(path, "\n")] = 0;
        answer(path);
    }
    return 0;
}
