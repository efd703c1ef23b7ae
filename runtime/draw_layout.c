/*
 * Where everything in the picture of a plan stands.
 *
 * A page is a header, what is predicted, a grid of packages, and notes. A package is a grid of
 * memory domains, a domain a grid of nodes; nodes without CPUs stand apart at the end of their
 * package, and what has no package follows in a row of its own. All packages have the same numbers
 * of columns, so all nodes are equally wide and stand in line. Those numbers are found by trying:
 * widths follow from them downwards, heights upwards, and the flattest page without gaps is taken.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "draw_plan.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* In pixels. */
static const double page_width = 1600;
static const double small_page_width = 1000; /* one node would be lost on a wide one */
static const double margin = 24;
static const double package_gap = 16;
static const double package_pad = 12;
static const double package_title = 30;
static const double group_gap = 10;
static const double group_pad = 8;
static const double group_title = 22;
static const double node_gap = 8;
static const double node_pad = 8;
static const double node_least = 154;
static const double head_height = 34;
static const double bar_height = 14;
static const double number_line = 15;
static const double number_width = 82;
static const double reason_height = 18;
static const double foot_height = 16;
static const double device_width = 172;
static const double apart_most = 360; /* width of a node that stands apart */
static const double device_height = 38;
static const double device_gap = 8;
static const double strip_head = 24; /* the bus and the links that hang from it */
static const double header_height = 98;
static const double total_height = 20;
static const double legend_line = 20;
static const double legend_sign = 22;
static const double note_line = 17;
static const double signature_height = 22;
enum { MOST_DEVICES = 24, MOST_NOTES = 6 };

struct columns {
    uint32_t packages, groups, nodes;
    double page, package, group, node; /* widths */
};

/* What of a device's place a strip is for. */
struct place {
    uint32_t slot, group;
};

static uint32_t add(struct draw_layout *layout, uint32_t parent, enum draw_box_kind kind,
                    uint32_t subject, double x, double y, double w, double h)
{
    if (layout->box_count == layout->box_room) {
        uint32_t room = layout->box_room ? layout->box_room * 2 : 256;
        struct draw_box *more = realloc(layout->boxes, room * sizeof *more);

        if (!more) {
            layout->failed = true;
            return 0;
        }
        layout->boxes = more;
        layout->box_room = room;
    }
    layout->boxes[layout->box_count] = (struct draw_box){kind, parent, subject, {x, y, w, h}};
    return layout->box_count++;
}

static void set_height(struct draw_layout *layout, uint32_t box, double height)
{
    if (!layout->failed)
        layout->boxes[box].rect.h = height;
}

/* Boxes from `first` on that belong to parent and are of a row become as high as the highest. */
static void level_row(struct draw_layout *layout, uint32_t first, uint32_t parent, double height)
{
    if (layout->failed)
        return;
    for (uint32_t i = first; i < layout->box_count; i++)
        if (layout->boxes[i].parent == parent)
            layout->boxes[i].rect.h = height;
}

/* ---- nodes ---------------------------------------------------------------------------------- */

/* The PUs of one core stand next to each other in pu_order: how many from i on. */
static uint32_t core_run(const struct draw_layout *layout, uint32_t i, uint32_t end)
{
    const struct numoe_pu *pus = layout->subject->machine->pus;
    uint32_t n = 1;

    while (i + n < end && pus[layout->pu_order[i + n]].core == pus[layout->pu_order[i]].core)
        n++;
    return n;
}

/* How many cores of a node to put in a row, so that rows are alike; caches break rows anyhow. */
static uint32_t cores_in_row(const struct draw_layout *layout, uint32_t node, double w)
{
    const struct numoe_pu *pus = layout->subject->machine->pus;
    uint32_t end = layout->pu_first[node + 1], cores = 0, threads = 0, fit, rows;

    for (uint32_t i = layout->pu_first[node], n; i < end; i += n) {
        const struct numoe_pu *first = &pus[layout->pu_order[layout->pu_first[node]]];
        const struct numoe_pu *pu = &pus[layout->pu_order[i]];

        if (pu->l3 != first->l3 || pu->package != first->package)
            return UINT32_MAX;
        n = core_run(layout, i, end);
        threads = n > threads ? n : threads;
        cores++;
    }
    threads = threads < layout->pu_columns ? threads : layout->pu_columns;
    fit =
        (uint32_t)((w + layout->core_gap + 0.01) / (threads * layout->pu_width + layout->core_gap));
    fit = fit ? fit : 1;
    rows = (cores + fit - 1) / fit;
    return (cores + rows - 1) / rows;
}

