/**
 * numoe_kernels.h - the mathematics: slices, tiles, packing, and one table of compute functions
 * for each instruction set. Knows no thread, no file, no machine; allocates nothing.
 *
 * A gated expert is  y = W2 . act(W1 x + b1, W3 x + b3) + b2,  W1 (gate) and W3 (up) [I, H],
 * W2 (down) [H, I]. Slice s of it holds rows 32s..32s+31 of W1 and W3 and columns 32s..32s+31
 * of W2, and y is the sum over slices. I and H need not be multiples of 32: the rest is padding
 * that contributes nothing.
 *
 * Tile: 32 rows x 32 k of MXFP4. 512 bytes of codes, 32 bytes of E8M0 scales, one a row.
 *
 *     byte    0      octet k 0..7       128 bytes = 32 words of 4 bytes, one a row
 *           128      octet k 8..15
 *           256      octet k 16..23
 *           384      octet k 24..31
 *     word l of an octet (lane l) belongs to row numoe_lane_row(l) = l / 4 + 8 (l % 4)
 *     in a word, nibble j (0..3) is k = 2j of the octet, nibble 4 + j is k = 2j + 1
 *     scale l belongs to the same row as word l
 *
 * Pair tile: codes of tile A (512), codes of tile B (512), scales of A (32), scales of B (32):
 * 1088 bytes, 17 cache lines. Slice: hidden_tiles pair tiles (A gate, B up) for k = 0, 32, ...;
 * then ceil(hidden_tiles / 2) pair tiles of down (A rows 64p.., B rows 64p+32.., the k being the
 * slice's 32 columns; a missing last B is zero codes with scale byte 127); then, with biases,
 * 32 floats of b1 and 32 of b3 in lane order.
 *
 * Rows of y inside numoe are floats in lane order: element 32 p + l is output row
 * 32 p + numoe_lane_row(l). combine() restores the natural order.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_KERNELS_H
#define NUMOE_KERNELS_H

#include "base/numoe_base.h"
#include "base/numoe_types.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { NUMOE_TILE = 32, NUMOE_PAIR_BYTES = 1088, NUMOE_ALIGNMENT = 64 };

/** Row (0..31) of a tile that lane l (0..31) holds. */
static inline unsigned numoe_lane_row(unsigned lane)
{
    return (lane >> 2) + 8 * (lane & 3);
}

/** Lane (0..31) that holds row r (0..31) of a tile. */
static inline unsigned numoe_row_lane(unsigned row)
{
    return 4 * (row & 7) + (row >> 3);
}

/** 0, or -EINVAL with the parameter named when the activation cannot be computed. */
int numoe_activation_check(const struct numoe_activation *activation, struct numoe_error *error);

/** The activation of one pair in double precision: the oracle of the vector forms. */
double numoe_activation_reference(const struct numoe_activation *activation, double gate,
                                  double up);

/* ---- formats ------------------------------------------------------------------------------ */

/** A number format of weights. Sizes are those of a tile of 32 rows x 32 k. */
struct numoe_format_info {
    enum numoe_format format;
    const char *name;     /**< for options: "fp8" */
    const char *title;    /**< for messages: "FP8 block 128" */
    uint32_t code_bytes;  /**< codes of a tile */
    uint32_t scale_bytes; /**< scales that stand behind them */
    bool block_scales;    /**< one fp32 a tile besides */
    bool row_scales;      /**< one fp32 a row besides */
    bool tensor_scales;   /**< one fp32 a matrix besides */
    bool has_kernels;     /**< false: known to plans only */
};

/** i from 0; NULL past the end. */
const struct numoe_format_info *numoe_format_at(size_t i);
/** NULL: no such format. */
const struct numoe_format_info *numoe_format_info(enum numoe_format format);
const struct numoe_format_info *numoe_format_by_name(const char *name);

/** What experts of a format take in memory. */
struct numoe_format_sizes {
    uint64_t hidden_tiles;  /**< ceil(H / 32) */
    uint64_t pair_bytes;    /**< two tiles with the scales behind their codes */
    uint64_t gate_up_bytes; /**< of a slice: pair tiles of gate and up */
    uint64_t down_bytes;    /**< of a slice: pair tiles of down */
    uint64_t slice_bytes;   /**< all of it, biases and other scales included; multiple of 64 */
    uint64_t expert_bytes;  /**< besides its slices: b2, and scales that belong to no slice */
};

