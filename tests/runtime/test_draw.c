/* The picture of a plan: boxes that fit into each other, files that can be read. */
#include "draw_plan.h"
#include "topo/topo_fixture.h"

#include <ctype.h>
#include <errno.h>

static const char *const machines[] = {
    DATA "allowed-sets-disagree.xml",
    DATA "cpuless-gpu-and-far-nodes.xml",
    EPYC,
    DATA "fast-cores-last.xml",
    DATA "hbm-numbered-last.xml",
    DATA "matrices-and-devices.xml",
    DATA "two-of-four-nodes.xml",
    DATA "xeon-8336c-2s-2n.xml",
    "core:1 pu:1",
    "pack:1 core:1 pu:128",
    "core:300 pu:8",
    "[numa(memory=64GB)] l3:4 core:4 pu:1",
    "pack:8 die:2 l3:4 [numa(memory=32GB)] core:4 pu:2",
    "pack:2 group:4 l3:4 [numa(memory=16GB)] core:4 pu:2",
    "pack:1 l3:128 [numa(memory=8GB)] core:4 pu:4",
    "pack:2 group:32 [numa(memory=8GB)] l3:2 [numa(memory=8GB)] core:2 pu:1",
    "pack:64 [numa(memory=8GB)] [numa(memory=8GB)] core:16 pu:2",
    "pack:64 l3:2 [numa(memory=8GB)] core:8 pu:2",
    "numa:3(memory=8GB) pack:3 core:2 pu:3",
};

enum { MACHINE_COUNT = sizeof machines / sizeof machines[0] };

struct picture {
    struct numoe_machine *machine;
    struct numoe_plan *plan;
    struct numoe_prediction *prediction;
    struct draw_subject subject;
    struct draw_layout *layout;
    struct draw_page *page;
};

/* A picture of a machine with few experts, or with as many layers as are asked for. */
static struct picture draw(struct numoe_machine *machine, uint64_t layers, const char *title)
{
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct picture picture = {.machine = machine};

    request.shape = v4_flash;
    request.shape.layers = layers;
    request.shape.experts = layers > 1 ? 256 : 8;
    picture.plan = plan_of(machine, &request);
    picture.subject = (struct draw_subject){title, "so many layers", machine, picture.plan, NULL};
    return picture;
}

/* With what is predicted at these sizes; none: at the usual ones. */
static void predict(struct picture *picture, const uint32_t *tokens, uint32_t count)
{
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;

    options.tokens = tokens;
    options.token_count = count;
    cr_assert_eq(
        numoe_predict(picture->machine, picture->plan, &options, &picture->prediction, &error), 0,
        "%s", error.message);
    picture->subject.prediction = picture->prediction;
}

static void lay_out(struct picture *picture)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_assert_eq(draw_layout_create(&picture->subject, &picture->layout, &error), 0, "%s",
                 error.message);
    cr_assert_eq(draw_page_create(picture->layout, &picture->page, &error), 0, "%s", error.message);
}

static void forget(struct picture *picture)
{
    draw_page_free(picture->page);
    draw_layout_free(picture->layout);
    numoe_prediction_free(picture->prediction);
    numoe_plan_free(picture->plan);
    numoe_machine_free(picture->machine);
}

static bool inside(const struct draw_rect *in, const struct draw_rect *of)
{
    return in->x >= of->x - 0.05 && in->y >= of->y - 0.05 &&
           in->x + in->w <= of->x + of->w + 0.05 && in->y + in->h <= of->y + of->h + 0.05;
}

static bool overlap(const struct draw_rect *a, const struct draw_rect *b)
{
    return a->x < b->x + b->w - 0.05 && b->x < a->x + a->w - 0.05 && a->y < b->y + b->h - 0.05 &&
           b->y < a->y + a->h - 0.05;
}

