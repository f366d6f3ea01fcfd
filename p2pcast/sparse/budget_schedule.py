"""How many pages of the key-value cache a decoded token attends to, by its position. Pure.

Source: Sparrow, section 3.2 and its schedules: bin i of 2000 positions keeps the best ``values[i]`` pages, and always
the first page and the last two. Positions beyond the last bin keep its value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from p2pcast.errors import UsageError
from p2pcast.sparse.acceptance_rate import BIN_TOKENS

RESERVED: Final = 3
"""Pages that are always kept: the first one, and the last two."""
PAGE_TOKENS: Final = 16
MOST_BINS: Final = 512
MOST_PAGES: Final = 1 << 20
DENSE: Final = MOST_PAGES
"""The value of a bin that keeps all pages."""


@dataclass(frozen=True, slots=True)
class BudgetSchedule:
    """``values``: pages of each bin, besides the reserved ones; DENSE: all. ``page_tokens``: tokens of a page;
    ``bin_tokens``: positions of a bin. Raises UsageError.
    """

    values: tuple[int, ...]
    page_tokens: int = PAGE_TOKENS
    bin_tokens: int = BIN_TOKENS

    def __post_init__(self) -> None:
        if not 1 <= len(self.values) <= MOST_BINS:
            raise UsageError(f"a schedule has 1 to {MOST_BINS} bins, not {len(self.values)}")
        if wrong := [value for value in self.values if not 1 <= value <= MOST_PAGES]:
            raise UsageError(f"a bin keeps 1 to {MOST_PAGES} pages, not {wrong[0]}")
        if not (1 <= self.page_tokens <= self.bin_tokens):
            raise UsageError(f"pages of {self.page_tokens} tokens do not fit bins of {self.bin_tokens}")

    @classmethod
    def read(cls, document: Any) -> BudgetSchedule:
        """From a document of ``document``'s form. Raises UsageError."""
        try:
            values, numbers = document["values"], (document["page_tokens"], document["bin_tokens"])
        except (KeyError, TypeError):
            raise UsageError("a schedule has values, page_tokens and bin_tokens") from None
        whole = isinstance(values, list | tuple) and all(type(one) is int for one in (*values, *numbers))
        if not whole:
            raise UsageError("values of a schedule, page_tokens and bin_tokens are whole numbers")
        return cls(tuple(values), *numbers)

    def document(self) -> dict[str, Any]:
        return {"values": list(self.values), "page_tokens": self.page_tokens, "bin_tokens": self.bin_tokens}

    def bin_of(self, position: int) -> int:
        """The bin whose value counts at this position."""
        return min(position // self.bin_tokens, len(self.values) - 1)

    def pages(self, position: int) -> int:
        """Pages that a token at this position attends to, of those that hold earlier tokens and itself."""
        there = position // self.page_tokens + 1
        return min(there, self.values[self.bin_of(position)] + RESERVED)

    def is_exact(self, position: int) -> bool:
        """Whether all pages are kept: attention is dense."""
        return self.pages(position) == position // self.page_tokens + 1

    def budget_tokens(self, number: int) -> int:
        """Of a bin: 16 × (value + 3) for pages of 16 tokens."""
        return self.page_tokens * (self.values[number] + RESERVED)

    def with_value(self, number: int, value: int) -> BudgetSchedule:
        """With another value of one bin."""
        return replace(self, values=(*self.values[:number], value, *self.values[number + 1 :]))
