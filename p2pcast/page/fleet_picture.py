"""The picture of a run: the one document that its page shows. Pure.

Rows of peers are keyed by name, so that ``changes`` can send those that changed. Keys of a row:

- ``parent``: name of the node that feeds this peer; ``hub`` for the hub.
- ``behind``: known versions that are newer than the oldest one served here; None if nothing is served.
- ``progress``: the version that arrives now, and the share of it that is here. ``bytes``: received so far.
- ``level``, ``words``: the verdict on the peer (``p2pcast.fleet_verdict``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from p2pcast.fleet_verdict import behind, judge, known_versions
from p2pcast.ground.version import Version
from p2pcast.page.fleet_history import FleetHistory

ENGINES_SHOWN: Final = 16

Document = dict[str, Any]


def picture(status: Mapping[str, Any], history: FleetHistory, now_s: float, source: str = "live") -> Document:
    """Return the picture of a hub's ``status`` at Unix time ``now_s``. ``source``: ``live``, or a source's name."""
    judged = judge(status)
    verdict, known = judged["verdict"], known_versions(status)
    rtt = {link["name"]: link.get("rtt_ms") for link in status.get("links") or ()}
    return {
        "source": source,
        "time": round(now_s, 3),
        "run": str(status.get("run") or "")[: 12 if source == "live" else None],
        "version": status.get("version"),
        "commit": {"mode": status.get("commit"), "target": status.get("target"), "barrier": status.get("barrier")},
        "headline": {
            "level": verdict["level"],
            "text": verdict["words"],
            **{key: verdict[key] for key in ("current", "engines", "peers")},
        },
        "alarms": verdict["alarms"],
        "versions": _spreads(status, history),
        "uplink_bps": (status.get("uplink") or {}).get("bps"),
        "security": status.get("security"),
        "last": status.get("last"),
        "rollouts": status.get("rollouts"),
        "gone": {row["name"]: _shown(row["verdict"]) | {"region": row.get("region") or ""} for row in judged["gone"]},
        "peers": {str(row["name"]): _row(row, known, rtt) for row in judged["peers"]},
    }


def _shown(verdict: Mapping[str, Any]) -> Document:
    return {"level": verdict["level"], "words": verdict["words"]}


def _spreads(status: Mapping[str, Any], history: FleetHistory) -> dict[str, Document]:
    kinds = {str(a["version"]): a["kind"] for a in status.get("artifacts") or () if a["kind"] != "squash"}
    sizes = {str(a["version"]): a["bytes"] for a in status.get("artifacts") or () if a["kind"] == "delta"}
    return {
        version: spread | {"kind": kinds.get(version), "bytes": spread["bytes"] or sizes.get(version)}
        for version, spread in history.document().items()
    }


def _row(row: Mapping[str, Any], known: Sequence[Version], rtt: Mapping[str, Any]) -> Document:
    engines = [_engine(engine) for engine in (row.get("engines") or ())[:ENGINES_SHOWN]]
    late = [found for engine in engines if (found := behind(engine["committed"], known)) is not None]
    return {
        "region": row.get("region") or "",
        "parent": row.get("parent"),
        "staged": row.get("staged"),
        "committed": row.get("committed"),
        "behind": max(late, default=None),
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
        **_shown(row["verdict"]),
    }


def _engine(engine: Mapping[str, Any]) -> Document:
    keys = ("name", "ready", "staged", "committed", "pause_s", "recomputed_tokens")
    return {key: engine.get(key) for key in keys} | {"level": engine["verdict"]["level"]}


def _progress(found: Mapping[str, Any] | None) -> tuple[str, float] | None:
    if found is None or not 0 <= found["pieces"] < found["of"]:
        return None
    return str(found["version"]), round(found["pieces"] / found["of"], 3)


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Document:
    """``apply(old, changes(old, new))`` is ``new``, for pictures with the same keys.

    A change: ``{"set": {key: value, …}, "peers": {name: row or null, …}}``; a null row: the peer is gone.
    """
    before, after = old["peers"], new["peers"]
    rows = {name: row for name, row in after.items() if before.get(name) != row}
    gone = {name: None for name in before if name not in after}
    fields = {key: value for key, value in new.items() if key != "peers" and old.get(key) != value}
    return {"set": fields, "peers": rows | gone}


def apply(old: Mapping[str, Any], change: Mapping[str, Any]) -> Document:
    """Apply a change to a picture, as the page does."""
    rows = {name: row for name, row in (old["peers"] | change["peers"]).items() if row is not None}
    return {**old, **change["set"], "peers": rows}
