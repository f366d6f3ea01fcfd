"""What goes wrong in a real vLLM server at tensor parallel 2, and what must not come of it: an answer from mixed weights, or a
failed request while the server lives. docs/faults.md lists these tests.

Faults are made by ``faults/sitecustomize.py`` in one worker. Every test begins with the same version 0.0 (a run of its own,
so it is written whole) and goes on to the same 0.1 and 0.2; what the engine answers when vLLM itself has loaded these three
says what the answers must be.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from real_server import PROMPTS, TOKENS, TWO_RANKS, Server, choice, complete, load, loaded, make_model

from p2pcast.errors import IntegrityError, P2PCastError, RetryableError
from p2pcast.version import Version
from rollout_node.install_socket import InstallSocket
from rollout_node.installers.base import Audit
from rollout_node.installers.vllm import VllmInstaller
from rollout_node.installers.vllm_server import Deadlines

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PATIENT = Deadlines(init=120)
HASTY = Deadlines(request=3, init=30, prepare=3, commit=3, undo=1, report=3)
"""For a rank that hangs: how long it is waited for before it is given up."""

Truth = list[list[str]]
"""Answers by version and prompt."""

STEPS = ("pause", "commit", "label", "resume")
"""Of a switch by vLLM's routes, each a command of its own."""
FIRST, SECOND, THIRD = (Version(0, step) for step in range(3))


def advance(run: Any) -> Version:
    version: Version = run.step(run.version.step + 1, share=0.05, bits=0x0180)
    return version


class Faults:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, fault: str, rank: int = 1) -> None:
        (self.folder / f"{fault}.{rank}").touch()

    def end(self, fault: str, rank: int = 1) -> None:
        (self.folder / f"{fault}.{rank}").unlink()

    @property
    def pending(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("server")
    (folder / "faults").mkdir()
    paths = [str(Path(__file__).with_name("faults")), os.environ.get("PYTHONPATH", "")]
    environment = {**TWO_RANKS, "P2PCAST_TEST_FAULTS": str(folder / "faults"), "PYTHONPATH": ":".join(filter(None, paths))}
    found = Server(make_model(folder / "model"), folder, "--tensor-parallel-size", "2", environment=environment)
    try:
        found.wait()
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, server: Server, read_versions: Any) -> list[list[str]]:
    """What the engine answers to PROMPTS at 0.0, 0.1 and 0.2, when vLLM itself loads them."""
    folders = read_versions(server.model, tmp_path_factory.mktemp("truth"), advance, 3)
    found = loaded(server, folders, PROMPTS)
    assert len({tuple(texts) for texts in found}) == 3
    return found


@pytest.fixture
def faults(server: Server) -> Iterator[Faults]:
    found = Faults(server.install.with_name("faults"))
    yield found
    for path in found.folder.iterdir():
        path.unlink()


@pytest.fixture
def run(server: Server, make_run: Callable[..., Any], read_state: Callable[..., Any]) -> Any:
    return make_run(*read_state(server.model))


class Peer:
    """The part of a peer that installs; ``vanish`` and another takes its place at the same socket."""

    def __init__(self, server: Server, run: Any) -> None:
        self.server, self.run = server, run
        self.socket = InstallSocket(server.install, run)
        self.installer = VllmInstaller(server.url, self.socket, run=str(run.folder), deadlines=PATIENT)

    async def start(self) -> None:
        await self.socket.start()
        await self.installer.start()

    async def vanish(self) -> None:
        await self.installer.close()
        await self.socket.close()

    async def come_back(self, driver: Literal["peer", "external"] = "peer") -> None:
        """Another process, which remembers nothing."""
        self.socket = InstallSocket(self.server.install, self.run)
        self.installer = VllmInstaller(self.server.url, self.socket, run=str(self.run.folder), driver=driver)
        await self.start()

    def hurry(self, deadlines: Deadlines = HASTY) -> None:
        """The same peer, less patient from now on."""
        self.installer._deadlines = self.installer._server._deadlines = deadlines

    async def install(self) -> None:
        await self.installer.stage(self.run.version, self.run.shadow.path)
        await self.installer.commit(self.run.version)

    async def install_in_the_end(self) -> None:
        """As the peer's runner does: again until it is there."""
        for _ in range(100):
            try:
                return await self.install()
            except RetryableError:
                await asyncio.sleep(0.05)
        raise AssertionError("never installed")

    async def holds(self, version: Version, digests: dict[int, int]) -> bool:
        """All ranks together, as their own weights tell."""
        found: Audit = await self.installer.audit(self.run.layout, digests)
        return (found.version, found.wrong, found.unknown) == (version, [], [])


