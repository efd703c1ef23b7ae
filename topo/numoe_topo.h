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
#include "base/numoe_types.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

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
    uint64_t huge_2m_free;   /**< free pages in the pool of 2 MiB pages (live only) */
    uint64_t huge_1g_free;   /**< ... and of 1 GiB pages; both are not part of free_bytes */
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
 * @thread any; one at a time, others wait. All but this machine and saved ones is interpreted by
 *         hwloc in a child process (fork), which is reaped before the call returns.
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

struct numoe_predict_options; /* predict.h */

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
    uint64_t keep_free_bytes;      /**< a node; 0: 2 % of it, 48 MiB at least and 256 at most.
                                        48 MiB at least also on the machine at hand */
    uint32_t lanes_per_worker;     /**< 0: default */
    const uint32_t *reserved_cpus; /**< OS indices of PUs whose cores get no worker: left to the
                                        engine's own threads. NULL: none */
    uint32_t reserved_count;
    enum numoe_form form;
    uint32_t groups; /**< with NUMOE_FORM_GROUPS: so many, which share memory domains only where
                          there are more of them than domains. 0: memory domains or packages,
                          whichever costs less */
    enum numoe_objective objective;              /**< what NUMOE_FORM_AUTO and groups 0 go by */
    const struct numoe_predict_options *predict; /**< what costs rest on (no sizes, no GPUs); NULL:
                                                      what is known of the machine */
    struct numoe_range range; /**< what is planned of the model; all 0: the whole */
};

#define NUMOE_PLAN_REQUEST_INIT                                                                    \
    {                                                                                              \
        .size = sizeof(struct numoe_plan_request)                                                  \
    }

struct numoe_plan_node {
    uint32_t node; /**< dense index in the machine that the plan was made for */
    uint32_t os_index;
    uint32_t domain;                     /**< memory domain: nodes that share channels */
    uint32_t package;                    /**< or NUMOE_NONE */
    uint64_t capacity_bytes;             /**< of the node */
    uint64_t available_bytes;            /**< capacity or free now, less what is kept free */
    uint64_t planned_bytes;              /**< experts */
    uint64_t slice_count;                /**< slices, all layers and experts */
    uint32_t first_worker, worker_count; /**< its workers are consecutive */
    uint32_t lanes; /**< work units a phase is cut into here; independent of who runs */
    uint32_t shard; /**< index in numoe_plan.shards */
    double weight;  /**< its share of all slices, 0..1; they sum to 1. For reading: the exact
                         shares are numoe_plan.shards and numoe_plan.cumulative */
};

/** Some of the experts, and the nodes that hold them: each lies on all of these nodes (as far as it
 *  has slices) and on no other. */
struct numoe_plan_shard {
    uint32_t first_node, end_node; /**< its nodes are among these, not all of these its nodes */
    uint64_t first_place, places;  /**< its experts: those with these places, see
                                        numoe_plan_boundary */
};

/** A form that was weighed. */
struct numoe_plan_form {
    enum numoe_form form;
    uint32_t groups;                      /**< of nodes */
    bool chosen, fits, executable;        /**< executable: false for NUMOE_FORM_ROWS */
    double decode_ms, prefill_ms;         /**< predicted, a layer: 1 token and 4096; 0: not known */
    uint64_t decode_bytes, prefill_bytes; /**< partial outputs written and read, a layer */
    double cost;      /**< by the objective, 1 being the best that fits; 0: not known */
    char name[48];    /**< "8 groups of nodes (memory domains)" */
    char reason[160]; /**< why it is chosen or not */
};

struct numoe_plan_worker {
    uint32_t pu;        /**< dense index in the machine that the plan was made for */
    uint32_t os_cpu;    /**< OS index to pin to */
    uint32_t plan_node; /**< index in numoe_plan.nodes of the memory it works on first */
    uint32_t l3, domain, package;
};

/** A memory node of the machine that a plan was made for. */
struct numoe_plan_machine_node {
    uint32_t os_index;
    enum numoe_node_kind kind;
    bool allowed;
    uint32_t domain, package; /**< as in struct numoe_node */
    uint64_t capacity_bytes;
};

/** A CPU of that machine that workers run on. */
struct numoe_plan_cpu {
    uint32_t index; /**< dense index in the machine */
    uint32_t os_index;
    uint32_t core, l3, package; /**< as in struct numoe_pu */
    uint32_t node;              /**< OS index of the node that serves it, or NUMOE_NONE */
};

