// SPDX-License-Identifier: MIT
// Patterns through bytes and back; bytes of hostile origin; files of earlier releases in golden/, which load for ever.
// SPATTN_WRITE_GOLDEN=1 writes files that are missing; one that is there is never rewritten.
#include <chrono>

#include "core/error.h"
#include "golden.h"
#include "pattern/bytes.h"
#include "pattern/index_trees.h"

using namespace spattn;
using namespace trees;

namespace {

std::string with_hash(const std::string& body) {
    ByteWriter hash(ByteWriter::Keeps::bytes);
    hash.number(int64_t(hash_identity(body)));
    return "SPATTNP1" + hash.bytes() + body;
}

PatternRef load(const std::string& bytes) { return load_pattern(bytes.data(), bytes.size()); }

// Either a pattern, which must then answer, or SPATTN_E_FORMAT that says where.
bool survives(const std::string& bytes) {
    try {
        const PatternRef pattern = load(bytes);
        CHECK(!pattern->print().empty());
        const std::string saved = save_pattern(*pattern);
        CHECK_EQ(saved_size(*pattern), saved.size());
        CHECK(load(saved)->identity() == pattern->identity());
        return true;
    } catch (const Error& error) {
        CHECK_EQ(error.status, SPATTN_E_FORMAT);
        CHECK_EQ(error.argument, std::string("bytes"));
        CHECK_EQ(error.message.compare(0, 5, "byte "), 0);
        return false;
    }
}

Tree random_tree(uint32_t seed, Plane& plane) {
    Source source(seed);
    plane = source.plane();
    return source.mixed(plane.extent, int(seed % 4));
}

struct Golden {
    const char* file;
    const char* text;
};
const Golden goldens[] = {
    {"analytic", "causal & (sink(64) | window(1023,0)) - residue(7,3)"},
    {"repeating", "strided(8) | landmark(16,2) | fixed(32,4) | global_keys(9,2)"},
    {"lists", "documents(0,5,9) | global_tokens(3,1,3) | tree(-1,0,0) | bigbird(64,3,1,3,18446744073709551615)"},
    {"choices", "per_head([0,1,0], per_batch([1,0], causal, full), transpose(dilated(8,2,3) - logsparse))"},
    {"grid", "grid([6,8], [3,4], window(1,1), csr([0,1,2,3,4,5,6,7,8],[7,6,5,4,3,2,1,0],8)) | sink(1)"},
    {"per_document", "per_document([0,3,3,9], [0,4,4,9], causal) & block_diagonal(4)"},
    {"rows", "rows([6,8,0,3], 8, causal & window(2,0)) | sink(1)"},
    {"columns", "columns([0,3,6,8], 8, causal & window(2,0)) | sink(1)"},
    {"csr", "csr([0,2,2,3],[0,4,1],5)"},
    {"bsr", "bsr([0,1,3],[1,0,2],4,2,7,5)"},
    {"mask", "mask([1,0,0,1,1,1,1,0,0,0,1,0],2,1,3,2)"},
    {"xref", "xref([3,4,5,3,4,6],[-1,-1,0,-1,-1,0,2,-1,0,-1,-1,0],1,2,6,2,2,1,1,4,0) & causal"},
    {"run_lists", "causal & runtime_blocks(16,64,8)"},
    {"run_tokens", "runtime_tokens(2048)"},
};

}  // namespace

TEST(loaded_is_equal) {
    for (uint32_t seed = 0; seed < 1500; ++seed) {
        Plane plane;
        const Tree tree = random_tree(seed, plane);
        const std::string bytes = save_pattern(*tree.pattern);
        const PatternRef again = load(bytes);
        check::context = "seed " + std::to_string(seed) + ": " + tree.pattern->print();
        CHECK(again->identity() == tree.pattern->identity());
        CHECK_EQ(again->print(), tree.pattern->print());
        CHECK(save_pattern(*again) == bytes);
        if (seed % 10 == 0) check_meaning({again, tree.sees}, plane, seed);
    }
}

