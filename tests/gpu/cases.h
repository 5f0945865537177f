// SPDX-License-Identifier: MIT
// Rows of this machine, what their names say, and shapes made to hurt tiles of 64 and 128 tokens.
#pragma once

#include "gpu/gpu.h"

namespace gpu {

// Names that begin with the prefix and hold the pass; with SPATTN_TEST_ROWS, those of them that begin so, too.
std::vector<std::string> rows_here(const char* prefix, const char* pass);

// Rows of blocks that multiply by tensor cores, of the pass whose name is part of theirs.
std::vector<std::string> tensor_core_rows(const char* pass);
constexpr const char* no_such_rows = "no such rows: a GPU before Turing, or others are asked for";
constexpr const char* no_such_cases = "no case of such rows: a GPU before Turing, or others are asked for";

// What a name says: "sm90_block_forward_bf16_d128_v128_128x128", with "_heads8" where heads share tiles.
spattn_dtype dtype_of(const std::string& row);
bool is_float8(const std::string& row);  // it multiplies bytes of q and k
int64_t dim_of(const std::string& row);
int64_t dim_v_of(const std::string& row);
int64_t tile_heads_of(const std::string& row);
bool is_tf32(const std::string& row);  // its problems are float32, and allow it

// The dtype that a row is for: with TF32, or with operands of float8, where these are what it multiplies. Matrix units
// are said to keep about 14 bits of sums of float8 (arXiv:2412.19437): bounds are wider than those of bfloat16.
void set_dtype(Case& c, const std::string& row);

// Every pattern at every length in the row's dtype, with batches, groups, axes and padding by turns.
std::vector<Case> shapes_of(const std::string& row);

// Demands the truth of plans that may take these rows alone, one for each pass and divided by commas, or any.
void run_case(const Context& context, const std::string& rows, const Case& c);

// The same of all these cases of a row, which comes with that of another pass or alone; returns how many there are. That
// there is none fails, unless SPATTN_TEST_EVERY leaves some out.
size_t run_cases(const Context& context, const std::string& row, const std::string& rows,
                 const std::vector<Case>& cases);

}  // namespace gpu
