// SPDX-License-Identifier: MIT
// Versions, names of statuses, the list of kernels, and the last error of a thread.
#include <set>
#include <thread>

#include "abi/abi.h"

using namespace abi;

TEST(versions) {
    CHECK_EQ(spattn_version(),
             uint32_t(SPATTN_VERSION_MAJOR * 10000 + SPATTN_VERSION_MINOR * 100 + SPATTN_VERSION_PATCH));
    CHECK_EQ(spattn_abi(), uint32_t(SPATTN_ABI));
}

TEST(status_names) {
#define NAMED(status) CHECK_EQ(std::string(spattn_status_name(status)), #status)
    NAMED(SPATTN_OK);
    NAMED(SPATTN_E_ARGUMENT);
    NAMED(SPATTN_E_NULL);
    NAMED(SPATTN_E_STRUCT_SIZE);
    NAMED(SPATTN_E_SHAPE);
    NAMED(SPATTN_E_DTYPE);
    NAMED(SPATTN_E_DEVICE);
    NAMED(SPATTN_E_LAYOUT);
    NAMED(SPATTN_E_RANGE);
    NAMED(SPATTN_E_WORKSPACE);
    NAMED(SPATTN_E_STATE);
    NAMED(SPATTN_E_UNSUPPORTED);
    NAMED(SPATTN_E_NO_KERNEL);
    NAMED(SPATTN_E_NO_GPU);
    NAMED(SPATTN_E_DRIVER_TOO_OLD);
    NAMED(SPATTN_E_UNKNOWN_FIELD);
    NAMED(SPATTN_E_RESOURCE);
    NAMED(SPATTN_E_HOST_MEMORY);
    NAMED(SPATTN_E_DEVICE_MEMORY);
    NAMED(SPATTN_E_CUDA);
    NAMED(SPATTN_E_CAPTURE);
    NAMED(SPATTN_E_FORMAT);
    NAMED(SPATTN_E_CALLBACK);
    NAMED(SPATTN_E_INTERNAL);
#undef NAMED
    for (int32_t unknown : {-1, 1, 999, 1010, 7000, 0x7fffffff})
        CHECK_EQ(std::string(spattn_status_name(unknown)), "SPATTN_E_UNKNOWN");
}

TEST(kernels) {
    const int32_t count = spattn_kernel_count();
    CHECK(count > 0);
    std::set<std::string> names;
    int runnable = 0;
    for (int32_t row = 0; row < count; ++row) {
        CHECK(spattn_kernel_name(row) != nullptr);
        names.insert(spattn_kernel_name(row));
        const int32_t runs = spattn_kernel_runs_here(row);
        CHECK(runs == 0 || runs == 1);
        runnable += runs;
    }
    CHECK_EQ(names.size(), size_t(count));
    CHECK(runnable > 0);
    for (int32_t row : {-1, count, 0x7fffffff, std::numeric_limits<int32_t>::min()}) {
        CHECK(spattn_kernel_name(row) == nullptr);
        CHECK_EQ(spattn_kernel_runs_here(row), 0);
    }
}

TEST(a_success_leaves_the_last_error) {
    spattn_pattern* result = nullptr;
    CHECK_EQ(spattn_pattern_sink(-1, &result), SPATTN_E_RANGE);
    const std::string text = spattn_last_error_text();
    CHECK(text.find("tokens") != std::string::npos);
    CHECK(text.find("-1") != std::string::npos);
    CHECK(text.find("accepted") != std::string::npos);
    const Pattern pattern = parse("causal");
    CHECK_EQ(text, std::string(spattn_last_error_text()));
}

TEST(errors_do_not_cross_threads) {
    spattn_pattern* result = nullptr;
    CHECK_EQ(spattn_pattern_sink(-1, &result), SPATTN_E_RANGE);
    const std::string mine = spattn_last_error_text();
    std::string fresh = "?", theirs = "?";
    std::thread([&] {
        fresh = spattn_last_error_text();
        spattn_pattern* other = nullptr;
        spattn_pattern_strided(0, &other);
        theirs = spattn_last_error_text();
    }).join();
    CHECK_EQ(fresh, std::string());
    CHECK(theirs.find("stride") != std::string::npos);
    CHECK_EQ(mine, std::string(spattn_last_error_text()));
}
