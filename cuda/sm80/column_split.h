// SPDX-License-Identifier: MIT
#pragma once

namespace spattn::sm80 {

// Registers hold sums of 256 columns. More are another CTA's, which makes the same scores. Rows of more than 512 bytes
// have no room in shared memory, where a CTA has 99 KiB (Ada, and Ampere but for A100): they come a panel of 256 bytes of
// their columns at a time.
template <int Columns, int ElementBytes>
struct ColumnSplit {
    static constexpr int parts = Columns > 256 ? 2 : 1, of_part = Columns / parts;
    static constexpr int panel = ElementBytes * Columns > 512 ? 256 / ElementBytes : Columns, panels = Columns / panel;
    static constexpr int part_panels = of_part / panel;
    static_assert(part_panels * panel == of_part, "a part has whole panels");
};

}  // namespace spattn::sm80
