# SPDX-License-Identifier: MIT
"""Two processes that share out batch entries or heads as DTensors, against one that has them all."""

import os
import time

import pytest

import sparseattn as sa

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as processes  # noqa: E402

import sparseattn.torch as sat  # noqa: E402

PROCESSES, SECONDS = 2, 600
PATTERN = "causal & (sink(2) | window(9,0))"
BATCH, HEADS, TOKENS = 0, 2, 1  # axes of "bshd"


def operands(axes="bshd", heads_kv=2, batch=3):
    """The same in all processes."""
    made = torch.Generator().manual_seed(5)
    shapes = [(batch, 40, 4, 24), (batch, 40, heads_kv, 24), (batch, 40, heads_kv, 16)]
    q, k, v = (torch.randn(shape, generator=made) for shape in shapes)
    if axes == "thd":
        return [x.flatten(0, 1) for x in (q, k, v)]
    return [x.transpose(1, 2).contiguous() if axes == "bhsd" else x for x in (q, k, v)]


def loss_of(out, lse):
    return out.sin().sum() + torch.where(lse > -torch.inf, lse, 0).sum()


def check(
    mesh, placements, pattern=PATTERN, expected=None, heads_kv=2, batch=3, sinks=False, axes="bshd", backend="", **options
):
    """expected: placements of out, where they are not those of q. backend: of torch.compile, for what is not eager."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    given = operands(axes, heads_kv, batch)
    given += [torch.linspace(-1, 1, 4)] if sinks else []
    alone = [x.clone().requires_grad_() for x in given]
    replicated = [Replicate()] * mesh.ndim
    shared = [distribute_tensor(x, mesh, p) for x, p in zip(given, [*[placements] * 3, replicated])]
    shared = [x.requires_grad_() for x in shared]

    def call(q, k, v, sink_logits=None):
        return sat.attention(q, k, v, pattern, axes=axes, sink_logits=sink_logits, return_lse=True, **options)

    compiled = torch.compile(call, backend=backend, fullgraph=True) if backend else call
    right, found = call(*alone), compiled(*shared)
    assert all(isinstance(x, DTensor) for x in found)
    assert list(found[0].placements) == (placements if expected is None else expected), found[0].placements
    for one, other in zip(found, right):
        assert one.shape == other.shape and torch.equal(one.full_tensor(), other)
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
    check(mesh, [Shard(HEADS)], heads_kv=4)
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
        assert found.placements == (Shard(HEADS),) and torch.equal(found.full_tensor(), sat.attention(q, q, q, "causal"))
    with pytest.raises(sa.ArgumentError, match="argument k is no DTensor") as caught:
        compiled(shared, q)
    assert caught.value.argument == "k"


def check_groups():
    """Key heads that the processes cannot share out, and torch's own conventions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (PROCESSES,))
    q, k, v = operands(heads_kv=1)
    shared = [distribute_tensor(x, mesh, [p]) for x, p in ((q, Shard(HEADS)), (k, Replicate()), (v, Replicate()))]
    out = sat.attention(*shared, PATTERN)
    assert out.placements == (Replicate(),) and torch.equal(out.to_local(), sat.attention(q, k, v, PATTERN))
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


def process(rank, file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=PROCESSES)
    check_all()
    check_groups()
    check_compiled()
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo that still wants Python's lock when Python ends would abort the process


def test_processes_compute_what_one_does(tmp_path):
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    arguments = (str(tmp_path / "store"),)
    context = processes.start_processes(process, arguments, PROCESSES, join=False, start_method="spawn")
    end = time.monotonic() + SECONDS
    try:
        while not context.join(1):  # which returns when one has ended, too
            assert time.monotonic() < end, f"no end after {SECONDS} s"
    finally:
        for child in context.processes:
            child.kill()
