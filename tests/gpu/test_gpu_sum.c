/*
 * Outputs of several fake devices summed on the devices: by copies between them to the same bits as
 * on the host, by a fake NCCL, and what gives way to what when anything of it is refused or fails.
 */
#include "device_set.h"

#include "fake_nccl.h"

#include <dlfcn.h>

/* ---- peers ------------------------------------------------------------------------------------
 */

Test(gpu_sum, peers_give_the_bits_of_the_host_under_any_delay, .timeout = 240)
{
    float *host = calloc(SET_FLOATS, sizeof *host), *peer = calloc(SET_FLOATS, sizeof *peer);

    for (uint32_t count = 2; count <= MOST; count++)
        for (int layout = UNKNOWN; layout <= NEAR; layout++)
            for (uint64_t seed = 1; seed <= 10; seed++) {
                struct model *m = model_make(LAYERS, seed % 2);
                const bool pinned = !options_of(m, seed).no_pinning;

                set_run(m, count, (enum layout)layout, NUMOE_GPU_SUM_HOST, seed, seed, host);
                for (uint64_t delays = seed + 50; delays < seed + 53; delays++) {
                    set_run(m, count, (enum layout)layout, NUMOE_GPU_SUM_PEER, seed, delays, peer);
                    /* staging is as free as delays leave it, and with it what has arrived */
                    if (pinned)
                        cr_expect(same_bits(host, peer, SET_FLOATS * sizeof *host),
                                  "%u devices, seed %d", count, (int)seed);
                }
                model_free(m);
            }
    free(host);
    free(peer);
}

static void set_open(struct set *set, struct model *m, uint32_t count, enum numoe_gpu_sum sum,
                     struct numoe_gpu_model **model)
{
    const struct numoe_gpu_source source = source_near(m);
    struct numoe_gpu_model_options options = options_of(m, 2);
    struct numoe_error error = NUMOE_ERROR_INIT;

    options.sum = sum;
    cr_assert_eq(numoe_gpu_model_create_over(set->gpu, count, &source, &options, model, &error), 0,
                 "%s", error.message);
}

/* Some calls, all of which are right. */
static void call_all(struct model *m, struct numoe_gpu_model *model, int calls)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    for (int i = 0; i < calls; i++) {
        const uint64_t layer = (uint64_t)i % m->layers;
        struct batch b;
        uint64_t done;

        batch_make(&b);
        cr_assert_eq(numoe_gpu_forward(model, layer, &b.call, &done, &error), 0, "%s",
                     error.message);
        cr_expect_eq(done, b.call.tokens);
        cr_assert(batch_right(m, layer, &b, done), "call %d", i);
    }
}

static struct numoe_gpu_report report_of(const struct numoe_gpu_model *model)
{
    struct numoe_gpu_report report;

    numoe_gpu_model_report(model, &report);
    return report;
}

static void set_end(struct set *set, struct numoe_gpu_model *model)
{
    numoe_gpu_model_destroy(model);
    set_free(set);
}

/* bf16 in and out, added to what is there, and joined: the bits of the host's sums. */
Test(gpu_sum, other_types_and_added_outputs_too)
{
    struct model *m = model_make(LAYERS, true);
    static uint16_t x[TOKENS_MOST][HIDDEN], outs[8][2][TOKENS_MOST][HIDDEN];

    random_state = 3;
    for (int t = 0; t < TOKENS_MOST; t++)
        for (int k = 0; k < HIDDEN; k++) {
            x[t][k] = bf16_bits(random_normal());
            for (int way = 0; way < 2; way++)
                for (int v = 0; v < 8; v++)
                    outs[v][way][t][k] = x[t][k];
        }
    for (int way = 0; way < 2; way++) {
        struct numoe_gpu_model *model;
        struct set set;

        set_make(&set, 3, UNKNOWN, 7);
        set_open(&set, m, 3, way ? NUMOE_GPU_SUM_PEER : NUMOE_GPU_SUM_HOST, &model);
        if (way)
            set_narrow(model, 2);
        for (int v = 0; v < 8; v++) {
            uint64_t done;
            struct batch b;

            random_state = (uint64_t)v;
            batch_make(&b);
            b.call.tokens = TOKENS_MOST;
            b.ids[3][0] = b.ids[3][1] = -1; /* keeps its bits where outputs are added */
            b.call.x = x;
            b.call.x_type = NUMOE_BF16;
            b.call.out = outs[v][way];
            b.call.out_type = NUMOE_BF16;
            b.call.out_stride = HIDDEN;
            b.call.add = v % 4 == 1;
            b.call.join = v % 4 == 2;
            cr_assert_eq(numoe_gpu_forward(model, (uint64_t)v % LAYERS, &b.call, &done, NULL), 0);
            cr_expect_eq(done, TOKENS_MOST);
            cr_expect_eq(same_bits(outs[v][way][3], x[3], sizeof x[3]), v % 4 == 1 || v % 4 == 2);
        }
        set_end(&set, model);
    }
    for (int v = 0; v < 8; v++) {
        cr_expect(same_bits(outs[v][0], outs[v][1], sizeof outs[v][0]), "variant %d", v);
        cr_expect_not(same_bits(outs[v][0], x, sizeof x), "variant %d was not written", v);
    }
    model_free(m);
}

