// SPDX-License-Identifier: MIT
// A union of patterns that are dense in different orders of the tokens is dense in none. Sparse Transformer's strided
// attention, causal & (window(s,0) | strided(s)), is the plain band causal & window(s,0) and, in residue classes mod s,
// causal & (strided(s) - window(s,0)):
//
//     A | B | C       moduli 1, 1, m      ->  A | B,  C - (A | B)
//     X & (A | C)                         ->  X & A,  X & (C - A)
//     (A | C) - X                         ->  A - X,  C - A - X
//
// Heads, or batch entries, that keep to residue classes of different moduli are dense in no order together. LongNet's
// heads, each with an offset of its own, are in three, and Longformer's, of which some have dilated windows, in two:
//
//     per_head([0,1], A | C, B | D)       moduli 1, m  ->  per_head([0,1], A, B),  per_head([0,1], C - A, D - B)
//     per_head([0,1], A, C)                            ->  per_head([0,1], A, nothing),  per_head([0,1], nothing, C)
#include "pattern/pieces.h"

#include <algorithm>
#include <map>

namespace spattn {
namespace {

// Each piece repeats those before it, so nested compositions could grow without end: such large ones stay whole.
constexpr size_t most_pieces = 4;
constexpr int64_t most_piece_nodes = 2048;  // 128 heads, each with a pattern of LongNet's
constexpr int32_t most_piece_levels = 64;

bool is_small(const Patterns& parts) {
    int64_t nodes = 0;
    for (const PatternRef& part : parts) nodes += part->nodes;
    const auto is_deep = [](const PatternRef& part) { return part->levels > most_piece_levels; };
    return nodes <= most_piece_nodes && std::none_of(parts.begin(), parts.end(), is_deep);
}

// 1 where residue classes are no help.
int64_t residue_modulus(const Pattern& pattern) {
    const int64_t modulus = pattern.modulus();
    return modulus > 1 && pattern.in_residue(modulus, 0) ? modulus : 1;
}

}  // namespace

Patterns pieces_of_union(const Patterns& parts) {
    if (!is_small(parts)) return {};
    Patterns members;
    for (const PatternRef& part : parts)
        for (PatternRef& piece : part->pieces()) members.push_back(std::move(piece));
    std::map<int64_t, Patterns> groups;  // plain blocks first
    for (const PatternRef& member : members) groups[residue_modulus(*member)].push_back(member);
    if (groups.size() < 2 || groups.size() > most_pieces || !is_small(members)) return {};
    Patterns wholes, pieces;
    for (auto& [modulus, group] : groups) {
        wholes.push_back(make_union(std::move(group)));
        PatternRef piece = wholes.back();
        for (size_t before = 0; before + 1 < wholes.size(); ++before) piece = make_difference(piece, wholes[before]);
        if (residue_modulus(*piece) != modulus) return {};  // what is taken away has no form in residue classes
        pieces.push_back(std::move(piece));
    }
    return pieces;
}

// Where several factors could be cut, the first one is; each piece keeps the others as they are.
Patterns pieces_of_intersection(const Patterns& parts) {
    if (!is_small(parts)) return {};
    for (size_t i = 0; i < parts.size(); ++i) {
        Patterns pieces = parts[i]->pieces();
        if (pieces.size() < 2) continue;
        for (PatternRef& piece : pieces) {
            Patterns factors = parts;
            factors[i] = piece;
            piece = make_intersection(std::move(factors));
        }
        return pieces;
    }
    return {};
}

Patterns pieces_of_difference(const Patterns& parts) {
    if (!is_small(parts)) return {};
    Patterns pieces = parts[0]->pieces();
    if (pieces.size() < 2) return {};
    for (PatternRef& piece : pieces)
        for (size_t i = 1; i < parts.size(); ++i) piece = make_difference(piece, parts[i]);
    return pieces;
}

std::vector<Patterns> pieces_of_choice(const Patterns& parts) {
    if (!is_small(parts)) return {};
    std::map<int64_t, std::vector<Patterns>> groups;  // of each modulus, the pieces of each part
    for (size_t i = 0; i < parts.size(); ++i)
        for (PatternRef& piece : parts[i]->pieces()) {
            std::vector<Patterns>& group = groups[residue_modulus(*piece)];
            group.resize(parts.size());
            group[i].push_back(std::move(piece));
        }
    if (groups.size() < 2 || groups.size() > most_pieces) return {};
    std::vector<Patterns> pieces;
    for (auto& [modulus, group] : groups) {
        Patterns& piece = pieces.emplace_back();
        for (Patterns& of_part : group)
            piece.push_back(of_part.empty() ? make_nothing() : make_union(std::move(of_part)));
        if (!is_small(piece)) return {};
    }
    return pieces;
}

}  // namespace spattn
