// What a CUDA block does with its share of a row's data: protocol Simple.
#pragma once

#include "call.cuh"
#include "ops.cuh"
#include "types.cuh"

namespace rc::simple {

// What this call's hellos say: where peers' INPUT and OUTPUT lie, and the factors of their
// contributions.
struct Bases {
    u64 at[2][RC_RANKS];
    u64 factors[RC_RANKS][FACTOR_LINES];
};

enum class Where { HERE, SCRATCH, PEER };
constexpr u64 WHOLE = 1 << 2;  // of a chunk of SCRATCH, beside Where: its region has no halves

// The threads that move data: the first ones, all whole warps; a block has three warps at least.
RC_DEVICE u32 movers() { return block_threads() - 2 * WARP; }

// What a CUDA block does of a slice: `count` elements from `first`; its half of SCRATCH begins at
// `half`. It refers to no Call, which would have to lie in local memory where a Share is passed to
// a function that is not inlined: by two ranks on one H200 all_gather of 64 KiB took 11.0 us so,
// and 9.6 without.
struct Share {
    const Local& local;
    const Bases& bases;
    u64 half, slice, slot, first, count;

    // The factor of a rank's contributions.
    template <class Acc>
    RC_DEVICE Acc factor(u64 owner) const {
        Factor<Acc> found;
#pragma unroll
        for (u32 k = 0; k < FACTOR_LINES; ++k) found.words[k] = bases.factors[owner][k];
        return found.value;
    }

    // A chunk: address or offset, and {where 2, buffer or WHOLE 1, rank 13, bytes a slice 48}.
    RC_DEVICE u64 address(const u64* words, u32 bytes) const {
        const u64 at = words[0] + first * bytes, meta = words[1];
        const u64 stride = meta >> 16;
        switch (static_cast<Where>(meta & 3)) {
            case Where::SCRATCH: return at + (meta & WHOLE ? 0 : half) + slot * stride;
            case Where::PEER:
                return bases.at[meta >> 2 & 1][meta >> 3 & 0x1fff] + at + slice * stride;
            default: return at + slice * stride;
        }
    }
};

// As many bytes as one load or store moves.
template <u32 BYTES>
struct Bits;
template <>
struct Bits<16> {
    using Type = Vector;
};
template <>
struct Bits<8> {
    using Type = u64;
};
template <>
struct Bits<4> {
    using Type = u32;
};
template <>
struct Bits<2> {
    using Type = u16;
};

// COUNT values that one load or store moves; one value as its own type, which may be aligned to
// less than its bytes.
template <class Value, u32 COUNT>
union Pack {
    using Whole = typename Bits<COUNT * sizeof(Value)>::Type;
    Value value[COUNT];
    Whole bits;
    RC_DEVICE Pack() {}
};
template <class Value>
struct Single {
    using Whole = Value;
    union {
        Value value[1];
        Whole bits;
    };
    RC_DEVICE Single() {}
};

// One step of a block's share. Bit k of WIDE_SRCS: source k is kept in the accumulator's type.
template <class T, class Op, bool REDUCES, bool FINAL, u32 RAW, u32 WIDE_SRCS, bool WIDE_DST,
          u32 SRCS, u32 DSTS>
struct Move {
    using Raw = typename T::Raw;
    using Acc = typename T::Acc;
    static constexpr bool WIDE = WIDE_SRCS != 0 || WIDE_DST;
    // Elements that a thread takes at once: 16 bytes of the largest type in memory, so that what
    // the threads of a warp store by one instruction has no gaps, which links do not bear.
    static constexpr u32 LANES = 16 / (WIDE ? sizeof(Acc) : sizeof(Raw));
    // How often a thread loads before it stores. 2 H200, 256 MiB, 4 and 8 times, in us: all_reduce
    // by 32 blocks 881 and 829, without a limit 763 and 762; reduce_scatter by 32 695 and 553;
    // all_gather by 16 601 and 402; broadcast by 24 919 and 741. What is left behind the last eight
    // is loaded one by one: all_reduce of 25 MiB by 32 blocks 95 and 99, without a limit 88 and 89.
    // More sources, 4 GPUs, once and twice: all_reduce of 512 MiB by 32 blocks 2672 and 2577,
    // without a limit 2382 and 2376.
    static constexpr u32 UNROLL = WIDE ? (SRCS == 1 ? 8 : SRCS <= 2 ? 4 : 2) : SRCS <= 2 ? 8 : 2;
    using Factors = Acc[SRCS];

