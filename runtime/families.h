/*
 * families.h - what each model family calls its experts, and the models known by name.
 *
 * A family is one entry of a table: how its expert tensors are named, where its config.json keeps
 * what, and which activation it computes. Files are recognised by their tensors' names.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_FAMILIES_H
#define NUMOE_FAMILIES_H

#include "numoe.h"
#include "safetensors.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The tensors of one expert: three matrices, each with codes and scales. */
enum numoe_part {
    NUMOE_PART_GATE_CODES,
    NUMOE_PART_GATE_SCALES,
    NUMOE_PART_UP_CODES,
    NUMOE_PART_UP_SCALES,
    NUMOE_PART_DOWN_CODES,
    NUMOE_PART_DOWN_SCALES,
    NUMOE_PART_COUNT
};

/* Keys are looked up in `section` of config.json, or in its top when that is NULL. A NULL key:
 * the family's config does not say it. */
struct numoe_family {
    const char *name;       /* "deepseek-v4" */
    const char *title;      /* for messages */
    bool supported;         /* else only recognised, by `marker`, and refused by title */
    const char *marker;     /* what names of its expert tensors contain, and, after a number, */
    const char *marker_end; /* how they end; NULL: in any way */

    /* prefix LAYER middle EXPERT "." matrix "." part */
    const char *prefix, *middle;
    const char *matrices[3]; /* gate, up, down */
    const char *codes, *scales;
    enum numoe_dtype codes_dtype, scales_dtype; /* in its own files; more are accepted */

    /* Whether config.json's "architectures" or "model_type" name it */
    const char *architecture, *model_type;
    const char *section;
    const char *layers_key;       /* all layers, dense ones included */
    const char *dense_layers_key; /* leading layers without experts; NULL: there are none */
    const char *experts_key, *top_k_key, *hidden_key, *intermediate_key;
    const char *limit_key, *gate_cap_key, *up_cap_key;
    const char *act; /* what hidden_act must say if the file has it; NULL: not looked at */
    uint64_t experts_per_token;         /* where config.json is silent */
    struct numoe_activation activation; /* likewise */
};

/* i from 0; NULL past the end. */
const struct numoe_family *numoe_family_at(size_t i);
/* NULL for a name that is NULL or not known. */
const struct numoe_family *numoe_family_by_name(const char *name);

/* Whether a tensor is one of the family's expert tensors, and which. */
bool numoe_family_match(const struct numoe_family *family, const char *tensor, uint32_t *layer,
                        uint32_t *expert, enum numoe_part *part);

/* Whether the name is one of the family's; for those that are not supported too. */
bool numoe_family_marks(const struct numoe_family *family, const char *tensor);

/* The reverse. Layer as in the file. @return length, as snprintf */
int numoe_family_tensor(const struct numoe_family *family, uint64_t layer, uint64_t expert,
                        enum numoe_part part, char *name, size_t size);

/* A model that `numoe plan` knows by name; those of a supported family `numoe synth` writes. */
struct numoe_known_model {
    const char *name;     /* "v4-flash" */
    const char *family;   /* name of its entry above; NULL: its files are not known */
    uint64_t first_layer; /* file number of the first layer with experts */
    struct numoe_model_desc desc;
};

const struct numoe_known_model *numoe_known_model(const char *name);

/**
 * The description of a model by its short name.
 * @return 0; -EINVAL with the known names listed
 */
int numoe_model_by_name(const char *name, struct numoe_model_desc *desc, struct numoe_error *error);

/* Known names in order; NULL past the end. */
const char *numoe_model_name_at(size_t i);

#endif