/* Everything that holds of any layout. */
static void check_layout(const struct picture *picture, const char *name)
{
    const struct draw_layout *layout = picture->layout;
    const struct numoe_machine *machine = picture->machine;
    uint32_t *nodes = calloc(machine->node_count, sizeof *nodes);
    uint32_t *pus = calloc(machine->pu_count, sizeof *pus);
    uint32_t devices = 0, left_out = 0;

    for (uint32_t i = 0; i < layout->box_count; i++) {
        const struct draw_box *box = &layout->boxes[i];
        const struct draw_rect *r = &box->rect;

        cr_assert(r->x >= 0 && r->y >= 0 && r->w > 0 && r->h > 0,
                  "%s: box %u of kind %d: %g %g %g %g", name, i, box->kind, r->x, r->y, r->w, r->h);
        cr_assert_eq(box->kind == DRAW_CANVAS, i == 0);
        if (!i)
            continue;
        cr_assert_lt(box->parent, i);
        cr_assert(inside(r, &layout->boxes[box->parent].rect),
                  "%s: box %u of kind %d is not within its parent of kind %d", name, i, box->kind,
                  layout->boxes[box->parent].kind);
        for (uint32_t j = 1; j < i; j++)
            if (layout->boxes[j].parent == box->parent)
                cr_assert(!overlap(r, &layout->boxes[j].rect),
                          "%s: boxes %u and %u of kinds %d and %d overlap", name, j, i,
                          layout->boxes[j].kind, box->kind);
        if (box->kind == DRAW_NODE)
            nodes[box->subject]++;
        if (box->kind == DRAW_PU)
            pus[box->subject]++;
        devices += box->kind == DRAW_DEVICE;
        left_out += box->kind == DRAW_MORE ? box->subject : 0;
    }
    for (uint32_t i = 0; i < machine->node_count; i++)
        cr_assert_eq(nodes[i], 1, "%s: node %u stands %u times", name, i, nodes[i]);
    for (uint32_t i = 0; i < machine->pu_count; i++)
        cr_assert_eq(pus[i], machine->pus[i].node != NUMOE_NONE, "%s: PU %u stands %u times", name,
                     i, pus[i]);
    cr_assert_eq(devices + left_out, machine->device_count);
    free(nodes);
    free(pus);
}

/* Text ends where the box of its mark says, and nothing is painted outside of the page. */
static void check_page(const struct picture *picture, const char *name)
{
    const struct draw_page *page = picture->page;

    for (uint32_t i = 0; i < page->shape_count; i++) {
        const struct draw_shape *shape = &page->shapes[i];
        double left = shape->rect.x, right = shape->rect.x + shape->rect.w;

        if (shape->kind == DRAW_SHAPE_TEXT) {
            double shift = shape->anchor == DRAW_RIGHT    ? shape->rect.w
                           : shape->anchor == DRAW_MIDDLE ? shape->rect.w / 2
                                                          : 0;

            left -= shift;
            right -= shift;
            cr_assert(*shape->text);
            cr_assert(draw_text_width(shape->text, shape->size, shape->bold) <=
                      shape->rect.w + 0.05);
        }
        if (shape->kind == DRAW_SHAPE_RECT)
            cr_assert(shape->rect.w > 0 && shape->rect.h > 0, "%s: a mark of no size", name);
        cr_assert(left >= -0.05 && right <= page->width + 0.05, "%s: \"%s\" from %g to %g", name,
                  shape->text ? shape->text : "", left, right);
        cr_assert(shape->rect.y >= 0 && shape->rect.y <= page->height);
    }
}

/* Tags that open and close in order, attributes in quotes, known entities: enough of XML. */
static void check_xml(const char *text, const char *name)
{
    char open[16][32];
    int depth = 0, roots = 0;

    for (const char *p = text; *p;) {
        if (*p == '&') {
            const char *end = strchr(p, ';');

            cr_assert(end && (!strncmp(p, "&amp;", 5) || !strncmp(p, "&lt;", 4) ||
                              !strncmp(p, "&gt;", 4) || !strncmp(p, "&quot;", 6)),
                      "%s: entity at %.20s", name, p);
            p = end + 1;
        } else if (*p == '<' && p[1] == '/') {
            cr_assert_gt(depth, 0, "%s: too many ends", name);
            depth--;
            cr_assert_eq(strncmp(p + 2, open[depth], strlen(open[depth])), 0, "%s: %.20s ends %s",
                         name, p, open[depth]);
            p = strchr(p, '>');
            cr_assert_not_null(p);
            p++;
        } else if (*p == '<') {
            size_t length = strcspn(p + 1, " />");
            bool quoted = false;

            cr_assert(length > 0 && length < sizeof open[0] && isalpha((unsigned char)p[1]));
            cr_assert_lt(depth, 16);
            memcpy(open[depth], p + 1, length);
            open[depth][length] = 0;
            roots += depth == 0;
            for (p += 1 + length; *p && (quoted || *p != '>'); p++) {
                cr_assert_neq(*p, '<', "%s: < within a tag", name);
                if (*p == '"')
                    quoted = !quoted;
            }
            cr_assert_eq(*p, '>');
            depth += p[-1] != '/';
            p++;
        } else {
            cr_assert(*p != '>' && ((unsigned char)*p >= 0x20 || *p == '\n'), "%s: byte %d", name,
                      *p);
            cr_assert(depth > 0 || *p == '\n', "%s: text outside of the root", name);
            p++;
        }
    }
    cr_assert_eq(depth, 0, "%s: %d tags are open", name, depth);
    cr_assert_eq(roots, 1);
}

