// SPDX-License-Identifier: MIT
#include "options.h"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>

namespace bench {

namespace {

constexpr const char* usage =
    "bench [--case GLOB]... [--kernel GLOB]... [--pass forward|backward] [--dtype f32|f16|f64|bf16|all]\n"
    "      [--threads N] [--seconds S] [--full] [--warm] [--json FILE]    times the cases of cases.inc\n"
    "bench --plan [--case GLOB]... [--json FILE]            times plans of long sequences against their goals\n"
    "bench --list [--case GLOB]...                          the cases as JSON lines, number lists written out\n"
    "bench --mask FILE --case NAME                          the case's first mask, a byte a pair, row after row\n"
    "\n"
    "--full adds the large cases; --kernel runs every matching kernel row of this machine in turn; --warm leaves the\n"
    "caches as the last call left them; --seconds is the least time spent on a measurement (0.5); --json appends.\n";

Pass pass_of(const std::string& word) {
    if (word == "forward") return Pass::forward;
    if (word == "backward") return Pass::backward;
    throw std::runtime_error("--pass is forward or backward, not " + word);
}

std::vector<Dtype> dtypes_of(const std::string& word) {
    constexpr Dtype all[] = {Dtype::f32, Dtype::f16, Dtype::f64, Dtype::bf16};
    if (word == "all") return {std::begin(all), std::end(all)};
    for (Dtype dtype : all)
        if (word == name(dtype)) return {dtype};
    throw std::runtime_error("--dtype is f32, f16, f64, bf16 or all, not " + word);
}

double number_of(const std::string& option, const std::string& word) {
    size_t read = 0;
    double number = 0;
    try {
        number = std::stod(word, &read);
    } catch (const std::logic_error&) {
    }
    if (read != word.size() || !(number > 0))
        throw std::runtime_error(option + " takes a positive number, not " + word);
    return number;
}

}  // namespace

Options parse_options(int argc, char** argv) {
    Options options;
    const std::vector<std::string> words(argv + 1, argv + argc);
    for (size_t i = 0; i < words.size(); ++i) {
        const std::string& word = words[i];
        const auto next = [&]() -> const std::string& {
            if (i + 1 == words.size()) throw std::runtime_error(word + " needs a value");
            return words[++i];
        };
        if (word == "--case") options.cases.push_back(next());
        else if (word == "--kernel") options.kernels.push_back(next());
        else if (word == "--pass") options.passes = {pass_of(next())};
        else if (word == "--dtype") options.dtypes = dtypes_of(next());
        else if (word == "--threads") options.threads = int(number_of(word, next()));
        else if (word == "--seconds") options.budget.seconds = number_of(word, next());
        else if (word == "--json") options.json = next();
        else if (word == "--mask") options.mask = next();
        else if (word == "--full") options.full = true;
        else if (word == "--warm") options.warm = true;
        else if (word == "--plan") options.plan = true;
        else if (word == "--list") options.list = true;
        else if (word == "--help") std::fputs(usage, stdout), std::exit(0);
        else throw std::runtime_error("unknown option " + word + "\n\n" + usage);
    }
    if (options.threads == 0) options.threads = int(std::max(1u, std::thread::hardware_concurrency()));
    return options;
}

}  // namespace bench
