"""Two source trees side by side: this one, and a baseline from a source archive, a folder, or a revision of this
repository.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from netem.bench import step_run
from p2pcast.files.atomic_files import atomic_folder, explained
from p2pcast.ground.errors import LocalError, UsageError

ROOT: Final = Path(__file__).resolve().parents[2]
PINNED: Final = ROOT / "tests" / "compat"
BASELINE: Final = PINNED / "p2pcast-0.1.0.tar.xz"
UNPACKED: Final = ROOT / "bench-out" / "guard"
"""Kept between runs, since it holds numba's compiled code of a tree."""
RUN_S: Final = 300.0
"""Limit for one run of one bar; each takes a tenth of it on two quiet cores."""
WARM_UP: Final = """
try:
    from p2pcast.codec.kernel_warmup import warm_up
except ImportError:
    from p2pcast.codec.warm import warm_up  # its place in release 0.1.0
warm_up()
"""
LINES: Final = 20
"""Last output lines of a failed run that are shown."""


@dataclass(frozen=True, slots=True)
class SourceTree:
    """``ident``: digest of the archive, or a commit."""

    name: str
    path: Path
    ident: str

    @property
    def environment(self) -> dict[str, str]:
        """Only this tree's code is importable, even if the work folder is our repository."""
        return step_run.with_path(self.path)

    def run(self, folder: Path, *words: object) -> str:
        """Run ``python WORDS`` with this tree's code to its end; returns its stdout. Raises LocalError."""
        ended = step_run.run([sys.executable, *words], RUN_S, folder=folder, environment=self.environment)
        if ended.overdue:
            raise LocalError(f"{self.name}: {ended.overdue}")
        if ended.code:
            raise LocalError(f"{self.name}: " + "\n".join(ended.error[-LINES:] or [ended.why]))
        return "\n".join(ended.out)

    def bench(self, folder: Path, name: str, *words: object) -> dict[str, Any]:
        """The document of a bench. Raises LocalError."""
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".json") as file:
            self.run(folder, "-m", *step_run.bench_words(name, self.path), *words, "--output", file.name)
            document: dict[str, Any] = json.loads(Path(file.name).read_text())
            return document

    def warm(self, folder: Path) -> None:
        """Compile what is compiled at the first use, so that no bar pays for it."""
        self.run(folder, "-c", WARM_UP)


def ours() -> SourceTree:
    return SourceTree("ours", ROOT, commit())


def commit() -> str:
    """Commit of this tree, with a ``+`` if files differ from it. Empty outside of a repository."""
    if (named := _git("rev-parse", "--short=12", "HEAD")) is None:
        return ""
    return named.decode().strip() + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def baseline(given: str | None) -> SourceTree:
    """A source archive (default: the pinned one), a source folder, or a revision. Raises UsageError, LocalError."""
    path = BASELINE if given is None else Path(given)
    if path.is_dir():
        return SourceTree(path.name, path.resolve(), str(path.resolve()))
    if path.is_file():
        with explained("read", path):
            data = path.read_bytes()
        check_pinned(path, data)
        return _unpacked(path.name.removesuffix(".tar.xz"), data)
    archived = _git("archive", "--format=tar", f"--prefix={given}/", str(given))
    if archived is None:
        raise UsageError(f"{given}: neither a source archive, nor a source folder, nor a revision of this repository")
    return _unpacked(str(given), archived)


def check_pinned(path: Path, data: bytes) -> None:
    """Check an archive of tests/compat against its digest in README.md there. Raises LocalError."""
    if path.resolve().parent == PINNED:
        found = re.search(
            rf"^([0-9a-f]{{64}})  {re.escape(path.name)}$", (PINNED / "README.md").read_text(), re.MULTILINE
        )
        if found is None or found[1] != hashlib.sha256(data).hexdigest():
            raise LocalError(f"{path} is not the archive whose SHA-256 is in {PINNED / 'README.md'}: restore it")


def _unpacked(name: str, data: bytes) -> SourceTree:
    ident = hashlib.sha256(data).hexdigest()
    final = UNPACKED / ident[:16]
    if not final.exists():
        with explained("create", UNPACKED):
            UNPACKED.mkdir(parents=True, exist_ok=True)
        with atomic_folder(final) as part, tarfile.open(fileobj=BytesIO(data)) as tar:
            tar.extractall(part, filter="data")
    [top] = [path for path in final.iterdir() if path.is_dir()]
    return SourceTree(name, top, ident)


def _git(*words: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True)
    except OSError:
        return None
    return None if done.returncode else done.stdout
