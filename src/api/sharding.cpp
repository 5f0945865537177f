// SPDX-License-Identifier: MIT
// Chapter 7 of the header, but for exchanges.
#include "api/sharding.h"

#include <algorithm>

#include "api/args.h"
#include "api/context.h"
#include "api/guard.h"
#include "api/problem.h"
#include "core/cancel.h"
#include "core/math.h"
#include "plan/stage.h"
#include "plan/token_rows.h"

namespace spattn {
namespace {

// ---- who holds what ----

constexpr int32_t most_ranks = 1 << 16;

Problem read_whole_problem(const spattn_problem& given) {
    const Problem p = read_problem(given);
    if (p.has_starts)
        fail(SPATTN_E_UNSUPPORTED, "problem.flags", "has SPATTN_PLAN_STARTS; accepted: problems without a cache");
    if (p.seq_q != p.seq_k)
        fail(SPATTN_E_RANGE, "problem.seq_q", text("is ", p.seq_q, "; accepted: seq_k, ", p.seq_k, ": all tokens"));
    if (p.q_offset != 0)
        fail(SPATTN_E_RANGE, "problem.q_offset", text("is ", p.q_offset, "; accepted: 0, as queries are all tokens"));
    return p;
}

// Fails unless each token is held once, and each rank holds one.
void check_holdings(const Holdings& holdings, int64_t seq) {
    Intervals all;
    for (size_t rank = 0; rank < holdings.size(); ++rank) {
        if (holdings[rank].empty())
            fail(SPATTN_E_RANGE, "options.ranges", text("has none of rank ", rank, "; accepted: one for each or more"));
        all.insert(all.end(), holdings[rank].begin(), holdings[rank].end());
    }
    std::sort(all.begin(), all.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
    int64_t next = 0;
    for (const Interval& range : all) {
        if (range.begin != next || range.end <= range.begin)
            fail(SPATTN_E_RANGE, "options.ranges",
                 text("has [", range.begin, ", ", range.end, ") where token ", next,
                      " comes next; accepted: every token once"));
        next = range.end;
    }
    if (next != seq)
        fail(SPATTN_E_RANGE, "options.ranges",
             text("ends at token ", next, "; accepted: every token of ", seq, " once"));
}

Holdings read_ranges(const spattn_sharding_options& options, int64_t seq) {
    const HostTensor t = read_host_tensor(options.ranges, "options.ranges", std::array<int64_t, 2>{-1, 3},
                                          {dtype_i32, dtype_i64});
    Holdings holdings(size_t(options.ranks));
    for (int64_t n = 0; n < t.shape[0]; ++n) {
        const auto number = [&](int64_t column) { return integer_at(t, n * t.strides[0] + column * t.strides[1]); };
        require_range(number(0), 0, options.ranks - 1, text("options.ranges[", n, ", 0]").c_str());
        holdings[size_t(number(0))].push_back({number(1), number(2)});
    }
    check_holdings(holdings, seq);
    return holdings;
}

void check_flags(uint32_t flags, const Problem& p) {
    if (flags & ~uint32_t(SPATTN_SHARDING_SCALES))
        fail(SPATTN_E_UNKNOWN_FIELD, "options.flags", text("is ", flags, "; accepted: 0 or SPATTN_SHARDING_SCALES"));
    if (flags && !p.float8_operands)
        fail(SPATTN_E_RANGE, "options.flags",
             "is SPATTN_SHARDING_SCALES, and the problem's dtype is not of float8; accepted: 0");
}

Holdings read_holdings(const spattn_sharding_options& o, int64_t seq) {
    if (o.reserved) fail(SPATTN_E_UNKNOWN_FIELD, "options.reserved", text("is ", o.reserved, "; accepted: 0"));
    require_range(o.ranks, 1, most_ranks, "options.ranks");
    require_range(o.rank, 0, o.ranks - 1, "options.rank");
    require_range(o.split, SPATTN_SPLIT_CONTIGUOUS, o.ranges ? SPATTN_SPLIT_CONTIGUOUS : SPATTN_SPLIT_ZIGZAG,
                  "options.split");
    if (o.ranges) return read_ranges(o, seq);
    const bool is_zigzag = o.split == SPATTN_SPLIT_ZIGZAG;
    const int64_t shares = is_zigzag ? 2 * int64_t(o.ranks) : o.ranks;
    if (seq < shares)
        fail(SPATTN_E_RANGE, "problem.seq_q",
             text("is ", seq, "; accepted: ", shares, " tokens and more, for ", o.ranks, " ranks"));
    return split_evenly(seq, o.ranks, is_zigzag);
}

// ---- the handle ----

Ref<const spattn_plan> plan_queries(const spattn_context& context, const RankQueries& queries, spattn_problem problem,
                                    void* stream) {
    problem.seq_q = queries.rows, problem.seq_k = queries.keys();
    problem.flags |= SPATTN_PLAN_Q_OFFSET, problem.q_offset = queries.q_offset;
    return find_or_make_plan(context, *queries.pattern, problem, stream);
}

Ref<const spattn_sharding> make_sharding(const spattn_context& context, const PatternRef& pattern,
                                         const spattn_problem& problem, const spattn_sharding_options& options,
                                         void* stream) {
    auto sharding = make_ref<spattn_sharding>();
    sharding->problem = read_whole_problem(problem);
    const Problem& p = sharding->problem;
    check_flags(options.flags, p);
    sharding->sends_scales = options.flags & SPATTN_SHARDING_SCALES;
    sharding->holdings = read_holdings(options, p.seq_k);
    pattern->check(pattern_extent(p));
    const Device& device = *context.device;
    const CancelScope scope(device.cancel(), device.cancel_user(), "options.cancel");
    RankShare share = share_of(pattern, sharding->holdings, options.rank, pattern_extent(p));
    sharding->plan = plan_queries(context, share.queries, problem, stream);
    sharding->keys = share.queries.keys();
    sharding->seen = std::move(share.queries.seen);
    sharding->lists = std::move(share.lists);
    ExchangeLists& lists = sharding->lists;
    auto& placed = sharding->placed;
    sharding->block = place_arrays(device.memory(), stream, [&](auto& visit) {
        visit(lists.own_keys, placed.own_keys);
        visit(lists.sent, placed.sent);
        visit(lists.received, placed.received);
        visit(lists.shared, placed.shared);
        visit(lists.shared_keys, placed.shared_keys);
        visit(lists.first_place, placed.first_place);
        visit(lists.places, placed.places);
    });
    device.backend().exchange.prepare(device.id().index);
    return sharding;
}

void write_ranges(const Intervals& from, const spattn_tensor* ranges, int64_t& count) {
    HostTensor to{};
    if (ranges) to = read_host_tensor(ranges, "ranges", std::array<int64_t, 2>{-1, 2}, {dtype_i64});
    count = int64_t(from.size());
    if (!ranges) return;
    if (to.shape[0] < count)
        fail(SPATTN_E_SHAPE, "ranges", text("has room for ", to.shape[0], "; accepted: ", count, " and more"));
    for (size_t n = 0; n < from.size(); ++n) {
        int64_t* const row = static_cast<int64_t*>(to.data) + int64_t(n) * to.strides[0];
        row[0] = from[n].begin, row[to.strides[1]] = from[n].end;
    }
}

void check_rank(const spattn_sharding& sharding, int32_t rank) {
    require_range(rank, 0, int64_t(sharding.holdings.size()) - 1, "rank");
}

}  // namespace
}  // namespace spattn

using namespace spattn;

// Each token begins where rows of 16 bytes do, as far as its elements let it.
TokenPart spattn_sharding::token_part(Way way) const {
    constexpr int64_t row_alignment = 16, scale = sizeof(float);
    const int64_t rows = problem.batch * problem.heads_kv, element = dtype(way).bits / 8;
    TokenPart part{element, rows * problem.head_dim * element, 0, 0};
    part.scales = part.bytes = part.values + (problem.value_in_key ? 0 : rows * problem.head_dim_v * element);
    if (!has_scales(way)) return part;
    part.scales = round_up(part.scales, scale);
    part.bytes = round_up(part.scales + rows * scale * (problem.value_in_key ? 1 : 2), row_alignment);
    return part;
}

extern "C" {

spattn_status spattn_sharding_create(const spattn_context* context, const spattn_pattern* pattern,
                                     const spattn_problem* problem, const spattn_sharding_options* options,
                                     spattn_stream stream, spattn_sharding** result) {
    return guard_result(__func__, result, [&] {
        required(context, "context");
        required(pattern, "pattern");
        return make_sharding(*context, PatternRef::share(pattern), read_struct(problem, "problem"),
                             read_struct(options, "options"), stream);
    });
}

void spattn_sharding_retain(const spattn_sharding* sharding) {
    if (sharding) sharding->retain();
}

void spattn_sharding_release(const spattn_sharding* sharding) {
    if (sharding) sharding->release();
}

spattn_status spattn_sharding_plan(const spattn_sharding* sharding, spattn_plan** result) {
    return guard_result(__func__, result, [&] { return required(sharding, "sharding").plan; });
}

spattn_status spattn_sharding_ranges(const spattn_sharding* sharding, int32_t rank, const spattn_tensor* ranges,
                                     int64_t* count) {
    return guard(__func__, [&] {
        check_rank(required(sharding, "sharding"), rank);
        write_ranges(sharding->holdings[size_t(rank)], ranges, required(count, "count"));
    });
}

spattn_status spattn_sharding_seen(const spattn_sharding* sharding, const spattn_tensor* ranges, int64_t* count,
                                   int64_t* tokens) {
    return guard(__func__, [&] {
        const Intervals& seen = required(sharding, "sharding").seen;
        required(tokens, "tokens");
        write_ranges(seen, ranges, required(count, "count"));
        *tokens = sharding->keys;
    });
}

spattn_status spattn_sharding_peer(const spattn_sharding* sharding, int32_t rank, spattn_peer* result) {
    return guard(__func__, [&] {
        check_rank(required(sharding, "sharding"), rank);
        const ExchangeLists& lists = sharding->lists;
        const int64_t first_sent = lists.first_sent[size_t(rank)], first_received = lists.first_received[size_t(rank)];
        spattn_peer peer{};
        peer.tokens_sent = lists.first_sent[size_t(rank) + 1] - first_sent;
        peer.tokens_received = lists.first_received[size_t(rank) + 1] - first_received;
        const auto bytes = [&](int64_t tokens, Way way) {
            return uint64_t(tokens) * uint64_t(sharding->token_part(way).bytes);
        };
        peer.sent_offset = bytes(first_sent, Way::there), peer.sent_bytes = bytes(peer.tokens_sent, Way::there);
        peer.received_offset = bytes(first_received, Way::there);
        peer.received_bytes = bytes(peer.tokens_received, Way::there);
        peer.back_sent_offset = bytes(first_sent, Way::back), peer.back_sent_bytes = bytes(peer.tokens_sent, Way::back);
        peer.back_received_offset = bytes(first_received, Way::back);
        peer.back_received_bytes = bytes(peer.tokens_received, Way::back);
        write_struct(result, peer, "result");
    });
}

spattn_status spattn_sharding_buffers(const spattn_sharding* sharding, size_t* sent_bytes, size_t* received_bytes) {
    return guard(__func__, [&] {
        const ExchangeLists& lists = required(sharding, "sharding").lists;
        required(sent_bytes, "sent_bytes");
        required(received_bytes, "received_bytes");
        const int64_t there = sharding->token_part(Way::there).bytes, back = sharding->token_part(Way::back).bytes;
        const auto most = size_t(std::max(there, back));
        *sent_bytes = lists.sent.size() * most;
        *received_bytes = lists.received.size() * most;
    });
}

}  // extern "C"
