/**
 * numoe_topo.h - what a machine is, what would go where, and memory on a chosen node.
 *
 * The only folder that includes hwloc and libnuma. The dry run (machine + plan) allocates
 * nothing on any node and needs no privilege.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_TOPO_H
#define NUMOE_TOPO_H

#include "base/numoe_base.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/** "no such object": an index that is not known. */
#define NUMOE_NONE UINT32_MAX

/* ---- machine -------------------------------------------------------------------------------- */

enum numoe_node_kind {
    NUMOE_NODE_DRAM,
    NUMOE_NODE_HBM,  /**< high-bandwidth memory beside DRAM of the same CPUs */
    NUMOE_NODE_SLOW, /**< CXL, NVM and the like */
    NUMOE_NODE_GPU   /**< an accelerator's memory shown as a node: never used */
};

/** A memory node. Dense index = place in numoe_machine.nodes. */
struct numoe_node {
    uint32_t os_index;
    enum numoe_node_kind kind;
    bool allowed;            /**< the process may allocate there, if there is memory */
    uint32_t domain;         /**< memory domain: nodes that share channels */
    uint32_t package;        /**< dense package index, or NUMOE_NONE */
    uint32_t beside;         /**< not DRAM: the DRAM node of the same CPUs, or NUMOE_NONE */
    uint32_t pu_count;       /**< allowed PUs whose memory this node is (0: CPU-less) */
    uint32_t core_count;     /**< distinct cores among them */
    uint64_t capacity_bytes; /**< 0: memoryless, or not known */
    uint64_t free_bytes;     /**< free or reclaimable now (live only); else capacity_bytes */
    uint64_t huge_2m_free;   /**< free 2 MiB huge pages (live only) */
    uint64_t bandwidth_mbs;  /**< read bandwidth from local CPUs, MB/s; 0: not known */
};

/** A hardware thread. Dense index = place in numoe_machine.pus, in hwloc's logical order. */
struct numoe_pu {
    uint32_t os_index;
    bool allowed;  /**< online and in the process's cpuset */
    uint32_t core; /**< dense core index */
    uint32_t smt;  /**< 0 for the first allowed thread of its core, then 1, ... */
    uint32_t node; /**< dense index of the node that serves it, nearest with memory; NUMOE_NONE */
    bool node_is_near; /**< node is the PU's own; false: its own has no memory, the nearest is taken
                        */
    uint32_t l3;       /**< dense index of its last-level cache, or NUMOE_NONE */
    uint32_t domain;   /**< memory domain of node */
    uint32_t package;
    uint32_t efficiency; /**< core kind: higher is faster; 0 when all are alike */
};

/** A GPU or NVMe drive with its locality. */
struct numoe_device {
    char name[32]; /**< "cuda0", "nvme0n1", or the PCI address */
    bool gpu;      /**< else a drive */
    bool locality_known;
    uint32_t package; /**< or NUMOE_NONE */
    uint32_t *nodes;  /**< dense indices of its local nodes */
    uint32_t node_count;
    double link_gbs;       /**< PCIe bandwidth; 0: not known */
    uint64_t memory_bytes; /**< GPU memory; 0: not known */
};

/** Speed of reading one node's memory from all CPUs of one memory domain, measured. */
struct numoe_pair_speed {
    uint32_t domain;        /**< of the CPUs (numoe_pu.domain) */
    uint32_t node;          /**< dense index */
    uint64_t bandwidth_mbs; /**< 10^6 bytes a second; nothing else was reading */
    double latency_ns;      /**< of a dependent load that misses all caches; 0: not measured */
};

/** A machine. Plain data; read only after numoe_machine_load, save for the functions that say so.
 */