/** What a plan rests on: numoe_plan_compare looks whether a machine still has it. */
struct numoe_plan_machine {
    bool live;
    char cpu_model[96];                    /**< or empty */
    char *allowed_cpus;                    /**< "0-63,128-191": for people */
    struct numoe_plan_machine_node *nodes; /**< all, in the machine's order */
    uint32_t node_count;
    struct numoe_plan_cpu *cpus; /**< those of workers, each once, by index */
    uint32_t cpu_count;
    bool distances_known;
    uint64_t cgroup_bytes; /**< as in struct numoe_machine */
    double cpu_quota;
};

/** What goes where. Plain data, independent of the machine struct it was made from. */
struct numoe_plan {
    struct numoe_expert_shape shape;
    struct numoe_range range; /**< what is planned of it; with both ends, but without a model */
    struct numoe_plan_request request; /**< as it was asked for; lists belong to the plan */
    struct numoe_plan_machine machine;
    struct numoe_plan_node *nodes;
    uint32_t node_count;
    struct numoe_plan_worker *workers;
    uint32_t worker_count;
    enum numoe_form form;            /**< never AUTO or ROWS */
    struct numoe_plan_shard *shards; /**< in ascending order of places, all of which they cover */
    uint32_t shard_count;            /**< 1 with NUMOE_FORM_EVERY_NODE */
    uint64_t *cumulative; /**< node_count + 1: of the experts of a node's shard, the share of those
                               of its nodes that stand before, in units of 2^-62 */
    uint64_t expert_step; /**< coprime with shape.experts; see numoe_plan_boundary */
    uint32_t *distances;  /**< node_count x node_count between plan nodes */
    struct numoe_plan_form *forms; /**< that were weighed, the chosen first, then by cost */
    uint32_t form_count;           /**< 0: none was, without a model */
    char *source;                  /**< the machine's */
    char **notes;                  /**< decisions in plain words, with their reasons */
    uint32_t note_count;
};

/**
 * Make a plan. Every slice of every expert goes to exactly one node; no node gets more than it has
 * available. With NUMOE_FORM_EVERY_NODE a node's totals stay within one slice of its weight, in
 * each layer and over all; with shards, a shard's totals within one expert of its weight.
 * Nodes and workers do not depend on the shape: plans of one machine and request list the same.
 * With shape.layers = 0 the plan is nodes and workers only.
 * @return 0 (free with numoe_plan_free); -ENOSPC when it does not fit (the message names node or
 *         total, shortfall and what would help); -EINVAL for a CPU or node that is not there or
 *         not allowed, for more than 4096 workers, for more groups than nodes; -ENOTSUP for
 *         NUMOE_FORM_ROWS; -EOVERFLOW; -ENOMEM
 */
int numoe_plan_create(const struct numoe_machine *machine, const struct numoe_plan_request *request,
                      struct numoe_plan **plan, struct numoe_error *error);
void numoe_plan_free(struct numoe_plan *plan);

/**
 * First slice of an expert that plan node n holds, n from 0 to node_count; node n holds
 * [boundary(n), boundary(n + 1)). boundary(0) = 0, boundary(node_count) = shape.slices; or what
 * range says, of which the rest speaks too: layer, expert and slice are numbers of the whole model,
 * and an expert outside of the range lies nowhere, all its boundaries being range.first_slice.
 *
 * Each (layer, expert) has a place of its own in [0, layers * experts): ((expert + layer) * step
 * mod experts) * layers + layer. A shard is the experts of consecutive places, so that of each
 * layer it has its share of the experts to within one, neighbours lie far apart, and an expert of
 * the same number is elsewhere in the next layer.
 *
 * Within a shard the boundary is floor(slices * C(n) + phi), C(n) being the share of the
 * shard's nodes before n and phi in [0, 1) a number of its own for each of the shard's places, all
 * of them equally far apart: where a node's share is not whole, the slice in question goes to
 * either side as often as the share says. Nodes of other shards hold nothing of it: the boundary
 * before and after them is the same.
 * Whole-number arithmetic; the same on every machine.
 */
uint64_t numoe_plan_boundary(const struct numoe_plan *plan, uint64_t layer, uint64_t expert,
                             uint32_t plan_node);

/** The plan's shape with the slices and experts of its range alone, expert_bytes being 0 where
 * slice 0 is not among them. */
struct numoe_expert_shape numoe_plan_held(const struct numoe_plan *plan);

/**
 * Deal a plan's nodes to groups: of whole memory domains while there are no more groups than
 * domains, and of domains near to each other (a package's are); else of nodes of one domain each.
 * @param groups  1 .. plan->node_count
 * @param group   node_count elements: which group each node belongs to
 * @return 0, -EINVAL or -ENOMEM
 */
int numoe_plan_deal(const struct numoe_plan *plan, uint32_t groups, uint32_t *group);

/**
 * Bytes that the partial outputs of one pass of a call may take: 512 MiB, or 256 MiB a node when
 * that is more. A batch that needs more is computed in several passes, each of which reads the
 * weights.
 */
