"""Chooses the pages to which a decoded token attends: the first, the last two, and those whose keys fit its query best.

Source: Sparrow, section 3.2. A page's score is the product of the mean query and the page's mean key. Query heads that
share a key head are averaged. The products of the key heads are added, because a layer's heads read one block table.
"""

from __future__ import annotations

from typing import Final

import torch

from p2pcast.ground.limits import MIB
from p2pcast.sparse.budget_schedule import LAST_PAGES

MOST_BYTES: Final = 128 * MIB
"""Limit on the sums gathered at a time. All rows have as many pages as the longest one, and the engine's own estimate
of its memory leaves no space for all of them together.
"""


class KeySums:
    """Sums of the keys in each page of one layer's cache, updated as keys are written.

    The cache itself is not read, because each kernel stores keys in its own order. A page is filled from its first
    token on, one token after the other, and restarts when it is given to a different sequence. Memory: one float32 key
    per page. ``pages``: number of cache pages; ``heads``, ``size``: shape of a key.
    """

    def __init__(self, pages: int, heads: int, size: int, page_tokens: int, device: torch.device) -> None:
        self.page_tokens = page_tokens
        # One more page, for padding.
        self._sums = torch.zeros((pages + 1, heads, size), dtype=torch.float32, device=device)

    @property
    def pages(self) -> int:
        return int(self._sums.shape[0]) - 1

    def add(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Add keys to their pages. ``keys``: shape (tokens, heads, size); ``slots``: the tokens' positions in the
        cache, shape (tokens,), negative for padding.
        """
        padding = slots < 0
        pages = torch.where(padding, self.pages, slots // self.page_tokens)
        begun = torch.where((slots % self.page_tokens == 0) & ~padding, pages, self.pages)
        self._sums.index_fill_(0, begun, 0.0)
        self._sums.index_add_(0, pages, keys.float())

    def scores(self, queries: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Score full pages, proportionally to query · mean key. ``queries``: shape (rows, query heads, size);
        ``table``: each row's pages, shape (rows, pages). Returns shape (rows, pages).
        """
        rows, heads, size = queries.shape
        there = self._sums.shape[1]
        means = queries.float().view(rows, there, heads // there, size).mean(dim=2)
        places = table.clamp(0, self.pages)
        at_once = max(1, MOST_BYTES // max(1, places.shape[1] * self._sums[0].nbytes))
        parts = zip(means.flatten(1).split(at_once), places.split(at_once), strict=True)
        # A matrix product reads the sums in place; einsum would copy them first.
        return torch.cat([(self._sums[pages].flatten(2) @ some[:, :, None]).squeeze(2) for some, pages in parts])


def choose_pages(scores: torch.Tensor, pages: torch.Tensor, kept: torch.Tensor, most: int) -> torch.Tensor:
    """Return the numbers of each row's kept pages in ascending order, then arbitrary ones; shape (rows, ``most``).
    ``scores``: shape (rows, all pages); ``pages``, ``kept``: the plan's, shape (rows,); ``most``: the largest of
    ``kept``.
    """
    numbers = torch.arange(scores.shape[1], device=scores.device)
    there = numbers < pages[:, None]
    always = there & ((numbers == 0) | (numbers >= pages[:, None] - LAST_PAGES))
    ranked = torch.nan_to_num(scores).masked_fill(always, torch.inf).masked_fill(~there, -torch.inf)
    best = ranked.topk(most, dim=1).indices
    beyond = torch.arange(most, device=scores.device) >= kept[:, None]
    ordered, _ = best.masked_fill(beyond, scores.shape[1]).sort(dim=1)
    return ordered.clamp(max=scores.shape[1] - 1)
