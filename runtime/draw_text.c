/*
 * Text of pictures: how wide, where cut, numbers for people.
 *
 * Widths are those of DejaVu Sans and Verdana, which are wider than nearly all other sans-serif
 * fonts: what fits by them fits with whatever a viewer has.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "draw_plan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Thousandths of the font size, from ' ' to '~'. */
static const uint16_t widths[2][95] = {
    {318,  401, 460, 838, 636, 950, 780, 275, 390, 390, 500, 838, 318, 361, 318, 337,
     636,  636, 636, 636, 636, 636, 636, 636, 636, 636, 337, 337, 838, 838, 838, 531,
     1000, 684, 686, 698, 770, 632, 575, 775, 752, 295, 295, 656, 557, 863, 748, 787,
     603,  787, 695, 635, 611, 732, 684, 989, 685, 611, 685, 390, 337, 390, 838, 500,
     500,  613, 635, 550, 635, 615, 352, 635, 634, 278, 278, 579, 278, 974, 634, 612,
     635,  635, 411, 521, 392, 634, 592, 818, 592, 592, 525, 636, 337, 636, 838},
    {348,  456, 521, 838, 696, 1002, 872, 306,  457, 457, 523, 838, 380, 415,  380, 365,
     696,  696, 696, 696, 696, 696,  696, 696,  696, 696, 400, 400, 838, 838,  838, 580,
     1000, 774, 762, 734, 830, 683,  683, 821,  837, 372, 372, 775, 637, 995,  837, 850,
     733,  850, 770, 720, 682, 812,  774, 1103, 771, 724, 725, 457, 365, 457,  838, 500,
     500,  675, 716, 593, 716, 678,  435, 716,  712, 343, 343, 665, 343, 1042, 712, 687,
     716,  716, 493, 595, 478, 712,  652, 924,  645, 652, 582, 712, 365, 712,  838}};

/* Bytes of the character that starts at p; 0 when it is damaged or a control character. */
static size_t character(const unsigned char *p)
{
    size_t more = *p < 0x80 ? 0 : *p < 0xc2 ? 4 : *p < 0xe0 ? 1 : *p < 0xf0 ? 2 : *p < 0xf5 ? 3 : 4;
    uint32_t code = more ? *p & (0x3f >> more) : *p;

    if (more == 4 || *p < 0x20 || *p == 0x7f)
        return 0;
    for (size_t i = 1; i <= more; i++) {
        if ((p[i] & 0xc0) != 0x80)
            return 0;
        code = code << 6 | (p[i] & 0x3f);
    }
    /* Overlong forms, surrogates, past the end, C1 controls, and what XML does not allow. */
    if ((more == 2 && code < 0x800) || (more == 3 && (code < 0x10000 || code > 0x10ffff)) ||
        (code >= 0xd800 && code < 0xe000) || (code >= 0x80 && code < 0xa0) ||
        (code & 0xfffe) == 0xfffe)
        return 0;
    /* Marks that turn the direction of text would show a name as another. */
    if (code == 0x200e || code == 0x200f || (code >= 0x202a && code <= 0x202e) ||
        (code >= 0x2066 && code <= 0x2069))
        return 0;
    return more + 1;
}

static double advance(const char *p, size_t bytes, bool bold)
{
    if (bytes == 1)
        return widths[bold][*p - ' '];
    if (bytes == 2 && !memcmp(p, "\xc2\xb7", 2))
        return bold ? 380 : 318;
    return 1000;
}

double draw_text_width(const char *text, double size, bool bold)
{
    double sum = 0;

    for (const char *p = text; *p;) {
        size_t bytes = character((const unsigned char *)p);

        sum += bytes ? advance(p, bytes, bold) : widths[bold]['?' - ' '];
        p += bytes ? bytes : 1;
    }
    return sum * size / 1000;
}

char *draw_text_fit(const char *text, double size, bool bold, double width)
{
    size_t length = 0, cut = 0;
    char *copy = malloc(strlen(text) + 4);
    double sum = 0, dots = 3.0 * widths[bold]['.' - ' '];

    if (!copy)
        return NULL;
    for (const char *p = text; *p;) {
        size_t bytes = character((const unsigned char *)p);
        const char *from = bytes ? p : "?";

        sum += advance(from, bytes ? bytes : 1, bold);
        if (sum * size / 1000 > width + 0.01) {
            memcpy(copy + cut, "...", 4);
            return copy;
        }
        memcpy(copy + length, from, bytes ? bytes : 1);
        length += bytes ? bytes : 1;
        if ((sum + dots) * size / 1000 <= width)
            cut = length;
        p += bytes ? bytes : 1;
    }
    copy[length] = 0;
    return copy;
}

static int append(char ***lines, uint32_t *count, char *line)
{
    char **more = line ? realloc(*lines, ((size_t)*count + 1) * sizeof *more) : NULL;

    if (!more) {
        free(line);
        return -ENOMEM;
    }
    *lines = more;
    more[(*count)++] = line;
    return 0;
}

int draw_text_wrap(const char *text, double size, double width, uint32_t most, char ***lines,
                   uint32_t *count)
{
    const char *rest = text;

    for (uint32_t made = 1; *rest; made++) {
        const char *end = rest, *next;
        char *line;
        int rc;

        /* As many words as fit; at least one, which is cut if it must be. */
        for (const char *p = rest;; p = next) {
            size_t length = strcspn(p, " ");
            char *part = strndup(rest, (size_t)(p - rest) + length);
            bool fits;

            if (!part)
                return -ENOMEM;
            fits = draw_text_width(part, size, false) <= width;
            free(part);
            if (fits || end == rest)
                end = p + length;
            if (!fits || !p[length])
                break;
            next = p + length + 1;
        }
        line = made == most ? strdup(rest) : strndup(rest, (size_t)(end - rest));
        if (!line)
            return -ENOMEM;
        rc = append(lines, count, draw_text_fit(line, size, false, width));
        free(line);
        if (rc || made == most)
            return rc;
        rest = end + strspn(end, " ");
    }
    return 0;
}

/* Three digits are enough to tell nodes apart, and short enough for a narrow one. */
static void three_digits(char *text, size_t room, double value)
{
    snprintf(text, room, value < 9.995 ? "%.2f" : value < 99.95 ? "%.1f" : "%.0f", value);
}

const char *draw_bytes(char text[32], uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes;
    char digits[24];
    size_t unit = 0;

    while (value >= 1023.5 && unit + 1 < sizeof units / sizeof units[0]) {
        value /= 1024;
        unit++;
    }
    if (unit)
        three_digits(digits, sizeof digits, value);
    else
        snprintf(digits, sizeof digits, "%.0f", value);
    snprintf(text, 32, "%s %s", digits, units[unit]);
    return text;
}

const char *draw_gib(char text[32], uint64_t bytes)
{
    if (!bytes)
        snprintf(text, 32, "0");
    else
        three_digits(text, 32, (double)bytes / (1 << 30));
    return text;
}
