# SPDX-License-Identifier: MIT
"""A sequence on several ranks, processes of MPI or the like. For torch: sparseattn.torch.ContextParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

import numpy as np

from ._arrays import read_dtype, tensor_in, tensor_out
from ._core import (
    ArgumentError,
    Context,
    DTypeError,
    OfThisProcess,
    ShapeError,
    check,
    default_context,
    ffi,
    integer,
    lib,
    own,
    required_context,
    sized,
)
from ._patterns import as_pattern
from ._plans import Plan
from ._problem import make_problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._patterns import AnyPattern, Pattern

    Arrays = tuple[NDArray[Any] | None, ...]


_SEEN = ("seen_k", "seen_v", "seen_k_scales", "seen_v_scales")


class Peer(NamedTuple):
    """What goes between a rank and another: nothing, where that is itself.

    Bytes [sent] of what `pack` returns are copied to the other's [received] before it unpacks. On the way back, bytes
    [back_received] of what `pack_gradients` returns are copied to the other's [back_sent], where it adds them.
    """

    tokens_sent: int  #: whose keys and values go to it
    tokens_received: int  #: whose keys and values come from it
    sent: slice  #: its part of what `pack` returns
    received: slice  #: its part of what `unpack` takes
    back_sent: slice  #: its part of what `add_gradients` takes: another than sent with float8 alone
    back_received: slice  #: its part of what `pack_gradients` returns, likewise


class Sharding(OfThisProcess):
    """What one of several ranks has of a sequence: the plan of its queries, and whose keys and values they see.

        sharding = sa.Sharding(pattern, comm.size, comm.rank, seq=131072, heads_q=8, head_dim=128, backward=True)
        sent, received = sharding.pack(k, v), sharding.empty_received()
        ...                                                # sent[peer.sent] goes to each other rank's received[...]
        seen_k, seen_v = sharding.unpack(received, k, v)
        out, lse = sharding.plan.forward(q, seen_k, seen_v, return_lse=True)
        dq, seen_dk, seen_dv = sharding.plan.backward(q, seen_k, seen_v, out, lse, dout)
        back = sharding.pack_gradients(seen_dk, seen_dv)   # back[peer.back_received] goes to its [peer.back_sent]
        dk, dv = sharding.add_gradients(came_back, seen_dk, seen_dv)

    Before a rank attends, it receives the keys and values that its queries see and others hold, in blocks of 128 tokens,
    and no more; their gradients go back, and are added up there: the rank's own first, then those of others in the order
    of ranks, in float32 (float64 of such arrays). How bytes travel is the caller's, say MPI's Alltoallv. All ranks make
    theirs of equal arguments, but for rank. A sink's gradient has, on each rank, the part of its queries.

    With a dtype of float8_e4m3fn keys and values go as they are, a byte an element, and gradients come back as
    bfloat16. Rows may have scales, which `scales` sends with them, so that ranks may round their own tokens:

        sent = sharding.pack(k, v, k_scales, v_scales)
        seen_k, seen_v, seen_k_scales, seen_v_scales = sharding.unpack(received, k, v, k_scales, v_scales)

    Scales that all ranks know need not be sent: one for each head that is the same everywhere, or none, go to the plan
    as they are, as do scales of queries, which are the rank's own.

    pattern      over all tokens: a Pattern or its text
    ranks, rank  how many there are, and which one this is
    seq          tokens of all ranks
    split        who holds which tokens. "contiguous": equal shares, one after the other. "zigzag": of twice as many
                 shares rank r holds number r and, counted from the end, number r again, so that causal attention is as
                 much work for all. Or, for each rank, the [(begin, end), ...] that it holds, in its order; every token
                 is held once, and each rank holds one at least
    scales       with float8: exchanges have scales of rows, too
    options      those of Plan, but for seq_q, seq_k, q_offset and caches

    Raises ArgumentError, DTypeError, UnsupportedError: .argument names the field, "options.ranges".
    """

    def __init__(
        self,
        pattern: AnyPattern,
        ranks: int,
        rank: int,
        *,
        seq: int,
        heads_q: int,
        head_dim: int,
        batch: int = 1,
        heads_kv: int | None = None,
        head_dim_v: int | None = None,
        dtype: Any = np.float32,
        axes: str = "bshd",
        split: str | Sequence[Sequence[tuple[int, int]]] = "contiguous",
        value_in_key: bool = False,
        scales: bool = False,
        context: Context | None = None,
        **options: Any,
    ):
        self.dtype, code = self._read_dtype(dtype, "problem.dtype")
        problem = make_problem(
            code,
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_q if heads_kv is None else heads_kv,
            seq_q=seq,
            seq_k=seq,
            head_dim=head_dim,
            head_dim_v=head_dim if head_dim_v is None else head_dim_v,
            axes=axes,
            value_in_key=value_in_key,
            **options,
        )
        context = default_context() if context is None else required_context(context)
        whole = as_pattern(pattern)
        sharding, _ranges = _read_split(split, ranks, rank)
        sharding.flags = lib.SPATTN_SHARDING_SCALES if scales else 0
        arguments = context._handle, whole._handle, problem, sharding, self._stream()
        self._handle = own("spattn_sharding", lib.spattn_sharding_create, *arguments)
        self._axes, self._value_in_key, self.sends_scales = axes, value_in_key, bool(scales)
        #: which rank this is
        self.rank = rank
        #: [(begin, end), ...] of the tokens that this rank holds, in their order
        self.ranges = self.ranges_of(rank)
        #: how many these are
        self.tokens = sum(end - begin for begin, end in self.ranges)
        #: [(begin, end), ...] of the tokens whose keys the plan takes, rising: those that this rank holds or receives, with
        #: a few between them that nobody here sees; with lists of a run, which name tokens, all
        self.seen = self._read_ranges(lambda *to: lib.spattn_sharding_seen(self._handle, *to, ffi.new("int64_t *")))
        #: how many these are
        self.keys = sum(end - begin for begin, end in self.seen)
        #: of each range that this rank holds, where it begins among these keys
        self.places = [sum(max(0, min(end, first) - begin) for begin, end in self.seen) for first, _ in self.ranges]
        problem.seq_q, problem.seq_k = self.tokens, self.keys
        #: the Plan of this rank's queries: seq_q is tokens, seq_k is keys
        self.plan = self._adopt(own("spattn_plan", lib.spattn_sharding_plan, self._handle), whole, problem)
        self._last = self.peer(ranks - 1)  # whose parts end where all do
        dims = problem.head_dim, problem.head_dim_v
        self._held = [self.plan._shape(batch, problem.heads_kv, self.tokens, dim) for dim in dims]

    def ranges_of(self, rank: int) -> list[tuple[int, int]]:
        """The [(begin, end), ...] that a rank holds. Raises ArgumentError: .argument is "rank"."""
        rank = integer(rank, "rank")
        return self._read_ranges(lambda *to: lib.spattn_sharding_ranges(self._handle, rank, *to))

    def _read_ranges(self, read: Callable[[Any, Any], int]) -> list[tuple[int, int]]:
        count = ffi.new("int64_t *")
        check(read(ffi.NULL, count))
        ranges = np.empty((count[0], 2), np.int64)
        check(read(tensor_out(ranges, "ranges"), count))
        return [(begin, end) for begin, end in ranges.tolist()]

    def peer(self, rank: int) -> Peer:
        """What goes between this rank and another. Raises ArgumentError: .argument is "rank"."""
        peer = sized("spattn_peer")
        check(lib.spattn_sharding_peer(self._handle, integer(rank, "rank"), peer))
        sent = slice(peer.sent_offset, peer.sent_offset + peer.sent_bytes)
        received = slice(peer.received_offset, peer.received_offset + peer.received_bytes)
        back_sent = slice(peer.back_sent_offset, peer.back_sent_offset + peer.back_sent_bytes)
        back_received = slice(peer.back_received_offset, peer.back_received_offset + peer.back_received_bytes)
        return Peer(peer.tokens_sent, peer.tokens_received, sent, received, back_sent, back_received)

    def local(self, x: Any, axis: int = 1) -> Any:
        """This rank's tokens of an array that has all of them along that axis, which may count from the last one, -1.

        Raises IndexError where there is no such axis, or it has not so many tokens.
        """
        return self._join(x, axis, self.ranges)

    def own_of(self, x: Any, axis: int = 1) -> Any:
        """This rank's tokens of an array that has those of `seen` along that axis. Raises as local."""
        own = [(place, place + end - begin) for place, (begin, end) in zip(self.places, self.ranges)]
        return self._join(x, axis, own)

    def empty_sent(self) -> Any:
        """Room for gradients that come back: bytes, the parts of one rank after the other."""
        return self._empty_bytes(self._last.back_sent.stop)

    def empty_received(self) -> Any:
        """Room for keys and values that come from others, likewise."""
        return self._empty_bytes(self._last.received.stop)

    def pack(self, k: Any, v: Any = None, k_scales: Any = None, v_scales: Any = None) -> Any:
        """What goes to others: bytes, the part of one rank after the other.

        k         [batch, tokens, heads_kv, head_dim], in the sharding's axes and dtype
        v         the same with head_dim_v; None with value_in_key
        k_scales  float32 [batch, tokens, heads_kv], as k without head_dim, of a sharding with scales; else None
        v_scales  the same of v; None with value_in_key

        Raises ShapeError, DTypeError, ArgumentError: .argument is the name above; in all that follow, "buffer" or
        "buffer_bytes" for bytes, and "seen_k" or "seen_v" for gradients of another shape or dtype.
        """
        sent = self._empty_bytes(self._last.sent.stop)
        held = {"k": k, "v": v, "k_scales": k_scales, "v_scales": v_scales}
        self._exchange(lib.SPATTN_EXCHANGE_PACK, sent, held)
        return sent

    def unpack(self, received: Any, k: Any, v: Any = None, k_scales: Any = None, v_scales: Any = None) -> Arrays:
        """Keys and values of the tokens in `seen`, and with scales those of both; what nobody sees may be anything.

        received            bytes that others packed, uint8
        k, v                as in pack
        k_scales, v_scales  likewise
        """
        seen = self.empty_seen()
        held = {"k": k, "v": v, "k_scales": k_scales, "v_scales": v_scales}
        self._exchange(lib.SPATTN_EXCHANGE_UNPACK, received, held, dict(zip(_SEEN, seen)))
        return seen

    def pack_gradients(self, seen_dk: Any, seen_dv: Any = None) -> Any:
        """What goes back to others: bytes, which lie as those that came from them.

        seen_dk, seen_dv  [batch, keys, heads_kv, ...], as the plan's backward returns them
        """
        received = self._empty_bytes(self._last.back_received.stop)
        self._exchange(lib.SPATTN_EXCHANGE_PACK_GRADIENTS, received, {"seen_k": seen_dk, "seen_v": seen_dv})
        return received

    def add_gradients(self, sent: Any, seen_dk: Any, seen_dv: Any = None) -> Arrays:
        """Gradients (dk, dv) of this rank's own keys and values; dv is None with value_in_key.

        sent  bytes that came back, which lie as those that pack returned
        """
        dk, dv = held = self._empty_pair(self._held, self.plan._out_dtype)
        seen = {"seen_k": seen_dk, "seen_v": seen_dv}
        self._exchange(lib.SPATTN_EXCHANGE_ADD_GRADIENTS, sent, seen, {"k": dk, "v": dv})
        return held

    def unpack_received(
        self, received: Any, seen_k: Any, seen_v: Any = None, seen_k_scales: Any = None, seen_v_scales: Any = None
    ) -> None:
        """unpack into arrays that have this rank's own keys and values already, at `places`, and their scales."""
        seen = dict(zip(_SEEN, (seen_k, seen_v, seen_k_scales, seen_v_scales)))
        self._exchange(lib.SPATTN_EXCHANGE_UNPACK, received, {}, seen)

    def add_gradients_in_place(self, sent: Any, seen_dk: Any, seen_dv: Any = None) -> None:
        """add_gradients, whose sums take the place of this rank's own gradients in these: see own_of."""
        self._exchange(lib.SPATTN_EXCHANGE_ADD_GRADIENTS, sent, {}, {"seen_k": seen_dk, "seen_v": seen_dv})

    def empty_seen(self) -> tuple[Any, ...]:
        """Room for keys and values of the tokens in `seen`, and with scales for those of both."""
        shapes = [self.plan._k_shape, self.plan._v_shape]
        seen = self._empty_pair(shapes, self.dtype)
        if not self.sends_scales:
            return seen
        return *seen, *self._empty_pair([shape[:-1] for shape in shapes], self.plan._float32)

    def _empty_pair(self, shapes: list[tuple[int, ...]], dtype: Any) -> tuple[Any, Any]:
        of_k, of_v = shapes
        keys = self.plan._empty(of_k, dtype)
        return keys, None if self._value_in_key else self.plan._empty(of_v, dtype)

    def _exchange(self, step: int, buffer: Any, read: dict[str, Any], written: dict[str, Any] | None = None) -> None:
        """One step of the library's. Arrays by the names of its fields; None is left out."""
        tensors = {name: self._tensor(x, name, False) for name, x in read.items() if x is not None}
        tensors |= {name: self._tensor(x, name, True) for name, x in (written or {}).items() if x is not None}
        args = sized("spattn_exchange_args", **tensors)
        address, args.buffer_bytes = self._memory_of(buffer)
        args.buffer, args.stream = ffi.cast("void *", address), self._stream()
        check(lib.spattn_exchange(self._handle, step, args))

    # ---- what is NumPy's: sparseattn.torch has its own ----

    def _read_dtype(self, dtype: Any, argument: str) -> tuple[Any, tuple[int, int]]:
        return read_dtype(dtype, argument)

    def _adopt(self, handle: Any, pattern: Pattern, problem: Any) -> Plan:
        return Plan._adopt(handle, pattern, problem, self._axes, self.dtype)

    def _stream(self) -> Any:
        return ffi.NULL

    def _empty_bytes(self, size: int) -> Any:
        return np.empty(size, np.uint8)

    def _join(self, x: Any, axis: int, ranges: list[tuple[int, int]]) -> Any:
        return np.take(x, np.concatenate([np.arange(*bounds) for bounds in ranges]), axis)

    def _tensor(self, array: Any, argument: str, writes: bool) -> Any:
        return tensor_out(array, argument) if writes else tensor_in(array, argument)

    def _memory_of(self, buffer: Any) -> tuple[int, int]:
        """Address and size of an array of bytes."""
        if not isinstance(buffer, np.ndarray) or buffer.dtype != np.uint8 or not buffer.flags.c_contiguous:
            shape = f"{buffer.dtype} array" if isinstance(buffer, np.ndarray) else type(buffer).__name__
            message = f"argument buffer is {shape}; accepted: an array of bytes, uint8, without gaps"
            raise ShapeError(message, "SPATTN_E_SHAPE", "buffer")
        return buffer.ctypes.data, buffer.nbytes


