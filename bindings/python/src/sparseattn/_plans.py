# SPDX-License-Identifier: MIT
"""Plans: a pattern compiled for shapes, run any number of times."""

from __future__ import annotations

import functools
import os
import weakref
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from ._arrays import FLOAT8, as_array, dtype_code, form_tensor, read_dtype, readable, writable
from ._core import (
    ArgumentError,
    Context,
    OfThisProcess,
    UnsupportedError,
    check,
    default_context,
    ffi,
    integer,
    lib,
    own,
    read_text,
    real,
    required_context,
    size_of_bytes,
    string,
)
from ._frames import BACKWARD, FORWARD, Frame, HostMemory
from ._indexed import pattern_of_call
from ._libraries import module_of
from ._patterns import Pattern, Stats, as_pattern, pattern_named, read_stats
from ._problem import make_problem, read_axes, shape_of_lists, sizes_of
from ._step import OTHER_NUMBERS, Step, required_step

if TYPE_CHECKING:
    from typing import Literal, TypedDict

    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from ._patterns import AnyPattern

    class Lists(TypedDict, total=False):
        indices: Any
        index_counts: Any
        sink_logits: Any
        q_scales: Any
        k_scales: Any
        v_scales: Any

    class _Operands(Lists, total=False):
        starts: Any
        parents: Any
        page_table: Any
        query_offsets: Any
        step: Step | None
        out: Any


_Kind = TypeVar("_Kind", bound="Plan")


