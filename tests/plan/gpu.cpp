// SPDX-License-Identifier: MIT
// Plans of the CUDA rows for a GPU that exists nowhere: their fits, costs and schedules are host code, and are tested
// where there is no GPU and no toolkit.
#include <limits>
#include <random>

#include "any/divisor.h"
#include "any/kernels.cpp"
#include "core/error.h"
#include "golden.h"
#include "plan/backends.h"
#include "plan/dispatched.h"
#include "plan/float8.h"
#include "plan/plans.h"
#include "sm80/kernels.cpp"
#include "sm90/kernels.cpp"

namespace spattn {

namespace {
int imaginary_capability = 90;
}

// What rows call on a device. Nothing runs here.
namespace runtime {
int capability(int) { return imaginary_capability; }
int shared_bytes(int) {
    return (imaginary_capability == 75 ? 64 : imaginary_capability == 86 ? 99 : 163) << 10;
}
CurrentDevice::CurrentDevice(int) {}
CurrentDevice::~CurrentDevice() {}
}  // namespace runtime
namespace any {
template <Dtype D>
void BlockForward<D>::run(const ForwardArgs&) {}
template <Dtype D>
void BlockForward<D>::prepare(int32_t) {}
template <Dtype D>
void BlockBackward<D>::run(const BackwardArgs&) {}
template <Dtype D>
void BlockBackward<D>::prepare(int32_t) {}
template <Dtype D>
void GatherForward<D>::run(const ForwardArgs&) {}
template <Dtype D>
void GatherForward<D>::prepare(int32_t) {}
template <Dtype D>
void GatherBackward<D>::run(const BackwardArgs&) {}
template <Dtype D>
void GatherBackward<D>::prepare(int32_t) {}
template <Dtype D>
void Combine<D>::run(const ForwardArgs&, const Partials<RealOf<D>>&) {}
template <Dtype D>
void Combine<D>::prepare(int32_t) {}
template <Dtype D>
void Dispatch<D>::send(const ForwardArgs&, const DispatchRound&) {}
template <Dtype D>
void Dispatch<D>::combine(const ForwardArgs&, const DispatchRound&) {}
template <Dtype D>
void Dispatch<D>::sum_rows(const BackwardArgs&) {}
template <Dtype D>
void Dispatch<D>::send_back(const BackwardArgs&, const DispatchRound&) {}
template <Dtype D>
void Dispatch<D>::combine_back(const BackwardArgs&, const DispatchRound&) {}
template <Dtype D>
void Dispatch<D>::prepare(int32_t) {}
}  // namespace any
namespace sm80 {
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, bool Splits>
void BlockForward<D, HeadDim, HeadDimV, BlockQ, Splits>::run(const ForwardArgs&) {}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, bool Splits>
void BlockForward<D, HeadDim, HeadDimV, BlockQ, Splits>::prepare(int32_t) {}
template <Dtype D, int HeadDim, int HeadDimV, int Block>
void GatherForward<D, HeadDim, HeadDimV, Block>::run(const ForwardArgs&) {}
template <Dtype D, int HeadDim, int HeadDimV, int Block>
void GatherForward<D, HeadDim, HeadDimV, Block>::prepare(int32_t) {}
template <Dtype D, int HeadDim, int HeadDimV, int Block>
void GatherBackward<D, HeadDim, HeadDimV, Block>::run(const BackwardArgs&) {}
template <Dtype D, int HeadDim, int HeadDimV, int Block>
void GatherBackward<D, HeadDim, HeadDimV, Block>::prepare(int32_t) {}
template <Dtype D, int HeadDim, int HeadDimV, int Block, bool Splits>
void BlockBackward<D, HeadDim, HeadDimV, Block, Splits>::run(const BackwardArgs&) {}
template <Dtype D, int HeadDim, int HeadDimV, int Block, bool Splits>
void BlockBackward<D, HeadDim, HeadDimV, Block, Splits>::prepare(int32_t) {}
template <Dtype D, int HeadDim, int HeadDimV, int Block>
void BlockBackwardAdded<D, HeadDim, HeadDimV, Block>::run(const BackwardArgs&) {}
template <Dtype D, int HeadDim, int HeadDimV, int Block>
void BlockBackwardAdded<D, HeadDim, HeadDimV, Block>::prepare(int32_t) {}
}  // namespace sm80
namespace sm90 {
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockForward<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const ForwardArgs&) {}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockForward<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t) {}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockForwardFloat8<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const ForwardArgs&) {}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockForwardFloat8<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t) {}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void GatherForward<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const ForwardArgs&) {}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void GatherForward<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t) {}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void GatherBackward<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const BackwardArgs&) {}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void GatherBackward<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t) {}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void GatherBackwardPair<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const BackwardArgs&) {}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void GatherBackwardPair<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t) {}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockBackward<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const BackwardArgs&) {}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockBackward<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t) {}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockBackwardInOrder<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const BackwardArgs&) {}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockBackwardInOrder<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t) {}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockBackwardApart<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const BackwardArgs&) {}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockBackwardApart<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t) {}
}  // namespace sm90

