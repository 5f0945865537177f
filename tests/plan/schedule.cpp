// SPDX-License-Identifier: MIT
// Is every block of every list in exactly one task, and is each row put together from the right parts?
#include <algorithm>
#include <map>
#include <numeric>

#include "check.h"
#include "layout/random_patterns.h"
#include "layout/orders/residue.h"
#include "plan/imaginary.h"

using namespace spattn;

namespace {

int64_t list_length(const ListsView& lists, int32_t head_kind, int32_t row) {
    const Slice slice = lists.slices[size_t(head_kind) * lists.rows + row];
    int64_t length = 0;
    for (int32_t r = slice.begin; r < slice.end; ++r) length += lists.runs[r].count;
    return length;
}

// Blocks a (head, row) of the pass has: by key, those of the group's heads one after the other.
int64_t row_length(const Problem& p, const LayoutView& layout, Pass pass, int32_t head, int32_t row) {
    if (pass == Pass::forward) return list_length(layout.by_query, layout.kind_of_head[head], row);
    int64_t length = 0;
    for (int64_t member = head * p.group(); member < (head + 1) * p.group(); ++member)
        length += list_length(layout.by_key, layout.kind_of_head[member], row);
    return length;
}

Walk walk_of(Pass pass, int32_t tile_heads = 1) {
    if (pass == Pass::forward) return {Owner::queries, {}, tile_heads};
    return {Owner::keys, {.equal_shares = true, .workers = 32}};
}

void check_schedule(const Problem& p, const LayoutView& layout, Pass pass, int32_t tile_heads = 1) {
    const Schedule s = make_schedule(p, layout, walk_of(pass, tile_heads), 8);
    const TasksView tasks = view(s);
    CHECK_EQ(tasks.tile_heads, tile_heads);
    const int64_t heads = p.batch * (pass == Pass::forward ? p.heads_q / tile_heads : p.heads_kv);
    const int32_t rows = pass == Pass::forward ? layout.by_query.rows : layout.by_key.rows;

    std::map<std::pair<int32_t, int32_t>, std::map<int32_t, Task>> pieces;  // of a row, by skip
    bool is_whole = true, is_one_head = true, is_sorted = true;
    int64_t before = INT64_MAX / 3;
    CHECK_EQ(tasks.begin[0], 0);
    CHECK_EQ(size_t(tasks.begin[tasks.queues]), s.tasks.size());
    for (int32_t w = 0; w < tasks.queues; ++w) {
        int64_t weight = 0;
        for (int32_t t = tasks.begin[w]; t < tasks.begin[w + 1]; ++t) {
            const Task& task = tasks.tasks[t];
            is_whole &= pieces[{task.head, task.row}].emplace(task.skip, task).second;
            is_one_head &= task.head == tasks.tasks[tasks.begin[w]].head && task.head % tile_heads == 0;
            weight += std::max(task.take, 1);
        }
        // Exactly, or by the leading bit before the last of many queues.
        const bool is_exact = tasks.queues < 512 || w > tasks.queues - 256;
        is_sorted &= weight > 0 && (is_exact ? weight <= before : weight < 2 * before);
        before = weight;
    }
    CHECK(is_one_head);
    CHECK(is_sorted);
    CHECK_EQ(int64_t(pieces.size()), heads * rows);

    std::map<std::pair<int32_t, int32_t>, Join> joins;
    int32_t parts = 0;
    for (const Join& join : s.joins) {
        const bool is_first = joins.emplace(std::pair{join.head, join.row}, join).second;
        is_whole &= is_first && join.parts > 1 && join.first_part == parts;
        parts += join.parts;
    }
    CHECK_EQ(parts, s.num_parts);
    for (const auto& [place, of_row] : pieces) {
        int64_t at = 0;
        int32_t part = of_row.size() > 1 && joins.count(place) ? joins[place].first_part : whole_row;
        is_whole &= of_row.size() == (joins.count(place) ? size_t(joins[place].parts) : 1);
        for (const auto& [skip, task] : of_row) {
            is_whole &= task.skip == at && task.part == part && (task.take > 0 || of_row.size() == 1);
            at += task.take;
            part += part != whole_row;
        }
        is_whole &= at == row_length(p, layout, pass, place.first, place.second);
    }
    CHECK(is_whole);
}

Problem problem_of(const Extent& e, int64_t heads_kv) {
    Problem p = imaginary::problem(e.seq_q, e.seq_k);
    p.batch = e.batch;
    p.heads_q = e.heads;
    p.heads_kv = heads_kv;
    p.q_offset = e.q_offset;
    return p;
}

int64_t longest_queue(const Schedule& s) {
    int64_t longest = 0;
    for (size_t w = 0; w + 1 < s.begin.size(); ++w) {
        int64_t blocks = 0;
        for (int32_t t = s.begin[w]; t < s.begin[w + 1]; ++t) blocks += s.tasks[t].take;
        longest = std::max(longest, blocks);
    }
    return longest;
}

int64_t all_blocks(const Schedule& s) {
    int64_t blocks = 0;
    for (const Task& task : s.tasks) blocks += task.take;
    return blocks;
}

}  // namespace

