// SPDX-License-Identifier: MIT
#include "abi/drawn_sharding.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "abi/rank_tensors.h"

namespace abi {
namespace {

constexpr int64_t together = 128;  // tokens that are sent together

// One rank: what it holds, and room for what it sees.
struct Rank {
    Rank(const RankDevice& on, Sharding made, const spattn_problem& p, int64_t tokens, int64_t spacing)
        : on(on), sharding(std::move(made)), keys(seen_of(sharding.get())), has_values(has_values_of(p)),
          held{p.batch, p.heads_kv, tokens, p.head_dim}, seen{p.batch, p.heads_kv, int64_t(keys.size()), p.head_dim},
          k(on, p.axes, p.dtype, held, spacing), v(on, p.axes, p.dtype, values(held, p), spacing),
          dk(on, p.axes, result_dtype(p.dtype), held, spacing),
          dv(on, p.axes, result_dtype(p.dtype), values(held, p), spacing),
          seen_k(on, p.axes, p.dtype, seen), seen_v(on, p.axes, p.dtype, values(seen, p)),
          seen_dk(on, p.axes, result_dtype(p.dtype), seen), seen_dv(on, p.axes, result_dtype(p.dtype), values(seen, p)),
          k_scales(on, p.axes, held), v_scales(on, p.axes, held), seen_k_scales(on, p.axes, seen),
          seen_v_scales(on, p.axes, seen) {
        size_t bytes[2] = {};
        succeed(spattn_sharding_buffers(sharding.get(), &bytes[0], &bytes[1]), "buffers");
        sent = std::make_unique<Memory>(on, bytes[0]), received = std::make_unique<Memory>(on, bytes[1]);
    }

    static Operand::Sizes values(Operand::Sizes sizes, const spattn_problem& p) {
        sizes.columns = p.head_dim_v ? p.head_dim_v : p.head_dim;
        return sizes;
    }

    // The token of each key.
    static std::vector<int64_t> seen_of(const spattn_sharding* sharding) {
        int64_t count = 0, tokens = 0;
        succeed(spattn_sharding_seen(sharding, nullptr, &count, &tokens), "seen");
        std::vector<int64_t> bounds(size_t(2 * count)), found;
        const int64_t shape[] = {count, 2};
        const spattn_tensor view{bounds.data(), {SPATTN_CPU, 0}, 2, i64, shape, nullptr, 0};
        succeed(spattn_sharding_seen(sharding, &view, &count, &tokens), "seen");
        for (size_t i = 0; i < bounds.size(); i += 2)
            for (int64_t token = bounds[i]; token < bounds[i + 1]; ++token) found.push_back(token);
        CHECK_EQ(int64_t(found.size()), tokens);
        CHECK(std::is_sorted(found.begin(), found.end()));
        return found;
    }
    // Which key a token is; none of nobody's.
    int64_t key_of(int64_t token) const {
        const auto key = std::lower_bound(keys.begin(), keys.end(), token);
        return key != keys.end() && *key == token ? key - keys.begin() : -1;
    }
    std::vector<int64_t> keys_of(const std::vector<int64_t>& tokens) const {
        std::vector<int64_t> found;
        for (const int64_t token : tokens) found.push_back(key_of(token));
        return found;
    }

    static bool has_values_of(const spattn_problem& p) { return !(p.flags & SPATTN_PLAN_VALUE_IN_KEY); }