namespace {

const std::vector<Kernel>& rows() {
    static const std::vector<Kernel> all = [] {
        std::vector<Kernel> rows;
        append(rows, sm90::kernels());
        append(rows, sm80::kernels());
        append(rows, any::kernels());
        return rows;
    }();
    return all;
}

struct Golden {
    const char *name, *pattern;
    int64_t heads, seq_q, seq_k, head_dim;
    Dtype dtype = Dtype::bf16;
    bool backward = false, deterministic = false;
    int64_t group = 1, head_dim_v = 0;
    bool value_in_key = false, tf32 = false;
};

const Golden goldens[] = {
    {"full_16k", "full", 16, 16384, 16384, 128},
    {"causal_16k", "causal", 16, 16384, 16384, 128},
    {"streaming_128k", "causal & (sink(64) | window(1023,0))", 4, 131072, 131072, 128},
    {"one_long_row", "full", 1, 128, 1048576, 128},
    {"narrow_heads", "causal & window(1023,0)", 16, 16384, 16384, 64},
    {"narrow_blocks", "block_diagonal(192)", 16, 16384, 16384, 128},
    {"narrow_window", "window(63,63)", 16, 16384, 16384, 64},
    {"f16_96", "block_diagonal(512)", 16, 16384, 16384, 96, Dtype::f16},
    {"f32", "causal", 2, 1024, 1024, 128, Dtype::f32},
    {"tf32", "causal", 16, 4096, 4096, 128, Dtype::f32, true, false, 1, 0, false, true},
    {"f32_256", "causal", 16, 4096, 4096, 256, Dtype::f32, true},
    {"tf32_256", "causal & window(1023,0)", 16, 4096, 4096, 256, Dtype::f32, true, false, 1, 0, false, true},
    {"tf32_96", "full", 2, 700, 700, 96, Dtype::f32, false, false, 1, 0, false, true},
    {"odd_head_dim", "causal", 2, 1024, 1024, 100},
    {"backward", "causal & window(1023,0)", 16, 16384, 16384, 128, Dtype::bf16, true},
    {"backward_narrow", "block_diagonal(64)", 16, 16384, 16384, 128, Dtype::bf16, true},
    {"backward_wide", "causal", 16, 4096, 4096, 256, Dtype::f16, true},
    {"backward_of_512", "causal & window(1023,0)", 16, 4096, 4096, 512, Dtype::bf16, true, false, 4},
    {"decoding_of_512", "full", 32, 1, 32768, 512, Dtype::bf16, false, false, 8},
    {"backward_deterministic", "causal", 16, 16384, 16384, 128, Dtype::bf16, true, true},
    {"classes", "causal & dilated(1008,0,16)", 16, 16384, 16384, 128, Dtype::bf16, true},
    {"pieces", "causal & (window(128,0) | strided(128))", 16, 16384, 16384, 128, Dtype::bf16, true},
    {"pieces_of_heads", "per_head([0,0,0,0,1,1,1,1], window(255,255), dilated(2040,2040,8))", 8, 16384, 16384, 128,
     Dtype::bf16, true},
    {"neighborhood", "grid([128,128], [8,8], window(6,6), window(6,6))", 16, 16384, 16384, 128, Dtype::bf16, true},
    {"window_of_groups", "causal & window(1023,0)", 64, 16384, 16384, 128, Dtype::bf16, false, false, 8},
    {"decoding_of_groups", "sink(64) | window(32767,0)", 64, 1, 131072, 128, Dtype::bf16, false, false, 8},
    {"call_lists", "causal & runtime_tokens(2048)", 16, 16384, 16384, 128, Dtype::bf16, true},
    {"call_lists_of_groups", "causal & runtime_tokens(2048)", 16, 4096, 16384, 128, Dtype::bf16, true, false, 16},
    {"call_lists_latent", "runtime_tokens(2048)", 128, 4096, 16384, 576, Dtype::bf16, true, false, 128, 512, true},
    {"call_lists_deterministic", "runtime_tokens(2048)", 128, 4096, 16384, 576, Dtype::bf16, true, true, 128, 512,
     true},
    {"call_blocks", "causal & runtime_blocks(128,128,16)", 16, 16384, 16384, 128, Dtype::bf16, true},
    {"call_blocks_deterministic", "causal & runtime_blocks(64,128,16)", 16, 8192, 8192, 128, Dtype::bf16, true, true},
    {"call_blocks_of_64", "causal & runtime_blocks(64,64,32)", 16, 16384, 16384, 128, Dtype::bf16, true},
    {"blocks_of_queries", "causal & runtime_blocks(1,128,8)", 16, 65536, 65536, 128, Dtype::bf16, true},
    {"blocks_of_queries_deterministic", "causal & runtime_blocks(1,512,8)", 16, 65536, 65536, 128, Dtype::bf16, true,
     true},
    {"blocks_of_grouped_queries", "causal & runtime_blocks(1,64,16)", 64, 65536, 65536, 128, Dtype::bf16, true, false,
     16},
    {"call_lists_f64", "runtime_blocks(64,64,16)", 2, 4096, 4096, 100, Dtype::f64, true},
};

CompiledPlan plan_of(const Golden& g) {
    Problem p = imaginary::problem(g.seq_q, g.seq_k, g.head_dim);
    p.heads_q = g.heads, p.heads_kv = g.heads / g.group;
    p.value_in_key = g.value_in_key, p.tf32 = g.tf32;
    if (g.head_dim_v) p.head_dim_v = g.head_dim_v;
    p.dtype = g.dtype, p.deterministic = g.deterministic;
    PlanOptions options;
    options.backward = g.backward;
    options.device = SPATTN_CUDA;
    options.machine = {"imaginary GPU", 132, 1.7, 4000, 1.4e11};
    const PatternRef pattern = parse_pattern(g.pattern);
    if (const RuntimeShape* s = pattern->runtime()) p.call_lists = {s->block_q, s->block_k, s->most};
    return compile_plan(*pattern, p, options, rows());
}

}  // namespace

TEST(gpu_plans_are_the_golden_ones) {
    imaginary_capability = 90;
    for (const Golden& g : goldens) golden::demand("plan", std::string("gpu_") + g.name + ".txt", explain(plan_of(g)));
}