struct numoe_machine {
    char *source; /**< "live", the file or directory, or the synthetic string */
    bool live;
    struct numoe_node *nodes;
    uint32_t node_count;
    struct numoe_pu *pus;
    uint32_t pu_count;
    uint32_t core_count, l3_count, domain_count, package_count;
    struct numoe_device *devices;
    uint32_t device_count;
    uint32_t *distances; /**< node_count x node_count, 10 = local; NULL: not known */
    uint64_t
        cgroup_bytes; /**< memory the cgroup still grants (live, saved); UINT64_MAX: no limit */
    double cpu_quota; /**< CPUs the cgroup's quota grants (live, saved); 0: no limit */
    char **notes;     /**< remarks in plain words: orphan cores, odd data, ... */
    uint32_t note_count;
    char cpu_model[96]; /**< or empty */
    /* measured (numoe topo --measure); each pair of domain and node at most once */
    struct numoe_pair_speed *pairs;
    uint32_t pair_count;
    /** node_count numbers, or NULL: what the CPUs of each node read from it while those of all
     *  others did the same, MB/s; 0: the node has no CPUs, or was left out */
    uint64_t *together_mbs;
    /* of a machine that was saved: what it was before. live is false then */
    char *saved_source; /**< its source; NULL: not a saved machine */
    bool saved_live;
};

/**
 * Read a machine.
 * @param source  NULL or "" or "live": this machine; else the path of a file when there is one (an
 *                hwloc XML file, or what numoe_machine_save wrote), or of a directory that holds
 *                another machine's sys/ and proc/ (as hwloc-gather-topology packs them); else an
 *                hwloc synthetic string. Untrusted: damaged input is an error, never a crash.
 * @return 0 (free with numoe_machine_free); -ENOENT, -EINVAL, -E2BIG, -ENOMEM with error filled
 * @thread any; one at a time, others wait. A file or string is interpreted in a child process
 *         first (fork), which is reaped before the call returns. A saved machine is not hwloc's to
 *         interpret and needs no process.
 */
int numoe_machine_load(const char *source, struct numoe_machine **machine,
                       struct numoe_error *error);
void numoe_machine_free(struct numoe_machine *machine);

/** Read anew what is free on the nodes of a live machine and in the cgroup; nothing else changes,
 *  and nothing of a machine that is not live. */
void numoe_machine_refresh(struct numoe_machine *machine);

/** Text for people. */
void numoe_machine_print(const struct numoe_machine *machine, FILE *out);
/** The same as JSON (one object). @return 0 or -ENOMEM/-EIO */
int numoe_machine_print_json(const struct numoe_machine *machine, FILE *out);

/**
 * Write the whole of a machine as JSON, which numoe_machine_load reads back as an equal machine;
 * docs/machine.md has the format. The file is complete or not there: it is written beside path and
 * then takes its place.
 * @return 0; -EINVAL, -ENOMEM, or what opening or writing said, with error filled
 */
int numoe_machine_save(const struct numoe_machine *machine, const char *path,
                       struct numoe_error *error);

/** What was measured of a node's memory from a domain's CPUs; NULL: nothing. */
const struct numoe_pair_speed *numoe_machine_speed(const struct numoe_machine *machine,
                                                   uint32_t domain, uint32_t node);

/** Read bandwidth of a node, MB/s, as measured from the domain that reads it fastest while nothing
 *  else is read; 0: not measured. */
uint64_t numoe_machine_measured(const struct numoe_machine *machine, uint32_t node);

/** Read bandwidth of a node, MB/s: its own part as measured with all nodes busy, else the fastest
 *  domain's as measured, else what the firmware says; 0: not known. */
uint64_t numoe_machine_bandwidth(const struct numoe_machine *machine, uint32_t node);

/** Something about a machine that costs speed. */
struct numoe_warning {
    char what[32];     /**< a word for programs: "numa_balancing", "swap", ... */
    char message[320]; /**< one sentence */
    char fix[240];     /**< the command that mends it, or what to do */
};

struct numoe_warnings {
    struct numoe_warning *list;
    uint32_t count;
};

/**
 * Look for what costs speed: settings of the kernel, limits of the process and of its container,
 * memory that is spread unevenly.
 * @param root  the directory that stands for "/", so that a captured machine can be judged; "" is
 *              this machine. What cannot be read there is not warned of.
 * @return 0 (free with numoe_warnings_free) or -ENOMEM
 */
int numoe_machine_health(const struct numoe_machine *machine, const char *root,
                         struct numoe_warnings *warnings);
void numoe_warnings_free(struct numoe_warnings *warnings);
void numoe_warnings_print(const struct numoe_warnings *warnings, FILE *out);

/** Distance between two nodes by dense index: from the table, else 10 the same, 20 others. */
uint32_t numoe_machine_distance(const struct numoe_machine *machine, uint32_t a, uint32_t b);

