// SPDX-License-Identifier: MIT
// Calls on a cache: what a call gives is rows of the whole sequence, wherever it begins and wherever pages lie; and
// what is refused.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "abi/abi.h"

using namespace abi;

namespace {

constexpr int64_t batch = 2, heads_q = 4, heads_kv = 2, capacity = 240, dim = 16, dim_v = 8;

spattn_problem sequence_problem() {
    auto p = sized<spattn_problem>();
    p.batch = batch, p.heads_q = heads_q, p.heads_kv = heads_kv, p.seq_q = p.seq_k = capacity;
    p.head_dim = dim, p.head_dim_v = dim_v, p.dtype = f32;
    return p;
}

spattn_problem cache_problem(int64_t queries, int64_t page_size, uint32_t flags = 0) {
    auto p = sequence_problem();
    p.flags = SPATTN_PLAN_STARTS | flags;
    p.seq_q = queries, p.page_size = page_size;
    return p;
}

// So many queries of all entries together.
spattn_problem ragged_problem(int64_t queries, int64_t page_size, uint32_t flags = 0) {
    auto p = cache_problem(queries, page_size, flags);
    p.axes = SPATTN_THD;
    return p;
}

struct Scratch {
    Scratch(const spattn_plan* plan, spattn_forward_args& args) {
        size_t bytes = 0, align = 1;
        succeed(spattn_plan_workspace(plan, SPATTN_OP_FORWARD, &bytes, &align), "workspace");
        memory.assign(bytes + align, 0xff);
        args.workspace = memory.data() + (align - reinterpret_cast<uintptr_t>(memory.data()) % align) % align;
        args.workspace_bytes = bytes;
    }
    std::vector<unsigned char> memory;
};

// The whole sequence, [batch, capacity, heads, dim], and what a pass over it gives.
struct Sequence {
    Tensor q{{batch, capacity, heads_q, dim}, f32}, k{{batch, capacity, heads_kv, dim}, f32},
        v{{batch, capacity, heads_kv, dim_v}, f32}, out{{batch, capacity, heads_q, dim_v}, f32},
        lse{{batch, heads_q, capacity}, f32};

    Sequence(const spattn_context* context, const std::string& pattern, uint32_t seed = 1) {
        q.fill(seed), k.fill(seed + 1), v.fill(seed + 2);
        const Plan plan = make_plan(context, parse(("causal & (" + pattern + ")").c_str()).get(), sequence_problem());
        auto args = sized<spattn_forward_args>();
        args.q = &q.view, args.k = &k.view, args.v = &v.view, args.out = &out.view, args.lse = &lse.view;
        const Scratch scratch(plan.get(), args);
        succeed(spattn_forward(plan.get(), &args), "the sequence");
    }
};

// Keys and values of a sequence as a cache has them when so many tokens of each entry are there: NaN elsewhere.
struct Cache {
    Tensor k, v, table;

    Cache(Sequence& s, int64_t page_size, const std::vector<int64_t>& lengths)
        : k(shape(page_size, dim), f32), v(shape(page_size, dim_v), f32),
          table({batch, page_size ? capacity / page_size : 1}, i32) {
        const float nothing = std::nanf("");
        std::fill_n(k.as<float>(), k.bytes / sizeof(float), nothing);
        std::fill_n(v.as<float>(), v.bytes / sizeof(float), nothing);
        const int64_t of_entry = page_size ? capacity / page_size : 0;
        for (int64_t b = 0; b < batch; ++b) {
            for (int64_t page = 0; page < of_entry; ++page)  // those of both entries take turns, the last come first
                table.as<int32_t>()[b * of_entry + page] =
                    page * page_size < lengths[size_t(b)] ? int32_t(2 * (of_entry - 1 - page) + b) : -1;
            for (int64_t token = 0; token < lengths[size_t(b)]; ++token) {
                const int64_t page = page_size ? table.as<int32_t>()[b * of_entry + token / page_size] : 0;
                const int64_t row = page_size ? page * page_size + token % page_size : b * capacity + token;
                copy(s.k, k, b * capacity + token, row, dim);
                copy(s.v, v, b * capacity + token, row, dim_v);
            }
        }
    }

private:
    static std::vector<int64_t> shape(int64_t page_size, int64_t columns) {
        if (page_size == 0) return {batch, capacity, heads_kv, columns};
        return {batch * (capacity / page_size) + 1, page_size, heads_kv, columns};
    }
    static void copy(Tensor& from, Tensor& to, int64_t from_row, int64_t to_row, int64_t columns) {
        std::copy_n(from.as<float>() + from_row * heads_kv * columns, heads_kv * columns,
                    to.as<float>() + to_row * heads_kv * columns);
    }
};

// One call of some queries of each entry, all of whose operands are good.
struct Call {
    Tensor q, out, lse, starts;
    spattn_forward_args args = sized<spattn_forward_args>();

    Call(Sequence& s, Cache& cache, const spattn_problem& p, const std::vector<int64_t>& given)
        : q({batch, p.seq_q, heads_q, dim}, f32), out({batch, p.seq_q, heads_q, dim_v}, f32),
          lse({batch, heads_q, p.seq_q}, f32), starts({batch}, i64) {
        std::copy(given.begin(), given.end(), starts.as<int64_t>());
        for (int64_t b = 0; b < batch; ++b)
            for (int64_t i = 0; i < p.seq_q; ++i) {
                const int64_t row = std::clamp<int64_t>(given[size_t(b)] + i, 0, capacity - 1);
                std::copy_n(s.q.as<float>() + (b * capacity + row) * heads_q * dim, heads_q * dim,
                            q.as<float>() + (b * p.seq_q + i) * heads_q * dim);
            }
        args.q = &q.view, args.k = &cache.k.view, args.v = &cache.v.view, args.out = &out.view, args.lse = &lse.view;
        args.starts = &starts.view;
        if (p.page_size) args.page_table = &cache.table.view;
    }
};

// How far a call is off the rows of the sequence. Rows outside of it are demanded to be empty.
double worst_error(Sequence& s, Call& call, const spattn_problem& p, const std::vector<int64_t>& starts) {
    double worst = 0;
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t i = 0; i < p.seq_q; ++i)
            for (int64_t h = 0; h < heads_q; ++h) {
                const int64_t row = starts[size_t(b)] + i;
                const bool is_there = row >= 0 && row < capacity;
                const float lse = call.lse.as<float>()[(b * heads_q + h) * p.seq_q + i];
                const float whole = is_there ? s.lse.as<float>()[(b * heads_q + h) * capacity + row] : -HUGE_VALF;
                CHECK(lse == whole || std::abs(lse - whole) < 1e-5);
                for (int64_t c = 0; c < dim_v; ++c) {
                    const float got = call.out.as<float>()[((b * p.seq_q + i) * heads_q + h) * dim_v + c];
                    const int64_t of_whole = ((b * capacity + row) * heads_q + h) * dim_v + c;
                    const float want = is_there ? s.out.as<float>()[of_whole] : 0;
                    worst = std::max(worst, std::isnan(got) ? HUGE_VAL : std::abs(double(got) - want));
                }
            }
    return worst;
}