    // in_place: sums of gradients go to where this rank's own are.
    void exchange(spattn_enum step, bool in_place = false) {
        const bool is_back = step == SPATTN_EXCHANGE_PACK_GRADIENTS || step == SPATTN_EXCHANGE_ADD_GRADIENTS;
        const bool is_sent = step == SPATTN_EXCHANGE_PACK || step == SPATTN_EXCHANGE_ADD_GRADIENTS;
        const Memory& buffer = is_sent ? *sent : *received;
        auto args = sized<spattn_exchange_args>();
        if (step != SPATTN_EXCHANGE_PACK_GRADIENTS && !in_place) {
            args.k = (is_back ? dk : k).view();
            if (has_values) args.v = (is_back ? dv : v).view();
        }
        if (step != SPATTN_EXCHANGE_PACK) {
            args.seen_k = (is_back ? seen_dk : seen_k).view();
            if (has_values) args.seen_v = (is_back ? seen_dv : seen_v).view();
        }
        if (sends_scales && !is_back) {
            args.k_scales = k_scales.view();
            if (has_values) args.v_scales = v_scales.view();
            if (step == SPATTN_EXCHANGE_UNPACK) {
                args.seen_k_scales = seen_k_scales.view();
                if (has_values) args.seen_v_scales = seen_v_scales.view();
            }
        }
        args.buffer = buffer.data, args.buffer_bytes = buffer.bytes;
        succeed(spattn_exchange(sharding.get(), step, &args), "exchange");
    }

    const RankDevice& on;
    Sharding sharding;
    std::vector<int64_t> keys;  // their tokens
    bool has_values, sends_scales = false;
    Operand::Sizes held, seen;
    Operand k, v, dk, dv, seen_k, seen_v, seen_dk, seen_dv;
    Scales k_scales, v_scales, seen_k_scales, seen_v_scales;
    std::unique_ptr<Memory> sent, received;
};
using Ranks = std::vector<std::unique_ptr<Rank>>;

spattn_peer peer_of(const Rank& rank, size_t other) {
    auto peer = sized<spattn_peer>();
    succeed(spattn_sharding_peer(rank.sharding.get(), int32_t(other), &peer), "peer");
    return peer;
}

// What the transport does: from `sent` of each rank to `received` of the others, or back.
void carry(const Ranks& ranks, bool is_back) {
    for (size_t from = 0; from < ranks.size(); ++from)
        for (size_t to = 0; to < ranks.size(); ++to) {
            const spattn_peer out = peer_of(*ranks[from], to), in = peer_of(*ranks[to], from);
            CHECK_EQ(out.tokens_sent, in.tokens_received);
            CHECK_EQ(out.sent_bytes, in.received_bytes);
            CHECK_EQ(out.back_sent_bytes, in.back_received_bytes);
            if (from == to) CHECK_EQ(out.tokens_sent, int64_t(0));
            const uint64_t bytes = is_back ? out.back_sent_bytes : out.sent_bytes;
            const uint64_t from_there = is_back ? out.back_sent_offset : out.sent_offset;
            const uint64_t from_here = is_back ? in.back_received_offset : in.received_offset;
            char* const sent = static_cast<char*>(ranks[from]->sent->data) + from_there;
            char* const received = static_cast<char*>(ranks[to]->received->data) + from_here;
            CHECK(from_there + bytes <= ranks[from]->sent->bytes);
            CHECK(from_here + bytes <= ranks[to]->received->bytes);
            if (is_back) ranks[0]->on.copy(sent, received, bytes);
            else ranks[0]->on.copy(received, sent, bytes);
        }
}

void exchange_keys(const Ranks& ranks) {
    for (const auto& rank : ranks) rank->exchange(SPATTN_EXCHANGE_PACK);
    carry(ranks, false);
    for (const auto& rank : ranks) rank->exchange(SPATTN_EXCHANGE_UNPACK);
}
void exchange_gradients(const Ranks& ranks) {
    for (const auto& rank : ranks) rank->exchange(SPATTN_EXCHANGE_PACK_GRADIENTS);
    carry(ranks, true);
    for (const auto& rank : ranks) rank->exchange(SPATTN_EXCHANGE_ADD_GRADIENTS);
}

// One plan's run: forward, and backward with a gradient of all results.
struct Run {
    Run(const RankDevice& on, const spattn_problem& p, int64_t queries, spattn_dtype dtype)
        : dim_v(p.head_dim_v ? p.head_dim_v : p.head_dim),
          q(on, p.axes, dtype, {p.batch, p.heads_q, queries, p.head_dim}),
          out(on, p.axes, result_dtype(dtype), {p.batch, p.heads_q, queries, dim_v}),
          dout(on, p.axes, result_dtype(dtype), {p.batch, p.heads_q, queries, dim_v}),
          dq(on, p.axes, result_dtype(dtype), {p.batch, p.heads_q, queries, p.head_dim}),
          lse(on, p.axes, f32, {p.batch, p.heads_q, queries, 0}), q_scales(on, p.axes, q.sizes()) {}

