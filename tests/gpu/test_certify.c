/*
 * Certifying a device: a form that computes wrong is found, and it alone; what was done is not done
 * again; and a device with a wrong form is used without it.
 */
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli_certify.h"
#include "cli_options.h"
#include "gpu_gate.h"
#include "small_model.h"

static uint32_t crooked_form; /* that computes wrong; 0: none does */
static uint32_t crooked_from; /* so many tokens on */
static bool crooked_replay;
static uint64_t launches;
static uint64_t interrupted_at; /* the launch in which somebody interrupts; 0: nobody does */
static uint64_t nudged_from;    /* launches from this one on are a little off; 0: none is */

static int crooked_launch(void *device, void *stream, const struct numoe_cuda_ffn *ffn)
{
    struct numoe_cuda_ffn other = *ffn;
    launches++;
    if (interrupted_at && launches >= interrupted_at)
        raise(SIGINT);
    if (crooked_form && ffn->form == crooked_form && ffn->tokens >= crooked_from)
        other.scale *= 1.05f;
    if (nudged_from && launches >= nudged_from)
        other.scale *= 1.0f + 1e-4f;
    return fake_launch(device, stream, &other);
}

static int wrong_replay(void *device, void *stream, const struct numoe_cuda_ffn *ffn,
                        uint32_t count)
{
    struct numoe_cuda_ffn other = *ffn;
    launches++;
    if (crooked_form && ffn->form == crooked_form)
        other.scale *= 1.05f;
    if (crooked_replay)
        other.scale *= 1.0f + 0x1p-20f;
    return fake_replay(device, stream, &other, count);
}

static struct gpu_ops ops_of(void)
{
    struct gpu_ops ops = fake_ops;
    ops.launch = crooked_launch;
    ops.replay = wrong_replay;
    return ops;
}

static struct numoe_gpu *open_fake(struct fake *f, const struct gpu_ops *ops, const char *name)
{
    struct numoe_gpu_properties p = {.os_node = NUMOE_NONE, .major = 9};
    struct numoe_gpu *gpu;

    snprintf(p.name, sizeof p.name, "%s", name);
    cr_assert_eq(gpu_wrap(ops, f, &p, NULL, &gpu), 0);
    return gpu;
}

/* Without what takes long on a fake, and what only a real device has. */
static void make(struct certify *c, struct numoe_gpu *gpu)
{
    cr_assert_eq(certify_init(c, gpu), 0);
    cr_assert_gt(c->count, 250);
    for (uint32_t i = 0; i < c->count; i++)
        if (c->checks[i].tokens > 32 || c->checks[i].kind > CERTIFY_CODES)
            c->checks[i].state = CERTIFY_ABSENT;
}

Test(gpu_certify, what_is_wrong_is_found_and_nothing_else, .timeout = 120)
{
    for (int round = 0; round < 3; round++) {
        const struct gpu_ops ops = ops_of();
        struct fake *f = fake_make(3);
        struct numoe_gpu *gpu = open_fake(f, &ops, "Fake");
        struct certify c;
        uint32_t wrong = 0;

        crooked_form = round == 1 ? NUMOE_CUDA_64 : 0; /* not chosen for so few tokens */
        crooked_replay = round == 2;
        make(&c, gpu);
        cr_assert_eq(certify_run(&c, NULL, NULL, NULL), 0);
        for (uint32_t i = 0; i < c.count; i++) {
            const struct certify_check *check = &c.checks[i];
            const bool bad =
                round == 1 ? strstr(check->id, "form-64") != NULL : round == 2 && check->graph;
            if (check->state == CERTIFY_ABSENT)
                continue;
            cr_expect_eq(check->state, bad ? CERTIFY_FAILED : CERTIFY_OK, "round %d, %s: %s %s",
                         round, check->id, certify_state_name(check->state), check->text);
            cr_expect_eq(check->text[0] != 0, bad);
            wrong += bad;
        }
        cr_expect_eq(certify_failures(&c), wrong);
        cr_expect_eq(wrong, round == 0   ? 0
                            : round == 1 ? 4 * 4 * 2 + 3
                                         : (NUMOE_GPU_FORMS + 1) * 4 * 4);
        certify_fini(&c);
        expect_clean(f);
        numoe_gpu_close(gpu);
        fake_free(f);
    }
}

static bool lame_copies;

