/*
 * The marks of a picture: what each box of the layout looks like.
 *
 * Colours are Okabe and Ito's, which people with any colour vision tell apart; shapes and words
 * repeat what colours say.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "draw_plan.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum {
    INK = 0x16202a,
    GREY = 0x55626f,
    LINE = 0x8a97a3,
    PAPER = 0xffffff,
    PACKAGE_FILL = 0xe9eef3,
    PACKAGE_LINE = 0xa9b6c2,
    GROUP_FILL = 0xf7f9fb,
    APART_FILL = 0xf4f1ea,
    USED = 0x6b7680,
    EXPERTS = 0x0072b2,
    KEPT = 0xe69f00,
    LEFT = 0xd3e3ee,
    WORKER = 0x00795a, /* their green, darker: white numbers stand on it */
    FORBIDDEN = 0xc9cfd5,
    FAR = 0xd55e00,
    GPU_FILL = 0xf6e3ee,
    GPU_LINE = 0xb8578f,
    DRIVE_FILL = 0xfdebd9,
    DRIVE_LINE = 0xd55e00
};

static struct draw_shape *append(struct draw_page *page, enum draw_shape_kind kind,
                                 struct draw_rect rect)
{
    static struct draw_shape lost;
    struct draw_shape *shape = &lost;

    if (page->shape_count == page->shape_room) {
        uint32_t room = page->shape_room ? page->shape_room * 2 : 512;
        struct draw_shape *more = realloc(page->shapes, room * sizeof *more);

        if (more) {
            page->shapes = more;
            page->shape_room = room;
        }
    }
    if (page->shape_count < page->shape_room)
        shape = &page->shapes[page->shape_count++];
    else
        page->failed = true;
    *shape = (struct draw_shape){
        .kind = kind, .rect = rect, .fill = DRAW_NO_PAINT, .stroke = DRAW_NO_PAINT, .width = 1};
    return shape;
}

static struct draw_shape *box(struct draw_page *page, struct draw_rect rect, uint32_t fill,
                              uint32_t stroke, double radius)
{
    struct draw_shape *shape = append(page, DRAW_SHAPE_RECT, rect);

    shape->fill = fill;
    shape->stroke = stroke;
    shape->radius = radius;
    return shape;
}

static struct draw_shape *line(struct draw_page *page, double x, double y, double dx, double dy,
                               uint32_t stroke, double width)
{
    struct draw_shape *shape = append(page, DRAW_SHAPE_LINE, (struct draw_rect){x, y, dx, dy});

    shape->stroke = stroke;
    shape->width = width;
    return shape;
}

/* Text that begins, or with DRAW_RIGHT ends, at x and takes at most width. Returns its width. */
static double text(struct draw_page *page, double x, double y, double width, double size, bool bold,
                   enum draw_anchor anchor, uint32_t ink, const char *words)
{
    struct draw_shape *shape;
    char *fit;
    double wide;

    if (!*words)
        return 0;
    fit = draw_text_fit(words, size, bold, width);
    if (!fit) {
        page->failed = true;
        return 0;
    }
    wide = draw_text_width(fit, size, bold);
    shape = append(page, DRAW_SHAPE_TEXT, (struct draw_rect){x, y, wide, size});
    shape->fill = ink;
    shape->size = size;
    shape->bold = bold;
    shape->anchor = anchor;
    if (page->failed)
        free(fit);
    else
        shape->text = fit;
    return wide;
}

/* ---- signs ---------------------------------------------------------------------------------- */

static void bar(struct draw_page *page, struct draw_rect rect, const struct draw_memory *memory)
{
    const uint64_t parts[] = {memory->used, memory->experts, memory->kept, memory->left};
    static const uint32_t colours[] = {USED, EXPERTS, KEPT, LEFT};
    double at = rect.x, scale = memory->capacity ? rect.w / (double)memory->capacity : 0;

    for (int i = 0; i < 4; i++) {
        double width = (double)parts[i] * scale;

        if (at + width > rect.x + rect.w)
            width = rect.x + rect.w - at;
        if (width > 0)
            box(page, (struct draw_rect){at, rect.y, width, rect.h}, colours[i], DRAW_NO_PAINT, 0);
        at += width;
    }
    box(page, rect, DRAW_NO_PAINT, LINE, 0);
}

