// SPDX-License-Identifier: MIT
// What a pattern without closed forms answers, and the hash of identities.
#include "pattern/intervals.h"

spattn::Coverage spattn_pattern::classify(const spattn::Plane&, const spattn::Block&, spattn::Key&, bool& known) const {
    known = false;
    return {spattn::Coverage::partial, 1};
}

bool spattn_pattern::row_key(const spattn::Plane&, int64_t, int64_t, spattn::Key&) const { return false; }

int64_t spattn_pattern::stem_key(const spattn::Plane& plane, int64_t row, int64_t rows, spattn::Key& key) const {
    const size_t mark = key.size();
    if (row_key(plane, row, rows, key)) return spattn::forever;
    key.resize(mark);
    return spattn::lowest;
}

void spattn_pattern::selection(const spattn::Plane&, spattn::Key&) const {}

void spattn_pattern::check(const spattn::Extent&) const {}

const spattn::RuntimeShape* spattn_pattern::runtime() const { return nullptr; }

spattn::PatternRef spattn_pattern::known_part() const { return {}; }

spattn::PatternRef spattn_pattern::transposed() const { return {}; }

int64_t spattn_pattern::modulus() const { return 1; }

int64_t spattn_pattern::period() const { return 1; }

spattn::PatternRef spattn_pattern::in_residue(int64_t, int64_t) const { return {}; }

std::optional<spattn::HotTokens> spattn_pattern::hot(const spattn::Extent&) const { return {}; }

std::vector<spattn::PatternRef> spattn_pattern::pieces() const { return {spattn::PatternRef::share(this)}; }

namespace spattn {

// FNV-1a (http://www.isthe.com/chongo/tech/comp/fnv) mixes the last bytes badly, so splitmix64's finalizer follows.
uint64_t hash_identity(std::string_view identity) {
    uint64_t hash = 0xcbf29ce484222325;
    for (unsigned char byte : identity) hash = (hash ^ byte) * 0x100000001b3;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
    return hash ^ (hash >> 31);
}

}  // namespace spattn
