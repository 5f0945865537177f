// SPDX-License-Identifier: MIT
// The conformance vectors of tests/vectors, through sparseattn.hpp.
#include <algorithm>
#include <cmath>
#include <sparseattn/sparseattn.hpp>

#include "check.h"
#include "cpp/json.h"
#include "cpp/sha256.h"

namespace sa = sparseattn;

namespace {

std::vector<json::Value> load(const char* name) {
    auto vectors = json::read_file(std::string(SPATTN_TESTS_FOLDER "/vectors/") + name).items;
    CHECK(vectors.size() > 20);
    return vectors;
}

sa::Extent extent_of(const json::Value& vector, const char* heads) {
    sa::Extent extent;
    extent.seq_q = vector.integer("seq_q"), extent.seq_k = vector.integer("seq_k");
    extent.batch = vector.integer("batch"), extent.heads = vector.integer(heads);
    extent.q_offset = vector.integer("q_offset");
    return extent;
}

// Tensors of one attention vector by name, results poisoned.
struct Tensors {
    explicit Tensors(const json::Value& vector) : vector(vector) {}

    std::vector<int64_t> shape_of(std::string name) const {
        if (name == "sink_logits" || name == "dsink_logits") return {vector.integer("heads_q")};
        if (name[0] == 'd') name.erase(0, 1);
        const bool is_key = name == "k" || name == "v";
        std::vector<int64_t> shape = {vector.integer("batch"), vector.integer(is_key ? "heads_kv" : "heads_q"),
                                      vector.integer(is_key ? "seq_k" : "seq_q")};
        if (name != "lse") shape.push_back(vector.integer(name == "v" || name == "out" ? "head_dim_v" : "head_dim"));
        return shape;
    }
    sa::View view(const std::string& name, bool is_result) {
        if (!vector.has(name)) return {};
        if (!values.count(name)) {
            values[name] = vector[name].numbers<float>();
            if (is_result) values[name].assign(values[name].size(), NAN);
        }
        const std::vector<int64_t> shape = shape_of(name);
        return {values[name].data(), sa::float32, shape.data(), nullptr, int(shape.size())};
    }
    void compare(const std::string& name) const {
        const std::vector<double> expected = vector[name].numbers<double>();
        const std::vector<float>& got = values.at(name);
        // dq and dk are scale times a difference of float32 numbers, whose own rounding the scale makes larger.
        double size = std::max(1.0, std::fabs(vector["scale"].number));
        for (double x : expected)
            if (std::isfinite(x)) size = std::max(size, std::fabs(x));
        for (size_t i = 0; i < expected.size(); ++i) {
            const double tolerance = 2e-5 * std::fabs(expected[i]) + 2e-6 * size;
            const bool is_near = std::isinf(expected[i]) ? got[i] == float(expected[i])
                                                         : std::fabs(got[i] - expected[i]) <= tolerance;
            check::context = name + "[" + std::to_string(i) + "] of " + vector["text"].text;
            CHECK(is_near);
        }
    }

    const json::Value& vector;
    std::map<std::string, std::vector<float>> values;
};

void run(const json::Value& vector, const sa::Context& context, bool reference) {
    sa::Problem problem;
    problem.batch = vector.integer("batch");
    problem.heads_q = vector.integer("heads_q"), problem.heads_kv = vector.integer("heads_kv");
    problem.seq_q = vector.integer("seq_q"), problem.seq_k = vector.integer("seq_k");
    problem.head_dim = vector.integer("head_dim"), problem.head_dim_v = vector.integer("head_dim_v");
    problem.axes = sa::Axes::bhsd;
    problem.scale = vector["scale"].number, problem.q_offset = vector.integer("q_offset");
    problem.softcap = vector.has("softcap") ? vector["softcap"].number : 0;
    problem.backward = true, problem.reference = reference, problem.sink_logits = vector.has("sink_logits");
    const sa::Plan plan = context.plan(sa::parse(vector["text"].text), problem);

    Tensors tensors(vector);
    sa::Forward forward;
    forward.q = tensors.view("q", false), forward.k = tensors.view("k", false), forward.v = tensors.view("v", false);
    forward.out = tensors.view("out", true), forward.lse = tensors.view("lse", true);
    forward.sink_logits = tensors.view("sink_logits", false);
    plan.forward(forward);
    sa::Backward backward;
    backward.q = forward.q, backward.k = forward.k, backward.v = forward.v, backward.out = forward.out;
    backward.lse = forward.lse, backward.sink_logits = forward.sink_logits;
    backward.dout = tensors.view("dout", false), backward.dlse = tensors.view("dlse", false);
    backward.dq = tensors.view("dq", true), backward.dk = tensors.view("dk", true);
    backward.dv = tensors.view("dv", true), backward.dsink_logits = tensors.view("dsink_logits", true);
    plan.backward(backward);
    for (const char* name : {"out", "lse", "dq", "dk", "dv"}) tensors.compare(name);
    if (problem.sink_logits) tensors.compare("dsink_logits");
}

}  // namespace

TEST(digests) {
    CHECK_EQ(sha256({'a', 'b', 'c'}), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(patterns_keep_the_pairs_of_every_vector) {
    for (const json::Value& vector : load("patterns.json")) {
        check::context = vector["text"].text;
        const sa::Pattern pattern = sa::parse(vector["text"].text);
        const sa::Extent extent = extent_of(vector, "heads");
        std::vector<unsigned char> mask(size_t(extent.batch * extent.heads * extent.seq_q * extent.seq_k), 7);
        pattern.to_mask(extent, sa::view(mask.data(), {extent.batch, extent.heads, extent.seq_q, extent.seq_k}));
        CHECK_EQ(sha256(mask), vector["sha256"].text);
        CHECK_EQ(pattern.stats(extent).pairs, vector["pairs"].number);
    }
}

TEST(attention_of_every_vector) {
    const sa::Context context(sa::cpu);
    for (const json::Value& vector : load("attention.json"))
        for (bool reference : {false, true}) run(vector, context, reference);
}
