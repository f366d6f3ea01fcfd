"""From a trainer's ranks to the peers' folders: scripted ranks that speak the protocol over real sockets, and what happens when they do not keep to it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import re
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pcast import limits
from p2pcast.artifact.p2pd import HEADER
from p2pcast.codec.cell import RAW, encode
from p2pcast.codec.digest import digest
from p2pcast.codec.join import within
from p2pcast.codec.layout import Cell, Layout, Tensor
from p2pcast.errors import P2PCastError
from p2pcast.transport.dial import dial
from p2pcast.wire.connection import Identity
from p2pcast.wire.messages import Body, Type
from p2pcast.wire.token import Token
from trainer_node import packing, rank_session

DEADLINE_S = 60.0
NAMES = {"bfloat16": "BF16", "float32": "F32", "uint8": "U8", "float64": "F64", "int64": "I64"}
CELL_WORDS = 1000
FILES = {"config.json": b'{"a": 1}'}
T = Type


def layout_of(state: Any, cell_words: int = CELL_WORDS) -> Layout:
    return Layout([Tensor(n, NAMES[d], s) for n, (d, s, _) in state.items()], cell_words=cell_words)


def words_of(state: Any, layout: Layout, cell: Cell) -> Any:
    contents = state[layout.tensors[cell.tensor].name][2]
    return np.frombuffer(contents, f"<u{cell.word_bytes}")[cell.start : cell.start + cell.words]


class Rank:
    """One connection. Answers PING; everything else is the test's to say."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.deaf = False
        self.error: P2PCastError | None = None
        self.over = asyncio.Event()
        self._heard: dict[Type, list[Body]] = {}
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def dial(self, swarm: Any) -> None:
        token = Token.parse((swarm.folder / "token").read_text())
        identity = Identity(secrets.token_bytes(16), f"rank{self.rank}", token)
        self.link = await dial(self, *swarm.address, identity, purpose="publish", role="rank")

    def say(self, kind: Type, **body: Any) -> None:
        self.link.send(kind, body)

    async def hear(self, kind: Type, where: Callable[[Body], bool] = lambda body: True) -> Body:
        """The next message of its kind; those before it that do not fit are thrown away."""
        async with asyncio.timeout(DEADLINE_S), self._news:
            while True:
                row = self._heard.get(kind, [])
                while row:
                    body = row.pop(0)
                    if where(body):
                        return body
                assert not self.over.is_set(), f"rank {self.rank} waits for {kind.name}: {self.error}"
                await self._news.wait()

    async def ended(self) -> str:
        async with asyncio.timeout(DEADLINE_S):
            await self.over.wait()
        return str(self.error)

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    def _ring(self) -> None:
        task = asyncio.ensure_future(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_link_event(self, link: Any, stripe: Any, event: Any) -> None:
        if event.type is T.PING:
            if not self.deaf:
                link.send(T.PONG, {"t": event.body["t"]})
        else:
            self._heard.setdefault(event.type, []).append(event.body)
            self._ring()

    def on_link_read(self, link: Any, payload_bytes: int) -> None: ...

    def on_link_writable(self, link: Any, stripe: Any) -> None: ...

    def on_link_closed(self, link: Any, error: P2PCastError | None) -> None:
        self.error = error
        self.over.set()
        self._ring()


Said = list[tuple[Type, dict[str, Any]]]


class Trainer:
    """All ranks of one group, and the state that they published last."""

    def __init__(self, swarm: Any, ranks: int, seed: int = 1) -> None:
        self.swarm = swarm
        self.ranks = [Rank(rank, ranks) for rank in range(ranks)]
        self.group = secrets.token_bytes(16)
        self.serial = -1
        self.previous: tuple[list[int], Any] | None = None
        """Version and state."""
        self.layout: Layout = None  # type: ignore[assignment]
        self.draw = random.Random(seed)

    async def up(self) -> Body:
        for rank in self.ranks:
            await rank.dial(self.swarm)
            rank.say(T.RANK, group=self.group, rank=rank.rank, ranks=len(self.ranks))
        told = [await rank.hear(T.RANKED) for rank in self.ranks]
        return told[0]

    async def begin(self, step: int, state: Any, *, resume: bool = False, cell_words: int = CELL_WORDS) -> Body:
        self.serial += 1
        self.layout = layout_of(state, cell_words)
        self.ranks[0].say(T.LAYOUT, layout=self.layout.layout_id, document=self.layout.document)
        for rank in self.ranks:
            rank.say(T.BEGIN, serial=self.serial, step=step, layout=self.layout.layout_id, resume=resume)
        told = [await rank.hear(T.BEGUN) for rank in self.ranks]
        return told[0]

    def ranges(self, cell: Cell) -> Iterator[tuple[int, int, int]]:
        """(rank, start, words): the cell cut at odd places and dealt; sometimes whole."""
        most = len(self.ranks) if self.draw.random() < 0.7 else 1
        edges = sorted({0, cell.words, *(self.draw.randrange(cell.words + 1) for _ in range(most))})
        for start, end in itertools.pairwise(edges):
            yield self.draw.randrange(len(self.ranks)), start, end - start

    def script(self, begun: Body, state: Any, *, stated: float = 0.0, files: dict[str, bytes] | None = None) -> list[Said]:
        """What each rank says: coded against what was published last, or (a share of ``stated``, or all) as absolute words."""
        said: list[Said] = [[] for _ in self.ranks]
        known = self.previous is not None and begun["base"] == self.previous[0]
        for cell in self.layout.cells:
            new = words_of(state, self.layout, cell)
            old = words_of(self.previous[1], self.layout, cell) if known and self.previous is not None else None
            for rank, start, words in self.ranges(cell):
                there = slice(start, start + words)
                if old is None or self.draw.random() < stated:
                    body = part(cell, start, new[there])
                else:
                    body = change(cell, start, old[there], new[there])
                if body is not None:
                    said[rank].append((T.CELL, body | {"serial": self.serial}))
            for row in said:
                if self.draw.random() < 0.2:
                    row.append((T.PASSED, {"serial": self.serial, "cell": cell.index + 1}))
        for path, contents in (files or {}).items():
            said[0].append((T.FILE, {"serial": self.serial, "path": path, "contents": contents}))
        for row in said:
            row.append((T.DONE, {"serial": self.serial, "parts": sum(kind is T.CELL for kind, _ in row)}))
        return said

    def say(self, said: list[Said]) -> None:
        """Everything, ranks interleaved at random."""
        left = [(rank, iter(row)) for rank, row in zip(self.ranks, said, strict=True)]
        while left:
            rank, row = one = self.draw.choice(left)
            for kind, body in itertools.islice(row, self.draw.choice([1, 2, 9])):
                rank.say(kind, **body)
                if kind is T.DONE:
                    left.remove(one)

    async def publish(self, step: int, state: Any, *, files: dict[str, bytes] | None = None, **options: Any) -> Body:
        begun = await self.begin(step, state, **{k: v for k, v in options.items() if k != "stated"})
        self.say(self.script(begun, state, files=files, stated=options.get("stated", 0.0)))
        return await self.durable(step, state, files)

    async def durable(self, step: int, state: Any, files: dict[str, bytes] | None = None) -> Body:
        told = [await rank.hear(T.DURABLE, lambda body: body["serial"] == self.serial) for rank in self.ranks]
        assert told == told[:1] * len(told)
        self.previous = (told[0]["version"], state)
        kept = self.swarm.steps.get(max(self.swarm.steps, default=0), (None, {}))[1] if files is None else files
        self.swarm.steps[step] = (state, kept)
        return told[0]

    async def aborted(self, but: Rank | None = None) -> str:
        """All are told the same, ``but`` for one that is gone."""
        told = [await rank.hear(T.ABORTED) for rank in self.ranks if rank is not but]
        assert told == told[:1] * len(told)
        assert told[0]["serial"] == self.serial
        return str(told[0]["reason"])


def part(cell: Cell, start: int, new: Any) -> dict[str, Any]:
    """Absolute words."""
    sub = within(cell, start, new.size)
    return {
        "cell": cell.index, "start": start, "words": new.size, "codec": RAW, "before": None, "after": digest(new, sub),
        "changed": new.size, "payload": new.tobytes(),
    }  # fmt: skip


def change(cell: Cell, start: int, old: Any, new: Any) -> dict[str, Any] | None:
    coded = encode(within(cell, start, new.size), old, new)
    if coded is None:
        return None
    return {
        "cell": cell.index, "start": start, "words": new.size, "codec": coded.codec, "before": coded.before, "after": coded.after,
        "changed": coded.changed, "payload": coded.payload,
    }  # fmt: skip


@pytest.fixture
async def trainers(swarm):
    """``await trainers(ranks)``: a group that is up; its connections are closed at the end."""
    made: list[Trainer] = []

    async def make(ranks: int, **options: Any) -> Trainer:
        trainer = Trainer(swarm, ranks, **options)
        made.append(trainer)
        trainer.told = await trainer.up()
        return trainer

    yield make
    for trainer in made:
        for rank in trainer.ranks:
            rank.link.abort()


def nothing_is_left(swarm) -> bool:
    partial = list((swarm.folder / "hub" / "partial").iterdir())
    return not partial and all(h.finished for h in swarm.hub.node.holdings.values())


# -- versions


@pytest.mark.parametrize("ranks", [1, 2, 4])
async def test_versions_arrive_bit_for_bit(swarm, states, trainers, ranks):
    await swarm.hub_up()
    await swarm.peers_up("a", "b")
    trainer = await trainers(ranks, seed=ranks)
    assert trainer.told == {"head": None, "layout": None, "state": None}
    state = states.first()
    await trainer.publish(1, state, files={"config.json": b'{"a": 1}', "tok/vocab.txt": b"x" * 70_000, "empty": b""})
    await swarm.live("0.1")
    for step, stated in ((2, 0.0), (3, 0.3), (7, 1.0)):
        before, state = state, states.trained(state, step)
        done = await trainer.publish(step, state, stated=stated)
        assert done["version"] == [0, step]
        assert done["bytes"] == swarm.hub.published.bytes
        words = [(np.frombuffer(before[n][2], f"<u{w}"), np.frombuffer(state[n][2], f"<u{w}")) for n, w in WIDTHS.items()]
        assert done["changed"] == sum(int(np.count_nonzero(a != b)) for a, b in words)
        await swarm.live(f"0.{step}")
    assert swarm.versions("delta") == ["0.2", "0.3", "0.7"]
    assert swarm.versions("anchor") == ["0.1"]
    status = await swarm.status(swarm.hub)
    assert status["last"]["version"] == "0.7"
    assert status["last"]["kind"] == "delta"
    assert status["skipped"] == {}
    assert status["ranks"] == f"{ranks} of {ranks}"
    late = await swarm.peer_up("c")
    await swarm.live("0.7", late)


WIDTHS = {
    "model.embed.weight": 2, "model.norm.weight": 4, "model.odd": 1, "model.scalar": 4, "model.scalar16": 2, "model.wide": 8, "model.ids": 8,
}  # fmt: skip


async def test_a_version_without_changes_and_one_where_all_changes(swarm, states, trainers):
    await swarm.hub_up()
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    assert (await trainer.publish(2, state))["bytes"] == 0
    await swarm.live("0.2")
    await trainer.publish(3, states.trained(state, 3, share=1.0))
    await swarm.live("0.3")
    assert swarm.hub.published.changed == swarm.hub.published.params


async def test_small_files_stay_until_others_come(swarm, states, trainers):
    await swarm.hub_up()
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES | {"gone.json": b"[]"})
    for step, files in ((2, None), (3, {"config.json": b"{}"}), (4, None)):
        state = states.trained(state, step)
        await trainer.publish(step, state, files=files)
        await swarm.live(f"0.{step}")
    grown = states.first(2, states.shapes | {"model.head": ("bfloat16", (40, 9))})
    assert (await trainer.publish(5, grown))["version"] == [0, 5]
    await swarm.live("0.5")
    assert swarm.versions("anchor") == ["0.1", "0.5"]


