// SPDX-License-Identifier: MIT
// New tokens of a cache: each goes to its place, nothing else is touched, and what is refused.
#include "abi/drawn_append.h"

using namespace abi;

namespace {

constexpr spattn_device host{SPATTN_CPU, 0};

void* in_place(AppendOperand& x) { return x.memory.data(); }

// A call of each kind of problem, all of whose operands are good.
DrawnAppend draw(std::mt19937& random, spattn_enum axes, bool has_pages) {
    for (;;) {
        DrawnAppend drawn(random);
        const spattn_problem& p = drawn.problem;
        if (p.axes == axes && (p.page_size != 0) == has_pages && drawn.v.is_given && p.seq_q > 1 && p.seq_k > 1 &&
            p.batch > 1 && p.heads_kv > 1 && p.page_size != 1)
            return drawn;
    }
}

}  // namespace

TEST(tokens_go_to_their_places) {
    std::mt19937 random(4);
    for (const int32_t threads : {1, 3}) {
        const Context context = make_context(threads, 0);
        for (int n = 0; n < 1000; ++n) {
            DrawnAppend drawn(random);
            check::context = drawn.name;
            const auto expected = drawn.expected();
            succeed(drawn.call(context.get(), host, in_place), "append");
            for (const auto& [operand, memory] : expected) CHECK(operand->memory == memory);
        }
    }
}

// What was appended is what a call on the cache reads.
TEST(calls_read_what_was_appended) {
    const Context context = make_context();
    auto p = sized<spattn_problem>();
    p.flags = SPATTN_PLAN_STARTS;
    p.batch = 2, p.heads_q = p.heads_kv = 1, p.seq_q = 3, p.seq_k = 12, p.head_dim = 4, p.dtype = f32, p.page_size = 4;
    const Plan plan = make_plan(context.get(), parse("full").get(), p);
    Tensor rows({2, 3, 1, 4}, f32), pool({6, 4, 1, 4}, f32), values({6, 4, 1, 4}, f32), out({2, 3, 1, 4}, f32);
    Tensor table({2, 3}, i32), starts({2}, i32);
    const int32_t pages[] = {4, 1, -1, 5, 0, -1};
    std::copy_n(pages, 6, table.as<int32_t>());
    std::fill_n(pool.as<float>(), 96, std::nanf("")), std::fill_n(values.as<float>(), 96, std::nanf(""));
    for (int32_t step = 0; step < 2; ++step) {
        for (int64_t i = 0; i < 24; ++i) rows.as<float>()[i] = float(i / 4 % 3 + 3 * step);  // the number of the token
        std::fill_n(starts.as<int32_t>(), 2, 3 * step);
        auto append = sized<spattn_cache_append_args>();
        append.k_new = append.v_new = &rows.view, append.k = &pool.view, append.v = &values.view;
        append.starts = &starts.view, append.page_table = &table.view;
        succeed(spattn_cache_append(context.get(), &p, &append), "append");
        std::fill_n(rows.as<float>(), 24, 0.f);  // queries to which all keys are alike
        auto args = sized<spattn_forward_args>();
        args.q = &rows.view, args.k = &pool.view, args.v = &values.view, args.out = &out.view;
        args.starts = &starts.view, args.page_table = &table.view;
        size_t bytes = 0;
        succeed(spattn_plan_workspace(plan.get(), SPATTN_OP_FORWARD, &bytes, nullptr), "workspace");
        std::vector<unsigned char> memory(bytes + 64);
        args.workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
        args.workspace_bytes = bytes;
        succeed(spattn_forward(plan.get(), &args), "forward");
        for (int64_t i = 0; i < 24; ++i)
            CHECK(std::abs(out.as<float>()[i] - float(i / 4 % 3 + 3 * step) / 2) < 1e-6);  // the mean of 0 .. token
    }
}

