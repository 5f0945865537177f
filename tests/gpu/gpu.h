// SPDX-License-Identifier: MIT
// What the GPU tests share: device tensors between guard zones, problems with hostile values, and the truth from the
// library's rows of reference on the CPU, in float64. Through the C ABI alone.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdlib>
#include <optional>

#include "abi/abi.h"

namespace gpu {

using abi::Context;
using abi::Pattern;
using abi::Plan;
using abi::succeed;

inline bool is_here() {
    int32_t count = 0;
    return spattn_device_count(&count) == SPATTN_OK && count > 0;
}
// The first line of every test: without a GPU it is skipped, and says so.
#define NEEDS_GPU() \
    if (!gpu::is_here()) return check::skip("no GPU")

void cuda(cudaError_t error, const char* what);  // throws

// To or from the device. What comes from memory that is not pinned may still be on its way when cudaMemcpy returns, and
// the stream of a graph waits for no other: this waits.
void copy(void* to, const void* from, size_t bytes);

// SPATTN_TEST_EVERY=n runs one case of n: under tools that slow every access down.
bool is_wanted(int n);

// SPATTN_FORCE_KERNEL for as long as it lives.
class Force {
public:
    explicit Force(const std::string& kernels) { setenv("SPATTN_FORCE_KERNEL", kernels.c_str(), 1); }
    ~Force() { unsetenv("SPATTN_FORCE_KERNEL"); }
};

// Calls captured on a stream of their own.
struct Graph {
    explicit Graph(const std::function<void(cudaStream_t)>& call) {
        cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
        cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin capture");
        call(stream);
        cuda(cudaStreamEndCapture(stream, &graph), "end capture");
        cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
    }
    ~Graph() {
        cudaGraphExecDestroy(executable);
        cudaGraphDestroy(graph);
        cudaStreamDestroy(stream);
    }
    Graph(const Graph&) = delete;
    void replay() {
        cuda(cudaGraphLaunch(executable, stream), "graph launch");
        cuda(cudaStreamSynchronize(stream), "replay");
    }
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
};

constexpr spattn_dtype f16{SPATTN_FLOAT, 16, 1};

// Whether q, k and v are of float8, and what has a scale: each row, each head, or nothing.
enum class Float8 { no, of_rows, of_heads, unscaled };

// A case of attention. Lengths, heads, options and memory as the tests want them.
struct Case {
    std::string pattern = "full";
    int64_t batch = 1, heads_q = 2, heads_kv = 1, seq_q = 128, seq_k = 128, head_dim = 128, head_dim_v = 128;
    spattn_dtype dtype = abi::bf16;
    Float8 float8 = Float8::no;  // else dtype is that of out, bfloat16
    spattn_enum axes = SPATTN_BSHD;
    int64_t padding = 0;      // elements between rows of each tensor
    int64_t column = 1;       // stride of the last axis
    int64_t shift = 0;        // elements by which tensors are off their allocation
    double scale = 0;         // 0: as the library does
    double softcap = 0;
    bool backward = false;    // both passes, and the largest logits, which float8 has, too
    bool deterministic = false;
    bool sinks = false, dlse = false, value_in_key = false;
    bool tf32 = false;
    double bound = 0;         // of an error of an element; 0: what tensor cores reach in the dtype
    double row_bound = 1e-4;  // of lse and of the largest logits, which are float32; TF32 rounds what they are made of
    std::string name() const;
    spattn_problem problem() const;
};

using Values = std::vector<double>;  // of a compact tensor [batch, heads, seq, columns], whatever its elements are

// A tensor in device memory, with guard bytes wherever no element is.
class DeviceTensor {
public:
    // In the case's dtype, axes and strides.
    DeviceTensor(const Case& c, int64_t heads, int64_t seq, int64_t columns);
    static DeviceTensor of_operand(const Case& c, int64_t heads, int64_t seq, int64_t columns);  // or of float8
    static DeviceTensor of_scales(const Case& c, int64_t heads, int64_t seq);  // float32, as an operand without columns
    static DeviceTensor of_rows(const Case& c);   // float32 [batch, heads_q, seq_q]
    static DeviceTensor of_heads(const Case& c);  // float32 [heads_q]
    ~DeviceTensor();
    DeviceTensor(const DeviceTensor&) = delete;
    void write(const Values& values);
    Values read() const;
    bool guards_hold() const;
    void spoil();  // everything to the guard's byte
    const spattn_tensor* view() const { return &view_; }

private:
    using Sizes = std::vector<int64_t>;
    DeviceTensor(spattn_dtype dtype, Sizes sizes, Sizes strides, const std::vector<int>& axes, int64_t shift);
    template <class Body>  // body(place among Values, where the element lies in a copy of the memory)
    void each_element(std::vector<char>& bytes, Body body) const;
    size_t element_bytes() const { return view_.dtype.bits / 8; }

    Sizes sizes_, strides_;  // in the order of Values
    Sizes shape_, steps_;    // in the order that the library is told
    size_t count_ = 1, memory_bytes_;
    int64_t first_;  // the first element's distance from the start of memory
    void* memory_ = nullptr;
    spattn_tensor view_{};
};

// Inputs and the truth of a case. What nobody sees, and what sees nothing, is NaN and infinity. Forward cases leave the
// results of backward empty.
struct Truth {
    Values q, k, v, dout, dlse, sinks;
    Values out, lse, max_logits, dq, dk, dv, dsinks;
};
const Truth& make_truth(const Case& c, unsigned seed);
Truth make_inputs(const Case& c, unsigned seed);  // all results empty
unsigned seed_of(const Case& c);

// Makes the truths of these cases, each with its seed_of(), on all cores, for the calls of make_truth() that follow.
// Not while a Force lives: plans of reference would obey it, too.
void prepare_truths(const std::vector<Case>& cases);

Context make_context();
Plan make_plan(const Context& context, const Case& c, cudaStream_t stream = nullptr);

// Scratch memory of a pass. What it holds at first means nothing.
struct Workspace {
    Workspace(const Plan& plan, spattn_enum op);
    ~Workspace() { cudaFree(memory); }
    Workspace(const Workspace&) = delete;
    void* memory = nullptr;
    size_t bytes = 0;
};

// Operands of a case on the device. Backward is for cases that ask for it.
struct Run {
    Run(const Plan& plan, const Case& c, const Truth& truth);
    // indices: of patterns whose lists come with each call.
    spattn_status forward(cudaStream_t stream = nullptr, const spattn_tensor* indices = nullptr);
    spattn_status backward(cudaStream_t stream = nullptr, const spattn_tensor* indices = nullptr);
    void both_passes();  // with their end
    void demand_truth(const Truth& truth) const;

    const Plan& plan;
    const Case c;
    DeviceTensor q, k, v, dout, dlse, sinks, out, lse, max_logits, dq, dk, dv, dsinks, q_scales, k_scales, v_scales;
    Workspace forward_workspace;
    std::optional<Workspace> backward_workspace;

private:
    template <class Args>
    void bring_scales(Args& args);
    void write_operand(DeviceTensor& to, DeviceTensor& scales, const Values& values, int64_t seq, int64_t columns);
};

}  // namespace gpu