async def test_every_fiftieth_version_is_an_anchor_too(swarm, states, trainers, monkeypatch):
    monkeypatch.setattr("trainer_node.keeping.ANCHOR_EVERY", 2)
    await swarm.hub_up()
    told = await swarm.peer_up("b")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    for step in (2, 3, 4):
        state = states.trained(state, step)
        await trainer.publish(step, state)
    await swarm.until(lambda: not swarm.hub.publishing.turn.locked(), "the hub is through")
    await swarm.until(
        lambda: {(None, (0, 3)), (None, (0, 4))} & {(e.base, e.version) for e in told.catalog.edges().values()},
        "peers know of the anchor",
    )
    await swarm.peer_up("a")
    await swarm.live("0.4")


async def test_pieces_leave_while_later_cells_are_still_to_come(swarm, states, trainers, monkeypatch):
    """Also those that were made just after the last signature: whoever has nothing more to pack waits no longer."""
    monkeypatch.setattr(packing, "EMIT_S", 1e9)
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first(0, {"a": ("bfloat16", (400, 1000)), "b": ("bfloat16", (9,))})
    await trainer.publish(1, state, files=FILES)
    await swarm.live("0.1")
    before = peer.node.bytes_received
    new = states.trained(state, 2, share=0.9)
    said = trainer.script(await trainer.begin(2, new), new)
    ends = [row.pop() for row in said]
    held = [next(k for k, (_, body) in enumerate(row) if body["cell"] >= 390) for row in said]
    for rank, row, end in zip(trainer.ranks, said, held, strict=True):
        for kind, body in row[:end]:
            rank.say(kind, **body)
        rank.say(T.PASSED, serial=trainer.serial, cell=390)
    coming = swarm.hub.intake._coming
    await swarm.until(
        lambda: coming.queued_bytes == coming.parts.waiting_bytes == 0 and coming.parts._low == 390,
        "the hub has packed what was sent",
    )
    (log,) = (swarm.folder / "hub" / "partial").iterdir()
    whole = (log.stat().st_size - len(HEADER)) // limits.PIECE_BYTES * limits.PIECE_BYTES
    assert whole > 4 * limits.PIECE_BYTES
    await swarm.until(
        lambda: peer.node.bytes_received - before == whole, "every piece that is whole has come, before the last cells were sent"
    )
    assert swarm.hub.publishing.head == (0, 1)
    for rank, row, end, done in zip(trainer.ranks, said, held, ends, strict=True):
        for kind, body in [*row[end:], done]:
            rank.say(kind, **body)
    await trainer.durable(2, new)
    await swarm.live("0.2")


