// SPDX-License-Identifier: MIT
#include "measure.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include <unistd.h>

namespace bench {

namespace {

double now() {  // seconds
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Timing measure(const Budget& budget, const Step& call, const Step& before) {
    std::vector<double> us;
    const double begin = now();
    for (double spent = 0; spent < budget.seconds || (int(us.size()) < budget.fewest && spent < budget.patience);
         spent = now() - begin) {
        if (before) before();
        const double start = now();
        call();
        us.push_back((now() - start) * 1e6);
    }
    // The lower middle of an even number: an interruption spoils one half of two runs, not their mean.
    const auto middle = us.begin() + (us.size() - 1) / 2;
    std::nth_element(us.begin(), middle, us.end());
    return {*middle, int(us.size())};
}

ColdCaches::ColdCaches(int threads) : threads_(threads) {
    const long level3 = std::max(sysconf(_SC_LEVEL3_CACHE_SIZE), 0L);
    memory_.resize(std::max(2 * level3, 64L << 20) / sizeof(long));
}

void ColdCaches::operator()() {
    std::vector<std::thread> sweepers;
    for (int t = 0; t < threads_; ++t)
        sweepers.emplace_back([this, t] {
            const size_t share = memory_.size() / threads_;
            for (size_t i = t * share; i < (t + 1) * share; ++i) ++memory_[i];
        });
    for (std::thread& sweeper : sweepers) sweeper.join();
}

}  // namespace bench
