from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

from p2pcast.relay.downstream import Downstream
from p2pcast.relay.pull_source import PullSource
from p2pcast.relay.upstream import Upstream
from p2pcast.wire import messages
from p2pcast.wire.connection import Message
from p2pcast.wire.connection_state import TRANSITIONS, ConnectionState, Side
from p2pcast.wire.dispatch import Handlers, dispatch
from p2pcast.wire.messages import RECORDS, Type
from rollout_node.engine.multi_host_leader import MultiHostLeader
from rollout_node.engine.multi_host_member import MultiHostMember
from trainer_node.membership.peer_session import PeerSession
from trainer_node.ranks.rank_intake import LiveRows, RankIntake
from trainer_node.ranks.rank_session import RankSession


def test_a_message_goes_to_the_handler_of_its_record_or_of_its_type():
    seen: list[Any] = []
    abort, signed = Message(Type.ABORT, messages.Abort(), 7), Message(Type.OPEN, messages.NO_BODY, 7, b"signed")
    handlers: Handlers = {messages.Ping: lambda *found: seen.append(found), Type.ABORT: seen.append}
    assert dispatch(handlers, Message(Type.PING, messages.Ping(1)), "child")
    assert dispatch(handlers, abort)
    assert not dispatch(handlers, Message(Type.PONG, messages.Pong(1)))
    assert dispatch({Type.OPEN: seen.append}, signed)
    assert seen == [("child", messages.Ping(1)), abort, signed]


def types_of(*tables: Handlers) -> set[Type]:
    classes = {record: kind for kind, record in RECORDS.items()}
    return {key if isinstance(key, Type) else classes[key] for table in tables for key in table}


def received(state: ConnectionState, sender: Side) -> set[Type]:
    """Messages that an owner may receive. The connection handles ERROR, and nothing has to happen at a PONG."""
    return {t for at, side, t in TRANSITIONS if (at, side) == (state, sender)} - {Type.ERROR, Type.PONG}


async def test_every_message_that_a_connection_may_bring_has_a_handler():
    here = link = MagicMock()
    by_parents = received(ConnectionState.DATA, Side.LISTENER) - {Type.PIECE}
    assert types_of(Upstream(here, link, live=True)._handlers) - {Type.PONG} == by_parents - {Type.HAVE}
    assert types_of(PullSource(here, here, link)._handlers) - {Type.PONG} == by_parents
    assert types_of(Downstream(here)._handlers) == received(ConnectionState.DATA, Side.DIALER)
    assert types_of(PeerSession(link, here)._table) == received(ConnectionState.CONTROL, Side.DIALER)
    rank, ranks = RankSession(link, here), RankIntake(here, here, here, LiveRows(here), wait_s=1.0)
    assert types_of(rank._handlers, ranks._handlers) - {Type.PONG} == received(ConnectionState.PUBLISH, Side.DIALER)
    lead, member = MultiHostLeader("e", here, here), MultiHostMember("e", here, here, None, here)
    assert types_of(lead._handlers) == received(ConnectionState.ENGINE, Side.DIALER)
    assert types_of(member._handlers) == received(ConnectionState.ENGINE, Side.LISTENER)
