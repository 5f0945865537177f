// SPDX-License-Identifier: MIT
//
// sparseattn.hpp - sparseattn.h for C++17 and later: owners for handles, operators for sets, exceptions for statuses.
// Header only, over the C ABI alone; needs neither CUDA nor the streams of the standard library.
//
//     namespace sa = sparseattn;
//     sa::Context context(sa::cpu);
//     sa::Pattern pattern = sa::causal() & (sa::window(1023, 0) | sa::sink(4));
//     sa::Problem problem;
//     problem.heads_q = problem.heads_kv = 8, problem.seq_q = problem.seq_k = 4096, problem.head_dim = 64;
//     sa::Plan plan = context.plan(pattern, problem);
//     sa::Forward args;
//     args.q = sa::view(q, {1, 4096, 8, 64});  // and k, v, out
//     plan.forward(args);
//
// What a function means is said beside its namesake in sparseattn.h. Here it is said only what is different:
//   - Handles (Context, Pattern, Plan) are values: a copy shares the object, which never changes. Any number of threads
//     may use one handle at once, as long as none assigns to it.
//   - A failure throws Error. Where SPARSEATTN_NO_EXCEPTIONS is defined, or exceptions are switched off, nothing
//     throws: a handle that could not be made is empty and says so as a bool, operations on an empty handle give an
//     empty one, functions without a result return a Status, and those with one a Result. last_failure() tells the
//     reason.
//   - Views borrow memory. A default View stands for an operand that is left out.
#ifndef SPARSEATTN_SPARSEATTN_HPP
#define SPARSEATTN_SPARSEATTN_HPP

#include <sparseattn/sparseattn.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if !defined(__cpp_exceptions) && !defined(SPARSEATTN_NO_EXCEPTIONS)
#define SPARSEATTN_NO_EXCEPTIONS
#endif
#ifndef SPARSEATTN_NO_EXCEPTIONS
#include <exception>
#include <stdexcept>
#endif

