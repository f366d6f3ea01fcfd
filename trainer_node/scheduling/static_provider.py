"""Workers that a person starts: the fleet's controller measures them and changes nothing. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from p2pcast.ground.errors import LocalError, UsageError


class StaticProvider:
    changes = False

    def __init__(self, names: Sequence[str]) -> None:
        if not all(names) or len(set(names)) != len(names):
            raise UsageError(f"provider static: worker names must be there, each once: {', '.join(names)!r}")
        self._names = tuple(names)

    async def running(self) -> Sequence[str]:
        return self._names

    async def start(self, name: str) -> None:
        raise LocalError(f"worker {name} is started by hand: its provider is static")

    async def stop(self, name: str) -> None:
        raise LocalError(f"worker {name} is stopped by hand: its provider is static")
