// SPDX-License-Identifier: MIT
// Ranks that hold one sequence together, all on one GPU.
#include "abi/drawn_sharding.h"
#include "gpu/gpu.h"

using namespace gpu;

namespace {

const abi::RankDevice& ranks_here() {
    static const abi::RankDevice here{{SPATTN_CUDA, 0},
                                      [](size_t bytes) {
                                          void* memory = nullptr;
                                          cuda(cudaMalloc(&memory, bytes), "memory of a rank");
                                          return memory;
                                      },
                                      [](void* memory) { cudaFree(memory); },
                                      [](void* to, const void* from, size_t bytes) {
                                          cuda(cudaDeviceSynchronize(), "what ranks do");
                                          cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "between ranks");
                                      }};
    return here;
}

}  // namespace

TEST(exchanges_move_what_is_seen) {
    NEEDS_GPU();
    const Context context = make_context();
    for (int seed = 0; seed < 300; ++seed) {
        if (!is_wanted(seed)) continue;
        drawn::Random random(uint64_t(seed) + 7000);
        const abi::DrawnSharding drawn(random, 900);
        check::context = "seed " + std::to_string(seed) + ": " + drawn.name();
        drawn.check_exchange(context.get(), ranks_here());
    }
}

TEST(attention_of_ranks_is_that_of_one_device) {
    NEEDS_GPU();
    const Context context = make_context(), host = abi::make_context();
    for (int seed = 0; seed < 300; ++seed) {
        if (!is_wanted(seed)) continue;
        drawn::Random random(uint64_t(seed) + 9000);
        const abi::DrawnSharding drawn(random, 400);
        check::context = "seed " + std::to_string(seed) + ": " + drawn.name();
        drawn.check_attention(context.get(), ranks_here(), host.get());
    }
}
