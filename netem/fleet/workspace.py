"""Folders for the length of a block. ``own_folder`` is for all files of a process. The demo and `bench live` have a
work folder for all files, and a folder in tmpfs for the weights that daemons hold in memory.

Promises: a foreign folder is never replaced. The folder in tmpfs is removed at the end of the block, whatever the
reason. A later process removes the folders of killed ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from p2pcast.ground.errors import UsageError

PREFIX = "p2pcast-broadcast-"
"""Of a process's own folder; followed by the process id."""
MARKER = ".p2pcast-demo"
TMPFS = Path("/dev/shm")
SOCKET_PATH_BYTES = 100
"""The path of a Unix socket may have 107 bytes; the sockets between engines and peers lie below this folder."""
BULKY = ("base", "peers", "run/checkpoints", "state", "train", "trained")


class Workspace:
    """``root``: the work folder. It must be absent, empty or made by an earlier run. Raises UsageError otherwise."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if len(os.fsencode(self.install_socket("p99"))) > SOCKET_PATH_BYTES:
            raise UsageError(f"{self.root} is too long a path for sockets: choose a shorter one with --dir")
        if self.root.exists():
            if not self.root.is_dir() or (any(self.root.iterdir()) and not (self.root / MARKER).exists()):
                raise UsageError(
                    f"{self.root} exists and was not made by the demo or a bench: choose another folder with --dir"
                )
            shutil.rmtree(self.root)
        # Daemons refuse a state folder below a folder that all users may write to, so set the mode whatever the umask.
        self.root.mkdir(mode=0o755, parents=True)
        (self.root / MARKER).touch()
        for name in ("logs", "peers", "state"):
            (self.root / name).mkdir(mode=0o755)
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]
        memory = TMPFS if os.access(TMPFS, os.W_OK) else self.root
        self.memory = memory / f"p2pcast-demo-{os.getuid()}-{digest}"

    def __enter__(self) -> Workspace:
        shutil.rmtree(self.memory, ignore_errors=True)
        try:
            self.memory.mkdir(mode=0o700)
        except FileExistsError:
            raise UsageError(
                f"{self.memory} belongs to another user, or is a link: remove it, or choose another folder with --dir"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.memory, ignore_errors=True)

    @property
    def train(self) -> Path:
        return self.root / "train"

    @property
    def trained(self) -> Path:
        """Versions that were trained ahead and are not yet published."""
        return self.root / "trained"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def state(self, name: str) -> Path:
        return self.root / "state" / name

    def installed(self, name: str) -> Path:
        """The folder for a peer's committed versions."""
        return self.root / "peers" / name

    def install_socket(self, name: str) -> Path:
        return self.state(name) / "install.sock"

    def slim(self) -> None:
        """Keep only the logs and the result."""
        for name in BULKY:
            shutil.rmtree(self.root / name, ignore_errors=True)


@contextlib.contextmanager
def own_folder(root: Path) -> Iterator[Path]:
    """A new folder below ``root``, removed at the end of the block; at most one below a root. Folders of dead processes
    are removed first, as is a folder of an earlier process with the same id: a restarted container reuses its first
    process ids.
    """
    for path in root.glob(f"{PREFIX}*"):
        number = path.name.removeprefix(PREFIX)
        if number == str(os.getpid()) or not Path(f"/proc/{number}").exists():
            shutil.rmtree(path, ignore_errors=True)
    folder = root / f"{PREFIX}{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
