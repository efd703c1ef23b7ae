/* Lists and sizes of the numoe command line. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cli_options.h"

Test(cli_list, numbers_and_ranges_in_order)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    static const uint32_t wanted[] = {0, 2, 5, 6, 7, 8, 9, 2};
    struct cli_list list = {NULL, 0};

    cr_assert_eq(cli_parse_list("0,2,5-9,2", &list, &error), 0);
    cr_assert_eq(list.count, 8);
    cr_assert_arr_eq(list.values, wanted, sizeof wanted);
    /* Given twice, the later one counts, and a refused one changes nothing. */
    cr_assert_eq(cli_parse_list("7", &list, &error), 0);
    cr_assert_eq(list.count, 1);
    cr_assert_eq(cli_parse_list("8,", &list, &error), -EINVAL);
    cr_assert_eq(list.count, 1);
    cr_assert_eq(list.values[0], 7);
    free(list.values);
}

Test(cli_list, anything_else_is_refused)
{
    static const char *const bad[] = {
        "",    ",",          "1,",           ",1",      "1,,2",
        "-1",  "1-",         "2-1",          "1-2-3",   "a",
        "1 2", " 1",         "0x1",          "1.5",     "+1",
        "1;2", "4294967295", "0-4294967294", "0-65536", "99999999999999999999"};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct cli_list list = {NULL, 0};

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        cr_expect_eq(cli_parse_list(bad[i], &list, &error), -EINVAL, "\"%s\" was taken", bad[i]);
        cr_expect_null(list.values);
    }
    cr_assert_eq(cli_parse_list("0-65535", &list, &error), 0);
    cr_assert_eq(list.count, CLI_MAX_LIST);
    cr_assert_eq(list.values[65535], 65535);
    free(list.values);
}

Test(cli_size, units_are_binary_and_decimal)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {{"0", 0},
                {"4096", 4096},
                {"17B", 17},
                {"3K", 3072},
                {"3KiB", 3072},
                {"3KB", 3000},
                {"512M", 512ull << 20},
                {"16GiB", 16ull << 30},
                {"16GB", 16000000000},
                {"2T", 2ull << 40},
                {"18446744073709551615", UINT64_MAX}};
    struct numoe_error error = NUMOE_ERROR_INIT;

    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        uint64_t bytes = 1;

        cr_expect_eq(cli_parse_size(good[i].text, &bytes, &error), 0, "%s", good[i].text);
        cr_expect_eq(bytes, good[i].bytes, "%s", good[i].text);
    }
}

Test(cli_size, anything_else_is_refused)
{
    static const char *const bad[] = {"",      "G",   "1X",        "1GX",
                                      "1GiBs", "-1",  "1.5G",      "1 G",
                                      "1BB",   "1iB", "16777216T", "18446744073709551616"};
    struct numoe_error error = NUMOE_ERROR_INIT;

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint64_t bytes = 1;

        cr_expect_eq(cli_parse_size(bad[i], &bytes, &error), -EINVAL, "\"%s\" was taken", bad[i]);
        cr_expect_eq(bytes, 1);
    }
}
