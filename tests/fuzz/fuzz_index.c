/*
 * A checkpoint directory: config.json, the index, headers of shards. The input is text in parts,
 * each after a line that names a file:
 *
 *   ==config.json
 *   {...}
 *   ==model-00001-of-00002.safetensors 4096
 *   {header}
 *
 * A shard's header gets its length before it and, after it, as many bytes of zeros as its line
 * says. Other names are passed over; a name that comes twice is the last.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "fuzz.h"
#include "support/topo_checks.h"

#include "checkpoint.h"
#include "model.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const names[] = {"config.json", "model.safetensors.index.json",
                                    "model.safetensors", "model-00001-of-00002.safetensors",
                                    "model-00002-of-00002.safetensors"};
enum { FILES = sizeof names / sizeof names[0] };

static void write_part(const char *line, const char *text, size_t length)
{
    size_t name = strcspn(line, " \n");

    for (size_t i = 0; i < FILES; i++) {
        uint8_t *framed;

        if (strlen(names[i]) != name || memcmp(names[i], line, name) != 0)
            continue;
        if (i < 2) {
            fuzz_write(fuzz_path(names[i]), text, length, 0);
            return;
        }
        framed = malloc(8 + length);
        check_that(framed);
        for (int b = 0; b < 8; b++)
            framed[b] = (uint8_t)((uint64_t)length >> 8 * b);
        memcpy(framed + 8, text, length);
        fuzz_write(fuzz_path(names[i]), framed, 8 + length,
                   line[name] == ' ' ? (uint32_t)strtoul(line + name, NULL, 10) : 0);
        free(framed);
    }
}

static void write_parts(const char *text)
{
    for (size_t i = 0; i < FILES; i++)
        unlink(fuzz_path(names[i]));
    while (text && !strncmp(text, "==", 2)) {
        const char *body = strchr(text, '\n'), *end;

        if (!body)
            return;
        body++;
        end = !strncmp(body, "==", 2) ? body : strstr(body, "\n==");
        write_part(text + 2, body, end ? (size_t)(end - body) : strlen(body));
        text = end && *end == '\n' ? end + 1 : end;
    }
}

static void log_line(void *user, enum numoe_log_level level, const char *message)
{
    (void)level;
    ++*(uint32_t *)user;
    check_that(*message && !strchr(message, '\n'), "%s", message);
}

/* Where every expert lies: inside its file. */
static void check_experts(const struct numoe_checkpoint *checkpoint)
{
    const struct numoe_model_desc *desc = numoe_checkpoint_desc(checkpoint);
    uint64_t total = 0, one = numoe_checkpoint_expert_bytes(checkpoint);

    for (uint64_t l = 0; l < desc->layers; l++)
        for (uint64_t e = 0; e < desc->experts; e++) {
            struct numoe_extent parts[NUMOE_PART_COUNT];
            numoe_checkpoint_expert(checkpoint, l, e, parts);
            for (int p = 0; p < NUMOE_PART_COUNT; p++) {
                struct numoe_file_id id;

                check_that(parts[p].file < numoe_checkpoint_file_count(checkpoint));
                check_that(numoe_checkpoint_file(checkpoint, parts[p].file, &id));
                check_that(parts[p].offset <= id.bytes &&
                           parts[p].bytes <= id.bytes - parts[p].offset);
                check_that(parts[p].bytes || p >= NUMOE_PART_GATE_BIAS);
            }
            total += one;
        }
    check_that(total == numoe_checkpoint_bytes(checkpoint));
}

/* It can be planned, or it is said why not. */
static void plan_model(const struct numoe_model_desc *desc)
{
    static struct numoe_machine *machine;
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan;
    int rc;

    if (!machine)
        check_that(!numoe_machine_load("pack:2 [numa(memory=16GB)] core:3 pu:2", &machine, &error));
    rc = numoe_model_expert_shape(desc, &request.shape, &error);
    if (rc) {
        fuzz_check_error(rc, &error);
        return;
    }
    rc = numoe_plan_create(machine, &request, &plan, &error);
    if (rc) {
        fuzz_check_error(rc, &error);
        check_that(rc == -ENOSPC || rc == -EOVERFLOW, "%d: %s", rc, error.message);
        return;
    }
    check_plan(machine, plan);
    numoe_plan_free(plan);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_checkpoint *checkpoint = NULL;
    char *text = fuzz_text(data, size);
    uint32_t lines = 0;
    struct numoe_log log = {log_line, &lines};
    const struct numoe_model_desc *desc;
    int rc;

    if (!text)
        return -1;
    write_parts(text);
    free(text);
    rc = numoe_checkpoint_open(fuzz_directory(), &(struct numoe_checkpoint_options){.log = &log},
                               &checkpoint, &error);
    if (rc) {
        fuzz_check_error(rc, &error);
        return 0;
    }
    desc = numoe_checkpoint_desc(checkpoint);
    check_that(desc->layers && desc->experts && desc->hidden && desc->intermediate);
    check_that(desc->experts_per_token && desc->experts_per_token <= desc->experts);
    check_that(numoe_checkpoint_family(checkpoint));
    check_experts(checkpoint);
    plan_model(desc);
    numoe_checkpoint_close(checkpoint);
    return 0;
}
