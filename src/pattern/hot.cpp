// SPDX-License-Identifier: MIT
#include "pattern/hot.h"

#include <algorithm>
#include <iterator>

#include "pattern/leaf.h"

namespace spattn {

namespace {

// More than one token in so many is no exception.
constexpr int64_t rare = 8;

// What a constant pattern lists in [begin, begin + count), counted from there.
std::vector<int64_t> list_tokens(const Pattern& constant, int64_t begin, int64_t count) {
    Intervals kept;
    constant.keys({}, 0, {begin, begin + count}, kept);
    int64_t tokens = 0;
    for (const Interval& i : kept) tokens += i.end - i.begin;
    std::vector<int64_t> list;
    if (tokens > count / rare) return list;
    list.reserve(size_t(tokens));
    for (const Interval& i : kept)
        for (int64_t token = i.begin; token < i.end; ++token) list.push_back(token - begin);
    return list;
}

std::vector<int64_t> merge(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
    std::vector<int64_t> both;
    std::set_union(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
    return both;
}

std::optional<HotTokens> mark(std::vector<int64_t> keys, std::vector<int64_t> queries, const Pattern& marks) {
    if (keys.empty() && queries.empty()) return {};
    return HotTokens{std::move(keys), std::move(queries), PatternRef::share(&marks), make_full(), make_nothing()};
}

}  // namespace

std::optional<HotTokens> hot_keys(const Pattern& constant, const Extent& extent) {
    return mark(list_tokens(constant, 0, extent.seq_k), {}, constant);
}

std::optional<HotTokens> hot_queries(const Pattern& constant, const Pattern& marks, const Extent& extent) {
    return mark({}, list_tokens(constant, extent.q_offset, extent.seq_q), marks);
}

std::optional<HotTokens> hot_of_parts(const Patterns& parts, size_t count, const Extent& extent,
                                      PatternRef (*rebuild)(Patterns)) {
    std::optional<HotTokens> hot;
    size_t place = 0;
    for (size_t i = 0; i < count; ++i) {
        std::optional<HotTokens> of_part = parts[i]->hot(extent);
        if (of_part && (!hot || of_part->size() > hot->size())) hot = std::move(of_part), place = i;
    }
    if (!hot) return hot;
    Patterns among = parts, apart = parts;
    among[place] = hot->among;
    apart[place] = hot->apart;
    hot->among = rebuild(std::move(among));
    hot->apart = rebuild(std::move(apart));
    return hot;
}

std::optional<HotTokens> hot_of_union(const Patterns& parts, const Extent& extent) {
    const std::string full = make_full()->identity();
    HotTokens all{{}, {}, {}, make_full(), {}};
    Patterns marks, apart = parts;
    for (PatternRef& part : apart) {
        std::optional<HotTokens> hot = part->hot(extent);
        if (!hot || hot->among->identity() != full) continue;
        all.keys = merge(all.keys, hot->keys);
        all.queries = merge(all.queries, hot->queries);
        marks.push_back(std::move(hot->marks));
        part = std::move(hot->apart);
    }
    std::optional<HotTokens> largest = hot_of_parts(parts, parts.size(), extent, make_union);
    if (marks.empty() || all.size() < largest->size()) return largest;
    all.marks = marks.size() == 1 ? marks[0] : make_union(std::move(marks));
    all.apart = make_union(std::move(apart));
    return all;
}

}  // namespace spattn
