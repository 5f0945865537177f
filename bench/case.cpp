// SPDX-License-Identifier: MIT
#include "case.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <stdexcept>

#include <fnmatch.h>

namespace bench {

namespace {

constexpr bool quick = false, large = true;  // the words of the table

// Makes the list that a name in braces stands for. `branching n` is the parents of a complete n-ary tree in
// breadth-first order. `odd n` is the boundaries of n documents of uneven lengths, `mixed n` the same with lengths from
// 10 to 4000, the long ones among the short. `spread n` and `first n` are n positions, evenly over the sequence or at
// its start.
std::vector<int64_t> numbers(const std::string& name, int64_t n, int64_t seq) {
    std::vector<int64_t> list;
    if (name == "branching") {
        for (int64_t node = 0; node < seq; ++node) list.push_back(node == 0 ? -1 : (node - 1) / n);
    } else if (name == "odd") {
        // Steps of a fixed irrational rotation: lengths differ and no boundary is aligned to anything.
        for (int64_t i = 1; i < n; ++i) list.push_back(1 + int64_t(i * 0.6180339887498949 * double(seq)) % (seq - 1));
        list.insert(list.end(), {0, seq});
        std::sort(list.begin(), list.end());
    } else if (name == "mixed") {
        list.push_back(0);
        for (int64_t i = 0; i < n; ++i) list.push_back(list.back() + 10 + (i * 37 % n) * 3990 / (n - 1));
    } else if (name == "spread" || name == "first") {
        for (int64_t i = 0; i < n; ++i) list.push_back(name == "first" ? i : i * seq / n);
    } else {
        throw std::runtime_error("no list is called " + name);
    }
    return list;
}

// The arrays of a csr pattern of n rows, as a selector of passages leaves them: 64 rows share 32 places of some 19 keys
// in blocks far apart, and each row sees spans of 13 keys in 7 of them. Their union fills 10 tiles of 64 keys.
std::string spans(int64_t n, int64_t seq) {
    std::ostringstream row_ptr, col_idx;
    row_ptr << "[0";
    col_idx << '[';
    int64_t nnz = 0;
    for (int64_t row = 0; row < n; ++row) {
        std::vector<int64_t> keys;
        for (int64_t span = 0; span < 7; ++span) {
            const int64_t place = (row * 7 + span * 5) % 32;  // 7 different ones
            const int64_t block = (place * (seq / 64) / 32 + row / 64 * 3) % (seq / 64);
            const int64_t begin = block * 64 + (row / 64 * 11 + place) % 44 + row % 7;
            for (int64_t key = begin; key < begin + 13; ++key) keys.push_back(key);
        }
        std::sort(keys.begin(), keys.end());
        for (int64_t key : keys) col_idx << (nnz++ ? "," : "") << key;
        row_ptr << ',' << nnz;
    }
    return row_ptr.str() + "]," + col_idx.str() + ']';
}

// The arrays of a csr pattern of `seq` rows with n different keys each, anywhere.
std::string random(int64_t n, int64_t seq) {
    std::string row_ptr = "[0", col_idx = "[";
    uint64_t state = 1;
    for (int64_t row = 0; row < seq; ++row) {
        std::set<int64_t> keys;
        while (int64_t(keys.size()) < n) {
            state = state * 6364136223846793005 + 1442695040888963407;
            keys.insert(int64_t(state >> 33) % seq);
        }
        for (int64_t key : keys) col_idx += (col_idx.size() > 1 ? "," : "") + std::to_string(key);
        row_ptr += ',' + std::to_string((row + 1) * n);
    }
    return row_ptr + "]," + col_idx + ']';
}

// The arrays of an xref pattern: lines `a = b(c, d)` over n identifiers of one to three tokens, as programs have them:
// every second one was used a moment ago, and of the others few are frequent.
std::string code(int64_t n, int64_t seq) {
    std::string ids = "[", symbols = "[", comma;
    uint64_t state = 1;
    const auto draw = [&](int64_t limit) {
        state = state * 6364136223846793005 + 1442695040888963407;
        return int64_t(state >> 33) % limit;
    };
    int64_t tokens = 0, ended = -1;
    const auto add = [&](int64_t id, int64_t open) {
        if (tokens++ >= seq) return;
        ids += comma + std::to_string(id);
        symbols += comma + std::to_string(open) + ',' + std::to_string(ended);
        comma = ",";
        ended = -1;
    };
    std::vector<int64_t> recent(8, 0);
    while (tokens < seq) {
        for (int64_t sign = 0; sign < 4; ++sign) {  // = ( , and the line's end
            const int64_t rare = draw(n);
            const int64_t name = draw(2) ? recent[size_t(draw(8))] : rare * rare / n;
            recent[size_t(draw(8))] = name;
            for (int64_t part = 0; part <= name % 3; ++part) add(4 + 3 * name + part, 3 * name + part);
            ended = 3 * name + name % 3;
            add(sign, -1);
        }
    }
    return ids + "]," + symbols + ']';
}

}  // namespace

const std::vector<Case>& cases() {
    static const std::vector<Case> all = {
#define SPATTN_CASE(name, pattern, batch, heads_q, heads_kv, seq, head_dim, size) \
    {#name, pattern, batch, heads_q, heads_kv, seq, head_dim, size},
#define SPATTN_LISTS_CASE(name, heads_q, seq, seq_k, head_dim, head_dim_v, top) \
    {#name, "runtime_tokens(" #top ")", 1, heads_q, 1, seq, head_dim, quick, seq_k, head_dim_v, top},
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
    if (name == "spans") out << spans(n, seq);
    else if (name == "random") out << random(n, seq);
    else if (name == "code") out << code(n, seq);
    else
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
