/*
 * Threads that populate overlapping ranges, write their own parts and read machines at once.
 *
 * Plain program, for ThreadSanitizer too. SPDX-License-Identifier: Apache-2.0
 */
#include "numoe_topo.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { THREADS = 8, ROUNDS = 3, PART = 12 << 20, PAGE = 4096 };

struct job {
    struct numoe_memory *memory;
    uint64_t index;
    int failed;
};

static void *work(void *user)
{
    struct job *job = user;
    unsigned char *own =
        (unsigned char *)numoe_memory_address(job->memory) + job->index * (uint64_t)PART;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine;

    /* written before neighbours populate over it: must still be there after */
    for (uint64_t at = 0; at < PART; at += PAGE)
        own[at] = (unsigned char)(job->index + 1);
    if (numoe_memory_populate(job->memory, 0, THREADS * (uint64_t)PART, &error))
        job->failed++;
    for (uint64_t at = 0; at < PART; at += PAGE)
        job->failed += own[at] != (unsigned char)(job->index + 1);
    if (numoe_machine_load("numa:4(memory=1GB) core:2 pu:2", &machine, &error)) {
        job->failed++;
    } else {
        job->failed += machine->pu_count != 16;
        numoe_machine_free(machine);
    }
    return NULL;
}

static int round_of_threads(void)
{
    pthread_t threads[THREADS];
    struct job jobs[THREADS];
    struct numoe_memory_request request = NUMOE_MEMORY_REQUEST_INIT;
    struct numoe_memory *memory;
    int failed = 0;

    request.bytes = THREADS * (uint64_t)PART;
    if (numoe_memory_create(&request, &memory, NULL))
        return 1;
    for (uint64_t i = 0; i < THREADS; i++) {
        jobs[i] = (struct job){memory, i, 0};
        if (pthread_create(&threads[i], NULL, work, &jobs[i]))
            return 1;
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        failed += jobs[i].failed;
    }
    numoe_memory_destroy(memory);
    return failed;
}

int main(void)
{
    int passed = 0, failed = 0;

    for (int i = 0; i < ROUNDS; i++)
        *(round_of_threads() ? &failed : &passed) += 1;
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
