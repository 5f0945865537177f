// SPDX-License-Identifier: MIT
// Any bytes as a saved pattern: refused, or a pattern that saves, loads again and answers.
#include <vector>

#include "fuzz/fuzz.h"

using namespace fuzz;

namespace {

std::vector<uint8_t> save(const spattn_pattern* pattern) {
    size_t needed = 0;
    demand(spattn_pattern_save(pattern, nullptr, 0, &needed) == SPATTN_OK, "save asks", print(pattern));
    std::vector<uint8_t> bytes(needed);
    demand(spattn_pattern_save(pattern, bytes.data(), needed, nullptr) == SPATTN_OK, "save writes", print(pattern));
    return bytes;
}

Pattern load(const std::vector<uint8_t>& bytes) {
    spattn_pattern* result = nullptr;
    const spattn_status status =
        spattn_pattern_load(bytes.empty() ? "" : static_cast<const void*>(bytes.data()), bytes.size(), &result);
    demand((status == SPATTN_OK) == (result != nullptr), "a handle exactly on success", "");
    demand(status == SPATTN_OK || status / 1000 == SPATTN_E_FORMAT / 1000, "bytes are read or refused", "");
    return Pattern(result);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
    if (size > 4096) return 0;
    // A text says the same as the bytes it saves to: so that bytes near those of a real pattern are met as well.
    Pattern pattern = load({bytes, bytes + size});
    if (!pattern) pattern = parse(std::string(reinterpret_cast<const char*>(bytes), size));
    if (!pattern) return 0;
    const std::vector<uint8_t> saved = save(pattern.get());
    const Pattern again = load(saved);
    const std::string text = print(pattern.get());
    demand(bool(again), "saved bytes load", text);
    demand(spattn_pattern_equal(pattern.get(), again.get()) == 1, "load(save(p)) equals p", text);
    demand(save(again.get()) == saved, "the bytes stay", text);
    demand_round_trip(pattern.get());
    std::vector<uint8_t> spoiled = saved;
    spoiled[bytes[0] % spoiled.size()] ^= uint8_t(1 + bytes[size - 1] % 255);
    load(spoiled);
    return 0;
}
