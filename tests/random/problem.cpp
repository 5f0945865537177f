// SPDX-License-Identifier: MIT
#include "problem.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

namespace random_test {

namespace {

constexpr int64_t most_elements[] = {4 << 20, 16 << 20};  // of one tensor of a small problem, and of a large one
constexpr int64_t most_own_pairs = 1 << 24;  // of all heads, where heads may see their own
constexpr int64_t most_listed = 4 << 20;     // indices of a large problem's call
constexpr int64_t most_nodes = 4096;         // of a tree
constexpr int64_t least_tokens = 2048;       // of a large problem

// ---- sizes ----

int64_t draw_length(Random& random, int64_t most) {
    if (random.one_in(5)) return random.in(1, std::min<int64_t>(5, most));
    if (random.one_in(3)) return std::clamp<int64_t>(64 * random.size(most / 64) + random.in(-1, 1), 1, most);
    return random.size(most);
}

void draw_heads(Random& random, spattn_problem& p, bool has_many_tasks, int64_t tile_heads) {
    const int64_t group = tile_heads > 1     ? tile_heads * random.of<int64_t>({1, 1, 3})
                          : random.one_in(2) ? 1
                                             : random.of<int64_t>({2, 3, 4, 5, 8, 12, 16});
    p.batch = random.one_in(2) ? 1 : random.in(2, has_many_tasks ? 8 : 3);
    p.heads_kv = has_many_tasks ? random.in(8, 60) : random.one_in(2) ? 1 : random.in(2, 5);
    p.heads_q = p.heads_kv * group;
}

// Rows with tiles of 512 columns mostly meet heads that others have no tiles for.
void draw_head_dims(Random& random, spattn_problem& p, const Row* pin) {
    const bool is_wide = pin && pin->name.find("_d512_") != std::string::npos && !random.one_in(4);
    const auto odd = [&] {
        if (is_wide || random.one_in(4))
            return random.one_in(2) ? random.in(257, 512) : random.of<int64_t>({288, 320, 512});
        return random.one_in(3) ? random.in(1, 256) : random.of<int64_t>({16, 32, 72, 80, 96, 192, 256});
    };
    p.head_dim = is_wide ? odd() : random.one_in(2) ? 128 : random.one_in(2) ? 64 : odd();
    p.head_dim_v = random.one_in(5) ? odd() : random.one_in(2) ? p.head_dim : 0;
    if (random.one_in(60)) p.head_dim = 576, p.head_dim_v = 512;
}

void bound_elements(spattn_problem& p, int64_t most, int64_t tile_heads) {
    const auto elements = [&] {
        return p.batch * std::max(p.heads_q * p.seq_q, p.heads_kv * p.seq_k) * std::max(p.head_dim, p.head_dim_v);
    };
    while (p.batch > 1 && elements() > most) --p.batch;
    while (p.heads_kv > 1 && elements() > most) p.heads_q -= p.heads_q / p.heads_kv, --p.heads_kv;
    if (elements() > most && tile_heads == 1) p.heads_q = 1;
}

void bound_tokens(spattn_problem& p, int64_t most_elements) {
    const int64_t most = most_elements / p.batch / std::max(p.head_dim, p.head_dim_v);
    p.seq_q = std::min(p.seq_q, most / p.heads_q), p.seq_k = std::min(p.seq_k, most / p.heads_kv);
}

// Shapes with long rows, with many short ones, and small ones.
bool draw_sizes(Random& random, const Choices& choices, spattn_problem& p, const Row* pin) {
    const int64_t tile_heads = pin ? pin->tile_heads : 1;
    const bool is_long = random.one_in(20), has_many_tasks = !is_long && random.one_in(4);
    draw_head_dims(random, p, pin);
    draw_heads(random, p, has_many_tasks, tile_heads);
    const int64_t usual = random.one_in(4) ? 1500 : 330, many = random.one_in(2) ? 200 : 700;
    const int64_t most = std::min(choices.most_tokens, is_long ? int64_t(12000) : has_many_tasks ? many : usual);
    const bool fills_blocks = is_long || (has_many_tasks && random.one_in(2));
    p.seq_q = fills_blocks ? random.in((most + 3) / 4, most) : draw_length(random, most);
    p.seq_k = is_long ? random.in((most + 3) / 4, most) : random.one_in(2) ? p.seq_q : draw_length(random, most);
    bound_elements(p, most_elements[false], tile_heads);
    return is_long;
}

// Thousands of tokens, and fewer where a problem of that kind was refused. Half of the sequences attend to themselves;
// others are asked by a few queries, by a chunk, or by another sequence.
void draw_large_sizes(Random& random, const Choices& choices, int64_t attempt, spattn_problem& p, const Row* pin) {
    const int64_t tile_heads = pin ? pin->tile_heads : 1;
    draw_head_dims(random, p, pin);
    draw_heads(random, p, false, tile_heads);
    const int64_t least = std::min(least_tokens, choices.most_tokens);
    const int64_t most = std::max(choices.most_tokens >> std::min<int64_t>(attempt / 4, 20), least);
    const auto draw = [&] {
        const double tokens = double(least) * std::exp(random.unit() * std::log(double(most) / double(least)));
        if (random.one_in(3)) return int64_t(tokens);
        return std::clamp<int64_t>(int64_t(tokens) / 64 * 64 + random.in(-1, 1), 1, most);
    };
    p.seq_k = draw();
    p.seq_q = random.one_in(2) ? p.seq_k : random.one_in(3) ? draw() : random.size(random.one_in(2) ? 64 : least);
    bound_elements(p, most_elements[true], tile_heads);
    bound_tokens(p, most_elements[true]);
}

// Few queries of large groups, as latent and multi-query attention have them, whose heads share lists.
void draw_group(Random& random, spattn_problem& p, bool is_large) {
    p.batch = p.axes == SPATTN_THD ? 1 : random.in(1, 2), p.heads_kv = random.in(1, 2);
    p.heads_q = p.heads_kv * random.of<int64_t>({1, 3, 16, 48, 64, 65, 128});
    p.seq_q = random.size(24);
    if (!is_large) p.seq_k = random.size(700);
    if (random.one_in(2)) p.head_dim = 576, p.head_dim_v = 512, p.flags |= SPATTN_PLAN_VALUE_IN_KEY;
    if (is_large) bound_tokens(p, most_elements[true]);
}

// ---- options ----

void draw_numbers(Random& random, spattn_problem& p) {
    if (random.one_in(3)) {
        p.flags |= SPATTN_PLAN_SCALE;
        p.scale = random.of({0., 1e-30, 1e-3, 0.05, 0.2, 1., 3., -0.1, -1.});
    }
    if (random.one_in(3)) {
        p.flags |= SPATTN_PLAN_Q_OFFSET;
        p.q_offset = random.in(-p.seq_q - 3, p.seq_k + 3);
    }
    if (random.one_in(8)) p.softcap = random.of({0.01, 1., 20., 50., 1e6});
}

void draw_options(Random& random, Problem& problem, const Row* pin) {
    spattn_problem& p = problem.c;
    if (pin ? pin->is_backward : random.one_in(3)) p.flags |= SPATTN_PLAN_BACKWARD;
    if (pin ? pin->is_reference : random.one_in(12)) p.flags |= SPATTN_PLAN_REFERENCE;
    if (random.one_in(8)) p.flags |= SPATTN_PLAN_SINK_LOGITS;
    if (random.one_in(8)) p.flags |= SPATTN_PLAN_DETERMINISTIC;
    if (random.one_in(8) && problem.type != &f32) p.flags |= SPATTN_PLAN_TF32;  // of other dtypes without effect
    if (random.one_in(20) && problem.value_dim() <= p.head_dim) p.flags |= SPATTN_PLAN_VALUE_IN_KEY;
    p.axes = random.of<spattn_enum>({SPATTN_BSHD, SPATTN_BSHD, SPATTN_BHSD, SPATTN_BHSD, SPATTN_THD});
    if (p.axes == SPATTN_THD) p.batch = 1;
    problem.wants_lse = problem.is_backward() || !random.one_in(4);
    problem.wants_max_logits = random.one_in(6);
    problem.has_dlse = random.one_in(2), problem.wants_dsinks = random.one_in(2);
}

// A cache that has room for as many tokens as there are keys, and pages that are hardly ever what a kernel likes. Large
// ones are asked by few tokens or by a chunk.
void draw_cache(Random& random, spattn_problem& p, bool is_large) {
    p.flags = (p.flags | SPATTN_PLAN_STARTS) & ~uint32_t(SPATTN_PLAN_Q_OFFSET);
    p.q_offset = 0;
    if (is_large) p.seq_q = std::min(p.seq_k, random.one_in(2) ? random.in(2, 64) : random.size(2048));
    if (random.one_in(is_large ? 4 : 3)) p.seq_q = 1;
    if (random.one_in(3)) p.cache_dtype = float8.dtype;
    if (random.one_in(3)) return;
    p.page_size = random.of<int64_t>({1, 7, 16, 32, 64, 64, 128, 128, 256});
    p.seq_k = (p.seq_k + p.page_size - 1) / p.page_size * p.page_size;
}

// Entries with a query each, as in decoding, with many, or with none; rows that are nobody's before or after them.
void draw_ragged(Random& random, Problem& problem) {
    spattn_problem& p = problem.c;
    if (!p.page_size || random.one_in(2)) return;
    const int64_t of_entry = std::max(p.heads_q * p.seq_q, p.heads_kv * p.seq_k) * std::max(p.head_dim, p.head_dim_v);
    p.axes = SPATTN_BSHD;
    const int64_t most = random.in(1, random.one_in(4) ? 20 : 4);
    p.batch = std::clamp<int64_t>(most_elements[problem.is_large] / of_entry, 1, most);
    const bool decodes = random.one_in(3);
    problem.query_offsets = {random.one_in(4) ? random.in(1, 20) : 0};
    for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t queries = random.one_in(5) ? 0 : decodes ? 1 : random.in(0, p.seq_q);
        problem.query_offsets.push_back(problem.query_offsets.back() + queries);
    }
    problem.ragged_rows = std::max<int64_t>(problem.query_offsets.back() + (random.one_in(3) ? random.in(1, 20) : 0), 1);
}

// Mostly all of a call's queries have a place; some entries have less to ask, or nothing. Large caches are often nearly
// full.
std::vector<int64_t> draw_starts(Random& random, const Problem& problem) {
    const spattn_problem& p = problem.c;
    const int64_t last = std::max<int64_t>(p.seq_k - p.seq_q, 0);
    std::vector<int64_t> starts;
    for (int64_t b = 0; b < p.batch; ++b)
        starts.push_back(random.one_in(6)                       ? random.in(-p.seq_q - 2, p.seq_k + 2)
                         : problem.is_large && random.one_in(2) ? random.in(last / 8 * 7, last)
                                                                : random.in(0, last));
    return starts;
}

// Trees of any shape, chains among them; some numbers are no node's before the query.
std::vector<int64_t> draw_parents(Random& random, const spattn_problem& p) {
    std::vector<int64_t> parents;
    for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t reach = random.of<int64_t>({1, 2, 8, p.seq_q});
        for (int64_t i = 0; i < p.seq_q; ++i) {
            const bool is_odd = random.one_in(30);
            parents.push_back(is_odd ? random.in(-5, p.seq_q + 5) : i - random.in(1, reach));
        }
    }
    return parents;
}

