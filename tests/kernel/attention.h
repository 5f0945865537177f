// SPDX-License-Identifier: MIT
// Runs a case on chosen kernel rows, on hostile memory: tensors of elements.h, NaN in the workspace, in keys that no
// query sees and in queries that see no key.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/threads.h"
#include "elements.h"
#include "plan/backends.h"
#include "plan/plan.h"
#include "plan/run.h"
#include "plan/token_rows.h"

namespace attention {

using namespace spattn;

constexpr double own_scale = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t aligned_end = std::numeric_limits<int64_t>::min();

struct Case {
    const char* pattern;
    int64_t batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v;
    Axes axes = Axes::bhsd;
    double scale = own_scale;
    int64_t q_offset = aligned_end;
    bool optional_operands = true;  // lse and max_logits of the forward pass, dlse, dsink
    bool value_in_key = false;
    double softcap = 0;
    bool has_sinks = false;
};

Problem problem_of(const Case& c, Dtype dtype);
std::string describe(const Case& c);

// ---- inputs -------------------------------------------------------------------------------------------------------

// Lists of a call: [batch][rows][heads_kv][most], entries as hostile as they may be, and how many count.
struct Lists {
    std::vector<int64_t> indices, counts;
    std::vector<int32_t> narrow;  // indices once more, as int32
};

// Every second case brings int32, every third no counts.
CallLists view(const Lists& lists, const Problem& p);

struct Inputs {
    Values q, k, v, dout, dlse, sinks;
    Lists lists{};
};

Inputs make_inputs(const Case& c, Dtype dtype, unsigned seed);

// ---- runs ---------------------------------------------------------------------------------------------------------

struct Results {
    Values out, lse, max_logits, dq, dk, dv, dsinks;
};

// The row of a forward pass and the row of a backward pass of one kind.
struct Rows {
    Kernel forward, backward;
};

// Read instead of the plan's, where given.
struct Layouts {
    std::shared_ptr<const Layout> forward, backward;
};

class Workspace {
public:
    explicit Workspace(size_t bytes) : bytes_(bytes), memory_(bytes + 128, char(0xff)) {
        start_ = memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64);
    }
    void* start() { return start_; }
    bool kept_guard() const {
        for (const char* c = start_ + bytes_; c < memory_.data() + memory_.size(); ++c)
            if (*c != char(0xff)) return false;
        return true;
    }

private:
    size_t bytes_;
    std::vector<char> memory_;
    char* start_;
};

bool same_bits(const Values& a, const Values& b);

// Attention of elements T, once for each dtype of rows.
template <class T>
class Attention {
public:
    Attention(const Case& c, const Rows& rows, int threads, const Layouts& layouts = {}, PlanOptions options = {});

    const CompiledPlan& plan() const { return plan_; }

    Results run(const Inputs& in);

private:
    void replace(PassPlan& pass, std::shared_ptr<const Layout> layout) const;
    template <class Args>
    void run(const PassPlan& pass, Args& args);

    Case case_;
    PatternRef pattern_, known_;
    Problem problem_;
    std::unique_ptr<Parallel> threads_;
    CallLists lists_{};
    std::vector<Kernel> kernels_;
    CompiledPlan plan_;
};

Results run_rows(const Case& c, const Rows& rows, const Inputs& in, int threads, const Layouts& layouts = {},
                 const PlanOptions& options = {});

const Backend& cpu_backend();

// Pairs of all_kernels(): a forward row with the backward row of the same kind. Rows for few queries, which take groups
// of so many heads, are forward alone: their partners are those of blocks of 16 queries.
enum class FewQueries { left_out, included };
std::vector<Rows> cpu_rows(bool reference, FewQueries few_queries = FewQueries::left_out);

// Block rows read no lists of a call, and some gather rows one list for all heads of a group.
bool takes(const Rows& rows, const Case& c);

// Whether tests are for these rows: those that run here; with SPATTN_TEST_ROWS, those of them whose names begin so.
bool is_tested(const Rows& rows);

Rows reference_rows(Dtype dtype);

}  // namespace attention
