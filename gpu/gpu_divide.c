/* Parts of several devices. SPDX-License-Identifier: Apache-2.0 */
#include "gpu_divide.h"

/* A group's bytes may differ from its due by so much of it. */
#define UNEVEN 0.125

static uint32_t root(const uint32_t *parent, uint32_t i)
{
    while (parent[i] != i)
        i = parent[i];
    return i;
}

/* Devices that are nearest to the same region are joined; first[r] is one of them. Returns whether
 * every distance is known and every device nearest to something. */
static bool join_nearest(uint32_t devices, uint32_t regions, const uint64_t *bytes,
                         const uint32_t *distance, uint32_t *parent, uint32_t *first)
{
    bool has[NUMOE_GPU_MOST] = {false}, all = true;

    for (uint32_t r = 0; r < regions; r++) {
        uint32_t nearest = UINT32_MAX;

        first[r] = 0;
        if (!bytes[r])
            continue;
        for (uint32_t d = 0; d < devices; d++) {
            const uint32_t far = distance[d * regions + r];
            if (far == 0)
                return false;
            if (far < nearest) {
                nearest = far;
                first[r] = d;
            }
        }
        for (uint32_t d = first[r]; d < devices; d++)
            if (distance[d * regions + r] == nearest) {
                has[d] = true;
                parent[root(parent, d)] = root(parent, first[r]);
            }
    }
    for (uint32_t d = 0; d < devices; d++)
        all = all && has[d];
    return all;
}

/* Groups in the order of their first devices. */
static void number_groups(struct gpu_division *v, const uint32_t *parent, const uint32_t *weight)
{
    uint32_t number[NUMOE_GPU_MOST];

    v->groups = 0;
    for (uint32_t d = 0; d < v->devices; d++)
        number[d] = UINT32_MAX;
    for (uint32_t d = 0; d < v->devices; d++) {
        const uint32_t at = root(parent, d);
        if (number[at] == UINT32_MAX) {
            v->weight[v->groups] = 0;
            number[at] = v->groups++;
        }
        v->group[d] = number[at];
        v->begin[d] = v->weight[v->group[d]];
        v->end[d] = v->weight[v->group[d]] += weight[d];
    }
}

static bool even(const struct gpu_division *v, uint32_t regions, const uint64_t *bytes,
                 const uint32_t *region_group)
{
    double had[NUMOE_GPU_MOST] = {0}, total = 0, weights = 0;

    for (uint32_t r = 0; r < regions; r++) {
        had[region_group[r]] += (double)bytes[r];
        total += (double)bytes[r];
    }
    for (uint32_t g = 0; g < v->groups; g++)
        weights += v->weight[g];
    for (uint32_t g = 0; g < v->groups; g++) {
        const double due = total * v->weight[g] / weights;
        if (had[g] > due * (1 + UNEVEN) || had[g] < due * (1 - UNEVEN))
            return false;
    }
    return true;
}

void gpu_divide(uint32_t devices, const uint32_t *weight, uint32_t regions, const uint64_t *bytes,
                const uint32_t *distance, struct gpu_division *v, uint32_t *region_group)
{
    uint32_t parent[NUMOE_GPU_MOST] = {0};
    bool near;

    *v = (struct gpu_division){.devices = devices};
    for (uint32_t d = 0; d < devices; d++)
        parent[d] = d;
    near = join_nearest(devices, regions, bytes, distance, parent, region_group);
    if (near) {
        number_groups(v, parent, weight);
        for (uint32_t r = 0; r < regions; r++)
            region_group[r] = v->group[region_group[r]];
        near = even(v, regions, bytes, region_group);
    }
    if (near)
        return;
    for (uint32_t d = 0; d < devices; d++)
        parent[d] = 0;
    for (uint32_t r = 0; r < regions; r++)
        region_group[r] = 0;
    number_groups(v, parent, weight);
}

static uint64_t boundary(uint64_t part, uint64_t of, uint64_t layer, uint64_t experts)
{
    return part == of ? experts : part ? (experts * part + layer % of) / of : 0;
}

bool gpu_divide_has(const struct gpu_division *v, uint32_t device, uint64_t layer, uint64_t expert,
                    uint64_t experts)
{
    const uint64_t of = v->weight[v->group[device]];

    return expert >= boundary(v->begin[device], of, layer, experts) &&
           expert < boundary(v->end[device], of, layer, experts);
}
