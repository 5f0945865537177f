// SPDX-License-Identifier: MIT
// full: every key.
#include "pattern/leaf.h"

namespace spattn {
namespace {

class Full : public Leaf {
public:
    Full() : Leaf("full") {}
    void keys(const Plane&, int64_t, Interval clip, Intervals& out) const override {
        if (clip.begin < clip.end) out.push_back(clip);
    }
    Coverage classify(const Plane&, const Block&, Key&, bool&) const override { return {Coverage::full, forever}; }
    bool row_key(const Plane&, int64_t, int64_t, Key&) const override { return true; }
    PatternRef transposed() const override { return PatternRef::share(this); }
    PatternRef in_residue(int64_t, int64_t) const override { return PatternRef::share(this); }
};

}  // namespace

PatternRef make_full() { return make_ref<Full>(); }

}  // namespace spattn
