// What the kernels need of the machine, as whole verbs: the only file with PTX.
//
// Names state order and scope. A peer's memory may belong to another GPU, so whatever orders ranks
// does so at system scope. cpu/system.cuh offers the same verbs to a C++ compiler.
#pragma once

#define RC_DEVICE __device__ __forceinline__
// A function that stands in a kernel once, with registers of its own.
#define RC_APART __device__ __noinline__
// THREADS and, if it matters, how many such blocks find room side by side on a multiprocessor and share
// its registers. Left to itself NVRTC took 64 for protocol Simple, and spilled: all_reduce of 64 and 512
// MiB on 4 H200 took 6 and 7 % longer.
#define RC_KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)
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
RC_DEVICE u64 now() {
    u64 time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

// All threads of the block have come; what any wrote before, all see after.
RC_DEVICE void block_barrier() { __syncthreads(); }

// The same, and whether any thread says yes.
RC_DEVICE bool block_any(bool yes) { return __syncthreads_or(yes); }

// Once a launch: each thread but the last SYNC_THREADS says that it has come so far, and goes on;
// the last wait for all of them.
RC_DEVICE void block_arrive() { asm volatile("bar.arrive 1, %0;" ::"r"(blockDim.x) : "memory"); }
RC_DEVICE void block_await() { asm volatile("bar.sync 1, %0;" ::"r"(blockDim.x) : "memory"); }

// Barriers of some of a block's warps, GATES of them: who meets waits until `count` threads have come,
// who arrives does not; what any of them wrote before, those who meet see after.
constexpr u32 GATES = 4;
RC_DEVICE void gate_arrive(u32 gate, u32 count) {
    __syncwarp();
    asm volatile("bar.arrive %0, %1;" ::"r"(2 + gate), "r"(count) : "memory");
}
RC_DEVICE void gate_meet(u32 gate, u32 count) {
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(2 + gate), "r"(count) : "memory");
}

// The threads of a warp, which all ask: whether any says yes.
constexpr u32 WARP = 32;
RC_DEVICE bool warp_any(bool yes) { return __any_sync(0xffffffffu, yes); }

// Memory that the threads of a block share; nothing is in it at first.
template <class T>
RC_DEVICE T* block_memory() {
    __shared__ T memory;
    return &memory;
}

// What a thread does between two looks at memory that a peer will write.
RC_DEVICE void pause() {}

// That a condition seldom holds: what it guards moves out of the way.
RC_DEVICE bool rare(bool condition) { return __builtin_expect(condition, false); }

// -- memory of this rank alone, or ordered by other means ---------------------------------------

// An address is always one of global memory: the compiler need not ask.
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

// 8 bytes, or 0: a predicate and no branch, so that several loads travel at once.
RC_DEVICE u64 load_if(bool wanted, u64 at) {
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

// Adds one to a word that the threads of a rank share; what was there before.
RC_DEVICE u64 count_up(u64 at) { return atomicAdd(reinterpret_cast<u64*>(at), 1ull); }

// -- words that ranks and the host share --------------------------------------------------------

// Relaxed, system scope: the newest value, which orders nothing.
RC_DEVICE u32 look(u64 at) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

RC_DEVICE u64 look_wide(u64 at) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

RC_DEVICE void tell(u64 at, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

RC_DEVICE void tell_wide(u64 at, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// Whether no thread of this GPU has asked for this word before.
RC_DEVICE bool claim(u64 at) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(at)
                 : "memory");
    return before == 0;
}

// Acquire and release, system scope. After a look that found what it wanted: what the writer wrote
// before is seen from here on. Before a tell: what this thread wrote, and, after a block_barrier,
// what its block wrote, is seen by whoever finds the word.
RC_DEVICE void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// -- lines that carry their own signal (LL) -----------------------------------------------------

// {low, flag, high, flag}: 8-byte halves arrive whole, so equal flags in both say that both words
// of data are there. No fence anywhere.
RC_DEVICE void ll_store(u64 line, u64 data, u32 flag) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(line),
                 "r"(static_cast<u32>(data)), "r"(flag), "r"(static_cast<u32>(data >> 32))
                 : "memory");
}

// The line as it is now; `arrived` tells whether it is the one wanted.
RC_DEVICE Vector ll_load(u64 line) {
    Vector v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(line)
                 : "memory");
    return v;
}

RC_DEVICE bool arrived(const Vector& line, u32 flag) { return line.y == flag && line.w == flag; }

// Look again unless it has arrived: a predicate and no branch, so that several looks travel at once.
RC_DEVICE void ll_look(Vector& v, u64 line, u32 flag) {
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
// instruction goes over NVLink as whole lines of 128 bytes, in ascending order of address: who sees
// the flag can load the rest. PCIe splits them. All threads of the warp call it; `there`: whether
// this thread has a part in a line.
RC_DEVICE void line_store(bool there, u64 at, u64 low, u64 high) {
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

}  // namespace rc
