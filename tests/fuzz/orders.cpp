// SPDX-License-Identifier: MIT
// Bytes as a composition of patterns and an extent, compiled in every order of the tokens: each layout says the pairs
// of the definitions, each of them once, and each token has one writer.
#include "fuzz/fuzz.h"
#include "layout/finer.h"
#include "layout/orders/listed.h"
#include "layout/orders/packed.h"
#include "layout/pairs.h"
#include "layout/orders/residue.h"
#include "layout/orders/short_residue.h"

using namespace fuzz;
using drawn::Builder, drawn::Model, drawn::Rectangle;
using spattn::Layout;

namespace {

struct Scene {
    Rectangle rectangle;
    std::vector<uint8_t> mask;
    std::string text;
};

// The rows of one plane of the mask.
spattn::Dense dense_of(const Scene& scene, size_t plane) {
    const Rectangle& e = scene.rectangle;
    auto at = scene.mask.begin() + int64_t(plane) * e.seq_q * e.seq_k;
    spattn::Dense dense;
    for (int64_t q = 0; q < e.seq_q; ++q, at += e.seq_k) dense.emplace_back(at, at + e.seq_k);
    return dense;
}

void check_pairs(const Layout& layout, const Scene& scene, const std::string& order) {
    for (size_t plane = 0; plane < layout.kind_of_head.size(); ++plane) {
        const spattn::Dense wanted = dense_of(scene, plane);
        for (bool by_key : {false, true}) {
            const spattn::Said said = read_lists(layout, layout.kind_of_head[plane], by_key);
            demand(said.is_inside, "pairs of tokens that exist", order + " of " + scene.text);
            demand(said.is_once, "each pair once", order + " of " + scene.text);
            demand(said.pairs == wanted, by_key ? "pairs by key" : "pairs by query", order + " of " + scene.text);
        }
    }
    const double pairs = double(std::count(scene.mask.begin(), scene.mask.end(), 1));
    demand(count(layout).pairs == pairs, "pairs are counted", order + " of " + scene.text);
}

void check_writers(const Layout& layout, bool of_keys, const Scene& scene, const std::string& order) {
    const spattn::LayoutView v = view(layout);
    const std::vector<int> writers = of_keys ? count_writers(v.keys, v.block_k, v.seq_k, v.by_key.rows)
                                             : count_writers(v.queries, v.block_q, v.seq_q, v.by_query.rows);
    demand(writers == std::vector<int>(writers.size(), 1), "one writer a token", order + " of " + scene.text);
}

void check_all(const Layout& layout, const Scene& scene, const std::string& order) {
    check_pairs(layout, scene, order);
    check_writers(layout, false, scene, order);
    check_writers(layout, true, scene, order);
}

// Pieces, each in residue classes where it keeps to them: together they say each pair once, and count as the whole.
void check_pieces(const spattn::Pattern& pattern, const Layout& whole, const Scene& scene) {
    std::vector<Layout> layouts;
    for (const spattn::PatternRef& piece : pattern.pieces()) {
        const auto modulus = int32_t(std::clamp<int64_t>(piece->modulus(), 1, 1000));  // 0: of nothing, any
        auto residue = modulus <= std::max(whole.extent.seq_q, whole.extent.seq_k)
                           ? build_residue_layout(*piece, whole.extent, modulus, whole.block_q, whole.block_k)
                           : std::nullopt;
        layouts.push_back(residue ? std::move(*residue)
                                  : build_layout(*piece, whole.extent, whole.block_q, whole.block_k));
    }
    std::vector<const Layout*> pieces;
    for (const Layout& layout : layouts) pieces.push_back(&layout);
    for (size_t plane = 0; plane < whole.kind_of_head.size(); ++plane) {
        spattn::Dense left = dense_of(scene, plane);
        for (const Layout* piece : pieces) {
            const spattn::Dense said = read_lists(*piece, piece->kind_of_head[plane], false).pairs;
            for (size_t q = 0; q < left.size(); ++q)
                for (size_t k = 0; k < left[q].size(); ++k) {
                    if (!said[q][k]) continue;
                    demand(left[q][k], "each pair in one piece", scene.text);
                    left[q][k] = false;
                }
        }
        const auto keeps = [](const std::vector<bool>& row) { return std::count(row.begin(), row.end(), true) > 0; };
        demand(std::none_of(left.begin(), left.end(), keeps), "every pair in a piece", scene.text);
    }
    const spattn::Counts got = count(pieces), wanted = count(whole);
    demand(got.pairs == wanted.pairs && got.row_min == wanted.row_min && got.row_max == wanted.row_max &&
               got.rows_empty == wanted.rows_empty,
           "counts of pieces", scene.text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size) {
    Bytes bytes(input, std::min<size_t>(size, 512));
    Rectangle e{bytes.number(1, 2), bytes.number(1, 2), bytes.number(1, 70), bytes.number(1, 70), 0};
    e.q_offset = bytes.number(0, 2) ? e.seq_k - e.seq_q : bytes.number(-30, 30);
    const int32_t block_q = int32_t(4 * bytes.number(1, 6)), block_k = int32_t(4 * bytes.number(1, 6));
    const auto modulus = int32_t(bytes.number(1, 17));
    const Model model = Builder(bytes, e).build(4);
    const Scene scene{e, model_mask(model.sees, e),
                      print(model.pattern.get()) + " on " + std::to_string(e.seq_q) + " x " + std::to_string(e.seq_k) +
                          " offset " + std::to_string(e.q_offset) + " blocks " + std::to_string(block_q) + " x " +
                          std::to_string(block_k)};
    const spattn::Extent extent{e.batch, e.heads, e.seq_q, e.seq_k, e.q_offset};
    const Layout plain = build_layout(*model.pattern, extent, block_q, block_k);
    check_all(plain, scene, "plain blocks");
    check_all(cut_layout(plain, block_q / 2, block_k / 4), scene, "blocks cut from plain ones");
    check_pieces(*model.pattern, plain, scene);
    if (modulus <= std::max(e.seq_q, e.seq_k)) {
        if (const auto residue = build_residue_layout(*model.pattern, extent, modulus, block_q, block_k))
            check_all(*residue, scene, std::to_string(modulus) + " residue classes");
        const auto classes = spattn::find_classes_of_tile(extent, modulus, block_q, block_k);
        const auto shared =
            classes ? build_short_residue_layout(*model.pattern, extent, modulus, *classes, block_q, block_k) : std::nullopt;
        if (shared) check_all(*shared, scene, std::to_string(modulus) + " residue classes, several a tile");
    }
    if (const auto hot = model.pattern->hot(extent))
        check_all(build_packed_layout(*hot, extent, block_q, block_k), scene, "packed tokens");
    for (spattn::Owner owner : {spattn::Owner::queries, spattn::Owner::keys}) {
        const Layout listed = list_tiles(plain, owner);
        const bool of_keys = owner == spattn::Owner::keys;
        check_pairs(listed, scene, of_keys ? "listed queries" : "listed keys");
        check_writers(listed, of_keys, scene, of_keys ? "listed queries" : "listed keys");
    }
    return 0;
}