/* The last of a batch does not arrive. */
static int lame_copy(void *device, void *stream, void *const *to, const void *const *from,
                     const uint64_t *bytes, uint32_t count)
{
    return fake_copy_in_many(device, stream, to, from, bytes, count - lame_copies);
}

Test(gpu_certify, a_pipeline_that_loses_a_copy_is_found, .timeout = 120)
{
    struct gpu_ops ops = fake_ops;

    ops.copy_in_many = lame_copy;
    for (int round = 0; round < 6; round++) {
        struct fake *f = fake_make(1 + (uint64_t)round);
        struct numoe_gpu *gpu = open_fake(f, &ops, "Fake");
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_gpu_finding found;

        lame_copies = round % 2;
        cr_assert_eq(numoe_gpu_certify_pipeline(gpu, round < 2 ? 1 : 24, &found, &error), 0, "%s",
                     error.message);
        cr_expect(found.there);
        if (round >= 2) /* with one token the piece that is lost may be one that is not asked for */
            cr_expect_eq(found.ok, !lame_copies, "round %d: %s", round, found.text);
        expect_clean(f);
        numoe_gpu_close(gpu);
        fake_free(f);
    }
}

/* Streamed outputs that are near float64 and not near those of the same step by step. */
Test(gpu_certify, a_pipeline_that_is_a_little_off_is_found, .timeout = 60)
{
    const struct gpu_ops ops = ops_of();

    for (int round = 0; round < 2; round++) {
        struct fake *f = fake_make(3);
        struct numoe_gpu *gpu = open_fake(f, &ops, "Fake");
        struct numoe_gpu_finding found;

        launches = 0;
        nudged_from = round ? 2 : 0; /* the first is that of the step by step */
        cr_assert_eq(numoe_gpu_certify_pipeline(gpu, 24, &found, NULL), 0);
        cr_expect_eq(found.ok, !round, "%s", found.text);
        cr_expect_leq(found.rel_l2, GPU_TEST_LIMIT);
        cr_expect_eq(strstr(found.text, "step by step") != NULL, round, "%s", found.text);
        numoe_gpu_close(gpu);
        fake_free(f);
    }
    nudged_from = 0;
}

enum { EVERY = 256 };

static enum numoe_matrix spoilt_matrix;
static unsigned spoilt_byte;

/* Outputs of experts that have a scale byte in a matrix are wrong. */
static void spoil(struct fake *f, const struct numoe_cuda_ffn *c)
{
    fake_compute(f, c);
    for (uint32_t t = 0; t < c->tokens; t++) {
        const int32_t e = ((const int32_t *)c->ids)[t * c->top_k];
        const uint8_t *slice = c->weights + c->slice_at[(uint32_t)e * c->slices] * 64ull;
        unsigned byte;

        numoe_slice_weight(&c->shape, slice, spoilt_matrix, 0, 0, NULL, &byte);
        for (uint64_t k = 0; k < c->shape.hidden; k++)
            if (byte == spoilt_byte || spoilt_byte == EVERY)
                ((float *)c->out)[t * c->out_stride + k] *= 1.05f;
    }
}

/* Every byte is looked at in the matrix that is named, and in no other. */
Test(gpu_certify, a_scale_byte_of_one_matrix_is_found, .timeout = 120)
{
    static const unsigned bytes[] = {0, 126, 200, 254, EVERY};
    struct fake *f = fake_make(3);
    struct numoe_gpu *gpu = open_fake(f, &fake_ops, "Fake");

    f->instead = spoil;
    for (size_t b = 0; b < sizeof bytes / sizeof *bytes; b++)
        for (int spoilt = NUMOE_GATE; spoilt <= NUMOE_DOWN; spoilt++)
            for (int looked = NUMOE_GATE; looked <= NUMOE_DOWN; looked++) {
                const bool every = bytes[b] == EVERY, bad = every || looked == spoilt;
                struct numoe_gpu_finding found;
                char from[64], count[64];

                spoilt_matrix = (enum numoe_matrix)spoilt;
                spoilt_byte = bytes[b];
                snprintf(count, sizeof count, "%d scale bytes are off", every ? 255 : 1);
                snprintf(from, sizeof from, ", from %u on", every ? 0 : spoilt_byte);
                cr_assert_eq(numoe_gpu_certify_codes(gpu, NUMOE_CUDA_64, (enum numoe_matrix)looked,
                                                     &found, NULL),
                             0);
                cr_expect_eq(found.ok, !bad, "%u of %d, %d: %s", spoilt_byte, spoilt, looked,
                             found.text);
                if (bad)
                    cr_expect(strstr(found.text, count) == found.text && strstr(found.text, from),
                              "%u of %d: %s", spoilt_byte, spoilt, found.text);
            }
    numoe_gpu_close(gpu);
    fake_free(f);
}

