/*
 * gpu_tuning_file.h - tables of kernels' times as files.
 *
 *     {"device": {"compute_capability": "9.0", "multiprocessors": 132,
 *                 "shared_bytes": 232448, "l2_bytes": 62914560},
 *      "shapes": [{"hidden": 4096, "intermediate": 2048,
 *                  "points": [{"tokens": 24, "ms": {"8": 4.2, "32": 1.58, "64": 1.7}}, ...]}]}
 *
 * tokens: of an expert, on average; ms: of a layer by each form that the device has.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_TUNING_FILE_H
#define NUMOE_GPU_TUNING_FILE_H

#include "numoe_gpu.h"

/* Read a table that is right as numoe_gpu_tuning_check says.
 * @return 0; -ENOENT, ...; -EBADMSG or -EINVAL with the file and the place */
int numoe_gpu_tuning_load(const char *path, struct numoe_gpu_tuning *tuning,
                          struct numoe_error *error);

/* Write one, whole or not at all. @return 0; -errno */
int numoe_gpu_tuning_save(const char *path, const struct numoe_gpu_tuning *tuning,
                          struct numoe_error *error);

#endif
