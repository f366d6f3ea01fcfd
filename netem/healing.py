"""What it costs to put right a shadow of which some cells have rotted, while the peer was down and while it runs, with and without copies on its own disk.

Processes on this machine behind links of a stated rate; the weights move as in ``netem.catchup``. Everything is fetched over the wire that counts: pieces, directories,
what hub and peers say to each other.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from netem.catchup import LateFleet, ladder
from netem.fleet import POLL_S, FleetError
from netem.loopback import Net
from p2pcast import limits

VICTIM, OTHER = "p1", "p2"
CELL_BYTES = 2 * limits.CELL_WORDS
"""Of bf16."""


@dataclass(frozen=True, slots=True)
class Harm:
    """``cells``: None: the shadow is lost. ``disk``: whether what lies on disk is left. ``running``: it is done to a running peer, and found by the next version."""

    what: str
    cells: int | None
    disk: bool
    running: bool = False


HARMS = (
    Harm("1 cell", 1, disk=True),
    Harm("1 cell, and its disk", 1, disk=False),
    Harm("4 cells, and its disk", 4, disk=False),
    Harm("1 cell, and its disk, while it runs", 1, disk=False, running=True),
    Harm("shadow and disk", None, disk=False),
)


@dataclass(frozen=True, slots=True)
class Row:
    harm: Harm
    cell_bytes: int
    """Of the state, that had rotted."""
    pieces_bytes: int
    """That the peer received, without the version that was published meanwhile."""
    wire_bytes: int | None
    """All that was passed on to it; None where a version was on its way, too."""
    seconds: float
    """From joining (running: from the version's publishing) to the newest version staged."""


@dataclass(frozen=True, slots=True)
class Outcome:
    rows: list[Row]
    state_bytes: int
    listed_bytes: list[int]
    """Of what the hub keeps: the whole states and deltas."""


async def heal(
    folder: Path, state_bytes: int, versions: int, rate_bytes_s: float, deadline_s: float, harms: tuple[Harm, ...] = HARMS
) -> Outcome:
    """Each of the harms, one after the other, to the same peer. Raises FleetError when it does not come back, or with other bits."""
    net = Net(1e12)
    async with LateFleet(folder, net, 2, 1, state_bytes, deadline_s) as fleet:
        for _ in range(versions):
            fleet.publish()
            await fleet.live(VICTIM, OTHER)
        status = await ladder(fleet, deadline_s)
        rows = []
        for harm in harms:
            # What was harmed last has a whole copy again, as after any start.
            net.rate_bytes_s = 1e12
            await _whole_again(fleet)
            net.rate_bytes_s = rate_bytes_s
            rows.append(await _harmed(fleet, net, harm))
            await fleet.live(VICTIM, OTHER)
            if not fleet.exact(VICTIM):
                raise FleetError(f"after {harm.what} {VICTIM} is at other bits")
    return Outcome(rows, state_bytes, sorted(int(a["bytes"]) for a in status["artifacts"]))


async def _whole_again(fleet: LateFleet) -> None:
    await fleet.kill(VICTIM)
    for path in (fleet.folder / VICTIM, fleet.folder / f"{VICTIM}-shadow"):
        shutil.rmtree(path)
    await fleet.start(VICTIM)
    await fleet.live(VICTIM, OTHER)


async def _harmed(fleet: LateFleet, net: Net, harm: Harm) -> Row:
    loop = asyncio.get_running_loop()
    if not harm.running:
        await fleet.leave(VICTIM, 30.0)
    cell_bytes = _rot(fleet.folder / f"{VICTIM}-shadow", harm.cells)
    if not harm.disk:
        for part in ("anchors", "deltas"):
            for path in (fleet.folder / VICTIM / part).iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = net.flows[VICTIM].bytes
    had, version_bytes = 0, 0
    if harm.running:
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
    if harm.running:
        hub = await fleet.published()
        last = f"0.{fleet.step - 1}"
        version_bytes = next(int(a["bytes"]) for a in hub["artifacts"] if (a["base"], a["version"]) == (last, fleet.version))
    wire = None if harm.running else net.flows[VICTIM].bytes - before
    return Row(harm, cell_bytes, int(status["bytes_received"]) - had - version_bytes, wire, took_s)


def _rot(shadow: Path, cells: int | None) -> int:
    """A word in the middle of each of the first cells. The bytes of those cells."""
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