static char path[] = "/tmp/numoe-certify-XXXXXX";

static void cut(long keep)
{
    cr_assert_eq(truncate(path, keep), 0);
}

static long size_of_file(void)
{
    FILE *file = fopen(path, "r");
    long size;
    cr_assert_not_null(file);
    fseek(file, 0, SEEK_END);
    size = ftell(file);
    fclose(file);
    return size;
}

static uint32_t open_checks(const struct certify *c)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < c->count; i++)
        count += c->checks[i].state == CERTIFY_OPEN;
    return count;
}

Test(gpu_certify, it_goes_on_where_it_was_left_off, .timeout = 120)
{
    const struct gpu_ops ops = ops_of();
    struct fake *f = fake_make(2);
    struct numoe_gpu *gpu = open_fake(f, &ops, "Fake"), *other;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct certify c;
    FILE *file;

    close(mkstemp(path));
    unlink(path);
    crooked_form = NUMOE_CUDA_64;
    make(&c, gpu);
    cr_assert_eq(certify_resume(&c, path, &error), 0); /* there is none yet */
    cr_assert_eq(certify_run(&c, path, NULL, &error), 0, "%s", error.message);
    const uint32_t failures = certify_failures(&c);
    cr_expect_gt(failures, 20);
    certify_fini(&c);
    /* all of it is done */
    make(&c, gpu);
    launches = 0;
    cr_assert_eq(certify_resume(&c, path, &error), 0, "%s", error.message);
    cr_expect_eq(open_checks(&c), 0);
    cr_assert_eq(certify_run(&c, path, NULL, &error), 0);
    cr_expect_eq(launches, 0);
    cr_expect_eq(certify_failures(&c), failures);
    certify_fini(&c);
    /* the last line was being written when the power went */
    cut(size_of_file() - 5);
    cr_assert_eq(certify_init(&c, gpu), 0);
    cr_assert_eq(certify_resume(&c, path, &error), 0, "%s", error.message);
    cr_expect_eq(open_checks(&c), 1);
    certify_fini(&c);
    /* damage before that, a file of something else, and another device */
    file = fopen(path, "a");
    cr_assert_not_null(file);
    fputs("\n", file);
    fclose(file);
    cr_assert_eq(certify_init(&c, gpu), 0);
    cr_expect_eq(certify_resume(&c, path, &error), -EINVAL);
    cr_expect(strstr(error.message, "damaged"), "%s", error.message);
    certify_fini(&c);
    other = open_fake(f, &ops, "Other");
    cr_assert_eq(certify_init(&c, other), 0);
    cr_expect_eq(certify_resume(&c, path, &error), -EINVAL);
    cr_expect(strstr(error.message, "Other"), "%s", error.message);
    certify_fini(&c);
    file = fopen(path, "w");
    fputs("what\n", file);
    fclose(file);
    cr_assert_eq(certify_init(&c, gpu), 0);
    cr_expect_eq(certify_resume(&c, path, &error), -EINVAL);
    certify_fini(&c);
    unlink(path);
    numoe_gpu_close(other);
    numoe_gpu_close(gpu);
    fake_free(f);
}

static int refused_launch(void *device, void *stream, const struct numoe_cuda_ffn *ffn)
{
    return ffn->form == NUMOE_CUDA_64 ? fake_refuse(device, 1) : fake_launch(device, stream, ffn);
}

/* Of what is in the file nothing is lost when nothing more can be written to it; what could not be
 * tried is a failure, is not written, and is tried again. */
