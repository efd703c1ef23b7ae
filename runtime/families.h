/*
 * families.h - what each model family calls its experts, and the models known by name.
 *
 * A family is one entry of a table: which tensors an expert has and what they are called, where its
 * config.json keeps what, and which activation it computes. Files are recognised by their tensors'
 * names. A new family is a new entry; a user's own is read from a file (family_file.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_FAMILIES_H
#define NUMOE_FAMILIES_H

#include "numoe.h"
#include "tensors.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What an expert is made of: three matrices of codes and scales, and perhaps biases. */
enum numoe_part {
    NUMOE_PART_GATE_CODES,
    NUMOE_PART_GATE_SCALES,
    NUMOE_PART_UP_CODES,
    NUMOE_PART_UP_SCALES,
    NUMOE_PART_DOWN_CODES,
    NUMOE_PART_DOWN_SCALES,
    NUMOE_PART_GATE_BIAS,
    NUMOE_PART_UP_BIAS,
    NUMOE_PART_DOWN_BIAS,
    NUMOE_PART_COUNT
};

/* Whose rows a tensor has. */
enum numoe_tensor_matrix {
    NUMOE_TENSOR_GATE,
    NUMOE_TENSOR_UP,
    NUMOE_TENSOR_DOWN,
    NUMOE_TENSOR_GATE_UP /* both, in the family's order */
};

/* What a tensor has of them: codes [rows, columns / 2] or [rows, columns / 32, 16] with the first
 * of a pair in the low nibble; scales [rows, columns / 32]; GGUF's blocks of a scale and 16 bytes
 * of codes [rows, columns]; biases [rows]. */
enum numoe_tensor_kind {
    NUMOE_TENSOR_CODES,
    NUMOE_TENSOR_SCALES,
    NUMOE_TENSOR_BLOCKS,
    NUMOE_TENSOR_BIAS
};

/* name: a pattern, in which {layer} and {expert} stand for numbers. Without {expert} the tensor has
 * the experts of its layer as its first dimension; all tensors of a family have it or none. */
struct numoe_family_tensor {
    enum numoe_tensor_matrix matrix;
    enum numoe_tensor_kind kind;
    const char *name;
    enum numoe_dtype dtype; /* as synth writes it; reading goes by what the file says */
};

enum { NUMOE_FAMILY_TENSORS = 9, NUMOE_FAMILY_STEMS = 4 };

/* Of a family whose activation depends on the architecture that the file names. */
struct numoe_architecture {
    const char *name; /* NULL ends a list */
    bool bias;        /* its experts have biases */
    struct numoe_activation activation;
};

/* Keys are looked up in `section` of config.json, or in its top when that is NULL. A NULL key:
 * the family's config does not say it. */
struct numoe_family {
    const char *name;       /* "deepseek-v4" */
    const char *title;      /* for messages */
    bool supported;         /* else only recognised, by `marker`, and refused by title */
    const char *marker;     /* what names of its expert tensors contain, and, after a number, */
    const char *marker_end; /* how they end; NULL: in any way */
    bool draft;             /* looked for when draft layers are asked for, and only then */

    struct numoe_family_tensor tensors[NUMOE_FAMILY_TENSORS]; /* biases last; a NULL name ends */
    bool optional_bias;                                       /* biases may all be absent */
    enum numoe_gate_up_order gate_up;
    /* A tensor whose name begins so and that is none of the above is an error: something of an
     * expert that would be left out. Patterns. */
    const char *stems[NUMOE_FAMILY_STEMS];

    /* Whether config.json's "architectures" or "model_type" name it */
    const char *architecture, *model_type;
    const char *section;
    const char *layers_key;       /* all layers, dense ones included */
    const char *dense_layers_key; /* leading layers without experts; NULL: there are none */
    const char *experts_key, *top_k_key, *hidden_key, *intermediate_key;
    const char *limit_key, *gate_cap_key, *up_cap_key;
    const char *act; /* what hidden_act must say if the file has it; NULL: not looked at */
    uint64_t experts_per_token;                     /* where config.json is silent */
    struct numoe_activation activation;             /* likewise */
    const struct numoe_architecture *architectures; /* not NULL: go by these instead */
    const char *gguf; /* what GGUF files call the architecture; NULL: nothing known */
};

/* i from 0; NULL past the end. */
const struct numoe_family *numoe_family_at(size_t i);
/* NULL for a name that is NULL or not known. */
const struct numoe_family *numoe_family_by_name(const char *name);

/* How many tensors an expert, or a layer's experts, has; with its biases or without. */
unsigned numoe_family_tensors(const struct numoe_family *family, bool bias);
/* Whether a tensor holds all experts of its layer. */
bool numoe_family_stacked(const struct numoe_family *family);

/* Whether its files are GGUF. */
bool numoe_family_gguf(const struct numoe_family *family);

/* Which of the family's tensors it is, from 0, or -1. expert is 0 where tensors are stacked. */
int numoe_family_match(const struct numoe_family *family, const char *tensor, uint32_t *layer,
                       uint32_t *expert);
/* Whether the name begins with one of the family's stems. */
bool numoe_family_stem(const struct numoe_family *family, const char *tensor);

/* Whether the name is one of the family's; for those that are not supported too. */
bool numoe_family_marks(const struct numoe_family *family, const char *tensor);

/* The reverse. Layer as in the file. @return length, as snprintf */
int numoe_family_tensor_name(const struct numoe_family *family, uint64_t layer, uint64_t expert,
                             unsigned tensor, char *name, size_t size);

/* Which tensor holds a part, or -1. */
int numoe_family_holder(const struct numoe_family *family, enum numoe_part part);
/* Whether that tensor holds gate and up. */
bool numoe_family_merged(const struct numoe_family *family, enum numoe_part part);

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
