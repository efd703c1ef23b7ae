/*
 * Measure how fast each node's memory is read, and from where.
 *
 * A team is one thread for each core, pinned to it. Its threads wait at a gate until all are there,
 * and then read blocks of their own part of a buffer until the time is over; each divides its bytes
 * by its own time, so one that begins late or is held up lowers the sum by no more than it lost.
 *
 * The gate is a mutex and a condition variable, taken once a measurement. Everything else a thread
 * writes is in its own record, which the caller reads after joining it.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "calibrate.h"

#include "base/clock.h"
#include "numoe_kernels.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINE = 64, UNIT = 4096, BLOCK = 2 << 20, STEPS = 2048 };

static const uint64_t huge_page = (uint64_t)2 << 20, default_pair_ns = 300000000u;
static const uint64_t least_buffer = (uint64_t)128 << 20, most_buffer = (uint64_t)1 << 30;
static const uint64_t least_chain = (uint64_t)64 << 20;

/* What a node contributes. */
struct place {
    struct numoe_memory *memory; /* NULL: nothing is measured there */
    uint8_t *address;
    uint64_t bytes, chain_bytes;
    uint64_t chain; /* where the next walk begins */
};

struct calibration {
    struct numoe_machine *machine;
    const struct numoe_calibrate_options *options;
    const char *isa;
    uint64_t pair_ns;
    uint64_t begun_ns;
    struct place *places;   /* of nodes */
    uint64_t *domain_cache; /* bytes of last-level cache of domains */
    uint64_t largest_cache; /* of one cache */
    struct numoe_pair_speed *pairs;
    uint32_t pair_count;
    uint64_t *together;
    uint32_t unpinned; /* threads that could not be pinned */
    int pin_errno;
    uint32_t done, total;
};

static void note(struct numoe_machine *machine, const char *format, ...) NUMOE_PRINTF(2, 3);

/* A note that cannot be kept is lost: there are more important things when memory has run out. */
static void note(struct numoe_machine *machine, const char *format, ...)
{
    char **grown = realloc(machine->notes, (machine->note_count + 1u) * sizeof *grown);
    char *text;
    va_list args;
    int length;

    if (!grown)
        return;
    machine->notes = grown;
    va_start(args, format);
    length = vasprintf(&text, format, args);
    va_end(args);
    if (length >= 0)
        grown[machine->note_count++] = text;
}

/* ---- teams ---- */

enum gate_state { GATE_CLOSED, GATE_OPEN, GATE_ABANDONED };

struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    enum gate_state state; /* under lock */
};

struct reader {
    pthread_t thread;
    struct gate *gate;
    const char *isa;
    uint32_t os_cpu, node; /* node: dense index of the memory that is read */
    const uint8_t *address;
    uint64_t bytes; /* a multiple of UNIT */
    uint64_t duration_ns;
    uint64_t *chain; /* not NULL: walk from there instead of reading */
    const uint8_t *chain_base;
    int pin_errno;
    double rate; /* bytes a second; or ns a step */
};

static int pin(uint32_t os_cpu)
{
    size_t size = CPU_ALLOC_SIZE(os_cpu + 1);
    cpu_set_t *set = CPU_ALLOC(os_cpu + 1);
    int rc;

    if (!set)
        return ENOMEM;
    CPU_ZERO_S(size, set);
    CPU_SET_S(os_cpu, size, set);
    rc = sched_setaffinity(0, size, set) ? errno : 0;
    CPU_FREE(set);
    return rc;
}

/* Read blocks in a round until the time is over; the first part of it only warms up. */
static void read_for(struct reader *reader)
{
    uint64_t begin = numoe_now_ns(), warm = begin + reader->duration_ns / 8, now = begin;
    uint64_t end = begin + reader->duration_ns, at = 0, done = 0;
    bool counting = false;

    do {
        uint64_t bytes = reader->bytes - at < BLOCK ? reader->bytes - at : BLOCK;

        if (!counting && now >= warm) {
            counting = true;
            begin = now;
            done = 0;
        }
        done += numoe_ceiling_run(NUMOE_CEILING_READ, reader->isa, reader->address + at, bytes);
        at = at + bytes < reader->bytes ? at + bytes : 0;
        now = numoe_now_ns();
    } while (now < end);
    reader->rate = now > begin ? (double)done * 1e9 / (double)(now - begin) : 0;
}

