"""The encoding of jobs, groups and results: a msgpack map, compressed as one zstd frame (docs/formats/rollouts.md).

    map = {"format": 1, "kind": NAME, "critical": [KEY, …], FIELD: VALUE, …}, keys sorted

Guarantees:

- Equal records have equal maps.
- A decoded record is as its annotations say, so nothing past ``from_bytes`` checks a type or range again.
- Claimed sizes are checked before memory is allocated.

Pure.

A reader ignores a key that it does not know, unless the sender lists the key under ``critical``: then the reader
refuses the record. A record without such keys has no ``critical``. The format number changes only if readers of the
current format would misread a record.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar, dataclass_transform, get_args, get_type_hints

import blake3
import msgpack
import numpy as np
import zstandard

from p2pcast.ground import limits
from p2pcast.ground.errors import RemoteError, UsageError
from p2pcast.wire.constraints import AtMost, InvalidError, Read, Text, constraint_of

FORMAT: Final = 1
LEVEL: Final = 1
"""Level of zstd. Higher levels hardly shrink token ids and log-probabilities."""
WINDOW_BYTES: Final = 8 * limits.MIB
"""Largest window of a frame, for which a decoder allocates memory."""
_ENVELOPE: Final = frozenset(("format", "kind", "critical"))
_read_critical: Final = constraint_of(Annotated[Sequence[Annotated[str, Text(64)]], AtMost(64)]).reader()

R = TypeVar("R", bound="RolloutRecord")


class RolloutRecord:
    """Base class of the records. Records are equal if their maps are."""

    __slots__ = ()
    kind: ClassVar[str]
    most_bytes: ClassVar[int]
    _reads: ClassVar[Mapping[str, Read]]
    _optional: ClassVar[frozenset[str]]

    def to_map(self) -> bytes:
        """Return the map in msgpack."""
        body: dict[str, Any] = {"format": FORMAT, "kind": self.kind}
        for name in self._reads:
            value = getattr(self, name)
            if value is not None or name not in self._optional:
                body[name] = value.tobytes() if isinstance(value, np.ndarray) else value
        packed: bytes = msgpack.packb(dict(sorted(body.items())))
        return packed

    def to_bytes(self) -> bytes:
        return zstandard.ZstdCompressor(level=LEVEL).compress(self.to_map())

    def digest(self) -> bytes:
        """Return 32 bytes that identify the record's contents."""
        return blake3.blake3(self.to_map()).digest()

    def check(self) -> None:
        """Raises UsageError for a record that no reader would accept."""
        try:
            packed = self.to_map()
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"{self.kind}: no record holds such values: {error}") from None
        if len(packed) > self.most_bytes:
            raise UsageError(f"{self.kind}: {len(packed)} bytes, and {self.most_bytes} are allowed")
        try:
            self.from_map(packed)
        except RemoteError as error:
            raise UsageError(str(error)) from None

    @classmethod
    def unpacked_bytes(cls, data: bytes) -> int:
        """The number of bytes that ``from_bytes`` will unpack. Raises RemoteError if no record may be that large."""
        return _unpacked_bytes(data, cls.most_bytes, cls.kind)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode a record. Raises RemoteError with an explanation."""
        return cls.from_map(_decompressed(data, cls.most_bytes, cls.kind))

    @classmethod
    def from_map(cls, data: bytes) -> Self:
        """Decode a record's map. Raises RemoteError with an explanation."""
        body = _unpacked(data, cls.kind)
        if body.get("kind") != cls.kind:
            raise RemoteError(f"not a {cls.kind}: the record says that it is another kind")
        if body.get("format") != FORMAT:
            raise RemoteError(f"{cls.kind}: its format is not {FORMAT}, the one that this release reads")
        try:
            critical = _read_critical(body.get("critical", ()))
        except InvalidError:
            raise RemoteError(f"{cls.kind}: 'critical' is malformed") from None
        if unknown := sorted(set(critical) - set(cls._reads)):
            raise RemoteError(f"{cls.kind}: this release does not know the field {unknown[0]!r}, which it must heed")
        values = {}
        for name, read in cls._reads.items():
            if name not in body:
                if name not in cls._optional:
                    raise RemoteError(f"{cls.kind}: {name!r} is missing")
                continue
            try:
                values[name] = read(body[name])
            except InvalidError:
                raise RemoteError(f"{cls.kind}: {name!r} is malformed or out of range") from None
        return cls(**values)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.to_map() == other.to_map()

    def __hash__(self) -> int:
        return hash(self.to_map())


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(kind: str, most_bytes: int) -> Callable[[type[R]], type[R]]:
    """Class decorator: makes a class of annotated fields a record whose map has at most ``most_bytes`` bytes. A field
    whose default is None may be missing.
    """

    def made(plain: type[R]) -> type[R]:
        cls = dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)(plain)
        hints = get_type_hints(cls, include_extras=True)
        own = dataclasses.fields(cls)  # type: ignore[arg-type]
        cls.kind, cls.most_bytes = kind, most_bytes
        cls._optional = frozenset(f.name for f in own if f.default is None)
        cls._reads = {f.name: constraint_of(_stated(hints[f.name], optional=f.default is None)).reader() for f in own}
        assert not _ENVELOPE & set(cls._reads)
        return cls

    return made


def _stated(hint: Any, *, optional: bool) -> Any:
    """The annotation of a value that is present: for a field that may be missing, None is not a value."""
    if not optional:
        return hint
    (inner,) = (arg for arg in get_args(hint) if arg is not types.NoneType)
    return inner


def _unpacked_bytes(data: bytes, most_bytes: int, kind: str) -> int:
    try:
        frame = zstandard.get_frame_parameters(data)
    except zstandard.ZstdError:
        raise _no_frame(kind) from None
    if not 0 < frame.content_size <= most_bytes:
        raise RemoteError(f"{kind}: larger than {most_bytes} bytes, or of unstated size")
    if frame.window_size > WINDOW_BYTES:
        raise RemoteError(f"{kind}: compressed with a window above {WINDOW_BYTES} bytes")
    return int(frame.content_size)


def _decompressed(data: bytes, most_bytes: int, kind: str) -> bytes:
    _unpacked_bytes(data, most_bytes, kind)
    try:
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError:
        raise _no_frame(kind) from None


def _no_frame(kind: str) -> RemoteError:
    return RemoteError(f"{kind}: not one whole zstd frame")


def _unpacked(data: bytes, kind: str) -> dict[Any, Any]:
    try:
        # An array is allocated with the length that it claims. A dry run detects claims without elements.
        dry = msgpack.Unpacker(max_buffer_size=len(data))
        dry.feed(data)
        dry.skip()
        body = msgpack.unpackb(data, use_list=False, max_ext_len=0, max_map_len=limits.KIB)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise RemoteError(f"{kind}: not msgpack ({type(error).__name__})") from None
    if type(body) is not dict:
        raise RemoteError(f"{kind}: not a map")
    return body
