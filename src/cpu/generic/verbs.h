// SPDX-License-Identifier: MIT
// The verbs that generic/ is written over: those of the arch whose vec.h was included before. A header of generic/ that
// is read without one is read over doubles.
#pragma once

#ifndef SPATTN_CPU_VERBS
#include "cpu/generic/vec_f64.h"
#endif
