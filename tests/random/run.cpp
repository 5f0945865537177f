// SPDX-License-Identifier: MIT
#include "run.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <mutex>
#include <shared_mutex>
#include <sstream>
#include <stdexcept>

namespace random_test {

namespace {

// The value is changed in place, so that other threads may read other variables meanwhile.
char pin[256] = "SPATTN_FORCE_KERNEL=";
constexpr size_t pin_name = sizeof "SPATTN_FORCE_KERNEL=" - 1;
std::shared_mutex pin_lock;

void set_pin(const std::string& row) {
    static const bool is_there = putenv(pin) == 0;
    if (!is_there || pin_name + row.size() >= sizeof pin) throw std::runtime_error("a row cannot be pinned: " + row);
    std::memcpy(pin + pin_name, row.c_str(), row.size() + 1);
}

std::string explain(const spattn_plan* plan) {
    size_t needed = 0;
    demand(spattn_plan_explain(plan, nullptr, 0, &needed), "explain");
    std::string text(needed, ' ');
    demand(spattn_plan_explain(plan, text.data(), needed, nullptr), "explain");
    return text;
}

Planned plan_now(const spattn_context* context, const Problem& problem) {
    Planned planned;
    spattn_problem c = problem.told();
    c.dtype = problem.has_float8_operands() ? float8.dtype : problem.type->dtype;
    spattn_plan* plan = nullptr;
    planned.status = spattn_plan_create(context, problem.drawn.pattern.get(), &c, nullptr, &plan);
    planned.plan.reset(plan);
    if (planned.status != SPATTN_OK) {
        planned.why = spattn_last_error_text();
        return planned;
    }
    planned.explained = explain(plan);
    for (const spattn_enum op : {SPATTN_OP_FORWARD, SPATTN_OP_BACKWARD}) {
        const char* const names = spattn_plan_kernel(plan, op);
        std::istringstream each(names ? names : "");
        for (std::string name; std::getline(each, name, ',');) planned.rows.push_back(name);
    }
    return planned;
}

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

// The number, written as 12,345, that stands before the word.
double number_before(const std::string& line, const std::string& word) {
    std::istringstream words(line);
    for (std::string number, next; words >> next; number = next) {
        if (next.rfind(word, 0) != 0 || number.empty()) continue;
        number.erase(std::remove(number.begin(), number.end(), ','), number.end());
        return std::strtod(number.c_str(), nullptr);
    }
    return 0;
}

// Operands of one call in the device's memory.
class OnDevice {
public:
    OnDevice(const Device& device, spattn_enum axes) : device_(device), axes_(axes) {}
    ~OnDevice() {
        for (const Copy& copy : copies_) release(copy.memory);
    }
    OnDevice(const OnDevice&) = delete;

    const spattn_tensor* put(Operand& operand, Operand::View kind = Operand::View::tensor) {
        if (!operand) return nullptr;
        void* const memory = put(operand.memory().data(), operand.memory().size());
        copies_.back().operand = &operand;
        return operand.view(memory, device_.id, axes_, kind);
    }

    void* put(const void* bytes, size_t size) {
        void* const memory = device_.allocate(size);
        copies_.push_back({memory, nullptr});
        device_.copy_in(memory, bytes, size);
        return memory;
    }

    // Scratch whose content means nothing.
    void* spoiled(size_t size) {
        if (!size) return nullptr;
        const std::vector<char> bytes(size, char(0xff));
        return put(bytes.data(), size);
    }

    const spattn_tensor* lists(const std::vector<int64_t>& values, std::vector<int64_t> shape, bool is_wide) {
        if (values.empty()) return nullptr;
        if (axes_ == SPATTN_THD) shape.erase(shape.begin());
        const std::vector<int32_t> narrow(values.begin(), values.end());
        void* const memory = is_wide ? put(values.data(), values.size() * sizeof values[0])
                                     : put(narrow.data(), narrow.size() * sizeof narrow[0]);
        shapes_.push_back(std::move(shape));
        const std::vector<int64_t>& kept = shapes_.back();
        const spattn_dtype dtype{SPATTN_INT, uint8_t(is_wide ? 64 : 32), 1};
        views_.push_back({memory, device_.id, int32_t(kept.size()), dtype, kept.data(), nullptr, 0});
        return &views_.back();
    }

