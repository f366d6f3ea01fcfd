"""A whole RL run at the hosts of an emulated network, by the commands of users. Hub, ledger and learner are at ``hub``;
an engine and a worker are at every other host.

How weights reach the engines is a ``WeightPath``. Engines are ``netem.rl_lab.paced_engine``. The learner is ``p2pcast
learn`` with paced steps. All processes end with the swarm's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from netem.broadcast.daemons import Daemon, Daemons
from netem.broadcast.emulated_fleet import HUB_PORT
from netem.broadcast.host_http import HTTP_PORT
from netem.broadcast.rivals import HUB, peers_of
from netem.fleet.lab_swarm import Swarm
from netem.rl_lab.weight_paths import ENGINE_PORT, ENGINE_URL, PeerPath, StarPath, WeightPath
from netem.rollouts.graded_answers import NAME

LEDGER_HTTP_PORT, LEDGER_PORT = 7081, 7080
LEDGER, LEARNER = "ledger", "learner"
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
CONFIG: Final = """\
[model]
path = {base}
compute = "float32"
threads = 1
[hub]
address = {hub}
token-file = {token}
[ledger]
url = {ledger}
bearer-file = {bearer}
[train]
publish-every = {every}
packing = "padded"
[optimizer]
lr = {lr}
[checkpoint]
folder = {folder}
every = 1000000
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

    def __init__(self, run: Swarm, models: Daemons, setup: RlSetup, *, star: bool) -> None:
        self.run, self._models, self._setup = run, models, setup
        self.hosts = peers_of(run.net)
        self.sites = {host.name: host.region or "" for host in run.net.network.hosts if host.name != HUB}
        self._base, self._token = run.folder / "base", run.folder / "token"
        self.weights: WeightPath = StarPath(run, self._base) if star else PeerPath(run, self._base, self._token)
        self.database = run.folder / LEDGER / "ledger.db"
        self.metrics = run.folder / LEARNER / "metrics.jsonl"

    def start(self) -> None:
        run = self.run
        words: list[str | Path] = [self._base, str(self._setup.layers)]
        self._finish(self._models.start("base", words, entry="netem.rl_lab.base_model"))
        self._start_hub()
        self._start_ledger()
        self.weights.begin()
        for host in self.hosts:
            words = [str(ENGINE_PORT), self._base, str(self._setup.tokens_per_s)]
            self._models.start(f"engine-{host}", words, run.net.space(host), entry="netem.rl_lab.paced_engine")
            self.weights.join(host, self.sites[host])
        self._start_learner()
        for host in self.hosts:
            self._start_worker(host)
        self.until(lambda: all(map(self.weights.installs, self.hosts)), "version at every engine")

    def end(self) -> None:
        """The learner ends after its step, then all others, the hub last."""
        daemons = self.run.daemons
        self._models.stop(LEARNER)
        daemons.stop(*(name for name in daemons.daemons if name != HUB))
        self._models.stop(*self._models.daemons)
        daemons.stop(HUB)
        self.run.close()

    def check(self) -> None:
        """Raises LocalError if a process has ended unexpectedly."""
        self.run.daemons.check()
        self._models.check()

    @property
    def pids(self) -> dict[str, int]:
        return self.run.daemons.pids | self._models.pids

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

    def _finish(self, daemon: Daemon) -> None:
        """Wait for the end of a command."""
        daemon.expected = True
        self.until(lambda: daemon.code is not None, daemon.name)
        if daemon.code:
            raise daemon.failure(f"{daemon.name} failed")

    def _start_hub(self) -> None:
        run = self.run
        words: list[str | Path] = ["--base", self._base, "--listen", f"0.0.0.0:{HUB_PORT}", "--region", HUB]
        words += ["--http", f"127.0.0.1:{HTTP_PORT}", "--token-file", self._token]
        if (up_bps := run.net.network.link(HUB).up_bps) is not None:
            words += ["--uplink", f"{up_bps:.0f}"]
        run.start_node(HUB, "seed", *words)
        self.until(self._token.exists, "the hub's token")
        for role in (LEDGER, "worker", "trainer"):
            words = ["token", "create", "--role", role, "--state", run.folder / "state" / HUB, "-o", self._join(role)]
            self._finish(run.daemons.start(f"token-{role}", words, run.net.space(HUB)))

    def _join(self, role: str) -> Path:
        """The file with a join token."""
        return self.run.folder / f"{role}.join"

    @property
    def _hub(self) -> str:
        return f"{self.run.net.network.address(HUB)}:{HUB_PORT}"

    def _start_ledger(self) -> None:
        run, setup = self.run, self._setup
        words: list[str | Path] = ["ledger", "--task", setup.task, "--http", f"127.0.0.1:{LEDGER_HTTP_PORT}"]
        words += ["--listen", f"0.0.0.0:{LEDGER_PORT}", "--hub", self._hub, "--token-file", self._join(LEDGER)]
        words += ["--name", LEDGER, "--state", run.folder / LEDGER, "--hub-http", f"127.0.0.1:{HTTP_PORT}"]
        words += ["--hub-bearer-file", run.folder / "state" / HUB / "http.token"]
        words += ["--batch-groups", str(setup.groups), "--group-size", str(setup.group_size)]
        words += ["--staleness", str(setup.staleness), "--lease-guess", str(LEASE_GUESS_S)]
        run.daemons.start(LEDGER, words, run.net.space(HUB))
        self.until((run.folder / LEDGER / "daemon.json").exists, "ledger")

    def _start_worker(self, host: str) -> None:
        run, setup, name = self.run, self._setup, worker_of(host)
        ledger = f"https://{run.net.network.address(HUB)}:{LEDGER_PORT}"
        words: list[str | Path] = ["work", ledger, "--hub", self._hub, "--token-file", self._join("worker")]
        words += ["--state", run.folder / "state" / name, "--name", name, "--slots", str(setup.slots)]
        words += ["--engine", ENGINE_URL, "--peer", f"127.0.0.1:{HTTP_PORT}", "--task", setup.task]
        run.daemons.start(name, words, run.net.space(host))

    def _start_learner(self) -> None:
        run, setup, quoted = self.run, self._setup, json.dumps
        config = run.folder / "run.toml"
        text = CONFIG.format(
            base=quoted(str(self._base)), hub=quoted(self._hub), token=quoted(str(self._join("trainer"))),
            ledger=quoted(f"http://127.0.0.1:{LEDGER_HTTP_PORT}"), every=setup.publish_every, lr=setup.lr,
            bearer=quoted(str(run.folder / LEDGER / "http.token")), folder=quoted(str(run.folder / LEARNER)),
        )  # fmt: skip
        config.write_text(text + self.weights.config)
        words: list[str | Path] = [str(setup.train_s), config]
        self._models.start(LEARNER, words, run.net.space(HUB), entry="netem.rl_lab.paced_learner")


def worker_of(host: str) -> str:
    return f"work-{host}"
