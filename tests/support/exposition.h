/*
 * exposition.h - reads Prometheus' text exposition format (0.0.4) and says what is wrong with it.
 *
 * Stricter than the format where its tools complain: HELP and TYPE come before every metric's
 * samples, counters end in _total, and a histogram's samples are buckets, sum, count.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_TESTS_EXPOSITION_H
#define NUMOE_TESTS_EXPOSITION_H

#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXPOSITION_METRICS = 96 };

struct exposition_sample {
    char series[512]; /* name and labels as written */
    double value;
};

struct exposition {
    struct exposition_sample *samples;
    size_t count;
    char metrics[EXPOSITION_METRICS][128]; /* that had a TYPE; the last is being read */
    size_t metric_count;
    char help[128], type[16];
    /* the histogram that is being read: its labels, its last bucket, what must come next */
    char labels[256];
    double bound, bucket;
    enum { EXPECT_NEW, EXPECT_BUCKET, EXPECT_COUNT } next;
    char wrong[512];
};

__attribute__((format(printf, 2, 3))) static inline const char *
exposition_wrong(struct exposition *e, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(e->wrong, sizeof e->wrong, format, args);
    va_end(args);
    return e->wrong;
}

static inline void exposition_free(struct exposition *e)
{
    free(e->samples);
    e->samples = NULL;
    e->count = 0;
}

static inline size_t exposition_name(const char *p)
{
    size_t n = 0;

    while (isalpha((unsigned char)p[n]) || p[n] == '_' || (n && isdigit((unsigned char)p[n])))
        n++;
    return n;
}

/* Length of {name="value",...}, in which \\, \" and \n are escaped; 0: malformed. */
static inline size_t exposition_labels(const char *p)
{
    size_t n = 1;

    for (;;) {
        size_t name = exposition_name(p + n);

        n += name;
        if (!name || p[n] != '=' || p[n + 1] != '"')
            return 0;
        for (n += 2; p[n] != '"'; n++) {
            if (!p[n] || (p[n] == '\\' && (!p[++n] || !strchr("\\\"n", p[n]))))
                return 0;
        }
        if (p[++n] == '}')
            return n + 1;
        if (p[n++] != ',')
            return 0;
    }
}

/* A metric is over. */
static inline const char *exposition_end(struct exposition *e)
{
    return e->next == EXPECT_BUCKET  ? exposition_wrong(e, "%s: no +Inf or no sum", e->labels)
           : e->next == EXPECT_COUNT ? exposition_wrong(e, "%s: no count", e->labels)
                                     : NULL;
}

static inline const char *exposition_comment(struct exposition *e, const char *line)
{
    const char *wrong = exposition_end(e);
    char name[128];

    if (wrong)
        return wrong;
    if (sscanf(line, "# HELP %127s", name) == 1) {
        strcpy(e->help, name);
        return NULL;
    }
    if (sscanf(line, "# TYPE %127s %15s", name, e->type) != 2)
        return NULL; /* any other comment */
    for (size_t m = 0; m < e->metric_count; m++)
        if (strcmp(e->metrics[m], name) == 0)
            return exposition_wrong(e, "%s has TYPE twice", name);
    if (strcmp(e->help, name) != 0)
        return exposition_wrong(e, "%s has no HELP", name);
    if (strcmp(e->type, "counter") != 0 && strcmp(e->type, "gauge") != 0 &&
        strcmp(e->type, "histogram") != 0)
        return exposition_wrong(e, "%s is no type", e->type);
    if (strcmp(e->type, "counter") == 0 &&
        (strlen(name) < 7 || strcmp(name + strlen(name) - 6, "_total") != 0))
        return exposition_wrong(e, "counter %s does not end in _total", name);
    if (e->metric_count == EXPOSITION_METRICS)
        return exposition_wrong(e, "more metrics than this test has room for");
    strcpy(e->metrics[e->metric_count++], name);
    return NULL;
}