enum pu_look { PU_WORKER, PU_IDLE, PU_FORBIDDEN };

static void pu_sign(struct draw_page *page, struct draw_rect rect, enum pu_look look, bool far)
{
    box(page, rect,
        look == PU_WORKER ? WORKER
        : look == PU_IDLE ? PAPER
                          : FORBIDDEN,
        LINE, 0)
        ->width = rect.w < 6 ? 0.5 : 0.8;
    if (look == PU_FORBIDDEN)
        line(page, rect.x, rect.y + rect.h, rect.w, -rect.h, USED, 0.8);
    if (far)
        line(page, rect.x, rect.y + rect.h - 1, rect.w, 0, FAR, 2);
}

static void legend(struct draw_page *page, const struct draw_layout *layout,
                   const struct draw_box *from)
{
    struct draw_rect r = {from->rect.x, from->rect.y + 4, 14, 12};
    enum draw_legend item = (enum draw_legend)from->subject;
    char words[128];

    switch (item) {
    case DRAW_LEGEND_USED:
        box(page, r, USED, LINE, 0);
        break;
    case DRAW_LEGEND_EXPERTS:
        box(page, r, EXPERTS, LINE, 0);
        break;
    case DRAW_LEGEND_KEPT:
        box(page, r, KEPT, LINE, 0);
        break;
    case DRAW_LEGEND_LEFT:
        box(page, r, LEFT, LINE, 0);
        break;
    case DRAW_LEGEND_WORKER:
        pu_sign(page, r, PU_WORKER, false);
        break;
    case DRAW_LEGEND_IDLE:
        pu_sign(page, r, PU_IDLE, false);
        break;
    case DRAW_LEGEND_FORBIDDEN:
        pu_sign(page, r, PU_FORBIDDEN, false);
        break;
    case DRAW_LEGEND_FAR:
        pu_sign(page, r, PU_IDLE, true);
        break;
    case DRAW_LEGEND_SLOW:
        pu_sign(page, (struct draw_rect){r.x, r.y + 5, 14, 7}, PU_IDLE, false);
        break;
    case DRAW_LEGEND_GPU:
        box(page, r, GPU_FILL, GPU_LINE, 3)->width = 1.5;
        break;
    case DRAW_LEGEND_DRIVE:
        box(page, r, DRIVE_FILL, DRIVE_LINE, 3)->width = 1.5;
        break;
    case DRAW_LEGEND_COUNT:
        return;
    }
    draw_legend_text(layout, item, words, sizeof words);
    text(page, from->rect.x + 22, from->rect.y + 14.5, from->rect.w - 22, 12, false, DRAW_LEFT, INK,
         words);
}

void draw_legend_text(const struct draw_layout *layout, enum draw_legend item, char *words,
                      size_t size)
{
    struct draw_memory all = draw_total_memory(layout);
    char bytes[32];

    switch (item) {
    case DRAW_LEGEND_USED:
        snprintf(words, size, "in use before: %s", draw_bytes(bytes, all.used));
        return;
    case DRAW_LEGEND_EXPERTS:
        snprintf(words, size, "experts: %s", draw_bytes(bytes, all.experts));
        return;
    case DRAW_LEGEND_KEPT:
        snprintf(words, size, "kept free: %s", draw_bytes(bytes, all.kept));
        return;
    case DRAW_LEGEND_LEFT:
        snprintf(words, size, "left: %s (numbers in nodes are GiB)", draw_bytes(bytes, all.left));
        return;
    case DRAW_LEGEND_WORKER:
        snprintf(words, size, "CPU with a worker%s",
                 layout->pu_labels ? ", by its number in the system" : "");
        return;
    case DRAW_LEGEND_IDLE:
        snprintf(words, size, "CPU without one%s",
                 layout->pu_columns > 1 ? "; boxes that touch are threads of one core" : "");
        return;
    case DRAW_LEGEND_FORBIDDEN:
        snprintf(words, size, "CPU that may not be used");
        return;
    case DRAW_LEGEND_FAR:
        snprintf(words, size, "CPU that another node's memory serves");
        return;
    case DRAW_LEGEND_SLOW:
        snprintf(words, size, "slower core");
        return;
    case DRAW_LEGEND_GPU:
        snprintf(words, size, "GPU%s",
                 layout->subject->plan->shape.layers ? ", with the time that all experts take "
                                                       "over its link"
                                                     : "");
        return;
    case DRAW_LEGEND_DRIVE:
        snprintf(words, size, "drive%s",
                 layout->subject->plan->shape.layers && !layout->legend[DRAW_LEGEND_GPU]
                     ? ", with the time that all experts take over its link"
                     : "");
        return;
    case DRAW_LEGEND_COUNT:
        break;
    }
    *words = 0;
}

