# SPDX-License-Identifier: MIT
"""Writes the conformance vectors, patterns.json and attention.json, from tests/oracle.py:  python tests/vectors/make.py

Every language of the project runs the same files. See README.md beside this file for their form.
"""
import hashlib
import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from oracle import Extent, attention_backward, attention_forward, to_mask  # noqa: E402

# Extents that align at the end, at the start, before it, beyond it; long, wide, of one row, of one key.
EXTENTS = [Extent(9, 9), Extent(5, 12), Extent(12, 5), Extent(7, 10, q_offset=-3), Extent(6, 11, q_offset=14),
           Extent(1, 17), Extent(17, 1, q_offset=0), Extent(33, 70, q_offset=20), Extent(64, 64),
           Extent(100, 131, q_offset=-40)]

TEXTS = """
full | causal | window(0,0) | window(3,1) | window(-1,2) | window(2,-1) | window(-1,-1) | window(1000,0) | sink(0)
sink(4) | sink(100000) | block_diagonal(1) | block_diagonal(4) | block_diagonal(1000) | documents(0,3,3,8,40)
documents(2,5) | documents(0) | dilated(6,0,3) | dilated(4,4,2) | dilated(-1,-1,5) | dilated(7,3,1) | strided(1)
strided(4) | landmark(4,0) | landmark(4,1) | landmark(4,4) | fixed(5,2) | fixed(8,0) | logsparse | residue(1,0)
residue(3,2) | residue(16,5) | global_keys(0) | global_keys(7,2,2,90) | global_tokens(0,1) | global_tokens(30,3)
bigbird(4,3,1,1,0) | bigbird(2,1,0,2,12345) | bigbird(3,0,0,4,18446744073709551615) | bigbird(1,5,2,3,7)
bigbird(64,3,0,0,0)
""".replace("\n", " | ").split(" | ")

NESTED = [
    "causal & window(5,0)", "causal & (sink(2) | window(4,0))", "causal & (window(4,0) | strided(4))",
    "causal & fixed(4,1)", "causal & (global_tokens(0,6) | window(3,0))", "block_diagonal(8) & residue(2,1)",
    "block_diagonal(4) & residue(1,0) | block_diagonal(16) & residue(4,3)", "full - causal", "causal - window(2,0)",
    "causal - sink(1) - window(0,0)", "window(3,3) - window(1,1) & causal", "transpose(causal)", "transpose(sink(3))",
    "transpose(window(4,1)) | sink(1)", "transpose(transpose(documents(0,4,9)))",
    "transpose(global_keys(1,5)) & causal",
    "transpose(logsparse)", "transpose(dilated(9,0,3) - sink(2))", "transpose(block_diagonal(3) | landmark(5,1))",
    "(full)", "( causal|sink( 1 ) )&window( 6 , 0 )", "bigbird(4,3,1,1,9) & causal", "transpose(bigbird(4,3,1,1,9))",
    "global_tokens(0) | block_diagonal(6) - causal", "full - (window(2,2) | sink(1))",
    "causal & (documents(0,5,11,30) - (global_keys(3) | landmark(6,2)))",
]

TREES = [("tree(-1)", Extent(1, 1)), ("tree(-1)", Extent(1, 9)), ("tree(-1,0,1,2,3)", Extent(5, 5)),
         ("tree(-1,0,0,1,1,2,2)", Extent(7, 20)), ("tree(3,3,-1,2,0,-1)", Extent(6, 10)),
         ("tree(-1,0,0,1)", Extent(2, 6)), ("tree(-1,0,0,1)", Extent(4, 9, q_offset=3)),
         ("tree(-1,0,0,1) - sink(2)", Extent(4, 8)), ("transpose(tree(-1,0,0,1))", Extent(4, 8)),
         ("tree(-1,-1,0,1,2) & causal", Extent(5, 12))]

