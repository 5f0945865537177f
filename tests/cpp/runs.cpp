// SPDX-License-Identifier: MIT
// Plans and runs of sparseattn.hpp: views, strides, workspaces, half types, lists of a call, packed sequences, caches,
// callbacks.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <sparseattn/sparseattn.hpp>
#include <thread>

#include "check.h"

namespace sa = sparseattn;

// A half type of somebody else's, as the header says how to bring one, and a type of 8 bits.
struct Brain {
    uint16_t bits = 0;
};
template <>
struct sparseattn::element<Brain> {
    static constexpr sa::Dtype dtype = sa::bfloat16;
};
struct Float8 {
    uint8_t bits = 0;
};
template <>
struct sparseattn::element<Float8> {
    static constexpr sa::Dtype dtype = sa::float8_e4m3fn;
};

namespace {

std::vector<float> noise(int64_t count, uint32_t seed) {
    std::vector<float> values;
    for (int64_t i = 0; i < count; ++i) {
        seed = seed * 1664525u + 1013904223u;
        values.push_back(float(seed >> 8) / (1 << 23) - 1);
    }
    return values;
}

Brain to_brain(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

float to_float(Brain x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

std::vector<float> to_floats(const std::vector<Brain>& values) {
    std::vector<float> floats;
    for (Brain x : values) floats.push_back(to_float(x));
    return floats;
}

float to_float(Float8 x) {
    const int exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
    const float size = exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
    return x.bits & 0x80 ? -size : size;
}

sa::Problem small_problem() {
    sa::Problem problem;
    problem.heads_q = 4, problem.heads_kv = 2, problem.seq_q = problem.seq_k = 50, problem.head_dim = 16;
    return problem;
}

// The same for calls of so many queries on a cache.
sa::Problem cache_problem(int64_t queries) {
    sa::Problem problem = small_problem();
    problem.seq_q = queries, problem.starts = true;
    return problem;
}

const sa::Context& context() {
    static const sa::Context shared(sa::cpu);
    return shared;
}

// One forward pass on small_problem's shapes.
std::vector<float> forward(const sa::Plan& plan, const std::vector<float>& q, const std::vector<float>& kv) {
    std::vector<float> out(q.size(), NAN);
    sa::Forward args;
    args.q = sa::view(q.data(), {1, 50, 4, 16});
    args.k = args.v = sa::view(kv.data(), {1, 50, 2, 16});
    args.out = sa::view(out.data(), {1, 50, 4, 16});
    plan.forward(args);
    return out;
}

// The least that std::mdspan has in common with its ancestors.
struct Mdspan {
    float* memory;
    int64_t extents[4], steps[4];
    float* data_handle() const { return memory; }
    int64_t extent(size_t i) const { return extents[i]; }
    int64_t stride(size_t i) const { return steps[i]; }
    static constexpr size_t rank() { return 4; }
};

double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double most = 0;
    for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::fabs(double(a[i]) - b[i]));
    return a.size() == b.size() && std::isfinite(most) ? most : INFINITY;
}

const std::vector<float> q = noise(50 * 4 * 16, 1), kv = noise(50 * 2 * 16, 2);
const sa::Pattern local = sa::causal() & (sa::window(7, 0) | sa::sink(2));

}  // namespace

TEST(plans_explain_and_count) {
    const sa::Plan plan = context().plan(local, small_problem());
    CHECK(plan.explain().find(plan.kernel(sa::Pass::forward)) != std::string::npos);
    const std::vector<sa::Kernel> kernels = sa::kernels();
    CHECK(std::any_of(kernels.begin(), kernels.end(), [&](const sa::Kernel& kernel) {
        return kernel.runs_here && std::string(kernel.name) == plan.kernel(sa::Pass::forward);
    }));
    CHECK_EQ(sa::abi(), uint32_t(SPATTN_ABI));
    CHECK(plan.explain_all().size() >= plan.explain().size());
    CHECK(!plan.kernel(sa::Pass::backward) && !sa::Plan().kernel(sa::Pass::forward));
    CHECK_EQ(plan.stats().pairs, 4 * local.stats({50, 50, 1, 1, {}, 64, 64}).pairs);
    CHECK(plan.stats().flops_forward > 0);
    CHECK(context().plan(local, small_problem()).c() == plan.c());  // the context keeps equal plans
    sa::Problem allowed = small_problem();
    allowed.tf32 = true;
    CHECK(context().plan(local, allowed).explain().find("f32 or TF32") != std::string::npos);
}

