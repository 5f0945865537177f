// SPDX-License-Identifier: MIT
// Names for the dtypes of operands, from dtype.inc.
#pragma once

#include <string>

#include "core/text.h"
#include "sparseattn/sparseattn.h"

namespace spattn {

enum class Dtype {
#define SPATTN_DTYPE(name, code, bits) name,
#include "core/dtype.inc"
#undef SPATTN_DTYPE
};

// One row of dtype.inc.
struct DtypeRow {
    Dtype dtype;
    const char* name;
    spattn_dtype wire;
    int bytes;
};

inline constexpr DtypeRow dtype_rows[] = {
#define SPATTN_DTYPE(name, code, bits) {Dtype::name, #name, {code, bits, 1}, bits / 8},
#include "core/dtype.inc"
#undef SPATTN_DTYPE
};

constexpr const DtypeRow& dtype_row(Dtype dtype) { return dtype_rows[int(dtype)]; }

// Some problems have q, k and v of it, and caches keys and values; no kernel adds up in it.
inline constexpr spattn_dtype dtype_float8{SPATTN_FLOAT8_E4M3FN, 8, 1};

constexpr bool operator==(const spattn_dtype& a, const spattn_dtype& b) {
    return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

// "float32", "bfloat16", "code 9 with 16 bits": how messages spell a dtype of the ABI.
inline std::string describe_dtype(spattn_dtype d) {
    if (d.lanes != 1) return text("dtype with ", d.lanes, " lanes");
    if (d == dtype_float8) return "float8_e4m3fn";
    switch (d.code) {
        case SPATTN_INT: return text("int", int(d.bits));
        case SPATTN_UINT: return text("uint", int(d.bits));
        case SPATTN_FLOAT: return text("float", int(d.bits));
        case SPATTN_BFLOAT: return text("bfloat", int(d.bits));
        case SPATTN_BOOL: return text("bool", int(d.bits));
    }
    return text("dtype code ", int(d.code), " with ", int(d.bits), " bits");
}

}  // namespace spattn