Test(gpu_certify, a_full_disk_costs_nothing_that_was_done, .timeout = 120)
{
    struct gpu_ops ops = fake_ops;
    struct fake *f = fake_make(2);
    struct numoe_gpu *gpu = open_fake(f, &ops, "Fake");
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct rlimit had, limit;
    struct certify c;
    uint32_t left;
    long size;

    close(mkstemp(path));
    unlink(path);
    ops.launch = refused_launch;
    make(&c, gpu);
    cr_assert_eq(certify_run(&c, path, NULL, &error), 0, "%s", error.message);
    left = certify_failures(&c);
    cr_expect_eq(left, 4 * 4 * 2 + 3); /* as many as there are of this form */
    certify_fini(&c);
    ops.launch = fake_launch;
    size = size_of_file();
    cut(size - 5); /* in the last line */

    signal(SIGXFSZ, SIG_IGN);
    cr_assert_eq(getrlimit(RLIMIT_FSIZE, &had), 0);
    limit = had;
    limit.rlim_cur = 10;
    cr_assert_eq(certify_init(&c, gpu), 0);
    cr_assert_eq(certify_resume(&c, path, &error), 0, "%s", error.message);
    cr_expect_eq(open_checks(&c), left + 1);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    cr_expect_eq(certify_run(&c, path, NULL, &error), -EIO);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &had), 0);
    cr_expect(strstr(error.message, "could not be written"), "%s", error.message);
    certify_fini(&c);

    cr_assert_eq(certify_init(&c, gpu), 0);
    cr_assert_eq(certify_resume(&c, path, &error), 0, "%s", error.message);
    cr_expect_eq(open_checks(&c), left + 1);
    certify_fini(&c);
    /* other drivers and devices of the name are others */
    gpu->properties.driver_version++;
    cr_assert_eq(certify_init(&c, gpu), 0);
    cr_expect_eq(certify_resume(&c, path, &error), -EINVAL);
    cr_expect_not_null(strstr(c.device, numoe_version()), "another build is another, too");
    certify_fini(&c);
    gpu->properties.driver_version--;
    gpu->properties.minor++;
    cr_assert_eq(certify_init(&c, gpu), 0);
    cr_expect_eq(certify_resume(&c, path, &error), -EINVAL);
    certify_fini(&c);
    unlink(path);
    numoe_gpu_close(gpu);
    fake_free(f);
}

/* ---- the command ----------------------------------------------------------------------------- */

struct spoken {
    int code;
    char *out, *err;
};

static int open_side(int terminal)
{
    const int side = open(ptsname(terminal), O_RDWR | O_NOCTTY | O_CLOEXEC);

    cr_assert_geq(side, 0);
    return side;
}

static void truncate_to(const char *name, const char *text)
{
    FILE *file = fopen(name, "w");

    cr_assert_not_null(file);
    fputs(text, file);
    fclose(file);
}

static char *take_back(FILE *file)
{
    char *text;
    long size;

    fseek(file, 0, SEEK_END);
    size = ftell(file);
    rewind(file);
    text = calloc(1, (size_t)size + 1);
    cr_assert_eq(fread(text, 1, (size_t)size, file), (size_t)size);
    fclose(file);
    return text;
}

/* The command's code and words, with checks done that this fake is quick in. Standard error is a
 * file, or the terminal that is given, whose words are then not taken back. */
static struct spoken speak(struct numoe_gpu *gpu, const struct cli_values *values, int terminal)
{
    FILE *out = tmpfile(), *err = tmpfile();
    const int had_out = dup(1), had_err = dup(2);
    struct spoken s;
    struct certify c;

    make(&c, gpu);
    for (uint32_t i = 0; i < c.count; i++)
        if (c.checks[i].tokens > 8 || c.checks[i].kind == CERTIFY_CODES)
            c.checks[i].state = CERTIFY_ABSENT;
    fflush(stdout);
    fflush(stderr);
    dup2(fileno(out), 1);
    dup2(terminal >= 0 ? terminal : fileno(err), 2);
    s.code = certify_command(&c, "can be used: so the gate", values);
    fflush(stdout);
    fflush(stderr);
    dup2(had_out, 1);
    dup2(had_err, 2);
    close(had_out);
    close(had_err);
    certify_fini(&c);
    s.out = take_back(out);
    s.err = take_back(err);
    return s;
}

static void spoken_free(struct spoken *s)
{
    free(s->out);
    free(s->err);
}

static json_t *checks_with(const json_t *root, const char *state)
{
    json_t *list = json_array(), *check;
    size_t i;

    json_array_foreach(json_object_get(root, "checks"), i, check)
    {
        if (!strcmp(json_string_value(json_object_get(check, "state")), state))
            json_array_append(list, check);
    }
    return list;
}

