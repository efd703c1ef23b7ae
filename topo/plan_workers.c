/*
 * Which CPUs workers run on.
 *
 * CPUs are taken tier by tier: first threads of the fastest cores, of slower cores, then second
 * threads. Of a tier that is not needed as a whole each node gets its proportional part, what is
 * left over going to different domains first. When all tiers are used up they begin anew, so that
 * several workers share a CPU. Nothing here looks at the model: the same workers for any.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "plan_build.h"
#include "topo_print.h"

#include <errno.h>
#include <stdlib.h>

enum { LANES_PER_WORKER = 4 };

struct candidate {
    uint32_t pu;
    uint32_t place; /* plan node */
    uint32_t rank;  /* of the threads of its core that may be used */
    uint32_t efficiency;
    uint32_t uses; /* workers on it */
};

struct choice {
    struct plan_build *build;
    struct candidate *list;
    uint32_t count;
    uint32_t cores;
    uint32_t *load; /* cores of each plan node */
    bool *reserved; /* by core: left to others */
};

static bool same_place(const struct numoe_machine *machine, uint32_t home, uint32_t node)
{
    return node == home || machine->nodes[node].beside == home;
}

/* The plan node that a CPU works with: its own or one beside it; else the nearest. */
static uint32_t place_for(const struct choice *choice, uint32_t pu)
{
    const struct numoe_machine *machine = choice->build->machine;
    const struct numoe_plan *plan = choice->build->plan;
    uint32_t home = machine->pus[pu].node, best = 0;
    uint64_t best_key[3] = {UINT64_MAX, UINT64_MAX, UINT64_MAX};

    for (uint32_t i = 0; i < plan->node_count; i++) {
        uint32_t node = plan->nodes[i].node;
        uint64_t key[3] = {0, 0, choice->load[i]};

        if (home != NUMOE_NONE && !same_place(machine, home, node))
            key[0] = numoe_machine_distance(machine, home, node);
        key[1] = machine->nodes[node].package != machine->pus[pu].package;
        for (int k = 0; k < 3; k++) {
            if (key[k] == best_key[k])
                continue;
            if (key[k] < best_key[k]) {
                best = i;
                for (int m = 0; m < 3; m++)
                    best_key[m] = key[m];
            }
            break;
        }
    }
    return best;
}

static bool eligible(const struct choice *choice, uint32_t pu, bool anywhere)
{
    const struct numoe_machine *machine = choice->build->machine;
    const struct numoe_plan_request *request = choice->build->request;

    if (!machine->pus[pu].allowed || choice->reserved[machine->pus[pu].core])
        return false;
    if (request->cpus) {
        for (uint32_t i = 0; i < request->cpu_count; i++)
            if (request->cpus[i] == machine->pus[pu].os_index)
                return true;
        return false;
    }
    if (anywhere)
        return true;
    for (uint32_t i = 0; i < choice->build->plan->node_count; i++)
        if (machine->pus[pu].node != NUMOE_NONE &&
            same_place(machine, machine->pus[pu].node, choice->build->plan->nodes[i].node))
            return true;
    return false;
}

static void collect(struct choice *choice, bool anywhere)
{
    const struct numoe_machine *machine = choice->build->machine;
    uint32_t core = NUMOE_NONE, highest = 0;

    choice->count = choice->cores = 0;
    for (uint32_t i = 0; i < machine->pu_count; i++) {
        struct candidate *candidate = &choice->list[choice->count];

        if (!eligible(choice, i, anywhere))
            continue;
        candidate->pu = i;
        candidate->efficiency = machine->pus[i].efficiency;
        if (machine->pus[i].core == core && choice->count) {
            candidate->rank = candidate[-1].rank + 1;
            candidate->place = candidate[-1].place;
        } else {
            candidate->rank = 0;
            candidate->place = place_for(choice, i);
            choice->load[candidate->place]++;
            choice->cores++;
        }
        core = machine->pus[i].core;
        highest = candidate->efficiency > highest ? candidate->efficiency : highest;
        choice->count++;
    }
    for (uint32_t i = 0; i < choice->count; i++)
        if (choice->list[i].rank == 0)
            choice->build->core_units[choice->list[i].place] +=
                choice->list[i].efficiency == highest ? 2 : 1;
}

