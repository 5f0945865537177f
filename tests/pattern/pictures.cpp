// SPDX-License-Identifier: MIT
// What masks must look like, for people to read: x is a kept pair, rows are queries.
#include <algorithm>

#include "check.h"
#include "pattern/pattern.h"
#include "plan/token_rows.h"

using namespace spattn;

namespace {

std::string draw(const PatternRef& pattern, Plane plane) {
    pattern->check(plane.extent);
    std::string picture = "\n";
    for (int64_t row = 0; row < plane.extent.seq_q; ++row) {
        std::string line(size_t(plane.extent.seq_k), '.');
        Intervals kept;
        pattern->keys(plane, row, {0, plane.extent.seq_k}, kept);
        for (const Interval& i : kept) std::fill(line.begin() + i.begin, line.begin() + i.end, 'x');
        picture += line + '\n';
    }
    return picture;
}

std::string draw(const std::string& text, Plane plane) { return draw(parse_pattern(text), plane); }

// Queries align to the end of the keys, as they do unless an offset is given.
std::string draw(const std::string& text, int64_t seq_q, int64_t seq_k) {
    return draw(text, Plane{{1, 1, seq_q, seq_k, seq_k - seq_q}});
}

// Lists that a call brings, one a row of the lists: how often each query sees each key.
std::string draw_lists(const std::string& text, int64_t seq_q, int64_t seq_k, std::vector<int64_t> indices,
                       std::vector<int64_t> counts = {}) {
    const PatternRef pattern = parse_pattern(text), known = pattern->known_part();
    Problem problem{};
    problem.batch = problem.heads_q = problem.heads_kv = 1;
    problem.seq_q = seq_q, problem.seq_k = seq_k, problem.q_offset = seq_k - seq_q;
    const RuntimeShape* shape = pattern->runtime();
    problem.call_lists = {shape->block_q, shape->block_k, shape->most};
    CallLists lists{};
    lists.indices = {indices.data(), 0, shape->most, 0, 1, true};
    if (!counts.empty()) lists.counts = {counts.data(), 0, 1, 0, 0, true};
    std::string picture = "\n";
    for (int64_t row = 0; row < seq_q; ++row) {
        std::string line(size_t(seq_k), '.');
        std::vector<int64_t> keys;
        CallListRows(known.get(), problem, lists).keys(0, 0, row, keys);
        for (size_t n = 0; n < keys.size(); n += 2)
            for (int64_t key = keys[n]; key < keys[n + 1]; ++key)
                line[size_t(key)] = line[size_t(key)] == '.' ? '1' : char(line[size_t(key)] + 1);
        picture += line + '\n';
    }
    return picture;
}

}  // namespace

TEST(bands) {
    CHECK_EQ(draw("full", 2, 4), R"(
xxxx
xxxx
)");
    CHECK_EQ(draw("causal", 4, 4), R"(
x...
xx..
xxx.
xxxx
)");
    CHECK_EQ(draw("causal", 2, 5), R"(
xxxx.
xxxxx
)");
    CHECK_EQ(draw("causal", 5, 2), R"(
..
..
..
x.
xx
)");
    CHECK_EQ(draw("window(2,0)", 6, 6), R"(
x.....
xx....
xxx...
.xxx..
..xxx.
...xxx
)");
    CHECK_EQ(draw("window(1,2)", 5, 5), R"(
xxx..
xxxx.
.xxxx
..xxx
...xx
)");
    CHECK_EQ(draw("window(-1,1)", 3, 4), R"(
xxx.
xxxx
xxxx
)");
    CHECK_EQ(draw("window(0,-1)", 3, 4), R"(
.xxx
..xx
...x
)");
    CHECK_EQ(draw("dilated(4,2,2)", 6, 6), R"(
x.x...
.x.x..
x.x.x.
.x.x.x
x.x.x.
.x.x.x
)");
    CHECK_EQ(draw("strided(3)", 4, 7), R"(
x..x..x
.x..x..
..x..x.
x..x..x
)");
    CHECK_EQ(draw("logsparse", 3, 10), R"(
...x.xxx..
x...x.xxx.
.x...x.xxx
)");
}

