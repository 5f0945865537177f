// SPDX-License-Identifier: MIT
// A host's hooks that do not do their part: memory that is missing or crooked, threads that stop half-way. Each is a
// status, and the same handles work once the hook does.
#include "fault/operands.h"

using namespace abi;
using fault::Operands;

namespace {

// Gives memory that is off by `crooked` bytes at the n-th call, and counts what is out.
struct Allocator {
    int64_t crooked = 0;
    int calls = 0, crooked_call = -1, out = 0, wrong = 0;

    static void* take(void* user, spattn_device, size_t bytes, size_t align, spattn_stream) {
        auto& self = *static_cast<Allocator*>(user);
        ++self.out;
        const int64_t shift = self.calls++ == self.crooked_call ? self.crooked : 0;
        char* start = static_cast<char*>(std::aligned_alloc(align, (bytes + 2 * align) / align * align));
        return start + shift;
    }
    static void give_back(void* user, spattn_device, void* memory, size_t, spattn_stream) {
        auto& self = *static_cast<Allocator*>(user);
        --self.out;
        const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
        std::free(reinterpret_cast<void*>(address / 256 * 256));
    }
};

// The host's threads: leaves out lanes, or answers with a number, at the n-th loop.
struct Host {
    int loops = 0, bad_loop = -1;
    int64_t skipped = 0;
    int32_t answer = 0;

    static int32_t run(void* user, int64_t tasks, void (*body)(void*, int64_t), void* argument) {
        auto& self = *static_cast<Host*>(user);
        const bool is_bad = self.loops++ == self.bad_loop;
        for (int64_t t = is_bad ? self.skipped : 0; t < tasks; ++t) body(argument, t);
        return is_bad ? self.answer : 0;
    }
};

}  // namespace

TEST(memory_that_is_crooked) {
    const Pattern pattern = parse("bigbird(8,3,1,2,1) & causal");
    const auto problem = make_problem();
    bool was_crooked = true;
    for (int n = 0; was_crooked; ++n) {
        Allocator allocator{8};
        allocator.crooked_call = n;
        auto options = cpu_options();
        options.alloc = Allocator::take;
        options.free = Allocator::give_back;
        options.alloc_user = &allocator;
        {
            const Context context = make_context(options);
            spattn_plan* plan = nullptr;
            const spattn_status status = spattn_plan_create(context.get(), pattern.get(), &problem, nullptr, &plan);
            const Plan owned(plan);
            was_crooked = allocator.calls > n;
            CHECK_EQ(status, was_crooked ? SPATTN_E_CALLBACK : SPATTN_OK);
            CHECK_EQ(plan != nullptr, !was_crooked);
            make_plan(context.get(), pattern.get(), problem);
        }
        CHECK_EQ(allocator.out, 0);
        CHECK(was_crooked || n > 0);
    }
}

namespace {

// A context whose loops are run by the host.
Context make_context_of(Host& host) {
    auto options = cpu_options();
    options.cpu_threads = 3;
    options.parallel_for = Host::run;
    options.parallel_for_user = &host;
    return make_context(options);
}

}  // namespace

// Every parallel loop of forward and of backward in turn.
TEST(loops_that_stop_half_way) {
    const Pattern pattern = parse("causal & (window(9,0) | sink(3)) | strided(5)");
    for (uint32_t reference : {0u, uint32_t(SPATTN_PLAN_REFERENCE)}) {
        Host host;
        const Context context = make_context_of(host);
        auto problem = make_problem();
        problem.flags |= reference;
        const Plan plan = make_plan(context.get(), pattern.get(), problem);
        Operands operands(plan.get(), problem);
        succeed(operands.forward(), "forward");
        const int forward_loops = host.loops;
        succeed(operands.backward(), "backward");
        const int loops = host.loops;
        CHECK(forward_loops > 0 && loops > forward_loops);
        const auto expected = operands.results();
        for (int bad = 0; bad < loops; ++bad) {
            for (const auto& [skipped, answer] : {std::pair<int64_t, int32_t>{1, 0}, {3, 0}, {0, 9}, {2, -1}}) {
                host = {0, bad, skipped, answer};
                const bool is_forward = bad < forward_loops;
                CHECK_EQ(operands.forward(), is_forward ? SPATTN_E_CALLBACK : SPATTN_OK);
                if (!is_forward) CHECK_EQ(operands.backward(), SPATTN_E_CALLBACK);
                host = {};
                succeed(operands.forward(), "forward again");
                succeed(operands.backward(), "backward again");
                CHECK(operands.results() == expected);
            }
        }
    }
}

