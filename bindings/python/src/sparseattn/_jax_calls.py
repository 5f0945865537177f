# SPDX-License-Identifier: MIT
"""XLA's calls of the library: what is constant in one, how vmap makes many of it, and how devices of a mesh share it.

A call is functions of JAX, one in the other. The outermost is what vmap sees: it gives all operands one more axis in
front, which the handlers know how to read. The next is what XLA's partitioner sees where arrays lie on several devices:
it says along which axes a call falls into calls of the same kind, batch entries and heads, so that each device computes
its own. The innermost is the custom call. Programs of jax.export have that alone, for what the partitioner sees is a
function of Python, which no file holds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import math
import pathlib
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.export import is_symbolic_dim
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._core import ShapeError, UnsupportedError, default_context, ffi, lib, own
from ._patterns import load
from ._problem import as_bytes

_registering = threading.Lock()


def register() -> None:
    """Tells XLA our calls, once. All functions of sparseattn.jax do so first: it is for a program of jax.export in a
    process that has called none of them. An import alone must not: it would make JAX choose its devices."""
    with _registering:
        _register_once()


@functools.cache
def _register_once() -> None:
    handlers = ctypes.CDLL(str(pathlib.Path(__file__).with_name("_xla.so")))
    for op in ("forward", "backward"):
        for platform in ("cpu", "cuda"):
            handler = getattr(handlers, f"spattn_xla_{op}_{platform}")
            name = {"cpu": "cpu", "cuda": "CUDA"}[platform]
            jax.ffi.register_ffi_target(f"sparseattn_{op}", jax.ffi.pycapsule(handler), platform=name)


SCALES = ("q_scales", "k_scales", "v_scales")  # their first letters name what has these rows
OPTIONAL = ("indices", "index_counts", *SCALES)  # in the order in which the handlers read them


class Call(NamedTuple):
    """What is constant in a call: all are bytes, which hash, and which mean the same in every process."""

    pattern: bytes
    problem: bytes
    given: bytes  # which of OPTIONAL are: 1, or 0

    def attributes(self) -> dict[str, np.ndarray]:
        return {name: np.frombuffer(value, np.uint8) for name, value in self._asdict().items()}

    def read_problem(self) -> Any:
        return ffi.from_buffer("spattn_problem *", self.problem)

    def changed(self, **fields: int) -> Call:
        """The call of a problem with other numbers in these fields."""
        problem = ffi.new("spattn_problem *", self.read_problem()[0])
        for name, value in fields.items():
            setattr(problem, name, value)
        return self._replace(problem=as_bytes(problem))


def which(arrays: dict[str, Any]) -> bytes:
    return bytes(arrays.get(name) is not None for name in OPTIONAL)


def invoke(op: str, call: Call, results: dict[str, Any], arrays: dict[str, Any], refuse: Any) -> tuple[jax.Array, ...]:
    """XLA's call of a pass. JAX asks for its derivative where somebody means to differentiate what has none.

    results  their shapes and dtypes by their names, in the order in which the handlers write them
    arrays   operands by their names, in the order in which the handlers read them
    refuse   raises what that somebody is told
    """
    made = _Pass(op, call, tuple(arrays), tuple((name, form.shape, form.dtype) for name, form in results.items()))
    once = jax.custom_jvp(functools.partial(_invoke, made))
    once.defjvp(refuse)
    return tuple(once(*arrays.values()))


class _Pass(NamedTuple):
    """What is constant where a call, or as many as vmap makes of it, is one custom call."""

    op: str
    call: Call
    operands: tuple[str, ...]
    results: tuple[tuple[str, tuple[int, ...], Any], ...]  # names, shapes and dtypes
    mapped: int = 0  # axes that vmap has put in front of all operands and results

    def run(self, *arrays: Any) -> tuple[jax.Array, ...]:
        forms = tuple(jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in self.results)
        arrays = vary_alike(arrays)
        results = jax.ffi.ffi_call(f"sparseattn_{self.op}", forms)(*arrays, **self.call.attributes())
        alike: tuple[jax.Array, ...] = vary_alike((*arrays, *results))
        return alike[len(arrays) :]

    def grown(self, size: int) -> _Pass:
        """The pass of so many of these."""
        results = tuple((name, (size, *shape), dtype) for name, shape, dtype in self.results)
        return self._replace(results=results, mapped=self.mapped + 1)

    def axes(self, name: str) -> tuple[Any, ...]:
        """The axes of an operand or result: numbers are those of vmap, letters those of the call. Axes of one name have
        one size: b is batch, h heads_kv, and H heads_q, which is h times g, the group. Where devices divide heads, h is
        what divides both kinds, and g what divides those of queries further."""
        problem = self.call.read_problem()
        q = {lib.SPATTN_BSHD: "bsHd", lib.SPATTN_BHSD: "bHsd", lib.SPATTN_THD: "sHd"}[problem.axes]
        k = q.replace("s", "t").replace("H", "h")
        if problem.page_size:
            k = "phtd" if problem.axes == lib.SPATTN_BHSD else "pthd"
        batch, entry = ("", "n") if problem.axes == lib.SPATTN_THD else ("b", "b")
        letters = {"q": q, "k": k, "v": f"{k[:-1]}e", "out": f"{q[:-1]}e", "lse": f"{batch}Hs", "sink_logits": "H"}
        letters |= {"indices": f"{batch}rhm", "index_counts": f"{batch}rh"}
        letters |= {"q_scales": q[:-1], "k_scales": k[:-1], "v_scales": k[:-1]}
        letters |= {"starts": entry, "page_table": f"{entry}c", "query_offsets": "o", "parents": f"{batch}s"}
        return (*range(self.mapped), *letters[name if name in letters else name.removeprefix("d")])


@functools.partial(jax.jit, static_argnums=0)
def _invoke(made: _Pass, *arrays: Any) -> tuple[jax.Array, ...]:
    """A pass under vmap. It is jitted, so that what is called outside of jit is traced once, too."""
    once = jax.custom_batching.custom_vmap(_shared(made))

    def grow(size: int, is_mapped: list[bool], *given: Any) -> tuple[Any, tuple[bool, ...]]:
        if made.call.read_problem().flags & lib.SPATTN_PLAN_STARTS:
            found = _one_after_the_other(made, is_mapped, given)
        else:
            arrays = (x if mapped else jnp.broadcast_to(x, (size, *x.shape)) for mapped, x in zip(is_mapped, given))
            found = _invoke(made.grown(size), *arrays)
        return found, (True,) * len(found)

    once.def_vmap(grow)
    found: tuple[jax.Array, ...] = once(*arrays)
    return found


def _one_after_the_other(made: _Pass, is_mapped: list[bool], given: tuple[Any, ...]) -> Any:
    """Calls on caches, which are of several places, and are not brought together."""

    def one(mapped: Any) -> Any:
        left = iter(mapped)
        return _invoke(made, *(next(left) if is_one else x for is_one, x in zip(is_mapped, given)))

    return jax.lax.map(one, [x for is_one, x in zip(is_mapped, given) if is_one])


# ---- on the devices of a mesh ----


def _shared(made: _Pass) -> Any:
    """What runs a pass where arrays may lie on several devices."""
    partitioned, is_manual = _partitioned(made), bool(_axes_of("Manual"))
    symbols = [size for _, shape, _ in made.results for size in shape if is_symbolic_dim(size)]
    if is_manual and symbols:
        message = f"results have a size {symbols[0]}, a symbol of jax.export, inside of jax.shard_map, where JAX puts "
        message += "no number in its place when the program runs; accepted: numbers"
        raise UnsupportedError(message, "SPATTN_E_UNSUPPORTED", "q")

    def run_shared(*arrays: Any) -> tuple[Any, ...]:
        return tuple(_shared_call.bind(*arrays, made=made, partitioned=jax.make_jaxpr(partitioned)(*arrays)))

    run = made.run if is_manual else run_shared
    explicit = _axes_of("Explicit")

    def run_typed(*arrays: Any) -> tuple[Any, ...]:
        typed = jax.sharding.auto_axes(run, axes=explicit, out_sharding=_types_of_results(made, arrays))
        return tuple(typed(*arrays))

    return run_typed if explicit else run


def _axes_of(kind: str) -> tuple[str, ...]:
    """The axes of a kind of the mesh for which this is traced: "Manual" inside of shard_map, where each device has
    its own arrays, or "Explicit", along which the types of arrays say how they lie."""
    mesh_of_now = getattr(jax.sharding, "get_abstract_mesh", None)  # which jax 0.5.0 does not have
    mesh = mesh_of_now() if mesh_of_now is not None else None
    kinds = zip(mesh.axis_names, mesh.axis_types or ()) if mesh is not None else ()
    return tuple(name for name, one in kinds if one.name == kind)


def _types_of_results(made: _Pass, arrays: tuple[Any, ...]) -> tuple[PartitionSpec, ...]:
    """How results lie, as their types are to say: gradients as what they are of, the others as q."""
    specs = {name: jax.typeof(x).sharding.spec for name, x in zip(made.operands, arrays)}

    def spec(result: str) -> PartitionSpec:
        source = result[1:] if result[1:] in specs else "q"
        dividers = dict(zip(made.axes(source), specs[source]))
        return PartitionSpec(*(dividers.get(axis) for axis in made.axes(result)))

    return tuple(spec(name) for name, *_ in made.results)


def vary_alike(arrays: Any) -> Any:
    """A tree of arrays that JAX takes to differ between the devices of shard_map wherever one of them may. Its own
    operators do so with their operands, and with their results; what it knows nothing of must be told. It then adds up
    what devices have of the gradient of an array that is the same on them."""
    axes = frozenset().union(*map(_varying, jax.tree.leaves(arrays)))
    if not axes:
        return arrays
    vary = functools.partial(jax.lax.pcast, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary

    def cast(array: Any) -> Any:
        others = axes - _varying(array)
        return vary(array, tuple(sorted(others))) if others else array

    return jax.tree.map(cast, arrays)


def _varying(array: Any) -> frozenset[str]:
    """The axes of the mesh of shard_map along which an array differs, where JAX counts them (check_vma)."""
    kind = jax.typeof(array) if hasattr(jax, "typeof") else None
    manual = getattr(kind, "manual_axis_type", None)  # jax 0.8 has vma instead, and 0.5 neither
    found: frozenset[str] = getattr(kind, "vma", frozenset()) if manual is None else manual.varying
    return found


def _lower(context: Any, *arrays: Any, made: _Pass, partitioned: Any) -> Any:
    is_exported = context.module_context.lowering_parameters.for_export

    def run(*arrays: Any) -> Any:
        return jaxpr_as_fun(partitioned)(*arrays)

    # Of what devices share, JAX writes an address into the program, which another call may have had. The name of a
    # function is what tells programs apart where compiled ones are kept (jax_compilation_cache_dir).
    run.__name__ = f"sparseattn_{hashlib.sha256(repr(made).encode()).hexdigest()}"
    return mlir.lower_fun(made.run if is_exported else jax.jit(run), multiple_results=True)(context, *arrays)


# A call of which nobody knows yet whether it is compiled here, or exported. JAX looks into its jaxpr, and so finds that
# it must know the devices before it lowers the call.
_shared_call = Primitive("sparseattn")
_shared_call.multiple_results = True
_shared_call.def_abstract_eval(lambda *arrays, made, partitioned: partitioned.out_avals)
_shared_call.def_impl(lambda *arrays, made, partitioned: made.run(*arrays))
mlir.register_lowering(_shared_call, _lower)


def _partitioned(made: _Pass) -> Any:
    """What runs a pass, and tells XLA's partitioner how devices share it."""
    whole = custom_partitioning(made.run)

    def infer(mesh: Mesh, operands: Any, results: Any) -> Any:
        share = _find_share(made, mesh, zip(made.operands, operands))
        return tuple(share.sharding(name) for name, *_ in made.results)

    def partition(mesh: Mesh, operands: Any, results: Any) -> Any:
        names = [name for name, *_ in made.results]
        share = _find_share(made, mesh, [*zip(made.operands, operands), *zip(names, results)])
        return mesh, share.run, tuple(map(share.sharding, names)), tuple(map(share.sharding, made.operands))

    # JAX would fail where it cannot say by axes of the mesh how an array is divided, say by a half of one.
    whole.def_partition(partition, infer, decode_shardings=False, sharding_rule=lambda mesh, *_: _rule(made, mesh))
    return whole


