/*
 * Calls that must be refused: with the right code, a sentence that says why, and nothing written
 * or left behind (the teardown counts what would be).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "soak_walk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* code came from call; it must be one of two (the same twice if there is one only), and said. */
static int must_be(struct soak *soak, const char *call, int code, const struct numoe_error *error,
                   int want, int or)
{
    if (code != want && code != or)
        return soak_fail(soak, SOAK_WRONG, "%s returned %d and not %d: %s", call, code, want,
                         error->message);
    if (error->code != code || !*error->message)
        return soak_fail(soak, SOAK_WRONG, "%s returned %d, but its error says %d: \"%s\"", call,
                         code, error->code, error->message);
    return 0;
}

static int refuse_open(struct soak *soak, struct soak_random *random)
{
    static const char *const broken[] = {"pack:two core:1", "numa:2(memory=16GB core:1 pu:1",
                                         "pack:2 pu:1 core:2", "/proc/self/maps"};
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe *context;
    int rc;

    if (soak_once(random, 4))
        options.isa = "abacus";
    else
        options.topology = broken[soak_below(random, sizeof broken / sizeof broken[0])];
    soak_doing(soak, "opening a context on \"%s\", to be refused",
               options.isa ? options.isa : options.topology);
    rc = numoe_open(&options, &context, &error);
    if (!rc)
        numoe_close(context);
    /* what is neither a file nor a topology may be called either */
    return must_be(soak, "numoe_open", rc, &error, -EINVAL, -ENOENT);
}

static int refuse_create(struct soak *soak, struct soak_random *random,
                         const struct soak_model *model)
{
    struct numoe_model_desc desc = model->desc;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *made;
    int want = -EINVAL, rc;

    switch (soak_below(random, 3)) {
    case 0:
        desc.hidden = 0;
        break;
    case 1:
        desc.activation.kind = (enum numoe_activation_kind)99;
        break;
    default: /* petabytes */
        desc.layers = desc.experts = 1 << 16;
        desc.hidden = desc.intermediate = 1 << 14;
        want = -ENOSPC;
        break;
    }
    soak_doing(soak, "creating a model, to be refused");
    rc = numoe_model_create(model->context->numoe, &desc, &made, &error);
    if (!rc)
        numoe_model_destroy(made);
    return must_be(soak, "numoe_model_create", rc, &error, want,
                   want == -ENOSPC ? -EOVERFLOW : want);
}

static int refuse_expert(struct soak *soak, struct soak_random *random, struct soak_model *model)
{
    const struct soak_expert *source = &model->experts[0];
    uint64_t layer = 0, expert = 0;
    struct numoe_expert_weights weights;
    struct numoe_error error = NUMOE_ERROR_INIT;
    int rc;

    soak_expert_weights(source, &weights);
    switch (soak_below(random, 3)) {
    case 0:
        layer = model->desc.layers;
        break;
    case 1:
        expert = model->desc.experts + soak_below(random, 3);
        break;
    default:
        weights.down.codes = NULL;
        break;
    }
    soak_doing(soak, "loading an expert, to be refused");
    rc = numoe_expert_load(model->model, layer, expert, &weights, &error);
    return must_be(soak, "numoe_expert_load", rc, &error, -EINVAL, -EINVAL);
}

static int refuse_call(struct soak *soak, struct soak_random *random, struct soak_model *model)
{
    const uint64_t what = soak_below(random, 3);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct soak_batch b;
    uint64_t layer;
    int rc = soak_batch_make(soak, random, model, &b);

    if (rc)
        return rc;
    if (!b.call.tokens) /* of nothing, nothing is refused */
        goto out;
    layer = b.layer;
    if (what == 0) {
        layer = model->desc.layers + soak_below(random, 2);
    } else if (what == 1) {
        b.call.strict = true;
        if (b.call.id_bytes == 8)
            ((int64_t *)b.ids)[b.call.tokens * b.call.top_k - 1] = (int64_t)model->desc.experts;
        else
            ((int32_t *)b.ids)[b.call.tokens * b.call.top_k - 1] = (int32_t)model->desc.experts;
    } else {
        b.call.top_k = soak_once(random, 2) ? 0 : 65;
    }
    soak_doing(soak, "a call, to be refused");
    soak_batch_reset(&b);
    rc = numoe_forward(model->model, layer, &b.call, &b.have, &error);
    rc = must_be(soak, "numoe_forward", rc, &error, -EINVAL, -EINVAL);
    if (!rc && memcmp(b.memory, b.base, b.memory_bytes) != 0)
        rc = soak_fail(soak, SOAK_WRONG, "a refused call wrote to its outputs");
out:
    soak_batch_free(&b);
    return rc;
}

