"""The picture of a run: the one document that its page shows. Pure.

Rows of peers are keyed by name, so that ``picture_changes`` can send those that changed. Keys of a row:

- ``parent``: name of the node that feeds this peer; ``hub`` for the hub.
- ``behind``: known versions that are newer than the oldest one served here; None where nothing is served.
- ``progress``: the version that arrives now, and the share of it that is here. ``bytes``: received so far.
- ``marks``: troubles (``_marks``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from p2pcast.page.fleet_alarms import LATE_VERSIONS, alarms, names_of
from p2pcast.page.fleet_history import FleetHistory

ENGINES_SHOWN: Final = 16
TEXT_SHOWN: Final = 300

Document = dict[str, Any]


def picture(status: Mapping[str, Any], history: FleetHistory, now_s: float, source: str = "live") -> Document:
    """``status``: of the hub. ``now_s``: Unix time in seconds. ``source``: ``live``, or the name of another source."""
    versions = _versions(status)
    rtt = {link["name"]: link.get("rtt_ms") for link in status.get("links") or ()}
    peers = {str(row["name"]): _row(row, versions, rtt) for row in status.get("peers") or ()}
    lost = {name: now_s - at_s for name, (at_s, _) in history.lost.items() if name not in peers}
    found = alarms(status, peers, lost)
    return {
        "source": source,
        "time": round(now_s, 3),
        "run": str(status.get("run", ""))[:12],
        "version": status.get("version"),
        "commit": {"mode": status.get("commit"), "target": status.get("target"), "barrier": status.get("barrier")},
        "headline": _headline(status, peers, list(lost), [alarm.level for alarm in found]),
        "alarms": [alarm.document() for alarm in found],
        "versions": _spreads(status, history),
        "uplink_bps": (status.get("uplink") or {}).get("bps"),
        "security": status.get("security"),
        "last": status.get("last"),
        "rollouts": status.get("rollouts"),
        "lost": {name: [round(at_s, 3), why[:TEXT_SHOWN]] for name, (at_s, why) in history.lost.items()},
        "peers": peers,
    }


def _versions(status: Mapping[str, Any]) -> list[str]:
    """Known versions, newest first, each once."""
    found = {str(artifact["version"]) for artifact in status.get("artifacts") or ()}
    if status.get("version"):
        found.add(str(status["version"]))
    return sorted(found, key=_order, reverse=True)


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _spreads(status: Mapping[str, Any], history: FleetHistory) -> dict[str, Document]:
    kinds = {str(a["version"]): a["kind"] for a in status.get("artifacts") or () if a["kind"] != "squash"}
    sizes = {str(a["version"]): a["bytes"] for a in status.get("artifacts") or () if a["kind"] == "delta"}
    return {
        version: spread | {"kind": kinds.get(version), "bytes": spread["bytes"] or sizes.get(version)}
        for version, spread in history.document().items()
    }


def _row(row: Mapping[str, Any], versions: Sequence[str], rtt: Mapping[str, Any]) -> Document:
    engines = [_engine(engine) for engine in (row.get("engines") or ())[:ENGINES_SHOWN]]
    behind = _behind(engines, versions)
    error = next((engine["error"] for engine in engines if engine["error"]), row.get("error"))
    shown = {
        "region": row.get("region") or "",
        "parent": row.get("parent"),
        "staged": row.get("staged"),
        "committed": row.get("committed"),
        "behind": behind,
        "state": row.get("state"),
        "progress": _progress(row.get("progress")),
        "bytes": row.get("bytes_received"),
        "duplicate": row.get("bytes_duplicate"),
        "bps": row.get("bps"),
        "rtt_ms": rtt.get(row["name"]),
        "score": row.get("score"),
        "parts": row.get("score_parts"),
        "standing": row.get("standing"),
        "address": row.get("address"),
        "certificate_until": row.get("certificate_until"),
        "blamed_by": (row.get("blamed_by") or 0) + (row.get("withheld_from") or 0),
        "engines": engines,
        "error": None if error is None else str(error)[:TEXT_SHOWN],
    }
    return shown | {"marks": _marks(row, shown)}


def _engine(engine: Mapping[str, Any]) -> Document:
    keys = ("name", "ready", "staged", "committed", "pause_s", "recomputed_tokens")
    error = engine.get("error")
    return {key: engine.get(key) for key in keys} | {"error": None if error is None else str(error)[:TEXT_SHOWN]}


def _progress(found: Mapping[str, Any] | None) -> tuple[str, float] | None:
    if found is None or not 0 <= found["pieces"] < found["of"]:
        return None
    return str(found["version"]), round(found["pieces"] / found["of"], 3)


def _behind(engines: Sequence[Document], versions: Sequence[str]) -> int | None:
    served = [engine["committed"] for engine in engines if engine["committed"] in versions]
    return max((versions.index(version) for version in served), default=None)


def _marks(row: Mapping[str, Any], shown: Document) -> list[str]:
    engines = shown["engines"]
    marks = {
        "quarantined": bool(row.get("quarantined")),
        "failed": any(engine["error"] and not engine["ready"] for engine in engines),
        "unready": any(not engine["ready"] and not engine["error"] for engine in engines),
        "late": (shown["behind"] or 0) > LATE_VERSIONS,
        "unreachable": row.get("reachable") is False,
        "detached": bool(row.get("detached")),
    }
    return [mark for mark, applies in marks.items() if applies]


def _headline(
    status: Mapping[str, Any], peers: Mapping[str, Document], lost: Sequence[str], levels: Sequence[str]
) -> Document:
    newest = status.get("version")
    engines = {name: [e["ready"] and e["committed"] == newest for e in row["engines"]] for name, row in peers.items()}
    total, current = sum(map(len, engines.values())), sum(map(sum, engines.values()))
    level = "alarm" if "alarm" in levels else "watch" if levels else "good"
    if not total and newest is not None and any(row["staged"] for row in peers.values()):
        here = sum(row["staged"] == newest for row in peers.values())
        whole = f"{'All' if here == len(peers) else f'{here} of'} {len(peers)} peers"
        text = f"{whole} have {newest}, the newest version; no engine serves it yet."
    elif not total:
        text = f"No engine serves {newest or 'a version'} yet."
    elif current == total:
        text = f"{f'All {total} engines serve' if total > 1 else 'The engine serves'} {newest}, the newest version."
    else:
        others = [name for name, found in engines.items() if not all(found)]
        verb = "do" if total - current > 1 else "does"
        missing = f"{total - current} of {total} engines {verb} not serve {newest}, the newest version"
        text = f"{missing}, at {names_of(others)}."
    if lost:
        text += f" Lost: {names_of(lost)}."
    return {"level": level, "text": text, "current": current, "engines": total, "peers": len(peers)}
