/* The scanner of JSON text: what it takes for sound, and that it takes nothing else for it. */
#include "json_scan.h"

#include <criterion/criterion.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* Whether a text is one sound value. Its memory ends with it, for sanitizers to see. */
static bool sound(const char *text, size_t bytes)
{
    char *copy = malloc(bytes ? bytes : 1);
    struct numoe_scan scan = {.text = copy, .bytes = bytes};
    bool out;

    memcpy(copy, text, bytes);
    numoe_scan_skip(&scan);
    out = numoe_scan_end(&scan);
    cr_assert(out || scan.wrong);
    cr_assert_leq(scan.at, bytes);
    free(copy);
    return out;
}

Test(json_scan, values_that_are_sound_and_others, .timeout = 20)
{
    static const char *const good[] = {"0",
                                       "-0",
                                       "10",
                                       "-1.5",
                                       "1e9",
                                       "1E+9",
                                       "0.0e-1",
                                       "true",
                                       "false",
                                       "null",
                                       "\"\"",
                                       "[]",
                                       "{}",
                                       " [ 1 , [ ] , { } ] ",
                                       "{\"a\":{\"b\":[{}]},\"c\":\"\\u00e9\\ud83d\\ude00\"}",
                                       "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"",
                                       "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"",
                                       "[[[[]]]]"};
    static const char *const bad[] = {"",
                                      " ",
                                      "01",
                                      "1.",
                                      ".5",
                                      "+1",
                                      "-",
                                      "1e",
                                      "1e+",
                                      "tru",
                                      "nul",
                                      "True",
                                      "[",
                                      "]",
                                      "[1",
                                      "[1,]",
                                      "[,1]",
                                      "[1 2]",
                                      "{",
                                      "}",
                                      "{1:2}",
                                      "{\"a\"}",
                                      "{\"a\":}",
                                      "{\"a\":1,}",
                                      "{,}",
                                      "{\"a\":1 \"b\":2}",
                                      "[}",
                                      "{]",
                                      "\"",
                                      "\"a",
                                      "\"\\",
                                      "\"\\x\"",
                                      "\"\\u12\"",
                                      "\"\\u12g4\"",
                                      "\"\\ud800\"",
                                      "\"\\ud800x\"",
                                      "\"\\ud800\\u0041\"",
                                      "\"\\udc00\"",
                                      "\"\\u0000\"",
                                      "\"\n\"",
                                      "\"\x1f\"",
                                      "\"\xff\"",
                                      "\"\xc0\x80\"",
                                      "\"\xe0\x80\x80\"",
                                      "\"\xed\xa0\x80\"",
                                      "\"\xf4\x90\x80\x80\"",
                                      "\"\xc3\"",
                                      "\"\xe2\x82\"",
                                      "1 2",
                                      "[] []",
                                      "\xef\xbb\xbf{}"};
    size_t i;

    for (i = 0; i < sizeof good / sizeof good[0]; i++)
        cr_expect(sound(good[i], strlen(good[i])), "%s", good[i]);
    for (i = 0; i < sizeof bad / sizeof bad[0]; i++)
        cr_expect_not(sound(bad[i], strlen(bad[i])), "%s", bad[i]);
    cr_expect_not(sound("\"a\0b\"", 5));
    cr_expect_not(sound("1\0", 2));
}

Test(json_scan, strings_are_decoded_where_they_stand, .timeout = 20)
{
    char text[] = "\"a\\u00e9\\ud83d\\ude00\\n\\/\" rest";
    struct numoe_scan scan = {.text = text, .bytes = sizeof text - 1};

    cr_expect_str_eq(numoe_scan_string(&scan), "a\xc3\xa9\xf0\x9f\x98\x80\n/");
    cr_expect_eq(numoe_scan_peek(&scan), 'r');
    cr_expect_null(numoe_scan_string(&scan));
    cr_expect_not_null(scan.wrong);
    cr_expect_eq(numoe_scan_peek(&scan), 0, "nothing goes on after the first thing that is wrong");
}

Test(json_scan, whole_numbers_up_to_64_bits, .timeout = 20)
{
    static const struct {
        const char *text;
        bool natural;
        uint64_t value;
    } cases[] = {{"0", true, 0},
                 {"18446744073709551615", true, UINT64_MAX},
                 {"18446744073709551616", false, 0},
                 {"99999999999999999999999", false, 0},
                 {"-1", false, 0},
                 {"1.0", false, 0},
                 {"1e3", false, 0},
                 {"\"1\"", false, 0},
                 {"[1]", false, 0},
                 {"true", false, 0}};
    size_t i;

    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *copy = strdup(cases[i].text);
        struct numoe_scan scan = {.text = copy, .bytes = strlen(copy)};
        uint64_t value = 0;

        cr_expect_eq(numoe_scan_natural(&scan, &value), cases[i].natural, "%s", cases[i].text);
        cr_expect_eq(value, cases[i].value, "%s", cases[i].text);
        cr_expect(numoe_scan_end(&scan), "%s: the value has been passed", cases[i].text);
        free(copy);
    }
}

Test(json_scan, depth_has_an_end, .timeout = 20)
{
    char text[2 * NUMOE_SCAN_DEPTH + 2];

    memset(text, '[', NUMOE_SCAN_DEPTH);
    memset(text + NUMOE_SCAN_DEPTH, ']', NUMOE_SCAN_DEPTH);
    cr_expect(sound(text, 2 * NUMOE_SCAN_DEPTH));
    memset(text, '[', NUMOE_SCAN_DEPTH + 1);
    memset(text + NUMOE_SCAN_DEPTH + 1, ']', NUMOE_SCAN_DEPTH + 1);
    cr_expect_not(sound(text, 2 * NUMOE_SCAN_DEPTH + 2));
}

/* Random texts of JSON's characters: jansson agrees on each. */
Test(json_scan, agrees_with_jansson, .timeout = 60)
{
    static const char *const words[] = {"{",
                                        "}",
                                        "[",
                                        "]",
                                        ",",
                                        ":",
                                        "\"a\"",
                                        "\"b\"",
                                        "1",
                                        "-2.5",
                                        "true",
                                        "null",
                                        " ",
                                        "\"\\u0041\"",
                                        "\"\\ud800\"",
                                        "01",
                                        "\"\xc3\xa9\"",
                                        "\"\xc3\""};
    uint64_t state = 42;
    unsigned n, accepted = 0;

    for (n = 0; n < 400000; n++) {
        char text[128] = "";
        unsigned count, i;
        bool theirs;
        json_t *root;

        state = state * 6364136223846793005u + 1442695040888963407u;
        count = 1 + (unsigned)(state >> 40) % 7;
        for (i = 0; i < count; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            strcat(text, words[(state >> 33) % (sizeof words / sizeof words[0])]);
        }
        root = json_loadb(text, strlen(text), JSON_DECODE_ANY, NULL);
        theirs = root != NULL;
        json_decref(root);
        accepted += theirs;
        cr_assert_eq(sound(text, strlen(text)), theirs, "%s", text);
    }
    cr_expect_gt(accepted, 4000);
}
