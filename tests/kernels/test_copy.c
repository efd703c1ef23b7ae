/* Copies past the caches: the bytes, and no other, at any alignment. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "numoe_copy.h"

Test(copy_stream, copies_the_bytes_and_no_other_at_any_alignment)
{
    enum { ROOM = 1024 };
    uint8_t *from = aligned_alloc(64, ROOM), *to = aligned_alloc(64, ROOM);

    for (int i = 0; i < ROOM; i++)
        from[i] = (uint8_t)(i * 37 + i / 256);
    for (uint32_t at = 0; at < 130; at += 1 + at / 66 * 7)
        for (uint32_t off = 0; off < 70; off += 3)
            for (uint32_t bytes = 0; bytes < 400; bytes += 1 + bytes / 5) {
                memset(to, 0xEE, ROOM);
                numoe_copy_stream(to + at, from + off, bytes);
                cr_assert_arr_eq(to + at, from + off, bytes, "%u bytes to %u", bytes, at);
                for (uint32_t i = 0; i < ROOM; i++)
                    cr_assert(to[i] == 0xEE || (i >= at && i < at + bytes), "%u bytes to %u: %u",
                              bytes, at, i);
            }
    free(from);
    free(to);
}
