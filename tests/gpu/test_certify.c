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

/* Those checks that this fake is quick in. */
static void make_quick(struct certify *c, struct numoe_gpu *gpu)
{
    make(c, gpu);
    for (uint32_t i = 0; i < c->count; i++)
        if (c->checks[i].tokens > 8 || c->checks[i].kind == CERTIFY_CODES)
            c->checks[i].state = CERTIFY_ABSENT;
}

/* The command's code and words with quick checks. Standard error is a file, or the terminal that is
 * given, whose words are then not taken back. */
static struct spoken speak(struct numoe_gpu *gpu, const struct cli_values *values, int terminal)
{
    FILE *out = tmpfile(), *err = tmpfile();
    const int had_out = dup(1), had_err = dup(2);
    struct spoken s;
    struct certify c;

    make_quick(&c, gpu);
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

/* Of the table's rows of kernels: outcomes in each of the four columns. */
static void sum_columns(const char *text, uint32_t sums[4])
{
    const char *row = strstr(text, "worst rel. L2");

    memset(sums, 0, 4 * sizeof *sums);
    cr_assert_not_null(row, "%s", text);
    for (row = strchr(row, '\n') + 1; *row != '\n'; row = strchr(row, '\n') + 1) {
        unsigned of[4];

        cr_assert_eq(sscanf(row + 20, "%u %u %u %u", &of[0], &of[1], &of[2], &of[3]), 4, "%s", row);
        for (int i = 0; i < 4; i++)
            sums[i] += of[i];
    }
}

static uint32_t kernel_checks(const struct certify *c, enum certify_state state)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < c->count; i++)
        count += c->checks[i].kind <= CERTIFY_MARLIN && c->checks[i].state == state;
    return count;
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

static void write_bytes(const char *name, const void *bytes, size_t count)
{
    FILE *file = fopen(name, "w");

    cr_assert_not_null(file);
    cr_assert_eq(fwrite(bytes, 1, count, file), count);
    cr_assert_eq(fclose(file), 0);
}

/* What power cuts and hands may leave in a file: of nothing nothing is lost, and it is begun anew;
 * of anything else nothing is changed. */
Test(gpu_certify, a_file_with_nothing_in_it_is_begun_anew, .timeout = 60)
{
    static const char zeros[64];
    const struct gpu_ops ops = ops_of();
    struct fake *f = fake_make(2);
    struct numoe_gpu *gpu = open_fake(f, &ops, "Fake");
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct cli_values values = {.resume = path};
    struct spoken s;
    struct certify c;
    char first[512], *rest;
    size_t length;

    crooked_form = 0;
    close(mkstemp(path));
    unlink(path);
    make(&c, gpu);
    snprintf(first, sizeof first, "{\"device\":\"%s\"}", c.device);
    length = strlen(first);
    certify_fini(&c);
    for (size_t keep = 0; keep <= length; keep++) {
        write_bytes(path, first, keep);
        cr_assert_eq(certify_init(&c, gpu), 0);
        cr_expect_eq(certify_resume(&c, path, &error), 0, "%d bytes: %s", (int)keep, error.message);
        cr_expect(c.anew && !c.kept && open_checks(&c) == c.count);
        certify_fini(&c);
    }
    write_bytes(path, first, length / 2);
    for (int run = 0; run < 2; run++) {
        s = speak(gpu, &values, -1);
        cr_expect_eq(s.code, CLI_OK);
        cr_expect_eq(strstr(s.err, "begun anew") != NULL, run == 0, "%s", s.err);
        spoken_free(&s);
    }
    rest = take_back(fopen(path, "r"));
    cr_expect(!strncmp(rest, first, length) && rest[length] == '\n', "%s", rest);
    free(rest);
    /* another's whole line, words, zeros, and zeros among the lines */
    snprintf(first, sizeof first, "{\"device\":\"Other\"}");
    for (int kind = 0; kind < 5; kind++) {
        static const char *const text[] = {"{\"device\":\"Other\"}", "a letter", "\n\n",
                                           "{\"device\":\"a\",\"b"};
        const void *bytes = kind < 4 ? (const void *)text[kind] : zeros;
        const size_t count = kind < 4 ? strlen(text[kind]) : sizeof zeros;

        write_bytes(path, bytes, count);
        s = speak(gpu, &values, -1);
        cr_expect_eq(s.code, CLI_BAD_INPUT, "%d", kind);
        cr_expect_eq(size_of_file(), (long)count);
        spoken_free(&s);
    }
    cr_assert_eq(certify_init(&c, gpu), 0);
    snprintf(first, sizeof first, "{\"device\":\"%s\"}\n", c.device);
    length = strlen(first);
    memcpy(first + length, "\0\0\0\n", 4);
    write_bytes(path, first, length + 4);
    cr_expect_eq(certify_resume(&c, path, &error), -EINVAL);
    cr_expect_not_null(strstr(error.message, "line 2 is damaged"), "%s", error.message);
    certify_fini(&c);
    unlink(path);
    numoe_gpu_close(gpu);
    fake_free(f);
}

