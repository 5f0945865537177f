// SPDX-License-Identifier: MIT
#include "plan/lower.h"

#include <algorithm>
#include <limits>

#include "core/cancel.h"
#include "core/text.h"
#include "layout/build.h"
#include "layout/finer.h"
#include "layout/orders/listed.h"
#include "layout/orders/residue.h"
#include "layout/orders/short_residue.h"
#include "plan/call_lists.h"
#include "plan/token_rows.h"

namespace spattn {

namespace {
constexpr double most_bytes = 512.0 * 1024 * 1024;  // of lists, for every layout but the first
constexpr int64_t most_tasks = int64_t(1) << 31;
constexpr int64_t shortest_residue = 8;  // tokens: shorter residue classes hardly fill a block

int64_t blocks(int64_t tokens, int32_t block) { return (tokens + block - 1) / block; }

int32_t find_modulus(const Pattern& pattern, const Extent& extent) {
    const int64_t modulus = pattern.modulus(), longest = std::min(extent.seq_q, extent.seq_k) / shortest_residue;
    return modulus > 1 && modulus <= longest && pattern.in_residue(modulus, 0) ? int32_t(modulus) : 1;
}

// Judges by one row of blocks in the middle.
bool has_stems(const Pattern& pattern, const Extent& extent, int32_t block_q) {
    Key numbers;
    return pattern.stem_key({extent}, extent.seq_q / 2 / block_q * block_q, block_q, numbers) > 0;
}

// The masks of a layout, and their cuts: see CutMasks.
std::vector<uint64_t> cut_masks(const Layout& layout, int joined) {
    const CutMasks masks{joined, layout.num_masks};
    const int64_t part = layout.block_k / joined, size = int64_t(layout.block_q) * layout.block_k;
    const size_t words = size_t(layout.mask_words);
    std::vector<uint64_t> all(size_t(masks.count()) * words);
    std::copy(layout.masks.begin(), layout.masks.end(), all.begin());
    for (int32_t mask = full_block; mask < layout.num_masks; ++mask) {
        const uint64_t* const from = mask == full_block ? nullptr : &layout.masks[size_t(mask) * words];
        for (int set = 1; set <= masks.sets(); ++set) {
            check_cancelled();
            uint64_t* const to = &all[size_t(masks.cut(mask, set)) * words];
            for (int64_t bit = 0; bit < size; ++bit) {
                const bool is_kept = !from || from[bit / 64] >> (bit % 64) & 1;
                if (is_kept && set >> (bit % layout.block_k / part) & 1) to[bit / 64] |= uint64_t(1) << (bit % 64);
            }
        }
    }
    return all;
}
}  // namespace

Lowering::Lowering(const Pattern& pattern, const Problem& p)
    : pattern_(pattern), extent_(pattern_extent(p)), is_on_cache_(p.has_starts),
      modulus_(find_modulus(pattern, extent_)), hot_(find_scattered(pattern, extent_, nominal_block)) {}

const Lowered& Lowering::at(const Form& form) {
    const Lowered* known = find(form);
    if (known && !known->outline) return *known;
    auto layout = std::make_shared<const Layout>(build(form));
    const Counts counts = known ? known->counts : count(*layout);
    all_.push_back({form, std::move(layout), counts});
    return all_.back();
}

const Lowered& Lowering::counted(const Form& form) {
    if (const Lowered* known = find(form)) return *known;
    return outline(form) ? all_.back() : at(form);
}

bool Lowering::outline(const Form& form) {
    if (!all_.empty() || form.order != Order::plain) return false;
    if (form.block_q != outlined_block || form.block_k != outlined_block) return false;
    pattern_.check(extent_);
    auto layout = std::make_shared<Layout>();
    layout->extent = extent_;
    auto outline = build_outline(pattern_, *layout);
    if (!outline) return false;
    const Counts counts = outline->counts;
    all_.push_back({form, std::move(layout), counts, std::move(outline)});
    return true;
}

std::shared_ptr<const TokenLists> Lowering::tokens() {
    const Lowered& some = all_.front();
    if (some.outline) return some.outline->tokens;
    if (!tokens_)
        tokens_ = std::make_shared<const TokenLists>(
            build_token_lists(pattern_, *some.layout, some.counts.pairs, std::numeric_limits<size_t>::max()).value());
    return tokens_;
}

// The layout of this form if it was made, else its outline if there is one.
const Lowered* Lowering::find(const Form& form) const {
    const Lowered* outlined = nullptr;
    for (const Lowered& lowered : all_) {
        const Form& f = lowered.form;
        const bool is_same = f.block_q == form.block_q && f.block_k == form.block_k && f.order == form.order;
        if (!is_same || (form.order == Order::listed && f.owner != form.owner)) continue;
        if (!lowered.outline) return &lowered;
        outlined = &lowered;
    }
    return outlined;
}

// Tiles of several residue classes are not cut: smaller ones have other classes side by side.
const Lowered* Lowering::coarser(const Form& form) const {
    constexpr int32_t longest_part = 64;  // keys: cut_layout() and make_finer_stats() take a word of bits at a time
    const Lowered* outlined = nullptr;
    for (const Lowered& lowered : all_) {
        const Form& f = lowered.form;
        const bool is_larger = f.block_q % form.block_q == 0 && f.block_k % form.block_k == 0 &&
                               (f.block_q > form.block_q || f.block_k > form.block_k);
        if (!is_larger || f.order != form.order || f.order == Order::listed || form.block_k > longest_part) continue;
        if (f.order == Order::residue && find_classes_of_tile(extent_, modulus_, f.block_q, f.block_k)) continue;
        if (!lowered.outline) return &lowered;
        if (form.block_q == outlined_part && form.block_k == outlined_part) outlined = &lowered;
    }
    return outlined;
}

const Lowered* Lowering::packed(const Form& form) const {
    for (const Lowered& lowered : all_) {
        const Form& f = lowered.form;
        if (f.order == Order::packed && f.block_q % form.block_q == 0 && f.block_k % form.block_k == 0) return &lowered;
    }
    return nullptr;
}

Layout Lowering::build(const Form& form) {
    switch (form.order) {
        case Order::residue: return build_residue(form);
        case Order::packed: return build_packed_layout(hot_.value(), extent_, form.block_q, form.block_k);
        case Order::listed:
            return list_tiles(*at({form.block_q, form.block_k, Order::plain, form.owner}).layout, form.owner);
        default: return build_plain(form);
    }
}

Layout Lowering::build_residue(const Form& form) {
    const int32_t block_q = form.block_q, block_k = form.block_k;
    const auto classes = find_classes_of_tile(extent_, modulus_, block_q, block_k);
    return classes ? build_short_residue_layout(pattern_, extent_, modulus_, *classes, block_q, block_k).value()
                   : build_residue_layout(pattern_, extent_, modulus_, block_q, block_k).value();
}

// Calls on a cache have forward passes only, and make layouts of their own of the lists by query: nobody reads those by
// key, nor which tokens are alive. Where rows share stems, lists that are cut from coarser ones would be far longer. And
// coarser ones with stems cannot be cut at all: of each row only its own runs would be, and those of its stem be lost. Some
// rows may have one where the row in the middle has none.
Layout Lowering::build_plain(const Form& form) {
    const Lowered* coarse = coarser(form);
    if (coarse && coarse->outline) coarse = &at(coarse->form);
    if (!is_on_cache_)
        return coarse ? cut_layout(*coarse->layout, form.block_q, form.block_k)
                      : build_layout(pattern_, extent_, form.block_q, form.block_k);
    return coarse && coarse->layout->by_query.stems.empty() && !has_stems(pattern_, extent_, form.block_q)
               ? cut_query_lists(*coarse->layout, form.block_q, form.block_k)
               : build_stem_lists(pattern_, extent_, form.block_q, form.block_k);
}

std::string Lowering::refuse(const Form& form) const {
    const int64_t rows = std::max(blocks(extent_.seq_q, form.block_q), blocks(extent_.seq_k, form.block_k));
    if (rows >= most_tasks / (extent_.batch * extent_.heads)) return "2^31 tasks or more";
    const auto is_plain = [](const Lowered& lowered) { return lowered.form.order == Order::plain; };
    const auto known = std::find_if(all_.begin(), all_.end(), is_plain);
    if (form.order != Order::plain || known == all_.end()) return "";
    // At worst, lists grow with the number of blocks. Smaller blocks are refused where that would be too much: they
    // seldom win, and only making them would tell their true size.
    const double area = double(known->form.block_q) * known->form.block_k;
    const double growth = area / (double(form.block_q) * form.block_k);
    const double expected = growth * double(known->bytes());
    if (growth <= 1 || expected <= most_bytes) return "";
    return text("lists of up to ", int64_t(expected / (1024 * 1024)), " MiB expected");
}

std::shared_ptr<const std::vector<uint64_t>> Lowering::masks(const Lowered& lowered, const Kernel& kernel,
                                                             int joined) {
    const Layout& layout = *lowered.layout;
    const bool is_cut = joined > 1;
    if (!kernel.permute && !is_cut) return {lowered.layout, &layout.masks};
    for (const Ordered& ordered : ordered_)
        if (ordered.layout == &layout && ordered.permute == kernel.permute && ordered.joined == joined)
            return ordered.masks;
    auto cut = std::make_shared<std::vector<uint64_t>>(is_cut ? cut_masks(layout, joined) : std::vector<uint64_t>());
    std::shared_ptr<const std::vector<uint64_t>> masks = cut;
    if (kernel.permute) {
        const std::vector<uint64_t>& bits = is_cut ? *cut : layout.masks;
        const size_t words = size_t(layout.mask_words), count = bits.size() / words;
        auto permuted = std::make_shared<std::vector<uint64_t>>(count * size_t(kernel.mask_words));
        for (size_t mask = 0; mask < count; ++mask) {
            check_cancelled();
            kernel.permute(&bits[mask * words], layout.block_q, layout.block_k,
                           &(*permuted)[mask * size_t(kernel.mask_words)]);
        }
        masks = permuted;
    }
    ordered_.push_back({&layout, kernel.permute, joined, masks});
    return masks;
}

}  // namespace spattn
