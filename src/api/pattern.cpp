// SPDX-License-Identifier: MIT
// Chapter 4 of the header: constructors, composition, text. Questions are in questions.cpp.
#include "api/args.h"
#include "api/guard.h"
#include "pattern/pattern.h"

using namespace spattn;

namespace {

PatternRef share(const spattn_pattern* pattern, const char* argument) {
    required(pattern, argument);
    return PatternRef::share(pattern);
}

Patterns share_parts(const spattn_pattern* const* parts, size_t count) {
    if (count == 0) fail(SPATTN_E_RANGE, "count", "is 0; accepted: 1 and more");
    if (count > size_t(1) << 16) fail(SPATTN_E_RANGE, "count", text("is ", count, "; accepted: up to ", 1 << 16));
    required(parts, "parts");
    Patterns result;
    for (size_t i = 0; i < count; ++i) result.push_back(share(parts[i], text("parts[", i, "]").c_str()));
    return result;
}

std::vector<int32_t> read_map(const int32_t* map, size_t size, const char* argument, const char* count_argument) {
    if (size == 0 || size > size_t(1) << 20) {
        fail(SPATTN_E_RANGE, count_argument, text("is ", size, "; accepted: 1 to ", 1 << 20));
    }
    required(map, argument);
    return {map, map + size};
}

// A host tensor [count, 2], one row after the other; count -1: of any size.
std::vector<int64_t> read_pairs(const spattn_tensor* tensor, const char* argument, int64_t count) {
    const HostTensor t = read_host_tensor(tensor, argument, std::array<int64_t, 2>{count, 2}, {dtype_i32, dtype_i64});
    std::vector<int64_t> values;
    values.reserve(size_t(2 * t.shape[0]));
    for (int64_t i = 0; i < 2 * t.shape[0]; ++i) {
        values.push_back(integer_at(t, i / 2 * t.strides[0] + i % 2 * t.strides[1]));
    }
    return values;
}

// A field of spattn_xref: 0 is its default, -1 a 0 that is meant where `least` allows it.
int64_t read_field(int64_t value, int64_t least, int64_t normal, const char* argument) {
    require_range(value, least, longest_sequence, argument);
    return value == 0 ? normal : std::max<int64_t>(value, 0);
}

XrefParams read_xref(const spattn_xref* given) {
    const spattn_xref g = read_struct(given, "params");
    if (g.flags) fail(SPATTN_E_UNKNOWN_FIELD, "params.flags", text("is ", g.flags, "; accepted: 0"));
    XrefParams p;
    p.sinks = read_field(g.sinks, -1, p.sinks, "params.sinks");
    p.window = read_field(g.window, 0, p.window, "params.window");
    p.budget = read_field(g.budget, 0, p.budget, "params.budget");
    p.links = read_field(g.links, -1, p.default_links(), "params.links");
    p.ngram_keys = read_field(g.ngram_keys, -1, p.ngram_keys, "params.ngram_keys");
    p.symbol_before = read_field(g.symbol_before, -1, p.symbol_before, "params.symbol_before");
    p.symbol_after = read_field(g.symbol_after, -1, p.symbol_after, "params.symbol_after");
    p.look_back = read_field(g.look_back, -1, p.look_back, "params.look_back");
    p.stop_ratio = read_field(g.stop_ratio, -1, p.stop_ratio, "params.stop_ratio");
    return p;
}

}  // namespace

extern "C" {

void spattn_pattern_retain(const spattn_pattern* pattern) {
    if (pattern) pattern->retain();
}

void spattn_pattern_release(const spattn_pattern* pattern) {
    if (pattern) pattern->release();
}

spattn_status spattn_pattern_full(spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_full(); });
}

spattn_status spattn_pattern_causal(spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_causal(); });
}

spattn_status spattn_pattern_window(int64_t left, int64_t right, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_window(left, right); });
}

spattn_status spattn_pattern_sink(int64_t tokens, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_sink(tokens); });
}

spattn_status spattn_pattern_block_diagonal(int64_t block, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_block_diagonal(block); });
}

