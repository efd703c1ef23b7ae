/* Model families and models known by name. SPDX-License-Identifier: Apache-2.0 */
#include "families.h"

#include "files.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* Codes and scales of each of an expert's matrices, by the names of gate, up and down. */
#define MATRIX(MATRIX, NAME, CODES, SCALES, CODES_TYPE, SCALES_TYPE)                               \
    {MATRIX, NUMOE_TENSOR_CODES, NAME "." CODES, CODES_TYPE},                                      \
    {                                                                                              \
        MATRIX, NUMOE_TENSOR_SCALES, NAME "." SCALES, SCALES_TYPE                                  \
    }
#define MATRICES(STEM, GATE, UP, DOWN, ...)                                                        \
    MATRIX(NUMOE_TENSOR_GATE, STEM "{expert}." GATE, __VA_ARGS__),                                 \
        MATRIX(NUMOE_TENSOR_UP, STEM "{expert}." UP, __VA_ARGS__),                                 \
        MATRIX(NUMOE_TENSOR_DOWN, STEM "{expert}." DOWN, __VA_ARGS__)

#define DEEPSEEK_V4(STEM, LAYERS_KEY)                                                              \
    .supported = true,                                                                             \
    .tensors = {MATRICES(STEM, "w1", "w3", "w2", "weight", "scale", NUMOE_DTYPE_I8,                \
                         NUMOE_DTYPE_F8_E8M0)},                                                    \
    .stems = {STEM}, .architecture = "DeepseekV4ForCausalLM", .model_type = "deepseek_v4",         \
    .layers_key = (LAYERS_KEY), .experts_key = "n_routed_experts",                                 \
    .top_k_key = "num_experts_per_tok", .hidden_key = "hidden_size",                               \
    .intermediate_key = "moe_intermediate_size", .limit_key = "swiglu_limit", .act = "silu",       \
    .experts_per_token = 6, .activation = {.kind = NUMOE_SILU_CLAMPED, .limit = 10}

/* What metadata of GGUF calls numbers, less the architecture before them. */
#define GGUF                                                                                       \
    .supported = true, .optional_bias = true, .layers_key = "block_count",                         \
    .dense_layers_key = "leading_dense_block_count", .experts_key = "expert_count",                \
    .top_k_key = "expert_used_count", .hidden_key = "embedding_length",                            \
    .intermediate_key = "expert_feed_forward_length", .limit_key = "swiglu_clamp_exp",             \
    .architectures = gguf_architectures,                                                           \
    .stems = {"blk.{layer}.ffn_gate_exps", "blk.{layer}.ffn_up_exps", "blk.{layer}.ffn_down_exps", \
              "blk.{layer}.ffn_gate_up_exps"}
#define GGUF_TENSOR(MATRIX, NAME)                                                                  \
    {                                                                                              \
        MATRIX, NUMOE_TENSOR_BLOCKS, "blk.{layer}." NAME ".weight", NUMOE_DTYPE_MXFP4              \
    }
#define GGUF_BIAS(MATRIX, NAME)                                                                    \
    {                                                                                              \
        MATRIX, NUMOE_TENSOR_BIAS, "blk.{layer}." NAME ".bias", NUMOE_DTYPE_F32                    \
    }

static const struct numoe_architecture gguf_architectures[] = {
    {"gpt-oss", true, {.kind = NUMOE_SWIGLU_OAI, .limit = 7, .alpha = 1.702f}},
    {"deepseek4", false, {.kind = NUMOE_SILU_CLAMPED, .limit = 10}},
    {"deepseek2", false, {.kind = NUMOE_SILU_CLAMPED}}, /* limit 0: none */
    {"glm4moe", false, {.kind = NUMOE_SILU_CLAMPED}},
    {"qwen3moe", false, {.kind = NUMOE_SILU_CLAMPED}},
    {"qwen3next", false, {.kind = NUMOE_SILU_CLAMPED}},
    {"minimax-m2", false, {.kind = NUMOE_SILU_CLAMPED}},
    {NULL, false, {0}},
};

