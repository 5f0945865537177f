// SPDX-License-Identifier: MIT
// A host that writes numbers with dots and commas: 1.234,5.
#pragma once

#include <locale>
#include <string>

class InDots {
public:
    InDots() : before_(std::locale::global(std::locale(std::locale(), new Numbers))) {}
    InDots(const InDots&) = delete;
    ~InDots() { std::locale::global(before_); }

private:
    struct Numbers : std::numpunct<char> {
        char do_thousands_sep() const override { return '.'; }
        std::string do_grouping() const override { return "\3"; }
        char do_decimal_point() const override { return ','; }
    };

    std::locale before_;
};
