// SPDX-License-Identifier: MIT
// Does the emulator tell what is wrong, whatever order it draws, and nothing of what is right? Small kernels, each as
// it should be and with one defect.
#include <cstdint>
#include <functional>
#include <string>

#include "check.h"
#include "emulator/cta.h"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

using namespace spattn;

namespace {

struct Shared {
    uint8_t tile[16 * 128];  // sixteen rows of 64 elements
    float numbers[64];
    uint64_t full, empty;
};
Shared& shared() { return *ptx::swizzled_shared<Shared>(); }
int warp() { return int(threadIdx.x) / 32; }
bool is_leader() { return threadIdx.x % 32 == 0; }

// How `threads` of each CTA of a cluster end that run `kernel`: with what the emulator complained of, or with nothing.
std::string run(unsigned threads, uint64_t seed, const std::function<void()>& kernel, unsigned cluster = 1) {
    emulator::Cta cta;
    return cta.run({{cluster, 1, 1}, {threads, 1, 1}, sizeof(Shared), cluster}, 0, seed, kernel);
}

// kernel(true) is right, and kernel(false) is told with these words.
void check_kernel(const char* name, unsigned threads, const std::function<void(bool)>& kernel, const char* words,
                  unsigned cluster = 1) {
    for (uint64_t seed = 1; seed <= 20; ++seed) {
        check::context = std::string(name) + ", seed " + std::to_string(seed);
        CHECK_EQ(run(threads, seed, [&] { kernel(true); }, cluster), std::string());
        const std::string told = run(threads, seed, [&] { kernel(false); }, cluster);
        check::report(told.find(words) != std::string::npos, __FILE__, __LINE__, "told: " + told);
    }
    check::context.clear();
}

constexpr const char* disorder = "nothing orders the two";
constexpr const char* no_fence = "no fence of the async proxy";

}  // namespace

TEST(who_reads_waits_for_who_wrote) {
    check_kernel(
        "__syncthreads", 64,
        [](bool is_right) {
            shared().numbers[threadIdx.x] = float(threadIdx.x);
            if (is_right) __syncthreads();
            volatile float x = shared().numbers[63 - threadIdx.x];
            (void)x;
        },
        disorder);
}

TEST(a_named_barrier_orders_those_who_meet_there) {
    check_kernel(
        "bar.sync", 64,
        [](bool is_right) {
            if (warp() == 0) shared().numbers[threadIdx.x] = 1;
            if (warp() == 1 && !is_right) shared().numbers[threadIdx.x - 32] = 2;
            ptx::named_barrier_sync(1, 64);
            if (warp() == 1 && is_right) shared().numbers[threadIdx.x - 32] = 2;
        },
        disorder);
}

TEST(barriers_are_there_before_others_use_them) {
    check_kernel(
        "mbarrier.init", 64,
        [](bool is_right) {
            if (threadIdx.x == 0) ptx::mbarrier_init(&shared().full, 64);
            if (is_right) __syncthreads();
            ptx::mbarrier_arrive(&shared().full);
        },
        "thread ");  // which finds none, or one that is not ordered: as they come
}

TEST(a_slot_is_written_again_when_it_is_empty) {
    check_kernel(
        "mbarrier", 64,
        [](bool is_right) {
            if (threadIdx.x == 0) ptx::mbarrier_init(&shared().full, 1), ptx::mbarrier_init(&shared().empty, 1);
            __syncthreads();
            for (unsigned turn = 0; turn < 3; ++turn)
                if (warp() == 0) {
                    if (is_right) ptx::mbarrier_wait(&shared().empty, (turn & 1) ^ 1);
                    shared().numbers[threadIdx.x] = float(turn);
                    if (!is_right && turn == 1) break;
                    __syncwarp();
                    if (is_leader()) ptx::mbarrier_arrive(&shared().full);
                } else {
                    ptx::mbarrier_wait(&shared().full, turn & 1);
                    volatile float x = shared().numbers[threadIdx.x - 32];
                    (void)x;
                    __syncwarp();
                    if (is_leader()) ptx::mbarrier_arrive(&shared().empty);
                    if (!is_right && turn == 0) break;
                }
        },
        disorder);
}

TEST(copies_are_there_when_somebody_waited) {
    alignas(16) static float source[64] = {};
    check_kernel(
        "cp.async", 64,
        [](bool is_right) {
            if (threadIdx.x < 16)
                ptx::cp_async_16(ptx::shared_address(&shared().numbers[4 * threadIdx.x]), source + 4 * threadIdx.x, 16);
            if (warp() == 0 && is_right) ptx::cp_async_wait_all();
            __syncthreads();
            volatile float x = shared().numbers[threadIdx.x];
            (void)x;
        },
        disorder);
}

TEST(the_copy_engine_sees_what_was_fenced) {
    alignas(16) static float sums[64];
    check_kernel(
        "fence.proxy.async", 32,
        [](bool is_right) {
            shared().numbers[threadIdx.x] = 1;
            if (is_right) ptx::fence_async_shared();
            __syncwarp();
            if (!is_leader()) return;
            ptx::bulk_add(sums, shared().numbers, 32 * sizeof(float));
            ptx::bulk_commit();
            ptx::bulk_wait();
        },
        no_fence);
}

TEST(what_the_copy_engine_reads_stays_until_it_has) {
    alignas(16) static float sums[64];
    check_kernel(
        "cp.async.bulk.wait_group", 32,
        [](bool is_right) {
            for (int turn = 0; turn < 2; ++turn) {
                if (is_leader() && (is_right || !turn)) ptx::bulk_wait_read();
                __syncwarp();
                shared().numbers[threadIdx.x] = float(turn);
                ptx::fence_async_shared();
                __syncwarp();
                if (!is_leader()) continue;
                ptx::bulk_add(sums, shared().numbers, 32 * sizeof(float));
                ptx::bulk_commit();
            }
        },
        disorder);
}

