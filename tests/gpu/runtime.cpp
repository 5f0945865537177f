// SPDX-License-Identifier: MIT
// Contexts, plans and launches on a GPU: streams, capture, hooks and errors.
#include <cuda.h>

#include <random>
#include <thread>
#include <tuple>

#include "gpu/gpu.h"

using namespace gpu;

namespace {

Case window_case() {
    Case c;
    c.pattern = "causal & (sink(5) | window(200,0))", c.seq_q = c.seq_k = 1500, c.heads_q = 8, c.heads_kv = 4;
    return c;
}

struct Stream {
    Stream() { cuda(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "cudaStreamCreate"); }
    ~Stream() { cudaStreamDestroy(handle); }
    cudaStream_t handle;
};

}  // namespace

TEST(two_streams_at_once) {
    NEEDS_GPU();
    const Context context = make_context();
    const Case c = window_case();
    const Truth& truth = make_truth(c, 1);
    const Plan plan = make_plan(context, c);
    Run first(plan, c, truth), second(plan, c, truth);
    Stream a, b;
    for (int i = 0; i < 20; ++i) {
        succeed(first.forward(a.handle), "first stream");
        succeed(second.forward(b.handle), "second stream");
    }
    cuda(cudaDeviceSynchronize(), "streams");
    first.demand_truth(truth);
    second.demand_truth(truth);
}

TEST(graph_capture_and_replay) {
    NEEDS_GPU();
    const Context context = make_context();
    const Case c = window_case();
    const Truth& truth = make_truth(c, 2);
    const Plan plan = make_plan(context, c);
    Run run(plan, c, truth);
    Stream stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cuda(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeGlobal), "begin capture");
    succeed(run.forward(stream.handle), "captured forward");
    cuda(cudaStreamEndCapture(stream.handle, &graph), "end capture");
    cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
    for (int replay = 0; replay < 3; ++replay) {
        run.out.spoil();
        run.lse.spoil();
        cuda(cudaGraphLaunch(executable, stream.handle), "graph launch");
        cuda(cudaStreamSynchronize(stream.handle), "replay");
        run.demand_truth(truth);
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
}

// Lists lie on the device, and each replay reads what they are then: rows that gather, blocks of a layout, and queries
// that are dispatched.
TEST(lists_change_between_replays) {
    NEEDS_GPU();
    const Context context = make_context();
    for (const auto& [text, block_q, block_k, most, rows] :
         {std::tuple("causal & runtime_tokens(40)", 1, 1, 40, ""),
          std::tuple("causal & runtime_blocks(64,64,3)", 64, 64, 3, ""),
          std::tuple("causal & runtime_blocks(64,32,3)", 64, 32, 3, ""),
          std::tuple("causal & runtime_blocks(1,64,3)", 1, 64, 3,
                     "any_block_forward_bf16_64x64,any_block_backward_bf16_64x64")}) {
        check::context = text;
        Case c = window_case();
        c.pattern = text, c.seq_q = c.seq_k = 140, c.heads_q = 2, c.heads_kv = 1, c.backward = c.deterministic = true;
        std::optional<Force> force;
        if (*rows) force.emplace(rows);
        const Plan plan = make_plan(context, c);
        force.reset();
        Case finite = c;
        finite.pattern = "full";
        Run run(plan, c, make_inputs(finite, 5));
        const int64_t lists = (c.seq_q + block_q - 1) / block_q, blocks = (c.seq_k + block_k - 1) / block_k;
        std::vector<int32_t> drawn(size_t(lists * c.heads_kv * most));
        int32_t* indices;
        cuda(cudaMalloc(&indices, drawn.size() * sizeof(int32_t)), "lists");
        const int64_t shape[] = {1, lists, c.heads_kv, most};
        spattn_tensor view{};
        view.data = indices, view.device = {SPATTN_CUDA, 0}, view.dtype = abi::i32, view.ndim = 4, view.shape = shape;
        const auto both = [&](cudaStream_t stream) {
            succeed(run.forward(stream, &view), "forward");
            succeed(run.backward(stream, &view), "backward");
        };
        const auto results = [&] {
            std::vector<Values> all;
            for (const DeviceTensor* x : {&run.out, &run.lse, &run.dq, &run.dk, &run.dv}) all.push_back(x->read());
            return all;
        };
        Stream stream;
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        cuda(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeGlobal), "begin capture");
        both(stream.handle);
        cuda(cudaStreamEndCapture(stream.handle, &graph), "end capture");
        cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
        std::mt19937 random(6);
        std::vector<Values> last;
        for (int replay = 0; replay < 3; ++replay) {
            for (int32_t& entry : drawn) entry = int32_t(random() % blocks);
            copy(indices, drawn.data(), drawn.size() * sizeof(int32_t));
            for (DeviceTensor* x : {&run.out, &run.lse, &run.dq, &run.dk, &run.dv}) x->spoil();
            cuda(cudaGraphLaunch(executable, stream.handle), "graph launch");
            cuda(cudaStreamSynchronize(stream.handle), "replay");
            const std::vector<Values> replayed = results();
            both(nullptr);
            cuda(cudaDeviceSynchronize(), "call");
            CHECK(replayed == results());
            CHECK(replayed != last);
            last = replayed;
        }
        cudaGraphExecDestroy(executable);
        cudaGraphDestroy(graph);
        cudaFree(indices);
    }
}