// Those that copy operands of float8, too.
TEST(loops_of_float8_that_stop_half_way) {
    Host host;
    const Context context = make_context_of(host);
    auto problem = make_problem();
    problem.dtype = float8;
    const Plan plan = make_plan(context.get(), parse("causal").get(), problem);
    Operands operands(plan.get(), problem);
    succeed(operands.forward(), "forward");
    const int loops = host.loops;
    succeed(operands.backward(), "backward");
    const int all_loops = host.loops;
    CHECK(loops > 2 && all_loops > loops + 2);
    const auto expected = operands.results();
    for (int bad = 0; bad < all_loops; ++bad)
        for (const auto& [skipped, answer] : {std::pair<int64_t, int32_t>{1, 0}, {0, 9}}) {
            const bool is_forward = bad < loops;
            host = {0, is_forward ? bad : bad - loops, skipped, answer};
            CHECK_EQ(is_forward ? operands.forward() : operands.backward(), SPATTN_E_CALLBACK);
            host = {};
            succeed(operands.forward(), "forward again");
            succeed(operands.backward(), "backward again");
            CHECK(operands.results() == expected);
        }
}

// The header forbids it, and a host will: what a callback throws ends there as a status, and nothing is lost.
TEST(callbacks_that_throw) {
    struct Thrower {
        int left;
        bool is_memory;

        void step() {
            if (--left != 0) return;
            if (is_memory) throw std::bad_alloc();
            throw 7;
        }
        static int32_t keep(void* user, int64_t, int64_t, int64_t) {
            static_cast<Thrower*>(user)->step();
            return 1;
        }
        static void* take(void* user, spattn_device device, size_t bytes, size_t align, spattn_stream stream) {
            static_cast<Thrower*>(user)->step();
            Allocator plain;
            return Allocator::take(&plain, device, bytes, align, stream);
        }
        static void give_back(void*, spattn_device device, void* memory, size_t bytes, spattn_stream stream) {
            Allocator plain;
            Allocator::give_back(&plain, device, memory, bytes, stream);
        }
        static int32_t run(void* user, int64_t tasks, void (*body)(void*, int64_t), void* argument) {
            body(argument, 0);
            static_cast<Thrower*>(user)->step();
            for (int64_t t = 1; t < tasks; ++t) body(argument, t);
            return 0;
        }
    };
    for (const bool is_memory : {false, true}) {
        const spattn_status status = is_memory ? SPATTN_E_HOST_MEMORY : SPATTN_E_INTERNAL;
        Thrower thrower{4, is_memory};
        spattn_pattern* made = reinterpret_cast<spattn_pattern*>(&made);
        CHECK_EQ(spattn_pattern_predicate(Thrower::keep, &thrower, 1, 3, 5, &made), status);
        CHECK(made == nullptr);

        auto options = cpu_options();
        options.alloc = Thrower::take, options.free = Thrower::give_back, options.alloc_user = &thrower;
        options.parallel_for = Thrower::run, options.parallel_for_user = &thrower;
        options.cpu_threads = 3;
        const Context context = make_context(options);
        const Pattern pattern = parse("causal & window(9,0)");
        const auto problem = make_problem();
        spattn_plan* plan = nullptr;
        thrower.left = 1;
        CHECK_EQ(spattn_plan_create(context.get(), pattern.get(), &problem, nullptr, &plan), status);
        CHECK(plan == nullptr);
        const Plan again = make_plan(context.get(), pattern.get(), problem);
        Operands operands(again.get(), problem);
        succeed(operands.forward(), "forward");
        const auto expected = operands.results();
        thrower.left = 1;
        CHECK_EQ(operands.forward(), status);
        succeed(operands.forward(), "forward again");
        CHECK(operands.results() == expected);
    }
}
