# SPDX-License-Identifier: MIT
"""Patterns that choose keys by a layer's q and k, in torch, where these are."""

import torch
from patterns import SINKS, WINDOW


class BlockTopK:
    """Sinks, a window, and the blocks of keys whose summary suits the query best: NSA and MoBA take the mean of a
    block's keys (https://arxiv.org/abs/2502.11089, https://arxiv.org/abs/2502.13189), Quest bounds q k by their
    smallest and largest coordinates (https://arxiv.org/abs/2406.10774). Each head and query chooses for itself, which
    is more than those methods may afford. Keys that a block shares with sinks or window widen the window instead.
    """

    def __init__(self, budget, block, summary):
        self.budget, self.block, self.summary = budget, block, summary
        self.count = (budget - SINKS - WINDOW) // block
        self.places = budget + self.count * block  # of a list, most of those for the window empty

    def __call__(self, q, k):
        """int32 [..., tokens, heads, places]: the keys of each query and head, at most `budget`; -1 for none.

        q, k  tensors [..., tokens, heads, head_dim]
        """
        tokens = q.shape[-3]
        scores = self._scores(q.float().transpose(-3, -2), k.float().transpose(-3, -2))  # [..., heads, tokens, blocks]
        first = numbers(scores.shape[-1], q) * self.block
        row = numbers(tokens, q)[:, None]
        # A block counts where it has keys that neither sinks nor the least window show.
        useful = (first + self.block > SINKS) & (first <= row - WINDOW)
        best = scores.masked_fill(~useful, -torch.inf).topk(self.count, dim=-1)
        blocks = best.indices.int().masked_fill(best.values == -torch.inf, -1)
        return self._with_window(blocks.transpose(-3, -2))

    def _scores(self, q, k):
        *outer, tokens, dim = k.shape
        padded = torch.cat([k, k[..., -1:, :].expand(*outer, -tokens % self.block, dim)], dim=-2)
        blocks = padded.unflatten(-2, (-1, self.block))
        if self.summary == "mean":
            return q @ blocks.mean(dim=-2).transpose(-2, -1)
        largest, smallest = blocks.amax(dim=-2).transpose(-2, -1), blocks.amin(dim=-2).transpose(-2, -1)
        return q.clamp(min=0) @ largest + q.clamp(max=0) @ smallest

    def _with_window(self, blocks):
        """Keys of blocks [..., tokens, heads, count], -1 for none, with sinks, and with the widest window that leaves a
        row `budget` keys."""
        *outer, tokens, heads, _ = blocks.shape
        row = numbers(tokens, blocks)[:, None, None]
        begin, end = (blocks * self.block).clamp(min=SINKS), (blocks + 1) * self.block
        low = torch.full((*outer, tokens, heads, 1), WINDOW, dtype=torch.int32, device=blocks.device)
        high = torch.full_like(low, self.budget - SINKS)
        # A window that is a key wider leaves at most one key less outside, so that all of its keys are as many or more:
        # bisection finds the widest, in the same number of steps for all rows.
        for _ in range((self.budget - SINKS - WINDOW).bit_length()):
            width = (low + high + 1) // 2
            outside = (torch.minimum(end, row - width + 1) - begin).clamp(min=0).masked_fill(blocks < 0, 0)
            fits = width + outside.sum(dim=-1, keepdim=True, dtype=torch.int32) <= self.budget - SINKS
            low, high = torch.where(fits, width, low), torch.where(fits, high, width - 1)
        width = low
        keys = ((blocks * self.block)[..., None] + numbers(self.block, blocks)).flatten(-2)
        keys = keys.masked_fill((keys < SINKS) | (keys > row - width), -1)
        back = numbers(self.budget - SINKS, blocks)
        window = (row - back).masked_fill((back >= width) | (row - back < SINKS), -1)
        first = numbers(SINKS, blocks)
        sinks = torch.where(first <= row, first, -1).expand(*outer, tokens, heads, SINKS)
        return torch.cat([sinks, keys, window], dim=-1)


class Oracle:
    """The keys of the largest weights of dense attention: no set of as many keys keeps more mass."""

    def __init__(self, budget):
        self.places = budget

    def __call__(self, q, k):
        """As BlockTopK."""
        tokens, heads, _ = q.shape
        chosen = torch.full((tokens, heads, self.places), -1, dtype=torch.int32, device=q.device)
        ahead = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        most = min(self.places, tokens)
        for head in range(heads):
            scores = (q[:, head].float() @ k[:, head].float().T).masked_fill(ahead, -torch.inf)
            best = scores.topk(most, dim=1, sorted=False)
            chosen[:, head, :most] = best.indices.int().masked_fill(best.values == -torch.inf, -1)
        return chosen


def numbers(count, like):
    """int32 0 .. count - 1 on the device of another tensor."""
    return torch.arange(count, dtype=torch.int32, device=like.device)
