// Hand-written LL all_reduce (sum): the yardstick that a generated kernel must stay close to.
//
// A line is {data, flag, data, flag}: 16 bytes by one store, of which only the two 8-byte halves
// are taken to be atomic, so the reader waits for both flags. The flag is the call's number
// (epoch), which lives in device memory, one word a block, so that a graph replays for ever.
// Scratch has two halves, taken in turn at fixed places: a kernel ends only after every peer has
// entered the same call (the watch warp sees to it), hence every peer has ended the call before,
// and with it all reading of the half that comes next. Thread i serves element i for all peers,
// so nothing is synchronised between the hops.
//
// The places (EPOCHS, CLAIM, HELLOS, SCRATCH, HALF, STAGE), NRANKS and MAX_BLOCKS come from
// calls.py as macros. Epochs are 32 bits and not guarded against wrapping: 2^32 calls are hours.

typedef unsigned int u32;
typedef unsigned long long u64;

// What the host reads after a failure; abort is also read by spinning threads. calls.py unpacks it.
struct Host {
    u32 abort, reason, rank, epoch, phase, block, thread, missing;
};

enum Reason { EXPIRED = 1, ABORTED = 2, MISMATCH = 3 };
enum Phase { ONE_SHOT = 0, REDUCE = 1, GATHER = 2, HELLO = 3 };

// One rank's part of a call. peers[k] is the arena of rank + 1 + k (mod NRANKS).
struct Call {
    char *peers[7];
    char *own;
    const uint2 *input;
    uint2 *output;
    Host *host;
    u64 deadline_ns;
    u32 rank, packs, chunk, signature, launch, unused;
};

struct Calls {
    Call ranks[8];
};

struct Line {
    u32 data1, flag1, data2, flag2;
};

// ---------------------------------------------------------------- verbs

__device__ __forceinline__ void store_line(char *to, u32 data1, u32 data2, u32 flag) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(data1),
                 "r"(flag), "r"(data2), "r"(flag)
                 : "memory");
}

// Load a line unless both of its flags are there already: no branch, so loads follow one another.
__device__ __forceinline__ void load_missing(Line &line, const char *from, u32 flag) {
    asm volatile(
        "{\n\t"
        ".reg .pred missing;\n\t"
        "setp.ne.u32 missing, %1, %5;\n\t"
        "setp.ne.or.u32 missing, %3, %5, missing;\n\t"
        "@missing ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t"
        "}"
        : "+r"(line.data1), "+r"(line.flag1), "+r"(line.data2), "+r"(line.flag2)
        : "l"(from), "r"(flag)
        : "memory");
}

// Eight bytes of user memory, or zeros: again no branch between several of them.
__device__ __forceinline__ uint2 load_if(bool wanted, const uint2 *from) {
    uint2 value = make_uint2(0, 0);
    asm volatile(
        "{\n\t"
        ".reg .pred wanted;\n\t"
        "setp.ne.u32 wanted, %3, 0;\n\t"
        "@wanted ld.global.v2.u32 {%0, %1}, [%2];\n\t"
        "}"
        : "+r"(value.x), "+r"(value.y)
        : "l"(from), "r"(u32(wanted))
        : "memory");
    return value;
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
    return now;
}

// The workers say that they have used the epoch and go on; the watch warp waits for all of them.
__device__ __forceinline__ void epoch_used() {
    asm volatile("bar.arrive 1, %0;" ::"r"(blockDim.x) : "memory");
}

__device__ __forceinline__ void await_epoch_used() {
    asm volatile("bar.sync 1, %0;" ::"r"(blockDim.x) : "memory");
}

// ---------------------------------------------------------------- types: a pack is 8 bytes

struct Float32 {
    float value[2];
    __device__ __forceinline__ Float32(u32 low, u32 high)
        : value{__uint_as_float(low), __uint_as_float(high)} {}
    __device__ __forceinline__ void add(const Float32 &other) {
        value[0] += other.value[0];
        value[1] += other.value[1];
    }
    __device__ __forceinline__ uint2 pack() const {
        return make_uint2(__float_as_uint(value[0]), __float_as_uint(value[1]));
    }
};

struct Bfloat16 {
    float value[4];
    __device__ __forceinline__ Bfloat16(u32 low, u32 high)
        : value{__uint_as_float(low << 16), __uint_as_float(low & 0xffff0000u),
                __uint_as_float(high << 16), __uint_as_float(high & 0xffff0000u)} {}
    __device__ __forceinline__ void add(const Bfloat16 &other) {
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] += other.value[i];
    }
    static __device__ __forceinline__ u32 round(float low, float high) {
        u32 both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
    __device__ __forceinline__ uint2 pack() const {
        return make_uint2(round(value[0], value[1]), round(value[2], value[3]));
    }
};

// ---------------------------------------------------------------- waiting

