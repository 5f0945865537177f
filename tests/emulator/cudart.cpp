// SPDX-License-Identifier: MIT
// What of CUDA's runtime the library and its tests call, on the emulator: device memory is memory, and streams run what
// they are given before the call returns.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "emulator/launch.h"
#include "emulator/tensor_map.h"

using Effects = std::vector<std::function<cudaError_t()>>;

struct CUstream_st {
    bool captures = false;
    Effects captured;
};
struct CUgraph_st {
    Effects effects;
};
struct CUgraphExec_st {
    Effects effects;
};

namespace emulator {

namespace {

struct Gpu {
    const char* name;
    int major, minor;
    size_t shared_bytes;           // of a CTA
    int processors;                // few, so that small problems have more tasks
    int clock, memory_clock, bus;  // kHz, kHz, bits
};

// SPATTN_EMULATED_GPU names one of them.
constexpr Gpu gpus[] = {
    {"emulated Hopper", 9, 0, 227 * 1024, 5, 1980000, 3201000, 6144},
    {"emulated Ampere", 8, 0, 163 * 1024, 5, 1410000, 1215000, 5120},
    {"emulated Ada", 8, 9, 99 * 1024, 5, 2520000, 10501000, 384},
    {"emulated Turing", 7, 5, 64 * 1024, 5, 1545000, 7001000, 352},
};

const Gpu& gpu() {
    static const Gpu& chosen = []() -> const Gpu& {
        const char* const named = std::getenv("SPATTN_EMULATED_GPU");
        if (!named) return gpus[0];
        for (const Gpu& one : gpus)
            if (std::string_view(one.name) == std::string("emulated ") + named) return one;
        std::fprintf(stderr, "SPATTN_EMULATED_GPU is %s; accepted: Hopper, Ampere, Ada, Turing\n", named);
        std::exit(2);
    }();
    return chosen;
}

int number(const char* name, int otherwise) {
    const char* const given = std::getenv(name);
    return given ? std::atoi(given) : otherwise;
}

thread_local cudaError_t last_error = cudaSuccess;
cudaError_t answer(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

// CTAs that were made before: each has half a gigabyte of addresses for stacks.
class Ctas {
public:
    std::unique_ptr<Cta> take() {
        const std::lock_guard lock(mutex_);
        if (free_.empty()) return std::make_unique<Cta>();
        auto cta = std::move(free_.back());
        free_.pop_back();
        return cta;
    }
    void give_back(std::unique_ptr<Cta> cta) {
        const std::lock_guard lock(mutex_);
        free_.push_back(std::move(cta));
    }

private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Cta>> free_;
};
Ctas& ctas() {
    static Ctas all;
    return all;
}

cudaError_t run(const Grid& grid, const std::function<void()>& kernel) {
    static std::atomic<uint64_t> launches = 0;
    const uint64_t seed = uint64_t(number("SPATTN_EMULATOR_SEED", 1)) << 40 | launches++;
    std::atomic<unsigned> next = 0;
    std::atomic<bool> failed = false;
    const auto work = [&] {
        auto cta = ctas().take();
        for (unsigned block; !failed && (block = next.fetch_add(grid.cluster)) < grid.blocks.x;) {
            const std::string failure = cta->run(grid, block, seed * 0x9E3779B97F4A7C15u + block, kernel);
            if (!failure.empty() && !failed.exchange(true)) std::fprintf(stderr, "%s\n", failure.c_str());
        }
        ctas().give_back(std::move(cta));
    };
    const unsigned threads =
        std::min(grid.blocks.x, unsigned(number("SPATTN_EMULATOR_THREADS", int(std::thread::hardware_concurrency()))));
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; ++i) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
    return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

// A thread has none until it chooses a device, or asks for memory.
thread_local CUcontext context_of_thread = nullptr;
void take_context() {
    static int of_gpu;
    context_of_thread = reinterpret_cast<CUcontext>(&of_gpu);
}

// Now, or whenever the graph runs.
cudaError_t enqueue(cudaStream_t stream, std::function<cudaError_t()> effect) {
    if (!stream || !stream->captures) return answer(effect());
    stream->captured.push_back(std::move(effect));
    return cudaSuccess;
}

}  // namespace

cudaError_t launch(const Grid& grid, cudaStream_t stream, std::function<void()> kernel) {
    if (!grid.blocks.x || !grid.threads.x || grid.threads.x > 1024 || grid.shared_bytes > gpu().shared_bytes ||
        grid.blocks.x % grid.cluster)
        return answer(cudaErrorInvalidConfiguration);
    return enqueue(stream, [=] { return run(grid, kernel); });
}

}  // namespace emulator

using emulator::answer;
using emulator::context_of_thread;
using emulator::enqueue;
using emulator::gpu;
using emulator::take_context;

extern "C" {

// ---- devices ----
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (device) return answer(cudaErrorInvalidDevice);
    return take_context(), cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
    if (device) return answer(cudaErrorInvalidDevice);
    switch (which) {
        case cudaDevAttrComputeCapabilityMajor:
            *value = gpu().major;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = gpu().minor;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = int(gpu().shared_bytes);
            break;
        case cudaDevAttrMultiProcessorCount:
            *value = gpu().processors;
            break;
        case cudaDevAttrClockRate:
            *value = gpu().clock;
            break;
        case cudaDevAttrMemoryClockRate:
            *value = gpu().memory_clock;
            break;
        case cudaDevAttrGlobalMemoryBusWidth:
            *value = gpu().bus;
            break;
        default:
            return answer(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (device) return answer(cudaErrorInvalidDevice);
    *properties = {};
    std::snprintf(properties->name, sizeof properties->name, "%s", gpu().name);
    properties->major = gpu().major, properties->minor = gpu().minor;
    properties->multiProcessorCount = gpu().processors;
    properties->totalGlobalMem = size_t(8) << 20;  // so little that small problems take several rounds
    return cudaSuccess;
}

// ---- errors ----
cudaError_t cudaGetLastError() { return std::exchange(emulator::last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "cudaSuccess";
        case cudaErrorInvalidValue:
            return "cudaErrorInvalidValue";
        case cudaErrorInvalidConfiguration:
            return "cudaErrorInvalidConfiguration";
        case cudaErrorInvalidDevice:
            return "cudaErrorInvalidDevice";
        case cudaErrorMemoryAllocation:
            return "cudaErrorMemoryAllocation";
        case cudaErrorLaunchFailure:
            return "cudaErrorLaunchFailure";
        case cudaErrorStreamCaptureUnsupported:
            return "cudaErrorStreamCaptureUnsupported";
        default:
            return "an error that the emulator does not make";
    }
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// ---- memory: spoiled, so that who reads what nobody wrote finds NaN ----
cudaError_t cudaMalloc(void** memory, size_t bytes) {
    take_context();
    constexpr size_t alignment = 256, most = size_t(16) << 30;
    *memory = bytes <= most ? std::aligned_alloc(alignment, std::max(alignment, (bytes + 255) / 256 * 256)) : nullptr;
    if (!*memory) return answer(cudaErrorMemoryAllocation);
    std::memset(*memory, 0xFF, bytes);
    return cudaSuccess;
}
cudaError_t cudaFree(void* memory) { return std::free(memory), cudaSuccess; }
cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t) { return cudaMalloc(memory, bytes); }
cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return cudaFree(memory); }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { return *pool = nullptr, cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    return enqueue(stream, [=] { return std::memcpy(to, from, bytes), cudaSuccess; });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
    return enqueue(stream, [=] { return std::memset(memory, value, bytes), cudaSuccess; });
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) { return cudaMemsetAsync(memory, value, bytes, nullptr); }

// ---- kernels ----
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
    return answer(value < 0 || size_t(value) > gpu().shared_bytes ? cudaErrorInvalidValue : cudaSuccess);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
    static constexpr auto get_context = +[](CUcontext* context) { return *context = context_of_thread, CUDA_SUCCESS; };
    static constexpr auto set_context = +[](CUcontext context) { return context_of_thread = context, CUDA_SUCCESS; };
    const std::string_view asked = symbol;
    *function = asked == "cuTensorMapEncodeTiled" ? reinterpret_cast<void*>(&emulator::encode)
                : asked == "cuCtxGetCurrent"      ? reinterpret_cast<void*>(get_context)
                : asked == "cuCtxSetCurrent"      ? reinterpret_cast<void*>(set_context)
                                                  : nullptr;
    *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

// ---- streams and graphs ----
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return *stream = new CUstream_st, cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    *status = stream && stream->captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    return stream->captures = true, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    *graph = new CUgraph_st{std::exchange(stream->captured, {})};
    return stream->captures = false, cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    return *executable = new CUgraphExec_st{graph->effects}, cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
    for (const auto& effect : executable->effects)
        if (const cudaError_t error = effect(); error != cudaSuccess) return answer(error);
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return delete executable, cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }

}  // extern "C"
