/*
 * damage.h - texts that went wrong on the way, for tests of what reads them. Deterministic.
 */
#ifndef NUMOE_TESTS_DAMAGE_H
#define NUMOE_TESTS_DAMAGE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/*
 * A copy of a text with one to four flipped bits, other characters, missing pieces, and in some
 * rounds a missing end. copy has room for the text. Returns its length.
 */
static inline size_t damage(char *copy, const char *text, size_t bytes, uint32_t round,
                            uint64_t *state)
{
    static const char characters[] = "0123456789{}[]:,\"-.eEtfn \\\xff";
    size_t length = bytes;

    memcpy(copy, text, bytes);
    for (uint32_t e = 0; e < 1 + round % 4; e++) {
        size_t at;

        *state = *state * 6364136223846793005u + 1442695040888963407u;
        at = (size_t)(*state >> 20) % length;
        switch (*state >> 61) {
        case 0:
            copy[at] ^= (char)(1 << (*state >> 17 & 7));
            break;
        case 1: /* a piece is gone */
            if (length - at > 8) {
                memmove(copy + at, copy + at + 8, length - at - 8);
                length -= 8;
            }
            break;
        case 2: /* the end is gone */
            if (e == 0 && round % 16 == 0)
                length = at + 1;
            break;
        default:
            copy[at] = characters[(*state >> 10) % (sizeof characters - 1)];
            break;
        }
    }
    return length;
}

#endif
