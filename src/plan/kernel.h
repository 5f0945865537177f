// SPDX-License-Identifier: MIT
// The seam. A backend is a list of these rows; nothing else in the library knows a kernel by name. C++17-clean.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "plan/call.h"

namespace spattn {

enum class Pass { forward, backward };
// What a row reads: runs of blocks, lists of tokens, or the pattern's own rows (the truth).
enum class Family { block, gather, reference };

// How a walk's work is cut into tasks, and which tasks one worker does one after the other. All counts are of blocks
// unless they say otherwise.
struct SchedulePolicy {
    // The axis is cut into equal shares, wherever the cuts fall, for as many workers as said. Without: a task is a row of
    // blocks, and a row is split where it is longer than longest_task and than what one of the workers would do in all.
    bool equal_shares = false;
    int workers = 64;              // 0: workers_of_lane for each lane, on which the CPU's results may not depend
    double workers_of_lane = 1.0;  // 0.5: two walks run side by side. GCC 12 takes no integer for a double here
    int64_t longest_task = 64;
    int64_t whole_rows = 0;        // rows of up to so many stay whole in any case
    // Where `workers` is 0, rows are split where that takes less time: us that a worker takes for a block, and for a
    // task beside its blocks; and, of the whole walk, that parts have to be put together, and that each of them adds.
    double block_us = 0.0, task_us = 0.0, join_us = 0.0, part_us = 0.0;
    // Short tasks of a head are done by one worker, up to this many blocks: fetching work costs something, and neighbours
    // share keys. Small problems stay in single tasks.
    int64_t shared_blocks = 16;
    int64_t most_single = 256;          // tasks: from here on short ones are put together
    int64_t most_single_residue = 64;   // of residue classes, whose neighbours share keys that are slow to fetch
    // Not 0: tasks stand in the order of their rows, not longest first, each row for so many heads one after the other:
    // what tasks of a head add up is added in this order, and who adds waits for those before.
    int32_t heads_in_turn = 0;
    // Queues stand longest first; those that differ by less than this are as long as each other, and stay in the order
    // of their heads and rows: neighbours meet the same keys.
    int64_t alike = 1;
};

// One walk of a pass over its layout. The counts that a cost is predicted from are those of a row's first walk.
struct Walk {
    Owner owner;
    SchedulePolicy policy;
    int32_t tile_heads = 1;  // see TasksView
};

// Counts a cost model works on, over all heads and batch entries.
struct LayoutStats {
    double pairs;           // kept
    double visited;         // in blocks that are listed, sequence ends included
    double worked;          // of those, what is left of masked blocks where each 16 rows (queries forward, keys
                            // backward) meet the tokens from the first to the last that one of them keeps
    double blocks, masked;  // listed blocks; those with a mask
    double gathered;        // tokens of tiles that are not consecutive ones, counted each time that a block of the
                            // other axis visits them; keys of token lists, once for heads of a group that share them
    double repeated;        // of these, tokens of listed tiles that stand at home as well
    double away;            // tokens of either axis that stand in listed tiles alone, each once a head: keys are copied
                            // there before a forward pass, and others row by row
    double gaps;            // places where the list of a block row goes on behind blocks that it leaves out
    int64_t rows;           // block rows with work; query rows for gather rows
    // What lists alone tell: all 0 where stats are a bound or of a call on a cache, and for gather rows whose lists each
    // call brings.
    struct Longest {
        double row;           // blocks of the longest block row; keys of the longest list for gather rows
        double across;        // blocks of the longest row of the other axis; for gather rows, which ask backward, queries
                              // of a head that see the most visited key
        int64_t rows_across;  // rows of the other axis with work; 0 for gather rows
    } longest;
    bool is_piece = false;  // rows take on and hand on what other pieces of the pass make
};

// The machine a cost is predicted for. Tests bring an imaginary one.
struct Machine {
    std::string name;
    int lanes;             // threads, or SMs
    double clock;          // GHz
    double bandwidth;      // GB/s of main memory
    double memory = 0;     // bytes of it, on a GPU
};

struct Cost {
    double us;
    const char* binds;  // "compute", "memory", "overhead"
};

// What the size of a workspace follows from.
struct Sizing {
    const Problem& problem;
    LayoutView layout;
    TasksView tasks, second_tasks;
    TokenListsView tokens;
    int lanes;
};

// Bits of a mask in the order in which a row's threads hold a score tile: writes mask_words words for the tile whose
// row-major bits are given, bit (r * block_k + k) of `bits`.
using PermuteMask = void (*)(const uint64_t* bits, int block_q, int block_k, uint64_t* out);

struct DispatchSteps;  // plan/dispatch.h

struct Kernel {
    const char* name;  // "avx512_block_forward_f32_64x64": arch_family_pass_dtype, then what else distinguishes it
    int32_t device;    // spattn_device_type
    Pass pass;
    Dtype dtype;
    int32_t block_q = 0, block_k = 0;  // tokens; 0 where the row reads no layout
    int32_t mask_words = 0;            // 64-bit words a mask
    PermuteMask permute = nullptr;     // null: row-major bits as they are
    // Walks over the layout that need tasks, in the order in which the pass makes them. Steps without (row sums,
    // conversions, combining) are the row's own business.
    Walk walks[2] = {};
    int32_t num_walks = 0;
    bool (*runs_here)(int32_t device);    // index among the devices of its kind
    const char* (*fits)(const Problem&);  // null where it fits, else why not: "head_dim above 1024"
    Cost (*cost)(const Problem&, const LayoutStats&, const Machine&);
    size_t (*workspace)(const Sizing&);   // bytes
    void (*forward)(const ForwardArgs&) = nullptr;    // exactly one of these two
    void (*backward)(const BackwardArgs&) = nullptr;
    void (*prepare)(int32_t device) = nullptr;  // loads code there, so that no call waits for it; null: nothing to load
    bool orders = false;                        // reads any AxisView; false: blocks of consecutive tokens only
    Family family = Family::block;
    int32_t key_stretch = 0;    // also reads listed tiles of keys that have stretches of so many tokens; 0: none
    bool (*takes_spans)(const ForwardArgs&) = nullptr;  // whether it reads LayoutView::spans, of these operands
    bool max_logits = false;    // writes them where a call asks
    bool float8_cache = false;  // reads keys and values of float8, too
    // Whether it multiplies q and k of float8 as they are, of these operands; else it is given elements of them, too.
    // Where this is set the row serves problems of float8 operands alone.
    bool (*multiplies_float8)(const ForwardArgs&) = nullptr;
    bool shares_lists = false;  // the heads of a group must see the same keys
    // Bytes that pieces of a pass hand on, the same for all rows of a dtype; null: runs whole patterns only.
    size_t (*carries)(const Problem&) = nullptr;
    bool goes_in_rounds = false;  // backward by key: takes tasks in rounds (layout/view.h)
    int32_t sweeps = 1;  // how often a pass goes over its pieces, if it has several: the same for all rows of a dtype
    const DispatchSteps* dispatch = nullptr;  // brings queries to blocks that they list; null: cannot
    const char* assumes = nullptr;  // of a call's operands, and what it does without: the plan cannot know, and says so
    // Gradients whose terms are added in the order of arrival, so that last bits differ between calls: "dq"; null, or null
    // of the problem: none.
    const char* (*added_by_arrival)(const Problem&) = nullptr;

    Owner owner() const { return num_walks > 0 ? walks[0].owner : Owner::queries; }
};

struct KernelTable {
    const Kernel* rows;
    int count;
};

}  // namespace spattn
