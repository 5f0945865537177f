// SPDX-License-Identifier: MIT
#include "pattern/hot.h"

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

}  // namespace spattn