static double place_cores(struct draw_layout *layout, uint32_t parent, uint32_t node, double x,
                          double y, double w)
{
    const struct numoe_machine *machine = layout->subject->machine;
    uint32_t end = layout->pu_first[node + 1], columns = layout->pu_columns, in_row = 0;
    uint32_t most_in_row = cores_in_row(layout, node, w);
    double at = x, top = y, tallest = 0;

    for (uint32_t i = layout->pu_first[node]; i < end;) {
        const struct numoe_pu *pu = &machine->pus[layout->pu_order[i]];
        uint32_t n = core_run(layout, i, end), used = n < columns ? n : columns;
        double core_w = used * layout->pu_width, core_h;
        uint32_t core;

        core_h = ceil((double)n / columns) * layout->pu_height;
        if (i > layout->pu_first[node]) {
            const struct numoe_pu *before = &machine->pus[layout->pu_order[i - 1]];

            at += before->l3 != pu->l3 || before->package != pu->package ? layout->cache_gap
                                                                         : layout->core_gap;
            if (in_row == most_in_row || at + core_w > x + w + 0.01) {
                at = x;
                top += tallest + layout->core_gap;
                tallest = 0;
                in_row = 0;
            }
        }
        core = add(layout, parent, DRAW_CORE, pu->core, at, top, core_w, core_h);
        for (uint32_t t = 0; t < n; t++) {
            uint32_t line = t / columns, column = t % columns;

            add(layout, core, DRAW_PU, layout->pu_order[i + t], at + column * layout->pu_width,
                top + line * layout->pu_height, layout->pu_width, layout->pu_height);
        }
        at += core_w;
        tallest = core_h > tallest ? core_h : tallest;
        in_row++;
        i += n;
    }
    return top + tallest - y;
}

static double place_node(struct draw_layout *layout, uint32_t parent, uint32_t node, double x,
                         double y, double w)
{
    uint32_t box = add(layout, parent, DRAW_NODE, node, x, y, w, 0);
    double left = x + node_pad, inner = w - 2 * node_pad, at = y + node_pad - 2;

    add(layout, box, DRAW_NODE_HEAD, node, left, at, inner, head_height);
    at += head_height;
    if (layout->plan_node[node] != NUMOE_NONE) {
        uint32_t items = layout->legend[DRAW_LEGEND_USED] ? 4 : 3;
        uint32_t rows = (items + layout->number_columns - 1) / layout->number_columns;

        add(layout, box, DRAW_BAR, node, left, at, inner, bar_height);
        at += bar_height + 2;
        add(layout, box, DRAW_NUMBERS, node, left, at, inner, rows * number_line);
        at += rows * number_line + 4;
    } else {
        add(layout, box, DRAW_REASON, node, left, at, inner, reason_height);
        at += reason_height;
    }
    if (layout->pu_first[node] != layout->pu_first[node + 1])
        at += place_cores(layout, box, node, left, at, inner) + 2;
    if (layout->plan_node[node] != NUMOE_NONE) {
        add(layout, box, DRAW_NODE_FOOT, node, left, at, inner, foot_height);
        at += foot_height;
    }
    at += node_pad - 2;
    set_height(layout, box, at - y);
    return at - y;
}

/* ---- devices -------------------------------------------------------------------------------- */

static uint32_t devices_at(const struct draw_layout *layout, struct place place)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < layout->subject->machine->device_count; i++)
        count += layout->place_slot[i] == place.slot && layout->place_group[i] == place.group;
    return count;
}

/* Chips that hang from a bus as wide as the place they belong to. Returns the height taken. */
static double place_devices(struct draw_layout *layout, uint32_t parent, struct place place,
                            double x, double y, double w)
{
    uint32_t all = devices_at(layout, place), drawn = 0, columns, strip = 0;
    double chip = w < device_width ? w : device_width, at = y;

    if (!all)
        return 0;
    columns = (uint32_t)((w + device_gap) / (chip + device_gap));
    for (uint32_t i = 0; i < layout->subject->machine->device_count; i++) {
        uint32_t column = drawn % columns;
        double left = x + column * (chip + device_gap);

        if (layout->place_slot[i] != place.slot || layout->place_group[i] != place.group)
            continue;
        if (!column) {
            strip = add(layout, parent, DRAW_STRIP, all, x, at, w, strip_head + device_height);
            at += strip_head + device_height;
        }
        if (++drawn == MOST_DEVICES && all > MOST_DEVICES) {
            add(layout, strip, DRAW_MORE, all - drawn + 1, left, at - device_height, chip,
                device_height);
            break;
        }
        add(layout, strip, DRAW_DEVICE, i, left, at - device_height, chip, device_height);
    }
    return at - y;
}

