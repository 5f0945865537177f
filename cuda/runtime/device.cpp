// SPDX-License-Identifier: MIT
#include "runtime/device.h"

#include <algorithm>
#include <vector>

#include "plan/kernel.h"
#include "runtime/driver.h"

namespace spattn::runtime {

namespace {

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

// Making a plan would void a capture that another stream has under way; it is no part of it.
class RelaxedCapture {
public:
    RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

void require_no_capture(void* stream) {
    cudaStreamCaptureStatus status;
    check(cudaStreamIsCapturing(stream_of(stream), &status), "cudaStreamIsCapturing");
    if (status != cudaStreamCaptureStatusNone)
        throw Error(SPATTN_E_CAPTURE, "stream",
                    "is capturing; accepted: a stream that is not, since plans copy their lists",
                    int(cudaErrorStreamCaptureUnsupported), __LINE__);
}

int attribute(cudaDeviceAttr which, int index) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, index), "cudaDeviceGetAttribute");
    return value;
}

// What rows ask of every device, asked once: every row asks for every plan. Never destroyed, as the tables of rows.
struct Facts {
    int capability = 0, shared_bytes = 0;
};
constexpr Facts turing{75, 64 * 1024};
Facts facts_of(int index) {
    static const auto& all = *new std::vector<Facts>([] {
        std::vector<Facts> found = std::vector<Facts>(size_t(count_devices()));
        for (int i = 0; i < int(found.size()); ++i)
            found[size_t(i)] = {10 * attribute(cudaDevAttrComputeCapabilityMajor, i) +
                                    attribute(cudaDevAttrComputeCapabilityMinor, i),
                                attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, i)};
        if (SPATTN_CUDA_TURING) std::fill(found.begin(), found.end(), turing);  // whose code alone was compiled
        return found;
    }());
    return index >= 0 && size_t(index) < all.size() ? all[size_t(index)] : Facts{};
}

// A thread that has used no device has no context, though cudaGetDevice names one: to give that back by cudaSetDevice(0)
// would make a context on GPU 0, of some hundred MiB, for good. So it gets none back.
constexpr int no_context = -2;
struct Contexts {
    PFN_cuCtxGetCurrent_v4000 get = driver_function<PFN_cuCtxGetCurrent_v4000>("cuCtxGetCurrent", 4000);
    PFN_cuCtxSetCurrent_v4000 set = driver_function<PFN_cuCtxSetCurrent_v4000>("cuCtxSetCurrent", 4000);

    static const Contexts& of_driver() {
        static const Contexts found;
        return found;
    }
    bool is_there() const {
        CUcontext context = nullptr;
        return get(&context) == CUDA_SUCCESS && context;
    }
    void leave() const { set(nullptr); }
};

}  // namespace

CurrentDevice::CurrentDevice(int index) {
    int before = 0;
    check(cudaGetDevice(&before), "cudaGetDevice");
    const bool has_context = Contexts::of_driver().is_there();
    if (before == index && has_context) return;
    check(cudaSetDevice(index), "cudaSetDevice");
    before_ = has_context ? before : no_context;
}

CurrentDevice::~CurrentDevice() {
    if (before_ == no_context) Contexts::of_driver().leave();
    else if (before_ >= 0) cudaSetDevice(before_);
}

int count_devices() {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();  // no driver, or none that is new enough: not the caller's error
    return 0;
}

int capability(int index) { return facts_of(index).capability; }

int shared_bytes(int index) { return facts_of(index).shared_bytes; }

int count_processors(int index) { return attribute(cudaDevAttrMultiProcessorCount, index); }

void* allocate(int index, size_t bytes, void* stream) {
    const CurrentDevice current(index);
    require_no_capture(stream);
    const RelaxedCapture relaxed;
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
}

void release(int index, void* memory, size_t, void*) noexcept {
    try {
        const CurrentDevice current(index);
        const RelaxedCapture relaxed;
        cudaFree(memory);
    } catch (const Error&) {
        // At process exit the driver may be gone before the last plan: nothing is left to free then.
    }
}

void copy_in(int index, void* to, const void* from, size_t bytes, void* stream) {
    const CurrentDevice current(index);
    require_no_capture(stream);
    const RelaxedCapture relaxed;
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_of(stream)), "cudaMemcpyAsync");
    // The plan may run on any stream as soon as it exists.
    check(cudaStreamSynchronize(stream_of(stream)), "cudaStreamSynchronize");
}

void clear(int index, void* memory, size_t bytes, void* stream) {
    const CurrentDevice current(index);
    check(cudaMemsetAsync(memory, 0, bytes, stream_of(stream)), "cudaMemsetAsync");
}

Machine make_machine(int index, int) {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    const double memory_clock = attribute(cudaDevAttrMemoryClockRate, index) * 1e-6;        // GHz
    const double bus = attribute(cudaDevAttrGlobalMemoryBusWidth, index) / 8.0;             // bytes
    const double clock = attribute(cudaDevAttrClockRate, index) * 1e-6;                     // GHz, without a load
    return {properties.name, count_processors(index), clock, 2 * memory_clock * bus,
            double(properties.totalGlobalMem)};
}

}  // namespace spattn::runtime
