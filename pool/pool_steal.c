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
 * Order of victims: same L3, same node, same domain, same package, rest, and in these by what the
 * trip costs, if that is known of nodes. Those who are equally far are a ring, in which thieves
 * begin at different places. Within a phase a thief goes on from where it last found something, and
 * begins with the nearest again when it has seen all. Workers of equal groups share one list, so
 * lists cost kinds of workers times workers, two bytes each.
 *
 * A far steal must be worth the trip: what the victim has left, by the submitter's item_ns, and the
 * time that the thief has already waited in this phase must together exceed what the trip costs. So
 * nobody waits for longer than a trip while there is work, and work that is done sooner than it is
 * fetched stays where it is; whichever of the two it turns out to be, the cost is at most twice
 * that of having known. Items of unknown length count as nothing and are fetched after waiting. The
 * rule is dropped for victims that sleep (they may be left asleep, with their shares, on purpose)
 * and for a thief that is about to sleep (pool_park.c), so nothing is left lying by all.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "pool_internal.h"
#include "pool_os.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum numoe_pool_distance numoe_pool_distance(const struct numoe_pool_worker *a,
                                             const struct numoe_pool_worker *b)
{
    if (a->l3 == b->l3)
        return NUMOE_POOL_SAME_L3;
    if (a->node == b->node)
        return NUMOE_POOL_SAME_NODE;
    if (a->domain == b->domain)
        return NUMOE_POOL_SAME_DOMAIN;
    return a->package == b->package ? NUMOE_POOL_SAME_PACKAGE : NUMOE_POOL_ELSEWHERE;
}

static bool same_groups(const struct numoe_pool_worker *a, const struct numoe_pool_worker *b)
{
    return a->l3 == b->l3 && a->node == b->node && a->domain == b->domain &&
           a->package == b->package;
}

/* Sorts victims; equal places make a ring. */
struct place {
    enum numoe_pool_distance distance;
    uint64_t trip_ns;
};

static struct place place_of(const struct numoe_pool_config *config, uint32_t self, uint32_t w)
{
    const struct numoe_pool_worker *workers = config->workers;
    struct place place = {NUMOE_POOL_SAME_L3, 0};

    if (workers)
        place.distance = numoe_pool_distance(&workers[self], &workers[w]);
    place.trip_ns = config->trip_ns[place.distance];
    if (config->node_trip_ns && place.distance > NUMOE_POOL_SAME_NODE)
        place.trip_ns =
            config->node_trip_ns[(size_t)workers[self].node * config->node_count + workers[w].node];
    return place;
}

static bool nearer(struct place a, struct place b)
{
    return a.distance != b.distance ? a.distance < b.distance : a.trip_ns < b.trip_ns;
}

/* The ring of a place; those farther than the last belong to the last. */
static uint32_t ring_of(const struct place *rings, uint32_t count, struct place place)
{
    uint32_t ring = 0;

    while (ring + 1 < count && nearer(rings[ring], place))
        ring++;
    return ring;
}

/* The nearest places that there are, in order. @return how many */
static uint32_t list_rings(const struct numoe_pool_config *config, uint32_t self,
                           struct place *rings)
{
    uint32_t count = 0;

    for (uint32_t w = 0; w < config->worker_count; w++) {
        struct place place = place_of(config, self, w);
        uint32_t at = 0;

        while (at < count && nearer(rings[at], place))
            at++;
        if (at == NUMOE_POOL_RINGS || (at < count && !nearer(place, rings[at])))
            continue;
        if (count < NUMOE_POOL_RINGS)
            count++;
        memmove(&rings[at + 1], &rings[at], (count - 1 - at) * sizeof *rings);
        rings[at] = place;
    }
    return count;
}

/* Fill kin's list by counting sort over the rings seen from `self`. */
static void list_victims(struct numoe_pool_kin *kin, const struct numoe_pool_config *config,
                         uint32_t self)
{
    struct place rings[NUMOE_POOL_RINGS];
    uint32_t at[NUMOE_POOL_RINGS + 1] = {0};

    kin->rings = list_rings(config, self, rings);
    for (uint32_t w = 0; w < config->worker_count; w++)
        kin->ring[ring_of(rings, kin->rings, place_of(config, self, w)) + 1]++;
    for (uint32_t d = 0; d < kin->rings; d++) {
        kin->ring[d + 1] += kin->ring[d];
        kin->trip_ns[d] = rings[d].trip_ns;
    }
    memcpy(at, kin->ring, sizeof at);
    for (uint32_t w = 0; w < config->worker_count; w++)
        kin->order[at[ring_of(rings, kin->rings, place_of(config, self, w))]++] = (uint16_t)w;
}

