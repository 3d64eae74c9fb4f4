// The functions of the kernels' system.cuh for a C++ compiler: machine.cpp defines what no template
// has, and is compiled once for all texts.
#pragma once

#define RC_DEVICE inline
#define RC_APART inline
#define RC_KERNEL(...) extern "C" void
#define RC_SMALL_KERNEL(registers) extern "C" void
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

// -- who and when ------------------------------------------------------------------------------

u32 thread_index();
u32 block_threads();
u32 block_index();
u32 grid_blocks();
u32 local_index();
u64 globaltimer_ns();

// Lets others run, who are waited for.
void pause();
void block_barrier();
bool block_barrier_or(bool yes);
void warp_barrier();
bool warp_any(bool yes);
void block_arrive();
void block_await();
void barrier_arrive(u32 number, u32 count);
void barrier_sync(u32 number, u32 count);

constexpr u64 BLOCK_MEMORY = 4096;
void* memory_of_block();

template <class T>
RC_DEVICE T* block_memory() {
    static_assert(sizeof(T) <= BLOCK_MEMORY);
    return static_cast<T*>(memory_of_block());
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

u64 ld_u64_if(bool wanted, u64 at);
u64 atom_add_relaxed_gpu_u64(u64 at, u64 value);

// -- words that ranks and the host share --------------------------------------------------------

u32 ld_relaxed_sys_u32(u64 at);
u64 ld_relaxed_sys_u64(u64 at);
void st_relaxed_sys_u32(u64 at, u32 value);
void st_relaxed_sys_u64(u64 at, u64 value);
u32 atom_exch_relaxed_gpu_u32(u64 at, u32 value);
void fence_acq_rel_sys();

// -- lines that carry their own signal: all of their words, or their last one --------------------

void st_relaxed_sys_ll(u64 line, u64 data, u32 flag);
Vector ld_relaxed_sys_v4_u32(u64 line);
void ld_relaxed_sys_v4_u32_if_missing(Vector& v, u64 line, u32 flag);
bool arrived(const Vector& line, u32 flag);
u64 data_of(const Vector& line);
void st_relaxed_sys_v2_u64_if(bool there, u64 at, u64 low, u64 high);

// -- arithmetic of IEEE 754, rounded to nearest even and never fused ------------------------------

u32 bits(float value);
u64 bits(double value);
float float_of(u32 value);
float add(float a, float b);
float mul(float a, float b);
float div(float a, float b);
double add(double a, double b);
double mul(double a, double b);
double div(double a, double b);
float f32_from_f16(u16 value);
u16 f16_from_f32(float value);

}  // namespace rc
