// SPDX-License-Identifier: MIT
#pragma once

namespace spattn::cpu::scalar {
namespace {

// Each flag of archs.inc: the compiler may use any of them.
inline bool runs_here(int) { return true; }

}  // namespace
}  // namespace spattn::cpu::scalar
