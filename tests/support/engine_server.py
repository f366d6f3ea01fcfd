"""``EngineServer`` runs a real engine's server, of vLLM or of SGLang, in a process of its own."""

from __future__ import annotations

import subprocess
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from tests.support.until import check_runs, wait_until


class EngineServer(ABC):
    """A server starts when it is made. ``with`` waits until the server answers, and stops it at the end."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def wait(self) -> None:
        """Wait until the server answers; a busy machine takes minutes."""
        wait_until(self._answers, self.log.read_text, check=lambda: check_runs(self.process, self.log))

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5):
                return True
        except (OSError, urllib.error.URLError):
            return False

    @abstractmethod
    def stop(self) -> None: ...

    def __enter__(self) -> Self:
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
