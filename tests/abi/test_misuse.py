# SPDX-License-Identifier: MIT
"""Each argument of each function wrong in every way that its type or hostile.py knows: a typed error that names it, no
handle, and memory that stays as it was. The rows come from the header, so that a function, parameter or field that is
not covered here fails. What no type tells, misuse_*.cpp say."""
import collections

import capi
import hostile
import numpy as np
import pytest

ffi = capi.ffi
Case = collections.namedtuple("Case", "what arguments status named")
NULL = ffi.NULL
ALIVE = []  # what pointers of the arguments point to lives as long as the tests


def read_header():
    """Each function -> (whether it returns a status, its parameters)."""
    return {node.name: (getattr(node.type.type.type, "names", []) == ["spattn_status"],
                        [parameter.name for parameter in node.type.args.params if parameter.name])
            for node in capi.functions()}


FUNCTIONS = read_header()
CHECKED = [name for name, (has_status, _) in FUNCTIONS.items() if has_status]


def keep(value):
    ALIVE.append(value)
    return value


class World:
    """Legal arguments of every function that returns a status, without the handle that it makes."""

    def __init__(self, library):
        self.library, self.c = library, library.c
        self.memory = []  # all that a call could write
        causal, lists = library.parse("causal"), library.parse("runtime_tokens(5)")
        parts = ffi.new("spattn_pattern*[]", [causal, keep(library.parse("sink(1)"))])
        options = capi.sized("spattn_context_options", device={"type": 1, "index": 0})
        context = library.own(library.c.spattn_context_create, "spattn_context", options)
        extent = capi.sized("spattn_extent", seq_q=6, seq_k=9, heads=2)
        plan = library.own(library.c.spattn_plan_create, "spattn_plan", context, lists, self.problem(), NULL)
        ranks = capi.sized("spattn_sharding_options", ranks=2, rank=1)
        sharding = library.own(library.c.spattn_sharding_create, "spattn_sharding", context, causal, self.problem(), ranks,
                               NULL)
        saved = library.save(causal)
        numbers = self.tensor([0, 2, 3])
        room, count = ffi.new("char[]", 65536), ffi.new("size_t *")
        self.causal, self.plan = causal, plan
        text = (room, len(room), count)
        keeps, nnz, align = ffi.new("int32_t *"), ffi.new("int64_t *"), ffi.new("size_t *")
        self.memory += map(ffi.buffer, (room, keeps, nnz, align))  # but for count: a text's size is told all the same
        self.legal = {
            "last_error": (capi.sized("spattn_error"),),
            "context_create": (options,),
            "device_count": (ffi.new("int32_t *"),),
            "pattern_full": (), "pattern_causal": (), "pattern_logsparse": (),
            "pattern_window": (3, 0), "pattern_sink": (4,), "pattern_block_diagonal": (4,), "pattern_strided": (4,),
            "pattern_dilated": (3, 0, 2), "pattern_landmark": (4, 1), "pattern_fixed": (4, 1),
            "pattern_residue": (4, 1),
            "pattern_documents": (numbers,), "pattern_global_keys": (numbers,), "pattern_global_tokens": (numbers,),
            "pattern_tree": (self.tensor([-1, 0, 1]),),
            "pattern_bigbird": (capi.sized("spattn_bigbird", block=4, window_blocks=3),),
            "pattern_xref": (numbers, self.tensor(np.array([[-1, 0], [0, -1], [1, 0]])), capi.sized("spattn_xref")),
            "pattern_xref_extend": (keep(library.parse("xref([1,2],[])")), numbers,
                                    self.tensor(np.array([[-1, 0], [0, -1], [1, 0]]))),
            "pattern_csr": (numbers, self.tensor([0, 1, 1]), 2, 0),
            "pattern_bsr": (numbers, self.tensor([0, 1, 1]), 4, 4, 8, 8, 2),  # trusted
            "pattern_mask": (self.tensor(np.ones((2, 2, 6, 9), np.uint8)), 0),
            "pattern_predicate": (keep(ffi.callback("spattn_keep_fn", lambda *_: 1)), NULL, 2, 6, 9),
            "pattern_runtime_tokens": (4,), "pattern_runtime_blocks": (4, 4, 2),
            "pattern_union": (parts, 2), "pattern_intersection": (parts, 2), "pattern_difference": (causal, causal),
            "pattern_transpose": (causal,),
            "pattern_per_head": (parts, 2, ffi.new("int32_t[]", [0, 1]), 2),
            "pattern_per_batch": (parts, 2, ffi.new("int32_t[]", [0, 1]), 2),
            "pattern_grid": (ffi.new("int64_t[]", [2, 4]), ffi.new("int64_t[]", [1, 2]), parts, 2),
            "pattern_per_document": (causal, numbers, numbers),
            "pattern_rows": (causal, self.tensor(np.array([[0, 2], [5, 8]])), 8),
            "pattern_columns": (causal, self.tensor(np.array([[0, 2], [5, 8]])), 8),
            "pattern_parse": (b"causal",), "pattern_print": (causal, *text), "pattern_save": (causal, *text),
            "pattern_hash": (causal, ffi.new("uint64_t *")),
            "pattern_load": (keep(ffi.from_buffer(saved)), len(saved)),
            "pattern_stats": (causal, extent, capi.sized("spattn_stats")),
            "pattern_keeps": (causal, extent, 0, 1, 2, 3, keeps),
            "pattern_to_mask": (causal, extent, self.tensor(np.ones((1, 2, 6, 9), np.uint8))),
            "pattern_to_image": (causal, extent, 1, self.tensor(np.ones((3, 4), np.float32))),
            "pattern_to_csr": (causal, extent, 1, self.tensor(np.zeros(7, np.int64)),
                               self.tensor(np.zeros(60, np.int32)), nnz),
            "plan_create": (context, causal, self.problem(), NULL),
            "plan_workspace": (plan, 0, count, align),
            "plan_stats": (plan, capi.sized("spattn_stats")), "plan_explain": (plan, *text),
            "plan_explain_all": (plan, *text),
            "forward": (plan, self.run_args(plan, "forward")), "backward": (plan, self.run_args(plan, "backward")),
            "cache_append": (context, self.cache_problem(), self.append_args()),
            "sharding_create": (context, causal, self.problem(), ranks, NULL),
            "sharding_plan": (sharding,),
            "sharding_ranges": (sharding, 0, self.tensor(np.zeros((1, 2), np.int64)), nnz),
            "sharding_seen": (sharding, self.tensor(np.zeros((1, 2), np.int64)), nnz, keep(ffi.new("int64_t *"))),
            "sharding_peer": (sharding, 0, capi.sized("spattn_peer")), "sharding_buffers": (sharding, count, align),
            "exchange": (sharding, 1, self.exchange_args()),  # the step that has every operand
        }

    @staticmethod
    def problem():
        """With every operand: backward, lists of the call (only reference rows take all of it), sink logits."""
        return capi.sized("spattn_problem", flags=1 | 4 | 64, batch=2, heads_q=4, heads_kv=2, seq_q=40, seq_k=40,
                          head_dim=16, head_dim_v=8, dtype={"code": 2, "bits": 32, "lanes": 1}, axes=1)

    @staticmethod
    def cache_problem():
        return capi.sized("spattn_problem", flags=256, batch=2, heads_q=4, heads_kv=2, seq_q=3, seq_k=40, head_dim=16,
                          head_dim_v=8, dtype={"code": 2, "bits": 32, "lanes": 1}, axes=1)

    def append_args(self):
        """All operands of a cache without pages and of entries with as many rows."""
        shapes = {"k_new": (2, 2, 3, 16), "v_new": (2, 2, 3, 8), "k": (2, 2, 40, 16), "v": (2, 2, 40, 8)}
        args = capi.sized("spattn_cache_append_args")
        for name, shape in shapes.items():
            setattr(args, name, self.tensor(np.ones(shape, np.float32)))
        args.starts, args.counts = self.tensor([4, 5]), self.tensor([3, 1])
        return args

    def exchange_args(self):
        """The second half of the tokens, whose queries see all of the first."""
        shapes = {"k": (2, 2, 20, 16), "v": (2, 2, 20, 8), "seen_k": (2, 2, 40, 16), "seen_v": (2, 2, 40, 8)}
        args = capi.sized("spattn_exchange_args")
        for name, shape in shapes.items():
            setattr(args, name, self.tensor(np.ones(shape, np.float32)))
        args.buffer_bytes = 20 * 2 * 2 * (16 + 8) * 4
        args.buffer = keep(ffi.new("double _Complex[]", args.buffer_bytes // 16))
        return args

    def tensor(self, values):
        array = np.array(values, np.int64) if isinstance(values, list) else values
        self.memory.append(array)
        return keep(capi.tensor(array))

    def content(self):
        return [bytes(memory) for memory in self.memory]

    def run_args(self, plan, op):
        """All operands of a pass, those that may be left out too."""
        q, k, v, out = (2, 4, 40, 16), (2, 2, 40, 16), (2, 2, 40, 8), (2, 4, 40, 8)
        shapes = {"q": q, "k": k, "v": v, "out": out, "lse": q[:3], "max_logits": q[:3], "dout": out, "dlse": q[:3],
                  "dq": q, "dk": k, "dv": v, "sink_logits": (4,), "dsink_logits": (4,)}
        args = capi.sized(f"spattn_{op}_args")
        for name, shape in shapes.items():
            if hasattr(args, name):
                setattr(args, name, self.tensor(np.ones(shape, np.float32)))
        args.indices = self.tensor(np.ones((2, 40, 2, 5), np.int32))
        args.index_counts = self.tensor(np.ones((2, 40, 2), np.int32))
        need, align = ffi.new("size_t *"), ffi.new("size_t *")
        self.library.check(self.c.spattn_plan_workspace(plan, op == "backward", need, align))
        memory = keep(ffi.new("char[]", need[0] + align[0]))
        start = int(ffi.cast("uintptr_t", memory))
        args.workspace = ffi.cast("void *", -(-start // align[0]) * align[0])
        args.workspace_bytes = need[0]
        return args

    def arguments(self, function):
        """Fresh legal arguments; a handle that is made is not NULL before."""
        made = list(self.legal[function.removeprefix("spattn_")])
        types = ffi.typeof(getattr(self.c, function)).args
        if len(made) < len(types):
            made.append(ffi.new(f"{types[-1].item.cname} *", ffi.cast(types[-1].item, 8)))
        return made


@pytest.fixture(scope="module")
def world(library):
    return World(library)


# ---- what can be wrong ----

def spoilt_tensors(good, is_fixed):
    """(what, tensor, status) for a tensor whose legal form is `good`; is_fixed: its sizes follow from others."""
    def spoil(status, what, **fields):
        tensor = keep(ffi.new("spattn_tensor *", good[0]))
        for name, value in fields.items():
            setattr(tensor[0], name, value)
        return what, tensor, status

    def axis(i, size=None, stride=None):
        shape, strides = list(good.shape[0:good.ndim]), list(good.strides[0:good.ndim])
        shape[i] = shape[i] if size is None else size
        strides[i] = strides[i] if stride is None else stride
        return {"shape": keep(ffi.new("int64_t[]", shape)), "strides": keep(ffi.new("int64_t[]", strides))}

    longer = keep(ffi.new("int64_t[]", [*good.shape[0:good.ndim], 1]))
    yield spoil("SPATTN_E_NULL", "data NULL", data=NULL)
    yield spoil("SPATTN_E_NULL", "shape NULL", shape=NULL)
    for axes in {-1, 0, good.ndim - 1 if is_fixed else 0, good.ndim + 1, (1 << 31) - 1}:
        yield spoil("SPATTN_E_SHAPE", f"ndim {axes}", ndim=axes, shape=longer, strides=longer)
    for code, bits, lanes in ((250, good.dtype.bits, 1), (good.dtype.code, 0, 1), (good.dtype.code, 7, 1),
                              (good.dtype.code, good.dtype.bits, 0), (good.dtype.code, good.dtype.bits, 2),
                              (2, 64, 1)):  # float64, of which nothing here is
        dtype = {"code": code, "bits": bits, "lanes": lanes}
        yield spoil("SPATTN_E_DTYPE", f"dtype {dtype}", dtype=dtype)
    for kind in (0, -1, 2, 99):
        yield spoil("SPATTN_E_DEVICE", f"device type {kind}", device={"type": kind, "index": 0})
    if good.dtype.bits > 8:
        yield spoil("SPATTN_E_LAYOUT", "misaligned", byte_offset=1)
    room = 2**64 - int(ffi.cast("uintptr_t", good.data))  # bytes from data to the end of the address space
    offsets = {2**64 - 2**20: "before data", 2**64 - 8: "just before data", room: "at NULL"}
    if np.prod([good.shape[i] for i in range(good.ndim)]) > 1:
        offsets[room - good.dtype.bits // 8] = "with all but the first element beyond the end"
    for offset, what in offsets.items():
        yield spoil("SPATTN_E_LAYOUT", f"offset that wraps, {what}", byte_offset=offset)
    for i in range(good.ndim):
        others = (0, good.shape[i] - 1, good.shape[i] + 1) if is_fixed else ()
        for size in (-1, hostile.HUGE, hostile.LEAST, *others):
            yield spoil("SPATTN_E_SHAPE", f"axis {i} of {size}", **axis(i, size=size))
        for stride in (-1, hostile.HUGE, hostile.MOST, hostile.LEAST) if good.shape[i] > 1 else ():
            yield spoil("SPATTN_E_LAYOUT", f"axis {i} of stride {stride}", **axis(i, stride=stride))


def is_tensor(kind):
    return kind.kind == "pointer" and kind.item.cname == "spattn_tensor"


def spoilt_values(table, owner, name):
    wrong = table.get(owner, {}).get(name)
    for value in wrong.values if wrong else ():
        yield f"{name} {value}", value, wrong.status, wrong.named


def spoilt_field(world, struct, name, kind, good):
    """(what, value, status, named) for a field of a sized struct."""
    if kind.kind == "pointer" and (struct, name) not in hostile.OPTIONAL | hostile.ANYTHING.keys():
        yield f"{name} NULL", NULL, "SPATTN_E_NULL", None
    if is_tensor(kind) and good:
        yield from ((f"{name} {what}", tensor, status, None) for what, tensor, status in spoilt_tensors(good, True))
    yield from spoilt_values(hostile.FIELDS, struct, name)


def spoilt_structs(world, function, parameter, good):
    """(what, struct, status, named) for a sized struct whose legal form is `good`."""
    kind = ffi.typeof(good).item
    size = ffi.sizeof(kind)
    for short in (0, 4, 8):
        spoilt = copy(good)
        spoilt.struct_size = short
        yield f"struct_size {short}", spoilt, "SPATTN_E_STRUCT_SIZE", parameter
    if parameter == "result":
        return  # its other fields are results
    newer = keep(ffi.new("char[]", size + 16))
    ffi.memmove(newer, good, size)
    longer = ffi.cast(f"{kind.cname} *", newer)
    longer.struct_size = size + 16
    newer[size + 15] = b"\1"
    yield "a field of the future", longer, "SPATTN_E_UNKNOWN_FIELD", parameter
    flagged = copy(good)
    flagged.flags |= 1 << 31
    yield "a flag of the future", flagged, "SPATTN_E_UNKNOWN_FIELD", f"{parameter}.flags"
    for name, place in kind.fields[2:]:
        rows = list(spoilt_field(world, kind.cname, name, place.type, getattr(good, name)))
        assert rows or (kind.cname, name) in hostile.ANYTHING, f"nothing hostile is known for {kind.cname}.{name}"
        for what, value, status, named in rows:
            spoilt = copy(good)
            if (kind.cname, name) in hostile.READ_WITH:
                spoilt.flags |= getattr(world.c, hostile.READ_WITH[kind.cname, name])
            setattr(spoilt, name, value)
            yield what, spoilt, status, named or (name if parameter == "args" else f"{parameter}.{name}")


def copy(struct):
    return keep(ffi.new(f"{ffi.typeof(struct).item.cname} *", struct[0]))


def is_sized(kind):
    return kind.kind == "pointer" and kind.item.kind == "struct" and bool(kind.item.fields) and \
        kind.item.fields[0][0] == "struct_size"


def spoilt_argument(world, function, name, kind, good):
    """(what, value, status, named) for an argument."""
    if kind.kind in ("pointer", "function") and (function, name) not in hostile.OPTIONAL | hostile.ANYTHING.keys():
        yield f"{name} NULL", NULL, "SPATTN_E_NULL", None
    if is_tensor(kind):
        is_fixed = (function, name) in hostile.FIXED
        yield from ((f"{name} {what}", tensor, status, None) for what, tensor, status in spoilt_tensors(good, is_fixed))
    elif is_sized(kind):
        yield from spoilt_structs(world, function, name, good)
    elif name == "parts":
        yield "a part NULL", keep(ffi.new("spattn_pattern*[]", [good[0], NULL])), "SPATTN_E_NULL", "parts[1]"
    for what, value, status, named in spoilt_values(hostile.ARGUMENTS, function, name):
        yield what, keep(ffi.new(f"{kind.item.cname}[]", value)) if isinstance(value, list) else value, status, named


def cases(world, function):
    parameters = FUNCTIONS[function][1]
    types = ffi.typeof(getattr(world.c, function)).args
    for i, (name, kind) in enumerate(zip(parameters, types, strict=True)):
        rows = list(spoilt_argument(world, function, name, kind, world.arguments(function)[i]))
        assert rows or (function, name) in hostile.OPTIONAL | hostile.ANYTHING.keys(), \
            f"nothing hostile is known for {name} of {function}"
        for what, value, status, named in rows:
            arguments = world.arguments(function)
            arguments[i] = value
            yield Case(what, arguments, status, named or name)


# ---- the matrix ----

def demand(world, function, case):
    where, before = f"{function}: {case.what}", world.content()
    status = getattr(world.c, function)(*case.arguments)
    assert ffi.string(world.c.spattn_status_name(status)).decode() == case.status, where
    error = capi.sized("spattn_error")
    assert world.c.spattn_last_error(error) == 0
    message, argument = ffi.string(error.message).decode(), ffi.string(error.argument).decode()
    assert (error.status, ffi.string(error.function).decode(), argument) == (status, function, case.named), where
    assert case.named in message and error.line > 0, where
    result = case.arguments[-1]
    if is_handle(ffi.typeof(getattr(world.c, function)).args[-1]) and result != NULL:
        assert result[0] == NULL, where
    assert world.content() == before, where


def is_handle(kind):
    return kind.kind == "pointer" and kind.item.kind == "pointer" and kind.item.item.kind == "struct"


@pytest.mark.parametrize("function", CHECKED)
def test_wrong_arguments(world, function):
    rows = list(cases(world, function))
    assert rows
    for case in rows:
        demand(world, function, case)


@pytest.mark.parametrize("function", CHECKED)
def test_legal_arguments(world, function):
    """Else the rows above would prove nothing."""
    arguments = world.arguments(function)
    world.library.check(getattr(world.c, function)(*arguments))
    kind = ffi.typeof(getattr(world.c, function)).args[-1]
    if is_handle(kind):
        getattr(world.c, f"{kind.item.item.cname}_release")(arguments[-1][0])


def test_functions_that_cannot_fail(world):
    c, null, causal = world.c, NULL, world.causal
    answers = {
        "spattn_version": [((), 100)], "spattn_abi": [((), 0)],
        "spattn_status_name": [((-1,), b"SPATTN_E_UNKNOWN"), ((1 << 30,), b"SPATTN_E_UNKNOWN"), ((0,), b"SPATTN_OK")],
        "spattn_context_retain": [((null,), None)], "spattn_context_release": [((null,), None)],
        "spattn_pattern_retain": [((null,), None)], "spattn_pattern_release": [((null,), None)],
        "spattn_plan_retain": [((null,), None)], "spattn_plan_release": [((null,), None)],
        "spattn_sharding_retain": [((null,), None)], "spattn_sharding_release": [((null,), None)],
        "spattn_plan_kernel": [((null, 0), None), *(((world.plan, op), None) for op in (-1, 2, 1 << 30))],
        "spattn_pattern_equal": [((null, null), 1), ((causal, null), 0), ((null, causal), 0), ((causal, causal), 1)],
        "spattn_kernel_name": [((row,), None) for row in (-1, c.spattn_kernel_count(), (1 << 31) - 1, -(1 << 31))],
        "spattn_kernel_runs_here": [((row,), 0) for row in (-1, c.spattn_kernel_count(), (1 << 31) - 1, -(1 << 31))],
    }
    takes_nothing = {"spattn_build_json", "spattn_last_error_text", "spattn_kernel_count"}
    assert answers.keys() | takes_nothing | set(CHECKED) == FUNCTIONS.keys()
    for function, arguments, expected in [(name, *row) for name, rows in answers.items() for row in rows]:
        got = getattr(c, function)(*arguments)
        if isinstance(got, ffi.CData):
            got = ffi.string(got) if got != null else None
        assert got == expected, (function, arguments)


def test_the_matrix_is_whole(world):
    assert set(FUNCTIONS) == set((capi.ROOT / "tests" / "abi" / "symbols.txt").read_text().split())
    rows = sum(len(list(cases(world, function))) for function in CHECKED)
    assert rows > 1000, rows
