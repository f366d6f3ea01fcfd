"""The project's own form of a span, which does not need OpenTelemetry's packages: they are an extra."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Attribute = str | bool | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """``trace``, ``span``, ``parent``: ids as numbers; ``parent`` None for a root. ``start_s``, ``end_s``: Unix time.
    ``error``: why it failed. ``links``: traces to which this span belongs as well, each with a span of it.
    """

    name: str
    trace: int
    span: int
    parent: int | None = None
    start_s: float
    end_s: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str | None = None
    links: tuple[tuple[int, int], ...] = ()
