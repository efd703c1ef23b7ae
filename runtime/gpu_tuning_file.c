/* Tables of kernels' times as files. SPDX-License-Identifier: Apache-2.0 */
#include "gpu_tuning_file.h"

#include "files.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TUNING_LIMIT ((uint64_t)1 << 20)

struct reading {
    const char *path;
    struct numoe_error *error;
};

/* That an object has no keys but these. */
static int known_keys(const struct reading *r, const char *what, json_t *object,
                      const char *const *keys)
{
    const char *key;
    json_t *value;

    if (!json_is_object(object))
        return numoe_error_set(r->error, -EBADMSG, r->path, "%s is no object", what);
    json_object_foreach(object, key, value)
    {
        unsigned i;
        for (i = 0; keys[i] && strcmp(keys[i], key); i++)
            ;
        if (!keys[i])
            return numoe_error_set(r->error, -EBADMSG, r->path, "key \"%s\" of %s is not known",
                                   numoe_quote(key).text, what);
    }
    return 0;
}

static int whole(const struct reading *r, const char *what, const json_t *object, const char *key,
                 uint64_t most, uint64_t *out)
{
    const json_t *value = json_object_get(object, key);

    if (!json_is_integer(value) || json_integer_value(value) < 1 ||
        (uint64_t)json_integer_value(value) > most)
        return numoe_error_set(r->error, -EBADMSG, r->path,
                               "\"%s\" of %s is not a number of 1 to %llu", key, what,
                               (unsigned long long)most);
    *out = (uint64_t)json_integer_value(value);
    return 0;
}

static int read_device(const struct reading *r, json_t *device, struct numoe_gpu_numbers *n)
{
    static const char *const keys[] = {"compute_capability", "multiprocessors", "shared_bytes",
                                       "l2_bytes", NULL};
    const char *capability = json_string_value(json_object_get(device, keys[0]));
    uint64_t multiprocessors = 0;
    int end = 0, rc = known_keys(r, "\"device\"", device, keys);

    if (rc)
        return rc;
    if (!capability || sscanf(capability, "%2d.%2d%n", &n->major, &n->minor, &end) != 2 ||
        capability[end] || n->major < 0 || n->minor < 0)
        return numoe_error_set(r->error, -EBADMSG, r->path,
                               "\"compute_capability\" of \"device\" is not like \"9.0\"");
    rc = whole(r, "\"device\"", device, keys[1], UINT32_MAX, &multiprocessors);
    n->multiprocessors = (uint32_t)multiprocessors;
    if (!rc)
        rc = whole(r, "\"device\"", device, keys[2], INT64_MAX, &n->shared_bytes);
    return rc ? rc : whole(r, "\"device\"", device, keys[3], INT64_MAX, &n->l2_bytes);
}

static int read_point(const struct reading *r, const char *shape, json_t *object,
                      struct numoe_gpu_tuned_point *point)
{
    static const char *const keys[] = {"tokens", "ms", NULL};
    const json_t *tokens = json_object_get(object, "tokens");
    json_t *times = json_object_get(object, "ms");
    int rc = known_keys(r, "a point", object, keys);

    if (!rc && !json_is_number(tokens))
        rc = numoe_error_set(r->error, -EBADMSG, r->path, "a point of %s has no number \"tokens\"",
                             shape);
    if (!rc)
        rc = known_keys(r, "\"ms\"", times, numoe_gpu_form_names + 1);
    if (rc)
        return rc;
    point->tokens = json_number_value(tokens);
    for (int f = 1; f <= NUMOE_GPU_FORMS; f++) {
        const json_t *ms = json_object_get(times, numoe_gpu_form_names[f]);
        if (ms && !(json_number_value(ms) > 0))
            return numoe_error_set(r->error, -EBADMSG, r->path,
                                   "\"%s\" at %g tokens of %s is not a time above 0",
                                   numoe_gpu_form_names[f], point->tokens, shape);
        point->ms[f] = json_number_value(ms);
    }
    return 0;
}

static int read_shape(const struct reading *r, size_t index, json_t *object,
                      struct numoe_gpu_tuned_shape *s)
{
    static const char *const keys[] = {"hidden", "intermediate", "points", NULL};
    const json_t *points = json_object_get(object, "points");
    const size_t count = json_array_size(points);
    char what[32];
    int rc;