// Keys or values of a cache in float8. The cache becomes what these stand for.
struct Narrow {
    enum class Scales { of_rows, of_heads, none };

    Narrow(Tensor& cache, Scales kind) : codes(cache.shape, float8), scales(rows(cache.shape), f32) {
        const int64_t columns = cache.shape[3];
        const float of_heads[heads_kv] = {0.37f, 0.013f};
        for (int64_t row = 0; row < int64_t(scales.bytes / sizeof(float)); ++row) {
            const float scale = kind == Scales::none       ? 1
                                : kind == Scales::of_heads ? of_heads[row % heads_kv]
                                                           : 0.01f + 0.001f * float(row * 7 % 40);
            scales.as<float>()[row] = scale;
            for (int64_t i = row * columns; i < (row + 1) * columns; ++i) {
                float& x = cache.as<float>()[i];
                codes.data[i] = std::isnan(x) ? 0xff : code(std::abs(x) / scale) | (x < 0 ? 0x80 : 0);
                x = (x < 0 ? -1 : 1) * scale * float(float8_size(codes.data[i] & 0x7f));
            }
            if (kind != Scales::of_rows || row % 2 || codes.data[row * columns] != 0xff) continue;
            scales.as<float>()[row] = 3e38f;  // nothing was written here: finite, but not what it is a factor of
            std::fill_n(codes.data + row * columns, columns, static_cast<unsigned char>(0x7e));
        }
        if (kind == Scales::of_heads) scales.strides[0] = scales.strides[1] = 0;
    }

    Tensor codes, scales;

private:
    static std::vector<int64_t> rows(std::vector<int64_t> shape) {
        shape.pop_back();
        return shape;
    }
    // The code of the largest number that is not above x.
    static unsigned char code(float x) {
        int largest = 126;
        while (float8_size(largest) > x) --largest;
        return static_cast<unsigned char>(largest);
    }
};

// One call of so many rows, those of both entries from row `first` on.
struct RaggedCall {
    int64_t rows, first;
    std::array<int64_t, batch> start, count;
    Cache cache;
    Tensor q, out, lse, starts, offsets;
    spattn_forward_args args = sized<spattn_forward_args>();

    RaggedCall(Sequence& s, int64_t page_size, int64_t rows, int64_t first, std::array<int64_t, batch> start,
               std::array<int64_t, batch> count)
        : rows(rows), first(first), start(start), count(count), cache(s, page_size, lengths()),
          q({rows, heads_q, dim}, f32), out({rows, heads_q, dim_v}, f32), lse({heads_q, rows}, f32),
          starts({batch}, i32), offsets({batch + 1}, i64) {
        std::fill_n(q.as<float>(), q.bytes / sizeof(float), std::nanf(""));  // of rows that are nobody's
        for (int64_t row = 0; row < rows; ++row) {
            const Asker asker = asker_of(row);
            if (asker.batch < 0) continue;
            const int64_t token = std::clamp<int64_t>(asker.token, 0, capacity - 1);
            std::copy_n(s.q.as<float>() + (asker.batch * capacity + token) * heads_q * dim, heads_q * dim,
                        q.as<float>() + row * heads_q * dim);
        }
        offsets.as<int64_t>()[0] = first;
        for (int64_t b = 0; b < batch; ++b) {
            starts.as<int32_t>()[b] = int32_t(start[size_t(b)]);
            offsets.as<int64_t>()[b + 1] = offsets.as<int64_t>()[b] + count[size_t(b)];
        }
        args.q = &q.view, args.k = &cache.k.view, args.v = &cache.v.view, args.out = &out.view, args.lse = &lse.view;
        args.starts = &starts.view, args.query_offsets = &offsets.view, args.page_table = &cache.table.view;
    }

    // How far the call is off the rows of the sequence. Rows outside of it are demanded to be empty.
    double worst_error(Sequence& s) {
        double worst = 0;
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t h = 0; h < heads_q; ++h) {
                const Asker asker = asker_of(row);
                const bool is_there = asker.batch >= 0 && asker.token >= 0 && asker.token < capacity;
                const float got = lse.as<float>()[h * rows + row];
                const float whole =
                    is_there ? s.lse.as<float>()[(asker.batch * heads_q + h) * capacity + asker.token] : -HUGE_VALF;
                CHECK(got == whole || std::abs(got - whole) < 1e-5);
                for (int64_t c = 0; c < dim_v; ++c) {
                    const float value = out.as<float>()[(row * heads_q + h) * dim_v + c];
                    const int64_t of_whole = ((asker.batch * capacity + asker.token) * heads_q + h) * dim_v + c;
                    const float want = is_there ? s.out.as<float>()[of_whole] : 0;
                    worst = std::max(worst, std::isnan(value) ? HUGE_VAL : std::abs(double(value) - want));
                }
            }
        return worst;
    }

private:
    // Whose query a row is, and which token of the sequence; batch -1: nobody's.
    struct Asker {
        int64_t batch, token;
    };
    Asker asker_of(int64_t row) const {
        int64_t begin = first;
        for (int64_t b = 0; b < batch; begin += count[size_t(b++)])
            if (row >= begin && row < begin + count[size_t(b)]) return {b, start[size_t(b)] + row - begin};
        return {-1, 0};
    }
    std::vector<int64_t> lengths() const {
        std::vector<int64_t> made;
        for (size_t b = 0; b < batch; ++b) made.push_back(std::clamp<int64_t>(start[b] + count[b], 0, capacity));
        return made;
    }
};

// Rows that plans are pinned to: of blocks, of lists that each call makes of the pattern, and of the truth.
struct Way {
    const char* kernel;  // "": what the plan chooses
    uint32_t flags;
};
constexpr Way ways[] = {{"", 0},
                        {"scalar_block_forward_f32_16x16", 0},
                        {"scalar_gather_forward_f32_heads", 0},
                        {"scalar_gather_forward_f32_dims", 0},
                        {"", SPATTN_PLAN_REFERENCE}};

// None where the row does not serve the pattern: lists are those of groups whose heads see the same.
Plan try_plan(const Context& context, const char* pattern, const spattn_problem& problem, const std::string& kernel) {
    spattn_plan* made = nullptr;
    setenv("SPATTN_FORCE_KERNEL", kernel.c_str(), 1);
    const auto status = spattn_plan_create(context.get(), parse(pattern).get(), &problem, nullptr, &made);
    unsetenv("SPATTN_FORCE_KERNEL");
    const bool may_differ = std::strstr(pattern, "per_head") && kernel.find("gather") != kernel.npos;
    CHECK(status == SPATTN_OK || (status == SPATTN_E_NO_KERNEL && may_differ));
    return Plan(made);
}

}  // namespace

