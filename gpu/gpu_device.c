/*
 * Devices: finding, describing, opening one through the gate, and its health.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "gpu_backend.h"
#include "gpu_gate.h"
#include "gpu_internal.h"

int numoe_gpu_mode(enum numoe_gpu_mode wish, enum numoe_gpu_mode *mode, struct numoe_error *error)
{
    static const char *const names[] = {"off", "on", "force"};
    const char *text = getenv("NUMOE_GPU");

    *mode = wish;
    if (!text || !*text)
        return 0;
    for (int i = 0; i < 3; i++)
        if (!strcmp(text, names[i])) {
            *mode = (enum numoe_gpu_mode)i;
            return 0;
        }
    return numoe_error_set(error, -EINVAL, "NUMOE_GPU", "\"%s\" is neither off, on nor force",
                           text);
}

/* What the first call to the driver says when it fails. */
static void describe_absence(int code, char *text, size_t size)
{
    if (code == GPU_NOT_BUILT)
        snprintf(text, size, "%s", gpu_backend_text(code));
    else if (code == GPU_CODE_DRIVER)
        snprintf(text, size, "no NVIDIA driver is installed, or it is too old for this build");
    else if (code == GPU_CODE_NO_DEVICE)
        snprintf(text, size, "the driver shows no device");
    else
        snprintf(text, size, "the driver does not answer: %s (%d)", gpu_backend_text(code), code);
}

/* THERE: fills what is known of the driver. text keeps the reason. */
static void look(struct gpu_evidence *e, char *text, size_t size)
{
    int code = gpu_backend_count(&e->devices);

    e->known = GPU_STEP_THERE;
    e->built = code != GPU_NOT_BUILT;
    e->absent = NULL;
    if (code) {
        describe_absence(code, text, size);
        e->absent = text;
    }
}

static int absence(const struct gpu_evidence *e)
{
    return e->built ? -ENODEV : -ENOTSUP;
}

int numoe_gpu_count(struct numoe_error *error)
{
    struct gpu_evidence e = {.mode = NUMOE_GPU_ON};
    struct numoe_gpu_verdict v;
    char text[256];

    look(&e, text, sizeof text);
    gpu_gate_decide(&e, &v);
    return v.usable ? (int)e.devices : numoe_error_set(error, absence(&e), "GPU", "%s", v.reason);
}

/* The machine's device of the same PCI address, else what sysfs says of it. */
static void locate(const struct numoe_machine *machine, struct numoe_gpu_properties *p)
{
    char path[128], line[32];
    FILE *file;
    long node;

    p->os_node = NUMOE_NONE;
    p->locality_known = false;
    for (uint32_t i = 0; machine && i < machine->device_count; i++) {
        const struct numoe_device *d = &machine->devices[i];
        char cuda[16];

        snprintf(cuda, sizeof cuda, "cuda%u", p->index);
        if (!d->gpu || (strcasecmp(d->name, p->bus) != 0 && strcmp(d->name, cuda) != 0))
            continue;
        if (d->locality_known && d->node_count) {
            p->os_node = machine->nodes[d->nodes[0]].os_index;
            p->locality_known = true;
            return;
        }
    }
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", p->bus);
    for (char *c = path; *c; c++)
        if (*c >= 'A' && *c <= 'F')
            *c = (char)(*c - 'A' + 'a');
    file = fopen(path, "re");
    if (!file)
        return;
    if (fgets(line, sizeof line, file)) {
        char *end;
        node = strtol(line, &end, 10);
        if (end != line && node >= 0 && node < 65536) {
            p->os_node = (uint32_t)node;
            p->locality_known = true;
        }
    }
    fclose(file);
}

int numoe_gpu_describe(uint32_t index, const struct numoe_machine *machine,
                       struct numoe_gpu_properties *properties, struct numoe_error *error)
{
    int code;