/* Table, JSON, Markdown and exit status of a device that computes right and of one with a wrong
 * form. */
Test(gpu_certify, the_command_tells_in_every_form_and_by_its_status, .timeout = 120)
{
    char report[] = "/tmp/numoe-report-XXXXXX";
    struct cli_values values = {.report = report};

    close(mkstemp(report));
    for (int round = 0; round < 2; round++) {
        const struct gpu_ops ops = ops_of();
        struct fake *f = fake_make(3);
        struct numoe_gpu *gpu = open_fake(f, &ops, "Fake 3000");
        struct spoken s;
        json_t *root, *failed;
        char *markdown;

        crooked_form = round ? NUMOE_CUDA_64 : 0;
        values.json = false;
        s = speak(gpu, &values, -1);
        cr_expect_eq(s.code, round ? CLI_CHECK_FAILED : CLI_OK);
        cr_expect(strstr(s.out, "Fake 3000") && strstr(s.out, "so the gate"), "%s", s.out);
        cr_expect(strstr(s.out, "form-64"), "%s", s.out);
        cr_expect_eq(strstr(s.out, "- form-64.silu.8: FAILED") != NULL, round, "%s", s.out);
        /* not on a terminal: errors alone */
        cr_expect_eq(*s.err != 0, round, "%s", s.err);
        cr_expect_null(strchr(s.err, '\r'));
        cr_expect_eq(strstr(s.err, "form-64.silu.8") != NULL, round, "%s", s.err);
        spoken_free(&s);
        markdown = take_back(fopen(report, "r"));
        cr_expect_eq(strncmp(markdown, "### Fake 3000", 13), 0, "%s", markdown);
        cr_expect(strstr(markdown, "\n| kernels | ok | failed |"), "%s", markdown);
        cr_expect(strstr(markdown, "\n| form-64 | "), "%s", markdown);
        cr_expect_eq(strstr(markdown, "\n- form-64.silu.8: FAILED") != NULL, round);
        free(markdown);
        values.json = true;
        s = speak(gpu, &values, -1);
        cr_expect_eq(s.code, round ? CLI_CHECK_FAILED : CLI_OK);
        root = json_loads(s.out, 0, NULL);
        cr_assert_not_null(root, "%s", s.out);
        cr_expect_str_eq(json_string_value(json_object_get(root, "verdict")),
                         "can be used: so the gate");
        failed = checks_with(root, certify_state_name(CERTIFY_FAILED));
        cr_expect_eq(json_array_size(failed),
                     (size_t)json_integer_value(json_object_get(root, "failures")));
        cr_expect_eq(json_array_size(failed), round ? 4 * 3 * 2 : 0);
        json_decref(failed);
        json_decref(root);
        spoken_free(&s);
        numoe_gpu_close(gpu);
        fake_free(f);
    }
    unlink(report);
    values.report = "/nonexistent/report.md"; /* what was found is shown all the same */
    {
        const struct gpu_ops ops = ops_of();
        struct fake *f = fake_make(3);
        struct numoe_gpu *gpu = open_fake(f, &ops, "Fake");
        struct spoken s = speak(gpu, &values, -1);

        cr_expect_eq(s.code, CLI_FAILURE);
        cr_expect(strstr(s.err, "/nonexistent/report.md"), "%s", s.err);
        cr_expect_neq(*s.out, 0);
        spoken_free(&s);
        numoe_gpu_close(gpu);
        fake_free(f);
    }
}

/* A device that is lost in the middle: what was found by then is told and kept, the status says so,
 * and on a terminal it could be seen how far it was. */
