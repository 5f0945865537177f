// SPDX-License-Identifier: MIT
// causal: k <= p.
#include "pattern/band.h"

namespace spattn {

PatternRef make_causal() { return make_ref<BandPattern>("causal", Band{lowest, 0, 1}); }

}  // namespace spattn
