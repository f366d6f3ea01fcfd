"""Runs overlapping attempts with staggered starts; the first success wins (the method of RFC 8305)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from p2pcast.ground.errors import P2PCastError

T = TypeVar("T")


async def race(
    attempts: Iterable[Callable[[], Coroutine[Any, Any, T]]], head_start_s: float, undo: Callable[[T], None]
) -> tuple[T | None, list[P2PCastError]]:
    """Return the result of the first attempt that succeeds (None if all fail), and the errors of failed attempts.

    Each attempt starts ``head_start_s`` after the previous one, or as soon as one fails. After a success, the other
    attempts are cancelled; if one succeeds anyway, ``undo`` is called with its result. If ``race`` is cancelled, all
    attempts are treated this way. Exceptions other than P2PCastError propagate.
    """
    # Neither TaskGroup nor gather: if a child fails while this task is cancelled, they raise the child's error, and the
    # cancellation is lost.
    left = list(attempts)
    running: list[asyncio.Task[T]] = []
    errors: list[P2PCastError] = []
    won: asyncio.Task[T] | None = None
    try:
        while won is None and (left or running):
            if left:
                running.append(asyncio.create_task(left.pop(0)()))
            done, _ = await asyncio.wait(
                running, timeout=head_start_s if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in [task for task in running if task in done]:
                error = task.exception()
                if error is None:
                    won = task
                    break
                if not isinstance(error, P2PCastError):
                    raise error
                errors.append(error)
                running.remove(task)
        return None if won is None else won.result(), errors
    except BaseException:
        won = None
        raise
    finally:
        overtaken = [task for task in running if task is not won]
        try:
            for task in overtaken:
                task.cancel()
            if overtaken:
                await asyncio.wait(overtaken)
        except BaseException:
            if won is not None:
                undo(won.result())
            raise
        finally:
            for task in overtaken:
                if task.done() and not task.cancelled() and task.exception() is None:
                    undo(task.result())