    RC_DEVICE static constexpr u32 size(bool wide) { return wide ? sizeof(Acc) : sizeof(Raw); }
    RC_DEVICE static constexpr u32 size_of(u32 chunk) {
        return size(chunk < SRCS ? wide(chunk) : WIDE_DST);
    }
    RC_DEVICE static constexpr bool wide(u32 source) { return WIDE_SRCS >> source & 1; }

    // What a thread loads at once, LOADS times before it stores. Of RAWS and ACCS the one that lies
    // in memory counts.
    template <class RAWS, class ACCS, u32 COUNT, u32 LOADS>
    struct Pass {
        // A source as it lies in memory.
        union Loaded {
            RAWS raw;
            ACCS acc;
            RC_DEVICE Loaded() {}
        };

        // So many times COUNT elements from the beginning of the chunks.
        RC_DEVICE static void run(const u64* chunks, u64 last, const Factors& factors) {
            const u64 threads = movers();
            u64 at = thread_index();
            for (; at + (LOADS - 1) * threads < last; at += LOADS * threads) {
                Loaded in[LOADS][SRCS];
#pragma unroll
                for (u32 u = 0; u < LOADS; ++u)
#pragma unroll
                    for (u32 s = 0; s < SRCS; ++s)
                        fetch(in[u][s], chunks[s], (at + u * threads) * COUNT, s);
#pragma unroll
                for (u32 u = 0; u < LOADS; ++u)
                    finish(in[u], chunks, (at + u * threads) * COUNT, factors);
            }
#pragma unroll 1
            for (; at < last; at += threads) {
                Loaded in[SRCS];
#pragma unroll
                for (u32 s = 0; s < SRCS; ++s) fetch(in[s], chunks[s], at * COUNT, s);
                finish(in, chunks, at * COUNT, factors);
            }
        }

        RC_DEVICE static void fetch(Loaded& to, u64 chunk, u64 at, u32 source) {
            if (wide(source))
                to.acc.bits = load<typename ACCS::Whole>(chunk + at * sizeof(Acc));
            else
                to.raw.bits = load<typename RAWS::Whole>(chunk + at * sizeof(Raw));
        }

        RC_DEVICE static Acc operand(const Loaded& from, u32 source, u32 lane,
                                     const Factors& factors) {
            if (wide(source)) return from.acc.value[lane];
            const Raw raw = from.raw.value[lane];
            return (RAW >> source & 1) ? Op::load(raw, factors[source]) : T::widen(raw);
        }

        RC_DEVICE static void finish(const Loaded (&in)[SRCS], const u64* chunks, u64 at,
                                     const Factors& factors) {
            Loaded out;
            if constexpr (!REDUCES) {
                out = in[0];
            } else {
#pragma unroll
                for (u32 lane = 0; lane < COUNT; ++lane) {
                    Acc total = operand(in[0], 0, lane, factors);
#pragma unroll
                    for (u32 s = 1; s < SRCS; ++s)
                        total = Op::combine(total, operand(in[s], s, lane, factors));
                    if constexpr (WIDE_DST)
                        out.acc.value[lane] = total;
                    else
                        out.raw.value[lane] =
                            T::narrow(FINAL ? Op::finish(total, RC_RANKS) : total);
                }
            }
#pragma unroll
            for (u32 d = 0; d < DSTS; ++d) {
                const u64 to = chunks[SRCS + d] + at * size(WIDE_DST);
                if constexpr (WIDE_DST)
                    store(to, out.acc.bits);
                else
                    store(to, out.raw.bits);
            }
        }
    };