static int by_tier(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;

    if (x->rank != y->rank)
        return x->rank < y->rank ? -1 : 1;
    if (x->efficiency != y->efficiency)
        return x->efficiency > y->efficiency ? -1 : 1;
    return x->pu < y->pu ? -1 : 1;
}

static int by_pu(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;

    return x->pu < y->pu ? -1 : 1;
}

/* Scratch for a tier that is used in part, all by plan node but by_cache. */
struct part {
    uint32_t *room, *take, *in_domain, *in_package, *by_cache;
};

/* How many of each plan node: proportional, rounded by largest remainder. */
static void divide(const struct choice *choice, uint32_t wanted, uint32_t total, struct part *part)
{
    const struct numoe_machine *machine = choice->build->machine;
    const struct numoe_plan *plan = choice->build->plan;
    uint32_t given = 0;

    for (uint32_t d = 0; d < machine->node_count; d++)
        part->in_domain[d] = 0;
    for (uint32_t p = 0; p <= machine->package_count; p++)
        part->in_package[p] = 0;
    for (uint32_t i = 0; i < plan->node_count; i++) {
        part->take[i] = (uint32_t)((uint64_t)wanted * part->room[i] / total);
        given += part->take[i];
    }
    while (given < wanted) {
        uint32_t best = NUMOE_NONE, domain, package;
        uint64_t best_key[3] = {0};

        for (uint32_t i = 0; i < plan->node_count; i++) {
            const struct numoe_node *node = &machine->nodes[plan->nodes[i].node];
            uint64_t exact = (uint64_t)wanted * part->room[i], key[3];

            if (part->take[i] != exact / total || part->take[i] >= part->room[i])
                continue;
            package = node->package == NUMOE_NONE ? machine->package_count : node->package;
            key[0] = total - exact % total;
            key[1] = part->in_package[package];
            key[2] = part->in_domain[node->domain];
            if (best == NUMOE_NONE || key[0] < best_key[0] ||
                (key[0] == best_key[0] &&
                 (key[1] < best_key[1] || (key[1] == best_key[1] && key[2] < best_key[2])))) {
                best = i;
                for (int k = 0; k < 3; k++)
                    best_key[k] = key[k];
            }
        }
        if (best == NUMOE_NONE)
            return;
        domain = machine->nodes[plan->nodes[best].node].domain;
        package = machine->nodes[plan->nodes[best].node].package;
        part->in_domain[domain]++;
        part->in_package[package == NUMOE_NONE ? machine->package_count : package]++;
        part->take[best]++;
        given++;
    }
}

/* Of one node's CPUs in a tier take some, spread over its last-level caches. */
static void pick(const struct choice *choice, struct candidate *tier, uint32_t total,
                 uint32_t place, struct part *part)
{
    const struct numoe_machine *machine = choice->build->machine;

    for (uint32_t i = 0; i <= machine->l3_count; i++)
        part->by_cache[i] = 0;
    for (uint32_t n = 0; n < part->take[place]; n++) {
        uint32_t best = NUMOE_NONE, best_cache = 0;

        for (uint32_t i = 0; i < total; i++) {
            uint32_t cache = machine->pus[tier[i].pu].l3;

            if (tier[i].place != place || tier[i].uses & 1u << 31)
                continue;
            if (cache == NUMOE_NONE)
                cache = machine->l3_count;
            if (best == NUMOE_NONE || part->by_cache[cache] < part->by_cache[best_cache]) {
                best = i;
                best_cache = cache;
            }
        }
        if (best == NUMOE_NONE)
            break;
        part->by_cache[best_cache]++;
        tier[best].uses = (tier[best].uses + 1) | 1u << 31; /* marked: has had its turn */
    }
    for (uint32_t i = 0; i < total; i++)
        tier[i].uses &= ~(1u << 31);
}

static int use_part(const struct choice *choice, struct candidate *tier, uint32_t total,
                    uint32_t wanted)
{
    const struct numoe_machine *machine = choice->build->machine;
    uint32_t places = choice->build->plan->node_count;
    struct part part = {0};
    int rc = -ENOMEM;

    part.room = calloc(places, sizeof *part.room);
    part.take = calloc(places, sizeof *part.take);
    part.in_domain = calloc(machine->node_count, sizeof *part.in_domain);
    part.in_package = calloc((size_t)machine->package_count + 1, sizeof *part.in_package);
    part.by_cache = calloc((size_t)machine->l3_count + 1, sizeof *part.by_cache);
    if (part.room && part.take && part.in_domain && part.in_package && part.by_cache) {
        for (uint32_t i = 0; i < total; i++)
            part.room[tier[i].place]++;
        divide(choice, wanted, total, &part);
        for (uint32_t i = 0; i < places; i++)
            pick(choice, tier, total, i, &part);
        rc = 0;
    }
    free(part.room);
    free(part.take);
    free(part.in_domain);
    free(part.in_package);
    free(part.by_cache);
    return rc;
}

