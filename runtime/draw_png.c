/* A page as PNG, by cairo where it is there. SPDX-License-Identifier: Apache-2.0 */
#include "draw_plan.h"

#include <errno.h>
#include <string.h>

#ifdef NUMOE_HAVE_CAIRO
#include <cairo.h>

/* cairo's images are at most 32767 pixels high. */
static const double most_pixels = 32000;

static void paint(cairo_t *cairo, uint32_t colour)
{
    cairo_set_source_rgb(cairo, (colour >> 16 & 0xff) / 255.0, (colour >> 8 & 0xff) / 255.0,
                         (colour & 0xff) / 255.0);
}

static void stroke(cairo_t *cairo, const struct draw_shape *shape)
{
    static const double dashes[] = {5, 3};

    paint(cairo, shape->stroke);
    cairo_set_line_width(cairo, shape->width);
    cairo_set_dash(cairo, dashes, shape->dashed ? 2 : 0, 0);
    cairo_stroke(cairo);
}

static void rectangle(cairo_t *cairo, const struct draw_shape *shape)
{
    const struct draw_rect *r = &shape->rect;
    const double quarter = 1.5707963267948966, radius = shape->radius;

    if (radius > 0) {
        cairo_new_sub_path(cairo);
        cairo_arc(cairo, r->x + r->w - radius, r->y + radius, radius, -quarter, 0);
        cairo_arc(cairo, r->x + r->w - radius, r->y + r->h - radius, radius, 0, quarter);
        cairo_arc(cairo, r->x + radius, r->y + r->h - radius, radius, quarter, 2 * quarter);
        cairo_arc(cairo, r->x + radius, r->y + radius, radius, 2 * quarter, 3 * quarter);
        cairo_close_path(cairo);
    } else {
        cairo_rectangle(cairo, r->x, r->y, r->w, r->h);
    }
    if (shape->fill != DRAW_NO_PAINT) {
        paint(cairo, shape->fill);
        cairo_fill_preserve(cairo);
    }
    if (shape->stroke != DRAW_NO_PAINT)
        stroke(cairo, shape);
    cairo_new_path(cairo);
}

static void segment(cairo_t *cairo, const struct draw_shape *shape)
{
    cairo_move_to(cairo, shape->rect.x, shape->rect.y);
    cairo_rel_line_to(cairo, shape->rect.w, shape->rect.h);
    stroke(cairo, shape);
}

/* Whatever font the system has for sans: wider than the layout thought, it is pressed together. */
static void words(cairo_t *cairo, const struct draw_shape *shape)
{
    cairo_text_extents_t extents;
    double squeeze, shift;

    cairo_select_font_face(cairo, "sans-serif", CAIRO_FONT_SLANT_NORMAL,
                           shape->bold ? CAIRO_FONT_WEIGHT_BOLD : CAIRO_FONT_WEIGHT_NORMAL);
    cairo_set_font_size(cairo, shape->size);
    cairo_text_extents(cairo, shape->text, &extents);
    squeeze = extents.x_advance > shape->rect.w ? shape->rect.w / extents.x_advance : 1;
    shift = extents.x_advance * squeeze *
            (shape->anchor == DRAW_RIGHT    ? 1
             : shape->anchor == DRAW_MIDDLE ? 0.5
                                            : 0);
    paint(cairo, shape->fill);
    cairo_save(cairo);
    cairo_translate(cairo, shape->rect.x - shift, shape->rect.y);
    cairo_scale(cairo, squeeze, 1);
    cairo_move_to(cairo, 0, 0);
    cairo_show_text(cairo, shape->text);
    cairo_restore(cairo);
}

static cairo_status_t write_bytes(void *closure, const unsigned char *bytes, unsigned length)
{
    return fwrite(bytes, 1, length, closure) == length ? CAIRO_STATUS_SUCCESS
                                                       : CAIRO_STATUS_WRITE_ERROR;
}

bool draw_png_available(void)
{
    return true;
}

int draw_png(const struct draw_page *page, FILE *out, struct numoe_error *error)
{
    double scale = page->height > most_pixels ? most_pixels / page->height : 1;
    cairo_surface_t *surface = cairo_image_surface_create(
        CAIRO_FORMAT_RGB24, (int)(page->width * scale), (int)(page->height * scale));
    cairo_t *cairo = cairo_create(surface);
    cairo_font_options_t *font = cairo_font_options_create();
    cairo_status_t status;
    int code = 0;

    cairo_font_options_set_antialias(font, CAIRO_ANTIALIAS_GRAY);
    cairo_font_options_set_hint_style(font, CAIRO_HINT_STYLE_SLIGHT);
    cairo_font_options_set_hint_metrics(font, CAIRO_HINT_METRICS_OFF);
    cairo_set_font_options(cairo, font);
    cairo_font_options_destroy(font);
    cairo_scale(cairo, scale, scale);
    for (uint32_t i = 0; i < page->shape_count; i++) {
        const struct draw_shape *shape = &page->shapes[i];

        switch (shape->kind) {
        case DRAW_SHAPE_RECT:
            rectangle(cairo, shape);
            break;
        case DRAW_SHAPE_LINE:
            segment(cairo, shape);
            break;
        case DRAW_SHAPE_TEXT:
            words(cairo, shape);
            break;
        }
    }
    status = cairo_status(cairo);
    cairo_destroy(cairo);
    errno = 0;
    if (status == CAIRO_STATUS_SUCCESS)
        status = cairo_surface_write_to_png_stream(surface, write_bytes, out);
    if (status == CAIRO_STATUS_SUCCESS && (fflush(out) || ferror(out)))
        status = CAIRO_STATUS_WRITE_ERROR;
    if (status == CAIRO_STATUS_NO_MEMORY)
        code = numoe_error_set(error, -ENOMEM, "picture", "out of memory");
    else if (status == CAIRO_STATUS_WRITE_ERROR)
        code = numoe_error_set(error, errno ? -errno : -EIO, "picture", "could not be written: %s",
                               strerror(errno ? errno : EIO));
    else if (status != CAIRO_STATUS_SUCCESS)
        code = numoe_error_set(error, -EIO, "picture", "cairo could not draw it: %s",
                               cairo_status_to_string(status));
    cairo_surface_destroy(surface);
    return code;
}

#else

bool draw_png_available(void)
{
    return false;
}

int draw_png(const struct draw_page *page, FILE *out, struct numoe_error *error)
{
    (void)page;
    (void)out;
    return numoe_error_set(error, -ENOTSUP, "picture",
                           "this numoe was built without cairo, which PNG needs; SVG does not");
}

#endif
