"""Reads the fields of a request's body. Every fault is an error with the field's name. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import msgpack

from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version

ID_BYTES, HASH_BYTES = 16, 32
MAX_FIELDS, MAX_TEXT = 64, 4096
"""Most fields of a msgpack object, and characters of one text."""

T = TypeVar("T")


class Form:
    """One JSON or msgpack object. Unknown fields are ignored: a newer worker may send more."""

    def __init__(self, document: Any, path: str = "") -> None:
        """``path``: of the object in the body, for errors."""
        if not isinstance(document, dict):
            raise UsageError(f"{path or 'the body'} is not an object")
        self._document, self._path = document, path

    def _at(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _field(self, name: str, kind: type, what: str) -> Any:
        found = self._document.get(name)
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise UsageError(f"field {self._at(name)} is not {what}")
        return found

    def text(self, name: str, most: int, least: int = 0) -> str:
        found: str = self._field(name, str, "a text")
        if not least <= len(found) <= most or "\0" in found or not found.isprintable():
            raise UsageError(f"field {self._at(name)} is not a printable text of {least} to {most} characters")
        return found

    def integer(self, name: str, least: int, most: int) -> int:
        found: int = self._field(name, int, "an integer")
        if not least <= found <= most:
            raise UsageError(f"field {self._at(name)} is not from {least} to {most}")
        return found

    def number(self, name: str, least: float, most: float) -> float:
        found: Any = self._document.get(name)
        if type(found) not in (int, float) or not math.isfinite(found) or not least <= found <= most:
            raise UsageError(f"field {self._at(name)} is not a number from {least:g} to {most:g}")
        return float(found)

    def flag(self, name: str) -> bool:
        return bool(self._field(name, bool, "true or false"))

    def version(self, name: str) -> Version:
        return Version.parse(self.text(name, 64))

    def has(self, name: str) -> bool:
        return self._document.get(name) is not None

    def hexadecimal(self, name: str, size: int) -> bytes:
        return _hexadecimal(self._field(name, str, "a text"), size, self._at(name))

    def hexadecimals(self, name: str, size: int, most: int) -> list[bytes]:
        return [_hexadecimal(text, size, at) for at, text in self._rows(name, most)]

    def binary(self, name: str, size: int) -> bytes:
        found: bytes = self._field(name, bytes, "binary")
        if len(found) != size:
            raise UsageError(f"field {self._at(name)} has {len(found)} bytes instead of {size}")
        return found

    def forms(self, name: str, most: int) -> list[Form]:
        return [Form(row, at) for at, row in self._rows(name, most)]

    def form(self, name: str) -> Form:
        return Form(self._document.get(name), self._at(name))

    def lists(self, name: str, most: int) -> list[list[Any]]:
        """Lists of any elements, at most ``most``."""
        rows = list(self._rows(name, most))
        if wrong := [at for at, row in rows if not isinstance(row, list)]:
            raise UsageError(f"field {wrong[0]} is not a list")
        return [row for _, row in rows]

    def binaries(self, name: str, most: int) -> list[bytes]:
        rows = list(self._rows(name, most))
        if wrong := [at for at, row in rows if not isinstance(row, bytes)]:
            raise UsageError(f"field {wrong[0]} is not binary")
        return [row for _, row in rows]

    def _rows(self, name: str, most: int) -> Iterator[tuple[str, Any]]:
        rows: list[Any] = self._field(name, list, "a list")
        if len(rows) > most:
            raise UsageError(f"field {self._at(name)} has {len(rows)} rows, and {most} are allowed")
        return ((f"{self._at(name)}[{number}]", row) for number, row in enumerate(rows))


def packed_form(body: bytes, most_rows: int) -> Form:
    """The body of a msgpack request. ``most_rows``: of one list. Raises UsageError."""
    try:
        return Form(msgpack.unpackb(body, max_array_len=most_rows, max_map_len=MAX_FIELDS, max_str_len=MAX_TEXT))
    except (ValueError, msgpack.UnpackException, RecursionError):
        raise UsageError("the request's body is not msgpack") from None


def _hexadecimal(text: Any, size: int, at: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except (TypeError, ValueError):
        found = b""
    if len(found) != size or len(text) != 2 * size:
        raise UsageError(f"field {at} is not {2 * size} hexadecimal digits")
    return found