/* No attribute that is a size is negative. */
static void check_sizes(const char *text, const char *name)
{
    static const char *const sizes[] = {
        " width=\"-",        " height=\"-", " rx=\"-", " font-size=\"-",
        " stroke-width=\"-", "nan",         "inf"};

    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        cr_assert_null(strstr(text, sizes[i]), "%s: %s", name, sizes[i]);
}

static char *svg_of(const struct picture *picture)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    return text_of(cr_assert_eq(draw_svg(picture->page, out, &error), 0, "%s", error.message));
}

Test(draw, boxes_stand_within_their_parents_and_beside_their_siblings, .timeout = 300)
{
    for (int i = 0; i < MACHINE_COUNT; i++) {
        struct picture picture = draw(machine_of(machines[i]), 1, "a model");

        lay_out(&picture);
        check_layout(&picture, machines[i]);
        check_page(&picture, machines[i]);
        forget(&picture);
    }
}

Test(draw, svg_is_well_formed_and_names_every_node, .timeout = 120)
{
    for (int i = 0; i < MACHINE_COUNT; i++) {
        struct picture picture = draw(machine_of(machines[i]), 1, "a model");
        char *text;

        lay_out(&picture);
        text = svg_of(&picture);
        check_xml(text, machines[i]);
        check_sizes(text, machines[i]);
        for (uint32_t n = 0; n < picture.machine->node_count; n++) {
            char words[32];

            snprintf(words, sizeof words, ">Node %u<", picture.machine->nodes[n].os_index);
            cr_assert_not_null(strstr(text, words), "%s: no \"%s\"", machines[i], words);
        }
        free(text);
        forget(&picture);
    }
}

Test(draw, the_live_machine_can_be_drawn, .timeout = 60)
{
    struct picture picture = draw(machine_of(NULL), 1, "a model");
    char *text;

    lay_out(&picture);
    check_layout(&picture, "live");
    check_page(&picture, "live");
    text = svg_of(&picture);
    check_xml(text, "live");
    free(text);
    forget(&picture);
}

/* 147.2 GB on 32 nodes: the numbers that a reader would compare with the text. */
Test(draw, the_picture_says_what_the_plan_says, .timeout = 60)
{
    struct picture picture = draw(machine_of(EPYC), 43, "v4-flash");
    struct draw_memory all;
    char *text;

    lay_out(&picture);
    text = svg_of(&picture);
    cr_assert_not_null(strstr(text, ">numoe plan: v4-flash<"));
    cr_assert_not_null(
        strstr(text, "Experts take 137 GiB of the 512 GiB of 32 nodes; 128 workers"));
    cr_assert_not_null(strstr(text, ">4.28 experts<"));
    cr_assert_not_null(strstr(text, ">Domain 7<"));
    cr_assert_not_null(strstr(text, "distance between packages 32"));
    cr_assert_not_null(strstr(text, ">GPU cuda1<"));
    cr_assert_not_null(strstr(text, ">link 31.5 GB/s<"));
    cr_assert_not_null(strstr(text, "all experts 4.7 s"));
    cr_assert_not_null(strstr(text, ">workers 124-127<"));
    all = draw_total_memory(picture.layout);
    cr_assert_eq(all.capacity, 32ull << 34);
    cr_assert_eq(all.used + all.experts + all.kept + all.left, all.capacity);
    cr_assert_eq(all.experts, 43ull * 256 * 64 * 208896);
    cr_assert_eq(all.kept, 32ull << 28);
    cr_assert_lt(strlen(text), 200000);
    free(text);
    forget(&picture);
}

