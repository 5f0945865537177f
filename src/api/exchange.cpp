// SPDX-License-Identifier: MIT
// What goes between ranks, of chapter 7 of the header: checks the operands of a call, then hands rows to the backend.
#include <initializer_list>

#include "api/args.h"
#include "api/guard.h"
#include "api/operands.h"
#include "api/sharding.h"
#include "core/cancel.h"

namespace spattn {
namespace {

using Use = Operands::Use;

// Keys and values of the same tokens, and their scales as far as these are exchanged.
struct KeysAndValues {
    TensorView k, v, k_scales, v_scales;
};

// The same as a call brings them, and what errors call them.
struct GivenKeys {
    struct Operand {
        const spattn_tensor* tensor;
        const char* name;
    };
    Operand k, v, k_scales, v_scales;

    bool is_any() const { return k.tensor || v.tensor || k_scales.tensor || v_scales.tensor; }
};

void refuse(const GivenKeys::Operand& operand, const char* why) { refuse_operand(operand.tensor, operand.name, why); }

void refuse_all(const GivenKeys& given, const char* why) {
    for (const auto* operand : {&given.k, &given.v, &given.k_scales, &given.v_scales}) refuse(*operand, why);
}

class Exchange {
public:
    Exchange(const spattn_sharding& sharding, const spattn_exchange_args& args)
        : s_(sharding), p_(sharding.problem), device_(*sharding.plan->device), args_(args),
          operands_(device_.id(), sharding.plan->axes, p_) {}

    void run(spattn_enum step) {
        switch (step) {
            case SPATTN_EXCHANGE_PACK: return pack();
            case SPATTN_EXCHANGE_UNPACK: return unpack();
            case SPATTN_EXCHANGE_PACK_GRADIENTS: return pack_gradients();
            default: return add_gradients();
        }
    }

private:
    void pack() {
        refuse_all(seen_, "the step is SPATTN_EXCHANGE_PACK");
        const KeysAndValues held = read_held(Way::there, Use::input);
        const KeysAndValues sent = buffer(Way::there, s_.lists.sent, Use::output);
        copy(Way::there, {{held, sent, s_.placed.sent, nullptr, int64_t(s_.lists.sent.size())}});
    }
    void unpack() {
        const bool has_held = held_.is_any();
        const KeysAndValues held = has_held ? read_held(Way::there, Use::input) : KeysAndValues{};
        const KeysAndValues seen = read_seen(Way::there, Use::output);
        const KeysAndValues received = buffer(Way::there, s_.lists.received, Use::input);
        copy(Way::there, {{received, seen, nullptr, s_.placed.received, int64_t(s_.lists.received.size())},
                          {held, seen, nullptr, s_.placed.own_keys, has_held ? held_tokens() : 0}});
    }
    void pack_gradients() {
        refuse_all(held_, "the step is SPATTN_EXCHANGE_PACK_GRADIENTS");
        const KeysAndValues seen = read_seen(Way::back, Use::input);
        const KeysAndValues received = buffer(Way::back, s_.lists.received, Use::output);
        copy(Way::back, {{seen, received, s_.placed.received, nullptr, int64_t(s_.lists.received.size())}});
    }
    // Rows that no other rank sees are copied, unless sums are made where the rank's own gradients stand.
    void add_gradients() {
        const bool has_held = held_.is_any();
        const KeysAndValues held = has_held ? read_held(Way::back, Use::output) : KeysAndValues{};
        const KeysAndValues seen = read_seen(Way::back, has_held ? Use::input : Use::output);
        const KeysAndValues sent = buffer(Way::back, s_.lists.sent, Use::input);
        copy(Way::back, {{seen, held, s_.placed.own_keys, nullptr, has_held ? held_tokens() : 0}});
        const KeysAndValues& to = has_held ? held : seen;
        const auto& placed = s_.placed;
        const int32_t* const to_rows = has_held ? placed.shared : placed.shared_keys;
        const int64_t shared = int64_t(s_.lists.shared.size());
        RowsSums sums;
        each(Way::back, [&](TensorView KeysAndValues::* x, int64_t columns, int64_t) {
            sums.add({seen.*x, sent.*x, to.*x, placed.shared_keys, to_rows, placed.first_place, placed.places, shared,
                      columns});
        });
        device_.backend().exchange.add(call(), sums);
    }

    struct Copy {
        const KeysAndValues &from, &to;
        const int32_t *from_rows, *to_rows;
        int64_t rows;
    };
    void copy(Way way, std::initializer_list<Copy> together) {
        operands_.check_overlaps();
        RowsCopies copies;
        for (const Copy& c : together)
            each(way, [&](TensorView KeysAndValues::* x, int64_t columns, int64_t element) {
                copies.add({c.from.*x, c.to.*x, c.from_rows, c.to_rows, c.rows, columns, element});
            });
        device_.backend().exchange.copy(call(), copies);
    }
    // body(which of them, its columns, bytes of an element), where there is something to move.
    template <class Body>
    void each(Way way, Body body) const {
        if (!p_.batch) return;
        const int64_t element = s_.token_part(way).element;
        body(&KeysAndValues::k, p_.head_dim, element);
        if (!p_.value_in_key) body(&KeysAndValues::v, p_.head_dim_v, element);
        if (!s_.has_scales(way)) return;
        body(&KeysAndValues::k_scales, 1, sizeof(float));
        if (!p_.value_in_key) body(&KeysAndValues::v_scales, 1, sizeof(float));
    }
    int64_t held_tokens() const { return int64_t(s_.lists.own_keys.size()); }
    ExchangeCall call() { return {&p_, &threads_, args_.stream, device_.id().index}; }

