// SPDX-License-Identifier: MIT
#include "cpu/amxfp16/runs_here.h"
#include "cpu/amxfp16/product.h"
#include "cpu/generic/panel_rows.h"

namespace spattn::cpu::amxfp16 {
namespace {

const Kernel rows[] = {
    SPATTN_CPU_PANELS(amxfp16, f16, 64, 64),
    SPATTN_CPU_PANELS(amxfp16, f16, 32, 32),
    SPATTN_CPU_GATHER_PANELS(amxfp16, f16),
};

}  // namespace

KernelTable kernels() { return {rows, int(sizeof rows / sizeof *rows)}; }

}  // namespace spattn::cpu::amxfp16
