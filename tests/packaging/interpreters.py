"""Interpreters of other Python releases: those of this machine, and Debian 13's python3.13 in a root folder of its own.

``python tests/packaging/interpreters.py [RELEASE…]`` prints those that are found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

RELEASES = ("3.11", "3.12", "3.13")
"""Releases of Python on which the wheel is tried."""
PROBE = "import ensurepip, sqlite3, ssl, sys, venv; print('%d.%d' % sys.version_info[:2])"


def found(release: str) -> str | None:
    """An interpreter of ``release`` that can make virtual environments; None: this machine has none."""
    return next((path for path in candidates(release) if release == answer(path)), None)


def candidates(release: str) -> Iterator[str]:
    if f"{sys.version_info.major}.{sys.version_info.minor}" == release:
        yield sys.executable
    if on_path := shutil.which(f"python{release}"):
        yield on_path
    homes = (os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), Path.home() / ".local" / "share" / "uv" / "python")
    for pattern, home in zip((f"versions/{release}.*", f"cpython-{release}.*"), homes, strict=True):
        yield from (str(one / "bin" / "python3") for one in sorted(Path(home).glob(pattern)))


def answer(python: str) -> str:
    try:
        run = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    return run.stdout.strip()


def trixie(folder: Path) -> Path:
    """A root folder with Debian 13 and its python3.13. Needs root and mmdebstrap."""
    command = ["mmdebstrap", "--quiet", "--variant=apt", "--include=python3", "trixie", str(folder)]
    subprocess.run(command, check=True, timeout=1200)
    return folder


if __name__ == "__main__":
    for name in sys.argv[1:] or RELEASES:
        print(name, found(name) or "is not on this machine")
