"""Constraints on the values of message fields: a value decoded by msgpack goes in, a typed value comes out.

A field states its constraint once, next to its type: ``port: Annotated[int, Integer(0, 65535)]``. ``constraint_of``
finds the constraint in such an annotation. Arrays arrive as tuples. Pure.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from operator import lt
from typing import Annotated, Any, Final, NoReturn, Protocol, Union, get_args, get_origin, get_type_hints

from p2pcast.ground import limits
from p2pcast.ground.addresses import is_host
from p2pcast.ground.version import Version

Read = Callable[[Any], Any]
"""Returns the typed value. Raises InvalidError."""


class InvalidError(ValueError):
    """A value breaks its constraint."""


def refuse() -> NoReturn:
    raise InvalidError


class Constraint(Protocol):
    def reader(self) -> Read: ...


@dataclass(frozen=True, slots=True)
class Integer:
    low: int
    high: int

    def reader(self) -> Read:
        low, high = self.low, self.high
        return lambda x: x if type(x) is int and low <= x <= high else refuse()


@dataclass(frozen=True, slots=True)
class Flag:
    def reader(self) -> Read:
        return lambda x: x if type(x) is bool else refuse()


@dataclass(frozen=True, slots=True)
class Binary:
    """Bytes of exactly this size."""

    size: int

    def reader(self) -> Read:
        size = self.size
        return lambda x: x if type(x) is bytes and len(x) == size else refuse()


@dataclass(frozen=True, slots=True)
class Blob:
    """At most ``most`` bytes."""

    most: int

    def reader(self) -> Read:
        most = self.most
        return lambda x: x if type(x) is bytes and len(x) <= most else refuse()


@dataclass(frozen=True, slots=True)
class Text:
    """At most ``most`` characters."""

    most: int

    def reader(self) -> Read:
        most = self.most
        return lambda x: x if type(x) is str and len(x) <= most else refuse()


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few values, all of one type."""

    values: tuple[str, ...] | tuple[int, ...]

    def reader(self) -> Read:
        values, of = self.values, type(self.values[0])
        return lambda x: x if type(x) is of and x in values else refuse()


@dataclass(frozen=True, slots=True)
class HostText:
    """A host that every event loop can dial, or an empty string."""

    def reader(self) -> Read:
        return lambda x: x if type(x) is str and is_host(x) else refuse()


@dataclass(frozen=True, slots=True)
class PieceRanges:
    """``[from, to, from, to, …]``: ascending ranges that are not empty and do not touch."""

    def reader(self) -> Read:
        return lambda x: x if _are_ranges(x) else refuse()


def _are_ranges(x: Any) -> bool:
    if type(x) is not tuple or len(x) % 2 or len(x) > limits.MAX_RANGES:
        return False
    if not x:
        return True
    return set(map(type, x)) == {int} and x[0] >= 0 and x[-1] <= limits.MAX_PIECES and all(map(lt, x, x[1:]))


@dataclass(frozen=True, slots=True)
class Nullable:
    """nil, or a value of ``of``."""

    of: Constraint

    def reader(self) -> Read:
        read = self.of.reader()
        return lambda x: None if x is None else read(x)


@dataclass(frozen=True, slots=True)
class Rows:
    """At most ``most`` values of ``of``."""

    of: Constraint
    most: int

    def reader(self) -> Read:
        read_row, most = self.of.reader(), self.most

        def read(x: Any) -> Any:
            if type(x) is not tuple or len(x) > most:
                raise InvalidError
            return tuple([read_row(each) for each in x])

        return read


@dataclass(frozen=True, slots=True)
class Columns:
    """One value for each constraint in ``of``, as a tuple of class ``into``."""

    of: tuple[Constraint, ...]
    into: type[tuple[Any, ...]] = tuple

    def reader(self) -> Read:
        reads, count, into, new = tuple(each.reader() for each in self.of), len(self.of), self.into, tuple.__new__

        def read(x: Any) -> Any:
            if type(x) is not tuple or len(x) != count:
                raise InvalidError
            return new(into, [read_one(each) for read_one, each in zip(reads, x)])  # noqa: B905 - checked above

        def read_pair(x: Any) -> Any:
            if type(x) is not tuple or len(x) != 2:
                raise InvalidError
            return new(into, (reads[0](x[0]), reads[1](x[1])))

        return read_pair if count == 2 else read


VERSION: Final = Columns((Integer(0, limits.MAX_BRANCH), Integer(0, limits.MAX_STEP)), Version)


@dataclass(frozen=True, slots=True)
class AtMost:
    """Annotates a ``Sequence[...]`` with the maximum number of its elements."""

    most: int


def constraint_of(hint: Any) -> Constraint:
    """Return the constraint that a field's annotation states. Raises TypeError if it states none."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        for stated in args[1:]:
            if isinstance(stated, AtMost):
                return Rows(constraint_of(get_args(args[0])[0]), stated.most)
            if hasattr(stated, "reader"):
                found: Constraint = stated
                return found
        return constraint_of(args[0])
    if origin in (Union, types.UnionType):
        (inner,) = (arg for arg in args if arg is not types.NoneType)
        return Nullable(constraint_of(inner))
    if origin is tuple:
        return Columns(tuple(map(constraint_of, args)))
    if hint is bool:
        return Flag()
    if hint is Version:
        return VERSION
    if isinstance(hint, type) and issubclass(hint, tuple):
        columns = get_type_hints(hint, include_extras=True).values()
        return Columns(tuple(map(constraint_of, columns)), hint)
    raise TypeError(f"{hint!r} states no constraint")