uint64_t numoe_plan_row_bytes(uint32_t node_count);

/** How widely memory nodes work together on a token of an expert: one row of partial output for
 *  each group of nodes. */
enum numoe_reach {
    NUMOE_REACH_DOMAIN, /**< nodes that share channels */
    NUMOE_REACH_PACKAGE,
    NUMOE_REACH_MACHINE,
    NUMOE_REACHES
};

/** What a reach costs on a plan's nodes. */
struct numoe_plan_reach {
    uint32_t groups; /**< of plan nodes */
    uint32_t rows;   /**< of them, at most so many hold slices of one expert: partial outputs for
                          each of its tokens */
    /** sum of distance - 10 over the pairs (worker, node) in a group that share no channels, and
     *  the number of all pairs in a group: far_tenths / pairs / 10 is by how much reading weights
     *  anywhere in the group is slower than at home */
    uint64_t far_tenths, pairs;
};

void numoe_plan_reaches(const struct numoe_plan *plan,
                        struct numoe_plan_reach reach[NUMOE_REACHES]);

/** Number the groups from 0 in the order of their first nodes: group[n] is that of plan node n. */
void numoe_plan_groups(const struct numoe_plan *plan, enum numoe_reach reach, uint32_t *group);

/**
 * The reach that costs least with many tokens: rows to write and read against weights to read from
 * afar. Whole-number arithmetic; the same on every machine.
 * @param pairs    (token, expert) pairs
 * @param experts  distinct experts among them
 * @param reads    how often each expert is read
 */
enum numoe_reach numoe_plan_best_reach(const struct numoe_plan *plan,
                                       const struct numoe_plan_reach reach[NUMOE_REACHES],
                                       uint64_t pairs, uint64_t experts, uint64_t reads);

/** How experts with many tokens are cut. */
struct numoe_plan_cut {
    uint32_t blocks; /**< of tokens, of each expert */
    uint64_t whole;  /**< of all experts' blocks, so many are lanes as they are */
    uint64_t lanes;  /**< and the others, end to end, are cut into so many */
};

/** Of the blocks that are cut: parts that lanes have of them, each with partial outputs of its own.
 *  Of experts with unequal tokens a mean. */
uint64_t numoe_plan_cut_parts(const struct numoe_plan_cut *cut, uint64_t experts);

enum { NUMOE_PLAN_BLOCK_TOKENS_LEAST = 16 }; /**< smaller blocks decode weights too often */

/** Cost of one slice for so many tokens, in 1/16 of a token's arithmetic on it: reading it takes as
 *  long as four and a half tokens, decoding it as one and a half. */
static inline uint64_t numoe_plan_slice_cost(uint64_t tokens)
{
    const uint64_t compute = 24 + 16 * tokens;

    return compute < 72 ? 72 : compute;
}

/** Whether so many experts, alike and all of the work, are too few to be dealt out whole or in
 *  blocks. */
static inline bool numoe_plan_cuts_evenly(uint64_t workers, uint64_t experts)
{
    return experts == 1 || 2 * experts <= 3 * workers;
}

/**
 * The cut by which workers end together when so many experts, each with so many tokens, are all of
 * the work.
 * @param unit         slices that are not to be parted, >= 1
 * @param tokens_most  at most so many tokens of a block, >= 1
 */
struct numoe_plan_cut numoe_plan_even_cut(uint32_t workers, uint64_t experts, uint64_t slices,
                                          uint64_t unit, uint32_t tokens, uint32_t tokens_most);

void numoe_plan_print(const struct numoe_plan *plan, FILE *out);
/**
 * The whole plan as one JSON object (docs/plan.md), which numoe_plan_load reads back as an equal
 * plan.
 * @return 0, -ENOMEM or -EIO
 */
int numoe_plan_print_json(const struct numoe_plan *plan, FILE *out);

/**
 * Read a plan from a file that numoe_plan_print_json or numoe plan --json wrote. Untrusted: every
 * number is checked, also against what follows from others, so that whatever holds of a plan that
 * numoe_plan_create made holds of this one. Whether this machine is the one that it was made for
 * is another matter: numoe_plan_check.
 * @return 0 (free with numoe_plan_free); -EBADMSG: no plan, or damaged (the message names the
 *         field); -E2BIG; -ENOMEM; -ENOENT or what else opening said
 * @thread any; several processes may read one file
 */
int numoe_plan_load(const char *path, struct numoe_plan **plan, struct numoe_error *error);
/** The same from memory. name: said in errors; NULL: "plan". */
int numoe_plan_parse(const void *text, size_t bytes, const char *name, struct numoe_plan **plan,
                     struct numoe_error *error);

/** What a machine no longer has of what a plan rests on, a sentence each. */
struct numoe_plan_changes {
    char **list;
    uint32_t count;
};