static const struct numoe_family families[] = {
    {
        .name = "deepseek-v4",
        .title = "DeepSeek-V4",
        DEEPSEEK_V4("layers.{layer}.ffn.experts.", "num_hidden_layers"),
        .gguf = "deepseek4",
    },
    {
        .name = "deepseek-v4-draft",
        .title = "a draft of DeepSeek-V4",
        .draft = true,
        DEEPSEEK_V4("mtp.{layer}.ffn.experts.", "num_nextn_predict_layers"),
    },
    {
        /* The experts see a latent of their own width, so hidden_size says nothing about H. */
        .name = "kimi-k3",
        .title = "Kimi-K3",
        .supported = true,
        .tensors = {MATRICES("language_model.model.layers.{layer}.block_sparse_moe.experts.", "w1",
                             "w3", "w2", "weight_packed", "weight_scale", NUMOE_DTYPE_U8,
                             NUMOE_DTYPE_U8)},
        .stems = {"language_model.model.layers.{layer}.block_sparse_moe.experts."},
        .architecture = "KimiK3ForConditionalGeneration",
        .model_type = "kimi_k3",
        .section = "text_config",
        .layers_key = "num_hidden_layers",
        .dense_layers_key = "first_k_dense_replace",
        .experts_key = "num_experts",
        .top_k_key = "num_experts_per_token",
        .intermediate_key = "moe_intermediate_size",
        .gate_cap_key = "activation_situ_beta",
        .up_cap_key = "activation_situ_linear_beta",
        .experts_per_token = 16,
        .activation = {.kind = NUMOE_SITU, .gate_cap = 4, .up_cap = 25},
    },
    {
#define GPT_OSS "model.layers.{layer}.mlp.experts."
        .name = "gpt-oss",
        .title = "GPT-OSS",
        .supported = true,
        .tensors =
            {{NUMOE_TENSOR_GATE_UP, NUMOE_TENSOR_CODES, GPT_OSS "gate_up_proj_blocks",
              NUMOE_DTYPE_U8},
             {NUMOE_TENSOR_GATE_UP, NUMOE_TENSOR_SCALES, GPT_OSS "gate_up_proj_scales",
              NUMOE_DTYPE_U8},
             {NUMOE_TENSOR_DOWN, NUMOE_TENSOR_CODES, GPT_OSS "down_proj_blocks", NUMOE_DTYPE_U8},
             {NUMOE_TENSOR_DOWN, NUMOE_TENSOR_SCALES, GPT_OSS "down_proj_scales", NUMOE_DTYPE_U8},
             {NUMOE_TENSOR_GATE_UP, NUMOE_TENSOR_BIAS, GPT_OSS "gate_up_proj_bias",
              NUMOE_DTYPE_BF16},
             {NUMOE_TENSOR_DOWN, NUMOE_TENSOR_BIAS, GPT_OSS "down_proj_bias", NUMOE_DTYPE_BF16}},
        .gate_up = NUMOE_GATE_UP_INTERLEAVED,
        .stems = {GPT_OSS "gate_up_proj", GPT_OSS "down_proj"},
        .architecture = "GptOssForCausalLM",
        .model_type = "gpt_oss",
        .layers_key = "num_hidden_layers",
        .experts_key = "num_local_experts",
        .top_k_key = "num_experts_per_tok",
        .hidden_key = "hidden_size",
        .intermediate_key = "intermediate_size",
        .limit_key = "swiglu_limit",
        .act = "silu",
        .experts_per_token = 4,
        .activation = {.kind = NUMOE_SWIGLU_OAI, .limit = 7, .alpha = 1.702f},
        .gguf = "gpt-oss",
    },
    {
        .name = "gguf",
        .title = "GGUF",
        GGUF,
        .tensors = {GGUF_TENSOR(NUMOE_TENSOR_GATE, "ffn_gate_exps"),
                    GGUF_TENSOR(NUMOE_TENSOR_UP, "ffn_up_exps"),
                    GGUF_TENSOR(NUMOE_TENSOR_DOWN, "ffn_down_exps"),
                    GGUF_BIAS(NUMOE_TENSOR_GATE, "ffn_gate_exps"),
                    GGUF_BIAS(NUMOE_TENSOR_UP, "ffn_up_exps"),
                    GGUF_BIAS(NUMOE_TENSOR_DOWN, "ffn_down_exps")},
    },
    {
        .name = "gguf-merged",
        .title = "GGUF with gate and up in one",
        GGUF,
        .gate_up = NUMOE_GATE_FIRST,
        .tensors = {GGUF_TENSOR(NUMOE_TENSOR_GATE_UP, "ffn_gate_up_exps"),
                    GGUF_TENSOR(NUMOE_TENSOR_DOWN, "ffn_down_exps"),
                    GGUF_BIAS(NUMOE_TENSOR_GATE_UP, "ffn_gate_up_exps"),
                    GGUF_BIAS(NUMOE_TENSOR_DOWN, "ffn_down_exps")},
    },
    {
        .name = "gate-proj",
        .title = "DeepSeek-V3, GLM or Qwen3",
        .marker = ".mlp.experts.",
        .marker_end = ".gate_proj.weight",
    },
    {
        .name = "kimi-k2",
        .title = "Kimi-K2",
        .marker = ".mlp.experts.",
        .marker_end = ".gate_proj.weight_packed",
    },
    {
        .name = "w1",
        .title = "MiniMax or Mixtral",
        .marker = ".block_sparse_moe.experts.",
        .marker_end = ".w1.weight",
    },
};

