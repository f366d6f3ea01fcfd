"""The run's token ledger and evictions, in the hub's state folder.

Guarantee: an eviction takes effect at once, and stays in force if ``trust.json`` is lost or replaced by an older copy.
Evictions are therefore also in an append-only file. Files with secrets have mode 0600.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import run_id
from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground.observers import Observers
from p2pcast.trust.clock_watch import ClockWatch, Jump
from p2pcast.trust.eviction_log import EvictionLog
from p2pcast.trust.evictions import NO_TOKEN, Statement
from trainer_node.admission.trust_files import read_ledger

LEDGER = "trust.json"

EvictionObserver = Callable[[frozenset[bytes], list[bytes]], None]
"""Called with all evicted nodes, and the new signed statements."""
InThread = Callable[..., Coroutine[Any, Any, Any]]
"""Runs a blocking call."""


class TrustState:
    """``key``: the run's key, which signs evictions."""

    def __init__(self, folder: Path, key: RunKey, in_thread: InThread) -> None:
        """Raises LocalError."""
        self.run = run_id(key.public)
        self.changing = asyncio.Lock()
        """Held from a change until its ``save`` has returned."""
        self.observers: list[EvictionObserver] = []
        """Called with each eviction before it is on disk."""
        self._folder = folder
        self._key = key
        self._in_thread = in_thread
        self._log = EvictionLog(folder)
        self.evictions = self._log.evictions
        self.evicted = self.evictions.nodes
        """The same set object throughout this object's lifetime."""
        self.ledger = read_ledger(folder / LEDGER, self.evicted)
        self.clock = ClockWatch(time.time(), time.monotonic(), self.ledger.newest())
        self.jumped: Observers[[Jump]] = Observers()
        """Called when the wall clock has jumped."""
        self._reconcile(self.now())

    def now(self) -> float:
        """Unix time; checks the clock. While the clock may be wrong, no record is forgotten by age."""
        now, before = time.time(), self.clock.settled
        jump = self.clock.observe(now, time.monotonic())
        self.ledger.ages_count = self.clock.settled
        if self.clock.settled and not before:
            self.ledger.rebase(now)
        if jump is not None:
            self.jumped.notify(jump)
        return now

    def _reconcile(self, now: float) -> None:
        """Make the files consistent, because each may be an older copy."""
        for node, name in self.ledger.legacy.items():
            if not self.evictions.knows(bytes.fromhex(node)):
                # The earlier release has already decided what happens to the node's token.
                self.evictions.decide(
                    bytes.fromhex(node), NO_TOKEN, evicted=True, name=name, now=now, sign=self._key.sign
                )
        self._log.save()
        self.ledger.strike(self.evictions.tokens)

    def decide(self, node: bytes, token: bytes, *, evicted: bool, name: str) -> None:
        """Evict a node, or undo that. It takes effect at once, here and at every connected peer, and is on disk after
        the next ``save``. Raises RefusedError.
        """
        made = self.evictions.decide(node, token, evicted=evicted, name=name, now=self.now(), sign=self._key.sign)
        self.enforce([made.packed])

    def accept(self, signed: Sequence[bytes]) -> list[Statement]:
        """Return statements that this hub had lost; call ``enforce`` next. Raises IntegrityError for a forged one."""
        news = self.evictions.accept(signed, self._key.public)
        if news:
            self.ledger.strike(self.evictions.tokens)
        return news

    def enforce(self, signed: list[bytes]) -> None:
        """Call the observers, after which evicted nodes have no connection left."""
        for observer in self.observers:
            observer(frozenset(self.evicted), signed)

    async def save(self) -> None:
        """Raises LocalError."""
        # Evictions first: the append-only file may be newer than the ledger, never older.
        await self._in_thread(self._log.save)
        await self._in_thread(write_document, self._folder / LEDGER, self.ledger.document)

    def save_ledger(self) -> None:
        """Blocks. Raises LocalError."""
        write_document(self._folder / LEDGER, self.ledger.document)

    def close(self) -> None:
        self._log.close()


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write row by row: encoding tens of thousands of rows in one call holds the GIL, and so blocks the event loop."""
    holders = ", ".join(f"{json.dumps(node)}: {json.dumps(row)}" for node, row in document["holders"].items())
    rest = json.dumps({name: part for name, part in document.items() if name != "holders"})
    atomic_write(path, f'{rest[:-1]}, "holders": {{{holders}}}}}'.encode(), 0o600)