    KeysAndValues read_held(Way way, Use use) { return read(held_, way, use, held_tokens()); }
    KeysAndValues read_seen(Way way, Use use) { return read(seen_, way, use, s_.keys); }
    KeysAndValues read(const GivenKeys& given, Way way, Use use, int64_t rows) {
        const auto matrix = [&](const GivenKeys::Operand& x, int64_t columns) {
            return operands_.matrix(x.tensor, x.name, use, p_.heads_kv, rows, columns, s_.dtype(way));
        };
        KeysAndValues found{};
        found.k = matrix(given.k, p_.head_dim);
        if (p_.value_in_key)
            refuse(given.v, values_are_in_keys), refuse(given.v_scales, values_are_in_keys);
        else
            found.v = matrix(given.v, p_.head_dim_v);
        read_scales(given, way, use, rows, found);
        return found;
    }
    void read_scales(const GivenKeys& given, Way way, Use use, int64_t rows, KeysAndValues& found) {
        if (!s_.has_scales(way)) {
            const char* const why = s_.sends_scales ? "the step moves gradients"
                                                    : "the sharding was made without SPATTN_SHARDING_SCALES";
            return refuse(given.k_scales, why), refuse(given.v_scales, why);
        }
        const auto scales = [&](const GivenKeys::Operand& x) {
            if (!x.tensor)
                fail(SPATTN_E_NULL, x.name,
                     "is NULL; accepted: scales of rows, as the sharding was made with SPATTN_SHARDING_SCALES");
            return operands_.scales_of_rows(x.tensor, x.name, use, p_.heads_kv, rows);
        };
        found.k_scales = scales(given.k_scales);
        if (!p_.value_in_key) found.v_scales = scales(given.v_scales);
    }

    // The buffer, with a row for each entry of the list.
    KeysAndValues buffer(Way way, const std::vector<int32_t>& list, Use use) {
        constexpr uintptr_t alignment = 16;
        const TokenPart part = s_.token_part(way);
        const size_t needed = list.size() * size_t(part.bytes);
        if (!needed) return {};
        if (!args_.buffer)
            fail(SPATTN_E_NULL, "buffer", text("is NULL; accepted: ", needed, " bytes, see spattn_sharding_buffers"));
        if (args_.buffer_bytes < needed)
            fail(SPATTN_E_WORKSPACE, "buffer_bytes",
                 text("is ", args_.buffer_bytes, "; accepted: at least ", needed, ", see spattn_sharding_buffers"));
        if (reinterpret_cast<uintptr_t>(args_.buffer) % alignment)
            fail(SPATTN_E_LAYOUT, "buffer", text("is not aligned; accepted: multiples of ", alignment, " bytes"));
        operands_.add_memory("buffer", args_.buffer, needed, use);
        const auto view = [&](int64_t begin, int64_t columns, int64_t element) {
            void* const first = static_cast<char*>(args_.buffer) + begin;
            return TensorView{first, p_.heads_kv * columns, columns, part.bytes / element, 1};
        };
        KeysAndValues found{view(0, p_.head_dim, part.element), view(part.values, p_.head_dim_v, part.element), {}, {}};
        if (!s_.has_scales(way)) return found;
        constexpr int64_t scale = sizeof(float);
        found.k_scales = view(part.scales, 1, scale);
        found.v_scales = view(part.scales + p_.batch * p_.heads_kv * scale, 1, scale);
        return found;
    }

    const spattn_sharding& s_;
    const Problem& p_;
    const Device& device_;
    const spattn_exchange_args& args_;
    const GivenKeys held_{{args_.k, "k"}, {args_.v, "v"}, {args_.k_scales, "k_scales"}, {args_.v_scales, "v_scales"}};
    const GivenKeys seen_{{args_.seen_k, "seen_k"},
                          {args_.seen_v, "seen_v"},
                          {args_.seen_k_scales, "seen_k_scales"},
                          {args_.seen_v_scales, "seen_v_scales"}};
    Operands operands_;
    CancellableParallel threads_{device_.parallel(), device_.cancel(), device_.cancel_user()};
};

}  // namespace
}  // namespace spattn

using namespace spattn;

spattn_status spattn_exchange(const spattn_sharding* sharding, spattn_enum step, const spattn_exchange_args* given) {
    return guard(__func__, [&] {
        required(sharding, "sharding");
        require_range(step, SPATTN_EXCHANGE_PACK, SPATTN_EXCHANGE_ADD_GRADIENTS, "step");
        const spattn_exchange_args args = read_struct(given, "args");
        if (args.flags) fail(SPATTN_E_UNKNOWN_FIELD, "args.flags", text("is ", args.flags, "; accepted: 0"));
        Exchange(*sharding, args).run(step);
    });
}
