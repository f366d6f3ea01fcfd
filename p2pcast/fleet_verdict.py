"""Decides the verdict on each engine, each peer and the run, and words it. Pure.

/status, the page, a replay, /readyz and metrics show these verdicts and decide nothing themselves.

Guarantees: an engine or a peer that is not ready is never ``good``. Any error that a peer reports about itself or an
engine appears in all of these places. The verdict on a peer or a run has the level of its worst part.

| level | meaning |
|---|---|
| ``good`` | at the newest version |
| ``moving`` | on its way there |
| ``watch`` | a problem that may resolve itself |
| ``alarm`` | an operator has to act |
| ``gone`` | left the run, or was evicted |
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version

LATE_VERSIONS: Final = 2
"""An engine that is more versions behind is late. One version is always on its way."""
SILENT_S: Final = 30.0
"""A ledger that has reported nothing to the hub for this long is silent."""
TEXT_SHOWN: Final = 600
"""Maximum length in characters of a verdict or an alarm."""
NAMED: Final = 3
"""Maximum number of peers named in one message."""

Level = Literal["good", "gone", "moving", "watch", "alarm"]
RANK: Final[Mapping[str, int]] = {"good": 0, "gone": 0, "moving": 1, "watch": 2, "alarm": 3}
"""The severity of each level; metrics export these numbers."""
Document = dict[str, Any]

NO_VERSION: Final = "no version has been published yet"
UNVERIFIED: Final = "no verified weights yet"
_WAITS: Final = {
    "turn": "waits for its turn",
    "commit": "waits for the commit",
    "before_commit": "deferred by the callback",
}


@dataclass(frozen=True, slots=True)
class FleetFinding:
    """One finding. A run's alarms group peers by ``mark``. ``unready``: the peer or engine cannot take requests."""

    level: Level
    mark: str
    words: str
    unready: bool = False


def known_versions(status: Mapping[str, Any]) -> list[Version]:
    """Return the versions listed in a hub's /status, oldest first."""
    texts = [artifact.get("version") for artifact in status.get("artifacts") or ()]
    return sorted({found for text in (*texts, status.get("version")) if (found := _version(text)) is not None})


def behind(version: Any, known: Sequence[Version]) -> int | None:
    """Return how many known versions are newer; None if ``version`` is newer than all of them, or is no version."""
    found = _version(version)
    if found is None or (known and found > known[-1]):
        return None
    return len(known) - bisect_right(known, found)


def engine_findings(engine: Mapping[str, Any], known: Sequence[Version]) -> list[FleetFinding]:
    """Return the findings for ``engine``, a row of /status; there is always at least one."""
    ready, at, error, waits = (engine.get(key) for key in ("ready", "committed", "error", "waits_for"))
    serves, wait = f"serves {at}", f"; {_WAITS[waits]}" if isinstance(waits, str) and waits in _WAITS else ""
    late = behind(at, known)
    if error and not ready:
        # An engine that only waits, for instance for its turn after a barrier, has not failed.
        return [
            FleetFinding("watch" if wait else "alarm", "unready" if wait else "failed", f"{error}{wait}", unready=True)
        ]
    if not ready:
        words = UNVERIFIED if at is None else f"not fit for requests, with {at}"
        return [FleetFinding("watch", "unready", words + wait, unready=True)]
    if error:
        return [FleetFinding("alarm", "failed", f"{serves}; {error}")]
    if at is None:
        return [FleetFinding("watch", "unknown", f"serves an unknown version{wait}")]
    if known and late is None:
        return [FleetFinding("watch", "unknown", f"{serves}, which the hub does not know")]
    return [_at_version(serves, late or 0, known, wait)]


def _at_version(has: str, late: int, known: Sequence[Version], wait: str = "") -> FleetFinding:
    if not late:
        return FleetFinding("good", "current", f"{has}, the newest version" if known else has)
    words = f"{has}, {late} version{'s' if late > 1 else ''} behind {known[-1]}{wait}"
    return FleetFinding("watch", "late", words) if late > LATE_VERSIONS else FleetFinding("moving", "moving", words)


