/*
 * gguf.h - headers of GGUF files, versions 2 and 3.
 *
 * What is enforced: magic and version; every count, length and offset lies within the file,
 * whatever they add up or multiply to; keys and names are unique, names shorter than 64 bytes; one
 * to four dimensions, the first of whole blocks of the type; an alignment that is a power of two;
 * each tensor begins where the padded sizes of those before it end, and ends within the file.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GGUF_H
#define NUMOE_GGUF_H

#include "files.h"
#include "tensors.h"

#include <jansson.h>

/*
 * Check a file's header and add its tensors, as numoe_tensors_read does. Shapes are in the order of
 * other files, slowest first: GGUF's dimensions reversed. Types that are in blocks, other than
 * MXFP4, are NUMOE_DTYPE_OTHER with their name.
 * @param metadata  NULL, or an object that gets the file's numbers, short strings and short arrays
 *                  of numbers, keys without the architecture that they begin with.
 * general.architecture is model_type there, so that it reads as a config.json does
 * @return as numoe_tensors_read; -ENOTSUP: a version or byte order that is not read (named)
 */
int numoe_gguf_read(struct numoe_tensors *tensors, const char *path, uint32_t file,
                    struct numoe_file_id *id, json_t *metadata, struct numoe_error *error);

#endif
