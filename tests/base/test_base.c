/* The error record, the log callback and checked arithmetic. */
#include "base/checked.h"
#include "base/numoe_base.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

Test(base_error, keeps_code_place_and_words)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_assert_eq(numoe_error_set(&error, -EINVAL, "node 17", "short by %d GiB", 124), -EINVAL);
    cr_assert_eq(error.code, -EINVAL);
    cr_assert_str_eq(error.where, "node 17");
    cr_assert_str_eq(error.message, "short by 124 GiB");
}

Test(base_error, null_record_still_returns_the_code)
{
    cr_assert_eq(numoe_error_set(NULL, -ENOMEM, NULL, "nothing"), -ENOMEM);
}

Test(base_error, long_words_are_cut_not_overrun)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    char words[2000];

    memset(words, 'w', sizeof words - 1);
    words[sizeof words - 1] = 0;
    numoe_error_set(&error, -EIO, words, "%s", words);
    cr_assert_eq(strlen(error.where), sizeof error.where - 1);
    cr_assert_eq(strlen(error.message), sizeof error.message - 1);
}

/* An older caller's record: what lies behind its size is not ours. */
Test(base_error, short_record_is_written_within_its_size)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    error.size = offsetof(struct numoe_error, message);
    strcpy(error.message, "mine");
    cr_assert_eq(numoe_error_set(&error, -EIO, "disk", "yours"), -EIO);
    cr_assert_eq(error.code, -EIO);
    cr_assert_str_eq(error.where, "disk");
    cr_assert_str_eq(error.message, "mine");
    error.size = sizeof error.size;
    error.code = 5;
    numoe_error_set(&error, -EIO, "other", "yours");
    cr_assert_eq(error.code, 5);
    cr_assert_str_eq(error.where, "disk");
}

Test(base_error, control_characters_reach_no_terminal)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    numoe_error_set(&error, -EINVAL, "a\nfile\033[2J", "near '%s'", "\x7f\t\xc3\xa9");
    cr_assert_str_eq(error.where, "a?file?[2J");
    cr_assert_str_eq(error.message, "near '??\xc3\xa9'");
}

static void count_message(void *user, enum numoe_log_level level, const char *message)
{
    cr_assert_eq(level, NUMOE_LOG_WARNING);
    cr_assert_str_eq(message, "pin refused on CPU 5");
    ++*(int *)user;
}

Test(base_log, reaches_the_callback_once_and_no_callback_is_fine)
{
    int count = 0;
    struct numoe_log log = {count_message, &count};

    numoe_log_write(&log, NUMOE_LOG_WARNING, "pin refused on CPU %d", 5);
    cr_assert_eq(count, 1);
    numoe_log_write(NULL, NUMOE_LOG_ERROR, "dropped");
    log.fn = NULL;
    numoe_log_write(&log, NUMOE_LOG_ERROR, "dropped");
    cr_assert_eq(count, 1);
}

Test(base_checked, overflow_leaves_the_result_alone)
{
    uint64_t out = 7;

    cr_assert(!numoe_add_u64(UINT64_MAX, 1, &out));
    cr_assert(!numoe_mul_u64(UINT64_MAX / 2, 3, &out));
    cr_assert(!numoe_round_up_u64(UINT64_MAX - 5, 4096, &out));
    cr_assert_eq(out, 7);
    cr_assert(numoe_mul_u64(1ull << 31, 1ull << 32, &out));
    cr_assert_eq(out, 1ull << 63);
    cr_assert(numoe_round_up_u64(4097, 4096, &out));
    cr_assert_eq(out, 8192);
}
