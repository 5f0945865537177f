// SPDX-License-Identifier: MIT
// Memory of a context's device: the caller's allocator or the backend's.
#pragma once

#include <cstddef>
#include <utility>

#include "core/ref.h"
#include "sparseattn/sparseattn.h"

namespace spattn {

class Memory : public RefCounted {
public:
    // Owned bytes of a Memory, which it keeps alive. Released on the stream it was taken on.
    class Block {
    public:
        Block() = default;
        Block(Ref<const Memory> memory, size_t bytes, void* stream)
            : memory_(std::move(memory)), bytes_(bytes), stream_(stream), start_(memory_->allocate(bytes, stream)) {}
        Block(Block&& other) noexcept
            : memory_(std::move(other.memory_)), bytes_(other.bytes_), stream_(other.stream_),
              start_(std::exchange(other.start_, nullptr)) {}
        Block& operator=(Block other) noexcept {
            std::swap(memory_, other.memory_);
            std::swap(bytes_, other.bytes_);
            std::swap(stream_, other.stream_);
            std::swap(start_, other.start_);
            return *this;
        }
        ~Block() {
            if (start_) memory_->free(start_, bytes_, stream_);
        }
        char* start() const { return static_cast<char*>(start_); }
        size_t bytes() const { return bytes_; }

    private:
        Ref<const Memory> memory_;
        size_t bytes_ = 0;
        void* stream_ = nullptr;
        void* start_ = nullptr;
    };

    virtual bool is_heap() const = 0;  // the host's own: what lies there already need not be copied
    // Copies from host memory; `from` may be reused on return.
    virtual void copy_in(void* to, const void* from, size_t bytes, void* stream) const = 0;
    // Writes zeros in the stream's order, also where it captures.
    virtual void clear(void* memory, size_t bytes, void* stream) const = 0;

protected:
    // Aligned to 256 bytes. Fails with a typed error, never returns null.
    virtual void* allocate(size_t bytes, void* stream) const = 0;
    virtual void free(void* memory, size_t bytes, void* stream) const = 0;
};

}  // namespace spattn
