/*
 * Whether a machine still is what a plan rests on.
 *
 * Both are told by the system's numbers of nodes and CPUs, so that it does not matter from which
 * description either of them was made. What the plan does not use may change.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "plan_build.h"
#include "topo_print.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum {
    SHOWN = 8,       /* changes in a message, as far as it holds them */
    LESS_MEMORY = 16 /* a node that lost so small a part of its memory is another one: a module is
                        more; what the kernel takes for itself at each start is less */
};

struct comparison {
    const struct numoe_plan *plan;
    const struct numoe_machine *machine;
    struct numoe_plan_changes *changes;
    uint32_t *node_at; /* plan node -> dense index in machine, or NUMOE_NONE */
    uint32_t *pu_at;   /* plan->machine.cpus -> dense index in machine, or NUMOE_NONE */
    uint32_t *numbers; /* for as many as there are of either */
    bool *told;        /* of cpus: its node is mentioned */
    bool failed;
};

#define say(c, ...)                                                                                \
    ((c)->failed |= topo_note(&(c)->changes->list, &(c)->changes->count, __VA_ARGS__) != 0)

static const struct numoe_node *node_of(const struct comparison *c, uint32_t plan_node)
{
    return &c->machine->nodes[c->node_at[plan_node]];
}

static const struct numoe_pu *pu_of(const struct comparison *c, uint32_t cpu)
{
    return &c->machine->pus[c->pu_at[cpu]];
}

static void say_nodes(struct comparison *c, size_t count, const char *words)
{
    char text[160];

    if (count)
        say(c, "memory node%s %s %s %s", count > 1 ? "s" : "",
            topo_sorted_ranges(text, sizeof text, c->numbers, count), count > 1 ? "are" : "is",
            words);
}

static void say_cpus(struct comparison *c, size_t count, const char *words)
{
    char text[160];

    if (count)
        say(c, "CPU%s %s %s %s", count > 1 ? "s" : "",
            topo_sorted_ranges(text, sizeof text, c->numbers, count), count > 1 ? "are" : "is",
            words);
}

/* ---- nodes ---- */

static void compare_presence(struct comparison *c)
{
    const struct numoe_plan *plan = c->plan;
    size_t count = 0;

    for (uint32_t i = 0; i < plan->node_count; i++) {
        c->node_at[i] = plan_find_node(c->machine, plan->nodes[i].os_index);
        if (c->node_at[i] == NUMOE_NONE)
            c->numbers[count++] = plan->nodes[i].os_index;
    }
    say_nodes(c, count, "not there");
    count = 0;
    for (uint32_t i = 0; i < plan->node_count; i++)
        if (c->node_at[i] != NUMOE_NONE && !node_of(c, i)->allowed)
            c->numbers[count++] = plan->nodes[i].os_index;
    say_nodes(c, count, "no longer allowed for this process");
}

static void compare_memory(struct comparison *c, uint32_t i)
{
    const struct numoe_plan_node *planned = &c->plan->nodes[i];
    const struct numoe_node *node = node_of(c, i);
    enum numoe_node_kind kind = c->plan->machine.nodes[planned->node].kind;
    uint64_t have = plan_node_memory(c->machine, c->node_at[i]);
    uint64_t keep =
        plan_kept_free(c->machine, c->plan->request.keep_free_bytes, node->capacity_bytes);
    uint64_t before = planned->capacity_bytes, now = node->capacity_bytes;
    char text[3][32];

    if (node->kind != kind)
        say(c, "memory node %u is %s, and was %s", planned->os_index, topo_kind_name(node->kind),
            topo_kind_name(kind));
    if (now < before && before - now >= before / LESS_MEMORY)
        say(c, "memory node %u has %s, and had %s", planned->os_index, topo_bytes(text[0], now),
            topo_bytes(text[1], before));
    if (planned->planned_bytes && (keep > have || planned->planned_bytes > have - keep))
        say(c, "memory node %u has %s%s, %s of them to be kept free, and %s are planned there",
            planned->os_index, topo_bytes(text[0], have), c->machine->live ? " free" : "",
            topo_bytes(text[1], keep), topo_bytes(text[2], planned->planned_bytes));
}