/* ---- groups and packages -------------------------------------------------------------------- */

static double place_group(struct draw_layout *layout, uint32_t parent, uint32_t index, double x,
                          double y, double w, uint32_t columns, double node_w)
{
    const struct draw_group *group = &layout->groups[index];
    bool bare = layout->flat && !group->apart;
    double pad = bare ? 0 : group_pad, at = y + (bare ? 0 : group_title), row = 0;
    uint32_t box = add(layout, parent, DRAW_GROUP, index, x, y, w, 0), first = layout->box_count;

    for (uint32_t i = 0; i < group->count; i++) {
        uint32_t column = i % columns;
        double height;

        if (!column && i) {
            level_row(layout, first, box, row);
            at += row + node_gap;
            row = 0;
            first = layout->box_count;
        }
        height = place_node(layout, box, layout->order[group->first + i],
                            x + pad + column * (node_w + node_gap), at, node_w);
        row = height > row ? height : row;
    }
    level_row(layout, first, box, row);
    at += row;
    at += place_devices(layout, box, (struct place){group->slot, index}, x + pad, at, w - 2 * pad);
    at += pad;
    set_height(layout, box, at - y);
    return at - y;
}

static double place_slot(struct draw_layout *layout, uint32_t index, const struct columns *columns,
                         double x, double y, double w)
{
    const struct draw_slot *slot = &layout->slots[index];
    uint32_t box = add(layout, 0, DRAW_PACKAGE, index, x, y, w, 0);
    uint32_t first = layout->box_count, column = 0;
    double left = x + package_pad, inner = w - 2 * package_pad, at = y + package_title, row = 0;
    /* The outside is as wide as the page: it has as many columns as there is room for. */
    uint32_t across = (uint32_t)((inner + group_gap + 0.01) / (columns->group + group_gap));

    for (uint32_t g = slot->first; g < slot->first + slot->count; g++) {
        const struct draw_group *group = &layout->groups[g];
        double height;

        if (column && (column == across || group->apart)) {
            level_row(layout, first, box, row);
            at += row + group_gap;
            row = 0;
            column = 0;
            first = layout->box_count;
        }
        if (group->apart) {
            double room = inner - 2 * group_pad;
            double node_w = columns->node < apart_most ? columns->node : apart_most;
            uint32_t fit = (uint32_t)((room + node_gap + 0.01) / (node_w + node_gap));

            fit = fit < 1 ? 1 : fit;
            if (fit > 1 || room < node_w)
                node_w = (room - (fit - 1) * node_gap) / fit;
            at += place_group(layout, box, g, left, at, inner, fit, node_w) + group_gap;
            first = layout->box_count;
            continue;
        }
        height = place_group(layout, box, g, left + column * (columns->group + group_gap), at,
                             columns->group, columns->nodes, columns->node);
        row = height > row ? height : row;
        column++;
    }
    if (column) {
        level_row(layout, first, box, row);
        at += row;
    } else {
        at -= group_gap;
    }
    at += place_devices(layout, box, (struct place){index, NUMOE_NONE}, left, at, inner);
    at += package_pad;
    set_height(layout, box, at - y);
    return at - y;
}

/* ---- header and notes ----------------------------------------------------------------------- */

static double place_header(struct draw_layout *layout, double w)
{
    double x = 0, y = header_height + total_height + 8;
    uint32_t box = add(layout, 0, DRAW_HEADER, NUMOE_NONE, margin, margin - 8, w, 0);

    add(layout, box, DRAW_TOTAL_BAR, NUMOE_NONE, margin, margin - 8 + header_height, w,
        total_height);
    for (uint32_t i = 0; i < DRAW_LEGEND_COUNT; i++) {
        char text[128];
        double width;

        if (!layout->legend[i])
            continue;
        draw_legend_text(layout, (enum draw_legend)i, text, sizeof text);
        width = legend_sign + draw_text_width(text, 12, false) + 22;
        /* Memory in one line, everything else below. */
        if (x > 0 && (x + width - 22 > w || i == DRAW_LEGEND_WORKER)) {
            x = 0;
            y += legend_line;
        }
        add(layout, box, DRAW_LEGEND, i, margin + x, margin - 8 + y, width > w ? w : width - 22,
            legend_line);
        x += width;
    }
    y += legend_line;
    set_height(layout, box, y);
    return margin - 8 + y;
}

