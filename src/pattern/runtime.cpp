// SPDX-License-Identifier: MIT
// runtime_tokens(max), runtime_blocks(block_q,block_k,max): every call brings the lists. A plan knows their shape
// alone.
#include "core/error.h"
#include "pattern/index_pattern.h"
#include "pattern/leaf.h"

namespace spattn {
namespace {

class Runtime : public Leaf {
public:
    Runtime(std::string text, RuntimeShape shape) : Leaf(std::move(text)), shape_(shape) {}

    const RuntimeShape* runtime() const override { return &shape_; }

    [[noreturn]] void keys(const Plane&, int64_t, Interval, Intervals&) const override {
        fail(SPATTN_E_UNSUPPORTED, "pattern",
             text(print(), " has its lists given at run time, so its keys are not known; accepted: plans"));
    }

private:
    RuntimeShape shape_;
};

}  // namespace

PatternRef make_runtime_tokens(int64_t max_tokens) {
    require_range(max_tokens, 1, most_tokens, "max_tokens_per_row");
    return make_ref<Runtime>(text("runtime_tokens(", max_tokens, ')'), RuntimeShape{1, 1, max_tokens});
}

PatternRef make_runtime_blocks(int64_t block_q, int64_t block_k, int64_t max_blocks) {
    require_range(block_q, 1, most_tokens, "block_q");
    require_range(block_k, 1, most_tokens, "block_k");
    require_range(max_blocks, 1, most_tokens / block_k, "max_blocks_per_row");  // a row's keys count in 32 bits, too
    return make_ref<Runtime>(text("runtime_blocks(", block_q, ',', block_k, ',', max_blocks, ')'),
                             RuntimeShape{block_q, block_k, max_blocks});
}

}  // namespace spattn