async def test_folders_and_ranks_take_turns(swarm, states, trainers):
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    await swarm.peer_up("a")
    await swarm.live("0.1")
    trainer = await trainers(3)
    manifest = swarm.hub.store.manifest((0, 1))
    assert trainer.told == {"head": [0, 1], "layout": manifest.layout, "state": manifest.state}
    document = await trainer.ranks[2].hear(T.LAYOUT)
    assert Layout.from_document(document["document"], manifest.layout) == layout_of(state, limits.CELL_WORDS)
    trainer.previous = ([0, 1], state)
    state = states.trained(state, 2)
    await trainer.publish(2, state, cell_words=limits.CELL_WORDS)
    await swarm.live("0.2")
    state = states.trained(state, 3)
    swarm.publish(3, state)
    await swarm.live("0.3")
    trainer.previous = ([0, 3], state)
    await trainer.publish(4, states.trained(state, 4), cell_words=limits.CELL_WORDS)
    await swarm.live("0.4")
    assert swarm.versions("anchor") == ["0.1"]
    swarm.publish(4, states.trained(state, 4))
    await swarm.until(lambda: "4" in swarm.hub.memory["published"], "the hub has looked at step_4")
    assert swarm.versions() == ["0.1", "0.2", "0.3", "0.4"], "the weights that ranks published as step 4 are nothing new"
    assert swarm.hub.memory["marks"]["2"] == swarm.hub.publishing.mark_of((0, 2))


