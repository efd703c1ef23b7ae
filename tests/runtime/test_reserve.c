/* Memory of calls that was got ahead of time: no call gets any more of it. */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/sanitized.h"
#include "context.h"
#include "model.h"
#include "numoe.h"
#include "support/fixture.h"

/* How often the process asked for memory; its own allocators are counted where no sanitizer has
 * taken their place. */
static atomic_uint asked;

#if !SANITIZED
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *p, size_t size);

void *malloc(size_t size)
{
    atomic_fetch_add(&asked, 1);
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    atomic_fetch_add(&asked, 1);
    return __libc_calloc(count, size);
}

void *realloc(void *p, size_t size)
{
    atomic_fetch_add(&asked, 1);
    return __libc_realloc(p, size);
}

void *mmap(void *address, size_t length, int prot, int flags, int fd, off_t offset)
{
    atomic_fetch_add(&asked, 1);
    return (void *)syscall(SYS_mmap, address, length, prot, flags, fd, offset);
}
#endif

enum { EXPERTS = 24, K = 4, HIDDEN = 256, INNER = 512, TOKENS = 300 };

enum routing { UNIFORM, ONE, SKEWED, FEW_EACH, ROUTINGS };

static void route(struct call *c, enum routing routing)
{
    for (uint64_t i = 0; i < c->tokens * c->k; i++) {
        const uint64_t t = i / c->k, j = i % c->k;

        switch (routing) {
        case UNIFORM:
            c->ids[i] = (int64_t)((random_u64() >> 20) % EXPERTS);
            break;
        case ONE:
            c->ids[i] = (int64_t)j;
            break;
        case SKEWED:
            c->ids[i] = (int64_t)(EXPERTS * pow(random_unit(), 4));
            break;
        default:
            c->ids[i] = (int64_t)((t * c->k + j) % EXPERTS);
        }
    }
}

static uint64_t workspace(const struct fixture *f)
{
    struct numoe_stats stats = NUMOE_STATS_INIT;

    numoe_stats_get(f->context, &stats);
    return stats.workspace_bytes;
}

/* Page faults so far; 0 with a sanitizer, whose shadow of stacks has more of them. */
static long faults(void)
{
#if SANITIZED
    return 0;
#else
    struct rusage usage;

    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt;
#endif
}

static void warm(struct fixture *f)
{
    static const uint64_t counts[] = {1, 4, 9, 40};

    for (size_t i = 0; i < 4; i++) {
        struct call c = call_make(counts[i], K, HIDDEN, EXPERTS, false);
        struct numoe_batch b = call_batch(&c);
        run(f, 0, &b);
        call_free(&c);
    }
}

static void check_calls(struct fixture *f, const char *name)
{
    static const uint64_t counts[] = {1, 2, 4, 5, 16, 64, 150, TOKENS};
    uint64_t before;

    cr_assert_eq(numoe_reserve(f->model, TOKENS, K, 0, NULL), 0);
    warm(f);
    before = workspace(f);
    for (int routing = 0; routing < ROUTINGS; routing++)
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
            for (uint64_t k = 1; k <= K; k += 3) {
                struct call c = call_make(counts[i], k, HIDDEN, EXPERTS, false);
                struct numoe_batch b = call_batch(&c);
                unsigned asked_before;
                long faults_before, faulted;

                route(&c, routing);
                asked_before = atomic_load(&asked);
                faults_before = faults();
                cr_assert_eq(numoe_forward(f->model, 0, &b, NULL, NULL), 0);
                faulted = faults() - faults_before;
                cr_expect_eq(atomic_load(&asked), asked_before,
                             "%s: %lu tokens of %lu, routing %d: memory was asked for", name,
                             counts[i], k, routing);
                /* a stack may grow by some pages; the rows of so many tokens are hundreds */
                cr_expect_leq(faulted, 8, "%s: %lu tokens of %lu, routing %d: %ld page faults",
                              name, counts[i], k, routing, faulted);
                call_free(&c);
            }
    cr_expect_eq(workspace(f), before, "%s", name);
}

/* extreme: every third expert has scales that only the few-token form computes. @return what all
 * calls had */