TEST(long_lists_and_deep_compositions) {
    std::vector<int64_t> positions;
    for (int64_t i = 0; i < 100000; ++i) positions.push_back(3 * i);
    const PatternRef list = make_global_keys(positions);
    CHECK(load(save_pattern(*list))->identity() == list->identity());
    PatternRef deep = make_causal();
    for (int i = 0; i < 199; ++i) deep = make_transpose(deep);
    CHECK(load(save_pattern(*deep))->identity() == deep->identity());
}

// As many parts as a pattern may have, of each operator: one after the other they would take half a minute.
TEST(long_chains_load_in_no_time) {
    for (const char* sign : {" & ", " - ", " | "}) {
        std::string chain = "causal";
        for (int i = 1; i < 60000; ++i) chain += sign + std::string(i % 2 ? "full" : "causal");
        const std::string bytes = save_pattern(*parse_pattern(chain));
        const auto start = std::chrono::steady_clock::now();
        const PatternRef loaded = load(bytes);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        CHECK(took.count() < 2);
        CHECK(loaded->print() == chain);
    }
}

TEST(every_truncation_is_refused) {
    for (uint32_t seed = 0; seed < 60; ++seed) {
        Plane plane;
        const std::string bytes = save_pattern(*random_tree(seed, plane).pattern);
        for (size_t size = 0; size < bytes.size(); size += seed % 4 ? 7 : 1) {
            CHECK(!survives(bytes.substr(0, size)));
            if (size >= 16) survives(with_hash(bytes.substr(16, size - 16)));
        }
        CHECK(!survives(bytes + '\0'));
        CHECK(!survives(with_hash(bytes.substr(16) + '\0')));
    }
}

TEST(every_flipped_bit_is_noticed) {
    int loaded = 0, refused = 0;
    for (uint32_t seed = 0; seed < 120; ++seed) {
        Plane plane;
        Source source(seed);
        const std::string bytes = save_pattern(*random_tree(seed, plane).pattern);
        for (int flip = 0; flip < 60; ++flip) {
            std::string bad = bytes;
            bad[size_t(source.number(0, int64_t(bad.size()) - 1))] ^= char(1 << source.number(0, 7));
            CHECK(!survives(bad));
            // With the hash mended the reader itself must hold.
            ++(survives(with_hash(bad.substr(16))) ? loaded : refused);
        }
    }
    CHECK(loaded > 100 && refused > 100);
}

TEST(bytes_that_lie) {
    const auto node = [](Node tag, std::vector<int64_t> numbers) {
        ByteWriter w(ByteWriter::Keeps::bytes);
        w.node(tag);
        for (int64_t n : numbers) w.number(n);
        return w.bytes();
    };
    const int64_t huge = int64_t(1) << 62;
    for (int64_t n : {int64_t(-1), int64_t(0), huge, -huge, std::numeric_limits<int64_t>::max()}) {
        for (int tag = 0; tag < 256; ++tag) {
            CHECK(!survives(with_hash(node(Node(tag), {n}))));
            CHECK(!survives(with_hash(node(Node(tag), {n, n, n, n, n, n}))));
        }
        CHECK(!survives(with_hash(node(Node::mask, {1, 1, 1, n, 0}))));
        CHECK(!survives(with_hash(node(Node::mask, {1 << 20, 1 << 20, n, (int64_t(1) << 31) - 1, 0}))));
    }
    std::string nested;
    for (int i = 0; i < 100000; ++i) nested += node(Node::transpose, {1});
    CHECK(!survives(with_hash(nested)));
    CHECK(!survives(""));
    CHECK(!survives("SPATTNP2" + save_pattern(*make_full()).substr(8)));
}

TEST(golden_files_load_for_ever) {
    for (const Golden& g : goldens) {
        check::context = g.file;
        const PatternRef wanted = parse_pattern(g.text);
        const auto path = golden::path_of("pattern", std::string(g.file) + ".pattern");
        if (golden::is_writing() && golden::read(path).empty()) golden::write(path, save_pattern(*wanted));
        const PatternRef loaded = load(golden::read(path));
        CHECK(loaded->identity() == wanted->identity());
        CHECK_EQ(loaded->print(), g.text);
    }
}
