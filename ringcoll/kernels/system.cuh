// The only file with PTX. A function is named after its instruction: operation, memory order, scope
// and width, as in ld_relaxed_sys_u32.
//
// A peer's memory may belong to another GPU or to the host, so whatever orders ranks has system
// scope. The tests compile the kernels for a CPU with a file of the same functions in its place.
#pragma once

#define RC_DEVICE __device__ __forceinline__
// Not inlined: the code of a slow path stands in a kernel once and takes no registers of the loop.
#define RC_APART __device__ __noinline__
// Launch bounds: threads, and optionally resident blocks a multiprocessor. Without these NVRTC
// gave protocol Simple 64 registers and spilled: all_reduce of 64 and 512 MiB on 4 H200 took 6 and
// 7 % longer.
#define RC_KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)
// At most so many registers a thread, of a kernel that has to start while others fill the GPU.
// Compilers know this from CUDA 12.4 on; earlier ones take what they like.
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1204
#define RC_SMALL_KERNEL(registers) extern "C" __global__ void __maxnreg__(registers)
#else
#define RC_SMALL_KERNEL(registers) extern "C" __global__ void
#endif
#define RC_PARAMETER const __grid_constant__

namespace rc {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;

constexpr u32 SYNC_THREADS = 32;  // of a block: a warp that talks to peers while the others work

struct alignas(16) Vector {
    u32 x, y, z, w;
};

// -- who and when ------------------------------------------------------------------------------

RC_DEVICE u32 thread_index() { return threadIdx.x; }
RC_DEVICE u32 block_threads() { return blockDim.x; }
RC_DEVICE u32 block_index() { return blockIdx.x; }
RC_DEVICE u32 grid_blocks() { return gridDim.x; }
RC_DEVICE u32 local_index() { return blockIdx.y; }

// Nanoseconds of a clock that all blocks of a GPU share.
RC_DEVICE u64 globaltimer_ns() {
    u64 time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

// A barrier of all threads of the block, which also orders their memory accesses.
RC_DEVICE void block_barrier() { __syncthreads(); }

// The same, and whether `yes` holds on any thread.
RC_DEVICE bool block_barrier_or(bool yes) { return __syncthreads_or(yes); }

// Once a launch: all threads but the last SYNC_THREADS arrive and go on; the last wait for them.
RC_DEVICE void block_arrive() { asm volatile("bar.arrive 1, %0;" ::"r"(blockDim.x) : "memory"); }
RC_DEVICE void block_await() { asm volatile("bar.sync 1, %0;" ::"r"(blockDim.x) : "memory"); }

// Barriers of some of a block's warps, NAMED_BARRIERS of them: who meets waits until `count`
// threads have come, who arrives does not; what any of them wrote before, those who meet see after.
constexpr u32 NAMED_BARRIERS = 4;
RC_DEVICE void barrier_arrive(u32 number, u32 count) {
    __syncwarp();
    asm volatile("bar.arrive %0, %1;" ::"r"(2 + number), "r"(count) : "memory");
}
RC_DEVICE void barrier_sync(u32 number, u32 count) {
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(2 + number), "r"(count) : "memory");
}

// Whether `yes` holds on any thread of the warp; all of them call it.
constexpr u32 WARP = 32;
RC_DEVICE bool warp_any(bool yes) { return __any_sync(0xffffffffu, yes); }

// Shared memory of the block, not initialised.
template <class T>
RC_DEVICE T* block_memory() {
    __shared__ T memory;
    return &memory;
}

// Between two polls. Nothing: __nanosleep would add its granularity to every latency.
RC_DEVICE void pause() {}

// Moves the code of a rare case out of the loop.
RC_DEVICE bool unlikely(bool condition) { return __builtin_expect(condition, false); }

// -- memory of this rank alone, or ordered by other means ---------------------------------------

// All addresses are of global memory: ld.global instead of the generic load.
template <class T>
RC_DEVICE T* global(u64 at) {
    T* pointer = reinterpret_cast<T*>(at);
    __builtin_assume(__isGlobal(pointer));
    return pointer;
}

template <class T>
RC_DEVICE T load(u64 at) {
    return *global<const T>(at);
}

template <class T>
RC_DEVICE void store(u64 at, T value) {
    *global<T>(at) = value;
}

// Sixteen bytes by one instruction: NVRTC makes four of it where they were computed as floats, and
// links do not bear the gaps. 2 H200, all_reduce of float32 by four and by one, in us: 64 MiB 235
// and 208, 128 MiB 452 and 398, 512 MiB 1726 and 1505; by 32 blocks 128 MiB 488 and 446.
template <>
RC_DEVICE void store<Vector>(u64 at, Vector value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}

// 8 bytes, or 0: a predicate and no branch, so that several loads are in flight at once.
RC_DEVICE u64 ld_u64_if(bool wanted, u64 at) {
    u64 value = 0;
    asm volatile(
        "{\n\t"
        ".reg .pred wanted;\n\t"
        "setp.ne.u32 wanted, %2, 0;\n\t"
        "@wanted ld.global.u64 %0, [%1];\n\t"
        "}"
        : "+l"(value)
        : "l"(at), "r"(static_cast<u32>(wanted))
        : "memory");
    return value;
}

// The value before the addition.
RC_DEVICE u64 atom_add_relaxed_gpu_u64(u64 at, u64 value) {
    return atomicAdd(reinterpret_cast<u64*>(at), value);
}

// -- words that ranks and the host share --------------------------------------------------------

// Relaxed at system scope: never from L1, and orders nothing.
RC_DEVICE u32 ld_relaxed_sys_u32(u64 at) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

RC_DEVICE u64 ld_relaxed_sys_u64(u64 at) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

RC_DEVICE void st_relaxed_sys_u32(u64 at, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

RC_DEVICE void st_relaxed_sys_u64(u64 at, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// The value before the exchange.
RC_DEVICE u32 atom_exch_relaxed_gpu_u32(u64 at, u32 value) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(at), "r"(value)
                 : "memory");
    return before;
}

// After a relaxed load that found its value it acquires, before a relaxed store it releases; after
// a block_barrier one thread's fence covers what its whole block wrote, because fences are
// cumulative. Not __threadfence_system(): that is fence.sc.sys, which also puts all such fences
// into one order, which nothing here needs, and costs more. Not ld.acquire in a polling loop: it
// would order every poll, the fence orders once.
RC_DEVICE void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// -- lines that carry their own signal (LL) -----------------------------------------------------

// {low, flag, high, flag}: each half of 8 bytes arrives whole, so the data have arrived when both
// flags have. No fence, and no assumption on the order of the two halves.
RC_DEVICE void st_relaxed_sys_ll(u64 line, u64 data, u32 flag) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(line),
                 "r"(static_cast<u32>(data)), "r"(flag), "r"(static_cast<u32>(data >> 32))
                 : "memory");
}