/**
 * Compare a machine with the one that a plan was made for, wherever the two descriptions come from
 * (live, XML, saved): nodes and CPUs that are gone, no longer allowed or elsewhere, memory that is
 * less (where machine is live: free memory too), another CPU model, limits of the cgroup. What is
 * more than the plan uses is no change.
 * @return 0 (free with numoe_plan_changes_free, also when there are none) or -ENOMEM
 */
int numoe_plan_compare(const struct numoe_plan *plan, const struct numoe_machine *machine,
                       struct numoe_plan_changes *changes);
void numoe_plan_changes_free(struct numoe_plan_changes *changes);

/**
 * Refuse a machine with changes.
 * @param log  gets those that the message has no room for, each with its own; NULL: they are only
 *             counted
 * @return 0; -ESTALE with the first changes in the message; -ENOMEM
 */
int numoe_plan_check(const struct numoe_plan *plan, const struct numoe_machine *machine,
                     const struct numoe_log *log, struct numoe_error *error);

/* ---- memory --------------------------------------------------------------------------------- */

struct numoe_memory; /* one range of memory on one node */

/** What memory is wanted. */
struct numoe_memory_request {
    size_t size;
    uint64_t bytes;
    uint32_t os_node; /**< OS index, or NUMOE_NONE: anywhere, whatever the policy */
    enum numoe_memory_policy policy;
    const uint32_t *nodes; /**< OS indices; PREFERRED: nodes as good as os_node, INTERLEAVE: nodes
                              to spread over. NULL: os_node alone */
    uint32_t node_count;
    bool strict; /**< fail with -EPERM, -ENOSYS or -EINVAL when the policy is denied; else go on
                      without one, say so through log, and show it in the report */
    bool spill;  /**< BIND: what the node has no room for goes elsewhere, and is shown in the
                      report; else it is -ENOMEM */
    const struct numoe_log *log; /**< NULL: nothing is said; give it for the first of many ranges */
    /** NULL, or a range that is populated at the same time, on whatever node, and is there for as
     *  long as this one is populated: what both are about to take is checked together against the
     *  limits of the cgroup and the system. For several ranges, the same one. */
    struct numoe_memory *beside;
};

#define NUMOE_MEMORY_REQUEST_INIT                                                                  \
    {                                                                                              \
        .size = sizeof(struct numoe_memory_request), .os_node = NUMOE_NONE                         \
    }

/** How memory was in fact obtained. */
struct numoe_memory_report {
    uint64_t bytes;
    uint64_t huge_bytes;   /**< on pages of 2 MiB or 1 GiB: hugetlb, or transparent as far as can
                                be read */
    uint64_t giant_bytes;  /**< of these, on pages of 1 GiB */
    uint64_t placed_bytes; /**< of pages that were checked, on a wanted node */
    uint64_t checked_bytes;
    uint64_t spilled_bytes; /**< of parts that the node had no room for */
    bool bound;             /**< the policy was accepted by the kernel */
    int bind_errno;         /**< why not (EPERM, ENOSYS, EINVAL), else 0 */
};

/**
 * Reserve memory on a node: a policy of this range, never of the process. Free memory of the node
 * and what the cgroup grants are checked first. As much as the node's pools of 1 GiB and 2 MiB
 * pages hold is taken from there: those of 1 GiB are resident when this returns, those of 2 MiB are
 * to be populated by numoe_memory_populate before they are touched. The rest is populated by that
 * or on first touch, on transparent huge pages where the kernel has them. The address is a multiple
 * of 2 MiB; the memory is zero.
 * @return 0 (free with numoe_memory_destroy); -ENOMEM with node, need and have; -EINVAL
 */
int numoe_memory_create(const struct numoe_memory_request *request, struct numoe_memory **memory,
                        struct numoe_error *error);
void *numoe_memory_address(const struct numoe_memory *memory);
uint64_t numoe_memory_bytes(const struct numoe_memory *memory);

/**
 * Make [offset, offset + bytes) resident, checking node and cgroup headroom before each chunk so
 * that a full node is an error (or, with spill, goes on elsewhere) and not a kill. Any thread;
 * several ranges at once.
 * @return 0 or -ENOMEM with error filled
 */
int numoe_memory_populate(struct numoe_memory *memory, uint64_t offset, uint64_t bytes,
                          struct numoe_error *error);

/**
 * Give the whole pages in [offset, offset + bytes) back to the system; what was in them is lost.
 * Pages of 1 GiB and 2 MiB that came from a pool stay, as nobody could say whether there will be
 * others.
 * @return bytes given back
 */
uint64_t numoe_memory_release(struct numoe_memory *memory, uint64_t offset, uint64_t bytes);

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
