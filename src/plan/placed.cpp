// SPDX-License-Identifier: MIT
#include "plan/placed.h"

#include <cstring>
#include <map>
#include <utility>

#include "core/math.h"

namespace spattn {
namespace {

constexpr int64_t alignment = 256;

// A visitor that collects host arrays into one staged block. Pointers are handed out only once the block is placed, so
// a plan is visited twice: to count, then to write.
class Stage {
public:
    // Points at the device's copy of `values`; arrays that were given before are found again.
    template <class T>
    void operator()(const std::vector<T>& values, const T*& pointer) {
        pointer = nullptr;
        const size_t bytes = values.size() * sizeof(T);
        if (!bytes) return;
        const auto [at, is_first] = copies_.try_emplace(values.data(), Copy{bytes_});
        Copy& copy = at->second;
        if (is_first) bytes_ += size_t(round_up(int64_t(bytes), alignment));
        if (!base_) return;
        if (!std::exchange(copy.is_written, true)) std::memcpy(staged_.data() + copy.offset, values.data(), bytes);
        pointer = reinterpret_cast<const T*>(base_ + copy.offset);
    }

    // From now on visits write, and hand out addresses that start at `base`.
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
    std::map<const void*, Copy> copies_;
    std::vector<char> staged_;
    size_t bytes_ = 0;
    char* base_ = nullptr;
};

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
    if (memory->is_heap()) return {{}, view(plan.forward), view(plan.backward)};
    Stage stage;
    PlacedPlan placed;
    const auto place_passes = [&] {
        placed.forward = place_pass(plan.forward, stage);
        placed.backward = place_pass(plan.backward, stage);
    };
    place_passes();
    if (stage.bytes()) {
        placed.block = Memory::Block(memory, stage.bytes(), stream);
        stage.fix(placed.block.start());
        place_passes();
        memory->copy_in(placed.block.start(), stage.staged(), stage.bytes(), stream);
    }
    return placed;
}

}  // namespace spattn