// A line as it is now; `arrived` checks its flags.
RC_DEVICE Vector ld_relaxed_sys_v4_u32(u64 line) {
    Vector v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(line)
                 : "memory");
    return v;
}

RC_DEVICE bool arrived(const Vector& line, u32 flag) { return line.y == flag && line.w == flag; }

// Load a line again unless it has arrived: a predicate and no branch, so that several loads are in
// flight at once.
RC_DEVICE void ld_relaxed_sys_v4_u32_if_missing(Vector& v, u64 line, u32 flag) {
    asm volatile(
        "{\n\t"
        ".reg .pred missing;\n\t"
        "setp.ne.u32 missing, %1, %5;\n\t"
        "setp.ne.or.u32 missing, %3, %5, missing;\n\t"
        "@missing ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t"
        "}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(line), "r"(flag)
        : "memory");
}

RC_DEVICE u64 data_of(const Vector& line) { return static_cast<u64>(line.z) << 32 | line.x; }

// -- lines of 128 bytes that carry one signal (LL128) ---------------------------------------------

// 16 bytes a thread, the last 8 of a line its flag. What the threads of a warp store by one
// instruction crosses NVLink as whole lines of 128 bytes, in ascending order of address: once the
// flag is seen the rest can be loaded. PCIe splits lines. All threads of the warp call it, those
// whose part of a line exists with `there`.
RC_DEVICE void st_relaxed_sys_v2_u64_if(bool there, u64 at, u64 low, u64 high) {
    __syncwarp();
    asm volatile(
        "{\n\t"
        ".reg .pred there;\n\t"
        "setp.ne.u32 there, %0, 0;\n\t"
        "@there st.relaxed.sys.global.v2.u64 [%1], {%2, %3};\n\t"
        "}" ::"r"(static_cast<u32>(there)),
        "l"(at), "l"(low), "l"(high)
        : "memory");
}

// -- arithmetic of IEEE 754, rounded to nearest even and never fused ------------------------------

RC_DEVICE u32 bits(float value) { return __float_as_uint(value); }
RC_DEVICE float float_of(u32 value) { return __uint_as_float(value); }
RC_DEVICE u64 bits(double value) { return __double_as_longlong(value); }

RC_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
RC_DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
RC_DEVICE float div(float a, float b) { return __fdiv_rn(a, b); }
RC_DEVICE double add(double a, double b) { return __dadd_rn(a, b); }
RC_DEVICE double mul(double a, double b) { return __dmul_rn(a, b); }
RC_DEVICE double div(double a, double b) { return __ddiv_rn(a, b); }

RC_DEVICE float f32_from_f16(u16 value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
    return result;
}

RC_DEVICE u16 f16_from_f32(float value) {
    u16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}

// By one instruction, which sm_80 has first; by those of types.cuh, calls on 2 H200 took up to 4 %
// longer: all_reduce of 64 KiB 2.8 us and 2.7, of 64 MiB 209 and 201 (gpu_bf16_2.json). Any NaN
// gives the same one.
RC_DEVICE u16 bf16_from_f32(float value) {
    u16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}

}  // namespace rc