static uint64_t check_machine(const char *topology, enum numoe_form form,
                              enum numoe_arithmetic arithmetic, uint32_t threads, bool invariant,
                              bool extreme)
{
    struct fixture f = fixture_of(1, EXPERTS, HIDDEN, INNER, false, arithmetic);
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    uint64_t bytes;

    options.topology = topology;
    options.form = form;
    options.threads = threads;
    options.batch_invariant = invariant;
    experts_make(&f, 71);
    for (int e = 0; extreme && e < EXPERTS; e += 3)
        memset(f.experts[e].scales[2], 253, 16);
    open_model(&f, &options);
    check_calls(&f, topology ? topology : "this machine");
    bytes = workspace(&f);
    close_model(&f);
    experts_free(&f);
    return bytes;
}

Test(reserve, this_machine, .timeout = 120)
{
    for (int invariant = 0; invariant < 2; invariant++) {
        check_machine(NULL, NUMOE_FORM_AUTO, NUMOE_FAST, 0, invariant, false);
        check_machine(NULL, NUMOE_FORM_AUTO, NUMOE_EXACT, 0, invariant, false);
    }
}

Test(reserve, many_nodes, .timeout = 120)
{
    for (int invariant = 0; invariant < 2; invariant++) {
        check_machine("pack:2 l3:2 [numa(memory=16GB)] core:2 pu:1", NUMOE_FORM_EVERY_NODE,
                      NUMOE_FAST, 3, invariant, false);
        check_machine(NUMOE_TEST_DATA "/topo/data/epyc-7h12-2s-32n.xml", NUMOE_FORM_EVERY_NODE,
                      NUMOE_FAST, 4, invariant, false);
    }
}

Test(reserve, nodes_of_whole_experts, .timeout = 120)
{
    for (int invariant = 0; invariant < 2; invariant++)
        check_machine("numa:6(memory=16GB) core:2 pu:1", NUMOE_FORM_EXPERTS, NUMOE_FAST, 3,
                      invariant, false);
}

/* An expert that only the few-token form computes is laid out as any other. */
Test(reserve, extreme_scales_take_no_more, .timeout = 120)
{
    static const char machine[] = "numa:6(memory=16GB) core:2 pu:1";
    uint64_t plain = check_machine(machine, NUMOE_FORM_EVERY_NODE, NUMOE_FAST, 3, false, false);

    cr_expect_eq(check_machine(machine, NUMOE_FORM_EVERY_NODE, NUMOE_FAST, 3, false, true), plain);
    check_machine(machine, NUMOE_FORM_EVERY_NODE, NUMOE_FAST, 3, true, true);
}

Test(reserve, deferred_experts_too, .timeout = 60)
{
    struct fixture f = fixture_of(1, EXPERTS, HIDDEN, INNER, false, NUMOE_FAST);
    uint8_t deferred[EXPERTS];
    unsigned before;
    uint64_t plain;
    long faulted;

    for (int e = 0; e < EXPERTS; e++)
        deferred[e] = e % 2;
    experts_make(&f, 72);
    open_model(&f, NULL);
    cr_assert_eq(numoe_reserve(f.model, 64, K, 0, NULL), 0);
    plain = workspace(&f);
    cr_assert_eq(numoe_reserve(f.model, 64, K, 64, NULL), 0);
    warm(&f);
    struct call c = call_make(64, K, HIDDEN, EXPERTS, false);
    struct numoe_batch b = call_batch(&c);
    cr_expect_gt(workspace(&f), plain, "what defers is not counted");
    b.deferred = deferred;
    before = atomic_load(&asked);
    faulted = faults();
    for (int i = 0; i < 4; i++)
        cr_assert_eq(numoe_forward(f.model, 0, &b, NULL, NULL), 0);
    cr_expect_eq(atomic_load(&asked), before);
    cr_expect_leq(faults() - faulted, 8);
    cr_expect_eq(numoe_reserve(f.model, 64, K, 0, NULL), -EBUSY);
    b.deferred = NULL;
    run(&f, 0, &b);
    cr_expect_eq(numoe_reserve(f.model, 64, K, 0, NULL), 0);
    call_free(&c);
    close_model(&f);
    experts_free(&f);
}

/* ---- layouts alone -----------------------------------------------------------------------------
 */

static uint64_t between(uint64_t first, uint64_t last)
{
    return first + (random_u64() >> 11) % (last - first + 1);
}

