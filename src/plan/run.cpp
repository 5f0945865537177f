// SPDX-License-Identifier: MIT
#include "plan/run.h"

namespace spattn {
namespace {

// The call as a row sees it that reads layouts: with what the call's lists leave of the plan's, and with the workspace
// behind that.
template <class Args>
Args lay_out_lists(const Backend& backend, Args args, const Kernel& kernel) {
    const CallLayout made(*args.problem, args.layout, args.tasks, args.second_tasks, kernel.pass, args.workspace);
    backend.make_call_layout(args, made);
    args.layout = made.layout();
    args.tasks = made.tasks_of(0), args.second_tasks = made.tasks_of(1);
    args.workspace = static_cast<char*>(args.workspace) + made.bytes;
    return args;
}

template <class Args, class Run>
void run_pieces(const Backend& backend, const PassPlan& pass, const PlacedPass& placed, Args& args, Run run) {
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
            const Kernel& kernel = *pass.pieces[i].kernel;
            run(kernel, has_call_layout(kernel, *args.problem) ? lay_out_lists(backend, args, kernel) : args);
        }
}

}  // namespace

void run_pass(const Backend& backend, const PassPlan& pass, const PlacedPass& placed, ForwardArgs args) {
    run_pieces(backend, pass, placed, args,
               [](const Kernel& kernel, const ForwardArgs& piece) { kernel.forward(piece); });
}

void run_pass(const Backend& backend, const PassPlan& pass, const PlacedPass& placed, BackwardArgs args) {
    run_pieces(backend, pass, placed, args,
               [](const Kernel& kernel, const BackwardArgs& piece) { kernel.backward(piece); });
}

}  // namespace spattn