    // From now on keys, values and the queries above have these.
    void scale(const Scales& of_k, const Scales* of_v) {
        scales = {q_scales.view(), of_k.view(), of_v ? of_v->view() : nullptr};
    }

    void make(const spattn_plan* plan, const RankDevice& on, const Operand& k, const Operand* v, const Operand& dk,
              const Operand* dv) {
        const auto with_workspace = [&](spattn_enum op, auto& args, auto call) {
            size_t bytes = 0;
            succeed(spattn_plan_workspace(plan, op, &bytes, nullptr), "workspace");
            const Memory workspace(on, bytes + 256);
            const auto at = reinterpret_cast<uintptr_t>(workspace.data);
            args.workspace = reinterpret_cast<void*>((at + 255) / 256 * 256), args.workspace_bytes = bytes;
            succeed(call(plan, &args), "a pass");
            char byte;
            on.copy(&byte, workspace.data, 1);  // it has ended
        };
        auto forward = sized<spattn_forward_args>();
        forward.q = q.view(), forward.k = k.view(), forward.v = v ? v->view() : nullptr;
        forward.out = out.view(), forward.lse = lse.view();
        forward.q_scales = scales[0], forward.k_scales = scales[1], forward.v_scales = scales[2];
        with_workspace(SPATTN_OP_FORWARD, forward, spattn_forward);
        auto backward = sized<spattn_backward_args>();
        backward.q = q.view(), backward.k = k.view(), backward.v = forward.v, backward.out = out.view();
        backward.lse = lse.view(), backward.dout = dout.view(), backward.dq = dq.view();
        backward.dk = dk.view(), backward.dv = dv ? dv->view() : nullptr;
        backward.q_scales = scales[0], backward.k_scales = scales[1], backward.v_scales = scales[2];
        with_workspace(SPATTN_OP_BACKWARD, backward, spattn_backward);
        for (Operand* x : {&out, &lse, &dq}) x->receive();
    }

    int64_t dim_v;
    Operand q, out, dout, dq, lse;
    Scales q_scales;
    std::array<const spattn_tensor*, 3> scales{};
};

// Whether row i of `found` is token tokens[i] of `wanted`, as far as the dtype lets it.
bool are_near(const Operand& found, const Operand& wanted, const std::vector<int64_t>& tokens, double bound) {
    double largest = 1;
    for (int64_t t = 0; t < wanted.sizes().tokens; ++t)
        wanted.each([&](int64_t b, int64_t h, int64_t c) {
            const double x = std::fabs(wanted.at(b, h, t, c));
            if (std::isfinite(x)) largest = std::max(largest, x);
        });
    bool holds = true;
    for (size_t row = 0; row < tokens.size(); ++row)
        found.each([&](int64_t b, int64_t h, int64_t c) {
            const double got = found.at(b, h, int64_t(row), c), want = wanted.at(b, h, tokens[row], c);
            holds &= got == want || std::fabs(got - want) <= bound * largest;
        });
    return holds;
}

// Whether `seen`, read again, has the rows of `sums` for these keys, and others as they were.
bool takes_sums(Operand& seen, const Operand& sums, const std::vector<int64_t>& keys) {
    const int64_t count = seen.sizes().tokens;
    std::vector<int64_t> row_of(size_t(count), -1);
    for (size_t row = 0; row < keys.size(); ++row) row_of[size_t(keys[row])] = int64_t(row);
    std::vector<double> wanted;
    const auto each = [&](auto body) {
        for (int64_t t = 0; t < count; ++t)
            seen.each([&](int64_t b, int64_t h, int64_t c) { body(b, h, t, c); });
    };
    each([&](int64_t b, int64_t h, int64_t t, int64_t c) {
        const int64_t row = row_of[size_t(t)];
        wanted.push_back(row < 0 ? seen.at(b, h, t, c) : sums.at(b, h, row, c));
    });
    seen.receive();
    bool holds = true;
    auto next = wanted.begin();
    each([&](int64_t b, int64_t h, int64_t t, int64_t c) { holds &= seen.at(b, h, t, c) == *next++; });
    return holds;
}

}  // namespace

const RankDevice& host_ranks() {
    static const RankDevice host{{SPATTN_CPU, 0},
                                 [](size_t bytes) { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); },
                                 [](void* memory) { std::free(memory); },
                                 [](void* to, const void* from, size_t bytes) {
                                     if (bytes) std::memcpy(to, from, bytes);
                                 }};
    return host;
}

