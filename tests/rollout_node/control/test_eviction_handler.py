from __future__ import annotations

import pytest
from recorder import Background, Recorder, blocking

from p2pcast.artifact.run_key import RunKey
from p2pcast.ground.errors import IntegrityError, RefusedError
from p2pcast.trust.evictions import Evictions
from p2pcast.wire.messages import Evicted
from rollout_node.control.eviction_handler import EvictionHandler

KEY = RunKey(bytes(32))
A, B, TOKEN = b"a" * 16, b"b" * 16, b"t" * 8
NOW = 1_700_000_000.0


class Peer:
    def __init__(self) -> None:
        self.log = Recorder(evictions=Evictions())
        self.background = Background()
        self.dropped = []
        self.links = {A: Recorder(remote=A), B: Recorder(remote=B)}
        self.handler = EvictionHandler(
            self.log,
            self.check,
            lambda nodes, error: self.dropped.append((nodes, str(error))),
            lambda: self.links.values(),
            blocking,
            self.background,
        )

    @staticmethod
    def check(key) -> None:
        if key != KEY.public:
            raise RefusedError("the token pins another")


def signed(*nodes, key=KEY, evicted=True):
    hub = Evictions()
    return [
        hub.decide(node, TOKEN, evicted=evicted, name="x", now=NOW + n, sign=key.sign).packed
        for n, node in enumerate(nodes)
    ]


@pytest.mark.parametrize("how", ["signed", "nodes"])
async def test_every_link_of_an_evicted_node_is_closed_and_the_eviction_saved(how):
    peer = Peer()
    peer.handler.accept(Evicted([A], signed(A) if how == "signed" else None), KEY.public)
    assert peer.log.evictions.nodes == {A}
    assert peer.dropped == [({A}, "this node was evicted from the run")]
    assert peer.links[A].names == ["close"]
    assert peer.links[B].names == []
    assert await peer.background.run() == ["evicted"]
    assert peer.log.names == ["save"]


async def test_a_known_eviction_changes_nothing():
    peer = Peer()
    peer.handler.accept(Evicted([], signed(A)), KEY.public)
    await peer.background.run()
    peer.handler.accept(Evicted([], signed(A)), KEY.public)
    assert len(peer.dropped) == 1
    assert peer.background.work == []


async def test_a_shorter_list_undoes_no_eviction():
    peer = Peer()
    peer.handler.accept(Evicted([], signed(A, B)), KEY.public)
    peer.handler.accept(Evicted([], []), KEY.public)
    peer.handler.accept(Evicted([]), KEY.public)
    assert peer.log.evictions.nodes == {A, B}
    await peer.background.run()


async def test_an_eviction_that_is_undone_closes_no_link():
    peer = Peer()
    peer.handler.accept(Evicted([], signed(A)), KEY.public)
    later = Evictions()
    undone = later.decide(A, TOKEN, evicted=False, name="x", now=NOW + 9, sign=KEY.sign).packed
    peer.handler.accept(Evicted([], [undone]), KEY.public)
    assert peer.log.evictions.nodes == set()
    assert peer.links[A].names == ["close"]
    await peer.background.run()


async def test_a_list_of_another_runs_hub_is_refused():
    peer = Peer()
    with pytest.raises(RefusedError):
        peer.handler.accept(Evicted([], signed(A)), bytes(32))
    with pytest.raises(IntegrityError):
        peer.handler.accept(Evicted([], signed(A, key=RunKey(bytes([1]) * 32))), KEY.public)
    assert not peer.log.evictions.nodes


async def test_evictions_missing_at_the_hub_are_reported():
    peer = Peer()
    peer.log.evictions.connected()
    statements = signed(A, B)
    peer.handler.accept(Evicted([], statements), KEY.public)
    await peer.background.run()
    peer.log.evictions.connected()
    peer.handler.accept(Evicted([], statements[:1]), KEY.public)
    assert peer.handler.unreported(KEY.public) == statements[1:]
