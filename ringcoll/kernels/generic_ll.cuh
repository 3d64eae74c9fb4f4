// Protocols LL and LL128 by a generic kernel: a row's sources are polled one after the other.
#pragma once

#include "generic.cuh"
#include "ll.cuh"

namespace rc::ll {

using generic::Value;

// The shape of a batch: {rows 8, sources 8, destinations 8, reduces 1, final 1, raw 32}, the kinds
// of its sources, of its destinations. The last word of all is the number of batches.
struct Shape {
    static constexpr u32 WORDS = 3;
    u32 rows, srcs, dsts, raw;
    bool reduces, final;
    u64 src_kinds, dst_kinds;

    RC_DEVICE explicit Shape(const u64* words)
        : rows(words[0] & 255),
          srcs(words[0] >> 8 & 255),
          dsts(words[0] >> 16 & 255),
          raw(static_cast<u32>(words[0] >> 32)),
          reduces(words[0] >> 24 & 1),
          final(words[0] >> 25 & 1),
          src_kinds(words[1]),
          dst_kinds(words[2]) {}

    RC_DEVICE Kind src(u32 s) const { return static_cast<Kind>(src_kinds >> (2 * s) & 3); }
    RC_DEVICE Kind dst(u32 d) const { return static_cast<Kind>(dst_kinds >> (2 * d) & 3); }
};

// The elements of a pack, or its accumulators: at most 16 elements of a byte as 4 bytes each.
struct Held {
    u64 words[8];

    RC_DEVICE Value get(u32 i, u32 bytes) const {
        if (bytes == 16) return {{words[2 * i], words[2 * i + 1]}};
        const u64 word = words[i * bytes / 8] >> (i * bytes % 8 * 8);
        return {{bytes == 8 ? word : word & ((u64{1} << 8 * bytes) - 1), 0}};
    }
    RC_DEVICE void set(u32 i, u32 bytes, const Value& value) {
        if (bytes >= 8) {
            words[i * bytes / 8] = value.words[0];
            if (bytes == 16) words[2 * i + 1] = value.words[1];
            return;
        }
        const u32 shift = i * bytes % 8 * 8;
        const u64 mask = (u64{1} << 8 * bytes) - 1;
        u64& word = words[i * bytes / 8];
        word = (word & ~(mask << shift)) | (value.words[0] & mask) << shift;
    }
};

// A thread and the pack on which it works: Thread, with the sizes of a pack as values.
template <class Text>
struct GenericThread {
    Call& call;
    const generic::Elements elements;
    const u32 most;  // elements of a pack
    u64 pack;
    Held kept;
    bool alive = true;

    RC_DEVICE GenericThread(Call& c)
        : call(c),
          elements(c.local),
          most(elements.item < 8 * HELD ? 8 * HELD / elements.item : 1),
          pack(0),
          kept{} {}

    RC_DEVICE u32 lane() const { return static_cast<u32>(pack % LANES); }
    RC_DEVICE bool last() const { return lane() == LANES - 1; }
    RC_DEVICE u64 before_line() const { return pack / LANES * LINE_WORDS * 8; }
    RC_DEVICE u64 before() const {
        return LANES == 1 ? pack * most * elements.item : before_line() + 16 * lane();
    }
    RC_DEVICE u32 here(u64 count) const {
        const u32 whole = LANES > 1 && last() ? most / 2 : most;
        const u64 first = before() / elements.item;
        if (count <= first) return 0;
        return count - first < whole ? static_cast<u32>(count - first) : whole;
    }
    RC_DEVICE bool has_line(u64 count) const {
        return LANES == 1 ? here(count) != 0 : before_line() < count * elements.item;
    }
    RC_DEVICE u32 lines(Kind kind) const {
        if (kind != Kind::LINES && kind != Kind::PARTIAL) return 0;
        return most * elements.size(kind == Kind::PARTIAL) / 8 / HELD;
    }
    RC_DEVICE u64 line(u64 chunk, u32 lines, u32 i) const {
        return chunk + call.half() + ((pack / LANES * lines + i) * LANES + lane()) * 16;
    }

    // All rows of the call, for this pack.
    RC_DEVICE void run() {
        const u64 *words = call.local.words, *shapes = words + RC_WORDS - 1;
        const u32 batches = static_cast<u32>(*shapes);
        for (u32 step = 0; step < batches; ++step) {
            const Shape shape(shapes -= Shape::WORDS);
            for (u32 r = 0; r < shape.rows && alive; ++r) {
                alive = row(shape, words, step, r);
                words += 1 + shape.srcs + shape.dsts;
                if (shape.reduces && elements.scales) words += shape.srcs;
            }
        }
    }

