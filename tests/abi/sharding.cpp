// SPDX-License-Identifier: MIT
// Ranks that hold one sequence together: what goes between them, what comes of it, and what is refused.
#include <algorithm>
#include <cstring>

#include "abi/drawn_sharding.h"

using namespace abi;

namespace {

Sharding shard(const Context& context, const char* pattern, const spattn_problem& problem,
               const spattn_sharding_options& options) {
    spattn_sharding* made = nullptr;
    succeed(spattn_sharding_create(context.get(), parse(pattern).get(), &problem, &options, nullptr, &made), pattern);
    return Sharding(made);
}

}  // namespace

TEST(exchanges_move_what_is_seen) {
    const Context context = make_context(2, 0);
    for (uint64_t seed = 0; seed < 150; ++seed) {
        drawn::Random random(seed);
        const DrawnSharding drawn(random, 900);
        check::context = "seed " + std::to_string(seed) + ": " + drawn.name();
        drawn.check_exchange(context.get(), host_ranks());
    }
}

TEST(attention_is_that_of_one_device) {
    const Context context = make_context(2, 0);
    for (uint64_t seed = 0; seed < 150; ++seed) {
        drawn::Random random(seed + 1000);
        const DrawnSharding drawn(random, 400);
        check::context = "seed " + std::to_string(seed) + ": " + drawn.name();
        drawn.check_attention(context.get(), host_ranks(), context.get());
    }
}

// Bytes go to the rank that sees them, and to no other.
TEST(ranks_receive_what_they_see) {
    const Context context = make_context();
    auto problem = make_problem();
    problem.batch = 1, problem.seq_q = problem.seq_k = 1024;
    auto options = sized<spattn_sharding_options>();
    options.ranks = 4;
    const auto received = [&](const char* pattern, spattn_enum split) {
        options.split = split;
        std::vector<int64_t> tokens;
        for (options.rank = 0; options.rank < 4; ++options.rank) {
            const Sharding sharding = shard(context, pattern, problem, options);
            int64_t sum = 0;
            for (int32_t other = 0; other < 4; ++other) {
                auto peer = sized<spattn_peer>();
                succeed(spattn_sharding_peer(sharding.get(), other, &peer), "peer");
                CHECK_EQ(peer.received_bytes, uint64_t(peer.tokens_received) * 2 * (16 + 8) * 4);
                sum += peer.tokens_received;
            }
            tokens.push_back(sum);
        }
        return tokens;
    };
    const auto demand_received = [&](const char* pattern, spattn_enum split, std::vector<int64_t> wanted) {
        check::context = pattern;
        CHECK(received(pattern, split) == wanted);
    };
    demand_received("block_diagonal(256)", SPATTN_SPLIT_CONTIGUOUS, {0, 0, 0, 0});
    demand_received("causal & window(100,0)", SPATTN_SPLIT_CONTIGUOUS, {0, 128, 128, 128});
    demand_received("causal & (sink(4) | window(100,0))", SPATTN_SPLIT_CONTIGUOUS, {0, 256, 256, 256});
    demand_received("causal", SPATTN_SPLIT_CONTIGUOUS, {0, 256, 512, 768});
    demand_received("causal", SPATTN_SPLIT_ZIGZAG, {768, 640, 512, 384});
    demand_received("runtime_tokens(3)", SPATTN_SPLIT_CONTIGUOUS, {768, 768, 768, 768});
    demand_received("runtime_tokens(3) & causal", SPATTN_SPLIT_CONTIGUOUS, {0, 256, 512, 768});
}

