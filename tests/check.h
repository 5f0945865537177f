// SPDX-License-Identifier: MIT
// A test is a plain program: TEST functions run in order, CHECK counts, the last line is "N passed, N failed", and
// ", N skipped" where a test made no check and said why. A test that says nothing and checks nothing fails: it proves
// nothing. `program NAME...` runs only those tests; the seconds of long ones are printed.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

namespace check {

struct Register {
    Register(const char* name, void (*body)());
};

extern long checks;
extern std::string context;  // what a failing check belongs to: set it in loops over cases

void failed(const char* file, int line, const std::string& what);
void skip(const std::string& why);  // loud: listed at the end
int run(int argc, char** argv);

// SPATTN_TEST_EVERY=n, or 1: of n cases of a loop one is enough, under tools that slow every access down.
size_t every();

inline void report(bool ok, const char* file, int line, const char* what) {
    ++checks;
    if (!ok) failed(file, line, what);
}
inline void report(bool ok, const char* file, int line, const std::string& what) {
    ++checks;
    if (!ok) failed(file, line, what);
}

// What a failing check says of a value.
std::string show(int64_t value);
std::string show(uint64_t value);
std::string show(double value);
std::string show(const void* value);
inline std::string show(const std::string& value) { return value; }
inline std::string show(const char* value) { return value; }
template <class T>
std::string show(const T& value) {
    if constexpr (std::is_pointer_v<T>)
        return show(static_cast<const void*>(value));
    else if constexpr (std::is_floating_point_v<T>)
        return show(double(value));
    else if constexpr (std::is_unsigned_v<T>)
        return show(uint64_t(value));
    else
        return show(int64_t(value));
}

void differ(const char* file, int line, const char* what, const std::string& a, const std::string& b);

template <class A, class B>
void equal(const A& a, const B& b, const char* file, int line, const char* what) {
    ++checks;
    if (!(a == b)) differ(file, line, what, show(a), show(b));
}

}  // namespace check

#define TEST(name)                                               \
    static void test_##name();                                   \
    static const check::Register register_##name(#name, test_##name); \
    static void test_##name()
#define CHECK(ok) check::report(bool(ok), __FILE__, __LINE__, #ok)
#define CHECK_EQ(a, b) check::equal((a), (b), __FILE__, __LINE__, #a " == " #b)