TEST(workspaces_given_and_taken) {
    const sa::Plan plan = context().plan(local, small_problem());
    const std::vector<float> taken = forward(plan, q, kv);
    static_assert(std::is_convertible_v<const sa::Buffer&, sa::Workspace>);
    static_assert(!std::is_convertible_v<sa::Buffer, sa::Workspace>);  // a temporary is gone before the pass
    sa::Buffer buffer(plan.workspace(sa::Pass::forward));
    sa::Buffer moved = std::move(buffer);
    std::vector<float> out(q.size());
    sa::Forward args;
    args.q = sa::view(q.data(), {1, 50, 4, 16});
    args.k = args.v = sa::view(kv.data(), {1, 50, 2, 16});
    args.out = sa::view(out.data(), {1, 50, 4, 16});
    args.workspace = moved;
    plan.forward(args);
    CHECK(out == taken);
}

namespace {

struct Last {
    const sa::Plan* plan;
    std::vector<float>* out;
    ~Last() { *out = forward(*plan, q, kv); }
};

}  // namespace

TEST(a_pass_at_the_end_of_a_thread_has_scratch) {
    const sa::Plan plan = context().plan(local, small_problem());
    std::vector<float> first, last;
    std::thread([&] {
        thread_local Last at_end{&plan, &last};  // it is older than the thread's workspace
        first = forward(plan, q, kv);
    }).join();
    CHECK(last == first);
}

TEST(pinned_memory_is_host_memory) {
    const sa::Plan plan = context().plan(local, small_problem());
    const sa::Device pinned{SPATTN_CUDA_HOST, 0};
    std::vector<float> out(q.size());
    sa::Forward args;
    args.q = sa::view(q.data(), {1, 50, 4, 16}, pinned);
    args.k = args.v = sa::view(kv.data(), {1, 50, 2, 16}, pinned);
    args.out = sa::view(out.data(), {1, 50, 4, 16}, pinned);
    plan.forward(args);
    CHECK(out == forward(plan, q, kv));
}

// Whether a T has c().
template <class T, class = void>
constexpr bool is_for_c = false;
template <class T>
constexpr bool is_for_c<T, std::void_t<decltype(std::declval<T>().c())>> = true;

TEST(strides_and_mdspans) {
    static_assert(is_for_c<const sa::View&> && !is_for_c<sa::View>);  // the shape lies in the view
    const sa::Plan plan = context().plan(local, small_problem());
    const std::vector<float> expected = forward(plan, q, kv);
    std::vector<float> swapped(kv.size()), out(q.size());  // [heads, seq, dim], read as [1, seq, heads, dim]
    for (int s = 0; s < 50; ++s)
        for (int h = 0; h < 2; ++h)
            for (int d = 0; d < 16; ++d) swapped[size_t((h * 50 + s) * 16 + d)] = kv[size_t((s * 2 + h) * 16 + d)];
    sa::Forward args;
    args.q = sa::view(q.data(), {1, 50, 4, 16});
    args.k = sa::view(static_cast<const float*>(swapped.data()), {1, 50, 2, 16}, {0, 16, 800, 1});
    args.v = sa::view(Mdspan{swapped.data(), {1, 50, 2, 16}, {0, 16, 800, 1}});
    args.out = sa::view(out.data(), {1, 50, 4, 16});
    plan.forward(args);
    CHECK(out == expected);
    int64_t shape[] = {1, 50, 2, 16};
    spattn_tensor dlpack{const_cast<float*>(kv.data()), {SPATTN_CPU, 0}, 4, {SPATTN_FLOAT, 32, 1}, shape, nullptr, 0};
    args.k = args.v = sa::ConstView(dlpack);
    out.assign(out.size(), 0);
    plan.forward(args);
    CHECK(out == expected);
}

// The least that std::span has in common with its ancestors.
template <class T>
struct Span {
    T* memory;
    size_t count;
    T* data() const { return memory; }
    size_t size() const { return count; }
    Span part(size_t begin, size_t end) const { return {memory + begin, end - begin}; }
};
template <class Container, class = void>
struct is_viewed : std::false_type {};
template <class Container>
struct is_viewed<Container, std::void_t<decltype(sa::view(std::declval<Container>()))>> : std::true_type {};

