"""Peers that missed many versions, and their policies to catch up: every delta, the squashes that the hub keeps, or a
squash made on demand.

Processes on this machine behind links of a given rate. The weights are bf16. Each version moves a share of them by one
ULP, mostly the same ones, as training does. So squashes of many versions shrink about as those of real AdamW steps
(``bench squash``).
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from netem.emulation.description import HUB
from netem.emulation.loopback import Net
from netem.fleet.local_fleet import POLL_S, Document, LocalFleet
from netem.fleet.processes import FleetError
from p2pcast.artifact.artifact_file import P2pdFile
from p2pcast.ground.version import Version
from p2pcast.offline import squash_files
from p2pcast.store.squash_ladder import RUNGS, missing_rungs

POLICIES = {
    "each delta": "none",
    "squashes that are kept": "kept",
    "by predicted time": "auto",
    "one made for it": "ask",
}
"""Way → its value of --squashes."""
FIRST = "first"
CHANGED = 0.01
HOT = 0.05
"""Share of the weights that change at all within so many versions; each version moves the share CHANGED of all weights,
drawn from these.
"""


@dataclass(frozen=True, slots=True)
class CatchupRow:
    policy: str
    artifacts: int
    bytes: int
    seconds: float
    """From joining until the newest version is staged."""


@dataclass(frozen=True, slots=True)
class CatchupOutcome:
    rows: list[CatchupRow]
    chain_bytes: int
    """Bytes of every delta in between."""
    exact_bytes: int
    """Bytes of one squash of these deltas, made offline."""
    state_bytes: int


class LateFleet(LocalFleet):
    """``publish`` moves a share of the weights by one ULP. The first checkpoint remains in ``FIRST``."""

    def publish(self) -> None:
        draw = np.random.default_rng(self.step + 1)
        if self.step == 0:
            values = draw.standard_normal(self.payload_bytes // 2, dtype=np.float32) * 0.02
            self._words = (values.view(np.uint32) >> 16).astype(np.uint16)
            self._hot = np.flatnonzero(draw.random(len(self._words), dtype=np.float32) < HOT)
        else:
            chosen = self._hot[draw.random(len(self._hot), dtype=np.float32) < CHANGED / HOT]
            self._words[chosen] += np.where(draw.random(len(chosen)) < 0.5, 1, 0xFFFF).astype(np.uint16)
        self._save(self._words)
        if self.step == 1:
            shutil.copytree(self.core.trained / "step_1", self.folder / FIRST)

    async def published(self) -> Document:
        """The hub's status, once the hub has finished the newest version."""
        found = await self.answers(HUB)
        while found["version"] != self.version:
            self.still_run()
            await asyncio.sleep(POLL_S)
            found = await self.answers(HUB)
        return found


async def catch_up(
    folder: Path,
    state_bytes: int,
    versions: int,
    rate_bytes_s: float,
    codec: str,
    deadline_s: float,
    policies: Mapping[str, str] = POLICIES,
) -> CatchupOutcome:
    """Each of the policies in turn. Raises FleetError if one does not finish, or ends with other bits."""
    net = Net(1e12)
    async with LateFleet(folder, net, len(policies), 1, state_bytes, deadline_s) as fleet:
        fleet.options[HUB] = ["--codec", codec]
        for name, mode in zip(fleet.names, policies.values(), strict=True):
            fleet.options[name] = ["--squashes", mode]
        await fleet.kill(HUB)
        for name in fleet.names:
            await fleet.kill(name)
        await fleet.start(HUB)
        for _ in range(versions):
            fleet.publish()
            status = await fleet.published()
        status = await ladder(fleet, deadline_s)
        net.rate_bytes_s = rate_bytes_s
        rows = [await _catch_up(fleet, name, policy) for name, policy in zip(fleet.names, policies, strict=True)]
        for name in fleet.names:
            if not fleet.exact(name):
                raise FleetError(f"{name} ends with other bits")
        steps = _steps(fleet.core.state(HUB))
        squash_files(steps, folder / "exact.p2pd", base=folder / FIRST)
        with P2pdFile.open(folder / "exact.p2pd") as exact:
            exact_bytes = exact.manifest.log
    chain_bytes = sum(
        a["bytes"]
        for a in status["artifacts"]
        if a["base"] and Version.parse(a["version"]).step == Version.parse(a["base"]).step + 1
    )
    return CatchupOutcome(rows, chain_bytes, exact_bytes, state_bytes)


async def ladder(fleet: LateFleet, deadline_s: float) -> Document:
    """The hub's status, once the hub keeps all squashes of its ladder."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    while True:
        status = await fleet.answers(HUB)
        spans = [(Version.parse(a["base"]), Version.parse(a["version"])) for a in status["artifacts"] if a["base"]]
        path = sorted({v for span in spans for v in span})
        if not missing_rungs(path, spans, RUNGS):
            return status
        if loop.time() > deadline:
            raise FleetError("the hub does not make its squashes")
        await asyncio.sleep(POLL_S)


async def _catch_up(fleet: LateFleet, name: str, policy: str) -> CatchupRow:
    loop = asyncio.get_running_loop()
    await fleet.start(name)
    await fleet.answers(name)
    joined = loop.time()
    while (status := await fleet.answers(name))["staged"] != fleet.version:
        fleet.still_run()
        await asyncio.sleep(POLL_S)
    seconds = loop.time() - joined
    held = len(list((fleet.core.state(name) / "deltas").iterdir()))
    await fleet.live(name)
    row = CatchupRow(policy, held, int(status["bytes_received"]), seconds)
    await fleet.leave(name, 30.0)
    return row


def _steps(state: Path) -> list[Path]:
    """The hub's deltas of one version each, oldest first."""
    found: dict[Version, tuple[Version, Path]] = {}
    for path in (state / "deltas").glob("*.p2pd"):
        with P2pdFile.open(path) as file:
            base, version = file.manifest.base, file.manifest.version
        if base is not None and (version not in found or base > found[version][0]):
            found[version] = base, path
    return [found[v][1] for v in sorted(found)]