    *properties = (struct numoe_gpu_properties){.index = index, .os_node = NUMOE_NONE};
    code = gpu_backend_describe(index, properties);
    if (code)
        return numoe_error_set(error, code == GPU_NOT_BUILT ? -ENOTSUP : gpu_errno_of(code), "GPU",
                               "device %u does not describe itself: %s", index,
                               gpu_backend_text(code));
    locate(machine, properties);
    return 0;
}

int gpu_wrap(const struct gpu_ops *ops, void *device, const struct numoe_gpu_properties *properties,
             const struct numoe_log *log, struct numoe_gpu **out)
{
    struct numoe_gpu *gpu = calloc(1, sizeof *gpu);

    if (!gpu)
        return -ENOMEM;
    gpu->ops = ops;
    gpu->device = device;
    gpu->properties = *properties;
    gpu->forms = gpu_forms_there(ops, device);
    gpu->tuning = *numoe_gpu_tuning_builtin();
    if (log)
        gpu->log = *log;
    *out = gpu;
    return 0;
}

void numoe_gpu_close(struct numoe_gpu *gpu)
{
    if (!gpu)
        return;
    if (gpu->backend)
        gpu_backend_close(gpu->device);
    free(gpu);
}

const struct numoe_gpu_properties *numoe_gpu_get(const struct numoe_gpu *gpu)
{
    return &gpu->properties;
}

/* From here on the evidence needs the device. Leaves it open in *out, or not, as decided. */
static int examine(struct gpu_evidence *e, const struct numoe_gpu_properties *p,
                   const struct numoe_log *log, struct numoe_gpu **out, struct numoe_gpu_verdict *v,
                   struct numoe_error *error)
{
    struct numoe_error test = NUMOE_ERROR_INIT;
    struct numoe_gpu *gpu = NULL;
    const char *failed = NULL;
    char text[192];
    void *device;
    int code, rc;

    code = gpu_backend_open(e->index, &device);
    if (code)
        return numoe_error_set(error, gpu_errno_of(code), p->name, "the device does not open: %s",
                               gpu_backend_text(code));
    rc = gpu_wrap(gpu_backend_ops(), device, p, log, &gpu);
    if (rc) {
        gpu_backend_close(device);
        return numoe_error_set(error, rc, p->name, "out of memory");
    }
    gpu->backend = true;

    e->known = GPU_STEP_LOADED;
    code = gpu_backend_load(device, &e->shared_need, &gpu->properties.ptx_version, &failed);
    e->loaded = code == 0;
    if (code) {
        snprintf(text, sizeof text, "%s: %s", failed ? failed : "a kernel", gpu_backend_text(code));
        e->load_text = text;
        gpu->ops->clear_error(device);
    }
    gpu_gate_decide(e, v);
    if (v->usable && !v->forced) {
        e->known = GPU_STEP_FITS;
        gpu_gate_decide(e, v);
    }
    if (v->usable && !v->forced) {
        e->known = GPU_STEP_TESTED;
        if (gpu_self_test(gpu, &e->rel_l2, &test))
            e->test_failure = test.message;
        else if (!(e->rel_l2 <= GPU_TEST_LIMIT) && gpu_turn_off_forms(gpu) &&
                 gpu_self_test(gpu, &e->rel_l2, &test)) /* without them */
            e->test_failure = test.message;
        gpu_gate_decide(e, v);
    }
    e->load_text = e->test_failure = NULL; /* they end here, and have been judged */
    /* a device that the test has killed is of no use even if forced */
    if (v->usable && atomic_load_explicit(&gpu->dead, memory_order_relaxed)) {
        v->usable = v->forced = false;
        rc = -EIO;
    }
    if (!v->usable) {
        numoe_gpu_close(gpu);
        return numoe_error_set(error, rc ? rc : -ENOTSUP, p->name, "%s", v->reason);
    }
    *out = gpu;
    return 0;
}

