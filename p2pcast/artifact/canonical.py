"""Canonical msgpack: one way to write a value, so that equal values have equal bytes. Pure.

Maps with sorted string keys, shortest integers, ``bin`` for bytes, no floats, no extension types (docs/delta-format.md, first paragraph).
"""

from __future__ import annotations

from typing import Any

import msgpack

from p2pcast import limits
from p2pcast.errors import IntegrityError
from p2pcast.version import Version

_MAX_LIST = max(limits.BATCH_CELLS, limits.MAX_FILES)
_MAX_MAP = 32
U64 = (1 << 64) - 1


def pack(value: Any) -> bytes:
    """Canonical bytes of a value; a map is sorted at the top level, deeper ones are not used by our formats."""
    if isinstance(value, dict):
        value = {key: value[key] for key in sorted(value)}
    packed: bytes = msgpack.packb(value)
    return packed


def unpack_map(body: bytes, where: str) -> dict[str, Any]:
    """The map in ``body``, which must be canonical. Lists are capped before they are allocated. Raises IntegrityError."""
    try:
        value = msgpack.unpackb(body, max_array_len=_MAX_LIST, max_map_len=_MAX_MAP, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise IntegrityError(f"{where}: not msgpack within its limits ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise IntegrityError(f"{where}: not a map")
    try:
        same = pack(value) == body
    except (ValueError, TypeError, OverflowError, RecursionError):
        same = False
    if not same:
        raise IntegrityError(f"{where}: not in canonical form")
    return value


class Fields:
    """Reads a map field by field; the first wrong one raises IntegrityError with its name."""

    def __init__(self, where: str, body: bytes, names: frozenset[str]) -> None:
        self.where = where
        self._values = unpack_map(body, where)
        if self._values.keys() != names:
            wrong = sorted(str(n)[:40] for n in self._values.keys() ^ names)
            raise IntegrityError(f"{where}: fields missing or unknown: {', '.join(wrong[:5])}")
        if self._values["v"] != 1 or type(self._values["v"]) is not int:
            raise IntegrityError(f"{where}: v: only version 1 can be read")

    def bad(self, name: str, why: str) -> IntegrityError:
        return IntegrityError(f"{self.where}: {name}: {why}")

    def integer(self, name: str, high: int = U64) -> int:
        """An integer from 0 to ``high``."""
        return self.checked_integer(name, self._values[name], high)

    def checked_integer(self, name: str, value: Any, high: int = U64) -> int:
        if type(value) is not int or not 0 <= value <= high:
            raise self.bad(name, f"not an integer from 0 to {high}")
        return value

    def binary(self, name: str, size: int) -> bytes:
        """Exactly ``size`` bytes."""
        return self.checked_binary(name, self._values[name], size)

    def checked_binary(self, name: str, value: Any, size: int) -> bytes:
        if type(value) is not bytes or len(value) != size:
            raise self.bad(name, f"not {size} bytes")
        return value

    def any_binary(self, name: str) -> bytes:
        value = self._values[name]
        if type(value) is not bytes:
            raise self.bad(name, "not bytes")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self._values[name]
        if type(value) is not str or value not in choices:
            raise self.bad(name, f"not one of {', '.join(choices)}")
        return value

    def rows(self, name: str, columns: int, most: int) -> list[list[Any]]:
        """A list of at most ``most`` lists of ``columns`` values each."""
        value = self._values[name]
        if type(value) is not list or len(value) > most:
            raise self.bad(name, f"not a list of at most {most}")
        for number, row in enumerate(value):
            if type(row) is not list or len(row) != columns:
                raise self.bad(f"{name}[{number}]", f"not a list of {columns}")
        return value

    def version_or_nil(self, name: str) -> Version | None:
        value = self._values[name]
        if value is None:
            return None
        try:
            return Version.of(value)
        except IntegrityError as error:
            raise self.bad(name, str(error)) from None


def take_bin(data: bytes | memoryview, at: int, cap: int, where: str) -> tuple[int, int]:
    """A ``bin`` of at most ``cap`` bytes that starts at ``at``: (start, end) of its contents. Allocates nothing. Raises IntegrityError."""
    head = bytes(data[at : at + 5])
    kinds = {0xC4: (1, 0), 0xC5: (2, 1 << 8), 0xC6: (4, 1 << 16)}
    width, least = kinds.get(head[0] if head else 0, (0, 0))
    if not width or len(head) < 1 + width:
        raise IntegrityError(f"{where}: bytes expected at offset {at}")
    size = int.from_bytes(head[1 : 1 + width], "big")
    if size < least:
        raise IntegrityError(f"{where}: not in canonical form at offset {at}")
    if size > cap:
        raise IntegrityError(f"{where}: {size} bytes at offset {at}, over the limit of {cap}")
    start = at + 1 + width
    if start + size > len(data):
        raise IntegrityError(f"{where}: ends in the middle of {size} bytes at offset {at}")
    return start, start + size
