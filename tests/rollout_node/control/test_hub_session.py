from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
from recorder import Recorder

from p2pcast.ground.errors import RefusedError, RemoteError, RetryableError, UntrustedError
from p2pcast.ground.version import Version
from p2pcast.wire import messages
from p2pcast.wire.connection import Message
from p2pcast.wire.messages import Type
from rollout_node.control import hub_session as module
from rollout_node.control.hub_session import HubSession
from tests.support.until import until

HUB = b"h" * 16
JOIN = messages.Join("a", "r", ("10.0.0.1", 1), None, None)
REPORT = messages.Report(None, None, None, cores=1)


class Link(Recorder):
    def __init__(self, session) -> None:
        super().__init__(remote=HUB, own_host="10.0.0.1", closed=False, sent=[], session=session, refuses=0)

    def send(self, record) -> None:
        if self.refuses:
            self.refuses -= 1
            raise RemoteError("too long")
        self.sent.append(record)

    def close(self, error=None) -> None:
        self.closed = True
        self.session.on_link_closed(self, error)

    abort = close


class Peer:
    """``script``: errors of the next attempts to dial; then they succeed."""

    def __init__(self, monkeypatch, *script, address=("hub", 1), certificate=None) -> None:
        monkeypatch.setattr(module, "REDIAL_MIN_S", 1e-6)
        monkeypatch.setattr(module, "REDIAL_MAX_S", 1e-5)
        monkeypatch.setattr(module, "REPORT_S", 1e-4)
        monkeypatch.setattr(module, "dial", self._dial)
        self.script, self.links, self.owner, self.reports = list(script), [], Recorder(), 0
        self.session = HubSession(
            self.owner, address, None, lambda own_host: dataclasses.replace(JOIN, listen=(own_host, 1)), certificate
        )

    async def _dial(self, owner, host, port, identity, **options):
        if self.script and (error := self.script.pop(0)) is not None:
            raise error
        self.links.append(Link(owner))
        return self.links[-1]

    def report(self):
        self.reports += 1
        return REPORT

    async def until(self, condition, task) -> None:
        await until(condition, check=lambda: task.done() and task.result())


async def stop(task) -> None:
    task.cancel()
    await asyncio.wait([task])


async def test_join_is_the_first_message(monkeypatch):
    peer = Peer(monkeypatch)
    assert peer.session.last_received_at is None
    await peer.session.connect()
    assert peer.links[0].sent == [JOIN]
    assert peer.session.connected
    assert peer.session.place == (HUB, "hub", 1)
    assert peer.session.last_received_at == peer.session.joined_at > 0


async def test_a_run_without_a_hub_is_never_joined(monkeypatch):
    peer = Peer(monkeypatch, address=None)
    with pytest.raises(RetryableError, match="no hub"):
        await peer.session.connect()
    task = asyncio.create_task(peer.session.run(peer.report))
    await asyncio.sleep(0)
    assert not task.done()
    await stop(task)


async def test_without_a_connection_messages_are_lost(monkeypatch):
    peer = Peer(monkeypatch)
    assert not peer.session.send(messages.FindSources(b"a", []))
    assert not peer.session.ask_squash(Version(0, 1))
    peer.session.hang_up()
    await peer.session.leave()
    await peer.session.connect()
    assert peer.session.ask_squash(Version(0, 1))
    peer.session.find_sources(b"a", [b"b"])
    assert peer.links[0].sent[1:] == [
        messages.Squash(Version(0, 1)),
        messages.FindSources(b"a", [b"b"]),
    ]
    peer.links[0].closed = True
    assert not peer.session.send(messages.FindSources(b"a", []))


async def test_reports_are_sent_again_and_again_and_at_once_for_news(monkeypatch):
    monkeypatch.setattr(module, "REPORT_S", 3600.0)
    peer = Peer(monkeypatch)
    await peer.session.connect()
    task = asyncio.create_task(peer.session.run(peer.report))
    await peer.until(lambda: peer.reports == 1, task)
    peer.session.changed()
    await peer.until(lambda: peer.reports == 2, task)
    assert peer.links[0].sent[-1] is REPORT
    await stop(task)


