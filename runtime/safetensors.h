/*
 * safetensors.h - headers of safetensors files.
 *
 * A header is checked in full before anything of it enters the table; no data is read. What is
 * enforced: the header's length lies within the file and within NUMOE_SAFETENSORS_HEADER_LIMIT; it
 * is one JSON object in UTF-8 with unique keys; each tensor has a known type, a shape, and offsets
 * whose distance is exactly its size; in order of offset the tensors leave no gap, do not overlap,
 * begin at the data's start and end at the file's end.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_SAFETENSORS_H
#define NUMOE_SAFETENSORS_H

#include "files.h"
#include "tensors.h"

/* Longest header accepted. Real ones of 1.3 million tensors reach 132 MB. */
#define NUMOE_SAFETENSORS_HEADER_LIMIT ((uint64_t)256 << 20)

enum { NUMOE_SAFETENSORS_MAX_RANK = 32 };

/*
 * Check a file's header and add its tensors, in order of offset. The file is closed again and
 * the page cache is left as it was.
 * @param file   number that its tensors will carry; one number a file
 * @param id     NULL, or where to put which file it was
 * @return 0; -ENOENT and the like; -EBADMSG with file, tensor and numbers; -ENOMEM. On failure
 *         the table is as it was.
 */
int numoe_tensors_read(struct numoe_tensors *tensors, const char *path, uint32_t file,
                       struct numoe_file_id *id, struct numoe_error *error);

#endif
