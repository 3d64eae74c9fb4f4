// The functions of the kernels' system.cuh for a C++ compiler, on the threads of threads.hpp: a
// block is a group of them with a barrier, a grid is all of them at once. Under ThreadSanitizer,
// which knows no fences, loads acquire and stores release.
#pragma once

#include <string.h>
#include <time.h>

#include "threads.hpp"

#define RC_DEVICE inline
#define RC_APART inline
#define RC_KERNEL(...) extern "C" void
#define RC_PARAMETER const

#ifndef RC_LANES
#define RC_LANES 1
#endif

namespace rc {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;

// As few as will do: a warp is the threads of one line.
constexpr u32 WARP = RC_LANES, SYNC_THREADS = WARP;

struct alignas(16) Vector {
    u32 x, y, z, w;
};

#if defined(__SANITIZE_THREAD__)
constexpr int ACQUIRE = __ATOMIC_ACQUIRE, RELEASE = __ATOMIC_RELEASE;
#else
constexpr int ACQUIRE = __ATOMIC_RELAXED, RELEASE = __ATOMIC_RELAXED;
#endif

// -- who and when ------------------------------------------------------------------------------

struct Warp {
    Barrier barrier;
    u32 votes[2];
};

constexpr u32 NAMED_BARRIERS = 4;

struct Group {
    Barrier barrier;
    Warp warps[16];
    Barrier named[NAMED_BARRIERS];
    u32 votes[2];
    u32 arrivals;
    u64 memory[512];
};

struct Where {
    u32 thread, threads, block, blocks, local;
    Group* group;
    u32 round;
    u32 ballots = 0;
};

inline Where& where() { return *static_cast<Where*>(own); }

RC_DEVICE u32 thread_index() { return where().thread; }
RC_DEVICE u32 block_threads() { return where().threads; }
RC_DEVICE u32 block_index() { return where().block; }
RC_DEVICE u32 grid_blocks() { return where().blocks; }
RC_DEVICE u32 local_index() { return where().local; }

RC_DEVICE u64 globaltimer_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<u64>(time.tv_sec) * 1000000000ull + static_cast<u64>(time.tv_nsec);
}

RC_DEVICE void block_barrier() { meet(where().group->barrier, where().threads); }

RC_DEVICE bool block_barrier_or(bool yes) {
    u32* vote = &where().group->votes[where().round++ & 1];
    if (yes) __atomic_store_n(vote, 1u, __ATOMIC_RELAXED);
    block_barrier();
    const bool any = __atomic_load_n(vote, __ATOMIC_RELAXED) != 0;
    block_barrier();
    if (where().thread == 0) __atomic_store_n(vote, 0u, __ATOMIC_RELAXED);
    return any;
}

RC_DEVICE Warp& warp() { return where().group->warps[where().thread / WARP]; }

RC_DEVICE void warp_barrier() {
    if (WARP != 1) meet(warp().barrier, WARP);
}

RC_DEVICE bool warp_any(bool yes) {
    u32* vote = &warp().votes[where().ballots++ & 1];
    if (yes) __atomic_store_n(vote, 1u, __ATOMIC_RELAXED);
    warp_barrier();
    const bool any = __atomic_load_n(vote, __ATOMIC_RELAXED) != 0;
    warp_barrier();
    if (where().thread % WARP == 0) __atomic_store_n(vote, 0u, __ATOMIC_RELAXED);
    return any;
}

RC_DEVICE void block_arrive() {
    __atomic_fetch_add(&where().group->arrivals, 1u, __ATOMIC_RELEASE);
    wrote();
}
RC_DEVICE void block_await() {
    u32* arrivals = &where().group->arrivals;
    const u32 wanted = where().threads - SYNC_THREADS;
    while (__atomic_load_n(arrivals, __ATOMIC_ACQUIRE) != wanted) pause();
    warp_barrier();
    __atomic_store_n(arrivals, 0u, __ATOMIC_RELAXED);  // for the next launch
}

RC_DEVICE void barrier_arrive(u32 number, u32 count) {
    arrive(where().group->named[number], count);
}
RC_DEVICE void barrier_sync(u32 number, u32 count) { meet(where().group->named[number], count); }

template <class T>
RC_DEVICE T* block_memory() {
    static_assert(sizeof(T) <= sizeof(Group::memory));
    return reinterpret_cast<T*>(where().group->memory);
}

RC_DEVICE bool unlikely(bool condition) { return condition; }

// -- memory of this rank alone, or ordered by other means ---------------------------------------

template <class T>
RC_DEVICE T load(u64 at) {
    return *reinterpret_cast<const T*>(at);
}

template <class T>
RC_DEVICE void store(u64 at, T value) {
    *reinterpret_cast<T*>(at) = value;
}

RC_DEVICE u64 ld_u64_if(bool wanted, u64 at) { return wanted ? load<u64>(at) : 0; }

RC_DEVICE u64 atom_add_relaxed_gpu_u64(u64 at, u64 value) {
    return __atomic_fetch_add(reinterpret_cast<u64*>(at), value, __ATOMIC_RELAXED);
}

// -- words that ranks and the host share --------------------------------------------------------

