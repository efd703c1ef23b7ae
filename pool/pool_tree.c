/*
 * pool_tree.c - the two trees over the workers: how finished items are counted, and who wakes whom.
 *
 * Both follow the groups that the workers are in (L3, node, domain, package) as far as workers that
 * are next to each other by number are in the same groups.
 *
 * Join. An item is counted where the share it is from belongs, whoever runs it:
 *
 *     root       [0, 32)                          items finished of all shares
 *     branches   [0, 16)          [16, 32)        a domain, say
 *     leaves     [0, 8) [8, 16)   [16, 24) ...    an L3, or 16 workers of one that has more
 *
 * Each counter has a cache line to itself and counts from 0 in every phase. A worker adds to a leaf
 * what it has finished of one claim. The add that reaches the number of items in the leaf's shares
 * makes its thread the leaf's finisher: it puts the counter back to 0 and adds that number to the
 * parent, and so on. The finisher of the root is the finisher of the phase. A few workers have one
 * leaf that is the root, and very few have it in the line of seq, which its finisher is to write
 * next.
 *   - How many items make a counter complete is read from the job before the add: the thread still
 *     holds items that keep the phase open. After an add that completed nothing it holds none.
 *   - Nobody adds to a counter between its last add of a phase and its being put back to 0: all of
 *     its items are counted, and the next phase is published by the root's finisher, after this
 *     thread's add to the parent. stress/model/pool_steal.pml.
 *   - Orders: every add is acq_rel, so a counter's finisher has seen all that was done below it,
 *     and hands it on with its own add.
 *
 * Wake. Worker w heads a range of workers [w, end), worker 0 all of them; it wakes the heads of the
 * farther half, of the farther half of what is left, and so on down to its neighbour. A range is
 * cut where the groups differ most, and there nearest to the middle: each domain is entered once
 * from outside and goes on by itself. Waking takes about as long as being woken, which makes this
 * tree (a binomial one, where groups are regular) the quickest.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "pool_internal.h"
#include "pool_os.h"

#include <errno.h>
#include <stdlib.h>

enum {
    VERY_FEW = 4, /* workers whose adding does not disturb those that spin on seq */
    SINGLE = 8,   /* workers that one counter serves well, whatever their groups */
    LEAF = 16,    /* most workers in a leaf */
    CHILDREN = 8, /* most children of a branch */
};

/* ---- counting -------------------------------------------------------------------------------- */

uint32_t numoe_pool_leaf_of(const struct numoe_pool *pool, const struct numoe_pool_view *view,
                            uint32_t item)
{
    uint32_t low = 0, high = pool->leaf_count;

    /* The last leaf that begins at or before the item: those that begin at the same are empty. */
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;

        if (numoe_pool_share_begin(pool, view, pool->branches[middle].begin) <= item)
            low = middle;
        else
            high = middle;
    }
    return low;
}

bool numoe_pool_join(struct numoe_pool *pool, const struct numoe_pool_view *view, uint32_t leaf,
                     uint32_t items)
{
    for (uint32_t at = leaf;;) {
        const struct numoe_pool_branch *branch = &pool->branches[at];
        uint32_t all = view->items;

        if (branch->parent != NUMOE_POOL_NO_PARENT)
            all = numoe_pool_share_begin(pool, view, branch->end) -
                  numoe_pool_share_begin(pool, view, branch->begin);
        /* Release: our items are done. Acquire: if this is the last add, so are all others'. */
        if (atomic_fetch_add_explicit(branch->finished, items, memory_order_acq_rel) + items != all)
            return false;
        /* Before the add to the parent, or the store of seq, that lets others add again. */
        atomic_store_explicit(branch->finished, 0, memory_order_relaxed);
        if (branch->parent == NUMOE_POOL_NO_PARENT)
            return true;
        items = all;
        at = branch->parent;
    }
}

/* ---- building -------------------------------------------------------------------------------- */

/* How far worker w is from the one before it; 0 when their groups are not known. */
static uint32_t step(const struct numoe_pool_worker *workers, uint32_t w)
{
    return workers ? (uint32_t)numoe_pool_distance(&workers[w - 1], &workers[w]) : 0;
}

static uint32_t add_branch(struct numoe_pool *pool, uint32_t *count, uint32_t begin, uint32_t end)
{
    pool->branches[*count] = (struct numoe_pool_branch){NULL, begin, end, NUMOE_POOL_NO_PARENT};
    return (*count)++;
}

