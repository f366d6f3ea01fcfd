"""The ledger's HTTP API: a route has two records, its request and its response, in JSON or in msgpack.

Server and clients encode and decode by the same route. Promises:

- A decoded record has the types, bounds and counts that its annotations state. Counts in msgpack are checked before
  memory is allocated.
- Unknown fields are ignored in JSON, since a newer caller may send more. A request in msgpack has none: it may be
  large, and its records have formats of their own. A field with its default value is left out.
- Each fault is an error that names the field. A refusal is an error with the ledger's own text.

Ids and hashes are hexadecimal in JSON and binary in msgpack. Pure.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from p2pcast.ground.errors import P2PCastError, RefusedError, RemoteError, RetryableError, UsageError
from p2pcast.rollouts.probe_set import MAX_PROBE_TOKENS, MAX_SEQUENCES

_BINARY: Final = (bytes, bytearray, memoryview)

Role = Literal["worker", "trainer"]
MSGPACK: Final = "application/x-msgpack"
JSON: Final = "application/json"

MAX_LIST: Final = 32
"""Most leases, results or groups of one request."""
MAX_REASON_TEXT: Final = 300
"""Most characters of the ledger's reason that an error repeats."""
MAX_NAME: Final = 128
"""Most characters of a worker's or a task's name."""
MAX_DRAIN_S: Final = 86_400.0
"""Longest order to drain a worker, or to stay after the run's end, in seconds. An order may be repeated."""


class SessionLostError(RetryableError):
    """The ledger does not know the session, so the worker must register again."""


class ConflictError(RefusedError):
    """The ledger has a different body for this result, or the request is from an old session."""


class UnfitError(RemoteError):
    """The ledger cannot accept this request: it is malformed, or too large."""


class TextError(UsageError, ValueError):
    """A text in a request is not printable. Decoding adds the field."""


if TYPE_CHECKING:
    HexId: TypeAlias = bytes
    HexHash: TypeAlias = bytes
else:

    class _Sized(type):
        def __instancecheck__(cls, value):
            return type(value) is bytes and len(value) == cls.size

    class HexId(metaclass=_Sized):
        """16 bytes, in hexadecimal. For a field of type bytes, msgspec would read base64."""

        size = 16

    class HexHash(metaclass=_Sized):
        """32 bytes, in hexadecimal."""

        size = 32


BinaryId: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
VersionText: TypeAlias = Annotated[str, Meta(max_length=64)]
"""For ``Version.parse``."""
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e9)]
TokenSequences: TypeAlias = Annotated[
    Sequence[Annotated[Sequence[int], Meta(max_length=MAX_PROBE_TOKENS)]], Meta(max_length=MAX_SEQUENCES)
]
"""The sequences of a probe set."""
DrainSeconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=MAX_DRAIN_S)]


class ApiRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request or a response, or a row of one."""


class ApiRequest(ApiRecord, frozen=True, omit_defaults=True):
    """A request, or a row of one, whose texts must be printable."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, str) and not value.isprintable():
                raise TextError(f"{name} has characters that are not printable")


class PackedRequest(ApiRecord, frozen=True, forbid_unknown_fields=True):
    """A request in msgpack, which contains the bytes of records."""


class Nothing(ApiRecord, frozen=True, omit_defaults=True):
    """A request or a response without fields."""


Q = TypeVar("Q", bound=ApiRecord)
A = TypeVar("A", bound=ApiRecord)


