// SPDX-License-Identifier: MIT
// Drives a fuzz target where there is no libFuzzer: every file of the corpus, then inputs made from them with a fixed
// random generator, so that a failure repeats.
//
//     fuzz_parse CORPUS [RUNS [FIRST]]        FIRST: the run that a failure named. Without RUNS: 20,000, or 8 seconds
#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "fuzz/fuzz.h"

namespace {

using Input = std::vector<uint8_t>;

long current = 0;
const char* program = "";
const char* corpus_folder = "";

void name_the_run(int) {
    std::fprintf(stderr, "FAILED random: again with `%s %s 1 %ld`\n", program, corpus_folder, current);
    std::_Exit(1);
}

std::vector<Input> read_corpus(const char* folder) {
    std::vector<std::filesystem::path> paths;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    std::vector<Input> inputs;
    for (const auto& path : paths) {
        std::ifstream file(path, std::ios::binary);
        inputs.push_back(Input(std::istreambuf_iterator<char>(file), {}));
    }
    return inputs;
}

// An input of the corpus, spoiled; or random bytes.
Input make_input(const std::vector<Input>& corpus, long run) {
    std::mt19937_64 random{uint64_t(run)};
    const auto below = [&](size_t end) { return size_t(random() % end); };
    Input input;
    if (below(4) == 0) {
        input.resize(below(200));
        for (uint8_t& byte : input) byte = uint8_t(random());
        return input;
    }
    input = corpus[below(corpus.size())];
    for (size_t changes = below(5); changes > 0 && !input.empty(); --changes) {
        const size_t at = below(input.size()), length = below(std::min<size_t>(input.size() - at, 16) + 1);
        const Input& other = corpus[below(corpus.size())];
        switch (below(4)) {
            case 0: input[at] = uint8_t(random()); break;
            case 1: input.erase(input.begin() + at, input.begin() + at + length); break;
            case 2: std::reverse(input.begin() + at, input.begin() + at + length); break;
            default: input.insert(input.begin() + at, other.begin(), other.begin() + below(other.size() + 1)); break;
        }
    }
    return input;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) return std::fprintf(stderr, "usage: %s CORPUS [RUNS [FIRST]]\n", argv[0]), 2;
    program = argv[0];
    corpus_folder = argv[1];
    const std::vector<Input> corpus = read_corpus(argv[1]);
    if (corpus.empty()) return std::fprintf(stderr, "%s has no file\n", argv[1]), 2;
    for (const Input& input : corpus) LLVMFuzzerTestOneInput(input.data(), input.size());
    const long runs = argc > 2 ? std::atol(argv[2]) : 20000, first = argc > 3 ? std::atol(argv[3]) : 0;
    const auto enough = std::chrono::steady_clock::now() + std::chrono::seconds(argc > 2 ? 1000000 : 8);
    for (int signal : {SIGABRT, SIGSEGV, SIGFPE, SIGBUS}) std::signal(signal, name_the_run);
    for (current = first; current < first + runs && std::chrono::steady_clock::now() < enough; ++current) {
        const Input input = make_input(corpus, current);
        LLVMFuzzerTestOneInput(input.data(), input.size());
    }
    std::printf("%zu inputs of the corpus, %ld random ones\n2 passed, 0 failed\n", corpus.size(), current - first);
}