@pytest.fixture
async def peer(server: Server, run: Any) -> AsyncIterator[Peer]:
    """With 0.0 installed."""
    found = Peer(server, run)
    await found.start()
    await found.install()
    yield found
    await found.vanish()


class Client:
    """Asks one prompt after the other, greedily and one at a time, so that batches don't differ; no answer may fail."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[tuple[str, list[int]]] = []
        self.first = asyncio.Event()
        self._enough = False

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while not self._enough:
                prompt = PROMPTS[len(self.answers) % len(PROMPTS)]
                self.answers.append((prompt, (await choice(http, self.url, prompt))["token_ids"]))
                self.first.set()

    def stop(self) -> None:
        self._enough = True


@contextlib.asynccontextmanager
async def asking(server: Server) -> AsyncIterator[Client]:
    """A client at work meanwhile; afterwards its answers have come."""
    client = Client(server.url)
    async with asyncio.TaskGroup() as group:
        group.create_task(client.run())
        await client.first.wait()
        try:
            yield client
        finally:
            client.stop()


def ids(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


async def unmixed(server: Server, client: Client, *versions: list[str]) -> int:
    """Check that each answer is one version's, or one version's up to a point and from there what the engine, now at the last
    of ``versions``, makes of it. Returns how many were cut by a switch."""
    cut = 0
    async with aiohttp.ClientSession() as http:
        for prompt, answer in client.answers:
            assert len(answer) == TOKENS
            whole = [ids(version[PROMPTS.index(prompt)]) for version in versions]
            if answer in whole:
                continue
            cut += 1
            common = max(next(i for i in range(TOKENS) if answer[i] != w[i]) for w in whole)
            start = [*ids(prompt), *answer[:common]]
            rest = (await choice(http, server.url, start, max_tokens=TOKENS - common))["token_ids"]
            assert answer[common:] == rest, f"{prompt}: {answer} is of no version; {whole}"
    return cut


def installs(run: Any) -> list[str]:
    """What the ranks prepared, two entries a version."""
    return [r["install"] for r in run.reports if r["phase"] == "prepare" and r["error"] is None]


async def paused(server: Server) -> bool:
    async with aiohttp.ClientSession() as http, http.get(server.url + "/is_paused") as response:
        return bool((await response.json())["is_paused"])


async def answers(server: Server) -> list[str]:
    async with aiohttp.ClientSession() as http:
        return [await complete(http, server.url, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("fault", ["prepare-raises", "prepare-hangs", "lost-prepare"])
async def test_a_rank_that_cannot_prepare(server: Server, run: Any, peer: Peer, faults: Faults, truth: Truth, fault: str) -> None:
    """Nothing was written; the engine goes on with the old version, unready, and takes the next one."""
    digests = run.digests
    advance(run)
    faults.make(fault)
    faults.make("hold")
    peer.hurry()
    async with asking(server) as client:
        with pytest.raises(P2PCastError):
            await peer.installer.stage(run.version, run.shadow.path)
        assert (peer.installer.ready, peer.installer.committed) == (False, FIRST)
        assert not await paused(server)
    assert await unmixed(server, client, truth[0]) == 0
    peer.hurry(PATIENT)
    assert await peer.holds(FIRST, digests)
    advance(run)
    async with asking(server) as client:
        await peer.install()  # with the other still hanging
        faults.end("hold")  # it wakes up late, and to no effect
    assert peer.installer.ready
    assert await unmixed(server, client, truth[0], truth[2]) <= 1
    assert await peer.holds(THIRD, run.digests)
    assert await answers(server) == truth[2]
    assert faults.pending == []


@pytest.mark.parametrize("fault", ["commit-raises", "commit-halfway", "commit-writes-nothing", "lost-commit"])
async def test_a_rank_that_cannot_commit(server: Server, run: Any, peer: Peer, faults: Faults, truth: Truth, fault: str) -> None:
    """All ranks take their old values back and say so; the engine goes on with them."""
    digests = run.digests
    advance(run)
    peer.hurry(Deadlines(report=3))
    await peer.installer.stage(run.version, run.shadow.path)
    faults.make(fault)
    async with asking(server) as client:
        with pytest.raises(P2PCastError):
            await peer.installer.commit(run.version)
        assert (peer.installer.ready, peer.installer.committed) == (False, FIRST)
        assert not await paused(server)
    assert await unmixed(server, client, truth[0]) <= 1
    assert await peer.holds(FIRST, digests)
    assert await answers(server) == truth[0]
    advance(run)
    await peer.install()
    assert peer.installer.ready
    assert await peer.holds(THIRD, run.digests)
    assert await answers(server) == truth[2]
    assert faults.pending == []


async def test_a_rank_that_hangs_in_its_commit(server: Server, run: Any, peer: Peer, faults: Faults, truth: Truth) -> None:
    """Nobody can be asked anything: unready, and no answer, until it wakes up; then all ranks end on one version."""
    advance(run)
    await peer.installer.stage(run.version, run.shadow.path)
    peer.hurry()
    faults.make("commit-hangs")
    faults.make("hold")
    async with asking(server) as client:
        with pytest.raises(RetryableError, match="no answer within"):
            await peer.installer.commit(run.version)
        assert (peer.installer.ready, peer.installer.committed) == (False, None)
        before = len(client.answers)
        with pytest.raises(RetryableError, match="no answer within"):
            await peer.installer.check()
        with pytest.raises(RetryableError, match="no answer within"):
            await peer.install()
        assert len(client.answers) == before
        advance(run)
        faults.end("hold")
        peer.hurry(PATIENT)
        await peer.install_in_the_end()
        assert not await paused(server)
    assert peer.installer.ready
    await unmixed(server, client, *truth)
    assert await peer.holds(THIRD, run.digests)
    assert await answers(server) == truth[2]


async def test_a_rank_that_lies(server: Server, run: Any, peer: Peer, faults: Faults, truth: Truth) -> None:
    """It says that it holds the version, has written nothing, and can't take it back: only the whole state helps."""
    advance(run)
    await peer.installer.stage(run.version, run.shadow.path)
    faults.make("commit-lies")
    async with asking(server) as client:
        with pytest.raises(IntegrityError, match=r"rank 1 says that it holds 0\.1"):
            await peer.installer.commit(run.version)
        assert (peer.installer.ready, peer.installer.committed) == (False, None)
        assert await paused(server)
        await peer.install()
        assert not await paused(server)
    assert installs(run)[-2:] == ["dense", "dense"]
    assert await unmixed(server, client, *truth[:2]) <= 1
    assert await peer.holds(SECOND, run.digests)
    assert await answers(server) == truth[1]


