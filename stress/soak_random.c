/* Random numbers of the soak. SPDX-License-Identifier: Apache-2.0 */
#include "soak_walk.h"

#include <math.h>
#include <string.h>

__extension__ typedef unsigned __int128 wide;

/* SplitMix64: each state is a number away from the next, so any of them starts a stream. */
static uint64_t scramble(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint64_t soak_mix(uint64_t seed, uint64_t salt)
{
    return scramble(scramble(seed + 0x9e3779b97f4a7c15u) ^ (salt * 0xd1342543de82ef95u + 1));
}

uint64_t soak_next(struct soak_random *random)
{
    return scramble(random->state += 0x9e3779b97f4a7c15u);
}

uint64_t soak_below(struct soak_random *random, uint64_t count)
{
    return (uint64_t)((wide)soak_next(random) * count >> 64);
}

uint64_t soak_between(struct soak_random *random, uint64_t first, uint64_t last)
{
    return first + soak_below(random, last - first + 1);
}

bool soak_once(struct soak_random *random, uint64_t in)
{
    return soak_below(random, in) == 0;
}

double soak_unit(struct soak_random *random)
{
    return (double)(soak_next(random) >> 11) * 0x1p-53;
}

/* Sum of four uniform numbers: near enough, and the same on every machine, as log and cos are
 * not. */
float soak_normal(struct soak_random *random)
{
    double sum = 0;

    for (int i = 0; i < 4; i++)
        sum += soak_unit(random);
    return (float)((sum - 2) * 1.7320508075688772);
}

float soak_from_bf16(uint16_t bits)
{
    const uint32_t word = (uint32_t)bits << 16;
    float value;

    memcpy(&value, &word, sizeof value);
    return value;
}

uint16_t soak_to_bf16(float value)
{
    uint32_t word;

    memcpy(&word, &value, sizeof word);
    if (isnan(value))
        return (uint16_t)(word >> 16 | 0x40);
    return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}
