// SPDX-License-Identifier: MIT
// Chapter 4e through the C ABI: mask, keeps and CSR agree with the rows of keys, on any strides.
#include <array>

#include "check.h"
#include "pattern/trees.h"

using namespace spattn;
using namespace trees;

namespace {

spattn_extent extent_of(const Plane& plane) {
    const Extent& e = plane.extent;
    spattn_extent extent{};
    extent.struct_size = sizeof extent, extent.flags = SPATTN_EXTENT_Q_OFFSET;
    extent.batch = e.batch, extent.heads = e.heads;
    extent.seq_q = e.seq_q, extent.seq_k = e.seq_k, extent.q_offset = e.q_offset;
    return extent;
}

template <size_t N>
spattn_tensor tensor(void* data, spattn_dtype dtype, const std::array<int64_t, N>& shape,
                     const int64_t* strides = nullptr) {
    return {data, {SPATTN_CPU, 0}, int32_t(N), dtype, shape.data(), strides, 0};
}

constexpr spattn_dtype u8{SPATTN_UINT, 8, 1}, i32{SPATTN_INT, 32, 1}, i64{SPATTN_INT, 64, 1}, f32{SPATTN_FLOAT, 32, 1};

std::vector<uint8_t> mask_of(const Tree& tree, const Plane& at) {
    Plane plane = at;
    std::vector<uint8_t> mask;
    for (plane.batch = 0; plane.batch < 2; ++plane.batch) {
        for (plane.head = 0; plane.head < 3; ++plane.head) {
            for (int64_t q = 0; q < plane.extent.seq_q; ++q) {
                for (int64_t k = 0; k < plane.extent.seq_k; ++k) mask.push_back(tree.sees(plane, plane.position(q), k));
            }
        }
    }
    return mask;
}

}  // namespace

TEST(masks_on_any_strides) {
    for (uint32_t seed = 0; seed < 200; ++seed) {
        Source source(seed);
        const Tree tree = source.tree(2);
        const Plane plane = source.plane();
        check::context = describe(tree, plane, seed);
        const spattn_extent extent = extent_of(plane);
        const std::array<int64_t, 4> shape{2, 3, plane.extent.seq_q, plane.extent.seq_k};
        const std::vector<uint8_t> truth = mask_of(tree, plane);
        std::vector<uint8_t> mask(truth.size(), 9);
        const spattn_tensor compact = tensor(mask.data(), u8, shape);
        CHECK_EQ(spattn_pattern_to_mask(tree.pattern.get(), &extent, &compact), 0);
        CHECK(mask == truth);

        // Every other byte belongs to somebody else.
        std::vector<uint8_t> spaced(2 * truth.size(), 9);
        const std::array<int64_t, 4> strides{6 * shape[2] * shape[3], 2 * shape[2] * shape[3], 2 * shape[3], 2};
        const spattn_tensor loose = tensor(spaced.data(), u8, shape, strides.data());
        CHECK_EQ(spattn_pattern_to_mask(tree.pattern.get(), &extent, &loose), 0);
        bool is_same = true;
        for (size_t i = 0; i < truth.size(); ++i) is_same &= spaced[2 * i] == truth[i] && spaced[2 * i + 1] == 9;
        CHECK(is_same);
    }
}

TEST(csr_and_keeps_agree_with_the_mask) {
    for (uint32_t seed = 0; seed < 200; ++seed) {
        Source source(seed);
        const Tree tree = source.tree(2);
        Plane plane = source.plane();
        plane.batch = 0;
        check::context = describe(tree, plane, seed);
        const spattn_extent extent = extent_of(plane);
        int64_t nnz = -1;
        CHECK_EQ(spattn_pattern_to_csr(tree.pattern.get(), &extent, plane.head, nullptr, nullptr, &nnz), 0);
        std::vector<int64_t> row_ptr(size_t(plane.extent.seq_q) + 1);
        std::vector<int32_t> narrow(size_t(nnz) + 3, -7);
        std::vector<int64_t> columns(size_t(nnz) + 3, -7);
        const std::array<int64_t, 1> rows{plane.extent.seq_q + 1}, room{nnz + 3};
        const spattn_tensor r = tensor(row_ptr.data(), i64, rows), n = tensor(narrow.data(), i32, room),
                            c = tensor(columns.data(), i64, room);
        CHECK_EQ(spattn_pattern_to_csr(tree.pattern.get(), &extent, plane.head, &r, &n, &nnz), 0);
        CHECK_EQ(spattn_pattern_to_csr(tree.pattern.get(), &extent, plane.head, nullptr, &c, &nnz), 0);
        CHECK(std::equal(narrow.begin(), narrow.end(), columns.begin()) && columns[size_t(nnz)] == -7);
        CHECK_EQ(row_ptr.back(), nnz);
        bool is_same = true;
        for (int64_t q = 0; q < plane.extent.seq_q; ++q) {
            int64_t at = row_ptr[size_t(q)];
            for (int64_t k = 0; k < plane.extent.seq_k; ++k) {
                int32_t keeps = -1;
                spattn_pattern_keeps(tree.pattern.get(), &extent, plane.batch, plane.head, q, k, &keeps);
                const bool sees = tree.sees(plane, plane.position(q), k);
                is_same &= keeps == sees && (!sees || columns[size_t(at++)] == k);
            }
            is_same &= at == row_ptr[size_t(q) + 1];
        }
        CHECK(is_same);
    }
}

