/*
 * GPUs and NVMe drives, and which nodes are local to them.
 *
 * A GPU is a PCI device of class 0302 (3D controller) or 1200 (accelerator), or any display device
 * with an accelerator's OS device: the class of a workstation GPU is that of a plain display chip.
 * One whose ids cannot be read any more (all zero) is taken for a GPU that fell off its bus.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "topo_build.h"
#include "topo_text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CLASS_NVME = 0x0108, CLASS_3D = 0x0302, CLASS_ACCELERATOR = 0x1200, MAX_DEVICES = 4096 };

static bool starts(const char *name, const char *prefix)
{
    return name && !strncmp(name, prefix, strlen(prefix));
}

/* An OS device that only accelerators have. DRM devices (card0) exist for display chips too. */
static bool accelerator(hwloc_obj_t device)
{
    if (device->type != HWLOC_OBJ_OS_DEVICE || !device->attr)
        return false;
    if (device->attr->osdev.type == HWLOC_OBJ_OSDEV_COPROC)
        return true;
    return device->attr->osdev.type == HWLOC_OBJ_OSDEV_GPU &&
           (starts(device->name, "nvml") || starts(device->name, "rsmi") ||
            starts(device->name, "ze"));
}

static bool drive(hwloc_obj_t device)
{
    return device->type == HWLOC_OBJ_OS_DEVICE && starts(device->name, "nvme");
}

static bool wanted(hwloc_obj_t pci, bool *gpu)
{
    unsigned class = pci->attr->pcidev.class_id;

    *gpu = class == CLASS_3D || class == CLASS_ACCELERATOR ||
           (class >> 8 == 3 && !pci->attr->pcidev.vendor_id && !pci->attr->pcidev.device_id);
    if (*gpu)
        return true;
    for (hwloc_obj_t child = pci->io_first_child; child; child = child->next_sibling) {
        if (class >> 8 == 3 && accelerator(child)) {
            *gpu = true;
            return true;
        }
        if (drive(child))
            return true;
    }
    return class == CLASS_NVME;
}

static void name_device(struct numoe_device *device, hwloc_obj_t pci)
{
    const struct hwloc_pcidev_attr_s *at = &pci->attr->pcidev;
    const char *name = NULL, *size;

    for (hwloc_obj_t child = pci->io_first_child; child; child = child->next_sibling) {
        if (device->gpu ? starts(child->name, "cuda") : drive(child) && !name)
            name = child->name;
        size = hwloc_obj_get_info_by_name(child, "CUDAGlobalMemorySize");
        if (size)
            device->memory_bytes = (strtoull(size, NULL, 10) & (UINT64_MAX >> 10)) * 1024;
    }
    if (name)
        topo_copy_printable(device->name, sizeof device->name, name);
    else
        snprintf(device->name, sizeof device->name, "%04x:%02x:%02x.%x", (unsigned)at->domain,
                 (unsigned)at->bus, (unsigned)at->dev, (unsigned)at->func);
}

static int locate(struct topo_build *build, struct numoe_device *device, hwloc_obj_t object)
{
    const struct numoe_machine *machine = build->machine;
    hwloc_obj_t around = hwloc_get_non_io_ancestor_obj(build->topology, object);

    device->package = NUMOE_NONE;
    device->nodes = calloc(machine->node_count, sizeof *device->nodes);
    if (!device->nodes)
        return -ENOMEM;
    if (!around || !around->nodeset)
        return 0;
    for (uint32_t i = 0; i < machine->node_count; i++)
        if (machine->nodes[i].kind != NUMOE_NODE_GPU &&
            hwloc_bitmap_isset(around->nodeset, machine->nodes[i].os_index))
            device->nodes[device->node_count++] = i;
    device->package = topo_package_of(around);
    /* hanging below the whole machine is what hwloc says when nothing is known */
    device->locality_known =
        device->node_count && (around->parent != NULL || machine->node_count == 1);
    return 0;
}

static int add(struct topo_build *build, hwloc_obj_t pci, bool gpu)
{
    struct numoe_machine *machine = build->machine;
    struct numoe_device *device = &machine->devices[machine->device_count];
    double link = pci->attr->pcidev.linkspeed;

    machine->device_count++;
    device->gpu = gpu;
    device->link_gbs = link > 0 && link < 1e6 ? link : 0;
    name_device(device, pci);
    return locate(build, device, pci);
}

int topo_build_devices(struct topo_build *build, struct numoe_error *error)
{
    struct numoe_machine *machine = build->machine;
    int found = hwloc_get_nbobjs_by_type(build->topology, HWLOC_OBJ_PCI_DEVICE);
    hwloc_obj_t pci = NULL;

    if (found <= 0)
        return 0;
    if (found > MAX_DEVICES) {
        topo_build_note(build, "%d PCI devices are too many to look at; the first %d are", found,
                        MAX_DEVICES);
        found = MAX_DEVICES;
    }
    machine->devices = calloc((size_t)found, sizeof *machine->devices);
    if (!machine->devices)
        return numoe_error_set(error, -ENOMEM, machine->source, "out of memory");
    while (machine->device_count < (uint32_t)found &&
           (pci = hwloc_get_next_pcidev(build->topology, pci))) {
        bool gpu;

        if (wanted(pci, &gpu) && add(build, pci, gpu))
            return numoe_error_set(error, -ENOMEM, machine->source, "out of memory");
    }
    return 0;
}
