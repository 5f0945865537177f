// SPDX-License-Identifier: MIT
// Wrong arguments to the questions a person asks of a pattern: a typed error, and results that stay as they were.
#include "abi/tensors.h"

using namespace abi;

namespace {

constexpr int64_t seq_q = 6, seq_k = 9;

// What each question writes, poisoned, so that a failing call that writes shows.
struct Results {
    Tensor mask{{1, 2, seq_q, seq_k}, u8}, image{{3, 4}, f32}, row_ptr{{seq_q + 1}, i64}, col_idx{{seq_q * seq_k}, i32};
    spattn_stats stats;
    int32_t keeps = 77;
    int64_t nnz = 77;

    Results() {
        std::memset(&stats, Tensor::poison, sizeof stats);
        stats.struct_size = sizeof stats;
    }
    bool are_untouched() const {
        spattn_stats untouched;
        std::memset(&untouched, Tensor::poison, sizeof untouched);
        untouched.struct_size = sizeof untouched;
        return mask.is_poison() && image.is_poison() && row_ptr.is_poison() && col_idx.is_poison() && keeps == 77 &&
               nnz == 77 && !std::memcmp(&stats, &untouched, sizeof stats);
    }
};

struct Question {
    const char* function;
    std::function<spattn_status(const spattn_pattern*, const spattn_extent*, Results&)> ask;
};

const std::vector<Question> questions = {
    {"spattn_pattern_stats", [](auto p, auto e, Results& r) { return spattn_pattern_stats(p, e, &r.stats); }},
    {"spattn_pattern_keeps",
     [](auto p, auto e, Results& r) { return spattn_pattern_keeps(p, e, 0, 1, 2, 3, &r.keeps); }},
    {"spattn_pattern_to_mask", [](auto p, auto e, Results& r) { return spattn_pattern_to_mask(p, e, &r.mask.view); }},
    {"spattn_pattern_to_image",
     [](auto p, auto e, Results& r) { return spattn_pattern_to_image(p, e, 1, &r.image.view); }},
    {"spattn_pattern_to_csr",
     [](auto p, auto e, Results& r) {
         return spattn_pattern_to_csr(p, e, 1, &r.row_ptr.view, &r.col_idx.view, &r.nnz);
     }},
};

spattn_extent good_extent() {
    auto extent = make_extent(seq_q, seq_k);
    extent.heads = 2;
    return extent;
}

struct BadExtent {
    const char* what;
    std::function<void(spattn_extent&)> spoil;
    spattn_status status;
    const char* argument;
};

std::vector<BadExtent> bad_extents() {
    std::vector<BadExtent> table = {
        {"struct_size 0", [](auto& e) { e.struct_size = 0; }, SPATTN_E_STRUCT_SIZE, "extent"},
        {"struct_size short", [](auto& e) { e.struct_size -= 8; }, SPATTN_E_STRUCT_SIZE, "extent"},
        {"a flag of the future", [](auto& e) { e.flags = 1u << 31; }, SPATTN_E_UNKNOWN_FIELD, "extent.flags"},
        {"seq_q 0", [](auto& e) { e.seq_q = 0; }, SPATTN_E_RANGE, "extent.seq_q"},
        {"seq_k 0", [](auto& e) { e.seq_k = 0; }, SPATTN_E_RANGE, "extent.seq_k"},
        {"seq_q 2^31", [](auto& e) { e.seq_q = int64_t(1) << 31; }, SPATTN_E_RANGE, "extent.seq_q"},
    };
    const auto range = [&](const char* what, int64_t spattn_extent::* field, const char* argument) {
        for (int64_t value : {int64_t(-1), huge, least})
            table.push_back({what, [=](spattn_extent& e) { e.*field = value; }, SPATTN_E_RANGE, argument});
    };
    range("batch", &spattn_extent::batch, "extent.batch");
    range("heads", &spattn_extent::heads, "extent.heads");
    range("seq_q", &spattn_extent::seq_q, "extent.seq_q");
    range("seq_k", &spattn_extent::seq_k, "extent.seq_k");
    range("block_q", &spattn_extent::block_q, "extent.block_q");
    range("block_k", &spattn_extent::block_k, "extent.block_k");
    for (int64_t offset : {huge, -huge, most, least}) {
        table.push_back({"q_offset",
                         [=](auto& e) {
                             e.flags = SPATTN_EXTENT_Q_OFFSET;
                             e.q_offset = offset;
                         },
                         SPATTN_E_RANGE, "extent.q_offset"});
    }
    return table;
}

}  // namespace