const Type& draw_type(Random& random, const Row* pin) {
    if (pin) return pin->type == &bf16 && random.one_in(6) ? bf16_from_float8 : *pin->type;
    return random.one_in(2) ? bf16 : types[random.in(0, int64_t(std::size(types)) - 1)];
}

Problem fixed_problem(int64_t index) {
    Problem problem;
    spattn_problem& p = problem.c;
    p.struct_size = sizeof p;
    p.head_dim = 128, p.heads_q = 15, p.heads_kv = 3, p.batch = 1, p.seq_q = p.seq_k = 2048;
    problem.drawn.pattern = parse("documents(573,694,731,1132,1219,1500,1554)");
    if (index == 1) {
        p.batch = 2, p.heads_q = 10, p.heads_kv = 2, p.seq_q = 803, p.seq_k = 640;
        p.flags = SPATTN_PLAN_Q_OFFSET | SPATTN_PLAN_SCALE, p.q_offset = -163, p.scale = 1;
        problem.drawn.pattern = parse("dilated(481,662,6) & block_diagonal(660)");
    }
    return problem;
}

// ---- values ----

// The values of every row, by its place: the same numbers whatever the order in which they are asked for.
class Source {
public:
    // first_tokens: of each batch entry, the key beside its first query.
    Source(Random& random, const Problem& problem, bool is_query, bool is_value, std::vector<int64_t> first_tokens = {})
        : seed_(random.next()), values_(problem.values), is_query_(is_query), is_value_(is_value),
          type_(*problem.type), constant_(random.of({0.5, -1., 2.})), which_(random.in(0, 2)),
          growth_(random.of({0.02, 0.3, -0.3}) / std::sqrt(double(problem.c.head_dim))), scale_(problem.scale()),
          heads_(is_query ? problem.c.heads_q : problem.c.heads_kv), seq_k_(problem.c.seq_k),
          first_tokens_(std::move(first_tokens)) {}

