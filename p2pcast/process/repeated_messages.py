"""Decides which log messages are shown, and which are only counted.

Guarantees, for messages from one place in the code:

- A text is shown at once. Its repetitions are counted, and shown with their count after PAUSES_S. Texts that differ
  only in numbers are the same text, unless the numbers are inside names, or are those of versions and steps.
- A text that has not occurred for FRESH_S, or whose problem is over (``ended``), is shown at once again.
- A stream of new texts, which another machine may cause, is shown up to BURST, and then one per REFILL_S. The others
  are counted.
- Each count is reported: with a later message, when its pause is over, or by ``rest`` when the process exits.
- Memory is bounded by MAX_TEXTS and MAX_PLACES; those that have been quiet for longest are dropped first.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")

PAUSES_S: Final = (10.0, 60.0, 600.0, 3600.0)
"""Seconds between two lines of the same text; the last one repeats."""
FRESH_S: Final = 600.0
"""Seconds without a text after which its next occurrence is shown at once."""
BURST: Final = 30
REFILL_S: Final = 60.0
MAX_TEXTS: Final = 512
MAX_PLACES: Final = 256
MAX_TEXT: Final = 4000
"""Number of leading characters by which texts are distinguished."""
TROUBLE_ENDED: Final = {"trouble_ended": True}
"""``extra`` for a log line saying that the problem reported by earlier lines of its module is over."""
_NUMBER: Final = re.compile(r"(?<![\w.,:/-])(?<!version )(?<!step )\d+(?:,\d+)*(?:\.\d+)?(?![\w:/-]|[.,]\w)")

Place = tuple[str, int]
"""File and line in the code."""


@dataclass(frozen=True, slots=True)
class Line(Generic[T]):
    """A message to show. ``more``: repetitions since its last line, this one included. ``others``: other messages of
    its place that were not shown. ``within_s``: seconds that these took.
    """

    item: T
    more: int = 0
    others: int = 0
    within_s: float = 0.0


@dataclass(slots=True)
class _Text(Generic[T]):
    item: T
    shown_at: float
    heard_at: float
    due_at: float
    pauses: int = 0
    more: int = 0


@dataclass(slots=True)
class _Rate(Generic[T]):
    at: float
    tokens: float = BURST
    item: T | None = None
    since: float = 0.0
    withheld: int = 0


class RepeatedMessages(Generic[T]):
    """``item``: the message as the caller shows it, such as a log record. ``now``: seconds of one clock."""

    def __init__(self) -> None:
        self._texts: OrderedDict[tuple[Place, bytes], _Text[T]] = OrderedDict()
        self._rates: OrderedDict[Place, _Rate[T]] = OrderedDict()
        self._due_at = float("inf")

    def take(self, place: Place, text: str, item: T, now: float) -> list[Line[T]]:
        """Record ``text`` from ``place`` and return the lines to show now."""
        lines = self._take(place, text, item, now)
        return [*self.overdue(now), *lines]

    def overdue(self, now: float) -> list[Line[T]]:
        """Return lines for the counts whose pause is over."""
        if now < self._due_at:
            return []
        lines = [_repeated(text) for text in self._texts.values() if text.more and text.due_at <= now]
        lines += [_withheld(rate) for rate in self._rates.values() if rate.withheld and _take_token(rate, now)]
        self._due_at = min(
            (
                *(text.due_at for text in self._texts.values() if text.more),
                *(_next_token_at(rate) for rate in self._rates.values() if rate.withheld),
            ),
            default=float("inf"),
        )
        return lines

    def ended(self, file: str) -> list[Line[T]]:
        """Return the counts of ``file``, whose problem is over. The next occurrence of each text is shown at once."""
        over = [key for key in self._texts if key[0][0] == file]
        return [_repeated(text) for text in map(self._texts.pop, over) if text.more]

    def rest(self) -> list[Line[T]]:
        """Return lines for all counts not yet reported."""
        lines = [_repeated(text) for text in self._texts.values() if text.more]
        return lines + [_withheld(rate) for rate in self._rates.values() if rate.withheld]

    def _take(self, place: Place, text: str, item: T, now: float) -> list[Line[T]]:
        key = (place, _digest(text))
        known = self._texts.get(key)
        if known is not None:
            self._texts.move_to_end(key)
            if now - known.heard_at >= FRESH_S:
                known.pauses, known.due_at = -1, now
            known.item, known.heard_at = item, now
            known.more += 1
            self._due_at = min(self._due_at, known.due_at)
            return []
        rate = self._rates.setdefault(place, _Rate(now))
        self._rates.move_to_end(place)
        lines = []
        if len(self._rates) > MAX_PLACES:
            _, gone = self._rates.popitem(last=False)
            lines += [_withheld(gone)] if gone.withheld else []
        if rate.withheld or not _take_token(rate, now):
            rate.since = rate.since if rate.withheld else now
            rate.item = item
            rate.withheld += 1
            self._due_at = min(self._due_at, _next_token_at(rate))
            return lines
        self._texts[key] = _Text(item, now, now, now + PAUSES_S[0])
        if len(self._texts) > MAX_TEXTS:
            _, left = self._texts.popitem(last=False)
            lines += [_repeated(left)] if left.more else []
        return [*lines, Line(item)]


def span(seconds: float) -> str:
    """Format a duration for people: ``40 s``, ``10 min``, ``3 h``."""
    for unit, size_s in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size_s or round(seconds) == size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{max(1.0, seconds):.0f} s"


def note(line: Line[T]) -> str:
    """Return a line's counts, as text to append to its message; empty if the message was not repeated."""
    if line.more:
        return f" ({line.more} more time{'s' if line.more > 1 else ''} in the last {span(line.within_s)})"
    if line.others:
        what = "message" if line.others == 1 else "messages"
        return f" ({line.others} other {what} of this kind in the last {span(line.within_s)} not shown)"
    return ""


def _digest(text: str) -> bytes:
    shape = _NUMBER.sub("#", text[:MAX_TEXT])
    return hashlib.blake2b(shape.encode(errors="surrogatepass"), digest_size=16).digest()


def _repeated(text: _Text[T]) -> Line[T]:
    """Return a line with a text's count, and start a new pause."""
    line = Line(text.item, more=text.more, within_s=text.heard_at - text.shown_at)
    text.shown_at, text.more = text.heard_at, 0
    text.pauses = min(text.pauses + 1, len(PAUSES_S) - 1)
    text.due_at = text.shown_at + PAUSES_S[text.pauses]
    return line


def _withheld(rate: _Rate[T]) -> Line[T]:
    assert rate.item is not None
    line = Line(rate.item, others=rate.withheld - 1, within_s=rate.at - rate.since)
    rate.item, rate.withheld = None, 0
    return line


def _take_token(rate: _Rate[T], now: float) -> bool:
    rate.tokens = min(BURST, rate.tokens + (now - rate.at) / REFILL_S)
    rate.at = now
    if rate.tokens < 1:
        return False
    rate.tokens -= 1
    return True


def _next_token_at(rate: _Rate[T]) -> float:
    return rate.at + (1 - rate.tokens) * REFILL_S
