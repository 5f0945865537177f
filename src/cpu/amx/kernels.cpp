// SPDX-License-Identifier: MIT
#include "cpu/amx/runs_here.h"
#include "cpu/amx/product.h"
#include "cpu/generic/panel_rows.h"

namespace spattn::cpu::amx {
namespace {

const Kernel rows[] = {
    SPATTN_CPU_PANELS(amx, bf16, 64, 64),
    SPATTN_CPU_PANELS(amx, bf16, 32, 32),
    SPATTN_CPU_GATHER_PANELS(amx, bf16),
};

}  // namespace

KernelTable kernels() { return {rows, int(sizeof rows / sizeof *rows)}; }

}  // namespace spattn::cpu::amx