async def test_a_report_that_is_too_long_is_cut_to_its_required_keys(monkeypatch):
    peer = Peer(monkeypatch)
    await peer.session.connect()
    peer.links[0].refuses = 1
    task = asyncio.create_task(peer.session.run(peer.report))
    await peer.until(lambda: len(peer.links[0].sent) > 1, task)
    assert peer.links[0].sent[1] == dataclasses.replace(REPORT, cores=None)
    await stop(task)


async def test_a_lost_hub_is_dialled_until_an_answer(monkeypatch, caplog):
    peer = Peer(monkeypatch, None, RetryableError("away"), UntrustedError("who is that"), RetryableError("away"))
    await peer.session.connect()
    task = asyncio.create_task(peer.session.run(peer.report))
    await asyncio.sleep(0)
    peer.links[0].close(RetryableError("reset"))
    await peer.until(lambda: len(peer.links) == 2, task)
    assert peer.script == []
    assert "on_hub_lost" in peer.owner.names
    assert "who is that" in caplog.text
    await stop(task)


async def test_a_silent_hub_is_left(monkeypatch):
    monkeypatch.setattr(module, "SILENCE_S", -1.0)
    peer = Peer(monkeypatch)
    await peer.session.connect()
    task = asyncio.create_task(peer.session.run(peer.report))
    await peer.until(lambda: len(peer.links) >= 2, task)
    await stop(task)


@pytest.mark.parametrize("when", ["at the dial", "on the link"])
async def test_a_refusal_ends_the_session(monkeypatch, when):
    peer = Peer(monkeypatch, None, *([RefusedError("evicted")] if when == "at the dial" else []))
    await peer.session.connect()
    task = asyncio.create_task(peer.session.run(peer.report))
    await asyncio.sleep(0)
    error = RefusedError("evicted") if when == "on the link" else RetryableError("reset")
    peer.links[0].close(error)
    with pytest.raises(RefusedError, match="evicted"):
        await task
    assert peer.owner.named("on_hub_refused") == ([error] if when == "on the link" else [])


async def test_a_refused_renewal_ends_the_connection_alone(monkeypatch):
    class Certificate(Recorder):
        async def ready(self) -> None: ...

    certificate = Certificate(tls=SimpleNamespace(client=None))
    certificate.answers = {"renewal_refused": True, "request": b"request"}
    peer = Peer(monkeypatch, certificate=certificate)
    await peer.session.connect()
    task = asyncio.create_task(peer.session.run(peer.report))
    await peer.until(lambda: messages.Enrol(b"request") in peer.links[0].sent, task)
    peer.links[0].close(RefusedError("no"))
    await peer.until(lambda: len(peer.links) == 2, task)
    assert peer.owner.named("on_hub_refused") == []
    await stop(task)


async def test_a_peer_that_has_left_does_not_come_back(monkeypatch):
    peer = Peer(monkeypatch)
    await peer.session.connect()
    task = asyncio.create_task(peer.session.run(peer.report))
    await asyncio.sleep(0)
    await peer.session.leave()
    assert peer.links[0].sent[-1] == messages.Leave()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(peer.links) == 1
    assert not task.done()
    await stop(task)


async def test_messages_go_to_the_owner_and_its_error_ends_the_link(monkeypatch):
    peer = Peer(monkeypatch)
    await peer.session.connect()
    link = peer.links[0]
    peer.session.on_link_event(link, None, Message(Type.PING, messages.Ping(5), 0))
    assert link.sent[-1] == messages.Pong(5)
    peer.session.on_link_event(link, None, Message(Type.PONG, messages.Pong(5), 0))
    peer.session.on_link_event(link, None, "no message")
    assert peer.owner.calls == []
    peer.session.on_link_event(link, None, Message(Type.HOLD, messages.Hold(Version(0, 1)), 0))
    assert peer.owner.named("on_hub_message") == [messages.Hold(Version(0, 1))]
    peer.owner.answers["on_hub_message"] = RefusedError("not this run's")
    peer.session.on_link_event(link, None, Message(Type.HOLD, messages.Hold(Version(0, 1)), 0))
    assert link.closed
    before = peer.session.last_received_at
    peer.session.on_link_read(link, 1)
    peer.session.on_link_writable(link, None)
    assert peer.session.last_received_at >= before
