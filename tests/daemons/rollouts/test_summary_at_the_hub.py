"""The hub's process shows the rollouts of a ledger's process."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support.until import check_runs, wait_until

END_S = 600.0


@contextmanager
def daemon(folder: Path, name: str, *words: str) -> Iterator[str]:
    """The URL of its HTTP server, once it answers."""
    with open(folder / f"{name}.log", "ab") as log:
        process = subprocess.Popen([sys.executable, "-m", "p2pcast.cli", *words], stdout=log, stderr=log)
    try:
        file = folder / name / "daemon.json"
        wait_until(file.exists, f"{name} answers", check=lambda: check_runs(process, folder / f"{name}.log"))
        yield str(json.loads(file.read_text())["http"])
    finally:
        process.kill()
        process.wait()


def status(url: str) -> Any:
    with urllib.request.urlopen(f"{url}/status", timeout=600) as answer:
        return json.load(answer)


def test_a_hub_shows_the_rollouts_of_its_ledger(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "step_0"
    folder.mkdir(parents=True)
    save_file({"w": np.zeros(64, "<f4")}, folder / "model.safetensors")
    (folder / "STABLE").touch()
    hub_words = [
        "seed", str(folder.parent), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
        "--token-file", str(tmp_path / "token"), "--state", str(tmp_path / "hub"), "--shadow", str(tmp_path / "shadow"),
    ]  # fmt: skip
    with daemon(tmp_path, "hub", *hub_words) as hub:
        assert status(hub)["rollouts"] is None
        ledger_words = [
            "ledger", "--task", "sums", "--http", "127.0.0.1:0", "--state", str(tmp_path / "ledger"),
            "--hub-http", hub.removeprefix("http://"), "--hub-bearer-file", str(tmp_path / "hub" / "http.token"),
            "--staleness", "5",
        ]  # fmt: skip
        with daemon(tmp_path, "ledger", *ledger_words):
            found = wait_until(lambda: status(hub)["rollouts"], (tmp_path / "ledger.log").read_text)
    assert (found["task"], found["staleness"], found["workers"]) == ("sums", 5, 0)
    assert found["age_s"] < END_S