/* suffix: what follows the metric's name. */
static inline const char *exposition_histogram(struct exposition *e, const char *suffix,
                                               const char *labels, double value)
{
    const char *le = strstr(labels, "le=\"");
    char others[256] = "";

    snprintf(others, sizeof others, "%.*s", (int)(le ? le - labels : (long)strlen(labels)), labels);
    others[strcspn(others, "}")] = 0;
    for (size_t n = strlen(others); n && (others[n - 1] == ',' || others[n - 1] == '{'); n--)
        others[n - 1] = 0;
    if (e->next != EXPECT_NEW && strcmp(others, e->labels) != 0)
        return exposition_wrong(e, "%s within the histogram of %s", others, e->labels);
    if (strcmp(suffix, "_bucket") == 0) {
        double bound = le ? strtod(le + 4, NULL) : NAN;

        if (e->next == EXPECT_COUNT || isnan(bound))
            return exposition_wrong(e, "%s: a bucket in the wrong place", others);
        if (e->next == EXPECT_BUCKET && bound <= e->bound)
            return exposition_wrong(e, "%s: bounds out of order", others);
        if (e->next == EXPECT_BUCKET && value < e->bucket)
            return exposition_wrong(e, "%s: falls from bucket to bucket", others);
        strcpy(e->labels, others);
        e->bound = bound;
        e->bucket = value;
        e->next = EXPECT_BUCKET;
    } else if (strcmp(suffix, "_sum") == 0) {
        if (e->next != EXPECT_BUCKET || !isinf(e->bound))
            return exposition_wrong(e, "%s: no +Inf before the sum", others);
        e->next = EXPECT_COUNT;
    } else {
        if (e->next != EXPECT_COUNT)
            return exposition_wrong(e, "%s: no sum before the count", others);
        if (value != e->bucket)
            return exposition_wrong(e, "%s: count is not that of +Inf", others);
        e->next = EXPECT_NEW;
    }
    return NULL;
}

static inline const char *exposition_sample(struct exposition *e, const char *line)
{
    const char *metric = e->metric_count ? e->metrics[e->metric_count - 1] : "";
    size_t name = exposition_name(line), labels = 0;
    bool histogram = strcmp(e->type, "histogram") == 0;
    struct exposition_sample sample;
    char suffix[16] = "", text[512] = "";
    char *end;

    if (!*metric || !name || name < strlen(metric) || strncmp(line, metric, strlen(metric)) != 0 ||
        name - strlen(metric) >= sizeof suffix)
        return exposition_wrong(e, "\"%s\" does not follow its TYPE", line);
    memcpy(suffix, line + strlen(metric), name - strlen(metric));
    if (histogram ? strcmp(suffix, "_bucket") && strcmp(suffix, "_sum") && strcmp(suffix, "_count")
                  : *suffix)
        return exposition_wrong(e, "\"%s\" does not follow its TYPE", line);
    if (line[name] == '{') {
        labels = exposition_labels(line + name);
        if (!labels || labels >= sizeof text)
            return exposition_wrong(e, "\"%s\" has a malformed label", line);
        memcpy(text, line + name, labels);
    }
    sample.value = strtod(line + name + labels, &end);
    if (line[name + labels] != ' ' || end == line + name + labels || *end)
        return exposition_wrong(e, "\"%s\" has no value", line);
    if (strcmp(e->type, "gauge") != 0 && !(sample.value >= 0))
        return exposition_wrong(e, "\"%s\" is negative", line);
    snprintf(sample.series, sizeof sample.series, "%.*s", (int)(name + labels), line);
    for (size_t i = 0; i < e->count; i++)
        if (strcmp(e->samples[i].series, sample.series) == 0)
            return exposition_wrong(e, "%s is there twice", sample.series);
    e->samples = realloc(e->samples, (e->count + 1) * sizeof *e->samples);
    e->samples[e->count++] = sample;
    return histogram ? exposition_histogram(e, suffix, text, sample.value) : NULL;
}

/* Returns NULL, or what is wrong; to be freed in either case. */
static inline const char *exposition_read(const char *text, struct exposition *e)
{
    const char *wrong = NULL;

    memset(e, 0, sizeof *e);
    if (*text && text[strlen(text) - 1] != '\n')
        return exposition_wrong(e, "no newline at the end");
    while (*text && !wrong) {
        size_t length = strcspn(text, "\n");
        char line[1024];

        snprintf(line, sizeof line, "%.*s", (int)length, text);
        if (*line)
            wrong = *line == '#' ? exposition_comment(e, line) : exposition_sample(e, line);
        text += length + 1;
    }
    return wrong ? wrong : exposition_end(e);
}

static inline bool exposition_value(const struct exposition *e, const char *series, double *value)
{
    for (size_t i = 0; i < e->count; i++)
        if (strcmp(e->samples[i].series, series) == 0) {
            *value = e->samples[i].value;
            return true;
        }
    return false;
}

#endif