TEST(spans_may_be_temporary) {
    std::vector<float> memory(8, 1.0f);
    const Span<float> all{memory.data(), memory.size()};
    const sa::View part = sa::view(all.part(2, 7));
    CHECK(part.data() == &memory[2]);
    CHECK_EQ(part.c().shape[0], int64_t(5));
    CHECK_EQ(sa::view(Span<const float>{all.data(), 3}).data(), static_cast<const void*>(memory.data()));
    // Memory of a container goes with it.
    CHECK((is_viewed<std::vector<float>&>::value && is_viewed<const std::vector<float>&>::value));
    CHECK((!is_viewed<std::vector<float>>::value && !is_viewed<std::string>::value));
    CHECK((!is_viewed<std::array<float, 4>>::value && is_viewed<std::array<float, 4>&>::value));
}

TEST(half_types) {
    sa::Problem problem = small_problem();
    problem.dtype = sa::bfloat16;
    std::vector<Brain> half_q, half_kv, half_out(q.size());
    std::vector<float> exact_q, exact_kv;
    for (float x : q) half_q.push_back(to_brain(x)), exact_q.push_back(to_float(half_q.back()));
    for (float x : kv) half_kv.push_back(to_brain(x)), exact_kv.push_back(to_float(half_kv.back()));
    sa::Forward args;
    args.q = sa::view(half_q.data(), {1, 50, 4, 16});
    args.k = args.v = sa::view(half_kv.data(), {1, 50, 2, 16});
    args.out = sa::view(half_out.data(), {1, 50, 4, 16});
    context().plan(local, problem).forward(args);
    CHECK(distance(to_floats(half_out), forward(context().plan(local, small_problem()), exact_q, exact_kv)) < 2e-2);
}

TEST(float8_operands) {
    // Each row has a scale of its own, each head has one, or a call has none. Scales that are powers of 2 leave numbers
    // that bfloat16 has, so that results are those of a bfloat16 call on them. What was not written is NaN, which
    // nothing equals.
    constexpr int64_t rows = 50, dim = 16;
    static constexpr Brain not_a_number{0x7fff};
    struct Operand {
        std::vector<Float8> elements;
        std::vector<float> scales;
        std::vector<Brain> numbers;
    };
    struct Results {
        std::vector<Brain> out = std::vector<Brain>(q.size(), not_a_number), dq = out;
        std::vector<Brain> dk = std::vector<Brain>(kv.size(), not_a_number), dv = dk;
        std::vector<float> lse = std::vector<float>(4 * rows, NAN);
    };
    std::vector<Brain> dout;
    for (float x : noise(rows * 4 * dim, 8)) dout.push_back(to_brain(x));
    const auto run_both_passes = [&](sa::Dtype dtype, sa::Backward args) {
        sa::Problem problem = small_problem();
        problem.dtype = dtype, problem.backward = true;
        const sa::Plan plan = context().plan(local, problem);
        Results made;
        sa::Forward forward;
        forward.q = args.q, forward.k = args.k, forward.v = args.v;
        forward.q_scales = args.q_scales, forward.k_scales = args.k_scales, forward.v_scales = args.v_scales;
        forward.out = sa::view(made.out.data(), {1, rows, 4, dim});
        forward.lse = sa::view(made.lse.data(), {1, 4, rows});
        plan.forward(forward);
        args.out = forward.out, args.lse = forward.lse, args.dout = sa::view(dout.data(), {1, rows, 4, dim});
        args.dq = sa::view(made.dq.data(), {1, rows, 4, dim});
        args.dk = sa::view(made.dk.data(), {1, rows, 2, dim}), args.dv = sa::view(made.dv.data(), {1, rows, 2, dim});
        plan.backward(args);
        return made;
    };
    for (const char* const form : {"rows", "heads", "none"}) {
        check::context = form;
        const auto draw = [&](int64_t heads, uint32_t seed) {
            Operand drawn;
            const bool of_rows = *form == 'r', of_heads = *form == 'h';
            for (int64_t i = 0; i < rows * heads; ++i)
                drawn.scales.push_back(of_rows ? std::ldexp(1.f, int(i % 3) - 1) : of_heads && i % heads ? 0.5f : 1.f);
            for (float x : noise(rows * heads * dim, seed)) {
                const Float8 element{uint8_t(int((x + 1) * 127) & 0xbf)};  // up to 1.875
                drawn.numbers.push_back(to_brain(drawn.scales[drawn.numbers.size() / dim] * to_float(element)));
                drawn.elements.push_back(element);
            }
            return drawn;
        };
        const Operand of_q = draw(4, 5), of_k = draw(2, 6), of_v = draw(2, 7);
        const auto elements = [&](const Operand& x, int64_t heads) {
            return sa::view(x.elements.data(), {1, rows, heads, dim});
        };
        const auto scales = [&](const Operand& x, int64_t heads) {
            if (*form == 'n') return sa::ConstView();
            if (*form == 'h') return sa::view(x.scales.data(), {1, rows, heads}, {0, 0, 1});
            return sa::view(x.scales.data(), {1, rows, heads});
        };
        sa::Backward args, right;
        args.q = elements(of_q, 4), args.k = elements(of_k, 2), args.v = elements(of_v, 2);
        args.q_scales = scales(of_q, 4), args.k_scales = scales(of_k, 2), args.v_scales = scales(of_v, 2);
        right.q = sa::view(of_q.numbers.data(), {1, rows, 4, dim});
        right.k = sa::view(of_k.numbers.data(), {1, rows, 2, dim});
        right.v = sa::view(of_v.numbers.data(), {1, rows, 2, dim});
        const Results made = run_both_passes(sa::float8_e4m3fn, args), wanted = run_both_passes(sa::bfloat16, right);
        CHECK(made.lse == wanted.lse && to_floats(made.out) == to_floats(wanted.out));
        CHECK(to_floats(made.dq) == to_floats(wanted.dq));
        CHECK(to_floats(made.dk) == to_floats(wanted.dk) && to_floats(made.dv) == to_floats(wanted.dv));
    }
}

