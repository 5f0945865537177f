// SPDX-License-Identifier: MIT
#include "cpu/neonbf16/runs_here.h"
#include "cpu/neonbf16/product.h"
#include "cpu/generic/panel_rows.h"

namespace spattn::cpu::neonbf16 {
namespace {

const Kernel rows[] = {
    SPATTN_CPU_PANELS(neonbf16, bf16, 64, 64),
    SPATTN_CPU_PANELS(neonbf16, bf16, 32, 32),
    SPATTN_CPU_GATHER_PANELS(neonbf16, bf16),
};

}  // namespace

KernelTable kernels() { return {rows, int(sizeof rows / sizeof *rows)}; }

}  // namespace spattn::cpu::neonbf16
