"""A folder of checkpoints for programs that read weights from disk: step folders, each with its marker, and the link
``latest``. Names and markers: ``p2pcast.checkpoint.folder_form``.

Guarantees: from the moment its name appears, a step folder is a whole Hugging Face checkpoint, durable and complete
with its marker. ``latest`` always leads to such a folder. If a step comes again with different bytes, one move replaces
the old folder. Folders that p2pcast did not write are never replaced or removed. A full disk raises one clear error and
leaves existing folders as they are. The folder's mode, not the process's umask, decides who may read the checkpoints; a
folder created here is private to this user.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from p2pcast.artifact.signed_records import path_fault
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.checkpoint.folder_form import DEFAULT, FolderForm
from p2pcast.codec.digest import MASK
from p2pcast.codec.layout import Layout
from p2pcast.files import disk, private_folders
from p2pcast.files.atomic_files import atomic_write, explained, fsync_dir, part_path
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError, RetryableError, UsageError
from p2pcast.ground.version import Version
from p2pcast.offline import cell_digests

log = logging.getLogger("p2pcast.peer")

MODEL = "model.safetensors"
LATEST = "latest"

_COPY_BYTES = 32 * limits.MIB
"""Bytes to copy between two checks for cancellation."""
_NO_DIRECT_COPY = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class StepFolders:
    """The folder at ``folder``, which keeps the newest ``keep`` versions. Synchronous; make one call at a time."""

    def __init__(self, folder: Path, keep: int, form: FolderForm = DEFAULT) -> None:
        if keep < 1:
            raise UsageError(f"keep at least one checkpoint in {folder}, not {keep}")
        self.folder = folder
        self._keep = keep
        self._names, self._marker = form.names, form.marker
        self._lock_fd = -1
        self._mode = disk.PRIVATE.folder
        """Mode of folders created here; files get this mode without the execute bits."""
        self._staged: tuple[Version, Path] | None = None

    def start(self) -> None:
        """Create and lock the folder, and remove leftovers of a killed process. Raises LocalError."""
        with explained("create", self.folder):
            disk.make_folder(self.folder)
            self._mode = private_folders.check_shared(self.folder)
            fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise LocalError(f"{self.folder} is written by another process; give each peer its own folder") from None
        self._lock_fd = fd
        link = self.folder / LATEST
        with explained("clean", self.folder):
            if link.exists() and not link.is_symlink():
                raise LocalError(f"{link} is not a link; move it away or choose another folder")
            for left in self.folder.glob(".*.part-*"):
                if self._names.step_of(_final_name(left)) is not None:
                    self._restore_or_remove(left)
            for left in self.folder.glob(f".{LATEST}.part-*"):
                disk.unlink(left)

    def close(self) -> None:
        """Discard the staged checkpoint and release the folder's lock."""
        self.discard()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def path_of(self, version: Version) -> Path:
        return self.folder / self._names.name(version.step)

    def holds(self, version: Version) -> bool:
        """Whether this version's checkpoint is in place, judged by its last marker."""
        return self._version_in(self.path_of(version)) == version

    def differing(self, version: Version, layout: Layout, digests: Mapping[int, int]) -> list[str]:
        """Return the names of the tensors that differ from their digests (by number), or all names if the checkpoint is
        missing.
        """
        names = [t.name for t in layout.tensors]
        try:
            found = Checkpoint.open(self.path_of(version))
        except P2PCastError as error:
            log.warning("%s", error)
            return names
        if found.layout().tensors != layout.tensors:
            log.warning("%s: its tensors are not the version's", found.folder)
            return names
        sums = [0] * len(names)
        for cell, value in zip(layout.cells, cell_digests(found, layout), strict=True):
            sums[cell.tensor] += value
        return [n for i, n in enumerate(names) if sums[i] & MASK != digests.get(i, 0)]

    def stage(self, version: Version, shadow: Path, files: Mapping[str, bytes], cancelled: threading.Event) -> None:
        """Write the checkpoint under a hidden name, from the safetensors file ``shadow`` and the small ``files``.

        Replaces the staged checkpoint. If an identical checkpoint exists, it is not written again. Raises LocalError
        (disk full, foreign folder), IntegrityError (invalid path of a small file) and RetryableError once ``cancelled``
        is set.
        """
        self.discard()
        if not self._is_locked():  # another process removed or replaced the whole folder
            self.close()
            self.start()
        for path in files:
            fault = path_fault(path)
            if fault:
                raise IntegrityError(f"version {version}: small file {fault}")
        final = self.path_of(version)
        if os.path.lexists(final) and self._version_in(final) is None:
            raise LocalError(f"{final} was not written by p2pcast; move it away or choose another folder")
        if self._same(final, shadow, files, cancelled):
            self._staged = (version, final)
            return
        part = part_path(final)
        try:
            self._write(part, version, shadow, files, cancelled)
        except BaseException:
            with suppress(OSError):
                disk.remove_tree(part)
            raise
        self._staged = (version, part)

    def discard(self) -> None:
        """Discard the staged checkpoint."""
        if self._staged is not None and self._staged[1] != self.path_of(self._staged[0]):
            with suppress(OSError):
                disk.remove_tree(self._staged[1])
        self._staged = None

    def publish(self, version: Version) -> Path:
        """Give the staged checkpoint its name; may be repeated. Raises LocalError if ``version`` is not staged."""
        if self._staged is None or self._staged[0] != version:
            raise LocalError(
                f"{self.folder}: {version} isn't staged, {self._staged[0] if self._staged else 'nothing'} is"
            )
        part, final = self._staged[1], self.path_of(version)
        if part != final:
            with explained("create", final):
                _take_place(part, final)
            self._staged = (version, final)
            fsync_dir(self.folder)
            with suppress(OSError):
                disk.remove_tree(part)  # the replaced folder
        elif self._version_in(final) != version:  # the same bytes under a different branch
            atomic_write(final / self._marker.last, _text(version), self._mode & disk.USERS.file)
        self._prune()
        return final

    def settle(self, version: Version) -> None:
        """Point ``latest`` at the published ``version``."""
        link = self.folder / LATEST
        part = part_path(link)
        with explained("link", link):
            disk.symlink(self.path_of(version).name, part)
            disk.rename(part, link)
        fsync_dir(self.folder)
        self._staged = None
        self._prune()

    def _is_locked(self) -> bool:
        """Whether the folder at this path is still the one that ``start`` locked."""
        try:
            return os.path.samestat(os.stat(self.folder), os.fstat(self._lock_fd))
        except OSError:
            return False

    def _write(
        self, part: Path, version: Version, shadow: Path, files: Mapping[str, bytes], cancelled: threading.Event
    ) -> None:
        mode = self._mode & disk.USERS.file
        with explained("write", part):
            need = shadow.stat().st_size + sum(map(len, files.values()))
            if (free := disk.free_bytes(self.folder)) < need:
                raise LocalError(
                    f"no room for version {version} in {self.folder}: it takes {need} bytes, "
                    f"{free:.0f} are free; free some, keep fewer versions, or use another folder"
                )
            disk.mkdir(part)
            for path, contents in files.items():
                target = part / path
                disk.make_folder(target.parent)
                _write_synced(target, contents, mode)
            _copy_synced(shadow, part / MODEL, cancelled, mode)
            for name in self._marker.before:
                _write_synced(part / name, b"", mode)
            _write_synced(part / self._marker.last, _text(version), mode)
            for folder, _, _ in os.walk(part, topdown=False):
                os.chmod(folder, self._mode)
                fsync_dir(folder)

    def _same(self, final: Path, shadow: Path, files: Mapping[str, bytes], cancelled: threading.Event) -> bool:
        """Whether the folder holds exactly these bytes."""
        if not final.is_dir():
            return False
        with explained("read", final):
            found = {os.path.relpath(os.path.join(f, n), final) for f, _, names in os.walk(final) for n in names}
            if found != {*files, MODEL, *self._marker.before, self._marker.last}:
                return False
            if any((final / p).stat().st_size != len(c) or (final / p).read_bytes() != c for p, c in files.items()):
                return False
            return _same_contents(final / MODEL, shadow, cancelled)

    def _prune(self) -> None:
        """Remove checkpoints beyond the newest ``keep``, but never the target of ``latest``."""
        link = self.folder / LATEST
        try:
            latest = os.readlink(link) if link.is_symlink() else None
            ours = [(v, p) for p in self.folder.iterdir() if (v := self._version_in(p)) is not None]
            for _, path in sorted(ours)[: -self._keep]:
                if path.name != latest:
                    gone = part_path(path)  # rename first, so readers never see a partial folder
                    disk.rename(path, gone)
                    disk.remove_tree(gone)
        except OSError as error:
            log.warning("%s: old checkpoints could not be removed: %s", self.folder, error)

    def _version_in(self, path: Path) -> Version | None:
        """The version that p2pcast wrote to this folder; None for a foreign folder."""
        try:
            with (path / self._marker.last).open("rb") as file:
                version = Version.parse(file.read(64).decode().removesuffix("\n"))
        except (OSError, UnicodeDecodeError, UsageError):
            return None
        return version if not path.is_symlink() and self.path_of(version) == path else None

    def _restore_or_remove(self, left: Path) -> None:
        """Handle a leftover of a killed process: restore it if it is the only copy of a step that was being replaced,
        otherwise remove it.
        """
        final = left.with_name(_final_name(left))
        replaced = left.name.endswith(_REPLACED)
        if replaced and not os.path.lexists(final):
            disk.rename(left, final)
        else:
            disk.remove_tree(left)


