// SPDX-License-Identifier: MIT
// A sequence on several ranks through sparseattn.hpp: threads, each with a context of its own, that copy to one another.
#include <array>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <sparseattn/sparseattn.hpp>
#include <thread>

#include "check.h"

namespace sa = sparseattn;

struct Brain {
    uint16_t bits;
};
template <>
struct sparseattn::element<Brain> {
    static constexpr sa::Dtype dtype = sa::bfloat16;
};
struct Float8 {
    uint8_t bits;
};
template <>
struct sparseattn::element<Float8> {
    static constexpr sa::Dtype dtype = sa::float8_e4m3fn;
};

namespace {

constexpr int64_t tokens = 1200, heads = 2, dim = 8;

std::vector<float> noise(uint32_t seed) {
    std::vector<float> values(size_t(tokens * heads * dim));
    for (float& value : values) {
        seed = seed * 1664525u + 1013904223u;
        value = float(seed >> 8) / (1 << 23) - 1;
    }
    return values;
}

sa::Problem problem_of_all() {
    sa::Problem problem;
    problem.heads_q = problem.heads_kv = heads, problem.seq_q = problem.seq_k = tokens;
    problem.head_dim = dim, problem.backward = true;
    return problem;
}

template <class T>
auto view_of(std::vector<T>& x) {
    return sa::view(x.data(), {1, int64_t(x.size()) / (heads * dim), heads, dim});
}
auto scales_of(std::vector<float>& x) { return sa::view(x.data(), {1, int64_t(x.size()) / heads, heads}); }

// Operands and results of a pass over some queries.
struct Pass {
    std::vector<float> q, dout, out, dq, lse;

    explicit Pass(size_t rows)
        : q(rows * heads * dim), dout(q.size()), out(q.size()), dq(q.size()), lse(rows * heads) {}

    void run(const sa::Plan& plan, const sa::Keys& keys, const sa::WrittenKeys& gradients) {
        sa::Forward forward;
        forward.q = view_of(q), forward.k = keys.k, forward.v = keys.v, forward.out = view_of(out);
        forward.lse = sa::view(lse.data(), {1, heads, int64_t(lse.size()) / heads});
        plan.forward(forward);
        sa::Backward backward;
        backward.q = forward.q, backward.k = keys.k, backward.v = keys.v, backward.out = forward.out;
        backward.lse = forward.lse, backward.dout = view_of(dout), backward.dq = view_of(dq);
        backward.dk = gradients.k, backward.dv = gradients.v;
        plan.backward(backward);
    }
};

// Where ranks leave what they send, and wait until all have.
class Post {
public:
    explicit Post(int32_t ranks) : buffers_(size_t(ranks)), ranks_(ranks) {}

    using Bytes = std::vector<char>;
    // A rank's bytes for each other one; returns what each other one has for this.
    std::vector<Bytes> exchange(int32_t rank, std::vector<Bytes> mine) {
        {
            std::unique_lock lock(mutex_);
            buffers_[size_t(rank)] = std::move(mine);
        }
        wait();
        std::vector<Bytes> found;
        for (const auto& of_rank : buffers_) found.push_back(of_rank[size_t(rank)]);
        wait();
        return found;
    }

private:
    void wait() {
        std::unique_lock lock(mutex_);
        const int32_t turn = turn_;
        if (++arrived_ == ranks_) {
            arrived_ = 0, ++turn_;
            all_.notify_all();
        } else
            all_.wait(lock, [&] { return turn_ != turn; });
    }