    void row(int64_t plane, int64_t row, std::vector<double>& out) const {
        Random random(seed_ + uint64_t(plane) * 0x632BE59BD9B4E019 + uint64_t(row) * 0xD6E8FEB86659FD93);
        for (double& x : out) x = random.normal();
        switch (values_) {
            case Values::loud:
                if (!is_value_) scale(out, is_query_ ? 12 : 4);
                break;
            case Values::ramp:  // scores that grow, or fall, from key to key
                if (is_query_) std::fill(out.begin(), out.end(), 1.);
                else if (!is_value_) std::fill(out.begin(), out.end(), growth_ * double(row));
                break;
            case Values::spikes:
                if (random.one_in(is_value_ ? 100 : 30)) scale(out, is_value_ ? 1000 : 25);
                break;
            case Values::constant:
                std::fill(out.begin(), out.end(), constant_);
                break;
            case Values::zeros:
                if (which_ == (is_query_ ? 0 : is_value_ ? 2 : 1)) std::fill(out.begin(), out.end(), 0.);
                break;
            case Values::denormal:
                if (is_value_ || !is_query_) scale(out, type_.dtype.bits == 64 ? 1e-310 : is_half() ? 1e-6 : 1e-39);
                break;
            case Values::large:
                if (is_value_) scale(out, is_half() ? 1e3 : 1e15);
                break;
            case Values::search:
                if (!is_value_) search(random, plane, row, out);
                break;
            default: break;
        }
    }

private:
    bool is_half() const { return type_.dtype.bits == 16 && type_.dtype.code == SPATTN_FLOAT; }
    static void scale(std::vector<double>& out, double by) {
        for (double& x : out) x *= by;
    }
    // Keys of a stretch have its name, of signs, and noise. A query has that of the first stretch, of its own, or of
    // one before it: a score of about 12, where others are about 0.
    void search(Random& random, int64_t plane, int64_t row, std::vector<double>& out) const {
        constexpr int64_t stretch = 16;
        int64_t key = row;
        if (is_query_) {
            key = std::clamp<int64_t>(first_tokens_[size_t(plane / heads_)] + row, 0, seq_k_ - 1);
            key = random.of<int64_t>({0, key, random.in(0, key)});
        }
        const double size = std::min(8., std::sqrt(12 / (double(out.size()) * std::fabs(scale_))));
        Random name(uint64_t(key / stretch));
        for (double& x : out)
            x = size * ((name.one_in(2) ? 1 : -1) * (is_query_ && scale_ < 0 ? -1 : 1) + 0.3 * x);
    }
    uint64_t seed_;
    Values values_;
    bool is_query_, is_value_;
    const Type& type_;
    double constant_;
    int64_t which_;
    double growth_, scale_;
    int64_t heads_, seq_k_;
    std::vector<int64_t> first_tokens_;
};

