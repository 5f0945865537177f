// SPDX-License-Identifier: MIT
// Calls on a cache in a captured graph: sequences grow, their pages move, trees of drafts change, and of a ragged call
// each has other numbers of queries, between replays. The truth is the CPU's rows of reference on the same bytes. And new
// tokens, which go to their places.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <random>

#include "abi/drawn_append.h"
#include "gpu/cases.h"
#include "gpu/gpu.h"

using namespace gpu;

namespace {

constexpr int64_t batch = 3, heads_kv = 2, capacity = 384, dim = 64;

spattn_problem problem_of(int64_t queries, int64_t group, int64_t page_size, uint32_t flags) {
    auto p = abi::sized<spattn_problem>();
    p.flags = SPATTN_PLAN_STARTS | flags;
    p.batch = batch, p.heads_q = group * heads_kv, p.heads_kv = heads_kv, p.seq_q = queries, p.seq_k = capacity;
    p.head_dim = dim, p.dtype = abi::bf16, p.page_size = page_size;
    return p;
}

// A tensor of the host and its copy on the device, so many bytes behind an aligned address.
struct Mirrored {
    Mirrored(std::vector<int64_t> shape, spattn_dtype dtype, size_t shift = 0)
        : host(std::move(shape), dtype), on_device(host.view) {
        on_device.device = {SPATTN_CUDA, 0};
        cuda(cudaMalloc(&memory, host.bytes + shift), "a tensor");
        on_device.data = static_cast<char*>(memory) + shift;
        send();
    }
    ~Mirrored() { cudaFree(memory); }
    Mirrored(const Mirrored&) = delete;
    void send() { copy(on_device.data, host.data, host.bytes); }
    std::vector<uint16_t> received() const {
        std::vector<uint16_t> values(host.bytes / sizeof(uint16_t));
        copy(values.data(), on_device.data, host.bytes);
        return values;
    }

    abi::Tensor host;
    spattn_tensor on_device;
    void* memory = nullptr;
};

float widen(uint16_t bits) {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

void draw(Mirrored& to, std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < to.host.bytes / sizeof(uint16_t); ++i) {
        const float value = normal(random);
        uint32_t word;
        std::memcpy(&word, &value, sizeof word);
        to.host.as<uint16_t>()[i] = uint16_t(word >> 16);
    }
    to.send();
}

// Between what the device has and what the host has, of numbers beyond 1 a part of them.
double worst_error(Mirrored& x) {
    double worst = 0;
    const std::vector<uint16_t> got = x.received();
    for (size_t i = 0; i < got.size(); ++i) {
        const double truth = widen(x.host.as<uint16_t>()[i]);
        const double error = std::abs(widen(got[i]) - truth) / std::max(1.0, std::abs(truth));
        worst = std::max(worst, std::isnan(error) ? HUGE_VAL : error);
    }
    return worst;
}

// Operands of calls, whose starts and pages change.
struct Calls {
    // listed: entries of each query's list, for patterns whose calls bring lists. shift: of q.
    Calls(const spattn_problem& p, int64_t listed, size_t shift, std::mt19937& random)
        : p(p), q(queries(p.head_dim), abi::bf16, shift), k(keys(p.head_dim), abi::bf16), v(keys(value_dim()), abi::bf16),
          out(queries(value_dim()), abi::bf16),
          starts({p.batch}, abi::i64), table({p.batch, p.page_size ? p.seq_k / p.page_size : 1}, abi::i32),
          offsets({p.batch + 1}, abi::i32), indices(lists(listed), abi::i32), parents(nodes(), abi::i32) {
        for (Mirrored* x : {&q, &k, &v}) draw(*x, random);
    }

