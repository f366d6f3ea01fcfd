"""An engine's process reports to its peer every second that it is running, from a separate thread.

A long step delays the engine's commands but not this thread, because a step's kernels release the GIL. A stopped
process is silent. So the peer can tell a busy engine from a frozen one (``installers.engine_installer``).
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from pathlib import Path
from typing import Any, Final

from p2pcast.ground.errors import P2PCastError
from rollout_node.in_engine.install_frames import ALIVE, InstallClient

BEAT_S: Final = 1.0


class Heartbeat:
    """``socket``: the peer's. ``process``: its name in messages; None for a rank."""

    def __init__(self, socket: Path, process: str | None = None) -> None:
        self._client = InstallClient(socket)
        self._about: dict[str, Any] = {"phase": ALIVE, "version": None, "error": None}
        self._about |= {"incarnation": secrets.token_hex(8)} | ({"process": process} if process else {})
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def begin(self, **about: Any) -> None:
        """Start the beats, with the engine's name from the peer and this rank; replaces earlier fields. The first beat
        is sent at once, so that the peer notices a process that stops right after it has answered.
        """
        self._about = self._about | about
        self._beat()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="p2pcast-heartbeat", daemon=True)
            self._thread.start()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._beat()
            self._ended.wait(BEAT_S)

    def _beat(self) -> None:
        with contextlib.suppress(P2PCastError):  # the peer is unreachable
            self._client.report(self._about)