spattn_status spattn_pattern_documents(const spattn_tensor* cu_seqlens, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_documents(read_integers(cu_seqlens, "cu_seqlens")); });
}

spattn_status spattn_pattern_dilated(int64_t left, int64_t right, int64_t dilation, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_dilated(left, right, dilation); });
}

spattn_status spattn_pattern_strided(int64_t stride, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_strided(stride); });
}

spattn_status spattn_pattern_landmark(int64_t block, int64_t landmarks, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_landmark(block, landmarks); });
}

spattn_status spattn_pattern_fixed(int64_t block, int64_t landmarks, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_fixed(block, landmarks); });
}

spattn_status spattn_pattern_logsparse(spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_logsparse(); });
}

spattn_status spattn_pattern_residue(int64_t modulus, int64_t offset, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_residue(modulus, offset); });
}

spattn_status spattn_pattern_global_keys(const spattn_tensor* positions, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_global_keys(read_integers(positions, "positions")); });
}

spattn_status spattn_pattern_global_tokens(const spattn_tensor* positions, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_global_tokens(read_integers(positions, "positions")); });
}

spattn_status spattn_pattern_tree(const spattn_tensor* parents, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_tree(read_integers(parents, "parents")); });
}

spattn_status spattn_pattern_bigbird(const spattn_bigbird* params, spattn_pattern** result) {
    return guard_result(__func__, result, [&] {
        const spattn_bigbird p = read_struct(params, "params");
        if (p.flags) fail(SPATTN_E_UNKNOWN_FIELD, "params.flags", text("is ", p.flags, "; accepted: 0"));
        return make_bigbird(p.block, p.window_blocks, p.global_blocks, p.random_blocks, p.seed);
    });
}

spattn_status spattn_pattern_xref(const spattn_tensor* token_ids, const spattn_tensor* symbols,
                                  const spattn_xref* params, spattn_pattern** result) {
    return guard_result(__func__, result, [&] {
        std::vector<int64_t> ids = read_integers(token_ids, "token_ids");
        std::vector<int64_t> pairs = symbols ? read_pairs(symbols, "symbols", int64_t(ids.size())) : std::vector<int64_t>();
        return make_xref(std::move(ids), std::move(pairs), params ? read_xref(params) : XrefParams());
    });
}

spattn_status spattn_pattern_xref_extend(const spattn_pattern* pattern, const spattn_tensor* token_ids,
                                         const spattn_tensor* symbols, spattn_pattern** result) {
    return guard_result(__func__, result, [&] {
        const PatternRef before = share(pattern, "pattern");
        std::vector<int64_t> ids = read_integers(token_ids, "token_ids");
        std::vector<int64_t> pairs = symbols ? read_pairs(symbols, "symbols", int64_t(ids.size())) : std::vector<int64_t>();
        return extend_xref(before, std::move(ids), std::move(pairs));
    });
}

spattn_status spattn_pattern_runtime_tokens(int64_t max_tokens_per_row, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_runtime_tokens(max_tokens_per_row); });
}

spattn_status spattn_pattern_runtime_blocks(int64_t block_q, int64_t block_k, int64_t max_blocks_per_row,
                                            spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_runtime_blocks(block_q, block_k, max_blocks_per_row); });
}

spattn_status spattn_pattern_union(const spattn_pattern* const* parts, size_t count, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_union(share_parts(parts, count)); });
}

spattn_status spattn_pattern_intersection(const spattn_pattern* const* parts, size_t count, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_intersection(share_parts(parts, count)); });
}

spattn_status spattn_pattern_difference(const spattn_pattern* a, const spattn_pattern* b, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_difference(share(a, "a"), share(b, "b")); });
}

spattn_status spattn_pattern_transpose(const spattn_pattern* pattern, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_transpose(share(pattern, "pattern")); });
}

