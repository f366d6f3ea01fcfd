from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from fake_holding import FakeHolding, FakeNode, artifact, entry
from recorder import Recorder

from p2pcast.artifact.signed_records import KEY_BYTES, run_id
from p2pcast.ground.errors import IntegrityError, RefusedError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.mirror.object_store import ObjectMissingError
from p2pcast.relay.artifact_path import Edge
from rollout_node.sync import mirror_source as module
from rollout_node.sync.mirror_catalog import MirrorCatalog, NoMirror
from rollout_node.sync.mirror_source import MirrorErrors, MirrorSource, read_run_key
from tests.support.until import until

KEY = bytes(range(KEY_BYTES))
RUN = run_id(KEY)
ONE_TWO = artifact(1, 2)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name in ("RETRY_MIN_S", "RETRY_MAX_S", "POLL_MIN_S", "POLL_MAX_S", "CHECK_S", "GONE_S"):
        monkeypatch.setattr(module, name, 1e-5)


class Objects:
    """``script``: the answer to each request for the key."""

    url = "s3://bucket"

    def __init__(self, *script) -> None:
        self.script = list(script)

    async def get(self, name, most):
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_the_key_that_the_token_pins_is_read():
    events = Recorder()
    errors = MirrorErrors(events)
    objects = Objects(RetryableError("no answer"), RetryableError("no answer"), KEY)
    assert await read_run_key(objects, RUN, errors) == KEY
    assert (errors.count, errors.last) == (2, "no answer")
    assert events.calls == [("emit", ("mirror_failed",), {"why": "no answer"})]  # reported once


@pytest.mark.parametrize("key", [bytes(KEY_BYTES), KEY[1:]])
async def test_another_key_is_refused(key):
    with pytest.raises(RefusedError, match="not the one that the token names"):
        await read_run_key(Objects(key), RUN, MirrorErrors(Recorder()))


async def test_unanswering_mirrors_and_mirrors_of_other_runs_are_given_up():
    with pytest.raises(RetryableError, match="holds nothing of this run"):
        await read_run_key(Objects(ObjectMissingError("404")), RUN, MirrorErrors(Recorder()))
    objects = Objects(*[RetryableError("no answer")] * 99)
    with pytest.raises(RetryableError, match="no answer"):
        await read_run_key(objects, RUN, MirrorErrors(Recorder()))
    assert len(objects.script) == 99 - module.KEY_TRIES


def test_after_a_success_the_same_failure_is_told_again():
    events = Recorder()
    errors = MirrorErrors(events)
    for _ in range(2):
        errors.note(RetryableError("no answer"))
        errors.clear()
    assert events.names == ["emit", "emit"]


