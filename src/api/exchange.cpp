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

// Keys and values of the same tokens.
struct KeysAndValues {
    TensorView k, v;
};

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
        refuse_seen();
        const KeysAndValues held = read_held(Use::input), sent = buffer(s_.lists.sent, Use::output);
        copy({{held, sent, s_.placed.sent, nullptr, int64_t(s_.lists.sent.size())}});
    }
    void unpack() {
        const bool has_held = args_.k || args_.v;
        const KeysAndValues held = has_held ? read_held(Use::input) : KeysAndValues{};
        const KeysAndValues seen = read_seen(Use::output), received = buffer(s_.lists.received, Use::input);
        copy({{received, seen, nullptr, s_.placed.received, int64_t(s_.lists.received.size())},
              {held, seen, nullptr, s_.placed.own_keys, has_held ? held_tokens() : 0}});
    }
    void pack_gradients() {
        constexpr const char* why = "the step is SPATTN_EXCHANGE_PACK_GRADIENTS";
        refuse_operand(args_.k, "k", why), refuse_operand(args_.v, "v", why);
        const KeysAndValues seen = read_seen(Use::input), received = buffer(s_.lists.received, Use::output);
        copy({{seen, received, s_.placed.received, nullptr, int64_t(s_.lists.received.size())}});
    }
    // Rows that no other rank sees are copied, unless sums are made where the rank's own gradients stand.
    void add_gradients() {
        const bool has_held = args_.k || args_.v;
        const KeysAndValues held = has_held ? read_held(Use::output) : KeysAndValues{};
        const KeysAndValues seen = read_seen(has_held ? Use::input : Use::output);
        const KeysAndValues sent = buffer(s_.lists.sent, Use::input);
        copy({{seen, held, s_.placed.own_keys, nullptr, has_held ? held_tokens() : 0}});
        const KeysAndValues& to = has_held ? held : seen;
        const auto& placed = s_.placed;
        const int32_t* const to_rows = has_held ? placed.shared : placed.shared_keys;
        const int64_t shared = int64_t(s_.lists.shared.size());
        RowsSums sums;
        each([&](TensorView KeysAndValues::* x, int64_t columns) {
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
    void copy(std::initializer_list<Copy> together) {
        operands_.check_overlaps();
        RowsCopies copies;
        for (const Copy& c : together)
            each([&](TensorView KeysAndValues::* x, int64_t columns) {
                copies.add({c.from.*x, c.to.*x, c.from_rows, c.to_rows, c.rows, columns});
            });
        device_.backend().exchange.copy(call(), copies);
    }
    // body(which of both, its columns), where there is something to move.
    template <class Body>
    void each(Body body) const {
        if (!p_.batch) return;
        body(&KeysAndValues::k, p_.head_dim);
        if (!p_.value_in_key) body(&KeysAndValues::v, p_.head_dim_v);
    }
    int64_t held_tokens() const { return int64_t(s_.lists.own_keys.size()); }
    ExchangeCall call() { return {&p_, &threads_, args_.stream, device_.id().index}; }

    KeysAndValues read_held(Use use) { return read(args_.k, "k", args_.v, "v", use, held_tokens()); }
    KeysAndValues read_seen(Use use) {
        return read(args_.seen_k, "seen_k", args_.seen_v, "seen_v", use, s_.keys);
    }
    KeysAndValues read(const spattn_tensor* k, const char* k_name, const spattn_tensor* v, const char* v_name, Use use,
                       int64_t rows) {
        KeysAndValues found{};
        found.k = operands_.matrix(k, k_name, use, p_.heads_kv, rows, p_.head_dim);
        if (p_.value_in_key)
            refuse_operand(v, v_name, values_are_in_keys);
        else
            found.v = operands_.matrix(v, v_name, use, p_.heads_kv, rows, p_.head_dim_v);
        return found;
    }
    void refuse_seen() {
        constexpr const char* why = "the step is SPATTN_EXCHANGE_PACK";
        refuse_operand(args_.seen_k, "seen_k", why), refuse_operand(args_.seen_v, "seen_v", why);
    }

    // The buffer, with a row for each entry of the list.
    KeysAndValues buffer(const std::vector<int32_t>& list, Use use) {
        constexpr uintptr_t alignment = 16;
        const size_t needed = list.size() * size_t(s_.token_bytes());
        if (!needed) return {};
        if (!args_.buffer)
            fail(SPATTN_E_NULL, "buffer", text("is NULL; accepted: ", needed, " bytes, see spattn_sharding_buffers"));
        if (args_.buffer_bytes < needed)
            fail(SPATTN_E_WORKSPACE, "buffer_bytes",
                 text("is ", args_.buffer_bytes, "; accepted: at least ", needed, ", see spattn_sharding_buffers"));
        if (reinterpret_cast<uintptr_t>(args_.buffer) % alignment)
            fail(SPATTN_E_LAYOUT, "buffer", text("is not aligned; accepted: multiples of ", alignment, " bytes"));
        operands_.add_memory("buffer", args_.buffer, needed, use);
        const int64_t keys = p_.batch * p_.heads_kv * p_.head_dim;
        char* const values = static_cast<char*>(args_.buffer) + keys * dtype_row(p_.dtype).bytes;
        const auto view = [&](void* data, int64_t columns) {
            return TensorView{data, p_.heads_kv * columns, columns, s_.token_elements(), 1};
        };
        return {view(args_.buffer, p_.head_dim), view(values, p_.head_dim_v)};
    }

    const spattn_sharding& s_;
    const Problem& p_;
    const Device& device_;
    const spattn_exchange_args& args_;
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