    // Accumulators are in memory where the step is WIDE; elsewhere any type will do.
    template <u32 COUNT>
    using Whole = Pass<Pack<Raw, COUNT>, Pack<Acc, WIDE ? COUNT : 16 / sizeof(Acc)>, COUNT, UNROLL>;
    using Each = Pass<Single<Raw>, Single<Acc>, 1, UNROLL>;

    // Where the chunks begin, and the factors of the sources.
    struct Places {
        u64 chunks[SRCS + DSTS];
        Factors factors = {};

        RC_DEVICE Places(const Share& share, const u64* words) {
#pragma unroll
            for (u32 k = 0; k < SRCS + DSTS; ++k)
                chunks[k] = share.address(words + 2 * k, size_of(k));
            if constexpr (REDUCES && Op::SCALES) {
#pragma unroll
                for (u32 s = 0; s < SRCS; ++s)
                    if (RAW >> s & 1)
                        factors[s] = share.template factor<Acc>(words[2 * (SRCS + DSTS) + s]);
            }
        }

        // Begin so many elements on.
        RC_DEVICE void advance(u64 count) {
#pragma unroll
            for (u32 k = 0; k < SRCS + DSTS; ++k) chunks[k] += count * size_of(k);
        }

        // Whether all are aligned to so many bytes.
        RC_DEVICE bool aligned(u32 bytes) const {
            bool found = true;
#pragma unroll
            for (u32 k = 0; k < SRCS + DSTS; ++k) found = found && chunks[k] % bytes == 0;
            return found;
        }

        // Move so many times as many elements as a pass does.
        template <class PASS>
        RC_DEVICE void move(u64 passes) const {
            PASS::run(chunks, passes, factors);
        }
    };

    // Arrays that begin alike are aligned some elements on. 2 H200, 128 MiB of float32 from the
    // second element on, by elements one after the other and so, in us: broadcast 2173 and 449,
    // all_gather 828 and 223, reduce_scatter 510 and 242.
    RC_DEVICE static void run(const Share& share, const u64* words) {
        Places places(share, words);
        const u64 behind = places.chunks[0] % 16 / size_of(0), count = share.count;
        const u32 first = behind == 0 ? 0 : 16 / size_of(0) - static_cast<u32>(behind);
        places.advance(first);
        const bool whole = first < count && places.aligned(16);
        if (whole) places.template move<Whole<LANES>>((count - first) / LANES);
        if (!whole || first != 0 || count % LANES != 0) rest(places, count, first, whole);
    }

    // Copy whole words of so many bytes if they are aligned to that; returns how many elements.
    template <u32 BYTES>
    RC_DEVICE static u64 words_of(const Places& places, u64 count) {
        constexpr u32 EACH = BYTES / sizeof(Raw);
        if (!places.aligned(BYTES)) return 0;
        places.template move<Whole<EACH>>(count / EACH);
        return count / EACH * EACH;
    }

    // Of `count` elements the `first` ones, in front of where the places are, and those behind the
    // last whole pass; all where no pass was made.
    RC_APART static void rest(Places places, u64 count, u32 first, bool whole) {
        u64 done = whole ? (count - first) / LANES * LANES : 0;
        places.advance(0 - static_cast<u64>(first));
        if (!whole) {
            first = 0;
            if constexpr (!REDUCES && sizeof(Raw) < 4) done = words_of<4>(places, count);
            if constexpr (!REDUCES && sizeof(Raw) < 2)
                if (done == 0) done = words_of<2>(places, count);
        }
#pragma unroll 1
        for (u32 part = 0; part < 2; ++part) {
            places.template move<Each>(part == 0 ? first : count - first - done);
            places.advance(first + done);
        }
    }
};

}  // namespace rc::simple
