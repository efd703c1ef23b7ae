/* Which setting reads fastest. SPDX-License-Identifier: Apache-2.0 */
#include "read_tuning.h"

#include <stdlib.h>

/* Of each trial: what is in flight from the one before, all of which is no more than 32 MiB, then
 * what is measured. */
#define SETTLE_BYTES ((uint64_t)32 << 20)
#define TRIAL_BYTES ((uint64_t)64 << 20)
#define BETTER 1.1

enum { TRIALS = NUMOE_READ_SETTINGS * NUMOE_READ_ROUNDS, SHARE = 3 };

const struct numoe_read_setting numoe_read_settings[NUMOE_READ_SETTINGS] = {
    {16, 2 << 20}, {8, 2 << 20}, {32, 1 << 20}, {32, 512 << 10}, {8, 4 << 20}, {4, 4 << 20}};

const uint64_t numoe_read_tuned_bytes = SHARE * TRIALS * (SETTLE_BYTES + TRIAL_BYTES);

void numoe_read_tuning_begin(struct numoe_read_tuning *t, uint64_t total_bytes, uint64_t now_ns)
{
    *t = (struct numoe_read_tuning){.began_ns = now_ns};
    if (total_bytes < numoe_read_tuned_bytes)
        t->trial = TRIALS;
}

static int by_rate(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static unsigned best_setting(struct numoe_read_tuning *t)
{
    unsigned best = 0;

    for (unsigned i = 0; i < NUMOE_READ_SETTINGS; i++) {
        qsort(t->rates[i], NUMOE_READ_ROUNDS, sizeof t->rates[i][0], by_rate);
        t->rates[i][0] = t->rates[i][NUMOE_READ_ROUNDS / 2];
        if (t->rates[0][0] > 0 && t->rates[i][0] > t->rates[best][0] &&
            t->rates[i][0] > BETTER * t->rates[0][0])
            best = i;
    }
    return best;
}

bool numoe_read_tuning_look(struct numoe_read_tuning *t, uint64_t bytes, uint64_t dry,
                            uint64_t now_ns)
{
    const unsigned before = t->setting;
    const uint64_t read = bytes - t->bytes;

    if (numoe_read_tuning_over(t) || read < (t->measuring ? TRIAL_BYTES : SETTLE_BYTES) ||
        now_ns <= t->began_ns)
        return false;
    if (t->measuring) {
        t->rates[t->trial % NUMOE_READ_SETTINGS][t->trial / NUMOE_READ_SETTINGS] =
            dry == t->dry ? (double)read / (double)(now_ns - t->began_ns) : 0;
        t->trial++;
        t->setting = numoe_read_tuning_over(t) ? best_setting(t) : t->trial % NUMOE_READ_SETTINGS;
    }
    t->measuring = !t->measuring;
    t->bytes = bytes;
    t->dry = dry;
    t->began_ns = now_ns;
    return t->setting != before;
}
