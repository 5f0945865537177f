# SPDX-License-Identifier: MIT
"""A text read by a frozen model with dense attention, and with patterns in all of its layers: in torch, on the CPU or
on a GPU.

The reference is sparseattn.quality, which reads with NumPy: test_reading.py compares them. Attention is the library's
in both. Here each query gets the list of its keys with the call, those of a pattern as those that a layer's q and k
choose: one plan serves all texts.
"""

from dataclasses import dataclass

import numpy as np
import sparseattn as sa
import sparseattn.torch as sat
import torch
from sparseattn.demo.model import rotations
from sparseattn.quality.beside import FAR
from torch.nn import functional

ROWS_AT_ONCE = 1024  # rows of logits in memory at a time, beside those of dense attention: 200 MB
FAR_SINKS, FAR_WINDOW = 32, 256  # what FAR leaves out
CHECKED_ROWS = 4  # of each layer, compared with dense masked attention in float64
# An error is divided by the largest output in those rows. Half precision rounds weights and outputs to 11 bits.
BOUNDS = {torch.float32: 1e-3, torch.float16: 5e-3}


# ---- the model ----


class Model:
    """A model of sparseattn.demo.model with its weights on a device, and q, k and v of `operands` for the attention."""

    def __init__(self, model, device="cpu", operands=None):
        if device == "cuda":
            torch.set_float32_matmul_precision("high")  # of products: on Hopper ten times faster, and 11 bits
        self.device, self.shape = torch.device(device, 0 if device == "cuda" else None), model.shape
        self.operands = operands or (torch.float16 if device == "cuda" else torch.float32)
        self.embedding, self.norm = self._move(model.embedding), self._move(model.norm)
        self.layers = [{name: self._move(array) for name, array in vars(layer).items()} for layer in model.layers]

    def _move(self, array):
        return torch.tensor(np.ascontiguousarray(array), device=self.device)

    @property
    def arithmetic(self):
        products = "TF32" if self.device.type == "cuda" else "float32"
        return f"{products}, attention in {str(self.operands).removeprefix('torch.')}"

    def hidden(self, tokens, attend):
        """float32 [tokens, width], as demo.model has it: attend(q, k, v) gets and returns [tokens, heads, head_dim]."""
        shape = self.shape
        x = self.embedding[torch.from_numpy(tokens).to(self.device)]
        rotation = self._move(rotations(len(tokens), shape.head_dim, shape.rope_base))[:, None]
        for layer in self.layers:
            qkv = (self._norm(x, layer["attention_norm"]) @ layer["qkv"]).unflatten(1, (-1, shape.head_dim))
            q, k, v = qkv.split([shape.heads_q, shape.heads_kv, shape.heads_kv], dim=1)
            q, k = (self._rotate(part, rotation).to(self.operands) for part in (q, k))
            seen = attend(q, k, v.to(self.operands).contiguous())
            x = torch.addmm(x, seen.flatten(1).float(), layer["attention_out"])
            gate, up = (self._norm(x, layer["feed_norm"]) @ layer["gate_up"]).chunk(2, dim=1)
            x = torch.addmm(x, functional.silu(gate) * up, layer["down"])
        return self._norm(x, self.norm)

    def log_p(self, hidden):
        """float32 [rows, vocabulary]: log of the probability of each next token."""
        return functional.log_softmax(hidden @ self.embedding.T, dim=1)

    def _norm(self, x, weight):
        return functional.rms_norm(x, weight.shape, weight, self.shape.norm_epsilon)

    @staticmethod
    def _rotate(x, rotation):
        pairs = torch.view_as_complex(x.unflatten(2, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * rotation).flatten(2)


# ---- attention ----


class Attention:
    """How every layer attends: to the keys of a pattern, or to those that choose(q, k) lists for each head and query.

    pattern, choose  as patterns.make returns them
    worst            the largest error of sampled rows that was met, of the largest output of a head in them
    """

    def __init__(self, pattern, choose, tokens, model):
        self._choose, self._heads, self._device = choose, model.shape.heads_kv, model.device
        self.rows = torch.linspace(0, tokens - 1, CHECKED_ROWS, dtype=torch.float64).long().to(self._device)
        self.worst = torch.zeros((), dtype=torch.float64, device=self._device)
        self.bound, self._fixed, self._fixed_far, self._fixed_rows = BOUNDS[model.operands], None, None, None
        if choose is None:
            lists = torch.from_numpy(listed(pattern, tokens)).to(self._device)
            self._fixed = lists[None, :, None].expand(1, -1, self._heads, -1).contiguous()
            self._fixed_far = only_far(self._fixed)
            keep = np.zeros((CHECKED_ROWS, 1, tokens), bool)
            row_ptr, col_idx = pattern.to_csr(tokens)
            for place, row in enumerate(self.rows.tolist()):
                keep[place, 0, col_idx[row_ptr[row] : row_ptr[row + 1]]] = True
            self._fixed_rows = torch.from_numpy(keep).to(self._device)

    def lists(self, q, k, v):
        """(k, v, lists): lists int32 [1, tokens, heads, places] belong to key heads. Where queries of one key head have
        lists of their own, each query head gets a key head."""
        if self._choose is None:
            return k, v, self._fixed
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return k, v, self._choose(q, k)[None]

    def far(self, lists):
        """Those of the lists that are far."""
        return only_far(lists) if self._fixed is None else self._fixed_far

    def check(self, q, k, v, lists, out):
        """Compares sampled rows with dense masked attention in float64."""
        tokens, heads, rows = len(q), q.shape[1], self.rows
        keep = self._fixed_rows  # [rows, heads or 1, tokens]
        if keep is None:
            keys = torch.where(lists[0, rows] < 0, tokens, lists[0, rows]).long()
            keep = torch.zeros(CHECKED_ROWS, heads, tokens + 1, dtype=torch.bool, device=self._device)
            keep = keep.scatter_(2, keys, True)[..., :-1]
        k, v = (x.double().repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1) for x in (k, v))
        s = (q[rows].double().transpose(0, 1) @ k.transpose(1, 2)) * q.shape[2] ** -0.5  # [heads, rows, tokens]
        right = s.masked_fill(~keep.transpose(0, 1), -torch.inf).softmax(dim=2) @ v
        error = (out[rows].transpose(0, 1).double() - right).abs().amax(dim=(1, 2)) / right.abs().amax(dim=(1, 2))
        # A comparison with nan is false: what is not a number must not pass.
        self.worst = torch.maximum(self.worst, error.nan_to_num(torch.inf).max())

    def require_right(self, name):
        """Raises SystemExit where a sampled row was wrong. Waits for the device."""
        worst = self.worst.item()
        if not worst <= self.bound:
            raise SystemExit(f"{name} differs from dense masked attention by {worst:.1e} of the largest output")
        return worst