DrawnSharding::DrawnSharding(drawn::Random& random, int64_t longest)
    : spacing_(random.one_in(4) ? 2 : 1), seed_(uint32_t(random.in(0, 1 << 30))) {
    spattn_problem& p = problem_;
    p.flags = SPATTN_PLAN_BACKWARD;
    p.axes = spattn_enum(random.in(0, 2));
    p.batch = p.axes == SPATTN_THD ? 1 : random.in(1, 2);
    p.heads_kv = random.in(1, 2), p.heads_q = p.heads_kv * random.in(1, 3);
    p.seq_q = p.seq_k = random.in(10, longest);
    p.head_dim = random.one_in(2) ? 8 * random.in(1, 4) : random.in(1, 20);
    p.head_dim_v = random.one_in(2) ? 0 : random.in(1, p.head_dim);
    p.dtype = std::array{f32, f64, bf16, f16, float8}[size_t(random.in(0, 4))];
    if (p.dtype.bits == 8) scaled_ = std::array{Scaled::never, Scaled::heads, Scaled::rows}[size_t(random.in(0, 2))];
    if (random.one_in(5)) p.flags |= SPATTN_PLAN_VALUE_IN_KEY;
    if (random.one_in(3)) p.flags |= SPATTN_PLAN_DETERMINISTIC;
    drawn::Builder builder(random, {p.batch, p.heads_q, p.seq_q, p.seq_k, 0}, random.in(1, 1 + longest / 60));
    model_ = builder.build(int(random.in(0, 2)));
    draw_tokens(random);
}

void DrawnSharding::draw_tokens(drawn::Random& random) {
    const int64_t seq = problem_.seq_k, count = random.in(1, 5);
    tokens_.resize(size_t(count));
    const auto hold = [&](int64_t rank, int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) tokens_[size_t(rank)].push_back(token);
    };
    const int64_t way = random.in(0, 2), shares = way == 1 ? 2 * count : count;
    if (way < 2) {
        split_ = way ? SPATTN_SPLIT_ZIGZAG : SPATTN_SPLIT_CONTIGUOUS;
        for (int64_t n = 0; n < shares; ++n)
            hold(n < count ? n : shares - 1 - n, n * seq / shares, (n + 1) * seq / shares);
        return;
    }
    // Stretches that each go to somebody, in any order; the first ones to everybody.
    std::vector<int64_t> cuts{0, seq};
    for (int64_t n = random.in(count - 1, count + 3); int64_t(cuts.size()) < n + 2;)
        if (const int64_t cut = random.in(1, seq - 1); std::find(cuts.begin(), cuts.end(), cut) == cuts.end())
            cuts.push_back(cut);
    std::sort(cuts.begin(), cuts.end());
    std::vector<size_t> order(cuts.size() - 1);
    std::iota(order.begin(), order.end(), size_t(0));
    for (size_t i = order.size(); i-- > 1;) std::swap(order[i], order[size_t(random.in(0, int64_t(i)))]);
    for (size_t n = 0; n < order.size(); ++n) {
        const int64_t rank = int64_t(n) < count ? int64_t(n) : random.in(0, count - 1);
        ranges_.insert(ranges_.end(), {rank, cuts[order[n]], cuts[order[n] + 1]});
        hold(rank, cuts[order[n]], cuts[order[n] + 1]);
    }
}

