# SPDX-License-Identifier: MIT
"""Models of transformers whose attention is a pattern, beside the same weights with transformers' own attention."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import sparseattn as sa  # noqa: E402
from sparseattn import huggingface  # noqa: E402

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CAUSAL = huggingface.register("sa_causal", "causal")
WINDOW = huggingface.register("sa_window", "window(7,0)")
TOKENS = torch.randint(3, 97, (2, 30), generator=torch.Generator().manual_seed(1))


def model_of(kind, **more):
    """A causal language model with random weights, the same ones for the same sizes."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()


@pytest.fixture(scope="module")
def llama():
    return model_of("Llama")


def logits(model, name, tokens=TOKENS, **more):
    model.set_attn_implementation(name)
    return model(tokens, **more).logits


def written(model, name, tokens=TOKENS, count=10, **more):
    model.set_attn_implementation(name)
    mask = more.pop("attention_mask", torch.ones_like(tokens))
    return model.generate(tokens, attention_mask=mask, max_new_tokens=count, do_sample=False, **more)


def padded(begin, end):
    """One row with padding in front, one with padding behind it."""
    mask = torch.ones_like(TOKENS)
    mask[0, :begin], mask[1, end:] = 0, 0
    return mask


def close(one, other, bound=2e-6):
    torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def test_causal_is_eager(llama):
    close(logits(llama, CAUSAL), logits(llama, "eager"))


@pytest.mark.parametrize("kind, more", [
    ("Gemma2", {"query_pre_attn_scalar": 16, "sliding_window": 8, "attn_logit_softcapping": 2.0}),  # softcap
    ("Qwen3", {}),
    ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}),  # learned sinks
    ("Gemma4Text", {"global_head_dim": 32, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8,
                    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}),  # two sizes of heads
])  # fmt: skip
def test_what_models_add_is_kept(kind, more):
    model = model_of(kind, **more)
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight)
    close(logits(model, CAUSAL), logits(model, "eager"), 1e-5)


def test_window_is_the_models_own_sliding_window():
    sliding, plain = model_of("Mistral", sliding_window=8), model_of("Mistral", sliding_window=None)
    close(logits(plain, WINDOW), logits(sliding, "eager"))
    assert (written(plain, WINDOW) == written(sliding, "eager")).all()
    close(logits(sliding, CAUSAL), logits(sliding, "eager"))  # what the model does not see it still does not see
    assert (written(sliding, CAUSAL) == written(sliding, "eager")).all()  # with its cache of 8 tokens


def test_gradients_are_those_of_eager(llama):
    found, mask = {}, padded(7, 25)
    after_real = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], 1)  # padding itself predicts nothing
    labels = TOKENS.where((mask & after_real).bool(), -100)
    for name in ("eager", CAUSAL):
        llama.zero_grad()
        llama.set_attn_implementation(name)
        llama(TOKENS, attention_mask=mask, labels=labels).loss.backward()
        found[name] = {key: weight.grad.clone() for key, weight in llama.named_parameters()}
    for key, gradient in found["eager"].items():
        close(found[CAUSAL][key], gradient)
    assert any(gradient.abs().max() > 1e-3 for gradient in found[CAUSAL].values())


@pytest.mark.parametrize("mask", [padded(7, 30), padded(0, 25), padded(7, 25), padded(29, 1)])
def test_padding_is_not_seen(llama, mask):
    found, expected = (logits(llama, name, attention_mask=mask) for name in (CAUSAL, "eager"))
    close(found[mask.bool()], expected[mask.bool()])


def test_holes_in_rows_are_not_seen(llama):
    mask = padded(0, 30)
    mask[0, 4:9] = 0
    found, expected = (logits(llama, name, attention_mask=mask) for name in (CAUSAL, "eager"))
    close(found[mask.bool()], expected[mask.bool()])


def test_a_padded_row_reads_as_without_padding(llama):
    """Positions of the pattern, too, count from the row's first real token."""
    name = huggingface.register("sa_blocks", "sink(2) | block_diagonal(8)")
    whole = logits(llama, name, TOKENS[:1, 7:])
    positions = (padded(7, 30).cumsum(-1) - 1).clamp(min=0)
    rows = logits(llama, name, attention_mask=padded(7, 30), position_ids=positions)
    close(rows[:1, 7:], whole, 1e-5)


