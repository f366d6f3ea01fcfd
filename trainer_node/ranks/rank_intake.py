"""The hub's side of a trainer's ranks: one connection each, one group at a time, one version after another
(docs/formats/wire-protocol.md, section 6).

Guarantees: if a rank dies before all ranks have sent DONE, the version is undone everywhere, and the other ranks are
informed. After that, the version is published without the ranks. A version that fails leaves the head unchanged. A
trainer that has opened a branch publishes nothing once a different trainer has opened a later one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from p2pcast.codec.layout import Layout
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError, RefusedError, RemoteError, RetryableError
from p2pcast.process.background_tasks import report_bug
from p2pcast.sparse import budget_schedule
from p2pcast.state.staging import Staging
from p2pcast.transport.link import Link
from p2pcast.wire import messages
from p2pcast.wire.connection import Message
from p2pcast.wire.dispatch import Handlers, dispatch
from trainer_node.publish.pipeline import Pipeline
from trainer_node.publish.published import Published
from trainer_node.publish.rank_parts import Disagreement, RankGroup, RankParts, Terms
from trainer_node.publish.version_lifecycle import VersionLifecycle
from trainer_node.publish.version_source import RankSource
from trainer_node.ranks.rank_session import PendingVersion, RankSession
from trainer_node.ranks.rank_timeouts import RankTimeouts

logger = logging.getLogger("p2pcast.hub")

LIVE_S = 0.05
"""Shortest interval between two LIVE, in seconds: short for a waiting trainer, and cheap for a thousand ranks."""
RETIRED = 256
"""Number of closed groups to remember, so that a late RANK does not reopen one."""

Part = messages.Cell | messages.Passed | messages.File | messages.Done
"""A message that contributes to a version from ranks."""


@dataclass(frozen=True, slots=True)
class LiveRows:
    """``read`` returns the rows of LIVE. ``changed`` is set when they may have changed."""

    read: Callable[[], list[messages.LiveEngine]]
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class RankIntake:
    """All ranks. Ranks that connect before ``run`` wait; ``run`` publishes their versions."""

    def __init__(
        self,
        versions: VersionLifecycle,
        publishing: Pipeline,
        staging: Staging,
        live: LiveRows,
        *,
        wait_s: float,
        quantise: str | None = None,
    ) -> None:
        """``wait_s``: how long one rank may keep the others of its group waiting, in seconds. ``quantise``: the kind in
        which the hub publishes folders, if any; ranks are then refused.
        """
        self._versions = versions
        self._quantise = quantise
        self._publishing = publishing
        self._staging = staging
        self._live = live
        self._links: set[RankSession] = set()
        self._group: RankGroup | None = None
        self._ranks: dict[int, RankSession] = {}
        """The sessions of the group's ranks."""
        self._rank_left = ""
        """Which rank has left the group cleanly. The group then begins no more versions, but its other ranks may still
        want LIVE.
        """
        self._retired: deque[bytes] = deque(maxlen=RETIRED)
        self._document: bytes | None = None
        """Document of the layout that rank 0 sent last."""
        self._pending: PendingVersion | None = None
        """The group's version, from the last BEGIN until the version is over."""
        self._agreed: asyncio.Queue[PendingVersion] = asyncio.Queue()
        self._why = ""
        """Why the group's last version was aborted."""
        self._overdue = RankTimeouts(wait_s)
        self._serving = False
        self._handlers: Handlers = {
            messages.Rank: self._rank,
            messages.Layout: self._layout,
            messages.Begin: self._begin,
            messages.Aborted: self._gave_up,
            messages.Cell: partial(self._part, RankParts.add),
            messages.Passed: partial(self._part, lambda parts, rank, body: parts.passed(rank, body.cell)),
            messages.File: partial(self._part, lambda parts, rank, body: parts.file(rank, body.path, body.contents)),
            messages.Done: partial(self._part, lambda parts, rank, body: parts.done(rank, body.parts)),
        }

    async def run(self) -> None:
        """Publish versions until cancelled."""
        self._serving = True
        if self._group is not None and self._group.complete:
            self._answer()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish_all(), name="versions from ranks")
            tasks.create_task(self._send_live(), name="live")

    @property
    def present(self) -> str | None:
        """Text such as ``3 of 4``, or None without ranks."""
        return None if self._group is None else f"{len(self._ranks)} of {self._group.ranks}"

    def close(self) -> None:
        for session in list(self._links):
            session.link.close(RetryableError("the hub is shutting down"))

    def accept(self, link: Link, hello: messages.Hello) -> None:
        """Take over a rank's new connection. Raises RemoteError or RefusedError."""
        if self._quantise is not None:
            raise RefusedError(
                f"this hub quantises checkpoint folders (--quantise {self._quantise}) and takes no tensors from ranks: "
                "save folders, or start a hub without --quantise and publish p2pcast.quantised.live_tensors"
            )
        if hello.stripes != 1:
            raise RemoteError("a rank has one connection")
        session = RankSession(link, self)
        link.owner = session
        self._links.add(session)

    def beat(self, now: float) -> None:
        """Called every second; ``now`` is the loop's time."""
        for session in list(self._links):
            session.beat(now)
        self._look_for_overdue(now)

    def _look_for_overdue(self, now: float) -> None:
        """Disband the group if a rank is overdue. A rank that hangs still answers PINGs, from a different thread."""
        group, pending = self._group, self._pending
        if group is None:
            return
        if pending is not None and pending.open and not pending.all_received and pending.parts is not None:
            parts = pending.parts
            awaited: dict[int, Any] = {r: parts.progress(r) for r in parts.behind if not pending.sessions[r].paused}
        else:
            awaited = dict.fromkeys(group.silent)
        late = self._overdue.overdue(awaited, now)
        if not late:
            return
        error = RetryableError(
            f"{group.names(late)} kept the others waiting for {self._overdue.wait_s:g} s (--rank-timeout)"
        )
        self._versions.ranks_overdue(group.names(late), str(error))
        if not group.complete:
            self._disband(error)
        elif pending is None:
            self._abort(group, str(error))
        else:
            pending.fail(error)

    def changed(self) -> None:
        """Called when the contents of LIVE may have changed."""
        self._live.changed.set()

    # -- messages from ranks

    def on_message(self, session: RankSession, message: Message) -> None:
        """Handle a message. If this raises RemoteError or RetryableError, the rank's connection and its group close."""
        group = session.group
        if message.type is not messages.Type.RANK:
            if group is None:
                raise RemoteError(f"{message.type.name} before RANK")
            if group is not self._group:
                return
        dispatch(self._handlers, message, group, session)

    def _rank(self, before: RankGroup | None, session: RankSession, body: messages.Rank) -> None:
        if before is not None:
            raise RemoteError("RANK came twice")
        ident, rank, ranks = body.group, body.rank, body.ranks
        if ident in self._retired:
            raise RetryableError("that group of ranks is over: all ranks have to begin a new one")
        group = self._group
        if group is None or group.ident != ident:
            group = RankGroup(ident, ranks)
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
        head, manifest = self._publishing.head, self._publishing.head_manifest()
        ranked = messages.Ranked(head, None, None)
        if manifest is not None:
            ranked = messages.Ranked(head, manifest.layout, manifest.state, manifest.file_hash(budget_schedule.FILE))
        for session in self._ranks.values():
            if ranked.layout is not None:
                session.link.send(messages.Layout(ranked.layout, self._publishing.layouts[ranked.layout].document))
            session.link.send(ranked)
        self.changed()

    def _layout(self, group: RankGroup, session: RankSession, body: messages.Layout) -> None:
        if session.rank != 0 or self._pending is not None:
            raise RemoteError("LAYOUT is for rank 0 to send, before its BEGIN")
        self._document = body.document

    def _begin(self, group: RankGroup, session: RankSession, body: messages.Begin) -> None:
        terms = Terms.of(body)
        if self._rank_left:
            raise RetryableError(self._rank_left)
        if group.late(terms.serial):
            session.link.send(messages.Aborted(terms.serial, self._why))
            return
        head = self._publishing.head
        if body.branch is not None and head is not None and head.branch > body.branch:
            reason = (
                f"branch {head.branch} was opened after this trainer's branch {body.branch}, by another trainer or "
                "by an older folder at the hub: end this trainer"
            )
            logger.warning("step %d of a trainer: %s", terms.step, reason)
            self._disband(RefusedError(reason))
            return
        try:
            agreed = group.begin(session.rank, terms)
        except Disagreement as error:
            self._versions.fail_from_ranks(terms.step, str(error))
            self._abort(group, str(error))
            return
        if agreed:
            row = [self._ranks[rank] for rank in range(group.ranks)]
            self._pending = PendingVersion(group, terms, row, self._document)
            self._agreed.put_nowait(self._pending)

    def _gave_up(self, group: RankGroup, session: RankSession, body: messages.Aborted) -> None:
        serial, pending = body.serial, self._pending
        if group.late(serial):
            return
        error = RetryableError(f"{group.name(session.rank)} gave up: {body.reason}")
        if pending is None:
            self._abort(group, str(error), serial)
        elif serial == pending.terms.serial:
            pending.fail(error)
        else:
            raise RemoteError(f"ABORTED of serial {serial}, which was not begun")

    def _part(
        self, put: Callable[[RankParts, int, Any], None], group: RankGroup, session: RankSession, body: Part
    ) -> None:
        if group.late(body.serial):
            return
        parts = group.receiving(body.serial, body.type.name)
        pending = self._pending
        if pending is None or not pending.open:
            return
        try:
            put(parts, session.rank, body)
        except RemoteError as error:
            pending.fail(error)
            return
        pending.notify()
        pending.balance()

    def on_closed(self, session: RankSession, error: P2PCastError | None) -> None:
        self._links.discard(session)
        group = session.group
        if group is None or group is not self._group:
            return
        del self._ranks[session.rank]
        begun = self._pending is not None or any(group.terms_of(rank) for rank in range(group.ranks))
        if session.farewell and self._ranks and not begun:
            self._rank_left = f"{group.name(session.rank)} has left"
            logger.info("%s", self._rank_left)
            return
        reason = f"{group.name(session.rank)} is gone{'' if error is None else f': {error}'}"
        logger.info("%s", reason)
        self._disband(RetryableError(reason))

    def _disband(self, error: P2PCastError) -> None:
        """Close the group and its connections."""
        group, pending, ranks = self._group, self._pending, self._ranks
        self._group, self._pending, self._ranks, self._document, self._rank_left = None, None, {}, None, ""
        if group is None:
            return
        self._retired.append(group.ident)
        if pending is not None and pending.all_received:
            pending.farewell = error
            return
        if pending is not None:
            pending.fail(error)
        if pending is not None or any(group.terms_of(rank) for rank in ranks):
            self._send_aborted(group, list(ranks.values()), str(error), None)
        for session in list(ranks.values()):
            session.link.close(error)

    # -- versions

    def _abort(self, group: RankGroup, reason: str, serial: int | None = None) -> None:
        """Abort a version before its encoding."""
        self._send_aborted(group, list(self._ranks.values()), reason, serial)

    def _send_aborted(self, group: RankGroup, sessions: list[RankSession], reason: str, serial: int | None) -> None:
        """Send each rank the serial of its own BEGIN, or, if it has not begun, the last serial that is over."""
        said = {session.rank: group.terms_of(session.rank) for session in sessions}
        over = group.end(serial)
        self._why = _text(reason)
        for session in sessions:
            terms = said[session.rank]
            session.link.send(messages.Aborted(over if terms is None else terms.serial, self._why))

    async def _publish_all(self) -> None:
        while True:
            pending = await self._agreed.get()
            try:
                await self._publish(pending)
            except P2PCastError as error:
                if self._versions.failed:
                    raise
                self._failed(pending, error)
            except Exception as error:  # noqa: BLE001 - what ranks send must not stop the hub
                report_bug("a version from ranks", error)
                self._failed(pending, LocalError(f"internal error at the hub ({type(error).__name__})"))

    async def _publish(self, pending: PendingVersion) -> None:
        """Publish a version. Raises the error that made it fail."""
        publishing, terms = self._publishing, pending.terms
        await pending.unless_failed(publishing.turn.acquire())
        try:
            await pending.unless_failed(self._versions.until_may_begin())
            layout = await self._layout_of(pending)
            base = await publishing.base_for(layout)
            version = publishing.version_for(terms.step, resume=terms.resume)
            if pending.failure.done():
                pending.failure.result()
            pending.parts = pending.group.begun(layout, whole=base is None)
            choice = publishing.choice_for(layout)
            for session in pending.sessions:
                session.link.send(messages.Begun(terms.serial, version, base, choice.codec))
            self._versions.begin(version)
            source = RankSource(pending, self._staging, publishing.base_files)
            done = await publishing.publish(version, layout, source, choice)
            self._finished(pending, done)
            await self._versions.finish_from_ranks(done)
        finally:
            publishing.turn.release()

    async def _layout_of(self, pending: PendingVersion) -> Layout:
        ident = pending.terms.layout
        known = self._publishing.layouts.get(ident)
        if known is not None:
            return known
        if pending.document is None:
            raise RemoteError(f"layout {ident.hex()[:8]} is not known here: rank 0 has to send it before its BEGIN")
        return await self._staging.run(_parsed, pending.document, ident)

    def _failed(self, pending: PendingVersion, error: P2PCastError) -> None:
        self._versions.fail_from_ranks(pending.terms.step, str(error))
        pending.release()
        if pending.group is self._group:
            self._pending = None
            self._send_aborted(pending.group, pending.sessions, str(error), None)
        self._send_farewell(pending)

    def _finished(self, pending: PendingVersion, done: Published) -> None:
        pending.release()
        pending.group.end()
        if self._pending is pending:
            self._pending = None
        durable = messages.Durable(pending.terms.serial, done.version, done.bytes, done.changed, done.params)
        for session in pending.sessions:
            session.link.send(durable)
        self._send_farewell(pending)
        self.changed()

    @staticmethod
    def _send_farewell(pending: PendingVersion) -> None:
        if pending.farewell is not None:
            for session in pending.sessions:
                session.link.close(pending.farewell)

    async def _send_live(self) -> None:
        while True:
            await self._live.changed.wait()
            self._live.changed.clear()
            if self._group is not None and self._group.complete:
                live = messages.Live(self._live.read(), self._publishing.head)
                for session in self._ranks.values():
                    session.send_live(live)
            await asyncio.sleep(LIVE_S)


def _parsed(document: bytes, ident: bytes) -> Layout:
    """Parse a layout and cut its cells, because this runs in a thread and there may be many. Raises IntegrityError."""
    layout = Layout.from_document(document, ident)
    most = sum(-(-t.words // layout.cell_words) + len(layout.cuts.get(n, ())) for n, t in enumerate(layout.tensors))
    if most > limits.MAX_CELLS:
        raise IntegrityError(
            f"layout {ident.hex()[:8]} has {most} cells, more than {limits.MAX_CELLS}: use larger ones"
        )
    assert layout.cells is not None
    return layout


def _text(reason: str) -> str:
    """Shorten the text, and replace what UTF-8 cannot encode."""
    return reason[:1000].encode("utf-8", "replace").decode()