TEST(calls_are_rows_of_the_sequence) {
    const Context context = make_context();
    for (const char* pattern : {"full", "window(40,0) | sink(3)", "window(9,9) | global_tokens(3,100,101)",
                                "strided(7)", "per_head([0,1,1,2], causal, window(9,0), sink(1))", "bigbird(16,3,1,2,7)",
                                "per_batch([1,0], window(20,3), full)", "landmark(40,7)",
                                "per_head([0,1,1,0], fixed(48,3), residue(48,20) | global_keys(70,150))"}) {
        Sequence sequence(context.get(), pattern);
        for (const int64_t page_size : {0, 1, 5, 16, 60, 240})
            for (const int64_t queries : {1, 7, 100})
                for (const Way& way : ways) {
                    const auto problem = cache_problem(queries, page_size, way.flags);
                    const Plan plan = try_plan(context, pattern, problem, way.kernel);
                    if (!plan) continue;
                    for (const std::vector<int64_t>& starts :
                         {std::vector<int64_t>{0, capacity - queries}, {77, -3}, {capacity - 2, 130},
                          {-queries, capacity}}) {
                        check::context = std::string(pattern) + " pages of " + std::to_string(page_size) + ", " +
                                         way.kernel + ", " + std::to_string(queries) + " queries from " + std::to_string(starts[0]) +
                                         " and " + std::to_string(starts[1]);
                        std::vector<int64_t> lengths;
                        for (const int64_t start : starts)
                            lengths.push_back(std::clamp<int64_t>(start + queries, 0, capacity));
                        Cache cache(sequence, page_size, lengths);
                        Call call(sequence, cache, problem, starts);
                        const Scratch scratch(plan.get(), call.args);
                        succeed(spattn_forward(plan.get(), &call.args), "a call");
                        CHECK(worst_error(sequence, call, problem, starts) < 1e-5);
                    }
                }
    }
}

// The second layer of a model has other queries, keys and values in the same places.
TEST(layers_share_a_layout) {
    const Context context = make_context();
    const std::vector<int64_t> starts{77, 130};
    for (const char* pattern : {"window(40,0) | sink(3)", "per_head([0,1,1,2], causal, window(9,0), sink(1))"}) {
        Sequence first(context.get(), pattern), second(context.get(), pattern, 7);
        for (const int64_t page_size : {0, 5, 16, 60})
            for (const int64_t queries : {1, 7, 100})
                for (const Way& way : ways) {
                    check::context = std::string(pattern) + " pages of " + std::to_string(page_size) + ", " + way.kernel +
                                     ", " + std::to_string(queries) + " queries";
                    const auto problem = cache_problem(queries, page_size, way.flags);
                    const Plan plan = try_plan(context, pattern, problem, way.kernel);
                    if (!plan) continue;
                    const std::vector<int64_t> lengths{starts[0] + queries, starts[1] + queries};
                    Cache cache(first, page_size, lengths), next_cache(second, page_size, lengths);
                    Call call(first, cache, problem, starts), next(second, next_cache, problem, starts);
                    const Scratch scratch(plan.get(), call.args);
                    succeed(spattn_forward(plan.get(), &call.args), "the first layer");
                    next.args.flags = SPATTN_FORWARD_SAME_STEP;
                    next.args.workspace = call.args.workspace, next.args.workspace_bytes = call.args.workspace_bytes;
                    succeed(spattn_forward(plan.get(), &next.args), "the second layer");
                    CHECK(worst_error(first, call, problem, starts) < 1e-5);
                    CHECK(worst_error(second, next, problem, starts) < 1e-5);
                }
    }
}

// Lists of a million keys are made for some queries at a time.
TEST(prompts_are_listed_in_rounds) {
    constexpr int64_t rows = 150, tokens = 1 << 20, page = 64, pages = 5;
    const Context context = make_context();
    for (const spattn_enum axes : {SPATTN_BSHD, SPATTN_BHSD, SPATTN_THD}) {
        check::context = "axes " + std::to_string(axes);
        const bool is_ragged = axes == SPATTN_THD, is_bhsd = axes == SPATTN_BHSD;
        auto p = sized<spattn_problem>();
        p.flags = SPATTN_PLAN_STARTS, p.axes = axes, p.dtype = f32, p.page_size = page;
        p.batch = is_ragged ? 2 : 1, p.heads_q = 2, p.heads_kv = 1, p.seq_q = rows, p.seq_k = tokens, p.head_dim = 8;
        const Plan listed = try_plan(context, "causal", p, "scalar_gather_forward_f32_heads");
        const Plan blocks = try_plan(context, "causal", p, "scalar_block_forward_f32_16x16");
        CHECK(explain(listed.get()).find("in rounds of 64 queries") != std::string::npos);
        const std::vector<int64_t> shape = is_ragged ? std::vector<int64_t>{rows, 2, 8}
                                           : is_bhsd ? std::vector<int64_t>{1, 2, rows, 8}
                                                     : std::vector<int64_t>{1, rows, 2, 8};
        const std::vector<int64_t> of_rows = is_ragged ? std::vector<int64_t>{2, rows} : std::vector<int64_t>{1, 2, rows};
        const std::vector<int64_t> pool{pages, is_bhsd ? 1 : page, is_bhsd ? page : 1, 8};
        Tensor q(shape, f32), k(pool, f32), v(pool, f32), starts({p.batch}, i32), offsets({3}, i32);
        Tensor table({p.batch, tokens / page}, i32);
        q.fill(1), k.fill(2), v.fill(3);
        for (int64_t b = 0; b < p.batch; ++b) starts.as<int32_t>()[b] = int32_t(30 + 20 * b);
        const int32_t bounds[] = {0, 90, rows};
        std::copy_n(bounds, 3, offsets.as<int32_t>());
        for (int64_t i = 0; i < p.batch * tokens / page; ++i) table.as<int32_t>()[i] = int32_t(i * 3 % pages);
        Tensor outs[] = {{shape, f32}, {shape, f32}}, sums[] = {{of_rows, f32}, {of_rows, f32}};
        for (const int n : {0, 1}) {
            auto args = sized<spattn_forward_args>();
            args.q = &q.view, args.k = &k.view, args.v = &v.view, args.starts = &starts.view;
            args.page_table = &table.view, args.query_offsets = is_ragged ? &offsets.view : nullptr;
            args.out = &outs[n].view, args.lse = &sums[n].view;
            const Scratch scratch(n ? blocks.get() : listed.get(), args);
            for (const uint32_t flags : {0u, uint32_t(SPATTN_FORWARD_SAME_STEP)}) {
                args.flags = flags;
                succeed(spattn_forward(n ? blocks.get() : listed.get(), &args), "a prompt");
            }
        }
        const auto worst = [](Tensor& x, Tensor& y) {
            double worst = 0;
            for (size_t i = 0; i < x.bytes / sizeof(float); ++i) {
                const double error = std::abs(double(x.as<float>()[i]) - double(y.as<float>()[i]));
                worst = std::max(worst, std::isnan(error) ? HUGE_VAL : error);
            }
            return worst;
        };
        CHECK(worst(outs[0], outs[1]) < 1e-5);
        CHECK(worst(sums[0], sums[1]) < 1e-5);
    }
}

