# SPDX-License-Identifier: MIT
"""What is wrong for each argument of the C ABI that is a number, a text or a list: what pointers, tensors and sized
structs can get wrong, test_misuse.py derives from their types."""
import math

HUGE, MOST, LEAST = 1 << 62, (1 << 63) - 1, -(1 << 63)
SIZES = [0, -1, LEAST]  # wrong where 1 and more is right
NEGATIVE = [-1, LEAST]


class Wrong:
    """Values that fail with `status`; `named` is the argument that the error names, if not the parameter itself."""

    def __init__(self, *values, status="SPATTN_E_RANGE", named=None):
        self.values, self.status, self.named = values, status, named


def unknown(*bits):
    return Wrong(*bits, status="SPATTN_E_UNKNOWN_FIELD")


EMPTY = Wrong(0, HUGE)
TOO_SMALL = Wrong(1)
RUNTIME_SIZES = Wrong(*SIZES, 1 << 31, HUGE)
ARGUMENTS = {
    "spattn_pattern_window": {"left": Wrong(-2, LEAST), "right": Wrong(-2, LEAST)},
    "spattn_pattern_sink": {"tokens": Wrong(-1, LEAST)},
    "spattn_pattern_block_diagonal": {"block": Wrong(*SIZES)},
    "spattn_pattern_dilated": {"left": Wrong(-2, LEAST), "right": Wrong(-2, LEAST), "dilation": Wrong(*SIZES)},
    "spattn_pattern_strided": {"stride": Wrong(*SIZES)},
    "spattn_pattern_landmark": {"block": Wrong(*SIZES), "landmarks": Wrong(-1, 5, HUGE, LEAST)},
    "spattn_pattern_fixed": {"block": Wrong(*SIZES), "landmarks": Wrong(-1, 5, HUGE, LEAST)},
    "spattn_pattern_residue": {"modulus": Wrong(*SIZES), "offset": Wrong(-1, 4, HUGE, LEAST)},
    "spattn_pattern_csr": {"seq_k": Wrong(*SIZES, 1 << 31), "flags": unknown(4, 1 << 31)},
    "spattn_pattern_bsr": {"block_q": Wrong(*SIZES), "block_k": Wrong(*SIZES), "seq_q": Wrong(*SIZES, 1 << 31),
                           "seq_k": Wrong(*SIZES, 1 << 31), "flags": unknown(4, 1 << 31)},
    "spattn_pattern_mask": {"flags": unknown(4, 1 << 31)},
    "spattn_pattern_predicate": {"heads": Wrong(*SIZES, HUGE), "seq_q": Wrong(*SIZES, HUGE),
                                 "seq_k": Wrong(*SIZES, HUGE)},
    "spattn_pattern_runtime_tokens": {"max_tokens_per_row": RUNTIME_SIZES},
    "spattn_pattern_runtime_blocks": {"block_q": RUNTIME_SIZES, "block_k": RUNTIME_SIZES,
                                      "max_blocks_per_row": RUNTIME_SIZES},
    "spattn_pattern_union": {"count": EMPTY},
    "spattn_pattern_intersection": {"count": EMPTY},
    "spattn_pattern_per_head": {"count": EMPTY, "heads": EMPTY,
                                "part_of_head": Wrong([0, 2], [0, -1], named="part_of_head[1]")},
    "spattn_pattern_per_batch": {"count": EMPTY, "batch": EMPTY,
                                 "part_of_batch": Wrong([0, 2], [0, -1], named="part_of_batch[1]")},
    "spattn_pattern_grid": {"axes": EMPTY, "sizes": Wrong([0, 4], [-1, 4], named="sizes[0]"),
                            "tile": Wrong([2, 3], [2, 0], named="tile[1]")},
    "spattn_pattern_rows": {"seq_q": Wrong(*SIZES, 1 << 31)},
    "spattn_pattern_columns": {"seq_k": Wrong(*SIZES, 1 << 31)},
    "spattn_pattern_parse": {"text": Wrong(b"", b"cuasal", b"causal &", b"window(1)", b"window(-2,0)", b"(causal",
                                           b"window(99999999999999999999,0)", b"causal\xff",
                                           status="SPATTN_E_FORMAT")},
    "spattn_pattern_print": {"capacity": TOO_SMALL},
    "spattn_pattern_save": {"capacity": TOO_SMALL},
    "spattn_pattern_load": {"size": Wrong(0, 1, 7, 11, status="SPATTN_E_FORMAT", named="bytes")},
    "spattn_pattern_keeps": {"batch": Wrong(-1, 1, HUGE, LEAST), "head": Wrong(-1, 2, HUGE, LEAST),
                             "q": Wrong(-1, 6, HUGE, LEAST), "k": Wrong(-1, 9, HUGE, LEAST)},
    "spattn_pattern_to_image": {"head": Wrong(-1, 2, HUGE, LEAST)},
    "spattn_pattern_to_csr": {"head": Wrong(-1, 2, HUGE, LEAST)},
    "spattn_plan_workspace": {"op": Wrong(-1, 2, 1 << 30)},
    "spattn_sharding_ranges": {"rank": Wrong(-1, 2, -(1 << 31))}, "spattn_sharding_peer": {"rank": Wrong(-1, 2)},
    "spattn_exchange": {"step": Wrong(-1, 4, 1 << 30)},
    "spattn_plan_explain": {"capacity": TOO_SMALL}, "spattn_plan_explain_all": {"capacity": TOO_SMALL},
}

