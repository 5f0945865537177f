// SPDX-License-Identifier: MIT
// Problems drawn at random, against the truth in double precision: patterns of any algebra, sizes, options, memory that
// lies in any way, and hostile values. What a library does not offer it says itself (SPATTN_E_NO_KERNEL), and another
// problem is drawn, so that new rows, options and passes are met without a change here.
//
//     test_random [--device cpu|cuda] [--seed S] [--problems N | --problem I] [--seconds S] [--patience S] [--large]
//                 [--only KERNEL_PREFIX] [--values NAME,...] [--poison NAME,...] [--work MULTIPLICATIONS] [--tokens N]
//
// Every second problem is pinned to a kernel row, each in its turn; --work and --tokens bound a problem's size. --large
// draws problems of thousands of tokens, up to 128K: three of four run the row that their plan chooses, and a sample of
// rows and keys is compared with the truth. A run that does not end within --patience seconds ends the process, since a
// kernel that hangs cannot be stopped.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "run.h"
#include "truth.h"

using namespace random_test;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t most_attempts = 400;  // until a problem is drawn that the library serves
constexpr double most_backward_work = 1e7;  // multiplications of a kv head
constexpr double most_runs = 2e7, most_seconds = 0.5;  // of a large problem
constexpr int most_failures_printed = 20;
constexpr int64_t least_for_kinds = 300;  // problems, from which on every kind must have been met

struct Options {
    Choices choices;
    std::string device = "cpu", only;
    std::string more;  // options that change what is drawn, as a command needs them
    int64_t first = 0, problems = 400;
    double seconds = 0, patience = 0;
    bool is_filtered = false;
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// ---- options ----

template <class Kind, size_t Count>
std::vector<Kind> read_kinds(const std::string& given, const char* const (&names)[Count]) {
    std::vector<Kind> kinds;
    for (size_t i = 0; i < Count; ++i)
        if (given.empty() || ("," + given + ",").find("," + std::string(names[i]) + ",") != std::string::npos)
            kinds.push_back(Kind(i));
    if (kinds.empty()) throw std::runtime_error("none of these kinds is known: " + given);
    return kinds;
}

// Thousands of keys hide one another where all have some weight: most large problems search. Scores of a ramp would be
// too large there to say something, and denormals take too long.
void choose_values(Choices& choices) {
    std::vector<Values>& values = choices.values;
    const auto drop = [&](Values unwanted) { values.erase(std::find(values.begin(), values.end(), unwanted)); };
    if (!choices.is_large) return drop(Values::search);
    drop(Values::ramp), drop(Values::denormal);
    values.insert(values.end(), values.size(), Values::search);
}

Options read_options(int argc, char** argv) {
    Options o;
    std::string values, poisons;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--large") {
            o.choices.is_large = true, o.more += " " + name;
            continue;
        }
        const std::string value = ++i < argc ? argv[i] : "";
        if (value.empty()) throw std::runtime_error(name + " wants a value");
        if (name == "--device") o.device = value;
        else if (name == "--seed") o.choices.seed = std::stoull(value);
        else if (name == "--problems") o.problems = std::stoll(value);
        else if (name == "--problem") o.first = std::stoll(value), o.problems = 1, o.is_filtered = true;
        else if (name == "--seconds") o.seconds = std::stod(value);
        else if (name == "--patience") o.patience = std::stod(value);
        else if (name == "--only") o.only = value, o.is_filtered = true;
        else if (name == "--values") values = value, o.is_filtered = true;
        else if (name == "--poison") poisons = value, o.is_filtered = true;
        else if (name == "--work") o.choices.most_work = std::stod(value);
        else if (name == "--tokens") o.choices.most_tokens = std::max<int64_t>(1, std::stoll(value));
        else throw std::runtime_error("no option " + name);
        for (const char* drawn : {"--values", "--poison", "--work", "--tokens"})
            if (name == drawn) o.more += " " + name + " " + value;
    }
    o.choices.values = read_kinds<Values>(values, value_names);
    o.choices.poisons = read_kinds<Poison>(poisons, poison_names);
    if (values.empty()) choose_values(o.choices);
    if (!o.only.empty() && o.problems > 1) o.first = num_fixed_problems;
    const bool is_cpu = o.device == "cpu";
    if (!is_cpu && o.device != "cuda") throw std::runtime_error("--device is cpu or cuda, not " + o.device);
    const bool is_large = o.choices.is_large;
    if (o.choices.most_work == 0) o.choices.most_work = is_cpu ? (is_large ? 2e10 : 5e7) : (is_large ? 1e12 : 5e9);
    if (o.choices.most_tokens == 0) o.choices.most_tokens = is_large ? 128 << 10 : 12000;
    if (o.patience == 0) o.patience = is_cpu ? 300 : 20;
    return o;
}