/* ---- places --------------------------------------------------------------------------------- */

/* Smallest and largest of some numbers; most is 0 when there are none. */
struct span {
    uint32_t least, most;
};

enum pair { SAME_GROUP, SAME_SLOT, OTHER_SLOT };

static void pair_up(struct span *span, const struct draw_layout *layout, uint32_t a, uint32_t b)
{
    uint32_t distance = numoe_machine_distance(layout->subject->machine, a, b);

    if (!span->least || distance < span->least)
        span->least = distance;
    if (distance > span->most)
        span->most = distance;
}

/* Distances between nodes of groups [first, last), of one group or of different ones. */
static struct span distances(const struct draw_layout *layout, uint32_t first, uint32_t last,
                             enum pair pair)
{
    const struct draw_group *groups = layout->groups;
    struct span span = {0, 0};

    if (!layout->subject->machine->distances)
        return span;
    for (uint32_t g = first; g < last; g++) {
        for (uint32_t h = first; h < last; h++) {
            bool same = groups[g].slot == groups[h].slot;

            if (groups[g].apart || groups[h].apart || (g == h) != (pair == SAME_GROUP) ||
                same != (pair != OTHER_SLOT))
                continue;
            for (uint32_t i = 0; i < groups[g].count; i++)
                for (uint32_t j = 0; j < groups[h].count; j++)
                    if (g != h || i != j)
                        pair_up(&span, layout, layout->order[groups[g].first + i],
                                layout->order[groups[h].first + j]);
        }
    }
    return span;
}

static void span_text(char *words, size_t size, const char *before, struct span span)
{
    if (!span.most)
        *words = 0;
    else if (span.least == span.most)
        snprintf(words, size, "%s %u", before, span.most);
    else
        snprintf(words, size, "%s %u to %u", before, span.least, span.most);
}

static void titled(struct draw_page *page, struct draw_rect r, double baseline, double pad,
                   double size, const char *left, const char *right)
{
    double used =
        text(page, r.x + pad, r.y + baseline, r.w - 2 * pad, size, true, DRAW_LEFT, INK, left);

    if (r.w - 2 * pad - used > 60)
        text(page, r.x + r.w - pad, r.y + baseline, r.w - 2 * pad - used - 12, size - 2, false,
             DRAW_RIGHT, GREY, right);
}

static void package(struct draw_page *page, const struct draw_layout *layout,
                    const struct draw_box *from)
{
    const struct draw_slot *slot = &layout->slots[from->subject];
    char title[64], right[64];

    box(page, from->rect, PACKAGE_FILL, PACKAGE_LINE, 6);
    if (slot->package != NUMOE_NONE)
        snprintf(title, sizeof title, "Package %u", slot->package);
    else
        snprintf(title, sizeof title, "%s",
                 layout->slot_count > 1                    ? "Outside of packages"
                 : layout->subject->machine->package_count ? "Memory across packages"
                                                           : "Machine (no packages are known)");
    span_text(right, sizeof right,
              layout->flat ? "distance between nodes" : "distance between domains",
              distances(layout, slot->first, slot->first + slot->count, SAME_SLOT));
    titled(page, from->rect, 20, 12, 15, title, right);
}