def _rule(made: _Pass, mesh: Mesh) -> tuple[str, dict[str, int]]:
    """What Shardy propagates by: axes of one name are divided in one way. Heads of queries that an axis of the mesh may
    divide where it cannot divide those of keys are no groups then: Shardy would cut that axis, to divide keys by a part
    of it, and they would be gathered again."""
    problem = made.call.read_problem()
    group = problem.heads_q // problem.heads_kv
    is_finer = any(problem.heads_q % size == 0 and problem.heads_kv % size for size in mesh.shape.values())
    words = {"H": "h" if group == 1 else "g" if problem.heads_kv == 1 or is_finer else "(h g)"}

    def write(names: Any) -> str:
        # Shardy has a notation of its own for axes that vmap has put in front.
        letters = (made.axes(name)[made.mapped :] for name in names)
        return ", ".join(" ".join(("...", *(words.get(axis, axis) for axis in axes))) for axes in letters)

    sizes = {"g": group} if words["H"] == "(h g)" else {}
    return f"{write(made.operands)} -> {write(name for name, *_ in made.results)}", sizes


class _Share(NamedTuple):
    """How devices share a pass: which axes of the mesh divide those of it along which it is many passes."""

    made: _Pass
    mesh: Mesh
    by: dict[Any, tuple[str, ...]]

    def parts(self, axis: Any) -> int:
        return math.prod(self.mesh.shape[name] for name in self.by.get(axis, ()))

    def dividers(self, axis: Any) -> tuple[str, ...]:
        return self.by.get("h", ()) + self.by.get("g", ()) if axis == "H" else self.by.get(axis, ())

    def sharding(self, name: str) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*(self.dividers(axis) or None for axis in self.made.axes(name))))

    def grown(self, axis: Any, dividers: tuple[str, ...]) -> _Share:
        """The same with an axis divided as well, where that is possible. Heads are divided with those of keys, and what
        is left divides heads of queries alone."""
        cuts = [{axis: dividers}]
        if axis == "H":
            cuts = [{"h": dividers[:n], "g": dividers[n:]} for n in range(len(dividers), -1, -1)]
        for cut in cuts:
            grown = self._replace(by={axis: by for axis, by in cut.items() if by} | self.by)
            if grown.is_possible():
                return grown
        return self

    def is_possible(self) -> bool:
        problem = self.made.call.read_problem()
        sizes: dict[Any, int] = dict(enumerate(self.made.results[0][1][: self.made.mapped]))
        sizes |= {"b": problem.batch, "h": problem.heads_kv, "g": problem.heads_q // self.parts("h")}
        if any(axis not in sizes or sizes[axis] % self.parts(axis) for axis in self.by):
            return False
        if "g" in self.by and self.parts("h") != problem.heads_kv and problem.flags & lib.SPATTN_PLAN_STARTS:
            return False  # each call would copy a part of the cache
        used = list(itertools.chain.from_iterable(self.by.values()))
        return len(used) == len(set(used)) and _has_plan(self.local().call)

    def local(self) -> _Pass:
        """The pass of a device."""
        problem = self.made.call.read_problem()
        heads_kv = len(self.heads(0))
        heads_q = problem.heads_q // self.parts("h") // self.parts("g")
        call = self.made.call.changed(batch=problem.batch // self.parts("b"), heads_q=heads_q, heads_kv=heads_kv)
        results = []
        for name, shape, dtype in self.made.results:
            part = dict(zip(self.made.axes(name), self.sharding(name).shard_shape(shape)))
            part |= {"h": heads_kv} if "h" in part else {}
            results.append((name, tuple(part.values()), dtype))
        return self.made._replace(call=call, results=tuple(results))

    def heads(self, rank: int) -> list[int]:
        """Which of the key heads that a device has belong to its query heads: one for each part of a group that it has.
        rank counts the devices that have the same key heads."""
        problem = self.made.call.read_problem()
        group, mine = problem.heads_q // problem.heads_kv, problem.heads_q // self.parts("h") // self.parts("g")
        return [head // group for head in range(rank * mine, (rank + 1) * mine, math.gcd(group, mine))]

    def run(self, *arrays: Any) -> tuple[jax.Array, ...]:
        """What a device computes. A gradient of what several devices have is the sum of theirs."""
        heads_kv = self.made.call.read_problem().heads_kv // self.parts("h")
        table = [self.heads(rank) for rank in range(self.parts("g"))]
        heads = None if heads_kv == 1 or "g" not in self.by else jnp.asarray(table)[jax.lax.axis_index(self.by["g"])]
        if heads is not None:
            arrays = tuple(_take(x, self.made.axes(name), heads) for name, x in zip(self.made.operands, arrays))
        results = []
        for (name, *_), array in zip(self.made.results, self.local().run(*arrays)):
            if heads is not None:
                array = _put_back(array, self.made.axes(name), heads, heads_kv)
            axes = "".join(map(str, self.made.axes(name))).replace("H", "hg")
            over = [name for axis, by in self.by.items() if str(axis) not in axes for name in by]
            results.append(jax.lax.psum(array, over) if over else array)
        return tuple(results)


def _take(array: Any, axes: tuple[Any, ...], heads: Any) -> Any:
    """Of what has an axis of key heads, these."""
    return jnp.take(array, heads, axes.index("h"), mode="clip") if "h" in axes else array


def _put_back(array: Any, axes: tuple[Any, ...], heads: Any, heads_kv: int) -> Any:
    """The gradient of all key heads, from those of these, which may be there more than once."""
    if "h" not in axes:
        return array
    parts = jnp.moveaxis(array, axes.index("h"), 0)
    whole = jnp.zeros((heads_kv, *parts.shape[1:]), array.dtype)
    for head, part in zip(heads, parts):  # one after the other, so that sums have one order on a GPU, too
        whole = whole.at[head].add(part)
    return jnp.moveaxis(whole, 0, axes.index("h"))


def _find_share(made: _Pass, mesh: Mesh, arrays: Any) -> _Share:
    """How devices share a pass whose arrays, pairs of a name and what has a sharding, lie as they do. The first that is
    divided along an axis decides; what cannot be divided so, each device has whole."""
    share = _Share(made, mesh, {})
    for name, array in arrays:
        for axis, by in zip(made.axes(name), _dividers(mesh, array)):
            share = share.grown(axis, by) if by else share
    return share


def _dividers(mesh: Mesh, array: Any) -> tuple[tuple[str, ...], ...]:
    """Of each axis of an array the axes of the mesh that divide it; none where no such axes say how it lies."""
    try:
        local = array.sharding.shard_shape(array.shape)
    except (AttributeError, ValueError):  # it has none, or has unequal parts
        return ()
    names = [name for name, size in mesh.shape.items() if size > 1]
    orders = [order for n in range(len(names) + 1) for order in itertools.permutations(names, n)]
    fitting = []
    for size, part in zip(array.shape, local):
        fitting.append([order for order in orders if part * math.prod(mesh.shape[name] for name in order) == size])
    for found in itertools.product(*fitting):
        used = list(itertools.chain.from_iterable(found))
        if len(used) == len(set(used)):
            sharding = NamedSharding(mesh, PartitionSpec(*(by or None for by in found)))
            if sharding.is_equivalent_to(array.sharding, len(found)):
                return found
    return ()


def _has_plan(call: Call) -> bool:
    """Whether a pattern serves so many batch entries and heads: one that tells them apart serves all of them alone."""
    context, pattern = default_context(), load(call.pattern)
    try:
        own("spattn_plan", lib.spattn_plan_create, context._handle, pattern._handle, call.read_problem(), ffi.NULL)
    except ShapeError:
        return False
    return True
