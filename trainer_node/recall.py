"""After a restart: what returning peers know of the run and this hub's state lacks.

A state folder may be an older copy, or have lost a version that was sealed while the hub died. Peers hold signed records of what this run's key said, and show the newest when they
join. Promises: no version opens after a restart before the peers of the last process are back, or have had their time; nothing that is not signed by the run's key counts;
a version that a peer can prove and this hub does not hold makes the next one open a higher branch, so no number ever names two states.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from p2pcast.artifact.records import Durable, Open, run_id
from p2pcast.errors import IntegrityError, LocalError
from p2pcast.store.append_log import AppendLog
from p2pcast.store.store import Store
from p2pcast.version import Version
from trainer_node.version_numbers import VersionNumbers

logger = logging.getLogger("p2pcast.hub")

R = TypeVar("R", Durable, Open)

RECALL_S = 10.0
"""For the peers of the last process to come back: several of their longest pauses between two tries."""
ROSTER = "peers.log"
MOST_IDLE_RECORDS = 1024
"""In the roster's file beside one for each peer, before it is rewritten."""


class Roster:
    """The peers that are joined, kept across the death of this process. Written without an fsync, but for one in a thousand changes: a machine that crashes costs RECALL_S at most."""

    def __init__(self, path: Path) -> None:
        """Raises LocalError."""
        self._log = AppendLog(path, skip_damaged=True)
        self._closed = False
        self.peers: set[str] = set()
        for record in self._log.records:
            if "joined" in record:
                self.peers.add(str(record["joined"]))
            self.peers.discard(str(record.get("left", "")))

    def joined(self, peer: str) -> None:
        if peer not in self.peers:
            self.peers.add(peer)
            self._note({"joined": peer})

    def left(self, peer: str) -> None:
        if peer in self.peers and not self._closed:
            self.peers.discard(peer)
            self._note({"left": peer})

    def close(self) -> None:
        """Whoever goes now is expected back."""
        self._closed = True
        self._log.close()

    def _note(self, record: dict[str, str]) -> None:
        try:
            if len(self._log.records) > len(self.peers) + MOST_IDLE_RECORDS:
                self._log.rewrite({"joined": peer} for peer in sorted(self.peers))
            else:
                self._log.append(record, sync=False)
        except LocalError as error:
            logger.warning(
                "the list of joined peers could not be written; the next start may wait %g s for peers in vain: %s",
                RECALL_S,
                error,
            )


class Recall:
    """``restarted``: there was a process before this one. ``unlike(peer, version)`` is called for each version that a peer has proved and this hub does not hold."""

    def __init__(
        self, store: Store, numbers: VersionNumbers, roster: Roster, *, restarted: bool, unlike: Callable[[str, Version], None]
    ) -> None:
        self.done = asyncio.Event()
        """Versions may open."""
        self._store = store
        self._numbers = numbers
        self._roster = roster
        self._unlike = unlike
        self._run = run_id(store.run_key)
        self._awaited = set(roster.peers)
        self._known = bool(roster.peers)
        """If no peer is known to come back, any peer may, so the hub waits the whole time."""
        self._heard: set[str] = set()
        """Peers whose first report since they joined has come."""
        self._told: set[Version] = set()
        if not restarted:
            self.done.set()

    async def run(self, seconds: float) -> None:
        """Give the peers their time, from when they can join on. ``seconds`` 0: none."""
        if self.done.is_set():
            return
        if seconds:
            logger.info("no version opens for %g s, or until the last process's %d peers are back", seconds, len(self._awaited))
        try:
            async with asyncio.timeout(seconds):
                await self.done.wait()
        except TimeoutError:
            self.done.set()

    def joined(self, peer: str) -> None:
        self._heard.discard(peer)
        self._roster.joined(peer)

    def heard(self, peer: str, name: str, durable: Sequence[bytes], opened: Sequence[bytes]) -> None:
        """A report; the first one after joining shows signed records, later ones are not looked at. What is forged or foreign is ignored."""
        if peer in self._heard:
            return
        self._heard.add(peer)
        for confirmed in _signed(Durable, durable, self._store.run_key, name):
            if confirmed.run == self._run and self._contradicts(confirmed):
                self._contradicted(name, confirmed.version)
        newest = self._store.newest()
        for begun in _signed(Open, opened, self._store.run_key, name):
            if begun.run == self._run and (newest is None or begun.version > newest):
                self._numbers.seen(begun.version)
        self._awaited.discard(peer)
        if self._known and not self._awaited:
            self.done.set()

    def left(self, peer: str) -> None:
        self._heard.discard(peer)
        self._roster.left(peer)

    def close(self) -> None:
        self._roster.close()

    def _contradicts(self, shown: Durable) -> bool:
        """Whether this hub should hold a version that it does not, or holds another state by its number."""
        known = self._store.identity(shown.version)
        if known is not None:
            return known != shown.manifest
        versions = {s.version for s in self._store.artifacts.values()}
        if shown.version in versions:
            return False  # of release 0.1, which knew no version hashes
        oldest, newest = self._kept()
        # Older ones retention may have removed.
        return newest is None or shown.version > newest or (oldest is not None and shown.version > oldest)

    def _kept(self) -> tuple[Version | None, Version | None]:
        """From where on this hub holds every version, and the newest."""
        stored = self._store.artifacts.values()
        bases: dict[Version, Version] = {}
        for one in stored:
            if one.base is not None:
                bases[one.version] = max(one.base, bases.get(one.version, one.base))
        newest = at = self._store.newest()
        while at is not None and at in bases:
            at = bases[at]
        return at, newest

    def _contradicted(self, name: str, version: Version) -> None:
        self._numbers.seen(version)
        self._numbers.above(version.branch)
        if version not in self._told:
            self._told.add(version)
            self._unlike(name, version)


def _signed(kind: type[R], records: Iterable[bytes], key: bytes, name: str) -> list[R]:
    found: list[R] = []
    errors: list[IntegrityError] = []
    for signed in records:
        try:
            found.append(kind.from_signed(signed, key))
        except IntegrityError as error:
            errors.append(error)
    if errors:
        logger.warning("%d records that %s shows are ignored: %s", len(errors), name, errors[0])
    return found
