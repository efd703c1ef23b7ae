/*
 * read_tuning.h - how many blocks are read at once, and how large they are: by what was measured.
 *
 * Each of a few settings is used for a while, three times in turns, so that a disturbance hits one
 * time of several settings and not all times of one. The setting whose middle rate is the best is
 * kept for the rest, if that is by a tenth better than the first's: what differs by less is of one
 * speed, and the first it stays. A time in which nothing was in flight for a moment, as who takes
 * what arrives was busy, says nothing of the disk and does not count; nor does a setting of which
 * two of three do not. Bytes and times are the caller's.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_READ_TUNING_H
#define NUMOE_READ_TUNING_H

#include <stdbool.h>
#include <stdint.h>

enum { NUMOE_READ_SETTINGS = 6, NUMOE_READ_ROUNDS = 3 };

struct numoe_read_setting {
    uint32_t depth, block_bytes;
};

/* The first is the one to begin with: measured on virtual disks and NVMe by numoe-read-rate. */
extern const struct numoe_read_setting numoe_read_settings[NUMOE_READ_SETTINGS];

/* Least bytes of what is measured: all trials are a third of that. */
extern const uint64_t numoe_read_tuned_bytes;

struct numoe_read_tuning {
    unsigned trial;   /* setting trial % SETTINGS; SETTINGS * ROUNDS: it is over */
    unsigned setting; /* in use */
    bool measuring;   /* else what is in flight from the setting before is waited for */
    uint64_t bytes, dry, began_ns;                        /* when this began */
    double rates[NUMOE_READ_SETTINGS][NUMOE_READ_ROUNDS]; /* GB/s; 0: not known. Middle ones in
                                                             [][0] at the end */
};

/* @param total_bytes  that will be read; with too few it is over at once */
void numoe_read_tuning_begin(struct numoe_read_tuning *tuning, uint64_t total_bytes,
                             uint64_t now_ns);

/* Look whether it is time for the next setting.
 * @param bytes  read since the beginning
 * @param dry    how often nothing was in flight
 * @return whether tuning->setting is another one now */
bool numoe_read_tuning_look(struct numoe_read_tuning *tuning, uint64_t bytes, uint64_t dry,
                            uint64_t now_ns);

static inline bool numoe_read_tuning_over(const struct numoe_read_tuning *tuning)
{
    return tuning->trial == NUMOE_READ_SETTINGS * NUMOE_READ_ROUNDS;
}

#endif
