/*
 * What is assumed of a CPU or GPU by its name, where nothing was measured or given.
 *
 * Bandwidth: channels of a package with the fastest memory that its maker supports at one DIMM a
 * channel. Clock: all cores at work on wide vectors; the number after "@" in a name, else what is
 * typical of the generation. Operations: a multiply and an add are two, counted in the instruction
 * that multiplies int8 (vpmaddubsw: 64 in 256 bits, 128 in 512; vpdpbusd the same), as in the
 * ceiling loops that numoe bench measures, which issue nothing else that counts. Zen to Zen 2 have
 * one pipe that multiplies integers in vectors, Zen 3 two.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "predict_box.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

struct generation {
    const char *words; /* all of them, in this order; '#' is a digit, '?' any character */
    const char *name;
    double package_gbs;
    const char *channels;
    double core_read_gbs, ghz;
    const char *isa;
    double vectors; /* int8 multiply instructions a cycle of the isa's full width */
};

/* The first that fits counts. */
static const struct generation generations[] = {
    {"EPYC 9##5", "EPYC Turin", 576, "12 channels of DDR5-6000", 32, 3.1, "avx512vnni", 2},
    {"EPYC 9##4", "EPYC Genoa", 460.8, "12 channels of DDR5-4800", 30, 3.0, "avx512vnni", 1},
    {"EPYC 8##4", "EPYC Siena", 230.4, "6 channels of DDR5-4800", 28, 2.5, "avx512vnni", 1},
    {"EPYC 4##", "EPYC 4004", 83.2, "2 channels of DDR5-5200", 35, 4.2, "avx512vnni", 1},
    {"EPYC 7?#3", "EPYC Milan", 204.8, "8 channels of DDR4-3200", 22, 2.8, "avx2", 2},
    {"EPYC 7?#2", "EPYC Rome", 204.8, "8 channels of DDR4-3200", 20, 2.6, "avx2", 1},
    {"EPYC 7?#1", "EPYC Naples", 170.7, "8 channels of DDR4-2666", 14, 2.5, "avx2", 1},
    {"EPYC", "EPYC of an unknown generation", 204.8, "8 channels of DDR4-3200", 20, 2.6, "avx2", 1},
    {"Threadripper PRO 7", "Threadripper PRO 7000", 332.8, "8 channels of DDR5-5200", 32, 3.6,
     "avx512vnni", 1},
    {"Threadripper 7", "Threadripper 7000", 166.4, "4 channels of DDR5-5200", 32, 3.6, "avx512vnni",
     1},
    {"Threadripper PRO", "Threadripper PRO", 204.8, "8 channels of DDR4-3200", 22, 3.4, "avx2", 2},
    {"Threadripper", "Threadripper", 102.4, "4 channels of DDR4-3200", 22, 3.4, "avx2", 2},
    {"Ryzen # 9", "Ryzen 9000", 89.6, "2 channels of DDR5-5600", 40, 4.8, "avx512vnni", 2},
    {"Ryzen # 7", "Ryzen 7000", 83.2, "2 channels of DDR5-5200", 38, 4.6, "avx512vnni", 1},
    {"Ryzen", "Ryzen", 51.2, "2 channels of DDR4-3200", 25, 4.0, "avx2", 2},
    {"Xeon CPU Max", "Xeon Max", 307.2, "8 channels of DDR5-4800", 14, 2.4, "avx512vnni", 2},
    {"Xeon Platinum 85", "Xeon Emerald Rapids", 358.4, "8 channels of DDR5-5600", 14, 2.5,
     "avx512vnni", 2},
    {"Xeon Gold #5##", "Xeon Emerald Rapids", 358.4, "8 channels of DDR5-5600", 14, 2.5,
     "avx512vnni", 2},
    {"Xeon Platinum 84", "Xeon Sapphire Rapids", 307.2, "8 channels of DDR5-4800", 14, 2.4,
     "avx512vnni", 2},
    {"Xeon Gold #4##", "Xeon Sapphire Rapids", 307.2, "8 channels of DDR5-4800", 14, 2.4,
     "avx512vnni", 2},
    {"Xeon Silver #4##", "Xeon Sapphire Rapids", 307.2, "8 channels of DDR5-4800", 14, 2.4,
     "avx512vnni", 2},
    {"Xeon Platinum 83", "Xeon Ice Lake", 204.8, "8 channels of DDR4-3200", 13, 2.4, "avx512vnni",
     2},
    {"Xeon Gold #3##", "Xeon Ice Lake", 204.8, "8 channels of DDR4-3200", 13, 2.4, "avx512vnni", 2},
    {"Xeon Silver #3##", "Xeon Ice Lake", 170.7, "8 channels of DDR4-2666", 13, 2.3, "avx512vnni",
     2},
    {"Xeon Platinum 82", "Xeon Cascade Lake", 140.8, "6 channels of DDR4-2933", 13, 2.3,
     "avx512vnni", 2},
    {"Xeon Gold #2##", "Xeon Cascade Lake", 140.8, "6 channels of DDR4-2933", 13, 2.3, "avx512vnni",
     2},
    {"Xeon Silver #2##", "Xeon Cascade Lake", 115.2, "6 channels of DDR4-2400", 12, 2.1,
     "avx512vnni", 1},
    {"Xeon Platinum 81", "Xeon Skylake", 128.0, "6 channels of DDR4-2666", 13, 2.2, "avx512", 2},
    {"Xeon Gold #1##", "Xeon Skylake", 128.0, "6 channels of DDR4-2666", 13, 2.2, "avx512", 2},
    {"Xeon Silver #1##", "Xeon Skylake", 115.2, "6 channels of DDR4-2400", 12, 2.0, "avx512", 1},
    {"Xeon E5- v4", "Xeon E5 v4", 76.8, "4 channels of DDR4-2400", 11, 2.2, "avx2", 1},
    {"Xeon E5- v3", "Xeon E5 v3", 68.3, "4 channels of DDR4-2133", 11, 2.2, "avx2", 1},
    {"Xeon E5- v2", "Xeon E5 v2", 59.7, "4 channels of DDR3-1866", 10, 2.4, "ref", 1},
    {"Xeon E5-", "Xeon E5", 51.2, "4 channels of DDR3-1600", 10, 2.4, "ref", 1},
    {"Xeon 69##", "Xeon 6 (6900)", 614.4, "12 channels of DDR5-6400", 16, 2.7, "avx512vnni", 2},
    {"Xeon 6###", "Xeon 6 (6700, 6500)", 409.6, "8 channels of DDR5-6400", 16, 2.7, "avx512vnni",
     2},
    {"Core i", "Core desktop", 51.2, "2 channels of DDR4-3200", 20, 3.5, "avx2", 1},
    {"Core Ultra", "Core Ultra", 89.6, "2 channels of DDR5-5600", 25, 4.0, "avx2", 1},
};

