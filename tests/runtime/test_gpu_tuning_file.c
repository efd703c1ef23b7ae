/* Tables of kernels' times as files: written and read again, damaged ones, and who reads them. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpu_tuning_file.h"
#include "numoe.h"

static char path[64];

static void begin(void)
{
    snprintf(path, sizeof path, "/tmp/numoe-tuning-%d.json", (int)getpid());
}

static void end(void)
{
    unlink(path);
}

static void write_text(const char *text)
{
    FILE *file = fopen(path, "w");

    cr_assert_not_null(file);
    fputs(text, file);
    fclose(file);
}

TestSuite(gpu_tuning_file, .init = begin, .fini = end);

Test(gpu_tuning_file, what_was_written_is_read)
{
    const struct numoe_gpu_tuning *from = numoe_gpu_tuning_builtin();
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_tuning to;

    cr_assert_eq(numoe_gpu_tuning_save(path, from, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_gpu_tuning_load(path, &to, &error), 0, "%s", error.message);
    cr_expect_eq(numoe_gpu_tuning_fits(&to, &from->device, path, &error), 0, "%s", error.message);
    cr_assert_eq(to.shape_count, from->shape_count);
    for (uint32_t s = 0; s < to.shape_count; s++) {
        cr_expect_eq(to.shapes[s].hidden, from->shapes[s].hidden);
        cr_expect_eq(to.shapes[s].intermediate, from->shapes[s].intermediate);
        cr_assert_eq(to.shapes[s].point_count, from->shapes[s].point_count);
        for (uint32_t p = 0; p < to.shapes[s].point_count; p++)
            for (int f = 1; f <= NUMOE_GPU_FORMS; f++)
                cr_expect_float_eq(to.shapes[s].points[p].ms[f], from->shapes[s].points[p].ms[f],
                                   1e-4 * from->shapes[s].points[p].ms[f] + 1e-12);
    }
    /* and where nothing can be written, that is said */
    cr_expect_eq(numoe_gpu_tuning_save("/nonexistent/a.json", from, &error), -ENOENT);
    cr_expect(strstr(error.message, "cannot be written") != NULL, "%s", error.message);
}

#define DEVICE                                                                                     \
    "\"device\": {\"compute_capability\": \"9.0\", \"multiprocessors\": 132, "                     \
    "\"shared_bytes\": 232448, \"l2_bytes\": 62914560}"
#define POINT "{\"tokens\": 1, \"ms\": {\"8\": 1, \"32\": 2, \"64\": 3}}"
#define SHAPE(points)                                                                              \
    "\"shapes\": [{\"hidden\": 64, \"intermediate\": 32, \"points\": [" points "]}]"

Test(gpu_tuning_file, damaged_files_are_refused_with_the_place)
{
    static const struct {
        const char *text, *what;
    } files[] = {
        {"", "end of file"},
        {"[]", "object"},
        {"{" DEVICE "}", "\"shapes\" is not an array of 1 to 16"},
        {"{" SHAPE(POINT) "}", "\"device\" is no object"},
        {"{" DEVICE ", " SHAPE(POINT) ", \"name\": \"H200\"}", "key \"name\" of the table"},
        {"{\"device\": {\"compute_capability\": 9.0, \"multiprocessors\": 132, \"shared_bytes\": "
         "1, "
         "\"l2_bytes\": 1}, " SHAPE(POINT) "}",
         "is not like \"9.0\""},
        {"{\"device\": {\"compute_capability\": \"9.0x\"}, " SHAPE(POINT) "}", "is not like"},
        {"{\"device\": {\"compute_capability\": \"9.0\", \"multiprocessors\": 0}, " SHAPE(
             POINT) "}",
         "\"multiprocessors\" of \"device\""},
        {"{\"device\": {\"compute_capability\": \"9.0\", \"multiprocessors\": 132, "
         "\"shared_bytes\": 99}, " SHAPE(POINT) "}",
         "\"l2_bytes\" of \"device\""},
        {"{" DEVICE ", \"shapes\": [7]}", "shape 1 is no object"},
        {"{" DEVICE ", \"shapes\": [{\"hidden\": 64, \"points\": [" POINT "]}]}",
         "\"intermediate\" of shape 1"},
        {"{" DEVICE ", " SHAPE("") "}", "\"points\" of shape 1"},
        {"{" DEVICE ", " SHAPE("{\"ms\": {}}") "}", "no number \"tokens\""},
        {"{" DEVICE ", " SHAPE("{\"tokens\": 1}") "}", "\"ms\" is no object"},
        {"{" DEVICE ", " SHAPE("{\"tokens\": 1, \"ms\": {\"16\": 1}}") "}", "key \"16\""},
        {"{" DEVICE ", " SHAPE("{\"tokens\": 1, \"ms\": {\"8\": -1}}") "}", "\"8\" at 1 tokens"},
        {"{" DEVICE ", " SHAPE("{\"tokens\": 1, \"ms\": {\"8\": \"fast\"}}") "}", "\"8\" at 1"},
        {"{" DEVICE ", " SHAPE("{\"tokens\": 1, \"ms\": {\"8\": 1, \"32\": 1}}") "}",
         "no time of form 64"},
        {"{" DEVICE ", " SHAPE(POINT ", " POINT) "}", "do not ascend"},
    };
    struct numoe_gpu_tuning t;

    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        struct numoe_error error = NUMOE_ERROR_INIT;
        write_text(files[i].text);
        const int rc = numoe_gpu_tuning_load(path, &t, &error);
        cr_expect(rc == -EBADMSG || rc == -EINVAL, "%s: %d", files[i].what, rc);
        cr_expect_str_eq(error.where, path);
        cr_expect(strstr(error.message, files[i].what) != NULL, "\"%s\" has no \"%s\"",
                  error.message, files[i].what);
    }
    write_text("{" DEVICE ", " SHAPE(POINT) "}");
    cr_expect_eq(numoe_gpu_tuning_load(path, &t, NULL), 0);
    cr_expect_eq(numoe_gpu_tuning_load("/nonexistent/a.json", &t, NULL), -ENOENT);
}

/* With or without a GPU: a table that cannot be read is no reason to go on without it. */
Test(gpu_tuning_file, a_context_refuses_a_damaged_table)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe *context;

    unsetenv("NUMOE_GPU");
    write_text("{" DEVICE "}");
    options.gpu = NUMOE_GPU_ON;
    options.gpu_tuning = path;
    options.threads = 1;
    cr_expect_eq(numoe_open(&options, &context, &error), -EBADMSG);
    cr_expect_str_eq(error.where, path);
    options.gpu_tuning = NULL;
    setenv("NUMOE_GPU_TUNING", path, 1);
    error = (struct numoe_error)NUMOE_ERROR_INIT;
    cr_expect_eq(numoe_open(&options, &context, &error), -EBADMSG);
    cr_expect_str_eq(error.where, path);
    options.gpu = NUMOE_GPU_OFF; /* then nobody asks for it */
    cr_assert_eq(numoe_open(&options, &context, &error), 0, "%s", error.message);
    numoe_close(context);
    unsetenv("NUMOE_GPU_TUNING");
}
