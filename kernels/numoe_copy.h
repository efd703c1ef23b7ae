/*
 * numoe_copy.h - copies that leave the caches as they are.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_COPY_H
#define NUMOE_COPY_H

#include <stdint.h>

/**
 * memcpy by non-temporal stores where the CPU has them, for what no CPU reads next: a device's
 * staging. The lines go to memory without being read first and push nothing out of the caches.
 * When it returns, what was stored is there for whoever is told by this thread.
 */
void numoe_copy_stream(void *to, const void *from, uint64_t bytes);

#endif