std::string DrawnSharding::name() const {
    const spattn_problem& p = problem_;
    size_t needed = 0;
    succeed(spattn_pattern_print(model_.pattern.get(), nullptr, 0, &needed), "print");
    std::string text(needed, ' ');
    succeed(spattn_pattern_print(model_.pattern.get(), text.data(), needed, nullptr), "print");
    text.pop_back();
    text += ", " + std::to_string(p.seq_k) + " tokens, axes " + std::to_string(p.axes) + ", batch " +
            std::to_string(p.batch) + ", heads " + std::to_string(p.heads_q) + " on " + std::to_string(p.heads_kv) +
            ", dims " + std::to_string(p.head_dim) + " and " + std::to_string(p.head_dim_v) + ", " +
            std::to_string(p.dtype.bits) + " bits of code " + std::to_string(p.dtype.code) + ", scales " +
            std::to_string(int(scaled_)) + ", flags " +
            std::to_string(p.flags) + ", " + std::to_string(ranks()) + " ranks, split " + std::to_string(split_);
    for (const int64_t number : ranges_) text += ' ' + std::to_string(number);
    return text;
}

Sharding DrawnSharding::make(const spattn_context* context, int32_t rank) const {
    auto options = sized<spattn_sharding_options>();
    options.ranks = ranks(), options.rank = rank, options.split = split_;
    options.flags = scaled_ == Scaled::rows ? SPATTN_SHARDING_SCALES : 0;
    const int64_t shape[] = {int64_t(ranges_.size() / 3), 3};
    const spattn_tensor view{const_cast<int64_t*>(ranges_.data()), {SPATTN_CPU, 0}, 2, i64, shape, nullptr, 0};
    if (!ranges_.empty()) options.ranges = &view;
    spattn_sharding* made = nullptr;
    succeed(spattn_sharding_create(context, model_.pattern.get(), &problem_, &options, nullptr, &made), "sharding");
    return Sharding(made);
}

std::vector<std::vector<bool>> DrawnSharding::find_seen() const {
    const spattn_problem& p = problem_;
    const drawn::Rectangle all{p.batch, p.heads_q, p.seq_q, p.seq_k, 0};
    const std::vector<uint8_t> mask = drawn::model_mask(model_.sees, all);
    const int64_t seq = p.seq_k;
    std::vector<std::vector<bool>> seen;
    for (const std::vector<int64_t>& held : tokens_) {
        seen.emplace_back(size_t(seq));
        for (int64_t begin = 0; begin < seq; begin += together) {
            const int64_t end = std::min(begin + together, seq);
            bool is_seen = false;
            for (int64_t plane = 0; plane < p.batch * p.heads_q && !is_seen; ++plane)
                for (const int64_t q : held) {
                    const auto row = mask.begin() + (plane * seq + q) * seq;
                    is_seen |= std::find(row + begin, row + end, 1) != row + end;
                }
            std::fill(seen.back().begin() + begin, seen.back().begin() + end, is_seen);
        }
    }
    return seen;
}