TEST(handles_and_extents) {
    const Pattern pattern = parse("causal");
    const auto extent = good_extent();
    for (const Question& question : questions) {
        Results results;
        demand("pattern NULL", question.function, question.ask(nullptr, &extent, results), SPATTN_E_NULL, "pattern");
        demand("extent NULL", question.function, question.ask(pattern.get(), nullptr, results), SPATTN_E_NULL,
               "extent");
        for (const BadExtent& bad : bad_extents()) {
            auto spoiled = extent;
            bad.spoil(spoiled);
            demand(bad.what, question.function, question.ask(pattern.get(), &spoiled, results), bad.status,
                   bad.argument);
        }
        CHECK(results.are_untouched());
        CHECK_EQ(question.ask(pattern.get(), &extent, results), SPATTN_OK);
        CHECK(!results.are_untouched());
    }
}

// Each of these patterns means nothing on 2 heads, 1 batch entry, 6 queries and 9 keys.
TEST(patterns_that_do_not_fit_the_extent) {
    const auto extent = good_extent();
    for (const char* text : {"per_head([0,1,0],causal,full)", "per_batch([0,1],causal,full)", "tree(-1,0,1)",
                             "tree(-1,0,1,2,3,4,5,6,7,8)", "causal & tree(-1,0)", "transpose(per_head([0],causal))"}) {
        const Pattern pattern = parse(text);
        for (const Question& question : questions) {
            Results results;
            demand(text, question.function, question.ask(pattern.get(), &extent, results), SPATTN_E_SHAPE, "pattern");
            CHECK(results.are_untouched());
        }
    }
}

TEST(results_null) {
    const Pattern pattern = parse("causal");
    const auto extent = good_extent();
    const spattn_pattern* p = pattern.get();
    demand("NULL", "spattn_pattern_stats", spattn_pattern_stats(p, &extent, nullptr), SPATTN_E_NULL, "result");
    demand("NULL", "spattn_pattern_keeps", spattn_pattern_keeps(p, &extent, 0, 0, 0, 0, nullptr), SPATTN_E_NULL,
           "result");
    demand("NULL", "spattn_pattern_to_mask", spattn_pattern_to_mask(p, &extent, nullptr), SPATTN_E_NULL, "out");
    demand("NULL", "spattn_pattern_to_image", spattn_pattern_to_image(p, &extent, 0, nullptr), SPATTN_E_NULL,
           "coverage");
    demand("NULL", "spattn_pattern_to_csr", spattn_pattern_to_csr(p, &extent, 0, nullptr, nullptr, nullptr),
           SPATTN_E_NULL, "nnz");
    demand("NULL", "spattn_pattern_hash", spattn_pattern_hash(p, nullptr), SPATTN_E_NULL, "result");
    uint64_t hash = 77;
    demand("NULL", "spattn_pattern_hash", spattn_pattern_hash(nullptr, &hash), SPATTN_E_NULL, "pattern");
    CHECK_EQ(hash, uint64_t(77));
    CHECK_EQ(spattn_pattern_equal(nullptr, nullptr), 1);
    CHECK_EQ(spattn_pattern_equal(p, nullptr), 0);
    CHECK_EQ(spattn_pattern_equal(nullptr, p), 0);
}

TEST(indices_out_of_range) {
    const Pattern pattern = parse("causal");
    const auto extent = good_extent();
    const char* function = "spattn_pattern_keeps";
    int32_t result = 77;
    for (int64_t bad : {int64_t(-1), int64_t(10), huge, least}) {
        const auto keeps = [&](int64_t batch, int64_t head, int64_t q, int64_t k) {
            return spattn_pattern_keeps(pattern.get(), &extent, batch, head, q, k, &result);
        };
        demand("batch", function, keeps(bad, 0, 0, 0), SPATTN_E_RANGE, "batch");
        demand("head", function, keeps(0, bad, 0, 0), SPATTN_E_RANGE, "head");
        demand("q", function, keeps(0, 0, bad, 0), SPATTN_E_RANGE, "q");
        demand("k", function, keeps(0, 0, 0, bad), SPATTN_E_RANGE, "k");
        Results r;
        demand("head", "spattn_pattern_to_image", spattn_pattern_to_image(pattern.get(), &extent, bad, &r.image.view),
               SPATTN_E_RANGE, "head");
        demand("head", "spattn_pattern_to_csr",
               spattn_pattern_to_csr(pattern.get(), &extent, bad, &r.row_ptr.view, &r.col_idx.view, &r.nnz),
               SPATTN_E_RANGE, "head");
        CHECK(r.are_untouched());
    }
    CHECK_EQ(result, 77);
}

