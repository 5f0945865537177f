# SPDX-License-Identifier: MIT
"""A cache of keys and values for decoding and prefill in chunks, in pages that entries take as they grow.

What a device does never depends on what the host knows: tokens go behind the lengths that lie there, by the table that
lies there, and so do queries. The host counts along, to give out pages in time and to say what does not fit.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from .._core import ArgumentError, Context, CudaError, DTypeError, ResourceError, ShapeError, integer
from .._patterns import Pattern, as_pattern
from .._plans import find
from .._problem import sizes_of
from .._step import OTHER_NUMBERS, Step, StepOfCaches, refuse_other
from ._append import WITHOUT_GRADIENTS, Append
from ._attention import num_dispatch_modes, with_numbers
from ._tensors import (
    TensorPlan,
    change_of,
    context_of,
    is_capturing,
    note_of,
    outside_of_graphs,
    refuse_gradients,
    refuse_transforms,
    require_memory,
    wide_sinks,
)

if TYPE_CHECKING:
    from typing import Literal, Sequence, TypedDict

    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from .._patterns import AnyPattern

    class _Options(TypedDict, total=False):
        axes: Literal["bshd", "bhsd"]
        scale: float | None
        softcap: float | None
        sink_logits: torch.Tensor | None
        indices: torch.Tensor | None
        index_counts: torch.Tensor | None
        parents: torch.Tensor | None
        step: Step | None
        reference: bool
        tf32: bool
        context: Context | None
        out: torch.Tensor | None


class KVCache:
    """Keys and values of sequences that grow, for sparseattn.torch.decode. Inference only.

        cache = sat.KVCache(batch, 131072, heads_kv, head_dim, dtype=torch.bfloat16, device="cuda")
        cache.append(k, v)                          # [batch, n, heads_kv, head_dim]: a prompt, a chunk, a token
        out = sat.decode(q, cache, "causal & (sink(4) | window(4095,0))")       # the last tokens of each entry ask

    batch       entries: sequences, up to 2^20
    capacity    most tokens of an entry, rounded up to whole pages: less than 2^31
    heads_kv    up to 65,536; those of the queries are a multiple
    head_dim    of k, up to 1,024
    head_dim_v  of v, up to 1,024, or up to head_dim with value_in_key; None is head_dim
    value_in_key  v is k[..., :head_dim_v], and None in every append, as in the latent attention of DeepSeek-V2
                (https://arxiv.org/abs/2405.04434)
    page_size   tokens of a page, 1 to 65536. On a Hopper GPU multiples of 8 are fetched in boxes, others token by token
    pages       that entries share, as each grows. None: as many as all entries have room for, each with its own for
                good. Fewer take less memory, and append raises ResourceError when all are taken; see forget
    dtype       of what append and decode are given: float32, float16, bfloat16 or float64
    cache_dtype  of k and v; None is dtype. torch.float8_e4m3fn takes a byte an element: append divides the key, and the
                value, of each token and kv head by a scale of its own, its largest magnitude divided by 448
    device      "cpu" or a CUDA device

    k           [pages, page_size, heads_kv, head_dim], one page at least. What was not written yet may hold
                anything: nothing sees it
    v           [pages, page_size, heads_kv, head_dim_v]; None with value_in_key
    k_scales, v_scales  float32 [pages, page_size, heads_kv], of float8; None of other dtypes, and v_scales where v is
    page_table  int32 [batch, capacity / page_size]: where the tokens of an entry lie; -1 where it has no page
    lengths     int32 [batch]: how many tokens each entry has

    These tensors stay where they are, and are for reading: append writes them in place. cache[3] and cache[2:5] are
    caches of these entries alone, in the same memory, as for the prompt of a sequence that comes while others go on. A
    deep copy, or one that was pickled, has memory of its own, and goes on from the same tokens; for float8, which
    pickle alone does not load again, use torch.save. Where a cache and parts of it are copied at once, as in an object
    that holds them, the copies are one cache, too. That of a part alone has all pages; those of other entries stay
    taken.

    CUDA graphs may capture append, decode and keep, after a first decode of the same sizes, which makes the plan: each
    replay appends and attends behind the lengths of that moment. The host takes no part in a replay: call reserve
    before each one, with the number of tokens that it appends. Nothing else here may be captured.

    One thread at a time, one stream after the other. torch.compile leaves append, decode, forget, keep, share and
    reorder as they are: its graphs end before them and begin again behind.

    Raises ArgumentError, DTypeError, ShapeError: .argument names what was wrong.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        value_in_key: bool = False,
        page_size: int = 128,
        pages: int | None = None,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ):
        batch, heads_kv = _size("batch", batch, 0, _MOST_ENTRIES), _size("heads_kv", heads_kv, 1, _MOST_HEADS)
        head_dim = _size("head_dim", head_dim, 1, _MOST_COLUMNS)
        most_columns = head_dim if value_in_key else _MOST_COLUMNS
        head_dim_v = head_dim if head_dim_v is None else _size("head_dim_v", head_dim_v, 1, most_columns)
        page_size = _size("page_size", page_size, 1, _LARGEST_PAGE)
        most_pages = _MOST_TOKENS // page_size  # of an entry, and of all
        capacity = _size("capacity", capacity, 0, most_pages * page_size)
        most = -(-capacity // page_size)  # pages of an entry
        self._is_shared = pages is not None
        if pages is None and batch * most > most_pages:
            message = f"argument pages is None, and {batch} entries of {most} pages would have {batch * most}"
            raise ArgumentError(f"{message}; accepted: 0 to {most_pages}, to share", "SPATTN_E_RANGE", "pages")
        pages = batch * most if pages is None else _size("pages", pages, 0, most_pages)
        if dtype not in _DTYPES:
            accepted = ", ".join(map(str, _DTYPES))
            raise DTypeError(f"argument dtype is {dtype}; accepted: {accepted}", "SPATTN_E_DTYPE", "dtype")
        cache_dtype = dtype if cache_dtype is None else cache_dtype
        if cache_dtype not in (dtype, torch.float8_e4m3fn):
            message = f"argument cache_dtype is {cache_dtype}; accepted: None, {dtype}, {torch.float8_e4m3fn}"
            raise DTypeError(message, "SPATTN_E_DTYPE", "cache_dtype")
        device = _device_of_cache(device)
        self.page_size, self.capacity, self.pages = page_size, most * page_size, pages
        self.head_dim_v, self.dtype = head_dim_v, dtype
        self.k_scales = self.v_scales = None
        with torch.inference_mode(False):  # tensors that may be written inside of it, and outside
            rows = (max(pages, 1), page_size, heads_kv)
            self.k = torch.empty(*rows, head_dim, dtype=cache_dtype, device=device)
            self.v = None if value_in_key else torch.empty(*rows, head_dim_v, dtype=cache_dtype, device=device)
            if cache_dtype != dtype:
                self.k_scales = torch.empty(rows, device=device, dtype=torch.float32)
                self.v_scales = None if value_in_key else torch.empty_like(self.k_scales)
            self.page_table = torch.full((batch, most), -1, dtype=torch.int32, device=device)
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
            if not self._is_shared:
                self.page_table.copy_(torch.arange(pages, dtype=torch.int32, device=device).view(batch, most))
        # The host's view: tokens that may have come, how many of these reserve counted, tokens that there is room for,
        # where the last ones that it forgot end, and the page table of a cache whose pages are shared. Then the pages
        # that nobody has, and how many entries beside the first have each of the others.
        self._tokens = np.zeros(batch, np.int64)
        self._reserved = np.zeros(batch, np.int64)
        self._room = np.full(batch, 0 if self._is_shared else self.capacity)
        self._forgotten = np.zeros(batch, np.int64)
        self._held = np.full((batch, most if self._is_shared else 0), -1, np.int32)
        self._free = list(range(pages))[::-1] if self._is_shared else []
        self._others = np.zeros(pages if self._is_shared else 0, np.int32)
        self._entries = range(batch)  # of the cache that this is a part of
        self._counts_read: list[Any] = []  # the last tensor of counts that an append read, noted, and its numbers
        self._whole = _Whole(self)  # what its parts have in common with it
        self._appends: dict[Any, Append] = {}  # those of the forms that the last tokens had

    @property
    def batch(self) -> int:
        """How many entries there are."""
        return len(self._tokens)

    def __getitem__(self, entries: int | slice) -> KVCache:
        """These entries, in the same memory."""
        if not isinstance(entries, slice):
            entry = integer(entries, "entries")
            if not -self.batch <= entry < self.batch:
                raise IndexError(f"entry {entry} of a cache of {self.batch}")  # which ends a loop over entries
            entries = slice(entry % self.batch, entry % self.batch + 1)
        if entries.step not in (None, 1):
            message = f"argument entries has a step of {entries.step}; accepted: 1"
            raise ArgumentError(message, "SPATTN_E_ARGUMENT", "entries")
        part = copy.copy(self)
        part._entries = self._entries[entries]
        part._take_from_whole()
        return part

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has, but no calls of the library that are prepared for this one's memory."""
        of_whole = self._whole.rows | self._whole.shared
        return {name: x for name, x in self.__dict__.items() if name not in of_whole} | {"_appends": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take_from_whole()

    def _take_from_whole(self) -> None:
        """What all have in common, and rows of the own entries."""
        own = slice(self._entries.start, self._entries.stop)
        self.__dict__.update(self._whole.shared)
        self.__dict__.update({name: x[own] for name, x in self._whole.rows.items()})

    def __repr__(self) -> str:
        sizes = f"{self.batch} entries of up to {self.capacity} tokens, {self.k.shape[2]} heads of {self.k.shape[3]}"
        pages = f"{self.pages} pages of {self.page_size}"
        return f"<{type(self).__name__} of {sizes}, {pages}, {self.k.dtype} on {self.k.device}>"

    def append(
        self, k: torch.Tensor, v: torch.Tensor | None, counts: Sequence[int] | torch.Tensor | None = None
    ) -> None:
        """Writes tokens behind those of each entry.

        k       [batch, n, heads_kv, head_dim], of the cache's dtype, to which autocast casts it, and device; any
                strides. Or [tokens, heads_kv, head_dim]: those of the first entry, of the second, and so on, as many of
                each as counts says, as servers batch a prompt beside tokens that are decoded. Tokens behind all of
                these are not written
        v       as k, with head_dim_v; None with value_in_key
        counts  integers [batch], 0 to n: how many of an entry's tokens are new, the last ones, as where texts of
                several lengths are padded in front; the others are not written. None: all n. The host reads a tensor,
                and waits for the device that it lies on; in a capture the device alone reads it, anew with each replay

        Raises ArgumentError where an entry has no room for so many, ResourceError where too few pages are free. With
        whatever it raises, as at Ctrl-C, all of the tokens have come, or none has, and the cache has those of before.
        """
        outside_of_graphs(self._append, k, v, counts)

    def reserve(self, tokens: int | Sequence[int] | torch.Tensor) -> None:
        """Takes pages for so many more tokens, of every entry or [batch], which the replay of a graph then appends.

        An append that is not captured does so itself. Where no replay follows, the host counts tokens that never came,
        until truncate(cache.lengths). Raises as append, and CudaError in a capture.
        """
        more = self._read_numbers(tokens, "tokens")
        self._reserve(more)
        self._reserved += more

    def truncate(self, lengths: int | Sequence[int] | torch.Tensor) -> None:
        """Forgets all but the first so many tokens, of every entry or [batch], and gives back pages that this empties.

        For drafts that were not accepted; where they are nodes of trees, see keep.

        Raises ArgumentError where a length ends amid pages that forget gave back: then nothing was done. 0 is right at
        any time. Raises CudaError in a capture.
        """
        self._refuse_capture("truncate")
        kept = self._read_numbers(lengths, "lengths").clip(max=self.capacity)
        self._refuse_forgotten(np.minimum(kept, self._tokens))
        torch.minimum(self.lengths, self._to_device(kept), out=self.lengths)
        have_come = np.minimum(self._tokens - self._reserved, kept)
        np.minimum(self._tokens, kept, out=self._tokens)
        np.subtract(self._tokens, have_come, out=self._reserved)
        self._give_back()

    def forget(self, first: int | Sequence[int] | torch.Tensor, end: int | Sequence[int] | torch.Tensor) -> None:
        """Gives back the pages of tokens that no query to come sees: first up to end, of every entry or [batch].

            out = sat.decode(q, cache, "causal & (sink(4) | window(4095,0))")   # the last of n tokens asks
            cache.forget(4, max(0, n - 4095))           # token n will see 0 to 3, and n - 4095 up to itself

        An entry then needs the pages of what queries see, however long it grows. Lengths and the numbers of tokens stay
        as they are: capacity bounds an entry as before, and costs 4 bytes a page. A page goes where all of its tokens
        have come and are among these; tokens that share a page with others stay, and so does room for those to come.
        Without pages= each entry has its own for good, and nothing is given back.

        What comes of a query that sees a forgotten token means nothing. After a truncate queries see what lies further
        back: where drafts may be taken back, let end be lower by as many tokens.

        The host reads tensors, and waits for the device that they lie on. Call it between replays of a graph, and after
        truncate(cache.lengths) where these appended fewer tokens than were reserved.

        Raises ArgumentError for numbers below 0, and CudaError in a capture.
        """
        outside_of_graphs(self._forget, first, end)

    def keep(
        self,
        nodes: torch.Tensor,
        tokens: int | Sequence[int] | torch.Tensor,
        counts: Sequence[int] | torch.Tensor | None = None,
    ) -> None:
        """Keeps some of the last tokens of each entry, one behind the other, and forgets the rest of these.

            cache.append(k, v)                                      # [batch, n, heads_kv, head_dim]: trees of drafts
            out = sat.decode(q, cache, pattern, parents=parents)
            cache.keep(nodes, n, counts)                            # the drafts that were accepted, from a root down

        nodes   int32 or int64 [batch, most], on the cache's device, which alone reads it: the numbers of those to keep
                among these last tokens, from 0, ascending. Other numbers keep nothing of use, and disturb nobody
        tokens  how many last tokens it is about, of every entry or [batch]
        counts  integers [batch], 0 to most: how many of its nodes an entry keeps, the first ones. None: all

        Pages that this empties are given back. The host reads tokens and counts as it does in append. In a capture the
        device alone reads them, anew with each replay, but for tokens that are one integer; after a replay
        truncate(cache.lengths) tells the host what is left, and gives back pages.

        Raises ArgumentError where an entry has not so many tokens behind what it forgot, or is to keep more, and
        ResourceError as append. Tokens that were reserved count where a replay has brought them: the host waits for the
        device where it must know that. In a capture nobody can say no: an entry with fewer tokens loses all that it
        has, and keeps its nodes. Nor does anybody copy a page that several entries have: let replays keep tokens that
        came after the last share and reorder.
        """
        outside_of_graphs(self._keep, nodes, tokens, counts)

    def share(self, source: int, into: int, tokens: int | None = None) -> None:
        """Begins an entry without tokens with the first tokens of another one, in the same pages.

            cache[0].append(k, v)                       # a prompt that several texts begin with
            cache.share(0, 1)                           # costs no page until entry 1, or 0, goes on

        source  the entry that has the tokens, and keeps them
        into    the entry that gets them, too
        tokens  how many, from the first on; None: all that have come

        Both then go on by themselves. What would be written into a page that several entries have, as behind a prompt
        that ends amid one, goes into a copy of it, for which append, reserve and keep take a page. Pages are given back
        when the last entry lets go of them. What source forgot is forgotten in both.

        Where tokens were reserved, the host waits for the device, to know which of these have come.

        Raises ArgumentError for an entry that is none, an into that has tokens, more tokens than source has, a number
        that ends amid pages that forget gave back, and a cache without pages=. Raises CudaError in a capture.
        """
        outside_of_graphs(self._share, source, into, tokens)

    def reorder(self, parents: Sequence[int] | torch.Tensor) -> None:
        """Makes each entry what another one was, as a beam search does when it has chosen how its texts go on.

            cache.reorder([2, 0, 2, 3])                 # entries 0 and 2 go on from 2, entry 1 from 0

        parents  integers [batch]: which entry each one was. Those that are named several times share pages, as share
                 says; those of an entry that is not named are given back

        It needs no free page. The host reads a tensor, and waits for the device that it lies on, and where tokens were
        reserved for that of the cache. Reserved tokens that have not come are forgotten: reserve after it.

        Raises ArgumentError for a parent that is no entry, and for a cache without pages=, CudaError in a capture.
        """
        outside_of_graphs(self._reorder, parents)

    def reset(self) -> None:
        """Forgets all tokens, and gives back their pages. Raises CudaError in a capture."""
        self.truncate(0)

    def free(self, entry: int) -> None:
        """Forgets the tokens of one entry, for a sequence to come: cache[entry].reset()."""
        self[entry].reset()

    # ---- the host ----

    def _append(self, k: torch.Tensor, v: torch.Tensor | None, counts: Any) -> None:
        k, v = _autocast(k, self), _autocast(v, self)
        given: list[tuple[str, Any, torch.Tensor]] = [("k", k, self.k)]
        if self.v is not None:
            given.append(("v", v, self.v))
        elif v is not None:
            message = "argument v is given to a cache with value_in_key; accepted: None"
            raise ArgumentError(message, "SPATTN_E_ARGUMENT", "v")
        for name, x, pool in given:
            self._check(name, x, pool)
        if v is not None and v.shape[:-1] != k.shape[:-1]:
            message = f"argument v has shape {list(v.shape)}; accepted: {list(k.shape[:-1])} and head_dim_v, as k"
            raise ShapeError(message, "SPATTN_E_SHAPE", "v")
        refuse_gradients("cache", WITHOUT_GRADIENTS, k=k, v=v)
        refuse_transforms(k=k, v=v)
        is_ragged = k.dim() == 3
        n = k.shape[0 if is_ragged else 1]
        if is_capturing(self.k.device):
            return self._write(k, v, n, self._counts_in_capture(counts, is_ragged), is_ragged)
        before, writes = self._tokens.copy(), self.lengths._version
        try:
            if counts is None and not is_ragged:
                self._reserve(n)
            else:
                read = self._read_counts(counts, n, is_ragged)
                self._reserve(read)
                if isinstance(counts, torch.Tensor):
                    self._counts_read[:] = note_of(counts), read
                counts = counts if self._lies_there(counts) else self._to_device(read)
            self._write(k, v, n, counts, is_ragged)
        except BaseException:  # Ctrl-C as well
            if self.lengths._version == writes:  # it is written last: none of the tokens has come
                self._tokens[:] = before
                self._give_back()
            raise

    def _forget(self, first: Any, end: Any) -> None:
        self._refuse_capture("forget")
        begins = -(-self._read_numbers(first, "first") // self.page_size)
        ends = np.minimum(self._read_numbers(end, "end"), self._tokens) // self.page_size
        if not self._is_shared:
            return
        for entry in np.flatnonzero(begins < ends).tolist():
            self._release(entry, begins[entry], ends[entry])
            self._forgotten[entry] = max(self._forgotten[entry], ends[entry] * self.page_size)

    def _keep(self, nodes: Any, tokens: Any, counts: Any) -> None:
        require_memory(nodes, "nodes")
        if nodes.dtype not in _INTEGERS:
            message = f"argument nodes is {nodes.dtype}; accepted: torch.int32, torch.int64"
            raise DTypeError(message, "SPATTN_E_DTYPE", "nodes")
        if nodes.dim() != 2 or nodes.shape[0] != self.batch:
            message = f"argument nodes has shape {list(nodes.shape)}; accepted: [{self.batch}, nodes of each entry]"
            raise ShapeError(message, "SPATTN_E_SHAPE", "nodes")
        _require_like("nodes", (nodes.dtype, nodes.device), (nodes.dtype, self.k.device))
        if is_capturing(self.k.device):
            counts = self._counts_in_capture(counts, False)
            if isinstance(tokens, int):
                self._read_numbers(tokens, "tokens")
            else:
                tokens = self._in_capture("tokens", tokens, "an integer, or ")
            return self._move(nodes, tokens, counts)
        most = nodes.shape[1]
        drafts = self._read_numbers(tokens, "tokens")
        kept = self._read_numbers(most if counts is None else counts, "counts", most)
        if (drafts > self._tokens - self._reserved - self._forgotten).any():
            self._read_reserved()
        have_come = self._tokens - self._reserved
        for name, numbers, limit in (("tokens", drafts, have_come - self._forgotten), ("counts", kept, drafts)):
            if (numbers > limit).any():
                entry = int(np.argmax(numbers > limit))
                message = f"argument {name} is {numbers[entry]} for entry {entry}; accepted: up to {limit[entry]}"
                raise ArgumentError(message, "SPATTN_E_RANGE", name)
        begins = have_come - drafts
        # Behind what is kept, replays may write tokens that are reserved already.
        shared = self._shared_places(begins, begins + kept + self._reserved)
        self._require_free(len(shared))
        self._make_own(shared)
        tokens = tokens if self._lies_there(tokens) else self._to_device(drafts)
        if counts is not None:
            counts = counts if self._lies_there(counts) else self._to_device(kept)
        self._move(nodes, tokens, counts)
        self._tokens += kept - drafts
        self._give_back()

    def _share(self, source: Any, into: Any, tokens: Any) -> None:
        self._refuse_for_sharing("share")
        source, into = (_size(name, x, 0, self.batch - 1) for name, x in (("source", source), ("into", into)))
        if self._tokens[into]:
            message = f"argument into is {into}, an entry of {self._tokens[into]} tokens; accepted: one without tokens"
            raise ArgumentError(message, "SPATTN_E_STATE", "into")
        if self._reserved[source]:
            self._read_reserved()
        have_come = int(self._tokens[source] - self._reserved[source])
        tokens = have_come if tokens is None else _size("tokens", tokens, 0, have_come)
        lengths = self._tokens.copy()
        lengths[source] = tokens
        self._refuse_forgotten(lengths, "tokens")
        self._become(np.array([into]), np.array([source]))
        self[into].truncate(tokens)

    def _reorder(self, parents: Any) -> None:
        self._refuse_for_sharing("reorder")
        sources = self._read_numbers(parents, "parents", self.batch - 1, may_be_one=False)
        if self._reserved.any():
            self.truncate(self.lengths)
            self._reserved[:] = 0
        moved = np.flatnonzero(sources != np.arange(self.batch))
        if len(moved):
            self._become(moved, sources[moved])

    def _become(self, entries: NDArray[np.int64], sources: NDArray[np.int64]) -> None:
        """Makes these entries what others are, in the same pages."""
        into, of = (self._to_device(x).long() for x in (entries, sources))
        most = self._room.max() // self.page_size
        held, table = self._held[:, :most], self.page_table[:, :most]
        rows, lengths = table[of], self.lengths[of]
        before, after = held[entries], held[sources]
        is_other = before != after
        np.add.at(self._others, after[is_other & (after >= 0)], 1)  # first, so that none of these is ever free
        for numbers in (held, self._tokens, self._reserved, self._room, self._forgotten):
            numbers[entries] = numbers[sources]
        for pages, is_lost in zip(before, is_other & (before >= 0)):
            self._let_go(pages[is_lost])
        table[into], self.lengths[into] = rows, lengths

    def _shared_places(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Which places of which entries need copies of their pages before these tokens of each entry are written: those
        whose pages others have, too. Where all that have a page write, the last one may do so in the page itself."""
        if not self._is_shared:
            return []
        first = begins // self.page_size
        count = np.where(begins < ends, -(-ends // self.page_size) - first, 0)
        entries = np.repeat(np.arange(self.batch), count)
        places = np.arange(len(entries)) + np.repeat(first + count - count.cumsum(), count)
        pages = self._held[entries, places]
        found: list[tuple[int, int]] = []
        others: dict[int, int] = {}
        for at in np.flatnonzero(self._others[pages]).tolist():
            page = int(pages[at])
            left = others.get(page, int(self._others[page]))
            if left:
                others[page] = left - 1
                found.append((int(entries[at]), int(places[at])))
        return found

    def _make_own(self, shared: list[tuple[int, int]]) -> None:
        """Gives entries copies of the pages in these places, in pages that are known to be free."""
        if not shared:
            return
        entries, places = np.array(shared).T
        pages, own = self._held[entries, places], np.array(self._free[: -len(shared) - 1 : -1])
        into, at, read, written = (self._to_device(x).long() for x in (entries, places, pages, own))
        for pool in (self.k, self.v, self.k_scales, self.v_scales):
            if pool is not None:
                raw = pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool
                raw[written] = raw[read]
        self.page_table[into, at] = written.int()
        del self._free[-len(shared) :]
        self._held[entries, places] = own
        np.subtract.at(self._others, pages, 1)

    def _give_back(self) -> None:
        """Of the pages of each entry those behind its tokens, where pages are shared; the last that were taken first,
        so that the free ones have the order of before."""
        if not self._is_shared:
            return
        for entry in np.flatnonzero(self._room - self._tokens >= self.page_size)[::-1].tolist():
            needed, end = -(-self._tokens[entry] // self.page_size), self._room[entry] // self.page_size
            self._room[entry] = needed * self.page_size
            self._release(entry, needed, end)
            if self._forgotten[entry] > self._tokens[entry]:
                missing = np.flatnonzero(self._held[entry, :needed] < 0)
                self._forgotten[entry] = (missing[-1] + 1) * self.page_size if len(missing) else 0

    def _release(self, entry: int, begin: Any, end: Any) -> None:
        """Gives back the pages of an entry that lie in these places of its table."""
        held = self._held[entry, begin:end]
        pages = held[held >= 0]
        if len(pages):  # else those places were forgotten before
            held[:] = -1  # first, so that no page is ever both
            self._let_go(pages)
            self.page_table[entry, begin:end] = -1

    def _let_go(self, pages: NDArray[np.int32]) -> None:
        """One entry had these pages, and has them no more: those that no other one has are free."""
        stay = self._others[pages] > 0
        self._others[pages[stay]] -= 1
        self._free += pages[~stay][::-1].tolist()

    def _read_reserved(self) -> None:
        """Finds out how many of the tokens that were reserved have come, for which the host waits."""
        np.maximum(self._tokens - self.lengths.cpu().numpy(), 0, out=self._reserved)

    def _refuse_forgotten(self, lengths: NDArray[np.int64], name: str = "lengths") -> None:
        """Raises ArgumentError where an entry's last token would be a forgotten one, and the next one as well."""
        for entry in np.flatnonzero(lengths < self._forgotten).tolist():
            there, length = np.flatnonzero(self._held[entry] >= 0), int(lengths[entry])
            behind = np.searchsorted(there, length // self.page_size)  # the first page not before the next token
            begin = (there[behind - 1] + 1) * self.page_size if behind else 0
            end = there[behind] * self.page_size if behind < len(there) else self._forgotten[entry]
            if begin < length < end:
                message = f"argument {name} is {length} for entry {entry}, which forgot its tokens {begin} up to {end}"
                message += f"; accepted: up to {begin}, or {end} and more"
                raise ArgumentError(message, "SPATTN_E_RANGE", name)

    def _reserve(self, more: Any) -> None:
        self._refuse_capture("reserve")
        after = self._tokens + more
        if (after > self.capacity).any():
            entry = int(np.argmax(after > self.capacity))
            message = f"entry {entry} would have {after[entry]} tokens; accepted: up to its capacity, {self.capacity}"
            raise ArgumentError(message, "SPATTN_E_RANGE", "capacity")
        short = np.flatnonzero(after > self._room)
        shared = self._shared_places(self._tokens, np.minimum(after, self._room))
        if len(short) or shared:
            wanted = -(-(after - self._room)[short] // self.page_size)
            self._require_free(int(wanted.sum()) + len(shared))
            try:
                for entry, count in zip(short.tolist(), wanted.tolist()):
                    begin = self._room[entry] // self.page_size
                    places = slice(begin, begin + count)
                    self._held[entry, places] = [self._free.pop() for _ in range(count)]
                    self._room[entry] += count * self.page_size
                    self.page_table[entry, places] = self._to_device(self._held[entry, places])
                self._make_own(shared)
            except BaseException:
                self._give_back()
                raise
        self._tokens[:] = after

    def _require_free(self, pages: int) -> None:
        if pages > len(self._free):
            message = f"{pages} more pages are needed, and {len(self._free)} of {self.pages} are free"
            message += "; accepted: caches of more pages, or pages given back by free() or forget()"
            raise ResourceError(message, "SPATTN_E_RESOURCE", "pages")

    def _read_numbers(
        self, given: Any, name: str, most: int | None = None, *, may_be_one: bool = True
    ) -> NDArray[np.int64]:
        """[batch]; a single number, where it may be one, is that of every entry."""
        if isinstance(given, torch.Tensor):
            require_memory(given, name)
        try:
            read = np.asarray(given.tolist() if isinstance(given, torch.Tensor) else given)
        except ValueError:  # lists of several lengths
            read = np.asarray(None)
        if read.size and read.dtype.kind not in "iu":
            what = read.dtype if hasattr(given, "dtype") else repr(given)
            raise DTypeError(f"argument {name} is {what}; accepted: integers of 64 bits", "SPATTN_E_DTYPE", name)
        if read.shape != (self.batch,) and (read.shape or not may_be_one):
            message = f"argument {name} has shape {list(read.shape)}; accepted: [{self.batch}], one for each entry"
            raise ShapeError(message, "SPATTN_E_SHAPE", name)
        if read.size and (read.min() < 0 or (most is not None and read.max() > most)):
            accepted = "0 or more" if most is None else f"0 to {most}"
            message = f"argument {name} is {read.min()} to {read.max()}; accepted: {accepted}"
            raise ArgumentError(message, "SPATTN_E_RANGE", name)
        if read.size:  # to what is more than any entry has room for, and sums of them are still integers of 64 bits
            read = np.minimum(read, min(1 << 62, np.iinfo(read.dtype).max))
        return np.broadcast_to(read, self.batch).astype(np.int64)

    def _read_counts(self, counts: Any, n: int, is_ragged: bool) -> NDArray[np.int64]:
        """[batch], of n tokens of each entry, or of all."""
        if counts is None:
            message = "argument counts is None where tokens of all entries lie one after the other"
            raise ArgumentError(f"{message}; accepted: integers [{self.batch}]", "SPATTN_E_ARGUMENT", "counts")
        read = self._read_numbers(counts, "counts", n, may_be_one=not is_ragged)
        if is_ragged and read.sum() > n:
            message = f"argument counts has a sum of {read.sum()}; accepted: up to the tokens given, {n}"
            raise ArgumentError(message, "SPATTN_E_RANGE", "counts")
        return read

    def _lies_there(self, counts: Any) -> bool:
        """Whether the device can read counts as they are."""
        is_there = isinstance(counts, torch.Tensor) and counts.device == self.k.device
        return is_there and counts.dtype in _INTEGERS and counts.shape == (self.batch,)

    def _counts_in_capture(self, counts: Any, are_needed: bool) -> Any:
        if counts is None and not are_needed:
            return None
        return self._in_capture("counts", counts, "" if are_needed else "None, or ")

    def _in_capture(self, name: str, given: Any, others: str = "") -> Any:
        """Numbers that each replay reads anew. others: what else the caller takes."""
        if self._lies_there(given):
            return given
        accepted = f"{others}an int32 or int64 tensor [{self.batch}] on {self.k.device}"
        message = f"argument {name} is {given!r}; accepted in a capture: {accepted}"
        raise ArgumentError(message, "SPATTN_E_ARGUMENT", name)

    def _counts_on_device(self, counts: Any, n: int) -> torch.Tensor:
        """Of ragged queries, which the host need not know."""
        if is_capturing(self.k.device):
            counts = self._counts_in_capture(counts, True)
        elif not (self.k.is_cuda and self._lies_there(counts)):
            counts = self._to_device(self._read_counts(counts, n, True))
        on_device: torch.Tensor = counts
        return on_device

    def _refuse_capture(self, what: str) -> None:
        if is_capturing(self.k.device):
            message = f"{what} is called while a graph is captured, in whose replays the host takes no part"
            raise CudaError(f"{message}; accepted: append, decode and keep", "SPATTN_E_CAPTURE")

    def _refuse_for_sharing(self, what: str) -> None:
        self._refuse_capture(what)
        if not self._is_shared:
            message = "argument pages is None, and each entry has its own for good"
            raise ArgumentError(f"{message}; accepted with {what}: a number", "SPATTN_E_ARGUMENT", "pages")

    def _check(self, name: str, x: Any, pool: torch.Tensor) -> None:
        require_memory(x, name)
        of_entries = x.dim() == 4 and x.shape[0] == self.batch
        if not (of_entries or x.dim() == 3) or x.shape[-2:] != pool.shape[2:]:
            row = f"{pool.shape[2]}, {pool.shape[3]}"
            accepted = f"[{self.batch}, tokens, {row}], or [tokens, {row}] of all entries"
            raise ShapeError(f"argument {name} has shape {list(x.shape)}; accepted: {accepted}", "SPATTN_E_SHAPE", name)
        _require_like(name, (x.dtype, x.device), (self.dtype, pool.device))

    # ---- the device ----

    def _to_device(self, numbers: NDArray[Any]) -> torch.Tensor:
        made = torch.from_numpy(numbers.astype(np.int32))
        # Out of pinned memory, so that the host does not wait for the device.
        return made if self.k.is_cpu else made.pin_memory().to(self.k.device, non_blocking=True)

    def _write(self, k: torch.Tensor, v: torch.Tensor | None, n: int, counts: Any, is_ragged: bool) -> None:
        """Puts each token at its place, by what lies on the device alone."""
        given = {"k_new": k.detach().resolve_neg(), "v_new": v if v is None else v.detach().resolve_neg()}
        given |= {"k": self.k, "v": self.v, "page_table": self.page_table}
        given |= {"k_scales": self.k_scales, "v_scales": self.v_scales}
        given |= {"starts": self.lengths, "counts": None, "query_offsets": None}
        if is_ragged:
            given["query_offsets"] = _offsets_of(counts)
        elif counts is not None:
            given |= {"starts": self.lengths + counts - n, "counts": counts}
        self._put(given)
        self.lengths += n if counts is None else counts

    def _move(self, nodes: torch.Tensor, tokens: Any, counts: Any) -> None:
        """Puts those of an entry's last tokens to their places, by what lies on the device alone.

        Lengths are written last: they may be tokens or counts themselves, and are right where something fails before.
        """
        begins = self.lengths - self.lengths.clamp(max=tokens)
        most = nodes.shape[1]
        if nodes.numel() and self.capacity:
            starts = begins
            if counts is not None:  # a call writes the last rows of an entry, and of nodes the first ones count
                starts = begins + counts - most
                places = torch.arange(most, device=nodes.device) + (counts - most)[:, None]
                nodes = nodes.gather(1, places.clamp(0, most - 1))
            found = (begins[:, None] + nodes).clamp(0, self.capacity - 1).long()
            pages = self.page_table.gather(1, found // self.page_size).long()
            # A token without a page has none, and means nothing.
            rows = (pages * self.page_size + found % self.page_size).clamp(min=0)
            pools = [(self.k, self.v)]
            if self.k_scales is not None:  # a scale is a row of one element
                v_scales = self.v_scales if self.v_scales is None else self.v_scales[..., None]
                pools.append((self.k_scales[..., None], v_scales))
            # All rows are read, for which memory may run out, before one of them is written.
            read = [{"k_new": _rows_of(k, rows), "v_new": _rows_of(v, rows), "k": k, "v": v} for k, v in pools]
            given = {"page_table": self.page_table, "k_scales": None, "v_scales": None}
            given |= {"starts": starts, "counts": counts, "query_offsets": None}
            for each in read:
                self._put(each | given)
        self.lengths.copy_(begins + (most if counts is None else counts))

    def _put(self, given: dict[str, Any]) -> None:
        form = tuple((x.shape, x.stride(), x.dtype) if x is not None else None for x in given.values())
        append = self._appends.get(form)
        if append is None:
            while len(self._appends) >= _MOST_FORMS:
                del self._appends[next(iter(self._appends))]
            axes = "bshd" if given["query_offsets"] is None else "thd"
            choose_scales = given["k_scales"] is not None
            append = self._appends[form] = Append(given, axes, None, choose_scales=choose_scales)
        append.run(given)


class _Whole:
    """What a cache and its parts have in common, so that it is copied once where several of them are: views that are
    copied one by one, as those of NumPy, and those of torch in a pickle, have no memory in common."""

    def __init__(self, cache: KVCache):
        self.rows = {name: getattr(cache, name) for name in _ROWS}  # of all entries, of which a part has some
        self.shared = {name: getattr(cache, name) for name in _SHARED}

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: tensors and numbers, but nothing of the calls before."""
        return {"rows": self.rows, "shared": self.shared | {"_counts_read": []}}

    def __setstate__(self, state: dict[str, dict[str, Any]]) -> None:
        self.rows, self.shared = ({name: _writable(x) for name, x in state[of].items()} for of in ("rows", "shared"))


_ROWS = ("page_table", "lengths", "_tokens", "_reserved", "_room", "_forgotten", "_held")
_SHARED = ("k", "v", "k_scales", "v_scales", "_free", "_others", "_counts_read")


def _writable(x: Any) -> Any:
    """x, and for a tensor that came to be in inference mode one that lies there and may be written outside of it."""
    if not isinstance(x, torch.Tensor) or not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.new_empty(0).set_(x)


def _rows_of(pool: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    """Tokens of pages as append takes them: [batch, tokens, heads_kv, columns]."""
    if pool is None:
        return None
    found = pool.flatten(0, 1)[rows]
    # An append takes no float8, but rounds to it: without scales it gets the same elements again.
    return found.float() if found.dtype == torch.float8_e4m3fn else found


def _offsets_of(counts: torch.Tensor) -> torch.Tensor:
    """int32 [batch + 1]: which of all tokens are whose."""
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


_MOST_FORMS = 64  # of tokens whose calls a cache remembers
# What the library takes at most: see spattn_problem.
_MOST_ENTRIES, _MOST_HEADS, _MOST_COLUMNS, _LARGEST_PAGE, _MOST_TOKENS = 1 << 20, 1 << 16, 1024, 65536, (1 << 31) - 1
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def _size(name: str, given: Any, least: int, most: int) -> int:
    size = integer(given, name)
    if not least <= size <= most:
        raise ArgumentError(f"argument {name} is {size}; accepted: {least} to {most}", "SPATTN_E_RANGE", name)
    return size


def _device_of_cache(given: Any) -> torch.device:
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):  # torch's own words name no argument
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"argument device is {given!r}; accepted: cpu, cuda", "SPATTN_E_DEVICE", "device")
    return device


def _require_like(name: str, found: tuple[Any, Any], of_cache: tuple[Any, Any]) -> None:
    """found, of_cache: dtype and device."""
    if found[0] != of_cache[0]:
        message = f"argument {name} is {found[0]}; accepted: {of_cache[0]}, as the cache"
        raise DTypeError(message, "SPATTN_E_DTYPE", name)
    if found[1] != of_cache[1]:
        message = f"argument {name} lies on {found[1]}; accepted: {of_cache[1]}, where the cache lies"
        raise ArgumentError(message, "SPATTN_E_DEVICE", name)


def _autocast(x: Any, cache: KVCache) -> Any:
    """x in the cache's dtype, where an autocast is on, under which layers give tensors of either dtype."""
    is_on = torch.is_autocast_enabled(cache.k.device.type)
    is_cast = is_on and isinstance(x, torch.Tensor) and x.is_floating_point()
    return x.to(cache.dtype) if is_cast and x.dtype not in (torch.float64, torch.float8_e4m3fn) else x


@overload
def decode(
    q: torch.Tensor,
    cache: KVCache,
    pattern: AnyPattern,
    counts: Sequence[int] | torch.Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> torch.Tensor: ...


@overload
def decode(
    q: torch.Tensor,
    cache: KVCache,
    pattern: AnyPattern,
    counts: Sequence[int] | torch.Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def decode(
    q: torch.Tensor,
    cache: KVCache,
    pattern: AnyPattern,
    counts: Sequence[int] | torch.Tensor | None = None,
    *,
    axes: str = "bshd",
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    index_counts: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    step: Step | None = None,
    reference: bool = False,
    tf32: bool = False,
    context: Context | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of the last tokens of each entry of a cache: out, or (out, lse).

        cache.append(k, v)
        out = sat.decode(q, cache, "causal & (sink(4) | window(4095,0))")

        cache.append(k, v, counts)                  # [tokens, heads_kv, head_dim]: a prompt beside decoded tokens
        out = sat.decode(q, cache, "causal & (sink(4) | window(4095,0))", counts)

    q        [batch, n, heads_q, head_dim], of the cache's dtype, to which autocast casts it, and device: queries of the
             last n tokens, row by row those that append was given. Where that had counts, rows of tokens that are not
             new mean nothing. Or [tokens, heads_q, head_dim], as append takes keys: those of the last counts[b] tokens
             of each entry. A plan is made for each number of rows: pad them to a few numbers, for rows behind all
             counts see nothing
    pattern  that of the whole sequence, cut to what is causal: a Pattern or its text. A mask, and any pattern of rows,
             is of [capacity, capacity] tokens
    counts   integers [batch], with a q of tokens of all entries, else None: how many are those of each. Rows behind all
             of them see nothing. A tensor on the cache's device is read there alone
    axes     "bshd"; "bhsd" for a q of [batch, heads_q, n, head_dim]. A q of three axes is "thd" in any case
    indices  int32 or int64 [batch, n, heads_kv, most], or [tokens, heads_kv, most]: the lists of a pattern that is
             runtime_tokens, or runtime_blocks with a block_q of 1, alone or under causal. They name tokens of the
             entry's own sequence, and no query sees one behind it. index_counts [batch, n, heads_kv] says how many
             entries of each list count, None: all
    parents  int32 or int64 [batch, n], or [tokens], where queries are nodes of trees, drafts of several continuations
             as SpecInfer verifies them (https://arxiv.org/abs/2305.09781): the number of each query's parent among
             those of its entry in this call, from 0, or -1 of a root. Of the keys of these tokens that the pattern
             keeps, a query sees its own and those of its ancestors alone. What is not below its own number counts as
             -1. Entries with several numbers of drafts are best given as [tokens], since rows of tokens that are not
             new would be nodes, too. Then cache.keep keeps the drafts that were accepted
    step     what the layers of a model share in one of its steps, where each has a cache, all of which were given the
             same numbers of tokens:

                 step.reset()                               # a sat.Step(), for each step of the model anew
                 for layer, cache in zip(layers, caches):
                     ...
                     cache.append(k, v)
                     out = sat.decode(q, cache, pattern, step=step)

             A call makes lists of the keys that its queries see before it attends. Of calls with one step the first of
             each plan does, and the others find them. All have the same counts then, and the same parents: the very
             tensor, as of counts that lie on a GPU, and unchanged. Caches with pages= have the same pages, as they do
             where the same calls have come in the same order. Else ArgumentError says what is not the same. A step that
             is captured begins and ends in one graph
    out      shaped as q with head_dim_v, written and returned where given

    scale, softcap, sink_logits, reference, tf32 and context are those of attention. lse is float32 [batch, heads_q, n],
    or [heads_q, tokens]. A token before an entry's first sees nothing: out 0, lse -inf.

    The host waits for nothing: lengths are read on the device. Plans are remembered as those of attention, and one
    serves a sequence of any length. CUDA graphs may capture a call, but for the first of its sizes, which makes the plan.

    torch.utils.flop_counter.FlopCounterMode counts the pairs that the pattern keeps of these queries, as
    sparseattn.decoded: where the host's numbers of tokens say that they are, nodes of trees as if each saw all tokens
    before it, and all that lists have room for. Counts that lie on a GPU it knows where append was given the same
    tensor, and else counts nothing, as it does of a graph's replays.

    Raises ArgumentError where q, sink_logits, scale, softcap or out requires a gradient, but for torch.no_grad(), and
    as attention.
    """
    options = (axes, scale, softcap, None, None, reference, tf32)
    given = {"sink_logits": sink_logits, "indices": indices, "index_counts": index_counts, "parents": parents}
    return outside_of_graphs(_decode, q, cache, pattern, counts, given, options, step, context, out, return_lse)


def _decode(
    q: Any,
    cache: Any,
    pattern: Any,
    counts: Any,
    given: dict[str, Any],
    options: tuple[Any, ...],
    step: Any,
    context: Any,
    out: Any,
    return_lse: bool,
) -> Any:
    require_memory(q, "q")
    if not isinstance(cache, KVCache):
        message = f"argument cache is {type(cache).__name__}; accepted: a sparseattn.torch.KVCache"
        raise DTypeError(message, "SPATTN_E_DTYPE", "cache")
    sink_logits = given["sink_logits"]
    refuse_gradients("cache", WITHOUT_GRADIENTS, q=q, sink_logits=sink_logits, out=out)
    refuse_transforms(q=q, sink_logits=sink_logits)
    q, given = _autocast(q, cache), given | {"sink_logits": wide_sinks(sink_logits)}
    axes, scale, softcap, _, _, *flags = with_numbers(options)  # positions and columns are those of the cache
    k, v, table = cache.k, cache.v, cache.page_table
    k_scales, v_scales = cache.k_scales, cache.v_scales
    is_ragged = q.dim() == 3
    if is_ragged:
        axes = "thd"
    elif counts is not None:
        message = f"argument counts is given with a q of shape {list(q.shape)}; accepted: None, or a q of three axes"
        raise ArgumentError(message, "SPATTN_E_ARGUMENT", "counts")
    if axes == "bhsd":
        k = k.transpose(1, 2)
        v, k_scales, v_scales = (x if x is None else x.transpose(1, 2) for x in (v, k_scales, v_scales))
    # The number of pages, which is the first size of k and v, is nothing to a plan: caches share plans.
    shapes = (q.shape, (0, *k.shape[1:]), v if v is None else (0, *v.shape[1:]), table.shape)
    of_cache = (cache.dtype, k.device, cache.head_dim_v, k.dtype)
    flags = [sink_logits is not None, given["parents"] is not None, *flags]
    key = (q.dtype, q.device, of_cache, shapes, axes, scale, softcap, *flags)
    plan: TensorPlan = find(_make_plan, context_of(q) if context is None else context, pattern, key)
    queries, given_counts = q.shape[{"thd": 0, "bshd": 1, "bhsd": 2}[axes]], counts
    if step is None:
        places = _places_of(cache, counts, queries, is_ragged)
    else:
        step = StepOfCaches(step)
        key, parents = ("places", plan, plan._queue()), given["parents"]
        counts = _known_counts(cache, counts, queries) if is_ragged else None
        made = step._kept.get(key)
        if made is None:
            made = _Places(cache, counts, parents, _places_of(cache, counts, queries, is_ragged))
        else:
            made.check(cache, counts, parents)
        places = made.of_step
    more = {"k_scales": k_scales, "v_scales": v_scales, "page_table": table, **places, **given, "step": step}
    results = plan.run(q, k, v, **more, out=out, return_lse=return_lse)
    if step is not None:
        step._keep(key, made)  # not before a call has done with it
    if num_dispatch_modes():
        pattern = as_pattern(pattern)
        begins, ends = _rows_known(cache, given_counts, queries, is_ragged)
        written = results[0] if return_lse else results
        about = pattern._name, axes, begins, ends, cache.k.shape[2], cache.capacity
        torch.ops.sparseattn.decoded(q, written, *about)
    return results


def _places_of(cache: KVCache, counts: Any, queries: int, is_ragged: bool) -> dict[str, torch.Tensor]:
    """Where the queries of a call stand, as plans take it."""
    if not is_ragged:
        return {"starts": cache.lengths - queries}
    counts = cache._counts_on_device(counts, queries)
    return {"starts": cache.lengths - counts, "query_offsets": _offsets_of(counts)}


def _known_counts(cache: KVCache, counts: Any, queries: int) -> Any:
    """A tensor that the device reads, or numbers."""
    return counts if cache._lies_there(counts) and cache.k.is_cuda else cache._read_counts(counts, queries, True)


def _rows_known(cache: KVCache, counts: Any, queries: int, is_ragged: bool) -> tuple[list[int], list[int]]:
    """Which rows of the pattern ask in each entry, begin and end, as far as the host knows it and waits for no device:
    none where only the device has the counts."""
    asked: Any = queries
    if is_ragged and not (cache.k.is_cuda and cache._lies_there(counts)):
        asked = cache._read_counts(counts, queries, True)
    elif is_ragged:
        noted, read = cache._counts_read or (None, 0)
        asked = read if noted is not None and not change_of(counts, noted) else 0
    return np.maximum(cache._tokens - asked, 0).tolist(), cache._tokens.tolist()


class _Places:
    """Where the queries of a step stand, and what the host knows of that and of the pages."""

    def __init__(self, cache: KVCache, counts: Any, parents: Any, of_step: dict[str, torch.Tensor]):
        self._counts, self._parents = (note_of(x) if isinstance(x, torch.Tensor) else x for x in (counts, parents))
        self.of_step = of_step
        self._entries = cache._entries
        self._tokens, self._pages = cache._tokens.copy(), self._pages_of(cache).copy()

    @staticmethod
    def _pages_of(cache: KVCache) -> NDArray[np.int32]:
        """Those that have tokens; without pages= each entry has its own."""
        return cache._held[:, : -(-int(cache._tokens.max(initial=0)) // cache.page_size)]

    def check(self, cache: KVCache, counts: Any, parents: Any) -> None:
        """Raises ArgumentError where a call's numbers are others."""
        for name, given, noted in (("parents", parents, self._parents), ("counts", counts, self._counts)):
            is_tensor, was_tensor = isinstance(given, torch.Tensor), isinstance(noted, tuple)
            if is_tensor and was_tensor:
                refuse_other(name, change_of(given, noted))
            elif given is not noted and (is_tensor or was_tensor or not np.array_equal(given, noted)):
                refuse_other(name, OTHER_NUMBERS)
        if not (
            np.array_equal(self._tokens, cache._tokens)
            and np.array_equal(self._pages, self._pages_of(cache))
            and (cache._is_shared or cache._entries == self._entries)
        ):
            refuse_other("step", "was begun with a cache that has other lengths, or other pages, than this one")



def _make_plan(
    context: Context,
    pattern: Pattern,
    dtype: torch.dtype,
    device: torch.device,
    of_cache: tuple[torch.dtype, torch.device, int, torch.dtype],
    shapes: tuple[Any, Any, Any, Any],
    axes: str,
    scale: float | None,
    softcap: float | None,
    sink_logits: bool,
    parents: bool,
    reference: bool,
    tf32: bool,
) -> TensorPlan:
    """The plan of a call; shapes are those of q, k, v and page_table.

    of_cache  dtype, device and head_dim_v, and the dtype of k and v
    """
    _require_like("q", (dtype, device), of_cache[:2])
    q, k, v, table = shapes
    sizes = sizes_of(q, k, v, axes, of_cache[2], table)
    if sizes["heads_q"] % sizes["heads_kv"] or not sizes["heads_q"]:
        message = f"argument q has {sizes['heads_q']} heads; accepted: multiples of the cache's {sizes['heads_kv']}"
        raise ShapeError(message, "SPATTN_E_SHAPE", "q")
    if sizes["batch"] != table[0] or sizes["head_dim"] != k[3]:
        message = f"argument q has shape {list(q)}; accepted: batch {table[0]} and head_dim {k[3]}, as the cache"
        raise ShapeError(message, "SPATTN_E_SHAPE", "q")
    options = {"scale": scale, "softcap": softcap, "sink_logits": sink_logits, "reference": reference, "tf32": tf32}
    on_cache = {"dtype": dtype, "cache_dtype": of_cache[3], "starts": True, "parents": parents}
    return TensorPlan(pattern, device, **sizes, **options, **on_cache, context=context)
