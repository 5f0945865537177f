// SPDX-License-Identifier: MIT
#include "case.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include <fnmatch.h>

namespace bench {

namespace {

constexpr bool quick = false, large = true;  // the words of the table

// Lists by name. branching n: parents of a complete n-ary tree in breadth-first order. odd n: boundaries of n documents of
// uneven lengths. spread n and first n: n positions, evenly over the sequence or at its start.
std::vector<int64_t> numbers(const std::string& name, int64_t n, int64_t seq) {
    std::vector<int64_t> list;
    if (name == "branching") {
        for (int64_t node = 0; node < seq; ++node) list.push_back(node == 0 ? -1 : (node - 1) / n);
    } else if (name == "odd") {
        // Steps of a fixed irrational rotation: lengths differ and no boundary is aligned to anything.
        for (int64_t i = 1; i < n; ++i) list.push_back(1 + int64_t(i * 0.6180339887498949 * double(seq)) % (seq - 1));
        list.insert(list.end(), {0, seq});
        std::sort(list.begin(), list.end());
    } else if (name == "spread" || name == "first") {
        for (int64_t i = 0; i < n; ++i) list.push_back(name == "first" ? i : i * seq / n);
    } else {
        throw std::runtime_error("no list is called " + name);
    }
    return list;
}

}  // namespace

const std::vector<Case>& cases() {
    static const std::vector<Case> all = {
#define SPATTN_CASE(name, pattern, batch, heads_q, heads_kv, seq, head_dim, size) \
    {#name, pattern, batch, heads_q, heads_kv, seq, head_dim, size},
#include "cases.inc"
    };
    return all;
}

const std::vector<PlanCase>& plan_cases() {
    static const std::vector<PlanCase> all = {
#define SPATTN_PLAN_CASE(name, pattern, heads, ms_128k, mib_128k, ms_1m, mib_1m) \
    {#name, pattern, heads, ms_128k, mib_128k, ms_1m, mib_1m},
#include "cases.inc"
    };
    return all;
}

std::string expand(const std::string& text, int64_t seq) {
    const size_t open = text.find('{');
    if (open == std::string::npos) return text;
    const size_t close = text.find('}', open);
    std::istringstream words(text.substr(open + 1, close - open - 1));
    std::string name;
    int64_t n = 0;
    words >> name >> n;
    std::ostringstream out;
    out << text.substr(0, open);
    const char* comma = "";
    for (int64_t number : numbers(name, n, seq)) {
        out << comma << number;
        comma = ",";
    }
    out << expand(text.substr(close + 1), seq);
    return out.str();
}

Handle<spattn_pattern> make_pattern(const std::string& text, int64_t seq) {
    spattn_pattern* result = nullptr;
    require(spattn_pattern_parse(expand(text, seq).c_str(), &result));
    return Handle<spattn_pattern>(result);
}

bool matches(const std::vector<std::string>& globs, const std::string& name) {
    return globs.empty() || std::any_of(globs.begin(), globs.end(), [&](const std::string& glob) {
        return fnmatch(glob.c_str(), name.c_str(), 0) == 0;
    });
}

}  // namespace bench
