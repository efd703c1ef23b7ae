/*
 * draw_plan.h - a plan as a picture: first boxes, then marks on a page, then a file.
 *
 *   machine, plan -> draw_layout (boxes within boxes) -> draw_page (rectangles, lines, text) -> SVG
 *                                                                                            -> PNG
 *
 * The layout measures text by a table of its own and asks no font, so it is the same everywhere.
 * Part of the command, not of the library.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_DRAW_PLAN_H
#define NUMOE_DRAW_PLAN_H

#include "base/numoe_base.h"
#include "numoe_topo.h"
#include "predict.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* What a picture is of. Everything must live as long as the layout made from it. */
struct draw_subject {
    const char *title;  /* the model's name or directory */
    const char *detail; /* what the model is, in one line; may be empty */
    const struct numoe_machine *machine;
    const struct numoe_plan *plan;             /* made from machine */
    const struct numoe_prediction *prediction; /* of that plan, or NULL */
};

struct draw_rect {
    double x, y, w, h;
};

enum draw_box_kind {
    DRAW_CANVAS, /* the whole page; the only box without a parent */
    DRAW_HEADER,
    DRAW_TOTAL_BAR, /* memory of all planned nodes */
    DRAW_LEGEND,    /* subject: enum draw_legend */
    DRAW_SPEEDS,    /* what is predicted */
    DRAW_SPEED,     /* a line of it; subject: 0 the heading, else index in speeds and 1; the
                       last what figures it rests on */
    DRAW_PACKAGE,   /* subject: index in slots */
    DRAW_GROUP,     /* subject: index in groups: a memory domain, or nodes that stand apart */
    DRAW_NODE,      /* subject: dense index in the machine; so for its parts up to DRAW_NODE_FOOT */
    DRAW_NODE_HEAD,
    DRAW_BAR,
    DRAW_NUMBERS,
    DRAW_REASON, /* why the node is not in the plan */
    DRAW_NODE_FOOT,
    DRAW_CORE,    /* subject: dense core index */
    DRAW_PU,      /* subject: dense index in the machine */
    DRAW_STRIP,   /* devices of a place; subject: how many */
    DRAW_DEVICE,  /* subject: dense index in the machine */
    DRAW_MORE,    /* subject: number of devices that are left out */
    DRAW_OUTSIDE, /* devices that belong to no single package */
    DRAW_NOTES,
    DRAW_NOTE_LINE, /* subject: index in lines */
    DRAW_SIGNATURE
};

enum draw_legend {
    DRAW_LEGEND_USED,
    DRAW_LEGEND_EXPERTS,
    DRAW_LEGEND_KEPT,
    DRAW_LEGEND_LEFT,
    DRAW_LEGEND_WORKER,
    DRAW_LEGEND_IDLE,
    DRAW_LEGEND_FORBIDDEN,
    DRAW_LEGEND_FAR,
    DRAW_LEGEND_SLOW,
    DRAW_LEGEND_GPU,
    DRAW_LEGEND_DRIVE,
    DRAW_LEGEND_COUNT
};

struct draw_box {
    enum draw_box_kind kind;
    uint32_t parent; /* index in boxes, smaller than the box's own; NUMOE_NONE for the canvas */
    uint32_t subject;
    struct draw_rect rect;
};

/* Memory of one node, or of all; the four parts add up to capacity. */
struct draw_memory {
    uint64_t capacity, used, experts, kept, left;
};

/* Nodes of one package and one memory domain, or those of a package that stand apart. */
struct draw_group {
    uint32_t slot, domain;
    bool apart;            /* no CPUs */
    uint32_t first, count; /* in order */
};

/* A package that has nodes, or whatever has no package. */
struct draw_slot {
    uint32_t package;      /* or NUMOE_NONE */
    uint32_t first, count; /* in groups */
};

/* A way to compute, and what is predicted of it: cells, or NUMOE_NONE. */
struct draw_speed {
    enum numoe_way way;
    uint32_t few, many;
};

struct draw_layout {
    const struct draw_subject *subject;
    struct draw_box *boxes;
    uint32_t box_count, box_room;
    bool failed; /* out of memory: nothing that follows counts */

