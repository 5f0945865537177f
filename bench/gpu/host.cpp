// SPDX-License-Identifier: MIT
// What a GPU costs the host: microseconds of a call of spattn_forward, which returns before the GPU is done, and of a
// plan of 128K tokens with its copies. Goals are 5 us and 3 ms.
#include <cuda_runtime.h>

#include <cstdio>
#include <string>

#include "abi.h"
#include "measure.h"

namespace bench {

namespace {

void cuda(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

struct Free {
    void operator()(void* memory) const { cudaFree(memory); }
};
using Memory = std::unique_ptr<void, Free>;

Memory allocate(size_t bytes) {
    void* memory = nullptr;
    cuda(cudaMalloc(&memory, bytes));
    cuda(cudaMemset(memory, 0, bytes));
    return Memory(memory);
}

constexpr int64_t head_dim = 128;
constexpr spattn_dtype bf16{SPATTN_BFLOAT, 16, 1};

// bfloat16 [1, seq, heads, head_dim]
struct Tensor {
    Tensor(int64_t seq, int64_t heads)
        : shape{1, seq, heads, head_dim}, memory(allocate(size_t(seq * heads * head_dim) * 2)) {
        view.data = memory.get(), view.device = {SPATTN_CUDA, 0}, view.ndim = 4, view.dtype = bf16, view.shape = shape;
    }
    const int64_t shape[4];
    const Memory memory;
    spattn_tensor view{};
};

Handle<spattn_context> make_context() {
    spattn_context_options options{};
    options.struct_size = sizeof options, options.device = {SPATTN_CUDA, 0}, options.plan_cache = -1;
    spattn_context* context = nullptr;
    require(spattn_context_create(&options, &context));
    return Handle<spattn_context>(context);
}

Handle<spattn_plan> make_plan(const Handle<spattn_context>& context, const char* text, int64_t seq, int64_t heads,
                              int64_t heads_kv) {
    spattn_pattern* pattern = nullptr;
    require(spattn_pattern_parse(text, &pattern));
    const Handle<spattn_pattern> owned(pattern);
    spattn_problem problem{};
    problem.struct_size = sizeof problem, problem.dtype = bf16;
    problem.batch = 1, problem.heads_q = heads, problem.heads_kv = heads_kv;
    problem.seq_q = problem.seq_k = seq, problem.head_dim = head_dim;
    spattn_plan* plan = nullptr;
    require(spattn_plan_create(context.get(), pattern, &problem, nullptr, &plan));
    return Handle<spattn_plan>(plan);
}

double launch_us(const Handle<spattn_context>& context) {
    constexpr int64_t seq = 1500, heads = 8, heads_kv = 4;
    const auto plan = make_plan(context, "causal & (sink(5) | window(200,0))", seq, heads, heads_kv);
    const Tensor q(seq, heads), k(seq, heads_kv), v(seq, heads_kv), out(seq, heads);
    spattn_forward_args args{};
    args.struct_size = sizeof args, args.q = &q.view, args.k = &k.view, args.v = &v.view, args.out = &out.view;
    require(spattn_plan_workspace(plan.get(), SPATTN_OP_FORWARD, &args.workspace_bytes, nullptr));
    const Memory workspace = allocate(args.workspace_bytes);
    args.workspace = workspace.get();
    // Few enough that the GPU's queue takes them all at once: nobody waits for it.
    constexpr int calls = 50;
    const auto launch = [&] {
        for (int i = 0; i < calls; ++i) require(spattn_forward(plan.get(), &args));
    };
    const auto drain = [] { cuda(cudaDeviceSynchronize()); };
    const double us = measure({}, launch, drain).us / calls;
    drain();
    return us;
}

double plan_us(const Handle<spattn_context>& context) {
    return measure({}, [&] { make_plan(context, "causal & window(4095,0)", 131072, 4, 4); }).us;
}

}  // namespace

}  // namespace bench

int main() {
    try {
        const auto context = bench::make_context();
        std::printf("launch               %8.2f us\n", bench::launch_us(context));
        std::printf("plan of 128K tokens  %8.0f us\n", bench::plan_us(context));
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "bench_gpu_host: %s\n", error.what());
        return 1;
    }
}