/* A box of lines of text. @return its height; 0: there are none */
static double place_lines(struct draw_layout *layout, enum draw_box_kind kind,
                          enum draw_box_kind line, uint32_t count, double pad, double y, double w)
{
    const double height = 2 * pad + count * note_line;
    uint32_t box;

    if (!count)
        return 0;
    box = add(layout, 0, kind, NUMOE_NONE, margin, y, w, height);
    for (uint32_t i = 0; i < count; i++)
        add(layout, box, line, i, margin + 12, y + pad + i * note_line, w - 24, note_line);
    return height;
}

static double place_speeds(struct draw_layout *layout, double y, double w)
{
    if (!layout->speed_count)
        return 0;
    return place_lines(layout, DRAW_SPEEDS, DRAW_SPEED, layout->speed_count + 2, 7, y, w) +
           package_gap;
}

static double place_notes(struct draw_layout *layout, double y, double w)
{
    return place_lines(layout, DRAW_NOTES, DRAW_NOTE_LINE, layout->line_count, 8, y, w);
}

static int note_lines(struct draw_layout *layout, double width)
{
    const struct numoe_machine *machine = layout->subject->machine;
    const struct numoe_plan *plan = layout->subject->plan;
    uint32_t all = plan->note_count + machine->note_count + (layout->nowhere > 0), shown = 0;
    char text[128];
    int rc = 0;

    for (uint32_t i = 0; i < layout->line_count; i++)
        free(layout->lines[i]);
    layout->line_count = 0;
    if (layout->nowhere) {
        snprintf(text, sizeof text, "%u CPUs that no memory node serves are not drawn",
                 layout->nowhere);
        rc = draw_text_wrap(text, 12, width, 1, &layout->lines, &layout->line_count);
        shown++;
    }
    for (uint32_t i = 0; !rc && i < plan->note_count + machine->note_count; i++) {
        if (shown == MOST_NOTES)
            break;
        shown++;
        rc = draw_text_wrap(i < plan->note_count ? plan->notes[i]
                                                 : machine->notes[i - plan->note_count],
                            12, width, 2, &layout->lines, &layout->line_count);
    }
    if (!rc && shown < all) {
        snprintf(text, sizeof text, "and %u more", all - shown);
        rc = draw_text_wrap(text, 12, width, 1, &layout->lines, &layout->line_count);
    }
    return rc;
}

/* ---- the page ------------------------------------------------------------------------------- */

static bool outside(const struct draw_layout *layout, uint32_t slot)
{
    return layout->slot_count > 1 && layout->slots[slot].package == NUMOE_NONE;
}

/* PUs as large as the place allows: with their numbers, else smaller and smaller. */
static void size_pus(struct draw_layout *layout, double inner)
{
    static const struct {
        double width, height, core_gap, cache_gap, most;
    } sizes[] = {{0, 16, 4, 10, 60}, {11, 11, 4, 8, 90}, {8, 8, 3, 6, 160}, {4, 4, 2, 4, 1e9}};
    const struct numoe_machine *machine = layout->subject->machine;
    uint32_t highest = 0, most_threads = 1, most_cores = 1, most_breaks = 0;
    char label[16];

    for (uint32_t n = 0; n < machine->node_count; n++) {
        uint32_t end = layout->pu_first[n + 1], cores = 0, breaks = 0;

        for (uint32_t i = layout->pu_first[n]; i < end;) {
            uint32_t threads = core_run(layout, i, end);

            for (uint32_t t = 0; t < threads; t++) {
                uint32_t os_index = machine->pus[layout->pu_order[i + t]].os_index;

                highest = os_index > highest ? os_index : highest;
            }
            breaks += i > layout->pu_first[n] && machine->pus[layout->pu_order[i]].l3 !=
                                                     machine->pus[layout->pu_order[i - 1]].l3;
            most_threads = threads > most_threads ? threads : most_threads;
            cores++;
            i += threads;
        }
        most_cores = cores > most_cores ? cores : most_cores;
        most_breaks = breaks > most_breaks ? breaks : most_breaks;
    }
    layout->pu_columns = most_threads <= 2 ? most_threads : (uint32_t)ceil(sqrt(most_threads));
    snprintf(label, sizeof label, "%u", highest < 10 ? 10 : highest);
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        double width = s ? sizes[s].width : draw_text_width(label, 9, false) + 3, core, rows;
        uint32_t lines = (most_threads + layout->pu_columns - 1) / layout->pu_columns;

        if (width * layout->pu_columns > inner)
            width = inner / layout->pu_columns;
        core = width * layout->pu_columns + sizes[s].core_gap;
        rows = ceil((most_cores * core + most_breaks * (sizes[s].cache_gap - sizes[s].core_gap)) /
                    fmax(inner + sizes[s].core_gap - core / 4, core));
        layout->pu_labels = !s && width >= draw_text_width(label, 9, false) + 2;
        layout->pu_width = width;
        layout->pu_height = s ? fmin(sizes[s].height, width) : sizes[s].height;
        layout->core_gap = sizes[s].core_gap;
        layout->cache_gap = sizes[s].cache_gap;
        if ((s || layout->pu_labels) &&
            rows * (layout->pu_height * lines + sizes[s].core_gap) <= sizes[s].most)
            break;
    }
}

