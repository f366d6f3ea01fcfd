"""The ledger's summary of the rollouts, which the hub shows under ``rollouts`` in /status.

Guarantees:

- A summary is small, whatever the ledger sends: numbers, short texts, tables of numbers, and a few flat rows.
- Anything else is refused, and the newest valid summary is kept.

Nothing at the hub depends on a summary. The response to a summary carries the operator's orders about workers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from p2pcast.daemon.http_server import Document
from p2pcast.ground.errors import UsageError
from trainer_node.worker_orders import WorkerOrders

MAX_FIELDS = 64
"""Most fields of a summary, and of each table in it."""
MAX_TEXT = 200
"""Most characters of one text."""
MAX_ROWS = 32
"""Most rows of each list in a summary."""

HEARD_S = 10.0
"""How long after its newest summary a ledger counts as connected, in seconds."""


class RolloutSummary:
    """``clock``: seconds from any origin."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest: Document = {}
        self._at_s = 0.0
        self.orders = WorkerOrders(self._is_heard, clock)

    async def command(self, body: Document) -> Document:
        """POST /rollouts: store a summary, and return the orders about workers. Raises UsageError."""
        for name, value in _fields("the summary", body):
            if isinstance(value, dict):
                for inner, number in _fields(f"table {name}", value):
                    if not _is_number(number):
                        raise UsageError(f"{name}.{inner} is not a number")
            elif isinstance(value, list):
                _check_rows(name, value)
            elif not _is_plain(value):
                raise UsageError(f"field {name} is neither a number, nor a text of {MAX_TEXT} characters, nor a table")
        self._newest, self._at_s = body, self._clock()
        return {"drains": self.orders.pending()}

    def document(self) -> Document | None:
        """The newest summary, with its age in seconds, or None before the first."""
        return (self._newest and self._newest | {"age_s": round(self._clock() - self._at_s, 1)}) or None

    def _is_heard(self) -> bool:
        return bool(self._newest) and self._clock() - self._at_s < HEARD_S


def _check_rows(name: str, rows: list[Any]) -> None:
    if len(rows) > MAX_ROWS or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{name} is not a list of at most {MAX_ROWS} rows")
    for row in rows:
        if wrong := [field for field, value in _fields(f"a row of {name}", row) if not _is_plain(value)]:
            raise UsageError(f"{name}.{wrong[0]} is neither a number nor a text of {MAX_TEXT} characters")


def _is_plain(value: Any) -> bool:
    return value is None or _is_number(value) or (isinstance(value, str) and len(value) <= MAX_TEXT)


def _fields(where: str, table: dict[Any, Any]) -> list[tuple[str, Any]]:
    if len(table) > MAX_FIELDS or any(len(name) > MAX_TEXT for name in table):
        raise UsageError(f"{where} has more than {MAX_FIELDS} fields, or a name of more than {MAX_TEXT} characters")
    return list(table.items())


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and abs(value) < 1 << 63
