// What the machine itself can do: a gate that lines up ranks, an empty kernel, a push by stores.

typedef unsigned long long u64;

// Holds the stream for so many nanoseconds: whatever the host enqueues meanwhile starts at once.
extern "C" __global__ void gate(u64 wait_ns) {
    u64 start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start)::"memory");
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
    } while (now - start < wait_ns);
}

// Parameters as long as a collective's, so that launching costs what it costs there.
struct Parameters {
    u64 words[15];
};

extern "C" __global__ void nothing(const __grid_constant__ Parameters parameters) {}

// Copy `count` 16-byte words to a peer, eight loads in flight before the first store.
extern "C" __global__ void __launch_bounds__(512)
    push(uint4 *__restrict__ to, const uint4 *__restrict__ from, u64 count) {
    constexpr int UNROLL = 8;
    const u64 tile = u64(blockDim.x) * UNROLL;
    for (u64 base = blockIdx.x * tile; base < count; base += gridDim.x * tile) {
        uint4 words[UNROLL];
        const u64 first = base + threadIdx.x;
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            if (first + k * blockDim.x < count) words[k] = from[first + k * blockDim.x];
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            if (first + k * blockDim.x < count) to[first + k * blockDim.x] = words[k];
    }
}