static void group(struct draw_page *page, const struct draw_layout *layout,
                  const struct draw_box *from)
{
    const struct draw_group *group = &layout->groups[from->subject];
    char title[64], right[64];

    if (group->apart) {
        box(page, from->rect, APART_FILL, LINE, 5)->dashed = true;
        titled(page, from->rect, 15, 8, 12,
               from->rect.w > 200 ? "Memory without CPUs of its own" : "Without CPUs", "");
        return;
    }
    if (layout->flat)
        return;
    box(page, from->rect, GROUP_FILL, LINE, 5);
    snprintf(title, sizeof title, from->rect.w < 260 ? "Domain %u" : "Memory domain %u",
             group->domain);
    span_text(right, sizeof right, from->rect.w < 260 ? "distance" : "distance within",
              distances(layout, from->subject, from->subject + 1, SAME_GROUP));
    titled(page, from->rect, 15, 8, 12, title, right);
}

static void node_head(struct draw_page *page, const struct draw_layout *layout,
                      const struct draw_box *from)
{
    static const char *const kinds[] = {"DRAM", "HBM", "slow", "GPU memory"};
    const struct numoe_node *node = &layout->subject->machine->nodes[from->subject];
    const struct numoe_plan_node *place = NULL;
    struct draw_rect r = from->rect;
    char words[96], bytes[32];
    double used;
    int length;

    if (layout->plan_node[from->subject] != NUMOE_NONE)
        place = &layout->subject->plan->nodes[layout->plan_node[from->subject]];
    snprintf(words, sizeof words, "Node %u", node->os_index);
    used = text(page, r.x, r.y + 13, r.w, 13, true, DRAW_LEFT, INK, words);
    text(page, r.x + r.w, r.y + 13, r.w - used - 6, 11, false, DRAW_RIGHT, INK,
         node->capacity_bytes ? draw_bytes(bytes, node->capacity_bytes) : "no memory");

    used = 0;
    if (place) {
        snprintf(words, sizeof words, "%s%.*f %%", layout->flat && r.w < 200 ? "" : "share ",
                 place->weight < 0.0995 ? 2 : 1, place->weight * 100);
        used = text(page, r.x + r.w, r.y + 28, r.w, layout->detail_size, false, DRAW_RIGHT, GREY,
                    words) +
               6;
    }
    length = snprintf(words, sizeof words, "%s", kinds[node->kind]);
    if (layout->flat || !node->pu_count)
        length += snprintf(words + length, sizeof words - length, ", domain %u", node->domain);
    if (node->bandwidth_mbs)
        snprintf(words + length, sizeof words - length, ", %.3g GB/s",
                 (double)node->bandwidth_mbs / 1000);
    text(page, r.x, r.y + 28, r.w - used, layout->detail_size, false, DRAW_LEFT, GREY, words);
}

static void numbers(struct draw_page *page, const struct draw_layout *layout,
                    const struct draw_box *from)
{
    static const char *const names[] = {"experts", "kept", "left", "used"};
    static const uint32_t colours[] = {EXPERTS, KEPT, LEFT, USED};
    struct draw_memory memory = draw_node_memory(layout, from->subject);
    const uint64_t parts[] = {memory.experts, memory.kept, memory.left, memory.used};
    uint32_t columns = layout->number_columns;
    double wide = from->rect.w / columns;

    for (uint32_t i = 0; i < (layout->legend[DRAW_LEGEND_USED] ? 4 : 3); i++) {
        uint32_t row = i / columns, column = i % columns;
        double x = from->rect.x + column * wide, y = from->rect.y + row * 15.0, room = wide;
        char words[64], gib[32];

        /* Of two columns the first has the longer words. */
        if (columns == 2) {
            x = column ? from->rect.x + 0.56 * from->rect.w : from->rect.x;
            room = (column ? 0.44 : 0.56) * from->rect.w;
        }
        box(page, (struct draw_rect){x, y + 4, 7, 7}, colours[i], LINE, 0)->width = 0.5;
        snprintf(words, sizeof words, "%s %s", draw_gib(gib, parts[i]), names[i]);
        text(page, x + 11, y + 11.5, room - 11, layout->detail_size, false, DRAW_LEFT, INK, words);
    }
}