// ---- watchdog ----

// What each worker asks of the library right now, and since when.
class Watchdog {
public:
    Watchdog(size_t workers, double patience) : slots_(workers), patience_(patience), thread_([this] { watch(); }) {}
    ~Watchdog() {
        ends_ = true;
        thread_.join();
    }

    class Guard {
    public:
        Guard(Watchdog& dog, size_t worker, std::string what, double times_patience = 1) : dog_(dog), worker_(worker) {
            const std::lock_guard lock(dog_.mutex_);
            dog_.slots_[worker_] = {std::move(what), Clock::now(), times_patience * dog_.patience_, true};
        }
        ~Guard() {
            const std::lock_guard lock(dog_.mutex_);
            dog_.slots_[worker_].is_busy = false;
        }

    private:
        Watchdog& dog_;
        size_t worker_;
    };

private:
    struct Slot {
        std::string what;
        Clock::time_point since;
        double patience = 0;
        bool is_busy = false;
    };

    void watch() {
        while (!ends_) {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            const std::lock_guard lock(mutex_);
            for (const Slot& slot : slots_) {
                if (!slot.is_busy || seconds_since(slot.since) < slot.patience) continue;
                std::printf("FAILED hang: no end after %.0f s: %s\n0 passed, 1 failed\n", slot.patience,
                            slot.what.c_str());
                std::fflush(stdout);
                _exit(1);
            }
        }
    }

    std::mutex mutex_;
    std::vector<Slot> slots_;
    double patience_;
    std::atomic<bool> ends_{false};
    std::thread thread_;
};

// ---- what was met ----

class Tally {
public:
    void count(std::map<std::string, int64_t>& of, const std::string& what, int64_t by = 1) {
        const std::lock_guard lock(mutex_);
        of[what] += by;
    }
    void fail(const std::string& text) {
        const std::lock_guard lock(mutex_);
        if (++failed <= most_failures_printed) std::printf("%s\n", text.c_str());
        std::fflush(stdout);
    }
    void pass(const Findings& found) {
        const std::lock_guard lock(mutex_);
        ++passed, rows_compared += found.rows;
    }
    std::map<std::string, int64_t> kinds, options, rows, refused;
    int64_t passed = 0, failed = 0, rows_compared = 0;

private:
    std::mutex mutex_;
};

// ---- the program ----

class Program {
public:
    Program(const Options& options, const char* name)
        : options_(options), name_(name), device_(options.device == "cpu" ? cpu_device() : cuda_device()),
          dog_(num_workers(), options.patience) {}

    int run() {
        const Context context = make_context(1);
        rows_ = find_rows(context.get());
        for (const Row& row : rows_)
            if (row.name.rfind(options_.only, 0) == 0) pinned_.push_back(row);
        if (pinned_.empty()) throw std::runtime_error("no kernel row of this device begins with " + options_.only);
        if (options_.device == "cuda") demand_known_rows();
        demand_every_kind_is_named();
        next_ = options_.first;
        std::vector<std::thread> workers;
        for (size_t i = 0; i < num_workers(); ++i) workers.emplace_back([this, i] { work(i); });
        for (std::thread& worker : workers) worker.join();
        return report();
    }

private:
    static size_t num_workers() { return std::clamp<size_t>(std::thread::hardware_concurrency(), 1, 32); }