// The first thread that fails writes the record; everybody who spins then sees the abort word.
__device__ __noinline__ void report(const Call &call, u32 reason, u32 epoch, u32 phase,
                                    u32 missing) {
    if (atomicExch(reinterpret_cast<u32 *>(call.own + CLAIM), 1) != 0) return;
    volatile Host *host = call.host;
    host->rank = call.rank;
    host->epoch = epoch;
    host->phase = phase;
    host->block = blockIdx.x;
    host->thread = threadIdx.x;
    host->missing = missing;
    __threadfence_system();
    host->reason = reason;
    host->abort = 1;
    __threadfence_system();
}

// Looked at every 1024 polls: the clock starts at the first look, so a fast call never reads it.
// Returns when waiting began, or GIVEN_UP.
constexpr u64 GIVEN_UP = 1;

__device__ __noinline__ u64 look_up(const Call &call, u64 started, u32 epoch, u32 phase,
                                    u32 missing) {
    const u64 now = nanoseconds();
    if (started == 0) started = now;
    const bool aborted = static_cast<volatile Host *>(call.host)->abort != 0;
    if (!aborted && now - started < call.deadline_ns) return started;
    report(call, aborted ? ABORTED : EXPIRED, epoch, phase, missing);
    return GIVEN_UP;
}

// Await the lines of all ranks, `stride` bytes apart; the own one counts as there, and is empty.
__device__ __forceinline__ bool collect(Line (&lines)[NRANKS], const Call &call, const char *from,
                                        size_t stride, u32 epoch, u32 phase) {
#pragma unroll
    for (u32 r = 0; r < NRANKS; r++) {
        const u32 flag = r == call.rank ? epoch : epoch - 1;
        lines[r] = Line{0, flag, 0, flag};
    }
    u64 started = 0;
    for (u32 polls = 1;; polls++) {
#pragma unroll
        for (u32 r = 0; r < NRANKS; r++) load_missing(lines[r], from + r * stride, epoch);
        u32 missing = 0;
#pragma unroll
        for (u32 r = 0; r < NRANKS; r++)
            missing |= (lines[r].flag1 ^ epoch) | (lines[r].flag2 ^ epoch);
        if (missing == 0) return true;
        if (polls % 1024 == 0) {
            u32 ranks = 0;
            for (u32 r = 0; r < NRANKS; r++)
                ranks |= u32(lines[r].flag1 != epoch || lines[r].flag2 != epoch) << r;
            started = look_up(call, started, epoch, phase, ranks);
            if (started == GIVEN_UP) return false;
        }
    }
}

// In the order of the ranks, whatever came first, so that every rank gets the same bits. The own
// pack comes in here and not earlier: polling need not wait until it is loaded.
template <typename T>
__device__ __forceinline__ uint2 sum(const Line (&lines)[NRANKS], u32 rank, uint2 mine) {
    const auto pack_of = [&](u32 r) {
        return r == rank ? T(mine.x, mine.y) : T(lines[r].data1, lines[r].data2);
    };
    T total = pack_of(0);
#pragma unroll
    for (u32 r = 1; r < NRANKS; r++) total.add(pack_of(r));
    return total.pack();
}

__device__ __forceinline__ u32 next_epoch(const Call &call) {
    return reinterpret_cast<const u32 *>(call.own + EPOCHS)[blockIdx.x] + 1;
}

// The last warp of each block: greets the peers, moves the epoch on, and ends only when every
// peer is known to have entered the same call.
__device__ __forceinline__ void watch(const Call &call) {
    const u32 epoch = next_epoch(call);
    const u32 lane = threadIdx.x % 32;
    const size_t slot = HELLOS + (epoch % 4) * 8 * sizeof(Line);
    const bool watches = lane < NRANKS - 1;
    if (watches && blockIdx.x == 0)
        store_line(call.peers[lane] + slot + call.rank * sizeof(Line), call.signature, call.launch,
                   epoch);
    await_epoch_used();
    u32 *epochs = reinterpret_cast<u32 *>(call.own + EPOCHS);
    if (lane == 0) epochs[blockIdx.x] = epoch;
    // Blocks that this call leaves out must count it too.
    if (blockIdx.x == 0)
        for (u32 block = gridDim.x + lane; block < MAX_BLOCKS; block += 32) epochs[block] = epoch;
    if (!watches) return;
    const u32 peer = (call.rank + 1 + lane) % NRANKS;
    Line hello{0, epoch - 1, 0, epoch - 1};
    u64 started = 0;
    for (u32 polls = 1;; polls++) {
        load_missing(hello, call.own + slot + peer * sizeof(Line), epoch);
        if (hello.flag1 == epoch && hello.flag2 == epoch) break;
        if (polls % 1024 != 0) continue;
        started = look_up(call, started, epoch, HELLO, 1u << peer);
        if (started == GIVEN_UP) return;
    }
    if (hello.data1 != call.signature) report(call, MISMATCH, epoch, HELLO, 1u << peer);
}

// ---------------------------------------------------------------- the two algorithms

// Both algorithms ask for their first input before they ask for the epoch: the two loads then
// travel together, and the first store waits for one flight to memory, not for two.