class Plan(OfThisProcess):
    """A pattern compiled for shapes: kernels chosen, lists of blocks made. Immutable; any number of threads may run it.
    A copy, also a deep one, is the plan itself; it is not pickled.

    pattern                 a Pattern or its text
    heads_q, seq_q, head_dim          sizes of q
    batch                   of all; 1 with "thd", but with starts the sequences that queries are of
    heads_kv, seq_k         of k and v; None is heads_q, seq_q. heads_q is a multiple of heads_kv
    head_dim_v              of v and out; None is head_dim
    dtype                   of q, k, v, out and their gradients: float32, float16, float64, or bfloat16 of ml_dtypes. Or
                            float8_e4m3fn of ml_dtypes, of q, k and v: each row of a token and head stands for its
                            elements times a scale, which calls may bring; out is bfloat16, and so are gradients, which
                            are those of what rows stand for. Without starts
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
    deterministic           bit-equal results between calls; on the CPU they always are, and on a GPU all but
                            those gradients that explain() names under "bits"
    reference               the plain double-precision kernels: slow, the truth
    tf32                    float32 products may round their operands to TF32, 11 significant bits, on GPUs
                            whose tensor cores take them; explain() names the kernel. Else it changes nothing
    starts                  keys lie in a cache that calls fill, for decoding and prefill in chunks: seq_k is how many
                            tokens it has room for, and every call brings starts, where its queries begin. The pattern
                            is that of the whole sequence, seq_k by seq_k, and cut to what is causal. Forward alone.
                            With "thd" seq_q is how many queries all entries have together, and every call brings
                            query_offsets, which are whose: prompts beside tokens that are decoded. Such caches have pages
    parents                 with starts: the queries of an entry are nodes of trees, drafts of several continuations as
                            SpecInfer verifies them (https://arxiv.org/abs/2305.09781), and every call brings parents
    page_size               with starts: keys lie in pages of so many tokens, and every call brings page_table, as in
                            PagedAttention (https://arxiv.org/abs/2309.06180). Divides seq_k; None is no pages
    cache_dtype             with starts: of k and v, where it is not dtype: float8_e4m3fn of ml_dtypes. Each row of a
                            token and kv head stands for its elements times a scale, which calls may bring
    context                 where it runs; None is default_context()

    Raises ArgumentError, DTypeError, UnsupportedError: .argument names the field, "problem.heads_kv".
    """

    def __init__(
        self,
        pattern: AnyPattern,
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
        tf32: bool = False,
        starts: bool = False,
        parents: bool = False,
        page_size: int | None = None,
        cache_dtype: Any = None,
        context: Context | None = None,
    ):
        self.dtype, code = self._read_dtype(dtype, "problem.dtype")
        cache_code = None if cache_dtype is None else self._read_dtype(cache_dtype, "problem.cache_dtype")[1]
        heads_kv = heads_q if heads_kv is None else heads_kv
        seq_k = seq_q if seq_k is None else seq_k
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        problem = make_problem(
            code,
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_kv,
            seq_q=seq_q,
            seq_k=seq_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            axes=axes,
            scale=scale,
            softcap=softcap,
            q_offset=q_offset,
            value_in_key=value_in_key,
            sink_logits=sink_logits,
            backward=backward,
            deterministic=deterministic,
            reference=reference,
            tf32=tf32,
            starts=starts,
            parents=parents,
            page_size=page_size,
            cache_dtype=cache_code,
        )
        self._pattern = as_pattern(pattern)  # for the arrays that it may have borrowed
        context = default_context() if context is None else required_context(context)
        handles = context._handle, self._pattern._handle
        self._take(own("spattn_plan", lib.spattn_plan_create, *handles, problem, self._stream()), problem, axes)

    @classmethod
    def _adopt(cls: type[_Kind], handle: Any, pattern: Pattern, problem: Any, axes: str, dtype: Any) -> _Kind:
        """A handle that the library has made of this spattn_problem."""
        made = cls.__new__(cls)
        made.dtype, made._pattern = dtype, pattern
        made._take(handle, problem, axes)
        return made

    def _take(self, handle: Any, problem: Any, axes: str) -> None:
        p = problem
        self._handle, self._axes, self._heads_q = handle, axes, p.heads_q
        self._out_dtype = self._bfloat16() if (p.dtype.code, p.dtype.bits) == FLOAT8 else self.dtype
        self._sink_logits = bool(p.flags & lib.SPATTN_PLAN_SINK_LOGITS)
        self._value_in_key = bool(p.flags & lib.SPATTN_PLAN_VALUE_IN_KEY)
        self._backward = bool(p.flags & lib.SPATTN_PLAN_BACKWARD)
        self._starts = bool(p.flags & lib.SPATTN_PLAN_STARTS)
        self._frames: dict[int, list[Frame]] = {FORWARD: [], BACKWARD: []}
        self._q_shape = self._shape(p.batch, p.heads_q, p.seq_q, p.head_dim)
        self._k_shape = self._shape(p.batch, p.heads_kv, p.seq_k, p.head_dim)
        self._v_shape = self._shape(p.batch, p.heads_kv, p.seq_k, p.head_dim_v)
        self._out_shape = self._shape(p.batch, p.heads_q, p.seq_q, p.head_dim_v)
        self._lse_shape = (p.heads_q, p.seq_q) if axes == "thd" else (p.batch, p.heads_q, p.seq_q)

    @overload
    def forward(
        self,
        q: Any,
        k: Any,
        v: Any = None,
        *,
        return_lse: Literal[False] = False,
        return_max_logits: Literal[False] = False,
        **options: Unpack[_Operands],
    ) -> NDArray[Any]: ...

    @overload
    def forward(
        self,
        q: Any,
        k: Any,
        v: Any = None,
        *,
        return_lse: bool = False,
        return_max_logits: bool = False,
        **options: Unpack[_Operands],
    ) -> Any: ...

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any = None,
        *,
        indices: Any = None,
        index_counts: Any = None,
        sink_logits: Any = None,
        starts: Any = None,
        parents: Any = None,
        page_table: Any = None,
        query_offsets: Any = None,
        q_scales: Any = None,
        k_scales: Any = None,
        v_scales: Any = None,
        step: Step | None = None,
        out: Any = None,
        return_lse: bool = False,
        return_max_logits: bool = False,
    ) -> Any:
        """softmax(scale q kT) v over the kept pairs: out, or (out, lse, max_logits) of which return_... asks for some.

        q    [batch, seq_q, heads_q, head_dim], in the plan's axes and dtype; any strides
        k    [batch, seq_k, heads_kv, head_dim]
        v    [batch, seq_k, heads_kv, head_dim_v]; None in a plan with value_in_key
        out  [batch, seq_q, heads_q, head_dim_v], written and returned where given; overlaps no input. bfloat16 in a
             plan whose dtype is float8
        lse  float32 [batch, heads_q, seq_q], [heads_q, tokens] with "thd": log(sum(exp(scale q kT))). A query that
             sees no key has out 0 and lse -inf.
        max_logits    shaped as lse: the largest score of each query, -inf where it sees no key
        sink_logits   float32 [heads_q], in a plan that has them: counts in lse as one more score
        indices       int32 or int64 [batch, rows, heads_kv, max], without batch in "thd": the lists of runtime_tokens,
                      whose rows are the queries, or of runtime_blocks, whose rows are blocks of them. In a plan with
                      starts they name tokens of the sequence
        index_counts  int32 or int64 [batch, rows, heads_kv]: how many entries of each list count, from its first; None
                      is all
        starts        int32 or int64 [batch], in a plan that has them: query i of an entry is row starts + i of the
                      pattern. Rows outside [0, seq_k) see nothing, and no query sees a key after its own, so that what
                      was not written yet may hold anything
        parents       int32 or int64 [batch, seq_q], [tokens] with "thd", in a plan that has them: the number of each
                      query's parent among the queries of its entry, from 0, or -1 of a root, which follows token
                      starts - 1. Of the keys from starts on that the pattern keeps, a query sees its own and those of
                      its ancestors alone. What is not below the query's own number counts as -1
        page_table    int32 or int64 [batch, seq_k / page_size], in a plan with a page_size: token t of entry b is token
                      t % page_size of page page_table[b, t // page_size]. Entries that no query needs may hold
                      anything. k is then [pages, page_size, heads_kv, head_dim], with "bhsd" [pages, heads_kv,
                      page_size, head_dim], and v the same with head_dim_v, of any number of pages. From one page to the
                      next are as many rows in v as in k, as where neither is a view
        query_offsets int32 or int64 [batch + 1], in a plan with starts and "thd": queries query_offsets[b] up to
                      query_offsets[b + 1] are those of entry b, none or any number; those around all see nothing
        q_scales      float32 [batch, seq_q, heads_q], as q without head_dim, in a plan whose dtype is float8: what the
                      elements of each row are multiplied by. None is 1. Strides may be 0, as where np.broadcast_to
                      gives heads one scale each
        k_scales      float32 [batch, seq_k, heads_kv], or [pages, page_size, heads_kv], as k without head_dim, in a
                      plan whose dtype or cache_dtype is float8; else as q_scales
        v_scales      as k_scales; None in a plan with value_in_key
        step          a sparseattn.Step, in a plan with starts: what the calls of a model's layers share, all of which
                      bring the same starts, page_table, query_offsets and parents

        Raises ShapeError, DTypeError, ArgumentError: .argument is the name above.
        """
        if step is not None:
            self._check_step(step)
        frame = self._take_frame(FORWARD)
        try:
            place = self._place
            is_plain = q is not None and k is not None and v is not None
            is_plain = is_plain and sink_logits is None and indices is None and index_counts is None
            is_plain = is_plain and starts is None and page_table is None and query_offsets is None
            is_plain = is_plain and parents is None and q_scales is None and k_scales is None and v_scales is None
            if frame.forms is None or not is_plain or not self._place_again(frame, q, k, v):
                given = {"q": q, "k": k, "v": v, "sink_logits": sink_logits}
                given |= {"indices": indices, "index_counts": index_counts}
                given |= {"starts": starts, "page_table": page_table, "query_offsets": query_offsets}
                given |= {"parents": parents, "q_scales": q_scales, "k_scales": k_scales, "v_scales": v_scales}
                frame.forms = None  # those of some operands, if one of them is refused
                copies = [place(frame, name, array) for name, array in given.items()]
                frame.forms = self._forms(frame) if is_plain and all(x is None for x in copies) else None
            if out is None:
                out = self._empty(self._out_shape, self._out_dtype)
                place(frame, "out", out, True, True)
            else:
                place(frame, "out", out, True)
            if return_lse or return_max_logits or "lse" in frame.tensors or "max_logits" in frame.tensors:
                lse = self._empty(self._lse_shape, self._float32) if return_lse else None
                max_logits = self._empty(self._lse_shape, self._float32) if return_max_logits else None
                place(frame, "lse", lse, True, True)
                place(frame, "max_logits", max_logits, True, True)
                results = tuple(result for result in (out, lse, max_logits) if result is not None)
            else:
                results = (out,)
            if step is None:
                status = self._call(frame)
            else:
                numbers = {"starts": starts, "parents": parents}
                numbers |= {"page_table": page_table, "query_offsets": query_offsets}
                status = step._call(self, frame, numbers)
            if status:
                self._raise(status, indices, index_counts)
        finally:
            self._frames[FORWARD].append(frame)
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
        q_scales: Any = None,
        k_scales: Any = None,
        v_scales: Any = None,
    ) -> tuple[Any, ...]:
        """Gradients (dq, dk, dv), shaped as q, k, v and of the dtype of out; needs a plan with backward=True.

        dv is None in a plan with value_in_key: dk has both. A plan with sink_logits has a fourth, dsink_logits, float32
        [heads_q]. Where q, k and v are float8, gradients are those of what rows stand for, elements times scales.

        q, k, v, out, lse  as in forward, out and lse as it returned them; so indices, index_counts, sink_logits, and
                           q_scales, k_scales, v_scales
        dout               the gradient that arrives at out, shaped as it
        dlse               the gradient that arrives at lse, float32, shaped as it

        Raises as forward; ArgumentError for a plan without backward.
        """
        if not self._backward:
            raise _without_backward("plan")
        gradients = {
            "dq": self._empty(self._q_shape, self._out_dtype),
            "dk": self._empty(self._k_shape, self._out_dtype),
            "dv": None if self._value_in_key else self._empty(self._v_shape, self._out_dtype),
        }
        if self._sink_logits:
            gradients["dsink_logits"] = self._empty((self._heads_q,), self._float32)
        given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
        given |= {"indices": indices, "index_counts": index_counts, "sink_logits": sink_logits}
        given |= {"q_scales": q_scales, "k_scales": k_scales, "v_scales": v_scales}
        frame = self._take_frame(BACKWARD)
        try:
            copies = [self._place(frame, name, array) for name, array in given.items()]
            for name, array in gradients.items():
                self._place(frame, name, array, True, True)
            self._raise(self._call(frame), indices, index_counts)
        finally:
            self._frames[BACKWARD].append(frame)
        del copies  # what the library has read in place of arrays whose memory it cannot read
        return tuple(gradients.values())

    def __repr__(self) -> str:
        sizes = f"q {list(self._q_shape)}, k {list(self._k_shape)}, {self.dtype}, axes {self._axes}"
        return f"<{type(self).__name__} of {self._pattern}: {sizes}, {self.kernel()}>"

    def explain(self, all: bool = False) -> str:
        """Kernels, blocks, work, cost, and what else was considered and why not: text for people.

        all  names each kernel that could not serve this problem on this machine, instead of their numbers and reasons
        """
        return read_text(lib.spattn_plan_explain_all if all else lib.spattn_plan_explain, self._handle)

    def kernel(self, backward: bool = False) -> str:
        """Name of the kernel that forward, or backward, runs; "a,b" where the pattern runs in pieces, one by one.

        Raises ArgumentError for backward of a plan without it.
        """
        if backward and not self._backward:
            raise _without_backward("backward")
        return string(lib.spattn_plan_kernel(self._handle, BACKWARD if backward else FORWARD))

    def stats(self) -> Stats:
        """Pairs, blocks, FLOPs and bytes of the compiled plan."""
        return read_stats(lib.spattn_plan_stats, self._handle)

    def workspace(self, backward: bool = False) -> int:
        """Bytes of scratch that a call takes. A thread keeps one piece of it for its calls to come, of 256 MiB at most: a
        larger one is given back to the system when the call ends.

        Raises ArgumentError for backward of a plan without it.
        """
        if backward and not self._backward:
            raise _without_backward("backward")
        return self._workspace(BACKWARD if backward else FORWARD)[0]

    def _workspace(self, op: int) -> tuple[int, int]:
        bytes, align = ffi.new("size_t *"), ffi.new("size_t *")
        check(lib.spattn_plan_workspace(self._handle, op, bytes, align))
        return bytes[0], align[0]

    def _shape(self, batch: int, heads: int, seq: int, dim: int) -> tuple[int, ...]:
        return tuple({"b": batch, "s": seq, "t": seq, "h": heads, "d": dim}[axis] for axis in self._axes)

    def _check_step(self, step: Any) -> None:
        required_step(step)
        if not self._starts:
            message = "argument step is given to a plan without starts; accepted: None"
            raise ArgumentError(message, "SPATTN_E_STATE", "step")

    def _raise(self, status: int, indices: Any, index_counts: Any) -> None:
        """Raises what a status means. Of lists that are missing, or too many, the pattern's text says more."""
        try:
            check(status)
        except ArgumentError as error:
            lists = {"indices": indices, "index_counts": index_counts}
            if error.argument in lists and error.status in ("SPATTN_E_NULL", "SPATTN_E_STATE"):
                sizes = sizes_of(self._q_shape, self._k_shape, None, self._axes)
                given = [name for name, array in lists.items() if array is not None]
                shape_of_lists(str(self._pattern), given, sizes, self._axes)
            raise

    def _take_frame(self, op: int) -> Frame:
        # Taken, not shared: another thread, or the handler of a signal, takes one of its own.
        try:
            return self._frames[op].pop()
        except IndexError:
            return self._make_frame(op)

    def _make_frame(self, op: int) -> Frame:
        return Frame(op, *self._workspace(op))

    # ---- what is NumPy's: sparseattn.torch has its own ----

    _float32: Any = np.float32

    @staticmethod
    def _read_dtype(dtype: Any, argument: str) -> tuple[Any, tuple[int, int]]:
        """The dtype as the library of arrays has it, and its code and bits."""
        return read_dtype(dtype, argument)

    def _bfloat16(self) -> Any:
        """The dtype of out where that of q is float8."""
        return np.dtype("bfloat16")  # NumPy knows the name from ml_dtypes, as that of float8

    def _stream(self) -> Any:
        """The stream on which a plan's lists are copied to its device."""
        return ffi.NULL

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def _place(self, frame: Frame, name: str, array: Any, writes: bool = False, is_ours: bool = False) -> Any:
        """Makes the array, or None, an argument of the frame. Returns the copy that is read in its place, if any.

        is_ours  _empty made it
        """
        known = frame.tensors.get(name)
        if type(array) is np.ndarray and known is not None:
            flags = array.flags
            if (
                known[0] == (array.shape, array.strides, array.dtype)
                and flags.aligned
                and (flags.writeable or not writes)
            ):
                if known[1] is None:
                    known[2][0] = array.ctypes.data
                else:
                    known[1].data = ffi.from_buffer(array)
                return None
        if array is None:
            return frame.clear(name)
        given = array
        array = writable(array, name) if writes else readable(as_array(array, name), name)
        tensor, form = form_tensor(array, name), (array.shape, array.strides, array.dtype)
        # The memory's address costs a tenth as buffers have it, which know neither strides nor bfloat16.
        is_buffer = array.flags.c_contiguous and array.dtype.kind != "V"
        frame.set(name, form, tensor, is_buffer)[0] = array.ctypes.data
        return None if array is given else array

    def _forms(self, frame: Frame) -> Any:
        """What _place_again reads: Frame.forms. None for arrays that are no buffers."""
        forms, structs = frame.together()
        return None if None in structs else (forms, structs)

    def _place_again(self, frame: Frame, q: Any, k: Any, v: Any) -> bool:
        """Makes q, k and v arguments of a frame that had such before, and says whether they are of the same forms."""
        assert frame.forms is not None
        if not type(q) is type(k) is type(v) is np.ndarray:
            return False
        forms, (of_q, of_k, of_v) = frame.forms
        found = (q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype)
        if found != forms or not (q.flags.aligned and k.flags.aligned and v.flags.aligned):
            return False
        of_q.data, of_k.data, of_v.data = ffi.from_buffer(q), ffi.from_buffer(k), ffi.from_buffer(v)
        return True

    def _call(self, frame: Frame, scratch: Any = None) -> int:
        """The status of the call. scratch: of _make_scratch; None: this thread's."""
        return frame.run_on_host(self._handle) if scratch is None else frame.run_with(scratch.address, self._handle)

    def _make_scratch(self, size: int) -> Any:
        return HostMemory(size)

    def _queue(self) -> Any:
        """Behind which other calls the next one comes, on a GPU."""
        return None

    def _note(self, name: str, numbers: Any) -> Any:
        """What a step remembers of an argument, for _differs."""
        return np.array(as_array(numbers, name))

    def _differs(self, name: str, noted: Any, numbers: Any) -> str:
        """How an argument differs from the one that was noted; "" where it does not."""
        return "" if np.array_equal(noted, as_array(numbers, name)) else OTHER_NUMBERS