enum { FAMILY_COUNT = sizeof families / sizeof families[0] };

const struct numoe_family *numoe_family_at(size_t i)
{
    return i < FAMILY_COUNT ? &families[i] : NULL;
}

const struct numoe_family *numoe_family_by_name(const char *name)
{
    size_t i;

    for (i = 0; i < FAMILY_COUNT && name; i++)
        if (!strcmp(families[i].name, name))
            return &families[i];
    return NULL;
}

/* Step over `word` at *at. */
static bool skip(const char **at, const char *word)
{
    size_t length = strlen(word);

    if (strncmp(*at, word, length))
        return false;
    *at += length;
    return true;
}

/* A decimal number in its only spelling: no sign, no leading zero, at most nine digits. */
static bool number(const char **at, uint32_t *out)
{
    const char *p = *at;
    uint32_t value = 0;

    if (*p < '0' || *p > '9' || (*p == '0' && p[1] >= '0' && p[1] <= '9'))
        return false;
    for (; *p >= '0' && *p <= '9'; p++) {
        if (p - *at == 9)
            return false;
        value = value * 10 + (uint32_t)(*p - '0');
    }
    *at = p;
    *out = value;
    return true;
}

/* How far a name follows a pattern: the rest of it behind the pattern's end, or NULL. */
static const char *follow(const char *pattern, const char *name, uint32_t *layer, uint32_t *expert)
{
    while (*pattern) {
        if (*pattern != '{') {
            if (*pattern++ != *name++)
                return NULL;
            continue;
        }
        if (skip(&pattern, "{layer}")) {
            if (!number(&name, layer))
                return NULL;
        } else if (!skip(&pattern, "{expert}") || !number(&name, expert)) {
            return NULL;
        }
    }
    return name;
}

/* Whether a name ends as the pattern does: most of a family's tensors differ there only. */
static bool ends_alike(const char *pattern, const char *name, size_t length)
{
    const char *tail = strrchr(pattern, '}') + 1;
    const size_t end = strlen(tail);

    return length >= end && !memcmp(name + length - end, tail, end);
}

unsigned numoe_family_tensors(const struct numoe_family *family, bool bias)
{
    unsigned count = 0;

    while (count < NUMOE_FAMILY_TENSORS && family->tensors[count].name &&
           (bias || family->tensors[count].kind != NUMOE_TENSOR_BIAS))
        count++;
    return count;
}

bool numoe_family_stacked(const struct numoe_family *family)
{
    return !strstr(family->tensors[0].name, "{expert}");
}

bool numoe_family_gguf(const struct numoe_family *family)
{
    return family->tensors[0].kind == NUMOE_TENSOR_BLOCKS;
}