void DrawnSharding::check_exchange(const spattn_context* context, const RankDevice& on) const {
    const spattn_problem& p = problem_;
    const auto seen = find_seen();
    const Operand::Sizes whole{p.batch, p.heads_kv, p.seq_k, p.head_dim};
    Operand k(on, p.axes, p.dtype, whole), v(on, p.axes, p.dtype, Rank::values(whole, p));
    Scales k_scales(on, p.axes, whole), v_scales(on, p.axes, whole);
    k.draw(seed_), v.draw(seed_ + 1), k_scales.draw(seed_ + 20, false), v_scales.draw(seed_ + 21, false);
    Ranks all;
    for (int32_t rank = 0; rank < ranks(); ++rank) {
        const std::vector<int64_t>& held = tokens_[size_t(rank)];
        all.push_back(std::make_unique<Rank>(on, make(context, rank), p, int64_t(held.size()), spacing_));
        all.back()->sends_scales = scaled_ == Scaled::rows;
        all.back()->k.take(k, held), all.back()->v.take(v, held);
        all.back()->k_scales.numbers().take(k_scales.numbers(), held);
        all.back()->v_scales.numbers().take(v_scales.numbers(), held);
        // In another order, sums of these would be other numbers where they are not rounded to 16 bits.
        const double unit = result_dtype(p.dtype).bits == 16 ? 0.125 : 0.1;
        all.back()->seen_dk.draw(seed_ + 2 + uint32_t(rank), unit);
        all.back()->seen_dv.draw(seed_ + 9 + uint32_t(rank), unit);
    }
    exchange_keys(all);
    exchange_gradients(all);
    for (size_t rank = 0; rank < all.size(); ++rank) {
        std::vector<bool> there = seen[rank];
        for (const int64_t token : tokens_[rank]) there[size_t(token)] = true;
        const std::vector<int64_t>& keys = all[rank]->keys;
        for (int64_t t = 0; t < p.seq_k; ++t) CHECK(!there[size_t(t)] || all[rank]->key_of(t) >= 0);
        const auto check_arrival = [&](Operand& seen_x, const Operand& whole, bool is_sent = true) {
            seen_x.receive();
            bool arrives = true;
            seen_x.each([&](int64_t b, int64_t h, int64_t c) {
                for (size_t key = 0; key < keys.size(); ++key)
                    arrives &= is_sent && there[size_t(keys[key])]
                                   ? seen_x.at(b, h, int64_t(key), c) == whole.at(b, h, keys[key], c)
                                   : seen_x.is_untouched(b, h, int64_t(key), c);
            });
            CHECK(arrives);
        };
        const auto check_sums = [&](Operand& sum, auto gradient) {
            sum.receive();
            bool adds_up = true;
            sum.each([&](int64_t b, int64_t h, int64_t c) {
                for (size_t row = 0; row < tokens_[rank].size(); ++row) {
                    const int64_t t = tokens_[rank][row];
                    const auto part_of = [&](const Rank& r) { return gradient(r).at(b, h, r.key_of(t), c); };
                    double wanted = part_of(*all[rank]);
                    for (size_t other = 0; other < all.size(); ++other) {
                        if (other == rank || !seen[other][size_t(t)]) continue;
                        wanted += part_of(*all[other]);
                        if (p.dtype.bits < 64) wanted = float(wanted);
                    }
                    adds_up &= sum.at(b, h, int64_t(row), c) == wanted;
                }
            });
            CHECK(adds_up);
        };
        Rank& here = *all[rank];
        check_arrival(here.seen_k, k), check_arrival(here.seen_v, v, has_values());
        check_arrival(here.seen_k_scales.numbers(), k_scales.numbers(), here.sends_scales);
        check_arrival(here.seen_v_scales.numbers(), v_scales.numbers(), here.sends_scales && has_values());
        check_sums(here.dk, [](const Rank& r) -> const Operand& { return r.seen_dk; });
        if (has_values()) check_sums(here.dv, [](const Rank& r) -> const Operand& { return r.seen_dv; });
    }
    for (size_t rank = 0; rank < all.size(); ++rank) {
        all[rank]->exchange(SPATTN_EXCHANGE_ADD_GRADIENTS, true);
        const std::vector<int64_t> own = all[rank]->keys_of(tokens_[rank]);
        CHECK(takes_sums(all[rank]->seen_dk, all[rank]->dk, own));
        if (has_values()) CHECK(takes_sums(all[rank]->seen_dv, all[rank]->dv, own));
    }
}

