# SPDX-License-Identifier: MIT
"""The committed vectors are what the oracle says, and what the library does through its C ABI."""
import hashlib
import json
import pathlib

import make
import numpy as np
from oracle import Extent

HERE = pathlib.Path(__file__).resolve().parent
SIZES = ("batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim", "head_dim_v")
INPUTS, OUTPUTS = ("q", "k", "v", "dout", "dlse", "sink_logits"), ("out", "lse")
GRADIENTS = ("dq", "dk", "dv", "dsink_logits")


def load(name):
    vectors = json.loads((HERE / name).read_text())
    assert len(vectors) > 20
    return vectors


def extent_of(vector):
    return Extent(vector["seq_q"], vector["seq_k"], vector["batch"], vector.get("heads", vector.get("heads_q")),
                  vector["q_offset"])


def test_oracle_reproduces_the_patterns():
    assert len(load("patterns.json")) >= 300
    assert make.files()["patterns.json"] == (HERE / "patterns.json").read_text()


def test_oracle_reproduces_attention():
    made = json.loads(make.files()["attention.json"])
    for one, other in zip(made, load("attention.json"), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if isinstance(value, list):  # exp differs in the last bit between machines
                np.testing.assert_allclose(numbers(value), numbers(other[name]), rtol=1e-8, atol=1e-12, err_msg=name)
            else:
                assert value == other[name]


def test_library_keeps_the_pairs_of_every_vector(library):
    wrong = []
    for vector in load("patterns.json"):
        mask = library.to_mask(library.parse(vector["text"]), extent_of(vector))
        if hashlib.sha256(mask.tobytes()).hexdigest() != vector["sha256"]:
            wrong.append(f"{vector['text']} on {extent_of(vector)}: {mask.sum()} pairs, expected {vector['pairs']}")
    assert not wrong, "\n".join(wrong)


def test_library_counts_the_pairs_of_every_vector(library):
    wrong = []
    for vector in load("patterns.json"):
        pairs = library.stats(library.parse(vector["text"]), extent_of(vector)).pairs
        if pairs != vector["pairs"]:
            wrong.append(f"{vector['text']} on {extent_of(vector)}: {pairs} pairs, expected {vector['pairs']}")
    assert not wrong, "\n".join(wrong)


def test_library_computes_the_attention_of_every_vector(library):
    for vector in load("attention.json"):
        for flags in (library.c.SPATTN_PLAN_BACKWARD, library.c.SPATTN_PLAN_BACKWARD | library.c.SPATTN_PLAN_REFERENCE):
            compare(vector, attention(library, vector, flags))


def attention(library, vector, flags):
    """Every tensor of the vector, as the library computes it."""
    arrays = {name: shaped(vector, name).astype(np.float32) for name in INPUTS if name in vector}
    arrays |= {name: np.full_like(shaped(vector, name), np.nan, np.float32) for name in results_of(vector)}
    sizes = {name: vector[name] for name in SIZES} | {"softcap": vector.get("softcap", 0.0)}
    flags |= library.c.SPATTN_PLAN_SINK_LOGITS if "sink_logits" in vector else 0
    plan = library.plan(library.parse(vector["text"]), flags, vector["scale"], vector["q_offset"], **sizes)
    forward = ("q", "k", "v", "sink_logits", *OUTPUTS)
    library.run(plan, "forward", **{name: arrays[name] for name in forward if name in arrays})
    library.run(plan, "backward", **arrays)
    return arrays


def results_of(vector):
    return [name for name in OUTPUTS + GRADIENTS if name in vector]


def compare(vector, arrays):
    for name in results_of(vector):
        expected = shaped(vector, name)
        # dq and dk are scale times a difference of float32 numbers, whose own rounding the scale makes larger.
        size = np.abs(expected[np.isfinite(expected)]).max(initial=max(1.0, abs(vector["scale"])))
        np.testing.assert_allclose(arrays[name], expected, rtol=2e-5, atol=2e-6 * size,
                                   err_msg=f"{name} of {vector['text']}")


def shaped(vector, name):
    query, key = ("heads_q", "seq_q"), ("heads_kv", "seq_k")
    axes = {"q": query + ("head_dim",), "k": key + ("head_dim",), "v": key + ("head_dim_v",),
            "out": query + ("head_dim_v",), "lse": query}
    like = {"dq": "q", "dk": "k", "dv": "v", "dout": "out", "dlse": "lse"}
    if name.endswith("sink_logits"):
        return numbers(vector[name])
    shape = [vector[axis] for axis in ("batch",) + axes[like.get(name, name)]]
    return numbers(vector[name]).reshape(shape)


def numbers(values):
    return np.array([-np.inf if x is None else x for x in values])
