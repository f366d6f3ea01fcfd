"""Lets a program read a whole version from the shadow of a peer on the same machine.

    with Reader("~/.local/state/p2pcast/peer-NAME") as version:
        for name, tensor in version.tensors():
            …  # views of the shadow's memory

Guarantees: nothing is copied, and all tensors belong to one version while the lease is in force. If the lease expires
or the peer stops inside the block, leaving the block raises RetryableError, because the tensors may be mixed.
During the lease the peer keeps relaying; it stages later versions afterwards.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from p2pcast.daemon.daemon_requests import TIMEOUT_S, ask, daemon_url
from p2pcast.ground.errors import LocalError, P2PCastError, RetryableError
from p2pcast.ground.version import Version

if TYPE_CHECKING:
    import torch


class Reader:
    """Context manager for a peer's staged version. ``state``: the peer's state folder. ``hold_s``: seconds until the
    lease expires, at most 3600. ``wait_s``: how long to wait for a version that is being staged.

    Entering the block raises RefusedError if no version is staged or the peer belongs to a different user,
    RetryableError if the peer is unreachable or 16 leases are in force, and LocalError.
    """

    version: Version
    """Set on entering the block."""

    def __init__(self, state: str | os.PathLike[str], *, hold_s: float = 60.0, wait_s: float = 60.0) -> None:
        self._state = Path(state).expanduser()
        self._hold_s, self._wait_s = hold_s, wait_s
        self._lease: str | None = None
        self._file: Any = None

    def __enter__(self) -> Self:
        from safetensors import safe_open

        self._url = daemon_url(None, self._state)
        answer = self._ask("/lease", {"wait_s": self._wait_s}, self._wait_s + TIMEOUT_S)
        try:
            self._lease, self.version = str(answer["lease"]), Version.parse(str(answer["version"]))
            self.prolong()
            self._file = safe_open(answer["path"], framework="pt")
        except BaseException as error:
            with contextlib.suppress(P2PCastError):
                self._end()
            if isinstance(error, Exception) and not isinstance(error, P2PCastError):
                raise LocalError(f"the peer's shadow cannot be read: {error}") from None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._end()
        else:
            with contextlib.suppress(P2PCastError):
                self._end()

    def prolong(self) -> None:
        """Extend the lease to ``hold_s`` seconds from now. Raises RefusedError if the lease has already expired, since
        the tensors may then be mixed.
        """
        self._ask("/lease", {"lease": self._lease, "hold_s": self._hold_s}, TIMEOUT_S)

    def names(self) -> list[str]:
        """Return the tensors' checkpoint names."""
        return list(self._file.keys())

    def tensor(self, name: str) -> torch.Tensor:
        """Return a view of a tensor, by its checkpoint name. Use it only inside the block, and do not write to it."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every name and tensor; see ``tensor``."""
        for name in self.names():
            yield name, self.tensor(name)

    def _end(self) -> None:
        self._file, lease, self._lease = None, self._lease, None
        if lease is not None and self._ask("/release", {"lease": lease}, TIMEOUT_S).get("held") is not True:
            raise RetryableError(
                f"the lease of version {self.version} ended before the reading did: discard what was read, and give"
                f" more than hold_s={self._hold_s:g}"
            )

    def _ask(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        return ask(self._url, path, body, timeout_s=timeout_s, state=self._state)