/* Leaves: workers of one L3, evenly cut when they are many. @return how many */
static uint32_t add_leaves(struct numoe_pool *pool, const struct numoe_pool_worker *workers)
{
    uint32_t workers_in_all = pool->worker_count, count = 0;

    for (uint32_t begin = 0, end; begin < workers_in_all; begin = end) {
        uint32_t parts;

        end = begin + 1;
        while (end < workers_in_all && (workers_in_all <= SINGLE || step(workers, end) == 0))
            end++;
        parts = (end - begin + LEAF - 1) / LEAF;
        for (uint32_t p = 0; p < parts; p++) {
            uint32_t from = begin + (end - begin) * p / parts;
            uint32_t to = begin + (end - begin) * (p + 1) / parts;
            uint32_t leaf = add_branch(pool, &count, from, to);

            for (uint32_t w = from; w < to; w++)
                pool->workers[w].leaf = leaf;
        }
    }
    return count;
}

/* Of the branches in list put those next to each other under a new one where they are at most
 * `distance` apart. @return how many are left in list */
static uint32_t add_level(struct numoe_pool *pool, const struct numoe_pool_worker *workers,
                          uint32_t *count, uint32_t *list, uint32_t length, uint32_t distance)
{
    uint32_t left = 0;

    for (uint32_t i = 0, end; i < length; i = end) {
        uint32_t parent;

        end = i + 1;
        while (end < length && end - i < CHILDREN &&
               step(workers, pool->branches[list[end]].begin) <= distance)
            end++;
        parent = list[i];
        if (end - i > 1) {
            parent = add_branch(pool, count, pool->branches[list[i]].begin,
                                pool->branches[list[end - 1]].end);
            for (uint32_t child = i; child < end; child++)
                pool->branches[list[child]].parent = parent;
        }
        list[left++] = parent;
    }
    return left;
}

static int build_join(struct numoe_pool *pool, const struct numoe_pool_worker *workers)
{
    uint32_t most = 2 * pool->worker_count; /* a branch has two children at least */
    uint32_t count, left;
    uint32_t *list;

    pool->branches = numoe_pool_os_memory(most, sizeof *pool->branches);
    if (!pool->branches)
        return -ENOMEM;
    count = left = pool->leaf_count = add_leaves(pool, workers);
    list = numoe_pool_os_memory(left, sizeof *list);
    if (!list)
        return -ENOMEM;
    for (uint32_t i = 0; i < left; i++)
        list[i] = i;
    /* Levels are made only where there is a crowd: each costs the last worker another line. */
    for (uint32_t distance = 1; left > CHILDREN; distance++)
        left = add_level(pool, workers, &count, list, left, distance);
    if (left > 1)
        add_level(pool, workers, &count, list, left, UINT32_MAX);
    free(list);
    pool->joins = numoe_pool_os_lines(count * sizeof *pool->joins, NUMOE_POOL_LINE);
    for (uint32_t b = 0; pool->joins && b < count; b++)
        pool->branches[b].finished = &pool->joins[b].finished;
    if (pool->worker_count <= VERY_FEW)
        pool->branches[0].finished = &pool->finished;
    return pool->joins ? 0 : -ENOMEM;
}

/* Where to cut the workers [begin, end) in two. */
static uint32_t cut(const struct numoe_pool_worker *workers, uint32_t begin, uint32_t end)
{
    uint32_t middle = begin + (end - begin + 1) / 2, best = middle, widest = 0;

    for (uint32_t w = begin + 1; w < end; w++) {
        uint32_t far = step(workers, w);
        uint32_t off = w > middle ? w - middle : middle - w;
        uint32_t best_off = best > middle ? best - middle : middle - best;

        if (far > widest || (far == widest && off < best_off)) {
            widest = far;
            best = w;
        }
    }
    return best;
}

/* The order in which the head of [begin, end) wakes others, then the same for each of them. */
static void order_wakes(struct numoe_pool *pool, const struct numoe_pool_worker *workers,
                        uint32_t begin, uint32_t end, uint32_t *used)
{
    struct numoe_pool_worker_slot *slot = &pool->workers[begin];
    uint32_t from = *used;

    slot->wake_begin = (uint16_t)from;
    for (uint32_t limit = end; limit - begin > 1;) {
        limit = cut(workers, begin, limit);
        pool->wake_order[(*used)++] = (uint16_t)limit;
    }
    slot->wake_count = (uint16_t)(*used - from);
    for (uint32_t i = 0; i < slot->wake_count; i++) {
        uint32_t head = pool->wake_order[from + i];

        order_wakes(pool, workers, head, end, used);
        end = head;
    }
}

int numoe_pool_trees_create(struct numoe_pool *pool, const struct numoe_pool_worker *workers)
{
    uint32_t used = 0;

    pool->wake_order = numoe_pool_os_memory(pool->worker_count, sizeof *pool->wake_order);
    if (!pool->wake_order || build_join(pool, workers))
        return -ENOMEM;
    order_wakes(pool, workers, 0, pool->worker_count, &used);
    return 0;
}

void numoe_pool_trees_destroy(struct numoe_pool *pool)
{
    free(pool->wake_order);
    free(pool->branches);
    free(pool->joins);
}