static void reason(struct draw_page *page, const struct draw_layout *layout,
                   const struct draw_box *from)
{
    const struct numoe_node *node = &layout->subject->machine->nodes[from->subject];
    char words[64];

    if (!node->allowed)
        snprintf(words, sizeof words, "not allowed");
    else if (node->kind == NUMOE_NODE_GPU)
        snprintf(words, sizeof words, "a GPU's: not used");
    else if (!node->capacity_bytes)
        snprintf(words, sizeof words, "empty");
    else if (node->beside != NUMOE_NONE)
        snprintf(words, sizeof words, "beside node %u, not used",
                 layout->subject->machine->nodes[node->beside].os_index);
    else
        snprintf(words, sizeof words, node->pu_count ? "not chosen" : "not used");
    text(page, from->rect.x, from->rect.y + 12, from->rect.w, layout->detail_size, false, DRAW_LEFT,
         INK, words);
}

/* Packages of a node's CPUs, when they are not the one that the node is drawn in. */
static bool other_packages(const struct draw_layout *layout, uint32_t node, struct span *span)
{
    const struct numoe_machine *machine = layout->subject->machine;
    bool found = false;

    for (uint32_t i = layout->pu_first[node]; i < layout->pu_first[node + 1]; i++) {
        uint32_t of = machine->pus[layout->pu_order[i]].package;

        if (of == NUMOE_NONE)
            continue;
        span->least = i == layout->pu_first[node] || of < span->least ? of : span->least;
        span->most = i == layout->pu_first[node] || of > span->most ? of : span->most;
        found |= of != machine->nodes[node].package;
    }
    return found;
}

static void node_foot(struct draw_page *page, const struct draw_layout *layout,
                      const struct draw_box *from)
{
    const struct numoe_plan_node *place =
        &layout->subject->plan->nodes[layout->plan_node[from->subject]];
    struct span packages = {0, 0};
    struct draw_rect r = from->rect;
    char words[96];
    double used;

    if (!place->worker_count)
        snprintf(words, sizeof words, "no workers");
    else if (place->worker_count == 1)
        snprintf(words, sizeof words, "worker %u", place->first_worker);
    else
        snprintf(words, sizeof words, "workers %u-%u", place->first_worker,
                 place->first_worker + place->worker_count - 1);
    used = text(page, r.x, r.y + 12, r.w, layout->detail_size, false, DRAW_LEFT, INK, words);
    if (other_packages(layout, from->subject, &packages))
        snprintf(words, sizeof words, "%s %u-%u", r.w < 220 ? "pkg" : "packages", packages.least,
                 packages.most);
    else
        snprintf(words, sizeof words, "%u lane%s", place->lanes, place->lanes == 1 ? "" : "s");
    if (r.w - used > draw_text_width(words, layout->detail_size, false) + 6)
        text(page, r.x + r.w, r.y + 12, r.w - used, layout->detail_size, false, DRAW_RIGHT, GREY,
             words);
}

static void pu(struct draw_page *page, const struct draw_layout *layout,
               const struct draw_box *from)
{
    const struct numoe_pu *of = &layout->subject->machine->pus[from->subject];
    bool works = layout->worker[from->subject] != NUMOE_NONE;
    struct draw_rect r = from->rect;
    char words[16];

    if (of->efficiency < layout->best_efficiency) {
        r.y += r.h * 0.35;
        r.h *= 0.65;
    }
    pu_sign(page, r, works ? PU_WORKER : of->allowed ? PU_IDLE : PU_FORBIDDEN, !of->node_is_near);
    if (!layout->pu_labels)
        return;
    snprintf(words, sizeof words, "%u", of->os_index);
    text(page, r.x + r.w / 2, r.y + r.h / 2 + 3.3, r.w, 9, false, DRAW_MIDDLE, works ? PAPER : GREY,
         words);
}

/* A time for people. */
static void seconds(char *words, size_t size, double value)
{
    if (value < 1)
        snprintf(words, size, "%.0f ms", value * 1000);
    else if (value < 120)
        snprintf(words, size, "%.*f s", value < 9.95 ? 1 : 0, value);
    else
        snprintf(words, size, "%.0f min", value / 60);
}

