"""Message bodies as typed records: one class per message type, and its encoding and decoding.

A class states each field once, with name, type and constraint (`p2pcast.wire.constraints`). A field with a default may
be missing on the wire and then reads as None. Unknown keys are ignored.

Promises:

- A decoded record's values conform to its annotations, so nothing after ``decode`` checks a type or range again.
- Decoding takes at most a small multiple of the received bytes as memory.
- Equal records have equal bytes.

Pure.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, dataclass_transform, get_args, get_type_hints

import msgpack

from p2pcast.ground import limits
from p2pcast.ground.errors import RemoteError
from p2pcast.wire.constraints import Constraint, InvalidError, Read, constraint_of
from p2pcast.wire.message_types import PLAIN, Type

ABSENT: Final[Any] = object()
"""Default of a field whose key may be missing and whose value may be nil: the sender leaves the key out."""


class Lenient:
    """Next to a field's constraint: the receiver drops an invalid value but keeps the message."""


class Field(NamedTuple):
    key: str
    constraint: Constraint
    required: bool
    lenient: bool


_Reads = tuple[tuple[str, Read], ...]
"""Each key with its reader."""


class Record:
    """The base class of message bodies. An instance of it is the body of a signed message, which has no fields."""

    __slots__ = ()
    type: ClassVar[Type]
    fields: ClassVar[tuple[Field, ...]] = ()
    _required: ClassVar[_Reads] = ()
    _optional: ClassVar[_Reads] = ()
    _lenient: ClassVar[_Reads] = ()
    _left_out: ClassVar[tuple[tuple[str, object], ...]] = ()
    """Fields whose keys may be missing, each with the value for which the sender leaves the key out."""
    _keys: ClassVar[tuple[str, ...]] = ()
    """Sorted, as on the wire."""
    _values: ClassVar[Any]
    """A function that takes a record and returns the values of ``_keys``."""


NO_BODY: Final = Record()
RECORDS: Final[dict[Type, type[Record]]] = {}
"""Each type's record class. Signed messages and PIECE have none."""

_UNDECODABLE: Final = "backslashreplace"
"""A path's undecodable bytes are sent as the log shows them, since peers read only UTF-8."""
_PACKER: Final = msgpack.Packer(unicode_errors=_UNDECODABLE)
"""For bodies of at most a few MiB: a packer keeps the memory of its largest message."""

R = TypeVar("R", bound=Record)


@dataclass_transform(frozen_default=True)
def message(kind: Type) -> Callable[[type[R]], type[R]]:
    """Class decorator that makes a class with annotated fields the record of ``kind``.

    Records are frozen only for the type checker: at run time, that would double the cost of creating one.
    """

    def made(plain: type[R]) -> type[R]:
        record = dataclasses.dataclass(slots=True)(plain)
        record.type = kind
        hints = get_type_hints(record, include_extras=True)
        own = dataclasses.fields(record)  # type: ignore[arg-type]
        record.fields = tuple(_field(field, hints[field.name]) for field in own)
        reads = [(f, (f.key, f.constraint.reader())) for f in record.fields]
        record._required = tuple(read for f, read in reads if f.required)
        record._optional = tuple(read for f, read in reads if not f.required and not f.lenient)
        record._lenient = tuple(read for f, read in reads if f.lenient)
        record._left_out = tuple((f.name, f.default) for f in own if f.default is not dataclasses.MISSING)
        record._keys = tuple(sorted(f.key for f in record.fields))
        record._values = staticmethod(_values_of(record._keys))
        RECORDS[kind] = record
        return record

    return made


def _field(field: dataclasses.Field[Any], hint: Any) -> Field:
    required = field.default is dataclasses.MISSING
    if field.default is None:
        # None stands for a missing key; nil is not allowed.
        (hint,) = (arg for arg in get_args(hint) if arg is not types.NoneType)
    lenient = any(isinstance(stated, Lenient) for stated in getattr(hint, "__metadata__", ()))
    return Field(field.name, constraint_of(hint), required, lenient)


