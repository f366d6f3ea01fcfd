"""Run the whole proofs: ``python tests/prove.py [--minutes N] [PART…]``; ``make prove``.

``make test`` takes samples, so that it stays short. Here runs what it leaves out: the tests that are marked ``prove``,
each defence taken out, fuzzers for hours. A part consists of pieces, each of which is recorded when it passes; a piece
that fails leaves its record as it was. Pieces that never passed come first, then those that passed longest ago, so
several short calls prove as much as a long one. The page docs/notes/proofs.md shows for each part when and on what it
last passed.

Exit code 1 if a piece failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
RECORD = ROOT / "docs" / "notes" / "proofs.json"
PAGE = RECORD.with_suffix(".md")
PYTHON = sys.executable
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "P2PCAST_NO_SKIPS": "1"}
"""A skipped test fails, as in .ci/run: a proof with skipped tests is not recorded as passed."""
HEAD = """# When everything was last proved

`make prove` writes this page. A part consists of pieces, which pass one by one; the dates and commits are those of the
pieces that passed longest ago and most recently. Minutes are the sum over the pieces that passed. `make test` runs
samples of the same proofs.

| part | what it proves | pieces passed | between | minutes | machine |
|---|---|---|---|---|---|
"""
MARK = "pytest.mark.prove"
"""In the text of a file that has such tests."""
Piece = tuple[str, ...]
"""Python's arguments."""
Record = dict[str, dict[str, dict[str, Any]]]
"""Part → piece → where and when it last passed."""


@dataclass(frozen=True)
class Part:
    """``pieces``: by name."""

    proves: str
    pieces: Callable[[], dict[str, Piece]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run whole proofs, and record those that pass.")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no piece begins later than this")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    given = parser.parse_args()
    chosen = given.parts or list(PARTS)
    if unknown := [part for part in chosen if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    record = read()
    began_s, failed = time.monotonic(), []
    for part, name, arguments in due(record, chosen):
        if time.monotonic() - began_s > 60 * given.minutes:
            break
        print(f"{part}: {name}", flush=True)
        piece_s = time.monotonic()
        if subprocess.run([PYTHON, *arguments], cwd=ROOT, env=os.environ | ENVIRONMENT).returncode:
            failed.append(f"{part}: {name}")
            continue
        record.setdefault(part, {})[name] = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "minutes": round((time.monotonic() - piece_s) / 60, 1),
            "machine": machine(),
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        PAGE.write_text(page(record))
    for piece in failed:
        print(f"failed: {piece}", file=sys.stderr)
    return 1 if failed else 0


def due(record: Record, parts: list[str]) -> list[tuple[str, str, Piece]]:
    """Part, name and arguments of each piece, in the order in which they run."""
    found = [(part, name, arguments) for part in parts for name, arguments in PARTS[part].pieces().items()]
    return sorted(found, key=lambda piece: record.get(piece[0], {}).get(piece[1], {}).get("time", ""))


def read() -> Record:
    return json.loads(RECORD.read_text()) if RECORD.is_file() else {}


def page(record: Record) -> str:
    """The record as a table. Records of pieces that no longer exist do not count."""
    rows = []
    for name, part in PARTS.items():
        pieces, kept = part.pieces(), record.get(name, {})
        passed = sorted((kept[piece] for piece in pieces if piece in kept), key=itemgetter("time"))
        ends = [f"{one['time'][:10]} at {one['commit']}" for one in (*passed[:1], *passed[-1:])]
        minutes = f"{sum(one['minutes'] for one in passed):.0f}" if passed else ""
        machines = ", ".join(sorted({one["machine"] for one in passed}))
        between = " and ".join(dict.fromkeys(ends)) or "never"
        rows.append(
            f"| {name} | {part.proves} | {len(passed)} of {len(pieces)} | {between} | {minutes} | {machines} |\n"
        )
    return HEAD + "".join(rows)


def commit() -> str:
    """The commit that was tested; marked when files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RECORD.parent.relative_to(ROOT)}")
    return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {memory:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}"


# -- pieces


def tests_by_file() -> dict[str, Piece]:
    """Tests that are marked ``prove``: a piece for each file that has some."""
    files = sorted(file for file in TESTS.rglob("test_*.py") if MARK in file.read_text())
    return {
        str(file.relative_to(TESTS)): ("tests/suite.py", "--proofs", "--", str(file.relative_to(ROOT)))
        for file in files
    }


def mutations_by_table() -> dict[str, Piece]:
    return {
        name: ("tests/mutations/run.py", "--jobs", "2", "--table", name)
        for name in _names("mutations", "table", "TABLES")
    }


def decoders() -> dict[str, Piece]:
    return {name: ("tests/fuzz/run.py", "--seconds", "600", name) for name in _names("fuzz", "targets", "TARGETS")}


def one(*arguments: str) -> Callable[[], dict[str, Piece]]:
    return lambda: {"all": arguments}


TRIALS = ("leduc_trial", "staleness_trials", "rl_margin")
PARTS: dict[str, Part] = {
    "tests": Part("the tests that `make test` leaves out", tests_by_file),
    "mutations": Part("each defence of the security page taken out: its test fails", mutations_by_table),
    "decoders": Part("10 minutes of changed bytes for each decoder", decoders),
    "insiders": Part("200 000 messages by members of the run", one("tests/fuzz/semantic.py", "--count", "200000")),
    "research": Part(
        "trials of training: Leduc hold'em, and rollouts of an age",
        lambda: {name: ("-m", f"examples.research.{name}", "--seeds", "2") for name in TRIALS},
    ),
    # The deadline finds versions that never arrive, and not a slow machine.
    "soak": Part(
        "48 peers, 100 versions, a fault every second",
        one("-m", "tests.chaos.soak", "--versions", "100", "--deadline", "900"),
    ),
}


def _names(folder: str, module: str, table: str) -> list[str]:
    """Keys of a table of a module that imports its neighbours by their names."""
    code = f"import json, {module}; print(json.dumps(list({module}.{table})))"
    path = {"PYTHONPATH": os.pathsep.join([str(TESTS / folder), str(ROOT)])}
    done = subprocess.run([PYTHON, "-c", code], env=os.environ | path, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


if __name__ == "__main__":
    sys.exit(main())
