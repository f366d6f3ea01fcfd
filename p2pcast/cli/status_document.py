"""Reads a daemon's /status document for tables. The document may come from a different release, or be hostile."""

from __future__ import annotations

import math

from p2pcast.ground.plain_text import shown_text


class StatusObject:
    """A JSON object from a document. Values that are missing or of the wrong type read as empty."""

    def __init__(self, document: object) -> None:
        self._map = document if isinstance(document, dict) else {}

    def __bool__(self) -> bool:
        return bool(self._map)

    def has(self, key: str) -> bool:
        return self._map.get(key) is not None

    def text(self, key: str, otherwise: str = "") -> str:
        return shown_text(self._map[key]) if self.has(key) else otherwise

    def number(self, key: str) -> float:
        value = self._map.get(key)
        try:
            return float(value) if isinstance(value, int | float) else 0.0
        except OverflowError:
            return math.inf

    def part(self, key: str) -> StatusObject:
        return StatusObject(self._map.get(key))

    def row(self, key: str) -> list[object]:
        value = self._map.get(key)
        return value if isinstance(value, list) else []

    def rows(self, key: str) -> list[StatusObject]:
        return [StatusObject(each) for each in self.row(key)]

    def items(self) -> list[tuple[str, str]]:
        return [(shown_text(key), shown_text(value)) for key, value in self._map.items()]


def failure_lines(daemon: StatusObject) -> str:
    rows = (f"task {failure.text('task')!r} failed: {failure.text('why')}" for failure in daemon.rows("failures"))
    waits = (f"task {short.text('task')!r} waits: {short.text('why')}" for short in daemon.rows("short"))
    return "".join(
        [f"\nunhealthy, restart this daemon: {row}" for row in rows] + [f"\nunhealthy: {row}" for row in waits]
    )