    Context make_context(int32_t threads) const {
        spattn_context_options o{};
        o.struct_size = sizeof o, o.device = device_.id, o.plan_cache = -1, o.cpu_threads = threads;
        spattn_context* context = nullptr;
        demand(spattn_context_create(&o, &context), "context");
        return Context(context);
    }

    // A row that no probe reaches would never be tested, and nobody would know: rows that are not this device's must be
    // the CPU's.
    void demand_known_rows() {
        spattn_context_options o{};
        o.struct_size = sizeof o, o.device = {SPATTN_CPU, 0}, o.cpu_threads = 1;
        spattn_context* made = nullptr;
        demand(spattn_context_create(&o, &made), "context");
        const Context cpu(made);
        std::vector<Row> known = find_rows(cpu.get());
        known.insert(known.end(), rows_.begin(), rows_.end());
        for (int32_t i = 0; i < spattn_kernel_count(); ++i) {
            const std::string name = spattn_kernel_name(i);
            const auto is_it = [&](const Row& row) { return row.name == name; };
            if (spattn_kernel_runs_here(i) && std::none_of(known.begin(), known.end(), is_it))
                tally_.fail("FAILED rows: no probe is served by " + name);
        }
    }

    void demand_every_kind_is_named() {
        for (const char* kind : {"isolated rows", "rows without a key", "128 rows without a key behind others",
                                 "128 rows without a key behind others, more tasks than lanes",
                                 "misaligned tensors", "gaps", "transposed tensors", "heads in shared memory",
                                 "more tasks than lanes", "split rows", "groups of heads", "other numbers of queries",
                                 "q_offset", "scale", "one query", "float8 caches", "float8 operands"})
            tally_.kinds[kind] = 0;
        for (const Values v : options_.choices.values) tally_.kinds[std::string("values ") + value_names[int(v)]] = 0;
        for (const Poison p : options_.choices.poisons) tally_.kinds[std::string("poison ") + poison_names[int(p)]] = 0;
    }

    void work(size_t worker) {
        // Plans depend on the number of threads, so that number belongs to the problem.
        const std::array<Context, 3> contexts{make_context(1), make_context(2), make_context(3)};
        for (;;) {
            const int64_t index = next_++;
            if (index >= options_.first + options_.problems) return;
            if (options_.seconds > 0 && seconds_since(start_) > options_.seconds) return;
            try {
                solve(worker, index, contexts[size_t(index % 3)].get());
            } catch (const std::exception& e) {
                tally_.fail("FAILED problem_" + std::to_string(index) + ": " + e.what() + "\n    again with `" +
                            command(index, pin_of(index)) + "`");
            }
        }
    }

    const Row* pin_of(int64_t index) const {
        if (index < num_fixed_problems) return nullptr;
        if (!options_.only.empty()) return &pinned_[size_t(index) % pinned_.size()];
        const int64_t every = options_.choices.is_large ? 4 : 2;
        return index % every == 1 ? &pinned_[size_t(index / every) % pinned_.size()] : nullptr;
    }

    std::string command(int64_t index, const Row* pin) const {
        return name_ + " --device " + options_.device + " --seed " + std::to_string(options_.choices.seed) +
               " --problem " + std::to_string(index) + options_.more + (pin ? " --only " + pin->name : "");
    }

