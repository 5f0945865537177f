// SPDX-License-Identifier: MIT
// Plans and runs of drawn problems on one device.
#pragma once

#include <string>
#include <vector>

#include "device.h"
#include "problem.h"

namespace random_test {

// A plan, or why the library offers none: then status is not SPATTN_OK.
struct Planned {
    Plan plan;
    spattn_status status = SPATTN_OK;
    std::string why;
    std::string explained;
    std::vector<std::string> rows;  // kernel rows that run
};

// Rows are pinned through the environment, which all threads share: plans that are pinned are made one at a time.
Planned make_plan(const spattn_context* context, const Problem& problem, const std::string& pinned_row);

// What a plan says of itself.
struct Facts {
    bool has_more_tasks_than_lanes = false, splits_rows = false, dispatches = false, has_rounds = false;
    double seconds = 0;  // of a run, as the plan predicts
};
Facts read(const std::string& explained);

// A short reason out of the text of SPATTN_E_NO_KERNEL.
std::string reason_of(const std::string& why);

// The kernel rows that run here on the context's device.
std::vector<Row> find_rows(const spattn_context* context);

// Runs the passes and brings the results back. Throws std::runtime_error where a call fails or the device does. Returns
// false where the plan's row writes no max_logits, which are then left out.
bool run(const Device& device, const spattn_plan* plan, Problem& problem, Tensors& tensors);

}  // namespace random_test
