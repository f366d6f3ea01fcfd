"""Who takes part in the demo, and the command line of each: what a user would type, on loopback, with folders of the workspace."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from p2pcast.demo import traffic
from p2pcast.demo.processes import Child, Processes, free_port
from p2pcast.demo.workspace import Workspace

P2PCAST: tuple[str, ...] = (sys.executable, "-m", "p2pcast.cli")
FIRST_PEER = "p1"
"""The one with the vLLM server."""
ENGINE_OPTIONS = ("--max-model-len", "64", "--max-num-seqs", "8", "--enforce-eager", "--gpu-memory-utilization", "0.3")
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
    """``trainer``: further options for ``p2pcast.demo.train``."""

    folder: Path
    versions: int = 10
    peers: int = 5
    vllm: bool = True
    keep: bool = False
    pace_s: float = 1.0
    trainer: tuple[str, ...] = ()

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
        self.base = work.train / "base"

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
        command: list[str | Path] = [sys.executable, "-m", "p2pcast.demo.train", "--out", self._work.train]
        command += ["--versions", str(options.versions), "--pace-s", str(options.pace_s), "--go-file", self.go_file]
        command += ["--threads", "1", *options.trainer]
        return self._processes.start("trainer", command, environment=FEW_THREADS, nice=BACKGROUND, output=self.trainer_output)

    def hub(self) -> Child:
        command: list[str | Path] = [*P2PCAST, "seed", self._work.train, "--base", self.base, "--chains", "2", "--plaintext"]
        command += ["--listen", f"127.0.0.1:{self._hub_port}", "--http", "127.0.0.1:0"]
        command += ["--state", self._work.state("hub"), "--shadow", self._work.shadow("hub")]
        return self._processes.start("hub", command, environment=FEW_THREADS)

    def peer(self, name: str) -> Child:
        """Every second one has the base; the others take it from the swarm. May be called again when it has died."""
        (self._work.state(name) / "daemon.json").unlink(missing_ok=True)  # a killed one left it
        command: list[str | Path] = [*P2PCAST, "join", f"127.0.0.1:{self._hub_port}", "--plaintext", "--name", name]
        command += ["--token-file", self._work.state("hub") / "token", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        command += ["--state", self._work.state(name), "--shadow", self._work.shadow(name)]
        command += ["--install", f"safetensors:{self._work.installed(name)}", "--keep", "1000"]
        if self.has_engine(name):
            command += ["--install", f"vllm:{self.engine_url}"]
        if self._options.names.index(name) % 2 == 0:
            command += ["--base", self.base]
        return self._processes.start(name, command, environment=FEW_THREADS)

    def has_engine(self, name: str) -> bool:
        return self._options.vllm and name == FIRST_PEER

    def vllm(self) -> Child:
        command: list[str | Path] = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.base]
        command += ["--served-model-name", traffic.MODEL, "--host", "127.0.0.1", "--port", str(self._engine_port)]
        command += [*ENGINE_OPTIONS, "--weight-transfer-config", '{"backend": "p2pcast"}']
        environment = ENGINE_ENVIRONMENT | {"P2PCAST_SOCK": str(self._work.install_socket(FIRST_PEER))}
        return self._processes.start("vllm", command, environment=environment)

    def fresh(self, folders: Iterable[Path]) -> Child:
        """New engines, one after the other; they answer the probes into ``fresh_output``."""
        order = json.dumps({"prompts": traffic.PROBES, "tokens": traffic.PROBE_TOKENS})
        command: list[str | Path] = [sys.executable, "-m", "p2pcast.demo.fresh", order, *folders]
        # A socket that is not there: the plugin arranges the computing as in the live engine, and installs nothing.
        environment = ENGINE_ENVIRONMENT | {"P2PCAST_SOCK": str(self._work.root / "no-peer.sock")}
        return self._processes.start("fresh", command, environment=environment, output=self.fresh_output)