COUNTS = Wrong(-1, HUGE, LEAST)
TEXT_NUMBERS = Wrong(-2, LEAST, 1 << 31, HUGE)  # -1 is a 0 that is meant
DEVICES = Wrong(*({"type": kind, "index": index} for kind, index in ((99, 0), (-1, 0), (1, 1), (1, -1))),
                status="SPATTN_E_DEVICE")
DTYPES = Wrong(*({"code": code, "bits": bits, "lanes": lanes}
                 for code, bits, lanes in ((0, 0, 0), (2, 32, 2), (0, 32, 1), (2, 7, 1), (2, 8, 1), (250, 32, 1), (10, 16, 1),
                                           (10, 8, 0), (10, 8, 2), (11, 8, 1))),
               status="SPATTN_E_DTYPE")
CACHE_DTYPES = Wrong(*({"code": code, "bits": bits, "lanes": lanes}
                       for code, bits, lanes in ((2, 32, 2), (0, 8, 1), (2, 8, 1), (10, 16, 1), (10, 8, 0))),
                     status="SPATTN_E_DTYPE")
WORKSPACE = {"workspace": Wrong(status="SPATTN_E_NULL"), "workspace_bytes": Wrong(0, 1, status="SPATTN_E_WORKSPACE")}
FIELDS = {
    "spattn_context_options": {"device": DEVICES, "log_level": Wrong(-1, 4, 1 << 30),
                               "cpu_threads": Wrong(-1, 1 << 30, -(1 << 31)), "plan_cache": Wrong(-2, HUGE, LEAST)},
    "spattn_bigbird": {"block": Wrong(*SIZES), "window_blocks": Wrong(-1, 2, LEAST), "global_blocks": Wrong(-1, LEAST),
                       "random_blocks": Wrong(-1, LEAST)},
    "spattn_xref": {"sinks": TEXT_NUMBERS, "links": TEXT_NUMBERS, "ngram_keys": TEXT_NUMBERS,
                    "symbol_before": TEXT_NUMBERS, "symbol_after": TEXT_NUMBERS, "look_back": TEXT_NUMBERS,
                    "stop_ratio": TEXT_NUMBERS, "window": Wrong(*NEGATIVE, 1 << 31, HUGE),
                    "budget": Wrong(*NEGATIVE, 1, 1 << 31, HUGE)},
    "spattn_extent": {"batch": COUNTS, "heads": COUNTS, "seq_q": Wrong(*SIZES, 1 << 31, HUGE),
                      "seq_k": Wrong(*SIZES, 1 << 31, HUGE), "q_offset": Wrong(HUGE, -HUGE, MOST, LEAST),
                      "block_q": Wrong(-1, 1025, HUGE, LEAST), "block_k": Wrong(-1, 1025, HUGE, LEAST)},
    "spattn_problem": {"batch": Wrong(*NEGATIVE, HUGE), "heads_q": Wrong(*SIZES, HUGE), "heads_kv": Wrong(*SIZES, 3, 8),
                       "seq_q": Wrong(*NEGATIVE, 1 << 31, HUGE), "seq_k": Wrong(*NEGATIVE, 1 << 31, HUGE),
                       "head_dim": Wrong(*SIZES, 1025, HUGE), "head_dim_v": Wrong(-1, 1025, HUGE, LEAST),
                       "dtype": DTYPES, "axes": Wrong(-1, 3, 1 << 30), "scale": Wrong(math.nan, math.inf, -math.inf),
                       "softcap": Wrong(math.nan, math.inf, -1.0, 1e-7, 1e31),
                       "q_offset": Wrong(HUGE, -HUGE, MOST, LEAST), "page_size": Wrong(-1, HUGE, LEAST),
                       "cache_dtype": CACHE_DTYPES, "reserved": unknown(1, -1)},
    "spattn_forward_args": WORKSPACE,
    "spattn_backward_args": WORKSPACE,
    "spattn_sharding_options": {"ranks": Wrong(0, -1, 1 << 30), "rank": Wrong(-1, 2), "split": Wrong(-1, 2, 1 << 30),
                                "reserved": unknown(1, -1)},
    "spattn_exchange_args": {"buffer_bytes": Wrong(0, 1, status="SPATTN_E_WORKSPACE")},
}
# Tensors whose sizes follow from other arguments, as those of a pass do.
FIXED = {("spattn_pattern_to_mask", "out"), ("spattn_pattern_to_csr", "row_ptr")}
# Bits of `flags` without which a field is not read.
READ_WITH = {("spattn_extent", "q_offset"): "SPATTN_EXTENT_Q_OFFSET",
             ("spattn_problem", "q_offset"): "SPATTN_PLAN_Q_OFFSET",
             ("spattn_problem", "scale"): "SPATTN_PLAN_SCALE"}

