// SPDX-License-Identifier: MIT
#include "plan/bit_places.h"

namespace spattn {

// A mask for each bit of a bit's number, and its complement: where a row's order has that bit of a mask, exactly one of
// both sets it. What is set in both says something of several bits, and all of them may be kept.
std::vector<uint16_t> make_bit_places(const Kernel& kernel) {
    const int block_q = kernel.block_q, block_k = kernel.block_k;
    const size_t size = size_t(block_q) * size_t(block_k), words = size / 64;
    const auto permute = [&](auto keeps) {
        std::vector<uint64_t> bits(words), out(size_t(kernel.mask_words));
        for (size_t bit = 0; bit < size; ++bit)
            if (keeps(bit)) bits[bit / 64] |= uint64_t(1) << bit % 64;
        if (kernel.permute) kernel.permute(bits.data(), block_q, block_k, out.data());
        else out = bits;
        return out;
    };
    const auto is_set = [](const std::vector<uint64_t>& bits, size_t at) { return bits[at / 64] >> (at % 64) & 1; };
    const std::vector<uint64_t> used = permute([](size_t) { return true; });
    std::vector<uint16_t> places(size_t(kernel.mask_words) * 64, bit_of_none);
    for (size_t at = 0; at < places.size(); ++at)
        if (is_set(used, at)) places[at] = 0;
    for (int n = 0; size_t(1) << n < size; ++n) {
        const std::vector<uint64_t> one = permute([&](size_t bit) { return bit >> n & 1; });
        const std::vector<uint64_t> zero = permute([&](size_t bit) { return !(bit >> n & 1); });
        for (size_t at = 0; at < places.size(); ++at) {
            if (places[at] >= bit_of_all) continue;
            if (is_set(one, at) && is_set(zero, at)) places[at] = bit_of_all;
            else places[at] |= uint16_t(is_set(one, at) << n);
        }
    }
    return places;
}

}  // namespace spattn
