// SPDX-License-Identifier: MIT
// A tensor of the host whose bytes are copied to the device as they are: any order of the axes, gaps, a start that is
// not aligned, heads or batch entries that share memory. Bytes that belong to no element are known, so that a test
// sees whoever writes them; of inputs they are NaN, and nothing lies behind the last element.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "numbers.h"

namespace random_test {

enum Axis { batch_axis, head_axis, row_axis, column_axis };

// How elements lie in memory.
struct Placement {
    std::array<int, 4> axes{batch_axis, head_axis, row_axis, column_axis};  // outer to inner
    int64_t step = 1;     // elements from one index of the inner axis to the next
    int64_t padding = 0;  // elements behind each run of the inner axis
    int64_t shift = 0;    // elements by which the first one is off an aligned address
    bool shares_batch = false, shares_heads = false, shares_rows = false;  // one's memory serves all: inputs only
    bool is_transposed() const { return axes[3] != column_axis; }
};
Placement draw_placement(Random& random, bool is_input);

class Operand {
public:
    enum class Role { input, output };
    // How the library sees it: [batch, heads, rows, columns] in the order of spattn_axes, the same without columns,
    // [batch, heads, rows] or [heads].
    enum class View { tensor, scales, rows, heads };

    Operand() = default;
    Operand(const Type& type, Role role, std::array<int64_t, 4> shape, const Placement& placement);

    const Type& type() const { return *type_; }
    int64_t size(Axis axis) const { return shape_[axis]; }
    void set(int64_t batch, int64_t head, int64_t row, const double* values);
    void fill(int64_t batch, int64_t head, int64_t row, double value);
    void get(int64_t batch, int64_t head, int64_t row, double* values) const;
    double at(int64_t batch, int64_t head, int64_t row) const;  // of one column
    bool guards_hold() const;

    std::vector<char>& memory() { return memory_; }
    // The tensor for the library, whose memory starts at `start`. Lives as long as this operand stays where it is.
    const spattn_tensor* view(void* start, spattn_device device, spattn_enum axes, View kind);
    explicit operator bool() const { return type_ != nullptr; }

private:
    template <class Body>
    void visit(int64_t batch, int64_t head, int64_t row, Body body) const;
    int64_t offset(int64_t batch, int64_t head, int64_t row) const {
        return first_ + batch * strides_[0] + head * strides_[1] + row * strides_[2];
    }

    const Type* type_ = nullptr;
    Role role_ = Role::input;
    std::array<int64_t, 4> shape_{}, strides_{};
    int64_t first_ = 0;
    std::vector<char> memory_;
    std::array<int64_t, 4> view_shape_{}, view_strides_{};
    spattn_tensor view_{};
};

}  // namespace random_test
