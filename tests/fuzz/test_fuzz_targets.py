"""A short run of every fuzz target, with bounds checks in the kernels, in a separate process. ``make fuzz`` runs
longer, with words of every width.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "run.py"
CELLS = ("context", "flat", "dense", "encoders", "squash")
DOCUMENTS = ("layout", "p2pd", "records", "safetensors", "patch")
SOCKETS = ("stream", "install", "text")
ROLLOUTS = ("rollouts", "request", "api")


def fuzz(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, RUN, "--found", folder, *map(str, words)], capture_output=True, text=True)


@pytest.mark.parametrize(
    "targets", [CELLS, DOCUMENTS, SOCKETS, ROLLOUTS], ids=["cells", "documents", "sockets", "rollouts"]
)
def test_nothing_breaks_a_decoder(tmp_path, targets):
    done = fuzz(tmp_path, *targets, "--seed", 1, "--inputs", 1000, "--seconds", 4, "--widths", 2)
    assert done.returncode == 0, done.stderr
    tried = dict(line.split(": ") for line in done.stdout.splitlines())
    assert list(tried) == list(targets)
    assert all(int(text.split()[0]) > 0 for text in tried.values())


BROKEN = """
import sys
sys.argv = ["run.py", "flat", "--seed", "1", "--inputs", "50", "--found", {found!r}]
sys.path.insert(0, {folder!r})
import os
os.environ["NUMBA_BOUNDSCHECK"] = "1"
os.environ["NUMBA_CACHE_DIR"] = {found!r}
import dataclasses, numba, numpy, targets, run

@numba.njit
def read(array, at):
    return array[at]

def {name}(data):
    {body}

targets.TARGETS["flat"] = targets.Target(lambda: [b"seed"], {name}, (1 << 16, 1))
sys.exit(run.main())
"""


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("outside", "len(data) == 4 or read(numpy.zeros(3), len(data) + 3)", "IndexError"),
        ("greedy", "len(data) == 4 or bytearray(1 << 20)", "more than"),
        ("another", "len(data) == 4 or {}[data]", "KeyError"),
    ],
)
def test_broken_decoder_is_noticed(tmp_path, name, body, said):
    script = BROKEN.format(found=str(tmp_path), folder=str(RUN.parent), name=name, body=body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert said in done.stderr
    assert [path.name[:5] for path in tmp_path.iterdir() if path.is_file()] == ["flat-"]