TEST(random_schedules_cover_each_block_once) {
    for (int seed = 0; seed < 600; ++seed) {
        Random random(uint64_t(seed) + 77);
        Extent e = random_extent(random);
        e.seq_q *= random.in(1, 6);
        e.seq_k *= random.in(1, 6);
        const PatternRef pattern = random_pattern(random, e);
        check::context = "seed " + std::to_string(seed) + " " + pattern->print();
        const Layout layout = build_layout(*pattern, e, 8, 8);
        const int64_t heads_kv = e.heads == 3 && random.one_in(2) ? 1 : e.heads;
        check_schedule(problem_of(e, heads_kv), view(layout), Pass::forward);
        check_schedule(problem_of(e, heads_kv), view(layout), Pass::backward);
    }
}

TEST(schedules_of_residue_classes_cover_each_block_once) {
    int uneven = 0;
    for (int seed = 0; seed < 300; ++seed) {
        Random random(uint64_t(seed) + 5);
        const Extent e{1, 2, random.in(1, 900), random.in(1, 900), random.in(-40, 40)};
        const int64_t modulus = random.in(2, 20);
        if (modulus > std::max(e.seq_q, e.seq_k)) continue;
        const PatternRef pattern = make_dilated(random.in(0, 300), random.in(0, 90), modulus);
        check::context = "seed " + std::to_string(seed) + " " + pattern->print();
        const Layout layout = build_residue_layout(*pattern, e, int32_t(modulus), 8, 8).value();
        check_schedule(problem_of(e, 1), view(layout), Pass::forward);
        check_schedule(problem_of(e, 1), view(layout), Pass::backward);
        uneven += layout.queries.residue_tiles % 4 != 0 && layout.queries.residue_tiles > 4;
    }
    check::context.clear();
    CHECK(uneven > 50);
}

TEST(long_rows_and_columns_are_split) {
    Extent e{1, 2, 4096, 32768, 28672};
    const PatternRef pattern = make_union({make_window(100, 0), make_global_tokens({e.q_offset + 7, 9})});
    const Layout layout = build_layout(*pattern, e, 64, 64);
    const Problem p = problem_of(e, 1);
    for (Pass pass : {Pass::forward, Pass::backward}) {
        const Schedule s = make_schedule(p, view(layout), walk_of(pass), 8);
        CHECK(!s.joins.empty());
        check_schedule(p, view(layout), pass);
        CHECK(longest_queue(s) <= std::max<int64_t>(64, (all_blocks(s) + 31) / 32));
    }
}

// Heads of a group have one task where they share a tile, named after the first of them.
TEST(heads_that_share_tiles_share_tasks) {
    for (int seed = 0; seed < 200; ++seed) {
        Random random(uint64_t(seed) + 31);
        const int32_t tile_heads = int32_t(random.in(0, 1) ? 2 : 4);
        const Extent e{random.in(1, 2), tile_heads * random.in(1, 3), random.in(1, 90), random.in(1, 900), 0};
        const PatternRef pattern = make_window(random.in(0, 700), random.in(0, 40));
        check::context = "seed " + std::to_string(seed) + " " + pattern->print();
        const Layout layout = build_layout(*pattern, e, 4, 8);
        check_schedule(problem_of(e, e.heads / tile_heads), view(layout), Pass::forward, tile_heads);
    }
}