def _without_backward(argument: str) -> ArgumentError:
    message = "the plan has no backward; accepted: plans that were made with backward=True"
    return ArgumentError(message, "SPATTN_E_STATE", argument)


def find_plan(
    kind: type[Plan],
    context: Context,
    pattern: AnyPattern,
    device: Any,
    dtype: Any,
    shapes: tuple[Any, Any, Any],
    axes: str,
    scale: float | None,
    softcap: float | None,
    q_offset: int | None,
    head_dim_v: int | None,
    *flags: bool,
) -> Plan:
    """A plan of this kind, found again where an equal one is among those that the context used last.

    shapes  of q, k and v, the last of which is None where values lie in keys
    flags   sink_logits, backward, deterministic, reference, tf32
    """
    read_axes(axes)
    scale = scale if scale is None else real(scale, "problem.scale")
    softcap = softcap if softcap is None else real(softcap, "problem.softcap")
    q_offset = q_offset if q_offset is None else integer(q_offset, "problem.q_offset")
    head_dim_v = head_dim_v if head_dim_v is None else integer(head_dim_v, "problem.head_dim_v")
    key = (kind, device, dtype, shapes, axes, scale, softcap, q_offset, head_dim_v, flags)
    found: Plan = find(make_plan, context, pattern, key)
    return found


