/* Options of numoe plan in all their combinations. */
#include "runtime/cli_answer.h"

/* 4 nodes of 32 GB with 4 cores of 2 threads each: node n has CPUs 8n..8n+7, cores are pairs. */
#define PLAIN "numa:4(memory=32GB) core:4 pu:2"

/* Each bit adds an option; what must follow from it is checked whatever else is there. */
enum {
    CPUS = 1,          /* of nodes 0 to 2, and of node 3 the first core's */
    RESERVE_CPUS = 2,  /* cores of CPUs 1 and 10 */
    NODES = 4,         /* 0, 1 and 3 */
    RESERVE_NODES = 8, /* 1 */
    KEEP_FREE = 16,
    SMT = 32,
    GPU = 64,
    TOKENS = 128,
    ALL = 256
};

static void check_nodes(const json_t *root, unsigned set)
{
    json_t *nodes = json_object_get(root, "nodes"), *node;
    json_int_t planned = 0, keep = set & KEEP_FREE ? 3000000000 : 1;
    size_t i;

    cr_assert_eq(json_array_size(nodes), 4 - !!(set & NODES) - !!(set & RESERVE_NODES));
    json_array_foreach(nodes, i, node)
    {
        json_int_t os = integer(node, "os_index");

        cr_assert(!(set & NODES) || os != 2);
        cr_assert(!(set & RESERVE_NODES) || os != 1);
        cr_assert(integer(node, "available_bytes") <= 32000000000 - keep);
        cr_assert(integer(node, "planned_bytes") <= integer(node, "available_bytes"));
        planned += integer(node, "planned_bytes");
    }
    cr_assert_eq(planned, integer(root, "total_bytes"));
}

static void check_workers(const json_t *root, unsigned set)
{
    json_t *workers = json_object_get(root, "workers"), *worker;
    bool cpu[32] = {false};
    size_t i, expected = 0;

    json_array_foreach(workers, i, worker)
    {
        json_int_t os = integer(worker, "os_cpu");

        cr_assert(os >= 0 && os < 32 && !cpu[os], "CPU %lld", (long long)os);
        cpu[os] = true;
    }
    for (uint32_t os = 0; os < 32; os++) {
        uint32_t node = os / 8;
        bool mine = set & CPUS ? os < 26 : true;

        if (set & RESERVE_CPUS && (os / 2 == 0 || os / 2 == 5))
            mine = false;
        /* with CPUs listed these are what works, wherever their nodes are */
        if (!(set & CPUS) && ((set & NODES && node == 2) || (set & RESERVE_NODES && node == 1)))
            mine = false;
        if (!(set & (SMT | CPUS)) && os % 2)
            mine = false;
        cr_assert_eq(cpu[os], mine, "options %x: CPU %u", set, os);
        expected += mine;
    }
    cr_assert_eq(json_array_size(workers), expected);
}

static void check_predicted(const json_t *root, unsigned set)
{
    const json_t *predicted = json_object_get(root, "predicted");
    json_t *cells = json_object_get(predicted, "cells"), *cell, *node;
    json_t *nodes = json_object_get(predicted, "nodes");
    bool on_gpu = false;
    size_t i;

    json_array_foreach(cells, i, cell)
    {
        json_int_t tokens = integer(cell, "tokens");

        cr_assert(!(set & TOKENS) || tokens == 3 || tokens == 700);
        on_gpu |= number(cell, "gpu_part") > 0;
    }
    cr_assert_eq(on_gpu, !!(set & GPU));
    cr_assert_eq(json_array_size(json_object_get(predicted, "gpus")), !!(set & GPU));
    cr_assert_eq(integer(predicted, "nodes_tokens"), set & TOKENS ? 700 : 65536);
    cr_assert_eq(json_array_size(nodes), json_array_size(json_object_get(root, "nodes")));
    json_array_foreach(nodes, i, node)
    {
        bool here = set & GPU && integer(node, "os_index") == 0;

        cr_assert_eq(integer(node, "pinned_bytes") > 0, here);
        cr_assert(integer(node, "activation_bytes") > 0 ||
                  (set & CPUS && integer(node, "os_index") == 3));
    }
}

Test(cli_plan_options, any_set_of_them, .timeout = 300)
{
    for (unsigned set = 0; set < ALL; set++) {
        const char *argv[32] = {"--model", "gpt-oss-20b", "--topology", PLAIN, "--json"};
        struct answer answer;
        unsigned count = 5;
        json_t *root;
        static const char *const options[][2] = {{"--cpus", "0-25"},
                                                 {"--reserve-cpus", "1,10"},
                                                 {"--nodes", "0,1,3"},
                                                 {"--reserve-nodes", "1"},
                                                 {"--keep-free", "3GB"},
                                                 {"--smt", NULL},
                                                 {"--gpu", "a10@0,25GB/s,12GB"},
                                                 {"--tokens", "3,700"}};

        for (unsigned bit = 0; 1u << bit < ALL; bit++)
            if (set >> bit & 1)
                for (unsigned word = 0; word < 2 && options[bit][word]; word++)
                    argv[count++] = options[bit][word];
        answer = numoe_words("plan", argv);
        root = parse(&answer);
        check_nodes(root, set);
        check_workers(root, set);
        check_predicted(root, set);
        json_decref(root);
        forget(&answer);
    }
}

Test(cli_plan_options, what_leaves_nothing_is_refused, .timeout = 60)
{
    struct answer answer = numoe("plan", "--model", "gpt-oss-20b", "--topology", PLAIN,
                                 "--reserve-nodes", "0-3", NULL);

    assert_refused(answer, 2, "no memory node is left");
    answer =
        numoe("plan", "--model", "gpt-oss-20b", "--topology", PLAIN, "--reserve-nodes", "7", NULL);
    assert_refused(answer, 2, "there is no memory node 7");
    answer = numoe("plan", "--model", "gpt-oss-20b", "--topology", PLAIN, "--reserve-nodes", "1",
                   "--nodes", "0,9", NULL);
    assert_refused(answer, 2, "there is no memory node 9");
    answer = numoe("plan", "--model", "gpt-oss-20b", "--topology", PLAIN, "--reserve-cpus",
                   "0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30", NULL);
    assert_refused(answer, 2, "no CPU is left");
    answer =
        numoe("plan", "--model", "gpt-oss-20b", "--topology", PLAIN, "--keep-free", "40GB", NULL);
    assert_refused(answer, 3, "short by");
}