    void bring_back() {
        each_operand([&](void* memory, std::vector<char>& bytes) {
            device_.copy_out(bytes.data(), memory, bytes.size());
        });
    }

    // Operands become zeros.
    void clear() {
        each_operand([&](void* memory, const std::vector<char>& bytes) {
            device_.copy_in(memory, std::vector<char>(bytes.size()).data(), bytes.size());
        });
    }
    // Operands become what they were when they were put.
    void renew() {
        each_operand([&](void* memory, const std::vector<char>& bytes) {
            device_.copy_in(memory, bytes.data(), bytes.size());
        });
    }

    // The bytes of all operands, or of all others.
    std::vector<std::vector<char>> content(const std::vector<Operand*>& others = {}) const {
        std::vector<std::vector<char>> all;
        each_operand([&](void* memory, const std::vector<char>& of_operand) {
            for (Operand* other : others)
                if (&other->memory() == &of_operand) return;
            std::vector<char>& bytes = all.emplace_back(of_operand.size());
            device_.copy_out(bytes.data(), memory, bytes.size());
        });
        return all;
    }

private:
    struct Copy {
        void* memory;
        Operand* operand;
    };
    // act(where an operand's copy lies, the operand's bytes)
    template <class Act>
    void each_operand(Act act) const {
        for (const Copy& copy : copies_)
            if (copy.operand) act(copy.memory, copy.operand->memory());
    }
    void release(void* memory) {
        try {
            device_.release(memory);
        } catch (const std::exception&) {
            // What broke the device is already on its way to the caller.
        }
    }
    const Device& device_;
    spattn_enum axes_;
    std::vector<Copy> copies_;
    std::deque<std::vector<int64_t>> shapes_;
    std::deque<spattn_tensor> views_;
};

size_t workspace_bytes(const spattn_plan* plan, spattn_op op) {
    size_t bytes = 0;
    demand(spattn_plan_workspace(plan, op, &bytes, nullptr), "workspace");
    return bytes;
}

}  // namespace

Planned make_plan(const spattn_context* context, const Problem& problem, const std::string& pinned_row) {
    if (pinned_row.empty()) {
        const std::shared_lock lock(pin_lock);
        return plan_now(context, problem);
    }
    const std::unique_lock lock(pin_lock);
    set_pin(pinned_row);
    Planned planned = plan_now(context, problem);
    set_pin("");
    return planned;
}

Facts read(const std::string& explained) {
    Facts facts;
    std::istringstream lines(explained);
    double lanes = 0;
    for (std::string line; std::getline(lines, line);) {
        if (starts_with(line, "machine")) lanes = number_before(line, "lane");
        if (starts_with(line, "  rounds")) {
            facts.dispatches = true;
            facts.has_rounds |= number_before(line, "round") > 1;
        }
        if (starts_with(line, "  predicted")) facts.seconds += 1e-6 * number_before(line, "us");
        if (!starts_with(line, "  tasks")) continue;
        facts.has_more_tasks_than_lanes |= lanes > 0 && number_before(line, "in") > lanes;
        facts.splits_rows |= line.find(" split into ") != std::string::npos;
    }
    return facts;
}

std::string reason_of(const std::string& why) {
    const size_t considered = why.find("considered: ");
    const std::string pass = why.find("backward pass") != std::string::npos ? "backward: " : "forward: ";
    if (considered == std::string::npos) return pass + why.substr(0, 80);
    std::string reasons = why.substr(considered + std::strlen("considered: "));
    for (size_t at = 0; at < reasons.size();) {
        const size_t end = std::min(reasons.find("; ", at), reasons.size()), colon = reasons.find(": ", at);
        const size_t start = colon < end ? colon + 2 : at;
        const std::string reason = reasons.substr(start, end - start);
        at = end + 2;
        bool is_about_others = reason.find("pins another row") != std::string::npos;
        for (const char* other :
             {"for device", "for dtype", "reference row", "not on this machine", "not on this device"})
            is_about_others |= starts_with(reason, other);
        if (!is_about_others) return pass + reason;
    }
    return pass + "no row of this dtype";
}

std::vector<Row> find_rows(const spattn_context* context) {
    constexpr int64_t dims[][2] = {{128, 128}, {64, 64}, {16, 16}, {576, 512}};
    std::vector<Row> rows;
    for (int32_t i = 0; i < spattn_kernel_count(); ++i) {
        if (!spattn_kernel_runs_here(i)) continue;
        Row row{spattn_kernel_name(i)};
        const size_t at = row.name.rfind("_heads");  // and how many, where they share tiles
        if (at != std::string::npos && std::isdigit(row.name[at + 6]))
            row.tile_heads = std::stoll(row.name.substr(at + 6));
        for (size_t n = 0; n < std::size(dims) * std::size(types) * 4 && !row.type; ++n) {
            Problem probe;
            probe.type = &types[n / 4 % std::size(types)];
            row.is_backward = n % 2, row.is_reference = n / 2 % 2;
            spattn_problem& c = probe.c;
            c.struct_size = sizeof c, c.batch = c.heads_kv = 1, c.heads_q = row.tile_heads, c.seq_q = c.seq_k = 64;
            c.head_dim = dims[n / 4 / std::size(types)][0], c.head_dim_v = dims[n / 4 / std::size(types)][1];
            c.flags = uint32_t(row.is_backward * SPATTN_PLAN_BACKWARD + row.is_reference * SPATTN_PLAN_REFERENCE);
            c.flags |= probe.type->flags;
            if (c.head_dim > 512) c.flags |= SPATTN_PLAN_VALUE_IN_KEY;  // as latent attention has it
            probe.drawn.pattern = parse("causal");
            const Planned planned = make_plan(context, probe, row.name);
            for (const std::string& name : planned.rows)
                if (name == row.name) row.type = probe.type;
        }
        if (row.type) rows.push_back(row);
    }
    return rows;
}

// Gradients whose last bits differ between calls, as the plan says itself.
std::vector<Operand*> added_by_arrival(const std::string& explained, Tensors& t) {
    std::vector<Operand*> found;
    std::istringstream lines(explained);
    for (std::string line; std::getline(lines, line);)
        for (const auto& [name, gradient] : {std::pair{"dq", &t.dq}, {"dk", &t.dk}, {"dv", &t.dv}})
            if (starts_with(line, "  bits") && line.find(name) != std::string::npos) found.push_back(gradient);
    return found;
}

bool run(const Device& device, const spattn_plan* plan, Problem& problem, Tensors& t) {
    using View = Operand::View;
    const spattn_problem& p = problem.c;
    OnDevice memory(device, p.axes), ragged(device, SPATTN_THD);
    OnDevice& rows = problem.is_ragged() ? ragged : memory;
    const auto of_rows = [&](Operand& of_entries, Operand& of_call) -> Operand& {
        return problem.is_ragged() ? of_call : of_entries;
    };
    spattn_forward_args f{};
    f.struct_size = sizeof f;
    f.q = rows.put(of_rows(problem.has_float8_operands() ? t.narrow.q : t.q, t.ragged.q));
    f.out = rows.put(of_rows(t.out, t.ragged.out));
    Operand& k = problem.has_float8_keys() ? t.narrow.k : t.pool_k ? t.pool_k : t.k;
    Operand& v = problem.has_float8_keys() ? t.narrow.v : t.pool_k ? t.pool_v : t.v;
    f.k = memory.put(k), f.v = memory.put(v);
    f.k_scales = memory.put(t.narrow.k_scales, View::scales), f.v_scales = memory.put(t.narrow.v_scales, View::scales);
    f.q_scales = memory.put(t.narrow.q_scales, View::scales);
    f.lse = rows.put(of_rows(t.lse, t.ragged.lse), View::rows);
    f.max_logits = rows.put(of_rows(t.max_logits, t.ragged.max_logits), View::rows);
    f.sink_logits = memory.put(t.sinks, View::heads);
    f.starts = memory.lists(t.starts, {p.batch}, problem.index % 2);
    f.query_offsets = memory.lists(problem.query_offsets, {p.batch + 1}, problem.index % 5 < 2);
    const int64_t parent_rows = problem.is_ragged() ? problem.ragged_rows : p.seq_q;
    f.parents = rows.lists(problem.is_ragged() ? t.ragged.parents : t.parents,
                           {problem.is_ragged() ? 1 : p.batch, parent_rows}, problem.index % 7 < 3);
    if (p.page_size) f.page_table = memory.lists(t.page_table, {p.batch, p.seq_k / p.page_size}, problem.index % 3 == 0);
    if (problem.drawn.list_most) {
        const bool is_ragged = problem.is_ragged();
        const int64_t batch = is_ragged ? 1 : p.batch, queries = is_ragged ? problem.ragged_rows : p.seq_q;
        const int64_t lists = (queries + problem.drawn.list_block_q - 1) / problem.drawn.list_block_q;
        const auto is_wide = [&] { return problem.random.one_in(2); };
        const auto &indices = is_ragged ? t.ragged.indices : t.indices, &counts = is_ragged ? t.ragged.counts : t.counts;
        f.indices = rows.lists(indices, {batch, lists, p.heads_kv, problem.drawn.list_most}, is_wide());
        f.index_counts = rows.lists(counts, {batch, lists, p.heads_kv}, is_wide());
    }
    f.workspace_bytes = workspace_bytes(plan, SPATTN_OP_FORWARD), f.workspace = memory.spoiled(f.workspace_bytes);
    spattn_status status = spattn_forward(plan, &f);
    const bool has_max_logits = status != SPATTN_E_UNSUPPORTED || !f.max_logits;
    if (!has_max_logits) {
        f.max_logits = nullptr;
        status = spattn_forward(plan, &f);
    }
    demand(status, "forward");
    device.synchronize();
    if (!problem.is_large) {
        const auto first = rows.content();
        demand(spattn_forward(plan, &f), "second forward");
        device.synchronize();
        if (rows.content() != first) throw std::runtime_error("a second forward has other bits");
    }
    if (problem.is_on_cache() && problem.index / 2 % 2) {  // a layer's call on zeros, and the next layer's
        memory.clear(), ragged.clear();
        demand(spattn_forward(plan, &f), "forward of zeros");
        device.synchronize();
        memory.renew(), ragged.renew();
        f.flags = SPATTN_FORWARD_SAME_STEP;
        demand(spattn_forward(plan, &f), "forward with a layout");
        device.synchronize();
    }
    if (problem.is_backward()) {
        spattn_backward_args b{};
        b.struct_size = sizeof b;
        b.q = f.q, b.k = f.k, b.v = f.v, b.out = f.out, b.lse = f.lse, b.sink_logits = f.sink_logits;
        b.indices = f.indices, b.index_counts = f.index_counts;
        b.q_scales = f.q_scales, b.k_scales = f.k_scales, b.v_scales = f.v_scales;
        b.dout = memory.put(t.dout), b.dlse = memory.put(t.dlse, View::rows);
        b.dq = memory.put(t.dq), b.dk = memory.put(t.dk), b.dv = memory.put(t.dv);
        b.dsink_logits = memory.put(t.dsinks, View::heads);
        b.workspace_bytes = workspace_bytes(plan, SPATTN_OP_BACKWARD), b.workspace = memory.spoiled(b.workspace_bytes);
        demand(spattn_backward(plan, &b), "backward");
        device.synchronize();
        if (!problem.is_large || problem.has(SPATTN_PLAN_DETERMINISTIC)) {
            const std::vector<Operand*> others = added_by_arrival(explain(plan), t);
            if (!others.empty() && problem.has(SPATTN_PLAN_DETERMINISTIC))
                throw std::runtime_error("a deterministic plan says that bits differ");
            const auto first = memory.content(others);
            demand(spattn_backward(plan, &b), "second backward");
            device.synchronize();
            if (memory.content(others) != first) throw std::runtime_error("a second backward has other bits");
        }
    }
    memory.bring_back(), ragged.bring_back();
    if (!has_max_logits) t.max_logits = {};
    if (problem.is_ragged()) t.unpack(problem);
    return has_max_logits;
}

}  // namespace random_test
