"""The participants of the RL demo, and their command lines: those of a user on loopback."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from netem.fleet.participants import FIRST_PEER, Programs
from netem.fleet.processes import ChildProcess, Processes
from netem.fleet.rollout_processes import LEARNER, LEDGER, Batches, Tables, configuration, start_ledger
from netem.fleet.workspace import Workspace

TASK: Final = "sums,held_out=10"
VOCABULARY: Final = 16
LOGPROBS: Final = "processed_logprobs"
SLOTS: Final = 32
"""Plays of one worker at the same time."""
ENGINE = "vllm"
BASE: Final = """
from pathlib import Path
from netem.fleet.small_model import make_small_model
make_small_model(Path({folder!r}), {vocabulary}, seed={seed}, dtype="bfloat16")
"""
HEAD: Final = """\
# The demo's run, as `p2pcast learn` reads it; `p2pcast learn {file} --print-config` shows the rest.
"""


@dataclass(frozen=True, slots=True)
class RlOptions:
    """``steps``: with the ordinary learning rate, then ``quiet_steps`` with ``quiet_lr``, at which few words change.
    ``sft``: supervised steps before the first rollout. ``seed``: of the first model and of the learner.
    """

    folder: Path
    steps: int = 60
    quiet_steps: int = 6
    groups: int = 32
    group_size: int = 8
    staleness: int = 2
    peers: int = 4
    workers: int = 2
    sft: int = 300
    lr: float = 3e-4
    lr_warmup_steps: int = 10
    quiet_lr: float = 1e-6
    seed: int = 0
    prompts_seed: int = 0
    keep: bool = False

    @property
    def peer_names(self) -> list[str]:
        return [f"p{number}" for number in range(1, self.peers + 1)]

    @property
    def worker_names(self) -> list[str]:
        return [f"w{number}" for number in range(1, self.workers + 1)]

    @property
    def last_step(self) -> int:
        return self.steps + self.quiet_steps


class RlParticipants(Programs):
    """Starts each participant. The constructor chooses the addresses. ``task``: of ledger, workers and learner."""

    def __init__(self, options: RlOptions, work: Workspace, processes: Processes, task: str = TASK) -> None:
        super().__init__(work, processes)
        self._options, self._task = options, task
        self.base = work.root / "base"
        self.config = work.root / "run.toml"
        self.run = work.root / "run"
        """The learner's folder."""
        self.exported = work.trained

    @property
    def metrics(self) -> Path:
        return self.run / "metrics.jsonl"

    @property
    def ledger_database(self) -> Path:
        return self._work.state(LEDGER) / "ledger.db"

    def write_base(self) -> ChildProcess:
        return self.preparation(
            "base", BASE.format(folder=str(self.base), vocabulary=VOCABULARY, seed=self._options.seed)
        )

    def hub(self) -> ChildProcess:
        return self._start_hub(self.base)

    def peer(self, name: str) -> ChildProcess:
        """May be called again after a peer's death."""
        return self._start_peer(name, *(["--install", f"vllm:{self.engine_url}"] if name == FIRST_PEER else []))

    def engine(self) -> ChildProcess:
        words = ["--enable-scale-out", "--logprobs-mode", LOGPROBS, "--generation-config", "vllm"]
        return self._start_engine(self.base, [*words, "--max-num-seqs", str(SLOTS * self._options.workers)])

    def ledger(self, hub_url: str) -> ChildProcess:
        options = self._options
        batches = Batches(self._task, options.groups, options.group_size, options.staleness)
        words = ("--last-step", str(options.last_step), "--seed", str(options.prompts_seed))
        return start_ledger(self.fleet, batches, hub_url.removeprefix("http://"), "127.0.0.1:0", *words)

    def worker(self, name: str, ledger_url: str, peer_url: str, *words: str) -> ChildProcess:
        command: list[str | Path] = ["work", ledger_url.removeprefix("http://"), "--task", self._task, *words]
        command += ["--bearer-file", self._work.state(LEDGER) / "worker.token", "--slots", str(SLOTS)]
        command += ["--engine", self.engine_url, "--peer", peer_url.removeprefix("http://"), "--name", name]
        return self.fleet.start(name, *command)

    def configure(self, ledger_url: str) -> None:
        """Write the learner's configuration."""
        options = self._options
        tables: Tables = {
            "task": {"name": self._task},
            "sft": {"steps": options.sft},
            "train": {"publish-every": 1, "packing": "padded", "seed": options.seed},
            "optimizer": {"lr": options.lr, "warmup-steps": options.lr_warmup_steps},
            "checkpoint": {"folder": self.run, "every": 5},
            "export": {"folder": self.exported, "every": 1, "keep": 10000},
        }
        text = configuration(self.fleet, self.base, self.fleet.token, ledger_url, tables)
        self.config.write_text(HEAD.format(file=self.config.name) + text)

    def learner(self, *overrides: str) -> ChildProcess:
        """``overrides``: TABLE.KEY=VALUE. May be called again after the learner's death."""
        return self.fleet.start(LEARNER, "learn", self.config, *(word for one in overrides for word in ("--set", one)))

    def fresh(self, folders: Iterable[Path], prompts: Sequence[str]) -> ChildProcess:
        return self.fresh_engines(folders, prompts, {"logprobs_mode": LOGPROBS})
