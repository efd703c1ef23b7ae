/* Model families and models known by name. SPDX-License-Identifier: Apache-2.0 */
#include "families.h"

#include "files.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static const struct numoe_family families[] = {
    {
        .name = "deepseek-v4",
        .title = "DeepSeek-V4",
        .supported = true,
        .prefix = "layers.",
        .middle = ".ffn.experts.",
        .matrices = {"w1", "w3", "w2"},
        .codes = "weight",
        .scales = "scale",
        .codes_dtype = NUMOE_DTYPE_I8,
        .scales_dtype = NUMOE_DTYPE_F8_E8M0,
        .architecture = "DeepseekV4ForCausalLM",
        .model_type = "deepseek_v4",
        .layers_key = "num_hidden_layers",
        .experts_key = "n_routed_experts",
        .top_k_key = "num_experts_per_tok",
        .hidden_key = "hidden_size",
        .intermediate_key = "moe_intermediate_size",
        .limit_key = "swiglu_limit",
        .act = "silu",
        .experts_per_token = 6,
        .activation = {.kind = NUMOE_SILU_CLAMPED, .limit = 10},
    },
    {
        /* The experts see a latent of their own width, so hidden_size says nothing about H. */
        .name = "kimi-k3",
        .title = "Kimi-K3",
        .supported = true,
        .prefix = "language_model.model.layers.",
        .middle = ".block_sparse_moe.experts.",
        .matrices = {"w1", "w3", "w2"},
        .codes = "weight_packed",
        .scales = "weight_scale",
        .codes_dtype = NUMOE_DTYPE_U8,
        .scales_dtype = NUMOE_DTYPE_U8,
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
        .name = "gpt-oss",
        .title = "GPT-OSS",
        .marker = ".mlp.experts.gate_up_proj_blocks",
        .architecture = "GptOssForCausalLM",
        .model_type = "gpt_oss",
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

bool numoe_family_match(const struct numoe_family *family, const char *tensor, uint32_t *layer,
                        uint32_t *expert, enum numoe_part *part)
{
    const char *at = tensor;
    unsigned matrix;

    if (!family->supported)
        return false;
    if (!skip(&at, family->prefix) || !number(&at, layer) || !skip(&at, family->middle) ||
        !number(&at, expert) || !skip(&at, "."))
        return false;
    for (matrix = 0; matrix < 3; matrix++) {
        const char *rest = at;
        if (!skip(&rest, family->matrices[matrix]) || !skip(&rest, "."))
            continue;
        if (!strcmp(rest, family->codes))
            *part = (enum numoe_part)(2 * matrix);
        else if (!strcmp(rest, family->scales))
            *part = (enum numoe_part)(2 * matrix + 1);
        else
            return false;
        return true;
    }
    return false;
}

bool numoe_family_marks(const struct numoe_family *family, const char *tensor)
{
    uint32_t layer, expert;
    enum numoe_part part;
    const char *at;

    if (family->supported)
        return numoe_family_match(family, tensor, &layer, &expert, &part);
    at = strstr(tensor, family->marker);
    if (!at || !family->marker_end)
        return at != NULL;
    at += strlen(family->marker);
    return number(&at, &expert) && !strcmp(at, family->marker_end);
}

int numoe_family_tensor(const struct numoe_family *family, uint64_t layer, uint64_t expert,
                        enum numoe_part part, char *name, size_t size)
{
    return snprintf(name, size, "%s%llu%s%llu.%s.%s", family->prefix, (unsigned long long)layer,
                    family->middle, (unsigned long long)expert, family->matrices[part / 2],
                    part % 2 ? family->scales : family->codes);
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