// The plan takes what a rank holds or receives, not what others hold beside that.
TEST(plans_take_what_is_seen) {
    const Context context = make_context();
    auto problem = make_problem();
    problem.batch = 1, problem.seq_q = problem.seq_k = 4096;
    auto options = sized<spattn_sharding_options>();
    options.ranks = 4;
    const auto demand_seen = [&](const char* pattern, spattn_enum split, int32_t rank, std::vector<int64_t> wanted) {
        check::context = pattern;
        options.split = split, options.rank = rank;
        const Sharding sharding = shard(context, pattern, problem, options);
        int64_t found[8] = {}, count = 0, tokens = 0, sum = 0;
        const int64_t room[] = {4, 2};
        const spattn_tensor to{found, {SPATTN_CPU, 0}, 2, i64, room, nullptr, 0};
        succeed(spattn_sharding_seen(sharding.get(), &to, &count, &tokens), "seen");
        CHECK(std::vector<int64_t>(found, found + 2 * count) == wanted);
        for (size_t i = 0; i < wanted.size(); i += 2) sum += wanted[i + 1] - wanted[i];
        CHECK_EQ(tokens, sum);
        if (count < 2) return;
        const int64_t little[] = {1, 2};
        const spattn_tensor short_room{found, {SPATTN_CPU, 0}, 2, i64, little, nullptr, 0};
        demand("little room", "spattn_sharding_seen",
               spattn_sharding_seen(sharding.get(), &short_room, &count, &tokens), SPATTN_E_SHAPE, "ranges");
    };
    constexpr spattn_enum contiguous = SPATTN_SPLIT_CONTIGUOUS, zigzag = SPATTN_SPLIT_ZIGZAG;
    demand_seen("block_diagonal(256)", contiguous, 2, {2048, 3072});
    demand_seen("causal & window(100,0)", contiguous, 0, {0, 1024});
    demand_seen("causal & window(100,0)", contiguous, 2, {1920, 3072});
    demand_seen("causal & window(100,0)", zigzag, 1, {384, 1024, 2944, 3584});
    demand_seen("causal & (sink(4) | window(100,0))", contiguous, 3, {0, 128, 2944, 4096});
    demand_seen("causal", contiguous, 1, {0, 2048});
    demand_seen("causal", contiguous, 3, {0, 4096});
    demand_seen("full", zigzag, 2, {0, 4096});
    demand_seen("causal & dilated(960,0,48)", contiguous, 2, {768, 3072});  // whose classes keep places by 384
    demand_seen("causal & dilated(960,0,48)", contiguous, 1, {0, 2304});
    demand_seen("causal & (strided(4611686018427387903) | window(100,0))", contiguous, 2, {1920, 3072});
    demand_seen("runtime_tokens(3) & causal & window(100,0)", contiguous, 1, {0, 4096});  // lists name tokens
}

TEST(ranges_read_back) {
    const Context context = make_context();
    auto problem = make_problem();
    const int64_t numbers[] = {1, 30, 40, 0, 0, 20, 1, 20, 30}, shape[] = {3, 3}, room[] = {2, 2};
    const spattn_tensor view{const_cast<int64_t*>(numbers), {SPATTN_CPU, 0}, 2, i64, shape, nullptr, 0};
    auto options = sized<spattn_sharding_options>();
    options.ranks = 2, options.ranges = &view;
    const Sharding sharding = shard(context, "causal", problem, options);
    const spattn_sharding* const made = sharding.get();
    int64_t found[4] = {}, count = 0;
    const spattn_tensor to{found, {SPATTN_CPU, 0}, 2, i64, room, nullptr, 0};
    succeed(spattn_sharding_ranges(made, 1, nullptr, &count), "count");
    CHECK_EQ(count, int64_t(2));
    succeed(spattn_sharding_ranges(made, 1, &to, &count), "ranges");
    CHECK(found[0] == 30 && found[1] == 40 && found[2] == 20 && found[3] == 30);
    succeed(spattn_sharding_ranges(made, 0, &to, &count), "ranges");
    CHECK(count == 1 && found[0] == 0 && found[1] == 20 && found[2] == 20);
}