/* Each line holds the offset of the next: no load can begin before the one before it has ended. */
static void walk_for(struct reader *reader)
{
    uint64_t begin = numoe_now_ns(), now = begin, end = begin + reader->duration_ns, steps = 0;
    uint64_t at = *reader->chain;

    do {
        for (uint32_t i = 0; i < STEPS; i++)
            memcpy(&at, reader->chain_base + at, sizeof at);
        steps += STEPS;
        now = numoe_now_ns();
    } while (now < end);
    *reader->chain = at;
    reader->rate = (double)(now - begin) / (double)steps;
}

static void *reader_main(void *argument)
{
    struct reader *reader = argument;
    enum gate_state state;

    reader->pin_errno = pin(reader->os_cpu);
    pthread_mutex_lock(&reader->gate->lock);
    while (reader->gate->state == GATE_CLOSED)
        pthread_cond_wait(&reader->gate->changed, &reader->gate->lock);
    state = reader->gate->state;
    pthread_mutex_unlock(&reader->gate->lock);
    if (state == GATE_ABANDONED)
        return NULL;
    if (reader->chain)
        walk_for(reader);
    else
        read_for(reader);
    return NULL;
}

/* Start all, let them go, join. Those that cannot be started are left out; none: -EAGAIN. */
static int run_team(struct calibration *c, struct reader *readers, uint32_t count)
{
    struct gate gate = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, GATE_CLOSED};
    uint32_t started = 0;

    while (started < count) {
        readers[started].gate = &gate;
        readers[started].isa = c->isa;
        if (pthread_create(&readers[started].thread, NULL, reader_main, &readers[started]))
            break;
        started++;
    }
    pthread_mutex_lock(&gate.lock);
    gate.state = started == count ? GATE_OPEN : GATE_ABANDONED;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.lock);
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(readers[i].thread, NULL);
        if (readers[i].pin_errno) {
            c->unpinned++;
            c->pin_errno = readers[i].pin_errno;
        }
    }
    pthread_mutex_destroy(&gate.lock);
    pthread_cond_destroy(&gate.changed);
    return started == count ? 0 : -EAGAIN;
}

/* As many as can be started: a limit of threads halves the team until it fits. */
static int run_some(struct calibration *c, struct reader *readers, uint32_t *count)
{
    uint32_t some = *count;
    int rc;

    while ((rc = run_team(c, readers, some)) == -EAGAIN && some > 1)
        some /= 2;
    if (!rc && some < *count)
        note(c->machine, "only %" PRIu32 " of %" PRIu32 " threads could be started to measure",
             some, *count);
    *count = some;
    return rc;
}

/* ---- preparing ---- */

/* Bytes of the last-level cache of a CPU; what the system does not tell is taken as 32 MiB. */
static uint64_t cache_bytes(uint32_t os_cpu)
{
    for (int index = 4; index >= 2; index--) {
        char path[96];
        unsigned long long kilobytes;
        FILE *file;
        int read;

        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%" PRIu32 "/cache/index%d/size",
                 os_cpu, index);
        file = fopen(path, "re");
        if (!file)
            continue;
        read = fscanf(file, "%lluK", &kilobytes);
        fclose(file);
        if (read == 1 && kilobytes < (uint64_t)1 << 32)
            return kilobytes << 10;
    }
    return (uint64_t)32 << 20;
}

static bool works(const struct numoe_pu *pu)
{
    return pu->allowed && pu->smt == 0 && pu->node != NUMOE_NONE;
}

/* PUs below one cache are neighbours. */
static void look_at_caches(struct calibration *c)
{
    const struct numoe_machine *machine = c->machine;
    uint32_t l3 = NUMOE_NONE;

    for (uint32_t i = 0; i < machine->pu_count; i++) {
        const struct numoe_pu *pu = &machine->pus[i];
        uint64_t bytes;

        if (!works(pu) || (pu->l3 != NUMOE_NONE && pu->l3 == l3))
            continue;
        l3 = pu->l3;
        bytes = cache_bytes(pu->os_index);
        c->domain_cache[pu->domain] += bytes;
        c->largest_cache = bytes > c->largest_cache ? bytes : c->largest_cache;
    }
}

/* Sattolo's shuffle: one cycle through all lines, in an order that no prefetcher knows. */
static void make_chain(uint8_t *base, uint64_t bytes, uint64_t seed)
{
    uint64_t count = bytes / LINE;

    for (uint64_t i = 0; i < count; i++) {
        uint64_t own = i * LINE;

        memcpy(base + own, &own, sizeof own);
    }
    for (uint64_t i = count - 1; i > 0; i--) {
        uint64_t other, a, b;

        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        other = seed % i;
        memcpy(&a, base + i * LINE, sizeof a);
        memcpy(&b, base + other * LINE, sizeof b);
        memcpy(base + i * LINE, &b, sizeof b);
        memcpy(base + other * LINE, &a, sizeof a);
    }
}