/* What is no file with an end is refused before anything is read of it. */
Test(gpu_certify, what_is_no_file_is_refused, .timeout = 20)
{
    static const char *const names[] = {"/dev/full", "/dev/zero", "/tmp", "fifo", "/dev/null/x"};
    const struct gpu_ops ops = ops_of();
    struct fake *f = fake_make(2);
    struct numoe_gpu *gpu = open_fake(f, &ops, "Fake");

    close(mkstemp(path));
    unlink(path);
    cr_assert_eq(mkfifo(path, 0600), 0);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct cli_values values = {.resume = i == 3 ? path : names[i]};
        struct spoken s = speak(gpu, &values, -1);

        cr_expect_eq(s.code, CLI_BAD_INPUT, "%s", names[i]);
        cr_expect_not_null(strstr(s.err, values.resume), "%s", s.err);
        cr_expect_str_eq(s.out, "");
        spoken_free(&s);
    }
    unlink(path);
    numoe_gpu_close(gpu);
    fake_free(f);
}

/* A link to a file elsewhere stays a link, whether the file is there already or not. */
Test(gpu_certify, a_link_is_followed, .timeout = 60)
{
    char directory[] = "/tmp/numoe-certify-XXXXXX", link[64], target[64];
    const struct gpu_ops ops = ops_of();
    struct fake *f = fake_make(2);
    struct numoe_gpu *gpu = open_fake(f, &ops, "Fake");
    struct cli_values values = {.resume = link};
    struct stat status;
    long size = 0;

    crooked_form = 0;
    cr_assert_not_null(mkdtemp(directory));
    snprintf(link, sizeof link, "%s/link", directory);
    snprintf(target, sizeof target, "%s/target", directory);
    cr_assert_eq(symlink("target", link), 0);
    for (int run = 0; run < 3; run++) {
        struct spoken s;

        if (run == 1) /* half of it is to be done again */
            cr_assert_eq(truncate(target, size / 2), 0);
        launches = 0;
        s = speak(gpu, &values, -1);
        cr_expect_eq(s.code, CLI_OK, "%s", s.err);
        cr_expect_eq(launches > 0, run < 2);
        spoken_free(&s);
        cr_assert_eq(lstat(link, &status), 0);
        cr_expect(S_ISLNK(status.st_mode));
        cr_assert_eq(lstat(target, &status), 0);
        cr_expect(S_ISREG(status.st_mode));
        cr_expect(run < 2 ? status.st_size > size / 2 : status.st_size == size);
        size = (long)status.st_size;
    }
    unlink(target);
    unlink(link);
    rmdir(directory);
    numoe_gpu_close(gpu);
    fake_free(f);
}

/* Interrupted in the middle it ends as programs do that are interrupted, and what was done by then
 * is in the file. */
