"""Cost of repairing a shadow with corrupt cells, after a restart or while the peer runs, with and without copies on its
own disk.

Processes on this machine behind links of a given rate; the weights change as in ``netem.bench.catchup_cost``. All
fetched bytes cross the measured link: pieces, directories, and control messages.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from netem.bench.catchup_cost import LateFleet, ladder
from netem.emulation.loopback import Net
from netem.fleet.local_fleet import POLL_S
from netem.fleet.processes import FleetError
from p2pcast.ground import limits

VICTIM, OTHER = "p1", "p2"
CELL_BYTES = 2 * limits.CELL_WORDS
"""Bytes of a bf16 cell."""


@dataclass(frozen=True, slots=True)
class Damage:
    """``cells``: number of corrupt cells; None: the shadow is lost. ``disk``: whether the artifacts on disk are intact.
    ``running``: the peer runs meanwhile, and detects the damage at the next version.
    """

    what: str
    cells: int | None
    disk: bool
    running: bool = False


DAMAGES = (
    Damage("1 cell", 1, disk=True),
    Damage("1 cell, and its disk", 1, disk=False),
    Damage("4 cells, and its disk", 4, disk=False),
    Damage("1 cell, and its disk, while the peer runs", 1, disk=False, running=True),
    Damage("shadow and disk", None, disk=False),
)


@dataclass(frozen=True, slots=True)
class RepairRow:
    damage: Damage
    cell_bytes: int
    """Bytes of the corrupt cells."""
    pieces_bytes: int
    """Pieces received by the peer, without those of the version published meanwhile."""
    wire_bytes: int | None
    """All bytes forwarded to the peer; None if a version was also in transfer."""
    seconds: float
    """From joining (running: from the version's publishing) until the newest version is staged."""


@dataclass(frozen=True, slots=True)
class RepairOutcome:
    rows: list[RepairRow]
    state_bytes: int
    listed_bytes: list[int]
    """Bytes kept by the hub: whole states and deltas."""


async def repair(
    folder: Path,
    state_bytes: int,
    versions: int,
    rate_bytes_s: float,
    deadline_s: float,
    damages: tuple[Damage, ...] = DAMAGES,
) -> RepairOutcome:
    """Each damage in turn, to the same peer. Raises FleetError if the peer does not recover, or has other bits."""
    net = Net(1e12)
    async with LateFleet(folder, net, 2, 1, state_bytes, deadline_s) as fleet:
        for _ in range(versions):
            fleet.publish()
            await fleet.live(VICTIM, OTHER)
        status = await ladder(fleet, deadline_s)
        rows = []
        for damage in damages:
            # After a restart the damaged artifact has a whole copy again.
            net.rate_bytes_s = 1e12
            await _wait_intact(fleet)
            net.rate_bytes_s = rate_bytes_s
            rows.append(await _repair(fleet, net, damage))
            await fleet.live(VICTIM, OTHER)
            if not fleet.exact(VICTIM):
                raise FleetError(f"after {damage.what} {VICTIM} has other bits")
    return RepairOutcome(rows, state_bytes, sorted(int(a["bytes"]) for a in status["artifacts"]))


async def _wait_intact(fleet: LateFleet) -> None:
    await fleet.kill(VICTIM)
    for path in (fleet.core.state(VICTIM), fleet.core.shadow(VICTIM)):
        shutil.rmtree(path)
    await fleet.start(VICTIM)
    await fleet.live(VICTIM, OTHER)


async def _repair(fleet: LateFleet, net: Net, damage: Damage) -> RepairRow:
    loop = asyncio.get_running_loop()
    if not damage.running:
        await fleet.leave(VICTIM, 30.0)
    cell_bytes = _rot(fleet.core.shadow(VICTIM), damage.cells)
    if not damage.disk:
        for part in ("anchors", "deltas"):
            for path in (fleet.core.state(VICTIM) / part).iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = net.flows[VICTIM].bytes
    had, version_bytes = 0, 0
    if damage.running:
        had = int((await fleet.answers(VICTIM))["bytes_received"])
        fleet.publish()
        began = loop.time()
    else:
        await fleet.start(VICTIM)
        await fleet.answers(VICTIM)
        began = loop.time()
    while (status := await fleet.answers(VICTIM))["staged"] != fleet.version:
        fleet.still_run()
        await asyncio.sleep(POLL_S)
    took_s = loop.time() - began
    if damage.running:
        hub = await fleet.published()
        last = f"0.{fleet.step - 1}"
        version_bytes = next(
            int(a["bytes"]) for a in hub["artifacts"] if (a["base"], a["version"]) == (last, fleet.version)
        )
    wire = None if damage.running else net.flows[VICTIM].bytes - before
    return RepairRow(damage, cell_bytes, int(status["bytes_received"]) - had - version_bytes, wire, took_s)


def _rot(shadow: Path, cells: int | None) -> int:
    """Change a word in the middle of each of the first cells; returns the bytes of those cells."""
    path = shadow / "model.safetensors"
    with path.open("rb") as file:
        head = int.from_bytes(file.read(8), "little")
        begins = 8 + head
        state = int(json.loads(file.read(head))["w"]["data_offsets"][1])
    if cells is None:
        shutil.rmtree(shadow)
        return state
    with path.open("r+b") as file:
        for cell in range(cells):
            at = begins + min(cell * CELL_BYTES + CELL_BYTES // 2, state - 1)
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))
    return min(state, cells * CELL_BYTES)
