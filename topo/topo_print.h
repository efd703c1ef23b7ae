/*
 * topo_print.h - what text and JSON share.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef TOPO_PRINT_H
#define TOPO_PRINT_H

#include "numoe_topo.h"

#include <jansson.h>

const char *topo_kind_name(enum numoe_node_kind kind);

/* topo_ranges of numbers in any order; sorts them. */
const char *topo_sorted_ranges(char *text, size_t size, uint32_t *numbers, size_t count);

/* Helpers that take NULL and hand on NULL, so that a chain of them is checked once, at its end. */
json_t *topo_json_string(const char *text);
json_t *topo_json_number(uint64_t value); /* null past what JSON integers hold */
json_t *topo_json_index(uint32_t index);  /* null for NUMOE_NONE */
json_t *topo_json_numbers(const uint64_t *numbers, size_t count);
json_t *topo_json_list(const uint32_t *numbers, size_t count);
json_t *topo_json_notes(char *const *notes, uint32_t count);
/* Set one key; on failure *object is freed and becomes NULL. */
void topo_json_set(json_t **object, const char *key, json_t *value);
void topo_json_append(json_t **array, json_t *value);
/* Write with a final newline and free. @return 0, -ENOMEM when root is NULL, -EIO */
int topo_json_write(json_t *root, FILE *out);

/* A plan as numoe_plan_print_json writes it; NULL: out of memory. */
json_t *plan_json(const struct numoe_plan *plan);

#endif
