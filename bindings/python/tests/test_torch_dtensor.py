# SPDX-License-Identifier: MIT
"""Processes that share out batch entries or heads as DTensors, against one that has them all."""

import os
import time

import pytest

import sparseattn as sa

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as processes  # noqa: E402

import sparseattn.torch as sat  # noqa: E402

PROCESSES, GRID, SECONDS = 2, 4, 600
PATTERN = "causal & (sink(2) | window(9,0))"
BATCH, HEADS, TOKENS = 0, 2, 1  # axes of "bshd"


def operands(axes="bshd", heads_kv=2, batch=3, heads_q=4):
    """The same in all processes."""
    made = torch.Generator().manual_seed(5)
    shapes = [(batch, 40, heads_q, 24), (batch, 40, heads_kv, 24), (batch, 40, heads_kv, 16)]
    q, k, v = (torch.randn(shape, generator=made) for shape in shapes)
    if axes == "thd":
        return [x.flatten(0, 1) for x in (q, k, v)]
    return [x.transpose(1, 2).contiguous() if axes == "bhsd" else x for x in (q, k, v)]


def loss_of(out, lse):
    return out.sin().sum() + torch.where(lse > -torch.inf, lse, 0).sum()


def check(
    mesh,
    placements,
    pattern=PATTERN,
    expected=None,
    of_keys=None,
    heads=(4, 2),
    batch=3,
    sinks=False,
    axes="bshd",
    backend="",
    **options,
):
    """expected, of_keys: placements of out, and of k and v, where they are not those of q. backend: of torch.compile,
    for what is not eager. heads: of q, and of k and v."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    given = operands(axes, heads[1], batch, heads[0])
    given += [torch.linspace(-1, 1, heads[0])] if sinks else []
    alone = [x.clone().requires_grad_() for x in given]
    replicated = [Replicate()] * mesh.ndim
    of_given = [placements, *[of_keys or placements] * 2, replicated]
    shared = [distribute_tensor(x, mesh, p).requires_grad_() for x, p in zip(given, of_given)]

    def call(q, k, v, sink_logits=None):
        return sat.attention(q, k, v, pattern, axes=axes, sink_logits=sink_logits, return_lse=True, **options)

    compiled = torch.compile(call, backend=backend, fullgraph=True) if backend else call
    right, found = call(*alone), compiled(*shared)
    assert all(isinstance(x, DTensor) for x in found)
    assert list(found[0].placements) == (placements if expected is None else expected), found[0].placements
    for one, other in zip(found, right):  # close alone: a plan of fewer heads may have another row
        assert one.shape == other.shape
        torch.testing.assert_close(one.full_tensor(), other)
    loss_of(*right).backward()
    loss_of(*(x.full_tensor() for x in found)).backward()
    for one, other in zip(shared, alone):
        assert one.grad.placements == one.placements
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


def check_all():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (PROCESSES,))
    replicated = [Replicate()]
    for placement in (Shard(BATCH), Shard(HEADS), Replicate()):
        check(mesh, [placement])
        check(mesh, [placement], sinks=True)
    check(mesh, [Shard(TOKENS)], expected=replicated)
    check(mesh, [Shard(BATCH)], batch=1)
    check(mesh, [Shard(1)], axes="bhsd")
    check(mesh, [Shard(1)], axes="thd")
    offsets = torch.tensor([0, 50, 77, 120])
    check(mesh, [Shard(1)], axes="thd", cu_q=offsets)
    check(mesh, [Shard(HEADS)], heads=(4, 4))
    per_head = sa.per_head(["full", "causal", "window(3,0)", "sink(1)"])
    for pattern in (per_head, str(per_head), "per_head([0,1,0,1], causal, full)"):  # two heads of a part would fit
        check(mesh, [Shard(BATCH)], pattern)
        check(mesh, [Shard(HEADS)], pattern, expected=replicated)
    per_batch = sa.per_batch(["full", "causal", "window(3,0)"])
    check(mesh, [Shard(HEADS)], per_batch)
    check(mesh, [Shard(BATCH)], per_batch, expected=replicated)
    made = torch.Generator().manual_seed(6)
    for shape in ((40, 40), (4, 40, 40), (3, 1, 1, 40), (1, 4, 40, 40), (3, 4, 40, 40)):
        mask = torch.rand(shape, generator=made) < 0.5
        check(mesh, [Shard(BATCH)], mask)
        check(mesh, [Shard(HEADS)], mask)
    lists = torch.randint(0, 40, (3, 40, 2, 5), generator=made)
    for placement in (Shard(BATCH), Shard(HEADS)):
        check(mesh, [placement], "causal & runtime_tokens(5)", indices=lists)
    grid = init_device_mesh("cpu", (1, PROCESSES))
    check(grid, [Shard(BATCH), Shard(HEADS)], sinks=True)
    check(grid, [Shard(HEADS), Shard(BATCH)], sinks=True)
    mask = sa.load(sa.mask(torch.rand(4, 40, 40) < 0.5).save())  # of which nobody knows that it has heads
    with pytest.raises(sa.ShapeError, match="4 heads where the extent has 2"):
        check(mesh, [Shard(HEADS)], mask)


def check_compiled():
    """In one graph: what differs is how torch traces what tensors and patterns are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, made = init_device_mesh("cpu", (PROCESSES,)), torch.Generator().manual_seed(6)
    torch._dynamo.config.recompile_limit = 100  # for each call of check is the same code
    for placement, backend in ((Shard(BATCH), "aot_eager"), (Shard(HEADS), "inductor")):
        check(mesh, [placement], backend=backend)
        check(mesh, [placement], sinks=True, backend="aot_eager")
        mask = torch.rand(3, 4, 40, 40, generator=made) < 0.5
        check(mesh, [placement], mask, backend="aot_eager")
        lists = torch.randint(0, 40, (3, 40, 2, 5), generator=made)
        check(mesh, [placement], "causal & runtime_tokens(5)", indices=lists, backend="aot_eager")
    check(mesh, [Shard(TOKENS)], expected=[Replicate()], backend="aot_eager")
    check(mesh, [Shard(1)], axes="thd", cu_q=torch.tensor([0, 50, 77, 120]), backend="aot_eager")
    per_head = sa.per_head(["full", "causal", "window(3,0)", "sink(1)"])
    for pattern in (per_head, str(per_head), sa.mask(torch.rand(4, 40, 40, generator=made) < 0.5)):
        check(mesh, [Shard(BATCH)], pattern, backend="aot_eager")
        check(mesh, [Shard(HEADS)], pattern, expected=[Replicate()], backend="aot_eager")

    compiled = torch.compile(lambda q, k: sat.attention(q, k, k, "causal") * 1, backend="aot_eager")
    for seq in (40, 24, 56):  # from the second on with a symbol for the length
        q = torch.randn(2, seq, 4, 8, generator=made)
        shared = distribute_tensor(q, mesh, [Shard(HEADS)])
        found = compiled(shared, shared)
        assert found.placements == (Shard(HEADS),)
        assert torch.equal(found.full_tensor(), sat.attention(q, q, q, "causal"))
    with pytest.raises(sa.ArgumentError, match="argument k is no DTensor") as caught:
        compiled(shared, q)
    assert caught.value.argument == "k"