TEST(shardings_that_are_refused) {
    const Context context = make_context();
    const Pattern causal = parse("causal");
    const auto demand_refused = [&](const char* what, spattn_status status, const char* argument, const auto& spoil) {
        auto problem = make_problem();
        auto options = sized<spattn_sharding_options>();
        std::vector<int64_t> ranges;
        options.ranks = 2;
        spoil(problem, options, ranges);
        const int64_t shape[] = {int64_t(ranges.size() / 3), 3};
        const spattn_tensor view{ranges.data(), {SPATTN_CPU, 0}, 2, i64, shape, nullptr, 0};
        if (!ranges.empty()) options.ranges = &view;
        spattn_sharding* made = reinterpret_cast<spattn_sharding*>(&made);
        const spattn_status got =
            spattn_sharding_create(context.get(), causal.get(), &problem, &options, nullptr, &made);
        demand(what, "spattn_sharding_create", got, status, argument);
        CHECK_EQ(made, static_cast<spattn_sharding*>(nullptr));
    };
    const auto refuse_ranges = [&](const char* what, std::vector<int64_t> numbers, const char* argument) {
        demand_refused(what, SPATTN_E_RANGE, argument, [&](auto&, auto&, auto& ranges) { ranges = numbers; });
    };
    refuse_ranges("a token nobody holds", {0, 0, 20, 1, 21, 40}, "options.ranges");
    refuse_ranges("a token that two hold", {0, 0, 20, 1, 19, 40}, "options.ranges");
    refuse_ranges("tokens beyond the last", {0, 0, 20, 1, 20, 41}, "options.ranges");
    refuse_ranges("the last one missing", {0, 0, 20, 1, 20, 39}, "options.ranges");
    refuse_ranges("a rank without tokens", {0, 0, 20, 0, 20, 40}, "options.ranges");
    refuse_ranges("a range of nothing", {0, 0, 20, 1, 20, 20, 1, 20, 40}, "options.ranges");
    refuse_ranges("a rank that is not there", {0, 0, 20, 2, 20, 40}, "options.ranges[1, 0]");
    demand_refused("ranges and a split", SPATTN_E_RANGE, "options.split", [](auto&, auto& o, auto& ranges) {
        o.split = SPATTN_SPLIT_ZIGZAG, ranges = {0, 0, 20, 1, 20, 40};
    });
    demand_refused("fewer tokens than ranks", SPATTN_E_RANGE, "problem.seq_q",
                   [](auto&, auto& o, auto&) { o.ranks = 41; });
    demand_refused("fewer than shares", SPATTN_E_RANGE, "problem.seq_q",
                   [](auto&, auto& o, auto&) { o.ranks = 21, o.split = SPATTN_SPLIT_ZIGZAG; });
    demand_refused("fewer queries than keys", SPATTN_E_RANGE, "problem.seq_q",
                   [](auto& p, auto&, auto&) { p.seq_q = 39; });
    demand_refused("a cache", SPATTN_E_UNSUPPORTED, "problem.flags",
                   [](auto& p, auto&, auto&) { p.flags = SPATTN_PLAN_STARTS; });
    demand_refused("scales of float32", SPATTN_E_RANGE, "options.flags",
                   [](auto&, auto& o, auto&) { o.flags = SPATTN_SHARDING_SCALES; });
    demand_refused("flags that nobody knows", SPATTN_E_UNKNOWN_FIELD, "options.flags", [](auto& p, auto& o, auto&) {
        p.dtype = float8, o.flags = 2 | SPATTN_SHARDING_SCALES;
    });
    demand_refused("an offset", SPATTN_E_RANGE, "problem.q_offset", [](auto& p, auto&, auto&) {
        p.flags |= SPATTN_PLAN_Q_OFFSET, p.q_offset = 1;
    });
}