Test(gpu_certify, an_interrupt_ends_it_and_loses_nothing, .timeout = 60)
{
    const struct gpu_ops ops = ops_of();
    struct fake *f = fake_make(2);
    struct numoe_gpu *gpu = open_fake(f, &ops, "Fake");
    struct cli_values values = {.resume = path};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct spoken s;
    struct certify c;
    uint32_t all;
    int status;
    pid_t child;

    crooked_form = 0;
    close(mkstemp(path));
    unlink(path);
    fflush(NULL);
    child = fork();
    cr_assert_geq(child, 0);
    if (!child) {
        sigset_t interrupts;

        sigemptyset(&interrupts);
        sigaddset(&interrupts, SIGINT);
        sigprocmask(SIG_UNBLOCK, &interrupts, NULL);
        signal(SIGINT, SIG_DFL);
        launches = 0;
        interrupted_at = 41;
        s = speak(gpu, &values, -1);
        _exit(s.code);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT, "%x", (unsigned)status);
    make_quick(&c, gpu);
    all = open_checks(&c);
    cr_assert_eq(certify_resume(&c, path, &error), 0, "%s", error.message);
    cr_expect(!c.anew);
    cr_expect_eq(open_checks(&c), all - 20, "%u of %u: each launches twice", open_checks(&c), all);
    certify_fini(&c);
    launches = 0;
    s = speak(gpu, &values, -1);
    cr_expect_eq(s.code, CLI_OK, "%s", s.out);
    cr_expect_gt(launches, 0);
    spoken_free(&s);
    unlink(path);
    numoe_gpu_close(gpu);
    fake_free(f);
}

/* A process of its own answers to where it cannot. */
static void answer_to(struct numoe_gpu *gpu, int out, bool json, int wanted)
{
    const struct cli_values values = {.json = json, .resume = path};
    FILE *err = tmpfile();
    struct certify c;
    char *words;
    pid_t child;
    int status;

    make(&c, gpu);
    for (uint32_t i = 4; i < c.count; i++)
        c.checks[i].state = CERTIFY_ABSENT;
    fflush(NULL);
    child = fork();
    cr_assert_geq(child, 0);
    if (!child) {
        dup2(out, 1);
        dup2(fileno(err), 2);
        _exit(certify_command(&c, "can be used", &values));
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == wanted, "%x", (unsigned)status);
    certify_fini(&c);
    words = take_back(err);
    cr_expect(strstr(words, "stdout: the answer could not be written: ") &&
                  strchr(words, '\n') == words + strlen(words) - 1,
              "one error: %s", words);
    free(words);
}

/* Nobody reads the answer, or the disk is full: one error, and what was done is kept. */
Test(gpu_certify, an_answer_that_cannot_be_written_is_an_error, .timeout = 60)
{
    const struct gpu_ops ops = ops_of();
    struct fake *f = fake_make(2);
    struct numoe_gpu *gpu = open_fake(f, &ops, "Fake");
    struct numoe_error error = NUMOE_ERROR_INIT;

    crooked_form = 0;
    signal(SIGPIPE, SIG_IGN);
    close(mkstemp(path));
    for (int round = 0; round < 4; round++) {
        int ends[2] = {-1, -1};
        struct certify c;

        unlink(path);
        if (round < 2) {
            cr_assert_eq(pipe(ends), 0);
            close(ends[0]);
        } else {
            ends[1] = open("/dev/full", O_WRONLY | O_CLOEXEC);
            cr_assert_geq(ends[1], 0);
        }
        answer_to(gpu, ends[1], round % 2, round < 2 ? CLI_FAILURE : CLI_NO_ROOM);
        close(ends[1]);
        make(&c, gpu);
        cr_assert_eq(certify_resume(&c, path, &error), 0, "%s", error.message);
        cr_expect_eq(open_checks(&c), 0);
        certify_fini(&c);
    }
    unlink(path);
    numoe_gpu_close(gpu);
    fake_free(f);
}