/** @return 0; -EINVAL when the format is not known, hidden is 0 or the sizes overflow */
int numoe_format_sizes(enum numoe_format format, uint64_t hidden, bool bias,
                       struct numoe_format_sizes *sizes);

/* ---- shapes and packing ------------------------------------------------------------------- */

/** Sizes and offsets of a slice of MXFP4; fill by numoe_slice_shape_init, then read only. */
struct numoe_slice_shape {
    uint64_t hidden;       /**< H, elements */
    uint64_t hidden_tiles; /**< ceil(H / 32) */
    uint64_t down_offset;  /**< bytes from the slice's start to its first down pair tile */
    uint64_t bias_offset;  /**< bytes to b1; 0 when there are no biases */
    uint64_t bytes;        /**< of a slice, a multiple of 64 */
    bool bias;
};

/** @return 0; -EINVAL when hidden is 0 or the sizes overflow */
int numoe_slice_shape_init(struct numoe_slice_shape *shape, uint64_t hidden, bool bias);

/** One expert in checkpoint order. Read during numoe_pack_slices only. */
struct numoe_expert_source {
    uint64_t hidden;       /**< H: columns of gate and up, rows of down */
    uint64_t intermediate; /**< I: rows of gate and up, columns of down */
    struct numoe_mxfp4 gate, up, down;
    const float *gate_bias; /**< I floats bias_step elements apart, or NULL */
    const float *up_bias;   /**< likewise */
    uint64_t bias_step;     /**< 1, or 2 for interleaved biases */
    uint64_t first_row;     /**< gate and up begin with this row, a multiple of 32; those before
                                 are not there. Biases begin with the first */
    uint64_t down_row, down_column; /**< down begins there, multiples of 64 and of 32 */
    bool near; /**< codes lie in the caches of this core: they are not fetched ahead */
};

/** What numoe_pack_slices met. */
struct numoe_pack_report {
    /** some group with a code other than zero has a scale byte outside 2..251: only the
     *  few-token form is exact for such an expert */
    bool extreme_scales;
    /** for -EDOM: which matrix (0 gate, 1 up, 2 down), its row, and the group along the columns */
    unsigned bad_matrix;
    uint64_t bad_row, bad_group;
};

/**
 * Turn slices [first, first + count) of an expert from checkpoint order to tile order.
 * @param out     count * shape->bytes, 64-byte aligned; every byte is written
 * @param report  extreme_scales is OR-ed into; clear it before the first call
 * @return 0; -EDOM when a scale byte is 255 (NaN), with its place in report; -EINVAL when the
 *         range passes ceil(I / 32) or the source's H is not the shape's
 * @thread any, several at once on different out
 */
int numoe_pack_slices(const struct numoe_slice_shape *shape,
                      const struct numoe_expert_source *source, uint64_t first, uint64_t count,
                      void *out, struct numoe_pack_report *report);

/** The same of gate, up and their biases alone; down is not looked at. */
int numoe_pack_gate_up(const struct numoe_slice_shape *shape,
                       const struct numoe_expert_source *source, uint64_t first, uint64_t count,
                       void *out, struct numoe_pack_report *report);

/**
 * The same of some rows of down alone: pair tiles [pair, pair + pairs) of each slice, of 64 rows
 * each. There are (hidden_tiles + 1) / 2.
 */
int numoe_pack_down(const struct numoe_slice_shape *shape, const struct numoe_expert_source *source,
                    uint64_t first, uint64_t count, uint64_t pair, uint64_t pairs, void *out,
                    struct numoe_pack_report *report);

/** Which matrix of a slice. */
enum numoe_matrix { NUMOE_GATE = 0, NUMOE_UP = 1, NUMOE_DOWN = 2 };

/**
 * One weight of a packed slice, exactly, with the code and scale byte it comes from.
 * @param row  gate, up: 0..31; down: 0..32*hidden_tiles-1
 * @param k    gate, up: 0..32*hidden_tiles-1; down: 0..31
 * @param code, scale  NULL or where to put the 4-bit code and the scale byte
 */
double numoe_slice_weight(const struct numoe_slice_shape *shape, const void *slice,
                          enum numoe_matrix matrix, uint64_t row, uint64_t k, unsigned *code,
                          unsigned *scale);

