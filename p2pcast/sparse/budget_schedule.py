"""How many pages of the key-value cache a decoded token attends to, by its position. Pure.

Source: Sparrow, section 3.2 and its schedules: bin i of 2000 positions keeps the best ``values[i]`` pages, and always
the first page and the last two. Positions beyond the last bin keep its value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from blake3 import blake3

from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import KIB
from p2pcast.sparse.acceptance_rate import BIN_TOKENS

LAST_PAGES: Final = 2
"""Pages at the end that are always kept; their keys may not be complete yet."""
RESERVED: Final = 1 + LAST_PAGES
"""Pages that are always kept: the first one, and the last ones."""
PAGE_TOKENS: Final = 16
DENSE_LAYERS: Final = 2
"""Layers at the start whose attention is always dense (Sparrow, section 3.2)."""
MOST_BINS: Final = 512
MOST_BIN_TOKENS: Final = 1 << 20
MOST_PAGES: Final = 1 << 20
DENSE: Final = MOST_PAGES
"""The value of a bin that keeps all pages."""
FILE: Final = "sparse_attention.json"
"""Path of the schedule among a version's small files. Engines follow it once the version is committed."""
MAX_FILE_BYTES: Final = 16 * KIB


def check_schedule(files: Mapping[str, bytes]) -> None:
    """Check a version's small files. Raises UsageError for a malformed schedule, which no engine would accept."""
    if (contents := files.get(FILE)) is not None:
        BudgetSchedule.from_bytes(contents)


@dataclass(frozen=True, slots=True)
class BudgetSchedule:
    """``values``: pages of each bin, without the reserved ones; DENSE for all. ``page_tokens``: tokens per page.
    ``bin_tokens``: positions per bin. Raises UsageError.
    """

    values: tuple[int, ...]
    page_tokens: int = PAGE_TOKENS
    bin_tokens: int = BIN_TOKENS

    def __post_init__(self) -> None:
        if not 1 <= len(self.values) <= MOST_BINS:
            raise UsageError(f"a schedule has 1 to {MOST_BINS} bins, not {len(self.values)}")
        if wrong := [value for value in self.values if not 1 <= value <= MOST_PAGES]:
            raise UsageError(f"a bin keeps 1 to {MOST_PAGES} pages, not {wrong[0]}")
        if not (1 <= self.page_tokens <= self.bin_tokens <= MOST_BIN_TOKENS):
            raise UsageError(
                f"pages of {self.page_tokens} tokens do not fit bins of {self.bin_tokens}, at most {MOST_BIN_TOKENS}"
            )

    @classmethod
    def read(cls, document: Any) -> BudgetSchedule:
        """Read a document in the form of ``document``. Raises UsageError."""
        try:
            values, numbers = document["values"], (document["page_tokens"], document["bin_tokens"])
        except (KeyError, TypeError):
            raise UsageError("a schedule has values, page_tokens and bin_tokens") from None
        whole = isinstance(values, list | tuple) and all(type(one) is int for one in (*values, *numbers))
        if not whole:
            raise UsageError("values of a schedule, page_tokens and bin_tokens are whole numbers")
        return cls(tuple(values), *numbers)

    @classmethod
    def from_bytes(cls, contents: bytes) -> BudgetSchedule:
        """Read the contents of FILE. Raises UsageError."""
        try:
            if len(contents) > MAX_FILE_BYTES:
                raise ValueError(f"over {MAX_FILE_BYTES} bytes")
            document = json.loads(contents)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{FILE} is no JSON document of a schedule: {error}") from None
        return cls.read(document)

    def to_bytes(self) -> bytes:
        return json.dumps(self.document(), sort_keys=True).encode()

    def document(self) -> dict[str, Any]:
        return {"values": list(self.values), "page_tokens": self.page_tokens, "bin_tokens": self.bin_tokens}

    def value(self, number: int) -> int:
        """The value of a bin; bins beyond the last one have its value."""
        return self.values[min(number, len(self.values) - 1)]

    def pages(self, position: int) -> int:
        """Number of pages that a token at this position attends to, of those with earlier tokens and itself."""
        there = position // self.page_tokens + 1
        return min(there, self.value(position // self.bin_tokens) + RESERVED)

    def kept_pages(self, positions: np.ndarray, page_tokens: int) -> np.ndarray:
        """Like ``pages``, for a cache with a different page size: as many pages as the budget needs, and at least one
        that is chosen. The result may exceed the existing pages, and has the shape of ``positions``.
        """
        bins = np.minimum(positions // self.bin_tokens, len(self.values) - 1)
        budgets = np.array([self.budget_tokens(number) for number in range(len(self.values))], np.int64)
        return np.asarray(np.maximum(-(-budgets[bins] // page_tokens), RESERVED + 1))

    def budget_tokens(self, number: int) -> int:
        """The budget of a bin in tokens: 16 × (value + 3) for pages of 16 tokens."""
        return self.page_tokens * (self.value(number) + RESERVED)

    def with_value(self, number: int, value: int) -> BudgetSchedule:
        """Return a schedule where only this bin's value differs; later bins first get values of their own."""
        bins = max(number + 1, min(number + 2, MOST_BINS), len(self.values))
        values = [self.value(one) for one in range(bins)]
        values[number] = value
        return replace(self, values=tuple(values))

    def name(self) -> bytes:
        """The name that results use for the schedule: BLAKE3 of the contents of FILE, as ``to_bytes`` writes them."""
        return blake3(self.to_bytes()).digest()


ALL_PAGES: Final = BudgetSchedule((DENSE,))
"""Dense attention. A run's learner publishes it to replace an earlier schedule, which engines would otherwise keep."""
ALL_PAGES_NAME: Final = ALL_PAGES.name()
