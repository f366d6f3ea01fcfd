"""Makes what a release consists of: ``python tests/packaging/make_dist.py [FOLDER]``; ``make dist``.

FOLDER (default: build/dist) then holds the wheel, and the bill of materials once more beside it. Inside the wheel the
bill lies in ``.dist-info/sboms``, and the pages for ``man`` where an installation puts them in ``share/man/man1``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bill_of_materials import bill
from built_wheel import DEADLINE_S, ROOT, build, environment
from man_pages import write_man_pages


def made(folder: Path, wheel: Path, python: Path) -> Path:
    """The wheel with bill and pages, in ``folder``. ``python``: the interpreter of an environment with the wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as within:
        run("unpack", "--dest", within, wheel)
        [unpacked] = Path(within).iterdir()
        [info] = unpacked.glob("*.dist-info")
        (info / "sboms").mkdir()
        text = bill(python)
        (info / "sboms" / "p2pcast.cdx.json").write_text(text)
        write_man_pages(unpacked / f"{info.stem}.data" / "data" / "share" / "man" / "man1")
        run("pack", "--dest-dir", folder, unpacked)
        (folder / f"{info.stem}.cdx.json").write_text(text)
        return folder / wheel.name


def run(*words: object) -> None:
    command = [sys.executable, "-m", "wheel", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "dist"
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        plain = build(Path(temporary))
        print(made(out, plain, environment(plain, Path(temporary) / "environment")))
