"""A trainer's ranks as a script: they speak the protocol over real sockets and send what a test asks for."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from p2pcast.codec.cell import RAW, encode
from p2pcast.codec.digest import digest
from p2pcast.codec.join_parts import within
from p2pcast.codec.layout import Cell, Layout, Tensor
from p2pcast.ground.errors import P2PCastError
from p2pcast.transport.dial import dial
from p2pcast.transport.link import QuietOwner
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire import messages
from p2pcast.wire.connection import Identity
from p2pcast.wire.messages import RECORDS, Type
from tests.p2pcast.wire.plain_records import plain

DEADLINE_S = 600.0
NAMES = {"bfloat16": "BF16", "float32": "F32", "uint8": "U8", "float64": "F64", "int64": "I64"}
CELL_WORDS = 1000
FILES = {"config.json": b'{"a": 1}'}
T = Type


def layout_of(state: Any, cell_words: int = CELL_WORDS) -> Layout:
    return Layout([Tensor(n, NAMES[d], s) for n, (d, s, _) in state.items()], cell_words=cell_words)


def words_of(state: Any, layout: Layout, cell: Cell) -> Any:
    contents = state[layout.tensors[cell.tensor].name][2]
    return np.frombuffer(contents, f"<u{cell.word_bytes}")[cell.start : cell.start + cell.words]


class Rank(QuietOwner):
    """One connection. Answers PING; the test sends all other messages."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.deaf = False
        self.error: P2PCastError | None = None
        self.over = asyncio.Event()
        self._heard: dict[Type, list[dict[str, Any]]] = {}
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def dial(self, swarm: Any) -> None:
        token = JoinToken.parse((swarm.folder / "token").read_text())
        identity = Identity(secrets.token_bytes(16), f"rank{self.rank}", token)
        self.link = await dial(self, *swarm.address, identity, purpose="publish", role="rank")

    def say(self, kind: Type, **body: Any) -> None:
        self.link.send(RECORDS[kind](**body))

    async def hear(self, kind: Type, where: Callable[[dict[str, Any]], bool] = lambda body: True) -> dict[str, Any]:
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
                link.send(messages.Pong(event.body.t))
        else:
            self._heard.setdefault(event.type, []).append(plain(event.body))
            self._ring()

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

    async def up(self) -> dict[str, Any]:
        for rank in self.ranks:
            await rank.dial(self.swarm)
            rank.say(T.RANK, group=self.group, rank=rank.rank, ranks=len(self.ranks))
        told = [await rank.hear(T.RANKED) for rank in self.ranks]
        return told[0]

    async def begin(
        self,
        step: int,
        state: Any,
        *,
        resume: bool = False,
        cell_words: int = CELL_WORDS,
        branch: int | None = None,
    ) -> dict[str, Any]:
        self.serial += 1
        self.layout = layout_of(state, cell_words)
        self.ranks[0].say(T.LAYOUT, layout=self.layout.layout_id, document=self.layout.document)
        for rank in self.ranks:
            rank.say(T.BEGIN, serial=self.serial, step=step, layout=self.layout.layout_id, resume=resume, branch=branch)
        told = [await rank.hear(T.BEGUN) for rank in self.ranks]
        return told[0]

    def ranges(self, cell: Cell) -> Iterator[tuple[int, int, int]]:
        """(rank, start, words): the cell cut at odd places and dealt; sometimes whole."""
        most = len(self.ranks) if self.draw.random() < 0.7 else 1
        edges = sorted({0, cell.words, *(self.draw.randrange(cell.words + 1) for _ in range(most))})
        for start, end in itertools.pairwise(edges):
            yield self.draw.randrange(len(self.ranks)), start, end - start

    def script(
        self, begun: dict[str, Any], state: Any, *, stated: float = 0.0, files: dict[str, bytes] | None = None
    ) -> list[Said]:
        """The messages of each rank: coded against the last published state, or (a share of ``stated``, or all) as
        absolute words.
        """
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
        """Send all messages, ranks interleaved at random."""
        left = [(rank, iter(row)) for rank, row in zip(self.ranks, said, strict=True)]
        while left:
            rank, row = one = self.draw.choice(left)
            for kind, body in itertools.islice(row, self.draw.choice([1, 2, 9])):
                rank.say(kind, **body)
                if kind is T.DONE:
                    left.remove(one)

    async def publish(
        self, step: int, state: Any, *, files: dict[str, bytes] | None = None, **options: Any
    ) -> dict[str, Any]:
        begun = await self.begin(step, state, **{k: v for k, v in options.items() if k != "stated"})
        self.say(self.script(begun, state, files=files, stated=options.get("stated", 0.0)))
        return await self.durable(step, state, files, whole=begun["base"] is None)

    async def durable(
        self, step: int, state: Any, files: dict[str, bytes] | None = None, *, whole: bool = False
    ) -> dict[str, Any]:
        """``whole``: the version has no base, so that files, if any came, are all that it has."""
        told = [await rank.hear(T.DURABLE, lambda body: body["serial"] == self.serial) for rank in self.ranks]
        assert told == told[:1] * len(told)
        self.previous = (told[0]["version"], state)
        before = {} if whole and files else self.swarm.steps.get(max(self.swarm.steps, default=0), (None, {}))[1]
        kept = {**before, **(files or {})}
        self.swarm.steps[step] = (state, kept)
        return told[0]

    async def aborted(self, but: Rank | None = None) -> str:
        """The reason of ABORTED, equal at all ranks except ``but``."""
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
        "cell": cell.index,
        "start": start,
        "words": new.size,
        "codec": coded.codec,
        "before": coded.before,
        "after": coded.after,
        "changed": coded.changed,
        "payload": coded.payload,
    }


def nothing_is_left(swarm) -> bool:
    partial = list((swarm.folder / "hub" / "partial").iterdir())
    return not partial and all(h.finished for h in swarm.hub.node.holdings.values())


def miscounted(said: list[Said]) -> None:
    said[0][-1] = (T.DONE, said[0][-1][1] | {"parts": 999})