/* Returns a cost: the height, plus what is ugly. */
static double place_all(struct draw_layout *layout, const struct columns *columns)
{
    double w = columns->page - 2 * margin, y, row = 0, cost = 0;
    uint32_t column = 0, first, items = layout->legend[DRAW_LEGEND_USED] ? 4 : 3;
    double inner = columns->node - 2 * node_pad;

    layout->box_count = 0;
    layout->number_columns = inner >= items * number_width ? items : inner >= 2 * 60 ? 2 : 1;
    layout->detail_size = inner >= 260 ? 11.5 : 10;
    size_pus(layout, inner);
    add(layout, NUMOE_NONE, DRAW_CANVAS, NUMOE_NONE, 0, 0, columns->page, 0);
    y = place_header(layout, w) + 8;
    y += layout->speed_count ? place_speeds(layout, y, w) : package_gap - 8;
    first = layout->box_count;
    for (uint32_t s = 0; s < layout->slot_count; s++) {
        double height;

        if (outside(layout, s))
            continue;
        if (column == columns->packages) {
            level_row(layout, first, 0, row);
            y += row + package_gap;
            row = 0;
            column = 0;
            first = layout->box_count;
        }
        height = place_slot(layout, s, columns, margin + column * (columns->package + package_gap),
                            y, columns->package);
        row = height > row ? height : row;
        column++;
    }
    level_row(layout, first, 0, row);
    y += row + package_gap;
    cost += 60.0 * (columns->packages - column);
    for (uint32_t s = 0; s < layout->slot_count; s++)
        if (outside(layout, s))
            y += place_slot(layout, s, columns, margin, y, w) + package_gap;
    if (devices_at(layout, (struct place){NUMOE_NONE, NUMOE_NONE})) {
        uint32_t box = add(layout, 0, DRAW_OUTSIDE, NUMOE_NONE, margin, y, w, 0);
        double height = package_title - 12 + package_pad;

        height += place_devices(layout, box, (struct place){NUMOE_NONE, NUMOE_NONE},
                                margin + package_pad, y + package_title - 12, w - 2 * package_pad);
        set_height(layout, box, height);
        y += height + package_gap;
    }
    if (note_lines(layout, w - 24))
        layout->failed = true;
    y += place_notes(layout, y, w);
    add(layout, 0, DRAW_SIGNATURE, NUMOE_NONE, margin, y, w, signature_height);
    y += signature_height + 8;
    set_height(layout, 0, y);
    return y + cost;
}

/* Gaps at the end of rows of domains and nodes, in nodes. */
static double gaps(const struct draw_layout *layout, const struct columns *columns)
{
    double sum = 0;

    for (uint32_t s = 0; s < layout->slot_count; s++) {
        uint32_t groups = 0;

        for (uint32_t g = 0; g < layout->slots[s].count; g++) {
            const struct draw_group *group = &layout->groups[layout->slots[s].first + g];

            if (group->apart)
                continue;
            groups++;
            sum += (columns->nodes - group->count % columns->nodes) % columns->nodes;
        }
        sum += (columns->groups - groups % columns->groups) % columns->groups * columns->nodes;
    }
    return sum;
}

