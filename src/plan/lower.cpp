// SPDX-License-Identifier: MIT
#include "plan/lower.h"

#include <cmath>

#include "core/text.h"

namespace spattn {

namespace {
constexpr double most_bytes = 512.0 * 1024 * 1024;  // of lists beyond the first lowering
constexpr int64_t most_tasks = int64_t(1) << 31;

int64_t blocks(int64_t tokens, int32_t block) { return (tokens + block - 1) / block; }
}  // namespace

Lowering::Lowering(const Pattern& pattern, const Problem& p)
    : pattern_(pattern), extent_{p.batch, p.heads_q, p.seq_q, p.seq_k, p.q_offset} {}

const Lowered& Lowering::at(int32_t block_q, int32_t block_k) {
    for (const Lowered& lowered : all_)
        if (lowered.layout->block_q == block_q && lowered.layout->block_k == block_k) return lowered;
    auto layout = std::make_shared<const Layout>(build_layout(pattern_, extent_, block_q, block_k));
    const Counts counts = count(*layout);
    all_.push_back({std::move(layout), counts});
    return all_.back();
}

std::shared_ptr<const TokenLists> Lowering::tokens() {
    if (!tokens_) tokens_ = std::make_shared<const TokenLists>(build_token_lists(pattern_, *all_.front().layout));
    return tokens_;
}

std::string Lowering::refuse(int32_t block_q, int32_t block_k) const {
    const int64_t rows = std::max(blocks(extent_.seq_q, block_q), blocks(extent_.seq_k, block_k));
    if (rows >= most_tasks / (extent_.batch * extent_.heads)) return "2^31 tasks or more";
    if (all_.empty()) return "";
    // Lists grow with the number of blocks at worst; smaller blocks than that are not worth their memory unseen.
    const Layout& known = *all_.front().layout;
    const double growth = double(known.block_q) * known.block_k / (double(block_q) * block_k);
    const double expected = growth * double(known.bytes());
    if (growth <= 1 || expected <= most_bytes) return "";
    return text("lists of up to ", int64_t(expected / (1024 * 1024)), " MiB expected");
}

std::shared_ptr<const std::vector<uint64_t>> Lowering::masks(const Lowered& lowered, const Kernel& kernel) {
    const Layout& layout = *lowered.layout;
    if (!kernel.permute) return {lowered.layout, &layout.masks};
    for (const Ordered& ordered : ordered_)
        if (ordered.layout == &layout && ordered.permute == kernel.permute) return ordered.masks;
    auto masks = std::make_shared<std::vector<uint64_t>>(size_t(layout.num_masks) * kernel.mask_words);
    for (int32_t mask = 0; mask < layout.num_masks; ++mask)
        kernel.permute(&layout.masks[size_t(mask) * layout.mask_words], layout.block_q, layout.block_k,
                       &(*masks)[size_t(mask) * kernel.mask_words]);
    ordered_.push_back({&layout, kernel.permute, masks});
    return masks;
}

LayoutStats make_layout_stats(const Lowered& lowered, bool by_key) {
    const Layout& layout = *lowered.layout;
    const Lists& lists = by_key ? layout.by_key : layout.by_query;
    std::vector<int64_t> rows(layout.classes);
    for (int32_t c = 0; c < layout.classes; ++c)
        for (int32_t row = 0; row < lists.rows; ++row) {
            const Slice slice = lists.slices[size_t(c) * lists.rows + row];
            rows[c] += slice.begin != slice.end;
        }
    LayoutStats stats{};
    stats.pairs = lowered.counts.pairs;
    stats.visited = lowered.counts.visited;
    stats.blocks = double(lowered.counts.blocks_full + lowered.counts.blocks_partial);
    stats.masked = double(lowered.counts.blocks_partial);
    for (int32_t c : layout.class_of) stats.rows += rows[c];
    return stats;
}

LayoutStats make_gather_stats(const Problem& p, const Lowered& lowered) {
    const std::vector<int32_t>& class_of = lowered.layout->class_of;
    bool shared = true;  // do the heads of each group see the same keys?
    for (size_t head = 0; head < class_of.size(); ++head)
        shared &= class_of[head] == class_of[head / size_t(p.group()) * size_t(p.group())];
    LayoutStats stats{};
    stats.pairs = stats.visited = lowered.counts.pairs;
    stats.rows = p.batch * p.heads_q * p.seq_q;
    stats.gathered = stats.pairs / (shared ? double(p.group()) : 1);
    return stats;
}

Counts count_listed(const Problem& p) {
    const double rows = double(p.batch) * double(p.heads_q) * double(p.seq_q);
    Counts counts;
    counts.pairs = counts.visited = rows * double(p.listed.tokens());
    counts.row_max = p.listed.tokens();
    return counts;
}

LayoutStats make_listed_stats(const Problem& p) {
    LayoutStats stats{};
    stats.pairs = stats.visited = count_listed(p).pairs;
    stats.rows = p.batch * p.heads_q * p.seq_q;
    stats.gathered = stats.pairs / double(p.group());
    return stats;
}

LayoutStats make_least_stats(const Problem& p, const Counts& counts, const Kernel& kernel) {
    LayoutStats stats{};
    stats.pairs = stats.visited = counts.pairs;
    stats.blocks = std::ceil(counts.pairs / (double(kernel.block_q) * kernel.block_k));
    const int64_t rows = p.batch * p.heads_q * p.seq_q - counts.rows_empty;
    stats.rows = kernel.by_key ? std::min<int64_t>(rows, 1) : blocks(rows, kernel.block_q);
    return stats;
}

}  // namespace spattn
