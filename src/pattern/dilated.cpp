// SPDX-License-Identifier: MIT
// dilated(left,right,dilation): p - left <= k <= p + right and (k - p) mod dilation = 0.
// Longformer, NATTEN (https://arxiv.org/abs/2209.15001).
#include "core/error.h"
#include "pattern/band.h"

namespace spattn {

PatternRef make_dilated(int64_t left, int64_t right, int64_t dilation) {
    if (dilation < 1) fail(SPATTN_E_RANGE, "dilation", text("is ", dilation, "; accepted: 1 and more"));
    const Band band = make_band(left, right, dilation);
    return make_ref<BandPattern>(text("dilated(", left, ',', right, ',', dilation, ')'), band);
}

}  // namespace spattn