/* Ways in which few experts are most of the work, and others. */
static void route_at_random(int32_t *ids, uint64_t tokens, uint64_t k, uint64_t experts)
{
    const uint64_t kind = between(0, 4), few = between(1, 12);

    for (uint64_t t = 0; t < tokens; t++)
        for (uint64_t j = 0; j < k; j++) {
            const uint64_t id = kind == 0   ? between(0, experts - 1)
                                : kind == 1 ? j
                                : kind == 2 ? (uint64_t)((double)experts * pow(random_unit(), 4))
                                : kind == 3 ? between(0, few - 1)
                                : t * (j + 2) / 2 < tokens ? 7 * j % experts
                                                           : experts;

            ids[t * k + j] = id < experts ? (int32_t)id : -1;
        }
}

static void describe_machine(char *name, size_t size)
{
    static const char *const shapes[] = {"numa:%u(memory=64GB) core:%u pu:1",
                                         "pack:2 l3:%u [numa(memory=16GB)] core:%u pu:1",
                                         "pack:2 [numa(memory=64GB)] l3:%u core:%u pu:1"};
    const uint64_t shape = between(0, 4);

    if (shape < 3)
        snprintf(name, size, shapes[shape], (unsigned)between(1, 6), (unsigned)between(1, 12));
    else
        snprintf(name, size, shapes[0], 1u, (unsigned)between(1, shape == 3 ? 12 : 130));
}

/* Random calls of a random model on a random machine, after what they need was reserved. */
static void check_layouts(void)
{
    static const enum numoe_form forms[] = {NUMOE_FORM_AUTO, NUMOE_FORM_EVERY_NODE,
                                            NUMOE_FORM_EXPERTS};
    const uint64_t experts = between(1, between(0, 1) ? 8 : 64), k_most = between(1, 8);
    const uint64_t most = between(1, between(0, 1) ? 200 : 8000);
    struct fixture f = fixture_of(1, experts, 32 * between(1, 4), 32 * between(1, 64), false,
                                  between(0, 1) ? NUMOE_FAST : NUMOE_EXACT);
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_schedule s = {.part = SCHEDULE_NOW};
    struct schedule_stock stock;
    struct numoe_batch b = NUMOE_BATCH_INIT;
    float *weights = calloc(most * k_most, sizeof *weights);
    int32_t *ids = calloc(most * k_most, sizeof *ids);
    const uint64_t extreme = between(0, 3);
    uint64_t before;
    char name[96];

    describe_machine(name, sizeof name);
    options.topology = name;
    options.threads = 1;
    options.form = forms[between(0, 2)];
    options.batch_invariant = between(0, 1);
    f.desc.experts_per_token = between(1, experts < 8 ? experts : 8);
    cr_assert_eq(numoe_open(&options, &f.context, NULL), 0, "%s", name);
    cr_assert_eq(numoe_model_create(f.context, &f.desc, &f.model, NULL), 0, "%s", name);
    for (uint64_t e = 0; e < experts; e++)
        numoe_model_mark(f.model, 0, e, true, extreme == 0 && e % 3 == 0);
    numoe_schedule_want(&s, f.model, most, k_most, 0, &stock);
    cr_assert_eq(numoe_schedule_stock(&stock, f.context->pool), 0);
    numoe_schedule_take(&s, &stock);
    numoe_schedule_stock_free(&stock);
    before = s.memory_bytes;
    b.x = b.out = weights;
    b.x_type = b.out_type = NUMOE_F32;
    b.ids = ids;
    b.weights = weights;
    for (int call = 0; call < 25; call++) {
        b.tokens = between(0, 2) ? most : between(1, most);
        b.top_k = between(0, 1) ? k_most : between(1, k_most);
        route_at_random(ids, b.tokens, b.top_k, experts);
        cr_assert_eq(numoe_schedule_begin(&s, f.model, 0, &b), 0);
        s.token_begin = 0;
        s.token_count = b.tokens < numoe_schedule_pass(&s) ? b.tokens : numoe_schedule_pass(&s);
        cr_assert_eq(numoe_schedule_build(&s, numoe_pool_worker_count(f.context->pool)), 0);
        cr_assert_eq(s.memory_bytes, before,
                     "%s, form %d, invariant %d, %lu experts of %lu x %lu, %lu tokens of %lu", name,
                     (int)options.form, options.batch_invariant, experts, f.desc.hidden,
                     f.desc.intermediate, b.tokens, b.top_k);
    }
    numoe_schedule_free(&s);
    free(ids);
    free(weights);
    close_model(&f);
}

Test(reserve, whatever_the_machine_and_the_routing, .timeout = 240)
{
    random_state = 20261201;
    for (int i = 0; i < 120; i++)
        check_layouts();
}