    std::mutex mutex_;
    std::condition_variable all_;
    std::vector<std::vector<Bytes>> buffers_;
    int32_t ranks_, arrived_ = 0, turn_ = 0;
};

struct alignas(16) Unit {
    char bytes[16];
};
using Memory = std::vector<Unit>;
sa::Workspace workspace(Memory& memory) { return {memory.data(), memory.size() * sizeof(Unit)}; }

// From one buffer to another, by `post`. is_back: gradients, which go the other way.
void carry(const sa::Sharding& sharding, Post& post, const sa::Ranks& ranks, Memory& sent, Memory& received,
           bool is_back) {
    auto* const from = reinterpret_cast<char*>((is_back ? received : sent).data());
    auto* const to = reinterpret_cast<char*>((is_back ? sent : received).data());
    std::vector<Post::Bytes> mine;
    for (int32_t other = 0; other < ranks.ranks; ++other) {
        const sa::Peer peer = sharding.peer(other);
        const char* const begin = from + (is_back ? peer.back_received_offset : peer.sent_offset);
        mine.emplace_back(begin, begin + (is_back ? peer.back_received_bytes : peer.sent_bytes));
    }
    const std::vector<Post::Bytes> came = post.exchange(ranks.rank, std::move(mine));
    for (int32_t other = 0; other < ranks.ranks; ++other) {
        const sa::Peer peer = sharding.peer(other);
        const Post::Bytes& bytes = came[size_t(other)];
        CHECK_EQ(uint64_t(bytes.size()), is_back ? peer.back_sent_bytes : peer.received_bytes);
        std::copy(bytes.begin(), bytes.end(), to + (is_back ? peer.back_sent_offset : peer.received_offset));
    }
}

struct Whole {
    std::vector<float> k = noise(1), v = noise(2), dk = noise(3), dv = noise(4);
    Pass pass{size_t(tokens)};

    explicit Whole(const sa::Pattern& pattern) {
        pass.q = noise(5), pass.dout = noise(6);
        const sa::Plan plan = sa::Context(sa::cpu).plan(pattern, problem_of_all());
        pass.run(plan, {view_of(k), view_of(v)}, {view_of(dk), view_of(dv)});
    }
};

template <class T>
std::vector<T> take(const std::vector<T>& all, const std::vector<sa::Range>& held, int64_t a_token = heads * dim) {
    std::vector<T> taken;
    for (const sa::Range& range : held)
        taken.insert(taken.end(), all.begin() + range.begin * a_token, all.begin() + range.end * a_token);
    return taken;
}

// Where the tokens of some ranges are among those that a plan takes. Each range lies in one of these.
std::vector<sa::Range> places(const std::vector<sa::Range>& held, const std::vector<sa::Range>& seen) {
    std::vector<sa::Range> found;
    for (const sa::Range& own : held) {
        int64_t first = 0;  // place of the range of `seen`
        for (const sa::Range& range : seen) {
            const int64_t shift = first - range.begin;
            if (range.begin <= own.begin && own.end <= range.end) found.push_back({own.begin + shift, own.end + shift});
            first += range.end - range.begin;
        }
    }
    CHECK_EQ(found.size(), held.size());
    return found;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
    if (a.size() != b.size()) return HUGE_VAL;
    double worst = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        const double error = std::fabs(double(a[i]) - b[i]);
        worst = std::isnan(error) ? HUGE_VAL : std::max(worst, error);
    }
    return worst;
}

// A rank's worst difference from one device.
double run_rank(const sa::Pattern& pattern, const sa::Ranks& ranks, Post& post, const Whole& truth) {
    const sa::Context context(sa::cpu);
    const sa::Sharding sharding = context.shard(pattern, problem_of_all(), ranks);
    const std::vector<sa::Range> held = sharding.ranges(ranks.rank);
    const sa::Sharding::Seen seen = sharding.seen();
    const sa::Sharding::Buffers sizes = sharding.buffers();
    Memory sent((sizes.sent.bytes + 15) / 16), received((sizes.received.bytes + 15) / 16);
    std::vector<float> k = take(truth.k, held), v = take(truth.v, held), dk(k.size()), dv(v.size());
    std::vector<float> seen_k(size_t(seen.tokens * heads * dim), NAN);
    std::vector<float> seen_v = seen_k, seen_dk = seen_k, seen_dv = seen_k;
    const sa::Keys keys{view_of(k), view_of(v)};
    const sa::WrittenKeys seen_keys{view_of(seen_k), view_of(seen_v)}, gradients{view_of(seen_dk), view_of(seen_dv)};
    sharding.pack(keys, workspace(sent));
    carry(sharding, post, ranks, sent, received, false);
    sharding.unpack(keys, workspace(received), seen_keys);
    Pass pass(k.size() / (heads * dim));
    pass.q = take(truth.pass.q, held), pass.dout = take(truth.pass.dout, held);
    pass.run(sharding.plan(), {seen_keys.k, seen_keys.v}, gradients);
    sharding.pack_gradients({gradients.k, gradients.v}, workspace(received));
    carry(sharding, post, ranks, sent, received, true);
    sharding.add_gradients({gradients.k, gradients.v}, workspace(sent), {view_of(dk), view_of(dv)});
    sharding.add_gradients(gradients, workspace(sent));
    const std::vector<sa::Range> own = places(held, seen.ranges);
    if (take(seen_dk, own) != dk || take(seen_dv, own) != dv) return HUGE_VAL;
    return std::max({distance(pass.out, take(truth.pass.out, held)), distance(pass.dq, take(truth.pass.dq, held)),
                     distance(dk, take(truth.dk, held)), distance(dv, take(truth.dv, held))});
}