/* What was not come to is no success: it stands in the column of errors. */
Test(gpu_certify, what_was_left_is_in_the_table, .timeout = 60)
{
    const struct cli_values values = {.json = false};
    const struct gpu_ops ops = ops_of();
    struct fake *f = fake_make(2);
    struct numoe_gpu *gpu = open_fake(f, &ops, "Fake");
    uint32_t sums[4];
    struct spoken s;
    struct certify c;

    crooked_form = 0;
    f->fail_at = f->calls + 900;
    f->fail_code = 700;
    make(&c, gpu);
    s = speak(gpu, &values, -1);
    cr_expect_eq(s.code, CLI_FAILURE);
    sum_columns(s.out, sums);
    cr_expect_gt(sums[0], 2);
    cr_expect_eq(sums[1], 0);
    cr_expect_gt(sums[3], 10, "one that failed, and the others");
    cr_expect_eq(sums[0] + sums[2] + sums[3],
                 kernel_checks(&c, CERTIFY_OPEN) + kernel_checks(&c, CERTIFY_ABSENT), "%s", s.out);
    certify_fini(&c);
    spoken_free(&s);
    numoe_gpu_close(gpu);
    fake_free(f);
}

static struct certify_check *find_check(struct certify *c, const char *id)
{
    uint32_t i = 0;

    while (i < c->count && strcmp(c->checks[i].id, id) != 0)
        i++;
    cr_assert_lt(i, c->count, "%s", id);
    return &c->checks[i];
}

static void set_values(struct certify *c, const char *id, double a, double b, double d)
{
    struct certify_check *check = find_check(c, id);

    check->state = CERTIFY_OK;
    check->value[0] = a;
    check->value[1] = b;
    check->value[2] = d;
}

/* Rates and prefill of an earlier run are told as if they were of this one. */
Test(gpu_certify, what_was_measured_before_is_told_again, .timeout = 60)
{
    const struct gpu_ops ops = ops_of();
    struct fake *f = fake_make(2);
    struct numoe_gpu *gpu = open_fake(f, &ops, "Fake");
    struct cli_values values = {.resume = path};
    const json_t *check;
    struct spoken s;
    struct certify c;
    json_t *root;
    size_t i;

    close(mkstemp(path));
    unlink(path);
    make(&c, gpu);
    for (uint32_t k = 0; k < c.count; k++)
        c.checks[k].state = CERTIFY_ABSENT;
    set_values(&c, "rates", 3456.25, 52.5, 7890.125);
    set_values(&c, "prefill.512", 611.25, 1.0625, 0.9375);
    set_values(&c, "prefill.65536", 33221.5, 1.125, 0.25);
    cr_assert_eq(certify_run(&c, path, NULL, NULL), 0);
    certify_fini(&c);
    cr_assert_eq(certify_init(&c, gpu), 0);
    cr_assert_eq(certify_resume(&c, path, NULL), 0);
    cr_expect_eq(open_checks(&c), 0);
    cr_expect_float_eq(c.link_gbs, 52.5, 1e-9, "prefill goes on with the link's rate");
    certify_fini(&c);
    s = speak(gpu, &values, -1);
    cr_expect_eq(s.code, CLI_OK);
    cr_expect_not_null(strstr(s.out,
                              "\nreads its memory at 3456 GB/s, the link gives 52.5 GB/s from "
                              "pinned memory, mma.sync 7890 Gop/s\n"),
                       "%s", s.out);
    cr_expect_not_null(strstr(s.out, "\n   512       611      1.062     0.938\n"), "%s", s.out);
    cr_expect_not_null(strstr(s.out, "\n 65536     33222      1.125     0.250\n"), "%s", s.out);
    spoken_free(&s);
    values.json = true;
    s = speak(gpu, &values, -1);
    root = json_loads(s.out, 0, NULL);
    cr_assert_not_null(root);
    json_array_foreach(json_object_get(root, "checks"), i, check)
    {
        const char *id = json_string_value(json_object_get(check, "id"));
        double a = 0, b = 0, d = 0;

        if (!strcmp(id, "rates")) {
            cr_assert_eq(json_unpack((json_t *)check, "{s:F, s:F, s:F}", "read_gbs", &a, "link_gbs",
                                     &b, "mma_gops", &d),
                         0);
            cr_expect(a == 3456.25 && b == 52.5 && d == 7890.125, "%g %g %g", a, b, d);
        } else if (!strcmp(id, "prefill.65536")) {
            cr_assert_eq(json_unpack((json_t *)check, "{s:F, s:F, s:F}", "tokens_s", &a,
                                     "total_over_max", &b, "link_fraction", &d),
                         0);
            cr_expect(a == 33221.5 && b == 1.125 && d == 0.25, "%g %g %g", a, b, d);
        }
    }
    json_decref(root);
    spoken_free(&s);
    unlink(path);
    numoe_gpu_close(gpu);
    fake_free(f);
}