def find(make: Any, context: Context, pattern: AnyPattern, key: tuple[Any, ...]) -> Any:
    """make(context, pattern, *key), found again where it is among what the context used last."""
    if type(pattern) is str:
        name = pattern
    else:
        pattern = pattern if type(pattern) is Pattern else as_pattern(pattern)
        if pattern._kept:
            return make(context, pattern, *key)  # nobody may find what reads borrowed arrays when they are gone
        name = pattern._name
    look_up = getattr(context, "_look_up", None) or _remember(required_context(context))
    return look_up(make, name, _variables.get(_FORCE_KERNEL), key)


# os.environ encodes a name, raises, and catches, before it says None: a microsecond of each call. Its dict does not.
_variables: Any = getattr(os.environ, "_data", os.environ)
_FORCE_KERNEL: Any = "SPATTN_FORCE_KERNEL" if _variables is os.environ else os.environ.encodekey("SPATTN_FORCE_KERNEL")


def _remember(context: Context) -> Any:
    """The function that finds what was made for a context, which keeps it."""
    alive = weakref.ref(context)  # which has this function for a field
    plans = context._plan_cache or _PLANS
    most, held = max(plans, _PLANS) * _BYTES_A_PLAN, 0

    @functools.lru_cache(max(0, plans))
    def look_up(make: Any, name: str, forced: str | None, key: tuple[Any, ...]) -> Any:
        nonlocal held
        pattern = pattern_named(name)
        made = make(alive(), pattern, *key)
        size = _bytes_of(made, pattern)
        held += size
        if held > most:  # all go but the new one: the library, which has the same limit, knows those that were used last
            look_up.cache_clear()
            held = size
        return made

    context._look_up = look_up
    return look_up


