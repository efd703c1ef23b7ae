/*
 * cli_certify.h - a GPU's checks as a list that can be taken up again.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CLI_CERTIFY_H
#define NUMOE_CLI_CERTIFY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/numoe_base.h"

struct cli_values;
struct numoe_gpu;

enum certify_state {
    CERTIFY_OPEN,
    CERTIFY_OK,
    CERTIFY_FAILED,
    CERTIFY_ABSENT, /* the device does not have it */
    CERTIFY_ERROR   /* could not be tried */
};

enum certify_kind {
    CERTIFY_FORM,
    CERTIFY_CODES,
    CERTIFY_PIPELINE,
    CERTIFY_PASSING,
    CERTIFY_MARLIN,
    CERTIFY_RATES,
    CERTIFY_PREFILL
};

struct certify_check {
    enum certify_kind kind;
    char id[64];                  /* "form-32.silu.512.graph" */
    int form, activation, matrix; /* form: 0: as is chosen */
    uint32_t tokens;
    bool graph;
    enum certify_state state;
    double rel_l2;   /* of checks */
    double value[3]; /* of rates: read, link and mma, 10^9 a second; of prefill: tokens/s of 43
                        layers, total over the larger of copy and compute, link fraction */
    char text[200];  /* what is wrong */
};

struct certify {
    struct numoe_gpu *gpu;
    char device[256]; /* whose checks these are: name, driver, build */
    struct certify_check *checks;
    uint32_t count;
    double link_gbs;
    long kept; /* bytes of the file that was read, of whole lines; 0: there was none */
    bool anew; /* there was one, with nothing in it but what was cut off of its first line */
};

/* All checks of a device, none of them done; in the order in which they are done. 0 or -ENOMEM */
int certify_init(struct certify *certify, struct numoe_gpu *gpu);
void certify_fini(struct certify *certify);

/* Read what a file says was done before, if there is one. Its last line may be cut off; where that
 * is the first, or there is none, all is open and `anew` set. -EINVAL: of another device or build,
 * damaged before its last line, or no regular file; -errno */
int certify_resume(struct certify *certify, const char *path, struct numoe_error *error);

/* Do what is open, and after each check append it to the file unless path is NULL. done is told how
 * many are, and may be NULL. 0; -EIO, -errno: the device or the file is lost */
int certify_run(struct certify *certify, const char *path,
                void (*done)(const struct certify_check *check, uint32_t done, uint32_t count),
                struct numoe_error *error);

/* What numoe certify does with a device's checks: take them up again, do what is open with progress
 * shown on a terminal, write the report, print. verdict: the gate's. Returns an exit code. */
int certify_command(struct certify *certify, const char *verdict, const struct cli_values *values);

uint32_t certify_failures(const struct certify *certify);
const char *certify_state_name(enum certify_state state);

#endif
