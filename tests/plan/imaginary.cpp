// SPDX-License-Identifier: MIT
#include "plan/imaginary.h"

namespace spattn::imaginary {

size_t carries(const Problem& p) { return size_t(p.batch * p.heads_q * p.seq_q * p.head_dim_v) * 4; }

namespace {

// A tile costs its products and a fixed time, a gathered token a little; small tiles reach less of the peak. Peak: 32
// FLOP a cycle and lane.
template <int efficiency_percent, Pass pass>
Cost cost(const Problem& p, const LayoutStats& s, const Machine& m) {
    const double peak = 32 * m.clock * m.lanes * 1e3;  // FLOP a us
    const double compute = flops(p, s.visited, pass) / peak * 100 / efficiency_percent;
    const double overhead = (0.02 * s.blocks + 0.02 * s.masked + 0.001 * s.gathered + 0.5 * double(s.rows)) / m.lanes;
    const double memory = operand_bytes(p, pass) / (m.bandwidth * 1e3);
    if (memory > compute + overhead) return {memory, "memory"};
    return {compute + overhead, compute > overhead ? "compute" : "overhead"};
}

bool here(int32_t) { return true; }
bool elsewhere(int32_t) { return false; }
const char* fits(const Problem&) { return nullptr; }
const char* fits_blocks(const Problem& p) {
    return p.call_lists.at_run_time() ? "reads blocks, and each call brings its lists" : nullptr;
}
const char* fits_plain_scores(const Problem& p) {
    if (p.softcap != 0) return "no softcap";
    if (p.has_sink_logits) return "no sink logits";
    return fits_blocks(p);
}
const char* fits_up_to_256(const Problem& p) {
    if (const char* why_not = fits_plain_scores(p)) return why_not;
    return p.head_dim > 256 || p.head_dim_v > 256 ? "head_dim or head_dim_v above 256" : nullptr;
}
size_t workspace(const Sizing& s) {
    return size_t(s.lanes) * 4096 + size_t(s.tasks.num_parts) * size_t(s.problem.head_dim_v) * 4;
}
void run_forward(const ForwardArgs&) {}
void run_backward(const BackwardArgs&) {}

// Bits as [key][query].
void by_key_order(const uint64_t* bits, int block_q, int block_k, uint64_t* out) {
    for (int w = 0; w < (block_q * block_k + 63) / 64; ++w) out[w] = 0;
    for (int r = 0; r < block_q; ++r)
        for (int k = 0; k < block_k; ++k) {
            const int from = r * block_k + k, to = k * block_q + r;
            out[to / 64] |= (bits[from / 64] >> (from % 64) & 1) << (to % 64);
        }
}

template <Pass pass>
auto cost_of(int block) {
    return block >= 64 ? cost<90, pass> : block ? cost<40, pass> : cost<1, pass>;
}

}  // namespace

Kernel forward_row(const char* name, int block, Dtype dtype) {
    Kernel k{};
    k.name = name;
    k.device = SPATTN_CPU;
    k.pass = Pass::forward;
    k.dtype = dtype;
    k.block_q = k.block_k = block;
    k.mask_words = (block * block + 63) / 64;
    k.permute = block ? by_key_order : nullptr;
    k.runs_here = here;
    k.fits = !block ? fits : block == 16 ? fits_blocks : fits_plain_scores;
    k.cost = cost_of<Pass::forward>(block);
    k.workspace = workspace;
    k.orders = block > 0;
    k.forward = run_forward;
    k.family = block ? Family::block : Family::reference;
    k.walks[0] = {Owner::queries, {}};
    k.num_walks = block > 0;
    k.carries = block ? carries : nullptr;
    return k;
}

Kernel backward_row(const char* name, int block, Dtype dtype) {
    Kernel k = forward_row(name, block, dtype);
    k.pass = Pass::backward;
    k.cost = cost_of<Pass::backward>(block);
    k.permute = nullptr;
    k.walks[0] = {Owner::keys, {.equal_shares = true, .workers = 32}};
    k.forward = nullptr;
    k.backward = run_backward;
    return k;
}

std::vector<Kernel> kernels() {
    std::vector<Kernel> all;
    Kernel unreachable = forward_row("far_block_forward_f32_128x128", 128);
    unreachable.runs_here = elsewhere;
    Kernel on_gpu = forward_row("gpu_block_forward_f32_128x128", 128);
    on_gpu.device = SPATTN_CUDA;
    on_gpu.orders = false;
    on_gpu.carries = nullptr;
    Kernel large = forward_row("near_block_forward_f32_64x64", 64);
    large.fits = fits_up_to_256;
    all = {on_gpu,
           unreachable,
           large,
           forward_row("near_block_forward_f32_16x16", 16),
           backward_row("near_block_backward_f32_64x64", 64),
           backward_row("near_block_backward_f32_16x16", 16),
           forward_row("near_block_forward_bf16_64x64", 64, Dtype::bf16),
           backward_row("near_block_backward_bf16_64x64", 64, Dtype::bf16),
           forward_row("reference_forward_f32", 0),
           backward_row("reference_backward_f32", 0)};
    return all;
}

Problem problem(int64_t seq_q, int64_t seq_k, int64_t head_dim) {
    Problem p{};
    p.batch = p.heads_q = p.heads_kv = 1;
    p.seq_q = seq_q;
    p.seq_k = seq_k;
    p.head_dim = p.head_dim_v = head_dim;
    p.dtype = Dtype::f32;
    p.scale = 0.125;
    p.q_offset = seq_k - seq_q;
    return p;
}

}  // namespace spattn::imaginary
