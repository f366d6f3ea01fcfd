"""The hub's side of a trainer's ranks: one connection each, one group at a time, one version after the other (docs/wire-protocol.md, section 6).

Promises: a rank that dies before all have said DONE undoes the version everywhere, and the others are told; after that the version goes out
whatever becomes of them. A version that came to nothing leaves the head as it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Protocol

from p2pcast import limits
from p2pcast.codec.layout import Layout
from p2pcast.errors import IntegrityError, LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.relay.node import Node
from p2pcast.state.staging import Staging
from p2pcast.store.store import Store
from p2pcast.tasks import unforeseen
from p2pcast.transport.link import Link
from p2pcast.version import Version
from p2pcast.wire.messages import Body, Type
from trainer_node.intake import Disagreement, Group, Terms
from trainer_node.overdue import Overdue
from trainer_node.publishing import Published, Publishing
from trainer_node.rank_session import Coming, RankSession

logger = logging.getLogger("p2pcast.hub")

LIVE_S = 0.05
"""Between two LIVE: a trainer that waits for engines learns it soon enough, and a thousand ranks are not flooded."""
RETIRED = 256
"""Groups that are over and must not come back by a straggler's RANK."""


class IntakeOwner(Protocol):
    async def until_near(self) -> None:
        """Returns once no peer is further behind than it may be."""

    def begins(self, version: Version) -> None: ...

    async def is_out(self, done: Published) -> None:
        """It is sealed and durable here."""

    def overdue(self, ranks: str, why: str) -> None:
        """They keep the others of their group waiting, and what these wait for is given up."""

    def came_to_nothing(self, step: int, why: str) -> None: ...

    def engines(self) -> list[list[Any]]:
        """Rows of LIVE."""


