"""Canonical msgpack: each value has exactly one encoding, so equal values have equal bytes. Pure.

Map keys are sorted strings, integers take the shortest form, bytes are ``bin``, and there are no floats or extension
types (docs/formats/delta-format.md, first paragraph).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack

from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version

_MAX_LIST = max(limits.BATCH_CELLS, limits.MAX_FILES)
_MAX_MAP = 32
U64 = (1 << 64) - 1


def pack(value: Any) -> bytes:
    """Return a value's canonical bytes. Only a top-level map is sorted, since p2pcast's formats have no nested maps."""
    if isinstance(value, dict):
        value = {key: value[key] for key in sorted(value)}
    packed: bytes = msgpack.packb(value)
    return packed


def unpack_map(body: bytes, where: str) -> dict[str, Any]:
    """Return the map in ``body``. List lengths are capped before allocation. Raises IntegrityError unless canonical."""
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


IGNORABLE = "+"
"""Prefix of fields that a reader may ignore if it does not know them. A record with any other unknown field is
rejected.
"""


class Fields:
    """Reads a map field by field. Raises IntegrityError with the name of the first invalid field.

    ``names``: the record's required fields, by format number ``v``. A record in format 1 has exactly these fields;
    later formats may add ignorable ones.
    """

    def __init__(self, where: str, body: bytes, names: Mapping[int, frozenset[str]]) -> None:
        self.where = where
        self._values = unpack_map(body, where)
        self.format = self._values.get("v")
        if type(self.format) is not int or self.format not in names:
            newest = max(names)
            newer = type(self.format) is int and self.format > newest
            why = "a newer release of p2pcast made this record; update p2pcast here" if newer else "not a format number"
            raise IntegrityError(f"{where}: v: formats up to {newest} can be read: {why}")
        unknown = self._values.keys() - names[self.format]
        if self.format > 1:
            unknown = {name for name in unknown if not (isinstance(name, str) and name.startswith(IGNORABLE))}
        if wrong := sorted(str(n)[:40] for n in unknown | (names[self.format] - self._values.keys())):
            raise IntegrityError(f"{where}: fields missing or unknown: {', '.join(wrong[:5])}")

    def invalid(self, name: str, why: str) -> IntegrityError:
        return IntegrityError(f"{self.where}: {name}: {why}")

    def integer(self, name: str, high: int = U64) -> int:
        """Return an integer from 0 to ``high``."""
        return self.checked_integer(name, self._values[name], high)

    def checked_integer(self, name: str, value: Any, high: int = U64) -> int:
        if type(value) is not int or not 0 <= value <= high:
            raise self.invalid(name, f"not an integer from 0 to {high}")
        return value

    def binary(self, name: str, size: int) -> bytes:
        """Return bytes of exactly this size."""
        return self.checked_binary(name, self._values[name], size)

    def checked_binary(self, name: str, value: Any, size: int) -> bytes:
        if type(value) is not bytes or len(value) != size:
            raise self.invalid(name, f"not {size} bytes")
        return value

    def binary_or_nil(self, name: str, size: int) -> bytes | None:
        """Return bytes of exactly this size, or None for nil."""
        return None if self._values[name] is None else self.binary(name, size)

    def text(self, name: str, most: int) -> str:
        """Return 1 to ``most`` characters of printable ASCII."""
        return self.checked_text(name, self._values[name], most)

    def checked_text(self, name: str, value: Any, most: int) -> str:
        if type(value) is not str or not 1 <= len(value) <= most or not (value.isascii() and value.isprintable()):
            raise self.invalid(name, f"not printable ASCII text of 1 to {most} characters")
        return value

    def binary_up_to(self, name: str, most: int) -> bytes | None:
        """Return at most ``most`` bytes, or None for nil."""
        value = self._values[name]
        if value is not None and (type(value) is not bytes or len(value) > most):
            raise self.invalid(name, f"neither nil nor at most {most} bytes")
        return value

    def any_binary(self, name: str) -> bytes:
        value = self._values[name]
        if type(value) is not bytes:
            raise self.invalid(name, "not bytes")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self._values[name]
        if type(value) is not str or value not in choices:
            raise self.invalid(name, f"not one of {', '.join(choices)}")
        return value

    def rows(self, name: str, columns: int, most: int) -> list[list[Any]]:
        """Return a list of at most ``most`` lists with ``columns`` values each."""
        value = self._values[name]
        if type(value) is not list or len(value) > most:
            raise self.invalid(name, f"not a list of at most {most}")
        for number, row in enumerate(value):
            if type(row) is not list or len(row) != columns:
                raise self.invalid(f"{name}[{number}]", f"not a list of {columns}")
        return value

    def version_or_nil(self, name: str) -> Version | None:
        value = self._values[name]
        if value is None:
            return None
        try:
            return Version.of(value)
        except IntegrityError as error:
            raise self.invalid(name, str(error)) from None


def take_bin(data: bytes | memoryview, at: int, cap: int, where: str) -> tuple[int, int]:
    """Return the (start, end) of the contents of the ``bin`` at offset ``at``, of at most ``cap`` bytes. Allocates
    nothing. Raises IntegrityError.
    """
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