// Parts are as long as it takes for the lanes to end together, as far as rows can be cut so.
TEST(few_long_rows_are_cut_for_all_lanes) {
    int split = 0;
    for (int seed = 0; seed < 300; ++seed) {
        Random random(uint64_t(seed) + 9);
        const int lanes = int(random.in(2, 140));
        const Extent e{1, random.in(1, 8), random.in(1, 3) * 16, 8 * random.in(500, 9000), 0};
        const Layout layout = build_layout(*make_full(), e, 16, 8);
        check::context = "seed " + std::to_string(seed);
        const Walk walk{Owner::queries, {.workers = 0, .block_us = 1, .shared_blocks = 1}};
        const Schedule s = make_schedule(problem_of(e, e.heads), view(layout), walk, lanes);
        const int64_t rows = e.heads * e.seq_q / 16, blocks = all_blocks(s) / rows;
        const auto blocks_of_a_lane = [&](int64_t tasks, int64_t longest) {
            return (tasks + lanes - 1) / lanes * longest;
        };
        int64_t least = blocks_of_a_lane(rows, blocks);
        for (int64_t parts = 2; parts <= blocks; ++parts)
            least = std::min(least, blocks_of_a_lane(rows * parts, (blocks + parts - 1) / parts));
        split += !s.joins.empty();
        CHECK(blocks_of_a_lane(int64_t(s.tasks.size()), longest_queue(s)) <= least + least / 4 + 1);
    }
    check::context.clear();
    CHECK(split > 100);
}

// Whole rows of 16 blocks take 17 us, three parts of each 7 us, if to put them together took no time.
TEST(rows_are_split_where_that_takes_less_time) {
    const Extent e{1, 1, 64, 128, 0};
    const Layout layout = build_layout(*make_full(), e, 16, 8);
    const auto parts_of = [&](double join_us, double part_us) {
        const Walk walk{Owner::queries, {.workers = 0, .block_us = 1, .join_us = join_us, .part_us = part_us}};
        return make_schedule(problem_of(e, 1), view(layout), walk, 13).num_parts;
    };
    CHECK_EQ(parts_of(0, 0), 4 * 3);
    CHECK_EQ(parts_of(9, 0), 4 * 3);
    CHECK_EQ(parts_of(10, 0), 0);
    CHECK_EQ(parts_of(5, 0.25), 4 * 3);
    CHECK_EQ(parts_of(5, 1), 0);
}

// Lengths that differ little are no reason to leave a head: its keys are in the cache.
TEST(many_queues_stay_with_their_head) {
    Extent e{1, 4, 32768, 32768, 0};
    const Layout layout = build_layout(*make_bigbird(64, 3, 0, 9, 1), e, 64, 64);
    const Problem p = problem_of(e, 4);
    check_schedule(p, view(layout), Pass::forward);
    const Schedule s = make_schedule(p, view(layout), walk_of(Pass::forward), 8);
    CHECK(s.begin.size() > 512);
    int changes = 0;
    for (size_t t = 1; t < s.tasks.size(); ++t) changes += s.tasks[t].head != s.tasks[t - 1].head;
    CHECK(changes < 40);
}

