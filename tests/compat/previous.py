"""The previous release, built by pip from its pinned source archive, and its daemons as processes beside those of this
tree.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.until import wait_until

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
RELEASE = "0.1.0"
ARCHIVE = FOLDER / f"p2pcast-{RELEASE}.tar.xz"
DEADLINE_S = 600.0


def pinned(archive: Path = ARCHIVE) -> str:
    """The SHA-256 that README.md gives of the archive."""
    found = re.search(
        rf"^([0-9a-f]{{64}})  {re.escape(archive.name)}$", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    assert found is not None, f"README.md names no SHA-256 of {archive.name}"
    return found[1]


def unpacked(into: Path, archive: Path = ARCHIVE) -> Path:
    """The release's source tree; the archive is what README.md says it is."""
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == pinned(archive), (
        f"{archive} is not the one that README.md pins"
    )
    with tarfile.open(archive) as tar:
        tar.extractall(into, filter="data")
    return into / archive.name.removesuffix(".tar.xz")


def installed(into: Path) -> Path:
    """A folder for PYTHONPATH with the release's wheel installed in it. The dependencies come from this environment."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheels, site = into / "wheels", into / "site"
    source = unpacked(into)
    for words in (
        ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", wheels, source],
        [
            "install",
            "--no-deps",
            "--no-index",
            "--no-compile",
            "--target",
            site,
            wheels / f"p2pcast-{RELEASE}-py3-none-any.whl",
        ],
    ):
        done = subprocess.run([*pip, *map(str, words)], capture_output=True, text=True, timeout=DEADLINE_S, cwd=into)
        assert done.returncode == 0, done.stderr
    return site


class Daemon:
    """``p2pcast WORDS`` of the release that lies in ``site``; its log is in ``log``."""

    def __init__(self, site: Path, log: Path, words: Sequence[object]) -> None:
        self.log = log
        environment = {**os.environ, "PYTHONPATH": str(site)}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "p2pcast.cli", *map(str, words)],
                stdout=output,
                stderr=output,
                env=environment,
                cwd=log.parent,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def said(self, pattern: str) -> re.Match[str]:
        """Once it has."""

        def look() -> re.Match[str] | None:
            found = re.search(pattern, self.text)
            assert found or self.process.poll() is None, self.text
            return found

        match: re.Match[str] = wait_until(look, f"{self.log.stem} says {pattern!r}: {self.text}")
        return match

    def ended(self) -> int:
        """The process's exit code, once it has ended by itself."""
        return self.process.wait(DEADLINE_S)

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                return self.process.wait(DEADLINE_S)
            finally:
                self.process.kill()
        return self.process.returncode


class Releases:
    """Processes of both releases below one folder; ``end`` leaves none. ``site``: the previous release's."""

    def __init__(self, site: Path, folder: Path, shadows: Path) -> None:
        self.sites = {RELEASE: site, "this": ROOT}
        self.folder = folder
        self.shadows = shadows
        self.daemons: list[Daemon] = []
        (folder / "checkpoints").mkdir(exist_ok=True)

    def run(self, release: str, *words: object) -> subprocess.CompletedProcess[str]:
        """A command, to its end."""
        environment = {**os.environ, "PYTHONPATH": str(self.sites[release])}
        command = [sys.executable, "-m", "p2pcast.cli", *map(str, words)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, cwd=self.folder
        )

    def start(self, release: str, name: str, *words: object) -> Daemon:
        daemon = Daemon(self.sites[release], self.folder / f"{name}.log", words)
        self.daemons.append(daemon)
        return daemon

    def hub(self, release: str, *options: object, listen: str = "127.0.0.1:0") -> Daemon:
        """Words for ``seed``, and what they start."""
        places = [
            "--state",
            self.folder / "hub",
            "--shadow",
            self.shadows / "hub",
            "--token-file",
            self.folder / "token",
        ]
        return self.start(
            release,
            "hub",
            "seed",
            self.folder / "checkpoints",
            *places,
            "--listen",
            listen,
            "--http",
            "127.0.0.1:0",
            *options,
        )

    def peer(self, release: str, name: str, address: str, *options: object) -> Daemon:
        places = ["--state", self.folder / name, "--shadow", self.shadows / name, "--token-file", self.folder / "token"]
        target = f"safetensors:{self.folder / f'{name}-out'}"
        http = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        return self.start(release, name, "join", address, "--name", name, *places, *http, "--install", target, *options)

    def end(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.end()


def address_of(hub: Daemon) -> str:
    """Where a hub that has just been started listens."""
    return hub.said(r"run [0-9a-f]{12}, listening on ([\d.]+:\d+)")[1]