    snprintf(what, sizeof what, "shape %zu", index + 1);
    rc = known_keys(r, what, object, keys);
    if (!rc)
        rc = whole(r, what, object, "hidden", UINT32_MAX, &s->hidden);
    if (!rc)
        rc = whole(r, what, object, "intermediate", UINT32_MAX, &s->intermediate);
    if (!rc && (count < 1 || count > NUMOE_GPU_TUNED_POINTS))
        rc = numoe_error_set(r->error, -EBADMSG, r->path,
                             "\"points\" of %s is not an array of 1 to %d", what,
                             NUMOE_GPU_TUNED_POINTS);
    for (size_t i = 0; !rc && i < count; i++)
        rc = read_point(r, what, json_array_get(points, i), &s->points[s->point_count++]);
    return rc;
}

int numoe_gpu_tuning_load(const char *path, struct numoe_gpu_tuning *tuning,
                          struct numoe_error *error)
{
    static const char *const keys[] = {"device", "shapes", NULL};
    const struct reading r = {path, error};
    const json_t *shapes;
    json_t *root;
    size_t count;
    int rc = numoe_file_json(path, TUNING_LIMIT, &root, error);

    if (rc)
        return rc;
    *tuning = (struct numoe_gpu_tuning){0};
    shapes = json_object_get(root, "shapes");
    count = json_array_size(shapes);
    rc = known_keys(&r, "the table", root, keys);
    if (!rc)
        rc = read_device(&r, json_object_get(root, "device"), &tuning->device);
    if (!rc && (count < 1 || count > NUMOE_GPU_TUNED_SHAPES))
        rc = numoe_error_set(error, -EBADMSG, path, "\"shapes\" is not an array of 1 to %d",
                             NUMOE_GPU_TUNED_SHAPES);
    for (size_t i = 0; !rc && i < count; i++)
        rc = read_shape(&r, i, json_array_get(shapes, i), &tuning->shapes[tuning->shape_count++]);
    json_decref(root);
    return rc ? rc : numoe_gpu_tuning_check(tuning, path, error);
}

static json_t *shape_json(const struct numoe_gpu_tuned_shape *s)
{
    json_t *points = json_array();

    for (uint32_t i = 0; i < s->point_count; i++) {
        json_t *times = json_object();
        for (int f = 1; f <= NUMOE_GPU_FORMS; f++)
            if (s->points[i].ms[f] > 0)
                json_object_set_new(times, numoe_gpu_form_names[f], json_real(s->points[i].ms[f]));
        json_array_append_new(points,
                              json_pack("{s:f, s:o}", "tokens", s->points[i].tokens, "ms", times));
    }
    return json_pack("{s:I, s:I, s:o}", "hidden", (json_int_t)s->hidden, "intermediate",
                     (json_int_t)s->intermediate, "points", points);
}

int numoe_gpu_tuning_save(const char *path, const struct numoe_gpu_tuning *t,
                          struct numoe_error *error)
{
    json_t *shapes = json_array(), *root;
    char capability[32], *beside = NULL;
    int rc = 0;

    snprintf(capability, sizeof capability, "%d.%d", t->device.major, t->device.minor);
    for (uint32_t i = 0; i < t->shape_count; i++)
        json_array_append_new(shapes, shape_json(&t->shapes[i]));
    root = json_pack("{s:{s:s, s:I, s:I, s:I}, s:o}", "device", "compute_capability", capability,
                     "multiprocessors", (json_int_t)t->device.multiprocessors, "shared_bytes",
                     (json_int_t)t->device.shared_bytes, "l2_bytes", (json_int_t)t->device.l2_bytes,
                     "shapes", shapes);
    if (!root || asprintf(&beside, "%s.new", path) < 0) {
        json_decref(root);
        return numoe_error_set(error, -ENOMEM, path, "out of memory");
    }
    errno = 0;
    if (json_dump_file(root, beside, JSON_INDENT(1) | JSON_REAL_PRECISION(5)) ||
        rename(beside, path)) {
        rc = errno ? -errno : -EIO;
        numoe_error_set(error, rc, path, "cannot be written: %s", strerror(-rc));
        unlink(beside);
    }
    free(beside);
    json_decref(root);
    return rc;
}
