"""The end of a rank's process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from netem.fleet.processes import free_port

LEAVES = """
import atexit
from trainer_node.learning.trainer_ranks import leave
atexit.register(print, "Python shuts down")
print("flushed", end="")
leave(3)
"""
CONFIG = """
[model]
path = "model"
[hub]
address = "127.0.0.1:1"
[ledger]
url = "http://127.0.0.1:1"
[checkpoint]
folder = "taken"
"""


def ended(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])} | environment
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


def test_rank_leaves_without_pythons_shutdown(tmp_path: Path) -> None:
    done = ended(tmp_path, "-c", LEAVES)
    assert (done.returncode, done.stdout) == (3, "flushed"), done.stderr


def test_rank_of_torchrun_ends_with_the_exit_code_of_its_error(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "taken").touch()
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = ended(tmp_path, "-m", "p2pcast.cli", "learn", "run.toml", GLOO_SOCKET_IFNAME="lo", **place)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("p2pcast: cannot create taken")
