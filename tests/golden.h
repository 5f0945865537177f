// SPDX-License-Identifier: MIT
// Golden files of a test folder: what was said once and must be said again. SPATTN_WRITE_GOLDEN=1 writes them anew:
// read the difference before you commit it.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "check.h"

namespace golden {

inline bool is_writing() { return std::getenv("SPATTN_WRITE_GOLDEN"); }

// "plan", "causal_1k.txt". The folder of the tests comes from CMake: __FILE__ may be relative (ccache).
inline std::filesystem::path path_of(const char* folder, const std::string& file) {
    return std::filesystem::path(SPATTN_TESTS_FOLDER) / folder / "golden" / file;
}

inline void write(const std::filesystem::path& path, const std::string& content) {
    std::ofstream(path, std::ios::binary) << content;
}

inline std::string read(const std::filesystem::path& path) {
    std::ostringstream content;
    content << std::ifstream(path, std::ios::binary).rdbuf();
    return content.str();
}

// The text is that of the file.
inline void demand(const char* folder, const std::string& file, const std::string& got) {
    check::context = file;
    const std::filesystem::path path = path_of(folder, file);
    if (is_writing()) write(path, got);
    const std::string wanted = read(path);
    CHECK(!wanted.empty());
    CHECK_EQ(got, wanted);
}

}  // namespace golden
