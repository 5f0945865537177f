// SPDX-License-Identifier: MIT
// Patterns drawn for all tests, each twice: made through the C ABI, and as a function written from the definitions
// alone, pair by pair. Choices come from a seed or from the bytes of a fuzzer.
#pragma once

#include <functional>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "sparseattn/sparseattn.h"

namespace drawn {

class Choices {
public:
    virtual ~Choices() = default;
    virtual int64_t number(int64_t low, int64_t high) = 0;
    virtual bool is_empty() const { return false; }  // nothing is left to choose from: draw no more than must be
};

class Random : public Choices {
public:
    explicit Random(uint64_t seed) : engine_(seed) {}
    int64_t in(int64_t low, int64_t high) { return low + int64_t(engine_() % uint64_t(high - low + 1)); }
    bool one_in(int64_t n) { return in(1, n) == 1; }
    int64_t number(int64_t low, int64_t high) override { return in(low, high); }

private:
    std::mt19937_64 engine_;  // the same numbers everywhere
};

struct Releaser {
    void operator()(spattn_pattern* p) const { spattn_pattern_release(p); }
};
using Pattern = std::unique_ptr<spattn_pattern, Releaser>;

struct Rectangle {
    int64_t batch, heads, seq_q, seq_k, q_offset;
};
struct Plane {
    Rectangle extent;
    int64_t batch, head;
};
using Sees = std::function<bool(const Plane&, int64_t p, int64_t k)>;

struct Model {
    Pattern pattern;
    Sees sees;
};

// [batch][heads][seq_q][seq_k], pair by pair.
std::vector<uint8_t> model_mask(const Sees& sees, const Rectangle& e);

// A host tensor: a list, or with two axes pairs.
struct Integers {
    explicit Integers(const std::vector<int64_t>& values, int32_t axes = 1);
    Integers(const Integers&) = delete;
    int64_t shape[2];
    spattn_tensor tensor{};
};

// Blocks that row i of bigbird draws, after those it sees anyway.
std::set<int64_t> random_blocks(int64_t i, int64_t blocks, int64_t window, int64_t global, int64_t random,
                                uint64_t seed);

// Numbers of patterns are small, so that boundaries of patterns, blocks and sequences meet: some ten where reach is 1,
// which is for sequences of some ten tokens, and as many times that as reach says.
class Builder {
public:
    // With lists (csr, bsr, mask, tree, xref) what is drawn stands on this extent alone; without, on all of its batch
    // and heads.
    Builder(Choices& choices, const Rectangle& extent, int64_t reach = 1, bool has_lists = true)
        : choices_(choices), extent_(extent), reach_(reach), has_lists_(has_lists) {}

    Model build(int depth);
    Model leaf();
    // Lists for this extent: of rows, not of positions.
    Model lists();
    Model per_document(int depth);
    Model rows(int depth);
    Model columns(int depth);

private:
    std::vector<int64_t> ranges(int64_t tokens, int64_t count);
    int64_t number(int64_t low, int64_t high) { return choices_.number(low, high); }

    // ---- leaves ----

    Model band(int64_t s);
    Model sink();
    // block_diagonal, or fixed.
    Model blocks(bool has_landmarks);
    Model documents();
    Model strided();
    Model landmark();
    Model residue();
    Model global(bool keys_only);
    Model bigbird();

    // ---- lists for this extent; rows, not positions ----

    Model bsr();
    Model csr(int64_t bq, int64_t bk);
    Model mask();
    Model tree();

    // Few different tokens and identifiers, so that they repeat. Rows are made when they are asked for, once.
    Model xref();

    // ---- compositions ----

    Model many(int depth, bool is_union);
    Model difference(int depth);
    Model transpose(int depth);
    Model choice(int depth, bool by_head);
    Model grid(int depth);
    // Documents of one size may have lists of their own.
    Model even_documents(int depth);
    static Model per_document(const Model& inner, const std::vector<int64_t>& cu_q, const std::vector<int64_t>& cu_k);

    static void add(Model model, std::vector<Pattern>& patterns, std::vector<Sees>& sees);
    static std::vector<const spattn_pattern*> views(const std::vector<Pattern>& patterns);
    std::vector<int64_t> cuts(int64_t limit);

    Choices& choices_;
    Rectangle extent_;
    int64_t reach_;
    bool has_lists_;
};

}  // namespace drawn
