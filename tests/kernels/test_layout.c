/*
 * What the tile promises to tensor cores, by enumeration: 16 bytes feed four m16n8k16 operands,
 * shared-memory places collide in no bank, and a wgmma form can take the same registers.
 */
#include <criterion/criterion.h>
#include <string.h>

#include "stage_place.h"
#include "support/experts.h"

/* A slice whose down matrix is one tile: row r, column k holds code (r + 5 k) % 16. */
static uint8_t *tile_of_known_codes(struct numoe_slice_shape *shape)
{
    struct numoe_pack_report report = {0};
    struct test_expert e;

    test_expert_make(&e, 32, 32, false);
    for (unsigned r = 0; r < 32; r++)
        for (unsigned k = 0; k < 32; k += 2)
            e.codes[2][r * 16 + k / 2] = (uint8_t)((r + 5 * k) % 16 | (r + 5 * (k + 1)) % 16 << 4);
    cr_assert_eq(numoe_slice_shape_init(shape, 32, false), 0);
    uint8_t *slice = aligned_bytes(shape->bytes);
    cr_assert_eq(numoe_pack_slices(shape, &e.source, 0, 1, slice, &report), 0);
    test_expert_free(&e);
    return slice;
}

Test(layout, sixteen_bytes_are_four_rows_of_an_octet_in_operand_order)
{
    struct numoe_slice_shape shape;
    uint8_t *slice = tile_of_known_codes(&shape);
    const uint8_t *codes = slice + shape.down_offset;

    for (unsigned g = 0; g < 8; g++)
        for (unsigned t = 0; t < 4; t++)
            for (unsigned j = 0; j < 4; j++) { /* word j of the lane's 16 bytes: row g + 8 j */
                uint32_t word;
                memcpy(&word, codes + 128 * t + 16 * g + 4 * j, 4);
                for (unsigned pair = 0; pair < 4; pair++) /* a bf16x2: k 2 pair, 2 pair + 1 */
                    for (unsigned half = 0; half < 2; half++) {
                        const unsigned k = 8 * t + 2 * pair + half, r = g + 8 * j;
                        cr_assert_eq(word >> (4 * pair + 16 * half) & 15, (r + 5 * k) % 16,
                                     "g %u t %u word %u pair %u half %u", g, t, j, pair, half);
                    }
            }
    free(slice);
}

/* 16-byte accesses go eight lanes at a time; they must touch 32 different banks. */
static void check_banks(const unsigned at[8])
{
    unsigned banks = 0;

    for (int i = 0; i < 8; i++)
        for (int b = 0; b < 4; b++) {
            const unsigned bank = 1u << ((at[i] / 4 + (unsigned)b) % 32);
            cr_assert(!(banks & bank));
            banks |= bank;
        }
}

Test(layout, stores_and_loads_of_b_collide_in_no_bank)
{
    unsigned at[8];

    for (unsigned row = 0; row < 64; row++) { /* cp.async: 8 threads a row */
        for (unsigned i = 0; i < 8; i++)
            at[i] = numoe_stage_place(row, i / 4, i % 4, 2);
        check_banks(at);
    }
    for (unsigned n = 0; n < 8; n++) /* ld.shared.v4: a warp reads one piece */
        for (unsigned k_tile = 0; k_tile < 2; k_tile++)
            for (unsigned first = 0; first < 32; first += 8) {
                for (unsigned i = 0; i < 8; i++)
                    at[i] = numoe_stage_place(8 * n + (first + i) / 4, k_tile, (first + i) % 4, 2);
                check_banks(at);
            }
}

Test(layout, stores_and_loads_of_codes_collide_in_no_bank_and_sectors_stay_whole)
{
    unsigned at[8], seen[32] = {0};

    for (unsigned first = 0; first < 32; first += 8) { /* lane (g, t) = (lane / 4, lane % 4) */
        for (unsigned i = 0; i < 8; i++)
            at[i] = numoe_code_place((first + i) / 4, (first + i) % 4);
        check_banks(at);
        for (unsigned i = 0; i < 8; i++) /* cp.async: lane (g, t) = (lane % 8, lane / 8) */
            at[i] = numoe_code_place((first + i) % 8, (first + i) / 8);
        check_banks(at);
    }
    for (unsigned t = 0; t < 4; t++)
        for (unsigned g = 0; g < 8; g++) {
            const unsigned place = numoe_code_place(g, t);
            cr_expect_eq(place % 16, 0);
            cr_assert_lt(place, 512);
            seen[place / 16]++;
            if (g % 2) /* 32 bytes that are together in memory are together here */
                cr_expect_eq(place, numoe_code_place(g - 1, t) + 16);
        }
    for (unsigned i = 0; i < 32; i++)
        cr_expect_eq(seen[i], 1);
}

Test(layout, the_order_for_wgmma_is_its_own_inverse_back)
{
    for (unsigned k = 0; k < 32; k++)
        cr_expect_eq(numoe_wgmma_row(numoe_wgmma_place(k)), k);
}

/*
 * wgmma m64nNk16 with A in registers distributes a warp's 16 rows exactly as mma.sync m16n8k16
 * does, but reads B from shared memory in the order of k. Lane t holds, for step s, the k
 * 8t + 4s + {0, 1} as its first register pair (positions 2t, 2t + 1 of the sixteen) and
 * 8t + 4s + {2, 3} as its second (positions 2t + 8, 2t + 9). So x and h need one fixed permutation
 * within each 32, the weights none.
 */
Test(layout, wgmma_needs_activations_permuted_and_the_same_weight_bytes)
{
    unsigned seen = 0;

    for (unsigned k = 0; k < 32; k++) {
        const unsigned t = k >> 3, s = k >> 2 & 1, second = k >> 1 & 1;
        const unsigned position = 16 * s + 8 * second + 2 * t + (k & 1);
        cr_assert_lt(position, 32);
        cr_assert(!(seen & 1u << position), "each position once");
        seen |= 1u << position;
        /* neighbours stay neighbours: a bf16x2 moves as a whole */
        cr_assert_eq(position & 1, k & 1);
    }
    cr_assert_eq(seen, 0xFFFFFFFFu);
}