TEST(a_layout_that_is_none_is_refused) {
    const Context context = make_context();
    Sequence sequence(context.get(), "full");
    const auto problem = sequence_problem();
    const Plan plan = make_plan(context.get(), parse("full").get(), problem);
    Cache cache(sequence, 0, {capacity, capacity});
    Call call(sequence, cache, problem, {0, 0});
    call.args.starts = nullptr, call.args.flags = SPATTN_FORWARD_SAME_STEP;
    const Scratch scratch(plan.get(), call.args);
    demand("no cache", "spattn_forward", spattn_forward(plan.get(), &call.args), SPATTN_E_STATE, "args.flags");
}

// A float8 cache gives what a cache of the elements times their scales gives.
TEST(float8_stands_for_its_products) {
    using Scales = Narrow::Scales;
    const Context context = make_context();
    const std::vector<int64_t> starts{77, 130};
    for (const char* pattern : {"full", "window(40,0) | sink(3)", "per_head([0,1,1,2], causal, window(9,0), sink(1))"}) {
        Sequence sequence(context.get(), pattern);
        for (const int64_t page_size : {0, 1, 16, 60})
            for (const int64_t queries : {1, 7, 100})
                for (const uint32_t flags : {0u, uint32_t(SPATTN_PLAN_REFERENCE)})
                    for (const Scales kind : {Scales::of_rows, Scales::of_heads, Scales::none}) {
                        check::context = std::string(pattern) + " pages of " + std::to_string(page_size) + ", " +
                                         std::to_string(queries) + " queries, scales " + std::to_string(int(kind));
                        auto problem = cache_problem(queries, page_size, flags);
                        const Plan wide = make_plan(context.get(), parse(pattern).get(), problem);
                        problem.cache_dtype = float8;
                        const Plan plan = make_plan(context.get(), parse(pattern).get(), problem);
                        CHECK(explain(plan.get()).find("float8_e4m3fn") != std::string::npos);
                        Cache cache(sequence, page_size, {starts[0] + queries, starts[1] + queries});
                        Narrow k(cache.k, kind), v(cache.v, kind);
                        Call right(sequence, cache, problem, starts), call(sequence, cache, problem, starts);
                        const Scratch of_right(wide.get(), right.args);
                        succeed(spattn_forward(wide.get(), &right.args), "products");
                        call.args.k = &k.codes.view, call.args.v = &v.codes.view;
                        if (kind != Scales::none)
                            call.args.k_scales = &k.scales.view, call.args.v_scales = &v.scales.view;
                        const Scratch scratch(plan.get(), call.args);
                        succeed(spattn_forward(plan.get(), &call.args), "float8");
                        double worst = 0;
                        for (size_t i = 0; i < call.out.bytes / sizeof(float); ++i) {
                            const double error = std::abs(call.out.as<float>()[i] - right.out.as<float>()[i]);
                            worst = std::max(worst, std::isnan(error) ? HUGE_VAL : error);
                        }
                        CHECK(worst < 1e-5);
                    }
    }
}

// Entries have as many queries as each call says, some none; rows that are nobody's see nothing.
TEST(ragged_calls_are_rows_of_the_sequence) {
    struct Entry {
        int64_t start, count;
    };
    const Context context = make_context();
    for (const char* pattern : {"full", "window(40,0) | sink(3)", "per_head([0,1,1,2], causal, window(9,0), sink(1))",
                                "per_batch([1,0], window(20,3), full)", "landmark(40,7) | window(20,0)"}) {
        Sequence sequence(context.get(), pattern);
        for (const int64_t page_size : {1, 5, 16, 60, 240})
            for (const int64_t rows : {3, 50, 130})
                for (const Way& way : ways) {
                    const auto problem = ragged_problem(rows, page_size, way.flags);
                    const Plan plan = try_plan(context, pattern, problem, way.kernel);
                    if (!plan) continue;
                    for (const std::array<Entry, batch>& entries :
                         {std::array<Entry, batch>{{{77, 1}, {120, rows - 1}}}, {{{3, rows - 2}, {200, 1}}},
                          {{{100, 0}, {50, rows}}}, {{{capacity - 1, 2}, {-1, 1}}}, {{{0, 0}, {0, 0}}}}) {
                        check::context = std::string(pattern) + " pages of " + std::to_string(page_size) + ", " +
                                         way.kernel + ", " + std::to_string(entries[0].count) + " and " +
                                         std::to_string(entries[1].count) + " queries of " + std::to_string(rows);
                        const int64_t first = rows > entries[0].count + entries[1].count ? 1 : 0;
                        RaggedCall call(sequence, page_size, rows, first,
                                        {entries[0].start, entries[1].start}, {entries[0].count, entries[1].count});
                        const Scratch scratch(plan.get(), call.args);
                        succeed(spattn_forward(plan.get(), &call.args), "a ragged call");
                        CHECK(call.worst_error(sequence) < 1e-5);
                    }
                }
    }
}

// Drafts that are nodes of trees.
struct Trees {
    Tensor parents;

    Trees(int64_t queries, std::initializer_list<int64_t> steps) : parents({batch, queries}, i32) {
        for (int64_t n = 0; n < batch * queries; ++n) {
            const int64_t node = n % queries, step = steps.begin()[n * 5 / 3 % int64_t(steps.size())];
            parents.as<int32_t>()[n] = int32_t(node - step);
        }
    }
    // A node's way from its root, the node itself last.
    std::vector<int64_t> way(int64_t b, int64_t node) {
        const int32_t* const of = parents.as<int32_t>() + b * parents.shape[1];
        std::vector<int64_t> nodes;
        for (int64_t at = node; at >= 0; at = of[at] < at ? of[at] : -1) nodes.insert(nodes.begin(), at);
        return nodes;
    }
};

// What a node gets is what a query gets behind a cache of the tokens before the tree and the node's way.
void check_ways(const Context& context, const std::string& kernel, int64_t page_size, int64_t queries,
                const std::vector<int64_t>& starts, uint32_t flags) {
    Sequence s(context.get(), "full");
    setenv("SPATTN_FORCE_KERNEL", kernel.c_str(), 1);
    const auto problem = cache_problem(queries, page_size, flags | SPATTN_PLAN_PARENTS);
    const Plan plan = make_plan(context.get(), parse("full").get(), problem);
    unsetenv("SPATTN_FORCE_KERNEL");
    const auto one = cache_problem(1, 0, SPATTN_PLAN_REFERENCE);
    const Plan alone = make_plan(context.get(), parse("full").get(), one);
    Trees trees(queries, {1, 2, 1, 5, -1, 1000, 1, 3});
    Cache cache(s, page_size, {starts[0] + queries, starts[1] + queries});
    Call call(s, cache, problem, starts);
    call.args.parents = &trees.parents.view;
    const Scratch scratch(plan.get(), call.args);
    succeed(spattn_forward(plan.get(), &call.args), "trees");
    for (int64_t node = 0; node < queries; node += queries > 9 ? 7 : 1) {
        Cache of_way(s, 0, starts);
        std::vector<int64_t> last;
        for (int64_t b = 0; b < batch; ++b) {
            int64_t to = b * capacity + starts[size_t(b)] - 1;
            for (const int64_t from : trees.way(b, node)) {
                ++to;
                const auto copy = [&](Tensor& whole, Tensor& cached, int64_t columns) {
                    std::copy_n(whole.as<float>() + (b * capacity + starts[size_t(b)] + from) * heads_kv * columns,
                                heads_kv * columns, cached.as<float>() + to * heads_kv * columns);
                };
                copy(s.k, of_way.k, dim), copy(s.v, of_way.v, dim_v);
            }
            last.push_back(to - b * capacity);
        }
        Call right(s, of_way, one, last);
        for (int64_t b = 0; b < batch; ++b)
            std::copy_n(call.q.as<float>() + (b * queries + node) * heads_q * dim, heads_q * dim,
                        right.q.as<float>() + b * heads_q * dim);
        const Scratch more(alone.get(), right.args);
        succeed(spattn_forward(alone.get(), &right.args), "a way");
        for (int64_t b = 0; b < batch; ++b)
            for (int64_t h = 0; h < heads_q; ++h) {
                const float lse = call.lse.as<float>()[(b * heads_q + h) * queries + node];
                CHECK(std::abs(lse - right.lse.as<float>()[b * heads_q + h]) < 1e-5);
                for (int64_t c = 0; c < dim_v; ++c)
                    CHECK(std::abs(call.out.as<float>()[((b * queries + node) * heads_q + h) * dim_v + c] -
                                   right.out.as<float>()[(b * heads_q + h) * dim_v + c]) < 1e-5);
            }
    }
}

