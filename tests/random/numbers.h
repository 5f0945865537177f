// SPDX-License-Identifier: MIT
// Random numbers, and elements of every dtype as doubles.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>

#include "sparseattn/sparseattn.h"

namespace random_test {

// splitmix64: a problem's numbers must not wait for a generator with a large state, nor must an element's.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = state_ += 0x9E3779B97F4A7C15;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
        return z ^ (z >> 31);
    }
    int64_t in(int64_t low, int64_t high) { return low + int64_t(next() % uint64_t(high - low + 1)); }
    bool one_in(int64_t n) { return in(1, n) == 1; }
    double unit() { return double(next() >> 11) * 0x1p-53; }  // [0, 1)
    // Draws a size, 1 .. most, small ones as often as large ones.
    int64_t size(int64_t most) { return most <= 1 ? 1 : int64_t(std::exp(unit() * std::log(double(most) + 1))); }
    template <class T>
    T of(std::initializer_list<T> values) {
        return values.begin()[in(0, int64_t(values.size()) - 1)];
    }
    // Nearly normal, of mean 0 and variance 1, within +-3.5: the sum of four uniform numbers of 16 bits.
    double normal() {
        const uint64_t z = next();
        const uint64_t sum = (z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48);
        return (double(sum) - 2 * 65535) * (1.7320508075688772 / 65535);
    }

private:
    uint64_t state_;
};

// An element type, and how exactly a kernel may be expected to compute with it.
struct Type {
    const char* name;
    spattn_dtype dtype;
    double sum;      // unit roundoff of sums and exponentials
    double weight;   // relative error of a probability as an operand of a product
    double rounded;  // relative error of a result as it is stored
    double tiniest;  // absolute error of a result: what lies below it may be flushed to zero
    double lightest; // the same of a probability
    double largest;  // inputs beyond this may overflow: they are hostile
    double operand;  // relative error of q and k, and of dout and v, as operands of a product
    uint32_t flags;  // of the plan
};
inline constexpr Type types[] = {
    {"f32", {SPATTN_FLOAT, 32, 1}, 0x1p-24, 0, 0x1p-23, 1e-37, 1e-37, 1e32, 0, 0},
    {"bf16", {SPATTN_BFLOAT, 16, 1}, 0x1p-24, 0x1p-8, 0x1p-8, 1e-37, 1e-37, 1e32, 0, 0},
    {"f16", {SPATTN_FLOAT, 16, 1}, 0x1p-24, 0x1p-11, 0x1p-10, 0x1p-24, 0x1p-32, 6e4, 0, 0},
    {"f64", {SPATTN_FLOAT, 64, 1}, 0x1p-53, 0, 0x1p-52, 1e-300, 1e-300, 1e290, 0, 0},
    // float32 whose plan may round operands to TF32, of a product both.
    {"tf32", {SPATTN_FLOAT, 32, 1}, 0x1p-24, 0x1.01p-10, 0x1p-23, 1e-37, 1e-37, 1e32, 0x1p-11, SPATTN_PLAN_TF32},
    // What operands of float8 stand for, and their results.
    {"bf16 from float8", {SPATTN_BFLOAT, 16, 1}, 0x1p-24, 0x1p-8, 0x1p-8, 1e-37, 1e-37, 1e32, 0, 0},
};
inline constexpr const Type& f32 = types[0];
inline constexpr const Type& bf16 = types[1];
inline constexpr const Type& bf16_from_float8 = types[5];
// q, k and v of some problems have it, or keys and values of some caches: bytes that stand for another type's elements.
inline constexpr Type float8{"float8", {SPATTN_FLOAT8_E4M3FN, 8, 1}, 0, 0, 0, 0, 0, 0, 0, 0};

namespace bits {
template <class To, class From>
To cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

struct F32 {
    using Stored = float;
    static double widen(float x) { return x; }
    static float narrow(double x) { return float(x); }
};
struct F64 {
    using Stored = double;
    static double widen(double x) { return x; }
    static double narrow(double x) { return x; }
};
struct Bf16 {
    using Stored = uint16_t;
    static double widen(uint16_t x) { return cast<float>(uint32_t(x) << 16); }
    static uint16_t narrow(double x) {
        const uint32_t b = cast<uint32_t>(float(x));
        return std::isnan(x) ? 0x7fc0 : uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
    }
};
struct F16 {
    using Stored = uint16_t;
    static double widen(uint16_t x) {
        const uint32_t magnitude = x & 0x7fffu;
        const float size = magnitude >= 0x7c00 ? cast<float>(magnitude << 13 | 0x7f800000u)
                                               : cast<float>(magnitude << 13) * 0x1p112f;
        return x & 0x8000 ? -size : size;
    }
    static uint16_t narrow(double x) {
        const float given = float(x);
        const uint32_t b = cast<uint32_t>(given) & 0x7fffffffu;
        const uint16_t sign = uint16_t(cast<uint32_t>(given) >> 16 & 0x8000u);
        if (b > 0x7f800000u) return uint16_t(sign | 0x7e00u);
        if (b >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and above
        // Below 2^-14 an ulp is 2^-24, which is an ulp of 0.5, too: the addition rounds.
        if (b < 0x38800000u) return uint16_t(sign | (cast<uint32_t>(std::fabs(given) + 0.5f) - 0x3f000000u));
        return uint16_t(sign | (b - (112u << 23) + 0xfffu + (b >> 13 & 1)) >> 13);
    }
};
struct Float8 {
    using Stored = uint8_t;
    static double widen(uint8_t x) {
        const int exponent = x >> 3 & 15, mantissa = x & 7;
        const double size = exponent ? cast<double>(uint64_t(exponent + 1016) << 52 | uint64_t(mantissa) << 49)
                                     : mantissa * 0x1p-9;
        return (x & 0x7f) == 0x7f ? std::nan("") : x & 0x80 ? -size : size;
    }
    static uint8_t narrow(double x) {
        const double size = std::fabs(x);
        const uint8_t sign = std::signbit(x) ? 0x80 : 0;
        if (std::isnan(x)) return uint8_t(sign | 0x7f);
        if (size >= 448) return uint8_t(sign | 0x7e);
        if (size < 0x1p-6) return uint8_t(sign | int(std::nearbyint(size * 0x1p9)));
        const uint64_t b = cast<uint64_t>(size);
        return uint8_t(sign | (((b + (uint64_t(1) << 48) - 1 + (b >> 49 & 1)) >> 49) - (uint64_t(1016) << 3)));
    }
};
}  // namespace bits

// Calls body(conversions) for the type's elements, so that loops are made for each of them.
template <class Body>
void with(const Type& type, Body body) {
    if (type.dtype.bits == 8) body(bits::Float8());
    else if (type.dtype.bits == 64) body(bits::F64());
    else if (type.dtype.bits == 32) body(bits::F32());
    else if (type.dtype.code == SPATTN_BFLOAT) body(bits::Bf16());
    else body(bits::F16());
}

inline constexpr double nan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double infinity = std::numeric_limits<double>::infinity();

}  // namespace random_test