async def test_a_resumed_trainer_opens_a_branch(swarm, states, trainers):
    await swarm.hub_up()
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(5, state, files=FILES)
    state = states.trained(state, 2)
    assert (await trainer.publish(6, state, resume=True))["version"] == [1, 6]
    await swarm.live("1.6")
    state = states.trained(state, 3)
    assert (await trainer.publish(6, state))["version"] == [2, 6]
    await swarm.live("2.6")
    assert (await trainer.publish(2, states.trained(state, 4)))["version"] == [3, 2]
    await swarm.live("3.2")
    assert swarm.versions("anchor") == ["0.5"]


async def test_without_a_folder_and_after_a_restart(swarm, states, trainers):
    await swarm.hub_up(checkpoints=None)
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    await swarm.live("0.1")
    await swarm.down(swarm.hub)
    assert all([await rank.ended() for rank in trainer.ranks])
    await swarm.hub_up(checkpoints=None)
    again = await trainers(4)
    assert again.told["head"] == [0, 1]
    again.previous = ([0, 1], state)
    new = states.trained(state, 2)
    await again.publish(2, new)
    await swarm.live("0.2")
    assert swarm.versions("delta") == ["0.2"]


async def test_ranks_are_told_what_engines_serve(swarm, states, trainers):
    await swarm.hub_up()
    await swarm.peers_up("a", "b")
    trainer = await trainers(2)
    assert {"engines", "head"} == set(await trainer.ranks[1].hear(T.LIVE))
    await trainer.publish(1, states.first(), files=FILES)

    def all_live(body: Body) -> bool:
        return body["head"] == [0, 1] and [row[1:] for row in body["engines"]] == [[[0, 1], True]] * 2

    for rank in trainer.ranks:
        live = await rank.hear(T.LIVE, all_live)
        assert {name.split("/")[0] for name, _, _ in live["engines"]} == {"a", "b"}
    await swarm.down(swarm.peers["b"])
    await trainer.ranks[0].hear(T.LIVE, lambda body: len(body["engines"]) == 1)


async def test_a_rank_that_leaves_in_peace(swarm, states, trainers):
    """The others are still told what engines serve; but there are no more versions."""
    await swarm.hub_up()
    trainer = await trainers(3)
    await trainer.publish(1, states.first(), files=FILES)
    left, begins, listens = trainer.ranks
    left.say(T.LEAVE)
    await left.ended()
    await swarm.peers_up("a")
    for rank in (begins, listens):
        await rank.hear(T.LIVE, lambda body: [row[1] for row in body["engines"]] == [[0, 1]])
    begins.say(T.BEGIN, serial=trainer.serial + 1, step=2, layout=trainer.layout.layout_id, resume=False)
    assert "rank 0 of 3 has left" in await begins.ended()
    assert "rank 1 of 3 is gone" in await listens.ended()
    again = await trainers(3)
    await again.publish(2, states.trained(states.first(), 2), files=FILES)


# -- what goes wrong


