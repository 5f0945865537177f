// SPDX-License-Identifier: MIT
// Do the costs of the rows that there are rank them as processors do?
#include <map>

#include "check.h"
#include "plan/backends.h"
#include "plan/imaginary.h"
#include "plan/stats.h"

using namespace spattn;

namespace {

// "gather_forward_f64_heads" of "avx2_gather_forward_f64_heads".
std::string without_arch(const Kernel& row) {
    const std::string name = row.name;
    return name.substr(name.find('_') + 1);
}

// Rows on panels are another algorithm, which pads few heads to a tile: where that is dear, the rows of AVX-512, which
// run on the same processors, serve.
bool is_on_panels(const Kernel& row) {
    const std::string name = row.name;
    return name.rfind("amx", 0) == 0 || name.rfind("avx512bf16_", 0) == 0;
}

// Gather rows of this CPU that differ in their arch alone, the best one first: what costs is their arch's code, too.
std::map<std::string, std::vector<const Kernel*>> gather_rows() {
    std::map<std::string, std::vector<const Kernel*>> rows;
    for (const Kernel& row : all_kernels())
        if (row.family == Family::gather && row.device == SPATTN_CPU && row.runs_here(0) && !is_on_panels(row))
            rows[without_arch(row)].push_back(&row);
    return rows;
}

// Not among them: many keys of a narrow head. Sums of dk and dv have whole vectors a key, which wide ones leave empty.
std::vector<Problem> gathered_problems() {
    std::vector<Problem> all;
    for (const int64_t seq : {64, 400, 4096, 65536})
        for (const int64_t dim : {8, 16, 64, 100, 576})
            for (const int64_t group : {1, 2, 3, 4, 8, 12, 64, 128})
                for (const bool has_lists : {false, true})
                    for (const bool value_in_key : {false, true}) {
                        if (dim < 16 && seq > 4096) continue;
                        Problem p = imaginary::problem(seq, seq, dim);
                        p.heads_kv = 2;
                        p.heads_q = 2 * group;
                        p.value_in_key = value_in_key;
                        if (has_lists) p.call_lists.most = std::min<int64_t>(seq, 512);
                        all.push_back(p);
                    }
    return all;
}

LayoutStats stats_of(const Problem& p, double density, bool is_shared) {
    if (p.call_lists.at_run_time()) return make_call_stats(p);
    const double rows = double(p.batch * p.heads_q * p.seq_q);
    return make_gather_stats(p, rows * std::max(1.0, density * double(p.seq_k)), is_shared);
}

}  // namespace

TEST(a_wider_arch_gathers_for_no_more_than_scalar_rows) {
    int compared = 0;
    for (const auto& [name, archs] : gather_rows())
        for (Problem p : gathered_problems())
            for (const double density : {0.001, 0.01, 0.1}) {
                p.dtype = archs[0]->dtype;
                const LayoutStats stats = stats_of(p, density, archs[0]->shares_lists);
                const double scalar = archs.back()->cost(p, stats, this_machine(1)).us;
                for (size_t i = 0; i + 1 < archs.size(); ++i, ++compared) {
                    check::context = text(archs[i]->name, ", ", p.seq_k, " keys, head_dim ", p.head_dim, ", group ",
                                          p.group(), ", ", stats.pairs, " pairs");
                    const double wider = archs[i]->cost(p, stats, this_machine(1)).us;
                    CHECK(wider <= scalar);
                }
            }
    check::context.clear();
    CHECK(compared > 0);
}

// One query of a group on one key head is one list, which stays with one lane.
TEST(gather_rows_take_one_list_no_faster_on_more_lanes) {
    Problem one = imaginary::problem(1, 16384, 128), many = imaginary::problem(64, 16384, 128);
    for (Problem* p : {&one, &many}) p->heads_q = 4, p->heads_kv = 1;
    int compared = 0;
    for (const auto& [name, archs] : gather_rows()) {
        if (archs[0]->pass != Pass::forward) continue;
        check::context = archs[0]->name;
        const auto us = [&, &row = *archs[0]](const Problem& p, int lanes) {
            return row.cost(p, make_gather_stats(p, double(p.heads_q * p.seq_q * p.seq_k), true), this_machine(lanes)).us;
        };
        CHECK_EQ(us(one, 16), us(one, 1));
        CHECK(us(many, 16) < us(many, 1) / 15);
        ++compared;
    }
    check::context.clear();
    CHECK(compared > 0);
}
