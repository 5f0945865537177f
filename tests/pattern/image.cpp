// SPDX-License-Identifier: MIT
// Pictures of coverage against counting every pair.
#include "check.h"
#include "layout/image.h"
#include "pattern/trees.h"

using namespace spattn;
using namespace trees;

namespace {

std::vector<float> image_of(const Pattern& pattern, const Plane& plane, int64_t height, int64_t width) {
    std::vector<float> image(size_t(height * width), -1);
    int64_t told = 0;
    draw_image(pattern, plane, height, width, [&](int64_t y, int64_t x, int64_t cells, float share) {
        for (int64_t i = 0; i < cells; ++i) image[size_t(y * width + x + i)] = share;
        told += cells;
    });
    CHECK_EQ(told, height * width);
    return image;
}

float share_of(const Tree& tree, const Plane& plane, Interval rows, Interval keys) {
    double pairs = 0;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        for (int64_t k = keys.begin; k < keys.end; ++k) pairs += tree.sees(plane, plane.position(row), k);
    }
    return float(pairs / double((rows.end - rows.begin) * (keys.end - keys.begin)));
}

}  // namespace

TEST(cells_are_exact) {
    for (uint32_t seed = 0; seed < 600; ++seed) {
        Source source(seed);
        const Tree tree = source.number(0, 1) ? source.tree(2) : source.leaf();
        const Plane plane = source.plane();
        const int64_t seq_q = plane.extent.seq_q, seq_k = plane.extent.seq_k;
        const int64_t height = source.number(1, seq_q), width = source.number(1, seq_k);
        check::context = describe(tree, plane, seed) + " as " + std::to_string(height) + " x " + std::to_string(width);
        const std::vector<float> image = image_of(*tree.pattern, plane, height, width);
        bool is_same = true;
        for (int64_t y = 0; y < height; ++y) {
            for (int64_t x = 0; x < width; ++x) {
                const Interval rows{y * seq_q / height, (y + 1) * seq_q / height};
                const Interval keys{x * seq_k / width, (x + 1) * seq_k / width};
                is_same &= image[size_t(y * width + x)] == share_of(tree, plane, rows, keys);
            }
        }
        CHECK(is_same);
    }
}

// Large enough that cells are counted in halves.
TEST(large_cells_are_exact) {
    const Plane plane{{1, 1, 700, 900, 200}};
    for (const char* text : {"causal", "window(200,3)", "strided(7)", "logsparse", "bigbird(16,3,1,2,5)",
                             "documents(0,130,131,500,900)", "causal & (sink(9) | window(99,0)) - landmark(16,1)"}) {
        check::context = text;
        const PatternRef pattern = parse_pattern(text);
        const Tree tree{pattern, [&](const Plane& s, int64_t p, int64_t k) {
                            Intervals kept;
                            pattern->keys(s, p - s.extent.q_offset, {k, k + 1}, kept);
                            return !kept.empty();
                        }};
        const std::vector<float> image = image_of(*pattern, plane, 3, 4);
        for (int64_t y = 0; y < 3; ++y) {
            for (int64_t x = 0; x < 4; ++x) {
                const Interval rows{y * 700 / 3, (y + 1) * 700 / 3}, keys{x * 225, (x + 1) * 225};
                CHECK_EQ(image[size_t(y * 4 + x)], share_of(tree, plane, rows, keys));
            }
        }
    }
}

TEST(a_million_tokens) {
    const int64_t n = 1'000'000;
    const Plane plane{{1, 1, n, n, 0}};
    const std::vector<float> causal = image_of(*make_causal(), plane, 512, 512);
    double sum = 0;
    for (int64_t y = 0; y < 512; ++y) {
        for (int64_t x = 0; x < 512; ++x) {
            const double rows = double((y + 1) * n / 512 - y * n / 512), keys = double((x + 1) * n / 512 - x * n / 512);
            sum += double(causal[size_t(y * 512 + x)]) * rows * keys;
            CHECK(x > y ? causal[size_t(y * 512 + x)] == 0 : x < y ? causal[size_t(y * 512 + x)] == 1 : true);
        }
    }
    CHECK(std::abs(sum / (double(n) * double(n + 1) / 2) - 1) < 1e-6);
    for (const char* text : {"full", "window(4095,0)", "sink(64)", "bigbird(64,3,1,3,0)", "dilated(1008,0,16)",
                             "strided(100)", "logsparse", "global_tokens(5,77777)", "fixed(128,4)"}) {
        check::context = text;
        const std::vector<float> image = image_of(*parse_pattern(text), plane, 512, 512);
        float most = 0;
        for (float share : image) most = std::max(most, share);
        CHECK(most > 0 && most <= 1);
    }
}
