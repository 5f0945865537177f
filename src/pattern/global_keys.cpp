// SPDX-License-Identifier: MIT
// global_keys(positions): k in positions, whatever p.
#include "pattern/hot.h"
#include "pattern/leaf.h"
#include "pattern/positions.h"

namespace spattn {
namespace {

class GlobalKeys : public ListLeaf {
public:
    explicit GlobalKeys(const std::vector<int64_t>& given) : ListLeaf("global_keys", given), positions_(given) {}

    void keys(const Plane&, int64_t, Interval clip, Intervals& out) const override { positions_.keys(clip, out); }

    Coverage classify(const Plane&, const Block& block, Key& key, bool&) const override {
        return positions_.classify(block.key, block.keys, key);
    }

    bool row_key(const Plane&, int64_t, int64_t, Key&) const override { return true; }
    PatternRef transposed() const override { return make_query_side(PatternRef::share(this)); }
    std::optional<HotTokens> hot(const Extent& extent) const override { return hot_keys(*this, extent); }
    int64_t modulus() const override { return positions_.sorted().empty() ? 0 : 1; }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override {
        return make_global_keys(positions_.in_residue(modulus, residue));
    }

protected:
    std::vector<int64_t> canonical() const override { return positions_.sorted(); }

private:
    Positions positions_;
};

}  // namespace

PatternRef make_global_keys(std::vector<int64_t> positions) { return make_ref<GlobalKeys>(positions); }

}  // namespace spattn
