/*
 * pool_steal.c - where a worker's items come from: its own share, or the nearest worker that has
 * something left.
 *
 * Two kinds of claim (pool_internal.h says why they are safe):
 *   share   nobody has begun worker w's share of phase n: w.opened is swapped from less than n to
 *           n, and the whole share is the claimer's. A thief does this for a worker that is late,
 *           and holds the rest in its own range word, where the late worker finds it.
 *   steal   half of another's range word, from the back (pool_range.h).
 *
 * Order of victims: same L3, same node, same domain, same package, rest; within each, thieves
 * begin at different places. Within a phase a thief goes on from where it last found something, and
 * begins with the nearest again when it has seen all. Workers of equal groups share one list, so
 * lists cost kinds of workers times workers, two bytes each.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "pool_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

uint32_t numoe_pool_distance(const struct numoe_pool_worker *a, const struct numoe_pool_worker *b)
{
    if (a->l3 == b->l3)
        return 0;
    if (a->node == b->node)
        return 1;
    if (a->domain == b->domain)
        return 2;
    return a->package == b->package ? 3 : 4;
}

static bool same_groups(const struct numoe_pool_worker *a, const struct numoe_pool_worker *b)
{
    return a->l3 == b->l3 && a->node == b->node && a->domain == b->domain &&
           a->package == b->package;
}

/* Fill kin's list by counting sort over the distance from `self`. */
static void list_victims(struct numoe_pool_kin *kin, const struct numoe_pool_worker *workers,
                         uint32_t worker_count, uint32_t self)
{
    uint32_t place[NUMOE_POOL_RINGS + 1] = {0};

    for (uint32_t w = 0; w < worker_count; w++)
        kin->ring[(workers ? numoe_pool_distance(&workers[self], &workers[w]) : 0) + 1]++;
    for (uint32_t d = 0; d < NUMOE_POOL_RINGS; d++)
        kin->ring[d + 1] += kin->ring[d];
    memcpy(place, kin->ring, sizeof place);
    for (uint32_t w = 0; w < worker_count; w++)
        kin->order[place[workers ? numoe_pool_distance(&workers[self], &workers[w]) : 0]++] =
            (uint16_t)w;
}

int numoe_pool_kins_create(struct numoe_pool *pool, const struct numoe_pool_worker *workers)
{
    uint32_t count = pool->worker_count;
    uint32_t *samples = calloc(count, sizeof *samples); /* a worker of each kind */
    uint32_t kinds = 0;

    if (!samples)
        return -ENOMEM;
    for (uint32_t w = 0; w < count; w++) {
        uint32_t k = 0;
        /* The last kind first: workers of a kind mostly follow each other. */
        if (workers && kinds && same_groups(&workers[samples[kinds - 1]], &workers[w]))
            k = kinds - 1;
        while (k < kinds && workers && !same_groups(&workers[samples[k]], &workers[w]))
            k++;
        if (k == kinds)
            samples[kinds++] = w;
        pool->workers[w].kin = k;
    }
    pool->kins = calloc(kinds, sizeof *pool->kins);
    if (!pool->kins)
        goto fail;
    pool->kin_count = kinds;
    for (uint32_t k = 0; k < kinds; k++) {
        pool->kins[k].order = calloc(count, sizeof *pool->kins[k].order);
        if (!pool->kins[k].order)
            goto fail;
        list_victims(&pool->kins[k], workers, count, samples[k]);
    }
    free(samples);
    return 0;

fail:
    free(samples);
    numoe_pool_kins_destroy(pool);
    return -ENOMEM;
}

void numoe_pool_kins_destroy(struct numoe_pool *pool)
{
    for (uint32_t k = 0; k < pool->kin_count; k++)
        free(pool->kins[k].order);
    free(pool->kins);
    pool->kins = NULL;
    pool->kin_count = 0;
}

/* Worker w's whole share, if nobody has begun it. */
static bool claim_share(struct numoe_pool_hand *hand, uint32_t w, uint32_t *begin, uint32_t *end)
{
    struct numoe_pool_worker_slot *slot = &hand->pool->workers[w];
    uint64_t number = hand->view.seq >> 1;
    uint64_t opened = atomic_load_explicit(&slot->opened, memory_order_relaxed);

    /* The share is read and found valid for this number before the swap; a share with items that
     * is still unopened proves that the phase is not over, and opened never falls. Exclusive by
     * the one modification order of `opened`; orders nothing else, the data came by seq. */
    if (opened >= number || !numoe_pool_share(hand->pool, &hand->view, w, begin, end) ||
        !atomic_compare_exchange_strong_explicit(&slot->opened, &opened, number,
                                                 memory_order_relaxed, memory_order_relaxed))
        return false;
    hand->leaf = slot->leaf;
    return true;
}