static void device(struct draw_page *page, const struct draw_layout *layout,
                   const struct draw_box *from)
{
    const struct numoe_machine *machine = layout->subject->machine;
    const struct numoe_device *of = &machine->devices[from->subject];
    const struct draw_rect *strip = &layout->boxes[from->parent].rect;
    uint32_t stroke = of->gpu ? GPU_LINE : DRIVE_LINE;
    double all = (double)draw_total_memory(layout).experts, stub = from->rect.x + 18;
    struct draw_rect r = from->rect;
    char words[128], bytes[32], time[32];
    int length = 0;

    line(page, stub, strip->y + 7, 0, r.y - strip->y - 7, stroke, 3);
    if (of->link_gbs > 0)
        snprintf(words, sizeof words, "link %.1f GB/s", of->link_gbs);
    else
        snprintf(words, sizeof words, "link not known");
    text(page, stub + 8, r.y - 5, r.w - 26, 10.5, false, DRAW_LEFT, INK, words);

    box(page, r, of->gpu ? GPU_FILL : DRIVE_FILL, stroke, 5)->width = 1.5;
    length = snprintf(words, sizeof words, "%s %s", of->gpu ? "GPU" : "drive", of->name);
    if (of->node_count == 1 && !layout->flat)
        snprintf(words + length, sizeof words - length, " at node %u",
                 machine->nodes[of->nodes[0]].os_index);
    text(page, r.x + 8, r.y + 15, r.w - 16, 11, true, DRAW_LEFT, INK, words);

    length = 0;
    *words = 0;
    if (of->memory_bytes)
        length = snprintf(words, sizeof words, "%s", draw_bytes(bytes, of->memory_bytes));
    if (of->link_gbs > 0 && all > 0) {
        seconds(time, sizeof time, all / (of->link_gbs * 1e9));
        snprintf(words + length, sizeof words - length, "%sall experts %s", length ? ", " : "",
                 time);
    }
    text(page, r.x + 8, r.y + 30, r.w - 16, 10, false, DRAW_LEFT, GREY,
         *words ? words : "memory not known");
}

/* "1 node", "2 nodes" */
static const char *counted(char words[48], uint32_t count, const char *what)
{
    snprintf(words, 48, "%u %s%s", count, what, count == 1 ? "" : "s");
    return words;
}

/* Of a path the last part: where somebody keeps files is nobody else's business. */
static const char *file_name(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash && slash[1] ? slash + 1 : path;
}

static void header(struct draw_page *page, const struct draw_layout *layout,
                   const struct draw_box *from)
{
    static const char between[] = "  \xc2\xb7  ";
    const struct draw_subject *subject = layout->subject;
    const struct numoe_machine *machine = subject->machine;
    struct draw_rect r = from->rect;
    struct draw_memory all = draw_total_memory(layout);
    char words[1024], bytes[2][32], span[64], counts[5][48], model[sizeof machine->cpu_model];
    size_t length = 0;

    /* Some CPUs' names are padded with spaces. */
    for (const char *p = machine->cpu_model; *p; p++)
        if (*p != ' ' || (length && model[length - 1] != ' '))
            model[length++] = *p;
    model[length] = 0;

    snprintf(words, sizeof words, "numoe plan: %s", subject->title);
    text(page, r.x, r.y + 24, r.w, 24, true, DRAW_LEFT, INK, words);
    text(page, r.x, r.y + 45, r.w, 13, false, DRAW_LEFT, INK, subject->detail);
    span_text(span, sizeof span, ", distance between packages",
              distances(layout, 0, layout->group_count, OTHER_SLOT));
    /* The source last: it may be long. */
    snprintf(words, sizeof words, "%s, %s, %s, %s, %s%s%s%s%s%s",
             counted(counts[0], machine->package_count, "package"),
             counted(counts[1], machine->domain_count, "domain"),
             counted(counts[2], machine->node_count, "node"),
             counted(counts[3], machine->core_count, "core"),
             counted(counts[4], machine->pu_count, "CPU"), span, *model ? between : "", model,
             between, machine->live ? "this machine" : file_name(machine->source));
    text(page, r.x, r.y + 64, r.w, 13, false, DRAW_LEFT, INK, words);
    snprintf(words, sizeof words, "Experts take %s of the %s of %s; %s",
             draw_bytes(bytes[0], all.experts), draw_bytes(bytes[1], all.capacity),
             counted(counts[0], subject->plan->node_count, "node"),
             counted(counts[1], subject->plan->worker_count, "worker"));
    text(page, r.x, r.y + 86, r.w, 14, true, DRAW_LEFT, INK, words);
}

