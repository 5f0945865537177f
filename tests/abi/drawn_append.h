// SPDX-License-Identifier: MIT
// Calls of spattn_cache_append drawn at random: shapes, strides, dtypes, pages, and numbers that lead nowhere.
#pragma once

#include <random>

#include "abi/abi.h"

namespace abi {

// A tensor somewhere in a piece of memory, all of which is to be looked at.
struct AppendOperand {
    std::vector<unsigned char> memory;  // random bytes around the tensor, and in it
    size_t first = 0;                   // byte of its first element
    std::vector<int64_t> shape, strides;
    spattn_dtype dtype{};
    bool is_given = false;

    // Where `place` has the memory.
    spattn_tensor at(void* place, spattn_device device) const;
};

struct DrawnAppend {
    explicit DrawnAppend(std::mt19937& random);

    // What the call is to leave in the memory of k and v, by the words of the header.
    std::vector<unsigned char> expected_k() const { return expected(k_new, k, problem.head_dim); }
    std::vector<unsigned char> expected_v() const { return expected(v_new, v, problem.head_dim_v); }

    // place: of an operand's memory.
    spattn_status call(const spattn_context* context, spattn_device device,
                       const std::function<void*(AppendOperand&)>& place, spattn_stream stream = nullptr);

    spattn_problem problem = sized<spattn_problem>();
    int64_t pages = 0;
    AppendOperand k_new, v_new, k, v, starts, counts, page_table, query_offsets;
    std::string name;

private:
    std::vector<unsigned char> expected(const AppendOperand& from, const AppendOperand& to, int64_t columns) const;

    // Whose row it is and how many rows of its entry stand before it; entry -1: nobody's, or padding.
    struct Owner {
        int64_t entry, order;
    };
    Owner owner_of(int64_t batch, int64_t row) const;
};

}  // namespace abi