spattn_status spattn_pattern_grid(const int64_t* sizes, const int64_t* tile, const spattn_pattern* const* parts,
                                  size_t axes, spattn_pattern** result) {
    return guard_result(__func__, result, [&] {
        check_axes(axes);
        required(sizes, "sizes");
        const auto read = [&](const int64_t* numbers) { return std::vector<int64_t>(numbers, numbers + axes); };
        return make_grid(read(sizes), tile ? read(tile) : std::vector<int64_t>(), share_parts(parts, axes));
    });
}

spattn_status spattn_pattern_per_head(const spattn_pattern* const* parts, size_t count, const int32_t* part_of_head,
                                      size_t heads, spattn_pattern** result) {
    return guard_result(__func__, result, [&] {
        return make_per_head(share_parts(parts, count), read_map(part_of_head, heads, "part_of_head", "heads"));
    });
}

spattn_status spattn_pattern_per_batch(const spattn_pattern* const* parts, size_t count, const int32_t* part_of_batch,
                                       size_t batch, spattn_pattern** result) {
    return guard_result(__func__, result, [&] {
        return make_per_batch(share_parts(parts, count), read_map(part_of_batch, batch, "part_of_batch", "batch"));
    });
}

spattn_status spattn_pattern_per_document(const spattn_pattern* inner, const spattn_tensor* cu_q,
                                          const spattn_tensor* cu_k, spattn_pattern** result) {
    return guard_result(__func__, result, [&] {
        return make_per_document(share(inner, "inner"), read_integers(cu_q, "cu_q"), read_integers(cu_k, "cu_k"));
    });
}

spattn_status spattn_pattern_rows(const spattn_pattern* inner, const spattn_tensor* ranges, int64_t seq_q,
                                  spattn_pattern** result) {
    return guard_result(__func__, result, [&] {
        return make_rows(share(inner, "inner"), read_pairs(ranges, "ranges", -1), seq_q);
    });
}

spattn_status spattn_pattern_columns(const spattn_pattern* inner, const spattn_tensor* ranges, int64_t seq_k,
                                     spattn_pattern** result) {
    return guard_result(__func__, result, [&] {
        return make_columns(share(inner, "inner"), read_pairs(ranges, "ranges", -1), seq_k);
    });
}

spattn_status spattn_pattern_parse(const char* text, spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return parse_pattern(&required(text, "text")); });
}

spattn_status spattn_pattern_print(const spattn_pattern* pattern, char* buffer, size_t capacity, size_t* needed) {
    return guard(__func__, [&] { copy_text(required(pattern, "pattern").print(), buffer, capacity, needed); });
}

spattn_status spattn_pattern_save(const spattn_pattern* pattern, void* buffer, size_t capacity, size_t* needed) {
    return guard(__func__, [&] {
        required(pattern, "pattern");
        if (capacity == 0) {
            required(needed, "needed") = saved_size(*pattern);
            return;
        }
        const std::string bytes = save_pattern(*pattern);
        if (needed) *needed = bytes.size();
        require(buffer != nullptr, SPATTN_E_NULL, "buffer", "is NULL; accepted: room for the bytes");
        if (capacity < bytes.size()) {
            fail(SPATTN_E_RANGE, "capacity", text("is ", capacity, "; accepted: 0 to ask, or at least ", bytes.size()));
        }
        std::memcpy(buffer, bytes.data(), bytes.size());
    });
}

spattn_status spattn_pattern_load(const void* bytes, size_t size, spattn_pattern** result) {
    return guard_result(__func__, result, [&] {
        require(bytes != nullptr, SPATTN_E_NULL, "bytes", "is NULL; accepted: what spattn_pattern_save wrote");
        return load_pattern(bytes, size);
    });
}

int32_t spattn_pattern_equal(const spattn_pattern* a, const spattn_pattern* b) {
    if (a == b) return 1;
    if (!a || !b) return 0;
    bool is_equal = false;
    guard(__func__, [&] { is_equal = a->identity() == b->identity(); });
    return is_equal;
}

spattn_status spattn_pattern_hash(const spattn_pattern* pattern, uint64_t* result) {
    return guard(__func__, [&] {
        const uint64_t hash = hash_identity(required(pattern, "pattern").identity());
        required(result, "result") = hash;
    });
}

}  // extern "C"
