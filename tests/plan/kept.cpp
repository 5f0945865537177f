// SPDX-License-Identifier: MIT
// Which plans a context keeps.
#include <malloc.h>

#include "api/context.h"
#include "check.h"
#include "pattern/mask.h"

using namespace spattn;

namespace {

// A plan of so many bytes, which nobody can run.
Ref<const spattn_plan> plan_of(size_t bytes) {
    auto plan = make_ref<spattn_plan>();
    plan->pattern = make_causal();
    plan->compiled.layout_bytes = bytes;
    return plan;
}

constexpr size_t key_bytes = 2;  // that a key of one letter adds

void keep(PlanCache& cache, const char* key, size_t bytes) { cache.keep(key, plan_of(bytes - key_bytes)); }

std::string kept(PlanCache& cache, const std::string& keys) {
    std::string kept;
    for (char key : keys)
        if (cache.find(std::string(1, key))) kept += key;
    return kept;
}

}  // namespace

TEST(the_least_recently_used_fall_out_beyond_so_many_bytes) {
    PlanCache cache(10, 100);
    keep(cache, "a", 40), keep(cache, "b", 20), keep(cache, "c", 40);
    CHECK_EQ(kept(cache, "abc"), "abc");
    CHECK(cache.find("a"));       // now the order of use is b, c, a
    keep(cache, "d", 50);         // 150: without b still 130, and without c 90
    CHECK_EQ(kept(cache, "abcd"), "ad");
    keep(cache, "e", 10);         // what fell out counts no more
    CHECK_EQ(kept(cache, "ade"), "ade");
}

TEST(a_plan_beyond_the_limit_is_the_only_one) {
    PlanCache cache(10, 100);
    keep(cache, "a", 40), keep(cache, "b", 1000);
    CHECK_EQ(kept(cache, "ab"), "b");
    keep(cache, "c", 10);
    CHECK_EQ(kept(cache, "abc"), "c");
}

TEST(the_number_of_plans_is_limited_as_well) {
    PlanCache cache(2, 100), none(0, 100);
    keep(cache, "a", 10), keep(cache, "b", 10), keep(cache, "c", 10);
    CHECK_EQ(kept(cache, "abc"), "bc");
    keep(none, "a", 10);
    CHECK_EQ(kept(none, "a"), "");
}

TEST(a_plan_that_was_kept_meanwhile_counts_once) {
    PlanCache cache(10, 100);
    keep(cache, "a", 50), keep(cache, "a", 50), keep(cache, "a", 50), keep(cache, "b", 50);
    CHECK_EQ(kept(cache, "ab"), "ab");
}

namespace {

// Every seventh key, others in each row: lists and masks of any length.
PatternRef scattered_mask(int64_t tokens) {
    const MaskSizes sizes{1, 1, tokens, tokens};
    auto rows = std::make_unique<BitRows>(sizes);
    for (int64_t row = 0; row < tokens; ++row)
        for (int64_t key = row * row % 7; key < tokens; key += 7) rows->set(0, row, key);
    return make_mask(std::move(rows), sizes);
}

PatternRef scattered_csr(int64_t tokens) {
    std::vector<int64_t> row_ptr{0}, col_idx;
    for (int64_t row = 0; row < tokens; ++row) {
        for (int64_t key = row * row % 61; key < tokens; key += 61) col_idx.push_back(key);
        row_ptr.push_back(int64_t(col_idx.size()));
    }
    col_idx.shrink_to_fit();
    return make_csr(std::move(row_ptr), std::move(col_idx), tokens, false);
}

PatternRef repeating_text(int64_t tokens) {
    std::vector<int64_t> ids;
    for (int64_t token = 0; token < tokens; ++token) ids.push_back(token * token % 301);
    return make_xref(std::move(ids), {}, {});
}

}  // namespace

// Counted beside what malloc gives for a pattern and its plan: within a third, or some hundred KiB of texts and vectors'
// spare room.
TEST(a_plan_counts_the_bytes_that_it_holds) {
    const auto used = [] { return double(mallinfo2().uordblks + mallinfo2().hblkhd); };
    if (used() == 0) return check::skip("this malloc does not tell how much it gave");
    spattn_context_options options{};
    options.struct_size = sizeof options, options.device = {SPATTN_CPU, 0}, options.cpu_threads = 2;
    options.plan_cache = -1;
    spattn_context* made = nullptr;
    CHECK_EQ(spattn_context_create(&options, &made), SPATTN_OK);
    const Ref<spattn_context> context = Ref<spattn_context>::adopt(made);
    struct Case {
        const char* name;
        PatternRef (*make)(int64_t tokens);
        int64_t tokens;
    };
    for (const Case& c : {Case{"mask", scattered_mask, 2048}, Case{"csr", scattered_csr, 4096},
                          Case{"xref", repeating_text, 8192},
                          Case{"transposed csr", [](int64_t n) { return make_transpose(scattered_csr(n)); }, 4096},
                          Case{"causal", [](int64_t) { return make_causal(); }, 65536}}) {
        spattn_problem problem{};
        problem.struct_size = sizeof problem, problem.dtype = {SPATTN_FLOAT, 32, 1}, problem.batch = 1;
        problem.heads_q = problem.heads_kv = 16, problem.head_dim = 64, problem.flags = SPATTN_PLAN_BACKWARD;
        problem.seq_q = problem.seq_k = c.tokens;
        double held = 0;
        size_t counted = 0;
        for (int turn = 0; turn < 2; ++turn) {  // what is made once for all plans is there in the second turn
            const double before = used();
            const PatternRef pattern = c.make(c.tokens);
            const auto plan = find_or_make_plan(*context, *pattern, problem, nullptr);
            held = used() - before, counted = plan->bytes();
        }
        check::context = text(c.name, ": counted ", counted, ", held ", int64_t(held));
        CHECK(std::abs(double(counted) - held) < held / 3 + (200 << 10));
    }
}