bool is_for_gpus(const std::string& kernel) { return kernel.rfind("sm", 0) == 0 || kernel.rfind("any", 0) == 0; }

// Kernels of float32 that run here and serve calls on a cache: plans are pinned to each.
std::vector<std::string> cache_kernels() {
    std::vector<std::string> names{""};
    for (int32_t n = 0; n < spattn_kernel_count(); ++n) {
        const std::string name = spattn_kernel_name(n);
        for (const char* kind : {"_block_forward_f32", "_few_forward_f32_heads2", "_gather_forward_f32"})
            if (name.find(kind) != name.npos && !is_for_gpus(name) && spattn_kernel_runs_here(n)) names.push_back(name);
    }
    return names;
}

TEST(nodes_of_trees_see_their_ways) {
    const Context context = make_context();
    for (const std::string& kernel : cache_kernels())
        for (const int64_t page_size : {0, 5, 16, 240})
            for (const int64_t queries : {1, 7, 100}) {
                check::context = kernel + ", pages of " + std::to_string(page_size) + ", " + std::to_string(queries) +
                                 " queries";
                check_ways(context, kernel, page_size, queries, {77, 128}, 0);
                check_ways(context, kernel, page_size, queries, {0, capacity - queries}, 0);
            }
    check_ways(context, "", 16, 100, {77, 128}, SPATTN_PLAN_REFERENCE);
}

// Where each query is the child of the one before, nothing is hidden: rows of any pattern are those of the sequence.
TEST(chains_are_rows_of_the_sequence) {
    const Context context = make_context();
    for (const char* pattern : {"full", "window(40,0) | sink(3)", "per_head([0,1,1,2], causal, window(9,0), sink(1))",
                                "per_batch([1,0], window(20,3), full)", "landmark(40,7) | window(20,0)"}) {
        Sequence sequence(context.get(), pattern);
        for (const int64_t page_size : {0, 5, 60})
            for (const int64_t queries : {1, 7, 100})
                for (const std::vector<int64_t>& starts : {std::vector<int64_t>{77, -3}, {capacity - 2, 130}}) {
                    check::context = std::string(pattern) + " pages of " + std::to_string(page_size) + ", " +
                                     std::to_string(queries) + " queries";
                    const auto problem = cache_problem(queries, page_size, SPATTN_PLAN_PARENTS);
                    const Plan plan = make_plan(context.get(), parse(pattern).get(), problem);
                    std::vector<int64_t> lengths;
                    for (const int64_t start : starts) lengths.push_back(std::min(start + queries, capacity));
                    Cache cache(sequence, page_size, lengths);
                    Call call(sequence, cache, problem, starts);
                    Trees chains(queries, {1});
                    call.args.parents = &chains.parents.view;
                    const Scratch scratch(plan.get(), call.args);
                    succeed(spattn_forward(plan.get(), &call.args), "chains");
                    CHECK(worst_error(sequence, call, problem, starts) < 1e-5);
                }
    }
}

// A call whose queries bring lists of tokens, or of blocks of so many, gives what a plan without a cache gives for the
// keys of these that do not stand behind each query.
void check_lists(const Context& context, int64_t page_size, int64_t block, const char* pattern, uint32_t flags) {
    constexpr int64_t queries = 9, most = 12;
    const std::vector<int64_t> starts{100, -2};
    Sequence s(context.get(), "full");
    auto problem = cache_problem(queries, page_size, flags);
    const Plan plan = make_plan(context.get(), parse(pattern).get(), problem);
    Cache cache(s, page_size, {109, 7});
    Call call(s, cache, problem, starts);
    Tensor indices({batch, queries, heads_kv, most}, i32), counts({batch, queries, heads_kv}, i64);
    Tensor keys({batch, queries, heads_kv, most * block}, i64);
    std::fill_n(keys.as<int64_t>(), keys.bytes / sizeof(int64_t), int64_t(-1));
    for (int64_t list = 0; list < batch * queries * heads_kv; ++list) {
        const int64_t token = starts[size_t(list / heads_kv / queries)] + list / heads_kv % queries;
        const int64_t count = counts.as<int64_t>()[list] = list % (most + 3) - 1;
        for (int64_t n = 0; n < most; ++n) {
            const int64_t named = indices.as<int32_t>()[list * most + n] =
                int32_t((list * 7 + n * n * 5) % (capacity / block + 3) - 1);
            for (int64_t i = 0; i < block; ++i)
                if (n < count && named >= 0 && named * block + i <= token)
                    keys.as<int64_t>()[(list * most + n) * block + i] = named * block + i;
        }
    }
    call.args.indices = &indices.view, call.args.index_counts = &counts.view;
    const Scratch scratch(plan.get(), call.args);
    succeed(spattn_forward(plan.get(), &call.args), "lists on a cache");

    auto whole = sequence_problem();
    whole.seq_q = queries, whole.flags = flags;
    const std::string tokens = "runtime_tokens(" + std::to_string(most * block) + ")";
    const Plan alone = make_plan(context.get(), parse(tokens.c_str()).get(), whole);
    Tensor out({batch, queries, heads_q, dim_v}, f32), lse({batch, heads_q, queries}, f32);
    auto args = sized<spattn_forward_args>();
    args.q = &call.q.view, args.k = &s.k.view, args.v = &s.v.view, args.out = &out.view, args.lse = &lse.view;
    args.indices = &keys.view;
    const Scratch more(alone.get(), args);
    succeed(spattn_forward(alone.get(), &args), "lists");
    for (size_t i = 0; i < out.bytes / sizeof(float); ++i)
        CHECK(std::abs(out.as<float>()[i] - call.out.as<float>()[i]) < 1e-5);
    for (size_t i = 0; i < lse.bytes / sizeof(float); ++i) {
        const float found = call.lse.as<float>()[i], right = lse.as<float>()[i];
        CHECK(found == right || std::abs(found - right) < 1e-5);
    }
}

