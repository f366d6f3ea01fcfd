"""Run the whole proofs: ``python tests/prove.py [PART…]``; ``make prove``.

``make test`` takes samples, so that it stays short. Here everything runs: all tests, each defence taken out, fuzzers
for hours, tests beside load. The page docs/notes/proofs.md records for each part when and on what it last passed. A
part that fails leaves its record as it was.

Exit code 1 if a part failed.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "notes" / "proofs.json"
PAGE = RECORD.with_suffix(".md")
PYTHON = sys.executable
PARTS: dict[str, tuple[str, list[str]]] = {
    "suite": ("every test, those marked `prove` too", ["tests/suite.py", "--every"]),
    "mutations": (
        "each defence of the security page taken out: its test fails",
        ["tests/mutations/run.py", "--jobs", "2"],
    ),
    "decoders": ("10 minutes of changed bytes for each decoder", ["tests/fuzz/run.py", "--seconds", "600"]),
    "insiders": ("200 000 messages by members of the run", ["tests/fuzz/semantic.py", "--count", "200000"]),
    "soak": (
        "48 peers, 100 versions, a fault every second",
        ["-m", "p2pcast.cli", "bench", "soak", "--versions", "100"],
    ),
    "flaky": ("the suite 5 times beside 2 busy loops", ["tests/suite.py", "--repeat", "5", "--load", "2"]),
}
"""Part → (what it proves, Python's arguments)."""
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "P2PCAST_NO_SKIPS": "1"}
"""A skipped test fails, as in .ci/run: a proof with skipped tests is not recorded as passed."""
HEAD = """# When everything was last proved

`make prove` writes this page: for each part, when and on what it last passed. `make test` runs samples of the same
proofs.

| part | what it proves | last passed | commit | minutes | machine |
|---|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run whole proofs, and record those that pass.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    chosen = parser.parse_args().parts or list(PARTS)
    if unknown := [part for part in chosen if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    failed = []
    for part in chosen:
        began = time.monotonic()
        done = subprocess.run([PYTHON, *PARTS[part][1]], cwd=ROOT, env=os.environ | ENVIRONMENT)
        if done.returncode:
            failed.append(part)
            continue
        record[part] = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": commit(),
            "minutes": round((time.monotonic() - began) / 60, 1),
            "machine": machine(),
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        PAGE.write_text(page(record))
    for part in failed:
        print(f"failed: {part}", file=sys.stderr)
    return 1 if failed else 0


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


def page(record: dict[str, dict[str, object]]) -> str:
    """The record as a table; a part without a record has never passed."""
    rows = []
    for part, (proves, _) in PARTS.items():
        last = record.get(part, {})
        cells = [last.get(key, "never" if key == "date" else "") for key in ("date", "commit", "minutes", "machine")]
        rows.append(f"| {part} | {proves} | " + " | ".join(map(str, cells)) + " |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    sys.exit(main())
