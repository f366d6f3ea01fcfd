"""TOML tables, read key by key. An unknown, missing or mistyped key is one UsageError that names the key. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_args, get_type_hints

from p2pcast.ground.errors import UsageError
from p2pcast.process.daemon_process import parse_rate

T = TypeVar("T")

KINDS = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}


class Table:
    """``place``: the name of the table in errors, such as ``hosts.peer``; empty for the whole document. Call ``close``
    after the last key.
    """

    def __init__(self, content: object, place: str = "") -> None:
        if not isinstance(content, Mapping):
            raise UsageError(f"{place} must be a table")
        self._left = dict(content)
        self._place = place

    def called(self, key: str) -> str:
        return f"{self._place}.{key}" if self._place else key

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def peek(self, key: str) -> Any:
        return self._left.get(key)

    def raw(self, key: str) -> Any:
        """The raw value; None if the key is absent."""
        return self._left.pop(key, None)

    def optional(self, key: str, kind: type[T]) -> T | None:
        """None if the key is absent."""
        return kind_of(self._left.pop(key), kind, self.called(key)) if key in self._left else None

    def required(self, key: str, kind: type[T]) -> T:
        value = self.optional(key, kind)
        if value is None:
            raise UsageError(f"{self.called(key)} is missing: it must be {KINDS[kind]}")
        return value

    def with_default(self, key: str, kind: type[T], default: T) -> T:
        value = self.optional(key, kind)
        return default if value is None else value

    def text(self, key: str) -> str:
        """A string that is not empty."""
        if not (value := self.required(key, str).strip()):
            raise UsageError(f"{self.called(key)} is empty")
        return value

    def choice(self, key: str, known: Sequence[str], default: str) -> str:
        if (value := self.with_default(key, str, default)) not in known:
            raise UsageError(f"{self.called(key)} is {value!r}: it must be one of {', '.join(known)}")
        return value

    def share(self, key: str) -> float:
        """From 0 to 1; 0 if the key is absent."""
        if not 0 <= (value := self.with_default(key, float, 0.0)) <= 1:
            raise UsageError(f"{self.called(key)} is {value:g}: it must be a share from 0 to 1")
        return value

    def rate(self, key: str) -> float | None:
        """In bits per second, from text such as ``300mbit``."""
        if (text := self.optional(key, str)) is None:
            return None
        try:
            return parse_rate(text)
        except UsageError as error:
            raise UsageError(f"{self.called(key)}: {error}") from None

    def texts(self, key: str) -> tuple[str, ...]:
        """A string or a list of strings."""
        found = self.raw(key)
        listed = [] if found is None else found if isinstance(found, list) else [found]
        return tuple(kind_of(each, str, self.called(key)) for each in listed)

    def tables(self, key: str) -> list[Table]:
        found = self.with_default(key, list, [])
        return [Table(each, f"{self.called(key)}[{at}]") for at, each in enumerate(found, 1)]

    def table(self, key: str) -> Table:
        return Table(self.with_default(key, dict, {}), self.called(key))

    def close(self) -> None:
        """Raises UsageError for keys that have not been read."""
        if self._left:
            raise UsageError(f"unknown key: {' or '.join(self.called(str(key)) for key in self._left)}")


def kind_of(value: object, kind: type[T], called: str) -> T:
    """The value, if it has that type; a whole number is also a number."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UsageError(f"{called} must be {KINDS[kind]}, not {value!r}")
    return value


def filled(form: type[T], content: Mapping[str, Any], place: str) -> T:
    """A dataclass of plain fields (str, int, float, bool, tuples of one of these), read by field names. Raises
    UsageError that names the key.
    """
    table = Table(content, place)
    hints = get_type_hints(form)
    values: dict[str, Any] = {}
    for field in fields(form):  # type: ignore[arg-type]
        if field.name not in table:
            if field.default is MISSING and field.default_factory is MISSING:
                raise UsageError(f"{table.called(field.name)} is missing")
            continue
        kind, given, called = hints[field.name], table.raw(field.name), table.called(field.name)
        if inner := [each for each in get_args(kind) if each not in (Ellipsis, type(None))]:
            listed = given if isinstance(given, list | tuple) else [given]
            values[field.name] = tuple(kind_of(each, inner[0], called) for each in listed)
        else:
            values[field.name] = kind_of(given, kind, called)
    table.close()
    return form(**values)


def bounded(given: object, **limits: tuple[float, float]) -> None:
    """Checks that each named field of ``given``, or each value in its list, lies within its bounds. Raises UsageError
    that names the key.
    """
    for key, (least, most) in limits.items():
        listed = getattr(given, key)
        for value in listed if isinstance(listed, tuple) else (listed,):
            if not least <= value <= most:
                raise UsageError(f"parameters.{key} is {value:g}: it must be from {least:g} to {most:g}")


def not_empty(given: object, *keys: str) -> None:
    """Checks that each named list has a value. Raises UsageError that names the key."""
    for key in keys:
        if not getattr(given, key):
            raise UsageError(f"parameters.{key} is empty: at least one value is needed")


def rates_of(texts: Sequence[str], key: str) -> list[float]:
    """In bits per second. Raises UsageError that names the key."""
    try:
        return [parse_rate(text) for text in texts]
    except UsageError as error:
        raise UsageError(f"parameters.{key}: {error}") from None