Test(gpu_certify, a_lost_device_ends_it_and_a_later_run_goes_on, .timeout = 120)
{
    const struct gpu_ops ops = ops_of();
    struct fake *f = fake_make(2);
    struct numoe_gpu *gpu = open_fake(f, &ops, "Fake");
    const int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    struct cli_values values = {.resume = path, .json = true};
    char seen[4096] = "";
    struct spoken s;
    json_t *root, *done, *left;
    size_t first;
    int side;

    close(mkstemp(path));
    unlink(path);
    crooked_form = 0;
    f->fail_at = f->calls + 900;
    f->fail_code = 700;
    s = speak(gpu, &values, -1);
    cr_expect_eq(s.code, CLI_FAILURE);
    cr_expect(strstr(s.err, "illegal memory access"), "%s", s.err);
    root = json_loads(s.out, 0, NULL);
    cr_assert_not_null(root);
    done = checks_with(root, certify_state_name(CERTIFY_OK));
    left = checks_with(root, certify_state_name(CERTIFY_OPEN));
    first = json_array_size(done);
    cr_expect_gt(first, 2);
    cr_expect_gt(json_array_size(left), 2);
    json_decref(done);
    json_decref(left);
    json_decref(root);
    spoken_free(&s);
    numoe_gpu_close(gpu);
    fake_free(f);

    cr_assert_geq(terminal, 0);
    cr_assert_eq(grantpt(terminal) | unlockpt(terminal), 0);
    side = open_side(terminal);
    f = fake_make(2);
    gpu = open_fake(f, &ops, "Fake");
    launches = 0;
    s = speak(gpu, &values, side);
    cr_expect_eq(s.code, CLI_OK, "%s", s.out);
    cr_expect_gt(launches, 0);
    root = json_loads(s.out, 0, NULL);
    cr_assert_not_null(root);
    done = checks_with(root, certify_state_name(CERTIFY_OK));
    left = checks_with(root, certify_state_name(CERTIFY_OPEN));
    cr_expect_gt(json_array_size(done), first);
    cr_expect_eq(json_array_size(left), 0);
    json_decref(done);
    json_decref(left);
    json_decref(root);
    spoken_free(&s);
    cr_assert_gt(read(terminal, seen, sizeof seen - 1), 0);
    cr_expect(strstr(seen, " checks, form-"), "%s", seen);
    close(side);
    close(terminal);
    /* of another's file nothing is done */
    truncate_to(path, "what\n");
    s = speak(gpu, &values, -1);
    cr_expect_eq(s.code, CLI_BAD_INPUT);
    cr_expect_str_eq(s.out, "");
    spoken_free(&s);
    unlink(path);
    numoe_gpu_close(gpu);
    fake_free(f);
}

Test(gpu_certify, a_wrong_form_is_not_used_and_the_others_are, .timeout = 60)
{
    for (uint32_t wrong = 1; wrong <= NUMOE_GPU_FORMS; wrong++) {
        const struct gpu_ops ops = ops_of();
        struct model *m = model_make(LAYERS, false);
        struct fake *f = fake_make(2);
        struct numoe_gpu *gpu = open_fake(f, &ops, "Fake");
        const struct numoe_gpu_source source = source_of(m);
        const struct numoe_gpu_model_options options = {.keep_free_bytes = 4 << 20};
        struct numoe_gpu_model *model;
        double rel_l2;
        struct numoe_cuda_ffn ffn = {.shape.hidden = 64, .slices = 2, .experts = 4, .top_k = 2};

        crooked_form = wrong;
        crooked_from = wrong % 2 ? 1 : 100; /* few tokens or many */
        crooked_replay = false;
        cr_expect_eq(gpu_self_test(gpu, &rel_l2, NULL), 0); /* whether it is chosen or not */
        cr_expect_gt(rel_l2, GPU_TEST_LIMIT);
        cr_expect_eq(gpu->forms_off, 0);
        cr_expect_eq(gpu_turn_off_forms(gpu), NUMOE_GPU_FORMS - 1);
        cr_expect_eq(gpu_self_test(gpu, &rel_l2, NULL), 0);
        cr_expect_lt(rel_l2, GPU_TEST_LIMIT);
        cr_expect_eq(gpu->forms_off, 1u << wrong);
        for (ffn.tokens = 1; ffn.tokens < 400; ffn.tokens++) {
            const uint32_t form = gpu_choose_form(gpu, &ffn);
            cr_expect(form && form != crooked_form, "%u tokens: %u", ffn.tokens, form);
        }
        cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, NULL), 0);
        for (uint64_t layer = 0; layer < LAYERS; layer++) {
            struct batch b;
            uint64_t done;
            batch_make(&b);
            cr_assert_eq(numoe_gpu_forward(model, layer, &b.call, &done, NULL), 0);
            cr_expect(batch_right(m, layer, &b, done));
        }
        close_clean(model, gpu, f);
        model_free(m);
    }
}