TEST(lists_of_a_call) {
    // Every query lists the keys that the pattern keeps, so that the answer must be the pattern's.
    const int64_t max = 50;
    std::vector<int32_t> indices(size_t(50 * 2 * max), -1), counts;
    sa::Extent extent;
    extent.seq_q = extent.seq_k = 50;
    const sa::Csr csr = local.to_csr(extent);
    for (size_t row = 0; row < 50; ++row)
        for (size_t head = 0; head < 2; ++head) {
            const int64_t begin = csr.row_ptr[row], end = csr.row_ptr[row + 1];
            counts.push_back(int32_t(end - begin));
            for (int64_t i = begin; i < end; ++i)
                indices[(row * 2 + head) * size_t(max) + size_t(i - begin)] = csr.columns[size_t(i)];
        }
    std::vector<float> out(q.size());
    sa::Forward args;
    args.q = sa::view(q.data(), {1, 50, 4, 16});
    args.k = args.v = sa::view(kv.data(), {1, 50, 2, 16});
    args.out = sa::view(out.data(), {1, 50, 4, 16});
    args.indices = sa::view(indices.data(), {1, 50, 2, max});
    args.index_counts = sa::view(counts.data(), {1, 50, 2});
    context().plan(sa::runtime_tokens(max), small_problem()).forward(args);
    CHECK(distance(out, forward(context().plan(local, small_problem()), q, kv)) < 1e-5);
}

TEST(decoding) {
    // Token after token is a pass over the whole sequence, and what was not written yet may be NaN.
    const sa::Plan plan = context().plan(local, cache_problem(1));
    std::vector<float> cache(kv.size(), NAN), out(q.size());
    std::vector<int32_t> starts(1);
    for (int32_t& token = starts[0]; token < 50; ++token) {
        std::copy_n(&kv[size_t(token) * 32], 32, &cache[size_t(token) * 32]);
        sa::Forward args;
        args.q = sa::view(&q[size_t(token) * 64], {1, 1, 4, 16});
        args.k = args.v = sa::view(cache.data(), {1, 50, 2, 16});
        args.out = sa::view(&out[size_t(token) * 64], {1, 1, 4, 16});
        args.starts = sa::view(starts);
        plan.forward(args);
    }
    CHECK(distance(out, forward(context().plan(local, small_problem()), q, kv)) < 1e-5);
}