class Peer:
    def __init__(self, *, lost=True, parent=False, at_once=True, entries=()) -> None:
        self.lost, self.replanned, self.listed = lost, 0, 0
        self.path = []
        self.events, self.node, room = Recorder(), FakeNode(), asyncio.Semaphore(8)
        self.errors = MirrorErrors(self.events)
        self.catalog = MirrorCatalog(Objects(), RUN, room)
        for each in entries:
            ident = artifact(each.base and each.base.step, each.version.step)
            self.catalog.entries[ident], self.catalog.seen_at[ident] = each, 0.0
        self.refreshes, begun = [], asyncio.Event()
        begun.set()
        self.catalog.refresh = self._refresh
        self.source = MirrorSource(
            Objects(),
            self.catalog,
            self.errors,
            self.node,
            self.events,
            room,
            swarm_lost=lambda: self.lost,
            has_parent=lambda: parent,
            planner=SimpleNamespace(path=lambda: self.path, replan=self._replan, begun=begun),
            on_listed=self._on_listed,
            at_once=at_once,
        )

    async def _refresh(self, run_key):
        self.refreshes.append(run_key)
        return False, None

    def _on_listed(self) -> None:
        self.listed += 1

    def _replan(self) -> None:
        self.replanned += 1

    async def __aenter__(self) -> Peer:
        self.task = asyncio.create_task(self.source.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    async def until(self, condition) -> None:
        await until(condition, check=lambda: self.task.done() and self.task.result())


async def test_the_mirror_is_followed_while_the_hub_is_out_of_reach():
    async with Peer() as peer:
        await peer.until(lambda: peer.source.in_use and peer.listed)
        assert peer.refreshes[0] == b"key"
        assert peer.catalog.in_use
        peer.lost = False
        await peer.until(lambda: not peer.source.in_use)
        assert peer.events.named("emit") == ["mirror_used", "mirror_left"]
        assert peer.replanned == 2


async def test_a_hub_that_comes_back_soon_is_waited_for(monkeypatch):
    monkeypatch.setattr(module, "GONE_S", 3600.0)
    async with Peer(at_once=False) as peer:
        for _ in range(50):
            await asyncio.sleep(0)
        assert not peer.source.in_use


async def test_a_mirror_that_cannot_be_listed_is_told_and_tried_again():
    async with Peer() as peer:
        answers = [RetryableError("no answer"), IntegrityError("a marker is wrong")]

        async def refresh(run_key):
            if not answers:
                return True, None
            error = answers.pop(0)
            if isinstance(error, RetryableError):
                raise error
            return False, error

        peer.catalog.refresh = refresh
        await peer.until(lambda: not answers and peer.errors.last is None and peer.errors.count == 2)


def due(holding=None, **state) -> bool:
    peer = Peer(entries=[entry(1, 2)], parent=state.get("parent", False))
    if holding is not None:
        peer.node.holdings[ONE_TWO] = holding
    if state.get("pulled"):
        peer.node.pulled.add(ONE_TWO)
    if state.get("avoided"):
        peer.catalog.avoid(ONE_TWO, 1e12)
    if state.get("fresh"):
        peer.catalog.seen_at[ONE_TWO] = 1e12
    return peer.source._due(state.get("ident", ONE_TWO))


async def test_the_mirror_is_asked_for_artifacts_without_a_source():
    assert due()
    assert due(FakeHolding(1, 2))
    assert due(parent=True)  # the time limit for the parent has passed
    assert not due(parent=True, fresh=True)
    assert not due(FakeHolding(1, 2, source="parent"))
    assert not due(FakeHolding(1, 2, complete=True))
    assert not due(pulled=True)
    assert not due(avoided=True)
    assert not due(ident=b"unknown")


async def test_the_artifacts_of_the_path_are_fetched(monkeypatch):
    peer = Peer(entries=[entry(1, 2)])
    peer.path = [Edge(ONE_TWO, Version(0, 1), Version(0, 2), 10)]
    fetched = []

    async def fetch(ident) -> None:
        fetched.append(ident)
        peer.path = []

    monkeypatch.setattr(peer.source, "_fetch_artifact", fetch)
    async with peer:
        await peer.until(lambda: fetched == [ONE_TWO])


async def test_fetches_end_when_the_swarm_is_back(monkeypatch):
    peer = Peer(entries=[entry(1, 2)])
    peer.path = [Edge(ONE_TWO, Version(0, 1), Version(0, 2), 10)]
    steps = []

    async def fetch(ident) -> None:
        steps.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("ended")

    monkeypatch.setattr(peer.source, "_fetch_artifact", fetch)
    async with peer:
        await peer.until(lambda: steps == ["begun"])
        peer.lost = False
        await peer.until(lambda: not peer.source.in_use)
        assert steps == ["begun", "ended"]


async def test_a_bug_in_a_fetch_is_not_hidden(monkeypatch):
    peer = Peer(entries=[entry(1, 2)])
    peer.path = [Edge(ONE_TWO, Version(0, 1), Version(0, 2), 10)]

    async def fetch(ident) -> None:
        raise ZeroDivisionError("by a test")

    monkeypatch.setattr(peer.source, "_fetch_artifact", fetch)
    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.timeout(600):
            await peer.source.run()
    [error] = raised.value.exceptions
    assert isinstance(error, ZeroDivisionError)


async def test_an_artifact_is_fetched_until_complete(monkeypatch):
    peer, holding, faults = Peer(entries=[entry(1, 2)]), FakeHolding(1, 2), [RetryableError("no answer")]

    async def open_artifact(ident):
        if faults:
            raise faults.pop()
        holding.receive_from(peer.source)
        return holding

    async def pieces(found) -> None:
        holding.complete, holding.source = True, None

    monkeypatch.setattr(peer.source, "_open", open_artifact)
    monkeypatch.setattr(peer.source, "_fetch_pieces", pieces)
    await peer.source._fetch_artifact(ONE_TWO)
    assert holding.complete
    assert (peer.errors.count, peer.errors.last) == (1, None)


async def test_an_artifact_that_found_another_source_is_left(monkeypatch):
    peer = Peer(entries=[entry(1, 2)])

    async def open_artifact(ident):
        return None

    monkeypatch.setattr(peer.source, "_open", open_artifact)
    await peer.source._fetch_artifact(ONE_TWO)
    assert peer.errors.count == 0


async def test_an_artifact_that_is_damaged_there_is_left_alone_for_a_while(monkeypatch):
    peer, holding = Peer(entries=[entry(1, 2)]), FakeHolding(1, 2)

    async def open_artifact(ident):
        holding.receive_from(peer.source)
        return holding

    async def pieces(found) -> None:
        raise IntegrityError("piece 3 does not match")

    monkeypatch.setattr(peer.source, "_open", open_artifact)
    monkeypatch.setattr(peer.source, "_fetch_pieces", pieces)
    await peer.source._fetch_artifact(ONE_TWO)
    assert peer.errors.count == module.MAX_CORRUPT
    assert peer.replanned == 1
    assert holding.source is None
    assert not peer.source._due(ONE_TWO)
    assert peer.catalog.edges() == {}


async def test_status_and_metrics_show_the_mirrors_list():
    peer = Peer(entries=[entry(1, 2)])
    peer.source.bytes_received = 7
    peer.errors.note(RetryableError("no answer"))
    assert peer.source.status() == {
        "url": "s3://bucket",
        "in_use": False,
        "version": "0.2",
        "artifacts": 1,
        "bytes_received": 7,
        "errors": 1,
        "error": "no answer",
    }
    assert len(list(peer.source.families())) == 4
    assert [e.version for e in peer.catalog.edges().values()] == [Version(0, 2)]
    assert peer.source.pushes(b"")


async def test_a_part_of_an_artifact_ends_with_its_pieces(monkeypatch):
    peer, holding = Peer(entries=[entry(1, 2)]), FakeHolding(1, 2, excerpt=True)
    holding.receive_from(peer.source)

    async def open_artifact(ident):
        return holding

    async def pieces(found, wanted) -> None:
        asyncio.get_running_loop().call_soon(lambda: (holding.stored.add(3), holding.progress.set()))

    monkeypatch.setattr(peer.source, "_open", open_artifact)
    monkeypatch.setattr(peer.source, "_fetch_pieces", pieces)
    await peer.source.fetch_part(ONE_TWO, SimpleNamespace(pieces=lambda assembly: {3}))
    assert holding.source is None

    async def gone(ident):
        return None

    monkeypatch.setattr(peer.source, "_open", gone)
    with pytest.raises(RetryableError):
        await peer.source.fetch_part(ONE_TWO, None)


def test_without_a_mirror_nothing_is_listed():
    mirror = NoMirror()
    assert (mirror.in_use, dict(mirror.entries), mirror.edges(), mirror.take_complaints()) == (False, {}, {}, [])