int numoe_pool_kins_create(struct numoe_pool *pool, const struct numoe_pool_config *config)
{
    const struct numoe_pool_worker *workers = config->workers;
    uint32_t count = pool->worker_count;
    uint32_t *samples = numoe_pool_os_memory(count, sizeof *samples); /* a worker of each kind */
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
    pool->kins = numoe_pool_os_memory(kinds, sizeof *pool->kins);
    if (!pool->kins)
        goto fail;
    pool->kin_count = kinds;
    for (uint32_t k = 0; k < kinds; k++) {
        pool->kins[k].order = numoe_pool_os_memory(count, sizeof *pool->kins[k].order);
        if (!pool->kins[k].order)
            goto fail;
        list_victims(&pool->kins[k], config, samples[k]);
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

uint32_t numoe_pool_worth(uint64_t trip_ns, uint64_t waited_ns, uint32_t item_ns)
{
    uint64_t least;

    if (waited_ns >= trip_ns)
        return 1;
    if (item_ns == 0)
        return UINT32_MAX;
    least = (trip_ns - waited_ns) / item_ns;
    return least < UINT32_MAX ? (uint32_t)least + 1 : UINT32_MAX;
}

/* For how long the worker has found nothing near in this phase. */
static uint64_t waited_ns(struct numoe_pool_hand *hand)
{
    if (hand->greedy)
        return UINT64_MAX;
    if (hand->waited_ns == NUMOE_POOL_NOT_READ) {
        uint64_t now = numoe_pool_os_now_ns();

        if (hand->idle_since_ns == 0)
            hand->idle_since_ns = now;
        hand->waited_ns = now - hand->idle_since_ns;
    }
    return hand->waited_ns;
}

/* Worker w's whole share, if nobody has begun it and it has `least` items. */
static enum numoe_pool_catch claim_share(struct numoe_pool_hand *hand, uint32_t w, uint32_t least,
                                         uint32_t *begin, uint32_t *end)
{
    struct numoe_pool_worker_slot *slot = &hand->pool->workers[w];
    uint64_t number = hand->view.seq >> 1;
    uint64_t opened = atomic_load_explicit(&slot->opened, memory_order_relaxed);

    if (opened >= number || !numoe_pool_share(hand->pool, &hand->view, w, begin, end))
        return NUMOE_POOL_NOTHING;
    if (*end - *begin < least)
        return NUMOE_POOL_TOO_FEW;
    /* The share was read and found valid for this number before the swap; a share with items that
     * is still unopened proves that the phase is not over, and opened never falls. Exclusive by
     * the one modification order of `opened`; orders nothing else, the data came by seq. */
    if (!atomic_compare_exchange_strong_explicit(&slot->opened, &opened, number,
                                                 memory_order_relaxed, memory_order_relaxed))
        return NUMOE_POOL_NOTHING;
    hand->leaf = slot->leaf;
    return NUMOE_POOL_CAUGHT;
}

/* Items from the back of worker w's range. */
static enum numoe_pool_catch steal(struct numoe_pool_hand *hand, uint32_t w, uint32_t least,
                                   uint32_t most, uint32_t *begin, uint32_t *end)
{
    struct numoe_pool *pool = hand->pool;
    enum numoe_pool_catch caught = numoe_pool_range_steal(
        &pool->workers[w].range, hand->view.seq >> 1, least, most, begin, end);
    uint64_t seq;

    if (caught != NUMOE_POOL_CAUGHT)
        return caught;
    /* What we hold keeps its phase open: seq is that phase's and stands still. Another than the
     * view's only after 65536 phase numbers between looking and taking. */
    while ((seq = numoe_pool_seq(pool)) != hand->view.seq)
        numoe_pool_view_load(pool, seq, &hand->view);
    return caught;
}

static enum numoe_pool_catch claim_from(struct numoe_pool_hand *hand, uint32_t w, uint32_t least,
                                        uint32_t most, uint32_t *begin, uint32_t *end)
{
    enum numoe_pool_catch caught;

    if (w == hand->worker)
        return NUMOE_POOL_NOTHING;
    caught = claim_share(hand, w, least, begin, end);
    if (caught == NUMOE_POOL_NOTHING) {
        caught = steal(hand, w, least, most, begin, end);
        /* What w holds may be from anybody's share, but is from one. */
        if (caught == NUMOE_POOL_CAUGHT)
            hand->leaf = numoe_pool_leaf_of(hand->pool, &hand->view, *begin);
    }
    if (caught == NUMOE_POOL_CAUGHT)
        numoe_pool_count_steal(hand, w, *end - *begin);
    return caught;
}

/* The same for tests: anyone first, any amount, the own share perhaps last. */
static bool claim_chaotic(struct numoe_pool_hand *hand, uint32_t *begin, uint32_t *end)
{
    uint32_t workers = hand->pool->worker_count;
    uint32_t start = numoe_pool_random(hand) % workers;
    uint32_t most = numoe_pool_random(hand) & 1 ? 0 : 1 + numoe_pool_random(hand) % 5;

    if (numoe_pool_random(hand) % 4 &&
        claim_share(hand, hand->worker, 1, begin, end) == NUMOE_POOL_CAUGHT)
        return true;
    for (uint32_t i = 0; i < workers; i++) {
        if (claim_from(hand, (start + i) % workers, 1, most, begin, end) == NUMOE_POOL_CAUGHT)
            return true;
    }
    return claim_share(hand, hand->worker, 1, begin, end) == NUMOE_POOL_CAUGHT;
}

/* Look at the places [from, to) of one ring. */
static enum numoe_pool_catch claim_ring(struct numoe_pool_hand *hand, uint32_t ring, uint32_t from,
                                        uint32_t to, uint32_t *begin, uint32_t *end)
{
    const struct numoe_pool *pool = hand->pool;
    const struct numoe_pool_kin *kin = &pool->kins[hand->slot->kin];
    uint32_t first = kin->ring[ring], size = kin->ring[ring + 1] - first;
    uint32_t start = hand->worker % size, least = 1;
    bool sleepers = false, few = false;

    if (kin->trip_ns[ring]) {
        least = numoe_pool_worth(kin->trip_ns[ring], waited_ns(hand), hand->view.item_ns);
        /* Pairs with the add in park (pool_park.c): those left asleep are seen. */
        sleepers = least > 1 && (atomic_load_explicit(&pool->sleepers, memory_order_seq_cst) ||
                                 atomic_load_explicit(&pool->absent, memory_order_seq_cst));
        if (least > hand->view.items && !sleepers)
            return NUMOE_POOL_TOO_FEW; /* for everyone: their lines are left alone */
    }
    for (uint32_t place = from; place < to; place++) {
        uint32_t rotated =
            place + start < kin->ring[ring + 1] ? place + start : place + start - size;
        uint32_t w = kin->order[rotated];
        enum numoe_pool_catch caught =
            claim_from(hand, w, sleepers && !numoe_pool_awake(pool, w) ? 1 : least, 0, begin, end);

        if (caught == NUMOE_POOL_CAUGHT) {
            hand->cursor = place;
            return caught;
        }
        few |= caught == NUMOE_POOL_TOO_FEW;
    }
    return few ? NUMOE_POOL_TOO_FEW : NUMOE_POOL_NOTHING;
}

bool numoe_pool_claim(struct numoe_pool_hand *hand, uint32_t *begin, uint32_t *end)
{
    const struct numoe_pool_kin *kin = &hand->pool->kins[hand->slot->kin];
    uint32_t cursor = hand->cursor, ring = 0;
    bool few = false;

    if (hand->random)
        return claim_chaotic(hand, begin, end);
    if (claim_share(hand, hand->worker, 1, begin, end) == NUMOE_POOL_CAUGHT)
        return true;
    hand->waited_ns = NUMOE_POOL_NOT_READ;
    /* From where the last claim of this phase found something: else a worker that runs a phase
     * alone would look at everybody for every share. Then the rest, from the nearest. */
    while (cursor >= kin->ring[ring + 1])
        ring++;
    for (uint32_t d = ring, from = cursor; d < kin->rings; d++, from = kin->ring[d]) {
        enum numoe_pool_catch caught = claim_ring(hand, d, from, kin->ring[d + 1], begin, end);

        if (caught == NUMOE_POOL_CAUGHT)
            return true;
        few |= caught == NUMOE_POOL_TOO_FEW;
    }
    for (uint32_t d = 0; d <= ring; d++) {
        uint32_t to = d == ring ? cursor : kin->ring[d + 1];
        enum numoe_pool_catch caught = claim_ring(hand, d, kin->ring[d], to, begin, end);

        if (caught == NUMOE_POOL_CAUGHT)
            return true;
        few |= caught == NUMOE_POOL_TOO_FEW;
    }
    if (few)
        numoe_pool_count(&hand->slot->refusals, 1);
    hand->cursor = 0;
    return false;
}

bool numoe_pool_claim_random(struct numoe_pool_hand *hand, uint32_t *item)
{
    uint32_t w = numoe_pool_random(hand) % hand->pool->worker_count;
    uint32_t end;

    /* Not a share: there would be no place for its rest. */
    if (w == hand->worker || steal(hand, w, 1, 1, item, &end) != NUMOE_POOL_CAUGHT)
        return false;
    numoe_pool_count_steal(hand, w, 1);
    return true;
}
