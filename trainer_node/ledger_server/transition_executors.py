"""Threads in which transitions wait for their commits.

Promise: an urgent transition waits for no thread behind others that wait for a later commit than its own.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final, NamedTuple

THREADS: Final = 32
"""Transitions that may wait for a commit at one time; they share commits."""
URGENT_THREADS: Final = 16
"""The same for urgent ones."""


class Executors(NamedTuple):
    ordinary: Executor
    urgent: Executor

    @classmethod
    def start(cls) -> Executors:
        return cls(
            ThreadPoolExecutor(THREADS, thread_name_prefix="p2pcast-ledger"),
            ThreadPoolExecutor(URGENT_THREADS, thread_name_prefix="p2pcast-ledger-urgent"),
        )

    def shutdown(self) -> None:
        for one in self:
            one.shutdown()
