"""An anchor's log as a view of its Hugging Face folder, so that there is no second copy.

The log is the weights' data section followed by the small files (docs/formats/delta-format.md, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from p2pcast.artifact.signed_records import Manifest
from p2pcast.checkpoint.folder import SINGLE
from p2pcast.checkpoint.safetensors_file import header_for
from p2pcast.codec.layout import Layout
from p2pcast.files import disk
from p2pcast.files.atomic_files import explained
from p2pcast.ground.errors import IntegrityError
from p2pcast.store.artifact_journal import ArtifactJournal, Record
from p2pcast.store.artifact_log import FileLog

FILES_NAME = ".files"
"""Name of the file with the small files' contents while an anchor is received; removed at the end."""


class AnchorLog:
    """Reads a finished anchor folder or, with ``create``, writes a new one."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        *,
        create: bool = False,
        journal: ArtifactJournal | None = None,
        resumed: bool = False,
    ) -> None:
        """``resumed``: continue with an earlier process's files."""
        head = header_for(layout)
        self.journal = journal
        self.folder = folder
        self._state_bytes = layout.nbytes
        self._segments: list[tuple[int, int, FileLog]] = []
        """(offset in the log, size, file), ascending."""
        if create:
            weights = FileLog(folder / SINGLE, len(head), head=head, allocate_bytes=layout.nbytes, resumed=resumed)
            files = FileLog(folder / FILES_NAME, 0, head=b"", resumed=resumed)
            self._segments = [(0, layout.nbytes, weights), (layout.nbytes, 1 << 62, files)]
        else:
            self._segments = [(0, layout.nbytes, FileLog(folder / SINGLE, len(head)))]

    def add_files(self, manifest: Manifest) -> None:
        """Add the small files of a finished folder."""
        for file in sorted(manifest.files, key=lambda f: f.offset or 0):
            if file.size and file.offset is not None:
                self._segments.append((file.offset, file.size, FileLog(self.folder / file.path, 0)))

    def write(self, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        end = self._state_bytes
        for part in parts:
            below = part[: max(0, end - offset)]
            if len(below):
                self._segments[0][2].write(offset, [below])
            if len(below) < len(part):
                self._segments[1][2].write(offset + len(below) - end, [part[len(below) :]])
            offset += len(part)

    def read(self, offset: int, size: int, *, short: bool = False) -> bytes:
        out = b""
        for start, length, file in self._segments:
            if size and start <= offset < start + length:
                take = min(size, start + length - offset)
                part = file.read(offset - start, take, short=short)
                out = out + part if out else part
                offset, size = offset + take, size - take
        if size and not short:
            raise IntegrityError(f"{self.folder}: {size} bytes at {offset} of the log are missing")
        return out

    def sync(self) -> None:
        for _, _, file in self._segments:
            with file.descriptor() as fd, explained("sync", self.folder):
                disk.sync(fd, file.path)

    def note(self, records: Sequence[Record]) -> None:
        if self.journal is not None:
            self.journal.add(records)

    def renamed(self, folder: Path) -> None:
        """Note the finished folder's new name."""
        self.folder = folder
        self._segments[0][2].renamed(folder / SINGLE)

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()
        for _, _, file in self._segments:
            file.close()