Test(gpu_sum, inputs_cross_each_link_in_part)
{
    struct model *m = model_make(LAYERS, false);

    for (uint32_t count = 2; count <= MOST; count++) {
        const uint64_t row = HIDDEN * sizeof(float);
        struct numoe_gpu_model *model;
        struct batch b;
        struct set set;
        uint64_t done;

        set_make(&set, count, UNKNOWN, count);
        set_open(&set, m, count, NUMOE_GPU_SUM_PEER, &model);
        batch_make(&b);
        b.call.tokens = TOKENS_MOST;
        cr_assert_eq(numoe_gpu_forward(model, 0, &b.call, &done, NULL), 0);
        cr_expect(batch_right(m, 0, &b, done));
        /* each gets the others' rows, in and out */
        cr_expect_eq(report_of(model).peer_bytes, 2 * (count - 1) * TOKENS_MOST * row);
        /* what is small is not worth it */
        model->several->sum.least_bytes = TOKENS_MOST * row + 1;
        batch_make(&b);
        b.call.tokens = TOKENS_MOST;
        cr_assert_eq(numoe_gpu_forward(model, 1, &b.call, &done, NULL), 0);
        cr_expect(batch_right(m, 1, &b, done));
        cr_expect_eq(report_of(model).peer_bytes, 2 * (count - 1) * TOKENS_MOST * row);
        cr_expect_eq(report_of(model).summed_tokens, TOKENS_MOST);
        for (uint32_t i = 0; i < count; i++)
            cr_expect_eq(report_of(numoe_gpu_model_part(model, i)).device_bytes, set.fake[i]->taken,
                         "all that a device gave is told, for sums too");
        set_end(&set, model);
    }
    model_free(m);
}

Test(gpu_sum, a_way_that_is_none_is_refused)
{
    struct model *m = model_make(1, false);
    const struct numoe_gpu_source source = source_of(m);
    struct numoe_gpu_model_options options = {.sum = (enum numoe_gpu_sum)4};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_model *model = NULL;
    struct set set;

    for (uint32_t count = 1; count <= 2; count++) {
        set_make(&set, count, UNKNOWN, 1);
        cr_expect_eq(numoe_gpu_model_create_over(set.gpu, count, &source, &options, &model, &error),
                     -EINVAL);
        cr_expect_str_eq(error.where, "sum");
        cr_expect_null(model);
        set_free(&set);
    }
    model_free(m);
}

/* ---- what gives way ---------------------------------------------------------------------------
 */

Test(gpu_sum, peers_that_are_refused_or_lose_bytes_leave_it_to_the_host)
{
    struct model *m = model_make(LAYERS, false);

    for (int spoils = 0; spoils < 2; spoils++)
        for (uint32_t victim = 0; victim < 3; victim++) {
            struct numoe_gpu_model *model;
            struct numoe_gpu_report report;
            struct set set;

            set_make(&set, 3, UNKNOWN, 1 + victim);
            set.fake[victim]->no_peers = !spoils;
            set.fake[victim]->spoils = spoils;
            set_open(&set, m, 3, NUMOE_GPU_SUM_PEER, &model);
            report = report_of(model);
            cr_expect_eq(report.sum, NUMOE_GPU_SUM_HOST);
            cr_expect_not_null(
                strstr(report.sum_note, spoils ? "is not what is there" : "opening GPU"), "%s",
                report.sum_note);
            call_all(m, model, 6);
            report = report_of(model);
            cr_expect_eq(report.summed_tokens, 0);
            cr_expect_eq(report.peer_bytes, 0);
            cr_expect_null(model->several->sum.scratch[0]);
            set_end(&set, model);
        }
    model_free(m);
}