class Intake:
    """All ranks. ``run`` publishes what they bring; before that, ranks may come and wait."""

    def __init__(
        self, owner: IntakeOwner, publishing: Publishing, node: Node, store: Store, staging: Staging, wait_s: float
    ) -> None:
        """``wait_s``: time for which a rank may keep the others of its group waiting."""
        self._owner = owner
        self._publishing = publishing
        self._node = node
        self._store = store
        self._staging = staging
        self._links: set[RankSession] = set()
        self._group: Group | None = None
        self._ranks: dict[int, RankSession] = {}
        """Of the group."""
        self._parted = ""
        """Who left the group in peace: it begins no more versions, but the others may still want to know what engines serve."""
        self._retired: deque[bytes] = deque(maxlen=RETIRED)
        self._document: bytes | None = None
        """Of the layout that rank 0 brought last."""
        self._coming: Coming | None = None
        """The group's version, from the last BEGIN to its end."""
        self._agreed: asyncio.Queue[Coming] = asyncio.Queue()
        self._why = ""
        """Why the group's last version was aborted."""
        self._overdue = Overdue(wait_s)
        self._serving = False
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        self._serving = True
        if self._group is not None and self._group.complete:
            self._answer()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish_all(), name="versions from ranks")
            tasks.create_task(self._tell_live(), name="live")

    @property
    def present(self) -> str | None:
        """``3 of 4``; None while no rank is here."""
        return None if self._group is None else f"{len(self._ranks)} of {self._group.ranks}"

    def close(self) -> None:
        for session in list(self._links):
            session.link.close(RetryableError("the hub is shutting down"))

    def accept(self, link: Link, hello: Body) -> None:
        """A new connection of a rank. Raises RemoteError."""
        if hello["stripes"] != 1:
            raise RemoteError("a rank has one connection")
        session = RankSession(link, self)
        link.owner = session
        self._links.add(session)

    def beat(self, now: float) -> None:
        """Every second; ``now`` by the loop's clock."""
        for session in list(self._links):
            session.beat(now)
        self._look_for_overdue(now)

    def _look_for_overdue(self, now: float) -> None:
        """A rank that hangs answers PINGs all the same, from another thread."""
        group, coming = self._group, self._coming
        if group is None:
            return
        if coming is not None and coming.open and not coming.sealing and coming.parts is not None:
            parts = coming.parts
            awaited: dict[int, Any] = {r: parts.progress(r) for r in parts.behind if not coming.sessions[r].paused}
        else:
            awaited = dict.fromkeys(group.silent)
        late = self._overdue.look(awaited, now)
        if not late:
            return
        error = RetryableError(f"{group.names(late)} kept the others waiting for {self._overdue.wait_s:g} s (--rank-timeout)")
        self._owner.overdue(group.names(late), str(error))
        if not group.complete:
            self._disband(error)
        elif coming is None:
            self._abort(group, str(error))
        else:
            coming.fail(error)

    def changed(self) -> None:
        """What LIVE says may have changed."""
        self._changed.set()

    # -- what ranks say

    def heard(self, session: RankSession, kind: Type, body: Body) -> None:
        """Raises RemoteError, RetryableError: then the rank's connection ends, and with it its group."""
        if kind is Type.RANK:
            self._rank(session, body)
            return
        group = session.group
        if group is None:
            raise RemoteError(f"{kind.name} before RANK")
        if group is not self._group:
            return
        if kind is Type.LAYOUT:
            self._layout(session, body)
        elif kind is Type.BEGIN:
            self._begin(group, session, body)
        elif kind is Type.ABORTED:
            self._gave_up(group, session, body)
        elif not group.late(body["serial"]):
            self._part(group, session.rank, kind, body)

    def _rank(self, session: RankSession, body: Body) -> None:
        if session.group is not None:
            raise RemoteError("RANK came twice")
        ident, rank, ranks = body["group"], body["rank"], body["ranks"]
        if ident in self._retired:
            raise RetryableError("that group of ranks is over: all ranks have to begin a new one")
        group = self._group
        if group is None or group.ident != ident:
            group = Group(ident, ranks)
            group.enter(rank, ranks)
            self._disband(RetryableError("another group of ranks has taken this one's place"))
            self._group = group
        else:
            group.enter(rank, ranks)
        session.group, session.rank = group, rank
        session.link.introduced()
        self._ranks[rank] = session
        if group.complete:
            logger.info("%d ranks of a trainer are here", ranks)
            if self._serving:
                self._answer()

    def _answer(self) -> None:
        head = self._publishing.head
        manifest = None if head is None else self._store.manifest(head)
        layout = None if manifest is None else manifest.layout
        for session in self._ranks.values():
            if layout is not None:
                session.link.send(Type.LAYOUT, {"layout": layout, "document": self._node.layouts[layout].document})
            session.link.send(
                Type.RANKED,
                {
                    "head": None if head is None else list(head),
                    "layout": layout,
                    "state": None if manifest is None else manifest.state,
                },
            )
        self.changed()

    def _layout(self, session: RankSession, body: Body) -> None:
        if session.rank != 0 or self._coming is not None:
            raise RemoteError("LAYOUT is for rank 0 to send, before its BEGIN")
        self._document = body["document"]

    def _begin(self, group: Group, session: RankSession, body: Body) -> None:
        terms = Terms.of(body)
        if self._parted:
            raise RetryableError(self._parted)
        if group.late(terms.serial):
            session.link.send(Type.ABORTED, {"serial": terms.serial, "reason": self._why})
            return
        try:
            agreed = group.begin(session.rank, terms)
        except Disagreement as error:
            self._owner.came_to_nothing(terms.step, str(error))
            self._abort(group, str(error))
            return
        if agreed:
            row = [self._ranks[rank] for rank in range(group.ranks)]
            self._coming = Coming(group, terms, row, self._document)
            self._agreed.put_nowait(self._coming)

    def _gave_up(self, group: Group, session: RankSession, body: Body) -> None:
        serial, coming = body["serial"], self._coming
        if group.late(serial):
            return
        error = RetryableError(f"{group.name(session.rank)} gave up: {body['reason']}")
        if coming is None:
            self._abort(group, str(error), serial)
        elif serial == coming.terms.serial:
            coming.fail(error)
        else:
            raise RemoteError(f"ABORTED of serial {serial}, which was not begun")

    def _part(self, group: Group, rank: int, kind: Type, body: Body) -> None:
        parts = group.receiving(body["serial"], kind.name)
        coming = self._coming
        if coming is None or not coming.open:
            return
        try:
            if kind is Type.CELL:
                parts.add(rank, body)
            elif kind is Type.PASSED:
                parts.passed(rank, body["cell"])
            elif kind is Type.FILE:
                parts.file(rank, body["path"], body["contents"])
            else:
                parts.done(rank, body["parts"])
        except RemoteError as error:
            coming.fail(error)
            return
        coming.moved()
        coming.balance()

    def left(self, session: RankSession, error: P2PCastError | None) -> None:
        self._links.discard(session)
        group = session.group
        if group is None or group is not self._group:
            return
        del self._ranks[session.rank]
        begun = self._coming is not None or any(group.said(rank) for rank in range(group.ranks))
        if session.farewell and self._ranks and not begun:
            self._parted = f"{group.name(session.rank)} has left"
            logger.info("%s", self._parted)
            return
        reason = f"{group.name(session.rank)} is gone{'' if error is None else f': {error}'}"
        logger.info("%s", reason)
        self._disband(RetryableError(reason))

    def _disband(self, error: P2PCastError) -> None:
        """The group is over."""
        group, coming, ranks = self._group, self._coming, self._ranks
        self._group, self._coming, self._ranks, self._document, self._parted = None, None, {}, None, ""
        if group is None:
            return
        self._retired.append(group.ident)
        if coming is not None and coming.sealing:
            coming.farewell = error
            return
        if coming is not None:
            coming.fail(error)
        if coming is not None or any(group.said(rank) for rank in ranks):
            self._say_aborted(group, list(ranks.values()), str(error), None)
        for session in list(ranks.values()):
            session.link.close(error)

    # -- versions

    def _abort(self, group: Group, reason: str, serial: int | None = None) -> None:
        """Of a version that nobody works on yet."""
        self._say_aborted(group, list(self._ranks.values()), reason, serial)

    def _say_aborted(self, group: Group, sessions: list[RankSession], reason: str, serial: int | None) -> None:
        """Each rank hears of the serial that it said itself; one that has said nothing yet, of the one that is over."""
        said = {session.rank: group.said(session.rank) for session in sessions}
        over = group.end(serial)
        self._why = _text(reason)
        for session in sessions:
            terms = said[session.rank]
            session.link.send(Type.ABORTED, {"serial": over if terms is None else terms.serial, "reason": self._why})

    async def _publish_all(self) -> None:
        while True:
            coming = await self._agreed.get()
            try:
                await self._publish(coming)
            except P2PCastError as error:
                if self._node.error.done():
                    raise
                self._failed(coming, error)
            except Exception as error:  # noqa: BLE001 - what ranks send must not end the hub
                unforeseen("a version from ranks", error)
                self._failed(coming, LocalError(f"internal error at the hub ({type(error).__name__})"))

    async def _publish(self, coming: Coming) -> None:
        """Raises what made it come to nothing."""
        publishing, terms = self._publishing, coming.terms
        await coming.unless_failed(publishing.turn.acquire())
        try:
            await coming.unless_failed(self._owner.until_near())
            layout = await self._layout_of(coming)
            base = await publishing.base_for(layout)
            version = publishing.version_for(terms.step, resume=terms.resume)
            if coming.failure.done():
                coming.failure.result()
            coming.parts = coming.group.begun(layout, whole=base is None)
            told = {"serial": terms.serial, "version": list(version), "base": None if base is None else list(base)}
            choice = publishing.choice_for(layout)
            told["codec"] = choice.codec
            for session in coming.sessions:
                session.link.send(Type.BEGUN, told)
            self._owner.begins(version)
            done = await publishing.receive(version, layout, coming, choice)
            self._finished(coming, done)
            await self._owner.is_out(done)
        finally:
            publishing.turn.release()

    async def _layout_of(self, coming: Coming) -> Layout:
        ident = coming.terms.layout
        known = self._node.layouts.get(ident)
        if known is not None:
            return known
        if coming.document is None:
            raise RemoteError(f"layout {ident.hex()[:8]} is not known here: rank 0 has to send it before its BEGIN")
        return await self._staging.run(_parsed, coming.document, ident)

    def _failed(self, coming: Coming, error: P2PCastError) -> None:
        self._owner.came_to_nothing(coming.terms.step, str(error))
        coming.release()
        if coming.group is self._group:
            self._coming = None
            self._say_aborted(coming.group, coming.sessions, str(error), None)
        self._say_farewell(coming)

    def _finished(self, coming: Coming, done: Published) -> None:
        coming.release()
        coming.group.end()
        if self._coming is coming:
            self._coming = None
        told = {"version": list(done.version), "bytes": done.bytes, "changed": done.changed, "params": done.params}
        for session in coming.sessions:
            session.link.send(Type.DURABLE, told | {"serial": coming.terms.serial})
        self._say_farewell(coming)
        self.changed()

    @staticmethod
    def _say_farewell(coming: Coming) -> None:
        if coming.farewell is not None:
            for session in coming.sessions:
                session.link.close(coming.farewell)

    async def _tell_live(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._group is not None and self._group.complete:
                head = self._publishing.head
                body = {"engines": self._owner.engines(), "head": None if head is None else list(head)}
                for session in self._ranks.values():
                    session.tell_live(body)
            await asyncio.sleep(LIVE_S)


def _parsed(document: bytes, ident: bytes) -> Layout:
    """Raises IntegrityError. Its cells are cut here, in a thread: there may be many."""
    layout = Layout.from_document(document, ident)
    most = sum(-(-t.words // layout.cell_words) + len(layout.cuts.get(n, ())) for n, t in enumerate(layout.tensors))
    if most > limits.MAX_CELLS:
        raise IntegrityError(f"layout {ident.hex()[:8]} has {most} cells, more than {limits.MAX_CELLS}: use larger ones")
    assert layout.cells is not None
    return layout


def _text(reason: str) -> str:
    """As it may travel: short, and without what UTF-8 can't carry."""
    return reason[:1000].encode("utf-8", "replace").decode()