    void move(std::mt19937& random) {
        int32_t* const bounds = offsets.host.as<int32_t>();  // any, in their order: rows before and behind are nobody's
        for (int64_t b = 0; b <= p.batch; ++b) bounds[b] = int32_t(random() % (p.seq_q + 1));
        std::sort(bounds, bounds + p.batch + 1);
        offsets.send();
        const int64_t last = p.seq_k - p.seq_q;
        for (int64_t b = 0; b < p.batch; ++b) {
            // Most of many sequences are short.
            const double part = std::pow(double(random() % 4096) / 4095, p.batch > batch ? 8 : 1);
            starts.host.as<int64_t>()[b] = std::llround(part * double(last));
        }
        starts.host.as<int64_t>()[random() % p.batch] = random() % 2 ? -p.seq_q : last;
        starts.send();
        for (size_t i = 0; i < indices.host.bytes / sizeof(int32_t); ++i)
            indices.host.as<int32_t>()[i] = int32_t(random() % (p.seq_k / 2)) - 3;
        indices.send();
        for (size_t i = 0; i < parents.host.bytes / sizeof(int32_t); ++i)  // several roots, and numbers below -1
            parents.host.as<int32_t>()[i] = int32_t(i % size_t(p.seq_q)) - 1 - int32_t(random() % 4);
        parents.send();
        const size_t pages = table.host.bytes / sizeof(int32_t);
        for (size_t i = 0; i < pages; ++i) {  // any order
            const size_t other = random() % (i + 1);
            table.host.as<int32_t>()[i] = table.host.as<int32_t>()[other];
            table.host.as<int32_t>()[other] = int32_t(i);
        }
        table.send();
    }

    spattn_forward_args args(bool on_device) {
        auto a = abi::sized<spattn_forward_args>();
        const auto view = [&](Mirrored& x) { return on_device ? &x.on_device : &x.host.view; };
        a.q = view(q), a.k = view(k), a.out = view(out), a.starts = view(starts);
        if (has_values()) a.v = view(v);
        if (p.page_size) a.page_table = view(table);
        if (p.axes == SPATTN_THD) a.query_offsets = view(offsets);
        if (indices.host.bytes) a.indices = view(indices);
        if (p.flags & SPATTN_PLAN_PARENTS) a.parents = view(parents);
        return a;
    }

    bool has_values() const { return !(p.flags & SPATTN_PLAN_VALUE_IN_KEY); }

