"""Runs a script with its own vLLM engine in a child process: vLLM's CPU build cannot start one once numba is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

from p2pcast.daemon.user_code import child_environment
from p2pcast.ground.errors import LocalError
from rollout_node.vllm_plugin import SPARSE_VARIABLE

SETTINGS: Final = {
    SPARSE_VARIABLE: "1",
    # The script reaches the attention layers in its own process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
LAST_CHARACTERS: Final = 2000
"""Number of characters of the engine's output quoted in an error."""


def run_engine(module: str, order: Any) -> Any:
    """Run ``module``, a script that calls ``answer``, and return its answer to ``order``. Both are JSON documents.
    Raises LocalError if the engine fails.
    """
    command = [sys.executable, "-m", module]
    done = subprocess.run(
        command, input=json.dumps(order), env=child_environment() | SETTINGS, capture_output=True, text=True
    )
    if done.returncode:
        raise LocalError(f"the engine ended with {done.returncode}: {done.stderr[-LAST_CHARACTERS:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def answer(work: Callable[[Any], Any]) -> None:
    """Called by the script: read the order from standard input, and print the answer as standard output's last line."""
    print("\n" + json.dumps(work(json.load(sys.stdin))))
