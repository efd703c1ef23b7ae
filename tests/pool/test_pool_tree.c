/* The trees over the workers: counting finished items, and the order of waking. */
#include "numoe_pool.h"
#include "pool_internal.h"
#include "pool_os.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static uint64_t next(uint64_t *state)
{
    uint64_t x = (*state += 0x9e3779b97f4a7c15u);

    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* A pool without threads, as far as the trees need one. */
static struct numoe_pool *make(uint32_t count, const struct numoe_pool_worker *workers)
{
    struct numoe_pool *pool = numoe_pool_os_lines(sizeof *pool, NUMOE_POOL_LINE);

    cr_assert_not_null(pool);
    pool->worker_count = count;
    pool->workers = numoe_pool_os_lines(count * sizeof *pool->workers, NUMOE_POOL_LINE);
    cr_assert_not_null(pool->workers);
    cr_assert_eq(numoe_pool_trees_create(pool, workers), 0);
    return pool;
}

static void destroy(struct numoe_pool *pool)
{
    numoe_pool_trees_destroy(pool);
    free(pool->workers);
    free(pool);
}

/* Workers of a machine whose groups have so many of the smaller ones. */
static void place(struct numoe_pool_worker *workers, uint32_t count, uint32_t in_l3,
                  uint32_t in_node, uint32_t in_domain, uint32_t in_package)
{
    for (uint32_t w = 0; w < count; w++) {
        struct numoe_pool_worker *worker = &workers[w];

        worker->os_cpu = UINT32_MAX;
        worker->l3 = w / in_l3;
        worker->node = worker->l3 / in_node;
        worker->domain = worker->node / in_domain;
        worker->package = worker->domain / in_package;
    }
}

static uint32_t branch_count(const struct numoe_pool *pool)
{
    uint32_t b = 0;

    while (pool->branches[b].parent != NUMOE_POOL_NO_PARENT)
        b++; /* the root is the last */
    return b + 1;
}

static void check_join_tree(const struct numoe_pool *pool)
{
    uint32_t branches = branch_count(pool), at = 0;

    for (uint32_t leaf = 0; leaf < pool->leaf_count; leaf++) {
        const struct numoe_pool_branch *branch = &pool->branches[leaf];
        cr_assert_eq(branch->begin, at);
        cr_assert_gt(branch->end, branch->begin);
        cr_assert_leq(branch->end - branch->begin, 16);
        for (uint32_t w = branch->begin; w < branch->end; w++)
            cr_assert_eq(pool->workers[w].leaf, leaf);
        at = branch->end;
    }
    cr_assert_eq(at, pool->worker_count);
    for (uint32_t b = pool->leaf_count; b < branches; b++) {
        uint32_t children = 0, end = pool->branches[b].begin;
        for (uint32_t child = 0; child < b; child++) { /* one that was passed on has a low number */
            if (pool->branches[child].parent != b || pool->branches[child].begin != end)
                continue;
            end = pool->branches[child].end;
            children++;
            child = UINT32_MAX;
        }
        cr_assert_eq(end, pool->branches[b].end);
        cr_assert(children >= 2 && children <= 8);
    }
    cr_assert_eq(pool->branches[branches - 1].begin, 0);
    cr_assert_eq(pool->branches[branches - 1].end, pool->worker_count);
}

/* @return how many wakes after worker 0's own one the last is woken, if a wake takes as long as
 * being woken */
static uint32_t check_wakes(const struct numoe_pool *pool)
{
    uint32_t *when = calloc(pool->worker_count, sizeof *when), *order, woken = 1, last = 0;

    cr_assert_not_null(when);
    order = calloc(pool->worker_count, sizeof *order);
    cr_assert_not_null(order);
    for (uint32_t i = 0; i < woken; i++) {
        const struct numoe_pool_worker_slot *slot = &pool->workers[order[i]];
        for (uint32_t c = 0; c < slot->wake_count; c++) {
            uint32_t child = pool->wake_order[slot->wake_begin + c];
            cr_assert(child > 0 && child < pool->worker_count);
            cr_assert_eq(when[child], 0, "worker %u is woken twice", child);
            cr_assert_lt(woken, pool->worker_count);
            when[child] = when[order[i]] + c + 1;
            last = when[child] > last ? when[child] : last;
            order[woken++] = child;
        }
    }
    cr_assert_eq(woken, pool->worker_count);
    free(order);
    free(when);
    return last;
}

static uint32_t wakes_from_outside(const struct numoe_pool *pool,
                                   const struct numoe_pool_worker *workers, uint32_t distance)
{
    uint32_t count = 0;

    for (uint32_t w = 0; w < pool->worker_count; w++)
        for (uint32_t c = 0; c < pool->workers[w].wake_count; c++)
            count += numoe_pool_distance(
                         &workers[w],
                         &workers[pool->wake_order[pool->workers[w].wake_begin + c]]) >= distance;
    return count;
}

Test(pool_tree, few_workers_have_one_counter)
{
    struct numoe_pool_worker workers[8];

    place(workers, 8, 1, 1, 1, 1);
    for (uint32_t count = 1; count <= 8; count++) {
        struct numoe_pool *pool = make(count, workers);
        cr_assert_eq(pool->leaf_count, 1);
        cr_assert_eq(branch_count(pool), 1);
        check_join_tree(pool);
        check_wakes(pool);
        destroy(pool);
    }
}

/* Two packages of 64 cores, 4 cores an L3, each a node, 4 nodes a domain. */
Test(pool_tree, many_nodes_count_by_domain_and_wake_each_domain_once)
{
    static struct numoe_pool_worker workers[128];
    struct numoe_pool *pool;

    place(workers, 128, 4, 1, 4, 4);
    pool = make(128, workers);
    cr_assert_eq(pool->leaf_count, 32);
    cr_assert_eq(branch_count(pool), 32 + 8 + 1);
    for (uint32_t leaf = 0; leaf < 32; leaf++)
        cr_assert_eq(pool->branches[leaf].parent, 32 + leaf / 4);
    check_join_tree(pool);
    cr_assert_eq(check_wakes(pool), 7);
    cr_assert_eq(pool->wake_order[0], 64);
    cr_assert_eq(wakes_from_outside(pool, workers, 4), 1);
    cr_assert_eq(wakes_from_outside(pool, workers, 3), 7);
    cr_assert_eq(wakes_from_outside(pool, workers, 1), 31);
    destroy(pool);
}

Test(pool_tree, many_workers_of_one_cache_are_cut_evenly)
{
    struct numoe_pool *pool = make(100, NULL);

    cr_assert_eq(pool->leaf_count, 7);
    for (uint32_t leaf = 0; leaf < 7; leaf++) {
        uint32_t size = pool->branches[leaf].end - pool->branches[leaf].begin;
        cr_assert(size == 14 || size == 15);
    }
    check_join_tree(pool);
    cr_assert_eq(check_wakes(pool), 7);
    destroy(pool);
}

Test(pool_tree, any_groups_give_trees, .timeout = 60)
{
    static struct numoe_pool_worker workers[NUMOE_POOL_MAX_WORKERS];
    uint64_t state = 1;

    for (int round = 0; round < 400; round++) {
        uint32_t count = 1 + (uint32_t)(next(&state) % (round % 40 ? 200 : NUMOE_POOL_MAX_WORKERS));
        struct numoe_pool *pool;

        if (round % 3 == 0)
            for (uint32_t w = 0; w < count; w++) /* no order at all */
                workers[w] = (struct numoe_pool_worker){
                    UINT32_MAX, (uint32_t)(next(&state) % 9), (uint32_t)(next(&state) % 5),
                    (uint32_t)(next(&state) % 3), (uint32_t)(next(&state) % 2)};
        else
            place(workers, count, 1 + (uint32_t)(next(&state) % 20),
                  1 + (uint32_t)(next(&state) % 12), 1 + (uint32_t)(next(&state) % 12),
                  1 + (uint32_t)(next(&state) % 12));
        pool = make(count, workers);
        check_join_tree(pool);
        check_wakes(pool);
        destroy(pool);
    }
}

/* Items are finished in random order and batches; the phase is complete with the last one. */
static void finish_all(struct numoe_pool *pool, const struct numoe_pool_view *view, uint64_t *state)
{
    uint32_t *left = calloc(pool->leaf_count, sizeof *left), all = view->items, complete = 0;

    cr_assert_not_null(left);
    for (uint32_t item = 0, leaf = 0; item < view->items; item++) {
        while (item >= numoe_pool_share_begin(pool, view, pool->branches[leaf].end))
            leaf++;
        cr_assert_eq(numoe_pool_leaf_of(pool, view, item), leaf, "item %u", item);
        left[leaf]++;
    }
    while (all) {
        uint32_t leaf = (uint32_t)(next(state) % pool->leaf_count), batch;

        if (!left[leaf])
            continue;
        batch = 1 + (uint32_t)(next(state) % left[leaf]);
        left[leaf] -= batch;
        all -= batch;
        if (numoe_pool_join(pool, view, leaf, batch)) {
            complete++;
            cr_assert_eq(all, 0, "complete with %u items left", all);
        }
    }
    cr_assert_eq(complete, 1);
    for (uint32_t b = 0; b < branch_count(pool); b++)
        cr_assert_eq(*pool->branches[b].finished, 0);
    free(left);
}

Test(pool_tree, the_last_item_completes_the_phase, .timeout = 60)
{
    static struct numoe_pool_worker workers[300];
    static _Atomic uint32_t first[301];
    uint64_t state = 2;

    for (int round = 0; round < 60; round++) {
        uint32_t count = 1 + (uint32_t)(next(&state) % 300);
        struct numoe_pool *pool;

        place(workers, count, 1 + (uint32_t)(next(&state) % 6), 1 + (uint32_t)(next(&state) % 3),
              1 + (uint32_t)(next(&state) % 4), 1 + (uint32_t)(next(&state) % 4));
        pool = make(count, workers);
        for (int phase = 0; phase < 20; phase++) {
            struct numoe_pool_view view = {.items = 1 + (uint32_t)(next(&state) % 1000)};

            if (phase % 2) {
                view.first = first;
                first[0] = 0;
                for (uint32_t w = 1; w < count; w++)
                    first[w] = first[w - 1] +
                               (uint32_t)(next(&state) % 3 == 0
                                              ? next(&state) % (view.items - first[w - 1] + 1)
                                              : 0);
                first[count] = view.items;
            }
            finish_all(pool, &view, &state);
        }
        destroy(pool);
    }
}
