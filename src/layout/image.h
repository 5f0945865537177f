// SPDX-License-Identifier: MIT
// A pattern of any length as a small picture of how much it keeps.
#pragma once

#include <functional>

#include "pattern/pattern.h"

namespace spattn {

// Is called with cells [x, x + cells) of image row y and the share of pairs, 0..1, that each of them keeps. Cell (y, x)
// of height x width is queries [y * seq_q / height, (y + 1) * seq_q / height) of the plane, and likewise keys. Every
// cell comes once.
using DrawCells = std::function<void(int64_t y, int64_t x, int64_t cells, float share)>;

void draw_image(const Pattern& pattern, const Plane& plane, int64_t height, int64_t width, const DrawCells& draw);

}  // namespace spattn
