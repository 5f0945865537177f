# SPDX-License-Identifier: MIT
"""The C ABI for the Python tests: cffi reads the header itself, so nothing is typed twice and nothing can drift."""
import pathlib
import sys
import weakref

import numpy as np
import pycparser

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bindings" / "python"))
import native  # noqa: E402

HEADER = native.HEADER
DTYPES = {"f": 2, "i": 0, "u": 1, "b": 6}  # numpy kind -> spattn_dtype_code


def functions():
    """The functions that the header declares, as syntax trees."""
    names = ("size_t", "uint8_t", "uint16_t", "uint32_t", "uint64_t", "int32_t", "int64_t")
    tree = pycparser.CParser().parse("".join(f"typedef int {name};" for name in names) + native.declarations())
    return [node for node in tree.ext if isinstance(getattr(node, "type", None), pycparser.c_ast.FuncDecl)]


ffi = native.view()
KEPT = weakref.WeakKeyDictionary()  # a tensor's struct -> what its pointers point to, which must live as long


class Failure(Exception):
    def __init__(self, status, text):
        super().__init__(f"{status}: {text}")
        self.status = status


class Library:
    """The functions the tests ask for, with statuses as exceptions and arrays as tensors."""

    def __init__(self, path):
        self.c = ffi.dlopen(str(path))

    def check(self, status):
        if status:
            raise Failure(ffi.string(self.c.spattn_status_name(status)).decode(),
                          ffi.string(self.c.spattn_last_error_text()).decode())

    def own(self, function, release, *arguments):
        result = ffi.new(f"{release} **")
        self.check(function(*arguments, result))
        return ffi.gc(result[0], getattr(self.c, f"{release}_release"))

    def parse(self, text):
        return self.own(self.c.spattn_pattern_parse, "spattn_pattern", text.encode())

    def save(self, pattern):
        needed = ffi.new("size_t *")
        self.check(self.c.spattn_pattern_save(pattern, ffi.NULL, 0, needed))
        buffer = ffi.new("char[]", needed[0])
        self.check(self.c.spattn_pattern_save(pattern, buffer, needed[0], needed))
        return ffi.buffer(buffer)[:]

    def load(self, saved):
        return self.own(self.c.spattn_pattern_load, "spattn_pattern", saved, len(saved))

    def text(self, function, handle):
        needed = ffi.new("size_t *")
        self.check(function(handle, ffi.NULL, 0, needed))
        buffer = ffi.new("char[]", needed[0])
        self.check(function(handle, buffer, needed[0], needed))
        return ffi.string(buffer).decode()

    def to_mask(self, pattern, extent):
        out = np.full((extent.batch, extent.heads, extent.seq_q, extent.seq_k), 7, np.uint8)
        self.check(self.c.spattn_pattern_to_mask(pattern, c_extent(extent), tensor(out)))
        return out

    def keeps(self, pattern, extent, batch, head, q, k):
        result = ffi.new("int32_t *", 7)
        self.check(self.c.spattn_pattern_keeps(pattern, c_extent(extent), batch, head, q, k, result))
        return result[0]

    def stats(self, pattern, extent, block_q=0, block_k=0):
        result = sized("spattn_stats")
        self.check(self.c.spattn_pattern_stats(pattern, c_extent(extent, block_q, block_k), result))
        return result

    def to_csr(self, pattern, extent, head, column_dtype=np.int32):
        row_ptr, nnz = np.full(extent.seq_q + 1, -7, np.int64), ffi.new("int64_t *")
        ask = self.c.spattn_pattern_to_csr
        self.check(ask(pattern, c_extent(extent), head, tensor(row_ptr), ffi.NULL, nnz))
        columns = np.full(nnz[0], -7, column_dtype)
        self.check(ask(pattern, c_extent(extent), head, tensor(row_ptr), tensor(columns), nnz))
        return row_ptr, columns

    def to_image(self, pattern, extent, head, height, width):
        out = np.full((height, width), np.nan, np.float32)
        self.check(self.c.spattn_pattern_to_image(pattern, c_extent(extent), head, tensor(out)))
        return out

    def plan(self, pattern, flags=0, scale=None, q_offset=None, dtype=np.float32, **sizes):
        bits = 8 * np.dtype(dtype).itemsize
        dtype = {"code": DTYPES[np.dtype(dtype).kind], "bits": bits, "lanes": 1}
        problem = sized("spattn_problem", flags=flags, dtype=dtype, axes=self.c.SPATTN_BHSD, **sizes)
        if scale is not None:
            problem.flags |= self.c.SPATTN_PLAN_SCALE
            problem.scale = scale
        if q_offset is not None:
            problem.flags |= self.c.SPATTN_PLAN_Q_OFFSET
            problem.q_offset = q_offset
        options = sized("spattn_context_options", device={"type": self.c.SPATTN_CPU, "index": 0})
        context = self.own(self.c.spattn_context_create, "spattn_context", options)
        return self.own(self.c.spattn_plan_create, "spattn_plan", context, pattern, problem, ffi.NULL)

    def run(self, plan, op, **arrays):
        """forward or backward with the arrays as arguments of their names; outputs are among them."""
        tensors = {name: tensor(array) for name, array in arrays.items() if array is not None}
        need, align = ffi.new("size_t *"), ffi.new("size_t *")
        self.check(self.c.spattn_plan_workspace(plan, getattr(self.c, f"SPATTN_OP_{op.upper()}"), need, align))
        memory = np.zeros(need[0] + align[0], np.uint8)
        address = -(-memory.ctypes.data // align[0]) * align[0]
        args = sized(f"spattn_{op}_args", workspace=ffi.cast("void *", address), workspace_bytes=need[0],
                     **tensors)
        self.check(getattr(self.c, f"spattn_{op}")(plan, args))


def sized(struct, **fields):
    result = ffi.new(f"{struct} *", fields)
    result.struct_size = ffi.sizeof(struct)
    return result


def c_extent(extent, block_q=0, block_k=0):
    result = sized("spattn_extent", batch=extent.batch, heads=extent.heads, seq_q=extent.seq_q, seq_k=extent.seq_k,
                   block_q=block_q, block_k=block_k)
    if extent.q_offset is not None:
        result.flags = 1  # SPATTN_EXTENT_Q_OFFSET
        result.q_offset = extent.q_offset
    return result


def tensor(array):
    """A spattn_tensor* on the array's memory."""
    shape = ffi.new("int64_t[]", list(array.shape))
    strides = ffi.new("int64_t[]", [s // array.itemsize for s in array.strides])
    view = ffi.new("spattn_tensor *", {
        "data": ffi.cast("void *", array.ctypes.data), "device": {"type": 1, "index": 0}, "ndim": array.ndim,
        "dtype": {"code": DTYPES[array.dtype.kind], "bits": 8 * array.itemsize, "lanes": 1}, "shape": shape,
        "strides": strides, "byte_offset": 0})
    KEPT[view] = (shape, strides, array)
    return view
