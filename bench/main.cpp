// SPDX-License-Identifier: MIT
// One program over cases.inc: times calls of the library through its C ABI, checks what they wrote, prints a table.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <tuple>

#include "options.h"
#include "report.h"
#include "truth.h"

namespace bench {

namespace {

// Restores the library's own choice of kernel when it goes.
class ForceKernel {
public:
    explicit ForceKernel(const std::string& kernel) {
        const char* before = std::getenv(variable);
        if (before) before_ = before;
        kernel.empty() ? unsetenv(variable) : setenv(variable, kernel.c_str(), 1);
    }
    ~ForceKernel() { before_.empty() ? unsetenv(variable) : setenv(variable, before_.c_str(), 1); }
    ForceKernel(const ForceKernel&) = delete;

private:
    static constexpr const char* variable = "SPATTN_FORCE_KERNEL";
    std::string before_;
};

// The rows of this machine that compute the pass. An empty name stands for the library's own choice.
std::vector<std::string> kernels(const Options& options, Pass pass) {
    if (options.kernels.empty()) return {""};
    std::vector<std::string> names;
    for (int32_t row = 0; row < spattn_kernel_count(); ++row) {
        const std::string kernel = spattn_kernel_name(row);
        const bool of_pass = kernel.find(std::string("_") + name(pass)) != std::string::npos;
        if (of_pass && spattn_kernel_runs_here(row) && matches(options.kernels, kernel)) names.push_back(kernel);
    }
    return names;
}

class Bench {
public:
    explicit Bench(const Options& options)
        : options_(options), context_(make_context(options.threads)), cold_(options.threads),
          report_(make_origin(options.threads), options.json) {}

    // Returns the program's status: 0 where every result is right.
    int run() {
        report_.heading();
        int cases_run = 0;
        for (const Case& shape : cases()) {
            const bool named = std::count(options_.cases.begin(), options_.cases.end(), shape.name) > 0;
            if (!matches(options_.cases, shape.name) || (shape.large && !options_.full && !named)) continue;
            ++cases_run;
            for (Dtype dtype : options_.dtypes)
                for (Pass pass : options_.passes)
                    for (const std::string& kernel : kernels(options_, pass)) run(shape, dtype, pass, kernel);
        }
        if (cases_run == 0) throw std::runtime_error("no case of that name; bench --list prints them");
        return wrong_ ? 1 : 0;
    }

private:
    void run(const Case& shape, Dtype dtype, Pass pass, const std::string& kernel) {
        try {
            Result result = time(shape, dtype, pass, kernel);
            result.ratio_dense = result.gflops / dense_gflops(shape, dtype, pass);
            if (!(result.max_err <= error_bound(dtype))) ++wrong_;
            report_.add(shape, result);
        } catch (const Refused& refused) {
            // A row that does not take this dtype or shape is no failure of a run over many rows.
            if (kernel.empty() || refused.status != SPATTN_E_NO_KERNEL) ++wrong_;
            report_.note(shape.name, kernel + (kernel.empty() ? "" : ": ") + refused.what());
        }
    }

    Result time(const Case& shape, Dtype dtype, Pass pass, const std::string& kernel) {
        const ForceKernel force(kernel);
        Attention attention(context_.get(), shape, dtype, pass == Pass::backward);
        attention.forward();
        const Timing timing = measure(options_.budget, [&] { attention.run(pass); }, options_.warm ? Step() : cold_);
        const spattn_stats stats = attention.stats();
        const bool forward = pass == Pass::forward;
        Result result{};
        result.pass = pass;
        result.kernel = attention.kernel(pass);
        result.dtype = dtype;
        result.us = timing.us;
        result.gflops = (forward ? stats.flops_forward : stats.flops_backward) / timing.us / 1e3;
        result.gbs = (forward ? stats.bytes_forward : stats.bytes_backward) / timing.us / 1e3;
        result.density = stats.density;
        result.plan_us = attention.plan_us;
        result.layout_bytes = stats.layout_bytes;
        result.max_err = max_error(attention, pass);
        result.runs = timing.runs;
        return result;
    }

