/* The gate. SPDX-License-Identifier: Apache-2.0 */
#include "gpu_gate.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool gpu_gate_image(const char *images, int major, int minor)
{
    const char *p = images;

    while (p && *p) {
        char *end;
        const long number = strtol(p, &end, 10);
        const size_t length = strcspn(p, ",");
        const bool real = !memmem(p, length, "-virtual", 8), ptx = !memmem(p, length, "-real", 5);

        if (end != p) {
            if (real && number / 10 == major && number % 10 <= minor)
                return true;
            if (ptx && number <= 10L * major + minor)
                return true;
        }
        p += length;
        p += *p == ',';
    }
    return false;
}

NUMOE_PRINTF(2, 3) static void refuse(struct numoe_gpu_verdict *v, const char *format, ...)
{
    va_list args;

    v->usable = false;
    va_start(args, format);
    vsnprintf(v->reason, sizeof v->reason, format, args);
    va_end(args);
}

static void decide_there(const struct gpu_evidence *e, struct numoe_gpu_verdict *v)
{
    if (!e->built)
        refuse(v, "this build has no GPU support: %s", e->absent ? e->absent : "no reason");
    else if (e->absent)
        refuse(v, "%s", e->absent);
    else if (e->devices == 0)
        refuse(v, "the driver shows no device");
    else if (e->index >= e->devices)
        refuse(v, "there is no device %u: the driver shows %u", e->index, e->devices);
}

static void decide_loaded(const struct gpu_evidence *e, struct numoe_gpu_verdict *v)
{
    if (e->loaded)
        return;
    if (!gpu_gate_image(e->images, e->major, e->minor))
        refuse(v,
               "%s has compute capability %d.%d, and this build holds no code for it (%s); tensor "
               "cores for bf16 begin at 8.0",
               e->name, e->major, e->minor, e->images);
    else
        refuse(v,
               "the driver does not load this build's code (%s) on %s, compute capability %d.%d: "
               "%s",
               e->images, e->name, e->major, e->minor, e->load_text ? e->load_text : "no reason");
}

static void decide_fits(const struct gpu_evidence *e, struct numoe_gpu_verdict *v)
{
    if (e->shared_bytes < e->shared_need)
        refuse(
            v,
            "the kernels need %llu bytes of shared memory in a block, and %s grants %llu at most",
            (unsigned long long)e->shared_need, e->name, (unsigned long long)e->shared_bytes);
}

static void decide_tested(const struct gpu_evidence *e, struct numoe_gpu_verdict *v)
{
    v->rel_l2 = e->rel_l2;
    if (e->test_failure)
        refuse(v, "the self-test on %s failed: %s", e->name, e->test_failure);
    else if (!(e->rel_l2 <= GPU_TEST_LIMIT))
        refuse(v,
               "the self-test on %s is off by a relative L2 of %.2e from the reference, more than "
               "%.0e",
               e->name, e->rel_l2, GPU_TEST_LIMIT);
}

void gpu_gate_decide(const struct gpu_evidence *e, struct numoe_gpu_verdict *v)
{
    static void (*const steps[])(const struct gpu_evidence *, struct numoe_gpu_verdict *) = {
        decide_loaded, decide_fits, decide_tested};

    *v = (struct numoe_gpu_verdict){.usable = true, .rel_l2 = -1};
    if (e->mode == NUMOE_GPU_OFF) {
        refuse(v, "not asked for");
        return;
    }
    if (e->known >= GPU_STEP_THERE)
        decide_there(e, v);
    for (int step = GPU_STEP_LOADED;
         v->usable && !v->forced && step <= (int)e->known && step <= GPU_STEP_TESTED; step++) {
        steps[step - GPU_STEP_LOADED](e, v);
        if (!v->usable && e->mode == NUMOE_GPU_FORCE)
            v->usable = v->forced = true; /* the reason stays to be shown */
    }
    if (v->usable && !v->forced && e->known == GPU_STEP_TESTED)
        snprintf(v->reason, sizeof v->reason, "the self-test agrees within %.1e", e->rel_l2);
}