static void choose(struct draw_layout *layout)
{
    uint32_t grid = 0, most_groups = 1, most_nodes = 1;
    struct columns best = {0};
    double least = 0;

    for (uint32_t s = 0; s < layout->slot_count; s++) {
        uint32_t groups = 0;

        grid += !outside(layout, s);
        for (uint32_t g = 0; g < layout->slots[s].count; g++) {
            const struct draw_group *group = &layout->groups[layout->slots[s].first + g];

            if (group->apart)
                continue;
            groups++;
            most_nodes = group->count > most_nodes ? group->count : most_nodes;
        }
        most_groups = groups > most_groups ? groups : most_groups;
    }
    grid = grid ? grid : 1;
    for (uint32_t p = 1; p <= grid; p++) {
        for (uint32_t d = 1; d <= most_groups; d++) {
            for (uint32_t n = 1; n <= most_nodes; n++) {
                struct columns c = {.packages = p, .groups = d, .nodes = n};
                double cost, pad = layout->flat ? 0 : 2.0 * group_pad;

                c.page = layout->subject->machine->node_count == 1 ? small_page_width : page_width;
                c.package = (c.page - 2 * margin - (p - 1) * package_gap) / p;
                c.group = (c.package - 2 * package_pad - (d - 1) * group_gap) / d;
                c.node = (c.group - pad - (n - 1) * node_gap) / n;
                if (c.node < node_least && p * d * n > 1)
                    break;
                cost = place_all(layout, &c) + 30 * gaps(layout, &c);
                if (layout->failed)
                    return;
                if (!best.packages || cost < least) {
                    best = c;
                    least = cost;
                }
            }
        }
    }
    place_all(layout, &best);
}

/* ---- what there is to place ----------------------------------------------------------------- */

struct sort_key {
    uint32_t package, domain, node;
    bool apart;
};

static int by_place(const void *left, const void *right)
{
    const struct sort_key *a = left, *b = right;

    if (a->package != b->package)
        return a->package < b->package ? -1 : 1;
    if (a->apart != b->apart)
        return a->apart ? 1 : -1;
    if (!a->apart && a->domain != b->domain)
        return a->domain < b->domain ? -1 : 1;
    return a->node < b->node ? -1 : 1;
}

static void find_groups(struct draw_layout *layout, const struct sort_key *keys)
{
    uint32_t count = layout->subject->machine->node_count;

    layout->flat = true;
    for (uint32_t i = 0; i < count; i++) {
        const struct sort_key *key = &keys[i];
        bool new_slot = !i || key->package != key[-1].package;
        struct draw_slot *slot;
        struct draw_group *group;

        layout->order[i] = key->node;
        if (new_slot)
            layout->slots[layout->slot_count++] =
                (struct draw_slot){key->package, layout->group_count, 0};
        slot = &layout->slots[layout->slot_count - 1];
        if (new_slot || key->apart != key[-1].apart ||
            (!key->apart && key->domain != key[-1].domain)) {
            layout->groups[layout->group_count++] = (struct draw_group){
                layout->slot_count - 1, key->apart ? NUMOE_NONE : key->domain, key->apart, i, 0};
            slot->count++;
        }
        group = &layout->groups[layout->group_count - 1];
        group->count++;
        if (!group->apart && group->count > 1)
            layout->flat = false;
    }
}

/* Where a device stands: with the domain, or else the package, that has all of its nodes. Nodes
 * without CPUs decide only when there are no others. */
static void find_place(struct draw_layout *layout, uint32_t index, const uint32_t *group_of)
{
    const struct numoe_device *device = &layout->subject->machine->devices[index];
    struct place place = {NUMOE_NONE, NUMOE_NONE};
    bool any = false, apart = true;

    layout->place_slot[index] = NUMOE_NONE;
    layout->place_group[index] = NUMOE_NONE;
    if (!device->locality_known)
        return;
    for (uint32_t i = 0; i < device->node_count; i++)
        apart &= layout->groups[group_of[device->nodes[i]]].apart;
    for (uint32_t i = 0; i < device->node_count; i++) {
        uint32_t group = group_of[device->nodes[i]], slot = layout->groups[group].slot;

        if (!apart && layout->groups[group].apart)
            continue;
        if (any && place.slot != slot)
            return;
        place.group = !any || place.group == group ? group : NUMOE_NONE;
        place.slot = slot;
        any = true;
    }
    for (uint32_t s = 0; !any && s < layout->slot_count; s++)
        if (device->package != NUMOE_NONE && layout->slots[s].package == device->package)
            place.slot = s;
    layout->place_slot[index] = place.slot;
    layout->place_group[index] = place.group;
}