/* "1597", "66.5": four digits. */
static void rate(char *words, size_t size, double tokens_per_s)
{
    snprintf(words, size, "%.*f tokens/s",
             tokens_per_s < 10     ? 3
             : tokens_per_s < 100  ? 2
             : tokens_per_s < 1000 ? 1
                                   : 0,
             tokens_per_s);
}

/* One size of one way: how fast, and what sets that. */
static void cell(struct draw_page *page, const struct draw_layout *layout, uint32_t index, double x,
                 double baseline, double first, double second)
{
    const struct numoe_prediction_cell *of;
    char words[224];

    if (index == NUMOE_NONE)
        return;
    of = &layout->subject->prediction->cells[index];
    if (!of->possible) {
        snprintf(words, sizeof words, "not possible: %s", of->why);
        text(page, x, baseline, first + second - 12, 11, false, DRAW_LEFT, GREY, words);
        return;
    }
    rate(words, sizeof words, of->tokens_per_s);
    text(page, x, baseline, first - 8, 11.5, true, DRAW_LEFT, INK, words);
    text(page, x + first, baseline, second - 12, 11, false, DRAW_LEFT, GREY, of->why);
}

/* The figures that predictions rest on, and which of them nobody measured or gave. */
static void figures(struct draw_page *page, const struct draw_layout *layout, struct draw_rect r)
{
    const struct numoe_prediction *prediction = layout->subject->prediction;
    char words[768] = "";
    size_t length = 0;

    for (uint32_t i = 0; i < prediction->figure_count && length < sizeof words; i++) {
        const struct numoe_prediction_figure *f = &prediction->figures[i];

        length += (size_t)snprintf(words + length, sizeof words - length, "%s%s %.4g %s%s",
                                   i ? ", " : "from ", f->name, f->value, f->unit,
                                   f->assumed ? " (assumed)" : "");
    }
    text(page, r.x, r.y + 13, r.w, 11, false, DRAW_LEFT, GREY, words);
}

static void speed(struct draw_page *page, const struct draw_layout *layout,
                  const struct draw_box *from)
{
    static const char *const ways[NUMOE_WAYS] = {
        [NUMOE_WAY_CPU] = "CPUs",
        [NUMOE_WAY_STREAM_ONE] = "one GPU, weights copied",
        [NUMOE_WAY_STREAM] = "all GPUs, weights copied",
        [NUMOE_WAY_CACHE] = "GPUs keeping what fits",
        [NUMOE_WAY_SHARED] = "CPUs and GPUs together",
    };
    bool one = layout->few_tokens == layout->many_tokens;
    struct draw_rect r = from->rect;
    /* the bound of many tokens has the longer words */
    double label = 172, first = 122, few = (r.w - label) * (one ? 1 : 0.45);
    const struct draw_speed *of;
    char words[64];

    if (!from->subject) {
        text(page, r.x, r.y + 13, label - 8, 12, true, DRAW_LEFT, INK, "Predicted");
        snprintf(words, sizeof words, "%u token%s a pass", layout->few_tokens,
                 layout->few_tokens == 1 ? "" : "s");
        text(page, r.x + label, r.y + 13, few - 12, 12, true, DRAW_LEFT, INK, words);
        snprintf(words, sizeof words, "%u tokens a pass", layout->many_tokens);
        if (!one)
            text(page, r.x + label + few, r.y + 13, r.w - label - few, 12, true, DRAW_LEFT, INK,
                 words);
        return;
    }
    if (from->subject > layout->speed_count) {
        figures(page, layout, r);
        return;
    }
    of = &layout->speeds[from->subject - 1];
    text(page, r.x, r.y + 13, label - 8, 11.5, false, DRAW_LEFT, INK, ways[of->way]);
    cell(page, layout, of->few, r.x + label, r.y + 13, first, few - first);
    if (!one)
        cell(page, layout, of->many, r.x + label + few, r.y + 13, first, r.w - label - few - first);
}

