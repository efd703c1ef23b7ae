/*
 * topo_text.h - words for people: notes, lists of numbers, bytes.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef TOPO_TEXT_H
#define TOPO_TEXT_H

#include "base/numoe_base.h"

#include <stddef.h>
#include <stdint.h>

/* Append one sentence to an array of notes. @return 0 or -ENOMEM (the array is as before) */
int topo_note(char ***notes, uint32_t *count, const char *format, ...) NUMOE_PRINTF(3, 4);
void topo_notes_free(char **notes, uint32_t count);

/* "0-3,8,10-11" from ascending numbers; ends in "..." when it does not fit. Returns text. */
const char *topo_ranges(char *text, size_t size, const uint32_t *numbers, size_t count);

/* "14.90 GiB" */
const char *topo_bytes(char text[32], uint64_t bytes);

/* Copy, with everything that a terminal might act on replaced by '?'. */
void topo_copy_printable(char *to, size_t size, const char *from);

#endif
