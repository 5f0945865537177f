// SPDX-License-Identifier: MIT
#include "pattern/hot.h"

#include <algorithm>
#include <iterator>

#include "pattern/leaf.h"

namespace spattn {

namespace {

// More than one token in so many is no exception.
constexpr int64_t rare = 8;
// Longer extents are not looked through for those that stand out. Most of them are those of which rows and columns have
// a part, and a look at all tokens would take far longer than a plan for the part.
constexpr int64_t most_looked_through = int64_t(1) << 24;

// What a constant pattern lists in [begin, begin + count), counted from there.
std::vector<int64_t> list_tokens(const Pattern& constant, int64_t begin, int64_t count) {
    if (count > most_looked_through) return {};
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

using HotParts = std::vector<std::optional<HotTokens>>;

// Each part is asked once: asked twice on every level, a deep composition would never end.
HotParts ask(const Patterns& parts, size_t count, const Extent& extent) {
    HotParts hot(count);
    for (size_t i = 0; i < count; ++i) hot[i] = parts[i]->hot(extent);
    return hot;
}

std::optional<HotTokens> largest(HotParts hot, const Patterns& parts, PatternRef (*rebuild)(Patterns)) {
    const auto size = [](const std::optional<HotTokens>& part) { return part ? part->size() : 0; };
    const auto place = std::max_element(hot.begin(), hot.end(),
                                        [&](const auto& a, const auto& b) { return size(a) < size(b); });
    if (size(*place) == 0) return {};
    Patterns among = parts, apart = parts;
    among[size_t(place - hot.begin())] = (*place)->among;
    apart[size_t(place - hot.begin())] = (*place)->apart;
    (*place)->among = rebuild(std::move(among));
    (*place)->apart = rebuild(std::move(apart));
    return std::move(*place);
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
    return largest(ask(parts, count, extent), parts, rebuild);
}

std::optional<HotTokens> hot_of_union(const Patterns& parts, const Extent& extent) {
    const std::string full = make_full()->identity();
    HotParts hot = ask(parts, parts.size(), extent);
    HotTokens all{{}, {}, {}, make_full(), {}};
    Patterns marks, apart = parts;
    for (size_t i = 0; i < parts.size(); ++i) {
        if (!hot[i] || hot[i]->among->identity() != full) continue;
        all.keys = merge(all.keys, hot[i]->keys);
        all.queries = merge(all.queries, hot[i]->queries);
        marks.push_back(hot[i]->marks);
        apart[i] = hot[i]->apart;
    }
    const bool is_largest = std::all_of(hot.begin(), hot.end(),
                                        [&](const auto& part) { return !part || part->size() <= all.size(); });
    if (marks.empty() || !is_largest) return largest(std::move(hot), parts, make_union);
    all.marks = marks.size() == 1 ? marks[0] : make_union(std::move(marks));
    all.apart = make_union(std::move(apart));
    return all;
}

}  // namespace spattn
