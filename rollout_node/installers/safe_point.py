"""The state of an engine in which it may switch to new weights: between two steps, or without running requests.

``step``: a request that runs goes on with the new weights. ``drain``: new requests are held at the engine and running
ones end with the old weights. This is vLLM's ``pause?mode=wait``, and SparrowRL's end of the current generation batch
(section 5.2). Then each request has one version. Requests that outlast the limit leave the engine, resumed and ready,
at its old version. A pause by another program, under which no request ends, prevents the switch.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from p2pcast.ground.errors import P2PCastError, RetryableError
from rollout_node.installers.engine_server import EngineServer
from rollout_node.installers.install_state import InstallState

SafePoint = Literal["step", "drain"]
ANSWER_S = 60.0
"""Time limit of the drain's request beyond the drain's own: where both end at once, the drain's is reported."""


class StillRunningError(RetryableError):
    """Running requests did not end in time; the engine was left at its old version."""


class SwitchPoint:
    """Writes ``state.stretch``: name of the time since the last write to the weights, for a reader that asks before and
    after a request. Equal names mean that the version in use made the whole answer. None while weights may be written,
    and for the safe point ``step``.
    """

    def __init__(self, server: EngineServer, state: InstallState, kind: SafePoint, limit_s: float) -> None:
        self._server, self._name, self._state = server, server.name, state
        self._kind, self._limit_s = kind, limit_s

    def writing(self) -> None:
        """Weights may be written from now on."""
        self._state.stretch = None

    def written(self) -> None:
        """No weight is written any more, and one version is in use."""
        self._state.stretch = secrets.token_hex(8) if self._kind == "drain" else None

    async def reach(self, *, ours: bool, paused: bool, resume: Callable[[], Awaitable[None]]) -> dict[str, float]:
        """Wait until the engine may switch. Returns durations by name. After an error the engine goes on.

        ``ours``: no other program paused the engine. Under this peer's own pause nothing is waited for: that is a
        repair, and wrong weights must not make more tokens. ``resume`` ends this peer's pause.
        """
        if self._kind == "step":
            return {}
        if not ours:
            raise RetryableError(
                f"{self._name}: paused by another program, so that running requests cannot end before the switch "
                "(--commit-safe-point drain); resume the engine"
            )
        if paused:
            return {"drained_s": 0.0}
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._limit_s):
                await self._server.drain(self._limit_s + ANSWER_S)
        except BaseException as error:
            with contextlib.suppress(P2PCastError):  # the ranks know of this pause: the next stage ends it
                await resume()
            if not isinstance(error, TimeoutError):
                raise
            raise StillRunningError(
                f"{self._name}: running requests did not end within {self._limit_s:g} s (--drain-timeout); the engine "
                "goes on with its old version, and the switch is tried again"
            ) from None
        return {"drained_s": time.monotonic() - began}
