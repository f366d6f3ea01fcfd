"""Runs parts, and keeps what each said: ``FOLDER/NAME.json``, with the command, the machine and the time beside the document. A part that was broken off leaves nothing; one that was measured
stays, and is not run again unless it is asked for by name.

A file holds {part, command, quick, began, took_s, machine, versions, exit_code, document}; or {part, why} where the part could not be run, or failed.
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
from p2pcast.errors import LocalError, UsageError
from p2pcast.store.files import atomic_write, explained

COMMAND: Final = (sys.executable, "-m", "p2pcast.cli")
END_S: Final = 60.0
"""For a part that was told to end to clear up."""

Kept = dict[str, Any]


def chosen_parts(only: Sequence[str]) -> list[Part]:
    """Raises UsageError for a name that there is not."""
    if strange := [name for name in only if name not in PARTS]:
        raise UsageError(f"there is no part {strange[0]!r}, but {', '.join(PARTS)}")
    return [part for name, part in PARTS.items() if not only or name in only]


def kept(folder: Path) -> dict[str, Kept]:
    """What has been measured so far, by part. Raises LocalError for a file that is none of ours."""
    found = {}
    for name in PARTS:
        path = folder / f"{name}.json"
        if path.exists():
            try:
                found[name] = json.loads(path.read_text())
                if found[name]["part"] != name:
                    raise ValueError
            except (ValueError, KeyError, TypeError):
                raise LocalError(f"{path} is not what `make bench` writes: move it away") from None
    return found


def measure(folder: Path, only: Sequence[str], *, quick: bool, tell: Callable[[str], None]) -> bool:
    """Whether all that can be measured here has been. Raises UsageError, LocalError, KeyboardInterrupt."""
    parts = chosen_parts(only)
    with explained("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
    before, whole = kept(folder), True
    for part in parts:
        old = before.get(part.name, {})
        if not only and "document" in old and (quick or not old["quick"]):
            tell(f"{part.name}: kept, of {old['began']} (make bench ONLY={part.name} measures it again)")
            continue
        if (lacking := part.lacking()) is not None:
            tell(f"{part.name}: left out, {lacking}")
            made: Kept = {"part": part.name, "why": lacking}
        else:
            tell(f"{part.name}: p2pcast {' '.join(part.words(quick=quick))}")
            made = _run(folder, part, quick=quick)
            if "why" in made:
                tell(f"{part.name}: failed, {made['why']}")
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
            "part": part.name, "command": " ".join(["p2pcast", *words]), "quick": quick, "began": began.isoformat(timespec="seconds"),
            "took_s": round(took_s, 1), "machine": on, "versions": versions(), "exit_code": code,
            "document": json.loads(output.read_text()),
        }  # fmt: skip
    finally:
        output.unlink(missing_ok=True)


def _outcome(words: list[str]) -> tuple[int, str]:
    """Exit code, and the last line for people, which go to the terminal as they come."""
    # In a session of its own: Ctrl-C is for us, who pass it on once.
    leash = [sys.executable, "-m", "p2pcast.demo.leash", str(os.getpid()), "0"]
    process = subprocess.Popen([*leash, *words], stderr=subprocess.PIPE, text=True, start_new_session=True)
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
        return process.returncode, f"it took more than {LIMIT_S:.0f} s"
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
