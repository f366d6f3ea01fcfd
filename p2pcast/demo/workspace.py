"""The folders of the demo and of `bench live`: one for all that it writes, and one in tmpfs for the weights that daemons hold in memory.

Promises: a folder that they did not make is never replaced; the folder in tmpfs is gone when the block is left, however it is left.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from types import TracebackType

from p2pcast.errors import UsageError

MARKER = ".p2pcast-demo"
TMPFS = Path("/dev/shm")
SOCKET_PATH_BYTES = 100
"""A Unix socket's path may have 107 bytes; engines reach their peer through one below this folder."""
BULKY = ("train", "trained", "peers", "state")


class Workspace:
    """``root``: the work folder. It must be absent, empty or an earlier one of ours. Raises UsageError otherwise."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if len(os.fsencode(self.install_socket("p99"))) > SOCKET_PATH_BYTES:
            raise UsageError(f"{self.root} is too long a path for the sockets in it: choose a shorter one with --dir")
        if self.root.exists():
            if not self.root.is_dir() or (any(self.root.iterdir()) and not (self.root / MARKER).exists()):
                raise UsageError(f"{self.root} exists and is not the demo's (or a bench's): choose another folder with --dir")
            shutil.rmtree(self.root)
        # Daemons refuse a state folder below one that all users may write to, whatever the umask here.
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self.memory, ignore_errors=True)

    @property
    def train(self) -> Path:
        return self.root / "train"

    @property
    def trained(self) -> Path:
        """Versions that were trained ahead, not yet published."""
        return self.root / "trained"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def state(self, name: str) -> Path:
        return self.root / "state" / name

    def shadow(self, name: str) -> Path:
        return self.memory / name

    def installed(self, name: str) -> Path:
        """Where a peer writes the versions that it commits."""
        return self.root / "peers" / name

    def install_socket(self, name: str) -> Path:
        return self.state(name) / "install.sock"

    def slim(self) -> None:
        """Keep the logs and the result alone."""
        for name in BULKY:
            shutil.rmtree(self.root / name, ignore_errors=True)
