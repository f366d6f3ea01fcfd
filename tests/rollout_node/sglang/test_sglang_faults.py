"""Faults in one rank of a real SGLang server at tensor parallel 2: no answer from mixed weights, no failed request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from real_server import make_model, one_off_connections
from real_sglang import TWO_RANKS, SglangServer, generate
from stored_run import state_of

from p2pcast.ground.errors import P2PCastError, RetryableError
from p2pcast.ground.version import Version
from rollout_node.installers.engine_installer import EngineInstaller
from rollout_node.installers.engine_server import Deadlines
from rollout_node.installers.install_machine import SafePoint
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.install_state import StillRunningError
from rollout_node.installers.installer import Driver
from rollout_node.installers.sglang_server import SglangServer as Routes

pytestmark = pytest.mark.prove  # test_sglang_server.py is the sample
PROMPT = [100, 200, 300, 400]


class Peer:
    def __init__(self, server: SglangServer, run: Any) -> None:
        self.run, self.routes = run, Routes(server.url, deadlines=Deadlines(report=5))
        self.socket = InstallSocket(server.install, run)
        self.choose("step")

    def choose(self, point: SafePoint, driver: Driver = "peer") -> None:
        """Go on with another safe point or driver, as after a restart."""
        run = str(self.run.folder)
        self.installer = EngineInstaller(self.routes, self.socket, run=run, safe_point=point, driver=driver)

    async def install(self) -> None:
        await self.installer.stage(self.run.version, self.run.shadow.path)
        await self.installer.commit(self.run.version)

    async def holds(self, version: Version, digests: dict[int, int]) -> bool:
        """Whether all ranks together hold the version, judged by their live weights."""
        found = await self.installer.audit(self.run.layout, digests)
        return (found.version, found.wrong, found.unknown) == (version, [], [])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    folder = tmp_path_factory.mktemp("sglang")
    (folder / "faults").mkdir()
    environment = TWO_RANKS | {"P2PCAST_TEST_FAULTS": str(folder / "faults")}
    with SglangServer(make_model(folder / "model"), folder, "--tp-size", "2", environment=environment) as found:
        yield found


@pytest.fixture
def fault(server: SglangServer) -> Iterator[Callable[[str], None]]:
    folder = server.install.with_name("faults")
    yield lambda name: (folder / f"{name}.1").touch()
    for path in folder.iterdir():
        path.unlink()


@pytest.fixture
async def peer(server: SglangServer, make_run: Callable[..., Any]) -> AsyncIterator[Peer]:
    """A peer with 0.0 installed."""
    found = Peer(server, make_run(*state_of(server.model)))
    await found.socket.start()
    await found.installer.start()
    await found.install()
    yield found
    await found.installer.close()
    await found.socket.close()


async def answer(server: SglangServer) -> list[int]:
    async with one_off_connections() as http:
        found: list[int] = (await generate(http, server.url, PROMPT))["output_ids"]
        return found


@contextlib.asynccontextmanager
async def asking(server: SglangServer) -> AsyncIterator[None]:
    """Requests one after the other during the block; each of them ends normally."""
    enough, first = asyncio.Event(), asyncio.Event()

    async def ask() -> None:
        while not enough.is_set():
            assert len(await answer(server)) > 0
            first.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(ask())
        await first.wait()
        try:
            yield
        finally:
            enough.set()


def advance(run: Any) -> Version:
    version: Version = run.step(run.version.step + 1, share=0.05, bits=0x0180)
    return version


@pytest.mark.parametrize("what", ["prepare-raises", "commit-raises", "commit-halfway", "commit-writes-nothing"])
async def test_a_failed_rank_leaves_both_at_the_old_version(
    server: SglangServer, peer: Peer, fault: Callable[[str], None], what: str
) -> None:
    old, digests = await answer(server), peer.run.digests
    advance(peer.run)
    fault(what)
    async with asking(server):
        with pytest.raises(P2PCastError):
            await peer.install()
        assert (peer.installer.ready, peer.installer.committed) == (False, Version(0, 0))
        assert not await peer.routes.is_paused()
    assert await peer.holds(Version(0, 0), digests)
    assert await answer(server) == old
    advance(peer.run)
    async with asking(server):
        await peer.install()
    assert peer.installer.ready
    assert await peer.holds(Version(0, 2), peer.run.digests)
    assert await answer(server) != old


async def test_a_false_proof_is_followed_by_a_whole_install(
    server: SglangServer, peer: Peer, fault: Callable[[str], None]
) -> None:
    """The rank has written nothing, says that it holds the version, and cannot take it back."""
    advance(peer.run)
    fault("commit-lies")
    with pytest.raises(P2PCastError):
        await peer.install()
    assert not peer.installer.ready
    await peer.install()
    assert peer.installer.ready
    assert not await peer.routes.is_paused()
    assert await peer.holds(Version(0, 1), peer.run.digests)
    assert len(await answer(server)) > 0
    kinds = [r["install"] for r in peer.run.reports if r["phase"] == "prepare" and r["error"] is None]
    assert kinds[-2:] == ["dense", "dense"]


async def test_wrong_live_weights_are_written_anew(
    server: SglangServer, peer: Peer, fault: Callable[[str], None]
) -> None:
    fault("rot-before-audit")
    assert not await peer.holds(Version(0, 0), peer.run.digests)
    assert not peer.installer.ready
    await peer.install()
    assert await peer.holds(Version(0, 0), peer.run.digests)
    assert len(await answer(server)) > 0


async def test_a_successor_resumes_a_server_that_its_peer_left_paused(server: SglangServer, peer: Peer) -> None:
    await peer.installer._ranks.init(pausing=True)
    await peer.routes.pause(clear_cache=True)
    await peer.installer.close()
    await peer.socket.close()
    successor = Peer(server, peer.run)
    await successor.socket.start()
    await successor.installer.start()
    await successor.install()
    assert not await successor.routes.is_paused()
    assert len(await answer(server)) > 0
    await successor.installer.close()
    await successor.socket.close()


async def test_a_pause_by_another_program_stays(server: SglangServer, peer: Peer) -> None:
    await peer.routes.pause(clear_cache=True)
    advance(peer.run)
    await peer.install()
    assert await peer.routes.is_paused()
    await peer.routes.resume()
    assert len(await answer(server)) > 0
    assert await peer.holds(Version(0, 1), peer.run.digests)


async def test_a_cache_that_cannot_be_dropped_now_only_delays(
    server: SglangServer, peer: Peer, fault: Callable[[str], None]
) -> None:
    old = await answer(server)
    advance(peer.run)
    async with asking(server):
        fault("busy")
        with pytest.raises(StillRunningError, match="cannot drop its cache now"):
            await peer.install()
        assert (peer.installer.ready, peer.installer.committed) == (True, Version(0, 0))
        assert not await peer.routes.is_paused()
        assert await answer(server) == old
        await peer.install()
    assert await peer.holds(Version(0, 1), peer.run.digests)


async def test_another_program_pauses_and_resumes(server: SglangServer, peer: Peer) -> None:
    peer.choose("step", driver="external")
    await peer.installer.stage(peer.run.version, peer.run.shadow.path)
    await peer.routes.pause(clear_cache=True)
    await peer.installer.commit(peer.run.version)
    await peer.routes.resume()
    advance(peer.run)
    running = asyncio.create_task(long_answer(server, 100))
    await peer.installer.stage(peer.run.version, peer.run.shadow.path)
    with pytest.raises(RetryableError, match="not paused"):
        await peer.installer.commit(peer.run.version)
    await peer.installer.stage(peer.run.version, peer.run.shadow.path)
    await peer.routes.pause(clear_cache=True)
    await peer.installer.commit(peer.run.version)
    assert await peer.routes.is_paused()
    await peer.routes.resume()
    assert (await running)[-1] == "0.1"
    assert await long_answer(server, 4) == ["0.1"]
    assert await peer.holds(Version(0, 1), peer.run.digests)


async def long_answer(server: SglangServer, tokens: int) -> list[str]:
    """The versions that made it."""
    async with one_off_connections() as http:
        found = await generate(http, server.url, PROMPT, tokens=tokens)
        return [span["version"] for span in found["meta_info"]["weight_versions"]]


async def test_a_drain_holds_new_requests(server: SglangServer, peer: Peer) -> None:
    peer.choose("drain")
    await peer.install()
    advance(peer.run)
    running = asyncio.create_task(long_answer(server, 200))
    await asyncio.sleep(1)
    switch = asyncio.create_task(peer.install())
    for _ in range(6000):
        if await peer.routes.is_paused():
            break
        await asyncio.sleep(0.01)
    late = asyncio.create_task(long_answer(server, 24))
    gone = asyncio.create_task(long_answer(server, 24))
    await asyncio.sleep(0.5)
    gone.cancel()
    await switch
    assert await running == ["0.0"]
    assert await late == ["0.1"]
    assert not await peer.routes.is_paused()
    assert await peer.holds(Version(0, 1), peer.run.digests)


async def test_a_drain_that_takes_too_long_leaves_the_old_version(server: SglangServer, peer: Peer) -> None:
    peer.routes.deadlines = Deadlines(report=5, drain=0.2)
    peer.choose("drain")
    await peer.install()
    advance(peer.run)
    running = asyncio.create_task(long_answer(server, 200))
    await asyncio.sleep(1)
    with pytest.raises(StillRunningError, match="did not end within"):
        await peer.install()
    assert not await peer.routes.is_paused()
    assert await running == ["0.0"]
    await peer.install()
    assert await long_answer(server, 4) == ["0.1"]


async def test_a_successor_ends_the_drain_of_a_peer_that_died(server: SglangServer, peer: Peer) -> None:
    await peer.installer._ranks.init(pausing=True)
    running = asyncio.create_task(long_answer(server, 200))
    await asyncio.sleep(1)
    drain = asyncio.create_task(peer.routes.drain(60))
    await asyncio.sleep(0.1)
    drain.cancel()
    assert await peer.routes.is_paused()
    peer.choose("drain")
    advance(peer.run)
    await peer.install()
    assert await running == ["0.0"]
    assert await long_answer(server, 4) == ["0.1"]