TEST(a_capturing_stream_takes_no_plan) {
    NEEDS_GPU();
    const Context context = make_context();
    const Pattern pattern = abi::parse("causal");
    const auto problem = window_case().problem();
    Stream stream;
    cudaGraph_t graph;
    cuda(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeGlobal), "begin capture");
    spattn_plan* plan = nullptr;
    CHECK_EQ(spattn_plan_create(context.get(), pattern.get(), &problem, stream.handle, &plan), int(SPATTN_E_CAPTURE));
    CHECK(plan == nullptr);
    cuda(cudaStreamEndCapture(stream.handle, &graph), "the capture is still good");
    cudaGraphDestroy(graph);
}

TEST(errors_name_cuda_and_stay_typed) {
    NEEDS_GPU();
    const Context context = make_context();
    const Case c = window_case();
    const Plan plan = make_plan(context, c);
    Run run(plan, c, make_inputs(c, 3));
    auto args = abi::sized<spattn_forward_args>();
    spattn_tensor on_host = *run.q.view();
    on_host.device = {SPATTN_CPU, 0};
    args.q = &on_host, args.k = run.k.view(), args.v = run.v.view(), args.out = run.out.view();
    args.workspace = run.forward_workspace.memory, args.workspace_bytes = run.forward_workspace.bytes;
    CHECK_EQ(spattn_forward(plan.get(), &args), int(SPATTN_E_DEVICE));
    args.q = run.q.view();
    if (run.forward_workspace.bytes) {
        args.workspace_bytes = run.forward_workspace.bytes - 1;
        CHECK_EQ(spattn_forward(plan.get(), &args), int(SPATTN_E_WORKSPACE));
        args.workspace = nullptr;
        CHECK_EQ(spattn_forward(plan.get(), &args), int(SPATTN_E_NULL));
    }
    auto options = abi::sized<spattn_context_options>();
    options.device = {SPATTN_CUDA, 99};
    spattn_context* missing = nullptr;
    CHECK_EQ(spattn_context_create(&options, &missing), int(SPATTN_E_DEVICE));
    // More memory than any GPU has: the status says so and the number is CUDA's.
    options.device = {SPATTN_CUDA, 0};
    options.alloc = [](void*, spattn_device, size_t, size_t, spattn_stream) -> void* { return nullptr; };
    options.free = [](void*, spattn_device, void*, size_t, spattn_stream) {};
    const Context without_memory = abi::make_context(options);
    const Pattern pattern = abi::parse("causal");
    const auto problem = c.problem();
    spattn_plan* no_plan = nullptr;
    CHECK_EQ(spattn_plan_create(without_memory.get(), pattern.get(), &problem, nullptr, &no_plan),
             int(SPATTN_E_DEVICE_MEMORY));
}

