// SPDX-License-Identifier: MIT
// Arrays that kernels read, in one block of the device's memory.
#pragma once

#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "core/math.h"
#include "core/memory.h"
#include "layout/arrays.h"

namespace spattn {

// A visitor that collects host arrays into one staged block. Pointers are handed out only once the block is placed, so
// arrays are visited twice: to count, then to write.
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
    static constexpr int64_t alignment = 256;
    struct Copy {
        size_t offset;
        bool is_written = false;
    };
    std::map<const void*, Copy> copies_;
    std::vector<char> staged_;
    size_t bytes_ = 0;
    char* base_ = nullptr;
};

// place(visit) visits arrays, which must outlive the result. Where the memory is the heap pointers are those of the
// arrays themselves. Elsewhere one transfer on `stream` copies all of them, and one that is visited twice but once.
template <class Place>
Memory::Block place_arrays(const Ref<const Memory>& memory, void* stream, Place place) {
    if (memory->is_heap()) {
        PointAtHost visit;
        place(visit);
        return {};
    }
    Stage stage;
    place(stage);
    if (!stage.bytes()) return {};
    Memory::Block block(memory, stage.bytes(), stream);
    stage.fix(block.start());
    place(stage);
    memory->copy_in(block.start(), stage.staged(), stage.bytes(), stream);
    return block;
}

}  // namespace spattn