double draw_poison(Random& random, const Type& type) {
    const bool is_f16 = type.dtype.bits == 16 && type.dtype.code == SPATTN_FLOAT;
    const double finite = type.dtype.bits == 64 ? 1e308 : is_f16 ? 65504 : 3e38;
    return random.of({nan, nan, infinity, -infinity, finite, -finite});
}

std::vector<int64_t> draw_indices(Random& random, const Problem& problem) {
    const DrawnPattern& d = problem.drawn;
    const int64_t rows = (problem.c.seq_q + d.list_block_q - 1) / d.list_block_q;
    const int64_t blocks = (problem.c.seq_k + d.list_block_k - 1) / d.list_block_k;
    std::vector<int64_t> indices(size_t(problem.c.batch * rows * problem.c.heads_kv * d.list_most));
    for (size_t i = 0; i < indices.size(); ++i) {
        const int64_t kind = random.in(0, 9);
        indices[i] = random.in(0, blocks - 1);
        if (kind == 0 && i) indices[i] = indices[i - 1];
        if (kind == 1) indices[i] = -random.in(1, 5);
        if (kind == 2) indices[i] = blocks + random.in(0, 3);
    }
    return indices;
}

std::vector<int64_t> draw_counts(Random& random, const Problem& problem) {
    std::vector<int64_t> counts;
    if (random.one_in(3)) return counts;
    const DrawnPattern& d = problem.drawn;
    const int64_t rows = (problem.c.seq_q + d.list_block_q - 1) / d.list_block_q;
    for (int64_t i = 0; i < problem.c.batch * rows * problem.c.heads_kv; ++i)
        counts.push_back(random.one_in(6) ? -random.in(0, 2) : random.in(0, d.list_most + 3));
    return counts;
}

}  // namespace

// ---- problems ----

double Problem::scale() const { return has(SPATTN_PLAN_SCALE) ? c.scale : 1 / std::sqrt(double(c.head_dim)); }

spattn_problem Problem::told() const {
    spattn_problem told = c;
    if (is_ragged()) told.axes = SPATTN_THD, told.seq_q = ragged_rows;
    return told;
}

spattn_extent Problem::extent() const {
    spattn_extent e{};
    e.struct_size = sizeof e, e.flags = SPATTN_EXTENT_Q_OFFSET;
    e.batch = c.batch, e.heads = c.heads_q, e.seq_q = c.seq_q, e.seq_k = c.seq_k, e.q_offset = q_offset();
    if (is_on_cache()) e.seq_q = e.seq_k, e.q_offset = 0;
    return e;
}

std::string Problem::describe() const {
    char text[512];
    constexpr const char* axes[] = {"bshd", "bhsd", "thd"};
    std::snprintf(text, sizeof text,
                  "; batch %lld, heads %lld on %lld, %lld x %lld, head_dim %lld/%lld, %s %s, scale %g, q_offset %lld"
                  "%s%s%s%s%s%s%s%s%s, page_size %lld; values %s, poison %s",
                  (long long)c.batch, (long long)c.heads_q, (long long)c.heads_kv, (long long)c.seq_q,
                  (long long)c.seq_k, (long long)c.head_dim, (long long)value_dim(), type->name, axes[c.axes], scale(),
                  (long long)q_offset(), c.softcap ? ", softcap" : "", has(SPATTN_PLAN_SINK_LOGITS) ? ", sinks" : "",
                  has(SPATTN_PLAN_VALUE_IN_KEY) ? ", value in key" : "", is_backward() ? ", backward" : "",
                  has(SPATTN_PLAN_REFERENCE) ? ", reference" : "", is_on_cache() ? ", cache" : "", is_tree() ? ", trees" : "",
                  has_float8_cache() ? " of float8" : "", is_ragged() ? ", ragged" : "",
                  (long long)c.page_size, value_names[int(values)], poison_names[int(poison)]);
    return text_of(drawn.pattern.get()) + text;
}

