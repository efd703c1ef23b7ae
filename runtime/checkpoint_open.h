/*
 * checkpoint_open.h - what opening a checkpoint keeps, for the files that do it.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CHECKPOINT_OPEN_H
#define NUMOE_CHECKPOINT_OPEN_H

#include "checkpoint.h"
#include "family_file.h"
#include "tensors.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Numbers within tensor names have at most nine digits. */
#define NAME_NUMBER_LIMIT ((uint64_t)1000000000)

struct shard {
    char *name, *path;
    uint32_t listed; /* which it was before files were put in order of name */
    struct numoe_file_id id;
    bool present;
};

struct place {
    uint64_t offset;
    uint32_t file;
};

struct numoe_checkpoint {
    struct numoe_log log;
    char *directory;
    struct shard *shards;
    uint32_t shard_count, strays;
    const struct numoe_family *family;
    struct numoe_family_file *own; /* where family is the user's */
    struct numoe_model_desc desc;
    uint32_t first_layer;
    unsigned tensor_count; /* of an expert, or of a layer where they are stacked */
    struct place *places;  /* [layer][expert, unless stacked][tensor] */
    uint16_t bias_dtype[NUMOE_FAMILY_TENSORS];
    uint64_t expert_bytes;
};

/* What only opening needs. */
struct opening {
    struct numoe_checkpoint *ckpt;
    const struct numoe_checkpoint_options *options;
    struct numoe_error *error;
    const char *config_name; /* for messages: "config.json" */
    json_t *config;
    char *index_text;             /* in which names of listed tensors are */
    struct numoe_tensors *listed; /* the index's: names, and which file's they are. NULL with a
                                     single file and with GGUF */
    uint32_t *order;              /* where a file that was listed n-th is among shards */
    bool gguf;
    struct numoe_tensors *tensors;
    const struct numoe_tensor **entries; /* the model's tensors, as the index has them */
    uint64_t entry_count;
};

/* ---- lists of what is missing --------------------------------------------------------------- */

enum { LIST_SHOWN = 8, LIST_LOGGED = 1000 };

struct list {
    const struct numoe_log *log;
    const char *what;
    uint64_t count;
    unsigned shown;
    size_t used;
    char text[300]; /* the first always fits */
};

/* file: NULL, or the one that it should be in */
void numoe_list_add(struct list *list, const char *name, const char *file);

struct list_text {
    char text[400];
};

/* "3 missing files: a, b, c"; empty when nothing is missing. */
struct list_text numoe_list_text(const struct list *list);

/* ---- steps ---------------------------------------------------------------------------------- */

/* @return 1 with *out set, 0 when the key is absent or null, or an error */
int numoe_config_number(struct opening *o, const json_t *section, const char *key, uint64_t *out);
const char *numoe_config_architecture(const json_t *config);
const char *numoe_config_model_type(const json_t *config);

/* From the entries: the family, how many layers and experts of which shape, and their places. */
int numoe_checkpoint_find_experts(struct opening *o);

#endif
