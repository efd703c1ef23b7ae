/*
 * safetensors.h - the tensors that safetensors files hold: names, types, shapes, places.
 *
 * One table over any number of files. A file's header is checked in full before anything of it
 * enters the table; no data is read. What is enforced: the header's length lies within the file
 * and within NUMOE_SAFETENSORS_HEADER_LIMIT; it is one JSON object in UTF-8 with unique keys;
 * each tensor has a known type, a shape, and offsets whose distance is exactly its size; in order
 * of offset the tensors leave no gap, do not overlap, begin at the data's start and end at the
 * file's end.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_SAFETENSORS_H
#define NUMOE_SAFETENSORS_H

#include "base/numoe_base.h"

#include <stdint.h>

/* Longest header accepted. Real ones of 1.3 million tensors reach 132 MB. */
#define NUMOE_SAFETENSORS_HEADER_LIMIT ((uint64_t)256 << 20)

enum { NUMOE_SAFETENSORS_MAX_RANK = 32 };

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
    NUMOE_DTYPE_COUNT
};

/* "F32"; NULL for a number that is no dtype. */
const char *numoe_dtype_name(enum numoe_dtype dtype);
unsigned numoe_dtype_bits(enum numoe_dtype dtype);

struct numoe_tensor {
    const char *name;      /* the table's, until it is destroyed */
    const uint64_t *shape; /* rank numbers, likewise */
    uint64_t begin, end;   /* bytes of the file, absolute */
    uint32_t file;         /* what numoe_tensors_read was told */
    uint8_t rank;
    uint8_t dtype; /* enum numoe_dtype */
};

struct numoe_tensors;

int numoe_tensors_create(struct numoe_tensors **tensors, struct numoe_error *error);
void numoe_tensors_destroy(struct numoe_tensors *tensors);

/*
 * Check a file's header and add its tensors, in order of offset. The file is closed again and
 * none of it is left in the page cache.
 * @param file   number that its tensors will carry; one number a file
 * @param bytes  NULL, or where to put the file's size
 * @return 0; -ENOENT and the like; -EBADMSG with file, tensor and numbers; -ENOMEM. On failure
 *         the table is as it was.
 */
int numoe_tensors_read(struct numoe_tensors *tensors, const char *path, uint32_t file,
                       uint64_t *bytes, struct numoe_error *error);

uint64_t numoe_tensors_count(const struct numoe_tensors *tensors);

/* The i-th, or NULL. The pointer is good until the next numoe_tensors_read. */
const struct numoe_tensor *numoe_tensors_at(const struct numoe_tensors *tensors, uint64_t i);

/* The tensor of that name in that file, or NULL. By hash. */
const struct numoe_tensor *numoe_tensors_find(const struct numoe_tensors *tensors, const char *name,
                                              uint32_t file);

/* "[32, 8]" for messages, cut when long. */
struct numoe_shape_text {
    char text[96];
};
struct numoe_shape_text numoe_shape_text(const uint64_t *shape, unsigned rank);

#endif