    const spattn_problem p;
    Mirrored q, k, v, out, starts, table, offsets, indices, parents;

private:
    std::vector<int64_t> lists(int64_t listed) const {
        if (p.axes == SPATTN_THD) return {p.seq_q, p.heads_kv, listed};
        return {p.batch, p.seq_q, p.heads_kv, listed};
    }
    std::vector<int64_t> nodes() const {
        if (p.axes == SPATTN_THD) return {p.seq_q};
        return {p.batch, p.seq_q};
    }
    int64_t value_dim() const { return p.head_dim_v ? p.head_dim_v : p.head_dim; }
    std::vector<int64_t> queries(int64_t columns) const {
        if (p.axes == SPATTN_THD) return {p.seq_q, p.heads_q, columns};
        return {p.batch, p.seq_q, p.heads_q, columns};
    }
    std::vector<int64_t> keys(int64_t columns) const {
        if (!p.page_size) return {p.batch, p.seq_k, p.heads_kv, columns};
        return {p.batch * (p.seq_k / p.page_size), p.page_size, p.heads_kv, columns};
    }
};

// A few replays of a model's two layers, between which everything moves. shifts: of their queries, which a row that reads
// them where they lie may refuse. row: which is to serve, or any.
void compare_replays(const Context& context, const Context& host, const char* text, int64_t listed,
                     std::array<size_t, 2> shifts, spattn_problem problem, std::mt19937& random,
                     const std::string& row = "") {
    const Pattern pattern = abi::parse(text);
    const Plan plan = [&] {
        const Force force(row);
        return abi::make_plan(context.get(), pattern.get(), problem);
    }();
    Calls calls(problem, listed, shifts[0], random);
    calls.move(random);
    problem.flags |= SPATTN_PLAN_REFERENCE;
    const Plan truth = abi::make_plan(host.get(), pattern.get(), problem);
    const Workspace workspace(plan, SPATTN_OP_FORWARD);
    size_t bytes = 0;
    succeed(spattn_plan_workspace(truth.get(), SPATTN_OP_FORWARD, &bytes, nullptr), "workspace");
    abi::Tensor scratch({int64_t(bytes) + 64}, abi::u8);
    auto args = calls.args(true), exactly = calls.args(false);
    args.workspace = workspace.memory, args.workspace_bytes = workspace.bytes;
    const size_t misaligned = reinterpret_cast<uintptr_t>(scratch.data) % 64;
    exactly.workspace = scratch.data + (64 - misaligned) % 64, exactly.workspace_bytes = bytes;
    // The second layer has other queries, keys and values.
    const auto another = [](const Mirrored& x, size_t shift = 0) {
        return Mirrored(x.host.shape, x.host.view.dtype, shift);
    };
    Mirrored q = another(calls.q, shifts[1]), k = another(calls.k), v = another(calls.v), out = another(calls.out);
    for (Mirrored* x : {&q, &k, &v}) draw(*x, random);
    auto second = args, second_exactly = exactly;
    second.flags = SPATTN_FORWARD_SAME_STEP;
    second.q = &q.on_device, second.k = &k.on_device, second.out = &out.on_device;
    second_exactly.q = &q.host.view, second_exactly.k = &k.host.view, second_exactly.out = &out.host.view;
    if (calls.has_values()) second.v = &v.on_device, second_exactly.v = &v.host.view;
    Graph graph([&](cudaStream_t stream) {
        args.stream = second.stream = stream;
        succeed(spattn_forward(plan.get(), &args), "captured");
        succeed(spattn_forward(plan.get(), &second), "the second layer's, captured");
    });
    for (int replay = 0; replay < 3; ++replay) {
        calls.move(random);
        graph.replay();
        succeed(spattn_forward(truth.get(), &exactly), "the truth");
        succeed(spattn_forward(truth.get(), &second_exactly), "the second layer's truth");
        CHECK(worst_error(calls.out) < 2e-2);
        CHECK(worst_error(out) < 2e-2);
    }
}

}  // namespace

TEST(caches_change_between_replays) {
    NEEDS_GPU();
    const Context context = make_context(), host = abi::make_context();
    std::mt19937 random(8);
    int n = 0;
    for (const char* text : {"full", "window(70,0) | sink(3)", "per_head([0,1,1,2], causal, window(9,0), sink(1))",
                             "per_head([0,1,1,0], landmark(40,7), fixed(48,3))", "runtime_tokens(40)",
                             "causal & runtime_blocks(1,24,40)"})
        for (const int64_t page_size : {0, 1, 16, 64, 128})
            for (const int64_t queries : {1, 5, 150})
                for (const spattn_enum axes : {SPATTN_BSHD, SPATTN_THD}) {
                    if ((axes == SPATTN_THD && !page_size) || !is_wanted(++n)) continue;
                    const int64_t group = text[0] == 'p' ? 2 : n / 2 % 2 ? 8 : 1;
                    check::context = std::string(text) + ", pages of " + std::to_string(page_size) + ", " +
                                     std::to_string(queries) + " queries of groups of " + std::to_string(group) +
                                     (axes == SPATTN_THD ? ", ragged" : "");
                    const int64_t listed = std::strstr(text, "runtime") ? 40 : 0;
                    const std::array<size_t, 2> shifts{n % 3 == 1 ? 2u : 0u, n % 3 == 2 ? 2u : 0u};
                    auto problem = problem_of(queries, group, page_size, 0);
                    problem.axes = axes;
                    compare_replays(context, host, text, listed, shifts, problem, random);
                    if (listed || queries == 1) continue;
                    check::context += ", trees";
                    problem.flags |= SPATTN_PLAN_PARENTS;
                    compare_replays(context, host, text, listed, shifts, problem, random);
                }
}

