// SPDX-License-Identifier: MIT
// Any bytes as the text of a pattern: refused with a column, or a pattern that prints, reads back and answers.
#include "fuzz/fuzz.h"

using namespace fuzz;

namespace {

// Small extents: long ones cost time, not code. What a pattern refuses (sizes of an index pattern, maps) it must refuse
// in every question.
void ask(const spattn_pattern* pattern, int64_t seq_q, int64_t seq_k, const std::string& text) {
    spattn_extent extent{};
    extent.struct_size = sizeof extent;
    extent.seq_q = seq_q;
    extent.seq_k = seq_k;
    extent.block_q = extent.block_k = 4;
    spattn_stats stats{};
    stats.struct_size = sizeof stats;
    const spattn_status status = spattn_pattern_stats(pattern, &extent, &stats);
    int64_t nnz = 0, most = 0;
    demand(spattn_pattern_to_csr(pattern, &extent, 0, nullptr, nullptr, &nnz) == status, "questions agree", text);
    if (text.find("runtime_") != std::string::npos)
        return demand(status == SPATTN_E_UNSUPPORTED, "keys of a call are not known", text);
    if (status != SPATTN_OK) return demand(status == SPATTN_E_SHAPE, "an extent that does not fit is a shape", text);
    demand(double(nnz) == stats.pairs, "stats and CSR count the same pairs", text);
    for (int64_t q = 0; q < seq_q; ++q) {
        int32_t keeps = 0;
        demand(spattn_pattern_keeps(pattern, &extent, 0, 0, q, q % seq_k, &keeps) == SPATTN_OK, "keeps answers", text);
        most += keeps;
    }
    demand(most <= nnz, "pairs of one diagonal are pairs", text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
    if (size > 4096) return 0;
    const std::string text = std::string(reinterpret_cast<const char*>(bytes), size).c_str();  // up to its first 0
    const Pattern pattern = parse(text);
    if (!pattern) return 0;
    demand_round_trip(pattern.get());
    ask(pattern.get(), 7, 11, text);
    ask(pattern.get(), 2, 3, text);
    return 0;
}