TEST(blocks) {
    CHECK_EQ(draw("block_diagonal(2)", 5, 5), R"(
xx...
xx...
..xx.
..xx.
....x
)");
    CHECK_EQ(draw("documents(1,3,3,4)", 5, 5), R"(
.....
.xx..
.xx..
...x.
.....
)");
    CHECK_EQ(draw("landmark(3,1)", 1, 8), R"(
..x..x..
)");
    CHECK_EQ(draw("fixed(3,1)", 4, 7), R"(
..xxxx.
..xxxx.
..xxxx.
..x..xx
)");
    CHECK_EQ(draw("residue(3,1)", 5, 5), R"(
.....
.x..x
.....
.....
.x..x
)");
    CHECK_EQ(draw("bigbird(2,1,1,0,0)", 6, 6), R"(
xxxxxx
xxxxxx
xxxx..
xxxx..
xx..xx
xx..xx
)");
    CHECK_EQ(draw("bigbird(1,1,0,2,7)", 6, 6), R"(
x..xx.
xx.x..
x.xx..
x..xx.
x..xx.
...xxx
)");
}

TEST(tokens) {
    CHECK_EQ(draw("sink(2)", 2, 4), R"(
xx..
xx..
)");
    CHECK_EQ(draw("global_keys(3,0,3)", 2, 5), R"(
x..x.
x..x.
)");
    CHECK_EQ(draw("global_tokens(1)", 4, 4), R"(
.x..
xxxx
.x..
.x..
)");
    CHECK_EQ(draw("tree(-1,0,0,1,-1)", 5, 7), R"(
xxx....
xxxx...
xxx.x..
xxxx.x.
xx....x
)");
    CHECK_EQ(draw("tree(2,0,-1)", 2, 4), R"(
xxxx
x..x
)");
    CHECK_EQ(draw("transpose(tree(-1,0,0))", 3, 3), R"(
xxx
.x.
..x
)");
}

// In the first text, tokens 7 and 8 repeat 0 and 1, so token 8 sees what followed. In the second, token 8 ends with the
// identifier that token 2 ended with, and token 9 completes it.
TEST(cross_references) {
    CHECK_EQ(draw("xref([1,2,3,4,5,6,7,1,2,8,9,10],[],1,2,6,3,2,0,0,0,0)", 12, 12), R"(
x...........
xx..........
xxx.........
xxxx........
xxxxx.......
xxxxxx......
x.xxxxx.....
x..xxxxx....
xxx...xxx...
x....xxxxx..
x.....xxxxx.
x......xxxxx
)");
    CHECK_EQ(draw("xref([1,2,3,4,5,6,7,8,9,10,11,12],[-1,-1,-1,-1,7,-1,-1,7,-1,-1,-1,-1,-1,-1,-1,-1,7,-1,-1,7,-1,-1,"
                  "-1,-1],1,2,6,3,0,1,1,2,0)", 12, 12), R"(
x...........
xx..........
xxx.........
xxxx........
xxxxx.......
xxxxxx......
x.xxxxx.....
x..xxxxx....
xxxx...xx...
xxxx....xx..
xx.....xxxx.
x......xxxxx
)");
}