// A round's tasks are the blocks of its query rows, each once; rows without blocks are written in the first.
TEST(rounds_share_out_each_block_once) {
    Extent e{1, 4, 1500, 1400, -100};
    for (const char* written : {"causal", "window(200,0)", "bigbird(64,1,0,2,3)", "sink(3) | window(70,0)"}) {
        const Layout built = build_layout(*parse_pattern(written), e, 16, 16);
        const LayoutView layout = view(built);
        const Problem p = problem_of(e, 2);
        for (const int32_t rounds : {2, 3, 8}) {
            check::context = text(written, " in ", rounds);
            const Schedule s = make_schedule(p, layout, walk_of(Pass::backward), 8, rounds);
            const TasksView tasks = view(s);
            CHECK_EQ(tasks.num_rounds, rounds);
            int64_t blocks = 0, rows = 0;
            int32_t at = 0, queue = 0, join = 0;
            for (const Round& round : s.rounds) {
                CHECK(round.first_row == at && round.first_queue == queue && round.first_join == join);
                at = round.end_row, queue = round.end_queue, join = round.end_join;
                std::map<std::pair<int32_t, int32_t>, std::map<int32_t, int32_t>> parts;  // by skip
                int64_t longest = 0, shortest = INT64_MAX;
                for (int32_t w = round.first_queue; w < round.end_queue; ++w) {
                    int64_t weight = 0;
                    for (int32_t t = tasks.begin[w]; t < tasks.begin[w + 1]; ++t) {
                        const Task& task = tasks.tasks[t];
                        const std::pair place{task.head, task.row};
                        CHECK(parts[place].emplace(task.skip, task.take).second);
                        CHECK(task.part < s.num_parts);
                        weight += task.take;
                    }
                    longest = std::max(longest, weight), shortest = std::min(shortest, weight);
                }
                CHECK(longest <= shortest + 1);
                for (const auto& [place, of_row] : parts) {
                    int64_t count = 0, there = 0;
                    for (const auto& [skip, take] : of_row) CHECK_EQ(skip, count), count += take;
                    for (int32_t head = place.first * 2; head < place.first * 2 + 2; ++head) {
                        const Slice slice = layout.by_key.slices[layout.kind_of_head[head] * layout.by_key.rows +
                                                                 place.second];
                        for (int32_t r = slice.begin; r < slice.end; ++r)
                            for (int32_t i = 0; i < layout.by_key.runs[r].count; ++i) {
                                const int32_t row = layout.by_key.runs[r].first + i;
                                there += row >= round.first_row && row < round.end_row;
                            }
                    }
                    CHECK_EQ(count, there);
                    CHECK(count > 0 || (round.first_row == 0 &&
                                        row_length(p, layout, Pass::backward, place.first, place.second) == 0));
                    blocks += count, rows += count == 0;
                }
            }
            int64_t all = 0, without = 0;
            for (int32_t head = 0; head < 2; ++head)
                for (int32_t row = 0; row < layout.by_key.rows; ++row) {
                    const int64_t length = row_length(p, layout, Pass::backward, head, row);
                    all += length, without += length == 0;
                }
            CHECK(blocks == all && rows == without);
            CHECK(at == layout.by_query.rows && queue == tasks.queues && join == tasks.num_joins);
        }
    }
}

TEST(queues_by_key_are_equal) {
    Extent e{1, 2, 8192, 8192, 0};
    const Layout layout = build_layout(*make_causal(), e, 64, 64);
    const Schedule s = make_schedule(problem_of(e, 2), view(layout), walk_of(Pass::backward), 8);
    CHECK_EQ(s.begin.size(), size_t(33));
    CHECK(longest_queue(s) <= (all_blocks(s) + 31) / 32 + 1);
}

TEST(short_rows_of_a_head_share_a_queue) {
    Extent e{1, 8, 16384, 16384, 0};
    const Layout layout = build_layout(*make_block_diagonal(64), e, 64, 64);
    const Schedule s = make_schedule(problem_of(e, 8), view(layout), walk_of(Pass::forward), 8);
    CHECK_EQ(s.tasks.size(), size_t(8 * 256));
    CHECK(s.begin.size() < s.tasks.size() / 4);
    CHECK(s.begin.size() > 200);
}

// Their tokens are neighbours in memory. 1,024 tokens a residue class, 16 tiles; 13 of them where the last turn is
// short.
TEST(residue_classes_take_turns) {
    for (const auto& [tokens, tiles] : {std::pair{16384, 16}, std::pair{13 * 1024, 13}}) {
        Extent e{1, 1, tokens, tokens, 0};
        const PatternRef pattern = make_intersection({make_causal(), make_dilated(1008, 0, 16)});
        const Layout layout = *build_residue_layout(*pattern, e, 16, 64, 64);
        check_schedule(problem_of(e, 1), view(layout), Pass::forward);
        const Schedule s = make_schedule(problem_of(e, 1), view(layout), walk_of(Pass::forward), 8);
        std::vector<int> left(16, tiles);
        for (const Task& task : s.tasks) --left[size_t(task.row / tiles)];
        CHECK(std::ranges::all_of(left, [](int tasks) { return tasks == 0; }));
        // Neighbours in a residue class stay neighbours, but after four, and where queues of equal length meet.
        int leaps = 0;
        for (size_t t = 1; t < s.tasks.size(); ++t) leaps += s.tasks[t].row != s.tasks[t - 1].row + 1;
        CHECK(leaps >= int(s.tasks.size()) / 4 - 1);
        CHECK(leaps <= int(s.tasks.size()) / 4 + 16);
    }
}
