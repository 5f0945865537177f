// SPDX-License-Identifier: MIT
// The command line.
#pragma once

#include <string>
#include <vector>

#include "attention.h"
#include "measure.h"

namespace bench {

struct Options {
    std::vector<std::string> cases, kernels;  // globs; empty: every case, the library's own choice of kernel
    std::vector<Pass> passes = {Pass::forward, Pass::backward};
    std::vector<Dtype> dtypes = {Dtype::f32};
    int threads = 0;  // 0: all that this process may use
    bool full = false, warm = false, plan = false, list = false;
    std::string json, mask;  // files
    Budget budget;
};

// Prints usage and exits on --help; throws on a word it does not know.
Options parse_options(int argc, char** argv);

}  // namespace bench
