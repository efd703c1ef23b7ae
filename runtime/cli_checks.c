/*
 * The checks of numoe certify: which there are, doing them, and a file that they can be taken up
 * from: a line of JSON for the device, and one for each check that was done.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bench.h"
#include "cli_certify.h"
#include "cli_model.h"
#include "numoe_gpu.h"

enum { ACTIVATIONS = 4, MATRICES = 3 };

static const uint32_t token_counts[] = {1, 2, 8, 32, 512, 8192};
static const uint32_t prompts[] = {512, 2048, 4096, 8192, 16384, 32768, 65536};
static const char *const activations[ACTIVATIONS] = {"silu", "silu-clamped", "swiglu-oai", "situ"};
static const char *const matrices[MATRICES] = {"gate", "up", "down"};
static const char *const states[] = {"open", "ok", "FAILED", "absent", "error"};

enum { TOKEN_COUNTS = sizeof token_counts / sizeof token_counts[0] };
enum { PROMPTS = sizeof prompts / sizeof prompts[0] };

const char *certify_state_name(enum certify_state state)
{
    return states[state];
}

/* Of a form, or of 0, the choice among them. */
static void form_name(int form, char text[24])
{
    snprintf(text, 24, form ? "form-%s" : "%s", numoe_gpu_form_names[form]);
}

static struct certify_check *next(struct certify *c, enum certify_kind kind)
{
    struct certify_check *check = &c->checks[c->count++];
    *check = (struct certify_check){.kind = kind, .rel_l2 = NAN};
    return check;
}

int certify_init(struct certify *c, struct numoe_gpu *gpu)
{
    const struct numoe_gpu_properties *p = numoe_gpu_get(gpu);
    const size_t most =
        (size_t)(NUMOE_GPU_FORMS + 1) * (ACTIVATIONS * TOKEN_COUNTS * 2 + MATRICES) + TOKEN_COUNTS +
        3 + PROMPTS;
    char form[24];

    *c = (struct certify){.gpu = gpu, .checks = calloc(most, sizeof *c->checks)};
    if (!c->checks)
        return -ENOMEM;
    snprintf(c->device, sizeof c->device, "%s, compute capability %d.%d, driver %d, numoe %s",
             p->name, p->major, p->minor, p->driver_version, numoe_version());
    for (int f = 0; f <= NUMOE_GPU_FORMS; f++)
        for (int a = 0; a < ACTIVATIONS; a++)
            for (int t = 0; t < TOKEN_COUNTS; t++)
                for (int graph = 0; graph < 2; graph++) {
                    struct certify_check *check = next(c, CERTIFY_FORM);
                    form_name(f, form);
                    check->form = f;
                    check->activation = a + 1;
                    check->tokens = token_counts[t];
                    check->graph = graph;
                    snprintf(check->id, sizeof check->id, "%s.%s.%u%s", form, activations[a],
                             (unsigned)token_counts[t], graph ? ".graph" : "");
                }
    for (int f = 0; f <= NUMOE_GPU_FORMS; f++)
        for (int m = 0; m < MATRICES; m++) {
            struct certify_check *check = next(c, CERTIFY_CODES);
            form_name(f, form);
            check->form = f;
            check->matrix = m;
            snprintf(check->id, sizeof check->id, "codes.%s.%s", form, matrices[m]);
        }
    for (int t = 0; t < TOKEN_COUNTS; t++) {
        struct certify_check *check = next(c, CERTIFY_PIPELINE);
        check->tokens = token_counts[t];
        snprintf(check->id, sizeof check->id, "pipeline.%u", (unsigned)token_counts[t]);
    }
    snprintf(next(c, CERTIFY_PASSING)->id, sizeof c->checks->id, "passing.two");
    snprintf(next(c, CERTIFY_MARLIN)->id, sizeof c->checks->id, "marlin.repack");
    snprintf(next(c, CERTIFY_RATES)->id, sizeof c->checks->id, "rates");
    for (int i = 0; i < PROMPTS; i++) {
        struct certify_check *check = next(c, CERTIFY_PREFILL);
        check->tokens = prompts[i];
        snprintf(check->id, sizeof check->id, "prefill.%u", (unsigned)prompts[i]);
    }
    return 0;
}

void certify_fini(struct certify *c)
{
    free(c->checks);
    *c = (struct certify){0};
}

uint32_t certify_failures(const struct certify *c)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < c->count; i++)
        count += c->checks[i].state == CERTIFY_FAILED || c->checks[i].state == CERTIFY_ERROR;
    return count;
}

/* ---- the file -------------------------------------------------------------------------------- */

static json_t *number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static int append(FILE *file, json_t *line)
{
    int rc = !line || json_dumpf(line, file, JSON_COMPACT) || fputc('\n', file) < 0 || fflush(file);
    json_decref(line);
    return rc ? -EIO : 0;
}

