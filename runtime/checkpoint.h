/*
 * checkpoint.h - safetensors or GGUF files seen as a model's experts.
 *
 * Everything that can be known without reading weights is checked when it is opened: every file
 * that the index names is there and sound, every tensor is in the file that the index says, every
 * expert of every layer has its tensors, all of one shape, and no others, and config.json, or the
 * metadata of GGUF, agrees.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CHECKPOINT_H
#define NUMOE_CHECKPOINT_H

#include "families.h"
#include "files.h"
#include "numoe.h"

#include <stdbool.h>
#include <stdint.h>

struct numoe_checkpoint;

/* Where a part of an expert lies: `rows` rows of row_bytes, stride apart, from offset on. Parts may
 * lie between each other's rows. All 0: the expert has no such part. */
struct numoe_extent {
    uint64_t offset, bytes; /* to the end of the last row */
    uint64_t rows, row_bytes, stride;
    uint32_t file;  /* 0 .. numoe_checkpoint_file_count - 1 */
    uint16_t step;  /* from one block of codes, or one scale, of a row to the next; bytes */
    uint16_t dtype; /* enum numoe_dtype; of biases */
};

struct numoe_checkpoint_options {
    const struct numoe_log *log; /* where notices go; copied. NULL: nowhere */
    bool draft;                  /* the model's draft layers, and not its others */
    const char *family;          /* path of a description of a family (family_file.h), which is
                                    taken whatever other is known; NULL: none */
};

/**
 * Open a directory with config.json and either model.safetensors.index.json and its shards, or
 * model.safetensors; or one of GGUF files; or a GGUF file, the first of them where it is split.
 * Safetensors files that no index names are left alone and reported through log.
 * @param options  NULL for defaults
 * @return 0; -ENOENT (all missing files named, as far as a message holds; each through log),
 *         -EBADMSG (file, tensor and numbers named), -ENOTSUP (what was found is named), -ENOMEM,
 *         and what opening and reading files returns
 */
int numoe_checkpoint_open(const char *directory, const struct numoe_checkpoint_options *options,
                          struct numoe_checkpoint **checkpoint, struct numoe_error *error);
void numoe_checkpoint_close(struct numoe_checkpoint *checkpoint);

const struct numoe_model_desc *numoe_checkpoint_desc(const struct numoe_checkpoint *checkpoint);
const struct numoe_family *numoe_checkpoint_family(const struct numoe_checkpoint *checkpoint);

/* The number that a MoE layer, counted from 0, has in the files. */
uint64_t numoe_checkpoint_file_layer(const struct numoe_checkpoint *checkpoint, uint64_t layer);

/* How codes of a byte are ordered, in all of its experts. */
enum numoe_nibbles numoe_checkpoint_nibbles(const struct numoe_checkpoint *checkpoint);

/* Where the parts of an expert lie; layer and expert below the description's counts. */
void numoe_checkpoint_expert(const struct numoe_checkpoint *checkpoint, uint64_t layer,
                             uint64_t expert, struct numoe_extent parts[NUMOE_PART_COUNT]);

/* Bytes of one expert on disk, and of all experts. */
uint64_t numoe_checkpoint_expert_bytes(const struct numoe_checkpoint *checkpoint);
uint64_t numoe_checkpoint_bytes(const struct numoe_checkpoint *checkpoint);

uint32_t numoe_checkpoint_file_count(const struct numoe_checkpoint *checkpoint);
/* The directory, or GGUF file, that was opened. */
const char *numoe_checkpoint_directory(const struct numoe_checkpoint *checkpoint);

/* Path of a file, and which it was when its header was read. */
const char *numoe_checkpoint_file(const struct numoe_checkpoint *checkpoint, uint32_t file,
                                  struct numoe_file_id *id);

/* *.safetensors files in the directory that are not part of the model. */
uint32_t numoe_checkpoint_strays(const struct numoe_checkpoint *checkpoint);

#endif
