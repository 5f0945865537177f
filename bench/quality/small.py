# SPDX-License-Identifier: MIT
"""A tiny model with random weights, a tokenizer of bytes, and texts that are here already: the study's code runs in
seconds and downloads nothing. What it says of patterns means nothing."""

import inspect
from types import SimpleNamespace

import numpy as np
import sparseattn as sa
from corpus import Document, sha256
from reading import Model
from sparseattn.demo import book
from sparseattn.demo.model import Model as NumpyModel
from sparseattn.demo.model import Shape
from study import Subject

SHAPE = Shape(layers=2, heads_q=3, heads_kv=1, head_dim=16, rope_base=1e4, norm_epsilon=1e-5, context=1024)
WIDTH, INNER = SHAPE.heads_q * SHAPE.head_dim, 64


class Bytes:
    """A tokenizer whose tokens are characters of Latin-1."""

    def encode(self, text):
        ids = list(text.encode("latin-1", "replace"))
        return SimpleNamespace(ids=ids, offsets=[(place, place + 1) for place in range(len(ids))])

    def decode(self, ids):
        return bytes(ids).decode("latin-1")


def numpy_model():
    rng = np.random.default_rng(0)

    def matrix(rows, columns):
        return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(np.sqrt(columns))

    shared = SHAPE.heads_kv * SHAPE.head_dim
    sizes = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (shared, WIDTH),
        "attn_v": (shared, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (INNER, WIDTH),
        "ffn_up": (INNER, WIDTH),
        "ffn_down": (WIDTH, INNER),
    }
    weights = {"token_embd.weight": matrix(256, WIDTH), "output_norm.weight": np.ones(WIDTH, np.float32)}
    for layer in range(SHAPE.layers):
        weights |= {f"blk.{layer}.{name}.weight": matrix(*size) for name, size in sizes.items()}
        weights |= {f"blk.{layer}.{name}.weight": np.ones(WIDTH, np.float32) for name in ("attn_norm", "ffn_norm")}
    return NumpyModel.from_gguf(SHAPE, weights)


def subject(device="cpu"):
    return Subject(Model(numpy_model(), device), Bytes(), "random")


def documents():
    texts = [
        ("python", "pattern.py", inspect.getsource(sa.Pattern)),
        ("python", "plan.py", inspect.getsource(sa.Plan)),
        ("novel", "passage", book.text()[100_000:110_000]),
    ]
    return [Document(kind, name, sha256(text.encode()), False, text) for kind, name, text in texts]