void DrawnSharding::check_attention(const spattn_context* context, const RankDevice& on,
                                    const spattn_context* truth) const {
    const spattn_problem& p = problem_;
    // The truth, of operands that are exact in float64.
    spattn_problem exactly = p;
    exactly.dtype = f64, exactly.flags |= SPATTN_PLAN_REFERENCE;
    const RankDevice& host = host_ranks();
    const Operand::Sizes sizes{p.batch, p.heads_kv, p.seq_k, p.head_dim}, values = Rank::values(sizes, p);
    Operand k(host, p.axes, f64, sizes), v(host, p.axes, f64, values);
    Operand dk(host, p.axes, f64, sizes), dv(host, p.axes, f64, values);
    Run whole(host, p, p.seq_q, f64);
    k.draw(seed_), v.draw(seed_ + 1), whole.q.draw(seed_ + 2), whole.dout.draw(seed_ + 3);
    Scales k_scales(host, p.axes, sizes), v_scales(host, p.axes, sizes);
    k_scales.draw(seed_ + 20, scaled_ == Scaled::heads), v_scales.draw(seed_ + 21, scaled_ == Scaled::heads);
    whole.q_scales.draw(seed_ + 22, scaled_ == Scaled::heads);
    Operand elements_of_q(host, p.axes, f64, whole.q.sizes()), elements_of_k(host, p.axes, f64, sizes),
        elements_of_v(host, p.axes, f64, values);
    elements_of_q.draw(seed_ + 2), elements_of_k.draw(seed_), elements_of_v.draw(seed_ + 1);
    if (scaled_ != Scaled::never)
        whole.q.multiply(whole.q_scales.numbers()), k.multiply(k_scales.numbers()), v.multiply(v_scales.numbers());
    const Plan plan = make_plan(truth, model_.pattern.get(), exactly);
    whole.make(plan.get(), host, k, has_values() ? &v : nullptr, dk, has_values() ? &dv : nullptr);
    dk.receive(), dv.receive();

    Ranks all;
    for (int32_t rank = 0; rank < ranks(); ++rank) {
        const std::vector<int64_t>& held = tokens_[size_t(rank)];
        all.push_back(std::make_unique<Rank>(on, make(context, rank), p, int64_t(held.size()), spacing_));
        Rank& made = *all.back();
        made.sends_scales = scaled_ == Scaled::rows;
        made.k.take(elements_of_k, held), made.v.take(elements_of_v, held);
        made.k_scales.numbers().take(k_scales.numbers(), held), made.v_scales.numbers().take(v_scales.numbers(), held);
        if (scaled_ != Scaled::heads) continue;
        made.seen_k_scales.numbers().take(k_scales.numbers(), {0}), made.seen_k_scales.repeat_first();
        made.seen_v_scales.numbers().take(v_scales.numbers(), {0}), made.seen_v_scales.repeat_first();
    }
    exchange_keys(all);
    const double of_half = p.dtype.code == SPATTN_FLOAT ? 5e-3 : 3e-2;
    const double bound = p.dtype.bits == 64 ? 1e-9 : p.dtype.bits == 32 ? 2e-5 : of_half;
    for (size_t n = 0; n < all.size(); ++n) {
        Rank& rank = *all[n];
        Run own(on, p, int64_t(tokens_[n].size()), p.dtype);
        own.q.take(elements_of_q, tokens_[n]), own.dout.take(whole.dout, tokens_[n]);
        own.q_scales.numbers().take(whole.q_scales.numbers(), tokens_[n]);
        if (scaled_ != Scaled::never) own.scale(rank.seen_k_scales, has_values() ? &rank.seen_v_scales : nullptr);
        spattn_plan* made = nullptr;
        succeed(spattn_sharding_plan(rank.sharding.get(), &made), "plan");
        const Plan queries(made);
        own.make(made, on, rank.seen_k, has_values() ? &rank.seen_v : nullptr, rank.seen_dk,
                 has_values() ? &rank.seen_dv : nullptr);
        CHECK(are_near(own.out, whole.out, tokens_[n], bound));
        CHECK(are_near(own.lse, whole.lse, tokens_[n], std::max(bound, 2e-5)));
        CHECK(are_near(own.dq, whole.dq, tokens_[n], bound));
    }
    exchange_gradients(all);
    for (size_t n = 0; n < all.size(); ++n) {
        all[n]->dk.receive(), all[n]->dv.receive();
        CHECK(are_near(all[n]->dk, dk, tokens_[n], bound));
        if (has_values()) CHECK(are_near(all[n]->dv, dv, tokens_[n], bound));
    }
}

}  // namespace abi