TEST(answers_that_do_not_fit) {
    const PatternRef causal = make_causal();
    const spattn_extent extent = extent_of({{1, 1, 4, 4, 0}});
    int32_t columns[10] = {-7, -7, -7, -7, -7, -7, -7, -7, -7, -7};
    int64_t nnz = 0;
    const std::array<int64_t, 1> nine{9}, ten{10};
    const spattn_tensor tight = tensor(columns, i32, ten);
    CHECK_EQ(spattn_pattern_to_csr(causal.get(), &extent, 0, nullptr, &tight, &nnz), 0);
    CHECK(nnz == 10 && columns[9] == 3);
    columns[0] = -7;

    const spattn_tensor small = tensor(columns, i32, nine);
    CHECK_EQ(spattn_pattern_to_csr(causal.get(), &extent, 0, nullptr, &small, &nnz), int(SPATTN_E_SHAPE));
    CHECK(nnz == 10 && columns[0] == -7);
    CHECK_EQ(spattn_pattern_to_csr(causal.get(), &extent, 1, nullptr, nullptr, &nnz), int(SPATTN_E_RANGE));
    CHECK_EQ(spattn_pattern_to_csr(causal.get(), &extent, 0, nullptr, nullptr, nullptr), int(SPATTN_E_NULL));
    int32_t keeps = 5;
    CHECK_EQ(spattn_pattern_keeps(causal.get(), &extent, 0, 0, 4, 0, &keeps), int(SPATTN_E_RANGE));
    CHECK_EQ(spattn_pattern_keeps(causal.get(), &extent, 0, 0, 0, int64_t(1) << 62, &keeps), int(SPATTN_E_RANGE));
    CHECK_EQ(keeps, 5);
    float image[25];
    for (const std::array<int64_t, 2>& shape : {std::array<int64_t, 2>{5, 4}, {4, 5}, {0, 4}}) {
        const spattn_tensor wrong = tensor(image, f32, shape);
        CHECK_EQ(spattn_pattern_to_image(causal.get(), &extent, 0, &wrong), int(SPATTN_E_SHAPE));
    }
    const std::array<int64_t, 2> whole{4, 4};
    const spattn_tensor exact = tensor(image, f32, whole);
    CHECK_EQ(spattn_pattern_to_image(causal.get(), &extent, 0, &exact), 0);
    CHECK(image[0] == 1 && image[1] == 0 && image[15] == 1);
}

TEST(texts_in_two_calls) {
    const PatternRef pattern = parse_pattern("causal & sink(4)");
    size_t needed = 0;
    CHECK_EQ(spattn_pattern_print(pattern.get(), nullptr, 0, &needed), 0);
    CHECK_EQ(needed, std::string("causal & sink(4)").size() + 1);
    std::string text(needed, '?');
    CHECK_EQ(spattn_pattern_print(pattern.get(), text.data(), needed - 1, &needed), int(SPATTN_E_RANGE));
    CHECK_EQ(spattn_pattern_print(pattern.get(), text.data(), needed, nullptr), 0);
    CHECK_EQ(std::string(text.c_str()), "causal & sink(4)");
    spattn_pattern* parsed = nullptr;
    CHECK_EQ(spattn_pattern_parse(text.c_str(), &parsed), 0);
    CHECK_EQ(spattn_pattern_equal(parsed, pattern.get()), 1);
    uint64_t a = 0, b = 1;
    CHECK_EQ(spattn_pattern_hash(parsed, &a), 0);
    CHECK_EQ(spattn_pattern_hash(pattern.get(), &b), 0);
    CHECK_EQ(a, b);
    spattn_pattern_release(parsed);
    CHECK_EQ(spattn_pattern_parse("causal &", &parsed), int(SPATTN_E_FORMAT));
    CHECK(parsed == nullptr);
    CHECK_EQ(spattn_pattern_equal(nullptr, nullptr), 1);
    CHECK_EQ(spattn_pattern_equal(nullptr, pattern.get()), 0);
}

TEST(grids_in_grids_take_no_time) {
    std::string text = "causal";
    for (int level = 1; level < 40; ++level) text = "grid([256]," + text + ')';  // twice the time for each would be days
    const PatternRef pattern = parse_pattern(text);
    const Plane plane{{1, 1, 256, 256, 0}};
    Key key;
    bool known = true;
    CHECK_EQ(pattern->classify(plane, {0, 16, 16, 16}, key, known).kind, Coverage::empty);
    CHECK_EQ(pattern->classify(plane, {16, 16, 0, 16}, key, known).kind, Coverage::full);
}
