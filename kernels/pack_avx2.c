/*
 * Packing four pair tiles at once, for 256-bit vectors (AVX2).
 *
 * A group of 32 codes of a row, 16 bytes, becomes four words, one in each octet of the tile: the
 * nibbles of each word are sorted into those of even k and those of odd k. Rows g, g + 8, g + 16
 * and g + 24 are next to each other in an octet, so four vectors are transposed as words:
 *
 *     low half   row g      w0 w1 w2 w3            octet 0  g  g+8  g+16  g+24 | g+1  g+9 ...
 *                row g + 8  w0 w1 w2 w3            octet 1  g  g+8  g+16  g+24 | ...
 *                row g + 16 ...             ->     octet 2
 *                row g + 24                        octet 3
 *     high half  rows g + 1, g + 9, g + 17, g + 25
 *
 * What a pass over a cache line of each row gives are parts of many lines of tiles. They are put
 * together in a buffer in L1 and leave it as whole lines past the caches: each byte of the
 * destination crosses the memory bus once, and nothing is evicted for it.
 * Bound by memory: 11 cycles for 128 bytes of codes (20 shuffles of 56 operations).
 *
 * Reads what it packs and no more, but prefetches; writes whole pair tiles.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "pack_pairs.h"

#include <immintrin.h>
#include <string.h>

#define INL static inline __attribute__((always_inline))

enum { LINE = 64, OCTET = 128, TILE_CODES = 512, PAIR_CODES = 1024 };

INL __m256i two_rows(const uint8_t *low, const uint8_t *high)
{
    return _mm256_loadu2_m128i((const __m128i *)(const void *)high,
                               (const __m128i *)(const void *)low);
}

/* Bytes of two codes each to tile words, in each half. */
INL __m256i words(__m256i v, bool adjacent)
{
    const __m256i nibble = _mm256_set1_epi8(15), join = _mm256_set1_epi16(0x1001);
    /* adjacent: the joined even codes lie in the low eight bytes, the odd ones in the high.
     * split: even k first, of each eight, as the low nibbles are k 0..15 and the high 16..31. */
    const __m256i adjacent_order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    const __m256i split_order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    __m256i low, high;

    if (!adjacent)
        v = _mm256_shuffle_epi8(v, split_order);
    low = _mm256_maddubs_epi16(_mm256_and_si256(v, nibble), join);
    high = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(v, 4), nibble), join);
    v = _mm256_packus_epi16(low, high);
    return adjacent ? _mm256_shuffle_epi8(v, adjacent_order) : v;
}

/* Codes of a side: to the pair tiles in the buffer. */
INL void side_codes(const struct numoe_pack_side *side, unsigned count, bool adjacent, uint8_t *out)
{
    for (unsigned g = 0; g < 8; g += 2) {
        const uint8_t *from = side->codes + g * side->code_stride;

        for (unsigned i = 0; i < 4; i++) {
            const char *next = (const char *)from + 8 * i * side->code_stride + side->ahead;

            _mm_prefetch(next, _MM_HINT_T1);
            _mm_prefetch(next + side->code_stride, _MM_HINT_T1);
        }
        for (unsigned j = 0; j < count; j++, from += side->code_step) {
            uint8_t *to = out + j * NUMOE_PAIR_BYTES + 16 * g;
            __m256i w[4], a[4];

            for (unsigned i = 0; i < 4; i++) {
                const uint8_t *row = from + 8 * i * side->code_stride;
                w[i] = words(two_rows(row, row + side->code_stride), adjacent);
            }
            for (unsigned i = 0; i < 2; i++) {
                a[i] = _mm256_unpacklo_epi32(w[2 * i], w[2 * i + 1]);
                a[2 + i] = _mm256_unpackhi_epi32(w[2 * i], w[2 * i + 1]);
            }
            for (unsigned i = 0; i < 2; i++) {
                _mm256_store_si256((__m256i *)(void *)(to + 2 * i * OCTET),
                                   _mm256_unpacklo_epi64(a[2 * i], a[2 * i + 1]));
                _mm256_store_si256((__m256i *)(void *)(to + (2 * i + 1) * OCTET),
                                   _mm256_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
            }
        }
    }
}

/* Scale bytes of a side, in lane order. */
INL void side_scales(const struct numoe_pack_side *side, unsigned count, uint8_t *out)
{
    const uint64_t stride = side->scale_stride;

    if (side->scale_step == 1 && count == PACK_PAIRS) {
        const __m128i by_group =
            _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);

        for (unsigned g = 0; g < 8; g++) {
            const uint8_t *from = side->scales + g * stride;
            uint32_t rows[4], groups[PACK_PAIRS];

            for (unsigned i = 0; i < 4; i++)
                memcpy(&rows[i], from + 8 * i * stride, 4);
            _mm_storeu_si128((__m128i *)(void *)groups,
                             _mm_shuffle_epi8(_mm_setr_epi32((int)rows[0], (int)rows[1],
                                                             (int)rows[2], (int)rows[3]),
                                              by_group));
            for (unsigned j = 0; j < PACK_PAIRS; j++)
                memcpy(out + j * NUMOE_PAIR_BYTES + 4 * g, &groups[j], 4);
        }
        return;
    }
    for (unsigned lane = 0; lane < NUMOE_TILE; lane++) {
        const uint8_t *from = side->scales + numoe_lane_row(lane) * stride;

        for (unsigned j = 0; j < count; j++)
            out[j * NUMOE_PAIR_BYTES + lane] = from[j * side->scale_step];
    }
}

