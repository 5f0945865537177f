// SPDX-License-Identifier: MIT
#include "abi/drawn_sharding.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

namespace abi {
namespace {

constexpr int64_t together = 128;  // tokens that are sent together
constexpr spattn_dtype f16{SPATTN_FLOAT, 16, 1};

// ---- elements: multiples of 1/8 from -1 to 1 are exact in every dtype, and so are their sums ----

template <class To, class From>
To bits_of(From x) {
    To bits;
    static_assert(sizeof bits == sizeof x);
    std::memcpy(&bits, &x, sizeof x);
    return bits;
}

void write_element(spattn_dtype dtype, char* to, double x) {
    const auto single = float(x);
    if (dtype.bits == 64) std::memcpy(to, &x, 8);
    else if (dtype.bits == 32) std::memcpy(to, &single, 4);
    else if (dtype.code == SPATTN_BFLOAT) {
        const auto bits = uint16_t(bits_of<uint32_t>(single) >> 16);
        std::memcpy(to, &bits, 2);
    } else {
        int exponent = 0;
        const double fraction = std::frexp(std::fabs(x), &exponent);  // from 0.5 to 1
        const auto size = x == 0 ? 0 : (exponent + 14) * 1024 + int(std::ldexp(fraction, 11)) - 1024;
        const auto bits = uint16_t(size | (x < 0 ? 0x8000 : 0));
        std::memcpy(to, &bits, 2);
    }
}

double read_element(spattn_dtype dtype, const char* from) {
    if (dtype.bits == 64) return bits_of<double>(*reinterpret_cast<const uint64_t*>(from));
    if (dtype.bits == 32) return bits_of<float>(*reinterpret_cast<const uint32_t*>(from));
    const uint16_t bits = *reinterpret_cast<const uint16_t*>(from);
    if (dtype.code == SPATTN_BFLOAT) return bits_of<float>(uint32_t(bits) << 16);
    const int exponent = bits >> 10 & 31, digits = bits & 1023;
    const double size = exponent == 31 ? (digits ? NAN : HUGE_VAL)
                        : exponent     ? std::ldexp(1024 + digits, exponent - 25)
                                       : std::ldexp(digits, -24);
    return bits & 0x8000 ? -size : size;
}

// ---- tensors of one rank ----

// Elements [batch, heads, tokens, columns] as the problem's axes have them, or without columns [batch, heads, tokens].
class Operand {
public:
    struct Sizes {
        int64_t batch, heads, tokens, columns;  // columns 0: none
    };

    Operand(const RankDevice& on, spattn_enum axes, spattn_dtype dtype, const Sizes& sizes, int64_t spacing = 1)
        : on_(on), sizes_(sizes), dtype_(dtype), bytes_(size_t(count() * spacing) * dtype.bits / 8 + 16, untouched) {
        const auto [b, h, t, c] = sizes;
        int64_t by_batch = 0, by_head = 0, by_token = 0;
        if (!c) shape_ = {b, h, t}, by_batch = h * t, by_head = t, by_token = 1;
        else if (axes == SPATTN_BHSD) shape_ = {b, h, t, c}, by_batch = h * t * c, by_head = t * c, by_token = c;
        else shape_ = {b, t, h, c}, by_batch = h * t * c, by_head = c, by_token = h * c;
        if (axes == SPATTN_THD) shape_.erase(shape_.begin());
        steps_ = {by_batch * spacing, by_head * spacing, by_token * spacing, spacing};
        strides_.resize(shape_.size());
        int64_t step = spacing;
        for (size_t i = shape_.size(); i-- > 0; step *= shape_[i]) strides_[i] = step;
        void* const memory = on.allocate(bytes_.size());
        view_ = {memory, on.device, int32_t(shape_.size()), dtype, shape_.data(), strides_.data(), 0};
        send();
    }
    ~Operand() { on_.release(view_.data); }
    Operand(const Operand&) = delete;

    const spattn_tensor* view() const { return &view_; }
    const Sizes& sizes() const { return sizes_; }
    void send() { on_.copy(view_.data, bytes_.data(), bytes_.size()); }
    void receive() { on_.copy(bytes_.data(), view_.data, bytes_.size()); }

