/* A plan as a file: JSON. SPDX-License-Identifier: Apache-2.0 */
#include "fuzz.h"
#include "support/topo_checks.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Slices that are looked at one by one. */
enum { MOST_LOOKED_AT = 20000 };

static char *json_of(const struct numoe_plan *plan)
{
    struct fuzz_print print;

    fuzz_print_open(&print);
    check_that(!numoe_plan_print_json(plan, print.out));
    return fuzz_print_take(&print);
}

static void reload(const struct numoe_plan *plan)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    char *once = json_of(plan), *twice;
    struct numoe_plan *loaded = NULL;

    check_that(!numoe_plan_parse(once, strlen(once), "again", &loaded, &error), "%s",
               error.message);
    twice = json_of(loaded);
    check_that(!strcmp(once, twice), "loaded and printed again it differs");
    free(once);
    free(twice);
    numoe_plan_free(loaded);
}

/* Whether some machine is the plan's is answered, whatever the plan is. */
static void compare(const struct numoe_plan *plan)
{
    static struct numoe_machine *machine;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan_changes changes;
    int rc;

    if (!machine)
        check_that(!numoe_machine_load("pack:2 [numa(memory=16GB)] core:2 pu:2", &machine, &error));
    check_that(!numoe_plan_compare(plan, machine, &changes));
    for (uint32_t i = 0; i < changes.count; i++)
        check_that(*changes.list[i]);
    rc = numoe_plan_check(plan, machine, NULL, &error);
    check_that(rc == (changes.count ? -ESTALE : 0), "%d: %s", rc, error.message);
    if (rc)
        fuzz_check_error(rc, &error);
    numoe_plan_changes_free(&changes);
}

static void group_nodes(const struct numoe_plan *plan)
{
    struct numoe_plan_reach reach[NUMOE_REACHES];
    uint32_t *group = calloc(plan->node_count, sizeof *group);

    check_that(group);
    numoe_plan_reaches(plan, reach);
    for (unsigned r = 0; r < NUMOE_REACHES; r++) {
        check_that(reach[r].groups >= 1 && reach[r].groups <= plan->node_count);
        numoe_plan_groups(plan, (enum numoe_reach)r, group);
        for (uint32_t n = 0; n < plan->node_count; n++)
            check_that(group[n] < reach[r].groups);
    }
    check_that(numoe_plan_best_reach(plan, reach, 4096, 64, 2) < NUMOE_REACHES);
    free(group);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    const char *path = fuzz_path("plan.json");
    struct numoe_plan *plan = NULL;
    struct fuzz_print print;
    char *text;
    int rc;

    fuzz_write(path, data, size, 0);
    rc = numoe_plan_load(path, &plan, &error);
    if (rc) {
        fuzz_check_error(rc, &error);
        return 0;
    }
    check_plan_alone(plan);
    if (plan->shape.layers < MOST_LOOKED_AT && plan->shape.experts < MOST_LOOKED_AT &&
        plan->shape.layers * plan->shape.experts * plan->node_count < MOST_LOOKED_AT)
        check_boundaries(plan);
    fuzz_print_open(&print);
    numoe_plan_print(plan, print.out);
    text = fuzz_text(data, size);
    check_that(text, "JSON with a zero byte");
    fuzz_check_text(fuzz_print_take(&print), text);
    free(print.text);
    free(text);
    reload(plan);
    compare(plan);
    group_nodes(plan);
    numoe_plan_free(plan);
    return 0;
}
