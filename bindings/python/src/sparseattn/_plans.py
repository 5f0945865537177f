# SPDX-License-Identifier: MIT
"""Plans, and attention in one call."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from ._arrays import as_array, dtype_code, tensor_in, tensor_out
from ._core import ArgumentError, Context, ShapeError, check, default_context, ffi, lib, own, read_text, sized, string
from ._patterns import Pattern, Stats, as_pattern, read_stats

_AXES = {"bshd": lib.SPATTN_BSHD, "bhsd": lib.SPATTN_BHSD, "thd": lib.SPATTN_THD}
_AXIS_NAMES = {"b": "batch", "s": "seq", "t": "tokens", "h": "heads", "d": "head_dim"}


class _Scratch(threading.local):
    """Memory for the calls of one thread: it grows to the largest workspace that a call there needed."""

    memory: np.ndarray | None = None

    def take(self, bytes: int) -> np.ndarray:
        # Taken, not shared: should Python code run on this thread before it is given back, that gets memory of its own.
        memory, self.memory = self.memory, None
        return memory if memory is not None and memory.size >= bytes else np.empty(bytes, dtype=np.uint8)

    def give_back(self, memory: np.ndarray) -> None:
        self.memory = memory


_scratch = _Scratch()


class Plan:
    """A pattern compiled for shapes: kernels chosen, lists of blocks made. Immutable; any number of threads may run it.

    pattern                 a Pattern or its text
    heads_q, seq_q, head_dim          sizes of q
    batch                   of all; 1 with "thd"
    heads_kv, seq_k         of k and v; None is heads_q, seq_q. heads_q is a multiple of heads_kv
    head_dim_v              of v and out; None is head_dim
    dtype                   of q, k, v, out and their gradients: float32, float16, float64, or bfloat16 of ml_dtypes
    axes                    "bshd": arrays are [batch, seq, heads, head_dim]; "bhsd": [batch, heads, seq, head_dim];
                            "thd": [tokens, heads, head_dim], sequences of several lengths one after the other, which
                            per_document or documents tells apart; seq_q and seq_k are all tokens
    scale                   factor on q kT; None is 1 / sqrt(head_dim)
    softcap                 scores are softcap tanh(scale q kT / softcap); None is none. Gemma 2
                            (https://arxiv.org/abs/2408.00118)
    sink_logits             every call brings sink_logits: a learned score without a value for each query head, as in
                            gpt-oss (https://arxiv.org/abs/2508.10925)
    value_in_key            v is k[..., :head_dim_v] and None in every call, as in the latent attention of DeepSeek-V2
                            (https://arxiv.org/abs/2405.04434)
    q_offset                position of the first query; None is seq_k - seq_q
    backward                backward will be called
    deterministic           bit-equal results between calls; on the CPU they always are
    reference               the plain double-precision kernels: slow, the truth
    context                 where it runs; None is default_context()

    Raises ArgumentError, DTypeError, UnsupportedError: .argument names the field, "problem.heads_kv".
    """

    def __init__(
        self,
        pattern: Pattern | str,
        *,
        batch: int = 1,
        heads_q: int,
        seq_q: int,
        head_dim: int,
        heads_kv: int | None = None,
        seq_k: int | None = None,
        head_dim_v: int | None = None,
        dtype: Any = np.float32,
        axes: str = "bshd",
        scale: float | None = None,
        softcap: float | None = None,
        sink_logits: bool = False,
        value_in_key: bool = False,
        q_offset: int | None = None,
        backward: bool = False,
        deterministic: bool = False,
        reference: bool = False,
        context: Context | None = None,
    ):
        flags = {
            lib.SPATTN_PLAN_BACKWARD: backward,
            lib.SPATTN_PLAN_DETERMINISTIC: deterministic,
            lib.SPATTN_PLAN_REFERENCE: reference,
            lib.SPATTN_PLAN_Q_OFFSET: q_offset is not None,
            lib.SPATTN_PLAN_SCALE: scale is not None,
            lib.SPATTN_PLAN_VALUE_IN_KEY: value_in_key,
            lib.SPATTN_PLAN_SINK_LOGITS: sink_logits,
        }
        self._axes, self._heads_q, self._sink_logits, self._value_in_key = axes, heads_q, sink_logits, value_in_key
        self.dtype, code, bits = self._read_dtype(dtype)
        heads_kv = heads_q if heads_kv is None else heads_kv
        seq_k = seq_q if seq_k is None else seq_k
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        problem = sized(
            "spattn_problem",
            flags=sum(flag for flag, is_set in flags.items() if is_set),
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_kv,
            seq_q=seq_q,
            seq_k=seq_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            axes=_read_axes(axes),
            scale=scale or 0.0,
            softcap=softcap or 0.0,
            q_offset=q_offset or 0,
        )
        problem.dtype.code, problem.dtype.bits, problem.dtype.lanes = code, bits, 1
        self._pattern = as_pattern(pattern)  # for the arrays that it may have borrowed
        handles = (context or default_context())._handle, self._pattern._handle
        self._handle = own("spattn_plan", lib.spattn_plan_create, *handles, problem, ffi.NULL)
        self._q_shape = self._shape(batch, heads_q, seq_q, head_dim)
        self._k_shape = self._shape(batch, heads_kv, seq_k, head_dim)
        self._v_shape = self._shape(batch, heads_kv, seq_k, head_dim_v)
        self._out_shape = self._shape(batch, heads_q, seq_q, head_dim_v)
        self._lse_shape = (heads_q, seq_q) if axes == "thd" else (batch, heads_q, seq_q)

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any = None,
        *,
        indices: Any = None,
        index_counts: Any = None,
        sink_logits: Any = None,
        out: np.ndarray | None = None,
        return_lse: bool = False,
        return_max_logits: bool = False,
    ) -> Any:
        """softmax(scale q kT) v over the kept pairs: out, or (out, lse, max_logits) of which return_... asks for some.

        q    [batch, seq_q, heads_q, head_dim], in the plan's axes and dtype; any strides
        k    [batch, seq_k, heads_kv, head_dim]
        v    [batch, seq_k, heads_kv, head_dim_v]; None in a plan with value_in_key
        out  [batch, seq_q, heads_q, head_dim_v], written and returned where given; overlaps no input
        lse  float32 [batch, heads_q, seq_q], [heads_q, tokens] with "thd": log(sum(exp(scale q kT))). A query that
             sees no key has out 0 and lse -inf.
        max_logits    shaped as lse: the largest score of each query, -inf where it sees no key
        sink_logits   float32 [heads_q], in a plan that has them: counts in lse as one more score
        indices       int32 or int64 [batch, rows, heads_kv, max], without batch in "thd": the lists of runtime_tokens,
                      whose rows are the queries, or of runtime_blocks, whose rows are blocks of them
        index_counts  int32 or int64 [batch, rows, heads_kv]: how many entries of each list count, from its first; None
                      is all

        Raises ShapeError, DTypeError, ArgumentError: .argument is the name above.
        """
        out = self._empty(self._out_shape, self.dtype) if out is None else out
        lse = self._empty(self._lse_shape, self._float32) if return_lse else None
        max_logits = self._empty(self._lse_shape, self._float32) if return_max_logits else None
        operands = {"q": q, "k": k, "v": v, "sink_logits": sink_logits}
        lists = {"indices": indices, "index_counts": index_counts}
        self._run(lib.SPATTN_OP_FORWARD, {**operands, **lists}, {"out": out, "lse": lse, "max_logits": max_logits})
        results = tuple(result for result in (out, lse, max_logits) if result is not None)
        return results if len(results) > 1 else out

    def backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        dout: Any,
        *,
        dlse: Any = None,
        indices: Any = None,
        index_counts: Any = None,
        sink_logits: Any = None,
    ) -> tuple[Any, ...]:
        """Gradients (dq, dk, dv), shaped as q, k, v; needs a plan with backward=True.

        dv is None in a plan with value_in_key: dk has both. A plan with sink_logits has a fourth, dsink_logits, float32
        [heads_q].

        q, k, v, out, lse  as in forward, out and lse as it returned them; so indices, index_counts, sink_logits
        dout               the gradient that arrives at out, shaped as it
        dlse               the gradient that arrives at lse, float32, shaped as it

        Raises as forward; ArgumentError for a plan without backward.
        """
        gradients = {
            "dq": self._empty(self._q_shape, self.dtype),
            "dk": self._empty(self._k_shape, self.dtype),
            "dv": None if self._value_in_key else self._empty(self._v_shape, self.dtype),
        }
        if self._sink_logits:
            gradients["dsink_logits"] = self._empty((self._heads_q,), self._float32)
        operands = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
        more = {"indices": indices, "index_counts": index_counts, "sink_logits": sink_logits}
        self._run(lib.SPATTN_OP_BACKWARD, {**operands, **more}, gradients)
        return tuple(gradients.values())

    def explain(self, all: bool = False) -> str:
        """Kernels, blocks, work, cost, and what else was considered and why not: text for people.

        all  names each kernel that could not serve this problem on this machine, instead of their numbers and reasons
        """
        return read_text(lib.spattn_plan_explain_all if all else lib.spattn_plan_explain, self._handle)

    def kernel(self, backward: bool = False) -> str:
        """Name of the kernel that forward, or backward, runs; "a,b" where the pattern runs in pieces, one by one.

        Raises ArgumentError for backward of a plan without it.
        """
        name = lib.spattn_plan_kernel(self._handle, lib.SPATTN_OP_BACKWARD if backward else lib.SPATTN_OP_FORWARD)
        if name == ffi.NULL:
            raise ArgumentError("the plan has no backward; accepted: plans with backward=True", "SPATTN_E_STATE", "op")
        return string(name)

    def stats(self) -> Stats:
        """Pairs, blocks, FLOPs and bytes of the compiled plan."""
        return read_stats(lib.spattn_plan_stats, self._handle)

    def workspace(self, backward: bool = False) -> int:
        """Bytes of scratch that a call takes. One such piece a thread is kept for the calls to come."""
        return self._workspace(lib.SPATTN_OP_BACKWARD if backward else lib.SPATTN_OP_FORWARD)[0]

    def _workspace(self, op: int) -> tuple[int, int]:
        bytes, align = ffi.new("size_t *"), ffi.new("size_t *")
        check(lib.spattn_plan_workspace(self._handle, op, bytes, align))
        return bytes[0], align[0]

    def _shape(self, batch: int, heads: int, seq: int, dim: int) -> tuple[int, ...]:
        return tuple({"b": batch, "s": seq, "t": seq, "h": heads, "d": dim}[axis] for axis in self._axes)

    def _call(self, op: int, tensors: dict[str, Any], scratch: int, stream: int = 0) -> None:
        """One call of the library; cffi lets other Python threads run meanwhile.

        scratch  address of as many bytes as _workspace says, and align more
        """
        name, function = (
            ("spattn_forward_args", lib.spattn_forward)
            if op == lib.SPATTN_OP_FORWARD
            else ("spattn_backward_args", lib.spattn_backward)
        )
        bytes, align = self._workspace(op)
        args = sized(name, workspace_bytes=bytes, **tensors)
        args.workspace = ffi.cast("void *", scratch + -scratch % align)
        args.stream = ffi.cast("void *", stream)
        check(function(self._handle, args))

    # ---- what is NumPy's: sparseattn.torch has its own ----

    _float32: Any = np.float32

    def _read_dtype(self, dtype: Any) -> tuple[Any, int, int]:
        dtype = np.dtype(dtype)
        return dtype, *dtype_code(dtype, "problem.dtype")

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def _run(self, op: int, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        tensors = {key: tensor_in(array, key) for key, array in inputs.items() if array is not None}
        tensors.update((key, tensor_out(array, key)) for key, array in outputs.items() if array is not None)
        memory = _scratch.take(sum(self._workspace(op)))
        try:
            self._call(op, tensors, memory.ctypes.data)
        finally:
            _scratch.give_back(memory)


def _read_axes(axes: str) -> int:
    if axes not in _AXES:
        accepted = ", ".join(map(repr, _AXES))
        raise ArgumentError(f"axes is {axes!r}; accepted: {accepted}", "SPATTN_E_RANGE", "problem.axes")
    return _AXES[axes]


def plan(pattern: Pattern | str, q: Any, k: Any, v: Any, *, axes: str = "bshd", **options: Any) -> Plan:
    """The plan for arrays of these shapes and this dtype; options are those of Plan.

    v None is value_in_key, with head_dim_v among the options where it is not that of k.

    Raises ShapeError where q, k or v has not as many axes as `axes`, and as Plan.
    """
    given = {"q": q, "k": k, "v": v}
    arrays = {name: as_array(array, name) for name, array in given.items() if array is not None}
    return Plan(pattern, **sizes_of(arrays, axes), **options)


def sizes_of(arrays: dict[str, Any], axes: str) -> dict[str, Any]:
    """The options of a Plan that the arrays q, k and, unless it lies in k, v determine."""
    _read_axes(axes)
    for name, array in arrays.items():
        if array.ndim != len(axes):
            order = ", ".join(_AXIS_NAMES[axis] for axis in axes)
            message = f"argument {name} has shape {list(array.shape)}; accepted: [{order}]"
            raise ShapeError(message, "SPATTN_E_SHAPE", name)
    sizes = {name: dict(zip(axes, array.shape)) for name, array in arrays.items()}
    of_q, of_k, seq = sizes["q"], sizes["k"], "t" if axes == "thd" else "s"
    return {
        "batch": of_q.get("b", 1),
        "heads_q": of_q["h"],
        "heads_kv": of_k["h"],
        "seq_q": of_q[seq],
        "seq_k": of_k[seq],
        "head_dim": of_q["d"],
        "dtype": arrays["q"].dtype,
        "axes": axes,
        **({"head_dim_v": sizes["v"]["d"]} if "v" in sizes else {"value_in_key": True}),
    }


def attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: Pattern | str,
    *,
    indices: Any = None,
    index_counts: Any = None,
    sink_logits: Any = None,
    out: np.ndarray | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    **options: Any,
) -> Any:
    """Sparse attention of NumPy arrays in one call: Plan.forward of plan(pattern, q, k, v, **options).

    q [batch, seq_q, heads_q, head_dim], k [batch, seq_k, heads_kv, head_dim], v [batch, seq_k, heads_kv, head_dim_v],
    float32, float16, float64 or bfloat16 (ml_dtypes); axes="bhsd" for heads before seq, "thd" for packed [tokens,
    heads, head_dim]. v None: its values are the first head_dim_v of k. indices, index_counts, sink_logits, out and
    return_...: as in Plan.forward. options: axes, scale, softcap, q_offset, head_dim_v, deterministic, reference,
    context. Returns out [batch, seq_q, heads_q, head_dim_v], or a tuple such as (out, lse). The context remembers
    plans, so equal calls plan once.

        out = attention(q, k, v, causal() & (sink(4) | window(1023, 0)))
    """
    made = plan(pattern, q, k, v, sink_logits=sink_logits is not None, **options)
    wanted = {"out": out, "return_lse": return_lse, "return_max_logits": return_max_logits}
    lists = {"indices": indices, "index_counts": index_counts}
    return made.forward(q, k, v, sink_logits=sink_logits, **lists, **wanted)


def attention_backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    pattern: Pattern | str,
    *,
    dlse: Any = None,
    indices: Any = None,
    index_counts: Any = None,
    sink_logits: Any = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Gradients (dq, dk, dv) of attention(q, k, v, pattern, return_lse=True, **options), which gave out and lse.

    With sink_logits (dq, dk, dv, dsink_logits); with v None dv is None: Plan.backward.
    """
    made = plan(pattern, q, k, v, backward=True, sink_logits=sink_logits is not None, **options)
    more = {"dlse": dlse, "indices": indices, "index_counts": index_counts, "sink_logits": sink_logits}
    return made.backward(q, k, v, out, lse, dout, **more)