static struct gpu_ops changed;
static double link_ms[2]; /* of the trial of links: from the host, between devices */
static const struct set *trial;
static double slower[MOST]; /* a device's links are by so much */
static uint64_t recorded[MOST];

static uint32_t of_trial(const void *device)
{
    for (uint32_t i = 0; trial && i < trial->count; i++)
        if (device == trial->fake[i])
            return i;
    return MOST;
}

static int timed(void *device, void *begin, void *end, double *ms)
{
    const int e = fake_elapsed(device, begin, end, ms);

    *ms = link_ms[((struct fake *)device)->peer_copies > 8];
    if (of_trial(device) < MOST)
        *ms *= slower[of_trial(device)];
    for (uint32_t i = 0; trial && i < trial->count; i++)
        cr_expect_eq(recorded[i], recorded[0], "not all copy while it is measured");
    return e;
}

static int record_counted(void *device, void *event, void *stream)
{
    if (of_trial(device) < MOST)
        recorded[of_trial(device)]++;
    return fake_event_record(device, event, stream);
}

static int between_devices(void *device, void *stream, void *to, void *peer, const void *from,
                           uint64_t bytes)
{
    cr_expect_neq(device, peer, "a device copies from itself");
    return fake_copy_peer(device, stream, to, peer, from, bytes);
}

/* The slowest copies between devices are compared with the fastest link, as whoever is slowest is
 * waited for. */
Test(gpu_sum, auto_goes_by_the_slowest_of_several)
{
    static const struct {
        double host[3], peer_ms;
        enum numoe_gpu_sum sum;
    } cases[] = {{{1, 1, 1}, 7, NUMOE_GPU_SUM_PEER},
                 {{1, 2, 1}, 7, NUMOE_GPU_SUM_HOST}, /* 14 ms of the second, 10 of the first */
                 {{1, 1, 2}, 7, NUMOE_GPU_SUM_HOST},
                 {{2, 1, 1}, 7, NUMOE_GPU_SUM_HOST},
                 {{2, 2, 2}, 7, NUMOE_GPU_SUM_PEER}};
    struct model *m = model_make(LAYERS, false);

    changed = fake_ops;
    changed.elapsed = timed;
    changed.copy_peer = between_devices;
    changed.event_record = record_counted;
    link_ms[0] = 10;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const double gbs = 4 * (32 << 20) / 1e6;
        struct numoe_gpu_model *model;
        double slowest = 1;
        struct set set;

        link_ms[1] = cases[i].peer_ms;
        set_make(&set, 3, UNKNOWN, i);
        for (int k = 0; k < 3; k++) {
            set.fake[k]->memory = 256 << 20;
            set.gpu[k]->ops = &changed;
            slower[k] = cases[i].host[k];
            slowest = slower[k] > slowest ? slower[k] : slowest;
        }
        trial = &set;
        memset(recorded, 0, sizeof recorded);
        set_open(&set, m, 3, NUMOE_GPU_SUM_AUTO, &model);
        trial = NULL;
        cr_expect_eq(report_of(model).sum, cases[i].sum, "case %zu: %s", i,
                     report_of(model).sum_note);
        cr_expect_float_eq(report_of(model).peer_gbs, gbs / cases[i].peer_ms / slowest, 1e-9,
                           "case %zu", i);
        set_end(&set, model);
    }
    model_free(m);
}

