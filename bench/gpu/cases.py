# SPDX-License-Identifier: MIT
"""What the GPU bench runs, as data: a new case is a line here. Names are those of the CPU's table, ../cases.inc, where it
has the same pattern."""
import pathlib
import typing

import torch

MASKS = pathlib.Path(__file__).resolve().parent / "masks"
PASSES = ("forward", "backward")
DETERMINISTIC = "_deterministic"


class Case(typing.NamedTuple):
    name: str
    pattern: str  # a text, or the mask of that name
    heads: int
    seq: int
    kept: typing.Callable | None  # (queries, keys) -> bool; None: as the mask says
    goals: dict  # TFLOP/s of each pass
    recorded: dict = {}  # the best peer measured elsewhere: pass -> (name, TFLOP/s)
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    head_dim_v: int = 128
    deterministic: bool = False  # backward alone: the forward always is

    def mask(self):
        return self.name.removesuffix(DETERMINISTIC) if self.pattern == "mask" else None


def window(q, k, before):
    return (k <= q) & (k >= q - before)


def streaming(q, k):
    return (k <= q) & ((k < 64) | (k >= q - 1023))


WINDOW, STREAMING = "causal & window(1023,0)", "causal & (sink(64) | window(1023,0))"
CASES = [
    Case("full_16k", "full", 16, 16384, lambda q, k: k == k, {"forward": 790, "backward": 650},
         {"forward": ("FA4", 720), "backward": ("FA4", 620)}),
    Case("causal_16k", "causal", 16, 16384, lambda q, k: k <= q, {"forward": 770, "backward": 630},
         {"forward": ("FA4", 651), "backward": ("FA4", 600)}),
    Case("window1k_16k", WINDOW, 16, 16384, lambda q, k: window(q, k, 1023), {"forward": 620, "backward": 480},
         {"forward": ("FA4", 498), "backward": ("FA4", 442)}),
    Case("window4k_128k", "causal & window(4095,0)", 4, 131072, lambda q, k: window(q, k, 4095),
         {"forward": 750, "backward": 600}, {"forward": ("FA4", 617), "backward": ("cuDNN flex", 558)}),
    Case("streaming_16k", STREAMING, 16, 16384, streaming, {"forward": 600, "backward": 460},
         {"forward": ("cuDNN flex", 463), "backward": ("cuDNN flex", 273)}),
    Case("streaming_128k", STREAMING, 4, 131072, streaming, {"forward": 640, "backward": 480},
         {"forward": ("cuDNN flex", 507), "backward": ("cuDNN flex", 129)}),
    Case("block_diagonal512_16k", "block_diagonal(512)", 16, 16384, lambda q, k: q // 512 == k // 512,
         {"forward": 600, "backward": 450}, {"forward": ("FA4", 450), "backward": ("FA4", 359)}),
    Case("bsr128_50_4k", "mask", 16, 4096, None, {"forward": 660, "backward": 540},
         {"forward": ("FA4", 572), "backward": ("cuDNN flex", 482)}),
    Case("bsr128_25_8k", "mask", 16, 8192, None, {"forward": 700, "backward": 570},
         {"forward": ("cuDNN flex", 610), "backward": ("BSA", 496)}),
    Case("bsr128_10_16k", "mask", 16, 16384, None, {"forward": 720, "backward": 580},
         {"forward": ("FLASH flex", 624), "backward": ("BSA", 520)}),
    Case("bsr128_05_32k", "mask", 16, 32768, None, {"forward": 730, "backward": 590},
         {"forward": ("FA4", 603), "backward": ("BSA", 539)}),
    # Tokens in other orders than their own: residue classes, hot tokens, pieces.
    Case("dilated_16k", "causal & dilated(1008,0,16)", 16, 16384, lambda q, k: window(q, k, 1008) & ((q - k) % 16 == 0),
         {"forward": 110, "backward": 95}, {"forward": ("FA4", 75), "backward": ("FA4", 67)}),
    Case("dilated_128k", "causal & dilated(1008,0,16)", 4, 131072,
         lambda q, k: window(q, k, 1008) & ((q - k) % 16 == 0), {}),
    Case("longnet_128k", "causal & block_diagonal(8192) & residue(4,1)", 4, 131072,
         lambda q, k: (k <= q) & (q // 8192 == k // 8192) & (q % 4 == 1) & (k % 4 == 1), {}),
    Case("strided_16k", "causal & strided(128)", 16, 16384, lambda q, k: (k <= q) & ((q - k) % 128 == 0), {}),
    Case("sparse_transformer_16k", "causal & (window(128,0) | strided(128))", 16, 16384,
         lambda q, k: (k <= q) & ((k >= q - 128) | ((q - k) % 128 == 0)), {"forward": 350}),
    Case("logsparse_16k", "logsparse", 16, 16384, lambda q, k: (k <= q) & (((q - k) & (q - k - 1)) == 0), {}),
    Case("window1k_128k", WINDOW, 4, 131072, lambda q, k: window(q, k, 1023), {}),
    Case("global_tokens_64k", "window(256,256) | global_tokens(" + ",".join(str(i) for i in range(0, 65536, 1024)) + ")",
         4, 65536, lambda q, k: ((q - k).abs() <= 256) | (q % 1024 == 0) | (k % 1024 == 0), {"forward": 550}),
    Case("landmark_64k", "causal & (window(256,0) | landmark(64,1))", 4, 65536,
         lambda q, k: (k <= q) & ((k >= q - 256) | (k % 64 == 63)), {}),
    # Elements and head sizes beside bf16 and 128.
    *(Case(f"{name}_{label}", text, 16, 16384, kept, {}, {}, dtype, head_dim, head_dim_v)
      for name, text, kept in (("full_16k", "full", lambda q, k: k == k),
                               ("window1k_16k", WINDOW, lambda q, k: window(q, k, 1023)))
      for label, dtype, head_dim, head_dim_v in (("f16", torch.float16, 128, 128), ("d64", torch.bfloat16, 64, 64),
                                                 ("d64_f16", torch.float16, 64, 64), ("d96", torch.bfloat16, 96, 96),
                                                 ("d192_128", torch.bfloat16, 192, 128),
                                                 ("d256", torch.bfloat16, 256, 256))),
]
CASES += [case._replace(name=case.name + DETERMINISTIC, goals={"backward": 0.85 * case.goals["backward"]},
                        deterministic=True) for case in CASES if "backward" in case.goals]


def load_mask(name):
    text = (MASKS / f"{name}.pbm").read_text()
    lines = [line for line in text.split("\n") if not line.startswith("#")]
    width, height = map(int, lines[1].split())
    bits = "".join("".join(lines[2:]).split())
    return torch.tensor([int(b) for b in bits]).view(height, width)