/* How fast, and which bound sets that, before anything else. */
Test(draw, the_picture_says_what_is_predicted, .timeout = 60)
{
    static const uint32_t sizes[][2] = {{512, 64}, {4096, 4096}, {1, 16384}};
    static const char *const heads[][2] = {{">64 tokens a pass<", ">512 tokens a pass<"},
                                           {">4096 tokens a pass<", ">4096 tokens a pass<"},
                                           {">1 token a pass<", ">16384 tokens a pass<"}};
    struct picture picture = draw(machine_of(EPYC), 43, "v4-flash");
    char *text;

    predict(&picture, NULL, 0);
    lay_out(&picture);
    check_layout(&picture, "with predictions");
    check_page(&picture, "with predictions");
    text = svg_of(&picture);
    check_xml(text, "with predictions");
    cr_expect_not_null(strstr(text, ">1 token a pass<"));
    cr_expect_not_null(strstr(text, ">4096 tokens a pass<"));
    cr_expect_not_null(strstr(text, ">58.00 tokens/s<"));
    cr_expect_not_null(strstr(text, ">745.6 tokens/s<"));
    cr_expect_not_null(strstr(text, ">link: 147 GB a pass over 27.7 GB/s = 5.31 s<"));
    cr_expect_not_null(strstr(text, ">CPUs and GPUs together<"));
    cr_expect_not_null(strstr(text, ">from memory bandwidth 307.2 GB/s (assumed), cores reading "));
    free(text);
    forget(&picture);

    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        picture = draw(machine_of(i ? EPYC : "pack:1 core:2 pu:1"), 1, "a model");
        predict(&picture, sizes[i], 2);
        lay_out(&picture);
        check_layout(&picture, heads[i][0]);
        check_page(&picture, heads[i][0]);
        text = svg_of(&picture);
        cr_expect_not_null(strstr(text, heads[i][0]));
        cr_expect_not_null(strstr(text, heads[i][1]));
        free(text);
        forget(&picture);
    }
}

/* Devices stand with the domain of their nodes; a device of nowhere stands outside. */
Test(draw, devices_stand_where_they_are_local, .timeout = 60)
{
    struct picture picture = draw(machine_of(EPYC), 1, "a model");
    uint32_t found = 0;

    picture.machine->devices[2].locality_known = false;
    lay_out(&picture);
    check_layout(&picture, "one device of nowhere");
    for (uint32_t i = 0; i < picture.layout->box_count; i++) {
        const struct draw_box *box = &picture.layout->boxes[i], *place;

        if (box->kind != DRAW_DEVICE)
            continue;
        place = &picture.layout->boxes[picture.layout->boxes[box->parent].parent];
        found++;
        if (box->subject == 2) {
            cr_assert_eq(place->kind, DRAW_OUTSIDE);
            continue;
        }
        cr_assert_eq(place->kind, DRAW_GROUP);
        cr_assert_eq(picture.layout->groups[place->subject].domain, box->subject + 1);
    }
    cr_assert_eq(found, 3);
    forget(&picture);
}

Test(draw, very_many_devices_are_counted_and_not_all_drawn, .timeout = 60)
{
    struct picture picture = draw(machine_of(EPYC), 1, "a model");
    struct numoe_machine *machine = picture.machine;
    struct numoe_device *all = calloc(300, sizeof *all), *had = machine->devices;
    uint32_t had_count = machine->device_count;

    for (int i = 0; i < 300; i++)
        all[i] = had[0];
    machine->devices = all;
    machine->device_count = 300;
    lay_out(&picture);
    check_layout(&picture, "300 devices");
    machine->devices = had;
    machine->device_count = had_count;
    free(all);
    forget(&picture);
}

/* Names come from files; a picture must not be broken, or made to lie, by them. */
Test(draw, any_bytes_in_names_leave_the_file_well_formed, .timeout = 60)
{
    static const char odd[] = "a<b>&\"'\x01\x7f\xff\xc3\x28\xe2\x80\xae\xed\xa0\x80\xf4\x90\x80\x80"
                              "\xef\xbf\xbf\xc0\x80\xc2\x85\t\n caf\xc3\xa9 </text></svg>";
    struct picture picture = draw(machine_of(EPYC), 1, odd);
    char *text, *source = picture.machine->source, *copy = malloc(20001);

    memset(copy, 'W', 20000);
    copy[20000] = 0;
    picture.machine->source = copy;
    snprintf(picture.machine->devices[0].name, sizeof picture.machine->devices[0].name, "%s",
             "<&>\xff\xc3 a name as long as can be");
    lay_out(&picture);
    check_page(&picture, "odd");
    text = svg_of(&picture);
    check_xml(text, "odd");
    cr_assert_not_null(strstr(text, "a&lt;b&gt;&amp;&quot;'?"));
    cr_assert_not_null(strstr(text, "caf\xc3\xa9"));
    cr_assert_null(strstr(text, "\xe2\x80\xae"));
    picture.machine->source = source;
    free(copy);
    free(text);
    forget(&picture);
}

Test(draw, text_is_cut_where_it_ends_and_no_later)
{
    for (double width = 0; width < 200; width += 7) {
        char *fit = draw_text_fit("Package 17, which is long", 11, true, width);

        cr_assert_not_null(fit);
        if (width > 12)
            cr_assert(draw_text_width(fit, 11, true) <= width + 0.05, "\"%s\" in %g", fit, width);
        free(fit);
    }
}

