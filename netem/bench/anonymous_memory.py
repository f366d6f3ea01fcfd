"""Anonymous resident memory (RssAnon), which excludes page cache and mapped files."""

from __future__ import annotations

import threading
from pathlib import Path

from p2pcast.ground import limits

SAMPLE_S = 0.05


def anonymous_bytes(process: int | str = "self") -> int:
    """Of a process, by its id; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * limits.KIB for line in lines if line.startswith("RssAnon:")), 0)


class Peak(threading.Thread):
    """Samples a process's memory every ``every_s`` seconds and keeps the largest value."""

    def __init__(self, process: int | str = "self", every_s: float = SAMPLE_S) -> None:
        super().__init__(daemon=True, name="peak")
        self.bytes = 0
        self._process, self._every_s = process, every_s
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.bytes = max(self.bytes, anonymous_bytes(self._process))

    def stop(self) -> int:
        self._ended.set()
        self.join()
        return max(self.bytes, anonymous_bytes(self._process))