    uint32_t *order; /* nodes by group */
    struct draw_group *groups;
    struct draw_slot *slots;
    uint32_t group_count, slot_count;
    bool flat;                          /* every node is a memory domain of its own */
    uint32_t *plan_node;                /* of each machine node, or NUMOE_NONE */
    uint32_t *worker;                   /* of each PU: its first worker, or NUMOE_NONE */
    uint32_t *pu_order;                 /* PUs by node */
    uint32_t *pu_first;                 /* node_count + 1: where a node's begin in pu_order */
    uint32_t *place_slot, *place_group; /* of each device, or NUMOE_NONE */
    bool legend[DRAW_LEGEND_COUNT];
    uint32_t best_efficiency;
    uint32_t nowhere; /* PUs that no node serves */
    char **lines;     /* notes, cut into lines */
    uint32_t line_count;
    struct draw_speed speeds[NUMOE_WAYS];
    uint32_t speed_count;
    uint32_t few_tokens, many_tokens; /* a pass; equal when only one size is predicted */

    /* How PUs are drawn, alike in the whole picture. */
    double pu_width, pu_height, core_gap, cache_gap;
    uint32_t pu_columns; /* of one core */
    bool pu_labels;
    uint32_t number_columns;
    double detail_size; /* of the text in nodes */
};

enum draw_shape_kind { DRAW_SHAPE_RECT, DRAW_SHAPE_LINE, DRAW_SHAPE_TEXT };
enum draw_anchor { DRAW_LEFT, DRAW_MIDDLE, DRAW_RIGHT };

#define DRAW_NO_PAINT UINT32_MAX

struct draw_shape {
    enum draw_shape_kind kind;
    struct draw_rect rect; /* a line: from (x, y) by (w, h); text: x and baseline y, w at most */
    uint32_t fill, stroke; /* 0xRRGGBB or DRAW_NO_PAINT; text takes fill, a line stroke */
    double width, radius;  /* of the stroke, of the corners */
    bool dashed;
    double size; /* of text, pixels */
    bool bold;
    enum draw_anchor anchor;
    char *text; /* valid UTF-8 without control characters */
};

struct draw_page {
    double width, height;
    char *title;
    struct draw_shape *shapes;
    uint32_t shape_count, shape_room;
    bool failed;
};

/* Place everything. 0 (free with draw_layout_free) or -ENOMEM with error. */
int draw_layout_create(const struct draw_subject *subject, struct draw_layout **layout,
                       struct numoe_error *error);
void draw_layout_free(struct draw_layout *layout);

/* Turn boxes into marks. 0 (free with draw_page_free) or -ENOMEM with error. */
int draw_page_create(const struct draw_layout *layout, struct draw_page **page,
                     struct numoe_error *error);
void draw_page_free(struct draw_page *page);

/* Write a page. 0, or negative errno with error; out may then hold a part of it. */
int draw_svg(const struct draw_page *page, FILE *out, struct numoe_error *error);
/* As above; -ENOTSUP when built without cairo. A page too high for cairo is made smaller. */
int draw_png(const struct draw_page *page, FILE *out, struct numoe_error *error);
/* Whether draw_png can do it. */
bool draw_png_available(void);

/* Memory of one node by dense index, and of all planned nodes. */
struct draw_memory draw_node_memory(const struct draw_layout *layout, uint32_t node);
struct draw_memory draw_total_memory(const struct draw_layout *layout);
/* Words beside a sign of the legend. */
void draw_legend_text(const struct draw_layout *layout, enum draw_legend item, char *text,
                      size_t size);

/* Width of text in pixels, at most that of the usual sans-serif fonts. */
double draw_text_width(const char *text, double size, bool bold);
/* A copy with damaged UTF-8 and control characters replaced, cut with "..." to fit; NULL: no
 * memory. */
char *draw_text_fit(const char *text, double size, bool bold, double width);
/* Cut into at most `most` lines that fit; the last one ends in "..." if words are left. Appends to
 * lines; 0 or -ENOMEM. */
int draw_text_wrap(const char *text, double size, double width, uint32_t most, char ***lines,
                   uint32_t *count);
/* "16.0 GiB", "137 GiB", "1.50 TiB" */
const char *draw_bytes(char text[32], uint64_t bytes);
/* GiB without the unit, as many digits as a bar's label needs. */
const char *draw_gib(char text[32], uint64_t bytes);

#endif
