// SPDX-License-Identifier: MIT
// 2^f = 1 + f (c1 + f (c2 + ...)) on [-1/2, 1/2]: minimax in relative error, 9.1e-8 (Lawson's iteration on the error of
// the whole function; the constant term is exact so that 2^0 is 1).
#pragma once

namespace spattn::cpu {
namespace {

constexpr float exp2_c1 = 0x1.62e42ap-1f, exp2_c2 = 0x1.ebf9bcp-3f, exp2_c3 = 0x1.c6b752p-5f, exp2_c4 = 0x1.3cea88p-7f,
                exp2_c5 = 0x1.5bba14p-10f;

// The same on [0, 1]: 9.2e-8, with both ends exact.
constexpr float exp2_up_terms[] = {0x1.62e4c8p-1f, 0x1.ebd8ap-3f, 0x1.c9444p-5f, 0x1.269deep-7f, 0x1.eca6fp-10f};

// The same series for 2^f - 1 = f (t0 + f (t1 + ...)), minimax relative to 2^f - 1: 1.1e-8 (Remez's exchange).
constexpr float exp2_minus_1_terms[] = {0x1.62e43p-1f,  0x1.ebfbdep-3f,  0x1.c6af6ep-5f,
                                        0x1.3b2ba0p-7f, 0x1.5f07b4p-10f, 0x1.4308fap-13f};

}  // namespace
}  // namespace spattn::cpu
