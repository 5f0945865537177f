// SPDX-License-Identifier: MIT
#include "golden.h"

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "check.h"

namespace golden {

bool is_writing() { return std::getenv("SPATTN_WRITE_GOLDEN"); }

std::string path_of(const char* folder, const std::string& file) {
    return std::string(SPATTN_TESTS_FOLDER "/") + folder + "/golden/" + file;
}

void write(const std::string& path, const std::string& content) {
    std::ofstream(path, std::ios::binary) << content;
}

std::string read(const std::string& path) {
    std::ostringstream content;
    content << std::ifstream(path, std::ios::binary).rdbuf();
    return content.str();
}

void demand(const char* folder, const std::string& file, const std::string& got) {
    check::context = file;
    const std::string path = path_of(folder, file);
    if (is_writing()) write(path, got);
    const std::string wanted = read(path);
    CHECK(!wanted.empty());
    CHECK_EQ(got, wanted);
}

}  // namespace golden