static uint64_t buffer_size(const struct calibration *c, uint32_t node, uint32_t sharing)
{
    const struct numoe_machine *machine = c->machine;
    uint64_t bytes = c->options->buffer_bytes, most = machine->nodes[node].free_bytes / 4;
    uint64_t cache = 0;

    if (!bytes) {
        for (uint32_t d = 0; d < machine->domain_count; d++)
            cache = c->domain_cache[d] > cache ? c->domain_cache[d] : cache;
        bytes = 4 * cache < least_buffer  ? least_buffer
                : 4 * cache > most_buffer ? most_buffer
                                          : 4 * cache;
    }
    if (machine->cgroup_bytes / 4 / sharing < most)
        most = machine->cgroup_bytes / 4 / sharing;
    bytes = bytes < most ? bytes : most;
    return bytes / huge_page * huge_page;
}

/* @return whether the node can be measured; if not, why is a note */
static bool prepare_node(struct calibration *c, uint32_t node, uint32_t sharing)
{
    struct numoe_machine *machine = c->machine;
    const uint32_t os = machine->nodes[node].os_index;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct place *place = &c->places[node];
    struct numoe_memory_request request = NUMOE_MEMORY_REQUEST_INIT;
    struct numoe_memory_report report;
    uint64_t bytes = buffer_size(c, node, sharing);

    if (!bytes) {
        note(machine, "node %" PRIu32 " is not measured: it has no room for a buffer", os);
        return false;
    }
    request.os_node = os;
    request.bytes = bytes;
    if (numoe_memory_create(&request, &place->memory, &error)) {
        note(machine, "node %" PRIu32 " is not measured: %s", os, error.message);
        return false;
    }
    if (numoe_memory_populate(place->memory, 0, bytes, &error)) {
        note(machine, "node %" PRIu32 " is not measured: %s", os, error.message);
        goto give_back;
    }
    numoe_memory_inspect(place->memory, &report);
    if (!report.bound && sharing > 1) {
        note(machine,
             "node %" PRIu32 " is not measured: memory cannot be bound to it (%s), so that it "
             "would lie anywhere",
             os, strerror(report.bind_errno));
        goto give_back;
    }
    if (report.placed_bytes < report.checked_bytes / 10 * 9) {
        note(machine,
             "node %" PRIu32 " is not measured: of the memory bound to it %.0f %% lies elsewhere",
             os, 100 - 100 * (double)report.placed_bytes / (double)report.checked_bytes);
        goto give_back;
    }
    place->address = numoe_memory_address(place->memory);
    place->bytes = bytes;
    place->chain_bytes = 2 * c->largest_cache > least_chain ? 2 * c->largest_cache : least_chain;
    if (place->chain_bytes > bytes)
        place->chain_bytes = bytes;
    place->chain_bytes = place->chain_bytes / LINE * LINE;
    if (bytes < 2 * c->largest_cache)
        note(machine,
             "node %" PRIu32 " has room for %" PRIu64 " MiB to measure with, less than twice the "
             "cache: its figures may be the cache's",
             os, bytes >> 20);
    if (!report.huge_bytes)
        note(machine, "node %" PRIu32 " gave no huge pages: its latencies include page walks", os);
    make_chain(place->address, place->chain_bytes, 0x9E3779B97F4A7C15u + os);
    return true;
give_back:
    numoe_memory_destroy(place->memory);
    place->memory = NULL;
    return false;
}

static bool may_measure(const struct numoe_node *node)
{
    return node->allowed && node->kind != NUMOE_NODE_GPU && node->capacity_bytes;
}

static void progress(struct calibration *c, const char *what)
{
    if (c->options->progress)
        c->options->progress(c->options->progress_user, c->done, c->total, what);
}

/* ---- measuring ---- */

/* Cut a node's buffer into equal parts for count readers; a part of nothing reads a unit. */
static void share_out(const struct place *place, struct reader *readers, uint32_t count,
                      uint64_t duration_ns)
{
    uint64_t part = place->bytes / count / UNIT * UNIT;

    for (uint32_t i = 0; i < count; i++) {
        readers[i].bytes = part ? part : UNIT;
        readers[i].address = place->address + i * part;
        readers[i].duration_ns = duration_ns;
    }
}

