from __future__ import annotations

from p2pcast.ground.errors import RefusedError
from p2pcast.wire.messages import Leave, Ping, Pong, Proof
from rollout_node.control.dispatcher import Dispatcher


def dispatcher(seen):
    made = Dispatcher({Proof: seen.append}, seen.append, lambda: seen.append("lost"))
    return made, {Ping: seen.append, Pong: seen.append}


def test_messages_for_parts_that_do_not_exist_yet_are_kept_in_order():
    seen = []
    made, later = dispatcher(seen)
    made.on_hub_message(Ping(1))
    made.on_hub_message(Proof(b"2"))
    made.on_hub_message(Pong(3))
    made.on_hub_message(Ping(4))
    assert seen == [Proof(b"2")]
    made.begin(later)
    assert seen[1:] == [Ping(1), Pong(3), Ping(4)]


def test_after_begin_messages_are_handled_at_once():
    seen = []
    made, later = dispatcher(seen)
    made.begin(later)
    made.on_hub_message(Ping(1))
    assert seen == [Ping(1)]


def test_a_message_without_a_handler_is_ignored():
    seen = []
    made, later = dispatcher(seen)
    made.on_hub_message(Leave())
    made.begin(later)
    made.on_hub_message(Leave())
    assert seen == []


def test_the_end_of_a_connection_and_a_refusal_are_passed_on():
    seen = []
    made, _ = dispatcher(seen)
    error = RefusedError("no")
    made.on_hub_refused(error)
    made.on_hub_lost()
    assert seen == [error, "lost"]
