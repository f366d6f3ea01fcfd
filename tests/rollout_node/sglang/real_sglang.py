"""A real SGLang server on the CPU, from the environment of its own, and its clients."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from netem.fleet.processes import free_port
from tests.environments import ROOT, python_of
from tests.support.engine_server import EngineServer

STAND_INS = Path(__file__).with_name("cpu_stand_ins")
START_S, END_S = 900.0, 30.0
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
OPTIONS = ["--host", "127.0.0.1", "--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph",
           "--skip-tokenizer-init", "--skip-server-warmup", "--context-length", "256",
           "--max-total-tokens", "4096", "--sleep-on-idle"]  # fmt: skip
TOKENS = 24


def make_zoo_model(folder: Path, kind: str) -> Path:
    """A small model of a kind of ``model_zoo``."""
    script = Path(__file__).parents[1] / "vllm" / "model_zoo.py"
    subprocess.run([sys.executable, str(script), str(folder), kind], check=True, timeout=900, capture_output=True)
    return folder / kind


class SglangServer(EngineServer):
    """An SGLang server starts at once; ``wait`` until it answers."""

    def __init__(self, model: Path, folder: Path, *options: str, environment: Mapping[str, str] | None = None) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        port = free_port()
        self.options, self.environment = list(options), dict(environment or {})
        self.model, self.url = model, f"http://127.0.0.1:{port}"
        self.install, self.log = folder / "install.sock", folder / "server.log"
        self._command = ["nice", "-n", "5", str(python_of("sglang")), "-m", "sglang.launch_server"]
        self._command += ["--model-path", str(model), "--port", str(port), *OPTIONS, *options]
        self.start()

    def start(self) -> None:
        """Again, after its end; the port stays."""
        paths = os.pathsep.join([str(STAND_INS), str(ROOT)])
        given = {**os.environ, **ENVIRONMENT, **self.environment, "PYTHONPATH": paths}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                env=given | {"P2PCAST_SOCK": str(self.install)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """All its processes at once."""
        os.killpg(self.process.pid, signal.SIGKILL)

    def ended(self) -> None:
        """Wait until all its processes have ended, after one of them died."""
        self.process.wait(START_S)
        self.stop()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait(600)


async def generate(
    http: aiohttp.ClientSession, url: str, prompt: list[int], *, tokens: int = TOKENS, temperature: float = 0.0
) -> dict[str, Any]:
    """SGLang's answer: ``output_ids`` and ``meta_info``."""
    sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    async with http.post(url + "/generate", json=body) as response:
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
        return found