static int measure_pair(struct calibration *c, struct reader *readers,
                        struct numoe_pair_speed *pair)
{
    const struct numoe_machine *machine = c->machine;
    struct place *place = &c->places[pair->node];
    uint32_t count = 0;
    double rate = 0;
    int rc;

    for (uint32_t i = 0; i < machine->pu_count; i++)
        if (works(&machine->pus[i]) && machine->pus[i].domain == pair->domain)
            readers[count++] = (struct reader){.os_cpu = machine->pus[i].os_index};
    share_out(place, readers, count, c->pair_ns / 3 * 2);
    rc = run_some(c, readers, &count);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < count; i++)
        rate += readers[i].rate;
    pair->bandwidth_mbs = (uint64_t)(rate / 1e6);

    readers[0] = (struct reader){.os_cpu = readers[0].os_cpu,
                                 .duration_ns = c->pair_ns / 3,
                                 .chain = &place->chain,
                                 .chain_base = place->address};
    rc = run_team(c, readers, 1);
    if (!rc)
        pair->latency_ns = readers[0].rate;
    return rc;
}

/* The cores of every node read from it at the same time. */
static int measure_together(struct calibration *c, struct reader *readers)
{
    const struct numoe_machine *machine = c->machine;
    uint32_t count = 0;
    int rc;

    for (uint32_t n = 0; n < machine->node_count; n++) {
        uint32_t first = count;

        if (!c->places[n].memory)
            continue;
        for (uint32_t i = 0; i < machine->pu_count; i++)
            if (works(&machine->pus[i]) && machine->pus[i].node == n)
                readers[count++] = (struct reader){.os_cpu = machine->pus[i].os_index, .node = n};
        if (count > first)
            share_out(&c->places[n], readers + first, count - first, c->pair_ns * 2);
    }
    if (!count)
        return 0;
    rc = run_team(c, readers, count);
    if (rc) {
        note(c->machine,
             "all nodes at once are not measured: %" PRIu32 " threads cannot be started", count);
        return 0;
    }
    for (uint32_t i = 0; i < count; i++)
        c->together[readers[i].node] += (uint64_t)(readers[i].rate / 1e6);
    return 0;
}

struct wanted {
    uint32_t domain, node, far; /* far: 0 the domain's own, else by distance */
};

static int nearer(const void *a, const void *b)
{
    const struct wanted *x = a, *y = b;

    if (x->far != y->far)
        return x->far < y->far ? -1 : 1;
    if (x->node != y->node)
        return x->node < y->node ? -1 : 1;
    return (x->domain > y->domain) - (x->domain < y->domain);
}

/* Distance from a domain's nearest node. */
static uint32_t how_far(const struct numoe_machine *machine, uint32_t domain, uint32_t node)
{
    uint32_t least = UINT32_MAX;

    if (machine->nodes[node].domain == domain)
        return 0;
    for (uint32_t i = 0; i < machine->node_count; i++)
        if (machine->nodes[i].domain == domain) {
            uint32_t distance = numoe_machine_distance(machine, i, node);

            least = distance < least ? distance : least;
        }
    return least;
}

/* The pairs to measure, in their order. @return the number, or 0 without memory or pairs */
static uint32_t choose_pairs(struct calibration *c, struct wanted **out)
{
    const struct numoe_machine *machine = c->machine;
    bool *has_cpus = calloc(machine->domain_count, sizeof *has_cpus);
    struct wanted *wanted =
        calloc((size_t)machine->domain_count * machine->node_count, sizeof *wanted);
    uint32_t limit = c->options->pair_limit ? c->options->pair_limit : NUMOE_CALIBRATE_PAIRS;
    uint32_t count = 0;

    if (!has_cpus || !wanted) {
        free(has_cpus);
        free(wanted);
        return 0;
    }
    for (uint32_t i = 0; i < machine->pu_count; i++)
        if (works(&machine->pus[i]))
            has_cpus[machine->pus[i].domain] = true;
    for (uint32_t d = 0; d < machine->domain_count; d++)
        for (uint32_t n = 0; n < machine->node_count; n++)
            if (has_cpus[d] && c->places[n].memory)
                wanted[count++] = (struct wanted){d, n, how_far(machine, d, n)};
    free(has_cpus);
    qsort(wanted, count, sizeof *wanted, nearer);
    if (count > limit) {
        note(c->machine,
             "%" PRIu32 " of %" PRIu32 " pairs of domain and node are measured, the nearest first",
             limit, count);
        count = limit;
    }
    *out = wanted;
    return count;
}

