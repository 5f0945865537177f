// SPDX-License-Identifier: MIT
// Where the arrays lie that kernels read and never change: in the plan itself, or copied into one block of the device's
// memory.
#pragma once

#include <vector>

#include "core/memory.h"
#include "layout/arrays.h"
#include "plan/plan.h"

namespace spattn {

// The lists, masks and tasks of one piece of a pass.
struct PlacedPiece {
    LayoutView layout{};
    TasksView tasks{}, second_tasks{};
    std::vector<TasksView> portion_tasks;  // of PortionTasks::schedules
    TokenListsView tokens{};
    const uint16_t* bit_places = nullptr;
    CacheArrays cache;
};
using PlacedPass = std::vector<PlacedPiece>;

// Views of a piece whose pointers `visit` sets, see layout/arrays.h: the only way from a piece to its views.
template <class Visit>
PlacedPiece place_piece(const PiecePlan& piece, Visit&& visit) {
    PlacedPiece placed;
    placed.tasks = shape_of(piece.schedule);
    placed.second_tasks = shape_of(piece.second_schedule);
    each_array(piece.schedule, placed.tasks, visit);
    each_array(piece.second_schedule, placed.second_tasks, visit);
    for (const Schedule& schedule : piece.portions.schedules)
        each_array(schedule, placed.portion_tasks.emplace_back(shape_of(schedule)), visit);
    if (piece.layout) {
        placed.layout = shape_of(*piece.layout);
        if (piece.has_kernel_masks()) placed.layout.mask_words = piece.kernel->mask_words;
        each_array(*piece.layout, *piece.masks, placed.layout, visit);
    }
    if (piece.tokens) {
        placed.tokens = shape_of(*piece.tokens);
        each_array(*piece.tokens, placed.tokens, visit);
    }
    visit(piece.bit_places, placed.bit_places);
    if (piece.layout && (piece.cache || piece.cache_lists)) visit(piece.layout->by_query.stems, placed.cache.stems);
    if (piece.cache) {
        visit(piece.cache->row_blocks, placed.cache.row_blocks);
        visit(piece.cache->join_of_part, placed.cache.join_of_part);
        visit(piece.cache->bit_places, placed.cache.bit_places);
    }
    return placed;
}

// A pass as it lies in host memory.
PlacedPass view(const PassPlan& pass);

struct PlacedPlan {
    Memory::Block block;
    PlacedPass forward, backward;
};

// Places a plan, which must outlive the result, see plan/stage.h.
PlacedPlan place_plan(const CompiledPlan& plan, const Ref<const Memory>& memory, void* stream);

}  // namespace spattn
