// SPDX-License-Identifier: MIT
// A test is a plain program: TEST functions run in order, CHECK counts, the last line is "N passed, N failed" over
// tests. A program that ran no check fails: a test that sees nothing proves nothing. `program NAME...` runs only those
// tests.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Test {
    const char* name;
    void (*body)();
};
inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}
struct Register {
    Register(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

inline long checks = 0, failures = 0;
inline std::string context;  // what a failing check belongs to: set it in loops over cases
inline std::vector<std::string> skips;

inline void report(bool ok, const char* file, int line, const std::string& what) {
    ++checks;
    if (ok) return;
    if (++failures <= 50)
        std::printf("%s:%d: %s%s%s\n", file, line, what.c_str(), context.empty() ? "" : "  in ", context.c_str());
}

template <class A, class B>
void equal(const A& a, const B& b, const char* file, int line, const char* what) {
    if (a == b) return report(true, file, line, what);
    std::ostringstream out;
    out << what << ": " << a << " != " << b;
    report(false, file, line, out.str());
}

inline void skip(const std::string& why) { skips.push_back(why); }  // loud: listed at the end

inline int run(int argc, char** argv) {
    int passed = 0, failed = 0;
    for (const Test& test : tests()) {
        bool wanted = argc < 2;
        for (int i = 1; i < argc; ++i) wanted |= !std::strcmp(argv[i], test.name);
        if (!wanted) continue;
        const long checks_before = checks, failures_before = failures;
        const size_t skips_before = skips.size();
        context.clear();
        try {
            test.body();
        } catch (const std::exception& e) {
            report(false, test.name, 0, std::string("threw ") + e.what());
        }
        if (checks == checks_before && skips.size() == skips_before) report(false, test.name, 0, "made no check");
        const bool ok = failures == failures_before;
        ok ? ++passed : ++failed;
        if (!ok) std::printf("FAILED %s: again with `%s %s`\n", test.name, argv[0], test.name);
    }
    for (const std::string& why : skips) std::printf("SKIPPED %s\n", why.c_str());
    if (passed + failed == 0) {
        std::printf("no test of that name\n");
        failed = 1;
    }
    std::printf("%ld checks\n%d passed, %d failed\n", checks, passed, failed);
    return failed != 0;
}

}  // namespace check

#define TEST(name)                                               \
    static void test_##name();                                   \
    static const check::Register register_##name(#name, test_##name); \
    static void test_##name()
#define CHECK(ok) check::report(bool(ok), __FILE__, __LINE__, #ok)
#define CHECK_EQ(a, b) check::equal((a), (b), __FILE__, __LINE__, #a " == " #b)
