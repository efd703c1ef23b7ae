/* Run the numoe command and look at what it says. SPDX-License-Identifier: Apache-2.0 */
#ifndef CLI_ANSWER_H
#define CLI_ANSWER_H

#include <criterion/criterion.h>
#include <fcntl.h>
#include <jansson.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

#define DUAL_7H12 "pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2"

enum { MOST_ARGUMENTS = 32 };

/* What a run of the command left. */
struct answer {
    int status; /* exit status, or 1000 + signal */
    char *out, *err;
};

static inline char *read_back(int fd)
{
    off_t size = lseek(fd, 0, SEEK_END);
    char *text = calloc(1, (size_t)size + 1);

    cr_assert_not_null(text);
    cr_assert_eq(pread(fd, text, (size_t)size, 0), size);
    close(fd);
    return text;
}

static inline int scratch_file(void)
{
    FILE *file = tmpfile();
    int fd;

    cr_assert_not_null(file);
    fd = fcntl(fileno(file), F_DUPFD_CLOEXEC, 3);
    fclose(file);
    cr_assert_geq(fd, 0);
    return fd;
}

/* Run numoe VERB with the words up to NULL. */
static inline struct answer numoe_words(const char *verb, const char *const *words)
{
    char *argv[MOST_ARGUMENTS + 3] = {NUMOE_BINARY_DIR "/numoe", (char *)verb};
    int out = scratch_file(), err = scratch_file(), status, count = verb ? 2 : 1;
    posix_spawn_file_actions_t actions;
    struct answer answer;
    pid_t child;

    for (; *words; words++) {
        cr_assert_leq(count, MOST_ARGUMENTS);
        argv[count++] = (char *)*words;
    }
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, out, 1);
    posix_spawn_file_actions_adddup2(&actions, err, 2);
    cr_assert_eq(posix_spawn(&child, argv[0], &actions, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    cr_assert_eq(waitpid(child, &status, 0), child);
    answer.status = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    answer.out = read_back(out);
    answer.err = read_back(err);
    return answer;
}

/* Run numoe with the arguments up to NULL. */
static inline struct answer numoe(const char *first, ...)
{
    const char *words[MOST_ARGUMENTS + 2] = {NULL};
    va_list args;
    int count = 0;

    va_start(args, first);
    for (const char *word = first ? va_arg(args, const char *) : NULL; word;
         word = va_arg(args, const char *)) {
        cr_assert_lt(count, MOST_ARGUMENTS);
        words[count++] = word;
    }
    va_end(args);
    return numoe_words(first, words);
}

static inline void forget(struct answer *answer)
{
    free(answer->out);
    free(answer->err);
}

/* Failed as it should: the status, nothing on stdout, and one line "numoe: ...words...". */
#define assert_refused(answer, wanted, words)                                                      \
    do {                                                                                           \
        cr_assert_eq((answer).status, (wanted), "status %d, not %d: %s", (answer).status,          \
                     (wanted), (answer).err);                                                      \
        cr_assert_str_empty((answer).out);                                                         \
        cr_assert_eq(strncmp((answer).err, "numoe: ", 7), 0, "%s", (answer).err);                  \
        cr_assert_not_null(strstr((answer).err, (words)), "\"%s\" is not in: %s", (words),         \
                           (answer).err);                                                          \
        forget(&(answer));                                                                         \
    } while (0)

static inline json_t *parse(const struct answer *answer)
{
    json_error_t error;
    json_t *root;

    cr_assert_eq(answer->status, 0, "status %d: %s", answer->status, answer->err);
    root = json_loads(answer->out, JSON_REJECT_DUPLICATES, &error);
    cr_assert_not_null(root, "line %d: %s in %s", error.line, error.text, answer->out);
    return root;
}

static inline json_int_t integer(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);

    cr_assert(json_is_integer(value), "%s is no integer", key);
    return json_integer_value(value);
}

static inline double number(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);

    cr_assert(json_is_number(value), "%s is no number", key);
    return json_number_value(value);
}

/* Why no GPU of this machine is used; skips the test where one is. The caller frees. */
static inline char *no_gpu(void)
{
    struct answer answer;
    const char *said;
    json_t *root;
    char *reason;

    unsetenv("NUMOE_GPU");
    answer = numoe("topo", "--json", NULL);
    root = parse(&answer);
    if (json_array_size(json_object_get(root, "gpus")))
        cr_skip_test("this machine has a GPU");
    said = json_string_value(json_object_get(root, "gpu_reason"));
    cr_assert(said && *said);
    reason = strdup(said);
    json_decref(root);
    forget(&answer);
    return reason;
}

#endif