@pytest.mark.parametrize("fault", ["rows-rot", "columns-rot", "rot-before-audit"])
async def test_weights_that_change_beside_p2pcast(
    server: Server, run: Any, peer: Peer, faults: Faults, truth: Truth, fault: str
) -> None:
    """Seen by the rank alone, by the sum over ranks when no rank can tell by itself, by an audit: paused, and written whole."""
    digests = run.digests
    advance(run)
    faults.make(fault)
    if fault == "rot-before-audit":
        found = await peer.installer.audit(run.layout, digests)
        assert found.wrong
        assert all("down_proj" in name for name in found.wrong)
        assert (peer.installer.ready, peer.installer.committed) == (False, None)
        assert await paused(server)
    await peer.install()
    assert not await paused(server)
    assert installs(run)[-2:] == ["dense", "dense"]
    assert await peer.holds(SECOND, run.digests)
    assert await answers(server) == truth[1]
    assert faults.pending == []


@pytest.mark.parametrize("last", ["prepare", "switch", "half a switch", *STEPS, "half a commit"])
async def test_a_peer_that_vanishes(server: Server, run: Any, peer: Peer, faults: Faults, truth: Truth, last: str) -> None:
    """``last``: what it had done. Its successor finds the engine as it is, resumes or repairs it, and goes on."""
    advance(run)
    if last.startswith("half"):
        faults.make("commit-raises")
    async with asking(server) as client:
        with gone_after(peer, last):
            await peer.installer.stage(run.version, run.shadow.path)
            if last != "prepare":
                with contextlib.suppress(P2PCastError):
                    await peer.installer.commit(run.version)
        await peer.vanish()
        assert await paused(server) == (last in ("pause", "commit", "label") or last.startswith("half"))
        await peer.come_back()
        await peer.install()
        assert not await paused(server)
        repaired = ["dense"] if last.startswith("half") else []
        expected = ["sparse"] if last in ("prepare", "pause") else repaired
        assert installs(run)[::2] == ["dense", "sparse", *expected]
    assert await unmixed(server, client, *truth[:2]) <= 2
    assert await peer.holds(SECOND, run.digests)
    assert await answers(server) == truth[1]
    advance(run)
    await peer.install()
    assert await peer.holds(THIRD, run.digests)


