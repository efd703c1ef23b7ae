/* Copies past the caches. SPDX-License-Identifier: Apache-2.0 */
#include "numoe_copy.h"

#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

enum { LINE = 64 };

void numoe_copy_stream(void *to, const void *from, uint64_t bytes)
{
    uint8_t *out = to;
    const uint8_t *in = from;
    const uint64_t ahead = (LINE - (uintptr_t)out % LINE) % LINE;
    const uint64_t first = ahead < bytes ? ahead : bytes;
    uint64_t at = first;

    memcpy(out, in, first);
    for (; at + LINE <= bytes; at += LINE)
        for (int i = 0; i < LINE; i += 16)
            _mm_stream_si128((__m128i *)(void *)(out + at + i),
                             _mm_loadu_si128((const __m128i *)(const void *)(in + at + i)));
    memcpy(out + at, in + at, bytes - at);
    _mm_sfence(); /* seen by whoever is told, by this thread, that the copy is done */
}

#else

void numoe_copy_stream(void *to, const void *from, uint64_t bytes)
{
    memcpy(to, from, bytes);
}

#endif