def listed(pattern, tokens, most=None):
    """int32 [tokens, most]: the keys of each query, -1 behind them; most None is those of the longest row."""
    row_ptr, col_idx = pattern.to_csr(tokens)
    counts = np.diff(row_ptr)
    lists = np.full((tokens, most or counts.max()), -1, np.int32)
    lists[np.arange(lists.shape[1]) < counts[:, None]] = col_idx
    return lists


def attend_to_lists(q, k, v, lists):
    """(out [tokens, heads, head_dim], lse [heads, tokens]) of the library."""
    pattern = sa.runtime_tokens(lists.shape[3])
    out, lse = sat.attention(q[None], k[None], v[None], pattern, indices=lists, return_lse=True)
    return out[0], lse[0]


def only_far(lists):
    row = torch.arange(lists.shape[1], dtype=torch.int32, device=lists.device)[:, None, None]
    return torch.where((lists >= FAR_SINKS) & (lists <= row - FAR_WINDOW), lists, -1)


# ---- readings ----


@dataclass
class Dense:
    """A text as dense attention reads it; rows as in quality.beside.Dense."""

    tokens: np.ndarray  # int64 [tokens]
    first: int
    log_p: torch.Tensor  # float32 [rows, vocabulary]
    top: torch.Tensor  # int64 [rows]: the likeliest tokens
    nll: np.ndarray  # float32 [rows]
    right: np.ndarray  # bool [rows]
    watched: np.ndarray  # float32 [rows, watched]
    far_mass: list  # a number for each layer
    kept: dict  # name -> {"output_error": [layers], "mass": [layers], "far_mass": [layers]}


