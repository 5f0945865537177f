// SPDX-License-Identifier: MIT
// Counts of layouts whose queries are listed: however a token's pairs are divided among tiles, a row is a row.
#include "layout/dense.h"
#include "layout/random_patterns.h"
#include "layout/tables.h"

using namespace spattn;

namespace {

constexpr int cases = 400;

// Lists some queries once or twice, in any order; a few leave their home.
void list_queries(Random& random, Layout& layout) {
    const int64_t seq = layout.extent.seq_q;
    Axis& axis = layout.queries;
    axis.modulus = int32_t(random.in(1, 3));
    axis.residue_tiles = int32_t(((seq + axis.modulus - 1) / axis.modulus + layout.block_q - 1) / layout.block_q);
    axis.away.resize(size_t(axis.modulus * axis.residue_tiles) * words_for(layout.block_q));
    for (int64_t n = random.in(1, 2 * layout.block_q); n > 0; --n) {
        const int64_t token = random.in(0, seq - 1);
        axis.tokens.push_back(int32_t(token));
        const int64_t home = home_of(view(layout).queries, layout.block_q, token);
        if (random.one_in(3)) set_bits(&axis.away[size_t(home / layout.block_q) * words_for(layout.block_q)],
                                       home % layout.block_q, home % layout.block_q + 1);
    }
    while (axis.tokens.size() % size_t(layout.block_q)) axis.tokens.push_back(no_token);
}

// The places of each query where its pairs may be.
std::vector<std::vector<int64_t>> places_of(const Layout& layout) {
    const std::vector<int64_t> tokens = query_tokens(layout);
    const int32_t words = words_for(layout.block_q);
    std::vector<std::vector<int64_t>> places(size_t(layout.extent.seq_q));
    for (size_t place = 0; place < tokens.size(); ++place) {
        const int64_t home = int64_t(place) - int64_t(layout.queries.tokens.size()), bit = home % layout.block_q;
        const bool is_away =
            home >= 0 && layout.queries.away[size_t(home / layout.block_q * words + bit / 64)] >> (bit % 64) & 1;
        if (tokens[place] != no_token && !is_away) places[size_t(tokens[place])].push_back(int64_t(place));
    }
    return places;
}

// Lists of one kind of heads, block by block: the pairs of a query take turns among its places.
void fill_lists(const Dense& dense, Layout& layout, MaskTable& masks) {
    const std::vector<std::vector<int64_t>> places = places_of(layout);
    const int32_t columns = layout.by_key.rows;
    std::vector<uint64_t> bits(size_t(layout.by_query.rows) * columns * layout.mask_words);
    for (size_t query = 0; query < dense.size(); ++query)
        for (size_t key = 0; key < dense[query].size(); ++key) {
            if (!dense[query][key]) continue;
            const int64_t place = places[query][key % places[query].size()];
            const int64_t block = place / layout.block_q * columns + int64_t(key) / layout.block_k;
            const int64_t bit = place % layout.block_q * layout.block_k + int64_t(key) % layout.block_k;
            set_bits(&bits[size_t(block * layout.mask_words)], bit, bit + 1);
        }
    SliceTable slices(layout.by_query);
    for (int32_t row = 0; row < layout.by_query.rows; ++row) {
        for (int32_t column = 0; column < columns; ++column) {
            const int32_t mask = masks.intern(&bits[size_t(row * columns + column) * layout.mask_words]);
            if (mask != absent_block) slices.add({column, 1, mask});
        }
        layout.by_query.slices.push_back(slices.finish());
    }
}

}  // namespace

TEST(listed_queries_count_once) {
    int listed = 0;
    for (int seed = 0; seed < cases; ++seed) {
        Random random(uint64_t(seed) + 1);
        Case c;
        c.extent = random_extent(random);
        c.extent.batch = c.extent.heads = 1;
        c.pattern = random_pattern(random, c.extent);
        const int32_t block_q = 4 << random.in(0, 3), block_k = 4 << random.in(0, 3);
        const Layout plain = build_layout(*c.pattern, c.extent, block_q, block_k);
        Layout& layout = c.layout = plain;
        layout.by_query = {}, layout.masks = {}, layout.num_masks = 0;
        list_queries(random, layout);
        layout.by_query.rows =
            int32_t(layout.queries.tokens.size()) / block_q + layout.queries.modulus * layout.queries.residue_tiles;
        check::context = "seed " + std::to_string(seed) + ": " + describe(c);
        const Dense dense = dense_of_pattern(c, 0, 0);
        MaskTable masks(layout);
        fill_lists(dense, layout, masks);
        CHECK(dense_of_lists(layout, 0, false) == dense);  // what is counted here is the pattern
        const Counts got = count(layout), wanted = count(plain);
        CHECK_EQ(got.pairs, wanted.pairs);
        CHECK_EQ(got.row_min, wanted.row_min);
        CHECK_EQ(got.row_max, wanted.row_max);
        CHECK_EQ(got.rows_empty, wanted.rows_empty);
        listed += wanted.pairs > 0;
    }
    CHECK(listed > cases / 2);
}
