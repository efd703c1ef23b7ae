/* One pass over JSON text. SPDX-License-Identifier: Apache-2.0 */
#include "json_scan.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void wrong(struct numoe_scan *s, const char *what)
{
    if (!s->wrong)
        s->wrong = what;
}

/* The byte at the place, or 0 at the end. */
static unsigned char byte_at(const struct numoe_scan *s, uint64_t at)
{
    return at < s->bytes ? (unsigned char)s->text[at] : 0;
}

char numoe_scan_peek(struct numoe_scan *s)
{
    if (s->wrong)
        return 0;
    while (s->at < s->bytes && (s->text[s->at] == ' ' || s->text[s->at] == '\n' ||
                                s->text[s->at] == '\r' || s->text[s->at] == '\t'))
        s->at++;
    return (char)byte_at(s, s->at);
}

bool numoe_scan_is(struct numoe_scan *s, char character)
{
    if (numoe_scan_peek(s) != character || s->at == s->bytes)
        return false;
    s->at++;
    return true;
}

bool numoe_scan_expect(struct numoe_scan *s, char character)
{
    static const char *const missing[] = {"':' expected", "',' or a closing bracket expected",
                                          "something else expected"};

    if (numoe_scan_is(s, character))
        return true;
    wrong(s, s->at == s->bytes  ? "the text ends early"
             : character == ':' ? missing[0]
             : character == ',' ? missing[1]
                                : missing[2]);
    return false;
}

/* Before a member or an element: past the comma, or past the end. */
static bool another(struct numoe_scan *s, bool *first, char end)
{
    if (s->wrong || numoe_scan_is(s, end))
        return false;
    if (!*first && !numoe_scan_expect(s, ','))
        return false;
    *first = false;
    return true;
}

bool numoe_scan_member(struct numoe_scan *s, bool *first, const char **name)
{
    if (!another(s, first, '}'))
        return false;
    *name = numoe_scan_string(s);
    return *name && numoe_scan_expect(s, ':');
}

bool numoe_scan_element(struct numoe_scan *s, bool *first)
{
    return another(s, first, ']');
}

/* ---- strings -------------------------------------------------------------------------------- */

/* Bytes of the UTF-8 sequence at the place, 0 when it is none: too long a form, a surrogate, past
 * the last code point. */
static unsigned sequence(const struct numoe_scan *s, uint64_t at)
{
    const unsigned char first = byte_at(s, at), second = byte_at(s, at + 1);
    unsigned count, i;

    if (first >= 0xC2 && first <= 0xDF)
        count = 2;
    else if (first >= 0xE0 && first <= 0xEF)
        count = 3;
    else if (first >= 0xF0 && first <= 0xF4)
        count = 4;
    else
        return 0;
    if ((first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F) ||
        (first == 0xF0 && second < 0x90) || (first == 0xF4 && second > 0x8F))
        return 0;
    for (i = 1; i < count; i++)
        if ((byte_at(s, at + i) & 0xC0) != 0x80)
            return 0;
    return count;
}