/**
 * The oracle: y[0..hidden) += weight * (sum over the given slices of an expert), in double
 * precision, from packed slices.
 * @param slices     count slices, shape->bytes apart
 * @param x          hidden values
 * @param down_bias  NULL, or hidden_tiles * 32 floats in lane order, added once times weight
 * @param round_h    round h to bf16 as the exact mode does
 */
void numoe_reference_slices(const struct numoe_slice_shape *shape,
                            const struct numoe_activation *activation, const void *slices,
                            uint64_t count, const float *x, double weight, const float *down_bias,
                            bool round_h, double *y);

/* ---- Marlin's layout ------------------------------------------------------------------------
 *
 * What Marlin's 4-bit kernels of engines read, with MXFP4 scales for 16-bit activations. A product
 * has inputs k (K of them) and output columns n (N): gate and up together are one, K = H, N = 2 I,
 * down is the other, K = I, N = H. Codes are words of 8, scales bytes:
 *
 *     codes   [K / 16][N / 64][lane 0..31][block 0..3]: nibble p of the word, from the low end, is
 *             element e = 0, 2, 4, 6, 1, 3, 5, 7 [p], at
 *             n = 64 tile + 16 block + 8 (e / 4) + lane / 4
 *             k = 16 row + 2 (lane % 4) + 0, 1, 8, 9 [e % 4]
 *     scales  [K / 32][N / 64][64]: byte i is of n = 64 tile + j / 8 + 8 (j % 8),
 *             j = i with 1 and 2 of each four exchanged
 *
 * Codes and scale bytes themselves are as in the checkpoint. Columns of gate and up: all of gate
 * and then all of up, or interleaved: gate, up, gate, up. H has to be a multiple of 64, and I 64 or
 * more. Biases are not part of it.
 */

/** One expert. */
struct numoe_marlin {
    uint32_t *gate_up;
    uint8_t *gate_up_scales;
    uint32_t *down;
    uint8_t *down_scales;
};

struct numoe_marlin_sizes {
    uint64_t gate_up_words, gate_up_scales, down_words, down_scales;
};

/** @return 0; -EINVAL: the layout cannot have such an expert */
int numoe_marlin_sizes(const struct numoe_slice_shape *shape, uint64_t slices,
                       struct numoe_marlin_sizes *sizes);

/** Slowly, on the CPU: what the GPU's repacking is compared with.
 *  @param slices  count slices, shape->bytes apart
 *  @return as numoe_marlin_sizes */
int numoe_marlin_reference(const struct numoe_slice_shape *shape, const void *slices,
                           uint64_t count, bool interleaved, const struct numoe_marlin *out);

/* ---- compute ------------------------------------------------------------------------------ */

/** Arguments of few() and many(): one run of slices of one expert, some tokens. */
struct numoe_ffn {
    const struct numoe_slice_shape *shape;
    const struct numoe_activation *activation;
    enum numoe_arithmetic arithmetic; /**< the table's: sets share functions between modes */
    const void *slices;               /**< first slice, 64-byte aligned; the others follow */
    uint64_t slice_count;             /**< >= 1 */
    const float *down_bias; /**< NULL, or the expert's b2 in lane order (for one run of it) */
    unsigned tokens;        /**< 1 .. few_tokens or many_tokens of the table */
    const void *const *x;   /**< tokens activation records */
    const float *weight;    /**< tokens routing weights; multiply the expert's output */
    float *const *y; /**< tokens rows of 32 * hidden_tiles floats, lane order, 64-byte aligned */
    bool add;        /**< add to y: few slice by slice, many its whole sum at the end; else y is
                          overwritten */
    void *scratch;   /**< scratch_bytes() of this thread, 64-byte aligned */
    bool in_order;   /**< few: add slices from first to last, as many does; else as is fastest */
};

/** Arguments of combine(). */
struct numoe_combine {
    const float *const *rows;      /**< rows in lane order, summed first to last */
    const uint8_t *ends;           /**< NULL, or one byte a row: nonzero ends a part, the last row's
                                        is; rows are summed to parts, then parts first to last */
    uint64_t row_count;            /**< 0 gives zeros (or leaves out as it is, with add) */
    uint64_t tile_begin, tile_end; /**< tiles of 32 outputs to produce */
    uint64_t hidden;
    float scale; /**< times the sum; 1 changes no bit */
    bool add;    /**< add to what out holds, in fp32, before rounding */
    enum numoe_type type;
    void *out; /**< the token's hidden outputs (element 0, whatever tile_begin) */
};