    // False: aborted. The threads of a line stay together.
    RC_DEVICE bool row(const Shape& shape, const u64* words, u32 step, u32 r) {
        const u32 count = here(words[0]);
        if (pack < call.args.packs) trace(call, 0, step << 16 | r, pack, count);
        if (LANES == 1 && !has_line(words[0])) return true;
        Held total{}, found{};
#pragma unroll 1
        for (u32 s = 0; s < shape.srcs; ++s) {
            const u32 number = SOURCE | (r * shape.srcs + s);
            const bool raw = shape.raw >> s & 1, wide = shape.src(s) == Kind::PARTIAL;
            Value factor{};
            if (raw && elements.scales && shape.reduces &&
                !await_factor(words[1 + shape.srcs + shape.dsts + s], factor))
                return false;
            if (!fetch(shape.src(s), words, words[1 + s], found, number, step)) return false;
            if (!shape.reduces) break;
#pragma unroll 1
            for (u32 i = 0; i < count; ++i) {
                Value term = found.get(i, elements.size(wide));
                if (!wide) term = generic::loaded<Text>(elements, term, raw, factor);
                if (s != 0) term = generic::combined<Text>(elements, partial(total, i), term);
                total.set(i, elements.acc, term);
            }
        }
        if (shape.reduces) {
#pragma unroll 1
            for (u32 i = 0; i < count; ++i) {
                const Value whole = partial(total, i);
                kept.set(i, elements.item, generic::narrowed<Text>(elements, whole, shape.final));
            }
            found = kept;
        }
#pragma unroll 1
        for (u32 d = 0; d < shape.dsts; ++d) {
            const Kind kind = shape.dst(d);
            const bool wide = kind == Kind::PARTIAL && shape.reduces;
            put(kind, words[0], words[1 + shape.srcs + d], wide ? total : found);
        }
        return true;
    }

    RC_DEVICE Value partial(const Held& total, u32 i) const {
        const Value found = total.get(i, elements.acc);
        return elements.integers ? elements.cut(found) : found;
    }

    RC_DEVICE bool await_factor(u64 owner, Value& factor) {
        bool ok = true;
        for (u32 k = 0; ok && k < FACTOR_LINES; ++k)
            ok = call.await_hello(static_cast<u32>(owner), call.epoch, HELLO_LINES + k,
                                  factor.words[k]);
        return LANES == 1 ? ok : !warp_any(!ok);
    }

    // What a source holds for this pack; false: aborted.
    RC_DEVICE bool fetch(Kind kind, const u64* words, u64 chunk, Held& into, u32 number, u32 step) {
        if (kind == Kind::KEPT) into = kept;
        if (kind == Kind::USER) read_user(chunk + before(), here(words[0]), into);
        const u32 each = lines(kind);
        if (each == 0) return true;
        if (!(LANES == 1 ? poll_lines(chunk, each, number, step)
                         : poll_flags(words[0], chunk, each, number, step)))
            return false;
#pragma unroll 1
        for (u32 i = 0; i < each; ++i) {
            const Vector v = ld_relaxed_sys_v4_u32(line(chunk, each, i));
            if (LANES == 1) {
                into.words[i] = data_of(v);
            } else {
                into.words[i] = static_cast<u64>(v.y) << 32 | v.x;
                into.words[each + i] = static_cast<u64>(v.w) << 32 | v.z;
            }
        }
        return true;
    }

    RC_DEVICE bool poll_lines(u64 chunk, u32 each, u32 number, u32 step) {
        u32 i = 0;
        for (u32 polls = 1; i < each; ++polls) {
            if (arrived(ld_relaxed_sys_v4_u32(line(chunk, each, i)), call.flag())) {
                ++i;
                continue;
            }
            if (unlikely(polls % POLLS_PER_CHECK == 0) && call.check_abort(polls, number, step))
                return false;
            pause();
        }
        return true;
    }

    RC_DEVICE bool poll_flags(u64 count, u64 chunk, u32 each, u32 number, u32 step) {
        for (u32 polls = 1;; ++polls) {
            bool missing = false;
            for (u32 i = 0; last() && has_line(count) && i < each; ++i)
                missing |= ld_relaxed_sys_u64(line(chunk, each, i) + 8) != call.epoch;
            if (!warp_any(missing)) return true;
            if (unlikely(polls % POLLS_PER_CHECK == 0) &&
                warp_any(missing && call.check_abort(polls, number, step)))
                return false;
            pause();
        }
    }

    RC_DEVICE void put(Kind kind, u64 count, u64 chunk, const Held& from) {
        if (kind == Kind::USER) write_user(chunk + before(), here(count), from);
        const u32 each = lines(kind);
#pragma unroll 1
        for (u32 i = 0; i < each; ++i) {
            const u64 at = line(chunk, each, i);
            if (LANES == 1) {
                st_relaxed_sys_ll(at, from.words[i], call.flag());
            } else {
                const u64 high = last() ? call.epoch : from.words[each + i];
                st_relaxed_sys_v2_u64_if(has_line(count), at, from.words[i], high);
            }
        }
    }

    RC_DEVICE void read_user(u64 at, u32 count, Held& into) const {
#pragma unroll 1
        for (u32 i = 0; i < count; ++i)
            into.set(i, elements.item, generic::load_value(at + i * elements.item, elements.item));
    }

    RC_DEVICE void write_user(u64 at, u32 count, const Held& from) const {
#pragma unroll 1
        for (u32 i = 0; i < count; ++i)
            generic::store_value(at + i * elements.item, elements.item, from.get(i, elements.item));
    }
};

// What `run` wants to know of a program.
template <class Text>
struct GenericProgram {
    struct Op {
        static constexpr bool SCALES = true;  // factors go out whether or not they are read
    };
    struct First {
        struct Users {};
        RC_DEVICE static Users fetch(const GenericThread<Text>&, u32) { return {}; }
        RC_DEVICE static void run(GenericThread<Text>&, const Users&, u32, u32) {}
    };
    RC_DEVICE static void rest(GenericThread<Text>& thread) { thread.run(); }
};

template <class Text>
RC_DEVICE void run_generic(const Args& args, const Local& local) {
    run<void, GenericProgram<Text>, GenericThread<Text>>(args, local);
}

}  // namespace rc::ll
