// SPDX-License-Identifier: MIT
// Tensors and buffers of one rank, on its device, and what tests know of them.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>

#include "abi/drawn_sharding.h"

namespace abi {

constexpr spattn_dtype f16{SPATTN_FLOAT, 16, 1};

// ---- elements: multiples of 1/8 from -1 to 1 are exact in every dtype, and so are their sums, but for float8 ----

template <class To, class From>
To bits_of(From x) {
    To bits;
    static_assert(sizeof bits == sizeof x);
    std::memcpy(&bits, &x, sizeof x);
    return bits;
}

inline void write_element(spattn_dtype dtype, char* to, double x) {
    const auto single = float(x);
    if (dtype.bits == 64) std::memcpy(to, &x, 8);
    else if (dtype.bits == 32) std::memcpy(to, &single, 4);
    else if (dtype.bits == 8) {
        int exponent = 0;
        const double fraction = std::frexp(std::fabs(x), &exponent);
        const auto size = x == 0 ? 0 : (exponent + 6) * 8 + int(std::ldexp(fraction, 4)) - 8;
        *to = char(size | (x < 0 ? 0x80 : 0));
    }
    else if (dtype.code == SPATTN_BFLOAT) {
        const auto bits = uint16_t(bits_of<uint32_t>(single) >> 16);
        std::memcpy(to, &bits, 2);
    } else {
        int exponent = 0;
        const double fraction = std::frexp(std::fabs(x), &exponent);  // from 0.5 to 1
        const auto size = x == 0 ? 0 : (exponent + 14) * 1024 + int(std::ldexp(fraction, 11)) - 1024;
        const auto bits = uint16_t(size | (x < 0 ? 0x8000 : 0));
        std::memcpy(to, &bits, 2);
    }
}

// The dtype of gradients and out.
inline spattn_dtype result_dtype(spattn_dtype dtype) { return dtype.bits == 8 ? bf16 : dtype; }

inline double read_element(spattn_dtype dtype, const char* from) {
    if (dtype.bits == 64) return bits_of<double>(*reinterpret_cast<const uint64_t*>(from));
    if (dtype.bits == 32) return bits_of<float>(*reinterpret_cast<const uint32_t*>(from));
    if (dtype.bits == 8) return *from & 0x80 ? -float8_size(*from & 0x7f) : float8_size(*from);
    const uint16_t bits = *reinterpret_cast<const uint16_t*>(from);
    if (dtype.code == SPATTN_BFLOAT) return bits_of<float>(uint32_t(bits) << 16);
    const int exponent = bits >> 10 & 31, digits = bits & 1023;
    const double size = exponent == 31 ? (digits ? NAN : HUGE_VAL)
                        : exponent     ? std::ldexp(1024 + digits, exponent - 25)
                                       : std::ldexp(digits, -24);
    return bits & 0x8000 ? -size : size;
}

// ---- tensors of one rank ----

// Elements [batch, heads, tokens, columns] as the problem's axes have them, or without columns [batch, heads, tokens].
class Operand {
public:
    struct Sizes {
        int64_t batch, heads, tokens, columns;  // columns 0: none
    };

    Operand(const RankDevice& on, spattn_enum axes, spattn_dtype dtype, const Sizes& sizes, int64_t spacing = 1)
        : on_(on), sizes_(sizes), dtype_(dtype), bytes_(size_t(count() * spacing) * dtype.bits / 8 + 16, untouched) {
        const auto [b, h, t, c] = sizes;
        int64_t by_batch = 0, by_head = 0, by_token = 0;
        if (!c) shape_ = {b, h, t}, by_batch = h * t, by_head = t, by_token = 1;
        else if (axes == SPATTN_BHSD) shape_ = {b, h, t, c}, by_batch = h * t * c, by_head = t * c, by_token = c;
        else shape_ = {b, t, h, c}, by_batch = h * t * c, by_head = c, by_token = h * c;
        if (axes == SPATTN_THD) shape_.erase(shape_.begin());
        steps_ = {by_batch * spacing, by_head * spacing, by_token * spacing, spacing};
        strides_.resize(shape_.size());
        int64_t step = spacing;
        for (size_t i = shape_.size(); i-- > 0; step *= shape_[i]) strides_[i] = step;
        void* const memory = on.allocate(bytes_.size());
        view_ = {memory, on.device, int32_t(shape_.size()), dtype, shape_.data(), strides_.data(), 0};
        send();
    }
    ~Operand() { on_.release(view_.data); }
    Operand(const Operand&) = delete;