/* A device with much memory that nobody looks at: nothing is copied and nothing computed. */
static uint64_t copied;

static int no_copies(void *device, void *stream, void *const *to, const void *const *from,
                     const uint64_t *bytes, uint32_t count)
{
    (void)stream;
    (void)to;
    (void)from;
    for (uint32_t i = 0; i < count; i++)
        copied += bytes[i];
    return fake_call(device);
}

static int no_copy(void *device, void *stream, void *to, const void *from, uint64_t bytes)
{
    return no_copies(device, stream, &to, &from, &bytes, 1);
}

static int allocate_none(void *device, uint64_t bytes, void **address)
{
    struct fake *f = device;

    *address = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*address == MAP_FAILED || bytes > f->memory - f->taken)
        return fake_refuse(f, 2);
    f->taken += bytes;
    return fake_add_range(f, *address, bytes, FAKE_DEVICE);
}

static int release_none(void *device, void *address)
{
    struct fake *f = device;
    const struct fake_range *r = fake_find(f, address, 1);

    munmap(address, r->bytes);
    f->taken -= r->bytes;
    f->ranges[r - f->ranges] = f->ranges[--f->range_count];
    return 0;
}

static void no_compute(struct fake *f, const struct numoe_cuda_ffn *ffn)
{
    (void)f;
    (void)ffn;
}

/* tokens/s are of all layers though fewer pass, and the part of the link is of its measured rate.
 */
Test(gpu_certify, prefill_is_of_all_layers_and_of_the_links_rate, .timeout = 120)
{
    struct gpu_ops ops = fake_ops;
    struct fake *f = fake_make(4);
    struct numoe_gpu *gpu;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_slice_shape shape;
    struct certify_check *check;
    double bytes, seconds;
    struct certify c;

    ops.copy_in = no_copy;
    ops.copy_in_many = no_copies;
    ops.allocate = allocate_none;
    ops.release = release_none;
    f->instead = no_compute;
    f->memory = (uint64_t)24 << 30;
    gpu = open_fake(f, &ops, "Fake");
    make(&c, gpu);
    for (uint32_t i = 0; i < c.count; i++)
        c.checks[i].state = CERTIFY_ABSENT;
    check = find_check(&c, "prefill.512");
    check->state = CERTIFY_OPEN;
    c.link_gbs = 40;
    copied = 0;
    cr_assert_eq(certify_run(&c, NULL, NULL, &error), 0, "%s", error.message);
    cr_assert_eq(check->state, CERTIFY_OK, "%s", check->text);
    cr_assert_eq(numoe_slice_shape_init(&shape, 4096, false), 0);
    bytes = 8 * 256 * (2048 / 32) * (double)shape.bytes;
    cr_expect_gt((double)copied, 7 * bytes, "once to warm up, and three times two");
    seconds = bytes / (check->value[2] * c.link_gbs * 1e9);
    cr_expect_float_eq(check->value[0] * seconds / (512.0 * 8 / 43), 1, 1e-6, "%g tokens/s in %g s",
                       check->value[0], seconds);
    certify_fini(&c);
    expect_clean(f);
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
        model = model_on(gpu, m, &options);
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
