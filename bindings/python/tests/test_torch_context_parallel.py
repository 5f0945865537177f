# SPDX-License-Identifier: MIT
"""Tokens that several processes hold: the same results and gradients as in one, and no key is sent that nobody sees."""

import os
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as processes  # noqa: E402

import sparseattn as sa  # noqa: E402
import sparseattn.torch as sat  # noqa: E402

SEQ, PROCESSES, SECONDS = 700, 3, 300
UNEVEN = [[(600, 700), (0, 30)], [(31, 300)], [(30, 31), (300, 600)]]
FLOAT8 = [("causal & (sink(3) | window(150,0))", "zigzag"), ("causal", "contiguous"), ("window(40,60)", UNEVEN)]
SHAPES = {"q": (2, SEQ, 4, 24), "k": (2, SEQ, 2, 24), "v": (2, SEQ, 2, 16)}


def patterns():
    """Of each: the pattern, who holds what, and options of its own."""
    rng = np.random.default_rng(5)
    lists = sa.csr(*sa.parse("causal & (strided(9) | window(20,0))").to_csr(SEQ), SEQ)
    return [
        ("causal", "contiguous", {}),
        ("causal", "zigzag", {}),
        ("causal & (sink(3) | window(150,0))", "zigzag", {"softcap": 4.0}),
        ("window(40,60)", UNEVEN, {"deterministic": True}),
        ("block_diagonal(50)", "contiguous", {}),
        ("documents(0,90,400,401,700) & causal", UNEVEN, {}),
        ("causal & (fixed(64,3) | global_tokens(5,600))", "zigzag", {"scale": 0.3}),
        ("bigbird(32,3,1,1,7)", "contiguous", {}),
        ("transpose(causal & window(30,0))", UNEVEN, {}),
        ("per_head([0,1,1,0], causal, window(9,9))", "zigzag", {"heads": 4}),
        ("per_batch([0,1], causal, full)", "contiguous", {}),
        ("logsparse | residue(7,2)", UNEVEN, {}),
        (sa.tree([-1, *rng.integers(0, np.arange(1, SEQ))]), "zigzag", {}),
        (sa.xref(rng.integers(0, 40, SEQ)), UNEVEN, {}),
        (lists, UNEVEN, {"sink_logits": True}),
        (sa.bsr([0, 1, 3], [1, 0, 1], 350, 350, SEQ, SEQ), UNEVEN, {}),
        (sa.predicate(lambda head, q, k: (q * 7 + k) % 11 == 0, SEQ, SEQ), "zigzag", {}),
        (rng.random((SEQ, SEQ)) < 0.02, "zigzag", {}),
        (rng.random((4, SEQ, SEQ)) < 0.02, "contiguous", {}),
        (sa.per_document("window(9,0)", [0, 333, 690]), "zigzag", {}),  # rows behind the last document see nothing
        (sa.parse("causal & runtime_tokens(30)"), "contiguous", {"lists": (1, 30)}),
        (sa.parse("causal & runtime_tokens(30)"), UNEVEN, {"lists": (1, 30)}),
        (sa.parse("runtime_blocks(64,32,5)"), [[(0, 128)], [(128, 512)], [(512, 700)]], {"lists": (64, 5)}),
        (rng.random((2, 1, SEQ, SEQ)) < 0.02, "zigzag", {}),
        (sa.per_batch([lists, "causal"]), UNEVEN, {}),
    ]


def operands():
    made = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}


