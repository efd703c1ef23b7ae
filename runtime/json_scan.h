/*
 * json_scan.h - one pass over JSON text whose shape is known: names and places of half a million
 * tensors, which as a tree of objects would take longer to build and to free than files to open.
 *
 * Strict JSON in UTF-8, without NUL in strings, nested at most NUMOE_SCAN_DEPTH deep. The first
 * thing that is wrong stays: everything after it fails. Strings are decoded where they stand, so
 * the text is changed, and lives as long as they do. Everything else of the project's JSON is
 * jansson's.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_JSON_SCAN_H
#define NUMOE_JSON_SCAN_H

#include <stdbool.h>
#include <stdint.h>

/* With the two objects around a value in a safetensors header, as deep as the official library
 * goes. */
enum { NUMOE_SCAN_DEPTH = 125 };

struct numoe_scan {
    char *text; /* bytes of it; not ended by a NUL */
    uint64_t bytes, at;
    const char *wrong; /* what is, at `at`; NULL: nothing yet */
};

/* The next character that is no space; 0 at the end, or when something is wrong. */
char numoe_scan_peek(struct numoe_scan *scan);
/* Go past it if it is this one. */
bool numoe_scan_is(struct numoe_scan *scan, char character);
/* Go past it; wrong if it is another. */
bool numoe_scan_expect(struct numoe_scan *scan, char character);

/*
 * The members of an object, or the elements of an array, one a call, until it is at its end.
 *     for (bool first = true; numoe_scan_member(scan, &first, &name);) ... a value is read ...
 * @param first  true before the first; the bracket that opens has been passed
 * @return whether there is one more; false, too, when something is wrong
 */
bool numoe_scan_member(struct numoe_scan *scan, bool *first, const char **name);
bool numoe_scan_element(struct numoe_scan *scan, bool *first);

/* A string, good as long as the text; NULL when it is none or not sound. */
const char *numoe_scan_string(struct numoe_scan *scan);
/* Whether it is a whole number from 0 on; any other value is skipped. */
bool numoe_scan_natural(struct numoe_scan *scan, uint64_t *number);
/* Any value. */
void numoe_scan_skip(struct numoe_scan *scan);
/* Nothing but spaces may follow. @return whether all of the text was sound */
bool numoe_scan_end(struct numoe_scan *scan);

#endif