/* ---- plan ----------------------------------------------------------------------------------- */

/** One kind of expert in a model; what placement needs to know of it. */
struct numoe_expert_shape {
    uint64_t layers;      /**< MoE layers */
    uint64_t experts;     /**< routed experts a layer */
    uint64_t slices;      /**< ceil(I / 32) */
    uint64_t slice_bytes; /**< numoe_slice_shape.bytes */
    uint64_t hidden;      /**< H */
    uint64_t experts_per_token;
    uint64_t expert_bytes; /**< besides slices, bytes an expert (b2), on its slice 0's node */
};

struct numoe_plan_request {
    size_t size;
    struct numoe_expert_shape shape;
    /** 0: one a core of the chosen nodes, within the CPU quota; or one for each of cpus. More
     *  than there are CPUs: several workers share one, and a note says so. */
    uint32_t workers;
    /** OS indices to use. NULL: the nodes that serve cpus, or all whose memory is the first choice
     *  of some allowed CPU (HBM beside DRAM, slow and CPU-less nodes only when named here). */
    const uint32_t *nodes;
    uint32_t node_count;
    const uint32_t *cpus; /**< OS indices of PUs to pin workers to, or NULL */
    uint32_t cpu_count;
    bool smt;                      /**< also use second hardware threads of a core */
    uint64_t keep_free_bytes;      /**< a node; 0: 2 % of it, but 32 MiB to 256 MiB */
    uint32_t lanes_per_worker;     /**< 0: default */
    const uint32_t *reserved_cpus; /**< OS indices of PUs whose cores get no worker: left to the
                                        engine's own threads. NULL: none */
    uint32_t reserved_count;
};

#define NUMOE_PLAN_REQUEST_INIT                                                                    \
    {                                                                                              \
        .size = sizeof(struct numoe_plan_request)                                                  \
    }

struct numoe_plan_node {
    uint32_t node; /**< dense index in the machine */
    uint32_t os_index;
    uint64_t capacity_bytes;             /**< of the node */
    uint64_t available_bytes;            /**< capacity or free now, less what is kept free */
    uint64_t planned_bytes;              /**< experts */
    uint64_t slice_count;                /**< slices, all layers and experts */
    uint32_t first_worker, worker_count; /**< its workers are consecutive */
    uint32_t lanes; /**< work units a phase is cut into here; independent of who runs */
    double weight;  /**< its share of every expert, 0..1; they sum to 1. For reading: the
                         exact shares are numoe_plan.cumulative */
};

struct numoe_plan_worker {
    uint32_t pu;        /**< dense index in the machine */
    uint32_t os_cpu;    /**< OS index to pin to */
    uint32_t plan_node; /**< index in numoe_plan.nodes of the memory it works on first */
    uint32_t l3, domain, package;
};

/** What goes where. Plain data, independent of the machine struct it was made from. */
struct numoe_plan {
    struct numoe_expert_shape shape;
    struct numoe_plan_node *nodes;
    uint32_t node_count;
    struct numoe_plan_worker *workers;
    uint32_t worker_count;
    uint64_t *cumulative; /**< node_count + 1: shares of all nodes before, in units of 2^-62 */
    uint64_t expert_step; /**< coprime with shape.experts; see numoe_plan_boundary */
    uint32_t *distances;  /**< node_count x node_count between plan nodes */
    char *source;         /**< the machine's */
    char **notes;         /**< decisions in plain words, with their reasons */
    uint32_t note_count;
};

/**
 * Make a plan. Every slice of every expert goes to exactly one node; a node's totals stay within
 * one slice of its weight, in each layer and over all; no node gets more than it has available.
 * Nodes and workers do not depend on the shape: plans of one machine and request list the same.
 * With shape.layers = 0 the plan is nodes and workers only.
 * @return 0 (free with numoe_plan_free); -ENOSPC when it does not fit (the message names node or
 *         total, shortfall and what would help); -EINVAL for a CPU or node that is not there or
 *         not allowed, for more than 4096 workers; -EOVERFLOW; -ENOMEM
 */
int numoe_plan_create(const struct numoe_machine *machine, const struct numoe_plan_request *request,
                      struct numoe_plan **plan, struct numoe_error *error);
void numoe_plan_free(struct numoe_plan *plan);