static bool time_is_up(const struct calibration *c)
{
    return c->options->budget_ns && numoe_now_ns() - c->begun_ns > c->options->budget_ns;
}

static int measure_all(struct calibration *c, struct numoe_error *error)
{
    struct numoe_machine *machine = c->machine;
    struct reader *readers = calloc(machine->pu_count, sizeof *readers);
    struct wanted *wanted = NULL;
    uint32_t count = choose_pairs(c, &wanted);
    int rc = 0;

    c->pairs = calloc(count ? count : 1, sizeof *c->pairs);
    if (!readers || !wanted || !c->pairs) {
        rc = numoe_error_set(error, -ENOMEM, "calibrate", "out of memory");
        goto out;
    }
    c->total = c->done + count + 1;
    for (uint32_t i = 0; i < count && (i == 0 || !time_is_up(c)); i++) {
        struct numoe_pair_speed *pair = &c->pairs[c->pair_count];
        char what[96];

        *pair = (struct numoe_pair_speed){.domain = wanted[i].domain, .node = wanted[i].node};
        snprintf(what, sizeof what, "CPUs of domain %" PRIu32 " reading node %" PRIu32,
                 pair->domain, machine->nodes[pair->node].os_index);
        progress(c, what);
        rc = measure_pair(c, readers, pair);
        if (rc) {
            numoe_error_set(error, rc, "calibrate", "no thread could be started: %s",
                            strerror(-rc));
            goto out;
        }
        c->pair_count++;
        c->done++;
    }
    if (c->pair_count < count)
        note(machine,
             "%" PRIu32 " of %" PRIu32 " pairs of domain and node were measured in the time "
             "given, the nearest first",
             c->pair_count, count);
    progress(c, "all nodes at once");
    if (count)
        rc = measure_together(c, readers);
out:
    free(wanted);
    free(readers);
    return rc;
}

/* What was measured takes the place of what was known. */
static void hand_over(struct calibration *c)
{
    struct numoe_machine *machine = c->machine;

    free(machine->pairs);
    free(machine->together_mbs);
    machine->pairs = c->pairs;
    machine->pair_count = c->pair_count;
    machine->together_mbs = c->together;
    c->pairs = NULL;
    c->together = NULL;
    if (c->unpinned)
        note(machine, "threads could not be pinned %" PRIu32 " times while measuring: %s",
             c->unpinned, strerror(c->pin_errno));
    if (machine->cpu_quota > 0)
        note(machine, "measured within a quota of %.2f CPUs: figures are what the quota allows",
             machine->cpu_quota);
}

int numoe_calibrate(struct numoe_machine *machine, const struct numoe_calibrate_options *options,
                    struct numoe_error *error)
{
    struct calibration c = {.machine = machine, .options = options, .begun_ns = numoe_now_ns()};
    const struct numoe_kernels *kernels;
    uint32_t nodes = 0;
    int rc;

    if (!machine->live)
        return numoe_error_set(error, -EINVAL, machine->source,
                               "only the machine that this runs on can be measured");
    kernels = numoe_kernels_select(NUMOE_FAST, options->isa, error);
    if (!kernels)
        return error ? error->code : -EINVAL;
    c.isa = kernels->isa;
    c.pair_ns = options->pair_ns ? options->pair_ns : default_pair_ns;
    c.places = calloc(machine->node_count, sizeof *c.places);
    c.domain_cache = calloc(machine->domain_count, sizeof *c.domain_cache);
    c.together = calloc(machine->node_count, sizeof *c.together);
    if (!c.places || !c.domain_cache || !c.together) {
        rc = numoe_error_set(error, -ENOMEM, "calibrate", "out of memory");
        goto out;
    }
    look_at_caches(&c);
    for (uint32_t n = 0; n < machine->node_count; n++)
        nodes += may_measure(&machine->nodes[n]);
    c.total = nodes;
    for (uint32_t n = 0; n < machine->node_count; n++) {
        char what[48];

        if (!may_measure(&machine->nodes[n]))
            continue;
        snprintf(what, sizeof what, "filling node %" PRIu32, machine->nodes[n].os_index);
        progress(&c, what);
        (void)prepare_node(&c, n, nodes);
        c.done++;
    }
    rc = measure_all(&c, error);
    if (!rc)
        hand_over(&c);
out:
    for (uint32_t n = 0; c.places && n < machine->node_count; n++)
        numoe_memory_destroy(c.places[n].memory);
    free(c.places);
    free(c.domain_cache);
    free(c.together);
    free(c.pairs);
    return rc;
}
