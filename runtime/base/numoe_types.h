/**
 * numoe_types.h - the words that every layer shares: element types, arithmetic, activations,
 * and how an MXFP4 matrix lies in memory.
 *
 * Part of the installed API (numoe.h includes it). C11 and C++.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_TYPES_H
#define NUMOE_TYPES_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** "no such object": an index that is not known. */
#define NUMOE_NONE UINT32_MAX

/** Element types of activations at the API. */
enum numoe_type { NUMOE_BF16 = 1, NUMOE_F32 = 2 };

/** Number formats of expert weights. Kernels compute MXFP4; plans know them all. */
enum numoe_format {
    NUMOE_MXFP4 = 1,        /**< E2M1, an E8M0 scale for each 32 of a row */
    NUMOE_MXFP8 = 2,        /**< E4M3, an E8M0 scale for each 32 of a row */
    NUMOE_NVFP4 = 3,        /**< E2M1, an E4M3 scale for each 16 of a row, one fp32 a matrix */
    NUMOE_INT4_GROUP32 = 4, /**< signed 4 bits, a bf16 scale for each 32 of a row */
    NUMOE_FP8_BLOCK128 = 5, /**< E4M3, an fp32 scale for each 128 x 128 */
    NUMOE_FP8_CHANNEL = 6,  /**< E4M3, an fp32 scale a row */
    NUMOE_BF16_WEIGHTS = 7
};

/** Arithmetic modes. */
enum numoe_arithmetic {
    /** int8 activations with one fp32 scale for each group of 32; integer dots. About 1.2 % of an
     *  output in relative L2. A group whose largest magnitude is under 1e-35 counts as zero. */
    NUMOE_FAST = 1,
    /** bf16 activations, exact weights, fp32 sums, h rounded to bf16: about 0.2 %. Where the CPU
     *  multiplies bf16 itself, subnormal activations count as zero. */
    NUMOE_EXACT = 2,
    /** 16-bit fixed point activations with one fp32 scale for each group of 32, integer dots:
     *  about 0.005 %. An activation is off by at most 1/65024 of the largest of its group, so one
     *  that is under 1/127 of that is rounded more coarsely than bf16 would. A group whose largest
     *  magnitude is under 1e-33 counts as zero. */
    NUMOE_FINE = 3,
    /** As exact with activations and h rounded to MXFP8 (E4M3 in groups of 32), for comparison
     *  with engines that multiply MXFP8 by MXFP4: about 4 %. The group's scale is its largest
     *  magnitude / 448, rounded up to a power of two. */
    NUMOE_MXFP8_UP = 4,
    /** The same with OCP's own rule: scale 2^(floor(log2 largest) - 8), and values saturate. */
    NUMOE_MXFP8_OCP = 5
};

/** Number of arithmetic modes, which are 1 .. NUMOE_ARITHMETICS. */
enum { NUMOE_ARITHMETICS = 5 };

/** Whether a GPU computes. */
enum numoe_gpu_mode {
    NUMOE_GPU_OFF = 0,
    NUMOE_GPU_ON = 1,   /**< when one is there, its code loads and its self-test passes */
    NUMOE_GPU_FORCE = 2 /**< when one is there */
};

/** Where the parts of outputs that several GPUs computed are summed. */
enum numoe_gpu_sum {
    NUMOE_GPU_SUM_AUTO = 0, /**< peer, where copies between the GPUs were measured to be faster than
                                 their links to the host and outputs are large; else host */
    NUMOE_GPU_SUM_HOST = 1, /**< each GPU copies its part to host memory, where workers add them */
    NUMOE_GPU_SUM_PEER = 2, /**< each GPU copies the others' parts of some rows, adds them and sends
                                 the sums; the same bits as host */
    NUMOE_GPU_SUM_NCCL = 3  /**< by NCCL, in its own order of adding; the library is opened then */
};

/** Where the pages of memory that was asked for on a node may lie. */
enum numoe_memory_policy {
    NUMOE_MEMORY_BIND = 0,      /**< on that node and nowhere else */
    NUMOE_MEMORY_PREFERRED = 1, /**< there, or on nodes that share its channels, while they have
                                     room; then where the kernel finds some */
    NUMOE_MEMORY_LOCAL = 2,     /**< on the node of the CPU that touches them first: a worker of
                                     that node, unless another is ahead of it */
    NUMOE_MEMORY_INTERLEAVE = 3 /**< page by page over all nodes that are used */
};