@dataclass
class Reading:
    """A text as a pattern in all layers reads it; as quality.beside.Reading."""

    nll: np.ndarray
    kl: np.ndarray
    right: np.ndarray
    same: np.ndarray
    watched: np.ndarray


@torch.inference_mode()
def read_dense(model, tokens, first, others, watched=()):
    """Reads with dense attention, and tries each of others, {name: Attention}, on the q, k and v of each layer: what
    their keys hold of the dense weight is exp(lse of them - lse of all)."""
    far = sa.parse(FAR)
    far_mass, kept = [], {name: {"output_error": [], "mass": [], "far_mass": []} for name in others}

    def attend(q, k, v):
        out, lse = (x[0] for x in sat.attention(q[None], k[None], v[None], "causal", return_lse=True))

        def share(found):
            return (found - lse)[:, first:].exp().mean(dtype=torch.float64)

        all_far = share(sat.attention(q[None], k[None], v[None], far, return_lse=True)[1][0])
        far_mass.append(all_far)
        norm = out[first:].float().norm()
        for name, other in others.items():
            their_k, their_v, lists = other.lists(q, k, v)
            their_out, their_lse = attend_to_lists(q, their_k, their_v, lists)
            _, far_lse = attend_to_lists(q, their_k, their_v, other.far(lists))
            kept[name]["output_error"].append((their_out - out)[first:].float().norm() / norm)
            kept[name]["mass"].append(share(their_lse))
            kept[name]["far_mass"].append(share(far_lse) / all_far)
        return out

    hidden = model.hidden(tokens, attend)[first:-1]
    log_p = torch.cat([model.log_p(rows) for rows in hidden.split(ROWS_AT_ONCE)])
    targets = torch.from_numpy(tokens[first + 1 :]).to(model.device)
    top = log_p.argmax(dim=1)
    return Dense(
        tokens,
        first,
        log_p,
        top,
        -log_p.gather(1, targets[:, None])[:, 0].cpu().numpy(),
        (top == targets).cpu().numpy(),
        log_p[:, list(watched)].cpu().numpy(),
        torch.stack(far_mass).tolist(),
        {name: {what: torch.stack(of).tolist() for what, of in found.items()} for name, found in kept.items()},
    )


@torch.inference_mode()
def read_beside(model, dense, other, watched=()):
    """Reads the same text with another Attention in all layers, and checks samples of each."""

    def attend(q, k, v):
        k, v, lists = other.lists(q, k, v)
        out, _ = attend_to_lists(q, k, v, lists)
        other.check(q, k, v, lists, out)
        return out

    hidden = model.hidden(dense.tokens, attend)[dense.first : -1]
    targets = torch.from_numpy(dense.tokens[dense.first + 1 :]).to(model.device)
    parts = []
    for rows, true_log_p, true_top, wanted in zip(
        *(x.split(ROWS_AT_ONCE) for x in (hidden, dense.log_p, dense.top, targets))
    ):
        log_p = model.log_p(rows)
        kl = functional.kl_div(log_p, true_log_p, reduction="none", log_target=True).sum(dim=1)
        top = log_p.argmax(dim=1)
        nll = -log_p.gather(1, wanted[:, None])[:, 0]
        parts.append((nll, kl, top == wanted, top == true_top, log_p[:, list(watched)]))
    return Reading(*(torch.cat(part).cpu().numpy() for part in zip(*parts)))