    void solve(size_t worker, int64_t index, const spattn_context* context) {
        const Row* const pin = pin_of(index);
        Planned planned;
        Problem problem;
        for (int64_t attempt = 0; !planned.plan; ++attempt) {
            if (attempt == most_attempts) return tally_.count(tally_.refused, "no problem was found for a pinned row");
            problem = draw_problem(options_.choices, index, attempt, pin);
            if (index >= num_fixed_problems && !is_affordable(problem)) continue;
            // A plan's copies to the GPU wait for another worker's run: if that hangs, it is named first.
            const Watchdog::Guard guard(dog_, worker, "plan of " + describe(problem, pin), 4);
            planned = make_plan(context, problem, pin ? pin->name : "");
            if (planned.status == SPATTN_E_NO_KERNEL) tally_.count(tally_.refused, reason_of(planned.why));
            else if (planned.status != SPATTN_OK) throw std::runtime_error(planned.why + "\n    " + problem.describe());
            if (problem.is_large && read(planned.explained).seconds > most_seconds) planned.plan.reset();
        }
        problem.is_dispatched = read(planned.explained).dispatches;
        bool rounds_to_tf32 = false;
        for (const std::string& row : planned.rows)
            problem.is_gathered |= row.find("gather_backward") != std::string::npos,
                problem.multiplies_float8 |= row.find("_float8_") != std::string::npos,
                problem.splits_float32 |= row.rfind("sm80_", 0) == 0 && row.find("_f32_") != std::string::npos,
                rounds_to_tf32 |= row.find("_tf32_") != std::string::npos;
        problem.splits_float32 &= !rounds_to_tf32;  // of two passes, the bounds are those of the worse
        Tensors tensors(problem);
        run_now(worker, planned.plan.get(), problem, tensors, pin);
        const Findings found = compare(problem, tensors);
        count(problem, tensors, found, planned);
        if (found.failure.empty()) return tally_.pass(found);
        tally_.fail("FAILED problem_" + std::to_string(index) + ": " + found.failure + "\n    " +
                    describe(problem, pin) + "\n    rows:" + names_of(planned));
    }

    // The truth of a small problem's backward pass takes whole kv heads, over all their rows. That of a large problem
    // keeps the runs of keys of all rows; reference rows would take minutes.
    bool is_affordable(const Problem& problem) const {
        if (problem.is_large && estimate_runs(problem) > most_runs) return false;
        const spattn_problem& p = problem.c;
        const double work = count_pairs(problem) * double(p.head_dim + problem.value_dim());
        const bool is_slow = problem.is_large && problem.has(SPATTN_PLAN_REFERENCE);
        return work <= options_.choices.most_work / (is_slow ? 50 : 1) &&
               (problem.is_large || !problem.is_backward() || work / double(p.heads_kv) <= most_backward_work);
    }

    static std::string names_of(const Planned& planned) {
        std::string names;
        for (const std::string& name : planned.rows) names += " " + name;
        return names;
    }

    std::string describe(const Problem& problem, const Row* pin) const {
        return problem.describe() + "\n    again with `" + command(problem.index, pin) + "`";
    }

    // One problem at a time on a GPU, so that a hang is the one problem's.
    void run_now(size_t worker, const spattn_plan* plan, Problem& problem, Tensors& tensors, const Row* pin) {
        std::unique_lock<std::mutex> lock(gpu_, std::defer_lock);
        if (device_.id.type == SPATTN_CUDA) lock.lock();
        const Watchdog::Guard guard(dog_, worker, describe(problem, pin));
        try {
            if (!random_test::run(device_, plan, problem, tensors))
                tally_.count(tally_.refused, "forward: max_logits");
        } catch (const std::exception& e) {
            if (device_.id.type != SPATTN_CUDA) throw;
            std::printf("FAILED problem_%lld: %s\n    %s\n0 passed, 1 failed\n", (long long)problem.index, e.what(),
                        describe(problem, pin).c_str());
            std::fflush(stdout);
            _exit(1);  // the GPU may be of no use to this process from now on
        }
    }

