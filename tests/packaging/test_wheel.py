"""The built wheel in an environment of its own: seed, join and the page work without torch or an engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

ROOT = Path(__file__).parents[2]
PACKAGES = {"netem", "p2pcast", "rollout_node", "topology", "trainer_node"}
DEADLINE_S = 600.0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:  # pip leaves files where it builds
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    subprocess.run([*pip, str(source)], check=True, timeout=DEADLINE_S)
    [found] = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def p2pcast(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=DEADLINE_S)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=DEADLINE_S)
    return folder / "bin" / "p2pcast"


@pytest.fixture
def started(p2pcast: Path, tmp_path: Path) -> Iterator[Any]:
    """Starts a command of the wheel, outside of this checkout."""
    processes: list[subprocess.Popen[bytes]] = []
    kept = ("PATH", "HOME", "LANG")

    def start(*words: object) -> None:
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        with (tmp_path / f"{words[0]}.log").open("wb") as log:
            command = [str(p2pcast), *map(str, words)]
            processes.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=log, stdout=log))

    yield start
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(DEADLINE_S)


def test_the_wheel_holds_the_program_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert not [name for name in names if "test" in name.rpartition("/")[2] and "/tests/" in name]
    assert {"p2pcast/page/static/index.html", "p2pcast/page/static/licences/uPlot.txt"} <= set(names)


def test_a_version_spreads_with_nothing_but_the_wheel(p2pcast: Path, started: Any, tmp_path: Path) -> None:
    without = (
        "import importlib.util, sys; sys.exit(any(map(importlib.util.find_spec, ['torch', 'vllm', 'transformers'])))"
    )
    assert subprocess.run([str(p2pcast.with_name("python")), "-c", without], check=False).returncode == 0
    folder = tmp_path / "checkpoints" / "step_1"
    folder.mkdir(parents=True)
    tensors = {"w": np.arange(5000, dtype=np.float32)}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "STABLE").touch()
    here = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    started("seed", tmp_path / "checkpoints", *here, "--state", tmp_path / "hub", "--token-file", tmp_path / "token")
    until(lambda: (tmp_path / "hub" / "daemon.json").exists(), tmp_path)
    log = (tmp_path / "seed.log").read_text()
    address = log.split("listening on ")[1].split(",")[0]
    install = f"safetensors:{tmp_path / 'out'}"
    state = tmp_path / "peer"
    started("join", address, *here, "--state", state, "--token-file", tmp_path / "token", "--install", install)
    until(lambda: (tmp_path / "out" / "step_1" / "model.safetensors").exists(), tmp_path)
    found = safetensors.numpy.load_file(tmp_path / "out" / "step_1" / "model.safetensors")
    assert {name: value.tobytes() for name, value in found.items()} == {"w": tensors["w"].tobytes()}
    url = json.loads((tmp_path / "hub" / "daemon.json").read_text())["http"]
    with urllib.request.urlopen(f"{url}/", timeout=60) as answer:
        assert answer.read().startswith(b"<!doctype html>")


def until(done: Any, logs: Path) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < until_s, "\n".join(log.read_text() for log in logs.glob("*.log"))
        time.sleep(0.05)
