// SPDX-License-Identifier: MIT
// Index patterns, save and load through the ABI: borrowed arrays, and every question.
#include "abi/abi.h"

using namespace abi;

namespace {

Pattern make_csr(Tensor& rows, Tensor& columns, int64_t seq_k, uint32_t flags) {
    spattn_pattern* result = nullptr;
    succeed(spattn_pattern_csr(&rows.view, &columns.view, seq_k, flags, &result), "csr");
    return Pattern(result);
}

// out of a plan with the reference rows.
std::vector<unsigned char> reference_run(const spattn_context* context, const spattn_pattern* pattern, int64_t seq_q,
                                         int64_t seq_k) {
    auto p = make_problem();
    p.flags = SPATTN_PLAN_REFERENCE, p.seq_q = seq_q, p.seq_k = seq_k, p.head_dim_v = p.head_dim;
    Tensor q({p.batch, p.heads_q, seq_q, p.head_dim}, f32), k({p.batch, p.heads_kv, seq_k, p.head_dim}, f32);
    Tensor out({p.batch, p.heads_q, seq_q, p.head_dim}, f32);
    q.fill(1), k.fill(2);
    const Plan plan = make_plan(context, pattern, p);
    auto args = sized<spattn_forward_args>();
    size_t align = 0;
    succeed(spattn_plan_workspace(plan.get(), SPATTN_OP_FORWARD, &args.workspace_bytes, &align), "workspace");
    Tensor workspace({int64_t(args.workspace_bytes)}, u8);
    args.q = &q.view, args.k = args.v = &k.view, args.out = &out.view, args.workspace = workspace.data;
    succeed(spattn_forward(plan.get(), &args), "forward");
    return out.content();
}

int32_t keep_third(void*, int64_t head, int64_t q, int64_t k) { return (head + q + k) % 3 == 0; }

}  // namespace

TEST(borrowed_arrays_are_read_in_place) {
    Numbers rows({0, 2, 3}), columns({0, 1, 1});
    const Pattern borrowed = make_csr(rows, columns, 3, SPATTN_BORROW), copied = make_csr(rows, columns, 3, 0);
    CHECK_EQ(spattn_pattern_equal(borrowed.get(), copied.get()), 1);
    columns.as<int64_t>()[2] = 2;  // not allowed to callers, but it shows whose array is read
    const auto extent = make_extent(2, 3);
    int32_t kept = -1;
    CHECK_EQ(spattn_pattern_keeps(borrowed.get(), &extent, 0, 0, 1, 2, &kept), SPATTN_OK);
    CHECK_EQ(kept, 1);
    CHECK_EQ(spattn_pattern_keeps(copied.get(), &extent, 0, 0, 1, 2, &kept), SPATTN_OK);
    CHECK_EQ(kept, 0);
    columns.strides[0] = 0;
    spattn_pattern* result = nullptr;
    demand("a borrowed stride", "spattn_pattern_csr",
           spattn_pattern_csr(&rows.view, &columns.view, 3, SPATTN_BORROW, &result), SPATTN_E_LAYOUT, "col_idx");
}

// Reference rows ask the pattern while they run: a plan that the context kept after its release would ask arrays that
// their caller may have freed. Here these are changed instead, which a kept plan would show.
TEST(contexts_do_not_keep_what_is_borrowed) {
    const Context context = make_context();
    const Pattern full = parse("full");
    Numbers rows({0, 2, 3}), first({0, 1, 1}), second({0, 1, 1});
    const auto run = [&](Tensor& columns) {
        const Pattern csr = make_csr(rows, columns, 3, SPATTN_BORROW);
        const spattn_pattern* parts[] = {full.get(), csr.get()};
        spattn_pattern* both = nullptr;
        succeed(spattn_pattern_intersection(parts, 2, &both), "intersection");
        return reference_run(context.get(), Pattern(both).get(), 2, 3);
    };
    const std::vector<unsigned char> expected = run(first);
    first.as<int64_t>()[2] = 2;
    CHECK(run(second) == expected);
    CHECK(run(first) != expected);
}

TEST(questions_agree) {
    spattn_pattern* made = nullptr;
    succeed(spattn_pattern_predicate(keep_third, nullptr, 2, 90, 130, &made), "predicate");
    const Pattern predicate(made);
    auto extent = make_extent(90, 130);
    extent.heads = 2;
    Tensor mask({1, 2, 90, 130}, boolean);
    CHECK_EQ(spattn_pattern_to_mask(predicate.get(), &extent, &mask.view), SPATTN_OK);
    for (uint32_t flags : {0u, uint32_t(SPATTN_BORROW)}) {
        succeed(spattn_pattern_mask(&mask.view, flags, &made), "mask");
        const Pattern again(made);
        CHECK_EQ(spattn_pattern_equal(again.get(), predicate.get()), 1);
    }
    int64_t nnz = 0;
    Tensor rows({91}, i64), columns({90 * 130}, i32);
    CHECK_EQ(spattn_pattern_to_csr(predicate.get(), &extent, 1, &rows.view, &columns.view, &nnz), SPATTN_OK);
    columns.shape[0] = nnz;
    const Pattern csr = make_csr(rows, columns, 130, 0);
    Tensor picture({9, 13}, f32);
    CHECK_EQ(spattn_pattern_to_image(csr.get(), &extent, 0, &picture.view), SPATTN_OK);
    double pairs = 0;
    for (int cell = 0; cell < 9 * 13; ++cell) pairs += 100.0 * picture.as<float>()[cell];
    CHECK(std::fabs(pairs - double(nnz)) < 0.01);
    auto stats = sized<spattn_stats>();
    CHECK_EQ(spattn_pattern_stats(csr.get(), &extent, &stats), SPATTN_OK);
    CHECK_EQ(stats.pairs, 2.0 * double(nnz));
}

TEST(saved_bytes_load) {
    Numbers rows({0, 2, 3}), columns({0, 1, 1});
    const Pattern csr = make_csr(rows, columns, 3, 0);
    size_t needed = 0;
    CHECK_EQ(spattn_pattern_save(csr.get(), nullptr, 0, &needed), SPATTN_OK);
    std::vector<char> bytes(needed);
    demand("too small", "spattn_pattern_save", spattn_pattern_save(csr.get(), bytes.data(), needed - 1, nullptr),
           SPATTN_E_RANGE, "capacity");
    CHECK_EQ(spattn_pattern_save(csr.get(), bytes.data(), needed, nullptr), SPATTN_OK);
    spattn_pattern* made = nullptr;
    succeed(spattn_pattern_load(bytes.data(), bytes.size(), &made), "load");
    const Pattern again(made);
    CHECK_EQ(spattn_pattern_equal(again.get(), csr.get()), 1);
}
