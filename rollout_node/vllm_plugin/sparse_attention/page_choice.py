"""The pages that a decoded token attends to: the first, the last two, and those whose keys fit its query best.

Source: Sparrow, section 3.2. A page's score is the product of the mean query and the page's mean key. Query heads that
share a key head are averaged; the products of the key heads are added, since all heads of a layer read one block table.
"""

from __future__ import annotations

from typing import Final

import torch

from p2pcast.ground.limits import MIB
from p2pcast.sparse.budget_schedule import LAST_PAGES

MOST_BYTES: Final = 128 * MIB
"""Of the sums that are gathered at a time. All rows have as many pages as the longest, and the engine's own estimate of
its memory leaves no room for all of them together.
"""


class KeySums:
    """Sums of the keys in each page of one layer's cache, kept while keys are written.

    The cache itself is not read: kernels store keys in orders of their own. A page is written from its first token on,
    one token after the other, and begins anew when it is given to another sequence. Memory: one key in 32-bit floats
    for each page. ``pages``: of the cache; ``heads``, ``size``: of the keys.
    """

    def __init__(self, pages: int, heads: int, size: int, page_tokens: int, device: torch.device) -> None:
        self.page_tokens = page_tokens
        # One more for padding.
        self._sums = torch.zeros((pages + 1, heads, size), dtype=torch.float32, device=device)

    @property
    def pages(self) -> int:
        return int(self._sums.shape[0]) - 1

    def add(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """``keys``: shape (tokens, heads, size); ``slots``: places of the tokens in the cache, of shape (tokens,),
        below 0 for padding.
        """
        padding = slots < 0
        pages = torch.where(padding, self.pages, slots // self.page_tokens)
        begun = torch.where((slots % self.page_tokens == 0) & ~padding, pages, self.pages)
        self._sums.index_fill_(0, begun, 0.0)
        self._sums.index_add_(0, pages, keys.float())

    def scores(self, queries: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Of full pages, in proportion to query · mean key. ``queries``: shape (rows, query heads, size); ``table``:
        pages of each row, of shape (rows, pages). Returns shape (rows, pages).
        """
        rows, heads, size = queries.shape
        there = self._sums.shape[1]
        means = queries.float().view(rows, there, heads // there, size).mean(dim=2)
        places = table.clamp(0, self.pages)
        at_once = max(1, MOST_BYTES // max(1, places.shape[1] * self._sums[0].nbytes))
        parts = zip(means.flatten(1).split(at_once), places.split(at_once), strict=True)
        # A matrix product reads the sums where they lie; einsum would copy them first.
        return torch.cat([(self._sums[pages].flatten(2) @ some[:, :, None]).squeeze(2) for some, pages in parts])


def choose_pages(scores: torch.Tensor, pages: torch.Tensor, kept: torch.Tensor, most: int) -> torch.Tensor:
    """Numbers of the kept pages of each row, ascending, and then any; shape (rows, ``most``). ``scores``: shape (rows,
    all pages); ``pages``, ``kept``: the plan's, of shape (rows,); ``most``: the largest of ``kept``.
    """
    numbers = torch.arange(scores.shape[1], device=scores.device)
    there = numbers < pages[:, None]
    always = there & ((numbers == 0) | (numbers >= pages[:, None] - LAST_PAGES))
    ranked = torch.nan_to_num(scores).masked_fill(always, torch.inf).masked_fill(~there, -torch.inf)
    best = ranked.topk(most, dim=1).indices
    beyond = torch.arange(most, device=scores.device) >= kept[:, None]
    ordered, _ = best.masked_fill(beyond, scores.shape[1]).sort(dim=1)
    return ordered.clamp(max=scores.shape[1] - 1)
