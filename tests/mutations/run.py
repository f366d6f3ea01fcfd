"""Takes out the defences of docs/design/security.md one by one and runs the test that must notice: ``python
tests/mutations/run.py [--jobs N] [--table NAME] [PART…]``.

Each job has its own copy of the repository. It replaces a mutation's text in the copy, runs the test, and restores the
text; the repository itself is never changed. Every test first runs unchanged, since a failing test would prove nothing.
An unnoticed mutation is a defence without an effective test. NAME: only mutations of this table. PART: only mutations
with this text in attack, file or test.

Exit code 1 if a mutation was not noticed.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from mutation import Mutation
from table import MUTATIONS, TABLES

ROOT = Path(__file__).resolve().parents[2]
FAILED = 1
"""Pytest's exit code after test failures. Any other code says nothing about the defence."""
DEADLINE_S = 300.0
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "bench-out", "build", "fuzz-out", "walk")


def main() -> int:
    options = argparse.ArgumentParser(description="Take out defences one at a time, and check that tests notice.")
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--table", choices=list(TABLES))
    options.add_argument("parts", nargs="*", metavar="PART")
    given = options.parse_args()
    chosen = [
        m
        for m in (TABLES[given.table] if given.table else MUTATIONS)
        if not given.parts or any(p in text for p in given.parts for text in (m.attack, m.file, m.test))
    ]
    if not chosen:
        print("no mutation contains this text", file=sys.stderr)
        return 2
    # The copies take the compiled kernels over. Daemons that compile would not start within the tests' deadlines.
    compiling = "from tests.suite import compile_kernels; compile_kernels()"
    subprocess.run([sys.executable, "-c", compiling], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory(prefix="p2pcast-mutations-") as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for n in range(given.jobs):
            copy = Path(folder) / str(n)
            # Keep the files' times, so that numba's compiled code stays valid in the copies.
            shutil.copytree(ROOT, copy, ignore=LEFT_OUT, symlinks=True)
            copies.put(copy)
        broken = _all(copies, given.jobs, sorted({m.test for m in chosen}), lambda copy, test: _sound(copy, test))
        missed = _all(
            copies, given.jobs, [m for m in chosen if m.test not in broken], lambda copy, m: _noticed(copy, m)
        )
    for test in broken:
        print(f"FAILS AS IT IS   {test}")
    for mutation in missed:
        taken_out = mutation.old.strip().splitlines()[0]
        print(f"NOT NOTICED      {mutation.attack}: {mutation.file} without {taken_out!r} ({mutation.test})")
    noticed = len(chosen) - len(missed) - sum(m.test in broken for m in chosen)
    print(f"{noticed} of {len(chosen)} mutations were noticed")
    return 1 if broken or missed else 0


def _all(copies, jobs, work, good):
    """The failures of ``good`` over ``work``, each tried in a copy that no other thread uses."""
    left: queue.SimpleQueue = queue.SimpleQueue()
    bad = []
    for each in work:
        left.put(each)

    def run() -> None:
        copy = copies.get()
        try:
            while True:
                each = left.get_nowait()
                began = time.monotonic()
                fine = good(copy, each)
                print(f"{'ok ' if fine else 'NOT'} {time.monotonic() - began:5.1f} s  {each}", flush=True)
                if not fine:
                    bad.append(each)
        except queue.Empty:
            copies.put(copy)

    threads = [threading.Thread(target=run) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return bad


def _sound(copy: Path, test: str) -> bool:
    return _pytest(copy, test) == 0


def _noticed(copy: Path, mutation: Mutation) -> bool:
    file = copy / mutation.file
    text, times = file.read_text(), file.stat()
    file.write_text(mutation.applied(text))
    try:
        return _pytest(copy, mutation.test) == FAILED
    finally:
        file.write_text(text)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def _pytest(copy: Path, test: str) -> int:
    # Bytecode of a mutation must not remain either.
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--timeout",
        str(int(DEADLINE_S)),
        test,
    ]
    try:
        return subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=2 * DEADLINE_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return -1


if __name__ == "__main__":
    sys.exit(main())
