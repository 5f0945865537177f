# SPDX-License-Identifier: MIT
"""Attention as products of torch, with the scores in memory: over listed keys, which are gathered first, as one writes
it without a kernel; or over all keys, for shapes that no dense kernel takes."""
import torch
from measure import peer_us

MOST_BYTES = 8 << 30  # of what a chunk of queries keeps in memory at once
KEPT = {"forward": 1, "backward": 4}  # times what a forward makes: rows and scores, for autograd, and their gradients


class Products:
    """q: [queries, heads, head_dim]; k: [keys, head_dim]; v: [keys, head_dim_v], or None where values are the first
    columns of keys; dout: [queries, heads, head_dim_v]; lists: [queries, most], or None, and then all keys are seen.
    All heads share their keys. Queries go in chunks."""

    def __init__(self, q, k, v, dout, lists=None):
        self.q, self.keys, self.dout, self.lists = q, [x for x in (k, v) if x is not None], dout, lists
        self.scale = q.shape[2]**-0.5

    def us(self, what):
        """Microseconds of a pass. The backward's are those of a step, for the chunks of which no memory could keep what
        autograd needs, less those of a forward."""
        forward = peer_us(self.forward)
        return forward if what == "forward" else peer_us(self.step) - forward

    @torch.no_grad()
    def forward(self):
        return torch.cat([self.attend(chunk, self.q[chunk], *self.keys) for chunk in self.chunks("forward")])

    def step(self):
        """dq, dk, and dv where there is a v, by a forward and a backward of each chunk."""
        leaves = [x.detach().requires_grad_() for x in self.keys]
        dq, sums = torch.empty_like(self.q), [torch.zeros_like(x, dtype=torch.float32) for x in self.keys]
        for chunk in self.chunks("backward"):
            q = self.q[chunk].detach().requires_grad_()
            out = self.attend(chunk, q, *leaves)
            dq[chunk], *gradients = torch.autograd.grad(out, [q, *leaves], self.dout[chunk])
            for total, gradient in zip(sums, gradients):
                total += gradient
        return [dq, *sums]

    def attend(self, chunk, q, *keys):
        if self.lists is not None:
            lists = self.lists[chunk]
            keys = [x.index_select(0, lists.flatten()).view(*lists.shape, -1) for x in keys]
        k, v = keys if len(keys) > 1 else (keys[0], keys[0][..., :self.dout.shape[2]])
        return torch.matmul(torch.matmul(q * self.scale, k.transpose(-1, -2)).softmax(-1), v)

    def chunks(self, what):
        """Slices of queries, all of about the same length."""
        queries, heads, _ = self.q.shape
        seen, columns = len(self.keys[0]), 0  # keys of a query; columns of what is gathered for each
        if self.lists is not None:
            seen, columns = self.lists.shape[1], sum(x.shape[1] for x in self.keys)
        scores = 2 * heads  # before and after softmax
        of_query = KEPT[what] * seen * (columns + scores) * self.q.element_size()  # bytes
        count = -(-queries * of_query // MOST_BYTES)
        length = -(-queries // count)
        return [slice(begin, begin + length) for begin in range(0, queries, length)]