// A call that cuts its long rows leaves tasks over, which all name the first part. On an emulated GPU those run last.
TEST(tasks_that_a_call_leaves_over_write_nothing) {
    NEEDS_GPU();
    const Context context = make_context(), host = abi::make_context();
    std::mt19937 random(12);
    for (const char* row : {"sm80_block_forward_bf16_d64_v64_128x64_heads8",
                            "sm80_block_forward_bf16_d512_v512_64x64_heads8", "any_block_forward_bf16_16x16"}) {
        if (rows_here(row, "_forward_").empty()) continue;
        check::context = row;
        auto problem = problem_of(1, 8, 128, 0);
        if (std::strstr(row, "_d512")) problem.head_dim = 320;
        problem.axes = SPATTN_THD;
        compare_replays(context, host, "full", 0, {0, 0}, problem, random, row);
    }
}

// Latent attention, which no row of blocks has tiles for: calls make lists of the pattern.
TEST(latent_caches_change_between_replays) {
    NEEDS_GPU();
    const Context context = make_context(), host = abi::make_context();
    std::mt19937 random(9);
    int n = 0;
    for (const char* text : {"full", "window(70,0) | sink(3)", "dilated(200,0,8)"})
        for (const int64_t page_size : {0, 1, 16, 64})
            for (const int64_t queries : {1, 5})
                for (const spattn_enum axes : {SPATTN_BSHD, SPATTN_THD}) {
                    if ((axes == SPATTN_THD && !page_size) || !is_wanted(++n)) continue;
                    const int64_t group = n % 3 ? 16 : 128;
                    check::context = std::string(text) + ", pages of " + std::to_string(page_size) + ", " +
                                     std::to_string(queries) + " queries of " + std::to_string(group) + " heads" +
                                     (axes == SPATTN_THD ? ", ragged" : "");
                    auto problem = problem_of(queries, group, page_size, SPATTN_PLAN_VALUE_IN_KEY);
                    problem.heads_q = group, problem.heads_kv = 1, problem.axes = axes;
                    problem.head_dim = 576, problem.head_dim_v = 512;
                    if (n % 5 == 0) problem.head_dim_v = 500, problem.head_dim = 570;  // rows that are not of 16 bytes
                    compare_replays(context, host, text, 0, {0, 0}, problem, random);
                    if (queries == 1) continue;
                    check::context += ", trees";
                    problem.flags |= SPATTN_PLAN_PARENTS;
                    compare_replays(context, host, text, 0, {0, 0}, problem, random);
                }
}

// Lists are shared among processors by their lengths: one of a hundred times another's is split, and many short ones
// are not.
TEST(sequences_of_very_different_lengths) {
    NEEDS_GPU();
    const Context context = make_context(), host = abi::make_context();
    std::mt19937 random(10);
    int n = 0;
    for (const char* text : {"full", "window(1500,0) | sink(3)", "runtime_tokens(700)"})
        for (const int64_t sequences : {9, 50, 200})
            for (const bool is_latent : {true, false}) {
                if (!is_wanted(++n)) continue;
                const int64_t group = sequences == 200 ? 3 : n % 5 ? 16 : 128;
                check::context = std::string(text) + ", " + std::to_string(sequences) + " sequences, " +
                                 std::to_string(group) + (is_latent ? " latent heads" : " heads of a group");
                auto problem = problem_of(1 + n % 2, group, n % 4 ? 16 : 0, is_latent ? SPATTN_PLAN_VALUE_IN_KEY : 0);
                problem.batch = sequences, problem.seq_k = 2048;
                if (is_latent)
                    problem.heads_q = group, problem.heads_kv = 1, problem.head_dim = 576, problem.head_dim_v = 512;
                compare_replays(context, host, text, text[0] == 'r' ? 700 : 0, {0, 0}, problem, random);
            }
}

