"""Derives the spans of a version's path from the events of one daemon. Pure.

| daemon | span | from, to |
|---|---|---|
| ledger | ``train`` | the learner takes a batch, and applies it: the step that made the version |
| hub | ``publish`` | the first piece leaves, and the version is durable |
| hub | ``deliver`` | the first piece leaves, and the peer has staged the version |
| hub | ``serve`` | the pause of an engine's switch |
| peer | ``receive`` | the version's first message, and its last piece |
| peer | ``stage`` | the last piece, and the shadow holds the version |
| peer | ``install`` | staged, and the engine serves the version |

Promise: memory is bounded, and a malformed event makes no span.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from p2pcast.process.trace_ids import span_id, version_trace
from p2pcast.telemetry.span import Attribute, TraceSpan

Role = Literal["hub", "peer", "ledger"]
BEGUN_KEPT: Final = 256
"""Versions and batches whose end is awaited."""

Facts = Mapping[str, Any]


class VersionSpans:
    """``run``: id in hex, None while it is not known; events until then make no spans. ``name``: of the daemon."""

    def __init__(self, role: Role, name: str, run: Callable[[], str | None]) -> None:
        self._role, self._name, self._run = role, name, run
        self._begun: dict[tuple[str, str], tuple[float, Facts]] = {}
        self._branch = 0
        """Of the learner."""

    def take(self, kind: str, time_s: float, facts: Facts) -> TraceSpan | None:
        """Return the span that ends with this event, if any."""
        handler = _HANDLERS.get((self._role, kind))
        if handler is None or self._run() is None:
            return None
        try:
            return handler(self, time_s, facts)
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    # -- the hub

    def _opened(self, time_s: float, facts: Facts) -> None:
        self._begin("publish", str(facts["version"]), time_s, facts)

    def _sealed(self, time_s: float, facts: Facts) -> TraceSpan:
        version = str(facts["version"])
        begun_s, _ = self._end("publish", version, time_s)
        return self._made("publish", version, begun_s, time_s, bytes=int(facts["bytes"]))

    def _aborted(self, time_s: float, facts: Facts) -> TraceSpan:
        version = str(facts["version"])
        begun_s, _ = self._end("publish", version, time_s)
        return self._made("publish", version, begun_s, time_s, error="aborted")

    def _delivered(self, time_s: float, facts: Facts) -> TraceSpan:
        peer = str(facts["peer"])
        return self._made(
            "deliver", str(facts["version"]), time_s - _s(facts["after_s"]), time_s, peer, under=("publish",)
        )

    def _served(self, time_s: float, facts: Facts) -> TraceSpan:
        where = str(facts["peer"]), str(facts["engine"])
        version, pause_s = str(facts["version"]), _s(facts["pause_s"])
        return self._made("serve", version, time_s - pause_s, time_s, *where, under=("deliver", where[0]))

    # -- a peer

    def _received(self, time_s: float, facts: Facts) -> TraceSpan:
        version, took_s = str(facts["version"]), _s(facts["took_s"])
        self._begin("stage", version, time_s, facts)
        return self._made("receive", version, time_s - took_s, time_s, self._name, under=("deliver", self._name))

    def _staged(self, time_s: float, facts: Facts) -> TraceSpan | None:
        version = str(facts["version"])
        self._begin("install", version, time_s, facts)
        if ("stage", version) not in self._begun:
            return None
        begun_s, _ = self._end("stage", version, time_s)
        return self._made("stage", version, begun_s, time_s, self._name, under=("deliver", self._name))

    def _installed(self, time_s: float, facts: Facts) -> TraceSpan:
        engine, pause_s = str(facts["engine"]), _s(facts.get("pause_s") or 0.0)
        begun_s = time_s - _s(facts.get("after_s") or 0.0)
        under = ("deliver", self._name)
        return self._made(
            "install", str(facts["version"]), begun_s, time_s, self._name, engine, under=under, pause_s=pause_s
        )

    def _install_failed(self, time_s: float, facts: Facts) -> TraceSpan:
        version, engine, why = str(facts["version"]), str(facts["engine"]), str(facts["why"])
        begun_s, _ = self._begun.get(("install", version), (time_s, facts))
        under = ("deliver", self._name)
        return self._made("install failed", version, begun_s, time_s, self._name, engine, under=under, error=why)

    def _refused(self, time_s: float, facts: Facts) -> TraceSpan:
        version, under = str(facts["version"]), ("deliver", self._name)
        return self._made("refuse", version, time_s, time_s, self._name, under=under, error=str(facts["why"]))

    # -- the ledger

    def _resumed(self, time_s: float, facts: Facts) -> None:
        self._branch = int(facts["branch"])

    def _taken(self, time_s: float, facts: Facts) -> None:
        self._begin("train", str(facts["batch"]), time_s, facts)

    def _applied(self, time_s: float, facts: Facts) -> TraceSpan:
        begun_s, taken = self._end("train", str(facts["batch"]), time_s)
        shown = {name: taken[name] for name in ("groups", "mean_reward") if isinstance(taken.get(name), int | float)}
        return self._made("train", f"{self._branch}.{int(facts['step'])}", begun_s, time_s, **shown)

    # -- all

    def _begin(self, name: str, key: str, time_s: float, facts: Facts) -> None:
        self._begun[name, key] = time_s, facts
        while len(self._begun) > BEGUN_KEPT:
            del self._begun[next(iter(self._begun))]

    def _end(self, name: str, key: str, time_s: float) -> tuple[float, Facts]:
        """Return when the span began and the facts from then; if that is unknown, the present time."""
        return self._begun.pop((name, key), (time_s, {}))

    def _made(
        self,
        name: str,
        version: str,
        start_s: float,
        end_s: float,
        *where: str,
        under: tuple[str, ...] = (),
        error: str | None = None,
        **shown: Attribute,
    ) -> TraceSpan:
        run = self._run()
        assert run is not None
        trace = version_trace(run, version)
        attributes: dict[str, Attribute] = {"p2pcast.run": run, "p2pcast.version": version}
        attributes |= dict(zip(("p2pcast.peer", "p2pcast.engine"), where, strict=False))
        return TraceSpan(
            name=name,
            trace=trace,
            span=span_id(trace, name, *where),
            parent=span_id(trace, *under) if under else None,
            start_s=start_s,
            end_s=end_s,
            attributes=attributes | {f"p2pcast.{key}": value for key, value in shown.items()},
            error=error,
        )


_HANDLERS: Final[Mapping[tuple[Role, str], Callable[[VersionSpans, float, Facts], TraceSpan | None]]] = {
    ("hub", "opened"): VersionSpans._opened,
    ("hub", "sealed"): VersionSpans._sealed,
    ("hub", "aborted"): VersionSpans._aborted,
    ("hub", "staged"): VersionSpans._delivered,
    ("hub", "committed"): VersionSpans._served,
    ("peer", "received"): VersionSpans._received,
    ("peer", "staged"): VersionSpans._staged,
    ("peer", "committed"): VersionSpans._installed,
    ("peer", "install_failed"): VersionSpans._install_failed,
    ("peer", "refused"): VersionSpans._refused,
    ("ledger", "learner_resumed"): VersionSpans._resumed,
    ("ledger", "batch_taken"): VersionSpans._taken,
    ("ledger", "batch_applied"): VersionSpans._applied,
}


def _s(value: Any) -> float:
    """Raises TypeError, ValueError."""
    found = float(value)
    if not math.isfinite(found):
        raise ValueError
    return found
