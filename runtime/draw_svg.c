/*
 * A page as SVG: written by hand, because text stays text that way: small, searchable, sharp. What
 * is alike is said once, as a class.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "draw_plan.h"

#include <errno.h>
#include <string.h>

static void escape(FILE *out, const char *text)
{
    for (const char *p = text; *p; p++) {
        switch (*p) {
        case '&':
            fputs("&amp;", out);
            break;
        case '<':
            fputs("&lt;", out);
            break;
        case '>':
            fputs("&gt;", out);
            break;
        case '"':
            fputs("&quot;", out);
            break;
        default:
            fputc(*p, out);
        }
    }
}

/* A tenth of a pixel is all that can be seen; no trailing ".0". Not by printf, whose decimal point
 * is the locale's. */
static void number(FILE *out, const char *before, double value)
{
    long long tenths = (long long)(value * 10 + (value < 0 ? -0.5 : 0.5));
    long long size = tenths < 0 ? -tenths : tenths;

    fprintf(out, "%s%s%lld", before, tenths < 0 ? "-" : "", size / 10);
    if (size % 10)
        fprintf(out, ".%lld", size % 10);
}

static void colour(FILE *out, const char *name, uint32_t value)
{
    if (value == DRAW_NO_PAINT)
        fprintf(out, " %s=\"none\"", name);
    else
        fprintf(out, " %s=\"#%06x\"", name, value);
}

static void stroke(FILE *out, const struct draw_shape *shape)
{
    if (shape->stroke == DRAW_NO_PAINT)
        return;
    colour(out, "stroke", shape->stroke);
    if (shape->width != 1) {
        number(out, " stroke-width=\"", shape->width);
        fputc('"', out);
    }
    if (shape->dashed)
        fputs(" stroke-dasharray=\"5 3\"", out);
}

static void rectangle(FILE *out, const struct draw_shape *shape)
{
    number(out, "<rect x=\"", shape->rect.x);
    number(out, "\" y=\"", shape->rect.y);
    number(out, "\" width=\"", shape->rect.w);
    number(out, "\" height=\"", shape->rect.h);
    if (shape->radius > 0)
        number(out, "\" rx=\"", shape->radius);
    fputc('"', out);
    colour(out, "fill", shape->fill);
    stroke(out, shape);
    fputs("/>\n", out);
}

static void segment(FILE *out, const struct draw_shape *shape)
{
    number(out, "<path d=\"M", shape->rect.x);
    number(out, " ", shape->rect.y);
    number(out, "l", shape->rect.w);
    number(out, " ", shape->rect.h);
    fputc('"', out);
    stroke(out, shape);
    fputs("/>\n", out);
}

static void words(FILE *out, const struct draw_shape *shape)
{
    number(out, "<text x=\"", shape->rect.x);
    number(out, "\" y=\"", shape->rect.y);
    number(out, "\" font-size=\"", shape->size);
    fputc('"', out);
    if (shape->bold)
        fputs(" font-weight=\"bold\"", out);
    if (shape->anchor != DRAW_LEFT)
        fprintf(out, " text-anchor=\"%s\"", shape->anchor == DRAW_RIGHT ? "end" : "middle");
    colour(out, "fill", shape->fill);
    fputc('>', out);
    escape(out, shape->text);
    fputs("</text>\n", out);
}

int draw_svg(const struct draw_page *page, FILE *out, struct numoe_error *error)
{
    number(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", page->width);
    number(out, "\" height=\"", page->height);
    number(out, "\" viewBox=\"0 0 ", page->width);
    number(out, " ", page->height);
    fputs("\" font-family=\"'DejaVu Sans', Verdana, Geneva, sans-serif\">\n<title>", out);
    escape(out, page->title);
    fputs("</title>\n", out);
    for (uint32_t i = 0; i < page->shape_count; i++) {
        const struct draw_shape *shape = &page->shapes[i];

        switch (shape->kind) {
        case DRAW_SHAPE_RECT:
            rectangle(out, shape);
            break;
        case DRAW_SHAPE_LINE:
            segment(out, shape);
            break;
        case DRAW_SHAPE_TEXT:
            words(out, shape);
            break;
        }
    }
    fputs("</svg>\n", out);
    errno = 0;
    if (fflush(out) || ferror(out)) {
        int code = errno ? errno : EIO;

        return numoe_error_set(error, -code, "picture", "could not be written: %s", strerror(code));
    }
    return 0;
}