Test(gpu_sum, auto_goes_by_the_links)
{
    static const struct {
        double host_ms, peer_ms;
        enum numoe_gpu_sum sum;
    } cases[] = {{10, 1, NUMOE_GPU_SUM_PEER},
                 {10, 7.9, NUMOE_GPU_SUM_PEER},
                 {10, 8.1, NUMOE_GPU_SUM_HOST},
                 {10, 20, NUMOE_GPU_SUM_HOST}};
    struct model *m = model_make(LAYERS, false);

    changed = fake_ops;
    changed.elapsed = timed;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const double gbs = 4 * (32 << 20) / 1e6;
        struct numoe_gpu_model *model;
        struct numoe_gpu_report report;
        struct set set;

        link_ms[0] = cases[i].host_ms;
        link_ms[1] = cases[i].peer_ms;
        set_make(&set, 2, UNKNOWN, i);
        for (int k = 0; k < 2; k++) {
            set.fake[k]->memory = 256 << 20;
            set.gpu[k]->ops = &changed;
        }
        set_open(&set, m, 2, NUMOE_GPU_SUM_AUTO, &model);
        report = report_of(model);
        cr_expect_eq(report.sum, cases[i].sum, "case %zu: %s", i, report.sum_note);
        cr_expect_float_eq(report.peer_gbs, gbs / cases[i].peer_ms, 1e-9);
        cr_expect_eq(*report.sum_note != 0, report.sum == NUMOE_GPU_SUM_HOST, "%s",
                     report.sum_note);
        call_all(m, model, 2);
        cr_expect_eq(report_of(model).summed_tokens, 0, "calls this small are the host's");
        model->several->sum.least_bytes = 1;
        call_all(m, model, 2);
        cr_expect_eq(report_of(model).summed_tokens > 0, report.sum == NUMOE_GPU_SUM_PEER);
        set_end(&set, model);
    }
    model_free(m);
}

static int little_memory(void *device, uint64_t *free_bytes, uint64_t *total_bytes)
{
    const int e = fake_memory(device, free_bytes, total_bytes);

    *total_bytes = 64 * 2 * 256;
    return e;
}

/* Rounds of no rows would never end. */
Test(gpu_sum, memory_without_room_for_a_row_leaves_it_to_the_host, .timeout = 30)
{
    struct model *m = model_make(LAYERS, false);
    struct numoe_gpu_model *model;
    struct set set;

    changed = fake_ops;
    changed.memory = little_memory;
    set_make(&set, 4, UNKNOWN, 1);
    for (int i = 0; i < 4; i++)
        set.gpu[i]->ops = &changed;
    set_open(&set, m, 4, NUMOE_GPU_SUM_PEER, &model);
    cr_expect_eq(report_of(model).sum, NUMOE_GPU_SUM_HOST);
    cr_expect_not_null(strstr(report_of(model).sum_note, "no room"), "%s",
                       report_of(model).sum_note);
    call_all(m, model, 2);
    set_end(&set, model);
    model_free(m);
}

/* Shares that were given need no links: what cannot be measured is no error. */
Test(gpu_sum, auto_without_measured_links_is_the_host)
{
    struct model *m = model_make(LAYERS, false);
    struct numoe_gpu_model *model;
    struct set set;

    set_make(&set, 2, UNKNOWN, 1);
    set.fake[1]->memory = 24 << 20;
    set_open(&set, m, 2, NUMOE_GPU_SUM_AUTO, &model);
    cr_expect_eq(report_of(model).sum, NUMOE_GPU_SUM_HOST);
    cr_expect_not_null(strstr(report_of(model).sum_note, "measure the link"), "%s",
                       report_of(model).sum_note);
    call_all(m, model, 2);
    set_end(&set, model);
    model_free(m);
}

/* One failure of a call that the device survives: the next way goes on, and nothing is told but
 * that. Past creation no call fails for it but by what would fail without sums on devices, too. */
Test(gpu_sum, one_of_two_fails_at_every_step, .timeout = 240)
{
    for (uint32_t victim = 0; victim < 2; victim++) {
        set_fail_everywhere(2, victim, UNKNOWN, NUMOE_GPU_SUM_PEER, victim ? 2 : 1);
        set_fail_everywhere(2, victim, NEAR, NUMOE_GPU_SUM_PEER, 700);
    }
}

Test(gpu_sum, one_of_three_fails_at_every_step, .timeout = 240)
{
    for (uint32_t victim = 0; victim < 3; victim++)
        set_fail_everywhere(3, victim, NEAR, NUMOE_GPU_SUM_PEER, victim % 2 ? 719 : 1);
}

static uint64_t until_failure; /* calls of the function that fail, from then on */

static int no_copy_peer(void *device, void *stream, void *to, void *peer, const void *from,
                        uint64_t bytes)
{
    return until_failure-- ? fake_copy_peer(device, stream, to, peer, from, bytes)
                           : fake_refuse(device, 1);
}

