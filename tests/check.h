// SPDX-License-Identifier: MIT
// A test is a plain program: TEST functions run in order, CHECK counts, the last line is "N passed, N failed", and
// ", N skipped" where a test made no check and said why. A test that says nothing and checks nothing fails: it proves
// nothing. `program NAME...` runs only those tests; the seconds of long ones are printed.
#pragma once

#include <sstream>
#include <string>

namespace check {

struct Register {
    Register(const char* name, void (*body)());
};

extern long checks;
extern std::string context;  // what a failing check belongs to: set it in loops over cases

void failed(const char* file, int line, const std::string& what);
void skip(const std::string& why);  // loud: listed at the end
int run(int argc, char** argv);

// SPATTN_TEST_EVERY=n, or 1: of n cases that a loop goes through one is enough, under tools that slow every access down.
size_t every();

inline void report(bool ok, const char* file, int line, const char* what) {
    ++checks;
    if (!ok) failed(file, line, what);
}
inline void report(bool ok, const char* file, int line, const std::string& what) {
    ++checks;
    if (!ok) failed(file, line, what);
}

template <class A, class B>
void equal(const A& a, const B& b, const char* file, int line, const char* what) {
    ++checks;
    if (a == b) return;
    std::ostringstream out;
    out << what << ": " << a << " != " << b;
    failed(file, line, out.str());
}

}  // namespace check

#define TEST(name)                                               \
    static void test_##name();                                   \
    static const check::Register register_##name(#name, test_##name); \
    static void test_##name()
#define CHECK(ok) check::report(bool(ok), __FILE__, __LINE__, #ok)
#define CHECK_EQ(a, b) check::equal((a), (b), __FILE__, __LINE__, #a " == " #b)
