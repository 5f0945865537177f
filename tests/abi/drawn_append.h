// SPDX-License-Identifier: MIT
// Calls of spattn_cache_append drawn at random: shapes, strides, dtypes, pages, float8 with scales, and numbers that lead
// nowhere.
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

    bool is_float8() const { return problem.cache_dtype.bits == 8; }

    // What the call is to leave in the memory of what it writes, by the words of the header.
    struct Written {
        AppendOperand* operand;
        std::vector<unsigned char> memory;
    };
    std::vector<Written> expected();

    // place: of an operand's memory.
    spattn_status call(const spattn_context* context, spattn_device device,
                       const std::function<void*(AppendOperand&)>& place, spattn_stream stream = nullptr);

    spattn_problem problem = sized<spattn_problem>();
    int64_t pages = 0;
    AppendOperand k_new, v_new, k, v, k_scales, v_scales, starts, counts, page_table, query_offsets;
    std::vector<AppendOperand*> operands() {
        return {&k_new, &v_new, &k, &v, &k_scales, &v_scales, &starts, &counts, &page_table, &query_offsets};
    }
    uint32_t flags = 0;
    std::string name;

private:
    struct Rows {
        AppendOperand &from, &to, &scales;
        int64_t columns;
    };
    void expect(const Rows& rows, std::vector<Written>& written) const;
    // body(element of the row in `from`, of that in `to`, of its scale) for each row of a head that is written.
    void each_row(const Rows& rows, const std::function<void(size_t, size_t, size_t)>& body) const;

    // Whose row it is and how many rows of its entry stand before it; entry -1: nobody's, or padding.
    struct Owner {
        int64_t entry, order;
    };
    Owner owner_of(int64_t batch, int64_t row) const;
};

}  // namespace abi