def test_holes_move_no_position_of_the_pattern(llama):
    """Neither of another row, nor of their own, which counts from its first real token, with the holes."""
    name = huggingface.register("sa_blocks", "sink(2) | block_diagonal(8)")
    mask = padded(7, 30)
    mask[0, 12:15], mask[1, 10] = 0, 0
    positions = (padded(7, 30).cumsum(-1) - 1).clamp(min=0)
    found = logits(llama, name, attention_mask=mask, position_ids=positions)[0, 7:]
    seen = torch.from_numpy(sa.Pattern("causal & (sink(2) | block_diagonal(8))").to_mask(23)) & mask[0, 7:].bool()
    expected = logits(llama, "sdpa", TOKENS[:1, 7:], attention_mask=seen)[0]
    real = mask[0, 7:].bool()
    close(found[real], expected[real], 1e-5)


@pytest.mark.parametrize("more", [{}, {"cache_implementation": "static"}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("begin", [0, 7])
def test_generation_is_that_of_eager(llama, begin, more):
    mask = padded(begin, 30)
    expected = written(llama, "eager", attention_mask=mask)
    assert (written(llama, CAUSAL, attention_mask=mask, **more) == expected).all()


@pytest.mark.parametrize("text", ["window(7,0)", "sink(2) | window(7,0)", "sink(2) | block_diagonal(8)"])
def test_a_cache_changes_nothing(llama, text):
    name = huggingface.register("sa_cached", text)
    assert (written(llama, name) == written(llama, name, use_cache=False)).all()
    whole = logits(llama, name)
    cache = llama(TOKENS[:, :20], use_cache=True).past_key_values
    parts = [llama(TOKENS[:, begin:end], past_key_values=cache).logits for begin, end in ((20, 27), (27, 28), (28, 30))]
    close(torch.cat(parts, 1), whole[:, 20:], 1e-5)


def test_a_sliding_cache_keeps_positions():
    model = model_of("Mistral", sliding_window=8)
    name = huggingface.register("sa_grid", "strided(3) | block_diagonal(5)")
    assert (written(model, name) == written(model, name, use_cache=False)).all()


@pytest.mark.parametrize("kind, more", [("Mistral", {}), ("Gemma2", {"query_pre_attn_scalar": 16})], ids=str)
def test_a_sliding_cache_keeps_positions_of_padded_rows(kind, more):
    model = model_of(kind, sliding_window=8, **more)
    name = huggingface.register("sa_blocks", "sink(2) | block_diagonal(5)")
    mask = padded(7, 30)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = logits(model, name, attention_mask=mask, position_ids=positions, use_cache=False)
    cache = transformers.DynamicCache(config=model.config)
    parts = [
        model(TOKENS[:, begin:end], attention_mask=mask[:, :end], position_ids=positions[:, begin:end],
              past_key_values=cache).logits for begin, end in ((0, 13), (13, 28), (28, 29), (29, 30))
    ]  # fmt: skip
    close(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()], 1e-5)
    close(whole[:1, 7:], logits(model, name, TOKENS[:1, 7:]), 1e-5)


def test_packed_sequences_do_not_see_each_other(llama):
    positions = torch.cat([torch.arange(12), torch.arange(18)])[None].expand(2, -1)
    found, expected = (logits(llama, name, position_ids=positions, use_cache=False) for name in (CAUSAL, "eager"))
    close(found, expected)
    assert not torch.allclose(found, logits(llama, CAUSAL), atol=1e-3)


@pytest.mark.parametrize("kind, more", [("Llama", {}), ("Mistral", {"sliding_window": 8})], ids=str)
def test_packed_sequences_have_positions_of_their_own(kind, more):
    """Those of a row that packs two are those of each alone, the sinks, too; rows may be packed in several ways."""
    model = model_of(kind, **more)
    name = huggingface.register("sa_blocks", "sink(2) | block_diagonal(5)")
    positions = torch.stack([torch.cat([torch.arange(first), torch.arange(30 - first)]) for first in (12, 30)])
    found = logits(model, name, position_ids=positions, use_cache=False)
    for begin, end in ((0, 12), (12, 30)):
        close(found[:1, begin:end], logits(model, name, TOKENS[:1, begin:end]), 1e-5)
    close(found[1:], logits(model, name, TOKENS[1:]), 1e-5)


def test_packed_sequences_that_only_flash_attention_would_know_are_refused(llama):
    """A cache hides from transformers what position_ids tell."""
    llama.set_attn_implementation(CAUSAL)
    items = [{"input_ids": TOKENS[0, :12].tolist()}, {"input_ids": TOKENS[1].tolist()}]
    packed = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(items)
    found = llama(**packed, use_cache=False).logits
    expected = [logits(llama, CAUSAL, row) for row in (TOKENS[:1, :12], TOKENS[1:])]
    close(found, torch.cat(expected, 1), 1e-5)
    with pytest.raises(sa.UnsupportedError, match="tells of 2 sequences in a row.*use_cache=False") as caught:
        llama(**packed)
    assert caught.value.argument == "cu_seq_lens_q"
    one = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(items[:1])
    close(llama(**one).logits, expected[0], 1e-5)


def test_masks_of_a_users_own(llama):
    allowed = torch.rand(2, 1, 30, 30, generator=torch.Generator().manual_seed(2)) < 0.5
    allowed |= torch.eye(30, dtype=torch.bool)
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    expected = logits(llama, "eager", attention_mask=additive)
    everything = huggingface.register("sa_full", "full")
    close(logits(llama, everything, attention_mask=additive), expected)
    close(logits(llama, everything, attention_mask=allowed), expected)
    with pytest.raises(sa.UnsupportedError, match="biases"):
        logits(llama, everything, attention_mask=additive + 0.5)


def test_a_users_own_mask_beside_a_cache(llama):
    """A static cache has an empty tail, behind which the queries do not stand."""
    name = huggingface.register("sa_blocks", "sink(2) | block_diagonal(8)")
    whole = logits(llama, name)
    allowed = torch.zeros(2, 1, 30, 40, dtype=torch.bool)
    allowed[..., :30] = torch.ones(30, 30, dtype=torch.bool).tril()
    static = transformers.StaticCache(config=llama.config, max_cache_len=40)
    for cache, keys in ((static, lambda end: 40), (transformers.DynamicCache(config=llama.config), lambda end: end)):
        for begin, end in ((0, 20), (20, 29), (29, 30)):
            own = allowed[:, :, begin:end, : keys(end)]
            found = llama(TOKENS[:, begin:end], attention_mask=own, past_key_values=cache).logits
            close(found, whole[:, begin:end], 1e-5)


def test_a_users_own_mask_beside_a_cache_of_unknown_positions(llama):
    allowed = torch.zeros(2, 1, 30, 40, dtype=torch.bool)
    allowed[..., :30] = torch.ones(30, 30, dtype=torch.bool).tril()
    static = transformers.StaticCache(config=llama.config, max_cache_len=40)
    with pytest.raises(sa.UnsupportedError, match="30 queries stand is not known"):  # positions count something else
        positions = (torch.arange(30)[None] - 7).clamp(min=0)
        logits(llama, CAUSAL, attention_mask=allowed, position_ids=positions, past_key_values=static)
    model = model_of("Mistral", sliding_window=8)
    cache = transformers.DynamicCache(config=model.config)
    logits(model, CAUSAL, TOKENS[:, :20], past_key_values=cache)
    with pytest.raises(sa.UnsupportedError, match="cache's 8 keys"):  # it has dropped the others
        model(TOKENS[:, 20:21], attention_mask=torch.ones(2, 1, 1, 8, dtype=torch.bool), past_key_values=cache)


def test_heads_may_differ(llama):
    name = huggingface.register("sa_heads", sa.per_head(["causal", "window(3,0)"], [0, 1, 1, 0]))
    whole, holes = logits(llama, name), torch.ones_like(TOKENS)
    holes[0, 4:9] = 0  # pair by pair
    assert not torch.allclose(whole, logits(llama, CAUSAL), atol=1e-4)
    close(logits(llama, name, attention_mask=holes)[1], whole[1])


def test_encoders_see_both_ways():
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
    model = transformers.BertModel(transformers.BertConfig(**sizes, attention_probs_dropout_prob=0)).eval()
    name, mask = huggingface.register("sa_full", "full"), padded(0, 25)
    found = {}
    for implementation in ("eager", name):
        model.set_attn_implementation(implementation)
        found[implementation] = model(TOKENS, attention_mask=mask).last_hidden_state
    close(found[name][mask.bool()], found["eager"][mask.bool()])


def test_cross_attention_is_refused():
    """Also where both sequences are as long."""
    sizes = {"vocab_size": 97, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0}  # fmt: skip
    bart = transformers.BartModel(transformers.BartConfig(**sizes)).eval()
    bert = transformers.BertModel(transformers.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)).eval()
    states = torch.zeros(2, 30, SIZES["hidden_size"])
    for model, more in ((bart, {"decoder_input_ids": TOKENS}), (bert, {"encoder_hidden_states": states})):
        model.set_attn_implementation(CAUSAL)
        with pytest.raises(sa.UnsupportedError, match="cross attention") as caught:
            model(TOKENS, **more)
        assert caught.value.argument == "k"


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_gradients_of_checkpointed_layers(is_reentrant):
    """Reentrant checkpoints detach what a layer is given, the mask, too."""
    config = transformers.BertConfig(**SIZES, attention_probs_dropout_prob=0, hidden_dropout_prob=0)
    model, mask, found = transformers.BertModel(config).train(), padded(0, 25), {}
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    model.enable_input_require_grads()
    for name in ("eager", huggingface.register("sa_full", "full")):
        model.zero_grad()
        model.set_attn_implementation(name)
        model(TOKENS, attention_mask=mask).last_hidden_state[mask.bool()].pow(3).mean().backward()
        found[name] = {key: weight.grad.clone() for key, weight in model.encoder.named_parameters()}
    for key, gradient in found["eager"].items():
        close(found["sa_full"][key], gradient, 1e-5)