/* Each case is one character that must not come through; '?' stands for each of its bytes. */
Test(draw, damaged_characters_are_replaced)
{
    static const char *const bad[] = {"\x01",
                                      "\x7f",
                                      "\xff",
                                      "\xc3",
                                      "\x80",
                                      "\xc0\x80",
                                      "\xe0\x80\x80",
                                      "\xed\xa0\x80",
                                      "\xc2\x85",
                                      "\xf4\x90\x80\x80",
                                      "\xef\xbf\xbf",
                                      "\xe2\x80\xae",
                                      "\xf0\x8f\xbf\xbf"};

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char from[16], want[16] = "a", *fit;

        snprintf(from, sizeof from, "a%sb", bad[i]);
        memset(want + 1, '?', strlen(bad[i]));
        want[strlen(bad[i]) + 1] = 'b';
        fit = draw_text_fit(from, 10, false, 1000);
        cr_assert_str_eq(fit, want, "case %zu: \"%s\"", i, fit);
        free(fit);
    }
}

Test(draw, lines_are_wrapped_at_words)
{
    char **lines = NULL;
    uint32_t count = 0;
    double width = draw_text_width("one two three", 12, false);

    cr_assert_eq(draw_text_wrap("one two three four five six seven", 12, width, 3, &lines, &count),
                 0);
    cr_assert_eq(count, 3);
    cr_assert_str_eq(lines[0], "one two three");
    cr_assert_str_eq(lines[1], "four five six");
    cr_assert_str_eq(lines[2], "seven");
    cr_assert_eq(draw_text_wrap("one two three four five six seven", 12, width, 2, &lines, &count),
                 0);
    cr_assert_eq(count, 5);
    cr_assert(strstr(lines[4], "..."));
    cr_assert_eq(draw_text_wrap("", 12, width, 2, &lines, &count), 0);
    cr_assert_eq(count, 5);
    for (uint32_t i = 0; i < count; i++)
        free(lines[i]);
    free(lines);
}

Test(draw, numbers_are_short)
{
    char text[32];

    cr_assert_str_eq(draw_bytes(text, 0), "0 B");
    cr_assert_str_eq(draw_bytes(text, 1000), "1000 B");
    cr_assert_str_eq(draw_bytes(text, 16ull << 30), "16.0 GiB");
    cr_assert_str_eq(draw_bytes(text, (16ull << 40) - 1), "16.0 TiB");
    cr_assert_str_eq(draw_bytes(text, (1ull << 40) - 1), "1.00 TiB");
    cr_assert_str_eq(draw_bytes(text, UINT64_MAX), "16.0 EiB");
    cr_assert_str_eq(draw_gib(text, 0), "0");
    cr_assert_str_eq(draw_gib(text, 9995ull << 20), "9.76");
    cr_assert_str_eq(draw_gib(text, 128ull << 30), "128");
}

Test(draw, a_full_disk_is_an_error, .timeout = 60)
{
    struct picture picture = draw(machine_of(EPYC), 1, "a model");
    int (*const writers[])(const struct draw_page *, FILE *, struct numoe_error *) = {draw_svg,
                                                                                      draw_png};

    lay_out(&picture);
    for (int i = 0; i < (draw_png_available() ? 2 : 1); i++) {
        struct numoe_error error = NUMOE_ERROR_INIT;
        FILE *full = fopen("/dev/full", "we");

        cr_assert_not_null(full);
        cr_assert_eq(writers[i](picture.page, full, &error), -ENOSPC);
        cr_assert_not_null(strstr(error.message, "could not be written"));
        fclose(full);
    }
    forget(&picture);
}

Test(draw, png_is_as_large_as_the_page, .timeout = 120)
{
    struct picture picture = draw(machine_of(EPYC), 1, "a model");
    struct numoe_error error = NUMOE_ERROR_INIT;
    unsigned char *bytes = NULL;
    size_t size = 0;
    FILE *out = open_memstream((char **)&bytes, &size);

    lay_out(&picture);
    if (!draw_png_available()) {
        cr_assert_eq(draw_png(picture.page, out, &error), -ENOTSUP);
        cr_assert_not_null(strstr(error.message, "without cairo"));
    } else {
        cr_assert_eq(draw_png(picture.page, out, &error), 0, "%s", error.message);
        fflush(out);
        cr_assert_gt(size, 24);
        cr_assert_eq(memcmp(bytes, "\x89PNG\r\n\x1a\n", 8), 0);
        cr_assert_eq(bytes[18] << 8 | bytes[19], 1600);
        cr_assert_eq(bytes[22] << 8 | bytes[23], (int)picture.page->height);
    }
    fclose(out);
    free(bytes);
    forget(&picture);
}