static int no_sum(void *device, void *stream, float *to, const float *const *from, uint32_t count,
                  uint64_t elements)
{
    return until_failure-- ? fake_sum(device, stream, to, from, count, elements)
                           : fake_refuse(device, 1);
}

/* When it is said that another way is taken, nothing of the one before is queued any more: the
 * other writes to the same staging. */
static void log_idle(void *user, enum numoe_log_level level, const char *message)
{
    struct numoe_gpu_model *model = *(struct numoe_gpu_model **)user;

    if (level != NUMOE_LOG_WARNING || !strstr(message, "from now on") || !model)
        return;
    for (uint32_t i = 0; i < numoe_gpu_model_parts(model); i++) {
        const struct numoe_gpu_model *part = numoe_gpu_model_part(model, i);
        const struct fake_stream *streams[] = {part->stream.compute, part->results};

        for (int k = 0; k < 2; k++)
            cr_expect_eq(streams[k]->head, streams[k]->tail, "device %u: its %s", i,
                         k ? "results" : "computations");
    }
}

/* In inputs, in the first round, in a later one: the call goes on, to right results. */
Test(gpu_sum, what_fails_in_a_call_is_left_off_and_the_call_goes_on)
{
    struct model *m = model_make(LAYERS, false);
    uint64_t begun[2] = {0, 0};

    for (int sums = 0; sums < 2; sums++)
        for (uint64_t at = 0; at < 24; at++) {
            struct numoe_gpu_model *model = NULL;
            struct numoe_gpu_report report;
            struct set set;

            set_make(&set, 3, UNKNOWN, at);
            set.gpu[0]->log = (struct numoe_log){log_idle, &model};
            set_open(&set, m, 3, NUMOE_GPU_SUM_PEER, &model);
            set_narrow(model, 1);
            changed = fake_ops;
            changed.copy_peer = sums ? fake_copy_peer : no_copy_peer;
            changed.sum = sums ? no_sum : fake_sum;
            until_failure = at;
            for (int i = 0; i < 3; i++)
                set.gpu[i]->ops = &changed;
            random_state = at;
            call_all(m, model, 8);
            report = report_of(model);
            cr_expect_eq(report.sum, NUMOE_GPU_SUM_HOST);
            cr_expect_not_null(strstr(report.sum_note, sums ? "summing" : "copying from GPU"), "%s",
                               report.sum_note);
            cr_expect_lt(report.summed_tokens, report.tokens);
            cr_expect_eq(report.peer_bytes == 0, !sums && at == 0, "what was refused is not told");
            begun[sums] += report.summed_tokens != 0;
            set_end(&set, model);
        }
    cr_expect(begun[0] && begun[1], "no round but the first has failed");
    model_free(m);
}

/* ---- NCCL -------------------------------------------------------------------------------------
 */

static struct fake_nccl *nccl;
static struct set *nccl_set;

static void queue(void *stream, bool (*run)(void *argument), void *argument)
{
    for (uint32_t i = 0; i < nccl_set->count; i++)
        for (int k = 0; k < FAKE_STREAMS; k++)
            if (stream == &nccl_set->fake[i]->streams[k])
                fake_push(nccl_set->fake[i], stream,
                          (struct fake_op){.what = FAKE_RUN, .run = run, .to = argument});
}

/* NCCL's CUDA calls leave their error to whoever asks the thread for its last. */
static void leave_error(void)
{
    for (uint32_t i = 0; i < nccl_set->count; i++)
        nccl_set->fake[i]->error_pending = true;
}

static void nccl_open(struct set *set)
{
    void *library = dlopen(FAKE_NCCL, RTLD_NOW | RTLD_LOCAL);

    cr_assert_not_null(library, "%s", dlerror());
    nccl = dlsym(library, "fake_nccl");
    cr_assert_not_null(nccl);
    *nccl = (struct fake_nccl){.queue = queue, .failed = leave_error, .fail_at = UINT64_MAX};
    nccl_set = set;
    setenv("NUMOE_NCCL", FAKE_NCCL, 1);
}