def _values_of(keys: tuple[str, ...]) -> Callable[[Record], tuple[Any, ...]]:
    if len(keys) > 1:
        return attrgetter(*keys)
    only = attrgetter(*keys) if keys else None
    return (lambda record: ()) if only is None else (lambda record: (only(record),))


def encode(record: Record) -> bytes:
    """Return a message's body. Map keys are sorted, so equal messages have equal bytes. Values are not checked."""
    body = dict(zip(record._keys, record._values(record), strict=True))
    for key, left_out in record._left_out:
        if body[key] is left_out:
            del body[key]
    packed: bytes = msgpack.packb(body, unicode_errors=_UNDECODABLE) if record.type in PLAIN else _PACKER.pack(body)
    return packed


def encode_map(body: Mapping[str, Any]) -> bytes:
    """Return a body with any keys and values, as a different release or an attacker might send it."""
    packed: bytes = msgpack.packb(dict(sorted(body.items())))
    return packed


def decode(kind: Type, data: bytes | bytearray | memoryview) -> Record:
    """Decode the body of a message that is neither signed nor a PIECE. Raises RemoteError."""
    return read(kind, unpacked(kind, data))[0]


def unpacked(kind: Type, data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Return the map in such a body, unchecked; arrays become tuples. Raises RemoteError."""
    try:
        body = _unpack_flat(data) if kind in PLAIN else _unpack(data)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise RemoteError(f"{kind.name}: not msgpack ({type(error).__name__})") from None
    if type(body) is not dict:
        raise RemoteError(f"{kind.name}: body is not a map")
    return body


def read(kind: Type, body: Mapping[str, Any]) -> tuple[Record, tuple[str, ...]]:
    """Return the record of an unpacked map, and the keys of lenient fields whose values were dropped at least in part.
    Raises RemoteError unless the map has all required fields and all strict fields are valid.
    """
    cls, key = RECORDS[kind], ""
    values: dict[str, Any] = {}
    dropped = []
    try:
        for key, read_value in cls._required:
            values[key] = read_value(body[key])
        for key, read_value in cls._optional:
            if key in body:
                values[key] = read_value(body[key])
    except (InvalidError, KeyError):
        wrong = "malformed or out of range" if key in body else "missing"
        raise RemoteError(f"{kind.name}: {key!r} is {wrong}") from None
    for key, read_value in cls._lenient:
        values[key] = None
        if key in body:
            try:
                values[key] = read_value(body[key])
                whole = bool(values[key] == body[key])
            except InvalidError:
                whole = False
            if not whole:
                dropped.append(key)
    return cls(**values), tuple(sorted(dropped)) if dropped else ()


def _unpack(data: bytes | bytearray | memoryview) -> Any:
    size = len(data)
    if size > limits.KIB:
        # An array is allocated with the length that it claims, before its elements are read, and arrays nest. A dry run
        # finds false claims.
        dry = msgpack.Unpacker(max_buffer_size=size)
        dry.feed(data)
        dry.skip()
    return msgpack.unpackb(
        data,
        use_list=False,
        max_ext_len=0,
        max_str_len=64 * limits.KIB,
        max_map_len=limits.KIB,
        max_array_len=size,
    )


def _unpack_flat(data: bytes | bytearray | memoryview) -> Any:
    """Unpack a map of plain values, for bodies so long that even empty containers would add up."""
    maps = 0

    def count(found: dict[str, Any]) -> dict[str, Any]:
        nonlocal maps
        maps += 1
        if maps > 1:
            raise ValueError("a map in a map")
        return found

    return msgpack.unpackb(
        data,
        max_ext_len=0,
        max_str_len=64 * limits.KIB,
        max_map_len=limits.KIB,
        max_array_len=0,
        object_hook=count,
    )
