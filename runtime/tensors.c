/*
 * The table of tensors.
 *
 * Names are untrusted, so the hash is seeded; names and shapes lie in an arena that only grows.
 * A file's tensors are filled in behind the table's and join the hash when all of them are sound.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "tensors.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <xxhash.h>

static const struct {
    const char *name;
    unsigned bits;
} dtypes[NUMOE_DTYPE_COUNT] = {
    [NUMOE_DTYPE_BOOL] = {"BOOL", 8},
    [NUMOE_DTYPE_F4] = {"F4", 4},
    [NUMOE_DTYPE_F6_E2M3] = {"F6_E2M3", 6},
    [NUMOE_DTYPE_F6_E3M2] = {"F6_E3M2", 6},
    [NUMOE_DTYPE_U8] = {"U8", 8},
    [NUMOE_DTYPE_I8] = {"I8", 8},
    [NUMOE_DTYPE_F8_E5M2] = {"F8_E5M2", 8},
    [NUMOE_DTYPE_F8_E4M3] = {"F8_E4M3", 8},
    [NUMOE_DTYPE_F8_E8M0] = {"F8_E8M0", 8},
    [NUMOE_DTYPE_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", 8},
    [NUMOE_DTYPE_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", 8},
    [NUMOE_DTYPE_I16] = {"I16", 16},
    [NUMOE_DTYPE_U16] = {"U16", 16},
    [NUMOE_DTYPE_F16] = {"F16", 16},
    [NUMOE_DTYPE_BF16] = {"BF16", 16},
    [NUMOE_DTYPE_I32] = {"I32", 32},
    [NUMOE_DTYPE_U32] = {"U32", 32},
    [NUMOE_DTYPE_F32] = {"F32", 32},
    [NUMOE_DTYPE_C64] = {"C64", 64},
    [NUMOE_DTYPE_F64] = {"F64", 64},
    [NUMOE_DTYPE_I64] = {"I64", 64},
    [NUMOE_DTYPE_U64] = {"U64", 64},
    [NUMOE_DTYPE_MXFP4] = {"MXFP4", 0},
};

const char *numoe_dtype_name(enum numoe_dtype dtype)
{
    return (unsigned)dtype < NUMOE_DTYPE_COUNT ? dtypes[dtype].name : NULL;
}

unsigned numoe_dtype_bits(enum numoe_dtype dtype)
{
    return (unsigned)dtype < NUMOE_DTYPE_COUNT ? dtypes[dtype].bits : 0;
}

struct numoe_shape_text numoe_shape_text(const uint64_t *shape, unsigned rank)
{
    struct numoe_shape_text out;
    size_t used = 0;
    unsigned i;

    out.text[used++] = '[';
    for (i = 0; i < rank; i++) {
        /* The longest number with its comma, then "...]", must still fit. */
        if (used + 22 + 5 > sizeof out.text) {
            used += (size_t)snprintf(out.text + used, sizeof out.text - used, "...");
            break;
        }
        used += (size_t)snprintf(out.text + used, sizeof out.text - used, "%s%llu", i ? ", " : "",
                                 (unsigned long long)shape[i]);
    }
    snprintf(out.text + used, sizeof out.text - used, "]");
    return out;
}

/* ---- the table ------------------------------------------------------------------------------ */

struct arena_block {
    struct arena_block *next;
    size_t used, size;
    _Alignas(8) char bytes[];
};

struct numoe_tensors {
    struct numoe_tensor *items;
    uint64_t count, capacity;
    uint64_t *slots; /* index + 1, and TAG of the name's hash; 0 is free */
    uint64_t slot_count;
    struct arena_block *arena;
    uint64_t seed;
};

void *numoe_tensors_keep(struct numoe_tensors *tensors, size_t bytes)
{
    struct arena_block *block = tensors->arena;
    size_t need = (bytes + 7) & ~(size_t)7;
    void *out;

    if (!block || block->size - block->used < need) {
        size_t size = need > 65536 ? need : (size_t)1 << 18;

        block = malloc(sizeof *block + size);
        if (!block)
            return NULL;
        block->next = tensors->arena;
        block->used = 0;
        block->size = size;
        tensors->arena = block;
    }
    out = block->bytes + block->used;
    block->used += need;
    return out;
}

/* Kept beside the index, so that few other names are looked at. */
#define TAG (UINT64_MAX << 40)