/* Four hexadecimal digits; -1 when they are none. */
static int32_t hex4(const struct numoe_scan *s, uint64_t at)
{
    int32_t value = 0;

    for (unsigned i = 0; i < 4; i++) {
        const unsigned char c = byte_at(s, at + i);
        const int digit = c >= '0' && c <= '9'   ? c - '0'
                          : c >= 'a' && c <= 'f' ? c - 'a' + 10
                          : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                 : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

static uint64_t put_utf8(char *out, uint32_t point)
{
    if (point < 0x80) {
        out[0] = (char)point;
        return 1;
    }
    if (point < 0x800) {
        out[0] = (char)(0xC0 | point >> 6);
        out[1] = (char)(0x80 | (point & 63));
        return 2;
    }
    if (point < 0x10000) {
        out[0] = (char)(0xE0 | point >> 12);
        out[1] = (char)(0x80 | (point >> 6 & 63));
        out[2] = (char)(0x80 | (point & 63));
        return 3;
    }
    out[0] = (char)(0xF0 | point >> 18);
    out[1] = (char)(0x80 | (point >> 12 & 63));
    out[2] = (char)(0x80 | (point >> 6 & 63));
    out[3] = (char)(0x80 | (point & 63));
    return 4;
}

/* What stands behind \u, and, of a pair of surrogates, behind the second. */
static uint64_t put_unicode(struct numoe_scan *s, char *out)
{
    int32_t point = hex4(s, s->at), low;

    if (point <= 0 || (point >= 0xDC00 && point <= 0xDFFF)) {
        wrong(s, point == 0 ? "a NUL in a string" : "an escape that is none");
        return 0;
    }
    s->at += 4;
    if (point >= 0xD800 && point <= 0xDBFF) {
        low = byte_at(s, s->at) == '\\' && byte_at(s, s->at + 1) == 'u' ? hex4(s, s->at + 2) : -1;
        if (low < 0xDC00 || low > 0xDFFF) {
            wrong(s, "half of a pair of surrogates");
            return 0;
        }
        s->at += 6;
        point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
    }
    return put_utf8(out, (uint32_t)point);
}

/* What stands behind a backslash. No escape is shorter than what it stands for. */
static uint64_t put_escape(struct numoe_scan *s, char *out)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const unsigned char c = byte_at(s, s->at);
    const char *at = c ? strchr(names, c) : NULL;

    if (c == 'u') {
        s->at++;
        return put_unicode(s, out);
    }
    if (!at) {
        wrong(s, "an escape that is none");
        return 0;
    }
    s->at++;
    *out = values[at - names];
    return 1;
}

const char *numoe_scan_string(struct numoe_scan *s)
{
    char *begin, *out;

    if (!numoe_scan_is(s, '"')) {
        wrong(s, "a string expected");
        return NULL;
    }
    begin = out = s->text + s->at;
    while (!s->wrong) {
        const unsigned char c = byte_at(s, s->at);
        unsigned count;

        if (s->at == s->bytes) {
            wrong(s, "the text ends within a string");
        } else if (c == '"') {
            s->at++;
            *out = 0;
            return begin;
        } else if (c == '\\') {
            s->at++;
            out += put_escape(s, out);
        } else if (c < 0x20) {
            wrong(s, "a control character in a string");
        } else if (c < 0x80) {
            *out++ = (char)c;
            s->at++;
        } else if ((count = sequence(s, s->at)) != 0) {
            memmove(out, s->text + s->at, count);
            out += count;
            s->at += count;
        } else {
            wrong(s, "unable to decode byte: it is not UTF-8");
        }
    }
    return NULL;
}

/* ---- numbers and others --------------------------------------------------------------------- */

static uint64_t digits(struct numoe_scan *s)
{
    const uint64_t begin = s->at;

    while (byte_at(s, s->at) >= '0' && byte_at(s, s->at) <= '9')
        s->at++;
    return s->at - begin;
}

/*
 * Whether a number in JSON's syntax is more than a double holds: by its decimal exponent, and where
 * that is the largest there is by its first digits.
 */
static bool too_large(const char *text, uint64_t count)
{
    enum { LARGEST = 309, DIGITS = 40 }; /* 1.8e308 is 0.18e309 */
    char first[DIGITS + 8];
    int64_t exponent = 0, given = 0;
    bool fraction = false, negative;
    unsigned kept = 0;
    uint64_t i = 0;

    for (; i < count && (text[i] | 0x20) != 'e'; i++) {
        if (text[i] == '.')
            fraction = true;
        if (text[i] < '0' || text[i] > '9')
            continue;
        if (kept || text[i] != '0') {
            exponent += !fraction;
            if (kept < DIGITS)
                first[kept++] = text[i];
        } else {
            exponent -= fraction;
        }
    }
    negative = i + 1 < count && text[i + 1] == '-';
    for (i++; i < count; i++)
        if (text[i] >= '0' && text[i] <= '9' && given < INT64_MAX / 20)
            given = 10 * given + text[i] - '0';
    exponent += negative ? -given : given;
    if (!kept || exponent != LARGEST)
        return kept && exponent > LARGEST;
    /* no decimal point: it depends on the locale */
    snprintf(first + kept, sizeof first - kept, "e%d", LARGEST - (int)kept);
    return isinf(strtod(first, NULL));
}

static void skip_number(struct numoe_scan *s)
{
    const uint64_t begin = s->at;
    bool sound;

    s->at += byte_at(s, s->at) == '-';
    if (byte_at(s, s->at) == '0') {
        s->at++;
        sound = true;
    } else {
        sound = digits(s) > 0;
    }
    if (sound && byte_at(s, s->at) == '.') {
        s->at++;
        sound = digits(s) > 0;
    }
    if (sound && (byte_at(s, s->at) | 0x20) == 'e') {
        s->at++;
        s->at += byte_at(s, s->at) == '+' || byte_at(s, s->at) == '-';
        sound = digits(s) > 0;
    }
    if (!sound)
        wrong(s, "a value expected");
    else if (too_large(s->text + begin, s->at - begin))
        wrong(s, "a number out of range");
}

static void skip_word(struct numoe_scan *s)
{
    static const char *const words[] = {"true", "false", "null"};

    for (unsigned i = 0; i < 3; i++) {
        const size_t length = strlen(words[i]);
        if (s->bytes - s->at >= length && !memcmp(s->text + s->at, words[i], length)) {
            s->at += length;
            return;
        }
    }
    skip_number(s);
}

bool numoe_scan_natural(struct numoe_scan *s, uint64_t *number)
{
    const char first = numoe_scan_peek(s);
    const uint64_t begin = s->at;
    uint64_t value = 0;

    if (first < '0' || first > '9') {
        numoe_scan_skip(s);
        return false;
    }
    skip_number(s);
    for (uint64_t i = begin; i < s->at; i++) {
        const unsigned char c = byte_at(s, i);
        if (c < '0' || c > '9' || __builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, c - '0', &value))
            return false;
    }
    *number = value;
    return !s->wrong;
}

/* A closed loop with a bit for each level, 1 for an object, and no recursion. */
void numoe_scan_skip(struct numoe_scan *s)
{
    bool object[NUMOE_SCAN_DEPTH], first = false;
    unsigned depth = 0;
    const char *name;

    do {
        const char c = numoe_scan_peek(s);

        if (c == '{' || c == '[') {
            if (depth == NUMOE_SCAN_DEPTH) {
                wrong(s, "nested too deep");
                return;
            }
            s->at++;
            object[depth++] = c == '{';
            first = true;
        } else if (c == '"') {
            numoe_scan_string(s);
        } else {
            skip_word(s);
        }
        /* to the next value, out of all that end here */
        while (depth && !s->wrong &&
               !(object[depth - 1] ? numoe_scan_member(s, &first, &name)
                                   : numoe_scan_element(s, &first))) {
            depth--;
            first = false;
        }
    } while (depth && !s->wrong);
}

bool numoe_scan_end(struct numoe_scan *s)
{
    numoe_scan_peek(s);
    if (s->at < s->bytes)
        wrong(s, "something behind the end");
    return !s->wrong;
}