def peer_findings(peer: Mapping[str, Any], known: Sequence[Version]) -> list[FleetFinding]:
    """Return the findings for ``peer``, a row of /status, worst first; there is always at least one. They include the
    peer's own reasons from its ``unready`` list, each with ``level`` and ``words``.
    """
    engines, staged = peer.get("engines") or (), peer.get("staged")
    found = [_reason(one) for one in peer.get("unready") or ()]
    if peer.get("state") == "draining":
        found.append(FleetFinding("moving", "leaving", "it is ending", unready=True))
    if error := peer.get("error"):
        found.append(FleetFinding("alarm", "trouble", str(error)))
    if peer.get("quarantined"):
        found.append(FleetFinding("alarm", "quarantined", "other peers blame it: data was wrong or withheld"))
    if staged is None:
        found.append(FleetFinding("moving", "empty", "no version is staged", unready=True))
    elif not engines:
        found.append(_at_version(f"has {staged}", behind(staged, known) or 0, known))
    if peer.get("reachable") is False:
        found.append(FleetFinding("watch", "unreachable", "no other peer reaches it, so it only receives"))
    if peer.get("detached"):
        found.append(FleetFinding("watch", "detached", "too slow to wait for"))
    for engine in engines:
        for one in engine_findings(engine, known):
            words = one.words if one.level == "good" else f"{engine.get('name')}: {one.words}"
            found.append(FleetFinding(one.level, one.mark, words, one.unready))
    return sorted(found, key=lambda one: -RANK[one.level])


def _reason(stated: Mapping[str, Any]) -> FleetFinding:
    level: Level = "alarm"
    for milder in ("moving", "watch"):
        level = milder if stated["level"] == milder else level
    return FleetFinding(level, "trouble" if level == "alarm" else "unready", str(stated["words"]), unready=True)


def gone_finding(peer: Mapping[str, Any], evicted: Container[str]) -> FleetFinding:
    """Return the finding for ``peer``, a row of ``gone`` in /status. ``evicted``: ids of the evicted nodes."""
    at, why = datetime.fromtimestamp(peer["at"], UTC), peer.get("why")
    when = f"{at:%Y-%m-%d %H:%M:%S} UTC"
    if str(peer.get("node")) in evicted:
        return FleetFinding("gone", "evicted", f"evicted; gone since {when}")
    if not peer.get("lost"):
        return FleetFinding("gone", "left", f"left at {when}")
    return FleetFinding("watch", "lost", f"lost since {when}{f': {why}' if why else ''}")


def unready(findings: Iterable[FleetFinding]) -> str:
    """Return why /readyz answers 503; empty if the peer is ready."""
    return "; ".join(one.words for one in findings if one.unready)


def troubles(findings: Iterable[FleetFinding]) -> str:
    return "; ".join(one.words for one in findings if one.level in ("watch", "alarm"))


def document(findings: Sequence[FleetFinding]) -> Document:
    """Return ``level``, ``words`` and ``marks`` of all problems, worst first, or of the good ones if all is well."""
    worst = max((one.level for one in findings), key=RANK.__getitem__)
    shown = [one for one in findings if RANK[one.level] or not RANK[worst]]
    marks = list(dict.fromkeys(one.mark for one in shown if RANK[one.level]))
    words = "; ".join(dict.fromkeys(one.words for one in shown))
    return {"level": worst, "words": words[:TEXT_SHOWN], "marks": marks}


def judge(status: Mapping[str, Any]) -> Document:
    """Return a hub's /status with a ``verdict`` added for the run, each peer, each engine and each departed peer.
    ``unready`` in ``status`` lists the hub's own problems, in the same form as a peer's.
    """
    known, evicted = known_versions(status), set(status.get("evicted") or ())
    found: dict[str, list[FleetFinding]] = {}
    peers, gone = [], []
    for row in status.get("peers") or ():
        findings = found[str(row["name"])] = peer_findings(row, known)
        engines = [dict(e) | {"verdict": document(engine_findings(e, known))} for e in row.get("engines") or ()]
        peers.append({**row, "engines": engines, "verdict": document(findings)})
    joined = list(found)
    for row in status.get("gone") or ():
        finding = gone_finding(row, evicted)
        found.setdefault(str(row["name"]), [finding])
        gone.append({**row, "verdict": document([finding])})
    return {**status, "peers": peers, "gone": gone, "verdict": _of_run(status, peers, found, joined)}


