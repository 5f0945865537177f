// SPDX-License-Identifier: MIT
#include "sample.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace random_test {

namespace {

constexpr int64_t most_attempts = 10000;
constexpr int64_t tile = 16;  // edges of larger tiles are among its own

// Where the number of pairs begins to grow, to fall or to stay: a pattern's pieces meet there.
std::vector<int64_t> find_borders(const std::vector<int64_t>& pairs) {
    std::vector<int64_t> borders;
    for (size_t i = 1; i + 1 < pairs.size(); ++i)
        if (pairs[i + 1] - pairs[i] != pairs[i] - pairs[i - 1]) borders.push_back(int64_t(i));
    return borders;
}

}  // namespace

std::vector<int64_t> draw_sample(Random& random, const std::vector<int64_t>& pairs, double share) {
    const int64_t count = int64_t(pairs.size());
    if (share >= 1) {
        std::vector<int64_t> all(pairs.size());
        std::iota(all.begin(), all.end(), int64_t(0));
        return all;
    }
    const std::vector<int64_t> borders = find_borders(pairs);
    const auto draw = [&] {
        const int64_t kind = random.in(0, 3);
        if (kind == 0) return std::clamp<int64_t>(tile * random.in(0, count / tile) + random.in(-1, 0), 0, count - 1);
        if (kind == 1 && !borders.empty()) return borders[size_t(random.in(0, int64_t(borders.size()) - 1))];
        return random.in(0, count - 1);
    };
    double left = share * std::accumulate(pairs.begin(), pairs.end(), 0.);
    std::set<int64_t> places;
    for (int64_t attempt = 0; attempt < most_attempts && left > 0; ++attempt) {
        const int64_t place = attempt == 0 ? 0 : attempt == 1 ? count - 1 : draw();
        if (places.insert(place).second) left -= double(pairs[size_t(place)]);
    }
    return {places.begin(), places.end()};
}

}  // namespace random_test
