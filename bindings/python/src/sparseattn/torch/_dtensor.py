# SPDX-License-Identifier: MIT
"""Attention of DTensors: each device attends to those batch entries and heads that it holds of the queries.

Attention is given the tensors that lie on the device, by to_local and from_local, which every release of torch has and
autograd knows. A rule for the operators would be one of torch's that it calls experimental, and could not look at the
sizes of several dimensions of a mesh at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .._core import ArgumentError
from .._problem import sizes_of
from ._attention import _attend, name_of
from ._operators import as_constant, pattern_of


def attend(
    q: Any,
    k: Any,
    v: Any,
    more: tuple[Any, Any, Any],
    mask: Any,
    pattern: Any,
    scalars: tuple[Any, ...],
    return_lse: bool,
    context: Any,
    scales: tuple[Any, Any, Any],
    documents: tuple[Any, Any],
) -> Any:
    """attention of DTensors on one mesh: out, or (out, lse), split as q where that is possible.

    Where a dimension of the mesh splits the batch of q, or its heads, the other operands are split in the same way, and
    no device needs another's part. Where it splits heads further than key heads can be, each device has all of these,
    attends to those of its queries, and makes a part of their gradients, Partial. All else is replicated first: queries
    of a part of the tokens, heads of unequal numbers, and what a pattern tells apart. Lists, masks and documents that
    are no DTensors are the same on all devices.

    Raises ArgumentError where q, k, v, sink_logits or scales are not all DTensors of one mesh, and as attention.
    """
    sink_logits, indices, index_counts = more
    axes, mesh = scalars[0], q.device_mesh
    of_q, of_lists = axes.replace("h", "H"), {"thd": "thl"}.get(axes, "bshl")
    named = {"q": (q, of_q), "k": (k, axes), "v": (v, axes), "sink_logits": (sink_logits, "H")}
    named |= {f"{name}_scales": (x, named[name][1][:-1]) for name, x in zip("qkv", scales)}
    for name, (x, _) in named.items():
        is_needed = x is not None or name == "k"
        if is_needed and (not isinstance(x, DTensor) or x.device_mesh != mesh):
            message = f"argument {name} is no DTensor on the mesh of q; accepted: one on {mesh}"
            raise ArgumentError(message, "SPATTN_E_DEVICE", name)
    sizes = sizes_of(q.shape, k.shape, None if v is None else v.shape, axes, scalars[4])
    split = _split(q, sizes["heads_q"], sizes["heads_kv"], axes, *_told_apart(name_of(pattern)))
    heads = _heads_here(mesh, split, sizes["heads_q"], sizes["heads_kv"])

    # An axis of size 1 serves all heads, or all batch entries.
    of_mask = "" if mask is None else "".join(x if n > 1 else "1" for x, n in zip("bHqk"[-mask.dim() :], mask.shape))
    given = {**named, "indices": (indices, of_lists), "index_counts": (index_counts, of_lists[:-1])}
    given |= {"mask": (mask, of_mask)}
    here = {name: _local(x, letters, split, mesh, heads) for name, (x, letters) in given.items()}
    cu_q, cu_k = (x.full_tensor() if isinstance(x, DTensor) else x for x in documents)
    found = _attend(
        here["q"],
        here["k"],
        here["v"],
        (here["sink_logits"], here["indices"], here["index_counts"]),
        here["mask"],
        pattern,
        scalars,
        True,
        context,
        (here["q_scales"], here["k_scales"], here["v_scales"]),
        (cu_q, cu_k),
    )
    out = _of_all(found[0], of_q, (*q.shape[:-1], sizes["head_dim_v"]), split, mesh)
    rows = dict(zip(of_q, q.shape))
    of_lse = "Ht" if axes == "thd" else "bHs"
    lse = _of_all(found[1], of_lse, [rows[letter] for letter in of_lse], split, mesh)
    return (out, lse) if return_lse else out


# Letters of axes: b is the batch, H heads of queries, h those of keys. Of what a dimension of the mesh splits: b is the
# batch, h heads of both kinds, H those of queries alone, and - is nothing.


def _split(q: Any, heads_q: int, heads_kv: int, axes: str, tells_heads: bool, tells_batch: bool) -> str:
    """What each dimension of the mesh splits."""
    split, ways, ways_kv = "", 1, 1
    for size, placement in zip(q.device_mesh.shape, q.placements):
        # torch.compile may have a symbol for the dimension, which is no index of a text.
        letter = next((letter for letter in "hb" if letter in axes and placement.is_shard(axes.index(letter))), "-")
        is_equal = heads_q % (ways * size) == 0 and heads_kv and heads_q % heads_kv == 0
        if letter == "h" and not tells_heads and is_equal:
            ways *= size
            if ways == ways_kv * size and heads_kv % ways == 0:
                ways_kv = ways  # whole groups of query heads stay beside their key head
            else:
                letter = "H"
        elif letter != "b" or tells_batch:
            letter = "-"
        split += letter
    return split


def _heads_here(mesh: Any, split: str, heads_q: int, heads_kv: int) -> list[int]:
    """Which of the key heads that this device holds belong to its query heads: one for each part of a group that it
    has, or none where these are all that it holds."""
    if "H" not in split:
        return []
    group, mine, rank = heads_q // heads_kv, heads_q, 0
    for dimension, (size, letter) in enumerate(zip(mesh.shape, split)):
        if letter == "h":
            mine //= size
        elif letter == "H":
            mine, rank = mine // size, rank * size + mesh.get_local_rank(dimension)
    part, rest = group, mine
    while rest:  # math.gcd, which torch.compile does not have for its symbols
        part, rest = rest, part % rest
    return [head // group for head in range(rank * mine, (rank + 1) * mine, part)]


def _tell_apart(name: str) -> tuple[bool, bool]:
    """Whether the pattern of this name tells heads apart, and batch entries. Where this does not find out, as of a mask
    that was loaded, the pattern has another number of them than a part has, which the library refuses."""
    made = pattern_of(name)
    text, sizes = str(made), made._sizes
    return "per_head(" in text or sizes.get("heads", 1) > 1, "per_batch(" in text or sizes.get("batch", 1) > 1


_told_apart = as_constant(_tell_apart)


def _local(x: Any, letters: str, split: str, mesh: Any, heads: list[int]) -> Any:
    """This device's part; letters name the axes, heads are those of keys that it attends to."""
    if x is None:
        return None
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    placements = _placements(letters, split)
    # Of what all devices of a dimension have, each makes a part of the gradient from its own share of the work.
    back = [p if letter == "-" or p.is_shard() else Partial() for letter, p in zip(split, placements)]
    here = x.redistribute(mesh, placements).to_local(grad_placements=back)
    if "h" not in letters or not heads:
        return here
    axis = letters.index("h")
    if len(set(heads)) == len(heads):  # one behind the other, which need no copy
        return here.narrow(axis, heads[0], len(heads))
    return torch.cat([here.narrow(axis, head, 1) for head in heads], axis)


def _placements(letters: str, split: str) -> list[Any]:
    of_axes = letters if "h" in letters else letters.replace("H", "h")
    found = []
    for letter in split:
        axis = letters.find("H") if letter == "H" else of_axes.find(letter)
        found.append(Shard(axis) if axis >= 0 else Replicate())
    return found


def _of_all(x: torch.Tensor, letters: str, shape: Any, split: str, mesh: Any) -> Any:
    stride = torch.empty(shape, device="meta").stride()
    placements = _placements(letters, split)
    return DTensor.from_local(x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