_PLANS, _BYTES_A_PLAN = 64, 4 << 20  # what a context keeps where nobody says otherwise, as the library does


def _bytes_of(made: Any, pattern: Pattern) -> int:
    """About what keeping this takes: the arrays of its plan, if it has one, and those of the pattern."""
    plan = getattr(made, "plan", made)
    lists = plan.stats().layout_bytes if isinstance(plan, Plan) else 0
    return lists + size_of_bytes(lib.spattn_pattern_save, pattern._handle)


def make_plan(
    context: Context | None,
    pattern: Pattern,
    kind: Any,
    device: Any,
    dtype: Any,
    shapes: tuple[Any, Any, Any],
    axes: str,
    scale: float | None,
    softcap: float | None,
    q_offset: int | None,
    head_dim_v: int | None,
    flags: tuple[bool, ...],
) -> Plan:
    """A plan of this kind; all else as in find_plan."""
    kind._read_dtype(dtype, "q")  # of which Plan knows as problem.dtype
    options = options_of(dtype, shapes, axes, scale, softcap, head_dim_v, flags)
    options |= {"q_offset": q_offset, "context": context}
    made: Plan = kind(pattern, **options) if device is None else kind(pattern, device, **options)
    return made


def options_of(
    dtype: Any,
    shapes: tuple[Any, Any, Any],
    axes: str,
    scale: float | None,
    softcap: float | None,
    head_dim_v: int | None,
    flags: tuple[bool, ...],
) -> dict[str, Any]:
    """The options of a Plan for arrays of these shapes; flags as in find_plan."""
    options = sizes_of(*shapes, axes, head_dim_v)
    options |= zip(("sink_logits", "backward", "deterministic", "reference", "tf32"), flags)
    return options | {"dtype": dtype, "scale": scale, "softcap": softcap}


