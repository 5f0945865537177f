#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Calls on a cache: decoding and chunks of a prompt, over keys in pages, beside the best dense kernels.

    python3 bench/gpu/cache.py --library build/libsparseattn.so [--case GLOB] [--out bench/results]

A plan is made for a capacity of 128K tokens, and its calls have `queries` a batch entry, the last of `length` tokens;
pages stand in random order. Cases have 64 heads of 128 on 8, or 32 on 32, others where `shape` says so; those of
`latent` have latent attention as DeepSeek's models decode by it: heads of 576 on one, values the first 512 columns of
keys. Times as in bench.py.
`gigabytes_a_second` is what the keys and values that some query sees come to, each read once; `same_step_us`, the
call when an earlier one has left its layout, as in a model's second layer; `pageless_us`, a plan for a cache of just
that length, keys in one piece; `static_us`, an ordinary plan of ours, keys alike; `cudnn_us` and `flash_us`, torch's
SDPA, whose queries see every one of those keys, whatever the pattern; `matmul_us`, torch's batched products and softmax
of the same, of latent cases, which those do not take; `fa4_us`, FA4 on pages of 128, causal, where its wheel is. Cases of `float8` have keys and values of a byte with a scale for each token and head; all others there
have what these stand for, in bfloat16. Cases of `tree` have drafts that are a binary tree, each query a child of
number (i - 1) / 2; `chain_us` is the same call by a plan that knows of no trees. `append_us` is what it takes to
write the keys and values of the queries' tokens into their pages, and `torch_append_us` what torch's own operators
take for that. Results are compared with torch's in float32 (`max_err`). A JSON line for each case goes to
<out>/<gpu>_cache.jsonl.
"""
import typing

import torch
import torch.nn.functional as F
import torch_peers
from abi import DTYPES, Library, ffi, sized
from float8 import to_float8
from measure import empty_us, peer_us, time_us
from options import make_library_parser
from report import digits, first_line, write_cases

CAPACITY = 131072
LATENT = 512  # columns of keys that are values


class Case(typing.NamedTuple):
    name: str
    batch: int
    length: int
    page_size: int = 128
    queries: int = 1
    pattern: str = "causal"
    heads: int = 64
    heads_kv: int = 8
    float8: bool = False
    tree: bool = False
    head_dim: int = 128
    latent: bool = False

    def columns(self):
        """Of keys and values together, in memory."""
        return self.head_dim if self.latent else 2 * self.head_dim


def latent(name, *sizes, heads=128, **more):
    return Case(name, *sizes, 64, heads=heads, heads_kv=1, head_dim=576, latent=True, **more)


STREAMING = "sink(4) | window(1023,0)"
CASES = [
    Case("decode_2k_one", 1, 2048),
    Case("decode_8k_one", 1, 8192),
    Case("decode_2k", 32, 2048),
    Case("decode_8k", 32, 8192),
    Case("decode_8k_pages64", 32, 8192, 64),
    Case("decode_8k_pages16", 32, 8192, 16),
    Case("decode_8k_pages1", 32, 8192, 1),
    Case("decode_32k", 8, 32768),
    Case("decode_128k_one", 1, 131072),
    Case("decode_8k_mha", 8, 8192, heads=32, heads_kv=32),
    Case("decode_streaming_32k", 32, 32768, pattern=STREAMING),
    Case("decode_streaming_32k_pages16", 32, 32768, 16, pattern=STREAMING),
    Case("decode_bigbird_32k", 32, 32768, pattern="bigbird(64,3,2,3,0)"),
    Case("draft8_8k", 32, 8192, queries=8),
    Case("tree8_8k", 32, 8192, queries=8, tree=True),
    Case("tree64_8k", 32, 8192, queries=64, tree=True),
    Case("tree64_8k_pages16", 32, 8192, 16, queries=64, tree=True),
    Case("chunk2k_32k", 1, 32768, queries=2048),
    Case("chunk2k_32k_pages16", 1, 32768, 16, queries=2048),
    Case("chunk2k_32k_pages1", 1, 32768, 1, queries=2048),
    Case("chunk2k_128k_streaming", 1, 131072, queries=2048, pattern=STREAMING),
    Case("decode_8k_float8", 32, 8192, float8=True),
    Case("decode_8k_pages16_float8", 32, 8192, 16, float8=True),
    Case("decode_32k_float8", 8, 32768, float8=True),
    Case("decode_128k_one_float8", 1, 131072, float8=True),
    Case("decode_8k_mha_float8", 8, 8192, heads=32, heads_kv=32, float8=True),
    Case("draft8_8k_float8", 32, 8192, queries=8, float8=True),
    Case("tree8_8k_float8", 32, 8192, queries=8, float8=True, tree=True),
    Case("decode_streaming_32k_float8", 32, 32768, pattern=STREAMING, float8=True),
    Case("chunk2k_32k_float8", 1, 32768, queries=2048, float8=True),
    Case("chunk2k_128k_streaming_float8", 1, 131072, queries=2048, pattern=STREAMING, float8=True),
    latent("latent_2k_one", 1, 2048),
    latent("latent_32k_one", 1, 32768),
    latent("latent_128k_one", 1, 131072),
    latent("latent_2k", 32, 2048),
    latent("latent_8k", 32, 8192),
    latent("latent_8k_128", 128, 8192),
    latent("latent_8k_128_heads16", 128, 8192, heads=16),
    latent("latent_32k", 8, 32768),
    latent("latent_draft2_8k", 64, 8192, queries=2),
    latent("latent_streaming_32k", 32, 32768, pattern=STREAMING),
    latent("latent_chunk64_32k", 1, 32768, queries=64),
    latent("latent_8k_float8", 32, 8192, float8=True),
    latent("latent_8k_128_heads16_float8", 128, 8192, heads=16, float8=True),
    latent("latent_128k_one_float8", 1, 131072, float8=True),
    Case("decode_8k_heads28", 32, 8192, heads=28, heads_kv=4),
    Case("decode_8k_heads24", 32, 8192, heads=24, heads_kv=8),
    Case("decode_8k_mqa", 32, 8192, heads=64, heads_kv=1),
    Case("decode_32k_d256_mqa", 8, 32768, heads=48, heads_kv=1, head_dim=256),
]


class Tensors:
    """A cache that is full up to the length, in pages and in one piece, and a call's queries."""

    def __init__(self, case):
        def draw(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        self.q = draw(case.batch, case.queries, case.heads, case.head_dim)
        self.k = draw(case.batch, case.length, case.heads_kv, case.head_dim)
        self.v = self.k[..., :LATENT] if case.latent else torch.randn_like(self.k)
        self.out = torch.empty_like(self.q[..., : self.v.shape[-1]])
        of_entry = -(-case.length // case.page_size)
        self.pages = torch.randperm(case.batch * of_entry, device="cuda").view(case.batch, of_entry)
        self.page_table = torch.full((case.batch, CAPACITY // case.page_size), -1, device="cuda", dtype=torch.int32)
        self.page_table[:, :of_entry] = self.pages
        self.starts = torch.full((case.batch,), case.length - case.queries, device="cuda", dtype=torch.int32)
        parents = (torch.arange(case.queries, device="cuda", dtype=torch.int32) - 1) // 2
        self.trees = {"parents": parents.repeat(case.batch, 1)} if case.tree else {}
        self.scales = {}  # of pages
        self.pools = {}
        for name in "k" if case.latent else "kv":
            x = getattr(self, name)
            if case.float8:
                x, scales, stands_for = to_float8(x)
                setattr(self, name, stands_for)
                self.scales[f"{name}_scales"] = self.to_pages(scales, case.page_size)
                self.pools[name] = self.to_pages(x.view(torch.uint8), case.page_size).view(x.dtype)
            else:
                self.pools[name] = self.to_pages(x, case.page_size)
        if case.latent:
            self.v = self.k[..., :LATENT]
        self.keys = {name: getattr(self, name) for name in self.pools}  # in one piece

    def to_pages(self, x, page_size):
        """[batch, length, ...] as pages [pages, page_size, ...]."""
        padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, self.pages.shape[1] * page_size - x.shape[1]))
        pool = torch.empty(self.pages.numel(), page_size, *x.shape[2:], device=x.device, dtype=x.dtype)
        pool[self.pages.flatten()] = padded.reshape(-1, page_size, *x.shape[2:])
        return pool

    def heads_first(self):
        return (x.transpose(1, 2) for x in (self.q, self.k, self.v))


def make_problem(library, case, seq_k, page_size=0, is_cache=True):
    """Of a cache, which is as the case says if it has pages, or an ordinary one whose queries stand at the keys' end."""
    cache = {"cache_dtype": DTYPES[torch.float8_e4m3fn]} if case.float8 and page_size else {}
    lib = library.lib
    flags = lib.SPATTN_PLAN_STARTS | (lib.SPATTN_PLAN_PARENTS if case.tree else 0) if is_cache else 0
    flags |= lib.SPATTN_PLAN_VALUE_IN_KEY if case.latent else 0
    return sized("spattn_problem", flags=flags, batch=case.batch, heads_q=case.heads, heads_kv=case.heads_kv,
                 seq_q=case.queries, seq_k=seq_k, head_dim=case.head_dim, head_dim_v=LATENT if case.latent else 0,
                 dtype=DTYPES[torch.bfloat16], axes=library.lib.SPATTN_BSHD, page_size=page_size, **cache)


def make_plan(library, case, *sizes, is_cache=True):
    text, problem = f"causal & ({case.pattern})", make_problem(library, case, *sizes, is_cache=is_cache)
    if case.tree and not is_cache:
        text += f" & tree({','.join(str((i - 1) // 2) for i in range(case.queries))})"
    pattern = library.pattern(text)
    return library.make("spattn_plan", library.lib.spattn_plan_create, library.context, pattern, problem, ffi.NULL)


def error_of(library, case, t):
    """The largest error against torch in float32 in some entries, and how many keys a query sees there."""
    kept = torch.empty(case.queries, CAPACITY, dtype=torch.uint8)
    extent = sized("spattn_extent", flags=library.lib.SPATTN_EXTENT_Q_OFFSET, seq_q=case.queries, seq_k=CAPACITY,
                   q_offset=case.length - case.queries)
    shape = ffi.new("int64_t[]", [1, 1, case.queries, CAPACITY])
    mask = ffi.new("spattn_tensor *", (ffi.cast("void *", kept.data_ptr()), (1, 0), 4, (1, 8, 1), shape, ffi.NULL, 0))
    pattern = library.pattern(f"causal & ({case.pattern})")
    library.check(library.lib.spattn_pattern_to_mask(pattern, extent, mask))
    kept, worst, group = kept[:, :case.length].bool(), 0.0, case.heads // case.heads_kv
    if case.tree:
        ways = torch.eye(case.queries, dtype=torch.bool)
        for node in range(1, case.queries):
            ways[node] |= ways[(node - 1) // 2]
        kept[:, -case.queries:] &= ways
    kept = kept.cuda()
    for entry in range(0, case.batch, max(1, case.batch // 4)):
        for head in range(case.heads_kv):  # one at a time, for scores are [group, queries, length]
            heads = slice(head * group, (head + 1) * group)
            q, (k, v) = t.q[entry, :, heads].float().transpose(0, 1), (x[entry, :, head].float() for x in (t.k, t.v))
            scores = (q @ k.T * case.head_dim**-0.5).masked_fill_(~kept, -torch.inf)
            truth = scores.softmax(-1) @ v
            worst = max(worst, (truth.transpose(0, 1) - t.out[entry, :, heads].float()).abs().max().item())
    return worst, int(kept.any(0).sum())


def append_times(library, case, t):
    """Brings the queries' tokens to the pages, which have none there, and says what that takes, torch's way as well."""
    new = {name: x[:, -case.queries:] for name, x in t.keys.items()}
    entries = torch.arange(case.batch, device="cuda")[:, None]
    pools = [x.view(torch.uint8 if case.float8 else x.dtype).flatten(0, 1) for x in t.pools.values()]
    scales = [x.flatten(0, 1) for x in t.scales.values()]

    def rows():
        tokens = t.starts[:, None] + torch.arange(case.queries, device="cuda")
        return (t.page_table[entries, tokens // case.page_size] * case.page_size + tokens % case.page_size).flatten()

    def append_by_torch():
        places = rows()
        written = new.values()
        if case.float8:
            codes, of_rows, _ = zip(*(to_float8(x) for x in written))
            written = [x.view(torch.uint8) for x in codes]
            for pool, x in zip(scales, of_rows):
                pool.index_copy_(0, places, x.flatten(0, 1))
        for pool, x in zip(pools, written):
            pool.index_copy_(0, places, x.flatten(0, 1))

    by_torch = digits(peer_us(append_by_torch))
    for pool in pools:
        pool[rows()] = 0x7F if case.float8 else torch.nan  # NaN of float8
    append = library.cache_append(make_problem(library, case, CAPACITY, case.page_size), **t.pools, **t.scales,
                                  **{f"{name}_new": x for name, x in new.items()},
                                  starts=t.starts, page_table=t.page_table,
                                  flags=library.lib.SPATTN_APPEND_SCALES if case.float8 else 0)
    append()
    return {"append_us": digits(time_us(append)), "torch_append_us": by_torch}


def fa4_us(case, t):
    """FA4 on the same pages, which are to be as long as its tiles; it has no pattern but causal and windows."""
    from flash_attn.cute.interface import _flash_attn_fwd
    lengths = torch.full((case.batch,), case.length, device="cuda", dtype=torch.int32)
    table = t.pages.int().contiguous()
    options = {"seqused_k": lengths, "page_table": table, "causal": True}
    call = lambda: _flash_attn_fwd(t.q, *t.pools.values(), **options)  # noqa: E731
    error = (call()[0].float() - t.out.float()).abs().max().item()
    if error > 0.02:
        raise RuntimeError(f"it is {error:.3f} off")
    return peer_us(call)


def matmul_us(case, t):
    q, k, v = t.q.flatten(1, 2), t.k[:, :, 0], t.v[:, :, 0]
    return peer_us(lambda: (q @ k.transpose(1, 2) * case.head_dim**-0.5).softmax(-1) @ v)


def peers(case, t):
    """What others take; one that cannot is a fact to record."""
    if case.latent:
        return {"matmul_us": digits(matmul_us(case, t))}
    line = {}
    q, k, v = t.heads_first()
    calls = {name.split()[1].lower() + "_us": lambda attend=attend: peer_us(lambda: attend(q, k, v))
             for name, attend in torch_peers.dense(False, torch.bfloat16)}
    if case.pattern == "causal" and case.page_size == 128 and not case.float8 and not case.tree:
        calls["fa4_us"] = lambda: fa4_us(case, t)
    for name, measure in calls.items():
        try:
            line[name] = digits(measure())
        except Exception as e:
            line |= {name: None, name.removesuffix("_us"): f"failed: {first_line(e)}"}
    return line


def run_case(library, case):
    torch.cuda.empty_cache()
    torch.manual_seed(1)
    t = Tensors(case)
    appends = append_times(library, case, t)
    plan, of_cache = make_plan(library, case, CAPACITY, case.page_size), {"q": t.q, "out": t.out, "starts": t.starts}
    of_pages = {**of_cache, **t.pools, "page_table": t.page_table, **t.scales}
    call = library.forward(plan, **of_pages, **t.trees)
    call()
    error, seen = error_of(library, case, t)
    us = time_us(call)
    again = library.forward_again(plan, **of_pages, **t.trees)
    again()
    again_error, _ = error_of(library, case, t)
    chain = {}
    if case.tree:
        of_chain = make_plan(library, case._replace(tree=False), CAPACITY, case.page_size)
        chain["chain_us"] = digits(time_us(library.forward(of_chain, **of_pages)))
    pageless = library.forward(make_plan(library, case, case.length), **t.keys, **of_cache, **t.trees)
    static = library.forward(make_plan(library, case, case.length, is_cache=False), q=t.q, **t.keys, out=t.out)
    row_bytes = case.columns() + 4 * len(t.pools) if case.float8 else 2 * case.columns()
    gigabytes = case.batch * case.heads_kv * seen * row_bytes * 1e-9
    return {"case": case.name, "pattern": case.pattern, "kernel": library.kernel(plan, "forward"),
            "shape": [case.batch, case.queries, case.heads, case.heads_kv, case.length, case.head_dim], "capacity": CAPACITY,
            "page_size": case.page_size, "float8": case.float8, "tree": case.tree, "us": digits(us),
            "gigabytes_a_second": round(gigabytes / us * 1e6), "same_step_us": digits(time_us(again)),
            "pageless_us": digits(time_us(pageless)), "static_us": digits(time_us(static)), **chain, **appends,
            **peers(case, t), "max_err": max(error, again_error), "empty_us": digits(empty_us())}


def describe(line):
    beside = "".join(f"  {name.removesuffix('_us')} {line[name]}" for name in
                     ("same_step_us", "pageless_us", "static_us", "chain_us", "cudnn_us", "flash_us", "fa4_us",
                      "matmul_us", "append_us", "torch_append_us")
                     if line.get(name))
    return (f"{line['case']:30} {line['us']:8} us {line['gigabytes_a_second']:6} GB/s{beside}  "
            f"err {line['max_err']:.1e}  {line['kernel']}")


def main():
    parser = make_library_parser(__doc__)
    parser.add_argument("--case", default="*")
    options = parser.parse_args()
    library = Library(options.library)
    write_cases(options, "_cache", CASES, lambda case: run_case(library, case), describe)


if __name__ == "__main__":
    main()