Problem draw_problem(const Choices& choices, int64_t index, int64_t attempt, const Row* pin) {
    const bool is_fixed = index < num_fixed_problems;
    Problem problem = is_fixed ? fixed_problem(index) : Problem();
    problem.index = index;
    problem.random =
        Random(choices.seed * 0x9E3779B97F4A7C15 + uint64_t(index) * 0xBF58476D1CE4E5B9 + uint64_t(attempt));
    problem.type = &bf16;
    if (is_fixed) return problem;
    Random& random = problem.random;
    spattn_problem& p = problem.c;
    p.struct_size = sizeof p;
    problem.type = &draw_type(random, pin);
    p.flags |= problem.type->flags;
    problem.is_large = choices.is_large;
    if (choices.is_large) draw_large_sizes(random, choices, attempt, p, pin);
    const bool is_long = !choices.is_large && draw_sizes(random, choices, p, pin);
    draw_options(random, problem, pin);
    const bool gathers = pin && pin->name.find("gather") != std::string::npos;
    const bool is_group = !is_long && random.one_in(gathers ? 2 : 25);
    if (is_group) draw_group(random, p, choices.is_large);
    draw_numbers(random, p);
    const bool may_be_on_cache = !problem.is_backward() && !problem.has_float8_operands() && p.axes != SPATTN_THD;
    if (may_be_on_cache && !is_long && (choices.is_large ? !random.one_in(3) : random.one_in(gathers ? 3 : 6)))
        draw_cache(random, p, choices.is_large), draw_ragged(random, problem);
    const int64_t rows = problem.is_on_cache() ? p.seq_k : p.seq_q;
    const bool is_uniform = p.batch * p.heads_q * rows * p.seq_k > most_own_pairs;
    const bool on_cache = problem.is_on_cache();
    const bool is_listed = is_group || (on_cache && random.one_in(gathers ? 2 : choices.is_large ? 5 : 3));
    const int64_t longest_list = std::max<int64_t>(1, most_listed / (p.batch * p.heads_kv * p.seq_q));
    const Extents extents{p.batch, p.heads_q, rows, p.seq_k, longest_list};
    const Lengths lengths = choices.is_large                        ? Lengths::large
                            : !is_listed && (is_long || is_uniform) ? Lengths::sparse
                                                                    : Lengths::small;
    problem.drawn = draw_pattern(random, extents, lengths, is_listed, on_cache);
    const bool may_be_tree = on_cache && !problem.drawn.list_most && p.seq_q <= most_nodes;
    if (may_be_tree && random.one_in(3)) p.flags |= SPATTN_PLAN_PARENTS;
    problem.values = choices.values[size_t(random.in(0, int64_t(choices.values.size()) - 1))];
    problem.poison = choices.poisons[size_t(random.in(0, int64_t(choices.poisons.size()) - 1))];
    return problem;
}

double count_pairs(const Problem& problem) {
    const DrawnPattern& d = problem.drawn;
    if (d.list_most)
        return double(problem.c.batch) * double(problem.c.heads_q) * double(problem.c.seq_q) * double(d.list_most) *
               double(d.list_block_k);
    spattn_stats stats{};
    stats.struct_size = sizeof stats;
    const spattn_extent extent = problem.extent();
    demand(spattn_pattern_stats(d.pattern.get(), &extent, &stats), "stats");
    const bool is_part = problem.is_large && problem.is_on_cache();
    return stats.pairs * (is_part ? double(problem.c.seq_q) / double(problem.c.seq_k) : 1);
}

// ---- tensors ----

namespace {

struct Shape {
    int64_t heads, rows, columns;
};

// Marks of (batch entry, head, row).
class Marks {
public:
    Marks(int64_t batch, int64_t heads, int64_t rows)
        : heads_(heads), rows_(rows), marks_(size_t(batch * heads * rows)) {}
    char& at(int64_t b, int64_t h, int64_t r) { return marks_[size_t((b * heads_ + h) * rows_ + r)]; }

private:
    int64_t heads_, rows_;
    std::vector<char> marks_;
};

// Memory that several heads share is seen where one of them sees it, so the seen rows are written last.
void fill_seen(Operand& to, const Source& source, Marks& seen, Random& random) {
    std::vector<double> row(size_t(to.size(column_axis)));
    for (const bool writes_seen : {false, true})
        for (int64_t b = 0; b < to.size(batch_axis); ++b)
            for (int64_t h = 0; h < to.size(head_axis); ++h)
                for (int64_t r = 0; r < to.size(row_axis); ++r) {
                    if (bool(seen.at(b, h, r)) != writes_seen) continue;
                    source.row(b * to.size(head_axis) + h, r, row);
                    if (writes_seen) to.set(b, h, r, row.data());
                    else to.fill(b, h, r, draw_poison(random, to.type()));
                }
}

}  // namespace