RC_DEVICE u32 ld_relaxed_sys_u32(u64 at) {
    step();
    return __atomic_load_n(reinterpret_cast<const u32*>(at), ACQUIRE);
}
RC_DEVICE u64 ld_relaxed_sys_u64(u64 at) {
    step();
    return __atomic_load_n(reinterpret_cast<const u64*>(at), ACQUIRE);
}
RC_DEVICE void st_relaxed_sys_u32(u64 at, u32 value) {
    step(), wrote();
    __atomic_store_n(reinterpret_cast<u32*>(at), value, RELEASE);
}
RC_DEVICE void st_relaxed_sys_u64(u64 at, u64 value) {
    step(), wrote();
    __atomic_store_n(reinterpret_cast<u64*>(at), value, RELEASE);
}
RC_DEVICE u32 atom_exch_relaxed_gpu_u32(u64 at, u32 value) {
    step(), wrote();
    return __atomic_exchange_n(reinterpret_cast<u32*>(at), value, __ATOMIC_RELAXED);
}
RC_DEVICE void fence_acq_rel_sys() {
#if !defined(__SANITIZE_THREAD__)
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

// -- lines that carry their own signal (LL) -----------------------------------------------------

RC_DEVICE void st_relaxed_sys_ll(u64 line, u64 data, u32 flag) {
    step(), wrote();
    u64* halves = reinterpret_cast<u64*>(line);
    const u64 high = static_cast<u64>(flag) << 32;
    __atomic_store_n(halves, high | (data & 0xffffffffu), __ATOMIC_RELAXED);
    step();
    __atomic_store_n(halves + 1, high | data >> 32, __ATOMIC_RELAXED);
}

RC_DEVICE Vector ld_relaxed_sys_v4_u32(u64 line) {
    const u64* halves = reinterpret_cast<const u64*>(line);
    const u64 low = __atomic_load_n(halves, __ATOMIC_RELAXED);
    step();
    const u64 high = __atomic_load_n(halves + 1, __ATOMIC_RELAXED);
    return {static_cast<u32>(low), static_cast<u32>(low >> 32), static_cast<u32>(high),
            static_cast<u32>(high >> 32)};
}

RC_DEVICE bool arrived(const Vector& line, u32 flag) { return line.y == flag && line.w == flag; }

RC_DEVICE void ld_relaxed_sys_v4_u32_if_missing(Vector& v, u64 line, u32 flag) {
    if (!arrived(v, flag)) v = ld_relaxed_sys_v4_u32(line);
}

RC_DEVICE u64 data_of(const Vector& line) { return static_cast<u64>(line.z) << 32 | line.x; }

// -- lines that carry one signal (LL128): the flag goes last, when the others' parts are there
// ------

RC_DEVICE void st_relaxed_sys_v2_u64_if(bool there, u64 at, u64 low, u64 high) {
    u64* words = reinterpret_cast<u64*>(at);
    const bool last = where().thread % WARP == WARP - 1;
    if (there) __atomic_store_n(words, low, __ATOMIC_RELAXED);
    if (there && !last) __atomic_store_n(words + 1, high, __ATOMIC_RELAXED);
    warp_barrier();
    wrote();
    if (there && last) __atomic_store_n(words + 1, high, __ATOMIC_RELEASE);
}

// -- arithmetic of IEEE 754, rounded to nearest even and never fused ------------------------------

RC_DEVICE u32 bits(float value) {
    u32 result;
    memcpy(&result, &value, 4);
    return result;
}
RC_DEVICE float float_of(u32 value) {
    float result;
    memcpy(&result, &value, 4);
    return result;
}
RC_DEVICE u64 bits(double value) {
    u64 result;
    memcpy(&result, &value, 8);
    return result;
}

RC_DEVICE float add(float a, float b) { return a + b; }
RC_DEVICE float mul(float a, float b) { return a * b; }
RC_DEVICE float div(float a, float b) { return a / b; }
RC_DEVICE double add(double a, double b) { return a + b; }
RC_DEVICE double mul(double a, double b) { return a * b; }
RC_DEVICE double div(double a, double b) { return a / b; }

RC_DEVICE float f32_from_f16(u16 value) {
    const u32 sign = static_cast<u32>(value & 0x8000u) << 16;
    const u32 exponent = value >> 10 & 31, fraction = value & 1023u;
    if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    const float small = static_cast<float>(fraction) * 5.9604644775390625e-08f;  // 2^-24
    return sign ? -small : small;
}

RC_DEVICE u16 f16_from_f32(float value) {
    const u32 raw = bits(value), sign = raw >> 16 & 0x8000u, magnitude = raw & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<u16>(sign | 0x7e00u | (raw >> 13 & 0x3ffu));
    if (magnitude >= 0x47800000u) return static_cast<u16>(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {  // a subnormal: adding 2^-1 leaves its bits in the last places
        const u32 shifted = bits(float_of(magnitude) + 0.5f);
        return static_cast<u16>(sign | (shifted - 0x3f000000u));
    }
    const u32 rounded = magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u);
    return static_cast<u16>(sign | rounded >> 13);
}

}  // namespace rc
