# SPDX-License-Identifier: MIT
"""The C ABI as the benches of this folder call it, with tensors of torch."""
import sys

import torch
from report import ROOT

sys.path.insert(0, str(ROOT / "bindings" / "python"))
import native  # noqa: E402

ffi = native.view()
DTYPES = {torch.bfloat16: (4, 16, 1), torch.float16: (2, 16, 1), torch.float32: (2, 32, 1),
          torch.int32: (0, 32, 1), torch.int64: (0, 64, 1),
          torch.float8_e4m3fn: (10, 8, 1)}  # spattn_dtype


def sized(struct, **fields):
    return ffi.new(f"{struct} *", {"struct_size": ffi.sizeof(struct), **fields})


def view(t):
    """A spattn_tensor* of a torch tensor, and what must live as long."""
    shape, strides = ffi.new("int64_t[]", list(t.shape)), ffi.new("int64_t[]", list(t.stride()))
    device = (2, t.device.index or 0) if t.is_cuda else (1, 0)
    data = ffi.cast("void *", t.data_ptr())
    return ffi.new("spattn_tensor *", (data, device, t.dim(), DTYPES[t.dtype], shape, strides, 0)), shape, strides


def extent(case):
    return sized("spattn_extent", batch=case.batch, heads=case.heads, seq_q=case.seq, seq_k=case.seq_k)


class Library:
    def __init__(self, path):
        self.lib = ffi.dlopen(str(path))
        options = sized("spattn_context_options", device=(self.lib.SPATTN_CUDA, 0))
        self.context = self.make("spattn_context", self.lib.spattn_context_create, options)

    def check(self, status):
        if status:
            raise RuntimeError(ffi.string(self.lib.spattn_last_error_text()).decode())

    def make(self, kind, function, *args):
        """A handle, which is released when nothing holds it any more."""
        lib, handle = self.lib, ffi.new(f"{kind} **")
        self.check(function(*args, handle))
        return ffi.gc(handle[0], lambda owned: getattr(lib, f"{kind}_release")(owned))

    def pattern(self, text):
        return self.make("spattn_pattern", self.lib.spattn_pattern_parse, text.encode())

    def csr_pattern(self, row_ptr, col_idx, seq_k):
        """A pattern of arrays on the host, which it copies."""
        rows, columns = view(row_ptr), view(col_idx)
        return self.make("spattn_pattern", self.lib.spattn_pattern_csr, rows[0], columns[0], seq_k, 0)

    def plan(self, case, backward, pattern=None):
        """A plan, and the pairs that its pattern keeps: the case's text, unless one is given."""
        lib, pattern = self.lib, pattern or self.pattern(case.pattern)
        flags = (lib.SPATTN_PLAN_BACKWARD if backward else 0) | (
            lib.SPATTN_PLAN_DETERMINISTIC if case.deterministic else 0)
        problem = sized("spattn_problem", flags=flags, batch=case.batch, heads_q=case.heads, heads_kv=case.heads_kv,
                        seq_q=case.seq, seq_k=case.seq_k, head_dim=case.head_dim, head_dim_v=case.head_dim_v,
                        dtype=DTYPES[case.dtype], axes=lib.SPATTN_THD if case.is_packed else lib.SPATTN_BHSD)
        plan = self.make("spattn_plan", lib.spattn_plan_create, self.context, pattern, problem, ffi.NULL)
        stats = sized("spattn_stats")
        self.check(lib.spattn_plan_stats(plan, stats))
        return plan, stats.pairs

    def calls(self, case, t, passes, pattern=None):
        """The calls of the passes on a case's tensors, after a first forward; the plan, and the pairs it keeps."""
        plan, pairs = self.plan(case, "backward" in passes, pattern)
        calls = {"forward": self.forward(plan, **t.operands("forward", case.is_packed))}
        calls["forward"]()
        if "backward" in passes:
            calls["backward"] = self.backward(plan, **t.operands("backward", case.is_packed))
        return calls, plan, pairs

    def is_causal(self, case):
        """Whether no query of the pattern sees a key behind it."""
        future = self.make("spattn_pattern", self.lib.spattn_pattern_difference, self.pattern(case.pattern),
                           self.pattern("causal"))
        stats = sized("spattn_stats")
        self.check(self.lib.spattn_pattern_stats(future, extent(case), stats))
        return stats.pairs == 0

    def csr(self, case):
        """row_ptr and col_idx of the pattern's first head, on the host."""
        question = self.pattern(case.pattern), extent(case), 0
        nnz, row_ptr = ffi.new("int64_t *"), torch.empty(case.seq + 1, dtype=torch.int64)
        rows = view(row_ptr)
        self.check(self.lib.spattn_pattern_to_csr(*question, rows[0], ffi.NULL, nnz))
        col_idx = torch.empty(nnz[0], dtype=torch.int64)
        columns = view(col_idx)
        self.check(self.lib.spattn_pattern_to_csr(*question, rows[0], columns[0], nnz))
        return row_ptr, col_idx

    def kernel(self, plan, what):
        op = getattr(self.lib, f"SPATTN_OP_{what.upper()}")
        return ffi.string(self.lib.spattn_plan_kernel(plan, op)).decode()

    def explain(self, plan):
        need = ffi.new("size_t *")
        self.check(self.lib.spattn_plan_explain(plan, ffi.NULL, 0, need))
        text = ffi.new("char[]", need[0])
        self.check(self.lib.spattn_plan_explain(plan, text, need[0], need))
        return ffi.string(text).decode()

    def forward(self, plan, **operands):
        return self._call(plan, self.lib.SPATTN_OP_FORWARD, "spattn_forward", operands)

    def forward_again(self, plan, **operands):
        """The same of a cache, when its workspace has the layout, as it has in a model's second layer."""
        return self._call(plan, self.lib.SPATTN_OP_FORWARD, "spattn_forward", operands,
                          self.lib.SPATTN_FORWARD_SAME_STEP)

    def backward(self, plan, **operands):
        return self._call(plan, self.lib.SPATTN_OP_BACKWARD, "spattn_backward", operands)

    def cache_append(self, problem, flags=0, **operands):
        """A function without arguments that brings tokens to a cache, and keeps its operands alive."""
        views = {name: view(tensor) for name, tensor in operands.items()}
        stream = ffi.cast("void *", torch.cuda.current_stream().cuda_stream)
        args = sized("spattn_cache_append_args", flags=flags, stream=stream,
                     **{name: tensor for name, (tensor, *_) in views.items()})
        keep = operands, views
        return lambda: keep and self.check(self.lib.spattn_cache_append(self.context, problem, args))

    def _call(self, plan, op, function, operands, flags=0):
        """A function without arguments that makes the call, and keeps its operands alive. With flags it is made once
        before, without them."""
        need, align = ffi.new("size_t *"), ffi.new("size_t *")
        self.check(self.lib.spattn_plan_workspace(plan, op, need, align))
        workspace = torch.empty(max(1, need[0]), dtype=torch.uint8, device="cuda")
        views = {name: view(tensor) for name, tensor in operands.items()}
        args = sized(function + "_args", stream=ffi.cast("void *", torch.cuda.current_stream().cuda_stream),
                     workspace=ffi.cast("void *", workspace.data_ptr()), workspace_bytes=need[0],
                     **{name: tensor for name, (tensor, *_) in views.items()})
        keep, run = (operands, views, workspace), getattr(self.lib, function)
        if flags:
            self.check(run(plan, args))
            args.flags = flags
        return lambda: keep and self.check(run(plan, args))
