"""Runs parts and stores each result in ``FOLDER/NAME.json``, with the command, the machine and the time beside the
document. An interrupted part leaves nothing. A measured part is not run again unless the caller names it.

A file holds {part, command, quick, began, took_s, machine, versions, exit_code, document}, or {part, why} if the part
could not run or failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from netem.lab.machine import machine, versions
from netem.report.parts import LIMIT_S, PARTS, Part
from p2pcast.files.atomic_files import atomic_write, explained
from p2pcast.ground.errors import LocalError, UsageError

COMMAND: Final = (sys.executable, "-P", "-m", "p2pcast.cli")
END_S: Final = 60.0
"""Time for an interrupted part to clean up."""

Kept = dict[str, Any]


def chosen_parts(only: Sequence[str]) -> list[Part]:
    """Raises UsageError for an unknown name."""
    if strange := [name for name in only if name not in PARTS]:
        raise UsageError(f"there is no part {strange[0]!r}; the parts are {', '.join(PARTS)}")
    return [part for name, part in PARTS.items() if not only or name in only]


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
    parts = chosen_parts(only)
    with explained("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
    before, whole = kept(folder), True
    for part in parts:
        old = before.get(part.name, {})
        if not only and "document" in old and (quick or not old["quick"]):
            show(f"{part.name}: kept, measured {old['began']} (make bench ONLY={part.name} measures it again)")
            continue
        if (missing := part.missing()) is not None:
            show(f"{part.name}: left out, {missing}")
            made: Kept = {"part": part.name, "why": missing}
        else:
            show(f"{part.name}: p2pcast {' '.join(part.words(quick=quick))}")
            made = _run(folder, part, quick=quick)
            if "why" in made:
                show(f"{part.name}: failed, {made['why']}")
                whole = False
        if "document" in made or "document" not in old:
            atomic_write(folder / f"{part.name}.json", json.dumps(made, indent=1).encode() + b"\n", None)
    return whole


def _run(folder: Path, part: Part, *, quick: bool) -> Kept:
    output = folder / f".{part.name}.part"
    output.unlink(missing_ok=True)
    words = part.words(quick=quick)
    on, began, clock = machine(), datetime.now(UTC), time.monotonic()
    try:
        code, last = _outcome([*COMMAND, *words, "--output", str(output)])
        took_s = time.monotonic() - clock
        if not output.exists():
            return {"part": part.name, "why": last or f"exit code {code}"}
        return {
            "part": part.name,
            "command": " ".join(["p2pcast", *words]),
            "quick": quick,
            "began": began.isoformat(timespec="seconds"),
            "took_s": round(took_s, 1),
            "machine": on,
            "versions": versions(),
            "exit_code": code,
            "document": json.loads(output.read_text()),
        }
    finally:
        output.unlink(missing_ok=True)


def _outcome(words: list[str]) -> tuple[int, str]:
    """The exit code and the last line of stderr; stderr is passed on to the terminal as it arrives."""
    # Give the part its own session: Ctrl-C reaches only this process, which passes it on once.
    prefix = [sys.executable, "-P", "-m", "netem.fleet.die_with_parent", str(os.getpid()), "0"]
    process = subprocess.Popen([*prefix, *words], stderr=subprocess.PIPE, text=True, start_new_session=True)
    last: list[str] = []

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            if line.strip():
                last[:] = [line.strip()]

    reader = threading.Thread(target=read, name="p2pcast-report", daemon=True)
    reader.start()
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        _end(process)
        return process.returncode, f"still running after {LIMIT_S:.0f} s"
    except KeyboardInterrupt:
        _end(process)
        raise
    finally:
        reader.join(END_S)
        assert process.stderr is not None
        process.stderr.close()
    return code, last[0] if last else ""


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