def _of_run(
    status: Mapping[str, Any], peers: Sequence[Document], found: Mapping[str, list[FleetFinding]], joined: Sequence[str]
) -> Document:
    alarms = sorted([*_of_hub(status), *_of_peers(found, joined), *_of_rollouts(status)], key=lambda one: one["level"])
    newest = status.get("version")
    late = {str(row["name"]): sum(not _current(e, newest) for e in row["engines"]) for row in peers}
    total, others = sum(len(row["engines"]) for row in peers), sum(late.values())
    levels = [alarm["level"] for alarm in alarms]
    levels += [document(one)["level"] for name, one in found.items() if name in late]
    return {
        "level": max(levels, key=RANK.__getitem__, default="good"),
        "words": _headline(newest, peers, found, alarms, [name for name, n in late.items() if n], others, total),
        "alarms": alarms,
        "current": total - others,
        "engines": total,
        "peers": len(peers),
    }


def _current(engine: Mapping[str, Any], newest: Any) -> bool:
    return bool(engine["verdict"]["level"] == "good" and engine.get("committed") == newest)


def _headline(
    newest: Any, peers: Sequence[Document], found: Mapping[str, list[FleetFinding]], alarms: Sequence[Document],
    late: Sequence[str], others: int, total: int,
) -> str:  # fmt: skip
    """Return the run's headline. Problems come first, and only problems are counted."""
    of = {level: [row["name"] for row in peers if row["verdict"]["level"] == level] for level in ("alarm", "watch")}
    lost = [name for name, (first, *_) in found.items() if first.mark == "lost"]
    said = (
        [] if not of["alarm"] else [f"{_share(of['alarm'], peers, 'is', 'are')} in trouble: {names_of(of['alarm'])}."]
    )
    if of["watch"]:
        said.append(f"{_share(of['watch'], peers, 'needs', 'need')} a look: {names_of(of['watch'])}.")
    said += [f"Lost: {names_of(lost)}."] if lost else []
    if not said:
        said += [alarm["text"] for alarm in alarms[:1] if newest is not None and peers]
    if others:
        verb = "does" if others == 1 else "do"
        said.append(f"{others} of {total} engines {verb} not serve {newest}, the newest version, at {names_of(late)}.")
    elif total:
        whole = "The engine serves" if total == 1 else f"All {total} engines serve"
        joined = f"{'The' if total == 1 else 'Each'} joined engine serves"
        said.append(f"{joined if said else whole} {newest}, the newest version.")
    elif newest is not None and any(row.get("staged") for row in peers):
        here = sum(row.get("staged") == newest for row in peers)
        whole = "Each peer has" if here == len(peers) else f"{here} of {len(peers)} peers have"
        said.append(f"{whole} {newest}, the newest version; no engine serves it yet.")
    else:
        said.append(f"No engine serves {newest or 'a version'} yet.")
    return " ".join(said)


def _share(some: Sequence[str], peers: Sequence[Document], one: str, more: str) -> str:
    return f"{len(some)} of {len(peers)} peers {one if len(some) == 1 else more}"


def _alarm(level: Level, text: str, do: str) -> Document:
    """Return an alarm as a document. ``do``: the remedy."""
    return {"level": level, "text": text[:TEXT_SHOWN], "do": do}