TEST(exchanges_that_are_refused) {
    const Context context = make_context();
    const auto problem = make_problem();
    auto options = sized<spattn_sharding_options>();
    options.ranks = 2, options.rank = 1;
    const Sharding sharding = shard(context, "full", problem, options);
    const spattn_sharding* const made = sharding.get();
    size_t bytes[2] = {};
    succeed(spattn_sharding_buffers(made, &bytes[0], &bytes[1]), "buffers");
    Tensor k({2, 2, 20, 16}, f32), v({2, 2, 20, 8}, f32), seen_k({2, 2, 40, 16}, f32), seen_v({2, 2, 40, 8}, f32);
    Tensor buffer({int64_t(bytes[0])}, u8, 16);
    using Args = spattn_exchange_args;
    constexpr spattn_enum pack = SPATTN_EXCHANGE_PACK, unpack = SPATTN_EXCHANGE_UNPACK;
    constexpr spattn_enum pack_gradients = SPATTN_EXCHANGE_PACK_GRADIENTS, add = SPATTN_EXCHANGE_ADD_GRADIENTS;
    const auto refuse = [&](const char* what, spattn_enum step, spattn_status status, const char* argument,
                            const std::function<void(Args&)>& spoil) {
        auto args = sized<spattn_exchange_args>();
        if (step != SPATTN_EXCHANGE_PACK_GRADIENTS) args.k = &k.view, args.v = &v.view;
        if (step != SPATTN_EXCHANGE_PACK) args.seen_k = &seen_k.view, args.seen_v = &seen_v.view;
        args.buffer = buffer.data, args.buffer_bytes = bytes[0];
        spoil(args);
        demand(what, "spattn_exchange", spattn_exchange(made, step, &args), status, argument);
        for (Tensor* t : {&k, &v, &seen_k, &seen_v, &buffer}) CHECK(t->is_poison());
    };
    refuse("seen keys in pack", pack, SPATTN_E_STATE, "seen_k", [&](Args& a) { a.seen_k = &seen_k.view; });
    refuse("seen values in pack", pack, SPATTN_E_STATE, "seen_v",
           [&](Args& a) { a.seen_v = &seen_v.view; });
    refuse("keys in pack_gradients", pack_gradients, SPATTN_E_STATE, "k", [&](Args& a) { a.k = &k.view; });
    refuse("no buffer", pack, SPATTN_E_NULL, "buffer", [](Args& a) { a.buffer = nullptr; });
    refuse("a short buffer", unpack, SPATTN_E_WORKSPACE, "buffer_bytes", [](Args& a) { --a.buffer_bytes; });
    refuse("a buffer off its alignment", add, SPATTN_E_LAYOUT, "buffer",
           [&](Args& a) { a.buffer = buffer.data + 8; });
    refuse("values without keys", unpack, SPATTN_E_NULL, "k", [](Args& a) { a.k = nullptr; });
    refuse("keys without values", unpack, SPATTN_E_NULL, "v", [](Args& a) { a.v = nullptr; });
    refuse("all tokens as those held", pack, SPATTN_E_SHAPE, "k", [&](Args& a) { a.k = &seen_k.view; });
    refuse("a buffer in the keys", pack, SPATTN_E_LAYOUT, "buffer", [&](Args& a) { a.buffer = k.data; });
    refuse("keys and values in one place", add, SPATTN_E_LAYOUT, "k", [&](Args& a) {
        v.view.data = k.data, a.v = &v.view;
    });
    v.view.data = v.data;
    // Where what is seen has the tokens held already, they need not be given; without values, v is NULL.
    auto args = sized<spattn_exchange_args>();
    args.seen_k = &seen_k.view, args.seen_v = &seen_v.view, args.buffer = buffer.data, args.buffer_bytes = bytes[0];
    std::fill_n(buffer.data, buffer.bytes, 1);
    succeed(spattn_exchange(made, SPATTN_EXCHANGE_UNPACK, &args), "without keys");
    for (int64_t token = 0; token < 40; ++token)
        CHECK_EQ(seen_k.data[token * 16 * 4], token < 20 ? 1 : Tensor::poison);
}

// Keys and values of float8 take a byte an element, their scales as much as they are, and gradients two bytes.
TEST(float8_halves_what_is_sent) {
    const Context context = make_context();
    auto problem = make_problem();
    problem.dtype = float8, problem.batch = 1;
    auto options = sized<spattn_sharding_options>();
    options.ranks = 4, options.rank = 3;
    const auto demand_bytes = [&](const char* what, uint32_t flags, int64_t a_token, int64_t back) {
        check::context = what;
        options.flags = flags;
        const Sharding sharding = shard(context, "full", problem, options);
        const auto tokens_of = [&](int32_t rank) { return rank < 3 ? 10 : 0; };
        for (int32_t rank = 0; rank < 4; ++rank) {
            auto peer = sized<spattn_peer>();
            succeed(spattn_sharding_peer(sharding.get(), rank, &peer), "peer");
            const uint64_t tokens[] = {uint64_t(rank * 10), uint64_t(tokens_of(rank))};
            CHECK(peer.sent_offset == tokens[0] * a_token && peer.sent_bytes == tokens[1] * a_token);
            CHECK(peer.received_offset == tokens[0] * a_token && peer.received_bytes == tokens[1] * a_token);
            CHECK(peer.back_sent_offset == tokens[0] * back && peer.back_sent_bytes == tokens[1] * back);
            CHECK(peer.back_received_offset == tokens[0] * back && peer.back_received_bytes == tokens[1] * back);
        }
        size_t bytes[2] = {};
        succeed(spattn_sharding_buffers(sharding.get(), &bytes[0], &bytes[1]), "buffers");
        CHECK(bytes[0] == size_t(30 * std::max(a_token, back)) && bytes[1] == bytes[0]);
    };
    constexpr uint32_t scales = SPATTN_SHARDING_SCALES;
    demand_bytes("no scales", 0, 2 * (16 + 8), 2 * 2 * (16 + 8));
    demand_bytes("scales", scales, 2 * (16 + 8) + 2 * 2 * 4, 2 * 2 * (16 + 8));
    problem.head_dim = 15, problem.head_dim_v = 2;  // 34 bytes, which no scale may follow
    demand_bytes("dims that are odd", scales, 64, 2 * 2 * (15 + 2));
    problem.head_dim = problem.head_dim_v = 1;  // scales are wider than what they are those of
    demand_bytes("rows of one", scales, 32, 2 * 2 * 2);
    problem.head_dim = 16, problem.head_dim_v = 8, problem.flags |= SPATTN_PLAN_VALUE_IN_KEY;
    demand_bytes("values in keys", scales, 2 * 16 + 16, 2 * 2 * 16);
}

