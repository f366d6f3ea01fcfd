"""Tasks whose ``jobs`` do what no task should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.tasks.sums import Sums
from p2pcast.tasks.task import Prompt


class Counted(Sums):
    """Forty sound prompts. ``slow_s``: time of each."""

    def __init__(self, slow_s: float = 0.0) -> None:
        super().__init__()
        self._slow_s = slow_s

    def jobs(self, seed: int) -> Iterator[Prompt]:
        for number in range(40):
            time.sleep(self._slow_s)
            yield Prompt(f"{seed}+{number}".encode(), 4, f"row {number}")


class Poisoned(Sums):
    """Three of its rows are no prompts."""

    def jobs(self, seed: int) -> Iterator[Any]:
        yield Prompt(b"1+2", 4)
        yield {"prompt": "1+2"}
        yield Prompt(b"1+2", 0, "data.jsonl, row 3")
        yield Prompt("1+2", 4)  # type: ignore[arg-type]
        yield Prompt(b"2+2", 4)


class Raising(Sums):
    def jobs(self, seed: int) -> Iterator[Prompt]:
        yield from Counted().jobs(seed)
        json.loads("{")


RAISES = 'json.loads("{")'


class RaisesAtOnce(Sums):
    def jobs(self, seed: int) -> Iterator[Prompt]:
        raise LookupError("no data")


class Unsendable(Sums):
    """Half a character, in a row and in an error."""

    def jobs(self, seed: int) -> Iterator[Prompt]:
        yield Prompt(b"1+2", 4, "\ud800")
        raise ValueError("\ud800")


class Missing(Sums):
    def jobs(self, seed: int) -> Iterator[Prompt]:
        raise LocalError("problems.jsonl, line 7 is no JSON")


class Refusing(Sums):
    def jobs(self, seed: int) -> Iterator[Prompt]:
        raise UsageError("the task holds all problems out")


class Exiting(Sums):
    def jobs(self, seed: int) -> Iterator[Prompt]:
        yield Prompt(b"1+2", 4)
        sys.exit(3)


class Crashing(Sums):
    def jobs(self, seed: int) -> Iterator[Prompt]:
        yield Prompt(b"1+2", 4)
        os._exit(3)


class Nothing(Sums):
    def jobs(self, seed: int) -> Any:
        return 7


class Hanging(Sums):
    """Hangs after forty prompts, beside a process of its own, unless the file ``go`` is there."""

    def jobs(self, seed: int) -> Iterator[Prompt]:
        print("noise on stdout")
        yield from Counted().jobs(seed)
        if not Path("go").exists():
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path("hung").write_text(str(child.pid))
            time.sleep(600)
        yield from Counted().jobs(seed + 1)


class Large(Sums):
    def jobs(self, seed: int) -> Iterator[Prompt]:
        for number in range(12):
            yield Prompt(bytes([number]) * (4 << 20), 4)


class HeldOut(Sums):
    def __init__(self) -> None:
        super().__init__(held_out=10)