@contextlib.contextmanager
def gone_after(peer: Peer, last: str) -> Iterator[None]:
    """Nothing more reaches the server once ``last`` is done; after "switch", not even its answer the peer."""
    server = peer.installer._server
    if last in (*STEPS, "half a commit"):
        peer.installer._in_core = lambda ranks: False  # type: ignore[method-assign]
    pause, update, label, resume, finish = server.pause, server.update, server.set_label, server.resume, server.finish

    def then_gone(real: Any) -> Any:
        async def done(*args: Any, **more: Any) -> None:
            await real(*args, **more)
            await server.close()

        return done

    async def commit(info: dict[str, Any], deadline_s: float) -> None:
        if info["phase"] == "abort":
            await server.close()
        await update(info, deadline_s)
        if info["phase"] == "commit" and last == "commit":
            await server.close()

    switch = server.switch

    async def unheard(order: dict[str, Any], deadline_s: float) -> Any:
        await switch(order, deadline_s)
        await server.close()
        raise RetryableError("the peer is gone before it hears the answer")

    server.update = commit  # type: ignore[method-assign]
    if last == "switch":
        server.switch = unheard  # type: ignore[method-assign]
    if last == "pause":
        server.pause = then_gone(pause)  # type: ignore[method-assign]
    if last == "label":
        server.set_label = then_gone(label)  # type: ignore[method-assign]
    if last == "resume":
        server.resume = then_gone(resume)  # type: ignore[method-assign]
    yield
    server.pause, server.update, server.set_label = pause, update, label  # type: ignore[method-assign]
    server.resume, server.finish = resume, finish  # type: ignore[method-assign]


async def order(http: aiohttp.ClientSession, server: Server, what: str) -> None:
    """By somebody who is not p2pcast."""
    async with http.post(f"{server.url}/{what}") as answer:
        assert answer.status == 200, await answer.text()


