// SPDX-License-Identifier: MIT
// Questions to patterns that have no answer, and results without room: a typed error, and results that stay as they
// were. What types of arguments tell, test_misuse.py says.
#include "abi/abi.h"

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

}  // namespace

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
