/* Pin a thread. SPDX-License-Identifier: Apache-2.0 */
#include "numoe_topo.h"

#include <errno.h>
#include <sched.h>

enum { MOST_CPUS = 1 << 20 };

int numoe_pin_thread(uint32_t os_cpu)
{
    cpu_set_t *set;
    size_t size;
    int rc;

    if (os_cpu >= MOST_CPUS)
        return -EINVAL;
    set = CPU_ALLOC(os_cpu + 1);
    if (!set)
        return -ENOMEM;
    size = CPU_ALLOC_SIZE(os_cpu + 1);
    CPU_ZERO_S(size, set);
    CPU_SET_S(os_cpu, size, set);
    rc = sched_setaffinity(0, size, set) ? -errno : 0;
    CPU_FREE(set);
    return rc;
}