async def test_a_pause_of_somebody_else_is_left_alone(server: Server, run: Any, peer: Peer, truth: Truth) -> None:
    advance(run)
    async with aiohttp.ClientSession() as http:
        await order(http, server, "pause?mode=keep&clear_cache=false")
        await peer.install()
        assert await paused(server)
        await peer.vanish()
        await peer.come_back()
        await peer.install()
        assert await paused(server)
        await order(http, server, "resume")
    assert await answers(server) == truth[1]


async def test_an_orchestrator_that_pauses_by_itself(server: Server, run: Any, peer: Peer, faults: Faults, truth: Truth) -> None:
    """With ``driver="external"`` nothing is paused or resumed here, not for a dense install and not after a failure."""
    await peer.vanish()
    for path in (run.folder / "patches").iterdir():
        path.unlink()
    run.chain.clear()  # the way to the next version is lost: it is installed whole
    advance(run)
    run.chain.clear()
    await peer.come_back(driver="external")
    installer = peer.installer
    async with aiohttp.ClientSession() as http:
        async with asking(server) as client:
            await installer.stage(run.version, run.shadow.path)
            assert installer.commit_needs_shadow
            assert not await paused(server)
            with pytest.raises(RetryableError, match="not paused"):
                await installer.commit(run.version)
            await order(http, server, "pause?mode=keep&clear_cache=false")
            report = await installer.commit(run.version)
            assert report.dense
            assert (installer.ready, installer.committed, installer.commit_needs_shadow) == (True, SECOND, False)
            assert await paused(server)
            await order(http, server, "resume")
        assert await unmixed(server, client, *truth[:2]) <= 1
        advance(run)
        async with asking(server) as client:
            await installer.stage(run.version, run.shadow.path)
            assert not installer.commit_needs_shadow
            await order(http, server, "pause?mode=keep&clear_cache=false")
            faults.make("commit-raises")
            with pytest.raises(P2PCastError):
                await installer.commit(run.version)
            assert (installer.ready, installer.committed) == (False, SECOND)
            assert await paused(server)
            await installer.stage(run.version, run.shadow.path)
            await installer.commit(run.version)
            assert await paused(server)
            await order(http, server, "resume")
        assert await unmixed(server, client, *truth[1:]) <= 1
    assert await peer.holds(THIRD, run.digests)
    assert await answers(server) == truth[2]


async def test_a_worker_that_dies_and_a_server_that_comes_back_late_and_different(
    server: Server, run: Any, peer: Peer, truth: Truth
) -> None:
    """The last test: its server is a new one, with two data parallel ranks, each of which holds the whole model. That the old
    one is gone, and that the new one holds nothing, is seen by ``check`` alone."""
    installer = peer.installer
    await installer.check()
    assert installer.ready
    await asyncio.to_thread(server.lose_worker)
    with pytest.raises(RetryableError, match="is the server up"):
        await installer.check()
    assert (installer.ready, installer.committed) == (False, FIRST)
    server.restart("--data-parallel-size", "2")
    with pytest.raises(RetryableError):
        await installer.stage(run.version, run.shadow.path)
    late = VllmInstaller(server.url, peer.socket, run=str(run.folder))
    with pytest.raises(RetryableError):  # a peer that starts before its server
        await late.start()
    await late.close()
    await asyncio.to_thread(server.wait)
    await installer.check()
    assert (installer.ready, installer.committed) == (False, None)
    await peer.install()
    assert installer.ready
    assert await peer.holds(FIRST, run.digests)
    began, enough = [asyncio.Event() for _ in range(2)], asyncio.Event()
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
        for number, event in enumerate(began):
            group.create_task(load(http, server.url, f"w{10 + number}", event, enough))
        await asyncio.gather(*(event.wait() for event in began))
        for _ in range(3):
            advance(run)
            await peer.install()
            assert await peer.holds(run.version, run.digests)
        enough.set()
    assert installs(run)[-6:] == ["sparse"] * 6
    assert {r["rank"] for r in run.reports[-2:]} == {0, 1}
    await installer.check()
    assert installer.ready