static void find_pus(struct draw_layout *layout)
{
    const struct numoe_machine *machine = layout->subject->machine;
    const struct numoe_plan *plan = layout->subject->plan;
    uint32_t slowest = UINT32_MAX, count = machine->node_count;

    for (uint32_t i = 0; i < machine->pu_count; i++)
        layout->worker[i] = NUMOE_NONE;
    for (uint32_t i = plan->worker_count; i-- > 0;)
        layout->worker[plan->workers[i].pu] = i;
    for (uint32_t i = 0; i < machine->pu_count; i++) {
        const struct numoe_pu *pu = &machine->pus[i];

        if (pu->node == NUMOE_NONE) {
            layout->nowhere++;
            continue;
        }
        layout->pu_first[pu->node + 1]++;
        if (layout->worker[i] != NUMOE_NONE)
            layout->legend[DRAW_LEGEND_WORKER] = true;
        else if (pu->allowed)
            layout->legend[DRAW_LEGEND_IDLE] = true;
        else
            layout->legend[DRAW_LEGEND_FORBIDDEN] = true;
        layout->legend[DRAW_LEGEND_FAR] |= !pu->node_is_near;
        if (pu->efficiency > layout->best_efficiency)
            layout->best_efficiency = pu->efficiency;
        slowest = pu->efficiency < slowest ? pu->efficiency : slowest;
    }
    layout->legend[DRAW_LEGEND_SLOW] = slowest < layout->best_efficiency;
    for (uint32_t i = 0; i < count; i++)
        layout->pu_first[i + 1] += layout->pu_first[i];
    /* Filled from the end, so that pu_first[n] ends as the beginning of n. */
    for (uint32_t i = machine->pu_count; i-- > 0;)
        if (machine->pus[i].node != NUMOE_NONE)
            layout->pu_order[--layout->pu_first[machine->pus[i].node + 1]] = i;
    for (uint32_t i = 0; i < count; i++)
        layout->pu_first[i] = layout->pu_first[i + 1];
    layout->pu_first[count] = machine->pu_count - layout->nowhere;
}

/* Decode is the smallest size, prefill that of the choice of forms, else the largest. */
static void find_speeds(struct draw_layout *layout)
{
    enum { PREFILL_TOKENS = 4096, DECODE_TOKENS = 16 };
    const struct numoe_prediction *prediction = layout->subject->prediction;
    uint32_t few = UINT32_MAX, many = 0;

    for (uint32_t i = 0; prediction && i < prediction->cell_count; i++) {
        uint32_t tokens = prediction->cells[i].tokens;

        few = tokens < few ? tokens : few;
        many =
            many == PREFILL_TOKENS || (tokens < many && tokens != PREFILL_TOKENS) ? many : tokens;
    }
    layout->few_tokens = few;
    layout->many_tokens = many;
    for (enum numoe_way way = 0; prediction && way < NUMOE_WAYS; way++) {
        struct draw_speed speed = {way, NUMOE_NONE, NUMOE_NONE};
        /* nobody streams all that a few tokens hit, where the CPUs may read it */
        bool decodes =
            way == NUMOE_WAY_CPU || way == NUMOE_WAY_SHARED || few > DECODE_TOKENS || few == many;

        for (uint32_t i = 0; i < prediction->cell_count; i++) {
            if (prediction->cells[i].way != way)
                continue;
            if (prediction->cells[i].tokens == few && decodes)
                speed.few = i;
            if (prediction->cells[i].tokens == many)
                speed.many = i;
        }
        if (speed.many != NUMOE_NONE)
            layout->speeds[layout->speed_count++] = speed;
    }
}

