"""Groups of ranks and their versions: over recorded links, into a real store."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from parts import Background, Encoder, FakeLink, record_of

from p2pcast.codec.cell import RAW
from p2pcast.codec.digest import digest
from p2pcast.codec.join_parts import within
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import LocalError, RemoteError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.wire.messages import Type
from tests.support.until import until
from trainer_node.publish.published import Published
from trainer_node.ranks import rank_session
from trainer_node.ranks.rank_intake import LiveRows, RankIntake

V = Version
WORDS = 3000
LAYOUT = Layout([Tensor("w", "F32", (WORDS,))], cell_words=1000)
GROUP = b"g" * 16


class Versions:
    """The lifecycle, recorded."""

    def __init__(self) -> None:
        self.begun: list[Version] = []
        self.finished: list[Published] = []
        self.failures: list[tuple[int, str]] = []
        self.overdue: list[str] = []
        self.failed = False
        self.may_begin = asyncio.Event()
        self.may_begin.set()

    async def until_may_begin(self) -> None:
        await self.may_begin.wait()

    def begin(self, version: Version) -> None:
        self.begun.append(version)

    async def finish_from_ranks(self, done: Published) -> None:
        self.finished.append(done)

    def fail_from_ranks(self, step: int, why: str) -> None:
        self.failures.append((step, why))

    def ranks_overdue(self, ranks: str, why: str) -> None:
        self.overdue.append(ranks)


class Trainer:
    """Scripted ranks of an intake."""

    def __init__(self, encoder: Encoder, wait_s: float = 0.0) -> None:
        self.encoder, self.versions = encoder, Versions()
        self.engines: list[Any] = []
        self.live = LiveRows(lambda: self.engines)
        self.intake = RankIntake(self.versions, encoder.pipeline, encoder.staging, self.live, wait_s=wait_s)
        self.links: list[FakeLink] = []
        self.serial = -1

    def link(self, rank: int) -> FakeLink:
        link = FakeLink("abcdef"[rank])
        self.intake.accept(link, record_of(Type.HELLO, stripes=1))
        return link

    def join(self, ranks: int, group: bytes = GROUP) -> list[FakeLink]:
        self.links = [self.link(rank) for rank in range(ranks)]
        for rank, link in enumerate(self.links):
            link.hears(Type.RANK, group=group, rank=rank, ranks=ranks)
        return self.links

    def begin(self, step: int, **more: Any) -> None:
        self.serial += 1
        self.links[0].hears(Type.LAYOUT, layout=LAYOUT.layout_id, document=LAYOUT.document)
        for link in self.links:
            link.hears(
                Type.BEGIN, **{"serial": self.serial, "step": step, "layout": LAYOUT.layout_id, "resume": False} | more
            )

    async def heard(self, kind: Type, rank: int = 0) -> Any:
        """The next message of a kind at a rank."""
        link = self.links[rank]
        found = await until(lambda: link.bodies(kind))
        link.sent = [row for row in link.sent if row[0] is not kind]
        return found[0]

    def send(self, words: np.ndarray[Any, Any], files: dict[str, bytes] | None = None) -> None:
        """Each cell, whole, from one rank after the other; then DONE."""
        sent = [0] * len(self.links)
        for cell in LAYOUT.cells:
            rank = cell.index % len(self.links)
            new = words[cell.start : cell.start + cell.words]
            sub = within(cell, 0, cell.words)
            self.links[rank].hears(
                Type.CELL, serial=self.serial, cell=cell.index, start=0, words=cell.words, codec=RAW, before=None,
                after=digest(new, sub), changed=cell.words, payload=new.tobytes(),
            )  # fmt: skip
            sent[rank] += 1
        for path, contents in (files or {}).items():
            self.links[0].hears(Type.FILE, serial=self.serial, path=path, contents=contents)
        for rank, link in enumerate(self.links):
            link.hears(Type.DONE, serial=self.serial, parts=sent[rank])

    async def publish(self, step: int, words: np.ndarray[Any, Any], files: dict[str, bytes] | None = None) -> Any:
        self.begin(step)
        for rank in range(len(self.links)):
            await self.heard(Type.BEGUN, rank)
        self.send(words, files)
        return await self.heard(Type.DURABLE)


def words(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 1 << 30, WORDS, dtype=np.uint32)


@pytest.fixture
async def trainer(encoder: Encoder, background: Background):
    made = Trainer(encoder)
    running = asyncio.ensure_future(made.intake.run())
    await asyncio.sleep(0)
    yield made
    running.cancel()
    await asyncio.wait([running])


async def test_ranks_publish_a_whole_state_and_then_deltas(trainer: Trainer, background: Background) -> None:
    trainer.join(2)
    assert trainer.intake.present == "2 of 2"
    assert trainer.links[0].bodies(Type.RANKED) == [{"head": None, "layout": None, "state": None}]
    first = await trainer.publish(1, words(1), {"config.json": b"{}"})
    assert (first["version"], first["params"]) == ([0, 1], WORDS)
    assert trainer.encoder.weights() == words(1).tobytes()
    assert trainer.encoder.pipeline.base_files() == {"config.json": b"{}"}
    second = await trainer.publish(2, words(2))
    assert second["version"] == [0, 2]
    assert trainer.encoder.weights() == words(2).tobytes()
    assert [done.kind for done in trainer.versions.finished] == ["anchor", "delta"]
    assert trainer.versions.begun == [V(0, 1), V(0, 2)]
    trainer.intake.close()
    assert all(isinstance(link.error, RetryableError) for link in trainer.links)
    await background.settle()


async def test_ranks_that_come_later_learn_the_newest_version(trainer: Trainer, background: Background) -> None:
    trainer.join(1)
    await trainer.publish(1, words(1))
    trainer.links[0].hears(Type.LEAVE)
    assert trainer.intake.present is None
    trainer.join(1, b"n" * 16)
    ranked = trainer.links[0].bodies(Type.RANKED)[0]
    assert (ranked["head"], ranked["layout"]) == ([0, 1], LAYOUT.layout_id)
    assert trainer.links[0].bodies(Type.LAYOUT) == [{"layout": LAYOUT.layout_id, "document": LAYOUT.document}]


async def test_a_rank_that_dies_undoes_the_version_and_ends_its_group(trainer: Trainer) -> None:
    trainer.join(2)
    await trainer.publish(1, words(1))
    trainer.begin(2)
    await trainer.heard(Type.BEGUN)
    trainer.links[1].close(RemoteError("cut"))
    assert "rank 1 of 2 is gone: cut" in str(trainer.links[0].error)
    await until(lambda: trainer.versions.failures)
    assert trainer.versions.failures[0][0] == 2
    assert trainer.encoder.pipeline.head == V(0, 1)
    again = trainer.link(0)
    again.hears(Type.RANK, group=GROUP, rank=0, ranks=2)
    assert "over" in str(again.error)


async def test_ranks_that_do_not_agree_are_told_so(trainer: Trainer) -> None:
    trainer.join(2)
    trainer.serial += 1
    for step, link in enumerate(trainer.links):
        link.hears(Type.BEGIN, serial=0, step=step, layout=LAYOUT.layout_id, resume=False)
    assert "do not agree" in (await trainer.heard(Type.ABORTED, 1))["reason"]
    assert trainer.versions.failures[0][0] == 1
    trainer.links[0].hears(Type.BEGIN, serial=0, step=0, layout=LAYOUT.layout_id, resume=False)
    assert "do not agree" in (await trainer.heard(Type.ABORTED))["reason"], "a late BEGIN gets the reason again"


async def test_a_layout_that_no_rank_sent_is_refused(trainer: Trainer) -> None:
    trainer.join(1)
    trainer.serial += 1
    trainer.links[0].hears(Type.BEGIN, serial=0, step=1, layout=bytes(32), resume=False)
    assert "is not known here" in (await trainer.heard(Type.ABORTED))["reason"]


@pytest.mark.parametrize("what", ["rank gives up", "miscounted", "hub fails", "bug"])
async def test_a_version_that_fails_leaves_the_group_ready_for_the_next(trainer: Trainer, monkeypatch, what) -> None:
    trainer.join(2)
    trainer.begin(1)
    await trainer.heard(Type.BEGUN)
    if what == "rank gives up":
        trainer.links[1].hears(Type.ABORTED, serial=0, reason="no memory")
    elif what == "miscounted":
        trainer.links[1].hears(Type.DONE, serial=0, parts=9)
    else:
        error = LocalError("no space is left") if what == "hub fails" else KeyError("by a test")

        def fails(*_: object) -> None:
            raise error

        reported = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        with monkeypatch.context() as patched:
            patched.setattr(trainer.encoder.store, "write_anchor", fails)
            trainer.send(words(1))
            await trainer.heard(Type.ABORTED, 1)
        assert bool(reported) == (what == "bug")
    if what in ("rank gives up", "miscounted"):
        await trainer.heard(Type.ABORTED, 1)
    assert len(trainer.versions.failures) == 1
    assert (await trainer.publish(2, words(2)))["version"][1] == 2


async def test_a_failing_hub_disk_ends_the_intake(encoder: Encoder, monkeypatch) -> None:
    trainer = Trainer(encoder)
    running = asyncio.ensure_future(trainer.intake.run())
    trainer.join(1)

    def full(*_: object) -> None:
        trainer.versions.failed = True
        raise LocalError("no space is left")

    monkeypatch.setattr(encoder.store, "write_anchor", full)
    trainer.begin(1)
    await trainer.heard(Type.BEGUN)
    trainer.send(words(1))
    await asyncio.wait([running])
    assert isinstance(running.exception(), ExceptionGroup)


async def test_a_group_that_left_in_peace_begins_no_more_versions(trainer: Trainer) -> None:
    trainer.join(2)
    trainer.links[1].hears(Type.LEAVE)
    assert trainer.intake.present == "1 of 2"
    trainer.links[0].hears(Type.BEGIN, serial=0, step=1, layout=LAYOUT.layout_id, resume=False)
    assert "has left" in str(trainer.links[0].error)


async def test_another_group_takes_the_place_of_the_first(trainer: Trainer) -> None:
    first = trainer.join(1)
    trainer.join(1, b"n" * 16)
    assert "taken this one's place" in str(first[0].error)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Type.BEGIN, {"serial": 0, "step": 1, "layout": bytes(32), "resume": False}),
        (Type.DONE, {"serial": 0, "parts": 0}),
    ],
)
async def test_a_message_before_rank_ends_the_link(trainer: Trainer, kind, body) -> None:
    link = trainer.link(0)
    link.hears(kind, **body)
    assert "before RANK" in str(link.error)


async def test_messages_out_of_place_end_the_link(trainer: Trainer) -> None:
    with pytest.raises(RemoteError, match="one connection"):
        trainer.intake.accept(FakeLink(), record_of(Type.HELLO, stripes=2))
    trainer.join(3)
    trainer.links[1].hears(Type.LAYOUT, layout=bytes(32), document=b"")
    assert "for rank 0" in str(trainer.links[1].error)
    trainer.join(2, b"m" * 16)
    trainer.links[0].hears(Type.RANK, group=GROUP, rank=0, ranks=2)
    assert "RANK came twice" in str(trainer.links[0].error)
    trainer.join(1, b"k" * 16)
    trainer.links[0].hears(Type.CELL, serial=7)
    assert "not BEGUN" in str(trainer.links[0].error)


async def test_ranks_are_told_of_changed_engines_in_complete_groups(trainer: Trainer) -> None:
    trainer.join(1)
    assert (await trainer.heard(Type.LIVE)) == {"engines": [], "head": None}
    trainer.engines = [["p/e", [0, 1], True]]
    trainer.live.changed.set()
    assert (await trainer.heard(Type.LIVE))["engines"] == trainer.engines


@pytest.mark.parametrize("where", ["gathering", "beginning", "sending"])
async def test_a_rank_that_keeps_the_others_waiting_is_given_up(encoder: Encoder, where: str) -> None:
    trainer = Trainer(encoder, wait_s=10.0)
    running = asyncio.ensure_future(trainer.intake.run())
    await asyncio.sleep(0)
    now = asyncio.get_running_loop().time()
    if where == "gathering":
        trainer.links = [trainer.link(0)]
        trainer.links[0].hears(Type.RANK, group=GROUP, rank=0, ranks=2)
    else:
        trainer.join(2)
    if where == "beginning":
        trainer.links[0].hears(Type.BEGIN, serial=0, step=1, layout=LAYOUT.layout_id, resume=False)
    elif where == "sending":
        trainer.begin(1)
        await trainer.heard(Type.BEGUN)
        trainer.links[0].hears(Type.DONE, serial=0, parts=0)
    trainer.intake.beat(now)
    trainer.intake.beat(now + 9.0)
    assert trainer.versions.overdue == []
    trainer.intake.beat(now + 10.0)
    assert trainer.versions.overdue == ["rank 1 of 2"]
    if where == "gathering":
        assert "kept the others waiting" in str(trainer.links[0].error)
    else:
        assert "kept the others waiting" in (await trainer.heard(Type.ABORTED))["reason"]
    running.cancel()
    await asyncio.wait([running])


async def test_a_silent_rank_is_dropped_and_a_paused_one_is_not(trainer: Trainer) -> None:
    link = trainer.join(1)[0]
    now = asyncio.get_running_loop().time()
    session = link.owner
    session.beat(now + rank_session.PING_S + 1)
    assert Type.PING in link.kinds()
    session.pause(True)
    session.beat(now + 1000.0)
    assert not link.closed
    session.pause(False)
    session.on_link_read(link, 1)
    session.beat(now + 2000.0)
    assert link.aborted


async def test_ranks_ahead_are_not_read_from_while_much_waits(trainer: Trainer, monkeypatch) -> None:
    monkeypatch.setattr("p2pcast.ground.limits.PARTS_HIGH_BYTES", 1000)
    monkeypatch.setattr("p2pcast.ground.limits.PARTS_LOW_BYTES", 500)
    trainer.join(2)
    trainer.begin(1)
    for rank in range(2):
        await trainer.heard(Type.BEGUN, rank)
    trainer.versions.may_begin.clear()
    first = words(1)[:1000]
    cell = LAYOUT.cells[0]
    trainer.links[0].hears(
        Type.CELL, serial=0, cell=0, start=0, words=1000, codec=RAW, before=None,
        after=digest(first, within(cell, 0, 1000)), changed=1000, payload=first.tobytes(),
    )  # fmt: skip
    trainer.links[0].hears(Type.PASSED, serial=0, cell=1)
    assert [link.reading for link in trainer.links] == [False, True]
    trainer.links[1].close()
    await until(lambda: trainer.links[0].reading)


async def test_live_waits_while_a_rank_is_not_writable(trainer: Trainer) -> None:
    link = trainer.join(1)[0]
    await trainer.heard(Type.LIVE)
    link.stripes[0].writable = False
    link.owner.send_live({"engines": [1]})
    assert link.bodies(Type.LIVE) == []
    link.stripes[0].writable = True
    trainer.live.changed.clear()
    link.owner.on_link_writable(link, link.stripes[0])
    assert trainer.live.changed.is_set()