Test(gpu_sum, nccl_sums, .timeout = 120)
{
    struct model *m = model_make(LAYERS, true);

    for (uint32_t count = 2; count <= MOST; count++)
        for (uint64_t rows = 1; rows <= 3; rows++) {
            struct numoe_gpu_model *model;
            struct numoe_gpu_report report;
            struct set set;

            set_make(&set, count, UNKNOWN, count * 5 + rows);
            nccl_open(&set);
            set_open(&set, m, count, NUMOE_GPU_SUM_NCCL, &model);
            set_narrow(model, rows);
            cr_expect_eq(model->several->sum.nccl.version, 22809);
            random_state = count + rows;
            call_all(m, model, 12);
            report = report_of(model);
            cr_expect_eq(report.sum, NUMOE_GPU_SUM_NCCL);
            cr_expect_str_eq(report.sum_note, "");
            cr_expect_eq(report.summed_tokens, report.tokens);
            for (uint32_t i = 0; i < count; i++)
                cr_expect_eq(set.fake[i]->sums, 0);
            cr_expect_gt(nccl->sums, 0);
            set_end(&set, model);
            cr_expect_eq(nccl->made, count);
            cr_expect_eq(nccl->destroyed, count);
            cr_expect_eq(nccl->aborted, 0);
        }
    model_free(m);
}

/* Peers may be refused where NCCL has ways of its own. */
Test(gpu_sum, nccl_needs_no_peers)
{
    struct model *m = model_make(LAYERS, false);
    struct numoe_gpu_model *model;
    struct set set;

    set_make(&set, 2, UNKNOWN, 3);
    set.fake[1]->no_peers = true;
    nccl_open(&set);
    set_open(&set, m, 2, NUMOE_GPU_SUM_NCCL, &model);
    call_all(m, model, 6);
    cr_expect_eq(report_of(model).sum, NUMOE_GPU_SUM_NCCL);
    cr_expect_eq(report_of(model).peer_bytes, 0);
    set_end(&set, model);
    model_free(m);
}

Test(gpu_sum, without_nccl_peers_sum_and_without_them_the_host)
{
    const struct {
        const char *library, *says;
        bool twice;
    } cases[] = {{"/nonexistent/libnccl.so.2", "does not open", false},
                 {"/\xff\xc3/libnccl.so.2", "?/libnccl.so.2", false}, /* JSON takes text only */
                 {"libm.so.6", "has no ncclGetVersion", false},
                 {FAKE_NCCL, "GPU 0 is there twice", true}};
    struct model *m = model_make(LAYERS, false);

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int peers = 0; peers < 2; peers++) {
            struct numoe_gpu_model *model;
            struct numoe_gpu_report report;
            struct set set;

            set_make(&set, 2, UNKNOWN, i);
            setenv("NUMOE_NCCL", cases[i].library, 1);
            if (cases[i].twice)
                set.gpu[1]->properties.index = 0;
            set.fake[0]->no_peers = !peers;
            set_open(&set, m, 2, NUMOE_GPU_SUM_NCCL, &model);
            call_all(m, model, 6);
            report = report_of(model);
            cr_expect_eq(report.sum, peers ? NUMOE_GPU_SUM_PEER : NUMOE_GPU_SUM_HOST);
            cr_expect_not_null(strstr(report.sum_note, cases[i].says), "%s", report.sum_note);
            set_end(&set, model);
        }
    model_free(m);
}

/* At every call of it, in creation and later: what is left of a call goes the next way, and nobody
 * waits for kernels whose fellows never come. */
Test(gpu_sum, nccl_fails_at_every_step, .timeout = 120)
{
    struct model *m = model_make(LAYERS, false);

    for (int torn = 0; torn < 2; torn++)
        for (int peers = 0; peers < 2; peers++) {
            uint64_t at, reached;

            for (at = 0;; at++) {
                struct numoe_gpu_model *model;
                struct numoe_gpu_report report;
                struct set set;

                set_make(&set, 3, UNKNOWN, at);
                nccl_open(&set);
                nccl->torn = torn;
                nccl->fail_at = at;
                set.fake[2]->no_peers = !peers;
                set_open(&set, m, 3, NUMOE_GPU_SUM_NCCL, &model);
                set_narrow(model, 1);
                random_state = at;
                call_all(m, model, 3);
                report = report_of(model);
                reached = nccl->calls;
                if (at < reached) {
                    cr_expect_eq(report.sum, peers ? NUMOE_GPU_SUM_PEER : NUMOE_GPU_SUM_HOST);
                    cr_expect_not_null(strstr(report.sum_note, "NCCL"), "%s", report.sum_note);
                }
                set_end(&set, model);
                cr_expect_eq(nccl->aborted + nccl->destroyed, nccl->made);
                cr_expect_eq(nccl->groups, 0, "a group was left open, for the engine's own calls");
                cr_expect_leq(nccl->made, 3);
                if (at >= reached)
                    break;
            }
            cr_expect_gt(at, 30, "only %d steps", (int)at);
        }
    model_free(m);
}

