// SPDX-License-Identifier: MIT
// The kernel lies beside the one whose parts it puts together.
#pragma once

#include "any/block_forward.cuh"