TEST(tensors) {
    const Pattern pattern = parse("causal");
    const auto extent = good_extent();
    const spattn_pattern* p = pattern.get();
    const auto fresh = [](std::vector<int64_t> shape, spattn_dtype dtype) {
        return [=] { return std::make_unique<Tensor>(shape, dtype); };
    };
    demand_tensor_checks("spattn_pattern_to_mask", "out", false, fresh({1, 2, seq_q, seq_k}, u8),
                         [&](auto t) { return spattn_pattern_to_mask(p, &extent, t); });
    demand_tensor_checks("spattn_pattern_to_image", "coverage", true, fresh({3, 4}, f32),
                         [&](auto t) { return spattn_pattern_to_image(p, &extent, 0, t); });
    int64_t nnz = 77;
    demand_tensor_checks("spattn_pattern_to_csr", "row_ptr", false, fresh({seq_q + 1}, i64),
                         [&](auto t) { return spattn_pattern_to_csr(p, &extent, 0, t, nullptr, &nnz); });
    demand_tensor_checks("spattn_pattern_to_csr", "col_idx", true, fresh({seq_q * seq_k}, i32),
                         [&](auto t) { return spattn_pattern_to_csr(p, &extent, 0, nullptr, t, &nnz); });
}

TEST(pictures_of_impossible_size) {
    const Pattern pattern = parse("causal");
    const auto extent = good_extent();
    for (std::vector<int64_t> shape : {std::vector<int64_t>{0, 4}, {3, 0}, {seq_q + 1, 4}, {3, seq_k + 1}}) {
        Tensor image(shape, f32);
        demand("size", "spattn_pattern_to_image", spattn_pattern_to_image(pattern.get(), &extent, 0, &image.view),
               SPATTN_E_SHAPE, "coverage");
        CHECK(image.is_poison());
    }
}

TEST(too_few_columns) {
    const Pattern pattern = parse("causal");
    const auto extent = good_extent();
    Results r;
    CHECK_EQ(spattn_pattern_to_csr(pattern.get(), &extent, 0, nullptr, nullptr, &r.nnz), SPATTN_OK);
    CHECK_EQ(r.nnz, int64_t(4 + 5 + 6 + 7 + 8 + 9));
    Tensor few({r.nnz - 1}, i32);
    demand("one too few", "spattn_pattern_to_csr",
           spattn_pattern_to_csr(pattern.get(), &extent, 0, nullptr, &few.view, &r.nnz), SPATTN_E_SHAPE, "col_idx");
    CHECK(few.is_poison());
}

TEST(strided_results) {
    const Pattern pattern = parse("causal");
    const auto extent = make_extent(5, 5);
    Tensor mask({1, 1, 5, 5}, u8, 200);
    mask.strides = {999, 999, 2, 20};  // keys far apart, rows close; axes of size 1 hold nonsense
    mask.view.strides = mask.strides.data();
    succeed(spattn_pattern_to_mask(pattern.get(), &extent, &mask.view), "strided mask");
    for (int q = 0; q < 5; ++q)
        for (int k = 0; k < 5; ++k) CHECK_EQ(int(mask.data[2 * q + 20 * k]), int(k <= q));
    CHECK_EQ(int(mask.data[1]), int(Tensor::poison));
}

// The two-call form of texts, for every function that has it.
TEST(text_buffers) {
    const Pattern pattern = parse("causal & window(3,0)");
    const Context context = make_context();
    const Plan plan = make_plan(context.get(), pattern.get(), make_problem());
    const auto check_text = [](const char* function, const char* handle, auto ask, auto none) {
        size_t needed = 0;
        demand("handle NULL", function, ask(none, nullptr, 0, &needed), SPATTN_E_NULL, handle);
        CHECK_EQ(needed, size_t(0));
    };
    check_text("spattn_pattern_print", "pattern", spattn_pattern_print, static_cast<const spattn_pattern*>(nullptr));
    check_text("spattn_plan_explain", "plan", spattn_plan_explain, static_cast<const spattn_plan*>(nullptr));
    check_text("spattn_plan_explain_all", "plan", spattn_plan_explain_all, static_cast<const spattn_plan*>(nullptr));
    const auto check_buffer = [](const char* function, auto ask) {
        size_t needed = 0;
        demand("nothing to write to", function, ask(nullptr, 0, nullptr), SPATTN_E_NULL, "needed");
        CHECK_EQ(ask(nullptr, 0, &needed), SPATTN_OK);
        std::string buffer(needed, '\x5a');
        demand("buffer NULL", function, ask(nullptr, needed, &needed), SPATTN_E_NULL, "buffer");
        demand("one byte short", function, ask(buffer.data(), needed - 1, &needed), SPATTN_E_RANGE, "capacity");
        CHECK_EQ(buffer, std::string(needed, '\x5a'));
        CHECK_EQ(ask(buffer.data(), needed, nullptr), SPATTN_OK);
        CHECK_EQ(std::strlen(buffer.c_str()) + 1, needed);
    };
    check_buffer("spattn_pattern_print", [&](auto... rest) { return spattn_pattern_print(pattern.get(), rest...); });
    check_buffer("spattn_plan_explain", [&](auto... rest) { return spattn_plan_explain(plan.get(), rest...); });
    check_buffer("spattn_plan_explain_all", [&](auto... rest) { return spattn_plan_explain_all(plan.get(), rest...); });
}