TEST(lists_of_a_call_name_tokens_of_sequences) {
    const Context context = make_context();
    for (const int64_t page_size : {0, 1, 5, 16, 240})
        for (const uint32_t flags : {0u, uint32_t(SPATTN_PLAN_REFERENCE)}) {
            check::context = "pages of " + std::to_string(page_size) + (flags ? ", reference" : "");
            check_lists(context, page_size, 1, "runtime_tokens(12)", flags);
            check_lists(context, page_size, 1, "causal & runtime_tokens(12)", flags);
            check_lists(context, page_size, 7, "runtime_blocks(1,7,12)", flags);
            check_lists(context, page_size, 80, "runtime_blocks(1,80,12) & causal", flags);
        }
}

// Tiles before all sequences' are those of nobody, wherever their places would lie: nothing before q and out is touched.
TEST(ragged_calls_stay_within_their_rows) {
    constexpr int64_t before = 400, rows = 4;
    const Context context = make_context();
    Sequence sequence(context.get(), "full");
    for (const std::string& kernel : cache_kernels())
        for (const int64_t start : {0, 16, 32, 64, 77})
            for (const int64_t first : {0, 1, 2, 3, 4}) {
                check::context = kernel + ", " + std::to_string(first) + " rows before queries from " +
                                 std::to_string(start);
                setenv("SPATTN_FORCE_KERNEL", kernel.c_str(), 1);
                const Plan plan = make_plan(context.get(), parse("full").get(), ragged_problem(rows, 16));
                unsetenv("SPATTN_FORCE_KERNEL");
                RaggedCall call(sequence, 16, rows, first, {start, start + 32}, {first < 4, first < 3});
                Tensor wide_q({before + rows, heads_q, dim}, f32), wide_out({before + rows, heads_q, dim_v}, f32);
                const auto place = [&](Tensor& wide, const Tensor& own) {
                    spattn_tensor view = own.view;
                    view.data = wide.data + (wide.bytes - own.bytes);
                    return view;
                };
                const spattn_tensor q = place(wide_q, call.q), out = place(wide_out, call.out);
                unsigned char* const results = static_cast<unsigned char*>(out.data);
                std::copy_n(call.q.data, call.q.bytes, static_cast<unsigned char*>(q.data));
                call.args.q = &q, call.args.out = &out;
                const Scratch scratch(plan.get(), call.args);
                succeed(spattn_forward(plan.get(), &call.args), "a ragged call");
                std::copy_n(results, call.out.bytes, call.out.data);
                CHECK(call.worst_error(sequence) < 1e-5);
                CHECK(std::all_of(wide_out.data, results, [](unsigned char byte) { return byte == Tensor::poison; }));
            }
}

// What offsets that fall or lie outside give means nothing, but no memory is harmed.
TEST(ragged_calls_survive_any_offsets) {
    const Context context = make_context();
    Sequence sequence(context.get(), "full");
    const Plan plan = make_plan(context.get(), parse("full").get(), ragged_problem(50, 16));
    for (const std::array<int64_t, batch + 1>& offsets :
         {std::array<int64_t, batch + 1>{40, 3, 50}, {-7, 1000, 20}, {50, 50, 0}, {int64_t(1) << 40, 0, 50}}) {
        RaggedCall call(sequence, 16, 50, 0, {100, 120}, {20, 30});
        std::copy(offsets.begin(), offsets.end(), call.offsets.as<int64_t>());
        const Scratch scratch(plan.get(), call.args);
        succeed(spattn_forward(plan.get(), &call.args), "a ragged call");
    }
}

// Memory that nobody may read in front of.
class Walled {
public:
    explicit Walled(size_t bytes) : bytes_(page + (bytes + page - 1) / page * page) {
        memory_ = static_cast<char*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        mprotect(memory_, page, PROT_NONE);
    }
    ~Walled() { munmap(memory_, bytes_); }
    Walled(const Walled&) = delete;
    void* data() const { return memory_ + page; }

private:
    static constexpr size_t page = 65536;  // or less
    size_t bytes_;
    char* memory_;
};

// Five sequences meet all offsets that three queries may have. They are trees, which have blocks of keys and no lists.
TEST(ragged_calls_survive_all_offsets) {
    constexpr int64_t sequences = 5, queries = 3, page_size = 16, most = 48, size = 4;
    const Context context = make_context();
    auto problem = sized<spattn_problem>();
    problem.flags = SPATTN_PLAN_STARTS | SPATTN_PLAN_PARENTS, problem.axes = SPATTN_THD, problem.dtype = f32;
    problem.batch = sequences, problem.heads_q = 16, problem.heads_kv = 1, problem.seq_q = queries, problem.seq_k = most;
    problem.head_dim = size, problem.page_size = page_size;
    Tensor q({queries, 16, size}, f32), out({queries, 16, size}, f32);
    Tensor starts({sequences}, i64), offsets({sequences + 1}, i64);
    Tensor kv({sequences * most / page_size, page_size, 1, size}, f32), table({sequences, most / page_size}, i64);
    Tensor parents({queries}, i64);
    q.fill(1), std::fill_n(parents.as<int64_t>(), queries, -1);
    const Walled walled(kv.bytes);
    kv.view.data = walled.data();
    std::iota(table.as<int64_t>(), table.as<int64_t>() + sequences * most / page_size, 0);
    std::copy_n(std::array<int64_t, sequences>{46, 0, 10, 32, 40}.begin(), sequences, starts.as<int64_t>());
    const Plan plan = try_plan(context, "causal", problem, "scalar_block_forward_f32_64x64");
    auto args = sized<spattn_forward_args>();
    args.q = &q.view, args.k = args.v = &kv.view, args.out = &out.view, args.parents = &parents.view;
    args.starts = &starts.view, args.query_offsets = &offsets.view, args.page_table = &table.view;
    const Scratch scratch(plan.get(), args);
    for (int64_t code = 0; code < int64_t(1) << 2 * (sequences + 1); ++code) {
        for (int64_t i = 0; i <= sequences; ++i) offsets.as<int64_t>()[i] = code >> 2 * i & 3;
        succeed(spattn_forward(plan.get(), &args), "a ragged call");
    }
}

