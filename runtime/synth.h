/*
 * synth.h - checkpoints with a real model's names, types and shapes, and made-up weights.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_SYNTH_H
#define NUMOE_SYNTH_H

#include "base/numoe_base.h"

#include <stdbool.h>
#include <stdint.h>

enum numoe_synth_layout {
    NUMOE_SYNTH_OWN, /* safetensors files as the model's maker has them */
    NUMOE_SYNTH_GGUF,
    NUMOE_SYNTH_GGUF_MERGED /* with gate and up in one tensor */
};

struct numoe_synth_options {
    const char *model;     /* "v4-flash", "v4-pro", "kimi-k3", "gpt-oss-20b", ... */
    uint64_t layers;       /* layers with experts; 0: the model's */
    uint64_t experts;      /* a layer; 0: the model's */
    uint64_t seed;         /* decides every byte */
    uint64_t hidden;       /* multiple of 32, for small tests; 0: the model's */
    uint64_t intermediate; /* likewise */
    enum numoe_synth_layout layout;
    bool draft;           /* with a draft layer, of the models that have some */
    uint64_t shard_bytes; /* a file holds at most so many bytes of tensors, or one tensor */
    /* Called after every few MB by the calling thread; nonzero cancels. May be NULL. */
    int (*progress)(void *user, uint64_t bytes_done, uint64_t bytes_total);
    void *user;
};

#define NUMOE_SYNTH_OPTIONS_INIT                                                                   \
    {                                                                                              \
        .shard_bytes = (uint64_t)512 << 20                                                         \
    }

/**
 * Write a checkpoint: config.json, shards, model.safetensors.index.json; or GGUF files, and a
 * config.json that says no more than who wrote them. Weights are such that
 * outputs are about as large as inputs: Gaussian codes, scale bytes of the usual spread with some
 * rows at its ends, some groups of zeros. A matrix's values depend on the seed, its layer, expert
 * and place only, whatever the layout. Nothing of it stays in the page cache.
 * @param directory  made when absent; else it must be empty or hold an earlier output of this
 *                   function and nothing else, which is then replaced
 * @return 0; -EINVAL, -ENOTSUP (model known but not written yet), -EEXIST (other files: named),
 *         -ENOSPC, -EOVERFLOW, -ECANCELED, what the file system says. On failure what was written
 *         is removed again.
 */
int numoe_synth_write(const char *directory, const struct numoe_synth_options *options,
                      struct numoe_error *error);

#endif
