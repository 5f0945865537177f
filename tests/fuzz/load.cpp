// SPDX-License-Identifier: MIT
// Any bytes as a saved pattern: refused, or a pattern that saves, loads again and answers.
#include <vector>

#include "fuzz/fuzz.h"

using namespace fuzz;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
    if (size > 4096) return 0;
    // A text says the same as the bytes it saves to: so that bytes near those of a real pattern are met as well.
    Pattern pattern = load({bytes, bytes + size});
    if (!pattern) pattern = parse(std::string(reinterpret_cast<const char*>(bytes), size));
    if (!pattern) return 0;
    demand_saved(pattern.get());
    demand_round_trip(pattern.get());
    std::vector<uint8_t> spoiled = save(pattern.get());
    spoiled[bytes[0] % spoiled.size()] ^= uint8_t(1 + bytes[size - 1] % 255);
    load(spoiled);
    return 0;
}
