"""Evictions on disk, in a file that only grows: an older copy of the other files undoes none of them.

Promise: what was taken in is durable when ``save`` returns; what could not be written is written by the next ``save``.
"""

from __future__ import annotations

import threading
from pathlib import Path

from p2pcast.store.append_log import AppendLog
from p2pcast.trust.evictions import Evictions
from p2pcast.trust.files import check_private

FILE = "evictions.log"
SLACK = 1024
"""Records beyond twice those that are needed, before the file is made anew."""


class EvictionLog:
    def __init__(self, state: Path) -> None:
        """Raises LocalError."""
        path = state / FILE
        if path.exists():
            check_private(path)
        self._log = AppendLog(path)
        self._saving = threading.Lock()
        self.evictions = Evictions(self._log.records)

    def save(self) -> None:
        """Blocks; from any thread. Raises LocalError."""
        with self._saving:
            pending = list(self.evictions.pending)
            if not pending:
                return
            self._log.append(*pending)
            del self.evictions.pending[: len(pending)]
            if len(self._log.records) > SLACK + 2 * len(needed := self.evictions.records):
                self._log.rewrite(needed)

    def close(self) -> None:
        self._log.close()