static void paint(struct draw_page *page, const struct draw_layout *layout,
                  const struct draw_box *from)
{
    struct draw_memory memory;
    struct draw_rect r = from->rect;
    bool planned, apart;
    char words[64];

    switch (from->kind) {
    case DRAW_CANVAS:
        box(page, r, PAPER, DRAW_NO_PAINT, 0);
        break;
    case DRAW_HEADER:
        header(page, layout, from);
        break;
    case DRAW_TOTAL_BAR:
        memory = draw_total_memory(layout);
        bar(page, r, &memory);
        break;
    case DRAW_LEGEND:
        legend(page, layout, from);
        break;
    case DRAW_SPEEDS:
        box(page, r, PAPER, PACKAGE_LINE, 6);
        break;
    case DRAW_SPEED:
        speed(page, layout, from);
        break;
    case DRAW_PACKAGE:
        package(page, layout, from);
        break;
    case DRAW_GROUP:
        group(page, layout, from);
        break;
    case DRAW_NODE:
        planned = layout->plan_node[from->subject] != NUMOE_NONE;
        apart = layout->groups[layout->boxes[from->parent].subject].apart;
        box(page, r, planned ? PAPER : PACKAGE_FILL, LINE, 4)->dashed = !planned || apart;
        break;
    case DRAW_NODE_HEAD:
        node_head(page, layout, from);
        break;
    case DRAW_BAR:
        memory = draw_node_memory(layout, from->subject);
        bar(page, r, &memory);
        break;
    case DRAW_NUMBERS:
        numbers(page, layout, from);
        break;
    case DRAW_REASON:
        reason(page, layout, from);
        break;
    case DRAW_NODE_FOOT:
        node_foot(page, layout, from);
        break;
    case DRAW_CORE:
        break;
    case DRAW_PU:
        pu(page, layout, from);
        break;
    case DRAW_STRIP:
        if (layout->boxes[from->parent].kind != DRAW_OUTSIDE)
            line(page, r.x, r.y + 7, r.w, 0, LINE, 3);
        break;
    case DRAW_DEVICE:
        device(page, layout, from);
        break;
    case DRAW_MORE:
        snprintf(words, sizeof words, "and %u more devices", from->subject);
        text(page, r.x + 8, r.y + 23, r.w - 16, 11, true, DRAW_LEFT, INK, words);
        break;
    case DRAW_OUTSIDE:
        box(page, r, PAPER, PACKAGE_LINE, 6)->dashed = true;
        titled(page, r, 20, 12, 13, "Devices of no single package, or whose place is not known",
               "");
        break;
    case DRAW_NOTES:
        box(page, r, GROUP_FILL, PACKAGE_LINE, 6);
        break;
    case DRAW_NOTE_LINE:
        text(page, r.x, r.y + 13, r.w, 12, false, DRAW_LEFT, INK, layout->lines[from->subject]);
        break;
    case DRAW_SIGNATURE:
        text(page, r.x + r.w, r.y + 15, r.w, 10, false, DRAW_RIGHT, GREY,
             "numoe " NUMOE_VERSION ", numoe plan: a dry run, nothing was allocated");
        break;
    }
}

int draw_page_create(const struct draw_layout *layout, struct draw_page **page,
                     struct numoe_error *error)
{
    struct draw_page *made = calloc(1, sizeof *made);

    if (made) {
        char words[512];

        snprintf(words, sizeof words, "numoe plan: %s", layout->subject->title);
        made->title = draw_text_fit(words, 1, false, 1e9);
        made->failed = !made->title;
        made->width = layout->boxes[0].rect.w;
        made->height = layout->boxes[0].rect.h;
        for (uint32_t i = 0; i < layout->box_count && !made->failed; i++)
            paint(made, layout, &layout->boxes[i]);
    }
    if (!made || made->failed) {
        draw_page_free(made);
        return numoe_error_set(error, -ENOMEM, "picture", "out of memory");
    }
    *page = made;
    return 0;
}

void draw_page_free(struct draw_page *page)
{
    if (!page)
        return;
    for (uint32_t i = 0; i < page->shape_count; i++)
        free(page->shapes[i].text);
    free(page->shapes);
    free(page->title);
    free(page);
}
