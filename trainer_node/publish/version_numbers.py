"""Assigns version numbers to steps, and records which numbers are used.

Guarantees: a number that was ever signed into an OPEN is never reused for different bytes, so it is first noted in a
separate file. The number of a failed version is skipped by opening the next branch. Notes survive a killed process
without an fsync each, since the kernel keeps written data. To survive a machine crash, numbers are reserved ahead, with
one fsync for many versions; a reservation from a different boot of the machine counts as used.

versions.log, records of ``p2pcast.files.append_log``: {"used": [branch, step]}, {"reserved": [branch, step],
"boot": text}, {"released": 1}, {"floor": branch}
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from pathlib import Path

from p2pcast.files.append_log import AppendLog, Record
from p2pcast.ground.version import Version

logger = logging.getLogger("p2pcast.hub")

FILE = "versions.log"
RESERVED_STEPS = 1024
"""Steps reserved ahead of the newest version; the reservation is renewed when half of them are used."""
MOST_RECORDS = 4096
"""Most records in the file before it is rewritten as three."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_boot() -> str:
    """The kernel's id of this boot; empty if there is none, and every restart then counts as a different boot."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


class VersionNumbers:
    """Call ``next`` and read the attributes on the event loop; ``note`` and ``reserve`` write to disk, from any thread.
    ``boot``: see ``this_boot``.
    """

    def __init__(self, path: Path, boot: str) -> None:
        """Raises LocalError."""
        self.used: Version | None = None
        """The highest number that this hub has used, or that counts as used."""
        self.floor = 0
        """Lowest branch of the next version."""
        self._floor_noted = 0
        """``floor`` as recorded on disk."""
        self._boot = boot
        self._reserved: Version | None = None
        self._log = AppendLog(path, skip_damaged=True)
        self._changing = threading.Lock()
        reserved: tuple[Version, str] | None = None
        for record in self._log.records:
            reserved = self._recalled(record, reserved)
        if reserved is not None:
            if reserved[1] == boot != "" and not self._log.damaged:
                self._reserved = reserved[0]
            else:
                # Notes that were not synced may be lost, so any reserved number may have been used.
                self.used = _later(self.used, reserved[0])

    def _recalled(self, record: Record, reserved: tuple[Version, str] | None) -> tuple[Version, str] | None:
        if "used" in record:
            self.used = _later(self.used, Version.of(record["used"]))
        if "floor" in record:
            self.floor = self._floor_noted = max(self.floor, int(record["floor"]))
        if "released" in record and not self._log.damaged:
            # A machine that crashed after a clean exit may have kept this record and lost one before it.
            return None
        return (Version.of(record["reserved"]), str(record.get("boot", ""))) if "reserved" in record else reserved

    def next(self, head: Version | None, step: int, *, resume: bool = False) -> Version:
        """Return the version number for new bytes of ``step`` after ``head``: the next of its branch. It opens a new
        branch in four cases: the step goes back, its number is used, the trainer resumes, or a peer has shown that this
        hub's record is incomplete.
        """
        branch = max(self.floor, 0 if head is None else head.branch + (1 if resume else 0))
        newest = head if self.used is None or (head is not None and head >= self.used) else self.used
        if newest is not None and Version(branch, step) <= newest:
            branch = newest.branch + 1
        return Version(branch, step)

    def note(self, version: Version) -> None:
        """Record that ``version`` is used; call it before the version is opened. The record survives this process, and
        also a machine crash unless its number is reserved. Raises LocalError.
        """
        with self._changing:
            ahead = self._reserved
            covered = ahead is not None and version.branch == ahead.branch and version.step <= ahead.step
            self._log.append({"used": list(version)}, sync=not covered)
            self.used = _later(self.used, version)
            self._shorten()

    def reserve(self, newest: Version) -> None:
        """Reserve numbers ahead of ``newest``; called while no version waits for it. Raises LocalError."""
        with self._changing:
            ahead = self._reserved
            if ahead is None or ahead.branch != newest.branch or ahead.step - newest.step < RESERVED_STEPS // 2:
                ahead = Version(newest.branch, newest.step + RESERVED_STEPS)
                self._log.append({"reserved": list(ahead), "boot": self._boot})
                self._reserved = ahead

    def seen(self, version: Version) -> None:
        """Treat this number as used, on evidence from outside the file."""
        with self._changing:
            self.used = _later(self.used, version)

    def above(self, branch: int) -> None:
        """Make the next version open a branch above this one, even if that cannot be recorded. Raises LocalError."""
        with self._changing:
            self.floor = max(self.floor, branch + 1)
            if self.floor > self._floor_noted:
                self._log.append({"floor": self.floor})
                self._floor_noted = self.floor

    def close(self) -> None:
        """Close after a clean exit: reserved numbers that were not noted are free again."""
        with self._changing:
            if self._reserved is not None:
                self._log.append({"released": 1}, sync=False)
            self._log.close()

    def _shorten(self) -> None:
        if len(self._log.records) > MOST_RECORDS:
            kept: list[Record] = [{"floor": self.floor}]
            kept += [] if self.used is None else [{"used": list(self.used)}]
            kept += [] if self._reserved is None else [{"reserved": list(self._reserved), "boot": self._boot}]
            self._log.rewrite(kept)
            self._floor_noted = self.floor


def _later(a: Version | None, b: Version) -> Version:
    return b if a is None else max(a, b)