/* Items from the back of worker w's range. */
static bool steal(struct numoe_pool_hand *hand, uint32_t w, uint32_t most, uint32_t *begin,
                  uint32_t *end)
{
    struct numoe_pool *pool = hand->pool;
    uint64_t seq;

    if (!numoe_pool_range_steal(&pool->workers[w].range, hand->view.seq >> 1, most, begin, end))
        return false;
    /* What we hold keeps its phase open: seq is that phase's and stands still. Another than the
     * view's only after 65536 phase numbers between looking and taking. */
    while ((seq = numoe_pool_seq(pool)) != hand->view.seq)
        numoe_pool_view_load(pool, seq, &hand->view);
    return true;
}

static void count_steal(struct numoe_pool_worker_slot *slot, uint32_t items)
{
    /* One writer; readers want numbers, not order. */
    atomic_store_explicit(&slot->steals,
                          atomic_load_explicit(&slot->steals, memory_order_relaxed) + 1,
                          memory_order_relaxed);
    atomic_store_explicit(&slot->stolen_items,
                          atomic_load_explicit(&slot->stolen_items, memory_order_relaxed) + items,
                          memory_order_relaxed);
}

static bool claim_from(struct numoe_pool_hand *hand, uint32_t w, uint32_t most, uint32_t *begin,
                       uint32_t *end)
{
    if (w == hand->worker)
        return false;
    if (!claim_share(hand, w, begin, end)) {
        if (!steal(hand, w, most, begin, end))
            return false;
        /* What w holds may be from anybody's share, but is from one. */
        hand->leaf = numoe_pool_leaf_of(hand->pool, &hand->view, *begin);
    }
    count_steal(hand->slot, *end - *begin);
    return true;
}

/* The same for tests: anyone first, any amount, the own share perhaps last. */
static bool claim_chaotic(struct numoe_pool_hand *hand, uint32_t *begin, uint32_t *end)
{
    uint32_t count = hand->pool->worker_count;
    uint32_t start = numoe_pool_random(hand) % count;
    uint32_t most = numoe_pool_random(hand) & 1 ? 0 : 1 + numoe_pool_random(hand) % 5;

    if (numoe_pool_random(hand) % 4 && claim_share(hand, hand->worker, begin, end))
        return true;
    for (uint32_t i = 0; i < count; i++) {
        if (claim_from(hand, (start + i) % count, most, begin, end))
            return true;
    }
    return claim_share(hand, hand->worker, begin, end);
}

bool numoe_pool_claim(struct numoe_pool_hand *hand, uint32_t *begin, uint32_t *end)
{
    const struct numoe_pool_kin *kin = &hand->pool->kins[hand->slot->kin];
    uint32_t count = hand->pool->worker_count;
    uint32_t place = hand->cursor;
    uint32_t d = 0, start = hand->worker % (kin->ring[1] - kin->ring[0]);

    if (hand->random)
        return claim_chaotic(hand, begin, end);
    if (claim_share(hand, hand->worker, begin, end))
        return true;
    /* From where the last claim of this phase found something: else a worker that runs a phase
     * alone would look at everybody for every share. */
    for (uint32_t i = 0; i < count; i++, place++) {
        uint32_t rotated;

        if (place == count) {
            place = 0;
            d = 0;
            start = hand->worker % (kin->ring[1] - kin->ring[0]);
        }
        while (place >= kin->ring[d + 1]) {
            d++;
            if (kin->ring[d + 1] > kin->ring[d])
                start = hand->worker % (kin->ring[d + 1] - kin->ring[d]);
        }
        rotated = place + start;
        if (rotated >= kin->ring[d + 1])
            rotated -= kin->ring[d + 1] - kin->ring[d];
        if (claim_from(hand, kin->order[rotated], 0, begin, end)) {
            hand->cursor = place;
            return true;
        }
    }
    hand->cursor = 0;
    return false;
}

bool numoe_pool_claim_random(struct numoe_pool_hand *hand, uint32_t *item)
{
    uint32_t w = numoe_pool_random(hand) % hand->pool->worker_count;
    uint32_t end;

    /* Not a share: there would be no place for its rest. */
    if (w == hand->worker || !steal(hand, w, 1, item, &end))
        return false;
    count_steal(hand->slot, 1);
    return true;
}
