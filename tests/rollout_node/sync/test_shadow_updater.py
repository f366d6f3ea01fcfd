from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_holding import FakeCatalog, FakeHolding, FakeNode
from recorder import Recorder, blocking

from p2pcast.errors import IntegrityError, LocalError, RetryableError
from p2pcast.relay.artifact_path import Edge
from p2pcast.version import Version
from p2pcast.wakeup import Wakeup
from rollout_node.sync import shadow_updater as module
from rollout_node.sync.shadow_state import ShadowState
from rollout_node.sync.shadow_updater import KEPT_PATCHES, ShadowUpdater

V = [Version(0, n) for n in range(40)]
LAYOUT = SimpleNamespace(layout_id=b"layout", nbytes=1000)
FOLDER = Path("shadow")


class Shadow(Recorder):
    def __init__(self, version: int, digest: int | None = None) -> None:
        super().__init__(version=V[version], layout=LAYOUT, path=FOLDER, patches=[], rotten=[], closed=False)
        self.state_digest = version if digest is None else digest

    def verify(self, workers):
        return list(self.rotten)

    def close(self) -> None:
        self.closed = True


class Peer:
    """The run's versions have their step as digest. ``path``: holdings, the next one first."""

    def __init__(self, monkeypatch, *, kept=None, base=None, resumed=False, listed=True) -> None:
        monkeypatch.setattr(module, "REFUSED_S", 1e-6)
        monkeypatch.setattr(module, "REFUSED_MAX_S", 1e-5)
        monkeypatch.setattr(module, "SETTLE_S", 0.0)
        monkeypatch.setattr(module, "layout_in", lambda folder: LAYOUT)
        monkeypatch.setattr(module.Shadow, "open", lambda folder, layout: self._open(kept))
        self.state, self.path = ShadowState(), []
        self.orders = SimpleNamespace(hold=None, target=None)
        self.planner = Recorder(
            begun=asyncio.Event(), news=Wakeup(), path=self._path, states=lambda: {v: v.step for v in V},
            whole=lambda: [(V[0], (b"layout", 0))], replan=self._replan,
        )  # fmt: skip
        self.catalog = FakeCatalog()
        if listed:
            self.catalog.complete.set()
        self.repair, self.disposal, self.engines = Repair(), Disposal(), Recorder(oldest=None)
        self.engines.answers["settled"] = True
        self.timeline, self.activity = Recorder(), Activity()
        self.store = Recorder(artifacts={})
        self.staging = Staging(self)
        self.node = FakeNode()
        self.remembered, self.regression = [], False
        self.updater = ShadowUpdater(
            state=self.state,
            folder=FOLDER,
            base=base,
            resumed=resumed,
            planner=self.planner,
            catalog=self.catalog,
            repair=self.repair,
            node=self.node,
            store=self.store,
            staging=self.staging,
            disposal=self.disposal,
            engines=self.engines,
            orders=self.orders,
            timeline=self.timeline,
            activity=self.activity,
            may_leave=lambda version: True,
            is_regression=lambda version: self.regression,
            remember=self._remember,
        )

    @staticmethod
    def _open(kept):
        if isinstance(kept, Shadow):
            return kept
        raise kept or LocalError("there is none")

    def _path(self) -> list[Edge]:
        ahead = [h for h in self.path if self.state.staged is None or h.open.version > self.state.staged]
        return [Edge(h.id, h.open.base, h.open.version, 0) for h in ahead]

    def _replan(self) -> None:
        self.planner.news.notify()

    async def _remember(self, version) -> None:
        self.remembered.append(version)

    def add(self, *holdings) -> None:
        self.path += holdings
        self.node.holdings |= {h.id: h for h in holdings}
        self._replan()

    def stored(self, version: int, identity: bytes):
        made = SimpleNamespace(
            id=b"stored", version=V[version], manifest=SimpleNamespace(identity=identity, state=version),
            assembly=SimpleNamespace(layout=LAYOUT),
        )  # fmt: skip
        self.store.artifacts[made.id] = made

    async def __aenter__(self) -> Peer:
        self.task = asyncio.create_task(self.updater.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    async def until(self, condition) -> None:
        async with asyncio.timeout(600):
            while not condition():
                if self.task.done():
                    self.task.result()
                await asyncio.sleep(0)

    async def staged(self, version: int) -> None:
        await self.until(lambda: self.state.staged == V[version] and V[version] in self.engines.named("on_staged"))


class Activity:
    def __init__(self) -> None:
        self.state, self.states, self.error = "joining", [], None

    def enter(self, state) -> None:
        self.state = state
        self.states.append(state)


class Repair:
    def __init__(self) -> None:
        self.mended, self.completed, self.able = [], [], True

    async def mend(self, shadow, rotten, still):
        async with still():
            self.mended.append(rotten)
            if self.able:
                shadow.rotten = []
        return self.able

    async def complete(self, version, layout, *, deep=False) -> None:
        self.completed.append((version, deep))


class Disposal:
    def __init__(self) -> None:
        self.discarded = []
        self.on_discard = lambda ident: None

    async def discard(self, ident, *, contradicted=False) -> None:
        self.discarded.append((ident, contradicted))
        self.on_discard(ident)


class Staging:
    """``faults``: by version, the error of its next staging."""

    workers = 2

    def __init__(self, peer) -> None:
        self.peer, self.faults = peer, {}
        self.run = blocking

    async def patch(self, holding, shadow):
        if (fault := self.faults.pop(holding.open.version, None)) is not None:
            raise fault
        return SimpleNamespace(holding=holding, unlink=lambda missing_ok: None)

    async def apply(self, shadow, patch) -> None:
        shadow.version, shadow.state_digest = patch.holding.open.version, patch.holding.open.version.step

    async def fill(self, holding, folder):
        return Shadow(holding.open.version.step)

    async def new_shadow(self, folder, layout, version, words_of, digest):
        return Shadow(version.step, digest)


def delta(base, version, **options):
    made = FakeHolding(base, version, complete=True, **options)
    made.durable.set()
    return made


async def test_a_correct_shadow_of_an_earlier_process_is_reused(monkeypatch):
    async with Peer(monkeypatch, kept=Shadow(2)) as peer:
        await peer.staged(2)
        assert peer.planner.begun.is_set()
        assert peer.repair.completed == [(V[2], True)]
        assert peer.remembered == [V[2]]
        await peer.until(lambda: peer.activity.state == "current")


async def test_a_shadow_that_no_signed_digest_matches_is_not_used(monkeypatch):
    kept = Shadow(2, digest=99)
    async with Peer(monkeypatch, kept=kept) as peer:
        await peer.planner.begun.wait()
        assert kept.closed
        assert peer.state.staged is None
        await peer.until(lambda: peer.activity.state == "waiting")


@pytest.mark.parametrize("able", [True, False])
async def test_a_rotten_shadow_is_repaired_or_not_used(monkeypatch, able):
    kept = Shadow(2)
    kept.rotten = ["cell"]
    peer = Peer(monkeypatch, kept=kept)
    peer.repair.able = able
    async with peer:
        await peer.planner.begun.wait()
        assert peer.repair.mended == [["cell"]]
        assert (peer.state.shadow is kept) is able


async def test_a_shadow_of_another_layout_is_not_used(monkeypatch):
    async with Peer(monkeypatch, kept=IntegrityError("another layout")) as peer:
        await peer.planner.begun.wait()
        assert peer.state.shadow is None


async def test_a_correct_shadow_waits_for_the_hubs_list(monkeypatch):
    peer = Peer(monkeypatch, kept=Shadow(2), resumed=True, listed=False)
    peer.store.answers["newest"] = V[1]
    peer.planner.states = lambda: {V[2]: 2} if peer.catalog.complete.is_set() else {}
    async with peer:
        await peer.until(lambda: peer.activity.state == "waiting")
        assert not peer.planner.begun.is_set()
        peer.catalog.complete.set()
        await peer.staged(2)


async def test_a_start_without_the_hub_and_without_versions_waits_for_the_hub(monkeypatch):
    async with Peer(monkeypatch, resumed=True, listed=False) as peer:
        await peer.until(lambda: peer.activity.state == "waiting")
        assert not peer.planner.begun.is_set()


def base_folder(version):
    checkpoint = SimpleNamespace(folder="base", lent=None)
    return SimpleNamespace(
        checkpoint=checkpoint, layout=LAYOUT, digest=0, version_among=lambda whole: version, small_files=dict
    )


async def test_the_base_folder_is_the_first_version(monkeypatch):
    async with Peer(monkeypatch, base=base_folder(V[0])) as peer:
        await peer.staged(0)
        assert peer.node.named("add_layout") == [LAYOUT]


async def test_a_folder_that_is_no_version_of_the_run_ends_the_peer(monkeypatch):
    peer = Peer(monkeypatch, base=base_folder(None))
    with pytest.raises(IntegrityError, match="wrong base"):
        await peer.updater.run()


async def test_versions_are_staged_one_after_the_other(monkeypatch):
    async with Peer(monkeypatch) as peer:
        peer.add(delta(None, 1), delta(1, 2), delta(2, 3))
        await peer.staged(3)
        assert peer.engines.named("on_staged") == [V[1], V[2], V[3]]
        assert [v for v, _ in peer.repair.completed] == [V[1], V[2], V[3]]
        assert peer.remembered == [V[1], V[2], V[3]]
        assert peer.timeline.names == ["staged"] * 3


async def test_an_older_version_than_before_is_not_remembered(monkeypatch):
    peer = Peer(monkeypatch, kept=Shadow(2))
    peer.regression = True
    async with peer:
        await peer.staged(2)
        assert peer.remembered == []


async def test_only_durable_versions_are_applied(monkeypatch):
    async with Peer(monkeypatch, kept=Shadow(1)) as peer:
        await peer.staged(1)
        holding = FakeHolding(1, 2, complete=True)
        peer.add(holding)
        await peer.until(lambda: peer.activity.state == "receiving")
        for _ in range(20):
            await asyncio.sleep(0)
        assert peer.state.staged == V[1]
        holding.durable.set()
        await peer.staged(2)


async def test_an_aborted_version_is_left(monkeypatch):
    async with Peer(monkeypatch, kept=Shadow(1)) as peer:
        await peer.staged(1)
        gone = FakeHolding(1, 2, complete=True)
        peer.add(gone)
        await peer.until(lambda: peer.activity.state == "receiving")
        peer.path.clear()
        gone.end()
        await peer.until(lambda: peer.activity.state == "current")
        assert peer.state.staged == V[1]
        assert peer.activity.error is None


async def test_engines_are_waited_for_unless_the_next_version_is_here(monkeypatch):
    peer = Peer(monkeypatch, kept=Shadow(1))
    peer.engines.answers["settled"] = False
    async with peer:
        await peer.staged(1)
        peer.add(delta(1, 2))
        await peer.staged(2)
        peer.orders.target = V[2]  # the version that engines are to switch to is not skipped
        peer.add(delta(2, 3))
        for _ in range(20):
            await asyncio.sleep(0)
        assert peer.state.staged == V[2]
        peer.engines.answers["settled"] = True
        await peer.staged(3)


async def test_a_refused_version_is_tried_again_and_fetched_anew(monkeypatch):
    async with Peer(monkeypatch, kept=Shadow(1)) as peer:
        await peer.staged(1)
        holding = delta(1, 2)
        peer.staging.faults[V[2]] = IntegrityError("cell 3 does not match")
        peer.add(holding)
        await peer.until(lambda: peer.disposal.discarded)
        assert peer.disposal.discarded == [(holding.id, False)]
        assert peer.timeline.named("refused") == [(V[2], "cell 3 does not match")]
        await peer.staged(2)
        await peer.until(lambda: peer.activity.error is None)


async def test_a_refused_version_may_show_a_rotten_shadow(monkeypatch):
    kept = Shadow(1)
    async with Peer(monkeypatch, kept=kept) as peer:
        await peer.staged(1)
        kept.rotten = ["cell"]
        peer.staging.faults[V[2]] = IntegrityError("it does not fit")
        peer.add(delta(1, 2))
        await peer.staged(2)
        assert peer.repair.mended == [["cell"]]
        assert peer.disposal.discarded == []


async def test_where_sound_cells_do_not_fit_twice_the_digests_are_wrong(monkeypatch):
    kept = Shadow(1)
    async with Peer(monkeypatch, kept=kept) as peer:
        await peer.staged(1)
        holding = delta(1, 2)

        def refuse_again(ident) -> None:
            if len(peer.disposal.discarded) < 2:
                peer.staging.faults[V[2]] = IntegrityError("it does not fit")

        peer.disposal.on_discard = refuse_again
        refuse_again(b"")
        peer.add(holding)
        await peer.until(lambda: kept.closed)
        assert peer.state.staged is None


async def test_a_suspected_shadow_is_read_once_in_a_while(monkeypatch):
    kept = Shadow(1)
    async with Peer(monkeypatch, kept=kept) as peer:
        await peer.staged(1)
        kept.rotten = ["cell"]
        peer.updater.suspect()
        await peer.until(lambda: peer.repair.mended == [["cell"]])
        kept.rotten = ["another"]
        peer.updater.suspect()
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(peer.repair.mended) == 1


async def test_a_shadow_that_cannot_be_repaired_is_made_anew(monkeypatch):
    kept = Shadow(1)
    peer = Peer(monkeypatch, kept=kept)
    peer.repair.able = False
    async with peer:
        await peer.staged(1)
        kept.rotten = ["cell"]
        peer.updater.suspect()
        await peer.until(lambda: kept.closed)
        peer.add(delta(None, 5))
        await peer.staged(5)


async def test_a_staged_version_that_is_not_the_runs_is_given_up(monkeypatch):
    kept = Shadow(1)
    peer = Peer(monkeypatch, kept=kept)
    peer.store.answers["identity"] = b"ours"
    async with peer:
        await peer.staged(1)
        peer.updater.contradict({V[1]: b"ours"})
        peer.updater.contradict({V[1]: b"theirs"})
        await peer.until(lambda: kept.closed)
        assert "distrust" in peer.engines.names
        ((version, why),) = peer.timeline.named("refused")
        assert version == V[1]
        assert "is not the run's version 0.1" in why


async def test_a_stored_version_that_is_not_the_runs_is_discarded(monkeypatch):
    async with Peer(monkeypatch, kept=Shadow(1)) as peer:
        await peer.staged(1)
        peer.stored(2, b"ours")
        peer.disposal.on_discard = lambda ident: peer.store.artifacts.pop(ident)
        peer.updater.contradict({V[2]: b"theirs"})
        await peer.until(lambda: peer.disposal.discarded == [(b"stored", True)])


async def test_a_delta_from_another_state_of_the_same_number_gives_the_shadow_up(monkeypatch):
    kept = Shadow(1)
    peer = Peer(monkeypatch, kept=kept)
    peer.store.answers["identity"] = b"ours"
    async with peer:
        await peer.staged(1)
        peer.add(delta(1, 2, base_hash=b"theirs"))
        await peer.until(lambda: kept.closed)


async def test_a_whole_state_is_filled_once_complete(monkeypatch):
    async with Peer(monkeypatch) as peer:
        holding = FakeHolding(None, 3)
        peer.add(holding)
        await peer.until(lambda: peer.activity.state == "receiving")
        holding.complete = holding.finished = True
        holding.durable.set()
        holding.progress.set()
        await peer.staged(3)
        before = peer.state.shadow
        peer.add(delta(None, 5))
        await peer.staged(5)
        assert before.closed


async def test_a_whole_state_that_is_aborted_is_left(monkeypatch):
    async with Peer(monkeypatch) as peer:
        holding = FakeHolding(None, 3)
        peer.add(holding)
        await peer.until(lambda: peer.activity.state == "receiving")
        peer.path.clear()
        holding.end()
        await peer.until(lambda: peer.activity.state == "waiting")


async def test_a_held_shadow_is_said_to_be_held(monkeypatch):
    peer = Peer(monkeypatch, kept=Shadow(1))
    peer.orders.hold = V[1]
    async with peer:
        await peer.staged(1)
        await peer.until(lambda: peer.activity.state == "held")


@pytest.mark.parametrize(("oldest", "dropped"), [(None, 30), (5, 30 - KEPT_PATCHES), (29, 29)])
async def test_patches_that_no_engine_needs_are_dropped(monkeypatch, oldest, dropped):
    kept = Shadow(30)
    kept.patches = V[1:31]
    peer = Peer(monkeypatch, kept=kept)
    peer.engines.oldest = None if oldest is None else V[oldest]
    async with peer:
        await peer.staged(30)
        assert kept.named("drop_patches") == [V[dropped]]


async def test_a_retryable_error_changes_nothing(monkeypatch):
    async with Peer(monkeypatch, kept=Shadow(1)) as peer:
        await peer.staged(1)
        peer.staging.faults[V[2]] = RetryableError("aborted")
        peer.add(delta(1, 2))
        await peer.staged(2)
        assert peer.timeline.named("refused") == []