def until_lost(where: str) -> Callable[[int, int], bool]:
    """(cells said, cells to say) → whether the rank dies now."""
    return {"before": lambda n, of: True, "between": lambda n, of: n == of // 2, "after": lambda n, of: n == of}[where]


@pytest.mark.parametrize("where", ["before", "between", "after", "done"])
@pytest.mark.parametrize("first", [True, False], ids=["anchor", "delta"])
async def test_a_lost_rank_undoes_the_version(swarm, states, trainers, where, first):
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    state = states.first()
    swarm.steps[0] = (state, FILES)
    if not first:
        swarm.publish(1, state)
        await swarm.live("0.1")
    head = swarm.hub.publishing.head
    trainer = await trainers(4)
    trainer.previous = None if first else ([0, 1], state)
    new = states.trained(state, 2)
    words = CELL_WORDS if first else limits.CELL_WORDS
    said = trainer.script(await trainer.begin(2, new, cell_words=words), new)
    lost = trainer.ranks[2]
    row = said[2]
    said[2] = []
    cells = sum(kind is T.CELL for kind, _ in row)
    done = row.pop()
    sent = 0
    dies = until_lost("after" if where == "done" else where)
    for rank, others in zip(trainer.ranks, said, strict=True):
        for kind, body in others:
            if kind is not T.DONE or (where == "done" and rank.rank != 0):
                rank.say(kind, **body)
    for kind, body in row:
        if dies(sent, cells):
            break
        lost.say(kind, **body)
        sent += kind is T.CELL
    if where == "done":
        lost.say(*done[:1], **done[1])
    lost.link.close()
    assert (await trainer.aborted(but=lost)).startswith("rank 2 of 4 is gone")
    for rank in trainer.ranks:
        if rank is not lost:
            assert "rank 2 of 4 is gone" in await rank.ended()
    await swarm.until(lambda: "step_2 from ranks" in swarm.hub.skipped, "the hub has given it up")
    await swarm.until(lambda: nothing_is_left(swarm), "nothing of it is left at the hub")
    assert swarm.hub.publishing.head == head
    await swarm.until(lambda: all(h.finished for h in peer.node.holdings.values()), "nor at the peer")
    assert "step_2 from ranks" in (await swarm.status(swarm.hub))["skipped"]
    again = await trainers(2)
    again.previous = trainer.previous
    await again.publish(3, new, files=FILES, cell_words=words)
    await swarm.live("0.3")
    assert swarm.hub.skipped == {}
    assert swarm.versions() == (["0.3"] if first else ["0.1", "0.3"])


async def test_once_all_is_said_the_version_goes_out_whatever_becomes_of_a_rank(swarm, states, trainers, monkeypatch):
    await swarm.hub_up()
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    new = states.trained(state, 2)
    said = trainer.script(await trainer.begin(2, new), new)
    held, go_on = asyncio.Event(), asyncio.Event()
    seal = swarm.hub._seal

    async def held_back(holding: Any) -> None:
        held.set()
        await go_on.wait()
        await seal(holding)

    monkeypatch.setattr(swarm.hub, "_seal", held_back)
    trainer.say(said)
    await held.wait()
    trainer.ranks[1].link.close()
    other = trainer.ranks[0]
    await swarm.until(lambda: len(swarm.hub.intake._links) == 1, "the hub has seen it go")
    go_on.set()
    assert (await other.hear(T.DURABLE))["version"] == [0, 2]
    assert "rank 1 of 2 is gone" in await other.ended()
    swarm.steps[2] = (new, FILES)
    await swarm.live("0.2")


async def test_ranks_that_do_not_agree(swarm, states, trainers):
    await swarm.hub_up()
    trainer = await trainers(3)
    state = states.first()
    layout = layout_of(state)
    said = {"step": 4, "layout": layout.layout_id, "resume": False}
    for serial, odd in enumerate(({"step": 5}, {"layout": bytes(32)}, {"resume": True})):
        trainer.serial = serial
        for rank in trainer.ranks:
            rank.say(T.BEGIN, serial=serial, **said | (odd if rank.rank == 1 else {}))
        reason = await trainer.aborted()
        assert "the ranks do not agree: ranks 0, 2 said" in reason
        assert "; rank 1 said" in reason
    for rank in trainer.ranks:
        rank.say(T.BEGIN, serial=3 + rank.rank, **said)
    for rank in trainer.ranks:
        assert (
            "rank 2 said serial 5"
            in (await rank.hear(T.ABORTED, lambda body, own=3 + rank.rank: body["serial"] == own))["reason"]
        )
    trainer.serial = 5
    await trainer.publish(4, state, files=FILES)
    assert swarm.versions() == ["0.4"]


Spoil = Callable[[list[Said]], None]


def cells(said: list[Said]) -> list[tuple[Said, int]]:
    return [(row, k) for row in said for k, (kind, _) in enumerate(row) if kind is T.CELL]


def overlap(said: list[Said]) -> None:
    row, at = cells(said)[3]
    other = next(r for r in said if r is not row)
    body = row[at][1]
    where = next(k for k, (_, b) in enumerate(other) if b.get("cell", 1 << 40) >= body["cell"])
    other.insert(where, (T.CELL, body))
    other[-1] = (T.DONE, other[-1][1] | {"parts": other[-1][1]["parts"] + 1})


def altered(**changes: Callable[[Any], Any]) -> Spoil:
    def spoil(said: list[Said]) -> None:
        row, at = cells(said)[2]
        body = row[at][1]
        row[at] = (T.CELL, body | {key: change(body[key]) for key, change in changes.items()})

    return spoil


def miscounted(said: list[Said]) -> None:
    said[0][-1] = (T.DONE, said[0][-1][1] | {"parts": 999})


def left_out(said: list[Said]) -> None:
    row, at = cells(said)[2]
    del row[at]
    row[-1] = (T.DONE, row[-1][1] | {"parts": row[-1][1]["parts"] - 1})


def late(said: list[Said]) -> None:
    row, at = cells(said)[0]
    row.insert(len(row) - 2, row.pop(at))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (overlap, "already"),
        (altered(before=lambda b: b ^ 1), "wrong base"),
        (altered(after=lambda a: a ^ 1), "leads to digest"),
        (altered(payload=lambda p: p[:-1]), "rank . of 2: cell"),
        (altered(codec=lambda c: 99), "codec 99"),
        (altered(start=lambda s: 1 << 20), "the cell has"),
        (altered(cell=lambda c: 1 << 30), "is not one of the layout's"),
        (miscounted, "says that it sent 999 parts"),
        (late, "comes late|PASSED"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)  # fmt: skip
async def test_a_part_that_is_not_right_undoes_the_version(swarm, states, trainers, spoil, why):
    await swarm.hub_up()
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    await swarm.live("0.1")
    new = states.trained(state, 2)
    said = trainer.script(await trainer.begin(2, new), new)
    spoil(said)
    trainer.say(said)
    reason = await trainer.aborted()
    assert re.search(why, reason), reason
    await swarm.until(lambda: nothing_is_left(swarm), "nothing of it is left")
    assert swarm.hub.publishing.head == (0, 1)
    await trainer.publish(2, new)
    await swarm.live("0.2")


@pytest.mark.parametrize(("spoil", "why"), [(left_out, "came from all ranks together"), (altered(before=lambda b: 1), "nothing that it could change"), (altered(after=lambda a: a ^ 1), "its words have digest")], ids=["missing", "change", "digest"])  # fmt: skip
async def test_a_first_state_that_is_not_right(swarm, states, trainers, spoil, why):
    await swarm.hub_up()
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    said = trainer.script(await trainer.begin(1, state), state, files=FILES)
    spoil(said)
    trainer.say(said)
    assert why in await trainer.aborted()
    assert swarm.hub.publishing.head is None
    await trainer.publish(1, state, files=FILES)
    await swarm.live("0.1")


async def test_another_layout_that_comes_to_nothing_costs_no_anchor(swarm, states, trainers):
    await swarm.hub_up()
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    state = states.trained(state, 2)
    await trainer.publish(2, state)
    previous = trainer.previous
    grown = states.first(2, states.shapes | {"model.head": ("bfloat16", (40, 9))})
    begun = await trainer.begin(3, grown)
    assert begun["base"] is None
    trainer.previous = None
    said = trainer.script(begun, grown)
    miscounted(said)
    trainer.say(said)
    await trainer.aborted()
    trainer.previous = previous
    new = states.trained(state, 4)
    await trainer.publish(4, new)
    await swarm.live("0.4")
    assert swarm.versions("anchor") == ["0.1"]


async def test_a_rank_that_gives_up(swarm, states, trainers):
    await swarm.hub_up()
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    await trainer.begin(2, state)
    trainer.ranks[1].say(T.ABORTED, serial=1, reason="out of memory")
    assert await trainer.aborted() == "rank 1 of 2 gave up: out of memory"
    # Before the others have begun: they hear of it, and again when they begin all the same.
    trainer.serial += 1
    trainer.ranks[0].say(T.ABORTED, serial=2, reason="not yet")
    assert await trainer.aborted() == "rank 0 of 2 gave up: not yet"
    trainer.ranks[1].say(T.BEGIN, serial=2, step=2, layout=trainer.layout.layout_id, resume=False)
    assert (await trainer.ranks[1].hear(T.ABORTED))["serial"] == 2
    trainer.ranks[1].say(
        T.CELL, **part(trainer.layout.cells[0], 0, words_of(state, trainer.layout, trainer.layout.cells[0])), serial=2
    )
    await trainer.publish(2, states.trained(state, 2))
    assert swarm.hub.publishing.head == (0, 2)


async def test_an_unknown_layout(swarm, states, trainers):
    await swarm.hub_up()
    trainer = await trainers(2)
    trainer.serial = 0
    for rank in trainer.ranks:
        rank.say(T.BEGIN, serial=0, step=1, layout=bytes(32), resume=False)
    assert "rank 0 has to send it" in await trainer.aborted()
    trainer.serial = 1
    trainer.ranks[0].say(T.LAYOUT, layout=bytes(32), document=b"nonsense")
    for rank in trainer.ranks:
        rank.say(T.BEGIN, serial=1, step=1, layout=bytes(32), resume=False)
    assert "does not match its layout_id" in await trainer.aborted()
    await trainer.publish(1, states.first(), files=FILES)


async def test_a_new_group_takes_the_place_of_an_older(swarm, states, trainers):
    await swarm.hub_up()
    old = await trainers(2)
    state = states.first()
    await old.publish(1, state, files=FILES)
    await old.begin(2, state)
    new = await trainers(3)
    assert "another group" in await old.aborted()
    for rank in old.ranks:
        assert "another group" in await rank.ended()
    new.previous = old.previous
    await new.publish(2, states.trained(state, 2))
    straggler = Rank(0, 2)
    await straggler.dial(swarm)
    straggler.say(T.RANK, group=old.group, rank=0, ranks=2)
    assert "that group of ranks is over" in await straggler.ended()
    await new.publish(3, states.trained(state, 3))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([(T.BEGIN, {"serial": 0, "step": 1, "layout": bytes(32), "resume": False})], "BEGIN before RANK"),
        ([(T.RANK, {"group": bytes(16), "rank": 2, "ranks": 2})], "does not fit a group of 2"),
        ([(T.RANK, {"group": bytes(16), "rank": 0, "ranks": 2})] * 2, "RANK came twice"),
        ([(T.RANK, {"group": bytes(16), "rank": 0, "ranks": 1}), (T.PASSED, {"serial": 0, "cell": 0})], "which was not BEGUN"),
        ([(T.RANK, {"group": bytes(16), "rank": 0, "ranks": 1}), (T.ABORTED, {"serial": 0, "reason": ""}), *[(T.BEGIN, {"serial": 1, "step": 1, "layout": bytes(32), "resume": False})] * 2], "while the one before is not over"),
        ([(T.RANK, {"group": bytes(16), "rank": 1, "ranks": 2}), (T.LAYOUT, {"layout": bytes(32), "document": b""})], "LAYOUT is for rank 0"),
    ],
    ids=["begin", "rank", "twice", "passed", "begins", "layout"],
)  # fmt: skip
async def test_what_is_out_of_place_ends_the_connection(swarm, said, why):
    await swarm.hub_up()
    rank = Rank(0, 1)
    await rank.dial(swarm)
    for kind, body in said:
        rank.say(kind, **body)
    assert why in await rank.ended()