def _read_split(split: Any, ranks: int, rank: int) -> tuple[Any, Any]:
    """A spattn_sharding_options*, and what must live as long as it does."""
    options = sized("spattn_sharding_options", ranks=ranks, rank=rank)
    if isinstance(split, str):
        named = {"contiguous": lib.SPATTN_SPLIT_CONTIGUOUS, "zigzag": lib.SPATTN_SPLIT_ZIGZAG}
        if split not in named:
            message = f"argument split is {split!r}; accepted: 'contiguous', 'zigzag', or ranges of each rank"
            raise ArgumentError(message, "SPATTN_E_ARGUMENT", "split")
        options.split = named[split]
        return options, None
    try:
        of_all = [[(integer(begin, "split"), integer(end, "split")) for begin, end in of_rank] for of_rank in split]
    except (TypeError, ValueError):  # such as ranges that are not those of a rank
        message = f"argument split is {split!r}; accepted: 'contiguous', 'zigzag', or of each rank [(begin, end), ...]"
        raise DTypeError(message, "SPATTN_E_DTYPE", "split") from None
    if len(of_all) != ranks:
        message = f"argument split has ranges of {len(of_all)} ranks; accepted: of each of {ranks}"
        raise ArgumentError(message, "SPATTN_E_ARGUMENT", "split")
    rows = [(number, begin, end) for number, of_rank in enumerate(of_all) for begin, end in of_rank]
    ranges = tensor_in(np.array(rows, np.int64).reshape(-1, 3), "options.ranges")
    options.ranges = ranges
    return options, ranges