    const spattn_tensor* view() const { return &view_; }
    const Sizes& sizes() const { return sizes_; }
    void send() { on_.copy(view_.data, bytes_.data(), bytes_.size()); }
    void receive() { on_.copy(bytes_.data(), view_.data, bytes_.size()); }

    double at(int64_t b, int64_t h, int64_t t, int64_t c) const { return read_element(dtype_, element(b, h, t, c)); }
    void set(int64_t b, int64_t h, int64_t t, int64_t c, double x) {
        write_element(dtype_, const_cast<char*>(element(b, h, t, c)), x);
    }
    // Whether nobody has written the element.
    bool is_untouched(int64_t b, int64_t h, int64_t t, int64_t c) const {
        const char* const x = element(b, h, t, c);
        return std::all_of(x, x + dtype_.bits / 8, [](char byte) { return byte == untouched; });
    }
    // body(batch, head, column) for each element of a token.
    template <class Body>
    void each(Body body) const {
        for (int64_t b = 0; b < sizes_.batch; ++b)
            for (int64_t h = 0; h < sizes_.heads; ++h)
                for (int64_t c = 0; c < std::max<int64_t>(sizes_.columns, 1); ++c) body(b, h, c);
    }
    // The tokens of `from` in this order.
    void take(const Operand& from, const std::vector<int64_t>& tokens) {
        for (size_t row = 0; row < tokens.size(); ++row)
            each([&](int64_t b, int64_t h, int64_t c) { set(b, h, int64_t(row), c, from.at(b, h, tokens[row], c)); });
        send();
    }
    void draw(uint32_t seed, double unit = 0.125) {
        std::mt19937 random(seed);
        for (int64_t t = 0; t < sizes_.tokens; ++t)
            each([&](int64_t b, int64_t h, int64_t c) { set(b, h, t, c, (int(random() % 17) - 8) * unit); });
        send();
    }
    // Elements times what they are in units of; one column serves all.
    void multiply(const Operand& scales) {
        for (int64_t t = 0; t < sizes_.tokens; ++t)
            each([&](int64_t b, int64_t h, int64_t c) { set(b, h, t, c, at(b, h, t, c) * scales.at(b, h, t, 0)); });
        send();
    }

private:
    int64_t count() const { return sizes_.batch * sizes_.heads * sizes_.tokens * std::max<int64_t>(sizes_.columns, 1); }
    const char* element(int64_t b, int64_t h, int64_t t, int64_t c) const {
        const int64_t at = b * steps_[0] + h * steps_[1] + t * steps_[2] + c * steps_[3];
        return bytes_.data() + at * dtype_.bits / 8;
    }

    static constexpr char untouched = char(0xff);  // NaN, of such bytes alone

    const RankDevice& on_;
    Sizes sizes_;
    spattn_dtype dtype_;
    std::vector<int64_t> shape_, strides_;
    std::array<int64_t, 4> steps_{};
    std::vector<char> bytes_;
    spattn_tensor view_;
};

// float32, of each row of an operand: [batch, heads, tokens] in the problem's axes.
class Scales {
public:
    Scales(const RankDevice& on, spattn_enum axes, Operand::Sizes sizes)
        : numbers_(on, axes, f32, {sizes.batch, sizes.heads, sizes.tokens, 1}), view_(*numbers_.view()),
          strides_(view_.strides, view_.strides + view_.ndim),
          token_axis_(axes == SPATTN_BHSD ? 2 : axes == SPATTN_BSHD) {
        --view_.ndim;
        view_.strides = strides_.data();
    }
    Scales(const Scales&) = delete;

    Operand& numbers() { return numbers_; }
    const Operand& numbers() const { return numbers_; }
    const spattn_tensor* view() const { return &view_; }
    // Powers of two, which keep what they scale exact.
    void draw(uint32_t seed, bool of_heads) {
        std::mt19937 random(seed);
        for (int64_t t = 0; t < numbers_.sizes().tokens; ++t) {
            if (of_heads) random.seed(seed);
            numbers_.each([&](int64_t b, int64_t h, int64_t) { numbers_.set(b, h, t, 0, 0.5 * (1 << random() % 3)); });
        }
        numbers_.send();
    }
    // The first row's are those of all: only these are read.
    void repeat_first() { strides_[size_t(token_axis_)] = 0; }

private:
    Operand numbers_;
    spattn_tensor view_;
    std::vector<int64_t> strides_;
    int64_t token_axis_;
};

struct Memory {
    Memory(const RankDevice& on, size_t bytes) : on(on), bytes(bytes), data(on.allocate(bytes + 16)) {}
    ~Memory() { on.release(data); }
    Memory(const Memory&) = delete;
    const RankDevice& on;
    size_t bytes;
    void* data;
};

}  // namespace abi
