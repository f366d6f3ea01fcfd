"""A run as its hub's events tell of it: peers, their parents, and the versions of their engines. Pure.

It makes a document in the form of the hub's /status, with what events say; rates and scores are not in events.

Guarantee: memory is bounded, whatever the events are. A malformed event changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from p2pcast.ground.errors import UsageError
from p2pcast.page.gone_peers import GonePeers

PEERS_KEPT: Final = 20_000
VERSIONS_KEPT: Final = 1000
REASONS_KEPT: Final = 8
SIMULATED: Final = "simulated"
"""Kind of the first event of a simulation."""

Document = dict[str, Any]


class Recorded(NamedTuple):
    """``time_s``: Unix time. ``run``: id, as far as the line names it."""

    kind: str
    time_s: float
    facts: Document
    run: str = ""


def read_events(lines: Iterable[str]) -> Iterator[Recorded]:
    """Events from lines of JSON (``{"kind": …, "time": …, "facts": {…}}``), or from what ``GET /events`` sends. Raises
    UsageError with the number of the line.
    """
    kind: str | None = None
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.startswith("event:"):
            kind = text.removeprefix("event:").strip()
        elif text.startswith("data:") and kind is not None:
            facts = _object(text.removeprefix("data:"), number)
            if kind != "missed":
                run = facts.pop("run", None)
                at_s = _time(facts.pop("time", None), number)
                yield Recorded(kind, at_s, facts, run if isinstance(run, str) else "")
            kind = None
        elif text and not text.startswith((":", "id:", "retry:")):
            found = _object(text, number)
            facts = found.get("facts", {})
            if not isinstance(found.get("kind"), str) or not isinstance(facts, dict):
                raise UsageError(f"line {number} is no event: it needs kind, time and facts")
            yield Recorded(found["kind"], _time(found.get("time"), number), facts)


def _object(text: str, number: int) -> Document:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(f"line {number} is not JSON") from None
    if not isinstance(found, dict):
        raise UsageError(f"line {number} is not a JSON object")
    return found


def _time(value: Any, number: int) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e11:
        raise UsageError(f"line {number} has no time in Unix seconds")
    return float(value)


class RecordedRun:
    """The one writer is ``apply``. ``name``: of the run."""

    def __init__(self, name: str = "") -> None:
        self._name, self._now_s = name, 0.0
        self._gone = GonePeers()
        self._evicted: dict[str, None] = {}
        self._peers: dict[str, Document] = {}
        self._artifacts: dict[str, Document] = {}
        self._version: str | None = None

    def apply(self, kind: str, time_s: float, facts: Mapping[str, Any]) -> None:
        self._now_s = time_s
        handler = _HANDLERS.get(kind)
        if handler is not None:
            try:
                handler(self, facts)
            except (KeyError, TypeError, ValueError, OverflowError):
                return

    def status(self) -> Document:
        """Return the run in the form of the hub's /status."""
        return {
            "role": "hub",
            "run": self._name,
            "version": self._version,
            "artifacts": list(self._artifacts.values()),
            "peers": [{**peer, "engines": list(peer["engines"].values())} for peer in self._peers.values()],
            "gone": self._gone.rows(self._now_s),
            "evicted": list(self._evicted),
        }

    def _peer(self, facts: Mapping[str, Any]) -> Document:
        name = str(facts["peer"])
        if name not in self._peers and len(self._peers) >= PEERS_KEPT:
            raise ValueError
        empty: Document = {
            "name": name,
            "parent": "hub",
            "region": "",
            "staged": None,
            "committed": None,
            "engines": {},
            "error": None,
            "unready": [],
        }
        return self._peers.setdefault(name, empty)

    def _engine(self, facts: Mapping[str, Any]) -> Document:
        engines: dict[str, Document] = self._peer(facts)["engines"]
        name = str(facts["engine"])
        return engines.setdefault(
            name, {"name": name, "ready": False, "committed": None, "pause_s": None, "error": None}
        )

    def _joined(self, facts: Mapping[str, Any]) -> None:
        name, node = str(facts["peer"]), str(facts.get("node") or "")
        self._gone.joined(name, node)
        peer = self._peer(facts)
        peer.update(engines={}, error=None, unready=[])
        peer["region"], peer["staged"] = str(facts.get("region") or ""), _text(facts.get("staged"))

    def _left(self, facts: Mapping[str, Any]) -> None:
        name = str(facts["peer"])
        peer = self._peers.pop(name)
        why = str(facts.get("why") or "its connection ended") if facts["lost"] else ""
        last = {key: peer[key] for key in ("region", "staged", "committed")}
        self._gone.left(name, str(facts.get("node") or ""), why, self._now_s, last)

    def _evict(self, facts: Mapping[str, Any]) -> None:
        node = str(facts["node"])
        self._evicted.pop(node, None)
        if not facts["undone"]:
            self._evicted[node] = None
            while len(self._evicted) > PEERS_KEPT:
                del self._evicted[next(iter(self._evicted))]

    def _trouble(self, facts: Mapping[str, Any]) -> None:
        """Record a problem of a peer, or of one of its engines."""
        if facts.get("engine") is not None:
            self._engine(facts)["error"] = _text(facts["why"])
            return
        reasons = [{"level": str(one["level"]), "words": str(one["words"])} for one in facts["unready"][:REASONS_KEPT]]
        self._peer(facts).update(error=_text(facts["why"]), unready=reasons)

    def _plan(self, facts: Mapping[str, Any]) -> None:
        for name, parent in facts["moved"]:
            if name in self._peers:
                self._peers[name]["parent"] = str(parent)

    def _sealed(self, facts: Mapping[str, Any]) -> None:
        version = str(facts["version"])
        tuple(map(int, version.split(".")))
        self._version = version
        self._artifacts[version] = {"version": version, "kind": "delta", "bytes": int(facts["bytes"])}
        while len(self._artifacts) > VERSIONS_KEPT:
            del self._artifacts[next(iter(self._artifacts))]

    def _staged(self, facts: Mapping[str, Any]) -> None:
        self._peer(facts)["staged"] = str(facts["version"])

    def _committed(self, facts: Mapping[str, Any]) -> None:
        pause_s = facts.get("pause_s")
        news = {"ready": True, "committed": str(facts["version"]), "pause_s": pause_s and float(pause_s), "error": None}
        self._engine(facts).update(news)
        self._peer(facts)["committed"] = news["committed"]

    def _unready(self, facts: Mapping[str, Any]) -> None:
        self._engine(facts).update({"ready": False, "error": _text(facts.get("why"))})

    def _quarantined(self, facts: Mapping[str, Any]) -> None:
        self._peer(facts)["quarantined"] = bool(facts["quarantined"])


_HANDLERS = {
    "joined": RecordedRun._joined,
    "left": RecordedRun._left,
    "evicted": RecordedRun._evict,
    "trouble": RecordedRun._trouble,
    "plan": RecordedRun._plan,
    "sealed": RecordedRun._sealed,
    "staged": RecordedRun._staged,
    "committed": RecordedRun._committed,
    "unready": RecordedRun._unready,
    "garbled": RecordedRun._quarantined,
    "withheld": RecordedRun._quarantined,
}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
