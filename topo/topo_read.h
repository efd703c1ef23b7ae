/*
 * topo_read.h - read JSON that may come from anyone: a saved machine, a plan.
 *
 * The first thing that is wrong is kept in the reader, and everything after it is skipped: each
 * function then returns 0 or NULL, so that a chain of them is checked once, at its end.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef TOPO_READ_H
#define TOPO_READ_H

#include "numoe_topo.h"

#include <jansson.h>

/* Bytes of a file of JSON; in memory it is some twenty times as large. */
enum { TOPO_MAX_JSON_BYTES = 16 << 20 };

struct topo_reader {
    const char *file; /* where errors say it is */
    const char *what; /* "saved machine", "plan" */
    int code;         /* of what is wrong with the contents */
    struct numoe_error *error;
    char at[48]; /* "nodes[3]" */
    int rc;
};

/* Read a regular file of at most so many bytes; a zero byte follows the text, which is to be
 * freed. what: "topology", for messages. @return 0, -E2BIG, -EINVAL, -ENOMEM or what opening said
 */
int topo_file_read(const char *path, size_t most, const char *what, char **text, size_t *bytes,
                   struct numoe_error *error);

/* The object that a text holds, with the version of its format under key; NULL with an error when
 * it is something else. neither: said of what is no JSON. */
json_t *topo_read_root(struct topo_reader *reader, const char *text, size_t bytes, const char *key,
                       int version, const char *neither);

/* "damaged saved machine: nodes[3].key ..." */
void topo_read_wrong(struct topo_reader *reader, const char *key, const char *format, ...)
    NUMOE_PRINTF(3, 4);
void topo_read_no_memory(struct topo_reader *reader);

/* An integer from least up to and with most. */
uint64_t topo_read_between(struct topo_reader *reader, const json_t *object, const char *key,
                           uint64_t least, uint64_t most);
/* An integer from 0 up to and with most. */
uint64_t topo_read_number(struct topo_reader *reader, const json_t *object, const char *key,
                          uint64_t most);
uint32_t topo_read_u32(struct topo_reader *reader, const json_t *object, const char *key,
                       uint32_t most);
/* An index below count, or null: NUMOE_NONE. */
uint32_t topo_read_index(struct topo_reader *reader, const json_t *object, const char *key,
                         uint32_t count);
bool topo_read_boolean(struct topo_reader *reader, const json_t *object, const char *key);
/* A number from 0 up to and with most. */
double topo_read_real(struct topo_reader *reader, const json_t *object, const char *key,
                      double most);
/* A string shorter than most; "" when it is not. value belongs to key, or is an item of it. */
const char *topo_read_string(struct topo_reader *reader, const json_t *value, const char *key,
                             size_t most);
/* A printable copy of one shorter than TOPO_SAVED_TEXT. */
char *topo_read_copy(struct topo_reader *reader, const json_t *value, const char *key);
enum numoe_node_kind topo_read_kind(struct topo_reader *reader, const json_t *object,
                                    const char *key);
/* "cgroup_bytes" and "cpu_quota", each a number or null: no limit. */
void topo_read_limits(struct topo_reader *reader, const json_t *object, uint64_t *cgroup_bytes,
                      double *cpu_quota);
void topo_read_notes(struct topo_reader *reader, const json_t *object, char ***notes,
                     uint32_t *count);

/* An object, or NULL with an error; reader->at becomes key. */
const json_t *topo_read_object(struct topo_reader *reader, const json_t *object, const char *key);
/* An array of least to most items; NULL with an error when it is not. */
const json_t *topo_read_array(struct topo_reader *reader, const json_t *object, const char *key,
                              size_t least, size_t most);
/* An item, which must be an object; reader->at becomes "key[i]". */
const json_t *topo_read_item(struct topo_reader *reader, const json_t *items, const char *key,
                             size_t i);
/* An item of an array of integers from 0 up to and with most. */
uint64_t topo_read_element(struct topo_reader *reader, const json_t *items, const char *key,
                           size_t i, uint64_t most);
/* The distances between so many nodes, row by row, 10 from a node to itself. */
uint32_t *topo_read_distances(struct topo_reader *reader, const json_t *object, const char *key,
                              uint32_t nodes);
/* What follows is not within an item or an object. */
void topo_read_outside(struct topo_reader *reader);

/* Make room for an array's items, zeroed. */
void *topo_read_room(struct topo_reader *reader, size_t count, size_t size);

#endif
