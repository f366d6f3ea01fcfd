"""Who takes part in the demo and in `bench live`, and the command line of each: what a user would type, on loopback, with folders of the workspace."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from p2pcast.demo import traffic
from p2pcast.demo.processes import Child, Processes, free_port
from p2pcast.demo.workspace import Workspace

P2PCAST: tuple[str, ...] = (sys.executable, "-m", "p2pcast.cli")
FIRST_PEER = "p1"
"""The one with the vLLM server."""
ENGINE_OPTIONS = ("--max-model-len", "64", "--enforce-eager", "--gpu-memory-utilization", "0.3")
SEQUENCES = 8
"""That an engine computes at once, at least."""
ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
"""The CPU's settings mean nothing to vLLM on a GPU."""
FEW_THREADS = {"OMP_NUM_THREADS": "1"}
BACKGROUND = 5
"""Niceness of what may wait."""
KERNELS = "from p2pcast.codec.warm import warm_up; warm_up()"
"""Compiles them into numba's cache, once instead of in every daemon."""
IMPORTS = "import vllm.entrypoints.openai.api_server"
"""Reads vLLM's many files from disk while the trainer computes."""


@dataclass(frozen=True, slots=True)
class Options:
    """``trainer``: further options for ``p2pcast.demo.train``. ``ahead``: it trains all versions at once, into a folder that the hub does not
    watch; ``Cast.release`` moves them where it does. Otherwise the trainer publishes its live weights."""

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

    @property
    def names(self) -> list[str]:
        return [f"p{number}" for number in range(1, self.peers + 1)]


class Cast:
    """Starts each of them. The addresses are chosen here, when it is made."""

    def __init__(self, options: Options, work: Workspace, processes: Processes) -> None:
        self._options, self._work, self._processes = options, work, processes
        self._hub_port, self._engine_port = free_port(), free_port()
        self.go_file = work.root / "go"
        self.trainer_output = work.logs / "trainer.jsonl"
        self.fresh_output = work.logs / "fresh.json"
        self.trained = work.trained if options.ahead else work.train
        self.base = self.trained / "base"

    @property
    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self._engine_port}"

    def preparation(self, name: str, code: str) -> Child:
        """Something that makes a later start quicker, and whose failure costs no more than that."""
        child = self._processes.start(name, [sys.executable, "-c", code], environment=FEW_THREADS, nice=2 * BACKGROUND)
        child.expected = True
        return child

    def trainer(self) -> Child:
        options = self._options
        module = "p2pcast.demo.train" if options.ahead else "trainer_node.demo_trainer"
        command: list[str | Path] = [sys.executable, "-m", module, "--out", self.trained]
        command += ["--versions", str(options.versions), "--threads", "1", *options.trainer]
        if not options.ahead:
            command += ["--pace-s", str(options.pace_s), "--go-file", self.go_file]
            command += ["--hub", f"127.0.0.1:{self._hub_port}", "--token-file", self._work.state("hub") / "token"]
        return self._processes.start("trainer", command, environment=FEW_THREADS, nice=BACKGROUND, output=self.trainer_output)

    def release(self, step: int) -> Path:
        """A version that was trained ahead goes where the hub looks, as a trainer would put it there. Its new place."""
        folder = self._work.train / f"step_{step}"
        return (self.trained / folder.name).rename(folder)

    def hub(self) -> Child:
        """Without a folder to watch where the trainer publishes by itself."""
        command: list[str | Path] = [*P2PCAST, "seed", "--base", self.base, "--chains", "2"]
        if self._options.ahead:
            self._work.train.mkdir(exist_ok=True)
            command.insert(len(P2PCAST) + 1, self._work.train)
        command += ["--listen", f"127.0.0.1:{self._hub_port}", "--http", "127.0.0.1:0"]
        command += ["--state", self._work.state("hub"), "--shadow", self._work.shadow("hub")]
        return self._processes.start("hub", command, environment=FEW_THREADS)

    def peer(self, name: str) -> Child:
        """Every second one has the base; the others take it from the swarm. May be called again when it has died."""
        (self._work.state(name) / "daemon.json").unlink(missing_ok=True)  # a killed one left it
        command: list[str | Path] = [*P2PCAST, "join", f"127.0.0.1:{self._hub_port}", "--name", name]
        command += ["--token-file", self._work.state("hub") / "token", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        command += ["--state", self._work.state(name), "--shadow", self._work.shadow(name)]
        command += ["--install", f"safetensors:{self._work.installed(name)}", "--keep", "1000"]
        if self.has_engine(name):
            command += ["--install", f"vllm:{self.engine_url}", "--kv", self._options.kv]
        if self._options.names.index(name) % 2 == 0:
            command += ["--base", self.base]
        return self._processes.start(name, command, environment=FEW_THREADS)

    def has_engine(self, name: str) -> bool:
        return self._options.vllm and name == FIRST_PEER

    def vllm(self, environment: Mapping[str, str] | None = None) -> Child:
        command: list[str | Path] = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.base]
        command += ["--served-model-name", traffic.MODEL, "--host", "127.0.0.1", "--port", str(self._engine_port)]
        command += [*ENGINE_OPTIONS, "--max-num-seqs", str(max(SEQUENCES, self._options.clients))]
        command += ["--tensor-parallel-size", str(self._options.tensor_parallel)]
        command += ["--weight-transfer-config", '{"backend": "p2pcast"}']
        own = {"P2PCAST_SOCK": str(self._work.install_socket(FIRST_PEER)), **(environment or {})}
        return self._processes.start("vllm", command, environment=ENGINE_ENVIRONMENT | own)

    def fresh(self, folders: Iterable[Path]) -> Child:
        """New engines, one after the other; they answer the probes into ``fresh_output``."""
        order = json.dumps(
            {"prompts": traffic.PROBES, "tokens": traffic.PROBE_TOKENS, "tensor_parallel": self._options.tensor_parallel}
        )
        command: list[str | Path] = [sys.executable, "-m", "p2pcast.demo.fresh", order, *folders]
        # A socket that is not there: the plugin arranges the computing as in the live engine, and installs nothing.
        environment = ENGINE_ENVIRONMENT | {"P2PCAST_SOCK": str(self._work.root / "no-peer.sock")}
        return self._processes.start("fresh", command, environment=environment, output=self.fresh_output)