/* Cut some bytes off a file of the folder, or take it away. */
static int damage(struct soak *soak, struct soak_random *random, const char *folder, bool *gone)
{
    DIR *directory = opendir(folder);
    struct dirent *entry;
    char name[256] = "";
    struct stat status;
    uint64_t seen = 0;
    int rc = 0;

    if (!directory)
        return soak_fail(soak, -errno, "%s cannot be read", folder);
    while ((entry = readdir(directory)))
        if (strstr(entry->d_name, ".safetensors") && !strstr(entry->d_name, ".json") &&
            soak_once(random, ++seen))
            snprintf(name, sizeof name, "%s", entry->d_name);
    *gone = soak_once(random, 3);
    if (*gone) {
        rc = unlinkat(dirfd(directory), name, 0);
    } else {
        int fd = openat(dirfd(directory), name, O_RDWR | O_CLOEXEC);

        rc = fd < 0 || fstat(fd, &status) ||
             ftruncate(fd, status.st_size - (off_t)soak_between(random, 1, 900));
        if (fd >= 0)
            close(fd);
    }
    if (rc)
        rc = soak_fail(soak, -errno, "%s in %s cannot be damaged", name, folder);
    closedir(directory);
    return rc;
}

static int refuse_load(struct soak *soak, struct soak_random *random,
                       const struct soak_model *model)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *made;
    char *folder;
    bool gone = false;
    int rc;

    if (soak_once(random, 4)) {
        rc =
            numoe_model_load(model->context->numoe, "/nonexistent/checkpoint", NULL, &made, &error);
        if (!rc)
            numoe_model_destroy(made);
        return must_be(soak, "numoe_model_load of nothing", rc, &error, -ENOENT, -ENOENT);
    }
    rc = soak_folder_make(soak, random, &folder);
    if (rc)
        return rc;
    rc = damage(soak, random, folder, &gone);
    soak_doing(soak, "loading a damaged checkpoint, to be refused");
    if (!rc) {
        rc = numoe_model_load(model->context->numoe, folder, NULL, &made, &error);
        if (!rc)
            numoe_model_destroy(made);
        rc = must_be(soak, "numoe_model_load of a damaged checkpoint", rc, &error,
                     gone ? -ENOENT : -EBADMSG, gone ? -ENOENT : -EBADMSG);
    }
    soak_folder_drop(folder);
    return rc;
}

static int refuse_pool(struct soak *soak, struct soak_random *random)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool *pool;
    int rc;

    config.worker_count = soak_once(random, 2) ? 0 : NUMOE_POOL_MAX_WORKERS + 1;
    soak_doing(soak, "a pool, to be refused");
    rc = numoe_pool_create(&config, &pool, &error);
    if (!rc)
        numoe_pool_destroy(pool);
    return must_be(soak, "numoe_pool_create", rc, &error, -EINVAL, -EINVAL);
}

int soak_step_refused(struct soak *soak, struct soak_random *random, struct soak_model *model)
{
    switch (soak_below(random, 8)) {
    case 0:
        return refuse_open(soak, random);
    case 1:
        return refuse_create(soak, random, model);
    case 2:
        return refuse_expert(soak, random, model);
    case 3:
    case 4:
        return refuse_load(soak, random, model);
    case 5:
        return refuse_pool(soak, random);
    default:
        return refuse_call(soak, random, model);
    }
}
