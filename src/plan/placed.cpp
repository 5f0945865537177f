// SPDX-License-Identifier: MIT
#include "plan/placed.h"

#include "plan/stage.h"

namespace spattn {
namespace {

template <class Visit>
PlacedPass place_pass(const PassPlan& pass, Visit&& visit) {
    PlacedPass placed;
    placed.reserve(pass.pieces.size());
    for (const PiecePlan& piece : pass.pieces) placed.push_back(place_piece(piece, visit));
    return placed;
}

}  // namespace

PlacedPass view(const PassPlan& pass) { return place_pass(pass, PointAtHost()); }

PlacedPlan place_plan(const CompiledPlan& plan, const Ref<const Memory>& memory, void* stream) {
    PlacedPlan placed;
    placed.block = place_arrays(memory, stream, [&](auto& visit) {
        placed.forward = place_pass(plan.forward, visit);
        placed.backward = place_pass(plan.backward, visit);
    });
    return placed;
}

}  // namespace spattn
