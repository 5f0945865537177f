// SPDX-License-Identifier: MIT
// The plan as text. Numbers are formatted here, digit by digit: streams and printf would ask the host's locale.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "plan/admission.h"
#include "plan/plan.h"
#include "plan/stats.h"

namespace spattn {
namespace {

std::string decimal(double value, int digits) {
    char buffer[400];
    return {buffer, std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::fixed, digits).ptr};
}

// 1234567 as 1,234,567.
std::string grouped(double value) {
    std::string digits = decimal(std::fabs(std::round(value)), 0);
    for (size_t at = digits.size(); at > 3;) digits.insert(at -= 3, 1, ',');
    return (value < 0 ? "-" : "") + digits;
}

// Three or four digits and a unit: "1.88 GFLOP".
std::string scaled(double value, double step, const char* unit) {
    const char* prefixes[] = {"", "K", "M", "G", "T", "P", "E"};
    int power = 0;
    while (value >= step && power < 6) {
        value /= step;
        ++power;
    }
    const std::string binary = step == 1024 && power ? "i" : "";
    const int digits = power == 0 || value >= 100 ? 0 : value < 10 ? 2 : 1;
    return decimal(value, digits) + " " + prefixes[power] + binary + unit;
}
std::string bytes(double value) { return scaled(value, 1024, "B"); }

std::string percent(double part, double whole) { return decimal(whole > 0 ? 100 * part / whole : 0, 1) + " %"; }

std::string shortest(double value) {
    char buffer[64];
    return {buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr};
}

std::string plural(double count, const std::string& noun, const std::string& nouns) {
    return grouped(count) + " " + (count == 1 ? noun : nouns);
}
std::string plural(double count, const std::string& noun) { return plural(count, noun, noun + "s"); }

std::string blocks_of(const Kernel& kernel) {
    return decimal(kernel.block_q, 0) + " x " + decimal(kernel.block_k, 0);
}

std::string line(const char* label, const std::string& value) {
    std::string out = label;
    out.resize(12, ' ');
    return out + value + "\n";
}

std::string describe_problem(const CompiledPlan& plan) {
    const Problem& p = plan.problem;
    std::string sizes = "batch " + grouped(double(p.sequences()));
    sizes += ", heads " + grouped(double(p.heads_q)) + " on " + grouped(double(p.heads_kv));
    sizes += ", queries " + grouped(double(p.seq_q)) + (p.ragged ? " of all" : "") + ", keys " + grouped(double(p.seq_k));
    sizes += ", head_dim " + decimal(double(p.head_dim), 0) + "/" + decimal(double(p.head_dim_v), 0);
    sizes += std::string(", ") + dtype_row(p.dtype).name + (p.tf32 ? " or TF32" : "");
    if (p.float8_operands) sizes += " from " + describe_dtype(dtype_float8);
    sizes += ", scale " + shortest(p.scale);
    if (p.float8_cache) sizes += ", keys of " + describe_dtype(p.key_dtype());
    if (p.softcap != 0) sizes += ", softcap " + shortest(p.softcap);
    if (p.has_sink_logits) sizes += ", sink logits";
    sizes += p.has_starts ? ", beginning where each call says" : ", q_offset " + decimal(double(p.q_offset), 0);
    if (p.has_parents) sizes += ", nodes of trees";
    std::string out = line("problem", sizes);
    const double queries = double(p.is_of_sequences() ? p.seq_k : p.seq_q);  // that pairs were counted of
    const double entries = double(p.is_of_sequences() ? p.sequences() : p.batch);
    const double all = entries * double(p.heads_q) * queries * double(p.seq_k);
    const Counts& c = plan.counts;
    out += line("pattern", plan.pattern_text);
    out += line("pairs", grouped(c.pairs) + " kept of " + grouped(all) + " (" + percent(c.pairs, all) + "), " +
                             grouped(double(c.row_min)) + " to " + grouped(double(c.row_max)) + " keys a query, " +
                             plural(double(c.rows_empty), "empty row"));
    const Machine& m = plan.options.machine;
    return out + line("machine", m.name + ", " + plural(m.lanes, "lane") + " at " + decimal(m.clock, 1) + " GHz, " +
                                     decimal(m.bandwidth, 0) + " GB/s");
}

std::string describe_order(Order order) {
    switch (order) {
        case Order::residue: return " in residue classes";
        case Order::packed: return " with packed tokens";
        case Order::listed: return " with listed tiles";
        case Order::dispatched: return " with dispatched queries";
        default: return "";
    }
}

// Tokens in listed tiles, each place counted.
double count_listed_tiles(const Axis& axis) {
    return double(axis.tokens.size()) - double(std::count(axis.tokens.begin(), axis.tokens.end(), no_token));
}

std::string describe_order(const PiecePlan& piece) {
    const Layout& layout = *piece.layout;
    if (piece.order == Order::plain) return "";
    if (piece.order == Order::residue)
        return line("  order", layout.queries.modulus > 1
                                   ? grouped(double(layout.queries.modulus)) + " residue classes of queries and keys"
                                   : "residue classes of queries and keys, several a tile");
    return line("  order", plural(count_listed_tiles(layout.queries), "query", "queries") + " and " +
                               plural(count_listed_tiles(layout.keys), "key") + " in listed tiles");
}

std::string describe_layout(const PiecePlan& piece) {
    const LayoutStats& stats = piece.stats;
    const Layout& layout = *piece.layout;
    const double all = double(layout.kind_of_head.size()) * layout.by_query.rows * layout.by_key.rows;
    const std::string kinds = grouped(layout.head_kinds) + (layout.head_kinds == 1 ? " kind" : " kinds");
    return describe_order(piece) +
           line("  blocks", blocks_of(*piece.kernel) + ": " + grouped(stats.blocks - stats.masked) + " full, " +
                                grouped(stats.masked) + " masked of " + grouped(all) + "; " +
                                plural(layout.num_masks, "mask") + ", " + kinds + " of heads") +
           line("  visited", grouped(stats.visited) + " pairs, " + percent(stats.visited - stats.pairs, stats.visited) +
                                 " of them not kept");
}

// The block row that would have cost least, for what a person may ask: why not blocks?
std::string describe_waste(const PiecePlan& piece) {
    const Candidate* best = nullptr;
    for (const Candidate& c : piece.considered)
        if (c.refused.empty() && c.kernel->family == Family::block && (!best || c.cost.us < best->cost.us)) best = &c;
    if (!best) return "";
    return line("  instead", "of " + blocks_of(*best->kernel) + " blocks, which visit " + grouped(best->stats.visited) +
                                    " pairs, " + percent(best->stats.visited - best->stats.pairs, best->stats.visited) +
                                    " of them not kept");
}

std::string describe_call_lists(const ListShape& shape) {
    const std::string unit = shape.block_k == 1 ? "key" : "block of " + decimal(double(shape.block_k), 0) + " keys";
    return "given at run time, up to " + grouped(double(shape.most)) + " times a " + unit;
}

// The same lists, where a row reads a layout.
std::string describe_call_layout(const CompiledPlan& plan, const Kernel& kernel) {
    const Problem& p = plan.problem;
    if (!p.call_lists.at_run_time()) return "";
    const int joined = join_blocks(kernel, p);
    const std::string tiles = joined > 1 ? ", " + grouped(joined) + " to a tile of keys" : "";
    return line("  lists", describe_call_lists(p.call_lists) + ", as blocks of a layout" + tiles);
}

// Where a row on a cache finds its keys.
std::string describe_cache(const PiecePlan& piece) {
    if (!piece.cache) return "";
    const CacheShape& shape = *piece.cache;
    const std::string pages = shape.call.page_size ? "in pages of " + grouped(double(shape.call.page_size)) : "in place";
    const std::string found = shape.keys == CacheKeys::widened  ? "copied as elements first"
                              : shape.keys != CacheKeys::listed ? "named by blocks"
                              : takes_stretches(*piece.kernel, shape.call)
                                  ? "named by " + grouped(shape.stretch) + " tokens"
                                  : "named token by token";
    return line("  cache", grouped(double(shape.call.seq_k)) + " keys an entry, " + pages + ", " + found);
}

std::string describe_pattern_lists(const CacheLists& lists) {
    const std::string rounds =
        lists.rounds() > 1 ? ", in rounds of " + plural(double(lists.queries), "query", "queries") : "";
    return "made of the pattern in each call, up to " + plural(double(lists.most), "key") + rounds + ": ";
}

std::string describe_lists(const CompiledPlan& plan, const PiecePlan& piece) {
    const LayoutStats& stats = piece.stats;
    const std::string rows = plural(stats.gathered, "key row") + " gathered for " + grouped(stats.pairs) + " pairs";
    if (piece.tokens) return line("  lists", rows) + describe_waste(piece);
    const Problem& p = plan.problem;
    const std::string cache = p.page_size ? "in pages of " + grouped(double(p.page_size)) : "in place";
    const std::string lists = p.is_of_sequences() ? describe_pattern_lists(*piece.cache_lists)
                                                  : describe_call_lists(p.call_lists) + ": ";
    const bool is_cut = piece.layout && !p.is_of_sequences();
    return line("  lists", lists + rows + (is_cut ? ", less what the pattern does not keep" : "")) +
           (p.has_starts ? line("  cache", grouped(double(p.seq_k)) + " keys an entry, " + cache) +
                               (p.is_of_sequences() ? describe_waste(piece) : "") : "");
}

// What rounds of dispatched queries are made of.
std::string describe_dispatch(const CompiledPlan& plan, const PiecePlan& piece) {
    const DispatchShape& shape = *piece.dispatch;
    const double copies = double(shape.entries()) * double(shape.copies_of_entry());
    return line("  lists", describe_call_lists(plan.problem.call_lists) + ", to which queries are dispatched") +
           line("  rounds", plural(double(shape.rounds()), "round") + " of up to " + grouped(copies) + " copies in " +
                                blocks_of(*piece.kernel) + " blocks");
}

// The tasks of one walk. cache: of a plan whose schedule may have room for more.
std::string describe_tasks(const char* name, const Schedule& s, const Machine& machine,
                           const CacheShape* cache = nullptr) {
    const int32_t queues = view(s).queues;
    const double tasks = cache ? cache->plan_tasks : double(s.tasks.size());
    const double rows = cache ? cache->plan_joins : double(s.joins.size());
    const double parts = cache ? double(cache->join_of_part.size()) : s.num_parts;
    std::string split = rows == 0 ? "none split" : plural(rows, "row") + " split into " + plural(parts, "part");
    if (cache && cache->cuts_rows_for) split += ", long ones by their lengths";
    if (!s.rounds.empty()) split += ", " + plural(double(s.rounds.size()), "round") + " of query rows";
    return line(name, grouped(tasks) + " in " + plural(queues, "queue") + ", " + split + "; " +
                               decimal(double(queues) / machine.lanes, 1) + " waves");
}

std::string describe_first_tasks(const PiecePlan& piece, const Machine& machine) {
    if (!piece.portions.schedules.empty())
        return describe_tasks("  tasks", piece.portions.schedules.front(), machine);
    return describe_tasks("  tasks", piece.schedule, machine, piece.cache ? &*piece.cache : nullptr);
}

// How a pass takes its heads where it does not take all at once.
std::string describe_portions(const PassPlan& pass) {
    if (!pass.portions) return "";
    const Problem& each = pass.portions->each;
    const std::string heads = plural(double(each.batch * each.heads_q), "head");
    return line("  portions", grouped(double(pass.portions->count)) + " of " + heads + ", one after the other");
}

std::string describe_bits(const CompiledPlan& plan, const Kernel& kernel) {
    const char* const added = kernel.added_by_arrival ? kernel.added_by_arrival(plan.problem) : nullptr;
    if (!added) return "";
    return line("  bits", std::string("last ones of ") + added + " differ between calls: terms are added as they "
                          "arrive, but under SPATTN_PLAN_DETERMINISTIC");
}

std::string describe_cost(const Cost& cost) { return decimal(cost.us, 1) + " us, " + cost.binds; }

// How the row of a piece works on it.
std::string describe_way(const CompiledPlan& plan, const PiecePlan& piece) {
    switch (piece.kernel->family) {
        case Family::block:
            return (piece.order == Order::dispatched
                        ? describe_dispatch(plan, piece)
                        : describe_call_layout(plan, *piece.kernel) + describe_cache(piece) + describe_layout(piece)) +
                   describe_first_tasks(piece, plan.options.machine) +
                   (piece.kernel->num_walks > 1
                        ? describe_tasks("  then", piece.second_schedule, plan.options.machine)
                        : "") +
                   (piece.kernel->assumes ? line("  assumes", piece.kernel->assumes) : "");
        case Family::gather: return describe_lists(plan, piece);
        default: return "";
    }
}
std::string describe_row(const CompiledPlan& plan, const PiecePlan& piece) {
    return describe_way(plan, piece) + describe_bits(plan, *piece.kernel);
}

std::string describe_candidate(const Candidate& c, bool is_chosen) {
    return std::string(is_chosen ? "  * " : "    ") + c.kernel->name + describe_order(c.order) + ": " +
           (c.refused.empty() ? describe_cost(c.cost) : c.refused) + "\n";
}

std::string describe_considered(const std::vector<Candidate>& considered, const PiecePlan* chosen, Considered which) {
    std::string out = "  considered\n";
    std::vector<const Candidate*> useless;
    for (const Candidate& c : considered) {
        if (!c.could_serve && which == Considered::grouped) useless.push_back(&c);
        else out += describe_candidate(c, chosen && c.kernel == chosen->kernel && c.order == chosen->order);
    }
    for (const Refusals& r : group_refusals(useless)) out += "    " + grouped(r.count) + " more: " + r.why + "\n";
    return out;
}

std::string describe_work(const CompiledPlan& plan, const PassPlan& pass, Pass which) {
    const Problem& p = plan.problem;
    const double pairs = plan.counts.pairs * (p.is_of_sequences() ? call_share(p) : 1);  // on the average
    return line("  work", scaled(flops(p, pairs, which), 1000, "FLOP") + ", " +
                              bytes(operand_bytes(plan.problem, which)) + " of operands, " +
                              bytes(double(pass.workspace)) + " of workspace") +
           line("  predicted", describe_cost(pass.cost) + " binds");
}

// The whole first, then each piece.
std::string describe_pieces(const CompiledPlan& plan, const PassPlan& pass, Pass which, Considered considered) {
    std::string out = describe_work(plan, pass, which);
    out += line("  handed on", bytes(double(pass.carried)) + " from piece to piece");
    out += describe_considered(pass.whole, nullptr, considered);
    for (const PiecePlan& piece : pass.pieces) {
        out += line(" piece", piece.pattern_text);
        out += line("  by", piece.kernel->name) + describe_row(plan, piece);
        out += line("  predicted", describe_cost(piece.cost) + " binds");
        out += describe_considered(piece.considered, &piece, considered);
    }
    return out;
}

// What each call copies of operands of float8 before rows begin.
std::string describe_copies(const CompiledPlan& plan, const PassPlan& pass) {
    const Problem& p = plan.problem;
    if (!p.float8_operands) return "";
    const bool copies_all = !pass.pieces[0].kernel->multiplies_float8;
    const std::string copied = copies_all ? p.value_in_key ? "q and k" : "q, k and v" : "v";
    return line("  copies", copied + " as " + dtype_row(p.dtype).name + ", once a call");
}

std::string describe_pass(const CompiledPlan& plan, const PassPlan& pass, Pass which, Considered considered) {
    const char* const name = which == Pass::forward ? "forward" : "backward";
    if (pass.pieces.size() > 1)
        return line(name, grouped(double(pass.pieces.size())) + " pieces") + describe_copies(plan, pass) +
               describe_portions(pass) + describe_pieces(plan, pass, which, considered);
    const PiecePlan& whole = pass.pieces[0];
    return line(name, whole.kernel->name) + describe_copies(plan, pass) + describe_portions(pass) +
           describe_row(plan, whole) + describe_work(plan, pass, which) +
           describe_considered(whole.considered, &whole, considered);
}

}  // namespace

std::string explain(const CompiledPlan& plan, Considered considered) {
    std::string out = describe_problem(plan);
    out += line("layout", bytes(double(plan.layout_bytes)) + " of lists and masks");
    out += describe_pass(plan, plan.forward, Pass::forward, considered);
    if (!plan.backward.pieces.empty()) out += describe_pass(plan, plan.backward, Pass::backward, considered);
    return out;
}

}  // namespace spattn