namespace sparseattn {

// The two modes are two sets of symbols, so that files of both may be linked into one program.
#ifdef SPARSEATTN_NO_EXCEPTIONS
inline namespace returning {
#else
inline namespace throwing {
#endif

// ---- status -----------------------------------------------------------------------------------------------------

// The last failure of this thread, copied: later calls do not change it.
struct Failure {
    spattn_status status = SPATTN_OK;
    int32_t native_code = 0;  // cudaError_t where status is 4xxx
    int32_t line = 0;
    std::string message, argument, function;

    // The thousands of a status: what a caller can branch on for ever, whatever is added later.
    spattn_status family() const { return status / 1000 * 1000; }
    const char* name() const { return spattn_status_name(status); }
};

inline Failure last_failure() {
    spattn_error error{};
    error.struct_size = sizeof error;
    spattn_last_error(&error);
    return {error.status, error.native_code, error.line, error.message, error.argument, error.function};
}

#ifdef SPARSEATTN_NO_EXCEPTIONS

class [[nodiscard]] Status {
public:
    Status(spattn_status code = SPATTN_OK) : code_(code) {}
    bool ok() const { return code_ == SPATTN_OK; }
    spattn_status code() const { return code_; }
    const char* name() const { return spattn_status_name(code_); }

private:
    spattn_status code_;
};

// A value, or the status that says why there is none.
template <class T>
struct [[nodiscard]] Result {
    Status status;
    T value;

    explicit operator bool() const { return status.ok(); }
    const T& operator*() const { return value; }
    const T* operator->() const { return &value; }
};
using Done = Status;

namespace detail {
inline Done done(spattn_status status) { return status; }
template <class T>
Result<T> result(spattn_status status, T&& value) {
    return {status, std::forward<T>(value)};
}
inline void require(spattn_status) {}
}  // namespace detail

#else

class Error : public std::runtime_error {
public:
    explicit Error(Failure failure) : std::runtime_error(failure.message), failure_(std::move(failure)) {}
    spattn_status status() const { return failure_.status; }
    spattn_status family() const { return failure_.family(); }
    int32_t native_code() const { return failure_.native_code; }
    const std::string& argument() const { return failure_.argument; }
    const std::string& function() const { return failure_.function; }
    const Failure& failure() const { return failure_; }

private:
    Failure failure_;
};

template <class T>
using Result = T;
using Done = void;

namespace detail {
inline void require(spattn_status status) {
    if (status != SPATTN_OK) throw Error(last_failure());
}
inline Done done(spattn_status status) { require(status); }
template <class T>
Result<T> result(spattn_status status, T&& value) {
    require(status);
    return std::forward<T>(value);
}
}  // namespace detail

#endif

inline uint32_t version() { return spattn_version(); }  // of the library: major * 10000 + minor * 100 + patch
inline uint32_t abi() { return spattn_abi(); }          // of the library: the number in its shared object's name
inline const char* build_json() { return spattn_build_json(); }

inline Result<int32_t> device_count() {
    int32_t count = 0;
    const spattn_status status = spattn_device_count(&count);
    return detail::result(status, std::move(count));
}

// A kernel row of the library, named as Plan::kernel() does and SPATTN_FORCE_KERNEL reads it.
struct Kernel {
    const char* name;
    bool runs_here;  // this machine can run it
};

// The kernel rows of every backend, best first.
inline std::vector<Kernel> kernels() {
    std::vector<Kernel> rows;
    const int32_t count = spattn_kernel_count();
    for (int32_t row = 0; row < count; ++row)
        rows.push_back({spattn_kernel_name(row), spattn_kernel_runs_here(row) != 0});
    return rows;
}

// ---- values -----------------------------------------------------------------------------------------------------

using Device = spattn_device;
using Dtype = spattn_dtype;
using Stream = spattn_stream;

inline constexpr Device cpu{SPATTN_CPU, 0};
constexpr Device cuda(int32_t index) { return {SPATTN_CUDA, index}; }

inline constexpr Dtype float32{SPATTN_FLOAT, 32, 1}, float64{SPATTN_FLOAT, 64, 1}, float16{SPATTN_FLOAT, 16, 1},
    bfloat16{SPATTN_BFLOAT, 16, 1}, float8_e4m3fn{SPATTN_FLOAT8_E4M3FN, 8, 1};

// The dtype of a C++ type. Specialise it for a half type of your own, or one of 8 bits:
//     template <> struct sparseattn::element<my_bf16> { static constexpr Dtype dtype = bfloat16; };
template <class T, class = void>
struct element;
template <class T>
struct element<T, std::enable_if_t<std::is_integral_v<T>>> {
    static constexpr Dtype dtype{
        std::is_same_v<T, bool> ? SPATTN_BOOL : std::is_signed_v<T> ? SPATTN_INT : SPATTN_UINT, 8 * sizeof(T), 1};
};
template <>
struct element<float> {
    static constexpr Dtype dtype = float32;
};
template <>
struct element<double> {
    static constexpr Dtype dtype = float64;
};

namespace detail {

template <class T, class = void>
struct is_container : std::false_type {};
template <class T>  // a std::vector, std::array, std::span, std::string_view ...
struct is_container<T, std::void_t<decltype(std::declval<T&>().data()), decltype(std::declval<T&>().size())>>
    : std::true_type {};

template <class T, class = void>
struct is_mdspan : std::false_type {};
template <class T>  // std::mdspan of C++23, or one of its ancestors
struct is_mdspan<T, std::void_t<decltype(std::declval<T&>().data_handle()), decltype(std::declval<T&>().extent(0)),
                                decltype(std::declval<T&>().stride(0)), decltype(T::rank())>> : std::true_type {};

template <class Container>
using element_of = std::remove_pointer_t<decltype(std::declval<Container&>().data())>;

// Whether a container lends the memory of another one, as spans and string views do: a const one gives the same
// elements, where one that owns them gives const ones.
template <class Container, class = void>
struct is_span : std::false_type {};
template <class T>
struct is_span<T, std::enable_if_t<is_container<T>::value && !std::is_const_v<T> && !std::is_reference_v<T>>>
    : std::is_same<element_of<T>, element_of<const T>> {};

}  // namespace detail

inline constexpr int max_axes = 4;  // of an operand of any function

// A view of memory that may only be read. Shape and strides are copied into it; strides count elements.
class ConstView {
public:
    ConstView() = default;
    ConstView(const void* data, Dtype dtype, const int64_t* shape, const int64_t* strides, int axes,
              Device device = cpu) {
        if (axes < 0 || axes > max_axes) {  // the library refuses it before it would read a shape
            set(data, dtype, axes, device);
            raw_.shape = shape, raw_.strides = strides, is_owner_ = false;
            return;
        }
        set(data, dtype, axes, device);
        has_strides_ = strides != nullptr;
        for (int i = 0; i < axes; ++i) shape_[i] = shape[i], strides_[i] = strides ? strides[i] : 0;
    }
    // What any other library calls a DLTensor, cast: its shape is borrowed too.
    explicit ConstView(const spattn_tensor& tensor) : raw_(tensor), is_owner_(false), is_given_(true) {}

    bool is_given() const { return is_given_; }
    Device device() const { return raw_.device; }
    Dtype dtype() const { return raw_.dtype; }
    int axes() const { return raw_.ndim; }
    const void* data() const { return raw_.data; }

    // The view as the C ABI has it. Its shape lies in this object.
    spattn_tensor c() const& {
        spattn_tensor tensor = raw_;
        if (is_owner_) tensor.shape = shape_, tensor.strides = has_strides_ ? strides_ : nullptr;
        return tensor;
    }
    spattn_tensor c() const&& = delete;

protected:
    void set(const void* data, Dtype dtype, int axes, Device device) {
        raw_.data = const_cast<void*>(data);  // the C ABI knows no const data; inputs are never written
        raw_.device = device, raw_.ndim = axes, raw_.dtype = dtype;
        is_given_ = true;
    }

    spattn_tensor raw_{};
    int64_t shape_[max_axes] = {}, strides_[max_axes] = {};
    bool is_owner_ = true, has_strides_ = false, is_given_ = false;
};

// A view of memory that may be written.
class View : public ConstView {
public:
    View() = default;
    View(void* data, Dtype dtype, const int64_t* shape, const int64_t* strides, int axes, Device device = cpu)
        : ConstView(data, dtype, shape, strides, axes, device) {}
    explicit View(const spattn_tensor& tensor) : ConstView(tensor) {}
    void* data() const { return raw_.data; }
};

template <class T>
using ViewOf = std::conditional_t<std::is_const_v<T>, ConstView, View>;

// view(q, {2, 4096, 8, 64}): memory, shape and, where it is not compact, strides. As many strides as axes, or it does
// not compile.
template <class T, std::size_t axes>
ViewOf<T> view(T* data, const int64_t (&shape)[axes], Device device = cpu) {
    static_assert(axes <= max_axes, "no operand has more axes");
    return {data, element<std::remove_const_t<T>>::dtype, shape, nullptr, int(axes), device};
}
template <class T, std::size_t axes>
ViewOf<T> view(T* data, const int64_t (&shape)[axes], const int64_t (&strides)[axes], Device device = cpu) {
    static_assert(axes <= max_axes, "no operand has more axes");
    return {data, element<std::remove_const_t<T>>::dtype, shape, strides, int(axes), device};
}
// A whole vector, array or span, as one axis.
template <class Container, std::enable_if_t<detail::is_container<Container>::value, int> = 0>
ViewOf<detail::element_of<Container>> view(Container& values) {
    const int64_t size = int64_t(values.size());
    return {values.data(), element<std::remove_const_t<detail::element_of<Container>>>::dtype, &size, nullptr, 1};
}
// A whole array of C, as one axis.
template <class T, std::size_t count>
ViewOf<T> view(T (&values)[count]) {
    return view(values, {int64_t(count)});
}
// A span that nobody keeps, as a part of another: its memory stays.
template <class Span, std::enable_if_t<detail::is_span<Span>::value, int> = 0>
ViewOf<detail::element_of<Span>> view(Span&& values) {
    return view(values);
}
// A std::mdspan with any strided layout.
template <class Mdspan, std::enable_if_t<detail::is_mdspan<Mdspan>::value, int> = 0>
auto view(const Mdspan& values, Device device = cpu) {
    using T = std::remove_pointer_t<decltype(values.data_handle())>;
    static_assert(Mdspan::rank() <= max_axes, "no operand has more axes");
    int64_t shape[max_axes] = {}, strides[max_axes] = {};
    for (std::size_t i = 0; i < Mdspan::rank(); ++i) {
        shape[i] = int64_t(values.extent(i));
        strides[i] = int64_t(values.stride(i));
    }
    const Dtype dtype = element<std::remove_const_t<T>>::dtype;
    return ViewOf<T>(values.data_handle(), dtype, shape, strides, int(Mdspan::rank()), device);
}

// A list of integers as an argument: {0, 3, 8}, a vector or an array of int32_t or int64_t, or a view. Lives as long as
// the call.
class Numbers : public ConstView {
public:
    Numbers(std::initializer_list<int64_t> values) {
        shape_[0] = int64_t(values.size());
        set(values.size() ? values.begin() : &none, element<int64_t>::dtype, 1, cpu);
    }
    template <class Container, std::enable_if_t<detail::is_container<const Container>::value &&
                                                    !std::is_base_of_v<ConstView, Container>, int> = 0>
    Numbers(const Container& values) {
        using T = std::remove_const_t<detail::element_of<const Container>>;
        shape_[0] = int64_t(values.size());
        const void* data = values.data();
        set(data ? data : &none, element<T>::dtype, 1, cpu);  // an empty vector has no memory, but is a list
    }
    template <class T, std::size_t count>
    Numbers(const T (&values)[count]) : ConstView(view(values)) {}
    Numbers(const ConstView& values) : ConstView(values) {}

private:
    static constexpr int64_t none = 0;
};

// From begin up to end.
struct Range {
    int64_t begin = 0, end = 0;
};

// The same of ranges: {{0, 4}, {12, 16}}, a vector of Range, or a view [ranges, 2].
class Ranges : public ConstView {
public:
    Ranges(std::initializer_list<Range> ranges) : Ranges(ranges.begin(), ranges.size()) {}
    Ranges(const std::vector<Range>& ranges) : Ranges(ranges.data(), ranges.size()) {}
    Ranges(const ConstView& ranges) : ConstView(ranges) {}

private:
    Ranges(const Range* ranges, std::size_t count) {
        static_assert(sizeof(Range) == 2 * sizeof(int64_t), "ranges lie as a tensor [ranges, 2] does");
        shape_[0] = int64_t(count), shape_[1] = 2;
        set(count ? ranges : &none, element<int64_t>::dtype, 2, cpu);
    }
    static constexpr Range none{};
};

namespace detail {
// A view as an optional argument of the C ABI.
struct Argument {
    explicit Argument(const ConstView& view) : tensor(view.c()), pointer(view.is_given() ? &tensor : nullptr) {}
    Argument(const Argument&) = delete;
    operator const spattn_tensor*() const { return pointer; }

    spattn_tensor tensor;
    const spattn_tensor* pointer;
};

template <class T>
T sized() {
    T made{};
    made.struct_size = sizeof made;
    return made;
}

// What the C functions with a buffer, a capacity and a size needed fill.
template <class Buffer, class Call>
Result<Buffer> fill(Call call) {
    Buffer buffer;
    std::size_t needed = 0;
    spattn_status status = call(nullptr, std::size_t(0), &needed);
    if (status == SPATTN_OK) {
        buffer.resize(needed);
        status = call(buffer.data(), needed, &needed);
    }
    if constexpr (std::is_same_v<Buffer, std::string>)
        if (!buffer.empty()) buffer.pop_back();  // the C string's end
    return result(status, std::move(buffer));
}
}  // namespace detail

// ---- pattern ----------------------------------------------------------------------------------------------------

enum class Axes : int32_t { bshd = SPATTN_BSHD, bhsd = SPATTN_BHSD, thd = SPATTN_THD };
enum class Pass : int32_t { forward = SPATTN_OP_FORWARD, backward = SPATTN_OP_BACKWARD };

// The rectangle on which a question is asked.
struct Extent {
    int64_t seq_q = 1, seq_k = 1;
    int64_t batch = 1, heads = 1;
    std::optional<int64_t> q_offset{};     // seq_k - seq_q
    int64_t block_q = 64, block_k = 64;    // unit of the block counts
    spattn_cancel_fn cancel = nullptr;     // as in sparseattn.h: what ends a question early
    void* cancel_user = nullptr;

    spattn_extent c() const {
        spattn_extent extent = detail::sized<spattn_extent>();
        extent.flags = q_offset ? SPATTN_EXTENT_Q_OFFSET : 0;
        extent.batch = batch, extent.heads = heads, extent.seq_q = seq_q, extent.seq_k = seq_k;
        extent.q_offset = q_offset.value_or(0), extent.block_q = block_q, extent.block_k = block_k;
        extent.cancel = cancel, extent.cancel_user = cancel_user;
        return extent;
    }
};
using Stats = spattn_stats;

struct Bigbird {
    int64_t block = 64, window_blocks = 3, global_blocks = 1, random_blocks = 1;
    uint64_t seed = 0;
};

// As spattn_xref: 0 is a default, -1 a 0 that is meant.
struct Xref {
    int64_t sinks = 0, window = 0, budget = 0, links = 0, ngram_keys = 0, symbol_before = 0, symbol_after = 0,
            look_back = 0, stop_ratio = 0;
};

// The kept keys of each query row, as lists: columns[row_ptr[q]] .. columns[row_ptr[q + 1] - 1].
struct Csr {
    std::vector<int64_t> row_ptr;
    std::vector<int32_t> columns;
};

namespace detail {

// A counted reference to an object of the library.
template <class T, void (*retain)(const T*), void (*release)(const T*)>
class Handle {
public:
    Handle() = default;
    Handle(const Handle& other) : handle_(other.handle_) {
        if (handle_) retain(handle_);
    }
    Handle(Handle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    Handle& operator=(Handle other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~Handle() { release(handle_); }

    explicit operator bool() const { return handle_ != nullptr; }
    const T* c() const { return handle_; }

protected:
    explicit Handle(T* owned) : handle_(owned) {}

private:
    T* handle_ = nullptr;
};

}  // namespace detail

class Pattern : public detail::Handle<spattn_pattern, spattn_pattern_retain, spattn_pattern_release> {
public:
    Pattern() = default;
    // Takes over one reference, as C functions hand it out.
    static Pattern own(spattn_pattern* handle) { return Pattern(handle); }

    Result<std::string> text() const {
        return detail::fill<std::string>([this](char* buffer, std::size_t capacity, std::size_t* needed) {
            return spattn_pattern_print(c(), buffer, capacity, needed);
        });
    }
    Result<std::vector<unsigned char>> save() const {
        return detail::fill<std::vector<unsigned char>>(
            [this](unsigned char* buffer, std::size_t capacity, std::size_t* needed) {
                return spattn_pattern_save(c(), buffer, capacity, needed);
            });
    }
    Result<uint64_t> hash() const {
        uint64_t hash = 0;
        const spattn_status status = spattn_pattern_hash(c(), &hash);
        return detail::result(status, std::move(hash));
    }
    Result<Stats> stats(const Extent& extent) const {
        Stats stats = detail::sized<Stats>();
        const spattn_extent asked = extent.c();
        const spattn_status status = spattn_pattern_stats(c(), &asked, &stats);
        return detail::result(status, std::move(stats));
    }
    Result<bool> keeps(const Extent& extent, int64_t q, int64_t k, int64_t head = 0, int64_t batch = 0) const {
        int32_t kept = 0;
        const spattn_extent asked = extent.c();
        const spattn_status status = spattn_pattern_keeps(c(), &asked, batch, head, q, k, &kept);
        return detail::result(status, kept != 0);
    }
    // [batch, heads, seq_q, seq_k], bool or uint8.
    Done to_mask(const Extent& extent, const View& out) const {
        const spattn_extent asked = extent.c();
        return detail::done(spattn_pattern_to_mask(c(), &asked, detail::Argument(out)));
    }
    // [height, width] float32: the kept share of each cell.
    Done to_image(const Extent& extent, const View& coverage, int64_t head = 0) const {
        const spattn_extent asked = extent.c();
        return detail::done(spattn_pattern_to_image(c(), &asked, head, detail::Argument(coverage)));
    }
    Result<Csr> to_csr(const Extent& extent, int64_t head = 0) const {
        Csr csr;
        int64_t nnz = 0;
        const spattn_extent asked = extent.c();
        spattn_status status = spattn_pattern_to_csr(c(), &asked, head, nullptr, nullptr, &nnz);
        if (status == SPATTN_OK) {
            csr.row_ptr.resize(std::size_t(extent.seq_q) + 1);
            csr.columns.resize(std::size_t(nnz));
            const Numbers columns(csr.columns);
            status = spattn_pattern_to_csr(c(), &asked, head, detail::Argument(view(csr.row_ptr)),
                                           detail::Argument(columns), &nnz);
        }
        return detail::result(status, std::move(csr));
    }

private:
    explicit Pattern(spattn_pattern* owned) : Handle(owned) {}
};

namespace detail {
// Calls a C function whose last parameter is the pattern it makes.
template <class... Parameters, class... Arguments>
Pattern make(spattn_status (*function)(Parameters...), Arguments&&... arguments) {
    spattn_pattern* made = nullptr;
    require(function(std::forward<Arguments>(arguments)..., &made));
    return Pattern::own(made);
}

// The same for functions of patterns. Without exceptions an empty part gives an empty whole, and the reason that
// last_failure tells stays that of the part.
template <class Function>
Pattern compose(const std::vector<Pattern>& parts, Function function) {
    std::vector<const spattn_pattern*> handles;
    for (const Pattern& part : parts) {
#ifdef SPARSEATTN_NO_EXCEPTIONS
        if (!part) return {};
#endif
        handles.push_back(part.c());
    }
    spattn_pattern* made = nullptr;
    require(function(handles.data(), handles.size(), &made));
    return Pattern::own(made);
}
}  // namespace detail

inline Pattern full() { return detail::make(spattn_pattern_full); }
inline Pattern causal() { return detail::make(spattn_pattern_causal); }
inline Pattern logsparse() { return detail::make(spattn_pattern_logsparse); }
inline Pattern window(int64_t left, int64_t right) { return detail::make(spattn_pattern_window, left, right); }
inline Pattern sink(int64_t tokens) { return detail::make(spattn_pattern_sink, tokens); }
inline Pattern block_diagonal(int64_t block) { return detail::make(spattn_pattern_block_diagonal, block); }
inline Pattern strided(int64_t stride) { return detail::make(spattn_pattern_strided, stride); }
inline Pattern dilated(int64_t left, int64_t right, int64_t dilation) {
    return detail::make(spattn_pattern_dilated, left, right, dilation);
}
inline Pattern landmark(int64_t block, int64_t landmarks) {
    return detail::make(spattn_pattern_landmark, block, landmarks);
}
inline Pattern fixed(int64_t block, int64_t landmarks) { return detail::make(spattn_pattern_fixed, block, landmarks); }
inline Pattern residue(int64_t modulus, int64_t offset) {
    return detail::make(spattn_pattern_residue, modulus, offset);
}
inline Pattern documents(const Numbers& cu_seqlens) {
    return detail::make(spattn_pattern_documents, detail::Argument(cu_seqlens));
}
inline Pattern global_keys(const Numbers& positions) {
    return detail::make(spattn_pattern_global_keys, detail::Argument(positions));
}
inline Pattern global_tokens(const Numbers& positions) {
    return detail::make(spattn_pattern_global_tokens, detail::Argument(positions));
}
inline Pattern tree(const Numbers& parents) { return detail::make(spattn_pattern_tree, detail::Argument(parents)); }
inline Pattern bigbird(const Bigbird& params) {
    spattn_bigbird c = detail::sized<spattn_bigbird>();
    c.block = params.block, c.window_blocks = params.window_blocks, c.global_blocks = params.global_blocks;
    c.random_blocks = params.random_blocks, c.seed = params.seed;
    return detail::make(spattn_pattern_bigbird, &c);
}
namespace detail {
inline Pattern xref(const Numbers& token_ids, const spattn_tensor* symbols, const Xref& params) {
    spattn_xref c = sized<spattn_xref>();
    c.sinks = params.sinks, c.window = params.window, c.budget = params.budget, c.links = params.links;
    c.ngram_keys = params.ngram_keys, c.symbol_before = params.symbol_before, c.symbol_after = params.symbol_after;
    c.look_back = params.look_back, c.stop_ratio = params.stop_ratio;
    return make(spattn_pattern_xref, Argument(token_ids), symbols, &c);
}
}  // namespace detail
// symbols: [tokens, 2]: the identifier open at the end of each token, and the one it completed; -1 for none.
inline Pattern xref(const Numbers& token_ids, const ConstView& symbols, const Xref& params) {
    return detail::xref(token_ids, detail::Argument(symbols), params);
}
template <class Symbols, std::enable_if_t<std::is_base_of_v<ConstView, Symbols>, int> = 0>  // xref(ids, {}) has params
inline Pattern xref(const Numbers& token_ids, const Symbols& symbols) {
    return detail::xref(token_ids, detail::Argument(symbols), {});
}
inline Pattern xref(const Numbers& token_ids, const Xref& params = {}) {
    return detail::xref(token_ids, nullptr, params);
}

// flags are spattn_pattern_flags: with SPATTN_BORROW the arrays must outlive every pattern and plan made of them.
inline Pattern csr(const Numbers& row_ptr, const Numbers& col_idx, int64_t seq_k, uint32_t flags = 0) {
    return detail::make(spattn_pattern_csr, detail::Argument(row_ptr), detail::Argument(col_idx), seq_k, flags);
}
inline Pattern bsr(const Numbers& row_ptr, const Numbers& col_idx, int64_t block_q, int64_t block_k, int64_t seq_q,
                   int64_t seq_k, uint32_t flags = 0) {
    return detail::make(spattn_pattern_bsr, detail::Argument(row_ptr), detail::Argument(col_idx), block_q, block_k,
                        seq_q, seq_k, flags);
}
inline Pattern mask(const ConstView& values, uint32_t flags = 0) {
    return detail::make(spattn_pattern_mask, detail::Argument(values), flags);
}
// keep(head, q, k) -> bool. What it throws arrives at the caller.
template <class Keep>
Pattern predicate(Keep&& keep, int64_t heads, int64_t seq_q, int64_t seq_k) {
#ifdef SPARSEATTN_NO_EXCEPTIONS
    struct Call {
        std::remove_reference_t<Keep>& keep;
        static int32_t run(void* user, int64_t head, int64_t q, int64_t k) {
            return static_cast<Call*>(user)->keep(head, q, k) ? 1 : 0;
        }
    } call{keep};
    return detail::make(spattn_pattern_predicate, &Call::run, &call, heads, seq_q, seq_k);
#else
    struct Call {
        std::remove_reference_t<Keep>& keep;
        std::exception_ptr thrown;
        static int32_t run(void* user, int64_t head, int64_t q, int64_t k) {
            Call& call = *static_cast<Call*>(user);
            try {
                return call.keep(head, q, k) ? 1 : 0;
            } catch (...) {  // must not cross the C ABI
                call.thrown = std::current_exception();
                return -1;
            }
        }
    } call{keep, nullptr};
    spattn_pattern* made = nullptr;
    const spattn_status status = spattn_pattern_predicate(&Call::run, &call, heads, seq_q, seq_k, &made);
    if (call.thrown) std::rethrow_exception(call.thrown);
    detail::require(status);
    return Pattern::own(made);
#endif
}
inline Pattern runtime_tokens(int64_t max_tokens_per_row) {
    return detail::make(spattn_pattern_runtime_tokens, max_tokens_per_row);
}
inline Pattern runtime_blocks(int64_t block_q, int64_t block_k, int64_t max_blocks_per_row) {
    return detail::make(spattn_pattern_runtime_blocks, block_q, block_k, max_blocks_per_row);
}

inline Pattern parse(const char* text) { return detail::make(spattn_pattern_parse, text); }
// A byte of 0 in the text, where C would take it to end, is SPATTN_E_FORMAT with its column, as any other sign that no
// pattern has. (Without exceptions last_failure tells of a byte of 1.)
inline Pattern parse(const std::string& text) {
    const std::size_t zero = text.find('\0');
    if (zero == std::string::npos) return parse(text.c_str());
#ifdef SPARSEATTN_NO_EXCEPTIONS
    std::string marked = text;
    marked[zero] = '\1';
    return parse(marked.c_str());
#else
    throw Error({SPATTN_E_FORMAT, 0, 0,
                 "spattn_pattern_parse: argument text column " + std::to_string(zero + 1) +
                     ": found byte 0; accepted: a text without it",
                 "text", "spattn_pattern_parse"});
#endif
}
inline Pattern load(const void* bytes, std::size_t size) { return detail::make(spattn_pattern_load, bytes, size); }
inline Pattern load(const std::vector<unsigned char>& bytes) { return load(bytes.data(), bytes.size()); }

// Take any number of parts at once; | and & take two.
inline Pattern unite(const std::vector<Pattern>& parts) { return detail::compose(parts, spattn_pattern_union); }
inline Pattern intersect(const std::vector<Pattern>& parts) {
    return detail::compose(parts, spattn_pattern_intersection);
}
inline Pattern operator|(const Pattern& a, const Pattern& b) { return unite({a, b}); }
inline Pattern operator&(const Pattern& a, const Pattern& b) { return intersect({a, b}); }
inline Pattern operator-(const Pattern& a, const Pattern& b) {
    return detail::compose({a, b}, [](const spattn_pattern* const* parts, std::size_t, spattn_pattern** result) {
        return spattn_pattern_difference(parts[0], parts[1], result);
    });
}
inline Pattern& operator|=(Pattern& a, const Pattern& b) { return a = a | b; }
inline Pattern& operator&=(Pattern& a, const Pattern& b) { return a = a & b; }
inline Pattern& operator-=(Pattern& a, const Pattern& b) { return a = a - b; }
namespace detail {
inline Pattern xref_extend(const Pattern& pattern, const Numbers& token_ids, const spattn_tensor* symbols) {
    return compose({pattern}, [&](const spattn_pattern* const* parts, std::size_t, spattn_pattern** result) {
        return spattn_pattern_xref_extend(parts[0], Argument(token_ids), symbols, result);
    });
}
}  // namespace detail
// The text of `pattern`, an xref itself, goes on by these tokens, which have no symbols where none are given.
inline Pattern xref_extend(const Pattern& pattern, const Numbers& token_ids, const ConstView& symbols) {
    return detail::xref_extend(pattern, token_ids, detail::Argument(symbols));
}
inline Pattern xref_extend(const Pattern& pattern, const Numbers& token_ids) {
    return detail::xref_extend(pattern, token_ids, nullptr);
}
inline Pattern transpose(const Pattern& pattern) {
    return detail::compose({pattern}, [](const spattn_pattern* const* parts, std::size_t, spattn_pattern** result) {
        return spattn_pattern_transpose(parts[0], result);
    });
}
inline Pattern per_head(const std::vector<Pattern>& parts, const std::vector<int32_t>& part_of_head) {
    return detail::compose(parts, [&](const spattn_pattern* const* all, std::size_t count, spattn_pattern** result) {
        return spattn_pattern_per_head(all, count, part_of_head.data(), part_of_head.size(), result);
    });
}
inline Pattern per_batch(const std::vector<Pattern>& parts, const std::vector<int32_t>& part_of_batch) {
    return detail::compose(parts, [&](const spattn_pattern* const* all, std::size_t count, spattn_pattern** result) {
        return spattn_pattern_per_batch(all, count, part_of_batch.data(), part_of_batch.size(), result);
    });
}
// An axis of a grid: so many places, what each sees of them, and how many of them a tile has, 0 being all.
struct GridAxis {
    int64_t places;
    Pattern part;
    int64_t tile = 0;
};
inline Pattern grid(const std::vector<GridAxis>& axes) {
    std::vector<int64_t> sizes, tile;
    std::vector<Pattern> parts;
    for (const GridAxis& axis : axes) {
        sizes.push_back(axis.places);
        tile.push_back(axis.tile == 0 ? axis.places : axis.tile);
        parts.push_back(axis.part);
    }
    return detail::compose(parts, [&](const spattn_pattern* const* all, std::size_t count, spattn_pattern** result) {
        return spattn_pattern_grid(sizes.data(), tile.data(), all, count, result);
    });
}
inline Pattern per_document(const Pattern& inner, const Numbers& cu_q, const Numbers& cu_k) {
    return detail::compose({inner}, [&](const spattn_pattern* const* parts, std::size_t, spattn_pattern** result) {
        return spattn_pattern_per_document(parts[0], detail::Argument(cu_q), detail::Argument(cu_k), result);
    });
}
inline Pattern rows(const Pattern& inner, const Ranges& ranges, int64_t seq_q) {
    return detail::compose({inner}, [&](const spattn_pattern* const* parts, std::size_t, spattn_pattern** result) {
        return spattn_pattern_rows(parts[0], detail::Argument(ranges), seq_q, result);
    });
}
inline Pattern columns(const Pattern& inner, const Ranges& ranges, int64_t seq_k) {
    return detail::compose({inner}, [&](const spattn_pattern* const* parts, std::size_t, spattn_pattern** result) {
        return spattn_pattern_columns(parts[0], detail::Argument(ranges), seq_k, result);
    });
}

inline bool operator==(const Pattern& a, const Pattern& b) { return spattn_pattern_equal(a.c(), b.c()) != 0; }
inline bool operator!=(const Pattern& a, const Pattern& b) { return !(a == b); }

#ifndef SPARSEATTN_NO_EXCEPTIONS
// For std::ostream, and whatever else takes a string.
template <class Out>
auto operator<<(Out& out, const Pattern& pattern) -> decltype(out << pattern.text()) {
    return out << pattern.text();
}
#endif

// ---- plan and run -----------------------------------------------------------------------------------------------

struct Problem {
    int64_t batch = 1, heads_q = 1, heads_kv = 1;
    int64_t seq_q = 1, seq_k = 1;
    int64_t head_dim = 1, head_dim_v = 0;  // 0 = head_dim
    Dtype dtype = float32;  // float8_e4m3fn is that of q, k and v, whose rows have scales; out and gradients are then
                            // bfloat16
    Axes axes = Axes::bshd;
    std::optional<double> scale{};      // 1 / sqrt(head_dim)
    std::optional<int64_t> q_offset{};  // seq_k - seq_q
    double softcap = 0;                 // 0 = none
    bool backward = false;              // Plan::backward will be called
    bool deterministic = false, reference = false, value_in_key = false;
    bool sink_logits = false;           // each call brings sink_logits
    bool tf32 = false;                  // float32 products may round their operands to TF32
    bool starts = false;                // keys lie in a cache of seq_k tokens an entry; each call brings starts, and
                                        // with Axes::thd, where seq_q counts the queries of all entries, query_offsets
    bool parents = false;               // the queries of an entry of that cache are nodes of trees, as drafts of
                                        // several continuations are; each call brings parents
    int64_t page_size = 0;              // tokens of a page of that cache; each call brings page_table. 0 = no pages
    Dtype cache_dtype{};                // of k and v there: none = dtype, or float8_e4m3fn, whose rows have scales

    spattn_problem c() const {
        spattn_problem problem = detail::sized<spattn_problem>();
        problem.flags = (backward ? uint32_t(SPATTN_PLAN_BACKWARD) : 0) |
                        (deterministic ? uint32_t(SPATTN_PLAN_DETERMINISTIC) : 0) |
                        (reference ? uint32_t(SPATTN_PLAN_REFERENCE) : 0) |
                        (value_in_key ? uint32_t(SPATTN_PLAN_VALUE_IN_KEY) : 0) |
                        (sink_logits ? uint32_t(SPATTN_PLAN_SINK_LOGITS) : 0) |
                        (tf32 ? uint32_t(SPATTN_PLAN_TF32) : 0) | (starts ? uint32_t(SPATTN_PLAN_STARTS) : 0) |
                        (parents ? uint32_t(SPATTN_PLAN_PARENTS) : 0) |
                        (q_offset ? uint32_t(SPATTN_PLAN_Q_OFFSET) : 0) | (scale ? uint32_t(SPATTN_PLAN_SCALE) : 0);
        problem.batch = batch, problem.heads_q = heads_q, problem.heads_kv = heads_kv;
        problem.seq_q = seq_q, problem.seq_k = seq_k, problem.head_dim = head_dim, problem.head_dim_v = head_dim_v;
        problem.dtype = dtype, problem.axes = int32_t(axes), problem.softcap = softcap;
        problem.scale = scale.value_or(0), problem.q_offset = q_offset.value_or(0), problem.page_size = page_size;
        problem.cache_dtype = cache_dtype;
        return problem;
    }
};

// Scratch of a plan's pass.
struct WorkspaceSize {
    std::size_t bytes = 0, align = 1;
};

// Memory of a scratch that somebody owns; on the plan's device.
struct Workspace {
    void* memory = nullptr;
    std::size_t bytes = 0;
};

// Scratch in host memory. One serves any number of calls after each other.
class Buffer {
public:
    Buffer() = default;
    explicit Buffer(WorkspaceSize size) : size_(size) {
        if (!size.bytes) return;
#ifdef SPARSEATTN_NO_EXCEPTIONS
        // Without memory the buffer stays empty, and the pass that gets it says how many bytes it lacks.
        memory_ = ::operator new(size.bytes, std::align_val_t(size.align), std::nothrow);
        if (!memory_) size_ = {};
#else
        memory_ = ::operator new(size.bytes, std::align_val_t(size.align));
#endif
    }
    Buffer(Buffer&& other) noexcept
        : size_(std::exchange(other.size_, {})), memory_(std::exchange(other.memory_, nullptr)) {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(size_, other.size_), std::swap(memory_, other.memory_);
        return *this;
    }
    ~Buffer() {
        if (memory_) ::operator delete(memory_, std::align_val_t(size_.align));
    }
    operator Workspace() const& { return {memory_, size_.bytes}; }
    operator Workspace() const&& = delete;  // its memory would be gone when the pass runs
    bool holds(WorkspaceSize size) const { return size.bytes <= size_.bytes && size.align <= size_.align; }

private:
    WorkspaceSize size_;
    void* memory_ = nullptr;
};

// Operands of a forward pass. Shapes and meanings: spattn_forward_args. Without a workspace, where the operands are in
// host memory, the thread's own is taken, which grows with what its calls need and lasts as long as the thread.
//
// On a cache (Problem::starts) Context::append() brings tokens to k and v, and a call asks from the first of them on; one
// plan serves a sequence as it grows:
//     args.starts = sa::view(starts);  // [batch] int32 or int64, on the plan's device: tokens that were there before
//     args.page_table = sa::view(pages, {batch, problem.seq_k / problem.page_size});  // likewise, with a page_size
//     args.query_offsets = sa::view(offsets);  // [batch + 1], likewise, with Axes::thd: which rows of q are whose
//     args.parents = sa::view(parents, {batch, problem.seq_q});  // likewise, with Problem::parents; {seq_q} with thd
//     args.k_scales = sa::view(scales, {batch, problem.seq_k, problem.heads_kv});  // of a float8 cache; v_scales, too
//     plan.forward(args);
// parents has the number of each query's parent among those of its entry, which is below its own, or -1 for a root.
//
// The layers of a model bring the same numbers, each with keys and values of its own. The first call makes a layout of
// these numbers in its workspace, and same_step says that it is still there:
//     args.workspace = buffer;     // of all layers: sa::Buffer buffer(plan.workspace(sa::Pass::forward))
//     args.same_step = layer > 0;  // SPATTN_FORWARD_SAME_STEP, which says what else must be the same
// This is a promise, and where it does not hold, memory outside of k and v may be read. Without a workspace of the
// caller's it changes nothing: other calls write to the thread's own, so that each makes its layout anew.
//
// Where Problem::dtype is float8_e4m3fn, q, k and v are views of a type of 8 bits (element, above), and out of one of
// bfloat16. Each row may have a scale, which is 1 where a call has none:
//     args.q_scales = sa::view(scales, {batch, problem.seq_q, problem.heads_q});  // float32, in the axes of q
//     args.k_scales = sa::view(k_scales, {batch, problem.seq_k, problem.heads_kv});  // v_scales, too
//
// What the plan wants and a call lacks is SPATTN_E_NULL; what a plan does not want, SPATTN_E_STATE.
struct Forward {
    Stream stream = nullptr;
    ConstView q, k, v;
    View out, lse{}, max_logits{};
    ConstView indices{}, index_counts{}, sink_logits{}, starts{}, page_table{}, query_offsets{}, parents{};
    ConstView q_scales{}, k_scales{}, v_scales{};
    Workspace workspace{};
    bool same_step = false;
};

// Operands of Context::append(). Shapes and meanings: spattn_cache_append_args.
struct CacheAppend {
    Stream stream = nullptr;
    ConstView k_new, v_new;
    View k, v;
    ConstView starts, counts{}, page_table{}, query_offsets{};
    View k_scales{}, v_scales{};  // of a float8 cache: read, or
    bool choose_scales = false;   // written, as this call chooses them
};

// Operands of a backward pass. Shapes and meanings: spattn_backward_args. A workspace is taken as in a forward pass.
//
// Where Problem::dtype is float8_e4m3fn, q, k, v and their scales are those that forward had, and out, dout, dq, dk and
// dv are views of a type of bfloat16. Gradients are of what rows stand for, elements times scales, so that who has
// rounded to float8 may hand them on as they are (a straight-through estimator).
struct Backward {
    Stream stream = nullptr;
    ConstView q, k, v, out, lse, dout, dlse{};
    View dq, dk, dv;
    ConstView indices{}, index_counts{}, sink_logits{};
    View dsink_logits{};
    ConstView q_scales{}, k_scales{}, v_scales{};
    Workspace workspace{};
};

class Plan : public detail::Handle<spattn_plan, spattn_plan_retain, spattn_plan_release> {
public:
    Plan() = default;
    static Plan own(spattn_plan* handle) { return Plan(handle); }

    Result<WorkspaceSize> workspace(Pass pass) const {
        WorkspaceSize size;
        const spattn_status status = spattn_plan_workspace(c(), int32_t(pass), &size.bytes, &size.align);
        return detail::result(status, std::move(size));
    }
    Result<Stats> stats() const {
        Stats stats = detail::sized<Stats>();
        const spattn_status status = spattn_plan_stats(c(), &stats);
        return detail::result(status, std::move(stats));
    }
    // The kernel row that a pass runs, by name; NULL where the pass was not planned. It lives as long as the plan.
    const char* kernel(Pass pass) const { return spattn_plan_kernel(c(), int32_t(pass)); }
    Result<std::string> explain() const {
        return detail::fill<std::string>([this](char* buffer, std::size_t capacity, std::size_t* needed) {
            return spattn_plan_explain(c(), buffer, capacity, needed);
        });
    }
    Result<std::string> explain_all() const {
        return detail::fill<std::string>([this](char* buffer, std::size_t capacity, std::size_t* needed) {
            return spattn_plan_explain_all(c(), buffer, capacity, needed);
        });
    }

    Done forward(const Forward& args) const {
        const detail::Argument q(args.q), k(args.k), v(args.v), out(args.out), lse(args.lse),
            max_logits(args.max_logits), indices(args.indices), index_counts(args.index_counts),
            sink_logits(args.sink_logits), starts(args.starts), page_table(args.page_table),
            query_offsets(args.query_offsets), parents(args.parents), q_scales(args.q_scales), k_scales(args.k_scales),
            v_scales(args.v_scales);
        spattn_forward_args c = detail::sized<spattn_forward_args>();
        c.flags = args.same_step && args.workspace.memory ? uint32_t(SPATTN_FORWARD_SAME_STEP) : 0;
        c.stream = args.stream, c.q = q, c.k = k, c.v = v, c.out = out, c.lse = lse, c.max_logits = max_logits;
        c.indices = indices, c.index_counts = index_counts, c.sink_logits = sink_logits;
        c.starts = starts, c.page_table = page_table, c.query_offsets = query_offsets;
        c.parents = parents, c.q_scales = q_scales, c.k_scales = k_scales, c.v_scales = v_scales;
        return run(spattn_forward, c, Pass::forward, args.workspace);
    }
    Done backward(const Backward& args) const {
        const detail::Argument q(args.q), k(args.k), v(args.v), out(args.out), lse(args.lse), dout(args.dout),
            dlse(args.dlse), dq(args.dq), dk(args.dk), dv(args.dv), indices(args.indices),
            index_counts(args.index_counts), sink_logits(args.sink_logits), dsink_logits(args.dsink_logits),
            q_scales(args.q_scales), k_scales(args.k_scales), v_scales(args.v_scales);
        spattn_backward_args c = detail::sized<spattn_backward_args>();
        c.stream = args.stream, c.q = q, c.k = k, c.v = v, c.out = out, c.lse = lse, c.dout = dout, c.dlse = dlse;
        c.dq = dq, c.dk = dk, c.dv = dv, c.indices = indices, c.index_counts = index_counts;
        c.sink_logits = sink_logits, c.dsink_logits = dsink_logits;
        c.q_scales = q_scales, c.k_scales = k_scales, c.v_scales = v_scales;
        return run(spattn_backward, c, Pass::backward, args.workspace);
    }

private:
    explicit Plan(spattn_plan* owned) : Handle(owned) {}

    static bool is_host(const spattn_tensor* operand) {
        return !operand || operand->device.type == SPATTN_CPU || operand->device.type == SPATTN_CUDA_HOST;
    }

    template <class Args>
    Done run(spattn_status (*pass)(const spattn_plan*, const Args*), Args& args, Pass which, Workspace given) const {
        args.workspace = given.memory, args.workspace_bytes = given.bytes;
        // One operand of a wrong device shall not hide that the others are in host memory: the library names that one.
        if (given.memory || !(is_host(args.q) || is_host(args.out))) return detail::done(pass(c(), &args));

        WorkspaceSize size;
        spattn_status status = spattn_plan_workspace(c(), int32_t(which), &size.bytes, &size.align);
        if (status != SPATTN_OK) return detail::done(status);
        Buffer taken, *const own = kept();
        if (own) taken = std::move(*own);  // a callback of the library may start another pass on this thread
        if (!taken.holds(size)) taken = Buffer(), taken = Buffer(size);
        given = taken;
        args.workspace = given.memory, args.workspace_bytes = given.bytes;
        status = pass(c(), &args);
        if (own) *own = std::move(taken);
        return detail::done(status);
    }

    // The thread's own scratch. Where a destructor runs a pass when that is gone, as one of a static object may: NULL.
    static Buffer* kept() {
        static thread_local bool is_gone = false;
        struct Kept {
            Buffer buffer;
            ~Kept() { is_gone = true; }
        };
        if (is_gone) return nullptr;
        static thread_local Kept kept;
        return &kept.buffer;
    }
};

// ---- several devices ----------------------------------------------------------------------------------------------

enum class Split : int32_t { contiguous = SPATTN_SPLIT_CONTIGUOUS, zigzag = SPATTN_SPLIT_ZIGZAG };

// Which of several ranks this one is, and who holds which tokens.
struct Ranks {
    int32_t ranks = 1, rank = 0;
    Split split = Split::contiguous;
    std::vector<std::vector<Range>> ranges{};  // those that each rank holds, in its order; none: as `split` says
    bool scales = false;                       // exchanges have scales, too: with a Problem::dtype of float8_e4m3fn
};
using Peer = spattn_peer;

// Keys and values, or their gradients; v is none with Problem::value_in_key. Scales are float32, shaped as k and v
// without the last axis: beside float8 with Ranks::scales, and none beside gradients.
struct Keys {
    ConstView k, v, k_scales{}, v_scales{};
};
struct WrittenKeys {
    View k, v, k_scales{}, v_scales{};

    operator Keys() const { return {k, v, k_scales, v_scales}; }
};

// A sequence on several ranks: chapter 7 of sparseattn.h. On each of them:
//     const sa::Sharding sharding = context.shard(pattern, problem, {ranks, rank});
//     const auto [sent, received] = sharding.buffers();      // the bytes of each
//     sharding.pack({k, v}, {sent_memory, sent.bytes});
//     for each other rank: send the part of `sent` that sharding.peer(rank) names, and receive its part of `received`
//     const int64_t tokens = sharding.seen().tokens;         // those of seen_k and seen_v
//     sharding.unpack({k, v}, {received_memory, received.bytes}, {seen_k, seen_v});
//     sharding.plan().forward(args);                         // q of this rank, seen_k, seen_v
// and after backward, which writes seen_dk and seen_dv:
//     sharding.pack_gradients({seen_dk, seen_dv}, {received_memory, received.bytes});
//     the same way back: the part of `received` that peer(rank).back_received_offset names goes to that rank, and what
//     comes from it belongs in the part of `sent` at back_sent_offset
//     sharding.add_gradients({seen_dk, seen_dv}, {sent_memory, sent.bytes}, {dk, dv});
// Where Problem::dtype is float8_e4m3fn, gradients are bfloat16, and a peer says other parts for the way back. Scales
// of rows travel with keys and values, so that ranks may round their own tokens:
//     context.shard(pattern, problem, {ranks, rank, sa::Split::contiguous, {}, true});
//     sharding.unpack({k, v, k_scales, v_scales}, received, {seen_k, seen_v, seen_k_scales, seen_v_scales});
class Sharding : public detail::Handle<spattn_sharding, spattn_sharding_retain, spattn_sharding_release> {
public:
    Sharding() = default;
    static Sharding own(spattn_sharding* handle) { return Sharding(handle); }

    // The plan of this rank's queries, which takes the keys of `seen`.
    Plan plan() const {
#ifdef SPARSEATTN_NO_EXCEPTIONS
        if (!*this) return {};
#endif
        spattn_plan* made = nullptr;
        detail::require(spattn_sharding_plan(c(), &made));
        return Plan::own(made);
    }
    // What a rank holds.
    Result<std::vector<Range>> ranges(int32_t rank) const {
        std::vector<Range> held;
        const spattn_status status = read_ranges(held, [&](const spattn_tensor* ranges, int64_t* count) {
            return spattn_sharding_ranges(c(), rank, ranges, count);
        });
        return detail::result(status, std::move(held));
    }
    // The tokens whose keys the plan takes.
    struct Seen {
        std::vector<Range> ranges;  // rising
        int64_t tokens = 0;         // how many the ranges have
    };
    Result<Seen> seen() const {
        Seen seen;
        const spattn_status status = read_ranges(seen.ranges, [&](const spattn_tensor* ranges, int64_t* count) {
            return spattn_sharding_seen(c(), ranges, count, &seen.tokens);
        });
        return detail::result(status, std::move(seen));
    }
    // What goes between this rank and another, and where its parts of the buffers are.
    Result<Peer> peer(int32_t rank) const {
        Peer peer = detail::sized<Peer>();
        const spattn_status status = spattn_sharding_peer(c(), rank, &peer);
        return detail::result(status, std::move(peer));
    }
    struct Buffers {
        WorkspaceSize sent, received;
    };
    Result<Buffers> buffers() const {
        Buffers sizes{{0, 16}, {0, 16}};
        const spattn_status status = spattn_sharding_buffers(c(), &sizes.sent.bytes, &sizes.received.bytes);
        return detail::result(status, std::move(sizes));
    }

    Done pack(const Keys& held, Workspace sent, Stream stream = nullptr) const {
        return exchange(SPATTN_EXCHANGE_PACK, held, {}, sent, stream);
    }
    // held: none where `seen` has them already.
    Done unpack(const Keys& held, Workspace received, const WrittenKeys& seen, Stream stream = nullptr) const {
        return exchange(SPATTN_EXCHANGE_UNPACK, held, seen, received, stream);
    }
    Done pack_gradients(const Keys& seen, Workspace received, Stream stream = nullptr) const {
        return exchange(SPATTN_EXCHANGE_PACK_GRADIENTS, {}, seen, received, stream);
    }
    Done add_gradients(const Keys& seen, Workspace sent, const WrittenKeys& held, Stream stream = nullptr) const {
        return exchange(SPATTN_EXCHANGE_ADD_GRADIENTS, held, seen, sent, stream);
    }
    // The sums take the place of this rank's own gradients in `seen`.
    Done add_gradients(const WrittenKeys& seen, Workspace sent, Stream stream = nullptr) const {
        return exchange(SPATTN_EXCHANGE_ADD_GRADIENTS, {}, seen, sent, stream);
    }

private:
    explicit Sharding(spattn_sharding* owned) : Handle(owned) {}

    // call(ranges, count): a C function that writes ranges where they are not NULL, and always how many there are.
    template <class Call>
    static spattn_status read_ranges(std::vector<Range>& ranges, Call call) {
        int64_t count = 0;
        const spattn_status status = call(nullptr, &count);
        if (status != SPATTN_OK) return status;
        ranges.resize(std::size_t(count));
        return call(detail::Argument(Ranges(ranges)), &count);
    }

    Done exchange(spattn_enum step, const Keys& held, const Keys& seen, Workspace buffer, Stream stream) const {
        const detail::Argument k(held.k), v(held.v), seen_k(seen.k), seen_v(seen.v), k_scales(held.k_scales),
            v_scales(held.v_scales), seen_k_scales(seen.k_scales), seen_v_scales(seen.v_scales);
        spattn_exchange_args args = detail::sized<spattn_exchange_args>();
        args.stream = stream, args.k = k, args.v = v, args.seen_k = seen_k, args.seen_v = seen_v;
        args.k_scales = k_scales, args.v_scales = v_scales;
        args.seen_k_scales = seen_k_scales, args.seen_v_scales = seen_v_scales;
        args.buffer = buffer.memory, args.buffer_bytes = buffer.bytes;
        return detail::done(spattn_exchange(c(), step, &args));
    }
};

// Fields as in sparseattn.h; zero is the default of each.
struct ContextOptions : spattn_context_options {
    ContextOptions() : spattn_context_options(detail::sized<spattn_context_options>()) {}
};

class Context : public detail::Handle<spattn_context, spattn_context_retain, spattn_context_release> {
public:
    // The first GPU that has kernels in this build, else the CPU.
    Context() : Context(ContextOptions()) {}
    explicit Context(Device device) : Context(on(device)) {}
    explicit Context(const ContextOptions& options) : Handle(create(options)) {}

    // Equal patterns and problems get the same plan. stream: where device copies of lists are made.
    Plan plan(const Pattern& pattern, const Problem& problem, Stream stream = nullptr) const {
#ifdef SPARSEATTN_NO_EXCEPTIONS
        if (!*this || !pattern) return {};
#endif
        const spattn_problem c_problem = problem.c();
        spattn_plan* made = nullptr;
        detail::require(spattn_plan_create(c(), pattern.c(), &c_problem, stream, &made));
        return Plan::own(made);
    }

    // problem: of all tokens, the same on each rank, as is all of `ranks` but its number.
    Sharding shard(const Pattern& pattern, const Problem& problem, const Ranks& ranks, Stream stream = nullptr) const {
#ifdef SPARSEATTN_NO_EXCEPTIONS
        if (!*this || !pattern) return {};
#endif
        std::vector<int64_t> numbers;  // [ranges, 3]
        for (std::size_t rank = 0; rank < ranks.ranges.size(); ++rank)
            for (const Range& range : ranks.ranges[rank])
                numbers.insert(numbers.end(), {int64_t(rank), range.begin, range.end});
        const int64_t count = int64_t(numbers.size() / 3);
        if (numbers.empty()) numbers.push_back(0);  // ranks without ranges are the library's to refuse
        const ConstView table = view(numbers.data(), {count, 3});  // whose shape the argument points to
        const detail::Argument ranges(table);
        spattn_sharding_options options = detail::sized<spattn_sharding_options>();
        options.ranks = ranks.ranks, options.rank = ranks.rank, options.split = int32_t(ranks.split);
        options.flags = ranks.scales ? uint32_t(SPATTN_SHARDING_SCALES) : 0;
        if (!ranks.ranges.empty()) options.ranges = ranges;
        const spattn_problem c_problem = problem.c();
        spattn_sharding* made = nullptr;
        detail::require(spattn_sharding_create(c(), pattern.c(), &c_problem, &options, stream, &made));
        return Sharding::own(made);
    }

    // Writes new tokens, problem.seq_q of an entry, into a cache that plans of this problem read.
    Done append(const Problem& problem, const CacheAppend& args) const {
        const detail::Argument k_new(args.k_new), v_new(args.v_new), k(args.k), v(args.v), starts(args.starts),
            counts(args.counts), page_table(args.page_table), query_offsets(args.query_offsets),
            k_scales(args.k_scales), v_scales(args.v_scales);
        spattn_cache_append_args c_args = detail::sized<spattn_cache_append_args>();
        c_args.flags = args.choose_scales ? uint32_t(SPATTN_APPEND_SCALES) : 0;
        c_args.stream = args.stream, c_args.k_new = k_new, c_args.v_new = v_new, c_args.k = k, c_args.v = v;
        c_args.starts = starts, c_args.counts = counts;
        c_args.page_table = page_table, c_args.query_offsets = query_offsets;
        c_args.k_scales = k_scales, c_args.v_scales = v_scales;
        const spattn_problem c_problem = problem.c();
        return detail::done(spattn_cache_append(c(), &c_problem, &c_args));
    }

private:
    static ContextOptions on(Device device) {
        ContextOptions options;
        options.device = device;
        return options;
    }
    static spattn_context* create(const ContextOptions& options) {
        spattn_context* made = nullptr;
        detail::require(spattn_context_create(&options, &made));
        return made;
    }
};

}  // inline namespace
}  // namespace sparseattn

template <>
struct std::hash<sparseattn::Pattern> {
    std::size_t operator()(const sparseattn::Pattern& pattern) const {
        uint64_t found = 0;
        spattn_pattern_hash(pattern.c(), &found);  // 0 for an empty handle
        return std::size_t(found);
    }
};

#endif