# Links by n-grams alone, by identifiers alone, by both; rows that the cap cuts; beginnings of the text.
IDS = ",".join(str((7 * i + i * i // 5) % 6) for i in range(40))
SYMBOLS = ",".join(str(i * i // 3 % 5 - 1) for i in range(80))
XREFS = [("xref([5],[])", Extent(1, 1)), (f"xref([{IDS}],[])", Extent(40, 40)),
         (f"xref([{IDS}],[],2,4,20,14,3,0,0,0,0)", Extent(40, 40)),
         (f"xref([{IDS}],[{SYMBOLS}],2,4,20)", Extent(9, 40)),
         (f"xref([{IDS}],[{SYMBOLS}],0,5,30,9,0,1,2,8,3)", Extent(40, 40)),
         (f"xref([{IDS}],[{SYMBOLS}],3,2,24,12,4,2,3,6,0)", Extent(20, 33)),
         (f"xref([{IDS}],[{SYMBOLS}],3,2,24,12,4,2,3,6,0)", Extent(33, 20, q_offset=12)),
         (f"transpose(xref([{IDS}],[{SYMBOLS}],1,3,16)) | sink(2)", Extent(40, 40, q_offset=0)),
         (f"per_document([0,20,40],[0,20,40],xref([{IDS}],[{SYMBOLS}],1,3,16)) - window(1,0)", Extent(40, 40)),
         (f"per_head([0,1],causal,xref([{IDS}],[{SYMBOLS}],1,3,16))", Extent(30, 40, heads=2))]

GRIDS = [
    ("grid([6,8],window(1,1),window(2,2))", Extent(48, 48)),
    ("grid([6,8],[3,4],window(1,1),window(2,0))", Extent(48, 48)),
    ("grid([4,3,5],causal,full,window(0,0))", Extent(60, 60)),
    ("grid([4,4,6],[2,1,3],window(1,0),full,dilated(4,4,2)) | sink(3)", Extent(50, 90)),
    ("transpose(grid([3,7],window(0,1),tree(-1,0,0,1,1,2,2)))", Extent(30, 21, q_offset=-4)),
    ("grid([2,5,1,2],[1,5,1,2],per_head([0,1],causal,full),logsparse,full,csr([0,1,2],[1,0],2))",
     Extent(20, 20, heads=2)),
    ("grid([16],[4],window(3,3)) - grid([16],block_diagonal(4))", Extent(12, 18, q_offset=3)),
]

SELECTIONS = [
    ("per_head([0,1,1],causal,full)", Extent(6, 6, heads=3)),
    ("per_head([2,0],sink(1),full,window(2,0) & causal)", Extent(5, 8, heads=2)),
    ("per_batch([0,1],sink(5),sink(3))", Extent(6, 6, batch=2)),
    ("per_batch([1,0,1],full,documents(0,4))", Extent(4, 7, batch=3, heads=2)),
    ("causal & per_batch([0,1],sink(5),sink(3))", Extent(6, 6, batch=2, heads=2)),
    ("per_head([0,1],causal,transpose(causal)) & per_batch([0,1],full,sink(4))", Extent(6, 6, batch=2, heads=2)),
    ("per_batch([0,1],per_head([0,1],sink(1),full),causal)", Extent(5, 5, batch=2, heads=2)),
    ("full - per_head([1,0,0,1],strided(3),block_diagonal(2))", Extent(9, 9, heads=4)),
    ("transpose(per_head([0,1],causal,sink(2)))", Extent(5, 7, heads=2)),
]

# Lists for one extent: rows are rows of it, whatever the offset.
INDEXED = [
    ("csr([0,0],[],1)", Extent(1, 1)),
    ("csr([0,2,2,3],[0,4,1],5)", Extent(3, 5)),
    ("csr([0,2,2,3],[0,4,1],5)", Extent(3, 5, q_offset=-7)),
    ("csr([0,2,2,3],[0,4,1],5)", Extent(3, 5, batch=2, heads=3, q_offset=40)),
    ("transpose(csr([0,1,3,6,6],[2,0,3,0,1,3],4))", Extent(4, 4)),
    ("transpose(csr([0,2,2,3],[0,4,1],5))", Extent(3, 5)),
    ("transpose(csr([0,3,4,7],[0,4,5,2,1,2,3],6))", Extent(3, 6, q_offset=2)),
    ("csr([0,3,4,7,9,12],[0,1,4,2,0,3,4,1,3,0,1,2],5) & causal", Extent(5, 5)),
    ("causal - csr([0,1,3,3,4],[3,2,6,0],7)", Extent(4, 7)),
    ("sink(1) | csr([0,1,3,3,4],[3,2,6,0],7) - window(1,0)", Extent(4, 7, q_offset=1)),
    ("bsr([0,1],[0],1,1,1,1)", Extent(1, 1)),
    ("bsr([0,1,3],[1,0,2],4,2,7,5)", Extent(7, 5)),
    ("bsr([0,2,2,3],[0,3,1],16,8,40,29)", Extent(40, 29, q_offset=-5)),
    ("bsr([0,1],[0],64,64,9,11)", Extent(9, 11)),
    ("bsr([0,2,4,7],[0,1,1,2,0,1,2],64,32,170,90) & causal", Extent(170, 90)),
    ("transpose(bsr([0,1,3,4],[2,0,1,3],5,3,13,12))", Extent(13, 12)),
    ("transpose(bsr([0,1,3,4],[2,0,1,3],5,3,13,12)) | landmark(4,1)", Extent(13, 12, q_offset=3)),
    ("mask([1],1,1)", Extent(1, 1, batch=2, heads=2)),
    ("mask([1,0,0,5,255,0],2,3)", Extent(2, 3)),
    ("mask([1,0,0,1,1,0],3,2)", Extent(3, 2, q_offset=9)),
    ("mask([1,0,0,1,1,1,1,0,1,0,0,1],3,2,2)", Extent(2, 2, heads=3)),
    ("mask([1,0,0,1,1,1,1,0,0,0,1,0],2,1,3,2)", Extent(3, 2, batch=2, heads=4)),
    ("mask([1,0,0,1,1,1,1,0],2,2,2,1)", Extent(2, 1, batch=2, heads=2)),
    ("full - mask([0,1,0,1,1,0,0,0,1],3,3)", Extent(3, 3)),
    ("transpose(mask([1,1,1,0,0,1,0,0,0],3,3))", Extent(3, 3)),
    ("per_head([0,1,0],csr([0,1,2],[1,0],2),bsr([0,1],[0],2,2,2,2))", Extent(2, 2, heads=3)),
    ("per_batch([1,0],mask([1,0,0,1],2,2),csr([0,1,2],[1,0],2) & causal)", Extent(2, 2, batch=2)),
    (f"csr([{','.join(str(2 * n) for n in range(81))}],[{','.join(f'{n},{n + 7}' for n in range(80))}],90)",
     Extent(80, 90)),
]

# Documents: every inner pattern on the extent of its own, aligned to its end.
DOCUMENTS = [
    ("per_document([0],[0],full)", Extent(3, 3)),
    ("per_document([0,4],[0,9],causal)", Extent(4, 9)),
    ("per_document([0,4],[0,9],causal)", Extent(4, 9, q_offset=0)),
    ("per_document([0,3,3,9],[0,4,4,9],causal)", Extent(9, 9)),
    ("per_document([0,5,7],[0,2,9],causal)", Extent(7, 9)),
    ("per_document([2,5,7],[1,3,8],window(1,0))", Extent(10, 11, batch=2, heads=2)),
    ("per_document([0,0,6],[0,4,4],full) | sink(1)", Extent(6, 4)),
    ("per_document([0,10,30,64],[0,20,40,90],causal & (sink(2) | window(5,0)))", Extent(64, 90)),
    ("per_document([0,7,40],[0,7,40],bigbird(4,3,1,2,11))", Extent(40, 40, heads=2)),
    ("per_document([0,12,33],[0,15,40],fixed(5,1) - logsparse)", Extent(33, 40, q_offset=-4)),
    ("per_document([0,3,6],[0,5,10],tree(-1,0,0)) & causal", Extent(6, 10)),
    ("per_document([0,2,4],[0,3,6],csr([0,1,3],[2,0,1],3))", Extent(4, 6)),
    ("per_document([0,5,9],[0,6,11],transpose(causal))", Extent(9, 11)),
    ("transpose(per_document([0,5,9],[0,6,11],causal))", Extent(9, 11)),
    ("per_document([0,4,6],[0,4,6],per_head([0,1],causal,full))", Extent(6, 6, heads=2)),
    ("per_document([0,6,12],[0,6,12],per_document([0,2,6],[0,3,6],causal))", Extent(12, 12)),
    ("full - per_document([0,4,9],[0,4,9],full)", Extent(9, 9)),
]

# Rows of another extent, which aligns to the end of the keys wherever the extent itself does.
ROWS = [
    ("rows([0,3],3,causal)", Extent(3, 7)),
    ("rows([4,8],8,causal)", Extent(4, 8)),
    ("rows([4,8],8,causal)", Extent(4, 8, q_offset=-9)),
    ("rows([0,3,13,16],16,causal & window(5,0))", Extent(6, 16, batch=2, heads=2)),
    ("rows([5,9,0,2,6,8],9,causal & (sink(1) | window(2,0)))", Extent(8, 12)),
    ("rows([0,32,224,256],256,causal & (sink(4) | window(60,0)))", Extent(64, 256)),
    ("rows([1,2,1,2,0,1],2,csr([0,2,3],[0,4,1],5))", Extent(3, 5)),
    ("rows([2,5],6,mask([1,0,0,1,1,0,0,1,1,0,1,1],6,2)) | sink(1)", Extent(3, 2)),
    ("rows([0,4],9,per_document([0,3,9],[0,3,9],causal))", Extent(4, 9)),
    ("per_document([0,2,4],[0,5,10],rows([3,5],5,causal))", Extent(4, 10)),
    ("rows([1,4],5,rows([0,2,7,10],10,bigbird(2,1,1,1,3)))", Extent(3, 10)),
    ("rows([0,6,8,9],9,transpose(causal & documents(0,4,9)))", Extent(7, 9)),
    ("transpose(rows([2,5,0,2],5,window(1,1)))", Extent(5, 5)),
    ("rows([3,5],6,per_head([0,1],causal,tree(-1,0,0,1,1,2)))", Extent(2, 8, heads=2)),
    ("causal - rows([0,9],20,strided(3))", Extent(9, 9)),
]

# Keys of another extent, from whose end the queries are as far as from that of the extent.
COLUMNS = [
    ("columns([4,8],8,causal)", Extent(8, 4)),
    ("columns([4,8],8,causal)", Extent(6, 4, q_offset=1)),
    ("columns([0,4,60,64],64,causal & (sink(2) | window(3,0)))", Extent(5, 8, batch=2, heads=2)),
    ("columns([5,9,0,2,6,8],9,causal & (sink(1) | window(2,0)))", Extent(12, 8)),
    ("columns([1,2,1,2,0,1],2,csr([0,2,3,3],[0,1,1],2))", Extent(3, 3)),
    ("columns([2,5],6,mask([1,0,0,1,1,0,0,1,1,0,1,1],2,6)) | sink(1)", Extent(2, 3)),
    ("columns([0,4],9,per_document([0,3,5],[0,3,9],causal))", Extent(5, 4)),
    ("columns([0,32,224,256],256,rows([224,256],256,bigbird(16,3,1,1,3)))", Extent(32, 64)),
    ("rows([0,6,8,9],9,columns([1,8],9,transpose(causal)))", Extent(7, 7)),
    ("transpose(columns([2,5,0,2],5,window(1,1)))", Extent(5, 5)),
    ("columns([3,5],6,per_head([0,1],causal,tree(-1,0,0,1,1,2)))", Extent(6, 2, heads=2)),
    ("causal - columns([0,9],20,strided(3))", Extent(9, 9)),
]


def pattern_cases():
    for text in TEXTS:
        if text:
            yield from ((text, extent) for extent in EXTENTS[:7])
    for text in NESTED:
        yield from ((text, extent) for extent in EXTENTS[:1] + EXTENTS[3:5] + EXTENTS[7:])
    yield from TREES
    yield from GRIDS
    yield from XREFS
    yield from SELECTIONS
    yield from INDEXED
    yield from DOCUMENTS
    yield from ROWS
    yield from COLUMNS


def pattern_vector(text, extent):
    mask = to_mask(text, extent)
    return {"text": text, "batch": extent.batch, "heads": extent.heads, "seq_q": extent.seq_q, "seq_k": extent.seq_k,
            "q_offset": extent.offset, "pairs": int(mask.sum()),
            "sha256": hashlib.sha256(mask.astype(np.uint8).tobytes()).hexdigest()}


# (text, batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v, scale, q_offset, gradient at lse[, options])
PROBLEMS = [
    ("full", 1, 1, 1, 1, 1, 1, 1, 1.0, None, False),
    ("full", 1, 1, 1, 4, 4, 4, 4, 0.5, None, False),
    ("causal", 1, 2, 2, 6, 6, 4, 4, 0.5, None, False),
    ("causal", 2, 2, 1, 5, 7, 3, 5, 0.75, None, True),
    ("causal", 1, 1, 1, 7, 4, 4, 4, 0.5, None, False),            # the first rows see nothing
    ("causal", 1, 1, 1, 4, 7, 4, 4, 0.5, 0, True),                # the last keys are never seen
    ("window(2,0)", 1, 4, 2, 6, 6, 2, 2, 0.5, None, False),
    ("causal & (sink(1) | window(1,0))", 1, 2, 2, 8, 8, 4, 4, 0.5, None, False),
    ("block_diagonal(3)", 1, 1, 1, 7, 7, 4, 2, 0.5, None, False),
    ("documents(0,2,5) & causal", 1, 2, 1, 6, 6, 4, 4, 0.5, None, True),
    ("dilated(4,0,2)", 1, 1, 1, 8, 8, 4, 4, 0.5, None, False),
    ("causal & (window(2,0) | strided(3))", 1, 1, 1, 8, 8, 4, 4, 0.5, None, False),
    ("causal & fixed(3,1)", 1, 1, 1, 7, 7, 4, 4, 0.5, None, False),
    ("logsparse", 1, 1, 1, 8, 8, 4, 4, 0.5, None, False),
    ("residue(3,1)", 1, 1, 1, 7, 7, 4, 4, 0.5, None, False),      # two rows in three are empty
    ("global_tokens(0,4)", 1, 2, 1, 6, 6, 4, 4, 0.5, None, False),
    ("bigbird(2,1,1,1,3)", 1, 1, 1, 8, 8, 4, 4, 0.5, None, False),
    ("tree(-1,0,0,1,1)", 1, 3, 1, 5, 9, 4, 4, 0.5, None, False),
    ("per_head([0,1,0,1],causal,window(1,1))", 1, 4, 2, 5, 5, 4, 4, 0.5, None, True),
    ("per_batch([0,1],sink(5),sink(2))", 2, 1, 1, 5, 5, 4, 4, 0.5, None, False),
    ("full - sink(3)", 1, 1, 1, 3, 3, 2, 2, 0.5, None, True),     # nothing at all
    ("causal", 1, 1, 1, 5, 5, 4, 4, 0.0, None, False),            # scale 0: plain averages
    ("full", 1, 1, 1, 3, 5, 4, 4, -2.0, None, False),
    ("window(3,3)", 1, 1, 1, 9, 9, 4, 4, 64.0, None, False),      # nearly one-hot
    ("csr([0,2,2,3,6],[0,4,1,0,2,3],5)", 1, 2, 1, 4, 5, 4, 4, 0.5, None, True),
    ("bsr([0,1,3],[1,0,2],4,2,7,5)", 2, 2, 2, 7, 5, 4, 2, 0.5, -3, False),
    ("mask([1,0,1,0,1,1,1,0,0,0,0,0,1,1,1,0,0,1],2,3,3)", 1, 2, 1, 3, 3, 4, 4, 0.5, None, True),
    ("per_document([0,3,3,8],[0,5,6,9],causal)", 1, 2, 1, 8, 9, 4, 4, 0.5, None, True),
    ("per_document([0,2,6],[0,4,8],causal & window(2,0)) | sink(1)", 1, 1, 1, 6, 8, 4, 4, 0.5, None, False),
    ("causal", 2, 2, 1, 5, 6, 4, 4, 1.0, None, True, {"softcap": 0.75}),
    ("causal", 1, 3, 1, 7, 4, 4, 4, 0.5, None, True, {"sink_logits": [0.5, -1.25, 3.0]}),
    ("window(2,1)", 2, 2, 2, 6, 6, 4, 2, 0.5, None, False, {"sink_logits": [-8.0, 1.0], "softcap": 2.0}),
    ("rows([6,8,0,3],8,causal & (sink(1) | window(3,0)))", 1, 2, 1, 5, 8, 4, 4, 0.5, None, True),
    ("columns([0,2,9,14],14,causal & (sink(1) | window(3,0)))", 1, 2, 1, 5, 7, 4, 4, 0.5, None, True),
]


def attention_vector(number, problem):
    text, batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v, scale, q_offset, with_dlse, *options = problem
    options = options[0] if options else {}
    changes = {"softcap": options.get("softcap"), "sink": options.get("sink_logits")}
    rng = np.random.default_rng(number)

    def draw(*shape):  # sixteenths: exact in float32 and in bfloat16, short in decimal
        return rng.integers(-32, 33, shape) / 16

    q, k = draw(batch, heads_q, seq_q, head_dim), draw(batch, heads_kv, seq_k, head_dim)
    v, dout = draw(batch, heads_kv, seq_k, head_dim_v), draw(batch, heads_q, seq_q, head_dim_v)
    dlse = draw(batch, heads_q, seq_q) if with_dlse else None
    extent = Extent(seq_q, seq_k, batch, heads_q, q_offset)
    mask = to_mask(text, extent)
    out, lse = attention_forward(q, k, v, mask, scale, **changes)
    dq, dk, dv, *dsink = attention_backward(q, k, v, mask, scale, dout, dlse, **changes)
    vector = {"text": text, "batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, "seq_q": seq_q, "seq_k": seq_k,
              "head_dim": head_dim, "head_dim_v": head_dim_v, "scale": scale, "q_offset": extent.offset}
    tensors = {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse, "out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv,
               "dsink_logits": dsink[0] if dsink else None}
    return vector | options | {name: flat(x) for name, x in tensors.items() if x is not None}


def flat(x):
    """Row-major numbers; -infinity, which JSON does not know, as null. Ten digits are beyond what float32 can tell."""
    return [None if np.isneginf(y) else float(f"{y:.10g}") + 0.0 for y in x.ravel()]


def lines(vectors):
    """One vector a line, so that a diff shows which ones changed."""
    return "[\n" + ",\n".join(json.dumps(v, separators=(",", ":")) for v in vectors) + "\n]\n"


def files():
    """File name -> content."""
    return {"patterns.json": lines(pattern_vector(*case) for case in pattern_cases()),
            "attention.json": lines(attention_vector(n, problem) for n, problem in enumerate(PROBLEMS))}


if __name__ == "__main__":
    for name, content in files().items():
        (HERE / name).write_text(content)
