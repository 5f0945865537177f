# SPDX-License-Identifier: MIT
"""A small language model learns to read with dense attention, then with a pattern.

A Llama of 0.7 million weights (Hugging Face transformers, from its config: nothing is fetched) reads Pride and
Prejudice byte by byte with causal attention. Its attention is then replaced by one line, and it goes on learning with
the pattern. Minutes on two cores; --steps and --seq for fewer.
"""

import argparse
import time

import sparseattn as sa
import sparseattn.huggingface
import torch
from sparseattn.demo import book
from transformers import LlamaConfig, LlamaForCausalLM

BATCH = 8
PATTERN = sa.sink(1) | sa.window(3, 0)  # 5 of up to 256 keys; the model itself is causal


def batches(text, count, seed):
    """[count, BATCH, seq] pieces of the text."""
    begins = torch.randint(len(text) - seq, (count, BATCH), generator=torch.Generator().manual_seed(seed))
    return torch.stack([torch.stack([text[begin : begin + seq] for begin in row]) for row in begins])


def read(model, pieces):
    """Mean loss, in nats a byte, of pieces that the model did not learn from."""
    with torch.no_grad():
        return sum(model(piece, labels=piece).loss.item() for piece in pieces) / len(pieces)


def learn(model, pieces, rate):
    optimizer, begin = torch.optim.AdamW(model.parameters(), lr=rate), time.perf_counter()
    for step, piece in enumerate(pieces, 1):
        optimizer.zero_grad()
        model(piece, labels=piece).loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"  {step:4} of {len(pieces)} steps, {time.perf_counter() - begin:4.0f} s", flush=True)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=300, help="of learning with dense attention; with the pattern, half")
parser.add_argument("--seq", type=int, default=256, help="bytes that the model reads at a time")
options = parser.parse_args()
steps, seq = options.steps, options.seq

text = torch.tensor(list(book.text().encode()))
lesson, exam = text[:-60_000], batches(text[-60_000:], 4, seed=1)
torch.manual_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))

print(f"dense causal attention, {sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} million weights")
learn(model, batches(lesson, steps, seed=2), rate=2e-3)
dense = read(model, exam)

sa.huggingface.register("sink-and-window", PATTERN)
model.set_attn_implementation("sink-and-window")
before = read(model, exam)
print(f"{PATTERN}: {100 * (sa.causal() & PATTERN).density(seq) / sa.causal().density(seq):.0f} % of the causal pairs")
learn(model, batches(lesson, steps // 2, seed=3), rate=1e-3)
after = read(model, exam)

print(f"nats a byte: dense {dense:.3f}, with the pattern {before:.3f}, after learning with it {after:.3f}")
assert after < before