// Masks are permuted by words. The definition, bit by bit, is what kernels reckon with.
TEST(permuted_masks_are_the_fragments_that_kernels_read) {
    std::mt19937_64 random(7);
    const auto bit_of = [](const uint64_t* words, int bit) { return words[bit / 64] >> (bit % 64) & 1; };
    const auto of_heads = tile::permute_to_fragments<8>;
    for (int block_q : {64, 128, 192})
        for (int block_k : {64, 128}) {
            const int words = block_q * block_k / 64;
            std::vector<uint64_t> bits(words), once(words), shared(words), both(2 * words, ~uint64_t(0));
            for (uint64_t& word : bits) word = random() & random();
            tile::permute_to_fragments<1>(bits.data(), block_q, block_k, once.data());
            of_heads(bits.data(), block_q / 8, block_k, shared.data());
            tile::permute_to_both_fragments(bits.data(), block_q, block_k, both.data());
            int wrong = 0;
            for (int query = 0; query < block_q; ++query)
                for (int key = 0; key < block_k; ++key) {
                    const uint64_t kept = bit_of(bits.data(), query * block_k + key);
                    wrong += bit_of(once.data(), tile::fragment_bit(query, key, block_k)) != kept;
                    wrong += bit_of(shared.data(), tile::fragment_bit(query, key, block_k)) !=
                             bit_of(bits.data(), query / 8 * block_k + key);
                    wrong += bit_of(both.data(), tile::key_fragment_bit(query, key, block_k)) != kept;
                    wrong += bit_of(both.data() + words, tile::key_fragment_bit(key, query, block_q)) != kept;
                }
            CHECK_EQ(wrong, 0);
        }
}

TEST(permuted_masks_tell_which_quarters_have_pairs) {
    std::mt19937_64 random(8);
    for (int kept = 0; kept < 16; ++kept) {  // bit 2 q + k: the quarter of the q-th 64 queries and the k-th 64 keys
        std::vector<uint64_t> bits(256), out(513);
        for (int quarter = 0; quarter < 4; ++quarter)
            if (kept >> quarter & 1) {  // a pair anywhere in it
                const size_t query = 64 * size_t(quarter / 2) + random() % 64;
                bits[2 * query + size_t(quarter % 2)] = uint64_t(1) << random() % 64;
            }
        tile::permute_to_both_fragments_and_quarters(bits.data(), 128, 128, out.data());
        const int told = kept ? kept : 15;  // of a block without a pair: all
        const int by_key = told, by_query = (told & 9) | (told & 2) << 1 | (told & 4) >> 1;
        CHECK_EQ(out[512], uint64_t(by_key) | uint64_t(by_query) << 32);
    }
}

// Calls make masks for dispatched queries bit by bit.
TEST(bits_of_masks_are_found_for_every_row) {
    std::mt19937_64 random(9);
    for (const Kernel& row : rows()) {
        if (!row.dispatch || row.block_k % known_block) continue;
        const std::vector<uint16_t> places = make_bit_places(row);
        std::vector<uint64_t> bits(size_t(row.block_q * row.block_k / 64)), wanted(size_t(row.mask_words));
        for (uint64_t& word : bits) word = random() & random();
        if (row.permute) row.permute(bits.data(), row.block_q, row.block_k, wanted.data());
        else wanted = bits;
        check::context = row.name;
        int wrong = 0, of_all = 0;
        for (size_t at = 0; at < places.size(); ++at) {
            const uint16_t from = places[at];
            const bool is_set = from < bit_of_all ? bits[from / 64] >> (from % 64) & 1 : from == bit_of_all;
            wrong += is_set != (wanted[at / 64] >> (at % 64) & 1);  // of this mask no quarter is empty
            of_all += from == bit_of_all;
        }
        CHECK_EQ(places.size(), size_t(row.mask_words) * 64);
        CHECK_EQ(wrong, 0);
        CHECK_EQ(of_all, row.permute == tile::permute_to_both_fragments_and_quarters ? 8 : 0);
    }
}