/** How the experts of a layer are divided among memory nodes. */
enum numoe_form {
    NUMOE_FORM_AUTO = 0,   /**< the one that costs least, see numoe_objective */
    NUMOE_FORM_EVERY_NODE, /**< each node holds slices of every expert */
    NUMOE_FORM_GROUPS,     /**< nodes form groups; each group holds its part of the experts, and
                                each of its nodes slices of those */
    NUMOE_FORM_EXPERTS,    /**< each node holds whole experts */
    NUMOE_FORM_ROWS        /**< gate and up as EVERY_NODE, down by rows of the output: predicted for
                                comparison, not executed by this version */
};

/** What the form is chosen for. */
enum numoe_objective {
    NUMOE_OPTIMIZE_BOTH = 0, /**< the geometric mean of both ratios to the best */
    NUMOE_OPTIMIZE_DECODE,   /**< passes of one token */
    NUMOE_OPTIMIZE_PREFILL   /**< passes of 4096 tokens */
};

/**
 * A part of a model, for one of several processes (ranks) that add up their outputs: slices
 * [first_slice, end_slice) of experts [first_expert, end_expert). A slice is 32 of the intermediate
 * width, the last one may be narrower. All 0: the whole.
 */
struct numoe_range {
    uint64_t first_slice, end_slice;   /**< end 0: to the last slice */
    uint64_t first_expert, end_expert; /**< of each layer; end 0: to the last expert */
};

/** Activation functions, all in fp32. sigmoid(v) = 1 / (1 + exp(-v)). */
enum numoe_activation_kind {
    /** g sigmoid(g) u */
    NUMOE_SILU = 1,
    /** g = min(g, limit), u = clamp(u, -limit, limit), then g sigmoid(g) u */
    NUMOE_SILU_CLAMPED = 2,
    /** clamps as above, then g sigmoid(alpha g) (u + 1) */
    NUMOE_SWIGLU_OAI = 3,
    /** gate_cap tanh(g / gate_cap) sigmoid(g) up_cap tanh(u / up_cap);
     *  up_cap 0 leaves u as it is */
    NUMOE_SITU = 4
};

struct numoe_activation {
    enum numoe_activation_kind kind;
    float limit;    /**< SILU_CLAMPED and SWIGLU_OAI; > 0 */
    float alpha;    /**< SWIGLU_OAI; finite */
    float gate_cap; /**< SITU; > 0 */
    float up_cap;   /**< SITU; >= 0 */
};

/** How near two workers are: the smallest group that both are in. */
enum numoe_distance {
    NUMOE_SAME_L3 = 0,
    NUMOE_SAME_NODE = 1,    /**< memory node */
    NUMOE_SAME_DOMAIN = 2,  /**< nodes that share memory channels */
    NUMOE_SAME_PACKAGE = 3, /**< socket */
    NUMOE_SAME_MACHINE = 4
};
enum { NUMOE_DISTANCES = 5 };

/** Buckets of a histogram of wake latencies: bucket b counts those of at most 1024 << b
 *  nanoseconds that no earlier one counts, the last one all others. */
enum { NUMOE_WAKE_BUCKETS = 20 };

/** Order of the codes in a byte of source weights. */
enum numoe_nibbles {
    NUMOE_NIBBLES_ADJACENT = 1, /**< byte i of a row: column 2i low, 2i + 1 high (Hugging Face) */
    NUMOE_NIBBLES_SPLIT = 2     /**< byte j of 16: column j low, j + 16 high (GGUF) */
};

/** Where the rows of gate and up lie. There is no default: taken for each other, they compute
 *  something else without any error. */
enum numoe_gate_up_order {
    NUMOE_GATE_UP_APART = 1,       /**< in a matrix each */
    NUMOE_GATE_UP_INTERLEAVED = 2, /**< in one of 2 I rows: even ones gate, odd ones up */
    NUMOE_GATE_FIRST = 3,          /**< in one of 2 I rows: I of gate, then I of up */
    NUMOE_UP_FIRST = 4             /**< in one of 2 I rows: I of up, then I of gate */
};

/**
 * One MXFP4 matrix in the caller's memory. Row r: codes at codes + r * code_stride in blocks of 16
 * bytes code_step apart, scale bytes (E8M0) at scales + r * scale_stride, scale_step apart, one for
 * each 32 columns. Interleaved rows: double strides and a shifted pointer. In a row's last block,
 * codes past its last column are ignored; with adjacent nibbles only the bytes of its columns are
 * read, with split ones all 16 may be.
 */
struct numoe_mxfp4 {
    const uint8_t *codes;
    const uint8_t *scales;
    uint64_t code_stride, scale_stride; /**< bytes */
    uint64_t code_step, scale_step;     /**< bytes; 16 and 1 when contiguous, 17 and 17 for GGUF */
    enum numoe_nibbles nibbles;
};

#ifdef __cplusplus
}
#endif

#endif
