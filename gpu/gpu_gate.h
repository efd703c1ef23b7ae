/*
 * gpu_gate.h - whether a device is used: a pure function of evidence, gathered in steps.
 *
 * Not a list of chips. Each step is decided before the next is taken; what a step needs to know is
 * read only once the evidence has come so far.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_GATE_H
#define NUMOE_GPU_GATE_H

#include "numoe_gpu.h"

enum gpu_step {
    GPU_STEP_WANTED, /* mode */
    GPU_STEP_THERE,  /* built, driver, devices, index */
    GPU_STEP_LOADED, /* code for the device */
    GPU_STEP_FITS,   /* shared memory */
    GPU_STEP_TESTED  /* the self-test */
};

/* A relative L2 distance to the reference that bf16 activations keep well within. */
#define GPU_TEST_LIMIT 5e-3

struct gpu_evidence {
    enum gpu_step known; /* the last step whose fields are filled */
    enum numoe_gpu_mode mode;
    bool built, loaded; /* with CUDA; code for the device */
    const char *absent; /* THERE: why there is no CUDA, driver or device; NULL: there is */
    uint32_t devices, index;
    const char *name;
    int major, minor;
    const char *images;       /* what the build holds: "90-real,80-virtual" */
    const char *load_text;    /* if not: what the driver said */
    uint64_t shared_bytes;    /* what a block may have ... */
    uint64_t shared_need;     /* ... and what the largest configuration takes */
    const char *test_failure; /* the self-test did not come to an end: why; NULL */
    double rel_l2;
};

/* usable: nothing known so far speaks against it. */
void gpu_gate_decide(const struct gpu_evidence *evidence, struct numoe_gpu_verdict *verdict);

/* Whether one of the images runs on a device: machine code of the same major and no later minor
 * number, or PTX of no later number. */
bool gpu_gate_image(const char *images, int major, int minor);

#endif