static int use(struct choice *choice, uint32_t workers)
{
    int rc = 0;

    qsort(choice->list, choice->count, sizeof *choice->list, by_tier);
    while (workers && !rc) {
        for (uint32_t first = 0; first < choice->count && workers && !rc;) {
            struct candidate *tier = &choice->list[first];
            uint32_t total = 1;

            while (first + total < choice->count && tier[total].rank == tier->rank &&
                   tier[total].efficiency == tier->efficiency)
                total++;
            if (workers < total) {
                rc = use_part(choice, tier, total, workers);
                workers = 0;
            } else {
                for (uint32_t i = 0; i < total; i++)
                    tier[i].uses++;
                workers -= total;
            }
            first += total;
        }
    }
    qsort(choice->list, choice->count, sizeof *choice->list, by_pu);
    return rc;
}

static int list_workers(struct choice *choice, uint32_t workers)
{
    const struct numoe_machine *machine = choice->build->machine;
    struct numoe_plan *plan = choice->build->plan;

    plan->workers = calloc(workers, sizeof *plan->workers);
    if (!plan->workers)
        return -ENOMEM;
    for (uint32_t n = 0; n < plan->node_count; n++) {
        bool more = true;

        plan->nodes[n].first_worker = plan->worker_count;
        for (uint32_t round = 0; more; round++) {
            more = false;
            for (uint32_t i = 0; i < choice->count; i++) {
                const struct candidate *candidate = &choice->list[i];
                const struct numoe_pu *pu = &machine->pus[candidate->pu];
                struct numoe_plan_worker *worker = &plan->workers[plan->worker_count];

                if (candidate->place != n || candidate->uses <= round)
                    continue;
                more |= candidate->uses > round + 1;
                worker->pu = candidate->pu;
                worker->os_cpu = pu->os_index;
                worker->plan_node = n;
                worker->l3 = pu->l3;
                worker->domain = machine->nodes[plan->nodes[n].node].domain;
                worker->package = pu->package;
                plan->worker_count++;
            }
        }
        plan->nodes[n].worker_count = plan->worker_count - plan->nodes[n].first_worker;
    }
    return 0;
}

/* How many workers, with the reason. */
static uint32_t count_workers(const struct choice *choice)
{
    struct plan_build *build = choice->build;
    const struct numoe_plan_request *request = build->request;
    double quota = build->machine->cpu_quota;
    uint32_t workers = request->workers;

    if (workers) {
        if (workers > choice->count)
            plan_note(build, "%u workers as asked share %u CPUs", workers, choice->count);
        else if (workers > choice->cores)
            plan_note(build, "%u workers as asked on %u cores: second threads are used too",
                      workers, choice->cores);
        else
            plan_note(build, "%u workers as asked, of %u cores", workers, choice->cores);
        return workers;
    }
    if (request->cpus) {
        plan_note(build, "%u workers: one for each CPU that was named", choice->count);
        return choice->count;
    }
    workers = request->smt ? choice->count : choice->cores;
    if (quota > 0 && quota < workers) {
        workers = quota < 1 ? 1 : (uint32_t)quota;
        plan_note(build, "%u workers: the cgroup's CPU quota is %.2f", workers, quota);
    } else {
        plan_note(build, "%u worker%s: one a %s", workers, workers > 1 ? "s" : "",
                  request->smt ? "CPU" : "core");
    }
    return workers;
}

static void note_far(const struct choice *choice)
{
    const struct numoe_plan *plan = choice->build->plan;
    uint32_t far = 0;

    for (uint32_t i = 0; i < plan->worker_count; i++)
        far += !choice->build->machine->pus[plan->workers[i].pu].node_is_near;
    if (far)
        plan_note(choice->build,
                  "%u worker%s on CPUs without memory of their own that may be used: each works on "
                  "the nearest node that has",
                  far, far > 1 ? "s are" : " is");
}

