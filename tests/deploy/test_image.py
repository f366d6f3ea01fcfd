"""The container image: built without an image registry, and run with the restrictions of the pods.

Needs Debian's buildah, mmdebstrap, podman and runc.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.deploy.deploy_files import ROOT
from tests.support.until import wait_until

pytestmark = [pytest.mark.root, pytest.mark.prove]  # tests/packaging/test_wheel.py and test_pod_commands.py are samples
BUILD = ROOT / "deploy" / "image" / "build.sh"
USER = 10001
DEADLINE_S = 900.0
RESTRICTED = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "all", "--security-opt", "no-new-privileges"]
"""As ``securityContext`` of the manifests."""
HERE = ["--network", "host", "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"]


class Podman:
    def __init__(self, folder: Path) -> None:
        """``folder``: a short path, of which podman takes at most 50 characters."""
        stores = ["--root", f"{folder}/store", "--runroot", f"{folder}/run", "--storage-driver", "vfs"]
        self.words = ["podman", *stores, "--runtime", "runc", "--cgroup-manager", "cgroupfs"]

    def __call__(self, *words: object) -> str:
        run = subprocess.run([*self.words, *map(str, words)], capture_output=True, text=True, timeout=DEADLINE_S)
        assert run.returncode == 0, run.stderr
        return run.stdout

    def start(self, name: str, *words: object, volumes: dict[Path, str]) -> None:
        """A container that runs in the background."""
        mounts = [word for path, inside in volumes.items() for word in ("--volume", f"{path}:{inside}")]
        self(
            "run",
            "--detach",
            "--name",
            name,
            *HERE,
            *RESTRICTED,
            "--env",
            "HOME=/tmp",
            *mounts,
            "localhost/p2pcast",
            *words,
        )


@pytest.fixture
def podman(tmp_path: Path) -> Iterator[Podman]:
    for tool in ("buildah", "mmdebstrap", "podman", "runc"):
        assert shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin"), f"{tool} is missing: apt-get install {tool}"
    archive = tmp_path / "p2pcast.tar"
    built = subprocess.run(
        [str(BUILD), str(archive)], env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr[-4000:]
    with tempfile.TemporaryDirectory(prefix="p2pcast-") as folder:
        made = Podman(Path(folder))
        made("load", "-q", "-i", archive)
        yield made
        made("rm", "--force", "--time", "20", "--all")
        made("rmi", "--force", "--all")


def wait(holds: Callable[[], bool], podman: Podman, *names: str) -> None:
    def check() -> None:
        running = podman("ps", "--format", "{{.Names}}").split()
        assert set(names) <= set(running), [podman("logs", name) for name in names]

    wait_until(holds, check=check)


def test_version_travels_between_restricted_containers(podman: Podman, tmp_path: Path) -> None:
    assert podman("run", "--rm", *HERE, *RESTRICTED, "--entrypoint", "id", "localhost/p2pcast", "-u").strip() == str(
        USER
    )
    folders = {name: tmp_path / name for name in ("hub", "peer", "rollout")}
    for folder in folders.values():
        folder.mkdir(mode=0o700)
        os.chown(folder, USER, USER)
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    podman.start(
        "hub", "seed", "/checkpoints", "--state", "/state", "--listen", "127.0.0.1:17077", "--http", "127.0.0.1:17078",
        volumes={folders["hub"]: "/state", checkpoints: "/checkpoints"},
    )  # fmt: skip
    wait((folders["hub"] / "token").exists, podman, "hub")
    shutil.copy(folders["hub"] / "token", tmp_path / "token")
    os.chown(tmp_path / "token", USER, USER)
    podman.start(
        "peer", "join", "127.0.0.1:17077", "--state", "/state", "--token-file", "/token", "--install",
        "safetensors:/rollout",
        volumes={folders["peer"]: "/state", folders["rollout"]: "/rollout", tmp_path / "token": "/token"},
    )  # fmt: skip
    for step in range(3):
        weights = np.random.default_rng(0).standard_normal(100_000).astype(np.float16)
        weights.view(np.uint16)[np.random.default_rng(step).random(weights.size) < 0.01] += step
        folder = checkpoints / f"step_{step}"
        folder.mkdir()
        save_file({"model.weight": weights.reshape(100, 1000)}, folder / "model.safetensors")
        (folder / "model.safetensors").chmod(0o644)
        (folder / "STABLE").touch()
        wait((folders["rollout"] / f"step_{step}" / "STABLE").exists, podman, "hub", "peer")
        found = load_file(folders["rollout"] / f"step_{step}" / "model.safetensors")
        assert found["model.weight"].tobytes() == weights.tobytes()
    for name in ("peer", "hub"):
        podman("stop", "--time", "60", name)
        assert podman("inspect", "--format", "{{.State.ExitCode}}", name).strip() == "0"