Tensors::Tensors(Problem& problem) : keys(make_keys(problem)) {
    Random& random = problem.random;
    const spattn_problem& p = problem.c;
    const auto place = [&](bool is_input) {
        const Placement placement = draw_placement(random, is_input);
        is_misaligned |= placement.shift * problem.type->dtype.bits / 8 % 16 != 0;
        has_gaps |= placement.padding > 0 || placement.step > 1, is_transposed |= placement.is_transposed();
        is_shared |= (placement.shares_heads && p.heads_q > 1) || (placement.shares_batch && p.batch > 1);
        return placement;
    };
    using Role = Operand::Role;
    const auto make = [&](Role role, const Shape& s, const Type& type) {
        return Operand(type, role, {p.batch, s.heads, s.rows, s.columns}, place(role == Role::input));
    };
    const Type& type = *problem.type;
    const Shape of_q{p.heads_q, p.seq_q, p.head_dim}, of_k{p.heads_kv, p.seq_k, p.head_dim};
    const Shape of_v{p.heads_kv, p.seq_k, problem.value_dim()}, of_out{p.heads_q, p.seq_q, problem.value_dim()};
    const Shape of_rows{p.heads_q, p.seq_q, 1};
    const bool has_v = !problem.has(SPATTN_PLAN_VALUE_IN_KEY);
    const auto make_input = [&](const Shape& s, bool is_float8) {  // rows of float8 lie apart: each may have its scale
        if (!is_float8) return make(Role::input, s, type);
        return Operand(type, Role::input, {p.batch, s.heads, s.rows, s.columns}, {});
    };
    q = make_input(of_q, problem.has_float8_operands()), out = make(Role::output, of_out, type);
    k = make_input(of_k, problem.has_float8_keys());
    if (has_v) v = make_input(of_v, problem.has_float8_keys());
    if (problem.wants_lse) lse = make(Role::output, of_rows, f32);
    if (problem.wants_max_logits) max_logits = make(Role::output, of_rows, f32);
    if (problem.has(SPATTN_PLAN_SINK_LOGITS)) sinks = Operand(f32, Role::input, {1, p.heads_q, 1, 1}, {});
    if (problem.is_backward()) {
        dout = make(Role::input, of_out, type);
        if (problem.has_dlse) dlse = make(Role::input, of_rows, f32);
        dq = make(Role::output, of_q, type), dk = make(Role::output, of_k, type);
        if (has_v) dv = make(Role::output, of_v, type);
        if (sinks && problem.wants_dsinks) dsinks = Operand(f32, Role::output, {1, p.heads_q, 1, 1}, {});
    }
    fill(problem);
    if (problem.poison == Poison::others) poison_others(problem);
    if (problem.has_float8_keys()) narrow_operands(problem);
    if (p.page_size) fill_pages(problem);
    if (problem.is_ragged()) pack(problem);
}

Keys Tensors::make_keys(Problem& problem) {
    if (problem.is_on_cache()) starts = draw_starts(problem.random, problem);
    if (problem.drawn.list_most)
        indices = draw_indices(problem.random, problem), counts = draw_counts(problem.random, problem);
    if (problem.is_tree()) parents = draw_parents(problem.random, problem.c);
    if (problem.is_on_cache()) return Keys::of_cache(problem, {starts, parents, indices, counts});
    return indices.empty() ? Keys::of_pattern(problem) : Keys::of_lists(problem, indices, counts);
}

void Tensors::fill(Problem& problem) {
    Random& random = problem.random;
    const spattn_problem& p = problem.c;
    Marks seen(p.batch, p.heads_kv, p.seq_k), sees(p.batch, p.heads_q, p.seq_q);
    const bool is_everywhere = problem.poison != Poison::unseen;
    for (int64_t b = 0; b < p.batch; ++b) {
        for (int64_t h = 0; h < p.heads_q; ++h)
            for (int64_t row = 0; row < p.seq_q; ++row)
                sees.at(b, h, row) = is_everywhere || !keys.of(b, h, row).is_empty();
        for (int64_t h = 0; h < p.heads_kv; ++h) {
            const std::vector<int64_t> queries = is_everywhere ? std::vector<int64_t>(size_t(p.seq_k), 1)
                                                               : keys.count_queries(b, h);
            for (int64_t key = 0; key < p.seq_k; ++key) seen.at(b, h, key) = queries[size_t(key)] > 0;
        }
    }
    const std::vector<int64_t> first_tokens =
        starts.empty() ? std::vector<int64_t>(size_t(p.batch), problem.q_offset()) : starts;
    const Source queries(random, problem, true, false, first_tokens), of_keys(random, problem, false, false),
        of_values(random, problem, false, true);
    fill_seen(q, queries, sees, random);
    fill_seen(k, of_keys, seen, random);
    if (v) fill_seen(v, of_values, seen, random);
    Problem usual;
    usual.c = p, usual.type = problem.type;
    const Source gradients(random, usual, true, false);
    if (dout) fill_seen(dout, gradients, sees, random);
    if (dlse) {
        // With a sink, an empty row's dlse counts.
        if (sinks) std::fill_n(&sees.at(0, 0, 0), p.batch * p.heads_q * p.seq_q, char(1));
        fill_seen(dlse, gradients, sees, random);
    }
    for (int64_t h = 0; sinks && h < p.heads_q; ++h)
        sinks.fill(0, h, 0, random.one_in(12) ? -infinity : 4 * random.normal());
}