    // The rate of `full` at this shape. Beyond 4096 tokens it no longer changes, and would take minutes.
    double dense_gflops(const Case& shape, Dtype dtype, Pass pass) {
        Case dense = shape;
        dense.pattern = "full";
        dense.seq = std::min<int64_t>(dense.seq, 4096);
        dense.top = 0;
        double& gflops = dense_[{dense.batch, dense.heads_q, dense.heads_kv, dense.seq, dense.head_dim, dtype, pass}];
        if (gflops == 0) gflops = time(dense, dtype, pass, "").gflops;
        return gflops;
    }

    const Options options_;
    const Handle<spattn_context> context_;
    ColdCaches cold_;
    Report report_;
    std::map<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, Dtype, Pass>, double> dense_;
    int wrong_ = 0;
};

PlanResult time_plan(const spattn_context* context, const PlanCase& plan, bool million) {
    const int64_t seq = million ? 1 << 20 : 1 << 17;
    const Case shape{plan.name, plan.pattern, 1, plan.heads, plan.heads, seq, 128, true};
    const auto pattern = make_pattern(plan.pattern, seq);
    const TimedPlan timed = make_plan(context, pattern.get(), make_problem(shape, Dtype::f32, true));
    spattn_stats stats{};
    stats.struct_size = sizeof stats;
    require(spattn_plan_stats(timed.plan.get(), &stats));
    return {seq, timed.us / 1e3, double(stats.layout_bytes) / 0x1p20, million ? plan.ms_1m : plan.ms_128k,
            million ? plan.mib_1m : plan.mib_128k};
}

int run_plans(const Options& options) {
    Report report(make_origin(1), options.json);
    report.plan_heading();
    const Handle<spattn_context> context = make_context(1);
    int refusals = 0;
    for (const PlanCase& plan : plan_cases()) {
        if (!matches(options.cases, plan.name)) continue;
        for (const bool million : {false, true}) {
            if (million && plan.ms_1m == 0) continue;
            try {
                report.add(plan, time_plan(context.get(), plan, million));
            } catch (const Refused& refused) {
                ++refusals;
                report.note(plan.name, refused.what());
            }
        }
    }
    return refusals ? 1 : 0;
}

int list(const Options& options) {
    for (const Case& c : cases()) {
        if (!matches(options.cases, c.name)) continue;
        std::printf("{\"case\": %s, \"pattern\": %s, \"batch\": %lld, \"heads_q\": %lld, \"heads_kv\": %lld, "
                    "\"seq\": %lld, \"head_dim\": %lld, \"seq_k\": %lld, \"head_dim_v\": %lld, \"top\": %lld, "
                    "\"large\": %s}\n",
                    quoted(c.name).c_str(), quoted(expand(c.pattern, c.seq)).c_str(), (long long)c.batch,
                    (long long)c.heads_q, (long long)c.heads_kv, (long long)c.seq, (long long)c.head_dim,
                    (long long)c.keys(), (long long)c.values(), (long long)c.top, c.large ? "true" : "false");
    }
    return 0;
}

int write_mask(const Options& options) {
    for (const Case& c : cases()) {
        if (!matches(options.cases, c.name)) continue;
        spattn_extent extent{};
        extent.struct_size = sizeof extent;
        extent.seq_q = extent.seq_k = c.seq;
        std::vector<uint8_t> mask(size_t(c.seq) * c.seq);
        const int64_t shape[4] = {1, 1, c.seq, c.seq};
        spattn_tensor view{};
        view.data = mask.data();
        view.device = {SPATTN_CPU, 0};
        view.ndim = 4;
        view.dtype = {SPATTN_UINT, 8, 1};
        view.shape = shape;
        require(spattn_pattern_to_mask(make_pattern(c.pattern, c.seq).get(), &extent, &view));
        std::FILE* file = std::fopen(options.mask.c_str(), "wb");
        const bool written = file && std::fwrite(mask.data(), 1, mask.size(), file) == mask.size();
        if (!file || std::fclose(file) != 0 || !written) throw std::runtime_error("cannot write " + options.mask);
        return 0;
    }
    throw std::runtime_error("no case of that name");
}

int run(const Options& options) {
    if (options.list) return list(options);
    if (!options.mask.empty()) return write_mask(options);
    if (options.plan) return run_plans(options);
    return Bench(options).run();
}

}  // namespace

}  // namespace bench

int main(int argc, char** argv) {
    try {
        return bench::run(bench::parse_options(argc, argv));
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench: %s\n", e.what());
        return 2;
    }
}
