/* Which setting of the reader is kept, on made-up disks and clocks. */
#include "read_tuning.h"

#include <criterion/criterion.h>

#define MIB ((uint64_t)1 << 20)

/* A disk that reads so many GB/s with each setting; in one round, `slow` of that, for one setting.
 */
struct disk {
    double rates[NUMOE_READ_SETTINGS];
    unsigned disturbed, round; /* disturbed: a setting, or SETTINGS for none */
    double slow;
    uint64_t step;         /* bytes between two looks */
    uint64_t dry_settings; /* bits: a setting's trials find nothing in flight, ... */
    unsigned dry_rounds;   /* ... in so many rounds */
};

/* Read everything. @return the setting at the end; *turns: how often another was used */
static unsigned read_all(const struct disk *disk, uint64_t total, struct numoe_read_tuning *t,
                         unsigned *turns)
{
    uint64_t now = 12345, dry = 1;

    *turns = 0;
    numoe_read_tuning_begin(t, total, now);
    cr_assert_eq(t->setting, 0);
    for (uint64_t bytes = disk->step; bytes <= total; bytes += disk->step) {
        const bool over = numoe_read_tuning_over(t);
        double rate = disk->rates[t->setting];

        if (!over && t->setting == disk->disturbed && t->trial / NUMOE_READ_SETTINGS == disk->round)
            rate *= disk->slow;
        now += (uint64_t)((double)disk->step / rate);
        dry += t->measuring && (disk->dry_settings >> t->setting & 1) &&
               t->trial / NUMOE_READ_SETTINGS < disk->dry_rounds;
        *turns += numoe_read_tuning_look(t, bytes, dry, now);
        cr_assert(!over || numoe_read_tuning_over(t), "it is over once");
    }
    return t->setting;
}

/* All trials, and the way back from the last one's setting. */
enum { TURNS = NUMOE_READ_SETTINGS * NUMOE_READ_ROUNDS };

Test(read_tuning, the_fastest_is_kept_whatever_the_order_of_looks)
{
    static const uint64_t steps[] = {MIB, 2 * MIB, 3 * MIB, 13 * MIB, 40 * MIB};
    struct numoe_read_tuning t;
    unsigned turns;

    for (unsigned best = 0; best < NUMOE_READ_SETTINGS; best++)
        for (unsigned s = 0; s < sizeof steps / sizeof steps[0]; s++) {
            struct disk disk = {.disturbed = NUMOE_READ_SETTINGS, .step = steps[s]};

            for (unsigned i = 0; i < NUMOE_READ_SETTINGS; i++)
                disk.rates[i] = i == best ? 3.0 : 2.0 + 0.01 * i;
            cr_expect_eq(read_all(&disk, 3 * numoe_read_tuned_bytes, &t, &turns), best,
                         "%u and not %u, looks every %llu MiB", t.setting, best,
                         (unsigned long long)(steps[s] / MIB));
            /* the last trial's setting may be the one that is kept */
            cr_expect_eq(turns, best == NUMOE_READ_SETTINGS - 1 ? TURNS - 1 : TURNS);
            cr_expect_float_eq(t.rates[best][0], 3.0, 0.01);
        }
}

Test(read_tuning, what_is_hardly_faster_changes_nothing)
{
    struct disk disk = {.disturbed = NUMOE_READ_SETTINGS, .step = 2 * MIB};
    struct numoe_read_tuning t;
    unsigned turns;

    for (unsigned i = 0; i < NUMOE_READ_SETTINGS; i++)
        disk.rates[i] = i ? 1.0 + 0.018 * i : 1.0;
    cr_expect_eq(read_all(&disk, 2 * numoe_read_tuned_bytes, &t, &turns), 0);
    cr_expect_eq(turns, TURNS);
    disk.rates[3] = 1.12;
    cr_expect_eq(read_all(&disk, 2 * numoe_read_tuned_bytes, &t, &turns), 3);
}

/* One disturbance, up or down, of any setting in any round. */
Test(read_tuning, one_disturbance_does_not_decide)
{
    struct numoe_read_tuning t;
    unsigned turns;

    for (unsigned hit = 0; hit < NUMOE_READ_SETTINGS; hit++)
        for (unsigned round = 0; round < NUMOE_READ_ROUNDS; round++)
            for (unsigned up = 0; up < 2; up++)
                for (unsigned best = 0; best < NUMOE_READ_SETTINGS; best++) {
                    struct disk disk = {
                        .disturbed = hit, .round = round, .slow = up ? 5 : 0.2, .step = 2 * MIB};

                    for (unsigned i = 0; i < NUMOE_READ_SETTINGS; i++)
                        disk.rates[i] = i == best ? 1.3 : 1.0;
                    cr_expect_eq(read_all(&disk, 2 * numoe_read_tuned_bytes, &t, &turns), best,
                                 "setting %u hit in round %u: %u and not %u", hit, round, t.setting,
                                 best);
                }
}

/* Where placing is slower than the disk nothing is learnt of the disk. */
Test(read_tuning, what_waited_for_its_reader_does_not_count)
{
    struct numoe_read_tuning t;
    unsigned turns;

    for (unsigned rounds = 0; rounds <= NUMOE_READ_ROUNDS; rounds++)
        for (unsigned dry = 0; dry < NUMOE_READ_SETTINGS; dry++)
            for (unsigned best = 1; best < NUMOE_READ_SETTINGS; best++) {
                struct disk disk = {.disturbed = NUMOE_READ_SETTINGS,
                                    .step = 2 * MIB,
                                    .dry_settings = 1u << dry,
                                    .dry_rounds = rounds};
                /* neither a setting that is not known wins, nor one over the first if that is not
                 */
                const unsigned right = rounds >= 2 && (dry == best || dry == 0) ? 0 : best;

                for (unsigned i = 0; i < NUMOE_READ_SETTINGS; i++)
                    disk.rates[i] = i == best ? 2.0 : 1.0;
                cr_expect_eq(read_all(&disk, 2 * numoe_read_tuned_bytes, &t, &turns), right,
                             "setting %u dry in %u rounds: %u and not %u", dry, rounds, t.setting,
                             right);
            }
}

/* Trials are a third of a load at most; a smaller one has none. */
Test(read_tuning, small_loads_are_not_tuned)
{
    struct disk disk = {.disturbed = NUMOE_READ_SETTINGS, .step = 2 * MIB};
    struct numoe_read_tuning t;
    unsigned turns;

    for (unsigned i = 0; i < NUMOE_READ_SETTINGS; i++)
        disk.rates[i] = i == 4 ? 9 : 1;
    cr_expect_eq(read_all(&disk, numoe_read_tuned_bytes - 1, &t, &turns), 0);
    cr_expect_eq(turns, 0);
    cr_expect(numoe_read_tuning_over(&t));
    cr_expect_eq(read_all(&disk, numoe_read_tuned_bytes, &t, &turns), 4);
    cr_expect_lt(numoe_read_tuned_bytes, 5500000000);
}

/* A clock that stands still measures nothing, and divides by nothing. */
Test(read_tuning, a_clock_that_stands_is_waited_for)
{
    struct numoe_read_tuning t;

    numoe_read_tuning_begin(&t, numoe_read_tuned_bytes, 5);
    for (uint64_t bytes = 0; bytes < numoe_read_tuned_bytes; bytes += MIB)
        cr_expect(!numoe_read_tuning_look(&t, bytes, 0, 5));
    cr_expect_eq(t.trial, 0);
}
