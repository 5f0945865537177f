// SPDX-License-Identifier: MIT
#include "pattern/index_pattern.h"

#include "core/error.h"

namespace spattn {

IndexPattern::IndexPattern(const char* name, int64_t seq_q, int64_t seq_k, const std::string& lists,
                           const std::string& sizes, const std::string& digest)
    : name_(name), seq_q_(seq_q), seq_k_(seq_k) {
    const std::string start = std::string(name) + '(';
    text_ = start + (lists.empty() ? digest : lists + sizes) + ')';
    identity_ = start + digest + ',' + std::to_string(seq_q) + sizes + ')';
}

Coverage IndexPattern::classify(const Plane&, const Block& block, Key&, bool& known) const {
    if (block.row >= seq_q_ || block.row + block.rows <= 0 || block.key >= seq_k_) return {Coverage::empty, forever};
    if (block.key + block.keys <= 0) return {Coverage::empty, blocks_until(0, block.key, block.keys)};
    known = false;
    return {Coverage::partial, 1};
}

void IndexPattern::check(const Extent& extent) const {
    if (extent.seq_q == seq_q_ && extent.seq_k == seq_k_) return;
    fail(SPATTN_E_SHAPE, "pattern",
         text(name_, " is for seq_q ", seq_q_, " and seq_k ", seq_k_, " where the extent has ", extent.seq_q, " and ",
              extent.seq_k, "; accepted: equal sizes"));
}

}  // namespace spattn