def check_groups():
    """Key heads that the processes cannot share out: each process has those of its query heads."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh, of_heads, replicated = init_device_mesh("cpu", (GRID,)), [Shard(HEADS)], [Replicate()]
    for heads in ((4, 1), (8, 2), (12, 3), (12, 6), (24, 3)):  # with parts of a group, and parts of two
        check(mesh, of_heads, heads=heads, of_keys=replicated, sinks=True)
        check(mesh, of_heads, heads=heads, of_keys=of_heads)
    check(mesh, of_heads, heads=(6, 3), of_keys=replicated, expected=replicated)  # parts of two sizes
    check(mesh, [Shard(1)], axes="thd", heads=(8, 2), of_keys=replicated, cu_q=torch.tensor([0, 50, 77, 120]))
    made = torch.Generator().manual_seed(6)
    check(mesh, of_heads, torch.rand(3, 8, 40, 40, generator=made) < 0.5, heads=(8, 2), of_keys=replicated)
    lists = {"indices": torch.randint(0, 40, (3, 40, 3, 5), generator=made)}
    lists["index_counts"] = torch.randint(0, 6, (3, 40, 3), generator=made)
    check(mesh, of_heads, "causal & runtime_tokens(5)", heads=(12, 3), of_keys=replicated, **lists)
    per_head = sa.per_head(["full", "causal", "window(3,0)", "sink(1)"])
    check(mesh, of_heads, per_head, heads=(4, 1), of_keys=replicated, expected=replicated)

    grid = init_device_mesh("cpu", (2, GRID // 2))
    both = [Shard(HEADS)] * 2
    for heads in ((8, 2), (8, 1), (12, 3), (12, 6)):
        for of_keys in ([Shard(HEADS), Replicate()], [Replicate()] * 2):
            check(grid, both, heads=heads, of_keys=of_keys)
    for placements in ([Shard(BATCH), Shard(HEADS)], [Shard(HEADS), Shard(BATCH)]):
        check(grid, placements, heads=(4, 1), of_keys=[p if p.is_shard(BATCH) else Replicate() for p in placements])
    for heads in ((8, 1), (12, 3)):
        check(grid, both, heads=heads, of_keys=[Replicate()] * 2, backend="aot_eager")


def check_conventions():
    """torch's own, and what is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (PROCESSES,))
    q, k, v = operands("bhsd", heads_kv=4)
    shared = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)]
    out = sat.scaled_dot_product_attention(*shared, is_causal=True)
    assert out.placements == (Shard(1),)
    assert torch.equal(out.full_tensor(), sat.scaled_dot_product_attention(q, k, v, is_causal=True))
    with pytest.raises(sa.ArgumentError, match="argument k is no DTensor") as caught:
        sat.attention(shared[0], k, v, "full", axes="bhsd")
    assert caught.value.argument == "k"
    for wrong, argument in (((shared[0], None, shared[2]), "k"), ((shared[0][0], *shared[1:]), "q")):
        with pytest.raises(sa.ArgumentError, match=f"argument {argument}") as caught:
            sat.attention(*wrong, "full", axes="bhsd")
        assert caught.value.argument == argument
    with pytest.raises(sa.ArgumentError, match="axes is 'hbsd'"):
        sat.attention(*shared, "full", axes="hbsd")
    with pytest.raises(sa.UnsupportedError, match="argument k is a DTensor; accepted: "):
        sat.float8_attention(q, shared[1], v, "full", axes="bhsd")


def process(rank, file, ranks):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    if ranks == GRID:
        check_groups()
    else:
        check_all()
        check_conventions()
        check_compiled()
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo that still wants Python's lock when Python ends would abort the process


@pytest.mark.parametrize("ranks", [PROCESSES, GRID])
def test_processes_compute_what_one_does(tmp_path, ranks):
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    arguments = (str(tmp_path / "store"), ranks)
    context = processes.start_processes(process, arguments, ranks, join=False, start_method="spawn")
    end = time.monotonic() + SECONDS
    try:
        while not context.join(1):  # which returns when one has ended, too
            assert time.monotonic() < end, f"no end after {SECONDS} s"
    finally:
        for child in context.processes:
            child.kill()