/* More than was reserved is got as ever, and outputs are the same. */
Test(reserve, a_larger_call_grows, .timeout = 60)
{
    struct fixture f = fixture_of(1, EXPERTS, HIDDEN, INNER, false, NUMOE_FAST);
    float *want;
    uint64_t before;

    experts_make(&f, 73);
    open_model(&f, NULL);
    struct call c = call_make(TOKENS, K, HIDDEN, EXPERTS, true);
    struct numoe_batch b = call_batch(&c);
    run(&f, 0, &b);
    want = c.out;
    c.out = malloc(TOKENS * HIDDEN * sizeof *c.out);
    b.out = c.out;
    close_model(&f);
    open_model(&f, NULL);
    cr_assert_eq(numoe_reserve(f.model, 8, 2, 0, NULL), 0);
    before = workspace(&f);
    run(&f, 0, &b);
    cr_expect_gt(workspace(&f), before);
    cr_assert_arr_eq(c.out, want, TOKENS * HIDDEN * sizeof *want);
    /* a model of another shape shares what is there */
    cr_assert_eq(numoe_reserve(f.model, TOKENS, K, 8, NULL), 0);
    run(&f, 0, &b);
    cr_assert_arr_eq(c.out, want, TOKENS * HIDDEN * sizeof *want);
    free(want);
    call_free(&c);
    close_model(&f);
    experts_free(&f);
}

struct caller {
    struct fixture *f;
    const float *want;
    atomic_bool over;
    atomic_uint calls, wrong;
};

static void *call_on(void *user)
{
    struct caller *caller = user;
    struct call c = call_make(3, K, HIDDEN, EXPERTS, true);
    struct numoe_batch b = call_batch(&c);

    while (!atomic_load(&caller->over)) {
        if (numoe_forward(caller->f->model, 0, &b, NULL, NULL) ||
            (caller->want && memcmp(c.out, caller->want, 3 * HIDDEN * sizeof *c.out) != 0))
            atomic_fetch_add(&caller->wrong, 1);
        if (!caller->want) { /* the first call of the first thread is what others must give */
            caller->want = c.out;
            c.out = malloc(3 * HIDDEN * sizeof *c.out);
            b.out = c.out;
        }
        atomic_fetch_add(&caller->calls, 1);
    }
    call_free(&c);
    return NULL;
}

/* Some 900 MB are got, a piece for every worker at a time, and another thread's calls run between
 * the pieces and are right. */
Test(reserve, calls_go_on_meanwhile, .timeout = 120)
{
    struct fixture f = fixture_of(1, EXPERTS, HIDDEN, INNER, false, NUMOE_FAST);
    struct caller caller = {.f = &f};
    unsigned before, during;
    uint64_t had;
    pthread_t thread;

    experts_make(&f, 75);
    open_model(&f, NULL);
    cr_assert_eq(pthread_create(&thread, NULL, call_on, &caller), 0);
    while (atomic_load(&caller.calls) < 3)
        sched_yield();
    had = workspace(&f);
    before = atomic_load(&caller.calls);
    cr_assert_eq(numoe_reserve(f.model, 60000, 16, 16, NULL), 0);
    during = atomic_load(&caller.calls) - before;
    atomic_store(&caller.over, true);
    pthread_join(thread, NULL);
    cr_expect_gt(workspace(&f), had + 500000000);
    cr_expect_geq(during, 20, "%u calls", during);
    cr_expect_eq(atomic_load(&caller.wrong), 0);
    free((void *)caller.want);
    close_model(&f);
    experts_free(&f);
}

Test(reserve, what_cannot_be_is_refused, .timeout = 60)
{
    struct fixture f = fixture_of(1, 4, 64, 64, false, NUMOE_FAST);
    struct numoe_error error = NUMOE_ERROR_INIT;

    experts_make(&f, 74);
    open_model(&f, NULL);
    cr_expect_eq(numoe_reserve(NULL, 1, 1, 0, &error), -EINVAL);
    cr_expect_eq(numoe_reserve(f.model, 1, 0, 0, &error), -EINVAL);
    cr_expect_eq(numoe_reserve(f.model, 1, 65, 0, &error), -EINVAL);
    cr_expect_str_eq(error.where, "top_k");
    cr_expect_eq(numoe_reserve(f.model, 1, 1, 65, &error), -EINVAL);
    cr_expect_eq(numoe_reserve(f.model, 0, 1, 0, &error), 0);
    close_model(&f);
    experts_free(&f);
}