static const struct generation unknown = {"", NULL, 51.2,   "2 channels of DDR4-3200",
                                          12, 2.4,  "avx2", 1};

/* Does text, from here, go as the word does? */
static bool goes(const char *text, const char *word, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        if (!text[i])
            return false;
        if (word[i] == '#' ? !isdigit((unsigned char)text[i])
                           : word[i] != '?' && word[i] != text[i])
            return false;
    }
    return true;
}

/* Each word of the pattern begins a word of the model, in order. */
static bool fits(const char *model, const char *pattern)
{
    while (*pattern) {
        size_t length = strcspn(pattern, " ");
        bool found = false;

        while (*model && !found) {
            found = goes(model, pattern, length);
            while (*model && *model != ' ' && *model != '(')
                model++;
            while (*model == ' ' || *model == '(')
                model++;
        }
        if (!found)
            return false;
        pattern += length + (pattern[length] == ' ');
    }
    return true;
}

static const struct {
    const char *name;
    double ops; /* of one instruction; 0: plain C */
    const char *words;
    double reads, multiplies; /* of the ceilings, that kernels reach */
    bool measured;
} isas[] = {
    /*
     * As numoe bench measures them (docs/measurements.md). Reading with few tokens: AVX-512 0.84 to
     * 0.94, AVX2 0.79 (Zen 3), 0.82 to 0.92 (Xeon), 0.65 (Zen 5), AVX-VNNI 0.81 to 0.85.
     * Multiplying with 1024 tokens, what reading takes taken out: AVX-512 VNNI 0.57 (Xeon), 0.64
     * (Zen 5); AVX2 0.48 (Xeon), 0.51 (Zen 3), 0.57 (Zen 5); AVX-VNNI 0.60 with it. Those without a
     * figure of their own have their neighbour's.
     */
    {"ref", 4, "plain C", 0.80, 0.50, false},
    {"avx2", 64, "256-bit vpmaddubsw", 0.80, 0.50, true},
    {"avxvnni", 64, "256-bit vpdpbusd", 0.82, 0.60, true},
    {"avx512vnni256", 64, "256-bit vpdpbusd", 0.88, 0.62, false},
    {"avx512", 128, "512-bit vpmaddubsw", 0.88, 0.62, false},
    {"avx512vnni", 128, "512-bit vpdpbusd", 0.88, 0.62, true},
};