static void note_efficiency(const struct choice *choice)
{
    uint32_t low = UINT32_MAX, high = 0, fast = 0, slow = 0;

    for (uint32_t i = 0; i < choice->count; i++) {
        uint32_t efficiency = choice->list[i].efficiency;

        low = efficiency < low ? efficiency : low;
        high = efficiency > high ? efficiency : high;
    }
    if (low >= high)
        return;
    for (uint32_t i = 0; i < choice->count; i++)
        *(choice->list[i].efficiency == high ? &fast : &slow) += choice->list[i].uses;
    plan_note(choice->build,
              "cores are of several kinds, the faster first: %u workers on the "
              "fastest, %u on slower ones",
              fast, slow);
}

/* A core is reserved as a whole: its second thread would compete with whoever has the first. */
static int reserve(struct choice *choice, struct numoe_error *error)
{
    const struct numoe_machine *machine = choice->build->machine;
    const struct numoe_plan_request *request = choice->build->request;
    uint32_t cores = 0;

    for (uint32_t i = 0; i < request->reserved_count; i++) {
        uint32_t os = request->reserved_cpus[i], pu = plan_find_pu(machine, os);
        char where[32];

        snprintf(where, sizeof where, "CPU %u", os);
        if (pu == NUMOE_NONE)
            return numoe_error_set(error, -EINVAL, where,
                                   "CPU %u cannot be reserved: there is no such CPU here", os);
        cores += !choice->reserved[machine->pus[pu].core];
        choice->reserved[machine->pus[pu].core] = true;
    }
    if (cores)
        plan_note(choice->build, "%u core%s reserved, with all threads: no workers there", cores,
                  cores > 1 ? "s" : "");
    return 0;
}

int plan_choose_workers(struct plan_build *build, struct numoe_error *error)
{
    const struct numoe_plan_request *request = build->request;
    struct choice choice = {.build = build};
    uint32_t lanes = request->lanes_per_worker ? request->lanes_per_worker : LANES_PER_WORKER;
    uint32_t workers;
    int rc = -ENOMEM;

    if (request->workers > PLAN_MAX_WORKERS || lanes > PLAN_MAX_LANES_PER_WORKER)
        return numoe_error_set(error, -EINVAL, "workers",
                               "%u workers of %u lanes each are too many; %d and %d are allowed",
                               request->workers, lanes, PLAN_MAX_WORKERS,
                               PLAN_MAX_LANES_PER_WORKER);
    choice.list = calloc(build->machine->pu_count, sizeof *choice.list);
    choice.load = calloc(build->plan->node_count, sizeof *choice.load);
    choice.reserved = calloc((size_t)build->machine->core_count + 1, sizeof *choice.reserved);
    if (!choice.list || !choice.load || !choice.reserved)
        goto out;
    rc = reserve(&choice, error);
    if (rc)
        goto free_all;
    rc = -ENOMEM;
    collect(&choice, false);
    if (!choice.count && !request->cpus) {
        collect(&choice, true);
        if (choice.count)
            plan_note(build, "no allowed CPU is at the chosen nodes: all allowed CPUs are used");
    }
    if (!choice.count) {
        rc = numoe_error_set(error, -EINVAL, build->plan->source,
                             request->reserved_count
                                 ? "no CPU is left: all that are allowed are reserved"
                                 : "no CPU is allowed for this process");
        goto free_all;
    }
    workers = count_workers(&choice);
    if (workers > PLAN_MAX_WORKERS) {
        plan_note(build, "%u workers are more than are supported: %d", workers, PLAN_MAX_WORKERS);
        workers = PLAN_MAX_WORKERS;
    }
    if (use(&choice, workers) || list_workers(&choice, workers))
        goto out;
    note_efficiency(&choice);
    note_far(&choice);
    for (uint32_t n = 0; n < build->plan->node_count; n++) {
        struct numoe_plan_node *node = &build->plan->nodes[n];

        node->lanes = node->worker_count ? node->worker_count * lanes : 1;
    }
    rc = 0;
out:
    if (rc)
        numoe_error_set(error, rc, build->plan->source, "out of memory");
free_all:
    free(choice.list);
    free(choice.load);
    free(choice.reserved);
    return rc;
}
