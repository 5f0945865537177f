// SPDX-License-Identifier: MIT
// window(left,right): p - left <= k <= p + right. Longformer (https://arxiv.org/abs/2004.05150).
#include "core/text.h"
#include "pattern/band.h"

namespace spattn {

PatternRef make_window(int64_t left, int64_t right) {
    const Band band = make_band(left, right, 1);
    return make_ref<BandPattern>(text("window(", left, ',', right, ')'), band);
}

}  // namespace spattn
