"""A whole RL run at the hosts of an emulated network, by the commands of users: hub, ledger and learner at ``hub``, and
at every other host a peer, an engine and a worker.

``star``: each version is coded whole, and the hub sends it to every peer itself. Everything else is the same.

Engines are ``netem.rl_lab.paced_engine``. The learner is ``p2pcast learn`` with paced steps. All processes end with the
swarm's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from netem.broadcast.emulated_fleet import HUB_PORT, PEER_PORT
from netem.broadcast.host_http import HTTP_PORT
from netem.broadcast.rivals import HUB, needed, peers_of
from netem.lab.lab_swarm import Swarm
from netem.rollouts.parity_answers import NAME

ENGINE_PORT: Final = 8000
LEDGER_HTTP_PORT, LEDGER_PORT = 7081, 7080
LEDGER, LEARNER = "ledger", "learner"
LEASE_GUESS_S: Final = 30.0
START_S: Final = 300.0
"""Limit for any start, in seconds: on one slow processor a worker takes tens of seconds."""
MODULES: Final = (
    "netem.rl_lab.base_model", "netem.rl_lab.paced_engine", "netem.rl_lab.paced_learner",
    "trainer_node.learning.learner_startup", "trainer_node.ledger_server.ledger_daemon",
    "rollout_node.worker.worker_daemon",
)  # fmt: skip
"""Imported once for all processes."""
INSTALL: Final = """\
exec curl -sfS -X POST -G --data-urlencode "version=$P2PCAST_VERSION" --data-urlencode "folder=$P2PCAST_DIR" \\
  http://127.0.0.1:{port}/install
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
    """``start`` returns once every engine serves a version. ``sites``: host → region."""

    def __init__(self, run: Swarm, setup: RlSetup, *, star: bool) -> None:
        needed(command="curl")
        self.run, self._setup, self._star = run, setup, star
        self.hosts = peers_of(run.net)
        self.sites = {host.name: host.region or "" for host in run.net.network.hosts if host.name != HUB}
        self._base, self._token = run.folder / "base", run.folder / "token"
        self.database = run.folder / LEDGER / "ledger.db"
        self.metrics = run.folder / LEARNER / "metrics.jsonl"

    # -- processes

    def start(self) -> None:
        run = self.run
        run.daemons.start("base", [self._base, self._setup.layers], entry="netem.rl_lab.base_model").expected = True
        run.until(lambda: run.daemons.daemons["base"].code == 0, "model", START_S)
        self._start_hub()
        self._start_ledger()
        for host in self.hosts:
            self._start_site(host)
        self._start_learner()
        for host in self.hosts:
            run.wait_for(host, "committed", START_S)
        for host in self.hosts:
            self._start_worker(host)

    def end(self) -> None:
        """The learner ends after its step; then all others."""
        self._stop(LEARNER)
        self._stop(*(name for name in self.run.daemons.daemons if name not in (LEARNER, HUB)))
        self._stop(HUB)
        self.run.close()

    def remove(self) -> None:
        """Delete the files, once they are read."""
        shutil.rmtree(self.run.folder, ignore_errors=True)

    def _stop(self, *names: str) -> None:
        self.run.daemons.stop(*names)

    def _start_hub(self) -> None:
        run = self.run
        words: list[str | Path] = ["--base", self._base, "--listen", f"0.0.0.0:{HUB_PORT}", "--region", HUB]
        words += ["--http", f"127.0.0.1:{HTTP_PORT}", "--token-file", self._token]
        if (up_bps := run.net.network.link(HUB).up_bps) is not None:
            words += ["--uplink", f"{up_bps:.0f}"]
        if self._star:
            words += ["--codec", "dense", "--chains", str(len(self.hosts))]
        run.start_node(HUB, "seed", *words)
        run.until(self._token.exists, "the hub's token", START_S)
        for role in (LEDGER, "worker", "trainer"):
            self._make_token(role)

    def _make_token(self, role: str) -> None:
        name = f"token-{role}"
        words = ["token", "create", "--role", role, "--state", self.run.folder / "state" / HUB, "-o", self._of(role)]
        daemon = self.run.daemons.start(name, words, self.run.net.space(HUB))
        daemon.expected = True
        self.run.until(lambda: daemon.code == 0, f"token of the role {role}", START_S)

    def _of(self, role: str) -> Path:
        return self.run.folder / f"{role}.join"

    def _start_ledger(self) -> None:
        run, setup = self.run, self._setup
        words: list[str | Path] = ["ledger", "--task", setup.task, "--http", f"127.0.0.1:{LEDGER_HTTP_PORT}"]
        words += ["--listen", f"0.0.0.0:{LEDGER_PORT}", "--hub", self._hub, "--token-file", self._of(LEDGER)]
        words += ["--name", LEDGER, "--state", run.folder / LEDGER, "--hub-http", f"127.0.0.1:{HTTP_PORT}"]
        words += ["--hub-bearer-file", run.folder / "state" / HUB / "http.token"]
        words += ["--batch-groups", str(setup.groups), "--group-size", str(setup.group_size)]
        words += ["--staleness", str(setup.staleness), "--lease-guess", str(LEASE_GUESS_S)]
        run.daemons.start(LEDGER, words, run.net.space(HUB))
        run.until((run.folder / LEDGER / "daemon.json").exists, "ledger", START_S)

    @property
    def _hub(self) -> str:
        return f"{self.run.net.network.address(HUB)}:{HUB_PORT}"

    def _start_site(self, host: str) -> None:
        """An engine, and the peer that installs into it."""
        run, setup = self.run, self._setup
        script = run.folder / f"install-{host}.sh"
        script.write_text(INSTALL.format(port=ENGINE_PORT))
        engine = [str(ENGINE_PORT), self._base, str(setup.tokens_per_s)]
        run.daemons.start(f"engine-{host}", engine, run.net.space(host), entry="netem.rl_lab.paced_engine")
        words: list[str | Path] = ["join", self._hub, "--listen", f"0.0.0.0:{PEER_PORT}", "--name", host]
        words += ["--http", f"127.0.0.1:{HTTP_PORT}", "--token-file", self._token, "--base", self._base]
        words += ["--install", f"exec:sh {script}"]
        if self.sites[host] and not self._star:
            words += ["--region", self.sites[host]]
        run.start_node(host, *words)

    def _start_worker(self, host: str) -> None:
        run, setup = self.run, self._setup
        ledger = f"https://{run.net.network.address(HUB)}:{LEDGER_PORT}"
        words: list[str | Path] = ["work", ledger, "--hub", self._hub, "--token-file", self._of("worker")]
        words += ["--state", run.folder / "state" / worker_of(host), "--name", worker_of(host)]
        words += ["--engine", f"http://127.0.0.1:{ENGINE_PORT}", "--peer", f"127.0.0.1:{HTTP_PORT}"]
        words += ["--task", setup.task, "--slots", str(setup.slots)]
        run.daemons.start(worker_of(host), words, run.net.space(host))

    def _start_learner(self) -> None:
        run, setup, quoted = self.run, self._setup, json.dumps
        config = run.folder / "run.toml"
        config.write_text(
            CONFIG.format(
                base=quoted(str(self._base)), hub=quoted(self._hub), token=quoted(str(self._of("trainer"))),
                ledger=quoted(f"http://127.0.0.1:{LEDGER_HTTP_PORT}"), every=setup.publish_every, lr=setup.lr,
                bearer=quoted(str(run.folder / LEDGER / "http.token")), folder=quoted(str(run.folder / LEARNER)),
            )
        )  # fmt: skip
        words: Sequence[str | Path] = [str(setup.train_s), config]
        run.daemons.start(LEARNER, words, run.net.space(HUB), entry="netem.rl_lab.paced_learner")


def worker_of(host: str) -> str:
    return f"work-{host}"