int numoe_gpu_open(uint32_t index, enum numoe_gpu_mode mode, const struct numoe_machine *machine,
                   const struct numoe_log *log, struct numoe_gpu **gpu,
                   struct numoe_gpu_verdict *verdict, struct numoe_error *error)
{
    struct gpu_evidence e = {.known = GPU_STEP_WANTED, .mode = mode, .index = index, .rel_l2 = -1};
    struct numoe_gpu_properties p;
    struct numoe_error inner = NUMOE_ERROR_INIT;
    char text[256];
    int rc;

    gpu_gate_decide(&e, verdict);
    if (!verdict->usable)
        return numoe_error_set(error, -ENODEV, "GPU", "%s", verdict->reason);
    look(&e, text, sizeof text);
    gpu_gate_decide(&e, verdict);
    if (!verdict->usable)
        return numoe_error_set(error, absence(&e), "GPU", "%s", verdict->reason);
    rc = numoe_gpu_describe(index, machine, &p, &inner);
    if (!rc) {
        e.name = p.name;
        e.major = p.major;
        e.minor = p.minor;
        e.images = gpu_backend_images();
        e.shared_bytes = p.shared_bytes;
        rc = examine(&e, &p, log, gpu, verdict, &inner);
    }
    if (rc) {
        if (verdict->usable) { /* failed before anything was decided */
            verdict->usable = false;
            snprintf(verdict->reason, sizeof verdict->reason, "%s", inner.message);
        }
        if (error)
            *error = inner;
    }
    return rc;
}

/* ---- health ---------------------------------------------------------------------------------- */

static int say_dead(const struct numoe_gpu *gpu, int code, struct numoe_error *error)
{
    return numoe_error_set(error, -EIO, gpu->properties.name,
                           "the device was lost by a fault in %s: %s (CUDA error %d); it stays "
                           "unusable until the process starts anew",
                           gpu->where, gpu->ops->error_text(code), code);
}

int numoe_gpu_health(const struct numoe_gpu *gpu, struct numoe_error *error)
{
    const int code = atomic_load_explicit(&gpu->dead, memory_order_acquire);
    return code ? say_dead(gpu, code, error) : 0;
}

/* No call goes to the device any more. */
static void lose(struct numoe_gpu *gpu, int code, const char *what)
{
    if (atomic_load_explicit(&gpu->dead, memory_order_relaxed))
        return;
    snprintf(gpu->where, sizeof gpu->where, "%s", what);
    atomic_store_explicit(&gpu->dead, code, memory_order_release); /* numoe_gpu_health */
    numoe_log_write(&gpu->log, NUMOE_LOG_ERROR,
                    "%s is lost to this process: %s (CUDA error %d) in %s", gpu->properties.name,
                    gpu->ops->error_text(code), code, what);
}

int gpu_judge(struct numoe_gpu *gpu, int code, struct numoe_error *error, const char *what, ...)
{
    char text[128];
    va_list args;

    if (!code)
        return 0;
    va_start(args, what);
    vsnprintf(text, sizeof text, what, args);
    va_end(args);
    if (gpu_fault_of(code) == GPU_FAULT_DEAD) {
        lose(gpu, code, text);
        return say_dead(gpu, code, error);
    }
    gpu->ops->clear_error(gpu->device);
    return numoe_error_set(error, gpu_errno_of(code), gpu->properties.name,
                           "%s failed: %s (CUDA "
                           "error %d)",
                           text, gpu->ops->error_text(code), code);
}

int gpu_enter(struct numoe_gpu *gpu, struct numoe_error *error)
{
    int rc = numoe_gpu_health(gpu, error);
    return rc ? rc
              : gpu_judge(gpu, gpu->ops->enter(gpu->device), error, "making the device current");
}

/* A wait may be refused for want of memory for a moment. */
enum { STILL_TRIES = 3 };

void gpu_still(struct numoe_gpu *gpu, void *stream, const char *what)
{
    int code = 0;

    for (int i = 0; i < STILL_TRIES; i++) {
        code = gpu->ops->stream_sync(gpu->device, stream);
        if (!gpu_judge(gpu, code, NULL, "%s", what) || numoe_gpu_health(gpu, NULL))
            return;
    }
    lose(gpu, code, what);
}
