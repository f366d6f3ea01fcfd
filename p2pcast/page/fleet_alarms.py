"""Alarms of a run: sentences that name a trouble, with the remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

LATE_VERSIONS: Final = 2
"""An engine that is behind by more versions is late: one version is always on its way."""
SILENT_S: Final = 30.0
"""A ledger that has told the hub nothing for so long is silent."""
LOSS_SHOWN_S: Final = 600.0
NAMED: Final = 3
"""Peers that one sentence names."""

Level = Literal["alarm", "watch"]
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Alarm:
    """``level``: ``alarm`` where an operator has to act, ``watch`` where the trouble may pass. ``do``: the remedy."""

    level: Level
    text: str
    do: str

    def document(self) -> Document:
        return asdict(self)


def alarms(status: Mapping[str, Any], rows: Mapping[str, Document], lost: Mapping[str, float]) -> list[Alarm]:
    """``status``: of the hub. ``rows``: peers of the picture. ``lost``: peer → seconds since its loss. Worst first."""
    found = [*_of_hub(status), *_of_peers(rows), *_of_losses(lost), *_of_rollouts(status.get("rollouts"))]
    return sorted(found, key=lambda alarm: alarm.level)


def _of_hub(status: Mapping[str, Any]) -> Iterator[Alarm]:
    for failure in status.get("failures") or ():
        what = failure.get("task", failure) if isinstance(failure, dict) else failure
        yield Alarm("alarm", f"The hub's task {what} has failed.", "Read the hub's log, then restart the hub.")
    if status.get("version") is None:
        yield Alarm("watch", "No version has been published yet.", "Start the trainer, or give the hub --base.")
    mirror = status.get("mirror")
    if isinstance(mirror, dict) and mirror.get("error"):
        yield Alarm("watch", f"The mirror fails: {mirror['error']}", "Check the store's address and credentials.")
    for folder, why in (status.get("skipped") or {}).items():
        yield Alarm("watch", f"Folder {folder} was not published: {why}", "Correct the folder, and name it anew.")
    if waiting := status.get("waiting_for"):
        yield Alarm(
            "watch",
            f"The next version waits for {names_of(waiting)}.",
            "See --max-lag, if one peer may not delay a run.",
        )


def _of_peers(rows: Mapping[str, Document]) -> Iterator[Alarm]:
    def those(mark: str) -> list[str]:
        return [name for name, row in rows.items() if mark in row["marks"]]

    if not rows:
        yield Alarm("watch", "No peer has joined.", "On a rollout machine: p2pcast join HUB:PORT --token-file FILE")
    if named := those("quarantined"):
        yield Alarm(
            "alarm",
            f"Other peers blame {names_of(named)}: data was wrong or withheld. They feed no peer now.",
            "Check their disks, memory and owners; p2pcast evict removes one for ever.",
        )
    if named := those("failed"):
        yield Alarm(
            "alarm",
            f"Installs fail at {names_of(named)}: {rows[named[0]]['error']}",
            "Look at the engine that the error names, on the machine of that peer, which tries again by itself.",
        )
    if named := those("unready"):
        yield Alarm(
            "watch",
            f"Engines are not ready at {names_of(named)}.",
            "Nothing, if they are starting; else see the peer's log.",
        )
    if named := those("late"):
        yield Alarm(
            "watch",
            f"Behind by more than {LATE_VERSIONS} versions: {names_of(named)}.",
            "Look at the rate of their parent, or let versions be bigger steps apart.",
        )
    if named := those("unreachable"):
        yield Alarm(
            "watch",
            f"No other peer reaches {names_of(named)}, so they only receive.",
            "Open their port, or state it with --advertise.",
        )


def _of_losses(lost: Mapping[str, float]) -> Iterator[Alarm]:
    recent = [name for name, ago_s in lost.items() if ago_s <= LOSS_SHOWN_S]
    if recent:
        yield Alarm(
            "watch",
            f"Lost, and not back: {names_of(recent)}. Its children have other parents now."
            if len(recent) == 1
            else f"Lost, and not back: {names_of(recent)}. Their children have other parents now.",
            "Start p2pcast join on its machine again with the same --state, and it goes on where it was.",
        )


def _of_rollouts(rollouts: Any) -> Iterator[Alarm]:
    if not isinstance(rollouts, dict):
        return
    if rollouts.get("age_s", 0.0) > SILENT_S and not rollouts.get("finished"):
        yield Alarm("watch", "The ledger has been silent for a while.", "Is p2pcast ledger running?")
    if silent := rollouts.get("silent_workers"):
        yield Alarm("watch", f"{silent} workers are silent.", "Their leases return to the pool by themselves.")


def names_of(names: Sequence[str]) -> str:
    """The first ones, and the number of the others."""
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