static bool sync_failed;

/* Once, of those that leaving off NCCL waits with. */
static int sync_fails_once(void *device, void *stream)
{
    if (!nccl->aborted || sync_failed)
        return fake_stream_sync(device, stream);
    sync_failed = true;
    return fake_refuse(device, 1);
}

/* The call in which leaving off fails, too, is an error, and none after it goes that way. */
Test(gpu_sum, leaving_off_nccl_fails_too)
{
    struct model *m = model_make(LAYERS, false);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_model *model;
    struct batch b;
    struct set set;
    uint64_t done;

    changed = fake_ops;
    changed.stream_sync = sync_fails_once;
    set_make(&set, 2, UNKNOWN, 1);
    nccl_open(&set);
    for (int i = 0; i < 2; i++)
        set.gpu[i]->ops = &changed;
    set_open(&set, m, 2, NUMOE_GPU_SUM_NCCL, &model);
    call_all(m, model, 1);
    nccl->fail_at = nccl->calls;
    batch_make(&b);
    cr_expect_eq(numoe_gpu_forward(model, 0, &b.call, &done, &error), -EINVAL);
    cr_expect(sync_failed && batch_right(m, 0, &b, done));
    cr_expect_eq(report_of(model).sum, NUMOE_GPU_SUM_PEER);
    call_all(m, model, 4);
    set_end(&set, model);
    cr_expect_eq(nccl->aborted, 2);
    model_free(m);
}

Test(gpu_sum, errors_of_nccls_own_threads_are_noticed)
{
    struct model *m = model_make(LAYERS, false);
    struct numoe_gpu_model *model;
    struct set set;

    set_make(&set, 2, UNKNOWN, 1);
    nccl_open(&set);
    set_open(&set, m, 2, NUMOE_GPU_SUM_NCCL, &model);
    nccl->async_error = 7; /* in progress: no error */
    call_all(m, model, 2);
    cr_expect_eq(report_of(model).sum, NUMOE_GPU_SUM_NCCL);
    nccl->async_error = 3;
    set.fake[0]->speed = set.fake[1]->speed = 0; /* so that there is time to notice */
    call_all(m, model, 3);
    cr_expect_eq(report_of(model).sum, NUMOE_GPU_SUM_PEER);
    cr_expect_eq(nccl->aborted, 2);
    set_end(&set, model);
    model_free(m);
}

/* A device that is lost while NCCL's kernels wait for it is an error of the call, at once. */
Test(gpu_sum, a_device_lost_amid_nccl_ends_the_call, .timeout = 240)
{
    for (uint32_t victim = 0; victim < 2; victim++) {
        struct model *m = model_make(3, false);

        for (uint64_t at = 0;; at += 1 + at / 60) {
            const struct numoe_gpu_source source = source_near(m);
            struct numoe_gpu_model_options options = options_of(m, 2);
            struct numoe_error error = NUMOE_ERROR_INIT;
            struct numoe_gpu_model *model = NULL;
            bool lost, used;
            struct set set;
            int rc;

            options.sum = NUMOE_GPU_SUM_NCCL;
            set_make(&set, 2, UNKNOWN, at);
            nccl_open(&set);
            set.fake[victim]->fail_at = at;
            set.fake[victim]->fail_code = 719;
            rc = numoe_gpu_model_create_over(set.gpu, 2, &source, &options, &model, &error);
            if (!rc)
                set_narrow(model, 1);
            for (int i = 0; !rc && i < 6; i++) {
                const uint64_t layer = (uint64_t)i % 3;
                struct batch b;
                uint64_t done;
                int again;

                batch_make(&b);
                again = numoe_gpu_forward(model, layer, &b.call, &done, &error);
                cr_assert(batch_right(m, layer, &b, done), "at %d, call %d", (int)at, i);
                cr_expect(again == 0 || again == -EIO, "%d", again);
                cr_expect_eq(again == 0, done == b.call.tokens);
            }
            lost = set.fake[victim]->sticky;
            used = model && model->several->sum.nccl.count;
            set_end(&set, model);
            cr_expect_eq(nccl->aborted + nccl->destroyed, nccl->made);
            /* leaving it in order waits for the lost one */
            cr_expect(!lost || !used || nccl->destroyed == 0);
            if (!lost)
                break;
        }
        model_free(m);
    }
}