// Pages stand in any order among others, which hold NaN. Where nobody sees a key of a page, the table may say anything.
void Tensors::fill_pages(Problem& problem) {
    Random& random = problem.random;
    const spattn_problem& p = problem.c;
    const int64_t of_entry = p.seq_k / p.page_size, pages = p.batch * of_entry + random.in(0, 3);
    std::vector<int64_t> free(static_cast<size_t>(pages));
    for (size_t i = 0; i < free.size(); ++i) std::swap(free[i] = int64_t(i), free[size_t(random.in(0, int64_t(i)))]);
    Placement of_k = draw_placement(random, true);
    of_k.axes = p.axes == SPATTN_BHSD ? std::array<int, 4>{batch_axis, head_axis, row_axis, column_axis}
                                      : std::array<int, 4>{batch_axis, row_axis, head_axis, column_axis};
    of_k.shares_batch = of_k.shares_heads = false;
    Placement of_v = draw_placement(random, true);
    of_v.axes = of_k.axes, of_v.shares_batch = of_v.shares_heads = false;
    const auto pool_of = [&](const Operand& x, const Placement& placement) {
        if (!x) return Operand();
        return Operand(x.type(), Operand::Role::input, {pages, p.heads_kv, p.page_size, x.size(column_axis)}, placement);
    };
    const bool is_float8 = problem.has_float8_cache();
    const Operand &all_k = is_float8 ? narrow.k : k, &all_v = is_float8 ? narrow.v : v;
    pool_k = pool_of(all_k, of_k), pool_v = pool_of(all_v, of_v);
    Placement of_scales;
    of_scales.axes = of_k.axes;
    Operand k_scales = pool_of(narrow.k_scales, of_scales), v_scales = pool_of(narrow.v_scales, of_scales);
    std::vector<double> row(size_t(std::max(p.head_dim, problem.value_dim())));
    for (int64_t b = 0; b < p.batch; ++b)
        for (int64_t of = 0; of < of_entry; ++of) {
            const int64_t page = free[size_t(b * of_entry + of)], first = of * p.page_size;
            const bool is_needed = first < starts[size_t(b)] + problem.queries_of(b);
            page_table.push_back(is_needed ? page : random.of<int64_t>({page, -1, pages, 1 << 30}));
            for (int64_t h = 0; h < p.heads_kv; ++h)
                for (int64_t r = 0; r < p.page_size; ++r) {
                    const auto bring = [&](const Operand& from, Operand& to) {
                        if (!from) return;
                        from.get(b, h, first + r, row.data());
                        to.set(page, h, r, row.data());
                    };
                    bring(all_k, pool_k), bring(all_v, pool_v);
                    bring(narrow.k_scales, k_scales), bring(narrow.v_scales, v_scales);
                }
        }
    if (is_float8)
        narrow = {std::move(pool_k), std::move(pool_v), std::move(k_scales), std::move(v_scales), {}, {}};
}

void Tensors::narrow_operands(Problem& problem) {
    Random& random = problem.random;
    if (problem.has_float8_operands()) narrow_rows(random, q, narrow.q, narrow.q_scales);
    narrow_rows(random, k, narrow.k, narrow.k_scales);
    if (v) narrow_rows(random, v, narrow.v, narrow.v_scales);
}

// Scales have 4 bits, as the numbers of float8, so that every dtype has their products. Some leave rows less than all
// numbers, some cut off what is large. One that rows or heads share is drawn for the last of them, and is a number.
void Tensors::narrow_rows(Random& random, Operand& x, Operand& to, Operand& scales) {
    const auto placement = [&](bool may_be_shared) {
        Placement made = draw_placement(random, true);
        made.shares_batch &= may_be_shared, made.shares_heads &= may_be_shared;
        made.shares_rows = may_be_shared && random.one_in(4);
        return made;
    };
    const int64_t batch = x.size(batch_axis), heads = x.size(head_axis), rows = x.size(row_axis);
    const Placement of_scales = placement(true);
    to = Operand(float8, Operand::Role::input, {batch, heads, rows, x.size(column_axis)}, placement(false));
    const bool has_scales = !random.one_in(5), has_signs = random.one_in(4);
    const bool is_shared = of_scales.shares_batch || of_scales.shares_heads || of_scales.shares_rows;
    if (has_scales) scales = Operand(f32, Operand::Role::input, {batch, heads, rows, 1}, of_scales);
    const bool is_f16 = x.type().dtype.bits == 16 && x.type().dtype.code == SPATTN_FLOAT;
    const double least = is_f16 ? -15 : -124, most = is_f16 ? 3 : 100;
    std::vector<double> row(size_t(x.size(column_axis)));
    const auto draw_scale = [&] {
        const bool is_odd = std::any_of(row.begin(), row.end(), [](double value) { return !std::isfinite(value); });
        if (is_odd && !is_shared && random.one_in(2)) return random.of({nan, infinity, 1.});
        double largest = 0;
        const double too_large = is_shared ? x.type().largest : infinity;
        for (const double value : row)
            if (std::fabs(value) < too_large) largest = std::max(largest, std::fabs(value));
        const double exponent = largest > 0 ? std::floor(std::log2(largest / 448 / 12)) : 0;
        const double size = double(has_signs && random.one_in(2) ? -random.in(8, 15) : random.in(8, 15));
        return std::ldexp(size, int(std::clamp(exponent + double(random.of<int64_t>({0, 0, 1, 6, -2})), least, most)));
    };
    const auto each_row = [&](auto body) {
        for (int64_t b = 0; b < batch; ++b)
            for (int64_t h = 0; h < heads; ++h)
                for (int64_t r = 0; r < rows; ++r) {
                    x.get(b, h, r, row.data());
                    body(b, h, r);
                }
    };
    if (has_scales) each_row([&](int64_t b, int64_t h, int64_t r) { scales.fill(b, h, r, draw_scale()); });
    each_row([&](int64_t b, int64_t h, int64_t r) {
        const double scale = has_scales ? scales.at(b, h, r) : 1;
        for (double& value : row) value = bits::Float8::widen(bits::Float8::narrow(value / scale));
        to.set(b, h, r, row.data());
        for (double& value : row) value *= scale;
        x.set(b, h, r, row.data());
    });
}

