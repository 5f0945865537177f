// SPDX-License-Identifier: MIT
// A caller's function, sampled once into a mask: nothing calls it afterwards.
#include "core/error.h"
#include "pattern/index_pattern.h"
#include "pattern/mask.h"

namespace spattn {

PatternRef make_predicate(spattn_keep_fn keep, void* user, int64_t heads, int64_t seq_q, int64_t seq_k) {
    constexpr int64_t most_pairs = int64_t(1) << 30;
    require(keep != nullptr, SPATTN_E_NULL, "keep", "is NULL; accepted: a function");
    require_range(heads, 1, 1 << 20, "heads");
    require_range(seq_q, 1, most_tokens, "seq_q");
    require_range(seq_k, 1, most_tokens, "seq_k");
    const int64_t pairs = multiply_saturated(heads, seq_q * seq_k);
    if (pairs > most_pairs) {
        fail(SPATTN_E_RANGE, "seq_k",
             text("times heads and seq_q is ", pairs, "; accepted: up to ", most_pairs, " pairs"));
    }
    const MaskSizes sizes{1, heads, seq_q, seq_k};
    auto rows = std::make_unique<BitRows>(sizes);
    for (int64_t head = 0; head < heads; ++head) {
        for (int64_t q = 0; q < seq_q; ++q) {
            for (int64_t k = 0; k < seq_k; ++k) {
                const int32_t answer = keep(user, head, q, k);
                if (answer > 0) rows->set(head, q, k);
                if (answer >= 0) continue;
                fail(SPATTN_E_CALLBACK, "keep",
                     text("returned ", answer, " for head ", head, ", q ", q, ", k ", k,
                          "; accepted: 0, or more to keep"));
            }
        }
    }
    return make_mask(std::move(rows), sizes);
}

}  // namespace spattn
