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
 * Sixteen rows of a group are half of each octet, a cache line: it leaves at once, past the caches,
 * so each byte of the destination crosses the memory bus once, and nothing is evicted for it.
 * Bound by the instructions of a core: 46 for 128 bytes of codes (20 of them shuffles).
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
    /* of each 16 bits the two nibbles in the middle change places: their sum is of bytes times 16
     */
    const __m256i middle = _mm256_set1_epi16(0x0FF0), by_16 = _mm256_set1_epi8(16);
    const __m256i split_order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    /* adjacent: bytes of even and odd k are in turns. split: those of k 0..15 and of 16..31 */
    const __m256i order = _mm256_broadcastsi128_si256(
        adjacent ? _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)
                 : _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));

    if (!adjacent)
        v = _mm256_shuffle_epi8(v, split_order);
    v = _mm256_or_si256(_mm256_andnot_si256(middle, v),
                        _mm256_maddubs_epi16(_mm256_and_si256(v, middle), by_16));
    return _mm256_shuffle_epi8(v, order);
}

/* Rows g, g + 8, g + 16, g + 24 of a group and those behind them: 32 bytes of each octet. */
INL void octets(const uint8_t *from, uint64_t stride, bool adjacent, __m256i out[4])
{
    __m256i w[4], a[4];

    for (unsigned i = 0; i < 4; i++) {
        const uint8_t *row = from + 8 * i * stride;
        w[i] = words(two_rows(row, row + stride), adjacent);
    }
    for (unsigned i = 0; i < 2; i++) {
        a[i] = _mm256_unpacklo_epi32(w[2 * i], w[2 * i + 1]);
        a[2 + i] = _mm256_unpackhi_epi32(w[2 * i], w[2 * i + 1]);
    }
    for (unsigned i = 0; i < 2; i++) {
        out[2 * i] = _mm256_unpacklo_epi64(a[2 * i], a[2 * i + 1]);
        out[2 * i + 1] = _mm256_unpackhi_epi64(a[2 * i], a[2 * i + 1]);
    }
}

INL void stream_line(uint8_t *to, __m256i low, __m256i high)
{
    _mm256_stream_si256((__m256i *)(void *)to, low);
    _mm256_stream_si256((__m256i *)(void *)(to + 32), high);
}

/* Codes of a side, to tiles `tile_stride` bytes apart. */
INL void side_codes(const struct numoe_pack_side *side, unsigned count, bool adjacent, uint8_t *out,
                    uint64_t tile_stride)
{
    const uint64_t stride = side->code_stride;

    for (unsigned g = 0; g < 8; g += 4) {
        const uint8_t *from = side->codes + g * stride;

        if (side->ahead)
            for (unsigned i = 0; i < 16; i++)
                _mm_prefetch((const char *)from + (i / 4 * 8 + i % 4) * stride + side->ahead,
                             _MM_HINT_T1);
        for (unsigned j = 0; j < count; j++, from += side->code_step) {
            uint8_t *to = out + j * tile_stride + 16 * g;
            __m256i low[4], high[4];

            octets(from, stride, adjacent, low);
            octets(from + 2 * stride, stride, adjacent, high);
            for (unsigned t = 0; t < 4; t++)
                stream_line(to + t * OCTET, low[t], high[t]);
        }
    }
}