async def test_a_layout_of_too_many_cells(swarm, states, trainers):
    await swarm.hub_up()
    trainer = await trainers(1)
    trainer.serial = 0
    layout = Layout([Tensor("w", "U8", (1 << 45,))], cell_words=1)
    trainer.ranks[0].say(T.LAYOUT, layout=layout.layout_id, document=layout.document)
    trainer.ranks[0].say(T.BEGIN, serial=0, step=1, layout=layout.layout_id, resume=False)
    assert "cells, more than" in await trainer.aborted()
    await trainer.publish(1, states.first(), files=FILES)


def nonsense(draw: random.Random, layout: Layout) -> tuple[Type, dict[str, Any]]:
    """A message that the schema takes."""
    serial, index = draw.randrange(3), draw.randrange(len(layout.cells) + 1)
    cell = layout.cells[min(index, len(layout.cells) - 1)]
    start = draw.randrange(cell.words)
    words = draw.randint(1, cell.words)
    size = draw.choice([0, 1, 7, 40, words * cell.word_bytes])
    payload = draw.choice(
        [bytes, draw.randbytes, lambda n: b"\1\1" + bytes([cell.word_bytes, 3 + cell.word_bytes]) + draw.randbytes(n)]
    )(size)
    return draw.choice(
        [
            (T.BEGIN, {"serial": serial, "step": draw.randrange(9), "layout": draw.choice([layout.layout_id, bytes(32)]), "resume": draw.random() < 0.2}),
            (T.CELL, {"serial": serial, "cell": index, "start": start, "words": words, "codec": draw.randint(1, 5), "before": draw.choice([None, 0]), "after": 0, "changed": 1, "payload": payload}),
            (T.CELL, {"serial": serial} | part(cell, 0, np.zeros(cell.words, f"<u{cell.word_bytes}"))),
            (T.PASSED, {"serial": serial, "cell": index}),
            (T.FILE, {"serial": serial, "path": draw.choice(["a", "b", "../c", ""]), "contents": payload}),
            (T.DONE, {"serial": serial, "parts": draw.randrange(3)}),
            (T.ABORTED, {"serial": serial, "reason": "no reason"}),
            (T.LAYOUT, {"layout": layout.layout_id, "document": draw.choice([layout.document, payload])}),
            (T.PING, {"t": 1}),
            (T.RANK, {"group": bytes(16), "rank": 0, "ranks": 1}),
        ]
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
async def test_ranks_that_talk_nonsense_cost_themselves_alone(swarm, states, trainers, caplog, seed):
    """The hub lives on, whatever it is told; and then it publishes."""
    await swarm.hub_up()
    draw = random.Random(seed)
    state = states.first()
    layout = layout_of(state)
    if draw.random() < 0.5:
        await (await trainers(1)).publish(1, state, files=FILES)
    for _ in range(40):
        ranks = [Rank(rank, 2) for rank in range(draw.choice([1, 2]))]
        group = secrets.token_bytes(16)
        for rank in ranks:
            await rank.dial(swarm)
            rank.say(T.RANK, group=group, rank=rank.rank, ranks=len(ranks))
            await asyncio.sleep(0)
        if draw.random() < 0.8:
            ranks[0].say(T.LAYOUT, layout=layout.layout_id, document=layout.document)
            for rank in ranks:
                rank.say(T.BEGIN, serial=0, step=2, layout=layout.layout_id, resume=False)
                if draw.random() < 0.7 and len(ranks) == 1:
                    await rank.hear(T.BEGUN)
        for _ in range(draw.randrange(30)):
            kind, body = nonsense(draw, layout)
            draw.choice(ranks).say(kind, **body)
        for rank in ranks:
            rank.link.close()
    trainer = await trainers(2)
    await trainer.publish(50, states.trained(state, 3), files=FILES)
    await swarm.peer_up("a")
    await swarm.live(str(swarm.hub.publishing.head))
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


async def test_a_silent_rank_is_dead(swarm, states, trainers, monkeypatch):
    monkeypatch.setattr(rank_session, "SILENCE_S", 3.0)
    monkeypatch.setattr(rank_session, "PING_S", 0.0)
    await swarm.hub_up()
    trainer = await trainers(2)
    await trainer.begin(1, states.first())
    trainer.ranks[0].deaf = True
    assert "rank 0 of 2 is gone" in (await trainer.ranks[1].hear(T.ABORTED))["reason"]


async def test_ranks_that_are_ahead_are_not_read_from(swarm, states, trainers, monkeypatch):
    monkeypatch.setattr(limits, "PARTS_HIGH_BYTES", 200_000)
    monkeypatch.setattr(limits, "PARTS_LOW_BYTES", 100_000)
    await swarm.hub_up()
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first(0, {"a": ("bfloat16", (2000, 1000))})
    said = trainer.script(await trainer.begin(1, state), state, files=FILES)
    ahead, slow = trainer.ranks
    for kind, body in said[0]:
        ahead.say(kind, **body)
    coming = swarm.hub.intake._coming
    session = coming.sessions[0]
    await swarm.until(lambda: session._paused, "the hub has enough of the one that is ahead")
    assert not coming.sessions[1]._paused
    # What one read of the socket brought may still come; the other 3 MB stay with the rank.
    assert coming.parts.waiting_bytes < 200_000 + 2 * limits.MIB
    sent = sum(len(b.get("payload", b"")) for _, b in said[0])
    assert coming.parts.waiting_bytes < sent
    for kind, body in said[1]:
        slow.say(kind, **body)
    await trainer.durable(1, state, FILES)
    assert not session._paused
    await swarm.live("0.1")


# -- pace


@pytest.mark.parametrize("source", ["folder", "ranks"])
@pytest.mark.parametrize("end", ["commit", "leave"])
async def test_max_lag_holds_back(swarm, states, trainers, source, end):
    await swarm.hub_up(max_lag=1, commit="manual")
    peer = await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    state = states.trained(state, 2)
    await trainer.publish(2, state)
    state = states.trained(state, 3)
    if source == "folder":
        swarm.publish(3, state)
    else:
        begun = asyncio.ensure_future(trainer.begin(3, state))
    await swarm.until(lambda: swarm.hub.pace.waiting_for == ["a"], "the hub waits for the peer")
    assert swarm.hub.publishing.head == (0, 2)
    assert (await swarm.status(swarm.hub))["waiting_for"] == ["a"]
    await swarm.until(lambda: peer.staged == (0, 2), "0.2 is staged")
    if end == "commit":
        assert (await swarm.post(swarm.hub, "/commit", {"version": "0.2"}))[0] == 200
    else:
        await swarm.down(peer)
    if source == "ranks":
        trainer.say(trainer.script(await begun, state))
        await trainer.durable(3, state)
    await swarm.until(lambda: swarm.hub.publishing.head == (0, 3), "0.3 is out")
    assert swarm.hub.pace.waiting_for == []


async def test_a_rank_that_dies_while_the_fleet_is_waited_for(swarm, states, trainers):
    await swarm.hub_up(max_lag=0, commit="manual")
    peer = await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    begun = asyncio.ensure_future(trainer.begin(2, state))
    await swarm.until(lambda: swarm.hub.pace.waiting_for == ["a"], "the hub waits for the peer")
    trainer.ranks[1].link.close()
    assert "rank 1 of 2 is gone" in (await trainer.ranks[0].hear(T.ABORTED))["reason"]
    begun.cancel()
    await swarm.until(lambda: not swarm.hub.publishing.turn.locked(), "others may publish")
    await swarm.down(peer)
    again = await trainers(1)
    again.previous = trainer.previous
    await again.publish(2, states.trained(state, 2))
    assert swarm.hub.publishing.head == (0, 2)


async def test_the_command_needs_no_folder(states, tmp_path, tmpfs):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    options = ["--state", tmp_path / "hub", "--shadow", tmpfs / "hub", "--token-file", tmp_path / "token", "--max-lag", 3]
    words = ["seed", "--plaintext", "--listen", f"127.0.0.1:{address[1]}", "--http", "127.0.0.1:0", *options]
    hub = await asyncio.create_subprocess_exec(sys.executable, "-m", "p2pcast.cli", *map(str, words))
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not (tmp_path / "hub" / "daemon.json").exists():
                assert hub.returncode is None
                await asyncio.sleep(0.05)
        trainer = Trainer(SimpleNamespace(folder=tmp_path, address=address, steps={}), 2)
        await trainer.up()
        state = states.first()
        await trainer.publish(1, state, files=FILES)
        assert (await trainer.publish(2, states.trained(state, 2)))["version"] == [0, 2]
        for rank in trainer.ranks:
            rank.link.abort()
    finally:
        hub.terminate()
        assert await hub.wait() == 0
