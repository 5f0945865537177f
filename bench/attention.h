// SPDX-License-Identifier: MIT
// One attention problem on the CPU: its plan, operands from N(0,1), results and workspace.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "case.h"

namespace bench {

enum class Pass { forward, backward };
inline const char* name(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }

enum class Dtype { f32, f16, f64, bf16 };
inline const char* name(Dtype dtype) {
    constexpr const char* names[] = {"f32", "f16", "f64", "bf16"};
    return names[int(dtype)];
}

struct TimedPlan {
    Handle<spattn_plan> plan;
    double us;
};
// Makes the plan again and again for a moment; the median time.
TimedPlan make_plan(const spattn_context* context, const spattn_pattern* pattern, const spattn_problem& problem);

// A context without a plan cache: a plan's time is the time of making it.
Handle<spattn_context> make_context(int threads);

spattn_problem make_problem(const Case& shape, Dtype dtype, bool backward);

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Free>;
Memory allocate(size_t bytes, size_t align);

// A compact BHSD tensor ([batch, heads, seq, columns], or without columns where they are 0) that owns its memory.
class Tensor {
public:
    Tensor(std::vector<int64_t> shape, Dtype dtype);
    void fill_normal(uint64_t seed);
    // Element `column` of a row, whatever the dtype.
    double at(int64_t batch, int64_t head, int64_t row, int64_t column = 0) const;
    const spattn_tensor* view() const { return &view_; }

private:
    std::vector<int64_t> shape_;
    Dtype dtype_;
    int64_t count_ = 1;
    Memory memory_;
    spattn_tensor view_{};
};

class Attention {
public:
    Attention(const spattn_context* context, const Case& shape, Dtype dtype, bool backward);
    Attention(const Attention&) = delete;

    void forward();
    void backward();
    void run(Pass pass) { pass == Pass::forward ? forward() : backward(); }

    std::string kernel(Pass pass) const;  // the row that the plan chose
    spattn_stats stats() const;

    const Case shape;
    const Dtype dtype;
    // The keys that a row lists, in cases whose calls bring lists. Values of these cases are columns of the keys.
    const int32_t* list(int64_t row) const { return &lists_[size_t(row * shape.top)]; }
    const Tensor& values() const { return shape.top ? k : v; }

    const Handle<spattn_pattern> pattern;
    double plan_us;  // median over a few plans of the same problem
    Tensor q, k, v, out, lse, dout, dq, dk, dv;

private:
    struct Workspace {
        Memory memory;
        size_t bytes = 0;
    };
    Workspace make_workspace(spattn_enum op) const;
    const spattn_tensor* indices();  // null where the pattern has its lists

    Handle<spattn_plan> plan_;
    std::vector<int32_t> lists_;  // [seq][top]
    int64_t lists_shape_[4];
    spattn_tensor lists_view_{};
    Workspace forward_, backward_;
};

}  // namespace bench