def _of_hub(status: Mapping[str, Any]) -> Iterator[Document]:
    for failure in status.get("failures") or ():
        what = failure.get("task", failure) if isinstance(failure, dict) else failure
        yield _alarm("alarm", f"The hub's task {what} has failed.", "Read the hub's log, then restart the hub.")
    for short in status.get("short") or ():
        if isinstance(short, dict):
            text = f"The hub's task {short.get('task')} waits: {short.get('why')}"
            yield _alarm("alarm", text, "Do what the words say; the hub goes on by itself.")
    for reason in status.get("unready") or ():
        one = _reason(reason)
        yield _alarm(one.level, one.words, "Do what the words say; see the hub's log.")
    if status.get("version") is None:
        yield _alarm("watch", f"{NO_VERSION.capitalize()}.", "Start the trainer, or give the hub --base.")
    mirror = status.get("mirror")
    if isinstance(mirror, dict) and mirror.get("error"):
        yield _alarm("watch", f"The mirror fails: {mirror['error']}", "Check the store's address and credentials.")
    for folder, why in (status.get("skipped") or {}).items():
        yield _alarm("watch", f"Folder {folder} was not published: {why}", "Correct the folder, and name it anew.")
    if waiting := status.get("waiting_for"):
        do = "See --max-lag, if one peer may not delay a run."
        yield _alarm("watch", f"The next version waits for {names_of(waiting)}.", do)


_ALARMS: Final[Mapping[str, tuple[str, str]]] = {
    "quarantined": (
        "Other peers blame {names}: data was wrong or withheld. They feed no peer now.",
        "Check their disks, memory and owners; p2pcast evict removes one for ever.",
    ),
    "trouble": ("In trouble: {names}: {words}", "Do what the words say; see the log of that peer."),
    "failed": (
        "Installs fail at {names}: {words}",
        "Look at the engine that the error names, on the machine of that peer, which tries again by itself.",
    ),
    "unready": ("Engines are not ready at {names}: {words}", "Nothing, if they are starting; else see the peer's log."),
    "unknown": ("Engines serve unknown versions at {names}: {words}", "See the log of that peer and of the hub."),
    "late": (
        f"Behind by more than {LATE_VERSIONS} versions: {{names}}.",
        "Look at the rate of their parent, or let versions be bigger steps apart.",
    ),
    "unreachable": (
        "No other peer reaches {names}, so they only receive.",
        "Open their port, or state it with --advertise.",
    ),
    "lost": (
        "Lost, and not back: {names}. Their children have other parents now.",
        "Start p2pcast join on its machine again with the same --state, and it goes on where it was.",
    ),
}
"""By mark: text and remedy. ``words``: of the first peer."""


def _of_peers(found: Mapping[str, list[FleetFinding]], joined: Sequence[str]) -> Iterator[Document]:
    if not joined:
        do = "On a rollout machine: p2pcast join HUB:PORT --token-file FILE"
        yield _alarm("watch", "No peer has joined.", do)
    for mark, (text, do) in _ALARMS.items():
        named = {name: one for name, all_of in found.items() for one in reversed(all_of) if one.mark == mark}
        if named:
            first = next(iter(named.values()))
            yield _alarm(first.level, text.format(names=names_of(list(named)), words=first.words), do)


def _of_rollouts(status: Mapping[str, Any]) -> Iterator[Document]:
    rollouts = status.get("rollouts")
    if not isinstance(rollouts, dict):
        return
    if rollouts.get("age_s", 0.0) > SILENT_S and not rollouts.get("finished"):
        yield _alarm("watch", "The ledger has been silent for a while.", "Is p2pcast ledger running?")
    if silent := rollouts.get("silent_workers"):
        yield _alarm("watch", f"{silent} workers are silent.", "Their leases return to the pool by themselves.")
    if wrong := rollouts.get("probe_alarm"):
        do = "Run p2pcast verify --live; /status of the ledger names the workers."
        yield _alarm("alarm", f"Weights of {wrong} engines are not those of their version.", do)
    if missing := rollouts.get("probe_missing"):
        do = "The log of p2pcast work says why; engines need a --max-model-len of 64."
        yield _alarm("watch", f"Probes of {missing} engines fail: their weights are not checked.", do)


def names_of(names: Sequence[str]) -> str:
    """Return the first ``NAMED`` names, and how many more there are."""
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _version(value: Any) -> Version | None:
    try:
        return Version.parse(value) if isinstance(value, str) else None
    except UsageError:
        return None