TEST(problems_on_a_cache_that_are_refused) {
    const Context context = make_context();
    const auto demand_refused = [&](const char* what, const char* text, const spattn_problem& p, spattn_status status,
                                    const char* argument) {
        const Pattern pattern = parse(text);
        const auto call = [&](auto r) { return spattn_plan_create(context.get(), pattern.get(), &p, nullptr, r); };
        demand_no_handle<spattn_plan>("spattn_plan_create", {{what, call, status, argument}});
    };
    auto pages_alone = sequence_problem();
    pages_alone.page_size = 16;
    demand_refused("pages without starts", "causal", pages_alone, SPATTN_E_RANGE, "problem.page_size");
    demand_refused("pages that do not divide", "causal", cache_problem(1, 7), SPATTN_E_RANGE, "problem.page_size");
    demand_refused("pages of less than nothing", "causal", cache_problem(1, -16), SPATTN_E_RANGE, "problem.page_size");
    demand_refused("a backward", "causal", cache_problem(1, 0, SPATTN_PLAN_BACKWARD), SPATTN_E_UNSUPPORTED,
                   "problem.flags");
    demand_refused("an offset", "causal", cache_problem(1, 0, SPATTN_PLAN_Q_OFFSET), SPATTN_E_UNSUPPORTED,
                   "problem.flags");
    demand_refused("ragged queries without pages", "causal", ragged_problem(4, 0), SPATTN_E_RANGE, "problem.page_size");
    auto none = ragged_problem(4, 16);
    none.batch = 0;
    demand_refused("ragged queries of nobody", "causal", none, SPATTN_E_RANGE, "problem.batch");
    demand_refused("lists under more than causal", "runtime_tokens(4) & window(9,0)", cache_problem(1, 0),
                   SPATTN_E_UNSUPPORTED, "pattern");
    demand_refused("lists of several queries", "runtime_blocks(2,4,4)", cache_problem(1, 0), SPATTN_E_UNSUPPORTED,
                   "pattern");
    demand_refused("a tree of fewer tokens", "tree(-1,0)", cache_problem(1, 0), SPATTN_E_SHAPE, "pattern");
    auto trees = sequence_problem();
    trees.flags = SPATTN_PLAN_PARENTS;
    demand_refused("trees without starts", "causal", trees, SPATTN_E_UNSUPPORTED, "problem.flags");
    demand_refused("trees whose queries bring lists", "runtime_tokens(4)", cache_problem(1, 0, SPATTN_PLAN_PARENTS),
                   SPATTN_E_UNSUPPORTED, "problem.flags");
    auto narrow = cache_problem(1, 0);
    narrow.cache_dtype = bf16;
    demand_refused("a cache of another dtype", "causal", narrow, SPATTN_E_DTYPE, "problem.cache_dtype");
    narrow.cache_dtype = {SPATTN_FLOAT8_E4M3FN, 8, 2};
    demand_refused("float8 in lanes", "causal", narrow, SPATTN_E_DTYPE, "problem.cache_dtype");
    narrow = sequence_problem(), narrow.cache_dtype = float8;
    demand_refused("float8 without starts", "causal", narrow, SPATTN_E_DTYPE, "problem.cache_dtype");
    narrow = cache_problem(1, 0), narrow.reserved = 1;
    demand_refused("a field without meaning", "causal", narrow, SPATTN_E_UNKNOWN_FIELD, "problem.reserved");
    narrow = cache_problem(1, 0), narrow.dtype = float8;
    demand_refused("queries of float8", "causal", narrow, SPATTN_E_UNSUPPORTED, "problem.dtype");
}