TEST(float8_exchanges_that_are_refused) {
    const Context context = make_context();
    auto problem = make_problem();
    problem.dtype = float8;
    auto options = sized<spattn_sharding_options>();
    options.ranks = 2, options.rank = 1;
    using Args = spattn_exchange_args;
    constexpr spattn_enum pack = SPATTN_EXCHANGE_PACK, unpack = SPATTN_EXCHANGE_UNPACK;
    constexpr spattn_enum pack_gradients = SPATTN_EXCHANGE_PACK_GRADIENTS, add = SPATTN_EXCHANGE_ADD_GRADIENTS;
    Tensor k({2, 2, 20, 16}, float8), v({2, 2, 20, 8}, float8), seen_k({2, 2, 40, 16}, float8);
    Tensor seen_v({2, 2, 40, 8}, float8), k_scales({2, 2, 20}, f32), v_scales({2, 2, 20}, f32);
    Tensor seen_k_scales({2, 2, 40}, f32), seen_v_scales({2, 2, 40}, f32);
    Tensor dk({2, 2, 20, 16}, bf16), dv({2, 2, 20, 8}, bf16), seen_dk({2, 2, 40, 16}, bf16);
    Tensor seen_dv({2, 2, 40, 8}, bf16), buffer({20 * 2 * 2 * (16 + 8) * 2}, u8, 16);
    const auto args_of = [&](spattn_enum step, bool has_scales) {
        auto args = sized<spattn_exchange_args>();
        const bool is_back = step == pack_gradients || step == add;
        if (step != pack_gradients) args.k = is_back ? &dk.view : &k.view, args.v = is_back ? &dv.view : &v.view;
        if (step != pack)
            args.seen_k = is_back ? &seen_dk.view : &seen_k.view, args.seen_v = is_back ? &seen_dv.view : &seen_v.view;
        if (has_scales && !is_back) args.k_scales = &k_scales.view, args.v_scales = &v_scales.view;
        if (has_scales && step == unpack)
            args.seen_k_scales = &seen_k_scales.view, args.seen_v_scales = &seen_v_scales.view;
        args.buffer = buffer.data, args.buffer_bytes = buffer.bytes;
        return args;
    };
    for (const bool has_scales : {false, true}) {
        options.flags = has_scales ? SPATTN_SHARDING_SCALES : 0;
        const Sharding sharding = shard(context, "full", problem, options);
        const auto refuse = [&](const char* what, spattn_enum step, spattn_status status, const char* argument,
                                const std::function<void(Args&)>& spoil) {
            auto args = args_of(step, has_scales);
            spoil(args);
            demand(what, "spattn_exchange", spattn_exchange(sharding.get(), step, &args), status, argument);
            for (Tensor* t : {&seen_k, &seen_v, &seen_k_scales, &seen_v_scales, &dk, &dv, &seen_dk, &seen_dv, &buffer})
                CHECK(t->is_poison());
        };
        refuse("keys of bfloat16", pack, SPATTN_E_DTYPE, "k", [&](Args& a) { a.k = &dk.view; });
        refuse("gradients of float8", add, SPATTN_E_DTYPE, "k", [&](Args& a) { a.k = &k.view; });
        refuse("scales of gradients", pack_gradients, SPATTN_E_STATE, "k_scales",
               [&](Args& a) { a.k_scales = &k_scales.view; });
        refuse("scales of what is seen", pack_gradients, SPATTN_E_STATE, "seen_v_scales",
               [&](Args& a) { a.seen_v_scales = &seen_v_scales.view; });
        refuse("scales of sums", add, SPATTN_E_STATE, "v_scales", [&](Args& a) { a.v_scales = &v_scales.view; });
        refuse("seen scales in pack", pack, SPATTN_E_STATE, "seen_k_scales",
               [&](Args& a) { a.seen_k_scales = &seen_k_scales.view; });
        refuse("a buffer that is too short for gradients", add, SPATTN_E_WORKSPACE, "buffer_bytes",
               [](Args& a) { --a.buffer_bytes; });
        if (!has_scales) {
            refuse("scales that are not sent", pack, SPATTN_E_STATE, "v_scales",
                   [&](Args& a) { a.v_scales = &v_scales.view; });
            refuse("scales that did not come", unpack, SPATTN_E_STATE, "seen_k_scales",
                   [&](Args& a) { a.seen_k_scales = &seen_k_scales.view; });
            continue;
        }
        refuse("keys without scales", pack, SPATTN_E_NULL, "k_scales", [](Args& a) { a.k_scales = nullptr; });
        refuse("values without scales", unpack, SPATTN_E_NULL, "v_scales", [](Args& a) { a.v_scales = nullptr; });
        refuse("scales without keys", unpack, SPATTN_E_NULL, "k", [](Args& a) { a.k = nullptr, a.v = nullptr; });
        refuse("no room for scales", unpack, SPATTN_E_NULL, "seen_v_scales",
               [](Args& a) { a.seen_v_scales = nullptr; });
        refuse("scales of all tokens", pack, SPATTN_E_SHAPE, "k_scales",
               [&](Args& a) { a.k_scales = &seen_k_scales.view; });
        refuse("scales of bfloat16", pack, SPATTN_E_DTYPE, "k_scales", [&](Args& a) { a.k_scales = &dk.view; });
        refuse("one place for all scales", unpack, SPATTN_E_LAYOUT, "seen_k_scales", [&](Args& a) {
            static const int64_t strides[] = {0, 0, 0};
            seen_k_scales.view.strides = strides, a.seen_k_scales = &seen_k_scales.view;
        });
        seen_k_scales.view.strides = seen_k_scales.strides.data();
        // The parts that peers have are enough, and one scale of a head may stand for all rows of what is sent.
        auto args = args_of(pack, true);
        const int64_t strides[] = {2, 1, 0};
        k_scales.view.strides = strides, args.buffer_bytes = 20 * (2 * 2 * (16 + 8) + 2 * 2 * 2 * 4);
        succeed(spattn_exchange(sharding.get(), pack, &args), "pack");
        float found[4];
        for (int64_t token = 0; token < 20; ++token) {
            std::memcpy(found, buffer.data + token * 128 + 2 * 2 * (16 + 8), sizeof found);
            CHECK(std::equal(found, found + 4, k_scales.as<float>()));
        }
    }
}

