/* Whole-number shares. SPDX-License-Identifier: Apache-2.0 */
#include "plan_shares.h"

#include <stddef.h>

/* A node whose share is not decided yet; no real share is so large. */
static const uint64_t open_share = UINT64_MAX;

/* Give one more to those with the largest remainders; each has room for it. */
static void split_remainder(uint64_t rest, uint64_t part, plan_u128 sum, uint32_t count,
                            const uint64_t *weight, const uint64_t *limit, uint64_t *share)
{
    while (rest--) {
        uint32_t best = count;
        plan_u128 best_left = 0;

        for (uint32_t i = 0; i < count; i++) {
            plan_u128 exact = (plan_u128)part * weight[i], left = exact % sum;

            if (!weight[i] || share[i] >= limit[i] || share[i] != (uint64_t)(exact / sum))
                continue; /* full, or has had one */
            if (best == count || left > best_left) {
                best = i;
                best_left = left;
            }
        }
        if (best == count)
            return;
        share[best]++;
    }
}

bool plan_split(uint64_t total, uint32_t count, const uint64_t *weight, const uint64_t *limit,
                uint64_t *share)
{
    plan_u128 room = 0;
    uint64_t part = total;

    for (uint32_t i = 0; i < count; i++) {
        share[i] = open_share;
        room += limit[i];
    }
    if (room < total)
        return false;
    for (;;) {
        plan_u128 sum = 0;
        uint64_t taken = 0;
        bool filled = false;

        for (uint32_t i = 0; i < count; i++)
            if (share[i] == open_share)
                sum += weight[i];
        if (sum == 0)
            break;
        /* what a full node cannot take makes the others' parts larger, never smaller */
        for (uint32_t i = 0; i < count; i++) {
            if (share[i] != open_share || (plan_u128)part * weight[i] / sum < limit[i])
                continue;
            share[i] = limit[i];
            taken += limit[i];
            filled = true;
        }
        if (filled) {
            part -= taken;
            continue;
        }
        for (uint32_t i = 0; i < count; i++) {
            if (share[i] != open_share)
                continue;
            share[i] = (uint64_t)((plan_u128)part * weight[i] / sum);
            taken += share[i];
        }
        split_remainder(part - taken, part, sum, count, weight, limit, share);
        return true;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (share[i] != open_share)
            continue;
        share[i] = part < limit[i] ? part : limit[i];
        part -= share[i];
    }
    return true;
}

bool plan_fill(uint64_t experts, const struct numoe_expert_shape *shape, uint32_t count,
               const uint64_t *room, uint64_t *share)
{
    const uint64_t with_first = shape->slice_bytes + shape->expert_bytes;
    uint64_t left = experts * shape->slices, firsts = experts;

    for (uint32_t i = 0; i < count; i++) {
        uint64_t most = room[i] / with_first;

        if (most >= firsts)
            most = firsts + (room[i] - firsts * with_first) / shape->slice_bytes;
        share[i] = most < left ? most : left;
        left -= share[i];
        firsts -= share[i] < firsts ? share[i] : firsts;
    }
    return !left;
}

void plan_accumulate(uint64_t total, uint32_t count, const uint64_t *share, uint64_t *cumulative)
{
    uint64_t before = 0;

    for (uint32_t i = 0; i < count; i++) {
        /* rounded up: then floor(total * cumulative) is `before` again, as total <= 2^62 */
        cumulative[i] = (uint64_t)((((plan_u128)before << PLAN_SHARE_BITS) + total - 1) / total);
        before += share[i];
    }
    cumulative[0] = 0;
    cumulative[count] = PLAN_SHARE_ONE;
}

uint64_t plan_scale(uint64_t units, uint64_t share)
{
    return (uint64_t)((plan_u128)units * share >> PLAN_SHARE_BITS);
}

uint64_t plan_common_divisor(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t rest = a % b;

        a = b;
        b = rest;
    }
    return a;
}

uint64_t plan_expert_step(uint64_t experts)
{
    /* 0.618 in 1/2^32: integers, so that every machine finds the same */
    uint64_t middle = (uint64_t)((plan_u128)experts * 2654435769u >> 32);

    for (uint64_t away = 0; away <= middle; away++) {
        if (middle - away && plan_common_divisor(middle - away, experts) == 1)
            return middle - away;
        if (middle + away && middle + away < experts &&
            plan_common_divisor(middle + away, experts) == 1)
            return middle + away;
    }
    return 1;
}
