"""Peers of one engine on several hosts: where they meet, who waits for whom, and what is lost when one of them is. Real sockets on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast import limits
from p2pcast.errors import IntegrityError, P2PCastError, RefusedError, RemoteError, RetryableError
from p2pcast.transport.dial import dial
from p2pcast.transport.link import Link
from p2pcast.transport.listener import Listener
from p2pcast.version import Version
from p2pcast.wire.connection import Identity, Message
from p2pcast.wire.messages import Type
from p2pcast.wire.token import Token
from rollout_node import companions, member
from rollout_node.companions import Lead, Standing, meeting, unpack_report
from rollout_node.install_frames import InstallClient
from rollout_node.install_socket import InstallSocket
from rollout_node.installers.base import Audit, CommitReport
from rollout_node.installers.led import LedInstaller
from rollout_node.member import Member

TOKEN = Token(bytes(16), bytes(20))
ONE, TWO, THREE, FOUR = (Version(0, n) for n in (1, 2, 3, 4))
REPORT = {"engine": "e", "rank": 1, "phase": "commit", "version": "0.1", "error": None}
LIMIT_S = 30.0


# -- decisions

VERSIONS = st.builds(Version, st.integers(0, 2), st.integers(0, 5))
STANDINGS = st.dictionaries(st.sampled_from("abcd"), st.builds(Standing, st.none() | VERSIONS, st.booleans()))


@given(VERSIONS, STANDINGS)
def test_all_meet_where_the_furthest_is(own, members):
    found = meeting(own, members)
    assert found.place == max([own, *(s.version for s in members.values() if s.version is not None)])
    assert set(found.behind) == {n for n, s in members.items() if s.version != found.place or not s.still}
    assert found.met == (own == found.place and all(s == (own, True) for s in members.values()))


@given(st.integers(0, 6), st.lists(st.integers(0, 6), max_size=4), st.integers(0, 1 << 32))
def test_whoever_is_behind_moves_and_they_meet(own, members, seed):
    """Nobody who stands at the meeting place moves; the others go forward, now and then two versions at once."""
    draw = random.Random(seed)
    standing = {str(i): Standing(Version(0, step), False) for i, step in enumerate(members)}
    for _ in range(200):
        found = meeting(Version(0, own), standing)
        if found.met:
            break
        late = [n for n in found.behind if draw.random() < 0.5]
        if own < found.place.step and draw.random() < 0.5:
            own += 1
        for name in late:
            at = standing[name].version
            assert at is not None
            further = at if at >= found.place else Version(0, at.step + draw.choice([1, 1, 2]))
            standing[name] = Standing(further, further >= found.place)
    assert meeting(Version(0, own), standing).met


@given(
    st.dictionaries(
        st.text(max_size=8), st.none() | st.integers(-5, 1 << 60) | st.text(max_size=9) | st.lists(st.integers(0, 9), max_size=3)
    )
)
def test_reports_come_back_as_they_were(report):
    assert unpack_report(msgpack.packb(report)) == report


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\x90", b"\x01", b"\x81\x01\x02", b"\x81\xa1a", b"\x81\xa1a\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 5000,
        b"\x81\xa1a\xd6\xff\x00\x00\x00\x00", b"\x81\xa1\xff\x00", b"\x80\x80",
    ],
    ids=lambda d: d[:6].hex(),
)  # fmt: skip
def test_what_is_no_report_is_refused(data):
    with pytest.raises(RemoteError, match="a worker's report is not"):
        unpack_report(data)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_report_or_refused(data):
    with contextlib.suppress(RemoteError):
        assert isinstance(unpack_report(data), dict)


def test_a_report_is_not_a_swarm_of_containers(monkeypatch):
    monkeypatch.setattr(limits, "MAX_REPORT_ITEMS", 1000)
    rows = msgpack.packb({"digests": [[]] * 990})
    assert len(unpack_report(rows)["digests"]) == 990
    with pytest.raises(RemoteError):
        unpack_report(msgpack.packb({"digests": [[]] * 1001}))
    with pytest.raises(RemoteError):
        unpack_report(msgpack.packb({"digests": [{}] * 1001}))


# -- on sockets


class Host:
    """A shadow that moves when a test says so and may, an install socket, and a listener: what a peer has."""

    def __init__(self, folder: Path, name: str, node: bytes = b"") -> None:
        self.name, self.folder = name, folder
        self.identity = Identity(node or name.encode()[:1] * 16, name, TOKEN)
        self.staged: Version | None = None
        self.lead: Lead | None = None
        self.member: Member | None = None
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
            self.lead = Lead(engine, self.socket, lambda: None)
            self._tasks.append(asyncio.create_task(self.lead.run()))
        else:
            self.member = Member(engine, self, self.identity, None)
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
            await self._still.wait_for(lambda: not self._readers and (self.member is None or self.member.may_leave(self.staged)))
            self.staged = version
        if self.lead is not None and version is not None:
            self.lead.moved(version)
        if self.member is not None:
            self.member.moved()

    async def ask(self, work: Callable[[InstallClient], Any]) -> Any:
        """As a worker of this host does."""
        return await asyncio.to_thread(work, InstallClient(self.socket.path, timeout_s=10))

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

    async def look_again(self) -> None:
        async with self._still:
            self._still.notify_all()

    def on_installed(self) -> None: ...

    # Provider

    def layout_document(self) -> bytes:
        return b""

    def patches(self, base: Version | None, to: Version) -> list[Path] | Path:
        if self.member is not None:
            self.member.give_shadow(to)
        shadow = self.folder / "shadow"
        shadow.touch()
        return shadow

    def report(self, report: Any) -> None:
        self.reports.append(dict(report))
        if self.lead is not None:
            self.lead.heard(report)
        if self.member is not None:
            self.member.report(report)

    # Acceptor

    def accept_link(self, link: Link, hello: dict[str, Any]) -> None:
        assert self.lead is not None
        self.lead.accept(link, hello)

    def on_link_event(self, link: Link, stripe: Any, event: Any) -> None: ...

    def on_link_read(self, link: Link, payload_bytes: int) -> None: ...

    def on_link_writable(self, link: Link, stripe: Any) -> None: ...

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None: ...


async def until(condition: Callable[[], Any], what: str = "") -> None:
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, what
        await asyncio.sleep(0.002)


@pytest.fixture
async def hosts(tmp_path, monkeypatch) -> AsyncIterator[Callable[..., Any]]:
    """``await hosts("lead", "a")``; retries take no time."""
    monkeypatch.setattr(member, "RETRY_MIN_S", 0.01)
    monkeypatch.setattr(member, "RETRY_MAX_S", 0.02)
    monkeypatch.setattr(companions, "BEAT_S", 0.02)
    made: list[Host] = []

    async def up(role: str, name: str, at: Version | None = None, **options: Any) -> Host:
        host = Host(tmp_path, name, options.pop("node", b""))
        made.append(host)
        await host.up(role, **options)
        if at is not None:
            await host.move(at)
        return host

    yield up
    for host in made:
        await host.down()


async def together(hosts, *members: str, at: Version = ONE) -> tuple[Host, ...]:
    """A lead whose engine has answered, and members that stand at its version."""
    lead = await hosts("lead", "a", at)
    lead.lead.begin()
    found = []
    for name in members:
        host = await hosts("member", name, at)
        host.member.lead_is(lead.place)
        found.append(host)
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: len(lead.lead.status()["members"]) == len(members))
        await lead.lead.meet(at)
    return lead, *found


def seen(lead: Host) -> dict[str, Any]:
    return {m["name"]: m for m in lead.lead.status()["members"]}


async def test_members_go_where_the_lead_is_and_no_further(hosts):
    lead, b, c = await together(hosts, "b", "c")
    ahead = asyncio.create_task(b.move(TWO))
    await asyncio.gather(b.says(), c.says())  # whatever could happen by now has happened
    assert (b.staged, c.staged) == (ONE, ONE)
    await lead.move(TWO)
    behind = asyncio.create_task(lead.lead.meet(TWO))
    await ahead
    await until(lambda: seen(lead)["b"]["still"])
    assert not behind.done()
    await c.move(TWO)
    await asyncio.wait_for(behind, LIMIT_S)
    assert {n: (m["staged"], m["still"]) for n, m in seen(lead).items()} == {"b": ("0.2", True), "c": ("0.2", True)}
    assert (b.member.status()["still"], lead.lead.status()["meets_at"]) == ("0.2", "0.2")


async def test_a_fast_trainer_never_tears_them_apart(hosts):
    lead, b, c = await together(hosts, "b", "c")

    async def follow(host: Host) -> None:
        for step in range(2, 40):
            await host.move(Version(0, step))

    followers = [asyncio.create_task(follow(h)) for h in (b, c)]
    for step in range(2, 40):
        version = Version(0, step)
        await lead.move(version)
        await asyncio.wait_for(lead.lead.meet(version), LIMIT_S)
        assert (b.staged, c.staged) == (version, version)
        await b.ask(lambda c, v=version: c.patches(None, v).__exit__(None, None, None))
    await asyncio.gather(*followers)


async def test_who_waits_to_move_hears_of_an_order_that_came_before_the_last_was_obeyed(hosts):
    _, b = await together(hosts, "b")

    def say(version: Version | None, number: int) -> None:
        still = Message(Type.STILL, {"version": version and list(version), "round": number})
        b.member.on_link_event(b.member._link, None, still)

    say(None, 50)
    await until(lambda: b.member.status()["still"] is None)
    moving = asyncio.create_task(b.move(TWO))  # runs first, and meets the first order
    asyncio.get_running_loop().call_soon(say, TWO, 52)
    say(ONE, 51)
    await asyncio.wait_for(moving, LIMIT_S)


async def test_a_member_that_is_further_waits_for_the_lead(hosts):
    lead = await hosts("lead", "a", ONE)
    b = await hosts("member", "b", THREE)
    c = await hosts("member", "c", ONE)
    lead.lead.begin()
    for each in (b, c):
        each.member.lead_is(lead.place)
    await until(lambda: all(m["staged"] for m in seen(lead).values()) and len(seen(lead)) == 2)
    with pytest.raises(RetryableError, match=r"member b \(62626262\) is at version 0.3 already, so 0.1 is left out"):
        await lead.lead.meet(ONE)
    await c.move(THREE)
    await lead.move(TWO)
    with pytest.raises(RetryableError, match=r"so 0\.2 is left out"):
        await lead.lead.meet(TWO)
    await lead.move(THREE)
    await asyncio.wait_for(lead.lead.meet(THREE), LIMIT_S)
    assert b.staged == c.staged == THREE


async def test_a_member_without_a_version_is_named(hosts):
    lead, _ = await together(hosts, "b")
    c = await hosts("member", "c")
    c.member.lead_is(lead.place)
    await until(lambda: len(seen(lead)) == 2)
    with pytest.raises(RetryableError, match=r"member c \(63636363\) has no version yet"):
        await asyncio.wait_for(lead.lead.meet(ONE), LIMIT_S)
    await c.move(ONE)
    await until(lambda: seen(lead)["c"]["staged"] == "0.1")
    await asyncio.wait_for(lead.lead.meet(ONE), LIMIT_S)


async def test_a_member_that_does_not_come_is_given_up_and_named(hosts, monkeypatch):
    monkeypatch.setattr(companions, "PATIENCE_S", 0.05)
    lead, _, _ = await together(hosts, "b", "c")
    await lead.move(TWO)
    with pytest.raises(RetryableError, match=r"in vain for its members at 0\.2: b \(62626262\) at 0\.1, c \(63636363\) at 0\.1"):
        await lead.lead.meet(TWO)


async def test_workers_get_the_shadow_only_where_it_stands_still(hosts):
    lead, b = await together(hosts, "b")
    with await b.ask(lambda c: c.patches(None, ONE)) as found:
        assert found.dense
    with pytest.raises(RetryableError, match=r"not held still at 0\.2"):
        await b.ask(lambda c: c.patches(None, TWO))
    await lead.move(TWO)
    await until(lambda: b.member.status()["still"] is None)
    with pytest.raises(RetryableError, match=r"not held still at 0\.1"):
        await b.ask(lambda c: c.patches(None, ONE))


# -- reports


async def test_reports_of_every_host_are_collected(hosts):
    lead, b, c = await together(hosts, "b", "c")
    with lead.socket.expect(lambda r: r["phase"] == "commit", 3) as expectation:
        await b.says(rank=1, digests=[[1, 2]] * 3)
        await c.says(rank=2, phase="prepare")
        await lead.says(rank=0)
        await until(lambda: expectation.missing == 1)
        assert expectation.missing_ranks == [2]
        await c.says(rank=2)
        reports = await expectation.wait(LIMIT_S)
    assert [r["rank"] for r in reports] == [0, 1, 2]
    assert reports[1]["digests"] == [[1, 2]] * 3
    assert {n: m["ranks"] for n, m in seen(lead).items()} == {"b": [1], "c": [2]}
    assert lead.socket.elsewhere() == "connected members of big: b (rank 1); c (rank 2)"
    await lead.says(rank=2)  # the server came back with its workers elsewhere
    assert seen(lead)["c"]["ranks"] == []


async def test_what_was_reported_while_the_lead_was_away_comes_later_and_with_its_age(hosts):
    lead, b = await together(hosts, "b")
    port = lead.listener.address[1]
    await lead.down()
    await until(lambda: not b.member.connected)
    await b.says(rank=1)
    await b.says(rank=1, phase="init")
    again = await hosts("lead", "a2", ONE, node=lead.identity.node, port=port)
    with again.socket.expect(lambda r: True, 2) as expectation:
        await until(lambda: len(again.reports) == 2)
        assert expectation.missing == 2  # they answer what somebody else asked
        await b.says(rank=1)
        await until(lambda: expectation.missing == 1)
    assert [r["phase"] for r in again.reports] == ["commit", "init", "commit"]


async def test_old_reports_and_too_many_are_not_kept(hosts, monkeypatch):
    b = await hosts("member", "b", ONE)
    monkeypatch.setattr(limits, "MAX_KEPT_REPORTS_BYTES", 10_000)
    for rank in range(5):
        await b.says(rank=rank, filler="x" * 3000)
    lead = await hosts("lead", "a", ONE)
    b.member.lead_is(lead.place)
    await until(lambda: [r["rank"] for r in lead.reports] == [2, 3, 4])
    await lead.down()
    await until(lambda: not b.member.connected)
    await b.says(rank=5)
    monkeypatch.setattr(member, "KEPT_S", 0.0)
    again = await hosts("lead", "a2", ONE, node=lead.identity.node)
    b.member.lead_is(again.place)
    await until(lambda: b.member.connected)
    monkeypatch.setattr(member, "KEPT_S", 60.0)
    await b.says(rank=6)
    await until(lambda: again.reports)
    assert [r["rank"] for r in again.reports] == [6]


async def test_a_member_that_is_lost_costs_what_was_asked_of_its_workers(hosts, monkeypatch):
    monkeypatch.setattr(companions, "LOST_S", 0.05)
    lead, b, c = await together(hosts, "b", "c")
    await b.says(rank=1)
    await c.says(rank=2)
    await until(lambda: len(lead.reports) == 2)
    lead.lead.require()
    with lead.socket.expect(lambda r: True, 3) as all_three, lead.socket.expect(lambda r: r["rank"] == 2, 1) as of_c:
        await b.down()
        with pytest.raises(RetryableError, match="member b, of rank 1, was lost before all was reported"):
            await all_three.wait(LIMIT_S)
        await c.says(rank=2)
        with pytest.raises(RetryableError, match="was lost"):
            await of_c.wait(LIMIT_S)
    with pytest.raises(RetryableError, match=r"member b is gone; connected members of big: c \(rank 2\)"):
        lead.lead.require()


async def test_one_that_is_back_in_time_costs_nothing(hosts):
    lead, b = await together(hosts, "b")
    await b.says(rank=1)
    await until(lambda: lead.reports)
    with lead.socket.expect(lambda r: True, 1) as expectation:
        link = b.member._link
        link.abort()
        await b.says(rank=1)
        assert [r["rank"] for r in await expectation.wait(LIMIT_S)] == [1]
    await until(lambda: b.member._link is not link and seen(lead)["b"]["still"])
    assert lead.lead.status()["members"][0]["ranks"] == [1]


async def test_one_that_was_restarted_has_forgotten_what_its_workers_said(hosts):
    lead, b = await together(hosts, "b")
    await b.says(rank=1)
    await until(lambda: lead.reports)
    with lead.socket.expect(lambda r: True, 1) as expectation:
        await b.down()
        again = await hosts("member", "b2", ONE, node=b.identity.node)
        again.member.lead_is(lead.place)
        with pytest.raises(RetryableError, match="member b, of rank 1, was restarted"):
            await expectation.wait(LIMIT_S)
    await asyncio.wait_for(lead.lead.meet(ONE), LIMIT_S)


# -- a lead that is lost


async def test_without_a_lead_members_go_on_after_a_while(hosts, monkeypatch):
    lead, b = await together(hosts, "b")
    monkeypatch.setattr(member, "STAND_S", 0.05)
    await lead.down()
    await asyncio.wait_for(b.move(TWO), LIMIT_S)
    assert b.member.status()["still"] is None
    assert not b.member.ready


async def test_a_shadow_that_a_worker_may_be_reading_stays_much_longer(hosts, monkeypatch):
    lead, b = await together(hosts, "b")
    monkeypatch.setattr(member, "STAND_S", 0.0)
    await b.ask(lambda c: c.patches(None, ONE).__exit__(None, None, None))
    await lead.down()
    await until(lambda: not b.member.connected)
    moving = asyncio.create_task(b.move(TWO))
    await b.says()
    assert b.member.status()["still"] == "0.1"
    assert not moving.done()
    again = await hosts("lead", "a2", THREE, node=lead.identity.node)
    b.member.lead_is(again.place)
    await until(lambda: "b" in seen(again))
    await b.says()
    assert not moving.done()  # its engine has not answered yet, so the worker may be at it still
    again.lead.begin()
    await asyncio.wait_for(moving, LIMIT_S)
    await b.move(THREE)
    await asyncio.wait_for(again.lead.meet(THREE), LIMIT_S)


async def test_members_find_a_lead_that_came_back_elsewhere(hosts):
    lead, b = await together(hosts, "b")
    lead.lead.set_serving(ONE, True)
    await until(lambda: b.member.serves == ONE and b.member.ready)
    again = await hosts("lead", "new", ONE)
    again.lead.begin()
    b.member.lead_is(None)
    assert b.member.connected
    b.member.lead_is(again.place)
    await until(lambda: "b" in seen(again) and "b" not in seen(lead))
    await asyncio.wait_for(again.lead.meet(ONE), LIMIT_S)
    await until(lambda: b.member.serves is None)
    assert not b.member.ready
    again.lead.set_serving(TWO, True)
    await until(lambda: b.member.serves == TWO and b.member.ready)


async def test_a_lead_that_falls_silent_is_left(hosts, monkeypatch):
    monkeypatch.setattr(member, "SILENCE_S", 0.2)
    monkeypatch.setattr(member, "LOOK_S", 0.01)
    monkeypatch.setattr(companions, "BEAT_S", 3600.0)
    lead = await hosts("lead", "a", ONE)
    b = await hosts("member", "b", ONE)
    b.member.lead_is(lead.place)
    await until(lambda: "silent" in str(b.member.status()["error"]))


# -- who else may knock


class Knocker:
    """One that dials a lead and says what a test wants."""

    def __init__(self) -> None:
        self.error: P2PCastError | None = None
        self.said: list[Any] = []
        self.closed = False

    def on_link_event(self, link: Link, stripe: Any, event: Any) -> None:
        self.said.append(event)

    def on_link_read(self, link: Link, payload_bytes: int) -> None: ...

    def on_link_writable(self, link: Link, stripe: Any) -> None: ...

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self.error, self.closed = error, True


async def knock(lead: Host, node: bytes = b"k" * 16, **hello: Any) -> tuple[Knocker, Link]:
    knocker = Knocker()
    given = {"purpose": "engine", "role": "member"} | hello
    link = await dial(knocker, *lead.listener.address, Identity(node, "knocker", TOKEN), **given)
    return knocker, link


async def turned_away(lead: Host, **hello: Any) -> P2PCastError | None:
    """Before or after the dialler has noticed that it is through."""
    try:
        knocker, _ = await knock(lead, **hello)
    except P2PCastError as error:
        return error
    await until(lambda: knocker.closed)
    return knocker.error


def member_of(engine: str = "big") -> dict[str, Any]:
    return {"engine": engine, "incarnation": bytes(16)}


HELD = {"version": [0, 1], "still": True, "round": 0}


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([(Type.HELD, HELD)], "MEMBER comes first"),
        ([(Type.REPORTED, {"report": b"\x80", "age_us": 0})], "MEMBER comes first"),
        ([(Type.MEMBER, member_of()), (Type.MEMBER, member_of())], "MEMBER comes first, and once"),
        ([(Type.MEMBER, member_of("other"))], "this peer leads the engine big, not other"),
        ([(Type.MEMBER, member_of()), (Type.REPORTED, {"report": b"\xc1", "age_us": 0})], "not msgpack"),
        ([(Type.MEMBER, member_of()), (Type.REPORTED, {"report": b"\x80", "age_us": 0})], "'engine' is missing"),
        ([(Type.MEMBER, member_of()), (Type.REPORTED, {"report": msgpack.packb(REPORT | {"rank": "1"}), "age_us": 0})], "'rank'"),
        ([(Type.MEMBER, member_of()), (Type.REPORTED, {"report": msgpack.packb(REPORT | {"error": 5}), "age_us": 0})], "'error'"),
    ],
)
async def test_who_breaks_the_rules_is_shown_out_and_nobody_else(hosts, frames, why):
    lead, b = await together(hosts, "b")
    knocker, link = await knock(lead)
    for kind, body in frames:
        link.send(kind, body)
    await until(lambda: knocker.closed)
    assert why in str(knocker.error)
    await until(lambda: set(seen(lead)) == {"b"})
    await b.says(rank=1)
    await until(lambda: lead.reports)
    await asyncio.wait_for(lead.lead.meet(ONE), LIMIT_S)


@pytest.mark.parametrize("hello", [{"role": "child"}, {"role": "peer"}, {"role": "rank"}])
async def test_nobody_but_members_may_sit_down(hosts, hello):
    lead = await hosts("lead", "a", ONE)
    error = await turned_away(lead, **hello)
    assert isinstance(error, RefusedError)
    assert "takes members alone" in str(error)


async def test_a_member_of_another_engine_says_why_it_has_no_lead(hosts):
    lead = await hosts("lead", "a", ONE)
    b = await hosts("member", "b", ONE, engine="other")
    b.member.lead_is(lead.place)
    await until(lambda: "this peer leads the engine big, not other" in str(b.member.status()["error"]))
    assert seen(lead) == {}


async def test_there_are_only_so_many_seats(hosts, monkeypatch):
    monkeypatch.setattr(limits, "MAX_MEMBERS", 2)
    lead = await hosts("lead", "a", ONE)
    early = [await knock(lead, bytes([n]) * 16) for n in (1, 2)]
    assert "has 2 members already" in str(await turned_away(lead))
    early[0][1].close()
    await until(lambda: len(lead.lead._links) == 1)
    knocker, link = await knock(lead)
    link.send(Type.MEMBER, member_of())
    await until(lambda: set(seen(lead)) == {"knocker"})
    assert not knocker.closed


async def test_who_comes_twice_sits_once(hosts):
    lead = await hosts("lead", "a", ONE)
    first, one = await knock(lead)
    one.send(Type.MEMBER, member_of())
    one.send(Type.HELD, HELD)
    await until(lambda: seen(lead) and seen(lead)["knocker"]["staged"])
    _, two = await knock(lead)
    two.send(Type.MEMBER, member_of())
    await until(lambda: first.closed and "here again" in str(first.error))
    assert seen(lead)["knocker"]["staged"] is None
    two.send(Type.HELD, HELD)
    await until(lambda: seen(lead)["knocker"]["staged"] == "0.1")


async def test_an_answer_to_an_older_round_is_none(hosts):
    lead = await hosts("lead", "a", ONE)
    lead.lead.begin()
    knocker, link = await knock(lead)
    link.send(Type.MEMBER, member_of())
    link.send(Type.HELD, HELD)
    await until(lambda: seen(lead) and seen(lead)["knocker"]["staged"])
    assert not seen(lead)["knocker"]["still"]
    stills = lambda: [e.body for e in knocker.said if e.type is Type.STILL]  # noqa: E731
    await until(stills)
    link.send(Type.HELD, HELD | {"round": stills()[-1]["round"]})
    await until(lambda: seen(lead)["knocker"]["still"])
    await lead.move(TWO)
    assert not seen(lead)["knocker"]["still"]


async def test_ranks_beyond_reason_are_not_remembered(hosts):
    lead, b = await together(hosts, "b")
    await b.says(rank=limits.MAX_RANKS)
    await b.says(rank=-1)
    await b.says(rank=3)
    await until(lambda: len(lead.reports) == 3)
    assert seen(lead)["b"]["ranks"] == [3]


# -- the lead's installer


class Inner:
    """An installer that notes when it is called."""

    def __init__(self) -> None:
        self.name = "vllm:x"
        self.committed: Version | None = None
        self.ready = False
        self.commit_needs_shadow = False
        self.calls: list[str] = []

    async def start(self) -> None:
        self.calls.append("start")

    async def check(self) -> None:
        self.calls.append("check")

    async def stage(self, version: Version, shadow: Path) -> None:
        self.calls.append(f"stage {version}")

    async def commit(self, version: Version) -> CommitReport:
        self.calls.append(f"commit {version}")
        self.committed, self.ready = version, True
        return CommitReport(0.0)

    async def audit(self, layout: Any, digests: Any) -> Audit:
        return Audit(ONE, [], [])

    async def close(self) -> None:
        self.calls.append("close")


async def test_an_engine_is_told_to_read_only_when_all_are_there(hosts, tmp_path):
    lead, b = await together(hosts, "b")
    inner = Inner()
    led = LedInstaller(inner, lead.lead)
    await led.start()
    await lead.move(TWO)
    staging = asyncio.create_task(led.stage(TWO, tmp_path))
    await b.says(rank=1)
    assert inner.calls == ["start"]
    await b.move(TWO)
    await asyncio.wait_for(staging, LIMIT_S)
    inner.commit_needs_shadow = True
    await asyncio.wait_for(led.commit(TWO), LIMIT_S)
    await led.check()
    assert (led.name, led.ready, led.committed, led.commit_needs_shadow) == ("vllm:x", True, TWO, True)
    assert (await led.audit(None, {})).version == ONE  # type: ignore[arg-type]
    await led.close()
    assert inner.calls == ["start", "stage 0.2", "commit 0.2", "check", "close"]


async def test_an_engine_that_is_well_is_left_alone_while_a_host_is_away(hosts, tmp_path):
    lead, b = await together(hosts, "b")
    await b.says(rank=1)
    await until(lambda: lead.reports)
    inner = Inner()
    led = LedInstaller(inner, lead.lead)
    await led.stage(ONE, tmp_path)
    await led.commit(ONE)
    await b.down()
    await until(lambda: not seen(lead))
    await lead.move(TWO)
    with pytest.raises(RetryableError, match="member b is gone"):
        await led.stage(TWO, tmp_path)
    assert led.ready
    inner.ready = False
    await asyncio.wait_for(led.stage(TWO, tmp_path), LIMIT_S)  # the engine itself will say whom it misses
    assert inner.calls == ["stage 0.1", "commit 0.1", "stage 0.2"]


async def test_errors_of_versions_off_the_wire_close_the_link(hosts):
    lead = await hosts("lead", "a", ONE)
    knocker, link = await knock(lead)
    link.send(Type.MEMBER, member_of())
    link.send(Type.HELD, HELD | {"version": [0, -1]})
    await until(lambda: knocker.closed)
    assert isinstance(knocker.error, RemoteError | IntegrityError)
