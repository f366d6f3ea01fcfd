"""Hosts of one engine for tests: a peer's part of it, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgpack

from p2pcast.ground.version import Version
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire import messages
from p2pcast.wire.connection import Identity, Message
from rollout_node.engine.multi_host_leader import MultiHostLeader
from rollout_node.engine.multi_host_member import MultiHostMember
from rollout_node.in_engine.install_frames import InstallClient
from rollout_node.installers.install_socket import InstallSocket
from tests.support.until import until

TOKEN = JoinToken(bytes(16), bytes(20))
ONE, TWO, THREE, FOUR = (Version(0, n) for n in (1, 2, 3, 4))
REPORT = {"engine": "e", "rank": 1, "phase": "commit", "version": "0.1", "error": None}
LIMIT_S = 600.0


class Host(QuietOwner):
    """A peer's parts: a shadow that a test moves, an install socket, and a listener."""

    def __init__(self, folder: Path, name: str, node: bytes = b"") -> None:
        self.name, self.folder = name, folder
        self.identity = Identity(node or name.encode()[:1] * 16, name, TOKEN)
        self.staged: Version | None = None
        self.lead: MultiHostLeader | None = None
        self.member: MultiHostMember | None = None
        self.listener = Listener(self, self.identity)
        self.socket = InstallSocket(folder / f"{name}.sock", self)
        self.reports: list[Any] = []
        self._still = asyncio.Condition()
        self._readers = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def up(self, role: str, port: int = 0, engine: str = "big") -> Host:
        await self.socket.start()
        await self.listener.start("127.0.0.1", port)
        if role == "lead":
            self.lead = MultiHostLeader(engine, self.socket, lambda: None)
            self.lead.on_hub_listed()
            self._tasks.append(asyncio.create_task(self.lead.run()))
        else:
            self.member = MultiHostMember(engine, self, self.identity, None, lambda: None)
            self._tasks.append(asyncio.create_task(self.member.run()))
        return self

    async def down(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.listener.stop()
        await self.socket.close()

    @property
    def place(self) -> tuple[bytes, str, int]:
        return self.identity.node, *self.listener.address

    async def move(self, version: Version | None) -> None:
        async with self._still:
            await self._still.wait_for(
                lambda: not self._readers and (self.member is None or self.member.may_leave(self.staged))
            )
            self.staged = version
        if self.lead is not None and version is not None:
            self.lead.moved(version)
        if self.member is not None:
            self.member.moved()

    async def ask(self, work: Callable[[InstallClient], Any]) -> Any:
        """As a worker of this host does."""
        return await asyncio.to_thread(work, InstallClient(self.socket.path, timeout_s=LIMIT_S))

    async def says(self, **report: Any) -> None:
        await self.ask(lambda c: c.report(REPORT | report))

    # MemberOwner

    @contextlib.asynccontextmanager
    async def held_still(self) -> AsyncIterator[tuple[Version, Path] | None]:
        async with self._still:
            self._readers += 1
        try:
            yield None if self.staged is None else (self.staged, self.folder)
        finally:
            async with self._still:
                self._readers -= 1
                self._still.notify_all()

    async def recheck(self) -> None:
        async with self._still:
            self._still.notify_all()

    # Provider

    def layout_document(self) -> bytes:
        return b""

    def schedule(self, version: Version) -> bytes | None:
        return None

    def config(self, version: Version) -> bytes | None:
        return None

    def patches(self, base: Version | None, to: Version) -> list[Path] | Path:
        if self.member is not None:
            self.member.give_shadow(to)
        shadow = self.folder / "shadow"
        shadow.touch()
        return shadow

    def report(self, report: Any) -> None:
        self.reports.append(dict(report))
        if self.lead is not None:
            self.lead.on_report(report)
        if self.member is not None:
            self.member.report(report)

    # Acceptor

    def accept_link(self, link: Link, hello: messages.Hello) -> None:
        assert self.lead is not None
        self.lead.accept(link, hello)


async def together(hosts, *members: str, at: Version = ONE) -> tuple[Host, ...]:
    """A lead whose engine has answered, and members at its version."""
    lead = await hosts("lead", "a", at)
    lead.lead.begin()
    found = []
    for name in members:
        host = await hosts("member", name, at)
        host.member.set_lead(lead.place)
        found.append(host)
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: len(lead.lead.status()["members"]) == len(members))
        await work(lead, **{host.name: rank for rank, host in enumerate(found, 1)})
        await lead.lead.meet(at)
    lead.reports.clear()
    return lead, *found


async def work(lead: Host, **ranks: int) -> None:
    """Workers answer their server's first question: each host has one from now on."""
    hosts = {m["name"]: m["node"] for m in lead.lead.status()["members"]}
    with lead.socket.expect(lambda r: r["phase"] == "init", max(ranks.values(), default=0) + 1):
        for name, rank in ranks.items():
            member = lead.lead._members[bytes.fromhex(hosts[name])]
            report = msgpack.packb(REPORT | {"rank": rank, "phase": "init"})
            lead.lead.on_member_message(member, Message(messages.Type.WORKER_REPORT, messages.WorkerReport(report, 0)))


def seen(lead: Host) -> dict[str, Any]:
    return {m["name"]: m for m in lead.lead.status()["members"]}
