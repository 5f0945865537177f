// SPDX-License-Identifier: MIT
#pragma once

#include "plan/exchange.h"

namespace spattn::any {

// As Backend has them, on the call's stream.
ExchangeSteps exchange_steps();

}  // namespace spattn::any
