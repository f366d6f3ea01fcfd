"""Evictions on disk, in an append-only file, so that restoring an older copy of the other files undoes no eviction.

Guarantee: all evictions are durable when ``save`` returns. After a failed write, the next ``save`` writes them.
"""

from __future__ import annotations

import threading
from pathlib import Path

from p2pcast.files.append_log import AppendLog
from p2pcast.trust.evictions import Evictions
from p2pcast.trust.key_files import check_private

FILE = "evictions.log"
SLACK = 1024
"""Number of records, beyond twice the needed ones, at which the file is rewritten."""


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
        """Write the pending records to disk. Blocks; thread-safe. Raises LocalError."""
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
