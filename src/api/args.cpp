// SPDX-License-Identifier: MIT
#include "api/args.h"

#include "core/dtype.h"

namespace spattn {

void check_struct_size(uint32_t struct_size, size_t first_size, const char* argument) {
    if (struct_size < first_size)
        fail(SPATTN_E_STRUCT_SIZE, argument,
             text("has struct_size ", struct_size, "; accepted: sizeof the struct, at least ", first_size));
}

void check_tail(const void* given, uint32_t struct_size, size_t known_size, const char* argument) {
    const auto* bytes = static_cast<const unsigned char*>(given);
    for (size_t i = known_size; i < struct_size; ++i)
        if (bytes[i])
            fail(SPATTN_E_UNKNOWN_FIELD, argument,
                 text("has a field at byte ", i, " that this library, version ", SPATTN_VERSION_MAJOR, ".",
                      SPATTN_VERSION_MINOR, ".", SPATTN_VERSION_PATCH, ", does not know; accepted: 0 from byte ",
                      known_size, " on"));
}

void copy_text(const std::string& from, char* buffer, size_t capacity, size_t* needed) {
    const size_t bytes = from.size() + 1;
    if (needed) *needed = bytes;
    if (capacity == 0) {
        required(needed, "needed");
        return;
    }
    required(buffer, "buffer");
    if (capacity < bytes)
        fail(SPATTN_E_RANGE, "capacity", text("is ", capacity, "; accepted: 0 to ask, or at least ", bytes));
    std::memcpy(buffer, from.c_str(), bytes);
}

HostTensor read_host_tensor(const spattn_tensor* tensor, const char* argument, std::span<const int64_t> shape,
                            std::initializer_list<spattn_dtype> accepted) {
    const spattn_tensor& t = required(tensor, argument);
    if (t.device.type != SPATTN_CPU && t.device.type != SPATTN_CUDA_HOST)
        fail(SPATTN_E_DEVICE, argument, text("is on ", describe_device(t.device), "; accepted: host memory"));
    check_dtype(t, argument, accepted);
    check_shape(t, argument, shape);
    HostTensor result;
    result.dtype = t.dtype;
    result.shape.assign(t.shape, t.shape + t.ndim);
    result.strides = tensor_strides(t, argument);
    result.data = tensor_data(t, argument, result.strides);
    return result;
}

std::vector<int64_t> read_integers(const spattn_tensor* tensor, const char* argument) {
    const HostTensor t = read_host_tensor(tensor, argument, std::array<int64_t, 1>{-1}, {dtype_i32, dtype_i64});
    std::vector<int64_t> values(static_cast<size_t>(t.shape[0]));
    for (size_t i = 0; i < values.size(); ++i) values[i] = integer_at(t, int64_t(i) * t.strides[0]);
    return values;
}

int64_t read_q_offset(bool given, int64_t q_offset, int64_t seq_q, int64_t seq_k, const char* argument) {
    if (!given) return seq_k - seq_q;
    require_range(q_offset, -(int64_t(1) << 40), int64_t(1) << 40, argument);
    return q_offset;
}

Question read_extent(const spattn_extent* given, const char* argument) {
    const spattn_extent e = read_struct(given, argument);
    const auto field = [&](const char* name) { return text(argument, ".", name); };
    if (e.flags & ~uint32_t(SPATTN_EXTENT_Q_OFFSET))
        fail(SPATTN_E_UNKNOWN_FIELD, field("flags"), text("is ", e.flags, "; accepted: 0 or SPATTN_EXTENT_Q_OFFSET"));
    const auto range = [&](int64_t value, int64_t low, int64_t high, const char* name) {
        require_range(value, low, high, field(name).c_str());
        return value;
    };
    Question q;
    q.extent.batch = e.batch ? range(e.batch, 1, 1 << 20, "batch") : 1;
    q.extent.heads = e.heads ? range(e.heads, 1, 1 << 20, "heads") : 1;
    q.extent.seq_q = range(e.seq_q, 1, longest_sequence, "seq_q");
    q.extent.seq_k = range(e.seq_k, 1, longest_sequence, "seq_k");
    q.extent.q_offset =
        read_q_offset(e.flags & SPATTN_EXTENT_Q_OFFSET, e.q_offset, e.seq_q, e.seq_k, field("q_offset").c_str());
    q.block_q = e.block_q ? int32_t(range(e.block_q, 1, 1024, "block_q")) : 64;
    q.block_k = e.block_k ? int32_t(range(e.block_k, 1, 1024, "block_k")) : 64;
    q.cancel = e.cancel;
    q.cancel_user = e.cancel_user;
    return q;
}

}  // namespace spattn
