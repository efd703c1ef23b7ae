/* ptx.cuh - one-line wrappers of the instructions that CUDA C++ has no words for.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef NUMOE_PTX_CUH
#define NUMOE_PTX_CUH

#include <cstdint>

#define DI __device__ __forceinline__

/* 16 bytes of weights: read once, so not kept in L1. Volatile, or the compiler sinks the load. */
DI uint4 load_stream(const void *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

DI uint32_t load_word(const void *p)
{
    uint32_t v;
    asm volatile("ld.global.nc.u32 %0,[%1];" : "=r"(v) : "l"(p));
    return v;
}

DI uint4 load_vector(const void *p)
{
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

/* 16 bytes to shared memory; bytes = 0 fills with zeros and reads nothing. */
DI void copy_async(uint32_t shared, const void *global, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(shared), "l"(global), "r"(bytes)
                 : "memory");
}

DI void copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING>
DI void copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DI uint32_t shared_address(const void *p)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

DI uint4 load_shared_vector(uint32_t shared)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(shared)
                 : "memory");
    return v;
}

DI uint2 load_shared_pair(uint32_t shared)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared) : "memory");
    return v;
}

DI uint32_t load_shared_word(uint32_t shared)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(shared) : "memory");
    return v;
}

DI uint32_t load_shared_byte(uint32_t shared)
{
    uint32_t v;
    asm volatile("ld.shared.u8 %0,[%1];" : "=r"(v) : "r"(shared) : "memory");
    return v;
}

/* What does not change in a loop stays in a register; the compiler would rather compute it again in
 * every step, in the pipe of shifts and logic, which decoding is short of. */
DI void keep(uint32_t &v)
{
    asm volatile("" : "+r"(v));
}

/* from + index * SIZE as one product and sum, where a sum of 64 bits takes two operations of the
 * busier pipe. */
template <int SIZE>
DI const uint8_t *place_of(const uint8_t *from, uint32_t index)
{
    uint64_t at;
    asm volatile("mad.wide.u32 %0,%1,%2,%3;" : "=l"(at) : "r"(index), "n"(SIZE), "l"(from));
    return reinterpret_cast<const uint8_t *>(at);
}

/* A barrier in shared memory: a phase ends when it has been arrived at `count` times. */
DI void barrier_init(uint32_t barrier, uint32_t count)
{
    asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(barrier), "r"(count) : "memory");
}

DI void barrier_arrive(uint32_t barrier)
{
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state,[%0];\n}" ::"r"(barrier)
                 : "memory");
}

/* Arrives when all of the thread's asynchronous copies so far have. */
DI void barrier_arrive_copied(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

/* Wait for the end of the phase of this parity. */
DI void barrier_wait(uint32_t barrier, uint32_t parity)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred done;\n"
                 "again_%=:\n"
                 "mbarrier.try_wait.parity.shared.b64 done,[%0],%1;\n"
                 "@!done bra again_%=;\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
#else
    asm volatile("{\n.reg .pred done;\n"
                 "again_%=:\n"
                 "mbarrier.test_wait.parity.shared.b64 done,[%0],%1;\n"
                 "@!done bra again_%=;\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
#endif
}

/* A word that another block stores last, after what it announces. */
DI uint32_t load_acquire(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

/* Add to a word that others load with load_acquire, after all that the thread has seen. */
DI void add_release(uint32_t *p, uint32_t v)
{
    asm volatile("red.release.gpu.global.add.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}

/* What the kernel before wrote may be read after this, when it was launched to overlap. */
DI void wait_for_previous()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The next kernel's blocks may start as soon as there is room for them. */
DI void let_next_start()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* d (16 x 8 fp32) += a (16 x 16 bf16) b (16 x 8 bf16) */
DI void mma_16816(float *d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                  uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Two bf16 products; -0 as the addend keeps the sign of zero. Subnormals are kept. */
DI uint32_t multiply_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
    return r;
}

#endif
