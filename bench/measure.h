// SPDX-License-Identifier: MIT
// Time of a call: the median of repetitions, with cold caches between them unless asked otherwise.
#pragma once

#include <functional>
#include <vector>

namespace bench {

struct Timing {
    double us;
    int runs;
};

// Repeats for `seconds`, and at least `fewest` times unless that takes longer than `patience` seconds.
struct Budget {
    double seconds = 0.5;
    int fewest = 5;
    double patience = 5;
};

using Step = std::function<void()>;
Timing measure(const Budget& budget, const Step& call, const Step& before = {});

// Walks through more memory than the caches of all cores hold, on as many threads as the timed call uses.
class ColdCaches {
public:
    explicit ColdCaches(int threads);
    void operator()();

private:
    int threads_;
    std::vector<long> memory_;
};

}  // namespace bench
