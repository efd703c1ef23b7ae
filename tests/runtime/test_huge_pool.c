/* Memory from the system's pool of huge pages, which is reserved here where that is allowed.
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <sys/mman.h>

#include "memory_node.h"
#include "support/fixture.h"
#include "topo_system.h"

enum { EXPERTS = 24, HIDDEN = 512, INNER = 512, LAYERS = 2, TOKENS = 7, K = 3 };
static const char pool_file[] = "/proc/sys/vm/nr_hugepages";

static uint64_t pages_free(void)
{
    struct topo_node_memory have;

    return topo_system_memory("", &have) ? have.huge_2m_free : 0;
}

static bool set_pool(uint64_t pages)
{
    FILE *file = fopen(pool_file, "w");
    bool written = file && fprintf(file, "%lu\n", pages) > 0;

    return file ? fclose(file) == 0 && written : false;
}

static uint64_t pool_size(void)
{
    FILE *file = fopen(pool_file, "r");
    unsigned long pages = 0;

    if (file && fscanf(file, "%lu", &pages) != 1)
        pages = 0;
    if (file)
        fclose(file);
    return pages;
}

/* @return pages reserved before; they are to be given to set_pool at the end */
static uint64_t reserve(uint64_t pages)
{
    const uint64_t before = pool_size(), used = before - pages_free();

    if (used || !set_pool(pages) || pages_free() != pages) {
        set_pool(before);
        cr_skip_test("%lu pages of 2 MiB cannot be reserved here", pages);
    }
    return before;
}

/* A pool that holds a part of the range gives that part; the rest is ordinary memory. */
Test(huge_pool, is_taken_as_far_as_it_holds)
{
    const uint64_t before = reserve(70), bytes = 73 * MEMORY_HUGE_PAGE - 7;
    struct numoe_memory_request request = NUMOE_MEMORY_REQUEST_INIT;
    struct numoe_memory_report report;
    struct numoe_memory *memory;

    request.os_node = NUMOE_NONE;
    request.bytes = bytes;
    cr_assert_eq(numoe_memory_create(&request, &memory, NULL), 0);
    cr_expect_eq(memory->pooled_bytes, 70 * MEMORY_HUGE_PAGE);
    cr_assert_eq(numoe_memory_populate(memory, 0, bytes, NULL), 0);
    cr_expect_eq(pages_free(), 0);
    memset(numoe_memory_address(memory), 1, bytes);
    numoe_memory_inspect(memory, &report);
    cr_expect_geq(report.huge_bytes, memory->pooled_bytes);
    cr_expect_gt(report.checked_bytes, 0);
    /* what is of the pool stays resident: its pages may be gone before they are touched again */
    cr_expect_leq(numoe_memory_release(memory, 0, bytes), 3 * MEMORY_HUGE_PAGE);
    memset(numoe_memory_address(memory), 2, bytes);
    numoe_memory_destroy(memory);
    cr_expect_eq(pages_free(), 70, "the pool has its pages back");
    set_pool(before);
}

/* A page that is gone when it is to be made resident becomes ordinary memory. */
Test(huge_pool, a_page_that_is_gone_is_replaced)
{
    const uint64_t before = reserve(8), bytes = 8 * MEMORY_HUGE_PAGE;
    struct numoe_memory_request request = NUMOE_MEMORY_REQUEST_INIT;
    struct numoe_memory_report report;
    struct numoe_memory *memory;
    unsigned char *page;

    request.os_node = NUMOE_NONE;
    request.bytes = bytes;
    cr_assert_eq(numoe_memory_create(&request, &memory, NULL), 0);
    cr_assert_eq(memory->pooled_bytes, bytes);
    /* the fourth without its reservation, and one page fewer in the pool */
    page = (unsigned char *)numoe_memory_address(memory) + 3 * MEMORY_HUGE_PAGE;
    cr_assert_eq(mmap(page, MEMORY_HUGE_PAGE, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_HUGETLB | MAP_NORESERVE, -1, 0),
                 page);
    cr_assert(set_pool(7));
    cr_assert_eq(numoe_memory_populate(memory, 0, bytes, NULL), 0);
    memset(numoe_memory_address(memory), 3, bytes);
    cr_expect_eq(pages_free(), 0);
    cr_expect_eq(atomic_load(&memory->missed_bytes), MEMORY_HUGE_PAGE);
    numoe_memory_inspect(memory, &report);
    cr_expect_geq(report.huge_bytes, 7 * MEMORY_HUGE_PAGE);
    numoe_memory_destroy(memory);
    cr_expect_eq(pages_free(), 7);
    set_pool(before);
}

static uint64_t huge_bytes(const struct fixture *f)
{
    struct numoe_node_info info = NUMOE_NODE_INFO_INIT;

    cr_assert_eq(numoe_model_node(f->model, 0, &info), 0);
    cr_expect_eq(info.placed_bytes, info.checked_bytes);
    return info.huge_bytes;
}

/* A model on a pool that has so many pages: outputs are right, layers leave and come back, also
 * when others have taken the pool meanwhile, and closing gives all pages back. */
static void check_model(uint64_t pages, bool all)
{
    const uint64_t before = reserve(pages);
    struct fixture f = fixture_of(LAYERS, EXPERTS, HIDDEN, INNER, false, NUMOE_FAST);
    struct call c = call_make(TOKENS, K, HIDDEN, EXPERTS, true);
    struct numoe_batch b = call_batch(&c);
    float *want = malloc(TOKENS * HIDDEN * sizeof *want);
    struct numoe_model_info info = NUMOE_MODEL_INFO_INIT;
    uint64_t left;

    experts_make(&f, 17);
    open_model(&f, NULL);
    cr_assert_eq(numoe_model_info(f.model, &info), 0);
    left = pages_free();
    cr_expect(all ? left > 0 : left == 0, "%lu of %lu pages are free", left, pages);
    cr_expect_geq(huge_bytes(&f), (pages - left) * MEMORY_HUGE_PAGE);
    if (all)
        cr_expect_geq(huge_bytes(&f), info.resident_bytes);
    run(&f, 1, &b);
    cr_expect_leq(check(&f, 1, &c, 1), 1.25e-2);
    memcpy(want, c.out, TOKENS * HIDDEN * sizeof *want);
    for (int round = 0; round < 3; round++) {
        cr_assert_eq(numoe_layer_unload(f.model, 1, NULL), 0);
        if (round == 1)
            set_pool(pages - left); /* nothing is left to take */
        experts_load(&f);
        memset(c.out, 0xFF, TOKENS * HIDDEN * sizeof *want);
        run(&f, 1, &b);
        cr_assert_arr_eq(c.out, want, TOKENS * HIDDEN * sizeof *want);
    }
    close_model(&f);
    cr_expect_eq(pages_free(), pages - left, "the pool has its pages back");
    cr_expect_eq(pool_size(), pages - left);
    experts_free(&f);
    call_free(&c);
    free(want);
    set_pool(before);
}

Test(huge_pool, holds_all_of_a_model, .timeout = 60)
{
    check_model(40, true);
}

Test(huge_pool, holds_a_part_of_a_model, .timeout = 60)
{
    check_model(4, false);
}
