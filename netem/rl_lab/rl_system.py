"""A whole RL run at the hosts of an emulated network, by the commands of users. Hub, ledger and learner are at ``hub``;
an engine and a worker are at every other host.

How weights reach the engines is a ``WeightPath``. Engines are ``netem.rl_lab.paced_engine``. The learner is ``p2pcast
learn`` with paced steps. All processes end with the swarm's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from netem.emulation.description import HUB, Emulated
from netem.fleet.fleet import HTTP_PORT, Fleet
from netem.fleet.processes import ChildProcess, Processes
from netem.fleet.rollout_processes import LEARNER, LEDGER, Batches, Tables, configuration, start_ledger
from netem.rl_lab.weight_paths import ENGINE_PORT, ENGINE_URL, PeerPath, StarPath, WeightPath
from netem.rollouts.graded_answers import NAME

LEDGER_HTTP_PORT, LEDGER_PORT = 7081, 7080
LEASE_GUESS_S: Final = 30.0
START_S: Final = 300.0
"""Limit for any start, in seconds: on one slow processor a worker takes tens of seconds."""
MODEL_MODULES: Final = (
    "netem.rl_lab.base_model", "netem.rl_lab.paced_engine", "netem.rl_lab.paced_learner",
    "trainer_node.learning.learner_startup",
)  # fmt: skip
SMALL_MODULES: Final = (
    "netem.rl_lab.dense_star", "trainer_node.ledger_server.ledger_daemon", "rollout_node.worker.worker_daemon",
)  # fmt: skip
"""Each of these is imported once by a fork server. Hub, peers, ledger and workers have one of their own, without torch:
each process that a peer starts copies the peer's page tables, which takes long in user-mode Linux.
"""


@dataclass(frozen=True, slots=True)
class RlSetup:
    """``layers``: of the model. ``slots``: answers of one engine at the same time, each of ``tokens`` tokens at
    ``tokens_per_s``. ``train_s``: of a learner's step. ``publish_every``: 0 is the learner's own choice.
    """

    layers: int
    tokens: int
    tokens_per_s: float
    slots: int
    groups: int
    group_size: int
    staleness: int
    publish_every: int
    train_s: float
    lr: float = 1e-6

    @property
    def task(self) -> str:
        return f"{NAME},tokens={self.tokens}"


class RlSystem:
    """``start`` returns once every engine serves a version. ``sites``: host → region. ``models``: starts processes that
    compute with models. ``star``: versions go whole.
    """

    def __init__(self, net: Emulated, run: Fleet, models: Processes, setup: RlSetup, *, star: bool) -> None:
        self.net, self.run, self._models, self._setup = net, run, models, setup
        self.hosts = net.network.peers
        self.sites = {host.name: host.region or "" for host in net.network.hosts if host.name != HUB}
        self._base = run.folder / "base"
        self.weights: WeightPath = StarPath(net, run, self._base) if star else PeerPath(run, self._base)
        self.database = run.state(LEDGER) / "ledger.db"
        self.metrics = run.folder / LEARNER / "metrics.jsonl"

    def start(self) -> None:
        words: list[str | Path] = [self._base, str(self._setup.layers)]
        self._finish(self._models.fork("base", words, entry="netem.rl_lab.base_model"))
        self._start_hub()
        self._start_ledger()
        self.weights.begin()
        for host in self.hosts:
            words = [str(ENGINE_PORT), self._base, str(self._setup.tokens_per_s)]
            self._models.fork(f"engine-{host}", words, self.net.space(host), entry="netem.rl_lab.paced_engine")
            self.weights.join(host, self.sites[host])
        self._start_learner()
        for host in self.hosts:
            self._start_worker(host)
        self.until(lambda: all(map(self.weights.installs, self.hosts)), "version at every engine")

    def end(self) -> None:
        """The learner ends after its step, then all others, the hub last."""
        run = self.run
        self._models.stop(LEARNER)
        run.leave(*(name for name in run.processes.children if name != HUB))
        self._models.stop_all()
        run.leave(HUB)
        self.run.close()

    def check(self) -> None:
        """Raises LocalError if a process has ended unexpectedly."""
        self.run.processes.check()
        self._models.check()

    @property
    def pids(self) -> dict[str, int]:
        return self.run.processes.pids | self._models.pids

    def until(self, done: Callable[[], bool], what: str, limit_s: float = START_S) -> None:
        """Wait until ``done()`` is true. Raises LocalError."""

        def checked() -> bool:
            self.check()
            return done()

        self.run.until(checked, what, limit_s)

    def remove(self) -> None:
        """Delete the files, once they are read."""
        shutil.rmtree(self.run.folder, ignore_errors=True)

    # -- processes

    def _finish(self, child: ChildProcess) -> None:
        """Wait for the end of a command."""
        child.expected = True
        self.until(lambda: not child.alive, child.name)
        if child.code:
            raise child.failure(f"{child.name} failed")

    def _start_hub(self) -> None:
        run = self.run
        words: list[str | Path] = ["--base", self._base, "--region", HUB]
        if (up_bps := self.net.network.link(HUB).up_bps) is not None:
            words += ["--uplink", f"{up_bps:.0f}"]
        run.hub(*words)
        run.until_joinable()
        for role in (LEDGER, "worker", "trainer"):
            words = ["token", "create", "--role", role, "--state", run.state(HUB), "-o", self._join(role)]
            self._finish(run.start(f"token-{role}", *words, host=HUB))

    def _join(self, role: str) -> Path:
        """The file with a join token."""
        return self.run.folder / f"{role}.join"

    def _start_ledger(self) -> None:
        run, setup = self.run, self._setup
        batches = Batches(setup.task, setup.groups, setup.group_size, setup.staleness)
        words: list[str | Path] = ["--listen", f"0.0.0.0:{LEDGER_PORT}", "--hub", run.place.hub]
        words += ["--token-file", self._join(LEDGER), "--name", LEDGER, "--lease-guess", str(LEASE_GUESS_S)]
        start_ledger(run, batches, f"127.0.0.1:{HTTP_PORT}", f"127.0.0.1:{LEDGER_HTTP_PORT}", *words)
        self.until((run.state(LEDGER) / "daemon.json").exists, "ledger")

    def _start_worker(self, host: str) -> None:
        run, setup, name = self.run, self._setup, worker_of(host)
        ledger = f"https://{self.net.network.address(HUB)}:{LEDGER_PORT}"
        words: list[str | Path] = ["work", ledger, "--hub", run.place.hub, "--token-file", self._join("worker")]
        words += ["--state", run.state(name), "--name", name, "--slots", str(setup.slots)]
        words += ["--engine", ENGINE_URL, "--peer", f"127.0.0.1:{HTTP_PORT}", "--task", setup.task]
        run.start(name, *words, host=host)

    def _start_learner(self) -> None:
        run, setup, config = self.run, self._setup, self.run.folder / "run.toml"
        tables: Tables = {
            "train": {"publish-every": setup.publish_every, "packing": "padded"},
            "optimizer": {"lr": setup.lr},
            "checkpoint": {"folder": run.folder / LEARNER, "every": 1_000_000},
            **self.weights.tables,
        }
        ledger_url = f"http://127.0.0.1:{LEDGER_HTTP_PORT}"
        config.write_text(configuration(run, self._base, self._join("trainer"), ledger_url, tables))
        words: list[str | Path] = [str(setup.train_s), config]
        self._models.fork(LEARNER, words, self.net.space(HUB), entry="netem.rl_lab.paced_learner")


def worker_of(host: str) -> str:
    return f"work-{host}"
