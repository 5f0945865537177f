// SPDX-License-Identifier: MIT
#include "plan/image.h"

#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "core/math.h"

namespace spattn {
namespace {

constexpr int64_t alignment = 256;

// Collects host arrays into one staged block. Pointers are handed out only once the block is placed, so place() runs
// twice: to count, then to write.
class Stage {
public:
    // The device address of a copy of values[0, count); arrays given before are found again.
    template <class T>
    const T* place(const T* values, size_t count) {
        if (!count) return nullptr;
        const auto [at, is_first] = copies_.try_emplace({values, count * sizeof(T)}, Copy{bytes_});
        Copy& copy = at->second;
        if (is_first) bytes_ += size_t(round_up(int64_t(count * sizeof(T)), alignment));
        if (!base_) return nullptr;
        if (!std::exchange(copy.is_written, true)) std::memcpy(staged_.data() + copy.offset, values, count * sizeof(T));
        return reinterpret_cast<const T*>(base_ + copy.offset);
    }

    // After this, place() writes and returns addresses that start at base.
    void fix(char* base) {
        base_ = base;
        staged_.assign(bytes_, 0);
    }
    size_t bytes() const { return bytes_; }
    const char* staged() const { return staged_.data(); }

private:
    struct Copy {
        size_t offset;
        bool is_written = false;
    };
    std::map<std::pair<const void*, size_t>, Copy> copies_;
    std::vector<char> staged_;
    size_t bytes_ = 0;
    char* base_ = nullptr;
};

ListsView place(Stage& stage, ListsView lists, const Lists& from) {
    lists.slices = stage.place(from.slices.data(), from.slices.size());
    lists.runs = stage.place(from.runs.data(), from.runs.size());
    return lists;
}

AxisView place(Stage& stage, AxisView axis, const Axis& from) {
    axis.tokens = stage.place(from.tokens.data(), from.tokens.size());
    axis.away = stage.place(from.away.data(), from.away.size());
    return axis;
}

LiveView place(Stage& stage, LiveView live, const Live& from) {
    live.set_of = stage.place(from.set_of.data(), from.set_of.size());
    live.sets = stage.place(from.sets.data(), from.sets.size());
    return live;
}

TasksView place(Stage& stage, TasksView tasks, const Schedule& from) {
    tasks.tasks = stage.place(from.tasks.data(), from.tasks.size());
    tasks.begin = stage.place(from.begin.data(), from.begin.size());
    tasks.joins = stage.place(from.joins.data(), from.joins.size());
    return tasks;
}

PieceImage place(Stage& stage, const PiecePlan& piece) {
    PieceImage image = view(piece);
    image.tasks = place(stage, image.tasks, piece.schedule);
    image.second_tasks = place(stage, image.second_tasks, piece.second_schedule);
    if (piece.tokens) {
        image.tokens.begin = stage.place(piece.tokens->begin.data(), piece.tokens->begin.size());
        image.tokens.keys = stage.place(piece.tokens->keys.data(), piece.tokens->keys.size());
        image.tokens.class_of = stage.place(piece.tokens->class_of.data(), piece.tokens->class_of.size());
    }
    if (!piece.layout) return image;  // reference rows read no layout
    const Layout& layout = *piece.layout;
    image.layout.queries = place(stage, image.layout.queries, layout.queries);
    image.layout.keys = place(stage, image.layout.keys, layout.keys);
    image.layout.by_query = place(stage, image.layout.by_query, layout.by_query);
    image.layout.by_key = place(stage, image.layout.by_key, layout.by_key);
    image.layout.live_queries = place(stage, image.layout.live_queries, layout.live_queries);
    image.layout.live_keys = place(stage, image.layout.live_keys, layout.live_keys);
    image.layout.class_of = stage.place(layout.class_of.data(), layout.class_of.size());
    image.layout.masks =
        stage.place(image.layout.masks, size_t(image.layout.num_masks) * size_t(image.layout.mask_words));
    return image;
}

PassImage place(Stage& stage, const PassPlan& pass) {
    PassImage image;
    for (const PiecePlan& piece : pass.pieces) image.push_back(place(stage, piece));
    return image;
}

PassImage view(const PassPlan& pass) {
    PassImage image;
    for (const PiecePlan& piece : pass.pieces) image.push_back(view(piece));
    return image;
}

}  // namespace

PieceImage view(const PiecePlan& piece) {
    return {piece.layout_view(), view(piece.schedule), view(piece.second_schedule), piece.tokens_view()};
}

PlanImage make_image(const CompiledPlan& plan, const Ref<const Memory>& memory, void* stream) {
    if (memory->is_heap()) return {{}, view(plan.forward), view(plan.backward)};
    Stage stage;
    PlanImage image;
    const auto place_passes = [&] {
        image.forward = place(stage, plan.forward);
        image.backward = place(stage, plan.backward);
    };
    place_passes();
    if (stage.bytes()) {
        image.block = Memory::Block(memory, stage.bytes(), stream);
        stage.fix(image.block.start());
        place_passes();
        memory->copy_in(image.block.start(), stage.staged(), stage.bytes(), stream);
    }
    return image;
}

}  // namespace spattn
