/* Dividing a call between GPU and CPUs. SPDX-License-Identifier: Apache-2.0 */
#include "gpu_share.h"

#include <string.h>

/* How far a call moves a correction towards what it took. */
#define STEP 0.5
/* So many calls later both sides are thought a little better of, to be tried again. */
enum { HOPE_CALLS = 64 };
#define HOPE 0.97
/* What is thought to be lost before the CPUs begin, at most, of a call: more was an accident. */
#define LATE_PART 0.25

static unsigned size_of(uint64_t tokens)
{
    unsigned i = 0;

    while (tokens > 1 && i + 1 < GPU_SHARE_SIZES) {
        tokens /= 2;
        i++;
    }
    return i;
}

/* What is known of a size, or of the nearest that something is known of. */
static double nearest(const double *known, unsigned size, double unknown)
{
    for (unsigned d = 0; d < GPU_SHARE_SIZES; d++) {
        if (d <= size && known[size - d] > 0)
            return known[size - d];
        if (size + d < GPU_SHARE_SIZES && known[size + d] > 0)
            return known[size + d];
    }
    return unknown;
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

static double smaller(double a, double b)
{
    return a < b ? a : b;
}

struct sums {
    double copied, computed, cpu; /* bytes; (token, expert) pairs; seconds */
    uint64_t gpu_experts, cpu_experts, copied_experts;
};

static double cpu_of(const struct gpu_share *s, uint32_t tokens)
{
    return larger(s->expert_bytes / s->cpu_read, tokens * s->token_operations / s->cpu_rate);
}

static void add(const struct gpu_share *s, uint32_t tokens, bool held, bool on_gpu, double sign,
                struct sums *sums)
{
    if (on_gpu) {
        sums->gpu_experts += sign > 0 ? 1 : -1;
        sums->copied_experts += held ? 0 : sign > 0 ? 1 : -1;
        sums->copied += held ? 0 : sign * s->expert_bytes;
        sums->computed += sign * tokens;
    } else {
        sums->cpu_experts += sign > 0 ? 1 : -1;
        sums->cpu += sign * cpu_of(s, tokens);
    }
}

static void weigh(const struct gpu_share *s, uint64_t tokens, const struct sums *sums,
                  struct gpu_share_choice *choice)
{
    const unsigned size = size_of(tokens);
    const double link = (sums->copied + (double)tokens * s->token_bytes) / s->link_rate;
    const double arithmetic = sums->computed * s->token_operations / s->gpu_rate;

    *choice = (struct gpu_share_choice){.gpu_experts = sums->gpu_experts,
                                        .cpu_experts = sums->cpu_experts,
                                        .copied = sums->copied_experts};
    choice->gpu_model = sums->gpu_experts ? s->gpu_fixed + larger(link, arithmetic) : 0;
    choice->cpu_model = sums->cpu_experts ? s->cpu_fixed + sums->cpu : 0;
    choice->gpu_seconds = choice->gpu_model * nearest(s->gpu_took, size, 1);
    choice->cpu_seconds = choice->cpu_model * nearest(s->cpu_took, size, 1);
    choice->seconds = choice->gpu_seconds;
    if (sums->cpu_experts)
        choice->seconds =
            larger(choice->gpu_seconds,
                   choice->cpu_seconds + (sums->gpu_experts ? nearest(s->cpu_late, size, 0) : 0));
}

void gpu_share_cost(const struct gpu_share *s, uint64_t tokens, const uint32_t *tokens_of,
                    const uint8_t *held, const uint8_t *on_gpu, uint64_t experts,
                    struct gpu_share_choice *choice)
{
    struct sums sums = {0};

    for (uint64_t e = 0; e < experts; e++)
        if (tokens_of[e])
            add(s, tokens_of[e], held[e], on_gpu[e], 1, &sums);
    weigh(s, tokens, &sums, choice);
}

/* Held ones first, then by their tokens, most first; counting sort would want a bound of tokens. */
static bool before(const uint32_t *tokens_of, const uint8_t *held, uint32_t a, uint32_t b)
{
    if (!held[a] != !held[b])
        return held[a];
    return tokens_of[a] != tokens_of[b] ? tokens_of[a] > tokens_of[b] : a < b;
}

static void sift(const uint32_t *tokens_of, const uint8_t *held, uint32_t *order, uint64_t at,
                 uint64_t count)
{
    for (;;) {
        uint64_t last = at, child = 2 * at + 1;
        for (uint64_t c = child; c < child + 2 && c < count; c++)
            if (before(tokens_of, held, order[last], order[c]))
                last = c;
        if (last == at)
            return;
        const uint32_t swap = order[at];
        order[at] = order[last];
        order[last] = swap;
        at = last;
    }
}

static void sort(const uint32_t *tokens_of, const uint8_t *held, uint32_t *order, uint64_t count)
{
    for (uint64_t i = count / 2; i-- > 0;)
        sift(tokens_of, held, order, i, count);
    for (uint64_t end = count; end-- > 1;) {
        const uint32_t swap = order[0];
        order[0] = order[end];
        order[end] = swap;
        sift(tokens_of, held, order, 0, end);
    }
}

void gpu_share_choose(struct gpu_share *s, uint64_t tokens, const uint32_t *tokens_of,
                      const uint8_t *held, uint64_t experts, uint32_t *order, uint8_t *on_gpu,
                      struct gpu_share_choice *choice)
{
    struct sums sums = {0};
    uint64_t count = 0, best = 0;

    for (uint32_t e = 0; e < experts; e++)
        if (tokens_of[e])
            order[count++] = e;
    sort(tokens_of, held, order, count);
    for (uint64_t i = 0; i < count; i++)
        add(s, tokens_of[order[i]], held[order[i]], false, 1, &sums);
    weigh(s, tokens, &sums, choice);
    for (uint64_t i = 0; i < count; i++) {
        struct gpu_share_choice next;
        add(s, tokens_of[order[i]], held[order[i]], false, -1, &sums);
        add(s, tokens_of[order[i]], held[order[i]], true, 1, &sums);
        weigh(s, tokens, &sums, &next);
        if (next.seconds < choice->seconds) {
            *choice = next;
            best = i + 1;
        }
    }
    /* who does not share does not see it: it is thought better of, to be tried again */
    if (!choice->gpu_experts || !choice->cpu_experts)
        s->cpu_late[size_of(tokens)] = HOPE * nearest(s->cpu_late, size_of(tokens), 0);
    memset(on_gpu, 0, experts);
    for (uint64_t i = 0; i < best; i++)
        on_gpu[order[i]] = 1;
}

static void learn(double *known, double value)
{
    *known += *known > 0 ? STEP * (value - *known) : value;
}

void gpu_share_learn(struct gpu_share *s, uint64_t tokens, const struct gpu_share_choice *choice,
                     double gpu_seconds, double cpu_seconds, double cpu_late)
{
    const unsigned size = size_of(tokens);

    if (choice->gpu_model > 0 && gpu_seconds > 0)
        learn(&s->gpu_took[size], gpu_seconds / choice->gpu_model);
    if (choice->cpu_model > 0 && cpu_seconds > 0)
        learn(&s->cpu_took[size], cpu_seconds / choice->cpu_model);
    if (cpu_late > 0)
        learn(&s->cpu_late[size], smaller(cpu_late, LATE_PART * choice->seconds));
    if (++s->calls % HOPE_CALLS == 0)
        for (unsigned i = 0; i < GPU_SHARE_SIZES; i++) {
            s->gpu_took[i] *= HOPE;
            s->cpu_took[i] *= HOPE;
        }
}