def plan(
    pattern: AnyPattern,
    q: Any,
    k: Any,
    v: Any,
    *,
    axes: str = "bshd",
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: bool = False,
    q_offset: int | None = None,
    head_dim_v: int | None = None,
    backward: bool = False,
    deterministic: bool = False,
    reference: bool = False,
    tf32: bool = False,
    starts: bool = False,
    parents: bool = False,
    page_table: Any = None,
    context: Context | None = None,
) -> Plan:
    """The plan for arrays of these shapes and dtypes; options are those of Plan.

    Of torch's tensors it is one of sparseattn.torch.plan, which computes with tensors. v None is value_in_key, with
    head_dim_v where it is not that of k.

    starts      the plan is one on a cache, k and v, whose calls bring starts. The cache may be of float8_e4m3fn, which
                is then the plan's cache_dtype
    parents     with starts: queries are nodes of trees, and calls bring parents, too
    page_table  [batch, seq_k / page_size] where the cache has pages: k is [pages, page_size, heads_kv, head_dim], or as
                axes says. Its shape is read, as those of k and v are, and its numbers come with each call

    Raises ShapeError where q, k or v has not as many axes as `axes`, UnsupportedError for arrays of JAX, CuPy and
    others, whose own functions keep their plans, and as Plan.
    """
    if type(q) is not np.ndarray and (module := module_of(q)) is not None:
        if not hasattr(module, "plan"):
            message = (
                f"argument q is {type(q).__module__}.{type(q).__name__}; accepted: arrays of NumPy and tensors of "
                f"torch; {module.__name__}.attention finds its plans again by itself"
            )
            raise UnsupportedError(message, "SPATTN_E_UNSUPPORTED", "q")
        made: Plan = module.plan(
            pattern,
            q,
            k,
            v,
            axes=axes,
            scale=scale,
            softcap=softcap,
            sink_logits=sink_logits,
            q_offset=q_offset,
            head_dim_v=head_dim_v,
            backward=backward,
            deterministic=deterministic,
            reference=reference,
            tf32=tf32,
            starts=starts,
            parents=parents,
            page_table=page_table,
            context=context,
        )
        return made
    q, k, v = as_array(q, "q"), as_array(k, "k"), v if v is None else as_array(v, "v")
    read_dtype(q.dtype, "q")
    table = None if page_table is None else as_array(page_table, "page_table").shape
    sizes = sizes_of(q.shape, k.shape, None if v is None else v.shape, axes, head_dim_v, table)
    return Plan(
        pattern_of_call(pattern, sizes["seq_k" if starts else "seq_q"], sizes["seq_k"]),
        **sizes,
        dtype=q.dtype,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        q_offset=q_offset,
        backward=backward,
        deterministic=deterministic,
        reference=reference,
        tf32=tf32,
        starts=starts,
        parents=parents,
        cache_dtype=k.dtype if dtype_code(k.dtype, "k") == FLOAT8 and k.dtype != q.dtype else None,
        context=context,
    )