TEST(chunks_and_shared_pages) {
    // Two entries ask of one sequence, whose pages lie in some order among others, and each from a place of its own.
    sa::Problem problem = cache_problem(20);
    problem.batch = 2, problem.page_size = 10;
    const std::vector<int64_t> pages{4, 1, 6, 0, 3, 4, 1, 6, 0, 3}, starts{30, 40};
    std::vector<float> pool(7 * 10 * 32, NAN), chunks, out(2 * 20 * 64), lse(2 * 4 * 20);
    for (size_t page = 0; page < 5; ++page) std::copy_n(&kv[page * 320], 320, &pool[size_t(pages[page]) * 320]);
    for (const int64_t start : starts)
        for (int64_t i = 0; i < 20 * 64; ++i) chunks.push_back(q[size_t((start * 64 + i) % (50 * 64))]);
    sa::Forward args;
    args.q = sa::view(chunks.data(), {2, 20, 4, 16});
    args.k = args.v = sa::view(pool.data(), {7, 10, 2, 16});
    args.out = sa::view(out.data(), {2, 20, 4, 16}), args.lse = sa::view(lse.data(), {2, 4, 20});
    args.starts = sa::view(starts), args.page_table = sa::view(pages.data(), {2, 5});
    context().plan(local, problem).forward(args);

    const std::vector<float> whole = forward(context().plan(local, small_problem()), q, kv);
    std::vector<float> expected(whole.begin() + 30 * 64, whole.end());
    expected.insert(expected.end(), whole.begin() + 40 * 64, whole.end());
    expected.resize(out.size());  // the second entry has 10 tokens to ask for, and then none
    CHECK(distance(out, expected) < 1e-5);
    for (size_t i = 0; i < lse.size(); ++i) CHECK_EQ(std::isfinite(lse[i]), i < 80 || i % 20 < 10);
}

TEST(tokens_are_appended) {
    // A prompt, then token after token, on pages that were never written: rows of a pass over the whole sequence.
    const std::vector<float> values = noise(50 * 2 * 16, 5);
    std::vector<float> keys(6 * 10 * 32, NAN), kept(keys), out(q.size()), whole(q.size());
    const std::vector<int32_t> pages{4, 1, 5, 0, 3};
    int64_t token = 0;
    while (token < 50) {
        const int64_t count = token == 0 ? 23 : 1;
        sa::Problem problem = cache_problem(count);
        problem.page_size = 10;
        const std::vector<int64_t> starts{token};
        sa::CacheAppend rows;
        rows.k_new = sa::view(&kv[size_t(token) * 32], {1, count, 2, 16});
        rows.v_new = sa::view(&values[size_t(token) * 32], {1, count, 2, 16});
        rows.k = sa::view(keys.data(), {6, 10, 2, 16}), rows.v = sa::view(kept.data(), {6, 10, 2, 16});
        rows.starts = sa::view(starts), rows.page_table = sa::view(pages.data(), {1, 5});
        context().append(problem, rows);
        sa::Forward args;
        args.q = sa::view(&q[size_t(token) * 64], {1, count, 4, 16});
        args.k = rows.k, args.v = rows.v, args.out = sa::view(&out[size_t(token) * 64], {1, count, 4, 16});
        args.starts = rows.starts, args.page_table = rows.page_table;
        context().plan(local, problem).forward(args);
        token += count;
    }
    sa::Forward args;
    args.q = sa::view(q.data(), {1, 50, 4, 16}), args.k = sa::view(kv.data(), {1, 50, 2, 16});
    args.v = sa::view(values.data(), {1, 50, 2, 16}), args.out = sa::view(whole.data(), {1, 50, 4, 16});
    context().plan(local, small_problem()).forward(args);
    CHECK(distance(out, whole) < 1e-5);
    for (size_t i = 640; i < 960; ++i) CHECK(std::isnan(keys[i]) && std::isnan(kept[i]));  // of a page that is nobody's
}

TEST(float8_caches) {
    // By scales that the call chooses for each row, and by one that the caller has for all. What is read is what the
    // elements stand for.
    sa::Problem problem = cache_problem(50);
    problem.cache_dtype = sa::float8_e4m3fn;
    const std::vector<int32_t> starts{0};
    for (const bool choose : {true, false}) {
        std::vector<Float8> cache(kv.size()), values(kv.size());
        std::vector<float> scales(choose ? 100 : 1, 1 / 256.f), value_scales(scales), stands_for, out(q.size());
        const auto view_of = [&](std::vector<float>& x) {
            return choose ? sa::view(x.data(), {1, 50, 2}) : sa::view(x.data(), {1, 50, 2}, {0, 0, 0});
        };
        sa::CacheAppend rows;
        rows.k_new = rows.v_new = sa::view(kv.data(), {1, 50, 2, 16});
        rows.k = sa::view(cache.data(), {1, 50, 2, 16}), rows.v = sa::view(values.data(), {1, 50, 2, 16});
        rows.k_scales = view_of(scales), rows.v_scales = view_of(value_scales), rows.choose_scales = choose;
        rows.starts = sa::view(starts);
        context().append(problem, rows);
        for (size_t i = 0; i < kv.size(); ++i) {
            const float scale = scales[choose ? i / 16 : 0];
            CHECK(cache[i].bits == values[i].bits && scale == value_scales[choose ? i / 16 : 0]);
            stands_for.push_back(scale * to_float(cache[i]));
            CHECK(std::fabs(stands_for[i] - kv[i]) <= std::fabs(kv[i]) / 16 + scale / 512);
        }
        sa::Forward args;
        args.q = sa::view(q.data(), {1, 50, 4, 16}), args.out = sa::view(out.data(), {1, 50, 4, 16});
        args.k = rows.k, args.v = rows.v, args.starts = rows.starts;
        args.k_scales = rows.k_scales, args.v_scales = rows.v_scales;
        context().plan(local, problem).forward(args);
        CHECK(distance(out, forward(context().plan(local, small_problem()), q, stands_for)) < 1e-5);
    }
}