static void compare_distances(struct comparison *c)
{
    const struct numoe_plan *plan = c->plan;
    uint32_t count = plan->node_count, differ = 0, first[2] = {0}, values[2] = {0};

    if (!plan->machine.distances_known || !c->machine->distances)
        return;
    for (uint32_t a = 0; a < count; a++)
        for (uint32_t b = 0; b < count; b++) {
            uint32_t before = plan->distances[(size_t)a * count + b], now;

            if (c->node_at[a] == NUMOE_NONE || c->node_at[b] == NUMOE_NONE)
                continue;
            now = numoe_machine_distance(c->machine, c->node_at[a], c->node_at[b]);
            if (now == before || differ++)
                continue;
            first[0] = plan->nodes[a].os_index;
            first[1] = plan->nodes[b].os_index;
            values[0] = now;
            values[1] = before;
        }
    if (differ)
        say(c, "the distance from memory node %u to %u is %u, and was %u%s", first[0], first[1],
            values[0], values[1], differ > 1 ? "; others differ too" : "");
}

/* ---- CPUs ---- */

static uint32_t home_of(const struct comparison *c, uint32_t cpu)
{
    uint32_t node = pu_of(c, cpu)->node;

    return node == NUMOE_NONE ? NUMOE_NONE : c->machine->nodes[node].os_index;
}

static const char *node_name(char text[32], uint32_t os_index)
{
    if (os_index == NUMOE_NONE)
        strcpy(text, "no memory node");
    else
        snprintf(text, 32, "memory node %u", os_index);
    return text;
}

/* One sentence for all CPUs that went the same way. */
static void compare_homes(struct comparison *c)
{
    const struct numoe_plan_machine *machine = &c->plan->machine;

    for (uint32_t i = 0; i < machine->cpu_count; i++) {
        uint32_t before = machine->cpus[i].node, now;
        char names[2][32], words[96];
        size_t count = 0;

        if (c->pu_at[i] == NUMOE_NONE || c->told[i] || home_of(c, i) == before)
            continue;
        now = home_of(c, i);
        for (uint32_t j = i; j < machine->cpu_count; j++) {
            if (c->pu_at[j] == NUMOE_NONE || machine->cpus[j].node != before ||
                home_of(c, j) != now)
                continue;
            c->numbers[count++] = machine->cpus[j].os_index;
            c->told[j] = true;
        }
        snprintf(words, sizeof words, "at %s, and %s at %s", node_name(names[0], now),
                 count > 1 ? "were" : "was", node_name(names[1], before));
        say_cpus(c, count, words);
    }
}

/* Cores are numbered otherwise in every description: what must stay is who shares one. */
static void compare_cores(struct comparison *c)
{
    const struct numoe_plan_machine *machine = &c->plan->machine;
    size_t count = 0;

    for (uint32_t i = 0; i < machine->cpu_count; i++) {
        bool same = true;

        for (uint32_t j = 0; j < machine->cpu_count && same; j++)
            same = c->pu_at[i] == NUMOE_NONE || c->pu_at[j] == NUMOE_NONE ||
                   (machine->cpus[i].core == machine->cpus[j].core) ==
                       (pu_of(c, i)->core == pu_of(c, j)->core);
        if (!same)
            c->numbers[count++] = machine->cpus[i].os_index;
    }
    say_cpus(c, count,
             count > 1 ? "on cores with other CPUs than they were"
                       : "on a core with other CPUs than it was");
}

static void compare_cpus(struct comparison *c)
{
    const struct numoe_plan_machine *machine = &c->plan->machine;
    size_t count = 0;

    for (uint32_t i = 0; i < machine->cpu_count; i++) {
        c->pu_at[i] = plan_find_pu(c->machine, machine->cpus[i].os_index);
        if (c->pu_at[i] == NUMOE_NONE)
            c->numbers[count++] = machine->cpus[i].os_index;
    }
    say_cpus(c, count, "not there");
    count = 0;
    for (uint32_t i = 0; i < machine->cpu_count; i++)
        if (c->pu_at[i] != NUMOE_NONE && !pu_of(c, i)->allowed)
            c->numbers[count++] = machine->cpus[i].os_index;
    say_cpus(c, count, "no longer allowed for this process");
    compare_homes(c);
    compare_cores(c);
}

