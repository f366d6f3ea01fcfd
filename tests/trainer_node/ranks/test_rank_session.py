"""A rank's connection, over a recorded link."""

from __future__ import annotations

import asyncio

import pytest
from parts import FakeLink

from p2pcast.ground.errors import RemoteError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.wire import messages
from p2pcast.wire.connection import Message
from p2pcast.wire.messages import Type
from trainer_node.ranks.rank_session import PING_S, SILENCE_S, RankSession


class Owner:
    def __init__(self) -> None:
        self.heard: list[messages.Record] = []
        self.closed: list[object] = []
        self.changes = 0
        self.refuses = False

    def on_message(self, session: RankSession, message: Message) -> None:
        if self.refuses:
            raise RemoteError("out of place")
        self.heard.append(message.body)

    def on_closed(self, session: RankSession, error: object) -> None:
        self.closed.append(error)

    def changed(self) -> None:
        self.changes += 1


@pytest.fixture
async def link() -> FakeLink:
    made = FakeLink()
    made.owner = RankSession(made, Owner())  # type: ignore[arg-type]
    return made


async def test_a_silent_rank_is_dead(link: FakeLink) -> None:
    now = asyncio.get_running_loop().time()
    link.owner.beat(now + PING_S + 1)
    assert link.kinds() == [Type.PING]
    link.owner.beat(now + SILENCE_S + 1)
    assert link.aborted
    assert isinstance(link.error, RetryableError)


async def test_silence_does_not_count_while_the_hub_does_not_read(link: FakeLink) -> None:
    now = asyncio.get_running_loop().time()
    link.owner.pause(True)
    assert not link.reading
    link.owner.beat(now + 10 * SILENCE_S)
    link.owner.pause(False)
    assert link.reading
    assert not link.closed


async def test_live_is_sent_once_and_not_to_a_rank_that_does_not_read(link: FakeLink) -> None:
    first, second = messages.Live([], None), messages.Live([], Version(0, 1))
    link.owner.send_live(first)
    link.owner.send_live(first)
    assert link.kinds() == [Type.LIVE]
    link.stripes[0].writable = False
    link.owner.send_live(second)
    assert link.kinds() == []
    link.stripes[0].writable = True
    link.owner.send_live(second)
    assert link.kinds() == [Type.LIVE]


async def test_an_error_of_a_rank_ends_its_link_alone(link: FakeLink) -> None:
    owner = link.owner._owner
    link.hears(Type.RANK, group=bytes(16), rank=0, ranks=1)
    assert [type(body) for body in owner.heard] == [messages.Rank]
    owner.refuses = True
    link.hears(Type.RANK, group=bytes(16), rank=0, ranks=1)
    assert "out of place" in str(link.error)
    assert len(owner.closed) == 1


async def test_a_rank_that_leaves_has_not_failed(link: FakeLink) -> None:
    link.hears(Type.LEAVE)
    assert link.owner.farewell
    assert link.closed
    assert link.owner._owner.closed == [None]
