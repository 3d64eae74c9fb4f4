// Operators: `load` a raw contribution, `combine` two values, `finish` the whole, all in the
// accumulator. ringcoll.dtypes.ReduceOp is the definition; every result equals numpy's bit for bit,
// any NaN equal to any NaN. An operator that makes no sense on a type does not compile.
#pragma once

#include "types.cuh"

namespace rc {

// The unsigned type in which an integer of so many bytes wraps. Not a narrower one: C++ would
// compute in int, where the product of two u16 overflows.
template <unsigned bytes>
struct Modulo {
    using Word = u32;
};
template <>
struct Modulo<8> {
    using Word = u64;
};

// What the operators are made of, by accumulator. The primary template is the integers.
template <class Acc>
struct Algebra {
    using Word = typename Modulo<sizeof(Acc)>::Word;
    RC_DEVICE static Acc add(Acc left, Acc right) { return Acc(Word(left) + Word(right)); }
    RC_DEVICE static Acc multiply(Acc left, Acc right) { return Acc(Word(left) * Word(right)); }
    RC_DEVICE static Acc least(Acc left, Acc right) { return left < right ? left : right; }
    RC_DEVICE static Acc greatest(Acc left, Acc right) { return left > right ? left : right; }
    RC_DEVICE static Acc both(Acc left, Acc right) { return Acc(left & right); }
    RC_DEVICE static Acc either(Acc left, Acc right) { return Acc(left | right); }
    RC_DEVICE static Acc differ(Acc left, Acc right) { return Acc(left ^ right); }
    RC_DEVICE static Acc truth(Acc value) { return Acc(value != 0); }
    // Toward zero. By magnitudes: the least integer has none of its own sign, and a word holds it.
    RC_DEVICE static Acc divide(Acc total, u32 nranks) {
        if constexpr (Acc(-1) > Acc(0)) {  // unsigned
            return Acc(Word(total) / nranks);
        } else {
            const bool negative = total < 0;
            const Word quotient = (negative ? 0 - Word(total) : Word(total)) / nranks;
            return Acc(negative ? 0 - quotient : quotient);
        }
    }
};

template <>
struct Algebra<Truth> {
    RC_DEVICE static Truth both(Truth left, Truth right) { return Truth(u8(left) & u8(right)); }
    RC_DEVICE static Truth either(Truth left, Truth right) { return Truth(u8(left) | u8(right)); }
    RC_DEVICE static Truth differ(Truth left, Truth right) { return Truth(u8(left) ^ u8(right)); }
    RC_DEVICE static Truth add(Truth left, Truth right) { return either(left, right); }
    RC_DEVICE static Truth multiply(Truth left, Truth right) { return both(left, right); }
    RC_DEVICE static Truth least(Truth left, Truth right) { return both(left, right); }
    RC_DEVICE static Truth greatest(Truth left, Truth right) { return either(left, right); }
    RC_DEVICE static Truth truth(Truth value) { return value; }
};

template <class Real>
struct RealAlgebra {
    RC_DEVICE static Real add(Real left, Real right) { return rc::add(left, right); }
    RC_DEVICE static Real multiply(Real left, Real right) { return rc::mul(left, right); }
    // A NaN on either side is the result. Of zeros of unlike sign the right one is, as numpy has it
    // on x86; the processor's own minimum would order them.
    RC_DEVICE static Real least(Real left, Real right) {
        return left < right || left != left ? left : right;
    }
    RC_DEVICE static Real greatest(Real left, Real right) {
        return left > right || left != left ? left : right;
    }
    RC_DEVICE static Real truth(Real value) { return value != 0 ? Real(1) : Real(0); }
    RC_DEVICE static Real divide(Real total, u32 nranks) { return rc::div(total, Real(nranks)); }
};
template <>
struct Algebra<float> : RealAlgebra<float> {};
template <>
struct Algebra<double> : RealAlgebra<double> {};

template <class Part>
struct Algebra<Complex<Part>> {
    using Acc = Complex<Part>;
    RC_DEVICE static Acc add(Acc left, Acc right) {
        return {rc::add(left.real, right.real), rc::add(left.imag, right.imag)};
    }
    // The textbook product, each part rounded.
    RC_DEVICE static Acc multiply(Acc left, Acc right) {
        return {rc::add(rc::mul(left.real, right.real), -rc::mul(left.imag, right.imag)),
                rc::add(rc::mul(left.real, right.imag), rc::mul(left.imag, right.real))};
    }
    RC_DEVICE static Acc divide(Acc total, u32 nranks) {
        return {rc::div(total.real, Part(nranks)), rc::div(total.imag, Part(nranks))};
    }
};

// An operator that only converts what it loads, and has nothing to finish.
template <class T>
struct Operator {
    using Raw = typename T::Raw;
    using Acc = typename T::Acc;
    using Values = Algebra<Acc>;
    static constexpr bool SCALES = false;  // whether `load` uses the factor
    RC_DEVICE static Acc load(Raw raw, Acc /*factor*/) { return T::widen(raw); }
    RC_DEVICE static Acc finish(Acc total, u32 /*nranks*/) { return total; }
};

template <class T>
struct Sum : Operator<T> {
    using typename Operator<T>::Acc, typename Operator<T>::Values;
    RC_DEVICE static Acc combine(Acc left, Acc right) { return Values::add(left, right); }
};

template <class T>
struct Prod : Operator<T> {
    using typename Operator<T>::Acc, typename Operator<T>::Values;
    RC_DEVICE static Acc combine(Acc left, Acc right) { return Values::multiply(left, right); }
};

template <class T>
struct Min : Operator<T> {
    using typename Operator<T>::Acc, typename Operator<T>::Values;
    RC_DEVICE static Acc combine(Acc left, Acc right) { return Values::least(left, right); }
};

template <class T>
struct Max : Operator<T> {
    using typename Operator<T>::Acc, typename Operator<T>::Values;
    RC_DEVICE static Acc combine(Acc left, Acc right) { return Values::greatest(left, right); }
};

template <class T>
struct Avg : Sum<T> {
    using typename Operator<T>::Acc, typename Operator<T>::Values;
    RC_DEVICE static Acc finish(Acc total, u32 nranks) { return Values::divide(total, nranks); }
};

template <class T>
struct BAnd : Operator<T> {
    using typename Operator<T>::Acc, typename Operator<T>::Values;
    RC_DEVICE static Acc combine(Acc left, Acc right) { return Values::both(left, right); }
};

template <class T>
struct BOr : Operator<T> {
    using typename Operator<T>::Acc, typename Operator<T>::Values;
    RC_DEVICE static Acc combine(Acc left, Acc right) { return Values::either(left, right); }
};

template <class T>
struct BXor : Operator<T> {
    using typename Operator<T>::Acc, typename Operator<T>::Values;
    RC_DEVICE static Acc combine(Acc left, Acc right) { return Values::differ(left, right); }
};

// Logical operators see 0 and 1 only, of which they are the least and the greatest.
template <class T>
struct LAnd : Min<T> {
    using typename Operator<T>::Raw, typename Operator<T>::Acc, typename Operator<T>::Values;
    RC_DEVICE static Acc load(Raw raw, Acc /*factor*/) { return Values::truth(T::widen(raw)); }
};

template <class T>
struct LOr : Max<T> {
    using typename Operator<T>::Raw, typename Operator<T>::Acc, typename Operator<T>::Values;
    RC_DEVICE static Acc load(Raw raw, Acc /*factor*/) { return Values::truth(T::widen(raw)); }
};

// `factor` is the contributing rank's own.
template <class T>
struct PremulSum : Sum<T> {
    using typename Operator<T>::Raw, typename Operator<T>::Acc, typename Operator<T>::Values;
    static constexpr bool SCALES = true;
    RC_DEVICE static Acc load(Raw raw, Acc factor) {
        return Values::multiply(T::widen(raw), factor);
    }
};

// A factor and the words that carry it; those that it does not fill are 0.
template <class Acc>
union Factor {
    u64 words[2];
    Acc value;
    RC_DEVICE Factor() : words{0, 0} {}
    static constexpr u32 COUNT = (sizeof(Acc) + 7) / 8;
};

}  // namespace rc
