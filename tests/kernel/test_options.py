# SPDX-License-Identifier: MIT
"""Softcap, sinks, scale and dtypes at random, through the C ABI, against the oracle; and the oracle's gradients against
differences of its own loss."""
import numpy as np
import pytest

from oracle import Extent, attention_backward, attention_forward, to_mask

BOUNDS = {np.float32: 3e-5, np.float16: 4e-3, np.float64: 1e-12}
PATTERNS = ["full", "causal", "causal & window(3,0)", "block_diagonal(5)", "causal - sink(4)", "full - full",
            "documents(0,3,9)", "logsparse"]


def draw(random, dtype):
    """A problem and its arrays: q, k, v, dout in the dtype, dlse and sinks in float32."""
    heads_kv, group = random.integers(1, 3, 2)
    sizes = {"batch": int(random.integers(1, 3)), "heads_q": int(heads_kv * group), "heads_kv": int(heads_kv),
             "seq_q": int(random.integers(1, 40)), "seq_k": int(random.integers(1, 90)),
             "head_dim": int(random.integers(1, 24)), "head_dim_v": int(random.integers(1, 24))}
    query = (sizes["batch"], sizes["heads_q"], sizes["seq_q"])
    key = (sizes["batch"], sizes["heads_kv"], sizes["seq_k"])
    shapes = {"q": query + (sizes["head_dim"],), "k": key + (sizes["head_dim"],), "v": key + (sizes["head_dim_v"],),
              "dout": query + (sizes["head_dim_v"],)}
    arrays = {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    arrays["dlse"] = random.standard_normal(query).astype(np.float32)
    options = {"softcap": float(random.choice([0, 0.3, 2, 30])),
               "sink": None if random.random() < 0.3 else random.normal(0, 3, sizes["heads_q"]).astype(np.float32)}
    scale = float(random.choice([0, -0.7, sizes["head_dim"] ** -0.5]))
    return str(random.choice(PATTERNS)), sizes, arrays, scale, options


def run(library, text, sizes, arrays, scale, options, dtype, flags):
    c = library.c
    flags |= c.SPATTN_PLAN_BACKWARD | (0 if options["sink"] is None else c.SPATTN_PLAN_SINK_LOGITS)
    plan = library.plan(library.parse(text), flags, scale, dtype=dtype, softcap=options["softcap"], **sizes)
    like = {"dq": "q", "dk": "k", "dv": "v", "out": "dout"}
    arrays = arrays | {name: np.full_like(arrays[other], np.nan) for name, other in like.items()}
    arrays["lse"] = np.full_like(arrays["dlse"], np.nan)
    arrays["sink_logits"] = options["sink"]
    arrays["dsink_logits"] = None if options["sink"] is None else np.full_like(options["sink"], np.nan)
    library.run(plan, "forward", **{name: arrays[name] for name in ("q", "k", "v", "out", "lse", "sink_logits")})
    library.run(plan, "backward", **arrays)
    return [arrays[name] for name in ("out", "lse", "dq", "dk", "dv", "dsink_logits") if arrays[name] is not None]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_random_options(library, dtype):
    for seed in range(60):
        random = np.random.default_rng(seed)
        text, sizes, arrays, scale, options = draw(random, dtype)
        extent = Extent(sizes["seq_q"], sizes["seq_k"], sizes["batch"], sizes["heads_q"])
        inputs = [arrays["q"], arrays["k"], arrays["v"], to_mask(text, extent), scale]
        want = attention_forward(*inputs, **options)
        want += attention_backward(*inputs, arrays["dout"].astype(np.float64), arrays["dlse"], **options)
        for flags in (0, library.c.SPATTN_PLAN_REFERENCE):
            got = run(library, text, sizes, arrays, scale, options, dtype, flags)
            assert len(got) == len(want)
            for n, (one, other) in enumerate(zip(got, want)):
                bound = max(BOUNDS[dtype], BOUNDS[one.dtype.type])  # lse and dsinks are float32 always
                size = max(1, np.abs(other[np.isfinite(other)]).max(initial=0))
                np.testing.assert_allclose(one, other, rtol=bound, atol=bound * size,
                                           err_msg=f"result {n} of {text} with seed {seed} {sizes} {scale} {options}")


def test_the_oracle_s_gradients_are_derivatives():
    for seed in range(8):
        random = np.random.default_rng(seed)
        text, sizes, arrays, scale, options = draw(random, np.float64)
        options["sink"] = random.normal(0, 2, sizes["heads_q"])
        mask = to_mask(text, Extent(sizes["seq_q"], sizes["seq_k"], sizes["batch"], sizes["heads_q"]))
        dout, dlse = arrays.pop("dout"), arrays.pop("dlse")
        inputs = arrays | {"sink": options["sink"]}

        def loss(q, k, v, sink):
            out, lse = attention_forward(q, k, v, mask, scale, options["softcap"], sink)
            return (out * dout).sum() + (lse * dlse).sum()

        gradients = attention_backward(*arrays.values(), mask, scale, dout, dlse, **options)
        for (name, x), gradient in zip(inputs.items(), gradients):
            direction = random.standard_normal(x.shape)
            step = 1e-5
            above, below = (loss(**inputs | {name: x + sign * step * direction}) for sign in (1, -1))
            np.testing.assert_allclose((above - below) / (2 * step), (gradient * direction).sum(), rtol=1e-5, atol=1e-6,
                                       err_msg=f"{name} with seed {seed}")
