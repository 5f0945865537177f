// SPDX-License-Identifier: MIT
// What the fuzz targets share: bytes that become choices, owned patterns, and a stop that names what is wrong.
//
// A target is LLVMFuzzerTestOneInput: libFuzzer drives it where the compiler has one, driver.cpp otherwise.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "drawn.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size);

// AddressSanitizer's allocator fails as others do, instead of ending the program.
extern "C" __attribute__((used)) inline const char* __asan_default_options() { return "allocator_may_return_null=1"; }

namespace fuzz {

using drawn::Pattern;

// Numbers from the input; 0 once it is used up.
class Bytes : public drawn::Choices {
public:
    Bytes(const uint8_t* bytes, size_t size) : bytes_(bytes), end_(bytes + size) {}
    int64_t number(int64_t low, int64_t high) override {
        return low + (bytes_ == end_ ? 0 : *bytes_++ % (high - low + 1));
    }
    bool is_empty() const override { return bytes_ == end_; }

private:
    const uint8_t *bytes_, *end_;
};

[[noreturn]] inline void stop(const std::string& what, const std::string& text) {
    std::fprintf(stderr, "\nWRONG: %s\n  %s\n  last error: %s\n", what.c_str(), text.c_str(), spattn_last_error_text());
    std::abort();
}

inline void demand(bool ok, const char* what, const std::string& text) {
    if (!ok) stop(what, text);
}

inline std::string print(const spattn_pattern* pattern) {
    size_t needed = 0;
    demand(spattn_pattern_print(pattern, nullptr, 0, &needed) == SPATTN_OK, "print asks", "");
    std::string text(needed, ' ');
    demand(spattn_pattern_print(pattern, text.data(), needed, nullptr) == SPATTN_OK, "print writes", "");
    text.pop_back();
    return text;
}

inline Pattern parse(const std::string& text) {
    spattn_pattern* result = nullptr;
    const spattn_status status = spattn_pattern_parse(text.c_str(), &result);
    demand((status == SPATTN_OK) == (result != nullptr), "a handle exactly on success", text);
    demand(status == SPATTN_OK || status == SPATTN_E_FORMAT, "a text is read or refused", text);
    return Pattern(result);
}

// The printed text reads back as an equal pattern with the same text and hash, unless lists are too long for it.
inline Pattern demand_round_trip(const spattn_pattern* pattern) {
    const std::string text = print(pattern);
    Pattern again = parse(text);
    if (text.find('#') != std::string::npos) {
        demand(!again, "a hash is refused", text);
        return again;
    }
    demand(bool(again), "a printed pattern is read", text);
    demand(print(again.get()) == text, "the text stays", text);
    demand(spattn_pattern_equal(pattern, again.get()) == 1, "parse(print(p)) equals p", text);
    uint64_t hash = 0, hash_again = 1;
    spattn_pattern_hash(pattern, &hash);
    spattn_pattern_hash(again.get(), &hash_again);
    demand(hash == hash_again, "equal patterns have equal hashes", text);
    return again;
}

inline std::vector<uint8_t> save(const spattn_pattern* pattern) {
    size_t needed = 0;
    demand(spattn_pattern_save(pattern, nullptr, 0, &needed) == SPATTN_OK, "save asks", print(pattern));
    std::vector<uint8_t> bytes(needed);
    demand(spattn_pattern_save(pattern, bytes.data(), needed, nullptr) == SPATTN_OK, "save writes", print(pattern));
    return bytes;
}

inline Pattern load(const std::vector<uint8_t>& bytes) {
    spattn_pattern* result = nullptr;
    const spattn_status status =
        spattn_pattern_load(bytes.empty() ? "" : static_cast<const void*>(bytes.data()), bytes.size(), &result);
    demand((status == SPATTN_OK) == (result != nullptr), "a handle exactly on success", "");
    demand(status == SPATTN_OK || status / 1000 == SPATTN_E_FORMAT / 1000, "bytes are read or refused", "");
    return Pattern(result);
}

// The saved bytes load as an equal pattern that saves to the same bytes.
inline Pattern demand_saved(const spattn_pattern* pattern) {
    const std::vector<uint8_t> saved = save(pattern);
    Pattern again = load(saved);
    const std::string text = print(pattern);
    demand(bool(again), "saved bytes load", text);
    demand(spattn_pattern_equal(pattern, again.get()) == 1, "load(save(p)) equals p", text);
    demand(save(again.get()) == saved, "the bytes stay", text);
    return again;
}

}  // namespace fuzz
