/*
 * family_file.h - a description of a model family in a file, for models that families.c has not.
 *
 * A JSON object with these keys; others are refused.
 *
 * - name, title: strings; title is for messages and may be left out.
 *
 * - tensors: an array of {"matrix": "gate" | "up" | "down" | "gate_up", "kind": "codes" | "scales"
 * | "blocks" | "bias", "name": PATTERN}, with codes and scales, or blocks, of all three matrices,
 * and biases of all or none. Patterns hold {layer}, and {expert} in all of them or in none.
 *
 * - gate_up: "interleaved" | "gate_first" | "up_first"; where a matrix is gate_up.
 *
 * - refuse: optional array of patterns: a tensor whose name begins so and that is none of the above
 * is an error.
 *
 * - activation: {"kind": "silu" | "silu_clamped" | "swiglu_oai" | "situ", and the numbers that it
 * has of limit, alpha, gate_cap, up_cap}; limit and gate_cap may come from the config instead.
 *
 * - experts_per_token: a number, for where the config has none.
 *
 * - config: optional: which keys of config.json (of GGUF: of the metadata, less the architecture)
 * hold what: section, layers, dense_layers, experts, experts_per_token, hidden, intermediate,
 * limit, gate_cap, up_cap.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_FAMILY_FILE_H
#define NUMOE_FAMILY_FILE_H

#include "families.h"

struct numoe_family_file;

/**
 * Read and check a description.
 * @return 0; -ENOENT and the like; -EBADMSG with what is wrong with which key; -ENOMEM
 */
int numoe_family_file_read(const char *path, struct numoe_family_file **file,
                           struct numoe_error *error);

/* Good until it is freed. */
const struct numoe_family *numoe_family_file_family(const struct numoe_family_file *file);

/* NULL is allowed. */
void numoe_family_file_free(struct numoe_family_file *file);

#endif
