# SPDX-License-Identifier: MIT
"""Context parallelism: attention whose tokens lie on the processes of a group, each on a device of its own.

Every process has the queries, keys and values of its own tokens. Before it attends, it receives the keys and values that
its queries see and that others hold, block by block, and no others: of a window that is what lies beside its tokens, of
sinks the first block. Then its queries attend at their own positions, so that every pattern means what it means on one
device. Gradients of keys and values go back to who holds them and are added up there, always in the same order. What is
sent, and the plan of a process' queries, are those of sparseattn.Sharding; torch.distributed carries the bytes, of float8
half as many as of bfloat16.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import torch
import torch.distributed as dist

from .._core import ArgumentError, OfThisProcess, ShapeError, SparseAttentionError, integer
from .._patterns import as_pattern
from .._plans import options_of
from .._sharding import Sharding
from ._attention import autocast, needs_gradients, once, with_numbers
from ._float8 import largest_of, rounded_by
from ._operators import SCALES
from ._sharding import TensorSharding
from ._tensors import context_of, keep_for_graphs, refuse_gradients, refuse_transforms, require_tensor, wide_sinks

if TYPE_CHECKING:
    from typing import Literal

    from .._core import Context
    from .._patterns import AnyPattern

    #: [begin, end) of tokens, in the order in which a process holds them.
    Ranges = Sequence["tuple[int, int]"]

TOKEN_AXIS = {"bshd": 1, "bhsd": 2, "thd": 0}
_MORE = ("sink_logits", "indices", "index_counts")  # what a call may bring beside q, k and v
_EXCHANGES = 16  # that are kept for calls to come
_FLOAT8_GRADIENTS = (  # where they are
    "ContextParallel.float8_attention of tensors that are not rounded yet, or a call under torch.no_grad()"
)


class ContextParallel(OfThisProcess):
    """Attention over tokens that a group of processes shares out.

        parallel = sat.ContextParallel("causal & window(4095,0)", 131072)    # after torch.distributed.init_process_group
        out = parallel.attention(q, k, v)                                    # of this process' tokens, with gradients

    pattern  over all tokens: a Pattern, its text, or a mask
    seq      tokens of all processes
    group    a group of torch.distributed; None is all processes. Its backend must carry the tensors' device
    ranges   who holds which tokens. "contiguous": equal shares, one after the other. "zigzag": of twice as many shares
             process r holds number r and, counted from the end, number r again, so that causal attention is as much
             work for all. Or, for each process, the [(begin, end), ...] that it holds, in its order; every token is held
             once, and each process holds one at least
    heads    query heads, where the pattern tells heads apart, for `received`

    Making one is a collective call: all processes of the group make theirs, of the same pattern, seq and ranges.

    Raises ArgumentError: .argument names what was wrong, "group" where processes differ.
    """

    def __init__(
        self,
        pattern: AnyPattern,
        seq: int,
        group: Any = None,
        *,
        ranges: str | Sequence[Ranges] = "contiguous",
        heads: int | None = None,
    ):
        if not dist.is_available() or not dist.is_initialized():
            message = "there is no group of processes; accepted: a call after torch.distributed.init_process_group"
            raise ArgumentError(message, "SPATTN_E_ARGUMENT", "group")
        self.group: Any = dist.group.WORLD if group is None else group
        self.pattern, self.seq = as_pattern(pattern), integer(seq, "seq")
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            message = "this process is not in the group; accepted: one of its processes"
            raise ArgumentError(message, "SPATTN_E_ARGUMENT", "group")
        self._heads = self.pattern._sizes.get("heads", 1) if heads is None else integer(heads, "heads")
        self._of_all = self._read_ranges(ranges)
        #: [(begin, end), ...] of the tokens that this process holds, in their order
        self.ranges = list(self._of_all[self.rank])
        self._find = functools.lru_cache(_EXCHANGES)(self._make_exchange)
        self._agree()

    @property
    def tokens(self) -> int:
        """How many tokens this process holds."""
        return sum(end - begin for begin, end in self.ranges)

    @functools.cached_property
    def received(self) -> int:
        """How many tokens of others have their keys and values sent to this process, in each forward."""
        batch = self.pattern._sizes.get("batch", 1)
        sharding = Sharding(
            self.pattern,
            self.size,
            self.rank,
            seq=self.seq,
            batch=batch,
            heads_q=self._heads,
            head_dim=1,
            split=self._of_all,
        )
        return sum(sharding.peer(rank).tokens_received for rank in range(self.size))

    def local(self, x: torch.Tensor, axis: int = 1) -> torch.Tensor:
        """This process' tokens of a tensor that has all of them along that axis."""
        parts = [x.narrow(axis, begin, end - begin) for begin, end in self.ranges]
        return torch.cat(parts, axis) if len(parts) > 1 else parts[0]

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        *,
        axes: str = "bshd",
        scale: float | None = None,
        softcap: float | None = None,
        q_offset: int | None = None,
        head_dim_v: int | None = None,
        deterministic: bool = False,
        reference: bool = False,
        tf32: bool = False,
        context: Context | None = None,
        indices: torch.Tensor | None = None,
        index_counts: torch.Tensor | None = None,
        sink_logits: torch.Tensor | None = None,
        q_scales: torch.Tensor | None = None,
        k_scales: torch.Tensor | None = None,
        v_scales: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """sparseattn.torch.attention of this process' tokens: out, or (out, lse), with gradients. A collective call, as
        is its backward. Not for compiled code.

        q    [batch, tokens, heads_q, head_dim], or as axes says; k and v the same of heads_kv, and lse is float32
             [batch, heads_q, tokens]. All processes have the same dtype, and sizes but for tokens
        q_offset  None, as positions are those of the ranges
        indices, index_counts  of this process' queries; entries name keys by their positions among all, and bring as
             many keys here as the rest of the pattern leaves
        sink_logits  the same everywhere, and each process has the part of their gradient that its queries make
        q_scales, k_scales, v_scales  of this process' tokens, with q, k and v of torch.float8_e4m3fn, whose bytes are
             sent as they are. Those of keys and values are sent, too, one of each row, so that processes may have
             rounded theirs by themselves; k_scales, and v_scales, are given in all processes or in none

        For backward a process keeps the keys and values that it holds or sees. Other options are those of attention.
        Sums of a key's gradients over processes are float32 (float64 of such tensors), of parts that were rounded to the
        dtype. Raises ArgumentError, ShapeError, and what attention raises.
        """
        scales = q_scales, k_scales, v_scales
        options = _Options(axes, scale, softcap, q_offset, head_dim_v, deterministic, reference, tf32, context)
        out, lse = self._attend(q, k, v, options, (sink_logits, indices, index_counts), scales)
        return (out, lse) if return_lse else out

    def float8_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        *,
        scales: Literal["heads", "rows"] = "heads",
        axes: str = "bshd",
        scale: float | None = None,
        softcap: float | None = None,
        q_offset: int | None = None,
        head_dim_v: int | None = None,
        deterministic: bool = False,
        reference: bool = False,
        context: Context | None = None,
        indices: torch.Tensor | None = None,
        index_counts: torch.Tensor | None = None,
        sink_logits: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """sparseattn.torch.float8_attention of this process' tokens: operands are rounded to float8 before they are
        sent, and gradients are handed on as if nothing had been rounded.

        scales  "heads": each head of a batch entry has one, for which processes agree on its largest magnitude, one
                small message more. "rows": each row has one, which is sent with it

        Elements and scales are those of one device. Of what a process holds and sees backward keeps a byte an element,
        and scales. All else as in attention; out has the dtype of q.
        """
        options = _Options(axes, scale, softcap, q_offset, head_dim_v, deterministic, reference, False, context)
        out, lse = self._attend(q, k, v, options, (sink_logits, indices, index_counts), (None,) * 3, scales)
        return (out, lse) if return_lse else out

    def _attend(
        self, q: Any, k: Any, v: Any, options: _Options, more: Any, scales: Any, rounds: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse.

        more    sink_logits, indices, index_counts
        scales  of q, k and v
        rounds  who has a scale, where operands are rounded here: "heads", "rows"
        """
        options, more = _Options(*with_numbers(options)), (wide_sinks(more[0]), *more[1:])
        axes, q_offset, sink_logits = options.axes, options.q_offset, more[0]
        if axes not in TOKEN_AXIS:
            message = f"argument axes is {axes!r}; accepted: {', '.join(map(repr, TOKEN_AXIS))}"
            raise ArgumentError(message, "SPATTN_E_ARGUMENT", "axes")
        if q_offset is not None:
            message = f"argument q_offset is {q_offset}; accepted: None, as ranges have the positions"
            raise ArgumentError(message, "SPATTN_E_ARGUMENT", "q_offset")
        axis = TOKEN_AXIS[axes]
        operands = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
        for name, x in operands.items():
            require_tensor(x, name)
            if x.dim() <= axis or x.shape[axis] != self.tokens:
                message = f"argument {name} has shape {list(x.shape)}; accepted: {self.tokens} tokens on axis {axis}"
                raise ShapeError(message, "SPATTN_E_SHAPE", name)
        of_scales = dict(zip(SCALES, scales))
        for name, x in of_scales.items():
            if x is not None and q.dtype != torch.float8_e4m3fn:
                message = f"argument {name} is given where q is {q.dtype}; accepted: None, or q of float8_e4m3fn"
                raise ArgumentError(message, "SPATTN_E_STATE", name)
        refuse_transforms(**operands, sink_logits=sink_logits, **of_scales)
        if q.dtype == torch.float8_e4m3fn:
            given = {**operands, "sink_logits": sink_logits, **of_scales}
            refuse_gradients("call of float8", _FLOAT8_GRADIENTS, **given)
        q, k, v = autocast(q, k, v)
        sends_scales = rounds == "rows" or scales[1] is not None or scales[2] is not None
        backward = needs_gradients(q, k, v, sink_logits)
        deterministic = options.deterministic or torch.are_deterministic_algorithms_enabled()
        exchange = self._find(
            context_of(q) if options.context is None else options.context,
            q.device,
            q.dtype if rounds is None else torch.float8_e4m3fn,
            (q.shape, k.shape, None if v is None else v.shape),
            axes,
            options.scale,
            options.softcap,
            options.head_dim_v,
            (sink_logits is not None, backward, deterministic, options.reference, options.tf32),
            sends_scales,
        )
        keep_for_graphs(exchange, q.device)
        rounding, dtype = None if rounds is None else functools.partial(self._round, axes, rounds), q.dtype
        if backward:
            out, lse = _Attend.apply(exchange, rounding, scales, q, k, v, *more)
        else:
            out, lse = _attend(exchange, rounding, scales, q, k, v, more)[:2]
        return out if rounds is None else out.to(dtype), lse

    def _round(self, axes: str, scales: str, *operands: torch.Tensor | None) -> Any:
        """Elements and scales of q, k and, where it is not None, v."""
        given = [x for x in operands if x is not None]
        largest = [largest_of(x, axes, scales) for x in given]
        if scales == "heads":
            largest = self._largest_of_all(largest)
        rounded: list[Any] = [rounded_by(x, most) for x, most in zip(given, largest)]
        return zip(*rounded, *[(None, None)] * (len(operands) - len(given)))

    def _largest_of_all(self, largest: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of all processes. NaN, which not every transport takes for the largest, counts as infinity: neither has a
        scale."""
        together = torch.cat([x.flatten() for x in largest])
        together = torch.where(together.isnan(), float("inf"), together)
        if len(together):
            dist.all_reduce(together, dist.ReduceOp.MAX, self.group)
        parts = together.split_with_sizes([x.numel() for x in largest])
        return [part.view(x.shape) for part, x in zip(parts, largest)]

    def _make_exchange(
        self,
        context: Context,
        device: torch.device,
        dtype: torch.dtype,
        shapes: tuple[Any, Any, Any],
        axes: str,
        scale: float | None,
        softcap: float | None,
        head_dim_v: int | None,
        flags: tuple[bool, ...],
        sends_scales: bool,
    ) -> _Exchange:
        options = options_of(dtype, shapes, axes, scale, softcap, head_dim_v, flags)
        del options["seq_q"], options["seq_k"]
        options |= {"seq": self.seq, "split": self._of_all, "scales": sends_scales, "context": context}
        sharding = TensorSharding(self.pattern, device, self.size, self.rank, **options)
        return _Exchange(self, sharding, TOKEN_AXIS[axes])

    def _read_ranges(self, ranges: Any) -> tuple[tuple[tuple[int, int], ...], ...]:
        try:
            sharding = Sharding("full", self.size, self.rank, seq=self.seq, split=ranges, heads_q=1, head_dim=1)
        except SparseAttentionError as error:
            error.argument = {"problem.seq_q": "seq"}.get(error.argument, "ranges")
            raise
        return tuple(tuple(sharding.ranges_of(rank)) for rank in range(self.size))

    def _agree(self) -> None:
        """All processes must have meant the same."""
        names = ("seq", "ranges", "heads", "pattern")
        own = (self.seq, self._of_all, self._heads, hash(self.pattern))
        of_all: list[Any] = [None] * self.size
        dist.all_gather_object(of_all, own, self.group)
        for rank, other in enumerate(of_all):
            for name, mine, theirs in zip(names, own, other):
                if mine != theirs:
                    message = f"{name} of process {rank} differs from that of {self.rank}; accepted: the same in all"
                    raise ArgumentError(message, "SPATTN_E_ARGUMENT", "group")


class _Options(NamedTuple):
    axes: str
    scale: float | None
    softcap: float | None
    q_offset: int | None
    head_dim_v: int | None
    deterministic: bool
    reference: bool
    tf32: bool
    context: Context | None


class _Exchange:
    """What goes between this process and others in calls of the same shapes and options."""

    def __init__(self, parallel: ContextParallel, sharding: TensorSharding, axis: int):
        self.sharding = sharding
        self._axis, self._group = axis, parallel.group
        self._peers = [(dist.get_global_rank(self._group, rank), sharding.peer(rank)) for rank in range(parallel.size)]

    def bring(self, k: torch.Tensor, v: torch.Tensor | None, *scales: torch.Tensor | None) -> Any:
        """Keys and values that this process holds or sees, and scales of both: those of rows are sent, those of heads
        are the same everywhere. What lies between them, and nobody here sees, is not written."""
        sharding = self.sharding
        held: tuple[torch.Tensor | None, ...] = (k, v)
        if sharding.sends_scales:
            held += tuple(
                torch.ones(x.shape[:-1], device=x.device) if of_x is None and x is not None else of_x
                for x, of_x in zip(held, scales)
            )
        received, seen = sharding.empty_received(), sharding.empty_seen()
        requests = self._send(sharding.pack(*held), received, False)
        row = 0
        for place, (begin, end) in zip(sharding.places, sharding.ranges):  # while bytes are on their way
            for x, to in zip(held, seen):
                if x is not None:
                    to.narrow(self._axis, place, end - begin).copy_(x.narrow(self._axis, row, end - begin))
            row += end - begin
        for request in requests:
            request.wait()
        sharding.unpack_received(received, *seen)
        return seen[:2], seen[2:] or [self._spread(x) for x in scales]

    def _spread(self, scales: torch.Tensor | None) -> torch.Tensor | None:
        """Scales of heads, of as many rows as the plan has keys."""
        if scales is None:
            return None
        shape = list(scales.shape)
        shape[self._axis] = self.sharding.keys
        return scales.narrow(self._axis, 0, 1).expand(shape)

    def run(self, q: torch.Tensor, seen: Any, more: Any, scales: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse; more is sink_logits, indices, index_counts."""
        options = dict(zip((*_MORE, *SCALES), (*more, *scales)))
        out, lse = self.sharding.plan.run(q, *seen, **options, return_lse=True)
        return out, lse

    def return_gradients(self, seen: tuple[Any, Any]) -> list[Any]:
        """Gradients of own keys and values, of those of `seen`, which nobody else has: sums take their places."""
        received, sent = self.sharding.pack_gradients(*seen), self.sharding.empty_sent()
        for request in self._send(sent, received, True):
            request.wait()
        self.sharding.add_gradients_in_place(sent, *seen)
        return [x if x is None else self.sharding.own_of(x, self._axis) for x in seen]

    def _send(self, sent: torch.Tensor, received: torch.Tensor, is_back: bool) -> list[Any]:
        """Begins to send each process its part of `sent`, and to receive its own of `received`, or the other way."""
        work = []
        for number, peer in self._peers:
            if is_back:
                to, come = received[peer.back_received], sent[peer.back_sent]
            else:
                to, come = sent[peer.sent], received[peer.received]
            work += [dist.P2POp(dist.isend, to, number, self._group)] if len(to) else []
            work += [dist.P2POp(dist.irecv, come, number, self._group)] if len(come) else []
        return dist.batch_isend_irecv(work) if work else []


def _attend(exchange: _Exchange, rounding: Any, scales: Any, q: Any, k: Any, v: Any, more: Any) -> Any:
    """out and lse, and what these came of: queries, keys and values that this process has or sees, and their scales."""
    if rounding is not None:
        (q, k, v), scales = rounding(q, k, v)
    seen, seen_scales = exchange.bring(k, v, *scales[1:])
    scales = scales[0], *seen_scales
    return *exchange.run(q, seen, more, scales), (q, *seen), scales


class _Attend(torch.autograd.Function):
    """A layer keeps the keys that its process holds or sees, and not as many as all processes have."""

    @staticmethod
    def forward(
        ctx: Any, exchange: _Exchange, rounding: Any, scales: Any, q: torch.Tensor, k: torch.Tensor, v: Any, *more: Any
    ) -> Any:
        out, lse, operands, scales = _attend(exchange, rounding, scales, q, k, v, more)
        ctx.exchange, ctx.dtypes = exchange, [None if x is None else x.dtype for x in (q, k, v)]
        ctx.save_for_backward(*operands, *more, *scales, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        q, seen_k, seen_v, *more, out, lse = ctx.saved_tensors
        exchange = ctx.exchange
        dout = torch.zeros_like(out) if dout is None else dout  # and others wait for what goes back, though it be zeros
        options = dict(zip((*_MORE, *SCALES), more))
        found = exchange.sharding.plan.backward(q, seen_k, seen_v, out, lse, dout, dlse=dlse, **options)
        dq, seen_dk, seen_dv, *dsink = found
        found = zip((dq, *exchange.return_gradients((seen_dk, seen_dv))), ctx.dtypes)
        gradients = (*(x if x is None else x.to(dtype) for x, dtype in found), *dsink)
        if torch.is_grad_enabled():
            # k and v were not kept, and q not where it was rounded: a stand-in has gradients follow from them, too
            of_operands = out.new_zeros(0, requires_grad=any(ctx.needs_input_grad[3:6]))
            gradients = once(gradients, dout, dlse, q, of_operands, more[0])
        return None, None, None, *gradients, *[None] * (6 - len(gradients))
