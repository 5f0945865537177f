// SPDX-License-Identifier: MIT
#include "cpu/avx512bf16/runs_here.h"
#include "cpu/avx512bf16/product.h"
#include "cpu/generic/panel_rows.h"

namespace spattn::cpu::avx512bf16 {
namespace {

const Kernel rows[] = {
    SPATTN_CPU_PANELS(avx512bf16, bf16, 64, 64),
    SPATTN_CPU_PANELS(avx512bf16, bf16, 32, 32),
    SPATTN_CPU_GATHER_PANELS(avx512bf16, bf16),
};

}  // namespace

KernelTable kernels() { return {rows, int(sizeof rows / sizeof *rows)}; }

}  // namespace spattn::cpu::avx512bf16