# Pointers that may be NULL.
OPTIONAL = {
    ("spattn_pattern_grid", "tile"),
    ("spattn_context_create", "options"), ("spattn_pattern_xref", "symbols"), ("spattn_pattern_xref", "params"),
    ("spattn_pattern_xref_extend", "symbols"),
    ("spattn_pattern_print", "needed"), ("spattn_pattern_save", "needed"),
    ("spattn_plan_explain", "needed"), ("spattn_plan_explain_all", "needed"),
    ("spattn_pattern_to_csr", "row_ptr"), ("spattn_pattern_to_csr", "col_idx"), ("spattn_sharding_ranges", "ranges"), ("spattn_sharding_seen", "ranges"),
    ("spattn_plan_workspace", "align"), ("spattn_forward_args", "lse"), ("spattn_forward_args", "max_logits"),
    ("spattn_forward_args", "index_counts"), ("spattn_backward_args", "dlse"), ("spattn_backward_args", "index_counts"),
    ("spattn_backward_args", "dsink_logits"), ("spattn_cache_append_args", "counts"),
}
# What takes every value, and why.
ANYTHING = {
    ("spattn_pattern_predicate", "user"): "it is the callback's",
    ("spattn_plan_create", "stream"): "the CPU has none",
    ("spattn_sharding_create", "stream"): "the CPU has none",
    ("spattn_sharding_options", "ranges"): "NULL splits tokens evenly; what can be wrong, sharding.cpp says",
    ("spattn_exchange_args", "stream"): "the CPU has none",
    ("spattn_exchange_args", "k_scales"): "without SPATTN_SHARDING_SCALES there are none; sharding.cpp says the rest",
    ("spattn_exchange_args", "v_scales"): "the same",
    ("spattn_exchange_args", "seen_k_scales"): "the same",
    ("spattn_exchange_args", "seen_v_scales"): "the same",
    ("spattn_forward_args", "stream"): "the CPU has none",
    ("spattn_backward_args", "stream"): "the CPU has none",
    ("spattn_cache_append_args", "stream"): "the CPU has none",
    ("spattn_cache_append_args", "page_table"): "a cache without pages takes none; what can be wrong, append.cpp says",
    ("spattn_cache_append_args", "query_offsets"): "the same of rows that are padded",
    ("spattn_forward_args", "starts"): "a plan without a cache takes none; what can be wrong, cache.cpp says",
    ("spattn_forward_args", "page_table"): "the same",
    ("spattn_forward_args", "query_offsets"): "the same",
    ("spattn_forward_args", "parents"): "a plan without SPATTN_PLAN_PARENTS takes none; what can be wrong, cache.cpp says",
    ("spattn_forward_args", "k_scales"): "a plan without float8 takes none; cache.cpp and float8.cpp say the rest",
    ("spattn_forward_args", "v_scales"): "the same",
    ("spattn_forward_args", "q_scales"): "a plan without a dtype of float8 takes none; float8.cpp says the rest",
    ("spattn_backward_args", "q_scales"): "the same",
    ("spattn_backward_args", "k_scales"): "the same",
    ("spattn_backward_args", "v_scales"): "the same",
    ("spattn_cache_append_args", "k_scales"): "a cache that is not of float8 has none; append.cpp says the rest",
    ("spattn_cache_append_args", "v_scales"): "the same",
    ("spattn_bigbird", "seed"): "every number is a seed",
    ("spattn_context_options", "alloc_user"): "it is the callback's",
    ("spattn_context_options", "log_user"): "it is the callback's",
    ("spattn_context_options", "parallel_for_user"): "it is the callback's",
    ("spattn_context_options", "cancel_user"): "it is the callback's",
    ("spattn_context_options", "cancel"): "NULL lets runs end when they are done",
    ("spattn_extent", "cancel_user"): "it is the callback's",
    ("spattn_extent", "cancel"): "NULL lets questions end when they are done",
    ("spattn_context_options", "log"): "NULL is silent",
    ("spattn_context_options", "parallel_for"): "NULL is the library's own",
    ("spattn_context_options", "alloc"): "NULL is the library's own; alone it is an error of misuse_plan.cpp",
    ("spattn_context_options", "free"): "NULL is the library's own; alone it is an error of misuse_plan.cpp",
}