/* ---- waiting ----------------------------------------------------------------------------------
 */

static struct numoe_gpu_model *waiting; /* whose events are looked at */
static uint64_t held_back, alone;

enum { HELD_MOST = 5000 };

static bool of_pass(const void *event)
{
    for (uint32_t i = 0; i < numoe_gpu_model_parts(waiting); i++) {
        const struct numoe_gpu_model *part = numoe_gpu_model_part(waiting, i);

        if (event == part->computed)
            return true;
        for (int k = 0; k < GPU_STAGES; k++)
            if (event == part->stage_free[k])
                return true;
    }
    return false;
}

/* Some of the next layer waits for staging of a device. */
static bool stages(struct numoe_gpu_model *model)
{
    for (uint32_t i = 0; i < numoe_gpu_model_parts(model); i++)
        if (numoe_gpu_model_part(model, i)->stream.filling)
            return true;
    return false;
}

/* No pass is over before all of the next layer that waits for staging is queued. */
static int query_holds_back(void *device, void *event, bool *done)
{
    const int e = fake_event_query(device, event, done);

    if (!e && waiting && of_pass(event) && stages(waiting) && held_back < HELD_MOST) {
        held_back++;
        *done = false;
    }
    return e;
}

static int sync_watches(void *device, void *event)
{
    alone += waiting && of_pass(event) && stages(waiting);
    return fake_event_sync(device, event);
}

/* Whichever device is waited for, and by which way outputs come. */
Test(gpu_sum, links_are_not_idle_while_a_call_waits, .timeout = 120)
{
    struct model *m = model_make(LAYERS, false);

    changed = fake_ops;
    changed.event_query = query_holds_back;
    changed.event_sync = sync_watches;
    for (int sum = NUMOE_GPU_SUM_HOST; sum <= NUMOE_GPU_SUM_NCCL; sum++) {
        const struct numoe_gpu_source source = source_near(m);
        struct numoe_gpu_model_options options = options_of(m, 1);
        struct numoe_gpu_model *model;
        struct set set;
        uint32_t staged = 0;

        set_make(&set, 3, UNKNOWN, 5);
        nccl_open(&set);
        for (int i = 0; i < 3; i++) {
            set.gpu[i]->ops = &changed;
            set.fake[i]->speed = 0;
        }
        options.sum = (enum numoe_gpu_sum)sum;
        options.cache_bytes = 1;
        cr_assert(options.no_pinning);
        cr_assert_eq(numoe_gpu_model_create_over(set.gpu, 3, &source, &options, &model, NULL), 0);
        for (uint32_t i = 0; i < 3;
             i++) /* small buffers, so that a layer takes more than there are */
            numoe_gpu_model_part(model, i)->ring.buffer_bytes = 1024;
        for (int i = 0; i < 24; i++) {
            const uint64_t layer = (uint64_t)i % LAYERS;
            uint64_t tokens, done;
            struct batch b;

            batch_make(&b);
            b.call.ahead = EXPERTS;
            cr_assert_eq(numoe_gpu_start(model, layer, &b.call, 0, &tokens, NULL), 0);
            cr_assert_eq(tokens, b.call.tokens);
            staged += stages(model);
            waiting = model;
            held_back = 0;
            cr_assert_eq(numoe_gpu_finish(model, &b.call, &done, NULL), 0);
            waiting = NULL;
            cr_expect_lt(held_back, HELD_MOST, "%s: call %d waited, and nothing was queued",
                         numoe_gpu_sum_names[sum], i);
            cr_assert(batch_right(m, layer, &b, done));
        }
        cr_expect_eq(report_of(model).sum, (enum numoe_gpu_sum)sum);
        cr_expect_eq(alone, 0, "%s: one device was waited for alone", numoe_gpu_sum_names[sum]);
        cr_expect_gt(staged, 6, "%s: %u", numoe_gpu_sum_names[sum], staged);
        set_end(&set, model);
    }
    model_free(m);
}
