// Protocol Simple by a generic kernel: what a block does with its share, one element at a time.
#pragma once

#include "generic.cuh"
#include "simple.cuh"

namespace rc::simple {

using generic::Value;

// Stands for an element type that only the launch knows.
struct Generic {};
template <>
RC_DEVICE u64 item_bytes<Generic>(const Local& local) {
    return generic::Elements(local).item;
}

struct GenericOp {};
template <>
RC_DEVICE bool scales<GenericOp>(const Local& local) {
    return generic::Elements(local).scales;
}

// The shape of a move: {sources 8, destinations 8, reduces 1, final 1, wide destination 1}, bits of
// {raw sources 32, wide sources 32}.
struct Shape {
    static constexpr u32 WORDS = 2;
    u32 srcs, dsts, raw, wide;
    bool reduces, final, wide_dst;

    RC_DEVICE explicit Shape(const u64* words)
        : srcs(words[0] & 255),
          dsts(words[0] >> 8 & 255),
          raw(static_cast<u32>(words[1])),
          wide(static_cast<u32>(words[1] >> 32)),
          reduces(words[0] >> 16 & 1),
          final(words[0] >> 17 & 1),
          wide_dst(words[0] >> 18 & 1) {}
};

template <class Text>
struct GenericProgram {
    using Op = GenericOp;

    RC_APART static void move(u32 kind, const Share& share, const u64* words) {
        const Shape shape(share.local.words + RC_WORDS - Shape::WORDS * (kind + 1));
        const generic::Elements elements(share.local);
        if (shape.reduces) return reduce(shape, elements, share, words);
        const u32 size = elements.size(shape.wide_dst);
        const u64 bytes = share.count * size;
        u64 bits = 0;
        for (u32 k = 0; k < 1 + shape.dsts; ++k) bits |= address(share, words + 2 * k, size);
        u64 done = 0;
        if (bits % 16 == 0) done = copy<Vector, 4>(shape, share, words, size, 0, bytes);
        if (bits % 4 == 0) done = copy<u32, 1>(shape, share, words, size, done, bytes);
        copy<u8, 1>(shape, share, words, size, done, bytes);
    }

    // Copy the whole words from byte `done` on, UNROLL at once; returns where they end.
    template <class Word, u32 UNROLL>
    RC_DEVICE static u64 copy(const Shape& shape, const Share& share, const u64* words, u32 size,
                              u64 done, u64 bytes) {
        const u64 step = movers() * sizeof(Word), end = bytes / sizeof(Word) * sizeof(Word);
        const u64 from = address(share, words, size);
        for (u64 at = done + thread_index() * sizeof(Word); at < end; at += UNROLL * step) {
            Word in[UNROLL];
#pragma unroll
            for (u32 u = 0; u < UNROLL; ++u)
                if (at + u * step < end) in[u] = load<Word>(from + at + u * step);
#pragma unroll 1
            for (u32 d = 1; d <= shape.dsts; ++d) {
                const u64 to = address(share, words + 2 * d, size);
#pragma unroll
                for (u32 u = 0; u < UNROLL; ++u)
                    if (at + u * step < end) store(to + at + u * step, in[u]);
            }
        }
        return end;
    }

    // Not inlined at all of its places: that would compile twice as long.
    RC_APART static u64 address(const Share& share, const u64* words, u32 size) {
        return share.address(words, size);
    }

    RC_DEVICE static void reduce(const Shape& shape, const generic::Elements& elements,
                                 const Share& share, const u64* words) {
        const u32 chunks = shape.srcs + shape.dsts;
#pragma unroll 1
        for (u64 i = thread_index(); i < share.count; i += movers()) {
            Value total{};
#pragma unroll 1
            for (u32 s = 0; s < shape.srcs; ++s) {
                const bool wide = shape.wide >> s & 1, raw = shape.raw >> s & 1;
                const u32 size = elements.size(wide);
                Value term =
                    generic::load_value(address(share, words + 2 * s, size) + i * size, size);
                Value factor{};
                if (elements.scales && raw)
                    for (u32 k = 0; k < FACTOR_LINES; ++k)
                        factor.words[k] = share.bases.factors[words[2 * chunks + s]][k];
                if (!wide) term = generic::loaded<Text>(elements, term, raw, factor);
                total = s == 0 ? term : generic::combined<Text>(elements, total, term);
            }
            if (!shape.wide_dst) total = generic::narrowed<Text>(elements, total, shape.final);
            const u32 size = elements.size(shape.wide_dst);
#pragma unroll 1
            for (u32 k = shape.srcs; k < chunks; ++k)
                generic::store_value(address(share, words + 2 * k, size) + i * size, size, total);
        }
    }
};

template <class Text>
RC_DEVICE void run_generic(const Args& args, const Local& local) {
    const generic::Elements elements(local);
    run<Generic, GenericProgram<Text>>(args, local, elements.dual, elements.gated);
}

}  // namespace rc::simple