// Both passes of float8 over some queries.
struct Float8Pass {
    std::vector<Float8> q;
    std::vector<float> q_scales, lse;
    std::vector<Brain> dout, out, dq;

    Float8Pass(std::vector<Float8> elements, std::vector<float> scales, std::vector<Brain> arriving)
        : q(std::move(elements)), q_scales(std::move(scales)), lse(q_scales.size()), dout(std::move(arriving)),
          out(q.size()), dq(q.size()) {}

    void run(const sa::Plan& plan, const sa::Keys& keys, const sa::WrittenKeys& gradients) {
        sa::Forward forward;
        forward.q = view_of(q), forward.k = keys.k, forward.v = keys.v, forward.out = view_of(out);
        forward.lse = sa::view(lse.data(), {1, heads, int64_t(lse.size()) / heads});
        forward.q_scales = scales_of(q_scales), forward.k_scales = keys.k_scales, forward.v_scales = keys.v_scales;
        plan.forward(forward);
        sa::Backward backward;
        backward.q = forward.q, backward.k = keys.k, backward.v = keys.v, backward.out = forward.out;
        backward.q_scales = forward.q_scales, backward.k_scales = keys.k_scales, backward.v_scales = keys.v_scales;
        backward.lse = forward.lse, backward.dout = view_of(dout), backward.dq = view_of(dq);
        backward.dk = gradients.k, backward.dv = gradients.v;
        plan.backward(backward);
    }
};

std::vector<float> to_floats(const std::vector<Brain>& values) {
    std::vector<float> floats;
    for (const Brain x : values) {
        const uint32_t bits = uint32_t(x.bits) << 16;
        floats.emplace_back();
        std::memcpy(&floats.back(), &bits, 4);
    }
    return floats;
}

// From one rank's buffer to the other's.
void carry_bytes(const Memory& from, uint64_t from_offset, Memory& to, uint64_t to_offset, uint64_t bytes) {
    std::memcpy(reinterpret_cast<char*>(to.data()) + to_offset,
                reinterpret_cast<const char*>(from.data()) + from_offset, size_t(bytes));
}

template <class Call>
void demand(const char* argument, Call call) {
    check::context = argument;
    try {
        call();
        CHECK(!"an error");
    } catch (const sa::Error& error) {
        CHECK_EQ(error.argument(), argument);
    }
}

}  // namespace

TEST(ranks_attend_as_one_device) {
    const sa::Pattern local = sa::causal() & (sa::sink(3) | sa::window(70, 0));
    for (const sa::Pattern& pattern : {local, sa::causal(), sa::block_diagonal(100), local | sa::global_tokens({250})})
        for (const sa::Ranks& ranks : {sa::Ranks{3}, sa::Ranks{2, 0, sa::Split::zigzag},
                                       sa::Ranks{2, 0, {}, {{{900, 1200}, {0, 190}}, {{190, 900}}}}}) {
            check::context = pattern.text() + " on " + std::to_string(ranks.ranks);
            const Whole truth(pattern);
            Post post(ranks.ranks);
            std::vector<double> worst(size_t(ranks.ranks), HUGE_VAL);
            std::vector<std::thread> threads;
            for (int32_t rank = 0; rank < ranks.ranks; ++rank)
                threads.emplace_back([&, rank] {
                    sa::Ranks own = ranks;
                    own.rank = rank;
                    worst[size_t(rank)] = run_rank(pattern, own, post, truth);
                });
            for (std::thread& thread : threads) thread.join();
            for (const double error : worst) CHECK(error < 1e-4);
        }
}

