// SPDX-License-Identifier: MIT
// Results as a terminal table and as JSON lines.
#pragma once

#include <cstdio>
#include <string>

#include "attention.h"

namespace bench {

struct Result {
    Pass pass;
    std::string kernel;
    Dtype dtype;
    double us, gflops, gbs;  // GFLOP/s on kept pairs; GB/s with each operand moved once
    double density;
    double ratio_dense;  // GFLOP/s here over GFLOP/s of `full` at this shape, at 4096 tokens at most
    double plan_us;
    int64_t layout_bytes;
    double max_err;  // truth.h
    int runs;
};

struct PlanResult {
    int64_t seq;
    double ms, mib;
    double goal_ms, goal_mib;  // 0: not asked
};

// Where and with what a result was made.
struct Origin {
    int threads;
    std::string cpu, commit, date;
};
Origin make_origin(int threads);

class Report {
public:
    Report(Origin origin, const std::string& json_file);  // appends to the file; "" writes none
    ~Report();
    Report(const Report&) = delete;

    void heading();
    void add(const Case& shape, const Result& result);
    void plan_heading();
    void add(const PlanCase& plan, const PlanResult& result);
    void note(const std::string& name, const std::string& text);

private:
    void write_origin();

    Origin origin_;
    std::FILE* json_ = nullptr;
};

std::string quoted(const std::string& text);  // a JSON string

}  // namespace bench