void Tensors::pack(Problem& problem) {
    Random& random = problem.random;
    using Role = Operand::Role;
    const auto make = [&](const Operand& of, Role role) {
        if (!of) return Operand();
        Placement placement = draw_placement(random, role == Role::input);
        placement.shares_batch = placement.shares_heads = false;
        return Operand(of.type(), role, {1, of.size(head_axis), problem.ragged_rows, of.size(column_axis)}, placement);
    };
    ragged.q = make(q, Role::input), ragged.out = make(out, Role::output);
    ragged.lse = make(lse, Role::output), ragged.max_logits = make(max_logits, Role::output);
    std::vector<double> row(size_t(q.size(column_axis)));
    for (int64_t h = 0; h < problem.c.heads_q; ++h) {
        for (int64_t n = 0; n < problem.ragged_rows; ++n) ragged.q.fill(0, h, n, draw_poison(random, q.type()));
        for (int64_t b = 0; b < problem.c.batch; ++b)
            for (int64_t n = 0; n < problem.queries_of(b); ++n) {
                q.get(b, h, n, row.data());
                ragged.q.set(0, h, problem.query_offsets[size_t(b)] + n, row.data());
            }
    }
    const auto pack_lists = [&](const std::vector<int64_t>& from, std::vector<int64_t>& to, int64_t of_query) {
        if (from.empty()) return;
        for (int64_t n = 0; n < problem.ragged_rows * of_query; ++n) to.push_back(random.in(-3, problem.c.seq_k));
        for (int64_t b = 0; b < problem.c.batch; ++b)
            std::copy_n(from.begin() + b * problem.c.seq_q * of_query, problem.queries_of(b) * of_query,
                        to.begin() + problem.query_offsets[size_t(b)] * of_query);
    };
    pack_lists(indices, ragged.indices, problem.c.heads_kv * problem.drawn.list_most);
    pack_lists(counts, ragged.counts, problem.c.heads_kv);
    pack_lists(parents, ragged.parents, 1);
}

void Tensors::unpack(const Problem& problem) {
    const int64_t begin = problem.query_offsets.front(), end = problem.query_offsets.back();
    const int64_t nobodys = begin + problem.ragged_rows - end;
    int64_t turn = 0;
    const auto unpack = [&](const Operand& from, Operand& to, auto nothing) {
        std::vector<double> row(size_t(to ? to.size(column_axis) : 0));
        for (int64_t b = 0; to && b < problem.c.batch; ++b)
            for (int64_t h = 0; h < problem.c.heads_q; ++h)
                for (int64_t n = 0; n < problem.c.seq_q; ++n) {
                    int64_t at = problem.query_offsets[size_t(b)] + n;
                    if (n >= problem.queries_of(b)) {
                        if (!nobodys) {
                            to.fill(b, h, n, nothing(h));
                            continue;
                        }
                        const int64_t number = turn++ % nobodys;
                        at = number < begin ? number : end + number - begin;
                    }
                    from.get(0, h, at, row.data());
                    to.set(b, h, n, row.data());
                }
    };
    const auto zero = [](int64_t) { return 0.; };
    unpack(ragged.out, out, zero);
    unpack(ragged.lse, lse, [&](int64_t head) { return sinks ? sinks.at(0, head, 0) : -infinity; });
    unpack(ragged.max_logits, max_logits, [](int64_t) { return -infinity; });
}

// In some planes: all that one query does not see, a stretch of keys, scattered ones, a single one, or queries.
void Tensors::poison_others(Problem& problem) {
    Random& random = problem.random;
    const spattn_problem& p = problem.c;
    for (int64_t plane = 0; plane < p.batch * p.heads_kv; ++plane) {
        if (plane && random.one_in(2)) continue;
        const int64_t b = plane / p.heads_kv, h = plane % p.heads_kv;
        const int64_t row = random.in(0, p.seq_q - 1), head = h * problem.group() + random.in(0, problem.group() - 1);
        std::vector<char> is_poisoned(size_t(p.seq_k));
        const int64_t kind = random.in(0, 5), first = random.in(0, p.seq_k - 1);
        if (kind <= 1) {
            std::fill(is_poisoned.begin(), is_poisoned.end(), char(1));
            for (const Keys::Run& run : keys.of(b, head, row))
                std::fill(is_poisoned.begin() + run.begin, is_poisoned.begin() + run.end, char(0));
        } else if (kind == 2) {
            std::fill_n(is_poisoned.begin() + first, random.size(p.seq_k - first), char(1));
        } else if (kind == 3) {
            for (char& mark : is_poisoned) mark = random.one_in(40);
        } else if (kind == 4) {
            is_poisoned[size_t(first)] = 1;
        } else {
            for (int64_t r = row; r < std::min(p.seq_q, row + random.in(1, 40)); ++r) {
                q.fill(b, head, r, draw_poison(random, q.type()));
                if (dout && random.one_in(2)) dout.fill(b, head, r, draw_poison(random, dout.type()));
            }
        }
        const bool in_keys = !random.one_in(3), in_values = !in_keys || random.one_in(2);
        for (int64_t key = 0; key < p.seq_k; ++key) {
            if (!is_poisoned[size_t(key)]) continue;
            const double value = draw_poison(random, k.type());
            if (in_keys || !v) k.fill(b, h, key, value);
            if (in_values && v) v.fill(b, h, key, value);
        }
    }
}

}  // namespace random_test
