/*
 * probes.h - static probes (USDT) of provider numoe, where <sys/sdt.h> is; else nothing at all.
 *
 * A probe is one nop and a note in the ELF file that says where its arguments are; docs/stats.md
 * lists them.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_PROBES_H
#define NUMOE_PROBES_H

/* What the macros of sys/sdt.h expand to is no pedantic C. */
#pragma GCC system_header

#include <stdint.h>

#ifdef NUMOE_HAVE_SDT
#include <sys/sdt.h>
#else
#define DTRACE_PROBE1(provider, name, a) ((void)(a))
#define DTRACE_PROBE3(provider, name, a, b, c) ((void)(a), (void)(b), (void)(c))
#define DTRACE_PROBE4(provider, name, a, b, c, d) ((void)(a), (void)(b), (void)(c), (void)(d))
#endif

static inline void numoe_probe_park(uint32_t worker)
{
    DTRACE_PROBE1(numoe, park, worker);
}

static inline void numoe_probe_wake(uint32_t worker)
{
    DTRACE_PROBE1(numoe, wake, worker);
}

static inline void numoe_probe_steal(uint32_t worker, uint32_t victim, uint32_t distance,
                                     uint32_t items)
{
    DTRACE_PROBE4(numoe, steal, worker, victim, distance, items);
}

static inline void numoe_probe_item_start(uint32_t worker, uint64_t phase, uint32_t item)
{
    DTRACE_PROBE3(numoe, item__start, worker, phase, item);
}

static inline void numoe_probe_item_done(uint32_t worker, uint64_t phase, uint32_t item)
{
    DTRACE_PROBE3(numoe, item__done, worker, phase, item);
}

static inline void numoe_probe_call_start(uint64_t layer, uint64_t tokens, uint64_t top_k)
{
    DTRACE_PROBE3(numoe, call__start, layer, tokens, top_k);
}

static inline void numoe_probe_call_done(uint64_t layer, uint64_t tokens, int result)
{
    DTRACE_PROBE3(numoe, call__done, layer, tokens, result);
}

#endif
