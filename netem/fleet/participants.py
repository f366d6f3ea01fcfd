"""The participants of the demos and of `bench live`, and their command lines: those of a user on loopback, with folders
of the workspace.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from netem.fleet import traffic
from netem.fleet.fleet import Fleet, Loopback
from netem.fleet.processes import FEW_THREADS, ChildProcess, Processes, free_port
from netem.fleet.workspace import Workspace

FIRST_PEER = "p1"
"""The peer with the vLLM server."""
ENGINE_OPTIONS = ("--max-model-len", "64", "--enforce-eager", "--gpu-memory-utilization", "0.3")
SEQUENCES = 8
"""Least number of sequences that an engine computes at once."""
ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
"""vLLM ignores the CPU settings on a GPU."""
BACKGROUND = 5
"""Niceness of background work."""
KERNELS = "from p2pcast.codec.kernel_warmup import warm_up; warm_up()"
"""Compiles the kernels into numba's cache once instead of in every daemon."""
IMPORTS = "import vllm.entrypoints.openai.api_server"
"""Reads vLLM's many files into the disk cache while the trainer computes."""


@dataclass(frozen=True, slots=True)
class ParticipantOptions:
    """``trainer``: further options for ``netem.demo.train``. ``ahead``: the trainer writes all versions at once into a
    folder that the hub does not watch, and ``Participants.release`` moves them to the watched folder. Otherwise the
    trainer publishes its live weights.
    """

    folder: Path
    versions: int = 10
    peers: int = 5
    vllm: bool = True
    keep: bool = False
    pace_s: float = 1.0
    trainer: tuple[str, ...] = ()
    ahead: bool = False
    tensor_parallel: int = 1
    kv: str = "recompute"
    clients: int = traffic.CLIENTS
    graphs: bool = False
    """vLLM compiles the model and captures CUDA graphs, as it does by default. Its start takes longer."""

    @property
    def names(self) -> list[str]:
        return [f"p{number}" for number in range(1, self.peers + 1)]


class Programs:
    """Starts programs that several demos need. The constructor chooses the addresses."""

    def __init__(self, work: Workspace, processes: Processes) -> None:
        self._work, self._processes = work, processes
        self.fleet = Fleet(Loopback(), processes, work.root, work.memory, follows=False)
        self._engine_port = free_port()
        self.fresh_output = work.logs / "fresh.json"

    @property
    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self._engine_port}"

    def preparation(self, name: str, code: str) -> ChildProcess:
        """Optional work that shortens a later start; its failure does no other harm."""
        child = self._processes.start(
            name, [sys.executable, "-P", "-c", code], environment=FEW_THREADS, nice=2 * BACKGROUND
        )
        child.expected = True
        return child

    def fresh_engines(
        self, folders: Iterable[Path], prompts: Sequence[str], options: Mapping[str, str | int] | None = None
    ) -> ChildProcess:
        """Start new engines, one after the other; they write their answers to the probes into ``fresh_output``."""
        order = json.dumps({"prompts": prompts, "tokens": traffic.PROBE_TOKENS, "options": options or {}})
        command: list[str | Path] = [sys.executable, "-P", "-m", "netem.demo.fresh_engine", order, *folders]
        # A socket path without a listener: the plugin prepares computing as in the live engine, and installs nothing.
        environment = ENGINE_ENVIRONMENT | {"P2PCAST_SOCK": str(self._work.root / "no-peer.sock")}
        return self._processes.start("fresh", command, environment=environment, output=self.fresh_output)

    def _start_hub(self, base: Path, *words: str | Path) -> ChildProcess:
        return self.fleet.hub(*words, "--base", base, "--chains", "2")

    def _start_peer(self, name: str, *words: str | Path) -> ChildProcess:
        """A peer that writes each version into a folder. May be called again after its death."""
        return self.fleet.peer(name, *words, keep=1000)

    def _start_engine(
        self, base: Path, words: Iterable[str], environment: Mapping[str, str] | None = None
    ) -> ChildProcess:
        """The first peer's vLLM server."""
        command: list[str | Path] = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", base]
        command += ["--served-model-name", traffic.MODEL, "--host", "127.0.0.1", "--port", str(self._engine_port)]
        command += [*ENGINE_OPTIONS, *words, "--weight-transfer-config", '{"backend": "p2pcast"}']
        own = {"P2PCAST_SOCK": str(self._work.install_socket(FIRST_PEER)), **(environment or {})}
        return self._processes.start("vllm", command, environment=ENGINE_ENVIRONMENT | own)


class Participants(Programs):
    """Starts each participant of the broadcast's demo and of `bench live`."""

    def __init__(self, options: ParticipantOptions, work: Workspace, processes: Processes) -> None:
        super().__init__(work, processes)
        self._options = options
        self.go_file = work.root / "go"
        self.trainer_output = work.logs / "trainer.jsonl"
        self.trained = work.trained if options.ahead else work.train
        self.base = self.trained / "base"

    def trainer(self) -> ChildProcess:
        options = self._options
        module = "netem.demo.train" if options.ahead else "netem.demo.publisher_trainer"
        command: list[str | Path] = [sys.executable, "-P", "-m", module, "--out", self.trained]
        command += ["--versions", str(options.versions), "--threads", "1", *options.trainer]
        if not options.ahead:
            command += ["--pace-s", str(options.pace_s), "--go-file", self.go_file]
            command += ["--hub", self.fleet.place.hub, "--token-file", self.fleet.token]
        return self._processes.start(
            "trainer", command, environment=FEW_THREADS, nice=BACKGROUND, output=self.trainer_output
        )

    def release(self, step: int) -> Path:
        """Move a version that was trained ahead to the watched folder; returns its new path."""
        folder = self._work.train / f"step_{step}"
        return (self.trained / folder.name).rename(folder)

    def hub(self) -> ChildProcess:
        """Start the hub; it watches no folder if the trainer publishes to it directly."""
        if not self._options.ahead:
            return self._start_hub(self.base)
        self._work.train.mkdir(exist_ok=True)
        return self._start_hub(self.base, self._work.train)

    def peer(self, name: str) -> ChildProcess:
        """Start a peer. Every second peer has the base; the others get it from the swarm. May be called again after a
        peer's death.
        """
        words: list[str | Path] = []
        if self.has_engine(name):
            words += ["--install", f"vllm:{self.engine_url}", "--kv", self._options.kv]
        if self._options.names.index(name) % 2 == 0:
            words += ["--base", self.base]
        return self._start_peer(name, *words)

    def has_engine(self, name: str) -> bool:
        return self._options.vllm and name == FIRST_PEER

    def vllm(self, environment: Mapping[str, str] | None = None) -> ChildProcess:
        options = self._options
        words = ["--max-num-seqs", str(max(SEQUENCES, options.clients))]
        words += ["--tensor-parallel-size", str(options.tensor_parallel)]
        words += ["--no-enforce-eager"] if options.graphs else []
        return self._start_engine(self.base, words, environment)

    def fresh(self, folders: Iterable[Path]) -> ChildProcess:
        options = {"tensor_parallel_size": self._options.tensor_parallel, "enforce_eager": not self._options.graphs}
        return self.fresh_engines(folders, traffic.PROBES, options)
