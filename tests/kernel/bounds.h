// SPDX-License-Identifier: MIT
// How far a result may be from the truth. The truth is the double reference on the same inputs.
#pragma once

#include <algorithm>

#include "attention.h"
#include "check.h"

namespace attention {

// |got - want| <= relative |want| + absolute max|want|. Of 16-bit elements `relative` is one correct rounding (2^-8,
// 2^-11): all else happens in fp32. Gradients also carry the rounding of `out`, which enters delta. Rows that multiply
// 16-bit elements round probabilities and their gradients, each by 2^-9 at most (2^-12), so sums of them are off by
// such a share of what they sum; rounding.cpp compares with a computation that rounds the same numbers.
struct Bound {
    Dtype dtype;
    const char* what;
    double absolute, relative, cosine;
};
constexpr Bound bounds[] = {
    {Dtype::f32, "out", 2e-6, 2e-6, 0.9999999},      {Dtype::f32, "lse", 2e-6, 2e-6, 0.9999999},
    {Dtype::f32, "gradient", 1e-5, 1e-5, 0.9999999}, {Dtype::bf16, "out", 1e-5, 1. / 256, 0.9999},
    {Dtype::bf16, "lse", 2e-6, 2e-6, 0.9999999},     {Dtype::bf16, "gradient", 1. / 128, 1. / 256, 0.9995},
    {Dtype::f16, "out", 1e-5, 1. / 2048, 0.99999},   {Dtype::f16, "lse", 2e-6, 2e-6, 0.9999999},
    {Dtype::f16, "gradient", 1. / 1024, 1. / 2048, 0.99999},
    {Dtype::f64, "out", 1e-14, 1e-14, 1 - 1e-12},    {Dtype::f64, "lse", 1.3e-7, 1.3e-7, 0.9999999},
    {Dtype::f64, "gradient", 3e-14, 3e-14, 1 - 1e-12},
};
inline const Bound& bound_of(Dtype dtype, const std::string& what) {
    for (const Bound& bound : bounds)
        if (bound.dtype == dtype && what == bound.what) return bound;
    std::abort();
}

inline bool multiplies_elements(const Kernel& kernel) {
    const std::string name = kernel.name, arch = name.substr(0, name.find('_'));
    return arch == "amx" || arch == "amxfp16" || arch == "avx512bf16" || arch == "neonbf16";
}
inline Bound bound_of(const Rows& rows, const std::string& what) {
    Bound bound = bound_of(rows.forward.dtype, what);
    if (!multiplies_elements(rows.forward)) return bound;
    const double unit = rows.forward.dtype == Dtype::f16 ? 1. / 2048 : 1. / 256;
    if (what == "out") bound.absolute = unit;
    if (what == "gradient") bound.absolute = 8 * unit;
    return bound;
}

inline bool same_specials(const Values& got, const Values& want) {
    for (size_t i = 0; i < want.size(); ++i) {
        if (std::isfinite(want[i]) && std::isfinite(got[i])) continue;
        if (!(std::isnan(want[i]) && std::isnan(got[i])) && want[i] != got[i]) return false;
    }
    return true;
}

// slack: scores of size s carry an error of s units, which exp turns into a relative one, and more where they are sums of
// more than 512 products.
inline void check_close(const std::string& name, const Values& got, const Values& want, Bound bound, double slack) {
    CHECK_EQ(got.size(), want.size());
    if (!same_specials(got, want))
        return check::report(false, __FILE__, __LINE__, name + ": inf or nan in other places");
    double top = 0, worst = 0, gw = 0, gg = 0, ww = 0;
    for (const double w : want)
        if (std::isfinite(w)) top = std::max(top, std::abs(w));
    for (size_t i = 0; i < want.size(); ++i) {
        if (!std::isfinite(want[i])) continue;
        const double allowed =
            slack * (bound.relative * std::abs(want[i]) + bound.absolute * top) + std::min(1e-9, bound.absolute);
        worst = std::max(worst, std::abs(got[i] - want[i]) / allowed);
        gw += got[i] * want[i], gg += got[i] * got[i], ww += want[i] * want[i];
    }
    check::report(worst <= 1, __FILE__, __LINE__, text(name, " is ", worst, " times its bound from the truth"));
    // Gradients that cancel to nothing have no direction.
    if (ww > 1e-8 * double(want.size()))
        check::report(gw >= (1 - slack * (1 - bound.cosine)) * std::sqrt(gg * ww), __FILE__, __LINE__,
                      name + ": cosine");
}

inline void check_results(const Case& c, const Rows& rows, const Results& got, const Results& want) {
    const Dtype dtype = rows.forward.dtype;
    const Problem p = problem_of(c, dtype);
    const double length = std::sqrt(std::max(1., double(p.head_dim) / 512));
    const double slack = length * std::max(1., std::abs(p.scale) * std::sqrt(double(p.head_dim)));
    check_close("out", got.out, want.out, bound_of(rows, "out"), slack);
    check_close("lse", got.lse, want.lse, bound_of(dtype, "lse"), slack);
    check_close("max_logits", got.max_logits, want.max_logits, bound_of(dtype, "lse"), slack);
    const Bound gradient = bound_of(rows, "gradient");
    check_close("dq", got.dq, want.dq, gradient, slack);
    check_close("dk", got.dk, want.dk, gradient, slack);
    if (!c.value_in_key) check_close("dv", got.dv, want.dv, gradient, slack);
    // A sum over all rows, of both signs: what it loses is relative to its parts, which are of size 1.
    const Bound dsinks = dtype == Dtype::f64 ? bound_of(Dtype::f32, "lse") : gradient;  // float32, from a float32 lse
    check_close("dsinks", got.dsinks, want.dsinks, dsinks, slack * std::sqrt(double(p.batch * p.seq_q)));
}

}  // namespace attention