// Kernels find heads and batches so.
TEST(divisors_divide_as_compilers_do) {
    constexpr int most = std::numeric_limits<int>::max();
    std::mt19937 random(10);
    std::vector<int> numbers;
    for (int n = 1; n < 300; ++n) numbers.push_back(n);
    for (int bit = 8; bit < 31; ++bit)
        for (int n : {-1, 0, 1}) numbers.push_back((1 << bit) + n);
    for (int n = 0; n < 1000; ++n) numbers.push_back(int(random() >> (1 + n % 30)) | 1);
    numbers.push_back(most - 1), numbers.push_back(most);
    int wrong = 0;
    for (int number : numbers) {
        const any::Divisor divisor(number);
        const auto try_it = [&](int64_t x) {
            if (x >= 0 && x <= most) wrong += int(x) / divisor != int(x) / number;
        };
        for (int64_t times : {int64_t(0), int64_t(1), int64_t(2), int64_t(most / number), int64_t(random() % 1000)})
            for (int n : {-1, 0, 1}) try_it(times * number + n);
        for (int n = 0; n < 100; ++n) try_it(random() >> (1 + n % 31));
        try_it(most - 1), try_it(most);
        wrong += divisor != number;
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(7 / any::Divisor(0), 7);
}

// Hopper has pairs of CTAs for tokens in their own order, and for others the kernels of older GPUs.
TEST(wide_heads_get_rows_of_tensor_cores) {
    imaginary_capability = 90;
    for (const int64_t head_dim : {264, 320, 512}) {
        const Golden window{"", "causal & window(1023,0)", 8, 4096, 4096, head_dim, Dtype::f16, true};
        CHECK_EQ(imaginary::name(plan_of(window).forward), "sm90_block_forward_f16_d512_v512_128x64");
        CHECK_EQ(imaginary::name(plan_of(window).backward), "sm90_block_backward_apart_f16_d512_v512_128x128");
    }
    const Golden odd{"", "causal", 8, 4096, 4096, 300, Dtype::bf16, true};
    CHECK_EQ(imaginary::name(plan_of(odd).forward), "sm80_block_forward_bf16_d512_v512_64x64");
    CHECK_EQ(imaginary::name(plan_of(odd).backward), "sm80_block_backward_bf16_d512_v512_64x64");
    const CompiledPlan strided = plan_of({"", "strided(128)", 8, 16384, 16384, 512, Dtype::bf16, true});
    CHECK(imaginary::name(strided.forward).rfind("sm80_", 0) == 0);
    CHECK(imaginary::name(strided.backward).rfind("sm80_", 0) == 0);
}

// Whatever shared memory a CTA has: sums of columns are in two parts, and rows come in panels.
TEST(wide_heads_get_rows_of_older_gpus) {
    for (const int capability : {80, 86})
        for (const int64_t head_dim : {288, 320, 512})
            for (const char* pattern : {"full", "causal & window(1023,0)", "causal & (window(127,0) | strided(32))"}) {
                imaginary_capability = capability;
                const CompiledPlan plan = plan_of({"", pattern, 8, 4096, 4096, head_dim, Dtype::f16, true});
                for (const PassPlan* pass : {&plan.forward, &plan.backward})
                    for (const PiecePlan& piece : pass->pieces)
                        CHECK_EQ(std::string(piece.kernel->name),
                                 std::string("sm80_block_") + (pass == &plan.forward ? "forward" : "backward") +
                                     "_f16_d512_v512_64x64");
            }
    imaginary_capability = 90;
}

namespace {

// Plans g once more with each row of blocks pinned, beside what the free plan has in its other pass; how many could serve.
int compare_rows(const Golden& g) {
    constexpr double clearly = 0.9;  // what a layout must promise to be made (plan/chooser.cpp)
    const CompiledPlan free = plan_of(g);
    if (free.forward.pieces.size() > 1 || free.backward.pieces.size() > 1) return 0;
    int compared = 0;
    for (const Kernel& kernel : rows()) {
        if (kernel.dtype != g.dtype || kernel.family != Family::block) continue;
        const auto pass_of = [&](const CompiledPlan& plan) -> const PassPlan& {
            return kernel.pass == Pass::forward ? plan.forward : plan.backward;
        };
        const PassPlan& other = kernel.pass == Pass::forward ? free.backward : free.forward;
        setenv("SPATTN_FORCE_KERNEL", (std::string(kernel.name) + "," + imaginary::name(other)).c_str(), 1);
        try {
            CHECK(pass_of(plan_of(g)).cost.us >= clearly * pass_of(free).cost.us);
            ++compared;
        } catch (const Error& e) {
            CHECK_EQ(e.status, int(SPATTN_E_NO_KERNEL));
        }
        unsetenv("SPATTN_FORCE_KERNEL");
    }
    return compared;
}

}  // namespace

// What a candidate is left out for is a bound on its cost, so that none left out is clearly cheaper when it is pinned.
TEST(no_row_left_out_is_clearly_cheaper) {
    const char* const patterns[] = {"causal & (window(16,0) | landmark(16,1))", "window(8,8) | global_tokens(0, 1, 64)",
                                    "causal & (window(512,0) | landmark(64,1))", "causal & strided(32)", "causal",
                                    "causal & (sink(4) | window(62,0))", "logsparse"};
    int compared = 0;
    for (const char* pattern : patterns)
        for (const int64_t tokens : {128, 200, 1000, 4096})
            for (const int64_t head_dim : {40, 128, 160}) {
                check::context = text(pattern, " over ", tokens, ", head_dim ", head_dim);
                Golden g{"", pattern, 8, tokens, tokens, head_dim, Dtype::bf16, true};
                g.group = head_dim == 128 ? 4 : 1;
                compared += compare_rows(g);
            }
    CHECK(compared > 500);
}

TEST(older_gpus_get_rows_of_their_own) {
    imaginary_capability = 70;
    bool is_refused = false;
    try {
        plan_of(goldens[0]);
    } catch (const Error& e) {
        is_refused = e.status == SPATTN_E_NO_KERNEL;
    }
    CHECK(is_refused);
    imaginary_capability = 80;
    CHECK_EQ(imaginary::name(plan_of(goldens[0]).forward), "sm80_block_forward_bf16_d128_v128_128x64");
    const Golden wide{"", "full", 2, 512, 512, 256, Dtype::bf16, true};
    CHECK_EQ(imaginary::name(plan_of(wide).backward), "sm80_block_backward_bf16_d256_v256_64x64");
    const Golden latent{"", "runtime_tokens(512)", 128, 64, 4096, 576, Dtype::bf16, true, false, 128, 512, true};
    const Golden lists{"", "runtime_tokens(512)", 32, 64, 4096, 128, Dtype::f16, true, true, 8};
    CHECK_EQ(imaginary::name(plan_of(latent).forward), "sm80_gather_forward_bf16_d576_v512_64x64");
    CHECK_EQ(imaginary::name(plan_of(lists).forward), "sm80_gather_forward_f16_d128_v128_64x64");
    CHECK_EQ(imaginary::name(plan_of(latent).backward), "sm80_gather_backward_bf16_d576_v512_64x64");
    CHECK_EQ(imaginary::name(plan_of(lists).backward), "sm80_gather_backward_f16_d128_v128_64x64");
    const Golden trained{"", "causal", 8, 4096, 4096, 128, Dtype::bf16, true};
    const Golden repeatable{"", "causal", 8, 4096, 4096, 128, Dtype::bf16, true, true};
    for (const int capability : {80, 86}) {
        imaginary_capability = capability;
        CHECK_EQ(imaginary::name(plan_of(trained).backward), "sm80_block_backward_added_bf16_d128_v128_64x64");
        CHECK_EQ(imaginary::name(plan_of(repeatable).backward), "sm80_block_backward_bf16_d128_v128_64x64");
    }
    imaginary_capability = 86;  // whose CTAs have less shared memory
    CHECK_EQ(imaginary::name(plan_of(latent).forward), "sm80_gather_forward_bf16_d576_v512_64x64");
    CHECK_EQ(imaginary::name(plan_of(latent).backward), "sm80_gather_backward_bf16_d576_v512_64x64");
    CHECK_EQ(imaginary::name(plan_of(lists).forward), "sm80_gather_forward_f16_d128_v128_64x64");
    CHECK_EQ(imaginary::name(plan_of(lists).backward), "sm80_gather_backward_f16_d128_v128_64x64");
    CHECK_EQ(imaginary::name(plan_of(wide).forward), "sm80_block_forward_bf16_d256_v256_64x64");
    CHECK_EQ(imaginary::name(plan_of(wide).backward), "sm80_block_backward_bf16_d256_v256_64x64");
    const Golden tf32{"", "full", 2, 512, 512, 128, Dtype::f32, true, false, 1, 0, false, true};
    CHECK_EQ(imaginary::name(plan_of(tf32).forward), "sm80_block_forward_tf32_d128_v128_64x64");
    CHECK_EQ(imaginary::name(plan_of(tf32).backward), "sm80_block_backward_tf32_d128_v128_64x64");
    const Golden wide_f32{"", "full", 2, 512, 512, 256, Dtype::f32, true};
    CHECK_EQ(imaginary::name(plan_of(wide_f32).forward), "sm80_block_forward_f32_d256_v256_64x64");
    CHECK_EQ(imaginary::name(plan_of(wide_f32).backward), "sm80_block_backward_f32_d256_v256_64x64");
    imaginary_capability = 75;  // still less, and other tensor cores
    CHECK_EQ(imaginary::name(plan_of(goldens[0]).forward), "any_block_forward_bf16_64x64");
    CHECK_EQ(imaginary::name(plan_of(wide).backward), "any_block_backward_bf16_64x64");
    CHECK_EQ(imaginary::name(plan_of(latent).forward), "any_gather_forward_bf16");
    CHECK_EQ(imaginary::name(plan_of(lists).backward), "any_gather_backward_f16");
    CHECK_EQ(imaginary::name(plan_of(tf32).forward), "any_block_forward_f32_64x64");
    const Golden f16{"", "full", 2, 512, 512, 128, Dtype::f16, true};
    CHECK_EQ(imaginary::name(plan_of(f16).forward), "sm80_block_forward_f16_d128_v128_64x64");
    CHECK_EQ(imaginary::name(plan_of(f16).backward), "sm80_block_backward_f16_d128_v128_64x64");
    imaginary_capability = 90;
    CHECK_EQ(imaginary::name(plan_of(goldens[0]).forward), "sm90_block_forward_bf16_d128_v128_128x128");
}

// Two CTAs share a tile where a group has the rows for it.
TEST(lists_of_many_heads_have_tiles_of_128_rows_backward) {
    const auto row = [](int64_t heads, Dtype dtype) {
        const Golden lists{"", "runtime_tokens(512)", heads, 4096, 4096, 576, dtype, true, false, heads, 512, true};
        return std::string(imaginary::name(plan_of(lists).backward));
    };
    CHECK_EQ(row(128, Dtype::bf16), "sm90_gather_backward_pair_bf16_d576_v512_128x64");
    CHECK_EQ(row(64, Dtype::bf16), "sm90_gather_backward_bf16_d576_v512_64x64");
    CHECK_EQ(row(160, Dtype::bf16), "sm90_gather_backward_bf16_d576_v512_64x64");
    CHECK_EQ(row(256, Dtype::bf16), "sm90_gather_backward_pair_bf16_d576_v512_128x64");
    CHECK_EQ(row(128, Dtype::f16), "sm90_gather_backward_f16_d576_v512_64x64");
}

TEST(parts_of_gradients_lie_where_four_columns_are_written_at_once) {
    TasksView by_key{}, by_query{};
    by_key.num_parts = 2;
    LayoutView layout{};
    layout.block_q = layout.block_k = 128;
    for (int64_t rows : {1, 2, 3, 4, 9047}) {
        const Problem p = imaginary::problem(rows, 64, 128);
        std::vector<float> memory(any::BackwardSpace<float>::bytes(p, layout, by_key, by_query) / sizeof(float));
        const auto space = any::BackwardSpace<float>::at(memory.data(), p, layout, by_key);
        CHECK_EQ(uintptr_t(space.parts_key) % 16, uintptr_t(0));
        CHECK_EQ(uintptr_t(space.parts_query) % 16, uintptr_t(0));
        CHECK(space.parts_key >= space.delta + any::BackwardSpace<float>::rows_q(p));
    }
}

// Then no row of the whole is left to compare listed tiles with.
TEST(pieces_may_beat_every_row_of_the_whole) {
    imaginary_capability = 90;
    const Golden g{"", "causal & (window(127,0) | strided(128))", 8, 16384, 16384, 128, Dtype::bf16, true};
    const PassPlan backward = plan_of(g).backward;
    CHECK_EQ(backward.pieces.size(), size_t(2));
    for (const Candidate& candidate : backward.whole) CHECK(!candidate.refused.empty());
}

TEST(heads_of_a_group_share_tiles_where_they_see_the_same) {
    imaginary_capability = 90;
    const auto chosen = [](const char* pattern, int64_t heads, int64_t group, int64_t seq_q) {
        const Golden g{"", pattern, heads, seq_q, 32768, 128, Dtype::bf16, false, false, group};
        return imaginary::name(plan_of(g).forward);
    };
    const std::string alone = "sm90_block_forward_bf16_d128_v128_128x128";
    const std::string small = "sm90_block_forward_bf16_d128_v128_64x64";
    CHECK_EQ(chosen("full", 64, 8, 1), small + "_heads8");
    CHECK_EQ(chosen("full", 12, 12, 5), small + "_heads4");
    CHECK_EQ(chosen("full", 64, 32, 7), small + "_heads16");
    CHECK_EQ(chosen("full", 5, 5, 1), "sm90_gather_forward_bf16_d128_v128_64x64");
    CHECK_EQ(chosen("per_head([0,0,1,1], window(900,0), full)", 4, 2, 1), small + "_heads2");
    CHECK_EQ(chosen("per_head([0,1,0,1], window(900,0), full)", 4, 2, 1), small);
    const Golden g{"", "full", 64, 40, 100000, 128, Dtype::bf16, false, false, 8};
    const CompiledPlan plan = plan_of(g);
    const Schedule& schedule = imaginary::whole(plan.forward).schedule;
    CHECK_EQ(schedule.tile_heads, 8);
    CHECK_EQ(schedule.joins.size(), size_t(8 * 3));
    for (const Task& task : schedule.tasks) CHECK_EQ(task.head % 8, 0);
}

// An H200 took 6.6 ms by listed tiles where blocks take 0.34: queries that stand in several of them have a plain walk.
TEST(clusters_of_scattered_keys_take_blocks) {
    imaginary_capability = 90;
    constexpr int tokens = 4096, cluster = 64;
    std::mt19937 random(5);
    std::bernoulli_distribution sees(0.03);
    std::string row_ptr = "0", col_idx;
    std::vector<bool> seen(tokens / cluster);
    for (int query = 0, count = 0; query < tokens; ++query) {
        if (query % cluster == 0)
            for (size_t i = 0; i < seen.size(); ++i) seen[i] = sees(random);
        for (int key = 0; key < tokens; ++key) {
            if (key != query && !(seen[size_t(key / cluster)] && sees(random))) continue;
            col_idx += (count++ ? "," : "") + std::to_string(key);
        }
        row_ptr += "," + std::to_string(count);
    }
    const std::string text = "csr([" + row_ptr + "],[" + col_idx + "]," + std::to_string(tokens) + ")";
    const CompiledPlan plan = plan_of({"", text.c_str(), 64, tokens, tokens, 64, Dtype::bf16, true});
    CHECK_EQ(imaginary::name(plan.backward), "sm90_block_backward_bf16_d64_v64_128x128");
    CHECK(imaginary::whole(plan.backward).order == Order::plain);
}

// Every second block of 16,384 tokens, at random.
std::string scattered_blocks() {
    constexpr int tokens = 16384, block = 128, blocks = tokens / block;
    std::mt19937 random(7);
    std::bernoulli_distribution sees(0.5);
    std::string row_ptr = "0", col_idx;
    int count = 0;
    for (int row = 0; row < blocks; ++row) {
        for (int column = 0; column < blocks; ++column)
            if (column == row || sees(random)) col_idx += (count++ ? "," : "") + std::to_string(column);
        row_ptr += "," + std::to_string(count);
    }
    return "bsr([" + row_ptr + "],[" + col_idx + "],128,128,16384,16384)";
}

// Sums in the order of keys where tasks go side by side; each gradient apart where lists have gaps, and of a single
// head, whose 128 tasks would begin one after the other.
TEST(deterministic_gradients_take_what_waits_least) {
    imaginary_capability = 90;
    const auto chosen = [](const std::string& pattern, int64_t heads) {
        const Golden g{"", pattern.c_str(), heads, 16384, 16384, 128, Dtype::bf16, true, true};
        return imaginary::name(plan_of(g).backward);
    };
    const std::string in_order = "sm90_block_backward_in_order_bf16_d128_v128_64x128",
                      apart = "sm90_block_backward_apart_bf16_d128_v128_128x128";
    for (const char* pattern : {"full", "causal", "causal & window(1023,0)", "causal & (sink(64) | window(1023,0))"}) {
        CHECK_EQ(chosen(pattern, 16), in_order);
        CHECK_EQ(chosen(pattern, 1), apart);
    }
    CHECK_EQ(chosen(scattered_blocks(), 16), apart);
}

// A head's tasks in the order of their rows, and keys that all see in parts not much longer than other rows.
TEST(sums_in_order_have_tasks_in_order) {
    imaginary_capability = 90;
    const Golden g{"", "causal & (sink(64) | window(1023,0))", 16, 16384, 16384, 128, Dtype::bf16, true, true};
    const CompiledPlan plan = plan_of(g);
    const Schedule& schedule = imaginary::whole(plan.backward).schedule;
    std::vector<int32_t> last(16);
    int32_t longest = 0;
    for (const Task& task : schedule.tasks) {
        CHECK(task.row >= last[size_t(task.head)]);
        last[size_t(task.head)] = task.row;
        longest = std::max(longest, task.take);
    }
    CHECK(longest <= 48);
    CHECK(schedule.joins.size() == 16);
}

// Where rows are few a backward splits them for all processors, if there is much to gain.
TEST(rows_of_few_heads_are_split_backward) {
    imaginary_capability = 90;
    const auto parts_of = [](const char* pattern, int64_t heads, int64_t tokens) {
        const Golden g{"", pattern, heads, tokens, tokens, 128, Dtype::bf16, true};
        return imaginary::whole(plan_of(g).backward).schedule.num_parts;
    };
    CHECK_EQ(parts_of("full", 1, 4096), 32 * 4);
    CHECK_EQ(parts_of("full", 8, 1024), 0);
    CHECK_EQ(parts_of("causal & (sink(64) | window(511,0))", 4, 4096), 4 * 5);
    CHECK_EQ(parts_of("full", 16, 16384), 0);
}

TEST(lists_are_split_where_tiles_are_few) {
    imaginary_capability = 90;
    const auto workspace_of = [](int64_t queries, const char* lists) {  // of 128 heads, two tiles a query
        const Golden g{"", lists, 128, queries, 65536, 576, Dtype::bf16, false, false, 128, 512, true};
        return imaginary::whole(plan_of(g).forward).workspace;
    };
    constexpr size_t tile_bytes = 64 * (512 + 2) * sizeof(float);
    constexpr size_t note_bytes = 16;
    // Two parts for each group of two processors, and a note of each list, or group, that may have a split one.
    CHECK_EQ(workspace_of(1, "runtime_tokens(2048)"), 2 * 16 * 2 * tile_bytes + note_bytes);  // of two blocks of keys each
    CHECK_EQ(workspace_of(16, "runtime_tokens(2048)"), 2 * 66 * 2 * tile_bytes + 16 * note_bytes);
    CHECK_EQ(workspace_of(200, "runtime_tokens(2048)"), 2 * 66 * 2 * tile_bytes + 66 * note_bytes);
    CHECK_EQ(workspace_of(1, "runtime_tokens(384)"), size_t(0));  // six blocks: no faster in parts
}

TEST(long_rows_are_split_among_the_processors) {
    imaginary_capability = 90;
    const CompiledPlan plan = plan_of(goldens[3]);
    CHECK_EQ(imaginary::whole(plan.forward).schedule.joins.size(), size_t(1));
    CHECK(imaginary::whole(plan.forward).schedule.num_parts > 100);
    const auto parts_of = [](int64_t queries) {  // of 8,192 keys, for all of the eight tiles that heads share
        const Golden g{"", "full", 64, queries, 8192, 128, Dtype::bf16, false, false, 8};
        return imaginary::whole(plan_of(g).forward).schedule.num_parts;
    };
    CHECK_EQ(parts_of(1), 8 * 16);   // no processor has more than one
    CHECK_EQ(parts_of(16), 8 * 16);
    CHECK_EQ(parts_of(48), 3 * 8 * 5);
}

// Decoding reads each key once: its tiles are widened one by one. Each key of a prompt's sequence is seen by many tiles
// of queries, so elements are copied first, as far as a copy has room.
TEST(prompts_have_copies_of_a_float8_cache) {
    imaginary_capability = 90;
    const auto plan_for = [](int64_t batch, int64_t queries, int64_t capacity, int64_t head_dim) {
        Problem p = imaginary::problem(queries, capacity, head_dim);
        p.batch = batch, p.heads_q = 64, p.heads_kv = 8, p.dtype = Dtype::bf16;
        p.has_starts = p.float8_cache = true, p.page_size = 64;
        PlanOptions options;
        options.device = SPATTN_CUDA;
        options.machine = {"imaginary GPU", 132, 1.7, 4000, 1.4e11};
        return compile_plan(*parse_pattern("causal"), p, options, rows());
    };
    const auto is_widened = [](const CompiledPlan& plan) {
        return imaginary::whole(plan.forward).cache->keys == CacheKeys::widened;
    };
    const CompiledPlan decoding = plan_for(32, 1, 32768, 128), prompt = plan_for(1, 2048, 32768, 128);
    CHECK_EQ(imaginary::name(decoding.forward), "sm90_block_forward_bf16_d128_v128_64x64_heads8");
    CHECK(!is_widened(decoding));
    CHECK_EQ(imaginary::name(prompt.forward), "sm90_block_forward_bf16_d128_v128_128x128");
    CHECK(is_widened(prompt));
    const int64_t copy = 32768 * int64_t(8 * 2 * 128 * 2);
    CHECK(int64_t(imaginary::whole(prompt.forward).workspace) >= copy);
    CHECK(!is_widened(plan_for(9, 2048, 32768, 128)));  // 1.1 GiB
    CHECK(is_widened(plan_for(1, 2048, 32768, 256)));  // whose tiles are too wide to be widened
    CHECK(explain(prompt).find("copied as elements first") != std::string::npos);
    imaginary_capability = 80;
    CHECK(is_widened(plan_for(1, 2048, 32768, 128)));
    CHECK(!is_widened(plan_for(32, 1, 32768, 128)));
}

// Blocks of consecutive tokens multiply bytes, where an arch can. What other orders serve better has copies, and so has
// what few queries ask.
TEST(operands_of_float8_are_multiplied_or_copied) {
    imaginary_capability = 90;
    const auto plan_for = [](const char* pattern, int64_t queries, int64_t head_dim) {
        Problem p = imaginary::problem(queries, 16384, head_dim);
        p.heads_q = 16, p.heads_kv = 2, p.dtype = Dtype::bf16, p.float8_operands = true;
        PlanOptions options;
        options.device = SPATTN_CUDA;
        options.machine = {"imaginary GPU", 132, 1.7, 4000, 1.4e11};
        return compile_plan(*parse_pattern(pattern), p, options, rows());
    };
    const auto name_for = [&](const char* pattern, int64_t queries, int64_t head_dim) {
        return imaginary::name(plan_for(pattern, queries, head_dim).forward);
    };
    const std::string of_128 = "sm90_block_forward_float8_bf16_d128_v128_128x128";
    CHECK_EQ(name_for("causal", 16384, 128), of_128);
    CHECK_EQ(name_for("causal & window(1023,0)", 16384, 128), of_128);
    CHECK_EQ(name_for("full", 16384, 256), "sm90_block_forward_float8_bf16_d256_v256_128x64");
    CHECK_EQ(name_for("causal", 16384, 64).find("float8"), std::string::npos);
    CHECK_EQ(name_for("causal & dilated(1008,0,16)", 16384, 128).find("float8"), std::string::npos);
    CHECK_EQ(name_for("full", 1, 128).find("float8"), std::string::npos);
    const CompiledPlan plan = plan_for("causal", 16384, 128);
    CHECK(plan.forward.workspace >= Float8Copies::most_bytes(plan.problem, Pass::forward));
    CHECK(explain(plan).find("  copies    v as bf16, once a call\n") != std::string::npos);
    CHECK(explain(plan_for("full", 1, 128)).find("  copies    q, k and v as bf16, once a call\n") != std::string::npos);
    imaginary_capability = 80;
    CHECK_EQ(name_for("causal", 16384, 128).find("float8"), std::string::npos);
}

// What no row of blocks has tiles for, or whose groups theirs do not divide, is listed by each call; what they serve well
// stays with them.
TEST(calls_on_a_cache_list_what_blocks_serve_badly) {
    imaginary_capability = 90;
    const auto plan_for = [](const char* pattern, int64_t heads_q, int64_t heads_kv, int64_t head_dim, int64_t queries) {
        Problem p = imaginary::problem(queries, 32768, head_dim);
        p.batch = 32, p.heads_q = heads_q, p.heads_kv = heads_kv, p.dtype = Dtype::bf16, p.q_offset = 0;
        p.value_in_key = head_dim == 576, p.head_dim_v = p.value_in_key ? 512 : head_dim;
        p.has_starts = true, p.page_size = 64;
        PlanOptions options;
        options.device = SPATTN_CUDA;
        options.machine = {"imaginary GPU", 132, 1.7, 4000, 1.4e11};
        const PatternRef cut = make_intersection({make_causal(), parse_pattern(pattern)});
        return compile_plan(*cut, p, options, rows());
    };
    const auto name_for = [&](const char* pattern, int64_t heads_q, int64_t heads_kv, int64_t head_dim, int64_t queries) {
        return imaginary::name(plan_for(pattern, heads_q, heads_kv, head_dim, queries).forward);
    };
    const char* const window = "sink(4) | window(1023,0)";
    CHECK_EQ(name_for("full", 128, 1, 576, 1), "sm90_gather_forward_bf16_d576_v512_64x64");
    CHECK_EQ(name_for(window, 16, 1, 576, 2), "sm90_gather_forward_bf16_d576_v512_64x64");
    for (const int64_t heads : {24, 40, 56}) CHECK_EQ(name_for("full", heads, 8, 128, 1), "sm90_gather_forward_bf16_d128_v128_64x64");
    CHECK_EQ(name_for("full", 28, 4, 128, 1), "sm90_gather_forward_bf16_d128_v128_64x64");
    CHECK_EQ(name_for("dilated(4096,0,16)", 64, 8, 128, 1), "sm90_gather_forward_bf16_d128_v128_64x64");
    CHECK_EQ(name_for("full", 64, 8, 128, 1), "sm90_block_forward_bf16_d128_v128_64x64_heads8");
    CHECK_EQ(name_for(window, 64, 8, 128, 1), "sm90_block_forward_bf16_d128_v128_64x64_heads8");
    CHECK_EQ(name_for("full", 32, 32, 128, 1), "sm90_block_forward_bf16_d128_v128_64x64");

    // A list has as many places as the longest row keeps keys, of blocks of 64 or not; heads that see the same share it.
    const CompiledPlan plan = plan_for(window, 28, 4, 128, 1);
    const PiecePlan& piece = plan.forward.pieces[0];
    CHECK_EQ(piece.cache_lists->most, 1028);
    CHECK_EQ(piece.cache_lists->heads, 1);
    CHECK(plan.forward.workspace >= size_t(piece.cache_lists->bytes()));
    CHECK(explain(plan).find("made of the pattern in each call, up to 1,028 keys") != std::string::npos);
    // A prompt's queries are listed some at a time.
    CHECK(explain(plan_for("full", 16, 1, 576, 512)).find("in rounds of 64 queries") != std::string::npos);
    imaginary_capability = 80;
    CHECK_EQ(name_for("full", 128, 1, 576, 1), "sm80_gather_forward_bf16_d576_v512_64x64");
    imaginary_capability = 90;
}

// Listed rows are widened where they are gathered, on each arch that has tensor cores for them.
TEST(lists_on_float8_caches_are_gathered_by_tensor_cores) {
    const auto name_for = [](int capability, int64_t head_dim, int64_t head_dim_v) {
        imaginary_capability = capability;
        Problem p = imaginary::problem(1, 32768, head_dim);
        p.batch = 32, p.heads_q = 64, p.heads_kv = 1, p.dtype = Dtype::bf16, p.head_dim_v = head_dim_v;
        p.value_in_key = head_dim_v != head_dim;
        p.has_starts = p.float8_cache = true, p.page_size = 64;
        p.call_lists = {1, 1, 2048};
        PlanOptions options;
        options.device = SPATTN_CUDA;
        options.machine = {"imaginary GPU", 132, 1.7, 4000, 1.4e11};
        return imaginary::name(compile_plan(*parse_pattern("causal & runtime_tokens(2048)"), p, options, rows()).forward);
    };
    CHECK_EQ(name_for(90, 576, 512), "sm90_gather_forward_bf16_d576_v512_64x64");
    CHECK_EQ(name_for(90, 128, 128), "sm90_gather_forward_bf16_d128_v128_64x64");
    CHECK_EQ(name_for(90, 120, 120), "sm80_gather_forward_bf16_d128_v128_64x64");  // rows of 16 bytes
    CHECK_EQ(name_for(80, 576, 512), "sm80_gather_forward_bf16_d576_v512_64x64");
}

}  // namespace spattn
