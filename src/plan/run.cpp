// SPDX-License-Identifier: MIT
#include "plan/run.h"

namespace spattn {
namespace {

template <class Args, class Run>
void run_pieces(const PassPlan& pass, const PlacedPass& placed, Args& args, Run run) {
    char* const workspace = static_cast<char*>(args.workspace);
    args.workspace = workspace ? workspace + pass.carried : nullptr;
    const size_t pieces = pass.pieces.size();
    const int32_t sweeps = pieces > 1 ? pass.pieces[0].kernel->sweeps : 1;
    for (int32_t sweep = 0; sweep < sweeps; ++sweep)
        for (size_t i = 0; i < pieces; ++i) {
            args.layout = placed[i].layout;
            args.tasks = placed[i].tasks;
            args.second_tasks = placed[i].second_tasks;
            args.tokens = placed[i].tokens;
            args.piece = {workspace, i == 0, i + 1 == pieces, sweep};
            run(*pass.pieces[i].kernel, args);
        }
}

}  // namespace

void run_pass(const PassPlan& pass, const PlacedPass& placed, ForwardArgs args) {
    run_pieces(pass, placed, args, [](const Kernel& kernel, const ForwardArgs& piece) { kernel.forward(piece); });
}

void run_pass(const PassPlan& pass, const PlacedPass& placed, BackwardArgs args) {
    run_pieces(pass, placed, args, [](const Kernel& kernel, const BackwardArgs& piece) { kernel.backward(piece); });
}

}  // namespace spattn
