// The machine that kernels find on a CPU, and its launches, on the threads of threads.hpp: a block
// is a group of them with a barrier, a grid is all of them at once. Under ThreadSanitizer, which
// knows no fences, loads acquire and stores release.
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <system.cuh>

#include "threads.hpp"

namespace rc {

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
    u64 memory[BLOCK_MEMORY / 8];
};

struct Where {
    u32 thread, threads, block, blocks, local, lanes;
    Group* group;
    u32 round;
    u32 ballots = 0;
};

static Where& where() { return *static_cast<Where*>(own); }

u32 thread_index() { return where().thread; }
u32 block_threads() { return where().threads; }
u32 block_index() { return where().block; }
u32 grid_blocks() { return where().blocks; }
u32 local_index() { return where().local; }

u64 globaltimer_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<u64>(time.tv_sec) * 1000000000ull + static_cast<u64>(time.tv_nsec);
}

void block_barrier() { meet(where().group->barrier, where().threads); }

bool block_barrier_or(bool yes) {
    u32* vote = &where().group->votes[where().round++ & 1];
    if (yes) __atomic_store_n(vote, 1u, __ATOMIC_RELAXED);
    block_barrier();
    const bool any = __atomic_load_n(vote, __ATOMIC_RELAXED) != 0;
    block_barrier();
    if (where().thread == 0) __atomic_store_n(vote, 0u, __ATOMIC_RELAXED);
    return any;
}

static Warp& warp() { return where().group->warps[where().thread / where().lanes]; }

void warp_barrier() {
    if (where().lanes != 1) meet(warp().barrier, where().lanes);
}

bool warp_any(bool yes) {
    u32* vote = &warp().votes[where().ballots++ & 1];
    if (yes) __atomic_store_n(vote, 1u, __ATOMIC_RELAXED);
    warp_barrier();
    const bool any = __atomic_load_n(vote, __ATOMIC_RELAXED) != 0;
    warp_barrier();
    if (where().thread % where().lanes == 0) __atomic_store_n(vote, 0u, __ATOMIC_RELAXED);
    return any;
}

void block_arrive() {
    __atomic_fetch_add(&where().group->arrivals, 1u, __ATOMIC_RELEASE);
    wrote();
}
void block_await() {
    u32* arrivals = &where().group->arrivals;
    const u32 wanted = where().threads - where().lanes;
    while (__atomic_load_n(arrivals, __ATOMIC_ACQUIRE) != wanted) pause();
    warp_barrier();
    __atomic_store_n(arrivals, 0u, __ATOMIC_RELAXED);  // for the next launch
}

void barrier_arrive(u32 number, u32 count) { arrive(where().group->named[number], count); }
void barrier_sync(u32 number, u32 count) { meet(where().group->named[number], count); }

void* memory_of_block() { return where().group->memory; }

// -- memory of this rank alone, or ordered by other means ---------------------------------------

u64 ld_u64_if(bool wanted, u64 at) { return wanted ? load<u64>(at) : 0; }

u64 atom_add_relaxed_gpu_u64(u64 at, u64 value) {
    return __atomic_fetch_add(reinterpret_cast<u64*>(at), value, __ATOMIC_RELAXED);
}

// -- words that ranks and the host share --------------------------------------------------------

