/*
 * Nodes dealt to groups.
 *
 * A group is made of whole memory domains, or lies within one: groups that cut across domains would
 * wait for each other's channels.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "plan_build.h"

#include <errno.h>
#include <stdlib.h>

/* A memory domain as far as the plan uses it. */
struct domain {
    uint32_t package; /* of its first node */
    uint32_t first;   /* that node */
    uint32_t nodes;
    uint32_t groups;
};

static int by_package(const void *a, const void *b)
{
    const struct domain *x = a, *y = b;

    if (x->package != y->package)
        return x->package < y->package ? -1 : 1;
    return x->first < y->first ? -1 : 1;
}

/* The domains of the plan's nodes, package by package. domains has room for one a node. */
static uint32_t list_domains(const struct numoe_plan *plan, struct domain *domains)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < plan->node_count; i++) {
        uint32_t d = 0;

        while (d < count && plan->nodes[domains[d].first].domain != plan->nodes[i].domain)
            d++;
        if (d == count)
            domains[count++] = (struct domain){.package = plan->nodes[i].package, .first = i};
        domains[d].nodes++;
    }
    qsort(domains, count, sizeof *domains, by_package);
    return count;
}

/* Every node of a domain belongs to `to`. */
static void give_domain(const struct numoe_plan *plan, const struct domain *domain, uint32_t to,
                        uint32_t *group)
{
    for (uint32_t i = 0; i < plan->node_count; i++)
        if (plan->nodes[i].domain == plan->nodes[domain->first].domain)
            group[i] = to;
}

/* Runs of domains, as even in nodes as whole domains allow; each at least one. */
static void deal_whole(const struct numoe_plan *plan, const struct domain *domains, uint32_t count,
                       uint32_t groups, uint32_t *group)
{
    uint32_t before = 0, to = 0;
    bool empty = true;

    for (uint32_t d = 0; d < count; d++) {
        /* the domain's middle lies in the next group's part, or the others need one each */
        uint64_t middle = 2 * (uint64_t)before + domains[d].nodes;

        if (!empty && to + 1 < groups &&
            (middle * groups >= 2 * (uint64_t)(to + 1) * plan->node_count ||
             count - d == groups - to - 1)) {
            to++;
            empty = true;
        }
        give_domain(plan, &domains[d], to, group);
        empty = false;
        before += domains[d].nodes;
    }
}

/* Several groups a domain: as many for each as it has of the nodes, at least one. */
static void deal_within(const struct numoe_plan *plan, struct domain *domains, uint32_t count,
                        uint32_t groups, uint32_t *group)
{
    uint32_t first = 0;

    for (uint32_t d = 0; d < count; d++)
        domains[d].groups = 1;
    for (uint32_t given = count; given < groups; given++) {
        uint32_t best = 0;

        /* where groups are largest so far */
        for (uint32_t d = 1; d < count; d++)
            if ((uint64_t)domains[d].nodes * domains[best].groups >
                (uint64_t)domains[best].nodes * domains[d].groups)
                best = d;
        domains[best].groups++;
    }
    for (uint32_t d = 0; d < count; d++) {
        uint32_t at = 0;

        for (uint32_t i = domains[d].first; i < plan->node_count; i++)
            if (plan->nodes[i].domain == plan->nodes[domains[d].first].domain)
                group[i] =
                    first + (uint32_t)((uint64_t)at++ * domains[d].groups / domains[d].nodes);
        first += domains[d].groups;
    }
}

int numoe_plan_deal(const struct numoe_plan *plan, uint32_t groups, uint32_t *group)
{
    struct domain *domains;
    uint32_t count;

    if (!groups || groups > plan->node_count)
        return -EINVAL;
    domains = calloc(plan->node_count, sizeof *domains);
    if (!domains)
        return -ENOMEM;
    count = list_domains(plan, domains);
    if (groups <= count)
        deal_whole(plan, domains, count, groups, group);
    else
        deal_within(plan, domains, count, groups, group);
    free(domains);
    return 0;
}

int plan_deal_packages(const struct numoe_plan *plan, uint32_t *group, uint32_t *groups)
{
    struct domain *domains = calloc(plan->node_count, sizeof *domains);
    uint32_t count, to = 0;

    if (!domains)
        return -ENOMEM;
    count = list_domains(plan, domains);
    for (uint32_t d = 0; d < count; d++) {
        to += d && domains[d].package != domains[d - 1].package;
        give_domain(plan, &domains[d], to, group);
    }
    *groups = to + 1;
    free(domains);
    return 0;
}

int plan_count_domains(const struct numoe_plan *plan, uint32_t *count)
{
    struct domain *domains = calloc(plan->node_count, sizeof *domains);

    if (!domains)
        return -ENOMEM;
    *count = list_domains(plan, domains);
    free(domains);
    return 0;
}