// Two ranks, one after the other, whose rows have scales of their own: as one plan of the same elements and scales.
TEST(ranks_bring_float8) {
    const auto draw_elements = [](uint32_t seed) {
        std::vector<Float8> drawn;
        for (const float x : noise(seed)) drawn.push_back({uint8_t((x < 0 ? 0x80 : 0) | int(std::fabs(x) * 56))});
        return drawn;
    };
    const auto draw_scales = [](uint32_t seed) {
        std::vector<float> drawn = noise(seed);
        drawn.resize(size_t(tokens * heads));
        for (float& x : drawn) x = 1 + x / 2;
        return drawn;
    };
    std::vector<Brain> dout;
    for (const float x : noise(9)) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        dout.push_back({uint16_t(bits >> 16)});
    }
    std::vector<Float8> k = draw_elements(1), v = draw_elements(2);
    std::vector<float> k_scales = draw_scales(3), v_scales = draw_scales(4);
    std::vector<Brain> dk(k.size()), dv(v.size());
    Float8Pass whole(draw_elements(5), draw_scales(6), dout);
    const sa::Context context(sa::cpu);
    const sa::Pattern pattern = sa::causal() & (sa::sink(3) | sa::window(70, 0));
    sa::Problem problem = problem_of_all();
    problem.dtype = sa::float8_e4m3fn;
    whole.run(context.plan(pattern, problem), {view_of(k), view_of(v), scales_of(k_scales), scales_of(v_scales)},
              {view_of(dk), view_of(dv)});

    struct Rank {
        sa::Sharding sharding;
        std::vector<sa::Range> held;
        Memory sent, received;
        std::vector<Float8> k, v, seen_k, seen_v;
        std::vector<float> k_scales, v_scales, seen_k_scales, seen_v_scales;
        std::vector<Brain> dk, dv, seen_dk, seen_dv;

        sa::Keys keys() { return {view_of(k), view_of(v), scales_of(k_scales), scales_of(v_scales)}; }
        sa::WrittenKeys seen() {
            return {view_of(seen_k), view_of(seen_v), scales_of(seen_k_scales), scales_of(seen_v_scales)};
        }
        sa::WrittenKeys seen_gradients() { return {view_of(seen_dk), view_of(seen_dv)}; }
    };
    std::vector<Rank> ranks(2);
    for (int32_t number = 0; number < 2; ++number) {
        Rank& rank = ranks[size_t(number)];
        rank.sharding = context.shard(pattern, problem, {2, number, sa::Split::zigzag, {}, true});
        rank.held = rank.sharding.ranges(number);
        const sa::Sharding::Buffers sizes = rank.sharding.buffers();
        rank.sent.resize((sizes.sent.bytes + 15) / 16), rank.received.resize((sizes.received.bytes + 15) / 16);
        rank.k = take(k, rank.held), rank.v = take(v, rank.held);
        rank.k_scales = take(k_scales, rank.held, heads), rank.v_scales = take(v_scales, rank.held, heads);
        const int64_t seen = sa::Sharding::Seen(rank.sharding.seen()).tokens;
        rank.seen_k.assign(size_t(seen * heads * dim), {0x7f}), rank.seen_v = rank.seen_k;
        rank.seen_k_scales.assign(size_t(seen * heads), NAN), rank.seen_v_scales = rank.seen_k_scales;
        rank.dk.resize(rank.k.size()), rank.dv.resize(rank.v.size());
        rank.seen_dk.resize(rank.seen_k.size()), rank.seen_dv.resize(rank.seen_v.size());
        rank.sharding.pack(rank.keys(), workspace(rank.sent));
    }
    const auto carry_between = [&](bool is_back) {
        for (int32_t from = 0; from < 2; ++from) {
            Rank &sender = ranks[size_t(from)], &other = ranks[size_t(1 - from)];
            const sa::Peer out = sender.sharding.peer(1 - from), in = other.sharding.peer(from);
            CHECK(out.sent_bytes == out.tokens_sent * uint64_t(2 * heads * (dim + 4)));
            CHECK(out.back_sent_bytes == out.tokens_sent * uint64_t(2 * heads * dim * 2));
            if (is_back)
                carry_bytes(other.received, in.back_received_offset, sender.sent, out.back_sent_offset,
                            out.back_sent_bytes);
            else
                carry_bytes(sender.sent, out.sent_offset, other.received, in.received_offset, out.sent_bytes);
        }
    };
    carry_between(false);
    for (Rank& rank : ranks) {
        rank.sharding.unpack(rank.keys(), workspace(rank.received), rank.seen());
        Float8Pass pass(take(whole.q, rank.held), take(whole.q_scales, rank.held, heads), take(dout, rank.held));
        pass.run(rank.sharding.plan(), rank.seen(), rank.seen_gradients());
        CHECK(distance(to_floats(pass.out), to_floats(take(whole.out, rank.held))) < 2e-2);
        CHECK(distance(to_floats(pass.dq), to_floats(take(whole.dq, rank.held))) < 2e-2);
        rank.sharding.pack_gradients(rank.seen_gradients(), workspace(rank.received));
    }
    carry_between(true);
    for (Rank& rank : ranks) {
        const sa::WrittenKeys gradients{view_of(rank.dk), view_of(rank.dv)};
        rank.sharding.add_gradients(rank.seen_gradients(), workspace(rank.sent), gradients);
        CHECK(distance(to_floats(rank.dk), to_floats(take(dk, rank.held))) < 2e-2);
        CHECK(distance(to_floats(rank.dv), to_floats(take(dv, rank.held))) < 5e-2);
    }
}