    double at(int64_t b, int64_t h, int64_t t, int64_t c) const { return read_element(dtype_, element(b, h, t, c)); }
    void set(int64_t b, int64_t h, int64_t t, int64_t c, double x) {
        write_element(dtype_, const_cast<char*>(element(b, h, t, c)), x);
    }
    // Whether nobody has written the element.
    bool is_untouched(int64_t b, int64_t h, int64_t t, int64_t c) const {
        const char* const x = element(b, h, t, c);
        return std::all_of(x, x + dtype_.bits / 8, [](char byte) { return byte == untouched; });
    }
    // body(batch, head, column) for each element of a token.
    template <class Body>
    void each(Body body) const {
        for (int64_t b = 0; b < sizes_.batch; ++b)
            for (int64_t h = 0; h < sizes_.heads; ++h)
                for (int64_t c = 0; c < std::max<int64_t>(sizes_.columns, 1); ++c) body(b, h, c);
    }
    // The tokens of `from` in this order.
    void take(const Operand& from, const std::vector<int64_t>& tokens) {
        for (size_t row = 0; row < tokens.size(); ++row)
            each([&](int64_t b, int64_t h, int64_t c) { set(b, h, int64_t(row), c, from.at(b, h, tokens[row], c)); });
        send();
    }
    void draw(uint32_t seed, double unit = 0.125) {
        std::mt19937 random(seed);
        for (int64_t t = 0; t < sizes_.tokens; ++t)
            each([&](int64_t b, int64_t h, int64_t c) { set(b, h, t, c, (int(random() % 17) - 8) * unit); });
        send();
    }

private:
    int64_t count() const { return sizes_.batch * sizes_.heads * sizes_.tokens * std::max<int64_t>(sizes_.columns, 1); }
    const char* element(int64_t b, int64_t h, int64_t t, int64_t c) const {
        const int64_t at = b * steps_[0] + h * steps_[1] + t * steps_[2] + c * steps_[3];
        return bytes_.data() + at * dtype_.bits / 8;
    }

    static constexpr char untouched = char(0xff);  // NaN, of such bytes alone

    const RankDevice& on_;
    Sizes sizes_;
    spattn_dtype dtype_;
    std::vector<int64_t> shape_, strides_;
    std::array<int64_t, 4> steps_{};
    std::vector<char> bytes_;
    spattn_tensor view_;
};

struct Memory {
    Memory(const RankDevice& on, size_t bytes) : on(on), bytes(bytes), data(on.allocate(bytes + 16)) {}
    ~Memory() { on.release(data); }
    Memory(const Memory&) = delete;
    const RankDevice& on;
    size_t bytes;
    void* data;
};

// One rank: what it holds, and room for what it sees.
struct Rank {
    Rank(const RankDevice& on, Sharding made, const spattn_problem& p, int64_t tokens, int64_t spacing)
        : on(on), sharding(std::move(made)), keys(seen_of(sharding.get())),
          held{p.batch, p.heads_kv, tokens, p.head_dim}, seen{p.batch, p.heads_kv, int64_t(keys.size()), p.head_dim},
          k(on, p.axes, p.dtype, held, spacing), v(on, p.axes, p.dtype, values(held, p), spacing),
          dk(on, p.axes, p.dtype, held, spacing), dv(on, p.axes, p.dtype, values(held, p), spacing),
          seen_k(on, p.axes, p.dtype, seen), seen_v(on, p.axes, p.dtype, values(seen, p)),
          seen_dk(on, p.axes, p.dtype, seen), seen_dv(on, p.axes, p.dtype, values(seen, p)) {
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

    // in_place: sums of gradients go to where this rank's own are.
    void exchange(spattn_enum step, bool has_values, bool in_place = false) {
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
        args.buffer = buffer.data, args.buffer_bytes = buffer.bytes;
        succeed(spattn_exchange(sharding.get(), step, &args), "exchange");
    }

    const RankDevice& on;
    Sharding sharding;
    std::vector<int64_t> keys;  // their tokens
    Operand::Sizes held, seen;
    Operand k, v, dk, dv, seen_k, seen_v, seen_dk, seen_dv;
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
            if (from == to) CHECK_EQ(out.tokens_sent, int64_t(0));
            char* const sent = static_cast<char*>(ranks[from]->sent->data) + out.sent_offset;
            char* const received = static_cast<char*>(ranks[to]->received->data) + in.received_offset;
            CHECK(out.sent_offset + out.sent_bytes <= ranks[from]->sent->bytes);
            if (is_back) ranks[0]->on.copy(sent, received, out.sent_bytes);
            else ranks[0]->on.copy(received, sent, out.sent_bytes);
        }
}

void exchange_keys(const Ranks& ranks, bool has_values) {
    for (const auto& rank : ranks) rank->exchange(SPATTN_EXCHANGE_PACK, has_values);
    carry(ranks, false);
    for (const auto& rank : ranks) rank->exchange(SPATTN_EXCHANGE_UNPACK, has_values);
}
void exchange_gradients(const Ranks& ranks, bool has_values) {
    for (const auto& rank : ranks) rank->exchange(SPATTN_EXCHANGE_PACK_GRADIENTS, has_values);
    carry(ranks, true);
    for (const auto& rank : ranks) rank->exchange(SPATTN_EXCHANGE_ADD_GRADIENTS, has_values);
}

// One plan's run: forward, and backward with a gradient of all results.
struct Run {
    Run(const RankDevice& on, const spattn_problem& p, int64_t queries, spattn_dtype dtype)
        : dim_v(p.head_dim_v ? p.head_dim_v : p.head_dim),
          q(on, p.axes, dtype, {p.batch, p.heads_q, queries, p.head_dim}),
          out(on, p.axes, dtype, {p.batch, p.heads_q, queries, dim_v}),
          dout(on, p.axes, dtype, {p.batch, p.heads_q, queries, dim_v}),
          dq(on, p.axes, dtype, {p.batch, p.heads_q, queries, p.head_dim}),
          lse(on, p.axes, f32, {p.batch, p.heads_q, queries, 0}) {}

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
        with_workspace(SPATTN_OP_FORWARD, forward, spattn_forward);
        auto backward = sized<spattn_backward_args>();
        backward.q = q.view(), backward.k = k.view(), backward.v = forward.v, backward.out = out.view();
        backward.lse = lse.view(), backward.dout = dout.view(), backward.dq = dq.view();
        backward.dk = dk.view(), backward.dv = dv ? dv->view() : nullptr;
        with_workspace(SPATTN_OP_BACKWARD, backward, spattn_backward);
        for (Operand* x : {&out, &lse, &dq}) x->receive();
    }

