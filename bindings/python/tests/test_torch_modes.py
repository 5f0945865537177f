# SPDX-License-Identifier: MIT
"""What dispatch modes of torch make of the operators: counts of FLOPs, and checkpoints that choose what they keep."""

import copy
import types

import pytest

import sparseattn as sa

torch = pytest.importorskip("torch")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import sparseattn.torch as sat  # noqa: E402

PATTERN = sa.causal() & (sa.sink(2) | sa.window(9, 0))
MASK = torch.rand(40, 40, generator=torch.Generator().manual_seed(2)) < 0.3


def operands(heads_kv=2, head_dim_v=16, **options):
    shapes = (2, 40, 4, 24), (2, 40, heads_kv, 24), (2, 40, heads_kv, head_dim_v)
    return [torch.randn(shape, requires_grad=True, **options) for shape in shapes]


def counted(call):
    """FLOPs by operator's name."""
    with FlopCounterMode(display=False) as counter:
        call()
    return {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}


def flops_of(pairs, columns=24 + 16):
    """A product is an addition and a multiplication; forward has one of q and k, and one with v. Backward has five."""
    return {"sparseattn.forward": 2 * columns * pairs, "sparseattn.backward": 5 * columns * pairs}


def pairs_of(pattern):
    pattern = sa.parse(pattern) if isinstance(pattern, str) else pattern
    return pattern.to_mask(sa.Extent(40, batch=2, heads=4)).sum()


PER_HEAD = sa.per_head(["full", "causal", "window(3,0)", "sink(1)"])


@pytest.mark.parametrize("pattern", [PATTERN, "causal", PER_HEAD, MASK])
def test_flops_are_those_of_the_pairs_that_are_kept(pattern):
    q, k, v = operands()
    expected = flops_of(8 * MASK.sum().item() if pattern is MASK else pairs_of(pattern))
    assert counted(lambda: sat.attention(q, k, v, pattern).sum().backward()) == expected
    out = sat.attention(q, k, v, pattern).sum()
    assert counted(out.backward) == {"sparseattn.backward": expected["sparseattn.backward"]}
    with torch.no_grad():
        forward = {"sparseattn.forward": expected["sparseattn.forward"]}
        assert counted(lambda: sat.attention(q, k, v, pattern)) == forward


def test_flops_of_other_axes_and_lists():
    q, k, v = operands()
    packed = [x.detach()[0].requires_grad_() for x in (q, k, v)]
    documents = sa.per_document("causal", [0, 15, 40])
    pairs = 4 * documents.stats(40).pairs
    assert counted(lambda: sat.attention(*packed, documents, axes="thd").sum().backward()) == flops_of(pairs)
    turned = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    assert counted(lambda: sat.attention(*turned, "causal", axes="bhsd").sum().backward()) == flops_of(8 * 40 * 41 / 2)
    last = q.detach()[:, -3:].requires_grad_()
    assert counted(lambda: sat.attention(last, k, v, "causal").sum().backward()) == flops_of(8 * (38 + 39 + 40))
    latent = {"v": None, "head_dim_v": 16, "pattern": "causal"}
    assert counted(lambda: sat.attention(q, k, **latent).sum().backward()) == flops_of(8 * 40 * 41 / 2)
    lists = {"pattern": sa.runtime_tokens(5), "indices": torch.randint(0, 40, (2, 40, 2, 5))}
    assert counted(lambda: sat.attention(q, k, v, **lists).sum().backward()) == flops_of(8 * 40 * 5)


def test_flops_without_numbers():
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = operands(device="meta")
    assert counted(lambda: sat.attention(q, k, v, PATTERN).sum().backward()) == flops_of(pairs_of(PATTERN))
    with FakeTensorMode():
        q, k, v = operands()
        mask = torch.ones(40, 40, dtype=torch.bool)  # nobody knows what it keeps
        assert counted(lambda: sat.attention(q, k, v, PATTERN).sum().backward()) == flops_of(pairs_of(PATTERN))
        assert counted(lambda: sat.attention(q, k, v, mask).sum().backward()) == flops_of(8 * 40 * 40)


PER_BATCH = sa.per_batch(["causal", "full", "window(3,0)"])
CAPACITY = 48


def make_cache(lengths, **options):
    cache = sat.KVCache(len(lengths), CAPACITY, heads_kv=2, head_dim=24, head_dim_v=16, page_size=8, **options)
    k, v = torch.randn(len(lengths), max(lengths), 2, 24), torch.randn(len(lengths), max(lengths), 2, 16)
    cache.append(k, v, lengths)
    return cache


def flops_on_cache(pattern, spans, heads=4):
    """Of rows begin up to end of each entry."""
    made = sa.parse(pattern) if isinstance(pattern, str) else pattern
    seen = (made & sa.causal()).to_mask(sa.Extent(CAPACITY, batch=len(spans), heads=heads))
    pairs = sum(seen[entry, :, begin:end].sum() for entry, (begin, end) in enumerate(spans))
    return {"sparseattn.decoded": 2 * (24 + 16) * pairs}


@pytest.mark.parametrize("pattern", [PATTERN, "full", "window(5,5)", PER_BATCH, str(PER_BATCH), PER_HEAD])
@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"axes": "bhsd"}, {"step": sat.Step()}])
def test_flops_of_calls_on_caches(pattern, options):
    lengths = [30, 2, 41]
    cache, q = make_cache(lengths), torch.randn(3, 4, 5, 24)
    for n in (5, 1):
        asked = q[:, :, :n] if "axes" in options else q[:, :, :n].transpose(1, 2)
        expected = flops_on_cache(pattern, [(max(0, length - n), length) for length in lengths])
        options.get("step", sat.Step()).reset()
        assert counted(lambda: sat.decode(asked, cache, pattern, **options)) == expected