TEST(ranks_say_which_keys_their_plans_take) {
    const sa::Context context(sa::cpu);
    sa::Problem problem = problem_of_all();
    problem.seq_q = problem.seq_k = 4096;
    const auto see = [&](const sa::Pattern& pattern, const sa::Ranks& ranks) -> sa::Sharding::Seen {
        return context.shard(pattern, problem, ranks).seen();
    };
    const auto demand_seen = [](const sa::Sharding::Seen& seen, const std::vector<std::array<int64_t, 2>>& wanted) {
        std::vector<std::array<int64_t, 2>> ranges;
        int64_t count = 0;
        for (const sa::Range& range : seen.ranges) {
            ranges.push_back({range.begin, range.end});
            count += range.end - range.begin;
        }
        CHECK(ranges == wanted);
        CHECK_EQ(seen.tokens, count);
    };
    // What a rank holds and the blocks of 128 tokens that it receives: before it, and the first.
    const sa::Pattern local = sa::causal() & (sa::sink(3) | sa::window(70, 0));
    demand_seen(see(local, {8, 0}), {{0, 512}});
    demand_seen(see(local, {8, 5}), {{0, 128}, {2432, 3072}});
    demand_seen(see(sa::window(0, 0), {8, 1, sa::Split::zigzag}), {{256, 512}, {3584, 3840}});
    demand_seen(see(sa::full(), {8, 5}), {{0, 4096}});
    demand_seen(see(sa::runtime_tokens(2), {8, 5}), {{0, 4096}});
}

TEST(what_is_refused) {
    const sa::Context context(sa::cpu);
    const auto shard = [&](const sa::Ranks& ranks) { return context.shard(sa::full(), problem_of_all(), ranks); };
    demand("options.ranks", [&] { shard({0}); });
    demand("options.rank", [&] { shard({2, 2}); });
    demand("options.ranges", [&] { shard({2, 0, {}, {{{0, 1200}}, {}}}); });
    demand("options.ranges", [&] { shard({2, 0, {}, {{}, {}}}); });
    demand("options.ranges", [&] { shard({2, 0, {}, {{{0, 600}}, {{601, 1200}}}}); });
    demand("options.flags", [&] { shard({2, 0, {}, {}, true}); });
    demand("options.split", [&] { shard({2, 0, sa::Split::zigzag, {{{0, 600}}, {{600, 1200}}}}); });
    const sa::Sharding sharding = shard({2});
    demand("rank", [&] { (void)sa::Peer(sharding.peer(2)); });
    demand("rank", [&] { (void)std::vector<sa::Range>(sharding.ranges(-1)); });
    std::vector<float> k(600 * heads * dim), few(599 * heads * dim), all(1200 * heads * dim);
    demand("buffer", [&] { sharding.pack({view_of(k), view_of(k)}, {}); });
    Memory sent(4);
    demand("buffer_bytes", [&] { sharding.pack({view_of(k), view_of(k)}, workspace(sent)); });
    demand("v", [&] { sharding.pack({view_of(k), {}}, workspace(sent)); });
    demand("k", [&] { sharding.pack({view_of(few), view_of(k)}, workspace(sent)); });
    demand("seen_v", [&] { sharding.pack_gradients({view_of(all), view_of(k)}, workspace(sent)); });
    demand("sharding", [] { sa::Sharding().plan(); });
    demand("sharding", [] { (void)sa::Sharding::Seen(sa::Sharding().seen()); });
}