// Drawn calls, some of them captured.
TEST(tokens_go_to_their_places) {
    NEEDS_GPU();
    const Context context = make_context();
    std::mt19937 random(6);
    for (int n = 0; n < 600; ++n) {
        abi::DrawnAppend drawn(random);
        if (!is_wanted(n)) continue;
        check::context = drawn.name;
        std::map<const abi::AppendOperand*, void*> on_device;
        const auto place = [&](abi::AppendOperand& x) {
            void*& memory = on_device[&x];
            if (memory) return memory;
            cuda(cudaMalloc(&memory, x.memory.size()), "an operand");
            copy(memory, x.memory.data(), x.memory.size());
            return memory;
        };
        const auto append = [&](cudaStream_t stream) {
            succeed(drawn.call(context.get(), {SPATTN_CUDA, 0}, place, stream), "append");
        };
        if (n % 4) {
            append(nullptr);
            cuda(cudaDeviceSynchronize(), "append");
        } else {
            for (abi::AppendOperand* x : drawn.operands()) place(*x);  // before the capture, which takes no copies
            Graph(append).replay();
        }
        for (const auto& [operand, memory] : drawn.expected()) {
            std::vector<unsigned char> found(memory.size());
            copy(found.data(), place(*operand), found.size());
            CHECK(found == memory);
        }
        for (const auto& [operand, memory] : on_device) cudaFree(memory);
    }
}

// More tokens than a launch has CTAs for, of which one has two: some CTAs come round again.
TEST(a_long_prompt_is_appended) {
    NEEDS_GPU();
    const Context context = make_context();
    constexpr int64_t dims = 1024;
    auto p = abi::sized<spattn_problem>();
    p.flags = SPATTN_PLAN_STARTS | SPATTN_PLAN_VALUE_IN_KEY;
    p.heads_q = p.heads_kv = 1, p.batch = 2, p.seq_q = 4500, p.seq_k = 5000, p.head_dim = dims, p.dtype = abi::bf16;
    abi::Tensor rows({2, p.seq_q, 1, dims}, abi::bf16), starts({2}, abi::i32);
    for (int64_t i = 0; i < 2 * p.seq_q * dims; ++i) rows.as<uint16_t>()[i] = uint16_t(i / dims * 31 + i % dims);
    starts.as<int32_t>()[0] = 1000, starts.as<int32_t>()[1] = 3;
    spattn_tensor on_device[3] = {rows.view, rows.view, starts.view};
    const int64_t shape[] = {2, p.seq_k, 1, dims}, strides[] = {p.seq_k * dims, dims, dims, 1};
    on_device[1].shape = shape, on_device[1].strides = strides;
    const size_t bytes[] = {rows.bytes, size_t(2 * p.seq_k * dims) * sizeof(uint16_t), starts.bytes};
    for (int i = 0; i < 3; ++i) {
        on_device[i].device = {SPATTN_CUDA, 0};
        cuda(cudaMalloc(&on_device[i].data, bytes[i]), "an operand");
        cuda(cudaMemset(on_device[i].data, 0xff, bytes[i]), "clear");
    }
    copy(on_device[0].data, rows.data, rows.bytes);
    copy(on_device[2].data, starts.data, starts.bytes);
    auto args = abi::sized<spattn_cache_append_args>();
    args.k_new = &on_device[0], args.k = &on_device[1], args.starts = &on_device[2];
    succeed(spattn_cache_append(context.get(), &p, &args), "append");
    std::vector<uint16_t> found(size_t(2 * p.seq_k * dims));
    copy(found.data(), on_device[1].data, bytes[1]);
    bool holds = true;
    for (int64_t b = 0; b < 2; ++b)
        for (int64_t token = 0; token < p.seq_k; ++token) {
            const int64_t row = token - starts.as<int32_t>()[b];
            for (int64_t c = 0; c < dims; ++c) {
                const uint16_t want = row < 0 || row >= p.seq_q ? 0xffff
                                                                : rows.as<uint16_t>()[(b * p.seq_q + row) * dims + c];
                holds &= found[size_t((b * p.seq_k + token) * dims + c)] == want;
            }
        }
    CHECK(holds);
    for (const spattn_tensor& x : on_device) cudaFree(x.data);
}