u32 ld_relaxed_sys_u32(u64 at) {
    step();
    return __atomic_load_n(reinterpret_cast<const u32*>(at), ACQUIRE);
}
u64 ld_relaxed_sys_u64(u64 at) {
    step();
    return __atomic_load_n(reinterpret_cast<const u64*>(at), ACQUIRE);
}
void st_relaxed_sys_u32(u64 at, u32 value) {
    step(), wrote();
    __atomic_store_n(reinterpret_cast<u32*>(at), value, RELEASE);
}
void st_relaxed_sys_u64(u64 at, u64 value) {
    step(), wrote();
    __atomic_store_n(reinterpret_cast<u64*>(at), value, RELEASE);
}
u32 atom_exch_relaxed_gpu_u32(u64 at, u32 value) {
    step(), wrote();
    return __atomic_exchange_n(reinterpret_cast<u32*>(at), value, __ATOMIC_RELAXED);
}
void fence_acq_rel_sys() {
#if !defined(__SANITIZE_THREAD__)
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

// -- lines that carry their own signal (LL) -----------------------------------------------------

void st_relaxed_sys_ll(u64 line, u64 data, u32 flag) {
    step(), wrote();
    u64* halves = reinterpret_cast<u64*>(line);
    const u64 high = static_cast<u64>(flag) << 32;
    __atomic_store_n(halves, high | (data & 0xffffffffu), __ATOMIC_RELAXED);
    step();
    __atomic_store_n(halves + 1, high | data >> 32, __ATOMIC_RELAXED);
}

Vector ld_relaxed_sys_v4_u32(u64 line) {
    const u64* halves = reinterpret_cast<const u64*>(line);
    const u64 low = __atomic_load_n(halves, __ATOMIC_RELAXED);
    step();
    const u64 high = __atomic_load_n(halves + 1, __ATOMIC_RELAXED);
    return {static_cast<u32>(low), static_cast<u32>(low >> 32), static_cast<u32>(high),
            static_cast<u32>(high >> 32)};
}

bool arrived(const Vector& line, u32 flag) { return line.y == flag && line.w == flag; }

void ld_relaxed_sys_v4_u32_if_missing(Vector& v, u64 line, u32 flag) {
    if (!arrived(v, flag)) v = ld_relaxed_sys_v4_u32(line);
}

u64 data_of(const Vector& line) { return static_cast<u64>(line.z) << 32 | line.x; }

// -- lines that carry one signal (LL128): the flag goes last, when the others' parts are there ----

void st_relaxed_sys_v2_u64_if(bool there, u64 at, u64 low, u64 high) {
    u64* words = reinterpret_cast<u64*>(at);
    const bool last = where().thread % where().lanes == where().lanes - 1;
    if (there) __atomic_store_n(words, low, __ATOMIC_RELAXED);
    if (there && !last) __atomic_store_n(words + 1, high, __ATOMIC_RELAXED);
    warp_barrier();
    wrote();
    if (there && last) __atomic_store_n(words + 1, high, __ATOMIC_RELEASE);
}

// -- arithmetic of IEEE 754, rounded to nearest even and never fused ------------------------------

u32 bits(float value) {
    u32 result;
    memcpy(&result, &value, 4);
    return result;
}
float float_of(u32 value) {
    float result;
    memcpy(&result, &value, 4);
    return result;
}
u64 bits(double value) {
    u64 result;
    memcpy(&result, &value, 8);
    return result;
}

float add(float a, float b) { return a + b; }
float mul(float a, float b) { return a * b; }
float div(float a, float b) { return a / b; }
double add(double a, double b) { return a + b; }
double mul(double a, double b) { return a * b; }
double div(double a, double b) { return a / b; }

float f32_from_f16(u16 value) {
    const u32 sign = static_cast<u32>(value & 0x8000u) << 16;
    const u32 exponent = value >> 10 & 31, fraction = value & 1023u;
    if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    const float small = static_cast<float>(fraction) * 5.9604644775390625e-08f;  // 2^-24
    return sign ? -small : small;
}

u16 f16_from_f32(float value) {
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

// -- launches -----------------------------------------------------------------------------------

namespace {

struct Run {
    Where where;
    void (*kernel)(const void*);
    const void* args;
    Barrier* rank;
    u32 calls;
};

void* thread(void* argument) {
    own = argument;
    Run& run = *static_cast<Run*>(argument);
    for (u32 call = 0; call < run.calls; ++call) {
        run.where.round = run.where.ballots = 0;
        run.kernel(run.args);
        meet(*run.rank, run.where.blocks * run.where.threads);
    }
    return nullptr;
}

}  // namespace

// Blocks and ranks of one launch run side by side; `calls` of them follow each other as on a
// stream.
extern "C" void launch(void (*kernel)(const void*), const void* args, u32 lanes, u32 blocks,
                       u32 locals, u32 threads, u32 calls) {
    const u32 number = blocks * locals * threads;
    auto* groups = static_cast<Group*>(calloc(blocks * locals, sizeof(Group)));
    auto* ranks = static_cast<Barrier*>(calloc(locals, sizeof(Barrier)));
    auto* runs = static_cast<Run*>(calloc(number, sizeof(Run)));
    for (u32 group = 0; group < blocks * locals; ++group)
        memset(groups[group].memory, 0xa5, sizeof(groups[group].memory));
    for (u32 n = 0; n < number; ++n) {
        const u32 group = n / threads, local = group / blocks;
        const Where where{n % threads, threads, group % blocks, blocks,
                          local,       lanes,   &groups[group], 0};
        runs[n] = Run{where, kernel, args, &ranks[local], calls};
    }
    side_by_side(thread, runs, sizeof(Run), number);
    free(runs);
    free(ranks);
    free(groups);
}

}  // namespace rc
