#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What the steps of an exchange between ranks take on one of them, beside copies of as many bytes.

    python3 bench/gpu/exchange.py --library build/libsparseattn.so [--case GLOB] [--out bench/results]

A case is one rank of several that hold a sequence together, bf16, heads of 128, [batch, tokens, heads, head_dim]. Nothing
is sent: buffers have what a rank would have received. Of each step of spattn_exchange the time as in bench.py, and behind
it, `copy_us`, that of one copy of torch's that reads and writes as many bytes: what is added up reads a sum's parts, too.
`unpack_received` is unpack, and `add_in_place` add_gradients, where the rank's own tokens stand among all already. A JSON
line for each step goes to <out>/<gpu>_exchange.jsonl.
"""
import fnmatch
import json
import typing

import torch
from abi import DTYPES, Library, ffi, sized, view
from measure import time_us
from options import make_library_parser
from report import digits, origin, results_file

HEAD_DIM = 128


class Case(typing.NamedTuple):
    name: str
    pattern: str
    seq: int = 131072
    heads: int = 8
    ranks: int = 8
    rank: int = 4
    zigzag: bool = False


CASES = [
    Case("causal_128k_of_8", "causal", zigzag=True),
    Case("window4k_128k_of_8", "causal & window(4095,0)"),
    Case("streaming_128k_of_2", "causal & (sink(64) | window(1023,0))", heads=16, ranks=2, rank=1),
    Case("bigbird_128k_of_8", "bigbird(64,3,2,3,0)", rank=0),
]


class Rank:
    """One rank's tensors and buffers, and its sharding."""

    def __init__(self, library, case):
        self.library, lib = library, library.lib
        dims = {"heads_q": case.heads, "heads_kv": case.heads, "seq_q": case.seq, "seq_k": case.seq, "head_dim": HEAD_DIM}
        problem = sized("spattn_problem", flags=lib.SPATTN_PLAN_BACKWARD, batch=1, dtype=DTYPES[torch.bfloat16],
                        axes=lib.SPATTN_BSHD, **dims)
        split = lib.SPATTN_SPLIT_ZIGZAG if case.zigzag else lib.SPATTN_SPLIT_CONTIGUOUS
        options = sized("spattn_sharding_options", ranks=case.ranks, rank=case.rank, split=split)
        self.sharding = library.make("spattn_sharding", lib.spattn_sharding_create, library.context,
                                     library.pattern(case.pattern), problem, options, ffi.NULL)
        peers = [sized("spattn_peer") for _ in range(case.ranks)]
        for rank, peer in enumerate(peers):
            library.check(lib.spattn_sharding_peer(self.sharding, rank, peer))
        plan = library.make("spattn_plan", lib.spattn_sharding_plan, self.sharding)
        self.kernel = library.kernel(plan, "forward")
        self.sent_tokens = sum(peer.tokens_sent for peer in peers)
        self.received_tokens = sum(peer.tokens_received for peer in peers)
        sizes = ffi.new("size_t[2]")
        library.check(lib.spattn_sharding_buffers(self.sharding, sizes, sizes + 1))
        self.sent, self.received = (torch.zeros(max(size, 16), dtype=torch.uint8, device="cuda") for size in sizes)
        self.tokens = case.seq // case.ranks
        self.held = [self.make(case, self.tokens) for _ in "kv"]
        counts = ffi.new("int64_t[2]")
        library.check(lib.spattn_sharding_seen(self.sharding, ffi.NULL, counts, counts + 1))
        self.seen = [self.make(case, counts[1]) for _ in "kv"]
        self.token_bytes = 2 * case.heads * HEAD_DIM * 2  # of a key and a value

    def make(self, case, tokens):
        return torch.randn(1, tokens, case.heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    def call(self, step, buffer, has_held, has_seen):
        lib, given = self.library.lib, {}
        if has_held:
            given |= zip("kv", map(view, self.held))
        if has_seen:
            given |= zip(("seen_k", "seen_v"), map(view, self.seen))
        args = sized("spattn_exchange_args", stream=ffi.cast("void *", torch.cuda.current_stream().cuda_stream),
                     buffer=ffi.cast("void *", buffer.data_ptr()), buffer_bytes=buffer.numel(),
                     **{name: tensor for name, (tensor, *_) in given.items()})
        code = getattr(lib, f"SPATTN_EXCHANGE_{step}")
        return lambda: given and self.library.check(lib.spattn_exchange(self.sharding, code, args))

    def steps(self):
        """Of each: its call, and how many tokens' keys and values it reads and writes."""
        sent, received, own = self.sent_tokens, self.received_tokens, self.tokens
        shared = min(sent, own)  # so many rows at most go to anybody
        return {
            "pack": (self.call("PACK", self.sent, True, False), 2 * sent),
            "unpack": (self.call("UNPACK", self.received, True, True), 2 * (own + received)),
            "unpack_received": (self.call("UNPACK", self.received, False, True), 2 * received),
            "pack_gradients": (self.call("PACK_GRADIENTS", self.received, False, True), 2 * received),
            "add_gradients": (self.call("ADD_GRADIENTS", self.sent, True, True), 2 * own + sent + 2 * shared),
            "add_in_place": (self.call("ADD_GRADIENTS", self.sent, False, True), sent + 2 * shared),
        }


def copy_us(moved):
    """A copy that reads and writes so many bytes together."""
    x = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return time_us(lambda: y.copy_(x))


def main():
    parser = make_library_parser(__doc__)
    parser.add_argument("--case", default="*")
    options = parser.parse_args()
    library, common = Library(options.library), origin(options.toolkit)
    with results_file(options.out, "_exchange").open("w") as stream:
        for case in CASES:
            if not fnmatch.fnmatch(case.name, options.case):
                continue
            rank = Rank(library, case)
            for step, (call, tokens) in rank.steps().items():
                moved = tokens * rank.token_bytes
                if not moved:
                    continue
                us = time_us(call)
                line = {"case": case.name, "step": step, "pattern": case.pattern, "ranks": case.ranks, "rank": case.rank,
                        "tokens": rank.tokens, "sent": rank.sent_tokens, "received": rank.received_tokens,
                        "heads_kv": case.heads, "us": digits(us), "moved_bytes": moved,
                        "gigabytes_a_second": round(moved * 1e-3 / us), "copy_us": digits(copy_us(moved)),
                        "plan": rank.kernel}
                stream.write(json.dumps({**line, **common}) + "\n")
                stream.flush()
                print(f"{case.name:20} {step:16} {line['us']:8} us  copy {line['copy_us']:8}  "
                      f"{line['gigabytes_a_second']} GB/s", flush=True)


if __name__ == "__main__":
    main()