def run(attend, x, options, indices=None):
    """out, lse and the gradients of what a process holds."""
    leaves = [tensor.clone().requires_grad_() for tensor in x.values()]
    more = {name: value for name, value in options.items() if name in ("softcap", "scale", "deterministic")}
    if options.get("sink_logits"):
        more["sink_logits"] = torch.linspace(-1, 1, 4).requires_grad_()
        leaves.append(more["sink_logits"])
    if indices is not None:
        more["indices"] = indices
    out, lse = attend(*leaves[:3], return_lse=True, **more)
    loss = (out.float() * (1 + out.detach().float().cos())).sum() + lse.nan_to_num(neginf=0).sin().sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def lists_of(options):
    """Of all queries: [batch, lists, heads_kv, entries], what is absent and repeats included."""
    block_q, most = options["lists"]
    made = torch.Generator().manual_seed(9)
    blocks = SEQ if block_q == 1 else -(-SEQ // 32)
    return torch.randint(-1, blocks + 1, (2, -(-SEQ // block_q), 2, most), generator=made, dtype=torch.int32)


def unwritten(self, shape, dtype):
    """In place of TensorPlan's own: what is not written later must not be read."""
    return torch.full(shape, torch.nan, dtype=dtype)


def close(got, want, name):
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-5, atol=2e-5, msg=lambda text: f"{name}: {text}")


def check(pattern, ranges, options):
    heads = options.get("heads")
    parallel = sat.ContextParallel(pattern, SEQ, ranges=ranges, heads=heads)
    whole = operands()
    local = {name: parallel.local(x) for name, x in whole.items()}
    indices = rows = None
    if "lists" in options:
        block_q, indices = options["lists"][0], lists_of(options)
        of_ranges = [indices[:, begin // block_q : -(-end // block_q)] for begin, end in parallel.ranges]
        rows = torch.cat(of_ranges, 1)
    want = run(lambda q, k, v, **more: sat.attention(q, k, v, pattern, **more), whole, options, indices)
    got = run(parallel.attention, local, options, rows)
    axes = [1, 2, 1, 1, 1]
    for name, one, other, axis in zip(("out", "lse", "dq", "dk", "dv"), got, want, axes):
        close(one, parallel.local(other, axis), name)
    if options.get("sink_logits"):
        dist.all_reduce(got[5])
        close(got[5], want[5], "dsink_logits")
    again = run(parallel.attention, local, options, rows)
    assert all(torch.equal(one, other) for one, other in zip(got[:5], again[:5])), "other bits in another call"


def check_axes():
    """bhsd and thd, values in keys, no gradients, and autocast."""
    parallel = sat.ContextParallel("causal & window(99,0)", SEQ, ranges="zigzag")
    whole = operands()
    want = sat.attention(*whole.values(), "causal & window(99,0)")
    q, k, v = (parallel.local(x).transpose(1, 2) for x in whole.values())
    close(parallel.attention(q, k, v, axes="bhsd").transpose(1, 2), parallel.local(want), "bhsd")
    out, lse = parallel.attention(*(parallel.local(x)[0] for x in whole.values()), axes="thd", return_lse=True)
    close(out, parallel.local(want)[0], "thd")
    assert lse.shape == (4, parallel.tokens)
    q, k = whole["q"], whole["k"][:, :, :1]
    want = sat.attention(q, k, None, "causal & window(99,0)", head_dim_v=16)
    got = parallel.attention(parallel.local(q), parallel.local(k), None, head_dim_v=16)
    close(got, parallel.local(want), "values in keys")
    leaves, own = [[x.requires_grad_() for x in pair] for pair in ((q, k), (parallel.local(q), parallel.local(k)))]
    want = torch.autograd.grad(sat.attention(*leaves, None, "causal & window(99,0)", head_dim_v=16).cos().sum(), leaves)
    got = torch.autograd.grad(parallel.attention(*own, None, head_dim_v=16).cos().sum(), own)
    for one, other in zip(got, want):
        close(one, parallel.local(other), "gradients of values in keys")
    q, k, v = (parallel.local(x) for x in whole.values())
    want = parallel.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(parallel.attention(q, k, v), want), "autocast"
    for attend in (parallel.attention, parallel.float8_attention):
        sinks = torch.linspace(-1, 1, 4).bfloat16().requires_grad_()
        wide = sinks.detach().float().requires_grad_()
        got, want = (attend(q, k, v, sink_logits=x, scale=torch.tensor(0.25)) for x in (sinks, wide))
        assert torch.equal(got, want), "sinks of 16 bits"
        (found,), (right,) = torch.autograd.grad(got.sum(), sinks), torch.autograd.grad(want.sum(), wide)
        assert torch.equal(found, right.bfloat16()), "gradients of sinks of 16 bits"


def run_float8(attend, x, **options):
    """As run, of what is rounded on the way in."""
    leaves = [None if tensor is None else tensor.clone().requires_grad_() for tensor in x]
    out, lse = attend(*leaves, return_lse=True, **options)
    loss = (out.float() * (1 + out.detach().float().cos())).sum() + lse.nan_to_num(neginf=0).sin().sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, [x for x in leaves if x is not None])]


def near(got, want, name):
    """Sums of other roundings to bfloat16."""
    got, want = got.float(), want.float()
    bound = 2e-2 * want.nan_to_num(neginf=0).abs().max().item()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=bound, msg=lambda text: f"{name}: {text}")


def check_float8(text, ranges):
    """Rounded here, and rounded before; scales of heads, of rows, and none; values in keys."""
    parallel = sat.ContextParallel(text, SEQ, ranges=ranges)
    whole = [x * torch.linspace(0.1, 3, SEQ)[:, None, None] for x in operands().values()]  # tokens that are loud
    q, k, v = whole
    axes = [1, 2, 1, 1, 1]
    for case, (x, options) in {
        "heads": (whole, {}),
        "rows": (whole, {"scales": "rows"}),
        "of bfloat16": ([x.bfloat16() for x in whole], {"deterministic": True}),
        "values in keys": ([q, k[:, :, :1], None], {"head_dim_v": 16, "scales": "rows"}),
    }.items():
        want = run_float8(lambda *x, **more: sat.float8_attention(*x, text, **more), x, **options)
        got = run_float8(parallel.float8_attention, [y if y is None else parallel.local(y) for y in x], **options)
        for name, one, other, axis in zip(("out", "lse", "dq", "dk", "dv"), got, want, axes):
            assert one.dtype == other.dtype
            near(one, parallel.local(other, axis), f"{name} of {case}")
    for case, round_here in {
        "rows": lambda x: sat.to_float8(x, scales="rows"),
        "heads, each process its own": sat.to_float8,
        "none": lambda x: (x.to(torch.float8_e4m3fn), None),
    }.items():
        rounded = [round_here(parallel.local(x)) for x in whole]
        (q, k, v), scales = zip(*rounded)
        scales = dict(zip(("q_scales", "k_scales", "v_scales"), scales))
        got = parallel.attention(q, k, v, **scales)
        # What everybody's rows stand for, gathered: exact, as scales are powers of two.
        stand_for = []
        for x, of_x in zip((q, k, v), scales.values()):
            own = x.float() if of_x is None else x.float() * of_x[..., None]
            all_of_it = [None] * PROCESSES
            dist.all_gather_object(all_of_it, (parallel.ranges, own))
            one = own.new_empty(own.shape[0], SEQ, *own.shape[2:])
            for held, rows in all_of_it:
                for (begin, end), part in zip(held, rows.split([end - begin for begin, end in held], 1)):
                    one[:, begin:end] = part
            stand_for.append(one)
        want = sat.attention(*stand_for, text)
        assert got.dtype == torch.bfloat16
        near(got, parallel.local(want), f"out of {case}")
    only_keys = parallel.attention(q, k, v, k_scales=torch.full(k.shape[:-1], 0.5))
    near(only_keys, parallel.attention(q, k, v, scale=0.5 * 24**-0.5), "scales of keys alone")


def check_axes_of_float8():
    parallel = sat.ContextParallel("causal & window(99,0)", SEQ, ranges="zigzag")
    x = [parallel.local(x) for x in operands().values()]
    for scales in ("heads", "rows"):
        want = parallel.float8_attention(*x, scales=scales)
        of_heads = parallel.float8_attention(*(x.transpose(1, 2) for x in x), axes="bhsd", scales=scales)
        assert torch.equal(of_heads.transpose(1, 2), want)
        packed = parallel.float8_attention(*(x[0] for x in x), axes="thd", scales=scales)
        if scales == "rows":  # else the other entry's are not the largest
            assert torch.equal(packed, want[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert parallel.float8_attention(*x, scales=scales).dtype == torch.bfloat16
    # What is not finite in one process has no scale in any.
    x[2] = x[2].clone()
    x[2][0, -1, 0, 0] = torch.nan if dist.get_rank() == 1 else 1000
    gathered = [None] * PROCESSES
    _, scales = parallel._round("bshd", "heads", *x)
    dist.all_gather_object(gathered, scales[2][0, 0].tolist())
    assert gathered == [gathered[0]] * PROCESSES and gathered[0][0] == 1, gathered


def check_sent():
    """A window needs the tokens beside the own ones, blocks alone none, and sinks the first block."""
    texts = "block_diagonal(1024)", "causal & window(100,0)", "causal & (sink(4) | window(100,0))", "full"
    blocks, window, streaming, full = (sat.ContextParallel(text, 3072).received for text in texts)
    rank = dist.get_rank()  # of 1,024 tokens each
    assert (blocks, window, full) == (0, 128 if rank else 0, 2048)
    assert streaming == [0, 256, 256][rank]


def check_kept():
    """What a layer keeps for backward is what a process holds and sees, and not what nobody here sees."""
    made = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 3072, 2, 8, generator=made) for _ in "qkv")
    for pattern, most in (("causal & window(100,0)", 1024 + min(128, 128 * dist.get_rank())), ("full", 3072)):
        parallel, kept = sat.ContextParallel(pattern, 3072), []
        own = [parallel.local(x).clone().requires_grad_() for x in (q, k, v)]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
            out = parallel.attention(*own)
        tokens = [shape[1] for shape in kept if len(shape) == 4]
        assert max(tokens) == most, (pattern, kept)
        out.sum().backward()
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            out = parallel.float8_attention(*own)
        widths = [x.element_size() for x in kept if x.dim() == 4]
        assert sorted(widths) == [1, 1, 1, 2], "a byte for each element of q, k and v, two for out"
        out.sum().backward()


def check_errors():
    x = torch.zeros(1, SEQ, 2, 8)
    parallel = sat.ContextParallel("causal", SEQ)
    own = parallel.local(x)
    small, scales = own.to(torch.float8_e4m3fn), torch.ones(own.shape[:-1])
    learned = torch.tensor(0.5, requires_grad=True)
    for call, argument in [
        (lambda: parallel.attention(x, x, x), "q"),
        (lambda: parallel.attention(parallel.local(x), x, x), "k"),
        (lambda: parallel.attention(x, x, x, axes="sbhd"), "axes"),
        (lambda: parallel.attention(x, x, x, q_offset=0), "q_offset"),
        (lambda: parallel.attention(np.zeros(3), x, x), "q"),
        (lambda: parallel.attention(own, own, own, scale=learned), "scale"),
        (lambda: parallel.float8_attention(own, own, own, softcap=learned), "softcap"),
        (lambda: parallel.attention(own, own, own, scale="large"), "problem.scale"),
        (lambda: parallel.attention(own, own, own, k_scales=scales), "k_scales"),
        (lambda: parallel.attention(small, small, small, k_scales=scales[:, 1:]), "k_scales"),
        (lambda: parallel.attention(small, small, small, v_scales=scales.double()), "v_scales"),
        (lambda: parallel.attention(small, small, small, q_scales=np.ones(3)), "q_scales"),
        (lambda: parallel.attention(small, small, small, q_scales=scales.clone().requires_grad_()), "q_scales"),
        (lambda: parallel.attention(small.clone().requires_grad_(), small, small), "q"),
        (lambda: parallel.attention(small, small, None, v_scales=scales), "v_scales"),
        (lambda: parallel.float8_attention(own, own, own, scales="columns"), "scales"),
        (lambda: parallel.float8_attention(x, x, x), "q"),
        (lambda: sat.ContextParallel("causal", 5, ranges="zigzag"), "seq"),
        (lambda: sat.ContextParallel("causal", SEQ, ranges="ring"), "ranges"),
        (lambda: sat.ContextParallel("causal", SEQ, ranges=[[(0, SEQ)]]), "ranges"),
        (lambda: sat.ContextParallel("causal", SEQ, ranges=[[(0, 9)], [(8, 30)], [(30, SEQ)]]), "ranges"),
        (lambda: sat.ContextParallel("causal", SEQ, ranges=[[(0, 9)], [(9, 30)], [(30, SEQ - 1)]]), "ranges"),
        (lambda: sat.ContextParallel(["causal", "full"][dist.get_rank() == 1], SEQ), "group"),
        (lambda: sat.ContextParallel("causal", SEQ + dist.get_rank()), "group"),
    ]:
        with pytest.raises(sa.SparseAttentionError, match="accepted: ") as caught:
            call()
        assert caught.value.argument == argument, (argument, str(caught.value))


def process(rank, file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=PROCESSES)
    sat.TensorPlan._empty = unwritten
    for pattern, ranges, options in patterns():
        try:
            check(pattern, ranges, options)
        except Exception as error:
            raise AssertionError(f"{pattern!r} {ranges} {options}: {error}") from error
    check_axes()
    for text, ranges in FLOAT8:
        check_float8(text, ranges)
    check_axes_of_float8()
    check_sent()
    check_kept()
    check_errors()
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo that still wants Python's lock when Python ends would abort the process


def test_processes_compute_what_one_does(tmp_path):
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    context = processes.start_processes(process, (str(tmp_path / "store"),), PROCESSES, join=False,
                                        start_method="spawn")
    end = time.monotonic() + SECONDS
    try:
        while not context.join(1):  # which returns when one has ended, too
            assert time.monotonic() < end, f"no end after {SECONDS} s"
    finally:
        for child in context.processes:
            child.kill()


def test_without_a_group():
    with pytest.raises(sa.ArgumentError, match="init_process_group") as caught:
        sat.ContextParallel("causal", 64)
    assert caught.value.argument == "group"
