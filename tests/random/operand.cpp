// SPDX-License-Identifier: MIT
#include "operand.h"

#include <algorithm>

namespace random_test {

namespace {
constexpr int64_t guard = 64;  // elements before and behind an output
constexpr unsigned char guard_byte = 0x5a, nan_byte = 0xff;
constexpr int64_t meaningless_stride = 4096;  // of an axis of size 1, where strides are ignored
}  // namespace

Placement draw_placement(Random& random, bool is_input) {
    Placement p;
    if (random.one_in(3)) return p;
    if (random.one_in(2)) std::swap(p.axes[1], p.axes[2]);
    if (random.one_in(6)) std::swap(p.axes[0], p.axes[size_t(random.in(1, 2))]);
    if (random.one_in(10)) std::swap(p.axes[2], p.axes[3]);
    if (random.one_in(12)) p.step = 2;
    if (random.one_in(2)) p.padding = random.one_in(2) ? 8 * random.in(1, 4) : random.in(1, 9);
    if (random.one_in(2)) p.shift = random.one_in(2) ? 8 * random.in(1, 2) : random.in(1, 9);
    if (is_input && random.one_in(8)) p.shares_heads = true;
    if (is_input && random.one_in(12)) p.shares_batch = true;
    return p;
}

Operand::Operand(const Type& type, Role role, std::array<int64_t, 4> shape, const Placement& p)
    : type_(&type), role_(role), shape_(shape) {
    int64_t stride = p.step, last = 0;
    for (size_t i = 4; i-- > 0;) {
        const size_t axis = size_t(p.axes[i]);
        const bool is_shared = (axis == batch_axis && p.shares_batch) || (axis == head_axis && p.shares_heads) ||
                               (axis == row_axis && p.shares_rows);
        strides_[axis] = is_shared ? 0 : stride;
        if (!is_shared) stride *= shape[axis];
        if (i == 3) stride += p.padding;
        last += (shape[axis] - 1) * strides_[axis];
    }
    const int64_t around = role == Role::output ? guard : 0;
    first_ = around + p.shift;
    const size_t bytes = size_t(first_ + last + 1 + around) * (type.dtype.bits / 8);
    memory_.assign(bytes, char(role == Role::output ? guard_byte : nan_byte));
}

template <class Body>
void Operand::visit(int64_t batch, int64_t head, int64_t row, Body body) const {
    const int64_t start = offset(batch, head, row), step = strides_[3], columns = shape_[3];
    with(*type_, [&](auto conversions) {
        using Stored = typename decltype(conversions)::Stored;
        auto* elements = reinterpret_cast<Stored*>(const_cast<char*>(memory_.data())) + start;
        for (int64_t c = 0; c < columns; ++c) body(conversions, elements[c * step], c);
    });
}

void Operand::set(int64_t batch, int64_t head, int64_t row, const double* values) {
    visit(batch, head, row, [&](auto convert, auto& element, int64_t c) { element = convert.narrow(values[c]); });
}

void Operand::fill(int64_t batch, int64_t head, int64_t row, double value) {
    visit(batch, head, row, [&](auto convert, auto& element, int64_t) { element = convert.narrow(value); });
}

void Operand::get(int64_t batch, int64_t head, int64_t row, double* values) const {
    visit(batch, head, row, [&](auto convert, const auto& element, int64_t c) { values[c] = convert.widen(element); });
}

double Operand::at(int64_t batch, int64_t head, int64_t row) const {
    double value = nan;
    visit(batch, head, row, [&](auto convert, const auto& element, int64_t) { value = convert.widen(element); });
    return value;
}

bool Operand::guards_hold() const {
    std::vector<char> rest = memory_;
    const size_t bytes = type_->dtype.bits / 8;
    for (int64_t b = 0; b < shape_[0]; ++b)
        for (int64_t h = 0; h < shape_[1]; ++h)
            for (int64_t r = 0; r < shape_[2]; ++r)
                for (int64_t c = 0; c < shape_[3]; ++c)
                    std::memset(&rest[size_t(offset(b, h, r) + c * strides_[3]) * bytes], guard_byte, bytes);
    return std::all_of(rest.begin(), rest.end(), [](char byte) { return byte == char(guard_byte); });
}

const spattn_tensor* Operand::view(void* start, spattn_device device, spattn_enum axes, View kind) {
    std::vector<int> order;
    if (kind == View::heads) order = {head_axis};
    else if (kind == View::rows) order = {batch_axis, head_axis, row_axis};
    else if (axes == SPATTN_BHSD) order = {batch_axis, head_axis, row_axis, column_axis};
    else order = {batch_axis, row_axis, head_axis, column_axis};
    if (kind == View::scales) order.pop_back();
    if (axes == SPATTN_THD && kind != View::heads) order.erase(order.begin());
    for (size_t i = 0; i < order.size(); ++i) {
        const size_t axis = size_t(order[i]);
        view_shape_[i] = shape_[axis];
        view_strides_[i] = shape_[axis] == 1 ? meaningless_stride : strides_[axis];
    }
    view_ = {static_cast<char*>(start), device, int32_t(order.size()), type_->dtype, view_shape_.data(),
             view_strides_.data(), uint64_t(first_) * (type_->dtype.bits / 8)};
    return &view_;
}

}  // namespace random_test
