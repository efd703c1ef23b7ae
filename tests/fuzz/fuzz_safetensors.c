/*
 * The header of a safetensors file. An input whose first byte is not 'H' is the file itself. Else
 * it is 'H', 4 bytes with the size of the data, and the header's text: the header's length is put
 * before it and data of zeros after it, so that changes to the text leave the frame intact.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "fuzz.h"
#include "safetensors.h"

#include <stdlib.h>
#include <string.h>

/* @return bytes of the file */
static uint64_t write_input(const char *path, const uint8_t *data, size_t size)
{
    uint32_t more;
    uint64_t length = size - 5;
    uint8_t *framed;

    if (size < 5 || data[0] != 'H') {
        fuzz_write(path, data, size, 0);
        return size;
    }
    memcpy(&more, data + 1, sizeof more);
    framed = malloc(8 + size);
    check_that(framed);
    for (int i = 0; i < 8; i++)
        framed[i] = (uint8_t)(length >> 8 * i);
    memcpy(framed + 8, data + 5, length);
    fuzz_write(path, framed, 8 + length, more);
    free(framed);
    return 8 + length + more;
}

static void check_tensor(const struct numoe_tensors *tensors, const struct numoe_tensor *tensor,
                         uint32_t file, uint64_t file_bytes)
{
    uint64_t bits = numoe_dtype_bits((enum numoe_dtype)tensor->dtype);

    check_that(tensor->file == file && tensor->dtype < NUMOE_DTYPE_COUNT);
    check_that(tensor->begin >= 8 && tensor->begin <= tensor->end && tensor->end <= file_bytes);
    check_that(tensor->rank <= NUMOE_SAFETENSORS_MAX_RANK);
    for (unsigned i = 0; i < tensor->rank; i++)
        bits *= tensor->shape[i];
    check_that(bits == (tensor->end - tensor->begin) * 8, "%s: %llu bits", tensor->name,
               (unsigned long long)bits);
    check_that(numoe_tensors_find(tensors, tensor->name, file) == tensor, "%s", tensor->name);
    check_that(!numoe_tensors_find(tensors, tensor->name, file + 1));
    check_that(*numoe_shape_text(tensor->shape, tensor->rank).text == '[');
}

/* The tensors of one file: in order, and from the data's begin to its end. */
static void check_file(const struct numoe_tensors *tensors, uint64_t first, uint64_t count,
                       uint32_t file, uint64_t file_bytes)
{
    for (uint64_t i = first; i < first + count; i++) {
        const struct numoe_tensor *tensor = numoe_tensors_at(tensors, i);

        check_that(tensor);
        check_tensor(tensors, tensor, file, file_bytes);
        if (i > first)
            check_that(numoe_tensors_at(tensors, i - 1)->end == tensor->begin);
    }
    if (count)
        check_that(numoe_tensors_at(tensors, first + count - 1)->end == file_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *path = fuzz_path("model.safetensors");
    struct numoe_error error = NUMOE_ERROR_INIT;
    uint64_t file_bytes = write_input(path, data, size), count;
    struct numoe_file_id id = {0};
    struct numoe_tensors *tensors;
    int rc;

    check_that(!numoe_tensors_create(&tensors, &error));
    rc = numoe_tensors_read(tensors, path, 3, &id, &error);
    count = numoe_tensors_count(tensors);
    if (rc) {
        fuzz_check_error(rc, &error);
        check_that(count == 0, "tensors of a damaged file");
        check_that(!numoe_tensors_find(tensors, "weight", 3));
        goto out;
    }
    check_that(id.bytes == file_bytes);
    check_file(tensors, 0, count, 3, file_bytes);
    /* a second file beside it leaves the first alone */
    check_that(!numoe_tensors_read(tensors, path, 5, NULL, &error), "%s", error.message);
    check_that(numoe_tensors_count(tensors) == 2 * count);
    check_file(tensors, 0, count, 3, file_bytes);
    check_file(tensors, count, count, 5, file_bytes);
out:
    check_that(!numoe_tensors_at(tensors, numoe_tensors_count(tensors)));
    numoe_tensors_destroy(tensors);
    return 0;
}
