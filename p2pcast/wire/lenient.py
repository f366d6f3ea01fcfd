"""Lenient reading of a message: invalid optional values are dropped, the rest is kept.

A report has values that one side adds in one release and the other learns in the next. An invalid value must not end the link of the peer that sent it, and must
not reach the plan, /status or metrics either: the reader drops such a value, and every key that this release does not know. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from p2pcast import limits
from p2pcast.errors import UsageError
from p2pcast.version import Version
from p2pcast.wire.messages import SCHEMA, SINCE, Body, Check, Type, epoch, fields, flag, host, integer, one_of, optional, text

NOTHING = object()
Read = Callable[[Any], Any]
"""What is left of a value; NOTHING where nothing is. What it gives back of a value that is right equals it."""

MAX_PAUSE_S = 1e6
"""More is no pause; sums of pauses stay finite."""


def just(check: Check) -> Read:
    """All of it, or nothing."""
    return lambda x: x if check(x) else NOTHING


def cut(most: int) -> Read:
    """The beginning of a text."""
    return lambda x: x[:most] if type(x) is str else NOTHING


def table(**reads: Read) -> Read:
    """A map, with those of its keys that make sense."""

    def read(x: Any) -> Any:
        if type(x) is not dict:
            return NOTHING
        found = {key: of(x[key]) for key, of in reads.items() if key in x}
        return {key: value for key, value in found.items() if value is not NOTHING}

    return read


def needing(key: str, of: Read) -> Read:
    """A map that means nothing without this key."""
    return lambda x: NOTHING if (found := of(x)) is NOTHING or key not in found else found


def rows(of: Read, most: int) -> Read:
    """Those that make sense, of the first ``most``."""

    def read(x: Any) -> Any:
        return [found for each in x[:most] if (found := of(each)) is not NOTHING] if type(x) is list else NOTHING

    return read


def _number(most: float) -> Check:
    return lambda x: type(x) in (int, float) and math.isfinite(x) and 0 <= x <= most


def _version(x: Any) -> bool:
    """As text."""
    try:
        return type(x) is str and "." in x and bool(Version.parse(x))
    except UsageError:
        return False


def _figures(x: Any) -> Any:
    """An installer's own: names, and plain values."""
    if type(x) is not dict:
        return NOTHING
    plain = optional(lambda v: type(v) is bool or _figure(v) or text(limits.MAX_EVENT_TEXT)(v))
    return {k: v for k, v in list(x.items())[: limits.MAX_DETAILS] if text(limits.MAX_SPAN_NAME)(k) and plain(v)}


_count = integer(0, 1 << 62)
_figure = _number(2.0**62)
_optional_version = just(optional(_version))
_engine = needing(
    "name",
    table(
        name=just(lambda x: type(x) is str and 0 < len(x) <= limits.MAX_ENGINE_NAME),
        started=just(flag),
        ready=just(flag),
        staged=_optional_version,
        committed=_optional_version,
        pause_s=just(optional(_number(MAX_PAUSE_S))),
        recomputed_tokens=just(optional(_count)),
        detail=_figures,
        waits_for=just(optional(text(limits.MAX_SPAN_NAME))),
        error=lambda x: None if x is None else cut(limits.MAX_EVENT_TEXT)(x),
    ),
)

LENIENT: dict[Type, dict[str, Read]] = {
    Type.REPORT: {
        "epoch": just(epoch),
        "transfer": just(optional(fields(integer(0, limits.MAX_STATE_BYTES), integer(1, 1 << 53)))),
        "inflow": just(optional(fields(_count, integer(1, 1 << 53), _count))),
        "cores": just(integer(1, limits.MAX_CORES)),
        "http": just(fields(host, integer(1, 65535))),
        "link": lambda x: (
            None if x is None else table(dialled_by=just(one_of("child", "parent")), address=cut(limits.MAX_EVENT_TEXT))(x)
        ),
        "state": cut(limits.MAX_SPAN_NAME),
        "progress": lambda x: (
            None
            if x is None
            else needing(
                "of", needing("pieces", needing("version", table(version=just(_version), pieces=just(_count), of=just(_count))))
            )(x)
        ),
        "bytes_received": just(_count),
        "bytes_duplicate": just(_count),
        "engines": rows(_engine, limits.MAX_PEER_ENGINES),
        "error": lambda x: None if x is None else cut(limits.MAX_EVENT_TEXT)(x),
    }
}
"""Keys beside the schema's, by type."""


def prune(kind: Type, body: Body) -> tuple[str, ...]:
    """Leave only known keys and valid values in ``body``; returns the keys whose values were dropped, wholly or in part."""
    reads = LENIENT.get(kind)
    if reads is None:
        return ()
    strict = SCHEMA[kind].keys() | SINCE.get(kind, {}).keys()
    odd = []
    for key in body.keys() - strict:
        said = body.pop(key)
        read = reads.get(key)
        if read is None:
            continue
        found = read(said)
        if found is not NOTHING:
            body[key] = found
        if found is NOTHING or found != said:
            odd.append(key)
    return tuple(sorted(odd))
