// SPDX-License-Identifier: MIT
// Integers that a caller handed over: int32 or int64, copied or borrowed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace spattn {

class IndexArray {
public:
    IndexArray() = default;
    IndexArray(std::vector<int64_t> numbers) : owned_wide_(std::move(numbers)), size_(int64_t(owned_wide_.size())) {
        wide_ = owned_wide_.data();
    }
    IndexArray(std::vector<int32_t> numbers) : owned_narrow_(std::move(numbers)), size_(int64_t(owned_narrow_.size())) {
        narrow_ = owned_narrow_.data();
    }
    // The caller keeps the numbers alive and unchanged.
    static IndexArray borrow(const int64_t* numbers, int64_t size) { return {nullptr, numbers, size}; }
    static IndexArray borrow(const int32_t* numbers, int64_t size) { return {numbers, nullptr, size}; }

    // A vector's memory moves with it; a copy's does not.
    IndexArray(IndexArray&&) = default;
    IndexArray& operator=(IndexArray&&) = default;

    int64_t operator[](int64_t i) const { return narrow_ ? narrow_[i] : wide_[i]; }
    int64_t size() const { return size_; }
    bool is_narrow() const { return narrow_ != nullptr; }
    size_t bytes() const { return owned_narrow_.size() * sizeof(int32_t) + owned_wide_.size() * sizeof(int64_t); }
    bool is_borrowed() const { return owned_wide_.empty() && owned_narrow_.empty() && size_ > 0; }

private:
    IndexArray(const int32_t* narrow, const int64_t* wide, int64_t size) : narrow_(narrow), wide_(wide), size_(size) {}

    std::vector<int32_t> owned_narrow_;
    std::vector<int64_t> owned_wide_;
    const int32_t* narrow_ = nullptr;
    const int64_t* wide_ = nullptr;
    int64_t size_ = 0;
};

// 128 bits of the numbers fed to it, the same in every process and release. Large index patterns compare by it: a step
// is a bijection of the state for every number, so lists that differ in one number never collide.
class Digest {
public:
    void add(uint64_t number) {
        a_ = mix(a_ ^ number, 0xBF58476D1CE4E5B9, 29);
        b_ = mix(b_ + number, 0x94D049BB133111EB, 31);
    }
    void add(const IndexArray& array) {
        add(uint64_t(array.size()));
        for (int64_t i = 0; i < array.size(); ++i) add(uint64_t(array[i]));
    }
    std::string hex() const;

private:
    static uint64_t mix(uint64_t x, uint64_t factor, int shift) {
        x *= factor;
        return x ^ (x >> shift);
    }
    uint64_t a_ = 0x9E3779B97F4A7C15, b_ = 0xD1B54A32D192ED03;
};

// "1,5,9".
std::string list(const IndexArray& numbers);

}  // namespace spattn