/* ---- the whole ---- */

static void compare_limits(struct comparison *c)
{
    const struct numoe_plan *plan = c->plan;
    double before = plan->machine.cpu_quota, now = c->machine->cpu_quota;
    uint64_t bytes = plan_total_bytes(plan);
    char text[2][32];

    if (bytes > plan_granted(c->machine))
        say(c, "the memory limit of the cgroup leaves %s, and %s are planned",
            topo_bytes(text[0], c->machine->cgroup_bytes), topo_bytes(text[1], bytes));
    /* a plan of more workers than the quota granted was meant so */
    if (now > 0 && now < plan->worker_count && (before <= 0 || now < before))
        say(c, "the CPU quota of the cgroup is %.2f, and %u workers are planned", now,
            plan->worker_count);
}

static void compare_all(struct comparison *c)
{
    const char *before = c->plan->machine.cpu_model, *now = c->machine->cpu_model;

    if (*before && *now && strcmp(before, now) != 0)
        say(c, "the CPU is \"%s\", and was \"%s\"", now, before);
    compare_presence(c);
    for (uint32_t i = 0; i < c->plan->node_count; i++)
        if (c->node_at[i] != NUMOE_NONE)
            compare_memory(c, i);
    compare_cpus(c);
    compare_distances(c);
    compare_limits(c);
}

int numoe_plan_compare(const struct numoe_plan *plan, const struct numoe_machine *machine,
                       struct numoe_plan_changes *changes)
{
    size_t cpus = plan->machine.cpu_count, nodes = plan->node_count;
    struct comparison c = {.plan = plan, .machine = machine, .changes = changes};

    *changes = (struct numoe_plan_changes){0};
    c.node_at = calloc(nodes + 1, sizeof *c.node_at);
    c.pu_at = calloc(cpus + 1, sizeof *c.pu_at);
    c.numbers = calloc(nodes + cpus + 1, sizeof *c.numbers);
    c.told = calloc(cpus + 1, sizeof *c.told);
    c.failed = !c.node_at || !c.pu_at || !c.numbers || !c.told;
    if (!c.failed)
        compare_all(&c);
    free(c.node_at);
    free(c.pu_at);
    free(c.numbers);
    free(c.told);
    if (!c.failed)
        return 0;
    numoe_plan_changes_free(changes);
    return -ENOMEM;
}

void numoe_plan_changes_free(struct numoe_plan_changes *changes)
{
    topo_notes_free(changes->list, changes->count);
    *changes = (struct numoe_plan_changes){0};
}

/* The first changes that fit, and how many there are besides. */
static int refuse(const struct numoe_plan_changes *changes, const struct numoe_log *log,
                  struct numoe_error *error)
{
    char text[sizeof error->message - 96] = "", more[32] = "";
    size_t used = 0;
    uint32_t shown = 0;

    for (; shown < changes->count && shown < SHOWN; shown++) {
        size_t length = strlen(changes->list[shown]) + 2;

        if (used + length >= sizeof text && shown)
            break;
        snprintf(text + used, sizeof text - used, "%s%s", shown ? "; " : "", changes->list[shown]);
        used = strlen(text);
    }
    if (shown < changes->count)
        snprintf(more, sizeof more, "; and %u more", changes->count - shown);
    for (uint32_t i = shown; i < changes->count; i++)
        numoe_log_write(log, NUMOE_LOG_WARNING, "since it was planned: %s", changes->list[i]);
    return numoe_error_set(error, -ESTALE, "plan",
                           "the machine is not the one it was made for: %s%s", text, more);
}

int numoe_plan_check(const struct numoe_plan *plan, const struct numoe_machine *machine,
                     const struct numoe_log *log, struct numoe_error *error)
{
    struct numoe_plan_changes changes;
    int rc;

    if (!plan || !machine)
        return numoe_error_set(error, -EINVAL, "numoe_plan_check", "plan or machine missing");
    if (numoe_plan_compare(plan, machine, &changes))
        return numoe_error_set(error, -ENOMEM, "plan", "out of memory");
    rc = changes.count ? refuse(&changes, log, error) : 0;
    numoe_plan_changes_free(&changes);
    return rc;
}