def test_a_compiled_model_is_the_same_one():
    """Also in later calls, with other masks than that which its graphs were made with."""
    model, hole = model_of("Llama", num_hidden_layers=1), padded(7, 30)
    hole[1, 10] = 0
    model.set_attn_implementation(huggingface.register("sa_blocks", "sink(2) | block_diagonal(8)"))
    compiled = torch.compile(model, backend="eager")
    for mask in (padded(7, 25), padded(3, 30), hole):
        found, expected = (one(TOKENS, attention_mask=mask, use_cache=False).logits for one in (compiled, model))
        close(found, expected)


def test_a_model_that_computes_with_masks_is_refused():
    config = transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=1, n_head=4)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=CAUSAL)
    with pytest.raises(sa.UnsupportedError, match="aten.add.*accepted: models that leave them"):
        model(TOKENS)


def test_an_encoder_beside_a_decoder_sees_both_ways():
    sizes = {"vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4,
             "encoder_ffn_dim": 32}  # fmt: skip
    model, mask = transformers.BartModel(transformers.BartConfig(**sizes)).eval(), padded(0, 25)
    found = {}
    for name in ("eager", huggingface.register("sa_full", "full")):
        model.set_attn_implementation(name)
        found[name] = model.get_encoder()(TOKENS, attention_mask=mask).last_hidden_state[mask.bool()]
    close(found["sa_full"], found["eager"])