/**
 * First slice of an expert that plan node n holds, n from 0 to node_count; node n holds
 * [boundary(n), boundary(n + 1)). boundary(0) = 0, boundary(node_count) = shape.slices.
 *
 * It is floor(slices * C(n) + phi), C(n) being the share of the nodes before n and phi in [0, 1) a
 * number of its own for each (layer, expert), all of them equally far apart: where a node's share
 * is not whole, the slice in question goes to either side as often as the share says.
 * Whole-number arithmetic; the same on every machine.
 */
uint64_t numoe_plan_boundary(const struct numoe_plan *plan, uint64_t layer, uint64_t expert,
                             uint32_t plan_node);

/**
 * Bytes that the partial outputs of one pass of a call may take: 512 MiB, or 256 MiB a node when
 * that is more. A batch that needs more is computed in several passes, each of which reads the
 * weights.
 */
uint64_t numoe_plan_row_bytes(uint32_t node_count);

void numoe_plan_print(const struct numoe_plan *plan, FILE *out);
/**
 * {"source", "nodes": [{"os_index", "capacity_bytes", "planned_bytes", "available_bytes",
 * "workers", "lanes", "weight", "slices"}], "workers": [{"worker", "os_cpu", "node"}],
 * "total_bytes", "notes": [...]}; a worker's node is an OS index.
 * @return 0, -ENOMEM or -EIO
 */
int numoe_plan_print_json(const struct numoe_plan *plan, FILE *out);

/* ---- memory --------------------------------------------------------------------------------- */

/** How memory was in fact obtained. */
struct numoe_memory_report {
    uint64_t bytes;
    uint64_t huge_bytes;   /**< on 2 MiB pages: hugetlb, or transparent as far as can be read */
    uint64_t placed_bytes; /**< of pages that were checked, on the wanted node */
    uint64_t checked_bytes;
    bool bound;     /**< the node policy was accepted by the kernel */
    int bind_errno; /**< why not (EPERM, ENOSYS, EINVAL), else 0 */
};

struct numoe_memory; /* one range of memory on one node */

/**
 * Reserve memory on a node: an explicit binding of this range, never of the process. Free memory
 * of the node and what the cgroup grants are checked first. Pages are populated later, by
 * numoe_memory_populate or on first touch; only when the node's pool of 2 MiB pages has room for
 * all of the range is it taken from there, and then made resident before this returns.
 * Address and length are multiples of 2 MiB; the memory is zero.
 * @param os_node  OS index, or NUMOE_NONE for no binding
 * @param strict   fail with -EPERM/-ENOSYS when the binding is denied; else go on unbound,
 *                 say so once through log (NULL: not at all; give it for the first of many
 *                 ranges only), and show it in the report
 * @return 0; -ENOMEM with node, need and have; -EINVAL
 */
int numoe_memory_create(uint32_t os_node, uint64_t bytes, bool strict, const struct numoe_log *log,
                        struct numoe_memory **memory, struct numoe_error *error);
void *numoe_memory_address(const struct numoe_memory *memory);
uint64_t numoe_memory_bytes(const struct numoe_memory *memory);

/**
 * Make [offset, offset + bytes) resident, checking node and cgroup headroom before each chunk so
 * that a full node is an error and not a kill. Any thread; several ranges at once.
 * @return 0 or -ENOMEM with error filled
 */
int numoe_memory_populate(struct numoe_memory *memory, uint64_t offset, uint64_t bytes,
                          struct numoe_error *error);

/** Bytes that this process may still take, of the system's memory and of what its cgroup grants,
 *  when 32 MiB are left; UINT64_MAX: not known. What overcommit promises beyond is a kill. */
uint64_t numoe_memory_room(void);

/**
 * What the calling thread touches first from now on comes from a node, while that has room. For
 * threads on CPUs without memory of their own: where the kernel takes it from then is not where a
 * plan does, but rather from a node without CPUs.
 * @return 0; -EINVAL no such node, or not allowed; -EPERM, -ENOSYS
 */
int numoe_memory_prefer(uint32_t os_node);

/** Sample where pages are (move_pages) and how large they are. */
void numoe_memory_inspect(const struct numoe_memory *memory, struct numoe_memory_report *report);
void numoe_memory_destroy(struct numoe_memory *memory);

#ifdef __cplusplus
}
#endif

#endif
