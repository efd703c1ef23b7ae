/* Random routing: uniform, by Zipf's law, or all tokens alike. SPDX-License-Identifier: Apache-2.0
 */
#include "bench.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[] = {
    [NUMOE_ROUTING_UNIFORM] = "uniform",   [NUMOE_ROUTING_ZIPF] = "zipf",
    [NUMOE_ROUTING_SHIFTING] = "shifting", [NUMOE_ROUTING_SAME] = "same",
    [NUMOE_ROUTING_ONE] = "one",
};

enum { ROUTINGS = sizeof names / sizeof names[0] };

const char *numoe_bench_routing_name(enum numoe_bench_routing routing)
{
    return (unsigned)routing < ROUTINGS ? names[routing] : "";
}

int numoe_bench_routing_by_name(const char *name)
{
    for (int i = 0; i < ROUTINGS; i++)
        if (!strcmp(name, names[i]))
            return i;
    return -1;
}

struct numoe_bench_router {
    enum numoe_bench_routing routing;
    uint64_t experts;
    double *before;  /* [experts + 1] sum of the popularity of the ranks before */
    int32_t *expert; /* [experts] of a rank */
};

static void shuffle(struct numoe_bench_router *router, struct numoe_bench_random *random)
{
    for (uint64_t i = router->experts; i > 1; i--) {
        const uint64_t j = numoe_bench_random(random) % i;
        const int32_t swap = router->expert[i - 1];

        router->expert[i - 1] = router->expert[j];
        router->expert[j] = swap;
    }
}

struct numoe_bench_router *numoe_bench_router_create(enum numoe_bench_routing routing,
                                                     uint64_t experts,
                                                     struct numoe_bench_random *random)
{
    struct numoe_bench_router *router = calloc(1, sizeof *router);

    if (!router)
        return NULL;
    router->routing = routing;
    router->experts = experts;
    if (routing != NUMOE_ROUTING_ZIPF && routing != NUMOE_ROUTING_SHIFTING)
        return router;
    router->before = malloc((experts + 1) * sizeof *router->before);
    router->expert = malloc(experts * sizeof *router->expert);
    if (!router->before || !router->expert) {
        numoe_bench_router_destroy(router);
        return NULL;
    }
    router->before[0] = 0;
    for (uint64_t i = 0; i < experts; i++) {
        router->before[i + 1] = router->before[i] + 1.0 / (double)(i + 1);
        router->expert[i] = (int32_t)i;
    }
    shuffle(router, random);
    return router;
}

void numoe_bench_router_destroy(struct numoe_bench_router *router)
{
    if (!router)
        return;
    free(router->before);
    free(router->expert);
    free(router);
}

uint64_t numoe_bench_router_top_k(const struct numoe_bench_router *router, uint64_t top_k)
{
    return router->routing == NUMOE_ROUTING_ONE ? 1 : top_k;
}

static int32_t draw(const struct numoe_bench_router *router, struct numoe_bench_random *random)
{
    const double at =
        ((double)numoe_bench_random_float(random) - 0x1p-25) * router->before[router->experts];
    uint64_t low = 0, high = router->experts;

    while (high - low > 1) {
        const uint64_t middle = (low + high) / 2;

        if (router->before[middle] <= at)
            low = middle;
        else
            high = middle;
    }
    return router->expert[low];
}

void numoe_bench_router_route(struct numoe_bench_router *router, struct numoe_bench_random *random,
                              uint64_t tokens, uint64_t top_k, int32_t *ids, float *weights)
{
    top_k = numoe_bench_router_top_k(router, top_k);
    numoe_bench_route(random, tokens, top_k, router->experts, ids, weights);
    if (router->routing == NUMOE_ROUTING_SAME || router->routing == NUMOE_ROUTING_ONE)
        for (uint64_t t = 1; t < tokens; t++)
            memcpy(ids + t * top_k, ids, top_k * sizeof *ids);
    if (!router->expert)
        return;
    if (router->routing == NUMOE_ROUTING_SHIFTING)
        shuffle(router, random);
    for (uint64_t t = 0; t < tokens; t++, ids += top_k)
        for (uint64_t j = 0; j < top_k; j++) {
            uint64_t seen;

            do {
                ids[j] = draw(router, random);
                for (seen = 0; ids[seen] != ids[j]; seen++)
                    ;
            } while (seen < j);
        }
}