class ApiRoute(Generic[Q, A]):
    """``POST /v1/NAME``, for callers with one role; GET if a request is ``Nothing``. ``packs``: whether the request is
    in msgpack. ``packed``: whether the response is.
    """

    def __init__(
        self, name: str, role: Role, asks: type[Q], answers: type[A], *, packs: bool = False, packed: bool = False
    ) -> None:
        self.path, self.role, self.method = f"/v1/{name}", role, "GET" if asks is Nothing else "POST"
        self.request_type, self.answer_type = (MSGPACK if one else JSON for one in (packs, packed))
        self.asks, self.answers = asks, answers
        self._request = _decoder(asks, packs=packs)
        self._answer = _decoder(answers, packs=packed)

    def request(self, asked: Q) -> bytes:
        return encoded(asked, self.request_type)

    def answer(self, found: A) -> bytes:
        return encoded(found, self.answer_type)

    def read_request(self, body: bytes) -> Q:
        """Decode a request. Raises UsageError."""
        packs = self.request_type == MSGPACK
        # The first byte of a small map. Decoding a larger map could take long, with millions of fields.
        if packs and not b"\x80" <= body[:1] < b"\x90":
            raise UsageError("the request's body is not a msgpack map of at most 15 fields")
        try:
            found: Q = self._request.decode(body)
        except msgspec.ValidationError as error:
            raise UsageError(_fault(error, "the request's body")) from None
        except (msgspec.DecodeError, ValueError, RecursionError):
            what = "msgpack" if packs else "JSON, whose numbers are finite"
            raise UsageError(f"the request's body is not {what}, or nested too deeply") from None
        return found

    def read_answer(self, content: bytes, status: int = 200) -> A:
        """Decode a response. Raises RemoteError, or the error that another status means, with the ledger's text."""
        if status != 200:
            kinds, others = _REFUSALS[self.role]
            raise kinds.get(status, others)(f"the ledger refused {self.path} with status {status}: {_reason(content)}")
        try:
            found: A = self._answer.decode(content)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise RemoteError(f"the ledger's answer to {self.path} is malformed: {_fault(error, 'the body')}") from None
        return found


_REFUSALS: Final[Mapping[Role, tuple[Mapping[int, type[P2PCastError]], type[P2PCastError]]]] = {
    "trainer": (dict.fromkeys((429, 500, 502, 503, 504), RetryableError), RefusedError),
    "worker": (
        {
            400: UnfitError,
            413: UnfitError,
            401: RefusedError,
            403: RefusedError,
            404: SessionLostError,
            409: ConflictError,
        },
        RetryableError,
    ),
}


def _reason(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"])[:MAX_REASON_TEXT]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "without a reason"


def hex_of(kind: Any, text: Any) -> bytes:
    """Parse hexadecimal text. ``kind``: HexId or HexHash. Raises ValueError."""
    try:
        found = bytes.fromhex(text)
    except (TypeError, ValueError):
        found = b""
    if len(found) != kind.size or len(text) != 2 * kind.size:
        raise ValueError(f"not {2 * kind.size} hexadecimal digits")
    return found


def encoded(record: ApiRecord, kind: str) -> bytes:
    """Encode a record. ``kind``: MSGPACK or JSON. Raises UsageError for an infinite or NaN number in JSON."""
    if kind == MSGPACK:
        return msgspec.msgpack.encode(record, enc_hook=_plain)
    plain = msgspec.to_builtins(record, builtin_types=_BINARY, enc_hook=_plain)
    try:
        return json.dumps(plain, default=lambda value: bytes(value).hex(), allow_nan=False).encode()
    except ValueError:
        raise UsageError(f"a number of this {type(record).__name__} is not finite") from None


def _plain(value: Any) -> Any:
    """Convert a number or text of a special type, such as NumPy's. Raises TypeError."""
    kinds: Sequence[tuple[type, type]] = ((int, numbers.Integral), (float, numbers.Real), (str, str))
    for kind, known in kinds:
        if isinstance(value, known):
            return kind(value)
    raise TypeError(f"{type(value).__name__} is no type of a request")


def _decoder(kind: type[Any], *, packs: bool) -> msgspec.json.Decoder[Any] | msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind) if packs else msgspec.json.Decoder(kind, dec_hook=hex_of)


def _fault(error: Exception, whole: str) -> str:
    """Describe a decoding error. ``whole``: what to call the fault if it has no field."""
    text, _, place = str(error).replace("`", "").partition(" - at ")
    said = text if text[1:2].isupper() else text[:1].lower() + text[1:]
    where = place.removeprefix("$").removeprefix(".")
    return f"field {where}: {said}" if where else f"{whole}: {said}"
