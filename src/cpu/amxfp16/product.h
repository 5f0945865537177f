// SPDX-License-Identifier: MIT
// The product of panels of fp16 on AMX: by Intel's documents as fast as that of bf16, which costs take for granted.
#pragma once

#include "cpu/amxfp16/element.h"
#include "cpu/amx/tile_product.h"
