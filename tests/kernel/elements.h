// SPDX-License-Identifier: MIT
// Elements of every dtype as doubles, and tensors of them on hostile memory: guard zones around, gaps inside.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "plan/kernel.h"

namespace attention {

using namespace spattn;

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};
inline double widen(double x) { return x; }
inline double widen(float x) { return x; }
inline double widen(Bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline double widen_by_definition(F16 x) {
    const int exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
    const double size = exponent == 31 ? (mantissa ? not_a_number : std::numeric_limits<double>::infinity())
                        : exponent     ? std::ldexp(1024 + mantissa, exponent - 25)
                                       : std::ldexp(mantissa, -24);
    return x.bits & 0x8000 ? -size : size;
}
// Each of them once: conversions were half of the time of the tests.
inline const std::vector<double> every_f16 = [] {
    std::vector<double> values;
    for (uint32_t bits = 0; bits < 65536; ++bits) values.push_back(widen_by_definition({uint16_t(bits)}));
    return values;
}();
inline double widen(F16 x) { return every_f16[x.bits]; }

// To nearest, ties to even. 16-bit elements come from what a float holds.
inline void narrow(double x, double& to) { to = x; }
inline void narrow(double x, float& to) { to = float(x); }
inline void narrow(double x, Bf16& to) {
    const float value = float(x);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    to.bits = std::isnan(x) ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
// Steps of float16 are 2^-24 below 2^-14, and a 1024th of the power of two below it from there on. Rounded up, bits run
// over into the next exponent, and from the last one into infinity.
inline void narrow(double x, F16& to) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const double size = std::abs(x);
    if (!(size < 65536)) {
        to.bits = uint16_t(sign | (std::isnan(x) ? 0x7e00 : 0x7c00));
        return;
    }
    const int exponent = size < 0x1p-14 ? -14 : std::ilogb(size);
    const int steps = int(std::nearbyint(std::ldexp(size, 10 - exponent)));
    to.bits = uint16_t(sign | (((exponent + 14) << 10) + steps));
}

template <class T>
double round_to(double x) {
    T rounded;
    narrow(x, rounded);
    return widen(rounded);
}
inline double round_to(Dtype dtype, double x) {
    switch (dtype) {
        case Dtype::f32: return round_to<float>(x);
        case Dtype::f16: return round_to<F16>(x);
        case Dtype::f64: return x;
        case Dtype::bf16: return round_to<Bf16>(x);
    }
    std::abort();
}

// gaps: columns are 2 apart; shared: one head of inputs for all; lines: every other row starts a cache line.
enum class Axes { bhsd, bshd, gaps, shared, lines };

using Values = std::vector<double>;  // [batch][heads][rows][columns], whatever the elements

template <class T>
class Tensor {
public:
    Tensor(Axes axes, int64_t batch, int64_t heads, int64_t rows, int64_t columns)
        : shape_{batch, heads, rows, columns} {
        switch (axes) {
            case Axes::bhsd:
                strides_ = {heads * rows * columns, rows * columns, columns, 1};
                break;
            case Axes::bshd:
                strides_ = {rows * heads * columns, columns, heads * columns, 1};
                break;
            case Axes::gaps:
                strides_ = {heads * (rows * (2 * columns + 3) + 7) + 1, rows * (2 * columns + 3) + 7, 2 * columns + 3,
                            2};
                break;
            case Axes::shared:
                strides_ = {0, 0, columns, 1};
                break;
            case Axes::lines: {
                const int64_t row = columns + line / 2;
                strides_ = {heads * rows * row, rows * row, row, 1};
                break;
            }
        }
        int64_t last = 0;
        for (size_t i = 0; i < 4; ++i) last += (shape_[i] - 1) * strides_[i];
        memory_.resize(size_t(last + 1 + 2 * guard + line));
        std::memset(memory_.data(), sentinel, memory_.size() * sizeof(T));
        if (axes == Axes::lines)
            while (reinterpret_cast<uintptr_t>(memory_.data() + first_) % 64) ++first_;
    }

    void set(const Values& values) {
        size_t i = 0;
        each([&](int64_t at) { narrow(values[i++], memory_[size_t(at)]); });
    }
    Values values() {
        Values all;
        each([&](int64_t at) { all.push_back(widen(memory_[size_t(at)])); });
        return all;
    }
    TensorView view() { return {memory_.data() + first_, strides_[0], strides_[1], strides_[2], strides_[3]}; }

    // Nothing outside the view was written.
    bool kept_guards() {
        std::vector<char> inside(memory_.size());
        each([&](int64_t at) { inside[size_t(at)] = 1; });
        T untouched;
        std::memset(&untouched, sentinel, sizeof untouched);
        for (size_t i = 0; i < memory_.size(); ++i)
            if (!inside[i] && std::memcmp(&memory_[i], &untouched, sizeof(T))) return false;
        return true;
    }

private:
    static constexpr int64_t guard = 67;  // odd: unless asked for, no tensor is aligned to more than an element
    static constexpr int64_t line = 64 / int64_t(sizeof(T));
    static constexpr int sentinel = 0xa5;

    template <class Body>
    void each(Body body) const {
        for (int64_t b = 0; b < shape_[0]; ++b)
            for (int64_t h = 0; h < shape_[1]; ++h)
                for (int64_t r = 0; r < shape_[2]; ++r)
                    for (int64_t c = 0; c < shape_[3]; ++c)
                        body(first_ + b * strides_[0] + h * strides_[1] + r * strides_[2] + c * strides_[3]);
    }

    std::array<int64_t, 4> shape_, strides_;
    std::vector<T> memory_;
    int64_t first_ = guard;
};

}  // namespace attention