int numoe_family_match(const struct numoe_family *family, const char *tensor, uint32_t *layer,
                       uint32_t *expert)
{
    const unsigned count = numoe_family_tensors(family, true);
    const size_t length = strlen(tensor);

    *expert = 0;
    for (unsigned t = 0; t < count; t++) {
        const char *pattern = family->tensors[t].name;
        const char *rest =
            ends_alike(pattern, tensor, length) ? follow(pattern, tensor, layer, expert) : NULL;
        if (rest && !*rest)
            return (int)t;
    }
    return -1;
}

bool numoe_family_stem(const struct numoe_family *family, const char *tensor)
{
    uint32_t layer, expert;

    for (unsigned s = 0; s < NUMOE_FAMILY_STEMS && family->stems[s]; s++)
        if (follow(family->stems[s], tensor, &layer, &expert))
            return true;
    return false;
}

bool numoe_family_marks(const struct numoe_family *family, const char *tensor)
{
    uint32_t layer, expert;
    const char *at;

    if (family->supported)
        return numoe_family_match(family, tensor, &layer, &expert) >= 0;
    at = strstr(tensor, family->marker);
    if (!at || !family->marker_end)
        return at != NULL;
    at += strlen(family->marker);
    return number(&at, &expert) && !strcmp(at, family->marker_end);
}

int numoe_family_tensor_name(const struct numoe_family *family, uint64_t layer, uint64_t expert,
                             unsigned tensor, char *name, size_t size)
{
    const char *at = family->tensors[tensor].name;
    size_t used = 0;

    while (*at) {
        char *out = name + (used < size ? used : size);
        const size_t room = used < size ? size - used : 0;
        const size_t plain = strcspn(at, "{");

        if (plain) {
            used += (size_t)snprintf(out, room, "%.*s", (int)plain, at);
            at += plain;
        } else {
            used += (size_t)snprintf(out, room, "%llu",
                                     (unsigned long long)(skip(&at, "{layer}") ? layer : expert));
            skip(&at, "{expert}");
        }
    }
    return (int)used;
}

int numoe_family_holder(const struct numoe_family *family, enum numoe_part part)
{
    const bool bias = part >= NUMOE_PART_GATE_BIAS;
    const enum numoe_tensor_matrix matrix =
        (enum numoe_tensor_matrix)(bias ? part - NUMOE_PART_GATE_BIAS : part / 2);
    const enum numoe_tensor_kind kind = bias       ? NUMOE_TENSOR_BIAS
                                        : part % 2 ? NUMOE_TENSOR_SCALES
                                                   : NUMOE_TENSOR_CODES;
    const unsigned count = numoe_family_tensors(family, true);

    for (unsigned t = 0; t < count; t++) {
        const struct numoe_family_tensor *tensor = &family->tensors[t];

        if ((tensor->kind == kind || (!bias && tensor->kind == NUMOE_TENSOR_BLOCKS)) &&
            (tensor->matrix == matrix ||
             (tensor->matrix == NUMOE_TENSOR_GATE_UP && matrix != NUMOE_TENSOR_DOWN)))
            return (int)t;
    }
    return -1;
}

bool numoe_family_merged(const struct numoe_family *family, enum numoe_part part)
{
    const int tensor = numoe_family_holder(family, part);

    return tensor >= 0 && family->tensors[tensor].matrix == NUMOE_TENSOR_GATE_UP;
}

#define DESC(FORMAT, L, E, K, H, I)                                                                \
    .size = sizeof(struct numoe_model_desc), .layers = (L), .experts = (E),                        \
    .experts_per_token = (K), .hidden = (H), .intermediate = (I), .format = (FORMAT),              \
    .arithmetic = NUMOE_FAST
#define SILU .activation = {.kind = NUMOE_SILU}
#define CLAMPED .activation = {.kind = NUMOE_SILU_CLAMPED, .limit = 10}
#define SITU .activation = {.kind = NUMOE_SITU, .gate_cap = 4, .up_cap = 25}
#define OAI .activation = {.kind = NUMOE_SWIGLU_OAI, .limit = 7, .alpha = 1.702f}

