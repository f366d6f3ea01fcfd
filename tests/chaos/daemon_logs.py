"""The logs of a fleet's daemons: lines of errors that no daemon expects, and all lines when a test fails."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final

from netem.emulation.description import HUB
from netem.fleet.local_fleet import LocalFleet

UNEXPECTED: Final = re.compile(r"Traceback|background task .* failed|never retrieved|Fatal|internal error")
"""Log lines of an unexpected error: of a daemon's tasks and links (p2pcast.process.background_tasks), of its HTTP
server, of the event loop and of the interpreter.
"""


def unexpected(fleet: LocalFleet) -> list[str]:
    """Each unexpected line, with the daemon's name and 25 lines."""
    found = []
    for name in (HUB, *fleet.names):
        lines = fleet.log(name).read_text(errors="replace").splitlines()
        found += [
            f"{name}: " + " | ".join(lines[at : at + 25])[:4000]
            for at, line in enumerate(lines)
            if UNEXPECTED.search(line)
        ]
    return found


@contextlib.contextmanager
def printed_on_failure(fleet: LocalFleet) -> Iterator[None]:
    """Print the logs if the block raises."""
    try:
        yield
    except BaseException:
        print_all(fleet)
        raise


def print_all(fleet: LocalFleet) -> None:
    for name in (HUB, *fleet.names):
        log = fleet.log(name)
        print(f"--- {name}\n{log.read_text()}" if log.exists() else f"--- {name}: no log")