TEST(allocator_hooks_are_honoured) {
    NEEDS_GPU();
    struct Ledger {
        size_t live = 0, calls = 0;
    } ledger;
    auto options = abi::sized<spattn_context_options>();
    options.device = {SPATTN_CUDA, 0};
    options.alloc_user = &ledger;
    options.alloc = [](void* user, spattn_device, size_t bytes, size_t, spattn_stream) -> void* {
        void* memory = nullptr;
        if (cudaMalloc(&memory, bytes) != cudaSuccess) return nullptr;
        static_cast<Ledger*>(user)->live += bytes, ++static_cast<Ledger*>(user)->calls;
        return memory;
    };
    options.free = [](void* user, spattn_device, void* memory, size_t bytes, spattn_stream) {
        static_cast<Ledger*>(user)->live -= bytes;
        cudaFree(memory);
    };
    {
        const Context context = abi::make_context(options);
        const Case c = window_case();
        const Truth& truth = make_truth(c, 4);
        const Plan plan = make_plan(context, c);
        CHECK(ledger.calls > 0 && ledger.live > 0);
        const size_t calls = ledger.calls;
        Run run(plan, c, truth);
        succeed(run.forward(), "forward");
        cuda(cudaDeviceSynchronize(), "forward");
        run.demand_truth(truth);
        CHECK_EQ(ledger.calls, calls);  // a launch allocates nothing
    }
    CHECK_EQ(ledger.live, size_t(0));
}

TEST(device_selection) {
    NEEDS_GPU();
    int32_t counted = 0;
    int there = 0;
    succeed(spattn_device_count(&counted), "count");
    cuda(cudaGetDeviceCount(&there), "cudaGetDeviceCount");
    CHECK_EQ(counted, there);
    spattn_context* any = nullptr;
    succeed(spattn_context_create(nullptr, &any), "default context");
    spattn_context_release(any);
    int before = 0, after = 0;
    cuda(cudaSetDevice(there - 1), "cudaSetDevice");
    cuda(cudaGetDevice(&before), "cudaGetDevice");
    const Context context = make_context();
    const Plan plan = make_plan(context, window_case());
    cuda(cudaGetDevice(&after), "cudaGetDevice");
    CHECK_EQ(before, after);
    cuda(cudaSetDevice(0), "cudaSetDevice");
}

// One that it got would lie on the first GPU, whichever GPU its calls are for.
TEST(threads_without_a_context_get_none) {
    NEEDS_GPU();
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cuda(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &function, 4000, cudaEnableDefault, &found), "the driver");
    const auto get_current = reinterpret_cast<CUresult (*)(CUcontext*)>(function);
    const Context context = make_context();
    const Case c = window_case();
    const Truth& truth = make_truth(c, 4);
    const Plan plan = make_plan(context, c);
    Run run(plan, c, truth);
    std::thread([&] {
        Case other = c;
        other.pattern = "causal";
        make_plan(context, other);
        succeed(run.forward(), "forward");
        CUcontext current = nullptr;
        CHECK(get_current(&current) == CUDA_SUCCESS && !current);
    }).join();
    cuda(cudaDeviceSynchronize(), "forward");
    run.demand_truth(truth);
}

TEST(plans_from_many_threads) {
    NEEDS_GPU();
    const Context context = make_context();
    const Case c = window_case();
    std::vector<std::thread> threads;
    std::vector<int> statuses(8, -1);
    for (int i = 0; i < 8; ++i)
        threads.emplace_back([&, i] {
            const Pattern pattern = [] {
                spattn_pattern* p = nullptr;
                spattn_pattern_causal(&p);
                return Pattern(p);
            }();
            const auto problem = c.problem();
            spattn_plan* plan = nullptr;
            statuses[size_t(i)] = spattn_plan_create(context.get(), pattern.get(), &problem, nullptr, &plan);
            spattn_plan_release(plan);
        });
    for (std::thread& thread : threads) thread.join();
    for (int status : statuses) CHECK_EQ(status, 0);
}
