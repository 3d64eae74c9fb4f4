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

// What a CUDA block does of a slice: `count` elements from `first`.
struct Share {
    const Call& call;
    const Bases& bases;
    u64 slice, slot, first, count;

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
            case Where::SCRATCH: return at + (meta & WHOLE ? 0 : call.half()) + slot * stride;
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

    RC_DEVICE static constexpr u32 size(bool wide) { return wide ? sizeof(Acc) : sizeof(Raw); }

    template <class Value, u32 COUNT>
    union Pack {
        using Whole = typename Bits<COUNT * sizeof(Value)>::Type;
        Value value[COUNT];
        Whole bits;
        RC_DEVICE Pack() {}
    };
    using Raws = Pack<Raw, LANES>;
    // Accumulators in memory are as many; in registers they may be more than one load holds.
    using Accs = Pack<Acc, WIDE ? LANES : 16 / sizeof(Acc)>;
    using Factors = Acc[SRCS];

    // A source of LANES elements as it lies in memory.
    union Loaded {
        Raws raw;
        Accs acc;
        RC_DEVICE Loaded() {}
    };

    RC_DEVICE static void run(const Share& share, const u64* words) {
        u64 chunks[SRCS + DSTS];
#pragma unroll
        for (u32 k = 0; k < SRCS + DSTS; ++k)
            chunks[k] = share.address(words + 2 * k, size(k < SRCS ? wide(k) : WIDE_DST));
        Factors factors = {};
        if constexpr (REDUCES && Op::SCALES) {
#pragma unroll
            for (u32 s = 0; s < SRCS; ++s)
                if (RAW >> s & 1)
                    factors[s] = share.template factor<Acc>(words[2 * (SRCS + DSTS) + s]);
        }
        const u64 count = share.count;
        bool aligned = true;
#pragma unroll
        for (u32 k = 0; k < SRCS + DSTS; ++k) aligned = aligned && chunks[k] % 16 == 0;
        const u64 vectors = aligned ? count / LANES : 0;
        const u64 threads = movers();
        u64 at = thread_index();
        for (; at + (UNROLL - 1) * threads < vectors; at += UNROLL * threads) {
            Loaded in[UNROLL][SRCS];
#pragma unroll
            for (u32 u = 0; u < UNROLL; ++u)
#pragma unroll
                for (u32 s = 0; s < SRCS; ++s) fetch(in[u][s], chunks[s], at + u * threads, s);
#pragma unroll
            for (u32 u = 0; u < UNROLL; ++u) finish(in[u], chunks, at + u * threads, factors);
        }
        for (; at < vectors; at += threads) {
            Loaded in[SRCS];
#pragma unroll
            for (u32 s = 0; s < SRCS; ++s) fetch(in[s], chunks[s], at, s);
            finish(in, chunks, at, factors);
        }
        for (u64 i = vectors * LANES + thread_index(); i < count; i += threads)
            element(chunks, i, factors);
    }

    RC_DEVICE static bool wide(u32 source) { return WIDE_SRCS >> source & 1; }

    RC_DEVICE static void fetch(Loaded& to, u64 chunk, u64 at, u32 source) {
        if (wide(source)) {
            to.acc.bits = load<Vector>(chunk + at * 16);
        } else {
            to.raw.bits = load<typename Raws::Whole>(chunk + at * sizeof(Raws));
        }
    }

    RC_DEVICE static Acc operand(const Loaded& from, u32 source, u32 lane, const Factors& factors) {
        if (wide(source)) return from.acc.value[lane];
        return widened(from.raw.value[lane], source, factors);
    }

    RC_DEVICE static Acc widened(Raw value, u32 source, const Factors& factors) {
        return (RAW >> source & 1) ? Op::load(value, factors[source]) : T::widen(value);
    }

    RC_DEVICE static Raw rounded(Acc total) {
        return T::narrow(FINAL ? Op::finish(total, RC_RANKS) : total);
    }

    RC_DEVICE static void finish(const Loaded (&in)[SRCS], const u64* chunks, u64 at,
                                 const Factors& factors) {
        if constexpr (!REDUCES) {
#pragma unroll
            for (u32 d = 0; d < DSTS; ++d) {
                const u64 to = chunks[SRCS + d];
                if (WIDE_DST)
                    store(to + at * 16, in[0].acc.bits);
                else
                    store(to + at * sizeof(Raws), in[0].raw.bits);
            }
        } else {
            Acc totals[LANES];
#pragma unroll
            for (u32 lane = 0; lane < LANES; ++lane) {
                Acc value = operand(in[0], 0, lane, factors);
#pragma unroll
                for (u32 s = 1; s < SRCS; ++s)
                    value = Op::combine(value, operand(in[s], s, lane, factors));
                totals[lane] = value;
            }
            if constexpr (WIDE_DST) {
                Accs whole;
#pragma unroll
                for (u32 lane = 0; lane < LANES; ++lane) whole.value[lane] = totals[lane];
#pragma unroll
                for (u32 d = 0; d < DSTS; ++d) store(chunks[SRCS + d] + at * 16, whole.bits);
            } else {
                Raws narrow;
#pragma unroll
                for (u32 lane = 0; lane < LANES; ++lane) narrow.value[lane] = rounded(totals[lane]);
#pragma unroll
                for (u32 d = 0; d < DSTS; ++d)
                    store(chunks[SRCS + d] + at * sizeof(Raws), narrow.bits);
            }
        }
    }

    RC_DEVICE static void element(const u64* chunks, u64 i, const Factors& factors) {
        Acc total{};
        Raw moved{};
#pragma unroll
        for (u32 s = 0; s < SRCS; ++s) {
            const u64 from = chunks[s] + i * size(wide(s));
            Acc value{};
            if (wide(s)) {
                value = load<Acc>(from);
            } else {
                moved = load<Raw>(from);
                if (REDUCES) value = widened(moved, s, factors);
            }
            total = s == 0 ? value : Op::combine(total, value);
        }
        if (REDUCES && !WIDE_DST) moved = rounded(total);
#pragma unroll
        for (u32 d = 0; d < DSTS; ++d) {
            const u64 to = chunks[SRCS + d] + i * size(WIDE_DST);
            if (WIDE_DST)
                store(to, total);
            else
                store(to, moved);
        }
    }
};

}  // namespace rc::simple
