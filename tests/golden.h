// SPDX-License-Identifier: MIT
// Golden files of a test folder: what was said once and must be said again. SPATTN_WRITE_GOLDEN=1 writes them anew:
// read the difference before you commit it.
#pragma once

#include <string>

namespace golden {

bool is_writing();

// "plan", "causal_1k.txt". The folder of the tests comes from CMake: __FILE__ may be relative (ccache).
std::string path_of(const char* folder, const std::string& file);

void write(const std::string& path, const std::string& content);

std::string read(const std::string& path);

// The text is that of the file.
void demand(const char* folder, const std::string& file, const std::string& got);

}  // namespace golden