// Rows of lists are rows, not positions: no offset moves them.
TEST(lists_of_a_pattern) {
    CHECK_EQ(draw("csr([0,2,2,3],[0,4,1],5)", 3, 5), R"(
x...x
.....
.x...
)");
    CHECK_EQ(draw("bsr([0,1,3],[1,0,2],2,2,4,6)", 4, 6), R"(
..xx..
..xx..
xx..xx
xx..xx
)");
    CHECK_EQ(draw("bsr([0,1,2],[1,0],2,3,3,5)", 3, 5), R"(
...xx
...xx
xxx..
)");
    CHECK_EQ(draw("mask([1,0,0,1,1,1],2,3)", 2, 3), R"(
x..
xxx
)");
    CHECK_EQ(draw("csr([0,1,2],[0,2],3)", Plane{{1, 1, 2, 3, 77}}), R"(
x..
..x
)");
    const auto sum_is_even = [](void*, int64_t head, int64_t q, int64_t k) { return int32_t((head + q + k) % 2 == 0); };
    Plane second{{1, 2, 3, 4, 1}};
    second.head = 1;
    CHECK_EQ(draw(make_predicate(sum_is_even, nullptr, 2, 3, 4), second), R"(
.x.x
x.x.
.x.x
)");
}

// Each document aligns to its own end; the second has no key, the third no query.
TEST(packed_documents) {
    CHECK_EQ(draw("per_document([0,2,3,3,6],[0,3,3,4,6],causal)", 6, 6), R"(
xx....
xxx...
......
......
....x.
....xx
)");
    CHECK_EQ(draw("per_document([0,3,5],[0,3,7],sink(1) | window(0,0))", 5, 7), R"(
x......
xx.....
x.x....
...x.x.
...x..x
)");
}

// The first two queries and the last two, of six that align to the end of eight keys; a row twice, and none between.
TEST(rows_of_a_longer_extent) {
    const char* dealt = R"(
xxx.....
xxxx....
xxxxxxx.
xxxxxxxx
)";
    CHECK_EQ(draw("rows([0,2,4,6],6,causal)", 4, 8), dealt);
    CHECK_EQ(draw("rows([0,2,4,6],6,causal)", Plane{{1, 1, 4, 8, -40}}), dealt);
    CHECK_EQ(draw("rows([2,3,0,1,2,3],3,csr([0,1,2,4],[0,1,0,2],3))", 3, 3), R"(
x.x
x..
x.x
)");
    CHECK_EQ(draw("rows([0,2],3,transpose(window(1,0)))", 2, 3), R"(
xx.
.xx
)");
}

// The first two keys and the last three, of eight whose end the queries are as far from as from these; a key twice.
TEST(columns_of_a_longer_extent) {
    const char* thinned = R"(
xxx..
xxxx.
xxxxx
)";
    CHECK_EQ(draw("columns([0,2,5,8],8,causal)", 3, 5), thinned);
    CHECK_EQ(draw("columns([0,2,5,8],8,causal & window(2,0))", Plane{{1, 1, 3, 5, 1}}), R"(
.....
..x..
..xx.
)");
    CHECK_EQ(draw("columns([2,3,0,1,2,3],3,csr([0,1,2,4],[0,1,0,2],3))", 3, 3), R"(
.x.
...
xxx
)");
}

TEST(lists_of_a_call) {
    CHECK_EQ(draw_lists("runtime_tokens(3)", 3, 5, {4, 0, 0, -1, 5, 2, 3, 1, 3}), R"(
2...1
..1..
.1.2.
)");
    CHECK_EQ(draw_lists("runtime_tokens(3)", 3, 5, {4, 0, 0, -1, 5, 2, 3, 1, 3}, {1, 0, 9}), R"(
....1
.....
.1.2.
)");
    CHECK_EQ(draw_lists("runtime_tokens(2) & causal", 3, 3, {0, 2, 1, 1, 2, 0}), R"(
1..
.2.
1.1
)");
    CHECK_EQ(draw_lists("runtime_blocks(2,3,2)", 3, 5, {1, -7, 0, 0}), R"(
...11
...11
222..
)");
    CHECK_EQ(draw_lists("runtime_blocks(2,3,2) & (sink(1) | window(1,0))", 4, 5, {1, 0, 0, 2}), R"(
11...
111..
1.1..
1....
)");
    CHECK_EQ(draw_lists("rows([0,1,2,3],3,runtime_tokens(3) & causal)", 2, 3, {2, 0, 0, 2, 1, 1}), R"(
2..
.21
)");
}

