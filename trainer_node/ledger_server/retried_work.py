"""Background work of the ledger that other machines or a database can hold up: repeated, and never the daemon's end.

Guarantees: work that fails with an error of this project, or for a shortage of this machine, runs again, after a delay
that grows to RETRY_MOST_S. The first failure is an event, and each one a warning, whose repetitions the log counts.
``why`` names the work while it fails. A shortage also makes the daemon unhealthy. RefusedError and IntegrityError say
that repeating cannot help: they end the daemon.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import IntegrityError, P2PCastError, RefusedError
from p2pcast.ground.private_random import uniform
from p2pcast.process.background_tasks import Tasks
from p2pcast.process.events import Events
from p2pcast.process.repeated_messages import TROUBLE_ENDED
from p2pcast.process.shortages import shortage

logger = logging.getLogger("p2pcast.ledger")

RETRY_S, RETRY_MOST_S = 0.5, 10.0
"""First and longest delay after a failure, in seconds, before jitter."""


class RetriedWork:
    def __init__(self, events: Events, tasks: Tasks) -> None:
        self._events, self._tasks = events, tasks
        self._failing: dict[str, str] = {}

    @property
    def why(self) -> str:
        """The work that fails now, with the newest error of each; empty if none fails."""
        return "; ".join(f"{name}: {error}" for name, error in sorted(self._failing.items()))

    async def repeat(self, name: str, interval_s: float, work: Callable[[], Awaitable[object]]) -> None:
        """Do ``work`` again and again, ``interval_s`` seconds after each success. Raises RefusedError,
        IntegrityError, and exceptions of other kinds.
        """
        delays = Backoff(RETRY_S, RETRY_MOST_S, uniform)
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - errors that repeating cannot help are raised again
                self._note(name, error)
                await asyncio.sleep(delays.next_s())
                continue
            failed = self._failing.pop(name, None) is not None
            if not self._tasks.end_shortage(name) and failed:
                logger.info("%s: works again", name, extra=TROUBLE_ENDED)
                self._events.emit("work_recovers", work=name)
            delays.reset()
            await asyncio.sleep(interval_s)

    def _note(self, name: str, error: Exception) -> None:
        """Raises the error if repeating cannot help."""
        if (short := shortage(error)) is not None:
            self._tasks.note_shortage(name, short, error)
        elif isinstance(error, RefusedError | IntegrityError) or not isinstance(error, P2PCastError):
            raise error
        else:
            logger.warning("%s: %s", name, error)
            if self._tasks.end_shortage(name) or name not in self._failing:
                self._events.emit("work_fails", work=name, why=str(error))
        self._failing[name] = short or str(error)
