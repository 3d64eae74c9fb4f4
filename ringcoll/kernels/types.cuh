// Element types: how each is stored, in what it accumulates, and the conversions between the two.
//
// A type is a tag: `Raw` is an element in memory, `Acc` a value in the accumulator, `wide` says
// that the two differ. `widen` is exact; `narrow` rounds to nearest even, bit for bit as numpy's
// and ml_dtypes' astype do. The table of ringcoll.dtypes is the definition.
#pragma once

// In angle brackets, so that the include path chooses: this folder's file, or the tests' for a CPU.
#include <system.cuh>

namespace rc {

// Aligned as its parts, as numpy's complex numbers are.
template <class Part>
struct Complex {
    Part real, imag;
};

// A truth value is a byte of 0 or 1, and unlike u8 in its arithmetic.
enum class Truth : u8 { no, yes };

// A type that accumulates in itself.
template <class Value>
struct Plain {
    using Raw = Value;
    using Acc = Value;
    static constexpr bool wide = false;
    RC_DEVICE static Acc widen(Raw raw) { return raw; }
    RC_DEVICE static Raw narrow(Acc value) { return value; }
};

struct Int8 : Plain<i8> {};
struct UInt8 : Plain<u8> {};
struct Int16 : Plain<i16> {};
struct UInt16 : Plain<u16> {};
struct Int32 : Plain<i32> {};
struct UInt32 : Plain<u32> {};
struct Int64 : Plain<i64> {};
struct UInt64 : Plain<u64> {};
struct Float32 : Plain<float> {};
struct Float64 : Plain<double> {};
struct Complex64 : Plain<Complex<float>> {};
struct Complex128 : Plain<Complex<double>> {};

struct Bool : Plain<Truth> {
    // Another library's memory may hold any byte for true.
    RC_DEVICE static Acc widen(Raw raw) { return raw == Truth::no ? Truth::no : Truth::yes; }
};

struct Float16 {
    using Raw = u16;
    using Acc = float;
    static constexpr bool wide = true;
    RC_DEVICE static Acc widen(Raw raw) { return f32_from_f16(raw); }
    RC_DEVICE static Raw narrow(Acc value) { return f16_from_f32(value); }
};

// The parts of a float's bits.
constexpr u32 kSign = 0x80000000u;
constexpr u32 kInfinity = 0x7f800000u;

struct BFloat16 {
    using Raw = u16;
    using Acc = float;
    static constexpr bool wide = true;
    RC_DEVICE static Acc widen(Raw raw) { return float_of(u32(raw) << 16); }
    RC_DEVICE static Raw narrow(Acc value) {
#if __CUDA_ARCH__ >= 800
        return bf16_from_f32(value);
#else
        const u32 word = bits(value);
        // Rounding a NaN could carry it to infinity or zero: it is cut off and made quiet instead.
        const bool nan = (word & ~kSign) > kInfinity;
        return Raw((nan ? word | 0x00400000u : word + 0x7fffu + (word >> 16 & 1)) >> 16);
#endif
    }
};

// Round a non-negative float's bits to a float with `mantissa` bits and exponent bias `bias`, whose
// exponent has no upper end: what overflows, infinity and NaN come out beyond the largest value.
template <u32 mantissa, u32 bias>
RC_DEVICE u32 rounded(u32 magnitude) {
    constexpr u32 dropped = 23 - mantissa;
    constexpr u32 least_normal = (127 + 1 - bias) << 23;
    // The power of two at which a float's last place is the small type's smallest subnormal: adding
    // it rounds there, and leaves the count of such places in the low bits.
    constexpr u32 grid = least_normal + (dropped << 23);
    const u32 subnormal = bits(add(float_of(magnitude), float_of(grid))) - grid;
    const u32 half = (1u << (dropped - 1)) - 1 + (magnitude >> dropped & 1);
    const u32 normal = ((magnitude + half) >> dropped) - ((127 - bias) << mantissa);
    // Both are computed, so that the lanes of a warp need not part.
    return magnitude < least_normal ? subnormal : normal;
}

// Finite only: there is no infinity, all ones is NaN, and what overflows is NaN.
struct Float8E4M3 {
    using Raw = u8;
    using Acc = float;
    static constexpr bool wide = true;
    RC_DEVICE static Acc widen(Raw raw) {
        const u32 sign = u32(raw & 0x80) << 24;
        const u32 magnitude = raw & 0x7f;
        // Read as a float's bits it is too small by 2^(127 - 7), subnormals as well.
        const u32 scaled = bits(mul(float_of(magnitude << 20), 0x1p120f));
        return float_of(sign | (magnitude == 0x7f ? kInfinity | 1 << 20 : scaled));
    }
    RC_DEVICE static Raw narrow(Acc value) {
        const u32 word = bits(value);
        const u32 magnitude = rounded<3, 7>(word & ~kSign);
        return Raw((word >> 24 & 0x80) | (magnitude < 0x7f ? magnitude : 0x7f));
    }
};

// The upper byte of a float16; what overflows is infinity.
struct Float8E5M2 {
    using Raw = u8;
    using Acc = float;
    static constexpr bool wide = true;
    RC_DEVICE static Acc widen(Raw raw) { return f32_from_f16(u16(raw << 8)); }
    RC_DEVICE static Raw narrow(Acc value) {
        const u32 word = bits(value);
        const u32 unsigned_word = word & ~kSign;
        const u32 magnitude = rounded<2, 15>(unsigned_word);
        const u32 beyond = unsigned_word > kInfinity ? 0x7e : 0x7c;
        return Raw((word >> 24 & 0x80) | (magnitude < 0x7c ? magnitude : beyond));
    }
};

}  // namespace rc
