"""A late joiner that pulls from several peers at once, with real daemons. Whether a source dies, refuses, is slow or
sends garbage, everything arrives, and nothing twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from p2pcast.ground.version import Version
from p2pcast.relay.pull_source import PullSource
from p2pcast.transport import stripe
from rollout_node.peer import Peer
from rollout_node.sync.downloader import Downloader

MIB = 1 << 20
NAMES = ("a", "b", "c")


def large(seed: int, mib: int = 8) -> dict:
    words = np.random.default_rng(seed).integers(0, 1 << 16, mib * MIB // 2, dtype=np.uint16)
    return {"w": ("bfloat16", (mib, MIB // 2), words.tobytes())}


@pytest.fixture
async def run(swarm):
    """An anchor and a delta in which all is new, at three peers."""
    await swarm.hub_up(codec="flat")
    await swarm.peers_up(*NAMES)
    for step in (1, 2):
        swarm.publish(step, large(step))
        await swarm.live(f"0.{step}")
    # The hub names each holder to a newcomer only after the holder's report.
    first = [s.id for s in swarm.hub.state.store.artifacts.values()]
    await swarm.until(
        lambda: all(len(swarm.hub.control.plan_distributor.sources._whole.get(a, ())) == len(NAMES) for a in first),
        "the hub knows who holds what",
    )
    return swarm


class Late:
    """A newcomer that waits until it has ``enough`` sources, and then has ``hook`` called for each piece that comes to
    it.
    """

    def __init__(self, swarm, monkeypatch, enough: int = len(NAMES)) -> None:
        self.came: list[tuple[bytes, bytes, int]] = []
        """(source, artifact, piece)"""
        self.hook: Callable[[PullSource], None] | None = None
        self.rates: list[int | None] = []
        self.still = False
        """This seeker asks for no further sources."""
        # On a busy machine no source must be dropped as slow.
        monkeypatch.setattr("rollout_node.sync.downloader.ANSWER_S", 60.0)
        monkeypatch.setattr("rollout_node.sync.downloader.SEEK_S", 60.0)
        monkeypatch.setattr("p2pcast.relay.pull_schedule.PULL_STALL_S", 3600.0)
        self._daemon = swarm.peer_begun("late")
        decide, came, set_rate = Downloader._decide, Downloader.came, PullSource.set_rate
        begun: list[bool] = []

        def when_enough(pulling, now):
            if self.still:
                return
            if begun or len(pulling.sources) >= enough:
                begun.append(True)
                decide(pulling, now)

        def noted(pulling, source, artifact, piece):
            self.came.append((source.link.remote, artifact, piece))
            came(pulling, source, artifact, piece)
            if self.hook is not None:
                self.hook(source)

        monkeypatch.setattr("rollout_node.sync.downloader.Downloader._decide", when_enough)
        monkeypatch.setattr("rollout_node.sync.downloader.Downloader.came", noted)
        monkeypatch.setattr(
            PullSource, "set_rate", lambda source, rate: (self.rates.append(rate), set_rate(source, rate))[1]
        )

    @property
    def peer(self) -> Peer:
        assert self._daemon.peer is not None
        return self._daemon.peer

    def staged(self, version: Version) -> bool:
        return self._daemon.peer is not None and self._daemon.peer.staged == version

    def sources(self) -> set[bytes]:
        return {source for source, _, _ in self.came}

    def sound(self) -> None:
        assert self.peer.node.bytes_duplicate == 0
        assert len(set(self.came)) == len(self.came)
        pieces = [(artifact, piece) for _, artifact, piece in self.came]
        assert len(set(pieces)) == len(pieces), "of one source each"


async def test_from_several_at_once(run, monkeypatch):
    late = Late(run, monkeypatch)
    await run.live("0.2")
    late.sound()
    assert late.sources() >= {run.peers[name].ident for name in NAMES}
    assert run.hub.ident not in late.sources(), "the hub's uplink serves all peers"
    assert late.peer.node.garbled == {}


async def test_a_source_that_dies(run, monkeypatch):
    late = Late(run, monkeypatch)
    dying: list[asyncio.Task[None]] = []

    def die(source: PullSource) -> None:
        peer = next(p for p in run.peers.values() if p.ident == source.link.remote)
        if not dying:
            dying.append(asyncio.create_task(run.down(peer)))

    late.hook = die
    await run.until(lambda: late.staged(Version(0, 2)), "it has all")
    await dying[0]
    await run.live("0.2")
    late.sound()


async def test_a_source_that_sends_garbage_is_left_and_blamed(run, monkeypatch):
    evil = run.peers["b"]
    real = evil.node.payload

    def garbled(holding, index):
        found = real(holding, index)
        return None if found is None else bytes([found[0] ^ 1]) + bytes(found[1:])

    monkeypatch.setattr(evil.node, "payload", garbled)
    late = Late(run, monkeypatch)
    await run.live("0.2")
    late.sound()
    assert late.peer.node.garbled == {evil.ident: 1}
    assert evil.ident not in late.sources()
    membership = run.hub.fleet.membership
    await run.until(lambda: membership.blame.witnesses(evil.ident.hex()) == 1, "the hub has heard of it")
    assert evil.ident.hex() in membership.plan.leaves
    assert not membership.blame.quarantined(evil.ident.hex())
    row = next(p for p in (await run.status(run.hub))["peers"] if p["name"] == "b")
    assert (row["blamed_by"], row["quarantined"]) == (1, False)
    run.publish(3, large(3))
    await run.live("0.3")
    assert membership.plan.children(evil.ident.hex()) == ()


async def test_sources_that_refuse(run, monkeypatch):
    for name in NAMES:
        run.peers[name].node.downstream._max_pulls = 0
    late = Late(run, monkeypatch, enough=1)
    await run.live("0.2")
    late.sound()
    assert late.sources() == {run.hub.ident}


async def test_a_source_that_accepts_requests_and_sends_nothing_is_left(run, monkeypatch):
    """The source answers keepalives; its pieces are requested from others all the same."""
    mute = run.peers["c"]
    burst = mute.node.downstream._burst
    monkeypatch.setattr(mute.node.downstream, "_burst", lambda child, stripe: child.live and burst(child, stripe))
    late = Late(run, monkeypatch)
    monkeypatch.setattr("p2pcast.relay.pull_schedule.PULL_STALL_S", 0.5)
    await run.live("0.2")
    late.sound()
    assert mute.ident not in late.sources()


async def test_pulling_continues_after_the_loss_of_the_hub(run, monkeypatch):
    late = Late(run, monkeypatch)
    down: list[asyncio.Task[None]] = []
    late.hook = lambda source: down or down.append(asyncio.create_task(run.down(run.hub)))
    await run.until(lambda: late.staged(Version(0, 2)), "it has all")
    await down[0]
    late.sound()
    assert run.hub.ident not in late.sources()


async def test_the_next_version_arrives_during_catch_up(run, monkeypatch):
    """Pulling pauses everywhere for the broadcast, and continues afterwards."""
    paced: set[int | None] = set()
    pace = stripe.pace
    monkeypatch.setattr(stripe, "pace", lambda sock, rate: (paced.add(rate), pace(sock, rate))[1])
    late = Late(run, monkeypatch)

    def publish(source: PullSource) -> None:
        # After some pieces: as if the rest took long. The version goes by meanwhile.
        if len(late.came) == 5:
            late.still = True
            run.publish(3, large(3))

    late.hook = publish
    await run.until(lambda: late.still, "it has begun")
    await run.live("0.3", *(run.peers[name] for name in NAMES))
    third = next(s.id for s in run.hub.state.store.artifacts.values() if s.version == Version(0, 3))
    await run.until(
        lambda: (h := late.peer.node.holdings.get(third)) is not None and h.finished, "it has been pushed the new one"
    )
    assert late.peer.staged in (None, Version(0, 1)), "and lacks what comes before it"
    late.still = False
    await run.live("0.3")
    late.sound()
    assert third not in {artifact for _, artifact, _ in late.came}
    assert any(late.rates), "sources were told to hold back"
    assert late.rates[-1] is None, "and then as fast as they can"
    assert any(paced), "and did"
