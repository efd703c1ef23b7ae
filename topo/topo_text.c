/* Words for people. SPDX-License-Identifier: Apache-2.0 */
#include "topo_text.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int topo_note(char ***notes, uint32_t *count, const char *format, ...)
{
    char **grown;
    char *text;
    va_list args;
    int length;

    grown = realloc(*notes, (*count + 1u) * sizeof **notes);
    if (!grown)
        return -ENOMEM;
    *notes = grown;
    va_start(args, format);
    length = vasprintf(&text, format, args);
    va_end(args);
    if (length < 0)
        return -ENOMEM;
    grown[(*count)++] = text;
    return 0;
}

void topo_notes_free(char **notes, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        free(notes[i]);
    free(notes);
}

const char *topo_ranges(char *text, size_t size, const uint32_t *numbers, size_t count)
{
    size_t used = 0;

    text[0] = 0;
    for (size_t i = 0; i < count;) {
        char piece[32];
        size_t last = i, length;

        /* a number that stands there twice is one */
        while (last + 1 < count && numbers[last + 1] - numbers[last] <= 1)
            last++;
        if (numbers[last] == numbers[i])
            snprintf(piece, sizeof piece, "%s%u", used ? "," : "", numbers[i]);
        else
            snprintf(piece, sizeof piece, "%s%u-%u", used ? "," : "", numbers[i], numbers[last]);
        length = strlen(piece);
        if (used + length + 4 >= size) {
            if (used + 3 < size)
                strcpy(text + used, "...");
            break;
        }
        memcpy(text + used, piece, length + 1);
        used += length;
        i = last + 1;
    }
    return text;
}

const char *topo_bytes(char text[32], uint64_t bytes)
{
    if (bytes >= (uint64_t)1 << 30)
        snprintf(text, 32, "%.2f GiB", (double)bytes / (double)((uint64_t)1 << 30));
    else if (bytes >= (uint64_t)1 << 20)
        snprintf(text, 32, "%.2f MiB", (double)bytes / (double)((uint64_t)1 << 20));
    else
        snprintf(text, 32, "%llu bytes", (unsigned long long)bytes);
    return text;
}

void topo_copy_printable(char *to, size_t size, const char *from)
{
    size_t i;

    for (i = 0; i + 1 < size && from[i]; i++)
        to[i] = from[i] >= 0x20 && from[i] < 0x7f ? from[i] : '?';
    to[i] = 0;
}
