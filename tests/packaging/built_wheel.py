"""The wheel, an environment of its own that holds nothing else, and a run of its hub and peer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import safetensors.numpy

from tests.support.until import check_runs, wait_until

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"netem", "p2pcast", "rollout_node", "topology", "trainer_node"}
DEADLINE_S = 600.0
KEPT = ("PATH", "HOME", "LANG")
"""Variables of this process that a program in the wheel's environment sees."""


def build(folder: Path, python: str = sys.executable) -> Path:
    """The wheel of this checkout, in ``folder``. ``python`` has pip and setuptools."""
    source = folder / "source"
    for name in PACKAGES:  # pip leaves files where it builds
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = folder / "wheel"
    pip = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    subprocess.run([*pip, str(source)], check=True, timeout=DEADLINE_S)
    [found] = out.glob("*.whl")
    return found


def environment(wheel: Path, folder: Path, python: str = sys.executable) -> Path:
    """The interpreter of a new virtual environment that holds the wheel, without extras."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True, timeout=DEADLINE_S)
    made = folder / "bin" / "python"
    # Isolated: through a PYTHONPATH of the checkout, pip would find p2pcast installed already.
    pip, quiet = [str(made), "-I", "-m", "pip"], ["--disable-pip-version-check", "--quiet"]
    # Python 3.11 puts setuptools into new environments: the wheel has to work without.
    if list(folder.glob("lib/*/site-packages/setuptools")):
        subprocess.run([*pip, "uninstall", *quiet, "--yes", "setuptools"], check=True, timeout=DEADLINE_S)
    subprocess.run([*pip, "install", *quiet, str(wheel)], check=True, timeout=DEADLINE_S)
    return made


def clean() -> dict[str, str]:
    return {name: os.environ[name] for name in KEPT if name in os.environ}


@contextmanager
def daemon(command: Sequence[object], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon of the wheel, outside of this checkout, that ends with the block."""
    with log.open("wb") as output:
        words = [*map(str, command)]
        process = subprocess.Popen(words, cwd=log.parent, env=clean(), stderr=output, stdout=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def carry_a_version(p2pcast: Sequence[object], folder: Path, root: Path = Path("/")) -> None:
    """One version goes from a hub to a peer with all its bits, and the hub serves its page.

    ``p2pcast``: the command. ``root``: the folder, above ``folder``, that the command sees as ``/``.
    """
    checkpoint = folder / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    tensors = {"w": np.arange(5000, dtype=np.float32)}
    safetensors.numpy.save_file(tensors, checkpoint / "model.safetensors")
    (checkpoint / "STABLE").touch()
    here = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    seen = Path("/") / folder.relative_to(root)
    token, log = seen / "token", folder / "seed.log"
    hub = [seen / "checkpoints", "--state", seen / "hub", "--token-file", token]
    with daemon([*p2pcast, "seed", *hub, *here], log) as process:
        until(lambda: ", status at " in log.read_text(), process, log)
        address = log.read_text().split("listening on ")[1].split(",")[0]
        peer = ["--state", seen / "peer", "--token-file", token, "--install", f"safetensors:{seen / 'out'}"]
        with daemon([*p2pcast, "join", address, *here, *peer], folder / "join.log") as process:
            installed = folder / "out" / "step_1" / "model.safetensors"
            until(installed.exists, process, folder / "join.log")
            found = safetensors.numpy.load_file(installed)
            assert {name: value.tobytes() for name, value in found.items()} == {"w": tensors["w"].tobytes()}
            url = json.loads((folder / "hub" / "daemon.json").read_text())["http"]
            with urllib.request.urlopen(f"{url}/", timeout=60) as answer:
                assert answer.read().startswith(b"<!doctype html>")


def until(done: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits, as long as the process runs, which has to make ``done`` true."""
    wait_until(done, log.read_text, check=lambda: check_runs(process, log))
