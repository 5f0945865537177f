# SPDX-License-Identifier: MIT
"""Context parallelism: attention whose tokens lie on the processes of a group, each on a device of its own.

Every process has the queries, keys and values of its own tokens. Before it attends, it receives the keys and values that
its queries see and that others hold, block by block, and no others: of a window that is what lies beside its tokens, of
sinks the first block. Then its queries attend at their own positions, so that every pattern means what it means on one
device. Gradients of keys and values go back to who holds them and are added up there, always in the same order.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import numpy as np
import torch
import torch.distributed as dist

from .._core import ArgumentError, ShapeError, integer
from .._patterns import Extent, Pattern, as_pattern, rows
from ._attention import attention
from ._tensors import require_tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .._patterns import AnyPattern

    #: [begin, end) of tokens, in the order in which a process holds them.
    Ranges = Sequence["tuple[int, int]"]

BLOCK = 128  # tokens that are sent together, where one of their keys is seen
TOKEN_AXIS = {"bshd": 1, "bhsd": 2, "thd": 0}

# Leaves that count query rows from the first one, wherever that one stands.
_BY_ROW = re.compile(r"\b(csr|bsr|mask|predicate|per_document|rows)\(")
_BY_CALL = re.compile(r"\bruntime_\w+\(")


class ContextParallel:
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
    heads    query heads, where the pattern tells heads apart

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
        self.group = dist.group.WORLD if group is None else group
        self.pattern, self.seq = as_pattern(pattern), integer(seq, "seq")
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            message = "this process is not in the group; accepted: one of its processes"
            raise ArgumentError(message, "SPATTN_E_ARGUMENT", "group")
        self._of_all = _read_ranges(ranges, self.seq, self.size)
        #: [(begin, end), ...] of the tokens that this process holds, in their order
        self.ranges = self._of_all[self.rank]
        self._heads = self.pattern._sizes.get("heads", 1) if heads is None else integer(heads, "heads")
        text = repr(self.pattern)
        self._parts = self._cut(text)
        tokens = [np.concatenate([np.arange(*r) for r in of_rank]) for of_rank in self._of_all]
        own, sees = tokens[self.rank], self._agree(self._find_seen(text))
        # Each process has rows of the tensors here that it sees, and tokens there that are seen here.
        self._sent = [np.flatnonzero(of_rank[own]) for of_rank in sees]
        self._received = [held[sees[self.rank][held]] for held in tokens]
        self._sent[self.rank] = self._received[self.rank] = own[:0]  # stays here
        self._shared = np.unique(np.concatenate(self._sent))  # rows that others see, too
        self._places: dict[torch.device, _Places] = {}

    @property
    def tokens(self) -> int:
        """How many tokens this process holds."""
        return sum(end - begin for begin, end in self.ranges)

    @property
    def received(self) -> int:
        """How many tokens of others have their keys and values sent to this process, in each forward."""
        return sum(len(tokens) for tokens in self._received)

    def local(self, x: torch.Tensor, axis: int = 1) -> torch.Tensor:
        """This process' tokens of a tensor that has all of them along that axis."""
        return _join([x.narrow(axis, begin, end - begin) for begin, end in self.ranges], axis)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        *,
        axes: str = "bshd",
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        """sparseattn.torch.attention of this process' tokens: out, or (out, lse), with gradients. A collective call, as
        is its backward. Not for compiled code.

        q    [batch, tokens, heads_q, head_dim], or as axes says; k and v the same of heads_kv, and lse is float32
             [batch, heads_q, tokens]. All processes have the same dtype, and sizes but for tokens
        options  those of attention, but for q_offset: positions are those of the ranges. indices and index_counts of
             lists that come with a call are of this process' queries, name keys by their positions among all, and bring
             all keys here. sink_logits are the same everywhere, and each process has the part of their gradient that
             its queries make

        Sums of a key's gradients over processes are float32 (float64 of such tensors), of parts that were rounded to the
        dtype. Raises ArgumentError, ShapeError, and what attention raises.
        """
        if axes not in TOKEN_AXIS:
            message = f"argument axes is {axes!r}; accepted: {', '.join(map(repr, TOKEN_AXIS))}"
            raise ArgumentError(message, "SPATTN_E_ARGUMENT", "axes")
        if options.get("q_offset") is not None:
            message = f"argument q_offset is {options['q_offset']}; accepted: None, as ranges have the positions"
            raise ArgumentError(message, "SPATTN_E_ARGUMENT", "q_offset")
        axis = TOKEN_AXIS[axes]
        operands = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
        for name, x in operands.items():
            require_tensor(x, name)
            if x.dim() <= axis or x.shape[axis] != self.tokens:
                message = f"argument {name} has shape {list(x.shape)}; accepted: {self.tokens} tokens on axis {axis}"
                raise ShapeError(message, "SPATTN_E_SHAPE", name)
        given = (k,) if v is None else (k, v)
        keys, *values = _Bring.apply(self, axis, *given)
        results = []
        for part, queries in zip(self._parts, _split(q, axis, [part.tokens for part in self._parts])):
            more = {**options, "axes": axes, "q_offset": part.q_offset, "return_lse": True}
            results.append(attention(queries, keys, values[0] if values else None, part.pattern, **more))
        out = _join([out for out, _ in results], axis)
        return (out, _join([lse for _, lse in results], -1)) if return_lse else out

    # ---- what is seen ----

    def _cut(self, text: str) -> list[_Part]:
        """The patterns of this process' queries. Formulas serve each range as they are: rows() knows no residue classes,
        by which dilated and strided attention is fast."""
        if _BY_ROW.search(text) or _BY_CALL.search(text):
            return [_Part(rows(self.pattern, self.ranges, self.seq), None, self.tokens)]
        return [_Part(self.pattern, begin, end - begin) for begin, end in self.ranges]

    def _differs_by_batch(self, text: str) -> bool:
        return "per_batch" in text or self.pattern._sizes.get("batch", 1) > 1

    def _find_seen(self, text: str) -> NDArray[np.bool_]:
        """[seq] whether a query of this process sees a key of the token's block."""
        cells = -(-self.seq // BLOCK)
        seen = np.zeros(cells, np.bool_)
        if _BY_CALL.search(text) or self._differs_by_batch(text):
            seen[:] = True  # nobody knows yet, or a picture would show one batch entry
        else:
            for part in self._parts:
                extent = Extent(part.tokens, self.seq, heads=self._heads, q_offset=part.q_offset)
                for head in range(self._heads):
                    seen |= part.pattern.to_image(extent, 1, cells, head=head)[0] > 0
        bounds = np.arange(cells + 1) * self.seq // cells  # as to_image has them
        return np.repeat(seen, np.diff(bounds))

    def _agree(self, seen: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
        """What each process sees. All must have meant the same."""
        own = (self.seq, self._of_all, self._heads, hash(self.pattern), np.packbits(seen))
        of_all: list[Any] = [None] * self.size
        dist.all_gather_object(of_all, own, self.group)
        names = ("seq", "ranges", "heads", "pattern")
        for rank, other in enumerate(of_all):
            for name, mine, theirs in zip(names, own, other):
                if mine != theirs:
                    message = f"{name} of process {rank} differs from that of {self.rank}; accepted: the same in all"
                    raise ArgumentError(message, "SPATTN_E_ARGUMENT", "group")
        return [np.unpackbits(other[-1], count=self.seq).astype(np.bool_) for other in of_all]

    # ---- exchange ----

    def _places_on(self, device: torch.device) -> _Places:
        if device not in self._places:
            sent, received = ([torch.from_numpy(x).to(device) for x in of] for of in (self._sent, self._received))
            in_shared = [torch.from_numpy(np.searchsorted(self._shared, x)).to(device) for x in self._sent]
            self._places[device] = _Places(sent, received, torch.from_numpy(self._shared).to(device), in_shared)
        return self._places[device]

    def _exchange(self, sent: list[list[torch.Tensor]], received: list[list[torch.Tensor]]) -> None:
        """Sends to each process what is listed for it, and receives what it sends, in the same order."""
        work = []
        for rank in range(self.size):
            peer = dist.get_global_rank(self.group, rank)
            work += [dist.P2POp(dist.isend, x, peer, self.group) for x in sent[rank]]
            work += [dist.P2POp(dist.irecv, x, peer, self.group) for x in received[rank]]
        for request in dist.batch_isend_irecv(work) if work else ():
            request.wait()


class _Part(NamedTuple):
    """Queries that one call serves."""

    pattern: Pattern
    q_offset: int | None  # None: the pattern counts rows
    tokens: int


class _Places(NamedTuple):
    """Which tokens go where, on a device; lists have an entry for each process."""

    sent: list[torch.Tensor]  # rows of this process' tensors
    received: list[torch.Tensor]  # tokens
    shared: torch.Tensor  # rows that are sent to anybody
    in_shared: list[torch.Tensor]  # places of `sent` there


class _Bring(torch.autograd.Function):
    """All tokens' keys and values, as far as queries here see them; what nobody sees is not written."""

    @staticmethod
    def forward(ctx: Any, parallel: ContextParallel, axis: int, *tensors: torch.Tensor) -> Any:
        places = parallel._places_on(tensors[0].device)
        sent, received = places.sent, places.received
        ctx.parallel, ctx.axis = parallel, axis
        out = [[x.index_select(axis, rows) for x in tensors] if len(rows) else [] for rows in sent]
        back = [[_room(x, axis, len(at)) for x in tensors] if len(at) else [] for at in received]
        whole = tuple(_room(x, axis, parallel.seq) for x in tensors)
        parallel._exchange(out, back)
        for n, (x, to) in enumerate(zip(tensors, whole)):
            own_ranges = _split(x, axis, [end - begin for begin, end in parallel.ranges])
            for (begin, end), own in zip(parallel.ranges, own_ranges):
                to.narrow(axis, begin, end - begin).copy_(own)
            for at, come in zip(received, back):
                if come:
                    to.index_copy_(axis, at, come[n])
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        parallel, axis = ctx.parallel, ctx.axis
        places = parallel._places_on(gradients[0].device)
        out = [[dx.index_select(axis, at) for dx in gradients] if len(at) else [] for at in places.received]
        back = [[_room(dx, axis, len(rows)) for dx in gradients] if len(rows) else [] for rows in places.sent]
        parallel._exchange(out, back)
        own = [parallel.local(dx, axis) for dx in gradients]  # of one range: that part of dx, which nobody else holds
        for n, dx in enumerate(own if len(places.shared) else ()):
            sums = dx.index_select(axis, places.shared)
            sums = sums if dx.dtype == torch.float64 else sums.float()
            for rows, come in zip(places.in_shared, back):
                if come:
                    sums.index_add_(axis, rows, come[n].to(sums.dtype))
            dx.index_copy_(axis, places.shared, sums.to(dx.dtype))
        return None, None, *own


def _split(x: torch.Tensor, axis: int, sizes: list[int]) -> list[torch.Tensor]:
    ends = np.cumsum(sizes).tolist()
    return [x.narrow(axis, end - size, size) for end, size in zip(ends, sizes)]


def _join(parts: list[torch.Tensor], axis: int) -> torch.Tensor:
    return torch.cat(parts, axis) if len(parts) > 1 else parts[0]


def _room(like: torch.Tensor, axis: int, tokens: int) -> torch.Tensor:
    """A tensor of so many tokens that nobody has written."""
    shape = list(like.shape)
    shape[axis] = tokens
    return like.new_empty(shape)


# ---- who holds what ----


def _read_ranges(ranges: Any, seq: int, size: int) -> list[list[tuple[int, int]]]:
    shares = {"contiguous": size, "zigzag": 2 * size}.get(ranges, 0) if isinstance(ranges, str) else 0
    if isinstance(ranges, str) and not shares:
        message = f"argument ranges is {ranges!r}; accepted: 'contiguous', 'zigzag', or ranges of each process"
        raise ArgumentError(message, "SPATTN_E_ARGUMENT", "ranges")
    if shares:
        if seq < shares:
            message = f"argument seq is {seq}; accepted: {shares} tokens or more, for {size} processes"
            raise ArgumentError(message, "SPATTN_E_RANGE", "seq")
        bounds = [n * seq // shares for n in range(shares + 1)]
        parts = list(zip(bounds, bounds[1:]))
        if ranges == "contiguous":
            return [[part] for part in parts]
        return [[parts[rank], parts[-1 - rank]] for rank in range(size)]
    read = [[(integer(b, "ranges"), integer(e, "ranges")) for b, e in of_rank] for of_rank in ranges]
    if len(read) != size or not all(read):
        message = f"argument ranges has those of {sum(map(bool, read))} processes; accepted: {size}, one each or more"
        raise ArgumentError(message, "SPATTN_E_ARGUMENT", "ranges")
    end = 0
    for part in sorted(part for of_rank in read for part in of_rank):
        if part[0] != end or part[1] <= part[0]:
            message = f"argument ranges has {list(part)} where token {end} comes next; accepted: every token once"
            raise ArgumentError(message, "SPATTN_E_ARGUMENT", "ranges")
        end = part[1]
    if end != seq:
        message = f"argument ranges ends at token {end}; accepted: every token of {seq} once"
        raise ArgumentError(message, "SPATTN_E_ARGUMENT", "ranges")
    return read