// Offsets that fall, or lie outside: what is written means nothing, but it lies in the cache.
TEST(wrong_offsets_write_nowhere_else) {
    const Context context = make_context();
    std::mt19937 random(9);
    for (int n = 0; n < 200; ++n) {
        DrawnAppend drawn = draw(random, SPATTN_THD, true);
        for (size_t at = drawn.query_offsets.first; at < drawn.query_offsets.memory.size(); ++at)
            drawn.query_offsets.memory[at] = static_cast<unsigned char>(random());
        const AppendOperand k = drawn.k;
        succeed(drawn.call(context.get(), host, in_place), "append");
        const size_t element = k.dtype.bits / 8;
        std::vector<bool> is_element(k.memory.size());
        for (int64_t page = 0; page < k.shape[0]; ++page)
            for (int64_t i = 0; i < k.shape[1] * k.shape[2] * k.shape[3]; ++i) {
                const int64_t column = i % k.shape[3], head = i / k.shape[3] % k.shape[2];
                const int64_t row = i / k.shape[3] / k.shape[2];
                const auto& s = k.strides;
                const int64_t at = page * s[0] + row * s[1] + head * s[2] + column * s[3];
                for (size_t byte = 0; byte < element; ++byte) is_element[k.first + size_t(at) * element + byte] = true;
            }
        bool holds = true;
        for (size_t byte = 0; byte < k.memory.size(); ++byte)
            holds &= is_element[byte] || drawn.k.memory[byte] == k.memory[byte];
        CHECK(holds);
    }
}

