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
import signal
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
SOUND_S = 600.0
"""Most seconds of a test of the unchanged code."""
HANGS_S, HANGS_FACTOR = 60.0, 8.0
"""With a mutation, a test may take so many seconds, and this many times its seconds without. Then it counts as failed:
the suite would not end either.
"""
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
        took_s: dict[str, float] = {}
        tests = sorted({m.test for m in chosen})
        broken = _all(copies, given.jobs, tests, lambda copy, test: _sound(copy, test, took_s))
        left = [m for m in chosen if m.test not in broken]
        missed = _all(copies, given.jobs, left, lambda copy, m: _noticed(copy, m, took_s[m.test]))
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


def _sound(copy: Path, test: str, took_s: dict[str, float]) -> bool:
    began = time.monotonic()
    code = _pytest(copy, test, SOUND_S)
    took_s[test] = time.monotonic() - began
    return code == 0


def _noticed(copy: Path, mutation: Mutation, took_s: float) -> bool:
    file = copy / mutation.file
    text, times = file.read_text(), file.stat()
    file.write_text(mutation.applied(text))
    try:
        return _pytest(copy, mutation.test, HANGS_S + HANGS_FACTOR * took_s) in (FAILED, None)
    finally:
        file.write_text(text)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def _pytest(copy: Path, test: str, deadline_s: float) -> int | None:
    """The exit code; None if the test did not end within ``deadline_s``."""
    # Bytecode of a mutation must not remain either.
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "0", test]
    with subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as run:
        try:
            return run.wait(deadline_s)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            return None


if __name__ == "__main__":
    sys.exit(main())
