"""A part that accepts every call and writes it down: a fake of any narrow protocol."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from p2pcast.process.background_tasks import Work


class Recorder:
    """``calls`` are (name, positional arguments, keyword arguments) in order. Attributes given here are returned as
    they are; every other name is a method that returns ``answers[name]``, or None.
    """

    def __init__(self, **attributes: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}
        self.__dict__ |= attributes

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            answer = self.answers.get(name)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return call

    def named(self, name: str) -> list[Any]:
        """The arguments of each call of ``name``: one alone, or a tuple."""
        return [args[0] if len(args) == 1 else args for called, args, _ in self.calls if called == name]

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]


class Background:
    """Tasks of the peer, which run on a test's command."""

    def __init__(self) -> None:
        self.work: list[tuple[str, Coroutine[Any, Any, None]]] = []

    def __call__(self, work: Coroutine[Any, Any, None] | Work, name: str) -> None:
        self.work.append((name, work() if callable(work) else work))

    async def run(self) -> list[str]:
        """Run them all; their names."""
        done, self.work = self.work, []
        for _, work in done:
            await work
        return [name for name, _ in done]


async def blocking(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Runs a function at once, on the loop."""
    return work(*args, **options)
