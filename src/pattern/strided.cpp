// SPDX-License-Identifier: MIT
// strided(stride): (k - p) mod stride = 0. Part of Sparse Transformer's strided attention
// (https://arxiv.org/abs/1904.10509).
#include "core/error.h"
#include "pattern/band.h"

namespace spattn {

PatternRef make_strided(int64_t stride) {
    if (stride < 1) fail(SPATTN_E_RANGE, "stride", text("is ", stride, "; accepted: 1 and more"));
    return make_ref<BandPattern>(text("strided(", stride, ')'), Band{lowest, forever, stride});
}

}  // namespace spattn
