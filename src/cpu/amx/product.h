// SPDX-License-Identifier: MIT
// The product of panels of bf16 on AMX.
#pragma once

#include "cpu/avx512bf16/element.h"
#include "cpu/amx/tile_product.h"