    void count(const Problem& problem, const Tensors& t, const Findings& found, const Planned& planned) {
        const spattn_problem& p = problem.c;
        const Facts facts = read(planned.explained);
        const std::pair<const char*, bool> kinds[] = {
            {"isolated rows", found.isolated > 0},
            {"rows without a key", found.empty_rows > 0},
            {"128 rows without a key behind others", found.has_empty_stretch},
            {"128 rows without a key behind others, more tasks than lanes",
             found.has_empty_stretch && facts.has_more_tasks_than_lanes},
            {"misaligned tensors", t.is_misaligned},
            {"gaps", t.has_gaps},
            {"transposed tensors", t.is_transposed},
            {"heads in shared memory", t.is_shared},
            {"more tasks than lanes", facts.has_more_tasks_than_lanes},
            {"split rows", facts.splits_rows},
            {"groups of heads", p.heads_q > p.heads_kv},
            {"other numbers of queries", p.seq_q != p.seq_k},
            {"q_offset", problem.has(SPATTN_PLAN_Q_OFFSET)},
            {"scale", problem.has(SPATTN_PLAN_SCALE)},
            {"one query", p.seq_q == 1},
            {"float8 caches", problem.has_float8_cache()},
            {"float8 operands", problem.has_float8_operands()}};
        const std::pair<const char*, bool> options[] = {{"backward", problem.is_backward()},
                                                        {"softcap", p.softcap != 0},
                                                        {"sink logits", problem.has(SPATTN_PLAN_SINK_LOGITS)},
                                                        {"value in key", problem.has(SPATTN_PLAN_VALUE_IN_KEY)},
                                                        {"max_logits", bool(t.max_logits)},
                                                        {"cache", problem.is_on_cache()},
                                                        {"cache in pages", p.page_size > 0},
                                                        {"ragged queries", problem.is_ragged()},
                                                        {"lists at run time", problem.drawn.list_most > 0},
                                                        {"lists on a cache",
                                                         problem.is_on_cache() && problem.drawn.list_most > 0},
                                                        {"dispatched queries", facts.dispatches},
                                                        {"dispatched queries in rounds", facts.has_rounds}};
        for (const auto& [name, is_so] : kinds)
            if (is_so) tally_.count(tally_.kinds, name);
        tally_.count(tally_.kinds, std::string("values ") + value_names[int(problem.values)]);
        tally_.count(tally_.kinds, std::string("poison ") + poison_names[int(problem.poison)]);
        for (const auto& [name, is_so] : options) tally_.count(tally_.options, name, is_so);
        for (const std::string& row : planned.rows) tally_.count(tally_.rows, row);
    }

    static void print(const char* title, const std::map<std::string, int64_t>& counts) {
        std::printf("%s\n", title);
        for (const auto& [what, count] : counts) std::printf("    %8lld  %s\n", (long long)count, what.c_str());
    }

    int report() {
        const int64_t tried = tally_.passed + tally_.failed;
        // Few large problems are pinned to rows.
        const bool is_whole = !options_.is_filtered && !options_.choices.is_large && tried >= least_for_kinds;
        for (const Row& row : rows_) tally_.rows[row.name];
        print("problems by kind", tally_.kinds);
        print("problems by option", tally_.options);
        print("problems by kernel row", tally_.rows);
        print("not served, and another one drawn", tally_.refused);
        for (const auto* counts : {&tally_.kinds, &tally_.rows})
            for (const auto& [what, count] : *counts)
                if (is_whole && count == 0) tally_.fail("FAILED kinds: no problem was met for: " + what);
        if (tried == 0) tally_.fail("FAILED problems: none ran");
        std::printf("seed %llu, %s, %.1f s, %lld rows compared\n%lld passed, %lld failed\n",
                    (unsigned long long)options_.choices.seed, options_.device.c_str(), seconds_since(start_),
                    (long long)tally_.rows_compared, (long long)tally_.passed, (long long)tally_.failed);
        return tally_.failed != 0;
    }

    const Options options_;
    const std::string name_;
    const Device device_;
    const Clock::time_point start_ = Clock::now();
    Watchdog dog_;
    std::vector<Row> rows_, pinned_;
    std::atomic<int64_t> next_{0};
    std::mutex gpu_;
    Tally tally_;
};

}  // namespace

int main(int argc, char** argv) {
    try {
        return Program(read_options(argc, argv), argv[0]).run();
    } catch (const std::exception& e) {
        const bool is_skipped = std::string(e.what()).rfind("no GPU", 0) == 0;
        std::printf("%s %s\n0 passed, %d failed\n", is_skipped ? "SKIPPED" : "FAILED options:", e.what(), !is_skipped);
        return !is_skipped;
    }
}
