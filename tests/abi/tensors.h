// SPDX-License-Identifier: MIT
// Every way to hand over a tensor that is wrong, as a table that each tensor argument of each function goes through.
#pragma once

#include "abi/abi.h"

namespace abi {

struct BadTensor {
    std::string what;
    std::function<void(Tensor&)> spoil;
    spattn_status status;
};

inline std::vector<BadTensor> bad_tensors(const Tensor& good, bool any_size) {
    std::vector<BadTensor> table = {
        {"data NULL", [](Tensor& t) { t.view.data = nullptr; }, SPATTN_E_NULL},
        {"shape NULL", [](Tensor& t) { t.view.shape = nullptr; }, SPATTN_E_NULL},
        {"ndim -1", [](Tensor& t) { t.view.ndim = -1; }, SPATTN_E_SHAPE},
        {"ndim 0", [](Tensor& t) { t.view.ndim = 0; }, SPATTN_E_SHAPE},
        {"an axis fewer", [](Tensor& t) { --t.view.ndim; }, SPATTN_E_SHAPE},
        {"an axis more", [](Tensor& t) { ++t.view.ndim; }, SPATTN_E_SHAPE},
        {"ndim 2^31-1", [](Tensor& t) { t.view.ndim = 0x7fffffff; }, SPATTN_E_SHAPE},
        {"float64", [](Tensor& t) { t.view.dtype = f64; }, SPATTN_E_DTYPE},
        {"no bits", [](Tensor& t) { t.view.dtype.bits = 0; }, SPATTN_E_DTYPE},
        {"7 bits", [](Tensor& t) { t.view.dtype.bits = 7; }, SPATTN_E_DTYPE},
        {"code 250", [](Tensor& t) { t.view.dtype.code = 250; }, SPATTN_E_DTYPE},
        {"no lanes", [](Tensor& t) { t.view.dtype.lanes = 0; }, SPATTN_E_DTYPE},
        {"2 lanes", [](Tensor& t) { t.view.dtype.lanes = 2; }, SPATTN_E_DTYPE},
        {"on a GPU", [](Tensor& t) { t.view.device.type = SPATTN_CUDA; }, SPATTN_E_DEVICE},
        {"device type 0", [](Tensor& t) { t.view.device.type = 0; }, SPATTN_E_DEVICE},
        {"device type -1", [](Tensor& t) { t.view.device.type = -1; }, SPATTN_E_DEVICE},
    };
    if (good.view.dtype.bits > 8)
        table.push_back({"misaligned", [](Tensor& t) { t.view.byte_offset = 1; }, SPATTN_E_LAYOUT});
    for (size_t axis = 0; axis < good.shape.size(); ++axis) {
        const std::string name = "axis " + std::to_string(axis);
        const auto sized = [&](const char* what, int64_t size) {
            table.push_back({name + what, [axis, size](Tensor& t) { t.shape[axis] = size; }, SPATTN_E_SHAPE});
        };
        sized(" of -1", -1);
        sized(" of 2^62", huge);
        sized(" of -2^63", least);
        if (!any_size) {
            sized(" of 0", 0);
            sized(" one longer", good.shape[axis] + 1);
            sized(" one shorter", good.shape[axis] - 1);
        }
        if (good.shape[axis] < 2) continue;  // strides of such an axis mean nothing
        for (int64_t stride : {int64_t(-1), least, huge, most})
            table.push_back({name + " of stride " + std::to_string(stride),
                             [axis, stride](Tensor& t) { t.strides[axis] = stride; }, SPATTN_E_LAYOUT});
    }
    return table;
}

// Sends a fresh tensor through every line of the table; call gets its view, or NULL once.
inline void demand_tensor_checks(const char* function, const std::string& argument, bool any_size,
                                 const std::function<std::unique_ptr<Tensor>()>& make,
                                 const std::function<spattn_status(const spattn_tensor*)>& call) {
    for (const BadTensor& bad : bad_tensors(*make(), any_size)) {
        const auto tensor = make();
        bad.spoil(*tensor);
        demand(argument + " " + bad.what, function, call(&tensor->view), bad.status, argument);
    }
}

}  // namespace abi
