// SPDX-License-Identifier: MIT
// What all test programs share: the list of their tests, and the loop that runs them.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <vector>

#include "check.h"

namespace check {
namespace {

struct Test {
    const char* name;
    void (*body)();
};

std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

long failures = 0;
std::vector<std::string> skips;

constexpr double worth_telling = 0.1;  // seconds of a test

enum class Outcome { passed, failed, skipped };

Outcome run(const Test& test, const char* program) {
    const long checks_before = checks, failures_before = failures;
    const size_t skips_before = skips.size();
    context.clear();
    const auto start = std::chrono::steady_clock::now();
    try {
        test.body();
    } catch (const std::exception& e) {
        report(false, test.name, 0, std::string("threw ") + e.what());
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (took.count() >= worth_telling) std::printf("%8.1f s  %s\n", took.count(), test.name);
    const bool made_checks = checks > checks_before, gave_reason = skips.size() > skips_before;
    if (!made_checks && !gave_reason) report(false, test.name, 0, "made no check");
    if (failures > failures_before) {
        std::printf("FAILED %s: again with `%s %s`\n", test.name, program, test.name);
        return Outcome::failed;
    }
    return made_checks ? Outcome::passed : Outcome::skipped;
}

}  // namespace

long checks = 0;
std::string context;

Register::Register(const char* name, void (*body)()) { tests().push_back({name, body}); }

void failed(const char* file, int line, const std::string& what) {
    if (++failures > 50) return;
    std::printf("%s:%d: %s%s%s\n", file, line, what.c_str(), context.empty() ? "" : "  in ", context.c_str());
}

std::string show(int64_t value) { return std::to_string(value); }
std::string show(uint64_t value) { return std::to_string(value); }
std::string show(const void* value) { return show(uint64_t(reinterpret_cast<uintptr_t>(value))); }

std::string show(double value) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.17g", value);
    return digits;
}

void differ(const char* file, int line, const char* what, const std::string& a, const std::string& b) {
    failed(file, line, std::string(what) + ": " + a + " != " + b);
}

void skip(const std::string& why) { skips.push_back(why); }

size_t every() {
    const char* given = std::getenv("SPATTN_TEST_EVERY");
    return given ? size_t(std::max(1, std::atoi(given))) : 1;
}

int run(int argc, char** argv) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);  // whoever ends a program that hangs reads how far it came
    int counts[3] = {};
    for (const Test& test : tests()) {
        bool wanted = argc < 2;
        for (int i = 1; i < argc; ++i) wanted |= !std::strcmp(argv[i], test.name);
        if (wanted) ++counts[int(run(test, argv[0]))];
    }
    for (const std::string& why : skips) std::printf("SKIPPED %s\n", why.c_str());
    auto& [passed, failed, skipped] = counts;
    if (passed + failed + skipped == 0) {
        std::printf("no test of that name\n");
        failed = 1;
    }
    std::printf("%ld checks\n%d passed, %d failed", checks, passed, failed);
    if (skipped) std::printf(", %d skipped", skipped);
    std::printf("\n");
    return failed != 0;
}

}  // namespace check

int main(int argc, char** argv) { return check::run(argc, argv); }
