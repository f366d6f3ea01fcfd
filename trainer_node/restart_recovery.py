"""After a restart, learns of versions that returning peers know but this hub's state does not contain.

A state folder may be an older copy, or may not have a version that was sealed while the hub died. Peers have signed
records of this run's versions, and send the newest ones when they join.

Guarantees: after a restart, no version opens before the last process's peers have returned or the wait has timed out.
Only records that the run's key signed count. If a peer proves a version that this hub does not have, the next version
opens a higher branch, so that no number is ever used for two states.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from p2pcast.artifact.signed_records import Durable, Open, run_id
from p2pcast.files.append_log import AppendLog
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.ground.version import Version
from p2pcast.store.artifact_store import ArtifactStore
from trainer_node.hub_config import RECALL_S
from trainer_node.publish.version_numbers import VersionNumbers

logger = logging.getLogger("p2pcast.hub")

R = TypeVar("R", Durable, Open)

ROSTER = "peers.log"
MOST_IDLE_RECORDS = 1024
"""Most records in the roster's file beyond one per peer before the file is rewritten."""


class Roster:
    """The joined peers, by node, in a file that outlives this process. Changes are written without an fsync: after a
    machine crash, the next start waits RECALL_S at most. The file is rewritten in a thread, because that needs an
    fsync.
    """

    def __init__(self, path: Path, later: Callable[[Coroutine[Any, Any, None], str], None]) -> None:
        """``later(work, name)`` starts a background task. Raises LocalError."""
        self._log = AppendLog(path, skip_damaged=True)
        self._later = later
        self._closed = False
        self._held_back: list[dict[str, str]] | None = None
        """Changes since the current rewrite began; None while there is no rewrite."""
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
        """Close the file. Peers that leave from now on stay in it, so the next process expects them back."""
        self._closed = True
        if self._held_back is None:
            self._log.close()

    def _note(self, record: dict[str, str]) -> None:
        if self._held_back is not None:
            self._held_back.append(record)
        elif len(self._log.records) > len(self.peers) + MOST_IDLE_RECORDS:
            self._held_back = []
            self._later(self._rewrite(sorted(self.peers)), "list of joined peers")
        else:
            self._append([record])

    def _append(self, records: list[dict[str, str]]) -> None:
        try:
            self._log.append(*records, sync=False)
        except LocalError as error:
            _not_written(error)

    async def _rewrite(self, peers: list[str]) -> None:
        try:
            await asyncio.to_thread(self._log.rewrite, [{"joined": peer} for peer in peers])
        except LocalError as error:
            _not_written(error)
        finally:
            held_back, self._held_back = self._held_back or [], None
            if held_back:
                self._append(held_back)
            if self._closed:
                self._log.close()


class Recovery:
    """``restarted``: whether there was a process before this one. ``unlike(peer, version)`` is called for each version
    that a peer has proved and this hub does not have.
    """

    def __init__(
        self,
        store: ArtifactStore,
        numbers: VersionNumbers,
        roster: Roster,
        *,
        restarted: bool,
        unlike: Callable[[str, Version], None],
    ) -> None:
        self.done = asyncio.Event()
        """Set once versions may open."""
        self._store = store
        self._numbers = numbers
        self._roster = roster
        self._unlike = unlike
        self._run = run_id(store.run_key)
        self._awaited = set(roster.peers)
        self._known = bool(roster.peers)
        """Whether any peer is known. If none is, any peer may return, so the hub waits the whole time."""
        self._has_reported: set[str] = set()
        """Peers that have reported since they joined."""
        self._reported: set[Version] = set()
        if not restarted:
            self.done.set()

    async def run(self, seconds: float) -> None:
        """Wait for the peers to return, at most ``seconds``."""
        if self.done.is_set():
            return
        if seconds:
            logger.info(
                "no version opens for %g s, or until the last process's %d peers are back", seconds, len(self._awaited)
            )
        try:
            async with asyncio.timeout(seconds):
                await self.done.wait()
        except TimeoutError:
            self.done.set()

    def joined(self, peer: str) -> None:
        self._has_reported.discard(peer)
        self._roster.joined(peer)

    def learn(self, peer: str, name: str, durable: Sequence[bytes], opened: Sequence[bytes]) -> None:
        """Check the signed records in a peer's first report after joining. Those of later reports are ignored, and so
        are forged records and those of other runs.
        """
        if peer in self._has_reported:
            return
        self._has_reported.add(peer)
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
        self._has_reported.discard(peer)
        self._roster.left(peer)

    def close(self) -> None:
        self._roster.close()

    def _contradicts(self, shown: Durable) -> bool:
        """Whether this hub should have the version but does not, or has a different state under its number."""
        known = self._store.identity(shown.version)
        if known is not None:
            return known != shown.manifest
        versions = {s.version for s in self._store.artifacts.values()}
        if shown.version in versions:
            return False  # stored by release 0.1, which had no version hashes
        oldest, newest = self._kept()
        # Retention may have removed older ones.
        return newest is None or shown.version > newest or (oldest is not None and shown.version > oldest)

    def _kept(self) -> tuple[Version | None, Version | None]:
        """The oldest version from which on this hub has every version, and the newest version."""
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
        if version not in self._reported:
            self._reported.add(version)
            self._unlike(name, version)


def _not_written(error: LocalError) -> None:
    logger.warning(
        "the list of joined peers could not be written; the next start may wait %g s for peers in vain: %s",
        RECALL_S,
        error,
    )


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