TEST(queries_of_several_sequences) {
    // A chunk of a prompt lies beside what another sequence decodes, each on pages of its own: rows of what each would
    // give alone. One plan serves any numbers of queries, and rows that are nobody's see nothing.
    const int64_t rows = 24;
    sa::Problem problem = cache_problem(rows);
    problem.axes = sa::Axes::thd, problem.batch = 2, problem.page_size = 10;
    const sa::Plan plan = context().plan(local, problem), alone = context().plan(local, small_problem());
    const std::vector<float> keys[] = {kv, noise(50 * 2 * 16, 3)}, whole[] = {forward(alone, q, keys[0]),
                                                                           forward(alone, q, keys[1])};
    const std::vector<int32_t> pages{4, 1, 6, 0, 3, 7, 2, 9, 5, 8};
    std::vector<float> pool(10 * 320);
    for (size_t page = 0; page < 10; ++page)
        std::copy_n(&keys[page / 5][page % 5 * 320], 320, &pool[size_t(pages[page]) * 320]);
    const std::vector<int64_t> starts{26, 3};
    for (const std::vector<int64_t>& offsets :
         {std::vector<int64_t>{0, 1, 24}, {1, 2, 21}, {2, 20, 20}, {0, 0, 24}, {5, 5, 5}}) {
        check::context = "offsets " + std::to_string(offsets[0]) + ", " + std::to_string(offsets[1]) + ", " +
                         std::to_string(offsets[2]);
        std::vector<float> queries(rows * 64, NAN), expected(rows * 64), out(rows * 64, NAN), lse(4 * rows, NAN);
        for (size_t entry = 0; entry < 2; ++entry) {
            const size_t first = size_t(starts[entry]) * 64, begin = size_t(offsets[entry]) * 64;
            const size_t count = size_t(offsets[entry + 1]) * 64 - begin;
            std::copy_n(q.data() + first, count, queries.data() + begin);
            std::copy_n(whole[entry].data() + first, count, expected.data() + begin);
        }
        sa::Forward args;
        args.q = sa::view(queries.data(), {rows, 4, 16});
        args.k = args.v = sa::view(pool.data(), {10, 10, 2, 16});
        args.out = sa::view(out.data(), {rows, 4, 16}), args.lse = sa::view(lse.data(), {4, rows});
        args.starts = sa::view(starts), args.page_table = sa::view(pages.data(), {2, 5});
        args.query_offsets = sa::view(offsets);
        plan.forward(args);
        CHECK(distance(out, expected) < 1e-5);
        for (int64_t i = 0; i < 4 * rows; ++i)
            CHECK_EQ(std::isfinite(lse[size_t(i)]), i % rows >= offsets[0] && i % rows < offsets[2]);
    }
}