/* The item of a slot, or NULL when its name has another hash. */
static const struct numoe_tensor *slot_item(const struct numoe_tensors *tensors, uint64_t slot,
                                            uint64_t hash)
{
    return (slot ^ hash) & TAG ? NULL : &tensors->items[(slot & ~TAG) - 1];
}

static uint64_t hash_name(uint64_t seed, const char *name)
{
    return XXH3_64bits_withSeed(name, strlen(name), seed);
}

int numoe_tensors_create(struct numoe_tensors **tensors, struct numoe_error *error)
{
    struct numoe_tensors *t = calloc(1, sizeof *t);

    if (!t)
        return numoe_error_set(error, -ENOMEM, NULL, "no memory for a tensor table");
    if (getrandom(&t->seed, sizeof t->seed, GRND_NONBLOCK) != sizeof t->seed)
        t->seed = (uint64_t)(uintptr_t)t * 0x9E3779B97F4A7C15u; /* early boot: the address serves */
    *tensors = t;
    return 0;
}

void numoe_tensors_destroy(struct numoe_tensors *tensors)
{
    if (!tensors)
        return;
    while (tensors->arena) {
        struct arena_block *next = tensors->arena->next;
        free(tensors->arena);
        tensors->arena = next;
    }
    free(tensors->items);
    free(tensors->slots);
    free(tensors);
}

uint64_t numoe_tensors_count(const struct numoe_tensors *tensors)
{
    return tensors->count;
}

const struct numoe_tensor *numoe_tensors_at(const struct numoe_tensors *tensors, uint64_t i)
{
    return i < tensors->count ? &tensors->items[i] : NULL;
}

const struct numoe_tensor *numoe_tensors_find(const struct numoe_tensors *tensors, const char *name,
                                              uint32_t file)
{
    const uint64_t mask = tensors->slot_count - 1, hash = hash_name(tensors->seed, name);
    uint64_t at;

    if (!tensors->slot_count)
        return NULL;
    for (at = hash & mask; tensors->slots[at]; at = (at + 1) & mask) {
        const struct numoe_tensor *tensor = slot_item(tensors, tensors->slots[at], hash);
        if (tensor && tensor->file == file && !strcmp(tensor->name, name))
            return tensor;
    }
    return NULL;
}

/* @return whether the name is new to its file; else it is not inserted */
static bool hash_insert(struct numoe_tensors *tensors, uint64_t index)
{
    const struct numoe_tensor *item = &tensors->items[index];
    const uint64_t mask = tensors->slot_count - 1, hash = hash_name(tensors->seed, item->name);
    uint64_t at;

    for (at = hash & mask; tensors->slots[at]; at = (at + 1) & mask) {
        const struct numoe_tensor *other = slot_item(tensors, tensors->slots[at], hash);
        if (other && other->file == item->file && !strcmp(other->name, item->name))
            return false;
    }
    tensors->slots[at] = (hash & TAG) | (index + 1);
    return true;
}

static void hash_all(struct numoe_tensors *tensors)
{
    memset(tensors->slots, 0, tensors->slot_count * sizeof *tensors->slots);
    for (uint64_t i = 0; i < tensors->count; i++)
        hash_insert(tensors, i);
}

/* Room for `count` more items in the array, and for all of them in a hash at most half full. */
static int reserve(struct numoe_tensors *tensors, uint64_t count)
{
    uint64_t need = tensors->count + count + 1; /* never 0: no null arrays */

    if (need > tensors->capacity) {
        uint64_t capacity = need + need / 2;
        void *items = reallocarray(tensors->items, capacity, sizeof *tensors->items);
        if (!items)
            return -ENOMEM;
        tensors->items = items;
        tensors->capacity = capacity;
    }
    if (need * 2 > tensors->slot_count) {
        uint64_t slot_count = 64;
        uint64_t *slots;
        while (slot_count < need * 3)
            slot_count *= 2;
        slots = malloc(slot_count * sizeof *slots);
        if (!slots)
            return -ENOMEM;
        free(tensors->slots);
        tensors->slots = slots;
        tensors->slot_count = slot_count;
        hash_all(tensors);
    }
    return 0;
}

struct numoe_tensor *numoe_tensors_room(struct numoe_tensors *tensors, uint64_t count)
{
    return reserve(tensors, count) < 0 ? NULL : tensors->items + tensors->count;
}

const char *numoe_tensors_join(struct numoe_tensors *tensors, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        if (!hash_insert(tensors, tensors->count + i)) {
            hash_all(tensors);
            return tensors->items[tensors->count + i].name;
        }
    tensors->count += count;
    return NULL;
}
