/*
 * tensors.h - a table of the tensors that files hold: names, types, shapes, places.
 *
 * One table over any number of files, of either format (safetensors.h, gguf.h). A file's tensors
 * enter it when all of them are sound.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_TENSORS_H
#define NUMOE_TENSORS_H

#include "base/numoe_base.h"

#include <stddef.h>
#include <stdint.h>

enum numoe_dtype {
    NUMOE_DTYPE_BOOL,
    NUMOE_DTYPE_F4,
    NUMOE_DTYPE_F6_E2M3,
    NUMOE_DTYPE_F6_E3M2,
    NUMOE_DTYPE_U8,
    NUMOE_DTYPE_I8,
    NUMOE_DTYPE_F8_E5M2,
    NUMOE_DTYPE_F8_E4M3,
    NUMOE_DTYPE_F8_E8M0,
    NUMOE_DTYPE_F8_E4M3FNUZ,
    NUMOE_DTYPE_F8_E5M2FNUZ,
    NUMOE_DTYPE_I16,
    NUMOE_DTYPE_U16,
    NUMOE_DTYPE_F16,
    NUMOE_DTYPE_BF16,
    NUMOE_DTYPE_I32,
    NUMOE_DTYPE_U32,
    NUMOE_DTYPE_F32,
    NUMOE_DTYPE_C64,
    NUMOE_DTYPE_F64,
    NUMOE_DTYPE_I64,
    NUMOE_DTYPE_U64,
    NUMOE_DTYPE_MXFP4, /* of GGUF: blocks of 32 values in 17 bytes, a scale first */
    NUMOE_DTYPE_OTHER, /* of GGUF: see numoe_tensor.type */
    NUMOE_DTYPE_COUNT
};

/* "F32"; NULL for a number that is no dtype, and for OTHER. */
const char *numoe_dtype_name(enum numoe_dtype dtype);
/* Of one element; 0 for those that come in blocks. */
unsigned numoe_dtype_bits(enum numoe_dtype dtype);

struct numoe_tensor {
    const char *name;      /* the table's, until it is destroyed */
    const uint64_t *shape; /* rank numbers, likewise */
    uint64_t begin, end;   /* bytes of the file, absolute */
    uint32_t file;         /* what the reader of the file was told */
    uint8_t rank;
    uint8_t dtype;    /* enum numoe_dtype */
    const char *type; /* its name, for messages */
};

struct numoe_tensors;

int numoe_tensors_create(struct numoe_tensors **tensors, struct numoe_error *error);
void numoe_tensors_destroy(struct numoe_tensors *tensors);

uint64_t numoe_tensors_count(const struct numoe_tensors *tensors);

/* The i-th, or NULL. The pointer is good until the next file is read. */
const struct numoe_tensor *numoe_tensors_at(const struct numoe_tensors *tensors, uint64_t i);

/* The tensor of that name in that file, or NULL. By hash. */
const struct numoe_tensor *numoe_tensors_find(const struct numoe_tensors *tensors, const char *name,
                                              uint32_t file);

/* "[32, 8]" for messages, cut when long. */
struct numoe_shape_text {
    char text[96];
};
struct numoe_shape_text numoe_shape_text(const uint64_t *shape, unsigned rank);

/* ---- for readers of files ------------------------------------------------------------------- */

/*
 * Room for `count` more tensors; those that were filled in before and have not joined stay.
 * @return where to fill them in, good until the next call; NULL: no memory
 */
struct numoe_tensor *numoe_tensors_room(struct numoe_tensors *tensors, uint64_t count);

/*
 * The first `count` of them join the table. Only then are they found.
 * @return NULL; or a name that the file has twice: then none has joined
 */
const char *numoe_tensors_join(struct numoe_tensors *tensors, uint64_t count);

/* Memory that lives as long as the table, for names and shapes. NULL: none left. */
void *numoe_tensors_keep(struct numoe_tensors *tensors, size_t bytes);

#endif
