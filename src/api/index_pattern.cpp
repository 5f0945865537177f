// SPDX-License-Identifier: MIT
// Chapter 4c of the header: patterns from a caller's arrays and functions.
#include "api/args.h"
#include "api/guard.h"
#include "core/dtype.h"
#include "pattern/mask.h"

using namespace spattn;

namespace {

void check_index_flags(uint32_t flags) {
    const uint32_t known = SPATTN_BORROW | SPATTN_TRUST;
    if (flags & ~known) fail(SPATTN_E_UNKNOWN_FIELD, "flags", text("is ", flags, "; accepted: bits of ", known));
}

template <class Number>
IndexArray take(const HostTensor& t, bool is_borrowed) {
    const auto* from = static_cast<const Number*>(t.data);
    if (is_borrowed) return IndexArray::borrow(from, t.shape[0]);
    std::vector<Number> numbers(size_t(t.shape[0]));
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = from[int64_t(i) * t.strides[0]];
    return numbers;
}

IndexArray take_integers(const spattn_tensor* tensor, const char* argument, uint32_t flags) {
    const HostTensor t = read_host_tensor(tensor, argument, std::array<int64_t, 1>{-1}, {dtype_i32, dtype_i64});
    const bool is_borrowed = flags & SPATTN_BORROW;
    if (is_borrowed && t.shape[0] > 1 && t.strides[0] != 1) {
        fail(SPATTN_E_LAYOUT, argument, text("has stride ", t.strides[0], "; accepted with SPATTN_BORROW: 1"));
    }
    return t.dtype.bits == 32 ? take<int32_t>(t, is_borrowed) : take<int64_t>(t, is_borrowed);
}

// A mask tensor as [batch, heads, seq_q, seq_k], whatever it leaves out.
struct MaskTensor {
    const uint8_t* bytes;
    MaskSizes sizes;
    std::array<int64_t, 4> strides;
};

MaskTensor read_mask(const spattn_tensor* tensor) {
    const int32_t axes = required(tensor, "mask").ndim;
    if (axes < 2 || axes > 4) fail(SPATTN_E_SHAPE, "mask", text("has ", axes, " axes; accepted: 2 to 4"));
    const std::array<int64_t, 4> any{-1, -1, -1, -1};
    const HostTensor t = read_host_tensor(tensor, "mask", std::span(any.data(), size_t(axes)), {dtype_bool, dtype_u8});
    std::array<int64_t, 4> sizes{1, 1, 1, 1};
    MaskTensor mask{static_cast<const uint8_t*>(t.data), {}, {}};
    for (int32_t axis = 0; axis < axes; ++axis) {
        sizes[size_t(4 - axes + axis)] = t.shape[size_t(axis)];
        mask.strides[size_t(4 - axes + axis)] = t.strides[size_t(axis)];
    }
    mask.sizes = {sizes[0], sizes[1], sizes[2], sizes[3]};
    check_mask_sizes(mask.sizes, "mask");
    return mask;
}

std::unique_ptr<const MaskRows> borrow(const MaskTensor& t) {
    if (t.sizes.seq_k > 1 && t.strides[3] != 1) {
        fail(SPATTN_E_LAYOUT, "mask",
             text("has stride ", t.strides[3], " along the keys; accepted with SPATTN_BORROW: 1"));
    }
    return std::make_unique<ByteRows>(t.bytes, t.sizes, t.strides[0], t.strides[1], t.strides[2]);
}

std::unique_ptr<const MaskRows> pack(const MaskTensor& t) {
    auto rows = std::make_unique<BitRows>(t.sizes);
    for (int64_t plane = 0; plane < t.sizes.planes(); ++plane) {
        const uint8_t* from = t.bytes + plane / t.sizes.heads * t.strides[0] + plane % t.sizes.heads * t.strides[1];
        for (int64_t row = 0; row < t.sizes.seq_q; ++row) {
            const uint8_t* keys = from + row * t.strides[2];
            for (int64_t key = 0; key < t.sizes.seq_k; key += 64) {
                const int64_t count = std::min<int64_t>(64, t.sizes.seq_k - key);
                rows->set_word(plane, row, key / 64, pack_bits(keys + key * t.strides[3], t.strides[3], count));
            }
        }
    }
    return rows;
}

}  // namespace

extern "C" {

spattn_status spattn_pattern_csr(const spattn_tensor* row_ptr, const spattn_tensor* col_idx, int64_t seq_k,
                                 uint32_t flags, spattn_pattern** result) {
    return guard_result(__func__, result, [&] {
        check_index_flags(flags);
        return make_csr(take_integers(row_ptr, "row_ptr", flags), take_integers(col_idx, "col_idx", flags), seq_k,
                        flags & SPATTN_TRUST);
    });
}

spattn_status spattn_pattern_bsr(const spattn_tensor* row_ptr, const spattn_tensor* col_idx, int64_t block_q,
                                 int64_t block_k, int64_t seq_q, int64_t seq_k, uint32_t flags,
                                 spattn_pattern** result) {
    return guard_result(__func__, result, [&] {
        check_index_flags(flags);
        return make_bsr(take_integers(row_ptr, "row_ptr", flags), take_integers(col_idx, "col_idx", flags), block_q,
                        block_k, seq_q, seq_k, flags & SPATTN_TRUST);
    });
}

spattn_status spattn_pattern_mask(const spattn_tensor* mask, uint32_t flags, spattn_pattern** result) {
    return guard_result(__func__, result, [&] {
        check_index_flags(flags);
        const MaskTensor t = read_mask(mask);
        return make_mask(flags & SPATTN_BORROW ? borrow(t) : pack(t), t.sizes);
    });
}

spattn_status spattn_pattern_predicate(spattn_keep_fn keep, void* user, int64_t heads, int64_t seq_q, int64_t seq_k,
                                       spattn_pattern** result) {
    return guard_result(__func__, result, [&] { return make_predicate(keep, user, heads, seq_q, seq_k); });
}

}  // extern "C"