TEST(composition) {
    CHECK_EQ(draw("causal & (sink(1) | window(1,0))", 5, 5), R"(
x....
xx...
xxx..
x.xx.
x..xx
)");
    CHECK_EQ(draw("causal & (window(2,0) | strided(2))", 5, 5), R"(
x....
xx...
xxx..
.xxx.
x.xxx
)");
    CHECK_EQ(draw("causal - global_keys(1) - sink(1)", 4, 4), R"(
....
....
..x.
..xx
)");
    CHECK_EQ(draw("full - (causal - sink(2))", 3, 4), R"(
xxxx
xx.x
xx..
)");
    CHECK_EQ(draw("transpose(sink(1))", 3, 3), R"(
xxx
...
...
)");
    CHECK_EQ(draw("transpose(causal & block_diagonal(2))", 4, 4), R"(
xx..
.x..
..xx
...x
)");
    CHECK_EQ(draw("transpose(logsparse)", 4, 4), R"(
xxx.
.xxx
..xx
...x
)");
}

TEST(grids) {
    CHECK_EQ(draw("grid([2,3], window(0,0), full)", 6, 6), R"(
xxx...
xxx...
xxx...
...xxx
...xxx
...xxx
)");
    CHECK_EQ(draw("grid([3,3], window(1,1), window(1,0))", 9, 9), R"(
x..x.....
xx.xx....
.xx.xx...
x..x..x..
xx.xx.xx.
.xx.xx.xx
...x..x..
...xx.xx.
....xx.xx
)");
    // Tiles of 2 x 2, one after the other: what lies in a row of the image is 0 1 4 5, 2 3 6 7.
    CHECK_EQ(draw("grid([2,4], [2,2], window(0,0), causal)", 8, 8), R"(
x.......
xx......
..x.....
..xx....
xx..x...
xx..xx..
..xx..x.
..xx..xx
)");
    // Tokens that are none of the grid's.
    CHECK_EQ(draw("grid([3], full)", Plane{{1, 1, 5, 4, -1}}), "\n....\nxxx.\nxxx.\nxxx.\n....\n");
}

TEST(planes) {
    Plane plane{{2, 2, 2, 2, 0}};
    plane.head = 1;
    CHECK_EQ(draw("per_head([1,0], causal, full)", plane), "\nx.\nxx\n");
    plane.head = 0;
    CHECK_EQ(draw("per_head([1,0], causal, full)", plane), "\nxx\nxx\n");
    plane.batch = 1;
    CHECK_EQ(draw("causal & per_batch([0,1], full, sink(1))", plane), "\nx.\nx.\n");
}

TEST(offsets) {
    const Plane before{{1, 1, 4, 4, -2}}, beyond{{1, 1, 2, 4, 5}};
    CHECK_EQ(draw("causal", before), "\n....\n....\nx...\nxx..\n");
    CHECK_EQ(draw("block_diagonal(2)", before), "\n....\n....\nxx..\nxx..\n");
    CHECK_EQ(draw("strided(3)", before), "\n.x..\n..x.\nx..x\n.x..\n");
    CHECK_EQ(draw("bigbird(2,3,0,0,0)", before), "\n....\n....\nxxxx\nxxxx\n");
    CHECK_EQ(draw("transpose(sink(2))", before), "\nxxxx\nxxxx\nxxxx\nxxxx\n");
    CHECK_EQ(draw("transpose(window(1,0))", before), "\n....\nx...\nxx..\n.xx.\n");
    CHECK_EQ(draw("window(2,0)", beyond), "\n...x\n....\n");
    CHECK_EQ(draw("causal", beyond), "\nxxxx\nxxxx\n");
}