bool predict_guess_cpu(const char *model, const char *isa, struct cpu_guess *guess)
{
    const struct generation *of = &unknown;
    const char *at = strchr(model, '@');

    for (size_t i = 0; i < sizeof generations / sizeof generations[0] && of == &unknown; i++)
        if (fits(model, generations[i].words))
            of = &generations[i];
    *guess = (struct cpu_guess){
        .name = of->name,
        .package_gbs = of->package_gbs,
        .channels = of->channels,
        .core_read_gbs = of->core_read_gbs,
        .ghz = of->ghz,
        .isa = isa ? isa : of->isa,
    };
    if (at) {
        double ghz = strtod(at + 1, NULL);

        if (ghz >= 0.5 && ghz <= 10) {
            guess->ghz = ghz;
            guess->ghz_from_name = true;
        }
    }
    for (size_t i = 0; i < sizeof isas / sizeof isas[0]; i++)
        if (!strcmp(isas[i].name, guess->isa)) {
            /* narrower vectors than its own run at the same rate, or at two a cycle where wide
             * ones are split in halves */
            double vectors =
                of->vectors < 2 && isas[i].ops < 128 && strcmp(of->isa, isas[i].name) != 0
                    ? 2
                    : of->vectors;

            guess->isa = isas[i].name;
            guess->ops_a_cycle = isas[i].ops * (i ? vectors : 1);
            guess->ops_words = isas[i].words;
            guess->reads = isas[i].reads;
            guess->multiplies = isas[i].multiplies;
            guess->measured = isas[i].measured;
            return true;
        }
    return false;
}

/*
 * Dense bf16 tensor peaks and memory bandwidths by data sheet. For Hopper the rate that a loop of
 * mma.sync reaches (640), not wgmma's 989: the code is written for the former.
 */
static const struct {
    const char *name;
    double tflops, memory_gbs;
    bool old; /* of a compute capability below 8.0, which nothing here is built for */
} gpus[] = {
    {"a100", 312, 1555, false}, {"a100-80", 312, 2039, false}, {"a10", 125, 600, false},
    {"a30", 165, 933, false},   {"a40", 150, 696, false},      {"a6000", 155, 768, false},
    {"h100", 640, 3350, false}, {"h200", 640, 4650, false},    {"l40", 181, 864, false},
    {"l40s", 362, 864, false},  {"l4", 121, 300, false},       {"3090", 71, 936, false},
    {"4090", 165, 1008, false}, {"5090", 210, 1792, false},    {"b200", 2000, 8000, false},
    {"t4", 65, 320, true},      {"v100", 112, 900, true},
};

/*
 * What prefill reaches of that peak, with 8192 tokens on an H200 (docs/measurements.md): 300 of 635
 * TFLOP/s by mma.sync, which is what all but Hopper compute by, and 0.62 to 0.64 by wgmma.
 */
double predict_guess_multiplies(const char *gpu)
{
    return strcasestr(gpu, "h100") || strcasestr(gpu, "h200") ? 0.62 : 0.47;
}

bool predict_guess_gpu(struct numoe_predict_gpu *gpu, bool *old)
{
    double tflops = 100, memory_gbs = 500;
    bool known = false;
    size_t best = 0;

    *old = false;
    for (size_t i = 0; i < sizeof gpus / sizeof gpus[0]; i++) {
        size_t length = strlen(gpus[i].name);

        if (!strcasestr(gpu->name, gpus[i].name) || length <= best)
            continue;
        best = length;
        tflops = gpus[i].tflops;
        memory_gbs = gpus[i].memory_gbs;
        *old = gpus[i].old;
        known = true;
    }
    if (!(gpu->tflops > 0))
        gpu->tflops = tflops;
    if (!(gpu->memory_gbs > 0))
        gpu->memory_gbs = memory_gbs;
    return known;
}