__device__ __forceinline__ uint2 input_at(const Call &call, u32 index, bool wanted = true) {
    return load_if(wanted && index < call.packs, call.input + index);
}

// Everybody sends everything to everybody; each sums for itself. One hop, (n - 1) S out.
template <typename T>
__device__ __forceinline__ void one_shot(const Call &call) {
    const u32 workers = blockDim.x - 32;
    if (threadIdx.x >= workers) return watch(call);
    const u32 first = blockIdx.x * workers + threadIdx.x, step = gridDim.x * workers;
    uint2 mine = input_at(call, first);
    const u32 epoch = next_epoch(call);
    const size_t half = SCRATCH + (epoch % 2) * size_t(HALF);
    const size_t stride = call.packs * sizeof(Line);

    for (u32 i = first; i < call.packs; i += step) {
        const size_t place = half + call.rank * stride + i * sizeof(Line);
#pragma unroll
        for (u32 k = 0; k < NRANKS - 1; k++)
            store_line(call.peers[k] + place, mine.x, mine.y, epoch);
        mine = input_at(call, i + step);
    }
    epoch_used();
    for (u32 i = first; i < call.packs; i += step) {
        Line lines[NRANKS];
        const char *from = call.own + half + i * sizeof(Line);
        mine = input_at(call, i);
        if (!collect(lines, call, from, stride, epoch, ONE_SHOT)) return;
        call.output[i] = sum<T>(lines, call.rank, mine);
    }
}

// What two_shot sends of element i: one pack of each peer's chunk.
__device__ __forceinline__ void pieces_at(uint2 (&pieces)[NRANKS - 1], const Call &call, u32 i) {
#pragma unroll
    for (u32 k = 0; k < NRANKS - 1; k++) {
        u32 owner = call.rank + 1 + k;
        if (owner >= NRANKS) owner -= NRANKS;
        pieces[k] = input_at(call, owner * call.chunk + i, i < call.chunk);
    }
}

// Chunk r goes to rank r, which sums it and sends the sum to everybody. Two hops, 2 (n - 1) / n S
// out. The last chunks may reach past the end: scratch is wide enough, only user memory is guarded.
template <typename T>
__device__ __forceinline__ void two_shot(const Call &call) {
    const u32 workers = blockDim.x - 32;
    if (threadIdx.x >= workers) return watch(call);
    const u32 first = blockIdx.x * workers + threadIdx.x, step = gridDim.x * workers;
    uint2 pieces[NRANKS - 1];
    pieces_at(pieces, call, first);
    const u32 epoch = next_epoch(call);
    const size_t half = SCRATCH + (epoch % 2) * size_t(HALF);
    const size_t stride = call.chunk * sizeof(Line);
    const u32 owned = call.rank * call.chunk;

    for (u32 i = first; i < call.chunk; i += step) {
        const size_t place = half + call.rank * stride + i * sizeof(Line);
#pragma unroll
        for (u32 k = 0; k < NRANKS - 1; k++)
            store_line(call.peers[k] + place, pieces[k].x, pieces[k].y, epoch);
        pieces_at(pieces, call, i + step);
    }
    epoch_used();
    for (u32 i = first; i < call.chunk; i += step) {
        Line lines[NRANKS];
        const uint2 mine = input_at(call, owned + i);
        const char *from = call.own + half + i * sizeof(Line);
        if (!collect(lines, call, from, stride, epoch, REDUCE)) return;
        const uint2 total = sum<T>(lines, call.rank, mine);
        const size_t place = half + STAGE + call.rank * stride + i * sizeof(Line);
#pragma unroll
        for (u32 k = 0; k < NRANKS - 1; k++)
            store_line(call.peers[k] + place, total.x, total.y, epoch);
        if (owned + i < call.packs) call.output[owned + i] = total;
    }
    for (u32 i = first; i < call.chunk; i += step) {
        Line lines[NRANKS];
        const char *from = call.own + half + STAGE + i * sizeof(Line);
        if (!collect(lines, call, from, stride, epoch, GATHER)) return;
#pragma unroll
        for (u32 r = 0; r < NRANKS; r++) {
            const u32 index = r * call.chunk + i;
            if (r != call.rank && index < call.packs)
                call.output[index] = make_uint2(lines[r].data1, lines[r].data2);
        }
    }
}

// ---------------------------------------------------------------- entries

// NAME: one rank a launch. NAME_together: blockIdx.y is the rank, all of them on one device.
#define ENTRY(NAME, BODY)                                                             \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS)                         \
        NAME(const __grid_constant__ Call call) {                                     \
        BODY(call);                                                                   \
    }                                                                                 \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS)                         \
        NAME##_together(const __grid_constant__ Calls calls) {                        \
        BODY(calls.ranks[blockIdx.y]);                                                \
    }

ENTRY(one_shot_bfloat16, one_shot<Bfloat16>)
ENTRY(one_shot_float32, one_shot<Float32>)
ENTRY(two_shot_bfloat16, two_shot<Bfloat16>)
ENTRY(two_shot_float32, two_shot<Float32>)
