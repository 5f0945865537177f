// SPDX-License-Identifier: MIT
// per_head and per_batch: one of several patterns, chosen by where in the batch a plane lies.
#pragma once

#include "pattern/composite.h"

namespace spattn {

class Choice : public Composite {
public:
    // name: "per_head"; map_argument: how the C ABI calls the map.
    Choice(const char* name, const char* map_argument, Patterns parts, std::vector<int32_t> map);

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override;
    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override;
    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override;
    int64_t stem_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override;
    void selection(const Plane& plane, Key& key) const override;
    PatternRef transposed() const override { return with(transposed_parts()); }
    int64_t modulus() const override { return modulus_of_parts(); }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override;
    Patterns pieces() const override;
    std::string print() const override;
    std::string identity() const override;
    void save(ByteWriter& out) const override;

protected:
    virtual Node node() const = 0;
    virtual int64_t index(const Plane& plane) const = 0;  // into the map
    virtual PatternRef with(Patterns parts) const = 0;    // the same choice among others
    const std::vector<int32_t>& map() const { return map_; }

    // The extent must have as many heads, or batch entries, as the map.
    void check_count(int64_t count, const char* what) const;

private:
    int32_t chosen(const Plane& plane) const { return same_[map_[index(plane)]]; }

    const char* name_;
    std::vector<int32_t> map_;
    std::vector<int32_t> same_;  // for each part the first equal one: planes that see the same share their lists
};

}  // namespace spattn