def test_flops_of_entries_with_several_numbers_of_queries():
    cache, counts = make_cache([30, 2, 41]), torch.tensor([0, 1, 9])
    q = torch.randn(12, 4, 24)
    for pattern in (PATTERN, PER_BATCH):
        expected = flops_on_cache(pattern, [(30, 30), (1, 2), (32, 41)])
        assert counted(lambda: sat.decode(q, cache, pattern, counts)) == expected
    assert counted(lambda: sat.decode(q, cache[2:], "full", [12])) == flops_on_cache("full", [(29, 41)])
    assert counted(lambda: sat.decode(q, cache, PATTERN, [0, 0, 0])) == {"sparseattn.decoded": 0}


def test_flops_of_lists_and_trees_on_caches():
    """Lists count with all that they have room for, and drafts as if they were one text."""
    cache, q = make_cache([30, 20]), torch.randn(2, 3, 4, 24)
    lists = torch.randint(0, 20, (2, 3, 2, 5))
    for pattern in ("runtime_tokens(5)", "causal & runtime_tokens(5)"):
        found = counted(lambda: sat.decode(q, cache, pattern, indices=lists))
        assert found == {"sparseattn.decoded": 2 * 40 * 2 * 4 * 3 * 5}
    parents = torch.tensor([[-1, 0, 0]] * 2)
    found = counted(lambda: sat.decode(q, cache, "full", parents=parents))
    assert found == flops_on_cache("full", [(27, 30), (17, 20)])


def test_flops_of_counts_that_lie_on_a_device(monkeypatch):
    """Nobody waits for it: they are known where an append has read the very tensor, and it was not written since."""
    from sparseattn.torch._cache import _rows_known

    cache, counts = make_cache([30, 20]), torch.tensor([2, 1])
    cache.append(torch.randn(3, 2, 24), torch.randn(3, 2, 16), counts)
    twin = copy.deepcopy(cache)
    for one in (cache, twin, cache[:]):
        monkeypatch.setattr(one, "k", types.SimpleNamespace(is_cuda=True, device=counts.device), raising=False)
    nothing = [32, 21], [32, 21]
    assert _rows_known(cache, counts, 3, True) == _rows_known(cache[:], counts, 3, True) == ([30, 20], [32, 21])
    assert _rows_known(cache, counts.clone(), 3, True) == _rows_known(twin, counts, 3, True) == nothing
    counts += 1
    assert _rows_known(cache, counts, 3, True) == nothing


def test_flops_of_compiled_code():
    torch._dynamo.reset()
    q, k, v = operands()
    compiled = torch.compile(lambda q, k, v: sat.attention(q, k, v, PATTERN).sin().sum(), backend="aot_eager")
    expected = flops_of(pairs_of(PATTERN))
    assert counted(lambda: compiled(q, k, v).backward()) == expected
    assert counted(compiled(q, k, v).backward) == {"sparseattn.backward": expected["sparseattn.backward"]}


def test_who_looks_on_in_backward_alone_changes_no_bit():
    q, k, v = operands()
    sinks, mask = torch.randn(4, requires_grad=True), torch.rand(2, 1, 40, 40) < 0.5
    for given in ({"pattern": PATTERN}, {"pattern": mask}, {"pattern": PATTERN, "sink_logits": sinks}):
        inputs = [q, k, v, *([sinks] if "sink_logits" in given else [])]
        for context in (None, sa.Context("cpu", threads=1)):
            out, lse = sat.attention(q, k, v, **given, context=context, return_lse=True)
            loss = out.square().sum() + lse.sum()
            expected = torch.autograd.grad(loss, inputs, retain_graph=True)
            with FlopCounterMode(display=False) as counter:
                found = torch.autograd.grad(loss, inputs)
            assert all(map(torch.equal, found, expected))
            assert (counter.get_total_flops() > 0) == (context is None)  # operators run in the default context


@pytest.mark.parametrize("attend", [sat.attention, sat.float8_attention])
def test_a_pattern_may_be_gone_before_backward(attend):
    """Operators know a pattern by its name, which nobody finds when the pattern is gone. Of one that borrows arrays no
    plan is remembered, which would keep it."""
    q, k, v = operands()

    def graded(pattern):
        with FlopCounterMode(display=False):
            out = attend(q, k, v, pattern())
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    found = graded(lambda: sa.mask(MASK, borrow=True))
    assert all(map(torch.equal, found, graded(lambda: MASK)))


@pytest.mark.parametrize("is_kept", [False, True])
def test_checkpoints_choose_whether_attention_is_computed_again(monkeypatch, is_kept):
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(context, operator, *arguments, **options):
        keeps = is_kept and operator == torch.ops.sparseattn.forward.default
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    runs, run = [], sat.TensorPlan.run

    def count(plan, *operands, **options):
        runs.append(plan)
        return run(plan, *operands, **options)

    monkeypatch.setattr(sat.TensorPlan, "run", count)
    q, k, v = operands()

    def layer(q, k, v):
        return sat.attention(q.sin(), k, v, PATTERN).sin()

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    found = torch.autograd.grad(checkpoint(layer, q, k, v, use_reentrant=False, context_fn=contexts).sum(), (q, k, v))
    assert len(runs) == (1 if is_kept else 2)
    for one, other in zip(found, torch.autograd.grad(layer(q, k, v).sum(), (q, k, v))):
        assert torch.equal(one, other)