/* Lanes of a tile whose scale is out of range and whose codes are not all zero (0 or 8). */
static bool is_extreme(const uint8_t *codes, const uint8_t *scales)
{
    for (unsigned lane = 0; lane < NUMOE_TILE; lane++) {
        uint32_t all = 0, word;

        if (scales[lane] >= SCALE_FOLD_MIN && scales[lane] <= SCALE_FOLD_MAX)
            continue;
        for (unsigned t = 0; t < 4; t++) {
            memcpy(&word, codes + t * OCTET + 4 * lane, 4);
            all |= word;
        }
        if (all & 0x77777777u)
            return true;
    }
    return false;
}

INL bool same(__m256i a, __m256i b)
{
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(a, b)) == -1;
}

INL void stream(uint8_t *to, const uint8_t *from)
{
    for (unsigned at = 0; at < NUMOE_PAIR_BYTES; at += LINE) {
        const __m256i a = _mm256_load_si256((const __m256i *)(const void *)(from + at));
        const __m256i b = _mm256_load_si256((const __m256i *)(const void *)(from + at + 32));

        _mm256_stream_si256((__m256i *)(void *)(to + at), a);
        _mm256_stream_si256((__m256i *)(void *)(to + at + 32), b);
    }
}

enum numoe_packed numoe_pack_pairs_avx2(const struct numoe_pack_pairs *pairs)
{
    _Alignas(LINE) uint8_t buffer[PACK_PAIRS * NUMOE_PAIR_BYTES];
    const __m256i least = _mm256_set1_epi8((char)SCALE_FOLD_MIN);
    const __m256i most = _mm256_set1_epi8((char)SCALE_FOLD_MAX);
    const unsigned count = pairs->count;
    __m256i low = most, high = least;
    bool extreme = false;

    for (unsigned s = 0; s < 2; s++)
        side_scales(&pairs->side[s], count, buffer + PAIR_CODES + NUMOE_TILE * s);
    for (unsigned i = 0; i < 2 * count; i++) {
        const __m256i scales =
            _mm256_load_si256((const __m256i *)(const void *)(buffer + i / 2 * NUMOE_PAIR_BYTES +
                                                              PAIR_CODES + NUMOE_TILE * (i % 2)));
        low = _mm256_min_epu8(low, scales);
        high = _mm256_max_epu8(high, scales);
    }
    if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, _mm256_set1_epi8((char)SCALE_NAN))))
        return NUMOE_NOT_PACKED;
    for (unsigned s = 0; s < 2; s++)
        if (pairs->nibbles == NUMOE_NIBBLES_ADJACENT)
            side_codes(&pairs->side[s], count, true, buffer + TILE_CODES * s);
        else
            side_codes(&pairs->side[s], count, false, buffer + TILE_CODES * s);
    /* low and high began within the range, and say so as long as they are */
    if (!same(low, _mm256_max_epu8(low, least)) || !same(high, _mm256_min_epu8(high, most)))
        for (unsigned i = 0; i < 2 * count && !extreme; i++) {
            const uint8_t *pair = buffer + i / 2 * NUMOE_PAIR_BYTES;
            extreme =
                is_extreme(pair + TILE_CODES * (i % 2), pair + PAIR_CODES + NUMOE_TILE * (i % 2));
        }
    for (unsigned j = 0; j < count; j++)
        stream(pairs->out + j * pairs->stride, buffer + j * NUMOE_PAIR_BYTES);
    return extreme ? NUMOE_PACKED_EXTREME : NUMOE_PACKED;
}

void numoe_pack_done_avx2(void)
{
    _mm_sfence();
}
