// Generic kernels: element type, operator and shapes of rows are values of the launch.
//
// Loading a kernel waits for all work in flight on its device, so one that is loaded early carries
// calls whose own kernel cannot be loaded now. It has the specialised kernel's protocol, words and
// grid: some ranks may run one and some the other. The shapes of rows, which a specialised kernel
// has in its text, stand at the end of the words, the first one last.
#pragma once

#include "ops.cuh"
#include "program.cuh"

namespace rc::generic {

// An element or an accumulator of any type; bytes that it does not fill are 0.
struct Value {
    u64 words[2];
};

template <class T>
RC_DEVICE T as(const Value& value) {
    Factor<T> found;
    found.words[0] = value.words[0];
    found.words[1] = value.words[1];
    return found.value;
}

template <class T>
RC_DEVICE Value value_of(T element) {
    Factor<T> found;
    found.value = element;
    return {{found.words[0], found.words[1]}};
}

// What a launch says of its elements: Local.program, see ``elements_word`` of
// executors/cuda/source.py.
struct Elements {
    u32 type, pair;  // the element type; the operator on its accumulator
    u32 item, acc;   // bytes of an element, and of an accumulator
    bool integers, negative, scales, dual, gated;

    RC_DEVICE explicit Elements(const Local& local) : Elements(local.program) {}
    RC_DEVICE explicit Elements(u32 word)
        : type(word & 255),
          pair(word >> 8 & 255),
          item(word >> 16 & 31),
          acc(word >> 21 & 31),
          integers(word >> 26 & 1),
          negative(word >> 27 & 1),
          scales(word >> 28 & 1),
          dual(word >> 29 & 1),
          gated(word >> 30 & 1) {}

    RC_DEVICE u32 size(bool wide) const { return wide ? acc : item; }

    // Integers are computed in 64 bits and cut to their own after each step, which has the bits of
    // the narrow computation: all operators but division are exact modulo a power of two, and what
    // is divided has been cut.
    RC_DEVICE Value cut(const Value& value) const {
        const u32 rest = 64 - 8 * item;
        const u64 high = value.words[0] << rest;
        return {{negative ? static_cast<u64>(static_cast<i64>(high) >> rest) : high >> rest, 0}};
    }
};

// An element type's conversions.
template <class T>
struct Conversion {
    RC_DEVICE static Value run(bool widens, const Value& value) {
        if (widens) return value_of(T::widen(as<typename T::Raw>(value)));
        return value_of(T::narrow(as<typename T::Acc>(value)));
    }
};

// An operator on an accumulator.
enum class Step { LOAD, COMBINE, FINISH };

template <class Op>
struct Operation {
    RC_DEVICE static Value run(Step step, const Value& left, const Value& right) {
        using Acc = typename Op::Acc;
        const Acc first = as<Acc>(left), second = as<Acc>(right);
        if (step == Step::LOAD) return value_of<Acc>(Op::load(first, second));
        if (step == Step::FINISH) return value_of<Acc>(Op::finish(first, RC_RANKS));
        return value_of<Acc>(Op::combine(first, second));
    }
};

// A text defines Text::convert and Text::operate: a switch over all types, and over all operators.
// Each stands in a kernel once.
template <class Text>
RC_APART static Value convert(u32 type, bool widens, Value value) {
    return Text::convert(type, widens, value);
}
template <class Text>
RC_APART static Value operate(u32 pair, Step step, Value left, Value right) {
    return Text::operate(pair, step, left, right);
}

// A source in the accumulator: a rank's contribution is loaded by the operator, a result between
// two steps only widened.
template <class Text>
RC_DEVICE Value loaded(const Elements& of, Value raw, bool contribution, const Value& factor) {
    raw = of.integers ? of.cut(raw) : convert<Text>(of.type, true, raw);
    if (!contribution) return raw;
    raw = operate<Text>(of.pair, Step::LOAD, raw, factor);
    return of.integers ? of.cut(raw) : raw;
}

template <class Text>
RC_DEVICE Value combined(const Elements& of, const Value& left, const Value& right) {
    const Value found = operate<Text>(of.pair, Step::COMBINE, left, right);
    return of.integers ? of.cut(found) : found;
}

template <class Text>
RC_DEVICE Value narrowed(const Elements& of, Value total, bool whole) {
    if (whole) total = operate<Text>(of.pair, Step::FINISH, total, Value{});
    return of.integers ? total : convert<Text>(of.type, false, total);
}

// An element in memory, aligned to 8 bytes at most.
RC_DEVICE Value load_value(u64 at, u32 bytes) {
    switch (bytes) {
        case 1: return {{load<u8>(at), 0}};
        case 2: return {{load<u16>(at), 0}};
        case 4: return {{load<u32>(at), 0}};
        case 8: return {{static_cast<u64>(load<u32>(at + 4)) << 32 | load<u32>(at), 0}};
        default: return {{load<u64>(at), load<u64>(at + 8)}};
    }
}

RC_DEVICE void store_value(u64 at, u32 bytes, const Value& value) {
    switch (bytes) {
        case 1: return store(at, static_cast<u8>(value.words[0]));
        case 2: return store(at, static_cast<u16>(value.words[0]));
        case 4: return store(at, static_cast<u32>(value.words[0]));
        case 8:
            store(at, static_cast<u32>(value.words[0]));
            return store(at + 4, static_cast<u32>(value.words[0] >> 32));
        default: store(at, value.words[0]); return store(at + 8, value.words[1]);
    }
}

}  // namespace rc::generic
