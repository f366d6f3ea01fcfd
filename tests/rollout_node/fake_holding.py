"""Holdings, links and catalog entries of the sync tests, without bytes and without a network."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

from recorder import Recorder

from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from p2pcast.wire.messages import Listed
from rollout_node.control.artifact_catalog import Entry
from rollout_node.sync.mirror_catalog import NoMirror

PIECE = 100


class Flag(asyncio.Event):
    """Set or not, and awaitable."""

    def __bool__(self) -> bool:
        return self.is_set()


class FakeHolding:
    """An artifact from ``base`` (a step; None: a whole state) to the step ``version``."""

    def __init__(
        self,
        base: int | None,
        version: int,
        *,
        complete: bool = False,
        finished: bool | None = None,
        source: Any = None,
        idle: bool = False,
        excerpt: bool = False,
        confirmed: bool = False,
        held: int = 0,
        size: int | None = None,
        ident: bytes | None = None,
        base_hash: bytes | None = None,
        durable_signed: bytes | None = None,
    ) -> None:
        self.id = artifact(base, version) if ident is None else ident
        self.open = SimpleNamespace(
            version=Version(0, version),
            base=None if base is None else Version(0, base),
            piece=PIECE,
            artifact=self.id,
            base_hash=base_hash,
        )
        self.complete, self.source, self.idle, self.excerpt = complete, source, idle, excerpt
        self.finished = complete if finished is None else finished
        self.aborted = False
        self.confirmed, self.durable, self.progress = Flag(), Flag(), asyncio.Event()
        if confirmed:
            self.confirmed.set()
        self.artifact = SimpleNamespace(held=SimpleNamespace(count=held))
        self.assembly = SimpleNamespace(
            manifest=None if size is None else SimpleNamespace(log=size, files=()),
            batches=0,
            sealed=complete,
            durable_signed=durable_signed,
            layout=SimpleNamespace(layout_id=b"layout", nbytes=1000),
        )
        self.opened_at, self.had_bytes, self.took_s = 10.0, 0, 2.0 if complete else 0.0
        self.log = f"log {base}-{version}"
        self.stored: set[int] = set()

    @property
    def completed_at(self) -> float | None:
        return self.opened_at + self.took_s if self.complete else None

    @property
    def incomplete(self) -> bool:
        return not (self.complete or self.aborted)

    @property
    def needs_source(self) -> bool:
        return not self.complete and self.source is None

    @property
    def irrevocable(self) -> bool:
        return self.complete and self.confirmed.is_set()

    async def until_confirmed(self) -> bool:
        await self.confirmed.wait()
        return not self.aborted

    async def until_durable(self) -> None:
        await self.durable.wait()
        if self.aborted:
            raise RetryableError("aborted")

    def seal(self) -> None:
        self.durable.set()

    def want(self) -> None:
        self.idle = False

    def receive_from(self, source: Any) -> None:
        self.source, self.idle = source, False

    def lose_source(self, source: Any) -> None:
        if self.source is source:
            self.source = None

    def end(self) -> None:
        self.aborted = True
        for event in (self.confirmed, self.durable, self.progress):
            event.set()


def artifact(base: int | None, version: int) -> bytes:
    return f"{base}-{version}".encode().rjust(16, b".")


def entry(
    base: int | None,
    version: int,
    *,
    size: int = 1000,
    sealed: bool = True,
    sealed_at: float = 0.0,
    state: int | None = None,
    durable: bytes | None = None,
) -> Entry:
    digest = version if state is None else state
    first = None if base is None else Version(0, base)
    kind = "anchor" if base is None else "delta"
    return Entry(kind, first, Version(0, version), size, b"layout", digest, sealed, sealed_at, None, durable)


def row(base: int | None, version: int, *, size: int = 1000, sealed: bool = True, durable: bytes = b"") -> Listed:
    """An entry as CATALOG carries it."""
    first = None if base is None else Version(0, base)
    kind = "anchor" if base is None else "delta"
    return Listed(
        artifact(base, version), kind, first, Version(0, version), size, b"layout", version, sealed, None, durable
    )


class FakeNode(Recorder):
    def __init__(self, *holdings: FakeHolding) -> None:
        super().__init__(
            holdings={h.id: h for h in holdings},
            layouts={},
            excerpts=set(),
            pulled=set(),
            garbled=Counter(),
            paused=False,
            run_key=b"key",
            is_listed=lambda artifact: True,
            pieces_corrupt=0,
        )


class FakeParent(Recorder):
    """The link to a parent: an Upstream."""

    def __init__(self, *offers: bytes, node: bytes = b"p" * 16) -> None:
        super().__init__(
            offers=dict.fromkeys(offers), withheld=set(), wanted=set(), attached=asyncio.Event(),
            link=SimpleNamespace(remote=node, name="parent", rtt_s=0.01), live=True, beside=False,
        )  # fmt: skip


class FakeParentFailover:
    def __init__(self, feeding: FakeParent | None = None) -> None:
        self.feeding = self.live = feeding
        self.receiving: Version | None = None
        self.moved_at = 0.0
        self.place = None if feeding is None else (feeding.link.remote, "host", 1)


class FakeMirror(NoMirror):
    def __init__(self, **entries: Entry) -> None:
        self.in_use = True
        self.entries = {artifact(e.base and e.base.step, e.version.step): e for e in entries.values()}


class FakeCatalog(Recorder):
    def __init__(self, *entries: Entry, listed: bool = True) -> None:
        super().__init__(listed=listed, complete=asyncio.Event())
        self.entries = {artifact(e.base and e.base.step, e.version.step): e for e in entries}

    def get(self, ident: bytes) -> Entry | None:
        return self.entries.get(ident)