// Ranges that lie a multiple of the dilation apart leave residue classes together; others do not, and are right all the
// same.
TEST(ranges_keep_residue_classes) {
    const Context context = make_context();
    auto problem = make_problem();
    problem.batch = 1, problem.seq_q = problem.seq_k = 8192, problem.head_dim = problem.head_dim_v = 64;
    auto options = sized<spattn_sharding_options>();
    options.ranks = 2, options.split = SPATTN_SPLIT_ZIGZAG;
    const auto plan_of = [&](const char* pattern) {
        const Sharding sharding = shard(context, pattern, problem, options);
        spattn_plan* made = nullptr;
        succeed(spattn_sharding_plan(sharding.get(), &made), "plan");
        return explain(Plan(made).get());
    };
    CHECK(plan_of("causal & dilated(2048,0,16)").find("16 residue classes") != std::string::npos);
    CHECK(plan_of("causal & dilated(2048,0,17)").find("17 residue classes") == std::string::npos);
}

// An empty batch is legal: nothing goes anywhere.
TEST(nothing_at_all) {
    const Context context = make_context();
    auto problem = make_problem();
    problem.batch = 0;
    auto options = sized<spattn_sharding_options>();
    options.ranks = 2;
    const Sharding sharding = shard(context, "full", problem, options);
    const spattn_sharding* const made = sharding.get();
    size_t bytes[2] = {1, 1};
    succeed(spattn_sharding_buffers(made, &bytes[0], &bytes[1]), "buffers");
    CHECK(bytes[0] == 0 && bytes[1] == 0);
    Tensor k({0, 2, 20, 16}, f32), v({0, 2, 20, 8}, f32), seen_k({0, 2, 40, 16}, f32), seen_v({0, 2, 40, 8}, f32);
    for (Tensor* t : {&k, &v, &seen_k, &seen_v}) t->view.data = nullptr;
    auto args = sized<spattn_exchange_args>();
    args.k = &k.view, args.v = &v.view;
    succeed(spattn_exchange(made, SPATTN_EXCHANGE_PACK, &args), "pack");
    args.seen_k = &seen_k.view, args.seen_v = &seen_v.view;
    succeed(spattn_exchange(made, SPATTN_EXCHANGE_UNPACK, &args), "unpack");
    succeed(spattn_exchange(made, SPATTN_EXCHANGE_ADD_GRADIENTS, &args), "add");
}
