/* What tests of topo share. SPDX-License-Identifier: Apache-2.0 */
#ifndef TOPO_FIXTURE_H
#define TOPO_FIXTURE_H

#include "numoe_topo.h"

#include <criterion/criterion.h>

#define check_that cr_assert
#include "support/topo_checks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DATA NUMOE_TEST_DATA "/topo/data/"
#define EPYC DATA "epyc-7h12-2s-32n.xml"

static inline struct numoe_machine *machine_of(const char *source)
{
    struct numoe_machine *machine = NULL;
    struct numoe_error error = NUMOE_ERROR_INIT;
    int rc = numoe_machine_load(source, &machine, &error);

    cr_assert_eq(rc, 0, "%s: %s", source ? source : "live", error.message);
    return machine;
}

static inline uint32_t node_at(const struct numoe_machine *machine, uint32_t os_index)
{
    for (uint32_t i = 0; i < machine->node_count; i++)
        if (machine->nodes[i].os_index == os_index)
            return i;
    cr_assert_fail("there is no node %u", os_index);
    return NUMOE_NONE;
}

static inline const struct numoe_pu *cpu_at(const struct numoe_machine *machine, uint32_t os_index)
{
    for (uint32_t i = 0; i < machine->pu_count; i++)
        if (machine->pus[i].os_index == os_index)
            return &machine->pus[i];
    cr_assert_fail("there is no CPU %u", os_index);
    return NULL;
}

/* DeepSeek-V4-Flash: 147.2e9 bytes of experts. */
static const struct numoe_expert_shape v4_flash = {.layers = 43,
                                                   .experts = 256,
                                                   .slices = 64,
                                                   .slice_bytes = 208896,
                                                   .hidden = 4096,
                                                   .experts_per_token = 6};

/* Every expert over every node. */
static inline struct numoe_plan_request on_every_node(const struct numoe_expert_shape *shape)
{
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;

    request.shape = *shape;
    request.form = NUMOE_FORM_EVERY_NODE;
    return request;
}

static inline bool has_note(char *const *notes, uint32_t count, const char *words)
{
    for (uint32_t i = 0; i < count; i++)
        if (strstr(notes[i], words))
            return true;
    return false;
}

static inline struct numoe_plan *plan_of(const struct numoe_machine *machine,
                                         const struct numoe_plan_request *request)
{
    struct numoe_plan *plan = NULL;
    struct numoe_error error = NUMOE_ERROR_INIT;
    int rc = numoe_plan_create(machine, request, &plan, &error);

    cr_assert_eq(rc, 0, "%s: %s", error.where, error.message);
    return plan;
}

/* What a printing function writes, as a string to free. */
#define text_of(call)                                                                              \
    __extension__({                                                                                \
        char *text_ = NULL;                                                                        \
        size_t size_ = 0;                                                                          \
        FILE *out = open_memstream(&text_, &size_);                                                \
        cr_assert(out);                                                                            \
        call;                                                                                      \
        fclose(out);                                                                               \
        text_;                                                                                     \
    })

#endif
