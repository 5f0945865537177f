#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The bench's cases beside torch on the same machine, with the same threads, one after the other.

    python3 bench/peers.py --bench build/bench/bench [--case GLOB]... [--dtype f32|bf16] [--peer sdpa|flex|sparse]...

Peers: `sdpa` is scaled_dot_product_attention with is_causal or the equivalent boolean mask; `flex` is FlexAttention,
compiled, with a BlockMask of 128 x 128 (forward only on a CPU); `sparse` is sampled_addmm, softmax over CSR values and
a sparse product (forward only); `gather` is for lists of a call: listed keys copied together, then dense products. A
ratio is the peer's time over ours: above 1 we are faster. What a peer cannot do, or does by crashing, is recorded as
`failed: reason`; every peer runs in a process of its own for that.
"""
import argparse
import fnmatch
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time

PEERS = ("sdpa", "flex", "sparse", "gather")
BLOCK = 128  # of a BlockMask
# A first compile takes half a minute, so these stand for the rest unless --flex names others.
FLEX_CASES = ["full_4k", "causal_4k", "streaming_4k", "streaming_16k", "bsr128_25_4k", "bsr128_25_4k_d64",
              "bsr128_25_8k", "bsr128_10_5k", "tiny_*"]
LARGEST_MASK = 8192  # tokens; torch turns a boolean mask into floats, a gigabyte at 16K
LEVEL3_CACHE_SIZE = 194  # what glibc calls _SC_LEVEL3_CACHE_SIZE, for which Python has no name


# ---- the equivalent mask ----

class Mod:
    """A mask_mod of FlexAttention with the algebra of the pattern texts, which are Python expressions over these."""

    def __init__(self, keeps):
        self.keeps = keeps  # (query, key) -> bool, on numbers or tensors

    def __and__(self, other):
        return Mod(lambda q, k: self.keeps(q, k) & other.keeps(q, k))

    def __or__(self, other):
        return Mod(lambda q, k: self.keeps(q, k) | other.keeps(q, k))


def make_mod(text, mask):
    """The mask_mod of a text. Patterns that are tables anyway look up `mask`."""
    import torch
    names = {
        "full": Mod(lambda q, k: (q >= 0) & (k >= 0)),
        "causal": Mod(lambda q, k: k <= q),
        "window": lambda left, right: Mod(lambda q, k: (q - k <= left) & (k - q <= right)),
        "sink": lambda tokens: Mod(lambda q, k: (k < tokens) & (q >= 0)),
        "block_diagonal": lambda block: Mod(lambda q, k: q // block == k // block),
        "dilated": lambda left, right, dilation: Mod(
            lambda q, k: (q - k <= left) & (k - q <= right) & ((q - k) % dilation == 0)),
        "bigbird": lambda block, *_: block_table(torch.from_numpy(mask[::block, ::block].copy()), block),
        "tree": lambda *_: Mod(lambda q, k, table=torch.from_numpy(mask): table[q, k]),
    }
    return eval(text, {"__builtins__": {}}, names)  # texts come from the bench's own table


def block_table(table, block):
    return Mod(lambda q, k: table[q // block, k // block])


def read_mask(path, seq):
    import numpy
    return numpy.fromfile(path, dtype=numpy.uint8).reshape(seq, seq).astype(bool)


def check_mod(mod, mask):
    """The mask_mod is written a second time here: it must say what the library says, on a few rows of any length."""
    import numpy
    import torch
    keys = torch.arange(mask.shape[1])
    for row in {*range(0, len(mask), max(1, len(mask) // 37)), len(mask) - 1}:
        says = mod.keeps(torch.tensor(row), keys).expand(len(keys)).numpy()
        if not numpy.array_equal(says, mask[row]):
            raise AssertionError(f"the mask_mod differs from the library in row {row}")


# ---- peers: each returns {pass: callable}; a pass that is not there is not offered ----

def make_sdpa(case, mask, q, k, v, dout):
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    options = {"enable_gqa": case["heads_q"] != case["heads_kv"]}
    if case["pattern"] == "causal":
        options["is_causal"] = True
    elif case["pattern"] != "full":
        if case["seq"] > LARGEST_MASK:
            raise MemoryError(f"a mask of {case['seq']} x {case['seq']} pairs")
        options["attn_mask"] = torch.from_numpy(mask)[None, None]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = None

    def forward():
        with torch.no_grad():
            scaled_dot_product_attention(q, k, v, **options)

    def backward():
        nonlocal out
        if out is None:
            out = scaled_dot_product_attention(*leaves, **options)
        torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return {"forward": forward, "backward": backward}


def make_flex(case, mask, q, k, v, _dout):
    import torch
    from torch.nn.attention.flex_attention import BlockMask, flex_attention
    mod = make_mod(case["pattern"], mask)
    check_mod(mod, mask)
    blocks = -(-case["seq"] // BLOCK)
    side = torch.nn.functional.pad(torch.from_numpy(mask), (0, blocks * BLOCK - case["seq"]) * 2)
    kept = side.view(blocks, BLOCK, blocks, BLOCK).sum((1, 3))

    def listed(chosen):
        order = chosen.int().argsort(dim=1, descending=True, stable=True)
        return chosen.sum(1)[None, None].int(), order[None, None].int()

    partial, full = listed((kept > 0) & (kept < BLOCK * BLOCK)), listed(kept == BLOCK * BLOCK)
    block_mask = BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK,
                                          mask_mod=lambda b, h, q, k: mod.keeps(q, k),
                                          seq_lengths=(case["seq"], case["seq"]))
    compiled = torch.compile(flex_attention, dynamic=False)
    gqa = case["heads_q"] != case["heads_kv"]

    def forward():
        with torch.no_grad():
            compiled(q, k, v, block_mask=block_mask, enable_gqa=gqa)

    return {"forward": forward}


def make_sparse(_case, mask, q, k, v, _dout):
    import torch
    if q.dtype != torch.float32:
        raise TypeError("sampled_addmm on a CPU takes float32")
    kept = torch.from_numpy(mask).to_sparse_csr()
    return {"forward": sparse_attention(kept.crow_indices(), kept.col_indices(), q, k, v)}


def sparse_attention(row_ptr, col_idx, q, k, v):
    """A call that returns out; q, k, v are [batch, heads, seq, head_dim]. Every head keeps the same keys."""
    import torch
    shape = q.shape[2], k.shape[2]
    pattern = torch.sparse_csr_tensor(row_ptr, col_idx, q.new_ones(len(col_idx)), shape)
    lengths = row_ptr.diff()
    group = q.shape[1] // k.shape[1]
    scale = 1 / math.sqrt(q.shape[3])
    out = q.new_empty(*q.shape[:3], v.shape[3])

    def softmax(s):
        m = torch.segment_reduce(s, "max", offsets=row_ptr)
        p = (s - m.repeat_interleave(lengths)).exp_()
        return p.div_(torch.segment_reduce(p, "sum", offsets=row_ptr).repeat_interleave(lengths))

    def forward():
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                s = torch.sparse.sampled_addmm(pattern, q[b, h], k[b, h // group].T, beta=0.0, alpha=scale)
                p = torch.sparse_csr_tensor(row_ptr, col_idx, softmax(s.values()), shape)
                out[b, h] = p @ v[b, h // group]
        return out

    return forward


def make_gather(case, _mask, q, k, _v, dout):
    import torch
    lists = torch.randint(case["seq_k"], (case["seq"], case["top"]))
    scale, columns = 1 / math.sqrt(case["head_dim"]), case["head_dim_v"]
    leaves = [q[0].transpose(0, 1).clone().requires_grad_(), k[0, 0].clone().requires_grad_()]
    out = None

    def attend(q, k):  # q [seq, heads, head_dim], k [seq_k, head_dim]
        keys = k[lists]
        p = torch.matmul(q * scale, keys.transpose(1, 2)).softmax(-1)
        return torch.matmul(p, keys[..., :columns])

    def forward():
        with torch.no_grad():
            attend(*leaves)

    def backward():
        nonlocal out
        if out is None:
            out = attend(*leaves)
        torch.autograd.grad(out, leaves, dout[0].transpose(0, 1), retain_graph=True)

    return {"forward": forward, "backward": backward}


def time_us(call, seconds):
    """Median of cold calls, as bench does it."""
    import torch
    level3 = os.sysconf(LEVEL3_CACHE_SIZE) if sys.platform == "linux" else 0
    sweep = torch.zeros(max(2 * level3, 64 << 20) // 8)
    call()
    runs, begin = [], time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds or (len(runs) < 5 and spent < 5):
        sweep += 1
        start = time.perf_counter()
        call()
        runs.append(time.perf_counter() - start)
    return sorted(runs)[(len(runs) - 1) // 2] * 1e6


def run_one(job):
    """In a child process: prints {pass: us or "failed: reason"}."""
    import torch
    import warnings
    warnings.filterwarnings("ignore")
    torch.set_num_threads(job["threads"])
    torch.manual_seed(1)
    case = job["case"]
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[job["dtype"]]
    dims = case["head_dim"], case["head_dim_v"]
    q, dout = (torch.randn(case["batch"], case["heads_q"], case["seq"], dim).to(dtype) for dim in dims)
    k, v = (torch.randn(case["batch"], case["heads_kv"], case["seq_k"], dim).to(dtype) for dim in dims)
    mask = read_mask(job["mask"], case["seq"]) if job["mask"] else None
    make = {"sdpa": make_sdpa, "flex": make_flex, "sparse": make_sparse, "gather": make_gather}[job["peer"]]
    passes = make(case, mask, q, k, v, dout)
    for name in job["passes"]:
        if name in passes:
            print(json.dumps({name: time_us(passes[name], job["seconds"])}), flush=True)


# ---- the parent ----

def ask_child(job, limit):
    """{pass: us}, with "failed: reason" for each offered pass that did not end well."""
    child = subprocess.Popen([sys.executable, __file__, "--one", json.dumps(job)], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = child.communicate(timeout=limit)
        lines = err.strip().splitlines() or [""]
        reason = f"signal {-child.returncode}" if child.returncode < 0 else lines[-1][:100]
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # torch.compile has workers, which would take cores from the next peer
        out, reason = child.communicate()[0], f"more than {limit} s"
    result = {}
    for line in out.splitlines():
        if line.startswith("{"):
            result.update(json.loads(line))
    if child.returncode != 0:
        for name in job["passes"]:
            if name == "forward" or job["peer"] in ("sdpa", "gather"):
                result.setdefault(name, "failed: " + reason)
    return result


def bench(options, *words):
    return subprocess.run([options.bench, *words], stdout=subprocess.PIPE, text=True, check=True).stdout


def time_ours(options, case, folder):
    """{pass: the bench's JSON line}."""
    path = os.path.join(folder, "ours.jsonl")
    if os.path.exists(path):
        os.remove(path)
    words = ["--case", case["case"], "--dtype", options.dtype, "--threads", str(options.threads), "--seconds",
             str(options.seconds), "--json", path]
    if options.only:
        words += ["--pass", options.only]
    bench(options, *words)
    with open(path) as lines:
        return {line["pass"]: line for line in map(json.loads, lines)}


def run_case(options, case, folder, out):
    ours = time_ours(options, case, folder)
    mask = os.path.join(folder, "mask")
    is_small = case["seq"] <= 2 * LARGEST_MASK and not case["top"]
    if is_small:
        bench(options, "--mask", mask, "--case", case["case"])
    theirs = {}
    for peer in options.peer or PEERS:
        if (peer == "gather") != (case["top"] > 0):
            continue
        if peer == "flex" and not any(fnmatch.fnmatch(case["case"], glob) for glob in options.flex or FLEX_CASES):
            continue
        if peer == "sparse" and (case["seq"] > LARGEST_MASK and not case["pattern"].startswith("csr") or
                                 case["pattern"] in ("full", "causal")):
            continue  # every pair in CSR: gigabytes
        if not is_small and not case["top"] and case["pattern"] not in ("full", "causal"):
            continue
        # csr patterns are read as a mask.
        named = case | {"pattern": case["pattern"][:4096 if case["pattern"].startswith("csr") else None]}
        job = {"peer": peer, "case": named, "dtype": options.dtype, "threads": options.threads, "mask": mask if is_small
               else "", "passes": list(ours), "seconds": options.seconds}
        theirs[peer] = ask_child(job, options.limit)
    report(case, ours, theirs, out)


def report(case, ours, theirs, out):
    rows = [(name, line["us"], {p: t[name] for p, t in theirs.items() if name in t}) for name, line in ours.items()]
    if len(rows) == 2:  # training pays for both
        sums = {p: t["forward"] + t["backward"] for p, t in theirs.items()
                if all(isinstance(t.get(name), float) for name in ("forward", "backward"))}
        rows.append(("both", rows[0][1] + rows[1][1], sums))
    for name, us, peers in rows:
        gflops = f"{ours[name]['gflops']:.1f}" if name in ours else ""
        cells = "".join(f"{cell(peers.get(peer), us):>22}" for peer in PEERS)
        print(f"{case['case']:<22} {name:<9}{us:>11.1f} {gflops:>8}{cells}", flush=True)
        for peer, value in peers.items():
            if isinstance(value, str):
                print(f"{'':<22} {peer} {value}")
            if out:
                line = {"case": case["case"], "pass": name, "peer": peer, "us_ours": us} | common(ours, name)
                line |= {"failed": value} if isinstance(value, str) else {"us": value, "ratio": value / us}
                out.write(json.dumps(line) + "\n")


def common(ours, name):
    """What tells one record from another: the machine, its load, and the sources that were timed."""
    import torch
    one = ours.get(name) or ours["forward"]
    line = {key: one[key] for key in ("dtype", "shape", "cpu", "threads", "date")} | {"torch": torch.__version__}
    if name in ours:
        line |= {"kernel": one["kernel"], "gflops": one["gflops"]}
    return line | {"load": os.getloadavg()[0], "source": source_hash()}


def source_hash():
    """The first digits of a hash over all sources of the library, as in the records of GPUs."""
    hashed = "find include src cuda -type f | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-12"
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return subprocess.run(hashed, shell=True, cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def cell(value, us):
    if value is None:
        return "-"
    return "failed" if isinstance(value, str) else f"{value:.0f} us {value / us:.2f}x"


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", help="the built program", default="build/bench/bench")
    parser.add_argument("--case", action="append", default=[], metavar="GLOB")
    parser.add_argument("--peer", action="append", default=[], choices=PEERS)
    parser.add_argument("--flex", action="append", default=[], metavar="GLOB", help="cases that FlexAttention runs")
    parser.add_argument("--pass", dest="only", choices=("forward", "backward"))
    parser.add_argument("--dtype", default="f32", choices=("f32", "bf16"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=0.5, help="least time spent on a measurement")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a peer has failed a case")
    parser.add_argument("--full", action="store_true", help="the large cases too")
    parser.add_argument("--json", metavar="FILE", help="append one line a case, pass and peer")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = parse_options()
    try:
        import torch
    except ImportError:
        sys.exit("peers.py compares with torch, and this python has none: pip install torch numpy")
    if options.one:
        return run_one(json.loads(options.one))
    if not os.access(options.bench, os.X_OK):
        sys.exit(f"no program {options.bench}: build it, and name it with --bench")
    cases = [json.loads(line) for line in bench(options, "--list").splitlines()]
    cases = [case for case in cases if (options.full or not case["large"] or case["case"] in options.case) and
             (not options.case or any(fnmatch.fnmatch(case["case"], glob) for glob in options.case))]
    if not cases:
        sys.exit("no case of that name; bench --list prints them")
    print(f"torch {torch.__version__}, {options.dtype}, {options.threads} threads; ratio: the peer's time over ours\n")
    print(f"{'case':<22} {'pass':<9}{'ours us':>11} {'GFLOP/s':>8}" + "".join(f"{peer:>22}" for peer in PEERS))
    with tempfile.TemporaryDirectory() as folder:
        out = open(options.json, "a", buffering=1) if options.json else None  # a run that is stopped leaves its lines
        for case in cases:
            run_case(options, case, folder, out)


if __name__ == "__main__":
    main()