    int64_t dim_v;
    Operand q, out, dout, dq, lse;
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
    p.dtype = std::array{f32, f64, bf16, f16}[size_t(random.in(0, 3))];
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
            std::to_string(p.dtype.bits) + " bits of code " + std::to_string(p.dtype.code) + ", flags " +
            std::to_string(p.flags) + ", " + std::to_string(ranks()) + " ranks, split " + std::to_string(split_);
    for (const int64_t number : ranges_) text += ' ' + std::to_string(number);
    return text;
}

Sharding DrawnSharding::make(const spattn_context* context, int32_t rank) const {
    auto options = sized<spattn_sharding_options>();
    options.ranks = ranks(), options.rank = rank, options.split = split_;
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
    const bool has_values = !(p.flags & SPATTN_PLAN_VALUE_IN_KEY);
    const auto seen = find_seen();
    const Operand::Sizes whole{p.batch, p.heads_kv, p.seq_k, p.head_dim};
    Operand k(on, p.axes, p.dtype, whole), v(on, p.axes, p.dtype, Rank::values(whole, p));
    k.draw(seed_), v.draw(seed_ + 1);
    Ranks all;
    for (int32_t rank = 0; rank < ranks(); ++rank) {
        const std::vector<int64_t>& held = tokens_[size_t(rank)];
        all.push_back(std::make_unique<Rank>(on, make(context, rank), p, int64_t(held.size()), spacing_));
        all.back()->k.take(k, held), all.back()->v.take(v, held);
        // In another order, sums of these would be other numbers where they are not rounded to 16 bits.
        const double unit = p.dtype.bits == 16 ? 0.125 : 0.1;
        all.back()->seen_dk.draw(seed_ + 2 + uint32_t(rank), unit);
        all.back()->seen_dv.draw(seed_ + 9 + uint32_t(rank), unit);
    }
    exchange_keys(all, has_values);
    exchange_gradients(all, has_values);
    for (size_t rank = 0; rank < all.size(); ++rank) {
        std::vector<bool> there = seen[rank];
        for (const int64_t token : tokens_[rank]) there[size_t(token)] = true;
        const std::vector<int64_t>& keys = all[rank]->keys;
        for (int64_t t = 0; t < p.seq_k; ++t) CHECK(!there[size_t(t)] || all[rank]->key_of(t) >= 0);
        const auto check = [&](Operand& seen_x, const Operand& whole, Operand& sum, auto gradient) {
            seen_x.receive(), sum.receive();
            bool arrives = true, adds_up = true;
            seen_x.each([&](int64_t b, int64_t h, int64_t c) {
                for (size_t key = 0; key < keys.size(); ++key)
                    arrives &= there[size_t(keys[key])] ? seen_x.at(b, h, int64_t(key), c) == whole.at(b, h, keys[key], c)
                                                        : seen_x.is_untouched(b, h, int64_t(key), c);
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
            CHECK(arrives);
            CHECK(adds_up);
        };
        check(all[rank]->seen_k, k, all[rank]->dk, [](const Rank& r) -> const Operand& { return r.seen_dk; });
        if (has_values)
            check(all[rank]->seen_v, v, all[rank]->dv, [](const Rank& r) -> const Operand& { return r.seen_dv; });
    }
    for (size_t rank = 0; rank < all.size(); ++rank) {
        all[rank]->exchange(SPATTN_EXCHANGE_ADD_GRADIENTS, has_values, true);
        const std::vector<int64_t> own = all[rank]->keys_of(tokens_[rank]);
        CHECK(takes_sums(all[rank]->seen_dk, all[rank]->dk, own));
        if (has_values) CHECK(takes_sums(all[rank]->seen_dv, all[rank]->dv, own));
    }
}

void DrawnSharding::check_attention(const spattn_context* context, const RankDevice& on,
                                    const spattn_context* truth) const {
    const spattn_problem& p = problem_;
    const bool has_values = !(p.flags & SPATTN_PLAN_VALUE_IN_KEY);
    // The truth, of operands that are exact in float64.
    spattn_problem exactly = p;
    exactly.dtype = f64, exactly.flags |= SPATTN_PLAN_REFERENCE;
    const RankDevice& host = host_ranks();
    const Operand::Sizes sizes{p.batch, p.heads_kv, p.seq_k, p.head_dim}, values = Rank::values(sizes, p);
    Operand k(host, p.axes, f64, sizes), v(host, p.axes, f64, values);
    Operand dk(host, p.axes, f64, sizes), dv(host, p.axes, f64, values);
    Run whole(host, p, p.seq_q, f64);
    k.draw(seed_), v.draw(seed_ + 1), whole.q.draw(seed_ + 2), whole.dout.draw(seed_ + 3);
    const Plan plan = make_plan(truth, model_.pattern.get(), exactly);
    whole.make(plan.get(), host, k, has_values ? &v : nullptr, dk, has_values ? &dv : nullptr);
    dk.receive(), dv.receive();

    Ranks all;
    for (int32_t rank = 0; rank < ranks(); ++rank) {
        const std::vector<int64_t>& held = tokens_[size_t(rank)];
        all.push_back(std::make_unique<Rank>(on, make(context, rank), p, int64_t(held.size()), spacing_));
        all.back()->k.take(k, held), all.back()->v.take(v, held);
    }
    exchange_keys(all, has_values);
    const double of_half = p.dtype.code == SPATTN_BFLOAT ? 3e-2 : 5e-3;
    const double bound = p.dtype.bits == 64 ? 1e-9 : p.dtype.bits == 32 ? 2e-5 : of_half;
    for (size_t n = 0; n < all.size(); ++n) {
        Rank& rank = *all[n];
        Run own(on, p, int64_t(tokens_[n].size()), p.dtype);
        own.q.take(whole.q, tokens_[n]), own.dout.take(whole.dout, tokens_[n]);
        spattn_plan* made = nullptr;
        succeed(spattn_sharding_plan(rank.sharding.get(), &made), "plan");
        const Plan queries(made);
        own.make(made, on, rank.seen_k, has_values ? &rank.seen_v : nullptr, rank.seen_dk,
                 has_values ? &rank.seen_dv : nullptr);
        CHECK(are_near(own.out, whole.out, tokens_[n], bound));
        CHECK(are_near(own.lse, whole.lse, tokens_[n], std::max(bound, 2e-5)));
        CHECK(are_near(own.dq, whole.dq, tokens_[n], bound));
    }
    exchange_gradients(all, has_values);
    for (size_t n = 0; n < all.size(); ++n) {
        all[n]->dk.receive(), all[n]->dv.receive();
        CHECK(are_near(all[n]->dk, dk, tokens_[n], bound));
        if (has_values) CHECK(are_near(all[n]->dv, dv, tokens_[n], bound));
    }
}

}  // namespace abi