TEST(operands_on_a_cache_that_are_refused) {
    const Context context = make_context();
    Sequence sequence(context.get(), "full");
    const std::vector<int64_t> starts{10, 20}, lengths{11, 21};
    for (const int64_t page_size : {0, 16}) {
        const auto problem = cache_problem(1, page_size);
        const Plan plan = make_plan(context.get(), parse("full").get(), problem);
        const auto demand_refused = [&](const char* what, const std::function<void(Call&, Cache&)>& spoil,
                                        spattn_status status, const char* argument) {
            Cache cache(sequence, page_size, lengths);
            Call call(sequence, cache, problem, starts);
            const Scratch scratch(plan.get(), call.args);
            spoil(call, cache);
            demand(what, "spattn_forward", spattn_forward(plan.get(), &call.args), status, argument);
            CHECK(call.out.is_poison());
        };
        demand_refused("a flag of the future", [](Call& c, Cache&) { c.args.flags = 2; }, SPATTN_E_UNKNOWN_FIELD,
                       "args.flags");
        demand_refused("no starts", [](Call& c, Cache&) { c.args.starts = nullptr; }, SPATTN_E_NULL, "starts");
        demand_refused("starts of floats", [](Call& c, Cache&) { c.starts.view.dtype = f64; }, SPATTN_E_DTYPE,
                       "starts");
        demand_refused("too many starts", [](Call& c, Cache&) { c.starts.shape[0] = 3; }, SPATTN_E_SHAPE, "starts");
        demand_refused("starts under an output", [](Call& c, Cache&) { c.starts.view.data = c.out.data; },
                       SPATTN_E_LAYOUT, "out");
        demand_refused("parents for another plan", [](Call& c, Cache&) { c.args.parents = &c.starts.view; },
                       SPATTN_E_STATE, "parents");
        if (page_size == 0) {
            demand_refused("a table without pages",
                           [](Call& c, Cache& cache) { c.args.page_table = &cache.table.view; }, SPATTN_E_STATE,
                           "page_table");
            continue;
        }
        demand_refused("no table", [](Call& c, Cache&) { c.args.page_table = nullptr; }, SPATTN_E_NULL, "page_table");
        demand_refused("too short a table", [](Call&, Cache& cache) { cache.table.shape[1] = 14; }, SPATTN_E_SHAPE,
                       "page_table");
        demand_refused("no page", [](Call&, Cache& cache) { cache.k.shape[0] = 0; }, SPATTN_E_SHAPE, "k");
        demand_refused("other pages of values", [](Call&, Cache& cache) { cache.v.shape[0] = 5; }, SPATTN_E_SHAPE, "v");
        demand_refused("pages of another size", [](Call&, Cache& cache) { cache.k.shape[1] = 15; }, SPATTN_E_SHAPE,
                       "k");
        demand_refused("pages that overlap", [](Call&, Cache& cache) { cache.k.strides[0] = 15 * heads_kv * dim; },
                       SPATTN_E_LAYOUT, "k");
        demand_refused("pages no whole number of rows apart",
                       [](Call&, Cache& cache) {
                           cache.k.shape[0] = cache.v.shape[0] = 3;
                           cache.k.strides[0] = 16 * heads_kv * dim + 1;
                       },
                       SPATTN_E_LAYOUT, "k");
        demand_refused("values whose pages are further apart",
                       [](Call&, Cache& cache) {
                           cache.k.shape[0] = cache.v.shape[0] = 3;
                           cache.v.strides[0] = 17 * heads_kv * dim_v;
                       },
                       SPATTN_E_LAYOUT, "v");
    }
    for (const int64_t page_size : {0, 16}) {
        const auto problem = cache_problem(3, page_size, SPATTN_PLAN_PARENTS);
        const Plan plan = make_plan(context.get(), parse("full").get(), problem);
        const auto demand_refused = [&](const char* what, const std::function<void(Call&, Trees&)>& spoil,
                                        spattn_status status) {
            Cache cache(sequence, page_size, {13, 23});
            Call call(sequence, cache, problem, starts);
            Trees trees(3, {1});
            call.args.parents = &trees.parents.view;
            const Scratch scratch(plan.get(), call.args);
            spoil(call, trees);
            demand(what, "spattn_forward", spattn_forward(plan.get(), &call.args), status,
                   status == SPATTN_E_LAYOUT ? "out" : "parents");
            CHECK(call.out.is_poison());
        };
        demand_refused("no parents", [](Call& c, Trees&) { c.args.parents = nullptr; }, SPATTN_E_NULL);
        demand_refused("parents of floats", [](Call&, Trees& t) { t.parents.view.dtype = f32; }, SPATTN_E_DTYPE);
        demand_refused("parents of fewer queries", [](Call&, Trees& t) { t.parents.shape[1] = 2; }, SPATTN_E_SHAPE);
        demand_refused("parents under an output", [](Call& c, Trees& t) { t.parents.view.data = c.out.data; },
                       SPATTN_E_LAYOUT);
    }
    for (const int64_t page_size : {0, 16}) {
        auto problem = cache_problem(1, page_size);
        problem.cache_dtype = float8;
        const Plan plan = make_plan(context.get(), parse("full").get(), problem);
        problem.head_dim_v = dim, problem.flags |= SPATTN_PLAN_VALUE_IN_KEY;
        const Plan in_key = make_plan(context.get(), parse("full").get(), problem);
        const auto demand_refused = [&](const char* what, const std::function<void(Call&, Narrow&, Narrow&)>& spoil,
                                        spattn_status status, const char* argument, bool is_in_key = false) {
            Cache cache(sequence, page_size, lengths);
            Narrow k(cache.k, Narrow::Scales::of_rows), v(cache.v, Narrow::Scales::of_rows);
            Call call(sequence, cache, problem, starts);
            call.args.k = &k.codes.view, call.args.v = &v.codes.view;
            call.args.k_scales = &k.scales.view, call.args.v_scales = &v.scales.view;
            const spattn_plan* const asked = is_in_key ? in_key.get() : plan.get();
            const Scratch scratch(asked, call.args);
            spoil(call, k, v);
            demand(what, "spattn_forward", spattn_forward(asked, &call.args), status, argument);
            CHECK(call.out.is_poison());
        };
        demand_refused("keys of the queries' dtype", [](Call&, Narrow& k, Narrow&) { k.codes.view.dtype = f32; },
                       SPATTN_E_DTYPE, "k");
        demand_refused("scales of doubles", [](Call&, Narrow& k, Narrow&) { k.scales.view.dtype = f64; },
                       SPATTN_E_DTYPE, "k_scales");
        demand_refused("scales of fewer heads", [](Call&, Narrow&, Narrow& v) { v.scales.shape[2] = 1; },
                       SPATTN_E_SHAPE, "v_scales");
        demand_refused("scales under an output", [](Call& c, Narrow& k, Narrow&) { k.scales.view.data = c.out.data; },
                       SPATTN_E_LAYOUT, "out");
        demand_refused("scales of values in keys", [](Call& c, Narrow&, Narrow&) { c.args.v = nullptr; },
                       SPATTN_E_STATE, "v_scales", true);
        if (page_size)
            demand_refused("scales whose pages are further apart",
                           [](Call&, Narrow& k, Narrow&) { k.scales.strides[0] += 1; }, SPATTN_E_LAYOUT, "k_scales");
    }
    const Plan plain = make_plan(context.get(), parse("full").get(), sequence_problem());
    auto args = sized<spattn_forward_args>();
    args.q = &sequence.q.view, args.k = &sequence.k.view, args.v = &sequence.v.view, args.out = &sequence.out.view;
    const Scratch scratch(plain.get(), args);
    Tensor numbers({batch}, i64);
    args.starts = &numbers.view;
    demand("starts for another plan", "spattn_forward", spattn_forward(plain.get(), &args), SPATTN_E_STATE, "starts");
    args.starts = nullptr, args.k_scales = &numbers.view;
    demand("scales for another plan", "spattn_forward", spattn_forward(plain.get(), &args), SPATTN_E_STATE, "k_scales");
    args.k_scales = nullptr, args.v_scales = &numbers.view;
    demand("scales for another plan", "spattn_forward", spattn_forward(plain.get(), &args), SPATTN_E_STATE, "v_scales");
    args.v_scales = nullptr, args.page_table = &numbers.view;
    demand("a table for another plan", "spattn_forward", spattn_forward(plain.get(), &args), SPATTN_E_STATE,
           "page_table");
    args.page_table = nullptr, args.query_offsets = &numbers.view;
    demand("offsets for another plan", "spattn_forward", spattn_forward(plain.get(), &args), SPATTN_E_STATE,
           "query_offsets");
}

TEST(a_cache_says_what_it_is) {
    const Context context = make_context();
    const Plan plan = make_plan(context.get(), parse("window(9,9)").get(), cache_problem(1, 16));
    const std::string text = explain(plan.get());
    for (const char* line : {"beginning where each call says", "causal & window(9,9)", "in pages of 16"})
        CHECK(text.find(line) != std::string::npos);
    const Plan of_trees =
        make_plan(context.get(), parse("full").get(), cache_problem(5, 16, SPATTN_PLAN_PARENTS));
    CHECK(explain(of_trees.get()).find("nodes of trees") != std::string::npos);
    auto stats = sized<spattn_stats>();
    succeed(spattn_plan_stats(plan.get(), &stats), "stats");
    CHECK_EQ(stats.pairs, double(batch * heads_q * (capacity * 10 - 45)));  // of the whole sequence
}

TEST(caches_may_be_empty) {
    const Context context = make_context();
    for (const int64_t page_size : {0, 16})
        for (int64_t spattn_problem::*size : {&spattn_problem::batch, &spattn_problem::seq_q, &spattn_problem::seq_k}) {
            auto p = cache_problem(3, page_size);
            p.*size = 0;
            const Plan plan = make_plan(context.get(), parse("full").get(), p);
            Tensor q({p.batch, p.seq_q, heads_q, dim}, f32), out({p.batch, p.seq_q, heads_q, dim_v}, f32);
            const auto keys = [&](int64_t columns) {
                return page_size ? std::vector<int64_t>{4, page_size, heads_kv, columns}
                                 : std::vector<int64_t>{p.batch, p.seq_k, heads_kv, columns};
            };
            Tensor k(keys(dim), f32), v(keys(dim_v), f32), starts({p.batch}, i32),
                table({p.batch, page_size ? p.seq_k / page_size : 1}, i32);
            auto args = sized<spattn_forward_args>();
            args.q = &q.view, args.k = &k.view, args.v = &v.view, args.out = &out.view, args.starts = &starts.view;
            if (page_size) args.page_table = &table.view;
            const Scratch scratch(plan.get(), args);
            succeed(spattn_forward(plan.get(), &args), "an empty cache");
            const float* const begin = out.as<float>();
            CHECK(std::all_of(begin, begin + out.bytes / sizeof(float), [](float x) { return x == 0; }));
            if (page_size == 0) continue;
            v.shape[0] += 1;
            demand("other pages of values", "spattn_forward", spattn_forward(plan.get(), &args), SPATTN_E_SHAPE, "v");
        }
}
