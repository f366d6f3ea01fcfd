"""The unchanged example of a SGLang server, with a real hub, peer and training loop."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from netem.fleet.processes import free_port
from tests.environments import ROOT, python_of
from tests.examples.test_examples import EXAMPLES, STEPS, Stage, stage

__all__ = ["stage"]
SGLANG = ROOT / "tests" / "rollout_node" / "sglang" / "cpu_stand_ins"
OPTIONS = ["--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph", "--skip-tokenizer-init",
           "--skip-server-warmup", "--max-total-tokens", "4096"]  # fmt: skip


@pytest.mark.prove  # tests/rollout_node/sglang/test_sglang_server.py is the sample
def test_sglang_server_follows_the_loop(stage: Stage) -> None:
    state = stage.folder / "engine"
    environment = {
        "HUB": stage.hub,
        "TOKEN_FILE": str(stage.token),
        "MODEL": str(stage.base),
        "PORT": str(free_port()),
        "STATE": str(state),
        "PYTHON": str(python_of("sglang")),
        "PYTHONPATH": os.pathsep.join([str(SGLANG), str(ROOT)]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    stage.processes.start("server", [EXAMPLES / "sglang_server.sh", *OPTIONS], environment=environment)
    stage.until("the engine has the base", lambda: stage.status("engine").get("committed") == "0.0")
    stage.train(sys.executable, str(EXAMPLES / "plain_loop.py"))
    verify = [sys.executable, "-m", "p2pcast.cli", "verify", "--live", "--state", str(state), "--json"]
    verified = subprocess.run(verify, capture_output=True, text=True, timeout=900)
    assert verified.returncode == 0, verified.stderr
    assert f"0.{STEPS}" in verified.stdout
    stage.processes.stop("server")
    assert not stage.processes.children["server"].alive