/** The functions of one instruction set and arithmetic. Stateless; any thread. */
struct numoe_kernels {
    const char *isa;  /**< "ref", "avx2", ...: see numoe_kernels_select */
    const char *name; /**< what runs, e.g. "fast avx512vnni" */
    enum numoe_arithmetic arithmetic;
    unsigned few_tokens;  /**< most tokens a call of few() takes */
    unsigned few_limit;   /**< an expert with at most so many tokens is faster by few() */
    unsigned many_tokens; /**< most tokens a call of many() takes */
    bool forms_agree;     /**< what few(), in_order, and many() overwrite y with are the same bits,
                               however many tokens there are. Of many() alone that is always so; of
                               few() alone, with one token a call */
    /** Bytes of one token's activation record, a multiple of 64. */
    size_t (*record_bytes)(const struct numoe_slice_shape *shape);
    /** Bytes of scratch that few() and many() need on each thread. */
    size_t (*scratch_bytes)(const struct numoe_slice_shape *shape);
    /** Make a record from hidden values of x (bf16 or f32). A NaN or an infinity in x makes
     *  that token's outputs NaN and no other's. */
    void (*quantise)(const struct numoe_slice_shape *shape, const void *x, enum numoe_type type,
                     void *record);
    /** The values (hidden of them, natural order) that a record stands for. For tests. */
    void (*values)(const struct numoe_slice_shape *shape, const void *record, float *x);
    /** Few tokens: weights decoded while they stream past, bound by memory. */
    void (*few)(const struct numoe_ffn *ffn);
    /** Many tokens: each tile decoded once for all, bound by the multiplier. */
    void (*many)(const struct numoe_ffn *ffn);
    /** Sum rows, restore the natural order, convert. */
    void (*combine)(const struct numoe_combine *combine);
};

/**
 * The table for an arithmetic on this CPU: the best, or the one that isa names.
 * @param isa    NULL or "" for the best that the CPU and the OS support; else "ref", "avx2",
 *               "avxvnni", "avx512" (F, BW, DQ, VL), "avx512vnni" (and BF16 where the CPU has it),
 *               or "avx512vnni256": the same in 256-bit vectors, with the same bits in the results.
 *               One without a set of its own for the arithmetic gives that of a lesser one.
 * @return NULL with error filled: unknown name (-EINVAL), or not on this CPU (-ENOTSUP)
 */
const struct numoe_kernels *numoe_kernels_select(enum numoe_arithmetic arithmetic, const char *isa,
                                                 struct numoe_error *error);

/** Tables that run on this CPU, best first; index from 0, NULL past the end. For tests. */
const struct numoe_kernels *numoe_kernels_at(enum numoe_arithmetic arithmetic, size_t index);

/**
 * Set the calling thread's floating-point state to what the kernels need (round to nearest,
 * subnormals kept, exceptions masked) and return the old one for numoe_kernels_leave, which also
 * takes back the exception flags that were raised in between.
 */
unsigned numoe_kernels_enter(void);
void numoe_kernels_leave(unsigned saved);

/* ---- ceilings: what the machine can do at best, measured by plain loops --------------------- */

enum numoe_ceiling {
    NUMOE_CEILING_READ, /**< read every byte of a buffer, four streams; work unit: bytes */
    NUMOE_CEILING_INT8, /**< int8 multiply-adds of the ISA's fast mode; unit: operations */
    NUMOE_CEILING_EXACT /**< multiply-adds of the ISA's exact mode; unit: operations */
};

/**
 * Run one ceiling loop on the calling thread.
 * @param isa     as numoe_kernels_select
 * @param buffer  READ: bytes to read, 64-byte aligned; else unused
 * @param amount  READ: bytes, a multiple of 4096; else iterations
 * @return work done, in the unit of the ceiling (a multiply and an add count as 2);
 *         0 when the ISA is not available
 */
uint64_t numoe_ceiling_run(enum numoe_ceiling ceiling, const char *isa, const void *buffer,
                           uint64_t amount);

#ifdef __cplusplus
}
#endif

#endif
