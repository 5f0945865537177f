// SPDX-License-Identifier: MIT
// How often work without tasks asks whether it is to go on.
#include <chrono>
#include <thread>

#include "check.h"
#include "core/cancel.h"

using namespace spattn;

static int32_t count_question(void* asked) { return ++*static_cast<int*>(asked), 0; }

// A thread may have done short steps for long, and another call may have long ones.
TEST(long_steps_ask_from_the_first_on) {
    const auto work = [](int steps, std::chrono::milliseconds step) {
        int asked = 0;
        const CancelScope scope(count_question, &asked, "options.cancel");
        for (int i = 0; i < steps; ++i) {
            std::this_thread::sleep_for(step);
            check_cancelled();
        }
        return asked;
    };
    CHECK_EQ(work(3, std::chrono::milliseconds(25)), 3);
    work(1000, std::chrono::milliseconds(0));
    CHECK_EQ(work(3, std::chrono::milliseconds(25)), 3);
}

// Within a call that has a scope of its own, the outer one is asked as before once that is over.
TEST(scopes_nest) {
    int outer = 0;
    const CancelScope scope(count_question, &outer, "options.cancel");
    {
        const CancelScope inside(nullptr, nullptr, "extent.cancel");
        std::this_thread::sleep_for(std::chrono::milliseconds(25));
        check_cancelled();
    }
    CHECK_EQ(outer, 0);
    check_cancelled();
    CHECK_EQ(outer, 1);
}