TEST(nodes_of_trees) {
    // Each node gets what a query gets that comes alone behind the tokens before its tree and its ancestors. Entries
    // have as many nodes each, or as the call says.
    constexpr size_t nodes = 7;
    const std::vector<int64_t> starts{31, 8}, offsets{0, nodes, 2 * nodes};
    const std::vector<int32_t> parents{-1, 0, 0, 1, 1, -1, 5, -1, -1, -1, 2, 3, 1, 4};  // of one entry, and the other
    const std::vector<int32_t> pages{4, 1, 6, 0, 3, 7, 2, 9, 5, 8};
    const std::vector<float> keys[] = {kv, noise(50 * 2 * 16, 3)};
    std::vector<float> pool(10 * 320), expected(2 * nodes * 64);
    for (size_t page = 0; page < 10; ++page)
        std::copy_n(&keys[page / 5][page % 5 * 320], 320, &pool[size_t(pages[page]) * 320]);
    for (size_t row = 0; row < 2 * nodes; ++row) {
        const size_t entry = row / nodes;
        const float* const own = &keys[entry][size_t(starts[entry]) * 32];
        std::vector<float> seen(keys[entry].data(), own);
        for (int32_t node = int32_t(row % nodes); node >= 0; node = parents[entry * nodes + size_t(node)])
            seen.insert(seen.end(), own + node * 32, own + node * 32 + 32);
        sa::Problem alone = small_problem();
        alone.seq_q = 1, alone.seq_k = int64_t(seen.size() / 32);
        sa::Forward args;
        args.q = sa::view(&q[row * 64], {1, 1, 4, 16});
        args.k = args.v = sa::view(seen.data(), {1, alone.seq_k, 2, 16});
        args.out = sa::view(&expected[row * 64], {1, 1, 4, 16});
        context().plan(sa::full(), alone).forward(args);
    }
    for (const bool packed : {false, true}) {
        check::context = packed ? "packed" : "as many of each entry";
        sa::Problem problem = cache_problem(packed ? 2 * nodes : nodes);
        problem.axes = packed ? sa::Axes::thd : sa::Axes::bshd;
        problem.batch = 2, problem.page_size = 10, problem.parents = true;
        std::vector<float> out(expected.size(), NAN);
        sa::Forward args;
        args.q = packed ? sa::view(q.data(), {2 * nodes, 4, 16}) : sa::view(q.data(), {2, nodes, 4, 16});
        args.k = args.v = sa::view(pool.data(), {10, 10, 2, 16});
        args.out = packed ? sa::view(out.data(), {2 * nodes, 4, 16}) : sa::view(out.data(), {2, nodes, 4, 16});
        args.starts = sa::view(starts), args.page_table = sa::view(pages.data(), {2, 5});
        args.parents = packed ? sa::view(parents) : sa::view(parents.data(), {2, nodes});
        if (packed) args.query_offsets = sa::view(offsets);
        context().plan(sa::full(), problem).forward(args);
        CHECK(distance(out, expected) < 1e-5);
    }
}

TEST(trees_of_calls_and_of_patterns) {
    // The parents of a call hide what the pattern of that tree hides from a plan that is for one length of the text.
    const std::vector<int64_t> starts{31}, parents{-1, 0, 0, 1, 1, -1, 5, 4, 7, 8, 9, 10, 6, 2};
    sa::Problem once = small_problem(), cached = cache_problem(14);
    once.seq_q = 14, once.seq_k = 45, cached.parents = true;
    std::vector<float> expected(14 * 64), out(expected);
    sa::Forward args;
    args.q = sa::view(q.data(), {1, 14, 4, 16});
    args.k = args.v = sa::view(kv.data(), {1, 45, 2, 16});
    args.out = sa::view(expected.data(), {1, 14, 4, 16});
    context().plan(local & sa::tree(parents), once).forward(args);
    args.k = args.v = sa::view(kv.data(), {1, 50, 2, 16});
    args.out = sa::view(out.data(), {1, 14, 4, 16});
    args.starts = sa::view(starts), args.parents = sa::view(parents.data(), {1, 14});
    context().plan(local, cached).forward(args);
    CHECK(distance(out, expected) < 1e-5);
}

TEST(layers_share_a_layout) {
    // Layers behind the first have other queries, keys and values, and get the bits of calls that make a layout.
    constexpr int64_t rows = 7;  // of each of two sequences; packed, as the offsets say
    const std::vector<int64_t> starts{31, 8}, offsets{0, 5, 2 * rows};
    const std::vector<int32_t> parents{-1, 0, 0, 1, 1, -1, 5, -1, -1, -1, 2, 3, 1, 4};
    const std::vector<int32_t> pages{4, 1, 6, 0, 3, 7, 2, 9, 5, 8};
    for (const std::string form : {"entries", "pages", "packed", "trees"}) {
        check::context = form;
        const bool has_pages = form != "entries", packed = form == "packed";
        sa::Problem problem = cache_problem(packed ? 2 * rows : rows);
        problem.batch = 2, problem.page_size = has_pages ? 10 : 0, problem.parents = form == "trees";
        if (packed) problem.axes = sa::Axes::thd;
        const sa::Plan plan = context().plan(local, problem);
        const sa::Buffer buffer(plan.workspace(sa::Pass::forward));
        for (uint32_t layer = 0; layer < 3; ++layer) {
            const std::vector<float> queries = noise(2 * rows * 64, layer + 1), keys = noise(2 * 50 * 32, layer + 11),
                                     values = noise(2 * 50 * 32, layer + 21);
            std::vector<float> expected(queries.size()), out(queries.size(), NAN);
            const auto of_tokens = [&](const std::vector<float>& x) {
                return has_pages ? sa::view(x.data(), {10, 10, 2, 16}) : sa::view(x.data(), {2, 50, 2, 16});
            };
            const auto of_queries = [&](auto* x) {
                return packed ? sa::view(x, {2 * rows, 4, 16}) : sa::view(x, {2, rows, 4, 16});
            };
            sa::Forward args;
            args.q = of_queries(queries.data()), args.k = of_tokens(keys), args.v = of_tokens(values);
            args.starts = sa::view(starts);
            if (has_pages) args.page_table = sa::view(pages.data(), {2, 5});
            if (packed) args.query_offsets = sa::view(offsets);
            if (problem.parents) args.parents = sa::view(parents.data(), {2, rows});
            args.out = of_queries(expected.data());
            plan.forward(args);
            args.out = of_queries(out.data()), args.workspace = buffer, args.same_step = layer > 0;
            plan.forward(args);
            CHECK(out == expected);
        }
    }
}

