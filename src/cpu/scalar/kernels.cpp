// SPDX-License-Identifier: MIT
#include "cpu/scalar/vec.h"
#include "cpu/generic/rows.h"

namespace spattn::cpu::scalar {
namespace {

// Each flag of archs.inc: the compiler may use any of them.
bool runs_here() { return true; }

const Kernel rows[] = {
    SPATTN_CPU_BLOCK(scalar, 64, 64),
    SPATTN_CPU_BLOCK(scalar, 16, 16),
};

}  // namespace

KernelTable kernels() { return {rows, int(sizeof rows / sizeof *rows)}; }

}  // namespace spattn::cpu::scalar
