/*
 * fuzz.h - what fuzz targets share.
 *
 * A target is a file fuzz_<input>.c with one function, LLVMFuzzerTestOneInput: it hands an input to
 * numoe the way a user would, and when that is accepted, uses the result and checks what must hold
 * of it. libFuzzer calls it (preset fuzz), or replay_main.c does (all other presets), which goes
 * over the corpus and over damaged copies of it. docs/fuzzing.md says how to run both.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_FUZZ_H
#define NUMOE_FUZZ_H

#include "numoe_topo.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* @return 0; -1: not an input of this kind, and of no use in a corpus */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Say what does not hold and end the process the way a crash does. */
_Noreturn void fuzz_broken(const char *file, int line, const char *condition, const char *format,
                           ...) NUMOE_PRINTF(4, 5);
#define check_that(condition, ...)                                                                 \
    ((condition) ? (void)0 : fuzz_broken(__FILE__, __LINE__, #condition, " " __VA_ARGS__))

/* ---- inputs, files and text (scratch.c) ---- */

/* A directory in memory for this process, made when it is first asked for. */
const char *fuzz_directory(void);
/* Path of a name in it; good until the second next call. */
const char *fuzz_path(const char *name);
/* Write bytes, and after them so many that read as zero and take no room. */
void fuzz_write(const char *path, const void *bytes, size_t count, uint64_t more);
/* Remove a file, or a directory with all that is in it. */
void fuzz_remove(const char *path);

/* A copy that ends in a zero byte; NULL when the input has one itself. */
char *fuzz_text(const uint8_t *data, size_t size);

/* What functions print: open, print to out, then take the text. */
struct fuzz_print {
    FILE *out;
    char *text;
    size_t bytes;
};
void fuzz_print_open(struct fuzz_print *print);
/* The text, to be freed. */
char *fuzz_print_take(struct fuzz_print *print);

/* An error says what is wrong in one printable line, and its code is what was returned. */
void fuzz_check_error(int rc, const struct numoe_error *error);
/* Text for people: none of its numbers is "no such object", and none is not finite. Words that
 * input has itself do not count. */
void fuzz_check_text(const char *text, const char *input);
/* Text that must be JSON. */
void fuzz_check_json(const char *text);

/* ---- children (child_watch.c) ---- */

/* Make what forked children run count as covered; to be called before anything forks. */
void fuzz_child_watch(void);
/* After a call that may have forked: a fault of hwloc in the child is what the child is for; one of
 * numoe is broken. */
void fuzz_child_check(void);

/* numoe_machine_load, with both of the above. With NUMOE_FUZZ_NO_CHILD in the environment no child
 * tries the description first: a fault of hwloc then ends the fuzzer. That is many times as fast,
 * and sees into a hwloc that is instrumented. */
int fuzz_load(const char *words, struct numoe_machine **machine, struct numoe_error *error);

/* ---- machines (use_machine.c) ---- */

/* Do with a machine all that can be done: plans, predictions, pictures, text, saved and loaded
 * again. Takes it. input: the text it came from. */
void fuzz_use_machine(struct numoe_machine *machine, const char *input);

#endif