_REPLACED = "-replaced"
"""Suffix of the hidden name of a step being replaced, on file systems that cannot exchange two names."""


def _final_name(left: Path) -> str:
    """The name that a leftover had, or was about to get."""
    return left.name.removeprefix(".").split(".part-")[0]


def _text(version: Version) -> bytes:
    return f"{version}\n".encode()


def _take_place(part: Path, final: Path) -> None:
    """Rename ``part`` to ``final``. A previous folder of that name is afterwards at ``part``."""
    if not os.path.lexists(final):
        disk.rename(part, final)
    elif not disk.exchange(part, final):
        aside = part.with_name(part.name + _REPLACED)
        disk.rename(final, aside)
        disk.rename(part, final)
        disk.rename(aside, part)


def _write_synced(path: Path, data: bytes, mode: int) -> None:
    fd = disk.create(path, os.O_WRONLY | os.O_EXCL)
    try:
        os.fchmod(fd, mode)
        disk.write(fd, path, data)
        disk.sync(fd, path)
    finally:
        os.close(fd)


def _copy_synced(source: Path, target: Path, cancelled: threading.Event, mode: int = disk.PRIVATE.file) -> None:
    """Copy inside the kernel, sharing blocks if the file system can, otherwise from page cache to page cache."""
    with (
        source.open("rb", buffering=0) as src,
        open(disk.create(target, os.O_WRONLY | os.O_EXCL), "wb", buffering=0) as dst,
    ):
        os.fchmod(dst.fileno(), mode)
        size = os.fstat(src.fileno()).st_size
        direct = True
        done = 0
        while done < size:
            _still_wanted(cancelled)
            count = min(size - done, _COPY_BYTES)
            try:
                copied = disk.copy(src.fileno(), dst.fileno(), target, done, count, direct=direct)
            except OSError as error:
                if not direct or error.errno not in _NO_DIRECT_COPY:
                    raise
                direct = False
                continue
            if copied == 0:
                raise LocalError(f"{source} was cut short while it was copied to {target}")
            done += copied
        disk.sync(dst.fileno(), target)
    # The source only changes after ``cancelled`` is set, so a copy that passes this check is consistent.
    _still_wanted(cancelled)


def _same_contents(one: Path, other: Path, cancelled: threading.Event) -> bool:
    with one.open("rb", buffering=0) as left, other.open("rb", buffering=0) as right:
        if os.fstat(left.fileno()).st_size != os.fstat(right.fileno()).st_size:
            return False
        while chunk := left.read(_COPY_BYTES):
            _still_wanted(cancelled)
            if chunk != right.read(_COPY_BYTES):
                return False
    _still_wanted(cancelled)
    return True


def _still_wanted(cancelled: threading.Event) -> None:
    if cancelled.is_set():
        raise RetryableError("writing the checkpoint was cancelled")
