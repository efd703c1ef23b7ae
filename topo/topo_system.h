/*
 * topo_system.h - what the running system says: memory of nodes, limits of cgroups.
 *
 * Every function takes the directory that stands for "/", so that recorded systems can be read;
 * "" is this one. Nothing here fails: what cannot be read is "not known".
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef TOPO_SYSTEM_H
#define TOPO_SYSTEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct topo_node_memory {
    uint64_t total_bytes;
    uint64_t free_bytes;                 /* free, file cache and reclaimable slab */
    uint64_t huge_2m_free, huge_1g_free; /* pages in the pools; not part of free_bytes */
};

/* Memory of one node. @return false when the system does not tell */
bool topo_system_node(const char *root, uint32_t os_index, struct topo_node_memory *memory);

/* Memory of the whole system (/proc/meminfo), huge pages of all nodes. */
bool topo_system_memory(const char *root, struct topo_node_memory *memory);

/* True when the system has at most one node with memory: then its own totals describe that node,
 * and do so better than the node's counters (which lag behind memory that is plugged in). */
bool topo_system_single_node(const char *root);

enum { TOPO_CGROUP_LEVELS = 32 };

/* Where limits of this process stand: one directory a level, from its own group up to the root of
 * what it can see. */
struct topo_cgroup {
    char *memory[TOPO_CGROUP_LEVELS];
    bool memory_v2[TOPO_CGROUP_LEVELS];
    uint32_t memory_count;
    char *cpu[TOPO_CGROUP_LEVELS];
    bool cpu_v2[TOPO_CGROUP_LEVELS];
    uint32_t cpu_count;
};

/* Find them. Always succeeds; no levels when there is nothing to be seen. */
void topo_cgroup_find(const char *root, struct topo_cgroup *cgroup);
void topo_cgroup_free(struct topo_cgroup *cgroup);

/* Bytes that may still be charged, the least of all levels; UINT64_MAX: no limit. */
uint64_t topo_cgroup_memory_left(const struct topo_cgroup *cgroup);

/* CPUs that the quota grants, the least of all levels; 0: no limit. */
double topo_cgroup_cpus(const struct topo_cgroup *cgroup);

/* Read a small file into text, ending it with a zero byte. @return length, or -1 */
long topo_read_text(const char *path, char *text, size_t size);

/* Open a regular file for reading lines, NULL for anything else: a captured system may hold pipes
 * and links to devices, which block or never end. */
FILE *topo_open_text(const char *path);
enum { TOPO_MOST_LINES = 1 << 16 }; /* that are looked at */

#endif