static int gather(struct draw_layout *layout)
{
    const struct numoe_machine *machine = layout->subject->machine;
    const struct numoe_plan *plan = layout->subject->plan;
    size_t nodes = (size_t)machine->node_count + 1, pus = (size_t)machine->pu_count + 1;
    size_t devices = (size_t)machine->device_count + 1;
    struct sort_key *keys = calloc(nodes, sizeof *keys);
    uint32_t *group_of = calloc(nodes, sizeof *group_of);
    int rc = -ENOMEM;

    layout->order = calloc(nodes, sizeof *layout->order);
    layout->groups = calloc(nodes, sizeof *layout->groups);
    layout->slots = calloc(nodes, sizeof *layout->slots);
    layout->plan_node = calloc(nodes, sizeof *layout->plan_node);
    layout->pu_first = calloc(nodes, sizeof *layout->pu_first);
    layout->pu_order = calloc(pus, sizeof *layout->pu_order);
    layout->worker = calloc(pus, sizeof *layout->worker);
    layout->place_slot = calloc(devices, sizeof *layout->place_slot);
    layout->place_group = calloc(devices, sizeof *layout->place_group);
    if (!keys || !group_of || !layout->order || !layout->groups || !layout->slots ||
        !layout->plan_node || !layout->pu_first || !layout->pu_order || !layout->worker ||
        !layout->place_slot || !layout->place_group)
        goto out;

    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct numoe_node *node = &machine->nodes[i];

        keys[i] = (struct sort_key){node->package, node->domain, i, !node->pu_count};
        layout->plan_node[i] = NUMOE_NONE;
    }
    find_pus(layout);
    /* Nodes with CPUs that are all forbidden have no part in the plan, but are no less whole. */
    for (uint32_t i = 0; i < machine->node_count; i++)
        if (layout->pu_first[i] != layout->pu_first[i + 1])
            keys[i].apart = false;
    qsort(keys, machine->node_count, sizeof *keys, by_place);
    find_groups(layout, keys);
    for (uint32_t g = 0; g < layout->group_count; g++)
        for (uint32_t i = 0; i < layout->groups[g].count; i++)
            group_of[layout->order[layout->groups[g].first + i]] = g;
    for (uint32_t i = 0; i < machine->device_count; i++) {
        find_place(layout, i, group_of);
        layout->legend[machine->devices[i].gpu ? DRAW_LEGEND_GPU : DRAW_LEGEND_DRIVE] = true;
    }
    for (uint32_t i = 0; i < plan->node_count; i++)
        layout->plan_node[plan->nodes[i].node] = i;
    find_speeds(layout);
    layout->legend[DRAW_LEGEND_USED] = draw_total_memory(layout).used > 0;
    layout->legend[DRAW_LEGEND_EXPERTS] = true;
    layout->legend[DRAW_LEGEND_KEPT] = true;
    layout->legend[DRAW_LEGEND_LEFT] = true;
    rc = 0;
out:
    free(group_of);
    free(keys);
    return rc;
}

struct draw_memory draw_node_memory(const struct draw_layout *layout, uint32_t node)
{
    const struct numoe_machine *machine = layout->subject->machine;
    uint32_t place = layout->plan_node[node];
    struct draw_memory memory = {.capacity = machine->nodes[node].capacity_bytes};
    uint64_t rest = memory.capacity, had = machine->nodes[node].free_bytes, available;

    if (place == NUMOE_NONE)
        return memory;
    memory.used = machine->live && had < rest ? rest - had : 0;
    rest -= memory.used;
    available = layout->subject->plan->nodes[place].available_bytes;
    memory.kept = available < rest ? rest - available : 0;
    rest -= memory.kept;
    memory.experts = layout->subject->plan->nodes[place].planned_bytes;
    memory.experts = memory.experts < rest ? memory.experts : rest;
    memory.left = rest - memory.experts;
    return memory;
}

struct draw_memory draw_total_memory(const struct draw_layout *layout)
{
    struct draw_memory sum = {0};

    for (uint32_t i = 0; i < layout->subject->plan->node_count; i++) {
        struct draw_memory one = draw_node_memory(layout, layout->subject->plan->nodes[i].node);

        sum.capacity += one.capacity;
        sum.used += one.used;
        sum.experts += one.experts;
        sum.kept += one.kept;
        sum.left += one.left;
    }
    return sum;
}

int draw_layout_create(const struct draw_subject *subject, struct draw_layout **layout,
                       struct numoe_error *error)
{
    struct draw_layout *made = calloc(1, sizeof *made);

    if (made) {
        made->subject = subject;
        made->failed = gather(made) != 0;
        if (!made->failed)
            choose(made);
    }
    if (!made || made->failed) {
        draw_layout_free(made);
        return numoe_error_set(error, -ENOMEM, "picture", "out of memory");
    }
    *layout = made;
    return 0;
}

void draw_layout_free(struct draw_layout *layout)
{
    if (!layout)
        return;
    for (uint32_t i = 0; i < layout->line_count; i++)
        free(layout->lines[i]);
    free(layout->lines);
    free(layout->boxes);
    free(layout->order);
    free(layout->groups);
    free(layout->slots);
    free(layout->plan_node);
    free(layout->worker);
    free(layout->pu_order);
    free(layout->pu_first);
    free(layout->place_slot);
    free(layout->place_group);
    free(layout);
}
