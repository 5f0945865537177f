// SPDX-License-Identifier: MIT
#include "pattern/xref_index.h"

namespace spattn {

// ---- numbers of keys ----

Interner::Slot& Interner::slot_of(uint64_t key) {
    uint64_t hash = key;
    hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9;
    hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EB;
    const size_t last = slots_.size() - 1;
    size_t at = size_t(hash ^ (hash >> 31)) & last;
    while (slots_[at].number >= 0 && slots_[at].key != key) at = (at + 1) & last;
    return slots_[at];
}

void Interner::grow() {
    Interner larger;
    larger.slots_.resize(std::max<size_t>(64, slots_.size() * 2));
    for (const Slot& slot : slots_) {
        if (slot.number >= 0) larger.slot_of(slot.key) = slot;
    }
    slots_ = std::move(larger.slots_);
}

int32_t Interner::number(uint64_t key) {
    if (size_t(used_) * 2 >= slots_.size()) grow();
    Slot& slot = slot_of(key);
    if (slot.number < 0) slot = {key, used_++};
    return slot.number;
}

// ---- where they occur ----

void Occurrences::make_room(int32_t number) {
    if (size_t(number) >= found_.size()) found_.resize(size_t(number) + 1);
}

void Occurrences::append(int32_t number) {
    tokens_.push_back({number, -1});
    if (number < 0) return;
    make_room(number);
    ++found_[size_t(number)].appended;
}

void Occurrences::insert_next() {
    const int32_t token = int32_t(inserted_++), number = number_of(token);
    if (number < 0) return;
    Found& found = found_[size_t(number)];
    tokens_[size_t(token)].before = found.latest;
    found.latest = token;
    if (found.first < 0) found.first = token;
}

// ---- rows ----

void XrefIndex::append(int64_t id, int64_t open, int64_t completed, Spans& row) {
    register_token(id, open, completed);
    room_ = params_.links;
    link_ngrams();
    link_open_symbol();
    link_completed_symbols();
    collect_links();
    write(row);
}

void XrefIndex::register_token(int64_t id, int64_t open, int64_t completed) {
    ++i_;
    const int32_t token = tokens_.number(uint64_t(id));
    std::array<int32_t, longest + 1> now{};
    now[1] = token;
    for (size_t length = shortest; length <= longest; ++length) {
        const bool has_length = i_ + 1 >= int64_t(length);
        const uint64_t pair = uint64_t(uint32_t(last_[length - 1])) << 32 | uint32_t(token);
        now[length] = has_length ? pairs_[length].number(pair) : -1;
        ngrams_[length].append(now[length]);
        // What follows an n-gram is why it is linked, so the key after it must count, too.
        if (ngrams_[length].inserted() < i_ - params_.window) ngrams_[length].insert_next();
    }
    last_ = now;
    const auto number = [&](int64_t symbol) { return symbol < 0 ? -1 : symbols_.number(uint64_t(symbol)); };
    open_.append(number(open));
    if (open_.inserted() <= i_ - params_.window) open_.insert_next();
    if (completed >= 0) {
        completed_.push_back({int32_t(i_), number(completed)});
        open_.make_room(completed_.back().symbol);
    }
    asked_by_.resize(size_t(symbols_.size()), -1);
    if (i_ % 64 == 0) linked_.push_back(0);
}

void XrefIndex::link_ngrams() {
    constexpr int most = 3;
    for (size_t length = longest; length >= shortest; --length) {
        const Occurrences& found = ngrams_[length];
        const int32_t number = found.number_of(i_);
        if (number < 0) continue;
        int32_t p = found.latest(number);
        for (int n = 0; n < most && p >= 0 && room_ > 0; ++n, p = found.before(p)) link(p, p + params_.ngram_keys);
    }
}

void XrefIndex::link_open_symbol() {
    const int32_t number = open_.number_of(i_);
    if (number >= 0) link_symbol(number, 2);
}

void XrefIndex::link_completed_symbols() {
    const int64_t most = params_.stop_ratio ? std::max<int64_t>(i_ / params_.stop_ratio, 4) : forever;
    for (size_t n = completed_.size(); n-- > 0 && room_ > 0;) {
        const auto [token, symbol] = completed_[n];
        if (token <= i_ - params_.look_back) return;
        if (open_.appended(symbol) <= most) link_symbol(symbol, 1);
    }
}

// The `latest` occurrences that are latest, and the first one. A second time in one row it would link nothing more.
void XrefIndex::link_symbol(int32_t number, int latest) {
    int32_t& asked_by = asked_by_[size_t(number)];
    if (asked_by == i_) return;
    asked_by = int32_t(i_);
    const auto around = [&](int32_t p) { link(p - params_.symbol_before, p + params_.symbol_after + 1); };
    const int32_t first = open_.first(number);
    int32_t p = open_.latest(number);
    for (int n = 0; n < latest && p >= 0; ++n, p = open_.before(p)) around(p);
    if (p >= 0) around(first);
}

// Those of the keys [begin, end) that may be linked and are not yet, in rising order, until the row has enough.
void XrefIndex::link(int64_t begin, int64_t end) {
    begin = std::max(begin, params_.sinks);
    end = std::min(end, i_ - params_.window + 1);
    for (; begin < end && room_ > 0; begin = (begin / 64 + 1) * 64) {
        uint64_t& word = linked_[size_t(begin / 64)];
        const int64_t keys = std::min(end - begin, 64 - begin % 64);
        const uint64_t wanted = ~uint64_t(0) >> (64 - keys) << begin % 64;
        uint64_t fresh = wanted & ~word;
        if (!fresh) continue;
        // Bits are counted by a call where the processor's instruction cannot be relied on.
        int64_t count = fresh == wanted ? keys : __builtin_popcountll(fresh);
        for (; count > room_; --count) fresh ^= uint64_t(1) << (63 - __builtin_clzll(fresh));
        if (!word) touched_.push_back(int32_t(begin / 64));
        word |= fresh;
        room_ -= count;
    }
}

// Bits become spans, and are 0 again.
void XrefIndex::collect_links() {
    links_.clear();
    std::sort(touched_.begin(), touched_.end());
    for (int32_t at : touched_) {
        uint64_t& word = linked_[size_t(at)];
        while (word) {
            const int32_t first = __builtin_ctzll(word);
            const uint64_t from_first = word >> first;
            const int32_t count = ~from_first ? __builtin_ctzll(~from_first) : 64;
            word ^= (~uint64_t(0) >> (64 - count)) << first;
            links_.push_back({at * 64 + first, at * 64 + first + count});
        }
    }
    touched_.clear();
}

// Sinks, links, and the window, which takes what the budget has left.
void XrefIndex::write(Spans& row) {
    const int64_t sinks_end = std::min(params_.sinks, i_ + 1);
    int64_t left = std::max(i_ - params_.window + 1, sinks_end);  // where the window begins
    int64_t room = params_.budget - sinks_end - (i_ + 1 - left) - (params_.links - room_);
    while (room >= 0 && left > sinks_end) {
        const int64_t end = links_.empty() ? sinks_end : links_.back().end;
        if (left - end > room) {
            left -= room;
            break;
        }
        room -= left - end;
        left = links_.empty() ? end : links_.back().begin;
        if (!links_.empty()) links_.pop_back();
    }
    const size_t start = row.size();
    const auto add = [&](int64_t begin, int64_t end) {
        if (begin >= end) return;
        if (row.size() > start && row.back().end >= begin) {
            row.back().end = int32_t(end);
        } else {
            row.push_back({int32_t(begin), int32_t(end)});
        }
    };
    add(0, sinks_end);
    for (const Span& span : links_) add(span.begin, span.end);
    add(left, i_ + 1);
}

}  // namespace spattn
