"""Run the tests: ``python tests/suite.py [--workers N] [--proofs] [--repeat N] [--load N] [-- PYTEST OPTIONS]``.

Tests that are marked ``prove`` are whole proofs of which another test is a sample: ``--proofs`` runs these alone.
``--repeat`` and ``--load`` look for tests that fail now and then. The suite runs several times beside busy loops, and
each test that failed is named with the number of its failures.

Exit code 1 if a test failed in any of the runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAMPLE, PROOFS = "not prove", "prove"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests, several times and beside load if wanted.")
    parser.add_argument("--workers", type=int, default=2, help="processes that test files are spread over")
    parser.add_argument("--proofs", action="store_true", help="the tests that are marked `prove` alone")
    parser.add_argument("--repeat", type=int, default=1, help="runs, one after the other")
    parser.add_argument("--load", type=int, default=0, help="busy loops beside the tests")
    parser.add_argument("pytest", nargs="*", metavar="PYTEST", help="options and paths for pytest, after `--`")
    given = parser.parse_args()
    command = [sys.executable, "-m", "pytest", f"--numprocesses={given.workers}", "--dist=loadfile"]
    command += ["--no-loadscope-reorder", "-m", PROOFS if given.proofs else SAMPLE, *given.pytest]
    failed: Counter[str] = Counter()
    codes = set()
    # Each daemon of a test would otherwise compile all modules again: half of the CPU time of daemons' tests.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    compile_kernels()
    with busy_loops(given.load), tempfile.TemporaryDirectory(prefix="p2pcast-suite-") as folder:
        for number in range(given.repeat):
            results = Path(folder) / f"{number}.xml"
            codes.add(subprocess.run([*command, f"--junit-xml={results}"], cwd=ROOT).returncode)
            failed.update(failures(results))
    if given.repeat > 1:
        for test, times in failed.most_common():
            print(f"failed in {times} of {given.repeat} runs: {test}")
    return max(codes)


def compile_kernels() -> None:
    """Fill the cache of compiled kernels. In a fresh checkout, the first tests that start daemons would otherwise wait
    for the compiler, beside load for longer than their deadlines.
    """
    warm_up = "from p2pcast.codec.kernel_warmup import warm_up; warm_up([1, 2, 4])"
    subprocess.run([sys.executable, "-c", warm_up], cwd=ROOT, check=True)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that each keep a core busy while the block runs."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def failures(results: Path) -> set[str]:
    """Names of the tests that failed, from a JUnit document; none where pytest did not write one."""
    if not results.is_file():
        return set()
    cases = ElementTree.parse(results).iter("testcase")
    return {
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }


if __name__ == "__main__":
    sys.exit(main())
