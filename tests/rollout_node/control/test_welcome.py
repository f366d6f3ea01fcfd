from __future__ import annotations

import pytest
from recorder import Recorder

from p2pcast.artifact.signed_records import run_id
from p2pcast.ground.errors import RefusedError
from p2pcast.ground.version import Version
from p2pcast.wire import messages
from rollout_node.control.welcome import HubWelcome

KEY = bytes(range(32))


class Parts:
    def __init__(self, name="a") -> None:
        self.bearer = Recorder(token="first")
        self.orders = Recorder(target_observers=Recorder())
        self.catalog, self.evictions, self.timeline = (Recorder() for _ in range(3))
        self.welcome = HubWelcome(
            run_id(KEY), name, self.bearer, self.orders, self.catalog, self.evictions, self.timeline
        )


def body(**changes):
    given = {"key": KEY, "epoch": (0, 0), "commit": "barrier", "target": Version(0, 3), "host": "h"}
    return messages.Welcome(**given | changes)


async def test_the_first_welcome_answers_the_join():
    parts = Parts()
    expected = parts.welcome.expect()
    parts.welcome.accept(body(bearer="second"))
    assert (await expected).key == KEY
    assert parts.bearer.named("replace") == ["second"]
    assert parts.orders.calls == [("welcome", ("barrier", Version(0, 3)), {})]
    assert parts.orders.target_observers.names == ["notify"]
    assert parts.catalog.names == ["begin"]
    assert parts.evictions.names == ["connected"]
    assert parts.timeline.calls == []
    assert parts.welcome.hub_key == KEY


async def test_a_later_welcome_is_the_hub_coming_back():
    parts = Parts()
    parts.welcome.accept(body(target=None))
    assert parts.timeline.calls == [("hub", (), {"reachable": True})]
    assert parts.orders.named("welcome") == [("barrier", None)]
    assert parts.bearer.named("replace") == ["first"]  # an older hub names none


async def test_a_later_welcome_of_another_run_is_refused():
    parts = Parts()
    with pytest.raises(RefusedError, match="the token pins another"):
        parts.welcome.accept(body(key=bytes(32)))
    assert parts.orders.target_observers.names == []


async def test_an_answered_join_is_answered_once():
    parts = Parts()
    parts.welcome.expect()
    parts.welcome.accept(body())
    with pytest.raises(RefusedError):
        parts.welcome.accept(body(key=bytes(32)))


async def test_a_refusal_ends_the_join():
    parts = Parts()
    expected = parts.welcome.expect()
    parts.welcome.refuse(RefusedError("evicted"))
    with pytest.raises(RefusedError, match="evicted"):
        await expected


async def test_a_refusal_that_no_join_waits_for_is_ignored():
    parts = Parts()
    parts.welcome.refuse(RefusedError("evicted"))
    parts.welcome.expect()
    parts.welcome.stop_expecting()
    parts.welcome.refuse(RefusedError("evicted"))


async def test_a_name_that_the_hub_changed_is_logged(caplog):
    parts = Parts()
    parts.welcome.accept(body(name="a"))
    assert caplog.text == ""
    parts.welcome.accept(body(name="a~01"))
    assert "the hub calls this peer a~01" in caplog.text