TEST(operands_that_are_refused) {
    const Context context = make_context();
    std::mt19937 random(2);
    const auto demand_refused = [&](const char* what, spattn_enum axes, bool has_pages,
                                    const std::function<void(DrawnAppend&)>& spoil, spattn_status status,
                                    const char* argument) {
        DrawnAppend drawn = draw(random, axes, has_pages);
        drawn.counts.is_given = false;
        spoil(drawn);
        const std::vector<unsigned char> k = drawn.k.memory, v = drawn.v.memory;
        demand(what, "spattn_cache_append", drawn.call(context.get(), host, in_place), status, argument);
        CHECK(drawn.k.memory == k && drawn.v.memory == v);
    };
    for (const spattn_enum axes : {SPATTN_BSHD, SPATTN_BHSD, SPATTN_THD})
        for (const bool has_pages : {false, true}) {
            if (axes == SPATTN_THD && !has_pages) continue;
            const auto refuse = [&](const char* what, const std::function<void(DrawnAppend&)>& spoil,
                                    spattn_status status, const char* argument) {
                demand_refused(what, axes, has_pages, spoil, status, argument);
            };
            refuse("no starts", [](DrawnAppend& d) { d.starts.is_given = false; }, SPATTN_E_NULL, "starts");
            refuse("no new values", [](DrawnAppend& d) { d.v_new.is_given = false; }, SPATTN_E_NULL, "v_new");
            refuse("no values", [](DrawnAppend& d) { d.v.is_given = false; }, SPATTN_E_NULL, "v");
            refuse("starts of floats", [](DrawnAppend& d) { d.starts.dtype = f64; }, SPATTN_E_DTYPE, "starts");
            refuse("other heads", [](DrawnAppend& d) { d.k.shape[d.problem.axes == SPATTN_BHSD ? 1 : 2] += 1; },
                   SPATTN_E_SHAPE, "k");
            refuse("another dtype", [](DrawnAppend& d) { d.v.dtype = i32; }, SPATTN_E_DTYPE, "v");
            refuse("new rows of another width", [](DrawnAppend& d) { d.v_new.shape.back() += 1; }, SPATTN_E_SHAPE,
                   "v_new");
            refuse("elements on each other", [](DrawnAppend& d) { d.k.strides[1] = 0; }, SPATTN_E_LAYOUT, "k");
            refuse("values in keys", [](DrawnAppend& d) { d.problem.flags |= SPATTN_PLAN_VALUE_IN_KEY; },
                   SPATTN_E_STATE, "v_new");
            if (has_pages)
                refuse("no table", [](DrawnAppend& d) { d.page_table.is_given = false; }, SPATTN_E_NULL, "page_table");
            else
                refuse("a table without pages", [](DrawnAppend& d) { d.page_table = d.starts; }, SPATTN_E_STATE,
                       "page_table");
            if (axes == SPATTN_THD) {
                refuse("no offsets", [](DrawnAppend& d) { d.query_offsets.is_given = false; }, SPATTN_E_NULL,
                       "query_offsets");
                refuse("counts beside offsets", [](DrawnAppend& d) { d.counts = d.starts; }, SPATTN_E_STATE, "counts");
            } else {
                refuse("offsets of rows that are padded", [](DrawnAppend& d) { d.query_offsets = d.starts; },
                       SPATTN_E_STATE, "query_offsets");
                refuse("counts of more", [](DrawnAppend& d) { d.counts = d.starts, d.counts.shape[0] += 1; },
                       SPATTN_E_SHAPE, "counts");
            }
        }
    // Calls that choose the scales of a float8 cache.
    const auto refuse_scales = [&](const char* what, const std::function<void(DrawnAppend&)>& spoil,
                                   spattn_status status, const char* argument) {
        for (const bool has_pages : {false, true}) {
            DrawnAppend drawn = draw(random, SPATTN_BSHD, has_pages);
            while (!drawn.flags) drawn = draw(random, SPATTN_BSHD, has_pages);
            drawn.counts.is_given = false;
            spoil(drawn);
            demand(what, "spattn_cache_append", drawn.call(context.get(), host, in_place), status, argument);
        }
    };
    refuse_scales("no place for scales", [](DrawnAppend& d) { d.k_scales.is_given = false; }, SPATTN_E_NULL,
                  "k_scales");
    refuse_scales("no place for scales of values", [](DrawnAppend& d) { d.v_scales.is_given = false; }, SPATTN_E_NULL,
                  "v_scales");
    refuse_scales("heads that share scales", [](DrawnAppend& d) { d.v_scales.strides[2] = 0; }, SPATTN_E_LAYOUT,
                  "v_scales");
    refuse_scales("scales of another dtype", [](DrawnAppend& d) { d.k_scales.dtype = i32; }, SPATTN_E_DTYPE,
                  "k_scales");
    refuse_scales("scales of a wide cache", [](DrawnAppend& d) { d.problem.cache_dtype = {}; }, SPATTN_E_RANGE,
                  "args.flags");
    refuse_scales("unknown flags", [](DrawnAppend& d) { d.flags |= 2; }, SPATTN_E_UNKNOWN_FIELD, "args.flags");
    demand_refused("no cache", SPATTN_BSHD, false, [](DrawnAppend& d) { d.problem.flags = 0; }, SPATTN_E_RANGE,
                   "problem.flags");
    demand_refused("other pages of values", SPATTN_BSHD, true, [](DrawnAppend& d) { d.v.shape[0] -= 1; },
                   SPATTN_E_SHAPE, "v");
    DrawnAppend drawn = draw(random, SPATTN_BSHD, false);
    drawn.v = drawn.k, drawn.problem.head_dim_v = drawn.problem.head_dim, drawn.v_new = drawn.k_new;
    const auto in_one = [&](AppendOperand& x) -> void* { return &x == &drawn.v ? drawn.k.memory.data() : in_place(x); };
    demand("keys and values in one place", "spattn_cache_append", drawn.call(context.get(), host, in_one),
           SPATTN_E_LAYOUT, "k");
}

// Frameworks make empty tensors: without entries, new rows or room there is nothing to write.
TEST(nothing_at_all) {
    const Context context = make_context();
    std::mt19937 random(3);
    for (const bool has_pages : {false, true}) {
        DrawnAppend drawn = draw(random, SPATTN_BSHD, has_pages);
        const std::vector<unsigned char> k = drawn.k.memory;
        drawn.problem.seq_q = drawn.k_new.shape[1] = drawn.v_new.shape[1] = 0;
        const auto without_rows = [&](AppendOperand& x) -> void* {
            return &x == &drawn.k_new || &x == &drawn.v_new ? nullptr : in_place(x);
        };
        succeed(drawn.call(context.get(), host, without_rows), "no rows");
        CHECK(drawn.k.memory == k);
    }
}