/* Scale bytes of a side, in lane order. */
INL void side_scales(const struct numoe_pack_side *side, unsigned count, unsigned which,
                     uint8_t out[PACK_PAIRS][LINE])
{
    const uint64_t stride = side->scale_stride;

    if (side->scale_step == 1 && count == PACK_PAIRS) {
        const __m128i by_group =
            _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);

        for (unsigned g = 0; g < 8; g += 4) {
            __m128i v[4], a[4];

            for (unsigned k = 0; k < 4; k++) {
                const uint8_t *from = side->scales + (g + k) * stride;
                uint32_t rows[4];

                for (unsigned i = 0; i < 4; i++)
                    memcpy(&rows[i], from + 8 * i * stride, 4);
                v[k] = _mm_shuffle_epi8(
                    _mm_setr_epi32((int)rows[0], (int)rows[1], (int)rows[2], (int)rows[3]),
                    by_group);
            }
            for (unsigned k = 0; k < 2; k++) {
                a[k] = _mm_unpacklo_epi32(v[2 * k], v[2 * k + 1]);
                a[2 + k] = _mm_unpackhi_epi32(v[2 * k], v[2 * k + 1]);
            }
            for (unsigned k = 0; k < 2; k++) {
                uint8_t *to = &out[2 * k][NUMOE_TILE * which + 4 * g];

                _mm_store_si128((__m128i *)(void *)to, _mm_unpacklo_epi64(a[2 * k], a[2 * k + 1]));
                _mm_store_si128((__m128i *)(void *)(to + LINE),
                                _mm_unpackhi_epi64(a[2 * k], a[2 * k + 1]));
            }
        }
        return;
    }
    for (unsigned lane = 0; lane < NUMOE_TILE; lane++) {
        const uint8_t *from = side->scales + numoe_lane_row(lane) * stride;

        for (unsigned j = 0; j < PACK_PAIRS && j < count; j++)
            out[j][NUMOE_TILE * which + lane] = from[j * side->scale_step];
    }
}

/* Whether a row of a group has a scale out of range, and codes that are not all zero (0 or 8). */
static bool is_extreme(const struct numoe_pack_side *side, unsigned group)
{
    for (unsigned row = 0; row < NUMOE_TILE; row++) {
        const uint8_t scale = side->scales[row * side->scale_stride + group * side->scale_step];
        uint64_t codes[2];

        if (scale >= SCALE_FOLD_MIN && scale <= SCALE_FOLD_MAX)
            continue;
        memcpy(codes, side->codes + row * side->code_stride + group * side->code_step,
               sizeof codes);
        if ((codes[0] | codes[1]) & 0x7777777777777777u)
            return true;
    }
    return false;
}

INL bool same(__m256i a, __m256i b)
{
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(a, b)) == -1;
}

INL __m256i load(const uint8_t *from)
{
    return _mm256_load_si256((const __m256i *)(const void *)from);
}

enum numoe_packed numoe_pack_pairs_avx2(const struct numoe_pack_pairs *pairs)
{
    _Alignas(LINE) uint8_t scales[PACK_PAIRS][LINE];
    const __m256i least = _mm256_set1_epi8((char)SCALE_FOLD_MIN);
    const __m256i most = _mm256_set1_epi8((char)SCALE_FOLD_MAX);
    const unsigned count = pairs->count;
    __m256i low = most, high = least;
    bool extreme = false;

    for (unsigned s = 0; s < 2; s++)
        side_scales(&pairs->side[s], count, s, scales);
    for (unsigned j = 0; j < count; j++)
        for (unsigned s = 0; s < 2; s++) {
            low = _mm256_min_epu8(low, load(&scales[j][NUMOE_TILE * s]));
            high = _mm256_max_epu8(high, load(&scales[j][NUMOE_TILE * s]));
        }
    if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, _mm256_set1_epi8((char)SCALE_NAN))))
        return NUMOE_NOT_PACKED;
    for (unsigned s = 0; s < 2; s++)
        if (pairs->nibbles == NUMOE_NIBBLES_ADJACENT)
            side_codes(&pairs->side[s], count, true, pairs->out + TILE_CODES * s, pairs->stride);
        else
            side_codes(&pairs->side[s], count, false, pairs->out + TILE_CODES * s, pairs->stride);
    for (unsigned j = 0; j < count; j++)
        stream_line(pairs->out + j * pairs->stride + PAIR_CODES, load(scales[j]),
                    load(scales[j] + NUMOE_TILE));
    /* low and high began within the range, and say so as long as they are */
    if (!same(low, _mm256_max_epu8(low, least)) || !same(high, _mm256_min_epu8(high, most)))
        for (unsigned i = 0; i < 2 * count && !extreme; i++)
            extreme = is_extreme(&pairs->side[i % 2], i / 2);
    return extreme ? NUMOE_PACKED_EXTREME : NUMOE_PACKED;
}

void numoe_pack_done_avx2(void)
{
    _mm_sfence();
}
