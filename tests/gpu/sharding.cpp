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
                                          copy(to, from, bytes);
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

// Buffers stay where they are, and what they hold changes between replays.
TEST(exchanges_are_captured) {
    NEEDS_GPU();
    const Context context = make_context();
    auto problem = abi::make_problem();
    problem.seq_q = problem.seq_k = 600;
    auto options = abi::sized<spattn_sharding_options>();
    options.ranks = 2, options.rank = 1;
    spattn_sharding* made = nullptr;
    const Pattern full = abi::parse("full");
    succeed(spattn_sharding_create(context.get(), full.get(), &problem, &options, nullptr, &made), "sharding");
    const abi::Sharding sharding(made);
    const abi::RankDevice& here = ranks_here();
    abi::Tensor k({2, 2, 300, 16}, abi::f32), v({2, 2, 300, 8}, abi::f32);
    size_t bytes[2] = {};
    succeed(spattn_sharding_buffers(made, &bytes[0], &bytes[1]), "buffers");
    CHECK_EQ(bytes[0], k.bytes + v.bytes);
    void* const sent = here.allocate(bytes[0]);
    spattn_tensor views[2] = {k.view, v.view};
    for (spattn_tensor& x : views) x.device = here.device, x.data = here.allocate(k.bytes);
    auto args = abi::sized<spattn_exchange_args>();
    args.k = &views[0], args.v = &views[1], args.buffer = sent, args.buffer_bytes = bytes[0];
    Graph graph([&](cudaStream_t stream) {
        args.stream = stream;
        succeed(spattn_exchange(made, SPATTN_EXCHANGE_PACK, &args), "captured");
    });
    for (uint32_t replay = 0; replay < 2; ++replay) {
        k.fill(2 * replay + 1), v.fill(2 * replay + 2);
        here.copy(views[0].data, k.data, k.bytes), here.copy(views[1].data, v.data, v.bytes);
        graph.replay();
        std::vector<float> found(bytes[0] / sizeof(float));
        here.copy(found.data(), sent, bytes[0]);
        bool holds = true;  // of each token all keys, then all values
        for (int64_t token = 0; token < 300; ++token)
            for (int64_t head = 0; head < 4; ++head) {
                const float* const of_token = found.data() + token * 4 * (16 + 8);
                for (int64_t c = 0; c < 16; ++c)
                    holds &= of_token[head * 16 + c] == k.as<float>()[(head * 300 + token) * 16 + c];
                for (int64_t c = 0; c < 8; ++c)
                    holds &= of_token[4 * 16 + head * 8 + c] == v.as<float>()[(head * 300 + token) * 8 + c];
            }
        CHECK(holds);
    }
    for (const spattn_tensor& x : views) here.release(x.data);
    here.release(sent);
}