/* Formats are those of the maker's own checkpoints; of several the one that is listed first. */
static const struct numoe_known_model models[] = {
    {"v4-flash", "deepseek-v4", 0, {DESC(NUMOE_MXFP4, 43, 256, 6, 4096, 2048), CLAMPED}},
    {"v4-pro", "deepseek-v4", 0, {DESC(NUMOE_MXFP4, 61, 384, 6, 7168, 3072), CLAMPED}},
    {"v4.1-flash", "deepseek-v4", 0, {DESC(NUMOE_MXFP4, 40, 384, 6, 5120, 2304), CLAMPED}},
    {"kimi-k3", "kimi-k3", 1, {DESC(NUMOE_MXFP4, 92, 896, 16, 3584, 3072), SITU}},
    {"gpt-oss-20b", "gpt-oss", 0, {DESC(NUMOE_MXFP4, 24, 32, 4, 2880, 2880), .bias = true, OAI}},
    {"gpt-oss-120b", "gpt-oss", 0, {DESC(NUMOE_MXFP4, 36, 128, 4, 2880, 2880), .bias = true, OAI}},
    {"deepseek-v3", NULL, 3, {DESC(NUMOE_FP8_BLOCK128, 58, 256, 8, 7168, 2048), SILU}},
    {"deepseek-r1", NULL, 3, {DESC(NUMOE_FP8_BLOCK128, 58, 256, 8, 7168, 2048), SILU}},
    {"kimi-k2", NULL, 1, {DESC(NUMOE_INT4_GROUP32, 60, 384, 8, 7168, 2048), SILU}},
    {"qwen3-30b", NULL, 0, {DESC(NUMOE_BF16_WEIGHTS, 48, 128, 8, 2048, 768), SILU}},
    {"qwen3-235b", NULL, 0, {DESC(NUMOE_BF16_WEIGHTS, 94, 128, 8, 4096, 1536), SILU}},
    {"qwen3-next", NULL, 0, {DESC(NUMOE_BF16_WEIGHTS, 48, 512, 10, 2048, 512), SILU}},
    {"glm-4.5", NULL, 3, {DESC(NUMOE_BF16_WEIGHTS, 89, 160, 8, 5120, 1536), SILU}},
    {"glm-4.5-air", NULL, 1, {DESC(NUMOE_BF16_WEIGHTS, 45, 128, 8, 4096, 1408), SILU}},
    {"glm-5", NULL, 3, {DESC(NUMOE_BF16_WEIGHTS, 75, 256, 8, 6144, 2048), SILU}},
    {"minimax-m2", NULL, 0, {DESC(NUMOE_FP8_BLOCK128, 62, 256, 8, 3072, 1536), SILU}},
    {"minimax-m3", NULL, 3, {DESC(NUMOE_MXFP8, 57, 128, 4, 6144, 3072), OAI}},
    {"mixtral-8x7b", NULL, 0, {DESC(NUMOE_BF16_WEIGHTS, 32, 8, 2, 4096, 14336), SILU}},
};

enum { MODEL_COUNT = sizeof models / sizeof models[0] };

const char *numoe_model_name_at(size_t i)
{
    return i < MODEL_COUNT ? models[i].name : NULL;
}

const struct numoe_known_model *numoe_known_model(const char *name)
{
    size_t i;

    for (i = 0; i < MODEL_COUNT; i++)
        if (!strcmp(models[i].name, name))
            return &models[i];
    return NULL;
}

int numoe_model_by_name(const char *name, struct numoe_model_desc *desc, struct numoe_error *error)
{
    const struct numoe_known_model *model = name ? numoe_known_model(name) : NULL;
    char known[512];
    size_t used = 0, i;

    if (model) {
        *desc = model->desc;
        return 0;
    }
    known[0] = 0;
    for (i = 0; i < MODEL_COUNT && used < sizeof known; i++)
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "",
                                 models[i].name);
    return numoe_error_set(error, -EINVAL, name ? numoe_quote(name).text : NULL,
                           "model is not known by name; known are %s", known);
}
