# SPDX-License-Identifier: MIT
"""Layers against torch's own with the equivalent mask, and FlexAttention's masks against the oracle."""

import copy
import pickle

import oracle
import pytest

import sparseattn as sa

torch = pytest.importorskip("torch")
import sparseattn.torch as sat  # noqa: E402

PATTERNS = {"local": "bigbird(8,3,0,0,0)", "global": "global_tokens(0,1,2,3,4,5,6,7)", "causal & window(9,0)": None}
PATTERNS["mixed"] = f"{PATTERNS['local']} | {PATTERNS['global']}"


def layers(embed_dim, heads, pattern, **options):
    """Torch's layer, and ours with its parameters."""
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(embed_dim, heads, **options)
    torch.nn.init.normal_(theirs.in_proj_bias)
    ours = sat.BlockSparseMultiHeadAttention(embed_dim, heads, 8, pattern, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def mask_of(text, seq, seq_k=None):
    return torch.from_numpy(oracle.to_mask(text, oracle.Extent(seq, seq_k or seq, 1, 1))[0, 0])


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("batch, heads, seq, head_dim", [(4, 4, 128, 32), (2, 2, 37, 8)])
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_layer_is_masked_dense_attention(name, batch, heads, seq, head_dim, batch_first):
    theirs, ours = layers(heads * head_dim, heads, name, batch_first=batch_first)
    x = torch.randn(batch, seq, heads * head_dim) if batch_first else torch.randn(seq, batch, heads * head_dim)
    x.requires_grad_()
    hidden = ~mask_of(PATTERNS[name] or name, seq)
    right, _ = theirs(x, x, x, attn_mask=hidden, need_weights=False)
    found, weights = ours(x, x, x)
    assert weights is None
    torch.testing.assert_close(found, right, rtol=0, atol=1e-4)
    dout = torch.randn_like(found)
    mine = torch.autograd.grad((found * dout).sum(), (x, *ours.parameters()))
    for one, other in zip(mine, torch.autograd.grad((right * dout).sum(), (x, *theirs.parameters()))):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_keys_of_their_own_masks_and_no_batch():
    theirs, ours = layers(32, 4, "full", batch_first=True)
    q, kv = torch.randn(3, 20, 32), torch.randn(3, 30, 32)
    padding = torch.arange(30) >= torch.tensor([30, 11, 4])[:, None]
    hidden = torch.rand(20, 30) < 0.3
    hidden[:, :2] = False  # torch has NaN where a query sees no key
    by_head = torch.rand(3 * 4, 20, 30) < 0.3
    by_head[:, :, :2] = False
    for options in ({}, {"key_padding_mask": padding}, {"attn_mask": hidden}, {"attn_mask": by_head}):
        right = theirs(q, kv, kv * 2, need_weights=False, **options)[0]
        torch.testing.assert_close(ours(q, kv, kv * 2, **options)[0], right, rtol=0, atol=1e-4)
    both = {"key_padding_mask": padding, "attn_mask": hidden}
    right = theirs(q, kv, kv, need_weights=False, **both)[0]
    torch.testing.assert_close(ours(q, kv, kv, **both)[0], right, rtol=0, atol=1e-4)
    single = theirs(q[0], kv[0], kv[0], need_weights=False)[0]
    torch.testing.assert_close(ours(q[0], kv[0], kv[0])[0], single, rtol=0, atol=1e-4)
    causal = torch.ones(20, 20, dtype=torch.bool).triu(1)
    right = theirs(q, q, q, attn_mask=causal, is_causal=True, need_weights=False)[0]
    torch.testing.assert_close(ours(q, q, q, is_causal=True)[0], right, rtol=0, atol=1e-4)
    windowed = sat.BlockSparseMultiHeadAttention(32, 4, pattern=sa.mask(~causal), batch_first=True)
    windowed.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(windowed(q, q, q, is_causal=True)[0], right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("is_training", [True, False])
def test_an_encoder_of_torch_asks_the_layer_in_both_modes(is_training):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    theirs = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    layer = copy.deepcopy(layer)
    layer.self_attn = sat.BlockSparseMultiHeadAttention(32, 4, 8, "causal & (sink(1) | window(9,0))", batch_first=True)
    ours = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    ours.load_state_dict(theirs.state_dict())
    x, causal = torch.randn(2, 30, 32), torch.nn.Transformer.generate_square_subsequent_mask(30)
    padding = torch.arange(30) >= torch.tensor([30, 11])[:, None]
    hidden = ~mask_of("causal & (sink(1) | window(9,0))", 30)
    theirs.train(is_training), ours.train(is_training)
    with torch.set_grad_enabled(is_training):
        right = theirs(x, mask=hidden)
        torch.testing.assert_close(ours(x), right, rtol=0, atol=1e-4)
        torch.testing.assert_close(ours(x, mask=causal, is_causal=True), right, rtol=0, atol=1e-4)
        right, found = theirs(x, mask=hidden, src_key_padding_mask=padding), ours(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found[0], right[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(found[1, :11], right[1, :11], rtol=0, atol=1e-4)


@pytest.mark.parametrize("pattern", ["mixed", "causal", sa.mask(torch.ones(20, 20).tril().bool())], ids=str)
def test_copies_of_a_layer_compute_the_same(pattern):
    """Also of one that holds a plan and a cache, as an average of a model's weights copies it."""
    ours, x = sat.BlockSparseMultiHeadAttention(32, 4, 8, pattern), torch.randn(20, 2, 32)
    ours.plan = sat.plan("causal", *[x[:, :, None]] * 3)
    ours.cache = sat.KVCache(1, 8, 1, 8)
    ours.cache.append(*[x[:1, :1, None, :8]] * 2)
    other = copy.deepcopy(ours)
    assert torch.equal(other(x, x, x)[0], ours(x, x, x)[0]) and other.plan is ours.plan
    other.cache.append(*[x[:1, :1, None, :8]] * 2)
    assert other.cache.lengths.tolist() == [2] and ours.cache.lengths.tolist() == [1]
    del ours.plan
    again = pickle.loads(pickle.dumps(ours))
    assert torch.equal(again(x, x, x)[0], ours(x, x, x)[0]) and again.state_dict().keys() == ours.state_dict().keys()


def test_a_row_without_keys_has_the_bias():
    _, ours = layers(32, 4, "full", batch_first=True)
    x = torch.randn(2, 10, 32)
    out = ours(x, x, x, key_padding_mask=torch.tensor([[False] * 10, [True] * 10]))[0]
    assert torch.equal(out[1], ours.out_proj.bias.expand(10, 32)) and out.isfinite().all()


@pytest.mark.parametrize("batch, seq_q, seq_k", [(0, 5, 7), (2, 5, 0)])
def test_masks_of_an_empty_batch_and_of_no_keys(batch, seq_q, seq_k):
    _, ours = layers(32, 4, "full", batch_first=True)
    x, keys = torch.randn(batch, seq_q, 32), torch.randn(batch, seq_k, 32)
    padding = torch.zeros(batch, seq_k, dtype=torch.bool)
    assert torch.equal(ours(x, keys, keys, key_padding_mask=padding)[0], ours(x, keys, keys)[0])


def test_in_a_transformer_of_torch_and_compiled():
    torch._dynamo.reset()
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 24, 32)
    hidden = ~mask_of("causal & window(5,0)", 24)
    right = layer(x, src_mask=hidden)
    ours = sat.BlockSparseMultiHeadAttention(32, 4, pattern="causal & window(5,0)", batch_first=True)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    torch.testing.assert_close(layer(x), right, rtol=0, atol=1e-4)
    for pattern in (ours.pattern, sa.csr(*sa.window(5, 5).to_csr(24), 24)):
        ours.pattern = pattern
        compiled = torch.compile(
            lambda x, is_causal: ours(x, x, x, is_causal=is_causal)[0], fullgraph=True, backend="aot_eager"
        )
        for causal in (False, True):
            torch.testing.assert_close(compiled(x, causal), ours(x, x, x, is_causal=causal)[0])


def of_masks(**masks):
    """Of two texts of 5 tokens, and 4 heads."""
    layer = sat.BlockSparseMultiHeadAttention(32, 4)
    return layer(*[torch.randn(5, 2, 32)] * 3, **masks)


def of_shapes(*shapes):
    layer = sat.BlockSparseMultiHeadAttention(32, 4)
    return layer(*(None if shape is None else torch.randn(shape) for shape in shapes))


def bools(*shape):
    return torch.zeros(shape, dtype=torch.bool)


@pytest.mark.parametrize(
    "call, kind, argument",
    [
        (lambda: sat.BlockSparseMultiHeadAttention(30, 4), sa.ArgumentError, "embed_dim"),
        (lambda: sat.BlockSparseMultiHeadAttention(32, 4, dropout=0.1), sa.UnsupportedError, "dropout"),
        (lambda: sat.BlockSparseMultiHeadAttention(32, 4, pattern=None), sa.DTypeError, "pattern"),
        (lambda: sat.BlockSparseMultiHeadAttention(32, 4, 0), sa.ArgumentError, "params.block"),
        (lambda: layers(32, 4, "full")[1](*[torch.randn(5, 2, 32)] * 3, need_weights=True), None, "need_weights"),
        (lambda: layers(32, 4, "full")[1](*[torch.randn(5)] * 3), sa.ShapeError, "query"),
        (
            lambda: layers(32, 4, "full")[1](*[torch.randn(5, 2, 32)] * 3, attn_mask=torch.ones(5, 5)),
            None,
            "attn_mask",
        ),
        (lambda: of_masks(key_padding_mask=bools(3, 5)), sa.ShapeError, "key_padding_mask"),
        (lambda: of_masks(key_padding_mask=bools(5, 2)), sa.ShapeError, "key_padding_mask"),
        (lambda: of_masks(attn_mask=bools(5, 5, 5)), sa.ShapeError, "attn_mask"),
        (lambda: of_masks(attn_mask=bools(2, 4, 5, 5)), sa.ShapeError, "attn_mask"),
        (lambda: of_masks(attn_mask=bools(5)), sa.ShapeError, "attn_mask"),
        (lambda: of_masks(attn_mask=bools(3, 5)), sa.ShapeError, "attn_mask"),
        (lambda: of_masks(attn_mask=bools(8, 5, 4)), sa.ShapeError, "attn_mask"),
        (lambda: of_masks(attn_mask=bools(5, 5).numpy()), sa.DTypeError, "attn_mask"),
        (lambda: of_shapes((5, 2, 32), (5, 32), (5, 2, 32)), sa.ShapeError, "key"),
        (lambda: of_shapes((5, 2, 32), (5, 2, 32), None), sa.DTypeError, "value"),
        (lambda: sat.BlockSparseMultiHeadAttention(32, 4.0), sa.DTypeError, "num_heads"),
        (lambda: sat.BlockSparseMultiHeadAttention("32", 4), sa.DTypeError, "embed_dim"),
    ],
)
def test_refusals(call, kind, argument):
    with pytest.raises(kind or sa.UnsupportedError) as caught:
        call()
    assert caught.value.argument == argument


# ---- FlexAttention ----

FORMULAS = ["full", "causal", "window(5,2)", "window(-1,3)", "window(4,-1)", "sink(3)", "block_diagonal(7)"]
FORMULAS += ["dilated(9,6,3)", "dilated(-1,-1,5)", "strided(4)", "landmark(6,2)", "fixed(6,1)", "logsparse"]
FORMULAS += ["residue(3,1)", "causal & (sink(2) | window(9,0)) - strided(3)", "full - window(1,1) & causal"]
TABLES = ["documents(0,9,20,40)", "bigbird(8,3,1,1,5)", "global_tokens(0,17)", "transpose(window(4,0)) & causal"]
SIZES = [(40, 40), (12, 40), (40, 33)]


def kept_by(mask_mod, batch, heads, seq_q, seq_k):
    from torch.nn.attention.flex_attention import create_mask

    return create_mask(mask_mod, batch, heads, seq_q, seq_k, device="cpu")


@pytest.mark.parametrize("text", FORMULAS + TABLES)
@pytest.mark.parametrize("seq_q, seq_k", SIZES)
def test_mask_mods_are_the_pattern(text, seq_q, seq_k):
    kept = kept_by(sat.to_mask_mod(text, seq_q, seq_k), 1, 1, seq_q, seq_k)[0, 0]
    assert torch.equal(kept, mask_of(text, seq_q, seq_k))


@pytest.mark.parametrize(
    "pattern, heads",
    [
        ("causal\n    & window(007, 0)", 1),
        (f"documents({','.join(map(str, range(0, 200, 2)))}) | sink(1)", 1),
        ("mask([1,0,0,1,1,1,0,0],2,2,2) | sink(1)", 2),
        (sa.union([f"window({i},-1) - window({i - 1},-1)" for i in range(3, 3000, 3)]), 1),
    ],
    ids=["spaces", "long lists", "heads", "many parts"],
)
def test_mask_mods_of_any_text(pattern, heads):
    seq = 2 if heads == 2 else 40
    kept = kept_by(sat.to_mask_mod(pattern, seq, heads=heads), 1, heads, seq, seq)
    right = sa.union([pattern]).to_mask(sa.Extent(seq, heads=heads))
    assert torch.equal(kept, torch.from_numpy(right))


def test_formulas_make_no_table(monkeypatch):
    monkeypatch.setattr(sa.Pattern, "to_mask", None)
    for text in FORMULAS:
        sat.to_mask_mod(text, 1 << 20)


@pytest.mark.parametrize(
    "pattern, seq_q, seq_k, batch, heads, block",
    [
        ("causal & (sink(2) | window(30,0))", 64, 64, None, None, 16),
        ("causal", 40, 70, None, None, 16),
        (sa.per_head(["causal", "window(3,3)"]), 64, 64, None, 2, 32),
        (sa.per_batch(["sink(20)", "sink(33)"]), 48, 48, 2, 1, 16),
        (sa.per_batch([sa.per_head(["full", "causal"]), sa.per_head(["strided(3)", "sink(0)"])]), 40, 40, 2, 2, 16),
        (sa.mask(torch.rand(2, 3, 40, 50) < 0.2), 40, 50, 2, 3, 16),
    ],
)
def test_block_masks_and_back(pattern, seq_q, seq_k, batch, heads, block):
    made = sat.to_block_mask(pattern, seq_q, seq_k, batch=batch, heads=heads, block=block)
    extent = sa.Extent(seq_q, seq_k, batch or 1, heads or 1)
    right = torch.from_numpy(sa.intersection([pattern]).to_mask(extent))
    assert torch.equal(kept_by(made.mask_mod, batch or 1, heads or 1, seq_q, seq_k), right)
    cells = torch.nn.functional.pad(right, (0, -seq_k % block, 0, -seq_q % block)).unflatten(-1, (-1, block))
    counted = cells.unflatten(2, (-1, block)).sum((3, 5))
    assert torch.equal(made.to_dense().bool(), counted > 0)
    assert int(made.full_kv_num_blocks.sum()) == int((counted == block * block).sum())
    again = sat.from_block_mask(made)
    assert torch.equal(torch.from_numpy(again.to_mask(extent)), right)


def test_masks_of_flexattention_run():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    document = torch.arange(100) // 30
    q, k, v = torch.randn(3, 2, 2, 100, 16).unbind()
    for mask_mod, heads in (
        (lambda b, h, q, k: (q >= k) & (document[q] == document[k]), None),
        (lambda b, h, q, k: (q - k) % (h + 2) == 0, 2),
    ):
        block_mask = create_block_mask(mask_mod, None, heads, 100, 100, device="cpu", BLOCK_SIZE=32)
        found = sat.scaled_dot_product_attention(q, k, v, pattern=sat.from_block_mask(block_mask))
        torch.testing.assert_close(found, flex_attention(q, k, v, block_mask=block_mask), rtol=1e-5, atol=1e-5)


def test_what_is_no_block_mask():
    with pytest.raises(sa.ArgumentError, match="accepted: a BlockMask"):
        sat.from_block_mask("causal")
    x, block_mask = torch.zeros(1, 40, 1, 8), sat.to_block_mask("causal", 40)
    with pytest.raises(sa.DTypeError, match="is BlockMask; accepted: a Pattern.*from_block_mask makes a pattern"):
        sat.attention(x, x, x, block_mask)


@pytest.mark.parametrize(
    "call, kind, argument",
    [
        (lambda: sat.to_block_mask("causal", 40, block=(16, 16)), sa.DTypeError, "block"),
        (lambda: sat.to_block_mask("causal", 40, block=0), sa.ArgumentError, "block"),
        (lambda: sat.to_block_mask("causal", "40"), sa.DTypeError, "seq_q"),
        (lambda: sat.to_mask_mod("causal", 40, 4.5), sa.DTypeError, "seq_k"),
    ],
)
def test_sizes_that_are_refused(call, kind, argument):
    with pytest.raises(kind, match="accepted: ") as caught:
        call()
    assert caught.value.argument == argument