TEST(the_threads_workspace_keeps_no_layout) {
    // Whatever a call says of it: each of these begins at a token of its own.
    const sa::Plan plan = context().plan(local, cache_problem(1));
    std::vector<float> out(q.size());
    for (int32_t token = 0; token < 50; ++token) {
        const std::vector<int32_t> starts{token};
        sa::Forward args;
        args.q = sa::view(&q[size_t(token) * 64], {1, 1, 4, 16});
        args.k = args.v = sa::view(kv.data(), {1, 50, 2, 16});
        args.out = sa::view(&out[size_t(token) * 64], {1, 1, 4, 16});
        args.starts = sa::view(starts), args.same_step = true;
        plan.forward(args);
    }
    CHECK(distance(out, forward(context().plan(local, small_problem()), q, kv)) < 1e-5);
}

TEST(packed_sequences) {
    // Two sequences after each other see what each would see alone.
    sa::Problem packed = small_problem();
    packed.axes = sa::Axes::thd;
    std::vector<float> out(q.size());
    sa::Forward args;
    args.q = sa::view(q.data(), {50, 4, 16});
    args.k = args.v = sa::view(kv.data(), {50, 2, 16});
    args.out = sa::view(out.data(), {50, 4, 16});
    context().plan(sa::per_document(sa::causal(), {0, 20, 50}, {0, 20, 50}), packed).forward(args);
    const std::vector<float> apart =
        forward(context().plan(sa::causal() & sa::documents({0, 20, 50}), small_problem()), q, kv);
    CHECK(distance(out, apart) < 1e-5);
}

TEST(softcap_sinks_and_max_logits) {
    sa::Problem problem = small_problem();
    problem.softcap = 2, problem.sink_logits = true;
    const std::vector<float> sinks{0.5f, -1, 2, 0};
    std::vector<float> out(q.size()), lse(200), largest(200);
    sa::Forward args;
    args.q = sa::view(q.data(), {1, 50, 4, 16});
    args.k = args.v = sa::view(kv.data(), {1, 50, 2, 16});
    args.out = sa::view(out.data(), {1, 50, 4, 16});
    args.lse = sa::view(lse.data(), {1, 4, 50}), args.max_logits = sa::view(largest.data(), {1, 4, 50});
    args.sink_logits = sa::view(sinks);
    context().plan(local, problem).forward(args);
    for (size_t i = 0; i < lse.size(); ++i) CHECK(lse[i] > sinks[i / 50] && std::fabs(largest[i]) <= 2);
}

TEST(options_with_callbacks) {
    static std::atomic<int> lines{0}, loops{0};
    sa::ContextOptions options;
    options.device = sa::cpu;
    options.log = [](void*, spattn_enum, const char*) { ++lines; };
    options.log_level = SPATTN_LOG_DEBUG;
    options.parallel_for = [](void*, int64_t tasks, void (*body)(void*, int64_t), void* argument) {
        for (int64_t t = 0; t < tasks; ++t) body(argument, t);
        ++loops;
        return 0;
    };
    const sa::Plan plan = sa::Context(options).plan(local, small_problem());  // keeps what it needs of the context
    CHECK(forward(plan, q, kv) == forward(context().plan(local, small_problem()), q, kv));
    CHECK(lines > 0 && loops > 0);
}