// Four warps multiply the tile by itself, which a fifth writes before and after.
TEST(operands_stay_until_products_have_ended) {
    check_kernel(
        "wgmma.wait_group", 160,
        [](bool is_right) {
            if (threadIdx.x == 0) ptx::mbarrier_init(&shared().full, 1), ptx::mbarrier_init(&shared().empty, 4);
            __syncthreads();
            if (warp() == 4) {
                for (unsigned turn = 0; turn < 2; ++turn) {
                    ptx::mbarrier_wait(&shared().empty, (turn & 1) ^ 1);
                    for (unsigned i = threadIdx.x - 128; i < sizeof shared().tile; i += 32) shared().tile[i] = 0;
                    ptx::fence_async_shared();
                    __syncwarp();
                    if (is_leader()) ptx::mbarrier_arrive(&shared().full);
                }
                return;
            }
            float d[4];
            const uint32_t a[4] = {};
            ptx::mbarrier_wait(&shared().full, 0);
            const uint32_t b = ptx::wgmma_descriptor(shared().tile, 0);
            ptx::wgmma_fence();
            ptx::wgmma(d, a, b, 0, ptx::ElementTag<ptx::MatrixElement::bf16>{});
            ptx::wgmma_commit();
            if (is_right) ptx::wgmma_wait<0>();
            if (is_leader()) ptx::mbarrier_arrive(&shared().empty);
            ptx::wgmma_wait<0>();
        },
        disorder);
}

TEST(products_see_what_was_fenced) {
    check_kernel(
        "wgmma and st.shared", 128,
        [](bool is_right) {
            for (unsigned i = threadIdx.x; i < sizeof shared().tile; i += 128) shared().tile[i] = 0;
            if (is_right) ptx::fence_async_shared();
            __syncthreads();
            float d[4];
            const uint32_t a[4] = {};
            ptx::wgmma_fence();
            ptx::wgmma(d, a, ptx::wgmma_descriptor(shared().tile, 0), 0, ptx::ElementTag<ptx::MatrixElement::bf16>{});
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
        },
        no_fence);
}

// One CTA of a cluster sends numbers to the other, twice to the same place.
TEST(ctas_of_a_cluster_wait_for_what_they_send_each_other) {
    enum Defect { none, reads_at_once, writes_at_once, tells_at_once };
    const auto kernel = [](Defect defect) {
        const uint32_t rank = ptx::cluster_rank();
        if (is_leader()) ptx::mbarrier_init(&shared().full, 1), ptx::mbarrier_init(&shared().empty, 1);
        ptx::cluster_sync();
        for (uint32_t turn = 0; turn < 2; ++turn) {
            if (rank == 0) {
                if (defect != writes_at_once) ptx::mbarrier_wait(&shared().empty, turn ^ 1);
                if (is_leader())
                    ptx::cluster_store(ptx::cluster_address(shared().numbers, 1), {float(turn), 1, 2, 3},
                                       ptx::cluster_address(&shared().full, 1));
            } else {
                if (is_leader()) ptx::mbarrier_arrive_expect(&shared().full, 16);
                if (defect != reads_at_once) ptx::mbarrier_wait(&shared().full, turn);
                float x[4];
                ptx::load_shared(x, ptx::shared_address(shared().numbers));
                if (defect == reads_at_once) ptx::mbarrier_wait(&shared().full, turn);
                if (defect == none) CHECK_EQ(x[0], float(turn));
                __syncwarp();
                if (!is_leader()) continue;
                const uint32_t empty = ptx::cluster_address(&shared().empty, 0);
                defect == tells_at_once ? ptx::cluster_arrive(empty) : ptx::cluster_arrive_after(empty, x[3]);
            }
        }
        ptx::cluster_sync();
    };
    for (const Defect defect : {reads_at_once, writes_at_once, tells_at_once})
        check_kernel("st.async", 32, [&](bool is_right) { kernel(is_right ? none : defect); }, disorder, 2);
}

TEST(a_cta_sends_what_was_fenced) {
    check_kernel(
        "cp.async.bulk to another CTA", 32,
        [](bool is_right) {
            if (is_leader()) ptx::mbarrier_init(&shared().full, 1);
            ptx::cluster_sync();
            const uint32_t other = ptx::cluster_rank() ^ 1;
            shared().numbers[threadIdx.x] = float(threadIdx.x + other);
            if (is_right) ptx::fence_async_shared();
            __syncwarp();
            if (is_leader()) {
                ptx::mbarrier_arrive_expect(&shared().full, 128);
                ptx::cluster_copy(ptx::cluster_address(shared().tile, other), ptx::shared_address(shared().numbers),
                                  128, ptx::cluster_address(&shared().full, other));
            }
            ptx::mbarrier_wait(&shared().full, 0);
            float x[2];
            ptx::load_shared(x, ptx::shared_address(shared().tile) + threadIdx.x / 2 * 8);
            if (is_right) CHECK_EQ(x[threadIdx.x % 2], float(threadIdx.x + 1 - other));
            ptx::cluster_sync();
        },
        no_fence, 2);
}

TEST(who_waits_for_ever_is_named) {
    const std::string told = run(64, 1, [] {
        if (threadIdx.x == 0) ptx::mbarrier_init(&shared().full, 2);
        __syncthreads();
        if (threadIdx.x == 0) ptx::mbarrier_arrive(&shared().full);
        if (warp() == 1) ptx::mbarrier_wait(&shared().full, 0);
    });
    CHECK(told.find("hangs: warp 1 has lane 0 at the barrier at byte") != std::string::npos);
}