static int append_check(FILE *file, const struct certify_check *check)
{
    return append(file, json_pack("{s:s, s:s, s:o, s:[o,o,o], s:s}", "id", check->id, "state",
                                  states[check->state], "rel_l2", number(check->rel_l2), "value",
                                  number(check->value[0]), number(check->value[1]),
                                  number(check->value[2]), "text", check->text));
}

static double number_of(const json_t *value)
{
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static int take_line(struct certify *c, const json_t *line)
{
    const char *id = json_string_value(json_object_get(line, "id"));
    const char *state = json_string_value(json_object_get(line, "state"));
    const char *text = json_string_value(json_object_get(line, "text"));
    const json_t *values = json_object_get(line, "value");

    if (!id || !state || !text || json_array_size(values) != 3)
        return -EINVAL;
    for (uint32_t i = 0; i < c->count; i++) {
        struct certify_check *check = &c->checks[i];
        if (strcmp(check->id, id) != 0)
            continue;
        for (int s = CERTIFY_OK; s <= CERTIFY_ABSENT; s++)
            if (!strcmp(states[s], state))
                check->state = (enum certify_state)s; /* errors are tried again */
        check->rel_l2 = number_of(json_object_get(line, "rel_l2"));
        for (size_t v = 0; v < 3; v++)
            check->value[v] = number_of(json_array_get(values, v));
        snprintf(check->text, sizeof check->text, "%s", text);
        if (check->kind == CERTIFY_RATES)
            c->link_gbs = check->value[1];
        return 0;
    }
    return -EINVAL;
}

/* What a power cut may leave of a file that was just begun: the device's line without its end. */
static bool only_begun(const char *text, size_t bytes)
{
    static const char head[] = "{\"device\":\"";
    const size_t length = sizeof head - 1;
    const char *quote;

    if (bytes <= length)
        return !memcmp(text, head, bytes);
    quote = memchr(text + length, '"', bytes - length);
    return !memcmp(text, head, length) && (!quote || quote == text + bytes - 1);
}

static int take_first(struct certify *c, const json_t *line, const char *path,
                      struct numoe_error *error)
{
    const char *device = json_string_value(json_object_get(line, "device"));

    if (!device)
        return numoe_error_set(error, -EINVAL, path, "is no file of numoe certify");
    return strcmp(device, c->device) != 0
               ? numoe_error_set(error, -EINVAL, path, "is of %s, and this is %s", device,
                                 c->device)
               : 0;
}

int certify_resume(struct certify *c, const char *path, struct numoe_error *error)
{
    struct stat status;
    FILE *file;
    char *text = NULL;
    size_t room = 0;
    ssize_t length;
    unsigned number_of_line = 0;
    int rc = 0;

    if (stat(path, &status))
        return errno == ENOENT ? 0 : numoe_error_set(error, -errno, path, "%s", strerror(errno));
    if (!S_ISREG(status.st_mode)) /* others may have no end, or nobody who writes */
        return numoe_error_set(error, -EINVAL, path, "is no regular file");
    file = fopen(path, "re");
    if (!file) {
        rc = -errno;
        return numoe_error_set(error, rc, path, "%s", strerror(-rc));
    }
    while (!rc && (length = getline(&text, &room, file)) > 0) {
        const size_t bytes = (size_t)length;
        const bool whole = text[bytes - 1] == '\n';
        json_t *line = json_loadb(text, bytes, 0, NULL);
        if (number_of_line++ == 0 && !whole && !line && only_begun(text, bytes))
            break;
        if (number_of_line == 1)
            rc = take_first(c, line, path, error);
        else if (whole && (!line || take_line(c, line)))
            rc = numoe_error_set(error, -EINVAL, path, "line %u is damaged", number_of_line);
        json_decref(line);
        if (!rc && whole)
            c->kept = ftell(file);
    }
    c->anew = !rc && !c->kept;
    free(text);
    fclose(file);
    return rc;
}

/* The file to append to, with the device as its first line. Of one that was read only a last line
 * that was cut off goes: a full disk costs nothing that was done. */
static FILE *open_file(const struct certify *c, const char *path, struct numoe_error *error)
{
    FILE *file = fopen(path, c->kept ? "r+e" : "we");

    if (!file) {
        numoe_error_set(error, -errno, path, "%s", strerror(errno));
        return NULL;
    }
    if (c->kept) {
        if (ftruncate(fileno(file), c->kept) || fseek(file, 0, SEEK_END))
            goto fail;
        return file;
    }
    if (append(file, json_pack("{s:s}", "device", c->device)))
        goto fail;
    for (uint32_t i = 0; i < c->count; i++)
        if (c->checks[i].state != CERTIFY_OPEN && append_check(file, &c->checks[i]))
            goto fail;
    return file;
fail:
    numoe_error_set(error, -EIO, path, "could not be written");
    fclose(file);
    return NULL;
}

/* ---- prefill --------------------------------------------------------------------------------- */

/* V4-Flash's layers, all of whose experts are the same few in host memory: they are copied as many
 * others would be, and nobody needs a machine that holds the model. */
enum { DIFFERENT = 16, LAYERS = 8, REPEAT = 3 };

struct prefill {
    struct numoe_model_desc desc;
    struct numoe_slice_shape shape;
    uint64_t slices;
    uint8_t *experts;
};

static void arena(void *user, uint32_t index, void **address, uint64_t *bytes)
{
    const struct prefill *p = user;
    (void)index;
    *address = p->experts;
    *bytes = DIFFERENT * p->slices * p->shape.bytes;
}

static uint64_t place(void *user, uint64_t layer, uint64_t expert, uint32_t index,
                      const uint8_t **address)
{
    const struct prefill *p = user;
    (void)layer;
    (void)index;
    *address = p->experts + expert % DIFFERENT * p->slices * p->shape.bytes;
    return p->slices;
}

static bool present(void *user, uint64_t layer, uint64_t expert)
{
    (void)user;
    (void)layer;
    (void)expert;
    return true;
}

static uint32_t generation(void *user, uint64_t layer)
{
    (void)user;
    (void)layer;
    return 0;
}

/* Random experts of the model's width. */
static int make_experts(struct prefill *p)
{
    const uint64_t in = p->desc.hidden / 32, out = p->desc.intermediate / 32;
    const uint64_t groups = p->desc.hidden * out > p->desc.intermediate * in
                                ? p->desc.hidden * out
                                : p->desc.intermediate * in;
    struct numoe_bench_random random = {.state = 3};
    uint64_t *codes = malloc(groups * 16);
    uint8_t *scales = malloc(groups);
    int rc = codes && scales ? 0 : -ENOMEM;

    p->experts = rc ? NULL : aligned_alloc(4096, DIFFERENT * p->slices * p->shape.bytes);
    if (!p->experts)
        rc = -ENOMEM;
    for (uint64_t e = 0; !rc && e < DIFFERENT; e++) {
        struct numoe_expert_source source = {.hidden = p->desc.hidden,
                                             .intermediate = p->desc.intermediate};
        struct numoe_pack_report report = {0};
        for (uint64_t i = 0; i < groups * 2; i++)
            codes[i] = numoe_bench_random(&random);
        for (uint64_t i = 0; i < groups; i++)
            scales[i] = (uint8_t)(118 + numoe_bench_random(&random) % 4);
        source.gate = (struct numoe_mxfp4){.codes = (const uint8_t *)codes,
                                           .scales = scales,
                                           .code_stride = in * 16,
                                           .scale_stride = in,
                                           .code_step = 16,
                                           .scale_step = 1,
                                           .nibbles = NUMOE_NIBBLES_ADJACENT};
        source.up = source.down = source.gate;
        source.down.code_stride = out * 16;
        source.down.scale_stride = out;
        rc = numoe_pack_slices(&p->shape, &source, 0, p->slices,
                               p->experts + e * p->slices * p->shape.bytes, &report);
    }
    free(codes);
    free(scales);
    return rc;
}

static int prefill_once(const struct certify *c, struct certify_check *check,
                        struct numoe_gpu_model *model, const struct prefill *p,
                        struct numoe_error *error)
{
    const uint64_t tokens = check->tokens, top_k = p->desc.experts_per_token;
    struct numoe_bench_random random = {.state = tokens};
    uint16_t *x = malloc(tokens * p->desc.hidden * sizeof *x);
    int32_t *ids = malloc(tokens * top_k * sizeof *ids);
    float *weights = malloc(tokens * top_k * sizeof *weights);
    struct numoe_gpu_bench bench = {.tokens = tokens,
                                    .top_k = top_k,
                                    .routings = 1,
                                    .repeat = REPEAT,
                                    .x = x,
                                    .ids = ids,
                                    .routing = weights};
    struct numoe_gpu_bench_stream result;
    int rc = -ENOMEM;

    if (x && ids && weights) {
        numoe_bench_activations(&random, x, tokens * p->desc.hidden);
        numoe_bench_route(&random, tokens, top_k, p->desc.experts, ids, weights);
        rc = numoe_gpu_bench_layers(model, &bench, &result, error);
    } else {
        numoe_error_set(error, rc, "prefill", "no room for %u tokens", check->tokens);
    }
    if (!rc) {
        const double longest = fmax(result.copy_ms, result.compute_ms);
        check->value[0] =
            (double)tokens / (result.total_ms * 1e-3) * (double)LAYERS / (double)p->desc.layers;
        check->value[1] = result.total_ms / longest;
        check->value[2] = (double)result.bytes / result.total_ms / 1e6 / c->link_gbs;
        check->state = CERTIFY_OK;
    }
    free(x);
    free(ids);
    free(weights);
    return rc;
}

static int prefill(const struct certify *c, struct certify_check *check, struct numoe_error *error)
{
    const struct cli_values whole = {0};
    struct numoe_gpu_model *model = NULL;
    struct prefill p = {.desc = NUMOE_MODEL_DESC_INIT};
    int rc;

    if (cli_model_by_name("certify", &whole, "v4-flash", &p.desc))
        return numoe_error_set(error, -EINVAL, "prefill", "the model is not known");
    p.slices = p.desc.intermediate / 32;
    rc = numoe_slice_shape_init(&p.shape, p.desc.hidden, false);
    if (!rc)
        rc = make_experts(&p);
    if (rc)
        numoe_error_set(error, rc, "prefill", "no room for experts");
    if (!rc) {
        const struct numoe_gpu_source source = {
            .user = &p,
            .shape = p.shape,
            .activation = p.desc.activation,
            .layers = LAYERS,
            .experts = p.desc.experts,
            .slices = (uint32_t)p.slices,
            .region_count = 1,
            .arena = arena,
            .place = place,
            .present = present,
            .generation = generation,
        };
        rc = numoe_gpu_model_create(
            c->gpu, &source, &(struct numoe_gpu_model_options){.stream = true}, &model, error);
    }
    if (!rc)
        rc = prefill_once(c, check, model, &p, error);
    numoe_gpu_model_destroy(model);
    free(p.experts);
    return rc;
}

/* ---- doing them ------------------------------------------------------------------------------ */

static int do_check(struct certify *c, struct certify_check *check, struct numoe_error *error)
{
    const uint32_t form = (uint32_t)check->form;
    struct numoe_gpu_finding found = {0};
    int rc;

    switch (check->kind) {
    case CERTIFY_FORM:
        rc = numoe_gpu_certify_form(c->gpu, (enum numoe_activation_kind)check->activation, form,
                                    check->tokens, check->graph, &found, error);
        break;
    case CERTIFY_CODES:
        rc = numoe_gpu_certify_codes(c->gpu, form, (enum numoe_matrix)check->matrix, &found, error);
        break;
    case CERTIFY_PIPELINE:
        rc = numoe_gpu_certify_pipeline(c->gpu, check->tokens, &found, error);
        break;
    case CERTIFY_PASSING:
        rc = numoe_gpu_certify_passing(c->gpu, &found, error);
        break;
    case CERTIFY_MARLIN:
        rc = numoe_gpu_certify_marlin(c->gpu, &found, error);
        break;
    case CERTIFY_RATES:
        rc =
            numoe_gpu_ceilings(c->gpu, &check->value[0], &check->value[1], &check->value[2], error);
        c->link_gbs = check->value[1];
        check->state = rc ? CERTIFY_ERROR : CERTIFY_OK;
        return rc;
    case CERTIFY_PREFILL:
    default:
        return prefill(c, check, error);
    }
    if (rc)
        return rc;
    check->state = !found.there ? CERTIFY_ABSENT : found.ok ? CERTIFY_OK : CERTIFY_FAILED;
    check->rel_l2 = found.there ? found.rel_l2 : NAN;
    memcpy(check->text, found.text, sizeof found.text);
    return 0;
}

int certify_run(struct certify *c, const char *path,
                void (*done)(const struct certify_check *check, uint32_t done, uint32_t count),
                struct numoe_error *error)
{
    FILE *file = NULL;
    int rc = 0;

    if (path && !(file = open_file(c, path, error)))
        return -EIO;
    for (uint32_t i = 0; !rc && i < c->count; i++) {
        struct certify_check *check = &c->checks[i];
        struct numoe_error why = NUMOE_ERROR_INIT;

        if (check->state != CERTIFY_OPEN)
            continue;
        if (do_check(c, check, &why)) {
            check->state = CERTIFY_ERROR;
            snprintf(check->text, sizeof check->text, "%.*s", (int)sizeof check->text - 1,
                     why.message);
            rc = numoe_gpu_health(c->gpu, error);
        }
        if (file && check->state != CERTIFY_ERROR && append_check(file, check))
            rc = numoe_error_set(error, -EIO, path, "could not be written");
        if (done)
            done(check, i + 1, c->count);
    }
    if (file && fclose(file) && !rc)
        rc = numoe_error_set(error, -EIO, path, "could not be written");
    return rc;
}