def test_dropout_is_refused():
    model = model_of("Llama", attention_dropout=0.1)
    logits(model, CAUSAL)
    with pytest.raises(sa.UnsupportedError, match="attention_dropout=0"):
        logits(model.train(), CAUSAL)


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2", "", "a/b", "a|b", None])
def test_names_that_cannot_be(name):
    with pytest.raises(sa.ArgumentError, match="argument name"):
        huggingface.register(name, "causal")


def test_a_text_that_is_no_pattern():
    with pytest.raises(sa.FormatError):
        huggingface.register("sa_broken", "wind(3)")
    with pytest.raises(sa.UnsupportedError, match="lists no model brings; accepted: ") as caught:
        huggingface.register("sa_broken", "causal & runtime_tokens(4)")
    assert caught.value.argument == "pattern"


def test_a_name_may_be_registered_anew(llama):
    name = huggingface.register("sa_again", "window(0,0)")
    first = logits(llama, name)
    huggingface.register("sa_again", "causal")
    close(logits(llama, name), logits(llama, CAUSAL))
    assert not torch.allclose(first, logits(llama, name), atol=1e-3)


def test_models_are_made_with_it():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES), attn_implementation=CAUSAL)
    assert model.config._attn_implementation == CAUSAL
    close(model.eval()(TOKENS).logits, logits(model, "eager"))


def test_the_example_learns():
    example = ROOT / "bindings" / "examples" / "finetune.py"
    done = subprocess.run([sys.executable, example, "--steps", "4", "--seq", "64"], capture_output=True, text=True)
    assert done.returncode == 0 and "after learning with it" in done.stdout, done.stderr
