"""``--callbacks PKG.MODULE:OBJECT``: the user's own code, called before and after each switch of an engine.

``before_commit(version: str) -> float | None`` returns the seconds by which to defer the switch, and is called again
afterwards; None or 0 means switch now. ``after_commit(version: str, error: str | None) -> None`` is called once the
engine is at the version, or with the reason why it is not. Both are optional, and called for every engine of the peer.
A plain function runs in its own thread. An async function runs on the peer's loop and must not block it.

Guarantees: user code never stops an install. Its exceptions are logged. A call that exceeds its time limit is
abandoned, and a plain function is not called again until it has returned from that call.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from p2pcast.daemon.user_code import import_module
from p2pcast.ground.errors import UsageError

logger = logging.getLogger("p2pcast.peer")

CALL_S = 5.0
"""Time limit for a call, in seconds; the engine keeps its old version meanwhile."""

_NAMES = ("before_commit", "after_commit")


def load(text: str, folder: Path) -> Any:
    """Return the object or module named by ``text``, searching ``folder`` first. Raises UsageError."""
    module, _, path = text.partition(":")
    found: Any = import_module(module, folder, "--callbacks")
    for name in path.split(".") if path else ():
        if not hasattr(found, name):
            raise UsageError(f"--callbacks: {module} has no {path!r}: write PKG.MODULE or PKG.MODULE:OBJECT")
        found = getattr(found, name)
    check(found, text)
    return found


def check(target: Any, text: str) -> None:
    """Raises UsageError if ``target``, which the message calls ``text``, provides no usable callbacks."""
    if inspect.isclass(target):
        raise UsageError(f"--callbacks: {text} is a class: name an object made from it")
    found = [getattr(target, n) for n in _NAMES if getattr(target, n, None) is not None]
    if not found or not all(callable(f) for f in found):
        raise UsageError(f"--callbacks: {text} needs a function {' or '.join(_NAMES)}")


class Callbacks:
    """Calls the user's callbacks. ``target``: None if there are none."""

    def __init__(self, target: Any = None, *, max_defer_s: float = 0.0, call_s: float = CALL_S) -> None:
        """``max_defer_s``: limit on the total deferral of one version at one engine, in seconds. Raises UsageError."""
        if target is not None:
            check(target, repr(target))
        self.max_defer_s = max_defer_s
        self._call_s = call_s
        self._functions: dict[str, Callable[..., Any]] = {
            name: f for name in _NAMES if (f := getattr(target, name, None)) is not None
        }
        self._turn = asyncio.Lock()
        """Held during a call: user code need not be thread-safe, or handle two engines at once."""
        self._running: set[str] = set()
        """Plain functions that have not returned yet."""

    async def before(self, version: str) -> float:
        """Return the seconds by which the user defers the switch; 0 means switch now."""
        asked = await self._call("before_commit", version)
        if asked is None:
            return 0.0
        if isinstance(asked, bool) or not isinstance(asked, int | float) or math.isnan(asked):
            logger.warning("before_commit(%s) returned %r: seconds or None were expected", version, asked)
            return 0.0
        return max(0.0, float(asked))

    async def after(self, version: str, error: str | None) -> None:
        await self._call("after_commit", version, error)

    async def _call(self, name: str, *args: Any) -> Any:
        function = self._functions.get(name)
        if function is None:
            return None
        async with self._turn:
            if name in self._running:
                logger.warning("%s(%s) is not called: it has not come back from an earlier call", name, args[0])
                return None
            try:
                async with asyncio.timeout(self._call_s):
                    if inspect.iscoroutinefunction(function):
                        return await function(*args)
                    outcome = await self._in_thread(name, function, *args)
                    return await outcome if inspect.isawaitable(outcome) else outcome
            except TimeoutError:
                logger.warning("%s(%s) took longer than %g s and is no longer waited for", name, args[0], self._call_s)
            except Exception:  # an error in user code must not stop an install
                logger.exception("%s(%s) failed", name, args[0])
            return None

    async def _in_thread(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function`` in a daemon thread, so that not even the process's exit waits for it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def settle(outcome: Any, error: Exception | None) -> None:
            self._running.discard(name)
            if done.cancelled():
                return
            if error is None:
                done.set_result(outcome)
            else:
                done.set_exception(error)

        def work() -> None:
            outcome: Any = None
            failure: Exception | None = None
            try:
                outcome = function(*args)
            except BaseException as error:  # noqa: BLE001 - an uncaught SystemExit would end this thread silently
                failure = error if isinstance(error, Exception) else None
                if failure is None or isinstance(failure, StopIteration):  # a future accepts neither of these
                    failure = RuntimeError(repr(error))
            with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(settle, outcome, failure)

        self._running.add(name)
        threading.Thread(target=work, name=f"p2pcast-{name}", daemon=True).start()
        return await done
